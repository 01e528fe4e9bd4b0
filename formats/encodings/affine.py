"""q3, q4, q8: a scale and a bias for every group of 64, readable by MLX (specs/codecs/affine.md).

w = scale * code + bias, product and sum each rounded to float32; scale and bias are BF16, code is 0..L, L = 7, 15 or
255. The encoder tries 20 pairs of scale and bias for every group and keeps the one of least squared error. All
arithmetic is float32, every operation rounded on its own; n is the size of the group.

- Unit. u = 2^k, k the exponent of the largest magnitude of the group but at most 0 and at least -126. The search works
  on v = w / u, which is exact. Its scales and biases are what is stored, divided by u, which is exact too: `stored(x)`
  is x * u rounded half to even, and, for a scale, raised in magnitude to the smallest normal number, its sign kept.
  What is too large for BF16 is Inf: such a pair loses, or the matrix is refused for it.
- Codes of a pair (s, b): clamp(rne((v - b) / s), 0, L). Its error: the sum of squares of v - (s * code + b).
- Sums S. Element i is added to lane i mod 16, lanes starting at +0, in increasing order; lanes are folded in halves,
  a[l] + a[l + h] with h = 8, 4, 2, 1.
- Five starts. The first is MLX's rule: t = max((high - low) / L, 1e-7 / u), negated unless |low| > |high|; e = low if
  |low| > |high|, else high; m = rne(e / t); the pair is (t, 0) if m = 0, else (e / m, e). The others are the range
  r = high - low with both ends drawn in: s = (r * f) / L, b = low + g * r for (f, g) = (1, 0), (0.9, 0.05), (0.8, 0.1),
  (0.7, 0.15). Each is stored before it is used.
- Refits. Each start is followed by three least-squares fits to the codes q of the pair before:
  d = n * S(q * q) - S(q) * S(q); s = stored((n * S(q * v) - S(q) * S(v)) / d); b = stored((S(v) - s * S(q)) / n), with
  the scale as stored. If d = 0 (all codes equal) the pair stays.
- The pair of least error wins, of equals the first, start by start; where no error is finite, the very first. Its codes
  are stored. A group of zeros has scale 1, bias +0 and codes 0.

Multiplied (formats/products.py): activations in 8 bits; of each group the exact sums d of code * a and A of a; then
y = s_x * (P + Q), P the sum over the groups of f32(d) * scale and Q that of f32(A) * bias, in 16 lanes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagestone.formats import products
from pagestone.formats.dtypes import F32, Array, bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings.contracts import Codec, ConfigFacts, EncodeStats, Option, Problem, Stored
from pagestone.formats.errors import LayoutError
from pagestone.formats.floats import plainly
from pagestone.formats.layout import Role
from pagestone.formats.stats import LANES, error_and_norm, refuse_non_finite

GROUPS = (64, 32)
"""Group sizes, the default first."""
SHRINK = tuple(np.float32(f) for f in (1.0, 0.9, 0.8, 0.7))
MARGIN = tuple(np.float32(c) for c in (0.0, 0.05, 0.1, 0.15))
REFITS = 3
SMALLEST_STEP = np.float32(1e-7)
SMALLEST_NORMAL = np.float32(np.finfo(np.float32).smallest_normal)
AT_ONCE = 1 << 11
"""Groups searched at a time: memory does not grow with the matrix."""


@dataclass(frozen=True, slots=True)
class Affine(Codec):
    """codes `weight` U32 [R, C * bits / 32], `scales` and `biases` BF16 [R, C / group_size].

    Codes lie least significant bit first in one little-endian bit stream a row: code i is bits `bits` * i onward.
    """

    encoder: ClassVar[str | None] = "encode_affine"
    multiplier: ClassVar[str | None] = "matmul_affine"
    bits: ClassVar[int]
    options: ClassVar[tuple[Option, ...]] = (Option("group_size", GROUPS, "Values that share a scale and a bias."),)
    config_keys: ClassVar[tuple[str, ...]] = ("quantization", "quantization_config")

    group_size: int = GROUPS[0]

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size not in GROUPS:
            raise ValueError(f"group_size expected to be 64 or 32, found {self.group_size!r}")

    @property
    def parameters(self) -> dict[str, int | str]:
        return {"group_size": self.group_size}

    @property
    def levels(self) -> np.float32:
        """The largest code."""
        return np.float32((1 << self.bits) - 1)

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        if columns % self.group_size:
            fits = [size for size in GROUPS if columns % size == 0]
            raise LayoutError(
                f"{self.name}: columns expected to be a multiple of the group size {self.group_size}, found {columns}",
                code="E0103",
                remedy=f"--group-size {fits[0]}" if fits else "use a codec without groups: bf16, int8 or fp8",
            )
        grid = (rows, columns // self.group_size)
        return (
            Role("codes", "weight", "U32", (rows, columns * self.bits // 32)),
            Role("scales", "scales", "BF16", grid),
            Role("biases", "biases", "BF16", grid),
        )

    def kernel_arguments(self) -> tuple[int, ...]:
        return (self.bits, self.group_size)

    @plainly
    def encode_definition(self, weight: F32, out: Stored) -> EncodeStats:
        refuse_non_finite(weight, weight)
        groups = np.ascontiguousarray(weight, np.float32).reshape(-1, self.group_size)
        codes = np.empty(groups.shape, np.uint8)
        scales, biases = np.empty((2, len(groups)), np.uint16)
        for start in range(0, len(groups), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            codes[part], scales[part], biases[part] = search(groups[part], self.levels)
        out["codes"][...] = pack(codes.reshape(weight.shape), self.bits)
        out["scales"][...] = scales.reshape(out["scales"].shape)
        out["biases"][...] = biases.reshape(out["biases"].shape)
        decoded = self.values(out, *weight.shape)
        refuse_non_finite(decoded, weight)
        return EncodeStats(*error_and_norm(weight, decoded))

    @plainly
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        codes = unpack(stored["codes"], columns, self.bits).reshape(rows, -1, self.group_size)
        scales, biases = (bf16_to_f32(stored[role])[:, :, None] for role in ("scales", "biases"))
        with np.errstate(over="ignore", invalid="ignore"):  # stored scales may be anything
            values: F32 = scales * codes.astype(np.float32) + biases
        return values.reshape(rows, columns)

    @plainly
    def matmul_definition(self, stored: Stored, x: Array, rows: int, columns: int) -> F32:
        products.expect_stored(stored, self.in_record(rows, columns))
        tokens, of_tokens = products.quantise(products.activations(x, columns))
        grouped = tokens.reshape(len(x), columns // self.group_size, self.group_size)
        codes = unpack(stored["codes"], columns, self.bits).reshape(rows, *grouped.shape[1:]).astype(np.float32)
        scales, biases = bf16_to_f32(stored["scales"]), bf16_to_f32(stored["biases"])
        results = np.empty((len(x), rows), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for token, scale, result in zip(grouped.astype(np.float32), of_tokens, results, strict=True):
                dots = (codes * token).sum(axis=2)  # integers below 2^24: exact in any order
                scaled = products.lane_sum(dots, scales, products.GROUP_LANES)
                raised = products.lane_sum(token.sum(axis=1), biases, products.GROUP_LANES)
                result[...] = scale * (scaled + raised)
        return products.one_nan(results)

    @plainly
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        for role in ("scales", "biases"):
            values = bf16_to_f32(stored[role])
            bad = ~np.isfinite(values)
            if bad.any():
                row, column = divmod(int(np.argmax(bad)), bad.shape[1])
                text = (
                    f"{role} expected to be finite, found {np.count_nonzero(bad)} that are not, "
                    f"the first {values[row, column]} at row {row}, group {column}"
                )
                yield Problem.at(bad, role, f"a {role[:-1]} of {values[row, column]}", text)

    def describes_dense(self, dense: Codec, codes_read: bool) -> bool:
        """MLX takes every module that has scales for codes of these parameters."""
        return dense == self

    def quantization_config(self, facts: ConfigFacts) -> dict[str, Any]:
        # MLX's words, and no `quant_method`: without it transformers raises, with an unknown one it loads the codes.
        return {"group_size": self.group_size, "bits": self.bits, "mode": "affine"}


class Q3(Affine):
    """3 bits a weight and a scale and a bias for every 64: 3.5 bits in all."""

    __slots__ = ()
    name: ClassVar[str] = "q3"
    bits: ClassVar[int] = 3


class Q4(Affine):
    """4 bits a weight and a scale and a bias for every 64: 4.5 bits in all."""

    __slots__ = ()
    name: ClassVar[str] = "q4"
    bits: ClassVar[int] = 4


class Q8(Affine):
    """8 bits a weight and a scale and a bias for every 64: 8.5 bits in all."""

    __slots__ = ()
    name: ClassVar[str] = "q8"
    bits: ClassVar[int] = 8


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """uint32 [R, C * bits / 32] of codes [R, C]: bit j of code i is bit `bits` * i + j of the row's stream."""
    rows, columns = codes.shape
    stream = np.unpackbits(codes.reshape(rows, columns, 1), axis=2, bitorder="little", count=bits)
    return np.packbits(stream.reshape(rows, -1), axis=1, bitorder="little").view("<u4")


