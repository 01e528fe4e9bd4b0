"""What was true when the plan was made is looked at again before it is promised: source, finished work, container."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kits.checkpoints import INDEX, T_LAYERS
from kits.containers import contents
from kits.conversions import run, stop_after

from pagestone.convert import report
from pagestone.convert.publish import JOURNAL, PARTIAL
from pagestone.formats import storage
from pagestone.formats.errors import DataError, RequestError
from pagestone.validate.verify import verify

SHARD = "model-00002-of-00002.safetensors"


def flip(path: Path, at: int = -1, *, keep_times: bool = False) -> None:
    """Flip the lowest bit of one byte in place; `keep_times` sets the modification time back."""
    status = path.stat()
    with path.open("r+b") as handle:
        handle.seek(at % status.st_size)
        (byte,) = handle.read(1)
        handle.seek(at % status.st_size)
        handle.write(bytes([byte ^ 1]))
    if keep_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    """Another file of the same length and time under the same name."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    flip(other, keep_times=True)
    other.replace(path)


def silently(path: Path) -> None:
    flip(path, keep_times=True)


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a bit of a shard": (SHARD, flip),
    "a bit of a shard, its time set back": (SHARD, silently),
    "a shard replaced": (SHARD, replace),
    "a shard gone": ("model-00001-of-00002.safetensors", Path.unlink),
    "config": ("config.json", lambda p: p.write_bytes(p.read_bytes().replace(b"1e-06", b"1e-05"))),
    "config, its time set back": ("config.json", silently),
    "index": (INDEX, lambda p: p.write_bytes(p.read_bytes() + b" ")),
    "index replaced": (INDEX, replace),
    "tokenizer": ("tokenizer.json", silently),
    "tokenizer gone": ("tokenizer.json", Path.unlink),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("what", CHANGES)
def test_source_that_changes_under_the_converter(source, tmp_path, what, workers):
    """A file of the source that changes during the conversion is named, and nothing is published, nor reused later."""
    name, change = CHANGES[what]
    output, changed = tmp_path / "o", []
    total = sum(f.stat().st_size for f in source.glob("*.safetensors"))

    def progress(nbytes: int) -> None:
        if sum(changed) < total * 0.6 <= sum(changed) + nbytes:
            change(source / name)
        changed.append(nbytes)

    with pytest.raises(DataError, match="E0703") as caught:
        run(source, output, workers=workers, progress=progress)
    assert str(source / name) in str(caught.value) and "--force" in caught.value.remedy
    assert not (output / "manifest.json").exists()
    if not (source / name).exists():
        return
    (source / name).write_bytes(T_LAYERS.write(tmp_path / "again", shards=2).joinpath(name).read_bytes())
    with pytest.raises(RequestError, match="E0803"):
        run(source, output)
    run(source, output, force=True)
    run(source, tmp_path / "clean")
    assert contents(output) == contents(tmp_path / "clean")


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
def test_contents_of_small_files_are_compared(source, tmp_path, monkeypatch, name):
    """Where a file system keeps no times, the contents of small files still tell."""
    monkeypatch.setattr(storage, "stamp_of", lambda status: (status.st_size, 0, 0))
    done, total = [], sum(f.stat().st_size for f in source.glob("*.safetensors"))

    def progress(nbytes: int) -> None:
        if sum(done) < total * 0.6 <= sum(done) + nbytes:
            flip(source / name)
        done.append(nbytes)

    with pytest.raises(DataError, match="E0703") as caught:
        run(source, tmp_path / "o", progress=progress)
    assert str(source / name) in str(caught.value) and "contents" in caught.value.message


@pytest.mark.parametrize("change", [flip, silently, replace])
def test_source_that_changed_while_the_work_rested(source, tmp_path, change):
    """Work is not continued over a shard that changed since, whatever its modification time says."""
    output = tmp_path / "o"
    stop_after(source, output, 0.7)
    change(source / SHARD)
    with pytest.raises(RequestError, match=f"changed or touched since it began: {SHARD} ") as caught:
        run(source, output)
    assert caught.value.code == "E0803"
    run(source, output, force=True)
    assert verify(output, source=source).exit_code == 0


