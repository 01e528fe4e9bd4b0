"""One expert from matrices to record: the step that the pipeline repeats and `verify --source` repeats again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from pagestone.convert.reading import LoadedMatrix
from pagestone.formats.dtypes import VIEWS, Array, to_f32
from pagestone.formats.encodings import Codec, EncodeStats
from pagestone.formats.errors import DataError, NonFiniteError
from pagestone.formats.layer_file import Beside, beside_of
from pagestone.formats.layout import BESIDE, BIAS, PARTS, RecordLayout

DAMAGED = "the source is damaged: download it again, or ask its publisher; nothing was published"
PASSED, REQUANTISED, ZERO_SCALES = "passed through", "requantised", "zero scales"
MATRIX_NOTES = (PASSED, REQUANTISED, ZERO_SCALES)
"""Keys of `EncodedExpert.notes`: matrices whose codes were kept, those that were encoded again, scales of zero."""


@dataclass(slots=True)
class EncodedExpert:
    """What is known of an expert once its record is made: what lies beside it by part and role, statistics by part, and
    what happened."""

    beside: dict[str, dict[str, Array]] = field(default_factory=dict)
    stats: dict[str, EncodeStats] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def put_beside(self, arrays: Beside, expert: int) -> None:
        """Copy what lies beside this expert's record to its rows of a sidecar's arrays."""
        for part, found in self.beside.items():
            for role, own in beside_of(arrays, expert, part).items():
                own[...] = found[role]


def encode_expert(
    codec: Codec, layout: RecordLayout, matrices: dict[str, LoadedMatrix], record: memoryview
) -> EncodedExpert:
    """Fill a record buffer (`layout.stride` bytes, whatever they hold) from an expert's three source matrices.

    Raises `DataError` naming the source tensor, the row and the column where a weight is NaN or Inf, or where a scale
    is none.
    """
    for pad in (slot for slot in layout.slots if slot.part is None):
        record[pad.offset : pad.offset + pad.nbytes] = bytes(pad.nbytes)
    encoded = EncodedExpert()
    for part in PARTS:
        matrix, source = matrices[part], matrices[part].origin
        out: dict[str, Array] = {}
        for slot in layout.of_part(part):
            raw = np.frombuffer(record[slot.offset : slot.offset + slot.nbytes], VIEWS[slot.dtype])
            if slot.role == BIAS:
                assert matrix.bias is not None
                _require_finite(matrix, slot.dtype)
                raw[...] = matrix.bias  # the source's own bits
            else:
                out[slot.role] = raw.reshape(slot.shape)
        encoded.beside[part] = {
            role.name: np.empty(role.shape, VIEWS[role.dtype])
            for role in codec.roles(source.rows, source.columns)
            if role.place == BESIDE
        }
        out |= encoded.beside[part]
        try:
            encoded.stats[part], kept = codec.write(matrix.stored, source.encoding, source.rows, source.columns, out)
            if source.encoding.plain is None:
                encoded.notes[PASSED if kept else REQUANTISED] += 1
                encoded.notes[ZERO_SCALES] += source.encoding.zero_scales(matrix.stored)
        except NonFiniteError as error:
            raise _non_finite(error, part, matrix) from None
    return encoded


def _require_finite(matrix: LoadedMatrix, dtype: str) -> None:
    assert matrix.bias is not None and matrix.origin.bias is not None
    bad = ~np.isfinite(to_f32(matrix.bias, dtype))
    if bad.any():
        tensor = matrix.origin.bias.at.tensor
        raise DataError(
            f"a finite bias expected, found {np.count_nonzero(bad)} NaN or Inf, the first at row {int(np.argmax(bad))}",
            code="E0702", file=tensor.file, tensor=tensor.name, remedy=DAMAGED,
        )  # fmt: skip


def _non_finite(error: NonFiniteError, part: str, matrix: LoadedMatrix) -> DataError:
    tensor = matrix.origin.tensor
    return DataError(
        f"finite weights expected, found {error.value} in {part} at row {error.row}, column {error.column} "
        f"({error.count} such values in this matrix)",
        code="E0702", file=tensor.file, tensor=tensor.name, remedy=DAMAGED,
    )  # fmt: skip
