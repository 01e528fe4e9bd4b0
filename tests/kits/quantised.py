"""Small checkpoints that are already quantised: FP8 in every form scales come in, and compressed-tensors int8.

    spec = Fp8Spec(hidden=320, intermediate=192, scale_dtype="F32")
    spec.write(tmp_path / "source")
    spec.matrix(expert, "gate")          # Codes: the bits, the float32 value of every element's scale

Values are worked out here by the formats' own definitions, without the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kits.families import Raw, write_tensors

PARTS = ("gate", "up", "down")
EXPERTS, LAYERS = "model.layers.0.mlp.experts", 1
DENSE = {
    "model.layers.0.self_attn.q_proj": (576, 0), "model.layers.0.self_attn.k_proj": (160, 0),
    "model.layers.0.self_attn.o_proj": (0, 300), "model.layers.0.self_attn.v_proj": (128, 0),
}  # fmt: skip
"""Dense matrices by module: (rows, columns), 0 for the hidden size."""
Change = Callable[[dict[str, Raw]], dict[str, Raw]]


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 values of E4M3FN bits (OCP 8-bit floating point, 1.0): sign, 4 bits of exponent, 3 of mantissa."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(np.int64), (codes & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where((codes & 0x7F) == 0x7F, np.nan, sign * value).astype(np.float32)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """BF16 bits of float32 values that BF16 holds exactly."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype("<u2")


def rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    """BF16 bits of finite float32 values, rounded half to even, in exact integer arithmetic."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)
    half, odd = bits & 0xFFFF, bits >> 16 & 1
    return ((bits >> 16) + ((half > 0x8000) | ((half == 0x8000) & (odd == 1)))).astype("<u2")


def stored_scale(values: np.ndarray, dtype: str) -> Raw:
    """Positive scales that are powers of two, or short sums of such, in one of the types they are published in."""
    if dtype in ("F8_E8M0", "U8"):
        exponent = np.log2(values)
        assert (exponent == np.rint(exponent)).all()
        return dtype, values.shape, (exponent + 127).astype(np.uint8).tobytes()
    if dtype == "BF16":
        return dtype, values.shape, bf16_bits(values).tobytes()
    return dtype, values.shape, values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


@dataclass(frozen=True)
class Codes:
    """A quantised matrix: its bits [R, C], the scales as stored, and the float32 scale of every element."""

    bits: np.ndarray
    grid: np.ndarray
    spread: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """float32 [R, C]: code * scale, rounded once."""
        codes = e4m3(self.bits) if self.bits.dtype == np.uint8 else self.bits.astype(np.float32)
        return codes * self.spread


@dataclass(frozen=True)
class Fp8Spec:
    """A one-layer qwen3_moe checkpoint in FP8. `scales`: "block", "tensor", "tensor [1]", "channel", "channel [N]"."""

    hidden: int = 320
    intermediate: int = 192
    experts: int = 2
    scales: str = "block"
    scale_dtype: str = "BF16"
    scale_name: str = "weight_scale_inv"
    block: tuple[int, int] = (128, 128)
    fused: bool = False
    dense: bool = True
    shards: int = 1
    quantization: Mapping[str, Any] | None = None
    change: Change = field(default=lambda tensors: tensors)

    def having(self, **changes: Any) -> Fp8Spec:
        return replace(self, **changes)

    def shape(self, part: str) -> tuple[int, int]:
        return (self.hidden, self.intermediate) if part == "down" else (self.intermediate, self.hidden)

    def grid_of(self, rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """(shape of the scale tensor, (rows, columns) that one scale covers)."""
        if self.scales == "block":
            return (-(-rows // self.block[0]), -(-columns // self.block[1])), self.block
        if self.scales.startswith("channel"):
            return ((rows,) if "[N]" in self.scales else (rows, 1)), (1, columns)
        return ((1,) if "[1]" in self.scales else ()), (rows, columns)

    def codes(self, seed: int, rows: int, columns: int) -> Codes:
        """A matrix of random codes and scales; which, depends on `seed` only."""
        rng = np.random.default_rng(seed)
        bits = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
        bits[(bits & 0x7F) == 0x7F] ^= 1
        shape, (tall, wide) = self.grid_of(rows, columns)
        exponent = rng.integers(-9, -3, shape)
        plain = self.scale_dtype in ("F8_E8M0", "U8")
        scale = 2.0**exponent * (1 if plain else 1 + rng.integers(0, 128, shape) / 128)
        grid = np.asarray(scale, np.float32)
        where = np.arange(rows)[:, None] // tall, np.arange(columns)[None, :] // wide
        spread = grid.reshape(-1, 1 if grid.ndim < 2 else grid.shape[1])[where]
        return Codes(bits, grid, np.ascontiguousarray(spread))

    def both(self, expert: int) -> Codes:
        """A fused gate and up."""
        return self.codes(100 + expert, 2 * self.intermediate, self.hidden)

    def matrix(self, expert: int, part: str) -> Codes:
        """One matrix of one expert; `grid` of a fused gate or up is that of the whole pair."""
        if not self.fused or part == "down":
            return self.codes(10 * expert + PARTS.index(part), *self.shape(part))
        whole, rows = self.both(expert), slice(self.intermediate * (part == "up"), None)
        rows = slice(rows.start, rows.start + self.intermediate)
        return Codes(whole.bits[rows], whole.grid, whole.spread[rows])

    def dense_codes(self, module: str) -> Codes:
        rows, columns = (size or self.hidden for size in DENSE[module])
        return self.codes(1000 + list(DENSE).index(module), rows, columns)

    def tensors(self) -> dict[str, Raw]:
        """Every tensor in the order of the modules."""
        rng = np.random.default_rng(5)
        found: dict[str, Raw] = {}

        def plain(name: str, *shape: int) -> None:
            found[name] = "BF16", shape, rng.integers(0x3C00, 0x3F80, shape).astype("<u2").tobytes()

        def quantised(stem: str, codes: Codes, suffix: str = ".weight") -> None:
            found[stem + suffix] = "F8_E4M3", codes.bits.shape, codes.bits.tobytes()
            name = self.scale_name if suffix else self.scale_name.removeprefix("weight_")
            found[f"{stem}{'.' if suffix else '_'}{name}"] = stored_scale(codes.grid, self.scale_dtype)

        plain("model.embed_tokens.weight", 40, self.hidden)
        plain("model.layers.0.input_layernorm.weight", self.hidden)
        for module in DENSE:
            if self.dense:
                quantised(module, self.dense_codes(module))
            else:
                plain(f"{module}.weight", *(size or self.hidden for size in DENSE[module]))
        plain("model.layers.0.mlp.gate.weight", self.experts, self.hidden)
        if self.fused:
            pairs = [self.both(e) for e in range(self.experts)]
            downs = [self.matrix(e, "down") for e in range(self.experts)]
            for name, members in (("gate_up_proj", pairs), ("down_proj", downs)):
                stack = (np.stack([getattr(m, f) for m in members]) for f in ("bits", "grid", "spread"))
                quantised(f"{EXPERTS}.{name}", Codes(*stack), "")
        else:
            for expert in range(self.experts):
                for part in PARTS:
                    quantised(f"{EXPERTS}.{expert}.{part}_proj", self.matrix(expert, part))
        plain("model.norm.weight", self.hidden)
        plain("lm_head.weight", 40, self.hidden)
        return found

    def config(self) -> dict[str, Any]:
        """config.json; without `quantization` it states what FP8 releases state."""
        stated: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        stated |= {"weight_block_size": list(self.block)} if self.scales == "block" else {}
        return config(self, stated if self.quantization is None else self.quantization)

    def write(self, root: Path) -> Path:
        return write(root, self.change(self.tensors()), self.config(), self.shards)


def config(spec: Any, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json of a one-layer qwen3_moe model; an empty quantization is left out."""
    plain = {
        "model_type": "qwen3_moe", "hidden_size": spec.hidden, "moe_intermediate_size": spec.intermediate,
        "num_hidden_layers": LAYERS, "num_experts": spec.experts, "num_experts_per_tok": 1,
    }  # fmt: skip
    return plain | ({"quantization_config": dict(quantization)} if quantization else {})


