"""What a Parquet file's footer and page headers announce, read before a library allocates for it.

Parquet libraries believe page headers: a few kilobytes may unfold to gigabytes. Footers and headers are structures of
Thrift's compact protocol. What is read here is refused unless it is understood completely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAGIC = b"PAR1"
DEPTH = 12
"""Structures and lists within one another: in a footer there are seven."""
BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(3, 13)

Struct = dict[tuple[int, int], Any]
"""Fields by (number, type): a reader must not see in a field of another type what the library does not see."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group: how many values, and where its pages lie in the file."""

    values: int
    begin: int
    nbytes: int


def footer_bytes(raw: bytes) -> int:
    """The length of a Parquet file's footer; `ValueError` if the file has none."""
    length = int.from_bytes(raw[-8:-4], "little")
    if len(raw) < 12 or raw[:4] != MAGIC or raw[-4:] != MAGIC or length > len(raw) - 12:
        raise ValueError("no Parquet file: magic bytes or footer are missing")
    return length


def row_groups(raw: bytes) -> list[tuple[int, list[Chunk]]]:
    """Rows and columns of every row group, by the footer; `ValueError` if it is not understood."""
    end = len(raw) - 8
    footer = _Compact(raw, end - footer_bytes(raw), end).struct(0)
    groups = []
    for group in _structs(footer, 4):
        chunks = [_chunk(column) for column in _structs(group, 1)]
        groups.append((_whole(group, 3, I64), chunks))
    return groups


def _chunk(column: Struct) -> Chunk:
    meta = column.get((3, STRUCT))
    if meta is None or (1, BINARY) in column:
        raise ValueError("a column within this file expected, found one elsewhere")
    begin = _whole(meta, 9, I64)
    if 0 < meta.get((11, I64), 0) < begin:  # the dictionary comes before the data
        begin = meta[11, I64]
    return Chunk(_whole(meta, 5, I64), begin, _whole(meta, 7, I64))


def unfolded_bytes(raw: bytes, chunk: Chunk) -> int:
    """Bytes that all pages of a chunk take when they are decompressed.

    `ValueError` if headers are not understood, lie outside, or announce more values than the chunk's.
    """
    if not len(MAGIC) <= chunk.begin <= chunk.begin + chunk.nbytes <= len(raw) - 8:
        raise ValueError(f"pages within {len(raw)} bytes expected, found {chunk}")
    reader, total = _Compact(raw, chunk.begin, chunk.begin + chunk.nbytes), 0
    while reader.at < reader.end:
        header = reader.struct(0)
        kinds = [header[n, STRUCT] for n in (5, 7, 8) if (n, STRUCT) in header]  # data, dictionary, data of version 2
        if len(kinds) != 1 or _whole(kinds[0], 1, I32) > chunk.values:
            raise ValueError(f"the header of a page of at most {chunk.values} values expected, found {header}")
        total += _whole(header, 2, I32)
        reader.take(_whole(header, 3, I32))
    return total


def _whole(table: Struct, field: int, kind: int) -> int:
    found = table.get((field, kind))
    if type(found) is not int or found < 0:
        raise ValueError(f"a size expected in field {field}, found {found}")
    return found


def _structs(table: Struct, field: int) -> list[Struct]:
    found = table.get((field, LIST))
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"a list of structures expected in field {field}")
    return found


class _Compact:
    """Reads structures of Thrift's compact protocol from raw[at:end]; whatever does not fit is a `ValueError`."""

    def __init__(self, raw: bytes, at: int, end: int) -> None:
        self._raw, self.at, self.end = raw, at, end

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > self.end - self.at:
            raise ValueError(f"{nbytes} bytes at {self.at} expected, {self.end - self.at} are left")
        self.at += nbytes
        return self._raw[self.at - nbytes : self.at]

    def number(self) -> int:
        """An unsigned integer, seven bits a byte, at most 64."""
        found = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError(f"an integer of more than 64 bits before byte {self.at}")

    def signed(self) -> int:
        """An integer whose sign is its lowest bit."""
        found = self.number()
        return found >> 1 ^ -(found & 1)

    def struct(self, depth: int) -> Struct:
        """All fields of a structure, each number once."""
        if depth > DEPTH:
            raise ValueError(f"structures nested more than {DEPTH} deep")
        found: Struct = {}
        field, seen = 0, set()
        while byte := self.take(1)[0]:
            field = field + (byte >> 4) if byte >> 4 else self.signed()
            if field in seen:
                raise ValueError(f"field {field} stands twice")
            seen.add(field)
            # true and false are types of their own, without a value
            found[field, byte & 15] = None if byte & 15 <= 2 else self._value(byte & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (I16, I32, I64):
            return self.signed()
        if kind == BINARY:
            return self.take(self.number())
        if kind in (LIST, SET):
            return self._items(depth + 1)
        if kind == STRUCT:
            return self.struct(depth + 1)
        size = {1: 1, 2: 1, BYTE: 1, DOUBLE: 8}.get(kind)
        if size is None:
            raise ValueError(f"type {kind} before byte {self.at} is none that Parquet has")
        return self.take(size)

    def _items(self, depth: int) -> list[Any]:
        if depth > DEPTH:
            raise ValueError(f"lists nested more than {DEPTH} deep")
        head = self.take(1)[0]
        return [self._value(head & 15, depth) for _ in range(self.number() if head >> 4 == 15 else head >> 4)]
