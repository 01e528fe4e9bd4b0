"""Qwen3-Next: Qwen2 MoE with Gated DeltaNet under its own projection names, and an MTP block."""

from __future__ import annotations

from pagestone.convert.families.qwen2_moe import FAMILY as QWEN2_MOE
from pagestone.convert.family import ATTENTION, NORMS, SHARED_EXPERT, in_layers

LINEAR = r"linear_attn\.(A_log|dt_bias|(in_proj_(qkvz|ba)|conv1d|norm|out_proj)\.weight)"
LINEAR_LINEARS = tuple(f"linear_attn.{p}" for p in ("in_proj_qkvz", "in_proj_ba", "out_proj"))
MTP = (
    r"mtp\.(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight",
    rf"mtp\.layers\.\d+\.({NORMS}|{ATTENTION}|{SHARED_EXPERT})",
)

FAMILY = QWEN2_MOE.like(
    "qwen3_next",
    more=(*in_layers(LINEAR), *MTP),
    linears=QWEN2_MOE.linears + LINEAR_LINEARS,
    encoded=QWEN2_MOE.encoded + ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
)
