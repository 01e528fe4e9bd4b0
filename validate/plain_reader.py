"""A second reader of containers, written from specs/ alone: standard library, NumPy and xxhash, nothing of ours.

`python validate/plain_reader.py DIR` checks every byte a digest or a rule covers, prints the container id recomputed
from the files and a line a layer, and exits 1 at the first disagreement. A codec is one entry of `CODECS`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest as xxh3

SPEC_VERSION = "2"
PAGE, CODES_END = 4096, 64  # data and records begin at multiples of the one, what follows codes at one of the other
MAX_HEADER = 100_000_000
PARTS, PADS = ("gate", "up", "down"), ("pad_a", "pad")
FLOATS = ("BF16", "F16", "F32")  # those that must be finite; one of them is the type of biases
MANIFEST_FIELDS = {"pagestone", "codec", "lossless", "partial", "request", "source", "layers", "files", "container_id"}
DENSE = ("int8", "fp8", "q8", "q4")  # codecs that dense matrices may be in
MATRIX_FIELDS = {"name", "file", "rows", "columns", "squared_error", "squared_norm"}
TEMPLATES = "additional_chat_templates/"  # the one subfolder; only templates lie there
NUMPY_TYPES = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "BF16": "<u2", "F16": "<f2", "I16": "<i2", "U16": "<u2", "F32": "<f4", "I32": "<i4", "U32": "<u4",
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "C64": "<c8",
}  # fmt: skip


class Place(NamedTuple):
    """A stored tensor: element type, shape, and where its bytes lie (in a file, or in a record)."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def need(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len(dict(pairs)) == len(pairs), "a JSON key stands twice")
    return dict(pairs)


class Codec(NamedTuple):
    """How matrices are stored. `tensors(rows, columns, parameters)`: (suffix, type, shape) of each, in order of the
    record. `values(where, parameters, row_sums, *arrays)`: float32, of arrays in that order, BF16 ones widened."""

    tensors: Callable[..., list[tuple[str, str, tuple[int, ...]]]]
    values: Callable[..., Any]
    parameters: tuple[dict[str, Any], ...] = ({},)
    has_row_sums: bool = False


def int8_values(where: str, _: Any, row_sums: Any, codes: Any, scales: Any) -> Any:
    need((codes != -128).all(), f"{where}: a code of -128")
    need((scales >= np.float32(2.0**-126)).all(), f"{where}: a scale below the smallest normal number")
    need((codes.sum(axis=1, dtype=np.int32) == row_sums).all(), f"{where}: a row sum that is not that of its codes")
    return codes.astype(np.float32) * scales


