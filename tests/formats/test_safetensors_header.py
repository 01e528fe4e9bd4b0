"""The strict header reader: what is damaged is refused by name, what is merely odd is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from kits.checkpoints import Tensor, raw_file, sparse_file, write_safetensors
from safetensors import safe_open
from safetensors.numpy import load_file

from pagestone.formats.errors import DataError
from pagestone.formats.safetensors_header import build_header, parse_header, read_header

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def two(begin: int, end: int) -> dict:
    return {"a": ONE, "b": {"dtype": "F32", "shape": [1], "data_offsets": [begin, end]}}


def refusal(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read_header(path)
    error = caught.value
    assert error.file == str(path) and error.remedy and error.exit_code == 1
    return error


MALFORMED = {
    "hole between tensors": (two(12, 16), 16, "E0211", "b", "hole"),
    "hole at the start": ({"a": {**ONE, "data_offsets": [4, 12]}}, 12, "E0211", "a", "hole"),
    "overlap": (two(4, 8), 8, "E0211", "b", "overlaps"),
    "the same range twice": ({"a": ONE, "b": ONE}, 8, "E0211", "b", "overlaps"),
    "shape larger than the range": ({"a": {**ONE, "shape": [3]}}, 8, "E0210", "a", "12 bytes"),
    "type wider than the range": ({"a": {**ONE, "dtype": "F64"}}, 8, "E0210", "a", "16 bytes"),
    "end before begin": ({"a": {"dtype": "F32", "shape": [0], "data_offsets": [8, 0]}}, 8, "E0210", "a", "span -8"),
    "negative begin": ({"a": {**ONE, "data_offsets": [-8, 0]}}, 0, "E0210", "a", ""),
    "unknown type": ({"a": {**ONE, "dtype": "F31"}}, 8, "E0207", "a", "F31"),
    "type that is no text": ({"a": {**ONE, "dtype": 4}}, 8, "E0207", "a", ""),
    "negative dimensions": ({"a": {**ONE, "shape": [-1, -2]}}, 8, "E0208", "a", ""),
    "dimension that is a float": ({"a": {**ONE, "shape": [2.0]}}, 8, "E0208", "a", ""),
    "dimension that is a truth value": ({"a": {**ONE, "shape": [2, True]}}, 8, "E0208", "a", ""),
    "three offsets": ({"a": {**ONE, "data_offsets": [0, 8, 8]}}, 8, "E0209", "a", ""),
    "offsets that are text": ({"a": {**ONE, "data_offsets": ["0", "8"]}}, 8, "E0209", "a", ""),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "E0206", "a", ""),
    "unknown field": ({"a": {**ONE, "order": "F"}}, 8, "E0206", "a", ""),
    "entry that is no object": ({"a": [1]}, 8, "E0206", "a", ""),
    "metadata that is no text": ({"__metadata__": {"n": 1}, "a": ONE}, 8, "E0205", None, ""),
    "half a byte": ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}}, 0, "E0210", "a", ""),
    "truncated": ({"a": ONE}, 7, "E0212", None, "the file has"),
    "longer than the header says": ({"a": ONE}, 9, "E0212", None, "the file has"),
    "data without tensors": ({}, 5, "E0212", None, ""),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_damaged_table(tmp_path, case):
    """A table that does not cover the data exactly, or says what no table says, is refused naming file and tensor."""
    header, size, code, tensor, word = MALFORMED[case]
    error = refusal(raw_file(tmp_path / "x.safetensors", header, bytes(size)))
    assert (error.code, error.tensor) == (code, tensor) and word in error.message, error


BAD_JSON = {
    "the same name twice": b'{"a":%s,"a":%s}' % ((json.dumps(ONE).encode(),) * 2),
    "the same field twice": b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "NUL padding": json.dumps({"a": ONE}).encode() + b"\0" * 6,
    "two documents": json.dumps({"a": ONE}).encode() + b"{}",
    "no object": b'["a"]',
    "space in front": b" " + json.dumps({"a": ONE}).encode(),
    "not UTF-8": b'{"\xff":' + json.dumps(ONE).encode() + b"}",
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
    "cut short": json.dumps({"a": ONE}).encode()[:-1],
    "nested without end": b'{"a":' + b"[" * 200_000,
    "a number without end": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 5000 + b"]}}",
    "half a surrogate pair": b'{"\\ud800":' + json.dumps(ONE).encode() + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_damaged_json(tmp_path, case):
    """A header that is not the JSON safetensors prescribes is one message, never a traceback of the JSON library."""
    assert refusal(raw_file(tmp_path / "x.safetensors", BAD_JSON[case], bytes(8))).code == "E0204"


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 50, 7])
def test_length_lies(tmp_path, length):
    """A header length beyond the file, or beyond the limit, or that cuts the JSON is refused before it is believed."""
    path = raw_file(tmp_path / "x.safetensors", {}, bytes(6), length=length)
    assert refusal(path).code == ("E0203" if length > 16 else "E0204")


OTHERS = {
    "git-LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "HTML": b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>",
    "HTML page": b"\n  <html><body>Sign in</body></html>",
    "zip": b"PK\x03\x04\x00\x00\x08\x08" + bytes(40),
    "pickle": b"\x80\x02}q\x00X\x06\x00\x00\x00" + bytes(40),
    "GGUF": b"GGUF\x03\x00\x00\x00" + bytes(40),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_of_file(tmp_path, kind):
    """A pointer, a web page or another format named .safetensors is called what it is."""
    (tmp_path / "x.safetensors").write_bytes(OTHERS[kind])
    error = refusal(tmp_path / "x.safetensors")
    assert error.code == "E0201" and kind.split()[0] in error.message.replace("Python pickle", "pickle")


@pytest.mark.parametrize("length", [0x280, 0x480, 0x20, 0x4D0])
def test_lengths_that_look_like_other_formats(tmp_path, length):
    """A header of 640 or 1152 bytes begins like a pickle; it is read all the same."""
    table = {} if length < 100 else {"a": ONE}
    path = raw_file(tmp_path / "x.safetensors", json.dumps(table).encode().ljust(length), bytes(8 * len(table)))
    assert [e.name for e in read_header(path).entries] == list(table)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_too_short_for_a_length(tmp_path, size):
    """A file of fewer than eight bytes is refused with its size."""
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    error = refusal(tmp_path / "x.safetensors")
    assert error.code == "E0202" and f"found {size}" in error.message


@pytest.mark.parametrize("shift", range(8))
def test_any_offset_is_legal(tmp_path, shift):
    """F32 data at an odd place is legal, and found where it is."""
    tensors = {"x": Tensor.of(np.arange(6).reshape(2, 3), "F32"), "y": Tensor.of([1.5], "F16")}
    path = write_safetensors(tmp_path / "x.safetensors", tensors, shift=shift)
    header = read_header(path)
    raw = path.read_bytes()
    assert header.data_start % 8 == shift
    for entry in header.entries:
        assert raw[entry.offset : entry.offset + entry.nbytes] == tensors[entry.name].data


def test_legal_oddities(tmp_path):
    """Tensors without elements, without dimensions, of packed types, and files without tensors are legal."""
    tensors = {
        "scalar": Tensor("F32", (), struct.pack("<f", 3)),
        "none": Tensor("BF16", (0, 7), b""),
        "also none": Tensor("F32", (3, 0), b""),
        "flags": Tensor("BOOL", (3,), b"\1\0\1"),
        "fours": Tensor("F4", (3, 2), b"abc"),
        "é 中 %#\n": Tensor("U8", (1,), b"z"),
    }
    header = read_header(write_safetensors(tmp_path / "x.safetensors", tensors))
    assert {e.name: (e.shape, e.nbytes) for e in header.entries} == {
        n: (t.shape, len(t.data)) for n, t in tensors.items()
    }
    assert read_header(raw_file(tmp_path / "y.safetensors", {})).entries == ()


@pytest.mark.parametrize("size", [99_994, 99_999, 100_000, 1_000_001])
def test_long_headers(tmp_path, size):
    """A header may be longer than 100,000 bytes, where some readers stop."""
    path = raw_file(tmp_path / "x.safetensors", json.dumps({"a": ONE}).encode().ljust(size), bytes(8))
    assert read_header(path).data_start == 8 + size


def test_offsets_beyond_four_gigabytes(tmp_path):
    """Offsets above 2^31 and 2^32 are exact: a 6 GiB file that takes a few KB of disk."""
    path = sparse_file(
        tmp_path / "x.safetensors",
        [("a", "U8", (3 << 30,)), ("b", "F32", (1,)), ("c", "U8", ((3 << 30) - 5,)), ("d", "U8", (1,))],
    )
    header = read_header(path)
    start = header.data_start
    wanted = [start, start + (3 << 30), start + (3 << 30) + 4, start + (6 << 30) - 1]
    assert [e.offset for e in header.entries] == wanted
    assert path.stat().st_size == header.file_size == start + (6 << 30)
    assert path.stat().st_blocks * 512 < 1 << 20


def test_order_is_by_offset(tmp_path):
    """Entries come in order of their place, whatever the order of their names."""
    table = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]},
        "z": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    }
    assert [e.name for e in read_header(raw_file(tmp_path / "x.safetensors", table, b"abc")).entries] == ["z", "a"]


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_build_and_read(tmp_path, alignment):
    """What is built reads back equal, here and in the safetensors library, and its data is aligned."""
    entries = [("b é", "F32", (2, 1), 0, 8), ("a", "U8", (3,), 8, 11)]
    head = build_header(entries, {"format": "pt", "k": "é"}, alignment)
    assert len(head) % alignment == 0
    data = struct.pack("<2f", 1, 2) + b"xyz"
    (tmp_path / "x.safetensors").write_bytes(head + data)
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt", "k": "é"} and header.data_start == len(head)
    assert [(e.name, e.dtype, e.shape, e.offset - len(head)) for e in header.entries] == [e[:4] for e in entries]
    theirs = load_file(tmp_path / "x.safetensors")
    assert theirs["b é"].tolist() == [[1], [2]] and theirs["a"].tobytes() == b"xyz"


def test_tiny_moe_agrees_with_safetensors(tiny):
    """On the trained model's shards our table is the safetensors library's."""
    for shard in sorted(tiny.glob("*.safetensors")):
        with safe_open(shard, "np") as theirs:
            ours = {e.name: list(e.shape) for e in read_header(shard).entries}
            assert ours == {n: theirs.get_slice(n).get_shape() for n in theirs.keys()}  # noqa: SIM118


def test_parse_needs_no_file():
    """The checks work on bytes alone, so that a reader of remote files can use them."""
    assert (
        parse_header(json.dumps({"a": ONE}).encode(), 8 + len(json.dumps({"a": ONE})) + 8, "x").entries[0].nbytes == 8
    )
