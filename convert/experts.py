"""From names to layers: which source tensors are routed experts, and of which layer, expert and part.

This is the last place that knows names of the source. Layouts are decided by the names that are there, a layer at a
time; element types imply nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagestone.convert.checkpoint import Checkpoint, SourceTensor
from pagestone.convert.family import Family, Fused, depth_of
from pagestone.convert.scales import ACTIVATION_SUFFIXES, UNREAD, block_size, resolve
from pagestone.convert.sizes import check_sizes
from pagestone.convert.sources import LayerSource, Tensors
from pagestone.formats.dtypes import FLOATS
from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.layout import PARTS, ExpertShape
from pagestone.formats.quantised import KINDS, SCALE_DTYPES
from pagestone.formats.strict_json import whole

ID = r"(0|[1-9][0-9]{0,8})"
ROLES = {
    "weight": "weight", "weight_scale_inv": "scale", "weight_scale": "scale", "scale": "scale",
    "weight_zero_point": "zero", "bias": "bias",
} | dict.fromkeys(ACTIVATION_SUFFIXES, "activation")  # fmt: skip
"""What follows a matrix's name, and what it is. Activation scales are known and left out: experts are weight-only."""
FUSED_ROLES = {"": "weight", "_scale_inv": "scale", "_scale": "scale", ".weight": "weight",
               ".weight_scale_inv": "scale", ".weight_scale": "scale",
               "_input_scale": "activation", ".input_scale": "activation"}  # fmt: skip
Failure = Callable[..., PagestoneError]
"""Makes an error of this layer: message, code, tensor (or None for the layer itself), remedy."""


