"""Damage: small changes to bytes, to JSON documents and to safetensors headers, chosen by a source of randomness.

`random.Random(seed)` makes a case that its seed repeats; hypothesis gives a source that shrinks what it found.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 127, 128, 255, 4095, 4096, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62,
    2**63 - 1, 2**63, 2**64, -(2**63), 10**8, 10**18, 10**30, 1.0, 0.0, -0.5, 1e300, 5e-324, "", "0", "1", "1.0", "x",
    "../x", "/etc/passwd", ".", "config.json", "model.safetensors", "manifest.json", "BF16", "F32", "I8", "F8_E4M3",
    "layers", "mtp", [], [[]], {}, [0], [1, 2], [-1, 0], ["a"], [None], [[], {}], {"a": 1}, {"": {}}, "é" * 40,
    "\x00", "\x1b[31m", "a\nb", "\u202e", "\u009b", "x" * 5000, [2**62] * 300, [1] * 3000, list(range(70)),
)  # fmt: skip
RAW: tuple[str, ...] = (
    "9" * 5000, "-" + "9" * 300, "1e999", "-1e400", "1e-999", "NaN", "Infinity", "-Infinity", "1.0", "-0", "1E2",
    "0." + "1" * 2000, "[" * 70 + "]" * 70, "[" * 900 + "]" * 900, "[" * 5000, '{"a":' * 100 + "1" + "}" * 100,
    '"\\ud800"', '"\\udfff\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', "", "'x'", "01", "1.", "[1,]", "nul", "/**/1",
    '"' + "x" * 200_000 + '"', "[" + "4611686018427387904," * 20_000 + "1]", '{"a":1,"a":2}', '"\t"',
)  # fmt: skip
"""Texts that take the place of a value: no value of Python's gives them."""
_TWICE = "\x01twice"


def pick(random: Random, items: Sequence[Any]) -> Any:
    return items[random.randrange(len(items))]


# -- bytes -------------------------------------------------------------------------------------------------------------

BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\0" * 8,
    b"\xff" * 8,
    b"{",
    b"}",
    b'"',
    b"\n",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
)


def damaged(random: Random, data: bytes) -> bytes:
    """`data` with one to four changes: bits, bytes, spans that are cut, doubled, moved, emptied."""
    raw = bytearray(data)
    for _ in range(1 + random.randrange(4)):
        at = random.randrange(len(raw) + 1)
        span = pick(random, (1, 2, 4, 8, 16, 100, 4096))
        kind = random.randrange(9)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(raw):
            raw[at] = random.randrange(256)
        elif kind == 2:
            raw[at:at] = pick(random, BYTES)
        elif kind == 3:
            del raw[at : at + span]
        elif kind == 4:
            raw[at:at] = raw[at : at + span]
        elif kind == 5:
            del raw[at:]
        elif kind == 6:
            raw[at : at + span] = bytes(len(raw[at : at + span]))
        elif kind == 7:
            piece = raw[at : at + span]
            there = random.randrange(len(raw) + 1)
            raw[there : there + len(piece)] = piece
        else:
            raw[at : at + 8] = struct.pack("<Q", pick(random, (0, 1, 2**31, 2**32, 2**63, 2**64 - 1, len(raw))))
    return bytes(raw)


# -- JSON --------------------------------------------------------------------------------------------------------------


