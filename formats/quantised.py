"""A matrix that comes already quantised: codes and scales of another checkpoint, before any codec of ours.

One description serves every convention: the scale of element (r, c) is
`scales[(first_row + r) // block[0], c // block[1]]`. A scale per tensor is one block of the whole matrix, a scale per
channel a block of one row (specs/codecs/fp8.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagestone.formats.dtypes import E4M3_VALUES, F32, Array, bf16_to_f32
from pagestone.formats.errors import NonFiniteError
from pagestone.formats.floats import plainly

FP8, INT8 = "fp8", "int8"
KINDS = {"F8_E4M3": FP8, "I8": INT8}
"""Element types of codes, and what they are called here."""
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
class Form:
    """Shape of a quantised matrix without its data: enough for a codec to say whether it could take it as it is."""

    kind: str
    rows: int
    columns: int
    block: tuple[int, int]
    first_row: int = 0
    scale_dtype: str = "F32"
    zero_points: bool = False

    @property
    def per_tensor(self) -> bool:
        """One scale for the whole matrix."""
        return self.block[0] >= self.first_row + self.rows and self.block[1] >= self.columns

    @property
    def per_channel(self) -> bool:
        """One scale for every row."""
        return self.block[0] == 1 and self.block[1] >= self.columns

    def __str__(self) -> str:
        if self.per_channel:
            return f"{self.kind}, a scale per channel"
        return (
            f"{self.kind}, a scale per tensor"
            if self.per_tensor
            else f"{self.kind}, blocks of {self.block[0]}x{self.block[1]}"
        )


@dataclass(frozen=True, slots=True)
class Quantised:
    """codes [R, C] (uint8 bits of E4M3FN, or int8), scales float32 [grid rows, grid columns], and how they belong."""

    form: Form
    codes: Array
    scales: F32
    zero_points: Array | None = None

    def grid_rows(self) -> Array:
        """For each row, the row of the grid that describes it."""
        return (self.form.first_row + np.arange(self.form.rows)) // self.form.block[0]

    def spread(self) -> F32:
        """The scale of every element, float32 [R, grid columns repeated to C]."""
        columns = np.arange(self.form.columns) // self.form.block[1]
        return self.scales[self.grid_rows()[:, None], columns[None, :]]

    @plainly
    def values(self) -> F32:
        """float32 [R, C]: code * scale, one rounding; (code - zero point) * scale where there are zero points.

        Raises `NonFiniteError` for NaN codes, for scales that are NaN, Inf, negative, or zero over a non-zero code, and
        for a product beyond float32.
        """
        self.check()
        values: F32 = E4M3_VALUES[self.codes] if self.form.kind == FP8 else self.codes.astype(np.float32)
        if self.zero_points is not None:
            values -= self.zero_points.astype(np.float32).reshape(-1, 1)
        rows, width = self.scales[self.grid_rows()], self.form.block[1]
        with np.errstate(over="ignore"):
            for number in range(rows.shape[1]):  # a column of blocks at a time: no grid the size of the matrix
                values[:, number * width : (number + 1) * width] *= rows[:, number : number + 1]
        infinite = np.isinf(values)
        if infinite.any():
            self._raise(infinite, "a product of code and scale that is Inf")
        return values

    @plainly
    def check_values(self) -> None:
        """Raises `NonFiniteError` as `values` does, without making them where none can be Inf."""
        self.check()
        with np.errstate(over="ignore", invalid="ignore"):
            largest = self.scales.max(initial=0) * np.float32(448 if self.form.kind == FP8 else 255)
        if not np.isfinite(largest):
            self.values()

    @plainly
    def check(self) -> None:
        """Raises `NonFiniteError` as `values` says, but for products."""
        if self.form.kind == FP8:
            bad = (self.codes & 0x7F) == 0x7F
            if bad.any():
                self._raise(bad, "a NaN code")
        wrong = ~(np.isfinite(self.scales) & (self.scales >= 0))
        if wrong.any():
            spread = self.spread()
            bad = ~(np.isfinite(spread) & (spread >= 0))
            if bad.any():
                row, column = divmod(int(np.argmax(bad)), self.form.columns)
                self._raise(bad, f"a scale of {spread[row, column]}")
        if not (self.scales == 0).any():
            return
        zero_code = (self.codes & 0x7F) == 0 if self.form.kind == FP8 else self.codes == 0
        bad = (self.spread() == 0) & ~zero_code
        if bad.any():
            self._raise(bad, "a zero scale over a code that is not zero")

    @property
    @plainly
    def zero_scales(self) -> int:
        """Scales of zero among those that describe this matrix; `check` holds that they cover zeros only."""
        return int((self.scales[np.unique(self.grid_rows())] == 0).sum())

    def _raise(self, bad: Array, what: str) -> None:
        row, column = divmod(int(np.argmax(bad)), self.form.columns)
        raise NonFiniteError(int(np.count_nonzero(bad)), row, column, what)
