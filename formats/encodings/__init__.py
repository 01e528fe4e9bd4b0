"""Encodings: how one matrix is stored, of what is read and of what is written.

An encoding is one module here; its file name need not be listed anywhere. A module defines `ENCODINGS`, a tuple of
classes. `get` makes one that we write, a codec, by name and parameters; `claim` says which one a matrix of a checkpoint
is stored in.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from pagestone.formats.encodings.contracts import (
    Candidate,
    Claim,
    Codec,
    ConfigFacts,
    EncodeStats,
    Layout,
    Multiplying,
    Option,
    Problem,
    Reading,
    Refusal,
    Stored,
    Telling,
    Tensor,
    Writing,
)
from pagestone.formats.errors import RequestError
from pagestone.formats.layout import CODES

__all__ = [
    "Candidate", "Claim", "Codec", "ConfigFacts", "EncodeStats", "Layout", "Multiplying", "Option", "Problem",
    "Reading", "Refusal", "Stored", "Telling", "Tensor", "Writing",
    "claim", "codes_dtypes", "codes_suffixes", "companion_suffixes", "every", "get", "read_names", "registered",
    "registry", "suffixes",
]  # fmt: skip

_added: list[type[Reading]] = []
"""Classes that `registered` adds, after those of this folder."""


@cache
def _found() -> tuple[type[Reading], ...]:
    """The classes of this folder, in order of file names."""
    modules = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return tuple(
        cls for name in modules for cls in getattr(importlib.import_module(f"{__name__}.{name}"), "ENCODINGS", ())
    )


def every() -> tuple[type[Reading], ...]:
    """Every encoding, read or written."""
    return (*_found(), *_added)


def registry() -> dict[str, type[Codec]]:
    """Every encoding that we write, by name."""
    codecs: dict[str, type[Codec]] = {}
    for cls in every():
        if issubclass(cls, Codec):
            if cls.name in codecs:
                raise ValueError(f"two codecs are called {cls.name}")
            codecs[cls.name] = cls
    return codecs


@contextmanager
def registered(*classes: type[Reading]) -> Iterator[None]:
    """Within a `with` statement these encodings are known too: for extensions, and for tests."""
    _added.extend(classes)
    try:
        yield
    finally:
        del _added[-len(classes) :]


def suffixes() -> frozenset[str]:
    """Everything that tensors of a matrix may be called below it."""
    return frozenset(s for cls in every() for names in cls.spellings.values() for s in names)


def codes_suffixes() -> tuple[str, ...]:
    """What the tensor with the codes may be called, each name once, the usual one first."""
    return tuple(dict.fromkeys(["weight", *(s for cls in every() for s in cls.spellings.get(CODES, ()))]))


def companion_suffixes() -> tuple[str, ...]:
    """What tensors may be called that mean nothing without their codes; a plain "scale" may be a parameter."""
    return tuple(
        s for cls in every() for role, names in cls.spellings.items() for s in names
        if role != CODES and s.startswith("weight_")
    )  # fmt: skip


def codes_dtypes(*, plain: bool) -> tuple[str, ...]:
    """Element types of codes that are numbers themselves, or of those that mean nothing alone."""
    return tuple(dict.fromkeys(d for cls in every() if (cls.plain is not None) == plain for d in cls.codes_dtypes))


def read_names() -> str:
    """The encodings that checkpoints may be in, for messages: "bf16, f16, ..., or int8"."""
    *names, last = dict.fromkeys(cls.name for cls in every() if cls.spellings)
    return f"{', '.join(names)} or {last}"


def claim(candidate: Candidate) -> Claim | Refusal:
    """The encoding that a matrix of a checkpoint is stored in, or why it is none that can be read.

    A claim need not use every tensor of the candidate: what is left over is for the caller to judge. Raises
    `RequestError` (E0530) if two encodings claim the same matrix.
    """
    answers = [answer for cls in every() if (answer := cls.claims(candidate)) is not None]
    claims = [answer for answer in answers if isinstance(answer, Claim)]
    if len(claims) > 1:
        raise RequestError(
            f"one encoding of {', '.join(sorted(candidate.tensors))} expected, found "
            f"{' and '.join(c.encoding.name for c in claims)}",
            code="E0530",
            remedy="mend the encodings: what one claims, no other may",
        )
    if answers:
        return (claims or answers)[0]
    codes = next((s for s in codes_suffixes() if s in candidate.tensors), min(candidate.tensors))
    known = ", ".join((*codes_dtypes(plain=True), *codes_dtypes(plain=False)))
    return Refusal("E0514", codes, f"weights in {known} expected, found {candidate.tensors[codes].dtype}")


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
