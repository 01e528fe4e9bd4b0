"""From messages to streamed text: sampling, one turn, and turn after turn."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagestone.formats.errors import PagestoneError, RequestError
from pagestone.formats.text import size_text
from pagestone.reader.decoding import Emit, Speech, ignore
from pagestone.reader.leases import Counters, Totals
from pagestone.reader.model import Model
from pagestone.reader.sampling import Sampler, Sampling
from pagestone.reader.text import Message, Tokenizer, check_ids

if TYPE_CHECKING:
    from types import FrameType


ROOM = 256
"""Tokens of an answer that a larger context is recommended to have room for."""


class TurnEnded(Exception):
    """The user pressed Ctrl-C: raised between layers, where nothing is leased."""


@contextmanager
def interruptible(model: Model) -> Iterator[None]:
    """Within it Ctrl-C raises `TurnEnded` before the next layer's experts; a second Ctrl-C is `KeyboardInterrupt`."""
    pressed = 0

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt

    def look() -> None:
        if pressed:
            raise TurnEnded

    try:
        before = signal.signal(signal.SIGINT, press)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    model.context.checkpoint = look
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        model.context.checkpoint = lambda: None


@dataclass(slots=True)
class Turn:
    """One answer. Times are seconds: `prefill` until the first token was chosen, `decode` for the rest."""

    prompt_tokens: int
    fed_tokens: int
    """Tokens of the prompt that were not in the state already."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    """The answer."""
    thought: str = ""
    """What was thought before it, or instead of it."""
    answered: bool = True
    """Whether the answer was begun: False if the thought was cut."""
    thought_key: str = "reasoning_content"
    """The field of a message in which this model's chat template looks for the thought."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    context: int | None = None
    """Tokens that the state has room for; None if it grows."""
    stopped: str = "length"
    """"eos", "length", "context" or "interrupted"."""
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    """What experts cost until the first token was chosen, and after it."""

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token, which prefill gives, is not counted."""
        return (len(self.ids) - 1) / self.decode_seconds if self.decode_seconds and len(self.ids) > 1 else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes of experts read (or used through a map) for each token of decoding."""
        return _moved(self.decode) / max(1, len(self.ids) - 1)

    def report(self) -> str:
        """One line for stderr."""
        verb = "mapped" if self.prefill.bytes_mapped else "read"
        return (
            f"[{self.fed_tokens} tokens in: {self.prefill_seconds:.2f} s, {size_text(_moved(self.prefill))} {verb}; "
            f"{len(self.ids)} tokens out: {self.tokens_per_second:.2f} tokens/s, "
            f"hit rate {100 * self.decode.hit_rate:.1f} %, {size_text(self.bytes_per_token)} {verb} a token]"
        )

    def ending(self) -> str | None:
        """What to say about the end, if it is not the one the model chose."""
        if self.stopped == "eos" and self.answered:
            return None
        cut = {
            "eos": "the model ended within its thought",
            "length": f"cut after {len(self.ids)} tokens; --max-new-tokens allows more",
            "context": f"cut after {len(self.ids)} tokens: the context of {self.context or 0:,} is full; --context "
            "gives it more",
            "interrupted": "interrupted",
        }[self.stopped]
        return f"({cut})" if self.answered else f"({cut}: there is no answer, only a thought)"

    def message(self) -> Message:
        """The assistant's message for the next turn; the template decides whether an earlier thought is fed again."""
        thought = {self.thought_key: self.thought} if self.thought else {}
        return {"role": "assistant", "content": self.text, **thought}

    def table(self) -> dict[str, Any]:
        """For --json. Rates are of decoding only."""
        return {
            "text": self.text, "thought": self.thought, "answered": self.answered, "ids": self.ids,
            "stopped": self.stopped, "prompt_tokens": self.prompt_tokens, "fed_tokens": self.fed_tokens,
            "prefill_seconds": self.prefill_seconds, "decode_seconds": self.decode_seconds,
            "tokens_per_second": self.tokens_per_second,
            "hit_rate": self.decode.hit_rate, "bytes_per_token": self.bytes_per_token,
            "prefill": self.prefill.table(), "decode": self.decode.table(),
        }  # fmt: skip


def _moved(counters: Counters) -> int:
    return counters.bytes_read + counters.bytes_mapped


