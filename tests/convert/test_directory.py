"""The directory of a source: what of it is taken, what stays, and what is called by its right name."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from kits.checkpoints import (
    INDEX,
    SIDE_FILES,
    SINGLE,
    T_ORDER,
    Tensor,
    sparse_model,
    write_checkpoint,
    write_safetensors,
)
from kits.conversions import planned, prepare

from pagestone.convert.checkpoint import open_checkpoint
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, RequestError
from pagestone.reader.commands import _text, describe
from pagestone.reader.container import open_container
from pagestone.validate.verify import verify

SPEC = T_ORDER.having(layers=1, experts=2, mtp=False)
TENSORS = {"a": Tensor.of([1, 2, 3]), "b": Tensor.of([[4.0]], "F32")}


def rules(root: Path) -> dict[str, str | None]:
    return {f.name: f.rule for f in open_checkpoint(root).side_files}


def refused(root: Path | str, code: str, *words: str) -> str:
    with pytest.raises((DataError, RequestError)) as caught:
        open_checkpoint(root)
    text = str(caught.value)
    assert caught.value.code == code and caught.value.remedy, text
    for word in words:
        assert word in text, (word, text)
    return text


# -- whole, or not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                  "model.safetensors-00001-of-00002.safetensors", "model-2-of-2.safetensors",
                                  "consolidated.00.safetensors", "pytorch_model-00003.safetensors"])  # fmt: skip
def test_one_part_without_an_index(tmp_path, name):
    """A file whose name says that it is one part of several is not taken for the model."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {})
    (root / SINGLE).rename(root / name)
    refused(root, "E0404", name, "download the index")


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "weights.safetensors",
                                  "Qwen3-30B-A3B.safetensors", "mixtral-8x7b-v0.1.safetensors"])  # fmt: skip
def test_one_file_that_is_all(tmp_path, name):
    """One of one, and a name that counts nothing, are the model."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {})
    (root / SINGLE).rename(root / name)
    assert open_checkpoint(root).shards == (name,)


def test_all_parts_without_an_index(tmp_path):
    """Names alone do not prove that two files belong together."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    (root / INDEX).unlink()
    refused(root, "E0404", "2 .safetensors files", "download the index")


def test_an_index_that_names_fewer_parts(tmp_path):
    """Shards whose names count more parts than the index has are said."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    assert open_checkpoint(root).warnings == ()
    index = json.loads((root / INDEX).read_bytes())
    gone = "model-00002-of-00002.safetensors"
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != gone}
    (root / INDEX).write_text(json.dumps(index))
    (root / gone).unlink()
    assert [w for w in open_checkpoint(root).warnings if "count 2 parts, the index names 1" in w]


SHARD = "model-00001-of-00002.safetensors"
HIDDEN = f".{SHARD}.aB3xY9"
UNFINISHED = [SHARD + s for s in (".aria2", ".part", ".incomplete", ".crdownload", ".tmp", ".download", ".!qB",
                                  ".part~", ".Ab12", " (1).crdownload")]  # fmt: skip
OTHERS = ["config.json.part", INDEX + ".aria2", "tokenizer.json.crdownload", "TOKENIZER.JSON.PART",
          ".tokenizer.json.tmp", "tokenizer_config.json.part", "generation_config.json.aria2",
          "chat_template.jinja.part", "prompt.md.jinja.part"]  # fmt: skip


@pytest.mark.parametrize("name", [*UNFINISHED, HIDDEN, *OTHERS])
def test_unfinished_download_beside_a_file(tmp_path, name):
    """A file as long as it must be may still be half zeros: what its downloader left beside it tells."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    for side in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "prompt.md.jinja"):
        (root / side).write_text("{}")
    (root / name).write_bytes(b"notes")
    refused(root, "E0414", name, "let the download end")


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "Notice.txt", "MODEL_CARD.md", "use_policy.rst"])
@pytest.mark.parametrize("more", [".part", ".aria2", ".crdownload"])
def test_unfinished_download_beside_a_document(tmp_path, name, more):
    """No result hangs on it: it is said, and the document is carried as it is."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    (root / name).write_text("whole, or not")
    (root / (name + more)).write_bytes(b"notes")
    checkpoint = open_checkpoint(root)
    assert [w for w in checkpoint.warnings if w.startswith(name + more) and "may not be whole" in w]
    assert {f.name: f.rule for f in checkpoint.side_files if f.name == name} == {name: None}


@pytest.mark.parametrize("name", [SHARD + ".sha256", SHARD + ".md5", SHARD + ".asc", SHARD + ".bak", "._" + SHARD,
                                  SHARD + "~", SHARD + ".~1~", SHARD + ".~12~", SHARD + ".bak~", SHARD + ".bak2",
                                  SHARD + ".old.1", SHARD + ".save", SHARD + ".backup", SHARD + "~old",
                                  "readme.md.orig", "tokenizer.json.bak",
                                  "model.safetensors.index.fp8.json"])  # fmt: skip
def test_what_may_stand_beside_a_file(tmp_path, name):
    """Digests, signatures, copies and a Mac's notes say nothing of a download."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    (root / name).write_bytes(b"notes")
    open_checkpoint(root)


