"""Errors of the programs that use the reader as a library. Each is also the built-in error Python users expect."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pagestone.formats.directories import directory
from pagestone.formats.errors import PagestoneError, RequestError

T = TypeVar("T")


class NoSuchExpertError(RequestError, IndexError):
    """A layer has no expert of this number (E1217). Numbers begin at 0; negative ones do not count from the end."""


class NoSuchLayerError(RequestError, KeyError):
    """There is no layer with routed experts of this number (E1218)."""

    def __str__(self) -> str:  # KeyError's own would show the text quoted
        return self.render()


class IdTypeError(RequestError, TypeError):
    """An expert or a layer is named by something that is no integer (E1219): a truth value, a float, a text."""


class PathTypeError(RequestError, TypeError):
    """A container is named by something that is no path (E1253): None, bytes, a number."""


class ClosedError(PagestoneError, ValueError):
    """A container or a store is used after it was closed (E1270): a fault of the program (exit 1)."""


def whole_number(value: Any, what: str) -> int:
    """`value` as a Python int: any integer, also NumPy's and torch's, but no truth value; else `IdTypeError`."""
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        if truth:
            raise TypeError
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise IdTypeError(
            f"the number of {'an' if what[0] in 'aeiou' else 'a'} {what} as an integer expected, found {_named(value)}",
            code="E1219",
            remedy="give an int, or an integer of NumPy or torch",
        ) from None


def _named(value: Any) -> str:
    return f"{str(value)[:40]!r} ({type(value).__name__})"


def path_of(value: Any) -> Path:
    """`value` as the path of a directory to read; `PathTypeError`, or what `formats.directories.directory` raises."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise PathTypeError(
            f"the path of a container expected, found {_named(value)}",
            code="E1253",
            remedy="give a str or a pathlib.Path",
        )
    return directory(value)


def expert_number(value: Any, count: int, file: Any) -> int:
    """`value` as the number of an expert of a layer of `count`; `IdTypeError` or `NoSuchExpertError`."""
    number = whole_number(value, "expert")
    if not 0 <= number < count:
        raise NoSuchExpertError(
            f"an expert from 0 to {count - 1} expected, found {number}",
            code="E1217",
            file=file,
            remedy="name one of the layer's experts; len(layer) says how many there are",
        )
    return number


def expert_numbers(values: Iterable[Any], count: int, file: Any) -> list[int]:
    """Numbers of experts in ascending order, each once."""
    try:
        each = iter(values)
    except TypeError:
        raise IdTypeError(
            f"several numbers of experts expected, found {_named(values)}", code="E1219", remedy="give a list"
        ) from None
    return sorted({expert_number(value, count, file) for value in each})


def layer_of(layers: Mapping[int, T], value: Any, file: Any = None, block: str = "layers") -> tuple[int, T]:
    """(number, layer) of the layer called `value`; `IdTypeError` or `NoSuchLayerError`."""
    number = whole_number(value, "layer")
    layer = layers.get(number)
    if layer is None:
        there = ", ".join(map(str, sorted(layers))) or "none"
        raise NoSuchLayerError(
            f"a layer of {block} with routed experts expected, found {number}; there are {there}",
            code="E1218",
            file=file,
            remedy="name one of those",
        )
    return number, layer


class Closing:
    """Something that is closed, at the latest by leaving a `with` statement, and cannot be used then."""

    closed = False

    def close(self) -> None:
        """Nothing can be asked of it any more; may be called twice."""
        self.closed = True

    def _check_open(self) -> None:
        """Refuse (E1270) what is closed."""
        if self.closed:
            raise ClosedError(
                f"an open {type(self).__name__} expected, found a closed one",
                code="E1270",
                remedy="open it again; views that were taken before it was closed stay valid",
            )

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
