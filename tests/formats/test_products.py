"""Every native product equals its definition bit for bit, and the definition what specs/products.md says."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestone.formats import encodings, native, products
from pagestone.formats.dtypes import bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings.affine import pack, unpack
from pagestone.formats.encodings.fp8 import VALUES
from pagestone.formats.errors import NonFiniteError

ISAS = native.available()[1:]
CASES = [
    ("bf16", {}), ("fp8", {}), ("fp8", {"scale_dtype": "F32"}), ("int8", {}),
    ("q4", {}), ("q4", {"group_size": 32}), ("q3", {}), ("q3", {"group_size": 32}), ("q8", {}),
    ("q8", {"group_size": 32}),
]  # fmt: skip
CODECS = [encodings.get(name, parameters) for name, parameters in CASES]
EACH = [pytest.param(c, id="-".join([c.name, *map(str, p.values())])) for c, (_, p) in zip(CODECS, CASES, strict=True)]
QUANTISING = [p for p, (name, _) in zip(EACH, CASES, strict=True) if name not in ("bf16", "fp8")]
COLUMNS = (33, 65, 160, 192, 2048, 7168)
GROUPED_COLUMNS = (64, 192, 2048, 7168)
TOKENS = (1, 2, 3, 17, 64)
F = np.float32


def cast(values, dtype="BF16"):
    values = np.ascontiguousarray(values, np.float32)
    return f32_to_bf16(values) if dtype == "BF16" else np.clip(values, -65504, 65504).astype(np.float16)


def normal(rows, columns, seed=0, scale=1.0, dtype="BF16"):
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * scale
    return cast(values, dtype)


def encoded(codec, rows, columns, seed=0):
    stored = codec.allocate(rows, columns)
    codec.encode(normal(rows, columns, seed, 0.02), "BF16", stored)
    return stored


def any_stored(codec, rows, columns, rng, spread=False):
    """Stored arrays with any admissible code in any place; scales ordinary, or (`spread`) of every exponent."""
    stored = codec.allocate(rows, columns)

    def scales(array):
        exponents = rng.integers(1, 255, array.shape) if spread else rng.integers(110, 130, array.shape)
        values = ((exponents << 23) | rng.integers(0, 1 << 23, array.shape)).astype(np.uint32).view(np.float32)
        return f32_to_bf16(values) & 0x7F7F if array.dtype == np.uint16 else values

    for role, array in stored.items():
        if role == "scales" or role == "biases":
            array[...] = scales(array)
            if codec.name in ("q3", "q4", "q8"):
                array |= (rng.integers(0, 2, array.shape) << 15).astype(np.uint16)
    codes = stored["codes"]
    if codec.name == "int8":
        codes[...] = rng.integers(-127, 128, codes.shape)
        stored["row_sums"][...] = codes.sum(axis=1, dtype=np.int32)
    elif codec.name == "fp8":
        codes[...] = rng.integers(0, 127, codes.shape) | (rng.integers(0, 2, codes.shape) << 7)
    elif codec.name == "bf16":
        top = 0x7F80 if spread else 0x4100
        codes[...] = rng.integers(0, top, codes.shape) | (rng.integers(0, 2, codes.shape) << 15)
    else:
        codes[...] = rng.integers(0, 1 << 32, codes.shape)
    return stored


def any_tokens(count, columns, rng, dtype="BF16"):
    """Finite tokens of any bits, the first two of one magnitude each."""
    top = 0x7F80 if dtype == "BF16" else 0x7C00
    bits = rng.integers(0, top, (count, columns)) | (rng.integers(0, 2, (count, columns)) << 15)
    bits[0] = 0x3F80
    bits[1:2] &= 0x80FF
    return bits.astype(np.uint16).view(np.uint16 if dtype == "BF16" else np.float16)


def same(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape
    return left.tobytes() == right.tobytes()


def check(codec, stored, x, rows, threads=(1,)):
    expected = codec.matmul_definition(stored, x, rows, x.shape[1])
    assert expected.dtype == np.float32 and expected.shape == (len(x), rows)
    for isa in ISAS:
        with native.forced(isa):
            for count in threads:
                assert same(codec.matmul(stored, x, rows, x.shape[1], threads=count), expected), (isa, count)
    return expected


def columns_of(codec):
    return [c for c in GROUPED_COLUMNS if c % codec.group_size == 0] if hasattr(codec, "group_size") else COLUMNS


def test_every_codec_has_a_product_and_its_kernel():
    for cls in encodings.registry().values():
        assert cls.multiplier is not None
        if native.built():
            assert callable(getattr(native._kernels, cls.multiplier))


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("tokens", TOKENS)
def test_shapes(codec, tokens):
    for columns in columns_of(codec):
        rows = {2048: 19, 7168: 5}.get(columns, 70) if tokens < 64 else 7
        x = normal(tokens, columns, columns + tokens, 2.0, "BF16" if tokens != 2 else "F16")
        check(codec, encoded(codec, rows, columns, columns), x, rows, threads=(1, 2, 4))


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("columns", [64, 128, 320, 384, 512, 576, 768, 1024, 1088, 1536, 2880])
def test_every_way_to_end_a_row(codec, columns):
    """And the shapes other models have: 12 groups, 45, a half block, a block and one group."""
    for rows, tokens in ((1, 1), (3, 2), (18, 5)):
        check(codec, encoded(codec, rows, columns, rows), normal(tokens, columns, 3), rows)


@pytest.mark.parametrize("codec", EACH)
def test_many_rows_and_blocks_of_rows(codec):
    for rows in (1, 15, 16, 17, 33, 127, 128, 129, 300):
        for tokens in (1, 2, 4):
            check(codec, encoded(codec, rows, 192, rows), normal(tokens, 192, rows), rows, threads=(1, 3))


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("spread", [False, True], ids=["ordinary", "every-exponent"])
def test_any_admissible_bits(codec, dtype, spread):
    """Every code, scale, bias and activation there is: sums and products that overflow, vanish, or are no number."""
    rng = np.random.default_rng(11)
    for columns in (64, 192, 512, 2048):
        for tokens in (1, 2, 3, 6):
            for _ in range(3):
                stored = any_stored(codec, 21, columns, rng, spread)
                results = check(codec, stored, any_tokens(tokens, columns, rng, dtype), 21)
                nan = np.isnan(results)
                assert (results.view(np.uint32)[nan] == 0x7FC00000).all()


@pytest.mark.parametrize("codec", EACH)
def test_codes_and_activations_at_both_ends(codec):
    rows, columns = 18, 2048
    ends = {"int8": (-127, 127), "fp8": (0xFE, 0x7E), "bf16": (0xFF7F, 0x7F7F)}.get(codec.name, (0, 0xFFFFFFFF))
    stored = encoded(codec, rows, columns)
    for low, high in (ends, ends[::-1], (ends[0], ends[0]), (ends[1], ends[1])):
        stored["codes"][0::2], stored["codes"][1::2] = low, high
        if "row_sums" in stored:
            stored["row_sums"][...] = stored["codes"].sum(axis=1, dtype=np.int32)
        x = np.full((4, columns), 3.0, np.float32)
        x[1] = -3.0
        x[2, ::2] = -3.0
        x[3, :64] = -3.0
        check(codec, stored, cast(x), rows)


@pytest.mark.parametrize("codec", EACH)
def test_zero_and_tiny_tokens(codec):
    columns = 192
    x = np.zeros((7, columns), np.uint16)
    x[1] = 0x8000  # -0.0
    x[2, 5] = 1  # the smallest subnormal
    x[3] = 1 | 0x8000
    x[4] = np.arange(columns) % 128  # subnormals
    x[5] = 0x0080  # the smallest normal
    x[6, 3] = 0x7F7F  # the largest
    for rows in (3, 40):
        stored = encoded(codec, rows, columns)
        results = check(codec, stored, x, rows)
        assert not results[:2].any() and not np.signbit(results[:2]).any()
        for token in range(len(x)):
            check(codec, stored, x[token : token + 1], rows)


@pytest.mark.parametrize("codec", EACH)
def test_huge_products_overflow_as_defined(codec):
    columns = 512
    stored = encoded(codec, 20, columns)
    if "scales" in stored:
        stored["scales"][...] = 0x7F00 if stored["scales"].dtype == np.uint16 else 1.7e38
    else:
        stored["codes"][...] = (stored["codes"] & 0x8000) | 0x7F00
    x = normal(3, columns, 5, 1e37)
    results = check(codec, stored, x, 20)
    assert not np.isfinite(results).all()
    for kind in (np.uint16, np.float16):
        for isa in native.available():
            with native.forced(isa):
                out = np.empty((3, 20), kind)
                codec.matmul(stored, x, 20, columns, out=out)
                with np.errstate(over="ignore"):
                    assert same(out, f32_to_bf16(results) if kind == np.uint16 else results.astype(np.float16))


def test_fp8_scaled_tokens_too_large_for_the_short_way():
    """Where 2^8 * xs would overflow, codes are decoded; on both sides of the border, and with a zero scale."""
    codec = encodings.get("fp8")
    for scale in (0x0000, 0x7A80, 0x7B00, 0x7B80, 0x7C00, 0x7D00):
        stored = encoded(codec, 9, 192)
        stored["scales"][...] = scale
        for tokens in (1, 3):
            check(codec, stored, normal(tokens, 192, 1, 0.5), 9)


@pytest.mark.parametrize("codec", EACH[:3])
def test_nan_among_the_codes_is_never_lost(codec):
    """No container may hold one, but if a bit flips it must show."""
    bad = 0xFF if codec.name == "fp8" else 0x7FC1
    for column in (0, 63, 64, 191, 194):
        stored = encoded(codec, 20, 195)
        stored["codes"][7, column] = bad
        x = normal(4, 195)
        x[:, column] = 0
        for tokens in (1, 2, 4):
            results = check(codec, stored, x[:tokens], 20)
            assert np.isnan(results[:, 7]).all() and not np.isnan(np.delete(results, 7, axis=1)).any()


def test_int8_code_of_minus_128():
    """`verify` refuses one, and the product is right all the same."""
    codec = encodings.get("int8")
    stored = encoded(codec, 20, 160)
    stored["codes"][3] = -128
    stored["row_sums"][...] = stored["codes"].sum(axis=1, dtype=np.int32)
    for value in (3.0, -3.0):
        check(codec, stored, np.full((5, 160), cast([value])[0]), 20)


@pytest.mark.skipif("avx512" not in ISAS, reason="only AVX-512 uses row sums")
def test_a_flipped_row_sum_shows():
    codec = encodings.get("int8")
    stored = encoded(codec, 20, 160)
    x = normal(3, 160)
    right = codec.matmul_definition(stored, x, 20, 160)
    without = {role: array for role, array in stored.items() if role != "row_sums"}
    stored["row_sums"][4] ^= 1
    with native.forced("avx512"):
        wrong = codec.matmul(stored, x, 20, 160)
        assert same(codec.matmul(without, x, 20, 160), right)
    assert (wrong != right)[:, 4].all() and same(np.delete(wrong, 4, axis=1), np.delete(right, 4, axis=1))


@pytest.mark.parametrize("codec", EACH)
def test_a_token_alone_is_the_same_token_in_any_batch(codec):
    columns, rows = 512, 50
    stored = encoded(codec, rows, columns)
    x = normal(67, columns, 9)
    x[5] = 0
    for isa in native.available():
        with native.forced(isa):
            together = codec.matmul(stored, x, rows, columns, threads=2)
            for token in (0, 5, 31, 63, 64, 66):
                assert same(codec.matmul(stored, x[token : token + 1], rows, columns), together[token : token + 1])
            for first, last in ((0, 2), (3, 6), (10, 14), (20, 25), (60, 67)):
                assert same(codec.matmul(stored, x[first:last], rows, columns), together[first:last])


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_results_rounded_to_the_models_type(codec, dtype):
    """All float16 ranges: subnormal, ordinary, beyond the largest."""
    columns, rows = 192, 37
    stored = encoded(codec, rows, columns)
    for scale in (1e-5, 1e-4, 1.0, 1e4, 3e5):
        x = normal(3, columns, 2, scale, dtype)
        exact = codec.matmul_definition(stored, x, rows, columns)
        with np.errstate(over="ignore"):
            expected = {np.uint16: f32_to_bf16(exact), np.float16: exact.astype(np.float16)}
        for isa in native.available():
            with native.forced(isa):
                for kind, values in expected.items():
                    out = np.empty((3, rows), kind)
                    assert codec.matmul(stored, x, rows, columns, out=out, threads=2) is out
                    assert same(out, values)


def test_rounding_of_every_kind_of_float():
    """A matrix of one column and one token of 1.0 makes any BF16 value a result; float16 gets its ties this way too."""
    codec = encodings.get("bf16")
    every = np.arange(1 << 16).astype(np.uint16)
    every = every[(every & 0x7FFF) < 0x7F80].reshape(-1, 1)
    near = np.array([[1.0, 2.0**-11]], np.float16)  # w0 + w1 * 2^-11: at, below and above ties
    pairs = np.concatenate([every, np.roll(every, 7, axis=0)], axis=1)
    for codes, x in ((every, np.ones((1, 1), np.float16)), (pairs, near)):
        stored = {"codes": np.ascontiguousarray(codes)}
        exact = codec.matmul_definition(stored, x, len(codes), codes.shape[1])
        with np.errstate(over="ignore"):
            expected = exact.astype(np.float16)
        for isa in ISAS:
            with native.forced(isa):
                out = np.empty((1, len(codes)), np.float16)
                assert same(codec.matmul(stored, x, *codes.shape, out=out), expected)
                assert same(codec.matmul(stored, x, *codes.shape), exact)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_shapes_and_bits(data):
    codec = data.draw(st.sampled_from(CODECS), label="codec")
    step = getattr(codec, "group_size", 1)
    columns = data.draw(st.integers(1, 600 // step), label="columns") * step
    rows, tokens = data.draw(st.integers(1, 140), label="rows"), data.draw(st.integers(1, 9), label="tokens")
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30), label="seed"))
    stored = any_stored(codec, rows, columns, rng, data.draw(st.booleans(), label="spread"))
    x = any_tokens(tokens, columns, rng, data.draw(st.sampled_from(["BF16", "F16"]), label="dtype"))
    check(codec, stored, x, rows, threads=(1, data.draw(st.integers(2, 5), label="threads")))


# --- the definition itself


def folded(terms, lanes):
    """Lane by lane, as the text says; Python floats hold float32 values, every operation rounded by F."""
    sums = [F(0)] * lanes
    for i, term in enumerate(terms):
        sums[i % lanes] = F(sums[i % lanes] + F(term))
    half = lanes // 2
    while half:
        sums = [F(sums[i] + sums[i + half]) for i in range(half)]
        half //= 2
    return sums[0]


def slowly(codec, stored, x, rows, columns):
    values = x.astype(np.float32) if x.dtype == np.float16 else bf16_to_f32(x)
    results = np.empty((len(x), rows), np.float32)
    for t, token in enumerate(values):
        amax = max(abs(v) for v in token)
        s_x = F(amax / F(127)) if amax else F(1)
        a = [int(min(max(np.rint(F(v / s_x)), F(-127)), F(127))) for v in token]
        for r in range(rows):
            if codec.name == "bf16":
                w = bf16_to_f32(stored["codes"][r])
                result = folded([F(w[c] * token[c]) for c in range(columns)], 64)
            elif codec.name == "fp8":
                scales = stored["scales"]
                scales = bf16_to_f32(scales) if scales.dtype == np.uint16 else scales
                terms = []
                for c in range(columns):
                    xs = F(token[c] * scales[r // 128, c // 128])
                    terms.append(F(VALUES[stored["codes"][r, c]] * xs))
                result = folded(terms, 64)
            elif codec.name == "int8":
                acc = sum(int(w) * v for w, v in zip(stored["codes"][r], a, strict=True))
                result = F(F(F(acc) * s_x) * stored["scales"][r, 0])
            else:
                size, codes = codec.group_size, unpack(stored["codes"], columns, codec.bits)[r]
                scales, biases = bf16_to_f32(stored["scales"][r]), bf16_to_f32(stored["biases"][r])
                of_codes, of_biases = [], []
                for g in range(columns // size):
                    part = range(g * size, (g + 1) * size)
                    of_codes.append(F(F(sum(int(codes[i]) * a[i] for i in part)) * scales[g]))
                    of_biases.append(F(F(sum(a[i] for i in part)) * biases[g]))
                result = F(s_x * F(folded(of_codes, 16) + folded(of_biases, 16)))
            results[t, r] = result
    return results


@pytest.mark.parametrize("codec", EACH)
def test_the_definition_against_a_slow_one(codec):
    for rows, columns, tokens, dtype in ((3, 192, 2, "BF16"), (130, 64, 1, "F16"), (2, 1152, 1, "BF16")):
        stored = encoded(codec, rows, columns, 4)
        x = normal(tokens, columns, 6, 3.0, dtype)
        x[0, :3] = 0
        with native.forced("numpy"):
            found = codec.matmul(stored, x, rows, columns)
        assert same(found, slowly(codec, stored, x, rows, columns))


@pytest.mark.parametrize("codec", [p for p in EACH if p.values[0].name in ("bf16", "fp8", "int8")])
def test_the_definition_where_nothing_divides(codec):
    stored = encoded(codec, 3, 161, 8)
    x = normal(2, 161, 9)
    assert same(codec.matmul_definition(stored, x, 3, 161), slowly(codec, stored, x, 3, 161))


@pytest.mark.parametrize("codec", EACH)
def test_the_definition_is_the_product(codec, oracle):
    """Close to the decoded weights multiplied in float64 by torch; 8 bits of activation cost about a hundredth."""
    torch = oracle("torch")
    rows, columns = 64, 2048
    stored, x = encoded(codec, rows, columns), normal(8, columns)
    weight = codec.values(stored, rows, columns).astype(np.float64)
    exact = torch.nn.functional.linear(torch.from_numpy(bf16_to_f32(x).astype(np.float64)), torch.from_numpy(weight))
    found = codec.matmul_definition(stored, x, rows, columns)
    error = np.linalg.norm(found - exact.numpy()) / np.linalg.norm(exact.numpy())
    assert error < (1e-6 if codec.name in ("bf16", "fp8") else 0.015)


@pytest.mark.parametrize("codec", QUANTISING)
def test_activations_that_are_whole_cost_nothing(codec):
    """127 and whole numbers: s_x = 1, and the product of decoded weights is met up to float32's rounding."""
    rows, columns = 16, 192
    stored = encoded(codec, rows, columns)
    x = np.random.default_rng(0).integers(-127, 128, (3, columns)).astype(np.float32)
    x[:, 0] = 127
    exact = x.astype(np.float64) @ codec.values(stored, rows, columns).astype(np.float64).T
    found = codec.matmul_definition(stored, cast(x), rows, columns)
    assert np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max()


