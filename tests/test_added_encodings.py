"""An encoding is one file: with it everything from the plan to the reader knows a new one, written or only read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from kits.added_encodings.grouped import GROUP, Grouped
from kits.added_encodings.twolevel import TwoLevel
from kits.checkpoints import Spec, Tensor, Tensors, write_checkpoint
from kits.conversions import planned, prepare
from typer.testing import CliRunner

from pagestone.convert import commands as converting
from pagestone.convert.report import plan_text
from pagestone.formats import encodings
from pagestone.formats.dtypes import bf16_to_f32, f32_to_bf16
from pagestone.formats.errors import NonFiniteError, PagestoneError, RequestError
from pagestone.formats.manifest import COLUMNS, EXPERTS_TABLE, read_experts
from pagestone.formats.safetensors_header import read_header
from pagestone.reader import commands as reading
from pagestone.reader.container import open_container
from pagestone.validate import commands as validating
from pagestone.validate import plain_reader
from pagestone.validate.verify import verify

SPEC = Spec(hidden=256, intermediate=512, experts=3, family="qwen3_moe", mtp=False)
UP = "model.layers.1.mlp.experts.2.up_proj"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def written() -> Iterator[None]:
    with encodings.registered(TwoLevel):
        yield


@pytest.fixture
def read_only() -> Iterator[None]:
    with encodings.registered(Grouped):
        yield


def command(*words: object) -> str:
    """What a command prints, in an application made while the encoding is known."""
    app = typer.Typer()
    for room in (converting, reading, validating):
        room.register(app)
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# -- written -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "per-expert"])
def test_one_file_adds_a_codec(written, tmp_path, fused):
    """Through the commands: the plan, the container, what verify and inspect say of it, with the source and without."""
    source, out = SPEC.having(fused=fused).write(tmp_path / "s"), tmp_path / "o"
    text = command("prepare-twolevel", source, "-o", out, "--dry-run")
    assert "codec twolevel" in text and "encoded" in text and not out.exists()
    assert "container id" in command("prepare-twolevel", source, "-o", out, "--workers", 2)
    assert verify(out).findings == [] and verify(out, source=source).findings == []
    command("verify", out, "--source", source)
    found = json.loads(command("inspect", out, "--json"))
    assert found["codec"] == "twolevel" and not found["lossless"]
    slots = {s["name"]: s for s in found["layers"][0]["record"]}
    assert slots["gate_proj.superscales"]["dtype"] == "BF16" and slots["gate_proj.superscales"]["shape"] == [512, 1]
    order = [name.partition(".")[2] or name for name in slots]
    assert [*dict.fromkeys(order)] == ["weight", "scales", "superscales", "pad"]  # the codes end at a multiple of 64
    assert 0 < found["layers"][1]["relative_rms_error"] < 0.1
    config = json.loads((out / "config.json").read_bytes())
    assert config["quantization_config"] == {"mode": "twolevel", "block_size": 256}


def test_its_views_values_and_products(written, tmp_path):
    """The reader's matrices hold every role, each where the layout, the metadata and experts.parquet say it lies."""
    source, out, codec = SPEC.write(tmp_path / "s"), tmp_path / "o", TwoLevel()
    prepare(source, out, codec, workers=1)
    rows = read_experts(out / EXPERTS_TABLE, 18)
    of_roles = [f"{role}_{what}" for role in ("codes", "scales", "superscales") for what in ("offset", "bytes")]
    assert [name for name in rows if name not in dict(COLUMNS)] == of_roles
    x = f32_to_bf16(np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32))
    with open_container(out) as container:
        layer = container.layers[1]
        raw = layer.path.read_bytes()
        metadata = json.loads(read_header(layer.path).metadata["pagestone.offsets"])
        for e, part in ((0, "gate"), (2, "up"), (1, "down")):
            weight, matrix = SPEC.matrix(1, part, e), getattr(layer.expert(e), part)
            wanted = codec.allocate(*weight.shape)
            codec.encode_definition(weight, wanted)
            assert [*matrix.stored] == [*wanted] == ["codes", "scales", "superscales"]
            row = next(n for n in range(18) if (rows["file"][n], rows["expert"][n], rows["part"][n])
                       == (layer.entry.file, e, part))  # fmt: skip
            for role, view in matrix.stored.items():
                assert view.array.tobytes() == wanted[role].tobytes()
                at = layer.layout.record_offset(e) + layer.offsets[part, role]
                suffix = {r.name: r.suffix for r in codec.roles(*weight.shape)}[role]
                assert metadata[f"{part}_proj.{suffix}"] == layer.offsets[part, role]
                assert (rows[f"{role}_offset"][row], rows[f"{role}_bytes"][row]) == (at, view.nbytes)
                assert raw[at : at + view.nbytes] == wanted[role].tobytes()
            assert np.array_equal(matrix.decode(), codec.values(wanted, *weight.shape))
        expert = layer.expert(2)
        assert "superscales BF16 [512, 1]" in repr(expert.up) and expert.inner == (expert.gate_up,)
        both = np.concatenate([expert.gate.decode(), expert.up.decode()])
        assert np.array_equal(expert.gate_up.decode(), both)
        exact = bf16_to_f32(x).astype(np.float64) @ both.astype(np.float64).T
        assert np.allclose(expert.gate_up.multiply(x), exact, rtol=0, atol=1e-4 * np.abs(exact).max())
        assert np.array_equal(expert.gate_up.multiply(x)[:, :512], expert.gate.multiply(x))


