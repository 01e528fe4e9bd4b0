"""`--dense`: which matrices are encoded, and that their bytes are the definition's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from kits.containers import Source, contents, read_table
from kits.conversions import planned, run
from kits.inference import TINY

from pagestone.formats.dense_matrices import BAND, read_matrices
from pagestone.formats.dtypes import VIEWS
from pagestone.formats.errors import RequestError
from pagestone.formats.layout import CODES
from pagestone.formats.manifest import read_manifest

STAYS = ("embed_tokens", "norm", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b", "conv1d", "A_log",
         "dt_bias", "mtp.", "visual.")  # fmt: skip


def stored(container: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of an encoded matrix by role, as they lie in its file."""
    dense = read_manifest(container / "manifest.json").dense
    file = next(m.file for m in dense.matrices if m.name == name)
    raw = (container / file).read_bytes()
    placed = next(p for p in read_matrices(container / file, dense, file) if p.matrix.name == name)
    assert not any(any(raw[placed.offset + s.offset :][: s.nbytes]) for s in placed.record.slots if s.part is None)
    return {
        s.role: np.frombuffer(raw[placed.offset + s.offset :][: s.nbytes], VIEWS[s.dtype]).reshape(s.shape)
        for s in placed.record.stored
    }


def assert_defined(container: Path, source: Path) -> int:
    """Every encoded matrix is what the definition makes of the source's, and so are its sums; how many there are."""
    dense = read_manifest(container / "manifest.json").dense
    tensors = Source(source)
    for m in dense.matrices:
        weight = tensors.weight(f"{m.name}.weight")
        assert weight.shape == (m.rows, m.columns)
        want = dense.encoding.allocate(m.rows, m.columns)
        dense.encoding.encode_definition(np.ascontiguousarray(weight), want)
        have = stored(container, m.name)
        assert have.keys() == want.keys()
        for role in want:
            assert np.array_equal(have[role], want[role]), (m.name, role)
        error = norm = 0.0
        for first in range(0, m.rows, BAND):
            band = np.ascontiguousarray(weight[first : first + BAND])
            stats = dense.encoding.encode_definition(band, dense.encoding.allocate(*band.shape))
            error, norm = error + stats.squared_error, norm + stats.squared_norm
        assert (m.squared_error, m.squared_norm) == (error, norm)
    return len(dense.matrices)


@pytest.mark.parametrize("dense", ["int8", "fp8", "q4"])
def test_tiny_moe(tmp_path, dense):
    """Every matrix that is encoded is the definition's; every other tensor is as with `keep`."""
    run(TINY, tmp_path / "keep", "int8")
    run(TINY, tmp_path / "out", "int8", dense=dense)
    assert assert_defined(tmp_path / "out", TINY) == 26
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    encoded = {m.name for m in manifest.dense.matrices}
    assert not [name for name in encoded for word in STAYS if word in f"{name}."]
    kept, _ = read_table(tmp_path / "keep" / "dense-00001-of-00001.safetensors")
    left, _ = read_table(tmp_path / "out" / "dense-00001-of-00001.safetensors")
    assert kept.keys() - left.keys() == {f"{name}.weight" for name in encoded}
    old, new = Source(tmp_path / "keep"), Source(tmp_path / "out")
    assert all(old.bytes(name) == new.bytes(name) for name in left if name != "__metadata__")
    same = [n for n in contents(tmp_path / "keep") if n.startswith(("layers-", "mtp-", "records", "experts"))]
    assert same and all(contents(tmp_path / "keep")[n] == contents(tmp_path / "out")[n] for n in same)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert index["lm_head.weight"] == "matrices-00001-of-00001.safetensors"
    assert not [name for name in index if name.endswith((".pad", ".pad_a"))]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_no_byte(tmp_path, workers):
    """Nothing depends on how many workers there are."""
    run(TINY, tmp_path / "one", "q4", dense="int8", workers=1)
    run(TINY, tmp_path / "more", "q4", dense="int8", workers=workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "more")


def test_keep_is_the_default():
    """Nothing is encoded unless it is asked for."""
    plan = planned(TINY)
    assert plan.matrices == () and plan.dense_codec is None and plan.files == planned(TINY, dense="keep").files


def test_unknown_words():
    """A word that is no encoding of dense matrices."""
    for word in ("q3", "bf16", "", "INT8"):
        with pytest.raises(RequestError) as caught:
            planned(TINY, dense=word)
        assert caught.value.code == "E0621" and caught.value.exit_code == 2


def test_codes_lie_on_pages(tmp_path):
    """Every record begins on a page, what follows the codes at a multiple of 64."""
    run(TINY, tmp_path / "out", "bf16", dense="fp8")
    dense = read_manifest(tmp_path / "out" / "manifest.json").dense
    for placed in read_matrices(tmp_path / "out" / dense.files[0], dense, dense.files[0]):
        assert placed.offset % 4096 == 0 and placed.record.slot(CODES).offset == 0
        assert placed.record.slot("scales").offset % 64 == 0
