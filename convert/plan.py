"""The plan: what becomes of every tensor and file of the source, before a byte of data is read.

Two-way accounting: every source tensor ends as converted, copied, copied unknown, decoded or excluded by a named
rule, and every file of the container is listed with its exact length. The pipeline only carries a plan out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pagestone.convert import families, mtp
from pagestone.convert.checkpoint import CONFIG, INDEX, Checkpoint, SourceTensor, open_checkpoint
from pagestone.convert.claims import contradicted
from pagestone.convert.dense import ACTIVATION, COPY, DECODE, DenseRules, DenseTensor
from pagestone.convert.experts import find_layers
from pagestone.convert.family import Family
from pagestone.convert.foreign import explained, refuse_foreign
from pagestone.convert.matrices import Division, MatricesTarget, dense_codec, divide, matrices_targets, others_read
from pagestone.convert.side_files import CODE, SideFile, folded
from pagestone.convert.sources import LayerSource, MatrixSource
from pagestone.formats.config import config_facts, config_with, stated_config
from pagestone.formats.dense_matrices import KEEP, encoded_facts
from pagestone.formats.dtypes import item_size
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import LayoutError, RequestError
from pagestone.formats.layer_file import LayerHeader, layer_file_name, sidecar_name
from pagestone.formats.layout import PAGE, PARTS, record_layout, tensor_name
from pagestone.formats.manifest import DIGEST_BYTES, EXPERTS_TABLE, MANIFEST, RECORDS
from pagestone.formats.safetensors_header import MAX_HEADER, build_header
from pagestone.formats.storage import AnyPlace, place_of
from pagestone.formats.strict_json import brief
from pagestone.formats.text import natural

DENSE_SHARD = 4 << 30
"""Bytes: dense tensors fill shards up to this size (a larger tensor has its own)."""
OUR_NAMES = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(EXPERTS_TABLE)}|{re.escape(RECORDS)}|"
    r"(layers|mtp)-\d+(\.rowsum)?\.safetensors|(dense|matrices)-\d+-of-\d+\.safetensors"
)
EXPERT_LIKE = re.compile(r".*(expert|[._](moe|(in|out)put_linear)[._]).*")
"""Names of tensors that are some model's experts, or stand beside them."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
PARQUET_ROW = 200
"""Bytes: a generous estimate of one row of experts.parquet, for the disk space check only."""