@pytest.mark.parametrize(("role", "bits", "words"), [
    ("superscales", b"\xc0\x7f", "superscales expected"), ("codes", b"\x00\x00", "codes of 1 to 15")])  # fmt: skip
def test_its_rules_are_verified(written, tmp_path, role, bits, words):
    out = tmp_path / "o"
    prepare(SPEC.write(tmp_path / "s"), out, TwoLevel(), workers=1)
    with open_container(out) as container:
        layer = container.layers[0]
        path, at = layer.path, layer.layout.record_offset(1) + layer.offsets["down", role]
    raw = bytearray(path.read_bytes())
    raw[at : at + 2] = bits
    path.write_bytes(raw)
    found = verify(out).findings
    assert any(f.code == "E1005" and words in f.message and "expert 1" in f.message for f in found), found


def test_who_does_not_know_it_says_so(tmp_path, capsys):
    """The plain reader, which knows the specification alone, and this package without the file."""
    out = tmp_path / "o"
    with encodings.registered(TwoLevel):
        prepare(SPEC.write(tmp_path / "s"), out, TwoLevel(), workers=1)
    assert plain_reader.main(out) == 1
    said = capsys.readouterr().err
    assert "codec 'twolevel'" in said and "bf16, fp8, int8, q3, q4" in said and said.count("\n") == 1
    with pytest.raises(RequestError, match=r"'twolevel'.*E0101"):
        open_container(out)
    assert {f.code for f in verify(out).findings} == {"E0101"}
    assert "twolevel" not in encodings.registry()


# -- only read ---------------------------------------------------------------------------------------------------------


def grouped(weight: np.ndarray, stem: str) -> tuple[Tensors, np.ndarray]:
    """(tensors, the values they stand for) of a matrix, or of matrices [E, R, C]."""
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP)
    scales = np.maximum(np.abs(groups).max(axis=-1) / 127, 2.0**-14).astype("<f4")
    codes = np.rint(groups / scales[..., None]).clip(-127, 127).astype(np.int8)
    values = (codes.astype(np.float32) * scales[..., None]).reshape(weight.shape)
    codes = codes.reshape(weight.shape)
    return {
        f"{stem}_q": Tensor("I8", codes.shape, codes.tobytes()),
        f"{stem}_qscale": Tensor("F32", scales.shape, scales.tobytes()),
    }, values.astype(np.float32)


