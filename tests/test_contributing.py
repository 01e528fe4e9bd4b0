"""CONTRIBUTING.md says where things go, and the tree is as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("formats", "convert", "reader", "validate", "scripts")
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
HEAD = "| To add | Files to touch | Beside them | Shown by |\n|---|---|---|---|\n"
STANDING = {
    "an encoding that is only read": "formats/encodings/floats.py",
    "an encoding that is written": "formats/encodings/int8.py",
    "a family": "convert/families/mixtral.py",
    "a storage": "tests/kits/storage.py",
    "a model host": "reader/hosts/transformers.py",
}
"""What can be added -> one of it that stands already, where the table says that another would."""


def rows() -> dict[str, list[str]]:
    """What can be added -> the other cells of its line."""
    table = PAGE.split(HEAD)[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first: rest for first, *rest in cells}


def test_every_kind_has_a_line():
    assert list(rows()) == list(STANDING)


@pytest.mark.parametrize("kind", STANDING)
def test_a_line_is_true(kind):
    """At most two files; one of the kind stands where the first of them would; what shows it is a file of tests."""
    files, _, shown = rows()[kind]
    first, *others = re.findall(r"`([^`]+)`", files) or [files]
    assert len(others) <= 1 and all((ROOT / other).is_file() for other in others)
    assert (ROOT / STANDING[kind]).is_file()
    if kind == "a storage":
        assert first == "one file, anywhere"
    else:
        assert Path(first) == Path(STANDING[kind]).with_name("NAME.py")
    (test,) = re.findall(r"`(tests/[^`]+\.py)`", shown)
    assert "def test_" in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["encodings", "families"])
def test_what_only_the_tests_know_is_in_no_room(kind):
    """What the tests add is one file each, and its name stands nowhere in ours: found, not listed."""
    files = [f for f in (ROOT / "tests" / "kits" / f"added_{kind}").glob("*.py") if f.stem != "__init__"]
    classes = [c for f in files for c in re.findall(r"(?m)^class (\w+)", f.read_text(encoding="utf-8"))]
    names = classes or [f.stem for f in files]
    ours = "".join(f.read_text(encoding="utf-8") for room in ROOMS for f in (ROOT / room).rglob("*.py"))
    assert names and not [name for name in names if name in ours]
