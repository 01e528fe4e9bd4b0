"""DeepSeek-V2: latent attention, first layers dense, shared experts."""

from __future__ import annotations

from pagestone.convert.family import (
    DENSE_MLP,
    LATENT_ATTENTION,
    LATENT_LINEARS,
    MLP_LINEARS,
    NORMS,
    OUTER,
    SHARED_EXPERTS,
    SHARED_LINEARS_OF_MANY,
    Family,
    Fused,
    first_k_dense_layers,
    in_layers,
)

FAMILY = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    fused=Fused(),
    count_fields=("n_routed_experts", "num_local_experts", "num_experts"),
    dense_layers=first_k_dense_layers,
    linears=LATENT_LINEARS + MLP_LINEARS + SHARED_LINEARS_OF_MANY,
    encoded=LATENT_LINEARS + MLP_LINEARS + SHARED_LINEARS_OF_MANY,
    known=(*OUTER, *in_layers(NORMS, LATENT_ATTENTION, DENSE_MLP, SHARED_EXPERTS, r"mlp\.gate\.weight")),
)