CONVERTED, COPIED, UNKNOWN, DECODED, EXCLUDED = "converted", "copied", "copied unknown", "decoded", "excluded"
Rule = tuple[str, str, str | None]
"""Fate, why, and the file of the container: see `Disposition`. Of thousands of tensors that are alike one is kept."""
ACTIVATION_RULE: Rule = (EXCLUDED, "activation scale: containers are weight-only", None)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: equal requests for equal sources give equal containers.

    `source` is a path, or a storage. `layers` = (first, end) keeps the experts of those decoder layers only,
    `include_code` copies the source's *.py files, `merge_unlisted` takes the tensors of .safetensors files that its
    index does not name. `dense` is a word of `--dense`: the encoding of the large dense matrices, or "keep".
    """

    source: AnyPlace
    codec: Codec
    layers: tuple[int, int] | None = None
    include_code: bool = False
    merge_unlisted: bool = False
    dense: str = KEEP


@dataclass(frozen=True, slots=True)
class Disposition:
    """What becomes of one source tensor: `fate` is one of the five words above, `rule` says why."""

    tensor: SourceTensor
    fate: str
    rule: str
    target: str | None


@dataclass(frozen=True, slots=True)
class LayerTarget:
    """One layer file (and its sidecar) to be written, and where its experts come from."""

    name: str
    header: LayerHeader
    source: LayerSource
    nbytes: int
    sidecar: str | None
    sidecar_bytes: int


@dataclass(frozen=True, slots=True)
class DenseTarget:
    """One shard of dense tensors, written in the order of `tensors`."""

    name: str
    tensors: tuple[DenseTensor, ...]
    nbytes: int

    def head(self) -> bytes:
        """The bytes before the data, which begin at a multiple of 4096."""
        return _dense_head(self.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a conversion will do. Equal requests for equal sources give equal plans.

    `codec` is the request's with what the source decides (`Codec.for_scales`), `partial` its range of layers without
    those that no model has.
    """

    request: Request
    checkpoint: Checkpoint
    family: Family
    codec: Codec
    partial: tuple[int, int] | None
    rules: Mapping[str, Rule]
    """What becomes of every source tensor, by name; see `dispositions`."""
    layers: tuple[LayerTarget, ...]
    dense: tuple[DenseTarget, ...]
    side_files: tuple[SideFile, ...]
    config: bytes
    """The text of config.json."""
    index_bytes: int
    """Length of the index."""
    warnings: tuple[str, ...]
    dense_codec: Codec | None = None
    """What dense matrices are encoded in; None if all stay as they are."""
    matrices: tuple[MatricesTarget, ...] = ()

    @property
    def generated(self) -> dict[str, bytes]:
        """Small files made here: config.json and the index, which is megabytes and not kept."""
        return {CONFIG: self.config, INDEX: b"".join(_index(self.layers, self.dense, self.matrices))}

    @property
    def dispositions(self) -> tuple[Disposition, ...]:
        """What becomes of every source tensor, in natural order of names."""
        tensors = self.checkpoint.tensors
        return tuple(Disposition(tensors[name], *self.rules[name]) for name in sorted(tensors, key=natural))

    @property
    def files(self) -> dict[str, int]:
        """Length in bytes of every file of the container but manifest.json and experts.parquet."""
        sizes = {CONFIG: len(self.config), INDEX: self.index_bytes}
        sizes |= {f.name: f.nbytes for f in self.side_files if f.rule is None}
        sizes |= {t.name: t.nbytes for t in self.dense} | {t.name: t.nbytes for t in self.matrices}
        sizes[RECORDS] = DIGEST_BYTES * sum(t.header.count for t in self.layers)
        for target in self.layers:
            sizes[target.name] = target.nbytes
            if target.sidecar is not None:
                sizes[target.sidecar] = target.sidecar_bytes
        return sizes

    @property
    def bytes_in(self) -> int:
        """Bytes that will be read from the source."""
        tensors = self.checkpoint.tensors
        used = sum(tensors[name].nbytes for name, (fate, _, _) in self.rules.items() if fate != EXCLUDED)
        used += sum(m.nbytes_in for t in self.matrices for m in t.matrices if m.tied)
        return used + sum(f.nbytes for f in self.side_files if f.rule is None)

    @property
    def bytes_out(self) -> int:
        """Bytes the container will take, experts.parquet and manifest.json estimated."""
        rows = sum(t.header.count * len(PARTS) for t in self.layers)
        return sum(self.files.values()) + rows * PARQUET_ROW + len(self.files) * 200

    @property
    def lossless(self) -> bool:
        """Whether every expert weight survives exactly, if no matrix has to be requantised because of its data."""
        return all(_treatment(self.codec, m)[0] for t in self.layers for m in t.source.matrices())

    @property
    def dense_identity(self) -> dict[str, Any] | None:
        """Encoding and parameters of encoded dense matrices, None if there are none: what makes another container."""
        codec = self.dense_codec
        return None if codec is None else {"codec": codec.name, "parameters": codec.parameters}

    @property
    def source_facts(self) -> dict[str, Any]:
        """What the manifest says about the source: no path, no time."""
        return {
            "family": self.family.name,
            "model_type": str(self.checkpoint.text_config.get("model_type")),
            "fingerprint": self.checkpoint.fingerprint,
            "expert_dtypes": sorted({dtype for t in self.layers for dtype in t.source.dtypes}),
        }


def make_plan(request: Request, *, header_limit: int = MAX_HEADER) -> Plan:
    """The plan for what is asked for; raises what `open_checkpoint` and `plan_checkpoint` raise."""
    checkpoint = open_checkpoint(request.source, merge_unlisted=request.merge_unlisted)
    return plan_checkpoint(checkpoint, request, header_limit=header_limit)


