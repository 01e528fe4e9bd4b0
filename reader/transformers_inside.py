"""What transformers does not promise to keep: modules below its top, private names. No other file names them.

Any release may move or rename these, so this file is what a new one is checked against first. Where the tested range
(`reader/libraries.py`) has two spellings of one thing, both stand here.

Importing this module imports nothing; its functions import transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any

FLAGS = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False,
}  # fmt: skip
"""What the library says of an experts module, and what it says of a standard one. A flag that a release does not know
yet stands for something that it does not do."""

# -- attention --------------------------------------------------------------------------------------------------------


def sdpa_forward() -> Callable[..., Any]:
    """The attention function transformers calls "sdpa"."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    forward: Callable[..., Any] = sdpa_attention_forward
    return forward


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make an attention function with the masks of "sdpa" known under a name; harmless when repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    AttentionInterface.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)


def supports_sdpa(model: Any) -> bool:
    """Whether a model's attention may be "sdpa" (gpt_oss: it may not, for its sinks)."""
    return bool(model._supports_sdpa)


# -- state and weights ------------------------------------------------------------------------------------------------


@cache
def state_word(kind: Any) -> str:
    """The argument of a class of models, and its result's field, that holds what one remembers: 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def renamed(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The model's name of every tensor of a checkpoint, by transformers' own renaming rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    meta = dict.fromkeys(model.state_dict(), True)
    return {name: rename_source_key(name, rules, [], model.base_model_prefix, meta)[0] for name in names}


def tied(model: Any) -> dict[str, str]:
    """Tensors that are others under a second name: {second name: the other}."""
    return dict(model.all_tied_weights_keys)


def tie(model: Any, missing: set[str]) -> None:
    """Give tied tensors that were not loaded their values."""
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def float32_patterns(model: Any, dtype: Any) -> list[str]:
    """Patterns of names (* is anything) that the model lists to run in float32 where the rest runs in `dtype`."""
    return sorted(model._get_dtype_plan(dtype))


# -- experts ----------------------------------------------------------------------------------------------------------


def is_gpt_oss(module: Any) -> bool:
    """Whether a module is of gpt_oss's very class of experts."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return type(module) is GptOssExperts


def gate_of(module: Any) -> Callable[..., Any]:
    """The function an experts module puts between its products."""
    gate: Callable[..., Any] = module._apply_gate
    return gate


def has_default_gate(kind: type) -> bool:
    """Whether a class of experts has the library's own gate."""
    from transformers.integrations import moe

    return getattr(kind, "_apply_gate", None) is moe._default_apply_gate


def changed_methods(module: Any) -> set[str]:
    """Methods by which an instance computes otherwise than its class; hooks are among them."""
    own: set[str] = {"forward", "_apply_gate"} & vars(module).keys()
    return own | {name for name in ("_forward_hooks", "_forward_pre_hooks") if getattr(module, name)}


def flags_of(module: Any) -> dict[str, bool | None]:
    """`FLAGS` as they are in a module; None for one that the release knows and the module lacks."""
    from transformers.integrations.moe import use_experts_implementation

    taken = inspect.signature(use_experts_implementation).parameters
    return {flag: getattr(module, flag, None if flag in taken else usual) for flag, usual in FLAGS.items()}


def is_transposed(module: Any) -> bool:
    """Whether an experts module holds its matrices as [experts, columns, rows]."""
    return bool(module.is_transposed)


def activation_types(words: Iterable[str]) -> set[type]:
    """The classes of activations that configs name so."""
    from transformers.activations import ACT2FN

    return {type(ACT2FN[word]) for word in words}


def standard_forward() -> Callable[..., Any] | None:
    """What Mixtral's experts compute eagerly: the forward that others are compared with."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    return eager_forward(MixtralExperts)


def eager_forward(kind: type) -> Callable[..., Any] | None:
    """The forward that a class decorated by transformers runs eagerly; None if the library did not decorate it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    outer: Any = kind.__dict__.get("forward")
    if not isinstance(outer, FunctionType) or outer.__code__ is not MixtralExperts.forward.__code__:
        return None
    inner = inspect.getclosurevars(outer).nonlocals
    if inner.get("experts_interface") is not ALL_EXPERTS_FUNCTIONS:
        return None
    forward: Callable[..., Any] | None = inner.get("original_forward")
    return forward
