"""Encodings of source tensors: which one a matrix is stored in, and what config.json says of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pagestone.convert.checkpoint import SourceTensor
from pagestone.formats import encodings
from pagestone.formats.encodings import Candidate, Claim, Reading, Refusal, Tensor
from pagestone.formats.encodings.unread import METHODS

UNREAD = "E0514"
"""The code of every refusal of an element type that is well-formed but not read: a wrong request, not wrong data."""
ACTIVATION_SUFFIXES = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")
"""Static scales of activations and of the key-value cache: known, left out because every container is weight-only."""
REMEDIES = {
    "E0513": "download the checkpoint again: codes mean nothing without their scale, nor scales without their codes",
    "E0514": "convert from the unquantised release of the model",
    "E0515": "correct weight_block_size in config.json, or download the checkpoint again",
}
"""What to do about a refusal, by its code, where it is not another download alone."""
DOWNLOAD = "download the checkpoint again"


BySuffix = Mapping[str, SourceTensor] | Mapping[str, Tensor]
"""The tensors of one matrix by suffix, or what they hold of one."""


class Claims:
    """Asks the encodings, each kind of matrix once: a checkpoint has thousands that are alike."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._known: dict[tuple[tuple[str, str, tuple[int, ...]], ...], Claim | Refusal] = {}

    def of(self, tensors: BySuffix) -> Claim | Refusal:
        """What a matrix with these tensors is stored in."""
        key = tuple((suffix, t.dtype, t.shape) for suffix, t in tensors.items())
        answer = self._known.get(key)
        if answer is None:
            candidate = Candidate({suffix: Tensor(dtype, shape) for suffix, dtype, shape in key}, self._config)
            answer = self._known[key] = encodings.claim(candidate)
        return answer


def left_over(claim: Claim, tensors: BySuffix) -> Refusal | None:
    """What to say of the first tensor that a claim does not use; None if it uses all: none may be dropped."""
    if len(tensors) == len(claim.suffixes):
        return None
    for suffix in sorted(tensors.keys() - set(claim.suffixes.values())):
        dtype = tensors[claim.suffixes["codes"]].dtype
        role = next((r for r, names in claim.encoding.spellings.items() if suffix in names), None)
        if claim.encoding.plain is not None:
            return Refusal("E0513", suffix, f"codes beside this scale expected, found {dtype} weights")
        if role is not None:
            return Refusal("E0512", suffix, f"{claim.suffixes[role]} is a {role.removesuffix('s')} of the same matrix")
        return Refusal(UNREAD, suffix, f"no such tensor expected beside {dtype} codes")
    return None


def contradicted(config: Mapping[str, Any], found: Collection[str]) -> str | None:
    """One sentence if what a config says of the quantisation is not what the experts' types say; the types decide.

    `found` are the names of the encodings of the experts, those of plain floats left out.
    """
    nested = config.get("text_config")
    places = (config, nested if isinstance(nested, dict) else {})
    stated = next((s for p in places if (s := p.get("quantization_config") or p.get("compression_config"))), None)
    words = " and ".join(sorted(found)) or "plain floats"
    if not stated or not found:
        if bool(stated) == bool(found):
            return None
        says = "states a" if stated else "states no"
        return f"config.json {says} quantization_config, but the experts are {words}; the types decide"
    meant = _meant(stated) if isinstance(stated, dict) else None
    if meant is None or {meant} == set(found):
        return None
    return f"config.json states a quantization_config of {meant}, but the experts are {words}; the types decide"


def _meant(stated: Mapping[str, Any]) -> str | None:
    """The encoding a `quantization_config` announces, or its method if that is not read; None: unclear."""
    announced: type[Reading] | None = next((cls for cls in encodings.every() if cls.announced(stated)), None)
    if announced is not None:
        return announced.name
    method = stated.get("quant_method")
    return method if isinstance(method, str) and method in (*METHODS, "bitsandbytes") else None
