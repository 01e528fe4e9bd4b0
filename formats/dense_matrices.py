"""Dense matrices in an encoding: which ones a container has, and the files they lie in (specs/container.md).

The manifest lists them, and the files must hold exactly these: a header is compared with what the list gives.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestone.formats import encodings
from pagestone.formats.digests import canonical_json
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import DataError, PagestoneError
from pagestone.formats.layer_file import KEY, SPEC_VERSION
from pagestone.formats.layout import PAGE, MatrixRecord, matrix_entries, matrix_record
from pagestone.formats.safetensors_header import MAX_HEADER, build_header, read_header
from pagestone.formats.storage import AnyPlace, place_of
from pagestone.formats.strict_json import brief

KEEP = "keep"
ENCODED = ("int8", "fp8", "q8", "q4")
"""Encodings that dense matrices may be in, by the words of `--dense`: proved for them, products and all."""
FILE_NAME = re.compile(r"matrices-([0-9]{5})-of-([0-9]{5})\.safetensors")
REMEDY = "restore it from a copy, or convert again"


def matrices_file_name(number: int, count: int) -> str:
    """The name of the `number`-th of `count` files, from 1."""
    return f"matrices-{number:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """One encoded dense matrix: `name` is its module's full name ("lm_head"), the sums are what encoding it cost."""

    name: str
    file: str
    rows: int
    columns: int
    squared_error: float
    squared_norm: float


@dataclass(frozen=True, slots=True)
class DenseEncoding:
    """What the manifest says of encoded dense matrices: one encoding for all, each in the order in which they lie."""

    codec: str
    parameters: Mapping[str, int | str]
    matrices: tuple[DenseMatrix, ...]

    @property
    def encoding(self) -> Codec:
        """The encoding; `RequestError` (E0101, E0102) if this version does not know it."""
        return encodings.get(self.codec, self.parameters)

    @property
    def files(self) -> tuple[str, ...]:
        """The files they lie in, in order."""
        return tuple(dict.fromkeys(m.file for m in self.matrices))

    def of_file(self, file: str) -> tuple[DenseMatrix, ...]:
        """The matrices of one file, in the order in which they lie."""
        return tuple(m for m in self.matrices if m.file == file)

    @property
    def identity(self) -> dict[str, Any]:
        """What of it is hashed into the container id beside the files."""
        return {"codec": self.codec, "parameters": dict(self.parameters)}

    def table(self) -> dict[str, Any]:
        """The field `dense` of a manifest."""
        return {
            "codec": self.codec,
            "parameters": dict(self.parameters),
            "matrices": [
                {"name": m.name, "file": m.file, "rows": m.rows, "columns": m.columns,
                 "squared_error": float_text(m.squared_error), "squared_norm": float_text(m.squared_norm)}
                for m in self.matrices
            ],
        }  # fmt: skip


BAND = 128
"""Rows encoded and checked at once: of no encoding does a block cross them, and sums are taken band by band."""


def bands(encoding: Codec, rows: int, columns: int) -> Iterator[tuple[int, int, dict[str, slice]]]:
    """(first row, number of rows, rows of every role's array) of each band of a matrix, in order.

    A band of a stored matrix is a stored matrix itself.
    """
    for first in range(0, rows, BAND):
        count = min(BAND, rows - first)
        pairs = zip(encoding.roles(first, columns), encoding.roles(count, columns), strict=True)
        yield first, count, {role.name: slice(above.shape[0], above.shape[0] + role.shape[0]) for above, role in pairs}


def float_text(value: float) -> str:
    """A float64 as 16 hexadecimal digits, sign first: canonical JSON holds no fractions."""
    return struct.pack(">d", value).hex()


def float_of(text: str) -> float:
    """The inverse of `float_text` for sums of squares: `ValueError` for what is none."""
    if re.fullmatch("[0-9a-f]{16}", text) is None:
        raise ValueError(f"16 hexadecimal digits of a float64 expected, found {brief(text)}")
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    if not (math.isfinite(value) and math.copysign(1, value) > 0):
        raise ValueError(f"a sum of squares expected, found {value}")
    return float(value)


