"""Makes tests/vectors: containers every reader must accept, and changes to them every reader must refuse.

    python scripts/make_vectors.py              write what is missing; refuse to change what is there
    python scripts/make_vectors.py --overwrite  change it, on purpose: a change of vectors is a change of the format
    python scripts/make_vectors.py --check      write nothing; exit 1 if what is there is not what this script makes

Nothing here is random. experts.parquet follows the version of pyarrow: committed bytes that hold the same table stay.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.convert.plan import Request, make_plan
from pagestone.convert.prepare import prepare
from pagestone.formats import encodings
from pagestone.formats.dense_matrices import KEEP, DenseEncoding, read_matrices
from pagestone.formats.digests import canonical_json, container_id, digest, layer_digest
from pagestone.formats.dtypes import VIEWS, f32_to_bf16, to_f32
from pagestone.formats.layout import PARTS, record_layout
from pagestone.formats.manifest import (
    EXPERTS_TABLE,
    MANIFEST,
    NOT_IN_ID,
    RECORDS,
    read_experts,
    read_manifest,
    write_experts,
)
from pagestone.formats.safetensors_header import build_header
from pagestone.reader.container import Container, Layer, open_container

VECTORS = Path(__file__).resolve().parent.parent / "tests" / "vectors"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
Files = dict[str, bytes]

# -- sources -----------------------------------------------------------------------------------------------------------


def numbers(seed: int, *shape: int) -> Any:
    """float32 in (-1, 1) with an uneven spread, from integer arithmetic only."""
    step = np.uint64(6364136223846793005)
    with np.errstate(over="ignore"):
        state = (np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint64) * step + np.uint64(seed)) * step
    unit = ((state >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32) / np.float32(1 << 23)
    return (unit * unit * unit).reshape(shape)


def write_source(root: Path, config: dict[str, Any], tensors: Mapping[str, Any], dtype: str) -> None:
    """A checkpoint of one shard; `tensors` are float32, stored as `dtype` (BF16, F16 or F32), or (type, stored)."""
    root.mkdir(parents=True)
    entries, data = [], b""
    for name, values in tensors.items():
        kind, array = values if isinstance(values, tuple) else (dtype, values)
        stored = f32_to_bf16(array) if kind == "BF16" else array.astype(VIEWS[kind])
        entries.append((name, kind, array.shape, len(data), len(data) + stored.nbytes))
        data += stored.tobytes()
    (root / "model.safetensors").write_bytes(build_header(entries, {"format": "pt"}, 8) + data)
    (root / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (root / "README.md").write_text("A source made by scripts/make_vectors.py.\n")
    (root / "tokenizer_config.json").write_text('{"chat_template": "\\u00e9"}\n')


def special_int8(gate: Any) -> None:
    """Rows 0 to 4 of a matrix: zeros, a negative zero, the smallest subnormal, values near the largest, ties."""
    gate[0] = 0
    gate[1] = -0.0
    gate[2] = 2.0**-133
    gate[3] = 3.0e38 * np.sign(gate[3])
    gate[4] = np.arange(gate.shape[1]) - np.float32(10.5)
    gate[4, 0] = 127


def special_fp8(gate: Any) -> None:
    """The four blocks of a [160, 192] matrix: midpoints of codes under a scale of 1, zeros, the smallest subnormal,
    magnitudes near the largest."""
    gate[:128, :128] = np.arange(128 * 128).reshape(128, 128) / np.float32(1 << 9)
    gate[0, 0] = -448
    gate[:128, 128:] = -0.0
    gate[128:, :128] = 2.0**-133
    gate[128:, 128:] = 3.3e38 * np.sign(gate[128:, 128:])


def special_bf16(gate: Any) -> None:
    """Rows 0 to 3 of a matrix: zeros of both signs, subnormals, the smallest normal, the largest number."""
    gate[0] = 0
    gate[0, ::2] = -0.0
    gate[1] = (np.arange(gate.shape[1]) - 3) * np.float32(2.0**-133)
    gate[2] = 2.0**-126 * np.sign(gate[2])
    gate[3] = np.float32(3.3895314e38) * np.sign(gate[3])


def special_affine(gate: Any) -> None:
    """Rows 0 to 8 of a matrix: zeros, negative zeros, one value, subnormals, an outlier, one sign, large, steps."""
    gate[0] = 0
    gate[1] = -0.0
    gate[2] = np.float32(-0.3)
    gate[3] *= np.float32(2.0**-120)
    gate[4, 5] = 40
    gate[5] = np.abs(gate[5])
    gate[6] = -np.abs(gate[6]) - 1
    gate[7] *= np.float32(1e38)
    gate[8] = np.arange(gate.shape[1]) % 8


def split_names(prefix: str, count: int, hidden: int, inter: int, seed: int) -> dict[str, Any]:
    """Per-expert tensors of one layer."""
    shapes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    return {
        f"{prefix}.{e}.{name}.weight": numbers(seed + 7 * e + n, *shape)
        for e in range(count)
        for n, (name, shape) in enumerate(shapes.items())
    }


def gpt_oss(count: int, hidden: int, inter: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and tensors of one layer: fused, transposed, interleaved, with biases."""
    prefix = "model.layers.0.mlp"
    tensors = {
        "model.norm.weight": numbers(seed, hidden),
        f"{prefix}.router.weight": numbers(seed + 1, count, hidden),
        f"{prefix}.router.bias": numbers(seed + 2, count),
        f"{prefix}.experts.gate_up_proj": numbers(seed + 3, count, hidden, 2 * inter),
        f"{prefix}.experts.gate_up_proj_bias": numbers(seed + 4, count, 2 * inter),
        f"{prefix}.experts.down_proj": numbers(seed + 5, count, inter, hidden),
        f"{prefix}.experts.down_proj_bias": numbers(seed + 6, count, hidden),
    }
    return {"model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": count}, tensors


def qwen3_moe(layers: int, count: int) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": count}


