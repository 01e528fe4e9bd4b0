"""Dense tensors: everything that is no routed expert, mapped or read, and as torch tensors.

Beside plain tensors there are matrices in an encoding, which stay as they are stored (`formats/dense_matrices.py`), and
tables of which only rows are read (`reader/rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagestone.formats import encodings
from pagestone.formats.dense_matrices import PlacedMatrix, read_matrices
from pagestone.formats.digests import Hasher
from pagestone.formats.dtypes import VIEWS, Array, item_size
from pagestone.formats.encodings import Candidate, Claim, Tensor
from pagestone.formats.encodings.fp8 import BLOCK
from pagestone.formats.errors import DataError, NonFiniteError, RequestError
from pagestone.formats.layer_file import sidecar_name
from pagestone.formats.layout import CODES, align_up
from pagestone.formats.manifest import Manifest
from pagestone.formats.safetensors_header import TensorEntry, read_header
from pagestone.reader.container import TORCH_NAMES, Container, Matrix, View
from pagestone.reader.files import ANEW, RESTORE, DirectFile, MachineErrors, map_file, private_buffer
from pagestone.reader.made import MODE, MadeContainer
from pagestone.reader.rows import FileRows, MadeRows, RowDigests, RowTable

if TYPE_CHECKING:
    import torch

READ_AT_ONCE = 4 << 20
"""Bytes: dense files are read in pieces of this size."""
BY_ROWS = ("direct", "buffered", ANEW, MODE)
"""Modes of stores beside which tables are read by rows: those that stream. Maps need not, and what is compared with
streaming has everything in memory."""
ALIGNMENT = 64
"""Bytes: where a dense tensor begins in memory."""


@dataclass(slots=True)
class DenseTensors:
    """Dense tensors as bytes: uint8 arrays by name with their safetensors type and shape. Arrays keep memory alive."""

    arrays: dict[str, Array] = field(default_factory=dict, repr=False)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    mode: str = "direct"
    bytes_read: int = 0
    matrices: dict[str, Matrix] = field(default_factory=dict, repr=False)
    """Encoded matrices by the names of their modules."""
    tables: dict[str, RowTable] = field(default_factory=dict, repr=False)
    """Tables that are read by rows, by tensor name: their entries are there, their bytes are not."""


def dense_files(container: Container) -> list[str]:
    """Names of the safetensors files that hold no routed experts."""
    manifest: Manifest = container.manifest
    layer_files = {e.file for e in manifest.layers}
    others = layer_files | {sidecar_name(name) for name in layer_files}
    others |= set() if manifest.dense is None else {*manifest.dense.files}
    return sorted(n for n in manifest.files if n.endswith(".safetensors") and n not in others)


def dense_entries(container: Container) -> dict[str, tuple[str, TensorEntry]]:
    """(file, table entry) of every dense tensor by name; only headers are read."""
    if isinstance(container, MadeContainer):
        return dict(container.maker.dense_entries())
    places: dict[str, tuple[str, TensorEntry]] = {}
    for file in dense_files(container):
        with MachineErrors(container.path / file, "reading"):
            header = read_header(container.path / file)
        for entry in header.entries:
            if entry.name in places:
                raise DataError(
                    f"this tensor is also in {places[entry.name][0]}",
                    code="E1207",
                    file=container.path / file,
                    tensor=entry.name,
                    remedy=RESTORE,
                )
            places[entry.name] = (file, entry)
    return places


def load_dense(
    container: Container,
    names: Iterable[str],
    mode: str,
    *,
    verify: bool = True,
    matrices: Iterable[str] = (),
    tables: Iterable[str] = (),
    passing: Iterable[str] = (),
) -> DenseTensors:
    """The dense tensors called `names`: views of a map (`mmap`), or read past the page cache in one pass a file.

    `matrices` are modules whose encoded matrices are wanted, `tables` those of `names` whose rows are read as they are
    asked for (when mapped, they are views as the others), `passing` those that have memory of their own, because others
    are made of them. When read, whole files are compared with their digests in the manifest; `DataError` (E1205) names
    the one that differs. The mode "anew" reads through the page cache.
    """
    if isinstance(container, MadeContainer):
        return _made(container, names, set(matrices), set(tables))
    where = dense_entries(container)
    by_file: dict[str, list[TensorEntry]] = {}
    for name in names:
        file, entry = where[name]
        by_file.setdefault(file, []).append(entry)
    dense = DenseTensors(mode=mode)
    rows, own = set(tables), set(passing)
    for file, entries in sorted(by_file.items()):
        path = container.path / file
        entries.sort(key=lambda e: e.offset)
        dense.entries |= {e.name: e for e in entries}
        if mode == "mmap":
            whole = np.frombuffer(map_file(path), np.uint8)
            dense.arrays |= {e.name: whole[e.offset : e.offset + e.nbytes] for e in entries}
            continue
        digests = [RowDigests(e) for e in entries if e.name in rows]
        for entry in entries:
            if entry.name in own:
                dense.arrays[entry.name] = np.frombuffer(private_buffer(entry.nbytes), np.uint8)[: entry.nbytes]
        digest, way = _read_tensors(path, [e for e in entries if e.name not in rows], digests, dense)
        _compare(container, file, digest, verify)
        _note_mode(dense, way)
        for table in digests:
            checked = table.digests if verify else None
            dense.tables[table.entry.name] = FileRows(path, table.entry, checked, direct=dense.mode != ANEW)
    _load_matrices(container, dense, set(matrices), verify)
    return dense


def _made(container: MadeContainer, names: Iterable[str], matrices: set[str], tables: set[str]) -> DenseTensors:
    """Dense tensors of a container that is on no disk."""
    maker, made = container.maker, DenseTensors(mode=MODE)
    entries = maker.dense_entries()
    for name in names:
        made.entries[name] = entry = entries[name][1]
        rows = maker.rows(name) if name in tables else None
        if rows is not None:
            made.tables[name] = MadeRows(container.path, entry, rows)
            continue
        made.arrays[name] = maker.dense(name)
        made.bytes_read += len(made.arrays[name])
    for name, placed in maker.matrices().items():
        if name in matrices:
            memory = private_buffer(placed.record.nbytes)
            maker.matrix(name, memoryview(memory))
            made.matrices[name] = matrix_in(np.frombuffer(memory, np.uint8), container, placed)
            made.bytes_read += placed.record.nbytes
    return made


def _compare(container: Container, file: str, digest: bytes, verify: bool) -> None:
    listed = container.manifest.files[file].xxh3
    if verify and digest != listed:
        raise DataError(
            f"xxh3 of the file expected {listed.hex()}, found {digest.hex()}",
            code="E1205",
            file=container.path / file,
            remedy=RESTORE,
        )


def _note_mode(dense: DenseTensors, way: str) -> None:
    dense.mode = "buffered" if way == "buffered" and dense.mode != ANEW else dense.mode


def _read_tensors(
    path: Path, entries: list[TensorEntry], tables: list[RowDigests], dense: DenseTensors
) -> tuple[bytes, str]:
    """Read a file from front to back, keeping the tensors wanted; its digest and the mode it was read in.

    Those that have no memory yet get it in one piece.
    """
    room = sum(align_up(e.nbytes, ALIGNMENT) for e in entries if e.name not in dense.arrays)
    memory = np.frombuffer(private_buffer(max(1, room)), np.uint8)
    targets: list[tuple[TensorEntry, Callable[[int, memoryview], None]]] = []
    position = 0
    for entry in entries:
        if entry.name not in dense.arrays:
            dense.arrays[entry.name] = memory[position : position + entry.nbytes]
            position += align_up(entry.nbytes, ALIGNMENT)
        targets.append((entry, _into(dense.arrays[entry.name])))
    targets += [(table.entry, lambda _, piece, table=table: table.feed(piece)) for table in tables]  # type: ignore[misc]
    file, hasher = DirectFile(path, direct=dense.mode != ANEW), Hasher()
    try:
        for start, piece in _pieces(file):
            hasher.update(piece)
            dense.bytes_read += len(piece)
            for entry, take in targets:
                first, end = max(entry.offset, start), min(entry.offset + entry.nbytes, start + len(piece))
                if first < end:
                    take(first - entry.offset, piece[first - start : end - start])
        return hasher.digest(), file.mode
    finally:
        file.forget(0)
        file.close()


def _into(array: Array) -> Callable[[int, memoryview], None]:
    def take(at: int, piece: memoryview) -> None:
        array[at : at + len(piece)] = np.frombuffer(piece, np.uint8)

    return take


def _pieces(file: DirectFile) -> Iterator[tuple[int, memoryview]]:
    buffer = memoryview(private_buffer(READ_AT_ONCE))
    offset = 0
    while got := file.read_into(buffer, offset):
        yield offset, buffer[:got]
        offset += got
        if got < READ_AT_ONCE:
            return


# -- encoded matrices -------------------------------------------------------------------------------------------------


def encoded_matrices(container: Container) -> dict[str, PlacedMatrix]:
    """Every encoded dense matrix by the name of its module; only headers are read. Raises as `read_matrices`."""
    if isinstance(container, MadeContainer):
        return dict(container.maker.matrices())
    listed = container.manifest.dense
    found: dict[str, PlacedMatrix] = {}
    if listed is None:
        return found
    for file in listed.files:
        path = container.path / file
        with MachineErrors(path, "reading"):
            found |= {p.matrix.name: p for p in read_matrices(path, listed, file)}
    return found


def _load_matrices(container: Container, dense: DenseTensors, names: set[str], verify: bool) -> None:
    """The encoded matrices called `names` into `dense`, whole files at a time: mapped, or read and compared."""
    by_file: dict[str, list[PlacedMatrix]] = {}
    for placed in encoded_matrices(container).values():
        by_file.setdefault(placed.matrix.file, []).append(placed)
    for file, matrices in by_file.items():
        wanted = [p for p in matrices if p.matrix.name in names]
        path = container.path / file
        if not wanted:
            continue
        if dense.mode == "mmap":
            whole = np.frombuffer(map_file(path), np.uint8)
            records = {p.matrix.name: whole[p.offset : p.offset + p.record.nbytes] for p in wanted}
        else:
            records, digest, way = _read_records(path, wanted, dense)
            _compare(container, file, digest, verify)
            _note_mode(dense, way)
        dense.matrices |= {p.matrix.name: matrix_in(records[p.matrix.name], container, p) for p in wanted}


def matrix_in(record: Array, container: Container, placed: PlacedMatrix) -> Matrix:
    """Views of a dense matrix in a copy of its record, uint8, wherever that copy lies."""
    listed = container.manifest.dense
    if listed is None:
        raise ValueError("this container has no encoded dense matrices")
    stored = {}
    for slot in placed.record.stored:
        array = record[slot.offset : slot.offset + slot.nbytes].view(VIEWS[slot.dtype]).reshape(slot.shape)
        array.flags.writeable = False
        stored[slot.role] = View(array, slot.dtype)
    return Matrix(listed.encoding, placed.record.rows, placed.record.columns, stored)


def _read_records(path: Path, wanted: list[PlacedMatrix], dense: DenseTensors) -> tuple[dict[str, Array], bytes, str]:
    """Read a file from front to back, each record that is wanted into memory of its own; its digest, and the mode."""
    file, hasher = DirectFile(path, direct=dense.mode != ANEW), Hasher()
    spare = memoryview(private_buffer(READ_AT_ONCE))
    records: dict[str, Array] = {}
    offset = 0

    def read(target: memoryview) -> int:
        nonlocal offset
        got = file.read_into(target, offset)
        hasher.update(target[:got])
        dense.bytes_read += got
        offset += got
        return got

    try:
        for placed in wanted:
            while offset < placed.offset and read(spare[: placed.offset - offset]):
                pass
            memory = private_buffer(placed.record.nbytes)
            records[placed.matrix.name] = np.frombuffer(memory, np.uint8)
            whole = memoryview(memory)
            for at in range(0, len(whole), READ_AT_ONCE):
                read(whole[at : at + READ_AT_ONCE])
            if offset < placed.offset + len(whole):
                raise DataError(
                    f"{len(whole)} bytes at byte {placed.offset} expected, the file ended at byte {offset}",
                    code="E1205", file=path, tensor=placed.matrix.name, remedy=RESTORE,
                )  # fmt: skip
        while read(spare) == len(spare):
            pass
        return records, hasher.digest(), file.mode
    finally:
        file.forget(0)
        file.close()


# -- for torch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DenseCodes:
    """A dense matrix whose codes an `fp8` container kept as its source had them: its tensors' names by role."""

    claim: Claim
    names: Mapping[str, str]


