"""Tiny checkpoints of every family, built and saved by transformers itself, and what it holds them to mean.

    built = build(MODELS["mixtral"], SIZES["wide"], root)      # a checkpoint directory at `root`
    built.matrices[("layers", 1)][2, "gate"]                   # uint16 [I, H]: the model's own BF16 weights

Every parameter is filled with random numbers, so that no two tensors are alike. torch and transformers are imported
when something is built.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("gate", "up", "down")
ITEM = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U32": 4, "I64": 8, "F64": 8, "I16": 2}
Raw = tuple[str, tuple[int, ...], bytes]
"""A stored tensor: safetensors type, shape, bytes."""


@dataclass(frozen=True)
class Size:
    """Hidden size, intermediate size of an expert, experts in a layer."""

    hidden: int
    intermediate: int
    experts: int = 3


SIZES = {"wide": Size(128, 192), "half": Size(128, 64), "square": Size(128, 128)}
"""Shapes that tell rows from columns; and two where they do not: 2I == H, and I == H (which 128 divides)."""


@dataclass(frozen=True)
class Model:
    """How transformers builds a family's model, and the names its experts must have in a container.

    `top` is what stands before `layers.N`; `dense_layers` are the layers without experts; `own_names` is false where
    transformers has no per-expert names, so that ours are used.
    """

    name: str
    config: str
    classes: tuple[str, ...]
    count_field: str = "num_experts"
    size_field: str = "moe_intermediate_size"
    extra: Mapping[str, Any] = field(default_factory=dict)
    top: str = "model"
    experts: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    own_names: bool = True
    dense_layers: tuple[int, ...] = ()
    vision: Mapping[str, Any] | None = None
    mtp: str | None = None
    """"extra layer" or "mtp": the form in which a multi-token-prediction block is added by hand."""

    def settings(self, size: Size) -> dict[str, Any]:
        """The arguments of the (text) config."""
        heads = {"hidden_size": size.hidden, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
        rest = {"num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 64, "num_experts_per_tok": 2}
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        own = {self.count_field: size.experts, self.size_field: size.intermediate}
        dense = {} if self.size_field == "intermediate_size" else {"intermediate_size": 80}
        return heads | rest | special | dense | own | dict(self.extra)

    def prefix(self, block: str, layer: int) -> str:
        """The full name of the experts module of a layer."""
        if block == "mtp":
            return f"mtp.layers.{layer}.{self.experts}" if self.mtp == "mtp" else f"model.layers.2.{self.experts}"
        return f"{self.top}.layers.{layer}.{self.experts}"


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GROUPS = {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = GROUPS | {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 0,
          "num_position_embeddings": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
MIXTRAL = {"count_field": "num_local_experts", "size_field": "intermediate_size", "parts": ("w1", "w3", "w2"),
           "experts": "block_sparse_moe.experts"}  # fmt: skip


def _models() -> dict[str, Model]:
    both = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
    found = [
        Model("qwen3_5_moe", "Qwen3_5MoeConfig", both, extra=LINEAR, top="model.language_model", vision=VISION,
              mtp="mtp"),
        Model("qwen3_5_moe_text", "Qwen3_5MoeTextConfig", ("Qwen3_5MoeForCausalLM",), extra=LINEAR),
        Model("qwen3_moe", "Qwen3MoeConfig", ("Qwen3MoeForCausalLM",), extra={"mlp_only_layers": [0]},
              dense_layers=(0,)),
        Model("qwen3_next", "Qwen3NextConfig", ("Qwen3NextForCausalLM",), extra=LINEAR, mtp="mtp"),
        Model("qwen2_moe", "Qwen2MoeConfig", ("Qwen2MoeForCausalLM",),
              extra={"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2}, dense_layers=(0,)),
        Model("olmoe", "OlmoeConfig", ("OlmoeForCausalLM",), size_field="intermediate_size"),
        Model("mixtral", "MixtralConfig", ("MixtralForCausalLM",), **MIXTRAL),
        Model("phimoe", "PhimoeConfig", ("PhimoeForCausalLM",), **MIXTRAL,
              extra={"attention_bias": True, "lm_head_bias": True}),
        Model("minimax_m2", "MiniMaxM2Config", ("MiniMaxM2ForCausalLM",), **MIXTRAL),
        Model("deepseek_v2", "DeepseekV2Config", ("DeepseekV2ForCausalLM",), count_field="n_routed_experts",
              extra=LATENT | {"q_lora_rank": None}, dense_layers=(0,)),
        Model("deepseek_v3", "DeepseekV3Config", ("DeepseekV3ForCausalLM",), count_field="n_routed_experts",
              extra=LATENT | {"num_nextn_predict_layers": 1}, dense_layers=(0,), mtp="extra layer"),
        Model("glm4_moe", "Glm4MoeConfig", ("Glm4MoeForCausalLM",), count_field="n_routed_experts", mtp="extra layer",
              extra=GROUPS | {"attention_bias": True, "use_qk_norm": True}, dense_layers=(0,)),
        Model("qwen3_vl_moe", "Qwen3VLMoeConfig", ("Qwen3VLMoeForConditionalGeneration",), own_names=False,
              top="model.language_model", vision=VISION | {"deepstack_visual_indexes": [0]}),
        Model("granitemoe", "GraniteMoeConfig", ("GraniteMoeForCausalLM",), count_field="num_local_experts",
              size_field="intermediate_size", experts="block_sparse_moe.experts", own_names=False),
        Model("gpt_oss", "GptOssConfig", ("GptOssForCausalLM",), count_field="num_local_experts",
              size_field="intermediate_size", own_names=False, extra={"max_position_embeddings": 131072}),
    ]  # fmt: skip
    return {m.name: m for m in found}


MODELS = _models()


def structure(model: Model) -> str:
    """What makes the tensors of a family unlike those of others: one path through the code for all families of one."""
    if model.name == "gpt_oss":
        return "fused, transposed, interleaved, with biases"
    if not model.own_names:
        return f"fused in {model.experts}"
    return f"per expert in {model.experts}" + (f", MTP as {model.mtp}" if model.mtp else "")


LONG = bool(os.environ.get("PAGESTONE_LONG"))
"""Whether this is the long run: every family, not one of each structure."""
STRUCTURES = {
    "per expert in mlp.experts": "qwen3_moe",
    "per expert in mlp.experts, MTP as mtp": "qwen3_5_moe",
    "per expert in mlp.experts, MTP as extra layer": "deepseek_v3",
    "per expert in block_sparse_moe.experts": "mixtral",
    "fused in mlp.experts": "qwen3_vl_moe",
    "fused in block_sparse_moe.experts": "granitemoe",
    "fused, transposed, interleaved, with biases": "gpt_oss",
}
"""The family that stands for each structure; among them are dense layers, shared experts, vision and router biases."""
FAMILIES = tuple(name for name in MODELS if LONG or name in STRUCTURES.values())
"""The families that this run tries on checkpoints of transformers."""


@dataclass(frozen=True)
class Built:
    """A checkpoint on disk. Matrices are uint16 bits of BF16 by (block, layer) and (expert, part), biases likewise."""

    model: Model
    size: Size
    root: Path
    matrices: dict[tuple[str, int], dict[tuple[int, str], np.ndarray]]
    biases: dict[tuple[str, int], dict[tuple[int, str], np.ndarray]]
    module: Any
    """The experts module of the last decoder layer, as transformers runs it."""


def build(model: Model, size: Size, root: Path) -> Built:
    """Build the model from its config, save it, add the multi-token-prediction block that transformers leaves out."""
    import torch
    import transformers

    text = model.settings(size)
    make = getattr(transformers, model.config)
    if model.vision is None:
        config = make(**text)
    else:
        config = make(text_config=text, vision_config=dict(model.vision) | {"out_hidden_size": size.hidden})
    module = getattr(transformers, model.classes[0])(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 16)
    for name, buffer in list(module.named_buffers()):
        if name.endswith("e_score_correction_bias"):  # published in F32, whatever the rest is
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.e_score_correction_bias = buffer.float() + 2**-20
    module.save_pretrained(root)
    experts = {
        int(name.split("layers.")[1].split(".")[0]): m
        for name, m in module.named_modules()
        if isinstance(getattr(m, "gate_up_proj", None), torch.nn.Parameter)
    }
    matrices, biases = {}, {}
    for layer, m in experts.items():
        matrices["layers", layer], biases["layers", layer] = _taken_apart(m)
    if model.mtp is not None:
        matrices["mtp", 0] = _add_mtp(model, root, max(experts))
        biases["mtp", 0] = {}
    return Built(model, size, root, matrices, biases, experts[max(experts)])


def bits(tensor: Any) -> np.ndarray:
    """uint16 bits of a BF16 tensor."""
    import torch

    found: np.ndarray = tensor.detach().contiguous().view(torch.uint16).numpy().copy()
    return found


def _taken_apart(module: Any) -> tuple[dict[tuple[int, str], np.ndarray], dict[tuple[int, str], np.ndarray]]:
    """The matrices [out, in] and biases [out] of an experts module, by what transformers' own flags say of it."""
    matrices, biases = {}, {}
    for expert in range(module.gate_up_proj.shape[0]):
        both, down = module.gate_up_proj[expert], module.down_proj[expert]
        if module.is_transposed:
            both, down = both.T, down.T
        gate, up = both.chunk(2) if module.is_concatenated else (both[0::2], both[1::2])
        matrices |= {(expert, p): bits(m) for p, m in zip(PARTS, (gate, up, down), strict=True)}
        if module.has_bias:
            both, down = module.gate_up_proj_bias[expert], module.down_proj_bias[expert]
            gate, up = both.chunk(2) if module.is_concatenated else (both[0::2], both[1::2])
            biases |= {(expert, p): bits(m) for p, m in zip(PARTS, (gate, up, down), strict=True)}
    return matrices, biases


