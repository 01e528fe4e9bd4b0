"""The reader: no byte is copied, nothing is read before it is asked for, nothing wrong is given out."""

from __future__ import annotations

import gc
import json
import mmap
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kits.conversions import prepare
from kits.vectors import generator

from pagestone.formats import encodings
from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.layout import PARTS
from pagestone.reader import container as reader
from pagestone.reader.container import View, open_container
from pagestone.reader.errors import PathTypeError
from pagestone.validate.verify import verify

ROOT = Path(__file__).resolve().parents[2]
ACCEPT = ROOT / "tests" / "vectors" / "accept"


make = generator()


@pytest.fixture(scope="session")
def converted(tiny, tmp_path_factory) -> dict[str, Path]:
    """tiny-moe (H = 256, I = 128, 16 experts) in every codec."""
    root = tmp_path_factory.mktemp("reader")
    for codec in encodings.registry():
        prepare(tiny, root / codec, encodings.get(codec), workers=2)
    return {codec: root / codec for codec in encodings.registry()}


def roles_of(container) -> tuple[str, ...]:
    """What its codec stores of a matrix."""
    return tuple(t.name for t in container.layers[0].header.codec.in_record(128, 256))


@pytest.fixture(params=sorted(encodings.registry()))
def container(request, converted):
    return open_container(converted[request.param])


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def mapped_range(path: Path) -> tuple[int, int]:
    """Where the kernel says this file is mapped in our memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            return begin, end
    raise AssertionError(f"{path} is not mapped")


def views_of(expert) -> list[View]:
    matrices = (expert.gate, expert.up, expert.down, expert.gate_up)
    return [v for m in matrices for v in (m.codes, m.scales, m.biases, m.row_sums, m.bias) if v is not None]


# -- zero copies -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_every_view_lies_in_the_mapped_file(container):
    layer = container.layers[1]
    expert = layer.expert(5)
    begin, end = mapped_range(container.path / layer.entry.file)
    ranges = [(begin, end)]
    if layer.entry.sidecar:
        ranges.append(mapped_range(container.path / layer.entry.sidecar))
    views = views_of(expert)
    assert len(views) >= 4 * len(roles_of(container))
    for view in views:
        at = address(view.array)
        assert any(b <= at and at + view.nbytes <= e for b, e in ranges)
    assert address(expert.record) == begin + layer.layout.data_start + 5 * layer.stride
    assert begin % mmap.PAGESIZE == 0 and address(expert.record) % 4096 == 0


def test_views_are_at_the_offsets_of_the_layout(container):
    layer = container.layers[0]
    for number in (0, 7, 15):
        expert = layer.expert(number)
        for part in PARTS:
            for role in roles_of(container):
                view = getattr(getattr(expert, part), role)
                assert address(view.array) == layer.pointer + number * layer.stride + layer.offsets[part, role]
                slot = layer.layout.record.slot(part, role)
                assert (view.shape, view.nbytes, view.dtype) == (slot.shape, slot.nbytes, slot.dtype)


def test_the_bytes_are_the_files(container):
    layer = container.mtp[0]
    raw = (container.path / layer.entry.file).read_bytes()
    for expert in layer:
        start = layer.layout.record_offset(expert.number)
        assert expert.record.tobytes() == raw[start : start + layer.stride]
        for part in PARTS:
            at = start + layer.offsets[part, "codes"]
            codes = getattr(expert, part).codes
            assert codes.array.tobytes() == raw[at : at + codes.nbytes]


def test_gate_up_is_gate_then_up(container):
    expert = container.layers[2].expert(3)
    both, gate, up = expert.gate_up, expert.gate, expert.up
    for role in roles_of(container):
        fused, first, second = (getattr(m, role) for m in (both, gate, up))
        assert fused is not None, "128 divides 128"
        assert address(fused.array) == address(first.array)
        assert address(second.array) == address(first.array) + first.nbytes
        assert fused.nbytes == first.nbytes + second.nbytes
        assert np.array_equal(fused.array, np.concatenate([first.array, second.array]))
    assert (both.rows, both.columns) == (256, 256)
    assert np.array_equal(both.decode(), np.concatenate([gate.decode(), up.decode()]))


def test_row_sums_are_views_of_the_sidecar(converted):
    layer = open_container(converted["int8"]).layers[0]
    sums = {part: view for (part, role), view in layer.beside.items() if role == "row_sums"}
    assert len(sums) == len(layer.beside) and sums["gate_up"].shape == (16, 256) and sums["down"].shape == (16, 256)
    expert = layer.expert(9)
    assert address(expert.gate_up.row_sums.array) == address(sums["gate_up"].array) + 9 * 256 * 4
    assert address(expert.up.row_sums.array) == address(expert.gate.row_sums.array) + 128 * 4
    assert address(expert.down.row_sums.array) == address(sums["down"].array) + 9 * 256 * 4
    for part in (*PARTS, "gate_up"):
        matrix = getattr(expert, part)
        assert matrix.row_sums.dtype == "I32"
        assert np.array_equal(matrix.row_sums.array, matrix.codes.array.sum(axis=1, dtype=np.int32))


def test_fp8_has_no_row_sums(converted):
    layer = open_container(converted["fp8"]).layers[0]
    assert layer.beside == {} and layer.expert(0).gate.row_sums is None


def test_views_are_read_only(container):
    expert = container.layers[0].expert(0)
    for view in views_of(expert):
        assert not view.array.flags.writeable
        with pytest.raises(ValueError):
            view.array.reshape(-1)[0] = 1
    with pytest.raises(ValueError):
        expert.record[0] = 1


def test_views_outlive_the_container(converted):
    container = open_container(converted["int8"])
    view = container.layers[3].expert(11).up.codes
    sums = container.layers[3].expert(11).up.row_sums
    before, sums_before = view.array.copy(), sums.array.copy()
    del container
    gc.collect()
    assert np.array_equal(view.array, before) and np.array_equal(sums.array, sums_before)


def test_no_descriptor_stays_open(converted):
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else None
    if before is None:
        pytest.skip("needs /proc")
    container = open_container(converted["int8"])
    kept = [layer.expert(0) for layer in container.layers.values()]
    after = len(list(Path("/proc/self/fd").iterdir()))
    assert after - before <= 2 * len(kept), "at most the one a map itself holds"


# -- torch -------------------------------------------------------------------------------------------------------------


def test_torch_shares_memory(container, oracle):
    torch = oracle("torch")
    expert = container.layers[0].expert(4)
    kinds = {"I8": torch.int8, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16,
             "I32": torch.int32, "U32": torch.uint32}  # fmt: skip
    for view in views_of(expert):
        tensor = view.torch()
        assert tensor.dtype == kinds[view.dtype] and tuple(tensor.shape) == view.shape
        assert tensor.data_ptr() == address(view.array)
        assert tensor.is_contiguous()


def test_torch_decodes_to_our_values(container, oracle):
    torch = oracle("torch")
    matrix = container.layers[0].expert(4).down
    codec, codes = container.manifest.codec, matrix.codes.torch()
    scales, biases = (None if v is None else v.torch().to(torch.float32) for v in (matrix.scales, matrix.biases))
    if codec in ("q3", "q4", "q8"):
        stream = codes.view(torch.uint8)[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes = (stream.reshape(matrix.rows, matrix.columns, -1).to(torch.int32) << torch.arange(int(codec[1]))).sum(2)
        scales, biases = (v.repeat_interleave(64, 1) for v in (scales, biases))
    elif codec == "fp8":
        scales = scales.repeat_interleave(128, 0)[: matrix.rows].repeat_interleave(128, 1)[:, : matrix.columns]
    values = codes.to(torch.float32) if scales is None else codes.to(torch.float32) * scales
    values = values if biases is None else values + biases
    assert np.array_equal(values.numpy().view(np.uint32), matrix.decode().view(np.uint32))


def test_a_torch_tensor_outlives_its_container(converted, oracle):
    oracle("torch")
    container = open_container(converted["fp8"])
    view = container.layers[0].expert(0).gate.scales
    tensor, before = view.torch(), view.array.copy()
    del container, view
    gc.collect()
    assert np.array_equal(tensor.view(dtype=__import__("torch").int16).numpy().view(np.uint16), before)


def test_writing_through_torch_does_not_change_the_file(converted, tmp_path, oracle):
    oracle("torch")
    root = Path(shutil.copytree(converted["int8"], tmp_path / "copy"))
    container = open_container(root)
    before = (root / container.layers[0].entry.file).read_bytes()
    container.layers[0].expert(0).gate.codes.torch()[0, 0] = 5
    assert (root / container.layers[0].entry.file).read_bytes() == before


def test_reading_does_not_import_torch(converted):
    code = (
        "import sys; from pagestone.reader.container import open_container as o;"
        f"e = o({str(converted['int8'])!r}).layers[0].expert(0); e.gate_up.decode(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- fused scale grids of fp8 ------------------------------------------------------------------------------------------


def fp8_container(root: Path, inter: int, hidden: int = 16) -> Path:
    tensors = make.split_names("model.layers.0.mlp.experts", 2, hidden, inter, 9)
    make.write_source(root / "source", make.qwen3_moe(1, 2), tensors, "BF16")
    prepare(root / "source", root / "out", encodings.get("fp8"), workers=1)
    return root / "out"


@pytest.mark.parametrize("inter", [1, 64, 65, 100, 127, 129, 160, 192, 200, 255])
def test_partial_blocks_have_two_grids(tmp_path, inter):
    """Also where the fused matrix would have as many rows of scales as gate and up together (65 to 127)."""
    expert = open_container(fp8_container(tmp_path, inter)).layers[0].expert(1)
    assert expert.gate_up.scales is None and expert.gate_up.codes.shape == (2 * inter, 16)
    assert expert.gate.scales.shape == expert.up.scales.shape == (-(-inter // 128), 1)


@pytest.mark.parametrize("inter", [128, 256])
def test_whole_blocks_have_one_grid(tmp_path, inter):
    expert = open_container(fp8_container(tmp_path, inter)).layers[0].expert(1)
    assert expert.gate_up.scales.shape == (2 * inter // 128, 1)
    both = np.concatenate([expert.gate.decode(), expert.up.decode()])
    assert np.array_equal(expert.gate_up.decode(), both)


def test_int8_always_has_one_scale_tensor():
    expert = open_container(ACCEPT / "int8-odd").layers[0].expert(1)
    assert expert.gate_up.scales.shape == (42, 1)
    both = np.concatenate([expert.gate.decode(), expert.up.decode()])
    assert np.array_equal(expert.gate_up.decode(), both)


# -- when what is read -------------------------------------------------------------------------------------------------


def test_opening_reads_no_layer_file(converted, tmp_path, monkeypatch):
    root = Path(shutil.copytree(converted["int8"], tmp_path / "copy"))
    for path in root.glob("*.safetensors"):  # same lengths, no contents
        size = path.stat().st_size
        path.unlink()
        with path.open("wb") as file:
            file.truncate(size)

    def forbidden(*_: object) -> None:
        raise AssertionError("a layer was touched")

    monkeypatch.setattr(reader, "read_layer_file", forbidden)
    monkeypatch.setattr(reader, "read_sidecar", forbidden)
    monkeypatch.setattr(reader, "_map", forbidden)
    container = open_container(root)
    assert len(container.layers) == 4 and len(container.layers[0]) == 16 and container.container_id
    with pytest.raises(AssertionError, match="touched"):
        container.layers[0].expert(0)


def test_only_the_layer_touched_is_checked(converted, tmp_path):
    root = Path(shutil.copytree(converted["int8"], tmp_path / "copy"))
    make.flip("layers-02.safetensors", 9)(root)
    container = open_container(root)
    container.layers[0].expert(0)
    with pytest.raises(DataError, match=re.escape("layers-02.safetensors")):
        container.layers[2].expert(0)


def test_a_layer_is_parsed_once(converted, monkeypatch):
    calls: list[Path] = []
    real = reader.read_layer_file
    monkeypatch.setattr(reader, "read_layer_file", lambda p: (calls.append(p), real(p))[1])
    layer = open_container(converted["fp8"]).layers[0]
    for expert in layer:
        expert.gate.decode()
    assert len(calls) == 1


@pytest.mark.parametrize("number", [-1, 16, 10**9])
def test_there_is_no_such_expert(container, number):
    with pytest.raises(IndexError, match=str(number)):
        container.layers[0].expert(number)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_no_directory(tmp_path):
    with pytest.raises(RequestError, match="no such directory"):
        open_container(tmp_path / "nothing")
    (tmp_path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(RequestError, match="found a file"):
        open_container(tmp_path / "manifest.json")


def test_a_directory_without_a_manifest(tmp_path):
    with pytest.raises(RequestError, match="E0331") as caught:
        open_container(tmp_path)
    assert caught.value.exit_code == 2


def test_an_unfinished_conversion(tmp_path):
    (tmp_path / ".pagestone-partial").mkdir()
    with pytest.raises(RequestError, match="unfinished") as caught:
        open_container(tmp_path)
    assert "again" in caught.value.remedy


@pytest.fixture
def small(tmp_path) -> Path:
    return Path(shutil.copytree(ACCEPT / "int8-small", tmp_path / "small"))


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("lossless", 1, "E0304"),
        ("lossless", None, "E0304"),
        ("layers", {}, "E0304"),
        ("layers", [None], "E0304"),
        ("layers", [{"file": "x"}], "E0304"),
        ("files", [], "E0304"),
        ("files", {"config.json": {"bytes": -1, "xxh3_128": "00" * 16}}, "E0304"),
        ("files", {"config.json": {"bytes": 1, "xxh3_128": "00"}}, "E0304"),
        ("files", {"config.json": {"bytes": True, "xxh3_128": "00" * 16}}, "E0304"),
        ("files", {"a\0b": {"bytes": 1, "xxh3_128": "00" * 16}}, "E0306"),
        ("files", {"manifest.json": {"bytes": 1, "xxh3_128": "00" * 16}}, "E0306"),
        ("partial", [1], "E0304"),
        ("partial", [2, 1], "E0304"),
        ("partial", [0, 1, 2], "E0304"),
        ("source", None, "E0304"),
        ("codec", {"name": ["int8"], "parameters": {}}, "E0304"),
        ("codec", {"name": "int8", "parameters": []}, "E0304"),
        ("codec", {"name": "int8", "parameters": {"x": None}}, "E0304"),
        ("pagestone", {"spec_version": 1}, "E0302"),
    ],
)
def test_a_manifest_with_a_wrong_field(small, field, value, code):
    table = json.loads((small / "manifest.json").read_bytes()) | {field: value}
    del table["digest"]
    table["digest"] = make.digest(make.canonical_json(table)).hex()
    (small / "manifest.json").write_bytes(make.canonical_json(table))
    with pytest.raises(DataError) as caught:
        open_container(small)
    assert caught.value.code == code and caught.value.remedy


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"pagestone": 1}'])
def test_a_manifest_that_is_none(small, raw):
    (small / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError, match="E0301"):
        open_container(small)


LAYERS = [
    ("file", "layers-1.safetensors"),
    ("file", "layers-02.safetensors"),
    ("file", "mtp-01.safetensors"),
    ("block", "decoder"),
    ("sidecar", "README.md"),
    ("experts", 0),
]


@pytest.mark.parametrize(("field", "value"), LAYERS)
def test_a_manifest_whose_layer_is_misnamed(small, field, value):
    make.manifest(lambda t: t["layers"][0].update({field: value}))(small)
    with pytest.raises(DataError, match="E0308"):
        open_container(small)


class BytesPath:
    """A path as `os` takes it too, but `Path` does not."""

    def __fspath__(self) -> bytes:
        return b"out"


@pytest.mark.parametrize("path", [None, b"out", 3, 1.5, True, [], object(), BytesPath()])
def test_no_path(path):
    with pytest.raises(PathTypeError, match="the path of a container expected, found") as caught:
        open_container(path)
    assert isinstance(caught.value, RequestError) and isinstance(caught.value, TypeError)
    assert (caught.value.code, caught.value.exit_code) == ("E1253", 2)


@pytest.mark.parametrize(("path", "code"), [("", "E0813"), ("hf://a/b", "E0418"), (Path("https://a/b"), "E0418")])
def test_a_word_that_names_no_directory(path, code, small, monkeypatch):
    """Not even in a container's own directory is an empty word that one."""
    monkeypatch.chdir(small)
    with pytest.raises(RequestError, match=code):
        open_container(path)
    with pytest.raises(RequestError, match=code):
        verify(path)
    assert open_container(".").container_id == open_container(Path()).container_id


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbf", b"\xff\xfe"])
def test_a_manifest_with_a_mark_before_it(small, raw):
    path = small / "manifest.json"
    path.write_bytes(raw + path.read_bytes())
    with pytest.raises(DataError, match="save it as UTF-8 without a byte order mark") as caught:
        open_container(small)
    assert caught.value.code == "E0301"