def test_single_file_beside_parts(tmp_path):
    """A part whose name begins with the model's is a file outside the index, no download."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {})
    write_safetensors(root / "model.safetensors-00001-of-00002.safetensors", {"z": TENSORS["a"]})
    assert open_checkpoint(root).shards == (SINGLE,)


def test_unfinished_download_of_nothing_that_is_used(tmp_path):
    """It is listed, and said."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {})
    (root / "Unconfirmed 4711.crdownload").write_bytes(b"x")
    checkpoint = open_checkpoint(root)
    assert {f.rule for f in checkpoint.side_files if "4711" in f.name} == {"an unfinished download"}
    assert any("4711" in w for w in checkpoint.warnings)


ROUTER = "model.language_model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize("codec", ["int8", "fp8", "q4", "bf16"])
@pytest.mark.parametrize("fused", [True, False])
def test_zeros(tmp_path, codec, fused):
    """Matrices of zeros convert, and whoever looks is told how many there are: an error of 0 is no good news."""
    spec = T_ORDER.having(layers=1, experts=3, mtp=False, fused=fused, hidden=64, intermediate=64)
    source = spec.write(tmp_path / "s")
    good = prepare(source, tmp_path / "good", encodings.get(codec), workers=1)
    assert good.warnings == () and not verify(tmp_path / "good").findings
    assert "all zero" not in _text(describe(open_container(tmp_path / "good")))
    tensors = spec.tensors()
    prefix = "model.language_model.layers.0.mlp.experts"
    if fused:  # expert 1's up, and all of expert 2
        name, half = f"{prefix}.gate_up_proj", 2 * 64 * 64
        data = tensors[name].data
        tensors[name] = replace(tensors[name], data=data[: 3 * half] + bytes(3 * half))
        name = f"{prefix}.down_proj"
        tensors[name] = replace(tensors[name], data=tensors[name].data[: 2 * half] + bytes(half))
    else:
        for tail in ("1.up_proj", "2.gate_proj", "2.up_proj", "2.down_proj"):
            name = f"{prefix}.{tail}.weight"
            tensors[name] = replace(tensors[name], data=bytes(len(tensors[name].data)))
    dense = (ROUTER, "lm_head.weight", "model.language_model.norm.weight")
    for name in dense:
        tensors[name] = replace(tensors[name], data=bytes(len(tensors[name].data)))
    source = write_checkpoint(tmp_path / "z", tensors, spec.config())
    outcome = prepare(source, tmp_path / "o", encodings.get(codec), workers=2)
    assert outcome.warnings == (
        f"4 of 9 expert matrices are all zero, first up of {prefix}.1: is the source whole?",
        f"2 dense matrices are all zero, 1 of them routers, first {ROUTER}: is the source whole?",
    )
    report = verify(tmp_path / "o", source=source)
    assert report.exit_code == 0 and [f.code for f in report.findings] == ["W0620", "W0620"]
    assert f"4 of 9 matrices are all zero, first {prefix}.1.up_proj" in report.findings[0].message
    assert f"1 of 1 routers are all zero, first {ROUTER}" in report.findings[1].message
    table = describe(open_container(tmp_path / "o"))
    assert table["layers"][0]["zero_matrices"] == 4 and table["layers"][0]["relative_rms_error"] is not None
    assert "4 of 9 matrices are all zero" in _text(table)


def test_half_a_shard_of_zeros(tmp_path):
    """A download that reserved its space: no layer of nothing but zeros looks perfect."""
    source = sparse_model(tmp_path / "s", layers=1, hidden=32, intermediate=32, experts=2)
    outcome = prepare(source, tmp_path / "o", encodings.get("int8"), workers=1)
    assert [w.split(",")[0] for w in outcome.warnings] == ["6 of 6 expert matrices are all zero",
                                                           "1 dense matrices are all zero"]  # fmt: skip
    table = describe(open_container(tmp_path / "o"))
    assert table["layers"][0]["relative_rms_error"] is None and "0.00000" not in _text(table)


