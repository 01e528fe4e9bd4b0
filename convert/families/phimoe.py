"""Phi-3.5-MoE: Mixtral's names, with biases on attention, norms and head."""

from __future__ import annotations

from pagestone.convert.families.mixtral import FAMILY as MIXTRAL
from pagestone.convert.family import in_layers

FAMILY = MIXTRAL.like(
    "phimoe", more=(r"model\.norm\.bias|lm_head\.bias", *in_layers(r"(input|post_attention)_layernorm\.bias"))
)
