"""Audits are foreign: every field is looked at, traces are bounded, and `python -O` judges as Python does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zstandard
from kits import audits
from kits.inference import Workshop, calm

from pagestone.formats.errors import DataError
from pagestone.reader.container import open_container
from pagestone.validate.logits import LogitsRequest, verify_logits
from pagestone.validate.recorded import Recorded, read_audit

LAYERS = dict.fromkeys(range(4), 16)
VOCABULARY = 1024
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def audited(oracle: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit of tiny-moe in int8 with two prompts of two steps, and its traces; not to be changed."""
    oracle("torch")
    oracle("transformers")
    calm()
    root = tmp_path_factory.mktemp("recorded")
    (root / "ids").write_text("1 2 3\n7\n")
    container = Workshop(root).container("int8")
    assert {n: len(x) for n, x in open_container(container).layers.items()} == LAYERS
    verify_logits(LogitsRequest(container, ids=root / "ids", steps=1)).write(root / "audit.json")
    return root / "audit.json"


@pytest.fixture
def copied(audited: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for name in ("audit.json", "audit.traces.jsonl.zst"):
        (tmp_path / name).write_bytes(audited.with_name(name).read_bytes())
    return tmp_path / "audit.json"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    return path


def refused(path: Path, words: str) -> DataError:
    """What reading all of an audit raises."""
    with pytest.raises(DataError, match=words) as caught:
        recorded = read_audit(path)
        recorded.check_ids(VOCABULARY)
        list(recorded.events(LAYERS))
    assert caught.value.code == "E1303" and caught.value.file and caught.value.remedy
    assert len(str(caught.value)) < 1000
    return caught.value


# -- what is right ----------------------------------------------------------------------------------------------------


def test_it_reads_what_was_written(audited: Path) -> None:
    recorded, table = read_audit(audited), json.loads(audited.read_text())
    assert [(p.name, p.ids) for p in recorded.prompts] == [("line 1", (1, 2, 3)), ("line 2", (7,))]
    assert recorded.container_id == table["container"]["id"]
    assert [[s.sha256 for s in steps] for steps in recorded.steps] == [p["sha256"] for p in table["prompts"]]
    assert [[s.choice for s in steps] for steps in recorded.steps] == [p["choices"] for p in table["prompts"]]
    assert [[s.fed for s in steps] for steps in recorded.steps] == [[3, 1], [1, 1]]
    assert recorded.surroundings["versions"]["torch"] == table["versions"]["torch"]
    lines = [json.loads(x) for x in audits.unfold(audited.with_name(table["traces"]).read_bytes()).splitlines()]
    assert table["trace_lines"] == len(lines) > 50
    found = [(p, s, e.layer, e.what, e.expert, e.digest) for p, s, e in recorded.events(LAYERS)]
    assert found == [tuple(x[k] for k in ("prompt", "step", "layer", "what", "expert", "digest")) for x in lines]


def test_older_audits_do_not_say_how_many_lines(copied: Path) -> None:
    recorded = read_audit(edit(copied, lambda t: t.pop("trace_lines")))
    assert recorded.lines is None and len(list(recorded.events(LAYERS))) > 50


@pytest.mark.parametrize("change", [lambda t: t.update(traces=None), lambda t: t.update(traces="gone.zst")])
def test_traces_may_be_gone(copied: Path, change: Callable[[dict[str, Any]], object]) -> None:
    recorded = read_audit(edit(copied, change))
    assert recorded.traces is None and list(recorded.events(LAYERS)) == []


def test_events_of_the_step_that_differs(audited: Path) -> None:
    """Of all traces, only those of the first step whose logits differ are kept."""
    recorded, other = read_audit(audited), read_audit(audited)
    other.steps[1][0].sha256 = "0" * 64
    recorded.place_difference(other.steps, LAYERS)
    wanted = [e for p, s, e in recorded.events(LAYERS) if (p, s) == (1, 0)]
    assert wanted and recorded.steps[1][0].events == wanted
    assert not any(s.events for steps in recorded.steps for s in steps if s is not recorded.steps[1][0])


# -- what is not ------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another file": (lambda t: t.update(audit="something"), "pagestone logits"),
    "another version": (lambda t: t.update(version=2), "version 1 expected, found 2"),
    "a version that is true": (lambda t: t.update(version=True), "version"),
    "a version that is 1.0": (lambda t: t.update(version=1.0), "version"),
    "a run that was not compared": (lambda t: t.update(result="not comparable"), "compared"),
    "no container": (lambda t: t.update(container=[]), "container: dict"),
    "an id that is none": (lambda t: t["container"].update(id="x" * 32), "id"),
    "no prompts": (lambda t: t.update(prompts=[]), "prompt at least"),
    "a prompt that is a list": (lambda t: t["prompts"].append([]), "prompt as an object"),
    "a prompt without a name": (lambda t: t["prompts"][0].update(name=None), "name: str"),
    "no ids": (lambda t: t["prompts"][0].update(ids=[]), "ids: token ids"),
    "an id that is text": (lambda t: t["prompts"][0].update(ids=["1"]), "ids: token ids"),
    "an id that is true": (lambda t: t["prompts"][0].update(ids=[True]), "ids: token ids"),
    "an id below zero": (lambda t: t["prompts"][0].update(ids=[-1]), "ids: token ids"),
    "an id beyond the vocabulary": (lambda t: t["prompts"][1].update(ids=[1, 1024]), "prompt 1: .* below 1024 .*1024"),
    "a choice beyond the vocabulary": (lambda t: t["prompts"][0].update(choices=[3, 5000]), "below 1024 .* 5000"),
    "fewer choices": (lambda t: t["prompts"][0]["choices"].pop(), "1 digests"),
    "a short hash": (lambda t: t["prompts"][0]["sha256"].__setitem__(0, "00"), "sha256"),
    "a hash with a newline": (lambda t: t["prompts"][0]["sha256"].__setitem__(0, "0" * 64 + "\n"), "sha256"),
    "unequal steps": (lambda t: [t["prompts"][0][k].pop() for k in ("choices", "sha256")], "equally many"),
    "a group that is a list": (lambda t: t.update(machine=[]), "machine: dict"),
    "a group without a key": (lambda t: t["versions"].pop("torch"), "torch: str"),
    "threads in words": (lambda t: t["threads"].update(torch="two"), "torch: int"),
    "a model of another type": (lambda t: t["model"].update(experts=None), "experts: str"),
    "lines below zero": (lambda t: t.update(trace_lines=-1), "trace_lines"),
    "another number of lines": (lambda t: t.update(trace_lines=t["trace_lines"] + 1), "lines of traces"),
    "traces above": (lambda t: t.update(traces="../audit.json"), "traces"),
    "traces elsewhere": (lambda t: t.update(traces="/etc/passwd"), "traces"),
    "traces that are a directory": (lambda t: t.update(traces=".."), "traces"),
    "traces with a NUL": (lambda t: t.update(traces="a\0b"), "traces"),
    "a long name": (lambda t: t.update(traces="é" * 200), "traces"),
    "traces that are a list": (lambda t: t.update(traces=["x"]), "traces"),
}


