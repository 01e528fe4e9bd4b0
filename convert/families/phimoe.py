"""Phi-3.5-MoE: Mixtral's names, with biases on attention, norms and head."""

from __future__ import annotations

from pagestone.convert.family import ATTENTION, NORMS, OUTER, Family, in_layers

FAMILY = Family(
    name="phimoe",
    model_types=("phimoe",),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.gate.weight",
    parts=("w1", "w3", "w2"),
    count_fields=("num_local_experts", "num_experts"),
    size_fields=("intermediate_size",),
    known=(
        *OUTER,
        r"model\.norm\.bias|lm_head\.bias",
        *in_layers(NORMS, r"(input|post_attention)_layernorm\.bias", ATTENTION, r"block_sparse_moe\.gate\.weight"),
    ),
)
