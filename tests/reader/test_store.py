"""Where bytes come from: the same views whatever the store, and damage that is named rather than read."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.inference import Workshop, command, flip
from kits.maps import mapping_of

from pagestone.formats import encodings
from pagestone.formats.errors import DataError, MachineError, RequestError
from pagestone.formats.manifest import RECORDS
from pagestone.reader.container import Container, open_container, open_to_run
from pagestone.reader.dense import dense_entries, load_dense
from pagestone.reader.errors import ClosedError
from pagestone.reader.files import DirectFile, private_buffer
from pagestone.reader.leases import Counters, LeaseError
from pagestone.reader.store import ExpertStore, PlainRecords, StoreOptions, open_anew, open_store

CASES = [("anew", None), ("mmap", None), ("resident", None), ("direct", 1), ("direct", 5), ("direct", None)]
"""(io, budget in records)."""


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("store"))


@pytest.fixture
def damaged(workshop: Workshop, tmp_path: Path) -> Path:
    """A copy of an int8 container, to be damaged."""
    return workshop.copy("int8", tmp_path / "container")


def options(container: Container, io: str, records: int | None, **how: Any) -> StoreOptions:
    stride = container.layers[0].stride
    return StoreOptions(io, None if records is None else records * stride, **how)


def opened(container: Container, io: str, records: int | None, *, beside: bool = True) -> ExpertStore:
    """A store of any kind, the judges' too."""
    if io == "anew":
        return open_anew(container, beside=beside)
    return open_store(container, options(container, io, records, beside=beside))[0]


def everything(container: Container, **how: Any) -> Iterator[tuple[int, int, bytes]]:
    """(layer, expert, record) of every expert, through a store."""
    io, records = how.pop("io"), how.pop("records", None)
    store = open_store(container, options(container, io, records, **how))[0] if how else opened(container, io, records)
    try:
        for number, layer in container.layers.items():
            with store.step(number, range(len(layer))) as step:
                for expert in range(len(layer)):
                    with step.lease(expert) as lease:
                        yield number, expert, lease.expert.record.tobytes()
    finally:
        store.close()


@pytest.mark.parametrize(("io", "records"), CASES)
@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_every_store_gives_the_mapped_bytes(workshop: Workshop, codec: str, io: str, records: int | None) -> None:
    """Records, and every view of one: codes, scales, biases and the fused gate_up."""
    container = open_container(workshop.container(codec))
    for number, expert, record in everything(container, io=io, records=records):
        assert record == container.layers[number].expert(expert).record.tobytes()
    store = opened(container, io, records)
    with store.step(1, [3]) as step, step.lease(3) as lease:
        want = container.layers[1].expert(3)
        for part in ("gate", "up", "down", "gate_up"):
            for role in ("codes", "scales", "biases"):
                have, mapped = getattr(getattr(lease.expert, part), role), getattr(getattr(want, part), role)
                assert (have is None) == (mapped is None)
                if have is not None:
                    assert have.dtype == mapped.dtype and np.array_equal(have.array, mapped.array)
                    assert not have.array.flags.writeable
        have = mapped = None
    store.close()


@pytest.mark.parametrize(("io", "records"), CASES)
def test_the_rules_of_leasing_hold_in_every_store(workshop: Workshop, io: str, records: int | None) -> None:
    """A lease beyond its step, a view beyond its lease, an expert beyond the step."""
    container = open_container(workshop.container("int8"))
    store = opened(container, io, records)
    with pytest.raises(LeaseError, match="E1210"), store.step(0, [1]) as step:
        step.lease(1)
    with pytest.raises(LeaseError, match="E1211"), store.step(0, [1]) as step, step.lease(1) as lease:
        kept = lease.expert.gate.codes.array
    with pytest.raises(LeaseError, match="E1213"), store.step(0, [1]) as step:
        step.lease(2)
    assert store.open_leases == 0 and kept.shape
    store.close()


