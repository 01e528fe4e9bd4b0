"""fp8: the definition against values computed by hand and against exact rounding over the table of all numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.oracles import oracle

from pagestone.formats import encodings, native
from pagestone.formats.dtypes import bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings import ConfigFacts
from pagestone.formats.encodings.fp8 import VALUES, Fp8Source, to_e4m3
from pagestone.formats.errors import NonFiniteError, RequestError

FP8 = encodings.get("fp8")
F32_SCALES = encodings.get("fp8", {"scale_dtype": "F32"})
TINY = np.finfo(np.float32).smallest_normal


@pytest.fixture(autouse=True)
def definition_only():
    with native.forced("numpy"):
        yield


def encode(weight, codec=FP8):
    weight = np.asarray(weight, np.float32)
    out = codec.allocate(*weight.shape)
    return out, codec.encode(weight, "F32", out)


def exact_values() -> list[Fraction]:
    """The 127 magnitudes of E4M3FN in order, from the format's text: sign, 4 bits exponent (bias 7), 3 mantissa."""
    table = [Fraction(mantissa, 8 * 64) for mantissa in range(8)]
    for exponent in range(1, 16):
        table += [Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) for mantissa in range(8)]
    return table[:127]


def exact_code(value: float) -> int:
    """Nearest of the table, ties to the even code, clamped; in exact arithmetic."""
    table = exact_values()
    magnitude = min(abs(Fraction(value)), Fraction(448))
    code = min(range(127), key=lambda c: (abs(table[c] - magnitude), c & 1))
    return code | (0x80 if np.signbit(np.float32(value)) else 0)


def test_values_of_all_codes():
    table = exact_values()
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert np.isnan(VALUES[code])
        else:
            assert abs(Fraction(float(VALUES[code]))) == table[code & 0x7F]
            assert bool(np.signbit(VALUES[code])) == bool(code & 0x80)


def test_every_number_keeps_its_code():
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    assert np.array_equal(to_e4m3(VALUES[codes]), codes)


def midpoints_and_neighbours() -> np.ndarray:
    table = np.array([float(v) for v in exact_values()])
    middle = ((table[:-1] + table[1:]) / 2).astype(np.float32)  # exact: five bits
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    points = np.concatenate([middle, up, down, table.astype(np.float32)])
    return np.concatenate([points, -points])


def test_midpoints_and_their_neighbours_round_once():
    points = midpoints_and_neighbours()
    assert to_e4m3(points).tolist() == [exact_code(float(p)) for p in points]


