"""The machine: services a file system may lack, errors that name their file, the order in which things are durable."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kits.containers import contents
from kits.conversions import run, stop_after

from pagestone.convert import machine, prepare, report
from pagestone.convert.machine import LACKS, disk_space
from pagestone.convert.plan import Request
from pagestone.convert.prepare import SPARE, plan_for
from pagestone.convert.publish import JOURNAL, PARTIAL
from pagestone.formats import encodings
from pagestone.formats.errors import MachineError, PagestoneError
from pagestone.formats.manifest import read_manifest


def path_of(handle: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{handle}"))  # noqa: PTH115


def error(number: int) -> OSError:
    """As the system gives it from a descriptor: it names no file."""
    return OSError(number, os.strerror(number))


def fail(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error(number)

    return call


# -- services ----------------------------------------------------------------------------------------------------------


def no_locks(patch: pytest.MonkeyPatch, number: int) -> None:
    patch.setattr(fcntl, "flock", fail(number))


def no_directory_sync(patch: pytest.MonkeyPatch, number: int) -> None:
    fsync = os.fsync
    patch.setattr(os, "fsync", lambda h: fail(number)() if path_of(h).is_dir() else fsync(h))


def no_direct_open(patch: pytest.MonkeyPatch, number: int) -> None:
    system_open = os.open

    def opened(path: Any, flags: int, *words: Any, **how: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(system_open(path, flags & ~os.O_DIRECT, *words, **how))  # some make the file, then refuse
            raise error(number)
        return system_open(path, flags, *words, **how)

    patch.setattr(os, "open", opened)


def no_direct_write(patch: pytest.MonkeyPatch, number: int) -> None:
    pwrite = os.pwrite

    def written(handle: int, *words: Any) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise error(number)
        return pwrite(handle, *words)

    patch.setattr(os, "pwrite", written)


def no_reserve(patch: pytest.MonkeyPatch, number: int) -> None:
    patch.setattr(os, "posix_fallocate", fail(number))


def no_space_count(patch: pytest.MonkeyPatch, number: int) -> None:
    zeros = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=0)
    patch.setattr(os, "statvfs", fail(number) if number else lambda _: zeros)


E = errno
SERVICES: dict[str, tuple[Callable[[pytest.MonkeyPatch, int], None], tuple[int, ...], int]] = {
    machine.LOCKS: (no_locks, (E.ENOSYS, E.ENOLCK, E.EOPNOTSUPP, E.EINVAL), E.EIO),
    machine.SYNC: (no_directory_sync, (E.EINVAL, E.ENOSYS, E.EOPNOTSUPP), E.EIO),
    machine.DIRECT: (no_direct_open, (E.EINVAL, E.EOPNOTSUPP), E.EACCES),
    machine.DIRECT + " when written": (no_direct_write, (E.EINVAL, E.EOPNOTSUPP), E.EIO),
    machine.RESERVE: (no_reserve, (E.ENOSYS, E.EPERM, E.EOPNOTSUPP, E.EINVAL), E.ENOSPC),
    machine.SPACE: (no_space_count, (0, E.ENOSYS), E.EIO),
}


@pytest.mark.parametrize("what,number", [(w, n) for w, (_, numbers, _) in SERVICES.items() for n in numbers])
def test_services_that_are_not_there(source, tmp_path, monkeypatch, what, number):
    """A file system without a service is written all the same, with the same bytes, and the user is told once."""
    assert run(source, tmp_path / "plain").warnings == ()
    with monkeypatch.context() as patch:
        SERVICES[what][0](patch, number)
        outcome = run(source, tmp_path / "o", workers=3)
    assert outcome.warnings == (LACKS[what.removesuffix(" when written")],)
    assert contents(tmp_path / "o") == contents(tmp_path / "plain")


@pytest.mark.parametrize("what", SERVICES)
def test_errors_of_services_are_errors(source, tmp_path, monkeypatch, what):
    """Any other answer than that a service is not there is an error of the machine."""
    with monkeypatch.context() as patch:
        SERVICES[what][0](patch, SERVICES[what][2])
        with pytest.raises(MachineError) as caught:
            run(source, tmp_path / "o")
    assert caught.value.remedy and str(tmp_path / "o") in str(caught.value)
    assert not (tmp_path / "o" / "manifest.json").exists()


@pytest.mark.parametrize("number", [E.EPERM, E.ENOSYS, E.EOPNOTSUPP])
def test_modes_that_cannot_be_set(source, tmp_path, monkeypatch, number):
    """Only where one is wider than the source's, and then the user is told; anything else is an error."""
    monkeypatch.setattr(Path, "chmod", fail(number))
    assert run(source, tmp_path / "plain").warnings == ()
    os.chmod(source / "tokenizer.json", 0o600)  # noqa: PTH101 - that of Path fails here
    try:
        assert run(source, tmp_path / "o").warnings == (LACKS[machine.MODES],)
        monkeypatch.setattr(Path, "chmod", fail(E.EIO))
        with pytest.raises(MachineError, match=r"tokenizer\.json"):
            run(source, tmp_path / "broken")
    finally:
        os.chmod(source / "tokenizer.json", 0o644)  # noqa: PTH101 - that of Path fails here


