"""What an encoding promises, in five contracts: layout, reading, writing, multiplying, telling others.

An encoding that is only read has the first two. One that we write has them all: it is a `Codec`, which is what users
call it, and what they choose on the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagestone.formats import native, products
from pagestone.formats.dtypes import F32, VIEWS, Array, to_f32
from pagestone.formats.errors import NonFiniteError
from pagestone.formats.floats import plain_floats, plainly
from pagestone.formats.layout import CODES, PART_NAMES, RECORD, Role
from pagestone.formats.stats import sum_of_squares

Stored = Mapping[str, Array]
"""The stored arrays of one matrix by role ("codes", "scales", ...), bits as in `VIEWS`."""


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """What encoding cost: sums over the matrix of (w - decoded)^2 and of w^2, in float64 (specs/manifest.md)."""

    squared_error: float
    squared_norm: float


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """What a codec may need to write a truthful `quantization_config`.

    `dense_modules`: full names of every module that keeps a plain weight (so no loader may convert it);
    `shapes`: (rows, columns) of every kind of matrix whose codes it describes: experts, and dense ones kept in FP8;
    `part_names`: what the matrices of an expert are called in its tensors' names.
    """

    dense_modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    part_names: tuple[str, str, str] = PART_NAMES


@dataclass(frozen=True, slots=True)
class Option:
    """A parameter that users may choose: the field `name` of a codec, `--name` on the command line, default first."""

    name: str
    choices: tuple[int, ...]
    help: str


class Layout(ABC):
    """Which tensors hold a matrix [R, C]. Instances are frozen dataclasses whose fields are the parameters."""

    name: ClassVar[str]

    @property
    def parameters(self) -> dict[str, int | str]:
        """Everything that changes the stored bytes, for the manifest and the container id."""
        return {}

    @abstractmethod
    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        """The stored tensors of a [rows, columns] matrix, codes first, in the order in which they lie.

        Raises `LayoutError` where the encoding cannot hold such a matrix.
        """

    def kernel_arguments(self) -> tuple[int, ...]:
        """Parameters that the native kernels take after their arrays."""
        return ()

    def in_record(self, rows: int, columns: int) -> tuple[Role, ...]:
        """The roles without those that lie beside."""
        return tuple(role for role in self.roles(rows, columns) if role.place == RECORD)

    def allocate(self, rows: int, columns: int) -> dict[str, Array]:
        """Fresh arrays of zeros, by role."""
        return {r.name: np.zeros(r.shape, VIEWS[r.dtype]) for r in self.roles(rows, columns)}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Type and shape of one tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One matrix of a checkpoint before it is known how it is stored: its tensors by suffix, and the model's config."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """An encoding that knows a candidate: [rows, columns], and the suffix of the tensor of every role."""

    encoding: Reading
    rows: int
    columns: int
    suffixes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the encoding whose codes these are cannot take a candidate: its code, and the tensor to blame."""

    code: str
    suffix: str
    message: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One way in which stored arrays break the encoding's rules.

    `text` is a sentence with what was expected; `value` is what was found at `row` and `column`, the first of `count`
    elements of the matrix; `role` is where it lies.
    """

    text: str
    role: str
    value: str
    count: int
    row: int
    column: int

    @classmethod
    def at(cls, bad: Array, role: str, value: str, text: str) -> Problem:
        """Of a mask [R, C] of the elements that are bad."""
        row, column = divmod(int(np.argmax(bad)), bad.shape[1])
        return cls(text, role, value, int(np.count_nonzero(bad)), row, column)

    def __str__(self) -> str:
        return self.text


class Reading(Layout):
    """What stored arrays mean, and how a checkpoint's are recognised."""

    plain: ClassVar[str | None] = None
    """The element type of its codes where they are the numbers themselves, which any encoder takes as they are."""
    codes_dtypes: ClassVar[tuple[str, ...]] = ()
    """Element types that its codes have in a checkpoint."""
    spellings: ClassVar[dict[str, tuple[str, ...]]] = {}
    """What the tensor of a role is called below its matrix in checkpoints, by role; looked for in this order."""
    methods: ClassVar[tuple[str, ...]] = ()
    """The `quant_method`s of checkpoints that hold it."""

    @classmethod
    def claims(cls, candidate: Candidate) -> Claim | Refusal | None:
        """What this encoding makes of a candidate; None if its codes are not of this encoding."""
        return None

    @classmethod
    def announced(cls, stated: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` says that matrices are stored so."""
        return False

    @classmethod
    def spelled(cls, candidate: Candidate) -> dict[str, str]:
        """The suffix of every role that the candidate has, the first spelling of each."""
        found = {role: [n for n in names if n in candidate.tensors] for role, names in cls.spellings.items()}
        return {role: names[0] for role, names in found.items() if names}

    @abstractmethod
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        """float32 [R, C]: the values the stored arrays stand for, problems or not."""

    @abstractmethod
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        """Every way in which stored arrays break the encoding's rules (codes, scales, sums)."""

    def described(self, rows: int, columns: int) -> str:
        """In words, for a matrix of this shape."""
        return self.name

    def zero_scales(self, stored: Stored) -> int:
        """Scales of zero, which a source may have over zeros."""
        return 0

    def window(self, rows: int, columns: int, first: int, count: int) -> tuple[Reading, dict[str, slice]]:
        """Rows `first` to `first + count` of a matrix: how they are stored, and the rows of every role's array.

        A role whose first axis is the matrix's rows is cut there, one of another length belongs to all of them.
        """
        return self, {
            role.name: slice(first, first + count) if role.shape[:1] == (rows,) else slice(None)
            for role in self.roles(rows, columns)
        }

    def require_sound(self, stored: Stored, rows: int, columns: int) -> None:
        """Raises `NonFiniteError` with the first problem."""
        for problem in self.problems(stored, rows, columns):
            raise NonFiniteError(problem.count, problem.row, problem.column, problem.value)


class Writing(Layout):
    """How stored arrays are made.

    `encode_definition` is the definition in plain NumPy; `encode` calls the native kernel `encoder` if it is built and
    asked for, with the same result bit for bit.
    """

    encoder: ClassVar[str | None] = None
    """Name of the native kernel that encodes, or None."""
    verb: ClassVar[str] = "encoded"
    """What the plan says of a matrix that it cannot take as it is."""
    options: ClassVar[tuple[Option, ...]] = ()
    """Parameters that are offered on the command line."""

    @abstractmethod
    def encode_definition(self, weight: F32, out: Stored) -> EncodeStats:
        """Encode float32 [R, C] into the preallocated arrays of `out`. Raises `NonFiniteError` on NaN or Inf."""

    def encode(self, source: Array, dtype: str, out: Stored) -> EncodeStats:
        """Encode a contiguous source array [R, C] holding `dtype` (BF16, F16, F32) into `out`.

        Raises `NonFiniteError` naming the first row and column; `out` is then unspecified.
        """
        kernel = native.kernel(self.encoder)
        if kernel is None:
            with plain_floats():
                return self.encode_definition(to_f32(source, dtype), out)
        if not source.flags.aligned:  # legal in a safetensors file, but not for a kernel
            source = source.copy()
        rows, columns = source.shape
        arrays = [out[role.name] for role in self.roles(rows, columns) if role.name in out]
        error, norm, count, first = kernel(source, *arrays, *self.kernel_arguments())
        if count:
            native.raise_non_finite(source, dtype, count, first)
        return EncodeStats(error, norm)

    def for_sources(self, sources: Collection[Reading]) -> Writing:
        """This codec, adjusted to the encodings of the matrices that it will take as they are (none: unchanged)."""
        return self

    def takes(self, source: Reading, rows: int, columns: int) -> str | None:
        """Why a [rows, columns] matrix stored so cannot keep its codes; None if it can, its data permitting."""
        same = (source.name, source.parameters) == (self.name, self.parameters)
        return None if same else f"{self.name} stores other codes"

    def take(self, stored: Stored, source: Reading, rows: int, columns: int, out: Stored) -> bool:
        """Take sound stored arrays as they are into `out`; False (and `out` unspecified) if the data forbids it."""
        for role, array in out.items():
            array[...] = stored[role]
        return True

    @plainly
    def write(self, stored: Stored, source: Reading, rows: int, columns: int, out: Stored) -> tuple[EncodeStats, bool]:
        """Encode what another encoding stores; (statistics against its values, whether its codes were kept).

        Raises `NonFiniteError` for what no container may hold: `source`'s problems, and values that are too large.
        """
        if source.plain is not None:
            return self.encode(stored[CODES], source.plain, out), False
        source.require_sound(stored, rows, columns)
        values = source.values(stored, rows, columns)
        if self.takes(source, rows, columns) is None and self.take(stored, source, rows, columns, out):
            return EncodeStats(0.0, sum_of_squares(values.astype(np.float64))), True
        return self.encode(values, "F32", out), False


class Multiplying(Layout):
    """How a matrix multiplies straight from its stored arrays (specs/products.md)."""

    multiplier: ClassVar[str | None] = None
    """Name of the native kernel that multiplies, or None."""

    @abstractmethod
    def matmul_definition(self, stored: Stored, x: Array, rows: int, columns: int) -> F32:
        """float32 [M, R]: x W^T as specs/products.md defines it, before any rounding to the model's type.

        `x` is BF16 bits (uint16) or float16 [M, C], anything else a `TypeError`; a NaN or Inf in it raises
        `NonFiniteError` naming the token.
        """

    def matmul_arrays(self, stored: Stored, rows: int, columns: int) -> list[Array]:
        """What the native kernel `multiplier` takes between the tokens and the result."""
        return [stored[role.name] for role in self.roles(rows, columns) if role.name in stored]

    def matmul(
        self, stored: Stored, x: Array, rows: int, columns: int, *, out: Array | None = None, threads: int = 1
    ) -> Array:
        """x W^T [M, R] for contiguous `x`, as `matmul_definition` has it, in `out` or in a fresh float32 array.

        The type of `out` says what the result is rounded to, once: float32, uint16 (BF16 bits) or float16. Neither
        `threads` nor the other tokens change any bit. Raises what `matmul_definition` raises.
        """
        out = products.output(x, rows, columns, out)
        kernel = native.kernel(self.multiplier)
        if kernel is None:
            with plain_floats():
                products.store(self.matmul_definition(stored, x, rows, columns), out)
        elif not kernel(x, *self.matmul_arrays(stored, rows, columns), out, *self.kernel_arguments(), threads):
            products.activations(x, columns)  # names the token that is not finite
        return out


class Telling(Layout):
    """What `config.json` says of a container, so that others read right weights or raise."""

    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config",)
    """Where `config.json` states the `quantization_config`."""

    @abstractmethod
    def quantization_config(self, facts: ConfigFacts) -> dict[str, Any] | None:
        """What `config.json` must say so that others read right weights or raise; None if nothing."""

    def keeps_dense(self, claim: Claim) -> bool:
        """Whether a dense matrix stored and named so stays as it is, because this codec's config describes it."""
        return False

    def describes_dense(self, dense: Codec, codes_read: bool) -> bool:
        """Whether this codec's config describes dense matrices encoded in `dense` as well, so that others read right
        weights or raise without a further word. `codes_read`: all of them are modules that others read as codes."""
        return False


class Codec(Reading, Writing, Multiplying, Telling):
    """An encoding that we write: all five contracts."""

    def for_sources(self, sources: Collection[Reading]) -> Codec:
        return self
