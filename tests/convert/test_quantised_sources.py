"""Sources that are already quantised: codes and scales stay where they can, and are decoded exactly where not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.conversions import planned, prepare
from kits.families import MODELS, Raw, build, built, is_expert, read_table, read_tensors, write_tensors
from kits.families import SIZES as FAMILY_SIZES
from kits.quantised import (
    DENSE,
    EXPERTS,
    PARTS,
    Codes,
    Fp8Spec,
    Int8Spec,
    bf16_bits,
    config,
    e4m3,
    rounded_to_bf16,
    write,
)

from pagestone.convert.outcome import Outcome
from pagestone.convert.plan import DECODED, EXCLUDED, Plan
from pagestone.convert.report import outcome_text, plan_table, plan_text
from pagestone.formats import encodings
from pagestone.formats.dtypes import E4M3_VALUES, VIEWS
from pagestone.formats.errors import DataError, PagestoneError
from pagestone.validate.verify import verify

CODECS = sorted(encodings.registry())
Spec = Fp8Spec | Int8Spec


def plan_of(root: Path, codec: str) -> Plan:
    return planned(root, encodings.get(codec))


def convert(spec: Spec, where: Path, codec: str, expected: tuple[str, ...] = ()) -> Outcome:
    """Write the source, convert it to `where`/out, and check that `verify --source` agrees, but for `expected`."""
    source = spec.write(where / "source")
    outcome = prepare(source, where / "out", encodings.get(codec), workers=2)
    report = verify(where / "out", source=source)
    assert tuple(f.code for f in report.findings) == expected, [f.text() for f in report.findings]
    return outcome


def stored(out: Path, expert: int, part: str, suffix: str) -> tuple[str, np.ndarray]:
    """Type and bits of one tensor of an expert in the container."""
    dtype, shape, data = read_tensors(out, "layers-00.safetensors")[f"{EXPERTS}.{expert}.{part}_proj.{suffix}"]
    return dtype, np.frombuffer(data, VIEWS[dtype]).reshape(shape)


def assert_defined(spec: Spec, out: Path, codec_name: str, values: Callable[[int, str], np.ndarray]) -> None:
    """Every stored array is what the definition makes of these values."""
    parameters = json.loads((out / "manifest.json").read_bytes())["codec"]["parameters"]
    codec = encodings.get(codec_name, parameters)
    for expert in range(spec.experts):
        for part in PARTS:
            rows, columns = spec.shape(part)
            want = codec.allocate(rows, columns)
            codec.encode_definition(values(expert, part), want)
            for t in codec.in_record(rows, columns):
                dtype, have = stored(out, expert, part, t.suffix)
                assert dtype == t.dtype and have.tobytes() == want[t.name].tobytes(), (expert, part, t.name)


def rules(plan: Plan, words: str) -> set[str]:
    """Rules of the tensors whose name has `words`."""
    return {d.rule for d in plan.dispositions if words in d.tensor.name}


def test_kit_decodes_e4m3() -> None:
    """The kit's decoding, written from the standard, is the code's."""
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(e4m3(codes).view("<u4") & 0x7FFFFFFF, E4M3_VALUES.view("<u4") & 0x7FFFFFFF, equal_nan=False)
    assert np.array_equal(np.signbit(e4m3(codes))[codes & 0x7F != 0x7F], np.signbit(E4M3_VALUES)[codes & 0x7F != 0x7F])


# -- codes that stay -------------------------------------------------------------------------------------------------

# hard case: scales named weight_scale_inv or weight_scale, in F32, BF16 or F16; E8M0 scales as F8_E8M0 or as U8
SCALE_DTYPES = {"BF16": "BF16", "F32": "F32", "F16": "F32", "F8_E8M0": "F32", "U8": "F32"}
WHOLE, EDGE, ODD = Fp8Spec(256, 128), Fp8Spec(320, 192), Fp8Spec(192, 160)
SIZES = {"whole": WHOLE, "edge": EDGE, "odd": ODD}
"""128 divides everything; partial edge blocks; partial blocks, and 2I = 320 puts the border of gate and up in one."""


# hard cases: a weight in one shard and its scale in another; rows or columns that 128 does not divide (576, 320, 160)
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_block_scales_pass_through(tmp_path: Path, size: str, dtype: str, name: str) -> None:
    """To fp8: the codes are the source's bytes, the scales its values in BF16 or F32 as the source's type asks."""
    spec = SIZES[size].having(scale_dtype=dtype, scale_name=name, shards=3)
    outcome = convert(spec, tmp_path, "fp8")
    assert outcome.notes == {"passed through": 3 * spec.experts}
    assert outcome.manifest.lossless and outcome.manifest.parameters["scale_dtype"] == SCALE_DTYPES[dtype]
    assert outcome.warnings == ()
    for expert in range(spec.experts):
        for part in PARTS:
            matrix = spec.matrix(expert, part)
            assert np.array_equal(stored(tmp_path / "out", expert, part, "weight")[1], matrix.bits)
            kind, scales = stored(tmp_path / "out", expert, part, "weight_scale_inv")
            assert kind == SCALE_DTYPES[dtype]
            assert np.array_equal(scales, bf16_bits(matrix.grid) if kind == "BF16" else matrix.grid)
    plan = plan_of(tmp_path / "source", "fp8")
    assert rules(plan, ".experts.") == {"qwen3_moe: routed expert, passed through"}
    assert "lossless" in plan_text(plan, tmp_path) and plan_table(plan, tmp_path)["lossless"]
    assert f"{3 * spec.experts} passed through" in outcome_text(outcome, tmp_path, 1.0)


@pytest.mark.parametrize("scales", ["tensor", "tensor [1]"])
@pytest.mark.parametrize("size", SIZES)
def test_scales_per_tensor_are_repeated(tmp_path: Path, size: str, scales: str) -> None:
    """To fp8: one scale for a matrix stands in every block of the grid."""
    spec = SIZES[size].having(scales=scales, scale_dtype="F32", scale_name="weight_scale")
    assert convert(spec, tmp_path, "fp8").manifest.lossless
    for part in PARTS:
        matrix = spec.matrix(1, part)
        assert np.array_equal(stored(tmp_path / "out", 1, part, "weight")[1], matrix.bits)
        kind, grid = stored(tmp_path / "out", 1, part, "weight_scale_inv")
        rows, columns = spec.shape(part)
        assert kind == "F32" and grid.shape == (-(-rows // 128), -(-columns // 128))
        assert (grid == matrix.grid.reshape(())).all()


@pytest.mark.parametrize("scales", ["channel", "channel [N]"])
def test_scales_per_channel_are_requantised(tmp_path: Path, scales: str) -> None:
    """To fp8: no grid of blocks holds a scale per row; the values are encoded again, with BF16 scales as always."""
    spec = EDGE.having(scales=scales, scale_dtype="F32", scale_name="weight_scale")
    outcome = convert(spec, tmp_path, "fp8")
    assert outcome.notes == {"requantised": 6} and not outcome.manifest.lossless
    assert outcome.manifest.parameters["scale_dtype"] == "BF16"
    assert_defined(spec, tmp_path / "out", "fp8", lambda e, p: spec.matrix(e, p).values)
    found = rules(plan_of(tmp_path / "source", "fp8"), ".experts.")
    assert found == {"qwen3_moe: routed expert, requantised (fp8, a scale per channel: not blocks of 128x128)"}


# hard case: fused and per-expert FP8; dtype implies no layout
@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
@pytest.mark.parametrize("size", SIZES)
def test_fused_blocks(tmp_path: Path, size: str, dtype: str) -> None:
    """Where 128 divides I all codes stay; else blocks straddle gate and up: gate and down stay, up is encoded again."""
    spec = SIZES[size].having(fused=True, scale_dtype=dtype)
    outcome = convert(spec, tmp_path, "fp8")
    straddles = bool(spec.intermediate % 128)
    assert outcome.notes == ({"passed through": 4, "requantised": 2} if straddles else {"passed through": 6})
    assert outcome.manifest.lossless is not straddles
    plan = plan_of(tmp_path / "source", "fp8")
    reason = "requantised (a block of the fused tensor straddles gate and up)" if straddles else "passed through"
    assert rules(plan, "experts.gate_up_proj") == {f"qwen3_moe: routed expert, {reason}"}
    assert rules(plan, "experts.down_proj") == {"qwen3_moe: routed expert, passed through"}
    for expert in range(spec.experts):
        for part in PARTS:
            matrix = spec.matrix(expert, part)
            rows, columns = spec.shape(part)
            codes = stored(tmp_path / "out", expert, part, "weight")[1]
            kind, scales = stored(tmp_path / "out", expert, part, "weight_scale_inv")
            assert kind == ("BF16" if dtype == "BF16" else "F32")
            if part == "up" and straddles:
                codec = encodings.get("fp8", {"scale_dtype": kind, "block": 128})
                want = codec.allocate(rows, columns)
                codec.encode_definition(matrix.values, want)
                assert np.array_equal(codes, want["codes"]) and np.array_equal(scales, want["scales"])
                continue
            assert np.array_equal(codes, matrix.bits)
            first = spec.intermediate // 128 if part == "up" else 0
            grid = matrix.grid[first : first + -(-rows // 128)]
            assert np.array_equal(scales, bf16_bits(grid) if kind == "BF16" else grid)


@pytest.mark.parametrize("scales", ["tensor [1]", "channel", "channel [N]"])
def test_fused_with_other_scales(tmp_path: Path, scales: str) -> None:
    """A fused tensor with a scale an expert keeps its codes; with one a row it is encoded again; both decode right."""
    spec = ODD.having(fused=True, scales=scales, scale_dtype="F32", scale_name="weight_scale", dense=False)
    outcome = convert(spec, tmp_path, "fp8")
    assert outcome.notes == ({"passed through": 6} if "tensor" in scales else {"requantised": 6})
    outcome = prepare(tmp_path / "source", tmp_path / "int8", encodings.get("int8"), workers=1)
    assert_defined(spec, tmp_path / "int8", "int8", lambda e, p: spec.matrix(e, p).values)


def test_one_scale_type_for_a_container(tmp_path: Path) -> None:
    """One matrix with F32 scales among BF16 ones makes all scales F32, exactly widened."""

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        name = f"{EXPERTS}.1.up_proj.weight_scale_inv"
        values = (np.frombuffer(tensors[name][2], "<u2").astype("<u4") << 16).view("<f4")
        return tensors | {name: ("F32", tensors[name][1], values.tobytes())}

    spec = EDGE.having(change=change)
    outcome = convert(spec, tmp_path, "fp8")
    assert outcome.manifest.parameters["scale_dtype"] == "F32" and outcome.manifest.lossless
    for part in PARTS:
        assert np.array_equal(stored(tmp_path / "out", 0, part, "weight_scale_inv")[1], spec.matrix(0, part).grid)


def test_fp8_and_bf16_in_one_layer(tmp_path: Path) -> None:
    """Types may differ from matrix to matrix: each is treated as its own."""
    values = np.linspace(-1, 1, 192 * 320, dtype=np.float32).reshape(192, 320)
    bits = rounded_to_bf16(values)

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        del tensors[f"{EXPERTS}.0.up_proj.weight_scale_inv"]
        return tensors | {f"{EXPERTS}.0.up_proj.weight": ("BF16", (192, 320), bits.tobytes())}

    spec = EDGE.having(change=change)
    outcome = convert(spec, tmp_path, "fp8")
    assert outcome.notes == {"passed through": 5} and not outcome.manifest.lossless
    plan = plan_of(tmp_path / "source", "fp8")
    assert rules(plan, "experts.0.up_proj.weight") == {"qwen3_moe: routed expert, encoded"}
    assert plan.source_facts["expert_dtypes"] == ["BF16", "F8_E4M3"]
    prepare(tmp_path / "source", tmp_path / "bf16", encodings.get("bf16"), workers=1)
    assert np.array_equal(stored(tmp_path / "bf16", 0, "up", "weight")[1], bits)


# -- codes that do not stay ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["block", "tensor", "channel"])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("codec", [c for c in CODECS if c != "fp8"])
def test_other_targets(tmp_path: Path, codec: str, dtype: str, scales: str) -> None:
    """Any other codec stores its definition of code * scale in float32; E8M0 is 2^(b - 127), never a number."""
    spec = EDGE.having(scale_dtype=dtype, scales=scales, shards=2)
    outcome = convert(spec, tmp_path, codec)
    assert outcome.notes == {"requantised": 6} and not outcome.manifest.lossless
    assert_defined(spec, tmp_path / "out", codec, lambda e, p: spec.matrix(e, p).values)
    (rule,) = rules(plan_of(tmp_path / "source", codec), ".experts.")
    assert rule.startswith("qwen3_moe: routed expert, " + ("rounded" if codec == "bf16" else "requantised ("))
    if codec == "bf16":
        have = stored(tmp_path / "out", 1, "up", "weight")[1]
        assert np.array_equal(have, rounded_to_bf16(spec.matrix(1, "up").values))


# hard case: block size guessed from shapes (300 rows / 3 = 100): take weight_block_size, check ceil on both axes
@pytest.mark.parametrize("block", [(128, 128), (100, 128)])
def test_block_size_is_what_the_config_says(tmp_path: Path, block: tuple[int, int]) -> None:
    """300 rows with 3 scales are blocks of 128, the last one partial, or of 100: the config decides."""
    spec = Fp8Spec(256, 300, block=block, dense=False, scale_dtype="F32")
    assert {spec.grid_of(300, 256)[0]} == {(3, 2)}
    outcome = convert(spec, tmp_path, "int8")
    assert_defined(spec, tmp_path / "out", "int8", lambda e, p: spec.matrix(e, p).values)
    outcome = prepare(tmp_path / "source", tmp_path / "fp8", encodings.get("fp8"), workers=1)
    assert outcome.notes == ({"passed through": 6} if block == (128, 128) else {"requantised": 6})
    if block != (128, 128):
        rule = "qwen3_moe: routed expert, requantised (fp8, blocks of 100x128: not blocks of 128x128)"
        assert rules(plan_of(tmp_path / "source", "fp8"), ".experts.") == {rule}


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [64, 128]},
     {"quant_method": "fp8", "weight_block_size": [0, 128]}, {"quant_method": "fp8", "weight_block_size": "128"}],
)  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_block_size_is_never_guessed(tmp_path: Path, fused: bool, quantization: dict[str, Any]) -> None:
    """Without a weight_block_size that fits both axes a grid of scales means nothing."""
    spec = EDGE.having(quantization=quantization, dense=False, fused=fused)
    with pytest.raises(DataError, match="E0515") as caught:
        plan_of(spec.write(tmp_path / "s"), "fp8")
    assert "scale_inv" in str(caught.value.tensor) and "weight_block_size" in caught.value.message


def test_block_size_may_stand_elsewhere(tmp_path: Path) -> None:
    """text_config, and compressed-tensors' block_structure, state it too."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    other = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    spec = EDGE.having(quantization=other, scale_name="weight_scale")
    assert convert(spec, tmp_path, "fp8").notes == {"passed through": 6}
    nested = {"text_config": EDGE.config(), "model_type": "qwen3_moe"}
    root = write(tmp_path / "nested", EDGE.tensors(), nested)
    assert plan_of(root, "fp8").warnings == () and plan_of(root, "fp8").lossless


