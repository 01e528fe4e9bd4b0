"""Modules of ours that stand where a model's own dense modules stood: a linear layer over a matrix in an encoding, and
an embedding whose table is not in memory.

A linear layer multiplies as experts do (`reader/experts.py`):

- `native`: from the codes where they lie (specs/products.md), rounded once to the model's type. A bias is added in
  float32 before that.
- `reference`: the matrix is decoded anew for each call and rounded to the model's type; then torch multiplies. Slow,
  obvious, the oracle.

Both have no `weight`: code that reads one would get something else than the layer computes, so it is refused (E1257).

Importing this module imports torch.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from pagestone.formats.errors import DataError, NonFiniteError, RequestError
from pagestone.reader.container import TORCH_NAMES, Matrix
from pagestone.reader.model import NATIVE, Context
from pagestone.reader.multiply import multiply, rounded_by_bands
from pagestone.reader.rows import RowTable


class _NoWeight(nn.Module):
    """A module whose weight nobody may read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def weight(self) -> NoReturn:
        raise RequestError(
            "a module that is only called expected, but this model's code reads its weight, which is not in memory "
            "as such",
            code="E1257",
            tensor=self.name,
            remedy="convert the checkpoint with --dense keep; run it with --io mmap where the embedding is meant",
        )


class EncodedLinear(_NoWeight):
    """`nn.Linear` over a matrix in an encoding: [..., columns] -> [..., rows], in the type of its input.

    `name` is its name in the model. Raises `DataError` (E1232) for an activation that is not finite, where native.
    """

    def __init__(self, name: str, matrix: Matrix, bias: nn.Parameter | None, context: Context) -> None:
        super().__init__(name)
        self.matrix, self.context = matrix, context
        self.in_features, self.out_features = matrix.columns, matrix.rows
        self.register_parameter("bias", bias)

    def extra_repr(self) -> str:
        return repr(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        if self.context.linears != NATIVE:
            return nn.functional.linear(x, rounded_by_bands(self.matrix, x.dtype), self.bias)
        rows = x.reshape(-1, self.matrix.columns)
        threads = self.context.threads or torch.get_num_threads()
        try:
            if self.bias is None:
                out = multiply(rows, self.matrix, threads)
            else:
                out = (multiply(rows, self.matrix, threads, torch.float32) + self.bias.float()).to(x.dtype)
        except NonFiniteError as error:
            raise DataError(
                f"finite activations expected, found {error.value} in token {error.row} of this step",
                code="E1232",
                tensor=self.name,
                remedy="`pagestone verify` tells whether the container is damaged; --experts reference lets NaN and "
                "Inf pass, as transformers does",
            ) from None
        return out.view(*x.shape[:-1], self.matrix.rows)


class RowEmbedding(_NoWeight):
    """`nn.Embedding` over a table whose rows are read: int64 [...] -> [..., columns] in `dtype`, the same bits."""

    def __init__(self, name: str, table: RowTable, dtype: torch.dtype, device: str) -> None:
        super().__init__(name)
        self.table, self._dtype, self._device = table, dtype, device
        self._stored = getattr(torch, TORCH_NAMES[table.entry.dtype])
        self.num_embeddings, self.embedding_dim = table.entry.shape

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, by rows"

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table.read(ids.detach().cpu().reshape(-1).numpy().astype(np.int64))
        if not rows.size:
            return torch.empty(*ids.shape, self.embedding_dim, dtype=self._dtype, device=self._device)
        values = torch.from_numpy(rows).view(self._stored)
        return values.to(self._device, self._dtype).view(*ids.shape, self.embedding_dim)
