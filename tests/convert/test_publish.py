"""Publishing: all of a container or nothing of it, whatever happens in between; what is done is not done again."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kits.checkpoints import T_BLOCK, T_ORDER, sparse_model, write_checkpoint
from kits.cli import pagestone, refused
from kits.containers import assert_is_definition, container_id, contents
from kits.conversions import prepare, run, stop_after

from pagestone.convert import prepare as preparing
from pagestone.convert import publish as publishing
from pagestone.convert.publish import JOURNAL, LOCK, PARTIAL, open_work
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, MachineError, RequestError
from pagestone.formats.manifest import read_manifest
from pagestone.reader.container import open_container
from pagestone.validate.verify import verify

SPEC = T_ORDER.having(layers=4)


@pytest.fixture
def source(tmp_path) -> Path:
    return SPEC.write(tmp_path / "source", shards=3)


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of the layer files."""
    found = [p for p in root.iterdir() if p.name.startswith("layers") and p.suffix == ".safetensors"]
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}


def journal_length(output: Path) -> int:
    """Files an unfinished conversion has completed."""
    try:
        return (output / PARTIAL / JOURNAL).read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return 0


# -- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_killed_at_any_moment(big_path, codec):
    """kill -9 at random moments: never a container that is not one, and the next run ends with the same bytes."""
    source = sparse_model(big_path / "s", layers=4, hidden=512, intermediate=512, experts=16)
    assert pagestone(f"prepare-{codec}", source, "-o", big_path / "whole").returncode == 0
    whole = contents(big_path / "whole")
    dice, output = random.Random(codec), big_path / "o"
    command = [sys.executable, "-m", "pagestone", f"prepare-{codec}", str(source), "-o", str(output), "--workers", "2"]
    killed = 0
    for files in (0, 3, 7, len(whole) - 2):  # so many files finished, and a little later
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            if (output / PARTIAL / JOURNAL).exists() and journal_length(output) >= files:
                time.sleep(dice.uniform(0, 0.015))
                break
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        if (output / "manifest.json").exists():
            assert {n: d for n, d in contents(output).items() if n in whole} == whole
    last = pagestone(f"prepare-{codec}", source, "-o", output, "--workers", "2")
    assert last.returncode == 0, last.stderr
    assert contents(output) == whole and not (output / PARTIAL).exists()
    assert killed, "every run ended before it was killed"


@pytest.mark.parametrize("share", [0.2, 0.45, 0.6, 0.8, 0.95])
def test_finished_layers_are_not_redone(source, wanted, tmp_path, share):
    """A second run keeps the finished files as they are, inode and time included, and ends with the same bytes."""
    output = tmp_path / "o"
    stop_after(source, output, share)
    lines = (output / PARTIAL / JOURNAL).read_text().splitlines()[1:]
    names = {json.loads(line)["name"] for line in lines}
    kept = {n: s for n, s in stamps(output / PARTIAL).items() if n in names}
    assert share < 0.5 or kept
    read = []
    run(source, output, progress=read.append)
    assert contents(output) == wanted
    assert {n: stamps(output)[n] for n in kept} == kept
    assert not kept or sum(read) < sum(f.stat().st_size for f in source.glob("*.safetensors"))


def test_half_done_files_give_their_space_back(source, tmp_path, monkeypatch):
    """A run that continues first removes what is half done: it must not need the space twice."""
    output = tmp_path / "o"
    stop_after(source, output, 0.6)
    seen = []
    monkeypatch.setattr(preparing, "preflight", lambda plan, work: seen.extend(p.name for p in work.path.iterdir()))
    with open_work(output) as work:
        job, *lines = map(json.loads, work.file(JOURNAL).read_text().splitlines())
        work.begin(job, {line["name"]: (line["nbytes"], len(line["records"]), 0) for line in lines}, force=False)
        preparing.preflight(None, work)
        assert set(seen) == {LOCK, JOURNAL, *work.finished} and work.finished


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_torn_journal(source, wanted, tmp_path, cut):
    """A journal whose last line was cut by a crash: that file is made again, the others are kept."""
    output = tmp_path / "o"
    stop_after(source, output, 0.8)
    journal = output / PARTIAL / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    run(source, output)
    assert contents(output) == wanted


