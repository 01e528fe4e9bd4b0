"""Work inside a layer in pieces of the prompt, so that what it takes for a while does not grow with the prompt.

A prompt goes through the model layer by layer, whole: its hidden states are kept, and a layer's experts are given all
of them at once. Attention, dense MLPs and norms of a longer prompt are called with one piece after the other, keys,
values and recurrent state going to the cache in between, and each piece's mask is made for it alone. A piece begins at
a multiple of `GRID` tokens: from the prompt's first for linear attention, so that its chunks are the same; from the
first of the cache for attention with keys, whose sums over keys are then cut alike. What the last piece would leave
over below `GRID` joins it, so that no product sees a single row. A prompt of one piece is given to the model's own
modules as it always was: the same calls, the same bits.

Only modules of classes whose pieces were proved to be the whole (tests/reader/test_pieces.py) are called so. Where a
model has an attention of another class, all of its prompts are worked on whole.

Importing this module imports no library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pagestone.reader import transformers_inside as inside
from pagestone.reader.model import GRID

ATTENTION = frozenset(
    {
        "DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeAttention", "GptOssAttention", "GraniteMoeAttention",
        "MiniMaxM2Attention", "MixtralAttention", "OlmoeAttention", "PhimoeAttention", "Qwen2MoeAttention",
        "Qwen3MoeAttention", "Qwen3NextAttention", "Qwen3_5MoeAttention",
    }
)  # fmt: skip
"""Classes of attention to the tokens before, by keys and values of the cache; a mask says to which."""
RECURRENT = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""Classes that carry a state from one token to the next; they have no mask."""
ROWS = frozenset(
    {
        "DeepseekV2MLP", "DeepseekV2RMSNorm", "DeepseekV3MLP", "DeepseekV3RMSNorm", "Glm4MoeMLP", "Glm4MoeRMSNorm",
        "GptOssRMSNorm", "GraniteMoeRMSNorm", "LayerNorm", "MiniMaxM2RMSNorm", "MixtralRMSNorm", "OlmoeRMSNorm",
        "Qwen2MoeMLP", "Qwen2MoeRMSNorm", "Qwen3MoeMLP", "Qwen3MoeRMSNorm", "Qwen3NextMLP", "Qwen3NextRMSNorm",
        "Qwen3_5MoeMLP", "Qwen3_5MoeRMSNorm",
    }
)  # fmt: skip
"""Classes of modules that compute every row by itself."""
ALONG = {"position_ids": -1, "cache_position": 0}
"""Arguments that have a value a token, and the dimension of tokens."""

_whole_above: ContextVar[int | None] = ContextVar("whole_above", default=None)
"""Queries above which masks are made later, a piece at a time; None: never."""


def spans(tokens: int, piece: int | None, past: int = 0) -> list[tuple[int, int]]:
    """(begin, end) of every piece of `tokens`: `piece` long each but the first and the last, none shorter than `GRID`
    or longer than a piece by as much. With those `past`, all but the first begin at a multiple of `GRID`.
    """
    if piece is None or tokens < piece + GRID:
        return [(0, tokens)]
    first = piece - past % GRID
    begins = [0, *range(first if first >= GRID else first + GRID, tokens - GRID + 1, piece)]
    return list(zip(begins, [*begins[1:], tokens], strict=True))


# -- masks ------------------------------------------------------------------------------------------------------------


@contextmanager
def masks_of_pieces(piece: int | None) -> Iterator[None]:
    """Within it, masks of prompts of several pieces are made a piece at a time."""
    token = _whole_above.set(None if piece is None else piece + GRID - 1)
    try:
        yield
    finally:
        _whole_above.reset(token)


class Mask:
    """A mask that is yet to be made: the library's own function, and what it was asked for."""

    def __init__(self, make: Callable[..., Any], asked: Mapping[str, Any]) -> None:
        self._make, self._asked = make, dict(asked)

    def whole(self) -> Any:
        """What the model would have been given."""
        return self._make(**self._asked)

    def piece(self, cache: Any, layer: int, begin: int, end: int) -> Any:
        """The mask of the tokens from `begin` to `end`, of which the layer's cache has all before."""
        length, offset = cache.get_mask_sizes(end - begin, layer)
        sizes = {"q_length": end - begin, "kv_length": length, "kv_offset": offset}
        begun = {"q_offset": self._asked["q_offset"] + begin}
        return self._make(**{**self._asked, **sizes, **begun})


