"""The output directory: nothing of somebody else's is overwritten, removed, followed or waited for."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from kits.checkpoints import T_LAYERS, write_checkpoint
from kits.cli import pagestone, refused
from kits.containers import contents
from kits.conversions import run, stop_after

from pagestone.convert import journal
from pagestone.convert import publish as publishing
from pagestone.convert.publish import JOURNAL, LOCK, PARTIAL, REPLACED, open_work
from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.manifest import read_manifest
from pagestone.formats.storage import stamp_of
from pagestone.validate.verify import verify


class Crash(BaseException):
    """The process is gone: nothing catches this."""


def crash_while_placing(patch: pytest.MonkeyPatch, number: int) -> None:
    """The process ends before the file of this number is moved into the output."""
    place, made = publishing.WorkDirectory._place, []

    def placed(*words: object, **how: object) -> None:
        if len(made) == number:
            raise Crash
        made.append(place(*words, **how))

    patch.setattr(publishing.WorkDirectory, "_place", placed)


def pending(source: Path, output: Path, number: int = 2, **how) -> None:
    """Leave a publication that was cut short after `number` files."""
    with pytest.MonkeyPatch.context() as patch:
        crash_while_placing(patch, number)
        with pytest.raises(Crash):
            run(source, output, **how)
    assert not (output / "manifest.json").exists()


# -- what is in the way ----------------------------------------------------------------------------------------------


FOREIGN = {
    "a name of ours": ("layers-00.safetensors", "mine"),
    "a config": ("config.json", "mine"),
    "another name": ("notes.txt", "mine"),
    "a hidden file": (".hidden", "mine"),
    "a manifest of something else": ("manifest.json", '{"name": "a web page"}'),
    "a directory": ("sub", None),
    "a link": ("link", Path("nowhere")),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_files(source, tmp_path, what, force):
    """An output that holds anything else than a container or unfinished work is refused, with --force too."""
    output = tmp_path / "o"
    output.mkdir()
    name, text = FOREIGN[what]
    if text is None:
        (output / name).mkdir()
    elif isinstance(text, Path):
        (output / name).symlink_to(text)
    else:
        (output / name).write_text(text)
    with pytest.raises(RequestError, match="E0807") as caught:
        run(source, output, force=force)
    assert name in caught.value.message and "--force" not in str(caught.value.remedy)
    assert [p.name for p in output.iterdir()] == [name]
    assert not isinstance(text, str) or (output / name).read_text() == text


SYSTEMS = (".DS_Store", ".gitattributes", "Thumbs.db", "desktop.ini", "lost+found", "System Volume Information")


@pytest.mark.parametrize("when", ["before", "while it was stopped", "converting", "publishing", "replacing"])
def test_what_systems_put_there(source, wanted, tmp_path, monkeypatch, when):
    """What file systems and desktops leave in a directory by themselves is in nobody's way, and stays as it is."""
    output = tmp_path / "o"
    output.mkdir()

    def appear(*_: object) -> None:
        for name in SYSTEMS:
            if "." in name:
                (output / name).write_bytes(b"theirs")
            else:
                (output / name).mkdir(mode=0o700, exist_ok=True)

    if when == "converting":
        run(source, output, progress=appear)
    elif when == "publishing":
        require = publishing.WorkDirectory.require_intact
        monkeypatch.setattr(publishing.WorkDirectory, "require_intact", lambda self: (appear(), require(self)))
        run(source, output)
    else:
        if when == "while it was stopped":
            stop_after(source, output, 0.5)
        if when == "replacing":
            run(source, output, "bf16")
        appear()
        run(source, output, force=when == "replacing")
    report = verify(output)
    assert report.errors == 0
    assert {(f.code, f.file) for f in report.findings} == {("W1004", name) for name in SYSTEMS}
    for name in SYSTEMS:
        assert (output / name).is_dir() or (output / name).read_bytes() == b"theirs"
        (output / name).unlink() if "." in name else (output / name).rmdir()
    assert contents(output) == wanted