def plan_checkpoint(checkpoint: Checkpoint, request: Request, *, header_limit: int = MAX_HEADER) -> Plan:
    """The plan for what is asked for, of the source once it is open.

    No file will have a header of more than `header_limit` bytes. Raises `RequestError` for what cannot be converted
    (unknown family, not MoE, element types or shapes the codec cannot take) and `DataError` for what is broken; see
    `find_layers`.
    """
    codec, layers = request.codec, request.layers
    refuse_foreign(checkpoint)
    family = _family(checkpoint)
    with explained(checkpoint):
        experts = find_layers(checkpoint, family)
    found, warnings = list(experts.layers), list(experts.warnings)
    kept = found
    if layers is not None:
        kept = _select(found, layers, checkpoint)
        layers = (layers[0], min(layers[1], 1 + max(s.layer for s in found if s.block == "layers")))
    kinds = {(m.encoding, m.rows, m.columns) for s in kept for m in s.matrices()}
    codec = codec.for_sources({kind[0] for kind in kinds if codec.takes(*kind) is None})
    width = len(str(max(s.layer for s in found)))
    targets = tuple(_layer_target(checkpoint, codec, source, width, header_limit) for source in kept)

    routed = {t.name for s in found for t in s.tensors} | experts.activation_scales
    rules_of_dense = DenseRules(checkpoint.path, checkpoint.tensors, checkpoint.config, family, codec)
    with explained(checkpoint):
        dense, fates = rules_of_dense.sort([n for n in checkpoint.tensors if n not in routed])
    division = divide(checkpoint, family, dense_codec(request.dense), dense)
    matrix_files = matrices_targets(division, header_limit)
    shards = _dense_targets(checkpoint, division.rest, header_limit)
    rules = _expert_rules(family, codec, found, targets, width)
    rules |= dict.fromkeys(experts.activation_scales, ACTIVATION_RULE)
    home = {r.tensor.name: file.name for file in matrix_files for m in file.matrices for r in m.stored.values()}
    home |= {t.source.name: shard.name for shard in shards for t in shard.tensors}
    rules |= _dense_rules(family, fates, home)
    rules |= _matrix_rules(family, division, home, rules)
    taken = (CODE,) if request.include_code else ()
    side = tuple(SideFile(f.name, f.nbytes, None) if f.rule in taken else f for f in checkpoint.side_files)
    _check_names(checkpoint, side, warnings)
    config = mtp.truthful(checkpoint, family, warnings)
    warnings += _remarks(checkpoint, rules, {e.name for e, _, _ in kinds if e.plain is None})
    warnings += division.remarks(request.dense)
    read = others_read(codec, division.encoding, (m.name for m in division.matrices), family.reads_codes)
    return Plan(
        request,
        checkpoint,
        family,
        codec,
        layers,
        rules,
        targets,
        shards,
        side,
        _config(config, codec, division, targets, (family.loads_parts and layers is None, read)),
        sum(map(len, _index(targets, shards, matrix_files))),
        (*checkpoint.warnings, *warnings),
        division.encoding,
        matrix_files,
    )


def _remarks(checkpoint: Checkpoint, rules: Mapping[str, Rule], codes: set[str]) -> Iterator[str]:
    """What to tell of tensors that no rule knows, and of a config that contradicts the experts, whose encodings but
    plain floats are `codes`."""
    unknown = [name for name, (fate, _, _) in rules.items() if fate == UNKNOWN]
    if unknown:
        yield f"{len(unknown)} tensors unknown to the family are copied as they are, first {min(unknown, key=natural)}"
    contradiction = contradicted(checkpoint.config, codes)
    if contradiction is not None and not checkpoint.container:
        yield contradiction


