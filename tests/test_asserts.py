"""No assert judges data: `python -O` drops them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(f for room in ("formats", "convert", "reader", "validate", "scripts/pagestone") for f in
               (ROOT / room).rglob("*.py"))  # fmt: skip


def narrows(test: ast.expr) -> bool:
    """Whether a condition only tells the type checker what the program knows: `x is not None`, `isinstance(x, y)`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(map(narrows, test.values))
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name | ast.Attribute)
        and [type(op) for op in test.ops] == [ast.IsNot]
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


@pytest.mark.parametrize(("text", "fine"), [("x is not None and a.b is not None", True), ("isinstance(x, int)", True),
                                            ("x == 1", False), ("table['x'] is not None", False), ("x", False),
                                            ("x is None", False), ("x is not None or y", False)])  # fmt: skip
def test_what_narrows(text: str, fine: bool) -> None:
    assert narrows(ast.parse(text, mode="eval").body) == fine


def test_asserts_only_narrow() -> None:
    found = [f"{file.relative_to(ROOT)}:{node.lineno}" for file in FILES for node in
             ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Assert)
             and not narrows(node.test)]  # fmt: skip
    assert len(FILES) > 60 and found == []
