"""A checkpoint of true size that takes no disk: a storage whose bytes are made when they are read.

    source = GeneratedCheckpoint(layers=40)                    # Qwen3.6-35B-A3B's names and shapes, 69 GB
    make_plan(Request(source, encodings.get("q4")))            # anything that takes a source takes it
    source.write(path)                                         # the same bytes as files, for what takes only those

Element i of a matrix is entry `draw i` of a table: the draws are the 16-bit parts of SplitMix64 at a counter, from a
place that is a digest of (seed, name of the matrix), the table holds the 65,536 quantiles of the matrix's distribution.
So any range of a file has the same bytes however it is cut, in any order, in any process. A fused tensor holds the
matrices of its experts: fused and per-expert forms have the same weights.

Matrices are normal with variance 1 / fan-in, norms, decays and time steps as a trained model's: hidden states, routing
and logits are those of a model that was never trained, but no degenerate ones.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kits import byte_pairs
from kits.files import FilesByName
from pagestone.formats.digests import digest
from pagestone.formats.dtypes import f32_to_bf16
from pagestone.formats.encodings.fp8 import to_e4m3
from pagestone.formats.safetensors_header import build_header
from pagestone.formats.storage import Stamp

RULES = 1
"""To be raised when other bytes come from the same parameters: stamps tell it."""
INDEX = "model.safetensors.index.json"
ROOT, EXPERTS = "model.language_model", "mlp.experts"
ITEM = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
SHARD = 2_700_000_000
"""Bytes of tensors in a shard, at most, where one tensor is not larger."""
Form = Literal["fused", "per-expert", "fp8"]

# -- values -----------------------------------------------------------------------------------------------------------

LEVELS = 1 << 16
WORDS = 1 << 14
"""Words of 64 bits that are made at a time: all they pass through stays in the core's own cache."""
STEP, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
CODE_DEVIATION = 100.0
"""Standard deviation of E4M3 codes: the largest quantile is 433."""
OUTLIERS, OUTLIER_SHIFT = 6, 5
"""Channels of a layer that are made larger where that is asked for, and by which power of two."""


@dataclass(frozen=True)
class Law:
    """A distribution by its quantiles: "normal" (mean, deviation), "uniform" or "log uniform" (from, to)."""

    kind: str
    one: float
    two: float

    def quantiles(self) -> NDArray[np.float64]:
        """`LEVELS` values, each as likely as the others."""
        if self.kind == "normal":
            return self.one + self.two * _normal()
        even = self.one + (self.two - self.one) * (np.arange(LEVELS) + 0.5) / LEVELS
        return np.log(even) if self.kind == "log uniform" else even


