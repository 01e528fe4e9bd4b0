"""Leases: the only way to look at an expert, and what using experts has cost.

A model's layer asks a store for the experts its tokens chose: that is a *step*. Within it each expert is *leased* while
it is multiplied, and only a lease gives views. Leases end with their `with` block and never outlive their step; views
never outlive their lease. Breaking a rule is a `LeaseError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from pagestone.formats.dtypes import Array
from pagestone.formats.errors import PagestoneError
from pagestone.reader.container import NOTHING, Beside, Expert, Layer
from pagestone.reader.errors import expert_number


class LeaseError(PagestoneError):
    """The rules of leasing were broken: a fault of the program that uses the cache, not of the container (exit 1)."""


class Lease:
    """The right to look at one expert: `expert` holds its views until the lease is released.

    Leases come from `Step.lease` and are released by leaving their `with` block. Views must not be kept: a view that is
    still alive at the release is a `LeaseError` (E1211), so no view can show what a buffer holds later.
    """

    __slots__ = ("_done", "_expert", "_root", "layer", "number")

    def __init__(
        self,
        layer: Layer,
        number: int,
        memory: Any,
        offset: int,
        done: Callable[[Lease, bool], None],
        beside: Beside = NOTHING,
    ) -> None:
        self.layer, self.number = layer, number
        self._root: Array | None = np.frombuffer(memory, np.uint8, layer.stride, offset)
        self._expert: Expert | None = layer.expert_in(self._root, number, beside)
        self._done: Callable[[Lease, bool], None] | None = done

    @property
    def expert(self) -> Expert:
        """The views; `LeaseError` (E1212) once the lease was released."""
        if self._expert is None:
            raise self._error("views need a lease, and this one was released", "E1212", "take them within the lease")
        return self._expert

    def _error(self, message: str, code: str, remedy: str) -> LeaseError:
        return LeaseError(f"expert {self.number}: {message}", code=code, file=self.layer.path, remedy=remedy)

    def close(self) -> bool:
        """End the lease and give the memory back; True if a view of it is still alive. Does nothing twice."""
        if self._root is None or self._done is None:
            return False
        alive, done = weakref.ref(self._root), self._done
        self._expert = self._root = self._done = None
        kept = alive() is not None
        done(self, kept)
        return kept

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # while an error is on its way, its traceback keeps views alive: the memory is then not used again
        if self.close() and kind is None:
            raise self._error("a view outlives its lease", "E1211", "copy what is needed later, keep no views")


class Step(Protocol):
    """The experts one layer needs now. A context manager; see `ExpertStore.step`."""

    def lease(self, expert: int) -> Lease:
        """Lease one of the step's experts, waiting for its bytes; `LeaseError` for any other."""

    def __enter__(self) -> Step: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OpenLeases:
    """The leases of one step: what is handed out must have come back when the step ends."""

    def __init__(self, layer: Layer, experts: Iterable[int]) -> None:
        self.layer = layer
        self.experts = frozenset(experts)
        self.open: list[Lease] = []
        self.ended = False

    def check(self, expert: int) -> int:
        """The number as a Python int; refuse what this step may not lease, and what is no number of an expert."""
        expert = expert_number(expert, len(self.layer), self.layer.path)
        if self.ended or expert not in self.experts:
            why = "the step has ended" if self.ended else "it was not asked for when the step began"
            raise LeaseError(
                f"expert {expert} cannot be leased: {why}",
                code="E1213",
                file=self.layer.path,
                remedy="name every expert when the step begins, and lease within it",
            )
        return expert

    def end(self, failed: bool) -> LeaseError | None:
        """Close every lease still open; the error to raise if there was one and nothing else failed."""
        self.ended = True
        kept = list(self.open)
        for lease in kept:
            lease.close()
        if not kept or failed:
            return None
        return LeaseError(
            f"expert {kept[0].number}: its lease outlives its step ({len(kept)} open)",
            code="E1210",
            file=self.layer.path,
            remedy="release every lease before the step ends",
        )


@dataclass(slots=True)
class Counters:
    """What happened in one layer. Bytes and seconds; `wait_seconds` is time the computation stood still for reads."""

    hits: int = 0
    misses: int = 0
    transient: int = 0
    """Misses that were served by the transient buffer."""
    bytes_read: int = 0
    """Bytes asked of the file system by reads into buffers."""
    bytes_mapped: int = 0
    """Bytes of records used through a map; the page cache may have held them."""
    wait_seconds: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def hit_rate(self) -> float:
        """Share of experts that were in memory when they were asked for; 0 if none was."""
        return self.hits / max(1, self.hits + self.misses)

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(slots=True)
class Totals:
    """Counters of a whole run, by layer and summed, for reports."""

    layers: dict[int, Counters] = field(default_factory=dict)

    @classmethod
    def of(cls, counters: dict[int, Counters]) -> Totals:
        """A copy of the counters as they stand."""
        return cls({number: c + Counters() for number, c in counters.items()})

    @property
    def total(self) -> Counters:
        return sum(self.layers.values(), Counters())
