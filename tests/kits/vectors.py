"""The golden vectors, and the script that makes them as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors"


def generator() -> ModuleType:
    """scripts/make_vectors.py, loaded once."""
    if "make_vectors" not in sys.modules:
        spec = importlib.util.spec_from_file_location("make_vectors", ROOT / "scripts" / "make_vectors.py")
        assert spec is not None and spec.loader is not None
        sys.modules["make_vectors"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["make_vectors"])
    return sys.modules["make_vectors"]
