"""Granite MoE: fused experts named input_linear (gate rows, then up rows) and output_linear."""

from __future__ import annotations

from pagestone.convert.family import ATTENTION, NORMS, OUTER, Family, Fused, in_layers

FAMILY = Family(
    name="granitemoe",
    model_types=("granitemoe",),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router.layer.weight",
    loads_parts=False,
    fused=Fused(gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
    count_fields=("num_local_experts", "num_experts"),
    size_fields=("intermediate_size",),
    known=(*OUTER, *in_layers(NORMS, ATTENTION, r"block_sparse_moe\.router\.layer\.weight")),
)
