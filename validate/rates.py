"""How fast this machine is, by short measurements: a disk, products, encoders, torch. Rates are bytes a second.

Each takes a fraction of a second. What other work does at the same time is in the numbers: it would be in the work
that they foretell.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats import native
from pagestone.formats.dtypes import Array, f32_to_bf16
from pagestone.formats.encodings import Codec
from pagestone.formats.layout import PAGE
from pagestone.formats.storage import DirectFile, page_buffer

READERS = 2
"""Threads that read at once, as many as `run` has by default."""
DISK_SECONDS = 0.7
"""How long a disk is read from."""
PROBE = 1 << 20
"""Bytes of the first read: it tells whether records are too large for the time there is."""
SECONDS = 0.05
"""How long each product and each encoder is measured."""
ROOM = 64 << 20
"""Bytes of matrices that a product goes through: more than the processor keeps close at hand."""
TORCH_ROOM = 128 << 20
"""The same for torch."""
DEFINITION_ROWS = 32
"""Rows of a matrix where the definitions in NumPy are measured: they are slow."""
HELD = 512
"""Bytes of a block of a file, as the system counts what a file takes."""


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What was read of some files: `reads` of about `size` bytes, "direct" or "buffered", by `threads` threads."""

    rate: float
    mode: str
    size: int
    reads: int
    seconds: float
    threads: int


def has_holes(path: Path) -> bool:
    """Whether parts of a file are on no disk: reading them is no measure of one. Raises `OSError`."""
    status = path.stat()
    return status.st_blocks * HELD < status.st_size * 9 // 10


def disk_rate(
    files: Sequence[Path], size: int, *, threads: int = READERS, seconds: float | None = None
) -> DiskRate | None:
    """Read `size` bytes at a time anywhere in `files` for about `seconds`; None where all are smaller than a page.

    Without `seconds` it takes `DISK_SECONDS`.

    A disk too slow for that is read in smaller pieces. Raises `OSError` naming the file.
    """
    seconds = DISK_SECONDS if seconds is None else seconds
    places = [(path, path.stat().st_size // PAGE) for path in files]
    places = [(path, pages) for path, pages in places if pages]
    if not places:
        return None
    opened = [DirectFile(path) for path, _ in places]
    try:
        for file, (_, pages) in zip(opened, places, strict=True):
            if file.mode == "buffered":  # what is in the page cache comes from no disk
                file.forget(pages * PAGE)
        measure = _Reading(opened, [pages for _, pages in places])
        probe, took = measure.read(min(size, PROBE))
        if took > seconds / 2:
            return DiskRate(probe / took, measure.mode, probe, 1, took, 1)
        piece = min(size, int(probe / max(took, 1e-6) * seconds / 4))
        begun = time.perf_counter()
        total, reads = measure.many(max(PAGE, piece // PAGE * PAGE), threads, begun + seconds)
        took = time.perf_counter() - begun
        return DiskRate(total / took, measure.mode, total // reads, reads, took, threads)
    finally:
        for file in opened:
            file.close()


class _Reading:
    """Reads at random places of files of so many pages."""

    def __init__(self, files: Sequence[DirectFile], pages: Sequence[int]) -> None:
        self._files, self._pages = files, pages

    @property
    def mode(self) -> str:
        return "direct" if all(f.mode == "direct" for f in self._files) else "buffered"

    def read(self, nbytes: int, into: Any = None) -> tuple[int, float]:
        """(bytes read, seconds) of one read; fewer than asked for where a file is shorter."""
        at = random.choices(range(len(self._files)), self._pages)[0]
        pages = min(self._pages[at], max(1, nbytes // PAGE))
        first = random.randrange(self._pages[at] - pages + 1) * PAGE
        target = memoryview(page_buffer(pages * PAGE) if into is None else into)[: pages * PAGE]
        begun = time.perf_counter()
        return self._files[at].read_into(target, first), time.perf_counter() - begun

    def many(self, nbytes: int, threads: int, until: float) -> tuple[int, int]:
        """(bytes, reads) of `threads` threads that begin none after `until`."""
        done: list[int] = []
        failed: list[OSError] = []

        def work() -> None:
            buffer = page_buffer(nbytes)
            try:
                while not failed:
                    done.append(self.read(nbytes, buffer)[0])
                    if time.perf_counter() >= until:
                        return
            except OSError as error:
                failed.append(error)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed:
            raise failed[0]
        return sum(done), len(done)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def repeated(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes: the mean of as many calls as there is time for, after one that warms up.

    The mean, because what other processes take of the processor is part of it.
    """
    begun = time.perf_counter()
    work()
    first = now = time.perf_counter()
    if first - begun > 4 * SECONDS:
        return first - begun
    calls = 0
    while now - first < SECONDS:
        work()
        calls, now = calls + 1, time.perf_counter()
    return (now - first) / calls


def _matrix(rows: int, columns: int) -> Array:
    """BF16 bits [rows, columns] of numbers such as weights are."""
    drawn = np.random.default_rng(0).standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
    return f32_to_bf16(drawn)


def _rows(rows: int) -> int:
    return min(rows, DEFINITION_ROWS) if native.isa() == native.NUMPY else rows


def encode_rate(codec: Codec, rows: int, columns: int) -> float:
    """Bytes of a BF16 source that one thread encodes in a second. Raises `LayoutError` as `codec.roles`."""
    source = _matrix(_rows(rows), columns)
    out = codec.allocate(*source.shape)
    return source.nbytes / repeated(lambda: codec.encode(source, "BF16", out))


def product_rate(codec: Codec, rows: int, columns: int, threads: int) -> float:
    """Bytes of stored matrices that a product with one token goes through in a second.

    The matrices together are larger than the processor's caches. Raises `LayoutError` as `codec.roles`.
    """
    rows = _rows(rows)
    first = codec.allocate(rows, columns)
    codec.encode(_matrix(rows, columns), "BF16", first)
    each = sum(array.nbytes for array in first.values())
    count = max(1, ROOM // each) if native.isa() != native.NUMPY else 1
    stored = [{role: array.copy() for role, array in first.items()} for _ in range(count)]
    token, out = f32_to_bf16(np.ones((1, columns), np.float32)), np.empty((1, rows), np.uint16)

    def work() -> None:
        for arrays in stored:
            codec.matmul(arrays, token, rows, columns, out=out, threads=threads)

    return count * each / repeated(work)


# -- torch ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TorchRates:
    """Of torch as it is set up: threads, bytes of BF16 weights a linear layer multiplies in a second, and the seconds
    that a small call takes with nearly nothing to compute."""

    threads: int
    linear: float
    call: float


def torch_rates(rows: int, columns: int) -> TorchRates:
    """Measure torch, which must be installed."""
    import torch

    with torch.inference_mode():
        count = -(-TORCH_ROOM // (2 * rows * columns))
        weights = [torch.full((rows, columns), 0.01, dtype=torch.bfloat16) for _ in range(count)]
        token = torch.ones(1, columns, dtype=torch.bfloat16)

        def through() -> None:
            for weight in weights:
                torch.nn.functional.linear(token, weight)

        linear = sum(2 * weight.numel() for weight in weights) / repeated(through)
        small, layer = torch.ones(1, 64, dtype=torch.bfloat16), torch.nn.Linear(64, 64, dtype=torch.bfloat16)

        def calls() -> None:
            for _ in range(10):
                (layer(small) * small).view(1, 8, 8).transpose(1, 2).float()

        return TorchRates(torch.get_num_threads(), linear, repeated(calls) / 50)
