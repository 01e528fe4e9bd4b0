"""Dense tensors: everything that is no routed expert. Copied byte for byte, or decoded where the codes cannot stay.

An FP8 dense matrix stays as it is in an `fp8` container if its scales are the block grid that such containers state,
and if its module is one that others read as codes (the family names them); otherwise it is decoded: code * scale in
float32, rounded once to BF16, as transformers does on the CPU. Codes that stay are checked as those of experts are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.convert.checkpoint import SourceTensor
from pagestone.convert.claims import ACTIVATION_SUFFIXES, UNREAD, Claims, left_over
from pagestone.convert.family import Family
from pagestone.convert.reading import SourceFiles
from pagestone.convert.sources import Range, whole
from pagestone.formats.dtypes import FLOATS, VIEWS, Array, f32_to_bf16, item_size
from pagestone.formats.encodings import (
    Claim,
    Codec,
    Reading,
    Refusal,
    codes_dtypes,
    codes_suffixes,
    companion_suffixes,
    suffixes,
)
from pagestone.formats.errors import DataError, NonFiniteError, PagestoneError, RequestError
from pagestone.formats.layout import CODES
from pagestone.formats.storage import Place

REFUSED = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
"""Types that are never copied: their meaning depends on a convention nobody states in the file."""
PLAIN = (*FLOATS, "F64")
"""Types whose elements are the numbers themselves: what a parameter may have without a scale."""
SCALE_INV = "_scale_inv"
"""How the names of scales end that mean nothing without their codes, whatever the codes are called."""
COPY, DECODE, SCALE_USED, ACTIVATION = "copy", "decode", "scale used", "activation"


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """One tensor of a dense shard: `nbytes` of `dtype` and `shape` made from `source`.

    With an `encoding` it is a matrix whose codes are decoded, unless they are `kept`: then they are copied, and must be
    sound. `stored` are its arrays by role.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: SourceTensor
    encoding: Reading | None = None
    stored: Mapping[str, Range] = field(default_factory=dict)
    kept: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype) if self.decoded else self.source.nbytes

    @property
    def decoded(self) -> bool:
        """Whether its bytes are other than the source's."""
        return self.encoding is not None and not self.kept


@dataclass(frozen=True, slots=True)
class DenseRules:
    """What may become of dense tensors: `tensors` are all of a checkpoint (or container) by name, `config` is its
    config, `family` the model's (None: unknown, then no codes stay)."""

    path: Path | Place
    tensors: Mapping[str, SourceTensor]
    config: Mapping[str, Any]
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
        claims, kinds = Claims(self.config), codes_dtypes(plain=False)
        groups = {n: self._group(n) for n in names if self.tensors[n].dtype in kinds}
        groups = {n: group for n, group in groups.items() if len(group) > 1}
        for name in [*groups, *(n for n in names if n not in groups)]:
            if name in fates or name in left:
                continue  # it went with its codes
            tensor, group = self.tensors[name], groups.get(name, {})
            try:
                made, found = self._codes(tensor, group, claims) if group else self._single(tensor)
            except PagestoneError as error:
                if refused is None:
                    raise
                refused(error)
                left |= {name} | {t.name for t in group.values()}
                continue
            result += made
            fates |= found
        return result, fates

    # -- one tensor, or one with those that belong to it -------------------------------------------------------------

    def _group(self, name: str) -> dict[str, SourceTensor]:
        """What stands beside codes, and they themselves, by suffix; empty if they are called like no codes."""
        ending = next((s for s in codes_suffixes() if name.endswith(s)), None)
        if ending is None:
            return {}
        stem = name.removesuffix(ending)
        return {s: self.tensors[stem + s] for s in sorted(suffixes()) if stem + s in self.tensors}

    def _codes(
        self, tensor: SourceTensor, group: dict[str, SourceTensor], claims: Claims
    ) -> tuple[list[DenseTensor], dict[str, str]]:
        """Codes with what belongs to them: kept, or decoded."""
        answer = claims.of(group)
        if isinstance(answer, Claim):
            rest = left_over(answer, group)
            if rest is not None and rest.code != "E0512":  # a second scale is judged as what it is without codes
                answer = rest
        if isinstance(answer, Refusal):
            raise self._wrong(group[answer.suffix], f"{tensor.name}: {answer.message}", answer.code)
        used = {role: group[suffix] for role, suffix in answer.suffixes.items()}
        stored = {
            role.name: whole(used[role.name], role.shape) for role in answer.encoding.roles(answer.rows, answer.columns)
        }
        module = tensor.name.removesuffix(answer.suffixes[CODES]).removesuffix(".")
        name, shape = tensor.name.removesuffix(answer.suffixes[CODES]) + "weight", (answer.rows, answer.columns)
        if self.codec.keeps_dense(answer) and self.family is not None and self.family.reads_codes(module):
            kept = DenseTensor(tensor.name, tensor.dtype, tensor.shape, tensor, answer.encoding, stored, kept=True)
            others = [t for role, t in used.items() if role != CODES]
            return [kept, *map(_copied, others)], {t.name: COPY for t in used.values()}
        decoded = DenseTensor(name, "BF16", shape, tensor, answer.encoding, stored)
        return [decoded], {t.name: SCALE_USED for t in used.values()} | {tensor.name: DECODE}

    def _single(self, tensor: SourceTensor) -> tuple[list[DenseTensor], dict[str, str]]:
        """A tensor that is no codes with a scale, nor belongs to such: copied if it can mean one thing only."""
        name, dtype = tensor.name, tensor.dtype
        tail = name.rpartition(".")[2]
        if dtype in REFUSED:
            raise self._wrong(tensor, f"a type with one meaning (F8_E4M3 is FN) expected, found {dtype}", UNREAD)
        if tail in ACTIVATION_SUFFIXES:
            return [], {name: ACTIVATION}
        number = tail in ("weight", "bias") or (self.family is not None and self.family.known_name(name))
        kinds = codes_dtypes(plain=False)
        if dtype == "F8_E4M3" or (dtype in kinds and number):
            words = "a weight_scale_inv or weight_scale beside"
            raise self._wrong(tensor, f"{words} {dtype} codes {list(tensor.shape)} expected, found none", "E0513")
        if dtype == "F8_E8M0" or name.endswith((SCALE_INV, *companion_suffixes())):
            raise self._wrong(tensor, "codes (F8_E4M3 or I8) beside this scale expected, found none", "E0513")
        scaled = any(name + end in self.tensors for end in ("_scale", "_scale_inv"))
        if dtype not in PLAIN and (number or scaled):
            raise self._wrong(tensor, f"a parameter in {', '.join(PLAIN)}, or codes with a scale in "
                              f"{', '.join(kinds)}, expected, found {dtype} {list(tensor.shape)}", UNREAD)  # fmt: skip
        return [_copied(tensor)], {name: COPY}

    def _wrong(self, tensor: SourceTensor, message: str, code: str) -> PagestoneError:
        kind = RequestError if code == UNREAD else DataError
        return kind(message, code=code, file=self.path / tensor.file, tensor=tensor.name,
                    remedy="download the checkpoint again, or convert from the unquantised release")  # fmt: skip


