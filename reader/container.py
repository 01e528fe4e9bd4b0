"""Open a container and look at its experts without copying a byte.

    container = open_container("out/tiny-int8")
    expert = container.layers[0].expert(3)
    expert.gate_up.codes.array    # int8 [2 * intermediate, hidden], a view of the mapped file
    expert.down.scales.torch()    # the same bytes as a torch tensor

Opening reads the manifest and the lengths of files. A layer's table is parsed and checked completely when the layer is
first touched. Views keep their map alive, so they may outlive the container object. A file that is changed or cut while
it is mapped changes the views or ends the process (SIGBUS): mapping promises no more than the file does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagestone.formats import encodings
from pagestone.formats.digests import Hasher
from pagestone.formats.dtypes import F32, VIEWS, Array
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import BLOCKS, PAIR, LayerHeader, beside_of, read_layer_file, read_sidecar
from pagestone.formats.layout import BIAS, CODES, PARTS, LayerLayout, Slot
from pagestone.formats.manifest import (
    EXPERTS_TABLE,
    MANIFEST,
    RECORDS,
    TEMPLATES,
    LayerEntry,
    Manifest,
    no_container,
    read_manifest,
)
from pagestone.formats.storage import place_of
from pagestone.reader.errors import Closing, expert_number, layer_of, path_of
from pagestone.reader.files import RESTORE, MachineErrors, map_file

if TYPE_CHECKING:
    import torch

    from pagestone.formats.safetensors_header import TensorEntry

TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I16": "int16",
    "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "F64": "float64",
    "I64": "int64",
}  # fmt: skip
TALL = 4096
"""No encoding has blocks of more rows; see `_stacks`."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class View:
    """One stored tensor without a copy.

    `array` holds the bits (uint16 for BF16, uint8 for F8_*, uint32 for packed codes) and is read-only; `dtype` is the
    safetensors name of the real type.
    """

    array: Array
    dtype: str

    def __repr__(self) -> str:
        return f"View({self.dtype} {list(self.shape)})"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def torch(self) -> torch.Tensor:
        """The same memory as a torch tensor of the real type; imports torch. Writing to it is not defined."""
        import torch

        bits = _writable(self.array)
        signed = {np.dtype("<u2"): np.int16, np.dtype("<u4"): np.int32}.get(bits.dtype)
        tensor = torch.from_numpy(bits if signed is None else bits.view(signed))
        return tensor.view(getattr(torch, TORCH_NAMES[self.dtype]))


def _writable(array: Array) -> Array:
    """The same memory with the writeable flag set, so that torch takes it without a warning.

    Maps are private (copy on write): the file cannot change through it.
    """
    if array.flags.writeable:
        return array
    return np.ndarray(array.shape, array.dtype, _base(array), array.ctypes.data - _base(array).ctypes.data)


