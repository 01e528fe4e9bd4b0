"""A checkpoint as the bf16 container it would become, without converting it: experts are encoded as they are asked for.

    with Session("Qwen3.6-35B-A3B", SessionOptions(), opener=open_any) as session: ...

Names, dense tensors and records are those of the plan that `prepare-bf16` would carry out, so a model over it gives the
container's logits, bit for bit. What costs time is encoding an expert again each time it is read: for a plain source a
copy, for FP8 its values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.convert.checkpoint import CONFIG
from pagestone.convert.dense import DenseTensor, pieces
from pagestone.convert.encode import encode_expert
from pagestone.convert.errors import machine_errors
from pagestone.convert.matrices import MatrixEncoder
from pagestone.convert.plan import LayerTarget, Plan, Request, make_plan
from pagestone.convert.reading import ExpertReader, SourceFiles
from pagestone.convert.unchanged import FACTS
from pagestone.formats import encodings
from pagestone.formats.dense_matrices import DenseMatrix, PlacedMatrix
from pagestone.formats.directories import directory
from pagestone.formats.dtypes import VIEWS, Array
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import LayerHeader
from pagestone.formats.manifest import MANIFEST, PARTIAL, LayerEntry, Manifest, no_container
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.formats.storage import PIECE, AnyPlace
from pagestone.formats.strict_json import brief
from pagestone.reader.container import Beside, Container, Layer, View, open_to_run
from pagestone.reader.made import MadeContainer

CODEC = "bf16"
"""The encoding of the records that are made: the source's own values, and nothing beside them."""
AS_THEY_ARE = "the checkpoint is not converted: its experts are encoded each time they are read; a container is faster"


