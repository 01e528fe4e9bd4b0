"""JSON from files, read strictly: what Python's reader takes without a limit has one here.

Every file is foreign, our own journal too. Numbers are bounded before they are made, nesting after, and whatever is
refused is one short `ValueError`; the caller knows the file and the code. `whole` is the one way to an integer.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import reprlib
from collections.abc import Mapping
from typing import Any

from pagestone.formats.errors import DataError
from pagestone.formats.storage import AnyPlace, place_of

MAX_DIGITS = 100
"""Characters of a number. A float64 needs 25; the longest integer that is met in the wild is 10^30."""
MAX_DEPTH = 64
"""Levels of objects and lists. Those of real files stay below ten."""
MAX_NODES = 100_000
"""The most objects and lists of a config or a manifest, brackets within texts counted: many times what there is."""
MAX_LAYERS = 10_000
"""The most layers a config may state: fifty times what there is, and few enough to count through."""
MAX_COUNT = 1_000_000_000
"""The most a config may state of anything else that is counted: experts, rows, columns, tokens."""

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 6
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class NotPlainUtf8(ValueError):
    """A text that is in another encoding than UTF-8, or has a mark of its encoding before it: an editor's doing."""


WITHOUT_MARK = "save it as UTF-8 without a byte order mark"
"""What to do about either."""


def brief(value: Any) -> str:
    """`repr` of a value that was read, cut so that a message stays one line whatever stood in the file."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def loads(raw: bytes | str, *, twice: bool = False, constants: bool = False, most: int | None = None) -> Any:
    """The value of a JSON text in UTF-8, of `most` objects and lists at most: nested ones take fifty times their text.

    `twice` takes an object with a key that stands twice, the last one counting, as other readers do; `constants` takes
    NaN and Infinity. Only files that other programs wrote for other programs need either.

    Raises `ValueError`, its text short, for anything that is no JSON, for a number of more than `MAX_DIGITS` characters
    or beyond float64, for nesting beyond `MAX_DEPTH`, and for half a surrogate pair, which no UTF-8 can hold; its kind
    `NotPlainUtf8` for a byte order mark, also that of UTF-16: editors write them.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        if text.startswith("\ufeff"):
            raise NotPlainUtf8("found a byte order mark before it")
        if most is not None and text.count("[") + text.count("{") > most:
            raise ValueError(f"more than {most} objects and lists")
        value = json.loads(
            text,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=float if constants else _no_constant,
            object_pairs_hook=None if twice else _once,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        kind = NotPlainUtf8 if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ValueError
        raise kind(f"no UTF-8 at byte {error.start}") from None
    _check_depth(value)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair in a text") from None
    return value


def remedy_for(error: Exception, otherwise: str) -> str:
    """What to do about a text that `loads` refused."""
    return WITHOUT_MARK if isinstance(error, NotPlainUtf8) else otherwise


def load_object(
    path: AnyPlace,
    *,
    code: str,
    remedy: str,
    twice: bool = False,
    constants: bool = False,
    most: int | None = None,
) -> dict[str, Any]:
    """The JSON object that is a whole file, by `loads`; `DataError` with `code` and `remedy` if it is anything else.

    `OSError` passes through.
    """
    file = place_of(path)
    raw = file.read_bytes()
    try:
        value = loads(raw, twice=twice, constants=constants, most=most)
    except ValueError as error:
        remedy = remedy_for(error, remedy)
        raise DataError(f"JSON expected: {error}", code=code, file=file, remedy=remedy) from None
    if not isinstance(value, dict):
        raise DataError(f"a JSON object expected, found {brief(value)}", code=code, file=file, remedy=remedy)
    return value


class Config(dict[str, Any]):
    """A table of config.json that knows its file, so that whoever reads a field of it can name both."""

    def __init__(self, table: Mapping[str, Any], file: str | os.PathLike[str] = "config.json") -> None:
        super().__init__(table)
        self.file = file


def whole(table: Mapping[str, Any], field: str, least: int = 0, most: int = MAX_COUNT) -> int | None:
    """The integer a config states in `field`, or None if the field is absent or null.

    Raises `DataError` (E0213) naming file and field for a value that is no integer ("1", 1.0, true, [1]) or is not
    within `least` to `most`.
    """
    value = table.get(field)
    if value is None or (type(value) is int and least <= value <= most):
        return value
    raise not_whole(table, field, f"an integer from {least} to {most}", value)


def wholes(table: Mapping[str, Any], field: str, least: int = 0, most: int = MAX_COUNT) -> list[int]:
    """The list of integers a config states in `field`, empty if the field is absent or null; `DataError` as `whole`."""
    value = table.get(field)
    if value is None:
        return []
    if isinstance(value, list) and all(type(v) is int and least <= v <= most for v in value):
        return value
    raise not_whole(table, field, f"a list of integers from {least} to {most}", value)


def not_whole(table: Mapping[str, Any], field: str, expected: str, found: Any) -> DataError:
    """The error of a field of a config that does not hold the integers it must."""
    file = getattr(table, "file", "config.json")
    remedy = f"correct {field} in config.json, or download the file again"
    return DataError(f"{field}: {expected} expected, found {brief(found)}", code="E0213", file=file, remedy=remedy)


def _integer(word: str) -> int:
    if len(word) > MAX_DIGITS:
        raise ValueError(f"a number of {len(word)} digits, at most {MAX_DIGITS} expected")
    return int(word)


def _float(word: str) -> float:
    if len(word) > MAX_DIGITS:
        raise ValueError(f"a number of {len(word)} characters, at most {MAX_DIGITS} expected")
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is beyond float64")
    return value


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {brief(key)} stands twice")
            seen.add(key)
    return table


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [c for c in level if isinstance(c, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        level = [m for c in level for m in (c.values() if isinstance(c, dict) else c)]
