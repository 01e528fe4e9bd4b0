"""Where every expert's matrices lie in the source, whatever the checkpoint's layout.

This is the last place that knows names of the source: a layer's tensors are sorted into `LayerSource`s, and the
pipeline then asks only for byte ranges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pagestone.convert.checkpoint import Checkpoint, SourceTensor
from pagestone.convert.family import Family
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layout import PARTS, ExpertShape

Failure = Callable[[str, str, SourceTensor | None, str], DataError]
"""Makes an error of this layer from message, code, tensor (or None for the layer itself) and remedy."""
ID = r"(0|[1-9][0-9]{0,8})"


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """One matrix in the source: `nbytes` bytes at `offset` of `tensor`'s file hold a `stored` matrix (rows, columns).

    The matrix wanted is that one, transposed if `transposed`, and of its rows every `step`-th from `start`.
    """

    tensor: SourceTensor
    offset: int
    nbytes: int
    stored: tuple[int, int]
    transposed: bool = False
    start: int = 0
    step: int = 1

    @property
    def plain(self) -> bool:
        """The bytes are the matrix, row by row."""
        return not self.transposed and self.start == 0 and self.step == 1


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The routed experts of one layer as the checkpoint holds them.

    `block` is "layers" or "mtp", `layer` its number there, `prefix` the full name of the experts module. Per-expert
    layouts fill `split` (expert, part); fused layouts fill `gate_up` and `down`.
    """

    block: str
    layer: int
    prefix: str
    count: int
    shape: ExpertShape
    family: Family
    split: dict[tuple[int, str], SourceTensor] = field(default_factory=dict)
    gate_up: SourceTensor | None = None
    down: SourceTensor | None = None

    @property
    def tensors(self) -> Iterable[SourceTensor]:
        """Every source tensor this layer is made from."""
        if self.gate_up is not None and self.down is not None:
            return (self.gate_up, self.down)
        return self.split.values()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types of those tensors, each once."""
        return tuple(sorted({t.dtype for t in self.tensors}))

    def matrix(self, expert: int, part: str) -> MatrixSource:
        """Where one matrix of one expert lies."""
        rows, columns = self.shape.matrix(part)
        if self.gate_up is None or self.down is None:
            tensor = self.split[expert, part]
            return MatrixSource(tensor, tensor.offset, tensor.nbytes, (rows, columns))
        fused = self.family.fused
        assert fused is not None
        tensor = self.down if part == "down" else self.gate_up
        block = tensor.nbytes // self.count
        base = tensor.offset + expert * block
        if part == "down":
            stored = (columns, rows) if fused.transposed else (rows, columns)
            return MatrixSource(tensor, base, block, stored, fused.transposed)
        second = int(part == "up")
        if not fused.transposed and not fused.interleaved:
            half = block // 2
            return MatrixSource(tensor, base + second * half, half, (rows, columns))
        stored = (columns, 2 * rows) if fused.transposed else (2 * rows, columns)
        start, step = (second, 2) if fused.interleaved else (second * rows, 1)
        return MatrixSource(tensor, base, block, stored, fused.transposed, start, step)


@dataclass(slots=True)
class _Found:
    """What was seen of one layer while walking the names."""

    prefix: str
    split: dict[tuple[int, str], SourceTensor] = field(default_factory=dict)
    fused: dict[str, SourceTensor] = field(default_factory=dict)


def find_layers(checkpoint: Checkpoint, family: Family) -> tuple[list[LayerSource], list[str]]:
    """Every layer's routed experts in order (decoder layers, then MTP), and warnings.

    Raises `DataError` for a name below an experts module that the family does not claim, a missing part or expert, a
    shape that does not fit, two layouts in one layer; and if there are fewer MoE layers than the config says.
    """
    config = checkpoint.text_config
    depth = config.get("num_hidden_layers")
    if not isinstance(depth, int):
        raise DataError(
            "num_hidden_layers expected, found none",
            code="E0501",
            file=checkpoint.path / "config.json",
            remedy="download config.json again",
        )
    found = _walk(checkpoint, family, depth)
    if not found:
        raise RequestError(
            f"routed experts of the family {family.name} expected, found none in {len(checkpoint.tensors)} tensors",
            code="E0502",
            file=checkpoint.path,
            remedy="convert a Mixture-of-Experts checkpoint",
        )
    dense = family.dense_layers(config)
    missing = [n for n in range(depth) if n not in dense and ("layers", n) not in found]
    if missing:
        raise DataError(
            f"{depth - len(dense)} MoE layers expected from config.json, found {depth - len(dense) - len(missing)}; "
            f"layer {missing[0]} is the first without experts",
            code="E0503",
            file=checkpoint.path,
            remedy="download the missing shards, or correct config.json",
        )
    warnings: list[str] = []
    layers = [_layer(checkpoint, family, key, found[key], warnings) for key in sorted(found)]
    return layers, warnings


def _walk(checkpoint: Checkpoint, family: Family, depth: int) -> dict[tuple[str, int], _Found]:
    """Sort every tensor below an experts module into its layer."""
    roots = dict.fromkeys(family.decoders, "layers") | dict.fromkeys(family.mtp, "mtp")
    module = re.compile(rf"({'|'.join(map(re.escape, roots))})\.{ID}\.{re.escape(family.experts)}\.(.+)")
    part_of = dict(zip(family.parts, PARTS, strict=True))
    single = re.compile(rf"{ID}\.({'|'.join(map(re.escape, family.parts))})\.weight")
    fused_of = {} if family.fused is None else {family.fused.gate_up: "gate_up", family.fused.down: "down"}
    own_part = family.experts.rsplit(".", 1)[-1]
    found: dict[tuple[str, int], _Found] = {}
    for name, tensor in checkpoint.tensors.items():
        if own_part not in name.split("."):
            continue
        match = module.fullmatch(name)
        inner = match and single.fullmatch(match[3])
        if match is None or (inner is None and match[3] not in fused_of):
            raise DataError(
                f"the family {family.name} claims no such expert tensor",
                code="E0504",
                file=checkpoint.path / tensor.file,
                tensor=name,
                remedy="convert it with a version that knows it, or add it to "
                f"convert/families/{family.name}.py; leaving it out would lose weights",
            )
        block, number = roots[match[1]], int(match[2])
        if block == "layers" and number >= depth:
            if not family.mtp_as_extra_layer:
                raise DataError(
                    f"{depth} decoder layers expected from config.json, found layer {number}",
                    code="E0505",
                    file=checkpoint.path / tensor.file,
                    tensor=name,
                    remedy="correct config.json",
                )
            block, number = "mtp", number - depth
        prefix = f"{match[1]}.{match[2]}.{family.experts}"
        entry = found.setdefault((block, number), _Found(prefix))
        if entry.prefix != prefix:
            raise DataError(
                f"layer {number} stands under {entry.prefix} and under {prefix}",
                code="E0506",
                file=checkpoint.path / tensor.file,
                tensor=name,
                remedy="remove one of the two copies",
            )
        if inner is not None:
            entry.split[int(inner[1]), part_of[inner[2]]] = tensor
        else:
            entry.fused[fused_of[match[3]]] = tensor
    return found


def _layer(
    checkpoint: Checkpoint, family: Family, key: tuple[str, int], found: _Found, warnings: list[str]
) -> LayerSource:
    block, number = key

    def fail(message: str, code: str, tensor: SourceTensor | None, remedy: str) -> DataError:
        file = checkpoint.path if tensor is None else checkpoint.path / tensor.file
        return DataError(
            message, code=code, file=file, tensor=found.prefix if tensor is None else tensor.name, remedy=remedy
        )

    again = "download the checkpoint again: it is incomplete"
    if found.split and found.fused:
        first = next(iter(found.fused.values()))
        raise fail(
            "this layer holds fused and per-expert tensors at once", "E0507", first, "remove one of the two copies"
        )
    if found.fused:
        for part in ("gate_up", "down"):
            if part not in found.fused:
                raise fail(f"the fused {part} tensor of this layer is missing", "E0508", None, again)
        gate_up, down = found.fused["gate_up"], found.fused["down"]
        shape, count = _fused_shape(family, gate_up, down, fail)
        layer = LayerSource(block, number, found.prefix, count, shape, family, gate_up=gate_up, down=down)
    else:
        ids = sorted({expert for expert, _ in found.split})
        count = len(ids)
        for want, have in enumerate(ids):
            if want != have:
                raise fail(
                    f"expert {want} is missing: experts 0 to {ids[-1]} expected, found {count}", "E0509", None, again
                )
        names = dict(zip(PARTS, family.parts, strict=True))
        for expert in ids:
            for part in PARTS:
                if (expert, part) not in found.split:
                    raise fail(f"expert {expert} lacks {names[part]}.weight", "E0508", None, again)
        shape = _split_shape(found.split, fail)
        layer = LayerSource(block, number, found.prefix, count, shape, family, split=found.split)
    _check_count(checkpoint, family, layer, fail, warnings)
    return layer


def _fused_shape(family: Family, gate_up: SourceTensor, down: SourceTensor, fail: Failure) -> tuple[ExpertShape, int]:
    assert family.fused is not None
    for tensor in (gate_up, down):
        if len(tensor.shape) != 3 or 0 in tensor.shape:
            raise fail(
                f"a non-empty [experts, ., .] tensor expected, found {list(tensor.shape)}",
                "E0510",
                tensor,
                "download the checkpoint again, or name the right family in config.json",
            )
    count = gate_up.shape[0]
    hidden, intermediate = down.shape[1:][::-1] if family.fused.transposed else down.shape[1:]
    wanted = (count, hidden, 2 * intermediate) if family.fused.transposed else (count, 2 * intermediate, hidden)
    if gate_up.shape != wanted or down.shape[0] != count:
        raise fail(
            f"{list(wanted)} expected beside {family.fused.down} {list(down.shape)}, found {list(gate_up.shape)}",
            "E0510",
            gate_up,
            "download the checkpoint again: the two tensors do not belong together",
        )
    return ExpertShape(hidden, intermediate), count


def _split_shape(split: dict[tuple[int, str], SourceTensor], fail: Failure) -> ExpertShape:
    first = split[0, "down"]
    if len(first.shape) != 2 or 0 in first.shape:
        raise fail(
            f"a non-empty [hidden, intermediate] matrix expected, found {list(first.shape)}",
            "E0510",
            first,
            "download the checkpoint again",
        )
    shape = ExpertShape(first.shape[0], first.shape[1])
    for (_, part), tensor in split.items():
        if tensor.shape != shape.matrix(part):
            raise fail(
                f"{list(shape.matrix(part))} expected as in expert 0, found {list(tensor.shape)}",
                "E0510",
                tensor,
                "download the checkpoint again: this expert does not belong to the layer",
            )
    return shape


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
            f"{wanted} experts expected from {source}, found {layer.count}",
            "E0509",
            None,
            "download the checkpoint again: experts are missing, or it does not belong to its config",
        )
    if stated is not None and stated != layer.count:
        warnings.append(f"{layer.prefix}: {layer.count} experts, config.json says {stated}; running will be refused")