def int8_odd(root: Path) -> None:
    text = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 1, "num_experts": 3, "mtp_num_hidden_layers": 1}
    tensors = {"model.language_model.embed_tokens.weight": numbers(1, 4, 37), "mtp.norm.weight": numbers(2, 37)}
    for n, layer in enumerate(("model.language_model.layers.0", "mtp.layers.0")):
        tensors[f"{layer}.mlp.gate.weight"] = numbers(3 + n, 3, 37)
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = numbers(5 + n, 3, 42, 37)
        tensors[f"{layer}.mlp.experts.down_proj"] = numbers(7 + n, 3, 37, 21)
    special_int8(tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"][0])
    write_source(root, {"model_type": "qwen3_5_moe", "text_config": text}, tensors, "BF16")


def int8_small(root: Path) -> None:
    tensors = {"model.norm.weight": numbers(11, 16)}
    for layer in range(2):
        tensors |= split_names(f"model.layers.{layer}.mlp.experts", 2, 16, 7, 100 * (layer + 1))
    write_source(root, qwen3_moe(2, 2), tensors, "F32")


def fp8_edge(root: Path) -> None:
    tensors = {"model.norm.weight": numbers(21, 192), **split_names("model.layers.0.mlp.experts", 2, 192, 160, 300)}
    special_fp8(tensors["model.layers.0.mlp.experts.0.gate_proj.weight"])
    write_source(root, qwen3_moe(1, 2), tensors, "BF16")


def fp8_whole(root: Path) -> None:
    tensors = {"model.norm.weight": numbers(31, 128), **split_names("model.layers.0.mlp.experts", 1, 128, 128, 400)}
    write_source(root, qwen3_moe(1, 1), tensors, "F16")


def fp8_scales(root: Path) -> None:
    tensors = {"model.norm.weight": numbers(41, 130), **split_names("model.layers.0.mlp.experts", 1, 130, 6, 500)}
    write_source(root, qwen3_moe(1, 1), tensors, "BF16")


def fp8_passed(root: Path) -> None:
    """An FP8 checkpoint: codes in blocks of 128 x 128 that stay, and in other forms that do not."""
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    tensors: dict[str, Any] = {"model.norm.weight": numbers(51, 136)}
    codes = [c for c in range(256) if c & 127 != 127]

    def quantised(name: str, rows: int, columns: int, tail: str, scales: list[float], *grid: int) -> None:
        tensors[f"{name}.weight"] = ("F8_E4M3", np.resize(np.array(codes, np.uint8), (rows, columns)))
        tensors[f"{name}.{tail}"] = ("F32", np.array(scales, np.float32).reshape(grid))

    layer = "model.layers.0"
    for e in range(2):
        quantised(f"{layer}.mlp.experts.{e}.gate_proj", 8, 136, "weight_scale_inv", [1 / 3, 2.0**-9], 1, 2)
        quantised(f"{layer}.mlp.experts.{e}.up_proj", 8, 136, "weight_scale_inv", [2.0**-130, 0.0], 1, 2)
        tensors[f"{layer}.mlp.experts.{e}.up_proj.weight"][1][:, 128:] = (0x00, 0x80) * 4
    quantised(f"{layer}.mlp.experts.0.down_proj", 136, 8, "weight_scale", [0.3])
    quantised(f"{layer}.mlp.experts.1.down_proj", 136, 8, "weight_scale", [0.1 + n / 64 for n in range(136)], 136, 1)
    tensors[f"{layer}.mlp.experts.0.down_proj.input_scale"] = ("F32", np.array(0.5, np.float32))
    quantised(f"{layer}.self_attn.q_proj", 136, 130, "weight_scale_inv", [0.5, 0.7, 1.1, 1.3], 2, 2)
    quantised(f"{layer}.self_attn.o_proj", 5, 136, "weight_scale", [0.01])
    write_source(root, qwen3_moe(1, 2) | {"quantization_config": scheme}, tensors, "BF16")


def fp8_biases(root: Path) -> None:
    write_source(root, *gpt_oss(2, 20, 12, 61), "F32")


def bf16_small(root: Path) -> None:
    shapes = {"w1": (10, 24), "w3": (10, 24), "w2": (24, 10)}
    prefix = "model.layers.0.block_sparse_moe"
    tensors = {"model.norm.weight": numbers(71, 24), f"{prefix}.gate.weight": numbers(72, 2, 24)}
    for e in range(2):
        for n, (name, shape) in enumerate(shapes.items()):
            tensors[f"{prefix}.experts.{e}.{name}.weight"] = numbers(73 + 7 * e + n, *shape)
    special_bf16(tensors[f"{prefix}.experts.0.w1.weight"])
    write_source(root, {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2}, tensors, "BF16")


def bf16_biases(root: Path) -> None:
    write_source(root, *gpt_oss(2, 23, 9, 81), "BF16")


def q3_small(root: Path) -> None:
    tensors = {"model.norm.weight": numbers(91, 128), **split_names("model.layers.0.mlp.experts", 2, 128, 64, 600)}
    special_affine(tensors["model.layers.0.mlp.experts.0.gate_proj.weight"])
    write_source(root, qwen3_moe(1, 2), tensors, "BF16")


def q4_groups(root: Path) -> None:
    tensors = {"model.norm.weight": numbers(95, 96), **split_names("model.layers.0.mlp.experts", 2, 96, 32, 700)}
    special_affine(tensors["model.layers.0.mlp.experts.1.up_proj.weight"])
    write_source(root, qwen3_moe(1, 2), tensors, "F32")


def q4_partial(root: Path) -> None:
    text = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "num_experts": 1}
    tensors = {"model.language_model.norm.weight": numbers(97, 64)}
    for n in range(2):
        tensors |= split_names(f"model.language_model.layers.{n}.mlp.experts", 1, 64, 64, 800 + 20 * n)
    write_source(root, {"model_type": "qwen3_5_moe", "text_config": text}, tensors, "F16")


def q8_small(root: Path) -> None:
    tensors = {"model.norm.weight": numbers(93, 128), **split_names("model.layers.0.mlp.experts", 2, 128, 64, 900)}
    special_affine(tensors["model.layers.0.mlp.experts.0.up_proj.weight"])
    write_source(root, qwen3_moe(1, 2), tensors, "BF16")


