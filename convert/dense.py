"""Dense tensors: everything that is no routed expert. Copied byte for byte, or decoded where the codes cannot stay.

An FP8 dense matrix stays as it is in an `fp8` container if its scales are the block grid that such containers state,
and if its module is one that others read as codes (the family names them); otherwise it is decoded: code * scale in
float32, rounded once to BF16, as transformers does on the CPU. Codes that stay are checked as those of experts are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagestone.convert.checkpoint import SourceTensor
from pagestone.convert.family import Family
from pagestone.convert.reading import SourceFiles
from pagestone.convert.scales import ACTIVATION_SUFFIXES, UNREAD, resolve, scale_of
from pagestone.convert.sources import Range, ScaleSource, whole
from pagestone.formats.dtypes import FLOATS, VIEWS, f32_to_bf16, item_size
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import DataError, NonFiniteError, PagestoneError, RequestError
from pagestone.formats.quantised import KINDS, SCALE_DTYPES, Form, Quantised, scale_values
from pagestone.formats.storage import Place

REFUSED = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
"""Types that are never copied: their meaning depends on a convention nobody states in the file."""
PLAIN = (*FLOATS, "F64")
"""Types whose elements are the numbers themselves: what a parameter may have without a scale."""
KEPT_NAME, KEPT_SCALES = ".weight_scale_inv", ("BF16", "F32", "F16")
"""What scales of dense FP8 codes must be called and be to stay: others read anything else as other numbers."""
ZERO_POINT = "_zero_point"
LONELY = ("weight_scale", "weight_zero_point", "_scale_inv")
"""How the names of scales and zero points end that mean nothing without their codes."""
COPY, DECODE, SCALE_USED, ACTIVATION = "copy", "decode", "scale used", "activation"


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """One tensor of a dense shard: `nbytes` of `dtype` and `shape` made from `source`.

    With a `scale` its codes are decoded, unless they are `kept`: then they are copied, and must be sound.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: SourceTensor
    scale: ScaleSource | None = None
    zero: Range | None = None
    kept: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype) if self.decoded else self.source.nbytes

    @property
    def decoded(self) -> bool:
        """Whether its bytes are other than the source's."""
        return self.scale is not None and not self.kept


