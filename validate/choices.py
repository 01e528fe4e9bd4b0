"""Choices: which of several endings a model finds likeliest, as HellaSwag, ARC and their like ask it.

The score of an ending is the sum of the log-likelihoods of its tokens after the context, in float64; normalised, that
sum by the ending's length in UTF-8 bytes, so that long ones are not at a loss. The highest score is the model's choice,
the first of equal ones. Context and ending are one text, a space between them, and are tokenised together: the ending's
tokens are those from where the ids of the context alone part from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats.dtypes import Array
from pagestone.reader.model import Model, values_of
from pagestone.reader.text import Tokenizer
from pagestone.validate import requests
from pagestone.validate.requests import label, text

EXAMPLE = '{"ctx": "The sky is", "endings": ["blue", "a fish"], "label": 0}'
"""A line of choices."""
FORMS = (
    '{"ctx": ..., "endings": [...], "label": 2}, '
    '{"question": ..., "choices": {"text": [...], "label": ["A", ...]}, "answerKey": "B"} or '
    '{"question": ..., "choices": [...], "answer": ...}'
)
"""A line of a file of choices: HellaSwag's, ARC's, and the plainest."""
ASKED = "Question: {}\nAnswer:"
"""What a question becomes; a context is taken as it is."""
FEWEST = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """One question: what stands before, endings, and which of them is right."""

    context: str
    endings: tuple[str, ...]
    right: int


@dataclass(frozen=True, slots=True)
class Score:
    """Of one ending: the sum of log-likelihoods in nats, and that by its bytes."""

    nats: float
    normalised: float


@dataclass(slots=True)
class ChoiceResult:
    """Over a file: right by the sum and right by the normalised sum, of each model; `agree` counts equal choices."""

    asked: int = 0
    source_right: int = 0
    container_right: int = 0
    agree: int = 0
    source_right_normalised: int = 0
    container_right_normalised: int = 0
    agree_normalised: int = 0


# -- files ------------------------------------------------------------------------------------------------------------


def read_choices(path: Path, limit: int | None) -> list[Choice]:
    """The choice of every line; `RequestError` (E1315) for a line that is none of `FORMS`."""
    return requests.json_lines(path, limit, _choice, code="E1315", forms=f"one of {FORMS}", example=EXAMPLE)


def _choice(table: Any) -> Choice:
    if "endings" in table:
        return _checked(text(table["ctx"]), table["endings"], _number(table["label"]))
    context, choices = ASKED.format(text(table["question"])), table["choices"]
    if isinstance(choices, Mapping):
        labels = [label(x) for x in choices["label"]]
        if len(labels) != len(choices["text"]):
            raise ValueError("as many labels as texts expected")
        return _checked(context, choices["text"], _only(labels, label(table["answerKey"])))
    answer = table["answer"]
    return _checked(context, choices, answer if type(answer) is int else _only(choices, text(answer)))


def _checked(context: str, endings: Any, right: int) -> Choice:
    if type(endings) is not list or len(endings) < FEWEST:
        raise ValueError(f"a list of at least {FEWEST} endings expected")
    texts = tuple(text(ending) for ending in endings)
    if not 0 <= right < len(texts):
        raise ValueError(f"the right ending's number below {len(texts)} expected, found {right}")
    return Choice(context, texts, right)


def _number(value: Any) -> int:
    """HellaSwag's label: a number, or its digits in a string; tests without answers have an empty one."""
    if type(value) is str and value.isascii() and value.isdecimal() and len(value) < len("1000"):
        return int(value)
    if type(value) is not int:
        raise ValueError(f"the right ending's number expected, found {value!r:.40}")
    return value


def _only(values: Sequence[Any], value: str) -> int:
    if list(values).count(value) != 1:
        raise ValueError(f"the right answer {value!r:.40} once among the choices expected")
    return list(values).index(value)


# -- scores -----------------------------------------------------------------------------------------------------------


def split(tokens: Tokenizer, context: str, ending: str) -> tuple[list[int], int]:
    """(ids of context and ending, how many of them are the context's); at least one is, and at least one is not."""
    before = context.rstrip()
    alone, both = tokens.encode(before), tokens.encode(f"{before} {ending.strip()}")
    same = next((n for n, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b), min(len(alone), len(both)))
    return both, max(1, min(same, len(both) - 1))


def longest(tokens: Tokenizer, choices: Sequence[Choice], checked: Callable[[list[int]], None]) -> int:
    """Ids of the longest context with its ending; `checked` is called with the ids of each."""
    most = 0
    for choice in choices:
        for ending in choice.endings:
            ids, _ = split(tokens, choice.context, ending)
            checked(ids)
            most = max(most, len(ids))
    return most


def scores(model: Model, tokens: Tokenizer, choices: Sequence[Choice]) -> list[list[Score]]:
    """The score of every ending of every choice.

    Every ending is fed with its whole context: a state that forgets nothing could be shared, a recurrent one cannot go
    back.
    """
    return [[_score(model, tokens, choice.context, ending) for ending in choice.endings] for choice in choices]


def _score(model: Model, tokens: Tokenizer, context: str, ending: str) -> Score:
    ids, known = split(tokens, context, ending)
    logits = model.forward(ids[:-1], every=True)[0]
    nats = 0.0
    for at in range(known, len(ids)):
        nats += _log_likelihood(values_of(logits[at - 1 : at])[0], ids[at])
    return Score(nats, nats / len(ending.strip().encode()))


def _log_likelihood(row: Array, token: int) -> float:
    """Of one token, in float64."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    return float(wide[token] - np.log(np.exp(wide).sum()))


def picked(found: Sequence[Score], *, normalised: bool) -> int:
    """The number of the highest score, the first of equal ones."""
    values = [score.normalised if normalised else score.nats for score in found]
    return values.index(max(values))


def over_choices(
    choices: Sequence[Choice], source: Sequence[Sequence[Score]], container: Sequence[Sequence[Score]]
) -> ChoiceResult:
    """What two models' scores say of the same choices."""
    result = ChoiceResult(asked=len(choices))
    for choice, theirs, ours in zip(choices, source, container, strict=True):
        for normalised, end in ((False, ""), (True, "_normalised")):
            one, two = (picked(each, normalised=normalised) for each in (theirs, ours))
            for name, add in (
                ("source_right", one == choice.right), ("container_right", two == choice.right), ("agree", one == two)
            ):  # fmt: skip
                setattr(result, name + end, getattr(result, name + end) + add)
    return result