@functools.cache
def _normal() -> NDArray[np.float64]:
    upper = [NormalDist().inv_cdf((n + 0.5) / LEVELS) for n in range(LEVELS // 2, LEVELS)]
    return np.array([-value for value in reversed(upper)] + upper)


@functools.cache
def _table(law: Law, dtype: str) -> NDArray[Any]:
    """The quantiles as they are stored."""
    values = law.quantiles().astype(np.float32)
    if dtype == "BF16":
        return f32_to_bf16(values).astype("<u2")
    return to_e4m3(values) if dtype == "F8_E4M3" else values.astype({"F16": "<f2", "F32": "<f4"}[dtype])


class _Scratch(threading.local):
    """Room for `WORDS` words, for each thread."""

    def __init__(self) -> None:
        self.words, self.shifted = np.empty(WORDS, "<u8"), np.empty(WORDS, "<u8")
        self.room = np.empty(4 * WORDS * 4, np.uint8)


_scratch = _Scratch()
_steps = np.arange(WORDS, dtype=np.uint64) * STEP


def _draws(key: int, first: int, count: int) -> NDArray[np.uint16]:
    """The draws of `count` words from the word `first`: four of 16 bits each. Valid until the thread's next call."""
    z, t = _scratch.words[:count], _scratch.shifted[:count]
    np.add(_steps[:count], np.uint64((key + (first + 1) * int(STEP)) % 2**64), out=z)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        np.right_shift(z, np.uint64(shift), out=t)
        np.bitwise_xor(z, t, out=z)
        if factor is not None:
            np.multiply(z, factor, out=z)
    return z.view("<u2")


@dataclass(frozen=True)
class Matrix:
    """Elements drawn for one name: `law` as `dtype`, in rows of `columns`; `larger` are channels to be made larger."""

    law: Law
    dtype: str
    columns: int
    larger: tuple[int, ...] = ()

    def fill(self, key: int, offset: int, buffer: memoryview) -> None:
        """The bytes from `offset`."""
        item = ITEM[self.dtype]
        table, target = _table(self.law, self.dtype), np.frombuffer(buffer, np.uint8)
        word, skipped = divmod(offset, 4 * item)
        done = 0
        while done < len(target):
            count = min(WORDS, -(-(skipped + len(target) - done) // (4 * item)))
            values = _scratch.room[: 4 * count * item].view(table.dtype)
            # every draw is within the table: "clip" only saves the check
            np.take(table, _draws(key, word, count), out=values, mode="clip")
            for channel in self.larger:
                values[(channel - 4 * word) % self.columns :: self.columns] += np.uint16(OUTLIER_SHIFT << 7)
            made = values.view(np.uint8)[skipped : skipped + len(target) - done]
            target[done : done + len(made)] = made
            done, word, skipped = done + len(made), word + count, 0


# -- files ------------------------------------------------------------------------------------------------------------


class Part(Protocol):
    """Consecutive bytes of a file."""

    @property
    def nbytes(self) -> int: ...
    @property
    def identity(self) -> bytes:
        """What differs when the bytes do."""

    def fill(self, offset: int, buffer: memoryview) -> None:
        """The bytes from `offset`; the buffer ends where the part does, or before."""


@dataclass(frozen=True)
class Given:
    """Bytes as they are, made when they are first asked for."""

    make: Callable[[], bytes]

    @functools.cached_property
    def data(self) -> bytes:
        return self.make()

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def identity(self) -> bytes:
        return self.data

    def fill(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: matrices of one kind, one after the other, each drawn for a name of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    matrix: Matrix
    seed: int
    drawn_for: tuple[str, ...] = ()
    """The names of its matrices, in order; empty: it is one, of its own name."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM[self.dtype]

    @property
    def identity(self) -> bytes:
        return f"{RULES} {self}".encode()

    def fill(self, offset: int, buffer: memoryview) -> None:
        names = self.drawn_for or (self.name,)
        each, done = self.nbytes // len(names), 0
        while done < len(buffer):
            at, inside = divmod(offset + done, each)
            piece = buffer[done : done + each - inside]
            self.matrix.fill(_key(self.seed, names[at]), inside, piece)
            done += len(piece)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(digest(f"{seed} {name}".encode())[:8], "big")


@dataclass(frozen=True)
class File:
    """A file as its parts, in order."""

    parts: tuple[Part, ...]

    @functools.cached_property
    def ends(self) -> list[int]:
        """Where each part ends."""
        found, end = [], 0
        for part in self.parts:
            end += part.nbytes
            found.append(end)
        return found

    @functools.cached_property
    def version(self) -> int:
        return int.from_bytes(digest(b"\n".join(digest(part.identity) for part in self.parts))[:7], "big")

    @property
    def nbytes(self) -> int:
        return self.ends[-1] if self.parts else 0

    def fill(self, offset: int, buffer: memoryview) -> int:
        """As `Storage.read_into`."""
        wanted = max(0, min(len(buffer), self.nbytes - offset))
        done, at = 0, bisect_right(self.ends, offset)
        while done < wanted:
            inside = offset + done - (self.ends[at] - self.parts[at].nbytes)
            piece = buffer[done : min(wanted, done + self.ends[at] - offset - done)]
            if len(piece):
                self.parts[at].fill(inside, piece)
            done, at = done + len(piece), at + 1
        return done


class GeneratedStorage(FilesByName):
    """Files made of parts."""

    files: dict[str, File]

    def __init__(self, files: Mapping[str, File], name: str = "generated") -> None:
        super().__init__(files, name)

    def size(self, name: str) -> int:
        return int(self.file(name).nbytes)

    def stamp(self, name: str) -> Stamp:
        version = -1 - self.file(name).version
        return self.size(name), version, version

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        return int(self.file(name).fill(offset, buffer))

    def write(self, root: Path, wanted: Callable[[Part], bool] = lambda part: True) -> int:
        """Write all files into a new directory; the bytes written. What is not `wanted` becomes a hole."""
        root.mkdir(parents=True)
        room = memoryview(bytearray(1 << 24))
        total = 0
        for name, file in self.files.items():
            with (root / name).open("wb") as handle:
                for part in file.parts:
                    if not wanted(part):
                        handle.truncate(handle.seek(part.nbytes, os.SEEK_CUR))
                        continue
                    for offset in range(0, part.nbytes, len(room)):
                        piece = room[: part.nbytes - offset]
                        part.fill(offset, piece)
                        total += handle.write(piece)
        return total


def given(make: Callable[[], bytes]) -> File:
    """A file of bytes, made when they are first asked for."""
    return File((Given(make),))


def json_file(value: Any) -> File:
    """A file of JSON."""
    return given(lambda: f"{json.dumps(value, indent=2)}\n".encode())


def shard(tensors: Sequence[Tensor]) -> File:
    """A safetensors file of these tensors, in this order."""

    def head() -> bytes:
        entries, end = [], 0
        for tensor in tensors:
            begin, end = end, end + tensor.nbytes
            entries.append((tensor.name, tensor.dtype, tensor.shape, begin, end))
        return build_header(entries, {"format": "pt"}, 8)

    return File((Given(head), *tensors))


def sharded(tensors: Iterable[Tensor], limit: int = SHARD) -> dict[str, File]:
    """Shards of at most `limit` bytes of tensors, in their order, and the index."""
    groups: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(tensor)
        room -= tensor.nbytes
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    places = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
    total = sum(t.nbytes for group in groups for t in group)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return {name: shard(group) for name, group in zip(names, groups, strict=True)} | {INDEX: json_file(index)}


# -- the architecture -------------------------------------------------------------------------------------------------

TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": 248044,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip
VISION_CONFIG: dict[str, Any] = {
    "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02,
    "intermediate_size": 4304, "model_type": "qwen3_5_moe_vision", "num_heads": 16, "num_position_embeddings": 2304,
    "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
VISION, MTP = "model.visual", "mtp.layers.0"
BLOCK = 128
"""Rows and columns that a scale of the FP8 form covers."""
FP8_MODULES = re.compile(
    r"(linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|self_attn\.[qkvo]_proj|shared_expert\.\w+_proj|experts\.\d+\.\w+_proj)\.weight$"
)


def tensor_shape(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a tensor of the Qwen3.5 MoE architecture by its name; `config` is the language model's part."""
    hidden, inner, shared = (
        config[k] for k in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    )
    experts, head, vocab = config["num_experts"], config["head_dim"], config["vocab_size"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    rules: tuple[tuple[str, tuple[int, ...]], ...] = (
        (r"(embed_tokens|lm_head)\.weight", (vocab, hidden)),
        (r"mlp\.experts\.gate_up_proj", (experts, 2 * inner, hidden)),
        (r"mlp\.experts\.down_proj", (experts, hidden, inner)),
        (r"experts\.\d+\.(gate|up)_proj\.weight", (inner, hidden)),
        (r"experts\.\d+\.down_proj\.weight", (hidden, inner)),
        (r"mlp\.gate\.weight", (experts, hidden)),
        (r"shared_expert\.(gate|up)_proj\.weight", (shared, hidden)),
        (r"shared_expert\.down_proj\.weight", (hidden, shared)),
        (r"shared_expert_gate\.weight", (1, hidden)),
        (r"in_proj_qkv\.weight", (2 * key + value, hidden)),
        (r"in_proj_z\.weight", (value, hidden)),
        (r"in_proj_[ab]\.weight", (config["linear_num_value_heads"], hidden)),
        (r"conv1d\.weight", (2 * key + value, 1, config["linear_conv_kernel_dim"])),
        (r"(A_log|dt_bias)", (config["linear_num_value_heads"],)),
        (r"linear_attn\.norm\.weight", (config["linear_value_head_dim"],)),
        (r"out_proj\.weight", (hidden, value)),
        (r"q_proj\.weight", (2 * query, hidden)),
        (r"[kv]_proj\.weight", (kv, hidden)),
        (r"o_proj\.weight", (hidden, query)),
        (r"[qk]_norm\.weight", (head,)),
        (r"mtp\.fc\.weight", (hidden, 2 * hidden)),
        (r"mtp\.pre_fc_norm_\w+\.weight", (hidden,)),
        (r"(norm|layernorm)\.weight", (hidden,)),
    )
    for pattern, shape in rules:
        if re.search(rf"(^|\.|_){pattern}$", name):
            return shape
    raise KeyError(name)


def vision_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the vision tower, which no container's experts or language model need."""
    config = VISION_CONFIG | {"out_hidden_size": hidden}
    size, inner, channels = config["hidden_size"], config["intermediate_size"], config["in_channels"]
    merged = size * config["spatial_merge_size"] ** 2
    patch = (channels, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    weights: dict[str, tuple[int, ...]] = {"patch_embed.proj": (size, *patch), "merger.norm": (size,)}
    weights |= {"merger.linear_fc1": (merged, merged), "merger.linear_fc2": (config["out_hidden_size"], merged)}
    block = {
        "norm1": (size,), "norm2": (size,), "attn.qkv": (3 * size, size), "attn.proj": (size, size),
        "mlp.linear_fc1": (inner, size), "mlp.linear_fc2": (size, inner),
    }  # fmt: skip
    weights |= {f"blocks.{n}.{name}": shape for n in range(config["depth"]) for name, shape in block.items()}
    found = {f"{VISION}.pos_embed.weight": (config["num_position_embeddings"], size)}
    for name, shape in weights.items():
        found |= {f"{VISION}.{name}.weight": shape, f"{VISION}.{name}.bias": shape[:1]}
    return found


def tensor_law(name: str, shape: Sequence[int]) -> Law:
    """How a tensor's values are distributed."""
    if name.startswith(VISION):  # its norms multiply by what is stored; small where it is no weight of a product
        plain = re.search(r"norm\d?\.weight$", name) is not None
        small = plain or name.endswith("bias") or "pos_embed" in name
        return Law("normal", float(plain), 0.02 if small else math.prod(shape[1:]) ** -0.5)
    if name.endswith("A_log"):
        return Law("log uniform", 0.0, 16.0)
    if name.endswith("dt_bias"):  # softplus of it is a time step of 0.001 to 0.1
        return Law("uniform", -6.9, -2.25)
    if "norm" in name:  # this family adds one to what is stored, but for the norm of linear attention
        return Law("normal", 1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.1)
    return Law("normal", 0.0, 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5)


def make_config(layers: int, experts: int, vocabulary: int) -> dict[str, Any]:
    """config.json as it is published: the language model nested."""
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)]
    if 1 < layers < 4:
        kinds[-1] = "full_attention"  # transformers runs no model without one
    text = TEXT_CONFIG | {
        "num_hidden_layers": layers, "num_experts": experts, "vocab_size": vocabulary, "layer_types": kinds,
        "num_experts_per_tok": min(8, experts), "eos_token_id": byte_pairs.special(vocabulary, "<|endoftext|>"),
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "dtype": "bfloat16", "model_type": "qwen3_5_moe",
        "text_config": text, "tie_word_embeddings": False,
    }  # fmt: skip


def fp8_config(plain: Iterable[str]) -> dict[str, Any]:
    """What a release in FP8 says of itself; `plain` are the names of its other tensors."""
    kept = re.compile(r"(.*(_proj_a|_proj_b|conv1d|gate|lm_head|embed_tokens|mtp\.fc)|model\.visual\..*)\.weight")
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(n.removesuffix(".weight") for n in plain if kept.fullmatch(n)),
    }  # fmt: skip


def layer_names(layer: int, kind: str, experts: int, per_expert: bool) -> list[str]:
    """Every tensor of a decoder layer, in order of names."""
    if kind == "full_attention":
        mixer = [f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    else:
        inner = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "norm", "out_proj")
        mixer = ["linear_attn.A_log", "linear_attn.dt_bias", *(f"linear_attn.{p}.weight" for p in inner)]
    if per_expert:
        routed = [f"{EXPERTS}.{e}.{p}_proj.weight" for e in range(experts) for p in ("gate", "up", "down")]
    else:
        routed = [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    shared = [f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")]
    rest = ["mlp.gate.weight", "mlp.shared_expert_gate.weight", "input_layernorm.weight"]
    tails = [*mixer, *routed, *shared, *rest, "post_attention_layernorm.weight"]
    return sorted(f"{ROOT}.layers.{layer}.{tail}" for tail in tails)


def _names(text: Mapping[str, Any], per_expert: bool, whole: bool) -> Iterator[str]:
    """Every tensor but scales, as the layers follow each other; `whole` with the vision tower and the MTP block."""
    yield f"{ROOT}.embed_tokens.weight"
    for layer, kind in enumerate(text["layer_types"]):
        yield from layer_names(layer, kind, text["num_experts"], per_expert)
    yield from (f"{ROOT}.norm.weight", "lm_head.weight")
    if whole:
        yield from vision_shapes(text["hidden_size"])
        yield from (f"mtp.{n}.weight" for n in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))
        block = layer_names(0, "full_attention", text["num_experts"], per_expert)
        yield from (name.replace(f"{ROOT}.layers.0", MTP) for name in block)


@dataclass(frozen=True)
class _Maker:
    """Makes tensors by their names."""

    text: Mapping[str, Any]
    seed: int
    dtype: str = "BF16"
    outliers: bool = False

    def plain(self, name: str) -> Tensor:
        """A tensor that is no codes; fused experts are drawn as the matrices they consist of."""
        vision = vision_shapes(self.text["hidden_size"]) if name.startswith(VISION) else {}
        shape, parts = vision.get(name) or tensor_shape(name, self.text), tuple[str, ...]()
        if (match := re.search(rf"(.*\.{EXPERTS})\.(gate_up|down)_proj$", name)) is not None:
            each = match[2].split("_")
            parts = tuple(f"{match[1]}.{e}.{part}_proj.weight" for e in range(shape[0]) for part in each)
        matrix = Matrix(tensor_law(name, shape), self.dtype, shape[-1], self._larger(name, shape[-1]))
        return Tensor(name, self.dtype, shape, matrix, self.seed, parts)

    def coded(self, name: str) -> Iterator[Tensor]:
        """FP8 codes with their scales: together about as large as the plain weights."""
        shape = tensor_shape(name, self.text)
        codes = Matrix(Law("normal", 0.0, CODE_DEVIATION), "F8_E4M3", shape[-1])
        yield Tensor(name, "F8_E4M3", shape, codes, self.seed)
        grid = tuple(-(-n // BLOCK) for n in shape)
        scale = tensor_law(name, shape).two / CODE_DEVIATION
        scales = Matrix(Law("uniform", 0.9 * scale, 1.1 * scale), "BF16", grid[-1])
        yield Tensor(f"{name}_scale_inv", "BF16", grid, scales, self.seed)

    def _larger(self, name: str, columns: int) -> tuple[int, ...]:
        if not self.outliers or EXPERTS not in name:
            return ()
        # gate and up read the same channels: the residual stream's; down has its own
        key = _key(self.seed, name.split(f".{EXPERTS}")[0] + (".down" if "down" in name else ".in"))
        return tuple(sorted(map(int, np.random.default_rng(key).choice(columns, OUTLIERS, False))))


@dataclass(frozen=True)
class Asked:
    """What a `GeneratedCheckpoint` was asked for."""

    layers: int = 40
    experts: int = 256
    vocabulary: int = 248320
    form: Form = "fused"
    seed: int = 0
    outliers: bool = False
    shard_bytes: int = SHARD
    whole: bool = False
    changed: Mapping[str, Any] = field(default_factory=dict)


class GeneratedCheckpoint(GeneratedStorage):
    """Qwen3.6-35B-A3B's language model in names and shapes, any number of layers, experts and tokens.

    `form` is "fused" (BF16 as published), "per-expert" (BF16 as transformers saves it) or "fp8" (as published; per
    expert). `outliers` makes a few input channels of every BF16 expert matrix 32 times larger, as trained models have
    them. `whole` adds the vision tower and the block for multi-token prediction, which nothing here runs: then it is
    all that is published. `changed` are other sizes for the config's language part, for small models. A tokenizer comes
    with a vocabulary of 320 or more.
    """

    def __init__(self, **asked: Any) -> None:
        self.asked = want = Asked(**asked)
        fp8 = want.form == "fp8"
        config = make_config(want.layers, want.experts, want.vocabulary)
        text = config["text_config"] | dict(want.changed)
        names = list(_names(text, want.form != "fused", want.whole))
        coded = {name for name in names if fp8 and FP8_MODULES.search(name)}
        self.config = config | {"text_config": text}
        if want.whole:
            text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
            self.config |= {"vision_config": VISION_CONFIG | {"out_hidden_size": text["hidden_size"]}}
        if fp8:
            self.config["quantization_config"] = fp8_config(name for name in names if name not in coded)
        maker = _Maker(text, want.seed, outliers=want.outliers and not fp8)
        tensors = (t for n in names for t in (maker.coded(n) if n in coded else (maker.plain(n),)))
        files = {"config.json": json_file(self.config)} | sharded(tensors, want.shard_bytes)
        ends = [byte_pairs.special(want.vocabulary, name) for name in ("<|im_end|>", "<|endoftext|>")]
        files["generation_config.json"] = json_file({"eos_token_id": ends})
        if want.vocabulary >= byte_pairs.SMALLEST:
            files |= {name: given(make) for name, make in byte_pairs.files(want.vocabulary).items()}
        super().__init__(files)


def published(
    root: Path, *, layers: int | None = None, vocabulary: int | None = None, seed: int = 0
) -> GeneratedStorage:
    """A published checkpoint of this architecture by its config.json and index: its names, types and shards.

    `layers` keeps the first so many, `vocabulary` cuts the tables.
    """
    config, index = json.loads((root / "config.json").read_bytes()), read_index(root)
    text, kept = config.get("text_config", config), dict(index["weight_map"])
    if layers is not None:
        text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
        outside = re.compile(r"\.layers\.(\d+)\.")
        kept = {n: f for n, f in kept.items() if (m := outside.search(n)) is None or int(m[1]) < layers}
    text["vocab_size"] = text["vocab_size"] if vocabulary is None else vocabulary
    maker = _Maker(text, seed, {"float16": "F16", "bfloat16": "BF16"}[text.get("dtype") or text["torch_dtype"]])
    held: dict[str, list[Tensor]] = {}
    for name in sorted(kept):
        held.setdefault(kept[name], []).append(maker.plain(name))
    files = {name: shard(tensors) for name, tensors in sorted(held.items())}
    files |= {"config.json": json_file(config), INDEX: json_file({"metadata": index["metadata"], "weight_map": kept})}
    for side in ("generation_config.json",):
        if (root / side).exists():
            files[side] = given((root / side).read_bytes)
    return GeneratedStorage(files)


def read_index(root: Path) -> dict[str, Any]:
    """A published index, compressed or not."""
    packed = root / f"{INDEX}.zst"
    if not packed.exists():
        return dict(json.loads((root / INDEX).read_bytes()))
    import zstandard

    return dict(json.loads(zstandard.ZstdDecompressor().decompress(packed.read_bytes(), max_output_size=1 << 28)))
