"""Rows of a table in a file, read as they are asked for: of an embedding table a token needs one.

What the whole file was when it was opened is what its rows are later: while the file is hashed, each row of the table
gets a short digest, and a row that is read is compared with its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pagestone.formats.digests import short_digest
from pagestone.formats.dtypes import Array
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layout import PAGE, align_up
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.reader.errors import Closing
from pagestone.reader.files import RESTORE, DirectFile, private_buffer

ROW_CACHE = 8 << 20
"""Bytes of rows that a table keeps in memory, those used last."""
AT_ONCE = 256 << 10
"""Bytes read in one go where several rows lie near each other."""
NEAR = 32 << 10
"""Bytes: a smaller gap between two rows is read too, rather than skipped."""
DIGEST_ITEM = 8
"""Bytes of a row's digest."""


@dataclass(slots=True)
class RowCounters:
    """What reading rows cost: `rows` that were read, `hits` that were there, `bytes_read` of the file."""

    rows: int = 0
    hits: int = 0
    bytes_read: int = 0


class RowTable(Protocol):
    """A table [rows, columns] whose rows come one by one."""

    entry: TensorEntry
    counters: RowCounters

    def read(self, ids: Array) -> Array:
        """uint8 [n, bytes of a row] for int64 ids [n], a fresh array; `RequestError` (E1261) for an id it lacks."""

    def close(self) -> None:
        """Let go of file and memory; may be called twice."""


def row_bytes(entry: TensorEntry) -> int:
    """Bytes of one row of a table."""
    return entry.nbytes // entry.shape[0]


