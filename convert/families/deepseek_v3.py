"""DeepSeek-V3, R1, V3.1 and what shares their names: V2 with an F32 router bias and the MTP block as one layer more."""

from __future__ import annotations

from pagestone.convert.families.deepseek_v2 import FAMILY as DEEPSEEK_V2
from pagestone.convert.family import BIASED_ROUTER, EXTRA_LAYER, in_layers

FAMILY = DEEPSEEK_V2.like(
    "deepseek_v3",
    more=in_layers(BIASED_ROUTER, EXTRA_LAYER),
    mtp_as_extra_layer=True,
    mtp_field="num_nextn_predict_layers",
)
