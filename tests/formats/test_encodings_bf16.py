"""bf16: bytes as they are, or one rounding; against exact arithmetic."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagestone.formats import encodings, native
from pagestone.formats.dtypes import bf16_to_f32
from pagestone.formats.encodings import ConfigFacts
from pagestone.formats.encodings.floats import F16
from pagestone.formats.errors import NonFiniteError, RequestError

BF16 = encodings.get("bf16")
SPEC = Path(__file__).resolve().parents[2] / "specs" / "codecs" / "bf16.md"


@pytest.fixture(autouse=True)
def definition_only():
    with native.forced("numpy"):
        yield


def encode(weight, dtype="F32"):
    weight = np.asarray(weight, {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype])
    out = BF16.allocate(*weight.shape)
    return out, BF16.encode(weight, dtype, out)


def exact_code(value: float) -> int:
    """Nearest BF16, ties to the even code, in exact arithmetic; 0x7F80 is what rounds to Inf."""
    magnitude = abs(Fraction(value))
    low, high = 0, 0x7F80
    while high - low > 1:  # the largest code whose value is not above
        middle = (low + high) // 2
        at_most = Fraction(float(bf16_to_f32(np.array([middle], np.uint16))[0])) <= magnitude
        low, high = (middle, high) if at_most else (low, middle)
    below, above = (Fraction(float(v)) for v in bf16_to_f32(np.array([low, min(low + 1, 0x7F7F)], np.uint16)))
    if low == 0x7F7F:
        above = Fraction(2) ** 128
    rest, other = magnitude - below, above - magnitude
    code = low if rest < other or (rest == other and low % 2 == 0) else low + 1
    return code | (0x8000 if np.signbit(np.float32(value)) else 0)


def test_every_finite_bfloat16_keeps_its_bits():
    every = np.arange(65536).astype(np.uint16)
    finite = every[(every & 0x7FFF) < 0x7F80].reshape(2, -1)
    out, cost = encode(finite, "BF16")
    assert out["codes"].tobytes() == finite.tobytes()
    assert cost.squared_error == 0
    assert BF16.values(out, *finite.shape).tobytes() == bf16_to_f32(finite).tobytes()
    assert not list(BF16.problems(out, *finite.shape))


def test_golden():
    # Ties between neighbours 2^-7 apart go to the even one; beside the tie to the nearer one; -0.0 stays.
    tie, up = np.float32(1 + 2.0**-8), np.float32(1 + 3 * 2.0**-8)
    row = [1.0, tie, np.nextafter(tie, np.float32(2)), up, -tie, -0.0, 0.0, 2.0**-133, 2.0**-134]
    out, cost = encode([row])
    assert out["codes"].tolist() == [[0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xBF80, 0x8000, 0x0000, 0x0001, 0x0000]]
    just_above = 2.0**-8 - 2.0**-23
    assert cost.squared_error == 3 * 2.0**-16 + just_above**2 + 2.0**-268


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_float_rounds_exactly(value):
    code = exact_code(value)
    if code & 0x7FFF == 0x7F80:
        with pytest.raises(NonFiniteError):
            encode([[value]])
    else:
        assert encode([[value]])[0]["codes"][0, 0] == code


def test_half_floats_round_once():
    every = np.arange(65536).astype(np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    out, _ = encode(finite.reshape(1, -1), "F16")
    assert out["codes"][0, ::997].tolist() == [exact_code(float(v)) for v in finite[::997]]


def test_overflow_is_refused_and_names_the_source_value():
    edge = np.array(0x7F7F8000, np.uint32).view(np.float32)[()]  # the tie between the largest and Inf
    below = np.nextafter(edge, np.float32(0))
    out, _ = encode([[below, -below]])
    assert out["codes"].tolist() == [[0x7F7F, 0xFF7F]]
    with pytest.raises(NonFiniteError) as caught:
        encode([[1.0, 1.0], [1.0, -edge]])
    assert (caught.value.count, caught.value.row, caught.value.column) == (1, 1, 1)
    assert caught.value.value == str(-edge)


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "-Inf")])
def test_non_finite_is_counted_and_named(value, text):
    weight = np.ones((3, 4))
    weight[1, 2] = weight[2, 0] = weight[2, 3] = value
    with pytest.raises(NonFiniteError) as caught:
        encode(weight)
    assert (caught.value.count, caught.value.row, caught.value.column, caught.value.value) == (3, 1, 2, text)


def test_problems_name_count_row_and_column():
    out, _ = encode(np.ones((3, 4)))
    out["codes"][1, 2], out["codes"][2, 3] = 0x7FC0, 0xFF80
    (problem,) = map(str, BF16.problems(out, 3, 4))
    assert "found 2 of Inf or NaN, the first 0x7FC0 at row 1, column 2" in problem


def test_tensors_parameters_and_config():
    (codes,) = BF16.roles(3, 5)
    assert (codes.name, codes.suffix, codes.dtype, codes.shape) == ("codes", "weight", "BF16", (3, 5))
    assert len(BF16.roles(3, 5)) == 1
    assert BF16.parameters == {}
    assert BF16.takes(BF16, 3, 5) is None and BF16.takes(F16(), 3, 5) and BF16.takes(encodings.get("int8"), 3, 5)
    assert BF16.quantization_config(ConfigFacts((), ((3, 5),))) is None
    with pytest.raises(RequestError):
        encodings.get("bf16", {"group_size": 64})


def examples():
    text = SPEC.read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- encode: bf16 {} -->\n((?:\|.*\n)+)", text)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize(("weights", "codes", "decoded"), examples())
def test_worked_examples(weights, codes, decoded):
    weight = np.array([[int(w, 16) for w in weights.split()]], np.uint32).view(np.float32)
    if decoded == "refused":
        with pytest.raises(NonFiniteError):
            encode(weight)
        return
    out, _ = encode(weight)
    assert out["codes"].tolist() == [[int(w, 16) for w in codes.split()]]
    assert BF16.values(out, *weight.shape).view(np.uint32).tolist() == [[int(w, 16) for w in decoded.split()]]