def test_a_manifest_that_lists_a_layer_twice(small):
    make.manifest(lambda t: t["layers"].append(t["layers"][0]))(small)
    with pytest.raises(DataError, match="E0308"):
        open_container(small)


def test_a_layer_file_in_no_list_of_layers(small):
    shutil.copyfile(small / "layers-01.safetensors", small / "layers-02.safetensors")
    make.manifest(lambda t: t["files"].update({"layers-02.safetensors": t["files"]["layers-01.safetensors"]}))(small)
    with pytest.raises(DataError, match="E0308"):
        open_container(small)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"pagestone.experts":"2"', '"pagestone.experts":"999999999999"'),
        ('"pagestone.hidden":"16"', '"pagestone.hidden":"016"'),
        ('"pagestone.hidden":"16"', '"pagestone.hidden":"-16"'),
        ('"pagestone.hidden":"16"', '"pagestone.hidden":"999999999999"'),
        ('"pagestone.intermediate":"7"', '"pagestone.intermediate":"0"'),
        ('"pagestone.intermediate":"7"', '"pagestone.intermediate":"٧"'),
        ('"pagestone.parameters":"{}"', '"pagestone.parameters":"{ }"'),
        ('"pagestone.parameters":"{}"', '"pagestone.parameters":"[]"'),
        ('"pagestone.parameters":"{}"', '"pagestone.parameters":"' + "[" * 1500 + '"'),
        ('"pagestone.block":"layers"', '"pagestone.block":"decoder"'),
        ('"pagestone.prefix":"model', '"pagestone.prefix":"\\ud800odel'),
        ('[\\"gate_proj\\",', '[\\"\\\\ud800\\",'),
        ('[\\"gate_proj\\",', '[\\"up_proj\\",'),
        ('[\\"gate_proj\\",', '[\\"gate.proj\\",'),
        ('"format":"pt"', '"format":"np"'),
    ],
)
def test_metadata_that_are_not_what_they_must_be(small, old, new):
    make.text("layers-01.safetensors", old, new)(small)
    with pytest.raises(PagestoneError) as caught:
        open_container(small).layers[1].expert(0)
    assert caught.value.code in ("E0204", "E0221", "E0227", "E0222")
    assert str(caught.value).encode("utf-8", "backslashreplace")


def test_a_big_endian_machine(small, monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RequestError, match="E0330"):
        open_container(small)


def test_a_link_to_a_container_is_one(small, tmp_path):
    (tmp_path / "link").symlink_to(small)
    assert open_container(tmp_path / "link").container_id == open_container(small).container_id
