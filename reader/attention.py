"""Attention functions that transformers knows by names of ours: its own results, without what makes them dear.

Query [batch, heads, tokens, dim], key and value [batch, key heads, length, dim]; masks are those of the library's own
function, made a piece at a time for longer prompts (`reader/pieces.py`). Importing this module imports no library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagestone.reader import transformers_inside as inside
from pagestone.reader.pieces import later

PACKED, OWN = "pagestone_packed", "pagestone_own"
"""Our attention functions' names in transformers' registries."""
SCORES = 1 << 24
"""Scores (heads x queries x keys) that are made at once where the library makes all of them."""


def register_attention() -> None:
    """Make our attention known to transformers under `PACKED` and `OWN`; harmless when repeated."""
    inside.register_attention(PACKED, packed_attention, "sdpa", later)
    inside.register_attention(OWN, own_attention, "eager", later)


def packed_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    """transformers' sdpa; one new token, or tokens with a mask, are attended to a key/value head at a time.

    torch's grouped-query path without a mask is slow on a CPU (51 ms at 4096 tokens against 1.3), and with a mask the
    library repeats keys and values for every head.
    """
    import torch

    batch, heads, tokens, dim = query.shape
    shared = key.shape[1]
    plain = not kwargs.get("dropout") and kwargs.get("position_bias") is None
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    attend = torch.nn.functional.scaled_dot_product_attention
    if plain and heads != shared and tokens == 1 and (masked or attention_mask is None):
        packed = query.reshape(batch, shared, heads // shared, dim)
        out = attend(packed, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if plain and heads != shared and masked and dim == value.shape[-1]:
        group = heads // shared
        out = query.new_empty(batch, tokens, heads, dim)
        for head in range(shared):
            of_head = slice(head * group, (head + 1) * group)
            one, two = (t[:, head : head + 1].expand(-1, group, -1, -1) for t in (key, value))
            found = attend(query[:, of_head], one, two, attn_mask=attention_mask, scale=scaling)
            out[:, :, of_head] = found.transpose(1, 2)
        return out, None
    forward = inside.sdpa_forward()
    if dim == value.shape[-1]:
        return forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return by_queries(forward, module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def own_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """What transformers calls eager, for a model that has no other."""
    return by_queries(inside.eager_attention(module), module, query, key, value, attention_mask, **kwargs)


def by_queries(
    forward: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    """An attention function that makes all scores, called for some queries at a time where those were too many."""
    batch, heads, tokens, _ = query.shape
    most = max(2, SCORES // (batch * heads * key.shape[2]))
    if attention_mask is None or tokens <= most:
        return forward(module, query, key, value, attention_mask, **kwargs)
    out = None
    ends = [*range(most, tokens - 1, most), tokens]  # no single query at the end
    for begin, end in zip([0, *ends], ends, strict=False):
        part, _ = forward(module, query[:, :, begin:end], key, value, attention_mask[:, :, begin:end], **kwargs)
        if out is None:
            out = part.new_empty(batch, tokens, *part.shape[2:])
        out[:, begin:end] = part
    return out, None