def _add_mtp(model: Model, root: Path, like: int) -> dict[tuple[int, str], np.ndarray]:
    """Write an MTP block in a shard of its own: the tensors of a decoder layer with other contents, and its extras."""
    tensors = read_tensors(root)
    old = f"{model.top}.layers.{like}."
    new = "mtp.layers.0." if model.mtp == "mtp" else "model.layers.2."
    rng = np.random.default_rng(11)

    def random(dtype: str, shape: tuple[int, ...]) -> Raw:
        values = (rng.normal(size=shape) / 16).astype("<f4")
        return dtype, shape, values.tobytes() if dtype == "F32" else (values.view("<u4") >> 16).astype("<u2").tobytes()

    added = {new + n.removeprefix(old): random(t[0], t[1]) for n, t in tensors.items() if n.startswith(old)}
    hidden = tensors["lm_head.weight"][1][1]
    if model.mtp == "mtp":
        added |= {f"mtp.{n}.weight": random("BF16", (hidden,)) for n in
                  ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}  # fmt: skip
        added["mtp.fc.weight"] = random("BF16", (hidden, 2 * hidden))
    else:
        added |= {f"{new}{n}.weight": random("BF16", (hidden,)) for n in ("enorm", "hnorm", "shared_head.norm")}
        added[f"{new}eh_proj.weight"] = random("BF16", (hidden, 2 * hidden))
        added[f"{new}embed_tokens.weight"] = added[f"{new}shared_head.head.weight"] = random("BF16", (40, hidden))
    write_tensors(root / "model-mtp.safetensors", added)
    weight_map = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(added, "model-mtp.safetensors")
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    found = {}
    for name, (_, shape, data) in added.items():
        if ".mlp.experts." in name:
            expert, part = name.split(".mlp.experts.")[1].split(".")[:2]
            found[int(expert), part.removesuffix("_proj")] = np.frombuffer(data, "<u2").reshape(shape)
    return found


