"""A checkpoint as a catalogue of byte ranges: every tensor's file, place, type and shape; no data is read.

Accepts a single `model.safetensors`, shards with an index, and Hugging Face cache directories whose files are links.
Everything is checked before work starts: each shard must be exactly as long as its header says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagestone.convert import directory
from pagestone.convert.errors import machine_errors
from pagestone.convert.side_files import CODE, OUTSIDE, SideFile, is_document, is_plain, list_side_files
from pagestone.formats import directories
from pagestone.formats.digests import Hasher, digest
from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.manifest import EXPERTS_TABLE, MANIFEST, RECORDS, TEMPLATES, read_manifest
from pagestone.formats.safetensors_header import TensorEntry, parse_header, read_text
from pagestone.formats.storage import AnyPlace, Kind, Place, Stamp, place_of
from pagestone.formats.strict_json import MAX_NODES, Config, load_object

READING = "reading the source"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the source: `file` is its name in the checkpoint, `offset` absolute in that file, in bytes."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The catalogue. `fingerprint` covers config, shard names, lengths and headers, not the data (32 hex digits)."""

    path: Place
    config: dict[str, Any]
    tensors: dict[str, SourceTensor]
    shards: tuple[str, ...]
    side_files: tuple[SideFile, ...]
    fingerprint: str
    warnings: tuple[str, ...] = ()
    stamps: dict[str, Stamp] = field(default_factory=dict)
    """Stamps of config, index, shards and side files, each from before it was read; see `unchanged`."""
    digests: dict[str, bytes] = field(default_factory=dict)
    """Digests of config and index, whose contents are in the plan."""
    container: bool = False
    """The source is itself a bf16 container."""

    @property
    def text_config(self) -> Config:
        """The language model's part of the config: `text_config` if there is one, else the config itself."""
        nested = self.config.get("text_config")
        return Config(nested if isinstance(nested, dict) else self.config, self.path / CONFIG)


def load_json(path: Place, code: str, *, loose: bool = False) -> dict[str, Any]:
    """A JSON object from a file; `DataError` naming the file if it is something else.

    `loose` takes what other programs take in a config: a key that stands twice, NaN and Infinity.
    """
    with machine_errors(path, READING):
        return load_object(
            path, code=code, remedy="download the file again", twice=loose, constants=loose, most=MAX_NODES
        )


def _stamp(path: Place) -> Stamp:
    with machine_errors(path, READING):
        return path.stamp()


def _digest_of(path: Place) -> bytes:
    with machine_errors(path, READING):
        return digest(path.read_bytes())


def _find_index(root: Place) -> Place | None:
    if (root / INDEX).kind() is not None:  # a link that points nowhere is told by `_require_file`
        return root / INDEX
    others = directory.ending(root, ".safetensors.index.json")
    if len(others) > 1:
        raise RequestError(
            f"one index expected, found {', '.join(p.name for p in others)}",
            code="E0405",
            file=root,
            remedy=f"keep the one you mean and call it {INDEX}",
        )
    return others[0] if others else None


def _require_file(root: Place, name: str, why: str) -> Place:
    path = root / name
    if not is_plain(name):
        raise DataError(f"a plain file name expected, found {name!r}", code="E0406", file=root, remedy="fix the index")
    if not path.is_file():
        state = "its link points nowhere" if path.kind() is Kind.DANGLING else "there is no such file"
        raise DataError(
            f"{why}, but {state}",
            code="E0403",
            file=path,
            remedy="download the missing file; a cache link that points nowhere means the same",
        )
    return path


def _named_shards(root: Place, index: Place | None, warnings: list[str]) -> tuple[dict[str, str], list[str], str]:
    """(which tensor the index places in which file, the files in order of names, why each must be there)."""
    if index is None:
        shards, weight_map, why = directory.shards_without_index(root, INDEX), {}, "expected to hold the weights"
    else:
        _require_file(root, index.name, "expected to hold the index")
        weight_map = load_json(index, "E0407").get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            weight_map = {}
        if not weight_map:
            raise DataError(
                "a weight_map from names to files expected", code="E0408", file=index, remedy="download the index again"
            )
        shards = sorted(set(weight_map.values()))
        missing = [s for s in shards if is_plain(s) and not (root / s).is_file()]
        stale = directory.stale_index(root, index.name, shards, missing)
        if stale is not None:
            raise stale
        announced = directory.announced_parts(shards)
        warnings += [f"{index.name}: {announced}"] if announced else []
        why = f"named by {index.name} ({len(missing)} of {len(shards)} shards are missing)"
    return weight_map, shards, why


