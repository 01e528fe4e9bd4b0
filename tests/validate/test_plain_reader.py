"""The plain reader is short, independent, and agrees with ours on a container made just now."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagestone.convert.prepare import prepare
from pagestone.formats import codecs
from pagestone.formats.layout import PARTS
from pagestone.reader.container import open_container
from pagestone.validate import plain_reader

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "validate" / "plain_reader.py"


def test_it_is_short():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 200


def test_it_imports_nothing_of_ours():
    imported = set()
    for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"numpy", "xxhash"}


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_it_agrees_with_our_reader(tiny, tmp_path, codec):
    prepare(tiny, tmp_path / "out", codecs.get(codec), workers=2)
    ours = open_container(tmp_path / "out")
    container_id, layers = plain_reader.read(tmp_path / "out")
    assert container_id == ours.container_id
    mine = [*ours.layers.values(), *ours.mtp.values()]
    assert [x.path.name for x in layers] == [x.entry.file for x in mine]
    for plain, layer in zip(layers, mine, strict=True):
        assert (plain.start, plain.stride, plain.count) == (layer.layout.data_start, layer.stride, len(layer))
        for expert in layer:
            assert plain.read(expert.number) == expert.record.tobytes()
            for part, values in plain.decode(expert.number).items():
                assert part in PARTS
                decoded = getattr(expert, part).decode()
                assert np.array_equal(values.view(np.uint32), decoded.view(np.uint32))


def test_its_codec_table_is_complete():
    assert set(plain_reader.CODECS) == set(codecs.registry())


def test_it_exits_1_and_prints_no_traceback(tmp_path):
    done = subprocess.run([sys.executable, str(FILE), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "manifest.json" in done.stderr