def _check_names(checkpoint: Checkpoint, side: tuple[SideFile, ...], warnings: list[str]) -> None:
    """Refuse files of the source named like one of the container's, also where only some file systems think so."""
    for name in [*checkpoint.shards, *(f.name for f in side)]:
        alike = folded(name)
        if alike not in (CONFIG, INDEX) and not OUR_NAMES.fullmatch(alike):
            continue
        if checkpoint.container and alike == name:
            continue
        what = "named like" if alike == name else "whose name is, where case or accents do not count, that of"
        raise RequestError(
            f"the source has a file {what} one of a container's",
            code="E0604",
            file=checkpoint.path / name,
            remedy="rename it, or leave it out of the source",
        )
    homes: dict[str, str] = {}
    for name in (f.name for f in side if f.rule is None):
        other = homes.setdefault(folded(name), name)
        if other != name:
            warnings.append(f"{name} and {other} are one name where case or accents do not count: copy with care")


def _family(checkpoint: Checkpoint) -> Family:
    family = families.of_config(checkpoint.config)
    if family is not None:
        return family
    names = [n for n in checkpoint.tensors if EXPERT_LIKE.fullmatch(n)]
    model_type = checkpoint.text_config.get("model_type")
    counts = {f: checkpoint.text_config.get(f) for f in EXPERT_COUNTS}
    stated = ", ".join(f"{field} {count}" for field, count in counts.items() if type(count) is int and count > 1)
    if not names and not stated:
        raise RequestError(
            f"a Mixture-of-Experts checkpoint expected; model type {brief(model_type)} has no expert tensor",
            code="E0601",
            file=checkpoint.path,
            remedy="convert a Mixture-of-Experts checkpoint",
        )
    shown = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "N", n) for n in names})[:6]
    shown = shown or [f"none, but config.json says {stated}"]
    known = ", ".join(sorted({f.name for f in families.registry().values()}))
    file = re.sub(r"[^a-z0-9_]", "_", str(model_type).lower())[:60]
    named = isinstance(model_type, str) and model_type
    raise RequestError(
        f"model type {brief(model_type)} is of no family known here ({known}); expert-like tensors: {', '.join(shown)}",
        code="E0602",
        file=checkpoint.path / CONFIG,
        remedy=f"use a version that knows it, or add convert/families/{file}.py, stating the family's names, fusion "
        "and orientation" if named else "state the model_type in config.json, or download it again",
    )  # fmt: skip


def _select(found: list[LayerSource], span: tuple[int, int], checkpoint: Checkpoint) -> list[LayerSource]:
    kept = [s for s in found if s.block == "layers" and span[0] <= s.layer < span[1]]
    if not kept:
        numbers = [s.layer for s in found if s.block == "layers"]
        raise RequestError(
            f"--layers {span[0]}:{span[1]} selects no MoE layer; there are {numbers[0]} to {numbers[-1]}",
            code="E0603",
            file=checkpoint.path,
            remedy="give first:end, end not included",
        )
    return kept


def _treatment(codec: Codec, matrix: MatrixSource) -> tuple[bool, str]:
    """(whether its values survive exactly, what becomes of it) of one expert matrix."""
    plain = matrix.encoding.plain is not None
    reason = codec.takes(matrix.encoding, matrix.rows, matrix.columns)
    if reason is None:
        return True, "kept" if plain else "passed through"
    if plain:
        return False, codec.verb
    return False, f"requantised ({reason})" if codec.verb == Codec.verb else codec.verb


def _dense_rules(family: Family, fates: dict[str, str], home: dict[str, str]) -> dict[str, Rule]:
    """(fate, rule, target) of every other tensor by name, from what `DenseRules` decided."""
    rules: dict[str, Rule] = {}
    for name, fate in fates.items():
        if fate == ACTIVATION:
            rules[name] = ACTIVATION_RULE
        elif fate == COPY:
            stem, _, tail = name.rpartition(".")
            known = family.known_name(f"{stem}.weight" if tail.startswith("weight_scale") else name)
            words = (COPIED, f"{family.name}: dense") if known else (UNKNOWN, "no rule knows it")
            rules[name] = (*words, home[name])
        else:
            rule = "dense codes, rounded once to BF16" if fate == DECODE else "scale of decoded codes, consumed"
            rules[name] = (DECODED, rule, home.get(name))
    return rules


