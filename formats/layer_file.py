"""A layer file and its row-sum sidecar: safetensors files with promises (specs/container.md, "A layer file").

`LayerHeader` says what a file holds; its header is built from that and nothing else. `read_layer_file` does the
reverse and refuses any file whose table of tensors is not exactly the one its metadata prescribes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagestone.formats import encodings, strict_json
from pagestone.formats.digests import canonical_json
from pagestone.formats.dtypes import Array, item_size
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import DataError, LayoutError, RequestError
from pagestone.formats.layout import (
    BESIDE,
    PAGE,
    PART_NAMES,
    PARTS,
    ExpertShape,
    LayerLayout,
    checked_roles,
    layer_entries,
    record_layout,
)
from pagestone.formats.safetensors_header import (
    MAX_HEADER,
    Header,
    TensorEntry,
    build_header,
    framed,
    parse_header,
    read_header,
    read_text,
)
from pagestone.formats.storage import AnyPlace, Place, place_of
from pagestone.formats.strict_json import brief

SPEC_VERSION = "2"
UNRELEASED = ("1",)
"""Versions that only unreleased programs wrote."""
KEY = "pagestone."
PAIR = "gate_up"
"""gate and up in one tensor, as they stand in a sidecar and in the reader's fused matrix."""
BLOCKS = ("layers", "mtp")
"""What a layer file belongs to: the decoder, or the multi-token-prediction block."""


@dataclass(frozen=True, slots=True)
class LayerHeader:
    """Everything a layer file's header is made from.

    `prefix` is the full name of the experts module (`model.layers.3.mlp.experts`); `part_names` are the names of
    gate, up and down below an expert; `count` is the number of experts.
    """

    codec: Codec
    block: str
    layer: int
    prefix: str
    shape: ExpertShape
    count: int
    part_names: tuple[str, str, str] = PART_NAMES

    def metadata(self) -> dict[str, str]:
        """The header's `__metadata__`: strings only, as safetensors prescribes."""
        record = record_layout(self.codec, self.shape)
        offsets = {
            f"{self.part_names[PARTS.index(s.part)]}.{s.suffix}": s.offset for s in record.slots if s.part is not None
        }
        meta = {
            "format": "pt",
            f"{KEY}spec": SPEC_VERSION,
            f"{KEY}codec": self.codec.name,
            f"{KEY}parameters": canonical_json(self.codec.parameters).decode(),
            f"{KEY}block": self.block,
            f"{KEY}layer": str(self.layer),
            f"{KEY}experts": str(self.count),
            f"{KEY}hidden": str(self.shape.hidden),
            f"{KEY}intermediate": str(self.shape.intermediate),
            f"{KEY}stride": str(record.stride),
            f"{KEY}prefix": self.prefix,
            f"{KEY}parts": canonical_json(list(self.part_names)).decode(),
            f"{KEY}offsets": canonical_json(offsets).decode(),
        }
        if self.shape.bias_dtype is not None:
            meta[f"{KEY}bias_dtype"] = self.shape.bias_dtype
        return meta

    def head(self, limit: int = MAX_HEADER) -> bytes:
        """All bytes before the first record; their length is a multiple of 4096.

        Raises `LayoutError` for a header longer than `limit` bytes, and for what `record_layout` refuses.
        """
        text = b"".join(self._text())
        return framed(text, self.count * len(record_layout(self.codec, self.shape).slots), PAGE, limit)

    def _text(self) -> Iterator[bytes]:
        """The JSON of the header in pieces: the metadata, then a piece an expert, then its end.

        The same as `build_header` makes of `layer_entries`. One expert's entries are those of another but for numbers,
        so no entry is made one by one: a large layer has thousands, and opening it compares them all.
        """
        record = record_layout(self.codec, self.shape)
        yield b'{"__metadata__":' + _compact(self.metadata()).encode()
        prefix, template = _compact(self.prefix)[1:-1].replace("%", "%%"), ""
        for slot in record.slots:
            part = "" if slot.part is None else self.part_names[PARTS.index(slot.part)] + "."
            name = _compact(part + slot.suffix)[1:-1].replace("%", "%%")
            template += f',"{prefix}.%d.{name}":{{"dtype":"{slot.dtype}","shape":{_compact(slot.shape)},'
            template += '"data_offsets":[%d,%d]}'
        spans = [(slot.offset, slot.offset + slot.nbytes) for slot in record.slots]
        for expert in range(self.count):
            base = expert * record.stride
            yield (template % tuple(n for b, e in spans for n in (expert, base + b, base + e))).encode()
        yield b"}"

    def is_head(self, text: bytes) -> bool:
        """Whether the bytes after a header's length are those that `head` makes; they are looked at one piece a time.

        No more is made than there is to compare: a prefix and a count from a file may promise any amount.
        """
        at = 0
        for piece in self._text():
            if not text.startswith(piece, at):
                return False
            at += len(piece)
        return text[at:] == b" " * (-(8 + at) % PAGE)

    def layout(self, data_start: int | None = None) -> LayerLayout:
        """Where the records lie; `data_start` as found in a file, or as `head` makes it."""
        start = len(self.head()) if data_start is None else data_start
        return LayerLayout(record_layout(self.codec, self.shape), self.count, start)

    # -- the sidecar ---------------------------------------------------------------------------------------------

    def sidecar_tensors(self) -> tuple[SidecarTensor, ...]:
        """What lies beside the records, role by role; empty if nothing does. Raises what `checked_roles` raises."""
        roles = checked_roles(self.codec, self.shape)
        tensors = []
        for gate, up, down in zip(*(roles[part] for part in PARTS), strict=True):
            if gate.place == BESIDE:
                both = (self.count, gate.shape[0] + up.shape[0], *gate.shape[1:])
                tensors += [
                    SidecarTensor(PAIR, gate.name, f"gate_up_proj.{gate.suffix}", gate.dtype, both),
                    SidecarTensor("down", down.name, f"down_proj.{down.suffix}", down.dtype, (self.count, *down.shape)),
                ]
        return tuple(tensors)

    def sidecar_metadata(self) -> dict[str, str]:
        """The metadata of the sidecar: the layer's own without stride and offsets, and what is in it."""
        meta = {k: v for k, v in self.metadata().items() if k not in (f"{KEY}offsets", f"{KEY}stride")}
        roles = checked_roles(self.codec, self.shape)["gate"]
        return meta | {f"{KEY}sidecar": ",".join(role.suffix for role in roles if role.place == BESIDE)}

    def sidecar_entries(self, start: int = 0) -> list[TensorEntry]:
        """The table of the sidecar, its data beginning at `start`."""
        entries, position = [], start
        for tensor in self.sidecar_tensors():
            entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, position, tensor.nbytes))
            position += tensor.nbytes
        return entries

    def sidecar_head(self, limit: int = MAX_HEADER) -> bytes:
        """All bytes of the sidecar file before its data, which begin at a multiple of 4096; see `head`."""
        entries = [(e.name, e.dtype, e.shape, e.offset, e.offset + e.nbytes) for e in self.sidecar_entries()]
        return build_header(entries, self.sidecar_metadata(), PAGE, limit)


