"""Versions of the specification: each refuses the others by name and says what to do, and nobody reads half of one.

Version 1 was written by unreleased programs only. What these tests hold for it holds for any version that is not
`SPEC_VERSION`, but for the advice: whoever knows that a version is older says so, and no code changes one into another.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kits.cli import pagestone, refused
from kits.conversions import planned, prepare, run
from kits.vectors import VECTORS, generator

from pagestone.convert.publish import JOURNAL
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import SPEC_VERSION, UNRELEASED, other_version, read_layer_file
from pagestone.formats.manifest import MANIFEST, PARTIAL, RECORDS, read_manifest
from pagestone.reader.container import open_container
from pagestone.validate import plain_reader
from pagestone.validate.verify import verify

LAYER = "layers-01.safetensors"
OTHERS = [*UNRELEASED, str(int(SPEC_VERSION) + 1), "2.0", "x" * 300]


def of_version(root: Path, version: str, base: str = "int8-small") -> Path:
    """A container as another version might have written it: its manifest right, its layer files of that version too."""
    make = generator()
    shutil.copytree(VECTORS / "accept" / base, root)
    for file in root.glob("layers-*.safetensors"):
        make.header(file.name, lambda t: t["__metadata__"].update({"pagestone.spec": version}))(root)
    make.seal(root)
    make.edit_manifest(root, lambda t: t["pagestone"].update(spec_version=version))
    if version == "1":  # as it was: other fields
        make.edit_manifest(root, lambda t: (t.pop("request"), t["files"].pop(RECORDS)))
        (root / RECORDS).unlink()
    make.sign(root, json.loads((root / MANIFEST).read_bytes()))
    return root


def advice(version: str) -> str:
    return "unreleased version" if version in UNRELEASED else "use a version of pagestone that knows it"


@pytest.mark.parametrize("version", OTHERS, ids=lambda v: v[:4])
def test_every_reader_refuses_by_name(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Opening, verify and the plain reader; the message names version and file, and is short."""
    root = of_version(tmp_path / "c", version)
    with pytest.raises(DataError) as caught:
        open_container(root)
    error = caught.value
    assert error.code == "E0302" and error.file == str(root / MANIFEST) and len(str(error)) < 600
    assert f"spec version {SPEC_VERSION} expected, found '{version[:9]}" in error.message
    assert advice(version) in str(error) and "convert again" in str(error.remedy)
    report = verify(root)
    assert [f.code for f in report.findings] == ["E0302"] and report.exit_code == 1
    assert version not in UNRELEASED or "made by an unreleased version" in report.findings[0].message
    assert plain_reader.main(root) == 1
    told = capsys.readouterr().err
    assert ("made by an unreleased version: convert again" in told) == (version in UNRELEASED)


@pytest.mark.parametrize("version", OTHERS, ids=lambda v: v[:4])
def test_a_layer_of_another_version(version: str, tmp_path: Path) -> None:
    """A file says its version itself: one that was mixed in is named (E0221)."""
    root = of_version(tmp_path / "c", version)
    with pytest.raises(DataError, match="E0221") as caught:
        read_layer_file(root / LAYER)
    assert caught.value.file == str(root / LAYER) and f"spec version {SPEC_VERSION} expected" in caught.value.message
    assert ("unreleased" in caught.value.message) == (version in UNRELEASED)


def test_what_is_no_version() -> None:
    for odd in (None, 1, 2, ["1"], {"1": 2}, True):
        assert "unreleased" not in other_version(odd)[0]


def test_converting_where_an_old_container_lies(tmp_path: Path) -> None:
    """Refused by its name; --force replaces it once the new one is whole, and leaves nothing of it."""
    source, output = generator().ACCEPT["int8-small"].source, of_version(tmp_path / "o", "1")
    source(tmp_path / "s")
    with pytest.raises(DataError, match=r"unreleased version.*E0302"):
        run(tmp_path / "s", output)
    assert json.loads((output / MANIFEST).read_bytes())["pagestone"] == {"spec_version": "1"}
    result = pagestone("prepare-int8", tmp_path / "s", "-o", output)
    refused(result, 1, "E0302", "made by an unreleased version", "convert again")
    assert run(tmp_path / "s", output, force=True).state == "converted"
    assert verify(output, source=tmp_path / "s").exit_code == 0


def test_an_old_container_is_no_source(tmp_path: Path) -> None:
    """A bf16 container may be converted again; one of another version is refused by its name."""
    root = of_version(tmp_path / "c", "1", "bf16-small")
    with pytest.raises((DataError, RequestError), match=r"unreleased version.*E0302"):
        planned(root)


def test_unfinished_work_of_another_version(tmp_path: Path) -> None:
    """A conversion that another version began is not continued: the message says what differs."""
    generator().ACCEPT["int8-small"].source(tmp_path / "s")
    output = tmp_path / "o"
    (output / PARTIAL).mkdir(parents=True)
    job: dict[str, Any] = {"spec version": "1"}
    (output / PARTIAL / JOURNAL).write_text(json.dumps(job) + "\n")
    with pytest.raises(RequestError, match=r"by another version of pagestone.*E0803"):
        prepare(tmp_path / "s", output, encodings.get("int8"), workers=1)
    assert prepare(tmp_path / "s", output, encodings.get("int8"), workers=1, force=True)
    assert read_manifest(output / MANIFEST).matrices == 12