def _matrix_rules(family: Family, division: Division, home: dict[str, str], rules: dict[str, Rule]) -> dict[str, Rule]:
    """What `--dense` changes in the rules: of what is encoded, of tables that are too, of what stays for a reason."""
    changed: dict[str, Rule] = {
        name: (CONVERTED, f"{family.name}: dense matrix, {words}", home[name]) for name, words in division.rules.items()
    }
    also = {m.tensor.name: f"also encoded as {m.name}" for m in division.matrices if m.tied}
    also |= {name: f"not encoded: {reason}" for name, reason in division.stay.items()}
    for name, words in also.items():
        fate, rule, target = rules[name]
        changed[name] = (fate, f"{rule}; {words}", target)
    return changed


def _expert_rules(
    family: Family, codec: Codec, found: list[LayerSource], targets: tuple[LayerTarget, ...], width: int
) -> dict[str, Rule]:
    """(fate, rule, target) of every expert tensor by name."""
    written = {target.name for target in targets}
    rules: dict[str, Rule] = {}
    for source in found:
        file = layer_file_name(source.block, source.layer, width)
        if file not in written:
            skipped = (EXCLUDED, "--layers: experts of a layer not asked for", None)
            rules |= {t.name: skipped for t in source.tensors}
            continue
        same: dict[str, Rule] = {}
        for matrix in source.matrices():
            exact, words = _treatment(codec, matrix)
            rule = same.setdefault(words, (CONVERTED, f"{family.name}: routed expert, {words}", file))
            for r in matrix.ranges:
                # gate and up of a fused tensor may be treated differently: the one that loses is the one to tell
                if r.tensor.name not in rules or not exact:
                    rules[r.tensor.name] = rule
    return rules


def _layer_target(
    checkpoint: Checkpoint, codec: Codec, source: LayerSource, width: int, header_limit: int
) -> LayerTarget:
    header = LayerHeader(
        codec, source.block, source.layer, source.prefix, source.shape, source.count, source.part_names
    )
    name = layer_file_name(source.block, source.layer, width)
    try:
        nbytes = header.layout(len(header.head(header_limit))).file_size
        sidecar = sidecar_name(name) if header.sidecar_tensors() else None
        side_bytes = len(header.sidecar_head(header_limit)) if sidecar else 0
        side_bytes += sum(tensor.nbytes for tensor in header.sidecar_tensors())
    except LayoutError as error:
        raise LayoutError(
            error.message, code=error.code, file=checkpoint.path, tensor=source.prefix, remedy=error.remedy
        ) from None
    return LayerTarget(name, header, source, nbytes, sidecar, side_bytes)


def _dense_head(tensors: tuple[DenseTensor, ...], header_limit: int = MAX_HEADER) -> bytes:
    entries, position = [], 0
    for tensor in tensors:
        entries.append((tensor.name, tensor.dtype, tensor.shape, position, position + tensor.nbytes))
        position += tensor.nbytes
    return build_header(entries, {"format": "pt"}, PAGE, header_limit)


def _header_room(tensor: DenseTensor) -> int:
    """Bytes: no fewer than the tensor's entry takes in the header of a shard, wherever it lies there."""
    far = 10**19  # as many digits as any offset has
    entry = (tensor.name, tensor.dtype, tensor.shape, far, far)
    return len(build_header([entry], {}, 1, 1 << 62)) - len(build_header([], {}, 1))


