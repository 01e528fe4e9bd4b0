"""OLMoE: per-expert names, every layer MoE, norms on queries and keys."""

from __future__ import annotations

from pagestone.convert.family import ATTENTION, NORMS, OUTER, Family, Fused, in_layers

FAMILY = Family(
    name="olmoe",
    model_types=("olmoe",),
    fused=Fused(),
    size_fields=("intermediate_size",),
    known=(*OUTER, *in_layers(NORMS, ATTENTION, r"mlp\.gate\.weight")),
)
