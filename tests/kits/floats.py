"""A thread set to take subnormal numbers for zero, as a library built with -ffast-math sets it: without torch."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PLACES = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}
"""Where the control register lies in a `fenv_t`, in bytes, and the bits that flush: results and operands."""


@contextmanager
def flushing() -> Iterator[None]:
    """Within this `with` statement 1e-40 * 1 is 0 in this thread, and in threads that it starts."""
    if platform.machine() not in PLACES:
        pytest.skip(f"how {platform.machine()} flushes is not known here")
    place, bits = PLACES[platform.machine()]
    library, before = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    assert library.fegetenv(before) == 0
    changed = bytearray(before.raw)
    changed[place : place + 4] = (int.from_bytes(before.raw[place : place + 4], "little") | bits).to_bytes(4, "little")
    library.fesetenv(ctypes.create_string_buffer(bytes(changed)))
    try:
        yield
    finally:
        library.fesetenv(before)
