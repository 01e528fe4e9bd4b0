"""manifest.json and experts.parquet: what a container holds, and the digest of every file (specs/manifest.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagestone.formats import strict_json
from pagestone.formats.digests import canonical_json, container_id, digest
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import BLOCKS, SPEC_VERSION, layer_file_name, sidecar_name
from pagestone.formats.strict_json import brief

MANIFEST = "manifest.json"
EXPERTS = "experts.parquet"
PARTIAL = ".pagestone-partial"
"""The subfolder of an output in which a conversion works; private to the converter."""
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

    Raises `DataError` (E03xx) if it is no manifest, is damaged, is of a version this code does not know, or is anything
    but the canonical JSON of exactly the fields of `Manifest.to_bytes`.
    """
    file = Path(path)
    raw = file.read_bytes()
    remedy = "restore manifest.json from where the container came from, or convert again"

    def fail(message: str, code: str) -> DataError:
        return DataError(message, code=code, file=file, remedy=remedy)

    try:
        table = strict_json.loads(raw, twice=True)  # what is not canonical is refused below, as such
        version = table["pagestone"]["spec_version"]
    except (ValueError, KeyError, TypeError):
        raise fail("a pagestone manifest expected, found something else", "E0301") from None
    if version != SPEC_VERSION:
        raise DataError(
            f"spec version {SPEC_VERSION} expected, found {brief(version)}",
            code="E0302",
            file=file,
            remedy="use a version of pagestone that knows it, or convert again",
        )
    try:
        recorded = table.pop("digest")
        actual = digest(canonical_json(table)).hex()
        if recorded != actual:
            raise fail(f"its own digest expected {brief(recorded)}, found {actual}", "E0303")
        manifest = _manifest(table)
        stated = table["container_id"]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise fail(f"a field is missing or of another type: {error!r}", "E0304") from None
    for name in manifest.files:
        if not _plain(name):
            raise fail(f"a plain file name expected, found {brief(name)}", "E0306")
    if manifest.container_id != stated:
        raise fail(f"container id {brief(stated)} stated, the files listed give {manifest.container_id}", "E0305")
    problem = _layer_problem(manifest)
    if problem is not None:
        raise fail(problem, "E0308")
    if manifest.to_bytes() != raw:
        raise fail("canonical JSON of exactly the fields specified expected, found other bytes", "E0307")
    return manifest


def no_container(root: Path) -> RequestError:
    """Why the directory `root`, which has no manifest, cannot be opened, and what to do about it."""
    if os.path.lexists(root / PARTIAL / MANIFEST):
        return RequestError(
            "a container expected, found one whose publication was cut short: all of it is here, but not in its place",
            code="E0810",
            file=root,
            remedy="run the same prepare command again: it only moves the files, and does not need the source",
        )
    unfinished = (root / PARTIAL).is_dir()
    found = "an unfinished conversion" if unfinished else "none" if root.is_dir() else "no such directory"
    return RequestError(
        f"a container with {MANIFEST} expected, found {found}",
        code="E0331",
        file=root,
        remedy="run the prepare command again to finish it"
        if unfinished
        else "give the directory that a prepare command made",
    )


def _typed(table: Any, key: str | int, *kinds: type) -> Any:
    """The value of a field; TypeError if it is of none of `kinds` (true and false are no integers)."""
    value = table[key]
    if type(value) not in kinds:
        raise TypeError(f"{key}: {' or '.join(k.__name__ for k in kinds)} expected, found {brief(value)}")
    return value


