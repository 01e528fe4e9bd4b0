"""MiniMax-M2: Mixtral's names, a sigmoid router with a correction bias, FP8 releases with block scales."""

from __future__ import annotations

from pagestone.convert.family import ATTENTION, NORMS, OUTER, Family, in_layers

FAMILY = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.gate.weight",
    parts=("w1", "w3", "w2"),
    count_fields=("num_local_experts", "num_experts"),
    size_fields=("intermediate_size",),
    known=(
        *OUTER,
        *in_layers(NORMS, ATTENTION, r"block_sparse_moe\.(gate\.weight|e_score_correction_bias)"),
    ),
)
