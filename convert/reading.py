"""Byte ranges of the source, read (never mapped) into buffers that are made once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from pagestone.convert.errors import machine_errors
from pagestone.convert.sources import ArraySource, LayerSource, MatrixSource, Range
from pagestone.formats.dtypes import VIEWS, Array
from pagestone.formats.errors import DataError
from pagestone.formats.layout import PARTS, align_up
from pagestone.formats.storage import AnyPlace, page_buffer, place_of

ALIGNMENT = 64
"""Bytes: where a range begins in its buffer, so that kernels may use any vector load."""


class SourceFiles:
    """Byte ranges of a source for whom it must not be short; files stay open until it is closed. For many threads."""

    def __init__(self, source: AnyPlace) -> None:
        self._root = place_of(source, once=True)
        self._open = ExitStack()
        self._open.enter_context(self._root.storage)

    def close(self) -> None:
        """Let go of the source's files, and let the page cache do so; may be called twice."""
        self._open.close()

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` of a file; `DataError` (E0701) if the file ends too early."""
        at = self._root / file
        with machine_errors(at, "reading the source"):
            got = at.read_into(target, offset)
        if got < len(target):
            raise DataError(
                f"{len(target)} bytes at {offset} expected, the file ended after {got}",
                code="E0701",
                file=at,
                remedy="the source changed while it was read: check it and run again",
            )


@dataclass(frozen=True, slots=True)
class LoadedMatrix:
    """One matrix in memory: `stored` are its arrays by role, contiguous; its bias [R]."""

    origin: MatrixSource
    stored: dict[str, Array]
    bias: Array | None


def load(m: MatrixSource, array: Callable[[Range], Array]) -> LoadedMatrix:
    """Take a matrix out of what was read: oriented, de-interleaved, the rows of a window cut out."""
    stored = {role: _taken(source, array) for role, source in m.stored.items()}
    return LoadedMatrix(m, stored, None if m.bias is None else _taken(m.bias, array))


def _taken(source: ArraySource, array: Callable[[Range], Array]) -> Array:
    found = array(source.at)
    return np.ascontiguousarray((found.T if source.transposed else found)[source.rows])


class ExpertReader:
    """Reads one expert at a time into one buffer; one per worker."""

    def __init__(self, files: SourceFiles, nbytes: int) -> None:
        self._files = files
        self._buffer = memoryview(page_buffer(nbytes))

    @staticmethod
    def needed(source: LayerSource) -> int:
        """Bytes of buffer that the largest expert of this layer takes; element types may differ between experts."""

        def of(expert: int) -> int:
            ranges = {(r.tensor.file, r.offset): r.nbytes for p in PARTS for r in source.matrix(expert, p).ranges}
            return sum(align_up(n, ALIGNMENT) for n in ranges.values())

        # experts of a fused tensor are alike
        return of(0) if source.is_fused else max(map(of, range(source.count)))

    def read(self, source: LayerSource, expert: int) -> tuple[dict[str, LoadedMatrix], int]:
        """(the expert's matrices by part, bytes read). The arrays are valid until the next call.

        Neighbouring ranges are one read: gate and up of a fused tensor come in together.
        """
        wanted = {part: source.matrix(expert, part) for part in PARTS}
        places: dict[tuple[str, int], tuple[int, int]] = {}
        position = 0
        for r in (r for m in wanted.values() for r in m.ranges):
            key = (r.tensor.file, r.offset)
            if key not in places:
                places[key] = (position, r.nbytes)
                position = align_up(position + r.nbytes, ALIGNMENT)
        self._fill(places)

        def array(r: Range) -> Array:
            at, nbytes = places[r.tensor.file, r.offset]
            return np.frombuffer(self._buffer[at : at + nbytes], VIEWS[r.tensor.dtype]).reshape(r.shape)

        return {part: load(m, array) for part, m in wanted.items()}, sum(n for _, n in places.values())

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
