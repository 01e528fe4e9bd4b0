"""Tables by rows: the bytes of the file, each row once, compared with what it was, in bounded memory."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from kits.inference import flip

from pagestone.formats.digests import short_digest
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.reader.errors import ClosedError
from pagestone.reader.rows import AT_ONCE, NEAR, FileRows, MadeRows, RowDigests, cached_rows, memory_of

ROWS = 600


def table(root: Path, size: int, offset: int = 1000, rows: int = ROWS) -> tuple[Path, TensorEntry, np.ndarray]:
    """A file with a table of random rows of `size` bytes in it, at an offset that is no page."""
    values = np.random.default_rng(size).integers(0, 256, (rows, size), np.uint8)
    path = root / "table"
    path.write_bytes(bytes(offset) + values.tobytes() + b"behind it")
    return path, TensorEntry("embed_tokens.weight", "BF16", (rows, size // 2), offset, rows * size), values


def digests(entry: TensorEntry, values: np.ndarray, piece: int = 1 << 16) -> np.ndarray:
    made, data = RowDigests(entry), memoryview(values.tobytes())
    for at in range(0, len(data), piece):
        made.feed(data[at : at + piece])
    return made.digests


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [2, 512, 4096, 5000, 300_000])
def test_rows_are_those_of_the_file(tmp_path: Path, size: int, direct: bool) -> None:
    """In the order asked for, repeated ids too; the first and the last row; rows that cross pages, and larger ones."""
    rows = ROWS if size < 5000 else 12
    path, entry, values = table(tmp_path, size, rows=rows)
    opened = FileRows(path, entry, digests(entry, values), direct=direct)
    for ids in ([0], [rows - 1], [5, 3, 5, 5, 0, rows - 1, 3], list(range(rows))[::-1], []):
        found = opened.read(np.array(ids, np.int64))
        assert found.dtype == np.uint8 and np.array_equal(found, values[ids].reshape(len(ids), size)), ids
    opened.close()
    opened.close()


def test_each_row_is_read_once_while_it_is_kept(tmp_path: Path) -> None:
    """Rows used last stay; the one used longest ago goes first; a hit counts as a use."""
    path, entry, values = table(tmp_path, 4096)
    opened = FileRows(path, entry, None, room=3 * 4096 + 5)

    def read(*ids: int) -> tuple[int, int]:
        rows, hits = opened.counters.rows, opened.counters.hits
        assert np.array_equal(opened.read(np.array(ids)), values[list(ids)])
        return opened.counters.rows - rows, opened.counters.hits - hits

    assert read(1, 200, 400) == (3, 0)
    assert read(1, 1, 400) == (0, 2)  # a row that is asked for twice is one use
    assert read(500) == (1, 0)  # 200 goes
    assert read(1, 400, 500) == (0, 3)
    assert read(200) == (1, 0)  # 1 goes
    assert read(400, 500) == (0, 2) and read(1) == (1, 0)
    assert read(*range(0, 600, 50)) == (10, 2)  # more at once than are kept: 200 and 500 are there, 1 is not asked for


def test_near_rows_are_read_together(tmp_path: Path) -> None:
    """What lies between near rows is read with them; far ones are read alone, by their pages."""
    path, entry, _ = table(tmp_path, 4096)
    opened = FileRows(path, entry, None)
    if opened.mode == "buffered":
        pytest.skip("this file system has no direct reads")
    opened.read(np.array([10]))
    assert opened.counters.bytes_read == 2 * 4096  # it crosses a page
    opened.read(np.array([100, 104]))
    assert opened.counters.bytes_read == 8 * 4096
    opened.read(np.array([200, 200 + NEAR // 4096 + 2]))
    assert opened.counters.bytes_read == 12 * 4096
    before = opened.counters.bytes_read
    opened.read(np.arange(300, 500))
    assert opened.counters.bytes_read - before <= 200 * 4096 + -(-200 * 4096 // AT_ONCE) * 3 * 4096


def test_ids_that_the_table_lacks(tmp_path: Path) -> None:
    """E1261, negative ones too: no neighbour's bytes are given out."""
    path, entry, _ = table(tmp_path, 64)
    opened = FileRows(path, entry, None)
    for ids, word in (([3, ROWS], "600"), ([-1, 4], "-1"), ([1 << 40], str(1 << 40))):
        with pytest.raises(RequestError, match=rf"below 600 expected, found {word}.*E1261"):
            opened.read(np.array(ids))


