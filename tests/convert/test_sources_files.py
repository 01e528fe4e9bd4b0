"""Files of a source: what stands outside the index, a container as a source, dense layers by every config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from kits.conversions import planned, prepare
from kits.families import FAMILIES, built, read_tensors, write_tensors
from kits.quantised import EXPERTS, Fp8Spec, Int8Spec, write

from pagestone.convert.checkpoint import open_checkpoint
from pagestone.convert.family import first_k_dense_layers
from pagestone.convert.plan import EXCLUDED, UNKNOWN
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, RequestError
from pagestone.validate.verify import verify

SPEC = Fp8Spec(256, 128, dense=False)
INDEX = "model.safetensors.index.json"


def unlisted(root: Path, *words: str) -> set[str]:
    """A checkpoint of two shards; tensors with one of these words are moved to a file that the index does not name."""
    SPEC.having(shards=2).write(root)
    index = json.loads((root / INDEX).read_bytes())
    tensors = read_tensors(root)
    moved = {n for n in tensors if any(w in n for w in words)}
    for file in set(index["weight_map"].values()):
        members = {n for n, f in index["weight_map"].items() if f == file and n not in moved}
        write_tensors(root / file, {n: tensors[n] for n in members})
    write_tensors(root / "extra.safetensors", {n: tensors[n] for n in sorted(moved)})
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if n not in moved}
    (root / INDEX).write_text(json.dumps(index))
    return moved


# hard case: whole files not in the index: reported, merged only when asked
def test_files_outside_the_index(tmp_path: Path) -> None:
    """They are reported and left out; on request their tensors are taken as if the index named them."""
    moved = unlisted(tmp_path / "s", "norm.weight", "lm_head")
    plain = planned(tmp_path / "s", encodings.get("fp8"))
    assert not moved & {d.tensor.name for d in plain.dispositions}
    assert [w for w in plain.warnings if "extra.safetensors" in w and "--merge-unlisted" in w]
    merged = planned(tmp_path / "s", encodings.get("fp8"), merge_unlisted=True)
    assert moved <= {d.tensor.name for d in merged.dispositions}
    assert [w for w in merged.warnings if "extra.safetensors" in w and "taken" in w]
    prepare(tmp_path / "s", tmp_path / "o", encodings.get("fp8"), workers=1, merge_unlisted=True)
    SPEC.write(tmp_path / "whole")
    prepare(tmp_path / "whole", tmp_path / "w", encodings.get("fp8"), workers=1)
    for file in ("layers-00.safetensors", "dense-00001-of-00001.safetensors", INDEX):
        assert (tmp_path / "o" / file).read_bytes() == (tmp_path / "w" / file).read_bytes(), file
    assert not verify(tmp_path / "o", source=tmp_path / "s").findings


def test_missing_experts_are_named_and_merged(tmp_path: Path) -> None:
    """An expert that stands outside the index is missing, until asked for."""
    unlisted(tmp_path / "s", "experts.1.up_proj")
    with pytest.raises(DataError, match="expert 1 lacks"):
        planned(tmp_path / "s", encodings.get("fp8"))
    outcome = prepare(tmp_path / "s", tmp_path / "o", encodings.get("fp8"), workers=1, merge_unlisted=True)
    assert outcome.notes == {"passed through": 6}


@pytest.mark.parametrize("name", ["model.norm.weight", f"{EXPERTS}.0.up_proj.weight"])
def test_merging_never_chooses(tmp_path: Path, name: str) -> None:
    """A name in two files is a conflict that merging refuses, naming both; so are two files outside the index."""
    root = SPEC.having(shards=2).write(tmp_path / "s")
    tensor = read_tensors(root)[name]
    write_tensors(root / "extra.safetensors", {name: tensor})
    assert name in open_checkpoint(root).tensors
    with pytest.raises(DataError, match="E0412") as caught:
        open_checkpoint(root, merge_unlisted=True)
    assert caught.value.tensor == name and "extra" in str(caught.value.file) and "model-0" in caught.value.message
    write_tensors(root / "extra.safetensors", {"new.weight": tensor})
    write_tensors(root / "more.safetensors", {"new.weight": tensor})
    with pytest.raises(DataError, match="E0412"):
        open_checkpoint(root, merge_unlisted=True)


def test_merging_without_an_index(tmp_path: Path) -> None:
    """The same beside a single model.safetensors; a broken file is refused only when it is asked for."""
    root = SPEC.write(tmp_path / "s")
    write_tensors(root / "extra.safetensors", {"new.weight": ("BF16", (2,), bytes(4))})
    assert "new.weight" not in open_checkpoint(root).tensors
    plan = planned(root, encodings.get("fp8"), merge_unlisted=True)
    assert [d.fate for d in plan.dispositions if d.tensor.name == "new.weight"] == [UNKNOWN]
    (root / "extra.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    open_checkpoint(root)
    with pytest.raises(DataError, match=r"(?i)git-lfs"):
        open_checkpoint(root, merge_unlisted=True)


def test_merging_from_the_command_line(tmp_path: Path) -> None:
    """--merge-unlisted, in a plan and in a conversion; resuming without it is another job."""
    unlisted(tmp_path / "s", "norm.weight")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagestone", "prepare-fp8", os.fspath(tmp_path / "s"), "-o",
                   os.fspath(tmp_path / "o"), *words]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "model.norm.weight" in run("--dry-run", "--merge-unlisted", "--json").stdout
    assert "model.norm.weight" not in run("--dry-run", "--json").stdout
    done = run("--merge-unlisted")
    assert done.returncode == 0 and "extra.safetensors" in done.stderr, done.stderr
    again = run()
    assert again.returncode == 2 and "source differ" in again.stderr, again.stderr


# -- a container as a source -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5_moe", "mixtral", "deepseek_v3", "qwen3_vl_moe", "granitemoe", "gpt_oss"])
def test_bf16_container_is_a_source(
    oracle: Callable[[str], ModuleType], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """It holds the model's own values under names of its own: what is made from it is what its source gives."""
    oracle("torch")
    source = built(name, "wide", tmp_path_factory).root
    prepare(source, tmp_path / "bf16", encodings.get("bf16"), workers=1)
    outcome = prepare(tmp_path / "bf16", tmp_path / "a", encodings.get("int8"), workers=1)
    prepare(source, tmp_path / "b", encodings.get("int8"), workers=1)
    assert outcome.warnings == ()
    files = {p.name for p in (tmp_path / "b").iterdir()} - {"manifest.json"}
    assert {p.name for p in (tmp_path / "a").iterdir()} - {"manifest.json"} == files
    for file in files - {"experts.parquet"}:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert not verify(tmp_path / "a", source=tmp_path / "bf16").findings
    again = prepare(tmp_path / "bf16", tmp_path / "c", encodings.get("bf16"), workers=1)
    assert again.manifest.lossless
    layers = [t.name for t in planned(source, encodings.get("bf16")).layers]
    for file in layers:
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "bf16" / file).read_bytes(), file


