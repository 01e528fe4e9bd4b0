#!/usr/bin/env python3
"""Make a synthetic checkpoint with the shapes of Qwen3.6-35B-A3B: for everything that is about size.

BF16, hidden 2048, intermediate 512, 256 experts, one shard a layer; config nested and names as published. Weights are
normal (standard deviation 0.02), the same for the same options on every machine, and written a few MB at a time.
`--outliers` makes a few input channels of every expert matrix 32 times larger, as trained models have them.

    scripts/make_true_shape.py OUTPUT [--layers N] [--experts E] [--vocab V] [--per-expert] [--outliers] [--seed S]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from make_sparse import INDEX, Entry, header_bytes, tensor_shape
from numpy.typing import NDArray

POOL = 1 << 22
"""Elements of normal BF16 values made once; every tensor is cut from them at places of its own."""
CHUNK = 1 << 21
"""Elements written at a time."""
OUTLIERS, OUTLIER_SHIFT = 6, 5
"""Channels of a layer that `--outliers` makes larger, and by which power of two."""
ROOT = "model.language_model"
EXPERTS = "mlp.experts"

TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": 248044,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip


def make_config(layers: int, experts: int, vocab: int) -> dict[str, Any]:
    """config.json as the BF16 release has it: the language model nested under text_config."""
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)]
    text = TEXT_CONFIG | {
        "num_hidden_layers": layers, "num_experts": experts, "vocab_size": vocab, "layer_types": kinds,
        "num_experts_per_tok": min(8, experts),
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "dtype": "bfloat16", "model_type": "qwen3_5_moe",
        "text_config": text, "tie_word_embeddings": False,
    }  # fmt: skip


def layer_names(layer: int, kind: str, experts: int, per_expert: bool) -> list[str]:
    """Every tensor of a decoder layer, below `ROOT`."""
    if kind == "full_attention":
        mixer = [f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    else:
        inner = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "norm", "out_proj")
        mixer = ["linear_attn.A_log", "linear_attn.dt_bias", *(f"linear_attn.{p}.weight" for p in inner)]
    if per_expert:
        parts = ("gate_proj", "up_proj", "down_proj")
        routed = [f"{EXPERTS}.{e}.{p}.weight" for e in range(experts) for p in parts]
    else:
        routed = [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    shared = [f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")]
    rest = ["mlp.gate.weight", "mlp.shared_expert_gate.weight", "input_layernorm.weight"]
    tails = [*mixer, *routed, *shared, *rest, "post_attention_layernorm.weight"]
    return sorted(f"{ROOT}.layers.{layer}.{tail}" for tail in tails)


class Weights:
    """Deterministic BF16 weights, cut from a pool so that making them is no slower than copying."""

    def __init__(self, seed: int, outliers: bool) -> None:
        values = np.random.default_rng(seed).standard_normal(POOL + CHUNK, dtype=np.float32) * np.float32(0.02)
        self._pool = (values.view(np.uint32) >> 16).astype("<u2")
        self._seed, self._outliers = seed, outliers

    def slices(self, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.uint16]]:
        """The tensor's elements in order, at most `CHUNK` at a time, whole rows only."""
        columns = shape[-1]
        rows = math.prod(shape[:-1])
        step = max(1, CHUNK // columns)
        state = zlib.crc32(f"{self._seed} {name}".encode())
        special = None
        if self._outliers and EXPERTS in name:
            # gate and up read the same channels: the residual stream's; down has its own
            key = name.split(f".{EXPERTS}")[0] + (".down" if "down" in name else ".in")
            special = np.random.default_rng([self._seed, zlib.crc32(key.encode())]).choice(columns, OUTLIERS, False)
        for first in range(0, rows, step):
            count = min(step, rows - first) * columns
            state = (state * 1103515245 + 12345) & 0xFFFFFFFF
            start = (state >> 8) % POOL
            # the flip of sign and low mantissa bits makes slices that begin at the same place differ
            piece = self._pool[start : start + count] ^ np.uint16((state & 0x80) << 8 | (state & 0x3F))
            if special is not None:
                piece.reshape(-1, columns)[:, special] += np.uint16(OUTLIER_SHIFT << 7)
            yield piece


def make_true_shape(
    output: Path, *, layers: int, experts: int = 256, vocab: int = 4096, per_expert: bool = False,
    outliers: bool = False, seed: int = 0,
) -> int:  # fmt: skip
    """Make the checkpoint in a new directory; returns the bytes of weights written."""
    output.mkdir(parents=True)
    config = make_config(layers, experts, vocab)
    text = config["text_config"]
    groups = [layer_names(n, text["layer_types"][n], experts, per_expert) for n in range(layers)]
    groups[0].insert(0, f"{ROOT}.embed_tokens.weight")
    groups.append([f"{ROOT}.norm.weight", "lm_head.weight"])
    weights, weight_map, total = Weights(seed, outliers), {}, 0
    for number, names in enumerate(groups, 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries: list[Entry] = [(name, "BF16", tensor_shape(name, text)) for name in names]
        head, size = header_bytes(entries)
        with (output / shard).open("wb") as handle:
            handle.write(head)
            for name, _, shape in entries:
                for piece in weights.slices(name, shape):
                    handle.write(piece.data)
        weight_map |= dict.fromkeys(names, shard)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (output / "generation_config.json").write_text(json.dumps({"eos_token_id": [248044, 248046]}) + "\n")
    return total


def main() -> None:
    """Parse the command line and make the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096, help="rows of embed_tokens and lm_head (published: 248320)")
    parser.add_argument("--per-expert", action="store_true", help="one tensor a matrix instead of fused tensors")
    parser.add_argument("--outliers", action="store_true", help="plant outlier channels")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    total = make_true_shape(
        args.output, layers=args.layers, experts=args.experts, vocab=args.vocab, per_expert=args.per_expert,
        outliers=args.outliers, seed=args.seed,
    )  # fmt: skip
    seconds = time.monotonic() - begun
    print(f"{args.output}: {total / 1e9:.2f} GB in {seconds:.1f} s ({total / 1e6 / seconds:.0f} MB/s)", file=sys.stderr)


if __name__ == "__main__":
    main()
