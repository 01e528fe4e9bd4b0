"""Storages: the local directory and one in memory by the same tests, and what is the local directory's own."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoints import T_ORDER
from kits.containers import contents
from kits.conversions import run
from kits.storage import MemoryStorage, StorageTests

from pagestone.convert import writing
from pagestone.convert.checkpoint import open_checkpoint
from pagestone.convert.errors import READS, machine_errors
from pagestone.formats import storage as module
from pagestone.formats.errors import DataError, MachineError, RequestError
from pagestone.formats.layout import PAGE
from pagestone.formats.storage import Kind, LocalDirectory, Place, Ranges, Storage, hash_file, place_of, read_fully
from pagestone.validate.verify import verify

SPEC = T_ORDER.having(layers=2)


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


class TestMemory(StorageTests):
    def storage(self, files: dict[str, bytes], tmp_path: Path) -> Storage:
        return MemoryStorage(files)

    def change(self, storage: Storage, name: str, data: bytes) -> None:
        assert isinstance(storage, MemoryStorage)
        storage.files[name] = data


class TestLocalDirectory(StorageTests):
    once = False

    def storage(self, files: dict[str, bytes], tmp_path: Path) -> Storage:
        for name, data in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return LocalDirectory(tmp_path / "root", once=self.once)

    def change(self, storage: Storage, name: str, data: bytes) -> None:
        root = storage.path()
        assert root is not None
        (root / name).write_bytes(data)

    def test_links(self, made: Storage, tmp_path: Path) -> None:
        """A link is what it leads to; one that leads nowhere, or round, is told from nothing."""
        root = made.path()
        assert root == tmp_path / "root"
        (root / "link.json").symlink_to("config.json")
        (root / "gone.json").symlink_to("nowhere")
        (root / "round").symlink_to("round")
        (tmp_path / "outside.json").write_bytes(b"{}")
        (root / "out.json").symlink_to(tmp_path / "outside.json")
        os.mkfifo(root / "pipe")
        kinds = {n: made.kind(n) for n in ("link.json", "gone.json", "round", "out.json", "pipe")}
        assert kinds == {
            "link.json": Kind.FILE, "gone.json": Kind.DANGLING, "round": Kind.DANGLING, "out.json": Kind.FILE,
            "pipe": Kind.OTHER,
        }  # fmt: skip
        assert made.holds("link.json") and not made.holds("out.json")
        assert not place_of(root / "gone.json").exists() and not place_of(root / "pipe").is_file()

    def test_a_directory_that_may_not_be_entered_is_no_absence(self, made: Storage) -> None:
        """Only the answer that there is nothing means that there is nothing."""
        with pytest.MonkeyPatch.context() as patch:
            real = Path.stat

            def refuse(path: Path, *, follow_symlinks: bool = True) -> Any:
                if follow_symlinks:
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
                return real(path, follow_symlinks=False)

            patch.setattr(Path, "stat", refuse)
            with pytest.raises(PermissionError):
                made.kind("config.json")

    def test_descriptors(self, made: Storage) -> None:
        """Files stay open within the outermost `with` statement, once each, and no longer."""

        def opened() -> int:
            return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

        room, before = memoryview(bytearray(9)), opened()
        with made:
            with made:
                for _ in range(5):
                    made.read_into("config.json", 0, room)
                    made.read_into("empty.txt", 0, room)
            assert opened() == before + 2
        assert opened() == before
        for _ in range(5):
            made.read_into("config.json", 0, room)
        assert opened() == before


class TestReadOnce(TestLocalDirectory):
    """The same of a directory whose pages are not kept."""

    once = True


# -- loops -------------------------------------------------------------------------------------------------------------


def test_short_reads_are_continued() -> None:
    """However little a call gives; the end is where it gives nothing."""
    data = bytes(range(100))

    def little(buffer: memoryview, offset: int) -> int:
        piece = data[offset : offset + min(7, len(buffer))]
        buffer[: len(piece)] = piece
        return len(piece)

    buffer = bytearray(80)
    assert read_fully(little, memoryview(buffer), 5) == 80 and buffer == data[5:85]
    assert read_fully(little, memoryview(buffer), 50) == 50 and buffer[:50] == data[50:]
    seen = bytearray()

    class Keep:
        def update(self, piece: memoryview) -> None:
            seen.extend(piece)

    assert hash_file(little, Keep()) == 100 and seen == data


def test_short_reads_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than asked for in the middle of a file."""
    data = os.urandom(20_000)
    (tmp_path / "f").write_bytes(data)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda h, into, at: real(h, [into[0][:999]], at))
    assert place_of(tmp_path / "f").read(0, 20_000) == data and place_of(tmp_path / "f").read_bytes() == data


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named_by", [None, "/other/file", b"/other/file", 7])
def test_one_translation(named_by: Any) -> None:
    """The file the error names, else the one that was meant; a descriptor is no name. The remedy is by errno."""
    error = OSError(errno.EIO, "Input/output error")
    error.filename = named_by
    with pytest.raises(MachineError) as caught, machine_errors("/a/file", "reading the source"):
        raise error
    assert caught.value.file == ("/other/file" if isinstance(named_by, str | bytes) else "/a/file")
    assert caught.value.code == "E0901" and caught.value.remedy == READS.remedies[errno.EIO]
    assert caught.value.message == "Input/output error while reading the source" and caught.value.__cause__ is error


