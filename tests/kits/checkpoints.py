"""Small checkpoints, and damaged ones, made byte by byte.

    spec = T_ORDER.having(dtype="F16", fused=False)
    source = spec.write(tmp_path / "source", shards=3)          # config, index, shards, side files
    tensors = spec.tensors()                                     # name -> Tensor, to alter before `write_checkpoint`

Column 0 of every expert matrix holds `tag(...)`, a number that tells layer, part, expert and row (`origin` reads it
back); the other columns hold it with other signs and halved some times. `T_ORDER` has twelve experts, so that "10"
sorts before "2"; in `T_BLOCK` no dimension is a multiple of 128, and gate and up meet inside a block of 128 rows;
`T_VARIED` has layers of unequal shape.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("gate", "up", "down")
ITEM = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "U8": 1, "I8": 1, "F64": 8, "BOOL": 1, "I32": 4}
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SIDE_FILES = {
    "generation_config.json": b'{"eos_token_id": [1, 2]}\n',
    "tokenizer.json": b'{"version": "1.0", "text": "\xc3\xa9\xe4\xb8\xad"}\n',
    "empty.txt": b"",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor: its safetensors type, shape and bytes (little-endian)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: Any, dtype: str = "BF16") -> Tensor:
        """A tensor of these float values; BF16 by truncation."""
        values = np.ascontiguousarray(values, "<f4")
        if dtype == "BF16":
            bits = (values.view("<u4") >> 16).astype("<u2")
        else:
            bits = values.astype({"F16": "<f2", "F32": "<f4"}[dtype])
        return cls(dtype, values.shape, bits.tobytes())

    def bits(self) -> np.ndarray:
        """The tensor as its reader sees it: float16, float32, or uint16 for BF16."""
        return np.frombuffer(self.data, {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[self.dtype]).reshape(self.shape)

    def with_value(self, value: float, *at: int) -> Tensor:
        """The same tensor with one element replaced."""
        array = self.bits().copy()
        array[at] = Tensor.of([value], self.dtype).bits()[0]
        return replace(self, data=array.tobytes())


Tensors = dict[str, Tensor]


# -- files -----------------------------------------------------------------------------------------------------------


def header_json(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The JSON of a header whose tensors lie one after the other in this order, unpadded."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return json.dumps(table, ensure_ascii=False).encode()


def raw_file(path: Path, header: bytes | dict[str, Any], data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with exactly this header, however wrong; `length` is what it claims to be long, if not the truth."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], *, pad_to: int = 8, shift: int = 0) -> Path:
    """A correct file whose data begins `shift` bytes after a multiple of `pad_to`: 1 puts tensors at odd places."""
    text = header_json(tensors)
    text += b" " * ((shift - 8 - len(text)) % pad_to)
    return raw_file(path, text, b"".join(t.data for t in tensors.values()))


def write_checkpoint(
    root: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    shards: int = 1,
    alphabetical: bool = False,
    shift: int = 0,
    links: bool = False,
    side_files: Mapping[str, bytes] = SIDE_FILES,
) -> Path:
    """A checkpoint directory: one `model.safetensors`, or `shards` files of about as many tensors each and an index.

    `alphabetical` sorts tensors by name as strings first; `links` makes it a snapshot of a Hugging Face cache: what is
    returned is `snapshots/NAME` beside `root`, and every file there is a relative link into `blobs` beside `snapshots`.
    """
    root = root.parent / "snapshots" / root.name if links else root
    root.mkdir(parents=True)
    names = sorted(tensors) if alphabetical else list(tensors)
    if shards == 1:
        write_safetensors(root / SINGLE, {n: tensors[n] for n in names}, shift=shift)
    else:
        weight_map: dict[str, str] = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            members = names[number * len(names) // shards : (number + 1) * len(names) // shards]
            write_safetensors(root / file, {n: tensors[n] for n in members}, shift=shift)
            weight_map |= dict.fromkeys(members, file)
        total = sum(len(t.data) for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (root / INDEX).write_text(json.dumps(index))
    (root / CONFIG).write_text(json.dumps(config))
    for name, data in side_files.items():
        (root / name).write_bytes(data)
    if links:
        blobs = root.parent.parent / "blobs"
        blobs.mkdir()
        for number, file in enumerate(sorted(root.iterdir())):
            blob = blobs / f"{number:040x}"
            file.rename(blob)
            file.symlink_to(Path("..") / ".." / "blobs" / blob.name)
    return root


# -- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A small MoE model. `fused` and `mtp_fused` choose the layout of the main layers and of the MTP block.

    `family` is a model type: `qwen3_5_moe` (nested config, `model.language_model.` names, a vision tensor, MTP),
    `qwen3_5_moe_text` (flat config, `model.` names) or `qwen3_moe` (the same, neither shared expert nor MTP).
    """

    hidden: int
    intermediate: int
    experts: int
    layers: int = 2
    family: str = "qwen3_5_moe"
    fused: bool = True
    mtp: bool = True
    mtp_fused: bool = True
    dtype: str = "BF16"
    config_extra: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    """Intermediate sizes of the MoE layers one by one, where they are not all `intermediate`."""

    def having(self, **changes: Any) -> Spec:
        """The same model but for these fields; `fused` alone changes the MTP block's layout too."""
        if "fused" in changes:
            changes.setdefault("mtp_fused", changes["fused"])
        if changes.get("family") == "qwen3_moe":
            changes.setdefault("mtp", False)
        return replace(self, **changes)

    @property
    def root(self) -> str:
        """What stands before `layers.N` in names."""
        return "model.language_model" if self.family == "qwen3_5_moe" else "model"

    def blocks(self) -> list[tuple[str, int, str]]:
        """(block, number, full name of the layer) of every MoE layer."""
        found = [("layers", n, f"{self.root}.layers.{n}") for n in range(self.layers)]
        return found + ([("mtp", 0, "mtp.layers.0")] if self.mtp else [])

    def shape(self, part: str, position: int = 0) -> tuple[int, int]:
        """(rows, columns) of one part of one expert of the layer at a place in `blocks()`."""
        size = self.sizes[position] if self.sizes else self.intermediate
        return (self.hidden, size) if part == "down" else (size, self.hidden)

    @property
    def tall(self) -> int:
        """The most rows a matrix has."""
        return max(self.hidden, self.intermediate, *self.sizes)

    def tag(self, position: int, part: str, expert: int, row: int) -> float:
        """The value in column 0 of a row; `position` is the layer's place in `blocks()`."""
        rows = self.tall
        number = ((position * 3 + PARTS.index(part)) * self.experts + expert) * rows + row
        return float(_tag_values(np.array([number]), self.dtype)[0])

    def origin(self, value: float) -> tuple[int, str, int, int]:
        """(position, part, expert, row) of a value found in column 0."""
        rows, count = self.tall, 3 * len(self.blocks()) * self.experts
        every = _tag_values(np.arange(count * rows), self.dtype)
        rest, row = divmod(int(np.argmin(np.abs(every - value))), rows)
        rest, expert = divmod(rest, self.experts)
        position, part = divmod(rest, 3)
        return position, PARTS[part], expert, row

    def matrix(self, position: int, part: str, expert: int) -> np.ndarray:
        """float32 [rows, columns] of one expert; the source holds it exactly."""
        rows, columns = self.shape(part, position)
        first = ((position * 3 + PARTS.index(part)) * self.experts + expert) * self.tall
        tags = _tag_values(first + np.arange(rows), self.dtype)
        column, row = np.arange(columns), np.arange(rows)[:, None]
        halvings = (column * 5 + row * 3) % 7 % 4
        sign = np.where((column * 11 + row * 7 + expert) % 5 < 2, -1.0, 1.0)
        pattern = np.where(column == 0, 1.0, sign * 0.5**halvings)
        return (tags[:, None] * pattern).astype(np.float32)

    def expert_tensors(self, position: int, prefix: str, fused: bool) -> Tensors:
        """The routed experts of one layer; `prefix` is the name of its experts module."""
        if fused:
            both = [np.concatenate([self.matrix(position, p, e) for p in ("gate", "up")]) for e in range(self.experts)]
            down = [self.matrix(position, "down", e) for e in range(self.experts)]
            return {
                f"{prefix}.gate_up_proj": Tensor.of(np.stack(both), self.dtype),
                f"{prefix}.down_proj": Tensor.of(np.stack(down), self.dtype),
            }
        return {
            f"{prefix}.{e}.{p}_proj.weight": Tensor.of(self.matrix(position, p, e), self.dtype)
            for e in range(self.experts)
            for p in PARTS
        }

    def tensors(self) -> Tensors:
        """Every tensor of the model, in the order of its modules."""
        made: Tensors = {}

        def dense(name: str, *shape: int, dtype: str | None = None) -> None:
            values = 0.01 * (1 + np.arange(math.prod(shape)) % 97) + zlib.crc32(name.encode()) % 13
            made[name] = Tensor.of(values.reshape(shape), dtype or self.dtype)

        hidden = self.hidden
        dense(f"{self.root}.embed_tokens.weight", 40, hidden)
        for position, (block, _, layer) in enumerate(self.blocks()):
            dense(f"{layer}.input_layernorm.weight", hidden)
            dense(f"{layer}.self_attn.q_proj.weight", 2 * hidden, hidden)
            dense(f"{layer}.mlp.gate.weight", self.experts, hidden)
            made |= self.expert_tensors(
                position, f"{layer}.mlp.experts", self.mtp_fused if block == "mtp" else self.fused
            )
            if self.family != "qwen3_moe":
                dense(f"{layer}.mlp.shared_expert.gate_proj.weight", 16, hidden)
                dense(f"{layer}.mlp.shared_expert.up_proj.weight", 16, hidden)
                dense(f"{layer}.mlp.shared_expert.down_proj.weight", hidden, 16)
                dense(f"{layer}.mlp.shared_expert_gate.weight", 1, hidden)
        if self.mtp:
            dense("mtp.fc.weight", hidden, 2 * hidden)
        if self.family == "qwen3_5_moe":
            dense("model.visual.blocks.0.mlp.linear_fc1.weight", 24, 16, dtype="F32")
            dense("model.visual.blocks.0.mlp.linear_fc1.bias", 24, dtype="F32")
        dense(f"{self.root}.norm.weight", hidden)
        dense("lm_head.weight", 40, hidden)
        return made

    def config(self) -> dict[str, Any]:
        """config.json, nested or flat as the family has it."""
        text: dict[str, Any] = {
            "model_type": "qwen3_moe" if self.family == "qwen3_moe" else "qwen3_5_moe_text",
            "hidden_size": self.hidden, "moe_intermediate_size": list(self.sizes) or self.intermediate,
            "num_experts": self.experts,
            "num_hidden_layers": self.layers, "num_experts_per_tok": 2, "rms_norm_eps": 1e-06,
        } | ({"mtp_num_hidden_layers": 1} if self.mtp else {}) | dict(self.config_extra)  # fmt: skip
        if self.family != "qwen3_5_moe":
            return text
        return {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 1}}

    def write(self, root: Path, **how: Any) -> Path:
        """The whole checkpoint at `root`; `how` goes to `write_checkpoint`."""
        return write_checkpoint(root, self.tensors(), self.config(), **how)