def _manifest(table: Any) -> Manifest:
    """The fields of a manifest with their types checked; raises TypeError, KeyError or ValueError."""
    codec = _typed(table, "codec", dict)
    parameters = _typed(codec, "parameters", dict)
    for name in parameters:
        _typed(parameters, name, int, str)
    partial = _typed(table, "partial", list, type(None))
    if partial is not None:
        first, end = (_typed(partial, n, int) for n in range(len(partial)))
        if not 0 <= first < end:
            raise ValueError(f"partial: first < end expected, found {brief(partial)}")
        partial = (first, end)
    files: dict[str, FileDigest] = {}
    for name, entry in _typed(table, "files", dict).items():
        digests = [bytes.fromhex(_typed(entry, key, str)) for key in ("xxh3_128", "sha256") if key in entry]
        if [len(d) for d in digests] not in ([16], [16, 32]) or _typed(entry, "bytes", int) < 0:
            raise ValueError(
                f"{name}: bytes, 32 digits of xxh3_128 and perhaps 64 of sha256 expected, found {brief(entry)}"
            )
        files[name] = FileDigest(entry["bytes"], *digests)
    return Manifest(
        codec=_typed(codec, "name", str),
        parameters=parameters,
        lossless=_typed(table, "lossless", bool),
        partial=partial,
        source=_typed(table, "source", dict),
        layers=tuple(
            LayerEntry(
                _typed(entry, "file", str),
                _typed(entry, "block", str),
                _typed(entry, "layer", int),
                _typed(entry, "experts", int),
                _typed(entry, "sidecar", str, type(None)),
            )
            for entry in _typed(table, "layers", list)
        ),
        files=files,
    )


def _plain(name: str) -> bool:
    """Whether a name is that of a file in the container's own directory, other than the manifest."""
    return name not in ("", ".", "..", MANIFEST) and "/" not in name and all(ord(c) >= 32 for c in name)


LAYER_NAME = re.compile(r"(layers|mtp)-([0-9]{2,})(\.rowsum)?\.safetensors")


def _layer_problem(manifest: Manifest) -> str | None:
    """What is wrong with the list of layers: order, names, counts, or files that are not listed; None if nothing."""
    if not manifest.layers:
        return "at least one layer expected, found none"
    keys = [(e.block, e.layer) for e in manifest.layers]
    if sorted(set(keys)) != keys:
        return f"layers expected in order of block and number, each once, found {brief(keys)}"
    named = set()
    for e in manifest.layers:
        match = LAYER_NAME.fullmatch(e.file)
        if e.block not in BLOCKS or match is None or e.file != layer_file_name(e.block, e.layer, len(match[2])):
            return f"a layer file named {layer_file_name(e.block, e.layer)} expected, found {brief(e.file)}"
        if e.sidecar not in (None, sidecar_name(e.file)):
            return f"a sidecar named {sidecar_name(e.file)} or none expected, found {brief(e.sidecar)}"
        if e.experts < 1:
            return f"{e.file}: at least one expert expected, found {e.experts}"
        named |= {e.file} if e.sidecar is None else {e.file, e.sidecar}
    listed = {name for name in manifest.files if LAYER_NAME.fullmatch(name)}
    if named != listed:
        return f"{min(named ^ listed)} expected in both the list of layers and the list of files"
    return None


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


def write_experts(path: str | os.PathLike[str], groups: Iterable[Mapping[str, Sequence[Any]]]) -> None:
    """Write experts.parquet; every item of `groups` (equally long columns, see `COLUMNS`) becomes a row group.

    A group a layer keeps memory apart from the number of layers.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(name, getattr(pa, kind)()) for name, kind in COLUMNS])
    # open files, not paths: pyarrow would take a name with a colon for a URI
    with (
        Path(path).open("wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd", version="2.6", store_schema=False) as writer,
    ):
        for columns in groups:
            arrays = [pa.array(columns[name], schema.field(name).type) for name, _ in COLUMNS]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def read_experts(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """The columns of experts.parquet as lists; `DataError` if it is damaged, lacks a column or has another type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    remedy = "restore experts.parquet, or convert again"
    try:
        with Path(path).open("rb") as file:
            table = pq.read_table(file)
        columns = dict(table.to_pydict())
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: column names that are no UTF-8
        raise DataError(f"a Parquet file expected: {error}", code="E0311", file=path, remedy=remedy) from None
    found = {field.name: str(field.type) for field in table.schema}
    for name, kind in COLUMNS:
        if found.get(name) != {"float64": "double"}.get(kind, kind):
            have = found.get(name, "none")
            raise DataError(f"column {name} of {kind} expected, found {have}", code="E0312", file=path, remedy=remedy)
    return columns
