"""Our float8 and bfloat16 arithmetic against ml_dtypes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from kits.oracles import oracle

from pagestone.formats import encodings, native
from pagestone.formats.dtypes import bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings.fp8 import VALUES, to_e4m3
from pagestone.formats.errors import NonFiniteError

ml_dtypes = oracle("ml_dtypes")
E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16

LONG = 100_000_000 if os.environ.get("PAGESTONE_LONG") else 2_000_000
"""Random numbers: 10^8 with PAGESTONE_LONG=1, a short form without."""
PIECE = 1_000_000


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
    codec = encodings.get("fp8")
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
            decoded = codec.values(out, 200, 300)[top : top + 128, left : left + 128]
            assert np.array_equal(decoded, wanted.astype(np.float32) * np.float32(scale))


# -- the codecs and the rounding behind them, in bulk ------------------------------------------------------------------


def encoded(name: str, source: np.ndarray, dtype: str) -> np.ndarray:
    codec = encodings.get(name)
    out = codec.allocate(*source.shape)
    codec.encode(source, dtype, out)
    return out["codes"]


@pytest.mark.parametrize("isa", native.available())
def test_bf16_codec_keeps_every_bfloat16(isa):
    """All 65,536: the finite ones keep their bits, the others are refused one and all."""
    every = np.arange(65536).astype(np.uint16)
    finite = np.isfinite(every.view(BF16).astype(np.float32))
    with native.forced(isa):
        assert np.array_equal(encoded("bf16", every[finite].reshape(1, -1), "BF16")[0], every[finite])
        through_f32 = every[finite].view(BF16).astype(np.float32)
        assert np.array_equal(encoded("bf16", through_f32.reshape(1, -1), "F32")[0], every[finite])
        for bits in every[~finite]:
            with pytest.raises(NonFiniteError):
                encoded("bf16", bits.reshape(1, 1), "BF16")


@pytest.mark.parametrize("isa", native.available())
def test_bf16_codec_at_every_midpoint_and_its_neighbours(isa):
    upper = np.arange(0x7F7F, dtype=np.uint32)  # every pair of neighbours, zero to the largest
    bits = np.concatenate([(upper << 16) + low for low in (0x7FFF, 0x8000, 0x8001)])
    values = np.concatenate([bits, bits | np.uint32(0x80000000)]).view(np.float32)
    with native.forced(isa):
        codes = encoded("bf16", values.reshape(2, -1), "F32").reshape(-1)
    assert np.array_equal(codes, values.astype(BF16).view(np.uint16))


@pytest.mark.parametrize("isa", native.available())
def test_bf16_codec_of_every_half_float(isa):
    every = np.arange(65536).astype(np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    with native.forced(isa):
        codes = encoded("bf16", finite.reshape(1, -1), "F16")[0]
    assert np.array_equal(codes, finite.astype(np.float32).astype(BF16).view(np.uint16))


def test_many_random_float32():
    """Any bits: bf16 through the codec's kernel and its definition, E4M3 through its definition."""
    rng = np.random.default_rng(20)
    for start in range(0, LONG, PIECE):
        values = rng.integers(0, 1 << 32, min(PIECE, LONG - start), dtype=np.uint64).astype(np.uint32).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            theirs = values.astype(BF16)
        fits = np.isfinite(theirs.astype(np.float32))
        wanted = theirs.view(np.uint16)
        assert np.array_equal(encoded("bf16", values[fits].reshape(1, -1), "F32")[0], wanted[fits])
        assert np.array_equal(f32_to_bf16(values)[fits], wanted[fits])
        # E4M3 has 2^-10 to 448 for its numbers: exponents spread over that range and a little below it.
        bits = rng.integers(0x39800000, 0x43E00001, values.size).astype(np.uint32)
        inside = (bits | (values.view(np.uint32) & np.uint32(0x80000000))).view(np.float32)
        assert np.array_equal(to_e4m3(inside), inside.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("isa", native.available()[1:])
def test_many_random_float32_through_the_fp8_kernel(isa):
    """Beside 448 a block's scale is one: what is left is the kernel's rounding."""
    rng = np.random.default_rng(21)
    share = LONG // len(native.available()[1:])
    for _ in range(0, share, PIECE):
        values = rng.integers(0x39800000, 0x43E00001, (128, PIECE // 128)).astype(np.uint32)
        values |= rng.integers(0, 2, values.shape).astype(np.uint32) << np.uint32(31)
        source = values.view(np.float32)
        source[0, ::128] = 448
        with native.forced(isa):
            codes = encoded("fp8", source, "F32")
        assert np.array_equal(codes, source.astype(E4M3).view(np.uint8))
