"""From names to layers: which source tensors are routed experts, and of which layer, expert and part.

This is the last place that knows names of the source. Layouts are decided by the names that are there, a layer at a
time; element types imply nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagestone.convert.checkpoint import Checkpoint, SourceTensor
from pagestone.convert.claims import ACTIVATION_SUFFIXES, DOWNLOAD, REMEDIES, UNREAD, BySuffix, Claims, left_over
from pagestone.convert.family import Family, Fused, depth_of
from pagestone.convert.sizes import check_sizes
from pagestone.convert.sources import LayerSource, Place, Tensors
from pagestone.formats import encodings
from pagestone.formats.dtypes import FLOATS
from pagestone.formats.encodings import Claim, Refusal, Tensor
from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.layout import BIAS, CODES, PARTS, ExpertShape
from pagestone.formats.strict_json import whole

ID = r"(0|[1-9][0-9]{0,8})"
Failure = Callable[..., PagestoneError]
"""Makes an error of this layer: message, code, tensor (or None for the layer itself), remedy."""


@dataclass(slots=True)
class _LayerTensors:
    """The tensors of one layer, by matrix (expert, part) or by fused tensor, and there by suffix."""

    prefix: str
    split: dict[tuple[int, str], Tensors] = field(default_factory=dict)
    fused: dict[str, Tensors] = field(default_factory=dict)

    def group(self, place: Place) -> Tensors:
        """The tensors of one matrix, or of one fused tensor."""
        return self.fused.setdefault(place, {}) if isinstance(place, str) else self.split.setdefault(place, {})


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Every layer's routed experts in order (decoder layers, then MTP), names left out on purpose, and warnings."""

    layers: tuple[LayerSource, ...]
    activation_scales: frozenset[str]
    warnings: tuple[str, ...]


def find_layers(checkpoint: Checkpoint, family: Family) -> RoutedExperts:
    """Sort the checkpoint's expert tensors into layers.

    Raises `DataError` for a name below an experts module that the family does not claim, a missing part or expert, a
    shape or scale that does not fit, two layouts in one layer; if there are fewer MoE layers than the config says, or
    blocks of multi-token prediction that cannot be such; and for sizes that `check_sizes` refuses.
    """
    config = checkpoint.text_config
    depth = depth_of(config)
    if depth is None:
        raise DataError(
            "num_hidden_layers expected, found none", code="E0501", file=checkpoint.path / "config.json",
            remedy="download config.json again",
        )  # fmt: skip
    activations: set[str] = set()
    by_layer = _walk(checkpoint, family, depth, activations)
    if not by_layer:
        raise RequestError(
            f"routed experts of the family {family.name} expected, found none in {len(checkpoint.tensors)} tensors",
            code="E0502", file=checkpoint.path, remedy="convert a Mixture-of-Experts checkpoint",
        )  # fmt: skip
    dense = family.dense_layers(config)
    missing = [n for n in range(depth) if n not in dense and ("layers", n) not in by_layer]
    if missing:
        raise DataError(
            f"{depth - len(dense)} MoE layers expected from config.json, found {depth - len(dense) - len(missing)}; "
            f"layer {missing[0]} is the first without experts",
            code="E0503", file=checkpoint.path, remedy="download the missing shards, or correct config.json",
        )  # fmt: skip
    _check_mtp(checkpoint, family, by_layer, depth)
    warnings: list[str] = []
    layers = tuple(_layer(checkpoint, family, key, by_layer[key], warnings) for key in sorted(by_layer))
    warnings += check_sizes(checkpoint, family, layers, depth)
    return RoutedExperts(layers, frozenset(activations), tuple(warnings))


# -- names -----------------------------------------------------------------------------------------------------------


