"""How much memory this process may still take: what the kernel has, or less where a control group allows less.

A limit holds for all groups below the one that states it, so every group from this process's own up to the root of the
mount is asked: `memory.max` and `memory.high` of version 2, `memory.limit_in_bytes` of version 1. What counts as used
is the group's usage without its inactive file pages, which the kernel drops as soon as somebody needs them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process may still take; None if nothing tells. `root` is where /proc and /sys are, for tests."""
    return min((n for n in (group_room(root), _free(root)) if n is not None), default=None)


def group_room(root: Path = Path("/")) -> int | None:
    """Bytes that control groups leave this process; None where none limits it."""
    return min((room for group in _groups(root) for room in group.rooms()), default=None)


def _free(root: Path) -> int | None:
    """The kernel's estimate for the whole machine."""
    match = re.search(r"(?m)^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"))
    if match is not None:
        return int(match[1]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


@dataclass(frozen=True, slots=True)
class _Group:
    """One control group: its directory, the version of its hierarchy, and whether the process itself is in it."""

    place: Path
    version: int
    own: bool

    def rooms(self) -> Iterator[int]:
        """Bytes left below each of its limits."""
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names if (limit := _number(self.place / name)) is not None]
        used = _number(self.place / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if used is None or (self.version == 1 and not self.own and _number(self.place / "memory.use_hierarchy") == 0):
            return  # a group of version 1 may leave those below it alone
        stat = dict(re.findall(r"(?m)^(\w+) (\d+)$", _text(self.place / "memory.stat")))
        idle = int(stat.get("total_inactive_file" if self.version == 1 else "inactive_file", 0))
        yield from (max(0, limit - max(0, used - idle)) for limit in limits)


def _groups(root: Path) -> Iterator[_Group]:
    """The groups of this process that may bound its memory, from its own to the root of each hierarchy's mount."""
    own: dict[int, PurePosixPath] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers or "memory" in controllers.split(","):
            own[1 if controllers else 2] = PurePosixPath(group)
    for version, path in own.items():
        mounts = list(_mounts(root, version))
        inside = [(top, place) for top, place in mounts if path.is_relative_to(top) and ".." not in path.parts]
        if inside:
            top, place = max(inside, key=lambda pair: len(pair[0].parts))
            parts = path.relative_to(top).parts
        elif mounts:  # the process is not below what is mounted here; what is mounted is all there is to see
            (_, place), parts = mounts[0], ()
        else:
            continue
        for depth in range(len(parts), -1, -1):
            yield _Group(place.joinpath(*parts[:depth]), version, depth == len(parts))


def _mounts(root: Path, version: int) -> Iterator[tuple[PurePosixPath, Path]]:
    """(group at its top, where it is mounted) of every mount of the memory hierarchy of a version."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and "memory" in kind[2].split(","):
            top, place = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[at]) for at in (3, 4))
            yield PurePosixPath(top), root / place.lstrip("/")


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", for another word, and where there is no such file."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# -- this process -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of this process that are in memory now, and the most that ever were."""

    now: int
    peak: int


def process_memory(root: Path = Path("/")) -> ProcessMemory | None:
    """What the kernel counts of this process (VmRSS, VmHWM); None where it does not say."""
    found = dict(re.findall(r"(?m)^(VmRSS|VmHWM):\s*(\d+) kB", _text(root / "proc/self/status")))
    if found.keys() < {"VmRSS", "VmHWM"}:
        return None
    return ProcessMemory(int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024)