@pytest.mark.parametrize("line", [b"garbage\n", b"[1]\n", b"3\n", b'{"name": "x"}\n', b"\xff\n"])
def test_damaged_journal(source, tmp_path, line):
    """A journal that is no journal is refused by name, and nothing is thrown away."""
    output = tmp_path / "o"
    stop_after(source, output, 0.8)
    journal = output / PARTIAL / JOURNAL
    journal.write_bytes(journal.read_bytes() + line)
    before = sorted(p.name for p in (output / PARTIAL).iterdir())
    with pytest.raises(DataError, match="E0804"):
        run(source, output)
    assert sorted(p.name for p in (output / PARTIAL).iterdir()) == before


def test_journal_on_a_full_disk(source, wanted, tmp_path, monkeypatch):
    """A line the disk takes only half of is taken back, so that the journal stays one and the next run continues."""
    output = tmp_path / "o"
    write = os.write

    def half(handle: int, data: bytes) -> int:
        return write(handle, data[: len(data) // 2] if b"layers-02.safetensors" in data else data)

    with monkeypatch.context() as patch:
        patch.setattr(publishing.os, "write", half)
        with pytest.raises(MachineError, match="No space left"):
            run(source, output)
    kept = stamps(output / PARTIAL)["layers-00.safetensors"]
    run(source, output)
    assert contents(output) == wanted and stamps(output)["layers-00.safetensors"] == kept


def test_finished_file_that_was_cut(source, wanted, tmp_path):
    """A finished file that has another length than the journal says is made again."""
    output = tmp_path / "o"
    stop_after(source, output, 0.8)
    file = output / PARTIAL / "layers-00.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (output / PARTIAL / "layers-01.rowsum.safetensors").unlink()
    run(source, output)
    assert contents(output) == wanted


# -- another job -----------------------------------------------------------------------------------------------------


def other_source(root: Path) -> Path:
    tensors = SPEC.tensors()
    name = next(n for n in tensors if "gate_up_proj" in n)
    return write_checkpoint(root, tensors | {name: tensors[name].with_value(3.0, 0, 0, 0)}, SPEC.config(), shards=3)


OTHERS = {
    "codec": {"codec": "fp8"},
    "--layers": {"layers": (0, 2)},
    "--include-code": {"include_code": True},
    "source": {"source": "other config"},
    "changed or touched since": {"source": "other data"},
}


def altered(source: Path, tmp_path: Path, how: dict) -> tuple[Path, str, dict]:
    """(source, codec, options) of a job that differs from the plain one in one thing."""
    how = dict(how)
    kind = how.pop("source", None)
    if kind == "other data":
        source = other_source(tmp_path / "source2")
    elif kind == "other config":
        source = write_checkpoint(tmp_path / "source2", SPEC.tensors(), SPEC.config() | {"x": 1}, shards=3)
    return source, how.pop("codec", "int8"), how


@pytest.mark.parametrize("what", OTHERS)
def test_another_job_is_refused(source, wanted, tmp_path, what):
    """Continuing with another source, codec or option is refused, saying which, and the unfinished work survives."""
    output = tmp_path / "o"
    stop_after(source, output, 0.8)
    before = {p.name: p.stat().st_ino for p in (output / PARTIAL).iterdir()}
    source2, codec, how = altered(source, tmp_path, OTHERS[what])
    with pytest.raises(RequestError) as caught:
        run(source2, output, codec, **how)
    assert caught.value.code == "E0803" and what in caught.value.message
    assert {p.name: p.stat().st_ino for p in (output / PARTIAL).iterdir()} == before
    run(source, output)
    assert contents(output) == wanted


def test_changed_side_file_is_another_source(source, tmp_path):
    """A tokenizer that changed since the work began is not mixed into the container."""
    output = tmp_path / "o"
    stop_after(source, output, 0.8)
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match=r"changed or touched since it began: tokenizer.json \(its length\)"):
        run(source, output)
    run(source, output, force=True)
    assert (output / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("what", OTHERS)
def test_force_discards_other_work(source, tmp_path, what):
    """--force throws the other job's work away and makes what was asked for."""
    output = tmp_path / "o"
    stop_after(source, output, 0.8)
    source2, codec, how = altered(source, tmp_path, OTHERS[what])
    run(source2, output, codec, force=True, **how)
    run(source2, tmp_path / "clean", codec, **how)
    assert contents(output) == contents(tmp_path / "clean")


def test_already_there(source, wanted, tmp_path):
    """The same job over its own container does nothing at all."""
    output = tmp_path / "o"
    run(source, output)
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in output.iterdir()}
    assert run(source, output).state == "already there"
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in output.iterdir()} == before


