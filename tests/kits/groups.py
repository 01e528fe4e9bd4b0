"""Control groups of a test's own, where this user may make one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A group of version 1 below this process's, with this limit in bytes and no swap; `OSError` where none can be."""
    lines = Path("/proc/self/cgroup").read_text().splitlines() if MEMORY.is_dir() else []
    own = next((x.split(":", 2)[2] for x in lines if "memory" in x.split(":")[1].split(",")), "/")
    made = MEMORY / own.lstrip("/") / f"pagestone-test-{os.getpid()}"
    made.mkdir()
    try:
        (made / "memory.limit_in_bytes").write_text(str(limit))
        yield made
    finally:
        _remove(made)


def _remove(made: Path) -> None:
    """The kernel may count a process that has just ended for a moment longer."""
    for _ in range(50):
        try:
            made.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
    made.rmdir()


def joining(group: Path) -> str:
    """Python code with which a process goes into a group."""
    return f"import os, pathlib; pathlib.Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
