"""What transformers does not promise to keep: modules below its top, private names. No other file names them.

Any release may move or rename these, so this file is what a new one is checked against first. Where the tested range
(`reader/libraries.py`) has two spellings of one thing, both stand here.

Importing this module imports nothing; its functions import transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any

from pagestone.formats.errors import RequestError

FLAGS = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False,
}  # fmt: skip
"""What the library says of an experts module, and what it says of a standard one. A flag that a release does not know
yet stands for something that it does not do."""

STATE_WORDS = frozenset({"cache", "past_key_values", "cache_params"})
"""Words by which a layer's attention is given the cache, in one release or another."""

# -- attention --------------------------------------------------------------------------------------------------------


def sdpa_forward() -> Callable[..., Any]:
    """The attention function transformers calls "sdpa"."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    forward: Callable[..., Any] = sdpa_attention_forward
    return forward


def register_attention(name: str, function: Callable[..., Any], masks: str, wrap: Callable[..., Any]) -> None:
    """Make an attention function known under a name; harmless when repeated.

    Its masks are those of the library's function `masks` ("sdpa", "eager"), made by what `wrap` makes of that one.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, wrap(ALL_MASK_ATTENTION_FUNCTIONS[masks]))


def attention_of(model: Any) -> str:
    """The name of the attention function that a model has."""
    return str(model.config._attn_implementation)


def eager_attention(module: Any) -> Callable[..., Any]:
    """The attention function that stands beside a module's class: what the library calls "eager" for it."""
    forward: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return forward


def decoder_layers(model: Any) -> Any:
    """The modules that a language model's hidden states go through, in order."""
    return model.get_decoder().layers


def last_norm(model: Any) -> Any:
    """What hidden states go through before the head; None if there is no such module."""
    return getattr(model.get_decoder(), "norm", None)


def class_of_library(module: Any) -> str | None:
    """The name of a module's class if it is one of the library's models', or torch's own; else None."""
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith(("transformers.models.", "torch.nn.modules.")) else None


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


def untie(model: Any, names: Iterable[str]) -> None:
    """Let tensors that the model does not have any more be tied to nothing."""
    gone = set(names)
    for pair in [pair for pair in tied(model).items() if gone.intersection(pair)]:
        del model.all_tied_weights_keys[pair[0]]


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


# -- state of one size ------------------------------------------------------------------------------------------------


def fixed_state(model: Any, tokens: int) -> Any:
    """What `model` remembers, empty, with room for `tokens`: as its own state, but that it never grows.

    Raises `RequestError` (E1275) for a layer whose state was not proved to be the same so.
    """
    from transformers import DynamicCache

    state: Any = DynamicCache(config=model.config)
    state.layers = [_fixed(layer, tokens) for layer in state.layers]
    return state


def _fixed(layer: Any, tokens: int) -> Any:
    from transformers import cache_utils as inside

    kind = type(layer)
    if kind is inside.DynamicLayer:
        return full_layer()(tokens)
    if kind is inside.DynamicSlidingWindowLayer and layer.sliding_window > 1:
        return window_layer()(layer.sliding_window, tokens)
    if kind is inside.LinearAttentionLayer:  # of one size by nature, and written in place
        return layer
    raise RequestError(
        f"layers that keep every token, the last ones, or a state of one size expected, found {kind.__name__}",
        code="E1275",
        remedy="leave out --memory and --context: the state then grows as the library lets it",
    )


@cache
def full_layer() -> Any:
    """The class of layers that keep all tokens, in memory of one size, and give views of it."""
    from transformers import cache_utils as inside

    dynamic: Any = inside.DynamicLayer

    class FullLayer(dynamic):  # type: ignore[misc]
        """Keys and values [batch, heads, tokens, dim] of every token, at most `room` of them."""

        def __init__(self, room: int) -> None:
            super().__init__()
            self.room = room

        def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
            super().lazy_initialization(key_states, value_states)
            self._buffers = [_buffer(states, self.room) for states in (key_states, value_states)]

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            begin = self.get_seq_length()
            end = begin + key_states.shape[-2]
            if end > self.room:
                raise context_full(self.room, end)
            for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
                buffer[..., begin:end, :] = states
            self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
            return self.keys, self.values

    return FullLayer


@cache
def window_layer() -> Any:
    """The class of layers that keep the last tokens so."""
    from transformers import cache_utils as inside

    sliding: Any = inside.DynamicSlidingWindowLayer

    class WindowLayer(sliding):  # type: ignore[misc]
        """Keys and values of the last tokens; they move to the front of their memory when its end is reached."""

        def __init__(self, window: int, room: int) -> None:
            super().__init__(sliding_window=window)
            self.room, self._begin = room, 0

        def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
            super().lazy_initialization(key_states, value_states)
            size = window_room(self.sliding_window, self.room)
            self._buffers = [_buffer(states, size) for states in (key_states, value_states)]
            self.keys, self.values = (buffer[..., :0, :] for buffer in self._buffers)

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.cumulative_length += key_states.shape[-2]
            if self.cumulative_length > self.room:
                raise context_full(self.room, self.cumulative_length)
            held = self.keys.shape[-2]
            whole = held + key_states.shape[-2]
            kept = min(self.sliding_window - 1, whole)
            begin = self._begin if self._begin + whole <= self._buffers[0].shape[-2] else 0
            pairs = ((self.keys, key_states), (self.values, value_states))
            full = [self._joined(n, old, new, begin) for n, (old, new) in enumerate(pairs)]
            self._begin = begin + whole - kept if whole <= self._buffers[0].shape[-2] else 0
            self.keys, self.values = (b[..., self._begin : self._begin + kept, :] for b in self._buffers)
            return full[0], full[1]

        def _joined(self, number: int, old: Any, new: Any, begin: int) -> Any:
            """What was kept and what came, together; what is to be kept of it is in its buffer then."""
            import torch

            buffer, held = self._buffers[number], old.shape[-2]
            whole = held + new.shape[-2]
            if whole > buffer.shape[-2]:  # a long prompt: for once they lie outside
                full = torch.cat([old, new], dim=-2)
                kept = min(self.sliding_window - 1, whole)
                buffer[..., :kept, :] = full[..., whole - kept :, :]
                return full
            if begin != self._begin:
                buffer[..., :held, :] = old.clone()
            buffer[..., begin + held : begin + whole, :] = new
            return buffer[..., begin : begin + whole, :]

    return WindowLayer


def _buffer(states: Any, tokens: int) -> Any:
    return states.new_empty((*states.shape[:-2], tokens, states.shape[-1]))


def window_room(window: int, tokens: int) -> int:
    """Tokens that a layer with a sliding window has memory for: twice the window, so that few tokens move it."""
    return min(tokens, 2 * window)


def context_full(room: int, asked: int) -> RequestError:
    """More tokens than the state has room for."""
    return RequestError(
        f"at most {room:,} tokens expected (the context), found {asked:,}",
        code="E1272",
        remedy=f"give --context {asked} or more (and --memory for it), or say less",
    )