def shard_problems(source: AnyPlace) -> Iterator[PagestoneError]:
    """What is wrong with each shard for itself: missing, short, damaged. `open_checkpoint` raises the first alone.

    Raises what that does for an index that cannot be used.
    """
    root = place_of(source, once=True)
    _, shards, why = _named_shards(root, _find_index(root), [])
    for shard in shards:
        try:
            _read_shard(root, shard, why)
        except PagestoneError as error:
            yield error


def _read_shard(root: Place, shard: str, why: str) -> None:
    path = _require_file(root, shard, why)
    with machine_errors(path, READING):
        text, size = read_text(path)
    parse_header(text, size, path)


def _require_config(root: Place) -> None:
    if not (root / CONFIG).is_file():
        raise RequestError(
            f"{CONFIG} expected in the checkpoint directory, found none",
            code="E0402",
            file=root,
            remedy="give the directory that holds config.json and the .safetensors files",
        )
    if not (root / CONFIG).holds():
        raise RequestError(
            f"a file of the checkpoint expected, found {OUTSIDE}",
            code="E0415",
            file=root / CONFIG,
            remedy="put a copy of the file in its place; only weights may be links to other places",
        )


def open_checkpoint(source: AnyPlace, *, merge_unlisted: bool = False) -> Checkpoint:
    """The catalogue of the checkpoint that is `source`: a storage, or the path of a directory.

    `merge_unlisted` also takes the tensors of .safetensors files that the index does not name; a name that stands in
    two files is then refused.

    Raises `RequestError` (exit 2) if this is no safetensors checkpoint directory, and `DataError` (exit 1) naming file
    and tensor if a shard is missing, short, damaged or contradicts the index.
    """
    root = place_of(directories.directory(source) if isinstance(source, str | Path) else source, once=True)
    directory.require_directory(root)
    container = _is_bf16_container(root)
    _require_config(root)
    stamps: dict[str, Stamp] = {CONFIG: _stamp(root / CONFIG)}
    config = load_json(root / CONFIG, "E0407", loose=True)
    warnings: list[str] = []
    index = _find_index(root)
    if index is not None and index.is_file():  # else `_named_shards` says what is wrong
        stamps[index.name] = _stamp(index)
    weight_map, shards, why = _named_shards(root, index, warnings)
    for shard in shards:
        _require_file(root, shard, why)
    named = {CONFIG} if index is None else {CONFIG, index.name}
    directory.refuse_unfinished(root, shards, named)
    unlisted: list[str] = []
    if merge_unlisted:
        unlisted = [p.name for p in directory.ending(root) if p.is_file() and p.name not in shards]
        warnings += [f"{name}: not in the index; its tensors are taken, as --merge-unlisted asks" for name in unlisted]

    digests = {small: _digest_of(root / small) for small in sorted(named)}
    hasher = Hasher()
    hasher.update(digests[CONFIG])
    catalogue = _Catalogue(root, weight_map, index is not None, container, warnings)
    for shard in [*shards, *unlisted]:
        stamps[shard] = _stamp(root / shard)
        hasher.update(catalogue.add(shard, listed=shard not in unlisted))
    shards += unlisted
    catalogue.require_all(index.name if index else INDEX)
    side = _side_files(root, {*shards, *named}, container, warnings)
    stamps |= {f.name: _stamp(root / f.name) for f in side if f.rule in COPIED}
    return Checkpoint(
        root,
        config,
        catalogue.tensors,
        tuple(shards),
        side,
        hasher.digest().hex(),
        tuple(warnings),
        stamps,
        digests,
        container,
    )


COPIED = (None, CODE)
"""What is said of side files that are copied, or may be."""