def source_of(root: Path, fused: bool, change: Any = None) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint whose experts and q_proj of layer 0 are stored so; the values of every matrix by name."""
    tensors: Tensors = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in SPEC.having(fused=fused).tensors().items():
        if ".experts." in name or name == f"{Q}.weight":
            weight = np.random.default_rng(len(values)).standard_normal(tensor.shape).astype(np.float32)
            made, values[name] = grouped(weight, name)
            tensors |= made
        else:
            tensors[name] = tensor
    if change is not None:
        change(tensors)
    config = SPEC.config() | {"quantization_config": {"quant_method": "grouped"}}
    return write_checkpoint(root, tensors, config), values


def expert_values(values: dict[str, np.ndarray], fused: bool, layer: int, e: int, part: str) -> np.ndarray:
    stem = f"model.layers.{layer}.mlp.experts"
    if not fused:
        return values[f"{stem}.{e}.{part}_proj.weight"]
    if part == "down":
        return values[f"{stem}.down_proj"][e]
    return values[f"{stem}.gate_up_proj"][e][512 * (part == "up") :][:512]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "per-expert"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8"])
def test_one_file_adds_a_source(read_only, tmp_path, codec, fused):
    """Its values are what is encoded, experts and dense matrices alike, and nothing of it is left out or copied."""
    root, values = source_of(tmp_path / "s", fused)
    out, maker = tmp_path / "o", encodings.get(codec)
    plan = planned(root, codec)
    text = plan_text(plan, out)
    words = "rounded" if codec == "bf16" else "requantised (grouped: "
    assert words in text and "copied unknown" not in {d.fate for d in plan.dispositions} and not plan.warnings
    assert {d.tensor.name for d in plan.dispositions if d.fate == "decoded"} == {f"{Q}.weight_q", f"{Q}.weight_qscale"}
    prepare(root, out, maker, workers=2)
    assert verify(out).findings == [] and verify(out, source=root).findings == []
    with open_container(out) as container:
        for layer, e, part in ((0, 0, "gate"), (1, 2, "up"), (1, 1, "down")):
            wanted = expert_values(values, fused, layer, e, part)
            stored = maker.allocate(*wanted.shape)
            maker.encode_definition(wanted, stored)
            matrix = getattr(container.layers[layer].expert(e), part)
            assert all(view.array.tobytes() == stored[role].tobytes() for role, view in matrix.stored.items())
        shard = next(out.glob("dense-*.safetensors"))
    entry = next(entry for entry in read_header(shard).entries if entry.name == f"{Q}.weight")
    raw = shard.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert entry.dtype == "BF16" and raw == f32_to_bf16(values[f"{Q}.weight"]).tobytes()


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def with_nan(name: str) -> Any:
    def change(tensors: Tensors) -> None:
        raw = np.frombuffer(tensors[name].data, "<f4").copy()
        raw[5] = np.nan
        tensors[name] = Tensor("F32", tensors[name].shape, raw.tobytes())

    return change


def having(name: str, tensor: Tensor) -> Any:
    return lambda tensors: tensors.update({name: tensor})


FAULTS = {
    "no scale": (without(f"{UP}.weight_qscale"), "E0513", f"{UP}.weight_q"),
    "a scale alone": (without(f"{UP}.weight_q"), "E0508", "model.layers.1.mlp.experts"),
    "another shape": (having(f"{UP}.weight_qscale", Tensor("F32", (512, 4), bytes(8192))), "E0515",
                      f"{UP}.weight_qscale"),
    "a role it has not": (having(f"{UP}.weight_scale", Tensor.of([1.0], "F32")), "E0514", f"{UP}.weight_scale"),
    "two of a role": (having(f"{UP}.packed_q", Tensor("I8", (512, 256), bytes(131072))), "E0512", f"{UP}.packed_q"),
    "a dense one of another shape": (having(f"{Q}.weight_qscale", Tensor("F32", (256, 4), bytes(4096))), "E0515",
                                     f"{Q}.weight_qscale"),
    "a dense scale alone": (without(f"{Q}.weight_q"), "E0513", f"{Q}.weight_qscale"),
    "no number": (with_nan(f"{UP}.weight_qscale"), "E0702", f"{UP}.weight_q"),
    "a dense one that is no number": (with_nan(f"{Q}.weight_qscale"), "E0702", f"{Q}.weight_q"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_its_faults_are_refused(read_only, tmp_path, case):
    change, code, tensor = FAULTS[case]
    root, _ = source_of(tmp_path / "s", False, change)
    with pytest.raises(PagestoneError) as caught:
        prepare(root, tmp_path / "o", encodings.get("int8"), workers=1)
    assert (caught.value.code, caught.value.tensor) == (code, tensor) and caught.value.remedy


def test_without_its_file_it_is_refused_by_name(tmp_path):
    root, _ = source_of(tmp_path / "s", False)
    with pytest.raises(RequestError, match=r"'grouped', which is not read.*E0511"):
        planned(root, "int8")


def test_messages_say_what_is_read(read_only):
    assert encodings.read_names() == "bf16, f16, f32, fp8, int8 or grouped"


def test_what_two_encodings_claim_is_refused(tmp_path):
    class Other(Grouped):
        name = "other"

    root, _ = source_of(tmp_path / "s", False)
    with encodings.registered(Grouped, Other), pytest.raises(RequestError, match=r"grouped and other.*E0530"):
        planned(root, "int8")


def test_two_codecs_of_one_name_are_none():
    with encodings.registered(TwoLevel, TwoLevel), pytest.raises(ValueError, match="twolevel"):
        encodings.registry()


def test_a_written_encoding_without_problems_is_taken_by_itself():
    """The default of passing through: equal name and parameters; others are not."""
    codec = TwoLevel()
    weight = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    stored, out = codec.allocate(4, 256), codec.allocate(4, 256)
    codec.encode_definition(weight, stored)
    cost, kept = codec.write(stored, codec, 4, 256, out)
    assert kept and cost.squared_error == 0 and all(np.array_equal(out[r], stored[r]) for r in out)
    assert codec.takes(Grouped(), 4, 256) == "twolevel stores other codes"
    stored["superscales"][1] = 0x7F80
    with pytest.raises(NonFiniteError, match="superscale"):
        codec.write(stored, codec, 4, 256, out)
