"""Qwen1.5 and Qwen2 MoE: per-expert names, one shared expert with a gate, some layers dense."""

from __future__ import annotations

from pagestone.convert.family import (
    ATTENTION,
    ATTENTION_LINEARS,
    DENSE_MLP,
    MLP_LINEARS,
    NORMS,
    OUTER,
    SHARED_EXPERT,
    SHARED_LINEARS,
    Family,
    Fused,
    in_layers,
    sparse_step_dense_layers,
)

FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    fused=Fused(),
    dense_layers=sparse_step_dense_layers,
    linears=ATTENTION_LINEARS + MLP_LINEARS + SHARED_LINEARS,
    known=(*OUTER, *in_layers(NORMS, ATTENTION, SHARED_EXPERT, DENSE_MLP)),
)
