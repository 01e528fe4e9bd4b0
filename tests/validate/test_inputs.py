"""Files that a request names are read, or refused, before a model is loaded."""

from __future__ import annotations

import re

import pytest

from pagestone.formats.errors import RequestError
from pagestone.reader import inputs
from pagestone.reader.budget import parse_size
from pagestone.validate import fidelity, logits


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (None, "No such file.*E1239"),
        (b"good\xff", "0xff at position 4 .E1238"),
        (b"\xff\xfeh\x00i\x00", "0xff at position 0 .E1238"),
        (b"\xed\xa0\x80", "0xed at position 0 .E1238"),
    ],
)
@pytest.mark.parametrize("read", [inputs.file, inputs.file_lines, lambda p: logits.read_ids(p, 10),
                                  lambda p: fidelity.read_questions(p, None)])  # fmt: skip
def test_no_text(tmp_path, data, found, read):
    """Absent, or not UTF-8 (Latin-1, UTF-16, half a surrogate pair): the file is named, and what was found."""
    if data is not None:
        (tmp_path / "x").write_bytes(data)
    with pytest.raises(RequestError, match=rf"x: .*{found}.*\n  what to do: "):
        read(tmp_path / "x")


def test_a_directory_is_no_text(tmp_path):
    with pytest.raises(RequestError, match=r"Is a directory.*E1239"):
        inputs.file(tmp_path)


def test_lines(tmp_path):
    """Byte order mark and carriage returns are no part of the text; only a newline ends a line."""
    (tmp_path / "x").write_bytes("\ufeffone\r\n\r\n  two\u2028\u0085 and\x0b more \nthree".encode())
    assert inputs.file_lines(tmp_path / "x") == [(1, "one"), (3, "two\u2028\u0085 and\x0b more"), (4, "three")]
    (tmp_path / "q").write_text('{"question": "a\u2028b", "answer": "c"}\n', encoding="utf-8")
    assert fidelity.read_questions(tmp_path / "q", None) == [("a\u2028b", "c")]


@pytest.mark.parametrize("word", ["9" * 5000, "9" * 400, "10", "-1", "1.0", "0x1", "²"])
def test_ids_that_are_none(tmp_path, word):
    """A number of thousands of digits is no token id, and a line is named as the editor counts it."""
    (tmp_path / "ids").write_text(f"\n[1, 2]\n3,{word} 4\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"line 3: token ids below 10 expected.*E1305") as error:
        logits.read_ids(tmp_path / "ids", 10)
    assert len(str(error.value)) < 400


def test_ids(tmp_path):
    (tmp_path / "ids").write_text("[1, 2]\n\n3 0009\n", encoding="utf-8")
    assert [(p.name, p.ids) for p in logits.read_ids(tmp_path / "ids", 10)] == [("line 1", (1, 2)), ("line 3", (3, 9))]


def test_no_prompts(tmp_path):
    """E1305 with an example that is read."""
    (tmp_path / "ids").write_text("\n")
    with pytest.raises(RequestError, match=r"found none.*E1305") as error:
        logits.read_ids(tmp_path / "ids", 500)
    example = re.search(r"such as ([\d ]+) for --ids", error.value.remedy or "")
    assert example is not None
    (tmp_path / "ids").write_text(example[1])
    assert [p.ids for p in logits.read_ids(tmp_path / "ids", 500)] == [(12, 7, 401)]


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "9" * 30 + "GiB", "4EiB", "4194304TiB", "0", "0.1", "0.4b",
                                  "1e5", "inf", "nan", "-1", "", "1..5", "0x10", "GiB"])  # fmt: skip
def test_sizes_that_are_none(text):
    """No size, or one that no memory has: E1241, in a line of its own length."""
    with pytest.raises(RequestError, match="E1241") as error:
        parse_size(text, "--memory")
    assert len(str(error.value)) < 250
    remedy = error.value.remedy
    assert remedy is not None and str(error.value).startswith("--memory: a size above 0")
    for example in re.findall(r"--memory (\w+)", remedy):
        assert parse_size(example) == 4 << 30, "what is named as an example is taken"


def test_sizes():
    assert parse_size("4194303TiB") == 4194303 << 40 and parse_size("0.5KiB") == 512 and parse_size("1b") == 1
