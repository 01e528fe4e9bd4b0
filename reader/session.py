"""A container with everything that running its model needs, each opened once: what programs and commands begin with.

    with Session("out/tiny-int8") as session:
        turn = session.conversation().answer([{"role": "user", "content": "Who are you?"}], 100)
        print(turn.text)

What is cheap comes first: whatever can be refused is refused before a model is loaded, which takes minutes for a large
one. The model is loaded when it is first asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pagestone.formats import native
from pagestone.formats.errors import RequestError
from pagestone.formats.text import size_text
from pagestone.reader import hosts
from pagestone.reader.budget import MOST_BYTES, default_budget, largest_record, row_sum_bytes
from pagestone.reader.cache import check_budget
from pagestone.reader.chat import Conversation
from pagestone.reader.container import Container, Opener, open_to_run
from pagestone.reader.dense_costs import dense_costs
from pagestone.reader.errors import Closing
from pagestone.reader.footprint import MEASURED, Footprint
from pagestone.reader.memory import available_memory, process_memory
from pagestone.reader.memory_plan import (
    CONTEXT,
    LOADING,
    TOKENIZER,
    VOCABULARY,
    Line,
    MemoryPlan,
    Needs,
    loading_bytes,
    plan_memory,
    process_line,
    settle_allocator,
    tokenizer_line,
    trim,
)
from pagestone.reader.model import (
    AUTO,
    CPU,
    NATIVE,
    PIECE,
    Loading,
    Model,
    check_device,
    check_runnable,
    experts_for,
    linears_for,
)
from pagestone.reader.sampling import Sampling, choose_sampling
from pagestone.reader.store import MODES, ExpertStore, StoreOptions, open_store
from pagestone.reader.text import Tokenizer, end_tokens, open_tokenizer

Note = Callable[[str], None]


def ignore(text: str) -> None:
    """Note nothing."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a model is to be run.

    `io` is one of `store.MODES`; `memory` is bytes for everything the process holds (`Session.plan`), `budget` bytes
    for experts alone, for `direct` only; without either, experts get a share of what is free. `context` is how many
    tokens prompts and answers have together, None for what the plan chooses, or without `memory` for as many as there
    are. `experts` is "auto" or one of `model.PRODUCTS`; `tokenizer` is a directory that holds one, `variables` are
    given to its chat template; `host` names one of `hosts.registry()`, `attention` a function it knows,
    `prefill_piece` is as in `Loading`.
    """

    io: str = "direct"
    budget: int | None = None
    threads: int = 2
    experts: str = AUTO
    tokenizer: Path | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    host: str = hosts.DEFAULT
    device: str = CPU
    attention: str | None = None
    memory: int | None = None
    context: int | None = None
    prefill_piece: int | None = PIECE


def _check(options: SessionOptions) -> None:
    """Refuse (E1240, E1273, E1274, E1290) what no store could be opened with, and no model made."""
    check_device(options.device)
    if options.memory is not None and options.budget is not None:
        raise RequestError("--memory or --budget expected, found both: what --memory leaves is the budget of experts",
                           code="E1273", remedy="leave one of them out")  # fmt: skip
    if options.context is not None and options.context < 1:
        raise RequestError(f"a --context of at least 1 token expected, found {options.context}",
                           code="E1274", remedy="leave it out, or give one that holds prompts and answers")  # fmt: skip
    if options.io not in MODES:
        raise RequestError(
            f"--io expected to be one of {', '.join(MODES)}, found {options.io!r}", code="E1240", remedy="choose one"
        )
    if options.budget is not None and options.io != "direct":
        raise RequestError(
            f"--budget bounds reads into a cache, and --io {options.io} has none",
            code="E1240",
            remedy="use --io direct",
        )


class Session(Closing):
    """One container, ready to run; `note` is told what the user should know of how it runs.

    May stand in a `with` statement. Opening compares every side file with its digest; `opener` opens something else
    than the directory of a container (`validate/virtual.py`: a checkpoint). Raises `RequestError` for what
    cannot be run or is not installed (E0331, E1215, E1220 to E1223, E1240, E1244, E1282, E1290, E1291) and whatever
    `open_to_run` raises.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: SessionOptions | None = None,
        note: Note = ignore,
        opener: Opener | None = None,
    ) -> None:
        self.options = SessionOptions() if options is None else options
        self.note = note
        self._model: Model | None = None
        self._vocabulary_bytes = self._loading_bytes = 0
        self._footprints: dict[int, Footprint | None] = {}
        _check(self.options)
        self._host = hosts.get(self.options.host)
        self._host.require()
        self.container: Container = open_to_run(path) if opener is None else opener(path)
        codec = self.container.manifest.codec
        self.loading = Loading(
            experts_for(codec, self.options.experts), self.options.device, self.options.attention,
            linears=linears_for(self.options.experts), prefill_piece=self.options.prefill_piece,
        )  # fmt: skip
        check_runnable(self.container)
        if self.options.budget is not None:
            check_budget(self.options.budget, largest_record(self.container))

    @property
    def path(self) -> Path:
        """The container's directory."""
        return self.container.path

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens the model knows, as its config says; no model is loaded for it."""
        return self._host.vocabulary_of(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The container's tokenizer, or the one the options name. Raises as `open_tokenizer`."""
        self.require_loading(self.options.tokenizer or self.path)
        before = process_memory() if self.options.memory is not None else None
        opened = open_tokenizer(self.path, self.options.tokenizer, self.options.variables)
        if before is not None:
            trim()
            after = process_memory()
            self._vocabulary_bytes = 0 if after is None else max(0, after.now - before.now)
        return opened

    def require_loading(self, place: Path) -> None:
        """Refuse (`RequestError`, E1271) `options.memory` below what loading the tokenizer in `place` takes.

        That is more than it takes once it is there. Does nothing without the option.
        """
        if self.options.memory is None:
            return
        settle_allocator()
        _ = self._footprint(CONTEXT)  # libraries are not the tokenizer's
        held = process_memory()
        if held is None or self._model is not None:  # beside a model its line has room for it
            return
        self._loading_bytes = loading_bytes(place, held.now)
        if self._loading_bytes > self.options.memory:
            self.plan_for()

    @cached_property
    def plan(self) -> MemoryPlan | None:
        """What everything takes under `options.memory`; None without it. Asked once, before anything is loaded.

        `plan_for` says how. Raises as `plan_memory`.
        """
        return None if self.options.memory is None else self.plan_for()

    def plan_for(
        self, *, prompt: int | None = None, logits: int = 1, extra: Sequence[Line] = (), io: str | None = None
    ) -> MemoryPlan:
        """The plan for `options.memory` (or what is free), with other needs; see `memory_plan.Needs`.

        The libraries are imported for it, so that they can be measured.
        """
        options = self.options
        settle_allocator()
        cap = available_memory() if options.memory is None else options.memory
        needs = Needs(MOST_BYTES if cap is None else cap, options.context, io or options.io, prompt, logits)
        model = self._footprint(max(CONTEXT, needs.context or 0, prompt or 0))
        plan = plan_memory(self.container, self.loading, needs, model=model, process=self._process(), extra=extra,
                           loading=self._loading_bytes)  # fmt: skip
        held = process_memory()
        free = None if cap is None or held is None else available_memory()
        if held is None or free is None or free + held.now >= plan.cap:
            return plan
        note = f"only {size_text(free)} more can be had on this machine, or in this control group"
        return replace(plan, notes=(*plan.notes, note))

    def _footprint(self, longest: int) -> Footprint | None:
        """What the host says of the model with prompts of up to `longest` tokens, asked once."""
        if longest not in self._footprints:
            self._footprints[longest] = self._host.footprint(self.container, self.loading, longest)
        return self._footprints[longest]

    def _process(self) -> list[Line]:
        """What the process takes, its tokenizer apart: measured if it is there already."""
        if "tokenizer" in self.__dict__ and self._vocabulary_bytes:
            return [process_line(self._vocabulary_bytes), Line(VOCABULARY, self._vocabulary_bytes, MEASURED)]
        if "tokenizer" in self.__dict__:
            return [process_line()]
        each = TOKENIZER if self._loading_bytes else LOADING  # which may be when all the rest is there
        tokenizer = tokenizer_line(self.options.tokenizer or self.path, each)
        return [process_line(), *([] if tokenizer is None else [tokenizer])]

    @property
    def context(self) -> int | None:
        """How many tokens the model's state has room for; None: it grows."""
        return self.options.context if self.plan is None else self.plan.context

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end an answer. Raises as `end_tokens`."""
        return end_tokens(self.path, self.tokenizer)

    def sampling(self, **options: float | None) -> Sampling:
        """How tokens are chosen: `options` that are not None over what the publisher recommends; see `Sampling`."""
        return choose_sampling(self.path, **options)

    @property
    def model(self) -> Model:
        """The model over the store that the options ask for, loaded at the first use. Raises as `Host.load`."""
        self._check_open()
        if self._model is None:
            self._model = self._load()
        return self._model

    @property
    def store(self) -> ExpertStore:
        """Where the model's experts come from."""
        return self.model.context.store

    def conversation(self, sampling: Sampling | None = None) -> Conversation:
        """A conversation with the model; without `sampling` tokens are chosen as the publisher recommends."""
        chosen = self.sampling() if sampling is None else sampling
        tokenizer, ends = self.tokenizer, self.ends  # before the model: they may be refused
        return Conversation(self.model, tokenizer, chosen, ends, self.note)

    def model_over(self, store: ExpertStore, of: Container | None = None) -> Model:
        """Another model of the container, over a store of the caller's; who closes it closes the store.

        `of` is another container with the same contents, made of the source; its dense tensors are used.
        """
        try:
            how = replace(self.loading, context=self.context)
            return self._host.load(self.container if of is None else of, store, how)
        except BaseException:
            store.close()
            raise

    def open_store(self, io: str, budget: int | None = None, note: Note = ignore) -> tuple[ExpertStore, list[str]]:
        """A store of the container for this session's kind of experts, and notes for the user."""
        rows = self.loading.experts == NATIVE
        options = StoreOptions(io, budget, self.options.threads, beside=rows, note=note)
        store, notes = open_store(self.container, options)
        return store, [*notes, *([self._unchecked(rows)] if io == "mmap" else [])]

    def _load(self) -> Model:
        container, io = self.container, self.options.io
        sums = row_sum_bytes(container) if self.loading.experts == NATIVE else 0
        room = self.options.budget
        if self.plan is not None:
            for text in self.plan.text().splitlines():
                self.note(text)
            room = self.plan.cache_bytes if io == "direct" else None
        if io == "direct" and room is None:
            room = default_budget(container, dense_costs(container).resident + sums)
        store, notes = self.open_store(io, room, self.note)
        model = self.model_over(store)
        for text in (self._how(store, room), *notes, *model.notes, *self._costs(sums)):
            self.note(text)
        return model

    def _how(self, store: ExpertStore, room: int | None) -> str:
        """How experts are read and multiplied, in one line."""
        budgeted = "" if room is None else f", at most {size_text(room)} of experts in memory"
        manifest = self.container.manifest
        how = f"{manifest.codec} experts, {self._products(self.loading.experts)}, {store.mode}{budgeted}"
        if manifest.dense is None:
            return how
        return f"{how}; dense matrices in {manifest.dense.codec}, {self._products(self.loading.linears)}"

    def _unchecked(self, rows: bool) -> str:
        """What a mapped model uses as it lies in files, whatever became of them: all of it."""
        sums = ["their row sums"] if rows and row_sum_bytes(self.container) else []
        dense = [] if self.container.manifest.dense is None else ["encoded dense matrices"]
        return (
            f"{', '.join(['experts', *sums, *dense, 'dense tensors'])} and the embedding table are mapped, and not "
            "compared with their digests: `pagestone verify` compares them"
        )

    @staticmethod
    def _products(word: str | None) -> str:
        """One of `PRODUCTS` in words."""
        return f"native products ({native.isa()})" if word == NATIVE else "reference products"

    def _costs(self, sums: int) -> list[str]:
        """What native products cost beside the budget, and whether they are slow here."""
        encoded = self.container.manifest.dense is not None
        if self.loading.experts != NATIVE and not (encoded and self.loading.linears == NATIVE):
            return []
        slow = native.slow_note()
        held = "mapped" if self.options.io == "mmap" else "in memory beside them, read once"
        rows = [f"row sums of all experts: {size_text(sums)} {held}"] if sums else []
        return ([] if slow is None else [slow]) + rows

    def close(self) -> None:
        """Close model, store and container; may be called twice."""
        super().close()
        if self._model is not None:
            self._model.close()
        self.container.close()
