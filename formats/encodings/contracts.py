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
from pagestone.formats.floats import plain_floats, plainly
from pagestone.formats.layout import PART_NAMES, RECORD, Role
from pagestone.formats.quantised import Form, Quantised
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


class Reading(Layout):
    """What stored arrays mean."""

    @abstractmethod
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        """float32 [R, C]: the values the stored arrays stand for."""

    @abstractmethod
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[str]:
        """One sentence for every way in which stored arrays break the encoding's rules (codes, scales, sums)."""


class Writing(Layout):
    """How stored arrays are made.

    `encode_definition` is the definition in plain NumPy; `encode` calls the native kernel `encoder` if it is built and
    asked for, with the same result bit for bit.
    """

    encoder: ClassVar[str | None] = None
    """Name of the native kernel that encodes, or None."""
    lossless_from: ClassVar[tuple[str, ...]] = ()
    """Source types whose every value survives."""
    verb: ClassVar[str] = "encoded"
    """What the plan says of a matrix from any other type."""
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

    def for_scales(self, dtypes: Collection[str]) -> Writing:
        """This codec, adjusted to the scale types of the quantised matrices it will take (none: unchanged)."""
        return self

    def adopts(self, form: Form) -> str | None:
        """Why a matrix quantised in this form cannot keep its codes; None if it can, its data permitting."""
        return f"{self.name} stores other codes"

    def adopt(self, source: Quantised, out: Stored) -> bool:
        """Take codes and scales as they are into `out`; False (and `out` unspecified) if the data forbids it."""
        return False

    @plainly
    def encode_quantised(self, source: Quantised, out: Stored) -> tuple[EncodeStats, bool]:
        """Encode a quantised matrix; (statistics against its values, whether its codes were kept).

        Raises `NonFiniteError` for what no container may hold, see `Quantised.values`.
        """
        values = source.values()
        if self.adopts(source.form) is None and self.adopt(source, out):
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

    def keeps_dense(self, form: Form) -> bool:
        """Whether a dense matrix quantised in this form stays as it is, because this codec's config describes it."""
        return False


class Codec(Reading, Writing, Multiplying, Telling):
    """An encoding that we write: all five contracts."""

    def for_scales(self, dtypes: Collection[str]) -> Codec:
        return self