@pytest.mark.parametrize("codec", [c for c in sorted(encodings.registry()) if c != "bf16"])
def test_other_containers_are_no_source(tmp_path: Path, codec: str) -> None:
    """Codes are not encoded again: refused, naming the codec."""
    spec = Int8Spec() if codec == "int8" else SPEC
    prepare(spec.write(tmp_path / "s"), tmp_path / "o", encodings.get(codec), workers=1)
    with pytest.raises(RequestError, match="E0411") as caught:
        open_checkpoint(tmp_path / "o")
    assert codec in caught.value.message


def test_partial_bf16_container_is_no_source(
    oracle: Callable[[str], ModuleType], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its missing layers are missed."""
    oracle("torch")
    source = built("mixtral", "half", tmp_path_factory).root
    prepare(source, tmp_path / "o", encodings.get("bf16"), workers=1, layers=(0, 1))
    with pytest.raises(DataError, match="layer 1 is the first without experts"):
        planned(tmp_path / "o", encodings.get("int8"))


# -- which layers are dense, which are asked for ---------------------------------------------------------------------


# hard case: some layers dense (first_k_dense_replace, decoder_sparse_step)
def test_first_dense_layers() -> None:
    """first_k_dense_replace and moe_layer_freq, absent, null, or a list nobody uses."""
    layers = {"num_hidden_layers": 6}
    assert first_k_dense_layers(layers) == set()
    assert first_k_dense_layers(layers | {"first_k_dense_replace": 3}) == {0, 1, 2}
    assert first_k_dense_layers(layers | {"first_k_dense_replace": None, "moe_layer_freq": 2}) == {1, 3, 5}
    assert first_k_dense_layers(layers | {"first_k_dense_replace": 1, "moe_layer_freq": 3}) == {0, 1, 2, 4, 5}


def test_layers_not_asked_for_keep_their_names(tmp_path: Path) -> None:
    """--layers leaves out scales, too, of layers not asked for; their types do not decide the container's."""
    tensors = SPEC.tensors()
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.0."):
            tensors[name.replace("layers.0.", "layers.1.")] = tensor
    scale = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
    tensors[scale] = ("F32", tensors[scale][1], bytes(2 * len(tensors[scale][2])))
    config = SPEC.config() | {"num_hidden_layers": 2}
    plan = planned(write(tmp_path / "s", tensors, config), encodings.get("fp8"), layers=(0, 1))
    fates = {d.tensor.name: d.fate for d in plan.dispositions}
    assert fates[scale] == EXCLUDED and plan.codec.parameters["scale_dtype"] == "BF16"
    assert planned(tmp_path / "s", encodings.get("fp8")).codec.parameters["scale_dtype"] == "F32"


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_option_in_every_family(
    oracle: Callable[[str], ModuleType], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """A partial container verifies against its source, and says in config.json that nobody else may load it."""
    oracle("torch")
    source = built(name, "half", tmp_path_factory).root
    prepare(source, tmp_path / "o", encodings.get("bf16"), workers=1, layers=(1, 2))
    assert not verify(tmp_path / "o", source=source).findings
    config = json.loads((tmp_path / "o" / "config.json").read_bytes())
    for place in (config, config.get("text_config", config)):
        assert place["quantization_config"] == {"loadable_by": "pagestone"}


# -- the request -------------------------------------------------------------------------------------------------------


def test_verify_plans_from_the_recorded_request(tmp_path: Path) -> None:
    """Files outside the index are taken again because that was asked for, also where the source is another copy by now:
    nothing is guessed from fingerprints."""
    source, output = tmp_path / "s", tmp_path / "o"
    unlisted(source, "norm.weight", "lm_head")
    prepare(source, output, encodings.get("fp8"), workers=1, merge_unlisted=True)
    assert verify(output, source=source).findings == []
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    found = [(f.code, f.file) for f in verify(output, source=source).findings]
    assert sorted(found) == [("E1027", "config.json"), ("W1030", "manifest.json")]


@pytest.mark.parametrize("asked", [False, True])
def test_code_that_was_asked_for_is_missed(tmp_path: Path, asked: bool) -> None:
    """A container that lacks the source's program lacks it only if it was to be there."""
    source, output = SPEC.write(tmp_path / "s"), tmp_path / "o"
    (source / "modeling_x.py").write_text("pass")
    manifest = prepare(source, output, encodings.get("fp8"), workers=1, include_code=asked).manifest
    assert manifest.include_code == asked and ("modeling_x.py" in manifest.files) == asked
    if asked:  # as if it had never been there, digests right
        (output / "modeling_x.py").unlink()
        less = {name: known for name, known in manifest.files.items() if name != "modeling_x.py"}
        (output / "manifest.json").write_bytes(replace(manifest, files=less).to_bytes())
    found = [(f.code, f.file) for f in verify(output, source=source).findings]
    assert found == ([("E1025", "modeling_x.py")] if asked else [])


def test_the_request_is_not_in_the_id(tmp_path: Path) -> None:
    """Asked for what is not there, the files are the same: the same container, and already there."""
    source = SPEC.write(tmp_path / "s")
    plain = prepare(source, tmp_path / "o", encodings.get("fp8"), workers=1)
    more = prepare(source, tmp_path / "o", encodings.get("fp8"), workers=1, include_code=True, merge_unlisted=True)
    assert more.state == "already there" and more.manifest == plain.manifest
    other = prepare(source, tmp_path / "p", encodings.get("fp8"), workers=1, include_code=True, merge_unlisted=True)
    assert other.manifest.container_id == plain.manifest.container_id
    assert (other.manifest.include_code, other.manifest.merge_unlisted) == (True, True)