@pytest.mark.parametrize("what", ["codec", "--layers", "source"])
def test_another_container_is_kept(source, wanted, tmp_path, what):
    """Another job over a finished container is refused, saying what differs, and the container is intact."""
    output = tmp_path / "o"
    run(source, output)
    source2, codec, how = altered(source, tmp_path, OTHERS[what])
    with pytest.raises(RequestError) as caught:
        run(source2, output, codec, **how)
    assert caught.value.code == "E0808" and what in caught.value.message
    assert contents(output) == wanted and not (output / PARTIAL).exists()


@pytest.mark.parametrize("change", ["longer", "added", "removed"])
def test_already_there_looks_at_side_files(source, wanted, tmp_path, change):
    """A container whose side files are not what the job would give is not called already there."""
    output = tmp_path / "o"
    run(source, output)
    if change == "removed":
        (source / "tokenizer.json").unlink()
    else:
        (source / ("tokenizer.json" if change == "longer" else "new.txt")).write_text("x" * 1000)
    with pytest.raises(RequestError, match=r"file (tokenizer\.json|new\.txt)"):
        run(source, output)
    assert contents(output) == wanted
    run(source, output, force=True)
    assert (output / "tokenizer.json").exists() is (change != "removed")
    assert verify(output, source=source).exit_code == 0


def test_already_there_needs_its_files(source, wanted, tmp_path):
    """A container that lost a file is not called already there; --force makes it whole."""
    output = tmp_path / "o"
    run(source, output)
    (output / "layers-02.safetensors").unlink()
    with pytest.raises(DataError, match="E0809"):
        run(source, output)
    run(source, output, force=True)
    assert contents(output) == wanted


def test_force_replaces(source, tmp_path):
    """--force replaces a container by another; files the new one does not have are removed, others' are left."""
    output = tmp_path / "o"
    run(source, output, "int8")
    (output / "notes.txt").write_text("mine")
    run(source, output, "fp8", force=True)
    run(source, tmp_path / "clean", "fp8")
    assert contents(output) == contents(tmp_path / "clean") | {"notes.txt": b"mine"}


def test_force_replaces_a_damaged_manifest(source, wanted, tmp_path):
    """A manifest that cannot be read is refused without --force and replaced with it."""
    output = tmp_path / "o"
    run(source, output)
    (output / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="E0301"):
        run(source, output)
    run(source, output, force=True)
    assert contents(output) == wanted


# -- the moment of publication ---------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone: nothing catches this."""


def publication_steps(monkeypatch, fail_at: int | None) -> list[str]:
    """Count the changes that publishing makes to directories; crash before the one numbered `fail_at`."""
    steps: list[str] = []
    active = False

    def counted(kind: str, original):
        def call(self, *args, **kwargs):
            if active:
                if len(steps) == fail_at:
                    raise Crash
                steps.append(f"{kind} {self.name}")
            return original(self, *args, **kwargs)

        return call

    for kind in ("replace", "unlink"):
        monkeypatch.setattr(Path, kind, counted(kind, getattr(Path, kind)))
    link = counted("link", lambda source, target: link_file(source, target))
    link_file = os.link
    monkeypatch.setattr(publishing.os, "link", link)
    rmtree = shutil.rmtree

    def counted_rmtree(path, *args, **kwargs):
        if active:
            if len(steps) == fail_at:
                raise Crash
            steps.append("rmtree")
        return rmtree(path, *args, **kwargs)

    monkeypatch.setattr(publishing.shutil, "rmtree", counted_rmtree)
    publish = publishing.WorkDirectory.publish

    def observed(self, *args, **how):
        nonlocal active
        active = True
        try:
            return publish(self, *args, **how)
        finally:
            active = False

    monkeypatch.setattr(publishing.WorkDirectory, "publish", observed)
    return steps


def small(tmp_path: Path) -> Path:
    return T_BLOCK.having(layers=1, mtp=False).write(tmp_path / "s")


def all_steps(tmp_path: Path) -> int:
    """How many steps publishing a small container over an older one has."""
    with pytest.MonkeyPatch.context() as patch:
        source = small(tmp_path / "count")
        run(source, tmp_path / "count" / "o", "int8")
        steps = publication_steps(patch, None)
        run(source, tmp_path / "count" / "o", "fp8", force=True)
    assert len([s for s in steps if s.startswith("replace")]) > 8 and steps[-1] == "rmtree"
    return len(steps)


