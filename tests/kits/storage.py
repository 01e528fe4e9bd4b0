"""What every storage must do: a class of tests, which a storage's own class of tests subclasses.

class TestMine(StorageTests):
    def storage(self, files: dict[str, bytes], tmp_path: Path) -> Storage: ...
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kits.files import FilesByName
from pagestone.formats.digests import Hasher, digest
from pagestone.formats.storage import PIECE, Kind, Place, Stamp, Storage, hash_file, place_of

BIG = random.Random(0).randbytes(2 * PIECE + 77)
FILES = {
    "config.json": b'{"a": 1}',
    "empty.txt": b"",
    "model.safetensors": BIG,
    "Ünïcode näme": b"x",
    "folder/one.jinja": b"{{ one }}",
    "folder/two.jinja": b"{{ two }}",
}


class MemoryStorage(FilesByName):
    """A storage whose files are in memory: the second one, and the least a storage must do."""

    files: dict[str, bytes]

    def __init__(self, files: dict[str, bytes], name: str = "memory") -> None:
        super().__init__(files, name)
        self.reads: list[tuple[str, int, int]] = []
        """(name, offset, bytes asked for) of every read."""
        self.used = 0
        """How many `with` statements are open."""

    def size(self, name: str) -> int:
        return len(self.file(name))

    def stamp(self, name: str) -> Stamp:
        version = -1 - int.from_bytes(digest(self.file(name))[:7], "big")
        return self.size(name), version, version

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        self.reads.append((name, offset, len(buffer)))
        data = self.file(name)[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def __enter__(self) -> MemoryStorage:
        self.used += 1
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.used -= 1


class StorageTests:
    """The tests. A subclass says how to make a storage, and, if its files can change, how to change one."""

    def storage(self, files: dict[str, bytes], tmp_path: Path) -> Storage:
        """A storage that holds these files and nothing else."""
        raise NotImplementedError

    def change(self, storage: Storage, name: str, data: bytes) -> None:
        """Give a file other contents; a storage whose files cannot change skips."""
        pytest.skip("its files cannot change")

    @pytest.fixture
    def made(self, tmp_path: Path) -> Storage:
        return self.storage(FILES, tmp_path)

    def test_names(self, made: Storage) -> None:
        """Everything at the top, then in a folder, in order of the bytes of names."""
        assert made.names() == ["config.json", "empty.txt", "folder", "model.safetensors", "Ünïcode näme"]
        assert made.names("folder") == ["one.jinja", "two.jinja"]

    def test_kinds(self, made: Storage) -> None:
        """A file, a folder, nothing; the storage itself is a folder."""
        assert {made.kind(n) for n in FILES} == {Kind.FILE} and all(made.holds(n) for n in FILES)
        assert made.kind() is Kind.FOLDER and made.kind("folder") is Kind.FOLDER
        assert made.kind("nothing") is None and made.kind("folder/three.jinja") is None
        assert made.kind("config.json/x") is None

    def test_sizes(self, made: Storage) -> None:
        """Lengths in bytes; stamps begin with them."""
        assert {n: made.size(n) for n in FILES} == {n: len(data) for n, data in FILES.items()}
        for name, data in FILES.items():
            stamp = made.stamp(name)
            assert stamp[0] == len(data) and len(stamp) == 3 and stamp == made.stamp(name)
            mode = made.mode(name)
            assert mode is None or 0 <= mode <= 0o7777

    @pytest.mark.parametrize("opened", [False, True])
    def test_reads(self, made: Storage, opened: bool) -> None:
        """Any range of any file, nothing beyond what was asked for; fewer bytes only where the file ends."""
        if opened:
            with made, made:  # may be nested
                self.read_ranges(made)
            self.read_ranges(made)  # and is usable after it
        else:
            self.read_ranges(made)

    @staticmethod
    def read_ranges(made: Storage) -> None:
        draw = random.Random(1)
        for name, data in FILES.items():
            ranges = [(0, len(data)), (0, 0), (0, len(data) + 9), (len(data), 5), (len(data) + 5000, 5)]
            ranges += [(draw.randrange(len(data) + 1), draw.randrange(9000)) for _ in range(40)]
            for offset, nbytes in ranges:
                buffer = bytearray(b"\xee" * (nbytes + 8))
                got = made.read_into(name, offset, memoryview(buffer)[4 : 4 + nbytes])
                expected = data[offset : offset + nbytes]
                assert got == len(expected), (name, offset, nbytes)
                assert buffer[4 : 4 + got] == expected and buffer[:4] == buffer[4 + nbytes :] == b"\xee" * 4

    def test_places(self, made: Storage) -> None:
        """What is asked of a place is asked of its storage."""
        root = place_of(made)
        assert [p.name for p in (root / "folder").entries()] == ["one.jinja", "two.jinja"]
        for name, data in FILES.items():
            place = root / name
            assert place.read_bytes() == data and place.read(1, 3) == data[1:4] and place.is_file()
            assert str(place) == made.describe(name) and place.size() == len(data)
            assert place.name == name.rpartition("/")[2]
        assert root.is_dir() and not (root / "nothing").exists()

    def test_hashing(self, made: Storage) -> None:
        """Whole files and ranges, in pieces that add up."""
        for name, data in FILES.items():
            hasher, told = Hasher(), list[int]()
            assert Place(made, name).hash(hasher, told.append) == len(data) == sum(told)
            assert hasher.digest() == digest(data) and all(0 < n <= PIECE for n in told)
        for offset, nbytes in ((0, 5), (PIECE - 1, 2), (7, PIECE), (3, PIECE + 1), (len(BIG) - 4, 10), (9, 0)):
            hasher = Hasher()
            done = hash_file(Place(made, "model.safetensors").read_into, hasher, offset, nbytes)
            assert hasher.digest() == digest(BIG[offset : offset + nbytes]) and done == len(
                BIG[offset : offset + nbytes]
            )

    def test_names_in_errors(self, made: Storage) -> None:
        """What is not there, or is no file, is an `OSError` that names it as `describe` does."""
        room = memoryview(bytearray(4))
        for use in (made.size, made.stamp, made.mode, lambda name: made.read_into(name, 0, room)):
            with made, pytest.raises(FileNotFoundError) as caught:
                use("nothing")
            assert caught.value.filename is not None and str(caught.value.filename) == made.describe("nothing")
        with pytest.raises(OSError, match="folder"):
            made.read_into("folder", 0, room)
        with pytest.raises(OSError, match=r"config\.json"):
            made.names("config.json")
        assert made.describe("folder/one.jinja").endswith("folder/one.jinja")
        assert made.describe("config.json") != made.describe("empty.txt")

    def test_many_threads(self, made: Storage) -> None:
        """Readers share a storage, also while the `with` statements of others end."""
        start = threading.Barrier(8)

        def one(number: int) -> bool:
            draw = random.Random(number)
            start.wait()
            for _ in range(60):
                offset, buffer = draw.randrange(len(BIG) - 5000), bytearray(5000)
                with made:
                    made.read_into("model.safetensors", offset, memoryview(buffer))
                    if buffer != BIG[offset : offset + 5000]:
                        return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(8)))

    @pytest.mark.parametrize("data", [b'{"a": 2}', b'{"a": 10}', b""])
    def test_stamps_tell_a_change(self, made: Storage, data: bytes) -> None:
        """Other contents have another stamp, be they as long."""
        before, other = made.stamp("config.json"), made.stamp("empty.txt")
        self.change(made, "config.json", data)
        assert made.stamp("config.json") != before and made.stamp("empty.txt") == other
        assert Place(made, "config.json").read_bytes() == data
