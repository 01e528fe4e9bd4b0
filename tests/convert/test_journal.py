"""The journal is foreign: a line is believed only if every field of it is of its own kind, whatever its digest says."""

from __future__ import annotations

import json

import pytest

from pagestone.convert.journal import FinishedFile, from_lines, to_line
from pagestone.formats.digests import digest

ENTRY = FinishedFile(
    "layers-00.safetensors", 4096, "ab" * 16, ("cd" * 16,), ((0.0, 1.5, 0.0, 1.5, 0.0, 1.5),), {"passed": 2}, (1, 2, 3)
)
JOB = b'{"job": 1}\n'


def line(changes: dict) -> bytes:
    table = json.loads(to_line(ENTRY)) | changes
    table.pop("digest")
    return json.dumps(table | {"digest": digest(json.dumps(table, sort_keys=True).encode()).hex()}).encode() + b"\n"


def test_what_was_written_is_read():
    assert from_lines(JOB + to_line(ENTRY)) == ({"job": 1}, [ENTRY]) and line({}) == to_line(ENTRY)


WRONG = [
    {"name": 5}, {"name": ["a"]}, {"nbytes": "4096"}, {"nbytes": 4096.0}, {"nbytes": True}, {"xxh3": "ab"},
    {"xxh3": None}, {"xxh3": "AB" * 16}, {"records": "cd"}, {"records": [1]}, {"records": ["cd" * 15]},
    {"stats": [[1] * 6]}, {"stats": [1.0]}, {"stats": [["0"] * 6]}, {"stats": [[0.0]]},
    {"notes": []}, {"notes": {"a": "1"}}, {"stamp": [1, 2]},
    {"stamp": [1, 2, 3.0]}, {"stamp": {}}, {"stamp": [1, 2, 3, 4]},
]  # fmt: skip


@pytest.mark.parametrize("changes", WRONG, ids=repr)
def test_a_field_of_another_kind(changes):
    with pytest.raises((ValueError, TypeError)):
        from_lines(JOB + line(changes))


@pytest.mark.parametrize(
    "raw",
    [
        b"[]\n",
        b"1\n",
        b'{"a": %s}\n' % (b"9" * 5000),
        b'{"a": ' + b"[" * 5000 + b"\n",
        b'{"a": 1, "a": 2}\n',
        b"\xff\n",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_line_that_is_no_object_of_ours(raw):
    for journal in (raw, JOB + raw):
        with pytest.raises((ValueError, TypeError, KeyError)):
            from_lines(journal)
