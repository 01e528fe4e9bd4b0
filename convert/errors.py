"""How a conversion tells errors of the operating system: the file, what was being done, and what to do."""

from __future__ import annotations

import errno
import os

from pagestone.formats.errors import MachineError
from pagestone.formats.storage import Side, SystemErrors

_REMEDIES = {
    errno.ENOSPC: "free space on that disk, or give another --output; then run the same command to continue",
    errno.EDQUOT: "your disk quota is used up: free space, then run the same command to continue",
    errno.EFBIG: "the file size limit of this shell or file system is too low (ulimit -f): raise it and run again",
    errno.EACCES: "give a directory you may write to",
    errno.EPERM: "give a directory you may write to",
    errno.EROFS: "the file system is read-only: give another --output",
    errno.EIO: "the disk reports an I/O error: check it and its log before anything else, then run the same command",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run again",
}
_READING = {
    errno.EACCES: "give yourself the right to read it, then run the same command again",
    errno.EPERM: "give yourself the right to read it, then run the same command again",
    errno.ENOENT: "the file was here when the work began: put it back, then run the same command again",
    errno.ESTALE: "the server replaced the file: run the same command again",
    errno.EIO: "the disk reports an I/O error: check it and its log; if the file cannot be read, download it again",
}
_OTHERWISE = "fix the cause and run the same command again; finished work is kept"
_WORDS, _MEMORY = "{reason} while {doing}", "use fewer --workers, or free memory"
WRITES = Side("E0901", _WORDS, _REMEDIES, _OTHERWISE, _MEMORY)
READS = Side("E0901", _WORDS, _REMEDIES | _READING, _OTHERWISE, _MEMORY)


def machine_errors(path: str | os.PathLike[str], doing: str) -> SystemErrors:
    """Turn `OSError` and `MemoryError` into `MachineError`; `path` is named where the error names no file.

    `doing` completes "while ..."; if it begins with "reading", the remedies are those for reading.
    """
    return SystemErrors(READS if doing.startswith("reading") else WRITES, path, doing)


def machine_error(error: OSError, path: str | os.PathLike[str], doing: str) -> MachineError:
    """An error of the operating system in the same words."""
    return WRITES.error(error, path, doing)
