"""Every native kernel equals its definition bit for bit, on every instruction set this machine can run."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pagestone.formats import encodings, native
from pagestone.formats.dtypes import bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings.fp8 import VALUES
from pagestone.formats.errors import NonFiniteError

if not native.built():
    pytest.skip("native kernels are not built", allow_module_level=True)
_kernels = native._kernels

ISAS = native.available()[1:]
CODECS = [
    encodings.get("int8"),
    encodings.get("fp8"),
    encodings.get("fp8", {"scale_dtype": "F32"}),
    encodings.get("bf16"),
]
NAMES = ["int8", "fp8", "fp8-f32", "bf16"]
EACH = [pytest.param(codec, id=name) for codec, name in zip(CODECS, NAMES, strict=True)]
GROUPED = [encodings.get(name, {"group_size": size}) for name in ("q3", "q4", "q8") for size in (64, 32)]
EACH_GROUPED = [pytest.param(codec, id=f"{codec.name}-{codec.group_size}") for codec in GROUPED]
NON_FINITE = {
    "BF16": [0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7FFF],
    "F16": [0x7C00, 0xFC00, 0x7E00, 0xFC01],
    "F32": [0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001],
}


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        return f32_to_bf16(values)
    if dtype == "F16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    return values


def run(codec, source, dtype):
    """Everything an encoder leaves behind, comparable bit for bit; or the whole of its refusal."""
    out = codec.allocate(*source.shape)
    try:
        cost = codec.encode(source, dtype, out)
    except NonFiniteError as error:
        return error.count, error.row, error.column, error.value
    return cost.squared_error.hex(), cost.squared_norm.hex(), {role: a.tobytes() for role, a in out.items()}


def check(codec, source, dtype):
    with native.forced("numpy"):
        expected = run(codec, source, dtype)
    for isa in ISAS:
        with native.forced(isa):
            assert run(codec, source, dtype) == expected, isa
    return expected


def gaussian(rows, columns, seed=0, scale=0.02):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * scale
    outliers = rng.random((rows, columns)) < 0.003
    return np.where(outliers, values * 100, values).astype(np.float32)


def test_every_encoder_named_by_a_codec_is_built():
    for cls in encodings.registry().values():
        if cls.encoder is not None:
            assert callable(getattr(_kernels, cls.encoder))


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (5, 1), (3, 15), (3, 16), (3, 17), (130, 33), (64, 65), (192, 160), (160, 192), (257, 127), (2, 129),
     (129, 2048), (9, 7168), (3, 4097)],
)  # fmt: skip
def test_shapes(codec, dtype, rows, columns):
    check(codec, cast(gaussian(rows, columns, rows * columns), dtype), dtype)


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_any_bits(codec, dtype):
    """Every exponent, subnormals included, mixed freely; blocks of one magnitude each, so that scales cover all too."""
    rng = np.random.default_rng(7)
    bits, kind = (32, np.uint32) if dtype == "F32" else (16, np.uint16)
    view = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    limit = min(NON_FINITE[dtype]) - 1
    source = rng.integers(0, limit + 1, (300, 300)).astype(kind)
    source |= (rng.integers(0, 2, source.shape) << (bits - 1)).astype(kind)
    check(codec, source.view(view), dtype)
    ceilings = np.linspace(1, limit, 300).astype(np.int64)
    for row in ceilings[::25]:
        part = (rng.integers(0, row + 1, (2, 40)) | (rng.integers(0, 2, (2, 40)) << (bits - 1))).astype(kind)
        check(codec, part.view(view), dtype)
    for columns in (1, 20):
        graded = (ceilings[:, None] - rng.integers(0, 2, (300, columns))).astype(kind)
        check(codec, graded.view(view), dtype)


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_special_blocks(codec, dtype):
    view = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    kind = np.uint32 if dtype == "F32" else np.uint16
    top = 0x80000000 if dtype == "F32" else 0x8000
    alone = [0, 1, 2, 3, 0x7F, 0x80, 0x81, 0x100, 0x200, 0x3FF, 0x400, 0x401, 0x3F80, 0x7BFF]
    alone += [min(NON_FINITE[dtype]) - 1, 0x00800000 % top, 0x00800001 % top]
    for bits in alone:
        for sign in (0, top):
            source = np.zeros((2, 20), kind)
            source[1, 17] = bits | sign
            source[0, :] = sign  # a row of zeros of either sign
            check(codec, source.view(view), dtype)


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_ties_and_a_negative_largest(codec, dtype):
    steps = np.arange(-127, 127.5, 0.5)
    for scale in (1.0, 0.25, 2.0**-20, 3.0):
        for sign in (1, -1):
            row = np.concatenate([[-127.0], steps]) * scale * sign
            check(codec, cast(np.stack([row, row[::-1]]), dtype), dtype)


@pytest.mark.parametrize("codec", EACH)
def test_scale_near_every_rounding_border(codec):
    """Largest magnitudes on both sides of where the stored scale rounds, at ordinary and at the smallest exponents."""
    rng = np.random.default_rng(3)
    for exponent in (0, -20, -117, -118, -119, -125, 100, 127):
        scale = np.ldexp(1 + rng.integers(0, 1 << 9, 64) / (1 << 9), exponent - 9).astype(np.float64)
        with np.errstate(over="ignore"):
            amax = (scale * (127 if codec.name == "int8" else 448)).astype(np.float32)
        amax = np.minimum(amax, np.finfo(np.float32).max)
        for toward in (0.0, np.inf):
            near = np.minimum(np.nextafter(amax, np.float32(toward)), np.finfo(np.float32).max)
            for value in near[:8]:
                row = (value * rng.uniform(-1, 1, (3, 19))).astype(np.float32)
                row[1, 5] = -value
                check(codec, row, "F32")


@pytest.mark.parametrize("codec", EACH[1:3])
def test_every_midpoint_of_e4m3_and_its_neighbours(codec):
    table = VALUES[:127].astype(np.float64)
    middle = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    points = np.concatenate([[448.0], middle, up, down, table, -middle, -up, -down, -table]).astype(np.float32)
    for scale in (1.0, 2.0**-30, 2.0**60):
        check(codec, (points * np.float32(scale)).reshape(1, -1), "F32")
        check(codec, (points * np.float32(scale)).reshape(-1, 1), "F32")


@pytest.mark.parametrize("isa", ISAS)
def test_every_bfloat16_at_scale_one(isa):
    """All 65,536 bit patterns as inputs, beside 448, so that the scale is one: only rounding is left."""
    codec = encodings.get("fp8")
    every = np.arange(65536).astype(np.uint16)
    magnitude = np.abs(bf16_to_f32(every))
    inputs = every[magnitude <= 448]
    source = np.zeros((128, 512), np.uint16)
    source[0, ::128] = 0x43E0  # 448
    source[1:].reshape(-1)[: inputs.size] = inputs
    out, expected = codec.allocate(*source.shape), codec.allocate(*source.shape)
    with native.forced(isa):
        cost = codec.encode(source, "BF16", out)
    with native.forced("numpy"):
        assert codec.encode(source, "BF16", expected) == cost
    assert set(out["scales"].reshape(-1).tolist()) == {0x3F80}
    assert np.array_equal(out["codes"], expected["codes"])
    over = every[(magnitude > 448) & np.isfinite(magnitude)]
    check(codec, over.reshape(1, -1), "BF16")


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("where", [(0, 0), (0, 15), (1, 16), (2, 127), (3, 128), (130, 40), (130, 199), (64, 150)])
def test_non_finite_everywhere(codec, dtype, where):
    kind = np.uint32 if dtype == "F32" else np.uint16
    source = cast(gaussian(131, 200), dtype)
    bits = source.view(kind)
    for value in NON_FINITE[dtype]:
        keep = bits[where]
        bits[where] = value
        expected = check(codec, source, dtype)
        assert expected[:3] == (1, *where)
        bits[where] = keep
    bits[where] = NON_FINITE[dtype][0]
    bits[130, 199] = bits[130, 198] = NON_FINITE[dtype][-1]
    assert check(codec, source, dtype)[:3] == (3 if where != (130, 199) else 2, *min(where, (130, 198)))


@pytest.mark.parametrize("codec", EACH)
def test_near_the_largest_float(codec):
    most = np.finfo(np.float32).max
    for value in (most, np.nextafter(most, np.float32(0)), np.float32(3.395e38), np.float32(3.39e38)):
        source = gaussian(131, 150)
        source[130, 149] = -value
        source[2, 7] = value
        check(codec, source, "F32")


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 40)),
        elements=st.floats(width=32, allow_subnormal=True),
    )
)
def test_anything(source):
    for codec in CODECS:
        check(codec, source, "F32")


@pytest.mark.parametrize("codec", EACH)
def test_a_source_at_an_odd_address(codec):
    raw = np.zeros(4 * 3 * 50 + 1, np.uint8)[1:]
    for dtype, view in (("BF16", np.uint16), ("F16", np.float16), ("F32", np.float32)):
        values = cast(gaussian(3, 50), dtype)
        odd = raw[: values.nbytes].view(view).reshape(3, 50)
        odd[...] = values
        assert not odd.flags.aligned
        assert check(codec, odd, dtype) == check(codec, values, dtype)


def test_a_read_only_source():
    source = gaussian(3, 50)
    source.flags.writeable = False
    check(CODECS[0], source, "F32")


def test_subnormals_survive_in_the_process():
    """No kernel, and no library start-up code, may switch the processor to flushing them."""
    assert np.float32(1e-45) * np.float32(1) != 0
    assert np.finfo(np.float32).smallest_normal / np.float32(2) > 0


@pytest.mark.parametrize("isa", ISAS)
def test_threads_share_kernels(isa):
    codec, source = CODECS[1], gaussian(256, 512)
    with native.forced(isa):
        expected = run(codec, source, "F32")
        results = []
        threads = [threading.Thread(target=lambda: results.append(run(codec, source, "F32"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [expected] * 4


# -- q3, q4, q8 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", EACH_GROUPED)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 64), (3, 192), (17, 320), (7, 2048), (3, 7168)])
def test_grouped_shapes(codec, dtype, rows, columns):
    check(codec, cast(gaussian(rows, columns, rows * columns), dtype), dtype)


@pytest.mark.parametrize("codec", [p for p in EACH_GROUPED if "32" in p.id])
def test_grouped_rows_of_an_odd_number_of_groups(codec):
    for rows, columns in ((1, 32), (33, 32), (9, 96), (2, 160)):
        check(codec, gaussian(rows, columns), "F32")


@pytest.mark.parametrize("codec", EACH_GROUPED)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_grouped_any_bits(codec, dtype):
    """Every exponent mixed freely, and groups that keep to one, down to subnormals."""
    rng = np.random.default_rng(8)
    bits, kind = (32, np.uint32) if dtype == "F32" else (16, np.uint16)
    view = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    limit = min(NON_FINITE[dtype]) - 1
    source = rng.integers(0, limit + 1, (20, 320)).astype(kind)
    source |= (rng.integers(0, 2, source.shape) << (bits - 1)).astype(kind)
    check(codec, source.view(view), dtype)
    ceilings = np.linspace(1, limit, 300).astype(np.int64)[:, None]
    for share in (2, 50):  # of the exponents below the ceiling
        graded = rng.integers(ceilings - ceilings // share, ceilings + 1, (300, 64)).astype(kind)
        check(codec, (graded | (rng.integers(0, 2, graded.shape) << (bits - 1)).astype(kind)).view(view), dtype)
        check(codec, graded.view(view), dtype)


def tempers(size):
    """Groups that take other paths: constant, zeros of both signs, one outlier, two values, on a grid, tiny, huge."""
    rng = np.random.default_rng(9)
    normal = rng.standard_normal(size)
    rows = [np.full(size, v) for v in (0.0, -0.0, 0.3, -0.3, 1e-9, -1e-30, 2.0**-126, -(2.0**-149), 1e30, 3.38e38)]
    rows += [
        np.where(np.arange(size) % 2, 0.0, -0.0),
        np.where(np.arange(size) % 2, 1.0, -1.0),
        np.arange(size) % 16 - 8,
    ]
    rows += [np.abs(normal), -np.abs(normal), 1 + normal / 1000, np.round(normal * 4), np.round(normal * 4) / 3]
    rows += [normal * 2.0**p for p in (-149, -140, -130, -126, -120, -80, -24, 20, 60, 100, 124)]
    for place, value in ((0, 5.0), (size - 1, -5.0), (17, 1e30), (3, -1e-20), (5, 3.4e38)):
        for base in (normal * 0.02, np.zeros(size)):
            rows.append(np.where(np.arange(size) == place, value, base))
    rows += [np.where(np.arange(size) == 3, np.nextafter(np.float32(1), np.float32(2)), 1.0)]
    return np.stack(rows).astype(np.float32)


@pytest.mark.parametrize("codec", EACH_GROUPED)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_grouped_tempers(codec, dtype):
    source = cast(tempers(codec.group_size), dtype)
    for row in range(len(source)):  # each alone, and beside others in its register
        check(codec, source[row : row + 1], dtype)
    check(codec, source, dtype)
    check(codec, source[:40].reshape(4, -1), dtype)


@pytest.mark.parametrize("codec", EACH_GROUPED)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("where", [(0, 0), (0, 31), (1, 64), (4, 200), (12, 319)])
def test_grouped_non_finite_everywhere(codec, dtype, where):
    kind = np.uint32 if dtype == "F32" else np.uint16
    source = cast(gaussian(13, 320), dtype)
    bits = source.view(kind)
    for value in NON_FINITE[dtype]:
        keep = bits[where]
        bits[where] = value
        assert check(codec, source, dtype)[:3] == (1, *where)
        bits[where] = keep
    bits[where] = NON_FINITE[dtype][0]
    bits[12, 319] = bits[12, 318] = NON_FINITE[dtype][-1]
    assert check(codec, source, dtype)[:3] == (3 if where != (12, 319) else 2, *min(where, (12, 318)))


@pytest.mark.parametrize("codec", EACH_GROUPED)
def test_grouped_near_the_largest_float(codec):
    most = np.finfo(np.float32).max
    refused = 0
    for value in (most, np.nextafter(most, np.float32(0)), 3.39e38, 3.38e38, 2.5e38, 1.7e38, 1.6e38):
        for other in (0.0, value, -value, -value / 2):
            source = gaussian(3, 128)
            source[1, 40], source[1, 41] = value, other
            refused += len(check(codec, source, "F32")) == 4
    assert 0 < refused < 28


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(GROUPED),
    arrays.arrays(np.float32, (3, 64), elements=st.floats(width=32, allow_subnormal=True)),
)
def test_grouped_anything(codec, source):
    check(codec, source, "F32")


@pytest.mark.parametrize("codec", EACH_GROUPED)
def test_grouped_source_at_an_odd_address(codec):
    raw = np.zeros(4 * 3 * 64 + 1, np.uint8)[1:]
    for dtype, view in (("BF16", np.uint16), ("F16", np.float16), ("F32", np.float32)):
        values = cast(gaussian(3, 64), dtype)
        odd = raw[: values.nbytes].view(view).reshape(3, 64)
        odd[...] = values
        assert not odd.flags.aligned
        assert check(codec, odd, dtype) == check(codec, values, dtype)


# -- what a kernel refuses ---------------------------------------------------------------------------------------------


KERNELS = ["encode_int8", "encode_fp8", "encode_bf16", "encode_affine"]
NUMBERS = {"encode_affine": (4, 64)}
"""What kernels take after their arrays."""


def arguments(name):
    if name == "encode_affine":
        grids = [np.zeros((130, 5), np.uint16) for _ in range(2)]
        return [np.zeros((130, 320), np.float32), np.zeros((130, 40), np.uint32), *grids]
    source = np.zeros((130, 5), np.float32)
    if name == "encode_bf16":
        return [source, np.zeros((130, 5), np.uint16)]
    if name == "encode_int8":
        return [source, np.zeros((130, 5), np.int8), np.zeros((130, 1), np.float32), np.zeros(130, np.int32)]
    return [source, np.zeros((130, 5), np.uint8), np.zeros((2, 1), np.float32)]


@pytest.mark.parametrize("name", KERNELS)
def test_wrong_types_raise_and_nothing_is_converted(name):
    def kernel(*arrays):
        return getattr(_kernels, name)(*arrays, *NUMBERS.get(name, ()))

    kernel(*arguments(name))
    for index in range(len(arguments(name))):
        for wrong in (np.float64, np.int16, np.uint64, np.bool_):
            given_arguments = arguments(name)
            given_arguments[index] = given_arguments[index].astype(wrong)
            with pytest.raises(TypeError):
                kernel(*given_arguments)
        given_arguments = arguments(name)
        given_arguments[index] = given_arguments[index].tolist()
        with pytest.raises(TypeError):
            kernel(*given_arguments)
        given_arguments = arguments(name)
        strided = np.zeros([2 * n for n in given_arguments[index].shape], given_arguments[index].dtype)
        given_arguments[index] = strided[(slice(None, None, 2),) * strided.ndim]
        with pytest.raises(TypeError):
            kernel(*given_arguments)
        if index:
            given_arguments = arguments(name)
            given_arguments[index].flags.writeable = False
            with pytest.raises(TypeError):
                kernel(*given_arguments)


@pytest.mark.parametrize(
    ("name", "index", "shape", "message"),
    [
        ("encode_int8", 1, (129, 5), "codes: rows expected to be 130, found 129"),
        ("encode_int8", 1, (130, 6), "codes: columns expected to be 5, found 6"),
        ("encode_int8", 2, (131, 1), "scales: rows expected to be 130, found 131"),
        ("encode_int8", 2, (130, 2), "scales: columns expected to be 1, found 2"),
        ("encode_int8", 3, (5,), "row_sums: length expected to be 130, found 5"),
        ("encode_fp8", 1, (130, 4), "codes: columns expected to be 5, found 4"),
        ("encode_fp8", 2, (1, 1), "scales: rows expected to be 2, found 1"),
        ("encode_fp8", 2, (2, 2), "scales: columns expected to be 1, found 2"),
        ("encode_bf16", 1, (130, 4), "codes: columns expected to be 5, found 4"),
        ("encode_affine", 0, (130, 96), "source: columns expected to be a multiple of 64, found 96"),
        ("encode_affine", 1, (130, 39), "codes: columns expected to be 40, found 39"),
        ("encode_affine", 1, (129, 40), "codes: rows expected to be 130, found 129"),
        ("encode_affine", 2, (130, 6), "scales: columns expected to be 5, found 6"),
        ("encode_affine", 3, (130, 10), "biases: columns expected to be 5, found 10"),
    ],
)
def test_wrong_shapes_raise_with_both_numbers(name, index, shape, message):
    given_arguments = arguments(name)
    given_arguments[index] = np.zeros(shape, given_arguments[index].dtype)
    with pytest.raises(ValueError, match=message):
        getattr(_kernels, name)(*given_arguments, *NUMBERS.get(name, ()))


@pytest.mark.parametrize(
    ("bits", "group", "message"),
    [
        (2, 64, "bits expected to be 3, 4 or 8, found 2"),
        (5, 64, "bits expected to be 3, 4 or 8, found 5"),
        (4, 16, "group expected to be 32 or 64, found 16"),
    ],
)
def test_wrong_numbers_raise(bits, group, message):
    with pytest.raises(ValueError, match=message):
        _kernels.encode_affine(*arguments("encode_affine"), bits, group)


@pytest.mark.parametrize("name", KERNELS)
def test_wrong_rank_raises(name):
    kernel = getattr(_kernels, name)
    with pytest.raises(TypeError):
        kernel(arguments(name)[0][None], *arguments(name)[1:], *NUMBERS.get(name, ()))


@pytest.mark.parametrize("name", KERNELS)
def test_misaligned_arrays_are_refused_by_the_kernel_itself(name):
    given_arguments = arguments(name)
    shape = given_arguments[0].shape
    odd = np.zeros(given_arguments[0].nbytes + 1, np.uint8)[1:].view(np.float32).reshape(shape)
    with pytest.raises((ValueError, TypeError)):
        getattr(_kernels, name)(odd, *given_arguments[1:], *NUMBERS.get(name, ()))


def test_unknown_instruction_set_raises_and_changes_nothing():
    before = _kernels.isa()
    with pytest.raises(ValueError, match="cannot run sse9"):
        _kernels.set_isa("sse9")
    assert _kernels.isa() == before
    assert _kernels.isas()[0] == "scalar"
