"""Text that a user gives: as an option, in a file, on stdin. All of it is UTF-8; what is not is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagestone.formats.errors import MachineError, RequestError

STDIN = "stdin"
BOM = "\ufeff"


def option(name: str, text: str) -> str:
    """The text of an option, which the system gave as bytes; E1238 unless they were UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # bytes that were no text in the locale's encoding came as lone surrogates
        raise _not_text(name, "bytes that are none", error.start) from None
    return text


def file(path: Path) -> str:
    """The text in a file, without a byte order mark. Raises `RequestError`: E1238 if it is not UTF-8, E1239 if not
    there or no file; `MachineError` (E1203) if it cannot be read."""
    try:
        return decoded(path.read_bytes(), path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise RequestError(
            f"a file of text expected: {error.strerror}", code="E1239", file=path, remedy="give a file that can be read"
        ) from None
    except OSError as error:
        raise MachineError(
            f"reading failed: {error.strerror or error}", code="E1203", file=path, remedy="check the disk and its log"
        ) from None


def file_lines(path: Path) -> list[tuple[int, str]]:
    """(number from 1, text) of every line that is not blank, stripped; only newlines end one. Raises as `file`."""
    lines = ((n, line.strip()) for n, line in enumerate(file(path).split("\n"), 1))
    return [(n, line) for n, line in lines if line]


def stdin() -> str:
    """All of stdin; empty if it is closed."""
    stream = _bytes_of(sys.stdin)
    if stream is None:
        return "" if sys.stdin is None else option(STDIN, sys.stdin.read())
    return decoded(stream.read(), STDIN)


def stdin_lines() -> Iterator[bytes | str]:
    """Lines of stdin as they come, undecoded, so that one bad line can be refused by itself; see `line`."""
    stream = _bytes_of(sys.stdin)
    yield from () if sys.stdin is None else sys.stdin if stream is None else stream


def line(given: bytes | str) -> str:
    """A line of stdin as text, without its end."""
    return (decoded(given, STDIN) if isinstance(given, bytes) else option(STDIN, given)).rstrip("\r\n")


def decoded(raw: bytes, where: str | Path) -> str:
    """`raw` as UTF-8, without a byte order mark; E1238 naming the first byte that is not."""
    try:
        return raw.decode().removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise _not_text(where, f"byte 0x{raw[error.start]:02x}", error.start) from None


def _bytes_of(stream: Any) -> Any:
    return getattr(stream, "buffer", None)


def _not_text(where: str | Path, instead: str, at: int) -> RequestError:
    return RequestError(
        f"text in UTF-8 expected, found {instead} at position {at}",
        code="E1238",
        file=where,
        remedy="convert it first, for example: iconv -f LATIN1 -t UTF-8",
    )
