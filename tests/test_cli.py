"""The command line as others' scripts see it: help, exit codes, JSON on stdout and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kits import inference
from kits.checkpoints import T_BLOCK, T_ORDER, sparse_model
from kits.cli import done, pagestone, refused

import pagestone as package
from pagestone import cli
from pagestone.formats import encodings
from pagestone.validate import commands as validate_commands

COMMANDS = (*(f"prepare-{name}" for name in encodings.registry()), "inspect", "verify")


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


EVERY = tuple(sorted(cli.COMMANDS))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "missing"),
        (("a", "b", "c"), ""),
        (("--bogus", "x"), "no such option: --bogus"),
        (("x", "--no\x1b[2J"), "no such option: --no\\x1b[2J"),
    ],
)
@pytest.mark.parametrize("command", EVERY)
def test_what_cannot_be_parsed_has_the_form_of_every_error(command, words, complaint, capsys):
    """Of every command: one message, what to do, exit code 2."""
    assert inference.command(command, *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"error: [^\n]+ \(E0008\)\n  what to do: see: pagestone [a-z0-9-]+ --help\n", err)
    assert complaint in err and f"pagestone {command} --help" in err and len(EVERY) > 10


@pytest.mark.parametrize(
    "words", [["nonsense"], ["--bogus"], ["verify", "x", "--sample", "a"], ["inspect", "x", "--json=1"]]
)
def test_other_words_that_are_none(words, capsys):
    assert inference.command(*words) == 2
    assert re.fullmatch(r"error: [^\n]+ \(E0008\)\n  what to do: [^\n]+ --help\n", capsys.readouterr().err)


@pytest.mark.parametrize(("word", "code"), [("", "E0813"), ("hf://a/b", "E0418"), ("https://a/b", "E0418")])
@pytest.mark.parametrize(
    "words",
    [["inspect", "?"], ["verify", "?"], ["verify", "x", "--source", "?"], ["run", "?", "--prompt", "x"], ["chat", "?"],
     ["run", "x", "--prompt", "x", "--tokenizer", "?"], ["verify-logits", "?"], ["verify-logits", "x", "--source", "?"],
     ["verify-logits", "x", "--tokenizer", "?"], ["compare", "?", "--source", "x"], ["compare", "x", "--source", "?"],
     ["compare", "x", "--source", "x", "--tokenizer", "?"], ["prepare-q4", "?", "-o", "x"],
     ["prepare-q4", "x", "-o", "?"]],
)  # fmt: skip
def test_a_word_that_names_no_directory(words, word, code, capsys, tmp_path, monkeypatch):
    """Wherever a command takes a directory: it is not the one we are in, and nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    assert inference.command(*(word if w == "?" else w for w in words)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and f"({code})" in text and "what to do: " in text
    assert not list(tmp_path.iterdir())


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
    plain = pagestone("prepare-int8", T_BLOCK.write(tmp_path / "t"), "-o", tmp_path / "o")
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


# -- streams, numbers, and what nobody foresaw -------------------------------------------------------------------------


def shell(line: str, *words: str | Path, **how: Any) -> subprocess.CompletedProcess[bytes]:
    """`pagestone WORDS` by a shell that redirects as `line` says, `$@` being the command; output as bytes."""
    command = [sys.executable, "-m", "pagestone", *map(os.fspath, words)]
    return subprocess.run(["bash", "-c", line, "bash", *command], capture_output=True, check=False, **how)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams(made, closed):
    """A stream that the caller closed is as /dev/null: the work is done and the exit code tells how it went."""
    assert shell(f'"$@" {closed}', "verify", made[1]).returncode == 0
    assert shell(f'"$@" {closed}', "verify", made[0]).returncode == 2


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """What a library says on stderr must not land in a container: 0, 1 and 2 are taken before anything is opened."""
    code = (
        "import os, sys\n"
        "from pagestone import cli\n"
        "def app(**how):\n"
        "    open(sys.argv[1], 'w').write(repr([os.readlink(f'/proc/self/fd/{n}') for n in range(3)]))\n"
        "    print('x'), print('x', file=sys.stderr), sys.stdin.read()\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "found")]
    assert subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", *words], check=False).returncode == 0
    assert (tmp_path / "found").read_text() == repr(["/dev/null"] * 3)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["inspect", "--json"], ["verify"]])