# -- what is refused -------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Raw]], dict[str, Raw]]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def with_tensor(name: str, tensor: Raw) -> Callable[[dict[str, Raw]], dict[str, Raw]]:
    return lambda tensors: tensors | {name: tensor}


Q, UP = "model.layers.0.self_attn.q_proj", f"{EXPERTS}.1.up_proj"
BROKEN = {
    # hard case: an F8 weight without a scale, or a scale without a weight: error
    "expert without a scale": (without(f"{UP}.weight_scale_inv"), "E0513", f"{UP}.weight"),
    "expert's scale without codes": (without(f"{UP}.weight"), "E0508", EXPERTS),
    "dense without a scale": (without(f"{Q}.weight_scale_inv"), "E0513", f"{Q}.weight"),
    "dense scale without codes": (without(f"{Q}.weight"), "E0513", f"{Q}.weight_scale_inv"),
    "scale beside floats": (with_tensor(f"{UP}.weight", ("BF16", (192, 320), bytes(2 * 192 * 320))), "E0513",
                            f"{UP}.weight_scale_inv"),
    "dense scale beside floats": (with_tensor(f"{Q}.weight", ("BF16", (576, 320), bytes(2 * 576 * 320))), "E0513",
                                  f"{Q}.weight_scale_inv"),
    "two scales": (with_tensor(f"{UP}.weight_scale", ("F32", (), bytes(4))), "E0512", f"{UP}.weight_scale"),
    "two dense scales": (with_tensor(f"{Q}.weight_scale", ("F32", (), bytes(4))), "E0513", f"{Q}.weight_scale"),
    "grid of another shape": (with_tensor(f"{UP}.weight_scale_inv", ("BF16", (3, 3), bytes(18))), "E0515",
                              f"{UP}.weight_scale_inv"),
    "dense grid of another shape": (with_tensor(f"{Q}.weight_scale_inv", ("BF16", (3, 5), bytes(30))), "E0515",
                                    f"{Q}.weight_scale_inv"),
    "scale of another type": (with_tensor(f"{UP}.weight_scale_inv", ("I32", (2, 3), bytes(24))), "E0514",
                              f"{UP}.weight_scale_inv"),
    # hard case: E4M3FN against FNUZ; E5M2: refuse the others by name
    "expert in E5M2": (with_tensor(f"{UP}.weight", ("F8_E5M2", (192, 320), bytes(192 * 320))), "E0514", "E5M2"),
    "expert in FNUZ": (with_tensor(f"{UP}.weight", ("F8_E4M3FNUZ", (192, 320), bytes(192 * 320))), "E0514", "E4M3FNUZ"),
    "dense in E5M2": (with_tensor(f"{Q}.weight", ("F8_E5M2", (576, 320), bytes(576 * 320))), "E0514", "E5M2"),
    "dense in FNUZ": (with_tensor(f"{Q}.weight", ("F8_E5M2FNUZ", (576, 320), bytes(576 * 320))), "E0514", "E5M2FNUZ"),
}  # fmt: skip


