"""The one place that touches bytes: a storage holds files by name, and everything that reads asks one.

`Storage` is all that a checkpoint needs to be read from: names, lengths, stamps, and bytes from an offset. The local
directory is the first; another one (ranges of a server's files, bytes made from a seed) is one more class that passes
the same tests (`tests/kits/storage.py`). Every error of a storage is an `OSError` that names the file; `SystemErrors`
turns it into the project's words, with the code and the remedies of whoever reads.

A job that reads 70 GB once must not push everything else out of the machine's page cache, so the local directory asks
it to let go of what was read, `WINDOW` bytes at a time and at the end.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self

from pagestone.formats.errors import MachineError
from pagestone.formats.layout import PAGE, align_up

PIECE = 1 << 20
"""Bytes: a file is hashed, and copied, in pieces of this size."""
WINDOW = 64 << 20
"""Bytes that may be read from a directory, all files together, before the page cache is asked to let go of them."""
READAHEAD = 16 << 20
"""Bytes: what a kernel may read beyond what it was asked for."""
FOLIO = 4 << 20
"""Bytes: the largest pieces in which kernels keep a file."""
UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""What file systems answer to a service they do not have."""
NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})

Stamp = tuple[int, int, int]
"""(length in bytes, modification time in ns, change time in ns) of a file: what a write cannot leave as it was.

The change time is the file system's own: no program can set it back. The inode is left out. Where change times are kept
it adds nothing, and some network file systems give a file another inode each time it is looked up. A storage that has
versions instead of times gives a negative number made from the version: another one differs, and none is a date.
"""


# -- errors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """How one side (what converts, what reads a container) tells an error of the operating system.

    `message` is filled with `reason` and `doing`; `remedies` are by errno, `otherwise` where there is none. `memory` is
    the remedy where memory is short; None lets `MemoryError` pass.
    """

    code: str
    message: str
    remedies: Mapping[int, str]
    otherwise: str
    memory: str | None = None

    def error(self, error: OSError, file: str | os.PathLike[str], doing: str) -> MachineError:
        """An `OSError` in the project's words; `file` is named where the error names none."""
        named_by = error.filename
        return MachineError(
            self.message.format(reason=error.strerror or str(error), doing=doing),
            code=self.code,
            file=os.fsdecode(named_by) if isinstance(named_by, str | bytes) and named_by else file,
            remedy=self.remedies.get(error.errno or 0, self.otherwise),
        )


class SystemErrors:
    """A context that turns `OSError` (and `MemoryError`) into the `MachineError` of a side, naming the file."""

    def __init__(self, side: Side, file: str | os.PathLike[str], doing: str) -> None:
        self._side, self._file, self._doing = side, file, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise self._side.error(error, self._file, self._doing) from error
        if isinstance(error, MemoryError) and self._side.memory is not None:
            message = f"out of memory while {self._doing}"
            raise MachineError(message, code="E0902", file=self._file, remedy=self._side.memory) from None


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an `OSError` that names no file (of a read, a write, an fsync) name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


# -- loops ------------------------------------------------------------------------------------------------------------

Read = Callable[[memoryview, int], int]
"""Read into a buffer from an offset; the bytes read, 0 only at the end."""


