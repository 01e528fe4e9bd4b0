"""Scales of quantised sources: what a scale tensor's shape means, and which tensor is the scale of a weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pagestone.convert.checkpoint import SourceTensor
from pagestone.formats.quantised import FP8, INT8

SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
"""Names of a scale beside `weight`, in the order in which they are looked for."""
UNREAD = "E0514"
"""The code of every refusal of an element type that is well-formed but not read: a wrong request, not wrong data."""
ACTIVATION_SUFFIXES = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")
"""Static scales of activations and of the key-value cache: known, left out because every container is weight-only."""


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The quantisation block a config states: `weight_block_size`, or compressed-tensors' `block_structure`."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        stated = place.get("quantization_config") or place.get("compression_config")
        if not isinstance(stated, dict):
            continue
        groups = stated.get("config_groups")
        weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
        found = [stated.get("weight_block_size"), *(w.get("block_structure") for w in weights if isinstance(w, dict))]
        for block in found:
            if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
                return block[0], block[1]
    return None


def contradicted(config: Mapping[str, Any], kinds: Collection[str]) -> str | None:
    """One sentence if what a config says of the quantisation is not what the experts' types say; the types decide."""
    nested = config.get("text_config")
    places = (config, nested if isinstance(nested, dict) else {})
    stated = next((s for p in places if (s := p.get("quantization_config") or p.get("compression_config"))), None)
    found = " and ".join(sorted(kinds)) or "plain floats"
    if not stated or not kinds:
        if bool(stated) == bool(kinds):
            return None
        words = "states a" if stated else "states no"
        return f"config.json {words} quantization_config, but the experts are {found}; the types decide"
    meant = _meant(stated) if isinstance(stated, dict) else None
    if meant is None or {meant} == set(kinds):
        return None
    return f"config.json states a quantization_config of {meant}, but the experts are {found}; the types decide"


def _meant(stated: Mapping[str, Any]) -> str | None:
    """The kind of codes a `quantization_config` announces, or its method if that is none of ours; None: unclear."""
    method = str(stated.get("quant_method", "compressed-tensors" if "config_groups" in stated else ""))
    if method in ("fp8", "fbgemm_fp8"):
        return FP8
    groups = stated.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, dict):
        weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)]
        types = {f"{w.get('type')}{w.get('num_bits')}" for w in weights if isinstance(w, dict)}
        return {"float8": FP8, "int8": INT8}.get(types.pop()) if len(types) == 1 else None
    return method if method in ("gptq", "awq", "mxfp4", "bitsandbytes") else None


def resolve(
    shape: tuple[int, ...], rows: int, columns: int, stated: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(grid, block) of the scales of a [rows, columns] matrix; None if the shape means nothing known.

    The block comes from the config and is never guessed from shapes: 300 rows with 3 scales may be blocks of 128 (the
    last one partial) or of 100.
    """
    if shape in ((), (1,)):
        return (1, 1), (rows, columns)
    if stated is not None and shape == (-(-rows // stated[0]), -(-columns // stated[1])):
        return (shape[0], shape[1]), stated
    if shape in ((rows,), (rows, 1)):
        return (rows, 1), (1, columns)
    return ((1, 1), (rows, columns)) if shape == (1, 1) else None


def scale_of(name: str, tensors: Mapping[str, SourceTensor]) -> SourceTensor | None:
    """The scale tensor of a dense weight, or None."""
    stem = name.removesuffix("weight")
    return next((tensors[stem + s] for s in SUFFIXES if name.endswith("weight") and stem + s in tensors), None)