@pytest.mark.parametrize("codec", ["fp8", "int8"])
@pytest.mark.parametrize("what", BROKEN)
def test_codes_and_scales_belong_together(tmp_path: Path, what: str, codec: str) -> None:
    """Codes without a scale, a scale without codes, types with another meaning: an error naming the tensor."""
    change, code, words = BROKEN[what]
    with pytest.raises(PagestoneError) as caught:
        plan_of(EDGE.having(change=change).write(tmp_path / "s"), codec)
    assert caught.value.code == code and words in str(caught.value) and caught.value.remedy, caught.value


# hard case: quantization_config that contradicts the tensors' dtypes: the dtype wins and the mismatch is reported
def test_contradictions_are_reported(tmp_path: Path) -> None:
    """The types decide; what the config says is reported where it says something else."""
    fp8, int8 = EDGE.config()["quantization_config"], Int8Spec().write(tmp_path / "i")
    said = json.loads((int8 / "config.json").read_bytes())["quantization_config"]
    cases = [
        (EDGE.having(quantization=said, scales="channel").write(tmp_path / "1"), "of int8, but the experts are fp8"),
        (EDGE.having(quantization={"quant_method": "awq"}, scales="channel").write(tmp_path / "2"), "of awq, but"),
        (EDGE.having(quantization={}, scales="channel").write(tmp_path / "3"), "states no quantization_config"),
        (write(tmp_path / "4", Int8Spec().tensors(), config(Int8Spec(), fp8)), "of fp8, but the experts are int8"),
    ]
    for root, words in cases:
        assert any(words in w for w in plan_of(root, "int8").warnings), (words, plan_of(root, "int8").warnings)
    plain = {f"{EXPERTS}.{e}.{p}_proj.weight": ("BF16", EDGE.shape(p), bytes(2 * 192 * 320))
             for e in range(2) for p in PARTS}  # fmt: skip
    root = write(tmp_path / "5", plain, config(EDGE, fp8))
    assert any("but the experts are plain floats" in w for w in plan_of(root, "int8").warnings)
    for known in (EDGE.write(tmp_path / "6"), int8):
        assert plan_of(known, "int8").warnings == ()


