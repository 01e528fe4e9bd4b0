"""The plan: what becomes of every tensor and file of the source, before a byte of data is read.

Two-way accounting: every source tensor ends as converted, copied, copied unknown, decoded or excluded by a named
rule, and every file of the container is listed with its exact length. The pipeline only carries a plan out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestone.convert import families
from pagestone.convert.checkpoint import CODE, CONFIG, INDEX, Checkpoint, SideFile, SourceTensor
from pagestone.convert.experts import LayerSource, find_layers
from pagestone.convert.family import Family
from pagestone.formats.codecs import Codec, ConfigFacts
from pagestone.formats.dtypes import FLOATS, item_size
from pagestone.formats.errors import LayoutError, RequestError
from pagestone.formats.layer_file import LayerFile, layer_file_name, sidecar_name
from pagestone.formats.layout import PAGE, PARTS, ExpertShape, record_layout, tensor_name
from pagestone.formats.manifest import EXPERTS, MANIFEST
from pagestone.formats.safetensors_header import build_header

DENSE_SHARD = 4 << 30
"""Bytes: dense tensors fill shards up to this size (a larger tensor has its own)."""
OUR_NAMES = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(EXPERTS)}|(layers|mtp)-\d+(\.rowsum)?\.safetensors|dense-\d+-of-\d+\.safetensors"
)
PARQUET_ROW = 200
"""Bytes: a generous estimate of one row of experts.parquet, for the disk space check only."""

CONVERTED, COPIED, UNKNOWN, DECODED, EXCLUDED = "converted", "copied", "copied unknown", "decoded", "excluded"


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
    file: LayerFile
    source: LayerSource
    nbytes: int
    sidecar: str | None
    sidecar_bytes: int


@dataclass(frozen=True, slots=True)
class DenseTarget:
    """One shard of dense tensors, written in the order of `tensors`."""

    name: str
    tensors: tuple[SourceTensor, ...]
    nbytes: int

    def head(self) -> bytes:
        """The bytes before the data, which begin at a multiple of 4096."""
        return _dense_head(self.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a conversion will do. Equal sources, codecs and options give equal plans."""

    checkpoint: Checkpoint
    family: Family
    codec: Codec
    partial: tuple[int, int] | None
    dispositions: tuple[Disposition, ...]
    layers: tuple[LayerTarget, ...]
    dense: tuple[DenseTarget, ...]
    side_files: tuple[SideFile, ...]
    generated: dict[str, bytes]
    """Small files made here: config.json and the index."""
    warnings: tuple[str, ...]

    @property
    def files(self) -> dict[str, int]:
        """Length in bytes of every file of the container but manifest.json and experts.parquet."""
        sizes = {name: len(data) for name, data in self.generated.items()}
        sizes |= {f.name: f.nbytes for f in self.side_files if f.rule is None}
        sizes |= {t.name: t.nbytes for t in self.dense}
        for target in self.layers:
            sizes[target.name] = target.nbytes
            if target.sidecar is not None:
                sizes[target.sidecar] = target.sidecar_bytes
        return sizes

    @property
    def bytes_in(self) -> int:
        """Bytes that will be read from the source."""
        used = sum(d.tensor.nbytes for d in self.dispositions if d.fate != EXCLUDED)
        return used + sum(f.nbytes for f in self.side_files if f.rule is None)

    @property
    def bytes_out(self) -> int:
        """Bytes the container will take, experts.parquet and manifest.json estimated."""
        rows = sum(t.file.count * len(PARTS) for t in self.layers)
        return sum(self.files.values()) + rows * PARQUET_ROW + len(self.files) * 200

    @property
    def lossless(self) -> bool:
        """Whether every expert weight survives exactly."""
        return all(dtype in self.codec.lossless_from for t in self.layers for dtype in t.source.dtypes)

    @property
    def source_facts(self) -> dict[str, Any]:
        """What the manifest says about the source: no path, no time."""
        return {
            "family": self.family.name,
            "model_type": str(self.checkpoint.text_config.get("model_type")),
            "fingerprint": self.checkpoint.fingerprint,
            "expert_dtypes": sorted({dtype for t in self.layers for dtype in t.source.dtypes}),
        }


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that orders numbers inside names by value, so that layer 10 comes after layer 2."""
    words = re.split(r"([0-9]{1,18})", name)
    return tuple((1, 0, w) if n % 2 == 0 else (0, int(w), "") for n, w in enumerate(words) if w)


def make_plan(
    checkpoint: Checkpoint, codec: Codec, *, layers: tuple[int, int] | None = None, include_code: bool = False
) -> Plan:
    """The plan for converting `checkpoint` with `codec`.

    `layers` = (first, end) keeps the experts of those decoder layers only. Raises `RequestError` for what cannot be
    converted (unknown family, not MoE, element types or shapes the codec cannot take) and `DataError` for what is
    broken; see `find_layers`.
    """
    family = _family(checkpoint)
    found, warnings = find_layers(checkpoint, family)
    kept = found
    if layers is not None:
        kept = _select(found, layers, checkpoint)
        layers = (layers[0], min(layers[1], 1 + max(s.layer for s in found if s.block == "layers")))
    width = len(str(max(s.layer for s in found)))
    targets = tuple(_layer_target(checkpoint, codec, source, width) for source in kept)
    by_tensor = {t.name: layer_file_name(s.block, s.layer, width) for s in found for t in s.tensors}
    written = {target.name for target in targets}

    dense = [t for t in checkpoint.tensors.values() if t.name not in by_tensor]
    shards = _dense_targets(dense)
    home = {t.name: shard.name for shard in shards for t in shard.tensors}
    dispositions = []
    for name in sorted(checkpoint.tensors, key=natural):
        tensor = checkpoint.tensors[name]
        if name not in by_tensor:
            fate, rule = (COPIED, f"{family.name}: dense") if family.known_name(name) else (UNKNOWN, "no rule knows it")
            dispositions.append(Disposition(tensor, fate, rule, home[name]))
        elif by_tensor[name] in written:
            dispositions.append(Disposition(tensor, CONVERTED, f"{family.name}: routed expert", by_tensor[name]))
        else:
            dispositions.append(Disposition(tensor, EXCLUDED, "--layers: experts of a layer not asked for", None))
    side = tuple(
        SideFile(f.name, f.nbytes, None) if include_code and f.rule == CODE else f for f in checkpoint.side_files
    )
    for shard in [*checkpoint.shards, *(f.name for f in side)]:
        if OUR_NAMES.fullmatch(shard):
            raise RequestError(
                "the source has a file named like one of a container's",
                code="E0604",
                file=checkpoint.path / shard,
                remedy="rename it, or leave it out of the source",
            )
    if checkpoint.text_config.get("mtp_num_hidden_layers") and not any(s.block == "mtp" for s in found):
        warnings.append("config.json announces a multi-token-prediction block, the checkpoint has none")
    unknown = [d.tensor.name for d in dispositions if d.fate == UNKNOWN]
    if unknown:
        warnings.append(f"{len(unknown)} tensors unknown to the family are copied as they are, first {unknown[0]}")
    if checkpoint.config.get("quantization_config") or checkpoint.text_config.get("quantization_config"):
        warnings.append("config.json states a quantization_config, but the experts are plain floats; the types decide")
    generated = {
        CONFIG: _config(checkpoint, codec, dense, targets),
        INDEX: _index(targets, shards),
    }
    return Plan(
        checkpoint,
        family,
        codec,
        layers,
        tuple(dispositions),
        targets,
        shards,
        side,
        generated,
        (*checkpoint.warnings, *warnings),
    )


def _family(checkpoint: Checkpoint) -> Family:
    family = families.of_config(checkpoint.config)
    if family is not None:
        return family
    names = [n for n in checkpoint.tensors if "expert" in n]
    model_type = checkpoint.text_config.get("model_type")
    if not names:
        raise RequestError(
            f"a Mixture-of-Experts checkpoint expected; model type {model_type!r} has no expert tensor",
            code="E0601",
            file=checkpoint.path,
            remedy="convert a Mixture-of-Experts checkpoint",
        )
    shown = sorted({re.sub(r"\d+", "N", n) for n in names})[:6]
    known = ", ".join(sorted({f.name for f in families.registry().values()}))
    raise RequestError(
        f"model type {model_type!r} is of no family known here ({known}); expert-like tensors: {', '.join(shown)}",
        code="E0602",
        file=checkpoint.path / CONFIG,
        remedy=f"add convert/families/{re.sub(r'[^a-z0-9_]', '_', str(model_type).lower())}.py, "
        "stating the family's names, fusion and orientation",
    )


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


def _layer_target(checkpoint: Checkpoint, codec: Codec, source: LayerSource, width: int) -> LayerTarget:
    for tensor in source.tensors:
        if tensor.dtype not in FLOATS:
            raise RequestError(
                f"expert weights in {' or '.join(FLOATS)} expected, found {tensor.dtype}",
                code="E0605",
                file=checkpoint.path / tensor.file,
                tensor=tensor.name,
                remedy="convert from the unquantised checkpoint",
            )
    file = LayerFile(codec, source.block, source.layer, source.prefix, source.shape, source.count, source.family.parts)
    name = layer_file_name(source.block, source.layer, width)
    try:
        nbytes = file.layout().file_size
        sidecar = sidecar_name(name) if file.sidecar_tensors() else None
    except LayoutError as error:
        raise LayoutError(error.message, code=error.code, file=checkpoint.path, tensor=source.prefix,
                          remedy=error.remedy) from None  # fmt: skip
    sums = 4 * source.count * sum(source.shape.matrix(p)[0] for p in PARTS)
    return LayerTarget(name, file, source, nbytes, sidecar, len(file.sidecar_head()) + sums if sidecar else 0)


def _dense_head(tensors: tuple[SourceTensor, ...]) -> bytes:
    entries, position = [], 0
    for tensor in tensors:
        entries.append((tensor.name, tensor.dtype, tensor.shape, position, position + tensor.nbytes))
        position += tensor.nbytes
    return build_header(entries, {"format": "pt"}, PAGE)


def _dense_targets(dense: list[SourceTensor]) -> tuple[DenseTarget, ...]:
    """Shards filled in natural order of names; within one, wider elements first so that all stay aligned.

    Neither depends on how the source was sharded.
    """
    groups: list[list[SourceTensor]] = []
    room = 0
    for tensor in sorted(dense, key=lambda t: natural(t.name)):
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = DENSE_SHARD
        groups[-1].append(tensor)
        room -= tensor.nbytes
    shards = []
    for number, group in enumerate(groups, 1):
        ordered = tuple(sorted(group, key=lambda t: (-_width(t.dtype), natural(t.name))))
        size = len(_dense_head(ordered)) + sum(t.nbytes for t in ordered)
        shards.append(DenseTarget(f"dense-{number:05d}-of-{len(groups):05d}.safetensors", ordered, size))
    return tuple(shards)


def _width(dtype: str) -> int:
    """Bytes an element must be aligned to; types narrower than a byte come last."""
    return 0 if dtype.startswith(("F4", "F6")) else item_size(dtype)


def config_facts(
    dense: Iterable[tuple[str, tuple[int, ...]]], shapes: Iterable[ExpertShape], part_names: tuple[str, str, str]
) -> ConfigFacts:
    """What codecs need for a `quantization_config`: from (name, shape) of every dense tensor, and the experts."""
    modules: set[str] = set()
    for name, dims in dense:
        if name.endswith(".weight") and len(dims) >= 2:
            module = name.removesuffix(".weight")
            # transformers strips the nesting when it loads the text model alone: both spellings must match
            modules |= {module, module.replace("model.language_model.", "model.", 1)}
    matrices = {shape.matrix(part) for shape in shapes for part in PARTS}
    return ConfigFacts(tuple(sorted(modules, key=natural)), tuple(sorted(matrices)), part_names)


def config_with(config: dict[str, Any], stated: dict[str, Any] | None) -> dict[str, Any]:
    """A config with this quantization_config, at top level and in text_config, and no other."""
    result = dict(config)
    places = [result]
    if isinstance(result.get("text_config"), dict):
        result["text_config"] = dict(result["text_config"])
        places.append(result["text_config"])
    for place in places:
        place.pop("quantization_config", None)
        if stated is not None:
            place["quantization_config"] = stated
    return result


def _config(checkpoint: Checkpoint, codec: Codec, dense: list[SourceTensor], targets: tuple[LayerTarget, ...]) -> bytes:
    """The source's config.json with a truthful quantization_config."""
    dense_shapes = ((t.name, t.shape) for t in dense)
    facts = config_facts(dense_shapes, (t.source.shape for t in targets), targets[0].file.part_names)
    config = config_with(checkpoint.config, codec.quantization_config(facts))
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _index(targets: tuple[LayerTarget, ...], shards: tuple[DenseTarget, ...]) -> bytes:
    """The index: every tensor but pads and sidecars."""
    weight_map: dict[str, str] = {}
    total = 0
    for name, file, size in _indexed(targets, shards):
        weight_map[name] = file
        total += size
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _indexed(targets: tuple[LayerTarget, ...], shards: tuple[DenseTarget, ...]) -> Iterator[tuple[str, str, int]]:
    for shard in shards:
        for tensor in shard.tensors:
            yield tensor.name, shard.name, tensor.nbytes
    for target in targets:
        file = target.file
        for slot in record_layout(file.codec, file.shape).slots:
            if slot.part is not None:
                for expert in range(file.count):
                    yield tensor_name(file.prefix, expert, file.part_names, slot), target.name, slot.nbytes


def check_paths(checkpoint: Path, output: Path) -> None:
    """Refuse an output that is the source, is inside it, or holds it (links resolved): nothing there may change."""
    source, target = checkpoint.resolve(), output.resolve()
    if source == target or source in target.parents or target in source.parents:
        relation = "is" if source == target else "is inside" if source in target.parents else "contains"
        raise RequestError(
            f"an output apart from the source expected; it {relation} {checkpoint}",
            code="E0606",
            file=output,
            remedy="give another --output",
        )
