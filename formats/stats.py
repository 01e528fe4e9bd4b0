"""The statistics of encoding, defined to the last bit, and the refusal of values that no container may hold.

A sum of squares over a matrix [R, C] in float64: within a row, element i is added to lane i mod 16, lanes starting at
+0.0, each square and each sum rounded on its own; lanes are folded in halves, a[l] + a[l + h] with h = 8, 4, 2, 1; rows
are summed in increasing order from 0.0. Vector registers of any width do exactly this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagestone.formats.dtypes import F32
from pagestone.formats.errors import NonFiniteError
from pagestone.formats.floats import plainly

LANES = 16


@plainly
def sum_of_squares(values: NDArray[np.float64]) -> float:
    """The sum of `values` * `values`, float64 [R, C], as defined above."""
    rows, columns = values.shape
    lanes = np.zeros((rows, LANES))
    for start in range(0, columns, LANES):
        chunk = values[:, start : start + LANES]
        lanes[:, : chunk.shape[1]] += chunk * chunk
    half = LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    total = 0.0
    for row in lanes[:, 0].tolist():
        total += row
    return total


@plainly
def error_and_norm(weight: F32, decoded: F32) -> tuple[float, float]:
    """Sums of (w - decoded)^2 and of w^2 over float32 [R, C], both finite; the difference is taken in float64."""
    exact = weight.astype(np.float64)
    return sum_of_squares(exact - decoded.astype(np.float64)), sum_of_squares(exact)


def refuse_non_finite(values: F32, source: F32) -> None:
    """Raises `NonFiniteError` if any of `values` [R, C] is NaN or Inf, naming the value of `source` at the first.

    Called with the source itself before encoding, and with the decoded values after it: near the largest float32
    scale * code can overflow although the source is finite.
    """
    bad = ~np.isfinite(values)
    count = int(np.count_nonzero(bad))
    if count:
        row, column = divmod(int(np.argmax(bad)), values.shape[1])
        raise NonFiniteError(count, row, column, value_text(float(source[row, column])))


def value_text(value: float) -> str:
    """A value as messages print it: NaN, Inf, -Inf, or the shortest decimal of the float32."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return str(np.float32(value))