# hard case: static activation scales (input_scale, k_scale): known, listed, not an error
def test_activation_scales_are_left_out(tmp_path: Path) -> None:
    """Containers are weight-only: they are listed as excluded, and are neither copied nor unknown."""
    scalar: Raw = ("F32", (), np.float32(0.5).tobytes())
    extra = {f"{Q}.input_scale": scalar, "model.layers.0.self_attn.k_scale": scalar,
             "model.layers.0.self_attn.v_scale": scalar, f"{Q}.output_scale": scalar}  # fmt: skip
    extra |= {f"{EXPERTS}.{e}.{p}_proj.input_scale": scalar for e in range(2) for p in PARTS}
    spec = EDGE.having(change=lambda tensors: tensors | extra, scales="tensor", scale_name="weight_scale")
    assert convert(spec, tmp_path, "fp8").warnings == ()
    plan = plan_of(tmp_path / "source", "fp8")
    left = {d.tensor.name: d.rule for d in plan.dispositions if d.fate == EXCLUDED}
    assert left == dict.fromkeys(extra, "activation scale: containers are weight-only")
    assert not set(extra) & read_tensors(tmp_path / "out").keys()


# -- numbers ---------------------------------------------------------------------------------------------------------


def edited(
    name: str, edit: Callable[[np.ndarray], None], dtype: str = "u1"
) -> Callable[[dict[str, Raw]], dict[str, Raw]]:
    """A change of some elements of one tensor."""

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        kind, shape, data = tensors[name]
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        edit(array)
        return tensors | {name: (kind, shape, array.tobytes())}

    return change


def put(place: Any, value: Any) -> Callable[[np.ndarray], None]:
    def edit(array: np.ndarray) -> None:
        array[place] = value

    return edit


SCALE = f"{UP}.weight_scale_inv"
BAD_NUMBERS = {
    "NaN code": ("F32", edited(f"{UP}.weight", put((190, 300), 0xFF)), "a NaN code", 190, 300),
    "NaN scale": ("F32", edited(SCALE, put((1, 2), np.nan), "<f4"), "a scale of nan", 128, 256),
    "infinite scale": ("F32", edited(SCALE, put((1, 2), np.inf), "<f4"), "a scale of inf", 128, 256),
    "negative scale": ("F32", edited(SCALE, put((0, 1), -1.0), "<f4"), "a scale of -1.0", 0, 128),
    "NaN scale in BF16": ("BF16", edited(SCALE, put((0, 0), 0x7FC1), "<u2"), "a scale of nan", 0, 0),
    "NaN scale in F16": ("F16", edited(SCALE, put((0, 1), np.nan), "<f2"), "a scale of nan", 0, 128),
    "255 in E8M0": ("F8_E8M0", edited(SCALE, put((1, 0), 255)), "a scale of nan", 128, 0),
    "255 in U8": ("U8", edited(SCALE, put((1, 0), 255)), "a scale of nan", 128, 0),
    "zero scale over codes": ("F32", edited(SCALE, put((1, 1), 0.0), "<f4"), "a zero scale over a code", 128, 128),
    "a product beyond float32": ("F32", edited(SCALE, put((1, 1), 3e38), "<f4"), "that is Inf", 128, 128),
}


