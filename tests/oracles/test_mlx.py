"""q3, q4, q8 against MLX on a CPU: its dequantize gives our values, its rule our first start, its error is beaten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kits.oracles import oracle

from pagestone.formats import encodings, native
from pagestone.formats.dtypes import bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings.affine import mlx_rule, unpack

mx = oracle("mlx.core")
TINY = Path(__file__).resolve().parents[1] / "data" / "tiny-moe"

F = np.float32
CODECS = [encodings.get(name, {"group_size": size}) for name in ("q3", "q4", "q8") for size in (64, 32)]
EACH = [pytest.param(codec, id=f"{codec.name}-{codec.group_size}") for codec in CODECS]
AT_MOST = {"q3": 0.78, "q4": 0.84, "q8": 0.62}
"""Of MLX's squared error over a matrix, group 64."""


@pytest.fixture(autouse=True)
def on_the_cpu():
    mx.set_default_device(mx.cpu)


def bf16_array(bits: np.ndarray):
    """An MLX array of BF16 bits."""
    return mx.array(bits).view(mx.bfloat16)


def dequantized(words, scales, biases, codec) -> np.ndarray:
    """MLX's values, scales and biases taken as float32."""
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    return np.array(mx.dequantize(words, *wide, group_size=codec.group_size, bits=codec.bits))


def encode(codec, bits: np.ndarray):
    out = codec.allocate(*bits.shape)
    return out, codec.encode(bits, "BF16", out)


def matrices() -> dict[str, np.ndarray]:
    """BF16 bits at true shapes, by distribution."""
    rng = np.random.default_rng(64)
    make = {
        "gauss": lambda shape: rng.standard_normal(shape) * 0.02,
        "laplace": lambda shape: rng.laplace(size=shape) * 0.02,
        "student-5": lambda shape: rng.standard_t(5, shape) * 0.02,
        "student-3": lambda shape: rng.standard_t(3, shape) * 0.02,
    }
    shapes = {"up": (512, 2048), "down": (2048, 512)}
    return {f"{k}-{s}": f32_to_bf16(f(dims).astype(F)) for k, f in make.items() for s, dims in shapes.items()}


def tiny_moe() -> list[np.ndarray]:
    """Every expert matrix of tiny-moe as BF16 bits; gate and up are one, which is the same to a codec of rows."""
    found = []
    for path in sorted(TINY.glob("*.safetensors")):
        for name, tensor in mx.load(str(path)).items():
            if ".experts." in name:
                found += list(np.array(tensor.view(mx.uint16)))
    assert len(found) == 2 * 5 * 16
    return found


@pytest.mark.parametrize("isa", [native.NUMPY, native.available()[-1]])
@pytest.mark.parametrize("codec", EACH)
def test_dequantize_gives_our_values(codec, isa):
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((24, 448)) * np.exp2(rng.integers(-30, 5, (24, 1)))).astype(F)
    weight[3] = 0
    with native.forced(isa):
        out, _ = encode(codec, f32_to_bf16(weight))
    theirs = dequantized(mx.array(out["codes"]), bf16_array(out["scales"]), bf16_array(out["biases"]), codec)
    assert theirs.tobytes() == codec.values(out, *weight.shape).tobytes()


@pytest.mark.parametrize("codec", EACH)
def test_dequantize_gives_our_values_of_any_stored_bits(codec):
    rng = np.random.default_rng(2)
    out = codec.allocate(16, 448)
    out["codes"][:] = rng.integers(0, 1 << 32, out["codes"].shape, dtype=np.uint64)
    for role in ("scales", "biases"):
        exponent = rng.integers(0x3000, 0x4400, out[role].shape)
        out[role][:] = exponent | rng.integers(0, 2, out[role].shape) << 15
    theirs = dequantized(mx.array(out["codes"]), bf16_array(out["scales"]), bf16_array(out["biases"]), codec)
    assert np.array_equal(theirs, codec.values(out, 16, 448))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("codec", EACH)
def test_our_first_start_is_their_rule(codec, dtype):
    """Bit for bit: scales and biases, also of tiny, constant and one-sided groups; codes with the rule's own pair.

    MLX works in float32 whatever the source and rounds scales and biases afterwards, to the source's type. Its codes
    come from the pair before that rounding, ours from the pair after it: they differ where that rounding matters.
    """
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((40, 4 * codec.group_size)) * 0.02).astype(F)
    weight[0], weight[1], weight[2], weight[3] = 0, 0.5, -0.3, 1e-9
    weight[4] *= F(1e-8)
    weight[5], weight[6] = np.abs(weight[5]), -np.abs(weight[6])
    weight[7], weight[8] = weight[7] * F(1e20), weight[8] * F(1e-30)
    weight[9, 3] = 5
    if dtype == "BF16":
        weight = bf16_to_f32(f32_to_bf16(weight))
    given = mx.array(weight) if dtype == "F32" else bf16_array(f32_to_bf16(weight))
    words, scales, biases = mx.quantize(given, group_size=codec.group_size, bits=codec.bits)
    groups = weight.reshape(-1, codec.group_size)
    scale, bias = mlx_rule(groups, codec.levels, np.full((len(groups), 1), 1e-7, F))
    codes = np.clip(np.rint((groups - bias) / scale), 0, codec.levels).astype(np.uint8)
    assert np.array_equal(unpack(np.array(words), weight.shape[1], codec.bits).reshape(codes.shape), codes)
    if dtype == "BF16":
        scale, bias = bf16_to_f32(f32_to_bf16(scale)), bf16_to_f32(f32_to_bf16(bias))
    for ours, theirs in ((scale, scales), (bias, biases)):
        assert ours.tobytes() == np.array(theirs.astype(mx.float32)).reshape(-1, 1).tobytes()


def squared_errors(codec, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Squared error of every group, ours and MLX's, in float64; and ours over the matrix as the encoder states it."""
    exact = bf16_to_f32(bits).astype(np.float64)
    out, cost = encode(codec, bits)
    ours = codec.values(out, *bits.shape)
    theirs = dequantized(*mx.quantize(bf16_array(bits), group_size=codec.group_size, bits=codec.bits), codec)
    by_group = [((d.astype(np.float64) - exact) ** 2).reshape(-1, codec.group_size).sum(axis=1) for d in (ours, theirs)]
    return by_group[0], by_group[1], cost.squared_error


@pytest.mark.parametrize("codec", EACH)
def test_never_worse_in_any_group_and_better_over_a_matrix(codec):
    for name, bits in matrices().items():
        ours, theirs, stated = squared_errors(codec, bits)
        assert np.isclose(ours.sum(), stated, rtol=1e-12), name
        assert (ours <= theirs * (1 + 1e-5)).all(), name
        if codec.group_size == 64:
            assert ours.sum() <= AT_MOST[codec.name] * theirs.sum(), (name, ours.sum() / theirs.sum())


@pytest.mark.parametrize("codec", EACH)
def test_the_same_on_trained_weights(codec):
    total = np.zeros(2)
    for bits in tiny_moe():
        ours, theirs, _ = squared_errors(codec, bits)
        assert (ours <= theirs * (1 + 1e-5)).all()
        total += ours.sum(), theirs.sum()
    if codec.group_size == 64:
        assert total[0] <= AT_MOST[codec.name] * total[1], total[0] / total[1]
