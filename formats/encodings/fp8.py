"""fp8: E4M3FN codes with one scale per block of 128 x 128, as DeepSeek and Qwen publish it (specs/codecs/fp8.md).

For a block with largest magnitude amax > 0: s = amax / 448 in float32, rounded to its stored type and raised to the
smallest normal; code = e4m3(clamp(w / s, -448, 448)), quotient in float32, rounded once, half to even. A block of zeros
has s = 1. Decoded: code * s. Blocks at the right and lower edge are partial and own their scale.

Multiplied (formats/products.py): in every block of rows xs = x * s first, s the scale of the block a column lies in;
then y = sum over the columns of code * xs in 64 lanes. A block is two rounds of lanes: no lane knows its edge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagestone.formats import products
from pagestone.formats.dtypes import E4M3_VALUES as VALUES
from pagestone.formats.dtypes import F32, Array, bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings.contracts import Claim, Codec, ConfigFacts, EncodeStats, Problem, Reading, Stored
from pagestone.formats.encodings.scaled import Scaled, scale_values
from pagestone.formats.floats import plainly
from pagestone.formats.layout import Role
from pagestone.formats.stats import error_and_norm, refuse_non_finite

BLOCK = 128
LARGEST = np.float32(448)
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal  # BF16's is the same
SCALE_DTYPES = ("BF16", "F32")
PARTIAL_BLOCKS = "pagestone-partial-blocks"
"""An activation scheme that transformers does not know: it raises instead of guessing another block size."""


def to_e4m3(values: F32) -> NDArray[np.uint8]:
    """E4M3FN codes of finite float32 values, clamped to 448, rounded once, half to even; -0.0 keeps its sign."""
    magnitude = np.minimum(np.abs(values), LARGEST)
    # The maximum comes first: frexp gives zero the exponent 0, not one below all others.
    exponent = np.frexp(np.maximum(magnitude, np.float32(2.0**-6)))[1] - 1
    steps = np.rint(np.ldexp(magnitude, 3 - exponent))  # 8..16 of 2^(exponent - 3); 0..8 where subnormal
    code = steps.astype(np.int32) + 8 * (exponent + 6)  # 16 steps are the next exponent's 8, and so is the code
    codes: NDArray[np.uint8] = (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
    return codes


class Fp8Source(Scaled):
    """E4M3FN codes under any grid of scales, as checkpoints have them."""

    __slots__ = ()
    name: ClassVar[str] = "fp8"
    codes_dtype: ClassVar[str] = "F8_E4M3"
    codes_dtypes: ClassVar[tuple[str, ...]] = ("F8_E4M3",)
    largest: ClassVar[np.float32] = LARGEST
    methods: ClassVar[tuple[str, ...]] = ("fp8", "fbgemm_fp8", "compressed-tensors")
    announced_type: ClassVar[str] = "float8"

    @classmethod
    def announced(cls, stated: Mapping[str, Any]) -> bool:
        return stated.get("quant_method") in ("fp8", "fbgemm_fp8") or super().announced(stated)

    def code_values(self, codes: Array) -> F32:
        return VALUES[codes]

    def nan_codes(self, codes: Array) -> Array:
        nan: Array = (codes & 0x7F) == 0x7F
        return nan

    def zero_codes(self, codes: Array) -> Array:
        zero: Array = (codes & 0x7F) == 0
        return zero


@dataclass(frozen=True, slots=True)
class Fp8(Codec):
    """codes `weight` F8_E4M3 [R, C], scales `weight_scale_inv` BF16 or F32 [ceil(R/128), ceil(C/128)].

    `scale_dtype` is "F32" only where the codes and scales of an FP8 source with such scales are passed through.
    """

    name: ClassVar[str] = "fp8"
    encoder: ClassVar[str | None] = "encode_fp8"
    multiplier: ClassVar[str | None] = "matmul_fp8"

    block: int = BLOCK
    scale_dtype: str = "BF16"

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block != BLOCK:
            raise ValueError(f"block expected to be {BLOCK}, found {self.block!r}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype expected to be BF16 or F32, found {self.scale_dtype!r}")

    @property
    def parameters(self) -> dict[str, int | str]:
        return {"block": self.block, "scale_dtype": self.scale_dtype}

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        return (
            Role("codes", "weight", "F8_E4M3", (rows, columns)),
            Role("scales", "weight_scale_inv", self.scale_dtype, grid),
        )

    @plainly
    def encode_definition(self, weight: F32, out: Stored) -> EncodeStats:
        refuse_non_finite(weight, weight)
        amax = _block_maxima(np.abs(weight))
        scale: F32 = (amax / LARGEST).astype(np.float32)
        if self.scale_dtype == "BF16":
            scale = bf16_to_f32(f32_to_bf16(scale))
        np.maximum(scale, SMALLEST_NORMAL, out=scale)
        scale[amax == 0] = 1
        spread = _spread(scale, *weight.shape)
        codes = to_e4m3(weight / spread)
        out["codes"][...] = codes
        out["scales"][...] = f32_to_bf16(scale) if self.scale_dtype == "BF16" else scale
        return EncodeStats(*error_and_norm(weight, _product(codes, spread)))

    def for_sources(self, sources: Collection[Reading]) -> Fp8:
        """BF16 scales where all that it takes are BF16 (or there are none), else F32: it holds every other type."""
        dtypes = {s.scale_dtype for s in sources if isinstance(s, Fp8Source)}
        return self if dtypes <= {self.scale_dtype} else Fp8(scale_dtype="F32")

    def takes(self, source: Reading, rows: int, columns: int) -> str | None:
        if not isinstance(source, Fp8Source):
            return f"{source.described(rows, columns)}: not E4M3 codes"
        if source.per_tensor(rows, columns):
            return None  # the one scale is repeated over the grid
        if source.block != (BLOCK, BLOCK):
            return f"{source.described(rows, columns)}: not blocks of {BLOCK}x{BLOCK}"
        return "a block of the fused tensor straddles gate and up" if source.first_row else None

    @plainly
    def take(self, stored: Stored, source: Reading, rows: int, columns: int, out: Stored) -> bool:
        assert isinstance(source, Fp8Source)
        scales = scale_values(stored["scales"], source.scale_dtype)
        out["codes"][...] = stored["codes"]
        out["scales"][...] = f32_to_bf16(scales) if self.scale_dtype == "BF16" else scales  # one alone is repeated
        return True

    def keeps_dense(self, claim: Claim) -> bool:
        """The config states blocks of 128 x 128, and leaves their modules out of what may not be converted. Scales of
        another name or type are other numbers to others."""
        source = claim.encoding
        named = claim.suffixes == {"codes": "weight", "scales": "weight_scale_inv"}
        if not named or not isinstance(source, Fp8Source):
            return False
        return source.block == (BLOCK, BLOCK) and source.scale_dtype in ("BF16", "F32", "F16")

    def describes_dense(self, dense: Codec, codes_read: bool) -> bool:
        """Blocks of 128 x 128 in the linear layers, under the names that experts have."""
        return isinstance(dense, Fp8) and codes_read

    @property
    def as_read(self) -> Fp8Source:
        """The same arrays as a checkpoint holds them."""
        return Fp8Source((BLOCK, BLOCK), self.scale_dtype)

    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        return self.as_read.values(stored, rows, columns)

    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        """A source may carry a zero scale over a block of zeros: its codes are passed through as they are."""
        return self.as_read.problems(stored, rows, columns)

    @plainly
    def matmul_definition(self, stored: Stored, x: Array, rows: int, columns: int) -> F32:
        products.expect_stored(stored, self.in_record(rows, columns))
        tokens, scales = products.activations(x, columns), scale_values(stored["scales"], self.scale_dtype)
        results = np.empty((len(x), rows), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for first, of_columns in zip(range(0, rows, BLOCK), scales, strict=True):
                values, spread = VALUES[stored["codes"][first : first + BLOCK]], of_columns.repeat(BLOCK)[:columns]
                for token, result in zip(tokens, results, strict=True):
                    result[first : first + BLOCK] = products.lane_sum(values, token * spread, products.LANES)
        return products.one_nan(results)

    def quantization_config(self, facts: ConfigFacts) -> dict[str, Any]:
        whole = all(size % BLOCK == 0 for shape in facts.shapes for size in shape)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic" if whole else PARTIAL_BLOCKS,
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(facts.dense_modules),
        }


def _block_maxima(values: Array) -> Array:
    """The maximum of every block of [R, C]: [ceil(R/128), ceil(C/128)], edge blocks being partial."""
    rows, columns = values.shape
    tall: Array = np.maximum.reduceat(values, np.arange(0, rows, BLOCK), axis=0)
    return np.maximum.reduceat(tall, np.arange(0, columns, BLOCK), axis=1)


def _spread(scales: F32, rows: int, columns: int) -> F32:
    """The scale of every element: float32 [rows, columns]."""
    return scales.repeat(BLOCK, axis=0)[:rows].repeat(BLOCK, axis=1)[:, :columns]


def _product(codes: Array, scales: F32) -> F32:
    """code * scale in float32: no overflow where we encoded, but stored scales may be anything."""
    with np.errstate(over="ignore", invalid="ignore"):
        product: F32 = VALUES[codes] * scales
    return product


ENCODINGS = (Fp8, Fp8Source)
