"""A prompt fed to a model without weights: nothing is computed, but every tensor that would be made is counted.

A model on the meta device runs the same code as one with weights, so what it has in use at the worst moment is what
that one will have. Of layers that are alike one is run. What kernels take inside themselves is not seen; `KERNELS` of
`footprint` stands for it.

Importing this module imports torch.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pagestone.reader import transformers_inside as inside
from pagestone.reader.footprint import COMPUTED, KERNELS, Footprint

BEFORE = 64
"""Tokens fed before what is counted, so that the state is there."""
SHORT = 128
"""Tokens of the shorter of two prompts that are counted."""
SAMPLING = 16
"""Bytes for every logit while a token is chosen: as float32, sorted, as probabilities."""


class Counted(TorchDispatchMode):
    """Counts the bytes of tensors made within it: those in use now, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        results = function(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            storage = tensor.untyped_storage()
            if id(storage) not in before and storage not in self._known:
                self._known.add(storage)
                self._add(storage)
        return results

    def _add(self, storage: Any) -> None:
        nbytes = storage.nbytes()
        self.now += nbytes
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self.now -= nbytes

        weakref.finalize(storage, gone)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class FusedAttention(TorchFunctionMode):
    """torch's attention as its CPU kernel has it: no scores are kept where the kernel takes the shapes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            if query.shape[-1] == key.shape[-1] == value.shape[-1]:
                mask = kwargs.get("attn_mask")
                _ = None if mask is None else torch.empty(mask.shape, dtype=query.dtype, device=query.device)
                return torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return function(*args, **kwargs)


class _Experts(nn.Module):
    """Routed experts at their worst: all tokens go to one."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        transposed = inside.is_transposed(original)
        self._inner = original.gate_up_proj.shape[2 if transposed else 1] // 2
        self.num_experts = original.num_experts

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        out = torch.zeros_like(hidden_states)
        slots = top_k_index.t()
        _ = torch.empty((2, slots.numel()), dtype=torch.int64, device=slots.device)  # slot and token of every row
        rows = hidden_states.clone()
        packed = rows.to(torch.float32)
        both = rows.new_empty((len(rows), 2 * self._inner))
        both = both + torch.empty_like(both)  # a bias, or gate and up brought into another order
        activated = nn.functional.silu(both[:, : self._inner]) * both[:, self._inner :]
        del packed, both
        added = activated.new_empty(hidden_states.shape)
        added = (added * top_k_weights[:, :1]).to(out.dtype)
        return out + added


class _Passing(nn.Module):
    """Stands for a layer like one that is run: what comes in goes out."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({k: v for k, v in vars(original).items() if isinstance(v, str | int)})

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


def _kind(layer: nn.Module, word: str) -> str:
    """What layers that are alike have in common: modules, shapes, and the config's word for their attention."""
    modules = [(name, type(module).__name__) for name, module in layer.named_modules()]
    return repr((word, modules, [(name, tuple(p.shape)) for name, p in layer.named_parameters()]))


def _leave_alike(model: Any) -> dict[int, int]:
    """Let one layer of each kind run; how many are like it, by its number."""
    layers = next(
        m for n, m in model.named_modules() if n.rpartition(".")[2] == "layers" and isinstance(m, nn.ModuleList)
    )
    words = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    kinds = [_kind(layer, word) for layer, word in zip(layers, words, strict=True)]
    counts, first = Counter(kinds), {kind: kinds.index(kind) for kind in kinds}
    for number, kind in enumerate(kinds):
        if first[kind] != number:
            layers[number] = _Passing(layers[number])
    return {number: counts[kind] for kind, number in first.items()}


def _replace_experts(model: Any) -> None:
    places = [n for n, m in model.named_modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3]
    for name in places:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _Experts(model.get_submodule(name)))


Forward = Callable[[Any, Any], Any]
"""(ids int64 [1, n] on the meta device, state) -> the state after them, logits of the last token made meanwhile."""


def rehearse(model: Any, forward: Forward, longest: int, piece: int | None = None) -> Footprint:
    """What a model of the meta device takes beside its weights, with prompts of up to `longest` tokens.

    `piece` is the longest prompt that is worked on whole, if there is one: there what is in use has a bend. The model
    is not to be used afterwards: layers of it were taken away. `forward` feeds it. Raises whatever code that
    asks for values raises, where there are none.
    """
    alike = _leave_alike(model)
    _replace_experts(model)
    text = model.config.get_text_config()
    points, state = [], None
    for tokens in sorted({min(SHORT, longest), min(piece or longest, longest), longest}):
        peak, state = _peak(model, forward, tokens)
        points.append((tokens, int(peak * KERNELS) + text.vocab_size * SAMPLING))
    token_bytes, windows, fixed = _state(state, alike)
    positions = getattr(text, "max_position_embeddings", None)
    item = torch.empty(0, dtype=next(p.dtype for p in model.parameters() if p.is_floating_point())).element_size()
    return Footprint(
        token_bytes, windows, fixed, tuple(points), COMPUTED, text.vocab_size * item,
        positions if isinstance(positions, int) else None,
    )  # fmt: skip


def _peak(model: Any, forward: Forward, tokens: int) -> tuple[int, Any]:
    """(the most bytes in use while `tokens` are fed, the state after them)."""

    def ids(count: int) -> Any:
        return torch.zeros((1, count), dtype=torch.int64, device="meta")

    state = inside.fixed_state(model, tokens + BEFORE)
    with torch.no_grad(), FusedAttention():
        state = forward(ids(BEFORE), state)
        with Counted() as counted:
            state = forward(ids(tokens), state)
    return counted.peak, state


def _state(state: Any, alike: dict[int, int]) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """Bytes of the state: of a token, (most tokens, bytes of each) of windows, whatever was fed."""
    token, windows, fixed = 0, [], 0
    for number, count in alike.items():
        layer = state.layers[number]
        buffers = getattr(layer, "_buffers", None)
        if buffers is None:
            fixed += count * sum(_fixed_bytes(layer))
            continue
        row = sum(b.nbytes // b.shape[-2] for b in buffers)
        if layer.is_sliding:
            windows.append((inside.window_room(layer.sliding_window, layer.room), count * row))
        else:
            token += count * row
    return token, tuple(windows), fixed


def _fixed_bytes(layer: Any) -> list[int]:
    stored = (getattr(layer, name, None) for name in ("conv_states", "recurrent_states"))
    values = [v for part in stored for v in (part.values() if isinstance(part, dict) else [part])]
    return [v.nbytes for v in values if isinstance(v, torch.Tensor)]