def test_the_worked_example_of_the_specification():
    x = cast([[1.0, -2.0, 0.5]])
    stored = {"codes": cast([[3.0, 0.25, -1.0]])}
    check(encodings.get("bf16"), stored, x, 1)
    assert encodings.get("bf16").matmul(stored, x, 1, 3).tolist() == [[2.0]]
    codes, scale = products.quantise(bf16_to_f32(x))
    assert codes.tolist() == [[64, -127, 32]] and scale.view(np.uint32).tolist() == [0x3C810204]
    codes, scales = np.array([[127, 11, -42]], np.int8), np.array([[0x3CC18306]], np.uint32).view(np.float32)
    stored = {"codes": codes, "scales": scales, "row_sums": np.array([96], np.int32)}
    assert check(encodings.get("int8"), stored, x, 1).view(np.uint32).tolist() == [[0x40004103]]


def test_quantised_activations():
    values = np.array([[127, -127, 63.5, 0.5, 1.5, -0.5, -0.0, 126.5]], np.float32)
    codes, scale = products.quantise(values)
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[127, -127, 64, 0, 2, 0, 0, 126]]
    codes, scale = products.quantise(np.zeros((1, 3), np.float32))
    assert scale.tolist() == [1.0] and not codes.any()
    tiny = bf16_to_f32(np.array([[1, 2]], np.uint16))
    codes, scale = products.quantise(tiny)
    assert codes.tolist() == [[64, 127]] and scale[0] == F(tiny[0, 1] / F(127))