def unpack(words: Array, columns: int, bits: int) -> NDArray[np.uint8]:
    """Codes [R, `columns`] of packed words: the inverse of `pack`."""
    rows = words.shape[0]
    stream = np.unpackbits(np.ascontiguousarray(words, "<u4").view(np.uint8), axis=1, bitorder="little")
    codes = np.packbits(stream.reshape(rows, columns, bits), axis=2, bitorder="little")
    return codes.reshape(rows, columns)


def lane_sum(values: F32) -> F32:
    """Sums over the groups of float32 [N, n] as the module defines them: [N, 1]."""
    lanes = np.zeros((len(values), LANES), np.float32)
    for start in range(0, values.shape[1], LANES):
        lanes += values[:, start : start + LANES]
    half = LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes


def mlx_rule(values: F32, levels: np.float32, smallest_step: F32) -> tuple[F32, F32]:
    """(scale, bias), each [N, 1], of groups [N, n] by the rule of `mlx.core.quantize` on a CPU; before any rounding."""
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    lower = np.abs(low) > np.abs(high)
    step = np.maximum((high - low) / levels, smallest_step)
    scale, edge = np.where(lower, step, -step), np.where(lower, low, high)
    steps = np.rint(edge / scale)
    none = steps == 0
    return np.where(none, scale, edge / np.where(none, np.float32(1), steps)), np.where(none, np.float32(0), edge)


