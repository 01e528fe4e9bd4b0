"""What the native products y = x W^T have in common, defined to the last bit (specs/products.md).

All arithmetic is float32, every operation rounded on its own to nearest even, subnormals kept, nothing fused. `x` holds
the tokens: BF16 bits (uint16) or float16, [M, C]. A token's result depends on that token and the matrix alone.

- Lanes. A sum over terms 0, 1, 2, ... is kept in n lanes that start at +0: term i is added to lane i mod n, in
  increasing order; a lane without a term gets nothing. Lanes are folded in halves, a[l] + a[l + h], h = n/2, ..., 2, 1.
  Columns are summed in 64 lanes (bf16, fp8), groups in 16 (q3, q4). A row need not fill its lanes.
- Activations in 8 bits (int8, q3, q4). s_x = amax / 127 with amax the token's largest magnitude, 1 where amax is 0;
  a = clamp(rne(x / s_x), -127, 127), the quotient rounded to float32 first. (s_x may be subnormal; rounding it may put
  the quotient above 127, hence the clamp.)
- A result that is NaN is 0x7FC00000, whatever made it one.
- Results may be stored in the model's type: rounded once from float32, half to even, what is too large to Inf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pagestone.formats.dtypes import F32, Array, bf16_to_f32, f32_to_bf16
from pagestone.formats.errors import NonFiniteError
from pagestone.formats.floats import plainly
from pagestone.formats.layout import Role
from pagestone.formats.stats import value_text

LANES = 64
"""Of a sum over columns."""
GROUP_LANES = 16
"""Of a sum over groups."""
LARGEST = np.float32(127)
RESULTS = (np.float32, np.uint16, np.float16)
"""Types a result may have: float32, BF16 bits, float16."""


def output(x: Array, rows: int, columns: int, out: Array | None) -> Array:
    """`out`, or a fresh float32 array: [M, rows] for tokens `x` [M, columns]. Raises `ValueError` for other shapes."""
    expect_shape("x", x.shape, (*x.shape[:1], columns))
    if out is None:
        return np.empty((len(x), rows), np.float32)
    if out.dtype not in RESULTS:
        raise TypeError(f"out: dtype expected to be float32, uint16 (BF16 bits) or float16, found {out.dtype}")
    expect_shape("out", out.shape, (len(x), rows))
    return out


def expect_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises `ValueError` with both if they differ."""
    if tuple(found) != tuple(expected):
        raise ValueError(f"{name}: shape expected to be {list(expected)}, found {list(found)}")


def expect_stored(stored: Mapping[str, Array], roles: Sequence[Role]) -> None:
    """Raises `ValueError` if a stored array has another shape than its tensor."""
    for role in roles:
        expect_shape(role.name, stored[role.name].shape, role.shape)


@plainly
def activations(x: Array, columns: int) -> F32:
    """The values of tokens [M, columns], exactly.

    Raises `TypeError` for anything but BF16 bits and float16: a product in float32 is not defined here. Raises
    `NonFiniteError` naming the first token with a NaN or Inf.
    """
    if x.dtype not in (np.uint16, np.float16):
        raise TypeError(f"x: dtype expected to be uint16 (BF16 bits) or float16, found {x.dtype}")
    expect_shape("x", x.shape, (*x.shape[:1], columns))
    values: F32 = bf16_to_f32(x) if x.dtype == np.uint16 else x.astype(np.float32)
    bad = ~np.isfinite(values)
    if bad.any():
        token, column = divmod(int(np.argmax(bad)), columns)
        text = value_text(float(values[token, column]))
        raise NonFiniteError(int(np.count_nonzero(bad)), token, column, text, rows="token")
    return values


@plainly
def quantise(values: F32) -> tuple[NDArray[np.int8], F32]:
    """(a [M, C], s_x [M]): finite tokens in 8 bits, each with its scale."""
    amax = np.abs(values).max(axis=1, initial=0)
    scale: F32 = np.where(amax == 0, np.float32(1), amax / LARGEST)
    return np.clip(np.rint(values / scale[:, None]), -LARGEST, LARGEST).astype(np.int8), scale


def fold(lanes: F32) -> F32:
    """Lanes [..., n], n a power of two, folded in halves: [...]."""
    half = lanes.shape[-1] // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]


@plainly
def lane_sum(left: F32, right: F32, count: int) -> F32:
    """Sums over the last axis of left * right, broadcast, in `count` lanes: each product and each sum rounded."""
    shape = np.broadcast_shapes(left.shape, right.shape)
    lanes = np.zeros((*shape[:-1], count), np.float32)
    for start in range(0, shape[-1], count):
        terms = left[..., start : start + count] * right[..., start : start + count]
        lanes[..., : terms.shape[-1]] += terms
    return fold(lanes)


def one_nan(results: F32) -> F32:
    """Results with every NaN made the one NaN."""
    return np.where(np.isnan(results), np.float32(np.nan), results)


@plainly
def store(results: F32, out: Array) -> None:
    """Results in the type of `out`."""
    with np.errstate(over="ignore"):
        out[...] = f32_to_bf16(results) if out.dtype == np.uint16 else results.astype(out.dtype)