@pytest.mark.parametrize("value", [448, 463.99, 464, 465, 480, 1e30, 2.0**-10, 2.0**-10 * 1.001, 1e-45, 0.0, -0.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_ends_of_the_range(value, sign):
    x = np.float32(value) * np.float32(sign)
    assert int(to_e4m3(np.array([x]))[0]) == exact_code(float(x))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_float_rounds_exactly(value):
    assert int(to_e4m3(np.array([value], np.float32))[0]) == exact_code(value)


def test_golden():
    # One block, amax 448, s = 1: ties to even among normals (17 -> 16, 19 -> 20) and subnormals (2^-10 -> 0).
    weight = [[448.0, 17.0, 19.0, -0.0], [2.0**-10, 3 * 2.0**-10, -(2.0**-9), 0.0], [2.0**-6, 1.0, 1.0625, 1.1875]]
    out, cost = encode(weight)
    assert out["scales"].tolist() == [[0x3F80]]
    assert out["codes"].tolist() == [[0x7E, 0x58, 0x5A, 0x80], [0x00, 0x02, 0x81, 0x00], [0x08, 0x38, 0x38, 0x3A]]
    decoded = FP8.values(out, 3, 4)
    assert decoded.tolist() == [[448, 16, 20, 0], [0, 2.0**-8, -(2.0**-9), 0], [2.0**-6, 1, 1, 1.25]]
    assert np.signbit(decoded[0, 3])
    assert cost.squared_error == 1 + 1 + 2.0**-20 + 2.0**-20 + 2 * 0.0625**2
    assert not list(FP8.problems(out, 3, 4))


def test_zero_in_a_block_of_values_stays_zero():
    out, _ = encode([[0.0, -0.0, 1.0]])
    assert out["codes"].tolist() == [[0x00, 0x80, 0x7E]]


def test_blocks_of_zeros():
    out, cost = encode([[0.0, -0.0]])
    assert (out["scales"].tolist(), out["codes"].tolist()) == ([[0x3F80]], [[0x00, 0x80]])
    assert (cost.squared_error, cost.squared_norm) == (0.0, 0.0)


def test_scale_is_rounded_to_its_stored_type_before_dividing():
    weight = np.array([[1.0, 0.3, -0.77]], np.float32)
    out, _ = encode(weight)
    scale = bf16_to_f32(out["scales"])
    assert out["scales"][0, 0] == f32_to_bf16(np.float32([1]) / np.float32(448))[0]
    assert out["codes"][0].tolist() == [exact_code(float(q)) for q in (weight / scale)[0]]
    out32, _ = encode(weight, F32_SCALES)
    assert out32["scales"].dtype == np.float32
    assert out32["scales"][0, 0] == np.float32(1) / np.float32(448) != scale[0, 0]


@pytest.mark.parametrize("bits", [0x0001, 0x0080, 0x0100, 0x0200, 0x8200])
@pytest.mark.parametrize("codec", [FP8, F32_SCALES])
def test_tiny_blocks_get_the_smallest_normal_scale(bits, codec):
    source = np.array([[bits, 0]], np.uint16)
    out = codec.allocate(1, 2)
    codec.encode(source, "BF16", out)
    scale = np.float32(bf16_to_f32(out["scales"])[0, 0] if codec is FP8 else out["scales"][0, 0])
    assert scale == TINY
    assert out["codes"][0, 0] == exact_code(float(bf16_to_f32(source)[0, 0] / scale))
    assert not list(codec.problems(out, 1, 2))


def test_blocks_are_independent_and_edges_partial():
    weight = np.zeros((130, 257), np.float32)
    weight[:128, :128], weight[128:, :128], weight[:128, 256:], weight[129, 256] = 448, 4480, -44.8, 0.448
    out, _ = encode(weight)
    assert out["scales"].shape == (2, 3)
    expected = np.float32([[448, 1, 44.8], [4480, 1, 0.448]]) / np.float32(448)
    expected[:, 1] = 1
    assert np.array_equal(out["scales"], f32_to_bf16(expected))
    assert set(np.unique(out["codes"][:128, 256])) == {0xFE}
    assert out["codes"][128, 256] == 0


def test_tensors_and_parameters():
    codes, scales = FP8.roles(129, 128)
    assert (codes.name, codes.suffix, codes.dtype, codes.shape) == ("codes", "weight", "F8_E4M3", (129, 128))
    assert (scales.name, scales.suffix, scales.dtype, scales.shape) == ("scales", "weight_scale_inv", "BF16", (2, 1))
    assert F32_SCALES.roles(1, 1)[1].dtype == "F32"
    assert len(FP8.roles(4, 4)) == 2
    assert FP8.parameters == {"block": 128, "scale_dtype": "BF16"}
    assert encodings.get("fp8", F32_SCALES.parameters) == F32_SCALES
    for wrong in ({"block": 64}, {"block": "128"}, {"scale_dtype": "F16"}, {"group": 64}):
        with pytest.raises(RequestError):
            encodings.get("fp8", wrong)


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "-Inf")])
def test_non_finite_is_counted_and_named(value, text):
    weight = np.ones((130, 140))
    weight[3, 130] = weight[129, 0] = value
    with pytest.raises(NonFiniteError) as caught:
        encode(weight)
    assert (caught.value.count, caught.value.row, caught.value.column, caught.value.value) == (2, 3, 130, text)


@pytest.mark.parametrize("codec", [FP8, F32_SCALES])
def test_the_largest_float_does_not_overflow(codec):
    most = np.finfo(np.float32).max
    for value in np.float32([most, np.nextafter(most, np.float32(0)), 3.38e38, 511 * 2.0**119, 510.5 * 2.0**119]):
        out, cost = encode([[value, -value]], codec)
        assert out["codes"].tolist() == [[0x7E, 0xFE]]
        assert np.isfinite(codec.values(out, 1, 2)).all()
        assert np.isfinite(cost.squared_error)


def test_problems_name_count_row_and_column():
    out, _ = encode(np.ones((130, 129)))
    out["codes"][1, 2], out["codes"][129, 0] = 0x7F, 0xFF
    out["scales"][:] = f32_to_bf16(np.float32([[1, np.nan], [-1, 0]]))
    forbidden, scales = map(str, FP8.problems(out, 130, 129))
    assert "found 2 of 0x7F or 0xFF (NaN), the first at row 1, column 2" in forbidden
    assert "found 3 that are not, the first nan at row 0, column 1 of the grid" in scales


