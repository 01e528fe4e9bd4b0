"""The native kernels, or their absence: the only importer of `pagestone.formats._kernels`.

`PAGESTONE_ISA` chooses: `numpy` for the definitions in plain NumPy, `scalar`, `avx2` or `avx512` for the kernels of
that instruction set. Unset is the best this CPU can run. Results are the same bit for bit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagestone.formats.dtypes import Array, to_f32
from pagestone.formats.errors import NonFiniteError, RequestError
from pagestone.formats.stats import value_text

try:
    # This spelling and no other: a module that was not built is then told from one that cannot be loaded.
    import pagestone.formats._kernels as _kernels

    _missing = ""
except ImportError as error:
    _kernels = None  # type: ignore[assignment]
    _missing = "not built" if isinstance(error, ModuleNotFoundError) else f"not to be loaded ({error})"

VARIABLE = "PAGESTONE_ISA"
NUMPY = "numpy"
WORDS = (NUMPY, "scalar", "avx2", "avx512")

_lock = threading.Lock()
_current: str | None = None
"""The choice in force, None until the environment was read."""


def built() -> bool:
    """Whether the native kernels were built and could be loaded."""
    return _kernels is not None


def slow_note() -> str | None:
    """One line for who is about to wait for the definition without having asked for it; None if there is no need."""
    if built() or os.environ.get(VARIABLE):
        return None
    return (
        f"the native kernels are {_missing}: the same bytes come from NumPy, many times slower; to have them, install "
        f"a C++ compiler and then pagestone again ({VARIABLE}={NUMPY} asks for NumPy and says nothing)"
    )


def available() -> tuple[str, ...]:
    """What can be chosen on this machine: `numpy` and the instruction sets that were built and run here, best last."""
    return (NUMPY, *(_kernels.isas() if built() else ()))


def isa() -> str:
    """The choice in force, one of `available()`. Reads the environment at first use; raises `RequestError` then."""
    current = _current
    return force(os.environ.get(VARIABLE)) if current is None else current


def force(word: str | None) -> str:
    """Choose for the whole process, `None` or "" being the best available; returns what is in force then.

    Raises `RequestError`, changing nothing, for an unknown word or one this machine cannot run.
    """
    global _current
    can = available()
    word = word or can[-1]
    if word not in WORDS:
        raise RequestError(
            f"{VARIABLE} expected to be one of {', '.join(WORDS)}, found {word!r}",
            code="E0111",
            remedy=f"unset {VARIABLE}, or choose one of {', '.join(can)}",
        )
    if word not in can:
        why = "this CPU does not have it" if built() else "the native kernels are not built"
        raise RequestError(
            f"{VARIABLE}={word} cannot be used: {why}",
            code="E0112",
            remedy=f"unset {VARIABLE}, or choose one of {', '.join(can)}",
        )
    with _lock:
        if word != NUMPY:
            _kernels.set_isa(word)
        _current = word
    return word


@contextmanager
def forced(word: str | None) -> Iterator[str]:
    """`force` within a `with` statement, for tests; what was in force before comes back at its end."""
    before = isa()
    try:
        yield force(word)
    finally:
        force(before)


def kernel(name: str | None) -> Callable[..., Any] | None:
    """The native kernel called `name` for the choice in force, or None where the definition is to be used."""
    if name is None or isa() == NUMPY:
        return None
    found: Callable[..., Any] | None = getattr(_kernels, name, None)
    return found


def raise_non_finite(source: Array, dtype: str, count: int, first_flat_index: int) -> None:
    """Raise `NonFiniteError` for what a kernel found in `source` [R, C] holding `dtype`.

    `first_flat_index` is row * C + column of the first of `count` elements.
    """
    row, column = divmod(int(first_flat_index), source.shape[1])
    value = to_f32(source[row : row + 1, column : column + 1], dtype)
    raise NonFiniteError(int(count), row, column, value_text(float(value[0, 0])))
