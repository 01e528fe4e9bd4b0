"""What a token will take: bytes that are multiplied, bytes that are read, and calls, each at a rate that was measured.

    experts = max(bytes missed / disk rate, bytes multiplied / product rate + calls) + one expert a layer
    token   = dense bytes / their rate + state + calls + experts

Records are read ahead while others are multiplied, so the longer of the two counts; the last record of a layer that is
read is multiplied when nothing is left to read. How often an expert is in memory is taken as the share of all records
that the cache holds: that is uniform routing. Models have favourites, so practice is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagestone.formats.text import size_text

LAYER_CALLS, EXPERT_CALLS = 800, 160
"""What the libraries do for a layer, and for an expert beside its products, in small calls of torch.

Measured with torch 2 and transformers 5 on models of the true shapes of Qwen3.6-35B-A3B."""
STATE_PASSES = 12
"""How often a token goes through the recurrent state of linear attention."""
CALL = 1.4e-6
"""Seconds of a small call of torch, where it cannot be measured."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second: of products by the name of their encoding, of plain dense matrices, of the disk (None: not
    known); and the seconds of a small call."""

    products: Mapping[str, float]
    linear: float
    disk: float | None
    call: float = CALL


@dataclass(frozen=True, slots=True)
class Work:
    """What one token takes of a container whose experts are stored as `codec`.

    `layers` have routed experts, `depth` is all of them; `chosen` experts of a layer are used, of `record` bytes each;
    `records` are the bytes of all. `plain` are the bytes of dense matrices as they are, `encoded` of those in the
    encoding `dense`, `state` those of the recurrent state. `cached` are bytes of the cache.
    """

    codec: str
    layers: int
    depth: int
    chosen: int
    record: int
    records: int
    plain: int
    cached: int
    state: int = 0
    encoded: int = 0
    dense: str | None = None

    @property
    def held(self) -> float:
        """The share of all records that is in memory."""
        return min(1.0, self.cached / self.records) if self.records else 1.0

    @property
    def used(self) -> int:
        """Bytes of records that a token multiplies."""
        return self.layers * self.chosen * self.record

    @property
    def missed(self) -> float:
        """Bytes of records that a token reads."""
        return self.used * (1 - self.held)


@dataclass(frozen=True, slots=True)
class Token:
    """Seconds of a token, part by part; `reading` is None where the disk's rate is not known and something is read."""

    work: Work
    dense: float
    calls: float
    multiplying: float
    reading: float | None
    last: float
    """Multiplying one expert of each layer, when its reading was waited for."""

    @property
    def seconds(self) -> float | None:
        if self.reading is None:
            return None
        return self.dense + self.calls + max(self.reading, self.multiplying) + self.last

    @property
    def per_second(self) -> float | None:
        """Tokens a second."""
        return None if self.seconds is None else 1 / self.seconds

    def table(self) -> dict[str, Any]:
        """For --json."""
        work = self.work
        return {
            "codec": work.codec, "cache_bytes": work.cached, "held": work.held, "record_bytes": work.record,
            "bytes_multiplied": work.used, "bytes_missed": round(work.missed), "dense_bytes": work.plain + work.encoded,
            "dense_seconds": self.dense, "call_seconds": self.calls, "product_seconds": self.multiplying,
            "read_seconds": self.reading, "last_seconds": self.last, "seconds": self.seconds,
            "tokens_per_second": self.per_second,
        }  # fmt: skip


def forecast(work: Work, rates: Rates) -> Token:
    """What a token takes at these rates. Raises `KeyError` for an encoding whose products were not measured."""
    dense = (work.plain + STATE_PASSES * work.state) / rates.linear
    if work.encoded and work.dense is not None:
        dense += work.encoded / rates.products[work.dense]
    products = work.used / rates.products[work.codec] + work.layers * work.chosen * EXPERT_CALLS * rates.call
    reading = 0.0 if not work.missed else None if rates.disk is None else work.missed / rates.disk
    last = (1 - work.held) * products / max(1, work.chosen)
    return Token(work, dense, work.depth * LAYER_CALLS * rates.call, products, reading, last)


def speed_text(token: Token) -> str:
    """`12.3 tokens/s`."""
    return "not known" if token.per_second is None else f"{token.per_second:.3g} tokens/s"


def arithmetic(token: Token, rates: Rates) -> list[str]:
    """How a forecast came about, with its numbers, in a few lines."""
    work = token.work
    state = f" + {STATE_PASSES} x {size_text(work.state)} of state" if work.state else ""
    matrices = f"{size_text(work.plain)}{state} at {rate_text(rates.linear)}"
    if work.encoded and work.dense is not None:
        matrices += f", {size_text(work.encoded)} of {work.dense} at {rate_text(rates.products[work.dense])}"
    calls = f"{work.depth} layers x {LAYER_CALLS} calls x {1e6 * rates.call:.2f} us"
    each = f"{work.layers} layers x {work.chosen} experts"
    reading = "not known" if token.reading is None else ms_text(token.reading)
    disk = "a disk not measured" if rates.disk is None else rate_text(rates.disk)
    return [
        f"dense: {matrices} = {ms_text(token.dense)}; {calls} = {ms_text(token.calls)}",
        f"products: {each} x {size_text(work.record)} at {rate_text(rates.products[work.codec])} + "
        f"{EXPERT_CALLS} calls an expert = {ms_text(token.multiplying)}",
        f"reads: {100 * (1 - work.held):.1f} % of {size_text(work.used)} at {disk} = {reading}",
        f"together: dense + calls + the longer of products and reads + the last expert of each layer "
        f"{ms_text(token.last)} = {'not known' if token.seconds is None else ms_text(token.seconds)}: "
        f"{speed_text(token)}",
    ]


def ms_text(seconds: float) -> str:
    """Milliseconds for people."""
    return f"{1000 * seconds:.1f} ms"


def rate_text(rate: float) -> str:
    """A rate for people, in binary units as all sizes are."""
    return f"{size_text(rate)}/s"


# -- what would help --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Help:
    """One change and what it would give."""

    what: str
    token: Token

    def table(self) -> dict[str, Any]:
        """For --json."""
        return {"what": self.what, "tokens_per_second": self.token.per_second}


def faster_disk(work: Work, rates: Rates, times: int = 2) -> Help:
    """The same with a disk `times` as fast."""
    disk = None if rates.disk is None else times * rates.disk
    return Help(f"a disk {times} times as fast", forecast(work, replace(rates, disk=disk)))


def best(now: Token, changes: list[Help], least: float = 1.02) -> list[Help]:
    """The changes that help, the most helpful first."""
    if now.per_second is None:
        return []
    helpful = [h for h in changes if h.token.per_second is not None and h.token.per_second > least * now.per_second]
    return sorted(helpful, key=lambda h: -(h.token.per_second or 0))
