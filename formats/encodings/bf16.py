"""bf16: the model's own values, only laid out to stream; readable by everybody (specs/codecs/bf16.md).

From BF16 the bytes themselves. From F16 and F32 each value rounded once, half to even; a value that would become Inf is
refused.

Multiplied (formats/products.py): y = sum over the columns of w * x in 64 lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagestone.formats import products
from pagestone.formats.dtypes import F32, Array, bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings.contracts import Codec, ConfigFacts, EncodeStats, Problem, Stored
from pagestone.formats.encodings.floats import Plain
from pagestone.formats.floats import plainly
from pagestone.formats.stats import error_and_norm, refuse_non_finite, value_text

MAGNITUDE, INFINITE = 0x7FFF, 0x7F80
"""Bits of a code without its sign; from which of them on a code is Inf or NaN."""


@dataclass(frozen=True, slots=True)
class Bf16(Plain, Codec):
    """codes `weight` BF16 [R, C]: exact from BF16, rounded from other types."""

    name: ClassVar[str] = "bf16"
    encoder: ClassVar[str | None] = "encode_bf16"
    multiplier: ClassVar[str | None] = "matmul_bf16"
    verb: ClassVar[str] = "rounded"
    plain: ClassVar[str] = "BF16"
    codes_dtypes: ClassVar[tuple[str, ...]] = ("BF16",)

    @plainly
    def encode_definition(self, weight: F32, out: Stored) -> EncodeStats:
        refuse_non_finite(weight, weight)
        codes = f32_to_bf16(weight)
        out["codes"][...] = codes
        decoded = bf16_to_f32(codes)
        refuse_non_finite(decoded, weight)
        return EncodeStats(*error_and_norm(weight, decoded))

    @plainly
    def matmul_definition(self, stored: Stored, x: Array, rows: int, columns: int) -> F32:
        products.expect_stored(stored, self.in_record(rows, columns))
        tokens, weight = products.activations(x, columns), self.values(stored, rows, columns)
        results = np.empty((len(x), rows), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for token, result in zip(tokens, results, strict=True):
                result[...] = products.lane_sum(weight, token, products.LANES)
        return products.one_nan(results)

    @plainly
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        codes = stored["codes"]
        forbidden = (codes & MAGNITUDE) >= INFINITE
        if forbidden.any():
            row, column = divmod(int(np.argmax(forbidden)), columns)
            text = (
                f"codes expected to be finite, found {np.count_nonzero(forbidden)} of Inf or NaN, "
                f"the first 0x{int(codes[row, column]):04X} at row {row}, column {column}"
            )
            value = value_text(float(bf16_to_f32(codes[row : row + 1, column])[0]))
            yield Problem.at(forbidden, "codes", value, text)

    def quantization_config(self, facts: ConfigFacts) -> dict[str, Any] | None:
        return None


ENCODINGS = (Bf16,)
