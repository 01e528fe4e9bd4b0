"""The journal of a conversion: which job it is, and which files are finished, a JSON line each.

The journal lies in the work directory, and what lies there is foreign: a line counts only if its own digest fits, and
only for a file that this job makes. A finished file is still what the journal says if its stamp is the recorded one.
That costs nothing, and no write can leave the change time as it was. Where it is another (the work directory was
copied, or somebody wrote there) the file is read, and its digest decides.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagestone.convert.machine import is_regular, own_file
from pagestone.formats import strict_json
from pagestone.formats.digests import Hasher, digest, layer_digest
from pagestone.formats.storage import Place, Stamp, hash_file, stamp_of
from pagestone.formats.strict_json import brief


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file that is complete and durable in the work directory.

    `xxh3` is hexadecimal. Layer files also carry the digest of every record and, for each expert in order, squared
    error and squared norm of gate, up and down; files of encoded dense matrices these two sums of each matrix in order
    (`matrices`). `notes` counts what the user must be told about the data. `stamp` is
    that of the file once it was durable.
    """

    name: str
    nbytes: int
    xxh3: str
    records: tuple[str, ...] = ()
    stats: tuple[tuple[float, ...], ...] = ()
    notes: dict[str, int] = field(default_factory=dict)
    stamp: Stamp = (0, 0, 0)
    matrices: tuple[tuple[float, ...], ...] = ()


def to_line(entry: FinishedFile) -> bytes:
    """One line of the journal."""
    table = asdict(entry)
    return json.dumps(table | {"digest": _own_digest(table)}).encode() + b"\n"


def _own_digest(table: Mapping[str, Any]) -> str:
    return digest(json.dumps(table, sort_keys=True).encode()).hex()


def from_lines(raw: bytes) -> tuple[dict[str, Any] | None, list[FinishedFile]]:
    """(the job, its finished files) of a journal; ValueError, KeyError or TypeError if it is none.

    A crash may cut the last line short: whatever is not a whole line was not recorded.
    """
    lines = [_object(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
    return (lines[0] if lines else None), [_entry(line) for line in lines[1:]]


def _object(line: bytes) -> dict[str, Any]:
    table = strict_json.loads(line)
    if not isinstance(table, dict):
        raise TypeError("an object a line expected")
    return table


def _entry(table: dict[str, Any]) -> FinishedFile:
    if table.pop("digest") != _own_digest(table):
        raise ValueError("the line's own digest is another")
    stats = [_typed(sums, list) for sums in _typed(table["stats"], list)]
    if len(stats) != len(_typed(table["records"], list)) or any(len(sums) != 6 for sums in stats):
        raise ValueError("six sums for every record expected")
    matrices = [_typed(sums, list) for sums in _typed(table["matrices"], list)]
    if any(len(sums) != 2 for sums in matrices):
        raise ValueError("two sums for every dense matrix expected")
    return FinishedFile(
        _typed(table["name"], str),
        _typed(table["nbytes"], int),
        _hex(table["xxh3"]),
        tuple(_hex(record) for record in table["records"]),
        tuple(tuple(_typed(value, float) for value in sums) for sums in stats),
        {name: _typed(count, int) for name, count in _typed(table["notes"], dict).items()},
        _stamp(table["stamp"]),
        tuple(tuple(_typed(value, float) for value in sums) for sums in matrices),
    )


def _typed(value: Any, kind: type) -> Any:
    """`value`; TypeError if it is of another type (true is no integer)."""
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, found {brief(value)}")
    return value


def _hex(value: Any) -> str:
    if not re.fullmatch("[0-9a-f]{32}", _typed(value, str)):
        raise ValueError(f"32 hexadecimal digits expected, found {brief(value)}")
    return str(value)


def _stamp(value: Any) -> Stamp:
    first, second, third = (_typed(number, int) for number in _typed(value, list))
    return first, second, third


def file_digest(path: Path, experts: int) -> bytes:
    """The digest of a file as the manifest has it; `experts` is the number of records of a layer file, else 0."""
    file = own_file(path)
    with file.storage:
        if not experts:
            return _hash(file, 0, None)
        size = file.size()
        head = file.read(0, 8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        start = 8 + length
        stride, rest = divmod(size - start, experts)
        if stride < 1 or rest:
            return b""  # not a file of so many records
        head += file.read(8, length)
        return layer_digest(head, [_hash(file, start + e * stride, stride) for e in range(experts)])


def _hash(file: Place, offset: int, nbytes: int | None) -> bytes:
    hasher = Hasher()
    hash_file(file.read_into, hasher, offset, nbytes)
    return hasher.digest()


def is_intact(path: Path, entry: FinishedFile) -> bool:
    """Whether a finished file still holds what was recorded: by its stamp, or else by its digest."""
    if not is_regular(path):
        return False
    stamp = stamp_of(path.lstat())
    if stamp == entry.stamp:
        return True
    return stamp[0] == entry.nbytes and file_digest(path, len(entry.records)).hex() == entry.xxh3
