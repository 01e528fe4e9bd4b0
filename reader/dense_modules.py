"""What becomes of a model's own dense modules: which tensors of a container fill them, and where ours stand instead.

The model is one of transformers, empty; nothing of it is touched before everything was found to fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagestone.formats.errors import DataError
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.reader import transformers_inside as inside
from pagestone.reader.container import TORCH_NAMES
from pagestone.reader.dense import DenseCodes, DenseTensors, dense_codes
from pagestone.reader.dense_costs import DenseUse
from pagestone.reader.linears_guard import embedding_problem, require_linear
from pagestone.reader.model import NATIVE, Context

if TYPE_CHECKING:
    import torch

WEIGHT = ".weight"


@dataclass(slots=True)
class Places:
    """Where a container's dense tensors go: the model's names by the container's, of `tensors` and of modules whose
    matrices are encoded (`linears`).

    `codes` are the matrices among `tensors` that are decoded, by the name of their codes, `table` is the one that may
    be read by rows (None if none may), `ignored` is what the model has no use for.
    """

    tensors: dict[str, str]
    linears: dict[str, str]
    codes: dict[str, DenseCodes]
    table: str | None
    ignored: list[str] = field(default_factory=list)

    @property
    def belonging(self) -> set[str]:
        """Tensors that stand with codes."""
        return {name for matrix in self.codes.values() for name in matrix.names.values()}

    @property
    def encoded(self) -> set[str]:
        """The model's names of weights that are in an encoding."""
        return {name + WEIGHT for name in self.linears.values()}

    def use(self, entries: Mapping[str, TensorEntry], targets: Mapping[str, torch.dtype]) -> DenseUse:
        """What it costs is computed from this; `targets` are the types in which the model's tensors run."""
        made = dict.fromkeys(self.belonging, 0)
        for theirs, ours in self.tensors.items():
            entry = entries[theirs]
            if (theirs in self.codes or stored_type(entry) != targets[ours]) and theirs != self.table:
                made[theirs] = int(np.prod(entry.shape, dtype=np.int64)) * targets[ours].itemsize
        tables = frozenset() if self.table is None else frozenset({self.table})
        return DenseUse(frozenset(self.tensors) | self.belonging, tables, frozenset(self.linears), made)


def stored_type(entry: TensorEntry) -> Any:
    """torch's type of what is stored, None for one it does not know."""
    import torch

    return getattr(torch, TORCH_NAMES[entry.dtype]) if entry.dtype in TORCH_NAMES else None


def find_places(
    model: Any, expected: Collection[str], entries: Mapping[str, TensorEntry], matrices: Collection[str], root: Path
) -> Places:
    """Where the tensors called as in `entries`, and the encoded `matrices`, belong in a model that expects the weights
    `expected`. Raises `DataError` (E1207, E1224)."""
    names = inside.renamed(model, entries)
    used = {theirs: ours for theirs, ours in names.items() if ours in expected}
    modules = inside.renamed(model, [name + WEIGHT for name in matrices])
    linears = {theirs: ours for theirs, ours in modules.items() if ours in expected}
    twice = sorted(set(used.values()) & set(linears.values()))
    if twice:
        raise DataError(
            "one matrix expected, found one that is plain and one that is encoded", code="E1207", file=root,
            tensor=twice[0], remedy="convert the checkpoint again",
        )  # fmt: skip
    codes = dense_codes(used, entries, root)
    short = {theirs.removesuffix(WEIGHT): ours.removesuffix(WEIGHT) for theirs, ours in linears.items()}
    places = Places(used, short, codes, None)
    places.table = _table(model, places, entries)
    unused = {*entries, *matrices} - used.keys() - places.belonging - short.keys()
    places.ignored = sorted(unused)
    return places


def _table(model: Any, places: Places, entries: Mapping[str, TensorEntry]) -> str | None:
    """The container's name of the embedding table, if nothing but the embedding uses it; else None."""
    embedding = model.get_input_embeddings()
    name = next((n for n, module in model.named_modules() if module is embedding), None)
    if name is None or embedding_problem(model, name) is not None:
        return None
    weight = name + WEIGHT
    theirs = next((t for t, ours in places.tensors.items() if ours == weight), None)
    if (
        theirs is None
        or theirs in places.codes
        or entries[theirs].dtype not in TORCH_NAMES
        or not entries[theirs].nbytes
    ):
        return None
    filled = {*places.tensors.values(), *places.encoded}
    tied = {n for pair in inside.tied(model).items() if weight in pair for n in pair}
    return theirs if tied <= filled else None


def put_modules(
    model: Any, places: Places, dense: DenseTensors, context: Context, targets: Mapping[str, torch.dtype], root: Path
) -> None:
    """Put our modules where the model has its own for what is in an encoding, or read by rows.

    Raises `RequestError` (E1229, E1256).
    """
    from pagestone.reader.linears import EncodedLinear, RowEmbedding
    from pagestone.reader.multiply import require_native

    fresh: dict[str, Any] = {}
    for theirs, ours in sorted(places.linears.items()):
        matrix = dense.matrices[theirs]
        original = require_linear(model, ours, matrix.rows, matrix.columns, root)
        if context.linears == NATIVE:
            require_native(targets[ours + WEIGHT])
        fresh[ours] = EncodedLinear(ours, matrix, original.bias, context)
    if places.table in dense.tables:
        weight = places.tensors[places.table]
        name = weight.removesuffix(WEIGHT)
        fresh[name] = RowEmbedding(name, dense.tables[places.table], targets[weight], context.device)
    inside.untie(model, {name + WEIGHT for name in fresh})
    for name, module in fresh.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
