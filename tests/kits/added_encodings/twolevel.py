"""twolevel: 4-bit codes, 6-bit scales of groups of 16 under one BF16 scale a block of 256 (for tests).

w = (code - 8) * (scale * superscale), both products in float32; code 1..15, two in a byte, the lower half first; scale
0..63, packed least significant bit first, twelve bytes a block; superscale = the block's largest group scale / 63.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagestone.formats import products
from pagestone.formats.dtypes import F32, Array, bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings import Codec, ConfigFacts, EncodeStats, Problem, Stored
from pagestone.formats.errors import LayoutError
from pagestone.formats.floats import plainly
from pagestone.formats.layout import Role
from pagestone.formats.stats import error_and_norm, refuse_non_finite

GROUP, BLOCK, BITS = 16, 256, 6
LARGEST, LEVELS = np.float32(7), np.float32(63)


@dataclass(frozen=True, slots=True)
class TwoLevel(Codec):
    """codes U8 [R, C / 2], scales U8 [R, C / 256 * 12], superscales BF16 [R, C / 256]."""

    name: ClassVar[str] = "twolevel"

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        if columns % BLOCK:
            raise LayoutError(
                f"twolevel: columns expected to be a multiple of {BLOCK}, found {columns}", code="E0103",
                remedy="use another codec",
            )  # fmt: skip
        return (
            Role("codes", "weight", "U8", (rows, columns // 2)),
            Role("scales", "scales", "U8", (rows, columns // GROUP * BITS // 8)),
            Role("superscales", "superscales", "BF16", (rows, columns // BLOCK)),
        )

    @plainly
    def encode_definition(self, weight: F32, out: Stored) -> EncodeStats:
        refuse_non_finite(weight, weight)
        rows, columns = weight.shape
        wanted = np.abs(weight).reshape(rows, -1, GROUP).max(axis=2) / LARGEST
        above = wanted.reshape(rows, -1, BLOCK // GROUP).max(axis=2) / LEVELS
        out["superscales"][...] = f32_to_bf16(above)
        above = np.repeat(bf16_to_f32(out["superscales"]), BLOCK // GROUP, axis=1)
        none = above == 0
        scales = np.where(none, 0, np.clip(np.rint(wanted / np.where(none, 1, above)), 0, LEVELS)).astype(np.uint8)
        bits = np.unpackbits(scales[:, :, None], axis=2, bitorder="little", count=BITS)
        out["scales"][...] = np.packbits(bits.reshape(rows, -1), axis=1, bitorder="little")
        each = np.repeat(scales.astype(np.float32) * above, GROUP, axis=1)
        codes = np.where(each == 0, 0, np.clip(np.rint(weight / np.where(each == 0, 1, each)), -LARGEST, LARGEST)) + 8
        codes = codes.astype(np.uint8)
        out["codes"][...] = codes[:, ::2] | codes[:, 1::2] << 4
        return EncodeStats(*error_and_norm(weight, self.values(out, rows, columns)))

    @plainly
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        bits = np.unpackbits(np.ascontiguousarray(stored["scales"]), axis=1, bitorder="little")
        scales = np.packbits(bits.reshape(rows, -1, BITS), axis=2, bitorder="little").reshape(rows, -1)
        with np.errstate(all="ignore"):
            above = np.repeat(bf16_to_f32(stored["superscales"]), BLOCK // GROUP, axis=1)
            each = np.repeat(scales.astype(np.float32) * above, GROUP, axis=1)
            found: F32 = (self._codes(stored).astype(np.float32) - 8) * each
        return found

    @plainly
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        above = bf16_to_f32(stored["superscales"])
        bad = ~(np.isfinite(above) & (above >= 0))
        if bad.any():
            text = f"superscales expected to be finite and not negative, found {np.count_nonzero(bad)} that are not"
            yield Problem.at(bad, "superscales", "a superscale that is none", text)
        bad = self._codes(stored) == 0
        if bad.any():
            yield Problem.at(
                bad, "codes", "a code of 0", f"codes of 1 to 15 expected, found {np.count_nonzero(bad)} of 0"
            )

    @plainly
    def matmul_definition(self, stored: Stored, x: Array, rows: int, columns: int) -> F32:
        products.expect_stored(stored, self.in_record(rows, columns))
        weight, tokens = self.values(stored, rows, columns), products.activations(x, columns)
        return np.stack([products.lane_sum(weight, token, products.LANES) for token in tokens])

    def quantization_config(self, facts: ConfigFacts) -> dict[str, Any]:
        return {"mode": "twolevel", "block_size": BLOCK}

    @staticmethod
    def _codes(stored: Stored) -> Array:
        packed = stored["codes"]
        return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


ENCODINGS = (TwoLevel,)