@dataclass(frozen=True, slots=True)
class DenseRules:
    """What may become of dense tensors: `tensors` are all of a checkpoint (or container) by name, `block` the block of
    scales its config states, `family` the model's (None: unknown, then no codes stay)."""

    path: Path | Place
    tensors: Mapping[str, SourceTensor]
    block: tuple[int, int] | None
    family: Family | None
    codec: Codec

    def sort(
        self, names: list[str], refused: Callable[[PagestoneError], None] | None = None
    ) -> tuple[list[DenseTensor], dict[str, str]]:
        """(what goes to the dense shards, what becomes of every name: one of COPY, DECODE, SCALE_USED, ACTIVATION).

        Raises `DataError` for codes without a scale and scales without codes, and `RequestError` (E0514) for types
        and forms that are not read. With `refused` they are passed to it instead, and their tensors are left out.
        """
        result: list[DenseTensor] = []
        fates: dict[str, str] = {}
        left: set[str] = set()
        codes = (n for n in names if self.tensors[n].dtype in KINDS)
        scales = {n: scale for n in codes if (scale := scale_of(n, self.tensors)) is not None}
        for name in [*scales, *(n for n in names if n not in scales)]:
            if name in fates or name in left:
                continue  # it went with its codes
            tensor, scale = self.tensors[name], scales.get(name)
            try:
                made, found = self._single(tensor) if scale is None else self._codes(tensor, scale)
            except PagestoneError as error:
                if refused is None:
                    raise
                refused(error)
                left |= {name, name + ZERO_POINT} | (set() if scale is None else {scale.name})
                continue
            result += made
            fates |= found
        return result, fates

    # -- one tensor, or one with its scale -------------------------------------------------------------------------

    def _codes(self, tensor: SourceTensor, scale: SourceTensor) -> tuple[list[DenseTensor], dict[str, str]]:
        """Codes that have a scale: kept with it, or decoded."""
        zero = self.tensors.get(tensor.name + ZERO_POINT)
        if len(tensor.shape) != 2:
            raise self._wrong(tensor, f"a matrix of codes beside {scale.name} expected, found {tensor.dtype} "
                              f"{list(tensor.shape)}", UNREAD)  # fmt: skip
        if zero is not None and tensor.dtype != "I8":
            raise self._wrong(zero, f"zero points beside I8 codes expected, found {tensor.dtype} codes", UNREAD)
        where = self._scale(tensor, scale)
        form = Form(KINDS[tensor.dtype], *_matrix(tensor), where.block, 0, scale.dtype, zero is not None)
        if self._stays(tensor, scale, form):
            kept = DenseTensor(tensor.name, tensor.dtype, tensor.shape, tensor, where, kept=True)
            return [kept, _copied(scale)], {tensor.name: COPY, scale.name: COPY}
        points = None if zero is None else self._zero_points(tensor, zero)
        decoded = DenseTensor(tensor.name, "BF16", tensor.shape, tensor, where, points)
        used = {t.name: SCALE_USED for t in (scale, zero) if t is not None}
        return [decoded], {tensor.name: DECODE} | used

    def _stays(self, tensor: SourceTensor, scale: SourceTensor, form: Form) -> bool:
        """Whether others read these codes as such: the container's config, the scale and the module must allow it."""
        module, _, tail = tensor.name.rpartition(".")
        return (
            self.codec.keeps_dense(form)
            and tail == "weight"
            and scale.name == module + KEPT_NAME
            and scale.dtype in KEPT_SCALES
            and self.family is not None
            and self.family.reads_codes(module)
        )

    def _scale(self, tensor: SourceTensor, scale: SourceTensor) -> ScaleSource:
        rows, columns = _matrix(tensor)
        found = resolve(scale.shape, rows, columns, self.block)
        if scale.dtype not in SCALE_DTYPES or found is None:
            message = (
                f"a scale [], [1], [{rows}], [{rows}, 1] or a block grid for {tensor.name} {list(tensor.shape)} "
                f"expected, found {scale.dtype} {list(scale.shape)} (weight_block_size {self.block})"
            )
            raise self._wrong(scale, message, "E0515")
        grid, block = found
        return ScaleSource(whole(scale, grid), block)

    def _zero_points(self, tensor: SourceTensor, zero: SourceTensor) -> Range:
        rows, _ = _matrix(tensor)
        if zero.dtype != "I8" or zero.shape not in ((rows,), (rows, 1)):
            message = f"zero points I8 [{rows}, 1] expected, found {zero.dtype} {list(zero.shape)}"
            raise self._wrong(zero, message, "E0515")
        return whole(zero, (rows,))

    def _single(self, tensor: SourceTensor) -> tuple[list[DenseTensor], dict[str, str]]:
        """A tensor that is no codes with a scale, nor belongs to such: copied if it can mean one thing only."""
        name, dtype = tensor.name, tensor.dtype
        tail = name.rpartition(".")[2]
        if dtype in REFUSED:
            raise self._wrong(tensor, f"a type with one meaning (F8_E4M3 is FN) expected, found {dtype}", UNREAD)
        if tail in ACTIVATION_SUFFIXES:
            return [], {name: ACTIVATION}
        number = tail in ("weight", "bias") or (self.family is not None and self.family.known_name(name))
        if dtype == "F8_E4M3" or (dtype in KINDS and number):
            words = "a weight_scale_inv or weight_scale beside"
            raise self._wrong(tensor, f"{words} {dtype} codes {list(tensor.shape)} expected, found none", "E0513")
        if dtype == "F8_E8M0" or name.endswith(LONELY):
            raise self._wrong(tensor, "codes (F8_E4M3 or I8) beside this scale expected, found none", "E0513")
        scaled = any(name + end in self.tensors for end in ("_scale", "_scale_inv"))
        if dtype not in PLAIN and (number or scaled):
            raise self._wrong(tensor, f"a parameter in {', '.join(PLAIN)}, or codes with a scale in "
                              f"{', '.join(KINDS)}, expected, found {dtype} {list(tensor.shape)}", UNREAD)  # fmt: skip
        return [_copied(tensor)], {name: COPY}

    def _wrong(self, tensor: SourceTensor, message: str, code: str) -> PagestoneError:
        kind = RequestError if code == UNREAD else DataError
        return kind(message, code=code, file=self.path / tensor.file, tensor=tensor.name,
                    remedy="download the checkpoint again, or convert from the unquantised release")  # fmt: skip


