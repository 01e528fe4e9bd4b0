"""Qwen3.5 and Qwen3.6 MoE: Gated DeltaNet and attention layers, fused experts in the BF16 releases, per-expert names in
the FP8 releases and in what transformers saves from a fresh model, a vision tower, one MTP block."""

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

LINEAR = r"linear_attn\.(A_log|dt_bias|(in_proj_(qkv|z|a|b)|conv1d|norm|out_proj)\.weight)"
LINEAR_LINEARS = tuple(f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"))

FAMILY = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    fused=Fused(),
    dense_layers=sparse_step_dense_layers,
    linears=ATTENTION_LINEARS + MLP_LINEARS + SHARED_LINEARS + LINEAR_LINEARS,
    known=(
        *OUTER,
        *in_layers(NORMS, ATTENTION, LINEAR, SHARED_EXPERT, DENSE_MLP),
        r"mtp\.(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight",
        rf"mtp\.layers\.\d+\.({NORMS}|{ATTENTION}|{SHARED_EXPERT})",
        r"model\.visual\.(patch_embed|pos_embed|blocks\.\d+|merger|deepstack_merger_list\.\d+)\.[\w.]+",
    ),
)
