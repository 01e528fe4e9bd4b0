"""JSON from files: whatever has no limit in Python's reader has one here, and each refusal is one short sentence."""

from __future__ import annotations

import json
import time

import pytest

from pagestone.formats.errors import DataError
from pagestone.formats.safetensors_header import parse_header
from pagestone.formats.strict_json import MAX_DEPTH, MAX_DIGITS, Config, brief, load_object, loads, whole, wholes

REFUSED = {
    "no JSON": (b"{", "property name"),
    "no UTF-8": (b'{"a": "\xff"}', "UTF-8 at byte 7"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "UTF-8"),
    "an integer beyond Python's own limit": (b"9" * 5000, "5000 digits"),
    "an integer one digit too long": (b"1" * (MAX_DIGITS + 1), f"at most {MAX_DIGITS}"),
    "a negative one": (b"-" + b"1" * MAX_DIGITS, f"at most {MAX_DIGITS}"),
    "a float without end": (b"0." + b"1" * MAX_DIGITS, f"at most {MAX_DIGITS}"),
    "a float beyond float64": (b"1e999", "beyond float64"),
    "NaN": (b"[NaN]", "NaN"),
    "Infinity": (b"[-Infinity]", "Infinity"),
    "a key that stands twice": (b'{"a": {"b": 1, "b": 1}}', "'b' stands twice"),
    "one level too deep": (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"deeper than {MAX_DEPTH}"),
    "objects too deep": (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), f"deeper than {MAX_DEPTH}"),
    "deeper than the stack": (b"[" * 100_000, f"deeper than {MAX_DEPTH}"),
    "half a surrogate pair": (b'["\\ud800"]', "surrogate"),
    "half a surrogate pair in a key": (b'{"\\uDFFF": 1}', "surrogate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    raw, word = REFUSED[case]
    with pytest.raises(ValueError, match=word) as caught:
        loads(raw)
    assert len(str(caught.value)) < 200 and type(caught.value) is not UnicodeDecodeError


def test_taken():
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    for raw in (deep, b"1" * MAX_DIGITS, b"[1e308, -0.0, 5e-324]", '{"é": "\\ud83d\\ude00"}'.encode(), b'"\\\\ud8"'):
        assert loads(raw) == json.loads(raw)
    assert loads(b'{"a": 1, "a": [Infinity]}', twice=True, constants=True) == {"a": [float("inf")]}
    assert loads(b"1000000000000000019884624838656") == int(1e30)  # what tokenizers call without limit


def test_no_more_than_so_many(tmp_path):
    """Lists within lists take fifty times their text: files of a few megabytes are bounded by what they hold."""
    assert loads(b'[[], {"a": []}]', most=4) == [[], {"a": []}]
    with pytest.raises(ValueError, match="more than 3 objects and lists"):
        loads(b'[[], {"a": []}]', most=3)
    (tmp_path / "x.json").write_bytes(b'{"a": [[]]}')
    with pytest.raises(DataError, match="more than 2"):
        load_object(tmp_path / "x.json", code="E0407", remedy="r", most=2)


def test_an_object_from_a_file(tmp_path):
    """The error names the file and carries the code and the remedy of the caller."""
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": 1}')
    assert load_object(path, code="E0407", remedy="r") == {"a": 1}
    for raw in (b"[" + b"1," * 10**5 + b"1]", b"{", b'"' + b"x" * 10**5 + b'"'):
        path.write_bytes(raw)
        with pytest.raises(DataError) as caught:
            load_object(path, code="E0407", remedy="r")
        error = caught.value
        assert (error.code, error.file, error.remedy) == ("E0407", str(path), "r") and len(error.message) < 200
    with pytest.raises(FileNotFoundError):
        load_object(tmp_path / "none", code="E0407", remedy="r")


MARKED = (b"\xef\xbb\xbf{}", "{}".encode("utf-16"), "\ufeff{}".encode("utf-16-be"))


@pytest.mark.parametrize("raw", MARKED)
def test_a_mark_of_its_encoding(tmp_path, raw):
    """Some editors save a text so. Nothing is to be downloaded then, and the text itself may be right."""
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        load_object(path, code="E0407", remedy="r")
    assert caught.value.remedy == "save it as UTF-8 without a byte order mark" and caught.value.file == str(path)
    path.write_bytes(b"\x80{}")
    with pytest.raises(DataError) as caught:
        load_object(path, code="E0407", remedy="r")
    assert caught.value.remedy == "r", "bytes that no editor writes"


def test_brief_is_brief():
    for value in ([2**62] * 10**5, "x" * 10**6, {str(n): [n] * 9 for n in range(999)}, 10**4000, [10**5000], 10**5000):
        assert len(brief(value)) < 500
    assert brief([2, 3]) == "[2, 3]" and brief("a") == "'a'" and brief(None) == "None"


# -- integers of a config ----------------------------------------------------------------------------------------------

NO_INTEGERS = ("1", 1.0, True, [1], {"n": 1}, -1, 10, 10**99)


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_no_integer(value):
    for read in (lambda t: whole(t, "n", 0, 9), lambda t: wholes({"n": [1, t["n"]]}, "n", 0, 9)):
        with pytest.raises(DataError, match=r"n: .*0 to 9 expected, found") as caught:
            read({"n": value})
        assert caught.value.code == "E0213" and caught.value.file == "config.json" and caught.value.remedy
    with pytest.raises(DataError, match="list of integers"):
        wholes({"n": 1}, "n")


def test_integers(tmp_path):
    assert [whole({"n": v}, "n", 0, 9) for v in (0, 9, None)] == [0, 9, None] and whole({}, "n") is None
    assert wholes({"n": [0, 9]}, "n", 0, 9) == [0, 9] and wholes({"n": None}, "n") == wholes({}, "n") == []
    with pytest.raises(DataError) as caught:
        whole(Config({"n": "1"}, tmp_path / "config.json"), "n")
    assert caught.value.file == str(tmp_path / "config.json")


# -- headers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [[2**62] * 300, [2**62] * 200_000, [2**31] * 200_000, [2] * 200_000, [3] * 4000],
    ids=lambda s: f"{len(s)} x {s[0]}",
)
def test_a_product_without_end(shape):
    """A shape whose product has thousands of digits is refused at once, in one line."""
    raw = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}).encode()
    begin = time.process_time()
    with pytest.raises(DataError, match="more than any file holds") as caught:
        parse_header(raw, 8 + len(raw) + 8, "x")
    assert caught.value.code == "E0210" and len(str(caught.value)) < 500 and time.process_time() - begin < 1


def test_many_sides_of_one_are_a_shape():
    raw = json.dumps({"a": {"dtype": "F32", "shape": [1] * 5000 + [2], "data_offsets": [0, 8]}}).encode()
    assert parse_header(raw, 8 + len(raw) + 8, "x").entries[0].nbytes == 8
    raw = json.dumps({"a": {"dtype": "F32", "shape": [2**62] * 5000 + [0], "data_offsets": [0, 0]}}).encode()
    assert parse_header(raw, 8 + len(raw), "x").entries[0].nbytes == 0


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (ENTRY | {"shape": [-1] * 200_000}, "E0208"),
        (ENTRY | {"data_offsets": [0] * 200_000}, "E0209"),
        (ENTRY | {"dtype": "F" * 200_000}, "E0207"),
        (ENTRY | {"data_offsets": [10**99, 10**99 + 1]}, "E0210"),
    ],
)
def test_refusals_stay_one_line(entry, code):
    raw = json.dumps({"a": entry}).encode()
    with pytest.raises(DataError) as caught:
        parse_header(raw, 8 + len(raw) + 8, "x")
    assert caught.value.code == code and len(str(caught.value)) < 600
