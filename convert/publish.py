"""Where a conversion happens, and the one moment at which it becomes a container.

All work goes on in `DIR/.pagestone-partial/`: files, a lock, and a journal of finished files. Publishing makes all of
it durable, writes the manifest beside it (from then on the job needs no source), and moves the files into `DIR`, the
manifest last. A directory without a manifest is no container; a crash at any moment is finished or continued by the
next run.

A container that is replaced stays whole until then. The new files have its names, so between taking its manifest away
and giving the new one there is a moment, of renames only, in which neither can be opened. Swapping whole directories
would spare it, but needs the right to write beside `DIR`, cannot be done where `DIR` is a mount, and would carry away
what else lies in it.

What the work directory says is foreign. It names no file but by a manifest that proves itself, nothing in it is
followed or waited for, and nothing is overwritten or removed that the container being replaced did not list.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagestone.convert.errors import machine_error, machine_errors
from pagestone.convert.job import another_job
from pagestone.convert.journal import FinishedFile, file_digest, from_lines, is_intact, to_line
from pagestone.convert.machine import (
    LOCKS,
    is_regular,
    is_there,
    not_a_file,
    open_own,
    own_file,
    sync_directory,
    write_durably,
)
from pagestone.formats.directories import output_directory
from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.manifest import (
    EXPERTS_TABLE,
    LAYER_NAME,
    MANIFEST,
    PARTIAL,
    TEMPLATES,
    FileDigest,
    Manifest,
    read_manifest,
)
from pagestone.formats.storage import UNSUPPORTED, named

LOCK, JOURNAL, REPLACED = ".lock", ".journal.jsonl", ".replaced.json"
"""Our own files in the work directory: hidden, as no file of a container is.

REPLACED is there while a publication may overwrite: a copy of the manifest of the container that is replaced, or
anything else where that container could not say what it held.
"""
DAMAGED_WORK = "use --force to discard the unfinished work and convert again"
IN_THE_WAY = "E0811"
LEFT_ALONE = frozenset(
    (".ds_store", ".directory", ".fseventsd", ".gitattributes", ".spotlight-v100", ".trashes", "desktop.ini",
     "lost+found", "system volume information", "thumbs.db")
)  # fmt: skip
"""What file systems, desktops and hubs put into a directory by themselves, in lower case: nobody's data, and no name of
a container's."""
NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EMLINK, errno.EXDEV}


