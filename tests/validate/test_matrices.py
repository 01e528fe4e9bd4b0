"""verify of encoded dense matrices: nothing found where nothing is wrong, every fault found and named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kits.conversions import run
from kits.inference import TINY, flip
from kits.manifests import sealed

from pagestone.convert.checkpoint import CONFIG, INDEX
from pagestone.formats.dense_matrices import PlacedMatrix, read_matrices
from pagestone.formats.manifest import read_manifest
from pagestone.validate.verify import verify

FILE = "matrices-00001-of-00001.safetensors"
Q_PROJ = "model.language_model.layers.3.self_attn.q_proj"


@pytest.fixture(scope="module")
def containers(tmp_path_factory) -> dict[str, Path]:
    """tiny-moe's experts in bf16, which take no time, with every encoding of dense matrices."""
    root = tmp_path_factory.mktemp("dense")
    for dense in ("int8", "fp8", "q8", "q4"):
        run(TINY, root / dense, "bf16", dense=dense)
    return {p.name: p for p in root.iterdir()}


@pytest.fixture
def container(containers, tmp_path) -> Path:
    """The one with int8, to be damaged."""
    return Path(shutil.copytree(containers["int8"], tmp_path / "container"))


def placed(root: Path, name: str = Q_PROJ) -> PlacedMatrix:
    dense = read_manifest(root / "manifest.json").dense
    return next(p for p in read_matrices(root / FILE, dense, FILE) if p.matrix.name == name)


def at(root: Path, role: str, name: str = Q_PROJ) -> int:
    """Where an array of a matrix begins in the file."""
    where = placed(root, name)
    return where.offset + next(s.offset for s in where.record.slots if s.role == role)


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as handle:
        handle.seek(offset)
        handle.write(data)


def found(root: Path, **how) -> list[tuple[str, str, str]]:
    report = verify(root, **how)
    return [(f.code, f.file, f.message) for f in report.findings if f.severity == "error"]


@pytest.mark.parametrize("dense", ["int8", "fp8", "q8", "q4"])
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_wrong(containers, dense, workers):
    """A container as it was made, by itself and against its source."""
    report = verify(containers[dense], source=TINY, workers=workers)
    assert not report.findings and report.counts["dense matrices"] == 26


def test_a_flipped_bit(container):
    """One bit of the codes: the digest, and nothing else where the code is one that may be."""
    flip(container / FILE, at(container, "codes") + 1000)
    codes = {code for code, _, _ in found(container)}
    assert codes <= {"E1001", "E1005"} and "E1001" in codes


FAULTS = {
    "a forbidden code": ("codes", 256 * 200 + 3, b"\x80", "E1005", "rows from 128, counted from there: codes"),
    "a scale of NaN": ("scales", 4 * 300, b"\x00\x00\xc0\x7f", "E1005", "rows from 256, counted from there: scales"),
    "a wrong row sum": ("row_sums", 4 * 511, b"\xff\xff\xff\x7f", "E1005", "rows from 384, counted from there: row"),
}  # fmt: skip


@pytest.mark.parametrize(("role", "offset", "data", "code", "words"), FAULTS.values(), ids=FAULTS)
def test_forbidden_values(container, role, offset, data, code, words):
    """What no container may hold, though every digest is right."""
    write(container / FILE, at(container, role) + offset, data)
    sealed(container)
    hits = [f for f in found(container) if role in ("codes", "scales") or "row sums" in f[2]]
    assert hits and {f[0] for f in hits} == {code}
    assert hits[0][1] == FILE and hits[0][2].startswith(f"{Q_PROJ}, {words}")


def test_a_pad(container):
    """Pads are zeros."""
    where = placed(container)
    pads = [s for s in where.record.slots if s.part is None]
    if not pads:  # q_proj has none: the head has
        where = placed(container, "model.language_model.layers.0.mlp.shared_expert.gate_proj")
        pads = [s for s in where.record.slots if s.part is None]
    write(container / FILE, where.offset + pads[0].offset, b"\x01")
    sealed(container)
    assert [f[0] for f in found(container)] == ["E1006"]


