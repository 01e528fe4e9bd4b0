"""The golden vectors: three readers accept what must be accepted and refuse what must be refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from kits.vectors import generator

from pagestone.formats import encodings
from pagestone.formats.dense_matrices import ENCODED, read_matrices
from pagestone.formats.dtypes import VIEWS, to_f32
from pagestone.formats.errors import PagestoneError
from pagestone.formats.layout import PARTS, tensor_name
from pagestone.reader.container import open_container
from pagestone.validate import plain_reader
from pagestone.validate.verify import verify

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors"
ACCEPT = sorted(p.stem for p in (VECTORS / "accept").glob("*.json"))
REJECT = sorted(p.stem for p in (VECTORS / "reject").glob("*.json"))


def load(kind: str, name: str) -> dict:
    return json.loads((VECTORS / kind / f"{name}.json").read_text(encoding="utf-8"))


def changed(name: str, root: Path) -> Path:
    """The directory that a case to be refused describes."""
    case, make = load("reject", name), generator()
    base = make.files_of(VECTORS / "accept" / case["base"])
    return make.write_files(root / name, make.apply(case["patch"], base))


def touch_everything(root: Path) -> None:
    """Open a container and every layer, sidecar and file of encoded dense matrices of it."""
    container = open_container(root)
    for layer in [*container.layers.values(), *container.mtp.values()]:
        layer.expert(len(layer) - 1)
    dense = container.manifest.dense
    for file in () if dense is None else dense.files:
        read_matrices(root / file, dense, file)


def test_there_are_enough():
    assert len(ACCEPT) >= 12 and len(REJECT) >= 90
    twins = [load("accept", name) for name in ACCEPT]
    assert {t["codec"] for t in twins} == set(encodings.registry()), "every codec has a vector"
    assert {t["codec"] for t in twins for x in t["layers"] if x["bias_dtype"]} >= {"bf16", "fp8"}
    assert {t["dense"]["codec"] for t in twins if "dense" in t} == set(ENCODED)
    assert {t["codec"] for t in twins if t["partial"]} >= {"int8", "q4"}
    assert sum(p.stat().st_size for p in VECTORS.rglob("*") if p.is_file()) < 1_300_000


@pytest.mark.parametrize("name", ACCEPT)
def test_our_reader_finds_what_the_twin_says(name):
    twin, container = load("accept", name), open_container(VECTORS / "accept" / name)
    assert container.container_id == twin["container_id"]
    assert container.manifest.codec == twin["codec"] and dict(container.manifest.parameters) == twin["parameters"]
    layers = [*container.layers.values(), *container.mtp.values()]
    assert [x.entry.file for x in layers] == [x["file"] for x in twin["layers"]]
    for layer, wanted in zip(layers, twin["layers"], strict=True):
        found = (layer.layout.data_start, layer.stride, len(layer), layer.header.prefix)
        assert found == (wanted["data_start"], wanted["stride"], wanted["experts"], wanted["prefix"])
        assert [(s.dtype, list(s.shape), s.offset, s.nbytes) for s in layer.layout.record.slots] == [
            (s["dtype"], s["shape"], s["offset"], s["bytes"]) for s in wanted["record"]
        ]
        for expert, values in zip(layer, wanted["values"], strict=True):
            assert xxhash.xxh3_128_hexdigest(expert.record.tobytes()) == values["record_xxh3_128"]
            for part in PARTS:
                matrix = getattr(expert, part)
                same_values(matrix.decode(), values[part])
                if matrix.row_sums is not None:
                    assert matrix.row_sums.array[:4].tolist() == values[part]["first_row_sums"]
                assert (matrix.bias is None) == (wanted["bias_dtype"] is None)
                if matrix.bias is not None:
                    assert matrix.bias.dtype == wanted["bias_dtype"]
                    same_bias(to_f32(matrix.bias.array, matrix.bias.dtype), values[part])


def same_bias(bias: np.ndarray, wanted: dict) -> None:
    bits = np.ascontiguousarray(bias, "<f4").view("<u4")
    assert [f"{b:08x}" for b in bits[:4].tolist()] == wanted["bias_first_f32"]
    assert xxhash.xxh3_128_hexdigest(bits.tobytes()) == wanted["bias_xxh3_128"]


def same_values(decoded: np.ndarray, wanted: dict) -> None:
    bits = np.ascontiguousarray(decoded, "<f4").view("<u4").reshape(-1)
    assert [f"{b:08x}" for b in bits[:4].tolist()] == wanted["first_f32"]
    assert f"{int(bits[-1]):08x}" == wanted["last_f32"]
    assert xxhash.xxh3_128_hexdigest(bits.tobytes()) == wanted["decoded_xxh3_128"]


@pytest.mark.parametrize("name", ACCEPT)
def test_the_plain_reader_finds_what_the_twin_says(name):
    twin = load("accept", name)
    container_id, layers = plain_reader.read(VECTORS / "accept" / name)
    assert container_id == twin["container_id"]
    for layer, wanted in zip(layers, twin["layers"], strict=True):
        assert (layer.path.name, layer.start, layer.stride) == (wanted["file"], wanted["data_start"], wanted["stride"])
        assert [(n, d, list(s), o, b) for n, (d, s, o, b) in layer.slots.items()] == [
            (s["name"], s["dtype"], s["shape"], s["offset"], s["bytes"]) for s in wanted["record"]
        ]
        for expert, values in enumerate(wanted["values"]):
            found = layer.decode(expert)
            assert set(found) == {*PARTS, *(f"{p}.bias" for p in PARTS if wanted["bias_dtype"])}
            for part in PARTS:
                same_values(found[part], values[part])
                if wanted["bias_dtype"]:
                    same_bias(found[f"{part}.bias"], values[part])


@pytest.mark.parametrize("name", ACCEPT)
def test_encoded_dense_matrices_are_what_the_twin_says(name):
    """By the definitions and by the plain reader."""
    root, wanted = VECTORS / "accept" / name, load("accept", name).get("dense")
    dense, plain = open_container(root).manifest.dense, plain_reader.dense(root, plain_reader.read_manifest(root))
    assert (dense is None) == (wanted is None) == (not plain)
    if dense is None:
        return
    assert (dense.codec, dict(dense.parameters)) == (wanted["codec"], wanted["parameters"])
    placed = [p for file in dense.files for p in read_matrices(root / file, dense, file)]
    assert list(plain) == [p.matrix.name for p in placed] == [m["name"] for m in wanted["matrices"]]
    for p, want in zip(placed, wanted["matrices"], strict=True):
        found = (p.matrix.file, p.matrix.rows, p.matrix.columns, p.offset, p.record.nbytes)
        assert found == tuple(want[key] for key in ("file", "rows", "columns", "offset", "bytes"))
        assert [(s.suffix, s.dtype, list(s.shape), s.offset, s.nbytes) for s in p.record.slots] == [
            (s["name"], s["dtype"], s["shape"], s["offset"], s["bytes"]) for s in want["record"]
        ]
        raw = (root / p.matrix.file).read_bytes()
        stored = {
            s.role: np.frombuffer(raw[p.offset + s.offset :][: s.nbytes], VIEWS[s.dtype]).reshape(s.shape)
            for s in p.record.stored
        }
        same_values(dense.encoding.values(stored, p.matrix.rows, p.matrix.columns), want)
        same_values(plain[p.matrix.name], want)


@pytest.mark.parametrize("name", ACCEPT)
def test_verify_has_nothing_to_say(name):
    report = verify(VECTORS / "accept" / name)
    assert report.findings == [] and report.exit_code == 0


@pytest.mark.parametrize("name", ACCEPT)
def test_plain_safetensors_reads_every_file(name):
    safe_open = pytest.importorskip("safetensors").safe_open
    container = open_container(VECTORS / "accept" / name)
    for layer in [*container.layers.values(), *container.mtp.values()]:
        slots = layer.layout.record.slots
        with safe_open(VECTORS / "accept" / name / layer.entry.file, "np") as file:
            assert len(file.keys()) == len(slots) * len(layer)
            for expert in layer:
                for slot in slots:
                    tensor = tensor_name(layer.header.prefix, expert.number, layer.header.part_names, slot)
                    assert file.get_slice(tensor).get_shape() == list(slot.shape)
                    if slot.dtype not in ("BF16", "F8_E4M3"):  # NumPy has neither
                        raw = expert.record[slot.offset : slot.offset + slot.nbytes]
                        assert file.get_tensor(tensor).tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", REJECT)
def test_opening_refuses_or_leaves_it_to_verify(name, tmp_path):
    wanted = load("reject", name)["refused_by"]["open"]
    root = changed(name, tmp_path)
    if wanted is None:
        touch_everything(root)
        return
    with pytest.raises(PagestoneError) as caught:
        touch_everything(root)
    assert caught.value.code == wanted and caught.value.remedy
    assert caught.value.exit_code in (1, 2)


@pytest.mark.parametrize("name", REJECT)
def test_verify_finds_the_fault_and_no_other(name, tmp_path):
    case = load("reject", name)
    report = verify(changed(name, tmp_path))
    found = sorted({f.code for f in report.findings if f.severity == "error"})
    assert found == sorted(case["refused_by"]["verify"]), [f.text() for f in report.findings]
    assert report.exit_code == 1


@pytest.mark.parametrize("name", REJECT)
def test_the_plain_reader_refuses(name, tmp_path, capsys):
    wanted = load("reject", name)["refused_by"]["plain_reader"]
    assert plain_reader.main(changed(name, tmp_path)) == int(wanted), capsys.readouterr()


def test_every_case_is_refused_by_somebody():
    for name in REJECT:
        refused = load("reject", name)["refused_by"]
        assert refused["verify"], name


def test_the_committed_vectors_are_what_the_script_makes(capsys):
    assert generator().main(["--check"]) == 0, capsys.readouterr().err


def test_the_script_refuses_to_overwrite_silently(tmp_path, monkeypatch, capsys):
    make = generator()
    monkeypatch.setattr(make, "VECTORS", tmp_path)
    monkeypatch.setattr(make, "ACCEPT", {"int8-small": make.ACCEPT["int8-small"]})
    monkeypatch.setattr(make, "REJECT", {"file-missing": make.REJECT["file-missing"]})
    assert make.main([]) == 0 and make.main(["--check"]) == 0
    readme = tmp_path / "accept" / "int8-small" / "README.md"
    before = readme.read_bytes()
    readme.write_bytes(b"other")
    assert make.main(["--check"]) == 1 and make.main([]) == 1
    assert readme.read_bytes() == b"other", "nothing was overwritten"
    assert "README.md: not what is made" in capsys.readouterr().err
    assert make.main(["--overwrite"]) == 0
    assert readme.read_bytes() == before


def test_the_plain_reader_is_a_script():
    command = [sys.executable, "validate/plain_reader.py", "tests/vectors/accept/int8-odd"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == load("accept", "int8-odd")["container_id"] and len(lines) == 3
