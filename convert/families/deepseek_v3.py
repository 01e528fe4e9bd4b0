"""DeepSeek-V3, R1, V3.1 and what shares their names: an F32 router bias, the MTP block as one layer more."""

from __future__ import annotations

from pagestone.convert.family import (
    BIASED_ROUTER,
    DENSE_MLP,
    EXTRA_LAYER,
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
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    fused=Fused(),
    count_fields=("n_routed_experts", "num_local_experts", "num_experts"),
    dense_layers=first_k_dense_layers,
    mtp_as_extra_layer=True,
    mtp_field="num_nextn_predict_layers",
    linears=LATENT_LINEARS + MLP_LINEARS + SHARED_LINEARS_OF_MANY,
    known=(
        *OUTER,
        *in_layers(NORMS, LATENT_ATTENTION, DENSE_MLP, SHARED_EXPERTS, BIASED_ROUTER, EXTRA_LAYER),
    ),
)
