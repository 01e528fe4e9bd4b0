"""Every codec and family in plain transformers: the directory gives right weights or an exception, never codes, and
never the random numbers with which transformers fills what it does not find."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.conversions import prepare
from kits.families import FAMILIES, MODELS, PARTS, Built, built, read_tensors, write_tensors

from pagestone.formats import encodings
from pagestone.formats.dtypes import VIEWS
from pagestone.reader.libraries import release_of
from pagestone.validate.verify import verify

CODECS = sorted(encodings.registry())
RAISED = (ValueError, RuntimeError, KeyError, ImportError)
torch: Any
transformers: Any


@pytest.fixture(scope="module", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch, transformers and what it loads with."""
    global torch, transformers
    torch, transformers = oracle("torch"), oracle("transformers")
    oracle("accelerate")
    oracle("compressed_tensors")  # its absence would be an exception for another reason
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Built]:
    return lambda model, size: built(model, size, tmp_path_factory)


def load(directory: Path, cls: str) -> tuple[Any, dict[str, Any]]:
    kind = getattr(transformers, cls)
    model, info = kind.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    return model, info


def classes(name: str) -> tuple[str, ...]:
    return (*MODELS[name].classes, *(() if name == "qwen3_vl_moe" else ("AutoModelForCausalLM",)))


def loads(name: str, size: str, codec: str) -> bool:
    """Where transformers must find right weights: it knows the experts' names, the codec, and the blocks of fp8."""
    return MODELS[name].own_names and (codec == "bf16" or (codec == "fp8" and size == "square"))


def decoded(source: Built, out: Path, codec_name: str) -> dict[tuple[int, int, str], Any]:
    """Our values of every expert matrix of the decoder layers, rounded once to BF16."""
    codec, found = encodings.get(codec_name), {}
    for (block, layer), matrices in source.matrices.items():
        if block != "layers":
            continue
        tensors = read_tensors(out, f"layers-{layer:02d}.safetensors")
        for (expert, part), bits in matrices.items():
            stem = f"{source.model.prefix(block, layer)}.{expert}.{source.model.parts[PARTS.index(part)]}"
            stored = {}
            for t in codec.in_record(*bits.shape):
                dtype, shape, data = tensors[f"{stem}.{t.suffix}"]
                stored[t.name] = np.frombuffer(data, VIEWS[dtype]).reshape(shape)
            found[layer, expert, part] = torch.from_numpy(codec.values(stored, *bits.shape)).to(torch.bfloat16)
    return found


def _as_before(key: str, ours: Any, theirs: Any) -> bool:
    """Before 5.24 transformers rounds a correction bias in F32 when it loads BF16, and keeps it when it loads FP8."""
    rounded = release_of("transformers") < (5, 24) and key.endswith("e_score_correction_bias")
    return rounded and ours.dtype == torch.float32 and torch.equal(ours.to(theirs.dtype), theirs)


def assert_right(source: Built, out: Path, codec: str, model: Any, info: dict[str, Any], reference: Any) -> None:
    """Nothing was filled in, every dense tensor is the source's, every expert is ours."""
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["error_msgs"], info
    left = {k for k in info["unexpected_keys"] if not re.search(r"\.pad(_a)?$", k)}
    assert all(source.model.mtp and ".layers.2." in k for k in left), left
    state, wanted = model.state_dict(), reference.state_dict()
    assert state.keys() == wanted.keys()
    fused = [k for k in wanted if re.search(r"\.experts\.(gate_up|down)_proj$", k)]
    assert len(fused) == 2 * len([b for b, _ in source.matrices if b == "layers"])
    for key, tensor in wanted.items():
        if key not in fused:
            assert torch.equal(state[key], tensor) or _as_before(key, state[key], tensor), key
    values = decoded(source, out, codec)
    for key in fused:
        layer = int(key.split("layers.")[1].split(".")[0])
        for expert in range(source.size.experts):
            parts = ("gate", "up") if "gate_up" in key else ("down",)
            ours = torch.cat([values[layer, expert, p] for p in parts])
            assert torch.equal(state[key][expert], ours), (key, expert)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", ["wide", "square"])
@pytest.mark.parametrize("name", FAMILIES)
def test_right_weights_or_an_exception(
    make: Callable[[str, str], Built], tmp_path: Path, name: str, size: str, codec: str
) -> None:
    """Every model class a user would take: the container's own values, or an exception."""
    source, out = make(name, size), tmp_path / "out"
    prepare(source.root, out, encodings.get(codec), workers=2)
    for cls in classes(name):
        if not loads(name, size, codec):
            with pytest.raises(RAISED):
                load(out, cls)
            continue
        model, info = load(out, cls)
        assert_right(source, out, codec, model, info, load(source.root, cls)[0])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_5_moe", "granitemoe"])
def test_partial_containers_raise(make: Callable[[str, str], Built], tmp_path: Path, name: str, codec: str) -> None:
    """--layers leaves experts out: transformers would fill them with random numbers, so the directory must raise."""
    source, out = make(name, "square"), tmp_path / "out"
    prepare(source.root, out, encodings.get(codec), workers=1, layers=(0, 1))
    assert not verify(out, source=source.root).findings
    for cls in classes(name):
        with pytest.raises(RAISED):
            load(out, cls)


def test_the_danger_is_real(make: Callable[[str, str], Built], tmp_path: Path) -> None:
    """Without what we state, transformers loads a container of a family whose names it lacks, experts at random: when
    this fails, transformers has changed, and so may we."""
    source, out = make("granitemoe", "square"), tmp_path / "out"
    prepare(source.root, out, encodings.get("bf16"), workers=1)
    config = json.loads((out / "config.json").read_bytes())
    assert config.pop("quantization_config") == {"loadable_by": "pagestone"}
    (out / "config.json").write_text(json.dumps(config))
    _, info = load(out, "GraniteMoeForCausalLM")
    assert len(info["missing_keys"]) == 4
    (finding,) = [f for f in verify(out).findings if f.code == "E1013"]
    assert finding.file == "config.json"


# hard case: tied heads: tie_word_embeddings true, false or absent, with lm_head present or absent
@pytest.mark.parametrize("head", ["present", "absent"])
@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_tied_heads(make: Callable[[str, str], Built], tmp_path: Path, name: str, tied: bool | None, head: str) -> None:
    """The container is to transformers what its source is: the same weights, and the same missing head."""
    source, root = make(name, "half"), tmp_path / "source"
    tensors = read_tensors(source.root)
    if head == "absent":
        del tensors["lm_head.weight"]
    root.mkdir()
    write_tensors(root / "model.safetensors", tensors)
    config = json.loads((source.root / "config.json").read_bytes())
    for place in (config, config.get("text_config", config)):
        place.pop("tie_word_embeddings", None)
        if tied is not None:
            place["tie_word_embeddings"] = tied
    (root / "config.json").write_text(json.dumps(config))
    prepare(root, tmp_path / "out", encodings.get("bf16"), workers=1)
    for cls in classes(name):
        (theirs, before), (ours, after) = load(root, cls), load(tmp_path / "out", cls)
        assert before["missing_keys"] == after["missing_keys"]
        wanted, state = theirs.state_dict(), ours.state_dict()
        assert state.keys() == wanted.keys()
        for key in wanted.keys() - set(before["missing_keys"]):
            assert torch.equal(state[key], wanted[key]), key
