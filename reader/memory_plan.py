"""What running a model takes, line by line, under a cap for all of it; what is left is the cache of experts.

    plan = plan_memory(container, Loading(), Needs(cap=4 << 30))
    print(plan.text())
    store = open_store(container, StoreOptions("direct", plan.cache_bytes))

No model is loaded for a plan, and no library is needed: what the process itself takes is measured where it holds the
libraries already, else estimated.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagestone.formats.errors import RequestError
from pagestone.formats.text import size_text
from pagestone.reader.budget import all_records, largest_record, row_sum_bytes
from pagestone.reader.container import Container
from pagestone.reader.dense_costs import dense_costs, likely_use
from pagestone.reader.files import MachineErrors
from pagestone.reader.footprint import COMPUTED, ESTIMATED, MEASURED, Footprint, footprint
from pagestone.reader.memory import process_memory
from pagestone.reader.model import NATIVE, Loading
from pagestone.reader.text import TOKENIZER_FILES

CONTEXT = 8192
"""Tokens of the context unless more is asked for: the published 262,144 would take gigabytes."""
LEAST_CONTEXT = 512
"""Tokens that a context has at least if nobody asks for fewer."""
STEP = 64
"""A context that is chosen is a multiple of it."""
SHARE = 2
"""A context that is chosen takes at most 1/SHARE of what experts could have."""
LIBRARIES = 512 << 20
"""Bytes of an interpreter with torch and transformers, where they are not there to be measured."""
M_MMAP_THRESHOLD = -3
"""The parameter's number in <malloc.h>."""
MAPPED = 4 << 20
"""Bytes from which memory is mapped, and given back at once."""
GROWTH = 48 << 20
"""Bytes that libraries take when they are first used: pages of code, threads, kernels made for this processor."""
KERNELS_KEPT = 32
"""Kernels that torch keeps made: a token needs a few; a prompt needs one for each shape and number of rows, once."""
SLACK = 1 / 64
"""What allocators keep and tables of pages take, of everything else."""
TOKENIZER = 14
"""Bytes in memory for every byte of a tokenizer.json."""
LOADING = 22
"""The same at most while it is loaded; a vocabulary of 248,320 took 17."""
PROCESS, VOCABULARY, DENSE, TABLE_ROWS, DECODED, ROWS, STATE, WORKING, PRODUCTS, TRANSIENTS, EXPERTS = (
    "interpreter and libraries", "tokenizer", "dense tensors", "rows of embeddings", "a dense matrix decoded",
    "row sums of experts", "state for the context", "working space of a prompt", "experts being decoded",
    "transients and slack", "experts",
)  # fmt: skip
"""The names of lines."""


