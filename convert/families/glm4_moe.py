"""GLM-4.5 and 4.6 MoE: first layers dense, shared experts, an F32 router bias, the MTP block as one layer more."""

from __future__ import annotations

from pagestone.convert.family import (
    ATTENTION,
    ATTENTION_LINEARS,
    BIASED_ROUTER,
    DENSE_MLP,
    EXTRA_LAYER,
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
    name="glm4_moe",
    model_types=("glm4_moe",),
    fused=Fused(),
    count_fields=("n_routed_experts", "num_local_experts", "num_experts"),
    dense_layers=first_k_dense_layers,
    mtp_as_extra_layer=True,
    mtp_field="num_nextn_predict_layers",
    linears=ATTENTION_LINEARS + MLP_LINEARS + SHARED_LINEARS_OF_MANY,
    known=(*OUTER, *in_layers(NORMS, ATTENTION, DENSE_MLP, SHARED_EXPERTS, BIASED_ROUTER, EXTRA_LAYER)),
)