@pytest.mark.parametrize("over", ["nothing", "older container"])
def test_crash_at_every_step_of_publication(tmp_path, over):
    """Interrupted before any rename, the old container is whole or the next run finishes the new one, sourceless."""
    source = small(tmp_path)
    run(source, tmp_path / "fp8", "fp8")
    run(source, tmp_path / "int8", "int8")
    new, old = contents(tmp_path / "fp8"), contents(tmp_path / "int8")
    finished = 0
    for step in range(all_steps(tmp_path)):
        output = tmp_path / f"o{step}"
        if over != "nothing":
            run(source, output, "int8")
        with pytest.MonkeyPatch.context() as patch:
            made = publication_steps(patch, step)
            try:
                run(source, output, "fp8", force=True)
                assert len(made) < step + 1
            except Crash:
                pass
        if (output / "manifest.json").exists():  # then what it says is there
            files = read_manifest(output / "manifest.json").files
            present = contents(output)
            assert all(
                present.get(n) == (new if present["manifest.json"] == new["manifest.json"] else old)[n] for n in files
            )
        if not (output / PARTIAL / "manifest.json").exists():
            again = run(source, output, "fp8", force=not (output / "manifest.json").exists() or over != "nothing")
            assert again.manifest.container_id == container_id(tmp_path / "fp8")
        else:
            finished += 1
            if not (output / "manifest.json").exists():
                for opened in (open_container, verify):
                    with pytest.raises(RequestError, match="E0810") as caught:
                        opened(output)
                    assert "same prepare command" in caught.value.remedy
            outcome = prepare(tmp_path / "gone", output, encodings.get("fp8"), workers=1)
            assert outcome.state == "finished publishing"
        assert contents(output) == new and not (output / PARTIAL).exists(), step
    assert finished > 8


def test_finished_by_the_command_line(tmp_path):
    """The command finishes an interrupted publication although the source is gone, or is no longer readable."""
    for gone in (True, False):
        source, output = small(tmp_path / str(gone)), tmp_path / str(gone) / "o"
        with pytest.MonkeyPatch.context() as patch:
            publication_steps(patch, 6)
            with pytest.raises(Crash):
                run(source, output)
        assert not (output / "manifest.json").exists()
        if gone:
            shutil.rmtree(source)
        else:
            (source / "model.safetensors").unlink()
        result = pagestone("prepare-int8", source, "-o", output)
        assert result.returncode == (0 if gone else 2), result.stderr
        assert verify(output).exit_code == 0 and not (output / PARTIAL).exists()


def test_unfinished_publication_that_lost_a_file(tmp_path):
    """If a finished file vanished between the runs that is said, and no manifest appears."""
    source, output = small(tmp_path), tmp_path / "o"
    with pytest.MonkeyPatch.context() as patch:
        publication_steps(patch, 5)
        with pytest.raises(Crash):
            run(source, output)
    (output / PARTIAL / "layers-00.safetensors").unlink(missing_ok=True)
    (output / "layers-00.safetensors").unlink(missing_ok=True)
    with pytest.raises(DataError, match="E0805"):
        run(source, output)
    assert not (output / "manifest.json").exists()


@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_failing_system_calls(tmp_path, monkeypatch, call):
    """A rename or unlink the system refuses is the machine's failure; once it works the next run finishes."""
    source, output = small(tmp_path), tmp_path / "o"
    run(source, output, "int8")
    original = getattr(Path, call)

    def failing(self, *args, **kwargs):
        if "layers-00" in self.name or (call == "unlink" and self.name == "manifest.json"):
            raise OSError(5, "Input/output error", str(self))
        return original(self, *args, **kwargs)

    before = contents(output)
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, failing)
        with pytest.raises(MachineError, match="Input/output error") as caught:
            run(source, output, "fp8", force=True)
        assert caught.value.exit_code == 3 and caught.value.remedy
    if call == "unlink":
        assert contents(output) == before
    run(source, output, "fp8", force=True)
    run(source, tmp_path / "clean", "fp8")
    assert contents(output) == contents(tmp_path / "clean")


# -- what stands in the way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers-00.safetensors", "config.json", "manifest.json", "tokenizer.json"])
def test_link_in_the_output_is_replaced(source, wanted, tmp_path, name):
    """A link in place of a file of the container that is replaced gives way; what it points to keeps every byte."""
    output = tmp_path / "o"
    run(source, output, "fp8")
    (tmp_path / "precious").write_bytes(b"mine")
    (output / name).unlink()
    (output / name).symlink_to(tmp_path / "precious")
    with pytest.raises((DataError, RequestError)):
        run(source, output)
    run(source, output, force=True)
    assert contents(output) == wanted
    assert (tmp_path / "precious").read_bytes() == b"mine" and not (output / name).is_symlink()


