"""What the command line refuses: the right exit code, one message with file, tensor and remedy, nothing published."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kits.checkpoints import INDEX, T_BLOCK, T_ORDER, Tensor, sparse_model, write_checkpoint
from kits.cli import pagestone, refused
from kits.containers import contents
from kits.conversions import prepare

from pagestone.convert import prepare as preparing
from pagestone.convert.plan import Request
from pagestone.formats import encodings
from pagestone.formats.errors import MachineError
from pagestone.validate.verify import verify

SPEC = T_ORDER.having(fused=False, layers=2)
EXPERT = "model.language_model.layers.1.mlp.experts.11.up_proj.weight"
MIDDLE = "model.language_model.layers.1.mlp.experts.5."
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def made(root: Path, change=lambda tensors: tensors, config=None, **how) -> Path:
    return write_checkpoint(root, change(SPEC.tensors()), config or SPEC.config(), **{"shards": 3, **how})


def shard_of(source: Path, tensor: str) -> Path:
    return source / json.loads((source / INDEX).read_bytes())["weight_map"][tensor]


def truncate(source: Path) -> str:
    shard = shard_of(source, EXPERT)
    shard.write_bytes(shard.read_bytes()[:-100])
    return shard.name


def replace_by(data: bytes):
    def change(source: Path) -> str:
        shard = shard_of(source, EXPERT)
        shard.write_bytes(data)
        return shard.name

    return change


def remove(source: Path) -> str:
    shard = shard_of(source, EXPERT)
    shard.unlink()
    return shard.name


def without(*words: str):
    return lambda tensors: {n: t for n, t in tensors.items() if not any(w in n for w in words)}


def plus(name: str, tensor: Tensor):
    return lambda tensors: tensors | {name: tensor}


NOTHING = {"change": lambda t: t, "config": None}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n"
PREFIX = "model.language_model.layers.1.mlp.experts"
DENSE = {"model_type": "qwen3", "num_hidden_layers": 2}
CASES = {
    # name: (how to make the source, how to damage its files, exit code, what the message must name)
    "unknown expert name": ({"change": plus(f"{PREFIX}.3.mid_proj.weight", Tensor.of([1]))}, None, 1,
                            ["E0504", f"{PREFIX}.3.mid_proj.weight", "convert/families/qwen3_5_moe.py"]),
    "missing shard": ({}, remove, 1, ["E0403", "model.safetensors.index.json", "1 of 3", "download the missing file"]),
    "missing expert in the middle": ({"change": without(MIDDLE)}, None, 1, ["E0509", PREFIX, "expert 5 is missing"]),
    "missing last expert": ({"change": without(f"{PREFIX}.11.")}, None, 1, ["E0509", PREFIX, "12 experts expected"]),
    "missing part": ({"change": without(f"{PREFIX}.3.up_proj")}, None, 1, ["E0508", PREFIX, "expert 3 lacks up_proj"]),
    "missing layer": ({"change": without("layers.1.mlp.experts")}, None, 1, ["E0503", "2 MoE layers", "layer 1"]),
    "fused and split": ({"change": plus(f"{PREFIX}.down_proj", Tensor.of(np.ones((12, 32, 48))))}, None, 1,
                        ["E0507", f"{PREFIX}.down_proj", "at once"]),
    "truncated shard": ({}, truncate, 1, ["E0212", "download or make the file again"]),
    "git-LFS pointer": ({}, replace_by(LFS), 1, ["E0201", "git-LFS pointer", "never downloaded"]),
    "HTML page": ({}, replace_by(b"<!DOCTYPE html><html>"), 1, ["E0201", "HTML page"]),
    "zip": ({}, replace_by(b"PK\x03\x04" + bytes(99)), 1, ["E0201", "zip archive"]),
    "empty shard": ({}, replace_by(b""), 1, ["E0202"]),
    "non-MoE model": ({"change": without("expert"), "config": DENSE}, None, 2,
                      ["E0601", "Mixture-of-Experts", "'qwen3'"]),
    "non-MoE model with a MoE config": ({"change": without("experts")}, None, 2, ["E0502", "found none"]),
    "unknown family": ({"config": {"model_type": "Flan-MoE", "num_hidden_layers": 2}}, None, 2,
                       ["E0602", "model.language_model.layers.N.mlp.experts.N.down_proj.weight", "qwen3_moe",
                        "convert/families/flan_moe.py"]),
    "codes without a scale": ({"change": plus(EXPERT, Tensor("F8_E4M3", (48, 32), bytes(48 * 32)))}, None, 1,
                              ["E0513", EXPERT, "F8_E4M3", "scale"]),
    "experts in F64": ({"change": plus(EXPERT, Tensor("F64", (48, 32), bytes(8 * 48 * 32)))}, None, 2,
                       ["E0514", EXPERT, "F64", "unquantised"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_source_is_refused(tmp_path, case):
    """A source that is not right ends with its exit code, names what is wrong, and leaves no output directory."""
    how, damage, code, words = CASES[case]
    source = made(tmp_path / "s", **how)
    named = [damage(source)] if damage else []
    text = refused(pagestone("prepare-int8", source, "-o", tmp_path / "deep" / "o"), code, str(source), *named, *words)
    assert text.count("error:") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"], "nothing was done, and something is left"


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("fused", [False, True])
def test_nan_in_expert_11(tmp_path, codec, fused):
    """One NaN in expert 11 of layer 1: exit 1, file, tensor, expert, row, column and remedy, nothing published."""
    spec = SPEC.having(fused=fused)
    tensors = spec.tensors()
    name = f"{PREFIX}.gate_up_proj" if fused else EXPERT
    at = (11, 48 + 7, 5) if fused else (7, 5)
    tensors[name] = tensors[name].with_value(np.nan, *at)
    source = write_checkpoint(tmp_path / "s", tensors, spec.config(), shards=3)
    shard = shard_of(source, name)
    result = pagestone(f"prepare-{codec}", source, "-o", tmp_path / "o")
    refused(result, 1, "E0702", str(shard), name, "expert 11", "row 7, column 5", "NaN", "download it again")
    assert not (tmp_path / "o" / "manifest.json").exists()
    assert {p.name for p in (tmp_path / "o").iterdir()} == {".pagestone-partial"}
    inspected = refused(pagestone("inspect", tmp_path / "o"), 2, "E0331")
    assert "unfinished" in inspected


def test_output_is_input(tmp_path):
    """Output equal to input, also through a link on either side, is refused and the input is untouched."""
    source = made(tmp_path / "s")
    (tmp_path / "link").symlink_to(source)
    before = contents(source)
    link = tmp_path / "link"
    for given, output in [(source, source), (source, link), (link, source)]:
        refused(pagestone("prepare-int8", given, "-o", output, "--force"), 2, "E0606", "give another --output")
    assert contents(source) == before


def test_cache_blobs_are_never_written(tmp_path):
    """Converting a cache snapshot into its own blobs directory, or over links to blobs, changes no blob."""
    source = made(tmp_path / "snapshot", links=True)
    before = contents(tmp_path / "blobs")
    assert pagestone("prepare-int8", source, "-o", tmp_path / "o").returncode == 0
    assert pagestone("prepare-fp8", source, "-o", tmp_path / "o2").returncode == 0
    for name in ("config.json", INDEX, "tokenizer.json"):
        (tmp_path / "o2" / name).unlink()
        (tmp_path / "o2" / name).symlink_to(source / name)
    assert pagestone("prepare-int8", source, "-o", tmp_path / "o2", "--force").returncode == 0
    assert contents(tmp_path / "blobs") == before
    assert contents(tmp_path / "o") == contents(tmp_path / "o2")


# -- the machine -----------------------------------------------------------------------------------------------------


def test_output_below_a_file(tmp_path):
    """An output whose parent is a regular file cannot be made: exit 3, or 2 if it is itself a file."""
    source = made(tmp_path / "s")
    (tmp_path / "file").write_text("mine")
    refused(pagestone("prepare-int8", source, "-o", tmp_path / "file" / "o"), 3, "E0901", str(tmp_path / "file"))
    refused(pagestone("prepare-int8", source, "-o", tmp_path / "file"), 2, "E0806", "another --output")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def mounted(tmp_path) -> Iterator:
    """`mounted(options)` mounts a tmpfs and gives its path; all are unmounted at the end."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no mount here: {done.stderr.decode()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