# --- refusals


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize("codec", EACH)
def test_refusals(codec, isa):
    rows, columns = 5, 192
    stored, x = encoded(codec, rows, columns), normal(3, columns)
    with native.forced(isa):
        for kind in (np.float32, np.float64, np.int16, np.uint8):
            with pytest.raises(TypeError, match=f"x: dtype.*{np.dtype(kind)}"):
                codec.matmul(stored, x.astype(kind), rows, columns)
        with pytest.raises(ValueError, match=r"x: shape expected to be \[3, 192\], found \[3, 256\]"):
            codec.matmul(stored, normal(3, 256), rows, columns)
        with pytest.raises(ValueError, match="codes: "):
            codec.matmul(stored, normal(3, 256), rows, 256)
        with pytest.raises(TypeError, match=r"out: dtype.*float64"):
            codec.matmul(stored, x, rows, columns, out=np.empty((3, rows)))
        with pytest.raises(ValueError, match=r"out.*\[3, 5\].*\[3, 6\]"):
            codec.matmul(stored, x, rows, columns, out=np.empty((3, 6), np.float32))
        for role, array in stored.items():
            short = {**stored, role: array[:-1].copy()}
            if codec.name == "fp8" and role == "scales":
                short = {**stored, role: np.repeat(array, 2, axis=0)}
            if isa == "numpy" and role == "row_sums":
                continue  # the definition has no use for them
            with pytest.raises(ValueError, match=rf"{role}|out"):
                codec.matmul(short, x, rows, columns)
        for bad, text in ((0x7FC0, "NaN"), (0x7F80, "Inf"), (0xFF80, "-Inf")):
            broken = x.copy()
            broken[2, 77] = bad
            with pytest.raises(NonFiniteError, match=f"^1 non-finite .* {text} at token 2, column 77"):
                codec.matmul(stored, broken, rows, columns)
        with pytest.raises(NonFiniteError, match="token 0, column 191"):
            half = np.ones((1, columns), np.float16)
            half[0, 191] = np.inf
            codec.matmul(stored, half, rows, columns)


