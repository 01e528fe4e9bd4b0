"""Conversations: what is shown, what is remembered, what ends a turn; and what the commands say about it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits import words
from kits.inference import TINY, Workshop, calm, command
from kits.talk import Parrot
from kits.words import HARMONY, THINK, directory, edited

from pagestone.formats.errors import RequestError
from pagestone.reader import inputs
from pagestone.reader.chat import Conversation, converse
from pagestone.reader.commands import _asker, _Screen
from pagestone.reader.sampling import Sampling
from pagestone.reader.text import Tokenizer, open_tokenizer
from pagestone.validate import fidelity, logits

END = 1023
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    oracle("torch")
    oracle("transformers")
    calm()


def ask(lines: Sequence[str | Exception]) -> Callable[[], str | None]:
    """What a user types; an exception is one that reading the line raises."""
    left: Iterator[str | Exception] = iter(lines)

    def read() -> str | None:
        line = next(left, None)
        if isinstance(line, Exception):
            raise line
        return line

    return read


def talk(
    tokenizer: Tokenizer, answers: Sequence[str], lines: Sequence[str | Exception], limit: int = 99, **how: Any
) -> tuple[Parrot, str, str, list[str]]:
    """(model, stdout, thoughts, notes) of a session in which the model says `answers`."""
    positions, system = how.pop("positions", None), how.pop("system", None)
    model = Parrot([[*tokenizer.encode(a), END] for a in answers], len(tokenizer.tokens), positions)
    said: list[str] = []
    thought: list[str] = []
    notes: list[str] = []
    talk = Conversation(model, tokenizer, Sampling(), frozenset({END}), notes.append)  # type: ignore[arg-type]
    converse(talk, limit, ask(lines), said.append, notes.append, system, thought.append)
    return model, "".join(said), "".join(thought), notes


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    tokenizer.tokens.chat_template = template
    return tokenizer


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEEPS = PLAIN.replace("{{ m.content }}", "{{ m.get('reasoning_content', 'none') }}|{{ m.content }}")
OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)


# -- what is remembered -----------------------------------------------------------------------------------------------


def heard(tokenizer: Tokenizer, model: Parrot, turn: int) -> str:
    return tokenizer.decode(model.heard[turn], skip_special_tokens=False)


def test_thoughts_are_not_the_answer() -> None:
    """The thought is shown apart and is not in the next prompt, unless the template asks for it."""
    said = "<think>\nHm, Paris?\n</think>\n\nParis."
    tokenizer = with_template(words.byte_level(THINK, special=False), PLAIN)
    model, shown, thought, notes = talk(tokenizer, [said, "Berlin."], ["France?", "Germany?"])
    assert shown == "Paris.\nBerlin.\n" and thought.strip() == "Hm, Paris?"
    assert "assistant\nParis.<|im_end|>" in heard(tokenizer, model, 1) and "Hm" not in heard(tokenizer, model, 1)
    assert not any("cut" in n or "not remembered" in n for n in notes)
    tokenizer = with_template(words.byte_level(THINK, special=False), KEEPS)
    model, *_ = talk(tokenizer, [said, "Berlin."], ["France?", "Germany?"])
    assert "assistant\nHm, Paris?|Paris.<|im_end|>" in heard(tokenizer, model, 1)


def test_the_final_channel_is_the_answer() -> None:
    """gpt-oss: neither markers nor the words of the other channels come back in the next prompt."""
    tokenizer = with_template(words.byte_level(HARMONY), OSS)
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris."
    model, shown, thought, _ = talk(tokenizer, [said, said], ["France?", "Sure?"])
    assert shown == "Paris.\nParis.\n" and thought.split() == ["Hm.", "Hm."]
    expected = (
        "<|start|>user<|message|>France?<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|end|>"
        "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
    )
    assert heard(tokenizer, model, 1) == expected


def test_a_thought_that_was_cut_is_no_answer() -> None:
    """It is said, and the turn is forgotten: neither the thought nor the question come again."""
    tokenizer = with_template(words.byte_level(THINK, special=False), PLAIN)
    cut = "<think>Hm, let me see, is it Paris or is it not</think>"
    model, shown, thought, notes = talk(tokenizer, [cut, "Berlin."], ["France?", "Germany?"], limit=8)
    assert shown == "\nBerlin.\n" and thought.startswith("Hm, let")
    assert "(cut after 8 tokens; --max-new-tokens allows more: there is no answer, only a thought)" in notes
    assert "(this turn is not remembered)" in notes
    assert "France" not in heard(tokenizer, model, 1) and "Hm" not in heard(tokenizer, model, 1)


def test_an_answer_that_was_cut_says_so() -> None:
    """It stays in the conversation as far as it went; one that ended by itself says nothing."""
    tokenizer = with_template(words.byte_level(), PLAIN)
    model, shown, _, notes = talk(
        tokenizer, ["The capital of France is Paris, of course.", "Yes."], ["France?", "?"], 5
    )
    cut = shown.splitlines()[0]
    assert notes.count("(cut after 5 tokens; --max-new-tokens allows more)") == 1
    assert f"assistant\n{cut}<|im_end|>" in heard(tokenizer, model, 1)


def test_a_thought_that_the_model_ended_in() -> None:
    """An end within a thought is no answer either."""
    tokenizer = with_template(words.byte_level(THINK, special=False), PLAIN)
    model, _, _, notes = talk(tokenizer, ["<think>Hm", "Berlin."], ["France?", "Germany?"])
    assert "(this turn is not remembered)" in notes and "France" not in heard(tokenizer, model, 1)
    assert "(the model ended within its thought: there is no answer, only a thought)" in notes


def test_letters_of_bytes_in_the_history() -> None:
    """A byte-fallback tokenizer: the answer comes whole, and whole again in the next prompt."""
    tokenizer = with_template(words.byte_fallback(), "{% for m in messages %}{{ m.content }}.{% endfor %}")
    letters = "ཀ" * 20
    model = Parrot([[*tokenizer.encode(letters), 2], [5, 2]], len(tokenizer.tokens))
    said: list[str] = []
    made = Conversation(model, tokenizer, Sampling(), frozenset({2}))  # type: ignore[arg-type]
    converse(made, 99, ask(["a", "a"]), said.append, lambda _: None)
    assert "".join(said).splitlines()[0] == letters and f"a.{letters}.a." in heard(tokenizer, model, 1)


def test_interrupted_before_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the prompt is read: nothing was said, so nothing is remembered."""
    from pagestone.reader.chat import TurnEnded

    tokenizer = with_template(words.byte_level(), PLAIN)
    real, calls = Parrot.forward, []

    def forward(self: Parrot, ids: Sequence[int], state: Any = None) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise TurnEnded
        return real(self, ids, state)

    monkeypatch.setattr(Parrot, "forward", forward)
    model, shown, _, notes = talk(tokenizer, ["Berlin."], ["France?", "Germany?"])
    assert shown == "\nBerlin.\n" and "(interrupted)" in notes and "(this turn is not remembered)" in notes
    assert "France" not in heard(tokenizer, model, 0)


