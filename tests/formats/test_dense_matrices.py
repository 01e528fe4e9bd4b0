"""Encoded dense matrices in the manifest and in their files: what is written reads back, all else is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kits.manifests import FILES, made, refusal, resealed

from pagestone.formats import encodings
from pagestone.formats.dense_matrices import (
    DenseEncoding,
    DenseMatrix,
    float_of,
    float_text,
    matrices_head,
    matrices_metadata,
    read_matrices,
)
from pagestone.formats.digests import digest
from pagestone.formats.errors import DataError
from pagestone.formats.layout import matrix_entries, matrix_record
from pagestone.formats.manifest import FileDigest, read_manifest
from pagestone.formats.safetensors_header import build_header

FIRST, SECOND = "matrices-00001-of-00002.safetensors", "matrices-00002-of-00002.safetensors"
MATRICES = (
    DenseMatrix("lm_head", FIRST, 130, 70, 0.25, 3.0),
    DenseMatrix("model.layers.0.self_attn.q_proj", FIRST, 128, 64, 0.0, 0.0),
    DenseMatrix("model.layers.0.self_attn.é", SECOND, 256, 64, 1e-300, 2.5),
)
DENSE = DenseEncoding("int8", {}, MATRICES)
ROOM = {FIRST: FileDigest(1 << 20, digest(b"m")), SECOND: FileDigest(1 << 20, digest(b"n"))}


def written(tmp_path, dense=DENSE, files=FILES | ROOM):
    path = tmp_path / "manifest.json"
    path.write_bytes(made(dense=dense, files=files).to_bytes())
    return path


def test_round_trip(tmp_path):
    """A manifest with encoded dense matrices reads back equal; without, it has no such field."""
    manifest = read_manifest(written(tmp_path))
    assert manifest.dense == DENSE and manifest == made(dense=DENSE, files=FILES | ROOM)
    assert manifest.dense.encoding == encodings.get("int8")
    assert manifest.dense.files == (FIRST, SECOND) and manifest.dense.of_file(SECOND) == MATRICES[2:]
    assert "dense" not in json.loads(made().to_bytes())


def test_the_encoding_is_in_the_id():
    """Another encoding or other parameters of dense matrices are another container; what they cost is not in it."""
    one = made(dense=DENSE, files=FILES | ROOM)
    cheaper = tuple(replace(m, squared_error=0.0) for m in MATRICES)
    assert replace(one, dense=replace(DENSE, matrices=cheaper)).container_id == one.container_id
    others = [None, replace(DENSE, codec="fp8"), replace(DENSE, parameters={"group_size": 64})]
    assert len({one.container_id, *(replace(one, dense=d).container_id for d in others)}) == 4


@pytest.mark.parametrize("value", [0.0, 0.1, 5e-324, 1.7976931348623157e308])
def test_sums_of_squares(value):
    """A float64 survives as 16 digits."""
    assert float_of(float_text(value)) == value and len(float_text(value)) == 16


@pytest.mark.parametrize(
    "text",
    ["7ff0000000000000", "7ff8000000000001", "8000000000000000", "bff0000000000000", "0", "3FB0000000000000", "x" * 16],
)
def test_what_is_no_sum_of_squares(text):
    """Inf, NaN, a negative number, another length and other digits are refused."""
    with pytest.raises(ValueError, match="expected"):
        float_of(text)


WRONG = {
    "no matrix": replace(DENSE, matrices=()),
    "another encoding": replace(DENSE, codec="bf16"),
    "q3 is none": replace(DENSE, codec="q3", parameters={"group_size": 64}),
    "unknown parameters": replace(DENSE, parameters={"group_size": 64}),
    "one name twice": replace(DENSE, matrices=(MATRICES[0], MATRICES[0], MATRICES[2])),
    "no name": replace(DENSE, matrices=(replace(MATRICES[0], name=""), *MATRICES[1:])),
    "no rows": replace(DENSE, matrices=(replace(MATRICES[0], rows=0), *MATRICES[1:])),
    "negative columns": replace(DENSE, matrices=(replace(MATRICES[0], columns=-1), *MATRICES[1:])),
    "files in disorder": replace(DENSE, matrices=(MATRICES[0], MATRICES[2], MATRICES[1])),
    "second file first": replace(DENSE, matrices=(MATRICES[2], *MATRICES[:2])),
    "another name of a file": replace(DENSE, matrices=(replace(MATRICES[0], file="a.safetensors"), *MATRICES[1:])),
    "a file left out": replace(DENSE, matrices=MATRICES[:2]),
    "none of the matrices": None,
    "more than the file holds": replace(DENSE, matrices=(replace(MATRICES[0], rows=1 << 20), *MATRICES[1:])),
    "columns it cannot hold": DenseEncoding("q4", {"group_size": 64}, MATRICES),
}  # fmt: skip


@pytest.mark.parametrize("dense", WRONG.values(), ids=WRONG)
def test_lists_that_no_files_can_hold(tmp_path, dense):
    """What the list says must be possible, and the files named must be the files listed."""
    assert refusal(written(tmp_path, dense)).code == "E0340"


def test_a_file_that_is_not_listed(tmp_path):
    """A file of matrices that the manifest does not list among its files."""
    assert refusal(written(tmp_path, files=FILES | {FIRST: ROOM[FIRST]})).code == "E0340"
    short = ROOM | {SECOND: FileDigest(4096 + matrix_record(DENSE.encoding, 256, 64).nbytes - 1, digest(b"n"))}
    assert refusal(written(tmp_path, files=FILES | short)).code == "E0340"


@pytest.mark.parametrize(
    ("field", "value"),
    [("codec", 1), ("parameters", []), ("parameters", {"a": True}), ("matrices", {}), ("matrices", [1]),
     ("matrices", None)],
)  # fmt: skip
def test_fields_of_another_type(tmp_path, field, value):
    """Types are checked before anything is made of them."""
    path = written(tmp_path)
    table = json.loads(path.read_bytes())
    table["dense"][field] = value
    path.write_bytes(resealed(table))
    assert refusal(path).code == "E0304"


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", 1), ("file", None), ("rows", "1"), ("rows", True), ("columns", 1.5),
     ("squared_error", "7ff0000000000000"), ("squared_norm", 1), ("more", 1)],
)  # fmt: skip
def test_fields_of_a_matrix(tmp_path, field, value):
    """So are those of every matrix; a field too many is not canonical."""
    path = written(tmp_path)
    table = json.loads(path.read_bytes())
    table["dense"]["matrices"][1][field] = value
    table.pop("digest")
    path.write_bytes(json.dumps(table).encode() if isinstance(value, float) else resealed(table))
    assert refusal(path).code in {"more": ("E0307",)}.get(field, ("E0304",))


def test_dense_is_null(tmp_path):
    """There is no such field where nothing is encoded; null is no other word for it."""
    path = tmp_path / "manifest.json"
    path.write_bytes(resealed(json.loads(made().to_bytes()) | {"dense": None}))
    assert refusal(path).code == "E0304"


# -- files -----------------------------------------------------------------------------------------------------------

SHAPES = [(m.name, m.rows, m.columns) for m in MATRICES[:2]]


def matrices_file(tmp_path, head=None):
    records = sum(matrix_record(DENSE.encoding, r, c).nbytes for _, r, c in SHAPES)
    path = tmp_path / FIRST
    path.write_bytes((matrices_head(DENSE.encoding, SHAPES) if head is None else head) + bytes(records))
    return path


def entries():
    first = matrix_record(DENSE.encoding, *SHAPES[0][1:])
    return [
        *matrix_entries(first, SHAPES[0][0], 0),
        *matrix_entries(matrix_record(DENSE.encoding, *SHAPES[1][1:]), SHAPES[1][0], first.nbytes),
    ]


def test_a_file_of_matrices(tmp_path):
    """Records begin on pages, one after another."""
    path = matrices_file(tmp_path)
    one, two = read_matrices(path, DENSE, FIRST)
    assert (one.matrix, two.matrix) == MATRICES[:2]
    assert one.offset % 4096 == 0 and two.offset == one.offset + one.record.nbytes
    assert two.offset + two.record.nbytes == path.stat().st_size
    assert one.record == matrix_record(DENSE.encoding, 130, 70)


def changed(number, **to):
    """The head of the file with one entry changed."""
    listed = [dict(zip(("name", "dtype", "shape", "begin", "end"), e, strict=True)) for e in entries()]
    listed[number] |= to
    return build_header([tuple(e.values()) for e in listed], matrices_metadata(DENSE.encoding, 2), 4096)


FOREIGN = {
    "another name": (changed(0, name="lm_head.codes"), "E0342"),
    "another type": (changed(0, dtype="U8"), "E0342"),
    "another shape": (changed(0, shape=(70, 130)), "E0342"),
    "scales turned": (changed(2, shape=(1, 130)), "E0342"),
    "another encoding": (build_header(entries(), matrices_metadata(encodings.get("fp8"), 2), 4096), "E0341"),
    "another count": (build_header(entries(), matrices_metadata(DENSE.encoding, 3), 4096), "E0341"),
    "no metadata": (build_header(entries(), {"format": "pt"}, 4096), "E0341"),
    "on no page": (build_header(entries(), matrices_metadata(DENSE.encoding, 2), 64), "E0225"),
    "no safetensors": (b"\x80\x04" + bytes(62), "E0201"),
}


@pytest.mark.parametrize(("head", "code"), FOREIGN.values(), ids=FOREIGN)
def test_other_files(tmp_path, head, code):
    """A header must be the one that the manifest gives."""
    path = matrices_file(tmp_path, head)
    with pytest.raises(DataError) as caught:
        read_matrices(path, DENSE, FIRST)
    assert caught.value.code == code and caught.value.file == str(path) and caught.value.remedy


def test_a_matrix_too_many_or_too_few(tmp_path):
    """The tensors of a file are those of the manifest, no more and no fewer."""
    path = matrices_file(tmp_path)
    for matrices in (MATRICES[:1], (*MATRICES[:2], replace(MATRICES[2], file=FIRST))):
        dense = replace(DENSE, matrices=matrices)
        count = matrices_metadata(dense.encoding, len(matrices))
        path.write_bytes(build_header(entries(), count, 4096) + path.read_bytes()[4096:])
        with pytest.raises(DataError) as caught:
            read_matrices(path, dense, FIRST)
        assert caught.value.code == "E0342"
