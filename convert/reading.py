"""Byte ranges of the source, read (never mapped) into buffers that are made once."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from pagestone.convert.experts import LayerSource, MatrixSource
from pagestone.convert.publish import machine_errors
from pagestone.formats.dtypes import VIEWS, Array
from pagestone.formats.errors import DataError
from pagestone.formats.layout import PARTS, align_up

ALIGNMENT = 64
"""Bytes: where a range begins in its buffer, so that kernels may use any vector load."""


def page_buffer(nbytes: int) -> memoryview:
    """A page-aligned, zeroed buffer; it takes memory only as it is touched."""
    return memoryview(mmap.mmap(-1, max(1, nbytes)))


class SourceFiles:
    """Open descriptors of the source's shards, shared by all workers (pread has no position)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close every descriptor."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` of a shard; `DataError` if the file ends too early."""
        done = 0
        with machine_errors(self._root / file, "reading the source"):
            with self._lock:
                handle = self._open.get(file)
                if handle is None:
                    handle = self._open[file] = os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC)
            while done < len(target):
                got = os.preadv(handle, [target[done:]], offset + done)
                if got == 0:
                    raise DataError(
                        f"{len(target)} bytes at {offset} expected, the file ended after {done}",
                        code="E0701",
                        file=self._root / file,
                        remedy="the source changed while it was read: check it and run again",
                    )
                done += got


class ExpertReader:
    """Reads one expert at a time into one buffer; one per worker."""

    def __init__(self, files: SourceFiles, nbytes: int) -> None:
        self._files = files
        self._buffer = page_buffer(nbytes)

    @staticmethod
    def needed(source: LayerSource) -> int:
        """Bytes of buffer that the largest expert of this layer takes; element types may differ between experts."""

        def of(expert: int) -> int:
            ranges = {(m.tensor.file, m.offset): m.nbytes for m in (source.matrix(expert, p) for p in PARTS)}
            return sum(align_up(n, ALIGNMENT) for n in ranges.values())

        # experts of a fused tensor are alike
        return of(0) if source.gate_up is not None else max(map(of, range(source.count)))

    def read(self, source: LayerSource, expert: int) -> tuple[dict[str, tuple[Array, MatrixSource]], int]:
        """(array [R, C] and its origin by part, bytes read). The arrays are valid until the next call.

        Neighbouring ranges are one read: gate and up of a fused tensor come in together.
        """
        wanted = {part: source.matrix(expert, part) for part in PARTS}
        places: dict[tuple[str, int], tuple[int, int]] = {}
        position = 0
        for m in wanted.values():
            key = (m.tensor.file, m.offset)
            if key not in places:
                places[key] = (position, m.nbytes)
                position = align_up(position + m.nbytes, ALIGNMENT)
        self._fill(places)
        arrays = {}
        for part, m in wanted.items():
            at, nbytes = places[m.tensor.file, m.offset]
            stored = np.frombuffer(self._buffer[at : at + nbytes], VIEWS[m.tensor.dtype]).reshape(m.stored)
            rows, columns = source.shape.matrix(part)
            matrix = (
                stored
                if m.plain
                else np.ascontiguousarray((stored.T if m.transposed else stored)[m.start :: m.step][:rows])
            )
            arrays[part] = (matrix.reshape(rows, columns), m)
        return arrays, sum(n for _, n in places.values())

    def _fill(self, places: dict[tuple[str, int], tuple[int, int]]) -> None:
        pending: tuple[str, int, int, int] | None = None  # file, offset, buffer position, length
        for (file, offset), (at, nbytes) in places.items():
            joins = pending is not None and (file, offset, at) == (
                pending[0],
                pending[1] + pending[3],
                pending[2] + pending[3],
            )
            if pending is not None and joins:
                pending = (*pending[:3], pending[3] + nbytes)
                continue
            if pending is not None:
                self._read(pending)
            pending = (file, offset, at, nbytes)
        assert pending is not None
        self._read(pending)

    def _read(self, piece: tuple[str, int, int, int]) -> None:
        file, offset, at, nbytes = piece
        self._files.read_into(file, offset, self._buffer[at : at + nbytes])
