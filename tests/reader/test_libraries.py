"""Which releases of transformers are taken, and that what it does not promise to keep is named in one file."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pagestone.formats.errors import PagestoneError, RequestError
from pagestone.reader import libraries
from pagestone.reader.configs import require_family
from pagestone.reader.hosts import transformers as host

ROOT = Path(__file__).resolve().parents[2]
INSIDE = ROOT / "reader" / "transformers_inside.py"
PUBLIC = {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "utils", "__version__"}
"""What transformers documents, and the other files take."""


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that packages are there in these versions, or (None) are not."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = versions[name] if name in versions else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    "version", ["5.13.0", "5.13.0rc1", "5.14.2", "5.24.0", "5.24.9", "5.24.0.dev0"]
)  # fmt: skip
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Both ends and all between: taken."""
    installed(monkeypatch, torch="2.6", transformers=version)
    host.HOST.require()


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.12.9", "5.25.0", "5.25.0rc1", "6.13.0", "5", "main"])
def test_other_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Outside the range, or no version at all: refused, and what to install is said."""
    installed(monkeypatch, torch="2.6", transformers=version)
    with pytest.raises(RequestError, match=rf"expected, found {re.escape(version)}:.*E1221") as error:
        host.HOST.require()
    assert error.value.exit_code == 2
    assert error.value.remedy == "pip install 'transformers>=5.13,<5.25'"


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_without_a_library(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """E1220 names what is missing and the extra that brings it."""
    installed(monkeypatch, **({"torch": "2.6", "transformers": "5.24.0"} | {name: None}))
    with pytest.raises(RequestError, match=rf"(?s){name} is needed.*E1220.*pagestone\[inference\]"):
        host.HOST.require()


def test_a_family_that_came_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It states its own minimum; below it the model is refused by its type, above it taken."""
    monkeypatch.setitem(libraries.NEWER_FAMILIES, "new_moe", (5, 20))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new_moe"}))
    installed(monkeypatch, transformers="5.19.3")
    with pytest.raises(RequestError, match=r"transformers>=5\.20 expected for models of type new_moe.*E1221") as error:
        require_family(tmp_path)
    assert error.value.remedy == "pip install 'transformers>=5.20,<5.25'"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    require_family(tmp_path)
    installed(monkeypatch, transformers="5.20.0")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new_moe"}))
    require_family(tmp_path)


def test_a_family_that_came_later_is_asked_before_a_model_is_made(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, oracle: Callable[[str], ModuleType]
) -> None:
    """Whoever makes one, or asks for its vocabulary."""
    oracle("torch")
    oracle("transformers")
    monkeypatch.setitem(libraries.NEWER_FAMILIES, "qwen3_5_moe", (9, 9))
    for ask in (lambda: host.vocabulary_of(tiny), lambda: host._empty_model(SimpleNamespace(path=tiny), host.PACKED)):
        with pytest.raises(PagestoneError, match=r"transformers>=9\.9 .*E1221"):
            ask()


def test_one_range_everywhere() -> None:
    """pyproject.toml, the pinned upper end, and the pages say what the code holds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("inference", "oracles"):
        assert [w for w in project[extra] if w.startswith("transformers")] == [libraries.TESTED]
    newest, oldest = ("{}.{}.".format(*end) for end in (libraries.NEWEST, libraries.OLDEST))
    assert re.search(rf"(?m)^transformers=={re.escape(newest)}\d+$", (ROOT / "constraints.txt").read_text())
    assert f"transformers=={oldest}*" in (ROOT / "scripts" / "check_oldest.sh").read_text()
    spoken = "transformers {}.{} to {}.{}".format(*libraries.OLDEST, *libraries.NEWEST)
    assert spoken in (ROOT / "README.md").read_text()
    assert libraries.TESTED in (ROOT / "specs" / "errors.md").read_text()


# -- private names ----------------------------------------------------------------------------------------------------


def ours() -> list[Path]:
    """Every Python file of the package."""
    rooms = ("formats", "convert", "reader", "validate", "scripts/pagestone")
    return [f for room in rooms for f in sorted((ROOT / room).rglob("*.py"))]


def taken_from_transformers(tree: ast.AST) -> Iterator[str]:
    """Names that a file imports from transformers, "a.b" for those below its top."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            below = (node.module or "").partition(".")[2]
            yield from (f"{below}.{a.name}".lstrip(".") for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("transformers."))


def private_words(tree: ast.AST) -> set[str]:
    """Names with a leading underscore that a file uses of anything but itself and its own module."""
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    words = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    words |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {w for w in words if re.fullmatch(r"_[a-z]\w*", w)} - own


def test_only_one_file_names_what_transformers_keeps_to_itself() -> None:
    """Modules below its top and private names stand in `transformers_inside`, all of them, and nowhere else."""
    inside = ast.parse(INSIDE.read_text())
    private = private_words(inside)
    assert {"_apply_gate", "_get_dtype_plan", "_supports_sdpa", "_default_apply_gate"} <= private
    assert any("." in name for name in taken_from_transformers(inside))
    for file in ours():
        assert file == INSIDE or set(taken_from_transformers(ast.parse(file.read_text()))) <= PUBLIC, file
    for file in (f for f in ours() if f.parts[len(ROOT.parts)] in ("reader", "validate")):
        tree = ast.parse(file.read_text())
        if file == INSIDE:
            continue
        assert not private & private_words(tree), file
        if file.parent.name == "hosts" or file.name.startswith("experts"):
            assert not private_words(tree), file
        for word in ("all_tied_weights_keys", "base_model_prefix", "tie_weights", "past_key_values"):
            assert word not in file.read_text(), (file, word)
