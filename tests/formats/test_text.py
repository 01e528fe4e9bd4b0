"""Foreign text on a terminal: one line of printable characters, whatever a name holds."""

from __future__ import annotations

import re
import sys
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.text import clipped, natural, shown, shown_lines, size_text
from pagestone.validate.findings import ERROR, Finding, of_error

EVIL = "a\nerror: forged\r\x1b[2J\x7f\x9b31m\u202e\u2066\u200f\u2028\ud800.weight"
SAFE = r"a\nerror: forged\r\x1b[2J\x7f\u009b31m\u202e\u2066\u200f\u2028\ud800.weight"


def test_every_character_of_unicode():
    """Nothing that Unicode does not call printable gets through; what it does stays; no two escapes are alike."""
    seen = set()
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        out = shown(character)
        assert out.isprintable() and out
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            assert out.startswith("\\") and out not in seen, hex(code)
            seen.add(out)
        elif unicodedata.category(character) != "Zs":
            assert out == character
    assert shown(" ") == " " and shown("\\") == "\\"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (EVIL, SAFE),
        ("plain é 中文 name.weight", "plain é 中文 name.weight"),
        (b"\x80d\xff\x9b".decode("utf-8", "surrogateescape"), r"\x80d\xff\x9b"),
        ("\t\x00\U000e0001\xa0", r"\t\x00\U000e0001\u00a0"),
        (12, "12"),
    ],
)
def test_shown(text, wanted):
    assert shown(text) == wanted


def test_lines_stay_lines():
    assert shown_lines(["a", "b\nc", 3]) == "a\nb\\nc\n3"


def test_a_megabyte_of_name():
    """Both ends of it are enough, and its length is told."""
    assert clipped("x" * 5000) == "x" * 5000
    text = clipped("a" + "x" * 10**6 + "b")
    assert len(text) < 5000 and text[0] == "a" and text[-1] == "b" and "(1000002 characters)" in text
    error = DataError("m" * 10**6, code="E0101", file="f" * 10**6, tensor="t" * 10**6)
    assert len(str(error)) < 15000 and str(error).endswith("m (E0101)")


@pytest.mark.parametrize("where", ["message", "file", "tensor", "remedy"])
def test_an_error_is_two_lines(where):
    """Message and remedy, wherever the foreign text stands; attributes keep it as it is."""
    parts = {"message": "m", "file": "f", "tensor": "t", "remedy": "r"} | {where: EVIL}
    error = RequestError(parts.pop("message"), code="E0101", **parts)
    lines = str(error).split("\n")
    assert len(lines) == 2 and lines[1].startswith("  what to do: ")
    assert all(line.isprintable() for line in lines) and SAFE in str(error)
    assert getattr(error, where) == EVIL


@pytest.mark.parametrize("where", ["file", "message"])
def test_a_finding_is_one_line(where):
    finding = Finding(ERROR, "E1001", **({"file": "f", "message": "m"} | {where: EVIL}))
    assert finding.text().isprintable() and SAFE in finding.text()
    assert len(Finding(ERROR, "E1001", "f" * 10**6, "m" * 10**6).text()) < 12000


def test_a_finding_keeps_the_name_for_json():
    finding = of_error(DataError("m", code="E0101", file="/x/layers-00.safetensors", tensor=EVIL), "")
    assert finding.message == f"{EVIL}: m" and SAFE in finding.text()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), ((1 << 20) - 1, "1.00 MiB"),
     (3 << 30, "3.00 GiB"), (70 << 40, "70.00 TiB"), (5 << 50, "5120.00 TiB"), (2048.5, "2.00 KiB")],
)  # fmt: skip
def test_a_size_is_binary_and_says_so(nbytes, text):
    assert size_text(nbytes) == text


@given(st.lists(st.text(alphabet="a.0129_é", max_size=45), max_size=12))
@example(["1", "a", "", "a1", "a1b", "a01", "1" * 18, "1" * 19, "1" * 37, "1" * 18 + "x", "2", "10"])
def test_natural_order_is_that_of_words_and_numbers(names: list[str]) -> None:
    """As if each name were taken apart into words and numbers of up to 18 digits, a number before any word."""

    def key(name: str) -> list[tuple[int, int, str]]:
        words = re.split(r"([0-9]{1,18})", name)
        return [(1, 0, w) if n % 2 == 0 else (0, int(w), "") for n, w in enumerate(words) if w]

    assert sorted(names, key=natural) == sorted(names, key=key)
