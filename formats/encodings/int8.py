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
from pagestone.formats.encodings.contracts import Codec, ConfigFacts, EncodeStats, Stored
from pagestone.formats.floats import plainly
from pagestone.formats.layout import BESIDE, Role
from pagestone.formats.quantised import INT8, Form, Quantised
from pagestone.formats.stats import error_and_norm, refuse_non_finite

LARGEST = 127
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


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

    def adopts(self, form: Form) -> str | None:
        if form.kind != INT8:
            return f"{form}: not int8 codes"
        if form.zero_points:
            return f"{form}: zero points"
        return None if form.per_channel or form.per_tensor else f"{form}: not a scale per row"

    @plainly
    def adopt(self, source: Quantised, out: Stored) -> bool:
        """False where a code is -128 or a scale is zero or subnormal: neither may stand in a container."""
        scales = source.scales[source.grid_rows(), :1]
        if (source.codes == -128).any() or (scales < SMALLEST_NORMAL).any():
            return False
        out["codes"][...] = source.codes
        out["scales"][...] = scales
        if "row_sums" in out:
            out["row_sums"][...] = source.codes.sum(axis=1, dtype=np.int32)
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
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[str]:
        codes, scales = stored["codes"], stored["scales"]
        forbidden = codes == -128
        if forbidden.any():
            row, column = divmod(int(np.argmax(forbidden)), columns)
            yield (
                f"codes expected to be within -127..127, found {np.count_nonzero(forbidden)} of -128, "
                f"the first at row {row}, column {column}"
            )
        bad = ~(np.isfinite(scales) & (scales >= SMALLEST_NORMAL)).reshape(-1)
        if bad.any():
            row = int(np.argmax(bad))
            yield (
                f"scales expected to be finite, positive and normal, found {np.count_nonzero(bad)} that are not, "
                f"the first {scales[row, 0]} at row {row}"
            )
        if "row_sums" in stored:
            expected = codes.sum(axis=1, dtype=np.int32)
            wrong = stored["row_sums"] != expected
            if wrong.any():
                row = int(np.argmax(wrong))
                yield (
                    f"row sums expected to be the sums of the codes, found {np.count_nonzero(wrong)} that are not, "
                    f"the first {stored['row_sums'][row]} instead of {expected[row]} at row {row}"
                )

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


ENCODINGS = (Int8,)
