"""How the system holds memory of this process, as /proc/self/smaps tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pagestone.formats.dtypes import Array

SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True)
class Held:
    """One mapping: whether it is private, the file it is of ("0": none), and its flags ("hg": of huge pages)."""

    private: bool
    file: str
    flags: tuple[str, ...]


def mapping_of(array: Array) -> Held:
    """The mapping that holds an array; skips the test where nothing tells."""
    if not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("no table of maps, or no huge pages")
    head: list[str] | None = None
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, end = (int(word, 16) for word in words[0].split("-"))
            head = words if first <= array.ctypes.data < end else None
        elif head is not None and words[0] == "VmFlags:":
            return Held(head[1][3] == "p", head[4], tuple(words[1:]))
    raise AssertionError(f"no mapping at {array.ctypes.data:x}")
