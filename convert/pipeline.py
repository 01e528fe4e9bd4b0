"""The conversion itself: workers that each take one expert at a time, read, encode, hash and write it.

A record's offset is known before any is made, so workers need no order among themselves, and the bytes do not depend
on how many there are. What is in memory is workers x (one expert in + one record out), whatever the model's size.
"""

from __future__ import annotations

import errno
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from pagestone.convert.checkpoint import CONFIG
from pagestone.convert.dense import pieces
from pagestone.convert.encode import EncodedExpert, encode_expert
from pagestone.convert.errors import machine_errors
from pagestone.convert.journal import FinishedFile
from pagestone.convert.machine import MODES, write_durably
from pagestone.convert.matrices import MatricesTarget, MatrixEncoder
from pagestone.convert.plan import DenseTarget, LayerTarget, Plan
from pagestone.convert.publish import WorkDirectory
from pagestone.convert.reading import ExpertReader, SourceFiles
from pagestone.convert.writing import OutputFile, StreamWriter
from pagestone.formats.digests import digest, layer_digest
from pagestone.formats.dtypes import VIEWS, Array
from pagestone.formats.errors import DataError
from pagestone.formats.layout import PARTS, LayerLayout
from pagestone.formats.storage import PIECE, UNSUPPORTED, Place, page_buffer, stamp_of

ALL_ZERO = "all zero: "
"""How the note begins that a dense matrix, whose name follows, holds nothing but zeros."""
Progress = Callable[[int], None]
"""Called with the number of source bytes done since the last call, from any worker."""


class LayerWriter:
    """One layer being written: any worker may add any expert; the one that adds the last finishes the file."""

    def __init__(self, target: LayerTarget, work: WorkDirectory) -> None:
        self.target, self._work = target, work
        head = target.header.head()
        self.layout: LayerLayout = target.header.layout(len(head))
        self._head = head
        self._file = OutputFile(work.file(target.name), target.nbytes, work.lacks)
        padded = memoryview(page_buffer(len(head)))
        padded[:] = head
        self._file.write(padded, 0)
        self._records: list[bytes] = [b""] * self.layout.count
        self._stats: list[tuple[float, ...]] = [()] * self.layout.count
        self._notes: Counter[str] = Counter()
        self._left = self.layout.count
        self._lock = threading.Lock()
        self._beside: dict[tuple[str, str], Array] = {
            (t.part, t.role): np.zeros(t.shape, VIEWS[t.dtype]) for t in target.header.sidecar_tensors()
        }

    def add(self, expert: int, record: memoryview, encoded: EncodedExpert) -> bool:
        """Write one record; True if it was the layer's last."""
        self._records[expert] = digest(record)
        self._stats[expert] = tuple(
            v for p in PARTS for v in (encoded.stats[p].squared_error, encoded.stats[p].squared_norm)
        )
        encoded.put_beside(self._beside, expert)
        self._file.write(record, self.layout.record_offset(expert))
        with self._lock:
            self._notes += encoded.notes
            self._left -= 1
            return self._left == 0

    def finish(self) -> None:
        """Make the layer and its sidecar durable and note them in the journal; the sidecar first."""
        target = self.target
        if target.sidecar is not None:
            writer = StreamWriter(self._work.file(target.sidecar), target.sidecar_bytes, self._work.lacks)
            try:
                writer.append(target.header.sidecar_head())
                for array in self._beside.values():
                    writer.append(array.data)
                whole = writer.finish().hex()
                self._work.record(FinishedFile(target.sidecar, target.sidecar_bytes, whole, stamp=writer.stamp))
            finally:
                writer.close()
        self._file.finish()
        whole = layer_digest(self._head, self._records).hex()
        records = tuple(r.hex() for r in self._records)
        notes, stamp = dict(self._notes), self._file.stamp
        done = FinishedFile(target.name, target.nbytes, whole, records, tuple(self._stats), notes, stamp)
        self._work.record(done)

    def close(self) -> None:
        """Give up without promising anything; may be called after `finish`."""
        self._file.close()


