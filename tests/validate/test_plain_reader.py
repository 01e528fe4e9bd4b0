"""The plain reader is short, independent, and agrees with ours on a container made just now."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from kits.conversions import prepare
from kits.vectors import generator

from pagestone.formats import encodings
from pagestone.formats.dtypes import to_f32
from pagestone.formats.errors import DataError
from pagestone.formats.layout import PARTS
from pagestone.reader.container import open_container
from pagestone.validate import plain_reader
from pagestone.validate.verify import verify

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "validate" / "plain_reader.py"


make = generator()


def test_it_is_short():
    """300 lines for experts, 60 for encoded dense matrices."""
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 360


def test_it_imports_nothing_of_ours():
    imported = set()
    for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"numpy", "xxhash"}


ALL = [(name, {}) for name in sorted(encodings.registry())] + [("q3", {"group_size": 32}), ("q4", {"group_size": 32})]


@pytest.mark.parametrize(("codec", "parameters"), ALL)
def test_it_agrees_with_our_reader(tiny, tmp_path, codec, parameters):
    prepare(tiny, tmp_path / "out", encodings.get(codec, parameters), workers=2)
    agrees(tmp_path / "out")


@pytest.mark.parametrize("codec", sorted(encodings.registry()))
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_it_agrees_on_biases(tmp_path, codec, dtype):
    make.write_source(tmp_path / "source", *make.gpt_oss(2, 128, 64, 5), dtype)
    prepare(tmp_path / "source", tmp_path / "out", encodings.get(codec), workers=2)
    assert agrees(tmp_path / "out") == 2 * 3


def agrees(root: Path) -> int:
    """Compare the two readers on every byte and value of a container; how many biases there were."""
    ours, biases = open_container(root), 0
    container_id, layers = plain_reader.read(root)
    assert container_id == ours.container_id
    mine = [*ours.layers.values(), *ours.mtp.values()]
    assert [x.path.name for x in layers] == [x.entry.file for x in mine]
    for plain, layer in zip(layers, mine, strict=True):
        assert (plain.start, plain.stride, plain.count) == (layer.layout.data_start, layer.stride, len(layer))
        for expert in layer:
            assert plain.read(expert.number) == expert.record.tobytes()
            found = plain.decode(expert.number)
            for part in PARTS:
                matrix, bias = getattr(expert, part), found.pop(f"{part}.bias", None)
                assert np.array_equal(found.pop(part).view(np.uint32), matrix.decode().view(np.uint32))
                assert (bias is None) == (matrix.bias is None)
                if bias is not None:
                    biases += 1
                    assert np.array_equal(
                        bias.view(np.uint32), to_f32(matrix.bias.array, matrix.bias.dtype).view("<u4")
                    )
            assert not found
    return biases


def test_its_codec_table_is_complete():
    assert set(plain_reader.CODECS) == set(encodings.registry())


def test_it_exits_1_and_prints_no_traceback(tmp_path):
    done = subprocess.run([sys.executable, str(FILE), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "manifest.json" in done.stderr


def test_a_layer_file_may_say_more_and_its_sidecar_may_not(tmp_path):
    """Keys of others mean nothing in a layer file, and its sidecar does not repeat them: all three readers agree."""
    layer, side = "layers-01.safetensors", "layers-01.rowsum.safetensors"
    said = make.header(layer, lambda t: t["__metadata__"].update(producer="other"))
    repeated = make.header(side, lambda t: t["__metadata__"].update(producer="other"))
    for name, change, refused in (("layer", said, False), ("both", make.both(said, repeated), True)):
        root = tmp_path / name
        shutil.copytree(ROOT / "tests" / "vectors" / "accept" / "int8-small", root)
        change(root)
        make.seal(root)
        assert plain_reader.main(root) == int(refused)
        assert {(f.code, f.file) for f in verify(root).findings} == ({("E0226", side)} if refused else set())
        with pytest.raises(DataError, match="producer") if refused else nullcontext():
            open_container(root).layers[1].expert(0)


def overlapping(table):
    """One tensor where another of its length lies: what is covered twice is missing elsewhere."""
    names = [name for name in table if name != "__metadata__"]
    spans = {name: table[name]["data_offsets"] for name in names}
    one, other = next(
        (a, b) for a in names for b in names if a < b and spans[a][1] - spans[a][0] == spans[b][1] - spans[b][0]
    )
    table[other]["data_offsets"] = list(spans[one])


def fractional(table):
    """An offset with a point, which is the same number and no integer."""
    entry = next(entry for name, entry in table.items() if name != "__metadata__" and entry["data_offsets"][0] == 0)
    entry["data_offsets"][0] = 0.0


@pytest.mark.parametrize("edit", [overlapping, fractional])
def test_a_dense_shard_is_held_to_the_rules_too(tmp_path, edit):
    """Digests that are right excuse nothing."""
    root = tmp_path / "c"
    shutil.copytree(ROOT / "tests" / "vectors" / "accept" / "int8-odd", root)
    (shard,) = root.glob("dense-*.safetensors")
    make.seal(root)
    assert plain_reader.main(root) == 0
    make.header(shard.name, edit)(root)
    make.seal(root)
    assert plain_reader.main(root) == 1 and verify(root).findings
