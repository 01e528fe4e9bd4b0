"""`run` and `chat`: text from a container, streamed, stopped, interrupted, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.inference import TINY, Workshop, calm, command, model

from pagestone.formats import native
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.text import size_text
from pagestone.reader.budget import all_records, default_budget, parse_size, row_sum_bytes
from pagestone.reader.chat import Conversation, Turn, converse
from pagestone.reader.container import open_container
from pagestone.reader.sampling import Sampler, Sampling
from pagestone.reader.session import Session, SessionOptions
from pagestone.reader.text import end_tokens, open_tokenizer

torch: Any


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def directory(workshop: Workshop) -> Path:
    return workshop.container("int8")


@pytest.fixture
def talk(directory: Path) -> Any:
    """A conversation with tiny-moe in int8."""
    loaded = model(directory, budget=20 * 102_400)
    made = Conversation(loaded, open_tokenizer(directory), Sampling(), end_tokens(directory))
    yield made
    loaded.close()


# -- run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", [["--budget", "1MiB"], ["--io", "mmap"], ["--io", "resident"]])
def test_run_answers(directory: Path, io: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The answer on stdout and nothing else; rates, hits and bytes on stderr."""
    assert command("run", directory, "--prompt", FRANCE, *io) == 0
    out, err = capsys.readouterr()
    assert out == PARIS + "\n"
    for word in ("tokens/s", "hit rate", "a token", "int8 experts"):
        assert word in err