def test_a_plan_where_free_space_is_not_known(source, tmp_path, monkeypatch):
    """The plan says so too, and gives null to programs."""
    plan = plan_for(Request(source, encodings.get("int8")), tmp_path / "o")
    no_space_count(monkeypatch, 0)
    assert disk_space(tmp_path / "o") is None
    assert "free: the file system does not say" in report.plan_text(plan, tmp_path / "o")
    assert report.plan_table(plan, tmp_path / "o")["disk_free"] is None


@pytest.mark.parametrize("share", [0, 0.8])
def test_preflight_counts_what_is_finished_once(source, tmp_path, monkeypatch, share):
    """What is finished is not needed again, and is not subtracted twice: one byte decides."""
    output = tmp_path / "o"
    plan = plan_for(Request(source, encodings.get("int8")), output)
    done = 0
    if share:
        stop_after(source, output, share)
        lines = map(json.loads, (output / PARTIAL / JOURNAL).read_text().splitlines()[1:])
        done = sum(line["nbytes"] for line in lines)
        assert done > 50_000
    needed = plan.bytes_out - done + SPARE
    monkeypatch.setattr(prepare, "disk_space", lambda _: needed - 1)
    with pytest.raises(MachineError, match="E0903"):
        run(source, output)
    monkeypatch.setattr(prepare, "disk_space", lambda _: needed)
    assert run(source, output).state == "converted"


# -- errors name their file --------------------------------------------------------------------------------------------

WRITTEN = [
    "layers-00.safetensors",
    "layers-00.rowsum.safetensors",
    "dense-00001-of-00001.safetensors",
    "tokenizer.json",
]
WRITES = [(call, name) for call in ("pwrite", "fsync", "ftruncate", "posix_fallocate") for name in WRITTEN]
WRITES += [("fsync", name) for name in (".config.json.tmp", JOURNAL, "experts.parquet", ".manifest.json.tmp")]
WRITES += [("fsync", f"..{name}.tmp") for name in ("journal.jsonl",)] + [("write", JOURNAL)]


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call,name", WRITES)
def test_every_write_names_its_file(source, tmp_path, monkeypatch, call, name, number):
    """An error of a write, an fsync or a reservation names the file, and says what to do."""
    original = getattr(os, call)

    def failing(handle: int, *words: Any) -> Any:
        if path_of(handle).name == name:
            raise error(number)
        return original(handle, *words)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(MachineError, match="E0901") as caught:
            run(source, tmp_path / "o")
    assert caught.value.file == str(tmp_path / "o" / PARTIAL / name)
    assert ("log" if number == errno.EIO else "quota") in caught.value.remedy
    assert run(source, tmp_path / "o").state == "converted"


@pytest.mark.parametrize("directory", ["o", PARTIAL])
def test_every_sync_of_a_directory_names_it(source, tmp_path, monkeypatch, directory):
    """So does an fsync of a directory."""
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda h: fail(errno.EIO)() if path_of(h).name == directory else fsync(h))
    with pytest.raises(MachineError, match="E0901") as caught:
        run(source, tmp_path / "o")
    assert Path(caught.value.file).name == directory


SHARD, INDEX = "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def bad_sectors(patch: pytest.MonkeyPatch, name: str, number: int = errno.EIO) -> None:
    """Every read of a file of this name fails, as the system tells it: without a name."""
    for call in ("preadv", "pread", "read"):
        original = getattr(os, call)
        patch.setattr(os, call, lambda h, *w, real=original: fail(number)() if path_of(h).name == name else real(h, *w))


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARD, "tokenizer.json"])
def test_every_read_of_the_plan_names_its_file(source, tmp_path, monkeypatch, name):
    """A bad sector under a header, the config, the index or a side file is named, with a remedy."""
    bad_sectors(monkeypatch, name)
    with pytest.raises(MachineError, match="E0901") as caught:
        plan_for(Request(source, encodings.get("int8")), tmp_path / "o")
    assert caught.value.file == str(source / name) and "download it again" in caught.value.remedy


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_every_read_of_the_source_names_its_file(source, tmp_path, monkeypatch, name, number):
    """A bad sector under tensors or a side file is named; the remedy is one for reading, and no layer is published."""
    plan = plan_for(Request(source, encodings.get("int8")), tmp_path / "o")
    bad_sectors(monkeypatch, name, number)
    with pytest.raises(MachineError, match="E0901") as caught:
        prepare.prepare(plan, tmp_path / "o", workers=2)
    assert caught.value.file == str(source / name) and "reading the source" in caught.value.message
    assert "may write" not in caught.value.remedy and "same command" in caught.value.remedy + " same command" * (
        number == errno.EIO
    )


