"""int8: one scale per output row, readable by compressed-tensors (specs/codecs/int8.md).

For a row with largest magnitude amax > 0, all in float32: s = amax / 127, raised to the smallest normal float32;
code = clamp(rne(w / s), -127, 127). A row of zeros has s = 1. Decoded: code * s.

Multiplied (formats/products.py): activations in 8 bits; y = (f32(acc) * s_x) * s, acc the exact sum of code * a.
Kernels that add 128 to the activations take 128 * row sum off again, with the sidecar's row sums: if these are wrong,
so is y.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagestone.formats import products
from pagestone.formats.dtypes import F32, Array
from pagestone.formats.encodings.contracts import Codec, ConfigFacts, EncodeStats, Problem, Reading, Stored
from pagestone.formats.encodings.scaled import ZERO_POINTS, Scaled, scale_values
from pagestone.formats.floats import plainly
from pagestone.formats.layout import BESIDE, Role
from pagestone.formats.stats import error_and_norm, refuse_non_finite

LARGEST = 127
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


class Int8Source(Scaled):
    """int8 codes under any grid of scales, with or without zero points, as checkpoints have them."""

    __slots__ = ()
    name: ClassVar[str] = "int8"
    codes_dtype: ClassVar[str] = "I8"
    codes_dtypes: ClassVar[tuple[str, ...]] = ("I8",)
    largest: ClassVar[np.float32] = np.float32(255)
    spellings: ClassVar[dict[str, tuple[str, ...]]] = Scaled.spellings | {ZERO_POINTS: ("weight_zero_point",)}
    methods: ClassVar[tuple[str, ...]] = ("compressed-tensors",)
    announced_type: ClassVar[str] = "int8"

    def code_values(self, codes: Array) -> F32:
        return codes.astype(np.float32)

    def nan_codes(self, codes: Array) -> Array:
        return np.zeros((0, 1), bool)

    def zero_codes(self, codes: Array) -> Array:
        zero: Array = codes == 0
        return zero


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """codes `weight` I8 [R, C], scales `weight_scale` F32 [R, 1], `row_sum` I32 [R] in the sidecar."""

    name: ClassVar[str] = "int8"
    encoder: ClassVar[str | None] = "encode_int8"
    multiplier: ClassVar[str | None] = "matmul_int8"

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        return (
            Role("codes", "weight", "I8", (rows, columns)),
            Role("scales", "weight_scale", "F32", (rows, 1)),
            # sums over the codes of each row: what a u8 x s8 product with activations + 128 has too much
            Role("row_sums", "row_sum", "I32", (rows,), BESIDE),
        )

    @plainly
    def encode_definition(self, weight: F32, out: Stored) -> EncodeStats:
        refuse_non_finite(weight, weight)
        amax = np.abs(weight).max(axis=1, keepdims=True)
        scale = np.maximum(amax / np.float32(LARGEST), SMALLEST_NORMAL)
        scale[amax == 0] = 1
        codes = np.clip(np.rint(weight / scale), -LARGEST, LARGEST).astype(np.int8)
        out["codes"][...] = codes
        out["scales"][...] = scale
        if "row_sums" in out:
            out["row_sums"][...] = codes.sum(axis=1, dtype=np.int32)
        decoded = _product(codes, scale)
        refuse_non_finite(decoded, weight)
        return EncodeStats(*error_and_norm(weight, decoded))

    def takes(self, source: Reading, rows: int, columns: int) -> str | None:
        words = source.described(rows, columns)
        if not isinstance(source, Int8Source):
            return f"{words}: not int8 codes"
        if source.zero_points:
            return f"{words}: zero points"
        alike = source.per_channel(columns) or source.per_tensor(rows, columns)
        return None if alike else f"{words}: not a scale per row"

    @plainly
    def take(self, stored: Stored, source: Reading, rows: int, columns: int, out: Stored) -> bool:
        """False where a code is -128 or a scale is zero or subnormal: neither may stand in a container."""
        assert isinstance(source, Int8Source)
        codes, scales = stored["codes"], scale_values(stored["scales"], source.scale_dtype)
        if (codes == -128).any() or (scales < SMALLEST_NORMAL).any():
            return False
        out["codes"][...] = codes
        out["scales"][...] = scales  # one alone is repeated
        if "row_sums" in out:
            out["row_sums"][...] = codes.sum(axis=1, dtype=np.int32)
        return True

    @plainly
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        return _product(stored["codes"], stored["scales"])

    @plainly
    def matmul_definition(self, stored: Stored, x: Array, rows: int, columns: int) -> F32:
        products.expect_stored(stored, self.in_record(rows, columns))
        tokens, of_tokens = products.quantise(products.activations(x, columns))
        exact = tokens.astype(np.float64) @ stored["codes"].astype(np.float64).T  # integers below 2^53
        with np.errstate(over="ignore", invalid="ignore"):
            results = (exact.astype(np.float32) * of_tokens[:, None]) * stored["scales"].reshape(1, rows)
        return products.one_nan(results)

    def matmul_arrays(self, stored: Stored, rows: int, columns: int) -> list[Array]:
        codes = stored["codes"]
        sums = stored["row_sums"] if "row_sums" in stored else codes.sum(axis=1, dtype=np.int32)
        return [codes, stored["scales"], sums]

    @plainly
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        codes, scales = stored["codes"], stored["scales"]
        forbidden = codes == -128
        if forbidden.any():
            row, column = divmod(int(np.argmax(forbidden)), columns)
            text = (
                f"codes expected to be within -127..127, found {np.count_nonzero(forbidden)} of -128, "
                f"the first at row {row}, column {column}"
            )
            yield Problem.at(forbidden, "codes", "a code of -128", text)
        bad = ~(np.isfinite(scales) & (scales >= SMALLEST_NORMAL)).reshape(-1)
        if bad.any():
            row = int(np.argmax(bad))
            text = (
                f"scales expected to be finite, positive and normal, found {np.count_nonzero(bad)} that are not, "
                f"the first {scales[row, 0]} at row {row}"
            )
            yield Problem.at(bad[:, None], "scales", f"a scale of {scales[row, 0]}", text)
        if "row_sums" in stored:
            expected = codes.sum(axis=1, dtype=np.int32)
            wrong = stored["row_sums"] != expected
            if wrong.any():
                row = int(np.argmax(wrong))
                text = (
                    f"row sums expected to be the sums of the codes, found {np.count_nonzero(wrong)} that are not, "
                    f"the first {stored['row_sums'][row]} instead of {expected[row]} at row {row}"
                )
                yield Problem.at(wrong[:, None], "row_sums", f"a row sum of {stored['row_sums'][row]}", text)

    def quantization_config(self, facts: ConfigFacts) -> dict[str, Any]:
        stem = "_proj" if all(name.endswith("_proj") for name in facts.part_names) else ""
        names = "|".join(re.escape(name.removesuffix(stem)) for name in facts.part_names)
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
        group = {
            "targets": [rf"re:.*experts\.\d+\.({names}){stem}$"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "int-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [],
        }


def _product(codes: Any, scales: Any) -> F32:
    """code * scale in float32; an overflow to Inf is the caller's to find, and stored scales may be anything."""
    with np.errstate(over="ignore", invalid="ignore"):
        product: F32 = codes.astype(np.float32) * scales
    return product


ENCODINGS = (Int8, Int8Source)
