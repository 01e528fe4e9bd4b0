"""A family that only the tests know: names of its own, per expert or fused with gate and up in turns."""

from __future__ import annotations

from pagestone.convert.family import ATTENTION, NORMS, OUTER, Family, Fused, in_layers

FAMILY = Family(
    name="windmill",
    model_types=("windmill",),
    experts="sails.routed",
    router="sails.router.weight",
    parts=("open", "wide", "close"),
    loads_parts=False,
    fused=Fused(gate_up="sails.open_and_wide", down="sails.close_all", interleaved=True),
    count_fields=("sail_count",),
    size_fields=("sail_width",),
    known=(*OUTER, *in_layers(NORMS, ATTENTION, r"sails\.router\.weight")),
)
