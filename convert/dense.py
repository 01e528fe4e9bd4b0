"""Dense tensors: everything that is no routed expert. Copied byte for byte, or decoded where the codes cannot stay.

An FP8 dense matrix stays as it is in an `fp8` container if its scales are the block grid that such containers state;
otherwise it is decoded: code * scale in float32, rounded once to BF16, as transformers does on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagestone.convert.checkpoint import Checkpoint, SourceTensor
from pagestone.convert.reading import SourceFiles
from pagestone.convert.scales import ACTIVATION_SUFFIXES, UNREAD, block_size, is_quantised, resolve, scale_of
from pagestone.convert.sources import Range, ScaleSource, whole
from pagestone.formats.codecs import Codec
from pagestone.formats.dtypes import VIEWS, f32_to_bf16, item_size
from pagestone.formats.errors import DataError, NonFiniteError, PagestoneError, RequestError
from pagestone.formats.quantised import KINDS, SCALE_DTYPES, Form, Quantised, scale_values

REFUSED = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
"""Types that are never copied: their meaning depends on a convention nobody states in the file."""
KEPT_NAME, KEPT_SCALES = ".weight_scale_inv", ("BF16", "F32", "F16")
"""What scales of dense FP8 codes must be called and be to stay: others read anything else as other numbers."""
COPY, DECODE, SCALE_USED, ACTIVATION = "copy", "decode", "scale used", "activation"


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """One tensor of a dense shard: `nbytes` of `dtype` and `shape` made from `source`, decoded if there is a scale."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: SourceTensor
    scale: ScaleSource | None = None
    zero: Range | None = None

    @property
    def nbytes(self) -> int:
        return self.source.nbytes if self.scale is None else math.prod(self.shape) * item_size(self.dtype)


def sort_dense(checkpoint: Checkpoint, names: list[str], codec: Codec) -> tuple[list[DenseTensor], dict[str, str]]:
    """(what goes to the dense shards, what becomes of every name: one of COPY, DECODE, SCALE_USED, ACTIVATION).

    Raises `DataError` for codes without a scale, a scale without codes, and types that are not read.
    """
    tensors = checkpoint.tensors
    stated = block_size(checkpoint.config)
    result: list[DenseTensor] = []
    fates: dict[str, str] = {}
    for name in names:
        tensor = tensors[name]
        if tensor.dtype in REFUSED:
            raise _wrong(
                checkpoint, tensor, f"a type with one meaning (F8_E4M3 is FN) expected, found {tensor.dtype}", UNREAD
            )
        if name.rsplit(".", 1)[-1] in ACTIVATION_SUFFIXES:
            fates[name] = ACTIVATION
        elif tensor.dtype == "F8_E4M3" and scale_of(name, tensors) is None:
            raise _wrong(
                checkpoint, tensor, "a weight_scale_inv or weight_scale beside FP8 codes expected, found none", "E0513"
            )
        elif is_quantised(tensor) and (scale := scale_of(name, tensors)) is not None:
            zero = tensors.get(name + "_zero_point")
            dense = _decoded(checkpoint, tensor, scale, zero, stated)
            assert dense.scale is not None
            form = Form(
                KINDS[tensor.dtype],
                tensor.shape[0],
                tensor.shape[1],
                dense.scale.block,
                0,
                scale.dtype,
                zero is not None,
            )
            if codec.keeps_dense(form) and scale.name.endswith(KEPT_NAME) and scale.dtype in KEPT_SCALES:
                result += [DenseTensor(t.name, t.dtype, t.shape, t) for t in (tensor, scale)]
                fates |= {name: COPY, scale.name: COPY}
            else:
                result.append(dense)
                fates |= {name: DECODE, scale.name: SCALE_USED} | ({zero.name: SCALE_USED} if zero else {})
    for name in names:
        if name in fates:
            continue
        tensor = tensors[name]
        if name.endswith((".weight_scale_inv", ".weight_scale")):
            raise _wrong(checkpoint, tensor, "codes (F8_E4M3 or I8) beside this scale expected, found none", "E0513")
        fates[name] = COPY
        result.append(DenseTensor(name, tensor.dtype, tensor.shape, tensor))
    return result, fates


