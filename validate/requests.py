"""What a comparison was asked, looked at before anything is loaded: a run of hours must not end at a misspelt path."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pagestone.formats.errors import RequestError


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