class _Document:
    """A JSON document under change; places are (container, key or index)."""

    def __init__(self, random: Random, value: Any) -> None:
        self.random, self.top, self.raw = random, [copy.deepcopy(value)], list[str]()

    def place(self) -> tuple[Any, Any]:
        """Somewhere in the document, the top included; all depths are likely."""
        inside, key = self.top, 0
        while isinstance(inside[key], dict | list) and inside[key] and self.random.randrange(4):
            inside = inside[key]
            key = pick(self.random, list(inside) if isinstance(inside, dict) else range(len(inside)))
        return inside, key

    def marked(self, text: str) -> str:
        """A string that `text` takes the place of when the document is written."""
        self.raw.append(text)
        return f"@@raw {len(self.raw) - 1}@@"

    def change(self) -> None:
        kinds = (self._replace, self._replace, self._near, self._near, self._other, self._remove, self._key, self._wrap)
        pick(self.random, kinds)(*self.place())

    def _replace(self, inside: Any, key: Any) -> None:
        if self.random.randrange(6):
            inside[key] = copy.deepcopy(pick(self.random, VALUES))
        else:
            inside[key] = self.marked(pick(self.random, RAW))

    def _near(self, inside: Any, key: Any) -> None:
        value = inside[key]
        if type(value) is int:
            inside[key] = pick(
                self.random, (value + 1, value - 1, -value, value * 2, value // 2, str(value), float(value), [value])
            )
        elif isinstance(value, str) and value:
            at = self.random.randrange(len(value))
            inside[key] = pick(self.random, (
                value[:at], value + value, value[at:], value[:at] + "\x00" + value[at:], value.upper(),
                value.encode().hex(), value[:at] + chr(33 + self.random.randrange(94)) + value[at + 1 :],
            ))  # fmt: skip
        elif isinstance(value, list) and value:
            inside[key] = pick(self.random, (value[:-1], value + value, value[::-1], value[:1], {"0": value}))
        elif isinstance(value, dict):
            inside[key] = pick(self.random, (list(value.values()), list(value), dict(list(value.items())[::-1])))
        else:
            self._replace(inside, key)

    def _other(self, inside: Any, key: Any) -> None:
        there, name = self.place()
        inside[key] = copy.deepcopy(there[name])

    def _remove(self, inside: Any, key: Any) -> None:
        if inside is not self.top:
            del inside[key]

    def _key(self, inside: Any, key: Any) -> None:
        if not isinstance(inside, dict):
            inside.append(copy.deepcopy(inside[key]))
            return
        kind = self.random.randrange(3)
        if kind == 0:
            inside[key + _TWICE] = copy.deepcopy(pick(self.random, (inside[key], 1, {}, "x")))
        elif kind == 1:
            inside[pick(self.random, (key + "x", key[:-1], "", key.upper(), "x\n\x1b[31m", "../" + key))] = inside.pop(
                key
            )
        else:
            inside[pick(self.random, ("a", "", "__metadata__", "text_config", "x" * 300))] = pick(self.random, VALUES)

    def _wrap(self, inside: Any, key: Any) -> None:
        inside[key] = pick(self.random, ([inside[key]], {"a": inside[key]}, [inside[key]] * 2))

    def text(self, dump: Callable[[Any], str]) -> bytes:
        text = dump(self.top[0]).replace(json.dumps(_TWICE)[1:-1], "")
        for number, raw in enumerate(self.raw):
            text = text.replace(f'"@@raw {number}@@"', raw)
        return text.encode("utf-8", "surrogatepass")


def damaged_json(random: Random, data: bytes, dump: Callable[[Any], str] = json.dumps) -> bytes:
    """A JSON document with one to three changes to what it says; now and then to its bytes."""
    if random.randrange(16) == 0:
        return damaged(random, data)
    document = _Document(random, json.loads(data))
    for _ in range(1 + random.randrange(3)):
        document.change()
    return document.text(dump)


def damaged_lines(random: Random, data: bytes) -> bytes:
    """JSON lines with a line changed, left out, doubled, moved or cut."""
    lines = data.splitlines()
    kind, at = random.randrange(6), random.randrange(len(lines))
    if kind == 0:
        return damaged(random, data)
    if kind == 1:
        del lines[at]
    elif kind == 2:
        lines.insert(random.randrange(len(lines) + 1), lines[at])
    elif kind == 3:
        lines[at] = lines[at][: random.randrange(len(lines[at]) + 1)]
    else:
        lines[at] = damaged_json(random, lines[at])
    return b"\n".join(lines) + pick(random, (b"\n", b"\n", b"", b"\n\n", b"\r\n"))


# -- safetensors -------------------------------------------------------------------------------------------------------


def split(data: bytes) -> tuple[bytes, bytes]:
    """(header, data) of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def damaged_safetensors(random: Random, data: bytes) -> bytes:
    """A safetensors file whose header says something else, padded to its old length where that is possible.

    Half of the time what `__metadata__` says is changed alone: there stand the promises of a layer file.
    """
    header, rest = split(data)
    if random.randrange(8) == 0:
        return joined(damaged(random, header), rest)
    table = json.loads(header)
    if len(table.get("__metadata__", ())) > 2 and random.randrange(2):
        table["__metadata__"] = json.loads(_damaged_metadata(random, table["__metadata__"]))
        changed = compact(table).encode()
    else:
        changed = damaged_json(random, header, compact)
    if random.randrange(8):
        changed = (
            changed.ljust(len(header)) if len(changed) <= len(header) else changed + b" " * (-(8 + len(changed)) % 4096)
        )
    else:
        rest = damaged(random, rest[:10_000]) + rest[10_000:]
    made = joined(changed, rest)
    return damaged(random, made[:16]) + made[16:] if random.randrange(16) == 0 else made


def _damaged_metadata(random: Random, table: dict[str, str]) -> bytes:
    """Metadata are strings, some of them numbers and some JSON: each is changed as what it is."""
    name = pick(random, list(table))
    text = table[name]
    if text[:1] in ("{", "["):
        changed = damaged_json(random, text.encode()).decode("utf-8", "replace")
    elif text.isdigit():
        changed = pick(
            random,
            (
                str(int(text) + 1),
                str(int(text) * 2),
                "0",
                "-1",
                "1" * 11,
                "9" * 12,
                "9" * 13,
                "9" * 5000,
                "1.0",
                "",
                "٣",
            ),
        )
    else:
        changed = pick(
            random, ("", text + "x", text[:-1], text.upper(), "x" * 3000, "a.b", "\x00", *map(str, VALUES[:40]))
        )
    return json.dumps(table | {name: changed}).encode()


SAME_SIZE = (
    ("BF16", "F16", "I16", "U16"),
    ("F32", "I32", "U32"),
    ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"),
)


def rearranged(random: Random, data: bytes) -> bytes:
    """A sound safetensors file with other tensors: of another type, shape or name, too few, too many, other bits."""
    header, rest = split(data)
    table = json.loads(header)
    table.pop("__metadata__", None)
    tensors = {n: [e["dtype"], e["shape"], rest[slice(*e["data_offsets"])]] for n, e in table.items()}
    for _ in range(1 + random.randrange(3)):
        name, kind = pick(random, list(tensors)), random.randrange(9)
        tensor = tensors[name]
        if kind == 0:
            like = next((group for group in SAME_SIZE if tensor[0] in group), (tensor[0],))
            tensor[0] = pick(random, like)
        elif kind == 1:
            tensor[1] = pick(random, (tensor[1][::-1], [*tensor[1], 1], [1, *tensor[1]], [math.prod(tensor[1])]))
        elif kind == 2 and tensor[1] and tensor[1][0] > 1:
            kept = pick(random, (0, 1, tensor[1][0] - 1))
            tensor[2] = tensor[2][: len(tensor[2]) // tensor[1][0] * kept]
            tensor[1] = [kept, *tensor[1][1:]]
        elif kind == 3:
            tensors[_renamed(random, name)] = tensors.pop(name)
        elif kind == 4:
            tensors[_renamed(random, name)] = list(tensor)
        elif kind == 5 and len(tensors) > 1:
            del tensors[name]
        elif kind == 6:
            other = pick(random, list(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
        elif kind == 7:
            at = random.randrange(len(tensor[2]) + 1)
            odd = pick(random, (b"\xff", b"\x80", b"\x7f", b"\xc0\x7f", b"\x80\x7f", b"\x00\x00"))
            tensor[2] = (tensor[2][:at] + odd + tensor[2][at + len(odd) :])[: len(tensor[2])]
        else:
            tensor[2] = bytes(len(tensor[2]))
    made, position = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        made[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(raw)]}
        position += len(raw)
    return joined(compact(made).encode("utf-8", "surrogatepass"), b"".join(raw for _, _, raw in tensors.values()))


def _renamed(random: Random, name: str) -> str:
    words = name.split(".")
    at = random.randrange(len(words))
    word = words[at]
    words[at] = str(int(word) + pick(random, (1, -1, 10**9))) if word.isdigit() else pick(random, (
        word + "x", word[:-1], "", "weight_scale", "weight_scale_inv", "bias", "experts", "0", "gate_proj", "down_proj",
        "weight_packed", "\x1b[31m", "x" * 3000,
    ))  # fmt: skip
    return ".".join(words)
