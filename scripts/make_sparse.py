#!/usr/bin/env python3
"""Make a checkpoint of true size from a published config.json and index, with holes where the weights would be.

Every shard has a correct header and a hole for its data: 50 GB take a few MB on disk and read as zeros. `--fill L:E`
writes deterministic weights into the matrices of expert E of layer L.

    scripts/make_sparse.py OUTPUT [--source DIR] [--layers N] [--vocab N] [--fill L:E ...]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

PUBLISHED = Path(__file__).resolve().parent.parent / "tests" / "data" / "real-checkpoints" / "qwen3.5-25b-reap"
INDEX = "model.safetensors.index.json"
PARTS = ("gate", "up", "down")
TYPES = {"float16": "F16", "bfloat16": "BF16"}
Entry = tuple[str, str, tuple[int, ...]]
"""Name, element type and shape of a tensor."""


def tensor_shape(name: str, config: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a tensor of the Qwen3.5 MoE architecture by its name; `config` is the language model's part."""
    hidden, inner, shared = (
        config[k] for k in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    )
    experts, head, vocab = config["num_experts"], config["head_dim"], config["vocab_size"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    rules: tuple[tuple[str, tuple[int, ...]], ...] = (
        (r"(embed_tokens|lm_head)\.weight", (vocab, hidden)),
        (r"mlp\.experts\.gate_up_proj", (experts, 2 * inner, hidden)),
        (r"mlp\.experts\.down_proj", (experts, hidden, inner)),
        (r"experts\.\d+\.(gate|up)_proj\.weight", (inner, hidden)),
        (r"experts\.\d+\.down_proj\.weight", (hidden, inner)),
        (r"mlp\.gate\.weight", (experts, hidden)),
        (r"shared_expert\.(gate|up)_proj\.weight", (shared, hidden)),
        (r"shared_expert\.down_proj\.weight", (hidden, shared)),
        (r"shared_expert_gate\.weight", (1, hidden)),
        (r"in_proj_qkv\.weight", (2 * key + value, hidden)),
        (r"in_proj_z\.weight", (value, hidden)),
        (r"in_proj_[ab]\.weight", (config["linear_num_value_heads"], hidden)),
        (r"conv1d\.weight", (2 * key + value, 1, config["linear_conv_kernel_dim"])),
        (r"(A_log|dt_bias)", (config["linear_num_value_heads"],)),
        (r"linear_attn\.norm\.weight", (config["linear_value_head_dim"],)),
        (r"out_proj\.weight", (hidden, value)),
        (r"q_proj\.weight", (2 * query, hidden)),
        (r"[kv]_proj\.weight", (kv, hidden)),
        (r"o_proj\.weight", (hidden, query)),
        (r"[qk]_norm\.weight", (head,)),
        (r"(norm|layernorm)\.weight", (hidden,)),
    )
    for pattern, shape in rules:
        if re.search(rf"(^|\.|_){pattern}$", name):
            return shape
    raise KeyError(name)


def header_bytes(entries: Iterable[Entry]) -> tuple[bytes, int]:
    """The header of a shard whose tensors lie one after the other, and the length of the data it promises."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + math.prod(shape) * {"F16": 2, "BF16": 2, "F32": 4}[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, end


def expert_weights(layer: int, expert: int, part: str, shape: tuple[int, ...], dtype: str) -> bytes:
    """The weights `--fill` writes into one matrix: normal, standard deviation 0.02, the same on every machine."""
    values = np.random.default_rng([layer, expert, PARTS.index(part)]).standard_normal(shape, dtype=np.float32) * 0.02
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()  # BF16 by truncation: any weights will do


def read_index(source: Path) -> dict[str, Any]:
    """The published index, compressed or not."""
    packed = source / (INDEX + ".zst")
    if not packed.exists():
        return dict(json.loads((source / INDEX).read_bytes()))
    import zstandard

    return dict(json.loads(zstandard.ZstdDecompressor().decompress(packed.read_bytes(), max_output_size=1 << 28)))


def make_sparse(
    output: Path,
    *,
    source: Path = PUBLISHED,
    layers: int | None = None,
    vocab: int | None = None,
    fill: Iterable[tuple[int, int]] = (),
) -> None:
    """Make the checkpoint; `layers` keeps the first N, `vocab` cuts the vocabulary, `fill` names (layer, expert)."""
    output.mkdir(parents=True)
    config = json.loads((source / "config.json").read_bytes())
    text, index = config.get("text_config", config), read_index(source)
    kept = dict(index["weight_map"])
    if layers is not None:
        outside = [n for n in kept if (m := re.search(r"\.layers\.(\d+)\.", n)) and int(m[1]) >= layers]
        for name in outside:
            del kept[name]
        text["num_hidden_layers"], text["layer_types"] = layers, text["layer_types"][:layers]
    if vocab is not None:
        text["vocab_size"] = vocab
    dtype = TYPES[text.get("dtype") or text["torch_dtype"]]
    wanted = set(fill)
    for shard in sorted(set(kept.values())):
        entries = [(n, dtype, tensor_shape(n, text)) for n in sorted(n for n, f in kept.items() if f == shard)]
        head, size = header_bytes(entries)
        with (output / shard).open("wb") as handle:
            handle.write(head)
            handle.truncate(len(head) + size)
            position = len(head)
            for name, _, shape in entries:
                match = re.search(r"\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$", name)
                if match and (int(match[1]), int(match[2])) in wanted:
                    handle.seek(position)
                    handle.write(expert_weights(int(match[1]), int(match[2]), match[3], shape, dtype))
                position += 2 * math.prod(shape)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (output / INDEX).write_text(json.dumps({"metadata": index["metadata"], "weight_map": kept}))
    for side in ("generation_config.json",):
        if (source / side).exists():
            shutil.copy(source / side, output)


def _pair(text: str) -> tuple[int, int]:
    layer, expert = text.split(":")
    return int(layer), int(expert)


def main() -> None:
    """Parse the command line and make the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", type=Path, default=PUBLISHED, help="directory with config.json and the index")
    parser.add_argument("--layers", type=int, help="keep the first N decoder layers")
    parser.add_argument("--vocab", type=int, help="cut the vocabulary, the largest dense tensors, to N")
    parser.add_argument("--fill", type=_pair, nargs="+", default=[], metavar="LAYER:EXPERT")
    args = parser.parse_args()
    make_sparse(args.output, source=args.source, layers=args.layers, vocab=args.vocab, fill=args.fill)


if __name__ == "__main__":
    main()
