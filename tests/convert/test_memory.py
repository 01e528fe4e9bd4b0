"""Peak memory depends on workers and one expert, and little on how many tensors there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from kits import generated
from kits.checkpoints import sparse_model
from kits.conversions import planned

from pagestone.formats import encodings

MIB = 1 << 20
HIDDEN, INTERMEDIATE, EXPERTS = 1024, 512, 20
EXPERT_IN = 3 * HIDDEN * INTERMEDIATE * 2
RECORD_OUT = 3 * HIDDEN * INTERMEDIATE + (64 << 10)


# not ru_maxrss: that of a child begins at the size of the process that started it
PROGRAM = """
import atexit, pathlib, sys
atexit.register(lambda: sys.stderr.write(pathlib.Path("/proc/self/status").read_text()))
from pagestone.cli import main
main()
"""


def peak(source: Path, output: Path, codec: str, workers: int, *more: str) -> int:
    """Peak resident bytes of one conversion in a process of its own."""
    result, most = run(f"prepare-{codec}", source, "-o", output, "--workers", str(workers), "--json", *more)
    assert json.loads(result)["state"] == "converted"
    return most


def run(*words: str | Path) -> tuple[str, int]:
    """What a command prints, and its peak in resident bytes."""
    command = [sys.executable, "-c", PROGRAM, *map(os.fspath, words)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout, int(re.findall(r"VmHWM:\s*(\d+) kB", result.stderr)[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_peak_does_not_grow_with_layers(big_path, codec):
    """Two and six layers of 63 MB peak alike, below 110 MiB + workers x (one expert in + one record out)."""
    peaks = {}
    for layers in (2, 6):
        source = sparse_model(big_path / f"s{layers}", layers=layers, hidden=HIDDEN, intermediate=INTERMEDIATE)
        peaks[layers] = peak(source, big_path / f"o{layers}", codec, 2)
    limit = 110 * MIB + 2 * (EXPERT_IN + RECORD_OUT)
    assert max(peaks.values()) < limit, {n: f"{p / MIB:.1f} MiB" for n, p in peaks.items()}
    assert abs(peaks[6] - peaks[2]) < 4 * MIB, {n: f"{p / MIB:.1f} MiB" for n, p in peaks.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_grows_with_workers_by_one_expert_each(big_path):
    """Six more workers cost at most six experts in, six records out and their stacks."""
    source = sparse_model(big_path / "s", layers=2, hidden=HIDDEN, intermediate=INTERMEDIATE)
    few, many = (peak(source, big_path / f"o{w}", "int8", w) for w in (2, 8))
    assert many - few < 6 * (EXPERT_IN + RECORD_OUT + 2 * MIB), f"{few / MIB:.1f} MiB, {many / MIB:.1f} MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_dense_matrix_is_never_held(big_path):
    """A head of 256 MiB in q8 takes a band of rows, and its scales and biases (8 MiB); verify takes no more."""
    shapes = {"model.embed_tokens.weight": (64, HIDDEN), "lm_head.weight": (1 << 17, HIDDEN)}
    source, small = (
        sparse_model(big_path / name, layers=1, hidden=HIDDEN, intermediate=INTERMEDIATE, experts=2, more=more)
        for name, more in (("s", shapes), ("small", {}))
    )
    roles = 2 * (1 << 17) * (HIDDEN // 64) * 2
    most = peak(source, big_path / "o", "int8", 1, "--dense", "q8")
    assert most - peak(small, big_path / "small-o", "int8", 1, "--dense", "q8") < roles + 12 * MIB, most / MIB
    for words in ((), ("--source", source)):
        text, most = run("verify", big_path / "o", *words)
        assert "1 dense matrices" in text and most < 110 * MIB + roles + 24 * MIB, most / MIB


# -- many names --------------------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "real-checkpoints" / "qwen3.5-25b-reap"
SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 16,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip


GROWTH = {"prepare": 25, "verify": 13, "verify --source": 22}
"""MiB that 22,213 tensors may take beside 2,261. Measured: 21, 8 and 16."""


def many_names(root: Path, layers: int) -> Path:
    """The published checkpoint of 40 layers and 22,213 tensors, or its first layers, with small matrices of zeros."""
    narrow = Path(shutil.copytree(PUBLISHED, root.with_name(root.name + "-published")))
    config = json.loads((narrow / "config.json").read_bytes())
    config.get("text_config", config).update(SMALL)
    (narrow / "config.json").write_text(json.dumps(config))
    source = generated.published(narrow, layers=layers, vocabulary=256)
    source.write(root, lambda part: not isinstance(part, generated.Tensor))
    return root


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """All 40 layers."""
    return many_names(tmp_path_factory.mktemp("names") / "source", 40)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_grows_little_with_tensors(big_path, published):
    """Names and places in memory, but never all rows of a table, nor the library that reads it beside all else."""
    peaks: dict[str, list[float]] = {}
    for layers, source in {4: many_names(big_path / "few", 4), 40: published}.items():
        output = big_path / f"o{layers}"
        peaks.setdefault("prepare", []).append(peak(source, output, "int8", 2) / MIB)
        for name, words in {"verify": (), "verify --source": ("--source", source)}.items():
            text, most = run("verify", output, *words)
            assert f"{layers * 180} experts" in text
            peaks.setdefault(name, []).append(most / MIB)
    table = (big_path / "o40" / "experts.parquet").stat().st_size / MIB
    for name, (few, many) in peaks.items():
        assert many < 128 + table, (name, few, many)
        assert many - few < GROWTH[name], (name, few, many)


def test_a_plan_keeps_little_of_a_tensor(published):
    """Its name, where it lies, and its place in a layer: what thousands have alike is kept once."""
    tracemalloc.start()
    try:
        plan = planned(published, encodings.get("int8"))
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan.rules) == 22_213
    assert kept < 640 * 22_213 and most < 1100 * 22_213, (kept / 22_213, most / 22_213)
