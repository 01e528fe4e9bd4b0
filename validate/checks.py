"""The checks of `verify`, one function each, yielding findings. They read the files, not the bookkeeping.

Everything is read with pread, never mapped: a file that is cut while it is looked at is a finding, not a crash.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.convert import families
from pagestone.convert.checkpoint import CONFIG, INDEX
from pagestone.convert.matrices import others_read
from pagestone.formats import encodings, strict_json
from pagestone.formats.config import config_facts, config_with, stated_config
from pagestone.formats.dense_matrices import PlacedMatrix, encoded_facts
from pagestone.formats.digests import Hasher, digest, layer_digest
from pagestone.formats.dtypes import VIEWS, Array, to_f32
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import DataError, PagestoneError
from pagestone.formats.layer_file import Beside, LayerHeader, beside_of, read_layer_file, read_sidecar, sidecar_name
from pagestone.formats.layout import BIAS, CODES, PAGE, PARTS, LayerLayout, tensor_name
from pagestone.formats.manifest import (
    EXPERTS_TABLE,
    MANIFEST,
    RECORDS,
    SUMS,
    TEMPLATES,
    LayerEntry,
    Manifest,
    columns_for,
    experts_groups,
    places,
)
from pagestone.formats.safetensors_header import TensorEntry, read_header
from pagestone.formats.storage import AnyPlace, Place, page_buffer, place_of
from pagestone.formats.strict_json import brief
from pagestone.validate.findings import ERROR, WARNING, Finding, Report, guarded, of_error

Sums = dict[str, Array]
"""What experts.parquet says that the encoding cost, by layer file: float64 [experts, parts, 2], the columns `SUMS`."""
WINDOW = 1 << 16
"""Weights that are decoded at once where only zeros are looked for."""
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class OpenLayer:
    """A layer file whose table was checked: what it says, where its records lie, its sidecar's arrays."""

    entry: LayerEntry
    path: Path
    header: LayerHeader
    layout: LayerLayout
    beside: Beside