def test_link_into_the_source_is_replaced(source, wanted, tmp_path):
    """Also where the link leads to the source's own file."""
    output = tmp_path / "o"
    run(source, output, "fp8")
    for name in ("config.json", "tokenizer.json"):
        (output / name).unlink()
        (output / name).symlink_to(source / name)
    before = contents(source)
    run(source, output, force=True)
    assert contents(source) == before and contents(output) == wanted


@pytest.mark.parametrize(
    "name", ["lock.json", "journal.jsonl", "stale.json", "tmp.json", "config.tmp.json", "pagestone-partial.txt"]
)
def test_side_files_named_like_our_working_files(tmp_path, name):
    """No side file of a source can be mistaken for a file the work directory keeps for itself."""
    source = T_BLOCK.having(layers=1, mtp=False).write(tmp_path / "s", side_files={name: b"of the source"})
    run(source, tmp_path / "o")
    assert (tmp_path / "o" / name).read_bytes() == b"of the source"
    assert verify(tmp_path / "o", source=source).exit_code == 0


def test_work_directory_that_is_a_link(source, tmp_path):
    """A link in place of the work directory is refused, and nothing is written through it."""
    output = tmp_path / "o"
    output.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (output / PARTIAL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="E0801"):
        run(source, output)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_output_behind_a_link(source, wanted, tmp_path):
    """An output directory may be a link to a directory."""
    (tmp_path / "real").mkdir()
    (tmp_path / "o").symlink_to(tmp_path / "real")
    run(source, tmp_path / "o")
    assert contents(tmp_path / "real") == wanted


def test_two_at_once(source, tmp_path):
    """While one process works in a directory another is refused, and neither's work is harmed."""
    output = tmp_path / "o"
    stop_after(source, output, 0.5)
    before = sorted(p.name for p in (output / PARTIAL).iterdir())
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys\nf = open(sys.argv[1], 'r+')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
         "print('held', flush=True)\nsys.stdin.read()", str(output / PARTIAL / LOCK)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == b"held\n"
        refused(pagestone("prepare-int8", source, "-o", output), 2, "E0802", str(output))
        refused(pagestone("prepare-fp8", source, "-o", output, "--force"), 2, "E0802")
        assert sorted(p.name for p in (output / PARTIAL).iterdir()) == before
    finally:
        holder.communicate()
    assert pagestone("prepare-int8", source, "-o", output).returncode == 0


def test_lock_of_a_directory_that_was_published(tmp_path, monkeypatch):
    """Whoever locks a file that its owner removed meanwhile does not believe to own the directory."""
    output = tmp_path / "o"
    flock = fcntl.flock

    def late(handle, how):
        flock(handle, how)
        shutil.rmtree(output / PARTIAL)

    monkeypatch.setattr(publishing.fcntl, "flock", late)
    handles = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(RequestError, match="E0802"):
        open_work(output)
    assert len(os.listdir("/proc/self/fd")) == handles  # noqa: PTH208


def test_interrupted_by_the_user(big_path):
    """Ctrl-C ends with code 130, says that work is kept, and the next run continues."""
    source = sparse_model(big_path / "s", layers=12)
    output = big_path / "o"
    command = [sys.executable, "-m", "pagestone", "prepare-int8", str(source), "-o", str(output), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not (output / PARTIAL / "layers-01.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and "finished layers are kept" in err and "Traceback" not in err, err
    assert out == "" and not (output / "manifest.json").exists()
    kept = stamps(output / PARTIAL)
    names = {json.loads(x)["name"] for x in (output / PARTIAL / JOURNAL).read_text().splitlines()[1:]}
    assert pagestone("prepare-int8", source, "-o", output).returncode == 0
    assert all(stamps(output)[n] == kept[n] for n in kept if n in names) and names & set(kept)


def test_record_survives_and_is_right(tmp_path):
    """A container finished in three runs equals the definition like one made at once."""
    source = SPEC.write(tmp_path / "s", shards=2)
    for share in (0.5, 0.3):
        stop_after(source, tmp_path / "o", share)
    run(source, tmp_path / "o")
    assert assert_is_definition(tmp_path / "o", source, "int8") == 60