def test_what_was_there_already_counts_as_repeated() -> None:
    """The repetition penalty sees the prompt and the answer so far: here 11 is in the prompt, 10 leads, then 12."""
    import torch

    class Even(Parrot):
        def forward(self, ids: Sequence[int], state: Any = None) -> tuple[Any, Any]:
            table = torch.zeros(1, self.vocabulary)
            table[0, 10], table[0, 11], table[0, 12] = 3.0, 2.0, 1.8
            return table, 0

    tokenizer = words.byte_level()
    made = Conversation(Even([], 1024), tokenizer, Sampling(repetition_penalty=2.0), frozenset())  # type: ignore[arg-type]
    assert made.turn([11, 5], 4, lambda _: None).ids == [10, 12, 10, 10]


# -- what a turn survives ---------------------------------------------------------------------------------------------


def test_a_failing_template_ends_the_turn() -> None:
    """The error is said with the template's words; the next turn does not see the one that failed."""
    refuses = (
        "{% for m in messages %}{% if 'x' in m.content %}{{ raise_exception('no x') }}{% endif %}{% endfor %}" + PLAIN
    )
    tokenizer = with_template(words.byte_level(), refuses)
    bad = RequestError("text in UTF-8 expected", code="E1238")
    model, shown, _, notes = talk(tokenizer, ["Paris.", "Berlin."], ["France?", "x", bad, "Germany?"])
    assert shown == "Paris.\nBerlin.\n"
    errors = [n for n in notes if n.startswith("error: ")]
    assert len(errors) == 2 and "no x (E1234)" in errors[0] and "E1238" in errors[1]
    assert not any("\n" in n for n in notes) and any(n.startswith("  what to do: ") for n in notes)
    assert "user\nx<" not in heard(tokenizer, model, 1) and "Paris." in heard(tokenizer, model, 1)


