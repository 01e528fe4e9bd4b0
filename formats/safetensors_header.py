"""The safetensors header, read strictly: one function holds every safety property.

A file is `u64 little-endian header length`, that many bytes of JSON, then data. A header is accepted only if the
ranges it names cover the data exactly, without hole or overlap, and match type and shape
(specs/container.md, "Reading a safetensors file").
"""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import dataclass
from typing import Any

from pagestone.formats import strict_json
from pagestone.formats.dtypes import ITEM_BITS
from pagestone.formats.errors import DataError, LayoutError
from pagestone.formats.storage import AnyPlace, place_of
from pagestone.formats.strict_json import brief

MAX_HEADER = 100_000_000
"""Bytes: the limit the safetensors library itself enforces."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: `offset` is absolute in the file, `nbytes` its length, both in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: entries in order of offset, the string metadata, and where the data begins."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def what_is_it(start: bytes) -> str | None:
    """A name for well-known files that are no safetensors, judged by their first bytes; None if unknown."""
    if start.startswith(b"version https://git-lfs"):
        return "a git-LFS pointer (the weights were never downloaded)"
    if start[:64].lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page (a failed download)"
    if start.startswith(b"PK\x03\x04"):
        return "a zip archive (a PyTorch checkpoint renamed)"
    if start.startswith((b"\x80\x02", b"\x80\x04")):
        return "a Python pickle (an old PyTorch checkpoint)"
    if start.startswith(b"GGUF"):
        return "a GGUF file"
    return None


def read_header(path: AnyPlace) -> Header:
    """The checked header of a safetensors file.

    Raises `DataError` (E02xx) for anything that is not a complete, hole-free safetensors file, naming the file, the
    tensor where there is one, what was expected and what was found. `OSError` passes through.
    """
    file = place_of(path)
    return parse_header(*read_text(file), file)


def read_text(path: AnyPlace) -> tuple[bytes, int]:
    """The bytes of a header after its length, unchecked, and the size of the file.

    Raises `DataError` (E0201 to E0203) where there are none; `OSError` passes through.
    """
    file = place_of(path)
    with file.storage:
        size = file.size()
        start = file.read(0, 256)
        # a header begins with '{'; its length may look like anything (640 bytes: the first bytes of a pickle)
        kind = None if start[8:9] == b"{" else what_is_it(start)
        remedy = "download the file again and compare its size with the publisher's"
        if kind is not None:
            raise DataError(f"a safetensors file expected, found {kind}", code="E0201", file=file, remedy=remedy)
        if size < 8:
            raise DataError(f"at least 8 bytes expected, found {size}", code="E0202", file=file, remedy=remedy)
        (length,) = struct.unpack("<Q", start[:8])
        if length > MAX_HEADER or 8 + length > size:
            raise DataError(
                f"a header of {length} bytes announced, the file has {size} bytes (limit {MAX_HEADER})",
                code="E0203",
                file=file,
                remedy=remedy,
            )
        return file.read(8, length), size


def parse_header(raw: bytes, file_size: int, file: str | os.PathLike[str]) -> Header:
    """Check the JSON bytes of a header against the size of its file; see `read_header`."""

    try:
        if not raw.startswith(b"{"):
            raise ValueError("it does not begin with '{'")
        table = strict_json.loads(raw)
    except ValueError as error:  # bad UTF-8, bad JSON, duplicate keys, NUL padding, numbers without end
        raise _malformed(file, f"the header is not the JSON safetensors prescribes: {error}", "E0204") from None
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _malformed(file, "__metadata__ must map strings to strings", "E0205")
    data_start = 8 + len(raw)
    alike: dict[tuple[int, ...], tuple[int, ...]] = {}
    entries = [_entry(file, name, entry, data_start, alike) for name, entry in table.items()]
    entries.sort(key=lambda e: (e.offset, e.nbytes))
    position = data_start
    for item in entries:
        if item.offset != position:
            word = "overlaps the tensor before it" if item.offset < position else "leaves a hole before it"
            raise _malformed(
                file, f"data at byte {position} expected, found {item.offset}: it {word}", "E0211", item.name
            )
        position += item.nbytes
    if position != file_size:
        raise _malformed(file, f"{position} bytes expected from the header, the file has {file_size}", "E0212")
    return Header(tuple(entries), metadata, data_start, file_size)


def _malformed(file: str | os.PathLike[str], message: str, code: str, tensor: str | None = None) -> DataError:
    remedy = "download or make the file again: it is damaged or was not written by a safetensors library"
    return DataError(message, code=code, file=file, tensor=tensor, remedy=remedy)


def _entry(
    file: str | os.PathLike[str], name: str, entry: Any, data_start: int, alike: dict[tuple[int, ...], tuple[int, ...]]
) -> TensorEntry:
    """One entry of a header's table, checked by itself: where it lies among the others is not.

    Thousands of tensors are alike: they share the words for their type and, found in `alike`, their shape.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _malformed(file, "an entry must have dtype, shape and data_offsets only", "E0206", name)
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise _malformed(file, f"a known element type expected, found {brief(dtype)}", "E0207", name)
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**63 for d in shape):
        raise _malformed(file, f"a shape of non-negative integers expected, found {brief(shape)}", "E0208", name)
    if not isinstance(span, list) or len(span) != 2 or not all(type(o) is int for o in span):
        raise _malformed(file, f"two offsets expected, found {brief(span)}", "E0209", name)
    begin, end = span
    bits = _bits_of(dtype, shape)
    if not 0 <= begin <= end or bits != 8 * (end - begin):
        takes = "more than any file holds" if bits is None else f"{bits} bits" if bits % 8 else f"{bits // 8} bytes"
        words = f"{dtype} {brief(shape)} takes {takes}, data_offsets {brief(span)} span {end - begin}"
        raise _malformed(file, words, "E0210", name)
    side = tuple(shape)
    return TensorEntry(name, sys.intern(dtype), alike.setdefault(side, side), data_start + begin, end - begin)


def _bits_of(dtype: str, shape: list[int]) -> int | None:
    """Bits a tensor takes; None if they are more than any file holds.

    The product is given up as soon as it is that large: of many long sides it would be a number without end.
    """
    elements = 0 if 0 in shape else 1
    for side in shape if elements else ():
        elements *= side
        if elements >= 2**63:
            return None
    return elements * ITEM_BITS[dtype]


def build_header(
    entries: list[tuple[str, str, tuple[int, ...], int, int]],
    metadata: dict[str, str],
    alignment: int,
    limit: int = MAX_HEADER,
) -> bytes:
    """The first bytes of a safetensors file: length, JSON, spaces so that data begins at a multiple of `alignment`.

    `entries` are (name, dtype, shape, begin, end) with offsets from the start of the data; their order is kept. Raises
    `LayoutError` if the JSON with its spaces is longer than `limit` bytes: no reader would take the file.
    """
    table: dict[str, Any] = {"__metadata__": metadata}
    for name, dtype, shape, begin, end in entries:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return framed(text, len(entries), alignment, limit)


def framed(text: bytes, tensors: int, alignment: int, limit: int = MAX_HEADER) -> bytes:
    """`build_header` of the JSON of so many tensors: its length before it, spaces after it."""
    text += b" " * (-(8 + len(text)) % alignment)
    if len(text) > limit:
        raise LayoutError(
            f"a header of at most {limit} bytes expected, {tensors} tensors take {len(text)}",
            code="E0610",
            remedy="give the tensors shorter names, or the layer fewer experts",
        )
    return struct.pack("<Q", len(text)) + text
