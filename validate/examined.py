"""What a directory holds, for the doctor: a container, or a checkpoint as the containers it could become.

No weight is read: sizes follow from headers. What is wrong is told and not raised, as long as anything can still be
said of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pagestone.convert import families
from pagestone.convert.checkpoint import CONFIG, shard_problems
from pagestone.convert.family import TABLES, depth_of
from pagestone.convert.matrices import dense_codec, ties_head, unfit
from pagestone.convert.plan import Plan, Request, make_plan
from pagestone.formats import encodings
from pagestone.formats.dense_matrices import PlacedMatrix
from pagestone.formats.dtypes import Array
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import PagestoneError
from pagestone.formats.layer_file import LayerHeader, sidecar_name
from pagestone.formats.layout import matrix_record
from pagestone.formats.manifest import MANIFEST, PARTIAL, LayerEntry, Manifest, read_manifest
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.reader import hosts
from pagestone.reader.budget import all_records
from pagestone.reader.configs import read_config
from pagestone.reader.container import Beside, Container, Layer, file_problems, open_to_run
from pagestone.reader.dense import dense_entries, dense_files, encoded_matrices
from pagestone.reader.dense_costs import dense_costs
from pagestone.reader.footprint import Footprint, Sizes, footprint
from pagestone.reader.made import MadeContainer
from pagestone.reader.memory_plan import (
    CONTEXT,
    GROWTH,
    TOKENIZER,
    Line,
    libraries_line,
    loading_bytes,
    process_line,
    tokenizer_line,
)
from pagestone.reader.model import AUTO, Loading, experts_for
from pagestone.validate.findings import ERROR, UNREAD, WARNING
from pagestone.validate.forecast import Work
from pagestone.validate.virtual import neither

T = TypeVar("T")
CONTAINER, CHECKPOINT, NEITHER = "container", "checkpoint", "neither"
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "top_k")
"""What configs call the experts of a layer that a token goes through."""
USUAL = 8
"""The number of them where a config does not say."""
MOST = 8
"""Files that something is wrong with that are told of one by one."""
CODES = ("F8_E4M3", "F8_E5M2")
"""Types of dense tensors that are decoded to twice their bytes when a model is loaded."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding: a code, what was found, and what to do."""

    severity: str
    code: str
    what: str
    remedy: str
    exit_code: int = 0

    def table(self) -> dict[str, Any]:
        """For --json."""
        return {"severity": self.severity, "code": self.code, "what": self.what, "remedy": self.remedy}


