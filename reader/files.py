"""Files read past the page cache, or mapped."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

from pagestone.formats.errors import MachineError
from pagestone.formats.layout import PAGE

READAHEAD = 16 << 20
"""Bytes: what a kernel may read beyond what it was asked for."""
RESTORE = "restore the file from a copy, or convert again"
"""What to do about a damaged file."""


class DirectFile:
    """A file read past the page cache where the file system allows it; `mode` is "direct" or "buffered".

    Offsets and lengths are multiples of 4096 and buffers page-aligned; the file itself may end anywhere.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path = path
        self.mode = "buffered"
        flags = os.O_RDONLY | os.O_CLOEXEC
        with self._errors("opening"):
            handle = _open_direct(path, flags) if direct else None
            self._handle = os.open(path, flags) if handle is None else handle
        if handle is not None or (direct and _no_cache(self._handle)):
            self.mode = "direct"

    def _errors(self, doing: str) -> MachineErrors:
        return MachineErrors(self.path, doing)

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from `offset`; the bytes read, fewer only where the file ends."""
        done = 0
        with self._errors("reading"):
            while done < len(target):
                got = os.preadv(self._handle, [target[done:]], offset + done)
                done += got
                if not got or got % PAGE:
                    break
            if self.mode == "buffered" and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._handle, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def forget(self, nbytes: int) -> None:
        """Ask the page cache to let go of the file's first bytes: its table was read through it, and much behind it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, 0, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close it; may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor with O_DIRECT that was read from once, or None where there is no such thing.

    A file system says no (EINVAL) when the file is opened, or when it is first read.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    handle = -1
    try:
        handle = os.open(path, flags | os.O_DIRECT)
        os.preadv(handle, [mmap.mmap(-1, PAGE)], 0)
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    return handle


def _no_cache(handle: int) -> bool:
    """macOS has F_NOCACHE instead of O_DIRECT. Written for it, untested."""
    import fcntl

    if not hasattr(fcntl, "F_NOCACHE"):
        return False
    fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
    return True


class MachineErrors:
    """Turns an `OSError` into a `MachineError` (E1203) that names the file."""

    def __init__(self, path: Path, doing: str) -> None:
        self._path, self._doing = path, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise MachineError(
                f"{self._doing} failed: {error.strerror or error}",
                code="E1203",
                file=self._path,
                remedy="check the disk and its log; the container may have to be restored from a copy",
            ) from None


def map_file(path: Path) -> mmap.mmap:
    """A private, writable map of a whole file (torch takes no read-only memory); the file cannot change through it."""
    with MachineErrors(path, "mapping"), path.open("rb") as handle:
        return mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