class WorkDirectory:
    """The locked work directory of one conversion. Use as a context manager; see `open_work`."""

    def __init__(self, output: Path, lock: int, lacks: set[str]) -> None:
        self.output = output
        self.path = output / PARTIAL
        self.lacks = lacks
        """Services the file system turned out not to have, see `machine.LACKS`."""
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
        """Where a file lies until it is published; one of a subfolder beside the others, hidden as those are not."""
        return self.path / (f".{name.replace('/', '.')}" if "/" in name else name)

    # -- the journal -------------------------------------------------------------------------------------------------

    def begin(self, identity: Mapping[str, Any], files: Mapping[str, tuple[int, int, int]], *, force: bool) -> None:
        """Start the job described by `identity`, or continue it where the journal says it stopped.

        `files` is what the job makes: (length, number of records, number of encoded dense matrices) by name; no other
        finished file is believed. Raises
        `RequestError` naming what differs if the journal belongs to another job, `DataError` if it is damaged; `force`
        discards that job.
        """
        begun, entries = self._begun_job(identity, force=force)
        if begun is None:
            self._discard({LOCK, REPLACED})
            write_durably(self.file(JOURNAL), json.dumps(identity).encode() + b"\n", self.lacks)
        self._journal = open_own(self.file(JOURNAL), os.O_WRONLY | os.O_APPEND)
        if begun is not None:
            for entry in entries:
                fits = files.get(entry.name) == (entry.nbytes, len(entry.records), len(entry.matrices))
                if fits and is_intact(self.file(entry.name), entry):
                    self.finished[entry.name] = entry
            # what was half done is done again, and must not take the space for it meanwhile
            self._discard({LOCK, JOURNAL, REPLACED, *(self.file(name).name for name in self.finished)})

    def _begun_job(self, asked: Mapping[str, Any], *, force: bool) -> tuple[dict[str, Any] | None, list[FinishedFile]]:
        """The job in the journal and its finished files; (None, []) if there is none, or `force` discards it."""
        try:
            begun, entries = self._read_journal()
        except PagestoneError:
            if not force:
                raise
            return None, []
        if begun is None or begun == asked:
            return begun, entries
        if force:
            return None, []
        raise another_job(asked, begun, entries, self.path)

    def _read_journal(self) -> tuple[dict[str, Any] | None, list[FinishedFile]]:
        path = self.file(JOURNAL)
        try:
            raw = own_file(path).read_bytes()
        except FileNotFoundError:
            return None, []
        try:
            found = from_lines(raw)
        except (ValueError, KeyError, TypeError):
            raise DataError("a journal of JSON lines expected", code="E0804", file=path, remedy=DAMAGED_WORK) from None
        if raw and raw[-1:] != b"\n":
            with named(path):
                os.truncate(path, raw.rfind(b"\n") + 1)
        return found

    def remove_remains(self, identity: Mapping[str, Any]) -> None:
        """Remove what the publication of this job left here; unfinished work of another job stays."""
        try:
            known, _ = self._read_journal()
        except PagestoneError:
            return
        if known is None or known == identity:
            shutil.rmtree(self.path)

    def _discard(self, keep: set[str]) -> None:
        for entry in self.path.iterdir():
            if entry.name not in keep:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def record(self, finished: FinishedFile) -> None:
        """Note that a file is complete; it must be durable already. Safe to call from any worker."""
        assert self._journal is not None
        line = to_line(finished)
        with self._writing, named(self.file(JOURNAL)):
            end = os.fstat(self._journal).st_size
            if os.write(self._journal, line) != len(line):
                os.ftruncate(self._journal, end)  # the next line must not continue this one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._journal)
            self.finished[finished.name] = finished

    def require_intact(self) -> None:
        """Refuse to publish if a finished file was altered since: workers hashed what they wrote, not what is there."""
        for entry in self.finished.values():
            if not is_intact(self.file(entry.name), entry):
                raise DataError(
                    "this finished file was altered before it was published; the recorded digest is another",
                    code="E0815",
                    file=self.file(entry.name),
                    remedy="find out what writes there, then run the same command: it makes this file again",
                )

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, manifest: bytes, *, replace: bool) -> None:
        """Turn the finished files into a container; `replace`: over what the container in the output lists.

        Everything the manifest lists must be durable in the work directory. Raises `RequestError` (E0811) if anything
        else is in the way; an old container is then still whole, and all work is kept.
        """
        if replace:
            try:
                old = (self.output / MANIFEST).read_bytes()
            except FileNotFoundError:
                old = own_file(self.file(REPLACED)).read_bytes() if is_there(self.file(REPLACED)) else b""
            write_durably(self.file(REPLACED), old, self.lacks)
        else:
            self.file(REPLACED).unlink(missing_ok=True)
        write_durably(self.file(MANIFEST), manifest, self.lacks)
        self.finish_publication()

    def finish_publication(self) -> Manifest:
        """Move the files into place, the manifest last; may be repeated after a crash, and needs no source."""
        manifest = self._decided()
        last = self.output / MANIFEST
        if not (is_there(last) and os.path.samestat(last.lstat(), self.file(MANIFEST).lstat())):
            self._require_complete(manifest)
            self._require_free(manifest)
            old, any_name = self._replaced()
            if is_there(last):  # the old container's, which stayed whole until here
                last.unlink()
                sync_directory(self.output, self.lacks)
            if any(name.startswith(f"{TEMPLATES}/") for name in manifest.files):
                (self.output / TEMPLATES).mkdir(exist_ok=True)
            for name in manifest.files:
                if is_regular(self.file(name)):
                    self._place(name, replace=any_name or name in old)
            for name in old.keys() - manifest.files.keys():
                path = self.output / name
                here = path.parent == self.output or not path.parent.is_symlink()
                if here and is_regular(path) and path.lstat().st_size == old[name].nbytes:
                    path.unlink()
            self._settle_templates()
            sync_directory(self.output, self.lacks)
            self._place(MANIFEST, replace=False)
        sync_directory(self.output, self.lacks)
        self.file(MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.path)
        sync_directory(self.output, self.lacks)
        return manifest

    def _settle_templates(self) -> None:
        """Make what is in the one subfolder durable, or remove it if nothing is left in it."""
        folder = self.output / TEMPLATES
        if folder.is_symlink() or not folder.is_dir():
            return
        if any(folder.iterdir()):
            sync_directory(folder, self.lacks)
        else:
            folder.rmdir()

    def give_up(self) -> None:
        """Discard a publication that cannot be finished; nobody can say any more which files it moved already."""
        if is_there(self.output / MANIFEST):  # then it moved none: the old container is whole
            self._discard({LOCK})
            return
        self.file(REPLACED).unlink(missing_ok=True)
        write_durably(self.file(REPLACED), b"", self.lacks)
        self._discard({LOCK, REPLACED})

    def _decided(self) -> Manifest:
        """The manifest of the publication that was decided."""
        path = self.file(MANIFEST)
        if not is_regular(path):
            raise not_a_file(path)
        try:
            return read_manifest(path)
        except DataError as error:
            raise DataError(f"the manifest of an unfinished publication is damaged: {error.message}", code="E0812",
                            file=path, remedy=DAMAGED_WORK) from None  # fmt: skip

    def _replaced(self) -> tuple[Mapping[str, FileDigest], bool]:
        """(what the container that is replaced lists, whether any name may be overwritten since it cannot say)."""
        if not is_there(self.file(REPLACED)):
            return {}, False
        try:
            if is_regular(self.file(REPLACED)):
                return read_manifest(self.file(REPLACED)).files, False
        except DataError:
            pass
        return {}, True

    def _require_free(self, manifest: Manifest) -> None:
        """Refuse to overwrite what is not the replaced container's; links of its names give way, targets are kept."""
        old, any_name = self._replaced()
        for name in [*manifest.files, MANIFEST]:
            target = self.output / name
            folder = target.parent
            if folder != self.output and is_there(folder) and (folder.is_symlink() or not folder.is_dir()):
                raise in_the_way(folder)
            if not is_there(target):
                continue
            replaceable = any_name or name in old or (name == MANIFEST and is_there(self.file(REPLACED)))
            if (target.is_dir() and not target.is_symlink()) or not (replaceable or self._is_ours(name, manifest)):
                raise in_the_way(target)

    def _is_ours(self, name: str, manifest: Manifest) -> bool:
        """Whether a file in the output is the very one that a publication cut short put there."""
        target, source = self.output / name, self.file(name)
        if is_regular(source):
            return os.path.samestat(target.lstat(), source.lstat())
        return name in manifest.files and is_regular(target)  # moved; `_require_complete` looked at what is in it

    def _require_complete(self, manifest: Manifest) -> None:
        """Every file that is listed is in the work directory or was moved already, and holds what the manifest says."""
        try:
            _, entries = from_lines(own_file(self.file(JOURNAL)).read_bytes())
        except (OSError, PagestoneError, ValueError, KeyError, TypeError):
            entries = []  # digests decide alone
        recorded = {e.name: e for e in entries}
        experts = {e.file: e.experts for e in manifest.layers}
        for name, known in manifest.files.items():
            place = self.file(name) if is_there(self.file(name)) else self.output / name
            if not _holds(place, known, recorded.get(name), experts.get(name, 0)):
                raise DataError(
                    "a finished file of an interrupted publication is gone, or was altered",
                    code="E0805",
                    file=place,
                    remedy=DAMAGED_WORK,
                )

    def _place(self, name: str, *, replace: bool) -> None:
        """Move one file into the output. A name that may not be replaced is linked: that cannot overwrite."""
        source, target = self.file(name), self.output / name
        if replace:
            source.replace(target)  # where the output has a link, the link goes and its target is not touched
            return
        try:
            os.link(source, target)
        except FileExistsError:
            if not os.path.samestat(target.lstat(), source.lstat()):
                raise in_the_way(target) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if is_there(target):
                raise in_the_way(target) from None
            source.replace(target)