@dataclass(frozen=True, slots=True)
class Line:
    """One part of a plan: bytes, and how they are known ("measured", "computed" or "estimated")."""

    name: str
    nbytes: int
    known: str = COMPUTED
    detail: str = ""

    def table(self) -> dict[str, Any]:
        """For --json."""
        return {"name": self.name, "bytes": self.nbytes, "known": self.known, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Needs:
    """What is asked of a plan: `cap` bytes for everything.

    `context` is tokens, None to let the plan choose; `prompt` the most tokens that are fed at once, None for as many as
    the context has; `logits` the most rows of logits that are made at once. `io` is one of `store.MODES`.
    """

    cap: int
    context: int | None = None
    io: str = "direct"
    prompt: int | None = None
    logits: int = 1


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything a running model takes; `lines` and `cache_bytes` together are the cap, or less where less is needed.

    `cache_bytes` are for expert records: what is left, at most all of them. `smallest` is the least cap with which this
    would run at all: a cache of one record, and the context asked for, or the least that is chosen. `records` are all
    records there are.
    """

    cap: int
    context: int
    lines: tuple[Line, ...]
    cache_bytes: int
    smallest: int
    records: int
    io: str = "direct"
    notes: tuple[str, ...] = field(default=())

    def line(self, name: str) -> int:
        """Bytes of the lines of a name."""
        return sum(line.nbytes for line in self.lines if line.name == name)

    def table(self) -> dict[str, Any]:
        """For --json."""
        lines = [*self.lines, Line(EXPERTS, self.cache_bytes, COMPUTED, self._held())]
        return {
            "cap": self.cap, "context": self.context, "io": self.io, "lines": [line.table() for line in lines],
            "cache_bytes": self.cache_bytes, "smallest": self.smallest, "notes": list(self.notes),
        }  # fmt: skip

    def _held(self) -> str:
        share = min(1.0, self.cache_bytes / self.records) if self.records else 1.0
        return f"what is left: {100 * share:.1f} % of all records" if self.io == "direct" else ""

    def text(self) -> str:
        """The plan, a line each, for people."""
        rows = [*self.lines, Line(EXPERTS, self.cache_bytes, COMPUTED, self._held())]
        width = max(len(line.name) for line in rows)
        said = [
            f"  {line.name:<{width}}{size_text(line.nbytes):>12}  {', '.join(filter(None, (line.known, line.detail)))}"
            for line in rows
            if line.nbytes
        ]
        head = f"memory: {size_text(self.cap)} for everything, a context of {self.context:,} tokens"
        return "\n".join([head, *said, *(f"  {note}" for note in self.notes)])


# -- lines ------------------------------------------------------------------------------------------------------------


def settle_allocator() -> None:
    """Have the C library map what is large, and give it back when it is freed, where it can be told to.

    Left alone, it raises the size from which it does so to 32 MiB as it goes, and keeps what is smaller: 160 MiB more
    at the peak of a prompt of 2,000 tokens. Torch's kernels for BF16 are made for each shape and number of rows, and
    1,024 of them kept in two places: 600 MiB after some prompts of different lengths. Both are read when first used.
    """
    for kept in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(kept, str(KERNELS_KEPT))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)


def trim() -> None:
    """Give back to the system what was freed, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def process_line(used: int = 0) -> Line:
    """What this process takes now, without `used` bytes that have lines of their own, and what libraries will add."""
    trim()
    found = process_memory()
    if found is None:
        return Line(PROCESS, LIBRARIES + GROWTH, ESTIMATED)
    return Line(PROCESS, max(0, found.now - used) + GROWTH, MEASURED, f"and {size_text(GROWTH)} once they are used")


def libraries_line() -> Line:
    """The same where libraries are not loaded."""
    return Line(PROCESS, LIBRARIES + GROWTH, ESTIMATED, "libraries are not loaded here")


def tokenizer_line(root: Path, each: int = LOADING) -> Line | None:
    """What the tokenizer in a directory will take, by default at most, while it is loaded; None if there is none.

    `each` is bytes in memory for every byte of its file.
    """
    with MachineErrors(root, "looking for its tokenizer"):
        sizes = [file.stat().st_size for name in TOKENIZER_FILES if (file := root / name).is_file()]
    return Line(VOCABULARY, each * max(sizes), ESTIMATED, "by the size of its file") if sizes else None


def loading_bytes(root: Path, process: int) -> int:
    """Bytes that a process of `process` bytes takes while the tokenizer in a directory is loaded; 0 if there is none.

    A tokenizer is loaded before all the rest, for which there is room again then: it is no line of a plan.
    """
    line = tokenizer_line(root)
    return 0 if line is None else process + line.nbytes


def dense_lines(container: Container, model: Footprint, how: Loading, io: str) -> list[Line]:
    """What dense tensors take: those loaded, rows of tables, and one matrix decoded where products do that."""
    use = likely_use(container) if model.dense is None else model.dense
    if io == "resident":  # which loads tables, too
        use = replace(use, tables=frozenset())
    costs = dense_costs(container, use, "mmap" if io == "mmap" else "direct")
    known = ESTIMATED if model.dense is None else COMPUTED
    mapped = f"and {size_text(costs.mapped_bytes)} mapped" if costs.mapped_bytes else ""
    native = (how.experts if how.linears is None else how.linears) == NATIVE
    return [
        Line(DENSE, costs.tensor_bytes + costs.matrix_bytes, known, mapped),
        Line(TABLE_ROWS, costs.row_bytes, known, f"of {size_text(costs.table_bytes)} on disk"),
        Line(DECODED, 0 if native else 3 * costs.decoded_bytes, ESTIMATED),
    ]


def _product_line(container: Container, how: Loading) -> Line:
    """Reference products decode an expert at a time, gate and up together: in float32, and rounded."""
    shapes = [layer.header.shape for layer in container.layers.values()]
    largest = max(shape.intermediate * shape.hidden for shape in shapes)
    plain = how.experts == NATIVE or container.manifest.codec == "bf16"
    return Line(PRODUCTS, 0 if plain else 24 * largest, ESTIMATED)


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan_memory(
    container: Container,
    how: Loading,
    needs: Needs,
    *,
    model: Footprint | None = None,
    process: Sequence[Line] | None = None,
    extra: Sequence[Line] = (),
    loading: int = 0,
) -> MemoryPlan:
    """The plan of a container under a cap; `RequestError` (E1271, E1272) with its numbers if nothing fits.

    `model` is what a host says of the model, None for what config.json says. `process` are the lines of the process
    itself, None for what is measured or estimated; `extra` are lines of the caller's. `loading` is what all takes
    while the tokenizer is loaded, before the rest is there (`loading_bytes`): no cap may be smaller.
    """
    model = footprint(container.path) if model is None else model
    begin = list(process) if process is not None else _process(container)
    sums = row_sum_bytes(container) if how.experts == NATIVE and needs.io != "mmap" else 0
    fixed = [
        *begin,
        *dense_lines(container, model, how, needs.io),
        Line(ROWS, sums),
        _product_line(container, how),
        *extra,
    ]
    every = all_records(container)
    least = {"direct": largest_record(container), "resident": every}.get(needs.io, 0)

    def lines(context: int) -> list[Line]:
        return _with_context(fixed, model, context, needs)

    def total(context: int) -> int:
        return sum(line.nbytes for line in lines(context)) + least

    context, lowest = _choose(model, needs, total)
    chosen = lines(context)
    left = needs.cap - sum(line.nbytes for line in chosen)
    smallest = max(total(lowest), loading)
    if left < least or needs.cap < loading:
        raise _refusal(needs, context, chosen, least, smallest, loading)
    cache = min(left, every) if needs.io == "direct" else least
    return MemoryPlan(
        needs.cap, context, tuple(chosen), cache, smallest, every, needs.io, _notes(needs, model, context)
    )


def _process(container: Container) -> list[Line]:
    tokenizer = tokenizer_line(container.path)
    return [process_line(), *([] if tokenizer is None else [tokenizer])]


def _with_context(fixed: Sequence[Line], model: Footprint, context: int, needs: Needs) -> list[Line]:
    """All lines but the experts', for a context."""
    fed = context if needs.prompt is None else min(needs.prompt, context)
    rows = model.logit_bytes * (min(needs.logits, fed) - 1)
    known = [
        *fixed,
        Line(STATE, model.state_bytes(context), COMPUTED),
        Line(WORKING, model.working_bytes(fed) + rows, model.known, f"of up to {fed:,} tokens"),
    ]
    slack = int(sum(line.nbytes for line in known) * SLACK) + (8 << 20)
    return [*(line for line in known if line.nbytes), Line(TRANSIENTS, slack, ESTIMATED)]


def _choose(model: Footprint, needs: Needs, total: Any) -> tuple[int, int]:
    """(the context to take, the least that would do)."""
    if needs.context is not None:
        return needs.context, needs.context
    most = min(CONTEXT, model.positions or CONTEXT)
    lowest = min(LEAST_CONTEXT, most)
    spare = needs.cap - total(0)
    for context in range(most, lowest, -STEP):
        if total(context) - total(0) <= spare // SHARE:
            return context, lowest
    return lowest, lowest


def _notes(needs: Needs, model: Footprint, context: int) -> tuple[str, ...]:
    notes = []
    if needs.io == "mmap":
        notes.append("experts and dense tensors are mapped: the cap does not bind the page cache that they take")
    if model.positions is not None and context > model.positions:
        notes.append(f"the model was made for {model.positions:,} positions")
    return tuple(notes)


def _refusal(
    needs: Needs, context: int, lines: Sequence[Line], least: int, smallest: int, loading: int
) -> RequestError:
    parts = ", ".join(f"{line.name} {size_text(line.nbytes)}" for line in lines)
    asked = "" if needs.context is None else f" for a context of {context:,} tokens"
    moment = f"; {size_text(loading)} while the tokenizer is loaded" if loading == smallest else ""
    what = "all experts" if needs.io == "resident" else "one expert"
    fewer = " or a smaller --context" if needs.context is not None and needs.context > LEAST_CONTEXT else ""
    return RequestError(
        f"--memory of at least {smallest:,} bytes expected{asked} ({parts}, {what} {size_text(least)}{moment}), "
        f"found {needs.cap:,}",
        code="E1271",
        remedy=f"give --memory {-(-smallest // (1 << 20))}MiB or more{fewer}",
    )