def _decoded(
    checkpoint: Checkpoint,
    tensor: SourceTensor,
    scale: SourceTensor,
    zero: SourceTensor | None,
    stated: tuple[int, int] | None,
) -> DenseTensor:
    rows, columns = tensor.shape
    found = resolve(scale.shape, rows, columns, stated)
    if scale.dtype not in SCALE_DTYPES or found is None:
        message = (
            f"a scale [], [1], [{rows}], [{rows}, 1] or a block grid for {tensor.name} {list(tensor.shape)} expected, "
            f"found {scale.dtype} {list(scale.shape)} (weight_block_size {stated})"
        )
        raise _wrong(checkpoint, scale, message, "E0515")
    if zero is not None and (zero.dtype != "I8" or zero.shape not in ((rows,), (rows, 1))):
        raise _wrong(
            checkpoint, zero, f"zero points I8 [{rows}, 1] expected, found {zero.dtype} {list(zero.shape)}", "E0515"
        )
    grid, block = found
    where = None if zero is None else whole(zero, (rows,))
    return DenseTensor(tensor.name, "BF16", tensor.shape, tensor, ScaleSource(whole(scale, grid), block), where)


def _wrong(checkpoint: Checkpoint, tensor: SourceTensor, message: str, code: str) -> PagestoneError:
    kind = RequestError if code == UNREAD else DataError
    return kind(message, code=code, file=checkpoint.path / tensor.file, tensor=tensor.name,
                remedy="download the checkpoint again, or convert from the unquantised release")  # fmt: skip


def pieces(files: SourceFiles, dense: DenseTensor, buffer: memoryview) -> Iterator[tuple[memoryview, int, int]]:
    """(output bytes, source bytes read, NaN or Inf among them) of a dense tensor, in order.

    `buffer` is where source bytes are read into; each piece is valid until the next.
    """
    if dense.scale is not None:
        yield from _decode(files, dense, buffer)
        return
    step = len(buffer) // 8 * 8  # whole elements of any type
    for start in range(0, dense.nbytes, step):
        piece = buffer[: min(step, dense.nbytes - start)]
        files.read_into(dense.source.file, dense.source.offset + start, piece)
        yield piece, len(piece), count_non_finite(piece, dense.dtype)


def _decode(files: SourceFiles, dense: DenseTensor, buffer: memoryview) -> Iterator[tuple[memoryview, int, int]]:
    assert dense.scale is not None

    def read(r: Range) -> memoryview:
        data = memoryview(bytearray(r.nbytes))
        files.read_into(r.tensor.file, r.offset, data)
        return data

    at, dtype = dense.scale.at, dense.source.dtype
    scales = scale_values(np.frombuffer(read(at), VIEWS[at.tensor.dtype]).reshape(at.shape), at.tensor.dtype)
    zeros = None if dense.zero is None else np.frombuffer(read(dense.zero), np.int8)
    extra = at.nbytes + (0 if dense.zero is None else dense.zero.nbytes)  # read too: they count once
    rows, columns = dense.shape
    step = max(1, min(len(buffer), 1 << 18) // max(1, columns))  # decoded rows take six times the bytes
    room = buffer if columns <= len(buffer) else memoryview(bytearray(columns))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        piece = room[: count * columns]
        files.read_into(dense.source.file, dense.source.offset + first * columns, piece)
        codes = np.frombuffer(piece, VIEWS[dtype]).reshape(count, columns)
        form = Form(KINDS[dtype], count, columns, dense.scale.block, first, at.tensor.dtype, zeros is not None)
        part = None if zeros is None else zeros[first : first + count]
        try:
            values = Quantised(form, codes, scales, part).values()
        except NonFiniteError as error:
            raise DataError(
                f"finite weights expected, found {error.value} at row {first + error.row}, column {error.column}",
                code="E0702", file=dense.source.file, tensor=dense.source.name,
                remedy="the source is damaged: download it again, or ask its publisher; nothing was published",
            ) from None  # fmt: skip
        out = memoryview(f32_to_bf16(values).view(np.uint8).reshape(-1))  # type: ignore[arg-type]
        yield out, len(piece) + extra, count_non_finite(out, "BF16")
        extra = 0


def count_non_finite(piece: memoryview, dtype: str) -> int:
    """NaN and Inf among whole elements of a plain float type; 0 for every other type."""
    exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}.get(dtype)
    if exponent is None:
        return 0
    bits = np.frombuffer(piece, f"<u{item_size(dtype)}")
    mask = bits.dtype.type(exponent)
    return int(np.count_nonzero((bits & mask) == mask))