class Findings(list[Diagnosis]):
    """Diagnoses in the order in which they were made."""

    def warn(self, code: str, what: str, remedy: str) -> None:
        """Something to know that stops nothing."""
        self.append(Diagnosis(WARNING, code, what, remedy))

    def of(self, error: PagestoneError, severity: str = ERROR) -> None:
        """An error that another room raised, once."""
        where = "".join(f"{part}: " for part in (error.file, error.tensor) if part)
        exit_code = error.exit_code if severity == ERROR else 0
        found = Diagnosis(severity, error.code, where + error.message, error.remedy or "", exit_code)
        if found not in self:
            self.append(found)

    def each(self, errors: Sequence[PagestoneError]) -> None:
        """The first `MOST` errors of many, then how many more there are."""
        for error in errors[:MOST]:
            self.of(error)
        if len(errors) > MOST:
            last = errors[MOST]
            what = f"and {len(errors) - MOST} more file(s), the first of them {last.file}: {last.message}"
            self.append(Diagnosis(ERROR, last.code, what, last.remedy or "", last.exit_code))

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if it fails, which is a finding: what comes after it goes on."""
        try:
            return work()
        except PagestoneError as error:
            self.of(error)
        except OSError as error:
            found = f"{error.filename}: {error.strerror or error}"
            self.append(Diagnosis(ERROR, UNREAD, found, "give yourself the right to read it, or restore it", 3))
        return None


@dataclass
class Examined:
    """A directory, and what of it could be opened; `container` is what would be run."""

    path: Path
    kind: str
    container: Container | None = None
    plan: Plan | None = None
    libraries: Line = field(default_factory=libraries_line)
    """What the interpreter and libraries take."""
    told: Footprint | None = None
    """What a host says of the model."""

    def load_libraries(self) -> None:
        """Import what a container's model needs, to measure it: the plan is then the one that `run` makes.

        Raises `RequestError` for a model that cannot be run. Not for checkpoints, which are made containers first.
        """
        if self.kind != CONTAINER or self.container is None:
            return
        how = Loading(experts_for(self.container.manifest.codec, AUTO))
        self.told = hosts.get(hosts.DEFAULT).footprint(self.container, how, CONTEXT)
        self.libraries = process_line()

    @cached_property
    def _config(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return read_config(self.path)

    @cached_property
    def footprint(self) -> Footprint:
        """Beside the weights; raises as `read_config`."""
        return self.told or footprint(self.path)

    @cached_property
    def chosen(self) -> int:
        """Experts of a layer that a token goes through."""
        return Sizes(self._config[1], 2).number(*CHOSEN, default=USUAL)

    @cached_property
    def depth(self) -> int:
        """Layers of all kinds."""
        return Sizes(self._config[1], 2).number("num_hidden_layers")

    @property
    def tokenizer(self) -> Line | None:
        """What the tokenizer among the files will take; None without one."""
        return tokenizer_line(self.path, TOKENIZER)

    @property
    def loading(self) -> int:
        """Bytes of everything while the tokenizer is loaded; 0 without one."""
        return loading_bytes(self.path, self.libraries.nbytes - GROWTH)

    def files(self) -> list[Path]:
        """The files that experts are read from; where those are not known, whatever tensors there are."""
        if self.kind == CONTAINER and self.container is not None:
            named = [layer.path for layer in self.container.layers.values()]
        elif self.plan is not None:
            named = [self.path / shard for shard in self.plan.checkpoint.shards]
        else:
            named = sorted(self.path.glob("*.safetensors"))
        return [path for path in named if path.is_file()]

    def work(self, container: Container, cached: int) -> Work:
        """What a token takes of a container (this one, or as if) with so many bytes of cache."""
        costs, dense = dense_costs(container), container.manifest.dense
        return Work(
            container.manifest.codec, len(container.layers), max(self.depth, len(container.layers)), self.chosen,
            all_records(container) // max(1, sum(map(len, container.layers.values()))), all_records(container),
            costs.tensor_bytes + _decoded(container), min(cached, all_records(container)), self.footprint.fixed_bytes,
            costs.matrix_bytes, None if dense is None else dense.codec,
        )  # fmt: skip

    def with_dense(self, work: Work, word: str) -> Work | None:
        """`work` if dense matrices were encoded as `--dense` with this word would; None where that changes nothing."""
        codec, gone, made = dense_codec(word), 0, 0
        if codec is None or self.container is None or work.encoded:
            return None
        for entry in _encoded(self.container, *self._config):
            if unfit(codec, *entry.shape) is None:
                gone += entry.nbytes * (2 if entry.dtype in CODES else 1)  # as `work` counts it
                made += matrix_record(codec, *entry.shape).nbytes
        if not made:
            return None
        cached = min(work.records, work.cached + gone - made)
        return replace(work, plain=work.plain - gone, encoded=made, dense=word, cached=cached)


def _encoded(container: Container, config: dict[str, Any], text: dict[str, Any]) -> Iterator[TensorEntry]:
    """The dense matrices that the model's family lets be encoded; the table of a tied head is then read by rows."""
    family, entries = families.of_config(config), {n: entry for n, (_, entry) in dense_entries(container).items()}
    if family is None:
        return
    depth = depth_of(text) or 0
    tables = [t for t, head in TABLES.items() if ties_head(config, text) and f"{head}.weight" not in entries]
    for name, entry in entries.items():
        module = name.removesuffix(".weight")
        if len(entry.shape) == 2 and module != name and (family.encodes(module, depth) or module in tables):
            yield entry


def _decoded(container: Container) -> int:
    """Bytes that decoding FP8 codes of dense tensors adds."""
    return sum(entry.nbytes for _, entry in dense_entries(container).values() if entry.dtype in CODES)


# -- opening ----------------------------------------------------------------------------------------------------------