@needs_root
def test_read_only_output(tmp_path, mounted):
    """A read-only file system is refused by name, and left as it is."""
    place = mounted("size=64m")
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    source = made(tmp_path / "s")
    refused(pagestone("prepare-int8", source, "-o", place / "o"), 3, "read-only", str(place), "another --output")
    assert not list(place.iterdir())


@needs_root
def test_disk_too_small(tmp_path, mounted):
    """Too little space is refused before work, with both numbers, and nothing is left."""
    place = mounted("size=1m")
    source = made(tmp_path / "s")
    text = refused(pagestone("prepare-int8", source, "-o", place / "a" / "o"), 3, "E0903", str(place), "free space")
    assert "found 1,0" in text and "bytes of free disk space needed" in text
    assert not list(place.iterdir())


@needs_root
def test_disk_fills_up_meanwhile(tmp_path, mounted, monkeypatch):
    """A disk that fills up during work is one error that says so; with space again the next run finishes."""
    place = mounted("size=24m")
    source = sparse_model(tmp_path / "s", layers=3, hidden=512, intermediate=512, experts=10)
    monkeypatch.setattr(preparing, "preflight", lambda plan, work: None)
    (place / "ballast").write_bytes(bytes(9 << 20))
    with pytest.raises(MachineError, match="No space left") as caught:
        prepare(source, place / "o", encodings.get("int8"), workers=2)
    assert caught.value.exit_code == 3 and str(place) in str(caught.value) and "free space" in str(caught.value)
    assert not (place / "o" / "manifest.json").exists()
    (place / "ballast").unlink()
    prepare(source, place / "o", encodings.get("int8"), workers=2)
    assert verify(place / "o", source=source).exit_code == 0


