"""What a model takes beside its weights while it runs: state for its context, and working space for a prompt.

`footprint` computes both from config.json, without torch: state exactly for the attention it knows, working space
generously. A host that has the model itself may say it better (`Host.footprint`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagestone.reader.configs import is_int, read_config
from pagestone.reader.dense_costs import DenseUse

COMPUTED, ESTIMATED, MEASURED = "computed", "estimated", "measured"
"""How a number is known: by sizes; by a bound that holds in practice; as this process shows."""
RECURRENT_LAYERS = ("linear_attention", "mamba", "conv", "recurrent")
"""Words of a config's `layer_types` for layers whose state is of one size."""
SLIDING_LAYERS = ("sliding_attention", "chunked_attention")
"""Words for layers that keep the last tokens only."""
FLOAT32 = 4
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element in the types models run in."""
CHUNK = 64
"""Tokens that linear attention computes at once."""
KERNELS = 1.35
"""What libraries' kernels take beside the tensors that can be seen: their copies in another order of bytes."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes beside the weights, as functions of tokens.

    `token_bytes` are kept of every token, `windows` are (most tokens, bytes of each) of layers that forget,
    `fixed_bytes` are kept whatever was fed. `working` are (tokens fed at once, most bytes in use meanwhile), tokens
    ascending: that function is convex, so that what lies between two of them is below their chord. `known` says how
    the latter are.
    """

    token_bytes: int
    windows: tuple[tuple[int, int], ...] = ()
    fixed_bytes: int = 0
    working: tuple[tuple[int, int], ...] = ((1, 0),)
    known: str = ESTIMATED
    logit_bytes: int = 0
    """Of the logits of one token, beyond the one that is always made."""
    positions: int | None = None
    """Tokens the model was made for."""
    dense: DenseUse | None = None
    """What it does with dense tensors, if that is known."""

    def state_bytes(self, context: int) -> int:
        """Keys, values and recurrent state with room for `context` tokens."""
        kept = sum(min(most, context) * nbytes for most, nbytes in self.windows)
        return self.token_bytes * context + kept + self.fixed_bytes

    def working_bytes(self, tokens: int) -> int:
        """What feeding `tokens` at once takes for a while, logits of one of them included."""
        points = self.working
        passed = [most for above, most in points if above <= tokens]  # a shorter prompt may take more
        return max(self._at(tokens), *passed, 0)

    def _at(self, tokens: int) -> int:
        points = self.working
        if tokens <= points[0][0]:
            return points[0][1]
        for (below, less), (above, more) in pairwise(points):
            if tokens <= above:
                return less + -(-(more - less) * (tokens - below) // (above - below))
        tokens_last, most = points[-1]
        return -(-most * tokens**2 // tokens_last**2)  # nothing grows faster than with the square


# -- from a config ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a text config that sizes follow from; what it does not state is taken as it usually is."""

    table: dict[str, Any] = field(repr=False)
    item: int
    """Bytes of an element in the type the model runs in."""

    def number(self, *names: str, default: int = 0) -> int:
        """The first of these fields that is a positive integer."""
        for name in names:
            value = self.table.get(name)
            if is_int(value) and value is not None and value > 0:
                return int(value)
        return default

    @property
    def hidden(self) -> int:
        return self.number("hidden_size")

    @property
    def heads(self) -> int:
        return self.number("num_attention_heads", default=1)

    @property
    def latent(self) -> bool:
        """Whether keys and values are made of one short row (DeepSeek): they are kept as they are made."""
        return self.number("kv_lora_rank") > 0

    @property
    def key(self) -> int:
        """Elements of a token's keys, all heads that are kept together."""
        if self.latent:
            return self.heads * (self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim"))
        return self.number("num_key_value_heads", default=self.heads) * self._head

    @property
    def value(self) -> int:
        """Elements of a token's values."""
        return self.heads * self.number("v_head_dim") if self.latent else self.key

    @property
    def _head(self) -> int:
        return self.number("head_dim", default=-(-self.hidden // self.heads))

    @property
    def query(self) -> int:
        """Elements of a token's queries, or of its keys and values once repeated for every head."""
        return self.key if self.latent else self.heads * self._head

    @property
    def linear_key(self) -> int:
        return self.number("linear_num_key_heads") * self.number("linear_key_head_dim")

    @property
    def linear_value(self) -> int:
        return self.number("linear_num_value_heads") * self.number("linear_value_head_dim")

    def kinds(self) -> list[str]:
        """The kind of attention of every layer. A layer of which nothing is said keeps every token."""
        layers = self.number("num_hidden_layers")
        said = self.table.get("layer_types")
        if isinstance(said, list) and len(said) == layers and all(isinstance(kind, str) for kind in said):
            return said
        every = self.number("full_attention_interval")
        linear = bool(self.linear_key and every)
        return ["linear_attention" if linear and (n + 1) % every else "full_attention" for n in range(layers)]


def element_bytes(table: dict[str, Any], text: dict[str, Any]) -> int:
    """Bytes of an element in the type a config says its model runs in; 2 where it says none."""
    word = text.get("dtype") or text.get("torch_dtype") or table.get("dtype") or table.get("torch_dtype")
    return DTYPES.get(word, 2) if isinstance(word, str) else 2


def footprint(root: Path, piece: int | None = None, longest: int = 8192) -> Footprint:
    """What config.json in `root` says; `piece` is how many tokens are worked on at once, None for a whole prompt.

    Working space is given up to `longest` tokens. Raises as `read_config`.
    """
    table, text = read_config(root)
    sizes = Sizes(text, element_bytes(table, text))
    kinds = sizes.kinds()
    token = (sizes.key + sizes.value) * sizes.item
    sliding = sizes.number("sliding_window")
    windows = [kind in SLIDING_LAYERS and sliding > 0 for kind in kinds]
    recurrent = [kind in RECURRENT_LAYERS for kind in kinds]
    full = len(kinds) - sum(windows) - sum(recurrent)
    points = sorted({1, min(piece or 1, longest), longest})
    return Footprint(
        token_bytes=token * full,
        windows=((2 * sliding, token * sum(windows)),) if any(windows) else (),
        fixed_bytes=_recurrent(sizes) * sum(recurrent),
        working=tuple((n, _working(sizes, kinds, n, min(piece or n, n))) for n in points),
        logit_bytes=sizes.number("vocab_size") * sizes.item,
        positions=sizes.number("max_position_embeddings") or None,
    )


def _recurrent(sizes: Sizes) -> int:
    """State of one layer of linear attention: a matrix a head in float32, and the last inputs of its convolution."""
    matrices = sizes.number("linear_num_value_heads") * sizes.number("linear_key_head_dim")
    width = 2 * sizes.linear_key + sizes.linear_value
    return (
        matrices * sizes.number("linear_value_head_dim") * FLOAT32
        + width * sizes.number("linear_conv_kernel_dim", default=4) * sizes.item
    )


def _working(sizes: Sizes, kinds: list[str], tokens: int, piece: int) -> int:
    """Bytes in use at the worst moment of feeding `tokens`, worked on `piece` at a time."""
    item = sizes.item
    heads = sizes.number("linear_num_value_heads")
    wide = max(2 * sizes.number("linear_key_head_dim") * heads + 2 * sizes.linear_value, 1)
    linear = piece * (wide * 4 * FLOAT32 + heads * CHUNK * 4 * FLOAT32) + 2 * piece * wide * item
    masks = piece * tokens * (1 + item)
    scores = 0 if sizes.table.get("model_type") != "gpt_oss" and not sizes.latent else sizes.heads * piece * tokens * 12
    full = piece * sizes.query * 8 * item + tokens * 2 * sizes.query * item + masks + scores
    mixers = [linear if kind in RECURRENT_LAYERS else full for kind in kinds]
    inner = sizes.number("moe_intermediate_size", "intermediate_size")
    shared = max(sizes.number("shared_expert_intermediate_size"), sizes.number("intermediate_size"), inner)
    experts = sizes.number("num_experts", "num_local_experts", "n_routed_experts")
    block = tokens * ((4 * sizes.hidden + 5 * max(inner, shared)) * item + 4 * experts * FLOAT32)
    kept = tokens * sizes.hidden * 5 * item
    logits = sizes.number("vocab_size") * (item + 3 * FLOAT32)
    return int((kept + max(*mixers, block, 0)) * KERNELS) + logits
