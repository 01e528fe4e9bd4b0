"""A second reader of containers, written from specs/ alone: standard library, NumPy and xxhash, nothing of ours.

`python validate/plain_reader.py DIR` checks every byte a digest or a rule covers, prints the container id recomputed
from the files and a line a layer, and exits 1 at the first disagreement. A codec is one entry of `CODECS`.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

PAGE, PARTS = 4096, ("gate", "up", "down")
TYPES = {"BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "BF16": "<u2",
         "F16": "<f2", "I16": "<i2", "U16": "<u2", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F64": "<f8",
         "I64": "<i8", "U64": "<u8", "C64": "<c8"}  # fmt: skip
E4M3 = [(1.0 - 2 * (c >> 7)) * (c & 7 | 8 * (c & 120 > 0)) * 2.0 ** (max(c >> 3 & 15, 1) - 10) for c in range(256)]
Tensors = dict[str, tuple[str, tuple[int, ...], int, int]]  # name -> type, shape, offset, bytes
xxh3 = xxhash.xxh3_128_digest


def need(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(TYPES[dtype]).itemsize


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len(dict(pairs)) == len(pairs), "a JSON key stands twice")
    return dict(pairs)


def int8_values(at: str, codes: Any, scales: Any, sums: Any) -> Any:
    need((codes != -128).all(), at + "a code of -128")
    need((np.isfinite(scales) & (scales >= np.float32(2.0**-126))).all(), at + "a scale that is not finite and normal")
    need((codes.sum(axis=1, dtype=np.int32) == sums).all(), at + "a row sum that is not the sum of its codes")
    return codes.astype(np.float32) * scales


def fp8_values(at: str, codes: Any, scales: Any, _: Any) -> Any:
    scales = (scales.astype(np.uint32) << 16).view(np.float32) if scales.dtype == np.uint16 else scales
    each = scales.repeat(128, 0)[: codes.shape[0]].repeat(128, 1)[:, : codes.shape[1]]
    need((codes & 127 != 127).all(), at + "a code of 0x7F or 0xFF")
    sound = np.isfinite(each) & ((each > 0) | (each == 0) & (codes & 127 == 0))
    need(sound.all(), at + "a scale that is not finite and positive")
    return np.array(E4M3, np.float32)[codes] * each


# codec -> parameters it may have; the tensors of a matrix [r, c] in order of role; its values; whether it has a sidecar
CODECS: dict[str, tuple[Any, Any, Any, bool]] = {
    "int8": ([{}], lambda r, c, p: [("weight", "I8", (r, c)), ("weight_scale", "F32", (r, 1))], int8_values, True),
    "fp8": ([{"block": 128, "scale_dtype": "BF16"}, {"block": 128, "scale_dtype": "F32"}],
            lambda r, c, p: [("weight", "F8_E4M3", (r, c)),
                             ("weight_scale_inv", p["scale_dtype"], (-(-r // 128), -(-c // 128)))], fp8_values, False),
}  # fmt: skip


def safetensors(path: Path) -> tuple[Tensors, dict[str, str], int]:
    """Every tensor with its absolute offset, the metadata, and where the data begins."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    need(start <= min(len(raw), 100_000_008) and raw[8:9] == b"{", f"{path.name}: no safetensors file")
    table = json.loads(raw[8:start].decode(), object_pairs_hook=no_duplicates)
    meta, found = table.pop("__metadata__", {}), {}
    need(all(isinstance(v, str) for v in meta.values()), f"{path.name}: metadata holds more than strings")
    for name, entry in table.items():
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        fits = len(entry) == 3 and all(type(n) is int and n >= 0 for n in (begin, *shape))
        need(fits and end - begin == size(entry["dtype"], shape), f"{path.name}: {name}: its entry")
        found[name] = (entry["dtype"], shape, start + begin, end - begin)
    position = start
    for _, _, begin, nbytes in sorted(found.values(), key=lambda t: t[2:]):
        need(begin == position, f"{path.name}: a hole or an overlap at byte {position}")
        position += nbytes
    need(position == len(raw), f"{path.name}: {position} bytes expected, found {len(raw)}")
    need(start % PAGE == 0, f"{path.name}: data begins at byte {start}")
    return found, meta, start


def record(columns: list[list[Any]], parts: list[str]) -> tuple[Tensors, int]:
    """The tensors of one expert's record by name, and the stride; `columns`: the tensors of gate, up and down."""
    slots, at = {}, 0
    named = [(f"{p}.{c[k][0]}", *c[k][1:]) for k in range(len(columns[0])) for p, c in zip(parts, columns, strict=True)]
    for name, dtype, shape in [*named[:3], *[("pad_a", "U8", 64)] * (len(named) > 3), *named[3:], ("pad", "U8", PAGE)]:
        shape = (-at % shape,) if isinstance(shape, int) else shape
        if nbytes := size(dtype, shape):
            slots[name] = (dtype, shape, at, nbytes)
            at += nbytes
    return slots, at


class Layer:
    """One layer file and its sidecar, checked against its metadata and its entry in the manifest."""

    def __init__(self, root: Path, entry: dict[str, Any], codec: dict[str, Any]) -> None:
        self.path, name, parameters = root / entry["file"], entry["file"], codec["parameters"]
        known, make, self.values, has_sidecar = CODECS[codec["name"]]
        need(parameters in known, f"{codec['name']}: unknown parameters {parameters}")
        tensors, found, self.start = safetensors(self.path)
        meta = {k[10:]: v for k, v in found.items() if k.startswith("pagestone.")}
        self.count, h, i = int(meta["experts"]), int(meta["hidden"]), int(meta["intermediate"])
        self.names = json.loads(meta["parts"])
        self.slots, self.stride = record([make(*s, parameters) for s in ((i, h), (i, h), (h, i))], self.names)
        offsets = {slot: place[2] for slot, place in self.slots.items() if "." in slot}
        stated = {"spec": "1", "codec": codec["name"], "parameters": parameters, "block": entry["block"],
                  "layer": entry["layer"], "experts": entry["experts"], "hidden": h, "intermediate": i,
                  "stride": self.stride, "prefix": meta["prefix"], "parts": self.names, "offsets": offsets}  # fmt: skip
        texts = {k: v if isinstance(v, str) else canonical(v).decode() for k, v in stated.items()}
        need(meta == texts and found["format"] == "pt", f"{name}: metadata {meta}, expected {texts}")
        need(len(tensors) == self.count * len(self.slots), f"{name}: {len(tensors)} tensors")
        wanted = {f"{meta['prefix']}.{e}.{slot}": (dtype, shape, self.start + e * self.stride + at, nbytes)
                  for e in range(self.count) for slot, (dtype, shape, at, nbytes) in self.slots.items()}  # fmt: skip
        need(tensors == wanted, f"{name}: its tensors are not those its metadata prescribes")
        need((entry["sidecar"] is not None) == has_sidecar, f"{name}: sidecar {entry['sidecar']}")
        self.sums = [[None] * self.count] * 3
        if has_sidecar:
            tensors, other, at = safetensors(side := root / entry["sidecar"])
            moved = {"pagestone.stride": texts["stride"], "pagestone.offsets": texts["offsets"]}
            mine = other | moved == found | {"pagestone.sidecar": "row_sum"} and len(other) == len(found) - 1
            need(mine, f"{side.name}: it belongs to another layer")
            a, b, middle = (self.count, 2 * i), (self.count, h), at + 8 * self.count * i
            named = {"gate_up_proj.row_sum": (a, at), "down_proj.row_sum": (b, middle)}
            need(tensors == {n: ("I32", s, p, size("I32", s)) for n, (s, p) in named.items()}, f"{side.name}: tensors")
            gate_up = np.fromfile(side, "<i4", math.prod(a), offset=at).reshape(a)
            self.sums = [gate_up[:, :i], gate_up[:, i:], np.fromfile(side, "<i4", offset=middle).reshape(b)]  # type: ignore[list-item]

    def read(self, expert: int) -> bytes:
        """The record of one expert: one multiplication, one read."""
        return np.fromfile(self.path, "u1", self.stride, offset=self.start + expert * self.stride).tobytes()

    def decode(self, expert: int) -> dict[str, Any]:
        """part -> float32 [rows, columns], after checking codes, scales, row sums and pads."""
        raw, place, result = self.read(expert), f"{self.path.name}: expert {expert}", {}
        arrays = {n: np.frombuffer(raw[at : at + k], TYPES[t]).reshape(s) for n, (t, s, at, k) in self.slots.items()}
        need(not any(arrays[p].any() for p in ("pad_a", "pad") if p in arrays), f"{place}: a pad is not zero")
        for part, name, sums in zip(PARTS, self.names, self.sums, strict=True):
            own = [array for slot, array in arrays.items() if slot.startswith(name + ".")]
            result[part] = self.values(f"{place} {name}: ", *own, sums[expert])
        return result


def read(root: Path) -> tuple[str, list[Layer]]:
    """The container id recomputed from the files' bytes, and every layer."""
    manifest = json.loads(raw := (root / "manifest.json").read_bytes())
    need(canonical(manifest) == raw, "manifest.json: not canonical JSON")
    need(manifest["pagestone"] == {"spec_version": "1"}, f"spec version {manifest['pagestone']}")
    need(manifest.pop("digest") == xxh3(canonical(manifest)).hex(), "manifest.json: its own digest is wrong")
    fields = ["codec", "container_id", "files", "layers", "lossless", "pagestone", "partial", "source"]
    need(sorted(manifest) == fields, f"manifest.json: exactly the fields {fields} expected")
    layers = {e["file"]: Layer(root, e, manifest["codec"]) for e in manifest["layers"]}
    named = sorted(n for e in manifest["layers"] for n in (e["file"], e["sidecar"]) if n)
    listed = [n for n in sorted(manifest["files"]) if n.startswith(("layers-", "mtp-")) and n.endswith(".safetensors")]
    need(named and named == listed, f"layers {named} and files {listed} do not agree")
    hashed = b""
    for name, entry in sorted(manifest["files"].items()):
        data = (root / name).read_bytes()
        need("/" not in name and len(data) == entry["bytes"], f"{name}: {entry['bytes']} bytes expected")
        if layer := layers.get(name):
            data = xxh3(data[: layer.start]) + b"".join(xxh3(layer.read(e)) for e in range(layer.count))
        elif name.endswith(".safetensors"):
            safetensors(root / name)
        need(xxh3(data).hex() == entry["xxh3_128"], f"{name}: xxh3 {entry['xxh3_128']}, found {xxh3(data).hex()}")
        hashed += b"" if name == "experts.parquet" else name.encode() + b"\0" + xxh3(data)
    codec = manifest["codec"]
    hashed += canonical({"codec": codec["name"], "parameters": codec["parameters"], "spec_version": "1"})
    need(xxh3(hashed).hex() == manifest["container_id"], "the container id is not that of the files")
    return xxh3(hashed).hex(), list(layers.values())


def main(root: Path) -> int:
    try:
        container, layers = read(root)
        print(container)
        for layer in layers:
            all(layer.decode(expert) for expert in range(layer.count))
            print(f"{layer.path.name}: {layer.count} experts of {layer.stride} bytes from byte {layer.start}: ok")
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        print(f"{root}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