def test_torch_views_count_as_views(workshop: Workshop, oracle: Callable[[str], ModuleType]) -> None:
    """A tensor made from a view keeps the lease's memory, and is caught like one."""
    oracle("torch")
    container = open_container(workshop.container("int8"))
    store, _ = open_store(container, options(container, "direct", 3))
    with pytest.raises(LeaseError, match="E1211"), store.step(0, [1]) as step, step.lease(1) as lease:
        kept = lease.expert.gate.codes.torch()
    assert kept.shape
    store.close()


def test_counters(workshop: Workshop) -> None:
    """Direct counts what it reads, mmap what it maps, resident only hits."""
    container = open_container(workshop.container("int8"))
    stride = container.layers[0].stride
    for way, wanted in (
        ("direct", Counters(misses=2, bytes_read=2 * stride)),
        ("mmap", Counters(misses=2, bytes_mapped=2 * stride)),
        ("resident", Counters(hits=2)),
    ):
        store, _ = open_store(container, options(container, way, 4))
        with store.step(2, [4, 9]) as step, step.lease(4):
            pass
        found = store.counters[2]
        found.wait_seconds = 0.0
        assert found == wanted and store.counters[0] == Counters()
        store.close()


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
def test_a_flipped_bit_names_file_and_expert(damaged: Path, threads: int) -> None:
    """E1201 at the expert that is damaged, before a value of it is used; all others are read."""
    layout = open_container(damaged).layers[2].layout
    flip(damaged / "layers-02.safetensors", layout.record_offset(11) + 777)
    seen = []
    with pytest.raises(DataError) as error:
        for number, expert, _ in everything(open_container(damaged), io="direct", records=4, threads=threads):
            seen.append((number, expert))
    assert error.value.code == "E1201" and "layers-02.safetensors" in str(error.value)
    assert "expert 11" in str(error.value) and seen[-1] == (2, 10)
    with pytest.raises(DataError, match=r"layers-02.*expert 11.*E1201"):
        list(everything(open_container(damaged), io="resident"))


def test_damage_while_open(damaged: Path) -> None:
    """Bytes that change, and a file that is cut, after it was opened."""
    container = open_container(damaged)
    layout = container.layers[1].layout
    store, _ = open_store(container, options(container, "direct", 2))
    flip(container.layers[1].path, layout.record_offset(5) + 1)
    os.truncate(container.layers[1].path, layout.record_offset(14) + 100)
    for expert, code in ((5, "E1201"), (14, "E1202"), (15, "E1202")):
        with pytest.raises(DataError, match=rf"layers-01.*expert {expert}.*{code}"), store.step(1, [expert]) as step:
            step.lease(expert)
    assert store.open_leases == 0
    with store.step(1, [4]) as step, step.lease(4) as lease:
        assert lease.expert.record.any()
    store.close()


def test_digests_are_believed_only_with_the_manifest(damaged: Path) -> None:
    """A damaged record whose digest was "corrected" in records.xxh3: the manifest does not vouch for it (E1204)."""
    container = open_container(damaged)
    raw = bytearray((damaged / RECORDS).read_bytes())
    experts = len(container.layers[0])
    raw[16 * 3 * experts : 16 * 3 * experts + 16] = bytes(16)  # the first expert of layers-03
    (damaged / RECORDS).write_bytes(raw)
    with pytest.raises(DataError, match=r"records\.xxh3.*layers-03.*manifest states.*E1204"):
        open_store(container, StoreOptions("direct"))
    (damaged / RECORDS).write_bytes(raw[:-1])  # cut since the container was opened
    with pytest.raises(DataError, match=r"records\.xxh3.*16 bytes a record.*E1204"):
        open_store(container, StoreOptions("direct"))


def test_verify_on_read_can_be_switched_off(damaged: Path) -> None:
    """Then a flipped bit is read as it is: what the audit of logits must catch alone."""
    container = open_container(damaged)
    flip(container.layers[0].path, container.layers[0].layout.record_offset(0))
    assert len(list(everything(container, io="direct", records=3, verify=False))) == 64


