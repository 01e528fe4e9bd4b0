"""Libraries that are not ours and that results are compared with: optional for users, required where asked for."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def oracle(name: str) -> ModuleType:
    """The module `name`. Without it the test (or file) is skipped, or fails if PAGESTONE_ORACLES is set."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("PAGESTONE_ORACLES"):
            pytest.fail(f"PAGESTONE_ORACLES is set and {name} cannot be imported: {error}")
        pytest.skip(f"{name} is not installed", allow_module_level=True)