# -- safetensors, byte by byte ---------------------------------------------------------------------------------------


def read_table(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header without its metadata, and where the data begins."""
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        table = json.loads(handle.read(length))
    table.pop("__metadata__", None)
    return table, 8 + length


def read_tensors(root: Path, pattern: str = "*.safetensors") -> dict[str, Raw]:
    """Every tensor in the files of a directory that match."""
    found: dict[str, Raw] = {}
    for file in sorted(root.glob(pattern)):
        table, start = read_table(file)
        raw = file.read_bytes()
        for name, e in table.items():
            begin, end = e["data_offsets"]
            found[name] = e["dtype"], tuple(e["shape"]), raw[start + begin : start + end]
    return found


def write_tensors(path: Path, tensors: Mapping[str, Raw]) -> Path:
    """A safetensors file of these tensors, one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        begin, end = end, end + len(data)
        assert len(data) == math.prod(shape) * ITEM.get(dtype, 1), name
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
    return path


_BUILT: dict[tuple[str, str], Built] = {}


def built(model: str, size: str, factory: Any) -> Built:
    """The checkpoint of that name and size, made once a session below `factory`'s (`tmp_path_factory`) directory."""
    if (model, size) not in _BUILT:
        _BUILT[model, size] = build(MODELS[model], SIZES[size], factory.mktemp(f"{model}-{size}") / "source")
    return _BUILT[model, size]


def is_expert(name: str) -> bool:
    """Whether a source tensor belongs to routed experts, told without the code under test."""
    words = name.split(".")
    return "experts" in words or "input_linear" in words or "output_linear" in words