def examine(path: Path, findings: Findings) -> Examined:
    """What `path` holds. What cannot be opened is a finding."""
    if (path / MANIFEST).exists() or (path / PARTIAL).exists():
        return Examined(path, CONTAINER, findings.attempt(lambda: open_to_run(path)) or _damaged(path, findings))
    if not (path / CONFIG).is_file():
        findings.attempt(lambda: findings.of(neither(path)))
        return Examined(path, NEITHER)
    plan = findings.attempt(lambda: make_plan(Request(path, encodings.get("bf16"))))
    if plan is None:
        findings.attempt(lambda: findings.each(list(shard_problems(path))))
        return Examined(path, CHECKPOINT)
    for warning in plan.warnings:
        findings.warn("W1345", warning, "nothing, if it is meant to be so")
    container = of_headers(path, plan.codec, [t.header for t in plan.layers], _Planned(plan))
    return Examined(path, CHECKPOINT, container, plan)


def _damaged(path: Path, findings: Findings) -> Container | None:
    """What there is of a container that cannot be opened: None if its tables do not say how large its parts are.

    A file that is missing, or of another length, is told of once.
    """
    try:
        container = Container(path, read_manifest(path / MANIFEST))
        lost = file_problems(path, container.manifest)
    except (PagestoneError, OSError):  # told already
        return None
    findings.each(list(lost.values()))
    before = len(findings)
    for layer in (*container.layers.values(), *container.mtp.values()):
        if layer.entry.file not in lost:
            findings.attempt(lambda layer=layer: layer.header)  # type: ignore[misc]
    if lost.keys().isdisjoint(dense_files(container)):
        findings.attempt(lambda: dense_entries(container))
    if container.manifest.dense is None or lost.keys().isdisjoint(container.manifest.dense.files):
        findings.attempt(lambda: encoded_matrices(container))
    whole = not any(name.endswith(".safetensors") for name in lost)
    return container if whole and len(findings) == before else None


# -- as if ------------------------------------------------------------------------------------------------------------


class _Planned:
    """A `Maker` that knows sizes and makes nothing, of a plan or of a container."""

    def __init__(self, known: Plan | Container) -> None:
        self._matrices: Mapping[str, PlacedMatrix] = {}
        if isinstance(known, Container):
            self._dense: Mapping[str, tuple[str, TensorEntry]] = dense_entries(known)
            self._matrices = encoded_matrices(known)
        else:
            self._dense = {
                t.name: (shard.name, TensorEntry(t.name, t.dtype, t.shape, 0, t.nbytes))
                for shard in known.dense
                for t in shard.tensors
            }

    def record(self, layer: Layer, expert: int, into: memoryview) -> None:
        raise NotImplementedError

    def beside(self, layer: Layer) -> Beside:
        raise NotImplementedError

    def dense_entries(self) -> Mapping[str, tuple[str, TensorEntry]]:
        return self._dense

    def dense(self, name: str) -> Array:
        raise NotImplementedError

    def rows(self, name: str) -> Callable[[int, memoryview], None] | None:
        raise NotImplementedError

    def matrices(self) -> Mapping[str, PlacedMatrix]:
        return self._matrices

    def matrix(self, name: str, into: memoryview) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


def of_headers(
    path: Path, codec: Codec, headers: Iterable[LayerHeader], maker: _Planned, like: Manifest | None = None
) -> MadeContainer:
    """A container of these layers that only has sizes; its dense matrices are those of `like`."""
    made = [replace(h, codec=codec) for h in headers]
    names = [f"{h.block}-{h.layer}.safetensors" for h in made]
    entries = tuple(
        LayerEntry(name, h.block, h.layer, h.count, sidecar_name(name) if any(h.sidecar_tensors()) else None)
        for name, h in zip(names, made, strict=True)
    )
    manifest = Manifest(codec.name, codec.parameters, False, None, {}, entries)
    if like is not None:
        manifest = replace(manifest, dense=like.dense)
    return MadeContainer(path, manifest, made, maker, "as if")


def as_if(container: Container, codec: Codec) -> MadeContainer:
    """`container` with its experts in another codec. Raises `LayoutError` where that cannot hold them."""
    headers = [layer.header for layer in (*container.layers.values(), *container.mtp.values())]
    return of_headers(container.path, codec, headers, _Planned(container), container.manifest)


def codecs() -> Iterator[Codec]:
    """Every codec that experts can be converted to, with its default options."""
    for name in encodings.registry():
        yield encodings.get(name)
