"""A model host in NumPy alone: no torch, no transformers. What the host of another library would begin with.

Its model is none that speaks sense: a token's row of numbers goes through two experts of every layer, chosen by the
token, and what comes out are its logits. But it is a model of the container: a bit of any record that is used changes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats.digests import digest
from pagestone.reader.configs import read_config
from pagestone.reader.container import Container
from pagestone.reader.dense import DenseTensors
from pagestone.reader.model import RECURRENT, Context, Loading, bytes_of
from pagestone.reader.store import ExpertStore


@dataclass
class SumModel:
    """See the module's docstring. The state is a row a layer: the sum of what went into it."""

    container: Container
    context: Context
    vocabulary: int
    says: Sequence[int] = ()
    """Tokens that it says whatever it was fed, one after the other: for conversations."""
    notes: list[str] = field(default_factory=lambda: ["sums are no sentences"])
    positions: int | None = 4096
    state_kind: str = RECURRENT
    calls: int = 0

    def forward(self, ids: Sequence[int], state: Any = None, *, every: bool = False) -> tuple[Any, Any]:
        rows = np.cos(np.outer(np.float32(ids) + 1, np.arange(self.hidden)), dtype=np.float32)
        before = {} if state is None else state
        after = {}
        for number in self.container.layers:
            self.context.checkpoint()
            sums = np.cumsum(np.vstack([before.get(number, np.zeros_like(rows[0])), rows]), axis=0)[1:]
            after[number] = sums[-1]
            rows = self._layer(number, ids, sums / (1 + np.abs(sums)))
        logits = np.stack([np.resize(row, self.vocabulary) for row in (rows if every else rows[-1:])])
        if self.calls < len(self.says):
            logits[-1, self.says[self.calls]] = 2 * np.abs(logits).max() + 1
        self.calls += 1
        return logits, after

    @property
    def hidden(self) -> int:
        return next(iter(self.container.layers.values())).header.shape.hidden

    def _layer(self, number: int, ids: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """[n, hidden]: every row and what its two experts make of it, row by row, so that no sum depends on n."""
        observer, count = self.context.observer, len(self.container.layers[number])
        chosen = np.array([[(i + number) % count, (3 * i + number + 1) % count] for i in ids])
        weights = np.float32([0.75, 0.25])
        if observer is not None:
            observer.layer(number, "input", digest(bytes_of(rows)))
            observer.layer(number, "routing", digest(bytes_of(chosen)) + digest(bytes_of(weights)))
        out = rows.copy()
        experts = np.unique(chosen).tolist()
        with self.context.store.step(number, experts) as step:
            for expert in experts:
                at, slot = np.nonzero(chosen == expert)
                with step.lease(expert) as lease:
                    gate, down = lease.expert.gate.decode(), lease.expert.down.decode()
                added = np.stack([weights[k] * (down @ (gate @ rows[n])) for n, k in zip(at, slot, strict=True)])
                if observer is not None:
                    observer.expert(number, expert, digest(bytes_of(added)))
                np.add.at(out, at, added)
        if observer is not None:
            observer.layer(number, "output", digest(bytes_of(out)))
        return out

    def surroundings(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "versions": {}, "threads": {},
            "model": {"host": "sums", "class": "SumModel", "dtype": "float32", "attention": "none"},
        }  # fmt: skip

    def close(self) -> None:
        self.context.store.close()


@dataclass
class Sums:
    """The host of `SumModel`."""

    says: Sequence[int] = ()
    name: str = "sums"
    made: list[SumModel] = field(default_factory=list)

    def require(self) -> None:
        """Nothing is needed."""

    def vocabulary_of(self, root: Path) -> int:
        return int(read_config(root)[1]["vocab_size"])

    def footprint(self, container: Container, how: Loading, longest: int) -> None:
        """Nothing better than what config.json says."""

    def load(
        self, container: Container, store: ExpertStore, how: Loading, dense: DenseTensors | None = None
    ) -> SumModel:
        context = Context(store, how.experts, how.device)
        context.tokens = how.context
        self.made.append(SumModel(container, context, self.vocabulary_of(container.path), self.says))
        return self.made[-1]
