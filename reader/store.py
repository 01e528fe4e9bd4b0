"""Where the bytes of experts and dense tensors come from: one interface.

- `direct`: reads past the page cache (O_DIRECT) into a cache with a byte budget (`reader/cache.py`). Every record is
  compared with its recorded digest when it is read. Where a file system refuses O_DIRECT the mode is `buffered`: the
  same reads through the page cache, which is asked to forget them; `notes` says so.
- `mmap`: views of the mapped files. Tables and lengths are checked at the first use, digests are not, of experts no
  more than of row sums, dense tensors, encoded matrices and the embedding table: what a file becomes later shows in
  the views, and a file that is cut while mapped ends the process (SIGBUS).
- `resident`: every record read into memory and checked before the first step.

Judges have one more (`open_anew`): every record is read each time it is leased, by plain reads through the page cache,
checked, and kept no longer than its lease.

Row sums (int8's sidecars, which native products need) are not streamed: they are read once, when the store opens, and
compared with their digests wherever records are; `mmap` maps them like everything else. No budget and no counter holds
them: E * (2 * intermediate + hidden) * 4 bytes a layer (`reader/budget.py`).
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from pagestone.formats.digests import digest, layer_digest
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import read_sidecar
from pagestone.formats.manifest import RECORDS
from pagestone.formats.storage import LocalDirectory, Place, open_scattered, place_of
from pagestone.reader.cache import ExpertCache, RecordReader
from pagestone.reader.container import NOTHING, Beside, Container, Layer, sidecar_views
from pagestone.reader.errors import Closing, expert_numbers, layer_of
from pagestone.reader.files import (
    ANEW,
    RESTORE,
    THROUGH_CACHE,
    DirectFile,
    MachineErrors,
    advise,
    map_file,
    private_buffer,
)
from pagestone.reader.leases import Counters, Lease, OpenLeases, Step
from pagestone.reader.made import MadeContainer, MadeRecords, not_mapped

MODES = ("direct", "mmap", "resident")


class ExpertStore(Protocol):
    """What a model needs of a store: steps that lease experts, and what they cost, by layer.

    May stand in a `with` statement, which closes it.
    """

    counters: dict[int, Counters]

    @property
    def mode(self) -> str:
        """How bytes come: "direct", "buffered", "mmap", "resident", "anew", or "encoded" as they are asked for."""

    def step(self, layer: int, experts: Iterable[int]) -> Step:
        """Begin a step (a context manager) for these `experts` of a decoder layer.

        Raises `NoSuchLayerError` (a KeyError), `NoSuchExpertError` (an IndexError), `IdTypeError` (a TypeError), or
        `ClosedError` (a ValueError) if the store was closed.
        """

    @property
    def open_leases(self) -> int:
        """Leases handed out and not released."""

    def close(self) -> None:
        """Release threads and memory; may be called twice. Leases that are open stay valid until they are released."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# -- digests ----------------------------------------------------------------------------------------------------------


class RecordDigests:
    """The recorded digest of every record, tied to the container id.

    A layer's digests are believed only if they and the head of the layer's
    file add up to the digest of the layer file that the manifest states.
    """

    def __init__(self, container: Container) -> None:
        self._manifest = container.manifest
        path = self._path = container.path / RECORDS
        with MachineErrors(path, "reading"):
            raw = place_of(path).read_bytes()
        try:
            self._by_file = container.manifest.records(raw)
        except ValueError as error:
            raise self._error(f"record digests of the manifest's layers expected: {error}") from None
        self._checked: dict[str, tuple[bytes, ...]] = {}

    def _error(self, message: str) -> DataError:
        return DataError(message, code="E1204", file=self._path, remedy=RESTORE)

    def of(self, layer: Layer) -> tuple[bytes, ...]:
        """The digests of a layer's records in order; `DataError` if they are not the ones the manifest vouches for."""
        name = layer.entry.file
        known = self._checked.get(name)
        if known is None:
            known = self._by_file[name]
            with MachineErrors(layer.path, "reading"):
                head = place_of(layer.path).read(0, layer.layout.data_start)
            if layer_digest(head, known) != self._manifest.files[name].xxh3:
                raise self._error(
                    f"its record digests for {name} and that file's head do not give the digest the manifest states"
                )
            self._checked[name] = known
        return known

    def check(self, layer: Layer, expert: int, record: memoryview) -> None:
        """Compare the bytes of a record with its digest; `DataError` (E1201) naming file and expert."""
        wanted, found = self.of(layer)[expert], digest(record)
        if wanted != found:
            raise DataError(
                f"expert {expert} at byte {layer.layout.record_offset(expert)}: "
                f"xxh3 expected {wanted.hex()}, found {found.hex()}",
                code="E1201",
                file=layer.path,
                remedy=RESTORE,
            )


