"""`compare`: what a codec costs, against the source's own weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.inference import TINY, Workshop, calm, command

from pagestone.formats import encodings
from pagestone.formats.errors import RequestError
from pagestone.reader import session
from pagestone.reader.memory_plan import MemoryPlan
from pagestone.reader.model import PRODUCTS, REFERENCE
from pagestone.reader.session import Session
from pagestone.reader.text import open_tokenizer
from pagestone.validate import apart, fidelity


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    oracle("torch")
    oracle("transformers")
    calm()


TEXT, QUESTIONS = TINY / "heldout.txt", TINY / "questions.jsonl"
BOUNDS = {"bf16": (0.0, 1.0), "int8": (0.002, 0.97), "fp8": (0.02, 0.92), "q4": (0.08, 0.85), "q3": (0.5, 0.6),
          "q8": (0.002, 0.97)}  # fmt: skip
"""Largest KL and least top-1 agreement allowed for a codec; measured values are in the README."""
NATIVE_BOUNDS = BOUNDS | {"bf16": (0.001, 0.98), "int8": (0.004, 0.95), "q8": (0.004, 0.95)}
"""The same for native experts: activations in 8 bits cost int8 about as much again, and vanish beside q4's and q3's."""


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("fidelity"))


@pytest.mark.parametrize("experts", PRODUCTS)
@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_every_codec(workshop: Workshop, codec: str, experts: str) -> None:
    """KL, top-1, perplexity and answers of each; bf16 with reference experts is the source itself, to the last bit."""
    request = fidelity.FidelityRequest(
        workshop.container(codec), TINY, text=TEXT, questions=QUESTIONS, tokens=400, window=256, limit=4,
        experts=experts,
    )  # fmt: skip
    found = fidelity.compare(request)
    text, questions = found.text_result, found.questions
    assert text is not None and questions is not None
    assert text.positions == 400 and text.predicted == 398  # windows of 256 and 144
    largest, least = BOUNDS[codec] if experts == REFERENCE else NATIVE_BOUNDS[codec]
    assert 0 <= text.kl <= largest and text.top1 >= least
    assert 2.5 < text.source_nats < 3.6 and abs(text.container_nats - text.source_nats) < 0.3
    assert questions.asked == 4 and questions.source_right >= 3
    if (codec, experts) == ("bf16", REFERENCE):
        assert text.kl == text.kl_largest == 0.0 and text.top1 == 1.0 and text.container_nats == text.source_nats
        assert questions.agree == 4 and questions.changed == []
    else:
        assert text.kl > 0 and found.experts == experts and f", {experts}" in found.text()


def test_the_command(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, JSON for programs."""
    words = ["compare", workshop.container("int8"), "--source", TINY, "--text", TEXT, "--tokens", "64", "--io", "mmap"]
    assert command(*words) == 0
    out = capsys.readouterr().out
    assert "KL (nats)" in out and "top-1" in out and out.splitlines()[-1].startswith("int8")
    assert command(*words, "--questions", QUESTIONS, "--limit", "2", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["codec"] == "int8" and table["questions"]["asked"] == 2
    assert math.isclose(math.log(table["text_result"]["source_perplexity"]), table["text_result"]["source_nats"])


def test_requests(workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to compare on, a text too short, questions that are none."""
    directory = workshop.container("int8")
    assert command("compare", directory, "--source", TINY) == 2
    assert "--text" in capsys.readouterr().err
    (tmp_path / "text").write_text("a")
    with pytest.raises(RequestError, match="E1311"):
        fidelity.compare(fidelity.FidelityRequest(directory, TINY, text=tmp_path / "text"))
    (tmp_path / "questions").write_text('{"question": "x", "answer": "y"}\n{"q": 1}\n')
    with pytest.raises(RequestError, match=r"line 2.*found '{\"q\": 1}'.*E1312") as caught:
        fidelity.read_questions(tmp_path / "questions", None)
    (tmp_path / "example").write_text((caught.value.remedy or "").partition("such as ")[2])
    assert len(fidelity.read_questions(tmp_path / "example", None)) == 1, "the example is one that is read"
    (tmp_path / "example").write_text("\n")
    with pytest.raises(RequestError, match=r"found none.*E1312.*\n.*such as {"):
        fidelity.read_questions(tmp_path / "example", None)
    assert fidelity.read_questions(tmp_path / "questions", 1) == [("x", "y")]
    (tmp_path / "questions").write_text('{"question": "2 + 2?", "answer": 4}\n')
    assert fidelity.read_questions(tmp_path / "questions", None) == [("2 + 2?", "4")]
    for wrong in ('"answer": null', '"answer": ["y"]', '"answer": true', '"answer": " "', '"answer": 1.5'):
        (tmp_path / "questions").write_text(f'{{"question": "x", {wrong}}}\n')
        with pytest.raises(RequestError, match=r"line 1.*a text expected.*E1312"):
            fidelity.read_questions(tmp_path / "questions", None)
    (tmp_path / "questions").write_text('{"question": null, "answer": "y"}\n')
    with pytest.raises(RequestError, match="E1312"):
        fidelity.read_questions(tmp_path / "questions", None)


def test_windows() -> None:
    """Pieces in order; a last single id has nothing to predict and is left out."""
    assert list(fidelity.windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(fidelity.windows(range(8), 3)) == [[0, 1, 2], [3, 4, 5], [6, 7]]


# -- known logits -----------------------------------------------------------------------------------------------------

LIKELY = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05], [0.2, 0.3, 0.5]]
OTHER = [[0.5, 0.2, 0.3], [0.3, 0.3, 0.4], [0.2, 0.1, 0.7], [0.9, 0.05, 0.05], [0.3, 0.4, 0.3]]
"""Probabilities after each token of a text of five, of the source and of the container; nothing about them is even."""
IDS = [1, 2, 0, 1, 2]


class Known:
    """What `over_text` asks of a model, with probabilities that are known; logits are off by a constant a row."""

    def __init__(self, table: list[list[float]]) -> None:
        self.table, self.at = table, 0

    def forward(self, ids: list[int], state: object = None, *, every: bool = False) -> tuple[object, None]:
        import torch

        assert every and ids == IDS[self.at : self.at + len(ids)], "windows in order, each from its beginning"
        rows = self.table[self.at : self.at + len(ids)]
        self.at += len(ids)
        return torch.tensor([[math.log(p) + 3 * n for p in row] for n, row in enumerate(rows)], dtype=torch.float64), 0


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_what_is_measured_over_a_text(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL(source || container), not the reverse; top-1; nats of the token that follows, each side its own."""
    monkeypatch.setattr(fidelity, "COMPARED", rows)
    found = fidelity.over_text(Known(LIKELY), Known(OTHER), IDS, 3)  # type: ignore[arg-type]
    each = [sum(p * math.log(p / q) for p, q in zip(a, b, strict=True)) for a, b in zip(LIKELY, OTHER, strict=True)]
    assert math.isclose(found.kl, sum(each) / 5) and math.isclose(found.kl_largest, max(each))
    back = [sum(q * math.log(q / p) for p, q in zip(a, b, strict=True)) for a, b in zip(LIKELY, OTHER, strict=True)]
    assert abs(sum(back) - sum(each)) > 0.01, "these distributions tell the two directions apart"
    assert (found.positions, found.predicted, found.top1) == (5, 3, 3 / 5)
    followed = [(0, 2), (1, 0), (3, 2)]  # windows [1, 2, 0] and [1, 2]: after token n comes id
    assert math.isclose(found.source_nats, -sum(math.log(LIKELY[n][i]) for n, i in followed) / 3)
    assert math.isclose(found.container_nats, -sum(math.log(OTHER[n][i]) for n, i in followed) / 3)
    assert found.perplexities == (math.exp(found.source_nats), math.exp(found.container_nats))


class Answers:
    """What `over_questions` asks of a model: it says the next of `answers` to every prompt, then ends."""

    def __init__(self, answers: list[list[int]], end: int, vocabulary: int) -> None:
        self.answers, self.end, self.vocabulary, self.turn = answers, end, vocabulary, -1

    def forward(self, ids: list[int], state: int | None = None) -> tuple[object, int]:
        import torch

        self.turn += state is None
        at = 0 if state is None else state
        said = [*self.answers[self.turn], self.end]
        return torch.nn.functional.one_hot(torch.tensor([said[at]]), self.vocabulary).double(), at + 1


def test_how_answers_are_counted() -> None:
    """Right is right to the letter, for each side apart; equal answers agree, right or wrong."""
    tokens = open_tokenizer(TINY)
    end, size = 0, len(tokens.tokens)

    def ids(text: str) -> list[int]:
        return tokens.encode(text)

    expected = ["Paris", "four", "blue", "yes", "no"]
    source = ["Paris", "four", "blue", "nay", "maybe"]
    container = ["Paris", "five", "blue.", "nay", "no"]
    sides = [Answers([ids(text) for text in said], end, size) for said in (source, container)]
    questions = [(f"question {n}?", word) for n, word in enumerate(expected)]
    found = fidelity.over_questions(*sides, tokens, questions, frozenset({end}))  # type: ignore[arg-type]
    assert (found.asked, found.source_right, found.container_right, found.agree) == (5, 3, 2, 2)
    assert [(c["expected"], c["source"], c["container"]) for c in found.changed] == [
        ("four", "four", "five"), ("blue", "blue", "blue."), ("no", "maybe", "no")
    ]  # fmt: skip


# -- in the memory of one --------------------------------------------------------------------------------------------


def test_under_a_cap(workshop: Workshop, tmp_path: Path) -> None:
    """One model after the other: every figure is the same, for a text in windows and for questions."""
    how = {"text": TEXT, "questions": QUESTIONS, "tokens": 150, "window": 64, "limit": 3}
    directory = workshop.container("int8")
    together = fidelity.compare(fidelity.FidelityRequest(directory, TINY, **how))
    said: list[str] = []
    one_by_one = fidelity.compare(
        fidelity.FidelityRequest(directory, TINY, **how, memory=6 << 30, scratch=tmp_path), said.append
    )
    assert one_by_one.table() == together.table()
    assert sum("memory: 6.00 GiB for everything" in text for text in said) == 2, said
    assert sum("logits compared" in text for text in said) == 2
    contexts = [re.findall(r"a context of ([0-9,]+) tokens", text) for text in said if text.startswith("memory: ")]
    assert len(contexts) == 2 and contexts[0] == contexts[1], "both sides remember what the work needs, and no more"
    assert not list(tmp_path.iterdir()), "what waited is gone"


def test_a_cap_that_is_too_small(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the numbers; and a budget beside it."""
    words = ["compare", workshop.container("int8"), "--source", TINY, "--text", TEXT, "--tokens", "64"]
    assert command(*words, "--memory", "64MiB") == 2
    assert "E1271" in capsys.readouterr().err
    assert command(*words, "--memory", "6GiB", "--budget", "1MiB") == 2
    assert "E1273" in capsys.readouterr().err


def test_the_container_is_planned_before_the_source_runs(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second side would be refused for is known before the first has run."""
    monkeypatch.setattr(fidelity, "_listen", None)
    real, asked = fidelity.planned, []

    def refusing(opened: Session, rows: int) -> MemoryPlan:
        asked.append((opened.path, rows, opened.options.context))
        real(opened, rows)
        raise RequestError("no room", code="E1271")

    monkeypatch.setattr(fidelity, "planned", refusing)
    directory = workshop.container("int8")
    request = fidelity.FidelityRequest(
        directory, TINY, text=TEXT, tokens=64, window=32, memory=6 << 30, scratch=tmp_path
    )
    with pytest.raises(RequestError, match="E1271"):
        fidelity.compare(request)
    assert asked == [(directory, 32, 32)]


def test_the_tokenizer_is_counted_once_and_fits(workshop: Workshop, tmp_path: Path, monkeypatch: Any) -> None:
    """It is refused before it is loaded where the cap has no room for that; afterwards the process has it."""
    request = fidelity.FidelityRequest(
        workshop.container("int8"), TINY, text=TEXT, tokens=64, window=32, memory=6 << 30, scratch=tmp_path
    )
    said: list[str] = []
    fidelity.compare(request, said.append)
    plans = [text for text in said if text.startswith("memory: ")]
    assert len(plans) == 2 and not any("\n  tokenizer" in text for text in plans)
    monkeypatch.setattr(fidelity, "open_tokenizer", None)
    monkeypatch.setattr(session, "loading_bytes", lambda place, process: (6 << 30) + (place == TINY))
    with pytest.raises(RequestError, match=r"at least 6,442,450,945 bytes .*while the tokenizer is loaded.*E1271"):
        fidelity.compare(request)


def test_no_room_for_logits(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without room for the rows is refused before anything is loaded, with what is needed."""
    room = apart.shutil.disk_usage(tmp_path)._replace(free=63 * 1024 * apart.LOGIT_BYTES)  # of 63 rows, to the byte
    monkeypatch.setattr(apart.shutil, "disk_usage", lambda folder: room)
    words = ["compare", workshop.container("int8"), "--source", TINY, "--text", TEXT, "--memory", "6GiB"]
    assert command(*words, "--tokens", "64", "--scratch", tmp_path) == 2
    err = capsys.readouterr().err
    assert "E1332" in err and str(tmp_path) in err and "64 rows" in err
    assert command(*words, "--tokens", "63", "--scratch", tmp_path) == 0


def test_what_was_heard() -> None:
    """Logits come back as they were, in order, in their own type: torch's and NumPy's."""
    torch = pytest.importorskip("torch")

    class Speaks:
        def __init__(self, make: Callable[[int], object]) -> None:
            self._make, self._said = make, 0

        def forward(self, ids: list[int], state: object = None, *, every: bool = False) -> tuple[object, None]:
            assert every
            self._said += 1
            return self._make(len(ids) * 100 + self._said), None

    def floats(seed: int) -> object:
        return torch.randn(seed // 100, 7, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)

    def doubles(seed: int) -> object:
        return np.random.default_rng(seed).standard_normal((seed // 100, 7))

    for make in (floats, doubles):
        heard = apart.Heard(apart.Scratch(None, 100, 7), 7)
        heard.listen(Speaks(make), [[1, 2, 3], [4, 5]])  # type: ignore[arg-type]
        for n, count in enumerate((3, 2), 1):
            again, expected = heard.forward([0] * count)[0], make(count * 100 + n)
            assert again.dtype == expected.dtype and (again == expected).all()  # type: ignore[attr-defined]
        heard.close()
