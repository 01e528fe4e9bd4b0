"""One product of a running model: rows of torch by a matrix as it is stored, for experts and dense matrices alike.

Importing this module imports torch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagestone.formats.dense_matrices import bands
from pagestone.formats.dtypes import Array
from pagestone.formats.errors import RequestError
from pagestone.reader.container import Matrix


def multiply(rows: Tensor, matrix: Matrix, threads: int, dtype: torch.dtype | None = None) -> Tensor:
    """[n, rows of the matrix] straight from the codes (specs/products.md), rounded once to `dtype`, by default that
    of `rows` [n, columns]: bfloat16 or float16, `RequestError` (E1229) for others.

    A NaN or Inf among the rows raises `NonFiniteError` with the row.
    """
    wide = dtype == torch.float32
    out = torch.empty(len(rows), matrix.rows, dtype=rows.dtype if dtype is None else dtype, device=rows.device)
    matrix.multiply(_bits(rows.contiguous()), out=out.numpy() if wide else _bits(out), threads=threads)
    return out


def _bits(tensor: Tensor) -> Array:
    """The same memory for a product: uint16 for bfloat16, float16 as it is. `RequestError` for other types."""
    require_native(tensor.dtype)
    tensor = tensor.detach()
    if tensor.dtype == torch.float16:
        half: Array = tensor.numpy()
        return half
    bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
    return bits


def require_native(dtype: torch.dtype) -> None:
    """Refuse (E1229) what native products do not multiply."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise RequestError(
            f"a model in bfloat16 or float16 expected by native products, found {str(dtype).removeprefix('torch.')}",
            code="E1229",
            remedy="use --experts reference",
        )


def is_plain(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Whether the codes are the weights, in the model's own dtype (bf16 containers)."""
    return matrix.codes.dtype == "BF16" and matrix.scales is None and dtype == torch.bfloat16


def rounded(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """[rows, columns] in the model's dtype: decoded in float32 into a new array, rounded once.

    Codes that are the weights are taken where they lie: decoding and rounding would give the same bits.
    """
    if is_plain(matrix, dtype):
        return matrix.codes.torch()
    return torch.from_numpy(matrix.decode()).to(dtype)


def rounded_by_bands(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """`rounded` of a matrix that may be large: no more than some rows are there in float32 at a time."""
    out = torch.empty(matrix.rows, matrix.columns, dtype=dtype)
    for first, count, where in bands(matrix.codec, matrix.rows, matrix.columns):
        stored = {role: view.array[where[role]] for role, view in matrix.stored.items()}
        out[first : first + count] = torch.from_numpy(matrix.codec.values(stored, count, matrix.columns))
    return out
