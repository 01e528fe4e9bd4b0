"""Without the native kernels everything works, many times slower: who did not ask for that is told, in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SCRIPTS
from kits.checkpoints import T_BLOCK
from kits.inference import command

from pagestone.formats import native


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an installation without a compiler, and nothing chosen."""
    monkeypatch.setattr(native, "_kernels", None)
    monkeypatch.setattr(native, "_missing", "not built")
    monkeypatch.setattr(native, "_current", None)
    monkeypatch.delenv(native.VARIABLE, raising=False)


def test_prepare_and_verify_say_it_once(no_kernels, tmp_path, capsys):
    """One line on stderr before the work, also with --json; stdout is what it always is."""
    source = T_BLOCK.write(tmp_path / "s")
    for words in (["prepare-int8", source, "-o", tmp_path / "o", "--json"], ["verify", tmp_path / "o"]):
        assert command(*words) == 0
        out, err = capsys.readouterr()
        assert err.startswith("note: the native kernels are not built: ") and err.count("\n") == 1, err
        assert "C++ compiler" in err and "note: " not in out
    assert command("prepare-int8", source, "-o", tmp_path / "p", "--dry-run") == 0
    assert capsys.readouterr().err == ""


def test_who_asked_for_it_is_not_told(no_kernels, tmp_path, capsys, monkeypatch):
    """PAGESTONE_ISA=numpy is a choice."""
    monkeypatch.setenv(native.VARIABLE, "numpy")
    assert command("prepare-int8", T_BLOCK.write(tmp_path / "s"), "-o", tmp_path / "o") == 0
    assert capsys.readouterr().err == ""


def test_nothing_is_said_with_kernels():
    assert native.slow_note() is None or not native.built()


def test_kernels_that_cannot_be_loaded(tmp_path):
    """A module that is there and does not load is another fault than one that was not built: the reason is told."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pagestone.formats._kernels':\n"
        "            raise ImportError('GLIBCXX_9 not found')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    code = "from pagestone.formats import native; print(native.slow_note())"
    env = {n: v for n, v in os.environ.items() if n != native.VARIABLE}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [env.get("PYTHONPATH")])])
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.startswith("the native kernels are not to be loaded (GLIBCXX_9 not found): ")


@pytest.mark.parametrize("built", [True, False])
def test_try_sh_says_it_once(tmp_path: Path, built: bool) -> None:
    """The first command a stranger runs: pip is quiet about a compiler that is not there, so the script tells, once."""
    tools, shim = tmp_path / "venv" / "bin", tmp_path / "shim"
    tools.mkdir(parents=True)
    shim.mkdir()
    (shim / "sitecustomize.py").write_text("import sys\nsys.modules['pagestone.formats._kernels'] = None\n")
    path = os.pathsep.join([*([] if built else [str(shim)]), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, line in (
        ("pip", "exit 0"),
        ("python", f'PYTHONPATH={path!r} exec {sys.executable!r} "$@"'),
        ("pagestone", 'echo "ran $1 with ${PAGESTONE_ISA:-nothing}"'),
    ):
        (tools / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tools / name).chmod(0o755)
    env = {n: v for n, v in os.environ.items() if n != native.VARIABLE}
    env |= {"VENV": str(tmp_path / "venv"), "PYTHON": sys.executable}
    done = subprocess.run(["bash", SCRIPTS / "try.sh"], env=env, capture_output=True, text=True, check=True)
    told = done.stderr.count("note: the native kernels are not built")
    if not built:
        assert told == 1 and done.stdout.count("with numpy") == 5, done
    elif native.built():
        assert told == 0 and done.stdout.count("with nothing") == 5, done
