"""Options of a codec on the command line, and what a container then says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pagestone.convert import commands
from pagestone.formats import encodings
from pagestone.formats.errors import RequestError
from pagestone.formats.manifest import MANIFEST, read_manifest

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny-moe"


def run(*words: str):
    app = typer.Typer()
    commands.register(app)
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(("words", "size"), [((), 64), (("--group-size", "32"), 32), (("--group-size", "64"), 64)])
@pytest.mark.parametrize("name", ["q3", "q4", "q8"])
def test_group_size_reaches_the_container(tmp_path, name, words, size):
    done = run(f"prepare-{name}", str(TINY), "-o", str(tmp_path / "out"), *words)
    assert done.exit_code == 0, done.output
    manifest = read_manifest(tmp_path / "out" / MANIFEST)
    assert (manifest.codec, dict(manifest.parameters)) == (name, {"group_size": size})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stated = {"group_size": size, "bits": int(name[1]), "mode": "affine"}
    for place in (config, config["text_config"]):
        assert place["quantization"] == place["quantization_config"] == stated


def test_a_group_size_that_is_not_offered_is_refused(tmp_path):
    done = run("prepare-q4", str(TINY), "-o", str(tmp_path / "out"), "--group-size", "48")
    assert isinstance(done.exception, RequestError)
    assert "--group-size expected to be 64 or 32, found 48 (E0004)" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_codecs_offer_only_their_own_options(tmp_path):
    for name, cls in encodings.registry().items():
        done = run(f"prepare-{name}", str(TINY), "-o", str(tmp_path / name), "--dry-run", "--group-size", "32")
        assert (done.exit_code == 0) == bool(cls.options), name


def test_every_option_is_a_parameter_whose_default_comes_first():
    for name, cls in encodings.registry().items():
        for option in cls.options:
            assert encodings.get(name).parameters[option.name] == option.choices[0]
            for choice in option.choices:
                assert encodings.get(name, {option.name: choice}).parameters[option.name] == choice


def test_bf16_of_bfloat16_is_lossless_and_states_no_quantisation(tmp_path):
    done = run("prepare-bf16", str(TINY), "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert read_manifest(tmp_path / "out" / MANIFEST).lossless
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and "quantization" not in config
