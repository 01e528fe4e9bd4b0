"""Conversions in this process, whole and stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagestone.convert.prepare import Outcome, prepare
from pagestone.formats import encodings


class Stopped(Exception):
    """What a test throws into a conversion."""


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