@pytest.mark.parametrize("what", WRONG)
def test_fields(copied: Path, what: str) -> None:
    change, words = WRONG[what]
    refused(edit(copied, change), words)


NOTHING = ["", "[]", "null", "\xff", "[" * 100_000, '{"audit": NaN}', '{"version": ' + "9" * 9999]


@pytest.mark.parametrize("text", NOTHING, ids=range(len(NOTHING)))
def test_no_audit(copied: Path, text: str) -> None:
    copied.write_bytes(text.encode("latin-1"))
    refused(copied, "expected")


EVENT = {"prompt": 0, "step": 0, "layer": 0, "what": "expert", "expert": 3, "digest": "0" * 32}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([b"[]"], "line 1: an object"),
        ([EVENT, b"\xff"], "line 2"),
        ([EVENT | {"more": 1}], "fields"),
        ([{k: v for k, v in EVENT.items() if k != "expert"}], "fields"),
        ([EVENT | {"prompt": 2}], "a step of the audit"),
        ([EVENT | {"step": 2}], "a step of the audit"),
        ([EVENT | {"step": -1}], "step"),
        ([EVENT | {"prompt": True}], "prompt"),
        ([EVENT | {"layer": 4}], "a layer"),
        ([EVENT | {"layer": "0"}], "layer"),
        ([EVENT | {"what": "else"}], "one of input"),
        ([EVENT | {"what": []}], "one of input"),
        ([EVENT | {"expert": 16}], "expert"),
        ([EVENT | {"expert": None}], "expert"),
        ([EVENT | {"what": "input"}], "expert"),
        ([EVENT | {"digest": "0" * 31}], "digest"),
        ([EVENT | {"what": "routing", "expert": None}], "digest"),
        ([EVENT | {"prompt": 1}, EVENT], "line 2: a step of the audit"),
        ([EVENT] * (4 * 19 + 1), "at most 76 events"),
        ([b'{"a":' * 100_000], "lines of at most 1024"),
        ([b" " * 100_000], "lines of at most 1024"),
    ],
)
def test_lines(copied: Path, lines: list[Any], words: str) -> None:
    """Lines of traces that cannot be, in a file that does not say how many it has."""
    raw = b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
    copied.with_name("audit.traces.jsonl.zst").write_bytes(audits.fold(raw))
    refused(edit(copied, lambda t: t.pop("trace_lines")), words)


