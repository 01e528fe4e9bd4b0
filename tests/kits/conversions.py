"""Conversions in this process, whole and stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagestone.convert import prepare as preparing
from pagestone.convert.outcome import Outcome
from pagestone.convert.plan import Plan, Request, make_plan
from pagestone.formats import encodings
from pagestone.formats.encodings import Codec

ASKED = ("layers", "include_code", "merge_unlisted", "dense")
"""What belongs to the request; all else is how it is carried out."""


class Stopped(Exception):
    """What a test throws into a conversion."""


def planned(source: Path, codec: Codec | str = "int8", *, header_limit: int | None = None, **asked: Any) -> Plan:
    """The plan for a source."""
    limit = {} if header_limit is None else {"header_limit": header_limit}
    return make_plan(Request(source, encodings.get(codec) if isinstance(codec, str) else codec, **asked), **limit)


def prepare(source: Path, output: Path, codec: Codec, *, workers: int, **how: Any) -> Outcome:
    """A conversion as the command line does it: planned, or only published, then carried out."""
    request = Request(source, codec, **{name: how.pop(name) for name in ASKED if name in how})
    todo = preparing.ready(request, output, force=how.get("force", False))
    return todo if isinstance(todo, Outcome) else preparing.prepare(todo, output, workers=workers, **how)


def run(source: Path, output: Path, codec: str = "int8", **how: Any) -> Outcome:
    """A conversion with two workers, if nothing else is asked for."""
    return prepare(source, output, encodings.get(codec), **{"workers": 2, **how})


def stop_after(source: Path, output: Path, share: float, codec: str = "int8", **how: Any) -> None:
    """Run a conversion that stops, as if interrupted, once this share of the source is done."""
    total = sum(f.stat().st_size for f in source.iterdir())
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done >= share * total:
            raise Stopped

    with pytest.raises(Stopped):
        run(source, output, codec, progress=progress, workers=1, **how)
    assert not (output / "manifest.json").exists()
