"""The tiers of proof: what each runs is there, no test can hang or pass by surprise, and every family has its turn."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS
from kits.families import FAMILIES, LONG, MODELS, STRUCTURES, structure

from pagestone.convert import families


def test_one_family_of_each_structure():
    """CI tries one family of each structure, the long run all; none is left out of both."""
    inner = {"qwen3_vl_moe_text"}  # the name in the text part of a config that transformers never writes alone
    assert set(MODELS) == set(families.registry()) - inner, "a family without a checkpoint of transformers"
    assert {structure(m) for m in MODELS.values()} == set(STRUCTURES)
    for what, name in STRUCTURES.items():
        assert structure(MODELS[name]) == what
    assert set(FAMILIES) == (set(MODELS) if LONG else set(STRUCTURES.values()))
    chosen = [MODELS[name] for name in STRUCTURES.values()]
    for fact in ("dense_layers", "vision", "mtp"):
        assert any(getattr(m, fact) for m in chosen), fact
    assert any("n_shared_experts" in m.extra for m in chosen)


@pytest.mark.parametrize("long", ["", "1"])
def test_the_variable_chooses(long):
    """PAGESTONE_LONG=1 and nothing else makes it all families."""
    code = "from kits.families import FAMILIES, MODELS, STRUCTURES; print(len(FAMILIES), len(MODELS), len(STRUCTURES))"
    env = os.environ | {"PAGESTONE_LONG": long, "PYTHONPATH": str(ROOT / "tests")}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    chosen, every, structures = map(int, out.split())
    assert chosen == (every if long else structures) and structures < every


def test_a_test_that_hangs_fails(tmp_path):
    """With the project's settings a test that waits for ever ends, by name, and an unexpected pass is a failure."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^timeout = (\d+)", settings, re.M)
    assert found and 60 <= int(found[1]) <= 600
    (tmp_path / "pyproject.toml").write_text(settings.replace(found[0], "timeout = 1"), encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        "import threading\n"
        "import pytest\n"
        "def test_hangs():\n"
        "    threading.Event().wait()\n"
        "@pytest.mark.xfail\n"
        "def test_passes_by_surprise():\n"
        "    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "2 failed" in done.stdout, done.stdout + done.stderr
    assert "FAILED tests/test_x.py::test_hangs" in done.stdout and "Timeout" in done.stdout
    assert "FAILED tests/test_x.py::test_passes_by_surprise" in done.stdout


SHELL = sorted([*SCRIPTS.glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_scripts_are_whole(script: Path):
    """Every shell script parses, stops at the first error (or is sourced by one that does), and names what exists."""
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    sourced = any(f"source scripts/{script.name}" in s.read_text(encoding="utf-8") for s in SHELL)
    assert sourced or ("set -euo pipefail" in text and os.access(script, os.X_OK))
    for path in re.findall(r"(?<![\w/$}])(?:\./)?((?:scripts|tests)/[\w./-]+\w)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("broken", [None, "ruff", "pytest"])
def test_the_long_checks_report(tmp_path, broken):
    """All steps run whatever fails; the report has a row for each, and the exit code tells whether one failed."""
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("pagestone", "*.py"))
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    (tmp_path / "scripts" / "sanitize.sh").write_text("#!/usr/bin/env bash\necho sane\n")
    for name in ("pip", "python", "ruff", "mypy", "pytest"):
        (tools / name).write_text(f"#!/usr/bin/env bash\necho '{name} | done'\nexit {int(name == broken)}\n")
        (tools / name).chmod(0o755)
    env = {n: v for n, v in os.environ.items() if n != "VENV"} | {"PYTHON": sys.executable}
    done = subprocess.run(["scripts/check_long.sh", "deep/r.md"], cwd=tmp_path, env=env, capture_output=True, text=True,
                          check=False)  # fmt: skip
    rows = [r.split(" | ") for r in (tmp_path / "deep" / "r.md").read_text().splitlines() if r.startswith("| ")][1:]
    failed = [row[0] for row in rows if row[2] == "FAILED"]
    assert len(rows) == 6 and {row[2] for row in rows} <= {"passed", "FAILED"}, done
    expected = {None: [], "ruff": ["| style"], "pytest": ["| all tests", "| all families"]}[broken]
    assert done.returncode == bool(broken) and len(failed) == len(expected), (failed, done)
    assert all(row.startswith(begin) for row, begin in zip(failed, expected, strict=True))


def test_what_contributing_names_exists():
    """Commands, files and variables in CONTRIBUTING are those of the project."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`(?:\./)?((?:scripts|tests|specs|convert|formats|reader|validate|\.ci)/[\w./*-]*\w)", text)
    assert len(paths) > 10
    for path in paths:
        assert list(ROOT.glob(path.replace("NAME", "*"))), path
    used = "".join(p.read_text(encoding="utf-8") for p in [*SHELL, *sorted((ROOT / "tests").rglob("*.py"))])
    for variable in set(re.findall(r"PAGESTONE_[A-Z]+", text)):
        assert variable in used, variable
    assert "scripts/check.sh --fast" in text and "scripts/check_long.sh" in text
    assert "PAGESTONE_ORACLES=1 ./scripts/check.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