def test_as_many_events_as_a_step_can_have(copied: Path) -> None:
    raw = (json.dumps(EVENT).encode() + b"\n") * 76 + (json.dumps(EVENT | {"step": 1}).encode() + b"\n") * 76
    copied.with_name("audit.traces.jsonl.zst").write_bytes(audits.fold(raw))
    assert len(list(read_audit(edit(copied, lambda t: t.pop("trace_lines"))).events(LAYERS))) == 152


def test_traces_that_end_within_a_line(copied: Path) -> None:
    traces = copied.with_name("audit.traces.jsonl.zst")
    traces.write_bytes(audits.fold(audits.unfold(traces.read_bytes())[:-1]))
    refused(copied, "whole last line")


def test_traces_that_want_a_large_window(copied: Path) -> None:
    """What unfolding may keep in memory is bounded, too."""
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    traces = copied.with_name("audit.traces.jsonl.zst")
    raw = audits.unfold(traces.read_bytes())
    out = zstandard.ZstdCompressor(compression_params=wide).compressobj()  # of a length that is not stated
    traces.write_bytes(out.compress(raw) + out.flush())
    refused(copied, "Zstandard")


# -- mutants ----------------------------------------------------------------------------------------------------------

SEEDS = range(300)
PLAIN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kits.audits import outcomes
assert False, "python -O does not see this"
audit, root = map(Path, sys.argv[2:4])
print(json.dumps(outcomes(audit, root, dict.fromkeys(range(4), 16), int(sys.argv[4]), range(int(sys.argv[5])))))
"""


def test_mutants(audited: Path, tmp_path: Path) -> None:
    """Each is read, or refused by an error of ours; `python -O`, which skips every assert, says the same of each."""
    found = audits.outcomes(audited, tmp_path, LAYERS, VOCABULARY, SEEDS)
    words = [str(TESTS), str(audited), str(tmp_path), str(VOCABULARY), str(len(SEEDS))]
    done = subprocess.run([sys.executable, "-O", "-c", PLAIN, *words], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == found
    assert found.count("E1303") > 150 and sum(x.startswith("read") for x in found) > 30


def test_a_bomb(copied: Path) -> None:
    """A quarter of a megabyte that unfolds to gigabytes is left at the first line that is too many."""
    line = json.dumps(EVENT).encode() + b"\n"
    traces = copied.with_name("audit.traces.jsonl.zst")
    with traces.open("wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as out:
        for _ in range(400):
            out.write(line * 10_000)  # 340 MB, 4 million lines
    assert traces.stat().st_size < 300_000
    begun = time.process_time()
    refused(edit(copied, lambda t: t.update(trace_lines=4_000_000)), "at most 76 events")
    assert time.process_time() - begun < 2


def test_it_is_read_where_it_is_used(audited: Path, copied: Path) -> None:
    """`verify-logits --against` refuses damaged traces before a model is loaded."""
    traces = copied.with_name("audit.traces.jsonl.zst")
    traces.write_bytes(audits.fold(b"[]\n"))
    container = next(audited.parent.glob("int8-*"))
    with pytest.raises(DataError, match=r"traces.*line 1.*E1303"):
        verify_logits(LogitsRequest(container, against=copied), lambda word: pytest.fail(f"{word} was begun"))
    with pytest.raises(DataError, match=r"below 1024.*E1303"):
        verify_logits(
            LogitsRequest(container, against=edit(copied, lambda t: t["prompts"][0].update(ids=[4096]))),
            lambda word: pytest.fail(f"{word} was begun"),
        )


def test_nothing_of_it_is_held() -> None:
    """A step has no events until one differs: traces may be larger than memory."""
    assert "events" not in Recorded.__slots__
