"""The routed-experts module that stands where transformers' own stood: one way through, two ways to multiply.

Both do what transformers' eager experts do around the products: experts by ascending id, the rows of one ordered by
(top-k slot, token), gate and up rounded to the model's dtype, its activation and multiplication by torch, the other
product rounded, the routing weight, `index_add_` in the model's dtype.

- `native`: products read the codes where they lie, within the lease (specs/products.md). The result of a product does
  not depend on instruction set, threads or the other tokens.
- `reference`: each expert is decoded in float32 by its codec and rounded once to the model's dtype; then torch
  multiplies. Slow, obvious, the oracle.

Importing this module imports torch.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pagestone.formats.digests import digest
from pagestone.formats.dtypes import to_f32
from pagestone.formats.errors import DataError, NonFiniteError, RequestError
from pagestone.reader import transformers_inside as inside
from pagestone.reader.container import Expert, Matrix
from pagestone.reader.leases import Lease
from pagestone.reader.model import NATIVE, Context, bytes_of
from pagestone.reader.multiply import is_plain, multiply, rounded


def tensor_digest(tensor: Tensor) -> bytes:
    """XXH3-128 of a tensor's bytes, row by row."""
    return digest(bytes_of(tensor))


# -- products ---------------------------------------------------------------------------------------------------------


class Products(Protocol):
    """How one layer multiplies: rows [n, columns] by an expert's matrices, rounded to the rows' dtype.

    No view of the expert may outlive the call.
    """

    def gate_up(self, rows: Tensor, expert: Expert) -> Tensor:
        """[n, 2 * intermediate]: gate, then up; or the two alternating, where the layer wants them so."""

    def down(self, rows: Tensor, expert: Expert) -> Tensor:
        """[n, hidden]."""


class ReferenceProducts:
    """Decoded weights and torch. `alternating`: as gpt_oss has it, `x @ W` with gate's and up's columns in turn."""

    def __init__(self, alternating: bool) -> None:
        self._alternating = alternating

    def gate_up(self, rows: Tensor, expert: Expert) -> Tensor:
        if not self._alternating and is_plain(expert.gate_up, rows.dtype):
            return nn.functional.linear(rows, rounded(expert.gate_up, rows.dtype))
        gate, up = (rounded(m, rows.dtype) for m in (expert.gate, expert.up))
        if self._alternating:
            return rows @ torch.stack([gate, up], dim=1).reshape(-1, gate.shape[1]).t().contiguous()
        return nn.functional.linear(rows, torch.cat([gate, up]))

    def down(self, rows: Tensor, expert: Expert) -> Tensor:
        down = rounded(expert.down, rows.dtype)
        return rows @ down.t().contiguous() if self._alternating else nn.functional.linear(rows, down)


class NativeProducts:
    """Kernels over the codes. Rows must be bfloat16 or float16 and finite (`NonFiniteError` names the row)."""

    def __init__(self, context: Context, alternating: bool) -> None:
        self._context, self._alternating = context, alternating

    def gate_up(self, rows: Tensor, expert: Expert) -> Tensor:
        products = [self._multiply(rows, matrix) for matrix in expert.inner]
        both = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return both.view(len(both), 2, -1).transpose(1, 2).reshape(len(both), -1) if self._alternating else both

    def down(self, rows: Tensor, expert: Expert) -> Tensor:
        return self._multiply(rows, expert.down)

    def _multiply(self, rows: Tensor, matrix: Matrix) -> Tensor:
        return multiply(rows, matrix, self._context.threads or torch.get_num_threads())


def products(context: Context, alternating: bool) -> Products:
    """The products the context asks for."""
    return NativeProducts(context, alternating) if context.experts == NATIVE else ReferenceProducts(alternating)


# -- modules ----------------------------------------------------------------------------------------------------------


class RoutedExperts(nn.Module):
    """Experts with the standard signature: gate and up concatenated, no biases, an activation from the config.

    forward: hidden [tokens, hidden], ids int64 [tokens, k], weights [tokens, k] -> [tokens, hidden].
    """

    alternating = False

    def __init__(self, original: Any, layer: int, context: Context) -> None:
        super().__init__()
        self.layer, self.context = layer, context
        self.num_experts: int = original.num_experts
        self.act_fn: Any = getattr(original, "act_fn", None)
        self.products = products(context, self.alternating)

    def expert(self, rows: Tensor, expert: Expert) -> Tensor:
        """[rows, hidden]: one expert on its rows, before the routing weight."""
        gate, up = self.products.gate_up(rows, expert).chunk(2, dim=-1)
        return self.products.down(self.act_fn(gate) * up, expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        context, observer, layer = self.context, self.context.observer, self.layer
        context.checkpoint()
        if observer is not None:
            observer.layer(layer, "input", tensor_digest(hidden_states))
            observer.layer(layer, "routing", tensor_digest(top_k_index) + tensor_digest(top_k_weights))
        out = torch.zeros_like(hidden_states)
        slots = top_k_index.t()  # [k, tokens]: `where` below then finds rows by slot, then by token
        experts = [e for e in torch.unique(top_k_index).tolist() if e < self.num_experts]
        with context.store.step(layer, experts) as step:
            for e in experts:
                slot, token = torch.where(slots == e)
                with step.lease(e) as lease:
                    try:
                        added = self.expert(hidden_states[token], lease.expert)
                    except NonFiniteError as error:
                        raise self._non_finite(error, lease, int(token[error.row])) from None
                added = (added * top_k_weights[token, slot, None]).to(out.dtype)
                if observer is not None:
                    observer.expert(layer, e, tensor_digest(added))
                out.index_add_(0, token, added)
        if observer is not None:
            observer.layer(layer, "output", tensor_digest(out))
        return out

    def _non_finite(self, error: NonFiniteError, lease: Lease, token: int) -> DataError:
        return DataError(
            f"layer {self.layer}, expert {lease.number}: finite activations expected, found {error.value} in "
            f"token {token} of this step",
            code="E1232",
            file=lease.layer.path,
            remedy="`pagestone verify` tells whether the container is damaged; --experts reference lets NaN and Inf "
            "pass, as transformers does",
        )


class GptOssExperts(RoutedExperts):
    """gpt_oss: biases, a clamped activation, `x @ W` with W [hidden, 2 * intermediate], gate and up alternating in it.

    Records hold gate and up apart, row by row, and biases de-interleaved; they are put back together here. Biases are
    added in the model's dtype to products that were rounded to it.
    """

    alternating = True

    def __init__(self, original: Any, layer: int, context: Context) -> None:
        super().__init__(original, layer, context)
        self.apply_gate: Callable[[Tensor], Tensor] = inside.gate_of(original)

    def expert(self, rows: Tensor, expert: Expert) -> Tensor:
        gate, up, down = (_bias(m, rows.dtype) for m in (expert.gate, expert.up, expert.down))
        both = self.products.gate_up(rows, expert) + torch.stack([gate, up], dim=1).reshape(-1)
        return self.products.down(self.apply_gate(both), expert) + down


def _bias(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    if matrix.bias is None:
        raise RequestError(
            "experts with biases expected, found none in the container",
            code="E1225",
            remedy="convert the checkpoint again with a version that keeps them",
        )
    return torch.tensor(to_f32(matrix.bias.array, matrix.bias.dtype)).to(dtype)
