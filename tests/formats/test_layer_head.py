"""A layer file's header as it is made, and recognised, without an entry being made one by one."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from pagestone.formats import encodings, layer_file
from pagestone.formats.errors import DataError, LayoutError
from pagestone.formats.layer_file import LayerHeader, read_layer_file
from pagestone.formats.layout import PAGE, ExpertShape, layer_entries, record_layout
from pagestone.formats.safetensors_header import build_header

FILES = {
    "int8": LayerHeader(encodings.get("int8"), "layers", 3, "model.layers.3.mlp.experts", ExpertShape(16, 7), 12),
    "biases": LayerHeader(encodings.get("bf16"), "mtp", 0, "m.experts", ExpertShape(23, 9, "F32"), 2),
    "fp8": LayerHeader(encodings.get("fp8"), "layers", 0, "m", ExpertShape(192, 160, "BF16"), 3, ("w1", "w3", "w2")),
    "q3": LayerHeader(encodings.get("q3"), "layers", 0, "m.e", ExpertShape(128, 64), 101),
    "odd names": LayerHeader(  # what JSON escapes, and what a template would take for its own
        encodings.get("int8"),
        "layers",
        10,
        '100%d {0} "a\\b" \u00e9\u4e2d\t',
        ExpertShape(8, 8),
        2,
        ("%s", "{}", "'\""),
    ),
}


def write(root: Path, file: LayerHeader, head: bytes | None = None) -> Path:
    """The layer file with records of zeros; nothing here reads them."""
    path = root / "layer.safetensors"
    whole = file.head() if head is None else head
    with path.open("wb") as handle:
        handle.write(whole)
        handle.truncate(len(whole) + file.count * file.layout().stride)
    return path


def outcome(path: Path) -> object:
    """What reading gives, or the words of its refusal."""
    try:
        return read_layer_file(path)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("name", FILES)
def test_a_head_is_the_header_of_its_entries(name: str) -> None:
    """Made in pieces, it is to the byte what the entries, made one by one, give."""
    file = FILES[name]
    entries = list(layer_entries(record_layout(file.codec, file.shape), file.count, file.prefix, file.part_names))
    assert file.head() == build_header(entries, file.metadata(), PAGE)
    with pytest.raises(LayoutError, match=f"{len(entries)} tensors take {len(file.head()) - 8}"):
        file.head(limit=len(file.head()) - 9)


@pytest.mark.parametrize("name", FILES)
def test_a_head_of_ours_is_not_parsed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bytes need no parser."""
    path = write(tmp_path, FILES[name])
    wanted = read_layer_file(path)
    monkeypatch.setattr(layer_file, "_expected", lambda *_: None)
    assert read_layer_file(path) == wanted and wanted[0] == FILES[name]
    monkeypatch.undo()

    def forbidden(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(layer_file, "parse_header", forbidden)
    assert read_layer_file(path) == wanted


def test_what_differs_is_told_as_without_the_short_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit of a header flipped, bytes put in and taken out: the short way takes nothing a parser would refuse."""
    file, rng = FILES["int8"], random.Random(1)
    head = file.head()
    text = head.rstrip(b" ")
    cases = [(at, text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :])
             for at in rng.sample(range(len(text)), 250) for bit in (rng.randrange(8),)]  # fmt: skip
    cases += [
        (at, text[:at] + word + text[at:]) for at in rng.sample(range(8, len(text)), 100) for word in (b" ", b"0")
    ]
    cases += [(at, text[:at] + text[at + 1 :]) for at in rng.sample(range(8, len(text)), 100)]
    cases += [(0, text + b"\t"), (0, text + b" \0"), (0, text + b"}")]
    real, taken = layer_file._expected, 0
    for at, changed in cases:
        path = write(tmp_path, file, changed.ljust(len(head)))
        have = outcome(path)
        taken += not isinstance(have, str)
        monkeypatch.setattr(layer_file, "_expected", lambda *_: None)
        assert outcome(path) == have, (at, changed[max(0, at - 20) : at + 20])
        monkeypatch.setattr(layer_file, "_expected", real)
    assert 0 < taken < len(cases) // 2  # spaces and other writers' words stay what they were: accepted


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"m.e', '"\\ud800.e', "E0204"),  # half a surrogate pair: no UTF-8
        ('"format":"pt"', '"format":"pt","more":"x"', None),  # a key of others means nothing
        ('"pagestone.experts":"101"', '"pagestone.experts":"999999999999"', "E0227"),
        ('"pagestone.hidden":"128"', '"pagestone.hidden":"999999999968"', "E0221"),
        ('"pagestone.layer":"0"', '"pagestone.layer":0', "E0205"),
        ('"pagestone.codec":"q3"', '"pagestone.codec":"q2"', "E0221"),
        # two faults: what is no safetensors file is told first
        ('"pagestone.codec":"q3"', '"format":"pt","pagestone.codec":"q2"', "E0204"),
        ('{"format":"pt"', '{"format":' + "[" * 40000 + '"pt"', "E0204"),
    ],
)
def test_metadata_of_strangers(old: str, new: str, words: str | None, tmp_path: Path) -> None:
    """What the short way cannot judge goes the strict way, and costs no more than it."""
    file = FILES["q3"]
    head = file.head()
    text = head[8:].replace(old.encode(), new.encode()).rstrip(b" ")
    text += b" " * (-(8 + len(text)) % PAGE)
    path = write(tmp_path, file, len(text).to_bytes(8, "little") + text)
    begun = time.process_time()
    have = outcome(path)
    assert time.process_time() - begun < 2
    assert (words in have) if words else have[0] == file


def test_a_promise_of_any_length_is_compared_piece_by_piece(tmp_path: Path) -> None:
    """A count and a prefix that promise gigabytes of header, in a file long enough for the records."""
    prefix = "p" * 40_000
    file = LayerHeader(encodings.get("int8"), "layers", 0, prefix, ExpertShape(1, 1), 1_000_000)
    text = b'{"__metadata__":' + json.dumps(file.metadata(), separators=(",", ":")).encode() + b"}"
    text += b" " * (-(8 + len(text)) % PAGE)
    path = tmp_path / "layer.safetensors"
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + file.count * record_layout(file.codec, file.shape).stride)
    begun = time.process_time()
    assert "E0212" in outcome(path)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("spaces", "data", "code"), [(8, 0, "E0225"), (PAGE, 0, None), (0, -1, "E0212"), (0, 1, "E0212")]
)
def test_where_the_data_begin_and_end(spaces: int, data: int, code: str | None, tmp_path: Path) -> None:
    """The short way takes one number of spaces and one length of the file; a page of spaces more is read too."""
    file = FILES["int8"]
    head = file.head()
    head = (len(head) - 8 + spaces).to_bytes(8, "little") + head[8:] + b" " * spaces
    path = write(tmp_path, file, head)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size + data)
    have = outcome(path)
    assert (code in have) if code else have[1].data_start == len(head)


def test_a_sidecar_is_no_layer_file(tmp_path: Path) -> None:
    path = tmp_path / "x.rowsum.safetensors"
    path.write_bytes(FILES["int8"].sidecar_head() + bytes(12 * 4 * 30))
    assert "E0220" in outcome(path)


def test_opening_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 256 experts takes less than a third of what its parser takes (it was a seventh where it was made)."""
    file = LayerHeader(encodings.get("int8"), "layers", 3, "model.layers.3.mlp.experts", ExpertShape(2048, 512), 256)
    path = write(tmp_path, file)

    def least() -> float:
        taken = []
        for _ in range(7):
            begun = time.process_time()
            read_layer_file(path)
            taken.append(time.process_time() - begun)
        return min(taken)

    short = least()
    monkeypatch.setattr(layer_file, "_expected", lambda *_: None)
    assert short < least() / 3
