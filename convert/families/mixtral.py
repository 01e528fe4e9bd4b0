"""Mixtral: experts w1 (gate), w3 (up), w2 (down) under block_sparse_moe."""

from __future__ import annotations

from pagestone.convert.family import ATTENTION, NORMS, OUTER, Family, in_layers

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.gate.weight",
    parts=("w1", "w3", "w2"),
    count_fields=("num_local_experts", "num_experts"),
    size_fields=("intermediate_size",),
    known=(*OUTER, *in_layers(NORMS, ATTENTION, r"block_sparse_moe\.gate\.weight")),
)