def _tag_values(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Different positive values, one for every number below 16384, exact in `dtype` even when halved three times."""
    numbers = numbers % 0x4000
    if dtype == "F16":
        return (0x1400 + numbers).astype("<u2").view("<f2").astype(np.float64)
    return ((0x3000 + numbers).astype("<u4") << 16).astype("<u4").view("<f4").astype(np.float64)


T_ORDER = Spec(hidden=32, intermediate=48, experts=12)
T_LAYERS = T_ORDER.having(layers=2, mtp=False)
T_BLOCK = Spec(hidden=192, intermediate=160, experts=2)
T_VARIED = Spec(hidden=33, intermediate=48, experts=3, layers=3, sizes=(48, 25, 31), family="qwen3_moe", mtp=False)
"""Layers whose experts differ in shape, no dimension a multiple of anything: pads lie where others have codes."""
LAYOUTS = {
    "fused": {"fused": True, "mtp_fused": True},
    "per-expert": {"fused": False, "mtp_fused": False},
    "main fused": {"fused": True, "mtp_fused": False},
    "mtp fused": {"fused": False, "mtp_fused": True},
}
"""The four ways in which the same weights may be laid out."""


def sparse_model(root: Path, *, layers: int, hidden: int = 1024, intermediate: int = 512, experts: int = 20,
                 more: Mapping[str, tuple[int, ...]] | None = None) -> Path:  # fmt: skip
    """A per-expert BF16 checkpoint of real size whose weights are a hole: zeros that cost neither disk nor time.

    `more` are shapes of further tensors.
    """
    spec = Spec(hidden, intermediate, experts, layers=layers, family="qwen3_moe", fused=False, mtp=False)
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,), **(more or {})}
    for _, _, layer in spec.blocks():
        shapes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for part in PARTS:
                shapes[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"] = spec.shape(part)
    sparse_file_at = root / SINGLE
    root.mkdir(parents=True)
    sparse_file(sparse_file_at, [(name, "BF16", shape) for name, shape in shapes.items()])
    (root / CONFIG).write_text(json.dumps(spec.config()))
    return root


def sparse_file(path: Path, entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> Path:
    """A correct safetensors file of any size whose data is a hole."""
    table: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + math.prod(shape) * ITEM[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + end)
    return path
