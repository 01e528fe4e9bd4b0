"""Audits of logits as files: what ran where, a hash a step, and traces that tell where two runs part.

The audit is JSON; its traces, a line an event, are `.jsonl.zst` beside it. `recorded` reads both.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats import native
from pagestone.formats.surroundings import machine
from pagestone.reader.container import Container
from pagestone.reader.files import ANEW
from pagestone.reader.model import NATIVE, Model
from pagestone.validate.sides import Difference, Prompt, Side

VERSION = 1
EQUAL, DIFFERENT, NOT_COMPARABLE = "equal", "different", "not comparable"


def surroundings(model: Model) -> dict[str, Any]:
    """Everything the bytes of logits may depend on: CPU, builds, versions, thread counts, and how the model ran.

    Also `products`, which they must not depend on: the instruction set of native products and their threads.
    """
    from pagestone import __version__

    experts, host = model.context.experts, model.surroundings()
    natively = NATIVE in (experts, host["model"].get("linears"))
    ours = {"pagestone": __version__, "python": platform.python_version(), "numpy": np.__version__}
    threads = model.context.threads or host["threads"].get("torch", 1)
    return {
        "machine": machine(),
        "versions": ours | dict(host["versions"]),
        "threads": dict(host["threads"]),
        "model": dict(host["model"]) | {"experts": experts},
        "products": {
            "isa": native.isa() if natively else None, "threads": threads if natively else None
        },
    }  # fmt: skip


COMPARED = (
    ("machine", "cpu"), ("machine", "architecture"), ("versions", "torch"), ("versions", "torch_build"),
    ("versions", "transformers"), ("threads", "torch"), ("model", "host"), ("model", "class"), ("model", "dtype"),
    ("model", "attention"), ("model", "prefill_piece"), ("model", "experts"), ("model", "linears"),
)  # fmt: skip
"""What must be equal for hashes to be comparable; None where a host has no such thing."""
OF_HOSTS = {pair for pair in COMPARED if pair[0] in ("versions", "threads")}
"""Of `COMPARED`, what only those hosts depend on that use these libraries."""
OF_CONTAINERS = {("model", "linears")}
"""Of `COMPARED`, what is there only for some containers: those that have dense matrices in an encoding."""


def differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """What keeps two runs from being comparable, a phrase each."""
    phrases = []
    for group, key in COMPARED:
        ours, theirs = here[group].get(key), there[group].get(key)
        if ours != theirs:
            phrases.append(f"{group} {key} is {ours} here, {theirs} there")
    return phrases


@dataclass(slots=True)
class Audit:
    """The outcome of one comparison, and what an audit file holds of it."""

    result: str
    container: Container
    surroundings: dict[str, Any]
    prompts: list[Prompt]
    reference: Side | None
    """The side that does not stream; None when an audit file stands for it."""
    streamed: Side | None
    difference: Difference | None = None
    unproven: list[str] = field(default_factory=list)
    incomparable: list[str] = field(default_factory=list)
    source: bool = False
    against: str | None = None
    readers: int = 0

    @property
    def exit_code(self) -> int:
        """0 equal and proven; 1 different or unproven; 2 not comparable."""
        return 2 if self.result == NOT_COMPARABLE else int(self.result == DIFFERENT or bool(self.unproven))

    def table(self, traces: str | None, lines: int | None = None) -> dict[str, Any]:
        """The audit file; `lines` is how many its traces have.

        Hashes are those of the streamed side; of a failed one, the resident's stand beside them.
        """
        manifest = self.container.manifest
        ran = self.streamed.steps if self.streamed else []
        resident = self.reference.steps if self.reference else None
        listed = []
        for number, prompt in enumerate(self.prompts[: len(ran)]):
            entry: dict[str, Any] = {
                "name": prompt.name, "ids": list(prompt.ids), "choices": [s.choice for s in (resident or ran)[number]],
                "sha256": [s.sha256 for s in (resident or ran)[number]],
            }  # fmt: skip
            if resident is not None and self.result == DIFFERENT:
                entry["streamed_sha256"] = [s.sha256 for s in ran[number]]
            listed.append(entry)
        return {
            "audit": "pagestone logits", "version": VERSION, "result": self.result, "unproven": self.unproven,
            "not_comparable": self.incomparable, "difference": asdict(self.difference) if self.difference else None,
            "container": {
                "id": self.container.container_id, "codec": manifest.codec, "parameters": dict(manifest.parameters)
            },
            **self.surroundings, "reader_threads": self.readers,
            "resident_side": self._other(),
            "resident": self.reference.table() if self.reference else None,
            "streamed": self.streamed.table() if self.streamed else None,
            "prompts": listed, "traces": traces, "trace_lines": lines,
        }  # fmt: skip

    def _other(self) -> str:
        """What stands for the resident side: another run, or where its records come from."""
        anew = self.reference is not None and self.reference.mode == ANEW
        records = "encoded from the source" if self.source else "the container's records"
        return self.against or records + (", anew for each use" if anew else "")

    def write(self, path: Path) -> Path:
        """Write the audit file and its traces beside it; the path of the traces."""
        traces = traces_beside(path)
        lines = _write_traces(traces, self._events())
        path.write_text(json.dumps(self.table(traces.name, lines), indent=1) + "\n", encoding="utf-8")
        return traces

    def _events(self) -> Iterator[dict[str, Any]]:
        """The reference side's events, each with the streamed side's digest where it differs."""
        streamed = self.streamed.steps if self.streamed else []
        base = self.reference.steps if self.reference else streamed
        for number, (one, two) in enumerate(zip(base, streamed, strict=True)):
            for at, (a, b) in enumerate(zip(one, two, strict=True)):
                for x, y in zip(a.events, b.events, strict=False):
                    line = {"prompt": number, "step": at} | asdict(x)
                    yield line if x == y else line | {"streamed": asdict(y)}


def traces_beside(path: Path) -> Path:
    """Where the traces of an audit at `path` go."""
    return path.with_name(path.name.removesuffix(".json") + ".traces.jsonl.zst")


def _write_traces(path: Path, lines: Iterator[dict[str, Any]]) -> int:
    """Write the lines; how many they were."""
    import zstandard

    count = 0
    with path.open("wb") as handle, zstandard.ZstdCompressor(level=9).stream_writer(handle) as out:
        for line in lines:
            out.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            count += 1
    return count
