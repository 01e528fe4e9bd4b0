"""Expert records under a byte budget, used through leases (`reader/leases.py`).

An expert that is leased is neither evicted nor overwritten; one that is still to come in the step is kept if it can be.

The budget bounds the bytes of every buffer that ever holds a record: cached, being read, free for reuse, transient,
and those an error left behind. Unless it holds all records there are, one record of it is set aside for a *transient*
buffer, so that a miss can be served while everything else is leased; the rest is the cache. The least budget is one
record of the largest layer: a step may need more experts than that, but it multiplies one after the other, so each is
read into the same transient buffer when its turn comes, and nothing is cached.

What is evicted, read and counted is decided by the thread that takes the step, in an order that does not depend on the
reading threads: they only fill buffers that were given to them.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from pagestone.formats.errors import RequestError
from pagestone.reader.container import Beside, Layer
from pagestone.reader.errors import Closing, expert_numbers, layer_of
from pagestone.reader.files import private_buffer
from pagestone.reader.leases import Counters, Lease, LeaseError, OpenLeases

Key = tuple[int, int]
"""(layer, expert)."""
Policy = Callable[[Collection[Key], Key, Mapping[int, int]], Key | None]
"""Chooses what to evict for the key to come among those that may go, from least to most recently used, knowing how
many records of each layer are cached. None: nothing yet; it is asked again when something is released."""


class RecordReader(Protocol):
    """Fills a buffer with the record of one expert."""

    @property
    def mode(self) -> str:
        """What the bytes come through: "direct", "buffered", ..."""

    def read(self, layer: Layer, expert: int, into: memoryview) -> None:
        """Fill `into` (the layer's stride, page-aligned); raises `DataError` or `MachineError` naming the expert."""

    def beside(self, layer: Layer) -> Beside:
        """The layer's sidecar, in memory already; nothing if there is none or it is not wanted."""

    def close(self) -> None:
        """Nothing more will be read."""


@dataclass(slots=True)
class _Entry:
    """One cached record. `pins`: 1 while the step still wants it, plus one for every lease.

    `spoiled`: a view outlived a lease, so the buffer must not be used again.
    """

    key: Key
    buffer: mmap.mmap
    nbytes: int
    pins: int = 0
    reading: Future[None] | None = None
    spoiled: bool = False


class _Buffers:
    """Page-aligned buffers whose total never exceeds a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, nbytes: int) -> mmap.mmap | None:
        """A buffer, or None if the limit does not allow one more."""
        same = self._free.get(nbytes)
        if same:
            return same.pop()
        while self.held + nbytes > self.limit and any(self._free.values()):
            size = next(size for size, buffers in self._free.items() if buffers)
            self._free[size].pop()
            self.held -= size
        if self.held + nbytes > self.limit:
            return None
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return private_buffer(nbytes)

    def give(self, buffer: mmap.mmap, nbytes: int) -> None:
        """Take a buffer back for reuse."""
        self._free.setdefault(nbytes, []).append(buffer)

    def abandon(self, buffer: mmap.mmap, nbytes: int) -> None:
        """Never use this buffer again: somebody still looks at it. It counts until its memory is gone."""

        def gone() -> None:
            self.held -= nbytes

        weakref.finalize(buffer, gone)


def balanced(candidates: Collection[Key], coming: Key, held: Mapping[int, int]) -> Key | None:
    """The policy: a layer that holds more than the layer at hand gives up what it used longest ago; else that layer.

    Layers take turns, so what was used longest ago over all layers is what is needed next: with room for less than one
    token's experts, plain LRU would never hit.
    """
    own = held.get(coming[0], 0)
    most = max(held[layer] for layer, _ in candidates)
    size = most if most > own else own
    return next((k for k in candidates if held[k[0]] == size and (most > own or k[0] == coming[0])), None)


_OPEN: weakref.WeakSet[ExpertCache] = weakref.WeakSet()
"""Caches with threads to start anew in a forked process."""


def _after_fork() -> None:
    for cache in list(_OPEN):
        cache._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_budget(budget: int, largest: int) -> None:
    """Refuse (E1215) a budget that does not hold the largest record; both in bytes."""
    if budget < largest:
        raise RequestError(
            f"a budget of at least {largest:,} bytes expected (one expert), found {budget:,}",
            code="E1215",
            remedy=f"give --budget {largest} or more",
        )


class ExpertCache(Closing):
    """An expert store that reads records into a cache of at most `budget` bytes (see the module's docstring).

    `threads` read ahead within the step at hand; 0 reads when an expert is leased. One step is open at a time. A forked
    process goes on with a copy: its reading threads are started anew, and what they had begun is read again.
    """

    def __init__(
        self,
        layers: dict[int, Layer],
        reader: RecordReader,
        budget: int,
        *,
        threads: int = 2,
        policy: Policy = balanced,
    ) -> None:
        largest = max(layer.stride for layer in layers.values())
        check_budget(budget, largest)
        every = sum(layer.stride * len(layer) for layer in layers.values())
        self.layers, self.budget = layers, budget
        self.counters = {number: Counters() for number in layers}
        self.evictions = 0
        self._reader, self._policy = reader, policy
        self._room = budget if budget >= every else budget - largest
        self._buffers = _Buffers(budget)
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._cached = 0
        self._held: dict[int, int] = {}
        self._threads = threads
        self._pool = self._new_pool()
        self._step: _CacheStep | None = None
        _OPEN.add(self)

    def _new_pool(self) -> ThreadPoolExecutor | None:
        return ThreadPoolExecutor(self._threads, thread_name_prefix="experts") if self._threads else None

    @property
    def mode(self) -> str:
        """What the bytes come through, as the reader says now."""
        return self._reader.mode

    @property
    def peak_bytes(self) -> int:
        """The most bytes that buffers ever took at once; never above the budget."""
        return self._buffers.peak

    @property
    def held_bytes(self) -> int:
        """Bytes that buffers take now."""
        return self._buffers.held

    @property
    def open_leases(self) -> int:
        """Leases that were handed out and not released."""
        return 0 if self._step is None else len(self._step.leases.open)

    def step(self, layer: int, experts: Iterable[int]) -> _CacheStep:
        """Begin a step; to be used in a `with` statement. Raises as `ExpertStore.step` says."""
        self._check_open()
        layer, place = layer_of(self.layers, layer)
        experts = expert_numbers(experts, len(place), place.path)
        if self._step is not None:
            raise LeaseError(
                f"layer {layer}: a step is open already (layer {self._step.number})",
                code="E1213",
                remedy="end one layer's step before the next begins; a model runs one forward pass at a time",
            )
        return _CacheStep(self, layer, experts)

    def close(self) -> None:
        """Stop the reading threads, once what they have begun is read, and let the memory go."""
        super().close()
        _OPEN.discard(self)
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._reader.close()
        if self._step is None:  # a step that is open still counts with its entries
            self._entries.clear()

    def _forked(self) -> None:
        """In a forked process: threads are not copied, so neither the pool nor what it was reading will ever end."""
        self._pool = self._new_pool()
        for entry in self._entries.values():
            entry.reading = None

    # -- used by the step --------------------------------------------------------------------------------------------

    def _begin(self, step: _CacheStep) -> None:
        self._step = step

    def _end(self) -> None:
        self._step = None

    def _place(self, key: Key, nbytes: int, urgent: bool = False) -> _Entry | None:
        """A pinned entry being filled, after evicting what must go; None if everything is leased or too large.

        The policy may say to wait, unless it is `urgent`.
        """
        while self._cached + nbytes > self._room:
            candidates = [k for k, e in self._entries.items() if not e.pins]
            if not candidates or nbytes > self._room:
                return None
            going = self._policy(candidates, key, self._held)
            if going is None and not urgent:
                return None
            going = candidates[0] if going is None else going
            self._evict(going)
        buffer = self._buffers.take(nbytes)
        if buffer is None:  # somebody still looks at buffers that an error left behind
            return None
        entry = self._entries[key] = _Entry(key, buffer, nbytes, pins=1)
        self._cached += nbytes
        self._held[key[0]] = self._held.get(key[0], 0) + 1
        layer, expert = self.layers[key[0]], key[1]
        if self._pool is not None:
            entry.reading = self._pool.submit(self._reader.read, layer, expert, memoryview(buffer))
        return entry

    def _evict(self, key: Key) -> None:
        self._drop(self._entries[key])
        self.evictions += 1

    def _drop(self, entry: _Entry) -> None:
        """Forget an entry nobody uses; its buffer is free again unless it is spoiled."""
        if entry.pins or entry.reading is not None:
            raise ValueError(f"an entry nobody uses expected, found {entry.key}")
        del self._entries[entry.key]
        self._held[entry.key[0]] -= 1
        self._cached -= entry.nbytes
        (self._buffers.abandon if entry.spoiled else self._buffers.give)(entry.buffer, entry.nbytes)


class _CacheStep:
    """One layer's experts: hits are pinned first, then misses are read ahead as far as the cache has room."""

    def __init__(self, cache: ExpertCache, layer: int, wanted: Sequence[int]) -> None:
        self.number = layer
        self.leases = OpenLeases(cache.layers[layer], wanted)
        self._cache, self._layer, self._wanted = cache, cache.layers[layer], wanted
        self._counters = cache.counters[layer]
        self._pinned: dict[int, _Entry] = {}
        """Entries kept for a lease that is still to come."""
        self._missing: list[int] = []
        self._unread: set[int] = set()
        """Experts whose entry has not been filled (or failed)."""

    def __enter__(self) -> _CacheStep:
        self._cache._begin(self)
        try:
            self._pin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _pin(self) -> None:
        cache = self._cache
        for expert in self._wanted:
            entry = cache._entries.get((self.number, expert))
            if entry is None:
                self._missing.append(expert)
            else:
                entry.pins += 1
                self._pinned[expert] = entry
                cache._entries.move_to_end(entry.key)
        self._counters.hits += len(self._pinned)
        self._counters.misses += len(self._missing)
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._missing and not self._cache.closed:
            expert = self._missing[0]
            entry = self._cache._place((self.number, expert), self._layer.stride)
            if entry is None:
                return
            self._missing.pop(0)
            self._pinned[expert] = entry
            self._unread.add(expert)
            self._counters.bytes_read += entry.nbytes

    def lease(self, expert: int) -> Lease:
        """Lease one of the step's experts, waiting for its bytes."""
        self._cache._check_open()
        expert = self.leases.check(expert)
        entry = self._pinned.pop(expert, None)
        if entry is None:  # not read ahead, or leased before in this step
            entry = self._cache._entries.get((self.number, expert))
            if entry is None:
                return self._lease_missing(expert)
            entry.pins += 1
        try:
            self._await(entry, expert)
        except BaseException:
            self._settle(entry)
            self._unread.discard(expert)
            entry.pins -= 1
            if not entry.pins:
                self._cache._drop(entry)
            raise
        return self._lend(expert, entry.buffer, entry.nbytes, entry)

    @staticmethod
    def _settle(entry: _Entry) -> bool:
        """Wait until no thread writes to the entry's buffer; whether it was filled."""
        reading, filled = entry.reading, False
        if reading is not None:
            filled = reading.exception() is None
            entry.reading = None
        return filled

    def _lease_missing(self, expert: int) -> Lease:
        """Read at the last moment: into the cache if something can go by now, else into the transient buffer."""
        if expert in self._missing:
            self._missing.remove(expert)
        else:
            self._counters.misses += 1
        cache, nbytes, key = self._cache, self._layer.stride, (self.number, expert)
        entry = cache._place(key, nbytes)
        if entry is None:
            buffer = cache._buffers.take(nbytes)
            if buffer is not None:
                return self._lease_transient(expert, buffer)
            entry = cache._place(key, nbytes, urgent=True)
        while entry is None and self._postpone():
            entry = cache._place(key, nbytes, urgent=True)
        if entry is None:
            raise LeaseError(
                f"expert {expert}: all {cache.held_bytes:,} bytes of the budget are leased",
                code="E1214",
                file=self._layer.path,
                remedy="release a lease first, or give a larger --budget",
            )
        self._unread.add(expert)
        self._counters.bytes_read += nbytes
        self._pinned[expert] = entry
        return self.lease(expert)

    def _lease_transient(self, expert: int, buffer: mmap.mmap) -> Lease:
        cache, nbytes = self._cache, self._layer.stride
        begun = time.perf_counter()
        try:
            self._counters.transient += 1
            self._counters.bytes_read += nbytes
            cache._reader.read(self._layer, expert, memoryview(buffer))
        except BaseException:
            cache._buffers.give(buffer, nbytes)
            raise
        finally:
            self._counters.wait_seconds += time.perf_counter() - begun
        return self._lend(expert, buffer, nbytes, None)

    def _postpone(self) -> bool:
        """Give up what was read ahead and is not leased yet, the last expert first: it will be read again."""
        idle = [e for e, entry in self._pinned.items() if entry.pins == 1]
        if not idle:
            return False
        expert = max(idle)
        entry = self._pinned.pop(expert)
        self._settle(entry)
        self._unread.discard(expert)
        entry.pins -= 1
        self._cache._evict(entry.key)
        insort(self._missing, expert)
        return True

    def _await(self, entry: _Entry, expert: int) -> None:
        if expert not in self._unread:
            return
        begun = time.perf_counter()
        try:
            if entry.reading is None:
                self._cache._reader.read(self._layer, expert, memoryview(entry.buffer))
            else:
                entry.reading.result()
        finally:
            self._counters.wait_seconds += time.perf_counter() - begun
        entry.reading = None
        self._unread.discard(expert)

    def _lend(self, expert: int, buffer: mmap.mmap, nbytes: int, entry: _Entry | None) -> Lease:
        def done(lease: Lease, kept: bool) -> None:
            self.leases.open.remove(lease)
            self._return(buffer, nbytes, entry, kept)

        lease = Lease(self._layer, expert, buffer, 0, done, self._cache._reader.beside(self._layer))
        self.leases.open.append(lease)
        return lease

    def _return(self, buffer: mmap.mmap, nbytes: int, entry: _Entry | None, kept: bool) -> None:
        cache = self._cache
        if entry is None:
            (cache._buffers.abandon if kept else cache._buffers.give)(buffer, nbytes)
        else:
            entry.pins -= 1
            entry.spoiled |= kept
            if entry.spoiled and not entry.pins:
                cache._drop(entry)
        if not self.leases.ended:
            self._read_ahead()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        problem = self.leases.end(kind is not None)
        for expert, entry in self._pinned.items():  # nobody asked for these after all
            entry.pins -= 1
            if expert in self._unread and not self._settle(entry) and not entry.pins:
                self._cache._drop(entry)
        self._pinned.clear()
        self._cache._end()
        if problem is not None:
            raise problem