# -- sidecars ---------------------------------------------------------------------------------------------------------


def read_sidecars(container: Container, *, verify: bool = True) -> dict[int, Beside]:
    """Every sidecar in memory of its own, by layer; `DataError` (E1206) where a file is not what the manifest states.

    They are read through the page cache, which is asked to forget them.
    """
    sidecars: dict[int, Beside] = {}
    for number, layer in container.layers.items():
        name = layer.entry.sidecar
        if name is None:
            continue
        path = container.path / name
        file = place_of(path, once=True)
        with MachineErrors(path, "reading"), file.storage:
            entries = read_sidecar(file, layer.header)
            data = file.read_bytes()
        listed, computed = container.manifest.files[name].xxh3, digest(data)
        if len(data) != container.manifest.files[name].nbytes or (verify and computed != listed):
            raise DataError(
                f"xxh3 of the sidecar expected {listed.hex()}, found {computed.hex()}",
                code="E1206",
                file=path,
                remedy=RESTORE,
            )
        sidecars[number] = sidecar_views(np.frombuffer(data, np.uint8), entries)
    return sidecars


# -- experts ----------------------------------------------------------------------------------------------------------


class FileRecords:
    """A `RecordReader` over a container's layer files, open from the first read on. For many threads."""

    def __init__(
        self,
        container: Container,
        digests: RecordDigests | None,
        *,
        direct: bool = True,
        beside: bool = True,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`note` is told, once, if a file system that took direct reads refuses them later."""
        self._digests = digests
        self._note, self._told = note, threading.Lock()
        self._beside = read_sidecars(container, verify=digests is not None) if beside else {}
        self._files: dict[int, DirectFile] = {}
        try:
            for number, layer in container.layers.items():
                self._files[number] = DirectFile(layer.path, direct=direct, note=self._tell)
                if digests is not None:
                    digests.of(layer)
                self._files[number].forget(layer.layout.data_start)
        except BaseException:
            self.close()
            raise

    def _tell(self, text: str) -> None:
        if self._told.acquire(blocking=False):  # never given back: once is enough
            self._note(text)

    @property
    def mode(self) -> str:
        """ "direct" only if no file refused it."""
        return "direct" if all(f.mode == "direct" for f in self._files.values()) else "buffered"

    def read(self, layer: Layer, expert: int, into: memoryview) -> None:
        """Fill `into` with a record and check its digest (unless that was switched off)."""
        offset = layer.layout.record_offset(expert)
        _require_whole(layer, expert, self._files[layer.entry.layer].read_into(into, offset))
        if self._digests is not None:
            self._digests.check(layer, expert, into)

    def beside(self, layer: Layer) -> Beside:
        """The layer's sidecar as it was read when this was made."""
        return self._beside.get(layer.entry.layer, NOTHING)

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()


def _require_whole(layer: Layer, expert: int, got: int) -> None:
    """Refuse (E1202) a record of which only `got` bytes could be read."""
    if got != layer.stride:
        offset = layer.layout.record_offset(expert)
        raise DataError(
            f"expert {expert}: {layer.stride} bytes at byte {offset} expected, the file ended after {got}",
            code="E1202",
            file=layer.path,
            remedy=RESTORE,
        )


class PlainRecords:
    """A `RecordReader` that shares nothing with the cache's: plain reads through the page cache, each file opened anew.

    Every record is compared with its digest. The page cache is asked to forget what was read.
    """

    mode = ANEW

    def __init__(self, container: Container, *, beside: bool = True) -> None:
        self._digests = RecordDigests(container)
        self._beside = read_sidecars(container) if beside else {}

    def read(self, layer: Layer, expert: int, into: memoryview) -> None:
        """Fill `into` with a record and check its digest."""
        # neighbours are not wanted next, and would be forgotten with it: reading them ahead was half of all reads
        file = Place(LocalDirectory(layer.path, once=True, opener=open_scattered))
        with MachineErrors(layer.path, "reading"):
            got = file.read_into(into, layer.layout.record_offset(expert))
        _require_whole(layer, expert, got)
        self._digests.check(layer, expert, into)

    def beside(self, layer: Layer) -> Beside:
        """The layer's sidecar as it was read when this was made."""
        return self._beside.get(layer.entry.layer, NOTHING)

    def close(self) -> None:
        """Nothing is open."""


class _ViewStep:
    """A step over memory that holds records; `place` gives (memory, byte offset) of one, `back` gets memory back.

    `back` is told whether a view of it is still alive.
    """

    def __init__(
        self,
        layer: Layer,
        wanted: Iterable[int],
        place: Callable[[int], tuple[Any, int]],
        beside: Beside,
        check_open: Callable[[], None],
        back: Callable[[Any, bool], None],
    ) -> None:
        self.leases = OpenLeases(layer, wanted)
        self._place, self._beside, self._check_open, self._back = place, beside, check_open, back

    def lease(self, expert: int) -> Lease:
        self._check_open()
        expert = self.leases.check(expert)
        memory, offset = self._place(expert)

        def done(lease: Lease, kept: bool) -> None:
            self.leases.open.remove(lease)
            self._back(memory, kept)

        lease = Lease(self.leases.layer, expert, memory, offset, done, self._beside)
        self.leases.open.append(lease)
        return lease

    def __enter__(self) -> _ViewStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        problem = self.leases.end(kind is not None)
        if problem is not None:
            raise problem


class _Closes(Protocol):
    def close(self) -> None: ...


class _ViewStore(Closing):
    """What `MappedStore`, `ResidentStore` and `AnewStore` share; `owned` are closed with it."""

    def __init__(self, layers: dict[int, Layer], beside: Mapping[int, Beside], *owned: _Closes) -> None:
        self.layers, self._beside, self._owned = layers, beside, owned
        self.counters = {number: Counters() for number in layers}
        self._steps: list[_ViewStep] = []

    def close(self) -> None:
        super().close()
        self._beside = {}
        self._steps = [s for s in self._steps if s.leases.open]  # each holds on to what it may lease
        for owned in self._owned:
            owned.close()

    @property
    def open_leases(self) -> int:
        return sum(len(s.leases.open) for s in self._steps)

    def _named(self, layer: int, experts: Iterable[int]) -> tuple[int, Layer, list[int]]:
        """What a step is for, checked: the layer's number, the layer, the experts in ascending order."""
        self._check_open()
        number, place = layer_of(self.layers, layer)
        return number, place, expert_numbers(experts, len(place), place.path)

    def _back(self, memory: Any, kept: bool) -> None:
        """A lease of this memory has ended; `kept`: a view of it is still alive."""

    def _begin(self, layer: int, experts: Iterable[int], place: Callable[[int], tuple[Any, int]]) -> _ViewStep:
        self._steps = [s for s in self._steps if s.leases.open]
        beside = self._beside.get(layer, NOTHING)
        step = _ViewStep(self.layers[layer], experts, place, beside, self._check_open, self._back)
        self._steps.append(step)
        return step


class MappedStore(_ViewStore):
    """Zero-copy views over the page cache. Nothing is checked but the tables."""

    @property
    def mode(self) -> str:
        return "mmap"

    def __init__(self, container: Container, *, beside: bool = True) -> None:
        sums = {n: layer.beside for n, layer in container.layers.items()} if beside else {}
        super().__init__(container.layers, {n: views for n, views in sums.items() if views is not None})
        self._maps: dict[int, mmap.mmap] = {}
        for number, layer in container.layers.items():
            _ = layer.layout  # its table is checked
            self._maps[number] = map_file(layer.path)
            advise(self._maps[number], "MADV_RANDOM")  # a record is asked for below, never its neighbours

    def step(self, layer: int, experts: Iterable[int]) -> Step:
        """Begin a step; the kernel is told at once which records will be touched."""
        layer, at, experts = self._named(layer, experts)
        mapped, counters = self._maps[layer], self.counters[layer]
        for expert in experts:
            advise(mapped, "MADV_WILLNEED", at.layout.record_offset(expert), at.stride)
            counters.misses += 1
            counters.bytes_mapped += at.stride
        return self._begin(layer, experts, lambda expert: (mapped, at.layout.record_offset(expert)))

    def close(self) -> None:
        super().close()
        self._maps.clear()


class ResidentStore(_ViewStore):
    """Every record in memory, read and checked at the start: what streaming is compared with.

    `fill` puts one record into a buffer (and checks it); buffers are never written again. `beside`, by layer, must be
    whole once all records are filled. `owned` are closed with the store.
    """

    @property
    def mode(self) -> str:
        return "resident"

    def __init__(
        self,
        layers: dict[int, Layer],
        fill: Callable[[Layer, int, memoryview], None],
        beside: Mapping[int, Beside] | None = None,
        *owned: _Closes,
    ) -> None:
        super().__init__(layers, {} if beside is None else beside, *owned)  # which `fill` may fill, too
        self._records: dict[tuple[int, int], mmap.mmap] = {}
        for number, layer in layers.items():
            for expert in range(len(layer)):
                buffer = self._records[number, expert] = private_buffer(layer.stride)
                fill(layer, expert, memoryview(buffer))

    def step(self, layer: int, experts: Iterable[int]) -> Step:
        """Begin a step; every expert is a hit."""
        layer, _, experts = self._named(layer, experts)
        self.counters[layer].hits += len(experts)
        return self._begin(layer, experts, lambda expert: (self._records[layer, expert], 0))

    def close(self) -> None:
        super().close()
        self._records.clear()


class AnewStore(_ViewStore):
    """What streaming is compared with where memory holds no whole model: each lease reads its record anew.

    A record is read again for the next lease; nothing is cached. Up to `ahead` records that the step at hand will lease
    next are read meanwhile, by as many threads. The memory of a lease that ended is that of a later one, overwritten:
    new pages each time would cost more than reading. The reader, and what else is `owned`, is closed with the store.
    """

    def __init__(self, layers: dict[int, Layer], reader: RecordReader, *owned: _Closes, ahead: int = 0) -> None:
        super().__init__(layers, {number: reader.beside(layer) for number, layer in layers.items()}, reader, *owned)
        self._reader, self.ahead = reader, ahead
        self._pool = ThreadPoolExecutor(ahead, thread_name_prefix="anew") if ahead else None
        self._begun: dict[int, tuple[mmap.mmap, Future[None]]] = {}
        """Of the step at hand, by expert: what is being read."""
        self._spare: list[mmap.mmap] = []
        self._held = 0
        self.peak_bytes = 0
        """The most bytes of records that were in memory at once."""

    @property
    def mode(self) -> str:
        return ANEW

    def step(self, layer: int, experts: Iterable[int]) -> Step:
        """Begin a step; nothing is read before the first lease."""
        layer, at, experts = self._named(layer, experts)
        self._settle()
        later = list(experts)
        return self._begin(layer, experts, lambda expert: (self._read(at, expert, later), 0))

    def _read(self, layer: Layer, expert: int, later: list[int]) -> mmap.mmap:
        """A record in memory that nobody looks at; what comes after it is begun."""
        counters, begun = self.counters[layer.entry.layer], time.perf_counter()
        if expert in later:
            later.remove(expert)
        buffer, reading = self._begun.pop(expert, (None, None))
        if buffer is None:
            buffer = self._take(layer.stride)
        while self._pool is not None and later and len(self._begun) < self.ahead:
            following, memory = later.pop(0), self._take(layer.stride)
            self._begun[following] = memory, self._pool.submit(self._reader.read, layer, following, memoryview(memory))
        try:
            if reading is None:
                self._reader.read(layer, expert, memoryview(buffer))
            else:
                reading.result()
        except BaseException:
            self._give(buffer)
            raise
        counters.misses += 1
        counters.bytes_read += layer.stride
        counters.wait_seconds += time.perf_counter() - begun
        return buffer

    def _settle(self) -> None:
        """Wait for what was begun for leases that never came, after an error say, and take the memory back."""
        for buffer, reading in self._begun.values():
            reading.exception()
            self._give(buffer)
        self._begun.clear()

    def _take(self, nbytes: int) -> mmap.mmap:
        if self._spare and len(self._spare[-1]) != nbytes:
            self._spare.clear()  # before another is made
        if self._spare:
            return self._spare.pop()
        buffer = private_buffer(nbytes)
        weakref.finalize(buffer, self._gone, nbytes)
        self._held += nbytes
        self.peak_bytes = max(self.peak_bytes, self._held)
        return buffer

    def _give(self, buffer: mmap.mmap) -> None:
        if len(self._spare) <= self.ahead and not self.closed:
            self._spare.append(buffer)

    def _back(self, memory: mmap.mmap, kept: bool) -> None:
        if not kept:
            self._give(memory)

    def _gone(self, nbytes: int) -> None:
        self._held -= nbytes

    def close(self) -> None:
        if not self.closed:
            self._settle()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        super().close()
        self._spare.clear()


# -- opening ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How experts are to be read. `budget` is bytes, for `direct` only; `verify` checks digests when reading.

    `beside`: whether sidecars are wanted too; only native products use them. `note` is told what turns out later (a
    file system that refuses direct reads in the middle).
    """

    io: str = "direct"
    budget: int | None = None
    threads: int = 2
    verify: bool = True
    beside: bool = True
    note: Callable[[str], None] = lambda _: None


def open_store(container: Container, options: StoreOptions) -> tuple[ExpertStore, list[str]]:
    """The store asked for, and notes for the user (such as a file system that refused O_DIRECT)."""
    if options.io not in MODES:
        raise RequestError(
            f"--io expected to be one of {', '.join(MODES)}, found {options.io!r}", code="E1240", remedy="choose one"
        )
    if options.io == "mmap":
        if isinstance(container, MadeContainer):
            raise not_mapped(container.path)
        return MappedStore(container, beside=options.beside), []
    records = _records(container, options)
    notes = [THROUGH_CACHE] if records.mode == "buffered" else []
    try:
        if options.io == "resident":
            sums = {n: views for n, x in container.layers.items() if (views := records.beside(x))}
            store = ResidentStore(container.layers, records.read, sums)
            records.close()
            return store, notes
        every = sum(layer.stride * len(layer) for layer in container.layers.values())
        budget = every if options.budget is None else options.budget
        return ExpertCache(container.layers, records, budget, threads=options.threads), notes
    except BaseException:
        records.close()
        raise


def open_anew(container: Container, *, beside: bool = True, ahead: int = 0) -> AnewStore:
    """A store that reads, or makes, every record each time it is leased; `beside` as in `StoreOptions`, `ahead` as in
    `AnewStore`.

    A container that is made is closed with it.
    """
    if isinstance(container, MadeContainer):
        return AnewStore(container.layers, MadeRecords(container), container, ahead=ahead)
    return AnewStore(container.layers, PlainRecords(container, beside=beside), ahead=ahead)


def _records(container: Container, options: StoreOptions) -> FileRecords | MadeRecords:
    """What fills buffers with records: files, or the maker of a container that has none."""
    if isinstance(container, MadeContainer):
        return MadeRecords(container)
    digests = RecordDigests(container) if options.verify else None
    return FileRecords(container, digests, beside=options.beside, note=options.note)
