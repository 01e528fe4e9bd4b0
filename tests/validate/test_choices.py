"""Choices: the likeliest ending, by its tokens alone, as the files of others ask for it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kits.inference import TINY, Workshop, calm, command

from pagestone.formats.errors import RequestError
from pagestone.reader.text import open_tokenizer
from pagestone.validate import choices as module
from pagestone.validate import fidelity
from pagestone.validate.choices import Choice, Score, over_choices, picked, read_choices, scores, split


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


# -- files ------------------------------------------------------------------------------------------------------------

HELLASWAG = {
    "ind": 14, "activity_label": "Wakeboarding", "ctx_a": "A man is pulled.", "ctx_b": "he",
    "ctx": "A man is pulled. He", "split": "val", "split_type": "indomain", "label": "3",
    "endings": ["sits down.", "sings.", "sleeps.", "falls into the water."], "source_id": "x",
}  # fmt: skip
ARC = {
    "id": "M_7", "question": "Which is hottest?", "answerKey": "C",
    "choices": {"text": ["ice", "snow", "lava", "rain"], "label": ["A", "B", "C", "D"]},
}  # fmt: skip


def test_the_forms_of_a_line(tmp_path: Path) -> None:
    """HellaSwag's, ARC's with letters and with numbers, and the plain one with a number or a text."""
    numbered = ARC | {"answerKey": "2", "choices": {"text": ["a", "b"], "label": ["1", "2"]}}
    counted = ARC | {"answerKey": 1, "choices": {"text": ["a", "b"], "label": [1, 2]}}
    plain = {"question": "Two?", "choices": ["1", "2", "3"]}
    lines = [
        HELLASWAG,
        HELLASWAG | {"label": 1},
        ARC,
        numbered,
        counted,
        plain | {"answer": 1},
        plain | {"answer": "3"},
    ]
    found = read_choices(written(tmp_path / "c", *lines), None)
    assert found[0] == Choice("A man is pulled. He", tuple(HELLASWAG["endings"]), 3)
    assert found[2] == Choice("Question: Which is hottest?\nAnswer:", ("ice", "snow", "lava", "rain"), 2)
    assert [c.right for c in found] == [3, 1, 2, 1, 0, 1, 2]
    assert read_choices(tmp_path / "c", 2) == found[:2]


@pytest.mark.parametrize(
    "line",
    [
        "nothing\n", "[]\n", "7\n", {}, {"question": "?"}, HELLASWAG | {"label": ""}, HELLASWAG | {"label": "4"},
        HELLASWAG | {"label": -1}, HELLASWAG | {"label": True}, HELLASWAG | {"label": 1.0},
        HELLASWAG | {"label": "9" * 50}, HELLASWAG | {"endings": ["one"], "label": 0},
        HELLASWAG | {"endings": ["a", " "]}, HELLASWAG | {"endings": "ab"},
        HELLASWAG | {"ctx": None}, ARC | {"answerKey": "E"},
        ARC | {"choices": {"text": ["a", "b"], "label": ["A", "C", "B"]}},
        ARC | {"choices": {"text": ["a", "b"], "label": ["A"]}},
        ARC | {"choices": {"text": ["a", "b"], "label": ["C", "C"]}}, {"question": "?", "choices": ["a", "b"]},
        {"question": "?", "choices": ["a", "a"], "answer": "a"},
        {"question": "?", "choices": ["a", "b"], "answer": True},
        {"question": "?", "choices": ["a", 3], "answer": 0},
    ],
    ids=str,
)  # fmt: skip
def test_lines_that_are_none(tmp_path: Path, line: Any) -> None:
    """Refused with the number of the line."""
    with pytest.raises(RequestError, match="E1315") as caught:
        read_choices(written(tmp_path / "c", HELLASWAG, line), None)
    assert "line 2" in str(caught.value)


def test_an_empty_file(tmp_path: Path) -> None:
    """There is nothing to choose; the example that is given is one that is read."""
    with pytest.raises(RequestError, match="E1315") as caught:
        read_choices(written(tmp_path / "c"), None)
    example = (caught.value.remedy or "").partition("such as ")[2]
    assert len(read_choices(written(tmp_path / "c", json.loads(example)), None)) == 1


# -- scores -----------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are characters, but for `pairs` that are one."""

    def __init__(self, *pairs: str) -> None:
        self.pairs = pairs

    def encode(self, text: str) -> list[int]:
        for n, pair in enumerate(self.pairs):
            text = text.replace(pair, chr(200 + n))
        return [ord(c) for c in text]


