"""Text as it comes from tokens: whole characters, the same as decoding all at once; thoughts and answers apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
from kits import words
from kits.words import HARMONY, THINK

from pagestone.reader.decoding import Decoder, Speech, is_piecewise, spoken
from pagestone.reader.text import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without transformers."""
    oracle("transformers")


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": words.byte_level,
    "byte-fallback": words.byte_fallback,
    "byte-fallback, metaspace": lambda: words.byte_fallback("meta"),
    "unigram": words.unigram,
    "word-piece": words.word_piece,
    "word-piece, cleaned up": lambda: words.word_piece(joins=True),
}


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    said: list[str] = []
    decoder = Decoder(tokenizer, said.append)
    for token in ids:
        decoder.add(token)
    decoder.finish()
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_is_decoding_all_at_once(kind: str) -> None:
    """Over random ids, some special, some of no token, and over runs of few: characters whole and broken."""
    tokenizer = KINDS[kind]()
    size = len(tokenizer.tokens)
    special = tokenizer.tokens.all_special_ids
    for seed in range(150):
        source = random.Random(seed)
        few = [source.randrange(size + 2) for _ in range(source.choice([3, 20, size]))] + special
        ids = [source.choice(few) for _ in range(source.choice([1, 7, 90]))]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), (kind, seed, ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "byte-fallback, metaspace", "unigram"])
def test_texts_of_any_script_come_whole(kind: str) -> None:
    """Characters of one to four bytes, long runs of them: nothing is lost, nothing is broken."""
    tokenizer = KINDS[kind]()
    for seed in range(40):
        source = random.Random(seed)
        letters = source.choice(["ཀ", "ཀabc", "aé b漢🎉 ", "the cat. ", "🎉", "ẞ\u0301"])
        text = "a" + "".join(source.choice(letters) for _ in range(120))
        ids = tokenizer.tokens(text, add_special_tokens=False)["input_ids"]
        said = streamed(tokenizer, ids)
        assert "".join(said).lstrip() == text and all("\ufffd" not in piece for piece in said)
        assert kind != "byte-level" or len(said) > 20, "and it comes in pieces"


def test_twenty_letters_of_three_bytes() -> None:
    """The first answer that broke: a window that began in the middle of a character."""
    tokenizer = words.byte_fallback()
    ids = tokenizer.encode("ཀ" * 20)
    assert len(ids) > 60
    assert "".join(streamed(tokenizer, ids)) == "ཀ" * 20
    assert spoken(tokenizer, [5], ids).text == "ཀ" * 20


def test_text_comes_early() -> None:
    """Nothing is held back that cannot change: a word comes with its token, a character of bytes with the next word."""
    tokenizer = words.byte_fallback()
    said: list[str] = []
    decoder = Decoder(tokenizer, said.append)
    for token, expected in (
        ("▁the", "the"),
        ("▁cat", " cat"),
        ("<0xE2>", ""),
        ("<0x82>", ""),
        ("<0xAC>", ""),
        ("▁a", "€ a"),
    ):
        before = len("".join(said))
        decoder.add(tokenizer.tokens.convert_tokens_to_ids(token))
        assert "".join(said)[before:] == expected, token


