"""Comparison with the source: encode again what the container was made from, and compare every byte."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pagestone.convert.dense import DenseTensor, pieces
from pagestone.convert.encode import REQUANTISED, encode_expert
from pagestone.convert.plan import DenseTarget, LayerTarget, Plan, Request, make_plan
from pagestone.convert.reading import ExpertReader, SourceFiles
from pagestone.formats.dense_matrices import KEEP
from pagestone.formats.dtypes import Array
from pagestone.formats.errors import PagestoneError
from pagestone.formats.layer_file import beside_of
from pagestone.formats.layout import PARTS
from pagestone.formats.manifest import EXPERTS_TABLE, MANIFEST, SUMS, Manifest
from pagestone.formats.storage import PIECE, AnyPlace, Place, place_of
from pagestone.validate.checks import Check, Context, OpenLayer, Progress, Sums, codec_of, of_worker, read_exactly
from pagestone.validate.findings import ERROR, WARNING, Finding, guarded, of_error
from pagestone.validate.matrices import compare_matrices


@dataclass(slots=True)
class Comparison:
    """The source of a container, planned exactly as the conversion planned it."""

    plan: Plan
    files: SourceFiles
    targets: dict[str, LayerTarget]
    rooms: tuple[int, int]
    """Bytes that the largest expert takes in the source, and as a record."""
    chosen: set[tuple[str, int]] | None = None
    """(layer file, expert) to compare; None for all."""
    unlike: set[str] = field(default_factory=set)
    """Layer files whose experts cannot be compared: the source has no such layer, or one of another shape."""
    sums: Sums = field(default_factory=dict)
    """What encoding cost again, as experts.parquet has it; NaN where no expert was compared."""
    requantised: int = 0
    """Matrices met so far whose codes the codec could not keep."""
    own: threading.local = field(default_factory=threading.local)
    """A worker's buffers; they end with its thread."""

    def close(self) -> None:
        self.files.close()

    def check(self) -> Check:
        """The comparison as one check of `verify`: headers, records, then everything else."""
        return Check(self._rest, self._heads, self._expert)

    def check_of_table(self) -> Check:
        """What is left of it once experts.parquet was read: what it says that encoding cost."""
        return Check(self._table)

    def _covers(self, file: str, expert: int) -> bool:
        """Whether this expert is to be compared."""
        return file not in self.unlike and (self.chosen is None or (file, expert) in self.chosen)

    def _heads(self, context: Context, layer: OpenLayer) -> Iterator[Finding]:
        """Compare the headers of a layer file and its sidecar with those the source gives."""
        root, name = context.root, layer.entry.file
        target = self.targets.get(name)
        if target is None or target.header != layer.header:
            self.unlike.add(name)
            if target is not None:  # `_rest` reports a file the source does not give
                message = "the source would give a layer of another shape, codec or name"
                yield Finding(ERROR, "E1021", name, message)
            return
        self.sums[name] = np.full((target.header.count, len(PARTS), len(SUMS)), np.nan)
        heads = {name: target.header.head()}
        if layer.entry.sidecar is not None:
            heads[layer.entry.sidecar] = target.header.sidecar_head()
        for file, head in heads.items():
            if (root / file).stat().st_size < len(head) or read_exactly(root / file, 0, len(head)) != head:
                yield Finding(ERROR, "E1027", file, "its header is not what the source gives")

    def _expert(self, _context: Context, layer: OpenLayer, expert: int, record: Array) -> Iterator[Finding]:
        """Compare one record and what lies beside it with the source; what encoding cost is for `_table`."""
        name = layer.entry.file
        if not self._covers(name, expert):
            return
        target = self.targets[name]
        try:
            matrices, _ = self._reader().read(target.source, expert)
            again = of_worker(self.own, "record", self.rooms[1])[: layer.layout.stride]
            encoded = encode_expert(layer.header.codec, layer.layout.record, matrices, again)
        except PagestoneError as error:
            yield of_error(error, name)
            return
        self.requantised += encoded.notes[REQUANTISED]
        yield from self._bytes(layer, expert, record, np.frombuffer(again, np.uint8))
        for part in PARTS:
            for role, have in beside_of(layer.beside, expert, part).items():
                want = encoded.beside[part][role]
                for place in np.argwhere(have != want)[:1].tolist():
                    at = tuple(place)
                    message = f"expert {expert} {part} row {place[0]}: {role} {want[at]} expected, found {have[at]}"
                    yield Finding(ERROR, "E1023", str(layer.entry.sidecar), message)
        for number, part in enumerate(PARTS):
            stats = encoded.stats[part]
            self.sums[name][expert, number] = stats.squared_error, stats.squared_norm

    def _reader(self) -> ExpertReader:
        if not hasattr(self.own, "reader"):
            self.own.reader = ExpertReader(self.files, self.rooms[0])
        reader: ExpertReader = self.own.reader
        return reader

    def _table(self, context: Context) -> Iterator[Finding]:
        """Compare what experts.parquet says that encoding cost with what it cost again."""
        recorded = {} if context.sums is None else context.sums
        for name, again in self.sums.items() if recorded else ():
            differ = (recorded[name] != again).any(axis=2) & ~np.isnan(again).any(axis=2)
            for expert, number in np.argwhere(differ).tolist():
                want, have = (tuple(sums[expert, number].tolist()) for sums in (again, recorded[name]))
                words = f"squared error and norm {want} expected, found {have}"
                yield Finding(ERROR, "E1024", EXPERTS_TABLE, f"{name} expert {expert} {PARTS[number]}: {words}")

    @staticmethod
    def _bytes(layer: OpenLayer, expert: int, have: Array, want: Array) -> Iterator[Finding]:
        if np.array_equal(have, want):
            return
        differ = np.flatnonzero(have != want)
        first = int(differ[0])
        slot = next(s for s in layer.layout.record.slots if s.offset <= first < s.offset + s.nbytes)
        part = "" if slot.part is None else layer.header.part_names[PARTS.index(slot.part)] + "."
        message = (
            f"expert {expert} {part}{slot.suffix}: {len(differ)} bytes differ from the source's encoding, "
            f"first 0x{int(want[first]):02x} expected, found 0x{int(have[first]):02x}"
        )
        yield Finding(ERROR, "E1022", layer.entry.file, message, layer.layout.record_offset(expert) + first)

    def _rest(self, context: Context) -> Iterator[Finding]:
        """Compare dense tensors, side files, config and index with the source, byte for byte."""
        root, manifest, progress = context.root, context.manifest, context.progress
        for layer in context.layers:
            compared = sum(self._covers(layer.entry.file, expert) for expert in range(layer.header.count))
            context.report.count("experts compared with the source", compared)
        yield from self._facts(manifest)
        planned = self.plan.files
        for name in sorted(planned.keys() - manifest.files.keys()):
            yield Finding(ERROR, "E1025", name, "the source gives this file, the container lacks it")
        for name in sorted(manifest.files.keys() - planned.keys() - {EXPERTS_TABLE}):
            yield Finding(ERROR, "E1026", name, "the source gives no such file")
        for name, data in self.plan.generated.items():
            yield from guarded(self._generated(place_of(root / name), data), name)
        with (have := place_of(root, once=True)).storage:
            for side in self.plan.side_files:
                if side.rule is None:
                    yield from guarded(self._side(have / side.name, side.name, side.nbytes, progress), side.name)
            for shard in self.plan.dense:
                yield from guarded(self._shard(have / shard.name, shard, progress), shard.name)
        yield from compare_matrices(context, self.plan.matrices, self.files)

    @staticmethod
    def _generated(file: Place, data: bytes) -> Iterator[Finding]:
        if file.is_file() and file.read_bytes() != data:
            yield Finding(ERROR, "E1027", file.name, "not what the source gives")

    def _side(self, path: Place, name: str, nbytes: int, progress: Progress) -> Iterator[Finding]:
        """Compare a side file with the source's of the same name, `nbytes` long."""
        if not path.is_file():
            return
        if path.size() != nbytes:
            yield Finding(ERROR, "E1027", name, f"{nbytes} bytes expected as in the source")
            return
        for start in range(0, nbytes, PIECE):
            size = min(PIECE, nbytes - start)
            want = memoryview(bytearray(size))
            self.files.read_into(name, start, want)
            have = read_exactly(path, start, size)
            progress(size)
            if have != want:
                first = int(np.flatnonzero(np.frombuffer(have, np.uint8) != np.frombuffer(want, np.uint8))[0])
                yield Finding(ERROR, "E1028", name, f"bytes differ from the source {name}", start + first)
                return

    def _shard(self, path: Place, shard: DenseTarget, progress: Progress) -> Iterator[Finding]:
        if not path.is_file():
            return
        head = shard.head()
        if bytes(read_exactly(path, 0, min(len(head), path.size()))) != head:
            yield Finding(ERROR, "E1027", path.name, "its header is not what the source gives")
            return
        position = len(head)
        for tensor in shard.tensors:
            yield from guarded(self._dense(path, position, tensor, progress), path.name)
            position += tensor.nbytes

    def _dense(self, path: Place, position: int, tensor: DenseTensor, progress: Progress) -> Iterator[Finding]:
        """Compare one dense tensor with what the source gives, copied or decoded."""
        for want, _, _ in pieces(self.files, tensor, memoryview(bytearray(PIECE))):
            have = read_exactly(path, position, len(want))
            progress(len(want))
            if have != want:
                first = int(np.flatnonzero(np.frombuffer(have, np.uint8) != np.frombuffer(want, np.uint8))[0])
                message = f"{tensor.name}: bytes differ from the source {tensor.source.file}"
                yield Finding(ERROR, "E1028", path.name, message, position + first)
                return
            position += len(want)

    def _facts(self, manifest: Manifest) -> Iterator[Finding]:
        """What the manifest says about the source, against this source."""
        recorded = dict(manifest.source) | {"lossless": manifest.lossless}
        if manifest.dense is not None:
            recorded["dense"] = manifest.dense.identity
        lossless = self.plan.lossless and not self.requantised
        if lossless and self.chosen is not None and not manifest.lossless:
            lossless = False  # the data may forbid it in an expert that was not drawn
        expected = self.plan.source_facts | {"lossless": lossless}
        if self.plan.dense_identity is not None:
            expected["dense"] = self.plan.dense_identity
        for name in sorted((recorded.keys() | expected.keys()) - {"fingerprint"}):
            if recorded.get(name) != expected.get(name):
                message = f"{name} {expected.get(name)!r} expected from the source, found {recorded.get(name)!r}"
                yield Finding(ERROR, "E1029", MANIFEST, message)
        if recorded.get("fingerprint") != expected["fingerprint"]:
            message = "made from another copy of the source: its config, its shards or their headers differ"
            yield Finding(WARNING, "W1030", MANIFEST, message)


def plan_again(source: AnyPlace, manifest: Manifest) -> Plan:
    """Plan the source as the container was planned. Raises what opening and planning raise."""
    dense = KEEP if manifest.dense is None else manifest.dense.codec
    asked = Request(source, codec_of(manifest), manifest.partial, manifest.include_code, manifest.merge_unlisted, dense)
    return make_plan(asked)


def compare_with(source: AnyPlace, manifest: Manifest, sample: int | None = None) -> Comparison:
    """Plan the source as the container was planned.

    `sample` experts are drawn evenly at random, the same ones for the same container; None compares all. Raises what
    opening and planning raise.
    """
    plan = plan_again(source, manifest)
    targets = {t.name: t for t in plan.layers}
    chosen = None
    if sample is not None:
        every = [(t.name, e) for t in plan.layers for e in range(t.header.count)]
        chosen = set(random.Random(manifest.container_id).sample(every, min(sample, len(every))))
    rooms = (
        max(ExpertReader.needed(t.source) for t in plan.layers),
        max(t.header.layout().stride for t in plan.layers),
    )
    return Comparison(plan, SourceFiles(plan.checkpoint.path), targets, rooms, chosen)
