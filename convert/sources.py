"""Where matrices lie in the source: byte ranges, and how the bytes there become a matrix. No names, no decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagestone.convert.checkpoint import SourceTensor
from pagestone.convert.family import Fused
from pagestone.formats.layout import PARTS, ExpertShape
from pagestone.formats.quantised import KINDS, Form

Tensors = dict[str, SourceTensor]
"""The tensors of one matrix by role: "weight", and where there are such "scale", "zero" (points), "bias"."""


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` bytes at `offset` of `tensor`'s file, an array of `shape` of the tensor's type."""

    tensor: SourceTensor
    offset: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScaleSource:
    """The scales of one matrix: `at` holds the grid, whose entries each cover `block` elements.

    The matrix begins `first_row` rows into what the grid covers (the up half of a fused tensor), else 0.
    """

    at: Range
    block: tuple[int, int]
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """One matrix [rows, columns] in the source.

    `at` holds a matrix of its own shape; the one wanted is that, transposed if `transposed`, and of its rows every
    `step`-th from `start`. `scale` and `zero` are there if the elements are codes.
    """

    at: Range
    rows: int
    columns: int
    transposed: bool = False
    start: int = 0
    step: int = 1
    scale: ScaleSource | None = None
    zero: Range | None = None
    bias: MatrixSource | None = None

    @property
    def tensor(self) -> SourceTensor:
        """The tensor that holds the weights or codes."""
        return self.at.tensor

    @property
    def plain(self) -> bool:
        """The bytes are the matrix, row by row."""
        return not self.transposed and self.start == 0 and self.step == 1

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Everything that must be read for this matrix."""
        extra = (self.scale.at if self.scale else None, self.zero, self.bias.at if self.bias else None)
        return (self.at, *(r for r in extra if r is not None))

    @property
    def form(self) -> Form | None:
        """How its codes are scaled; None for plain floats."""
        if self.scale is None:
            return None
        kind, dtype = KINDS[self.tensor.dtype], self.scale.at.tensor.dtype
        return Form(kind, self.rows, self.columns, self.scale.block, self.scale.first_row, dtype, self.zero is not None)


def whole(tensor: SourceTensor, shape: tuple[int, ...] | None = None) -> Range:
    """All of a tensor."""
    return Range(tensor, tensor.offset, tensor.nbytes, tensor.shape if shape is None else shape)


def slice_of(tensor: SourceTensor, number: int, count: int, shape: tuple[int, ...]) -> Range:
    """The `number`-th of `count` equal pieces of a tensor, its first axis taken apart."""
    nbytes = tensor.nbytes // count
    return Range(tensor, tensor.offset + number * nbytes, nbytes, shape)


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The routed experts of one layer as the checkpoint holds them.

    `block` is "layers" or "mtp", `layer` its number there, `prefix` the full name of the experts module, `part_names`
    what the container calls gate, up and down. Per-expert layouts fill `split` by (expert, part); fused layouts fill
    `gate_up` and `down`.
    """

    block: str
    layer: int
    prefix: str
    count: int
    shape: ExpertShape
    part_names: tuple[str, str, str]
    fused: Fused | None = None
    gate_up: Tensors = field(default_factory=dict)
    down: Tensors = field(default_factory=dict)
    split: dict[tuple[int, str], Tensors] = field(default_factory=dict)
    scales: dict[str, tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    """For every scale tensor by name: the grid of one matrix it belongs to (or of one fused pair), and its block."""

    @property
    def is_fused(self) -> bool:
        return bool(self.gate_up)

    @property
    def tensors(self) -> Iterable[SourceTensor]:
        """Every source tensor this layer is made from."""
        groups = (self.gate_up, self.down) if self.is_fused else self.split.values()
        return [t for group in groups for t in group.values()]

    @property
    def weights(self) -> Iterable[SourceTensor]:
        """Those that hold weights or codes."""
        groups = (self.gate_up, self.down) if self.is_fused else self.split.values()
        return [group["weight"] for group in groups]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types of the weights, each once."""
        return tuple(sorted({t.dtype for t in self.weights}))

    def matrices(self) -> Iterable[MatrixSource]:
        """One matrix of every kind: all of them in a per-expert layout, those of expert 0 in a fused one."""
        return [self.matrix(e, p) for e in range(1 if self.is_fused else self.count) for p in PARTS]

    def matrix(self, expert: int, part: str) -> MatrixSource:
        """Where one matrix of one expert lies."""
        rows, columns = self.shape.matrix(part)
        if not self.is_fused:
            group = self.split[expert, part]
            scale, found = group.get("scale"), None
            if scale is not None:
                grid, block = self.scales[scale.name]
                found = ScaleSource(whole(scale, grid), block)
            return MatrixSource(
                whole(group["weight"]), rows, columns, scale=found,
                zero=whole(group["zero"]) if "zero" in group else None,
                bias=MatrixSource(whole(group["bias"], (rows, 1)), rows, 1) if "bias" in group else None,
            )  # fmt: skip
        assert self.fused is not None
        return self._down(expert) if part == "down" else self._gate_or_up(expert, int(part == "up"), self.fused)

    def _scale(self, group: Tensors, expert: int, first_row: int) -> ScaleSource | None:
        scale = group.get("scale")
        if scale is None:
            return None
        grid, block = self.scales[scale.name]
        return ScaleSource(slice_of(scale, expert, self.count, grid), block, first_row)

    def _down(self, expert: int) -> MatrixSource:
        assert self.fused is not None
        rows, columns = self.shape.matrix("down")
        stored = (columns, rows) if self.fused.transposed else (rows, columns)
        bias = self.down.get("bias")
        return MatrixSource(
            slice_of(self.down["weight"], expert, self.count, stored), rows, columns, self.fused.transposed,
            scale=self._scale(self.down, expert, 0),
            bias=None if bias is None else MatrixSource(slice_of(bias, expert, self.count, (rows, 1)), rows, 1),
        )  # fmt: skip

    def _gate_or_up(self, expert: int, second: int, fused: Fused) -> MatrixSource:
        rows, columns = self.shape.matrix("gate")
        tensor, bias = self.gate_up["weight"], self.gate_up.get("bias")
        start, step = (second, 2) if fused.interleaved else (second * rows, 1)
        both = None
        if bias is not None:
            both = MatrixSource(slice_of(bias, expert, self.count, (2 * rows, 1)), rows, 1, False, start, step)
        if not fused.transposed and not fused.interleaved:
            half = slice_of(tensor, 2 * expert + second, 2 * self.count, (rows, columns))
            return MatrixSource(half, rows, columns, scale=self._scale(self.gate_up, expert, second * rows), bias=both)
        stored = (columns, 2 * rows) if fused.transposed else (2 * rows, columns)
        at = slice_of(tensor, expert, self.count, stored)
        return MatrixSource(at, rows, columns, fused.transposed, start, step, bias=both)