def test_roles_that_must_alternate() -> None:
    """After a turn that failed the roles still alternate, so a strict template goes on working."""
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.content == 'x' %}{{ 1 / 0 }}{% endif %}{% endfor %}" + PLAIN
    )
    tokenizer = with_template(words.byte_level(THINK, special=False), strict)
    answers = ["One.", "<think>Hm, hm, hm, hm, hm, hm", "Two."]
    _, shown, _, notes = talk(tokenizer, answers, ["a", "x", "b", "c"], limit=6)
    assert shown == "One.\n\nTwo.\n" and not any("alternate" in n for n in notes)
    _, shown, _, notes = talk(tokenizer, [], ["a"], system="Be brief.")
    assert shown == "" and any("roles must alternate" in n for n in notes)


def test_a_tokenizer_with_ids_the_model_lacks() -> None:
    """E1233 for the turn, before the model is asked."""
    tokenizer = with_template(words.byte_level(["<new>"]), PLAIN)
    model = Parrot([tokenizer.encode("Paris.") + [END]], 1024)
    notes: list[str] = []
    made = Conversation(model, tokenizer, Sampling(), frozenset({END}), notes.append)  # type: ignore[arg-type]
    converse(made, 9, ask(["<new>", "France?"]), lambda _: None, notes.append)
    assert "found 1024" in notes[0] and "E1233" in notes[0] and len(model.heard) == 1
    with pytest.raises(RequestError, match="E1233"):
        made.turn([1024], 9, lambda _: None)


def test_beyond_the_models_positions() -> None:
    """Said before: when the prompt is longer, and when the answer may reach beyond; not below."""
    tokenizer = with_template(words.byte_level(), PLAIN)
    size = len(tokenizer.chat([{"role": "user", "content": "France?"}]))
    for positions, limit, expected in (
        (size + 20, 20, None), (size + 20, 21, f"{size} tokens and the answer may have 21"),
        (size - 1, 20, f"the prompt has {size} tokens;"), (None, 10**9, None),
    ):  # fmt: skip
        _, _, _, notes = talk(tokenizer, ["Paris."], ["France?"], limit=limit, positions=positions)
        warned = [n for n in notes if n.startswith("warning: ")]
        assert len(warned) == (expected is not None), notes
        if expected is not None:
            assert expected in warned[0] and f"{positions} positions" in warned[0] and notes.index(warned[0]) == 0


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def plain(workshop: Workshop) -> Path:
    """tiny-moe in int8."""
    return workshop.container("int8")


TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
    + "{% if enable_thinking is not defined %}<think>{% elif enable_thinking %}{{ raise_exception('thinks') }}"
    "{% endif %}"
)  # fmt: skip


