"""Plain transformers reads right weights from a container's directory, or raises; it never takes codes for weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.checkpoints import T_BLOCK
from kits.conversions import prepare

from pagestone.formats import encodings
from pagestone.reader.container import open_container

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny-moe"

CLASSES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "AutoModelForCausalLM")
READ_BY_TRANSFORMERS = {"fp8", "bf16"}
"""Codecs whose directories transformers loads at tiny-moe's shapes (128 divides them); all others must raise."""


@pytest.fixture(scope="module", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch, transformers
    torch, transformers = oracle("torch"), oracle("transformers")
    oracle("accelerate")


torch: Any
transformers: Any


@pytest.fixture(scope="module", params=sorted(encodings.registry()))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container of tiny-moe in each codec; its folder carries the codec's name."""
    path = tmp_path_factory.mktemp("transformers") / request.param
    prepare(TINY, path, encodings.get(request.param), workers=2)
    return path


def _load(directory: Path, name: str) -> tuple[Any, dict[str, Any]]:
    cls = getattr(transformers, name)
    model, info = cls.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    return model, info


def _bf16(array: np.ndarray) -> Any:
    return torch.from_numpy(array).to(torch.bfloat16)


@pytest.mark.parametrize("name", CLASSES)
def test_right_weights_or_an_exception(directory: Path, name: str) -> None:
    """Both model classes: every expert and every dense weight is right, or loading raises."""
    if directory.name not in READ_BY_TRANSFORMERS:
        with pytest.raises((RuntimeError, ValueError, ImportError, KeyError)):
            _load(directory, name)
        return
    model, info = _load(directory, name)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["error_msgs"]
    assert all(".experts." in key and ".pad" in key for key in info["unexpected_keys"])
    state = model.state_dict()
    source, _ = _load(TINY, name)
    for key, wanted in source.state_dict().items():
        if ".experts." not in key:
            assert torch.equal(state[key], wanted), key
    for number, layer in open_container(directory).layers.items():
        (fused,) = [k for k in state if k.endswith(f"layers.{number}.mlp.experts.gate_up_proj")]
        for expert in layer:
            gate_up = np.concatenate([expert.gate.decode(), expert.up.decode()])
            assert torch.equal(state[fused][expert.number], _bf16(gate_up)), (number, expert.number)
            down = state[fused.replace("gate_up_proj", "down_proj")][expert.number]
            assert torch.equal(down, _bf16(expert.down.decode())), (number, expert.number)


@pytest.mark.parametrize("name", CLASSES[:2])
def test_int8_raises_without_compressed_tensors_too(directory: Path, name: str) -> None:
    """A user without the library that the config names gets an exception, not codes."""
    if directory.name != "int8":
        pytest.skip("this promise is about the int8 directory")
    code = (
        "import sys; sys.modules['compressed_tensors'] = None\n"
        "import torch, transformers\n"
        f"transformers.{name}.from_pretrained({str(directory)!r}, dtype=torch.bfloat16)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Error" in done.stderr.splitlines()[-1], done.stderr[-2000:]


@pytest.mark.parametrize("name", CLASSES[:2])
def test_partial_fp8_blocks_raise(tmp_path: Path, name: str) -> None:
    """transformers would guess another block size where 128 does not divide: the directory must make it raise."""
    T_BLOCK.write(tmp_path / "source")
    prepare(tmp_path / "source", tmp_path / "fp8", encodings.get("fp8"), workers=1)
    with pytest.raises(ValueError, match="pagestone-partial-blocks"):
        _load(tmp_path / "fp8", name)


def test_compressed_tensors_decompresses_int8(directory: Path, oracle: Callable[[str], ModuleType]) -> None:
    """compressed-tensors' own dequantisation gives our float32 values, matrix by matrix, bit for bit."""
    if directory.name != "int8":
        pytest.skip("this promise is about the int8 directory")
    oracle("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stated = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert stated.pop("quant_method") == "compressed-tensors"
    scheme = QuantizationConfig.model_validate(stated).config_groups["group_0"]
    decompress = BaseCompressor.get_value_from_registry(stated["format"]).decompress
    for layer in open_container(directory).layers.values():
        for expert in (layer.expert(0), layer.expert(len(layer) - 1)):
            for matrix in (expert.gate, expert.up, expert.down):
                assert matrix.scales is not None
                stored = {"weight": matrix.codes.torch(), "weight_scale": matrix.scales.torch()}
                theirs = decompress(stored, scheme)["weight"]
                assert theirs.dtype == torch.float32
                assert torch.equal(theirs, torch.from_numpy(matrix.decode()))