def read_fully(read: Read, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset`, however little each call gives; the bytes read, fewer only where the file ends."""
    done = 0
    while done < len(buffer):
        got = read(buffer[done:], offset + done)
        if not got:
            break
        done += got
    return done


class Updates(Protocol):
    """Anything that hashes."""

    def update(self, data: memoryview, /) -> None: ...


def hash_file(
    read: Read, hasher: Updates, offset: int = 0, nbytes: int | None = None, told: Callable[[int], Any] | None = None
) -> int:
    """Hash `nbytes` (None: all) of a file from `offset`, or what there is of them; the bytes hashed.

    `told` is called with the length of every piece.
    """
    room = PIECE if nbytes is None else max(1, min(PIECE, nbytes))
    buffer = memoryview(bytearray(room))
    done = 0
    while nbytes is None or done < nbytes:
        wanted = room if nbytes is None else min(room, nbytes - done)
        got = read_fully(read, buffer[:wanted], offset + done)
        hasher.update(buffer[:got])
        done += got
        if told is not None and got:
            told(got)
        if got < wanted:
            break
    return done


# -- the protocol -----------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """What a name of a storage is: `DANGLING` is a link that leads nowhere, `OTHER` a pipe, a device and their like."""

    FILE = "file"
    FOLDER = "folder"
    DANGLING = "dangling link"
    OTHER = "other"


class Storage(Protocol):
    """Files by name: `a.json`, or `folder/a.json`. For many threads.

    Every method raises `OSError` with the file's `filename` where the bytes, or facts of a file, cannot be had;
    `FileNotFoundError` if there is none. Within a `with` statement, which may be nested, it may keep files and
    connections open.
    """

    def names(self, folder: str = "") -> list[str]:
        """Names of everything in the storage, or in a folder of it (without the folder's), in order of their bytes."""

    def kind(self, name: str = "") -> Kind | None:
        """What there is of this name, links followed; None for nothing. "" is the storage itself."""

    def holds(self, name: str) -> bool:
        """Whether a file belongs to the storage; False for a link that leaves it."""

    def size(self, name: str) -> int:
        """Length in bytes."""

    def stamp(self, name: str) -> Stamp:
        """What changes when the file does."""

    def mode(self, name: str) -> int | None:
        """The permission bits of the file; None if the storage knows none."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; the bytes read, fewer only where the file ends."""

    def describe(self, name: str = "") -> str:
        """How messages name the file, or the storage itself."""

    def path(self) -> Path | None:
        """The directory, if it is one of this machine: only then files may be mapped, and read past the page cache."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A file (or a folder, or all) of a storage. Where a message needs a path, it is `describe`'s."""

    storage: Storage
    key: str = ""

    def __truediv__(self, name: str) -> Place:
        return Place(self.storage, f"{self.key}/{name}" if self.key else name)

    def __fspath__(self) -> str:
        return self.storage.describe(self.key)

    def __str__(self) -> str:
        return self.storage.describe(self.key)

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.key.rpartition("/")[2] or Path(self.storage.describe(self.key)).name

    def kind(self) -> Kind | None:
        """See `Storage.kind`."""
        return self.storage.kind(self.key)

    def exists(self) -> bool:
        """Whether there is something, links followed."""
        return self.kind() not in (None, Kind.DANGLING)

    def is_file(self) -> bool:
        """Whether it is a regular file, links followed."""
        return self.kind() is Kind.FILE

    def is_dir(self) -> bool:
        """Whether it is a folder, links followed."""
        return self.kind() is Kind.FOLDER

    def entries(self) -> list[Place]:
        """What is in a folder, in order of the bytes of names."""
        return [self / name for name in self.storage.names(self.key)]

    def path(self) -> Path | None:
        """Where it is on this machine; None if it is not."""
        root = self.storage.path()
        return None if root is None else root / self.key

    def holds(self) -> bool:
        """See `Storage.holds`."""
        return self.storage.holds(self.key)

    def size(self) -> int:
        """Length in bytes."""
        return self.storage.size(self.key)

    def stamp(self) -> Stamp:
        """See `Storage.stamp`."""
        return self.storage.stamp(self.key)

    def mode(self) -> int | None:
        """See `Storage.mode`."""
        return self.storage.mode(self.key)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """A `Read` of this file that fills the buffer."""
        return self.storage.read_into(self.key, offset, buffer)

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` from `offset`, or what there is of them."""
        data = bytearray(nbytes)
        got = self.read_into(memoryview(data), offset)
        return bytes(data[:got])

    def read_bytes(self) -> bytes:
        """All of a file."""
        return self.read(0, self.size() + 1)  # one more: a file that says nothing of its length is read, or fails

    def hash(self, hasher: Updates, told: Callable[[int], Any] | None = None) -> int:
        """Hash all of the file; its length."""
        with self.storage:
            return hash_file(self.read_into, hasher, told=told)


AnyPlace = str | os.PathLike[str] | Storage | Place
"""What names a storage, or a file of one: paths are those of this machine."""


def place_of(where: AnyPlace, *, once: bool = False) -> Place:
    """`where` as a place; the path of a file becomes a storage of that file alone, whose name is "".

    `once` is as in `LocalDirectory`, for paths.
    """
    if isinstance(where, Place):
        return where
    if isinstance(where, str | os.PathLike):
        return Place(LocalDirectory(where, once=once))
    return Place(where)


# -- the local directory ----------------------------------------------------------------------------------------------


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


def open_scattered(path: Path, flags: int) -> int:
    """An `opener` for files of which pieces here and there are read: the kernel reads nothing ahead of them."""
    handle = _open(path, flags)
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only advice
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
    return handle


class Ranges:
    """Ranges of a file, disjoint and in order."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._firsts, self._ends, strict=True)))

    def add(self, first: int, end: int) -> None:
        """Add the bytes from `first` to before `end`; what touches becomes one."""
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def around(self, first: int, end: int, nbytes: int) -> tuple[int, int]:
        """A range that was added, with up to `nbytes` on either side that were added too."""
        at = bisect_right(self._firsts, first) - 1
        return max(self._firsts[at], first - nbytes), min(self._ends[at], end + nbytes)


class LocalDirectory:
    """A directory of this machine. `opener` may hold files to more than `os.open` does.

    `once`: what is read here is read once. None of it stays in the page cache but, within a `with` statement, the last
    `WINDOW` bytes, and pages that somebody else has mapped, or written and not yet synced.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, once: bool = False, opener: Callable[[Path, int], int] = _open
    ) -> None:
        self._root, self._once, self._opener = Path(root), once, opener
        self._lock = threading.Lock()
        self._users = 0
        self._handles: dict[str, int] = {}
        self._read: dict[str, Ranges] = {}
        """By name, what was read since the page cache was last asked to let go."""
        self._bytes = 0
        self._all: dict[str, Ranges] = {}
        """By name, what was read since the file was opened."""

    def _at(self, name: str) -> Path:
        return self._root / name if name else self._root

    def describe(self, name: str = "") -> str:
        return os.fspath(self._at(name))

    def path(self) -> Path | None:
        return self._root

    def names(self, folder: str = "") -> list[str]:
        return sorted((p.name for p in self._at(folder).iterdir()), key=os.fsencode)

    def kind(self, name: str = "") -> Kind | None:
        path = self._at(name)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
            return Kind.DANGLING if path.is_symlink() else None
        return Kind.FILE if stat.S_ISREG(mode) else Kind.FOLDER if stat.S_ISDIR(mode) else Kind.OTHER

    def holds(self, name: str) -> bool:
        """Whether a file, its links followed, lies in the directory, or in the blobs of the hub cache it is in."""
        real = self._root.resolve()
        homes = [real]
        snapshots = next((p for p in real.parents if p.name == "snapshots"), None)
        if snapshots is not None:
            homes.append(snapshots.parent / "blobs")  # not resolved: a link there leads elsewhere
        return any(home in self._at(name).resolve().parents for home in homes)

    def size(self, name: str) -> int:
        path = self._at(name)
        if self._opener is _open:
            return path.stat().st_size
        handle, kept = self._handle(name, path)  # what it refuses has no length either
        try:
            return os.fstat(handle).st_size
        finally:
            if not kept:
                os.close(handle)

    def stamp(self, name: str) -> Stamp:
        return stamp_of(self._at(name).stat())

    def mode(self, name: str) -> int | None:
        return stat.S_IMODE(self._at(name).stat().st_mode)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        path = self._at(name)
        with named(path):
            handle, kept = self._handle(name, path)
        try:
            with named(path):
                done = read_fully(lambda into, at: os.preadv(handle, [into], at), buffer, offset)
            if self._once and kept:
                self._used(name, offset, done)
            elif self._once:
                forget(handle, offset, done)
        finally:
            if not kept:
                os.close(handle)
        return done

    def _handle(self, name: str, path: Path) -> tuple[int, bool]:
        """(a descriptor of the file, whether it stays open: within a `with` statement it does)."""
        with self._lock:
            if not self._users:
                return self._opener(path, os.O_RDONLY), False
            handle = self._handles.get(name)
            if handle is None:
                handle = self._handles[name] = self._opener(path, os.O_RDONLY)
            return handle, True

    def _used(self, name: str, offset: int, nbytes: int) -> None:
        with self._lock:
            for table in (self._read, self._all):
                table.setdefault(name, Ranges()).add(offset, offset + nbytes)
            self._bytes += nbytes
            if self._bytes >= WINDOW:
                self._forget()

    def _forget(self) -> None:
        """Ask the page cache to let go of what was read; the lock is held: nobody closes a descriptor meanwhile.

        Of that and no more: what is read next may be there already, or on its way. The kernel lets go of whole folios
        only, so that what lies on an edge goes with its neighbours, once all of them were read.
        """
        for name, ranges in self._read.items():
            for first, end in ranges:
                first, end = self._all[name].around(first, end, FOLIO)
                forget(self._handles[name], first, end - first, beyond=0)
        self._read.clear()
        self._bytes = 0

    def __enter__(self) -> Self:
        with self._lock:
            self._users += 1
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for name, ranges in self._all.items():
                edges = [edge for each in ranges for edge in each]
                forget(self._handles[name], edges[0], edges[-1] - edges[0])
            for handle in self._handles.values():
                os.close(handle)
            self._handles.clear()
            self._read.clear()
            self._all.clear()
            self._bytes = 0


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file of this machine."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def forget(handle: int, offset: int, nbytes: int, *, beyond: int | None = None) -> None:
    """Ask the page cache to let go of bytes of a file, and of what the kernel read ahead: `READAHEAD`, or `beyond`.

    Whole pages go, also the ones that neighbours share. Only advice: a system that takes none is no error.
    """
    if hasattr(os, "posix_fadvise"):
        first = offset // PAGE * PAGE
        end = align_up(offset + nbytes, PAGE) + (READAHEAD if beyond is None else beyond)
        with suppress(OSError):
            os.posix_fadvise(handle, first, end - first, os.POSIX_FADV_DONTNEED)


# -- past the page cache, and mapped ----------------------------------------------------------------------------------


class DirectFile:
    """A file of this machine, read past the page cache where the file system allows it.

    `mode` is "direct" or "buffered". Offsets and lengths are multiples of 4096 and buffers page-aligned; the file
    itself may end anywhere. A file system may also refuse later what it took at first: then the mode becomes "buffered"
    and `refused` is told the path. For many threads. Every `OSError` names the file.
    """

    def __init__(self, path: Path, *, direct: bool = True, refused: Callable[[Path], Any] = lambda _: None) -> None:
        self.path = path
        self.mode = "buffered"
        self._refused, self._lock = refused, threading.Lock()
        flags = os.O_RDONLY | os.O_CLOEXEC
        with named(path):
            handle = _open_direct(path, flags) if direct else None
            self._handle = os.open(path, flags) if handle is None else handle
        if handle is not None or (direct and _no_cache(self._handle)):
            self.mode = "direct"

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from `offset`; the bytes read, fewer only where the file ends."""
        with named(self.path):
            done = read_fully(self._some, target, offset)
        if self.mode == "buffered":
            forget(self._handle, offset, done)
        return done

    def _some(self, target: memoryview, offset: int) -> int:
        direct = self.mode == "direct"
        if direct and offset % PAGE:
            return 0  # behind the last page, which is the only one that a direct read gives a part of
        try:
            got = os.preadv(self._handle, [target], offset)
        except OSError as error:
            if not direct or error.errno not in UNSUPPORTED:
                raise
            self._give_up()
            return os.preadv(self._handle, [target], offset)
        if direct and got % PAGE and offset + got < os.fstat(self._handle).st_size:
            self._give_up()  # part of a page in the middle: from there a direct read cannot go on
        return got

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
        self._refused(self.path)

    def forget(self, nbytes: int) -> None:
        """Ask the page cache to let go of the file's first bytes, as its table was read through it, and behind them."""
        forget(self._handle, 0, nbytes)

    def close(self) -> None:
        """Close it; may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor with O_DIRECT that was read from once, or None where there is no such thing.

    A file system says no (`UNSUPPORTED`) when the file is opened, or when it is first read.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    handle = -1
    try:
        handle = os.open(path, flags | os.O_DIRECT)
        os.preadv(handle, [page_buffer(PAGE)], 0)
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        if error.errno in UNSUPPORTED:
            return None
        raise
    return handle


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


def map_file(path: Path) -> mmap.mmap:
    """A private, writable map of a whole file (torch takes no read-only memory); the file cannot change through it."""
    with named(path), path.open("rb") as handle:
        return mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def page_buffer(nbytes: int, remedy: str = "use fewer --workers, or free memory") -> mmap.mmap:
    """Page-aligned zeroed memory; it is taken only as it is touched.

    It is this process's alone: one that is forked from it gets a copy, not the same bytes. Raises `MachineError`
    (E0902) with `remedy` where the system gives none.
    """
    try:
        return mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MachineError(
            f"out of memory: {nbytes:,} bytes for what is read: {error.strerror}", code="E0902", remedy=remedy
        ) from None
