"""grouped: int8 codes `weight_q` under one F32 scale for every 32 of a row, `weight_qscale`: read only (for tests)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagestone.formats.dtypes import F32
from pagestone.formats.encodings import Candidate, Claim, Problem, Reading, Refusal, Stored
from pagestone.formats.floats import plainly
from pagestone.formats.layout import Role

GROUP = 32


@dataclass(frozen=True, slots=True)
class Grouped(Reading):
    name: ClassVar[str] = "grouped"
    codes_dtypes: ClassVar[tuple[str, ...]] = ("I8",)
    spellings: ClassVar[dict[str, tuple[str, ...]]] = {"codes": ("weight_q", "packed_q"), "scales": ("weight_qscale",)}
    methods: ClassVar[tuple[str, ...]] = ("grouped",)

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        return (
            Role("codes", "weight_q", "I8", (rows, columns)),
            Role("scales", "weight_qscale", "F32", (rows, columns // GROUP)),
        )

    @classmethod
    def claims(cls, candidate: Candidate) -> Claim | Refusal | None:
        found = cls.spelled(candidate)
        if "codes" not in found:
            return None
        codes = candidate.tensors[found["codes"]]
        if "scales" not in found:
            return Refusal("E0513", found["codes"], "a weight_qscale beside these codes expected, found none")
        scales = candidate.tensors[found["scales"]]
        if codes.dtype != "I8" or len(codes.shape) != 2 or scales.dtype != "F32":
            return Refusal("E0514", found["codes"], "I8 codes [R, C] under F32 scales expected")
        if scales.shape != (codes.shape[0], codes.shape[1] // GROUP) or codes.shape[1] % GROUP:
            return Refusal("E0515", found["scales"], f"a scale for every {GROUP} expected, found {list(scales.shape)}")
        return Claim(cls(), *codes.shape, found)

    @classmethod
    def announced(cls, stated: Mapping[str, Any]) -> bool:
        return stated.get("quant_method") == "grouped"

    @plainly
    def values(self, stored: Stored, rows: int, columns: int) -> F32:
        with np.errstate(invalid="ignore", over="ignore"):
            found: F32 = stored["codes"].astype(np.float32) * self._scales(stored)
        return found

    @plainly
    def problems(self, stored: Stored, rows: int, columns: int) -> Iterator[Problem]:
        bad = ~np.isfinite(self._scales(stored))
        if bad.any():
            yield Problem.at(bad, "scales", "a scale that is no number", "finite scales expected")

    @staticmethod
    def _scales(stored: Stored) -> F32:
        return np.repeat(stored["scales"], GROUP, axis=1)


ENCODINGS = (Grouped,)