# hard case: one NaN found weeks later
@pytest.mark.parametrize("codec", ["fp8", "int8"])
@pytest.mark.parametrize("what", BAD_NUMBERS)
def test_numbers_no_container_may_hold(tmp_path: Path, what: str, codec: str) -> None:
    """The error names file, tensor, expert, row and column, whether codes would stay or not; nothing is published."""
    dtype, change, words, row, column = BAD_NUMBERS[what]
    source = EDGE.having(scale_dtype=dtype, change=change).write(tmp_path / "s")
    if "over a code" in words or "Inf" in words:  # random codes may be zero there: name the first that is not
        bits, scale = EDGE.having(scale_dtype=dtype).matrix(1, "up").bits, 3e38
        block = np.abs(e4m3(bits[128:, 128:256])) > (0 if "zero" in words else np.finfo(np.float32).max / scale)
        row, column = (128 + int(i) for i in np.argwhere(block)[0])
    with pytest.raises(DataError, match="E0702") as caught:
        prepare(source, tmp_path / "out", encodings.get(codec), workers=1)
    error = caught.value
    assert error.tensor == f"{UP}.weight" and str(source / "model.safetensors") == error.file
    assert words in error.message and f"up at row {row}, column {column} " in error.message, error.message
    assert error.message.startswith("expert 1: ")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scales", ["block", "tensor", "channel"])
def test_zero_scales_over_zeros(tmp_path: Path, scales: str, codec: str) -> None:
    """A scale of zero over codes of zero (of either sign) stands for zeros: it passes, and is counted."""

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        where = {"block": np.s_[128:, 256:], "tensor": np.s_[:, :], "channel": np.s_[5, :]}[scales]
        grid = {"block": (1, 2), "tensor": (), "channel": (5, 0)}[scales]
        both = edited(f"{UP}.weight", put(where, 0x80))(tensors)
        return edited(SCALE, put(grid, 0.0), "<f4")(both)

    spec = EDGE.having(scale_dtype="F32", scales=scales, change=change)
    outcome = convert(spec, tmp_path, codec, ("W0620",) if scales == "tensor" else ())
    assert outcome.notes["zero scales"] == 1
    assert "1 zero scales" in outcome_text(outcome, tmp_path, 1.0)
    if codec == "fp8" and scales != "channel":
        assert outcome.notes["passed through"] == 6
        zero = stored(tmp_path / "out", 1, "up", "weight_scale_inv")[1]
        assert np.count_nonzero(zero == 0) == (1 if scales == "block" else zero.size)
        assert (stored(tmp_path / "out", 1, "up", "weight")[1][128:, 256:] == 0x80).all()


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
def test_every_e8m0_scale(tmp_path: Path, dtype: str) -> None:
    """All 255 exponents are exact, the smallest (2^-127, subnormal in float32) too; none is taken for a number."""
    spec = Fp8Spec(128, 128 * 255, experts=1, dense=False, scale_dtype=dtype)
    code, byte = np.full((128 * 255, 128), 0x38, np.uint8), np.arange(255, dtype=np.uint8)

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        up = f"{EXPERTS}.0.up_proj"
        scale: Raw = (dtype, (255, 1), byte.tobytes())
        return tensors | {f"{up}.weight": ("F8_E4M3", code.shape, code.tobytes()), f"{up}.weight_scale_inv": scale}

    source = spec.having(change=change).write(tmp_path / "s")
    prepare(source, tmp_path / "out", encodings.get("fp8"), workers=1)
    scales = stored(tmp_path / "out", 0, "up", "weight_scale_inv")[1].reshape(-1)
    assert np.array_equal(scales, (2.0 ** (byte.astype(np.float64) - 127)).astype(np.float32)) and scales[0] > 0


# -- dense tensors ---------------------------------------------------------------------------------------------------


def dense_values(spec: Spec, module: str) -> np.ndarray:
    return rounded_to_bf16(spec.dense_codes(module).values)


@pytest.mark.parametrize("scales", ["block", "tensor", "tensor [1]", "channel", "channel [N]"])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_dense_codes_are_decoded(tmp_path: Path, dtype: str, scales: str) -> None:
    """For any target but fp8: code * scale in float32, rounded once to BF16; the scales are consumed, both are counted
    as decoded, and others see a plain weight that no loader may convert."""
    spec = EDGE.having(scale_dtype=dtype, scales=scales, shards=3, scale_name="weight_scale")
    convert(spec, tmp_path, "int8")
    dense = read_tensors(tmp_path / "out", "dense-*.safetensors")
    plan = plan_of(tmp_path / "source", "int8")
    fates = {d.tensor.name: d for d in plan.dispositions if d.fate == DECODED}
    assert set(fates) == {f"{m}.{s}" for m in DENSE for s in ("weight", "weight_scale")}
    assert plan_table(plan, tmp_path)["tensors"]["decoded"] == 8 and "8 decoded" in plan_text(plan, tmp_path)
    for module in DENSE:
        want = dense_values(spec, module)
        assert dense[f"{module}.weight"] == ("BF16", want.shape, want.tobytes()), module
        assert f"{module}.weight_scale" not in dense
        assert fates[f"{module}.weight"].rule == "dense codes, rounded once to BF16"
        assert fates[f"{module}.weight_scale"].rule == "scale of decoded codes, consumed"
        assert fates[f"{module}.weight_scale"].target is None


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_dense_codes_are_kept_for_fp8(tmp_path: Path, dtype: str) -> None:
    """A target of fp8 keeps dense codes with the block grid its config states; their modules are not excluded there,
    and partial blocks among them make transformers raise as those of experts do."""
    for size, whole in (("whole", False), ("edge", False)):
        spec = SIZES[size].having(scale_dtype=dtype)
        convert(spec, tmp_path / size, "fp8")
        source, out = (read_tensors(tmp_path / size / d) for d in ("source", "out"))
        stated = json.loads((tmp_path / size / "out" / "config.json").read_bytes())["quantization_config"]
        for module in DENSE:
            for suffix in ("weight", "weight_scale_inv"):
                assert out[f"{module}.{suffix}"] == source[f"{module}.{suffix}"]
            assert module not in stated["modules_to_not_convert"]
        assert "lm_head" in stated["modules_to_not_convert"]
        assert (stated["activation_scheme"] == "dynamic") is whole
        assert not rules(plan_of(tmp_path / size / "source", "fp8"), "nothing")


