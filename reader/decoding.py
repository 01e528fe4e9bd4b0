"""From token ids to text as they come: whole characters only, and what is thought apart from what is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pagestone.reader.text import Tokenizer

UNFINISHED = "�"
"""What a decoder puts where a character's bytes are not all there yet."""
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte: runs of them are characters, or all wrong together."""
OPEN, CLOSE = "<think>", "</think>"
START, CHANNEL, MESSAGE, END = HARMONY = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ENDS = (END, START, "<|return|>", "<|call|>")
FINAL = "final"
"""The channel that is the answer."""
TAIL = 16
"""Tokens of a prompt in which the opening of an answer stands."""
WORDS = 3
"""As many words may still be joined by transformers' clean-up ("do n ' t" becomes "don't")."""

Emit = Callable[[str], None]


def ignore(text: str) -> None:
    """Emit nothing."""


# -- characters -------------------------------------------------------------------------------------------------------


class Decoder:
    """Decodes ids as they come. What it emits is, put together, what decoding all of them at once gives.

    Special tokens are left out but for `keep`. What later ids can still change is held back: bytes of a character that
    is not whole, and a run of byte tokens until it ends, since one wrong byte makes the whole run U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, emit: Emit, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._emit, self._keep = tokenizer, emit, keep
        self._joins = bool(getattr(tokenizer.tokens, "clean_up_tokenization_spaces", False))
        self._piecewise = not self._joins and is_piecewise(tokenizer.tokens)
        self._ids: list[int] = []
        """From one whole token before what is new, or from the beginning."""
        self._said = ""
        """What of their text was emitted, or is the text before."""

    def _decode(self, ids: Sequence[int], skip: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip)

    def add(self, token: int) -> None:
        """One more token."""
        name, alone = self._tokenizer.tokens.convert_ids_to_tokens(token), self._decode([token])
        if name is None or (token not in self._keep and alone and not self._decode([token], skip=True)):
            return  # none of the tokenizer's, or a special one: between two bytes of a character it is not even seen
        self._ids.append(token)
        if BYTE.fullmatch(name):
            return
        now = self._decode(self._ids)
        if self._joins:
            now = "".join(re.split(r"( )", now)[: -2 * WORDS])
        self._say(now.rstrip(UNFINISHED))
        # decoding everything again for every token would cost more with every token; a token that is whole by itself
        # stands for all before it, once what comes is not first any more
        if self._piecewise and alone.strip() and UNFINISHED not in alone:
            self._ids, self._said = [token], alone

    def _say(self, now: str) -> None:
        new = now[len(self._said) :]
        if new:
            self._said = now
            self._emit(new)

    def finish(self) -> None:
        """Emit what is held back, broken or not."""
        self._say(self._decode(self._ids))
        self._ids, self._said = [], ""


def is_piecewise(tokens: Any) -> bool:
    """Whether a token's text depends on no other but that one is first, or that a character is not whole.

    True for decoders that were looked at; any other is decoded from the beginning every time.
    """
    made = getattr(getattr(tokens, "backend_tokenizer", None), "decoder", None)
    if made is None:
        return False
    decoder = json.loads(made.__getstate__())  # what it is pickled as; the whole tokenizer is megabytes
    return all(map(_known, decoder.get("decoders", [decoder])))


def _known(decoder: dict[str, Any]) -> bool:
    match decoder["type"]:
        case "ByteLevel" | "Metaspace" | "WordPiece" | "ByteFallback" | "Fuse":
            return True
        case "Replace":
            return len(decoder["pattern"].get("String", "")) == 1
        case "Strip":
            return bool(decoder["content"] == " " and decoder["start"] <= 1 and decoder["stop"] == 0)
    return False


# -- thoughts and answers ---------------------------------------------------------------------------------------------


class Speech:
    """One answer: ids in, thought and answer out, each to its own `emit`.

    Two ways of thinking are known. `<think>` ... `</think>` before the answer, the first of which may stand at the
    prompt's end; and the channels of gpt-oss, of which "final" is the answer and all others are thought. `raw` knows
    neither: everything is answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], answer: Emit = ignore, thought: Emit = ignore, *,
        raw: bool = False,
    ) -> None:  # fmt: skip
        self.text = self.thought = ""
        self._answer, self._thought = answer, thought
        added: dict[str, int] = {} if raw else tokenizer.tokens.get_added_vocab()
        tail = "" if raw else tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
        self._parser: _Plain = (
            _Plain(self) if raw
            else _Channels(self, tail) if added.keys() >= set(HARMONY)
            else _Think(self, tail)
        )  # fmt: skip
        keep = frozenset(added[m] for m in self._parser.markers if m in added)
        self._decoder = Decoder(tokenizer, self._parser.add, keep)

    @property
    def answered(self) -> bool:
        """Whether the answer was begun; a thought that was cut is none."""
        return self._parser.answered

    @property
    def thought_key(self) -> str:
        """The field of a message in which chat templates look for the thought."""
        return self._parser.thought_key

    def add(self, token: int) -> None:
        """One more token."""
        self._decoder.add(token)

    def finish(self) -> None:
        """Nothing more comes."""
        self._decoder.finish()
        self._parser.finish()
        self.thought = self.thought.strip()

    def say(self, text: str) -> None:
        """More of the answer, from the parser."""
        if text:
            self.text += text
            self._answer(text)

    def think(self, text: str) -> None:
        """More of the thought, from the parser."""
        text = text if self.thought else text.lstrip()
        if text:
            self.thought += text
            self._thought(text)


