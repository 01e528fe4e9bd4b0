"""XXH3-128 digests (seed 0, canonical big-endian) and what is made of them (specs/manifest.md, "Digests")."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> bytes:
    """The 16 bytes of XXH3-128 of `data`."""
    return xxhash.xxh3_128_digest(data)


def short_digest(data: Buffer) -> int:
    """XXH3-64 of `data`: for what is checked within one run, and stored nowhere."""
    return xxhash.xxh3_64_intdigest(data)


class Hasher:
    """XXH3-128 of a stream of pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._state.update(data)

    def digest(self) -> bytes:
        return self._state.digest()


def layer_digest(head: Buffer, records: Iterable[bytes]) -> bytes:
    """Digest of a layer file: of digest(bytes before the first record) followed by its record digests in order.

    Workers hash records as they write them, in any order; nobody reads the file twice.
    """
    return digest(digest(head) + b"".join(records))


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces, no escapes for non-ASCII, no floats: the same bytes everywhere."""

    def check(item: Any) -> None:
        if isinstance(item, float):
            raise TypeError("canonical JSON holds no floats")
        if isinstance(item, dict):
            for key, member in item.items():
                if not isinstance(key, str):
                    raise TypeError(f"canonical JSON keys are strings, found {key!r}")
                check(member)
        elif isinstance(item, list | tuple):
            for member in item:
                check(member)

    check(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def container_id(
    files: Mapping[str, bytes],
    codec: str,
    parameters: Mapping[str, Any],
    spec_version: str,
    dense: Mapping[str, Any] | None = None,
) -> bytes:
    """The identity of a container's contents (16 bytes).

    Over `name 0x00 digest` of every file but manifest.json and experts.parquet in byte order of names, then codec,
    parameters, spec version and, where dense matrices are encoded, codec and parameters of these (`dense`) as canonical
    JSON. Nothing in it carries a time, a path or a library version.
    """
    hasher = Hasher()
    for name in sorted(files, key=lambda n: n.encode("utf-8")):
        hasher.update(name.encode("utf-8") + b"\0" + files[name])
    identity: dict[str, Any] = {"codec": codec, "parameters": dict(parameters), "spec_version": spec_version}
    if dense is not None:
        identity["dense"] = dict(dense)
    hasher.update(canonical_json(identity))
    return hasher.digest()
