"""What numbers depend on is said in one place, and alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagestone.formats import native, surroundings

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"processor\t: {n}\nmodel name\t: A Fine CPU\nflags\t\t: b a\n\n" for n in range(2))


def test_the_cpu_is_told_by_model_and_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of features means nothing, one more of them is another CPU."""
    said = []
    for flags in ("b a", "a b", "a b c"):
        (tmp_path / "cpuinfo").write_text(TEXT.replace("b a", flags))
        monkeypatch.setattr(surroundings, "CPUINFO", tmp_path / "cpuinfo")
        said.append(surroundings.cpu())
    assert said[0] == said[1] != said[2]
    assert re.fullmatch(r"A Fine CPU \([0-9a-f]{8}\)", said[0])
    monkeypatch.setattr(surroundings, "CPUINFO", tmp_path / "none")
    assert surroundings.cpu()


def test_times_are_told_with_everything_they_depend_on() -> None:
    told = surroundings.measured_on()
    assert told.items() >= surroundings.machine().items() and told["isa"] == native.isa()
    assert set(told) == {
        "cpu", "architecture", "system", "cores", "memory_gib", "load", "kernel", "python", "numpy", "isa",
    }  # fmt: skip
    assert told["cores"] >= 1 and 0 < told["memory_gib"] < 1 << 20 and told["load"] >= 0


def test_nobody_else_asks_for_the_cpu() -> None:
    """One place: no other file of ours reads /proc/cpuinfo."""
    files = [f for room in ("formats", "convert", "reader", "validate", "scripts") for f in (ROOT / room).rglob("*.py")]
    assert [f.name for f in files if "cpuinfo" in f.read_text(encoding="utf-8")] == ["surroundings.py"]
