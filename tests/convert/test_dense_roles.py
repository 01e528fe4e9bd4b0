"""Dense tensors are held to what experts are held to: codes stay where others read them as codes, and only sound ones;
what can mean two things is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.conversions import planned, prepare
from kits.families import MODELS, SIZES, Raw, read_tensors
from kits.quantised import DENSE, EXPERTS, Codes, Fp8Spec, Int8Spec, rounded_to_bf16, stored_scale

from pagestone.convert import families
from pagestone.convert.plan import DECODED
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, PagestoneError
from pagestone.validate.verify import verify

SPEC = Fp8Spec(128, 128, experts=2)
Q = "model.layers.0.self_attn.q_proj"
NUMBERS = {"model.layers.0.mlp.gate": 2, "model.embed_tokens": 40, "lm_head": 40, "model.unknown.q_proj": 128,
           "model.layers.0.mlp.router_proj": 128, "model.visual.blocks.0.attn.proj": 128}  # fmt: skip
"""Modules, and their rows, that no loader takes for codes: router, embeddings, head, vision, names nobody knows."""


def codes(module: str) -> Codes:
    return SPEC.codes(2000 + list(NUMBERS).index(module), NUMBERS[module], SPEC.hidden)


def in_codes(tensors: dict[str, Raw]) -> dict[str, Raw]:
    """Every one of `NUMBERS` in FP8 with block scales."""
    for module in NUMBERS:
        tensors[f"{module}.weight"] = "F8_E4M3", codes(module).bits.shape, codes(module).bits.tobytes()
        tensors[f"{module}.weight_scale_inv"] = stored_scale(codes(module).grid, "BF16")
    return tensors


def plan_of(root: Path, codec: str = "fp8") -> Any:
    return planned(root, encodings.get(codec))


# -- which codes stay ------------------------------------------------------------------------------------------------


def test_codes_stay_by_their_role(tmp_path: Path) -> None:
    """In an fp8 container q, k, v and o keep their codes; what others take for numbers is decoded, whatever its form,
    and its modules may not be converted."""
    source = SPEC.having(change=in_codes).write(tmp_path / "s")
    prepare(source, tmp_path / "o", encodings.get("fp8"), workers=1)
    dense = read_tensors(tmp_path / "o", "dense-*.safetensors")
    stated = json.loads((tmp_path / "o" / "config.json").read_bytes())["quantization_config"]
    for module in NUMBERS:
        want = rounded_to_bf16(codes(module).values)
        assert dense[f"{module}.weight"] == ("BF16", want.shape, want.tobytes()), module
        assert f"{module}.weight_scale_inv" not in dense and module in stated["modules_to_not_convert"]
    for module in DENSE:
        for name in (f"{module}.weight", f"{module}.weight_scale_inv"):
            assert dense[name] == read_tensors(source)[name]
        assert module not in stated["modules_to_not_convert"]
    fates = {d.tensor.name for d in plan_of(source).dispositions if d.fate == DECODED}
    assert fates == {f"{m}.{t}" for m in NUMBERS for t in ("weight", "weight_scale_inv")}
    assert not verify(tmp_path / "o", source=source).findings


def test_as_a_machine_with_a_gpu_loads_it(
    oracle: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers with its look at the machine left out, so that it keeps codes as it does on a GPU: router and
    embedding are the source's values, the linear layers its codes."""
    torch, transformers = oracle("torch"), oracle("transformers")
    oracle("accelerate")
    transformers.logging.set_verbosity_error()
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    extra = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 40,
             "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
    square = {m: SPEC.codes(3000 + n, 128, 128) for n, m in enumerate(DENSE)}

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        for module, matrix in square.items():
            tensors[f"{module}.weight"] = "F8_E4M3", (128, 128), matrix.bits.tobytes()
            tensors[f"{module}.weight_scale_inv"] = stored_scale(matrix.grid, "BF16")
        tensors = {n: t for n, t in in_codes(tensors).items() if not re.search("unknown|router_proj|visual", n)}
        norm: Raw = ("BF16", (128,), b"\x80\x3f" * 128)
        small = {f"model.layers.0.self_attn.{n}_norm.weight": ("BF16", (32,), b"\x80\x3f" * 32) for n in "qk"}
        return tensors | small | {"model.layers.0.post_attention_layernorm.weight": norm}

    source = SPEC.having(change=change).write(tmp_path / "s")
    table = json.loads((source / "config.json").read_bytes()) | extra
    (source / "config.json").write_text(json.dumps(table))
    prepare(source, tmp_path / "o", encodings.get("fp8"), workers=1)
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "o", dtype=torch.bfloat16)
    state = model.state_dict()
    for module in ("model.layers.0.mlp.gate", "model.embed_tokens", "lm_head"):
        have = state[f"{module}.weight"]
        assert have.dtype == torch.bfloat16, module
        assert np.array_equal(have.view(torch.uint16).numpy(), rounded_to_bf16(codes(module).values)), module
    for module, matrix in square.items():
        have = state[f"{module}.weight"]
        assert have.dtype == torch.float8_e4m3fn and np.array_equal(have.view(torch.uint8).numpy(), matrix.bits)
        assert np.array_equal(state[f"{module}.weight_scale_inv"].float().numpy(), matrix.grid)


