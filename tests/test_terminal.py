"""What every command writes for people, where names of tensors, files and directories try to be more than names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.checkpoints import T_BLOCK, Tensor, write_checkpoint
from kits.inference import command, flip

EVIL = "x.\nerror: forged\r\x1b[2J\x7f\x9b31m\u202e\u2066gnp.weight"
SAFE = r"\nerror: forged\r\x1b[2J\x7f\u009b31m\u202e\u2066gnp.weight"
FILE = "notes\u202etxt.md"
DIRECTORY = "out\x1b[2J\x9b\u202e\n"


def evil_source(root: Path, below: str = "") -> Path:
    """A checkpoint with a tensor and a side file so named; the tensor stands below `below`."""
    tensors = T_BLOCK.tensors() | {below + EVIL: Tensor.of([1.0, 2.0])}
    return write_checkpoint(root, tensors, T_BLOCK.config(), side_files={FILE: b"x", "notes.md": b"x"})


def looked_at(capsys: pytest.CaptureFixture[str], *wanted: str) -> tuple[str, str]:
    """What was written since the last look, stdout and stderr; every line of it must be printable."""
    out, err = capsys.readouterr()
    for line in (out + err).split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("error: forged")
    for word in wanted:
        assert word in out + err, (word, out, err)
    return out, err


def test_every_command(tmp_path, capsys):
    """Plan, warnings, outcome, inspect, verify and its findings: lines of printable characters."""
    source, out = evil_source(tmp_path / "s"), tmp_path / DIRECTORY
    assert command("prepare-int8", source, "-o", out, "--dry-run") == 0
    text, _ = looked_at(capsys, r"notes\u202etxt.md")
    assert any(f": x.{SAFE}" in line for line in text.split("\n"))
    assert command("prepare-int8", source, "-o", out) == 0
    _, err = looked_at(capsys, r"out\x1b[2J\u009b\u202e\n: converted")
    assert all(line.startswith("warning: ") for line in err.splitlines()) and SAFE in err and err.count("\n") == 2
    assert command("inspect", out) == 0
    looked_at(capsys, r"out\x1b[2J\u009b\u202e\n: int8")
    assert command("verify", out, "--source", source) == 0
    looked_at(capsys, r"out\x1b[2J\u009b\u202e\n: ok")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    del index["weight_map"][EVIL]
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    flip(out / "notes.md", 0)
    assert command("verify", out) == 1
    looked_at(capsys, SAFE, "error: notes.md: ")


def test_errors(tmp_path, capsys):
    """A refusal that names the tensor, one that names the path, and words that are no command."""
    source = evil_source(tmp_path / DIRECTORY, "model.language_model.layers.0.mlp.experts.")
    assert command("prepare-int8", source, "-o", tmp_path / "o") == 1
    looked_at(capsys, SAFE, r"out\x1b[2J\u009b\u202e\n", "E0504")
    assert command("inspect", tmp_path / DIRECTORY) == 2
    looked_at(capsys, r"out\x1b[2J\u009b\u202e\n", "E0331")
    assert command("\x1b[2J\x9b") == 2
    looked_at(capsys, r"\x1b[2J", "no such command")


def test_json_has_the_names_as_they_are(tmp_path, capsys):
    """Programs get the exact name; JSON's own escapes keep it off the terminal."""
    source = evil_source(tmp_path / "s")
    assert command("prepare-int8", source, "-o", tmp_path / DIRECTORY, "--dry-run", "--json") == 0
    out, _ = looked_at(capsys)
    table = json.loads(out)
    assert EVIL in {d["tensor"] for d in table["dispositions"]}
    assert command("prepare-int8", source, "-o", tmp_path / DIRECTORY, "--json") == 0
    out, err = capsys.readouterr()
    table = json.loads(out)
    assert table["output"] == str(tmp_path / DIRECTORY) and any(EVIL in w for w in table["warnings"])
    assert out.replace("\n", "").isprintable() and err.replace("\n", "").isprintable()