def test_memory_is_told_where_a_side_has_words_for_it() -> None:
    with pytest.raises(MachineError, match="E0902"), machine_errors("/a", "writing"):
        raise MemoryError
    side = module.Side("E1203", "{doing} failed: {reason}", {}, "look")
    with pytest.raises(MemoryError), module.SystemErrors(side, "/a", "reading"):
        raise MemoryError
    with (
        pytest.raises(MachineError, match=r"reading failed: no.*E1203") as caught,
        module.SystemErrors(side, "/a", "reading"),
    ):
        raise OSError(errno.EIO, "no")
    assert caught.value.remedy == "look"
    with pytest.raises(ValueError, match="x"), module.SystemErrors(side, "/a", "reading"):
        raise ValueError("x")


# -- a checkpoint from anywhere ----------------------------------------------------------------------------------------


def test_a_checkpoint_in_memory(tmp_path: Path) -> None:
    """From another storage the same bytes, ids and verdicts come as from a directory; it is left closed."""
    root = SPEC.write(tmp_path / "s", shards=3)
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "tool.jinja").write_text("{{ tool }}")
    (root / "readme.md").write_text("hello")
    memory = MemoryStorage(files_of(root), "memory")
    from_disk = run(root, tmp_path / "a")
    from_memory = run(memory, tmp_path / "b")
    assert from_memory.manifest.container_id == from_disk.manifest.container_id
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert "additional_chat_templates/tool.jinja" in from_memory.manifest.files
    assert memory.used == 0 and open_checkpoint(memory).fingerprint == open_checkpoint(root).fingerprint
    assert run(memory, tmp_path / "b").state == "already there"
    assert not verify(tmp_path / "b", source=memory).findings
    assert memory.used == 0