def _walk(
    checkpoint: Checkpoint, family: Family, depth: int, activations: set[str]
) -> dict[tuple[str, int], _LayerTensors]:
    """Sort every tensor below an experts module into its layer."""
    roots = dict.fromkeys(family.decoders, "layers") | dict.fromkeys(family.mtp, "mtp")
    layer = re.compile(rf"({'|'.join(map(re.escape, roots))})\.{ID}\.(.+)")
    by_layer: dict[tuple[str, int], _LayerTensors] = {}
    places: dict[Place, Place] = {}  # the same in every layer, and kept once
    known = encodings.suffixes() | {BIAS, *ACTIVATION_SUFFIXES}
    for name, tensor in checkpoint.tensors.items():
        if family.markers.isdisjoint(name.split(".")):
            continue
        match = layer.fullmatch(name)
        placed = None if match is None else _place(family, match[3], known)
        if match is None or placed is None:
            raise _unclaimed(checkpoint, family, tensor)
        block, number = roots[match[1]], int(match[2])
        if block == "layers" and number >= depth:
            if not family.mtp_as_extra_layer:
                raise DataError(
                    f"{depth} decoder layers expected from config.json, found layer {number}", code="E0505",
                    file=checkpoint.path / tensor.file, tensor=name, remedy="correct config.json",
                )  # fmt: skip
            block, number = "mtp", number - depth
        prefix = f"{match[1]}.{match[2]}.{family.experts}"
        entry = by_layer.setdefault((block, number), _LayerTensors(prefix))
        if entry.prefix != prefix:
            raise DataError(
                f"layer {number} stands under {entry.prefix} and under {prefix}", code="E0506",
                file=checkpoint.path / tensor.file, tensor=name, remedy="remove one of the two copies",
            )  # fmt: skip
        place, suffix = places.setdefault(placed[0], placed[0]), sys.intern(placed[1])
        if suffix in ACTIVATION_SUFFIXES:
            activations.add(name)
            continue
        group = entry.group(place)
        if suffix in group:
            raise DataError(
                f"{group[suffix].name} is the {suffix} of the same matrix", code="E0512",
                file=checkpoint.path / tensor.file, tensor=name, remedy="remove one of the two copies",
            )  # fmt: skip
        group[suffix] = tensor
    return by_layer


def _check_mtp(
    checkpoint: Checkpoint, family: Family, by_layer: dict[tuple[str, int], _LayerTensors], depth: int
) -> None:
    """Blocks of multi-token prediction are numbered from 0 without a hole, and are no more than the config announces:
    else a decoder layer that the config forgot would pass for one."""
    numbers = sorted(number for block, number in by_layer if block == "mtp")
    announced = whole(checkpoint.text_config, family.mtp_field)
    for want, number in enumerate(numbers):
        if number == want and (announced is None or number < announced):
            continue
        said = "as many as there are" if announced is None else f"{announced} ({family.mtp_field})"
        raise DataError(
            f"experts in {depth} decoder layers, then in blocks of multi-token prediction 0, 1, ..., {said}, expected "
            f"from config.json; found block {number} " + ("beyond them" if number == want else f"without block {want}"),
            code="E0505", file=checkpoint.path / "config.json", tensor=by_layer["mtp", number].prefix,
            remedy="correct num_hidden_layers in config.json, or download the missing shards",
        )  # fmt: skip


def _place(family: Family, tail: str, known: frozenset[str]) -> tuple[Place, str] | None:
    """((expert, part) or the fused tensor, suffix) of a name's tail below its layer; None if the family has no such."""
    parts = dict(zip(family.parts, PARTS, strict=True))
    single = re.fullmatch(rf"{re.escape(family.experts)}\.{ID}\.({'|'.join(map(re.escape, parts))})\.(\w+)", tail)
    if single is not None and single[3] in known:
        return (int(single[1]), parts[single[2]]), single[3]
    if family.fused is not None:
        for place, name, bias in (("gate_up", family.fused.gate_up, family.fused.gate_up_bias),
                                  ("down", family.fused.down, family.fused.down_bias)):  # fmt: skip
            if bias is not None and tail == bias:
                return place, BIAS
            stem = name.removesuffix(".weight")
            if tail.startswith(stem):
                suffix = _fused_suffix(tail[len(stem) :])
                if suffix in known - {BIAS}:
                    return place, suffix
    return None


def _fused_suffix(end: str) -> str:
    """What stands after the name of a fused tensor, as it is below a matrix: "" and ".weight", "_scale_inv" and
    ".weight_scale_inv" are the same."""
    if end.startswith("."):
        return end[1:]
    return end[1:] if end[1:] in ACTIVATION_SUFFIXES else f"weight{end}"


def _unclaimed(checkpoint: Checkpoint, family: Family, tensor: SourceTensor) -> PagestoneError:
    file = checkpoint.path / tensor.file
    return DataError(
        f"the family {family.name} claims no such expert tensor", code="E0504", file=file, tensor=tensor.name,
        remedy="convert it with a version that knows it, or add it to "
        f"convert/families/{family.name}.py; leaving it out would lose weights",
    )  # fmt: skip


