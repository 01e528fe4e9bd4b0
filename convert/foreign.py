"""Formats that are not read, each refused by its name: nothing of such a checkpoint is copied or half read.

Names of tensors tell most, `quant_method` of config.json the rest. A method alone refuses nothing: types decide, and
where they can be read they are. It gives the refusal of what cannot be read its right name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagestone.convert.checkpoint import CONFIG, Checkpoint
from pagestone.convert.side_files import UNLISTED
from pagestone.formats import encodings
from pagestone.formats.encodings.unread import ELEMENTS, METHODS, TAILS
from pagestone.formats.errors import PagestoneError, RequestError
from pagestone.formats.strict_json import brief

ADAPTERS = re.compile(r".*\.(lora_\w+|base_layer|modules_to_save)(\..*)?")
"""Names of adapters that were not merged into the matrices they change."""
OF_FORMAT = ("E0502", "E0504", "E0508", "E0510", "E0513", "E0514", "E0515", "E0517")
"""Refusals that a format which is not read may cause: other names, types and shapes than those that are known."""
INCOMPLETE = ("E0503", "E0508", "E0509", "E0513")
"""Refusals that tensors in a file outside the index may cause."""

RELEASE = "convert from the unquantised (or FP8) release of the model"


def refuse_foreign(checkpoint: Checkpoint) -> None:
    """Raise `RequestError` naming the format and a tensor if the checkpoint is in one that is not read."""
    stated = _mlx_settings(checkpoint.config)
    if stated is not None:
        raise _refused(checkpoint, "MLX", CONFIG, None, f"quantization {stated}")
    patterns = {name: re.compile(rf".*{tail}") for name, tail in TAILS.items()}
    for tensor in checkpoint.tensors.values():
        found = ELEMENTS.get(tensor.dtype)
        found = found or next((name for name, pattern in patterns.items() if pattern.fullmatch(tensor.name)), None)
        if found is not None:
            raise _refused(checkpoint, found, tensor.file, tensor.name, f"{tensor.dtype} {list(tensor.shape)}")
        if ADAPTERS.fullmatch(tensor.name):
            raise RequestError(
                "whole weights expected, found those of an adapter (LoRA) that was not merged",
                code="E0419",
                file=checkpoint.path / tensor.file,
                tensor=tensor.name,
                remedy="merge the adapter into its base model, save that, and convert the result",
            )


@contextmanager
def explained(checkpoint: Checkpoint) -> Iterator[None]:
    """Give a refusal its right name and remedy, where config.json or files outside the index say what is the matter."""
    try:
        yield
    except PagestoneError as error:
        stated = _stated(checkpoint.config)
        read = [name for cls in encodings.every() for name in cls.methods]  # a method may be anything JSON can hold
        method = stated.get("quant_method", "compressed-tensors" if "config_groups" in stated else None)
        if error.code in OF_FORMAT and method is not None and method not in read:
            name = METHODS.get(method, brief(method)) if isinstance(method, str) else brief(method)
            expected, stands = f"weights in {encodings.read_names()}", f"that this checkpoint is in {name}"
            raise _not_read(error, expected, stands, RELEASE) from None
        group = _group(stated)
        if error.code == "E0515" and group is not None:
            remedy = "convert from the unquantised release, or from one with a scale per channel or block"
            raise _not_read(error, "a scale per channel, tensor or block", group, remedy) from None
        outside = [f.name for f in checkpoint.side_files if f.rule == UNLISTED]
        if error.code in INCOMPLETE and outside:
            raise type(error)(
                f"{error.message}; {len(outside)} .safetensors files are here that the index does not name, "
                f"first {outside[0]}",
                code=error.code,
                file=error.file,
                tensor=error.tensor,
                remedy="download the index again, or take these files too with --merge-unlisted",
            ) from None
        raise


def _places(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """The first object in which a config says how weights are quantised; empty if there is none."""
    for place in _places(config):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(place.get(key), dict) and place[key]:
                return dict(place[key])
    return {}


def _group(stated: dict[str, Any]) -> str | None:
    """What compressed-tensors says of scales for groups of a row; None if it says nothing of the kind."""
    groups = stated.get("config_groups")
    for entry in groups.values() if isinstance(groups, dict) else ():
        weights = entry.get("weights") if isinstance(entry, dict) else None
        if isinstance(weights, dict) and weights.get("strategy") in ("group", "tensor_group"):
            return f"strategy: {weights['strategy']}, group_size: {brief(weights.get('group_size'))}"
    return None


def _mlx_settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """What MLX writes into config.json: `quantization`, and no `quant_method` anywhere."""
    for place in _places(config):
        for key in ("quantization", "quantization_config"):
            stated = place.get(key)
            if isinstance(stated, dict) and "quant_method" not in stated and {"bits", "group_size"} <= stated.keys():
                return {k: stated[k] for k in ("bits", "group_size")}
    return None


def _refused(checkpoint: Checkpoint, what: str, file: str, tensor: str | None, found: str) -> RequestError:
    return RequestError(
        f"weights in {encodings.read_names()} expected; this checkpoint is in {what} ({found})",
        code="E0511",
        file=checkpoint.path / file,
        tensor=tensor,
        remedy=RELEASE,
    )


def _not_read(error: PagestoneError, expected: str, stands: str, remedy: str) -> RequestError:
    """What to raise in the place of `error`, by what stands in config.json."""
    return RequestError(
        f"{expected} expected; config.json says {stands}, which is not read ({error.message})",
        code="E0511",
        file=error.file,
        tensor=error.tensor,
        remedy=remedy,
    )