@needs_root
def test_old_container_survives_a_full_disk(tmp_path, mounted, monkeypatch):
    """Replacing a container on a disk that cannot hold both leaves the old one whole."""
    place = mounted("size=12m")
    source = sparse_model(tmp_path / "s", layers=1, hidden=512, intermediate=512, experts=10)
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "SPARE", 0)
        prepare(source, place / "o", encodings.get("int8"), workers=1)
    before = contents(place / "o")
    refused(pagestone("prepare-fp8", source, "-o", place / "o", "--force"), 3, "E0903")
    assert contents(place / "o") == before and verify(place / "o").exit_code == 0
    monkeypatch.setattr(preparing, "preflight", lambda plan, work: None)
    with pytest.raises(MachineError, match="No space left"):
        prepare(source, place / "o", encodings.get("fp8"), workers=1, force=True)
    assert contents(place / "o") == before and verify(place / "o").exit_code == 0


def test_file_size_limit(tmp_path):
    """RLIMIT_FSIZE: a file that may not grow so large is the machine's failure, not a signal or a traceback."""
    source = sparse_model(tmp_path / "s", layers=2, hidden=512, intermediate=512, experts=10)
    limit = 4 << 20

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = pagestone("prepare-int8", source, "-o", tmp_path / "o", preexec_fn=limited)
    refused(result, 3, "E0901", str(tmp_path / "o"), "ulimit -f")
    assert not (tmp_path / "o" / "manifest.json").exists()
    assert pagestone("prepare-int8", source, "-o", tmp_path / "o").returncode == 0
    assert verify(tmp_path / "o", source=source).exit_code == 0


def test_too_few_open_files(tmp_path):
    """RLIMIT_NOFILE: too few open files is said, with the remedy."""
    spec = SPEC.having(experts=12)
    source = spec.write(tmp_path / "s", shards=60)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    result = pagestone("prepare-int8", source, "-o", tmp_path / "o", preexec_fn=limited)
    refused(result, 3, "E0901", "Too many open files", "ulimit -n")
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_shard_that_vanishes(tmp_path):
    """A shard that is removed, or cut, while it is read is an error that names it."""
    source = T_ORDER.write(tmp_path / "s", shards=3)
    plan = preparing.plan_for(Request(source, encodings.get("int8")), tmp_path / "o")
    shard = source / "model-00003-of-00003.safetensors"
    raw = shard.read_bytes()
    shard.unlink()
    with pytest.raises(MachineError, match="No such file") as gone:
        preparing.prepare(plan, tmp_path / "o", workers=2)
    shard.write_bytes(raw[:-10])
    with pytest.raises(preparing.DataError, match="E0701") as cut:
        preparing.prepare(plan, tmp_path / "o", workers=2)
    for caught in (gone, cut):
        assert str(shard) in str(caught.value) and caught.value.remedy
    assert not (tmp_path / "o" / "manifest.json").exists()


# -- requests --------------------------------------------------------------------------------------------------------


REQUESTS = {
    "no such directory": (["prepare-int8", "nowhere", "-o", "o"], "E0401"),
    "a file": (["prepare-int8", "s/config.json", "-o", "o"], "E0401"),
    "no checkpoint": (["prepare-int8", "empty", "-o", "o"], "E0402"),
    "layers that are no span": (["prepare-int8", "s", "-o", "o", "--layers", "1"], "E0001"),
    "layers that are not there": (["prepare-int8", "s", "-o", "o", "--layers", "5:9"], "E0603"),
    "inspect nothing": (["inspect", "nowhere"], "E0331"),
    "verify nothing": (["verify", "empty"], "E0331"),
    "sample without source": (["verify", "s", "--sample", "3"], "E0003"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_request_is_refused(tmp_path, case):
    """A request that cannot be met is exit code 2 with a remedy."""
    words, code = REQUESTS[case]
    T_BLOCK.write(tmp_path / "s")
    (tmp_path / "empty").mkdir()
    refused(pagestone(*words, cwd=tmp_path), 2, code)
    assert not (tmp_path / "o").exists()


def test_a_path_is_no_uri(tmp_path):
    """A relative output that looks like a URI to some library is a directory like any other."""
    T_BLOCK.write(tmp_path / "s")
    for name in ("gs:out", "s3:x", "file:y"):
        assert pagestone("prepare-fp8", "s", "-o", name, cwd=tmp_path).returncode == 0
        assert pagestone("verify", name, "--source", "s", cwd=tmp_path).returncode == 0


def test_any_path(tmp_path):
    """Spaces, %, #, CJK, accents, quotes and dashes in paths of source and output change nothing."""
    name = "with space 100%25 a#b?c 中文 café 'quoted\" -x"
    source = T_BLOCK.write(tmp_path / name / "s", shards=2)
    output = tmp_path / name / f"o {name}"
    assert pagestone("prepare-int8", source, "-o", output).returncode == 0
    assert pagestone("verify", output, "--source", source).returncode == 0
    assert name in pagestone("inspect", output).stdout
    (source / "model-00002-of-00002.safetensors").unlink()
    refused(pagestone("prepare-fp8", source, "-o", tmp_path / "other"), 1, "E0403", name)
    shutil.rmtree(output)
