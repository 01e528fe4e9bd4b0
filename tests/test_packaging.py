"""The wheel holds what the folders hold, below `pagestone` and nowhere else."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from kits.oracles import oracle

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tracked folders."""
    oracle("scikit_build_core")
    oracle("nanobind")
    place = tmp_path_factory.mktemp("wheel")
    kept = ROOT / "build" / "test-wheel"  # objects are kept, so that only the first build ever takes long
    kept.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", str(place),
               "-C", f"build-dir={kept}", str(ROOT)]  # fmt: skip
    with (kept.parent / "test-wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (made,) = place.glob("*.whl")
    return made


def table() -> dict[str, str]:
    """Package names and the folders they come from."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    return dict(build["wheel"]["packages"])


def test_file_list(wheel):
    """Every Python file of the folders is in the wheel, once, and nothing else but the kernels and the metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    code = {n for n in names if ".dist-info/" not in n}
    wanted = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for package, folder in table().items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "kernels" not in file.parts and "__pycache__" not in file.parts
    }
    compiled = {n for n in code if n.startswith("pagestone/formats/_kernels.") and n.endswith(".so")}
    assert len(names) == len(set(names)) and code - compiled == wanted
    assert {n.split("/")[0] for n in code} == {"pagestone"}
    assert any(n.endswith("LICENSE") for n in names)
    assert "pagestone/py.typed" in code, "type checkers would take an installed pagestone for untyped"
    assert "pagestone/convert/families/qwen3_5_moe.py" in code and not any("tests" in n for n in names)
    assert compiled, "the wheel has no kernels: is there a C++ compiler?"


def test_installed_alone(wheel, tmp_path, tiny):
    """Unpacked into an empty place it runs, with kernels, and gives the world no top-level name but `pagestone`."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = """
import importlib.util, pathlib, sys
site = pathlib.Path(sys.argv[1])
sys.meta_path[:] = [f for f in sys.meta_path if "ditable" not in repr(f)]  # the checkout's own installation
sys.path.insert(0, str(site))
for name in ("reader", "convert", "formats", "validate"):
    found = importlib.util.find_spec(name)
    assert found is None or not str(found.origin or list(found.submodule_search_locations)).startswith(str(site)), name
    assert found is None, (name, found)
import pagestone, pagestone.reader.container as reader
assert pathlib.Path(pagestone.__file__).is_relative_to(site) and pathlib.Path(reader.__file__).is_relative_to(site)
from pagestone.formats import native
assert native.built(), "kernels"
from pagestone.cli import main
sys.argv[1:] = sys.argv[2:]
main()
"""
    words = [tmp_path / "site", "prepare-int8", tiny, "-o", tmp_path / "o"]
    command = [sys.executable, "-c", program, *map(os.fspath, words)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "o" / "manifest.json").exists()
