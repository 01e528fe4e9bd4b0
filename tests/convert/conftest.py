"""Fixtures of tests that convert; a file with a source of another kind has its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.checkpoints import T_LAYERS
from kits.containers import contents
from kits.conversions import run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two layers in two shards."""
    return T_LAYERS.write(tmp_path / "source", shards=2)


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed conversion gives."""
    run(source, tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")
