"""Containers made once a session, models over them, and the runs that tests compare."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kits.conversions import prepare
from pagestone.formats import encodings
from pagestone.reader.container import Container, open_container
from pagestone.reader.store import StoreOptions, open_store

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny-moe"


@dataclass
class Workshop:
    """Makes containers below `root`, each once."""

    root: Path
    _made: dict[tuple[str, str, str], Path] = field(default_factory=dict)

    def container(self, codec: str, source: Path = TINY, dense: str = "keep") -> Path:
        """The directory of `source` in `codec`, dense matrices in `dense`. Not to be changed: take `copy` for that."""
        key = (codec, str(source), dense)
        if key not in self._made:
            path = self.root / f"{codec}-{len(self._made)}"
            prepare(source, path, encodings.get(codec), workers=2, dense=dense)
            self._made[key] = path
        return self._made[key]

    def copy(self, codec: str, to: Path, dense: str = "keep") -> Path:
        """A container of tiny-moe that a test may damage."""
        shutil.copytree(self.container(codec, dense=dense), to)
        return to


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0] ^ (1 << bit)
        handle.seek(offset)
        handle.write(bytes([byte]))


def model(container: Path | Container, io: str = "direct", budget: int | None = None, **how: Any) -> Any:
    """A `TransformersModel` over a container; `threads` and `verify` go to the store, the rest to the host."""
    from pagestone.reader.hosts import transformers as host

    opened = container if isinstance(container, Container) else open_container(container)
    options = {name: how.pop(name) for name in ("threads", "verify") if name in how}
    store, _ = open_store(opened, StoreOptions(io, budget, **options))
    return host.load(opened, store, **how)


def logits_of(model: Any, ids: Sequence[int], steps: int, choices: Sequence[int] | None = None) -> list[Any]:
    """Logits of prefill (every position) and of `steps` decode steps, greedy or along `choices`."""
    found, state = model.forward(ids, every=True)
    taken = [found]
    for at in range(steps):
        chosen = int(found[-1].argmax()) if choices is None else choices[at]
        found, state = model.forward([chosen], state)
        taken.append(found)
    return taken


def equal(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether all logits have the same bytes."""
    import torch

    return len(one) == len(two) and all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, two, strict=True)
    )


def sequence(length: int, vocabulary: int = 1024, seed: int = 1) -> list[int]:
    """Token ids that look random."""
    return [(seed * 7919 + 31 * i * i + 101 * i) % vocabulary for i in range(length)]


def calm() -> None:
    """One torch thread: tests run beside each other, and products of the same thread count are compared."""
    import torch

    torch.set_num_threads(1)


def command(*words: str | Path) -> int:
    """Run the command line in this process (torch is loaded once); its exit code. Output goes to stdout and stderr."""
    import sys

    from pagestone import cli

    before = sys.argv
    sys.argv = ["pagestone", *map(str, words)]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def pairwise(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two factors stands together at least once; the same rows every time."""
    import itertools

    names = list(factors)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    rows = []
    while open_pairs:
        row: dict[int, int] = {}
        a, i, b, j = min(open_pairs)
        row[a], row[b] = i, j
        for f in range(len(names)):
            if f not in row:
                gains = [
                    sum((min((f, v), (g, w)) + max((f, v), (g, w))) in open_pairs for g, w in row.items())
                    for v in range(len(factors[names[f]]))
                ]
                row[f] = max(range(len(gains)), key=lambda v: (gains[v], -((v + len(rows)) % len(gains))))
        open_pairs -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)}
        rows.append({names[f]: factors[names[f]][row[f]] for f in range(len(names))})
    return rows
