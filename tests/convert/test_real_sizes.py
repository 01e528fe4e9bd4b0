"""Conversion at true sizes: Qwen3.6's shapes, and two layers of a published checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kits import generated
from kits.cli import done
from kits.containers import Source, assert_is_definition, read_table
from kits.conversions import prepare
from safetensors import safe_open

from pagestone.formats import encodings
from pagestone.reader.container import open_container
from pagestone.validate.verify import verify

PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "real-checkpoints" / "qwen3.5-25b-reap"
CHECKED = [(0, 0), (0, 179), (1, 17), (1, 100)]


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


def test_two_layers_of_a_published_checkpoint(big_path):
    """Two of 40 layers (F16, 180 experts, flat config, nested names), made from a seed: the definition holds."""
    vocabulary = None if os.environ.get("PAGESTONE_SLOW") else 1000
    source, output = generated.published(PUBLISHED, layers=2, vocabulary=vocabulary), big_path / "o"
    assert prepare(source, output, encodings.get("int8"), workers=2).state == "converted"
    some = [(f"model.language_model.layers.{layer}.mlp.experts", e) for layer, e in CHECKED]
    inside = tuple(f"{prefix}.{e}." for prefix, e in some)
    written = big_path / "some"
    source.write(written, lambda p: not isinstance(p, generated.Tensor) or p.name.startswith(inside))
    assert assert_is_definition(output, written, "int8", only=some) == 4
    assert [len(layer) for layer in open_container(output).layers.values()] == [180, 180]
