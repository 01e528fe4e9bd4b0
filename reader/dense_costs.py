"""What dense tensors cost in memory, computed from headers before any of them is loaded.

A host knows which of a container's tensors its model uses, and which it makes others of: that is a `DenseUse`. Where
there is no host (torch is not installed), `likely_use` says what models use of containers as a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagestone.formats.layout import align_up
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.reader.container import Container
from pagestone.reader.dense import ALIGNMENT, BY_ROWS, READ_AT_ONCE, dense_entries, encoded_matrices
from pagestone.reader.rows import memory_of

UNUSED = ("mtp.", "model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
"""How names begin of tensors that no language model uses."""
TABLE = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class DenseUse:
    """What a model does with a container's dense tensors, all by the container's names.

    `names` are the plain tensors it takes, `tables` those of them that are read by rows where rows are read at all;
    `matrices` are modules whose encoded matrices it takes. `made` are the bytes of what is made anew of a tensor (cast
    to the type it runs in, decoded from codes), whose own bytes are then let go of; 0 where another's result holds it.
    """

    names: frozenset[str]
    tables: frozenset[str] = frozenset()
    matrices: frozenset[str] = frozenset()
    made: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DenseCosts:
    """Bytes of dense tensors; all but the last four are in memory as long as the model is."""

    tensor_bytes: int
    """Plain tensors, in the types they run in."""
    matrix_bytes: int
    """Records of encoded matrices."""
    row_bytes: int
    """Rows of tables kept in memory, and the digests of all their rows."""
    table_bytes: int
    """Tables on disk of which only rows are read."""
    loading_bytes: int
    """Memory that loading takes beside the above, and gives back."""
    decoded_bytes: int
    """The largest encoded matrix decoded to 16 bits: what reference products take for a moment."""
    mapped_bytes: int
    """What is mapped instead of read: in the page cache, where no cap of this process holds."""

    @property
    def resident(self) -> int:
        """Bytes in memory as long as the model is."""
        return self.tensor_bytes + self.matrix_bytes + self.row_bytes


def likely_use(container: Container) -> DenseUse:
    """What models use as a rule: all but vision and MTP, the embedding table by rows unless a plain head is tied to it.

    Types are taken to be those a tensor is stored in.
    """
    entries = dense_entries(container)
    matrices = frozenset(encoded_matrices(container))
    names = frozenset(n for n in entries if not n.startswith(UNUSED))
    heads = {n for n in entries if n == "lm_head.weight"} | {n for n in matrices if n == "lm_head"}
    tables = frozenset(n for n in names if n.endswith(TABLE)) if heads else frozenset()
    return DenseUse(names, tables, matrices)


def dense_costs(container: Container, use: DenseUse | None = None, mode: str = "direct") -> DenseCosts:
    """What `use` (by default `likely_use`) costs beside a store of that mode: read, by rows for those of `BY_ROWS`, or
    mapped ("mmap").

    Only headers are read. `DataError` as `dense_entries` and `encoded_matrices`.
    """
    use = likely_use(container) if use is None else use
    places = dense_entries(container)
    entries = {name: places[name][1] for name in use.names}
    matrices = [p for name, p in encoded_matrices(container).items() if name in use.matrices]
    records = sum(p.record.nbytes for p in matrices)
    decoded = max((2 * p.record.rows * p.record.columns for p in matrices), default=0)
    made = sum(align_up(n, ALIGNMENT) for n in use.made.values())
    if mode == "mmap":
        kept = sum(e.nbytes for e in entries.values())
        return DenseCosts(made, 0, 0, 0, 0, decoded, kept + records)
    tables = {name: entries[name] for name in use.tables if mode in BY_ROWS}
    rows = sum(memory_of(e) for e in tables.values())
    plain = sum(_kept(e) for name, e in entries.items() if name not in use.made and name not in tables)
    passing = sum(_kept(entries[name]) for name in use.made)
    return DenseCosts(
        plain + made, records, rows, sum(e.nbytes for e in tables.values()), passing + 2 * READ_AT_ONCE, decoded, 0
    )


def _kept(entry: TensorEntry) -> int:
    return align_up(entry.nbytes, ALIGNMENT)
