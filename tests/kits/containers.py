"""What a container must be, recomputed from the source by the definition alone: no kernel, no pipeline, no plan.

Only the codec's NumPy definition, the layout and the digests are taken from `pagestone.formats`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats import encodings
from pagestone.formats.dtypes import VIEWS, to_f32
from pagestone.formats.layout import PARTS, ExpertShape, align_up, record_layout

EXPERTS = re.compile(r"(?P<layer>.+)\.(?P<number>\d+)\.mlp\.experts\.(?P<rest>.+)")


def read_table(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header as it stands, and where the data begins."""
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        table = json.loads(handle.read(length))
    return table, 8 + length


class Source:
    """Tensors of a checkpoint by name, read one by one and straight from its files."""

    def __init__(self, root: Path) -> None:
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(root.glob("*.safetensors")):
            table, start = read_table(file)
            for name, entry in table.items():
                if name != "__metadata__":
                    self._places[name] = (file, start, entry)

    def __iter__(self) -> Iterable[str]:
        return iter(self._places)

    def entry(self, name: str) -> tuple[str, list[int]]:
        """Element type and shape."""
        entry = self._places[name][2]
        return entry["dtype"], entry["shape"]

    def bytes(self, name: str, index: int | None = None) -> bytes:
        """The bytes of a tensor, or of its `index`-th slice along the first axis."""
        file, start, entry = self._places[name]
        begin, end = entry["data_offsets"]
        if index is not None:
            size = (end - begin) // entry["shape"][0]
            begin, end = begin + index * size, begin + (index + 1) * size
        with file.open("rb") as handle:
            handle.seek(start + begin)
            return handle.read(end - begin)

    def weight(self, name: str, index: int | None = None) -> np.ndarray:
        """A float tensor (or slice) as float32."""
        dtype, shape = self.entry(name)
        array = np.frombuffer(self.bytes(name, index), VIEWS[dtype])
        return to_f32(array, dtype).reshape(shape if index is None else shape[1:])

    def expert(self, prefix: str, expert: int) -> dict[str, np.ndarray]:
        """gate, up and down of one expert as float32; `prefix` is the name of the experts module."""
        if f"{prefix}.gate_up_proj" not in self._places:
            return {p: self.weight(f"{prefix}.{expert}.{p}_proj.weight") for p in PARTS}
        both = self.weight(f"{prefix}.gate_up_proj", expert)
        half = both.shape[0] // 2
        return {"gate": both[:half], "up": both[half:], "down": self.weight(f"{prefix}.down_proj", expert)}

    def modules(self) -> dict[str, int]:
        """Every experts module and its number of experts."""
        found: dict[str, set[int]] = {}
        for name in self._places:
            if match := EXPERTS.fullmatch(name):
                ids = found.setdefault(name[: -len(match["rest"]) - 1], set())
                number = match["rest"].split(".")[0]
                ids.update([int(number)] if number.isdigit() else range(self.entry(name)[1][0]))
        return {prefix: len(ids) for prefix, ids in found.items()}


def read_i32(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a sidecar."""
    table, start = read_table(path)
    raw = path.read_bytes()
    return {
        name: np.frombuffer(raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]], "<i4").reshape(e["shape"])
        for name, e in table.items()
        if name != "__metadata__"
    }


def defined_record(codec_name: str, matrices: dict[str, np.ndarray]) -> tuple[bytes, dict[str, np.ndarray]]:
    """One expert's record by the definition, and the row sums of its parts (empty if the codec has none)."""
    codec = encodings.get(codec_name)
    rows, columns = matrices["gate"].shape
    layout = record_layout(codec, ExpertShape(columns, rows))
    record, sums = bytearray(layout.stride), {}
    for part in PARTS:
        out = codec.allocate(*matrices[part].shape)
        codec.encode_definition(np.ascontiguousarray(matrices[part]), out)
        for slot in layout.of_part(part):
            record[slot.offset : slot.offset + slot.nbytes] = out[slot.role].tobytes()
        if "row_sums" in out:
            sums[part] = out["row_sums"]
    return bytes(record), sums


def file_of(prefix: str) -> str:
    """The layer file of an experts module (fewer than a hundred layers)."""
    block = "mtp" if prefix.startswith("mtp.") else "layers"
    return f"{block}-{int(prefix.split('layers.')[1].split('.')[0]):02d}.safetensors"


def assert_is_definition(
    container: Path, source: Path, codec: str, *, only: Iterable[tuple[str, int]] | None = None
) -> int:
    """Every record and row sum (or those of `only`, (module, expert)) equals the definition; returns how many."""
    tensors = Source(source)
    wanted = only or [(prefix, e) for prefix, count in tensors.modules().items() for e in range(count)]
    checked = 0
    for prefix, expert in wanted:
        record, sums = defined_record(codec, tensors.expert(prefix, expert))
        path = container / file_of(prefix)
        _, start = read_table(path)
        assert start % 4096 == 0 and len(record) == align_up(len(record), 4096)
        with path.open("rb") as handle:
            handle.seek(start + expert * len(record))
            assert handle.read(len(record)) == record, f"{path.name}: expert {expert} is not what the definition gives"
        if sums:
            side = read_i32(container / path.name.replace(".safetensors", ".rowsum.safetensors"))
            both = np.concatenate([sums["gate"], sums["up"]])
            assert np.array_equal(side["gate_up_proj.row_sum"][expert], both), (path.name, expert)
            assert np.array_equal(side["down_proj.row_sum"][expert], sums["down"]), (path.name, expert)
        checked += 1
    return checked


def container_id(container: Path) -> str:
    """The id in a manifest."""
    return str(json.loads((container / "manifest.json").read_bytes())["container_id"])


def contents(container: Path) -> dict[str, bytes]:
    """Every file of a small container by name."""
    return {p.name: p.read_bytes() for p in sorted(container.iterdir()) if p.is_file()}