def cached_rows(entry: TensorEntry, room: int = ROW_CACHE) -> int:
    """How many rows are kept in `room` bytes: at least one, at most all."""
    return max(1, min(entry.shape[0], room // row_bytes(entry)))


def memory_of(entry: TensorEntry, room: int = ROW_CACHE) -> int:
    """Bytes that a `FileRows` of this table takes: rows, digests, what is read at once."""
    kept = align_up(cached_rows(entry, room) * row_bytes(entry), PAGE)
    return kept + entry.shape[0] * DIGEST_ITEM + _at_once(entry)


def _at_once(entry: TensorEntry) -> int:
    return max(AT_ONCE, align_up(row_bytes(entry), PAGE) + PAGE)


class RowDigests:
    """The digest of every row of a table, uint64 [rows], made of its bytes as they go by."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.digests = np.empty(entry.shape[0], np.uint64)
        self._row, self._part = 0, bytearray()

    def feed(self, piece: memoryview) -> None:
        """Take the table's next bytes."""
        size, at = row_bytes(self.entry), 0
        if self._part:
            at = size - len(self._part)
            self._part += piece[:at]
            if len(self._part) < size:
                return
            self._add(self._part)
            self._part = bytearray()
        while at + size <= len(piece):
            self._add(piece[at : at + size])
            at += size
        self._part += piece[at:]

    def _add(self, row: memoryview | bytearray) -> None:
        self.digests[self._row] = short_digest(row)
        self._row += 1


class _KeptRows(Closing):
    """A `RowTable` that keeps the rows used last, up to `room` bytes, in memory. For many threads."""

    def __init__(self, entry: TensorEntry, place: Path, room: int) -> None:
        self.entry, self.counters = entry, RowCounters()
        self._place, self._lock = place, threading.Lock()
        self._size = row_bytes(entry)
        count = cached_rows(entry, room)
        self._kept = np.frombuffer(private_buffer(count * self._size), np.uint8)[: count * self._size]
        self._kept = self._kept.reshape(count, self._size)
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Where in `_kept` a row is, the one used longest ago first."""

    def read(self, ids: Array) -> Array:
        """See `RowTable.read`. A row that is asked for twice is read once. `ClosedError` after `close`."""
        rows, first, place = np.unique(ids, return_index=True, return_inverse=True)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < self.entry.shape[0]:
            wrong = int(rows[0]) if rows[0] < 0 else int(rows[-1])
            raise RequestError(
                f"token ids below {self.entry.shape[0]} expected, found {wrong}",
                code="E1261",
                file=self._place,
                tensor=self.entry.name,
                remedy="give the tokenizer this model was made with",
            )
        out = np.empty((len(ids), self._size), np.uint8)
        with self._lock:
            self._check_open()
            missing = [*self._missing(rows.tolist(), first, out)]
            self._load(missing, out)
            self.counters.rows += len(missing)
        again = np.flatnonzero(first[place] != np.arange(len(ids)))
        out[again] = out[first[place[again]]]
        return out

    def _missing(self, rows: list[int], first: Array, out: Array) -> Iterator[tuple[int, int]]:
        """(row, where it goes in `out`) of the rows that are not in memory; those that are, are taken."""
        for row, to in zip(rows, first.tolist(), strict=True):
            slot = self._slots.get(row)
            if slot is None:
                yield row, to
                continue
            self._slots.move_to_end(row)
            self.counters.hits += 1
            out[to] = self._kept[slot]

    def _load(self, missing: list[tuple[int, int]], out: Array) -> None:
        """Put the rows that are missing, ascending, into `out`, and keep them."""
        raise NotImplementedError

    def _keep(self, row: int, data: Array) -> None:
        full = len(self._slots) == len(self._kept)
        slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
        self._kept[slot] = data
        self._slots[row] = slot

    def close(self) -> None:
        """Let the memory go; may be called twice."""
        with self._lock:
            super().close()
            self._slots.clear()
            self._kept = self._kept[:0]


class FileRows(_KeptRows):
    """A `RowTable` over a tensor of a file, past the page cache where that can be; `digests` as `RowDigests` has them.

    Raises `DataError` (E1258) for a row that is not what it was, `MachineError` (E1203) where reading fails.
    """

    def __init__(
        self, path: Path, entry: TensorEntry, digests: Array | None, *, direct: bool = True, room: int = ROW_CACHE
    ) -> None:
        super().__init__(entry, path, room)
        self._digests = digests
        self._buffer = memoryview(private_buffer(_at_once(entry)))
        self._file = DirectFile(path, direct=direct)

    @property
    def mode(self) -> str:
        """ "direct" or "buffered"."""
        return self._file.mode

    def _load(self, missing: list[tuple[int, int]], out: Array) -> None:
        for group in self._near(missing):
            self._fetch(group, out)

    def _near(self, missing: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Rows in groups that are read at once: their pages fit the buffer, and little lies between them."""
        group: list[tuple[int, int]] = []
        for row, to in missing:
            if group:
                gap = (row - group[-1][0] - 1) * self._size
                if gap > NEAR or self._end(row) - self._start(group[0][0]) > len(self._buffer):
                    yield group
                    group = []
            group.append((row, to))
        if group:
            yield group

    def _start(self, row: int) -> int:
        """The page in which a row begins, in bytes of the file."""
        return (self.entry.offset + row * self._size) // PAGE * PAGE

    def _end(self, row: int) -> int:
        return align_up(self.entry.offset + (row + 1) * self._size, PAGE)

    def _fetch(self, group: list[tuple[int, int]], out: Array) -> None:
        start, end = self._start(group[0][0]), self._end(group[-1][0])
        got = self._file.read_into(self._buffer[: end - start], start)
        self.counters.bytes_read += got
        for row, to in group:
            at = self.entry.offset + row * self._size - start
            data = self._buffer[at : at + self._size]
            self._check(row, data if at + self._size <= got else None)
            out[to] = np.frombuffer(data, np.uint8)
            self._keep(row, out[to])

    def _check(self, row: int, data: memoryview | None) -> None:
        """Refuse a row that is not the one the file had when it was hashed; None is one behind the file's end."""
        if data is None:
            found = "the end of the file"
        elif self._digests is None or (computed := short_digest(data)) == int(self._digests[row]):
            return
        else:
            found = f"{computed:016x}"
        wanted = "its bytes" if self._digests is None else f"xxh3 {int(self._digests[row]):016x}"
        raise DataError(
            f"row {row}: {wanted} expected, as when the container was opened, found {found}",
            code="E1258",
            file=self._place,
            tensor=self.entry.name,
            remedy=RESTORE,
        )

    def close(self) -> None:
        """Close the file and let the memory go; may be called twice."""
        super().close()
        self._file.close()
        self._buffer = self._buffer[:0]


class MadeRows(_KeptRows):
    """A `RowTable` of a container that is on no disk: `make` fills a buffer with one row."""

    def __init__(
        self, place: Path, entry: TensorEntry, make: Callable[[int, memoryview], None], *, room: int = ROW_CACHE
    ) -> None:
        super().__init__(entry, place, room)
        self._make = make

    def _load(self, missing: list[tuple[int, int]], out: Array) -> None:
        for row, to in missing:
            self._make(row, memoryview(out[to]))
            self.counters.bytes_read += self._size
            self._keep(row, out[to])