GATES = {"mlp.shared_expert_gate", "lm_head"}
"""Linear layers that transformers would convert and whose codes are decoded all the same: routers, and the head."""


@pytest.mark.parametrize("name", MODELS)
def test_families_name_what_transformers_converts(oracle: Callable[[str], ModuleType], name: str) -> None:
    """The modules whose codes stay are plain linear layers of the model that transformers builds, and all of them but
    routers, the head and the vision tower; with the list a container states none is left out."""
    torch, transformers = oracle("torch"), oracle("transformers")
    from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

    known = MODELS[name]
    text, kind = known.settings(SIZES["square"]), getattr(transformers, known.config)
    vision = dict(known.vision or {}) | {"out_hidden_size": 128}
    config = kind(**text) if known.vision is None else kind(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = getattr(transformers, known.classes[0])(config)
        names = [n for n, _ in model.named_modules()]
        replace_with_fp8_linear(
            model,
            modules_to_not_convert=[
                *(n for n in names if n.endswith(".experts")),
                *(model._keep_in_fp32_modules or ()),
            ],
            quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(128, 128)),
        )
    found = {n for n, m in model.named_modules() if isinstance(m, FP8Linear) and ".visual." not in n}
    family = families.registry()[name]
    kept = {n for n in found if family.reads_codes(n)}
    assert {re.sub(r".*layers\.\d+\.", "", n) for n in found - kept} <= GATES
    tails = {re.sub(r".*layers\.\d+\.", "", n) for n in kept}
    allowed = set(family.linears)
    if name == "deepseek_v2":
        allowed -= {"self_attn.q_a_proj", "self_attn.q_b_proj"}  # this config has no low rank for queries
    if name == "deepseek_v3":
        allowed -= {"self_attn.q_proj"}
    if name in ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_vl_moe"):
        allowed -= {f"mlp.{p}_proj" for p in ("gate", "up", "down")}  # this config has no dense layer
    assert tails == allowed


@pytest.mark.parametrize(
    ("module", "stays"),
    [("model.layers.3.self_attn.q_proj", True), ("model.language_model.layers.13.self_attn.o_proj", True),
     ("mtp.layers.0.self_attn.v_proj", True), ("model.layers.3.self_attn.q_projx", False),
     ("model.layers.3.x.self_attn.q_proj", False), ("x.model.layers.3.self_attn.q_proj", False),
     ("model.layers.x.self_attn.q_proj", False), ("model.layers.3.mlp.gate", False), ("self_attn.q_proj", False),
     ("model.layers.3.mlp.shared_expert_gate", False), ("model.layers.3.mlp.shared_expert.up_proj", False)],
)  # fmt: skip
def test_whole_names_of_modules_are_matched(module: str, stays: bool) -> None:
    assert families.registry()["qwen3_moe"].reads_codes(module) is stays


# -- only sound codes ------------------------------------------------------------------------------------------------


def edited(name: str, place: Any, value: Any, dtype: str) -> Callable[[dict[str, Raw]], dict[str, Raw]]:
    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        kind, shape, data = tensors[name]
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        array[place] = value
        return tensors | {name: (kind, shape, array.tobytes())}

    return change


