"""Codecs: how one matrix is stored. A codec is one module here; its file name need not be listed anywhere.

A module defines `CODECS`, a tuple of `Codec` classes. `get` makes an instance by name and parameters.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from pagestone.formats import native, products
from pagestone.formats.dtypes import F32, VIEWS, Array, to_f32
from pagestone.formats.errors import RequestError
from pagestone.formats.floats import plainly
from pagestone.formats.layout import PART_NAMES, MatrixTensor
from pagestone.formats.quantised import Form, Quantised
from pagestone.formats.stats import sum_of_squares

Stored = Mapping[str, Array]
"""The stored arrays of one matrix by role ("codes", "scales", "biases", "row_sums"), bits as in `VIEWS`."""


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


class Codec(ABC):
    """One way to store a matrix [R, C]. Instances are frozen dataclasses whose fields are the parameters.

    `encode_definition` and `matmul_definition` are definitions in plain NumPy; `encode` and `matmul` call the native
    kernels `encoder` and `multiplier` if they are built and asked for, with the same result bit for bit.
    """

    name: ClassVar[str]
    encoder: ClassVar[str | None] = None
    """Name of the native kernel that encodes, or None."""
    multiplier: ClassVar[str | None] = None
    """Name of the native kernel that multiplies, or None."""
    lossless_from: ClassVar[tuple[str, ...]] = ()
    """Source types whose every value survives."""
    verb: ClassVar[str] = "encoded"
    """What the plan says of a matrix from any other type."""
    options: ClassVar[tuple[Option, ...]] = ()
    """Parameters that are offered on the command line."""
    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config",)
    """Where `config.json` states the `quantization_config`."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, int | str]:
        """Everything that changes the stored bytes, for the manifest and the container id."""

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> tuple[MatrixTensor, ...]:
        """Stored tensors of a [rows, columns] matrix; raises `LayoutError` where the codec cannot hold it."""

    def sidecar(self, rows: int) -> tuple[MatrixTensor, ...]:
        """Tensors of one matrix that go to the layer's sidecar file instead of the record."""
        return ()

    @abstractmethod
    def encode_definition(self, weight: F32, out: Stored) -> EncodeStats:
        """Encode float32 [R, C] into the preallocated arrays of `out`. Raises `NonFiniteError` on NaN or Inf."""

    @abstractmethod
    def decode(self, stored: Stored, rows: int, columns: int) -> F32:
        """float32 [R, C]: the values the stored arrays stand for."""

    @abstractmethod
    def matmul_definition(self, stored: Stored, x: Array, rows: int, columns: int) -> F32:
        """float32 [M, R]: x W^T as specs/products.md defines it, before any rounding to the model's type.

        `x` is BF16 bits (uint16) or float16 [M, C], anything else a `TypeError`; a NaN or Inf in it raises
        `NonFiniteError` naming the token.
        """

    @abstractmethod
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[str]:
        """One sentence for every way in which stored arrays break the codec's rules (codes, scales, sidecar)."""

    @abstractmethod
    def quantization_config(self, facts: ConfigFacts) -> dict[str, Any] | None:
        """What `config.json` must say so that others read right weights or raise; None if nothing."""

    def for_scales(self, dtypes: Collection[str]) -> Codec:
        """This codec, adjusted to the scale types of the quantised matrices it will take (none: unchanged)."""
        return self

    def adopts(self, form: Form) -> str | None:
        """Why a matrix quantised in this form cannot keep its codes; None if it can, its data permitting."""
        return f"{self.name} stores other codes"

    def adopt(self, source: Quantised, out: Stored) -> bool:
        """Take codes and scales as they are into `out`; False (and `out` unspecified) if the data forbids it."""
        return False

    def keeps_dense(self, form: Form) -> bool:
        """Whether a dense matrix quantised in this form stays as it is, because this codec's config describes it."""
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

    def kernel_arguments(self) -> tuple[int, ...]:
        """Parameters that the native kernels take after their arrays."""
        return ()

    def matmul_arrays(self, stored: Stored) -> list[Array]:
        """What the native kernel `multiplier` takes between the tokens and the result."""
        return [stored[role] for role in ("codes", "scales", "biases", "row_sums") if role in stored]

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
            products.store(self.matmul_definition(stored, x, rows, columns), out)
        elif not kernel(x, *self.matmul_arrays(stored), out, *self.kernel_arguments(), threads):
            products.activations(x, columns)  # names the token that is not finite
        return out

    def encode(self, source: Array, dtype: str, out: Stored) -> EncodeStats:
        """Encode a contiguous source array [R, C] holding `dtype` (BF16, F16, F32) into `out`.

        Raises `NonFiniteError` naming the first row and column; `out` is then unspecified.
        """
        kernel = native.kernel(self.encoder)
        if kernel is None:
            return self.encode_definition(to_f32(source, dtype), out)
        if not source.flags.aligned:  # legal in a safetensors file, but not for a kernel
            source = source.copy()
        arrays = [out[role] for role in ("codes", "scales", "biases", "row_sums") if role in out]
        error, norm, count, first = kernel(source, *arrays, *self.kernel_arguments())
        if count:
            native.raise_non_finite(source, dtype, count, first)
        return EncodeStats(error, norm)

    def allocate(self, rows: int, columns: int) -> dict[str, Array]:
        """Fresh arrays for `encode`, by role."""
        wanted = self.tensors(rows, columns) + self.sidecar(rows)
        return {t.role: np.zeros(t.shape, VIEWS[t.dtype]) for t in wanted}


@cache
def registry() -> dict[str, type[Codec]]:
    """Every codec class by name, found by walking this folder in order of file names."""
    found: dict[str, type[Codec]] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        classes: Sequence[type[Codec]] = importlib.import_module(f"{__name__}.{module}").CODECS
        for cls in classes:
            if cls.name in found:
                raise ValueError(f"two codecs are called {cls.name}")
            found[cls.name] = cls
    return found


def get(name: str, parameters: Mapping[str, int | str] | None = None) -> Codec:
    """The codec called `name` with its parameters (defaults for those left out).

    Raises `RequestError` for an unknown codec or parameter.
    """
    cls = registry().get(name)
    if cls is None:
        raise RequestError(
            f"codec expected to be one of {', '.join(sorted(registry()))}, found {name!r}",
            code="E0101",
            remedy="use a version of pagestone that knows this codec",
        )
    try:
        return cls(**dict(parameters or {}))
    except (TypeError, ValueError) as error:
        message = f"codec {name}: parameters {dict(parameters or {})!r} not understood: {error}"
        raise RequestError(message, code="E0102", remedy="use a version of pagestone that knows them") from None
