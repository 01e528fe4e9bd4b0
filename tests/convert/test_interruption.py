"""Ctrl-C while a conversion runs: once, twice, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from kits.checkpoints import T_ORDER
from kits.cli import pagestone
from kits.containers import contents
from kits.conversions import run

from pagestone.convert.publish import JOURNAL, PARTIAL

STUCK = """
import sys, time
import numpy as np
from pagestone.convert import pipeline
from pagestone.formats import encodings
encode, calls = pipeline.encode_expert, []
codec, big = encodings.get("int8"), np.zeros((1024, 2048), "<u2")
out = codec.allocate(*big.shape)

def stuck(*words):
    calls.append(1)
    if len(calls) == 16:
        print("stuck", file=sys.stderr, flush=True)
        while True:
            codec.encode(big, "BF16", out)
    return encode(*words)

def close(files):
    print("unwound", file=sys.stderr, flush=True)

pipeline.SourceFiles.close = close

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # while Python is taken down: whoever comes back from a kernel now aborts the process

sys.modules["late"] = Late()
pipeline.encode_expert = stuck
from pagestone.cli import main
main()
"""
"""The command line, in which a worker stays in its sixteenth expert for ever, in and out of a kernel."""


@pytest.fixture
def source(tmp_path) -> Path:
    return T_ORDER.having(layers=3, mtp=False).write(tmp_path / "s")


def started(source: Path, output: Path, **how) -> subprocess.Popen:
    words = ["prepare-int8", source, "-o", output, "--workers", "1"]
    command = [sys.executable, "-c", STUCK, *map(os.fspath, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)
    assert process.stderr.readline() == "stuck\n"
    return process


@pytest.mark.timeout(120)
def test_second_interruption_does_not_wait(source, tmp_path):
    """The first Ctrl-C waits for workers; a second one leaves at once with code 130, and nothing finished is lost."""
    output = tmp_path / "o"
    process = started(source, output)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)  # it waits for the worker
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and out == "", (process.returncode, err)
    assert "unwound" not in err, "files were closed under a worker that still writes"
    assert "finished layers are kept" in err and "same command" in err and "Traceback" not in err, err
    lines = (output / PARTIAL / JOURNAL).read_text()
    assert '"layers-00.safetensors"' in lines
    kept = (output / PARTIAL / "layers-00.safetensors").stat().st_ino
    assert pagestone("prepare-int8", source, "-o", output).returncode == 0
    run(source, tmp_path / "undisturbed")
    assert contents(output) == contents(tmp_path / "undisturbed")
    assert (output / "layers-00.safetensors").stat().st_ino == kept


@pytest.mark.timeout(120)
def test_interruptions_after_the_end_began(source, tmp_path):
    """Any number of Ctrl-C more changes nothing, also where nobody reads what we say any more."""
    process = started(source, tmp_path / "o")
    process.stderr.close()
    process.stdout.close()
    try:
        for _ in range(2000):
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.01)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()


@pytest.mark.timeout(120)
def test_deaf_on_purpose(source, tmp_path):
    """Started with Ctrl-C ignored (nohup, or in the background of a shell) it stays ignored."""
    process = started(source, tmp_path / "o", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    try:
        for _ in range(3):
            process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
    finally:
        process.kill()
        process.communicate()