def later(make: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function of the library that leaves the masks of several pieces for later."""

    def made(**asked: Any) -> Any:
        most = _whole_above.get()
        plain = asked.get("attention_mask") is None and isinstance(asked.get("q_offset"), int)
        if most is None or asked["q_length"] <= most or not plain:
            return make(**asked)
        return Mask(make, asked)

    return made


# -- modules ----------------------------------------------------------------------------------------------------------


class AttentionInPieces:
    """The forward of an attention module, called for one piece after the other."""

    def __init__(self, module: Any, piece: int) -> None:
        self._forward, self._layer, self._piece = module.forward, module.layer_idx, piece
        self._recurrent = inside.class_of_library(module) in RECURRENT

    def __call__(self, *unnamed: Any, **named: Any) -> Any:
        cut = None if unnamed else self._cut(named)
        if cut is None:
            if isinstance(named.get("attention_mask"), Mask):
                named["attention_mask"] = named["attention_mask"].whole()
            return self._forward(*unnamed, **named)
        hidden, out, rest = named["hidden_states"], None, None
        for begin, end in spans(hidden.shape[1], self._piece, self._past(named)):
            result = self._forward(**named | cut(begin, end))
            part, rest = (result[0], len(result) - 1) if isinstance(result, tuple) else (result, None)
            if out is None:
                out = part.new_empty((*hidden.shape[:2], *part.shape[2:]))
            out[:, begin:end] = part
        return out if rest is None else (out, *[None] * rest)

    def _past(self, named: Mapping[str, Any]) -> int:
        """Tokens whose keys and values the layer's cache has."""
        return 0 if self._recurrent else int(_state(named).get_seq_length(self._layer))

    def _cut(self, named: Mapping[str, Any]) -> Callable[[int, int], dict[str, Any]] | None:
        """A function that gives the arguments of a piece; None if there is one piece, or an unknown argument.

        Attention with keys needs a mask: without one the library would let a later piece see no past but its own.
        """
        hidden, mask, cache = named["hidden_states"], named.get("attention_mask"), _state(named)
        tokens = hidden.shape[1]
        masked = mask is None if self._recurrent else isinstance(mask, Mask)
        if cache is None or len(spans(tokens, self._piece)) == 1 or not masked:
            return None
        along = {name: (named[name], dim) for name, dim in ALONG.items() if named.get(name) is not None}
        positions = named.get("position_embeddings")
        known = {"hidden_states", "attention_mask", "position_embeddings", *inside.STATE_WORDS, *along}
        tables = positions if isinstance(positions, tuple) else () if positions is None else (positions,)
        if any(hasattr(named[name], "shape") for name in named.keys() - known):
            return None
        if any(t.shape[d] != tokens for t, d in [*along.values(), *((table, 1) for table in tables)]):
            return None

        def cut(begin: int, end: int) -> dict[str, Any]:
            piece = {name: t.narrow(dim, begin, end - begin) for name, (t, dim) in along.items()}
            piece["hidden_states"] = hidden[:, begin:end]
            if isinstance(mask, Mask):
                piece["attention_mask"] = mask.piece(cache, self._layer, begin, end)
            if tables:
                parts = tuple(table[:, begin:end] for table in tables)
                piece["position_embeddings"] = parts if isinstance(positions, tuple) else parts[0]
            return piece

        return cut


def _state(named: Mapping[str, Any]) -> Any:
    """The cache among the arguments of an attention, None if there is none."""
    return next((named[word] for word in inside.STATE_WORDS if named.get(word) is not None), None)


class RowsInPieces:
    """The forward of a module that computes every row by itself, called for one piece of rows after the other."""

    def __init__(self, module: Any, piece: int) -> None:
        self._forward, self._piece = module.forward, piece

    def __call__(self, *unnamed: Any, **named: Any) -> Any:
        if len(unnamed) != 1 or named or not len(unnamed[0].shape):
            return self._forward(*unnamed, **named)
        rows = unnamed[0].reshape(-1, unnamed[0].shape[-1])
        pieces = spans(len(rows), self._piece)
        if len(pieces) == 1:
            return self._forward(*unnamed)
        out = None
        for begin, end in pieces:
            part = self._forward(rows[begin:end])
            if out is None:
                out = part.new_empty((len(rows), *part.shape[1:]))
            out[begin:end] = part
        assert out is not None
        return out.reshape(*unnamed[0].shape[:-1], out.shape[-1])


def work_in_pieces(model: Any, piece: int) -> str | None:
    """Have a model's layers work in pieces; what keeps it from that, None if nothing.

    Every attention must be proved, or nothing is changed: masks are made for all layers alike.
    """
    layers = list(inside.decoder_layers(model))
    mixers = [m for layer in layers for name, m in layer.named_children() if name in ("self_attn", "linear_attn")]
    unproved = next((m for m in mixers if not _is_proved(m, ATTENTION | RECURRENT)), None)
    if len(mixers) != len(layers):
        return "its layers do not have one attention each"
    if unproved is not None:
        return f"{type(unproved).__name__} is no attention that was proved to work so"
    for mixer in mixers:
        mixer.forward = AttentionInPieces(mixer, piece)
    parts = [m for layer in layers for m in _parts(layer)] + [inside.last_norm(model)]
    for part in parts:
        if part is not None and _is_proved(part, ROWS):
            part.forward = RowsInPieces(part, piece)
    return None


def _parts(layer: Any) -> Iterator[Any]:
    """A layer's modules that work on hidden states, and those of its MoE block; inside attention there are none."""
    for name, module in layer.named_children():
        if name not in ("self_attn", "linear_attn"):
            yield module
            yield from (m for _, m in module.named_children())


def _is_proved(module: Any, classes: frozenset[str]) -> bool:
    """Whether a module is of one of these classes of the library, unaltered."""
    return inside.class_of_library(module) in classes and not inside.changed_methods(module)
