"""Files of the container written past the page cache where the file system allows it.

The page cache gains a converter nothing (every byte is written once and read by nobody here), and filling it makes
fsync long and other programs slow.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pagestone.convert.reading import page_buffer
from pagestone.formats.digests import Hasher
from pagestone.formats.layout import PAGE, align_up

CHUNK = 1 << 20


class OutputFile:
    """A file of known length whose whole pages are written at known offsets, from any thread."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._handle = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system knows no O_DIRECT (tmpfs)
                raise
            path.unlink(missing_ok=True)
            self._handle = os.open(path, flags, 0o644)
        try:
            # a full disk shows here, before any work for this file is done
            os.posix_fallocate(self._handle, 0, max(1, nbytes))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                os.close(self._handle)
                raise
        self._open = True

    def write(self, data: memoryview, offset: int) -> None:
        """Write whole pages from a page-aligned buffer at a page-aligned offset."""
        assert offset % PAGE == 0 and len(data) % PAGE == 0, (offset, len(data))
        done = 0
        while done < len(data):
            done += os.pwrite(self._handle, data[done:], offset + done)

    def finish(self) -> None:
        """Cut the file to its length, make it durable and close it."""
        os.ftruncate(self._handle, self.nbytes)
        os.fsync(self._handle)
        self.close()

    def close(self) -> None:
        """Close without promising anything; may be called twice."""
        if self._open:
            self._open = False
            os.close(self._handle)


class StreamWriter:
    """Writes a file from front to back in chunks, hashing what it writes."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._file = OutputFile(path, nbytes)
        self._buffer = page_buffer(CHUNK)
        self._fill = 0
        self._offset = 0
        self._hasher = Hasher()

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        done = 0
        while done < len(view):
            take = min(CHUNK - self._fill, len(view) - done)
            self._buffer[self._fill : self._fill + take] = view[done : done + take]
            self._fill += take
            done += take
            if self._fill == CHUNK:
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
        assert self._offset == self._file.nbytes, (self._file.path, self._offset, self._file.nbytes)
        self._file.finish()
        return self._hasher.digest()

    def close(self) -> None:
        """Give up without promising anything; may be called after `finish`."""
        self._file.close()
