"""Plain floats in F16 and F32: read, never written. BF16 is in bf16.py: it is written too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pagestone.formats.dtypes import F32, to_f32
from pagestone.formats.encodings.contracts import Candidate, Claim, Problem, Reading, Refusal, Stored
from pagestone.formats.floats import plainly
from pagestone.formats.layout import CODES, Role
from pagestone.formats.stats import value_text


class Plain(Reading):
    """codes `weight` [R, C]: the numbers themselves, in the type `plain`."""

    plain: ClassVar[str]
    spellings: ClassVar[dict[str, tuple[str, ...]]] = {CODES: ("weight",)}

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        return (Role(CODES, "weight", self.plain, (rows, columns)),)

    @classmethod
    def claims(cls, candidate: Candidate) -> Claim | Refusal | None:
        found = cls.spelled(candidate)
        codes = candidate.tensors.get(found.get(CODES, ""))
        if codes is None or codes.dtype != cls.plain:
            return None
        if len(codes.shape) != 2 or 0 in codes.shape:
            return Refusal("E0510", found[CODES], f"a non-empty matrix expected, found {list(codes.shape)}")
        return Claim(cls(), *codes.shape, found)

    @plainly
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        return to_f32(stored[CODES], self.plain)

    @plainly
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        values = self.values(stored, rows, columns)
        bad = ~np.isfinite(values)
        if bad.any():
            row, column = divmod(int(np.argmax(bad)), columns)
            text = (
                f"codes expected to be finite, found {np.count_nonzero(bad)} of Inf or NaN, "
                f"the first at row {row}, column {column}"
            )
            yield Problem.at(bad, CODES, value_text(float(values[row, column])), text)


@dataclass(frozen=True)
class F16(Plain):
    name: ClassVar[str] = "f16"
    plain: ClassVar[str] = "F16"
    codes_dtypes: ClassVar[tuple[str, ...]] = ("F16",)


@dataclass(frozen=True)
class F32Plain(Plain):
    name: ClassVar[str] = "f32"
    plain: ClassVar[str] = "F32"
    codes_dtypes: ClassVar[tuple[str, ...]] = ("F32",)


ENCODINGS = (F16, F32Plain)
