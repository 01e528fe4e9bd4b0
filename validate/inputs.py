"""Files that a request names: texts, prompts, questions. What is wrong with them is known before a model is loaded."""

from __future__ import annotations

from pathlib import Path

from pagestone.formats.errors import RequestError


def read_text(path: Path, option: str) -> str:
    """The UTF-8 text in a file, without a byte order mark.

    Raises `RequestError` (E0008) naming `option` if there is no such file, it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        found = error.strerror or str(error)
    except UnicodeDecodeError as error:
        found = f"a byte {error.object[error.start]:#04x} at {error.start} that is not"
    raise RequestError(f"{option} expected a file in UTF-8, found: {found}", code="E0008", file=path,
                       remedy=f"give {option} a readable text file saved as UTF-8")  # fmt: skip


def read_lines(path: Path, option: str) -> list[tuple[int, str]]:
    """(number from 1, text) of every line that is not blank, stripped; only newlines end one. Raises as `read_text`."""
    lines = ((n, line.strip()) for n, line in enumerate(read_text(path, option).split("\n"), 1))
    return [(n, line) for n, line in lines if line]
