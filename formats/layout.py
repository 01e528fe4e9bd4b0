"""Where everything lies: records and layers as a pure function of codec, shapes and count (specs/container.md).

Integers only. Writer, reader, verify and the spec's test all call this module; nobody else adds offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pagestone.formats.dtypes import item_size
from pagestone.formats.errors import LayoutError

PAGE = 4096
"""Bytes: alignment of every record, and of the data section of every file we write."""
CODES_END = 64
"""Bytes: alignment of the first scale, so that any vector load of scales is aligned."""
PARTS = ("gate", "up", "down")
"""The three matrices of an expert, in the order in which they lie in a record."""
PART_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Their names where a family has none of its own."""
ROLES = ("codes", "scales", "biases")
"""Order of the tensors of a codec within a record: all codes, then all scales, then all (affine) biases."""


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value` (both >= 0)."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class MatrixTensor:
    """One stored tensor of one matrix.

    `role` is one of `ROLES`; `suffix` is appended to `<part>.` to make the tensor's name; `dtype` is the
    safetensors name of its type.
    """

    role: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)


class MatrixFormat(Protocol):
    """What layout needs to know of a codec."""

    def tensors(self, rows: int, columns: int) -> tuple[MatrixTensor, ...]:
        """The stored tensors of a [rows, columns] matrix, one per role used, in the order of `ROLES`."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Shape of one expert: gate and up are [intermediate, hidden], down is [hidden, intermediate].

    `bias_dtype` is the type of the expert's own bias vectors (gate and up [intermediate], down [hidden]) in
    families that have them, else None.
    """

    hidden: int
    intermediate: int
    bias_dtype: str | None = None

    def matrix(self, part: str) -> tuple[int, int]:
        """(rows, columns) of `part`, one of `PARTS`."""
        return (self.hidden, self.intermediate) if part == "down" else (self.intermediate, self.hidden)


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor inside a record: `offset` and `nbytes` are bytes from the record's first byte.

    `part` is None for the two pads; `role` is one of `ROLES`, "bias" (the expert's own), "pad_a" or "pad".
    """

    part: str | None
    role: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """One expert's record: its slots in order of offset, without holes, and its length, a multiple of `PAGE`."""

    shape: ExpertShape
    slots: tuple[Slot, ...]
    stride: int

    def slot(self, part: str, role: str) -> Slot:
        """The slot of one part and role; KeyError if the codec stores no such tensor."""
        for slot in self.slots:
            if slot.part == part and slot.role == role:
                return slot
        raise KeyError((part, role))

    def of_part(self, part: str) -> tuple[Slot, ...]:
        """The slots of one part in order of offset: codes, scales, biases, bias, as far as they exist."""
        return tuple(slot for slot in self.slots if slot.part == part)


def _by_role(tensors: tuple[MatrixTensor, ...]) -> dict[str, MatrixTensor]:
    """A matrix's tensors by role. What has no place in a record, or none of its own, would be lost: refused."""
    roles = [t.role for t in tensors]
    if "codes" not in roles or len(set(roles)) != len(roles) or not set(roles) <= set(ROLES):
        raise LayoutError(
            f"codes, and of {', '.join(ROLES[1:])} each at most once expected from a codec, found {', '.join(roles)}",
            code="E0611",
            remedy="mend the codec: a tensor no record has room for would be lost",
        )
    return {t.role: t for t in tensors}


def record_layout(codec: MatrixFormat, shape: ExpertShape) -> RecordLayout:
    """The record of one expert: codes, pad_a to 64, scales, biases, the expert's own biases, pad to 4096.

    Pads are absent when empty; pad_a is also absent when nothing follows the codes. Raises `LayoutError` for a codec
    whose tensors are not what `MatrixFormat` promises, and what the codec raises for a shape it cannot hold.
    """
    stored = {part: _by_role(codec.tensors(*shape.matrix(part))) for part in PARTS}
    slots: list[Slot] = []
    offset = 0

    def add(part: str | None, role: str, suffix: str, dtype: str, dims: tuple[int, ...], nbytes: int) -> None:
        nonlocal offset
        if nbytes:
            slots.append(Slot(part, role, suffix, dtype, dims, offset, nbytes))
            offset += nbytes

    for role in ROLES:
        members = [(part, stored[part][role]) for part in PARTS if role in stored[part]]
        if role == "scales" and members:
            pad = align_up(offset, CODES_END) - offset
            add(None, "pad_a", "pad_a", "U8", (pad,), pad)
        for part, tensor in members:
            add(part, role, tensor.suffix, tensor.dtype, tensor.shape, tensor.nbytes)
    if shape.bias_dtype is not None:
        for part in PARTS:
            rows = shape.matrix(part)[0]
            add(part, "bias", "bias", shape.bias_dtype, (rows,), rows * item_size(shape.bias_dtype))
    pad = align_up(offset, PAGE) - offset
    add(None, "pad", "pad", "U8", (pad,), pad)
    return RecordLayout(shape, tuple(slots), offset)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer file: records of `stride` bytes for `count` experts, beginning at `data_start`."""

    record: RecordLayout
    count: int
    data_start: int

    @property
    def stride(self) -> int:
        return self.record.stride

    @property
    def file_size(self) -> int:
        return self.data_start + self.count * self.stride

    def record_offset(self, expert: int) -> int:
        """Absolute byte offset in the file of an expert's record."""
        if not 0 <= expert < self.count:
            raise IndexError(f"expert {expert} of a layer of {self.count}")
        return self.data_start + expert * self.stride


def tensor_name(prefix: str, expert: int, part_names: tuple[str, str, str], slot: Slot) -> str:
    """The full name of one tensor: `<prefix>.<expert>.<part name>.<suffix>`, pads without a part name."""
    if slot.part is None:
        return f"{prefix}.{expert}.{slot.suffix}"
    return f"{prefix}.{expert}.{part_names[PARTS.index(slot.part)]}.{slot.suffix}"


def layer_entries(
    record: RecordLayout, count: int, prefix: str, part_names: tuple[str, str, str]
) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, begin, end) of every tensor of a layer file, in order, offsets from the data's start."""
    for expert in range(count):
        base = expert * record.stride
        for slot in record.slots:
            begin = base + slot.offset
            yield tensor_name(prefix, expert, part_names, slot), slot.dtype, slot.shape, begin, begin + slot.nbytes
