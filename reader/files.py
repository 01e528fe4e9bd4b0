"""Files read past the page cache, or mapped."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagestone.formats.errors import MachineError
from pagestone.formats.layout import PAGE

READAHEAD = 16 << 20
"""Bytes: what a kernel may read beyond what it was asked for."""
RESTORE = "restore the file from a copy, or convert again"
"""What to do about a damaged file."""
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""How file systems say that they do not offer a service."""
THROUGH_CACHE = "the file system refuses O_DIRECT: reading through the page cache (mode buffered)"
REMEDIES = {
    errno.EACCES: "let this user read the file and enter its directories",
    errno.EPERM: "let this user read the file and enter its directories",
    errno.ENOENT: f"{RESTORE}: it went away",
    errno.EMFILE: "raise the limit of open files (ulimit -n): a container takes one for every layer",
    errno.ENFILE: "raise the limit of open files: a container takes one for every layer",
    errno.ENOMEM: "free memory, or raise the limit of maps (vm.max_map_count)",
    errno.ENODEV: "copy the container to a file system whose files can be mapped; runs need no map with --io direct",
}
"""What to do about errors of the system that are not the disk's."""


class DirectFile:
    """A file read past the page cache where the file system allows it; `mode` is "direct" or "buffered".

    Offsets and lengths are multiples of 4096 and buffers page-aligned; the file itself may end anywhere. A file system
    may also refuse later what it took at first: then the mode becomes "buffered" and `note` is told. For many threads.
    """

    def __init__(self, path: Path, *, direct: bool = True, note: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self.mode = "buffered"
        self._note, self._lock = note, threading.Lock()
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
                direct = self.mode == "direct"
                try:
                    got = os.preadv(self._handle, [target[done:]], offset + done)
                except OSError as error:
                    if not direct or error.errno not in REFUSALS:
                        raise
                    self._give_up()
                    continue
                done += got
                if not got:
                    break
                if direct and got % PAGE:
                    if offset + done >= os.fstat(self._handle).st_size:
                        break
                    self._give_up()  # part of a page: from there a direct read cannot go on
            if self.mode == "buffered":
                forget(self._handle, offset, done)
        return done

    def _give_up(self) -> None:
        """From now on through the page cache; the file stays open, also if its name is another's by now."""
        import fcntl

        with self._lock:
            if self.mode == "buffered":
                return
            if hasattr(os, "O_DIRECT"):
                flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
                fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.mode = "buffered"
        self._note(f"{self.path}: {THROUGH_CACHE}")

    def forget(self, nbytes: int) -> None:
        """Ask the page cache to let go of the file's first bytes: its table was read through it, and much behind it."""
        forget(self._handle, 0, nbytes)

    def close(self) -> None:
        """Close it; may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor with O_DIRECT that was read from once, or None where there is no such thing.

    A file system says no (`REFUSALS`) when the file is opened, or when it is first read.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    handle = -1
    try:
        handle = os.open(path, flags | os.O_DIRECT)
        os.preadv(handle, [private_buffer(PAGE)], 0)
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        if error.errno in REFUSALS:
            return None
        raise
    return handle


def forget(handle: int, offset: int, nbytes: int) -> None:
    """Ask the page cache to let go of bytes of a file (0: all). Only advice: a system that takes none is no error."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def advise(mapped: mmap.mmap, name: str, *where: int) -> None:
    """Tell the kernel how a map will be used, such as "MADV_RANDOM". Only advice, too."""
    if hasattr(mmap, name):
        with suppress(OSError):
            mapped.madvise(getattr(mmap, name), *where)


def private_buffer(nbytes: int) -> mmap.mmap:
    """Page-aligned zeroed memory of this process alone: a process forked from it gets a copy, not the same bytes."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MachineError(
            f"out of memory: {nbytes:,} bytes for what is read: {error.strerror}",
            code="E0902",
            remedy="give a smaller --budget, or free memory",
        ) from None


def _no_cache(handle: int) -> bool:
    """macOS has F_NOCACHE instead of O_DIRECT. Written for it, untested."""
    import fcntl

    if not hasattr(fcntl, "F_NOCACHE"):
        return False
    try:
        fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
    except OSError:
        return False
    return True


class MachineErrors:
    """Turns an `OSError` into a `MachineError` (E1203) that names its file, by default `path`.

    Every read of the reader stands in one.
    """

    def __init__(self, path: Path, doing: str) -> None:
        self._path, self._doing = path, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise MachineError(
                f"{self._doing} failed: {error.strerror or error}",
                code="E1203",
                file=error.filename if isinstance(error.filename, str) else self._path,
                remedy=REMEDIES.get(
                    error.errno or 0, "check the disk and its log; the container may have to be restored from a copy"
                ),
            ) from None


def map_file(path: Path) -> mmap.mmap:
    """A private, writable map of a whole file (torch takes no read-only memory); the file cannot change through it."""
    with MachineErrors(path, "mapping"), path.open("rb") as handle:
        return mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
