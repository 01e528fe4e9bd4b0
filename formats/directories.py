"""The directory that a request names, judged before anything is looked for in it: an empty word names none, and an
address names none of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pagestone.formats.errors import RequestError

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/.*", re.DOTALL)
"""`https://host/a`, also as `Path` writes it (`https:/host/a`); no drive of one letter."""


def directory(named: str | os.PathLike[str]) -> Path:
    """The path of a directory to read from, as a command line or a program names it.

    Raises `RequestError`: E0813 for an empty word, as an unset variable gives, which is not the directory one is in;
    E0418 for an address.
    """
    return _of_this_machine(named, "nothing is downloaded here", "download it first, then give the directory it is in")


def output_directory(named: str | os.PathLike[str]) -> Path:
    """The same of a directory to write to, which need not be there yet."""
    return _of_this_machine(named, "nothing is uploaded here", "give a directory, and upload it when it is finished")


def _of_this_machine(named: str | os.PathLike[str], lacking: str, remedy: str) -> Path:
    given = os.fspath(named)
    if not given:
        raise RequestError(
            "the name of a directory expected, found an empty word",
            code="E0813",
            remedy="say which directory; the one you are in is .",
        )
    if ADDRESS.fullmatch(given) and not os.path.lexists(given):
        raise RequestError(
            f"a directory on this machine expected, found an address; {lacking}",
            code="E0418",
            file=given,
            remedy=remedy,
        )
    return Path(given)
