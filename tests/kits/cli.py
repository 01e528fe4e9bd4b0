"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def pagestone(*words: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run `pagestone WORDS...`; stdout and stderr are pipes, so neither is a terminal."""
    command = [sys.executable, "-m", "pagestone", *map(os.fspath, words)]
    return subprocess.run(command, capture_output=True, check=False, **({"encoding": "utf-8"} | how))


def done(*words: str | Path, **how: Any) -> str:
    """Like `pagestone`, for what must succeed; returns stdout."""
    result = pagestone(*words, **how)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(result: subprocess.CompletedProcess[str], exit_code: int, *names: str) -> str:
    """Assert an error as promised: this exit code, one message that has all `names`, a remedy, no traceback.

    Returns stderr.
    """
    text = result.stderr
    assert result.returncode == exit_code, (result.returncode, text)
    assert text.startswith("error: ") and "Traceback" not in text, text
    assert "what to do: " in text, text
    assert result.stdout == "", result.stdout
    for name in names:
        assert name in text, (name, text)
    return text