def e4m3(code: int) -> float:
    """The number that a code of E4M3FN stands for, but for the two that are NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


def fp8_values(where: str, _parameters: Any, _row_sums: Any, codes: Any, grid: Any) -> Any:
    scales = grid.repeat(128, axis=0)[: codes.shape[0]].repeat(128, axis=1)[:, : codes.shape[1]]
    magnitudes = codes & 0x7F
    need((magnitudes != 0x7F).all(), f"{where}: a code that is NaN")
    need(((scales > 0) | (scales == 0) & (magnitudes == 0)).all(), f"{where}: a scale that is not positive")
    with np.errstate(over="ignore"):
        values = np.array([e4m3(code) for code in range(256)], np.float32)[codes] * scales
    need(np.isfinite(values).all(), f"{where}: a product that is not finite")
    return values


def affine_tensors(bits: int, rows: int, columns: int, group: int) -> list[tuple[str, str, tuple[int, ...]]]:
    need(columns % group == 0, f"{columns} columns are no whole groups of {group}")
    groups = (rows, columns // group)
    return [("weight", "U32", (rows, columns * bits // 32)), ("scales", "BF16", groups), ("biases", "BF16", groups)]


def affine_values(_where: str, parameters: Any, _sums: Any, words: Any, scales: Any, biases: Any) -> Any:
    scales, biases = (each.repeat(parameters["group_size"], axis=1) for each in (scales, biases))
    stream = np.unpackbits(words.view("u1"), axis=1, bitorder="little").reshape(*scales.shape, -1)
    codes = (stream << np.arange(stream.shape[2])).sum(axis=2)  # the least significant bit comes first
    return scales * codes.astype(np.float32) + biases


GROUPS = ({"group_size": 64}, {"group_size": 32})
CODECS = {
    "bf16": Codec(lambda r, c, _: [("weight", "BF16", (r, c))], lambda _where, _parameters, _sums, codes: codes),
    "int8": Codec(lambda r, c, _: [("weight", "I8", (r, c)), ("weight_scale", "F32", (r, 1))], int8_values,
                  has_row_sums=True),
    "fp8": Codec(lambda r, c, p: [("weight", "F8_E4M3", (r, c)),
                                  ("weight_scale_inv", p["scale_dtype"], (math.ceil(r / 128), math.ceil(c / 128)))],
                 fp8_values, ({"block": 128, "scale_dtype": "BF16"}, {"block": 128, "scale_dtype": "F32"})),
    **{f"q{bits}": Codec(lambda r, c, p, bits=bits: affine_tensors(bits, r, c, p["group_size"]), affine_values, GROUPS)
       for bits in (3, 4, 8)},
}  # fmt: skip


def size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize


def safetensors(path: Path) -> tuple[dict[str, Place], dict[str, str], int]:
    """Every tensor by name with its place in the file, the metadata, and where the data begins."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    need(start <= min(len(raw), 8 + MAX_HEADER) and raw[8:9] == b"{", f"{path.name}: no safetensors file")
    table = json.loads(raw[8:start].decode(), object_pairs_hook=each_key_once)
    metadata = table.pop("__metadata__", {})
    need(all(isinstance(text, str) for text in metadata.values()), f"{path.name}: metadata holds more than strings")
    tensors, position = {}, start
    for name, entry in table.items():
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        need(set(entry) == {"dtype", "shape", "data_offsets"}, f"{path.name}: {name}: an entry of {list(entry)}")
        need(all(type(n) is int and n >= 0 for n in (begin, end, *shape)), f"{path.name}: {name}: {entry}")
        need(end - begin == size(entry["dtype"], shape), f"{path.name}: {name}: {entry} spans {end - begin}")
        tensors[name] = Place(entry["dtype"], shape, start + begin, end - begin)
    for place in sorted(tensors.values(), key=lambda place: (place.offset, place.nbytes)):
        need(place.offset == position, f"{path.name}: a hole or an overlap at byte {position}")
        position += place.nbytes
    need(position == len(raw) and start % PAGE == 0, f"{path.name}: data from {start} to {position} of {len(raw)}")
    return tensors, metadata, start


def record(matrices: list[Any], names: list[str], bias: Any) -> tuple[dict[str, Place], int]:
    """Everything in an expert's record, by its name, and the record's length; `matrices`: tensors of gate, up, down."""
    slots, end = {}, 0

    def put(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal end
        if nbytes := size(dtype, shape):  # what takes no bytes is absent
            slots[name] = Place(dtype, shape, end, nbytes)
            end += nbytes

    for order in range(len(matrices[0])):
        if order == 1:
            put("pad_a", "U8", (-end % CODES_END,))
        for name, tensors in zip(names, matrices, strict=True):
            suffix, dtype, shape = tensors[order]
            put(f"{name}.{suffix}", dtype, shape)
    for name, ((_, _, codes), *_) in zip(names, matrices, strict=True):
        if bias is not None:
            put(f"{name}.bias", bias, codes[:1])
    put("pad", "U8", (-end % PAGE,))
    return slots, end


def stored(where: str, slot: str, place: Place, raw: bytes) -> Any:
    """The array at a place of a record, BF16 widened, after checking that numbers are finite and pads are zero."""
    array = np.frombuffer(raw, NUMPY_TYPES[place.dtype], math.prod(place.shape), place.offset).reshape(place.shape)
    need(slot not in PADS or not array.any(), f"{where} {slot}: not zero")
    array = (array.astype("<u4") << 16).view("<f4") if place.dtype == "BF16" else array
    need(place.dtype not in FLOATS or np.isfinite(array).all(), f"{where} {slot}: a value that is not finite")
    return array


def metadata_of(values: dict[str, Any]) -> dict[str, str]:
    """Metadata as a header has them: strings as they are, anything else as canonical JSON in a string."""
    texts = {key: v if isinstance(v, str) else canonical(v).decode() for key, v in values.items()}
    return {"format": "pt"} | {f"pagestone.{key}": text for key, text in texts.items()}


def row_sums(path: Path, expected: dict[str, str], experts: int, hidden: int, inner: int) -> list[Any]:
    """The row sums of gate, up and down in a sidecar, int32 [experts, rows] each."""
    tensors, metadata, start = safetensors(path)
    need(metadata == expected, f"{path.name}: metadata {metadata}, expected {expected}")
    both, one = (experts, 2 * inner), (experts, hidden)
    first = Place("I32", both, start, size("I32", both))
    second = Place("I32", one, start + first.nbytes, size("I32", one))
    places = {"gate_up_proj.row_sum": first, "down_proj.row_sum": second}
    need(tensors == places, f"{path.name}: {tensors}, expected {places}")
    gate_up, down = np.split(np.fromfile(path, "<i4", offset=start), [math.prod(both)])
    return [*np.split(gate_up.reshape(both), 2, axis=1), down.reshape(one)]


class Layer:
    """One layer file and its sidecar, checked against its metadata and its entry in the manifest."""

    def __init__(self, root: Path, entry: dict[str, Any], codec: dict[str, Any]) -> None:
        self.path, self.parameters, self.codec = root / entry["file"], codec["parameters"], CODECS[codec["name"]]
        need(self.parameters in self.codec.parameters, f"{self.path.name}: parameters {self.parameters}")
        tensors, metadata, self.start = safetensors(self.path)
        own = {k.removeprefix("pagestone."): v for k, v in metadata.items() if k.startswith("pagestone.")}
        self.count, self.names, bias = int(own["experts"]), json.loads(own["parts"]), own.get("bias_dtype")
        hidden, inner = int(own["hidden"]), int(own["intermediate"])
        need(bias is None or bias in FLOATS, f"{self.path.name}: biases of type {bias}")
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        matrices = [self.codec.tensors(*shape, self.parameters) for shape in shapes]
        self.slots, self.stride = record(matrices, self.names, bias)
        common = {
            "spec": SPEC_VERSION, "codec": codec["name"], "parameters": self.parameters, "block": entry["block"],
            "layer": entry["layer"], "experts": entry["experts"], "hidden": hidden, "intermediate": inner,
            "prefix": own["prefix"], "parts": self.names,
        } | ({} if bias is None else {"bias_dtype": bias})  # fmt: skip
        offsets = {name: place.offset for name, place in self.slots.items() if name not in PADS}
        expected = metadata_of(common | {"stride": self.stride, "offsets": offsets})
        stated = {key: text for key, text in metadata.items() if key.startswith("pagestone.") or key == "format"}
        need(stated == expected, f"{self.path.name}: metadata {stated}, expected {expected}")
        need(len(tensors) == self.count * len(self.slots), f"{self.path.name}: {len(tensors)} tensors")
        for expert in range(self.count):
            for slot, place in self.slots.items():
                name = f"{own['prefix']}.{expert}.{slot}"
                right = place._replace(offset=self.start + expert * self.stride + place.offset)
                need(tensors.get(name) == right, f"{self.path.name}: {name}: {tensors.get(name)}, expected {right}")
        need((entry["sidecar"] is not None) == self.codec.has_row_sums, f"{self.path.name}: {entry['sidecar']}")
        self.sums: list[Any] = [[None] * self.count] * 3
        if (side := entry["sidecar"]) is not None:
            self.sums = row_sums(root / side, metadata_of(common | {"sidecar": "row_sum"}), self.count, hidden, inner)

    def read(self, expert: int) -> bytes:
        """The record of one expert: one multiplication, one read."""
        return np.fromfile(self.path, "u1", self.stride, offset=self.start + expert * self.stride).tobytes()

    def decode(self, expert: int) -> dict[str, Any]:
        """part -> float32 [rows, columns], "<part>.bias" -> float32 [rows], after checking everything stored."""
        raw, arrays, decoded = self.read(expert), dict[str, Any](), dict[str, Any]()
        for slot, place in self.slots.items():
            arrays[slot] = stored(f"{self.path.name}: expert {expert}", slot, place, raw)
        for part, name, sums in zip(PARTS, self.names, self.sums, strict=True):
            own = {slot: array for slot, array in arrays.items() if slot.startswith(f"{name}.")}
            if (bias := own.pop(f"{name}.bias", None)) is not None:
                decoded[f"{part}.bias"] = bias.astype("<f4")
            where = f"{self.path.name}: expert {expert} {name}"
            decoded[part] = self.codec.values(where, self.parameters, sums[expert], *own.values())
        return decoded


def matrix_record(codec: Codec, parameters: Any, entry: dict[str, Any]) -> tuple[dict[str, Place], int]:
    """Everything in a dense matrix's record: as an expert's with one part, row sums in it as the last tensor."""
    need(set(entry) == MATRIX_FIELDS and min(entry["rows"], entry["columns"]) > 0, f"manifest.json: matrix {entry}")
    for key in ("squared_error", "squared_norm"):
        (total,) = np.frombuffer(bytes.fromhex(entry[key]), ">f8")
        need(total >= 0 and np.isfinite(total) and not np.signbit(total), f"manifest.json: {key} of {entry}")
    sums = [("row_sum", "I32", (entry["rows"],))] * codec.has_row_sums
    return record([codec.tensors(entry["rows"], entry["columns"], parameters) + sums], [entry["name"]], None)


def dense(root: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Every encoded dense matrix by its module, float32 [rows, columns], after checking everything stored."""
    table = manifest.get("dense", {"codec": DENSE[0], "parameters": {}, "matrices": []})
    codec, parameters, entries = CODECS[table["codec"]], table["parameters"], table["matrices"]
    need(table["codec"] in DENSE and parameters in codec.parameters, f"manifest.json: dense in {table['codec']}")
    need(len({e["name"] for e in entries}) == len(entries), "manifest.json: a dense matrix stands twice")
    files = sorted(n for n in manifest["files"] if n.startswith("matrices-") and n.endswith(".safetensors"))
    need(files == [f"matrices-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)], f"{files}")
    named = [e["file"] for e in entries]
    need(sorted(set(named)) == files and named == sorted(named), f"dense matrices in {named}, files {files}")
    need(bool(entries) == ("dense" in manifest), "manifest.json: no dense matrix")
    found: dict[str, Any] = {}
    for file in files:
        own = [e for e in entries if e["file"] == file]
        tensors, metadata, at = safetensors(root / file)
        stated = {"spec": SPEC_VERSION, "codec": table["codec"], "parameters": parameters, "matrices": len(own)}
        need(metadata == metadata_of(stated), f"{file}: metadata {metadata}")
        records = [matrix_record(codec, parameters, entry) for entry in own]
        starts = [at + sum(length for _, length in records[:n]) for n in range(len(own))]
        right = {
            f"{entry['name']}.{slot}" if slot in PADS else slot: place._replace(offset=start + place.offset)
            for entry, start, (slots, _) in zip(own, starts, records, strict=True)
            for slot, place in slots.items()
        }
        need(tensors == right, f"{file}: {sorted(tensors.items() ^ right.items())[:2]}")
        for entry, start, (slots, length) in zip(own, starts, records, strict=True):
            where, raw = f"{file}: {entry['name']}", np.fromfile(root / file, "u1", length, offset=start).tobytes()
            arrays = {slot: stored(where, slot, place, raw) for slot, place in slots.items()}
            own_arrays = [array for slot, array in arrays.items() if slot not in PADS]
            sums = own_arrays.pop() if codec.has_row_sums else None
            found[entry["name"]] = codec.values(where, parameters, sums, *own_arrays)
    return found


def read_manifest(root: Path) -> dict[str, Any]:
    raw = (root / "manifest.json").read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    need(canonical(manifest) == raw, "manifest.json: not canonical JSON")
    need(manifest.pop("digest") == xxh3(canonical(manifest)).hex(), "manifest.json: its own digest is wrong")
    need(manifest["pagestone"] != {"spec_version": "1"}, "made by an unreleased version: convert again")
    need(manifest["pagestone"] == {"spec_version": SPEC_VERSION}, f"manifest.json: version {SPEC_VERSION} expected")
    fields = set(manifest) - {"dense"}
    need(fields == MANIFEST_FIELDS, f"manifest.json: exactly the fields {sorted(MANIFEST_FIELDS)} expected")
    types = {key: type(value) for key, value in manifest["request"].items()}
    need(types == {"include_code": bool, "merge_unlisted": bool}, f"manifest.json: request {manifest['request']}")
    return manifest


def read(root: Path) -> tuple[str, list[Layer]]:
    """The container id recomputed from the files' bytes, and every layer."""
    manifest = read_manifest(root)
    codec, entries, files = manifest["codec"], manifest["layers"], manifest["files"]
    need(codec["name"] in CODECS, f"codec {codec['name']!r} expected to be one of {', '.join(sorted(CODECS))}")
    layers = {entry["file"]: Layer(root, entry, codec) for entry in entries}
    named = sorted(name for entry in entries for name in (entry["file"], entry["sidecar"]) if name)
    listed = sorted(n for n in files if n.startswith(("layers-", "mtp-")) and n.endswith(".safetensors"))
    need(named and named == listed, f"layers {named} and files {listed} do not agree")
    identity, records = b"", {}
    for name, entry in sorted(files.items()):
        need("/" not in name.removeprefix(TEMPLATES if name.endswith(".jinja") else ""), f"{name}: no plain name")
        data = (root / name).read_bytes()
        need(len(data) == entry["bytes"], f"{name}: {len(data)} bytes, expected {entry['bytes']}")
        digest = xxh3(data)
        if layer := layers.get(name):
            records[name] = b"".join(xxh3(layer.read(expert)) for expert in range(layer.count))
            digest = xxh3(xxh3(data[: layer.start]) + records[name])
        elif name.endswith(".safetensors"):
            safetensors(root / name)
        need(digest.hex() == entry["xxh3_128"], f"{name}: xxh3 {digest.hex()}, expected {entry['xxh3_128']}")
        if name != "experts.parquet":
            identity += name.encode() + b"\0" + digest
    digests = b"".join(records[entry["file"]] for entry in entries)
    need("records.xxh3" in files and (root / "records.xxh3").read_bytes() == digests, "records.xxh3: other digests")
    facts = {"codec": codec["name"], "parameters": codec["parameters"], "spec_version": SPEC_VERSION}
    if "dense" in manifest:
        facts["dense"] = {key: manifest["dense"][key] for key in ("codec", "parameters")}
    identity += canonical(facts)
    need(xxh3(identity).hex() == manifest["container_id"], "the container id is not that of the files")
    return manifest["container_id"], list(layers.values())


def main(root: Path) -> int:
    try:
        container_id, layers = read(root)
        print(container_id)
        for layer in layers:
            for expert in range(layer.count):
                layer.decode(expert)
            print(f"{layer.path.name}: {layer.count} experts of {layer.stride} bytes from byte {layer.start}: ok")
        if matrices := dense(root, read_manifest(root)):
            print(f"{len(matrices)} encoded dense matrices: ok")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        print(ascii(f"{root}: {type(error).__name__}: {error}")[1:-1], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