def test_zero_scale_is_a_problem_only_over_codes_that_are_not_zero():
    out, _ = encode([[0.0, -0.0]])
    out["scales"][:] = 0
    assert not list(FP8.problems(out, 1, 2))
    out["codes"][0, 1] = 0x01
    assert len(list(FP8.problems(out, 1, 2))) == 1


def test_quantization_config():
    facts = ConfigFacts(("lm_head", "model.layers.0.mlp.gate"), ((256, 128), (128, 256)))
    assert FP8.quantization_config(facts) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }


@pytest.mark.parametrize("shape", [(160, 128), (128, 192)])
def test_transformers_refuses_partial_blocks(shape):
    config = oracle("transformers.utils.quantization_config").FineGrainedFP8Config
    whole = ConfigFacts((), ((128, 256),))
    assert config.from_dict(FP8.quantization_config(whole)).weight_block_size == [128, 128]
    with pytest.raises(ValueError, match="not supported"):
        config.from_dict(FP8.quantization_config(ConfigFacts((), (*whole.shapes, shape))))


# -- as checkpoints have it --------------------------------------------------------------------------------------------


def as_source(codes, scales, block, **parameters) -> tuple[Fp8Source, dict[str, np.ndarray]]:
    return Fp8Source(block, **parameters), {"codes": np.array(codes, np.uint8), "scales": np.array(scales, np.float32)}


def test_products_beyond_float32_are_a_problem():
    """Of a source, and of a container whose scales were passed through from one."""
    codes = np.full((2, 3), 0x7E)  # 448
    codes[0, 0] = 0
    source, stored = as_source(codes, [[1e36]], (128, 128))
    (problem,) = source.problems(stored, 2, 3)
    assert (problem.count, problem.row, problem.column, problem.role) == (5, 0, 1, "codes")
    with pytest.raises(NonFiniteError, match="Inf"):
        source.require_sound(stored, 2, 3)
    assert [str(p) for p in F32_SCALES.problems(stored, 2, 3)] == [str(problem)]
    stored["scales"][:] = 7e35
    assert not list(source.problems(stored, 2, 3)) and np.isfinite(source.values(stored, 2, 3)).all()
    stored["codes"][:] = 1  # the largest code decides, not the largest there could be
    stored["scales"][:] = 1e38
    assert not list(source.problems(stored, 2, 3))


def test_a_problem_names_the_first_element_of_the_matrix():
    """A grid that begins above the matrix: row and column are the matrix's, not the grid's."""
    codes = np.full((5, 6), 0x38)
    for scales, value in (([[1, 1], [1, np.nan]], "nan"), ([[1, 1], [1, -2]], "-2.0"), ([[1, 1], [1, np.inf]], "inf")):
        source, stored = as_source(codes, scales, (4, 4), first_row=1)
        (problem,) = source.problems(stored, 5, 6)
        assert (problem.value, problem.row, problem.column, problem.count) == (f"a scale of {value}", 3, 4, 4)
    source, stored = as_source(codes, [[1, 0], [0, 1]], (4, 4), first_row=1)
    stored["codes"][3:, :4] = 0x80
    (problem,) = source.problems(stored, 5, 6)
    assert (problem.value, problem.row, problem.column, problem.count) == (
        "a zero scale over a code that is not zero", 0, 4, 6)  # fmt: skip
    assert source.zero_scales(stored) == 2


@pytest.mark.parametrize(("block", "first_row"), [((4, 4), 0), ((4, 4), 3), ((1, 8), 0), ((64, 64), 0), ((64, 64), 9)])
def test_windows_are_rows_of_the_whole(block, first_row):
    """Every window of a matrix, by values: also one that begins inside a block, and windows of windows."""
    rng = np.random.default_rng(1)
    rows, columns = 11, 8
    whole = Fp8Source(block, first_row=first_row)
    shapes = {role.name: role.shape for role in whole.roles(rows, columns)}
    stored = {"codes": rng.integers(0, 0x7E, shapes["codes"]).astype(np.uint8),
              "scales": rng.random(shapes["scales"]).astype(np.float32) + 1}  # fmt: skip
    values = whole.values(stored, rows, columns)
    for first in range(rows):
        for count in range(1, rows - first + 1):
            part, cut = whole.window(rows, columns, first, count)
            own = {role: array[cut[role]] for role, array in stored.items()}
            assert {role: array.shape for role, array in own.items()} == {
                role.name: role.shape for role in part.roles(count, columns)
            }
            assert np.array_equal(part.values(own, count, columns), values[first : first + count])
