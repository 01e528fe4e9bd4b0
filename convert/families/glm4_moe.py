"""GLM-4.5 and 4.6 MoE: DeepSeek-V3 with ordinary attention."""

from __future__ import annotations

from pagestone.convert.families.deepseek_v3 import FAMILY as DEEPSEEK_V3
from pagestone.convert.family import (
    ATTENTION,
    ATTENTION_LINEARS,
    LATENT_ATTENTION,
    MLP_LINEARS,
    SHARED_LINEARS_OF_MANY,
    in_layers,
)

FAMILY = DEEPSEEK_V3.like(
    "glm4_moe",
    without=in_layers(LATENT_ATTENTION),
    more=in_layers(ATTENTION),
    linears=ATTENTION_LINEARS + MLP_LINEARS + SHARED_LINEARS_OF_MANY,
    encoded=ATTENTION_LINEARS + MLP_LINEARS + SHARED_LINEARS_OF_MANY,
)