SCALE = f"{Q}.weight_scale_inv"
UNSOUND = {
    "a scale of -1": ("F32", edited(SCALE, (2, 1), -1, "<f4"), "a scale of -1.0", 256, 128),
    "a scale of NaN": ("BF16", edited(SCALE, (4, 2), 0x7FC0, "<u2"), "a scale of nan", 512, 256),
    "a scale of Inf": ("F16", edited(SCALE, (0, 0), np.inf, "<f2"), "a scale of inf", 0, 0),
    "code 0x7F": ("BF16", edited(f"{Q}.weight", (575, 319), 0x7F, "u1"), "a NaN code", 575, 319),
    "code 0xFF": ("BF16", edited(f"{Q}.weight", (300, 1), 0xFF, "u1"), "a NaN code", 300, 1),
    "a product beyond float32": ("F32", edited(SCALE, (0, 0), 3e38, "<f4"), "that is Inf", None, None),
    "a zero scale over codes": ("F32", edited(SCALE, (0, 0), 0, "<f4"), "a zero scale over a code", None, None),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_codes_that_stay_are_sound(tmp_path: Path, what: str) -> None:
    """prepare-fp8 looks at dense codes and scales that it keeps, and refuses those that no container may hold."""
    dtype, change, words, row, column = UNSOUND[what]
    source = Fp8Spec(scale_dtype=dtype, change=change).write(tmp_path / "s")
    with pytest.raises(DataError, match="E0702") as caught:
        prepare(source, tmp_path / "o", encodings.get("fp8"), workers=1)
    assert caught.value.tensor == f"{Q}.weight" and words in caught.value.message
    assert row is None or f"row {row}, column {column}" in caught.value.message
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_a_zero_scale_over_zeros_stays(tmp_path: Path) -> None:
    """It stands for zeros, in dense matrices as in experts; so does a large scale over small codes."""

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        block = np.s_[128:256, 256:]
        tensors = edited(f"{Q}.weight", block, 0x80, "u1")(edited(SCALE, (1, 2), 0, "<f4")(tensors))
        return edited(f"{Q}.weight", np.s_[:128, :128], 0x08, "u1")(edited(SCALE, (0, 0), 1e38, "<f4")(tensors))

    spec = Fp8Spec(scale_dtype="F32", change=change)
    source = spec.write(tmp_path / "s")
    prepare(source, tmp_path / "o", encodings.get("fp8"), workers=1)
    assert read_tensors(tmp_path / "o", "dense-*")[f"{Q}.weight"] == read_tensors(source)[f"{Q}.weight"]
    assert not verify(tmp_path / "o", source=source).findings


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)])
@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_an_empty_matrix_of_codes(tmp_path: Path, shape: tuple[int, int], codec: str) -> None:
    """Nothing is in it, nothing is wrong with it."""
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    empty: dict[str, Raw] = {f"{Q}.weight": ("F8_E4M3", shape, b""),
                             SCALE: ("F32", grid, np.ones(grid, "<f4").tobytes())}  # fmt: skip
    source = Fp8Spec(change=lambda t: t | empty).write(tmp_path / "s")
    prepare(source, tmp_path / "o", encodings.get(codec), workers=1)
    dtype = "F8_E4M3" if codec == "fp8" else "BF16"
    assert read_tensors(tmp_path / "o", "dense-*")[f"{Q}.weight"] == (dtype, shape, b"")
    assert not verify(tmp_path / "o", source=source).findings


# -- what can mean two things ----------------------------------------------------------------------------------------


def raw(dtype: str, *shape: int) -> Raw:
    size = {"I32": 4, "I64": 8, "F64": 8, "BF16": 2, "F32": 4, "I16": 2}.get(dtype, 1)
    return dtype, shape, bytes(size * int(np.prod(shape)))


def one(*shape: int) -> Raw:
    return "F32", shape, np.ones(shape, "<f4").tobytes()


