"""Encoded dense matrices of a container: what they hold, and what the source encodes to.

Everything is read a band of rows at a time: the head of a large vocabulary is half a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pagestone.convert.matrices import EncodedMatrix, MatricesTarget, MatrixEncoder
from pagestone.convert.reading import SourceFiles
from pagestone.formats.dense_matrices import DenseEncoding, DenseMatrix, PlacedMatrix, bands, read_matrices
from pagestone.formats.dtypes import VIEWS, Array
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import PagestoneError
from pagestone.formats.layout import CODES, MatrixRecord, Slot
from pagestone.formats.manifest import MANIFEST, Manifest
from pagestone.formats.storage import PIECE, Place, place_of
from pagestone.validate.checks import Context, Progress, read_exactly
from pagestone.validate.findings import ERROR, Finding, guarded, of_error

Placed = list[PlacedMatrix]


def open_matrices(root: Path, manifest: Manifest, refused: Callable[[Finding], None]) -> Placed:
    """Where every encoded matrix lies, in order; files whose tables are wrong go to `refused` and are left out."""
    found: Placed = []
    for file in () if manifest.dense is None else manifest.dense.files:
        try:
            found += read_matrices(place_of(root / file, once=True), manifest.dense, file)  # type: ignore[arg-type]
        except (PagestoneError, OSError) as error:
            refused(of_error(error, file))
    return found


def check_matrices(
    root: Path, dense: DenseEncoding, placed: Placed, progress: Progress, workers: int
) -> Iterator[Finding]:
    """Codes, scales, sums and pads of every encoded matrix."""
    encoding = dense.encoding
    with (home := place_of(root, once=True)).storage:

        def one(matrix: PlacedMatrix) -> Iterator[Finding]:
            return _contents(home / matrix.matrix.file, encoding, matrix, progress)

        yield from _each(one, placed, workers)


def _each(check: Callable[[PlacedMatrix], Iterable[Finding]], placed: Placed, workers: int) -> Iterator[Finding]:
    """What a check finds of each matrix, in order; an error ends that of one matrix only."""

    def all_of(matrix: PlacedMatrix) -> list[Finding]:
        return list(guarded(check(matrix), matrix.matrix.file))

    with ThreadPoolExecutor(workers) as pool:
        for findings in pool.map(all_of, placed):
            yield from findings


def _contents(file: Place, encoding: Codec, placed: PlacedMatrix, progress: Progress) -> Iterator[Finding]:
    """What is wrong with one matrix as it lies in its file."""
    matrix, record = placed.matrix, placed.record
    for slot in record.slots:
        if slot.part is None and any(_bytes(file, placed, slot)):
            yield Finding(ERROR, "E1006", matrix.file, f"{matrix.name} {slot.suffix}: zeros expected",
                          placed.offset + slot.offset)  # fmt: skip
    small = {slot.role: _array(_bytes(file, placed, slot), slot) for slot in record.stored if slot.role != CODES}
    codes = record.slot(CODES)
    row = codes.nbytes // matrix.rows
    for first, count, place in bands(encoding, matrix.rows, matrix.columns):
        raw = read_exactly(file, placed.offset + first * row, count * row)
        stored = {role: array[place[role]] for role, array in small.items()}
        stored[CODES] = np.frombuffer(raw, VIEWS[codes.dtype]).reshape(count, *codes.shape[1:])
        for problem in encoding.problems(stored, count, matrix.columns):
            where = f"{matrix.name}, rows from {first}, counted from there: "
            yield Finding(ERROR, "E1005", matrix.file, where + problem.text,
                          placed.offset + record.slot(problem.role).offset)  # fmt: skip
        progress(len(raw))
    progress(record.nbytes - codes.nbytes)


def _bytes(file: Place, placed: PlacedMatrix, slot: Slot) -> bytearray:
    return read_exactly(file, placed.offset + slot.offset, slot.nbytes)


def _array(raw: bytearray, slot: Slot) -> Array:
    return np.frombuffer(raw, VIEWS[slot.dtype]).reshape(slot.shape)


# -- against the source ----------------------------------------------------------------------------------------------


def compare_matrices(context: Context, targets: Iterable[MatricesTarget], files: SourceFiles) -> Iterator[Finding]:
    """Encode again what encoded matrices were made from, and compare heads, every byte, and the sums."""
    manifest, progress = context.manifest, context.progress
    listed = {} if manifest.dense is None else {m.name: m for m in manifest.dense.matrices}
    with (home := place_of(context.root, once=True)).storage:
        for target in targets:
            file = home / target.name
            if not file.is_file():
                continue
            head = target.head()
            if bytes(read_exactly(file, 0, min(len(head), file.size()))) != head:
                yield Finding(ERROR, "E1027", target.name, "its header is not what the source gives")
                continue
            placed, offset = [], len(head)
            for matrix, record in target.records():
                placed.append((matrix, record, offset))
                offset += record.nbytes

            def one(
                where: tuple[EncodedMatrix, MatrixRecord, int], target: MatricesTarget = target, file: Place = file
            ) -> list[Finding]:
                matrix, record, offset = where
                encoder = MatrixEncoder(files, target.encoding, matrix, record)
                found = _compare(file, encoder, matrix, record, offset, listed.get(matrix.name), progress)
                return list(guarded(found, target.name))

            with ThreadPoolExecutor(context.workers) as pool:
                for findings in pool.map(one, placed):
                    yield from findings


def _compare(
    file: Place, encoder: MatrixEncoder, matrix: EncodedMatrix, record: MatrixRecord, offset: int,
    listed: DenseMatrix | None, progress: Progress,
) -> Iterator[Finding]:  # fmt: skip
    at = 0
    for want, _ in encoder.pieces(memoryview(bytearray(PIECE))):
        have = read_exactly(file, offset + at, len(want))
        progress(len(want))
        if have != want:
            first = int(np.flatnonzero(np.frombuffer(have, np.uint8) != np.frombuffer(want, np.uint8))[0])
            slot = next(s for s in record.slots if s.offset <= at + first < s.offset + s.nbytes)
            message = (
                f"{matrix.name}.{slot.suffix}: bytes differ from the source's encoding, first "
                f"0x{want[first]:02x} expected, found 0x{have[first]:02x}"
            )
            yield Finding(ERROR, "E1028", file.name, message, offset + at + first)
            return
        at += len(want)
    sums = (encoder.squared_error, encoder.squared_norm)
    if listed is not None and (listed.squared_error, listed.squared_norm) != sums:
        found = (listed.squared_error, listed.squared_norm)
        yield Finding(ERROR, "E1024", MANIFEST, f"{matrix.name}: squared error and norm {sums} expected, found {found}")
