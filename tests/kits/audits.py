"""Mutants of an audit and its traces, and what becomes of them. Imports no test library, so that `python -O` can."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from pagestone.formats.errors import PagestoneError
from pagestone.validate.recorded import read_audit

HOSTILE = (None, True, -1, 0, 1 << 31, 10**90, 1.5, "", "x", ".", "../audit.json", "/etc/passwd", "f" * 64, "0" * 32,
           "\ud800", "a\x00b", [], {}, [[]], {"": {}})  # fmt: skip
RAW = ("NaN", "-Infinity", "1e400", "9" * 5000, "[" * 50_000, '{"a":' * 50_000, "1" * 101, '"\\ud800"', "\ufeff", "nul")


def unfold(raw: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(raw).read()


def fold(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=9).compress(raw)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything within a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in entries:
        yield (*path, key)
        yield from nodes(member, (*path, key))


def edited(value: Any, draw: random.Random) -> Any:
    """A JSON value with one node replaced by something hostile, dropped, or said twice."""
    value = json.loads(json.dumps(value))
    *way, last = draw.choice(list(nodes(value)))
    parent = value
    for key in way:
        parent = parent[key]
    kind = draw.random()
    if kind < 0.7:
        parent[last] = draw.choice(HOSTILE)
    elif kind < 0.85 or isinstance(parent, dict):
        del parent[last]
    else:
        parent.insert(last, parent[last])
    return value


def flipped(raw: bytes, draw: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(changed))
        if draw.random() < 0.7:
            changed[at] ^= 1 << draw.randrange(8)
        else:
            changed[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
    return bytes(changed)


def spliced(raw: bytes, draw: random.Random) -> bytes:
    """A value of a JSON text replaced by text that is hardly a value."""
    at = draw.choice([n for n, byte in enumerate(raw) if byte == 58])  # a colon
    return raw[: at + 1] + draw.choice(RAW).encode() + raw[raw.find(b",", at) :]


def relined(lines: list[bytes], draw: random.Random) -> list[bytes]:
    """Lines with one changed, dropped, doubled, moved or spliced."""
    lines, at = list(lines), draw.randrange(len(lines))
    change: Callable[[], Any] = draw.choice([
        lambda: lines.__setitem__(at, json.dumps(edited(json.loads(lines[at]), draw)).encode()),
        lambda: lines.pop(at),
        lambda: lines.insert(at, lines[at]),
        lambda: lines.insert(draw.randrange(len(lines)), lines.pop(at)),
        lambda: lines.__setitem__(at, spliced(lines[at], draw)),
        lambda: lines.__setitem__(at, lines[at] + b" " * draw.choice((10, 2000))),
    ])  # fmt: skip
    change()
    return lines


def mutant(audit: bytes, traces: bytes, seed: int) -> tuple[bytes, bytes]:
    """The bytes of an audit and of its traces, one of the two changed."""
    draw = random.Random(seed)
    kind = seed % 6
    if kind == 0:
        return flipped(audit, draw), traces
    if kind == 1:
        return audit, flipped(traces, draw)
    if kind == 2:
        return spliced(audit, draw), traces
    if kind == 3:
        return audit, fold(b"\n".join([*relined(unfold(traces).splitlines(), draw), b""]))
    table = json.loads(audit)
    if kind == 4:  # what is read, not what is only written for people
        known = {k: table[k] for k in ("audit", "version", "result", "container", "prompts", "traces", "trace_lines")}
        return json.dumps(table | edited(known, draw)).encode(), traces
    return json.dumps(edited(table, draw)).encode(), traces


def read(path: Path, layers: dict[int, int], vocabulary: int) -> str:
    """ "read", or the code of the error that a reader of this audit gets."""
    try:
        recorded = read_audit(path)
        recorded.check_ids(vocabulary)
        return f"read {sum(1 for _ in recorded.events(layers))}"
    except PagestoneError as error:
        return error.code


def outcomes(audit: Path, root: Path, layers: dict[int, int], vocabulary: int, seeds: range) -> list[str]:
    """What becomes of the mutants of `audit` and its traces, written below `root`."""
    name = json.loads(audit.read_bytes())["traces"]
    originals = audit.read_bytes(), audit.with_name(name).read_bytes()
    found = []
    for seed in seeds:
        made = mutant(*originals, seed)
        (root / audit.name).write_bytes(made[0])
        (root / name).write_bytes(made[1])
        found.append(read(root / audit.name, layers, vocabulary))
    return found