GATE = "model.layers.0.mlp.gate.weight"
TWO_MEANINGS: dict[str, tuple[dict[str, Raw], str, str]] = {
    "I8 without a scale": ({"a.weight": raw("I8", 8, 8)}, "E0513", "a.weight"),
    "I8 whose scale is called otherwise": (
        {"a.weight": raw("I8", 8, 8), "a.weight_scales": one(8, 1)}, "E0513", "a.weight"),
    "I8 under a known name": ({GATE: raw("I8", 2, 128)}, "E0513", GATE),
    "U8 under a known name": ({GATE: raw("U8", 2, 128)}, "E0514", GATE),
    "U8 with a scale": ({"a.weight": raw("U8", 8, 8), "a.weight_scale": one(8, 1)}, "E0514", "a.weight"),
    "I32": ({"a.weight": raw("I32", 8, 8)}, "E0514", "a.weight"),
    "BOOL": ({"a.weight": raw("BOOL", 8, 8)}, "E0514", "a.weight"),
    "a bias nobody knows in I32": ({"a.bias": raw("I32", 8)}, "E0514", "a.bias"),
    "a bias in I32": ({"model.layers.0.self_attn.q_proj.bias": raw("I32", 576)}, "E0514",
                      "model.layers.0.self_attn.q_proj.bias"),
    "a known name that ends otherwise": ({"model.layers.0.self_attn.sinks": raw("I16", 4)}, "E0514", "sinks"),
    "F8 of rank 1": ({"a.weight": raw("F8_E4M3", 8), "a.scale": one()}, "E0514", "a.weight"),
    "F8 of rank 3": ({"a.weight": raw("F8_E4M3", 4, 8, 8), "a.scale": one()}, "E0514", "a.weight"),
    "F8 of rank 3 with a grid": (
        {"a.weight": raw("F8_E4M3", 4, 8, 8), "a.weight_scale_inv": one(4, 1, 1)}, "E0514", "a.weight"),
    "I8 of rank 3": ({"a.weight": raw("I8", 4, 8, 8), "a.scale": one()}, "E0514", "a.weight"),
    "I8 of rank 1": ({"a.weight": raw("I8", 8), "a.weight_scale": one()}, "E0514", "a.weight"),
    "I8 of rank 0": ({"a.weight": raw("I8"), "a.weight_scale": one()}, "E0514", "a.weight"),
    "codes that are no weight": ({"a.up": raw("I8", 8, 8), "a.up_scale": one(8, 1)}, "E0514", "a.up"),
    "E8M0 by itself": ({"a.table": raw("F8_E8M0", 8)}, "E0513", "a.table"),
    "a scale by itself": ({"a.up_scale_inv": one(8, 1)}, "E0513", "a.up_scale_inv"),
    "zero points by themselves": ({"a.weight": raw("BF16", 8, 8), "a.weight_zero_point": raw("I8", 8)}, "E0513",
                                  "a.weight_zero_point"),
    "zero points beside F8": (
        {"a.weight": raw("F8_E4M3", 8, 8), "a.weight_scale": one(), "a.weight_zero_point": raw("I8", 8)}, "E0514",
        "a.weight_zero_point"),
    "zero points beside F8 that would stay": (
        {f"{Q}.weight_zero_point": raw("I8", 576)}, "E0514", f"{Q}.weight_zero_point"),
}  # fmt: skip


@pytest.mark.parametrize("codec", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("what", TWO_MEANINGS)
def test_what_can_mean_two_things_is_refused(tmp_path: Path, what: str, codec: str) -> None:
    """Integers or codes where a model has a number, without a scale that is read: refused, never copied."""
    added, code, words = TWO_MEANINGS[what]
    source = Fp8Spec(hidden=128 if GATE in added else 320, change=lambda t: t | added).write(tmp_path / "s")
    with pytest.raises(PagestoneError) as caught:
        plan_of(source, codec)
    error = caught.value
    assert error.code == code and words in str(error.tensor) and error.remedy, error


def test_what_has_one_meaning_is_copied(tmp_path: Path) -> None:
    """Integers that are no parameter (positions, counters), and parameters in any type of plain numbers."""
    added = {"a.position_ids": raw("I64", 1, 8), "a.mask": raw("BOOL", 8), "a.counts": raw("U8", 8),
             "a.weight": raw("F64", 8, 8), "b.weight": raw("F32", 2, 2, 2), "b.scale": one(), "c.bias": raw("BF16", 2),
             "d.weight_scales": one(8)}  # fmt: skip
    source = SPEC.having(change=lambda t: t | added).write(tmp_path / "s")
    prepare(source, tmp_path / "o", encodings.get("fp8"), workers=1)
    dense = read_tensors(tmp_path / "o", "dense-*.safetensors")
    assert {n: dense[n] for n in added} == added
    assert not verify(tmp_path / "o", source=source).findings


def test_int8_zero_points_beside_their_codes_are_read(tmp_path: Path) -> None:
    """The sibling of the refusals above: what is complete is decoded, names in any order."""
    spec = Int8Spec(zero_points=True, change=lambda t: dict(sorted(t.items(), reverse=True)))
    prepare(spec.write(tmp_path / "s"), tmp_path / "o", encodings.get("int8"), workers=1)
    dense = read_tensors(tmp_path / "o", "dense-*.safetensors")
    assert not [n for n in dense if "zero" in n or "scale" in n] and f"{Q}.weight" in dense
    assert f"{EXPERTS}.0.up_proj.weight" not in dense
