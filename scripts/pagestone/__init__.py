"""pagestone: Mixture-of-Experts checkpoints as page-aligned containers whose experts are used straight from disk."""

from __future__ import annotations

__version__ = "0.1.0"
