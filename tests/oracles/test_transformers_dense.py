"""Plain transformers and encoded dense matrices: right weights or an exception, for every pair of experts and dense."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.conversions import run
from kits.families import MODELS, Built, Size, build

from pagestone.convert.checkpoint import CONFIG
from pagestone.formats import encodings
from pagestone.formats.dense_matrices import ENCODED, read_matrices
from pagestone.formats.dtypes import VIEWS
from pagestone.formats.manifest import read_manifest
from pagestone.validate.verify import verify

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny-moe"
RAISED = (RuntimeError, ValueError, ImportError, KeyError)
WHOLE = replace(
    MODELS["qwen3_moe"],
    extra={"mlp_only_layers": [0], "head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 128},
)
"""A model whose every linear layer is [128, 128], and whose head has too few rows to be encoded."""

torch: Any
transformers: Any


@pytest.fixture(scope="module", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch, transformers
    torch, transformers = oracle("torch"), oracle("transformers")
    oracle("accelerate")


@pytest.fixture(scope="module")
def whole(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(WHOLE, Size(128, 128, 2), tmp_path_factory.mktemp("whole") / "source")


def load(directory: Path, cls: str) -> tuple[Any, dict[str, Any]]:
    kind = getattr(transformers, cls)
    model, info = kind.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    return model, info


@pytest.mark.parametrize("dense", ENCODED)
@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_every_pair_of_tiny_moe_raises(tmp_path: Path, codec: str, dense: str) -> None:
    """Its head is encoded, which no loader takes for codes; the config has no method, at either level."""
    run(TINY, tmp_path / "out", codec, dense=dense)
    config = json.loads((tmp_path / "out" / CONFIG).read_bytes())
    for place in (config, config["text_config"]):
        assert "quant_method" not in place["quantization_config"]
    described = (codec, dense) in (("q8", "q8"), ("q4", "q4"))
    assert ("loadable_by" in config["quantization_config"]) == (not described)
    for cls in ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "AutoModelForCausalLM"):
        with pytest.raises(RAISED):
            load(tmp_path / "out", cls)


@pytest.mark.parametrize("dense", ENCODED)
@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_every_pair_without_a_head(whole: Built, tmp_path: Path, codec: str, dense: str) -> None:
    """fp8 in fp8 is what the experts' own config describes: right weights, from the codes. All others raise."""
    run(whole.root, tmp_path / "out", codec, dense=dense)
    assert not verify(tmp_path / "out", source=whole.root).findings
    if (codec, dense) != ("fp8", "fp8"):
        with pytest.raises(RAISED):
            load(tmp_path / "out", "Qwen3MoeForCausalLM")
        return
    model, info = load(tmp_path / "out", "Qwen3MoeForCausalLM")
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["error_msgs"], info
    assert all(key.endswith((".pad", ".pad_a")) for key in info["unexpected_keys"])
    state, wanted = model.state_dict(), load(whole.root, "Qwen3MoeForCausalLM")[0].state_dict()
    values = decoded(tmp_path / "out")
    assert len(values) == 2 * 4 + 3
    for key, tensor in wanted.items():
        if key in values:
            assert torch.equal(state[key], values[key]) and not torch.equal(state[key], tensor), key
        elif ".experts." not in key:
            assert torch.equal(state[key], tensor), key


def decoded(out: Path) -> dict[str, Any]:
    """Our values of every encoded matrix, rounded once to BF16, by the name of its weight."""
    dense = read_manifest(out / "manifest.json").dense
    assert dense is not None
    found = {}
    for placed in (p for file in dense.files for p in read_matrices(out / file, dense, file)):
        raw = (out / placed.matrix.file).read_bytes()
        stored = {
            s.role: np.frombuffer(raw[placed.offset + s.offset :][: s.nbytes], VIEWS[s.dtype]).reshape(s.shape)
            for s in placed.record.stored
        }
        values = dense.encoding.values(stored, placed.matrix.rows, placed.matrix.columns)
        found[f"{placed.matrix.name}.weight"] = torch.from_numpy(values).to(torch.bfloat16)
    return found


def test_blocks_that_transformers_would_guess(tmp_path: Path) -> None:
    """A dense matrix whose sizes 128 does not divide makes the directory raise, as experts do."""
    model = replace(WHOLE, extra=WHOLE.extra | {"intermediate_size": 160})
    source = build(model, Size(128, 128, 2), tmp_path / "source")
    run(source.root, tmp_path / "out", "fp8", dense="fp8")
    with pytest.raises(ValueError, match="pagestone-partial-blocks"):
        load(tmp_path / "out", "Qwen3MoeForCausalLM")
