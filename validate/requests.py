"""What a comparison was asked, looked at before anything is loaded: a run of hours must not end at a misspelt path."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pagestone.formats.errors import RequestError
from pagestone.reader import host
from pagestone.reader.budget import largest_record, parse_size
from pagestone.reader.cache import check_budget
from pagestone.reader.container import Container, open_to_run


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


def runnable(directory: Path, experts: str, io: str, modes: tuple[str, ...], budget: int | str | None) -> Container:
    """The container to be run, and whether its experts can be read so: codec, layers, `io`, `budget`.

    Raises `RequestError`: E0331, E1215, E1222 to E1225, E1240, E1241, E1244.
    """
    host.require()
    host.check_experts(experts)
    if io not in modes:
        raise RequestError(
            f"--io expected to be one of {', '.join(modes)}, found {io!r}", code="E1240", remedy="choose one"
        )
    if budget is not None and io != "direct":
        raise RequestError(
            f"--budget bounds reads into a cache, and --io {io} has none", code="E1240", remedy="use --io direct"
        )
    container = open_to_run(directory)
    host.check_runnable(container)
    room = parse_size(budget) if isinstance(budget, str) else budget
    if room is not None:
        check_budget(room, largest_record(container))
    return container