@pytest.mark.skipif(not native.built(), reason="native kernels are not built")
def test_kernels_check_what_they_are_given():
    kernels = native._kernels
    x, out = normal(2, 64), np.empty((2, 3), np.float32)
    codes = np.zeros((3, 64), np.int8)
    scales, sums = np.ones((3, 1), np.float32), np.zeros(3, np.int32)
    assert kernels.matmul_int8(x, codes, scales, sums, out) is True
    with pytest.raises(TypeError, match="codes: dtype expected to be int8, found uint8"):
        kernels.matmul_int8(x, codes.view(np.uint8), scales, sums, out)
    with pytest.raises(TypeError, match="row_sums: dtype expected to be int32, found int64"):
        kernels.matmul_int8(x, codes, scales, sums.astype(np.int64), out)
    with pytest.raises(ValueError, match="row_sums: length expected to be 3, found 4"):
        kernels.matmul_int8(x, codes, scales, np.zeros(4, np.int32), out)
    with pytest.raises(ValueError, match="x: dimensions expected to be 2, found 1"):
        kernels.matmul_int8(x[0], codes, scales, sums, out)
    with pytest.raises(ValueError, match="threads expected to be at least 1"):
        kernels.matmul_int8(x, codes, scales, sums, out, 0)
    with pytest.raises(ValueError, match="columns expected to be at most 131072, found 131073"):
        kernels.matmul_int8(normal(1, 131073), np.zeros((3, 131073), np.int8), scales, sums, out[:1])
    with pytest.raises(TypeError):
        kernels.matmul_int8(x[:, ::2], codes[:, :32], scales, sums, out)  # not contiguous
    raw = np.zeros(2 * 64 * 2 + 1, np.uint8)[1:].view(np.uint16).reshape(2, 64)
    with pytest.raises(ValueError, match="x: address expected to be a multiple of 2"):
        kernels.matmul_int8(raw, codes, scales, sums, out)
    words = np.zeros((3, 9), np.uint32)
    grid = np.zeros((3, 1), np.uint16)
    with pytest.raises(ValueError, match="codes: columns expected to be 8, found 9"):
        kernels.matmul_affine(x, words, grid, grid, out, 4, 64)
    with pytest.raises(ValueError, match="bits expected to be 3, 4 or 8, found 5"):
        kernels.matmul_affine(x, words, grid, grid, out, 5, 64)
    with pytest.raises(ValueError, match="x: columns expected to be a multiple of 64, found 96"):
        kernels.matmul_affine(normal(2, 96), words, grid, grid, out, 3, 64)
    with pytest.raises(ValueError, match="scales: columns expected to be 1, found 2"):
        kernels.matmul_fp8(x, codes.view(np.uint8), np.zeros((1, 2), np.float32), out)
    assert kernels.read_bytes(np.array([1, 2, 4], np.uint8), 2) == 7