TOUCHES: dict[str, Callable[[Path], None]] = {
    "a mode": lambda p: p.chmod(0o600),
    "an owner": lambda p: os.chown(p, os.getuid(), os.getgid()),
    "a link": lambda p: os.link(p, p.parent.parent / "link"),
    "a time": lambda p: os.utime(p),
}


@pytest.mark.parametrize("name", [SHARD, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("touch", TOUCHES)
def test_source_that_was_touched_while_the_work_rested(source, tmp_path, touch, name):
    """Every touch is told by the file's name and by what of it is another, and the remedy is one that works."""
    output = tmp_path / "o"
    stop_after(source, output, 0.7)
    TOUCHES[touch](source / name)
    done = len((output / PARTIAL / JOURNAL).read_bytes().splitlines()) - 1
    with pytest.raises(RequestError, match="E0803") as caught:
        run(source, output)
    said = f"touched since it began: {name} (its {'modification' if touch == 'a time' else 'change'} time)"
    assert caught.value.message.endswith(said)
    remedy = str(caught.value.remedy)
    assert remedy.startswith("use --force to begin anew: that discards ") and "the command that began it" not in remedy
    assert f"discards {done} finished file(s), " in remedy and "iB" in remedy
    assert run(source, output, force=True).state == "converted"


def test_side_files_that_come_and_go_while_the_work_rested(source, tmp_path):
    """Each in its own words; what was added can be moved away, and the work is continued."""
    output = tmp_path / "o"
    stop_after(source, output, 0.7)
    lines = (output / PARTIAL / JOURNAL).read_bytes().splitlines()[1:]
    finished = {n: (output / PARTIAL / n).stat().st_ino for n in (json.loads(line)["name"] for line in lines)}
    assert any(name.startswith("layers-") for name in finished)
    (source / "NOTICE.txt").write_text("new")
    with pytest.raises(RequestError, match="E0803") as caught:
        run(source, output)
    assert caught.value.message.endswith("is here; added to the source since it began: NOTICE.txt")
    assert str(caught.value.remedy).startswith("move what was added elsewhere and run the same command")
    (source / "NOTICE.txt").rename(tmp_path / "NOTICE.txt")
    assert run(source, output).state == "converted"
    assert finished.items() <= {p.name: p.stat().st_ino for p in output.iterdir()}.items()

    stop_after(source, tmp_path / "o2", 0.7)
    (source / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match="E0803") as caught:
        run(source, tmp_path / "o2")
    assert caught.value.message.endswith("is here; gone from the source since it began: tokenizer.json")
    assert str(caught.value.remedy).startswith("use --force to begin anew")
    with pytest.raises(RequestError, match=r"codec differ.*gone from the source") as caught:
        run(source, tmp_path / "o2", "bf16")


def test_many_files_that_were_touched(source, tmp_path):
    """A few are named, the others counted."""
    stop_after(source, tmp_path / "o", 0.7)
    for file in source.iterdir():
        file.touch()
    with pytest.raises(RequestError, match=r"config\.json \(its modification time\), .* and \d+ more"):
        run(source, tmp_path / "o")


@pytest.mark.parametrize("facts", [None, [], {"config.json": 1}, {"config.json": [1, 2]}, "x"])
def test_work_of_which_nothing_is_said(source, tmp_path, facts):
    """What the journal says of the source is foreign, and so is a journal with other facts: refused, not believed."""
    output = tmp_path / "o"
    stop_after(source, output, 0.7)
    journal = output / PARTIAL / JOURNAL
    first, _, rest = journal.read_bytes().partition(b"\n")
    job = json.loads(first)
    journal.write_bytes(json.dumps(job | {"source files": facts}).encode() + b"\n" + rest)
    with pytest.raises(RequestError, match="E0803"):
        run(source, output)
    journal.write_bytes(json.dumps({"codec": "int8"}).encode() + b"\n" + rest)
    with pytest.raises(RequestError, match=r"another version of pagestone(.|\n)*E0803"):
        run(source, output)
    journal.write_bytes(first + b"\n" + rest)
    assert run(source, output).state == "converted"


def test_what_is_not_copied_may_change(source, wanted, tmp_path):
    """Files of the source that the container is not made from may change, come and go."""
    (source / "code.py").write_text("x = 1")
    output, changed = tmp_path / "o", []

    def progress(_: int) -> None:
        if not changed:
            changed.append((source / "code.py").write_text("x = 2"))
            (source / "notes.txt").write_text("new")

    run(source, output, progress=progress)
    assert contents(output) == wanted


# -- the container that is there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [flip, silently, replace, None])
def test_already_there_says_what_it_knows(source, tmp_path, change):
    """A source that was written after the container is named: its headers were compared, its data was not."""
    output = tmp_path / "o"
    run(source, output)
    if change is not None:
        change(source / SHARD)
    outcome = run(source, output)
    assert outcome.state == "already there"
    told = [w for w in outcome.warnings if SHARD in w and "verify" in w and "--source" in w and "1 file(s)" in w]
    assert bool(told) is (change is not None), outcome.warnings
    assert "data of tensors were not" in report.outcome_text(outcome, output, 0.0)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_already_there_compares_small_files(source, wanted, tmp_path, name):
    """A side file or config of the same length and other contents is another job."""
    output = tmp_path / "o"
    run(source, output)
    raw = (source / name).read_bytes()
    (source / name).write_bytes(raw.replace(b"1.0" if name == "tokenizer.json" else b"1e-06", b"2.0"[: len(raw)]))
    with pytest.raises(RequestError, match=r"E0808") as caught:
        run(source, output)
    assert name in caught.value.message or "source" in caught.value.message
    assert contents(output) == wanted


# -- finished work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers-00.safetensors", "layers-00.rowsum.safetensors", "config.json"])
@pytest.mark.parametrize("change", [flip, silently, replace, Path.unlink])
def test_finished_file_that_is_altered_during_the_run(source, wanted, tmp_path, name, change):
    """A finished file that was altered before the publication is not published, and made again by the next run."""
    output, changed = tmp_path / "o", []

    def progress(_: int) -> None:
        lines = (output / PARTIAL / JOURNAL).read_text() if not changed else ""
        if f'"{name}"' in lines:
            changed.append(change(output / PARTIAL / name))

    with pytest.raises(DataError, match="E0815") as caught:
        run(source, output, progress=progress, workers=1)
    assert str(output / PARTIAL / name) in str(caught.value) and not (output / "manifest.json").exists()
    read = []
    run(source, output, progress=read.append)
    assert contents(output) == wanted
    assert sum(read) < sum(f.stat().st_size for f in source.glob("*.safetensors")) * 0.7, "the others were kept"


@pytest.mark.parametrize("change", [flip, silently])
def test_finished_file_that_is_altered_while_the_work_rests(source, wanted, tmp_path, change):
    """So it is when the work is continued: the bytes decide, not the length."""
    output = tmp_path / "o"
    stop_after(source, output, 0.9)
    change(output / PARTIAL / "layers-00.safetensors")
    run(source, output)
    assert contents(output) == wanted


def test_work_directory_that_was_copied(source, wanted, tmp_path):
    """Finished files of a copied work directory have other stamps; their digests say that they are whole."""
    stop_after(source, tmp_path / "o", 0.9)
    shutil.copytree(tmp_path / "o", tmp_path / "copy", copy_function=shutil.copyfile)
    file = tmp_path / "copy" / PARTIAL / "layers-00.safetensors"
    before, read = file.stat().st_ino, []
    run(source, tmp_path / "copy", progress=read.append)
    assert contents(tmp_path / "copy") == wanted
    assert (tmp_path / "copy" / "layers-00.safetensors").stat().st_ino == before
    assert sum(read) < sum(f.stat().st_size for f in source.glob("*.safetensors")) / 2