def _base(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Matrix:
    """One matrix [rows, columns] as its codec stores it: `stored` are views by role, in the codec's order.

    A role that no single tensor holds for a fused gate_up is left out of it (scales of fp8, with 128 not dividing the
    intermediate size): take gate and up one by one there. `bias` is the expert's own.
    """

    codec: Codec
    rows: int
    columns: int
    stored: Mapping[str, View]
    bias: View | None = None

    def __repr__(self) -> str:
        views = dict(self.stored) | ({} if self.bias is None else {BIAS: self.bias})
        held = ", ".join(f"{role} {view.dtype} {list(view.shape)}" for role, view in views.items())
        return f"Matrix({self.codec.name} [{self.rows}, {self.columns}]: {held})"

    @property
    def codes(self) -> View:
        return self.stored[CODES]

    @property
    def scales(self) -> View | None:
        """None if the codec has none, or no single grid describes a fused gate_up; so for the others."""
        return self.stored.get("scales")

    @property
    def biases(self) -> View | None:
        return self.stored.get("biases")

    @property
    def row_sums(self) -> View | None:
        return self.stored.get("row_sums")

    def decode(self) -> F32:
        """float32 [rows, columns]: the values the codes stand for (a new array)."""
        return self.codec.values(self._arrays(), self.rows, self.columns)

    def multiply(self, x: Array, *, out: Array | None = None, threads: int = 1) -> Array:
        """x W^T [tokens, rows] straight from the codes, for tokens x [tokens, columns]: see `Multiplying.matmul`.

        int8 without row sums computes them from the codes first, every time.
        """
        return self.codec.matmul(self._arrays(), x, self.rows, self.columns, out=out, threads=threads)

    def _arrays(self) -> dict[str, Array]:
        return {role: view.array for role, view in self.stored.items()}


Beside = Mapping[tuple[str, str], View]
"""A layer's sidecar by (part, role): ("gate_up", ...) [experts, 2 * intermediate, ...], ("down", ...) [experts, hidden,
...]; empty where there is none, or it is not wanted."""
NOTHING: Beside = {}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Expert:
    """One routed expert. gate, up: [intermediate, hidden]; down: [hidden, intermediate]; gate_up: both, stacked."""

    number: int
    gate: Matrix
    up: Matrix
    down: Matrix
    gate_up: Matrix
    record: Array
    """The whole record, uint8 [stride], pads included."""

    def __repr__(self) -> str:
        shape = f"hidden {self.down.rows}, intermediate {self.down.columns}"
        return f"Expert({self.number}: {self.down.codec.name}, {shape}, {self.record.nbytes} bytes)"

    @property
    def inner(self) -> tuple[Matrix, ...]:
        """What multiplies first: gate_up where every role of it is one tensor, else gate and up."""
        return (self.gate_up,) if self.gate.stored.keys() == self.gate_up.stored.keys() else (self.gate, self.up)


def _map(path: Path) -> Array:
    """uint8 view of a whole file, mapped privately."""
    return np.frombuffer(map_file(path), np.uint8)


def _slice(base: Array, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> View:
    array = base[offset : offset + nbytes].view(VIEWS[dtype]).reshape(shape)
    array.flags.writeable = False
    return View(array, dtype)


class Layer(Closing):
    """The routed experts of one layer.

    Its table is read and checked at the first use of anything but `entry` and `path`, its file is mapped at the first
    use of a view of it.
    """

    def __init__(self, root: Path, entry: LayerEntry, manifest: Manifest) -> None:
        self._root, self.entry, self._manifest = root, entry, manifest

    def __repr__(self) -> str:
        return f"Layer({str(self.path)!r}: {len(self)} experts)"

    def close(self) -> None:
        """Let go of the maps; they stay while a view of them does. What the table said can still be asked."""
        super().close()
        self.__dict__.pop("_mapped", None)
        self.__dict__.pop("beside", None)

    def __len__(self) -> int:
        """Number of experts."""
        return self.entry.experts

    def __iter__(self) -> Iterator[Expert]:
        return (self.expert(e) for e in range(len(self)))

    @cached_property
    def _opened(self) -> tuple[LayerHeader, LayerLayout]:
        path = self.path
        with MachineErrors(path, "reading"):
            header, layout = read_layer_file(path)
        entry, manifest = self.entry, self._manifest
        listed = (manifest.codec, dict(manifest.parameters), entry.block, entry.layer, entry.experts)
        opened = (header.codec.name, header.codec.parameters, header.block, header.layer, header.count)
        if listed != opened:
            raise DataError(
                f"{listed} expected from {MANIFEST}, found {opened}",
                code="E0321",
                file=path,
                remedy="restore the file: it belongs to another container",
            )
        if (entry.sidecar is None) != (not header.sidecar_tensors()):
            raise DataError(
                f"codec {header.codec.name} and {MANIFEST} disagree on whether there is a sidecar",
                code="E0321",
                file=path,
                remedy="restore the manifest, or convert again",
            )
        return header, layout

    @cached_property
    def _mapped(self) -> Array:
        """The whole file, mapped when a view of it is first asked for, after its table was checked."""
        self._check_open()
        _ = self._opened
        return _map(self.path)

    @property
    def path(self) -> Path:
        """Its file; nothing is opened."""
        return self._root / self.entry.file

    @property
    def header(self) -> LayerHeader:
        """What the layer's file says of itself: codec, prefix, shape, names."""
        return self._opened[0]

    @property
    def layout(self) -> LayerLayout:
        """Where its records lie."""
        return self._opened[1]

    @cached_property
    def beside(self) -> Beside:
        """Views of the sidecar by (part, role), see `Beside`: ("gate_up", "row_sums"), ("down", "row_sums") of int8."""
        self._check_open()
        if self.entry.sidecar is None:
            return NOTHING
        path = self._root / self.entry.sidecar
        header = self.header
        with MachineErrors(path, "reading"):
            entries = read_sidecar(path, header)
        return sidecar_views(_map(path), entries)

    # -- for engines -------------------------------------------------------------------------------------------------

    @property
    def pointer(self) -> int:
        """Address of record 0; record e is at `pointer + e * stride`. Valid while this layer object lives."""
        return int(self._mapped.ctypes.data) + self.layout.data_start

    @property
    def stride(self) -> int:
        """Bytes from one record to the next, a multiple of 4096."""
        return self.layout.stride

    @property
    def offsets(self) -> dict[tuple[str, str], int]:
        """Bytes from a record's start, by (part, role): ("gate", "codes"), ("down", "scales"), ...

        Roles are those of `Matrix.stored`; the header's metadata has the same offsets by tensor name.
        """
        return self.layout.record.offsets

    # -- views -------------------------------------------------------------------------------------------------------

    def expert(self, number: int) -> Expert:
        """Views of one expert in the mapped file.

        Raises `NoSuchExpertError` (an IndexError), `IdTypeError` (a TypeError; True is no number of an expert), and
        `ClosedError` (a ValueError) once the container was closed.
        """
        self._check_open()
        number = expert_number(number, len(self), self.path)
        start = self.layout.record_offset(number)
        return self.expert_in(self._mapped[start : start + self.stride], number, self.beside)

    def expert_in(self, record: Array, number: int, beside: Beside = NOTHING) -> Expert:
        """Views of expert `number` in a copy of its record, uint8 [stride], wherever that copy lies.

        Nothing is mapped. The matrices have roles that lie beside only if the sidecar's tensors are given. Raises what
        `expert` does for numbers.
        """
        number = expert_number(number, len(self), self.path)
        gate, up, down = (self._matrix(record, number, part, beside) for part in PARTS)
        whole = record[:]
        whole.flags.writeable = False
        return Expert(number, gate, up, down, self._gate_up(record, number, beside), whole)

    def _matrix(self, record: Array, number: int, part: str, beside: Beside) -> Matrix:
        views = {s.role: _slice(record, s.offset, s.nbytes, s.dtype, s.shape) for s in self.layout.record.of_part(part)}
        bias = views.pop(BIAS, None)
        return Matrix(
            self.header.codec, *self.header.shape.matrix(part), views | _views_beside(beside, number, part), bias
        )

    def _gate_up(self, record: Array, number: int, beside: Beside) -> Matrix:
        """gate and up are never separated in a record, so one view covers both."""
        rows, columns = self.header.shape.matrix("gate")
        tall = {r.name: r.shape for r in self.header.codec.in_record(TALL * rows, columns)}
        views: dict[str, View] = {}
        gate = {s.role: s for s in self.layout.record.of_part("gate")}
        up = {s.role: s for s in self.layout.record.of_part("up")}
        for role, first in gate.items():
            if _stacks(first, up[role], tall.get(role, (TALL * rows,))):
                shape = (first.shape[0] + up[role].shape[0], *first.shape[1:])
                views[role] = _slice(record, first.offset, 2 * first.nbytes, first.dtype, shape)
        bias = views.pop(BIAS, None)
        return Matrix(self.header.codec, 2 * rows, columns, views | _views_beside(beside, number, PAIR), bias)


def _views_beside(beside: Beside, number: int, part: str) -> dict[str, View]:
    """What lies beside of one matrix, or of gate and up in one."""
    dtypes = {role: view.dtype for (_, role), view in beside.items()}
    arrays = {key: view.array for key, view in beside.items()}
    return {role: View(array, dtypes[role]) for role, array in beside_of(arrays, number, part).items()}


def _stacks(gate: Slot, up: Slot, tall: tuple[int, ...]) -> bool:
    """Whether gate's and up's tensors of one role, side by side in the record, are the fused matrix's tensor.

    `tall` is that role's shape for a matrix of `TALL` times gate's rows. Two partial blocks can be as many as the fused
    grid has and still lie elsewhere (100 rows of blocks of 128); only where nothing is partial do all of them add up.
    """
    adjacent = gate.offset + gate.nbytes == up.offset and gate.shape == up.shape
    return adjacent and (TALL * gate.shape[0], *gate.shape[1:]) == tuple(tall)


def sidecar_views(base: Array, entries: Mapping[tuple[str, str], TensorEntry]) -> Beside:
    """`Layer.beside` of a sidecar whose bytes are `base` (uint8) and whose checked tensors are `entries`."""
    return {key: _slice(base, t.offset, t.nbytes, t.dtype, t.shape) for key, t in entries.items()}


class Layers(dict[int, Layer]):
    """Layers by number; `NoSuchLayerError` (a KeyError) names those there are, `IdTypeError` what is no number."""

    def __init__(self, block: str, root: Path, layers: Mapping[int, Layer]) -> None:
        super().__init__(layers)
        self._block, self._root = block, root

    def __getitem__(self, number: int) -> Layer:
        return layer_of(self, number, self._root, self._block)[1]


class Container(Closing):
    """An open container: `layers` of the decoder by number, `mtp` blocks by number, `manifest`, `path`.

    May stand in a `with` statement. Views that were taken stay valid after it; new ones are refused (`ClosedError`).
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        made = {(e.block, e.layer): Layer(path, e, manifest) for e in manifest.layers}
        self.layers, self.mtp = (
            Layers(block, path, {n: made[b, n] for b, n in sorted(made) if b == block}) for block in BLOCKS
        )

    def __repr__(self) -> str:
        kind = f"{self.manifest.codec}, {len(self.layers)} layers, {len(self.mtp)} mtp"
        return f"Container({str(self.path)!r}: {kind}, id {self.container_id})"

    def close(self) -> None:
        """Let go of every map no view needs; may be called twice."""
        super().close()
        for layer in (*self.layers.values(), *self.mtp.values()):
            layer.close()

    @property
    def container_id(self) -> str:
        """32 hexadecimal digits; equal for equal contents."""
        return self.manifest.container_id


Opener = Callable[[str | os.PathLike[str]], Container]
"""Opens what a model is to be run from."""


def open_container(path: str | os.PathLike[str]) -> Container:
    """Open the container directory at `path`.

    Reads the manifest and stats every file. Raises `PathTypeError` if `path` is no path, `RequestError` if it is an
    empty word or an address, or there is no container, or its codec is unknown, `DataError` if the manifest is damaged
    or a file is missing or of another length, `MachineError` if the system lets nobody look.
    """
    if sys.byteorder != "little":
        raise RequestError("a little-endian machine expected", code="E0330", remedy="containers are little-endian only")
    root = path_of(path)
    with MachineErrors(root, "opening"):
        return _open(root)


def _open(root: Path) -> Container:
    if not (root / MANIFEST).is_file():
        raise no_container(root)
    with MachineErrors(root / MANIFEST, "reading"):
        manifest = read_manifest(root / MANIFEST)
    encodings.get(manifest.codec, manifest.parameters)
    for problem in file_problems(root, manifest).values():
        raise problem
    return Container(root, manifest)


def file_problems(root: Path, manifest: Manifest) -> dict[str, DataError]:
    """Files of the container that are missing or of another length, in the manifest's order: what to raise for each."""
    found: dict[str, DataError] = {}
    for name, entry in manifest.files.items():
        file, remedy = root / name, "restore it from a copy, or convert again"
        if not file.is_file():
            found[name] = DataError(
                "a file of the container expected, found none", code="E0332", file=file, remedy=remedy
            )
        elif file.stat().st_size != entry.nbytes:
            found[name] = DataError(
                f"{entry.nbytes} bytes expected, found {file.stat().st_size}", code="E0333", file=file, remedy=remedy
            )
    return found


DECIDES = re.compile(
    r".*\.jinja|(generation_config|chat_template|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|(\w+_)?(pre)?processor_config)\.json|(merges|vocab)\.txt|.*\.(model|tiktoken)"
)
"""Names of what the libraries that run a model read beside config.json and the weights, if it is there."""


def open_to_run(path: str | os.PathLike[str]) -> Container:
    """`open_container`, and every side file is what the manifest says it is: for whoever runs the model.

    config.json, the tokenizer, the chat template and generation_config.json decide what a model answers, and one bit
    of them changes every answer. They are small, so all files but tensors, `records.xxh3` (whose digests are checked
    as they are used) and `experts.parquet` (which no run needs) are compared with their digests. A file of those kinds
    that the manifest does not list would decide as well, unseen. Raises `DataError` (E1216) besides.
    """
    container = open_container(path)
    here = (p for where in (container.path, container.path / TEMPLATES) if where.is_dir() for p in where.iterdir())
    for file in sorted(here):
        name = file.relative_to(container.path).as_posix()
        if DECIDES.fullmatch(file.name) and name not in container.manifest.files and file.is_file():
            raise DataError(
                "a file that the manifest lists expected, found one that is not the container's, and changes answers",
                code="E1216",
                file=file,
                remedy="move it away; a changed config or template is converted again with the checkpoint",
            )
    for name, entry in container.manifest.files.items():
        if name in (EXPERTS_TABLE, RECORDS) or name.endswith(".safetensors"):
            continue
        file, hasher = container.path / name, Hasher()
        with MachineErrors(file, "reading"):
            place_of(file).hash(hasher)
        if hasher.digest() != entry.xxh3:
            raise DataError(
                f"xxh3 of the file expected {entry.xxh3.hex()}, found {hasher.digest().hex()}: it was changed",
                code="E1216",
                file=file,
                remedy=f"{RESTORE}; a changed config or template is converted again with the checkpoint",
            )
    return container
