"""Fixtures of all tests, and the rule for optional libraries."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # for `from kits.checkpoints import ...`

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell: children would inherit deafness to the Ctrl-C that some tests send
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = HERE.parent
TINY = HERE / "data" / "tiny-moe"
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The trained model in tests/data."""
    return TINY


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], ModuleType]:
    """`oracle("torch")`: an optional library, see `kits.oracles`."""
    from kits import oracles

    return oracles.oracle


@pytest.fixture(scope="session")
def true_shape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two layers at the shapes of Qwen3.6-35B-A3B with eight experts each (PAGESTONE_SLOW=1: all 256)."""
    root = tmp_path_factory.mktemp("true-shape") / "source"
    from kits.generated import GeneratedCheckpoint

    experts = 256 if os.environ.get("PAGESTONE_SLOW") else 8
    GeneratedCheckpoint(layers=2, experts=experts, vocabulary=256, outliers=True).write(root)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def big_path(tmp_path: Path) -> Iterator[Path]:
    """Like `tmp_path`, but emptied after the test: for files of hundreds of megabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)