@dataclass(slots=True)
class Context:
    """What checks share, and what earlier ones found out for later ones."""

    root: Path
    manifest: Manifest
    codec: Codec
    checks: tuple[Check, ...]
    progress: Progress
    workers: int
    report: Report
    layers: list[OpenLayer] = field(default_factory=list)
    """Layer files whose tables are right."""
    sums: Sums | None = None
    """Of experts.parquet, once it is seen to be right."""
    matrices: list[PlacedMatrix] = field(default_factory=list)
    """Encoded dense matrices, of files whose tables are right."""
    complete: bool = True
    """Whether every table of tensors was read: without, nothing can be said of the index."""

    @property
    def dense(self) -> list[str]:
        """Files of dense tensors."""
        others = {name for e in self.manifest.layers for name in (e.file, sidecar_name(e.file))}
        others |= set() if self.manifest.dense is None else {*self.manifest.dense.files}
        return [n for n in self.manifest.files if n.endswith(".safetensors") and n not in others]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a container; an error it raises is its last finding, and the next check begins.

    `run` yields what it finds when its turn comes. `layer` and `record`, of those that have them, are shown every layer
    file before its records and every record, uint8 [stride], while the check of records reads them: a container is read
    once, whoever looks at it. `record` is called from several threads, which read the next one into the same buffer.
    """

    run: Callable[[Context], Iterator[Finding]]
    layer: Callable[[Context, OpenLayer], Iterator[Finding]] | None = None
    record: Callable[[Context, OpenLayer, int, Array], Iterator[Finding]] | None = None


def read_exactly(file: AnyPlace, offset: int, nbytes: int) -> bytearray:
    """`nbytes` of a file from `offset`; `DataError` if it ends too early, `OSError` that names it."""
    data = bytearray(nbytes)
    fill(place_of(file, once=True), offset, memoryview(data))
    return data


def fill(file: Place, offset: int, target: memoryview) -> None:
    """Fill `target` from `offset` of a file; raises as `read_exactly`."""
    got = file.read_into(target, offset)
    if got < len(target):
        raise DataError(
            f"{len(target)} bytes at {offset} expected, the file ended after {got}",
            code="E1002",
            file=file,
            remedy="restore the file, or convert again",
        )


def of_worker(own: threading.local, name: str, nbytes: int) -> memoryview:
    """A worker's buffer of this name and length, which holds what was last written to it; it ends with its thread.

    Fresh ones of megabytes for every expert take more time than what is done in them, and memory that C libraries keep.
    """
    room: memoryview | None = getattr(own, name, None)
    if room is None:
        room = memoryview(page_buffer(nbytes))
        setattr(own, name, room)
    return room[:nbytes]


def entries(root: Path, shard: str) -> tuple[TensorEntry, ...]:
    """The tensors of a dense shard; `DataError`, or `OSError` that names it."""
    return read_header(place_of(root / shard, once=True)).entries


def check_presence(root: Path, manifest: Manifest) -> Iterator[Finding]:
    """Every file listed is there with its length; anything else in the directory is a warning."""
    for name, known in manifest.files.items():
        yield from guarded(_presence(root, name, known.nbytes), name)
    for needed in (CONFIG, INDEX, EXPERTS_TABLE):
        if needed not in manifest.files:
            yield Finding(ERROR, "E1003", MANIFEST, f"{needed} expected among the files, found none")
    entries = {p.name for p in root.iterdir()} - {MANIFEST}
    if any(name.startswith(f"{TEMPLATES}/") for name in manifest.files) and (root / TEMPLATES).is_dir():
        entries = entries - {TEMPLATES} | {f"{TEMPLATES}/{p.name}" for p in (root / TEMPLATES).iterdir()}
    for name in sorted(entries - manifest.files.keys()):
        yield Finding(WARNING, "W1004", name, "not listed in the manifest, not part of the container")


def _presence(root: Path, name: str, nbytes: int) -> Iterator[Finding]:
    path = root / name
    if not path.is_file():
        yield Finding(ERROR, "E0332", name, "expected as the manifest lists it, found none")
    elif path.stat().st_size != nbytes:
        yield Finding(ERROR, "E0333", name, f"{nbytes} bytes expected, found {path.stat().st_size}")


def check_file_digest(root: Path, manifest: Manifest, name: str, progress: Progress) -> Iterator[Finding]:
    """The digest of a file that is no layer file."""
    hasher = Hasher()
    place_of(root / name, once=True).hash(hasher, progress)
    if hasher.digest() != manifest.files[name].xxh3:
        yield Finding(
            ERROR, "E1001", name, f"xxh3 expected {manifest.files[name].xxh3.hex()}, found {hasher.digest().hex()}"
        )


def check_sha256(root: Path, manifest: Manifest, name: str) -> Iterator[Finding]:
    """SHA-256 of a file, where the manifest states one: of its bytes, layer files too."""
    expected = manifest.files[name].sha256
    if expected is None:
        return
    hasher = hashlib.sha256()
    place_of(root / name, once=True).hash(hasher)
    own = hasher.digest()
    if own != expected:
        yield Finding(ERROR, "E1001", name, f"sha256 expected {expected.hex()}, found {own.hex()}")


def open_layer(root: Path, manifest: Manifest, entry: LayerEntry) -> OpenLayer:
    """A layer file with its table checked, without its sidecar; raises `DataError`, `OSError`."""
    path = root / entry.file
    header, layout = read_layer_file(place_of(path, once=True))
    listed = (manifest.codec, dict(manifest.parameters), entry.block, entry.layer, entry.experts)
    opened = (header.codec.name, header.codec.parameters, header.block, header.layer, header.count)
    if listed != opened:
        raise DataError(f"{listed} expected from {MANIFEST}, found {opened}", code="E0321", file=path)
    if (entry.sidecar is None) != (not header.sidecar_tensors()):
        raise DataError("the manifest and the codec disagree on whether there is a sidecar", code="E0321", file=path)
    return OpenLayer(entry, path, header, layout, {})


def sidecar_arrays(root: Path, layer: OpenLayer) -> Beside:
    """The arrays of a layer's sidecar, its table checked; empty if there is none. Raises as `open_layer`."""
    if layer.entry.sidecar is None:
        return {}
    side, arrays = place_of(root / layer.entry.sidecar, once=True), {}
    for key, tensor in read_sidecar(side, layer.header).items():
        raw = read_exactly(side, tensor.offset, tensor.nbytes)
        arrays[key] = np.frombuffer(raw, VIEWS[tensor.dtype]).reshape(tensor.shape)
    return arrays


def stored_arrays(layer: OpenLayer, record: Array, expert: int, part: str) -> dict[str, Array]:
    """The arrays of one matrix by role, those beside included, as views of its record."""
    arrays = {
        s.role: record[s.offset : s.offset + s.nbytes].view(VIEWS[s.dtype]).reshape(s.shape)
        for s in layer.layout.record.of_part(part)
        if s.role != BIAS
    }
    return arrays | beside_of(layer.beside, expert, part)


