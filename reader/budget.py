"""Sizes in words, and the budget of experts where none is given.

A budget bounds the buffers of expert records, nothing else. Beside it a running model holds its dense tensors and, with
native experts of a codec that has sidecars (int8), every row sum: E * (2 * intermediate + hidden) * 4 bytes a layer,
read once when the container is opened. The default budget leaves room for both.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from pagestone.formats.dtypes import item_size
from pagestone.formats.errors import RequestError
from pagestone.reader.container import Container

UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgt", 1)
    for tail, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
"""Bytes of every unit: `2GiB` and `2G` are binary, `2GB` is decimal."""
SHARE = 2
"""By default experts get 1/SHARE of the memory that is free once the dense tensors are in."""


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `512M`, `1.5 GB` or `1048576`; raises `RequestError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise RequestError(
            f"a size such as 2GiB, 512MB or 1048576 expected, found {text!r}", code="E1241", remedy="give --budget so"
        )
    return int(float(match[1]) * UNITS[match[2]])


def size_text(nbytes: int | float) -> str:
    """A size for people: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def all_records(container: Container) -> int:
    """Bytes of every record of the decoder's layers."""
    return sum(layer.stride * len(layer) for layer in container.layers.values())


def largest_record(container: Container) -> int:
    """Bytes of the largest record: the least budget there is."""
    return max(layer.stride for layer in container.layers.values())


def row_sum_bytes(container: Container) -> int:
    """Bytes of the row sums of the decoder's layers: what native experts hold beside their budget."""
    tensors = (t for x in container.layers.values() if x.entry.sidecar for t in x.file.sidecar_tensors())
    return sum(math.prod(shape) * item_size(dtype) for _, dtype, shape in tensors)


def available_memory() -> int | None:
    """Bytes this process may still take: the kernel's estimate, or less if a control group says so; None if unknown."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pages = getattr(os, "sysconf_names", {}).get("SC_AVPHYS_PAGES")
        if pages is not None:
            found.append(os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass  # no control group of version 2 here, or one without a limit
    return min(found) if found else None


def default_budget(container: Container, other_bytes: int) -> int:
    """Bytes for experts if no budget is given: half of what is free beside `other_bytes`, at most all records.

    `other_bytes` are those of the dense tensors and of row sums.
    """
    every, least = all_records(container), largest_record(container)
    free = available_memory()
    if free is None:
        return every
    return max(least, min(every, max(0, free - other_bytes) // SHARE))
