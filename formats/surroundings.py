"""What numbers depend on: the machine, the versions, the instruction set. Benchmarks and audits state them alike."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats import native

CPUINFO = Path("/proc/cpuinfo")


def cpu() -> str:
    """The CPU's model and a digest of its features, because libraries choose their kernels by them."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return platform.processor() or "unknown"
    pairs = (line.partition(":") for line in text.splitlines())
    facts = {key.strip(): value.strip() for key, colon, value in pairs if colon}
    flags = " ".join(sorted(facts.get("flags", facts.get("Features", "")).split()))
    return f"{facts.get('model name', platform.processor())} ({hashlib.sha256(flags.encode()).hexdigest()[:8]})"


def machine() -> dict[str, Any]:
    """What results may depend on: CPU, architecture and system, as the audits compare them."""
    return {"cpu": cpu(), "architecture": platform.machine(), "system": platform.system()}


def measured_on() -> dict[str, Any]:
    """What times depend on: `machine`, its size and its load (of the last minute), versions, the instruction set."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine() | {
        "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(), "python": platform.python_version(), "numpy": np.__version__, "isa": native.isa(),
    }  # fmt: skip