def codes_of(values: F32, scale: F32, bias: F32, levels: np.float32) -> F32:
    """The code of every value, still float32."""
    quotient = (values - bias) / scale
    return np.rint(np.minimum(np.where(quotient > 0, quotient, np.float32(0)), levels))


def stored_bias(x: F32, unit: F32) -> F32:
    """What BF16 makes of `x` units, in units."""
    return bf16_to_f32(f32_to_bf16(x * unit)) / unit


def stored_scale(x: F32, unit: F32) -> F32:
    """As `stored_bias`, but no smaller in magnitude than the smallest normal number."""
    y = stored_bias(x, unit) * unit
    raised: F32 = np.where(np.abs(y) < SMALLEST_NORMAL, np.copysign(SMALLEST_NORMAL, y), y)
    return raised / unit


def search(groups: F32, levels: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint16]]:
    """Codes [N, n], scales [N] and biases [N] (BF16 bits) of finite groups float32 [N, n]."""
    with np.errstate(all="ignore"):  # candidates may overflow: their error is then no number, and they lose
        most = np.abs(groups).max(axis=1, keepdims=True)
        exponent = np.clip((most.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127, -126, 0)
        unit = np.ldexp(np.float32(1), exponent)
        values = groups / unit
        scale, bias = _best_pair(values, levels, unit)
        codes = codes_of(values, scale, bias, levels).astype(np.uint8)
        zeros = most == 0
        scale, bias = np.where(zeros, np.float32(1), scale * unit), np.where(zeros, np.float32(0), bias * unit)
        return np.where(zeros, np.uint8(0), codes), f32_to_bf16(scale)[:, 0], f32_to_bf16(bias)[:, 0]


def _best_pair(values: F32, levels: np.float32, unit: F32) -> tuple[F32, F32]:
    count = np.float32(values.shape[1])
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    total, span = lane_sum(values), high - low
    starts: list[tuple[F32, F32]] = [mlx_rule(values, levels, SMALLEST_STEP / unit)]
    starts += [((span * f) / levels, low + g * span) for f, g in zip(SHRINK, MARGIN, strict=True)]
    best_scale, best_bias = stored_scale(starts[0][0], unit), stored_bias(starts[0][1], unit)
    least = np.full_like(low, np.inf)
    for raw_scale, raw_bias in starts:
        scale, bias = stored_scale(raw_scale, unit), stored_bias(raw_bias, unit)
        for refits_left in reversed(range(REFITS + 1)):
            codes = codes_of(values, scale, bias, levels)
            difference = values - (scale * codes + bias)
            error = lane_sum(difference * difference)
            better = error < least
            least = np.where(better, error, least)
            best_scale, best_bias = np.where(better, scale, best_scale), np.where(better, bias, best_bias)
            if refits_left:
                q, qq, qv = lane_sum(codes), lane_sum(codes * codes), lane_sum(codes * values)
                below = count * qq - q * q  # of q3 and q4 all exact; of q8 each product is rounded
                slope: F32 = np.divide(count * qv - q * total, below)
                new_scale = stored_scale(slope, unit)
                new_bias = stored_bias(np.divide(total - new_scale * q, count), unit)
                scale, bias = np.where(below == 0, scale, new_scale), np.where(below == 0, bias, new_bias)
    return best_scale, best_bias


ENCODINGS = (Q3, Q4, Q8)
