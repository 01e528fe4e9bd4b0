"""The reader as a library: what programs get when they ask for the wrong thing, close, fork, or look at an object."""

from __future__ import annotations

import gc
import importlib.resources
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.inference import Workshop

import pagestone
from pagestone.formats.errors import DataError, NonFiniteError, PagestoneError, RequestError
from pagestone.reader.cache import ExpertCache
from pagestone.reader.container import Container, open_container
from pagestone.reader.leases import LeaseError
from pagestone.reader.store import StoreOptions, open_store

WAYS = ("direct", "mmap", "resident")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("library"))


@pytest.fixture
def container(workshop: Workshop) -> Container:
    return open_container(workshop.container("int8"))


def store_of(container: Container, way: str, **how: Any) -> Any:
    budget = 4 * container.layers[0].stride if way == "direct" else None
    return open_store(container, StoreOptions(way, budget, **how))[0]


def typed(error: PagestoneError, code: str, *kinds: type) -> None:
    """A typed error of ours that is also what Python users catch, with a remedy and one readable text."""
    assert isinstance(error, PagestoneError) and all(isinstance(error, kind) for kind in kinds)
    assert error.code == code and error.remedy and f"({code})" in str(error) and "\\n" not in str(error)


# -- names of experts and layers --------------------------------------------------------------------------------------

NO_NUMBERS = [True, False, np.True_, 1.0, np.float32(1), "1", b"1", None, [1], (1,), 1j]


@pytest.mark.parametrize("number", NO_NUMBERS, ids=repr)
def test_what_is_no_number(container: Container, number: Any) -> None:
    """E1219, a TypeError. True gave the views of expert 1 with the row sums of all experts."""
    layer = container.layers[1]
    record = layer.expert(1).record
    for ask in (
        lambda: layer.expert(number), lambda: layer.expert_in(record, number, layer.beside),
        lambda: container.layers[number], lambda: container.mtp[number],
    ):  # fmt: skip
        with pytest.raises(TypeError) as error:
            ask()
        typed(error.value, "E1219", RequestError, TypeError)
        assert "number of a layer" in str(error.value) or "number of an expert" in str(error.value)
    for way in WAYS:
        with store_of(container, way) as store:
            for layer_number, wanted in ((number, [1]), (1, [number]), (1, [0, number, 1])):
                with pytest.raises(TypeError, match="E1219"), store.step(layer_number, wanted):
                    raise AssertionError
            with store.step(1, [0, 1]) as step, pytest.raises(TypeError, match="E1219"):
                step.lease(number)
            assert store.open_leases == 0


@pytest.mark.parametrize("number", [-1, 16, -16, 10**30])
def test_experts_that_are_not_there(container: Container, number: int) -> None:
    """E1217, an IndexError; negative numbers do not count from the end."""
    for way in WAYS:
        with store_of(container, way) as store:
            with pytest.raises(IndexError) as error, store.step(1, [2, number]):
                raise AssertionError
            typed(error.value, "E1217", RequestError, IndexError)
            assert "layers-01" in str(error.value) and "0 to 15" in str(error.value)
            with store.step(1, [0]) as step, pytest.raises(IndexError, match="E1217"):
                step.lease(number)
    for ask in (container.layers[1].expert, lambda n: container.layers[1].expert_in(np.zeros(1, np.uint8), n)):
        with pytest.raises(IndexError, match="E1217"):
            ask(number)


@pytest.mark.parametrize("number", [-1, 4, 10**30])
def test_layers_that_are_not_there(container: Container, number: int) -> None:
    """E1218, a KeyError whose text is readable and says which layers there are."""
    for way in WAYS:
        with store_of(container, way) as store, pytest.raises(KeyError) as error, store.step(number, [1]):
            raise AssertionError
        typed(error.value, "E1218", RequestError, KeyError)
        assert "there are 0, 1, 2, 3" in str(error.value) and not str(error.value).startswith("'")
    with pytest.raises(KeyError, match=r"int8.*: a layer of layers .*E1218"):
        container.layers[number]
    with pytest.raises(KeyError, match=r"a layer of mtp .*there are 0 .*E1218"):
        container.mtp[7]
    assert container.layers.get(number) is None and number not in container.layers


def test_integers_of_other_libraries(container: Container, oracle: Callable[[str], ModuleType]) -> None:
    """NumPy's and torch's integers are numbers, their truth values are not; the number kept is Python's own."""
    torch = oracle("torch")
    for kind in (np.int64, np.uint8, np.array, torch.tensor):
        expert = container.layers[kind(1)].expert(kind(3))
        assert type(expert.number) is int and expert.number == 3
        assert np.array_equal(expert.down.row_sums.array, expert.down.codes.array.sum(axis=1, dtype=np.int32))
        store = store_of(container, "direct")
        with store.step(kind(1), [kind(3)]) as step, step.lease(kind(3)) as lease:
            assert type(lease.number) is int and type(lease.expert.number) is int
            assert np.array_equal(lease.expert.record, expert.record)
        store.close()
    for truth in (torch.tensor(True), np.array(True)):
        with pytest.raises(TypeError, match="E1219"):
            container.layers[0].expert(truth)
    with store_of(container, "direct") as store:
        with store.step(1, torch.tensor([3, 1, 3])) as step, step.lease(1):
            pass
        with pytest.raises(TypeError, match="E1219"), store.step(1, 3):
            raise AssertionError


