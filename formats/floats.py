"""Plain floats: subnormal numbers kept, whatever the process or thread was set to.

A library built with -ffast-math, or `torch.set_flush_denormal(True)`, makes the processor take subnormal numbers for
zero (on x86 FTZ and DAZ of MXCSR, on Arm FZ of FPCR), a thread at a time and for everybody in it. The kernels set what
they need for each call (`PlainFloats` in kernels/pool.h); here is the same for what is computed in NumPy.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from pagestone.formats.errors import MachineError

P = ParamSpec("P")
R = TypeVar("R")

_NORMAL, _HALF = 2.0**-1022, 0.5
"""The smallest normal float64, and what makes it subnormal; names, because a constant would be folded."""
_ROOM = 256
"""Bytes, and more than a `fenv_t` takes on any machine."""


def kept() -> bool:
    """Whether this thread keeps subnormal numbers, as results and as operands."""
    return _NORMAL * _HALF > 0.0


@contextmanager
def plain_floats() -> Iterator[None]:
    """Subnormal numbers are kept within this `with` statement, in this thread; what was set before comes back.

    Raises `MachineError` (E0113) where they are not kept and the C library has no way to change that.
    """
    if kept():
        yield
        return
    library, before = _c_library(), ctypes.create_string_buffer(_ROOM)
    if library is None or library.fegetenv(before):
        raise _for_good()
    library.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV, in glibc and in musl
    try:
        if not kept():
            raise _for_good()
        yield
    finally:
        library.fesetenv(before)


def _for_good() -> MachineError:
    return MachineError(
        "subnormal numbers expected to be kept, found this thread set to flush them to zero for good",
        code="E0113",
        remedy="unload what sets it: a library built with -ffast-math, or torch.set_flush_denormal",
    )


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run under `plain_floats`. A generator is run to its end before it gives its first value."""
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def collected(*args: P.args, **kwargs: P.kwargs) -> Any:
            with plain_floats():
                return iter([*function(*args, **kwargs)])

        return collected

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with plain_floats():
            return function(*args, **kwargs)

    return guarded


@cache
def _c_library() -> ctypes.PyDLL | None:
    """Where `fegetenv` and `fesetenv` are, called without giving up the GIL: the register belongs to this thread."""
    for name in (None, "libm.so.6"):
        try:
            library = ctypes.PyDLL(name)
            library.fegetenv, library.fesetenv  # noqa: B018 - AttributeError where there are none
        except (OSError, AttributeError):
            continue
        return library
    return None