@pytest.mark.parametrize(
    "changes",
    [{"scales": "tensor"}, {"scales": "channel"}, {"scale_name": "weight_scale"}, {"scale_dtype": "U8"},
     {"scale_dtype": "F8_E8M0"}, {"block": (64, 128)}],
)  # fmt: skip
def test_dense_codes_others_would_misread_are_decoded(tmp_path: Path, changes: dict[str, Any]) -> None:
    """To fp8, but with scales that a reader of that config would not find, or would take for other numbers."""
    spec = WHOLE.having(**changes)
    convert(spec, tmp_path, "fp8")
    dense = read_tensors(tmp_path / "out", "dense-*.safetensors")
    stated = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
    for module in DENSE:
        want = dense_values(spec, module)
        assert dense[f"{module}.weight"] == ("BF16", want.shape, want.tobytes())
        assert module in stated["modules_to_not_convert"]
    assert not [n for n in dense if "scale" in n]


def test_damage_to_a_decoded_dense_tensor_is_found(tmp_path: Path) -> None:
    """`verify --source` decodes again: one flipped byte is found and placed."""
    convert(EDGE, tmp_path, "int8")
    (file,) = (tmp_path / "out").glob("dense-*.safetensors")
    table, start = read_table(file)
    place = start + table[f"{Q}.weight"]["data_offsets"][0] + 12345
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)
    findings = verify(tmp_path / "out", source=tmp_path / "source").findings
    (found,) = [f for f in findings if f.code == "E1028"]
    assert (found.file, found.offset) == (file.name, place) and Q in found.message


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_damage_to_codes_and_scales_is_found(tmp_path: Path, codec: str) -> None:
    """The same for codes that were passed through or encoded again, and for their scales."""
    convert(EDGE, tmp_path, codec)
    file = tmp_path / "out" / "layers-00.safetensors"
    table, start = read_table(file)
    whole = file.read_bytes()
    for name in (f"{UP}.weight", f"{UP}.{'weight_scale_inv' if codec == 'fp8' else 'weight_scale'}"):
        raw = bytearray(whole)
        raw[start + table[name]["data_offsets"][0] + 1] ^= 1
        file.write_bytes(raw)
        findings = verify(tmp_path / "out", source=tmp_path / "source").findings
        assert [f for f in findings if f.code == "E1022" and "expert 1 up_proj" in f.message], name


def test_non_finite_dense_values(tmp_path: Path) -> None:
    """Damaged codes or scales of a dense tensor are an error that names it, with row and column of the whole matrix."""
    bad = edited(f"{Q}.weight", put((570, 319), 0x7F))
    source = EDGE.having(change=bad).write(tmp_path / "s")
    with pytest.raises(DataError, match="E0702") as caught:
        prepare(source, tmp_path / "out", encodings.get("int8"), workers=1)
    assert caught.value.tensor == f"{Q}.weight" and "row 570, column 319" in caught.value.message


def test_long_dense_matrices_are_decoded_in_pieces(tmp_path: Path) -> None:
    """A matrix larger than any buffer is decoded a few rows at a time, each with its own scales."""
    spec = Fp8Spec(4096, 64, experts=1)
    convert(spec, tmp_path, "int8")
    dense = read_tensors(tmp_path / "out", "dense-*.safetensors")
    for module in DENSE:
        assert dense[f"{module}.weight"][2] == dense_values(spec, module).tobytes()


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_progress_adds_up(tmp_path: Path, codec: str) -> None:
    """Every byte read counts once: codes, scales and zero points, of experts and of dense tensors."""
    for number, spec in enumerate((EDGE, ODD.having(fused=True), Int8Spec(), Int8Spec(zero_points=True))):
        source = spec.write(tmp_path / f"s{number}")
        counted: list[int] = []
        plan = plan_of(source, codec)
        prepare(source, tmp_path / f"o{number}", encodings.get(codec), workers=2, progress=counted.append)
        assert sum(counted) == plan.bytes_in


@pytest.mark.parametrize("workers", [1, 8])
def test_workers_do_not_matter(tmp_path: Path, workers: int) -> None:
    """The same container id with any number of workers, from quantised sources too."""
    source = ODD.having(fused=True).write(tmp_path / "s")
    ids = {
        prepare(source, tmp_path / f"{n}", encodings.get("fp8"), workers=n).manifest.container_id for n in (3, workers)
    }
    assert len(ids) == 1


# -- int8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_int8_codes_stay(tmp_path: Path, dtype: str) -> None:
    """compressed-tensors int8, a scale per channel: codes stay, scales are widened to F32, row sums are new."""
    spec = Int8Spec(scale_dtype=dtype, shards=3)
    outcome = convert(spec, tmp_path, "int8")
    assert outcome.notes == {"passed through": 6} and outcome.manifest.lossless and outcome.warnings == ()
    sums = read_tensors(tmp_path / "out", "layers-00.rowsum.safetensors")
    for expert in range(2):
        for part in PARTS:
            matrix = spec.matrix(expert, part)
            assert np.array_equal(stored(tmp_path / "out", expert, part, "weight")[1], matrix.bits)
            kind, scales = stored(tmp_path / "out", expert, part, "weight_scale")
            assert kind == "F32" and np.array_equal(scales, matrix.grid)
            fused = np.frombuffer(sums["down_proj.row_sum" if part == "down" else "gate_up_proj.row_sum"][2], "<i4")
            rows = matrix.bits.shape[0]
            first = rows * (part == "up")
            assert np.array_equal(
                fused.reshape(2, -1)[expert, first : first + rows], matrix.bits.sum(1, dtype=np.int32)
            )
    rule = "qwen3_moe: routed expert, passed through"
    assert rules(plan_of(tmp_path / "source", "int8"), ".experts.") == {rule}
    dense = read_tensors(tmp_path / "out", "dense-*.safetensors")
    for module in DENSE:
        want = dense_values(spec, module)
        assert dense[f"{module}.weight"] == ("BF16", want.shape, want.tobytes())