def dense_problem(dense: DenseEncoding, files: Mapping[str, int]) -> str | None:
    """What is wrong with a manifest's list of encoded matrices; None if nothing. `files` are lengths by name.

    No count is believed that the bytes do not confirm.
    """
    if dense.codec not in ENCODED:
        return f"dense matrices in one of {', '.join(ENCODED)} expected, found {brief(dense.codec)}"
    if not dense.matrices:
        return "at least one encoded matrix expected, found none"
    names = [m.name for m in dense.matrices]
    if "" in names or len({*names}) < len(names):
        return "matrices of different names expected"
    wanted = [matrices_file_name(n, len(dense.files)) for n in range(1, len(dense.files) + 1)]
    found = [m.file for m in dense.matrices]
    if list(dense.files) != wanted or found != sorted(found):
        return f"matrices in the files {wanted[0]} to {wanted[-1]} expected, in this order, found {brief(found)}"
    needed = dict.fromkeys(wanted, PAGE)  # of the header
    try:
        encoding = dense.encoding
        for m in dense.matrices:
            if min(m.rows, m.columns) < 1:
                return f"{brief(m.name)}: a matrix expected, found {m.rows} rows of {m.columns}"
            needed[m.file] += matrix_record(encoding, m.rows, m.columns).nbytes
    except PagestoneError as error:
        return f"matrices that {brief(dense.codec)} can hold expected: {error.message}"
    for name, nbytes in needed.items():
        if files.get(name, 0) < nbytes:
            return f"{name} of at least {nbytes} bytes expected among the files, found {files.get(name, 'none')}"
    return None


# -- files -----------------------------------------------------------------------------------------------------------

Shape = tuple[str, int, int]
"""A matrix as the header of its file needs it: name, rows, columns."""


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    """An encoded dense matrix in its file: its record begins at byte `offset`."""

    matrix: DenseMatrix
    record: MatrixRecord
    offset: int


def _entries(encoding: Codec, shapes: Sequence[Shape]) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    base = 0
    for name, rows, columns in shapes:
        record = matrix_record(encoding, rows, columns)
        yield from matrix_entries(record, name, base)
        base += record.nbytes


def encoded_facts(encoding: Codec, shapes: Iterable[Shape]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every stored tensor of encoded matrices, as `config_facts` asks for."""
    return [
        (f"{name}.{role.suffix}", role.dtype, role.shape)
        for name, rows, columns in shapes
        for role in encoding.roles(rows, columns)
    ]


def matrices_metadata(encoding: Codec, count: int) -> dict[str, str]:
    """The `__metadata__` of a file of `count` matrices."""
    return {
        "format": "pt",
        f"{KEY}spec": SPEC_VERSION,
        f"{KEY}codec": encoding.name,
        f"{KEY}parameters": canonical_json(encoding.parameters).decode(),
        f"{KEY}matrices": str(count),
    }


def matrices_head(encoding: Codec, shapes: Sequence[Shape], limit: int = MAX_HEADER) -> bytes:
    """All bytes of a file before its first record, which begins at a multiple of 4096; `LayoutError` (E0610) for a
    header longer than `limit` bytes."""
    return build_header(list(_entries(encoding, shapes)), matrices_metadata(encoding, len(shapes)), PAGE, limit)


def read_matrices(path: AnyPlace, dense: DenseEncoding, file: str) -> tuple[PlacedMatrix, ...]:
    """The matrices of the file called `file`, which lies at `path`, in order; only its header is read.

    Raises `DataError`: E02xx if it is no safetensors file, E0225 if its data begin on no page, E0341 for the metadata
    of another file, E0342 for a tensor that is missing, too many, or of another type, shape or place than the manifest
    gives. `OSError` passes through.
    """
    place = place_of(path)
    header = read_header(place)
    encoding, listed = dense.encoding, dense.of_file(file)
    shapes = [(m.name, m.rows, m.columns) for m in listed]
    start = header.data_start

    def fail(message: str, code: str, tensor: str | None = None) -> DataError:
        return DataError(message, code=code, file=place, tensor=tensor, remedy=REMEDY)

    if start % PAGE:
        raise fail(f"data at a multiple of {PAGE} expected, found it at byte {start}", "E0225")
    metadata = matrices_metadata(encoding, len(shapes))
    if header.metadata != metadata:
        raise fail(f"metadata {metadata} expected from the manifest, found {brief(header.metadata)}", "E0341")
    wanted = [(n, dtype, shape, start + b, e - b) for n, dtype, shape, b, e in _entries(encoding, shapes)]
    found = [(e.name, e.dtype, e.shape, e.offset, e.nbytes) for e in header.entries]
    for want, have in zip(wanted, found, strict=False):
        if want != have:
            words = [f"{n} {dtype} {list(shape)} at byte {at}" for n, dtype, shape, at, _ in (want, have)]
            raise fail(f"{words[0]} expected from the manifest, found {brief(words[1])}", "E0342", want[0])
    if len(wanted) != len(found):
        raise fail(f"{len(wanted)} tensors expected from the manifest, found {len(found)}", "E0342")
    placed, base = [], start
    for matrix in listed:
        record = matrix_record(encoding, matrix.rows, matrix.columns)
        placed.append(PlacedMatrix(matrix, record, base))
        base += record.nbytes
    return tuple(placed)
