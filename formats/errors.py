"""Every error the project raises on purpose, and the one place where its text is shaped.

A message names the file, the tensor, what was expected, what was found and what to do. The class decides the
exit code of the command line: 1 the data is not right, 2 the request is not right, 3 the machine failed.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from pagestone.formats.text import clipped, shown


class PagestoneError(Exception):
    """Base of all errors with a message meant for the user. `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        code: str,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message = message
        self.code = code
        self.file = None if file is None else os.fspath(file)
        self.tensor = tensor
        self.remedy = remedy
        super().__init__(self.render())

    def render(self) -> str:
        """The full text: `file: tensor: message (code)`, then the remedy on its own line; safe for a terminal.

        Names and words of files are in it as `formats.text.shown` writes them; the attributes keep them as they are.
        """
        where = "".join(f"{clipped(part)}: " for part in (self.file, self.tensor) if part)
        text = shown(f"{where}{clipped(self.message)} ({self.code})")
        return f"{text}\n  what to do: {shown(self.remedy)}" if self.remedy else text

    def __reduce__(self) -> tuple[Any, ...]:
        """How to send it to another process: one that cannot be built again there hangs a pool of processes."""
        named: dict[str, Any] = {"code": self.code, "file": self.file, "tensor": self.tensor, "remedy": self.remedy}
        return partial(type(self), self.message, **named), ()


class DataError(PagestoneError):
    """Bytes on disk are not what they must be: a damaged, incomplete or contradictory file (exit 1)."""

    exit_code = 1


class RequestError(PagestoneError):
    """The request cannot be met as stated: a wrong path, family, option or combination (exit 2)."""

    exit_code = 2


class MachineError(PagestoneError):
    """The machine failed: no space, I/O error, no memory, no permission (exit 3)."""

    exit_code = 3


class Interrupted(PagestoneError):
    """The user stopped the work (exit 130, as shells expect after SIGINT)."""

    exit_code = 130


class LayoutError(RequestError):
    """A codec cannot hold a matrix of this shape."""


class NonFiniteError(Exception):
    """Raised by encoders: the matrix holds NaN or Inf (or a value its target type cannot hold); by products, a token.

    They know no file and no name; whoever called one turns this into a `DataError` that does. `rows` is what a row is.
    """

    def __init__(self, count: int, row: int, column: int, value: str, *, rows: str = "row") -> None:
        self.count, self.row, self.column, self.value, self.rows = count, row, column, value, rows
        super().__init__(f"{count} non-finite value(s), first {value} at {rows} {row}, column {column}")

    def __reduce__(self) -> tuple[Any, ...]:
        """As of `PagestoneError`."""
        return partial(type(self), self.count, self.row, self.column, self.value, rows=self.rows), ()
