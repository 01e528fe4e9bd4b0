"""MiniMax-M2: Mixtral's names, a sigmoid router with a correction bias, FP8 releases with block scales."""

from __future__ import annotations

from pagestone.convert.families.mixtral import FAMILY as MIXTRAL
from pagestone.convert.family import in_layers

FAMILY = MIXTRAL.like("minimax_m2", more=in_layers(r"block_sparse_moe\.e_score_correction_bias"))