class Follows:
    """A model: the likelihood of a token is a function of the one before it; it counts the ids it was fed."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(3).normal(0, 3, (256, 256))
        self.fed: list[int] = []

    def forward(self, ids: Sequence[int], state: Any = None, *, every: bool = False) -> tuple[Any, None]:
        assert every and state is None
        self.fed.append(len(ids))
        return self.table[list(ids)], None

    def nats(self, before: int, token: int) -> float:
        row = self.table[before]
        return float(row[token] - math.log(sum(math.exp(x) for x in row)))


def test_scores_are_of_the_endings_tokens() -> None:
    """Every token of an ending, the space before it too, none of the context's; by bytes, not by tokens."""
    model: Any = Follows()
    tokens: Any = Letters()
    choice = Choice("ab", ("xé", "q"), 0)
    (found,) = scores(model, tokens, [choice])
    for ending, score in zip(("xé", "q"), found, strict=True):
        text = "ab " + ending
        expected = sum(model.nats(ord(a), ord(b)) for a, b in itertools.pairwise(text[1:]))
        assert math.isclose(score.nats, expected, rel_tol=1e-12)
        assert math.isclose(score.normalised, expected / len(ending.encode()))
    assert model.fed == [4, 3], "the last token is not fed: nothing follows it"


def test_logits_of_any_size() -> None:
    """What is common to all logits of a row says nothing, however much it is."""
    model: Any = Follows()
    (before,) = scores(model, Letters(), [Choice("ab", ("cd", "e"), 0)])  # type: ignore[arg-type]
    model.table += 2000
    (after,) = scores(model, Letters(), [Choice("ab", ("cd", "e"), 0)])  # type: ignore[arg-type]
    assert all(math.isclose(a.nats, b.nats, rel_tol=1e-9) for a, b in zip(before, after, strict=True))


def test_where_context_and_ending_part() -> None:
    """One space lies between; a token that takes a part of both is the ending's; one id is always the context's."""
    assert split(Letters(), "ab", "cd") == ([*map(ord, "ab cd")], 2)  # type: ignore[arg-type]
    assert split(Letters(), "ab  ", " cd ") == ([*map(ord, "ab cd")], 2)  # type: ignore[arg-type]
    assert split(Letters("b c"), "ab", "cd") == ([97, 200, 100], 1)  # type: ignore[arg-type]
    assert split(Letters("ab c"), "ab", "cd") == ([200, 100], 1)  # type: ignore[arg-type]


def test_what_is_counted() -> None:
    """Right by the sum and by bytes, and whether the two agree; the first of equal scores is chosen."""
    choice = Choice("c", ("long ending", "x"), 0)
    both = [Score(-11.0, -1.0), Score(-3.0, -3.0)]
    other = [Score(-3.0, -0.3), Score(-3.0, -3.0)]
    assert picked(both, normalised=False) == 1 and picked(both, normalised=True) == 0
    assert picked(other, normalised=False) == 0
    found = over_choices([choice, choice], [both, other], [other, other])
    assert (found.asked, found.source_right, found.container_right, found.agree) == (2, 1, 2, 1)
    assert (found.source_right_normalised, found.container_right_normalised, found.agree_normalised) == (2, 2, 2)


# -- with a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def workshop(oracle: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    oracle("torch")
    oracle("transformers")
    calm()
    return Workshop(tmp_path_factory.mktemp("choices"))


LINES = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome"], "answer": "Paris"},
    {"question": "What is the capital of Italy?", "choices": {"text": ["Oslo", "Rome"], "label": ["A", "B"]},
     "answerKey": "B"},
    {"ctx": "The capital of France is", "endings": ["Paris.", "Rome.", "Madrid."], "label": "0"},
]  # fmt: skip


def test_compare(workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the table and in JSON; the same figures under a cap; a bf16 container chooses as its source does."""
    file = written(tmp_path / "choices.jsonl", *LINES)
    words = ["compare", workshop.container("int8"), "--source", TINY, "--choices", file]
    assert command(*words) == 0
    out = capsys.readouterr().out
    assert "chosen right" in out and "by length" in out and "3 of 3" in out
    request = fidelity.FidelityRequest(workshop.container("q3"), TINY, choices=file)
    together = fidelity.compare(request).table()
    assert together["choices"]["asked"] == 3 and together["choices"]["source_right"] >= 1
    capped = fidelity.FidelityRequest(workshop.container("q3"), TINY, choices=file, memory=6 << 30)
    assert fidelity.compare(capped).table() == together
    assert command(*words, "--limit", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["choices"]["asked"] == 1
    same = fidelity.compare(fidelity.FidelityRequest(workshop.container("bf16"), TINY, choices=file)).choices
    assert same is not None and same.agree == same.agree_normalised == 3


def test_refused_before_anything_is_loaded(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that is none; ids that the model does not have."""
    words = ["compare", workshop.container("int8"), "--source", TINY, "--choices"]
    monkeypatch.setattr(fidelity, "_source_model", None)
    assert command(*words, written(tmp_path / "bad", {"ctx": "x"})) == 2
    assert "E1315" in capsys.readouterr().err
    tokens = open_tokenizer(TINY)
    seen: list[list[int]] = []
    most = module.longest(tokens, [Choice("a b c", ("d", "e f g h"), 0)], seen.append)
    assert most == len(tokens.encode("a b c e f g h")) and seen[0] == tokens.encode("a b c d")
    monkeypatch.setattr(fidelity, "open_tokenizer", lambda *_: SimpleNamespace(encode=lambda _: [1, 99999], place=TINY))
    monkeypatch.setattr(fidelity, "end_tokens", lambda *_: frozenset())
    assert command(*words, written(tmp_path / "good", LINES[0])) == 2
    assert "99999" in capsys.readouterr().err