def dense_codes(used: Iterable[str], entries: Mapping[str, TensorEntry], root: Path) -> dict[str, DenseCodes]:
    """Every dense matrix of codes among those `used`, by the name of its codes; `DataError` (E1224) if it has no scale
    that containers may have."""
    matrices = {}
    for name in used:
        if entries[name].dtype != "F8_E4M3":
            continue
        stem = name.removesuffix("weight")
        group = {s: entries[stem + s] for s in encodings.suffixes() if stem + s in entries}
        tensors = {s: Tensor(e.dtype, e.shape) for s, e in group.items()}
        claim = encodings.claim(Candidate(tensors, STATED)) if group else None
        if not isinstance(claim, Claim):
            why = "" if claim is None else f" ({claim.message})"
            raise DataError(
                f"a scale beside these FP8 codes expected, found none that fits{why}", code="E1224", file=root,
                tensor=name, remedy="convert the checkpoint again",
            )  # fmt: skip
        matrices[name] = DenseCodes(claim, {role: stem + suffix for role, suffix in claim.suffixes.items()})
    return matrices


STATED = {"quantization_config": {"weight_block_size": [BLOCK, BLOCK]}}
"""What a config says of dense codes that stay (specs/container.md)."""


def decoded(dense: DenseTensors, codes: DenseCodes) -> torch.Tensor:
    """A dense FP8 matrix as transformers makes it on a CPU: code * scale in float32, rounded once to bfloat16."""
    import torch

    claim = codes.claim
    stored = {
        role.name: dense.arrays[codes.names[role.name]].view(VIEWS[role.dtype]).reshape(role.shape)
        for role in claim.encoding.roles(claim.rows, claim.columns)
    }
    try:
        claim.encoding.require_sound(stored, claim.rows, claim.columns)
    except NonFiniteError as error:
        raise DataError(
            f"finite weights expected, found {error.value} at row {error.row}, column {error.column}",
            code="E1228", tensor=codes.names[CODES], remedy="convert the checkpoint again from a sound source",
        ) from None  # fmt: skip
    return torch.from_numpy(claim.encoding.values(stored, claim.rows, claim.columns)).to(torch.bfloat16)


def bytes_of_tensor(dense: DenseTensors, name: str) -> Array:
    """uint8: a plain tensor's bytes, also of a table that is there by rows."""
    table = dense.tables.get(name)
    return dense.arrays[name] if table is None else table.read(np.arange(table.entry.shape[0])).reshape(-1)


def dense_tensor(array: Array, entry: TensorEntry) -> torch.Tensor:
    """The bytes of a dense tensor as a torch tensor, without a copy unless they lie at an address torch may not use."""
    import torch

    if entry.dtype not in TORCH_NAMES:
        raise RequestError(
            f"a type torch knows expected, found {entry.dtype}",
            code="E1226",
            tensor=entry.name,
            remedy="this container can be read, not run",
        )
    dtype = getattr(torch, TORCH_NAMES[entry.dtype])
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    if array.ctypes.data % item_size(entry.dtype):  # legal in a file
        array = array.copy()
    return torch.frombuffer(array, dtype=dtype).view(entry.shape)