def test_the_work_for_a_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer decodes a few tokens at a time, not everything again for each."""
    tokenizer = words.byte_level()
    ids = tokenizer.encode("some words and more words, " * 40)
    lengths: list[int] = []
    real = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, i, **k: lengths.append(len(i)) or real(self, i, **k))
    streamed(tokenizer, ids)
    assert len(ids) > 250 and max(lengths) < 16


def test_a_decoder_nobody_looked_at_is_not_cut() -> None:
    """A replacement that sees three tokens: the window is the whole answer."""
    tokenizer = words.replacing()
    assert not is_piecewise(tokenizer.tokens) and is_piecewise(words.byte_fallback().tokens)
    ids = [0, 1, 3, 0, 2, 3, 0]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "abcXabcX"


# -- thoughts ---------------------------------------------------------------------------------------------------------


def speech(tokenizer: Tokenizer, prompt: str, text: str) -> tuple[Speech, list[tuple[str, str]]]:
    """What becomes of `text` after `prompt`, and what was emitted, in order."""
    said: list[tuple[str, str]] = []
    made = Speech(
        tokenizer, tokenizer.encode(prompt), lambda t: said.append(("say", t)), lambda t: said.append(("think", t))
    )
    for token in tokenizer.encode(text):
        made.add(token)
    made.finish()
    for voice, whole in (("say", made.text), ("think", made.thought)):
        assert "".join(t for v, t in said if v == voice).strip() == whole.strip()
    return made, said


ASSISTANT = "<|im_start|>assistant\n"
THOUGHTS = [
    (ASSISTANT, "Paris.", "", "Paris.", True),
    (ASSISTANT, "<think>\nHm, Paris?\n</think>\n\nParis.", "Hm, Paris?", "Paris.", True),
    (ASSISTANT + "<think>\n", "Hm, Paris?\n</think>\n\nParis.", "Hm, Paris?", "Paris.", True),
    (ASSISTANT + "<think>\n\n</think>\n\n", "Paris.", "", "Paris.", True),
    (ASSISTANT + "<think>", "Hm, Paris", "Hm, Paris", "", False),
    (ASSISTANT, "<think>Hm, Paris", "Hm, Paris", "", False),
    (ASSISTANT, "<think></think>Paris.", "", "Paris.", True),
    (ASSISTANT, " <thin", "", " <thin", True),
    (
        ASSISTANT,
        "<think>a < b </thin c</think>d < e <think>f</think>",
        "a < b </thin c",
        "d < e <think>f</think>",
        True,
    ),
    (ASSISTANT, "In HTML <think> is no tag.", "", "In HTML <think> is no tag.", True),
]


@pytest.mark.parametrize("kind", ["text", "token", "special token"])
@pytest.mark.parametrize(("prompt", "text", "thought", "answer", "answered"), THOUGHTS)
def test_thoughts_between_tags(kind: str, prompt: str, text: str, thought: str, answer: str, answered: bool) -> None:
    """A thought begins the answer, or the prompt began it; as text, as an added token, as a special one."""
    tokenizer = words.byte_level([] if kind == "text" else THINK, special=kind == "special token")
    made, said = speech(tokenizer, prompt, text)
    assert (made.thought, made.text, made.answered) == (thought, answer, answered)
    assert made.thought_key == "reasoning_content"
    assert [v for v, _ in said] == sorted((v for v, _ in said), reverse=True), "the thought comes first"


CHANNELS = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris.",
     "Hm.", "Paris.", True),
    ("<|channel|>analysis<|message|>Hm, and then", "Hm, and then", "", False),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fi", "Hm.", "", False),
    ("<|channel|>anal", "", "", False),
    ("<|channel|>final<|message|>Paris", "", "Paris", True),
    ("<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>commentary to=f <|message|>B.<|end|>"
     "<|start|>assistant<|channel|>final<|message|>Paris.<|return|>", "A.\nB.", "Paris.", True),
    ("Paris.", "", "Paris.", True),
]  # fmt: skip


@pytest.mark.parametrize("prompt", ["<|start|>user<|message|>x<|end|><|start|>assistant", "x"])
@pytest.mark.parametrize(("text", "thought", "answer", "answered"), CHANNELS)
def test_channels(prompt: str, text: str, thought: str, answer: str, answered: bool) -> None:
    """Of gpt-oss' channels the final one is the answer, the others are thought; no marker and no name is either."""
    made, _ = speech(words.byte_level(HARMONY), prompt, text)
    assert (made.thought, made.text, made.answered, made.thought_key) == (thought, answer, answered, "thinking")


def test_a_prompt_that_opened_the_channel() -> None:
    """A template may begin the final message itself."""
    made, _ = speech(words.byte_level(HARMONY), "<|start|>assistant<|channel|>final<|message|>", "Paris.")
    assert (made.thought, made.text) == ("", "Paris.")


def test_markers_of_others_stay_special() -> None:
    """`<|end|>` ends messages of other families too: there it is a special token that nobody sees."""
    made, _ = speech(words.byte_level(["<|end|>"]), ASSISTANT, "Paris.<|end|>")
    assert made.text == "Paris."


def test_raw_is_as_it_is() -> None:
    """Without a template there is no answer and no thought, only text."""
    tokenizer = words.byte_level(THINK, special=False)
    made = Speech(tokenizer, tokenizer.encode("<think>"), raw=True)
    for token in tokenizer.encode("<think>a</think>b"):
        made.add(token)
    made.finish()
    assert (made.text, made.thought, made.answered) == ("<think>a</think>b", "", True)
