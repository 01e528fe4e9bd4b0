"""Conversion at true sizes: Qwen3.6's shapes, and two layers of a published checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kits.cli import done
from kits.containers import Source, assert_is_definition, read_table
from safetensors import safe_open

from pagestone.validate.verify import verify

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FILLED = [(0, 0), (0, 179), (1, 17), (1, 100)]


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_true_shape_is_the_definition(true_shape, big_path, codec):
    """Two true-shape layers with outliers equal the definition and open in plain safetensors."""
    output = big_path / "o"
    done(f"prepare-{codec}", true_shape, "-o", output)
    modules = Source(true_shape).modules()
    experts = max(modules.values())
    few = None if experts <= 8 else [(p, e) for p in modules for e in (0, 1, 9, 10, 99, 100, 127, 255)]
    assert assert_is_definition(output, true_shape, codec, only=few) == 2 * min(experts, 8)
    assert verify(output, source=true_shape, workers=2).exit_code == 0
    stride = {"int8": 3158016, "fp8": 3149824}[codec]
    for layer in range(2):
        file = output / f"layers-{layer:02d}.safetensors"
        table, start = read_table(file)
        with safe_open(file, "np") as opened:
            assert opened.metadata()["pagestone.stride"] == str(stride)
            prefix = opened.metadata()["pagestone.prefix"]
            assert set(opened.keys()) == set(table) - {"__metadata__"}
        for e in range(experts):
            assert table[f"{prefix}.{e}.gate_proj.weight"]["data_offsets"][0] == e * stride
        assert start % 4096 == 0 and file.stat().st_size == start + experts * stride


def test_true_shape_is_deterministic(tmp_path):
    """The script gives the same bytes every time, fused and per-expert alike, and plants outliers where it says."""
    script = SCRIPTS / "make_true_shape.py"
    options = ["--layers", "1", "--experts", "2", "--vocab", "8"]
    for name, more in (("a", []), ("b", []), ("split", ["--per-expert"]), ("out", ["--outliers"])):
        command = [sys.executable, str(script), str(tmp_path / name), *options, *more]
        subprocess.run(command, check=True, capture_output=True)
    files = [{p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("a", "b")]
    assert files[0] == files[1]
    prefix = "model.language_model.layers.0.mlp.experts"
    plain, split, out = (Source(tmp_path / n) for n in ("a", "split", "out"))
    assert split.modules() == plain.modules() == {prefix: 2}
    usual = plain.expert(prefix, 1)["gate"]
    assert usual.shape == (512, 2048) and 0.018 < usual.std() < 0.022 and np.isfinite(usual).all()
    larger = out.expert(prefix, 1)["gate"] / usual
    assert (larger == 32).all(axis=0).sum() == 6 and (larger == 1).all(axis=0).sum() == 2042
    shutil.rmtree(tmp_path)


def test_two_layers_of_a_published_checkpoint(big_path):
    """Two of 40 layers (F16, 180 experts, flat config, nested names): the experts with weights equal the definition."""
    source, output = big_path / "s", big_path / "o"
    fill = [f"{layer}:{expert}" for layer, expert in FILLED]
    vocab = [] if os.environ.get("PAGESTONE_SLOW") else ["--vocab", "1000"]
    script = [sys.executable, str(SCRIPTS / "make_sparse.py"), str(source), "--layers", "2", *vocab, "--fill", *fill]
    subprocess.run(script, check=True, capture_output=True)
    table = json.loads(done("prepare-int8", source, "-o", output, "--json"))
    assert (table["layers"], table["experts"]) == (2, 360)
    prefix = "model.language_model.layers.{}.mlp.experts"
    some = [(prefix.format(layer), e) for layer, e in FILLED]
    assert assert_is_definition(output, source, "int8", only=some) == 4
    weights = Source(source).expert(*some[3])
    assert 0.019 < weights["down"].std() < 0.021
    with safe_open(output / "layers-01.safetensors", "np") as opened:
        for expert in (0, 16, 18, 179):  # neighbours stay zero
            assert not opened.get_tensor(f"{some[3][0]}.{expert}.up_proj.weight").any()
            assert (opened.get_tensor(f"{some[3][0]}.{expert}.up_proj.weight_scale") == 1).all()
