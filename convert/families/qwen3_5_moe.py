"""Qwen3.5 and Qwen3.6 MoE: Qwen3-Next with other projection names and a vision tower; fused experts in the BF16
releases, per-expert names in the FP8 releases and in what transformers saves from a fresh model."""

from __future__ import annotations

from pagestone.convert.families.qwen2_moe import FAMILY as QWEN2_MOE
from pagestone.convert.families.qwen3_next import MTP
from pagestone.convert.families.qwen3_vl_moe import VISION
from pagestone.convert.family import in_layers

LINEAR = r"linear_attn\.(A_log|dt_bias|(in_proj_(qkv|z|a|b)|conv1d|norm|out_proj)\.weight)"
LINEAR_LINEARS = tuple(f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"))

FAMILY = QWEN2_MOE.like(
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    more=(*in_layers(LINEAR), *MTP, VISION),
    linears=QWEN2_MOE.linears + LINEAR_LINEARS,
    encoded=QWEN2_MOE.encoded + ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"),
)