# -- closing ----------------------------------------------------------------------------------------------------------


def test_a_container_in_a_with_statement(workshop: Workshop) -> None:
    """Views outlive it, new ones are refused (E1270, a ValueError), and a store made from it goes on."""
    with open_container(workshop.container("int8")) as container:
        layer = container.layers[0]
        expert, sums = layer.expert(3), layer.beside
        store = store_of(container, "direct")
        _ = container.layers[2].layout
        assert not container.closed
    assert container.closed and layer.closed and expert.down.decode().any() and sums["down", "row_sums"].array.any()
    for layer in (*container.layers.values(), *container.mtp.values()):
        for ask in (lambda: layer.expert(3), lambda: layer.pointer, lambda: layer.beside, lambda: next(iter(layer))):  # noqa: B023
            with pytest.raises(ValueError, match="E1270") as error:
                ask()
            typed(error.value, "E1270", ValueError)
    with pytest.raises(ValueError, match="open Container expected"), container:
        raise AssertionError
    with store.step(2, [1]) as step, step.lease(1) as lease:
        assert lease.expert.record.any()
    store.close()
    container.close()
    assert len(layer) == 16 and container.container_id


def test_closing_lets_maps_go(workshop: Workshop) -> None:
    """After it a map stays only for the views that need it."""

    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {Path(x.split()[-1]).name for x in lines if str(root) in x}

    root = workshop.copy("int8", workshop.root / "maps")
    with open_container(root) as container:
        kept = container.layers[0].expert(0).gate.codes
        seen: Any = container.layers[1].expert(0), container.layers[1].beside
        assert {"layers-00.safetensors", "layers-01.safetensors", "layers-01.rowsum.safetensors"} <= mapped()
    del seen
    assert mapped() == {"layers-00.safetensors"} and kept.array.any()


