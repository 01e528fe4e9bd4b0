"""Formats that are not read, each refused by its name: nothing of such a checkpoint is copied or half read."""

from __future__ import annotations

import re
from typing import Any

from pagestone.convert.checkpoint import CONFIG, Checkpoint
from pagestone.formats.errors import RequestError

TAILS = {
    "MXFP4": r"_proj_(blocks|scales)",
    "NVFP4": r"\.(weight_scale_2|weight_global_scale|input_global_scale)",
    "a packed compressed-tensors format (int4, NVFP4 or MXFP4)": r"\.(weight_packed|weight_shape|weight_g_idx)",
    "GPTQ or AWQ": r"\.(qweight|qzeros|g_idx)",
    "bitsandbytes": r"\.(SCB|weight_format|weight\.(nested_)?(absmax|quant_map)|weight\.quant_state\.\w+)",
    "MLX": r"\.switch_(mlp|glu)\.\w+\.(weight|scales|biases)",
}
"""Format by the end of a tensor's name. MLX also shifts and transposes dense tensors, so none of it may be copied."""
ELEMENTS = {"F4": "a 4-bit float format", "F6_E2M3": "a 6-bit float format", "F6_E3M2": "a 6-bit float format"}


def refuse_foreign(checkpoint: Checkpoint) -> None:
    """Raise `RequestError` naming the format and a tensor if the checkpoint is in one that is not read."""
    stated = _mlx_settings(checkpoint.config)
    if stated is not None:
        raise _refused(checkpoint, "MLX", CONFIG, None, f"quantization {stated}")
    patterns = {name: re.compile(rf"{tail}\Z") for name, tail in TAILS.items()}
    for tensor in checkpoint.tensors.values():
        found = ELEMENTS.get(tensor.dtype)
        found = found or next((name for name, pattern in patterns.items() if pattern.search(tensor.name)), None)
        if found is not None:
            raise _refused(checkpoint, found, tensor.file, tensor.name, f"{tensor.dtype} {list(tensor.shape)}")


def _mlx_settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """What MLX writes into config.json: `quantization`, and no `quant_method` anywhere."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        for key in ("quantization", "quantization_config"):
            stated = place.get(key)
            if isinstance(stated, dict) and "quant_method" not in stated and {"bits", "group_size"} <= stated.keys():
                return {k: stated[k] for k in ("bits", "group_size")}
    return None


def _refused(checkpoint: Checkpoint, what: str, file: str, tensor: str | None, found: str) -> RequestError:
    return RequestError(
        f"weights in BF16, F16, F32, FP8 or int8 expected; this checkpoint is in {what} ({found})",
        code="E0511",
        file=checkpoint.path / file,
        tensor=tensor,
        remedy="convert from the unquantised (or FP8) release of the model",
    )