class SourceMaker:
    """A `Maker` over a plan; every file it reads is held to the stamp that the plan saw."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._files = SourceFiles(plan.checkpoint.path)
        self._targets = {t.name: t for t in plan.layers}
        self._matrices = {m.name: (t, m, record) for t in plan.matrices for m, record in t.records()}
        self._beside: dict[str, Beside] = {}
        self._lock = threading.Lock()
        self._dense = {t.name: (shard.name, t) for shard in plan.dense for t in shard.tensors}
        self._room = max(ExpertReader.needed(t.source) for t in plan.layers)
        self._own = threading.local()

    def _reader(self) -> ExpertReader:
        """The calling thread's own: a reader has one buffer."""
        reader: ExpertReader | None = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = ExpertReader(self._files, self._room)
        return reader

    def record(self, layer: Layer, expert: int, into: memoryview) -> None:
        target = self._targets[layer.entry.file]
        self._require_unchanged(_files(target, expert))
        matrices, _ = self._reader().read(target.source, expert)
        try:
            made = encode_expert(target.header.codec, layer.layout.record, matrices, into)
        except DataError as error:
            file = self._plan.checkpoint.path / str(error.file)
            message = f"expert {expert}: {error.message}"
            raise DataError(message, code=error.code, file=file, tensor=error.tensor, remedy=error.remedy) from None
        made.put_beside({key: view.array for key, view in self.beside(layer).items()}, expert)

    def beside(self, layer: Layer) -> Beside:
        name = layer.entry.file
        with self._lock:
            if name not in self._beside:
                tensors = layer.header.sidecar_tensors()
                self._beside[name] = {
                    (t.part, t.role): View(np.zeros(t.shape, VIEWS[t.dtype]), t.dtype) for t in tensors
                }
            return self._beside[name]

    def dense_entries(self) -> Mapping[str, tuple[str, TensorEntry]]:
        return {name: (file, _entry(tensor)) for name, (file, tensor) in self._dense.items()}

    def dense(self, name: str) -> Array:
        tensor = self._dense[name][1]
        self._require_unchanged({tensor.source.file, *(r.tensor.file for r in tensor.stored.values())})
        array = np.empty(tensor.nbytes, np.uint8)
        room, position = memoryview(bytearray(PIECE)), 0
        for piece, _, _ in pieces(self._files, tensor, room):
            array[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
            position += len(piece)
        return array

    def rows(self, name: str) -> Callable[[int, memoryview], None] | None:
        tensor = self._dense[name][1]
        if tensor.encoding is not None:
            return None
        source, size = tensor.source, tensor.nbytes // tensor.shape[0]

        def make(row: int, into: memoryview) -> None:
            self._require_unchanged({source.file})
            self._files.read_into(source.file, source.offset + row * size, into)

        return make

    def matrices(self) -> Mapping[str, PlacedMatrix]:
        return {
            name: PlacedMatrix(DenseMatrix(name, target.name, matrix.rows, matrix.columns, 0.0, 0.0), record, 0)
            for name, (target, matrix, record) in self._matrices.items()
        }

    def matrix(self, name: str, into: memoryview) -> None:
        target, matrix, record = self._matrices[name]
        self._require_unchanged({r.tensor.file for r in matrix.stored.values()})
        position = 0
        for piece, _ in MatrixEncoder(self._files, target.encoding, matrix, record).pieces(
            memoryview(bytearray(PIECE))
        ):
            into[position : position + len(piece)] = piece
            position += len(piece)

    def _require_unchanged(self, names: set[str]) -> None:
        """Raise `DataError` (E1330) if a file is another than when it was planned: no answer of a mixture."""
        checkpoint = self._plan.checkpoint
        for name in names:
            with machine_errors(checkpoint.path / name, "reading the source"):
                known, now = checkpoint.stamps[name], (checkpoint.path / name).stamp()
            if now != known:
                what, was, found = next(x for x in zip(FACTS, known, now, strict=True) if x[1] != x[2])
                raise DataError(
                    f"the source changed while it was read: its {what} is another than when it was opened, {was:,} "
                    f"expected, found {found:,}{'' if what == FACTS[0] else ' ns'}",
                    code="E1330",
                    file=checkpoint.path / name,
                    remedy="see that nothing writes to the checkpoint, then run the same command again",
                )

    def close(self) -> None:
        self._files.close()


def _files(target: LayerTarget, expert: int) -> set[str]:
    """The files that an expert is made of."""
    parts = ("gate", "up", "down")
    return {r.tensor.file for part in parts for r in target.source.matrix(expert, part).ranges}


def _entry(tensor: DenseTensor) -> TensorEntry:
    return TensorEntry(tensor.name, tensor.dtype, tensor.shape, 0, tensor.nbytes)


def open_virtual(source: AnyPlace, home: Path | None = None) -> MadeContainer:
    """The bf16 container that `prepare-bf16` would make of `source`, without making it.

    `home` is the directory that holds config.json and the tokenizer: the source's own, which a source that is no
    directory of this machine has not (`RequestError`, E1331). Raises what `make_plan` raises.
    """
    plan = make_plan(Request(source, encodings.get(CODEC)))
    root = plan.checkpoint.path.path() if home is None else home
    if root is None:
        raise RequestError(
            "a checkpoint in a directory of this machine expected: a model is made of its config.json",
            code="E1331",
            file=plan.checkpoint.path,
            remedy="give a directory that holds its config.json and its tokenizer",
        )
    entries = tuple(LayerEntry(t.name, t.header.block, t.header.layer, t.header.count, None) for t in plan.layers)
    manifest = Manifest(CODEC, plan.codec.parameters, plan.lossless, None, plan.source_facts, entries)
    # the fingerprint covers names, lengths and headers, not the data: it is no container id, and must not look like one
    identity = f"source {plan.checkpoint.fingerprint}"
    return MadeContainer(root, manifest, [t.header for t in plan.layers], SourceMaker(plan), identity)


def again(container: Container, plan: Plan) -> MadeContainer:
    """What `plan`, made as for a conversion of the container's source, gives in its place: the same bytes, or others.

    Its directory is the container's, whose config.json is used. Raises `RequestError` (E1306) if the plan's layers, or
    its dense matrices' encoding, are others.
    """
    manifest, targets = container.manifest, {t.name: t.header for t in plan.layers}
    for layer in (*container.layers.values(), *container.mtp.values()):
        target = targets.get(layer.entry.file)
        if target != layer.header:
            found = "none" if target is None else _facts(target)
            raise _another("a layer of another shape, codec or name", layer.path, _facts(layer.header), found)
    listed, made = None if manifest.dense is None else manifest.dense.identity, plan.dense_identity
    if made != listed:
        raise _another("dense matrices in another encoding", container.path, _encoding(listed), _encoding(made))
    headers = [targets[e.file] for e in manifest.layers]
    return MadeContainer(container.path, manifest, headers, SourceMaker(plan), container.container_id)


def _another(what: str, file: Path, expected: str, found: str) -> RequestError:
    return RequestError(
        f"the source would give {what}: {expected} expected, found {found}",
        code="E1306",
        file=file,
        remedy="give the checkpoint that this container was made from",
    )


def _facts(header: LayerHeader) -> str:
    """A layer in words: all that headers can differ in."""
    shape, codec = header.shape, header.codec
    bias = "" if shape.bias_dtype is None else f" with biases in {shape.bias_dtype}"
    return (
        f"{header.count} experts of {header.prefix} ({header.block} {header.layer}: {', '.join(header.part_names)}), "
        f"{shape.hidden} by {shape.intermediate}{bias}, in {codec.name} {brief(codec.parameters)}"
    )


def _encoding(dense: Mapping[str, Any] | None) -> str:
    return "matrices as they are" if dense is None else f"{dense['codec']} {brief(dense['parameters'])}"


def neither(path: Path) -> RequestError:
    """Why `path` is no container and no checkpoint. Raises `RequestError` for an address."""
    return no_container(directory(path), checkpoints=True)


def open_any(path: Path) -> Container:
    """`open_to_run` for a container, `open_virtual` for a checkpoint.

    What holds a manifest, or an unfinished conversion, is a container or nothing.
    """
    ours = (path / MANIFEST).exists() or (path / PARTIAL).exists()
    if ours:
        return open_to_run(path)
    if not (path / CONFIG).is_file():
        raise neither(path)
    return open_virtual(path)
