"""Peak memory depends on workers and one expert, and on nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kits.checkpoints import sparse_model

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


def peak(source: Path, output: Path, codec: str, workers: int) -> int:
    """Peak resident bytes of one conversion in a process of its own."""
    words = ["-c", PROGRAM, f"prepare-{codec}", source, "-o", output, "--workers", str(workers), "--json"]
    command = [sys.executable, *map(os.fspath, words)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["state"] == "converted"
    return int(re.findall(r"VmHWM:\s*(\d+) kB", result.stderr)[0]) * 1024


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
