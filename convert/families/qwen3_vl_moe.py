"""Qwen3-VL MoE: a vision tower, and fused experts: [E, H, 2I] and [E, I, H] in the releases, [E, 2I, H] and [E, H, I]
in what transformers saves from a fresh model."""

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
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    loads_parts=False,
    fused=Fused(transposed=True, either_way=True),
    dense_layers=sparse_step_dense_layers,
    linears=ATTENTION_LINEARS + MLP_LINEARS,
    known=(
        *OUTER,
        *in_layers(NORMS, ATTENTION, r"mlp\.gate\.weight", DENSE_MLP),
        r"model\.visual\.(patch_embed|pos_embed|blocks\.\d+|merger|deepstack_merger_list\.\d+)\.[\w.]+",
    ),
)