# -- layers ----------------------------------------------------------------------------------------------------------


def _layer(
    checkpoint: Checkpoint, family: Family, key: tuple[str, int], tensors: _LayerTensors, warnings: list[str]
) -> LayerSource:
    def fail(message: str, code: str, tensor: SourceTensor | None, remedy: str) -> PagestoneError:
        file = checkpoint.path if tensor is None else checkpoint.path / tensor.file
        name = tensors.prefix if tensor is None else tensor.name
        kind = RequestError if code == UNREAD else DataError
        return kind(message, code=code, file=file, tensor=name, remedy=remedy)

    if tensors.split and tensors.fused:
        first = next(iter(next(iter(tensors.fused.values())).values()))
        raise fail(
            "this layer holds fused and per-expert tensors at once", "E0507", first, "remove one of the two copies"
        )
    claims = Claims(checkpoint.config)
    layer = (_fused if tensors.fused else _split)(family, key, tensors, claims, fail)
    _check_count(checkpoint, family, layer, fail, warnings)
    return layer


INCOMPLETE = "download the checkpoint again: it is incomplete"


def _claim(claims: Claims, group: Tensors, shapes: BySuffix, fail: Failure) -> Claim:
    """How a group is stored, `shapes` being what its tensors hold of one matrix; no tensor of it may be left over."""
    answer = claims.of(shapes)
    if isinstance(answer, Claim):
        rest = left_over(answer, shapes)
        if rest is None and answer.rows and answer.columns:
            return answer
        codes = answer.suffixes[CODES]
        answer = rest or Refusal("E0510", codes, f"a non-empty matrix expected, found {list(shapes[codes].shape)}")
    raise fail(answer.message, answer.code, group[answer.suffix], REMEDIES.get(answer.code, DOWNLOAD))


def _split(family: Family, key: tuple[str, int], tensors: _LayerTensors, claims: Claims, fail: Failure) -> LayerSource:
    ids = sorted({expert for expert, _ in tensors.split})
    for want, have in enumerate(ids):
        if want != have:
            message = f"expert {want} is missing: experts 0 to {ids[-1]} expected, found {len(ids)}"
            raise fail(message, "E0509", None, INCOMPLETE)
    names, weights = dict(zip(PARTS, family.parts, strict=True)), encodings.codes_suffixes()
    for expert in ids:
        for part in PARTS:
            if not any(name in tensors.split.get((expert, part), {}) for name in weights):
                raise fail(f"expert {expert} lacks {names[part]}.{weights[0]}", "E0508", None, INCOMPLETE)
    biases = {(key, BIAS in group) for key, group in tensors.split.items()}
    if len({has for _, has in biases}) > 1:
        raise fail("some matrices of this layer have a bias and some have none", "E0508", None, INCOMPLETE)
    made = {
        place: _claim(claims, group, {n: t for n, t in group.items() if n != BIAS}, fail)
        for place, group in tensors.split.items()
    }
    bias = tensors.split[0, "down"].get(BIAS)
    shape = ExpertShape(made[0, "down"].rows, made[0, "down"].columns, None if bias is None else bias.dtype)
    for (expert, part), group in tensors.split.items():
        claim = made[expert, part]
        if (claim.rows, claim.columns) != shape.matrix(part):
            tensor = group[claim.suffixes[CODES]]
            raise fail(
                f"{list(shape.matrix(part))} expected as in expert 0, found {list(tensor.shape)}", "E0510", tensor,
                "download the checkpoint again: this expert does not belong to the layer",
            )  # fmt: skip
        _check_bias(group, (shape.matrix(part)[0],), shape, fail)
    return LayerSource(*key, tensors.prefix, len(ids), shape, family.parts, groups=tensors.split, claims=made)