@pytest.fixture(scope="session")
def advised(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-moe whose publisher recommends sampling, whose configs forget its end, and whose template has a variable."""
    source = tmp_path_factory.mktemp("advised") / "source"
    text = json.loads((TINY / "config.json").read_bytes())["text_config"] | {"eos_token_id": 7}
    directory(source, {
        "generation_config.json": json.dumps({"do_sample": True, "temperature": 0.001, "top_k": 3}),
        "config.json": edited("config.json", text_config=text), "chat_template.jinja": TEMPLATE,
    })  # fmt: skip
    for shard in [*TINY.glob("*.safetensors"), TINY / "model.safetensors.index.json"]:
        shutil.copyfile(shard, source / shard.name)
    return workshop.container("int8", source)


def run(container: Path, *more: str, prompt: str = FRANCE) -> list[str | Path]:
    return ["run", container, "--prompt", prompt, "--io", "mmap", *more]


def test_the_publishers_sampling_is_used_and_said(advised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr with its source; an option overrides one field and is said without."""
    assert command(*run(advised, "--json", "--template-var", "enable_thinking=false", "--top-k", "2")) == 0
    out, err = capsys.readouterr()
    assert "sampling: temperature 0.001 (generation_config.json), top-k 2, seed 0" in err
    table = json.loads(out)
    assert table["sampling"] == {
        "temperature": 0.001, "top_p": 1.0, "top_k": 2, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0,
    }  # fmt: skip
    assert (table["text"], table["stopped"]) == (PARIS, "eos"), "the tokenizer's own end is an end"
    assert (table["thought"], table["answered"]) == ("", True)


def test_the_tokenizers_end_ends_a_chat_too(
    advised: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configs of this container name another token."""
    stdin(monkeypatch, FRANCE.encode())
    more = ["--template-var", "enable_thinking=false", "--max-new-tokens", "30"]
    assert command("chat", advised, "--io", "mmap", *more) == 0
    assert capsys.readouterr().out == PARIS + "\n"


def test_raw_text_has_no_thought(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `--raw` continues is text, also after `<think>`."""
    assert command(*run(plain, "--raw", "--max-new-tokens", "4", prompt="In the beginning <think>")) == 0
    out, err = capsys.readouterr()
    assert out.strip() and "thought" not in err


def test_greedy_is_said(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tiny-moe's publisher does not sample; options of a draw that is not made are not promised."""
    assert command(*run(plain, "--min-p", "0.1", "--repetition-penalty", "1.01")) == 0
    out, err = capsys.readouterr()
    assert out == PARIS + "\n" and "sampling: greedy, repetition-penalty 1.01" in err


def test_thoughts_go_to_stderr(advised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template began a thought and the model never ended it: stdout has no answer, and stderr says so."""
    assert command(*run(advised, "--json")) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["text"], table["answered"], table["stopped"]) == ("", False, "eos") and table["thought"]
    assert command(*run(advised)) == 0
    out, err = capsys.readouterr()
    assert out == "\n" and f"(thought) {table['thought']}\n" in err
    assert "(the model ended within its thought: there is no answer, only a thought)" in err


def test_a_terminal_takes_no_commands_from_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control characters in an answer or a thought are written as escapes at a terminal; elsewhere text is text."""
    text = "a\x1b[2J\x9b\x07\r\n\tक्‍ष\u200d"
    for terminal, expected in ((True, "a\\x1b[2J\\x9b\\x07\\x0d\n\tक्‍ष\u200d"), (False, text)):
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(f"sys.{stream}.isatty", lambda terminal=terminal: terminal)
        screen = _Screen()
        screen.say(text)
        screen.think(text)
        assert tuple(capsys.readouterr()) == (expected, f"(thought) {expected}")


def test_a_cut_answer_says_so(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` too; nothing is said of one that ended by itself."""
    assert command(*run(plain, "--max-new-tokens", "3")) == 0
    assert "(cut after 3 tokens; --max-new-tokens allows more)" in capsys.readouterr().err
    assert command(*run(plain)) == 0
    assert "cut after" not in capsys.readouterr().err


def test_positions_are_said(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tiny-moe was made for 4096 positions, and an answer may be asked for beyond them."""
    assert command(*run(plain, "--max-new-tokens", "4096")) == 0
    assert "warning: the prompt has" in capsys.readouterr().err


class Loaded(AssertionError):
    """A model was loaded where an error was due before."""


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused is refused before the model is loaded."""

    def load(*a: Any, **k: Any) -> Any:
        raise Loaded

    monkeypatch.setattr("pagestone.reader.hosts.transformers.load", load)


def refused(asked: Sequence[str | Path], capsys: pytest.CaptureFixture[str], *names: str, code: int = 2) -> None:
    assert command(*asked) == code, asked
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "what to do: " in err, err
    for name in names:
        assert name in err, (name, err)


@pytest.mark.parametrize("name", ["run", "chat"])
def test_numbers(plain: Path, name: str, capsys: pytest.CaptureFixture[str], unloaded: None) -> None:
    """Options out of range: both commands, the option named, nothing loaded."""
    asked = ["run", plain, "--prompt", "x"] if name == "run" else ["chat", plain]
    for option, values in {
        "--temperature": ["nan", "inf", "-inf", "-1", "-1e-320"], "--seed": [str(2**64), "-1", "9" * 400],
        "--top-p": ["nan", "0", "1.5"], "--top-k": ["-1"], "--min-p": ["nan", "-1", "2"],
        "--repetition-penalty": ["nan", "0", "inf"],
    }.items():  # fmt: skip
        for value in values:
            refused([*asked, option, value], capsys, option, "E1242")
    for value in ("x", "a b=1", "tokenize=1"):
        refused([*asked, "--template-var", value], capsys, "--template-var", "E1236")


@pytest.mark.parametrize("value", ["1e-320", "5e-324"])
def test_the_smallest_temperatures(plain: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are as good as greedy."""
    assert command(*run(plain, "--temperature", value, "--seed", str(2**64 - 1))) == 0
    assert capsys.readouterr().out == PARIS + "\n"


def test_the_system_message_is_tried_before_loading(
    advised: Path, capsys: pytest.CaptureFixture[str], unloaded: None
) -> None:
    """A template that takes none refuses it in both commands, naming the file."""
    for asked in (["chat", advised], ["run", advised, "--prompt", "x"]):
        refused([*asked, "--system", "Be brief."], capsys, "chat_template.jinja", "no system role", "E1234")
        refused([*asked, "--template-var", "enable_thinking=true"], capsys, "thinks", "E1234")
        assert command(*asked) == 3 and "Loaded" in capsys.readouterr().err


def test_ids_the_model_lacks_are_refused_before_loading(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unloaded: None
) -> None:
    """A tokenizer with tokens that were added since: E1233, in every command that takes text."""
    added = json.loads((TINY / "tokenizer.json").read_bytes())
    added["added_tokens"].append(added["added_tokens"][-1] | {"id": 1024, "content": "<new>", "special": False})
    root = directory(tmp_path / "t", {"tokenizer.json": json.dumps(added)})
    (tmp_path / "text").write_text("a <new> word\n")
    (tmp_path / "questions").write_text('{"question": "a <new> word?", "answer": "x"}')
    for asked in (
        run(plain, prompt="a <new> word"), run(plain, "--raw", prompt="a <new> word"),
        ["verify-logits", plain, "--prompts", tmp_path / "text"],
        ["compare", plain, "--source", TINY, "--text", tmp_path / "text"],
        ["compare", plain, "--source", TINY, "--questions", tmp_path / "questions"],
    ):  # fmt: skip
        refused([*asked, "--tokenizer", root], capsys, f"{root}: token ids below 1024 expected, found 1024", "E1233")


def test_raw_and_the_templates_options(plain: Path, capsys: pytest.CaptureFixture[str], unloaded: None) -> None:
    """They would be ignored in silence."""
    for more in (["--system", "Be brief."], ["--template-var", "a=1"]):
        refused(run(plain, "--raw", *more), capsys, "--raw", "E1252")


# -- text in ----------------------------------------------------------------------------------------------------------

LATIN = "Größe".encode("latin-1")


def stdin(monkeypatch: pytest.MonkeyPatch, raw: bytes, **how: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), **{"encoding": "utf-8", **how}))


def test_stdin_that_is_not_text(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unloaded: None
) -> None:
    """`--prompt -`: E1238 with the byte and its place, whatever the locale makes of it; what is text is taken."""
    for how in ({}, {"encoding": "ascii", "errors": "surrogateescape"}, {"encoding": "latin-1"}):
        stdin(monkeypatch, b"What is " + LATIN, **how)
        refused(run(plain, prompt="-"), capsys, "stdin: ", "byte 0xf6 at position 10", "E1238")
    stdin(monkeypatch, "Größe".encode(), encoding="ascii")
    assert inputs.stdin() == "Größe"
    stdin(monkeypatch, b"\xef\xbb\xbfx", encoding="ascii")
    assert inputs.stdin() == "x"
    monkeypatch.setattr("sys.stdin", None)
    refused(run(plain, "--raw", prompt="-"), capsys, "E1243")


def test_the_last_line_end_is_not_said(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`echo ... | pagestone run --prompt -` asks what `--prompt ...` asks; with --raw every byte counts."""
    found = []
    for prompt, raw in ((FRANCE, []), ("-", []), (FRANCE, ["--raw"]), ("-", ["--raw"])):
        stdin(monkeypatch, FRANCE.encode() + b"\n")
        assert command(*run(plain, "--json", "--max-new-tokens", "1", *raw, prompt=prompt)) == 0
        found.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert found[0] == found[1] and found[2] < found[3]


def test_a_chat_with_a_bad_line(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is refused by itself, and the session goes on."""
    stdin(monkeypatch, LATIN + b"\n\n" + FRANCE.encode() + b"\r\n", encoding="ascii")
    assert command("chat", plain, "--io", "mmap") == 0
    out, err = capsys.readouterr()
    assert out == PARIS + "\n" and "error: stdin: text in UTF-8 expected" in err and "E1238" in err


def test_a_chat_whose_stdin_is_closed(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over at once."""
    monkeypatch.setattr("sys.stdin", None)
    assert command("chat", plain, "--io", "mmap") == 0
    assert capsys.readouterr().out == ""


def test_options_that_are_not_text(plain: Path, capsys: pytest.CaptureFixture[str], unloaded: None) -> None:
    """Bytes on the command line that were no text come as lone surrogates: each option is named."""
    bad = LATIN.decode("utf-8", "surrogateescape")
    refused(run(plain, prompt=bad), capsys, "--prompt: ", "position 2", "E1238")
    refused(run(plain, "--raw", prompt=bad), capsys, "--prompt: ", "E1238")
    for asked in (run(plain), ["chat", plain]):
        refused([*asked, "--system", bad], capsys, "--system: ", "E1238")
        refused([*asked, "--template-var", f"a={bad}"], capsys, "--template-var: ", "E1238")


def test_a_terminal_that_sends_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line typed in another encoding is refused by itself, however Python was told to read it."""
    typed: list[Any] = [
        UnicodeDecodeError("utf-8", LATIN, 2, 3, "invalid"), LATIN.decode("utf-8", "surrogateescape"),
        FRANCE, EOFError(),
    ]  # fmt: skip

    def line(prompt: str) -> str:
        given = typed.pop(0)
        if isinstance(given, Exception):
            raise given
        return str(given)

    stdin(monkeypatch, b"")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", line)
    read = _asker()
    for _ in range(2):
        with pytest.raises(RequestError, match=r"stdin: text in UTF-8 expected.* position 2 .E1238"):
            read()
    assert read() == FRANCE and read() is None


@pytest.mark.parametrize("option", ["--prompts", "--ids", "--text", "--questions"])
def test_files_that_are_not_text(
    option: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unloaded: None
) -> None:
    """E1238 names file and byte; a file that is not there, or none, is E1239: the request, not the machine."""
    compares = option in ("--text", "--questions")
    asked = ["compare", plain, "--source", TINY] if compares else ["verify-logits", plain]
    (tmp_path / "latin").write_bytes(b"12 7\n" + LATIN)
    refused([*asked, option, tmp_path / "latin"], capsys, f"{tmp_path / 'latin'}: ", "byte 0xf6 at position 7", "E1238")
    (tmp_path / "utf-16").write_bytes("12 7".encode("utf-16"))
    refused([*asked, option, tmp_path / "utf-16"], capsys, "byte 0xff at position 0", "E1238")
    refused([*asked, option, tmp_path / "none"], capsys, f"{tmp_path / 'none'}: ", "E1239")
    refused([*asked, option, tmp_path], capsys, f"{tmp_path}: ", "E1239")


def test_files_with_a_mark_and_long_numbers(tmp_path: Path, plain: Path) -> None:
    """A byte order mark is no text; an id of thousands of digits is none."""
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf12 7 401\r\n1023\n")
    assert [p.ids for p in logits.read_ids(path, 1024)] == [(12, 7, 401), (1023,)]
    path.write_bytes(b'\xef\xbb\xbf{"question": "x", "answer": "y"}\n')
    assert fidelity.read_questions(path, None) == [("x", "y")]
    for wrong in ("9" * 5000, "1024", "-1", "1.5", "٣" * 40):
        path.write_text(wrong)
        with pytest.raises(RequestError, match=r"line 1: token ids below 1024 expected.*E1305") as error:
            logits.read_ids(path, 1024)
        assert len(str(error.value)) < 300


def test_answers_of_a_thinking_model_are_compared_without_thoughts() -> None:
    """`compare --questions` takes what was said, not what was thought."""
    tokenizer = with_template(words.byte_level(THINK, special=False), PLAIN)
    model = Parrot([[*tokenizer.encode("<think>Hm.</think>\n\nParis."), END]], 1026)
    assert fidelity.answer(model, tokenizer, [5], frozenset({END})) == "Paris."  # type: ignore[arg-type]


def test_a_tokenizer_given_beside(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unloaded: None
) -> None:
    """A damaged one is named, in both commands; its files are not the container's."""
    root = directory(tmp_path / "t", {"tokenizer.json": "{"})
    for asked in (run(plain), ["chat", plain]):
        refused([*asked, "--tokenizer", root], capsys, f"{root / 'tokenizer.json'}: ", "E1237", code=1)
    assert open_tokenizer(plain).tokens.eos_token_id == END
