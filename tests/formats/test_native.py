"""The choice between the definition and the native kernels."""

from __future__ import annotations

import numpy as np
import pytest

from pagestone.formats import native
from pagestone.formats.errors import NonFiniteError, RequestError


@pytest.fixture(autouse=True)
def restore():
    before = native.isa()
    yield
    native.force(before)


def fresh(monkeypatch: pytest.MonkeyPatch, word: str | None) -> None:
    """As in a process that has not read the environment yet."""
    monkeypatch.setattr(native, "_current", None)
    if word is None:
        monkeypatch.delenv(native.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(native.VARIABLE, word)


def test_unset_is_the_best_available(monkeypatch):
    fresh(monkeypatch, None)
    assert native.isa() == native.available()[-1]


def test_environment_is_read_once(monkeypatch):
    fresh(monkeypatch, "numpy")
    assert native.isa() == "numpy"
    monkeypatch.setenv(native.VARIABLE, "scalar")
    assert native.isa() == "numpy"


def test_unknown_word_is_refused_and_listed(monkeypatch):
    fresh(monkeypatch, "sse9")
    with pytest.raises(RequestError, match=r"numpy, scalar, avx2, avx512, found 'sse9'") as caught:
        native.isa()
    assert caught.value.code == "E0111"


def test_missing_instruction_set_is_refused_and_changes_nothing(monkeypatch):
    native.force("numpy")
    monkeypatch.setattr(native, "available", lambda: ("numpy", "scalar"))
    with pytest.raises(RequestError, match="PAGESTONE_ISA=avx512 cannot be used") as caught:
        native.force("avx512")
    assert caught.value.code == "E0112"
    assert native.isa() == "numpy"


def test_without_kernels_the_definition_is_used(monkeypatch):
    monkeypatch.setattr(native, "_kernels", None)
    fresh(monkeypatch, None)
    assert not native.built()
    assert native.available() == ("numpy",)
    assert native.isa() == "numpy"
    assert native.kernel("encode_int8") is None
    with pytest.raises(RequestError, match="not built"):
        native.force("scalar")


def test_forced_comes_back_even_after_an_error():
    before = native.isa()
    with pytest.raises(ZeroDivisionError), native.forced("numpy"):
        assert native.isa() == "numpy"
        assert native.kernel("encode_int8") is None
        raise ZeroDivisionError
    assert native.isa() == before


def test_kernel_of_a_codec_without_one():
    assert native.kernel(None) is None


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "-Inf"), (65504.0, "65504.0")])
def test_non_finite_names_row_column_and_value(value, text):
    source = np.zeros((3, 5), np.float16)
    source[2, 1] = value
    with pytest.raises(NonFiniteError) as caught:
        native.raise_non_finite(source, "F16", 4, 11)
    error = caught.value
    assert (error.count, error.row, error.column, error.value) == (4, 2, 1, text)


def test_non_finite_of_bf16_bits():
    source = np.array([[0x3F80, 0xFF80]], np.uint16)
    with pytest.raises(NonFiniteError, match="first -Inf at row 0, column 1"):
        native.raise_non_finite(source, "BF16", 1, 1)
