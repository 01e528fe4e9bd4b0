"""A size from its words, and the budget of experts where none is given.

A budget bounds the buffers of expert records, nothing else. Beside it a running model holds its dense tensors and, with
native experts of a codec that has sidecars (int8), every row sum: E * (2 * intermediate + hidden) * 4 bytes a layer,
read once when the container is opened. The default budget leaves room for both.
"""

from __future__ import annotations

import re

from pagestone.formats.errors import RequestError
from pagestone.formats.text import clipped
from pagestone.reader.container import Container
from pagestone.reader.memory import available_memory

UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgt", 1)
    for tail, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
"""Bytes of every unit: `2GiB` and `2G` are binary, `2GB` is decimal."""
MOST_BYTES = 1 << 62
"""No budget is as large: more is no size of a memory, and no file offset."""
SHARE = 2
"""By default experts get 1/SHARE of the memory that is free once the dense tensors are in."""


def parse_size(text: str, option: str = "--budget") -> int:
    """Bytes of `2GiB`, `512M`, `1.5 GB` or `1048576`; raises `RequestError` (E1241) that names the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    nbytes = float(match[1]) * UNITS.get(match[2], 0) if match else 0.0  # infinite for hundreds of digits
    if not 1 <= nbytes < MOST_BYTES:
        raise RequestError(
            f"{option}: a size above 0 such as 2GiB, 512MB or 1048576 expected, found {clipped(text, 40)!r}",
            code="E1241",
            remedy=f"write {option} 4GiB, for example, or bytes in digits ({option} {4 << 30})",
        )
    return int(nbytes)


def all_records(container: Container) -> int:
    """Bytes of every record of the decoder's layers."""
    return sum(layer.stride * len(layer) for layer in container.layers.values())


def largest_record(container: Container) -> int:
    """Bytes of the largest record: the least budget there is."""
    return max(layer.stride for layer in container.layers.values())


def row_sum_bytes(container: Container) -> int:
    """Bytes of the row sums of the decoder's layers: what native experts hold beside their budget."""
    return sum(t.nbytes for x in container.layers.values() if x.entry.sidecar for t in x.header.sidecar_tensors())


def default_budget(container: Container, other_bytes: int) -> int:
    """Bytes for experts if no budget is given: half of what is free beside `other_bytes`, at most all records.

    `other_bytes` are those of the dense tensors and of row sums.
    """
    every, least = all_records(container), largest_record(container)
    free = available_memory()
    if free is None:
        return every
    return max(least, min(every, max(0, free - other_bytes) // SHARE))
