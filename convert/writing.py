"""Files of the container written past the page cache where the file system allows it.

The page cache gains a converter nothing (every byte is written once and read by nobody here), and filling it makes
fsync long and other programs slow.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from pagestone.convert.machine import DIRECT, RESERVE
from pagestone.formats.digests import Hasher
from pagestone.formats.layout import PAGE, align_up
from pagestone.formats.storage import PIECE, UNSUPPORTED, Stamp, forget, named, page_buffer, stamp_of

O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class OutputFile:
    """A file of known length whose whole pages are written at known offsets, from any thread.

    `lacks` is told what the file system turns out not to have. Every `OSError` names the file.
    """

    def __init__(self, path: Path, nbytes: int, lacks: set[str]) -> None:
        self.path, self.nbytes, self._lacks = path, nbytes, lacks
        self.stamp: Stamp = (0, 0, 0)
        """The file's stamp, once it is finished."""
        self._handle = self._create()
        self._open = True
        try:
            self._reserve()
        except BaseException:
            self.close()
            raise

    def _create(self) -> int:
        self.path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(self.path, flags | O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        self._lacks.add(DIRECT)
        self.path.unlink(missing_ok=True)  # some file systems refuse after they have made the file
        return os.open(self.path, flags, 0o644)

    def _reserve(self) -> None:
        """Take the file's space; a full disk shows here, before any work for this file is done."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            with named(self.path):
                os.posix_fallocate(self._handle, 0, max(1, self.nbytes))
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EPERM}:
                raise
            self._lacks.add(RESERVE)

    def write(self, data: memoryview, offset: int) -> None:
        """Write whole pages from a page-aligned buffer at a page-aligned offset."""
        if offset % PAGE or len(data) % PAGE:
            raise ValueError(f"whole pages expected, found {len(data)} bytes at {offset}")
        done = 0
        with named(self.path):
            while done < len(data):
                done += self._write_some(data[done:], offset + done)

    def _write_some(self, data: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._handle, data, offset)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        # a file system may take the flag and then refuse the write; another thread may have found out already
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        if flags & O_DIRECT:
            self._lacks.add(DIRECT)
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~O_DIRECT)
        return os.pwrite(self._handle, data, offset)

    def finish(self) -> None:
        """Cut the file to its length, make it durable and close it."""
        with named(self.path):
            os.ftruncate(self._handle, self.nbytes)
            os.fsync(self._handle)
            forget(self._handle, 0, self.nbytes)  # where it had to go through the page cache
            self.stamp = stamp_of(os.fstat(self._handle))
            self.close()

    def close(self) -> None:
        """Close without promising anything; may be called twice."""
        if self._open:
            self._open = False
            os.close(self._handle)


class StreamWriter:
    """Writes a file from front to back in chunks, hashing what it writes."""

    def __init__(self, path: Path, nbytes: int, lacks: set[str]) -> None:
        self._file = OutputFile(path, nbytes, lacks)
        self._buffer = memoryview(page_buffer(PIECE))
        self._fill = 0
        self._offset = 0
        self._hasher = Hasher()

    @property
    def stamp(self) -> Stamp:
        """The file's stamp, once it is finished."""
        return self._file.stamp

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        done = 0
        while done < len(view):
            take = min(PIECE - self._fill, len(view) - done)
            self._buffer[self._fill : self._fill + take] = view[done : done + take]
            self._fill += take
            done += take
            if self._fill == PIECE:
                self._flush()

    def _flush(self) -> None:
        end = align_up(self._fill, PAGE)
        self._buffer[self._fill : end] = bytes(end - self._fill)
        self._file.write(self._buffer[:end], self._offset)
        self._offset += self._fill
        self._fill = 0

    def finish(self) -> bytes:
        """Write the rest, make the file durable, and return its digest (16 bytes)."""
        if self._fill:
            self._flush()
        if self._offset != self._file.nbytes:  # a file of another length than planned must not be published
            raise ValueError(f"{self._file.path}: {self._file.nbytes} bytes expected, {self._offset} were written")
        self._file.finish()
        return self._hasher.digest()

    def close(self) -> None:
        """Give up without promising anything; may be called after `finish`."""
        self._file.close()
