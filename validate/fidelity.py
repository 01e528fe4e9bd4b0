"""`compare`: what a codec costs, measured on the whole model against the source's own weights.

The source runs in unmodified transformers with its eager experts; the container runs through the reader. Under a cap of
memory the source runs first, as a virtual container (`validate/apart.py`), with the same logits. Over a text,
in windows: KL divergence KL(source || container), agreement of the first choice, perplexity of both. Over questions:
how many each answers to the letter, greedily. Over choices: how often each finds the right ending likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestone.convert.checkpoint import open_checkpoint
from pagestone.formats.errors import RequestError
from pagestone.formats.strict_json import MAX_COUNT
from pagestone.formats.text import shown_lines, with_parameters
from pagestone.reader import hosts, inputs
from pagestone.reader.decoding import spoken
from pagestone.reader.model import AUTO, REFERENCE, Logits, Model, greedy, values_of
from pagestone.reader.session import Session, SessionOptions
from pagestone.reader.text import Tokenizer, check_ids, end_tokens, open_tokenizer
from pagestone.validate import requests
from pagestone.validate.apart import COMPARED, Heard, Scratch, let_go, planned, planned_model
from pagestone.validate.choices import Choice, ChoiceResult, longest, over_choices, read_choices, scores
from pagestone.validate.virtual import open_virtual

if TYPE_CHECKING:
    import torch

ANSWER = 64
"""Tokens: a longer answer is cut, and counts as wrong."""


@dataclass(frozen=True, slots=True)
class FidelityRequest:
    """What `compare` was asked; see its options."""

    directory: Path
    source: Path
    text: Path | None = None
    questions: Path | None = None
    choices: Path | None = None
    tokens: int = 8192
    window: int = 256
    limit: int | None = None
    budget: int | None = None
    """Bytes; see `SessionOptions`, also for what follows."""
    io: str = "direct"
    tokenizer: Path | None = None
    experts: str = AUTO
    host: str = hosts.DEFAULT
    memory: int | None = None
    scratch: Path | None = None
    """Folder in which the source's logits wait under a cap of memory; None for that of temporary files."""


@dataclass(slots=True)
class TextResult:
    """Over a text: nats a token are mean negative log-likelihoods, KL is in nats, both summed in float64."""

    positions: int = 0
    """Where distributions were compared."""
    predicted: int = 0
    """Tokens whose likelihood was measured: all but the first of every window."""
    kl: float = 0.0
    kl_largest: float = 0.0
    top1: float = 0.0
    source_nats: float = 0.0
    container_nats: float = 0.0

    @property
    def perplexities(self) -> tuple[float, float]:
        """(source's, container's)."""
        return math.exp(self.source_nats), math.exp(self.container_nats)


@dataclass(slots=True)
class QuestionResult:
    """Over questions: answered to the letter by each; `agree` counts equal answers, right or wrong."""

    asked: int = 0
    source_right: int = 0
    container_right: int = 0
    agree: int = 0
    changed: list[dict[str, str]] = field(default_factory=list)
    """Questions the two answer differently, with both answers."""


@dataclass(slots=True)
class Fidelity:
    """The result of `compare`."""

    directory: str
    source: str
    container_id: str
    codec: str
    parameters: dict[str, Any]
    experts: str
    text_result: TextResult | None = None
    questions: QuestionResult | None = None
    choices: ChoiceResult | None = None

    def table(self) -> dict[str, Any]:
        """For --json."""
        facts = asdict(self)
        if self.text_result is not None:
            source, container = self.text_result.perplexities
            facts["text_result"] |= {"source_perplexity": source, "container_perplexity": container}
        return facts

    def text(self) -> str:
        """A table for people: a row for the source, a row for the container."""
        name = f"{self.codec}{with_parameters(self.parameters)}, {self.experts}"
        heads, source, ours = ["weights"], ["source"], [name]
        if (t := self.text_result) is not None:
            heads += ["KL (nats)", "top-1", "nats/token", "perplexity"]
            source += ["", "", f"{t.source_nats:.4f}", f"{t.perplexities[0]:.3f}"]
            ours += [f"{t.kl:.5f}", f"{100 * t.top1:.2f} %", f"{t.container_nats:.4f}", f"{t.perplexities[1]:.3f}"]
        if (q := self.questions) is not None:
            heads += ["right", "same answer"]
            source += [f"{q.source_right} of {q.asked}", ""]
            ours += [f"{q.container_right} of {q.asked}", f"{q.agree} of {q.asked}"]
        if (c := self.choices) is not None:
            heads += ["chosen right", "by length", "same choice"]
            source += [f"{c.source_right} of {c.asked}", f"{c.source_right_normalised} of {c.asked}", ""]
            ours += [f"{c.container_right} of {c.asked}", f"{c.container_right_normalised} of {c.asked}",
                     f"{c.agree} of {c.asked}"]  # fmt: skip
        rows = [heads, source, ours]
        widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return shown_lines([f"{self.directory} against {self.source}", *lines])