def test_unaligned_and_read_only_memory():
    """As a mapped file has it: aligned to the element and no further."""
    for codec in CODECS:
        stored, x = encoded(codec, 20, 192), normal(3, 192)
        expected = codec.matmul_definition(stored, x, 20, 192)
        moved = {}
        for role, array in stored.items():
            raw = np.zeros(array.nbytes + 64, np.uint8)
            start = (-raw.ctypes.data % 64) + array.itemsize
            moved[role] = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            moved[role][...] = array
            moved[role].flags.writeable = False
        for isa in ISAS:
            with native.forced(isa):
                assert same(codec.matmul(moved, x, 20, 192), expected)


def test_nothing_to_do():
    for codec in CODECS:
        stored = encoded(codec, 5, 64)
        for isa in native.available():
            with native.forced(isa):
                assert codec.matmul(stored, np.zeros((0, 64), np.uint16), 5, 64).shape == (0, 5)


def test_packed_words_may_be_anything():
    """Codes of all ones and of one bit each, in every place of a unit."""
    for codec in CODECS:
        if codec.name not in ("q3", "q4", "q8"):
            continue
        codes = np.zeros((64, 64 * 4), np.uint8)
        codes[np.arange(64), np.arange(64) * 4 % 256] = (1 << codec.bits) - 1
        codes[np.arange(64), (np.arange(64) * 4 + 1) % 256] = 1 << (np.arange(64) % codec.bits)
        stored = encoded(codec, 64, 256)
        stored["codes"][...] = pack(codes, codec.bits)
        x = cast(np.arange(256)[None, :] % 127 + np.array([[1.0], [-64.0]]))
        check(codec, stored, x, 64)