def _copied(tensor: SourceTensor) -> DenseTensor:
    return DenseTensor(tensor.name, tensor.dtype, tensor.shape, tensor)


# -- bytes -----------------------------------------------------------------------------------------------------------


def pieces(files: SourceFiles, dense: DenseTensor, buffer: memoryview) -> Iterator[tuple[memoryview, int, int]]:
    """(output bytes, source bytes read, NaN or Inf among them) of a dense tensor, in order.

    `buffer` is where source bytes are read into; each piece is valid until the next. Raises `DataError` (E0702) naming
    the place for codes and scales that no container may hold, kept or decoded.
    """
    if dense.encoding is not None:
        yield from _codes(files, dense, dense.encoding, buffer)
        return
    step = len(buffer) // 8 * 8  # whole elements of any type
    for start in range(0, dense.nbytes, step):
        piece = buffer[: min(step, dense.nbytes - start)]
        files.read_into(dense.source.file, dense.source.offset + start, piece)
        yield piece, len(piece), count_non_finite(piece, dense.dtype)


def _codes(
    files: SourceFiles, dense: DenseTensor, encoding: Reading, buffer: memoryview
) -> Iterator[tuple[memoryview, int, int]]:
    """The pieces of a matrix of codes, a few rows at a time: as they are if they are kept, else their values."""

    def read(r: Range) -> Array:
        data = memoryview(bytearray(r.nbytes))
        files.read_into(r.tensor.file, r.offset, data)
        return np.frombuffer(data, VIEWS[r.tensor.dtype]).reshape(r.shape)

    at, dtype = dense.stored[CODES], dense.source.dtype
    others = {role: read(r) for role, r in dense.stored.items() if role != CODES}
    # read too: they count once, those of kept codes where they are copied themselves
    extra = 0 if dense.kept else sum(array.nbytes for array in others.values())
    rows, columns = dense.shape
    width = at.nbytes // max(1, rows)
    step = max(1, min(len(buffer), 1 << 18) // max(1, width))  # decoded rows take six times the bytes
    room = buffer if width <= len(buffer) else memoryview(bytearray(width))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        piece = room[: count * width]
        files.read_into(at.tensor.file, at.offset + first * width, piece)
        part, cut = encoding.window(rows, columns, first, count)
        stored = {role: array[cut[role]] for role, array in others.items()}
        stored[CODES] = np.frombuffer(piece, VIEWS[dtype]).reshape(count, *at.shape[1:])
        try:
            part.require_sound(stored, count, columns)
        except NonFiniteError as error:
            raise DataError(
                f"finite weights expected, found {error.value} at row {first + error.row}, column {error.column}",
                code="E0702", file=dense.source.file, tensor=dense.source.name,
                remedy="the source is damaged: download it again, or ask its publisher; nothing was published",
            ) from None  # fmt: skip
        out = piece
        if not dense.kept:
            values = f32_to_bf16(part.values(stored, count, columns))
            out = memoryview(values.view(np.uint8).reshape(-1))  # type: ignore[arg-type]
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
