"""Dense matrices that `--dense` encodes: which ones, the files they go to, and their bytes, a band of rows at a time.

The family says by role which modules may be encoded, and numbers decide whether it is worth it: what is smaller than a
page of codes, or has few rows, stays as it is. A head that is tied to the embedding table is encoded from the table
under its own name; the table stays, it is read by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pagestone.convert.checkpoint import Checkpoint, SourceTensor
from pagestone.convert.claims import Claims
from pagestone.convert.dense import DenseTensor
from pagestone.convert.family import TABLES, Config, Family, depth_of
from pagestone.convert.reading import SourceFiles
from pagestone.convert.sources import Range, rows_of, whole
from pagestone.formats import encodings
from pagestone.formats.dense_matrices import ENCODED, KEEP, bands, matrices_file_name, matrices_head
from pagestone.formats.dtypes import VIEWS, Array
from pagestone.formats.encodings import Claim, Codec, EncodeStats, Reading
from pagestone.formats.errors import DataError, LayoutError, NonFiniteError, RequestError
from pagestone.formats.layout import CODES, PAGE, MatrixRecord, matrix_record
from pagestone.formats.safetensors_header import MAX_HEADER
from pagestone.formats.text import natural

MATRICES_FILE = 512 << 20
"""Bytes: encoded matrices fill files up to this size (a larger one has its own), so that workers share them."""
FEWEST_ROWS = 128
"""A matrix of fewer rows is some gate, whatever it is called."""
ENTRY_ROOM = 512
"""Bytes: no fewer than the header of a matrices file has for one matrix, its name apart."""


@dataclass(frozen=True, slots=True)
class EncodedMatrix:
    """One dense matrix that is encoded: `name` is its module's, `source` what its arrays mean, `stored` where they lie.

    `tied` says that it is the embedding table's, which is copied besides.
    """

    name: str
    rows: int
    columns: int
    source: Reading
    stored: Mapping[str, Range]
    tied: bool = False

    @property
    def tensor(self) -> SourceTensor:
        """The tensor that holds its numbers or codes."""
        return self.stored[CODES].tensor

    @property
    def nbytes_in(self) -> int:
        """Bytes that are read for it."""
        return sum(r.nbytes for r in self.stored.values())


@dataclass(frozen=True, slots=True)
class MatricesTarget:
    """One file of encoded matrices, written in the order of `matrices`."""

    name: str
    encoding: Codec
    matrices: tuple[EncodedMatrix, ...]
    nbytes: int

    def head(self) -> bytes:
        """The bytes before the first record, which begins at a multiple of 4096."""
        return _head(self.encoding, self.matrices)

    def records(self) -> Iterator[tuple[EncodedMatrix, MatrixRecord]]:
        """Every matrix with its record, in order."""
        for matrix in self.matrices:
            yield matrix, matrix_record(self.encoding, matrix.rows, matrix.columns)


@dataclass(frozen=True, slots=True)
class Division:
    """What `--dense` makes of dense tensors: those that are encoded, those that stay, and why those stay that a family
    lets be encoded (by the name of their tensor)."""

    encoding: Codec | None
    matrices: tuple[EncodedMatrix, ...]
    rest: tuple[DenseTensor, ...]
    stay: Mapping[str, str]

    def remarks(self, word: str) -> list[str]:
        """What the user is told where the word of `--dense` changes nothing."""
        nothing = f"--dense {word} encodes nothing: no dense matrix of this model is large enough"
        return [nothing] if self.encoding is None and word != KEEP else []

    @property
    def rules(self) -> dict[str, str]:
        """What the plan says of every source tensor that is encoded, by name, but of a table, which is copied."""
        return {
            r.tensor.name: _words(m, self.encoding)
            for m in self.matrices
            if self.encoding is not None and not m.tied
            for r in m.stored.values()
        }


def _words(matrix: EncodedMatrix, encoding: Codec) -> str:
    if matrix.source.plain is not None:
        return f"encoded in {encoding.name}"
    reason = encoding.takes(matrix.source, matrix.rows, matrix.columns)
    return "passed through" if reason is None else f"encoded in {encoding.name} ({reason})"


def dense_codec(word: str) -> Codec | None:
    """The encoding that a word of `--dense` means, None for `keep`; `RequestError` (E0621) for any other word."""
    if word == KEEP:
        return None
    if word not in ENCODED:
        raise RequestError(
            f"--dense expected to be {KEEP}, {', '.join(ENCODED[:-1])} or {ENCODED[-1]}, found {word!r}",
            code="E0621",
            remedy="--dense keep leaves dense matrices as they are",
        )
    return encodings.get(word)


def divide(checkpoint: Checkpoint, family: Family, codec: Codec | None, dense: Iterable[DenseTensor]) -> Division:
    """Take from `dense`, what would go to dense shards, the matrices that `codec` is to encode (None: none)."""
    tensors = list(dense)
    if codec is None:
        return Division(None, (), tuple(tensors), {})
    depth, claims = depth_of(checkpoint.text_config) or 0, Claims(checkpoint.config)
    found: list[EncodedMatrix] = []
    stay: dict[str, str] = {}
    gone: set[str] = set()
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        if module == tensor.name or not family.encodes(module, depth):
            continue
        matrix = _matrix(module, tensor, claims)
        reason = "no matrix" if matrix is None else unfit(codec, matrix.rows, matrix.columns)
        if matrix is None or reason is not None:
            stay[tensor.source.name] = str(reason)
            continue
        found.append(matrix)
        gone |= {r.tensor.name for r in matrix.stored.values()}
    found += _tied(checkpoint, codec, {t.name: t for t in tensors}, claims, stay)
    rest = tuple(t for t in tensors if t.source.name not in gone)
    if not found:
        return Division(None, (), rest, stay)
    codec = codec.for_sources({m.source for m in found if codec.takes(m.source, m.rows, m.columns) is None})
    return Division(codec, tuple(sorted(found, key=lambda m: natural(m.name))), rest, stay)


def _matrix(module: str, tensor: DenseTensor, claims: Claims) -> EncodedMatrix | None:
    """The matrix that a dense tensor holds; None if it holds none."""
    if tensor.encoding is not None:
        rows, columns = tensor.shape
        return EncodedMatrix(module, rows, columns, tensor.encoding, tensor.stored)
    claim = claims.of({"weight": tensor.source}) if len(tensor.shape) == 2 else None
    if not isinstance(claim, Claim) or claim.encoding.plain is None:
        return None
    return EncodedMatrix(module, claim.rows, claim.columns, claim.encoding, {CODES: whole(tensor.source)})


def unfit(codec: Codec, rows: int, columns: int) -> str | None:
    """Why a matrix of this shape is not encoded; None if it is."""
    if rows < FEWEST_ROWS:
        return f"fewer than {FEWEST_ROWS} rows"
    try:
        codes = matrix_record(codec, rows, columns).slot(CODES)
    except LayoutError as error:
        return error.message
    return "less than a page of codes" if codes.nbytes < PAGE else None


def ties_head(*configs: Config) -> bool:
    """Whether every statement of a config and its parts says that the head is the embedding table.

    Which default holds for a model that says nothing is not ours.
    """
    said = [place["tie_word_embeddings"] for place in configs if "tie_word_embeddings" in place]
    return bool(said) and all(value is True for value in said)


def _tied(
    checkpoint: Checkpoint, codec: Codec, dense: Mapping[str, DenseTensor], claims: Claims, stay: dict[str, str]
) -> Iterator[EncodedMatrix]:
    """The head of a model that ties it to its embedding table, from the table."""
    stated = ties_head(checkpoint.config, checkpoint.text_config)
    for table, head in TABLES.items():
        tensor = dense.get(f"{table}.weight")
        if tensor is None or f"{head}.weight" in checkpoint.tensors or not stated:
            continue
        matrix = _matrix(head, tensor, claims)
        reason = "no matrix" if matrix is None else unfit(codec, matrix.rows, matrix.columns)
        if matrix is None or reason is not None:
            stay[tensor.source.name] = f"as {head}, {reason}"
        else:
            yield replace(matrix, tied=True)


def savings(checkpoint: Checkpoint, family: Family, dense: Iterable[DenseTensor]) -> dict[str, int]:
    """Bytes that a container would be smaller, by the word of `--dense`; a tied head has none to give back."""
    tensors = list(dense)
    saved = {}
    for word in ENCODED:
        division = divide(checkpoint, family, dense_codec(word), tensors)
        before = sum(t.nbytes for t in tensors) - sum(t.nbytes for t in division.rest)
        after = 0
        if division.encoding is not None:
            after = sum(matrix_record(division.encoding, m.rows, m.columns).nbytes for m in division.matrices)
        saved[word] = before - after
    return saved


def others_read(codec: Codec, dense: Codec | None, modules: Iterable[str], reads_codes: Callable[[str], bool]) -> bool:
    """Whether what `codec` makes `config.json` say of experts describes dense matrices in `dense` too.

    `reads_codes` is the family's answer for a module; `config.json` says `loadable_by` where this is False.
    """
    return dense is None or codec.describes_dense(dense, all(map(reads_codes, modules)))


# -- files -----------------------------------------------------------------------------------------------------------


def _head(encoding: Codec, matrices: Iterable[EncodedMatrix], limit: int = MAX_HEADER) -> bytes:
    return matrices_head(encoding, [(m.name, m.rows, m.columns) for m in matrices], limit)


def matrices_targets(division: Division, header_limit: int = MAX_HEADER) -> tuple[MatricesTarget, ...]:
    """The files of encoded matrices, filled in natural order of names."""
    encoding = division.encoding
    if encoding is None:
        return ()
    groups: list[list[EncodedMatrix]] = []
    room, head_room = 0, 0
    for matrix in division.matrices:
        nbytes = matrix_record(encoding, matrix.rows, matrix.columns).nbytes
        entry = ENTRY_ROOM + 8 * len(matrix.name)
        if not groups or nbytes > room or entry > head_room:
            groups.append([])
            room, head_room = MATRICES_FILE, header_limit - PAGE
        groups[-1].append(matrix)
        room -= nbytes
        head_room -= entry
    targets = []
    for number, group in enumerate(groups, 1):
        size = len(_head(encoding, group, header_limit))
        size += sum(matrix_record(encoding, m.rows, m.columns).nbytes for m in group)
        targets.append(MatricesTarget(matrices_file_name(number, len(groups)), encoding, tuple(group), size))
    return tuple(targets)


# -- bytes -----------------------------------------------------------------------------------------------------------


class MatrixEncoder:
    """The bytes of one matrix's record in pieces: first its codes, a band at a time, then what was kept meanwhile.

    Memory: a band of the source, a band of codes, and all roles but the codes.
    """

    def __init__(self, files: SourceFiles, encoding: Codec, matrix: EncodedMatrix, record: MatrixRecord) -> None:
        self._files, self._encoding, self._matrix, self._record = files, encoding, matrix, record
        self._kept = {s.role: np.empty(s.shape, VIEWS[s.dtype]) for s in record.stored if s.role != CODES}
        self.squared_error = self.squared_norm = 0.0

    def pieces(self, buffer: memoryview) -> Iterator[tuple[memoryview, int]]:
        """(bytes of the record, source bytes read for them), in order; a piece is valid until the next.

        Raises `DataError` (E0702) naming the place of what no container may hold.
        """
        matrix = self._matrix
        others = {role: self._read(r, None) for role, r in matrix.stored.items() if role != CODES}
        extra = sum(array.nbytes for array in others.values())
        for first, count, place in bands(self._encoding, matrix.rows, matrix.columns):
            codes = rows_of(matrix.stored[CODES], slice(first, first + count))
            source, cut = matrix.source.window(matrix.rows, matrix.columns, first, count)
            stored = {role: array[cut[role]] for role, array in others.items()}
            stored[CODES] = self._read(codes, buffer)
            yield self._band(source, stored, first, count, place), codes.nbytes + extra
            extra = 0
        for slot in self._record.slots:
            if slot.part is None:
                yield memoryview(bytes(slot.nbytes)), 0
            elif slot.role != CODES:
                yield _bytes(self._kept[slot.role]), 0

    def _read(self, at: Range, buffer: memoryview | None) -> Array:
        own = buffer is None or len(buffer) < at.nbytes
        data = memoryview(bytearray(at.nbytes)) if own or buffer is None else buffer[: at.nbytes]
        self._files.read_into(at.tensor.file, at.offset, data)
        return np.frombuffer(data, VIEWS[at.tensor.dtype]).reshape(at.shape)

    def _band(
        self, source: Reading, stored: dict[str, Array], first: int, count: int, place: Mapping[str, slice]
    ) -> memoryview:
        """Encode `count` rows from row `first`: their codes; the other roles go where they are kept."""
        encoding, columns = self._encoding, self._matrix.columns
        own = encoding.roles(count, columns)[0]
        codes = np.empty(own.shape, VIEWS[own.dtype])
        out = {role: array[place[role]] for role, array in self._kept.items()} | {CODES: codes}
        try:
            stats, _ = encoding.write(stored, source, count, columns, out)
        except NonFiniteError as error:
            tensor = self._matrix.tensor
            raise DataError(
                f"finite weights expected, found {error.value} at row {first + error.row}, column {error.column}",
                code="E0702", file=tensor.file, tensor=tensor.name,
                remedy="the source is damaged: download it again, or ask its publisher; --dense keep copies such "
                "numbers as they are; nothing was published",
            ) from None  # fmt: skip
        self._count(stats)
        return _bytes(codes)

    def _count(self, stats: EncodeStats) -> None:
        self.squared_error += stats.squared_error
        self.squared_norm += stats.squared_norm


def _bytes(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
