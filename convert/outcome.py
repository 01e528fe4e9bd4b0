"""What a conversion did, for whoever tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagestone.formats.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a conversion did: `state` is "converted", "already there" or "finished publishing"."""

    state: str
    manifest: Manifest
    warnings: tuple[str, ...]
    notes: dict[str, int] = field(default_factory=dict)
    """Matrices of a quantised source by what became of them, see `convert.encode`."""