def write(root: Path, tensors: Mapping[str, Raw], config: Mapping[str, Any], shards: int = 1) -> Path:
    """A checkpoint directory. With more than one shard tensors are dealt out in turn: scales and codes lie apart."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_tensors(root / "model.safetensors", tensors)
        return root
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        members = {n: t for place, (n, t) in enumerate(tensors.items()) if place % shards == number}
        write_tensors(root / file, members)
        weight_map |= dict.fromkeys(members, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


INT8_CONFIG = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}},
    "ignore": ["lm_head"],
}  # fmt: skip


@dataclass(frozen=True)
class Int8Spec:
    """A one-layer qwen3_moe checkpoint in compressed-tensors int8, channel-wise. `lowest` is the smallest code."""

    hidden: int = 192
    intermediate: int = 128
    experts: int = 2
    scale_dtype: str = "BF16"
    lowest: int = -127
    zero_points: bool = False
    shards: int = 1
    change: Change = field(default=lambda tensors: tensors)

    shape = Fp8Spec.shape

    def having(self, **changes: Any) -> Int8Spec:
        return replace(self, **changes)

    def codes(self, seed: int, rows: int, columns: int) -> Codes:
        rng = np.random.default_rng(seed)
        bits = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
        bits[rows // 2, columns // 3] = self.lowest
        grid = (2.0 ** rng.integers(-9, -3, (rows, 1)) * (1 + rng.integers(0, 128, (rows, 1)) / 128)).astype(np.float32)
        return Codes(bits, grid, np.broadcast_to(grid, bits.shape))

    def matrix(self, expert: int, part: str) -> Codes:
        return self.codes(10 * expert + PARTS.index(part), *self.shape(part))

    def zeros(self, rows: int) -> np.ndarray:
        """Zero points of every matrix."""
        return (np.arange(rows) % 7 - 3).astype(np.int8).reshape(-1, 1)

    def dense_codes(self, module: str) -> Codes:
        rows, columns = (size or self.hidden for size in DENSE[module])
        return self.codes(1000 + list(DENSE).index(module), rows, columns)

    def tensors(self) -> dict[str, Raw]:
        found: dict[str, Raw] = {}

        def quantised(stem: str, codes: Codes) -> None:
            found[f"{stem}.weight"] = "I8", codes.bits.shape, codes.bits.tobytes()
            found[f"{stem}.weight_scale"] = stored_scale(codes.grid, self.scale_dtype)
            if self.zero_points:
                zeros = self.zeros(codes.bits.shape[0])
                found[f"{stem}.weight_zero_point"] = "I8", zeros.shape, zeros.tobytes()

        for module in DENSE:
            quantised(module, self.dense_codes(module))
        found["model.layers.0.mlp.gate.weight"] = (
            "BF16",
            (self.experts, self.hidden),
            b"\x00\x3f" * (self.experts * self.hidden),
        )
        for expert in range(self.experts):
            for part in PARTS:
                quantised(f"{EXPERTS}.{expert}.{part}_proj", self.matrix(expert, part))
        return found

    def write(self, root: Path) -> Path:
        return write(root, self.change(self.tensors()), config(self, INT8_CONFIG), self.shards)