@dataclass(slots=True)
class _Found:
    """What was seen of one layer while walking the names."""

    prefix: str
    split: dict[tuple[int, str], Tensors] = field(default_factory=dict)
    fused: dict[str, Tensors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """Every layer's routed experts in order (decoder layers, then MTP), names left out on purpose, and warnings."""

    layers: tuple[LayerSource, ...]
    activation_scales: frozenset[str]
    warnings: tuple[str, ...]


def find_layers(checkpoint: Checkpoint, family: Family) -> FoundExperts:
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
    found = _walk(checkpoint, family, depth, activations)
    if not found:
        raise RequestError(
            f"routed experts of the family {family.name} expected, found none in {len(checkpoint.tensors)} tensors",
            code="E0502", file=checkpoint.path, remedy="convert a Mixture-of-Experts checkpoint",
        )  # fmt: skip
    dense = family.dense_layers(config)
    missing = [n for n in range(depth) if n not in dense and ("layers", n) not in found]
    if missing:
        raise DataError(
            f"{depth - len(dense)} MoE layers expected from config.json, found {depth - len(dense) - len(missing)}; "
            f"layer {missing[0]} is the first without experts",
            code="E0503", file=checkpoint.path, remedy="download the missing shards, or correct config.json",
        )  # fmt: skip
    _check_mtp(checkpoint, family, found, depth)
    warnings: list[str] = []
    layers = tuple(_layer(checkpoint, family, key, found[key], warnings) for key in sorted(found))
    warnings += check_sizes(checkpoint, family, layers, depth)
    return FoundExperts(layers, frozenset(activations), tuple(warnings))


# -- names -----------------------------------------------------------------------------------------------------------


def _walk(checkpoint: Checkpoint, family: Family, depth: int, activations: set[str]) -> dict[tuple[str, int], _Found]:
    """Sort every tensor below an experts module into its layer."""
    roots = dict.fromkeys(family.decoders, "layers") | dict.fromkeys(family.mtp, "mtp")
    layer = re.compile(rf"({'|'.join(map(re.escape, roots))})\.{ID}\.(.+)")
    found: dict[tuple[str, int], _Found] = {}
    for name, tensor in checkpoint.tensors.items():
        if family.markers.isdisjoint(name.split(".")):
            continue
        match = layer.fullmatch(name)
        claim = None if match is None else _claim(family, match[3])
        if match is None or claim is None:
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
        entry = found.setdefault((block, number), _Found(prefix))
        if entry.prefix != prefix:
            raise DataError(
                f"layer {number} stands under {entry.prefix} and under {prefix}", code="E0506",
                file=checkpoint.path / tensor.file, tensor=name, remedy="remove one of the two copies",
            )  # fmt: skip
        place, role = claim
        if role == "activation":
            activations.add(name)
            continue
        group = entry.fused.setdefault(place, {}) if isinstance(place, str) else entry.split.setdefault(place, {})
        if role in group:
            raise DataError(
                f"{group[role].name} is a {role} of the same matrix", code="E0512", file=checkpoint.path / tensor.file,
                tensor=name, remedy="remove one of the two copies",
            )  # fmt: skip
        group[role] = tensor
    return found


def _check_mtp(checkpoint: Checkpoint, family: Family, found: dict[tuple[str, int], _Found], depth: int) -> None:
    """Blocks of multi-token prediction are numbered from 0 without a hole, and are no more than the config announces:
    else a decoder layer that the config forgot would pass for one."""
    numbers = sorted(number for block, number in found if block == "mtp")
    announced = whole(checkpoint.text_config, family.mtp_field)
    for want, number in enumerate(numbers):
        if number == want and (announced is None or number < announced):
            continue
        said = "as many as there are" if announced is None else f"{announced} ({family.mtp_field})"
        raise DataError(
            f"experts in {depth} decoder layers, then in blocks of multi-token prediction 0, 1, ..., {said}, expected "
            f"from config.json; found block {number} " + ("beyond them" if number == want else f"without block {want}"),
            code="E0505", file=checkpoint.path / "config.json", tensor=found["mtp", number].prefix,
            remedy="correct num_hidden_layers in config.json, or download the missing shards",
        )  # fmt: skip


def _claim(family: Family, tail: str) -> tuple[str | tuple[int, str], str] | None:
    """((expert, part) or the fused tensor, role) of a name's tail below its layer; None if the family claims it not."""
    parts = dict(zip(family.parts, PARTS, strict=True))
    single = re.fullmatch(rf"{re.escape(family.experts)}\.{ID}\.({'|'.join(map(re.escape, parts))})\.(\w+)", tail)
    if single is not None and single[3] in ROLES:
        return (int(single[1]), parts[single[2]]), ROLES[single[3]]
    if family.fused is not None:
        for place, name, bias in (("gate_up", family.fused.gate_up, family.fused.gate_up_bias),
                                  ("down", family.fused.down, family.fused.down_bias)):  # fmt: skip
            if bias is not None and tail == bias:
                return place, "bias"
            if tail == name:
                return place, "weight"
            stem = name.removesuffix(".weight")
            if tail.startswith(stem) and tail[len(stem) :] in FUSED_ROLES:
                return place, FUSED_ROLES[tail[len(stem) :]]
    return None


def _unclaimed(checkpoint: Checkpoint, family: Family, tensor: SourceTensor) -> PagestoneError:
    file = checkpoint.path / tensor.file
    return DataError(
        f"the family {family.name} claims no such expert tensor", code="E0504", file=file, tensor=tensor.name,
        remedy="convert it with a version that knows it, or add it to "
        f"convert/families/{family.name}.py; leaving it out would lose weights",
    )  # fmt: skip


# -- layers ----------------------------------------------------------------------------------------------------------


def _layer(
    checkpoint: Checkpoint, family: Family, key: tuple[str, int], found: _Found, warnings: list[str]
) -> LayerSource:
    def fail(message: str, code: str, tensor: SourceTensor | None, remedy: str) -> PagestoneError:
        file = checkpoint.path if tensor is None else checkpoint.path / tensor.file
        name = found.prefix if tensor is None else tensor.name
        kind = RequestError if code == UNREAD else DataError
        return kind(message, code=code, file=file, tensor=name, remedy=remedy)

    if found.split and found.fused:
        first = next(iter(next(iter(found.fused.values())).values()))
        raise fail(
            "this layer holds fused and per-expert tensors at once", "E0507", first, "remove one of the two copies"
        )
    again = "download the checkpoint again: it is incomplete"
    if found.fused:
        for part in ("gate_up", "down"):
            if "weight" not in found.fused.get(part, {}):
                raise fail(f"the fused {part} tensor of this layer is missing", "E0508", None, again)
        layer = _fused(family, key, found, fail)
    else:
        layer = _split(family, key, found, fail)
    for group in (*found.split.values(), *found.fused.values()):
        _check_types(group, fail)
    layer = replace(layer, scales=_scales(checkpoint, layer, fail))
    _check_count(checkpoint, family, layer, fail, warnings)
    return layer


def _split(family: Family, key: tuple[str, int], found: _Found, fail: Failure) -> LayerSource:
    again = "download the checkpoint again: it is incomplete"
    ids = sorted({expert for expert, _ in found.split})
    for want, have in enumerate(ids):
        if want != have:
            message = f"expert {want} is missing: experts 0 to {ids[-1]} expected, found {len(ids)}"
            raise fail(message, "E0509", None, again)
    names = dict(zip(PARTS, family.parts, strict=True))
    for expert in ids:
        for part in PARTS:
            if "weight" not in found.split.get((expert, part), {}):
                raise fail(f"expert {expert} lacks {names[part]}.weight", "E0508", None, again)
    first = found.split[0, "down"]["weight"]
    if len(first.shape) != 2 or 0 in first.shape:
        message = f"a non-empty [hidden, intermediate] matrix expected, found {list(first.shape)}"
        raise fail(message, "E0510", first, "download the checkpoint again")
    biases = {(key, "bias" in group) for key, group in found.split.items()}
    if len({has for _, has in biases}) > 1:
        raise fail("some matrices of this layer have a bias and some have none", "E0508", None, again)
    bias = found.split[0, "down"].get("bias")
    shape = ExpertShape(first.shape[0], first.shape[1], None if bias is None else bias.dtype)
    for (_, part), group in found.split.items():
        tensor = group["weight"]
        if tensor.shape != shape.matrix(part):
            message = f"{list(shape.matrix(part))} expected as in expert 0, found {list(tensor.shape)}"
            raise fail(
                message, "E0510", tensor, "download the checkpoint again: this expert does not belong to the layer"
            )
        _check_bias(group, (shape.matrix(part)[0],), shape, fail)
    return LayerSource(*key, found.prefix, len(ids), shape, family.parts, split=found.split)


def _fused(family: Family, key: tuple[str, int], found: _Found, fail: Failure) -> LayerSource:
    assert family.fused is not None
    gate_up, down = found.fused["gate_up"], found.fused["down"]
    for group in (gate_up, down):
        tensor = group["weight"]
        if len(tensor.shape) != 3 or 0 in tensor.shape:
            raise fail(
                f"a non-empty [experts, ., .] tensor expected, found {list(tensor.shape)}", "E0510", tensor,
                "download the checkpoint again, or name the right family in config.json",
            )  # fmt: skip
    wide, tall = gate_up["weight"], down["weight"]
    count = wide.shape[0]
    fused = family.fused
    if fused.either_way:
        fused = next((f for f in (fused, replace(fused, transposed=not fused.transposed))
                      if wide.shape == _wide_shape(f, count, tall)), fused)  # fmt: skip
    for group in (gate_up, down):
        if "scale" in group and (fused.transposed or fused.interleaved):
            raise fail("a transposed or interleaved fused tensor with scales is not read", UNREAD, group["scale"],
                       "convert from the unquantised release of the model")  # fmt: skip
    hidden, intermediate = tall.shape[1:][::-1] if fused.transposed else tall.shape[1:]
    wanted = _wide_shape(fused, count, tall)
    if wide.shape != wanted or tall.shape[0] != count:
        raise fail(
            f"{list(wanted)} expected beside {tall.name} {list(tall.shape)}, found {list(wide.shape)}", "E0510", wide,
            "download the checkpoint again: the two tensors do not belong together",
        )  # fmt: skip
    if ("bias" in gate_up) != ("bias" in down):
        raise fail("one of the two fused tensors has a bias, the other has none", "E0508", None,
                   "download the checkpoint again: it is incomplete")  # fmt: skip
    bias = down.get("bias")
    shape = ExpertShape(hidden, intermediate, None if bias is None else bias.dtype)
    _check_bias(gate_up, (count, 2 * intermediate), shape, fail)
    _check_bias(down, (count, hidden), shape, fail)
    return LayerSource(*key, found.prefix, count, shape, family.parts, fused, gate_up, down)


def _wide_shape(fused: Fused, count: int, down: SourceTensor) -> tuple[int, ...]:
    """The shape of gate_up beside a down of this shape."""
    first, second = down.shape[1:]
    return (count, second, 2 * first) if fused.transposed else (count, 2 * second, first)


def _check_bias(group: Tensors, wanted: tuple[int, ...], shape: ExpertShape, fail: Failure) -> None:
    bias = group.get("bias")
    if bias is None:
        return
    if bias.dtype not in FLOATS or bias.dtype != shape.bias_dtype or bias.shape != wanted:
        raise fail(f"a bias {shape.bias_dtype} {list(wanted)} expected, found {bias.dtype} {list(bias.shape)}", "E0510",
                   bias, "download the checkpoint again")  # fmt: skip


def _check_types(group: Tensors, fail: Failure) -> None:
    """Weights are floats, or codes with a scale; scales and zero points are of types that can be read exactly."""
    weight, scale, zero = group["weight"], group.get("scale"), group.get("zero")
    unquantised = "convert from the unquantised release of the model"
    if weight.dtype in KINDS:
        if scale is None:
            raise fail(f"a weight_scale_inv or weight_scale beside {weight.dtype} codes expected, found none", "E0513",
                       weight, "download the checkpoint again: codes mean nothing without their scale")  # fmt: skip
        if scale.dtype not in SCALE_DTYPES:
            raise fail(
                f"a scale in {', '.join(SCALE_DTYPES)} expected, found {scale.dtype}", UNREAD, scale, unquantised
            )
        if zero is not None and (weight.dtype != "I8" or zero.dtype != "I8"):
            raise fail(f"zero points in I8 beside I8 codes expected, found {zero.dtype}", UNREAD, zero, unquantised)
    elif weight.dtype not in FLOATS:
        known = ", ".join((*FLOATS, *KINDS))
        raise fail(f"expert weights in {known} expected, found {weight.dtype}", UNREAD, weight, unquantised)
    elif scale is not None or zero is not None:
        extra = scale or zero
        raise fail(f"codes beside this scale expected, found {weight.dtype} weights", "E0513", extra,
                   "download the checkpoint again: weights and scales do not belong together")  # fmt: skip


def _scales(
    checkpoint: Checkpoint, layer: LayerSource, fail: Failure
) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Grid and block of every scale tensor of the layer; checks zero points too."""
    stated = block_size(checkpoint.config)
    resolved: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}

    def one(group: Tensors, rows: int, columns: int, lead: tuple[int, ...]) -> None:
        scale, zero = group.get("scale"), group.get("zero")
        if scale is not None:
            # a scalar has no first axis to take apart: it serves one matrix only
            dims = scale.shape[1:] if lead and scale.shape[:1] == lead else scale.shape if not lead else None
            found = None if dims is None else resolve(dims, rows, columns, stated)
            if found is None:
                raise fail(
                    f"a scale [], [1], [{rows}], [{rows}, 1] or a block grid for {group['weight'].name} "
                    f"{list(group['weight'].shape)} expected, found {list(scale.shape)} (weight_block_size {stated})",
                    "E0515", scale, "correct weight_block_size in config.json, or download the checkpoint again",
                )  # fmt: skip
            resolved[scale.name] = found
        if zero is not None and (lead or zero.shape not in ((rows,), (rows, 1))):
            raise fail(f"zero points [{rows}, 1] expected, found {list(zero.shape)}", "E0515", zero,
                       "convert from the unquantised release of the model")  # fmt: skip

    if layer.is_fused:
        one(layer.gate_up, 2 * layer.shape.intermediate, layer.shape.hidden, (layer.count,))
        one(layer.down, layer.shape.hidden, layer.shape.intermediate, (layer.count,))
    for (_, part), group in layer.split.items():
        one(group, *layer.shape.matrix(part), ())
    return resolved


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
