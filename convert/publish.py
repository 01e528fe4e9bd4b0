"""Where a conversion happens, and the one moment at which it becomes a container.

All work goes on in `DIR/.pagestone-partial/`: files, a lock, and a journal of finished files. Publishing makes all of
it durable, writes the manifest beside it (from then on the job needs no source), and moves the files into `DIR`, the
manifest last. A directory without a manifest is no container; a crash at any moment is finished or continued by the
next run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagestone.formats.errors import DataError, MachineError, RequestError
from pagestone.formats.manifest import MANIFEST, Manifest, read_manifest

PARTIAL = ".pagestone-partial"
LOCK, JOURNAL, STALE = ".lock", ".journal.jsonl", ".stale.json"
"""Our own files in the work directory: hidden, as no file of a container is."""


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file that is complete and durable in the work directory.

    `xxh3` is hexadecimal. Layer files also carry the digest of every record and, for each expert in order, squared
    error and squared norm of gate, up and down. `notes` counts what the user must be told about the data.
    """

    name: str
    nbytes: int
    xxh3: str
    records: tuple[str, ...] = ()
    stats: tuple[tuple[float, ...], ...] = ()
    notes: dict[str, int] = field(default_factory=dict)


def machine_error(error: OSError, path: str | os.PathLike[str], doing: str) -> MachineError:
    """An operating system error in the project's words; `doing` completes "while ..."."""
    remedies = {
        errno.ENOSPC: "free space on that disk, or give another --output; then run the same command to continue",
        errno.EDQUOT: "your disk quota is used up: free space, then run the same command to continue",
        errno.EFBIG: "the file size limit of this shell or file system is too low (ulimit -f): raise it and run again",
        errno.EACCES: "give a directory you may write to",
        errno.EPERM: "give a directory you may write to",
        errno.EROFS: "the file system is read-only: give another --output",
        errno.EIO: "the disk reports an I/O error: check it before anything else",
        errno.EMFILE: "raise the limit of open files (ulimit -n) and run again",
    }
    reason = error.strerror or str(error)
    remedy = remedies.get(error.errno or 0, "fix the cause and run the same command again; finished work is kept")
    return MachineError(f"{reason} while {doing}", code="E0901", file=error.filename or path, remedy=remedy)


@contextmanager
def machine_errors(path: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Turn `OSError` and `MemoryError` into `MachineError`."""
    try:
        yield
    except OSError as error:
        raise machine_error(error, path, doing) from error
    except MemoryError:
        raise MachineError(
            f"out of memory while {doing}", code="E0902", file=path, remedy="use fewer --workers, or free memory"
        ) from None


def sync_directory(path: Path) -> None:
    """Make renames and unlinks in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all, and make it durable."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


class WorkDirectory:
    """The locked work directory of one conversion. Use as a context manager; see `open_work`."""

    def __init__(self, output: Path, lock: int) -> None:
        self.output = output
        self.path = output / PARTIAL
        self._lock = lock
        self.finished: dict[str, FinishedFile] = {}
        self._journal: int | None = None
        self._writing = threading.Lock()

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        os.close(self._lock)

    def file(self, name: str) -> Path:
        """Where a file lies until it is published."""
        return self.path / name

    # -- the journal -------------------------------------------------------------------------------------------------

    def begin(self, identity: Mapping[str, Any], *, force: bool) -> None:
        """Start the job described by `identity`, or continue it where the journal says it stopped.

        Raises `RequestError` naming what differs if the journal belongs to another job; `force` discards that job.
        """
        known, entries = self._read_journal()
        wanted = json.loads(json.dumps(identity))
        if known is not None and known != wanted:
            if not force:
                differing = ", ".join(sorted(k for k in wanted.keys() | known.keys() if wanted.get(k) != known.get(k)))
                raise RequestError(
                    f"an unfinished conversion is here whose {differing} differ(s) from this one's",
                    code="E0803",
                    file=self.path,
                    remedy="repeat the command that began it, or use --force to discard its work",
                )
            known = None
        if known is None:
            self._discard({LOCK})
            write_durably(self.file(JOURNAL), json.dumps(wanted).encode() + b"\n")
        self._journal = os.open(self.file(JOURNAL), os.O_WRONLY | os.O_APPEND)
        if known is not None:
            for entry in entries:
                path = self.file(entry.name)
                if path.is_file() and path.stat().st_size == entry.nbytes:
                    self.finished[entry.name] = entry
            # what was half done is done again, and must not take the space for it meanwhile
            self._discard({LOCK, JOURNAL, *self.finished})

    def _read_journal(self) -> tuple[dict[str, Any] | None, list[FinishedFile]]:
        try:
            raw = self.file(JOURNAL).read_bytes()
        except FileNotFoundError:
            return None, []
        # a crash may cut the last line short: whatever is not a whole line was not recorded
        whole = raw[: raw.rfind(b"\n") + 1].splitlines()
        try:
            lines = [dict(json.loads(line)) for line in whole]
            entries = [
                FinishedFile(
                    line["name"],
                    line["nbytes"],
                    line["xxh3"],
                    tuple(line["records"]),
                    tuple(tuple(s) for s in line["stats"]),
                    dict(line["notes"]),
                )
                for line in lines[1:]
            ]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                "a journal of JSON lines expected",
                code="E0804",
                file=self.file(JOURNAL),
                remedy=f"delete {self.path} and start again",
            ) from None
        if raw and raw[-1:] != b"\n":
            os.truncate(self.file(JOURNAL), raw.rfind(b"\n") + 1)
        return (lines[0] if lines else None), entries

    def _discard(self, keep: set[str]) -> None:
        for entry in self.path.iterdir():
            if entry.name not in keep:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def record(self, finished: FinishedFile) -> None:
        """Note that a file is complete; it must be durable already. Safe to call from any worker."""
        assert self._journal is not None
        line = json.dumps(asdict(finished)).encode() + b"\n"
        with self._writing:
            end = os.fstat(self._journal).st_size
            if os.write(self._journal, line) != len(line):
                os.ftruncate(self._journal, end)  # the next line must not continue this one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.file(JOURNAL)))
            os.fsync(self._journal)
            self.finished[finished.name] = finished

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, manifest: bytes, stale: set[str]) -> None:
        """Turn the finished files into a container. `stale`: files of the container replaced that it does not have.

        Everything listed in the manifest must be durable in the work directory.
        """
        write_durably(self.file(STALE), json.dumps(sorted(stale)).encode())
        write_durably(self.file(MANIFEST), manifest)
        self.finish_publication()

    def finish_publication(self) -> Manifest:
        """Move the files into place, the manifest last; may be repeated after a crash, and needs no source."""
        manifest = read_manifest(self.file(MANIFEST))
        stale: list[str] = json.loads(self.file(STALE).read_bytes())
        (self.output / MANIFEST).unlink(missing_ok=True)
        sync_directory(self.output)
        for name, known in manifest.files.items():
            if self.file(name).is_file():
                # a link of that name in the output is replaced, its target is not touched
                self.file(name).replace(self.output / name)
            elif not (self.output / name).is_file() or (self.output / name).stat().st_size != known.nbytes:
                raise DataError(
                    "a finished file of an interrupted publication is gone",
                    code="E0805",
                    file=self.output / name,
                    remedy=f"delete {self.path} and convert again",
                )
        for name in stale:
            (self.output / name).unlink(missing_ok=True)
        sync_directory(self.output)
        self.file(MANIFEST).replace(self.output / MANIFEST)
        sync_directory(self.output)
        shutil.rmtree(self.path)
        sync_directory(self.output)
        return manifest