class Conversation:
    """A model, its tokenizer and what was fed so far; `turn` continues where ids agree, and begins anew where not.

    `ends` are the token ids that end an answer; `note` is told what the user should know.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, sampling: Sampling, ends: frozenset[int], note: Emit = ignore
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._sampler = Sampler(sampling)
        self._ends = ends
        self._note = note
        self._fed: list[int] = []
        self._state: Any = None

    def answer(self, messages: Sequence[Message], limit: int, emit: Emit = ignore, think: Emit = ignore) -> Turn:
        """The assistant's turn after `messages` by the chat template."""
        return self.turn(self.tokenizer.chat(messages), limit, emit, think)

    def turn(
        self, ids: Sequence[int], limit: int, emit: Emit = ignore, think: Emit = ignore, *, raw: bool = False
    ) -> Turn:
        """At most `limit` tokens after `ids`; text is emitted as soon as its characters are whole.

        `emit` is given the answer, `think` the thought; with `raw` everything is answer. Ctrl-C ends it early; what was
        said until then is in the turn. A full context ends it, too. Raises `RequestError` for ids that the model does
        not have (E1233, E1243), and for more than its context holds (E1272).
        """
        check_ids(ids, self.model.vocabulary, self.tokenizer.place)
        self.check_room(ids)
        self._warn(len(ids), limit)
        begun = self._known(ids)
        turn = Turn(len(ids), len(ids) - begun, context=self.model.context.tokens)
        before = self._counted()
        speech = Speech(self.tokenizer, ids, emit, think, raw=raw)
        with interruptible(self.model):
            try:
                self._speak(list(ids), begun, limit, turn, speech)
            except TurnEnded:
                turn.stopped = "interrupted"
                self._fed, self._state = [], None  # layers may disagree on what they have seen
        speech.finish()
        turn.text, turn.thought, turn.answered = speech.text, speech.thought, speech.answered
        turn.thought_key = speech.thought_key
        after = self._counted()
        turn.prefill, turn.decode = (
            (turn.prefill - before, after - turn.prefill) if turn.ids else (after - before, Counters())
        )
        return turn

    def check_room(self, ids: Sequence[int]) -> None:
        """Refuse (E1272) a prompt that leaves the context no room for an answer."""
        room = self.model.context.tokens
        if room is not None and len(ids) > room:
            raise RequestError(
                f"a prompt of at most {room:,} tokens expected (the context), found {len(ids):,}",
                code="E1272",
                remedy=f"say less, begin anew, or give --context {len(ids) + ROOM} or more (and --memory for it)",
            )

    def _warn(self, prompt: int, limit: int) -> None:
        """Say it before the model is taken beyond the positions it was made for."""
        positions = self.model.positions
        if positions is None or prompt + limit <= positions:
            return
        what = (
            f"the prompt has {prompt} tokens"
            if prompt > positions
            else f"the prompt has {prompt} tokens and the answer may have {limit}"
        )
        self._note(
            f"warning: {what}; the model was made for {positions} positions (max_position_embeddings). It goes on "
            "beyond them, but what it says there may make no sense"
        )

    def _counted(self) -> Counters:
        """What the store counted so far."""
        return Totals.of(self.model.context.store.counters).total

    def _known(self, ids: Sequence[int]) -> int:
        """How many of `ids` the state has seen already; all of its tokens must be among them, with one left to feed."""
        if self._state is not None and len(self._fed) < len(ids) and self._fed == list(ids[: len(self._fed)]):
            return len(self._fed)
        self._fed, self._state = [], None
        return 0

    def _speak(self, ids: list[int], begun: int, limit: int, turn: Turn, speech: Speech) -> None:
        clock = time.perf_counter()
        pending = ids[begun:]
        seen = set(ids)
        while True:
            logits, self._state = self.model.forward(pending, self._state)
            self._fed += pending
            chosen = self._sampler(logits[-1], seen)
            seen.add(chosen)
            now = time.perf_counter()
            if not turn.ids:
                turn.prefill_seconds, clock = now - clock, now
                turn.prefill = self._counted()
            turn.decode_seconds = now - clock
            turn.ids.append(chosen)
            if chosen in self._ends:
                turn.stopped = "eos"
                return
            speech.add(chosen)
            if len(turn.ids) >= limit:
                return
            if turn.context is not None and len(self._fed) >= turn.context:
                turn.stopped = "context"
                return
            pending = [chosen]


def converse(
    talk: Conversation, limit: int, ask: Callable[[], str | None], emit: Emit, note: Emit, system: str | None = None,
    think: Emit = ignore,
) -> None:  # fmt: skip
    """Turns until `ask` returns None. An interrupted answer stays in the conversation as far as it went.

    A turn that cannot be asked (no text, a template that fails) is said and forgotten, and so is one without an answer.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            said = ask()
            if said is None:
                return
            if not said.strip():
                continue
            asked = [*messages, {"role": "user", "content": said}]
            ids = talk.tokenizer.chat(asked)
            check_ids(ids, talk.model.vocabulary, talk.tokenizer.place)
            talk.check_room(ids)
        except KeyboardInterrupt:
            note("(Ctrl-D ends the session)")
            continue
        except PagestoneError as error:
            for line in f"error: {error}".splitlines():
                note(line)
            continue
        turn = talk.turn(ids, limit, emit, think)
        emit("\n")
        if (ending := turn.ending()) is not None:
            note(ending)
        if turn.answered and (turn.text or turn.stopped == "eos"):
            messages = [*asked, turn.message()]
        else:
            note("(this turn is not remembered)")
        note(turn.report())
