"""Where everything lies: records and layers as a pure function of encoding, shapes and count (specs/container.md).

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
"""Bytes: alignment of what follows the codes, so that any vector load of scales is aligned."""
PARTS = ("gate", "up", "down")
"""The three matrices of an expert, in the order in which they lie in a record."""
PART_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Their names where a family has none of its own."""
CODES, BIAS, PADS = "codes", "bias", ("pad_a", "pad")
"""The role every matrix has; that of an expert's own bias, which no encoding stores; the names of what is between."""
RECORD, BESIDE = "record", "beside"
WHOLE = "matrix"
"""The part of every slot of a dense matrix's record but pads: there is one matrix."""
PLACES = (RECORD, BESIDE)
"""Where a stored tensor lies: in its expert's record, or in the layer's sidecar, which streaming can do without."""


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value` (both >= 0)."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Role:
    """One stored tensor of one matrix.

    `name` is what it is among the matrix's tensors ("codes", "scales", ...); `suffix` is appended to `<part>.` to make
    the tensor's name; `dtype` is the safetensors name of its type; `place` is one of `PLACES`. The first axis of what
    lies beside is the matrix's rows.
    """

    name: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]
    place: str = RECORD

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)


class MatrixFormat(Protocol):
    """What layout needs to know of an encoding."""

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        """The stored tensors of a [rows, columns] matrix, codes first, in the order in which they lie."""


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

    `part` is None for the two pads; `role` is the name of a role of the encoding, "bias" (the expert's own), "pad_a" or
    "pad".
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
        """The slot of one part and role; KeyError if no such tensor is stored."""
        for slot in self.slots:
            if slot.part == part and slot.role == role:
                return slot
        raise KeyError((part, role))

    @property
    def roles(self) -> tuple[str, ...]:
        """The encoding's roles that lie in the record, in order."""
        return tuple(dict.fromkeys(s.role for s in self.slots if s.part is not None and s.role != BIAS))

    @property
    def offsets(self) -> dict[tuple[str, str], int]:
        """Bytes from the record's start, by (part, role)."""
        return {(slot.part, slot.role): slot.offset for slot in self.slots if slot.part is not None}

    def of_part(self, part: str) -> tuple[Slot, ...]:
        """The slots of one part in order of offset: the encoding's roles in its order, then the expert's own bias."""
        return tuple(slot for slot in self.slots if slot.part == part)


def checked_roles(encoding: MatrixFormat, shape: ExpertShape) -> dict[str, tuple[Role, ...]]:
    """The roles of every part's matrix. What has no place, or not one of its own, would be lost: `LayoutError` (E0611).

    What lies beside is one tensor for gate and up, so its shape must begin with the matrix's rows.
    """
    by_part = {part: encoding.roles(*shape.matrix(part)) for part in PARTS}
    names = [role.name for role in by_part["gate"]]
    for part, roles in by_part.items():
        rows = shape.matrix(part)[0]
        taken = [*(role.name for role in roles), BIAS, *PADS]
        suffixes = [*(role.suffix for role in roles), BIAS, *PADS]
        nowhere = [r for r in roles if r.place not in PLACES or (r.place == BESIDE and r.shape[:1] != (rows,))]
        alike = taken[: len(roles)] == names and len({*taken}) == len(taken) and len({*suffixes}) == len(suffixes)
        if alike and names[:1] == [CODES] and roles[0].place == RECORD and not nowhere:
            continue
        wrong = f", of which {nowhere[0].name} has no place ({nowhere[0].place})" if nowhere else ""
        raise LayoutError(
            f"codes in the record, then other roles, each once and with a place, expected from an encoding; "
            f"found {', '.join(role.name for role in roles)} of {part}{wrong}",
            code="E0611",
            remedy="mend the encoding: a tensor no file has room for would be lost",
        )
    return by_part


def record_layout(encoding: MatrixFormat, shape: ExpertShape) -> RecordLayout:
    """The record of one expert: codes, pad_a to 64, the other roles in the encoding's order, the expert's own biases,
    pad to 4096; of each role gate, up and down.

    Pads are absent when empty; pad_a is also absent when no other role follows the codes. Raises `LayoutError` for an
    encoding whose roles are not what `Role` promises, and what the encoding raises for a shape it cannot hold.
    """
    stored = checked_roles(encoding, shape)
    slots: list[Slot] = []
    offset = 0

    def add(part: str | None, role: str, suffix: str, dtype: str, dims: tuple[int, ...], nbytes: int) -> None:
        nonlocal offset
        if nbytes:
            slots.append(Slot(part, role, suffix, dtype, dims, offset, nbytes))
            offset += nbytes

    inside = [n for n, role in enumerate(stored["gate"]) if role.place == RECORD]
    for number in inside:
        if [number] == inside[1:2]:
            pad = align_up(offset, CODES_END) - offset
            add(None, PADS[0], PADS[0], "U8", (pad,), pad)
        for part in PARTS:
            role = stored[part][number]
            add(part, role.name, role.suffix, role.dtype, role.shape, role.nbytes)
    if shape.bias_dtype is not None:
        for part in PARTS:
            rows = shape.matrix(part)[0]
            add(part, BIAS, BIAS, shape.bias_dtype, (rows,), rows * item_size(shape.bias_dtype))
    pad = align_up(offset, PAGE) - offset
    add(None, PADS[1], PADS[1], "U8", (pad,), pad)
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


# -- dense matrices --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MatrixRecord:
    """One dense matrix's record: its slots in order of offset, without holes, and its length, a multiple of `PAGE`."""

    rows: int
    columns: int
    slots: tuple[Slot, ...]
    nbytes: int

    def slot(self, role: str) -> Slot:
        """The slot of one role; KeyError if no such tensor is stored."""
        for slot in self.slots:
            if slot.part is not None and slot.role == role:
                return slot
        raise KeyError(role)

    @property
    def stored(self) -> tuple[Slot, ...]:
        """The slots of the encoding's roles, in its order: all but pads."""
        return tuple(slot for slot in self.slots if slot.part is not None)


def matrix_record(encoding: MatrixFormat, rows: int, columns: int) -> MatrixRecord:
    """The record of a dense matrix: codes, pad_a to 64, all other roles in the encoding's order, pad to 4096.

    What lies beside an expert's record lies in this one: a dense matrix is in memory whole. Pads are absent when empty;
    pad_a is also absent when no other role follows. Raises `LayoutError` (E0611) for an encoding whose roles are not
    what `Role` promises, and what the encoding raises for a shape it cannot hold.
    """
    roles = encoding.roles(rows, columns)
    names, suffixes = ([*(getattr(r, what) for r in roles), *PADS] for what in ("name", "suffix"))
    if names[0] != CODES or len({*names}) < len(names) or len({*suffixes}) < len(suffixes):
        raise LayoutError(
            f"codes, then other roles, each once, expected from an encoding; found {', '.join(r.name for r in roles)}",
            code="E0611",
            remedy="mend the encoding: a tensor no file has room for would be lost",
        )
    slots: list[Slot] = []
    offset = 0
    for number, role in enumerate(roles):
        pad = align_up(offset, CODES_END) - offset if number == 1 else 0
        if pad:
            slots.append(Slot(None, PADS[0], PADS[0], "U8", (pad,), offset, pad))
        offset += pad
        slots.append(Slot(WHOLE, role.name, role.suffix, role.dtype, role.shape, offset, role.nbytes))
        offset += role.nbytes
    pad = align_up(offset, PAGE) - offset
    if pad:
        slots.append(Slot(None, PADS[1], PADS[1], "U8", (pad,), offset, pad))
    return MatrixRecord(rows, columns, tuple(slots), offset + pad)


def matrix_entries(record: MatrixRecord, name: str, base: int) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, begin, end) of every tensor of the dense matrix `name` whose record begins at `base`."""
    for slot in record.slots:
        begin = base + slot.offset
        yield f"{name}.{slot.suffix}", slot.dtype, slot.shape, begin, begin + slot.nbytes