# -- what a side file may be -----------------------------------------------------------------------------------------

CARRIED = {
    "tokenizer.json": b'{"quantization": 1}', "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0",
    "tokenizer.model.v3": b"\n\x05\0", "spiece.model": b"", "tiktoken.model": b"IQ== 0\n", "qwen.tiktoken": b"IQ== 0\n",
    "vocab.json": b"{}", "merges.txt": b"#version: 0.2\n", "chat_template.jinja": b"{{ x }}",
    "chat_template.json": b'{"chat_template": "x"}', "LICENSE": b"caf\xe9", "LICENSE-MODEL": b"x", "NOTICE": b"x",
    "README.md": b"# x", "USE_POLICY.md": b"x", "preprocessor_config.json": b'{"quantization": 1}',
    "video_preprocessor_config.json": b"{}", "special_tokens_map.json": b"{}", "params.json": b'{"dim": 1}',
    "broken.json": b"{", "list.json": b"[1]",
}  # fmt: skip
LEFT = {
    "model.pyc": b"x", "kernel.so": b"\x7fELF", "state": pickle.dumps({"a": [1]}, 0), "data.txt": pickle.dumps([1]),
    "vocab.json": pickletools.optimize(pickle.dumps([1], 2)), "merges.txt": b"x" * (1 << 20) + bytes(9),
    "tokenizer.json": b"{" + bytes(20), "README": pickle.dumps([1], 4),
    "added_tokens.json": b"{}" + b" " * 9000 + bytes(9),
    "figure.png": b"\x89PNG", "imatrix.dat": b"x", "run.sh": b"x", "a.dll": b"MZ", "evil.py": pickle.dumps([1]),
    "tokenizer.model": b"PK\x03\x04\0", "optimizer.PT": b"x", "training_args.bin": b"x",
}  # fmt: skip
STALE = {
    "hf_quant_config.json": b"{}", "quantize_config.json": b"{}", "quant_config.json": b"{}", "recipe.yaml": b"x: 1",
    "GPTQ_config.json": b"{}", "compression_config.json": b"{}", "my-recipe.yml": b"x",
    "params.json": b' {"dim": 1, "quantization": {"bits": 8}}', "extra.json": b'{"quant_method": "fp8"}',
    "marked.json": b'\xef\xbb\xbf{"quant_method": "fp8"}',
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_carried(tmp_path, name):
    """Tokenizers, templates, configs, licences and texts go over."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, side_files={name: CARRIED[name]})
    assert rules(root) == {name: None}


@pytest.mark.parametrize("name", LEFT)
def test_left(tmp_path, name):
    """Programs, pickles, whatever name they have, and what is not of a known kind stay, and the plan lists them."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, side_files={name: LEFT[name]})
    plan = rules(root)
    assert set(plan) == {name} and plan[name] and not plan[name].startswith("code")


@pytest.mark.parametrize("name", STALE)
def test_stale_statements(tmp_path, name):
    """What says how the source was quantised does not describe the container."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, side_files={name: STALE[name]})
    assert "quantised" in str(rules(root)[name])


def test_stale_statements_are_not_in_the_container(tmp_path):
    """Not in its files, and `verify --source` agrees."""
    source = SPEC.write(tmp_path / "s", side_files={**SIDE_FILES, "hf_quant_config.json": b"{}"})
    prepare(source, tmp_path / "o", encodings.get("int8"), workers=1)
    assert not (tmp_path / "o" / "hf_quant_config.json").exists()
    assert not verify(tmp_path / "o", source=source).findings


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "modeling.py"])
def test_what_was_not_downloaded_is_said(tmp_path, name):
    """A pointer of git-LFS, and text that holds zeros, are no side files, and the user is told."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n"
    for data in (pointer, b"x" + bytes(100)):
        root = write_checkpoint(tmp_path / str(len(data)), TENSORS, {}, side_files={name: data})
        checkpoint = open_checkpoint(root)
        assert checkpoint.side_files[0].rule and any(name in w for w in checkpoint.warnings)


# -- links and modes -------------------------------------------------------------------------------------------------


def test_links_that_leave_the_checkpoint(tmp_path):
    """They are not followed: not to a file, not through a folder, not by ../.; the plan and a warning say so."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {})
    (tmp_path / "secret.json").write_text('{"password": 1}')
    (tmp_path / "s2").mkdir()
    (tmp_path / "s2" / "more.json").write_text("{}")
    (root / "folder").symlink_to(tmp_path)
    (root / "near.json").symlink_to("tokenizer.json")
    outside = {"a.json": tmp_path / "secret.json", "b.json": Path("../secret.json"), "c.json": Path("a.json"),
               "d.json": Path("folder/secret.json"), "e.json": Path("../s2/more.json"),
               "f.py": tmp_path / "secret.json"}  # fmt: skip
    for name, target in outside.items():
        (root / name).symlink_to(target)
    checkpoint = open_checkpoint(root)
    found = {f.name: f.rule for f in checkpoint.side_files}
    assert {n for n, rule in found.items() if rule == "a link that leaves the checkpoint"} == set(outside)
    assert found["near.json"] is None
    assert all(any(w.startswith(n) for w in checkpoint.warnings) for n in outside)


def test_links_of_a_hub_cache(tmp_path):
    """A snapshot's links lead to the blobs of its cache, also from a subfolder; to other models' they may not."""
    root = write_checkpoint(tmp_path / "models--a--b" / "main", TENSORS, {}, shards=2, links=True)
    assert root.parent.name == "snapshots" and set(rules(root).values()) == {None}
    (tmp_path / "link").symlink_to(root)
    assert rules(tmp_path / "link") == rules(root)
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    (other / "00").write_text("{}")
    (root / "stolen.json").symlink_to("../../../models--c--d/blobs/00")
    deep = root / "deep"
    deep.mkdir()
    for name in ("config.json", *open_checkpoint(root).shards, INDEX, "tokenizer.json"):
        (deep / name).symlink_to(Path("../../../blobs") / (root / name).readlink().name)
    assert rules(root)["stolen.json"] and rules(deep) == {"tokenizer.json": None}
    (root.parent.parent / "blobs").rename(tmp_path / "elsewhere")
    (root.parent.parent / "blobs").symlink_to(tmp_path / "elsewhere")
    refused(root, "E0415", "config.json", "put a copy")


def test_weights_may_be_links_to_another_disk(tmp_path):
    """Shards and their index lie where there is room; config.json is carried over and must be the checkpoint's."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    disk = tmp_path / "disk"
    disk.mkdir()
    for file in [*root.glob("*.safetensors"), root / INDEX]:
        file.rename(disk / file.name)
        file.symlink_to(disk / file.name)
    assert len(open_checkpoint(root).tensors) == 2
    (root / "config.json").rename(disk / "config.json")
    (root / "config.json").symlink_to(disk / "config.json")
    refused(root, "E0415", str(root / "config.json"))


def test_modes_are_not_wider_than_the_source(tmp_path):
    """Who may not read a side file of the source may not read its copy."""
    source = SPEC.write(tmp_path / "s")
    modes = {"tokenizer.json": 0o600, "config.json": 0o640, "generation_config.json": 0o400, "empty.txt": 0o777}
    for name, mode in modes.items():
        (source / name).chmod(mode)
    before = os.umask(0o022)
    try:
        prepare(source, tmp_path / "o", encodings.get("int8"), workers=1)
    finally:
        os.umask(before)
    for name, mode in modes.items():
        assert stat.S_IMODE((tmp_path / "o" / name).stat().st_mode) == mode & 0o644, name


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CONFIG.JSON", "Config.json", "MODEL.safetensors.INDEX.json", "Manifest.JSON",
                                  "Experts.Parquet", "LAYERS-00.safetensors", "Dense-00001-of-00002.safetensors",
                                  "con\ufb01g.json"])  # fmt: skip
