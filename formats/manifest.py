"""manifest.json and experts.parquet: what a container holds, and the digest of every file (specs/manifest.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagestone.formats import strict_json
from pagestone.formats.dense_matrices import FILE_NAME, DenseEncoding, DenseMatrix, dense_problem, float_of
from pagestone.formats.digests import canonical_json, container_id, digest
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import BLOCKS, SPEC_VERSION, layer_file_name, other_version, sidecar_name
from pagestone.formats.layout import PAGE, PARTS, LayerLayout
from pagestone.formats.parquet_pages import footer_bytes, row_groups, unfolded_bytes
from pagestone.formats.storage import AnyPlace, Place, place_of
from pagestone.formats.strict_json import MAX_NODES, brief

MANIFEST = "manifest.json"
EXPERTS_TABLE = "experts.parquet"
RECORDS = "records.xxh3"
"""The digest of every record, 16 bytes each: layers in the manifest's order, experts in order."""
DIGEST_BYTES = 16
PARTIAL = ".pagestone-partial"
"""The subfolder of an output in which a conversion works; private to the converter."""
NOT_IN_ID = (MANIFEST, EXPERTS_TABLE)
TEMPLATES, TEMPLATE_SUFFIX = "additional_chat_templates", ".jinja"
"""The one subfolder a container may have files in, and how their names end: chat templates beside the usual one."""


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
    about where the weights came from (family, fingerprint, element types), none of them a path or a time. Nobody may
    need them: they may be absent, or anything that canonical JSON can hold. `include_code` and `merge_unlisted` are
    what else was asked for: with codec, parameters and `partial` they are the request, from which the same source is
    planned again. `dense` says which dense matrices are encoded, and how; None if all are as in the source.
    """

    codec: str
    parameters: Mapping[str, int | str]
    lossless: bool
    partial: tuple[int, int] | None
    source: Mapping[str, Any]
    layers: tuple[LayerEntry, ...]
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    include_code: bool = False
    merge_unlisted: bool = False
    dense: DenseEncoding | None = None

    @property
    def container_id(self) -> str:
        """Identity of the contents, 32 hexadecimal digits; see `digests.container_id`."""
        files = {name: f.xxh3 for name, f in self.files.items() if name not in NOT_IN_ID}
        dense = None if self.dense is None else self.dense.identity
        return container_id(files, self.codec, self.parameters, SPEC_VERSION, dense).hex()

    def records(self, raw: bytes) -> dict[str, tuple[bytes, ...]]:
        """The digests in the bytes of records.xxh3, by layer file; `ValueError` if they are not one a record."""
        if len(raw) != DIGEST_BYTES * sum(entry.experts for entry in self.layers):
            raise ValueError(f"{DIGEST_BYTES} bytes a record expected, found {len(raw)}")
        found, at = {}, 0
        for entry in self.layers:
            end = at + DIGEST_BYTES * entry.experts
            found[entry.file] = tuple(raw[n : n + DIGEST_BYTES] for n in range(at, end, DIGEST_BYTES))
            at = end
        return found

    @property
    def matrices(self) -> int:
        """Routed experts' matrices in all layers: the rows of experts.parquet."""
        return len(PARTS) * sum(entry.experts for entry in self.layers)

    def to_bytes(self) -> bytes:
        """The bytes of manifest.json: canonical JSON that carries its own digest."""
        table: dict[str, Any] = {
            "pagestone": {"spec_version": SPEC_VERSION},
            "codec": {"name": self.codec, "parameters": dict(self.parameters)},
            "lossless": self.lossless,
            "partial": None if self.partial is None else list(self.partial),
            "request": {"include_code": self.include_code, "merge_unlisted": self.merge_unlisted},
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
        if self.dense is not None:
            table["dense"] = self.dense.table()
        table["digest"] = digest(canonical_json(table)).hex()
        return canonical_json(table)


def read_manifest(path: AnyPlace) -> Manifest:
    """The manifest at `path` (the file itself), checked against its own digest and its container id.

    Raises `DataError` (E03xx) if it is no manifest, is damaged, is of a version this code does not know, or is anything
    but the canonical JSON of exactly the fields of `Manifest.to_bytes`.
    """
    file = place_of(path)
    raw = file.read_bytes()
    remedy = "restore manifest.json from where the container came from, or convert again"

    def fail(message: str, code: str) -> DataError:
        return DataError(message, code=code, file=file, remedy=remedy)

    try:
        table = strict_json.loads(raw, twice=True, most=MAX_NODES)  # what is not canonical is refused below, as such
        version = table["pagestone"]["spec_version"]
    except (ValueError, KeyError, TypeError) as error:
        remedy = strict_json.remedy_for(error, remedy)
        raise fail("a pagestone manifest expected, found something else", "E0301") from None
    if version != SPEC_VERSION:
        message, what_to_do = other_version(version)
        raise DataError(message, code="E0302", file=file, remedy=what_to_do)
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
    for judge, code in ((_layer_problem, "E0308"), (_records_problem, "E0316"), (_dense_problem, "E0340")):
        problem = judge(manifest)
        if problem is not None:
            raise fail(problem, code)
    if manifest.to_bytes() != raw:
        raise fail("canonical JSON of exactly the fields specified expected, found other bytes", "E0307")
    return manifest


def no_container(root: Path, *, checkpoints: bool = False) -> RequestError:
    """Why the directory `root`, which has no manifest, cannot be opened, and what to do about it.

    `checkpoints`: whether a checkpoint would do as well.
    """
    if os.path.lexists(root / PARTIAL / MANIFEST):
        return RequestError(
            "a container expected, found one whose publication was cut short: all of it is here, but not in its place",
            code="E0810",
            file=root,
            remedy="run the same prepare command again: it only moves the files, and does not need the source",
        )
    unfinished = (root / PARTIAL).is_dir()
    if unfinished:
        found = "an unfinished conversion"
    else:
        found = "none" if root.is_dir() else "a file" if root.exists() else "no such directory"
    remedy = "give the directory that a prepare command made"
    if checkpoints:
        remedy += ", or one that holds config.json and .safetensors files"
    return RequestError(
        f"a container with {MANIFEST}{', or a checkpoint with config.json,' if checkpoints else ''} expected, "
        f"found {found}",
        code="E0331",
        file=root,
        remedy="run the prepare command again to finish it" if unfinished else remedy,
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
        include_code=_typed(_typed(table, "request", dict), "include_code", bool),
        merge_unlisted=_typed(table["request"], "merge_unlisted", bool),
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
        dense=_dense(_typed(table, "dense", dict)) if "dense" in table else None,
    )


def _dense(table: Any) -> DenseEncoding:
    """The field `dense` of a manifest; raises as `_manifest`."""
    parameters = _typed(table, "parameters", dict)
    for name in parameters:
        _typed(parameters, name, int, str)
    return DenseEncoding(
        _typed(table, "codec", str),
        parameters,
        tuple(
            DenseMatrix(
                _typed(entry, "name", str),
                _typed(entry, "file", str),
                _typed(entry, "rows", int),
                _typed(entry, "columns", int),
                float_of(_typed(entry, "squared_error", str)),
                float_of(_typed(entry, "squared_norm", str)),
            )
            for entry in _typed(table, "matrices", list)
        ),
    )


def _records_problem(manifest: Manifest) -> str | None:
    """What is wrong with the length of the file of records' digests; None if nothing."""
    needed = DIGEST_BYTES * sum(entry.experts for entry in manifest.layers)
    listed = manifest.files[RECORDS].nbytes if RECORDS in manifest.files else "none"
    return None if listed == needed else f"{RECORDS} of {needed} bytes expected among the files, found {listed}"


def _dense_problem(manifest: Manifest) -> str | None:
    """What is wrong with the list of encoded dense matrices and their files; None if nothing."""
    listed = {name for name in manifest.files if FILE_NAME.fullmatch(name)}
    named = set() if manifest.dense is None else {*manifest.dense.files}
    if manifest.dense is not None:
        problem = dense_problem(manifest.dense, {name: f.nbytes for name, f in manifest.files.items()})
        if problem is not None:
            return problem
    if named != listed:
        return f"{min(named ^ listed)} expected in both the list of encoded matrices and the list of files"
    return None


NAME_BYTES = 255
"""The longest name that file systems take; asking for a longer one is an error of the system."""


def _plain(name: str) -> bool:
    """Whether a name is that of a file in the container's own directory, other than the manifest, or of a template."""
    folder, slash, rest = name.rpartition("/")
    if slash:
        return folder == TEMPLATES and rest.endswith(TEMPLATE_SUFFIX) and _plain(rest)
    plain = name not in ("", ".", "..", MANIFEST) and all(ord(c) >= 32 for c in name)
    return plain and len(name.encode()) <= NAME_BYTES


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
    for e in manifest.layers:
        if e.experts * PAGE > manifest.files[e.file].nbytes:  # no count is believed that the bytes do not confirm
            return f"{e.file}: room for {e.experts} experts expected, found {manifest.files[e.file].nbytes} bytes"
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
    ("squared_error", "float64"),
    ("squared_norm", "float64"),
)
"""Columns that every experts.parquet has, a row a matrix; offsets are absolute in `file`, in bytes."""
SUMS = COLUMNS[-2:]
"""What an encoding cost; those of roles stand before them."""
OF_ROLE = ("_offset", "_bytes")
"""How the two columns of a role end, int64 both: where its tensor begins in `file`, and its length."""


