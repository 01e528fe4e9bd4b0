"""`verify-logits` of containers whose dense matrices are in an encoding: both sides equal, and every flip seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.inference import TINY, Workshop, calm, command, flip

from pagestone.formats.errors import DataError
from pagestone.reader.container import open_container
from pagestone.reader.dense import dense_entries, encoded_matrices
from pagestone.reader.model import NATIVE, REFERENCE
from pagestone.validate import logits
from pagestone.validate.audit import DIFFERENT, EQUAL, NOT_COMPARABLE
from pagestone.validate.logits import LogitsRequest, verify_logits
from pagestone.validate.recorded import read_audit

TABLE = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    oracle("torch")
    oracle("transformers")
    calm()


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("logits"))


@pytest.fixture(params=["resident", "anew"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of reference side."""
    if request.param == "anew":
        monkeypatch.setattr(logits, "available_memory", lambda: 1)
    return str(request.param)


def asked(directory: Path, **how: Any) -> LogitsRequest:
    return LogitsRequest(directory, **({"steps": 2} | how))


@pytest.mark.parametrize(("codec", "dense", "experts"), [
    ("int8", "int8", "auto"), ("q4", "q4", "auto"), ("bf16", "fp8", "auto"), ("int8", "q4", REFERENCE),
])  # fmt: skip
def test_both_sides(workshop: Workshop, codec: str, dense: str, experts: str, way: str) -> None:
    """From the container and encoded from its source, whatever reads; the audit says how dense ones multiply."""
    directory = workshop.container(codec, dense=dense)
    pairs = [("direct", None), ("mmap", TINY)] if way == "resident" else [("mmap", None), ("direct", TINY)]
    for io, source in pairs:
        audit = verify_logits(asked(directory, io=io, source=source, experts=experts))
        assert audit.result == EQUAL and audit.exit_code == 0, (io, source)
        assert audit.reference is not None and audit.reference.mode == way
    linears = NATIVE if experts == "auto" else REFERENCE
    assert audit.surroundings["model"]["linears"] == linears
    assert (audit.surroundings["products"]["isa"] is None) == (linears == REFERENCE)


def test_against_an_audit(workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The audit remembers the products of dense matrices; those of other products are not compared."""
    directory, path = workshop.container("bf16", dense="int8"), tmp_path / "audit.json"
    assert command("verify-logits", directory, "--steps", "1", "--audit", path) == 0
    assert read_audit(path).surroundings["model"]["linears"] == NATIVE
    assert verify_logits(asked(directory, against=path, steps=1)).result == EQUAL
    other = verify_logits(asked(directory, against=path, steps=1, experts=REFERENCE))
    assert other.result == NOT_COMPARABLE and "model linears is reference here, native there" in logits.report(other)
    plain = workshop.container("bf16")
    assert command("verify-logits", plain, "--steps", "1", "--audit", path) == 0
    assert "linears" not in json.loads(path.read_text())["model"]
    assert verify_logits(asked(plain, against=path, steps=1)).result == EQUAL
    capsys.readouterr()


def test_a_flip_on_disk(workshop: Workshop, tmp_path: Path, way: str) -> None:
    """Every file of matrices is compared with its digest, whichever side reads it; so is that of the table."""
    directory = workshop.copy("int8", tmp_path / "c", dense="int8")
    place = encoded_matrices(open_container(directory))["lm_head"]
    for path, at in (
        (directory / place.matrix.file, place.offset + 70_000),
        (directory / place.matrix.file, place.offset + place.record.stored[2].offset),  # row sums
        (directory / dense_entries(open_container(directory))[TABLE][0], -100),
    ):
        at = at if at >= 0 else path.stat().st_size + at
        flip(path, at)
        for io in ("direct", "mmap"):
            with pytest.raises(DataError, match=rf"{path.name}.*E1205"):
                verify_logits(asked(directory, io=io))
        flip(path, at)


@pytest.mark.parametrize(("name", "role", "layer", "what"), [
    ("model.layers.1.linear_attn.out_proj", "codes", 1, "input"),
    ("model.layers.0.mlp.shared_expert.down_proj", "scales", 1, "input"),
    ("lm_head", "codes", None, "logits"),
    ("lm_head", "scales", None, "logits"),
])  # fmt: skip
def test_a_flip_in_memory(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, name: str, role: str, layer: int | None, what: str, way: str
) -> None:
    """The logits tell, and the first layer where anything differed is named."""
    real = logits._streamed_model

    def broken(*arguments: Any) -> Any:
        model = real(*arguments)
        array = model.model.get_submodule(name).matrix.stored[role].array.view("u1")
        array.flags.writeable = True
        array[..., :3] ^= 0x30
        return model

    monkeypatch.setattr(logits, "_streamed_model", broken)
    audit = verify_logits(asked(workshop.container("int8", dense="q4" if role == "codes" else "int8")))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what) == (layer, what)


def test_a_flip_in_a_row_in_memory(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Rows that were read and are kept: used again, they must be what they were."""
    real = logits._streamed_model

    def broken(*arguments: Any) -> Any:
        model = real(*arguments)
        (table,) = model.tables
        keep = table._keep

        def bad(row: int, data: Any) -> None:
            keep(row, data ^ 0x20)

        table._keep = bad
        return model

    monkeypatch.setattr(logits, "_streamed_model", broken)
    audit = verify_logits(asked(workshop.container("int8"), steps=6))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what) == (0, "input")
