"""Our float8 and bfloat16 arithmetic against ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from pagestone.formats import codecs, native
from pagestone.formats.codecs.fp8 import VALUES, to_e4m3
from pagestone.formats.dtypes import bf16_to_f32, f32_to_bf16

ml_dtypes = pytest.importorskip("ml_dtypes")
E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16


def test_values_of_all_codes():
    theirs = np.arange(256).astype(np.uint8).view(E4M3).astype(np.float32)
    assert np.array_equal(VALUES, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(VALUES), np.signbit(theirs)) or np.isnan(theirs[[127, 255]]).all()


def test_rounding_of_every_bfloat16():
    values = bf16_to_f32(np.arange(65536).astype(np.uint16))
    values = values[np.abs(values) <= 448]
    assert np.array_equal(to_e4m3(values), values.astype(E4M3).view(np.uint8))


def test_rounding_of_random_float32():
    rng = np.random.default_rng(0)
    bits = rng.integers(0x3A000000, 0x43E00000, 300_000).astype(np.uint32)
    values = bits.view(np.float32) * rng.choice(np.float32([-1, 1]), bits.size)
    assert np.array_equal(to_e4m3(values), values.astype(E4M3).view(np.uint8))


def test_bfloat16_both_ways():
    rng = np.random.default_rng(1)
    values = rng.integers(0, 1 << 32, 300_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        theirs = values.astype(BF16)
    assert np.array_equal(f32_to_bf16(values), theirs.view(np.uint16))
    assert np.array_equal(bf16_to_f32(theirs.view(np.uint16)), theirs.astype(np.float32))


@pytest.mark.parametrize("isa", native.available())
def test_whole_matrix(isa):
    """The codec recomputed with their types: scales, codes and decoded values."""
    weight = (np.random.default_rng(2).standard_normal((200, 300)) * 0.02).astype(BF16)
    codec = codecs.get("fp8")
    out = codec.allocate(200, 300)
    with native.forced(isa):
        codec.encode(weight.view(np.uint16), "BF16", out)
    exact = weight.astype(np.float32)
    for top in range(0, 200, 128):
        for left in range(0, 300, 128):
            block = exact[top : top + 128, left : left + 128]
            scale = (np.abs(block).max() / np.float32(448)).astype(BF16)
            assert out["scales"][top // 128, left // 128] == scale.view(np.uint16)
            wanted = np.clip(block / np.float32(scale), -448, 448).astype(E4M3)
            assert np.array_equal(out["codes"][top : top + 128, left : left + 128], wanted.view(np.uint8))
            decoded = codec.decode(out, 200, 300)[top : top + 128, left : left + 128]
            assert np.array_equal(decoded, wanted.astype(np.float32) * np.float32(scale))
