"""Chat templates in the one subfolder that loaders look into: carried, published, verified, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from kits.checkpoints import SIDE_FILES, T_ORDER, write_checkpoint
from kits.containers import container_id
from kits.conversions import prepare

from pagestone.convert import publish
from pagestone.convert.checkpoint import open_checkpoint
from pagestone.formats import encodings
from pagestone.formats.digests import canonical_json, digest
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.manifest import read_manifest
from pagestone.reader.container import open_container, open_to_run
from pagestone.validate import plain_reader
from pagestone.validate.verify import verify

SPEC = T_ORDER.having(layers=1, experts=2, mtp=False)
FOLDER = "additional_chat_templates"
TOOL, RAG = f"{FOLDER}/tool_use.jinja", f"{FOLDER}/rag.jinja"
BOTH = {"tool_use.jinja": b"{{ tools }}", "rag.jinja": b"{{ documents }}"}


def source(root: Path, templates: dict[str, bytes] = BOTH) -> Path:
    SPEC.write(root, side_files={**SIDE_FILES, "chat_template.json": b'{"chat_template": "x"}'})
    (root / FOLDER).mkdir()
    for name, data in templates.items():
        (root / FOLDER / name).write_bytes(data)
    return root


def run(root: Path, output: Path, **how):
    return prepare(root, output, encodings.get("int8"), workers=2, **how)


def test_templates_are_carried(tmp_path):
    """Into the same subfolder, byte for byte, under the id; every reader of ours opens the container."""
    root = source(tmp_path / "s")
    outcome = run(root, tmp_path / "o")
    assert {TOOL, RAG, "chat_template.json"} <= set(outcome.manifest.files) and outcome.warnings == ()
    assert {p.name: p.read_bytes() for p in (tmp_path / "o" / FOLDER).iterdir()} == BOTH
    assert not (tmp_path / "o" / ".pagestone-partial").exists()
    assert not verify(tmp_path / "o", source=root).findings
    assert open_to_run(tmp_path / "o").container_id == container_id(tmp_path / "o")
    assert plain_reader.main(tmp_path / "o") == 0
    assert run(root, tmp_path / "o").state == "already there"
    assert run(root, tmp_path / "p").manifest.container_id == outcome.manifest.container_id
    other = source(tmp_path / "t", BOTH | {"rag.jinja": b"{{ document }}s"})
    assert run(other, tmp_path / "q").manifest.container_id != outcome.manifest.container_id


def test_transformers_finds_them(oracle, tmp_path):
    """A tokenizer loaded from the container has them by name."""
    oracle("transformers")
    tokenizers = oracle("tokenizers")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    root = source(tmp_path / "s")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(root)
    (root / "chat_template.jinja").write_text("{{ messages }}")
    run(root, tmp_path / "o")
    found = AutoTokenizer.from_pretrained(tmp_path / "o").chat_template
    assert found == {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}


@pytest.mark.parametrize("stated", ["{{ messages }}", [{"name": "default", "template": "{{ messages }}"},
                                                       {"name": "rag", "template": "x"}]])  # fmt: skip
def test_template_of_the_processor(oracle, tmp_path, tiny, stated):
    """chat_template.json is carried, and is the model's template where the tokenizer's own files have none."""
    oracle("transformers")
    from pagestone.reader.text import open_tokenizer

    root = SPEC.write(tmp_path / "s")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / name).write_bytes((tiny / name).read_bytes())
    (root / "chat_template.json").write_text(json.dumps({"chat_template": stated}))
    run(root, tmp_path / "o")
    talk = [{"role": "user", "content": "hello"}]
    tokenizer = open_tokenizer(tmp_path / "o")
    assert tokenizer.decode(tokenizer.chat(talk)) == str(talk)
    (tmp_path / "o" / "chat_template.jinja").write_text("hello")
    assert tokenizer.decode(open_tokenizer(tmp_path / "o").chat(talk)) == "hello"
    for name in ("chat_template.jinja", "chat_template.json"):
        (tmp_path / "o" / name).unlink()
    with pytest.raises(RequestError, match="E1231"):
        open_tokenizer(tmp_path / "o").chat(talk)


def test_damage_is_found(tmp_path):
    """A template that is changed, gone or one too many is named."""
    root = source(tmp_path / "s")
    run(root, tmp_path / "o")
    (tmp_path / "o" / FOLDER / "more.jinja").write_bytes(b"x")
    assert [(f.code, f.file) for f in verify(tmp_path / "o").findings] == [("W1004", f"{FOLDER}/more.jinja")]
    (tmp_path / "o" / RAG).write_bytes(b"{{ documentz }}")
    assert ("E1001", RAG) in [(f.code, f.file) for f in verify(tmp_path / "o").findings]
    with pytest.raises(DataError, match="E1216"):
        open_to_run(tmp_path / "o")
    (tmp_path / "o" / RAG).unlink()
    assert ("E0332", RAG) in [(f.code, f.file) for f in verify(tmp_path / "o").findings]
    with pytest.raises(DataError, match="E0332"):
        open_container(tmp_path / "o")


NAMES = [f"{FOLDER}/../x.jinja", f"{FOLDER}/", f"{FOLDER}/x.py", f"other/{FOLDER}/x.jinja", "other/x.jinja", f"/{RAG}",
         f"./{RAG}", f"{FOLDER}//x.jinja", f"{FOLDER}/a/x.jinja", f"{FOLDER}/\x1f.jinja", "/x.jinja",
         f"{FOLDER.upper()}/x.jinja"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_other_path_is_a_name(tmp_path, name):
    """One folder, one level, one kind of file: any other name with a path in it is refused by both readers."""
    run(source(tmp_path / "s"), tmp_path / "o")
    path = tmp_path / "o" / "manifest.json"
    table = json.loads(path.read_bytes())
    table["files"][name] = table["files"].pop(RAG)
    del table["digest"]
    table["digest"] = digest(canonical_json(table)).hex()
    path.write_bytes(canonical_json(table))
    with pytest.raises(DataError, match="E0306"):
        read_manifest(path)
    assert plain_reader.main(tmp_path / "o") == 1


def test_what_else_lies_in_the_folder(tmp_path):
    """It is listed by its path, with the rule by which it stays; links and halves are what they are elsewhere."""
    root = source(
        tmp_path / "s", BOTH | {"x.py": b"", "x.json": b"{}", "w.bin": b"", ".h.jinja": b"", "z.jinja": b"\0"}
    )
    (root / FOLDER / "deep").mkdir()
    (root / FOLDER / "deep" / "y.jinja").write_text("y")
    (root / FOLDER / "out.jinja").symlink_to("/etc/hostname")
    rules = {f.name: f.rule for f in open_checkpoint(root).side_files}
    inside = {n.removeprefix(f"{FOLDER}/"): r for n, r in rules.items() if n.startswith(FOLDER)}
    assert {n for n, rule in inside.items() if rule is None} == set(BOTH)
    assert set(inside) == {*BOTH, "x.py", "x.json", "w.bin", ".h.jinja", "z.jinja", "deep", "out.jinja"}
    assert not run(root, tmp_path / "o", include_code=True).manifest.files.keys() & {f"{FOLDER}/x.py"}
    (root / FOLDER / "rag.jinja.part").write_text("")
    with pytest.raises(DataError, match="E0414"):
        open_checkpoint(root)


def test_folder_that_is_a_link(tmp_path):
    """Of the source: it leaves the checkpoint. Of the output: nothing is written or removed through it."""
    root = source(tmp_path / "s")
    elsewhere = tmp_path / "elsewhere"
    (root / FOLDER).rename(elsewhere)
    (root / FOLDER).symlink_to(elsewhere)
    assert all(f.rule == "a link that leaves the checkpoint" for f in open_checkpoint(root).side_files if "/" in f.name)
    root = source(tmp_path / "t")
    run(root, tmp_path / "o")
    (tmp_path / "o" / FOLDER).rename(tmp_path / "moved")
    (tmp_path / "o" / FOLDER).symlink_to(tmp_path / "moved")
    before = {p.name: p.read_bytes() for p in (tmp_path / "moved").iterdir()}
    plain = SPEC.write(tmp_path / "plain")
    for other in (root, plain):  # a publication that was decided is finished first, whatever is asked for next
        with pytest.raises(RequestError, match="E0811"):
            run(other, tmp_path / "o", force=True)
    (tmp_path / "o" / FOLDER).unlink()  # as the remedy says
    run(root, tmp_path / "o", force=True)
    shutil.rmtree(tmp_path / "o" / FOLDER)
    (tmp_path / "o" / FOLDER).symlink_to(tmp_path / "moved")
    run(plain, tmp_path / "o", force=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "moved").iterdir()} == before


def test_replaced_and_removed(tmp_path):
    """--force replaces templates one by one, removes those the new container has not, and the folder with the last."""
    run(source(tmp_path / "s"), tmp_path / "o")
    one = source(tmp_path / "t", {"rag.jinja": b"new"})
    run(one, tmp_path / "o", force=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "o" / FOLDER).iterdir()} == {"rag.jinja": b"new"}
    assert not verify(tmp_path / "o", source=one).findings
    (tmp_path / "o" / FOLDER / "mine.jinja").write_text("not the container's")
    plain = SPEC.write(tmp_path / "plain")
    run(plain, tmp_path / "o", force=True)
    assert [p.name for p in (tmp_path / "o" / FOLDER).iterdir()] == ["mine.jinja"]
    run(one, tmp_path / "o", force=True)
    (tmp_path / "o" / FOLDER / "mine.jinja").unlink()
    run(plain, tmp_path / "o", force=True)
    assert not (tmp_path / "o" / FOLDER).exists() and not verify(tmp_path / "o", source=plain).findings


@pytest.mark.parametrize("after", range(12))
def test_interrupted_anywhere(tmp_path, monkeypatch, after):
    """A publication cut short before any of its moves is finished by the same command, templates too."""
    root = source(tmp_path / "s")
    left, real = [after], publish.WorkDirectory._place

    def place(self, name, **how):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(self, name, **how)

    monkeypatch.setattr(publish.WorkDirectory, "_place", place)
    try:
        run(root, tmp_path / "o")
    except KeyboardInterrupt:
        assert not (tmp_path / "o" / "manifest.json").exists()
    monkeypatch.setattr(publish.WorkDirectory, "_place", real)
    run(root, tmp_path / "o")
    assert not verify(tmp_path / "o", source=root).findings
    assert {p.name: p.read_bytes() for p in (tmp_path / "o" / FOLDER).iterdir()} == BOTH


def test_resumed(tmp_path, monkeypatch):
    """A template that was finished is not made again; its name in the work directory is one no side file has."""
    root = source(tmp_path / "s", {"rag.jinja": b"x"})
    (root / f"{FOLDER}.rag.jinja").write_bytes(b"another")
    monkeypatch.setattr(publish.WorkDirectory, "publish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(root, tmp_path / "o")
    made = tmp_path / "o" / ".pagestone-partial" / f".{FOLDER}.rag.jinja"
    inode = made.stat().st_ino
    with pytest.raises(KeyboardInterrupt):
        run(root, tmp_path / "o")
    assert made.stat().st_ino == inode
    monkeypatch.undo()
    run(root, tmp_path / "o")
    assert (tmp_path / "o" / RAG).read_bytes() == b"x"
    assert (tmp_path / "o" / f"{FOLDER}.rag.jinja").read_bytes() == b"another"


def test_folder_is_durable_before_the_manifest(tmp_path, monkeypatch):
    """The subfolder is synced after its files are there, and before there is a manifest."""
    synced, real = [], os.fsync

    def fsync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((path.name, sorted(p.name for p in path.iterdir()) if path.is_dir() else None,
                       (tmp_path / "o" / "manifest.json").exists()))  # fmt: skip
        real(handle)

    if not sys.platform.startswith("linux"):
        pytest.skip("/proc tells which file is synced")
    monkeypatch.setattr(os, "fsync", fsync)
    run(source(tmp_path / "s"), tmp_path / "o")
    assert (FOLDER, sorted(BOTH), False) in synced


def test_container_is_a_source(tmp_path):
    """A bf16 container gives its templates on."""
    root = source(tmp_path / "s")
    prepare(root, tmp_path / "b", encodings.get("bf16"), workers=1)
    one, two = run(root, tmp_path / "o"), run(tmp_path / "b", tmp_path / "p")
    assert one.manifest.container_id == two.manifest.container_id


def test_file_of_the_folders_name(tmp_path):
    """A file that is called as the folder is no folder, and a source with none is as before."""
    root = write_checkpoint(tmp_path / "s", SPEC.tensors(), SPEC.config())
    (root / FOLDER).write_text("x")
    run(root, tmp_path / "o")
    assert not (tmp_path / "o" / FOLDER).exists()
