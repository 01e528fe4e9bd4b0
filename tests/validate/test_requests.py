"""What a comparison was asked is looked at before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.inference import TINY, Workshop, calm, command

from pagestone.formats.errors import PagestoneError
from pagestone.reader.hosts import transformers as host
from pagestone.reader.session import Session
from pagestone.validate import fidelity, logits, requests
from pagestone.validate.audit import Audit

STRIDE = 25 * 4096


@pytest.fixture(scope="module")
def container(oracle: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle("torch")
    oracle("transformers")
    calm()
    return Workshop(tmp_path_factory.mktemp("requests")).container("int8")


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to a model ends the test."""

    def loaded(*_: Any, **__: Any) -> None:
        pytest.fail("a model was loaded")

    for module, name in ((host, "load"), (host, "plain_model"), (logits, "ResidentStore"),
                         (Session, "model_over"), (Session, "open_store")):  # fmt: skip
        monkeypatch.setattr(module, name, loaded)


LOGITS: dict[str, tuple[list[str], str, int]] = {
    "an audit in no directory": (["--audit", "{tmp}/none/a.json"], "E1313", 2),
    "an audit below a file": (["--audit", "{tmp}/file/a.json"], "E1313", 2),
    "an audit that is a directory": (["--audit", "{tmp}"], "E1313", 2),
    "traces that are a directory": (["--audit", "{tmp}/b.json"], "E1313", 2),
    "an audit where nothing can be written": (["--audit", "/proc/a.json"], "E1313", 2),
    "no prompts": (["--prompts", "{tmp}/none"], "E1239", 2),
    "ids that are none": (["--ids", "{tmp}/words"], "E1305", 2),
    "an id the model does not have": (["--ids", "{tmp}/large"], "E1305", 2),
    "no tokenizer": (["--prompts", "{tmp}/words", "--tokenizer", "{tmp}"], "E1230", 2),
    "no source": (["--source", "{tmp}/none"], "E0401", 2),
    "a source without a config": (["--source", "{tmp}"], "E0402", 2),
    "no audit to compare with": (["--against", "{tmp}/none"], "E1239", 2),
    "an audit that is none": (["--against", "{tmp}/words"], "E1303", 1),
    "two other sides": (["--against", "{tmp}/words", "--source", "{tmp}"], "E0005", 2),
    "a budget below an expert": (["--budget", str(STRIDE - 1)], "E1215", 2),
    "a budget that is no size": (["--budget", "much"], "E1241", 2),
    "a budget without a cache": (["--budget", "1GiB", "--io", "mmap"], "E1240", 2),
    "a way that does not stream": (["--io", "resident"], "E1240", 2),
    "no way": (["--io", "tape"], "E1240", 2),
    "no such experts": (["--experts", "other"], "E1244", 2),
}
COMPARE: dict[str, tuple[list[str], str, int]] = {
    "no text": (["--text", "{tmp}/none"], "E1239", 2),
    "a text of nothing": (["--text", "{tmp}/empty"], "E1311", 2),
    "no questions": (["--questions", "{tmp}/none"], "E1239", 2),
    "questions that are none": (["--questions", "{tmp}/words"], "E1312", 2),
    "no source": (["--text", "{tmp}/words", "--source", "{tmp}/none"], "E0401", 2),
    "a source without a config": (["--text", "{tmp}/words", "--source", "{tmp}"], "E0402", 2),
    "a budget below an expert": (["--text", "{tmp}/words", "--budget", "1KiB"], "E1215", 2),
    "a budget without a cache": (["--text", "{tmp}/words", "--budget", "1GiB", "--io", "resident"], "E1240", 2),
    "no way": (["--text", "{tmp}/words", "--io", "tape"], "E1240", 2),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").write_text("a")
    (tmp_path / "words").write_text("In the beginning was the word\n")
    (tmp_path / "large").write_text("1 1024\n")
    (tmp_path / "b.traces.jsonl.zst").mkdir()
    return tmp_path


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("what", LOGITS)
def test_verify_logits(container: Path, files: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    words, code, exit_code = LOGITS[what]
    assert command("verify-logits", container, *(w.format(tmp=files) for w in words)) == exit_code
    text = capsys.readouterr()
    assert f"({code})" in text.err and text.out == ""
    assert sorted(p.name for p in files.iterdir()) == ["b.traces.jsonl.zst", "empty", "file", "large", "words"]


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("what", COMPARE)
def test_compare(container: Path, files: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    words, code, exit_code = COMPARE[what]
    source = [] if "--source" in words else ["--source", TINY]
    assert command("compare", container, *source, *(w.format(tmp=files) for w in words)) == exit_code
    assert f"({code})" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    "how", [{"steps": -1}, {"steps": 10**10}, {"steps": 1.0}, {"steps": True}, {"threads": 65}, {"threads": -1}]
)
def test_numbers_of_verify_logits(container: Path, how: dict[str, Any]) -> None:
    with pytest.raises(PagestoneError, match="E1314"):
        logits.verify_logits(logits.LogitsRequest(container, **how))


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("how", [{"tokens": 1}, {"window": 1}, {"window": 0}, {"limit": 0}, {"tokens": "9"}])
def test_numbers_of_compare(container: Path, how: dict[str, Any]) -> None:
    with pytest.raises(PagestoneError, match="E1314"):
        fidelity.compare(fidelity.FidelityRequest(container, TINY, text=TINY / "heldout.txt", **how))


def test_numbers_at_their_ends() -> None:
    for value in (None, 0, 64):
        requests.number("--threads", value, 0, 64)


def test_a_file_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    """Looking at it leaves nothing behind."""
    requests.output(tmp_path / "new.json")
    (tmp_path / "old.json").write_text("old")
    requests.output(tmp_path / "old.json")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"old.json": "old"}


@pytest.mark.parametrize("as_json", [False, True])
def test_a_disk_that_is_full_by_then(
    container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """The result is printed all the same: only the file is lost, and it is named."""
    path = tmp_path / "audit.json"
    real = Audit.write

    def write(self: Audit, to: Path) -> Path:
        (tmp_path / "audit.traces.jsonl.zst").symlink_to("/dev/full")  # takes no byte: ENOSPC
        return real(self, to)

    monkeypatch.setattr(Audit, "write", write)
    (tmp_path / "ids").write_text("1 2\n")
    words = ["--ids", tmp_path / "ids", "--steps", "0", "--audit", path, *(["--json"] if as_json else [])]
    assert command("verify-logits", container, *words) == 3
    text = capsys.readouterr()
    assert json.loads(text.out)["result"] == "equal" if as_json else "byte for byte" in text.out
    assert "audit.json" in text.err and "E0901" in text.err
