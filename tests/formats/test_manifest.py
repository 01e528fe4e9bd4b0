"""manifest.json and experts.parquet: what is written reads back, what was altered is refused."""

from __future__ import annotations

import json

import pytest
from kits.manifests import FILES, LAYER, made, refusal, resealed

from pagestone.formats.digests import canonical_json, digest
from pagestone.formats.errors import DataError
from pagestone.formats.manifest import (
    RECORDS,
    FileDigest,
    LayerEntry,
    columns_for,
    read_experts,
    read_manifest,
    write_experts,
)

ROLES = ("codes", "scales")


@pytest.mark.parametrize("partial", [None, (0, 2)])
def test_round_trip(tmp_path, partial):
    """A manifest reads back equal, and is canonical JSON."""
    manifest = made(partial=partial)
    raw = manifest.to_bytes()
    (tmp_path / "manifest.json").write_bytes(raw)
    assert read_manifest(tmp_path / "manifest.json") == manifest
    assert raw == canonical_json(json.loads(raw))
    assert json.loads(raw)["container_id"] == manifest.container_id


def test_order_of_files_does_not_matter():
    """Files finished in any order give the same bytes."""
    assert made().to_bytes() == made(files=dict(reversed(FILES.items()))).to_bytes()


def test_id_covers_contents_only():
    """experts.parquet, the source's facts and the request are no part of the id; every other file is."""
    same = made().container_id
    assert made(files=FILES | {"experts.parquet": FileDigest(9, digest(b"x"))}).container_id == same
    assert made(source={}, partial=(0, 1), include_code=True, merge_unlisted=True).container_id == same
    for name in (RECORDS, "config.json", "layers-00.safetensors", "layers-00.rowsum.safetensors"):
        assert made(files=FILES | {name: FileDigest(1, digest(b"x"))}).container_id != same


@pytest.mark.parametrize("place", [0, 10, 100, 300, -2])
def test_one_changed_byte(tmp_path, place):
    """Whatever byte of a manifest changes, it is refused."""
    raw = bytearray(made().to_bytes())
    raw[place] ^= 1
    (tmp_path / "manifest.json").write_bytes(raw)
    assert refusal(tmp_path / "manifest.json").code in ("E0301", "E0302", "E0303", "E0304")


ENTRIES = json.loads(made().to_bytes())["layers"]
ALTERED = {
    "another version": (("pagestone", {"spec_version": "3"}), "E0302"),
    "a version that is a number": (("pagestone", {"spec_version": 1}), "E0302"),
    "another id": (("container_id", "0" * 32), "E0305"),
    "no codec": (("codec", None), "E0304"),
    "files that are a list": (("files", []), "E0304"),
    "a name with a path": (("files", {"../x": {"bytes": 1, "xxh3_128": "0" * 32}}), "E0306"),
    "a name of the directory above": (("files", {"..": {"bytes": 1, "xxh3_128": "0" * 32}}), "E0306"),
    "an empty name": (("files", {"": {"bytes": 1, "xxh3_128": "0" * 32}}), "E0306"),
    "a digest that is no hexadecimal": (("files", {"x": {"bytes": 1, "xxh3_128": "x"}}), "E0304"),
    "another request": (("request", {"include_code": False}), "E0304"),
    "a request that is a number": (("request", {"include_code": False, "merge_unlisted": 0}), "E0304"),
    "no request": (("request", None), "E0304"),
    "more experts than fit": (("layers", [*ENTRIES[:1], ENTRIES[1] | {"experts": (1 << 20) // 4096 + 1}]), "E0308"),
    "a layer with an unknown field": (("layers", [{"file": "x"}]), "E0304"),
}


@pytest.mark.parametrize("case", ALTERED)
def test_altered_and_resealed(tmp_path, case):
    """A manifest that contradicts itself or is not understood is refused even if its own digest is right."""
    (key, value), code = ALTERED[case]
    (tmp_path / "manifest.json").write_bytes(resealed(json.loads(made().to_bytes()) | {key: value}))
    assert refusal(tmp_path / "manifest.json").code == code


def test_as_many_experts_as_fit(tmp_path):
    """A record takes a page at least; the table of experts has three rows for each."""
    full = LayerEntry("mtp-00.safetensors", "mtp", 0, (1 << 20) // 4096, None)
    files = FILES | {RECORDS: FileDigest(16 * 260, digest(b"5"))}
    (tmp_path / "manifest.json").write_bytes(made(layers=(LAYER, full), files=files).to_bytes())
    assert read_manifest(tmp_path / "manifest.json").matrices == 3 * (4 + 256)


@pytest.mark.parametrize("nbytes", [None, 0, 16 * 8 - 1, 16 * 8 + 1, 16 * 7])
def test_as_many_digests_as_records(tmp_path, nbytes):
    """records.xxh3 is listed with 16 bytes for every expert, no more and no less (E0316)."""
    files = {name: known for name, known in FILES.items() if name != RECORDS}
    if nbytes is not None:
        files[RECORDS] = FileDigest(nbytes, digest(b"5"))
    (tmp_path / "manifest.json").write_bytes(made(files=files).to_bytes())
    error = refusal(tmp_path / "manifest.json")
    assert error.code == "E0316" and "128 bytes" in error.message


def test_digests_by_layer():
    """Layers in the manifest's order, experts in order; another length is refused."""
    raw = bytes(range(128))
    assert made().records(raw) == {
        "layers-00.safetensors": tuple(raw[n : n + 16] for n in (0, 16, 32, 48)),
        "mtp-00.safetensors": tuple(raw[n : n + 16] for n in (64, 80, 96, 112)),
    }
    for wrong in (raw[:-1], raw + b"\0", b""):
        with pytest.raises(ValueError, match=f"found {len(wrong)}"):
            made().records(wrong)


@pytest.mark.parametrize("code", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_the_request_is_recorded(tmp_path, code, merged):
    """Each of the two under its own name."""
    (tmp_path / "manifest.json").write_bytes(made(include_code=code, merge_unlisted=merged).to_bytes())
    found = read_manifest(tmp_path / "manifest.json")
    assert (found.include_code, found.merge_unlisted) == (code, merged)
    raw = json.loads((tmp_path / "manifest.json").read_bytes())
    assert raw["request"] == {"include_code": code, "merge_unlisted": merged}


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"pagestone": 3}', b"[" * 100_000])
def test_no_manifest(tmp_path, raw):
    """Another file of that name is called what it is not."""
    (tmp_path / "manifest.json").write_bytes(raw)
    assert refusal(tmp_path / "manifest.json").code == "E0301"


def columns() -> dict[str, list]:
    kinds = {"string": ["a", "é"], "int32": [1, 2], "int64": [1 << 40, 0], "float64": [0.1, 1e-300]}
    return {name: list(kinds[kind]) for name, kind in columns_for(ROLES)}


def test_experts_round_trip(tmp_path):
    """Every column reads back exactly, doubles included."""
    write_experts(tmp_path / "experts.parquet", [columns()], ROLES)
    assert read_experts(tmp_path / "experts.parquet") == columns()


def test_experts_damaged(tmp_path):
    """A cut or foreign file is refused by name."""
    path = tmp_path / "experts.parquet"
    write_experts(path, [columns()], ROLES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="E0311"):
        read_experts(path)


def test_experts_lacking_a_column(tmp_path):
    """A table without one of the columns is refused naming it."""
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "experts.parquet"
    write_experts(path, [columns()], ROLES)
    pq.write_table(pq.read_table(path).drop_columns(["codes_offset"]), path)
    with pytest.raises(DataError, match="codes_offset"):
        read_experts(path, 2, ROLES)
