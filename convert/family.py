"""What a family must state about its routed experts; the answers are in `convert/families/`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pagestone.formats.layout import PART_NAMES, PARTS
from pagestone.formats.strict_json import MAX_LAYERS, not_whole, whole, wholes

DECODERS = ("model.layers", "model.language_model.layers", "language_model.model.layers")
"""Where decoder layers stand: plain, and the two nestings multimodal checkpoints use."""

ATTENTION_LINEARS = tuple(f"self_attn.{p}_proj" for p in "qkvo")
LATENT_LINEARS = tuple(
    f"self_attn.{p}" for p in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
)
MLP_LINEARS = tuple(f"mlp.{p}_proj" for p in PARTS)
SHARED_LINEARS = tuple(f"mlp.shared_expert.{p}_proj" for p in PARTS)
SHARED_LINEARS_OF_MANY = tuple(f"mlp.shared_experts.{p}_proj" for p in PARTS)

HEADS = ("lm_head", "language_model.lm_head")
"""What the head is called."""
TABLES = {
    "model.embed_tokens": "lm_head",
    "model.language_model.embed_tokens": "lm_head",
    "language_model.model.embed_tokens": "language_model.lm_head",
}
"""What the embedding table is called, and the head that a model ties to it."""

Config = dict[str, Any]


def no_dense_layers(config: Config) -> frozenset[int]:
    """Every decoder layer is MoE."""
    return frozenset()


@dataclass(frozen=True, slots=True)
class Fused:
    """Full tails (below a layer) of fused expert tensors, and how they are stored.

    Plain: gate_up [E, 2I, H] and down [E, H, I]. `transposed`: [E, H, 2I] and [E, I, H]. `interleaved`: gate and up
    rows alternate (g0, u0, g1, u1); else all gate rows come first. `either_way`: releases store them as `transposed`
    says, others the other way round. One shape says nothing where 2I == H or I == H, the two together always do.
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    transposed: bool = False
    interleaved: bool = False
    either_way: bool = False
    gate_up_bias: str | None = None
    down_bias: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Names, fusion, orientation, interleaving and count fields of one family of models.

    `experts` is the path of the experts module below a layer; `router` the full tail of the router's weight, whose
    rows are the experts; `parts` the names of gate, up and down of one expert, in the container too; `loads_parts`
    whether transformers understands these names (else they are ours). `known` are patterns (matched against a whole
    name, layer numbers included) of tensors that are expected and copied; any other name is copied as unknown.
    """

    name: str
    model_types: tuple[str, ...]
    known: tuple[str, ...]
    experts: str = "mlp.experts"
    router: str = "mlp.gate.weight"
    parts: tuple[str, str, str] = PART_NAMES
    loads_parts: bool = True
    fused: Fused | None = None
    count_fields: tuple[str, ...] = ("num_experts", "num_local_experts")
    hidden_field: str = "hidden_size"
    size_fields: tuple[str, ...] = ("moe_intermediate_size",)
    """Where the config states the intermediate size of a routed expert: a number, or a list with one a layer."""
    decoders: tuple[str, ...] = DECODERS
    mtp: tuple[str, ...] = ("mtp.layers",)
    mtp_as_extra_layer: bool = False
    """The MTP block stands as `model.layers.<num_hidden_layers>`."""
    mtp_field: str = "mtp_num_hidden_layers"
    """Where the config states how many MTP blocks there are."""
    dense_layers: Callable[[Config], frozenset[int]] = no_dense_layers
    linears: tuple[str, ...] = ATTENTION_LINEARS
    """Tails (below a layer) of the dense modules that a loader of block FP8 reads as codes: the plain linear layers.
    Everything else (routers, embeddings, the head, vision) it takes as numbers, so codes may not stay there."""

    encoded: tuple[str, ...] = ATTENTION_LINEARS
    """Tails (below a decoder layer) of the dense modules that `--dense` may encode: large linear layers, used by being
    called. Never routers, norms, convolutions, gates of few rows, or the MTP block."""

    def like(
        self, name: str, *other_types: str, more: tuple[str, ...] = (), without: tuple[str, ...] = (), **changes: Any
    ) -> Family:
        """Another family, called `name` as its first model type is, that differs from this one in `changes`.

        `more` patterns are known beside those of this one, `without` are not; `ValueError` if they were not anyway.
        """
        missing = [pattern for pattern in without if pattern not in self.known]
        if missing:
            raise ValueError(f"{self.name} does not know {missing}")
        known = (*(pattern for pattern in self.known if pattern not in without), *more)
        return replace(self, name=name, model_types=(name, *other_types), known=known, **changes)

    def experts_of(self, config: Config) -> int | None:
        """Experts per layer as the config states them, or None; `DataError` if it states something else there."""
        stated = [whole(config, field) for field in self.count_fields]
        return next((count for count in stated if count is not None), None)

    def hidden_of(self, config: Config) -> int | None:
        """The hidden size as the config states it, or None; `DataError` if it states something else there."""
        return whole(config, self.hidden_field, 1)

    def size_of(self, config: Config, layer: int, depth: int) -> tuple[str, int] | None:
        """(field, intermediate size of a routed expert of `layer`) as the config states it, or None.

        A list has an entry for each of `depth` decoder layers, of which those of dense layers mean nothing; MTP blocks
        come after them, and it may be silent there. `DataError` for what is neither a number nor such a list.
        """
        field = next((f for f in self.size_fields if config.get(f) is not None), None)
        if field is None:
            return None
        if not isinstance(config[field], list):
            size = whole(config, field, 1)
            return None if size is None else (field, size)
        sizes = wholes(config, field)
        if len(sizes) < depth:
            raise not_whole(config, field, f"an integer, or {depth} of them, one a layer,", sizes)
        return (field, sizes[layer]) if layer < len(sizes) else None

    @property
    def markers(self) -> frozenset[str]:
        """Path parts that only routed experts have: a name with one of them must be claimed, or the plan is refused."""
        own = self.experts.rsplit(".", 1)[-1]
        tails = () if self.fused is None else (self.fused.gate_up, self.fused.down)
        others = {t.removesuffix(".weight").rsplit(".", 1)[-1] for t in tails if own not in t.split(".")}
        return frozenset({own} | others)

    def reads_codes(self, module: str) -> bool:
        """Whether the module called `module` is one of `linears`, in a decoder layer or a block of `mtp`."""
        roots = "|".join(map(re.escape, (*self.decoders, *self.mtp)))
        match = re.fullmatch(rf"(?:{roots})\.[0-9]+\.(.+)", module)
        return match is not None and match[1] in self.linears

    def encodes(self, module: str, depth: int) -> bool:
        """Whether `--dense` may encode the module called `module`: one of `encoded` in one of `depth` decoder layers,
        or the head."""
        if module in HEADS:
            return True
        match = re.fullmatch(rf"(?:{'|'.join(map(re.escape, self.decoders))})\.([0-9]{{1,9}})\.(.+)", module)
        return match is not None and int(match[1]) < depth and match[2] in self.encoded

    def known_name(self, name: str) -> bool:
        """Whether the whole name matches one of the patterns of `known`."""
        return any(re.fullmatch(pattern, name) for pattern in self.known)


def depth_of(config: Config) -> int | None:
    """Decoder layers as the config states them, or None; `DataError` for what is no such number, or beyond reason."""
    return whole(config, "num_hidden_layers", 1, MAX_LAYERS)


def sparse_step_dense_layers(config: Config) -> frozenset[int]:
    """Dense layers of the Qwen families: `mlp_only_layers`, and those `decoder_sparse_step` skips."""
    step = whole(config, "decoder_sparse_step", 1) or 1
    dense = set(wholes(config, "mlp_only_layers"))
    return frozenset(n for n in range(depth_of(config) or 0) if n in dense or (n + 1) % step)


def first_k_dense_layers(config: Config) -> frozenset[int]:
    """Dense layers of DeepSeek's and GLM's models: the first `first_k_dense_replace`, and all but every
    `moe_layer_freq`-th of the others."""
    first, step = whole(config, "first_k_dense_replace") or 0, whole(config, "moe_layer_freq", 1) or 1
    return frozenset(n for n in range(depth_of(config) or 0) if n < first or n % step)


SHARED_EXPERT = r"mlp\.(gate\.weight|shared_expert\.(gate|up|down)_proj\.weight|shared_expert_gate\.weight)"
SHARED_EXPERTS = r"mlp\.shared_experts\.(gate|up|down)_proj\.weight"
BIASED_ROUTER = r"mlp\.gate\.(weight|e_score_correction_bias)"
EXTRA_LAYER = r"(embed_tokens|enorm|hnorm|eh_proj|shared_head\.(norm|head))\.weight"
LATENT_ATTENTION = (
    r"self_attn\.(q_proj|q_a_proj|q_a_layernorm|q_b_proj|kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj|o_proj)"
    r"\.(weight|bias)"
)
DENSE_MLP = r"mlp\.(gate|up|down)_proj\.weight"
ATTENTION = r"self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight|sinks)"
NORMS = r"(input|post_attention)_layernorm\.weight"
OUTER = (
    r"(model\.|model\.language_model\.|language_model\.model\.)?(embed_tokens|norm)\.weight",
    r"(language_model\.)?lm_head\.weight",
)


def in_layers(*tails: str) -> tuple[str, ...]:
    """Patterns of tensors that stand in every decoder layer, under any of `DECODERS`."""
    prefix = "(" + "|".join(re.escape(d) for d in DECODERS) + r")\.\d+\."
    return tuple(prefix + tail for tail in tails)