def test_int8_with_its_lowest_code(tmp_path: Path) -> None:
    """-128 may not stand in a container: such matrices are decoded and encoded again, whatever the plan hoped."""
    spec = Int8Spec(lowest=-128)
    outcome = convert(spec, tmp_path, "int8")
    assert outcome.notes == {"requantised": 6} and not outcome.manifest.lossless
    assert_defined(spec, tmp_path / "out", "int8", lambda e, p: spec.matrix(e, p).values)
    one = Int8Spec(change=lambda tensors: tensors | {
        n: t for n, t in Int8Spec(lowest=-128).tensors().items() if n == f"{UP}.weight"
    })  # fmt: skip
    outcome = convert(one, tmp_path / "one", "int8")
    assert outcome.notes == {"passed through": 5, "requantised": 1} and not outcome.manifest.lossless


@pytest.mark.parametrize("codec", CODECS)
def test_int8_with_zero_points(tmp_path: Path, codec: str) -> None:
    """(code - zero point) * scale, in experts and dense tensors."""
    spec = Int8Spec(zero_points=True, hidden=192, intermediate=128)
    outcome = convert(spec, tmp_path, codec)
    assert outcome.notes == {"requantised": 6} and not outcome.manifest.lossless

    def values(codes: Codes) -> np.ndarray:
        return (codes.bits.astype(np.float32) - spec.zeros(codes.bits.shape[0])) * codes.spread

    assert_defined(spec, tmp_path / "out", codec, lambda e, p: values(spec.matrix(e, p)))
    dense = read_tensors(tmp_path / "out", "dense-*.safetensors")
    for module in DENSE:
        assert dense[f"{module}.weight"][2] == rounded_to_bf16(values(spec.dense_codes(module))).tobytes()
    assert not [n for n in dense if "zero_point" in n]
    if codec == "int8":
        rule = "qwen3_moe: routed expert, requantised (int8, a scale per channel: zero points)"
        assert rules(plan_of(tmp_path / "source", codec), ".experts.") == {rule}


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_int8_in_fused_tensors(tmp_path: Path, codec: str, zero_points: bool) -> None:
    """Scales and zero points of every row go with their rows: the same layer as from a tensor for each matrix."""
    spec = Int8Spec(zero_points=zero_points, hidden=192, intermediate=128)
    digests = []
    for name, made in (("split", spec), ("fused", spec.having(change=fused_tensors))):
        outcome = prepare(made.write(tmp_path / name), tmp_path / f"{name}-{codec}", encodings.get(codec), workers=1)
        digests.append(outcome.manifest.files["layers-00.safetensors"].xxh3)
        assert outcome.notes == {"passed through" if codec == "int8" and not zero_points else "requantised": 6}
    assert digests[0] == digests[1]


