"""Where matrices lie in the source: byte ranges, and how the bytes there become a matrix. No names, no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestone.convert.checkpoint import SourceTensor
from pagestone.convert.family import Fused
from pagestone.formats.encodings import Claim, Reading
from pagestone.formats.layout import BIAS, CODES, PARTS, ExpertShape

Tensors = dict[str, SourceTensor]
"""The tensors of one matrix by suffix: "weight", "weight_scale_inv", "bias", ..."""


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` bytes at `offset` of `tensor`'s file, an array of `shape` of the tensor's type."""

    tensor: SourceTensor
    offset: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArraySource:
    """One stored array: what lies in `at`, transposed if `transposed`, and of its rows those of `rows`."""

    at: Range
    transposed: bool = False
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """One matrix [rows, columns] in the source: its stored arrays by role, and what they mean."""

    encoding: Reading
    rows: int
    columns: int
    stored: Mapping[str, ArraySource]
    bias: ArraySource | None = None

    @property
    def tensor(self) -> SourceTensor:
        """The tensor that holds the weights or codes."""
        return self.stored[CODES].at.tensor

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Everything that must be read for this matrix."""
        return tuple(a.at for a in (*self.stored.values(), self.bias) if a is not None)


def whole(tensor: SourceTensor, shape: tuple[int, ...] | None = None) -> Range:
    """All of a tensor."""
    return Range(tensor, tensor.offset, tensor.nbytes, tensor.shape if shape is None else shape)


def slice_of(tensor: SourceTensor, number: int, count: int, shape: tuple[int, ...]) -> Range:
    """The `number`-th of `count` equal pieces of a tensor, its first axis taken apart."""
    nbytes = tensor.nbytes // count
    return Range(tensor, tensor.offset + number * nbytes, nbytes, shape)


def rows_of(at: Range, rows: slice) -> Range:
    """Some rows of an array."""
    first, end, _ = rows.indices(at.shape[0])
    row = at.nbytes // at.shape[0]
    return Range(at.tensor, at.offset + first * row, (end - first) * row, (end - first, *at.shape[1:]))


Place = tuple[int, str] | str
"""(expert, part), or the name of a fused tensor."""


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The routed experts of one layer as the checkpoint holds them.

    `block` is "layers" or "mtp", `layer` its number there, `prefix` the full name of the experts module, `part_names`
    what the container calls gate, up and down. `groups` are the tensors of every matrix: by (expert, part) in
    per-expert layouts, by "gate_up" and "down" in fused ones; `claims` say what they mean.
    """

    block: str
    layer: int
    prefix: str
    count: int
    shape: ExpertShape
    part_names: tuple[str, str, str]
    fused: Fused | None = None
    groups: Mapping[Any, Tensors] = field(default_factory=dict)
    claims: Mapping[Any, Claim] = field(default_factory=dict)
    """Of a fused tensor: how what it holds of one expert is stored."""

    @property
    def is_fused(self) -> bool:
        return "down" in self.groups

    @property
    def tensors(self) -> Iterable[SourceTensor]:
        """Every source tensor this layer is made from."""
        return [t for group in self.groups.values() for t in group.values()]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types of the weights or codes, each once."""
        return tuple(sorted({self.groups[place][c.suffixes[CODES]].dtype for place, c in self.claims.items()}))

    def matrices(self) -> Iterable[MatrixSource]:
        """One matrix of every kind: all of them in a per-expert layout, those of expert 0 in a fused one."""
        return [self.matrix(e, p) for e in range(1 if self.is_fused else self.count) for p in PARTS]

    def matrix(self, expert: int, part: str) -> MatrixSource:
        """Where one matrix of one expert lies."""
        rows, columns = self.shape.matrix(part)
        if self.is_fused:
            return self._down(expert) if part == "down" else self._gate_or_up(expert, int(part == "up"))
        group, claim = self.groups[expert, part], self.claims[expert, part]
        stored = {
            role.name: ArraySource(whole(group[claim.suffixes[role.name]], role.shape))
            for role in claim.encoding.roles(rows, columns)
        }
        bias = ArraySource(whole(group[BIAS], (rows,))) if BIAS in group else None
        return MatrixSource(claim.encoding, rows, columns, stored, bias)

    def _down(self, expert: int) -> MatrixSource:
        rows, columns = self.shape.matrix("down")
        bias = self.groups["down"].get(BIAS)
        return MatrixSource(
            self.claims["down"].encoding, rows, columns, self._arrays("down", expert, {}),
            None if bias is None else ArraySource(slice_of(bias, expert, self.count, (rows,))),
        )  # fmt: skip

    def _gate_or_up(self, expert: int, second: int) -> MatrixSource:
        assert self.fused is not None
        rows, columns = self.shape.matrix("gate")
        claim, first = self.claims["gate_up"], second * rows
        encoding, cut = claim.encoding.window(2 * rows, columns, first, rows)
        if self.fused.interleaved:
            encoding, cut = claim.encoding, {CODES: slice(second, None, 2)}
        bias, both = self.groups["gate_up"].get(BIAS), None
        if bias is not None:
            own = slice(second, None, 2) if self.fused.interleaved else slice(first, first + rows)
            both = ArraySource(slice_of(bias, expert, self.count, (2 * rows,)), rows=own)
        return MatrixSource(encoding, rows, columns, self._arrays("gate_up", expert, cut), both)

    def _arrays(self, place: str, expert: int, cut: Mapping[str, slice]) -> dict[str, ArraySource]:
        """The arrays of an expert's part of a fused tensor, of which the rows of `cut` are wanted, by role."""
        assert self.fused is not None
        group, claim, turned = self.groups[place], self.claims[place], self.fused.transposed
        arrays = {}
        for role in claim.encoding.roles(claim.rows, claim.columns):
            at = slice_of(group[claim.suffixes[role.name]], expert, self.count, role.shape)
            rows = cut.get(role.name, slice(None))
            if role.name == CODES and not turned and rows.step is None:
                at, rows = rows_of(at, rows), slice(None)  # half of the bytes; the other roles are small
            arrays[role.name] = ArraySource(at, turned, rows)
        return arrays
