"""Conversion: every byte of a container is what the definition, the layout and the source say."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kits.checkpoints import LAYOUTS, SIDE_FILES, T_BLOCK, T_ORDER, T_VARIED, Tensor, write_checkpoint
from kits.containers import Source, assert_is_definition, contents, read_table
from kits.conversions import prepare
from safetensors import safe_open

from pagestone.convert import pipeline
from pagestone.convert.encode import EncodedExpert
from pagestone.convert.outcome import Outcome
from pagestone.convert.plan import Request
from pagestone.convert.prepare import plan_for
from pagestone.convert.publish import open_work
from pagestone.convert.reading import SourceFiles
from pagestone.formats import encodings
from pagestone.formats.dtypes import bf16_to_f32
from pagestone.formats.encodings import EncodeStats
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layout import PARTS
from pagestone.formats.manifest import read_experts, read_manifest
from pagestone.formats.storage import page_buffer
from pagestone.validate.verify import verify


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


CODECS = ("int8", "fp8")
EVERY_CODEC = sorted(encodings.registry())
"""For tests at shapes that every codec can hold."""
SCALE = {"int8": "weight_scale", "fp8": "weight_scale_inv"}
TYPES = {"int8": ("I8", "F32"), "fp8": ("F8_E4M3", "BF16")}
MODELS = {
    "order": T_ORDER,
    "block": T_BLOCK,
    "text": T_ORDER.having(family="qwen3_5_moe_text", fused=False),
    "qwen3_moe": T_BLOCK.having(family="qwen3_moe", fused=False),
    "F16": T_ORDER.having(dtype="F16"),
    "F16 per-expert": T_BLOCK.having(dtype="F16", fused=False),
    "F32": T_ORDER.having(dtype="F32", mtp_fused=False),
}


def run(source: Path, output: Path, codec: str, workers: int = 3, **how) -> Outcome:
    return prepare(source, output, encodings.get(codec), workers=workers, **how)


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_tiny_moe_is_the_definition(tiny, tmp_path, codec):
    """Every record and row sum of tiny-moe equals the NumPy definition byte for byte."""
    run(tiny, tmp_path / "o", codec)
    assert assert_is_definition(tmp_path / "o", tiny, codec) == 80


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("codec", CODECS)
def test_small_models_are_the_definition(tmp_path, codec, model, shift):
    """The same for BF16, F16 and F32 sources of every family, also where the source's data lies at odd offsets."""
    spec = MODELS[model]
    source = spec.write(tmp_path / "s", shards=3, alphabetical=True, shift=shift)
    run(source, tmp_path / "o", codec)
    assert assert_is_definition(tmp_path / "o", source, codec) == spec.experts * len(spec.blocks())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_layers_of_unequal_shape(tmp_path, codec, workers, fused):
    """A worker's buffer holds larger records before smaller ones: nothing of them is left, in pads least of all."""
    spec = T_VARIED.having(fused=fused)
    if codec.startswith("q"):
        spec = spec.having(hidden=64, sizes=(192, 64, 128))
    source = spec.write(tmp_path / "s")
    run(source, tmp_path / "o", codec, workers)
    assert assert_is_definition(tmp_path / "o", source, codec) == 9
    assert verify(tmp_path / "o", source=source).exit_code == 0
    strides = {}
    for file in sorted((tmp_path / "o").glob("layers-0?.safetensors")):
        with safe_open(file, "np") as opened:
            strides[file.name] = int(opened.metadata()["pagestone.stride"])
            names = opened.keys()
            assert any(n.endswith(".pad") for n in names), "the last record of this shape has no pad to leave bytes in"
    assert len(set(strides.values())) > 1, strides


