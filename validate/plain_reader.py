"""A second reader of containers, written from specs/ alone: standard library, NumPy and xxhash, nothing of ours.

`python validate/plain_reader.py DIR` checks every byte a digest or a rule covers, prints the container id recomputed
from the files and a line a layer, and exits 1 at the first disagreement. A codec is one entry of `CODECS`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest as xxh3

PAGE, PARTS, FLOATS = 4096, ("gate", "up", "down"), ("BF16", "F16", "F32")
TYPES = {"BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "BF16": "<u2",
         "F16": "<f2", "I16": "<i2", "U16": "<u2", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F64": "<f8",
         "I64": "<i8", "U64": "<u8", "C64": "<c8"}  # fmt: skip
FIELDS = "codec container_id files layers lossless pagestone partial request source"
E4M3 = [(1.0 - 2 * (c >> 7)) * (c & 7 | 8 * (c & 120 > 0)) * 2.0 ** (max(c >> 3 & 15, 1) - 10) for c in range(256)]
Tensors = dict[str, tuple[str, tuple[int, ...], int, int]]  # name -> type, shape, offset, bytes


def need(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len(dict(pairs)) == len(pairs), "a JSON key stands twice")
    return dict(pairs)


def int8_values(at: str, _: Any, sums: Any, codes: Any, scales: Any) -> Any:
    need((codes != -128).all() and (scales >= np.float32(2.0**-126)).all(), at + "a forbidden code or scale")
    need((codes.sum(axis=1, dtype=np.int32) == sums).all(), at + "a row sum that is not the sum of its codes")
    return codes.astype(np.float32) * scales


def fp8_values(at: str, _p: Any, _s: Any, codes: Any, scales: Any) -> Any:
    each = scales.repeat(128, 0)[: codes.shape[0]].repeat(128, 1)[:, : codes.shape[1]]
    sound = (codes & 127 != 127) & ((each > 0) | (each == 0) & (codes & 127 == 0))
    need(sound.all(), at + "a forbidden code or scale")
    with np.errstate(over="ignore"):
        values = np.array(E4M3, np.float32)[codes] * each
    need(np.isfinite(values).all(), at + "a product that is not finite")
    return values


def affine_values(_at: str, p: Any, _s: Any, codes: Any, scales: Any, biases: Any) -> Any:
    scale, bias = (array.repeat(p["group_size"], axis=1) for array in (scales, biases))
    stream = np.unpackbits(codes.view("u1"), axis=1, bitorder="little").reshape(*scale.shape, -1)
    return scale * (stream << np.arange(stream.shape[2])).sum(axis=2).astype(np.float32) + bias


# codec -> parameters it may have; the tensors of a matrix [r, c] in order of role; its values; whether it has a sidecar
CODECS: dict[str, tuple[Any, Any, Any, bool]] = {
    "bf16": ([{}], lambda r, c, p: [("weight", "BF16", (r, c))], lambda _at, _p, _s, codes: codes, False),
    "int8": ([{}], lambda r, c, p: [("weight", "I8", (r, c)), ("weight_scale", "F32", (r, 1))], int8_values, True),
    "fp8": ([{"block": 128, "scale_dtype": s} for s in ("BF16", "F32")], lambda r, c, p: [
        ("weight", "F8_E4M3", (r, c)), ("weight_scale_inv", p["scale_dtype"], (-(-r // 128), -(-c // 128)))
    ], fp8_values, False),
} | {f"q{n}": ([{"group_size": 64}, {"group_size": 32}], lambda r, c, p, n=n: [
        ("weight", "U32", (r, c * n // 32)), *((s, "BF16", (r, c // p["group_size"])) for s in ("scales", "biases"))
    ], affine_values, False) for n in (3, 4)}  # fmt: skip


def safetensors(path: Path) -> tuple[Tensors, dict[str, str], int]:
    """Every tensor with its absolute offset, the metadata, and where the data begins."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    need(start <= min(len(raw), 100_000_008) and raw[8:9] == b"{", f"{path.name}: no safetensors file")
    table = json.loads(raw[8:start].decode(), object_pairs_hook=no_duplicates)
    meta, found, position = table.pop("__metadata__", {}), {}, start
    need(all(isinstance(v, str) for v in meta.values()), f"{path.name}: metadata holds more than strings")
    for name, entry in table.items():
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        fits = len(entry) == 3 and all(type(n) is int and n >= 0 for n in (begin, *shape))
        need(fits and end - begin == math.prod(shape) * np.dtype(TYPES[entry["dtype"]]).itemsize, f"{path}: {name}")
        found[name] = (entry["dtype"], shape, start + begin, end - begin)
    for _, _, begin, nbytes in sorted(found.values(), key=lambda t: t[2:]):
        need(begin == position, f"{path.name}: a hole or an overlap at byte {position}")
        position += nbytes
    need(position == len(raw) and start % PAGE == 0, f"{path.name}: data from byte {start} to {position} of {len(raw)}")
    return found, meta, start


def record(tensors: list[list[Any]], parts: list[str], bias: Any) -> tuple[Tensors, int]:
    """The tensors of one expert's record by name, and the stride; `tensors`: those of gate, up and down."""
    named = [(f"{p}.{o[k][0]}", *o[k][1:]) for k in range(len(tensors[0])) for p, o in zip(parts, tensors, strict=True)]
    named[3:] = [("pad_a", "U8", 64)] * (len(named) > 3) + named[3:]
    named += [(f"{part}.bias", bias, own[0][2][:1]) for part, own in zip(parts, tensors, strict=True) if bias]
    slots, at = {}, 0
    for name, dtype, shape in [*named, ("pad", "U8", PAGE)]:
        shape = (-at % shape,) if isinstance(shape, int) else shape
        if nbytes := math.prod(shape) * np.dtype(TYPES[dtype]).itemsize:
            slots[name] = (dtype, shape, at, nbytes)
            at += nbytes
    return slots, at


class Layer:
    """One layer file and its sidecar, checked against its metadata and its entry in the manifest."""

    def __init__(self, root: Path, entry: dict[str, Any], codec: dict[str, Any]) -> None:
        self.path, name, p = root / entry["file"], entry["file"], codec["parameters"]
        need(codec["name"] in CODECS, f"codec {codec['name']!r} expected to be one of {', '.join(sorted(CODECS))}")
        known, make, self.values, has_sidecar = CODECS[codec["name"]]
        tensors, found, self.start = safetensors(self.path)
        meta = {k[10:]: v for k, v in found.items() if k.startswith("pagestone.")}
        self.count, h, i, self.parameters = int(meta["experts"]), int(meta["hidden"]), int(meta["intermediate"]), p
        self.names, bias = json.loads(meta["parts"]), meta.get("bias_dtype")
        sound = p in known and bias in (None, *FLOATS) and h % p.get("group_size", 1) == i % p.get("group_size", 1) == 0
        need(sound, f"{name}: parameters {p}, biases of type {bias}, rows of {h} and {i} elements")
        self.slots, self.stride = record([make(*s, p) for s in ((i, h), (i, h), (h, i))], self.names, bias)
        offsets = {slot: place[2] for slot, place in self.slots.items() if "." in slot}
        stated = {"spec": "2", "codec": codec["name"], "parameters": p, "block": entry["block"], "hidden": h,
                  "layer": entry["layer"], "experts": entry["experts"], "intermediate": i, "stride": self.stride,
                  "prefix": meta["prefix"], "parts": self.names, "offsets": offsets, "bias_dtype": bias}  # fmt: skip
        texts = {k: v if isinstance(v, str) else canonical(v).decode() for k, v in stated.items() if v is not None}
        agrees = meta == texts and found["format"] == "pt" and len(tensors) == self.count * len(self.slots)
        need(agrees, f"{name}: {len(tensors)} tensors and metadata {meta}, expected {texts}")
        wanted = {f"{meta['prefix']}.{e}.{slot}": (dtype, shape, self.start + e * self.stride + at, nbytes)
                  for e in range(self.count) for slot, (dtype, shape, at, nbytes) in self.slots.items()}  # fmt: skip
        need(tensors == wanted, f"{name}: its tensors are not those its metadata prescribes")
        need((entry["sidecar"] is not None) == has_sidecar, f"{name}: sidecar {entry['sidecar']}")
        self.sums: Any = [[None] * self.count] * 3
        if has_sidecar:
            tensors, other, at = safetensors(side := root / entry["sidecar"])
            mine = {f"pagestone.{k}": v for k, v in texts.items() if k not in ("stride", "offsets")} | {"format": "pt"}
            need(other == mine | {"pagestone.sidecar": "row_sum"}, f"{side.name}: its metadata are not its layer's")
            a, b, middle = (self.count, 2 * i), (self.count, h), at + 8 * self.count * i
            place = {"gate_up_proj": ("I32", a, at, middle - at), "down_proj": ("I32", b, middle, 4 * math.prod(b))}
            need(tensors == {f"{n}.row_sum": entry for n, entry in place.items()}, f"{side.name}: tensors")
            gate_up, down = np.split(np.fromfile(side, "<i4", offset=at), [math.prod(a)])
            self.sums = [*np.split(gate_up.reshape(a), 2, axis=1), down.reshape(b)]

    def read(self, expert: int) -> bytes:
        """The record of one expert: one multiplication, one read."""
        return np.fromfile(self.path, "u1", self.stride, offset=self.start + expert * self.stride).tobytes()

    def decode(self, expert: int) -> dict[str, Any]:
        """part -> float32 [rows, columns], "<part>.bias" -> float32 [rows], after checking everything stored."""
        raw, place, result, arrays = self.read(expert), f"{self.path.name}: expert {expert}", {}, {}
        for slot, (dtype, shape, at, nbytes) in self.slots.items():
            array = np.frombuffer(raw[at : at + nbytes], TYPES[dtype]).reshape(shape)
            arrays[slot] = (array.astype("<u4") << 16).view("<f4") if dtype == "BF16" else array
            need(dtype not in FLOATS or np.isfinite(arrays[slot]).all(), f"{place} {slot}: a value that is not finite")
        need(not any(arrays[p].any() for p in ("pad_a", "pad") if p in arrays), f"{place}: a pad is not zero")
        for n, (part, name) in enumerate(zip(PARTS, self.names, strict=True)):
            own = {slot.removeprefix(name): array for slot, array in arrays.items() if slot.startswith(name + ".")}
            result.update({part + ".bias": own.pop(".bias").astype("<f4")} if ".bias" in own else {})
            result[part] = self.values(f"{place} {name}: ", self.parameters, self.sums[n][expert], *own.values())
        return result


def read(root: Path) -> tuple[str, list[Layer]]:
    """The container id recomputed from the files' bytes, and every layer."""
    manifest = json.loads(raw := (root / "manifest.json").read_bytes())
    need(canonical(manifest) == raw, "manifest.json: not canonical JSON")
    need(manifest.pop("digest") == xxh3(canonical(manifest)).hex(), "manifest.json: its own digest is wrong")
    need(manifest["pagestone"] != {"spec_version": "1"}, "made by an unreleased version: convert again")
    known = " ".join(sorted(manifest)) == FIELDS and manifest["pagestone"] == {"spec_version": "2"}
    need(known, f"manifest.json: spec version 2 with exactly the fields {FIELDS} expected")
    request = {key: type(value) for key, value in manifest["request"].items()}
    need(request == {"include_code": bool, "merge_unlisted": bool}, "manifest.json: another request")
    layers = {e["file"]: Layer(root, e, manifest["codec"]) for e in manifest["layers"]}
    named = sorted(n for e in manifest["layers"] for n in (e["file"], e["sidecar"]) if n)
    listed = [n for n in sorted(manifest["files"]) if n.startswith(("layers-", "mtp-")) and n.endswith(".safetensors")]
    need(named and named == listed, f"layers {named} and files {listed} do not agree")
    hashed, codec, records = b"", manifest["codec"], {}
    for name, entry in sorted(manifest["files"].items()):
        data, more = (root / name).read_bytes(), "additional_chat_templates/" * name.endswith(".jinja")
        need("/" not in name.removeprefix(more) and len(data) == entry["bytes"], f"{name}: {entry['bytes']} bytes")
        if layer := layers.get(name):
            records[name] = b"".join(xxh3(layer.read(e)) for e in range(layer.count))
            data = xxh3(data[: layer.start]) + records[name]
        elif name.endswith(".safetensors"):
            safetensors(root / name)
        need(xxh3(data).hex() == entry["xxh3_128"], f"{name}: xxh3 {entry['xxh3_128']}, found {xxh3(data).hex()}")
        hashed += b"" if name == "experts.parquet" else name.encode() + b"\0" + xxh3(data)
    digests = b"".join(records[e["file"]] for e in manifest["layers"])
    need((root / "records.xxh3").read_bytes() == digests and "records.xxh3" in manifest["files"], "records.xxh3")
    hashed += canonical({"codec": codec["name"], "parameters": codec["parameters"], "spec_version": "2"})
    need(xxh3(hashed).hex() == manifest["container_id"], "the container id is not that of the files")
    return manifest["container_id"], list(layers.values())


def main(root: Path) -> int:
    try:
        container, layers = read(root)
        print(container)
        for layer in layers:
            all(layer.decode(expert) for expert in range(layer.count))
            print(f"{layer.path.name}: {layer.count} experts of {layer.stride} bytes from byte {layer.start}: ok")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        print(ascii(f"{root}: {type(error).__name__}: {error}")[1:-1], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
