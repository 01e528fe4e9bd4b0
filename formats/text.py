"""Text that comes from a file or a path, made safe for a terminal.

A tensor may be called `a\\nerror: b`, a directory `\\x1b[2J`: what is written to a terminal must not move its cursor,
clear it, change its direction of writing or forge a line. JSON output needs none of this, it has escapes of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def shown(value: object) -> str:
    """`value` as one line of visible characters: whatever Unicode does not call printable becomes an escape.

    Controls below U+0080 are `\\x1b`, all others `\\u009b`, `\\u202e`, `\\U000e0001`; a byte of a path that is no UTF-8
    is `\\xff`. Every printable character stays as it is, also the backslash: this is for people, not for parsing.
    """
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def clipped(text: str, most: int = 5000) -> str:
    """`text`, or its two ends where it is longer than `most` characters: a name may be a megabyte."""
    return text if len(text) <= most else f"{text[: most // 2]} ... ({len(text)} characters) ... {text[-(most // 4) :]}"


def shown_lines(lines: Iterable[object]) -> str:
    """Lines of our own making with foreign text in them, each through `shown`, joined by newlines."""
    return "\n".join(map(shown, lines))


def natural(name: str) -> tuple[str | int, ...]:
    """Sort key that orders numbers inside names by value, so that layer 10 comes after layer 2.

    Words and numbers take turns, a word first (perhaps an empty one), so like is compared with like.
    """
    words = re.split(r"([0-9]{1,18})", name)
    return tuple(int(word) if n % 2 else word for n, word in enumerate(words))


def with_parameters(parameters: Mapping[str, object]) -> str:
    """What follows the name of a codec: its parameters in words (`, group size 64`), nothing if it has none."""
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in sorted(parameters.items()))


def size_text(nbytes: int | float) -> str:
    """A length in bytes for people: `512 B`, `1.50 GiB`.

    Binary units, always named as such: what `--budget` takes, what memory and pages come in, and what `du -h` shows.
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(value, 2) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python carries a byte of a path that it could not decode
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return _SHORT.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