def columns_for(roles: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The columns for an encoding with these roles in a record."""
    return (*COLUMNS[: -len(SUMS)], *((role + end, "int64") for role in roles for end in OF_ROLE), *SUMS)


def places(layout: LayerLayout, expert: int, part: str) -> dict[str, int]:
    """Where every stored tensor of a matrix lies in its file, by the names of its columns."""
    start = layout.record_offset(expert)
    columns: dict[str, int] = {}
    for role in layout.record.roles:
        slot = layout.record.slot(part, role)
        columns |= dict(zip((role + end for end in OF_ROLE), (start + slot.offset, slot.nbytes), strict=True))
    return columns


@contextmanager
def _system_memory() -> Iterator[None]:
    """Within it Arrow allocates as everybody does: its own allocators take megabytes in advance."""
    import pyarrow as pa

    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def write_experts(
    path: str | os.PathLike[str], groups: Iterable[Mapping[str, Sequence[Any]]], roles: Sequence[str]
) -> None:
    """Write experts.parquet; every item of `groups` (equally long columns, see `columns_for`) becomes a row group.

    A group a layer keeps memory apart from the number of layers.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(name, getattr(pa, kind)()) for name, kind in columns_for(roles)])
    # open files, not paths: pyarrow would take a name with a colon for a URI
    with (
        _system_memory(),
        Path(path).open("wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd", version="2.6", store_schema=False) as writer,
    ):
        for columns in groups:
            arrays = [pa.array(columns[name], kind) for name, kind in zip(schema.names, schema.types, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


PAGES, FOOTER = 1 << 20, 1 << 19
"""Bytes that the decompressed pages, and the footer, may take whatever the number of rows."""
PAGES_ROW, FOOTER_ROW = 2048, 64
"""Bytes a row on top of these. Real tables have about 300 and 10."""
UNKNOWN = 1 << 14
"""The most rows of a table whose number of rows nobody knows."""


Columns = dict[str, list[Any]]
"""Columns of experts.parquet as lists, by name."""


def read_experts(path: AnyPlace, rows: int | None = None, roles: Iterable[str] | None = None) -> Columns:
    """The columns of experts.parquet: those of `columns_for(roles)`, or with None of all roles in the file.

    Takes and raises what `experts_groups` does.
    """
    table: Columns = {}
    for group in experts_groups(path, rows, roles):
        for name, values in group.items():
            table.setdefault(name, []).extend(values)
    return table


def experts_groups(path: AnyPlace, rows: int | None = None, roles: Iterable[str] | None = None) -> Iterator[Columns]:
    """The columns of `read_experts`, a row group at a time: as we write it, a layer. First come columns without rows.

    `rows` is how many there must be (`Manifest.matrices`); None for any number up to 16,384. It bounds what the file
    may unfold to, and is compared before anything is read. Raises `DataError` (E031x) if the file is damaged, lacks a
    column, has another type, another number of rows or a null where there is none, or unfolds to more than so many rows
    can take. `OSError` of the read itself passes through. No thread is started.
    """
    import pyarrow as pa

    file = place_of(path)

    def fail(message: str, code: str) -> DataError:
        return DataError(message, code=code, file=file, remedy="restore experts.parquet, or convert again")

    raw = _table_bytes(file, UNKNOWN if rows is None else rows, fail)
    groups = _groups(raw, rows, roles, fail)
    while True:
        try:
            with _system_memory():  # not while a group is looked at: whoever does may have a use for Arrow
                group = next(groups, None)
        except (pa.ArrowException, OSError, ValueError) as error:  # OSError: Arrow's own; ValueError: also no UTF-8
            raise fail(f"a Parquet file expected: {error}", "E0311") from None
        if group is None:
            return
        yield group


Fail = Callable[[str, str], DataError]


def _table_bytes(file: Place, rows: int, fail: Fail) -> bytes:
    """The whole file, unless it is longer than `rows` rows can be."""
    limit = PAGES + FOOTER + rows * (PAGES_ROW + FOOTER_ROW)
    size = file.size()
    if size > limit:
        raise fail(f"a table of {rows} rows in at most {limit} bytes expected, found {size} bytes", "E0315")
    return file.read_bytes()


def _groups(raw: bytes, rows: int | None, roles: Iterable[str] | None, fail: Fail) -> Iterator[Columns]:
    """The columns of a Parquet file, after its footer and the headers of its pages were compared with `rows`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    most = UNKNOWN if rows is None else rows
    if footer_bytes(raw) > FOOTER + FOOTER_ROW * most:
        raise fail(f"a footer for {most} rows expected, found {footer_bytes(raw)} bytes", "E0315")
    # bytes, not a Python file: Arrow's threads would call it, also while the interpreter ends
    how: Any = {"pre_buffer": False, "thrift_container_size_limit": max(most, 64)}
    file = pq.ParquetFile(pa.BufferReader(raw), **how)
    metadata, schema = file.metadata, file.schema_arrow
    if len(set(schema.names)) != len(schema.names):
        raise fail(f"columns of different names expected, found {schema.names}", "E0311")
    wanted_columns = columns_for(_roles_of(schema.names) if roles is None else roles)
    for name, kind in wanted_columns:
        found = [str(f.type) for f in schema if f.name == name] or ["none"]
        if found != [{"float64": "double"}.get(kind, kind)]:
            raise fail(f"column {name} of {kind} expected, found {found[0]}", "E0312")
    if metadata.num_rows > most or (rows is not None and metadata.num_rows != rows):
        wanted = f"at most {most}" if rows is None else str(rows)
        raise fail(f"{wanted} rows expected, found {metadata.num_rows}", "E0313")
    names = [name for name, _ in wanted_columns]
    _bounded(raw, metadata.num_rows, fail)
    # as dictionaries: one text, however many rows have it
    texts = [name for name, kind in wanted_columns if kind == "string"]
    file = pq.ParquetFile(pa.BufferReader(raw), metadata=metadata, read_dictionary=texts, **how)
    yield {name: [] for name in names}
    for number in range(file.num_row_groups):
        table = file.read_row_group(number, columns=names, use_threads=False)
        table.validate(full=True)
        for name in names:
            if table.column(name).null_count:
                raise fail(f"column {name} without nulls expected, found {table.column(name).null_count}", "E0314")
        yield {name: [v for chunk in table.column(name).chunks for v in _values(chunk)] for name in names}


def _roles_of(names: Sequence[str]) -> list[str]:
    """The roles that have columns, in their order."""
    start, end = OF_ROLE
    roles = [name.removesuffix(start) for name in names if name.endswith(start)]
    return [role for role in roles if role != "record" and role + end in names]


def _values(chunk: Any) -> list[Any]:
    """The values of an Arrow array; those of a dictionary share their objects."""
    if not hasattr(chunk, "dictionary"):
        return list(chunk.to_pylist())
    values = chunk.dictionary.to_pylist()
    return [values[index] for index in chunk.indices.to_pylist()]


def _bounded(raw: bytes, rows: int, fail: Fail) -> None:
    """Refuse (E0315) a table whose pages take more memory than the table's rows can, before they are decompressed.

    `ValueError` if rows do not add up, or the footer or the header of a page is not understood.
    """
    groups = row_groups(raw)
    counts = [count for count, _ in groups]
    if sum(counts) != rows or min(counts, default=1) < 1:
        raise ValueError(f"{rows} rows in groups expected, found {counts[:10]}")
    room = PAGES + PAGES_ROW * rows
    for count, chunks in groups:
        for number, chunk in enumerate(chunks):
            if chunk.values != count:
                raise ValueError(f"{count} values of column {number} expected, found {chunk.values}")
            room -= unfolded_bytes(raw, chunk)
            if room < 0:
                raise fail(f"pages unfold to more than {rows} rows take, in column {number}", "E0315")