@pytest.mark.parametrize("name", [JOURNAL, "layers-00.safetensors", "experts.parquet"])
def test_every_read_of_finished_work_names_its_file(source, tmp_path, monkeypatch, name):
    """The work directory is read too: the journal, finished files whose stamps are others, the table of experts."""
    output = tmp_path / "o"
    stop_after(source, output, 0.9)
    (output / PARTIAL / "layers-00.safetensors").touch()
    bad_sectors(monkeypatch, name)
    with pytest.raises(PagestoneError) as caught:
        run(source, output)
    assert caught.value.code == "E0901" and caught.value.file == str(output / PARTIAL / name)


# -- durable, in this order --------------------------------------------------------------------------------------------


def trace(patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record (call, path) of all that changes a file or makes it durable; a journal line has its file's name behind."""
    events: list[tuple[str, str]] = []

    def by_handle(call: str) -> None:
        original = getattr(os, call)

        def recorded(handle: int, *words: Any) -> Any:
            path = str(path_of(handle))
            if call == "write" and path.endswith(JOURNAL):
                path += ":" + json.loads(words[0])["name"]
            events.append((call, path))
            return original(handle, *words)

        patch.setattr(os, call, recorded)

    for call in ("fsync", "pwrite", "ftruncate", "write"):
        by_handle(call)
    link, replace, unlink = os.link, Path.replace, Path.unlink
    patch.setattr(os, "link", lambda a, b: (events.append(("place", str(b))), link(a, b))[1])
    patch.setattr(Path, "replace", lambda a, b: (events.append(("place", str(b))), replace(a, b))[1])
    patch.setattr(Path, "unlink", lambda p, **how: (events.append(("unlink", str(p))), unlink(p, **how))[1])
    return events


@pytest.mark.parametrize("over", [False, True])
def test_order_of_durable_steps(source, tmp_path, monkeypatch, over):
    """Each file is durable before the journal says so, each line before the next step; the manifest comes last.

    A power cut keeps what was synced and any part of the rest: so the order of fsyncs is what is promised.
    """
    output = tmp_path / "o"
    if over:
        run(source, output, "int8")
    with monkeypatch.context() as patch:
        events = trace(patch)
        run(source, output, "fp8", force=over, workers=2)
    work, journal = output / PARTIAL, str(output / PARTIAL / JOURNAL)

    def last(call: str, path: Path, before: int | None = None) -> int:
        found = [n for n, e in enumerate(events[:before]) if e == (call, str(path))]
        assert found, (call, path)
        return found[-1]

    files = read_manifest(output / "manifest.json").files
    unrecorded = ("experts.parquet", "records.xxh3")  # made from the journal when all else is finished
    lines = {name: events.index(("write", f"{journal}:{name}")) for name in files if name not in unrecorded}
    # of the journal alone: another worker may write its own file between a line and its fsync
    of_journal = [(n, e) for n, e in enumerate(events) if e[1].startswith(journal)]
    for name, line in lines.items():
        place = of_journal.index((line, ("write", f"{journal}:{name}")))
        assert of_journal[place + 1][1] == ("fsync", journal), "a line is durable before anything else happens to it"
    decided = last("place", work / "manifest.json")
    for name in files:
        if name == "experts.parquet":
            assert last("fsync", work / name) < decided
        elif name == "records.xxh3":
            assert last("fsync", work / f".{name}.tmp") < last("place", work / name) < decided
        elif name in ("config.json", INDEX):
            assert last("fsync", work / f".{name}.tmp") < last("place", work / name) < lines[name] < decided
            assert ("fsync", str(work)) in events[last("place", work / name) : lines[name]]
        else:
            assert last("ftruncate", work / name) < last("fsync", work / name) < lines[name] < decided
            assert not files[name].nbytes or last("pwrite", work / name) < last("ftruncate", work / name)
    assert last("fsync", work / "experts.parquet") < last("fsync", work, decided), "names are durable too"
    assert last("fsync", work / ".manifest.json.tmp") < decided
    assert ("fsync", str(work)) in events[decided:], "the decision is durable"
    moves = [last("place", output / name) for name in files]
    first_change = min(moves + ([last("unlink", output / "manifest.json")] if over else []))
    assert decided < last("fsync", work, first_change) < first_change
    if over:
        gone = last("unlink", output / "manifest.json")
        assert gone < events.index(("fsync", str(output)), gone) < min(moves), "never new files under the old manifest"
    published = last("place", output / "manifest.json")
    assert max(moves) < last("fsync", output, published) < published, "the files are in place before the manifest is"
    assert ("fsync", str(output)) in events[published:], "and the manifest is, before the end"
