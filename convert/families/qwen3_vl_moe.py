"""Qwen3-VL MoE: Qwen3 MoE, a vision tower, and fused experts: [E, H, 2I] and [E, I, H] in the releases, [E, 2I, H] and
[E, H, I] in what transformers saves from a fresh model."""

from __future__ import annotations

from pagestone.convert.families.qwen3_moe import FAMILY as QWEN3_MOE
from pagestone.convert.family import Fused

VISION = r"model\.visual\.(patch_embed|pos_embed|blocks\.\d+|merger|deepstack_merger_list\.\d+)\.[\w.]+"

FAMILY = QWEN3_MOE.like(
    "qwen3_vl_moe",
    "qwen3_vl_moe_text",
    more=(VISION,),
    loads_parts=False,
    fused=Fused(transposed=True, either_way=True),
)