def test_another_header(container):
    """The file of another container, of the same length."""
    raw = bytearray((container / FILE).read_bytes())
    name = b'"lm_head.weight"'
    assert raw.count(name) == 1
    raw[raw.index(name) :][: len(name)] = name
    raw[raw.index(name) : raw.index(name) + len(name)] = b'"lm_head.weighs"'
    (container / FILE).write_bytes(bytes(raw))
    sealed(container)
    assert ("E0342", FILE) in [f[:2] for f in found(container)]


@pytest.mark.parametrize("what", ["lost", "moved", "pads listed"])
def test_the_index(container, what):
    """The index lists the tensors of encoded matrices too, and none of their pads."""
    index = json.loads((container / INDEX).read_bytes())
    code = {"lost": "E1008", "moved": "E1010", "pads listed": "E1009"}[what]
    if what == "lost":
        del index["weight_map"]["lm_head.weight_scale"]
    elif what == "moved":
        index["weight_map"]["lm_head.row_sum"] = "dense-00001-of-00001.safetensors"
    else:
        index["weight_map"]["lm_head.pad"] = FILE
    (container / INDEX).write_text(json.dumps(index))
    sealed(container)
    assert [f[:2] for f in found(container)] == [(code, INDEX)]


def test_a_config_that_lets_others_load_it(container):
    """Without `loadable_by` others take codes for numbers."""
    config = json.loads((container / CONFIG).read_bytes())
    assert config["quantization_config"] == {"loadable_by": "pagestone"} == config["text_config"]["quantization_config"]
    del config["quantization_config"]
    (container / CONFIG).write_text(json.dumps(config))
    sealed(container)
    assert [f[:2] for f in found(container)] == [("E1013", CONFIG)]


# -- against the source ----------------------------------------------------------------------------------------------


def test_other_bytes_than_the_source_gives(container):
    """A code and its row sum changed together: only the source tells."""
    offset = at(container, "codes")
    raw = (container / FILE).read_bytes()
    change = -1 if raw[offset] not in (0x80, 0x81) else 1
    write(container / FILE, offset, bytes([(raw[offset] + change) % 256]))
    sums = at(container, "row_sums")
    total = int.from_bytes(raw[sums : sums + 4], "little", signed=True) + change
    write(container / FILE, sums, total.to_bytes(4, "little", signed=True))
    sealed(container)
    assert found(container) == []
    ((code, file, message),) = found(container, source=TINY)
    assert (code, file) == ("E1028", FILE) and message.startswith(f"{Q_PROJ}.weight")


def test_other_sums_than_the_source_gives(container):
    """What the manifest says encoding cost is compared too."""
    dense = read_manifest(container / "manifest.json").dense
    matrices = (replace(dense.matrices[0], squared_error=0.0), *dense.matrices[1:])
    sealed(container, dense=replace(dense, matrices=matrices))
    assert found(container) == []
    assert [f[:2] for f in found(container, source=TINY)] == [("E1024", "manifest.json")]


def test_a_source_that_gives_other_matrices(container, tmp_path):
    """A matrix of the source whose values are others, and one of another shape."""
    source = Path(shutil.copytree(TINY, tmp_path / "source"))
    index = json.loads((source / "model.safetensors.index.json").read_bytes())["weight_map"]
    shard = source / index["lm_head.weight"]
    raw = shard.read_bytes()
    table = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin = 8 + int.from_bytes(raw[:8], "little") + table["lm_head.weight"]["data_offsets"][0]
    write(shard, begin + 1, bytes([raw[begin + 1] ^ 0x40]))
    codes = [f[0] for f in found(container, source=source)]
    assert codes == ["E1028"]