def compare(request: FidelityRequest, progress: Callable[[str], None] = lambda _: None) -> Fidelity:
    """Run both models over the text and the questions."""
    for name, value, least in (("--tokens", request.tokens, 2), ("--window", request.window, 2),
                               ("--limit", request.limit, 1)):  # fmt: skip
        requests.number(name, value, least, MAX_COUNT)
    with Session(request.directory, _options(request), progress) as session, ExitStack() as opened:
        open_checkpoint(request.source)
        work = _work(request, session)
        source: Model | Heard
        if request.memory is None:
            container = session.model
            progress("loading the source")
            source = _source_model(request.source, container)
        else:
            session.options = replace(session.options, context=work.longest(request.window))
            planned(session, work.rows(request.window))  # refused before the source runs for hours
            pieces = [] if work.ids is None else list(windows(work.ids, request.window))
            source = Heard(Scratch(request.scratch, sum(map(len, pieces)), work.vocabulary), work.vocabulary)
            opened.callback(source.close)
            _listen(source, pieces, request, work, progress)
            container = planned_model(session, work.rows(request.window))
            opened.callback(container.close)
        return _result(request, session, work, source, container, progress)


@dataclass(frozen=True, slots=True)
class _Work:
    """What both models are given."""

    tokens: Tokenizer
    ids: list[int] | None
    questions: list[tuple[str, str]] | None
    asked: list[list[int]]
    choices: list[Choice] | None
    scored: int
    """Ids of the longest choice."""
    vocabulary: int
    ends: frozenset[int]

    def rows(self, window: int) -> int:
        """The most rows of logits that are made at once."""
        return max(1, self.scored, 0 if self.ids is None else min(window, len(self.ids)))

    def longest(self, window: int) -> int:
        """Tokens: the most that a model must remember."""
        return max([*(len(ids) + ANSWER for ids in self.asked), self.rows(window)])


def _options(request: FidelityRequest) -> SessionOptions:
    return SessionOptions(
        request.io, request.budget, experts=request.experts, host=request.host, memory=request.memory
    )  # fmt: skip


def _work(request: FidelityRequest, session: Session) -> _Work:
    """Everything that can be refused before a model is loaded."""
    questions = None if request.questions is None else read_questions(request.questions, request.limit)
    session.require_loading(request.tokenizer or request.source)
    session.tokenizer = tokens = open_tokenizer(request.source, request.tokenizer)  # no plan counts another
    ids = None if request.text is None else _text_ids(request, tokens)
    asked = [tokens.chat([{"role": "user", "content": q}]) for q, _ in questions or []]
    for some in [*([] if ids is None else [ids]), *asked]:
        check_ids(some, session.vocabulary, tokens.place)
    choices = None if request.choices is None else read_choices(request.choices, request.limit)
    scored = longest(tokens, choices or [], lambda some: check_ids(some, session.vocabulary, tokens.place))
    ends = end_tokens(session.path, tokens)
    return _Work(tokens, ids, questions, asked, choices, scored, session.vocabulary, ends)


def _listen(
    heard: Heard, pieces: list[list[int]], request: FidelityRequest, work: _Work, progress: Callable[[str], None]
) -> None:
    """Keep what the source says, run alone under the cap, and let it go again."""
    options = SessionOptions(
        "direct", experts=REFERENCE, host=request.host, memory=request.memory, context=work.longest(request.window)
    )
    progress("the source, encoded as it is read")
    with Session(request.source, options, progress, opener=lambda path: open_virtual(Path(path))) as session:
        session.tokenizer = work.tokens
        model = planned_model(session, work.rows(request.window))
        try:
            heard.listen(model, pieces)
            heard.answers = answers(model, work.tokens, work.questions or [], work.ends)
            heard.scores = scores(model, work.tokens, work.choices or [])
        finally:
            model.close()
    del model
    let_go()


def _result(
    request: FidelityRequest, session: Session, work: _Work, source: Model | Heard, container: Model,
    progress: Callable[[str], None],
) -> Fidelity:  # fmt: skip
    manifest = session.container.manifest
    result = Fidelity(
        str(request.directory), str(request.source), manifest.container_id, manifest.codec,
        dict(manifest.parameters), session.loading.experts,
    )  # fmt: skip
    if work.ids is not None:
        progress(f"text: {len(work.ids)} tokens")
        result.text_result = over_text(source, container, work.ids, request.window)
    if work.questions is not None:
        progress(f"{len(work.questions)} questions")
        result.questions = over_questions(source, container, work.tokens, work.questions, work.ends)
    if work.choices is not None:
        progress(f"{len(work.choices)} choices")
        theirs = source.scores if isinstance(source, Heard) else scores(source, work.tokens, work.choices)
        result.choices = over_choices(work.choices, theirs, scores(container, work.tokens, work.choices))
    return result