def test_twins_of_our_names(tmp_path, name):
    """A side file that some file systems take for one of the container's own is refused by name."""
    root = SPEC.write(tmp_path / "s")
    (root / name).write_text("x")
    with pytest.raises(RequestError, match="E0604") as caught:
        planned(root, encodings.get("int8"))
    assert caught.value.file == str(root / name) and "case or accents" in caught.value.message


@pytest.mark.parametrize(("one", "two"), [("readme.md", "README.md"), ("caf\u00e9.txt", "cafe\u0301.txt")])
def test_twins_among_side_files(tmp_path, one, two):
    """Both go over here, and the plan says that not every file system can hold both."""
    root = SPEC.write(tmp_path / "s", side_files={one: b"1", two: b"2"})
    plan = planned(root, encodings.get("int8"))
    assert {one, two} <= set(plan.files) and any(one in w and two in w for w in plan.warnings)
    (root / two).unlink()
    assert not planned(root, encodings.get("int8")).warnings


@pytest.mark.parametrize("name", ["a\u009b31m.txt", "a\u202etxt.json", "a\x7f.txt", "a\u2028b.txt", "a\u200b.txt"])
def test_names_that_do_not_print(tmp_path, name):
    """Control and formatting characters above ASCII are no better than those below: listed escaped, not copied."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, side_files={name: b"x"})
    checkpoint = open_checkpoint(root)
    (found,) = checkpoint.side_files
    assert found.rule and found.name.isascii() and found.name.isprintable()
    assert all(w.isprintable() for w in checkpoint.warnings) and len(checkpoint.warnings) == 1


@pytest.mark.parametrize("name", ["mo\u202edel.safetensors", "a\u009b.safetensors", "..", "a\nb"])
def test_shards_whose_names_do_not_print(tmp_path, name):
    """An index that names such a file is wrong."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    (root / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert refused(root, "E0406").replace("\n  what", "").isprintable()