def check_record(_: Context, layer: OpenLayer, expert: int, record: Array) -> Iterator[Finding]:
    """Everything stored of one expert, biases and pads too."""
    start, name = layer.layout.record_offset(expert), layer.entry.file
    for slot in layer.layout.record.slots:
        if slot.part is None and record[slot.offset : slot.offset + slot.nbytes].any():
            yield Finding(ERROR, "E1006", name, f"expert {expert} {slot.suffix}: zeros expected", start + slot.offset)
        if slot.part is not None and slot.role == BIAS:
            values = record[slot.offset : slot.offset + slot.nbytes].view(VIEWS[slot.dtype])
            bad = ~np.isfinite(to_f32(values, slot.dtype))
            if bad.any():
                part_name = layer.header.part_names[PARTS.index(slot.part)]
                message = f"expert {expert} {part_name}: a finite bias expected, found NaN or Inf at {np.argmax(bad)}"
                yield Finding(ERROR, "E1005", name, message, start + slot.offset)
    for part, part_name in zip(PARTS, layer.header.part_names, strict=True):
        arrays = stored_arrays(layer, record, expert, part)
        for problem in layer.header.codec.problems(arrays, *layer.header.shape.matrix(part)):
            offset = start + layer.layout.record.slot(part, CODES).offset
            beside = (part, problem.role) not in layer.layout.record.offsets
            sidecar = f" (in {layer.entry.sidecar})" if beside else ""
            yield Finding(ERROR, "E1005", name, f"expert {expert} {part_name}: {problem}{sidecar}", offset)


def check_layer(context: Context, layer: OpenLayer, recorded: tuple[bytes, ...] | None) -> Iterator[Finding]:
    """Digests of a layer file and its records, and what every check that asks for records finds in them.

    `recorded` are the layer's digests in records.xxh3, which name the damaged expert, if it is they that the layer's
    digest is made from.
    """
    workers, visits = context.workers, [check.record for check in context.checks if check.record is not None]
    head = read_exactly(layer.path, 0, layer.layout.data_start)
    expected = context.manifest.files[layer.entry.file].xxh3
    vouched = recorded is not None and layer_digest(head, recorded) == expected

    file = place_of(layer.path, once=True)
    own = threading.local()

    def one(expert: int) -> tuple[bytes | None, list[Finding]]:
        start, raw = layer.layout.record_offset(expert), of_worker(own, "record", layer.layout.stride)
        try:
            fill(file, start, raw)
        except (DataError, OSError) as error:
            fault = of_error(error, layer.entry.file, start)
            return None, [replace(fault, message=f"expert {expert}: {fault.message}")]
        found = digest(raw)
        record = np.frombuffer(raw, np.uint8)
        findings = []
        if recorded is not None and vouched and recorded[expert] != found:
            message = f"expert {expert}: xxh3 of its record expected {recorded[expert].hex()}, found {found.hex()}"
            findings.append(Finding(ERROR, "E1001", layer.entry.file, message, start))
        for visit in visits:
            findings += visit(context, layer, expert, record)
        context.progress(layer.layout.stride)
        return found, findings

    digests: list[bytes | None] = []
    with file.storage, ThreadPoolExecutor(workers) as pool:
        # windows, not one big map: a map holds every result until it is asked for
        for first in range(0, layer.layout.count, 4 * workers):
            for found, findings in pool.map(one, range(first, min(first + 4 * workers, layer.layout.count))):
                digests.append(found)
                yield from findings
    read = [d for d in digests if d is not None]
    if len(read) < len(digests):
        return  # an expert that was not read is a finding already; no digest of the whole can be told
    whole = layer_digest(head, read)
    if whole == expected and recorded is not None and not vouched:
        message = f"other digests of {layer.entry.file}'s records expected: those here do not give the layer's digest"
        yield Finding(ERROR, "E1040", RECORDS, message)
    if whole != expected:
        yield Finding(
            ERROR, "E1001", layer.entry.file, f"xxh3 of the layer expected {expected.hex()}, found {whole.hex()}"
        )


def check_dense(root: Path, dense: list[str]) -> Iterator[Finding]:
    """Dense shards are complete safetensors files whose data begins on a page."""
    for shard in dense:
        yield from guarded(_shard(root / shard), shard)