@pytest.mark.parametrize("name", ["._config.json", ".DS_Store.bak", "lost+found2", "Thumbs"])
def test_what_no_system_put_there(source, tmp_path, name):
    """The list is of whole names."""
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / name).write_bytes(b"mine")
    with pytest.raises(RequestError, match="E0807"):
        run(source, tmp_path / "o")


def test_unfinished_work_beside_foreign_files(source, tmp_path):
    """Unfinished work does not make the other files of its directory ours."""
    output = tmp_path / "o"
    stop_after(source, output, 0.5)
    (output / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(RequestError, match="E0807"):
            run(source, output, force=force)
    (output / "notes.txt").unlink()
    assert run(source, output).state == "converted"


@pytest.mark.parametrize("below", ["", "below", "a/b"])
def test_a_link_that_leads_nowhere(source, tmp_path, below):
    """As of a disk that is not mounted: it is neither followed nor replaced."""
    link = tmp_path / "o"
    link.symlink_to(tmp_path / "none")
    for force in (False, True):
        with pytest.raises(RequestError, match="a link that leads nowhere") as caught:
            run(source, link / below, force=force)
        assert caught.value.code == "E0825" and str(link) in str(caught.value)
    assert link.readlink() == tmp_path / "none" and not (tmp_path / "none").exists()
    (tmp_path / "none").mkdir()
    assert run(source, link / below).state == "converted"


def test_an_address_as_output(source, tmp_path, monkeypatch):
    """Nothing is made of it here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="E0418"):
        run(source, Path("s3://bucket/o"))
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize("word", ["-o", "checkpoint"])
def test_empty_word(source, tmp_path, word):
    """An empty word, as an unset variable gives, is not the directory one is in."""
    (tmp_path / "here").mkdir()
    words = ("", "-o", tmp_path / "o") if word == "checkpoint" else (source, "-o", "")
    refused(pagestone("prepare-int8", *words, cwd=tmp_path / "here"), 2, "E0813", "empty")
    assert not list((tmp_path / "here").iterdir()) and not (tmp_path / "o").exists()


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("when", ["converting", "publishing"])
@pytest.mark.parametrize("name", ["layers-01.safetensors", "tokenizer.json", "manifest.json", "experts.parquet"])
def test_file_that_appears(source, wanted, tmp_path, monkeypatch, name, when, links):
    """A file that appears in the output during the conversion is not overwritten; moved away, the rest is quick."""
    output, placed = tmp_path / "o", []

    def appear(*_: object) -> None:
        if not placed:
            placed.append((output / name).write_bytes(b"mine"))

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    place = publishing.WorkDirectory._place
    with monkeypatch.context() as patch:
        if when == "publishing":
            patch.setattr(publishing.WorkDirectory, "_place", lambda *a, **how: (appear(), place(*a, **how))[1])
        if not links:
            patch.setattr(publishing.os, "link", no_links)
        with pytest.raises(RequestError, match="E0811") as caught:
            run(source, output, progress=appear if when == "converting" else lambda _: None)
    assert str(output / name) in str(caught.value) and (output / name).read_bytes() == b"mine"
    if when == "publishing" and links:
        for force in (False, True):  # what is decided is not given up for a file that can be moved away
            with pytest.raises(RequestError, match="E0811"):
                run(source, output, force=force)
    assert (output / name).read_bytes() == b"mine"
    (output / name).unlink()
    read = []
    run(source, output, progress=read.append)
    assert contents(output) == wanted and not read


def test_force_does_not_replace_what_appeared(source, tmp_path):
    """Over a container too: only what that container listed is replaced, and no directory."""
    output = tmp_path / "o"
    run(source, output, "int8")
    before = contents(output)
    (source / "new.txt").write_text("of the source")
    (output / "new.txt").write_text("mine")
    with pytest.raises(RequestError, match="E0811"):
        run(source, output, "fp8", force=True)
    assert contents(output) == before | {"new.txt": b"mine"}, "the old container is whole"
    (output / "new.txt").unlink()
    (output / "config.json").unlink()
    (output / "config.json").mkdir()
    with pytest.raises(RequestError, match="E0811"):
        run(source, output, "fp8", force=True)
    (output / "config.json").rmdir()
    run(source, output, "fp8", force=True)
    assert verify(output, source=source).exit_code == 0 and (output / "new.txt").read_text() == "of the source"


def test_replacing_removes_only_what_the_old_one_had(source, tmp_path):
    """Files of the old container that the new one lacks go, if they are the ones it listed; others stay."""
    output = tmp_path / "o"
    run(source, output, "int8")
    (output / "layers-00.rowsum.safetensors").write_text("something else of that name")
    run(source, output, "fp8", force=True)
    kept = {p.name for p in output.iterdir()} - set(read_manifest(output / "manifest.json").files) - {"manifest.json"}
    assert kept == {"layers-00.rowsum.safetensors"}


def test_unfinished_work_of_another_job_survives(source, tmp_path):
    """What --force began over a container is not thrown away by asking for the container that is there."""
    output = tmp_path / "o"
    run(source, output, "int8")
    total, done = sum(f.stat().st_size for f in source.iterdir()), []

    def stop(nbytes: int) -> None:
        done.append(nbytes)
        if sum(done) > 0.7 * total:
            raise Crash

    with pytest.raises(Crash):
        run(source, output, "fp8", force=True, progress=stop, workers=1)
    before = {p.name: p.stat().st_ino for p in (output / PARTIAL).iterdir()}
    assert run(source, output, "int8").state == "already there"
    assert {p.name: p.stat().st_ino for p in (output / PARTIAL).iterdir()} == before


# -- what the work directory says ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", ["absolute", "up", "beside"])
def test_nothing_in_the_work_directory_names_a_file_to_remove(source, tmp_path, stale):
    """No list in the work directory makes us remove a file: neither elsewhere nor beside the container."""
    output = tmp_path / "o"
    pending(source, output)
    precious = output / "mine.txt" if stale == "beside" else tmp_path / "precious"
    precious.write_bytes(b"mine")
    name = {"absolute": str(precious), "up": "../precious", "beside": "mine.txt"}[stale]
    for own in (".stale.json", REPLACED):
        (output / PARTIAL / own).write_text(json.dumps([name]))
        (output / PARTIAL / own).with_suffix(".tmp").write_text(json.dumps([name]))
    run(source, output)
    assert precious.read_bytes() == b"mine"


def disguise(path: Path, how: str, target: Path) -> None:
    """Put something else in place of a file."""
    path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    else:
        path.symlink_to(target)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("how", ["pipe", "directory", "link", "link to nothing"])
@pytest.mark.parametrize("name", [LOCK, JOURNAL])
def test_our_own_files_are_regular(source, wanted, tmp_path, name, how, force):
    """A link, pipe or directory in place of the lock or the journal is refused, not followed and not waited for."""
    output = tmp_path / "o"
    stop_after(source, output, 0.6)
    target = tmp_path / "target"
    if how == "link":
        target.write_bytes((output / PARTIAL / name).read_bytes())
    disguise(output / PARTIAL / name, how, target)
    before = target.read_bytes() if target.exists() else None
    if force and name == JOURNAL:  # --force leaves it behind
        run(source, output, force=True)
        assert contents(output) == wanted
    else:
        with pytest.raises(RequestError, match="E0814") as caught:
            run(source, output, force=force)
        assert str(output / PARTIAL / name) in str(caught.value)
    assert (target.read_bytes() if target.exists() else None) == before


@pytest.mark.parametrize("how", ["file", "pipe", "link to nothing"])
def test_work_directory_that_is_none(source, tmp_path, how):
    """Anything but a directory in place of the work directory is refused."""
    output = tmp_path / "o"
    output.mkdir()
    (output / PARTIAL).touch() if how == "file" else disguise(output / PARTIAL, how, tmp_path / "nothing")
    for force in (False, True):
        with pytest.raises(RequestError, match="E0801"):
            run(source, output, force=force)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", [f".{JOURNAL}.tmp", ".config.json.tmp", "layers-00.safetensors", "experts.parquet"])
def test_links_in_the_work_directory_are_not_written_through(source, wanted, tmp_path, name):
    """Whatever name we are about to write may be a link: it is removed, what it points to is not touched."""
    output = tmp_path / "o"
    (output / PARTIAL).mkdir(parents=True)
    (tmp_path / "precious").write_bytes(b"mine")
    begin = publishing.WorkDirectory.begin

    def begun(self, *words, **how) -> None:  # after the work directory was cleared
        begin(self, *words, **how)
        (output / PARTIAL / name).symlink_to(tmp_path / "precious")

    with pytest.MonkeyPatch.context() as patch:
        if name.startswith(f".{JOURNAL}"):
            (output / PARTIAL / name).symlink_to(tmp_path / "precious")
        else:
            patch.setattr(publishing.WorkDirectory, "begin", begun)
        run(source, output)
    assert (tmp_path / "precious").read_bytes() == b"mine" and contents(output) == wanted


@pytest.mark.parametrize("name", ["layers-00.safetensors", "config.json"])
def test_finished_file_that_is_a_link(source, wanted, tmp_path, name):
    """A link in place of a finished file is no finished file, though it leads to the same bytes."""
    output = tmp_path / "o"
    stop_after(source, output, 0.8)
    kept = output / PARTIAL / name
    shutil.move(kept, tmp_path / "moved")
    kept.symlink_to(tmp_path / "moved")
    run(source, output)
    assert contents(output) == wanted and not (output / name).is_symlink()
    assert (tmp_path / "moved").read_bytes() == wanted[name]


def altered_line(line: bytes, how: str) -> bytes:
    table = json.loads(line)
    if how == "statistics":
        table["stats"][0][0] += 1.0
    elif how == "digest":
        table["xxh3"] = "0" * 32
    elif how == "no stamp":
        del table["stamp"]
    elif how == "deep":
        return b"[" * 100_000 + b"\n"
    return json.dumps(table).encode() + b"\n"


@pytest.mark.parametrize("how", ["statistics", "digest", "no stamp", "deep"])
def test_journal_lines_prove_themselves(source, wanted, tmp_path, how):
    """A line that was altered is refused by name; --force begins anew."""
    output = tmp_path / "o"
    stop_after(source, output, 0.9)
    path = output / PARTIAL / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"layers-00.safetensors"' in line)
    lines[number] = altered_line(lines[number], how)
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match="E0804") as caught:
        run(source, output)
    assert "--force" in caught.value.remedy
    run(source, output, force=True)
    assert contents(output) == wanted


WRONG_TYPES = {
    "name": [["x"], 3, None],
    "nbytes": ["3", 3.0, True, None],
    "xxh3": ["00", "x" * 32, 3],
    "records": ["x", {}, [3], ["00"]],
    "stats": [[], [[1.0] * 5], [["x"] * 6], [3], "x"],
    "notes": [[], {"x": "y"}, 3],
    "stamp": [[1, 2], [1, 2, 3, 4], "abc", [1, 2, "3"], None],
}


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_journal_lines_of_wrong_types(source, tmp_path, field):
    """A line that proves itself and means nothing is refused like a damaged one, whatever is wrong in it."""
    output = tmp_path / "o"
    stop_after(source, output, 0.9)
    path = output / PARTIAL / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"layers-00.safetensors"' in line)
    for value in WRONG_TYPES[field]:
        table = json.loads(lines[number]) | {field: value}
        del table["digest"]
        table["digest"] = journal._own_digest(table)
        path.write_bytes(b"".join([*lines[:number], json.dumps(table).encode() + b"\n", *lines[number + 1 :]]))
        with pytest.raises(DataError, match="E0804"):
            run(source, output)
    path.write_bytes(b"".join(lines))
    assert run(source, output).state == "converted"


def test_journal_of_other_files(source, wanted, tmp_path):
    """Lines for files this job does not make, or of another length, count for nothing: not even as disk space."""
    output = tmp_path / "o"
    stop_after(source, output, 0.9)
    (output / PARTIAL / "huge").write_bytes(b"")
    os.truncate(output / PARTIAL / "huge", 1 << 40)
    with open_work(output) as work:
        job, *lines = map(json.loads, work.file(JOURNAL).read_text().splitlines())
        files = {line["name"]: (line["nbytes"], len(line["records"]), 0) for line in lines}
        work.begin(job, files, force=False)
        (output / PARTIAL / "huge").touch()
        os.truncate(output / PARTIAL / "huge", 1 << 40)
        stamp = stamp_of((output / PARTIAL / "huge").stat())
        work.record(journal.FinishedFile("huge", 1 << 40, "0" * 32, stamp=stamp))
    with open_work(output) as work:
        work.begin(job, files, force=False)
        assert set(work.finished) == set(files) and not work.file("huge").exists()
    run(source, output)
    assert contents(output) == wanted


# -- publications that cannot be finished ----------------------------------------------------------------------------


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("what", ["manifest", "empty manifest", "pipe", "lost file", "altered file", "replaced list"])
def test_force_leaves_a_broken_publication(source, wanted, tmp_path, what, over):
    """A damaged manifest or a lost file of a publication is refused by name; --force gives it up and converts anew."""
    output = tmp_path / "o"
    if over:
        run(source, output, "int8")
    pending(source, output, number=3, codec="fp8", force=over)
    work = output / PARTIAL
    left = next(n for n in ("tokenizer.json", "layers-01.safetensors") if (work / n).is_file())
    if what == "manifest":
        raw = (work / "manifest.json").read_bytes()
        (work / "manifest.json").write_bytes(raw.replace(b"fp8", b"fp9"))
    elif what == "empty manifest":
        (work / "manifest.json").write_bytes(b"")
    elif what == "pipe":
        disguise(work / "manifest.json", "pipe", work)
    elif what == "lost file":
        (work / left).unlink()
        (output / left).unlink(missing_ok=True)
    elif what == "altered file":
        raw = bytearray((work / left).read_bytes())
        raw[-1] ^= 1
        (work / left).write_bytes(raw)
    else:
        (work / REPLACED).write_bytes(b"\xff")
        (work / "manifest.json").write_bytes(b"{}")
    with pytest.raises(PagestoneError, match=r"E0805|E0812|E0814"):
        run(source, output)
    assert not (output / "manifest.json").exists()
    run(source, output, force=True)
    assert contents(output).items() >= wanted.items()
    assert verify(output, source=source).exit_code == 0 and not (output / PARTIAL).exists()


def test_old_files_are_not_taken_for_moved_ones(source, tmp_path):
    """A file of the old container that has the length of a lost new one does not make the publication whole."""
    output = tmp_path / "o"
    run(source, output, "int8")
    lost = "layers-01.safetensors"
    tensors = T_LAYERS.tensors()
    name = next(n for n in tensors if "layers.1" in n and "down_proj" in n)
    altered = tensors | {name: tensors[name].with_value(3.0, 0, 0, 0)}
    source2 = write_checkpoint(tmp_path / "source2", altered, T_LAYERS.config(), shards=2)
    pending(source2, output, number=1, force=True)
    assert (output / lost).stat().st_size == (output / PARTIAL / lost).stat().st_size
    (output / PARTIAL / lost).unlink()
    with pytest.raises(DataError, match="E0805"):
        run(source2, output)


def test_given_up_remains_need_force(source, wanted, tmp_path):
    """After a publication was given up, and that run was stopped, only --force goes on over what it left."""
    output = tmp_path / "o"
    pending(source, output, number=3)
    (output / PARTIAL / "manifest.json").write_bytes(b"{}")

    def stop(_: int) -> None:
        raise Crash

    with pytest.raises(Crash):
        run(source, output, force=True, progress=stop)
    with pytest.raises(RequestError, match="E0807") as caught:
        run(source, output)
    assert "--force" in caught.value.remedy
    run(source, output, force=True)
    assert contents(output) == wanted
