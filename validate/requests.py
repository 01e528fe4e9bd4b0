"""What a comparison was asked, looked at before anything is loaded: a run of hours must not end at a misspelt path."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pagestone.formats.errors import RequestError
from pagestone.formats.strict_json import loads
from pagestone.reader import inputs

Item = TypeVar("Item")


def number(name: str, value: int | None, least: int, most: int) -> None:
    """Refuse (E1314) what is no integer from `least` to `most`; None is a number that was not given."""
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise RequestError(
            f"{name} from {least} to {most} expected, found {value!r}", code="E1314", remedy=f"correct {name}"
        )


def output(path: Path) -> None:
    """Refuse (E1313) a file that could not be written: no such directory, a directory, no permission, no room."""
    problem = None
    if path.is_dir():
        problem = "it is a directory"
    elif not path.parent.is_dir():
        problem = f"{path.parent} is no directory"
    else:
        try:
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(bytes(4096))
            if path.exists():
                path.open("ab").close()
        except OSError as error:
            problem = error.strerror or str(error)
    if problem is not None:
        raise RequestError(
            f"a file that can be written expected: {problem}", code="E1313", file=path, remedy="give another path"
        )


def mode(io: str, modes: tuple[str, ...]) -> None:
    """Refuse (E1240) a way of reading experts that is none of `modes`."""
    if io not in modes:
        raise RequestError(
            f"--io expected to be one of {', '.join(modes)}, found {io!r}", code="E1240", remedy="choose one"
        )


# -- files of JSON lines -----------------------------------------------------------------------------------------------


def json_lines(
    path: Path, limit: int | None, parse: Callable[[Any], Item], *, code: str, forms: str, example: str
) -> list[Item]:
    """What `parse` makes of the first `limit` lines (None: all), each a JSON value.

    `RequestError` with `code` for a line of which it makes nothing (`ValueError`, `KeyError` or `TypeError`), and for a
    file without one; `forms` says what a line may be, `example` is one that is read.
    """
    remedy = f"write one JSON object a line, such as {example}"
    found: list[Item] = []
    for number, line in inputs.file_lines(path):
        try:
            found.append(parse(loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            said = f"; {error}" if type(error) is ValueError else ""
            message = f"line {number}: {forms} expected, found {line[:60]!r}{said}"
            raise RequestError(message, code=code, file=path, remedy=remedy) from None
        if len(found) == limit:
            break
    if not found:
        raise RequestError("a line at least expected, found none", code=code, file=path, remedy=remedy)
    return found


def text(value: Any) -> str:
    """A text that is one, and not blank; `ValueError` for anything else."""
    if type(value) is not str or not value.strip():
        raise ValueError(f"a text expected, found {value!r:.40}")
    return value


def label(value: Any) -> str:
    """A text, or an integer that some files write as such; `ValueError` for anything else."""
    return str(value) if type(value) is int else text(value)