def _dense_targets(checkpoint: Checkpoint, dense: Iterable[DenseTensor], header_limit: int) -> tuple[DenseTarget, ...]:
    """Shards filled in natural order of names; within one, wider elements first so that all stay aligned.

    A shard is full when the next tensor has no room in its data or its header. Nothing depends on how the source was
    sharded.
    """
    groups: list[list[DenseTensor]] = []
    room, head_room = 0, 0
    for tensor in sorted(dense, key=lambda t: natural(t.name)):
        entry = _header_room(tensor)
        if not groups or tensor.nbytes > room or entry > head_room:
            groups.append([])
            room, head_room = DENSE_SHARD, header_limit - PAGE - 64  # metadata, and spaces up to a page
        groups[-1].append(tensor)
        room -= tensor.nbytes
        head_room -= entry
    shards = []
    for number, group in enumerate(groups, 1):
        ordered = tuple(sorted(group, key=lambda t: (-_width(t.dtype), natural(t.name))))
        try:
            head = _dense_head(ordered, header_limit)
        except LayoutError as error:
            raise LayoutError(
                error.message, code=error.code, file=checkpoint.path / ordered[0].source.file,
                tensor=ordered[0].name[:200], remedy=error.remedy,
            ) from None  # fmt: skip
        size = len(head) + sum(t.nbytes for t in ordered)
        shards.append(DenseTarget(f"dense-{number:05d}-of-{len(groups):05d}.safetensors", ordered, size))
    return tuple(shards)


def _width(dtype: str) -> int:
    """Bytes an element must be aligned to; types narrower than a byte come last."""
    return 0 if dtype.startswith(("F4", "F6")) else item_size(dtype)


def _config(
    config: dict[str, Any],
    codec: Codec,
    division: Division,
    targets: tuple[LayerTarget, ...],
    loadable: tuple[bool, bool],
) -> bytes:
    """config.json with a truthful quantization_config; `loadable`: whether others find the experts, and read the dense
    matrices."""
    shapes = [(t.name, t.dtype, t.shape) for t in division.rest]
    if division.encoding is not None and loadable[1]:
        shapes += encoded_facts(division.encoding, ((m.name, m.rows, m.columns) for m in division.matrices))
    facts = config_facts(shapes, (t.source.shape for t in targets), targets[0].header.part_names)
    config = config_with(config, stated_config(codec, facts, all(loadable)), codec.config_keys)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _index(
    targets: tuple[LayerTarget, ...], shards: tuple[DenseTarget, ...], matrices: tuple[MatricesTarget, ...]
) -> Iterator[bytes]:
    """The pieces of the index: every tensor but pads and sidecars.

    Line by line: of tens of thousands of names a JSON library makes several times as many pieces before it joins them.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for name, file, size in _indexed(targets, shards, matrices):
        weight_map[name] = file
        total += size
    quoted = partial(json.dumps, ensure_ascii=False)
    yield f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{'.encode()
    between = "\n"
    for name in sorted(weight_map):
        yield f"{between}    {quoted(name)}: {quoted(weight_map[name])}".encode()
        between = ",\n"
    yield b"\n  }\n}\n"


def _indexed(
    targets: tuple[LayerTarget, ...], shards: tuple[DenseTarget, ...], matrices: tuple[MatricesTarget, ...]
) -> Iterator[tuple[str, str, int]]:
    for shard in shards:
        for tensor in shard.tensors:
            yield tensor.name, shard.name, tensor.nbytes
    for held in matrices:
        for matrix, record in held.records():
            for stored in record.stored:
                yield f"{matrix.name}.{stored.suffix}", held.name, stored.nbytes
    for target in targets:
        header = target.header
        for slot in record_layout(header.codec, header.shape).slots:
            if slot.part is not None:
                for expert in range(header.count):
                    yield tensor_name(header.prefix, expert, header.part_names, slot), target.name, slot.nbytes


def check_paths(checkpoint: AnyPlace, output: Path) -> None:
    """Refuse an output that is the source, is inside it, or holds it (links resolved): nothing there may change."""
    path = place_of(checkpoint).path()
    if path is None:  # of no directory of this machine
        return
    source, target = path.resolve(), output.resolve()
    if source == target or source in target.parents or target in source.parents:
        relation = "is" if source == target else "is inside" if source in target.parents else "contains"
        raise RequestError(
            f"an output apart from the source expected; it {relation} {checkpoint}",
            code="E0606",
            file=output,
            remedy="give another --output",
        )