def other_version(found: Any) -> tuple[str, str]:
    """What is wrong with a version that is not `SPEC_VERSION`, and what to do about it."""
    message = f"spec version {SPEC_VERSION} expected, found {brief(found)}"
    if found in UNRELEASED:
        return f"{message}: made by an unreleased version", "convert again"
    return message, "use a version of pagestone that knows it, or convert again"


def _compact(value: Any) -> str:
    """JSON as headers have it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class SidecarTensor:
    """One tensor of a sidecar: what lies beside the record of every expert, [experts, rows, ...].

    `part` is "down" or "gate_up": these stand side by side in one tensor, as their rows do in a record. `role` is the
    name of the role.
    """

    part: str
    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)


Beside = Mapping[tuple[str, str], Array]
"""The arrays of a sidecar by part ("gate_up", "down") and role."""


def beside_of(arrays: Beside, expert: int, part: str) -> dict[str, Array]:
    """What a sidecar holds of one matrix, by role: views; `part` is one of `PARTS`, or "gate_up" for both."""
    of_matrix = {}
    for (place, role), array in arrays.items():
        own = array[expert]
        if place == part:
            of_matrix[role] = own
        elif place == PAIR and part in PARTS[:2]:
            of_matrix[role] = own[len(own) // 2 * PARTS.index(part) :][: len(own) // 2]
    return of_matrix


def layer_file_name(block: str, layer: int, width: int = 2) -> str:
    """`layers-07.safetensors`, `mtp-00.safetensors`; numbers have at least two digits."""
    return f"{block}-{layer:0{max(2, width)}d}.safetensors"


def sidecar_name(layer_file: str) -> str:
    """`layers-07.rowsum.safetensors` for `layers-07.safetensors`."""
    return layer_file.removesuffix(".safetensors") + ".rowsum.safetensors"


def _not_understood(message: str, file: Place) -> DataError:
    remedy = "the file was altered, or was written by a newer version: use that version, or convert again"
    return DataError(message, code="E0221", file=file, remedy=remedy)


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Metadata of the header of `file`; everything raises `DataError` where it is not what it must be."""

    stored: Mapping[str, str]
    file: Place

    def text(self, key: str) -> str:
        if KEY + key not in self.stored:
            raise _not_understood(f"metadata {KEY + key} expected, found none", self.file)
        return self.stored[KEY + key]

    def number(self, key: str, least: int) -> int:
        word = self.text(key)
        if not word.isascii() or not word.isdigit() or len(word) > 12 or int(word) < least or str(int(word)) != word:
            message = f"metadata {KEY + key} expected to be an integer of at least {least}, found {brief(word)}"
            raise _not_understood(message, self.file)
        return int(word)

    def one_of(self, key: str, allowed: tuple[str, ...]) -> str:
        word = self.text(key)
        if word not in allowed:
            words = f"{key} expected to be one of {', '.join(allowed)}, found {brief(word)}"
            raise _not_understood(words, self.file)
        return word

    def json(self, key: str) -> Any:
        try:
            return strict_json.loads(self.text(key))
        except ValueError as error:
            raise _not_understood(f"metadata is not the JSON expected: {error}", self.file) from None

    def part_names(self) -> tuple[str, str, str]:
        parts = self.json("parts")
        if not isinstance(parts, list) or not all(isinstance(p, str) and p and "." not in p for p in parts):
            raise _not_understood(f"part names without dots expected, found {brief(parts)}", self.file)
        if len(parts) != 3 or len(set(parts)) != 3:
            raise _not_understood(f"three different part names expected, found {brief(parts)}", self.file)
        return parts[0], parts[1], parts[2]

    def parameters(self) -> dict[str, Any]:
        parameters = self.json("parameters")
        if not isinstance(parameters, dict):
            raise _not_understood(f"codec parameters expected as an object, found {brief(parameters)}", self.file)
        return parameters

    def bias_dtype(self) -> str | None:
        bias = self.stored.get(KEY + "bias_dtype")
        if bias not in (None, "BF16", "F16", "F32"):
            raise _not_understood(f"bias type BF16, F16 or F32 expected, found {brief(bias)}", self.file)
        return bias


