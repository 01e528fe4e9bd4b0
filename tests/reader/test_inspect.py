"""`inspect` says what a container states, and of what it does not state that it is not known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoints import T_BLOCK
from kits.conversions import prepare, run
from kits.inference import TINY, command
from kits.vectors import generator

from pagestone.formats import encodings

ROOT = Path(__file__).resolve().parents[2]


make = generator()


@pytest.fixture
def container(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests" / "vectors" / "accept" / "int8-small", tmp_path / "container"))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"family": "qwen", "expert_dtypes": ["BF16", "F32"]}, "family qwen, experts from BF16, F32"),
        ({}, "family not known, experts from what is not known"),
        ({"family": None, "expert_dtypes": "BF16"}, "family not known, experts from what is not known"),
        ({"family": {"a": 1}, "expert_dtypes": [1, "BF16"]}, "family not known, experts from what is not known"),
        ({"family": "qwen", "expert_dtypes": []}, "family qwen, experts from what is not known"),
    ],
)
def test_facts_about_the_source_are_not_needed(container, capsys, source: dict[str, Any], line: str) -> None:
    """A reader needs none of them, whatever stands there."""
    make.manifest(lambda t: t.update(source=source))(container)
    assert command("inspect", container) == 0
    assert line in capsys.readouterr().out
    assert command("inspect", container, "--json") == 0
    assert json.loads(capsys.readouterr().out)["source"] == source


@pytest.mark.parametrize("norm", [-1.0, float("nan"), float("inf"), 0.0])
def test_an_error_that_is_none(container, capsys, norm: float) -> None:
    """Sums no encoding gives are shown as no error, not as a number, and not as a traceback."""
    make.columns(lambda t: t.update(squared_norm=[norm] * len(t["squared_norm"])))(container)
    make.seal(container)
    assert command("inspect", container, "--json") == 0
    assert [x["relative_rms_error"] for x in json.loads(capsys.readouterr().out)["layers"]] == [None]
    assert command("inspect", container) == 0


def test_it_is_told_in_words(tmp_path, capsys):
    """Parameters are words, and both commands count the same files."""
    for name, begins in (
        ("q4", ": q4, group size 32"),
        ("bf16", ": bf16"),
        ("fp8", ": fp8, block 128, scale dtype BF16"),
    ):
        source = T_BLOCK.write(tmp_path / f"{name}-source")
        prepare(source, tmp_path / name, encodings.get(name, {"group_size": 32} if name == "q4" else {}), workers=1)
        assert command("inspect", tmp_path / name) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{tmp_path / name}{begins}"
        files = sum(1 for p in (tmp_path / name).iterdir() if p.is_file())
        assert any(line.endswith(f" bytes in {files} files") for line in lines)
        assert command("verify", tmp_path / name) == 0
        assert f": ok: {files} files, " in capsys.readouterr().out


def test_encoded_dense_matrices(tmp_path, capsys):
    """Their number, encoding, bytes and error, of all and of each; nothing where there are none."""
    run(TINY, tmp_path / "out", "bf16", dense="q4")
    assert command("inspect", tmp_path / "out", "--json") == 0
    dense = json.loads(capsys.readouterr().out)["dense"]
    assert (dense["codec"], dense["parameters"], len(dense["matrices"])) == ("q4", {"group_size": 64}, 26)
    assert dense["bytes"] + 12288 == (tmp_path / "out" / "matrices-00001-of-00001.safetensors").stat().st_size
    assert 0.05 < dense["relative_rms_error"] < 0.1
    assert all(0.05 < m["relative_rms_error"] < 0.1 for m in dense["matrices"])
    assert command("inspect", tmp_path / "out") == 0
    assert "26 dense matrices in q4, group size 64, " in capsys.readouterr().out
    run(TINY, tmp_path / "keep", "bf16")
    assert command("inspect", tmp_path / "keep", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dense"] is None
