"""Functions are short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("convert", "formats", "reader", "validate", "scripts", "tests")
MOST = 60
WHY = "# long:"
"""What a comment beside or above a `def` begins with that says why its function is longer."""


def too_long(text: str, most: int = MOST) -> Iterator[tuple[str, int, int]]:
    """(name, line, length) of each function of more than `most` lines without a comment why."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            above = min([node, *node.decorator_list], key=lambda n: n.lineno).lineno - 2
            if length > most and not any(WHY in lines[at] for at in (above, node.lineno - 1) if at >= 0):
                yield node.name, node.lineno, length


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_short(folder: str) -> None:
    """None is longer than 60 lines, or it says why."""
    files = [f for f in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in f.parts]
    found = {f"{f.relative_to(ROOT)}:{line}": (name, n) for f in files for name, line, n in too_long(f.read_text())}
    assert files and not found


def test_length_is_seen() -> None:
    """Counted from `def` to the last line, methods and nested functions too; a comment excuses only its own."""
    body = "    x = 1\n" * 3
    assert list(too_long(f"def f():\n{body}", 4)) == []
    assert list(too_long(f"def f():\n{body}", 3)) == [("f", 1, 4)]
    assert list(too_long(f"# long: a table\ndef f():\n{body}", 3)) == []
    assert list(too_long(f"def f():  # long: a table\n{body}\n\ndef g():\n{body}", 3)) == [("g", 7, 4)]
    assert list(too_long(f"# long: a table\n@cache\ndef f():\n{body}", 3)) == []
    assert [name for name, _, _ in too_long("class A:\n    def f(self):\n" + "        x = 1\n" * 3, 3)] == ["f"]