def test_a_reader_that_went_away(made, words, unbuffered):
    """141 as shells report SIGPIPE, and not a word: 0 would call a report that nobody got a success."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pagestone", words[0], str(made[1]), *words[1:]]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, env=env)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_reader_of_errors_that_went_away(made):
    """Nobody reads stderr: the exit code still says what was wrong."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pagestone", "verify", str(made[0])]
    assert subprocess.run(command, stdout=subprocess.PIPE, stderr=write, check=False).returncode == 2
    os.close(write)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stdout(made, unbuffered):
    """What could not be written is an error of the machine that names standard output."""
    result = shell('"$@" > /dev/full', "inspect", made[1], env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    text = result.stderr.decode()
    assert result.returncode == 3 and text.startswith("error: standard output: No space left on device (E0901)\n"), text
    assert "what to do: send the output to where it can be written" in text and text.count("\n") == 2


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1:strict", "utf-8:strict"])
def test_stdout_that_cannot_hold_the_path(made, tmp_path, encoding):
    """A conversion that worked does not fail because its path cannot be printed."""
    output = tmp_path / "é中"
    result = pagestone("prepare-bf16", made[0], "-o", output, env=os.environ | {"PYTHONIOENCODING": encoding},
                       errors="replace")  # fmt: skip
    assert result.returncode == 0 and result.stderr == ""
    assert ("é中" if encoding.startswith("utf-8") else "\\u4e2d") in result.stdout and ": converted" in result.stdout


def test_a_path_that_is_not_utf_8(made, tmp_path):
    """Bytes of a path that are no UTF-8 work everywhere; they are shown as escapes, and JSON has them as they are."""
    output = Path(os.fsdecode(os.fsencode(tmp_path) + b"/o\xff\x9b"))
    assert r"/o\xff\x9b: converted" in done("prepare-int8", made[0], "-o", output)
    assert r"/o\xff\x9b: ok" in done("verify", output, "--source", made[0])
    assert r"/o\xff\x9b: int8" in done("inspect", output)
    assert json.loads(done("inspect", output, "--json"))["directory"] == str(output)
    refused(pagestone("prepare-int8", output / "s", "-o", tmp_path / "x"), 2, r"/o\xff\x9b/s: ")


NINES = "9" * 400
NUMBERS = (
    *(["prepare-int8", "s", "-o", "o", "--workers", n] for n in (NINES, "9" * 5000, "-" + NINES, "1e3")),
    *(["prepare-int8", "s", "-o", "o", "--layers", n] for n in (NINES, "9" * 5000, f"0:{NINES}", f"{NINES}:", "1:٣")),
    *(["prepare-q4", "s", "-o", "o", "--group-size", n] for n in (NINES, "9" * 5000)),
    *(["verify", "s", "--source", "s", "--sample", n] for n in (NINES, "9" * 5000, str(2**63), "0")),
    *(["verify-logits", "s", option, NINES] for option in ("--steps", "--threads", "--budget")),
    *(["compare", "s", "--source", "s", option, NINES] for option in ("--tokens", "--window", "--limit")),
    ["run", "s", "--prompt", "x", "--max-new-tokens", NINES],
    ["chat", "s", "--max-new-tokens", str(2**64)],
)


@pytest.mark.parametrize("words", NUMBERS, ids=lambda words: f"{words[0]} {words[-2]} {len(words[-1])}")
def test_numbers_beyond_all_sense(words, tmp_path, monkeypatch, capsys):
    """A number of hundreds of digits is a request that cannot be met, said in a few lines."""
    T_BLOCK.write(tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    code, err = inference.command(*words), capsys.readouterr().err
    assert code == 2 and "Traceback" not in err, err
    assert len(err) < 1700 and words[-2] in err.replace("_", "-"), err
    assert not (tmp_path / "o").exists()


FORESEEN = {
    "EIO": (OSError(errno.EIO, "Input/output error"), "E0901", "a file that the system does not name: Input/output"),
    "EIO with a name": (OSError(errno.EIO, "Input/output error", "/x\n/y"), "E0901", r"error: /x\n/y: Input/output"),
    "no errno": (OSError("closed\nfile"), "E0901", r"closed\nfile"),
    "memory": (MemoryError(), "E0902", "--workers"),
    "a bug": (KeyError("layer\n7"), "E0007", "a fault of pagestone"),
    "another": (RecursionError("too deep"), "E0007", "RecursionError: too deep: a fault of pagestone"),
    "text": (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"), "E0007", "PAGESTONE_DEBUG=1"),
}


@pytest.mark.parametrize("case", FORESEEN)
@pytest.mark.parametrize("debug", ["", "1"])
def test_what_no_room_foresaw(case, debug, tmp_path, monkeypatch, capsys):
    """One message with place, reason and remedy, exit code 3; the traceback only for who asks for it."""
    error, code, text = FORESEEN[case]

    def fail(*words: Any, **how: Any) -> None:
        raise error

    monkeypatch.setattr(validate_commands, "verify", fail)
    monkeypatch.setenv("PAGESTONE_DEBUG", debug)
    assert inference.command("verify", tmp_path) == 3
    out, err = capsys.readouterr()
    assert out == "" and ("Traceback" in err) is bool(debug), err
    if not debug:
        first, second = err.splitlines()
        assert first.startswith("error: ") and first.endswith(f"({code})") and text in err, err
        assert second.startswith("  what to do: ")
        assert code != "E0007" or "validate/commands.py, line " in first


def test_requests_that_contradict_each_other(made, tmp_path, monkeypatch, capsys):
    """Each of them has a code of its own."""
    monkeypatch.chdir(tmp_path)
    for code, words in (
        ("E0003", ["verify", made[1], "--sample", "3"]),
        ("E0005", ["verify-logits", made[1], "--prompts", "x", "--ids", "y"]),
        ("E0006", ["compare", made[1], "--source", made[0]]),
    ):
        assert inference.command(*words) == 2
        assert f"({code})" in capsys.readouterr().err


def test_an_interruption_while_it_is_imported(tmp_path: Path) -> None:
    """Ctrl-C before the command line is there: one word and 130, no traceback; `python -m` and the command alike."""
    program = (
        "import builtins, runpy, sys\n"
        "real = builtins.__import__\n"
        "def stop(name, *rest, **more):\n"
        "    if name == 'pagestone.convert': raise KeyboardInterrupt\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = stop\n"
        "sys.argv = ['pagestone', '--version']\n"
        "runpy.run_module('pagestone', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")
    table = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert table["project"]["scripts"] == {"pagestone": "pagestone.__main__:main"}