def _shard(path: Path) -> Iterator[Finding]:
    header = read_header(place_of(path, once=True))
    if header.data_start % PAGE:
        message = f"data at a multiple of {PAGE} expected, found it at byte {header.data_start}"
        yield Finding(ERROR, "E0225", path.name, message)


def _homes(
    root: Path, layers: list[OpenLayer], dense: list[str], matrices: Sequence[PlacedMatrix]
) -> Iterator[tuple[str, str, int]]:
    """(name, file, bytes) of every tensor that an index lists."""
    for layer in layers:
        header = layer.header
        for expert in range(header.count):
            for slot in layer.layout.record.slots:
                if slot.part is not None:
                    yield tensor_name(header.prefix, expert, header.part_names, slot), layer.entry.file, slot.nbytes
    for placed in matrices:
        for stored in placed.record.stored:
            yield f"{placed.matrix.name}.{stored.suffix}", placed.matrix.file, stored.nbytes
    for shard in dense:
        yield from ((tensor.name, shard, tensor.nbytes) for tensor in entries(root, shard))


def check_index(
    root: Path, layers: list[OpenLayer], dense: list[str], matrices: Sequence[PlacedMatrix]
) -> Iterator[Finding]:
    """The index names every tensor but pads and sidecars, each in the file where it lies, and the right total."""
    try:
        table = strict_json.loads(place_of(root / INDEX).read_bytes())
        listed, total = dict(table["weight_map"]), table["metadata"]["total_size"]
    except strict_json.NotPlainUtf8 as error:
        yield Finding(ERROR, "E1007", INDEX, f"JSON expected: {error}; {strict_json.WITHOUT_MARK}")
        return
    except (ValueError, KeyError, TypeError):
        yield Finding(ERROR, "E1007", INDEX, "an index with weight_map and metadata.total_size expected")
        return
    del table
    homes: dict[str, str] = {}
    size = 0
    for name, home, nbytes in _homes(root, layers, dense, matrices):
        if name in homes:
            yield Finding(ERROR, "E1016", home, f"{name} also stands in {homes[name]}")
        homes[name] = home
        size += nbytes
    for name in sorted(homes.keys() - listed.keys())[:10]:
        yield Finding(ERROR, "E1008", INDEX, f"{name} expected, found none")
    for name in sorted(listed.keys() - homes.keys())[:10]:
        yield Finding(ERROR, "E1009", INDEX, f"{name} is listed, no file holds it")
    for name in sorted(n for n in homes.keys() & listed.keys() if homes[n] != listed[n])[:10]:
        yield Finding(ERROR, "E1010", INDEX, f"{name} lies in {homes[name]}, the index says {brief(listed[name])}")
    if total != size:
        yield Finding(ERROR, "E1011", INDEX, f"total_size {size} expected, found {brief(total)}")


def _config(root: Path) -> dict[str, Any] | None:
    """The object in config.json, or None if it holds something else."""
    try:
        config = strict_json.loads(place_of(root / CONFIG).read_bytes(), constants=True, most=strict_json.MAX_NODES)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def check_config(
    root: Path, manifest: Manifest, codec: Codec, layers: list[OpenLayer], dense: list[str]
) -> Iterator[Finding]:
    """config.json states what the codec needs so that others read right weights or raise, at both levels."""
    config = _config(root)
    if config is None:
        yield Finding(ERROR, "E1012", CONFIG, "a JSON object expected")
        return
    tensors = [(t.name, t.dtype, t.shape) for shard in dense for t in entries(root, shard)]
    family = families.of_config(config)
    encoding = None if manifest.dense is None else manifest.dense.encoding
    matrices = () if manifest.dense is None else manifest.dense.matrices
    read = others_read(codec, encoding, (m.name for m in matrices), family.reads_codes if family else lambda _: False)
    if encoding is not None and read:
        tensors += encoded_facts(encoding, ((m.name, m.rows, m.columns) for m in matrices))
    facts = config_facts(tensors, (x.header.shape for x in layers), layers[0].header.part_names)
    loadable = read and manifest.partial is None and (family is None or family.loads_parts)
    if config != config_with(config, stated_config(codec, facts, loadable), codec.config_keys):
        yield Finding(
            ERROR,
            "E1013",
            CONFIG,
            "its quantization_config is not the one this codec writes: others may read codes as weights",
        )