def _fused(family: Family, key: tuple[str, int], tensors: _LayerTensors, claims: Claims, fail: Failure) -> LayerSource:
    assert family.fused is not None
    holding = []
    for part in ("gate_up", "down"):
        group = tensors.fused.get(part, {})
        tensor = next((group[n] for n in encodings.codes_suffixes() if n in group), None)
        if tensor is None:
            raise fail(f"the fused {part} tensor of this layer is missing", "E0508", None, INCOMPLETE)
        if len(tensor.shape) != 3 or 0 in tensor.shape:
            raise fail(
                f"a non-empty [experts, ., .] tensor expected, found {list(tensor.shape)}", "E0510", tensor,
                "download the checkpoint again, or name the right family in config.json",
            )  # fmt: skip
        holding.append(tensor)
    wide, tall = holding
    count = wide.shape[0]
    made = {place: _fused_claim(claims, group, count, fail) for place, group in tensors.fused.items()}
    down = (made["down"].rows, made["down"].columns)
    gate_up = (made["gate_up"].rows, made["gate_up"].columns)
    fused = family.fused
    if fused.either_way:
        fused = next((f for f in (fused, replace(fused, transposed=not fused.transposed))
                      if gate_up == _wide_shape(f, down)), fused)  # fmt: skip
    for place, claim in made.items():
        if claim.encoding.plain is None and (fused.transposed or fused.interleaved):
            other = next(t for n, t in tensors.fused[place].items() if n != claim.suffixes[CODES])
            raise fail("a transposed or interleaved fused tensor with scales is not read", UNREAD, other,
                       REMEDIES[UNREAD])  # fmt: skip
    hidden, intermediate = down[::-1] if fused.transposed else down
    wanted = _wide_shape(fused, down)
    if gate_up != wanted or tall.shape[0] != count:
        raise fail(
            f"{[count, *wanted]} expected beside {tall.name} {list(tall.shape)}, found {list(wide.shape)}", "E0510",
            wide, "download the checkpoint again: the two tensors do not belong together",
        )  # fmt: skip
    if (BIAS in tensors.fused["gate_up"]) != (BIAS in tensors.fused["down"]):
        raise fail("one of the two fused tensors has a bias, the other has none", "E0508", None, INCOMPLETE)
    bias = tensors.fused["down"].get(BIAS)
    shape = ExpertShape(hidden, intermediate, None if bias is None else bias.dtype)
    _check_bias(tensors.fused["gate_up"], (count, 2 * intermediate), shape, fail)
    _check_bias(tensors.fused["down"], (count, hidden), shape, fail)
    return LayerSource(*key, tensors.prefix, count, shape, family.parts, fused, tensors.fused, made)


def _fused_claim(claims: Claims, group: Tensors, count: int, fail: Failure) -> Claim:
    """How a fused tensor holds one expert; a scalar has no first axis to take apart: it serves one matrix only."""
    shapes = {}
    for name, tensor in group.items():
        if name == BIAS:
            continue
        if tensor.shape[:1] != (count,) and name not in encodings.codes_suffixes():
            raise fail(f"[{count}, ...], something for each expert, expected, found {list(tensor.shape)}", "E0515",
                       tensor, REMEDIES["E0515"])  # fmt: skip
        shapes[name] = Tensor(tensor.dtype, tensor.shape[1:])
    return _claim(claims, group, shapes, fail)


def _wide_shape(fused: Fused, down: tuple[int, int]) -> tuple[int, int]:
    """The shape of an expert's gate_up beside a down of this shape, as they are stored."""
    first, second = down
    return (second, 2 * first) if fused.transposed else (2 * second, first)


def _check_bias(group: Tensors, wanted: tuple[int, ...], shape: ExpertShape, fail: Failure) -> None:
    bias = group.get(BIAS)
    if bias is None:
        return
    if bias.dtype not in FLOATS or bias.dtype != shape.bias_dtype or bias.shape != wanted:
        raise fail(f"a bias {shape.bias_dtype} {list(wanted)} expected, found {bias.dtype} {list(bias.shape)}", "E0510",
                   bias, "download the checkpoint again")  # fmt: skip


def _check_count(
    checkpoint: Checkpoint, family: Family, layer: LayerSource, fail: Failure, warnings: list[str]
) -> None:
    """The router says how many experts a layer has; the config, where there is no router."""
    stated = family.experts_of(checkpoint.text_config)
    parent = layer.prefix.removesuffix("." + family.experts)
    router = checkpoint.tensors.get(f"{parent}.{family.router}")
    rows = None if router is None or not router.shape else router.shape[0]
    wanted = stated if rows is None else rows
    if wanted is not None and wanted != layer.count:
        source = "config.json" if router is None else router.name
        raise fail(
            f"{wanted} experts expected from {source}, found {layer.count}", "E0509", None,
            "download the checkpoint again: experts are missing, or it does not belong to its config",
        )  # fmt: skip
    if stated is not None and stated != layer.count:
        warnings.append(f"{layer.prefix}: {layer.count} experts, config.json says {stated}; running will be refused")
