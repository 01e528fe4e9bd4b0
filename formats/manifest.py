"""manifest.json and experts.parquet: what a container holds, and the digest of every file (specs/manifest.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagestone.formats.digests import canonical_json, container_id, digest
from pagestone.formats.errors import DataError
from pagestone.formats.layer_file import SPEC_VERSION

MANIFEST = "manifest.json"
EXPERTS = "experts.parquet"
NOT_IN_ID = (MANIFEST, EXPERTS)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Length in bytes and XXH3-128 of one file; SHA-256 (32 bytes) only if it was asked for."""

    nbytes: int
    xxh3: bytes
    sha256: bytes | None = None


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One layer as the manifest lists it, so that a reader knows what to open without opening it."""

    file: str
    block: str
    layer: int
    experts: int
    sidecar: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of manifest.json.

    `partial` is (first, end) of the decoder layers of a container made with --layers, else None; `source` holds facts
    about where the weights came from (family, fingerprint, element types), none of them a path or a time.
    """

    codec: str
    parameters: Mapping[str, int | str]
    lossless: bool
    partial: tuple[int, int] | None
    source: Mapping[str, Any]
    layers: tuple[LayerEntry, ...]
    files: Mapping[str, FileDigest] = field(default_factory=dict)

    @property
    def container_id(self) -> str:
        """Identity of the contents, 32 hexadecimal digits; see `digests.container_id`."""
        files = {name: f.xxh3 for name, f in self.files.items() if name not in NOT_IN_ID}
        return container_id(files, self.codec, self.parameters, SPEC_VERSION).hex()

    def to_bytes(self) -> bytes:
        """The bytes of manifest.json: canonical JSON that carries its own digest."""
        table: dict[str, Any] = {
            "pagestone": {"spec_version": SPEC_VERSION},
            "codec": {"name": self.codec, "parameters": dict(self.parameters)},
            "lossless": self.lossless,
            "partial": None if self.partial is None else list(self.partial),
            "source": dict(self.source),
            "layers": [
                {"file": e.file, "block": e.block, "layer": e.layer, "experts": e.experts, "sidecar": e.sidecar}
                for e in self.layers
            ],
            "files": {
                name: {"bytes": f.nbytes, "xxh3_128": f.xxh3.hex()} | ({"sha256": f.sha256.hex()} if f.sha256 else {})
                for name, f in self.files.items()
            },
            "container_id": self.container_id,
        }
        table["digest"] = digest(canonical_json(table)).hex()
        return canonical_json(table)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest at `path` (the file itself), checked against its own digest and its container id.

    Raises `DataError` (E03xx) if it is no manifest, is damaged, or is of a version this code does not know.
    """
    file = Path(path)
    raw = file.read_bytes()
    remedy = "restore manifest.json from where the container came from, or convert again"

    def fail(message: str, code: str) -> DataError:
        return DataError(message, code=code, file=file, remedy=remedy)

    try:
        table = json.loads(raw)
        version = table["pagestone"]["spec_version"]
    except (ValueError, KeyError, TypeError):
        raise fail("a pagestone manifest expected, found something else", "E0301") from None
    if version != SPEC_VERSION:
        raise DataError(
            f"spec version {SPEC_VERSION} expected, found {version!r}",
            code="E0302",
            file=file,
            remedy="use a version of pagestone that knows it, or convert again",
        )
    try:
        recorded = table.pop("digest")
        actual = digest(canonical_json(table)).hex()
        if recorded != actual:
            raise fail(f"its own digest expected {recorded}, found {actual}", "E0303")
        manifest = Manifest(
            codec=table["codec"]["name"],
            parameters=table["codec"]["parameters"],
            lossless=table["lossless"],
            partial=None if table["partial"] is None else (table["partial"][0], table["partial"][1]),
            source=table["source"],
            layers=tuple(LayerEntry(**e) for e in table["layers"]),
            files={
                name: FileDigest(f["bytes"], bytes.fromhex(f["xxh3_128"]), bytes.fromhex(f.get("sha256", "")) or None)
                for name, f in table["files"].items()
            },
        )
        stated = table["container_id"]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise fail(f"a field is missing or of another type: {error!r}", "E0304") from None
    for name in manifest.files:
        if not name or name != Path(name).name or name in (".", ".."):
            raise fail(f"a plain file name expected, found {name!r}", "E0306")
    if manifest.container_id != stated:
        raise fail(f"container id {stated} stated, the files listed give {manifest.container_id}", "E0305")
    return manifest


# -- experts.parquet -------------------------------------------------------------------------------------------------

COLUMNS = (
    ("file", "string"),
    ("block", "string"),
    ("layer", "int32"),
    ("expert", "int32"),
    ("part", "string"),
    ("tensor", "string"),
    ("rows", "int32"),
    ("columns", "int32"),
    ("record_offset", "int64"),
    ("record_bytes", "int64"),
    ("record_xxh3_128", "string"),
    ("codes_offset", "int64"),
    ("codes_bytes", "int64"),
    ("scales_offset", "int64"),
    ("scales_bytes", "int64"),
    ("squared_error", "float64"),
    ("squared_norm", "float64"),
)
"""Columns of experts.parquet: a row a matrix. Offsets are absolute in `file`, in bytes; scales null if none."""


def write_experts(path: str | os.PathLike[str], columns: Mapping[str, Sequence[Any]]) -> None:
    """Write experts.parquet from equally long columns (see `COLUMNS`)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(name, getattr(pa, kind)()) for name, kind in COLUMNS])
    table = pa.table({name: pa.array(columns[name], schema.field(name).type) for name, _ in COLUMNS}, schema=schema)
    pq.write_table(table, os.fspath(path), compression="zstd", version="2.6", store_schema=False)


def read_experts(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """The columns of experts.parquet as lists; raises `DataError` if it is damaged or lacks a column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    remedy = "restore experts.parquet, or convert again"
    try:
        table = pq.read_table(os.fspath(path)).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"a Parquet file expected: {error}", code="E0311", file=path, remedy=remedy) from None
    for name, _ in COLUMNS:
        if name not in table:
            raise DataError(f"column {name} expected, found none", code="E0312", file=path, remedy=remedy)
    return dict(table)