def check_experts(root: Path, layers: list[OpenLayer]) -> tuple[Sums | None, list[Finding]]:
    """experts.parquet has a row for every matrix, in order, that says where it really lies.

    All rows at once would be tens of megabytes: of those seen to be right nothing is kept but the sums.
    """
    roles = layers[0].layout.record.roles
    sums: array[float] = array("d")

    def rows() -> Iterator[tuple[Any, ...]]:
        names = [name for name, _ in columns_for(roles)[: -len(SUMS)]]
        total = len(PARTS) * sum(layer.header.count for layer in layers)
        for columns in experts_groups(root / EXPERTS_TABLE, total, roles):
            for pair in zip(*(columns[name] for name, _ in SUMS), strict=True):
                sums.extend(pair)
            yield from zip(*(columns[name] for name in names), strict=True)

    wanted = (row for layer in layers for row in _rows(layer))
    try:
        for number, (have, want) in enumerate(zip(rows(), wanted, strict=True)):
            if have != want:
                return None, [Finding(ERROR, "E1015", EXPERTS_TABLE, f"row {number}: {want} expected, found {have}")]
    except (PagestoneError, OSError) as error:
        fault = of_error(error, EXPERTS_TABLE)
        return None, [replace(fault, code="E1014") if fault.code == "E0313" else fault]
    table = np.array(sums).reshape(-1, len(PARTS), len(SUMS))
    ends = np.cumsum([layer.header.count for layer in layers])
    return dict(zip((layer.entry.file for layer in layers), np.split(table, ends[:-1]), strict=True)), []


def _zero_parts(layer: OpenLayer, expert: int, parts: list[str]) -> Iterator[str]:
    """Which of an expert's matrices decode to zeros, by name: the table's norm is only a hint where to look."""
    start, file, record = layer.layout.record_offset(expert), layer.header, layer.layout.record
    raw = np.frombuffer(read_exactly(layer.path, start, layer.layout.stride), np.uint8)
    for part in parts:
        if _is_zero(file.codec, stored_arrays(layer, raw, expert, part), *file.shape.matrix(part)):
            yield tensor_name(file.prefix, expert, file.part_names, record.slot(part, CODES))


def _is_zero(codec: Codec, stored: dict[str, Array], rows: int, columns: int) -> bool:
    """Whether a matrix decodes to zeros, a few rows at a time: values take several times the bytes of codes."""
    step = max(1, WINDOW // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part, cut = codec.window(rows, columns, first, count)
        if part.values({role: array[cut[role]] for role, array in stored.items()}, count, columns).any():
            return False
    return True


def check_zeros(root: Path, sums: Sums, layers: list[OpenLayer], dense: list[str]) -> Iterator[Finding]:
    """Warn of expert matrices, and of routers, that are all zero: their number and the first of each."""
    number, first = 0, ""
    for layer in layers:
        for expert, norms in enumerate(sums[layer.entry.file][..., 1]):
            hinted = [part for part, norm in zip(PARTS, norms, strict=True) if norm == 0]
            for name in _zero_parts(layer, expert, hinted) if hinted else ():
                number, first = number + 1, first or name
    if number:
        total = sum(table[..., 1].size for table in sums.values())
        yield Finding(WARNING, "W0620", EXPERTS_TABLE, f"{number} of {total} matrices are all zero, first {first}")
    family = families.of_config(_config(root) or {})
    if family is None:
        return
    routers = {f"{x.header.prefix.removesuffix(family.experts)}{family.router}" for x in layers}
    zeros = [
        (entry.name, shard)
        for shard in dense
        for entry in entries(root, shard)
        if entry.name in routers and entry.nbytes and not any(read_exactly(root / shard, entry.offset, entry.nbytes))
    ]
    if zeros:
        name, shard = zeros[0]
        yield Finding(WARNING, "W0620", shard, f"{len(zeros)} of {len(routers)} routers are all zero, first {name}")


def _rows(layer: OpenLayer) -> Iterator[tuple[Any, ...]]:
    """The rows experts.parquet must have for a layer, without the two sums."""
    header, layout = layer.header, layer.layout
    for expert in range(header.count):
        for part in PARTS:
            name = tensor_name(header.prefix, expert, header.part_names, layout.record.slot(part, CODES))
            where = (layer.entry.file, header.block, header.layer, expert, part, name, *header.shape.matrix(part))
            yield (*where, layout.record_offset(expert), layout.stride, *places(layout, expert, part).values())


def codec_of(manifest: Manifest) -> Codec:
    """The codec a manifest states; `RequestError` if this version does not know it."""
    return encodings.get(manifest.codec, manifest.parameters)