@dataclass(slots=True)
class _Shared:
    """What the workers of one conversion share."""

    plan: Plan
    work: WorkDirectory
    files: SourceFiles
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    writers: list[LayerWriter] = field(default_factory=list)

    def done(self, nbytes: int) -> None:
        """Report progress; one worker at a time, so that callbacks need no lock of their own."""
        with self.lock:
            self.progress(nbytes)


def convert(plan: Plan, work: WorkDirectory, workers: int, progress: Progress) -> None:
    """Carry out a plan in a work directory whose job has begun; what was found in the data is noted in the journal.

    Files the journal already lists are left alone. Raises the first error of any worker, after all have stopped;
    finished files stay for the next run.
    """
    for name, data in plan.generated.items():
        if name not in work.finished:
            with machine_errors(work.file(name), "writing a file"):
                write_durably(work.file(name), data, work.lacks)
                if name == CONFIG:
                    narrow(work.file(name), plan.checkpoint.path / name, work.lacks)
                stamp = stamp_of(work.file(name).stat())
                work.record(FinishedFile(name, len(data), digest(data).hex(), stamp=stamp))
    shared = _Shared(plan, work, SourceFiles(plan.checkpoint.path), progress)
    tasks = _tasks(shared)
    source_room = max(ExpertReader.needed(t.source) for t in plan.layers)
    record_room = max(t.header.layout().stride for t in plan.layers)
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
            running = [pool.submit(_worker, shared, tasks, source_room, record_room) for _ in range(workers)]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                shared.stop.set()
        for future in running:
            future.result()
    finally:
        shared.files.close()
        for writer in shared.writers:
            writer.close()


Task = Callable[["_Hands"], None]


@dataclass(slots=True)
class _Hands:
    """A worker's own buffers."""

    reader: ExpertReader
    record: memoryview
    chunk: memoryview


def _tasks(shared: _Shared) -> Iterator[Task]:
    """Every piece of work in order. Long unsplittable ones (dense shards) first, so that no worker ends late."""
    plan, finished = shared.plan, shared.work.finished
    for dense in plan.dense:
        if dense.name not in finished:
            yield partial(_copy_dense, shared, dense)
    for matrices in plan.matrices:
        if matrices.name not in finished:
            yield partial(_encode_dense, shared, matrices)
    for side in plan.side_files:
        if side.rule is None and side.name not in finished:
            yield partial(_copy_file, shared, side.name, side.nbytes)
    for target in plan.layers:
        if target.name in finished and (target.sidecar is None or target.sidecar in finished):
            continue
        with machine_errors(shared.work.file(target.name), "creating a layer file"):
            writer = LayerWriter(target, shared.work)
        shared.writers.append(writer)
        for expert in range(target.header.count):
            yield partial(_convert_expert, shared, writer, expert)


def _worker(shared: _Shared, tasks: Iterator[Task], source_room: int, record_room: int) -> None:
    hands = _Hands(
        ExpertReader(shared.files, source_room), memoryview(page_buffer(record_room)), memoryview(page_buffer(PIECE))
    )
    try:
        while not shared.stop.is_set():
            with shared.lock:  # a generator may be advanced by one thread at a time
                task = next(tasks, None)
            if task is None:
                return
            task(hands)
    except BaseException:
        shared.stop.set()
        raise


def _convert_expert(shared: _Shared, writer: LayerWriter, expert: int, hands: _Hands) -> None:
    target = writer.target
    matrices, nbytes = hands.reader.read(target.source, expert)
    record = hands.record[: writer.layout.stride]
    try:
        encoded = encode_expert(target.header.codec, writer.layout.record, matrices, record)
    except DataError as error:
        raise DataError(f"expert {expert}: {error.message}", code=error.code, tensor=error.tensor, remedy=error.remedy,
                        file=shared.plan.checkpoint.path / str(error.file)) from None  # fmt: skip
    with machine_errors(shared.work.file(target.name), "writing a layer file"):
        if writer.add(expert, record, encoded):
            writer.finish()
            shared.writers.remove(writer)
    shared.done(nbytes)


