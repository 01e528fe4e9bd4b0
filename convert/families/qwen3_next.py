"""Qwen3-Next: Gated DeltaNet with its own projection names, per-expert names, a shared expert, an MTP block."""

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

LINEAR = r"linear_attn\.(A_log|dt_bias|(in_proj_(qkvz|ba)|conv1d|norm|out_proj)\.weight)"
LINEAR_LINEARS = tuple(f"linear_attn.{p}" for p in ("in_proj_qkvz", "in_proj_ba", "out_proj"))

FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    fused=Fused(),
    dense_layers=sparse_step_dense_layers,
    linears=ATTENTION_LINEARS + MLP_LINEARS + SHARED_LINEARS + LINEAR_LINEARS,
    known=(
        *OUTER,
        *in_layers(NORMS, ATTENTION, LINEAR, SHARED_EXPERT, DENSE_MLP),
        r"mtp\.(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight",
        rf"mtp\.layers\.\d+\.({NORMS}|{ATTENTION}|{SHARED_EXPERT})",
    ),
)
