"""Encodings: how one matrix is stored. An encoding is one module here; its file name need not be listed anywhere.

A module defines `ENCODINGS`, a tuple of classes. `get` makes one that we write, a codec, by name and parameters.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from pagestone.formats.encodings.contracts import (
    Codec,
    ConfigFacts,
    EncodeStats,
    Layout,
    Multiplying,
    Option,
    Reading,
    Stored,
    Telling,
    Writing,
)
from pagestone.formats.errors import RequestError

__all__ = [
    "Codec", "ConfigFacts", "EncodeStats", "Layout", "Multiplying", "Option", "Reading", "Stored", "Telling", "Writing",
    "get", "registry",
]  # fmt: skip


@cache
def registry() -> dict[str, type[Codec]]:
    """Every codec class by name, found by walking this folder in order of file names."""
    found: dict[str, type[Codec]] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for cls in getattr(importlib.import_module(f"{__name__}.{module}"), "ENCODINGS", ()):
            if cls.name in found:
                raise ValueError(f"two codecs are called {cls.name}")
            found[cls.name] = cls
    return found


def get(name: str, parameters: Mapping[str, int | str] | None = None) -> Codec:
    """The codec called `name` with its parameters (defaults for those left out).

    Raises `RequestError` for an unknown codec or parameter.
    """
    cls = registry().get(name)
    if cls is None:
        raise RequestError(
            f"codec expected to be one of {', '.join(sorted(registry()))}, found {name!r}",
            code="E0101",
            remedy="use a version of pagestone that knows this codec",
        )
    try:
        return cls(**dict(parameters or {}))
    except (TypeError, ValueError) as error:
        message = f"codec {name}: parameters {dict(parameters or {})!r} not understood: {error}"
        raise RequestError(message, code="E0102", remedy="use a version of pagestone that knows them") from None
