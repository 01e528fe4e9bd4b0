"""Whatever the process does to subnormal numbers: every codec gives the same bytes, on every instruction set."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import pytest
from kits.checkpoints import Spec, Tensor, write_checkpoint
from kits.containers import contents
from kits.conversions import prepare
from kits.floats import flushing
from kits.quantised import Fp8Spec

from pagestone.formats import encodings, floats, native, products, stats
from pagestone.formats.dtypes import to_f32
from pagestone.formats.encodings.fp8 import Fp8Source
from pagestone.formats.encodings.int8 import Int8Source
from pagestone.formats.encodings.scaled import Scaled, scale_values
from pagestone.formats.errors import MachineError, NonFiniteError
from pagestone.formats.floats import plain_floats, plainly
from pagestone.validate.verify import verify

ISAS = native.available()
CODECS = sorted(encodings.registry())
ROWS, COLUMNS = 160, 192
HALVES = np.full(COLUMNS, 0.5, np.float32)


@cache  # made before anything flushes
def source(dtype: str, seed: int = 0) -> np.ndarray:
    """[160, 192] of `dtype`: every row has a magnitude of its own, down to the smallest subnormal and to zeros."""
    rng = np.random.default_rng(seed)
    smallest = -24 if dtype == "F16" else -149
    size = np.repeat(np.linspace(smallest, smallest + 36, ROWS // 2), 2)
    values = rng.normal(size=(ROWS, COLUMNS)) * 2.0 ** size[:, None]
    values[::16] = 0
    values[1::16, ::2] = 0
    values = values.astype(np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "F16" else values


def everything(codec_name: str, dtype: str) -> list[bytes]:
    """All that a codec makes of `source(dtype)`: arrays, statistics, values, products, problems."""
    codec, weight = encodings.get(codec_name), source(dtype)
    out = codec.allocate(ROWS, COLUMNS)
    cost = codec.encode(weight, dtype, out)
    defined = codec.allocate(ROWS, COLUMNS)
    again = codec.encode_definition(to_f32(weight, dtype), defined)
    x = source("BF16", 1)[:5] | np.uint16(0x1000)  # small tokens, subnormal ones among them
    x[0] &= np.uint16(0x807F)
    results = [codec.matmul(out, x, ROWS, COLUMNS), codec.matmul(out, x, ROWS, COLUMNS, threads=2)]
    results += [codec.matmul(out, x, ROWS, COLUMNS, out=np.empty((5, ROWS), kind)) for kind in (np.uint16, np.float16)]
    results += [codec.matmul_definition(out, x, ROWS, COLUMNS), codec.values(out, ROWS, COLUMNS)]
    texts = [repr((cost, again)), repr([*codec.problems(out, ROWS, COLUMNS)])]
    return [a.tobytes() for a in (*out.values(), *defined.values(), *results)] + [t.encode() for t in texts]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_keeps_subnormals(codec, isa, dtype):
    with native.forced(isa):
        expected = everything(codec, dtype)
        with flushing():
            found = everything(codec, dtype)
            still = floats.kept()
    assert not still, "what the caller had set comes back"
    assert [a == b for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def forbidden(name: str) -> dict[str, np.ndarray]:
    """Stored arrays with a subnormal scale wherever the codec says it must be normal or may be anything."""
    codec = encodings.get(name)
    out = codec.allocate(128, 128)
    codec.encode(np.ones((128, 128), np.float32), "F32", out)
    if "scales" in out:
        out["scales"][0] = 0x0001 if out["scales"].dtype == np.uint16 else np.float32(2.0**-140)
    return out


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_wrong_is_wrong_there_too(codec):
    """A subnormal scale: int8 names it, fp8 and the affine codecs take it for what it is, nobody for a zero."""
    stored = forbidden(codec)
    expected = [*encodings.get(codec).problems(stored, 128, 128)]
    with flushing():
        found = [*encodings.get(codec).problems(stored, 128, 128)]
    assert found == expected and bool(found) == (codec == "int8")


def quantised(kind: Scaled, scale: float) -> dict[str, np.ndarray]:
    codes = np.arange(128 * 128).reshape(128, 128) % 120
    grid = {role.name: role.shape for role in kind.roles(128, 128)}["scales"]
    codes = codes.astype(np.int8 if isinstance(kind, Int8Source) else np.uint8)
    return {"codes": codes, "scales": np.full(grid, scale, np.float32)}


FORMS = [Fp8Source((128, 128)), Fp8Source((1, 128)), Int8Source((1, 128)), Int8Source((128, 128))]


@pytest.mark.parametrize("kind", FORMS, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_quantised_sources(codec, kind):
    """Subnormal scales are neither zero nor lost; a negative one is refused, however small."""

    maker = encodings.get(codec).for_sources([kind])

    def made(matrix: dict[str, np.ndarray]) -> list[bytes]:
        out = maker.allocate(128, 128)
        cost, kept = maker.write(matrix, kind, 128, 128, out)
        facts = repr((cost, kept, kind.zero_scales(matrix))).encode()
        return [kind.values(matrix, 128, 128).tobytes(), facts, *(a.tobytes() for a in out.values())]

    for scale in (2.0**-149, 2.0**-130, 2.0**-126, 1.0):
        matrix = quantised(kind, scale)
        expected = made(matrix)
        with flushing():
            found = made(matrix)
        assert found == expected
    matrix = quantised(kind, -(2.0**-149))
    with flushing(), pytest.raises(NonFiniteError, match="a scale of -"):
        kind.require_sound(matrix, 128, 128)


def test_scales_of_other_types():
    every = np.arange(256).astype(np.uint8)
    halves, bits = np.arange(0, 0x7C00, 7).astype(np.uint16).view(np.float16), np.arange(0, 0x400).astype(np.uint16)
    cases = [(every, "F8_E8M0"), (every, "U8"), (halves, "F16"), (bits, "BF16"), (source("F32"), "F32")]
    expected = [scale_values(*case).tobytes() for case in cases]
    with flushing():
        assert [scale_values(*case).tobytes() for case in cases] == expected


def test_what_codecs_have_in_common():
    """The functions an engine may call by themselves: statistics, and tokens in 8 bits."""
    values = source("F32")
    wide = values.astype(np.float64)

    def found() -> list[bytes]:
        tokens = source("BF16")
        a, scale = products.quantise(products.activations(tokens, COLUMNS))
        sums = products.lane_sum(values, HALVES, products.LANES)
        costs = stats.error_and_norm(values, values * 0), stats.sum_of_squares(wide)
        return [a.tobytes(), scale.tobytes(), sums.tobytes(), repr(costs).encode(), to_f32(tokens, "BF16").tobytes()]

    expected = found()
    with flushing():
        assert found() == expected


# -- the guard itself --------------------------------------------------------------------------------------------------


def test_the_guard():
    assert floats.kept()
    with plain_floats():
        assert floats.kept()
    with flushing():
        assert not floats.kept()
        with plain_floats(), plain_floats():
            assert floats.kept() and np.float32(1e-40) * np.float32(1) > 0
        assert not floats.kept()
        with pytest.raises(ValueError), plain_floats():
            raise ValueError
        assert not floats.kept()
    assert floats.kept()


def test_a_generator_gives_the_thread_back_between_its_values():
    @plainly
    def values():
        yield floats.kept()
        yield floats.kept()

    with flushing():
        found = [(inside, floats.kept()) for inside in values()]
    assert found == [(True, False)] * 2


def test_a_machine_without_a_way_back_is_refused(monkeypatch):
    """No C library to ask: nothing is computed that might be wrong."""
    monkeypatch.setattr(floats, "_c_library", lambda: None)
    weight, out = source("F32"), encodings.get("int8").allocate(ROWS, COLUMNS)
    encodings.get("int8").encode_definition(weight, out)
    with flushing(), pytest.raises(MachineError) as caught:
        encodings.get("int8").encode_definition(weight, out)
    assert caught.value.code == "E0113" and caught.value.remedy


class _Deaf:
    """A C library that takes every call and changes nothing."""

    def fegetenv(self, _: object) -> int:
        return 0

    def fesetenv(self, _: object) -> int:
        return 0


def test_a_library_that_does_not_help_is_noticed(monkeypatch):
    monkeypatch.setattr(floats, "_c_library", _Deaf)
    with flushing(), pytest.raises(MachineError), plain_floats():
        pass


# -- through the pipeline ----------------------------------------------------------------------------------------------


def subnormal_model(root, dtype: str):
    """A checkpoint whose experts hold numbers of every size down to the smallest."""
    spec = Spec(hidden=64, intermediate=64, experts=2, layers=1, mtp=False, dtype=dtype)
    tensors = spec.tensors()
    for name, tensor in tensors.items():
        if ".experts." in name:
            count = int(np.prod(tensor.shape))
            values = np.resize(to_f32(source(dtype), dtype), count).reshape(tensor.shape)
            tensors[name] = Tensor.of(values.astype(np.float64), dtype)
    return write_checkpoint(root, tensors, spec.config())


@pytest.mark.parametrize("isa", ["numpy", ISAS[-1]])
@pytest.mark.parametrize("codec", CODECS)
def test_a_container_is_the_same(tmp_path, codec, isa):
    """Same files, same container id, and `verify --source` agrees, with workers that inherit the setting."""
    root = subnormal_model(tmp_path / "s", "F32")
    with native.forced(isa):
        prepare(root, tmp_path / "plain", encodings.get(codec), workers=2)
        with flushing():
            prepare(root, tmp_path / "flushed", encodings.get(codec), workers=2)
            findings = [f for f in verify(tmp_path / "flushed", source=root).findings if f.code[0] == "E"]
    assert contents(tmp_path / "flushed") == contents(tmp_path / "plain") and not findings


def test_an_fp8_source_is_the_same(tmp_path):
    def smaller(tensors):
        return {
            name: (kind, shape, np.full(shape, 2.0**-140, "<f4").tobytes()) if kind == "F32" else (kind, shape, raw)
            for name, (kind, shape, raw) in tensors.items()
        }

    source = Fp8Spec(hidden=128, intermediate=128, dense=False, scale_dtype="F32", change=smaller).write(tmp_path / "s")
    for codec in ("fp8", "int8", "bf16"):
        prepare(source, tmp_path / codec, encodings.get(codec), workers=1)
        with flushing():
            prepare(source, tmp_path / f"{codec}-flushed", encodings.get(codec), workers=1)
        assert contents(tmp_path / codec) == contents(tmp_path / f"{codec}-flushed")


def test_a_thread_of_ones_own():
    """The setting belongs to a thread; a product in another one does not change it there, nor here."""
    seen = []

    def other():
        with flushing():
            everything("int8", "F32")
            seen.append(floats.kept())

    worker = threading.Thread(target=other)
    worker.start()
    worker.join()
    assert seen == [False] and floats.kept()