@pytest.mark.parametrize("codec", CODECS)
def test_expert_parts_landed_right(tmp_path, codec):
    """Decoded by hand, each matrix in the container tells the layer, part, expert and row it was planned for."""
    spec = T_ORDER
    run(spec.write(tmp_path / "s"), tmp_path / "o", codec)
    maker = encodings.get(codec)
    for position, (block, number, layer) in enumerate(spec.blocks()):
        table, start = read_table(tmp_path / "o" / f"{block}-{number:02d}.safetensors")
        raw = (tmp_path / "o" / f"{block}-{number:02d}.safetensors").read_bytes()
        for expert, part in [(0, "gate"), (2, "up"), (10, "down"), (11, "gate"), (11, "down")]:
            name = f"{layer}.mlp.experts.{expert}.{part}_proj"
            stored = {}
            rows, columns = spec.shape(part)
            for role, suffix, tensor in zip(
                ("codes", "scales"), ("weight", SCALE[codec]), maker.in_record(rows, columns), strict=True
            ):
                begin, end = table[f"{name}.{suffix}"]["data_offsets"]
                kind = {"I8": "i1", "F32": "<f4", "F8_E4M3": "u1", "BF16": "<u2"}[tensor.dtype]
                stored[role] = np.frombuffer(raw[start + begin : start + end], kind).reshape(tensor.shape)
            decoded = maker.values(stored, rows, columns)
            wanted = spec.matrix(position, part, expert)
            if codec == "int8":  # column 0 is the largest of its row, and int8 keeps that exactly
                assert spec.origin(float(decoded[7, 0])) == (position, part, expert, 7)
            wide = np.abs(decoded - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
            assert wide.max() < 0.07 or (codec == "fp8" and np.median(wide) < 0.07)


@pytest.mark.parametrize("name", ["tiny", "order", "block"])
@pytest.mark.parametrize("codec", CODECS)
def test_opens_in_safetensors(tiny, tmp_path, codec, name):
    """Plain safetensors opens every file; names, types and shapes are as promised, every record is on a page."""
    source = tiny if name == "tiny" else MODELS[name].write(tmp_path / "s")
    output = tmp_path / "o"
    run(source, output, codec)
    modules = Source(source).modules()
    index = json.loads((output / "model.safetensors.index.json").read_bytes())
    listed: dict[str, str] = index["weight_map"]
    seen: dict[str, tuple[str, list[int], str]] = {}
    total = 0
    for file in sorted(output.glob("*.safetensors")):
        table, start = read_table(file)
        assert start % 4096 == 0
        with safe_open(file, "np") as opened:
            for tensor in opened.keys():  # noqa: SIM118
                part = opened.get_slice(tensor)
                assert tensor not in seen
                seen[tensor] = (part.get_dtype(), part.get_shape(), file.name)
                begin, end = table[tensor]["data_offsets"]
                if tensor.endswith("gate_proj.weight") and ".experts." in tensor:
                    assert (start + begin) % 4096 == 0, "a record begins with its gate codes"
                if tensor in listed:
                    total += end - begin
                    assert listed[tensor] == file.name
                else:
                    assert tensor.endswith((".pad", ".pad_a", "row_sum")), tensor
                    if not tensor.endswith("row_sum"):
                        assert part.get_dtype() == "U8" and not opened.get_tensor(tensor).any()
            if file.name.startswith(("layers", "mtp")) and "rowsum" not in file.name:
                meta = opened.metadata()
                assert meta["format"] == "pt" and meta["pagestone.codec"] == codec
                assert (file.stat().st_size - start) == int(meta["pagestone.stride"]) * int(meta["pagestone.experts"])
                assert int(meta["pagestone.stride"]) % 4096 == 0
            if "rowsum" in file.name:
                for tensor in ("gate_up_proj.row_sum", "down_proj.row_sum"):
                    del seen[tensor]  # the same names in every sidecar
    assert total == index["metadata"]["total_size"] and set(listed) <= set(seen)
    tensors = Source(source)
    for prefix, count in modules.items():
        for expert in (0, count - 1):
            for part, matrix in tensors.expert(prefix, expert).items():
                weight = seen[f"{prefix}.{expert}.{part}_proj.weight"]
                scale = seen[f"{prefix}.{expert}.{part}_proj.{SCALE[codec]}"]
                rows, columns = matrix.shape
                grid = [rows, 1] if codec == "int8" else [-(-rows // 128), -(-columns // 128)]
                assert weight[:2] == (TYPES[codec][0], [rows, columns])
                assert scale[:2] == (TYPES[codec][1], grid) and scale[2] == weight[2]


@pytest.mark.parametrize("codec", CODECS)
def test_everything_else_is_byte_for_byte(tmp_path, codec):
    """Dense tensors keep type, shape and bytes; side files are copied; config keeps every field but one."""
    tensors = T_ORDER.tensors() | {
        "odd.nan": Tensor.of([np.nan, np.inf, 1], "F32"),
        "odd.empty": Tensor("BF16", (0, 4), b""),
        "odd.scalar": Tensor("I64", (), b"12345678"),
        "odd.flags": Tensor("BOOL", (3,), b"\1\0\1"),
    }
    source = write_checkpoint(tmp_path / "s", tensors, T_ORDER.config(), shards=3, alphabetical=True, shift=1)
    outcome = run(source, tmp_path / "o", codec)
    result = Source(tmp_path / "o")
    for name, tensor in tensors.items():
        if ".experts." not in name:
            assert result.entry(name) == (tensor.dtype, list(tensor.shape)), name
            assert result.bytes(name) == tensor.data, name
    for name, data in SIDE_FILES.items():
        assert (tmp_path / "o" / name).read_bytes() == data
    config = json.loads((tmp_path / "o" / "config.json").read_bytes())
    stated = config.pop("quantization_config")
    assert config["text_config"].pop("quantization_config") == stated
    assert stated["quant_method"] == {"int8": "compressed-tensors", "fp8": "fp8"}[codec]
    assert config == T_ORDER.config()
    assert any("odd.nan holds 2 NaN or Inf" in w for w in outcome.warnings)


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_workers_and_runs_do_not_matter(tiny, tmp_path, codec):
    """One worker, eight workers and a second run give the same bytes in every file, and so the same id."""
    made = {}
    for name, workers in (("one", 1), ("eight", 8), ("again", 8)):
        made[name] = run(tiny, tmp_path / name, codec, workers).manifest.container_id
    assert len(set(made.values())) == 1
    assert contents(tmp_path / "one") == contents(tmp_path / "eight") == contents(tmp_path / "again")


@pytest.mark.parametrize("model", ["order", "block", "F16", "F32"])
@pytest.mark.parametrize("codec", CODECS)
def test_layout_of_the_source_does_not_matter(tmp_path, codec, model):
    """Fused, per-expert and both mixtures, in one file or many, at any offset, behind links: the same container."""
    shards = {"fused": {}, "per-expert": {"shards": 5, "alphabetical": True}, "main fused": {"shards": 2, "shift": 3}}
    made = {}
    for layout, how in LAYOUTS.items():
        spec = MODELS[model].having(**how)
        options = shards.get(layout, {"links": True, "shards": 2})
        source = spec.write(tmp_path / layout / "snapshot", **options)
        made[layout] = run(source, tmp_path / f"o {layout}", codec).manifest.container_id
    assert len(set(made.values())) == 1, made
    files = [contents(tmp_path / f"o {layout}") for layout in LAYOUTS]
    for other in files[1:]:
        assert other.keys() == files[0].keys()
        differing = {n for n in other if other[n] != files[0][n]}
        assert differing <= {"manifest.json"}, differing  # which tells where the weights came from


@pytest.mark.parametrize("codec", CODECS)
def test_type_of_the_source_does_not_matter(tmp_path, codec):
    """The same values stored as BF16 and as F32 give the same records."""
    records = []
    for dtype in ("BF16", "F32"):
        run(T_BLOCK.having(dtype=dtype).write(tmp_path / dtype), tmp_path / f"o{dtype}", codec)
        records.append((tmp_path / f"o{dtype}" / "layers-01.safetensors").read_bytes())
    assert records[0] == records[1]


def test_isas_do_not_matter(tmp_path, monkeypatch):
    """The definition in NumPy and every kernel this machine runs give the same container."""
    from pagestone.formats import native

    source = T_BLOCK.having(fused=False).write(tmp_path / "s", shift=1)
    for codec in CODECS:
        ids = set()
        for isa in native.available():
            with native.forced(isa):
                ids.add(run(source, tmp_path / f"{codec}-{isa}", codec).manifest.container_id)
        assert len(ids) == 1


def test_only_the_asked_layers(tiny, tmp_path):
    """--layers writes those layers, equal to the whole container's, and marks the manifest."""
    run(tiny, tmp_path / "all", "int8")
    run(tiny, tmp_path / "some", "int8", layers=(1, 3))
    every, some = contents(tmp_path / "all"), contents(tmp_path / "some")
    assert {n for n in every if n not in some} == {
        f"{n}{side}.safetensors" for n in ("layers-00", "layers-03", "mtp-00") for side in ("", ".rowsum")
    }
    for name in ("layers-01.safetensors", "layers-02.rowsum.safetensors"):
        assert every[name] == some[name]
    # a part of a model must not load as the whole: see `stated_config`
    assert json.loads(some["config.json"])["quantization_config"]["loadable_by"] == "pagestone"
    assert "loadable_by" not in json.loads(every["config.json"])["quantization_config"]
    manifest = read_manifest(tmp_path / "some" / "manifest.json")
    assert manifest.partial == (1, 3) and [e.layer for e in manifest.layers] == [1, 2]
    assert set(manifest.files) | {"manifest.json"} == set(some)


def test_experts_table_tells_the_truth(tiny, tmp_path):
    """experts.parquet says where every matrix lies, and what encoding it cost against the source."""
    run(tiny, tmp_path / "o", "fp8")
    table = read_experts(tmp_path / "o" / "experts.parquet")
    source, raw = Source(tiny), contents(tmp_path / "o")
    assert len(table["file"]) == 5 * 16 * 3
    for row in range(0, 240, 37):
        t = {name: column[row] for name, column in table.items()}
        prefix = t["tensor"].split(".experts.")[0] + ".experts"
        weight = source.expert(prefix, t["expert"])[t["part"]]
        assert weight.shape == (t["rows"], t["columns"])
        codes = np.frombuffer(raw[t["file"]], "u1")[t["codes_offset"] :][: t["codes_bytes"]]
        scales = np.frombuffer(raw[t["file"]], "<u2", offset=t["scales_offset"], count=t["scales_bytes"] // 2)
        grid = [-(-s // 128) for s in weight.shape]
        stored = {"codes": codes.reshape(weight.shape), "scales": scales.reshape(grid)}
        decoded = encodings.get("fp8").values(stored, *weight.shape)
        exact = weight.astype(np.float64)
        assert t["squared_error"] == pytest.approx(((exact - decoded) ** 2).sum(), rel=1e-12)
        assert t["squared_norm"] == pytest.approx((exact**2).sum(), rel=1e-12)
    assert bf16_to_f32(scales).min() > 0


@pytest.mark.parametrize("layout", ["fused", "per-expert"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS)
def test_non_finite_weights(tmp_path, codec, value, layout):
    """One NaN or Inf in expert 11 is found, and named with tensor, part, row and column."""
    spec = T_ORDER.having(**LAYOUTS[layout])
    tensors = spec.tensors()
    if layout == "fused":
        name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
        tensors[name] = tensors[name].with_value(value, 11, 48 + 30, 17)
    else:
        name = "model.language_model.layers.1.mlp.experts.11.up_proj.weight"
        tensors[name] = tensors[name].with_value(value, 30, 17)
    source = write_checkpoint(tmp_path / "s", tensors, spec.config())
    with pytest.raises(DataError) as caught:
        run(source, tmp_path / "o", codec)
    text = str(caught.value)
    assert caught.value.code == "E0702" and caught.value.tensor == name
    assert str(source / "model.safetensors") in text
    assert "expert 11" in text and "row 30, column 17" in text and "in up" in text
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_progress_adds_up(tiny, tmp_path):
    """Progress counts every byte read, once."""
    seen = []
    run(tiny, tmp_path / "o", "int8", progress=seen.append)
    size = sum(f.stat().st_size for f in tiny.iterdir())
    assert 0 <= size - sum(seen) < 64 << 10  # headers, config and index are not counted


@pytest.mark.parametrize("what", ["dense", "side file"])
def test_copying_stops(tiny, tmp_path, what):
    """A worker that copies something long stops when another has failed, and does not call its file finished."""
    plan = plan_for(Request(tiny, encodings.get("int8")), tmp_path / "o")
    with open_work(tmp_path / "o") as work:
        work.begin({}, {}, force=False)
        files, seen = SourceFiles(plan.checkpoint.path), []

        def progress(nbytes: int) -> None:
            seen.append(nbytes)
            shared.stop.set()

        shared = pipeline._Shared(plan, work, files, progress)
        hands = pipeline._Hands(pipeline.ExpertReader(files, 1), memoryview(bytearray(1)), memoryview(bytearray(64)))
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pipeline, "PIECE", 64)
                if what == "dense":
                    pipeline._copy_dense(shared, plan.dense[0], hands)
                else:
                    side = next(f for f in plan.side_files if f.rule is None and f.nbytes > 1000)
                    pipeline._copy_file(shared, side.name, side.nbytes, hands)
        finally:
            files.close()
        assert len(seen) == 1 and not work.finished


def test_adding_experts_takes_turns(tiny, tmp_path):
    """Workers that add experts of one layer at once are counted one after another: no note and no expert is lost."""
    plan = plan_for(Request(tiny, encodings.get("bf16")), tmp_path / "o")
    target = plan.layers[0]
    inside, alone = threading.Lock(), []

    class Slow(Counter):
        """Notes that take time to add: two threads that do it at once meet here."""

        def items(self):
            alone.append(inside.acquire(blocking=False))
            time.sleep(0.02)
            if alone[-1]:
                inside.release()
            return super().items()

    with open_work(tmp_path / "o") as work:
        writer = pipeline.LayerWriter(target, work)
        record, start = memoryview(page_buffer(writer.layout.stride)), threading.Barrier(4)
        stats = dict.fromkeys(PARTS, EncodeStats(0.0, 0.0))

        def add(expert: int) -> None:
            start.wait()
            writer.add(expert, record, EncodedExpert(stats=stats, notes=Slow(seen=1)))

        threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert alone == [True] * 4, "two workers were inside at once"
        assert writer._left == target.header.count - 4 and writer._notes == {"seen": 4}
        writer.close()


def test_nothing_is_left_running_or_open(tiny, tmp_path):
    """After a conversion no worker lives and no file is open, whether it succeeded or not."""
    threads = threading.active_count()
    run(tiny, tmp_path / "warm", "int8")
    handles = open_files()
    run(tiny, tmp_path / "o", "int8", workers=8)

    def fail(_: int) -> None:
        raise RuntimeError("stop")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="stop"):
            run(tiny, tmp_path / "p", "int8", workers=8, progress=fail)
    assert open_files() == handles and threading.active_count() == threads


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_source_is_read_not_mapped(tiny, tmp_path):
    """No file of the source is mapped while it is converted."""
    maps = []
    run(tiny, tmp_path / "o", "int8", progress=lambda _: maps.append(Path("/proc/self/maps").read_text()))
    assert maps and not any("tiny-moe" in text for text in maps)


def test_sha256_on_request(tiny, tmp_path):
    """--sha256 adds every file's SHA-256 to the manifest and changes nothing else; without it there is none."""
    plain, asked = run(tiny, tmp_path / "plain", "int8"), run(tiny, tmp_path / "asked", "int8", sha256=True)
    assert plain.manifest.container_id == asked.manifest.container_id
    assert all(f.sha256 is None for f in plain.manifest.files.values())
    for name, known in read_manifest(tmp_path / "asked" / "manifest.json").files.items():
        assert known.sha256 == hashlib.sha256((tmp_path / "asked" / name).read_bytes()).digest(), name
    assert run(tiny, tmp_path / "asked", "int8", sha256=True).state == "already there"
    with pytest.raises(RequestError, match="--sha256"):
        run(tiny, tmp_path / "plain", "int8", sha256=True)
