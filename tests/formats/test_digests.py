"""Digests against values computed from their description, and known XXH3-128 values."""

from __future__ import annotations

import json

import pytest
import xxhash

from pagestone.formats.digests import Hasher, canonical_json, container_id, digest, layer_digest


def test_known_values():
    """XXH3-128 with seed 0, canonical (big-endian) bytes."""
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest(b"abc").hex() == "06b05ab6733a618578af5f94892f3950"


def test_pieces_do_not_matter():
    """A stream's digest is that of its bytes, however they are cut."""
    data = bytes(range(256)) * 40
    hasher = Hasher()
    for start in range(0, len(data), 777):
        hasher.update(memoryview(data)[start : start + 777])
    assert hasher.digest() == digest(data) == digest(memoryview(data)) == digest(bytearray(data))


def test_layer_digest_is_over_digests():
    """A layer's digest: of the head's digest and the record digests, in order."""
    head, records = b"head", [b"one", b"two"]
    by_hand = xxhash.xxh3_128_digest(b"".join(map(xxhash.xxh3_128_digest, [head, *records])))
    assert layer_digest(head, [digest(r) for r in records]) == by_hand
    assert layer_digest(head, [digest(r) for r in reversed(records)]) != by_hand


def test_canonical_json():
    """Sorted keys, no spaces, plain UTF-8, and the same bytes for equal values."""
    assert canonical_json({"b": [1, None, True], "a": "é\n"}) == '{"a":"é\\n","b":[1,null,true]}'.encode()
    assert canonical_json({"z": {"y": 1, "x": 2}}) == canonical_json(json.loads('{"z": {"x": 2, "y": 1}}'))


@pytest.mark.parametrize("value", [1.0, {"a": [0.5]}, {1: "a"}, {"a": {None: 1}}])
def test_canonical_json_refuses(value):
    """Floats and keys that are no text have no canonical form."""
    with pytest.raises(TypeError):
        canonical_json(value)


FILES = {"b.safetensors": digest(b"b"), "a.json": digest(b"a"), "é": digest(b"e")}


def test_container_id_by_hand():
    """Names in byte order, each with NUL and digest; then codec, parameters and spec version."""
    stream = b"".join(n.encode() + b"\0" + FILES[n] for n in ("a.json", "b.safetensors", "é"))
    stream += b'{"codec":"fp8","parameters":{"block":128},"spec_version":"1"}'
    assert container_id(FILES, "fp8", {"block": 128}, "1") == xxhash.xxh3_128_digest(stream)


def test_container_id_depends_on_everything():
    """One changed digest, name, codec, parameter or version gives another id; the order of the files does not."""
    same = container_id(dict(reversed(FILES.items())), "fp8", {"block": 128}, "1")
    others = [
        container_id(FILES | {"a.json": digest(b"c")}, "fp8", {"block": 128}, "1"),
        container_id({k + "x": v for k, v in FILES.items()}, "fp8", {"block": 128}, "1"),
        container_id(FILES, "int8", {"block": 128}, "1"),
        container_id(FILES, "fp8", {"block": 64}, "1"),
        container_id(FILES, "fp8", {"block": 128}, "2"),
    ]
    assert same == container_id(FILES, "fp8", {"block": 128}, "1")
    assert len({same, *others}) == 6
