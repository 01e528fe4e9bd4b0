"""Qwen3 MoE (30B-A3B, 235B-A22B, Coder): per-expert names, some layers dense, no shared expert, no MTP block."""

from __future__ import annotations

from pagestone.convert.family import (
    ATTENTION,
    ATTENTION_LINEARS,
    DENSE_MLP,
    MLP_LINEARS,
    NORMS,
    OUTER,
    Family,
    Fused,
    in_layers,
    sparse_step_dense_layers,
)

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    fused=Fused(),
    dense_layers=sparse_step_dense_layers,
    linears=ATTENTION_LINEARS + MLP_LINEARS,
    encoded=ATTENTION_LINEARS + MLP_LINEARS,
    known=(*OUTER, *in_layers(NORMS, ATTENTION, r"mlp\.gate\.weight", DENSE_MLP)),
)
