"""Codes of one byte under a grid of scales, as other programs store them: what fp8 and int8 sources have in common.

One description serves every convention: the scale of element (r, c) is
`scales[(first_row + r) // block[0], c // block[1]]`. A scale per tensor is one block of the whole matrix, a scale per
channel a block of one row. A block that the config states is that of the config, never guessed from shapes: 300 rows
with 3 scales may be blocks of 128 (the last one partial) or of 100.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from pagestone.formats.dtypes import F32, Array, bf16_to_f32
from pagestone.formats.encodings.contracts import Candidate, Claim, Problem, Reading, Refusal, Stored
from pagestone.formats.floats import plainly
from pagestone.formats.layout import CODES, Role

SCALES, ZERO_POINTS = "scales", "zero_points"
SCALE_DTYPES = ("BF16", "F16", "F32", "F8_E8M0", "U8")
"""Types a scale may have; U8 holds E8M0 bits, never a number."""


@plainly
def scale_values(array: Array, dtype: str) -> F32:
    """Exact float32 values of stored scales. E8M0 is 2^(b - 127), 255 is NaN (OCP microscaling formats, 5.4.1)."""
    if dtype in ("F8_E8M0", "U8"):
        nan = array == 255
        values = np.ldexp(np.float32(1), np.where(nan, 0, array.astype(np.int32) - 127))
        return np.where(nan, np.float32(np.nan), values).astype(np.float32)
    return bf16_to_f32(array) if dtype == "BF16" else np.asarray(array, np.float32)


@dataclass(frozen=True, slots=True)
class Scaled(Reading):
    """codes [R, C], scales [grid rows, grid columns], and of some int8 matrices a zero point for every row [R].

    The matrix begins `first_row` rows below the top of its first block: windows need not begin with a block.
    """

    codes_dtype: ClassVar[str]
    largest: ClassVar[np.float32]
    """The largest magnitude of a code, zero points taken off."""
    spellings: ClassVar[dict[str, tuple[str, ...]]] = {
        CODES: ("weight",),
        SCALES: ("weight_scale_inv", "weight_scale", "scale"),
    }
    announced_type: ClassVar[str]
    """Type and bits of weights in a compressed-tensors config."""

    block: tuple[int, int]
    scale_dtype: str = "F32"
    first_row: int = 0
    zero_points: bool = False

    @property
    def parameters(self) -> dict[str, int | str]:
        return {
            "block": f"{self.block[0]}x{self.block[1]}",
            "scale_dtype": self.scale_dtype,
            "first_row": self.first_row,
            "zero_points": int(self.zero_points),
        }

    def per_tensor(self, rows: int, columns: int) -> bool:
        """One scale for the whole matrix."""
        return self.block[0] >= self.first_row + rows and self.block[1] >= columns

    def per_channel(self, columns: int) -> bool:
        """One scale for every row."""
        return self.block[0] == 1 and self.block[1] >= columns

    def described(self, rows: int, columns: int) -> str:
        """In words, for a matrix of this shape."""
        if self.per_channel(columns):
            return f"{self.name}, a scale per channel"
        blocks = f"blocks of {self.block[0]}x{self.block[1]}"
        return f"{self.name}, {'a scale per tensor' if self.per_tensor(rows, columns) else blocks}"

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        grid = (-(-(self.first_row + rows) // self.block[0]), -(-columns // self.block[1]))
        found = (
            Role(CODES, "weight", self.codes_dtype, (rows, columns)),
            Role(SCALES, "weight_scale_inv", self.scale_dtype, grid),
        )
        return (*found, Role(ZERO_POINTS, "weight_zero_point", "I8", (rows,))) if self.zero_points else found

    # -- recognised --------------------------------------------------------------------------------------------------

    @classmethod
    def claims(cls, candidate: Candidate) -> Claim | Refusal | None:
        found = cls.spelled(candidate)
        codes = candidate.tensors.get(found.get(CODES, ""))
        if codes is None or codes.dtype != cls.codes_dtype:
            return None
        if SCALES not in found:
            message = f"a weight_scale_inv or weight_scale beside {codes.dtype} codes expected, found none"
            return Refusal("E0513", found[CODES], message)
        if len(codes.shape) != 2:
            message = f"a matrix of codes beside {found[SCALES]} expected, found {codes.dtype} {list(codes.shape)}"
            return Refusal("E0514", found[CODES], message)
        scales, (rows, columns) = candidate.tensors[found[SCALES]], codes.shape
        if scales.dtype not in SCALE_DTYPES:
            return Refusal(
                "E0514", found[SCALES], f"a scale in {', '.join(SCALE_DTYPES)} expected, found {scales.dtype}"
            )
        stated = stated_block(candidate.config)
        block = block_of(scales.shape, rows, columns, stated)
        if block is None:
            message = (
                f"a scale [], [1], [{rows}], [{rows}, 1] or a block grid for codes {list(codes.shape)} expected, found "
                f"{scales.dtype} {list(scales.shape)} (weight_block_size {stated})"
            )
            return Refusal("E0515", found[SCALES], message)
        zero = candidate.tensors.get(found.get(ZERO_POINTS, ""))
        if zero is not None and zero.dtype != "I8":
            message = f"zero points in I8 beside I8 codes expected, found {zero.dtype}"
            return Refusal("E0514", found[ZERO_POINTS], message)
        if zero is not None and zero.shape not in ((rows,), (rows, 1)):
            message = f"zero points [{rows}, 1] expected, found {list(zero.shape)}"
            return Refusal("E0515", found[ZERO_POINTS], message)
        return Claim(cls(block, scales.dtype, 0, zero is not None), rows, columns, found)

    @classmethod
    def announced(cls, stated: Mapping[str, Any]) -> bool:
        return cls.announced_type in _compressed_types(stated)

    # -- read --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def code_values(self, codes: Array) -> F32:
        """A fresh float32 array of the values of codes."""

    @abstractmethod
    def nan_codes(self, codes: Array) -> Array:
        """Which codes are no number; an empty array where all are."""

    @abstractmethod
    def zero_codes(self, codes: Array) -> Array:
        """Which codes are zeros."""

    @plainly
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        """float32 [R, C]: code * scale, one rounding; (code - zero point) * scale where there are zero points."""
        values = self.code_values(stored[CODES])
        with np.errstate(over="ignore", invalid="ignore"):  # stored scales may be anything
            if self.zero_points:
                values -= stored[ZERO_POINTS].astype(np.float32).reshape(-1, 1)
            grid, width = scale_values(stored[SCALES], self.scale_dtype)[self._grid_rows(rows)], self.block[1]
            for number in range(grid.shape[1]):  # a column of blocks at a time: no grid the size of the matrix
                values[:, number * width : (number + 1) * width] *= grid[:, number : number + 1]
        return values

    @plainly
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        """NaN codes; scales that are NaN, Inf, negative, or zero over a code that is not; products beyond float32."""
        codes, scales = stored[CODES], scale_values(stored[SCALES], self.scale_dtype)
        bad = self.nan_codes(codes)
        if bad.any():
            first = Problem.at(bad, CODES, "a NaN code", "")
            text = (
                f"codes expected to be numbers, found {first.count} of 0x7F or 0xFF (NaN), "
                f"the first at row {first.row}, column {first.column}"
            )
            yield replace(first, text=text)
        wrong, zero = ~(np.isfinite(scales) & (scales >= 0)), scales == 0
        elements = self._spread(wrong, rows, columns) if wrong.any() else wrong
        over = wrong
        if zero.any():
            over = self._spread(zero, rows, columns) & ~self.zero_codes(codes)
            wrong = wrong | self._any_in_block(over, scales.shape)
        if wrong.any():
            row, column = divmod(int(np.argmax(wrong)), scales.shape[1])
            text = (
                f"scales expected to be finite and positive, found {np.count_nonzero(wrong)} that are not, "
                f"the first {scales[row, column]} at row {row}, column {column} of the grid"
            )
            if elements.any():
                first = Problem.at(elements, SCALES, "", text)
                at = scales[self._grid_rows(rows)[first.row], first.column // self.block[1]]
                yield replace(first, value=f"a scale of {at}")
            else:
                yield Problem.at(over, SCALES, "a zero scale over a code that is not zero", text)
            return
        with np.errstate(over="ignore"):
            most = scales.max(initial=0) * self.largest
        if not np.isfinite(most):
            infinite = np.isinf(self.values(stored, rows, columns))
            if infinite.any():
                first = Problem.at(infinite, CODES, "a product of code and scale that is Inf", "")
                text = (
                    f"products of code and scale expected to be finite, found {first.count} that are Inf, the first at "
                    f"row {first.row}, column {first.column}"
                )
                yield replace(first, text=text)

    @plainly
    def zero_scales(self, stored: Stored) -> int:
        return int((scale_values(stored[SCALES], self.scale_dtype) == 0).sum())

    def window(self, rows: int, columns: int, first: int, count: int) -> tuple[Reading, dict[str, slice]]:
        top, height = self.first_row + first, self.block[0]
        own = slice(first, first + count)
        cut = {CODES: own, SCALES: slice(top // height, -(-(top + count) // height))}
        return replace(self, first_row=top % height), cut | ({ZERO_POINTS: own} if self.zero_points else {})

    def _grid_rows(self, rows: int) -> Array:
        """For each row, the row of the grid that describes it."""
        return (self.first_row + np.arange(rows)) // self.block[0]

    def _spread(self, grid: Array, rows: int, columns: int) -> Array:
        """What a grid says of every element."""
        spread: Array = grid[self._grid_rows(rows)[:, None], (np.arange(columns) // self.block[1])[None, :]]
        return spread

    def _any_in_block(self, bad: Array, grid: tuple[int, ...]) -> Array:
        """The blocks in which anything is bad."""
        found = np.zeros(grid, bool)
        rows, columns = np.nonzero(bad)
        found[self._grid_rows(bad.shape[0])[rows], columns // self.block[1]] = True
        return found


def stated_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The quantisation block a config states: `weight_block_size`, or compressed-tensors' `block_structure`."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        stated = place.get("quantization_config") or place.get("compression_config")
        if not isinstance(stated, dict):
            continue
        for block in (stated.get("weight_block_size"), *(w.get("block_structure") for w in _weights(stated))):
            if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
                return block[0], block[1]
    return None


def block_of(shape: tuple[int, ...], rows: int, columns: int, stated: tuple[int, int] | None) -> tuple[int, int] | None:
    """The block of scales of this shape for a [rows, columns] matrix; None if the shape means nothing known."""
    if shape in ((), (1,)):
        return rows, columns
    if stated is not None and shape == (-(-rows // stated[0]), -(-columns // stated[1])):
        return stated
    if shape in ((rows,), (rows, 1)):
        return 1, columns
    return (rows, columns) if shape == (1, 1) else None


def _weights(stated: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = stated.get("config_groups")
    weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    return [w for w in weights if isinstance(w, dict)]


def _compressed_types(stated: Mapping[str, Any]) -> set[str]:
    """The one type of weights that a compressed-tensors config announces ("float8", "int8"), or nothing."""
    if stated.get("quant_method", "compressed-tensors") != "compressed-tensors":
        return set()
    types = {f"{w.get('type')}{w.get('num_bits')}" for w in _weights(stated)}
    return types if len(types) == 1 else set()
