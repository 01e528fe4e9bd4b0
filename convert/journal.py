"""The journal of a conversion: which job it is, and which files are finished, a JSON line each.

The journal lies in the work directory, and what lies there is foreign: a line counts only if its own digest fits, and
only for a file that this job makes. A finished file is still what the journal says if its stamp is the recorded one.
That costs nothing, and no write can leave the change time as it was. Where it is another (the work directory was
copied, or somebody wrote there) the file is read, and its digest decides.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagestone.convert.machine import Stamp, is_regular, named, open_own, stamp_of
from pagestone.formats.digests import Hasher, digest, layer_digest

PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file that is complete and durable in the work directory.

    `xxh3` is hexadecimal. Layer files also carry the digest of every record and, for each expert in order, squared
    error and squared norm of gate, up and down. `notes` counts what the user must be told about the data. `stamp` is
    that of the file once it was durable.
    """

    name: str
    nbytes: int
    xxh3: str
    records: tuple[str, ...] = ()
    stats: tuple[tuple[float, ...], ...] = ()
    notes: dict[str, int] = field(default_factory=dict)
    stamp: Stamp = (0, 0, 0)


def to_line(entry: FinishedFile) -> bytes:
    """One line of the journal."""
    table = asdict(entry)
    return json.dumps(table | {"digest": _own_digest(table)}).encode() + b"\n"


def _own_digest(table: Mapping[str, Any]) -> str:
    return digest(json.dumps(table, sort_keys=True).encode()).hex()


def from_lines(raw: bytes) -> tuple[dict[str, Any] | None, list[FinishedFile]]:
    """(the job, its finished files) of a journal; ValueError, KeyError, TypeError or RecursionError if it is none.

    A crash may cut the last line short: whatever is not a whole line was not recorded.
    """
    lines = [dict(json.loads(line)) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
    return (lines[0] if lines else None), [_entry(line) for line in lines[1:]]


def _entry(table: dict[str, Any]) -> FinishedFile:
    if table.pop("digest") != _own_digest(table):
        raise ValueError("the line's own digest is another")
    stamp = tuple(table["stamp"])
    if len(stamp) != 3:
        raise ValueError("a stamp of three numbers expected")
    return FinishedFile(
        table["name"],
        table["nbytes"],
        table["xxh3"],
        tuple(table["records"]),
        tuple(tuple(s) for s in table["stats"]),
        dict(table["notes"]),
        stamp,
    )


def file_digest(path: Path, experts: int) -> bytes:
    """The digest of a file as the manifest has it; `experts` is the number of records of a layer file, else 0."""
    with named(path), open(open_own(path, os.O_RDONLY), "rb") as handle:  # noqa: PTH123
        if experts:
            size = os.fstat(handle.fileno()).st_size
            head = handle.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            stride, rest = divmod(size - 8 - length, experts)
            if stride < 1 or rest:
                return b""  # not a file of so many records
            head += handle.read(length)
            return layer_digest(head, [_hash(handle, stride) for _ in range(experts)])
        return _hash(handle, os.fstat(handle.fileno()).st_size)


def _hash(handle: Any, nbytes: int) -> bytes:
    """The digest of the next `nbytes`, or of what there is of them."""
    hasher = Hasher()
    while nbytes > 0 and (piece := handle.read(min(PIECE, nbytes))):
        hasher.update(piece)
        nbytes -= len(piece)
    return hasher.digest()


def is_intact(path: Path, entry: FinishedFile) -> bool:
    """Whether a finished file still holds what was recorded: by its stamp, or else by its digest."""
    if not is_regular(path):
        return False
    stamp = stamp_of(path.lstat())
    if stamp == entry.stamp:
        return True
    return stamp[0] == entry.nbytes and file_digest(path, len(entry.records)).hex() == entry.xxh3