def _described(stored: Mapping[str, str], file: Place) -> LayerHeader:
    """The `LayerHeader` that a header's metadata state; raises `DataError` where they are not understood."""
    meta = _Metadata(stored, file)
    if meta.text("spec") != SPEC_VERSION:
        raise _not_understood(other_version(meta.text("spec"))[0], file)
    block, part_names = meta.one_of("block", BLOCKS), meta.part_names()
    parameters, bias = meta.parameters(), meta.bias_dtype()
    try:
        described = LayerHeader(
            codec=encodings.get(meta.text("codec"), parameters),
            block=block,
            layer=meta.number("layer", 0),
            prefix=meta.text("prefix"),
            shape=ExpertShape(meta.number("hidden", 1), meta.number("intermediate", 1), bias),
            count=meta.number("experts", 1),
            part_names=part_names,
        )
        must = described.sidecar_metadata() if KEY + "sidecar" in stored else described.metadata()
    except (RequestError, LayoutError) as error:
        raise _not_understood(error.message, file) from None
    except ValueError as error:  # half a surrogate pair
        raise _not_understood(f"metadata is not Unicode text: {error}", file) from None
    for key in [*must, *(k for k in stored if k.startswith(KEY))]:
        if stored.get(key) != must.get(key):
            words = f"metadata {key} expected to be {must.get(key, 'absent')}, found {stored.get(key, 'none')}"
            raise _not_understood(words, file)
    return described


def _check_table(header: Header, wanted: list[TensorEntry], file: Place) -> None:
    remedy = "the file was altered: restore it, or convert again"
    by_name = {e.name: e for e in header.entries}
    names = {e.name for e in wanted}
    for entry in wanted:
        if entry.name not in by_name:
            raise DataError("tensor expected, found none", code="E0222", file=file, tensor=entry.name, remedy=remedy)
        if by_name[entry.name] != entry:
            have = by_name[entry.name]
            raise DataError(
                f"{entry.dtype} {list(entry.shape)} at byte {entry.offset} expected, "
                f"found {have.dtype} {list(have.shape)} at byte {have.offset}",
                code="E0223",
                file=file,
                tensor=entry.name,
                remedy=remedy,
            )
    for name in by_name:
        if name not in names:
            raise DataError("no such tensor expected in this file", code="E0224", file=file, tensor=name, remedy=remedy)