def _side_files(root: Place, taken: set[str], container: bool, warnings: list[str]) -> tuple[SideFile, ...]:
    """The side files beside the files `taken`; none that would be copied is half a download."""
    side = tuple(list_side_files(root, taken, warnings))
    if container:
        ours = (MANIFEST, EXPERTS_TABLE, RECORDS)
        side = tuple(replace(f, rule="of the container, not of the model") if f.name in ours else f for f in side)
    copied = [f.name for f in side if f.rule in COPIED]
    directory.refuse_unfinished(root, (), [name for name in copied if not is_document(name)])
    if (root / TEMPLATES).is_dir():
        templates = [n.rpartition("/")[2] for n in copied if n.startswith(f"{TEMPLATES}/")]
        directory.refuse_unfinished(root / TEMPLATES, (), templates)
    return side


@dataclass(slots=True)
class _Catalogue:
    """The tensors of the shards read so far. `weight_map` is the index's; empty, and not `indexed`, without one."""

    root: Place
    weight_map: dict[str, str]
    indexed: bool
    container: bool
    warnings: list[str]
    tensors: dict[str, SourceTensor] = field(default_factory=dict)

    def add(self, shard: str, *, listed: bool) -> bytes:
        """Read a shard's header; what the fingerprint covers of it. Not `listed`: its names may stand nowhere else."""
        with machine_errors(self.root / shard, READING):
            text, size = read_text(self.root / shard)
        header = parse_header(text, size, self.root / shard)
        head = struct.pack("<Q", len(text)) + text
        for entry in header.entries:
            if self.container and entry.name not in self.weight_map and entry.name.endswith((".pad", ".pad_a")):
                continue
            if listed:
                self._take(entry, shard)
                continue
            home = self.weight_map.get(entry.name)
            if home is None and entry.name in self.tensors:
                home = self.tensors[entry.name].file
            if home is not None:
                raise DataError(
                    f"a tensor that stands nowhere else expected in a file outside the index; {home} has it too",
                    code="E0412",
                    file=self.root / shard,
                    tensor=entry.name,
                    remedy="remove one of the two files, or leave out --merge-unlisted",
                )
            self._put(entry, shard)
        return shard.encode() + b"\0" + header.file_size.to_bytes(8, "big") + digest(head)

    def _take(self, entry: TensorEntry, shard: str) -> None:
        """Add one header entry; where a name stands in two shards the index decides."""
        home = self.weight_map.get(entry.name)
        if home is not None and home != shard:
            self.warnings.append(
                f"{shard}: {entry.name} also stands here; the copy in {home} is used, as the index says"
            )
            return
        if self.indexed and home is None:
            if entry.name in self.tensors:
                raise DataError(
                    f"the same name stands in {self.tensors[entry.name].file} and the index lists neither",
                    code="E0410",
                    file=self.root / shard,
                    tensor=entry.name,
                    remedy="download the index again",
                )
            self.warnings.append(f"{shard}: {entry.name} is not in the index; it is taken as if it were")
        self._put(entry, shard)

    def _put(self, entry: TensorEntry, shard: str) -> None:
        self.tensors[entry.name] = SourceTensor(entry.name, shard, entry.dtype, entry.shape, entry.offset, entry.nbytes)

    def require_all(self, index: str) -> None:
        """Refuse an index that lists a tensor its shard does not have."""
        for name, shard in self.weight_map.items():
            if name not in self.tensors:
                raise DataError(
                    f"listed by {index} in this file, but not in its header",
                    code="E0409",
                    file=self.root / shard,
                    tensor=name,
                    remedy="download the shard and the index again: they do not belong together",
                )


def _is_bf16_container(root: Place) -> bool:
    """Whether the directory is one of our containers that holds a model's own values.

    Raises `RequestError` for a container of another codec: its codes must not be encoded again.
    """
    if not ((root / MANIFEST).is_file() and (root / EXPERTS_TABLE).is_file()):
        return False
    with machine_errors(root / MANIFEST, READING):
        manifest = read_manifest(root / MANIFEST)
    if manifest.codec == "bf16" and manifest.dense is None:
        return True
    codec = manifest.codec + ("" if manifest.dense is None else f" with dense matrices in {manifest.dense.codec}")
    raise RequestError(
        f"an original checkpoint (or a bf16 container) expected, found a pagestone container in {codec}",
        code="E0411",
        file=root,
        remedy="convert from the checkpoint this container was made from",
    )