def test_dense_tensors(workshop: Workshop, damaged: Path) -> None:
    """Read past the page cache or mapped: the same bytes, 64-byte aligned when read; damage names the file (E1205)."""
    container = open_container(workshop.container("int8"))
    names = list(dense_entries(container))
    read, mapped = load_dense(container, names, "direct"), load_dense(container, names, "mmap")
    assert read.arrays.keys() == mapped.arrays.keys() == set(names)
    for name in names:
        assert np.array_equal(read.arrays[name], mapped.arrays[name])
        assert read.arrays[name].ctypes.data % 64 == 0
    some = load_dense(container, names[3:5], "direct")
    assert sorted(some.arrays) == sorted(names[3:5])
    file, entry = dense_entries(container)[names[7]]
    flip(damaged / file, entry.offset)
    with pytest.raises(DataError, match=rf"{file}.*E1205"):
        load_dense(open_container(damaged), [names[0]], "direct")


# -- O_DIRECT ---------------------------------------------------------------------------------------------------------


def test_direct_reads_do_not_fill_the_page_cache(workshop: Workshop, tmp_path: Path) -> None:
    """Pages of a file read in direct mode are not resident afterwards (mincore by way of a map's counters)."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * 4096))
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file = DirectFile(path)
    if file.mode != "direct":
        pytest.skip("this file system refuses O_DIRECT")
    before = resident_pages(path)
    buffer = memoryview(mmap.mmap(-1, 64 * 4096))
    assert file.read_into(buffer, 0) == 64 * 4096 and bytes(buffer) == path.read_bytes()[: 64 * 4096]
    file.close()
    assert before <= 64
    with path.open("rb") as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file = DirectFile(path)
    file.read_into(buffer, 0)
    file.close()
    assert resident_pages(path) == 0


def test_a_direct_run_leaves_no_pages_behind(workshop: Workshop, tmp_path: Path) -> None:
    """Layer files and dense files: neither tables nor records stay in the page cache."""
    root = workshop.copy("int8", tmp_path / "container")
    shards = sorted(root.glob("*.safetensors"))
    for path in shards:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    container = open_container(root)
    store, _ = open_store(container, options(container, "direct", 4))
    for number in container.layers:
        with store.step(number, range(16)) as step:
            for expert in range(16):
                with step.lease(expert):
                    pass
    mode = store.mode
    store.close()
    dense = load_dense(container, list(dense_entries(container)), "direct")
    if mode != "direct" or dense.mode != "direct":
        pytest.skip("this file system refuses O_DIRECT")
    read = [p for p in shards if p.name.startswith(("layers-", "dense-")) and "rowsum" not in p.name]
    left = {p.name: resident_pages(p) for p in read}
    assert set(left.values()) == {0}, left


def resident_pages(path: Path) -> int:
    """Pages of a file in the page cache, by mincore."""
    import ctypes

    with path.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    pages = -(-len(mapped) // 4096)
    table = (ctypes.c_ubyte * pages)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), table) == 0
    return sum(b & 1 for b in table)


def test_end_of_a_file_within_a_page(tmp_path: Path) -> None:
    """The last, partial page is read too."""
    path = tmp_path / "file"
    data = os.urandom(3 * 4096 + 123)
    path.write_bytes(data)
    file = DirectFile(path)
    buffer = memoryview(mmap.mmap(-1, 8 * 4096))
    assert file.read_into(buffer, 0) == len(data) and bytes(buffer[: len(data)]) == data
    assert file.read_into(buffer, 3 * 4096) == 123
    assert file.read_into(buffer, 4 * 4096) == 0
    file.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("refusing", ["open", "preadv"])
def test_a_file_system_without_direct_reads_is_said(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, refusing: str, number: int
) -> None:
    """Refused at opening or at the first read: the bytes come through the page cache, and the mode says so."""
    real_open, real_read = os.open, os.preadv
    direct: set[int] = set()

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and refusing == "open":
            raise OSError(number, "no")
        handle = real_open(path, flags, *rest, **named)
        direct.discard(handle)
        if flags & os.O_DIRECT:
            direct.add(handle)
        return handle

    def preadv(handle: int, *rest: Any) -> int:
        if handle in direct:
            direct.discard(handle)
            raise OSError(number, "no")
        return real_read(handle, *rest)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    container = open_container(workshop.container("int8"))
    store, notes = open_store(container, options(container, "direct", 3, threads=1))
    with store.step(0, [2]) as step, step.lease(2) as lease:
        assert np.array_equal(lease.expert.record, container.layers[0].expert(2).record)
    assert store.mode == "buffered"
    assert "O_DIRECT" in notes[0]
    store.close()
    assert load_dense(container, list(dense_entries(container)), "direct").mode == "buffered"


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_reads_that_are_refused_in_the_middle(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, number: int, threads: int
) -> None:
    """The same bytes through the page cache from there on; the mode changes and it is said, once for all files."""
    container = open_container(workshop.container("int8"))
    told: list[str] = []
    store, notes = open_store(container, options(container, "direct", 5, threads=threads, note=told.append))
    if store.mode != "direct":
        pytest.skip("this file system refuses O_DIRECT")
    real = os.preadv

    def preadv(handle: int, *rest: Any) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, "no")
        return real(handle, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    for layer in (0, 1):
        with store.step(layer, range(16)) as step:
            for expert in range(16):
                with step.lease(expert) as lease:
                    assert np.array_equal(lease.expert.record, container.layers[layer].expert(expert).record)
    assert store.mode == "buffered" and notes == []
    assert len(told) == 1 and "layers-00.safetensors" in told[0] and "O_DIRECT" in told[0]
    store.close()
    dense = load_dense(container, list(dense_entries(container)), "direct")
    assert dense.mode == "buffered" and dense.arrays["lm_head.weight"].any()


def test_a_read_that_stops_within_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems give less than asked for in the middle of a file: that is not its end, in no mode."""
    path = tmp_path / "file"
    data = os.urandom(5 * 4096 + 77)
    path.write_bytes(data)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, into, at: min(real(handle, into, at), 5000))
    buffer = memoryview(mmap.mmap(-1, 8 * 4096))
    for direct in (True, False):
        file = DirectFile(path, direct=direct)
        buffer[:] = bytes(len(buffer))
        before = file.mode
        assert file.read_into(buffer, 0) == len(data) and bytes(buffer[: len(data)]) == data
        assert file.mode == "buffered", before
        file.close()
    monkeypatch.setattr(os, "preadv", real)
    file = DirectFile(path)
    before = file.mode
    assert file.read_into(buffer, 0) == len(data) and file.mode == before, "the end of a file is no refusal"
    file.close()