def _matrix(tensor: SourceTensor) -> tuple[int, int]:
    """(rows, columns) of a tensor with two dimensions."""
    rows, columns = tensor.shape
    return rows, columns


def _copied(tensor: SourceTensor) -> DenseTensor:
    return DenseTensor(tensor.name, tensor.dtype, tensor.shape, tensor)


# -- bytes -----------------------------------------------------------------------------------------------------------


def pieces(files: SourceFiles, dense: DenseTensor, buffer: memoryview) -> Iterator[tuple[memoryview, int, int]]:
    """(output bytes, source bytes read, NaN or Inf among them) of a dense tensor, in order.

    `buffer` is where source bytes are read into; each piece is valid until the next. Raises `DataError` (E0702) naming
    the place for codes and scales that no container may hold, kept or decoded.
    """
    if dense.scale is not None:
        yield from _codes(files, dense, dense.scale, buffer)
        return
    step = len(buffer) // 8 * 8  # whole elements of any type
    for start in range(0, dense.nbytes, step):
        piece = buffer[: min(step, dense.nbytes - start)]
        files.read_into(dense.source.file, dense.source.offset + start, piece)
        yield piece, len(piece), count_non_finite(piece, dense.dtype)


def _codes(
    files: SourceFiles, dense: DenseTensor, scale: ScaleSource, buffer: memoryview
) -> Iterator[tuple[memoryview, int, int]]:
    """The pieces of codes with a scale, a few rows at a time: as they are if they are kept, else their values."""

    def read(r: Range) -> memoryview:
        data = memoryview(bytearray(r.nbytes))
        files.read_into(r.tensor.file, r.offset, data)
        return data

    at, dtype = scale.at, dense.source.dtype
    scales = scale_values(np.frombuffer(read(at), VIEWS[at.tensor.dtype]).reshape(at.shape), at.tensor.dtype)
    zeros = None if dense.zero is None else np.frombuffer(read(dense.zero), np.int8)
    # read too: they count once, those of kept codes where they are copied themselves
    extra = 0 if dense.kept else at.nbytes + (0 if dense.zero is None else dense.zero.nbytes)
    rows, columns = dense.shape
    step = max(1, min(len(buffer), 1 << 18) // max(1, columns))  # decoded rows take six times the bytes
    room = buffer if columns <= len(buffer) else memoryview(bytearray(columns))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        piece = room[: count * columns]
        files.read_into(dense.source.file, dense.source.offset + first * columns, piece)
        codes = np.frombuffer(piece, VIEWS[dtype]).reshape(count, columns)
        form = Form(KINDS[dtype], count, columns, scale.block, first, at.tensor.dtype, zeros is not None)
        part = None if zeros is None else zeros[first : first + count]
        quantised = Quantised(form, codes, scales, part)
        out = piece
        try:
            if dense.kept:
                quantised.check_values()
            else:
                out = memoryview(f32_to_bf16(quantised.values()).view(np.uint8).reshape(-1))  # type: ignore[arg-type]
        except NonFiniteError as error:
            raise DataError(
                f"finite weights expected, found {error.value} at row {first + error.row}, column {error.column}",
                code="E0702", file=dense.source.file, tensor=dense.source.name,
                remedy="the source is damaged: download it again, or ask its publisher; nothing was published",
            ) from None  # fmt: skip
        yield out, len(piece) + extra, count_non_finite(out, dense.dtype)
        extra = 0


def count_non_finite(piece: memoryview, dtype: str) -> int:
    """NaN and Inf among whole elements of a plain float type; 0 for every other type."""
    exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}.get(dtype)
    if exponent is None:
        return 0
    bits = np.frombuffer(piece, f"<u{item_size(dtype)}")
    mask = bits.dtype.type(exponent)
    return int(np.count_nonzero((bits & mask) == mask))