class _Plain:
    """Everything is answer."""

    answered = True
    thought_key = "reasoning_content"
    markers: tuple[str, ...] = ()
    """What must reach the parser although it may be a special token."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._held = ""

    def add(self, text: str) -> None:
        """More text, cut anywhere."""
        self._held += text
        while self._step():
            pass

    def _step(self) -> bool:
        """Deal with some of what is held; whether to go on."""
        self._speech.say(self._held)
        self._held = ""
        return False

    def finish(self) -> None:
        """No more text comes."""

    def _until(self, markers: Sequence[str], emit: Emit) -> str | None:
        """Emit what stands before the first of `markers`, and the marker found; None if there is none yet."""
        marker = min((m for m in markers if m in self._held), key=self._held.index, default=None)
        at = self._held.index(marker) if marker else len(self._held) - _begun(self._held, markers)
        emit(self._held[:at])
        self._held = self._held[at + len(marker or "") :]
        return marker


def _begun(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


class _Think(_Plain):
    """A thought between `<think>` and `</think>`, only at the beginning of the answer."""

    markers = (OPEN, CLOSE)

    def __init__(self, speech: Speech, prompt: str) -> None:
        super().__init__(speech)
        self._state = "thought" if prompt.rstrip().endswith(OPEN) else "before"

    @property
    def answered(self) -> bool:  # type: ignore[override]
        return self._state != "thought"

    def _step(self) -> bool:
        match self._state:
            case "before":
                text = self._held.lstrip()
                if OPEN.startswith(text[: len(OPEN)]) and len(text) < len(OPEN):
                    return False
                if text.startswith(OPEN):
                    self._held = text[len(OPEN) :]
                self._state = "thought" if text.startswith(OPEN) else "answer"
            case "thought":
                if self._until([CLOSE], self._speech.think) is None:
                    return False
                self._state = "after"
            case "after":
                self._held = self._held.lstrip()
                if not self._held:
                    return False
                self._state = "answer"
            case _:
                return super()._step()
        return True

    def finish(self) -> None:
        if self._state == "thought":
            self._speech.think(self._held)
        else:
            self._speech.say(self._held)


class _Channels(_Plain):
    """Messages with a header that names a channel."""

    thought_key = "thinking"
    markers = tuple({*HARMONY, *ENDS})

    def __init__(self, speech: Speech, prompt: str) -> None:
        super().__init__(speech)
        self._emit: Emit | None = None
        """Where the message goes, None within a header."""
        self._given = prompt.rpartition(START)[2] if START in prompt else ""
        self.answered = False
        self.add(self._given)

    def _step(self) -> bool:
        if self._emit is None:
            header, found, rest = self._held.partition(MESSAGE)
            if not found:
                return False
            channel = re.split(r"[\s<]", header.rpartition(CHANNEL)[2].strip())[0] if CHANNEL in header else FINAL
            self._held = rest
            self._emit = self._speech.say if channel == FINAL else self._speech.think
            self.answered |= channel == FINAL
            return True
        if self._until(ENDS, self._emit) is None:
            return False
        if self._emit == self._speech.think:
            self._speech.think("\n")
        self._emit = None
        return True

    def finish(self) -> None:
        if self._emit is not None:
            self._emit(self._held)
        elif not (self._speech.text or self._speech.thought or CHANNEL in self._held):
            self._speech.say(self._held.removeprefix(self._given))  # no message at all: it spoke without a header
            self.answered = True


def spoken(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> Speech:
    """What a model said after `prompt`, all ids at once."""
    speech = Speech(tokenizer, prompt)
    for token in ids:
        speech.add(token)
    speech.finish()
    return speech