def _holds(path: Path, listed: FileDigest, entry: FinishedFile | None, experts: int) -> bool:
    """Whether a file is the one a manifest lists. The time of its last write speaks for it; else its digest does."""
    if not is_regular(path):
        return False
    status = path.lstat()
    if status.st_size != listed.nbytes:
        return False
    # moving it changed its change time
    if entry is not None and entry.xxh3 == listed.xxh3.hex() and entry.stamp[:2] == (listed.nbytes, status.st_mtime_ns):
        return True
    return file_digest(path, experts) == listed.xxh3


def in_the_way(path: Path) -> RequestError:
    """The refusal to overwrite what is not a container's."""
    return RequestError(
        "nothing expected where a file of the container goes, found something that appeared during the conversion",
        code=IN_THE_WAY,
        file=path,
        remedy="move it elsewhere, then run the same command: all work is kept",
    )


def open_work(output: Path) -> WorkDirectory:
    """Create (if need be) and lock the work directory of `output`.

    Raises `RequestError` if another conversion holds it, `MachineError` if the directory cannot be written. Where the
    file system has no locks, the work directory says so in `lacks`.
    """
    path = output / PARTIAL
    if path.is_symlink() or (is_there(path) and not path.is_dir()):
        raise RequestError("a work directory expected, found a link or a file", code="E0801", file=path,
                           remedy="remove it, or give another --output")  # fmt: skip
    lacks: set[str] = set()
    with machine_errors(output, "creating the output directory"):
        path.mkdir(parents=True, exist_ok=True)
        lock = open_own(path / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        _take(lock, path, output, lacks)
    except BaseException:
        os.close(lock)
        raise
    return WorkDirectory(output, lock, lacks)


def _take(lock: int, path: Path, output: Path, lacks: set[str]) -> None:
    """Lock the lock file, and make sure that it is still the one in the directory."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError("another conversion is at work in this directory", code="E0802", file=output,
                           remedy="wait for it, or stop it") from None  # fmt: skip
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.ENOLCK}:
            raise machine_error(error, path / LOCK, "locking the work directory") from error
        lacks.add(LOCKS)
    try:
        ours = os.path.samestat(os.fstat(lock), (path / LOCK).lstat())
    except FileNotFoundError:
        ours = False
    if not ours:  # whoever held it published, and removed it, between our opening and locking it
        raise RequestError("another conversion ended in this directory just now", code="E0802", file=output,
                           remedy="run the same command again") from None  # fmt: skip


def published(output: Path) -> Manifest | None:
    """The manifest of the container at `output`, or None if there is none."""
    return read_manifest(output / MANIFEST) if (output / MANIFEST).is_file() else None


def publication_pending(output: Path) -> bool:
    """Whether a publication was decided but not carried out to its end."""
    return is_there(output / PARTIAL / MANIFEST)


def finish_interrupted(output: Path, *, force: bool = False) -> Manifest | None:
    """Carry out a publication that a crash cut short; None if there is none to finish.

    One that is damaged raises `DataError` or `RequestError`; with `force` it is given up, and None returned.
    """
    if not publication_pending(output):
        return None
    with open_work(output) as work, machine_errors(output, "publishing the container"):
        try:
            return work.finish_publication()
        except PagestoneError as error:
            if not force or error.code == IN_THE_WAY:
                raise
            work.give_up()
            return None


def check_output(output: Path, *, force: bool) -> None:
    """Refuse an output directory that holds anything but the work of a conversion, or a container to be replaced.

    A manifest that is damaged is a container's if other files of one lie beside it. What is `LEFT_ALONE` may be there.
    """
    output_directory(output)
    nearest = next((place for place in (output, *output.absolute().parents) if is_there(place)), output)
    if is_there(nearest) and not nearest.exists():
        raise RequestError(
            f"an output directory expected, found a link that leads nowhere: {nearest}",
            code="E0825",
            file=output,
            remedy="make the directory it points to (mount its disk), or give another --output",
        )
    if not output.exists():
        return
    if not output.is_dir():
        raise RequestError(
            "an output directory expected, found a file", code="E0806", file=output, remedy="give another --output"
        )
    with machine_errors(output, "reading the output directory"):
        present = {p.name for p in output.iterdir() if p.name.lower() not in LEFT_ALONE} - {PARTIAL}
    if not present:
        return
    remains = is_there(output / PARTIAL / REPLACED) or was_container(output)
    if force and remains:
        return
    raise RequestError(
        f"an empty directory or a container expected, found {len(present)} other file(s), among them {min(present)}",
        code="E0807",
        file=output,
        remedy="move them away, or give an --output that is not there yet or is empty; nothing here was touched"
        + ("; or use --force: these are a container's remains" if remains else ""),
    )


def was_container(output: Path) -> bool:
    """Whether a directory holds a container: a manifest that can be read, or one that cannot and files of one."""
    try:
        return published(output) is not None
    except DataError:
        return any(p.name == EXPERTS_TABLE or LAYER_NAME.fullmatch(p.name) for p in output.iterdir())