# -- no checkpoint, by its right name --------------------------------------------------------------------------------


def test_stale_index(tmp_path):
    """An index of another sharding: what is here is not in it, what is in it is not here."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    for n in (1, 2):
        (root / f"model-0000{n}-of-00002.safetensors").rename(root / f"model-0000{n}-of-00004.safetensors")
    refused(root, "E0413", INDEX, SHARD, "model-00001-of-00004.safetensors", "download the index")


@pytest.mark.parametrize(("files", "what"), [(["model-Q4_K_M.gguf"], "GGUF"), (["MODEL.GGUF"], "GGUF"),
                                             (["pytorch_model-1-of-2.bin", "pytorch_model.bin.index.json"], "pickles"),
                                             (["consolidated.00.pth", "params.json"], "pickles"),
                                             (["tf_model.h5"], "other programs")])  # fmt: skip
@pytest.mark.parametrize("config", [True, False])
def test_other_weights_only(tmp_path, files, what, config):
    """GGUF or pickles only: said so, with or without a config.json."""
    root = tmp_path / "s"
    root.mkdir()
    for name in [*files, *(["config.json"] if config else [])]:
        (root / name).write_text("{}")
    text = refused(root, "E0416", what, files[0], "safetensors")
    assert "index" not in text.replace(files[-1], "")


def test_pickles_beside_safetensors_are_no_matter(tmp_path):
    """Releases that have both are read."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, side_files={"pytorch_model.bin": b"x", "m.gguf": b"x"})
    assert len(open_checkpoint(root).tensors) == 2


def test_hub_cache_instead_of_a_snapshot(tmp_path):
    """The model's directory in a cache, its snapshots, the cache itself: the remedy is a path that works."""
    hub = tmp_path / "hub"
    root = write_checkpoint(hub / "models--a--b" / "0123", TENSORS, {}, links=True)
    model = root.parent.parent
    for place in (model, model / "snapshots"):
        assert str(root) in refused(place, "E0417", "hub cache")
    refused(hub, "E0417", "models--a--b/snapshots")
    (root.parent / "4567").mkdir()
    assert "4567" in refused(model, "E0417", str(root))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123")
    assert "4567" not in refused(model, "E0417", str(root))
    (model / "refs" / "main").write_text("../../../..")
    assert str(root) in refused(model, "E0417")


@pytest.mark.parametrize("path", ["hf://a/b", "https://host/a/b", "s3://bucket/key", Path("hf://a/b")])
def test_an_address_is_no_directory(path):
    """Nothing is downloaded; the remedy says what to do first."""
    refused(path, "E0418", "address", "download it first")


def test_a_name_on_a_hub(tmp_path, monkeypatch):
    """It looks like a relative path, and the remedy says so; a file says what it is."""
    monkeypatch.chdir(tmp_path)
    refused("Qwen/Qwen3-30B-A3B", "E0401", "nothing", "name on a hub")
    (tmp_path / "m.gguf").write_text("x")
    refused("m.gguf", "E0401", "a file", "GGUF is not read")


def test_an_adapter_is_no_model(tmp_path):
    """An adapter alone has no config.json: what it is, and what to do."""
    root = tmp_path / "s"
    root.mkdir()
    (root / "adapter_config.json").write_text("{}")
    write_safetensors(root / "adapter_model.safetensors", TENSORS)
    refused(root, "E0419", "adapter", "merge it")