def test_the_kind_of_experts(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Native by default, and said so, with the row sums that no budget holds; reference experts answer alike."""
    assert command("run", directory, "--prompt", FRANCE) == 0
    err = capsys.readouterr().err
    assert f"native products ({native.isa()})" in err
    sums = row_sum_bytes(open_container(directory))
    assert sums == 4 * 16 * (2 * 128 + 256) * 4
    assert f"row sums of all experts: {size_text(sums)} in memory beside them, read once" in err
    assert command("run", directory, "--prompt", FRANCE, "--experts", "reference") == 0
    out, err = capsys.readouterr()
    assert out == PARIS + "\n" and "reference products" in err and "row sums" not in err
    assert command("run", directory, "--prompt", FRANCE, "--experts", "none") == 2
    assert "E1244" in capsys.readouterr().err
    assert command("chat", directory, "--experts", "none") == 2
    assert "E1244" in capsys.readouterr().err


def test_run_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything a program wants: text, ids, rates, counters by layer, the peak below the budget."""
    assert command("run", directory, "--prompt", FRANCE, "--json", "--budget", "512KiB") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["text"] == PARIS and table["stopped"] == "eos" and table["ids"][-1] == 1023
    assert table["peak_bytes"] <= 512 << 10 and table["io"] in ("direct", "buffered")
    assert sum(c["bytes_read"] for c in table["layers"].values()) == sum(
        table[phase]["bytes_read"] for phase in ("prefill", "decode")
    )
    assert table["prefill"]["bytes_read"] > 0 and table["bytes_per_token"] > 0


def test_max_new_tokens(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer is cut after so many tokens."""
    assert command("run", directory, "--prompt", FRANCE, "--max-new-tokens", "3", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert len(table["ids"]) == 3 and table["stopped"] == "length" and PARIS.startswith(table["text"])


def test_seeded_sampling(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed draws the same tokens; another draws others; greedy is the default."""
    found = []
    for seed in (1, 1, 2):
        words = ["--temperature", "1.5", "--seed", str(seed), "--json", "--max-new-tokens", "24", "--io", "mmap"]
        assert command("run", directory, "--prompt", "Tell me something.", *words) == 0
        found.append(json.loads(capsys.readouterr().out)["ids"])
    assert found[0] == found[1] != found[2]


def test_the_tokenizer_is_a_side_file(
    workshop: Workshop, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one: exit 2 naming --tokenizer; with it the same answer; without a chat template: --raw or exit 2."""
    bare = workshop.copy("int8", tmp_path / "bare")
    container = open_container(bare)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert all(n in container.manifest.files for n in names)
    source = tmp_path / "source"
    shutil.copytree(TINY, source, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    from kits.conversions import prepare

    from pagestone.formats import encodings

    prepare(source, tmp_path / "out", encodings.get("int8"), workers=1)
    for words in (["run", tmp_path / "out", "--prompt", "x"], ["chat", tmp_path / "out"]):
        assert command(*words) == 2
        out, err = capsys.readouterr()
        assert out == "" and "--tokenizer DIR" in err and "E1230" in err
    assert command("run", tmp_path / "out", "--prompt", FRANCE, "--tokenizer", TINY) == 0
    assert capsys.readouterr().out == PARIS + "\n"
    shutil.copytree(TINY, tmp_path / "words", ignore=shutil.ignore_patterns("chat_template*", "*.safetensors"))
    assert command("run", tmp_path / "out", "--prompt", FRANCE, "--tokenizer", tmp_path / "words") == 2
    assert "E1231" in capsys.readouterr().err
    raw = ["--raw", "--max-new-tokens", "2"]
    assert (
        command("run", tmp_path / "out", "--prompt", "In the beginning", "--tokenizer", tmp_path / "words", *raw) == 0
    )
    assert capsys.readouterr().out.strip()


def test_requests(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options are exit 2 with a remedy, before a model is made."""
    for words, code in (
        (["--budget", "1kg"], "E1241"),
        (["--budget", "4096"], "E1215"),
        (["--budget", "1MiB", "--io", "mmap"], "E1240"),
        (["--io", "tape"], "E1240"),
        (["--temperature", "-1"], "E1242"),
        (["--top-p", "0"], "E1242"),
        (["--raw", "--prompt", ""], "E1243"),
    ):
        assert command("run", directory, *(["--prompt", "x"] if "--prompt" not in words else []), *words) == 2, words
        err = capsys.readouterr().err
        assert code in err and "what to do" in err, (words, err)
    for nothing in (tmp_path, tmp_path / "none"):
        assert command("run", nothing, "--prompt", "x") == 2
        err = capsys.readouterr().err
        assert "E0331" in err and "or a checkpoint with config.json" in err and ".safetensors" in err


def test_damage_is_no_answer(workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged expert ends the run with exit 1, naming file and expert, on the direct path."""
    root = workshop.copy("int8", tmp_path / "container")
    layer = open_container(root).layers[0]
    with layer.path.open("r+b") as handle:
        for expert in range(16):
            handle.seek(layer.layout.record_offset(expert) + 5)
            handle.write(b"\x55")
    assert command("run", root, "--prompt", FRANCE) == 1
    out, err = capsys.readouterr()
    assert out == "" and "layers-00.safetensors: expert " in err and "E1201" in err


@pytest.mark.parametrize(
    ("codec", "dense", "parts"),
    [
        ("int8", None, "experts, their row sums, dense tensors and the embedding table"),
        ("q4", "int8", "experts, encoded dense matrices, dense tensors and the embedding table"),
    ],
)
def test_what_is_mapped_is_not_compared_and_it_is_said(
    workshop: Workshop, tmp_path: Path, codec: str, dense: str | None, parts: str
) -> None:
    """A dense file that was damaged is used under mmap, and a note says so of all that is mapped; else it is E1205."""
    root = tmp_path / "container"
    workshop.copy(codec, root, dense=dense or "keep")
    file = next(root.glob("dense-*" if dense is None else "matrices-*"))
    with file.open("r+b") as handle:
        handle.seek(-5000, 2)
        byte = handle.read(1)
        handle.seek(-5000, 2)
        handle.write(bytes([byte[0] ^ 1]))
    notes: list[str] = []
    with Session(root, SessionOptions("mmap"), notes.append) as session:
        assert session.model.forward([1, 2, 3])
    assert [n for n in notes if "not compared" in n] == [
        f"{parts} are mapped, and not compared with their digests: `pagestone verify` compares them"
    ]
    notes.clear()
    with Session(root, SessionOptions(), notes.append) as session, pytest.raises(DataError, match="E1205"):
        _ = session.model
    assert not any("not compared" in n for n in notes)


# -- turns ------------------------------------------------------------------------------------------------------------


def test_text_comes_in_whole_characters(talk: Conversation) -> None:
    """What is emitted adds up to the text, and the text to what decoding all ids at once gives."""
    said: list[str] = []
    turn = talk.answer([{"role": "user", "content": FRANCE}], 50, said.append)
    assert "".join(said) == turn.text == PARIS and len(said) > 3
    assert talk.tokenizer.decode(turn.ids) == PARIS
    assert turn.tokens_per_second > 0 and turn.prefill.bytes_read > 0 and turn.decode.hits > 0


def test_ends_are_the_union(tmp_path: Path) -> None:
    """Ints and lists, in generation_config.json, config.json and text_config; none at all is none."""
    assert end_tokens(TINY) == {1021, 1023}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": [6, 7]}}))
    assert end_tokens(tmp_path) == {5, 6, 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert end_tokens(tmp_path) == {5, 6, 7, 8}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (tmp_path / "generation_config.json").unlink()
    assert end_tokens(tmp_path) == frozenset()


def test_any_of_the_ends_stops(directory: Path) -> None:
    """Every id of the union ends the answer, here one that is an ordinary token of it."""
    loaded = model(directory, "mmap")
    tokens = open_tokenizer(directory)
    ordinary = tokens.encode(PARIS)[3]
    turn = Conversation(loaded, tokens, Sampling(), frozenset({ordinary, 1023})).answer(
        [{"role": "user", "content": FRANCE}], 50, lambda _: None
    )
    assert turn.stopped == "eos" and turn.ids[-1] == ordinary and len(turn.ids) == 4
    loaded.close()


def test_interrupting_ends_the_turn_not_the_session(talk: Conversation) -> None:
    """Ctrl-C in the middle of an answer: nothing is leased, what was said is kept, the next turn works."""
    said: list[str] = []

    def press(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    turn = talk.answer([{"role": "user", "content": FRANCE}], 50, press)
    assert turn.stopped == "interrupted" and 0 < len(turn.text) < len(PARIS) and PARIS.startswith(turn.text)
    assert talk.model.context.store.open_leases == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert talk.answer([{"role": "user", "content": FRANCE}], 50, lambda _: None).text == PARIS


def test_a_session(talk: Conversation) -> None:
    """Turns build on each other and feed only what is new; Ctrl-C at the prompt is a hint; the end is the end."""
    lines: list[Any] = ["What is the opposite of fast?", KeyboardInterrupt, "", FRANCE, None]
    said: list[str] = []
    notes: list[str] = []
    turns: list[Turn] = []
    real = talk.turn

    def turn(*arguments: Any) -> Turn:
        turns.append(real(*arguments))
        return turns[-1]

    talk.turn = turn  # type: ignore[method-assign]

    def ask() -> str | None:
        line = lines.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    converse(talk, 50, ask, said.append, notes.append)
    assert not lines and "".join(said).splitlines()[0] == "The opposite of fast is slow."
    assert any("Ctrl-D" in n for n in notes) and sum("tokens/s" in n for n in notes) == 2
    assert turns[0].fed_tokens == turns[0].prompt_tokens
    assert turns[1].fed_tokens < turns[1].prompt_tokens - 20


def test_chat_as_a_process(directory: Path) -> None:
    """Lines in, answers out, rates on stderr; SIGINT during an answer leaves the session alive."""
    words = [sys.executable, "-m", "pagestone", "chat", str(directory), "--io", "mmap"]
    done = subprocess.run(
        words, input=f"{FRANCE}\nWhich day comes after Monday?\n", capture_output=True, text=True, timeout=120,
        check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == [PARIS, "Tuesday comes after Monday."]
    assert done.stderr.count("tokens/s") == 2 and "Traceback" not in done.stderr


# -- sampling and sizes -----------------------------------------------------------------------------------------------


def test_sampling() -> None:
    """Greedy takes the first of the largest; top-k and top-p cut the tail; frequencies follow the temperature."""
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, -2.0], dtype=torch.bfloat16)
    assert Sampler(Sampling())(logits) == 1
    draw = Sampler(Sampling(temperature=1.0, top_k=2))
    assert {draw(logits) for _ in range(50)} == {1, 3}
    draw = Sampler(Sampling(temperature=1.0, top_p=0.5))
    assert {draw(logits) for _ in range(50)} <= {1, 3}
    draw = Sampler(Sampling(temperature=1e-4, seed=4))
    assert {draw(torch.tensor([0.0, 1.0])) for _ in range(20)} == {1}
    draw = Sampler(Sampling(temperature=2.0, seed=4))
    share = sum(draw(torch.tensor([0.0, 2.0])) for _ in range(2000)) / 2000
    assert abs(share - 0.731) < 0.04


def test_sizes(directory: Path) -> None:
    """Binary and decimal units; the default budget is at most all records and at least one."""
    assert parse_size("2GiB") == parse_size("2G") == parse_size("2 g") == 2 << 30
    assert parse_size("1.5MB") == 1_500_000 and parse_size("123") == parse_size("123B") == 123
    for wrong in ("", "GiB", "-1", "0", "1 XB", "1e3"):
        with pytest.raises(RequestError, match="E1241"):
            parse_size(wrong)
    container = open_container(directory)
    assert default_budget(container, 0) == all_records(container)
    assert default_budget(container, 1 << 60) == container.layers[0].stride
