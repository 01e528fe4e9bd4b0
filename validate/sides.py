"""One side of an audit of logits: a model run over prompts, a hash of every step's logits, a trace of its layers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagestone.reader.leases import Totals
from pagestone.reader.model import Model, bytes_of, greedy

WHAT = ("input", "routing", "expert", "output")
"""Kinds of events, as a layer has them: the second is a digest of ids and one of weights."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids fed at once, then `steps` tokens one by one."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Bytes that were seen in one layer of one step: `what` is one of `WHAT`."""

    layer: int
    what: str
    expert: int | None
    digest: str


@dataclass(slots=True)
class ForwardPass:
    """One forward pass: the ids fed, SHA-256 of its logits (row-major, the model's dtype), the greedy choice."""

    fed: int
    sha256: str
    choice: int
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Side:
    """What one side did, by prompt and step; counters are those of its store."""

    mode: str
    steps: list[list[ForwardPass]]
    seconds: float
    budget: int | None = None
    peak_bytes: int | None = None
    open_leases: int = 0
    counters: Totals = field(default_factory=Totals)

    def table(self) -> dict[str, Any]:
        """For the audit; hashes stand with the prompts there."""
        return {
            "mode": self.mode, "seconds": round(self.seconds, 3), "budget": self.budget, "peak_bytes": self.peak_bytes,
            "open_leases": self.open_leases, "total": self.counters.total.table(),
            "layers": {str(n): c.table() for n, c in self.counters.layers.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two sides first part: layer and expert are None where the logits alone tell."""

    prompt: str
    step: int
    layer: int | None
    what: str
    expert: int | None

    def text(self) -> str:
        """A sentence's beginning."""
        phase = "prefill" if self.step == 0 else f"decode step {self.step}"
        place = "after the last layer's experts" if self.layer is None else f"layer {self.layer}, "
        if self.what == "untraced":
            place = "no traces lie beside the audit to tell the layer"
        if self.layer is not None:
            place += {
                "input": "before its experts (attention, norms or the embedding)",
                "routing": "in the router",
                "expert": f"expert {self.expert}",
                "output": "in the sum of its experts",
            }[self.what]
        return f"prompt {self.prompt!r}, {phase}: {place}"


class _Recorder:
    """Collects the events of the step at hand."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def layer(self, layer: int, what: str, digest: bytes) -> None:
        self.events.append(Event(layer, what, None, digest.hex()))

    def expert(self, layer: int, expert: int, digest: bytes) -> None:
        self.events.append(Event(layer, "expert", expert, digest.hex()))

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken


def run_side(
    model: Model, prompts: Sequence[Prompt], steps: int, choices: Sequence[Sequence[int]] | None = None
) -> Side:
    """Feed every prompt and then `steps` tokens: the greedy ones, or the other side's `choices`."""
    recorder = _Recorder()
    model.context.observer = recorder
    begun = time.perf_counter()
    done: list[list[ForwardPass]] = []
    try:
        for number, prompt in enumerate(prompts):
            taken: list[ForwardPass] = []
            pending, state = list(prompt.ids), None
            for at in range(steps + 1):
                logits, state = model.forward(pending, state, every=True)
                sha = hashlib.sha256(bytes_of(logits)).hexdigest()
                choice = greedy(logits)
                taken.append(ForwardPass(len(pending), sha, choice, recorder.take()))
                pending = [choice if choices is None else choices[number][at]]
            done.append(taken)
    finally:
        model.context.observer = None
    store = model.context.store
    return Side(
        mode=store.mode,
        steps=done,
        seconds=time.perf_counter() - begun,
        budget=getattr(store, "budget", None),
        peak_bytes=getattr(store, "peak_bytes", None),
        open_leases=store.open_leases,
        counters=Totals.of(store.counters),
    )


def first_place(one: Sequence[Sequence[ForwardPass]], two: Sequence[Sequence[ForwardPass]]) -> tuple[int, int] | None:
    """(prompt, step) of the first step whose logits differ; None if all are equal."""
    for number, (first, second) in enumerate(zip(one, two, strict=True)):
        for at, (a, b) in enumerate(zip(first, second, strict=True)):
            if a.sha256 != b.sha256:
                return number, at
    return None


def first_difference(
    prompts: Sequence[Prompt], one: Sequence[Sequence[ForwardPass]], two: Sequence[Sequence[ForwardPass]]
) -> Difference | None:
    """The first step whose logits differ, and the first event of it that does; None if all logits are equal."""
    place = first_place(one, two)
    if place is None:
        return None
    name, at = prompts[place[0]].name, place[1]
    a, b = (side[place[0]][at].events for side in (one, two))
    for x, y in zip(a, b, strict=False):
        if x != y:
            return Difference(name, at, x.layer, x.what, x.expert)
    return Difference(name, at, None, "logits" if a and b else "untraced", None)


def proof(side: Side) -> list[str]:
    """Why a side's counters do not prove that it streamed; empty if they do."""
    total, doubts = side.counters.total, []
    if not total.bytes_read + total.bytes_mapped:
        doubts.append("no bytes were read")
    if side.open_leases:
        doubts.append(f"{side.open_leases} leases are open at the end")
    if side.budget is not None and (side.peak_bytes or 0) > side.budget:
        doubts.append(f"{side.peak_bytes:,} bytes were held, the budget is {side.budget:,}")
    return doubts