def _source_model(source: Path, container: Model) -> Model:
    """The source in unmodified transformers, with the attention the container's model has, if that is of one kind."""
    from pagestone.reader.attention import PACKED
    from pagestone.reader.hosts.transformers import HOST, plain_model

    other = container.surroundings()["model"]
    return plain_model(source, attention=other["attention"] if other["host"] == HOST.name else PACKED)


def _text_ids(request: FidelityRequest, tokens: Tokenizer) -> list[int]:
    assert request.text is not None
    ids = tokens.encode(inputs.file(request.text))[: request.tokens]
    if len(ids) < 2:
        raise RequestError(
            f"a text of at least 2 tokens expected, found {len(ids)}", code="E1311", file=request.text,
            remedy="give a longer text",
        )  # fmt: skip
    return ids


def windows(ids: Sequence[int], size: int) -> Iterator[list[int]]:
    """Consecutive pieces of `size` ids, the last one shorter; one of a single id is left out."""
    for start in range(0, len(ids), size):
        piece = list(ids[start : start + size])
        if len(piece) > 1:
            yield piece


def over_text(source: Model | Heard, container: Model, ids: Sequence[int], window: int) -> TextResult:
    """Compare distributions at every position of every window. Logits are taken to float64 before anything else.

    A few rows at a time: of a window whose vocabulary is large all of them would be gigabytes. Sums are over windows.
    """
    import torch

    result = TextResult()
    kl = agree = nats_source = nats_container = 0.0
    for piece in windows(ids, window):
        logits = source.forward(piece, every=True)[0], container.forward(piece, every=True)[0]
        rows = [_compared(*logits, piece, at) for at in range(0, len(piece), COMPARED)]
        each, same, likely, ours = (torch.cat(column) for column in zip(*rows, strict=True))
        kl += float(each.sum())
        result.kl_largest = max(result.kl_largest, float(each.max()))
        agree += float(same.sum())
        nats_source -= float(likely.sum())
        nats_container -= float(ours.sum())
        result.positions += len(piece)
        result.predicted += len(piece) - 1
    result.kl, result.top1 = kl / result.positions, agree / result.positions
    result.source_nats, result.container_nats = nats_source / result.predicted, nats_container / result.predicted
    return result


def _compared(source: Logits, container: Logits, piece: Sequence[int], at: int) -> tuple[torch.Tensor, ...]:
    """Of `COMPARED` rows from `at`: KL, whether the first choices agree, log-likelihood of the next id in each."""
    import torch

    one, two = (_log_probabilities(logits[at : at + COMPARED]) for logits in (source, container))
    target = torch.tensor(piece[at + 1 : at + 1 + COMPARED], dtype=torch.int64)[:, None]
    likely = [p[: len(target)].gather(1, target)[:, 0] for p in (one, two)]
    return (one.exp() * (one - two)).sum(-1), one.argmax(-1) == two.argmax(-1), *likely


def _log_probabilities(logits: Logits) -> torch.Tensor:
    import torch

    return torch.from_numpy(values_of(logits)).double().log_softmax(-1)


EXAMPLE = '{"question": "What is 2 + 2?", "answer": "4"}'
"""A line of questions."""


def read_questions(path: Path, limit: int | None) -> list[tuple[str, str]]:
    """(question, answer) of every line; `RequestError` for a line that has none."""
    return requests.json_lines(
        path, limit, lambda table: (requests.text(table["question"]), requests.label(table["answer"])),
        code="E1312", forms='{"question": ..., "answer": ...}', example=EXAMPLE,
    )  # fmt: skip


def over_questions(
    source: Model | Heard, container: Model, tokens: Tokenizer, questions: Sequence[tuple[str, str]],
    ends: frozenset[int],
) -> QuestionResult:  # fmt: skip
    """Ask both every question by the chat template; an answer is right if it is the expected one to the letter."""
    result = QuestionResult()
    theirs = source.answers if isinstance(source, Heard) else answers(source, tokens, questions, ends)
    ours = answers(container, tokens, questions, ends)
    for (question, expected), one, two in zip(questions, theirs, ours, strict=True):
        result.asked += 1
        result.source_right += one == expected
        result.container_right += two == expected
        result.agree += one == two
        if one != two:
            result.changed.append({"question": question, "expected": expected, "source": one, "container": two})
    return result


def answers(
    model: Model, tokens: Tokenizer, questions: Sequence[tuple[str, str]], ends: frozenset[int]
) -> list[str]:  # fmt: skip
    """A model's answer to every question."""
    return [answer(model, tokens, tokens.chat([{"role": "user", "content": q}]), ends) for q, _ in questions]


def answer(model: Model, tokens: Tokenizer, ids: Sequence[int], ends: frozenset[int]) -> str:
    """The greedy answer, at most `ANSWER` tokens, without thoughts and surrounding spaces."""
    pending, state = list(ids), None
    said: list[int] = []
    while len(said) < ANSWER:
        logits, state = model.forward(pending, state)
        chosen = greedy(logits)
        if chosen in ends:
            break
        said.append(chosen)
        pending = [chosen]
    return spoken(tokens, ids, said).text.strip()
