"""What is not read is refused by its right name, and the remedy can be followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.checkpoints import INDEX, T_ORDER, Tensor, write_checkpoint, write_safetensors
from kits.conversions import planned
from kits.quantised import EXPERTS, INT8_CONFIG, Fp8Spec, Int8Spec

from pagestone.formats import encodings
from pagestone.formats.errors import DataError, PagestoneError, RequestError

SPEC = T_ORDER.having(layers=1, experts=2, mtp=False, fused=False, family="qwen3_moe")
UP = "model.layers.0.mlp.experts.1.up_proj"
Q = "model.layers.0.self_attn.q_proj"


def refusal(root: Path) -> PagestoneError:
    with pytest.raises((RequestError, DataError)) as caught:
        planned(root, encodings.get("int8"))
    assert caught.value.remedy
    return caught.value


def source(root: Path, module: str, tails: dict[str, Tensor], method: Any = None) -> Path:
    """A checkpoint in which the weight of one module has become these tensors."""
    tensors = {n: t for n, t in SPEC.tensors().items() if n != f"{module}.weight"}
    tensors |= {module + tail: tensor for tail, tensor in tails.items()}
    config = SPEC.config() | ({} if method is None else {"quantization_config": {"quant_method": method}})
    return write_checkpoint(root, tensors, config)


def codes(dtype: str, *shape: int) -> Tensor:
    item = {"I8": 1, "U8": 1, "I16": 2, "I32": 4, "F8_E4M3": 1}[dtype]
    return Tensor(dtype, shape, bytes(item * int(np.prod(shape))))


FLOAT = Tensor.of(np.ones((48, 1)))
FORMATS = {
    "EXL2": ("exl2", {".q_weight": codes("I32", 4, 48), ".q_scale": codes("I32", 1, 6), ".q_groups": codes("I16", 2)}),
    "EXL3": ("exl3", {".trellis": codes("I16", 2, 3, 32), ".suh": Tensor.of([1.0], "F16"),
                      ".svh": Tensor.of([1.0], "F16")}),
    "HQQ": ("hqq", {".W_q": codes("U8", 24, 32), ".scale": FLOAT, ".zero": FLOAT}),
    "AQLM": ("aqlm", {".codes": codes("I16", 48, 4, 1), ".codebooks": FLOAT, ".scales": FLOAT}),
    "quanto": ("quanto", {".weight._data": codes("I8", 48, 32), ".weight._scale": FLOAT}),
    "torchao": ("torchao", {"._weight_qdata": codes("I8", 48, 32), "._weight_scale": FLOAT}),
    "torchao of old": ("torchao", {".weight:_data": codes("I8", 48, 32), ".weight:_scale": FLOAT}),
}  # fmt: skip


@pytest.mark.parametrize("module", [UP, Q])
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("case", FORMATS)
def test_formats_by_the_names_of_their_tensors(tmp_path, case, stated, module):
    """In an expert and in a dense module, whatever config.json says."""
    method, tails = FORMATS[case]
    error = refusal(source(tmp_path / "s", module, tails, method if stated else None))
    assert error.code == "E0511" and f"in {case.split()[0]} (" in error.message, error
    assert error.tensor in {module + tail for tail in tails} and "unquantised" in str(error.remedy)


METHODS = {
    "Quark": ("quark", {".weight": codes("I32", 48, 4), ".weight_scale": FLOAT}),
    "BitNet": ("bitnet", {".weight": codes("U8", 12, 32), ".weight_scale": Tensor.of([1.0])}),
    "EETQ": ("eetq", {".weight": codes("I8", 48, 32), ".weight_scales": FLOAT}),
    "VPTQ": ("vptq", {".indices": codes("I32", 1, 48, 4), ".centroids": FLOAT}),
    "'some\\x1bthing'": ("some\x1bthing", {".weight": codes("I8", 48, 32)}),
    "7": (7, {".weight": codes("I8", 48, 32)}),
    "['fp8']": (["fp8"], {".weight": codes("I8", 48, 32)}),
}  # fmt: skip


@pytest.mark.parametrize("case", METHODS)
def test_formats_by_quant_method(tmp_path, case):
    """Where names and types only say that something cannot be read, the config says what it is."""
    method, tails = METHODS[case]
    error = refusal(source(tmp_path / "s", UP, tails, method))
    assert error.code == "E0511" and f"in {case}," in error.message and "unquantised" in str(error.remedy), error
    assert "bf16, f16, f32, fp8 or int8 expected" in error.message
    assert refusal(source(tmp_path / "t", UP, tails)).code in ("E0504", "E0510", "E0513", "E0514")


def test_a_format_in_which_every_matrix_is_packed(tmp_path):
    """All alike, but of other sizes than config.json says: the format is the reason."""
    tensors = {
        n: codes("U8", t.shape[0] // 4, t.shape[1]) if ".experts." in n else t for n, t in SPEC.tensors().items()
    }
    config = SPEC.config() | {"quantization_config": {"quant_method": "bitnet"}}
    error = refusal(write_checkpoint(tmp_path / "s", tensors, config))
    assert error.code == "E0511" and "BitNet" in error.message


def test_a_method_alone_refuses_nothing(tmp_path):
    """Plain floats are plain floats, whatever the config says; and what is missing is missing."""
    root = source(tmp_path / "s", UP, {".weight": SPEC.tensors()[f"{UP}.weight"]}, "exl3")
    planned(root, encodings.get("int8"))
    tensors = {n: t for n, t in SPEC.tensors().items() if ".experts.0." not in n}
    config = SPEC.config() | {"quantization_config": {"quant_method": "exl3"}}
    assert refusal(write_checkpoint(tmp_path / "t", tensors, config)).code == "E0509"


@pytest.mark.parametrize("spec", [Int8Spec(), Fp8Spec(256, 128, scales="channel")])
@pytest.mark.parametrize("name", [f"{EXPERTS}.1.up_proj", "model.layers.0.self_attn.q_proj"])
def test_scales_of_groups(tmp_path, spec, name):
    """`strategy: group` is another format, no damaged download; the same shape without that word is."""

    def grouped(tensors: dict[str, Any]) -> dict[str, Any]:
        scale = next(f"{name}.{s}" for s in ("weight_scale", "weight_scale_inv") if f"{name}.{s}" in tensors)
        shape = (tensors[f"{name}.weight"][1][0], 3)
        return tensors | {scale: ("F32", shape, np.ones(shape, "<f4").tobytes())}

    root = spec.having(change=grouped).write(tmp_path / "s")
    assert refusal(root).code == "E0515"
    config = json.loads((root / "config.json").read_bytes())
    stated = json.loads(json.dumps(INT8_CONFIG))
    stated["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": 64}
    config["quantization_config"] = stated
    (root / "config.json").write_text(json.dumps(config))
    error = refusal(root)
    assert error.code == "E0511" and error.exit_code == 2 and "strategy: group, group_size: 64" in error.message
    assert "download" not in str(error.remedy) and str(error.tensor).startswith(name)


@pytest.mark.parametrize("tails", [[".lora_A.weight", ".lora_B.weight"], [".base_layer.weight"],
                                   [".lora_A.default.weight"], [".lora_magnitude_vector"]])  # fmt: skip
@pytest.mark.parametrize("module", [UP, Q, "base_model.model.model.layers.0.mlp.experts.0.gate_proj"])
def test_adapters_that_were_not_merged(tmp_path, module, tails):
    """Of an expert or a dense module: the remedy is to merge, not a family file."""
    error = refusal(source(tmp_path / "s", module, dict.fromkeys(tails, FLOAT)))
    assert error.code == "E0419" and "LoRA" in error.message and "merge" in str(error.remedy)


def test_a_mixture_whose_names_say_nothing_of_experts(tmp_path):
    """granitemoehybrid: no tensor has "expert" in its name, and it is a family nobody wrote, no dense model."""
    names = ["input_linear.weight", "output_linear.weight", "router.layer.weight"]
    tensors = {f"model.layers.0.block_sparse_moe.{n}": Tensor.of(np.ones((2, 4, 4))) for n in names}
    config = {"model_type": "granitemoehybrid", "num_hidden_layers": 1, "num_local_experts": 2}
    error = refusal(write_checkpoint(tmp_path / "s", tensors, config))
    assert error.code == "E0602" and "block_sparse_moe.input_linear" in error.message
    assert "granitemoehybrid" in str(error.remedy)
    odd = {"model.layers.0.ffn.w1": Tensor.of(np.ones((2, 4, 4)))}
    error = refusal(write_checkpoint(tmp_path / "t", odd, config))
    assert error.code == "E0602" and "num_local_experts 2" in error.message
    error = refusal(write_checkpoint(tmp_path / "u", odd, config | {"num_local_experts": 0}))
    assert error.code == "E0601"
    error = refusal(write_checkpoint(tmp_path / "v", tensors, {"num_hidden_layers": 1}))
    assert error.code == "E0602" and "state the model_type" in str(error.remedy)


@pytest.mark.parametrize("gone", ["experts.1.up_proj", "experts.1.", "layers.0.mlp.experts"])
def test_what_is_missing_may_stand_outside_the_index(tmp_path, gone):
    """A stale index: the remedy is the index, or to take the files that are here, not another download."""
    tensors = SPEC.having(layers=2).tensors()
    config = SPEC.having(layers=2).config()
    root = write_checkpoint(tmp_path / "s", {n: t for n, t in tensors.items() if gone not in n}, config, shards=2)
    error = refusal(root)
    assert "download" in str(error.remedy) and "merge" not in str(error.remedy)
    write_safetensors(root / "extra.safetensors", {n: t for n, t in tensors.items() if gone in n})
    told = refusal(root)
    assert (told.code, type(told)) == (error.code, type(error)) and "extra.safetensors" in told.message
    assert "index" in str(told.remedy) and "--merge-unlisted" in str(told.remedy)
    planned(root, encodings.get("int8"), merge_unlisted=True)
    assert (root / INDEX).exists()