@pytest.mark.parametrize("shape", [(), (1,), (3, 2, 3), (1, 2, 3)])
def test_a_fused_scale_without_something_for_each_expert(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A scalar has no first axis to take apart; taken for every expert's it would be other bytes for each."""

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        (name,) = (n for n in tensors if n.startswith(EXPERTS) and "down_proj" in n and "scale" in n)
        return tensors | {name: ("F32", shape, np.ones(shape, "<f4").tobytes())}

    root = EDGE.having(fused=True, change=change).write(tmp_path / "s")
    with pytest.raises(DataError, match="something for each expert") as caught:
        planned(root, "int8")
    assert caught.value.code == "E0515" and "down_proj" in str(caught.value.tensor)


def fused_tensors(tensors: dict[str, Raw]) -> dict[str, Raw]:
    """The experts of the first layer in one tensor for each role of gate and up, and of down."""
    found = {n: t for n, t in tensors.items() if not n.startswith(EXPERTS)}
    for place, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for tail in ("weight", "weight_scale", "weight_zero_point"):
            own = [[tensors[f"{EXPERTS}.{e}.{part}.{tail}"] for part in parts] for e in range(2)
                   if f"{EXPERTS}.{e}.{parts[0]}.{tail}" in tensors]  # fmt: skip
            if own:
                rows, *rest = own[0][0][1]
                raw = b"".join(tensor[2] for expert in own for tensor in expert)
                shape = (2, rows * len(parts), *rest)
                found[f"{EXPERTS}.{place}{tail.removeprefix('weight')}"] = own[0][0][0], shape, raw
    return found


@pytest.mark.parametrize("codec", [c for c in CODECS if c != "int8"])
def test_int8_to_other_codecs(tmp_path: Path, codec: str) -> None:
    """Any other codec stores its definition of code * scale."""
    spec = Int8Spec(scale_dtype="F32")
    outcome = convert(spec, tmp_path, codec)
    assert outcome.notes == {"requantised": 6}
    assert outcome.manifest.parameters.get("scale_dtype", "BF16") == "BF16"
    assert_defined(spec, tmp_path / "out", codec, lambda e, p: spec.matrix(e, p).values)


@pytest.mark.parametrize("scale", [0.0, 1e-40])
def test_int8_scales_no_container_may_hold(tmp_path: Path, scale: float) -> None:
    """A zero scale over zero codes, or a subnormal one: the row is encoded again, with a scale that may stand there."""

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        return edited(f"{UP}.weight", put(7, 0), "i1")(edited(f"{UP}.weight_scale", put(7, scale), "<f4")(tensors))

    outcome = convert(Int8Spec(scale_dtype="F32", change=change), tmp_path, "int8")
    assert outcome.notes == {"passed through": 5, "requantised": 1} | ({"zero scales": 1} if scale == 0 else {})
    assert stored(tmp_path / "out", 1, "up", "weight_scale")[1][7, 0] == 1


@pytest.mark.parametrize("shape", [(128, 3), (64, 1), (127, 1)])
def test_int8_in_groups_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    """A scale per group says nothing without the group's size: refused, naming the scale."""
    scale: Raw = ("F32", shape, np.ones(shape, "<f4").tobytes())
    source = Int8Spec(change=with_tensor(f"{UP}.weight_scale", scale)).write(tmp_path / "s")
    with pytest.raises(DataError, match="E0515") as caught:
        plan_of(source, "int8")
    assert caught.value.tensor == f"{UP}.weight_scale"


# -- implementations that are not ours -------------------------------------------------------------------------------


def test_made_by_compressed_tensors(
    oracle: Callable[[str], ModuleType], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Codes and scales from compressed-tensors' own quantisation (it uses -128): what stays and what is decoded gives
    its own dequantised values."""
    torch, _ = oracle("torch"), oracle("compressed_tensors")
    oracle("transformers")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy=QuantizationStrategy.CHANNEL)
    source = built("qwen3_moe", "square", tmp_path_factory)
    tensors: dict[str, Raw] = {}
    theirs: dict[str, Any] = {}
    for name, (dtype, shape, data) in read_tensors(source.root).items():
        tensors[name] = dtype, shape, data
        if is_expert(name) or ".self_attn.q_proj." in name:
            weight = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape).float()
            weight = weight.abs() if ".up_proj." in name else weight  # without negative weights there is no -128
            scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
            codes = quantize(weight, scale, zero, args, dtype=torch.int8)
            tensors[name] = "I8", shape, codes.numpy().tobytes()
            tensors[f"{name}_scale"] = "F32", (shape[0], 1), scale.float().numpy().tobytes()
            theirs[name] = dequantize(codes, scale.float(), args=args, dtype=torch.float32).numpy()
    root = write(tmp_path / "s", tensors, json.loads((source.root / "config.json").read_bytes()))
    outcome = prepare(root, tmp_path / "out", encodings.get("int8"), workers=1)
    assert outcome.notes == {"passed through": 3, "requantised": 6}
    out, codec = read_tensors(tmp_path / "out"), encodings.get("int8")
    for name, values in theirs.items():
        if not is_expert(name):
            assert out[name][2] == rounded_to_bf16(values).tobytes()
            continue
        codes, scales = (
            np.frombuffer(out[n][2], d).reshape(out[n][1]) for n, d in ((name, "i1"), (f"{name}_scale", "<f4"))
        )
        kept = codes.tobytes() == tensors[name][2]
        ours = codec.values({"codes": codes, "scales": scales}, *codes.shape)
        assert np.array_equal(ours, values) if kept else np.abs(ours - values).max() <= scales.max() / 2
        assert kept or b"\x80" in tensors[name][2]


def fp8_release(root: Path, factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Raw]]:
    """A model transformers built, its matrices in FP8 with BF16 block scales, as releases are."""
    known = MODELS["qwen3_moe"]
    wide = replace(known, extra=dict(known.extra) | {"head_dim": 64, "intermediate_size": 256})  # 128 divides all
    source, codec = build(wide, FAMILY_SIZES["square"], factory.mktemp("fp8") / "source"), encodings.get("fp8")
    tensors: dict[str, Raw] = {}
    for name, (dtype, shape, data) in read_tensors(source.root).items():
        tensors[name] = dtype, shape, data
        if len(shape) == 2 and (is_expert(name) or "_proj." in name) and all(s % 128 == 0 for s in shape):
            out = codec.allocate(*shape)
            codec.encode_definition((np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape), out)
            tensors[name] = "F8_E4M3", shape, out["codes"].tobytes()
            tensors[f"{name}_scale_inv"] = "BF16", out["scales"].shape, out["scales"].tobytes()
    kept = [
        n.removesuffix(".weight") for n, t in tensors.items() if t[0] == "BF16" and len(t[1]) == 2 and "_inv" not in n
    ]
    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
              "modules_to_not_convert": kept}  # fmt: skip
    table = json.loads((source.root / "config.json").read_bytes()) | {"quantization_config": stated}
    return write(root, tensors, table, shards=2), tensors


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_as_transformers_reads_the_source(
    oracle: Callable[[str], ModuleType], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, codec: str
) -> None:
    """transformers' own dequantisation of an FP8 checkpoint on the CPU: our decoded dense tensors are equal bit for
    bit, and so are the experts of a bf16 container; of an fp8 container it loads all of them."""
    torch, transformers = oracle("torch"), oracle("transformers")
    oracle("accelerate")
    transformers.logging.set_verbosity_error()
    root, tensors = fp8_release(tmp_path / "s", tmp_path_factory)
    assert sum(t[0] == "F8_E4M3" for t in tensors.values()) > 9
    load = getattr(transformers, MODELS["qwen3_moe"].classes[0]).from_pretrained
    theirs = load(root, dtype=torch.bfloat16).state_dict()
    outcome = prepare(root, tmp_path / "out", encodings.get(codec), workers=1)
    assert outcome.manifest.lossless is (codec == "fp8")
    if codec != "int8":
        ours = load(tmp_path / "out", dtype=torch.bfloat16).state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], v) for k, v in theirs.items())
    out = read_tensors(tmp_path / "out", "dense-*.safetensors")
    decoded = [n for n, t in tensors.items() if t[0] == "F8_E4M3" and not is_expert(n)]
    assert decoded
    for name in decoded if codec != "fp8" else []:
        assert out[name][2] == theirs[name].view(torch.uint16).numpy().tobytes(), name


def test_merging_with_write_tensors(tmp_path: Path) -> None:
    """The kit's writer is right: the safetensors library reads the same bytes."""
    from safetensors import safe_open

    path = write_tensors(tmp_path / "x.safetensors", EDGE.tensors())
    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(EDGE.tensors())
