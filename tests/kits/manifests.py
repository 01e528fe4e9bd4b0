"""A manifest without files, altered manifests that are sealed again, and what reading one says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagestone.convert.checkpoint import CONFIG, INDEX
from pagestone.formats.digests import canonical_json, digest
from pagestone.formats.errors import DataError
from pagestone.formats.manifest import MANIFEST, RECORDS, FileDigest, LayerEntry, Manifest, read_manifest

LAYER = LayerEntry("layers-00.safetensors", "layers", 0, 4, "layers-00.rowsum.safetensors")
MTP = LayerEntry("mtp-00.safetensors", "mtp", 0, 4, None)
FILES = {
    "config.json": FileDigest(2, digest(b"{}")),
    "layers-00.safetensors": FileDigest(1 << 33, digest(b"1")),
    "layers-00.rowsum.safetensors": FileDigest(5, digest(b"2"), bytes(32)),
    "mtp-00.safetensors": FileDigest(1 << 20, digest(b"3")),
    "experts.parquet": FileDigest(7, digest(b"4")),
    RECORDS: FileDigest(16 * 8, digest(b"5")),
}


def made(**changes) -> Manifest:
    """A manifest of two layers, changed so."""
    given = {
        "codec": "int8", "parameters": {}, "lossless": False, "partial": None, "source": {"family": "é"},
        "layers": (LAYER, MTP), "files": FILES,
    } | changes  # fmt: skip
    return Manifest(**given)


def refusal(path) -> DataError:
    """What `read_manifest` raises."""
    with pytest.raises(DataError) as caught:
        read_manifest(path)
    assert caught.value.file == str(path) and caught.value.remedy
    return caught.value


def resealed(table: dict) -> bytes:
    """The bytes of a manifest whose own digest is right again after a change."""
    table = {k: v for k, v in table.items() if k != "digest"}
    return canonical_json(table | {"digest": digest(canonical_json(table)).hex()})


def sealed(root: Path, **changes) -> None:
    """Make the manifest of a container say what its files of dense tensors, index and config are now, and `changes`."""
    manifest = read_manifest(root / MANIFEST)
    files = dict(manifest.files)
    for name in files:
        if name.startswith(("dense-", "matrices-")) or name in (CONFIG, INDEX):
            raw = (root / name).read_bytes()
            files[name] = FileDigest(len(raw), digest(raw))
    (root / MANIFEST).write_bytes(replace(manifest, files=files, **changes).to_bytes())