# --- threads


@pytest.mark.skipif(not native.built(), reason="native kernels are not built")
def test_products_from_several_threads_at_once():
    codec = encodings.get("bf16")
    stored, x = encoded(codec, 200, 512), normal(3, 512)
    expected = codec.matmul_definition(stored, x, 200, 512)
    wrong = []

    def work():
        for count in range(60):
            if not same(codec.matmul(stored, x, 200, 512, threads=1 + count % 4), expected):
                wrong.append(count)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


FORK = """
import os, sys, numpy as np
from pagestone.formats import encodings
codec = encodings.get("int8")
stored = codec.allocate(100, 64)
codec.encode(np.full((100, 64), 0x3F80, np.uint16), "BF16", stored)
x = np.full((2, 64), 0x3F80, np.uint16)
first = codec.matmul(stored, x, 100, 64, threads=2).tobytes()
child = os.fork()
if child == 0:
    os._exit(codec.matmul(stored, x, 100, 64, threads=2).tobytes() != first)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not native.built(), reason="native kernels are not built")
def test_a_forked_child_has_threads_of_its_own():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


def test_a_process_that_flushes_subnormals_does_not_change_a_product(oracle):
    torch = oracle("torch")
    codec = encodings.get("bf16")
    stored = {"codes": np.array([[0x0001, 0x0080]] * 40, np.uint16)}
    x = np.array([[0x3F80, 0x3F00]], np.uint16)
    expected = codec.matmul_definition(stored, x, 40, 2)
    assert expected.all()
    try:
        torch.set_flush_denormal(True)
        results = [codec.matmul(stored, x, 40, 2, threads=count) for count in (1, 2) if native.isa() != "numpy"]
    finally:
        torch.set_flush_denormal(False)
    assert all(same(result, expected) for result in results)
