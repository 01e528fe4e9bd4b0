"""What decides an answer beside the weights: config, tokenizer, template. One changed bit is refused, in every mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from kits.inference import Workshop, command, flip

from pagestone.formats.errors import DataError
from pagestone.reader.container import open_container, open_to_run
from pagestone.reader.session import Session, SessionOptions
from pagestone.validate import fidelity, logits

SIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("sides"))


@pytest.fixture
def root(workshop: Workshop, tmp_path: Path) -> Path:
    """A container that a test may damage."""
    return workshop.copy("int8", tmp_path / "container")


def more_experts(root: Path) -> None:
    """`num_experts_per_tok` 4 -> 5: one bit of one byte, the same length, every answer another."""
    path = root / "config.json"
    text = path.read_text()
    assert '"num_experts_per_tok": 4' in text
    changed = text.replace('"num_experts_per_tok": 4', '"num_experts_per_tok": 5')
    path.write_text(changed)
    assert json.loads(changed) and len(changed) == len(text)


@pytest.mark.parametrize("name", [*SIDE, "model.safetensors.index.json"])
def test_one_bit_of_any_side_file(root: Path, name: str) -> None:
    """E1216 names the file, wherever the bit lies; reading experts alone stays cheap and possible."""
    size = (root / name).stat().st_size
    assert open_to_run(root).container_id == open_container(root).container_id
    for offset in (0, size // 2, size - 1):
        flip(root / name, offset)
        with pytest.raises(DataError, match=rf"{name}: xxh3 of the file expected .*E1216") as error:
            open_to_run(root)
        assert error.value.remedy and error.value.exit_code == 1
        assert open_container(root).layers[0].expert(0).down.decode().any()
        flip(root / name, offset)
    open_to_run(root)


@pytest.mark.parametrize("name", [
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "other.jinja", "vocab.json", "merges.txt",
    "tokenizer.model", "preprocessor_config.json", "additional_chat_templates/default.jinja",
])  # fmt: skip
def test_a_file_that_is_not_the_containers(root: Path, name: str) -> None:
    """What a tokenizer or a template would be read from too is refused; notes of the user are not."""
    (root / "notes.json").write_text("{}")
    open_to_run(root)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("{}")
    with pytest.raises(DataError, match=rf"{name}: .*not the container's.*E1216"):
        open_to_run(root)


@pytest.mark.parametrize("io", ["direct", "mmap", "resident"])
@pytest.mark.parametrize("name", ["run", "chat", "verify-logits", "compare"])
def test_every_command_that_runs_a_model(
    root: Path, tiny: Path, tmp_path: Path, name: str, io: str, capsys: pytest.CaptureFixture[str],
    oracle: Callable[[str], ModuleType],
) -> None:  # fmt: skip
    """Both sides of `verify-logits` would read the same damage and agree; none of the four reads it."""
    oracle("transformers")
    more_experts(root)
    (tmp_path / "text").write_text("What is the capital of France?")
    words = {
        "run": ["--prompt", "x"], "chat": [], "verify-logits": [],
        "compare": ["--source", tiny, "--text", tmp_path / "text"],
    }  # fmt: skip
    assert command(name, root, *words[name], "--io", io) == 1
    said = capsys.readouterr()
    assert said.out == "" and "config.json: xxh3" in said.err and "E1216" in said.err and "what to do" in said.err


def test_their_functions_too(root: Path, tiny: Path, tmp_path: Path, oracle: Callable[[str], ModuleType]) -> None:
    """Whoever calls the work of a command without the command."""
    oracle("transformers")
    more_experts(root)
    (tmp_path / "text").write_text("What is the capital of France?")
    with pytest.raises(DataError, match="E1216"):
        Session(root, SessionOptions("mmap"))
    with pytest.raises(DataError, match="E1216"):
        logits.verify_logits(logits.LogitsRequest(root))
    with pytest.raises(DataError, match="E1216"):
        fidelity.compare(fidelity.FidelityRequest(root, tiny, text=tmp_path / "text"))