def test_what_is_wrong_in_memory_is_named(tmp_path: Path) -> None:
    """A missing shard, a change, a file that became short: the same codes, named as the storage names files."""
    memory = MemoryStorage(files_of(SPEC.write(tmp_path / "s", shards=3)), "memory")
    shard = "model-00002-of-00003.safetensors"
    whole = memory.files.pop(shard)
    with pytest.raises(DataError, match="E0403") as caught:
        run(memory, tmp_path / "o")
    assert caught.value.file == f"memory:{shard}"
    with pytest.raises(RequestError, match="E0401"):
        run(Place(memory, "nothing"), tmp_path / "o")
    memory.files[shard] = whole
    checkpoint = open_checkpoint(memory)

    def changes(_: int) -> None:
        memory.files[shard] = bytes([whole[0]]) + whole[1:-1] + bytes([whole[-1] ^ 1])

    with pytest.raises(DataError, match="E0703") as changed:
        run(memory, tmp_path / "o", progress=changes)
    assert changed.value.file == f"memory:{shard}" and checkpoint.stamps[shard] != memory.stamp(shard)
    memory.files[shard] = whole
    with pytest.raises(DataError, match="E0701") as short:
        run(memory, tmp_path / "p", progress=lambda _: memory.files.update(dict.fromkeys(checkpoint.shards, b"")))
    assert str(short.value.file).startswith("memory:model-")


# -- the page cache ----------------------------------------------------------------------------------------------------


def resident(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    with path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if not size:
            return 0
        pages = -(-size // PAGE)
        states = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle.fileno(), 0)
        try:
            assert libc.mincore(address, size, states) == 0
        finally:
            libc.munmap(address, size)
        return sum(state & 1 for state in states)


def fill_cache(root: Path) -> int:
    """Read every file of a directory as anybody would; the pages that are then in the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())  # what is not written yet cannot be let go of
                while handle.read(1 << 20):
                    pass
    return pages_of(root)


def pages_of(root: Path) -> int:
    return sum(resident(p) for p in root.rglob("*") if p.is_file())


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A source of 12 MB; the test is skipped where the page cache takes no advice (a file system in memory)."""
    root = T_ORDER.having(hidden=256, intermediate=256, experts=8, layers=3).write(tmp_path / "s", shards=3)
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))
    with probe.open("rb") as handle:
        os.fsync(handle.fileno())
        handle.read()
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(probe):
        pytest.skip("the page cache of this file system takes no advice")
    return root


BOUND = 0.01
"""The share of a source's pages that may be in the page cache after a job."""


@pytest.mark.parametrize("warm", [True, False])
def test_a_source_is_not_left_in_the_page_cache(big: Path, tmp_path: Path, warm: bool) -> None:
    """After a conversion, and after a comparison with the source, at most a hundredth of its pages is there."""
    total = fill_cache(big)
    assert total > 2000
    if not warm:
        for path in big.iterdir():
            with path.open("rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    run(big, tmp_path / "o")
    assert pages_of(big) <= BOUND * total
    if warm:
        fill_cache(big)
    fill_cache(tmp_path / "o")
    assert not verify(tmp_path / "o", source=big).findings
    assert pages_of(big) <= BOUND * total
    weights = sum(resident(p) for p in (tmp_path / "o").glob("*.safetensors"))
    assert weights <= BOUND * total  # nor are the container's own


def test_during_a_conversion_a_window_is(big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile no more than the window, what is being read, and the pages on their edges."""
    monkeypatch.setattr(module, "WINDOW", 1 << 20)
    total, seen = fill_cache(big), list[int]()
    done = 0

    def look(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done > 6 << 20:
            seen.append(pages_of(big))

    run(big, tmp_path / "o", workers=1, progress=look)
    assert seen and max(seen) < total * 0.75 and seen[-1] < total / 4


def test_what_is_read_later_stays(big: Path) -> None:
    """Two places of a file are read in turns: what lies between them, and behind, stays until it is read."""
    shard = max(big.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    fill_cache(big)
    pages, half = resident(shard), shard.stat().st_size // 2
    with LocalDirectory(big, once=True) as source, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", 1 << 18)
        for number in range(8):
            for start in (0, half):
                source.read_into(shard.name, start + (number << 17), memoryview(bytearray(1 << 17)))
        assert resident(shard) >= pages - 2 * 8 * 32 - 2
    assert not resident(shard)
    fill_cache(big)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "READAHEAD", 0)
        with LocalDirectory(big, once=True) as source:
            source.read_into(shard.name, 0, memoryview(bytearray(shard.stat().st_size)))
        assert not resident(shard)


def test_whole_pages_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on the edges too: the system itself would keep a page of which a part is named."""
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(os, "posix_fadvise", lambda _, first, nbytes, __: asked.append((first, nbytes)))
    module.forget(0, 5000, 100, beyond=0)
    module.forget(0, 4096, 4096, beyond=0)
    module.forget(0, 4095, 2, beyond=0)
    module.forget(0, 9000, 0)
    assert asked == [(PAGE, PAGE), (PAGE, PAGE), (0, 2 * PAGE), (2 * PAGE, PAGE + module.READAHEAD)]


def test_ranges() -> None:
    """Against the set of the bytes themselves."""
    draw = random.Random(3)
    for _ in range(200):
        ranges, held = Ranges(), set[int]()
        for _ in range(draw.randrange(1, 12)):
            first = draw.randrange(60)
            end = first + draw.randrange(1, 9)
            ranges.add(first, end)
            held |= set(range(first, end))
            low, high = ranges.around(first, end, 3)
            near = [n for n in range(first - 3, end + 3) if set(range(min(n, first), max(n + 1, end))) <= held]
            assert (low, high) == (near[0], near[-1] + 1)
        found = list(ranges)
        assert {n for a, b in found for n in range(a, b)} == held and found == sorted(found)
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(found))


def test_a_plan_leaves_data_where_it_is(big: Path) -> None:
    """Only headers are read for a plan: what somebody else keeps in the page cache behind them stays."""
    total = fill_cache(big)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "READAHEAD", 64 << 10)
        open_checkpoint(big)
    assert pages_of(big) > total * 0.9


