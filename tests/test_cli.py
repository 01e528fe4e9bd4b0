"""The command line as others' scripts see it: help, exit codes, JSON on stdout and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from kits.checkpoints import T_BLOCK, T_ORDER, sparse_model
from kits.cli import done, pagestone, refused

import pagestone as package
from pagestone.formats import codecs

COMMANDS = (*(f"prepare-{name}" for name in codecs.registry()), "inspect", "verify")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A source and its int8 container."""
    root = tmp_path_factory.mktemp("cli")
    source = T_BLOCK.write(root / "source", shards=2)
    done("prepare-int8", source, "-o", root / "int8")
    return source, root / "int8"


def test_help_names_every_command():
    """--help lists a command for every codec, and the others."""
    text = done("--help")
    for command in COMMANDS:
        assert command in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("prepare-fp8", {"--output", "--workers", "--layers", "--dry-run", "--force", "--include-code", "--json"}),
        ("verify", {"--source", "--sample", "--json"}),
        ("inspect", {"--json"}),
    ],
)
def test_promised_options(command, options):
    """Each command takes what the README says it takes."""
    assert options <= set(re.findall(r"--[a-z-]+", done(command, "--help")))


def test_version():
    """--version prints the package's version and nothing else."""
    assert done("--version") == f"pagestone {package.__version__}\n"


USAGE = (
    [],
    ["nonsense"],
    ["prepare-int3", "x", "-o", "y"],
    ["prepare-int8", "x"],
    ["prepare-int8", "x", "-o", "y", "--workers", "0"],
    ["verify", "x", "--sample", "0"],
)


@pytest.mark.parametrize("words", USAGE)
def test_usage_errors_are_exit_code_2(words):
    """What cannot be parsed is exit code 2, explained on stderr (or, without any word, by the help)."""
    result = pagestone(*words)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr if words else result.stdout or result.stderr


def test_json_alone_on_stdout(made, tmp_path):
    """With --json every command prints one JSON document to stdout and is silent on stderr."""
    source, container = made
    runs = {
        "dry run": ["prepare-int8", source, "-o", tmp_path / "o", "--dry-run"],
        "convert": ["prepare-fp8", source, "-o", tmp_path / "o"],
        "again": ["prepare-fp8", source, "-o", tmp_path / "o"],
        "inspect": ["inspect", container],
        "verify": ["verify", container, "--source", source],
    }
    tables = {}
    for name, words in runs.items():
        result = pagestone(*words, "--json")
        assert result.returncode == 0 and result.stderr == "", (name, result.stderr)
        tables[name] = json.loads(result.stdout)
    assert tables["convert"]["state"] == "converted" and tables["again"]["state"] == "already there"
    assert tables["convert"]["container_id"] == tables["again"]["container_id"]
    assert re.fullmatch("[0-9a-f]{32}", tables["inspect"]["container_id"])
    assert tables["verify"]["ok"] is True and tables["verify"]["findings"] == []
    assert tables["dry run"]["tensors"]["converted"] == 6


def test_verify_exit_codes(made, tmp_path):
    """verify: 0 for a whole container, 1 with findings for a damaged one, 2 where there is none."""
    source, _ = made
    output = tmp_path / "o"
    done("prepare-int8", source, "-o", output)
    assert done("verify", output, "--source", source, "--sample", "2").endswith("compared with the source\n")
    file = output / "layers-01.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5000] ^= 1
    file.write_bytes(raw)
    result = pagestone("verify", output, "--json")
    table = json.loads(result.stdout)
    assert result.returncode == 1 and table["ok"] is False and table["errors"] >= 1
    assert {f["file"] for f in table["findings"]} == {file.name}
    plain = pagestone("verify", output)
    assert plain.returncode == 1 and file.name in plain.stdout and "Traceback" not in plain.stderr
    refused(pagestone("verify", source), 2, "E0331")


def test_warnings_go_to_stderr(tmp_path):
    """A warning never mixes with the result."""
    source = T_ORDER.having(mtp=False, config_extra={"mtp_num_hidden_layers": 1}).write(tmp_path / "s")
    result = pagestone("prepare-int8", source, "-o", tmp_path / "o", "--json")
    assert result.returncode == 0 and result.stderr.startswith("warning: ")
    assert json.loads(result.stdout)["warnings"]


def test_quiet_without_a_terminal_and_a_bar_with_one(tmp_path):
    """No progress bar goes into a pipe; a terminal on stderr gets one with bytes and a rate, and stdout stays clean."""
    source = sparse_model(tmp_path / "s", layers=4)
    plain = pagestone("prepare-int8", source, "-o", tmp_path / "o")
    assert plain.returncode == 0 and plain.stderr == ""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    command = [sys.executable, "-m", "pagestone", "prepare-fp8", source, "-o", tmp_path / "p", "--json"]
    process = subprocess.Popen(list(map(os.fspath, command)), stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(mine, 65536):
            shown += piece
    except OSError:  # the other end was closed
        pass
    out = process.communicate()[0]
    os.close(mine)
    assert process.returncode == 0 and json.loads(out)["state"] == "converted"
    assert b"prepare-fp8" in shown and b"B/s" in shown


def test_reader_that_goes_away(made):
    """Printing into a pipe nobody reads any more is not an error with a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagestone", "inspect", str(made[1]), "--json"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1)


def test_runs_as_module_and_as_script(made):
    """`pagestone` and `python -m pagestone` are the same program."""
    script = Path(sys.executable).with_name("pagestone")
    if not script.exists():
        pytest.skip("not installed as a script here")
    result = subprocess.run([script, "inspect", made[1]], capture_output=True, text=True, check=True)
    assert result.stdout == done("inspect", made[1])


def test_ctrl_c_in_verify_is_130(tmp_path):
    """Ctrl-C ends any command with code 130 and without a traceback."""
    done("prepare-int8", T_BLOCK.write(tmp_path / "s"), "-o", tmp_path / "c")
    code = (
        "import os, signal, sys\n"
        "from pagestone.validate import verify\n"
        "verify.read_manifest = lambda path: os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.argv = ['pagestone', 'verify', {str(tmp_path / 'c')!r}]\n"
        "from pagestone.cli import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 130 and "Traceback" not in result.stderr, result.stderr
