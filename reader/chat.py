"""From messages to streamed text: sampling, one turn, and a session of turns."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestone.formats.errors import RequestError
from pagestone.reader.budget import size_text
from pagestone.reader.host import HostModel
from pagestone.reader.leases import Counters, Totals
from pagestone.reader.text import chat_ids

if TYPE_CHECKING:
    import torch

UNFINISHED = "�"
"""What a decoder puts where a character's bytes are not all there yet."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 is greedy: the first of the largest logits."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise RequestError(
                f"a temperature of at least 0, 0 < top-p <= 1 and a top-k of at least 0 expected, found {self}",
                code="E1242",
                remedy="correct the sampling options",
            )


class Sampler:
    """Chooses tokens; two with the same seed choose the same from the same logits."""

    def __init__(self, sampling: Sampling) -> None:
        import torch

        self._how = sampling
        self._random = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """A token id for logits [vocabulary]. Order: temperature, top-k, top-p, all in float32."""
        import torch

        how = self._how
        if how.temperature == 0:
            return int(logits.argmax())
        values, ids = torch.sort(logits.float() / how.temperature, descending=True, stable=True)
        if how.top_k:
            values, ids = values[: how.top_k], ids[: how.top_k]
        chances = torch.softmax(values, dim=-1)
        if how.top_p < 1:
            kept = int((chances.cumsum(-1) - chances < how.top_p).sum())  # the first is always kept
            chances = chances[:kept]
        return int(ids[torch.multinomial(chances, 1, generator=self._random)])


class TurnEnded(Exception):
    """The user pressed Ctrl-C: raised between layers, where nothing is leased."""


@contextmanager
def interruptible(model: HostModel) -> Iterator[None]:
    """Within it Ctrl-C raises `TurnEnded` before the next layer's experts; a second Ctrl-C is `KeyboardInterrupt`."""
    pressed = 0

    def press(number: int, frame: Any) -> None:
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
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stopped: str = "length"
    """"eos", "length" or "interrupted"."""
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

    def table(self) -> dict[str, Any]:
        """For --json. Rates are of decoding only."""
        return {
            "text": self.text, "ids": self.ids, "stopped": self.stopped, "prompt_tokens": self.prompt_tokens,
            "fed_tokens": self.fed_tokens, "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds, "tokens_per_second": self.tokens_per_second,
            "hit_rate": self.decode.hit_rate, "bytes_per_token": self.bytes_per_token,
            "prefill": self.prefill.table(), "decode": self.decode.table(),
        }  # fmt: skip


def _moved(counters: Counters) -> int:
    return counters.bytes_read + counters.bytes_mapped


class Conversation:
    """A model, its tokenizer and what was fed so far; `turn` continues where ids agree, and begins anew where not."""

    def __init__(self, model: HostModel, tokens: Any, root: Path, sampling: Sampling, ends: frozenset[int]) -> None:
        self.model, self.tokens, self.root = model, tokens, root
        self._sampler = Sampler(sampling)
        self._ends = ends
        self._fed: list[int] = []
        self._state: Any = None

    def answer(self, messages: Sequence[dict[str, str]], limit: int, emit: Callable[[str], None]) -> Turn:
        """The assistant's turn after `messages` by the chat template."""
        return self.turn(chat_ids(self.tokens, messages, self.root), limit, emit)

    def turn(self, ids: Sequence[int], limit: int, emit: Callable[[str], None]) -> Turn:
        """At most `limit` tokens after `ids`; text is emitted as soon as its characters are whole.

        Ctrl-C ends it early; what was said until then is in the turn.
        """
        begun = self._known(ids)
        turn = Turn(len(ids), len(ids) - begun)
        before = self._counted()
        text = _Text(self.tokens, emit)
        with interruptible(self.model):
            try:
                self._speak(list(ids), begun, limit, turn, text)
            except TurnEnded:
                turn.stopped = "interrupted"
                self._fed, self._state = [], None  # layers may disagree on what they have seen
        turn.text = text.finish()
        after = self._counted()
        turn.prefill, turn.decode = (
            (turn.prefill - before, after - turn.prefill) if turn.ids else (after - before, Counters())
        )
        return turn

    def _counted(self) -> Counters:
        """What the store counted so far."""
        return Totals.of(self.model.context.store.counters).total

    def _known(self, ids: Sequence[int]) -> int:
        """How many of `ids` the state has seen already; all of its tokens must be among them, with one left to feed."""
        if self._state is not None and len(self._fed) < len(ids) and self._fed == list(ids[: len(self._fed)]):
            return len(self._fed)
        self._fed, self._state = [], None
        return 0

    def _speak(self, ids: list[int], begun: int, limit: int, turn: Turn, text: _Text) -> None:
        clock = time.perf_counter()
        pending = ids[begun:]
        while True:
            logits, self._state = self.model.forward(pending, self._state)
            self._fed += pending
            chosen = self._sampler(logits[-1])
            now = time.perf_counter()
            if not turn.ids:
                turn.prefill_seconds, clock = now - clock, now
                turn.prefill = self._counted()
            turn.decode_seconds = now - clock
            turn.ids.append(chosen)
            if chosen in self._ends:
                turn.stopped = "eos"
                return
            text.add(chosen)
            if len(turn.ids) >= limit:
                return
            pending = [chosen]


class _Text:
    """Decodes ids as they come and emits only whole characters."""

    def __init__(self, tokens: Any, emit: Callable[[str], None]) -> None:
        self._tokens, self._emit = tokens, emit
        self._ids: list[int] = []
        self._start = 0
        self._said = ""
        self._whole = ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokens.decode(ids, skip_special_tokens=True))

    def add(self, token: int) -> None:
        """One more token."""
        self._ids.append(token)
        # decoding everything again for every token would cost more with every token; a few before it decide spacing
        now = self._decode(self._ids[self._start :])
        if now.endswith(UNFINISHED):
            return
        self._say(now)
        if len(self._ids) - self._start > 32:
            self._start = len(self._ids) - 8
            self._said = self._decode(self._ids[self._start :])

    def _say(self, now: str) -> None:
        new = now[len(self._said) :]
        self._said = now
        self._whole += new
        if new:
            self._emit(new)

    def finish(self) -> str:
        """Emit what is left, broken or not; all that was said."""
        if self._ids:
            self._say(self._decode(self._ids[self._start :]))
        return self._whole


def session(
    talk: Conversation, limit: int, ask: Callable[[], str | None], emit: Callable[[str], None],
    note: Callable[[str], None], system: str | None = None,
) -> None:  # fmt: skip
    """Turns until `ask` returns None. An interrupted answer stays in the conversation as far as it went."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            said = ask()
        except KeyboardInterrupt:
            note("(Ctrl-D ends the session)")
            continue
        if said is None:
            return
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        turn = talk.answer(messages, limit, emit)
        emit("\n")
        if turn.stopped == "interrupted":
            note("(interrupted)")
        messages.append({"role": "assistant", "content": turn.text})
        note(turn.report())