def open_work(output: Path) -> WorkDirectory:
    """Create (if need be) and lock the work directory of `output`.

    Raises `RequestError` if another conversion holds it, `MachineError` if the directory cannot be written.
    """
    path = output / PARTIAL
    if path.is_symlink():
        raise RequestError("a work directory expected, found a link", code="E0801", file=path, remedy="remove the link")
    with machine_errors(output, "creating the output directory"):
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RequestError("another conversion is at work in this directory", code="E0802", file=output,
                           remedy="wait for it, or stop it") from None  # fmt: skip
    except OSError as error:
        os.close(lock)
        raise machine_error(error, path, "locking the work directory") from error
    try:
        ours = os.path.samestat(os.fstat(lock), (path / LOCK).stat())
    except FileNotFoundError:
        ours = False
    if not ours:  # whoever held it published, and removed it, between our opening and locking it
        os.close(lock)
        raise RequestError("another conversion ended in this directory just now", code="E0802", file=output,
                           remedy="run the same command again") from None  # fmt: skip
    return WorkDirectory(output, lock)


def published(output: Path) -> Manifest | None:
    """The manifest of the container at `output`, or None if there is none."""
    return read_manifest(output / MANIFEST) if (output / MANIFEST).is_file() else None


def publication_pending(output: Path) -> bool:
    """Whether a publication was decided but not carried out to its end."""
    return (output / PARTIAL / MANIFEST).is_file()


def finish_interrupted(output: Path) -> Manifest | None:
    """Carry out a publication that a crash cut short; None if there is none to finish."""
    if not publication_pending(output):
        return None
    with open_work(output) as work, machine_errors(output, "publishing the container"):
        return work.finish_publication()


def check_output(output: Path, ours: set[str]) -> None:
    """Refuse an output directory that holds something other than a container or the work of one.

    `ours` are the names this job will write; links of those names are replaced, files are not without a manifest.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise RequestError(
            "an output directory expected, found a file", code="E0806", file=output, remedy="give another --output"
        )
    with machine_errors(output, "listing the output directory"):
        present = {p.name for p in output.iterdir() if not p.is_symlink()} - {PARTIAL}
    if not (output / MANIFEST).is_file() and present & ours:
        raise RequestError(
            f"an empty directory or a container expected, found other files, among them {sorted(present & ours)[0]}",
            code="E0807",
            file=output,
            remedy="give another --output; nothing here is overwritten",
        )
