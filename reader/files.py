"""Files of a container as the reader asks for them: past the page cache, or mapped, with its words for errors."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pagestone.formats import storage
from pagestone.formats.storage import Side, SystemErrors

RESTORE = "restore the file from a copy, or convert again"
"""What to do about a damaged file."""
ANEW = "anew"
"""The mode of what is read through the page cache with plain reads, again each time: the other way than "direct"."""
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


SIDE = Side(
    "E1203",
    "{doing} failed: {reason}",
    REMEDIES,
    "check the disk and its log; the container may have to be restored from a copy",
)


class MachineErrors(SystemErrors):
    """Turns an `OSError` into a `MachineError` (E1203) that names its file, by default `path`.

    Every read of the reader stands in one.
    """

    def __init__(self, path: Path, doing: str) -> None:
        super().__init__(SIDE, path, doing)


class DirectFile(storage.DirectFile):
    """A `storage.DirectFile` whose errors are the reader's; `note` is told where direct reads are refused later on."""

    def __init__(self, path: Path, *, direct: bool = True, note: Callable[[str], None] = lambda _: None) -> None:
        with MachineErrors(path, "opening"):
            super().__init__(path, direct=direct, refused=lambda at: note(f"{at}: {THROUGH_CACHE}"))

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from `offset`; the bytes read, fewer only where the file ends."""
        with MachineErrors(self.path, "reading"):
            return super().read_into(target, offset)


def advise(mapped: mmap.mmap, name: str, *where: int) -> None:
    """Tell the kernel how a map will be used, such as "MADV_RANDOM". Only advice, too."""
    if hasattr(mmap, name):
        with suppress(OSError):
            mapped.madvise(getattr(mmap, name), *where)


def private_buffer(nbytes: int) -> mmap.mmap:
    """Page-aligned zeroed memory of this process alone, of huge pages where there are any; see `page_buffer`.

    A product walks through all of a record and takes 5 to 17 % less time so. The system joins neighbours, so that
    records smaller than such a page gain too, and never takes more than is mapped.
    """
    buffer = storage.page_buffer(nbytes, "give a smaller --budget, or free memory")
    advise(buffer, "MADV_HUGEPAGE")
    return buffer


def map_file(path: Path) -> mmap.mmap:
    """A private map of a whole file, see `storage.map_file`."""
    with MachineErrors(path, "mapping"):
        return storage.map_file(path)