def _entries(triples: Any, data_start: int) -> list[TensorEntry]:
    return [TensorEntry(n, d, tuple(s), data_start + b, e - b) for n, d, s, b, e in triples]


def _aligned(header: Header, file: Place) -> None:
    if header.data_start % PAGE:
        raise DataError(
            f"data at a multiple of {PAGE} expected, found it at byte {header.data_start}",
            code="E0225",
            file=file,
            remedy="another program rewrote this file: convert again",
        )


def read_layer_file(path: AnyPlace) -> tuple[LayerHeader, LayerLayout]:
    """What a layer file holds and where, after checking its table against its metadata completely.

    Raises `DataError` (E02xx) naming file and tensor for an unknown version or codec, a name that is missing or left
    over, or a tensor of another type, shape or place than the metadata implies.
    """
    file = place_of(path)
    text, size = read_text(file)
    expected = _expected(text, size, file)
    if expected is not None:
        return expected
    # what differs is told by looking at everything, strictly; other programs may also have written the same otherwise
    header = parse_header(text, size, file)
    if f"{KEY}spec" not in header.metadata or f"{KEY}sidecar" in header.metadata:
        raise DataError(
            "a pagestone layer file expected, found another kind",
            code="E0220",
            file=file,
            remedy="name a file of a container's layers",
        )
    described = _described(header.metadata, file)
    layout = LayerLayout(record_layout(described.codec, described.shape), described.count, header.data_start)
    _aligned(header, file)
    if layout.file_size != header.file_size:  # before a table is made that could be larger than any memory
        raise DataError(
            f"{described.count} records of {layout.stride} bytes from byte {layout.data_start} expected, "
            f"the file has {header.file_size} bytes",
            code="E0227",
            file=file,
            remedy="restore the file, or convert again",
        )
    triples = layer_entries(layout.record, described.count, described.prefix, described.part_names)
    _check_table(header, _entries(triples, header.data_start), file)
    return described, layout


FIRST = b'{"__metadata__":'
METADATA = 1 << 16
"""Bytes of a header in which our metadata end: they take one or two thousand."""


def _expected(text: bytes, size: int, file: Place) -> tuple[LayerHeader, LayerLayout] | None:
    """What a layer file holds, if its header is to the byte the one we make of its metadata; None if not.

    Such a header needs no parser: it is strict JSON, without hole or overlap, because `head` makes no other.
    """
    if not text.startswith(FIRST):
        return None
    try:
        # lenient: what this reader takes and a strict one would not is not what `head` makes
        meta, _ = _DECODER.raw_decode(text[len(FIRST) : METADATA].decode("utf-8", "replace"))
        if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
            return None
        described = _described(meta, file)
        layout = LayerLayout(record_layout(described.codec, described.shape), described.count, 8 + len(text))
        same = layout.file_size == size and described.is_head(text)
    except (ValueError, RecursionError, DataError):  # the strict way says which, and where
        return None
    return (described, layout) if same else None


_DECODER = json.JSONDecoder()


def read_sidecar(path: AnyPlace, layer: LayerHeader) -> dict[tuple[str, str], TensorEntry]:
    """A sidecar's tensors by part and role, once it is seen to belong to `layer`, whole, and to say no more.

    Raises `DataError` (E02xx). A sidecar is nobody's but ours: unlike a layer file it takes no key of others.
    """
    file = place_of(path)
    header = read_header(file)
    if header.metadata.get(f"{KEY}sidecar") != layer.sidecar_metadata()[f"{KEY}sidecar"]:
        raise DataError(
            "this layer's sidecar expected, found another kind of file",
            code="E0220",
            file=file,
            remedy="restore the file, or convert again",
        )
    if _described(header.metadata, file) != layer:
        raise DataError(
            "the sidecar belongs to another layer",
            code="E0226",
            file=file,
            remedy="restore the file that was written together with its layer, or convert again",
        )
    for key in sorted(header.metadata.keys() - layer.sidecar_metadata().keys()):
        raise DataError(
            f"metadata of its layer and no others expected, found {key!r} too",
            code="E0226",
            file=file,
            remedy="another program rewrote this file: restore it, or convert again",
        )
    _aligned(header, file)
    wanted = layer.sidecar_entries(header.data_start)
    _check_table(header, wanted, file)
    return {(t.part, t.role): entry for t, entry in zip(layer.sidecar_tensors(), wanted, strict=True)}