# -- dense tensors and side files ------------------------------------------------------------------------------------


def _copy_dense(shared: _Shared, target: DenseTarget, hands: _Hands) -> None:
    path = shared.work.file(target.name)
    with machine_errors(path, "writing dense tensors"):
        writer = StreamWriter(path, target.nbytes, shared.work.lacks)
        try:
            writer.append(target.head())
            notes: Counter[str] = Counter()
            for tensor in target.tensors:
                odd, some = 0, tensor.nbytes == 0 or len(tensor.shape) < 2
                for piece, read, non_finite in pieces(shared.files, tensor, hands.chunk):
                    if shared.stop.is_set():
                        return
                    odd += non_finite
                    some = some or bool(np.frombuffer(piece, np.uint8).any())
                    writer.append(piece)
                    shared.done(read)
                if not some:
                    notes[ALL_ZERO + tensor.name] = 1
                if odd:
                    notes[f"{tensor.source.file}: {tensor.name} holds {odd} NaN or Inf; copied as it is"] = odd
            whole = writer.finish().hex()
            found = FinishedFile(target.name, target.nbytes, whole, notes=dict(notes), stamp=writer.stamp)
            shared.work.record(found)
        finally:
            writer.close()


def _encode_dense(shared: _Shared, target: MatricesTarget, hands: _Hands) -> None:
    path = shared.work.file(target.name)
    with machine_errors(path, "writing dense matrices"):
        writer = StreamWriter(path, target.nbytes, shared.work.lacks)
        try:
            writer.append(target.head())
            notes: Counter[str] = Counter()
            sums: list[tuple[float, float]] = []
            for matrix, record in target.records():
                encoder = MatrixEncoder(shared.files, target.encoding, matrix, record)
                for piece, read in encoder.pieces(hands.chunk):
                    if shared.stop.is_set():
                        return
                    writer.append(piece)
                    shared.done(read)
                sums.append((encoder.squared_error, encoder.squared_norm))
                if not encoder.squared_norm and not matrix.tied:  # of a table its own copy tells
                    notes[ALL_ZERO + matrix.tensor.name] = 1
            whole = writer.finish().hex()
            found = FinishedFile(
                target.name, target.nbytes, whole, notes=dict(notes), stamp=writer.stamp, matrices=tuple(sums)
            )
            shared.work.record(found)
        finally:
            writer.close()


def _copy_file(shared: _Shared, name: str, nbytes: int, hands: _Hands) -> None:
    path = shared.work.file(name)
    with machine_errors(path, "copying a side file"):
        writer = StreamWriter(path, nbytes, shared.work.lacks)
        try:
            narrow(path, shared.plan.checkpoint.path / name, shared.work.lacks)
            for start in range(0, nbytes, PIECE):
                if shared.stop.is_set():
                    return
                piece = hands.chunk[: min(PIECE, nbytes - start)]
                shared.files.read_into(name, start, piece)
                writer.append(piece)
                shared.done(len(piece))
            whole = writer.finish().hex()
            shared.work.record(FinishedFile(name, nbytes, whole, stamp=writer.stamp))
        finally:
            writer.close()


def narrow(path: Path, source: Place, lacks: set[str]) -> None:
    """Take from a file's mode what its source's does not have: who may not read the one may not read the other.

    `lacks` gets MODES if the file system cannot; a mode that is narrow enough is not set.
    """
    mode = source.mode()
    own = stat.S_IMODE(path.stat().st_mode)
    if mode is None or own == (wanted := own & mode | stat.S_IRUSR):
        return
    try:
        path.chmod(wanted)
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.EPERM}:
            raise
        lacks.add(MODES)