@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_was_closed(container: Container, way: str) -> None:
    """E1270 for a step, and for a lease in a step that was open; closing twice is nothing; no file stays open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with store_of(container, way) as store, store.step(0, [1]) as step, step.lease(1):
        pass
    assert store.closed
    store.close()
    for use in (partial(store.step, 0, [1]), store.__enter__):
        with pytest.raises(ValueError, match="E1270") as error:
            use()
        typed(error.value, "E1270", ValueError)
    for expert in (0, 5):  # of a cache: one that was read ahead and makes room for the next, one that was not
        again = store_of(container, way)
        with again.step(0, range(16)) as step:
            with step.lease(expert) as lease:
                again.close()
                assert np.array_equal(lease.expert.record, container.layers[0].expert(expert).record)
            with pytest.raises(ValueError, match="E1270"):
                step.lease(6)
        assert again.open_leases == 0
        del again, step, lease
    container.close()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_view_kept_beyond_a_closed_store(container: Container) -> None:
    """The rule of leases still holds (E1211), and nothing else goes wrong."""
    store = store_of(container, "direct")
    with pytest.raises(LeaseError, match="E1211"), store.step(0, range(16)) as step, step.lease(0) as lease:
        kept = lease.expert.gate.codes.array
        store.close()
    assert kept.any()


# -- forks ------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], Any], seconds: float = 20) -> None:
    """Run `work` in a forked process and fail if it fails or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads: that is it
        child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(int(seconds))
            work()
            code = 0
        except BaseException as error:
            os.write(2, repr(error).encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, status


def all_of(store: Any, container: Container, layer: int) -> None:
    with store.step(layer, range(16)) as step:
        for expert in range(16):
            with step.lease(expert) as lease:
                assert np.array_equal(lease.expert.record, container.layers[layer].expert(expert).record)


@pytest.mark.parametrize("way", WAYS)
def test_a_store_goes_on_in_a_forked_process(container: Container, way: str) -> None:
    """Its reading threads are not copied by a fork: the child waited for them for ever."""
    with store_of(container, way) as store:
        all_of(store, container, 0)
        in_child(lambda: (all_of(store, container, 1), store.close()))
        all_of(store, container, 0)


def test_what_a_child_reads_is_its_own(container: Container) -> None:
    """The child's reads do not land in the parent's buffers: what the parent holds stays what it was."""
    with store_of(container, "direct") as store, store.step(0, [1, 2]) as step, step.lease(1) as held:

        def work() -> None:
            with step.lease(2):
                pass
            with pytest.raises(LeaseError, match="E1210"):
                step.__exit__(None, None, None)
            for layer in (1, 2, 3):
                all_of(store, container, layer)

        before = held.expert.record.tobytes()
        in_child(work)
        assert held.expert.record.tobytes() == before
        with step.lease(2) as lease:
            assert np.array_equal(lease.expert.record, container.layers[0].expert(2).record)


def test_a_fork_while_reads_are_under_way(container: Container) -> None:
    """What the parent's threads had begun never ends in the child, and is read again there."""
    real = store_of(container, "direct", threads=0)
    gate, begun = threading.Event(), threading.Event()

    class Slow:
        mode = "slow"
        waiting = True

        def read(self, layer: Any, expert: int, into: memoryview) -> None:
            begun.set()
            if self.waiting:
                assert gate.wait(20)
            real._reader.read(layer, expert, into)

        def beside(self, layer: Any) -> dict[Any, Any]:
            return {}

        def close(self) -> None:
            pass

    slow = Slow()
    store = ExpertCache(container.layers, slow, 4 * container.layers[0].stride, threads=2)
    with store.step(0, [1, 2]) as step:
        assert begun.wait(20)

        def work() -> None:
            slow.waiting = False
            for expert in (1, 2):
                with step.lease(expert) as lease:
                    assert np.array_equal(lease.expert.record, container.layers[0].expert(expert).record)
            step.__exit__(None, None, None)
            all_of(store, container, 1)

        in_child(work)
        gate.set()
        for expert in (1, 2):
            with step.lease(expert) as lease:
                assert np.array_equal(lease.expert.record, container.layers[0].expert(expert).record)
    store.close()
    real.close()


def test_a_pool_of_processes(workshop: Workshop) -> None:
    """As an engine would: a store opened before `multiprocessing` forks its workers, and an error sent back."""
    code = f"""
import multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from pagestone.reader.container import open_container
from pagestone.reader.store import StoreOptions, open_store
container = open_container({str(workshop.container("int8"))!r})
store, _ = open_store(container, StoreOptions("direct", 4 * container.layers[0].stride))
with store.step(0, [1]) as step, step.lease(1):
    pass
def work(number):
    with store.step(0, [number]) as step, step.lease(number) as lease:
        return int(lease.expert.record.astype("u8").sum())
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(work, range(16))
    assert found == [int(e.record.astype("u8").sum()) for e in container.layers[0]], found
    try:
        pool.map(work, [99])
    except IndexError as error:
        print(error.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "E1217"


def test_errors_cross_processes() -> None:
    """Pickled and back: the same class, text and facts."""
    error = DataError("seen", code="E0201", file=Path("a"), tensor="t", remedy="look")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is DataError and str(back) == str(error)
    assert (back.message, back.code, back.file, back.tensor, back.remedy) == ("seen", "E0201", "a", "t", "look")
    other = pickle.loads(pickle.dumps(LeaseError("x", code="E1210")))
    assert type(other) is LeaseError and other.file is None and other.remedy is None
    number = pickle.loads(pickle.dumps(NonFiniteError(2, 3, 4, "NaN", rows="token")))
    assert (number.count, number.row, number.column, number.value) == (2, 3, 4, "NaN") and "token 3" in str(number)


# -- looking at it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_what_objects_say_of_themselves(workshop: Workshop, codec: str) -> None:
    """One short line each, no arrays; a layer's line opens no file. Equality is identity, and they can be in sets."""
    container = open_container(workshop.container(codec))
    layer = container.layers[1]
    assert repr(layer).endswith("layers-01.safetensors': 16 experts)") and "_opened" not in vars(layer)
    expert = layer.expert(3)
    for thing in (container, layer, expert, expert.gate, expert.gate_up, expert.down.codes):
        assert len(repr(thing)) < 300 and "array(" not in repr(thing) and "\n" not in repr(thing)
        assert thing == thing and thing in {thing}
    assert expert != layer.expert(3)
    assert repr(expert).startswith(f"Expert(3: {codec}, hidden 256, intermediate 128, ")
    assert repr(expert.down.codes) == f"View({'I8' if codec == 'int8' else 'BF16'} [256, 128])"
    assert f"{codec} [128, 256]: codes " in repr(expert.gate) and ("row_sums I32 [128]" in repr(expert.gate)) == (
        codec == "int8"
    )
    assert container.container_id in repr(container) and codec in repr(container)


def test_the_package_shows_its_names_and_its_types() -> None:
    """`dir` lists the whole API, every name is there, and type checkers are told that we have types."""
    assert set(pagestone.__all__) <= set(dir(pagestone))
    assert all(getattr(pagestone, name) is not None for name in pagestone.__all__)
    assert (importlib.resources.files("pagestone") / "py.typed").is_file()


def test_time_flies() -> None:
    """`in_child` itself: a child that fails or hangs is noticed."""
    with pytest.raises(AssertionError):
        in_child(lambda: 1 / 0)
    with pytest.raises(AssertionError):
        in_child(lambda: time.sleep(30), seconds=1)