def with_dense(root: Path, seed: int, *, tie: bool = False, fp8: bool = False) -> None:
    """One small expert, and dense matrices: some to be encoded, some of too few rows or too small."""
    layer, hidden = "model.layers.0", 64
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": numbers(seed, 129, hidden),
        "model.norm.weight": numbers(seed + 1, hidden),
        f"{layer}.self_attn.q_proj.weight": numbers(seed + 2, 130, hidden),
        f"{layer}.self_attn.k_proj.weight": numbers(seed + 3, 127, hidden),
        f"{layer}.self_attn.v_proj.weight": numbers(seed + 4, 10, hidden),
        f"{layer}.mlp.gate.weight": numbers(seed + 5, 1, hidden),
        **split_names(f"{layer}.mlp.experts", 1, hidden, 32, seed + 6),
    }
    tensors[f"{layer}.self_attn.q_proj.weight"][3] = 0
    config = qwen3_moe(1, 1) | ({"tie_word_embeddings": True} if tie else {})
    if fp8:
        codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
        for name in [n for n in tensors if n.endswith("q_proj.weight") or ".experts." in n]:
            rows, columns = tensors[name].shape
            grid = (-(-rows // 128), -(-columns // 128))
            tensors[name] = ("F8_E4M3", np.resize(codes, (rows, columns)))
            tensors[f"{name}_scale_inv"] = ("BF16", np.full(grid, 0.5, np.float32))
        scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        config |= {"quantization_config": scheme | {"weight_block_size": [128, 128]}}
    write_source(root, config, tensors, "BF16")


def dense_int8(root: Path) -> None:
    with_dense(root, 1000, tie=True)


def dense_fp8(root: Path) -> None:
    with_dense(root, 1100, fp8=True)


def dense_affine(root: Path) -> None:
    with_dense(root, 1200)


@dataclass(frozen=True)
class Accepted:
    """A container to be accepted: how its source is made, and how it is converted."""

    source: Callable[[Path], None]
    codec: str
    layers: tuple[int, int] | None = None
    parameters: Mapping[str, int | str] = field(default_factory=dict)
    dense: str = KEEP


ACCEPT = {
    "int8-odd": Accepted(int8_odd, "int8"),
    "int8-small": Accepted(int8_small, "int8", (1, 2)),
    "fp8-edge": Accepted(fp8_edge, "fp8"),
    "fp8-whole": Accepted(fp8_whole, "fp8"),
    "fp8-scales": Accepted(fp8_scales, "fp8"),
    "fp8-passed": Accepted(fp8_passed, "fp8"),
    "fp8-biases": Accepted(fp8_biases, "fp8"),
    "bf16-small": Accepted(bf16_small, "bf16"),
    "bf16-biases": Accepted(bf16_biases, "bf16"),
    "q3-small": Accepted(q3_small, "q3"),
    "q4-groups": Accepted(q4_groups, "q4", parameters={"group_size": 32}),
    "q4-partial": Accepted(q4_partial, "q4", (0, 1)),
    "q8-small": Accepted(q8_small, "q8"),
    "dense-int8": Accepted(dense_int8, "bf16", dense="int8"),
    "dense-fp8": Accepted(dense_fp8, "fp8", dense="fp8"),
    "dense-q8": Accepted(dense_affine, "int8", dense="q8"),
    "dense-q4": Accepted(dense_affine, "q4", parameters={"group_size": 32}, dense="q4"),
}


def make_accept(name: str, work: Path, committed: Path) -> Path:
    """The container `name` below `work`; the committed experts.parquet is used where it holds the same table."""
    accepted, source, output = ACCEPT[name], work / "source" / name, work / name
    accepted.source(source)
    request = Request(source, encodings.get(accepted.codec, accepted.parameters), accepted.layers, dense=accepted.dense)
    prepare(make_plan(request), output, workers=1)
    if name == "fp8-scales":
        with_f32_scales(output)
    seal(output, committed)
    return output


def with_f32_scales(root: Path) -> None:
    """Make the layer one with F32 scales that holds every code, and a block of zeros whose scale is zero."""
    layer = open_container(root).layers[0]
    file = replace(layer.header, codec=encodings.get("fp8", {"scale_dtype": "F32"}))
    layout = file.layout()
    record = bytearray(layout.stride)
    codes = [c for c in range(256) if c & 127 != 127]
    for slot in layout.record.slots:
        view = np.frombuffer(record, VIEWS[slot.dtype], slot.nbytes // VIEWS[slot.dtype].itemsize, slot.offset)
        if slot.role == "codes":
            view[:] = np.resize(np.array(codes, np.uint8), view.size)
        elif slot.role == "scales":
            view[:] = np.array([2.0**-9, 1 / 3], np.float32)[: view.size]
    up = layout.record.slot("up", "codes")
    zeros = np.frombuffer(record, np.uint8, up.nbytes, up.offset).reshape(up.shape)
    zeros[:, 128:] = (0x00, 0x80)
    scales = layout.record.slot("up", "scales")
    np.frombuffer(record, "<f4", 2, scales.offset)[1] = 0
    (root / layer.entry.file).write_bytes(file.head() + record)
    index = json.loads((root / INDEX).read_bytes())
    index["metadata"]["total_size"] += sum(s.nbytes // 2 for s in layout.record.slots if s.role == "scales")
    (root / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    columns = read_experts(root / EXPERTS_TABLE)
    for row, part in enumerate(columns["part"]):
        slot = layout.record.slot(part, "scales")
        columns["scales_offset"][row] = layout.record_offset(0) + slot.offset
        columns["scales_bytes"][row] = slot.nbytes
        columns["squared_error"][row] = columns["squared_norm"][row] = 0.0
    write_experts(root / EXPERTS_TABLE, [columns], layout.record.roles)
    edit_manifest(root, lambda t: t.update(codec={"name": "fp8", "parameters": file.codec.parameters}, lossless=True))


# -- sealing: every digest made right again ----------------------------------------------------------------------------


def edit_manifest(root: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the table of a manifest; its own digest and id are left as they are."""
    table = json.loads((root / MANIFEST).read_bytes())
    edit(table)
    (root / MANIFEST).write_bytes(canonical_json(table))


def records_of(path: Path, count: int) -> tuple[bytes, list[bytes]]:
    """What stands before the data of a safetensors file, and its data in `count` pieces."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    stride = (len(raw) - start) // count
    return raw[:start], [raw[at : at + stride] for at in range(start, len(raw), stride)]


def seal(root: Path, committed: Path | None = None, *, keep_records: bool = False) -> None:
    """Recompute records.xxh3, every file's digest, the container id and the manifest's digest."""
    table = json.loads((root / MANIFEST).read_bytes())
    parts = {e["file"]: records_of(root / e["file"], e["experts"]) for e in table["layers"]}
    if not keep_records:
        (root / RECORDS).write_bytes(b"".join(digest(r) for _, records in parts.values() for r in records))
    kept = None if committed is None else committed / EXPERTS_TABLE
    if kept is not None and kept.is_file() and read_experts(kept) == read_experts(root / EXPERTS_TABLE):
        shutil.copyfile(kept, root / EXPERTS_TABLE)
    for name in table["files"]:
        if (root / name).is_file():
            raw = (root / name).read_bytes()
            if name in parts:
                value = layer_digest(parts[name][0], [digest(r) for r in parts[name][1]])
            else:
                value = digest(raw)
            table["files"][name] = {"bytes": len(raw), "xxh3_128": value.hex()}
    sign(root, table)


def sign(root: Path, table: dict[str, Any]) -> None:
    """Write a manifest whose container id and own digest are right for what it says."""
    files = {n: bytes.fromhex(f["xxh3_128"]) for n, f in table["files"].items() if n not in NOT_IN_ID}
    codec = table["codec"]
    version = table["pagestone"]["spec_version"]
    dense = table.get("dense")
    identity = None if dense is None else {key: dense[key] for key in ("codec", "parameters")}
    table["container_id"] = container_id(files, codec["name"], codec["parameters"], version, identity).hex()
    table.pop("digest", None)
    table["digest"] = digest(canonical_json(table)).hex()
    (root / MANIFEST).write_bytes(canonical_json(table))


# -- the twin of a container: what a reader must find ------------------------------------------------------------------


def twin(container: Container, what: str) -> dict[str, Any]:
    """What every reader must find in a container."""
    manifest = container.manifest
    layers = [*container.layers.values(), *container.mtp.values()]
    return {
        "what": what,
        "container_id": container.container_id,
        "codec": manifest.codec,
        "parameters": dict(manifest.parameters),
        "lossless": manifest.lossless,
        "partial": manifest.partial and list(manifest.partial),
        "files": sorted(manifest.files),
        "layers": [twin_of_layer(layer) for layer in layers],
    } | ({} if manifest.dense is None else {"dense": twin_of_dense(container.path, manifest.dense)})


def twin_of_values(decoded: Any) -> dict[str, Any]:
    """A decoded matrix: its digest, its first four values and its last."""
    bits = np.ascontiguousarray(decoded, "<f4").view(np.uint32).reshape(-1)
    return {
        "decoded_xxh3_128": digest(bits.tobytes()).hex(),
        "first_f32": [f"{value:08x}" for value in bits[:4].tolist()],
        "last_f32": f"{int(bits[-1]):08x}",
    }


def twin_of_dense(root: Path, dense: DenseEncoding) -> dict[str, Any]:
    """Encoded dense matrices: where their records lie, and what they stand for."""
    found = []
    for placed in (p for file in dense.files for p in read_matrices(root / file, dense, file)):
        m, raw = placed.matrix, (root / placed.matrix.file).read_bytes()
        arrays = {
            s.role: np.frombuffer(raw[placed.offset + s.offset :][: s.nbytes], VIEWS[s.dtype]).reshape(s.shape)
            for s in placed.record.stored
        }
        found.append({
            "name": m.name, "file": m.file, "rows": m.rows, "columns": m.columns, "offset": placed.offset,
            "bytes": placed.record.nbytes,
            "record": [{"name": s.suffix, "dtype": s.dtype, "shape": list(s.shape), "offset": s.offset,
                        "bytes": s.nbytes} for s in placed.record.slots],
            **twin_of_values(dense.encoding.values(arrays, m.rows, m.columns)),
        })  # fmt: skip
    return {"codec": dense.codec, "parameters": dict(dense.parameters), "matrices": found}


def twin_of_layer(layer: Layer) -> dict[str, Any]:
    header, record = layer.header, record_layout(layer.header.codec, layer.header.shape)
    names = dict(zip(PARTS, header.part_names, strict=True))
    experts = []
    for expert in layer:
        values: dict[str, Any] = {"record_xxh3_128": digest(expert.record.tobytes()).hex()}
        for part in PARTS:
            matrix = getattr(expert, part)
            values[part] = twin_of_values(matrix.decode())
            if matrix.bias is not None:
                bias = np.ascontiguousarray(to_f32(matrix.bias.array, matrix.bias.dtype), "<f4")
                values[part]["bias_xxh3_128"] = digest(bias.tobytes()).hex()
                values[part]["bias_first_f32"] = [f"{bits:08x}" for bits in bias.view(np.uint32)[:4].tolist()]
            if matrix.row_sums is not None:
                values[part]["first_row_sums"] = matrix.row_sums.array[:4].tolist()
        experts.append(values)
    return {
        "file": layer.entry.file, "block": header.block, "layer": header.layer, "prefix": header.prefix,
        "experts": len(layer), "hidden": header.shape.hidden, "intermediate": header.shape.intermediate,
        "bias_dtype": header.shape.bias_dtype, "parts": list(header.part_names),
        "data_start": layer.layout.data_start, "stride": layer.stride, "sidecar": layer.entry.sidecar,
        "record": [
            {"name": f"{names[s.part]}.{s.suffix}" if s.part else s.suffix, "dtype": s.dtype,
             "shape": list(s.shape), "offset": s.offset, "bytes": s.nbytes}
            for s in record.slots
        ],
        "values": experts,
    }  # fmt: skip


WHAT = {
    "int8-odd": "int8 of a BF16 source at H = 37, I = 21; nested names, fused source, an MTP block, zero and tiny rows",
    "int8-small": "int8 of an F32 source, only layer 1 of 2 (partial)",
    "fp8-edge": "fp8 of a BF16 source at H = 192, I = 160: partial edge blocks, zero, tiny and huge blocks, midpoints",
    "fp8-whole": "fp8 of an F16 source at H = I = 128: one whole block a matrix",
    "fp8-scales": "fp8 with F32 scales, every code, a zero scale over a block of zeros",
    "fp8-passed": "fp8 of an FP8 source: codes under a block grid and under one scale are kept, those under a scale "
    "a row encoded again with F32 scales; a subnormal and a zero scale; a dense matrix kept in FP8, one decoded",
    "fp8-biases": "fp8 of an F32 source with biases: gpt_oss (fused, transposed, interleaved); F32 biases at odd twos",
    "bf16-small": "bf16 of a BF16 source, lossless: parts w1, w3, w2; zeros of both signs, subnormals, the largest",
    "bf16-biases": "bf16 of a BF16 source with biases: no scales, so no pad_a; names that are ours (loadable_by)",
    "q3-small": "q3 of a BF16 source, groups of 64: zeros, one value, subnormals, an outlier, one sign, large numbers",
    "q4-groups": "q4 of an F32 source, groups of 32 where 64 does not divide H and I",
    "q8-small": "q8 of a BF16 source, groups of 64: what q3-small has, in 8 bits",
    "dense-int8": "bf16 experts, dense matrices in int8: a head tied to its table, row sums in the record",
    "dense-fp8": "fp8 of an FP8 source, a dense matrix passed through in fp8: no head, so transformers may load it",
    "dense-q8": "int8 experts, a dense matrix in q8; matrices of too few rows, or below a page, that stay",
    "dense-q4": "q4 experts in groups of 32, a dense matrix in q4 in groups of 64",
    "q4-partial": "q4 of an F16 source, groups of 64, nested names and config, only layer 0 of 2 (partial)",
}

# -- what must be refused ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rejected:
    """A change to an accepted container, and who must refuse it how.

    `open`: code of the error when the container is opened and every layer and sidecar touched; None: it opens, the
    fault is verify's to find. `verify`: the codes of all errors found. `plain`: whether the plain reader refuses it.
    """

    base: str
    what: str
    change: Callable[[Path], None]
    open: str | None
    verify: tuple[str, ...]
    plain: bool = True
    sealed: bool = True
    keep_records: bool = False


MATRICES, D = "matrices-00001-of-00001.safetensors", "dense-int8"
SMALL, SIDE = "layers-01.safetensors", "layers-01.rowsum.safetensors"
EDGE = "layers-00.safetensors"


def manifest(edit: Callable[[dict[str, Any]], object], *, signed: bool = True) -> Callable[[Path], None]:
    """A change of the manifest's table."""

    def change(root: Path) -> None:
        edit_manifest(root, edit)
        if signed:
            sign(root, json.loads((root / MANIFEST).read_bytes()))

    return change


def text(file: str, old: str, new: str) -> Callable[[Path], None]:
    """Replace text in a file; in a safetensors header spaces at its end make up for the difference."""

    def change(root: Path) -> None:
        raw = (root / file).read_bytes()
        assert old.encode() in raw, (file, old)
        if file.endswith(".safetensors"):
            end = 8 + int.from_bytes(raw[:8], "little")
            head = raw[8:end].replace(old.encode(), new.encode(), 1).rstrip(b" ")
            assert len(head) <= end - 8
            raw = raw[:8] + head.ljust(end - 8) + raw[end:]
        else:
            raw = raw.replace(old.encode(), new.encode(), 1)
        (root / file).write_bytes(raw)

    return change


def header(file: str, edit: Callable[[dict[str, Any]], object], alignment: int = 4096) -> Callable[[Path], None]:
    """Change a safetensors header as JSON; the data stays what it was."""

    def change(root: Path) -> None:
        raw = (root / file).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        table = json.loads(raw[8:end])
        edit(table)
        head = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        head += b" " * (-(8 + len(head)) % alignment)
        (root / file).write_bytes(len(head).to_bytes(8, "little") + head + raw[end:])

    return change


def stored(file: str, expert: int, part: str, role: str, index: int, value: Any) -> Callable[[Path], None]:
    """Put one element of a stored tensor; `role` may be a pad's ("pad_a", "pad") with part ""."""

    def change(root: Path) -> None:
        container = open_container(root)
        layer = next(x for x in (*container.layers.values(), *container.mtp.values()) if x.entry.file == file)
        slot = next(s for s in layer.layout.record.slots if (s.part or "", s.role) == (part, role))
        kind = VIEWS[slot.dtype]
        at = layer.layout.record_offset(expert) + slot.offset + index * kind.itemsize
        raw = bytearray((root / file).read_bytes())
        raw[at : at + kind.itemsize] = np.array(value).astype(kind).tobytes()
        (root / file).write_bytes(raw)

    return change


def matrix(name: str, role: str, index: int, value: Any) -> Callable[[Path], None]:
    """Put one element of a stored tensor, or of a pad, of an encoded dense matrix."""

    def change(root: Path) -> None:
        dense = read_manifest(root / MANIFEST).dense
        assert dense is not None
        placed = next(p for p in read_matrices(root / MATRICES, dense, MATRICES) if p.matrix.name == name)
        slot = next(s for s in placed.record.slots if s.role == role)
        kind = VIEWS[slot.dtype]
        at = placed.offset + slot.offset + index * kind.itemsize
        raw = bytearray((root / MATRICES).read_bytes())
        raw[at : at + kind.itemsize] = np.array(value).astype(kind).tobytes()
        (root / MATRICES).write_bytes(raw)

    return change


def of_dense(**changes: Any) -> Callable[[Path], None]:
    """Change the manifest's field `dense`, or with a number of a matrix that one's: `of_dense(number=0, rows=1)`."""
    number = changes.pop("number", None)

    def edit(table: dict[str, Any]) -> None:
        (table["dense"] if number is None else table["dense"]["matrices"][number]).update(changes)

    return manifest(edit)


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for one in changes:
            one(root)

    return change


def without_dense(root: Path) -> None:
    """A manifest signed as if it had no encoded dense matrices; they are in it all the same."""
    table = json.loads((root / MANIFEST).read_bytes())
    bare = {key: value for key, value in table.items() if key != "dense"}
    sign(root, bare)
    table["container_id"] = bare["container_id"]
    del table["digest"]
    table["digest"] = digest(canonical_json(table)).hex()
    (root / MANIFEST).write_bytes(canonical_json(table))


def dense_minus_128(root: Path) -> None:
    """A code of -128 in a dense matrix with the row sum that belongs to it."""
    dense = read_manifest(root / MANIFEST).dense
    assert dense is not None
    placed = read_matrices(root / MATRICES, dense, MATRICES)[0]
    raw = (root / MATRICES).read_bytes()
    (code,) = np.frombuffer(raw, np.int8, 1, placed.offset)
    (total,) = np.frombuffer(raw, "<i4", 1, placed.offset + placed.record.slot("row_sums").offset)
    matrix("lm_head", "codes", 0, -128)(root)
    matrix("lm_head", "row_sums", 0, int(total) - 128 - int(code))(root)


def loadable(root: Path) -> None:
    """A config.json that does not say who alone may load the container."""
    config = json.loads((root / CONFIG).read_bytes())
    del config["quantization_config"]
    (root / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def minus_128(root: Path) -> None:
    """A code of -128 with the row sum that belongs to it: only the rule about codes can find it."""
    layer = open_container(root).layers[1]
    code = int(layer.expert(0).gate.codes.array[0, 0])
    stored(SMALL, 0, "gate", "codes", 0, -128)(root)
    raw = bytearray((root / SIDE).read_bytes())
    total = int.from_bytes(raw[4096:4100], "little", signed=True) - 128 - code
    raw[4096:4100] = total.to_bytes(4, "little", signed=True)
    (root / SIDE).write_bytes(raw)


def flip(file: str, offset: int) -> Callable[[Path], None]:
    """Flip the lowest bit of a byte; negative offsets count from the end."""

    def change(root: Path) -> None:
        raw = bytearray((root / file).read_bytes())
        raw[offset] ^= 1
        (root / file).write_bytes(raw)

    return change


def cut(file: str, length: int) -> Callable[[Path], None]:
    """Cut a file; negative lengths count from its end."""

    def change(root: Path) -> None:
        raw = (root / file).read_bytes()
        (root / file).write_bytes(raw[:length])

    return change


def merged(table: dict[str, Any]) -> None:
    """Expert 0's gate and up become one tensor: no hole, but a name is missing."""
    gate, up = (f"model.layers.1.mlp.experts.0.{p}_proj.weight" for p in ("gate", "up"))
    table[gate] |= {"shape": [14, 16], "data_offsets": [table[gate]["data_offsets"][0], table[up]["data_offsets"][1]]}
    del table[up]


def columns(edit: Callable[[dict[str, list[Any]]], object]) -> Callable[[Path], None]:
    """Change the table of experts.parquet."""

    def change(root: Path) -> None:
        table = read_experts(root / EXPERTS_TABLE)
        edit(table)
        write_experts(
            root / EXPERTS_TABLE, [table], [n.removesuffix("_bytes") for n in table if n.endswith("_bytes")][1:]
        )

    return change


def json_file(file: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change a JSON file of the container."""

    def change(root: Path) -> None:
        table = json.loads((root / file).read_bytes())
        edit(table)
        (root / file).write_text(json.dumps(table, indent=2) + "\n")

    return change


def exchanged(table: dict[str, Any]) -> None:
    """Scales and affine biases of a matrix, which have one type and shape, change their names."""
    scales, biases = (table[f"{FIRST}.0.gate_proj.{role}"] for role in ("scales", "biases"))
    scales["data_offsets"], biases["data_offsets"] = biases["data_offsets"], scales["data_offsets"]


PREFIX = "model.layers.1.mlp.experts"
FIRST = "model.layers.0.mlp.experts"
S = "int8-small"
REJECT: dict[str, Rejected] = {
    # the manifest
    "manifest-garbage": Rejected(S, "half a manifest", cut(MANIFEST, 200), "E0301", ("E0301",), sealed=False),
    "manifest-version": Rejected(S, "spec version 3", manifest(lambda t: t["pagestone"].update(spec_version="3")),
                                 "E0302", ("E0302",), sealed=False),
    "manifest-unreleased": Rejected(S, "spec version 1, as it was", lambda root: unreleased(root), "E0302",
                                    ("E0302",), sealed=False),
    "manifest-no-request": Rejected(S, "no field request", manifest(lambda t: t.pop("request")), "E0304",
                                    ("E0304",), sealed=False),
    "manifest-request": Rejected(S, "a request that is not true or false",
                                 manifest(lambda t: t["request"].update(include_code=1)), "E0304", ("E0304",),
                                 sealed=False),
    "manifest-request-more": Rejected(S, "a request for more than there is",
                                      manifest(lambda t: t["request"].update(layers=[1, 2])), "E0307", ("E0307",),
                                      sealed=False),
    "manifest-no-records": Rejected(S, "the digests of records are not listed",
                                    manifest(lambda t: t["files"].pop(RECORDS)), "E0316", ("E0316",), sealed=False),
    "manifest-records": Rejected(S, "fewer digests than records", both(
        cut(RECORDS, -16), manifest(lambda t: t["files"][RECORDS].update(bytes=16))), "E0316", ("E0316",),
        sealed=False),
    "manifest-altered": Rejected(S, "a field changed, the digest not",
                                 manifest(lambda t: t.update(lossless=True), signed=False), "E0303", ("E0303",),
                                 sealed=False),
    "manifest-digest": Rejected(S, "the manifest's digest is wrong",
                                manifest(lambda t: t.update(digest="0" * 32), signed=False), "E0303", ("E0303",),
                                sealed=False),
    "manifest-field-missing": Rejected(S, "no field lossless", manifest(lambda t: t.pop("lossless")), "E0304",
                                       ("E0304",), sealed=False),
    "manifest-id": Rejected(S, "the container id is not that of the files", lambda root: wrong_id(root), "E0305",
                            ("E0305",), sealed=False),
    "manifest-path": Rejected(S, "a file outside the directory", lambda root: path_outside(root), "E0306", ("E0306",),
                              sealed=False),
    "manifest-spaces": Rejected(S, "the same JSON with spaces", lambda root: spaced(root), "E0307", ("E0307",),
                                sealed=False),
    "manifest-duplicate-key": Rejected(S, "a key stands twice", lambda root: doubled(root), "E0307", ("E0307",),
                                       sealed=False),
    "manifest-unknown-field": Rejected(S, "a field the specification does not have",
                                       manifest(lambda t: t.update(extra=1)), "E0307", ("E0307",), sealed=False),
    "manifest-layer-unlisted": Rejected(S, "a layer whose file is not listed",
                                        manifest(lambda t: t["files"].pop(SMALL)), "E0308", ("E0308",), sealed=False),
    "manifest-no-layers": Rejected(S, "no layers", lambda root: no_layers(root), "E0308", ("E0308",), sealed=False),
    "manifest-codec": Rejected(S, "an unknown codec", manifest(lambda t: t["codec"].update(name="int7")), "E0101",
                               ("E0101",), sealed=False),
    "manifest-parameters": Rejected(S, "a parameter the codec does not have",
                                    manifest(lambda t: t["codec"].update(parameters={"group": 64})), "E0102",
                                    ("E0102",), sealed=False),
    "manifest-experts": Rejected(S, "another number of experts than the layer has",
                                 lambda root: more_experts(root), "E0321",
                                 ("E0321",), sealed=False),
    "manifest-no-sidecar": Rejected(S, "the sidecar is neither there nor mentioned", lambda root: no_sidecar(root),
                                    "E0321", ("E0321",), sealed=False),
    # files
    "file-missing": Rejected(S, "a listed file is missing", lambda root: (root / "README.md").unlink(), "E0332",
                             ("E0332",), sealed=False),
    "file-truncated": Rejected(S, "the layer file lacks its last byte", cut(SMALL, -1), "E0333", ("E0212", "E0333"),
                               sealed=False),
    "file-flipped": Rejected(S, "a bit of a side file", flip("README.md", 3), None, ("E1001",), sealed=False),
    "dense-flipped": Rejected(S, "a bit of a dense tensor", flip("dense-00001-of-00001.safetensors", -1), None,
                              ("E1001",), sealed=False),
    "parquet-flipped": Rejected(S, "a bit of the footer of experts.parquet", flip(EXPERTS_TABLE, -20), None,
                                ("E0311", "E1001"), sealed=False),
    "records-missing": Rejected(S, "no digests of records", lambda root: (root / RECORDS).unlink(), "E0332",
                                ("E0332",), sealed=False),
    "records-flipped": Rejected(S, "a bit of a record's digest", flip(RECORDS, 17), None, ("E1001", "E1040"),
                                sealed=False),
    "records-of-others": Rejected(S, "digests that are not the records', the file's own digest right",
                                  flip(RECORDS, 17), None, ("E1040",), keep_records=True),
    "code-flipped": Rejected("fp8-edge", "a bit of a code", flip(EDGE, 8192 + 5), None, ("E1001",), sealed=False),
    "pad-flipped": Rejected(S, "a bit of a pad", flip(SMALL, -1), None, ("E1001", "E1006"), sealed=False),
    "header-space": Rejected(S, "the header is padded with a tab", lambda root: tabbed(root), None, ("E1001",),
                             sealed=False),
    # layer files whose digests are all right
    "layer-no-json": Rejected(S, "the header is no JSON object", text(SMALL, '{"__meta', '["__meta'), "E0204",
                              ("E0204",)),
    "layer-duplicate-key": Rejected(S, "a metadata key stands twice",
                                    text(SMALL, '"format":"pt"', '"format":"pt","format":"pt"'), "E0204", ("E0204",)),
    "layer-metadata-number": Rejected(S, "a metadata value is no string",
                                      text(SMALL, '"pagestone.layer":"1"', '"pagestone.layer":1'), "E0205",
                                      ("E0205",)),
    "layer-hole": Rejected(S, "a tensor is missing, and its bytes are a hole",
                           header(SMALL, lambda t: t.pop(f"{PREFIX}.1.up_proj.weight")), "E0211", ("E0211",)),
    "layer-overlap": Rejected(S, "two tensors overlap",
                              header(SMALL, lambda t: t[f"{PREFIX}.0.up_proj.weight"].update(data_offsets=[0, 112])),
                              "E0211", ("E0211",)),
    "layer-size": Rejected(S, "a tensor whose offsets do not fit its shape",
                           header(SMALL, lambda t: t[f"{PREFIX}.0.up_proj.weight"].update(shape=[7, 15])), "E0210",
                           ("E0210",)),
    "layer-spec": Rejected(S, "spec version 3 in a layer file",
                           text(SMALL, '"pagestone.spec":"2"', '"pagestone.spec":"3"'), "E0221", ("E0221",)),
    "layer-codec": Rejected(S, "an unknown codec in a layer file",
                            text(SMALL, '"pagestone.codec":"int8"', '"pagestone.codec":"int7"'), "E0221", ("E0221",)),
    "layer-stride": Rejected(S, "a stride that is not the record's length",
                             text(SMALL, '"pagestone.stride":"4096"', '"pagestone.stride":"8192"'), "E0221",
                             ("E0221",)),
    "layer-offsets": Rejected(S, "an offset that is not the part's",
                              text(SMALL, 'up_proj.weight\\":112', 'up_proj.weight\\":128'), "E0221", ("E0221",)),
    "layer-parts": Rejected(S, "part names that are not those of the tensors",
                            text(SMALL, '[\\"gate_proj\\",\\"up_proj\\",', '[\\"w1\\",\\"w3\\",'), "E0221", ("E0221",)),
    "layer-unknown-key": Rejected(S, "a pagestone key the specification does not have",
                                  header(SMALL, lambda t: t["__metadata__"].update({"pagestone.extra": "1"})),
                                  "E0221", ("E0221",)),
    "layer-tensor-missing": Rejected(S, "gate and up as one tensor", header(SMALL, merged), "E0223", ("E0223",)),
    "layer-tensor-renamed": Rejected(S, "a tensor under another name",
                                     text(SMALL, ".1.up_proj.weight\":", ".1.xp_proj.weight\":"), "E0222",
                                     ("E0222",)),
    "layer-tensor-type": Rejected(S, "codes as unsigned bytes",
                                  header(SMALL, lambda t: t[f"{PREFIX}.1.up_proj.weight"].update(dtype="U8")), "E0223",
                                  ("E0223",)),
    "layer-tensor-extra": Rejected(S, "an empty tensor too many",
                                   header(SMALL, lambda t: t.update(
                                       extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})), "E0224",
                                   ("E0224",)),
    "layer-misaligned": Rejected(S, "data begins eight bytes after a page", lambda root: misaligned(root), "E0225",
                                 ("E0225",)),
    "layer-count": Rejected(S, "metadata that state one expert more",
                            text(SMALL, '"pagestone.experts":"2"', '"pagestone.experts":"3"'), "E0227", ("E0227",)),
    "layer-number": Rejected(S, "a layer file of another number",
                             text(SMALL, '"pagestone.layer":"1"', '"pagestone.layer":"2"'), "E0321", ("E0321",)),
    "sidecar-of-another-layer": Rejected("int8-odd", "the sidecars of two layers exchanged", lambda root: swapped(root),
                                         "E0226", ("E0226",)),
    "sidecar-is-a-layer": Rejected(S, "the layer file in place of its sidecar",
                                   lambda root: shutil.copyfile(root / SMALL, root / SIDE), "E0220", ("E0220",)),
    "sidecar-further-key": Rejected(S, "a sidecar with a metadata key of another program",
                                    header(SIDE, lambda t: t["__metadata__"].update(producer="other")), "E0226",
                                    ("E0226",)),
    # encoded dense matrices
    "dense-unlisted": Rejected(D, "a file of encoded matrices, and a manifest that says nothing of any",
                               manifest(lambda t: t.pop("dense")), "E0340", ("E0340",), sealed=False),
    "dense-null": Rejected(D, "null where no field is to be", manifest(lambda t: t.update(dense=None)), "E0304",
                           ("E0304",), sealed=False),
    "dense-no-matrix": Rejected(D, "an encoding of no matrix", of_dense(matrices=[]), "E0340", ("E0340",),
                                sealed=False),
    "dense-codec": Rejected("dense-q4", "an encoding that dense matrices may not be in", of_dense(codec="q3"), "E0340",
                            ("E0340",), sealed=False),
    "dense-group-size": Rejected("dense-q4", "another group size than the file's",
                                 of_dense(parameters={"group_size": 32}), "E0341", ("E0341",), sealed=False),
    "dense-other-id": Rejected("dense-q8", "the id without the encoding of dense matrices",
                               lambda root: without_dense(root), "E0305", ("E0305",), sealed=False),
    "dense-twice": Rejected(D, "one name of two matrices", of_dense(number=1, name="lm_head"), "E0340", ("E0340",),
                            sealed=False),
    "dense-name": Rejected(D, "a matrix of another name than the file's", of_dense(number=1, name="model.q_proj"),
                           "E0342", ("E0342",), sealed=False),
    "dense-rows": Rejected("dense-q8", "a row fewer than the file has, in a record as long",
                           of_dense(number=0, rows=129), "E0342", ("E0342",), sealed=False),
    "dense-too-many-rows": Rejected(D, "more rows than the file has room for", of_dense(number=0, rows=1 << 30),
                                    "E0340", ("E0340",), sealed=False),
    "dense-sum": Rejected(D, "a squared error that is NaN", of_dense(number=0, squared_error="7ff8000000000000"),
                          "E0304", ("E0304",), sealed=False),
    "dense-tensor-type": Rejected(D, "codes of a dense matrix as unsigned bytes",
                                  header(MATRICES, lambda t: t["lm_head.weight"].update(dtype="U8")), "E0342",
                                  ("E0342",)),
    "dense-metadata": Rejected(D, "metadata that state another encoding",
                               text(MATRICES, '"pagestone.codec":"int8"', '"pagestone.codec":"fp8"'), "E0341",
                               ("E0341",)),
    "dense-code": Rejected(D, "a code of -128, and the row sum that belongs to it",
                           lambda root: dense_minus_128(root), None, ("E1005",)),
    "dense-row-sum": Rejected(D, "a row sum that is not its codes'", matrix("lm_head", "row_sums", 5, 1 << 20), None,
                              ("E1005",)),
    "dense-scale-zero": Rejected(D, "a scale of zero", matrix("lm_head", "scales", 7, 0), None, ("E1005",)),
    "dense-bias-nan": Rejected("dense-q4", "an affine bias of NaN",
                               matrix("model.layers.0.self_attn.q_proj", "biases", 0, 0x7FC0), None, ("E1005",)),
    "dense-fp8-nan": Rejected("dense-fp8", "an FP8 code that is NaN",
                              matrix("model.layers.0.self_attn.q_proj", "codes", 300, 0x7F), None, ("E1005",)),
    "dense-pad": Rejected(D, "a pad of a dense matrix that is not zero", matrix("lm_head", "pad", 9, 1), None,
                          ("E1006",)),
    "dense-config": Rejected(D, "a config that lets others take codes for weights", lambda root: loadable(root), None,
                             ("E1013",), plain=False),
    # parameters, packed rows and biases
    "q4-group-size-unknown": Rejected("q4-groups", "a group size the codec does not have",
                                      manifest(lambda t: t["codec"].update(parameters={"group_size": 16})), "E0102",
                                      ("E0102",), sealed=False),
    "q4-group-size-missing": Rejected("q4-groups", "no group size, though the layer states 32",
                                      manifest(lambda t: t["codec"].update(parameters={})), "E0321", ("E0321",),
                                      sealed=False),
    "q4-group-size-other": Rejected("q4-groups", "another group size than the layer's",
                                    manifest(lambda t: t["codec"].update(parameters={"group_size": 64})), "E0321",
                                    ("E0321",), sealed=False),
    "q4-group-size-in-layer": Rejected("q4-groups", "a layer with groups of 64, which do not divide its rows",
                                       text(EDGE, '{\\"group_size\\":32}', '{\\"group_size\\":64}'), "E0221",
                                       ("E0221",)),
    "q3-group-size-in-layer": Rejected("q3-small", "a layer with groups of 32 and the offsets of 64",
                                       text(EDGE, '{\\"group_size\\":64}', '{\\"group_size\\":32}'), "E0221",
                                       ("E0221",)),
    "q4-is-q3": Rejected("q4-partial", "a layer that states 3 bits with the offsets of 4",
                         text(EDGE, '"pagestone.codec":"q4"', '"pagestone.codec":"q3"'), "E0221", ("E0221",)),
    "q3-row-length": Rejected("q3-small", "packed rows of half the length, twice as many",
                              header(EDGE, lambda t: t[f"{FIRST}.0.gate_proj.weight"].update(shape=[128, 6])), "E0223",
                              ("E0223",)),
    "q3-row-short": Rejected("q3-small", "packed rows that lack a word",
                             header(EDGE, lambda t: t[f"{FIRST}.1.down_proj.weight"].update(shape=[128, 5])), "E0210",
                             ("E0210",)),
    "q4-codes-signed": Rejected("q4-groups", "codes as signed words",
                                header(EDGE, lambda t: t[f"{FIRST}.1.up_proj.weight"].update(dtype="I32")), "E0223",
                                ("E0223",)),
    "q4-scales-are-biases": Rejected("q4-groups", "scales and affine biases exchanged", header(EDGE, exchanged),
                                     "E0223", ("E0223",)),
    "bias-type": Rejected("bf16-biases", "metadata that state F16 biases where they are BF16",
                          text(EDGE, '"pagestone.bias_dtype":"BF16"', '"pagestone.bias_dtype":"F16"'), "E0223",
                          ("E0223",)),
    "bias-type-in-table": Rejected("bf16-biases", "a bias in F16 where metadata state BF16",
                                   header(EDGE, lambda t: t[f"{FIRST}.1.up_proj.bias"].update(dtype="F16")), "E0223",
                                   ("E0223",)),
    "bias-type-unknown": Rejected("bf16-biases", "metadata that state integer biases",
                                  text(EDGE, '"pagestone.bias_dtype":"BF16"', '"pagestone.bias_dtype":"I16"'), "E0221",
                                  ("E0221",)),
    "bias-unstated": Rejected("fp8-biases", "biases of which the metadata say nothing",
                              header(EDGE, lambda t: t["__metadata__"].pop("pagestone.bias_dtype")), "E0221",
                              ("E0221",)),
    "bias-renamed": Rejected("fp8-biases", "a bias under another name",
                             text(EDGE, '.0.down_proj.bias":', '.0.down_proj.sum":'), "E0222", ("E0222",)),
    # contents whose digests are all right
    "int8-minus-128": Rejected(S, "a code of -128, counted in its row sum", minus_128, None, ("E1005",)),
    "int8-scale-nan": Rejected(S, "a scale of NaN", stored(SMALL, 1, "down", "scales", 3, np.nan), None, ("E1005",)),
    "int8-scale-infinite": Rejected(S, "a scale of Inf", stored(SMALL, 1, "up", "scales", 6, np.inf), None, ("E1005",)),
    "int8-scale-negative": Rejected(S, "a negative scale", stored(SMALL, 0, "up", "scales", 0, -1.0), None, ("E1005",)),
    "int8-scale-zero": Rejected(S, "a scale of zero", stored(SMALL, 0, "gate", "scales", 0, 0.0), None, ("E1005",)),
    "int8-scale-subnormal": Rejected(S, "a subnormal scale", stored(SMALL, 0, "gate", "scales", 0, 2.0**-127), None,
                                     ("E1005",)),
    "int8-row-sum": Rejected(S, "a row sum that is not the sum of its codes", flip(SIDE, 4096), None, ("E1005",)),
    "pad-a-not-zero": Rejected(S, "a byte of pad_a", stored(SMALL, 0, "", "pad_a", 0, 1), None, ("E1006",)),
    "pad-not-zero": Rejected(S, "a byte of pad", stored(SMALL, 1, "", "pad", 7, 255), None, ("E1006",)),
    "bf16-code-nan": Rejected("bf16-small", "a code of NaN", stored(EDGE, 1, "up", "codes", 5, 0x7FC0), None,
                              ("E1005",)),
    "bf16-code-infinite": Rejected("bf16-small", "a code of -Inf", stored(EDGE, 0, "down", "codes", 239, 0xFF80), None,
                                   ("E1005",)),
    "bias-nan": Rejected("bf16-biases", "a bias of NaN", stored(EDGE, 1, "up", "bias", 8, 0x7FC1), None, ("E1005",)),
    "bias-infinite": Rejected("fp8-biases", "a bias of Inf", stored(EDGE, 0, "down", "bias", 0, np.inf), None,
                              ("E1005",)),
    "q3-scale-nan": Rejected("q3-small", "a scale of NaN", stored(EDGE, 0, "gate", "scales", 9, 0xFFC0), None,
                             ("E1005",)),
    "q3-bias-infinite": Rejected("q3-small", "an affine bias of Inf", stored(EDGE, 1, "down", "biases", 0, 0x7F80),
                                 None, ("E1005",)),
    "q4-scale-infinite": Rejected("q4-groups", "a scale of Inf", stored(EDGE, 1, "down", "scales", 95, 0x7F80), None,
                                  ("E1005",)),
    "q4-bias-nan": Rejected("q4-groups", "an affine bias of NaN", stored(EDGE, 0, "up", "biases", 3, 0x7FFF), None,
                            ("E1005",)),
    "fp8-code-7f": Rejected("fp8-edge", "a code of 0x7F", stored(EDGE, 1, "gate", "codes", 0, 0x7F), None, ("E1005",)),
    "fp8-code-ff": Rejected("fp8-edge", "a code of 0xFF", stored(EDGE, 1, "down", "codes", 191 * 160 + 159, 0xFF), None,
                            ("E1005",)),
    "fp8-scale-nan": Rejected("fp8-edge", "a scale of NaN", stored(EDGE, 0, "gate", "scales", 3, 0x7FC0), None,
                              ("E1005",)),
    "fp8-scale-infinite": Rejected("fp8-edge", "a scale of Inf", stored(EDGE, 0, "up", "scales", 0, 0x7F80), None,
                                   ("E1005",)),
    "fp8-scale-negative": Rejected("fp8-edge", "a negative scale", stored(EDGE, 1, "up", "scales", 1, 0xBF80), None,
                                   ("E1005",)),
    "fp8-scale-zero": Rejected("fp8-edge", "a zero scale over codes that are not zero",
                               stored(EDGE, 1, "up", "scales", 2, 0), None, ("E1005",)),
    # the files beside the layers, digests all right: the plain reader leaves these to others
    "dense-misaligned": Rejected(S, "dense tensors begin off a page",
                                 header("dense-00001-of-00001.safetensors", lambda t: None, 8), None, ("E0225",)),
    "index-missing": Rejected(S, "the index lacks a tensor",
                              json_file(INDEX, lambda t: t["weight_map"].pop(f"{PREFIX}.1.up_proj.weight")), None,
                              ("E1008",), plain=False),
    "index-pad": Rejected(S, "the index lists a pad",
                          json_file(INDEX, lambda t: t["weight_map"].update({f"{PREFIX}.0.pad": SMALL})), None,
                          ("E1009",), plain=False),
    "index-elsewhere": Rejected(S, "the index says another file", json_file(
        INDEX, lambda t: t["weight_map"].update({"model.norm.weight": SMALL})), None, ("E1010",), plain=False),
    "index-total": Rejected(S, "the index has a wrong total",
                            json_file(INDEX, lambda t: t["metadata"].update(total_size=1)), None, ("E1011",),
                            plain=False),
    "config-silent": Rejected(S, "config.json states no quantization",
                              json_file(CONFIG, lambda t: t.pop("quantization_config")), None, ("E1013",),
                              plain=False),
    "config-method": Rejected(S, "the config of a part names a method, so that others load what is not there",
                              json_file(CONFIG, lambda t: t["quantization_config"].update(
                                  quant_method="compressed-tensors")), None, ("E1013",), plain=False),
    "config-names": Rejected("bf16-biases", "nothing stated where the names of parts are ours",
                             json_file(CONFIG, lambda t: t.pop("quantization_config")), None, ("E1013",), plain=False),
    "config-not-silent": Rejected("bf16-small", "the config of plain weights states a quantization",
                                  json_file(CONFIG, lambda t: t.update(quantization_config={"quant_method": "fp8"})),
                                  None, ("E1013",), plain=False),
    "config-one-key": Rejected("q4-groups", "stated for transformers and not for MLX",
                               json_file(CONFIG, lambda t: t.pop("quantization")), None, ("E1013",), plain=False),
    "config-one-level": Rejected("q4-partial", "stated at top level only",
                                 json_file(CONFIG, lambda t: t["text_config"].pop("quantization_config")), None,
                                 ("E1013",), plain=False),
    "parquet-rows": Rejected(S, "experts.parquet lacks the last expert", columns(
        lambda t: [c.__delitem__(slice(3, None)) for c in t.values()]), None, ("E1014",), plain=False),
    "parquet-offset": Rejected(S, "experts.parquet says another place", columns(
        lambda t: t["codes_offset"].__setitem__(2, 0)), None, ("E1015",), plain=False),
}  # fmt: skip


def wrong_id(root: Path) -> None:
    table = json.loads((root / MANIFEST).read_bytes())
    table["container_id"] = "0" * 32
    del table["digest"]
    table["digest"] = digest(canonical_json(table)).hex()
    (root / MANIFEST).write_bytes(canonical_json(table))


def unreleased(root: Path) -> None:
    """A manifest with the fields that version 1 had, as nobody may read it any more."""
    edit_manifest(root, lambda t: t["pagestone"].update(spec_version="1"))
    edit_manifest(root, lambda t: (t.pop("request"), t["files"].pop(RECORDS)))
    sign(root, json.loads((root / MANIFEST).read_bytes()))


def more_experts(root: Path) -> None:
    """A third expert, and a digest for it, of a layer that has two."""
    raw = (root / RECORDS).read_bytes() + bytes(16)
    (root / RECORDS).write_bytes(raw)
    listed = {"bytes": len(raw), "xxh3_128": digest(raw).hex()}
    edit_manifest(root, lambda t: (t["layers"][0].update(experts=3), t["files"].update({RECORDS: listed})))
    sign(root, json.loads((root / MANIFEST).read_bytes()))


def path_outside(root: Path) -> None:
    edit_manifest(root, lambda t: t["files"].update({"../README.md": t["files"].pop("README.md")}))
    sign(root, json.loads((root / MANIFEST).read_bytes()))


def spaced(root: Path) -> None:
    table = json.loads((root / MANIFEST).read_bytes())
    (root / MANIFEST).write_text(json.dumps(table, indent=1, sort_keys=True))


def doubled(root: Path) -> None:
    raw = (root / MANIFEST).read_bytes()
    (root / MANIFEST).write_bytes(raw.replace(b'"lossless":false', b'"lossless":true,"lossless":false'))


def no_layers(root: Path) -> None:
    def edit(table: dict[str, Any]) -> None:
        table["layers"] = []
        for name in (SMALL, SIDE):
            del table["files"][name]

    edit_manifest(root, edit)
    sign(root, json.loads((root / MANIFEST).read_bytes()))


def no_sidecar(root: Path) -> None:
    def edit(table: dict[str, Any]) -> None:
        table["layers"][0]["sidecar"] = None
        del table["files"][SIDE]

    edit_manifest(root, edit)
    sign(root, json.loads((root / MANIFEST).read_bytes()))
    (root / SIDE).unlink()


def tabbed(root: Path) -> None:
    raw = bytearray((root / SMALL).read_bytes())
    end = 8 + int.from_bytes(raw[:8], "little")
    raw[end - 1] = 9
    (root / SMALL).write_bytes(raw)


def misaligned(root: Path) -> None:
    raw = (root / SMALL).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    (root / SMALL).write_bytes((length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :])


def swapped(root: Path) -> None:
    one, two = root / "layers-00.rowsum.safetensors", root / "mtp-00.rowsum.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


# -- patches -----------------------------------------------------------------------------------------------------------


def files_of(root: Path) -> Files:
    return {p.name: p.read_bytes() for p in sorted(root.iterdir())}


def difference(before: Files, after: Files) -> Iterator[dict[str, Any]]:
    """The patch that makes `after` of `before`."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if new is None:
            yield {"file": name, "delete": True}
        elif old is not None and old.startswith(new):
            yield {"file": name, "length": len(new)}
        elif old is not None and len(old) == len(new):
            for begin, end in runs(old, new):
                yield {"file": name, "offset": begin, "bytes": new[begin:end].hex()}
        elif new.isascii() and len(new) < 4096:
            yield {"file": name, "text": new.decode()}
        else:
            yield {"file": name, "zlib_base64": base64.b64encode(zlib.compress(new, 9)).decode()}


def runs(old: bytes, new: bytes) -> Iterator[tuple[int, int]]:
    """Ranges in which two equally long byte strings differ, those less than 16 bytes apart joined."""
    places = np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))
    for group in np.split(places, np.flatnonzero(np.diff(places) > 16) + 1):
        yield int(group[0]), int(group[-1]) + 1


def apply(patch: list[dict[str, Any]], files: Files) -> Files:
    """The files after a patch; see tests/vectors/README.md."""
    result = dict(files)
    for step in patch:
        name = step["file"]
        if step.get("delete"):
            del result[name]
        elif "length" in step:
            result[name] = result[name][: step["length"]]
        elif "text" in step:
            result[name] = step["text"].encode()
        elif "zlib_base64" in step:
            result[name] = zlib.decompress(base64.b64decode(step["zlib_base64"]))
        else:
            new = bytes.fromhex(step["bytes"])
            end = step["offset"] + len(new)
            result[name] = result[name][: step["offset"]] + new + result[name][end:]
    return result


def write_files(root: Path, files: Files) -> Path:
    root.mkdir(parents=True)
    for name, data in files.items():
        (root / name).write_bytes(data)
    return root


def make_reject(name: str, base: Files, work: Path) -> dict[str, Any]:
    """The JSON of a case to be refused."""
    case = REJECT[name]
    root = write_files(work / "reject" / name, base)
    case.change(root)
    if case.sealed:
        committed, path = None, VECTORS / "reject" / f"{name}.json"
        if path.is_file():
            committed = write_files(
                work / "committed" / name, apply(json.loads(path.read_bytes())["patch"], files_of(accepted(case.base)))
            )
        seal(root, committed, keep_records=case.keep_records)
    return {
        "what": case.what,
        "base": case.base,
        "refused_by": {"open": case.open, "verify": list(case.verify), "plain_reader": case.plain},
        "patch": list(difference(base, files_of(root))),
    }


def accepted(name: str) -> Path:
    """The committed container `name`."""
    return VECTORS / "accept" / name


# -- the whole ---------------------------------------------------------------------------------------------------------


def make(work: Path) -> tuple[Files, dict[str, Any]]:
    """Every file of tests/vectors by its path there: containers and twins as bytes, cases to be refused as JSON."""
    made: Files = {}
    containers: dict[str, Files] = {}
    for name in ACCEPT:
        root = make_accept(name, work, accepted(name))
        containers[name] = files_of(root)
        made |= {f"accept/{name}/{file}": data for file, data in containers[name].items()}
        table = twin(open_container(root), WHAT[name])
        made[f"accept/{name}.json"] = (json.dumps(table, indent=1) + "\n").encode()
    return made, {f"reject/{n}.json": make_reject(n, containers[c.base], work) for n, c in REJECT.items()}


def same_case(path: Path, made: dict[str, Any], base: Files) -> bool:
    """Whether a committed case says and does the same; how its patch is compressed does not matter."""
    have = json.loads(path.read_bytes())
    if {k: v for k, v in have.items() if k != "patch"} != {k: v for k, v in made.items() if k != "patch"}:
        return False
    return apply(have["patch"], base) == apply(made["patch"], base)


def main(arguments: list[str]) -> int:
    """See the top of this file."""
    if set(arguments) - {"--check", "--overwrite"} or len(arguments) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as work:
        files, cases = make(Path(work))
    there = {str(p.relative_to(VECTORS)) for f in ("accept", "reject") for p in (VECTORS / f).rglob("*") if p.is_file()}
    different = [n for n, data in files.items() if n in there and (VECTORS / n).read_bytes() != data]
    for name, made in cases.items():
        at = f"accept/{made['base']}/"
        base = {n.removeprefix(at): data for n, data in files.items() if n.startswith(at)}
        if name in there and not same_case(VECTORS / name, made, base):
            different.append(name)
    missing = sorted((files.keys() | cases.keys()) - there)
    extra = sorted(there - files.keys() - cases.keys())
    if arguments == ["--check"] or (different and arguments != ["--overwrite"]):
        for word, names in (("not what is made", different), ("missing", missing), ("made by nobody", extra)):
            for name in names:
                print(f"tests/vectors/{name}: {word}", file=sys.stderr)
        return 1 if different or missing or extra else 0
    for name in [*missing, *different]:
        data = files.get(name) or (json.dumps(cases[name], indent=1) + "\n").encode()
        (VECTORS / name).parent.mkdir(parents=True, exist_ok=True)
        (VECTORS / name).write_bytes(data)
    print(f"{len(missing)} written, {len(different)} changed, {len(extra)} there that nobody makes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