def test_letting_go_costs_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds of conversions of 48 MB, with and without in turn: the quickest of each within a fifth."""
    big = T_ORDER.having(hidden=512, intermediate=256, experts=16, layers=3, mtp=False).write(tmp_path / "s", shards=3)
    monkeypatch.setattr(module, "READAHEAD", 64 << 10)  # as little of these shards as 16 MiB are of real ones
    run(big, tmp_path / "warm", "bf16", workers=1)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(7):
        for advice in (number % 2 == 0, number % 2 == 1):
            with monkeypatch.context() as patch:
                if not advice:
                    patch.setattr(module, "forget", lambda *_, **__: None)
                fill_cache(big)
                begin = time.process_time()
                run(big, tmp_path / f"{number}-{advice}", "bf16", workers=1)
                seconds[advice].append(time.process_time() - begin)
    assert min(seconds[True]) < 1.2 * min(seconds[False]), seconds


def test_what_is_written_through_the_page_cache_does_not_stay(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system takes no direct writes, a container's weights are let go of once they are durable."""
    monkeypatch.setattr(writing, "O_DIRECT", 0)
    run(big, tmp_path / "o", "bf16")
    weights = list((tmp_path / "o").glob("*.safetensors"))
    total = sum(p.stat().st_size for p in weights) // PAGE
    assert sum(map(resident, weights)) <= BOUND * total


def test_files_kept_are_left_alone(big: Path) -> None:
    """A directory keeps its pages, as one does that is mapped, unless it is read once."""
    path = max(big.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    fill_cache(big)
    pages = resident(path)
    place_of(path).read_bytes()
    with LocalDirectory(big) as kept:
        kept.read_into(path.name, 0, memoryview(bytearray(path.stat().st_size)))
    assert resident(path) == pages > 1000
    place_of(path, once=True).read_bytes()
    assert not resident(path)


def test_an_opener_that_names_no_file(tmp_path: Path) -> None:
    """Also what is refused without a name gets the file's."""

    def refuse(path: Path, flags: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output") as caught:
        LocalDirectory(tmp_path, opener=refuse).read_into("f", 0, memoryview(bytearray(1)))
    assert str(caught.value.filename) == str(tmp_path / "f")