def test_advice_is_only_advice(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes no advice about its page cache is read from all the same."""

    class Stubborn(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "no")

    def no(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(os, "posix_fadvise", no)
    monkeypatch.setattr(mmap, "mmap", Stubborn)
    container = open_container(workshop.container("int8"))
    for way in ("direct", "mmap"):
        assert len(list(everything(container, io=way, records=3))) == 64
    assert load_dense(container, ["lm_head.weight"], "direct").arrays["lm_head.weight"].any()


# -- errors of the system ---------------------------------------------------------------------------------------------


def stores(root: Path) -> None:
    """Open every store and use one expert of each layer."""
    for way in ("direct", "mmap"):
        for _ in everything(open_container(root), io=way, records=2):
            pass


DENSE = "dense-00001-of-00001.safetensors"

READS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "manifest": ("manifest.json", open_container),
    "side file": ("config.json", open_to_run),
    "table of a layer": ("layers-01.safetensors", lambda root: open_container(root).layers[1].expert(0)),
    "sidecar": ("layers-01.rowsum.safetensors", lambda root: open_container(root).layers[1].beside),
    "sidecar of a store": ("layers-01.rowsum.safetensors", stores),
    "digests": ("records.xxh3", stores),
    "layer of a store": ("layers-02.safetensors", stores),
    "table of dense tensors": (DENSE, lambda root: dense_entries(open_container(root))),
}


@pytest.mark.parametrize("how", ["open", "read"])
@pytest.mark.parametrize("what", READS)
def test_every_read_names_its_file(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, what: str, how: str) -> None:
    """EACCES when it is opened, EIO when it is read (which knows no name): E1203, exit code 3, the file, a remedy."""
    name, use = READS[what]
    number = errno.EACCES if how == "open" else errno.EIO
    root = workshop.container("int8")
    real_open, real_read = os.open, os.preadv

    def opening(path: Any, *rest: Any, **named: Any) -> int:
        if how == "open" and Path(path).name == name:
            raise OSError(number, os.strerror(number), os.fspath(path))
        return real_open(path, *rest, **named)

    def reading(handle: int, *rest: Any) -> int:
        if how == "read" and Path(os.readlink(f"/proc/self/fd/{handle}")).name == name:  # noqa: PTH115
            raise OSError(number, os.strerror(number))
        return real_read(handle, *rest)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", reading)
    with pytest.raises(MachineError, match="E1203") as error:
        use(root)
    assert error.value.exit_code == 3 and error.value.file == str(root / name)
    assert os.strerror(number) in str(error.value)
    wanted = "let this user read the file" if how == "open" else "check the disk"
    assert error.value.remedy is not None and wanted in error.value.remedy


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EACCES, "let this user"), (errno.EMFILE, "open files"), (errno.EIO, "the disk"), (errno.ENOENT, "restore")],
)
def test_opening_a_file_for_direct_reads(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """The same for files of experts and of dense tensors, which are opened another way; nothing stays open."""
    container = open_container(workshop.container("int8"))
    real = os.open
    opened: list[int] = []

    def opening(path: Any, *rest: Any) -> int:
        if Path(path).name in ("layers-02.safetensors", DENSE):
            raise OSError(number, os.strerror(number), os.fspath(path))
        opened.append(real(path, *rest))
        return opened[-1]

    for layer in container.layers.values():
        assert layer.layout.stride
    entries = list(dense_entries(container))
    monkeypatch.setattr(os, "open", opening)
    for name, use in (
        ("layers-02.safetensors", lambda: open_store(container, options(container, "direct", 3))),
        (DENSE, lambda: load_dense(container, entries, "direct")),
    ):
        with pytest.raises(MachineError, match="E1203") as error:
            use()
        assert error.value.file == str(container.path / name) and remedy in str(error.value.remedy)
    assert len(opened) >= 2
    for handle in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)


def test_a_file_system_without_maps(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENODEV: the file, and that runs need no map."""
    container = open_container(workshop.container("int8"))
    real = mmap.mmap

    def refuse(handle: int, *rest: Any, **named: Any) -> Any:
        if handle >= 0:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return real(handle, *rest, **named)

    monkeypatch.setattr(mmap, "mmap", refuse)
    for use in (
        lambda: container.layers[1].expert(0),
        lambda: open_store(container, StoreOptions("mmap", beside=False)),
        lambda: load_dense(container, ["lm_head.weight"], "mmap"),
    ):
        with pytest.raises(MachineError, match=r"safetensors: mapping failed: .*E1203.*\n.*--io direct"):
            use()
    assert len(list(everything(container, io="direct", records=2))) == 64


def test_no_memory_for_a_buffer(workshop: Workshop) -> None:
    """A budget the system cannot give is the machine's error with a remedy, not a traceback."""
    with pytest.raises(MachineError, match=r"out of memory: .*E0902.*\n.*--budget"):
        private_buffer(1 << 62)


def test_a_directory_nobody_may_enter(workshop: Workshop, tmp_path: Path) -> None:
    """Not "no container here": the system said that this user may not look."""
    if os.geteuid():
        pytest.skip("needs to give up a right, and has none")
    root = workshop.copy("int8", tmp_path / "container")
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(MachineError, match=r"container.*Permission denied.*E1203") as error:
            open_container(root)
    finally:
        os.seteuid(0)
    assert error.value.exit_code == 3 and "let this user" in str(error.value.remedy)
    assert error.value.file == str(root / "manifest.json"), "the path the system refused"


@pytest.mark.parametrize("words", [["inspect"], ["run", "--prompt", "x"]])
def test_the_command_line_says_the_same(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Exit code 3 and one message that names the file."""

    def opening(file: Any, *rest: Any, **named: Any) -> Any:
        if str(file).endswith(("experts.parquet", "config.json")):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, *rest, **named)

    real = os.open
    monkeypatch.setattr(os, "open", opening)
    assert command(words[0], damaged, *words[1:]) == 3
    said = capsys.readouterr()
    name = "experts.parquet" if words == ["inspect"] else "config.json"
    assert said.out == "" and said.err.startswith(f"error: {damaged / name}: reading failed: ") and "E1203" in said.err


def test_an_io_error_is_the_machines(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """E1203, exit code 3, naming the file; the cache is usable afterwards."""
    container = open_container(workshop.container("int8"))
    store, _ = open_store(container, options(container, "direct", 3))
    real, failing = os.preadv, [True]

    def preadv(*arguments: Any) -> int:
        if failing[0]:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(MachineError, match=r"layers-00.*E1203") as error, store.step(0, [2]) as step:
        step.lease(2)
    assert error.value.exit_code == 3
    failing[0] = False
    with store.step(0, [2]) as step, step.lease(2) as lease:
        assert np.array_equal(lease.expert.record, container.layers[0].expert(2).record)
    store.close()


def test_requests(workshop: Workshop) -> None:
    """An unknown mode, and a budget below one record."""
    container = open_container(workshop.container("int8"))
    with pytest.raises(RequestError, match="E1240"):
        open_store(container, StoreOptions("tape"))
    with pytest.raises(RequestError, match="E1215"):
        open_store(container, StoreOptions("direct", 100))


def test_no_descriptor_is_left_open(workshop: Workshop) -> None:
    """Opening and closing stores many times does not run out of files."""
    container = open_container(workshop.container("int8"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        for _ in range(80):
            store, _ = open_store(container, options(container, "direct", 3))
            store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- anew -------------------------------------------------------------------------------------------------------------


def test_a_store_that_reads_anew_keeps_nothing(workshop: Workshop) -> None:
    """A record is read at each lease, and counted, into the memory of the one before; two leases at once take two."""
    container = open_container(workshop.container("int8"))
    stride = container.layers[0].stride
    store = open_anew(container)
    assert store.mode == "anew" and store.peak_bytes == 0
    with store.step(2, [4, 9]) as step:
        assert store.counters[2] == Counters(), "nothing is read before it is leased"
        for expert in (4, 9, 4):
            with step.lease(expert) as lease:
                assert store.open_leases == 1 and lease.number == expert
    found = store.counters[2]
    assert (found.misses, found.hits, found.bytes_read) == (3, 0, 3 * stride) and found.wait_seconds > 0
    assert store.counters[0] == Counters() and store.peak_bytes == store._held == stride
    with store.step(2, [4, 9]) as step, step.lease(4), step.lease(9):
        assert store.open_leases == 2 and store._held == 2 * stride
    assert store.peak_bytes == 2 * stride and store._held == stride and store.open_leases == 0
    with pytest.raises(LeaseError, match="E1211"), store.step(2, [4]) as step, step.lease(4) as lease:
        kept = lease.expert.down.codes.array
    before = kept.tobytes()
    with store.step(2, [9]) as step, step.lease(9) as lease:
        assert lease.expert.down.codes.array.tobytes() != before
    assert kept.tobytes() == before and store._held == 2 * stride, "memory that is looked at is not overwritten"
    with store.step(2, [4]) as step, step.lease(4):
        store.close()
    del kept
    assert store._held == 0
    with pytest.raises(ClosedError, match="E1270"):
        store.step(2, [4])


def test_a_store_that_reads_anew_reads_ahead(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step will lease next is begun with a lease, by other threads, into memory of its own; once each."""
    container = open_container(workshop.container("int8"))
    layer, read = container.layers[1], PlainRecords.read
    by: list[tuple[int, bool]] = []

    def noted(self: Any, at: Any, expert: int, into: memoryview) -> None:
        by.append((expert, threading.current_thread() is threading.main_thread()))
        read(self, at, expert, into)

    monkeypatch.setattr(PlainRecords, "read", noted)
    store = open_anew(container, ahead=2)
    with store.step(1, [2, 3, 5, 8, 9]) as step:
        assert not by
        for expert in (2, 3, 5, 8, 9, 3):
            with step.lease(expert) as lease:
                assert lease.expert.record.tobytes() == layer.expert(expert).record.tobytes()
                assert len(store._begun) <= 2
    assert sorted(by) == [(2, True), (3, False), (3, True), (5, False), (8, False), (9, False)]
    assert store.counters[1].misses == 6 and store.peak_bytes == 3 * layer.stride
    by.clear()
    with store.step(1, [2, 3, 5]) as step, step.lease(2):
        pass  # the others are begun, and nobody asks for them
    with store.step(1, [7]) as step, step.lease(7) as lease:
        assert lease.expert.record.tobytes() == layer.expert(7).record.tobytes()
    assert store.peak_bytes == store._held == 3 * layer.stride
    with store.step(1, [2, 3]) as step, step.lease(2):
        store.close()
    assert store._held == 0


def test_an_error_of_what_is_read_ahead(damaged: Path) -> None:
    """It is raised where that expert is leased, not before; the store goes on."""
    container = open_container(damaged)
    layer = container.layers[1]
    flip(layer.path, layer.layout.record_offset(4) + 11)
    store = open_anew(container, ahead=2)
    with store.step(1, [3, 4, 6]) as step:
        with step.lease(3):
            pass
        with pytest.raises(DataError, match="E1201"):
            step.lease(4)
        with step.lease(6) as lease:
            assert lease.expert.record.tobytes() == layer.expert(6).record.tobytes()
    store.close()
    gc.collect()  # what was raised holds on to frames
    assert store._held == 0


def test_what_is_read_anew_is_checked_each_time(damaged: Path) -> None:
    """A bit (E1201) and a cut (E1202) that come between two leases of one step; row sums when it opens (E1206)."""
    container = open_container(damaged)
    layer = container.layers[1]
    offset = layer.layout.record_offset(len(layer) - 1)
    store = open_anew(container)
    with store.step(1, [len(layer) - 1]) as step:
        with step.lease(len(layer) - 1):
            pass
        flip(layer.path, offset + 11)
        with pytest.raises(DataError, match=rf"{layer.path.name}: expert {len(layer) - 1} .*E1201"):
            step.lease(len(layer) - 1)
        os.truncate(layer.path, offset + layer.stride - 1)
        with pytest.raises(
            DataError, match=rf"expert {len(layer) - 1}: {layer.stride} bytes .* after {layer.stride - 1}"
        ):
            step.lease(len(layer) - 1)
        layer.path.unlink()
        with pytest.raises(MachineError, match=rf"{layer.path.name}.*E1203"):
            step.lease(len(layer) - 1)
    assert store.open_leases == 0
    store.close()
    other = container.layers[0]
    assert other.entry.sidecar is not None
    path = damaged / other.entry.sidecar
    flip(path, path.stat().st_size - 7)
    with pytest.raises(DataError, match=rf"{path.name}: xxh3 of the sidecar .*E1206"):
        open_anew(container)


def test_what_is_read_anew_leaves_the_page_cache(workshop: Workshop, tmp_path: Path) -> None:
    """Plain reads go through it, and it is asked to forget them."""
    asked: list[tuple[int, int]] = []
    container = open_container(workshop.container("int8"))
    layer, real = container.layers[0], os.posix_fadvise
    store = open_anew(container)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "posix_fadvise", lambda handle, at, size, how: (asked.append((at, size)), real(handle, at, size, how))
        )
        with store.step(0, [2]) as step, step.lease(2):
            pass
    store.close()
    offset = layer.layout.record_offset(2)
    assert any(at <= offset and at + size >= offset + layer.stride for at, size in asked)


def test_dense_tensors_read_anew(workshop: Workshop, damaged: Path) -> None:
    """Through the page cache, not past it; the same bytes; compared with the digest all the same."""
    container = open_container(workshop.container("int8"))
    names = list(dense_entries(container))
    direct, anew = (load_dense(container, names, mode) for mode in ("direct", "anew"))
    assert anew.mode == "anew" and anew.bytes_read == direct.bytes_read
    assert all(np.array_equal(direct.arrays[n], anew.arrays[n]) for n in names)
    flip(next(damaged.glob("dense-*")), 70_000)
    with pytest.raises(DataError, match="E1205"):
        load_dense(open_container(damaged), names, "anew")
    modes = []
    with pytest.MonkeyPatch.context() as patch:
        real = DirectFile.__init__
        patch.setattr(DirectFile, "__init__", lambda self, *a, **k: (real(self, *a, **k), modes.append(self.mode))[0])
        load_dense(container, names, "anew")
    assert modes and set(modes) == {"buffered"}


# -- row sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("io", "records"), CASES)
def test_row_sums_come_with_every_lease(workshop: Workshop, io: str, records: int | None) -> None:
    """The sidecar's rows, cut as the matrices are; none where they are not wanted, or where a codec has none."""
    container = open_container(workshop.container("int8"))
    store = opened(container, io, records)
    with store.step(1, [3, 5]) as step:
        for number in (3, 5):
            with step.lease(number) as lease:
                for part in ("gate", "up", "down", "gate_up"):
                    matrix = getattr(lease.expert, part)
                    assert (matrix.row_sums.array == matrix.codes.array.sum(axis=1, dtype=np.int32)).all()
                del matrix
    store.close()
    for codec, wanted in (("int8", False), ("fp8", True)):
        container = open_container(workshop.container(codec))
        store = opened(container, io, records, beside=wanted)
        with store.step(1, [3]) as step, step.lease(3) as lease:
            assert lease.expert.gate_up.row_sums is None and lease.expert.down.row_sums is None
        store.close()


def test_row_sums_are_compared_with_their_digest(damaged: Path) -> None:
    """E1206 when a store that verifies opens; a map is not compared, nor a store that does not verify or want them."""
    container = open_container(damaged)
    name = container.layers[2].entry.sidecar
    assert name is not None
    path = damaged / name
    flip(path, path.stat().st_size - 7)
    for way in ("direct", "resident"):
        with pytest.raises(DataError, match=rf"{name}: xxh3 of the sidecar .*E1206"):
            open_store(container, options(container, way, None))
        for how in ({"verify": False}, {"beside": False}):
            store, _ = open_store(container, options(container, way, None, **how))
            store.close()
    store, _ = open_store(container, options(container, "mmap", None))
    store.close()
    path.unlink()
    with pytest.raises((DataError, MachineError), match=name):
        open_store(container, options(container, "direct", None))


@pytest.mark.parametrize("io", ["direct", "resident", "anew"])
def test_records_are_in_private_memory_of_huge_pages(workshop: Workshop, io: str) -> None:
    """Whatever reads them, records lie in anonymous memory that is marked for huge pages: products gain a tenth."""
    container = open_container(workshop.container("int8"))
    store = open_anew(container) if io == "anew" else open_store(container, StoreOptions(io))[0]
    with store, store.step(0, [3]) as step, step.lease(3) as lease:
        found = mapping_of(lease.expert.record)
        assert found.private and found.file == "0" and "hg" in found.flags
