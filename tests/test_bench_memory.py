"""The benchmark of memory: its tables say what was found, and a short run of it holds the plan to the cap."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import SCRIPTS
from kits.families import LONG

GIB = 1 << 30


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])
    return importlib.import_module("bench_memory")


def row(bench: ModuleType, *found: dict[str, Any], **how: Any) -> dict[str, str]:
    """The cells of a row by their heads."""
    made = bench.Row("q4+q4, this", "tree", Path("container"), 3 * GIB // 2, found=list(found), **how)
    return dict(zip(bench.HEADS, made.cells(), strict=True))


def test_cells(bench):
    """Medians with least and most, the most of peaks, all kills, and nothing where nothing was found."""
    plan = {"cache_bytes": GIB // 4}
    rounds = [
        {"code": 0, "rate": rate, "peak": peak * GIB, "group_peak": GIB, "kills": 0, "plan": plan, "a_token": 5e6,
         "hits": 0.5, "others": rate / 100}
        for rate, peak in ((4, 1.25), (2, 1.0), (3, 1.125))
    ]  # fmt: skip
    cells = row(bench, *rounds)
    assert cells["tokens/s"] == "3.00 (2.00 .. 4.00)" and cells["VmHWM GiB, in all"] == "1.250"
    assert cells["cap GiB"] == "1.5" and cells["plan: experts GiB"] == "0.25" and cells["kills"] == "0"
    assert cells["MB read a token"] == "5 (5 .. 5)" and cells["hits %"] == "50 (50 .. 50)" and cells["others"] == "0.04"
    assert cells["later half"] == cells["major faults"] == "-"
    cells = row(bench, rounds[0], {"code": -9, "kills": 1}, {"code": -9, "kills": 1}, budget=GIB // 2)
    assert cells["kills"] == "2, ended with [-9]" and cells["plan: experts GiB"] == "budget 0.50"
    text = bench.table([["a", "b"]], ["x", "y"])
    assert text == "| x | y |\n|---|---|\n| a | b |"


def test_what_is_not_tried_again(bench, monkeypatch):
    """A row that was refused or killed before it decoded is left alone; one that was killed later is not."""
    words = argparse.Namespace(threads=1, readers=1, tokens=1, long=1, limit=1)
    monkeypatch.setattr(bench, "cold", lambda container: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.Row("x", "tree", Path("c"), 1, found=[{"code": -9, "rate": 1}]).measure(words)
    bench.Row("x", "tree", Path("c"), 1, found=[{"code": 1}]).measure(words)


def test_a_round(bench, monkeypatch, tmp_path):
    """It begins cold, in a group of cap + 5 %, with its own tree; what was told before it was killed counts."""
    seen: list[Any] = []

    class Group:
        enter = "enter"

        def __init__(self, limit: int) -> None:
            seen.append(limit)

        def facts(self) -> dict[str, Any]:
            return {"kills": 1}

        def close(self) -> None:
            seen.append("closed")

    def ended(command: list[str], environment: dict[str, str], within: Any, limit: float) -> Any:
        seen.extend([json.loads(command[-1]), environment["PYTHONPATH"], environment["OMP_NUM_THREADS"], within])
        return bench.Ended(b'{"rate": 2}\n', "gone", -9, 1.0, 1.0, 1.0)

    monkeypatch.setattr(bench, "Group", Group)
    monkeypatch.setattr(bench, "ended", ended)
    monkeypatch.setattr(bench, "cold", lambda container: seen.append("cold") or 0.0)
    words = argparse.Namespace(threads=2, readers=3, tokens=4, long=5, limit=6)
    made = bench.Row("x", "a tree", tmp_path, 1000, 77)
    made.measure(words)
    assert seen[:2] == ["cold", 1050] and seen[3:] == ["a tree", "2", "enter", "closed"]
    assert seen[2]["cap"] == 1000 and seen[2]["budget"] == 77 and seen[2]["container"] == str(tmp_path)
    (found,) = made.found
    assert (found["rate"], found["kills"], found["code"], found["complaint"]) == (2, 1, -9, "gone")


def test_who_runs_what(bench, monkeypatch):
    """This state has the cap; another the kept container and what the plan leaves experts, or what it had once."""
    monkeypatch.setattr(
        bench, "python", lambda tree, words: ({"cache_bytes": 5} if words[3] == "10" else {"refused": "small"}, None)
    )
    made = {pair: bench.Made(Path(pair), {}) for pair in ("q4+q4", "bf16+keep", "q4+keep")}
    words = argparse.Namespace(caps=[10, 2 * GIB], pairs=["q4+q4", "bf16+keep"])
    rows = bench.rows_of(words, "own", made, {"before": "old"})
    assert [(r.name, r.tree, r.container.name, r.cap, r.budget) for r in rows[:4]] == [
        ("q4+q4, this", "own", "q4+q4", 10, None), ("q4+keep, before", "old", "q4+keep", 10, 5),
        ("bf16+keep, this", "own", "bf16+keep", 10, None), ("bf16+keep, before", "old", "bf16+keep", 10, 5),
    ]  # fmt: skip
    assert rows[5].budget == 2 * GIB - 105 * GIB // 100 and len(rows) == 8
    assert len(bench.rows_of(words, "own", made, {})) == 4


def test_the_last_line_counts(bench):
    """A process that was killed has told what it knew."""
    assert bench.last_json(b'note\n{"a": 1}\n{"a": 2}\nTraceback\n') == {"a": 2} and bench.last_json(b"none\n") == {}


def test_kept_containers_are_found_again(bench, monkeypatch, tmp_path):
    """What was made is not made again, and stays; without `--kept` all goes."""
    monkeypatch.setattr(bench, "python", lambda *_: 1 / 0)
    (tmp_path / "q4+q4.json").write_text('{"container": "q4+q4"}')
    with bench.workplace(None, tmp_path) as work:
        made = bench.make(argparse.Namespace(), "tree", "q4+q4", work)
        assert (made.path, made.facts) == (tmp_path / "q4+q4", {"container": "q4+q4"})
    assert tmp_path.exists()
    with bench.workplace(tmp_path, None) as work:
        assert work.parent == tmp_path and work.is_dir()
    assert not work.exists()


def test_disk_is_kept_free(bench, monkeypatch, tmp_path):
    """40 layers of q4 are 19 GB, and so much beside what is to stay must be there."""
    words = argparse.Namespace(layers=40, experts=256, vocab=248320, spare=15)
    for free, begun in ((35, False), (38, True)):
        monkeypatch.setattr(bench.shutil, "disk_usage", lambda _, free=free: argparse.Namespace(free=free * GIB))
        if begun:
            bench.check_disk(words, ["q4+q4"], tmp_path)
        else:
            with pytest.raises(SystemExit, match="15 are to stay"):
                bench.check_disk(words, ["q4+q4"], tmp_path)


@pytest.mark.skipif(not LONG, reason="PAGESTONE_LONG=1 runs it: half a minute")
def test_a_short_run(tmp_path, oracle: Callable[[str], ModuleType]):
    """Converted, verified, planned, run and asked; what it takes is below the cap, in the group as in itself."""
    oracle("torch")
    out = tmp_path / "found.json"
    options = [
        "--layers",
        "2",
        "--experts",
        "16",
        "--vocab",
        "1000",
        "--caps",
        "1.5GiB",
        "--pairs",
        "q4+q4",
        "--rounds",
    ]
    options += [
        "1",
        "--tokens",
        "3",
        "--long",
        "64",
        "--threads",
        "1",
        "--spare",
        "0.1",
        "--answer",
        "--json",
        str(out),
    ]
    command = [sys.executable, str(SCRIPTS / "bench_memory.py"), "--work", str(tmp_path), *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    ((facts,),) = [each["found"] for each in found["rows"]]
    assert facts["code"] == 0 and facts["rate"] > 0 and facts["left_mib"] == 0
    assert facts["short_peak"] <= facts["peak"] <= 1.5 * GIB and facts.get("group_peak", 0) <= 1.05 * 1.5 * GIB
    assert facts["plan"]["cap"] == 1.5 * GIB and "| q4+q4, this | 1.5 |" in printed and "exit code 0" in printed
    assert [p.name for p in tmp_path.iterdir()] == [out.name]
