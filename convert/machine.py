"""The file system as a conversion writes to it: durable writes, and services it may lack.

What only makes a conversion faster or safer is asked for and not required: a file system that has none of it is written
all the same, and the user is told once (`LACKS`).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from pagestone.convert.errors import machine_errors
from pagestone.formats.errors import RequestError
from pagestone.formats.storage import UNSUPPORTED, LocalDirectory, Place, named

LOCKS, DIRECT, RESERVE, SYNC, SPACE = "locks", "direct writes", "reserving space", "syncing directories", "free space"
MODES = "modes"
LACKS = {
    LOCKS: "no locks here: make sure yourself that no second conversion works in this directory",
    DIRECT: "no direct writes here: files go through the page cache, which is slower and no less safe",
    RESERVE: "no space can be reserved here: a full disk shows only while files are written",
    SYNC: "directories cannot be synced here: a power cut soon after the end may undo the publication; "
    "the same command then does it again",
    MODES: "modes of files cannot be set here: a side file may be readable by more people than the source's is",
    SPACE: "the file system does not say how much space is free: that was not checked in advance",
}
"""Services a file system may lack, and what the user is told then."""


def is_regular(path: Path) -> bool:
    """Whether a regular file lies there; a link to one is none."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_there(path: Path) -> bool:
    """Whether anything of that name is there, be it a link that points nowhere."""
    return os.path.lexists(path)


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file in our own work directory.

    Whoever may write there may also put a link or a pipe there: no link is followed and no pipe waited for. Raises
    `RequestError` (E0814) for anything but a regular file; `OSError` passes through.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise not_a_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise not_a_file(path)
    return handle


def not_a_file(path: Path) -> RequestError:
    """The refusal of something in the work directory that is no regular file."""
    return RequestError(
        "a regular file expected in the work directory, found a link, a pipe or a directory",
        code="E0814",
        file=path,
        remedy="find out who put it there and remove it; nothing was written through it",
    )


def own_file(path: Path) -> Place:
    """A file in our own work directory, opened as `open_own` does."""
    return Place(LocalDirectory(path.parent, once=True, opener=open_own), path.name)


def sync_directory(path: Path, lacks: set[str]) -> None:
    """Make renames and unlinks in a directory durable; `lacks` gets SYNC if the file system cannot."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            error.filename = os.fspath(path)
            raise
        lacks.add(SYNC)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes, lacks: set[str]) -> None:
    """Write a small file whole or not at all, and make it durable."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with named(temporary), open(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    sync_directory(path.parent, lacks)


def disk_space(output: Path) -> int | None:
    """Free bytes of the file system on which `output` is or will be; None if it does not say."""
    place = output.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    with machine_errors(output, "asking for free space"):
        try:
            status = os.statvfs(place)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return None
    if status.f_blocks == 0:  # no file system is that small: it does not know
        return None
    return status.f_bavail * status.f_frsize
