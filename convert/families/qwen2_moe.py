"""Qwen1.5 and Qwen2 MoE: Qwen3 MoE's names, and one shared expert with a gate."""

from __future__ import annotations

from pagestone.convert.families.qwen3_moe import FAMILY as QWEN3_MOE
from pagestone.convert.family import SHARED_EXPERT, SHARED_LINEARS, in_layers

FAMILY = QWEN3_MOE.like(
    "qwen2_moe",
    more=in_layers(SHARED_EXPERT),
    linears=QWEN3_MOE.linears + SHARED_LINEARS,
    encoded=QWEN3_MOE.encoded + SHARED_LINEARS,
)
