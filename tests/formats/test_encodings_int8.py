"""int8: the definition against values computed by hand and in exact arithmetic."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.oracles import oracle

from pagestone.formats import encodings, native, stats
from pagestone.formats.dtypes import f32_to_bf16
from pagestone.formats.encodings import ConfigFacts
from pagestone.formats.errors import NonFiniteError, RequestError

INT8 = encodings.get("int8")
TINY = np.finfo(np.float32).smallest_normal


@pytest.fixture(autouse=True)
def definition_only():
    with native.forced("numpy"):
        yield


def encode(weight):
    weight = np.asarray(weight, np.float32)
    out = INT8.allocate(*weight.shape)
    return out, INT8.encode(weight, "F32", out)


def test_golden():
    # Row 0: s = 1, ties to even. Row 1: the largest magnitude is negative, s = 0.5. Row 2: zeros, and a minus zero.
    weight = [[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [-63.5, 1.0, 0.25, 0.75, -0.25, 0.0], [0.0, -0.0, 0, 0, 0, 0]]
    out, cost = encode(weight)
    assert out["codes"].tolist() == [[127, 0, 2, 2, 0, -2], [-127, 2, 0, 2, 0, 0], [0, 0, 0, 0, 0, 0]]
    assert out["scales"].tolist() == [[1.0], [0.5], [1.0]]
    assert out["row_sums"].tolist() == [129, -123, 0]
    assert cost.squared_error == 5 * 0.25 + 3 * 0.0625
    assert cost.squared_norm == 16129 + 0.25 + 2.25 + 6.25 + 0.25 + 2.25 + 4032.25 + 1 + 0.0625 + 0.5625 + 0.0625
    assert INT8.values(out, 3, 6).tolist() == [[127, 0, 2, 2, 0, -2], [-63.5, 1, 0, 1, 0, 0], [0] * 6]
    assert not list(INT8.problems(out, 3, 6))


def test_scale_and_quotient_are_float32_not_bfloat16():
    out, _ = encode([[1.0, 0.3, -0.7]])
    assert out["scales"][0, 0] == np.float32(1) / np.float32(127)
    assert out["codes"].tolist() == [[127, 38, -89]]


def test_tensors_and_sidecar():
    codes, scales, sums = INT8.roles(3, 5)
    assert (codes.name, codes.suffix, codes.dtype, codes.shape) == ("codes", "weight", "I8", (3, 5))
    assert (scales.name, scales.suffix, scales.dtype, scales.shape) == ("scales", "weight_scale", "F32", (3, 1))
    assert (sums.name, sums.suffix, sums.dtype, sums.shape) == ("row_sums", "row_sum", "I32", (3,))
    assert [r.place for r in (codes, scales, sums)] == ["record", "record", "beside"]
    assert INT8.parameters == {}
    with pytest.raises(RequestError):
        encodings.get("int8", {"block": 128})


@pytest.mark.parametrize("bits", [0x0001, 0x0080, 0x0100, 0x0200, 0x8100])
def test_tiny_rows_get_the_smallest_normal_scale(bits):
    source = np.array([[bits, 0]], np.uint16)
    out = INT8.allocate(1, 2)
    INT8.encode(source, "BF16", out)
    assert out["scales"][0, 0] == TINY
    value = Fraction(float(np.array([bits << 16], np.uint32).view(np.float32)[0]))
    assert out["codes"][0, 0] == round(value / Fraction(float(TINY)))  # Python rounds half to even
    assert not list(INT8.problems(out, 1, 2))


def test_scale_just_above_the_smallest_normal_is_kept():
    out, _ = encode([[127 * float(TINY) * 1.5]])
    assert out["scales"][0, 0] == np.float32(TINY * 1.5)
    assert out["codes"][0, 0] == 127


@given(st.lists(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127), min_size=1))
def test_codes_are_the_nearest_of_the_rounded_quotient(row):
    out, _ = encode([row])
    scale = out["scales"][0, 0]
    for w, code in zip(np.array(row, np.float32), out["codes"][0].tolist(), strict=True):
        assert code == max(-127, min(127, round(Fraction(float(w / scale)))))
    assert out["row_sums"][0] == out["codes"].astype(int).sum()


def test_row_sums_need_32_bits():
    out, _ = encode(np.ones((1, 7168)))
    assert out["row_sums"].tolist() == [910336]


def test_encoding_without_row_sums():
    out = INT8.allocate(1, 2)
    del out["row_sums"]
    INT8.encode(np.ones((1, 2), np.float32), "F32", out)
    assert out["codes"].tolist() == [[127, 127]]


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "-Inf")])
def test_non_finite_is_counted_and_named(value, text):
    weight = np.ones((3, 4))
    weight[1, 2] = weight[2, 0] = weight[2, 3] = value
    with pytest.raises(NonFiniteError) as caught:
        encode(weight)
    assert (caught.value.count, caught.value.row, caught.value.column, caught.value.value) == (3, 1, 2, text)


def test_a_decoded_overflow_is_refused_too():
    weight = np.ones((2, 3), np.float32)
    weight[1, 1] = np.finfo(np.float32).max  # amax / 127 rounds up, and 127 times that is beyond float32
    with pytest.raises(NonFiniteError, match=r"1 non-finite value\(s\), first 3.4028235e\+38 at row 1, column 1"):
        encode(weight)


def test_problems_name_count_row_and_column():
    out, _ = encode(np.arange(12).reshape(3, 4))
    out["codes"][1, 2] = out["codes"][2, 3] = -128
    out["scales"][:, 0] = [np.nan, 0.0, TINY / 2]
    out["row_sums"][0] += 1
    forbidden, scales, sums = map(str, INT8.problems(out, 3, 4))
    assert "found 2 of -128, the first at row 1, column 2" in forbidden
    assert "found 3 that are not, the first nan at row 0" in scales
    right = out["codes"][0].astype(int).sum()
    assert "found 3 that are not" in sums and f"the first {right + 1} instead of {right} at row 0" in sums
    for scale in (np.inf, -1.0):
        out, _ = encode([[1.0]])
        out["scales"][0, 0] = scale
        assert len(list(INT8.problems(out, 1, 1))) == 1


def test_statistics_follow_lanes_and_row_order():
    values = np.random.default_rng(0).standard_normal((3, 37))
    total = 0.0
    for row in values:
        lanes = [0.0] * 16
        for i, value in enumerate(row):
            lanes[i % 16] += float(value) * float(value)
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[k] + lanes[k + half] for k in range(half)]
        total += lanes[0]
    assert stats.sum_of_squares(values) == total


def targets(part_names):
    config = INT8.quantization_config(ConfigFacts((), ((32, 48),), part_names))
    ((kind, pattern),) = [t.split(":", 1) for t in config["config_groups"]["group_0"]["targets"]]
    assert kind == "re"
    return pattern


def test_quantization_config_names_experts_and_nothing_else():
    pattern = targets(("gate_proj", "up_proj", "down_proj"))
    assert pattern == r".*experts\.\d+\.(gate|up|down)_proj$"
    assert re.match(pattern, "model.layers.3.mlp.experts.17.gate_proj")
    for other in ("mlp.shared_expert.gate_proj", "mlp.gate", "mlp.experts.1.gate_proj.x", "mlp.gate_proj"):
        assert not re.match(pattern, other)
    assert targets(("w1", "w3", "w2")) == r".*experts\.\d+\.(w1|w3|w2)$"


def test_compressed_tensors_understands_the_config_and_the_values():
    torch = oracle("torch")
    quantization = oracle("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    config = INT8.quantization_config(ConfigFacts((), ((32, 48),)))
    scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert (scheme.weights.num_bits, scheme.weights.strategy, scheme.weights.symmetric) == (8, "channel", True)
    weight = np.random.default_rng(1).standard_normal((32, 48)).astype(np.float32)
    out = INT8.allocate(32, 48)
    INT8.encode(f32_to_bf16(weight), "BF16", out)
    theirs = dequantize(torch.from_numpy(out["codes"]), torch.from_numpy(out["scales"]), args=scheme.weights)
    assert np.array_equal(theirs.numpy(), INT8.values(out, 32, 48))
