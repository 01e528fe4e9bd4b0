"""The cache under its budget: leases, eviction, read-ahead, counters. No torch, no files."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestone.formats.errors import DataError, RequestError
from pagestone.reader.cache import ExpertCache, Key, Policy, balanced
from pagestone.reader.leases import Counters, Lease, LeaseError

PAGE = 4096


class FakeLayer:
    """As much of a layer as the cache looks at."""

    def __init__(self, number: int, experts: int, stride: int = PAGE) -> None:
        self.number, self.experts, self.stride = number, experts, stride
        self.path = Path(f"layers-{number:02d}.safetensors")

    def __len__(self) -> int:
        return self.experts

    def expert_in(self, record: Any, number: int, beside: Any) -> Any:
        return SimpleNamespace(number=number, record=record[:])


def pattern(layer: int, expert: int) -> int:
    return (37 * layer + expert + 1) % 251


class FakeReader:
    """Fills records with a byte that tells layer and expert; counts, can wait and can fail."""

    mode = "fake"

    def __init__(self, pause: float = 0.0) -> None:
        self.reads: list[Key] = []
        self.failing: set[Key] = set()
        self.pause = pause
        self.gate: threading.Event | None = None
        self.together: threading.Barrier | None = None
        self._lock = threading.Lock()

    def read(self, layer: Any, expert: int, into: memoryview) -> None:
        key = (layer.number, expert)
        with self._lock:
            self.reads.append(key)
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.together is not None:
            self.together.wait()
        time.sleep(self.pause)
        into[: len(into) // 2] = bytes([pattern(*key)]) * (len(into) // 2)
        if key in self.failing:
            raise DataError("damaged", code="E1201", file=layer.path)
        into[len(into) // 2 :] = bytes([pattern(*key)]) * (len(into) - len(into) // 2)

    def beside(self, layer: Any) -> dict[Any, Any]:
        return {}

    def close(self) -> None:
        pass


def make(records: int, *, layers: int = 2, experts: int = 8, **how: Any) -> tuple[ExpertCache, FakeReader]:
    """A cache of `records` records over small layers."""
    reader = how.pop("reader", None) or FakeReader()
    table: Any = {n: FakeLayer(n, experts) for n in range(layers)}
    return ExpertCache(table, reader, records * PAGE, **how), reader


def right(lease: Lease, layer: int, expert: int) -> bool:
    return bool((lease.expert.record == pattern(layer, expert)).all())


def use(cache: ExpertCache, layer: int, wanted: Collection[int]) -> None:
    with cache.step(layer, wanted) as step:
        for expert in sorted(wanted):
            with step.lease(expert) as lease:
                assert right(lease, layer, expert)


# -- the rules of leasing ---------------------------------------------------------------------------------------------


def test_a_lease_that_outlives_its_step_is_an_error() -> None:
    """E1210; the lease is closed by force, and the cache goes on."""
    cache, _ = make(4)
    with pytest.raises(LeaseError) as error, cache.step(0, [1, 2]) as step:
        step.lease(1)
        kept = step.lease(2)
    assert error.value.code == "E1210" and "expert 1" in str(error.value) and "2 open" in str(error.value)
    with pytest.raises(LeaseError, match="E1212"):
        _ = kept.expert
    assert cache.open_leases == 0
    use(cache, 0, [1, 2, 3])


def test_no_view_without_a_lease() -> None:
    """After its release a lease gives no views (E1212)."""
    cache, _ = make(4)
    with cache.step(0, [1]) as step:
        with step.lease(1) as lease:
            assert right(lease, 0, 1)
        with pytest.raises(LeaseError, match="E1212"):
            _ = lease.expert


def test_a_view_that_outlives_its_lease_is_an_error() -> None:
    """E1211, and what the view shows is never overwritten: its buffer is given up until the view is gone."""
    cache, _ = make(4)
    kept: Any = None
    with pytest.raises(LeaseError, match="E1211"), cache.step(0, [1]) as step, step.lease(1) as lease:
        kept = lease.expert.record[10:20]
    for layer in (0, 1, 0, 1):
        use(cache, layer, range(8))
    assert (kept == pattern(0, 1)).all()
    assert cache.held_bytes <= cache.budget
    held = cache.held_bytes
    kept = lease = None  # type: ignore[assignment]
    gc.collect()
    assert cache.held_bytes == held - PAGE


def test_views_kept_alive_by_an_exception_do_not_hide_it() -> None:
    """The error of the computation comes through; the memory its traceback holds is not used again."""
    cache, _ = make(2)
    try:
        with cache.step(0, [1]) as step, step.lease(1) as lease:
            view = lease.expert.record[:5]
            raise ZeroDivisionError
    except ZeroDivisionError:
        for layer in (0, 1):
            with cache.step(layer, [3]) as step, step.lease(3):
                pass
        assert (view == pattern(0, 1)).all()
    assert cache.open_leases == 0


def test_only_the_experts_of_the_step_can_be_leased() -> None:
    """E1213 for another expert, for a step that ended, and for a step within a step."""
    cache, _ = make(4)
    with cache.step(0, [1, 2]) as step:
        with pytest.raises(LeaseError, match="E1213"):
            step.lease(3)
        with pytest.raises(LeaseError, match="E1213"):
            cache.step(1, [1])
    with pytest.raises(LeaseError, match="E1213"):
        step.lease(1)


def test_a_leased_expert_is_neither_evicted_nor_overwritten() -> None:
    """One lease is held while everything else of the layer goes through the rest of the cache."""
    for threads in (0, 1, 4):
        cache, _ = make(3, threads=threads)
        with cache.step(0, range(8)) as step, step.lease(0) as held:
            for expert in range(1, 8):
                with step.lease(expert) as lease:
                    assert right(lease, 0, expert)
                assert right(held, 0, 0)


# -- the budget -------------------------------------------------------------------------------------------------------


def test_budget_of_one_expert() -> None:
    """A layer that needs eight experts runs through one buffer, each read when its turn comes."""
    cache, reader = make(1)
    use(cache, 0, range(8))
    use(cache, 0, range(8))
    assert cache.peak_bytes == PAGE
    assert cache.counters[0] == Counters(misses=16, transient=16, bytes_read=16 * PAGE,
                                         wait_seconds=cache.counters[0].wait_seconds)  # fmt: skip
    assert len(reader.reads) == 16


def test_budget_below_one_expert_is_refused() -> None:
    """E1215 names the least budget."""
    table: Any = {0: FakeLayer(0, 4), 1: FakeLayer(1, 4, 2 * PAGE)}
    with pytest.raises(RequestError, match=r"8,192.*E1215") as error:
        ExpertCache(table, FakeReader(), 2 * PAGE - 1)
    assert "--budget 8192" in str(error.value)


def test_everything_leased_a_miss_is_transient() -> None:
    """Three records: two are cached and leased, the third buffer serves every other expert, one after the other."""
    cache, _ = make(3)
    with cache.step(0, range(5)) as step, step.lease(0) as a, step.lease(1) as b:
        for expert in (2, 3, 4):
            with step.lease(expert) as lease:
                assert right(lease, 0, expert)
            assert cache.held_bytes <= cache.budget
        assert right(a, 0, 0) and right(b, 0, 1)
    assert cache.counters[0].transient == 3
    assert cache.peak_bytes == 3 * PAGE


def test_more_leases_than_the_budget_holds_is_an_error() -> None:
    """E1214 rather than a byte more than the budget; releasing one makes it possible again."""
    cache, _ = make(2)
    with cache.step(0, range(4)) as step:
        with step.lease(0), step.lease(1), pytest.raises(LeaseError, match="E1214"):
            step.lease(2)
        with step.lease(2) as lease:
            assert right(lease, 0, 2)
    assert cache.peak_bytes == 2 * PAGE


def test_budget_for_all_reads_everything_once() -> None:
    """No record is set aside when everything fits: the second pass has no miss."""
    cache, reader = make(16)
    for _ in range(3):
        for layer in (0, 1):
            use(cache, layer, range(8))
    assert len(reader.reads) == 16 and cache.evictions == 0
    assert cache.counters[0].hits == cache.counters[1].hits == 16


def test_layers_of_different_strides() -> None:
    """Buffers of one size are given up for those of another; the sum never exceeds the budget."""
    table: Any = {0: FakeLayer(0, 8, PAGE), 1: FakeLayer(1, 8, 3 * PAGE)}
    cache = ExpertCache(table, FakeReader(), 7 * PAGE)
    for _ in range(3):
        for layer in (0, 1):
            use(cache, layer, range(8))
            assert cache.held_bytes <= cache.budget
    assert cache.peak_bytes <= 7 * PAGE


# -- reading ahead ----------------------------------------------------------------------------------------------------


def test_prefetch_reads_exactly_the_experts_of_the_layer() -> None:
    """Reads begin when the step does, for its experts and no others, in ascending order."""
    cache, reader = make(9, threads=1)
    with cache.step(0, [6, 2, 4]) as step:
        deadline = time.monotonic() + 10
        while len(reader.reads) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert reader.reads == [(0, 2), (0, 4), (0, 6)]
        for expert in (2, 4, 6):
            with step.lease(expert):
                pass
    assert reader.reads == [(0, 2), (0, 4), (0, 6)]


def test_reads_overlap() -> None:
    """Four threads read four experts at once."""
    reader = FakeReader(pause=0.02)
    reader.together = threading.Barrier(4, timeout=10)
    cache, _ = make(9, threads=4, reader=reader)
    use(cache, 0, range(4))
    assert cache.counters[0].wait_seconds > 0.01


def test_a_failed_read_names_its_expert_and_spoils_nothing() -> None:
    """The error comes at the lease of that expert only; once the file is good again, it is read again."""
    for threads, records in ((0, 4), (2, 4), (2, 1), (2, 16)):
        cache, reader = make(records, threads=threads)
        reader.failing = {(0, 3)}
        with pytest.raises(DataError, match="E1201"):
            use(cache, 0, [1, 3, 5])
        assert cache.open_leases == 0
        use(cache, 0, [1, 5])
        reader.failing = set()
        use(cache, 0, [1, 3, 5])
        assert cache.held_bytes <= cache.budget


def test_a_step_that_fails_waits_for_its_reads() -> None:
    """A buffer that a thread still writes to is not given to anybody else."""
    reader = FakeReader()
    reader.gate = threading.Event()
    cache, _ = make(5, threads=2, reader=reader)
    threading.Timer(0.05, reader.gate.set).start()
    with pytest.raises(ZeroDivisionError), cache.step(0, range(4)):
        raise ZeroDivisionError
    assert reader.gate.is_set()
    for layer in (1, 0):
        use(cache, layer, range(8))


def test_results_and_counters_do_not_depend_on_threads() -> None:
    """The same steps give the same hits, misses, evictions and bytes with any number of reading threads."""
    found = []
    for threads in (0, 1, 2, 4):
        cache, _ = make(6, layers=3, threads=threads, reader=FakeReader(pause=0.0002))
        chosen = random.Random(5)
        for _ in range(30):
            for layer in range(3):
                use(cache, layer, chosen.sample(range(8), 3))
        table = [c.table() | {"wait_seconds": 0} for c in cache.counters.values()]
        found.append((table, cache.evictions, cache.peak_bytes))
        cache.close()
    assert all(f == found[0] for f in found)


def test_the_balanced_policy_hits_where_plain_lru_never_would() -> None:
    """Four layers of two experts, always the same, and room for four records: LRU over all layers misses every time."""

    def hits(policy: Policy) -> int:
        cache, _ = make(5, layers=4, policy=policy)
        for _ in range(5):
            for layer in range(4):
                use(cache, layer, [0, 1])
        return sum(c.hits for c in cache.counters.values())

    assert hits(lambda candidates, *_: next(iter(candidates))) == 0
    assert hits(balanced) == 4 * 4  # one expert of each layer stays, from the second round on


@pytest.mark.parametrize("threads", [0, 2])
def test_a_hit_is_the_most_recent_use(threads: int) -> None:
    """What goes is what was not used for longest, not what was read first: a hit counts as a use."""
    cache, reader = make(4, layers=1, threads=threads)  # room for three, one set aside
    for expert in (0, 1, 2, 0, 3):
        use(cache, 0, [expert])
    assert cache.evictions == 1
    use(cache, 0, [0])
    assert reader.reads == [(0, 0), (0, 1), (0, 2), (0, 3)], "0 was used after 1, so 1 went"
    use(cache, 0, [1])
    assert reader.reads[-1] == (0, 1)
    use(cache, 0, [0, 3])
    assert len(reader.reads) == 5, "then 2 went, used before 3 and 0"
    asked: list[list[Key]] = []

    def policy(candidates: Collection[Key], coming: Key, held: Mapping[int, int]) -> Key | None:
        asked.append(list(candidates))
        return balanced(candidates, coming, held)

    other, _ = make(5, layers=2, threads=threads, policy=policy)
    for layer, wanted in ((0, [0, 1]), (1, [0, 1]), (0, [1]), (0, [0]), (1, [5])):
        use(other, layer, wanted)
    assert asked == [[(1, 0), (1, 1), (0, 1), (0, 0)]], "a policy sees least to most recently used, over all layers"


# -- fuzz -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    records=st.integers(1, 20),
    threads=st.sampled_from([0, 1, 2, 4]),
    seed=st.integers(0, 2**32 - 1),
    random_policy=st.booleans(),
)
def test_fuzz(records: int, threads: int, seed: int, random_policy: bool) -> None:
    """Any order of leases, several at once, any eviction history: right bytes, and never a byte above the budget."""
    source = random.Random(seed)

    def any_key(candidates: Collection[Key], coming: Key, held: Mapping[int, int]) -> Key | None:
        return None if source.random() < 0.1 else source.choice(list(candidates))

    how: dict[str, Any] = {"policy": any_key} if random_policy else {}
    cache, reader = make(records, layers=3, experts=6, threads=threads, **how)
    asked = 0
    try:
        for _ in range(25):
            layer = source.randrange(3)
            wanted = source.sample(range(6), source.randint(1, 6))
            order = source.sample(wanted, source.randint(1, len(wanted)))
            asked += len(wanted)
            reader.failing = {(layer, source.choice(wanted))} if source.random() < 0.1 else set()
            try:
                with cache.step(layer, wanted) as step:
                    _lease_in_any_order(cache, step, layer, order, source)
            except DataError as error:
                assert reader.failing, error
            assert cache.held_bytes <= cache.budget and cache.open_leases == 0
        total = sum(cache.counters.values(), Counters())
        assert cache.peak_bytes <= cache.budget == records * PAGE
        assert total.hits + total.misses >= asked
        assert total.bytes_read >= PAGE
    finally:
        cache.close()


def _lease_in_any_order(cache: ExpertCache, step: Any, layer: int, order: list[int], source: random.Random) -> None:
    """Hold up to three at once; a lease beyond the budget must be refused with E1214 and nothing else."""
    while order:
        several = [order.pop() for _ in range(min(len(order), source.randint(1, 3)))]
        with ExitStack() as stack:
            held: list[tuple[int, Lease]] = []
            for expert in several:
                try:
                    held.append((expert, stack.enter_context(step.lease(expert))))
                except LeaseError as error:
                    assert error.code == "E1214" and len(held) * PAGE == cache.budget
                for known, lease in held:
                    assert np.all(lease.expert.record == pattern(layer, known))
                assert cache.held_bytes <= cache.budget