@pytest.mark.parametrize("piece", [1, 7, 64, 1000, 1 << 20])
def test_digests_of_rows(tmp_path: Path, piece: int) -> None:
    """However the bytes come in pieces."""
    _, entry, values = table(tmp_path, 100, rows=40)
    assert digests(entry, values, piece).tolist() == [short_digest(row.tobytes()) for row in values]


def test_a_row_that_changed(tmp_path: Path) -> None:
    """E1258 names file and row; its neighbours are given out as before. Also a file that became shorter."""
    path, entry, values = table(tmp_path, 4096)
    opened = FileRows(path, entry, digests(entry, values), room=4096)
    flip(path, entry.offset + 77 * 4096 + 4095, 7)
    with pytest.raises(DataError, match=r"row 77: xxh3 .*E1258") as error:
        opened.read(np.array([76, 77]))
    assert str(path) in str(error.value) and "embed_tokens.weight" in str(error.value)
    assert np.array_equal(opened.read(np.array([78, 76])), values[[78, 76]])
    with path.open("r+b") as handle:
        handle.truncate(entry.offset + 500 * 4096 + 17)
    with pytest.raises(DataError, match=r"row 500: .*the end of the file.*E1258"):
        opened.read(np.array([500]))
    unchecked = FileRows(path, entry, None)
    with pytest.raises(DataError, match=r"row 500: .*the end of the file.*E1258"):
        unchecked.read(np.array([499, 500]))


def test_what_it_takes(tmp_path: Path) -> None:
    """The bytes that a plan is told are those of its buffers."""
    for size, room in ((4096, 1 << 20), (4096, 1 << 30), (100, 5), (300_000, 1 << 20)):
        path, entry, values = table(tmp_path, size, rows=20)
        made = digests(entry, values)
        opened = FileRows(path, entry, made, room=room)
        held = -(-opened._kept.nbytes // 4096) * 4096 + made.nbytes + len(opened._buffer)
        assert held == memory_of(entry, room)
        assert cached_rows(entry, room) == max(1, min(20, room // size)) == len(opened._kept)


def test_many_threads(tmp_path: Path) -> None:
    """Each gets its own rows."""
    path, entry, values = table(tmp_path, 512)
    opened = FileRows(path, entry, digests(entry, values), room=40 * 512)
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = np.random.default_rng(seed)
        for _ in range(30):
            ids = source.integers(0, ROWS, 20)
            if not np.array_equal(opened.read(ids), values[ids]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_that_are_made(tmp_path: Path) -> None:
    """By the same rules as those of a file: each once while it is kept, ids checked."""
    _, entry, values = table(tmp_path, 64)
    asked: list[int] = []

    def make(row: int, into: memoryview) -> None:
        asked.append(row)
        into[:] = values[row].tobytes()

    opened = MadeRows(tmp_path, entry, make, room=2 * 64)
    assert np.array_equal(opened.read(np.array([5, 3, 5])), values[[5, 3, 5]]) and asked == [3, 5]
    assert np.array_equal(opened.read(np.array([3, 9])), values[[3, 9]]) and asked == [3, 5, 9]
    assert (opened.counters.rows, opened.counters.hits, opened.counters.bytes_read) == (3, 1, 3 * 64)
    with pytest.raises(RequestError, match="E1261"):
        opened.read(np.array([ROWS]))


def test_a_closed_table(tmp_path: Path) -> None:
    """E1270, as for stores; no read of a descriptor that may be another file's by now."""
    path, entry, values = table(tmp_path, 64)
    for opened in (FileRows(path, entry, None), MadeRows(tmp_path, entry, lambda row, into: None)):
        opened.read(np.array([1]))
        opened.close()
        opened.close()
        with pytest.raises(ClosedError, match="E1270"):
            opened.read(np.array([1]))
    assert values.shape == (ROWS, 64)
