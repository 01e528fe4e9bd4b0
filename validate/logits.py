"""`verify-logits`: the streamed model gives, byte for byte, the logits of the resident one.

Both sides run the same prompts through prefill and decode. The resident side holds every record in memory, checked when
it was loaded or encoded from the source; it chooses the tokens (greedily) that both are fed. Of every step the SHA-256
of the full-vocabulary logits is kept, and XXH3-128 of what went into and came out of every layer's experts, so that a
difference can be placed.

Products of torch differ between machines, so an audit says what it ran on; elsewhere it is "not comparable".
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagestone.convert.dense import pieces
from pagestone.convert.encode import encode_expert
from pagestone.convert.plan import Plan
from pagestone.convert.reading import ExpertReader, SourceFiles
from pagestone.formats.dtypes import VIEWS
from pagestone.formats.errors import RequestError
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.formats.strict_json import MAX_COUNT
from pagestone.formats.text import shown, shown_lines, size_text
from pagestone.reader import inputs
from pagestone.reader.budget import all_records, largest_record
from pagestone.reader.container import Beside, Container, Layer, View
from pagestone.reader.dense import DenseTensors
from pagestone.reader.files import MachineErrors
from pagestone.reader.hosts import DEFAULT
from pagestone.reader.model import AUTO, Model
from pagestone.reader.session import Session, SessionOptions
from pagestone.reader.store import ResidentStore
from pagestone.reader.text import check_ids
from pagestone.validate import audit as audits
from pagestone.validate import requests
from pagestone.validate.audit import DIFFERENT, EQUAL, NOT_COMPARABLE, Audit
from pagestone.validate.recorded import Recorded, read_audit
from pagestone.validate.sides import Prompt, Side, first_difference, proof, run_side
from pagestone.validate.source import compare_with

STREAMED = ("direct", "mmap")
"""Ways of reading that stream."""
LENGTHS = (1, 7, 64)
"""Tokens of the prompts used when none are given."""
DIGITS = 19
SPREAD = 4
"""By default the budget is 1/SPREAD of all records: small enough that experts come and go."""


# -- prompts ----------------------------------------------------------------------------------------------------------


def default_prompts(container: Container, vocabulary: int) -> list[Prompt]:
    """Random ids, the same for the same container: they reach more experts than sentences do."""
    source = random.Random(container.container_id)
    return [Prompt(f"{n} random tokens", tuple(source.randrange(vocabulary) for _ in range(n))) for n in LENGTHS]


def read_ids(path: Path, vocabulary: int) -> list[Prompt]:
    """A prompt a line: integers between spaces or commas, or a JSON list."""
    prompts = []
    for number, line in _lines(path):
        words = line.replace("[", " ").replace("]", " ").replace(",", " ").split()
        # an id has few digits; a number of thousands of them is not even to be read
        if not words or not all(w.isdecimal() and len(w) <= DIGITS and int(w) < vocabulary for w in words):
            raise RequestError(
                f"line {number}: token ids below {vocabulary} expected, found {line[:40]!r}",
                code="E1305",
                file=path,
                remedy="write one prompt a line, such as 12 7 401",
            )
        prompts.append(Prompt(f"line {number}", tuple(int(w) for w in words)))
    return prompts


def read_prompts(path: Path, session: Session) -> list[Prompt]:
    """A prompt of text a line, without a chat template."""
    tokens = session.tokenizer
    prompts = [Prompt(line[:40], tuple(tokens.encode(line))) for _, line in _lines(path)]
    for prompt in prompts:
        check_ids(prompt.ids, session.vocabulary, tokens.place)
    return prompts


def _lines(path: Path) -> list[tuple[int, str]]:
    lines = inputs.file_lines(path)
    if not lines:
        raise RequestError("a prompt a line expected, found none", code="E1305", file=path, remedy="write some")
    return lines


# -- the sides --------------------------------------------------------------------------------------------------------


def resident_model(session: Session, source: Path | None = None) -> Model:
    """The side that does not stream: every record in memory, its digest checked; or encoded from the source."""
    if source is None:
        return session.model_over(session.open_store("resident")[0])
    comparison = compare_with(source, session.container.manifest)
    try:
        fill = _Encoder(comparison.plan, comparison.files)
        resident = ResidentStore(session.container.layers, fill.record, fill.beside)
        return session.model_over(resident, fill.dense())
    finally:
        comparison.close()


class _Encoder:
    """Makes records and dense tensors from the source, as the conversion did."""

    def __init__(self, plan: Plan, files: SourceFiles) -> None:
        self._plan, self._files = plan, files
        self._targets = {t.name: t for t in plan.layers}
        self.beside: dict[int, Beside] = {}
        """Sidecars by layer, filled with the records."""

    def record(self, layer: Layer, expert: int, into: memoryview) -> None:
        """Encode one expert into `into`."""
        target = self._targets.get(layer.entry.file)
        if target is None or target.header != layer.header:
            raise RequestError(
                "the source would give a layer of another shape, codec or name",
                code="E1306",
                file=layer.path,
                remedy="give the checkpoint that this container was made from",
            )
        matrices, _ = ExpertReader(self._files, ExpertReader.needed(target.source)).read(target.source, expert)
        made = encode_expert(target.header.codec, layer.layout.record, matrices, into)
        made.put_beside({key: view.array for key, view in self._sidecar(layer).items()}, expert)

    def _sidecar(self, layer: Layer) -> Beside:
        if layer.entry.layer not in self.beside:
            self.beside[layer.entry.layer] = {
                (t.part, t.role): View(np.zeros(t.shape, VIEWS[t.dtype]), t.dtype)
                for t in layer.header.sidecar_tensors()
            }
        return self.beside[layer.entry.layer]

    def dense(self) -> DenseTensors:
        """Every dense tensor of the container, from the source."""
        made = DenseTensors(mode="source")
        room = memoryview(bytearray(1 << 20))
        for shard in self._plan.dense:
            for tensor in shard.tensors:
                array = np.empty(tensor.nbytes, np.uint8)
                position = 0
                for piece, nbytes, _ in pieces(self._files, tensor, room):
                    array[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
                    position += len(piece)
                    made.bytes_read += nbytes
                made.arrays[tensor.name] = array
                made.entries[tensor.name] = TensorEntry(tensor.name, tensor.dtype, tensor.shape, 0, tensor.nbytes)
        return made


# -- the command's work -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitsRequest:
    """What `verify-logits` was asked. `budget` is bytes, None for a quarter of all records; see `SessionOptions`."""

    directory: Path
    source: Path | None = None
    prompts: Path | None = None
    ids: Path | None = None
    steps: int = 16
    budget: int | None = None
    io: str = "direct"
    threads: int = 2
    against: Path | None = None
    tokenizer: Path | None = None
    attention: str | None = None
    experts: str = AUTO
    host: str = DEFAULT
    audit: Path | None = None
    """Where the audit is to be written; this module only sees that it can be."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A request that was checked: what there is to run, and what to compare with."""

    prompts: list[Prompt]
    steps: int
    recorded: Recorded | None


def _open(request: LogitsRequest) -> Session:
    """What is asked for, as far as it can be refused without looking at prompts and audits."""
    requests.number("--steps", request.steps, 0, MAX_COUNT)
    requests.number("--threads", request.threads, 0, 64)
    if request.audit is not None:
        for path in (request.audit, audits.traces_beside(request.audit)):
            requests.output(path)
    return Session(
        request.directory,
        SessionOptions(
            request.io, request.budget, request.threads, request.experts, request.tokenizer, host=request.host,
            attention=request.attention,
        ),
    )  # fmt: skip


def _check(session: Session, request: LogitsRequest) -> _Work:
    """Everything that can be refused, or read, before a model is loaded; the source is opened next, by the encoder."""
    requests.mode(request.io, STREAMED)
    if request.against is None:
        return _Work(_prompts(session, request), request.steps, None)
    if not request.against.is_file():
        raise RequestError(
            "an audit expected, found no file", code="E1239", file=request.against, remedy="make one with --audit"
        )
    with MachineErrors(request.against, "reading"):
        recorded = read_audit(request.against)
    container = session.container
    if recorded.container_id != container.container_id:
        raise RequestError(
            f"an audit of container {container.container_id} expected, found one of {recorded.container_id}",
            code="E1307",
            file=request.against,
            remedy="give the audit of this container, or of one with the same contents",
        )
    recorded.check_ids(session.vocabulary)
    with MachineErrors(recorded.traces or request.against, "reading"):
        for _ in recorded.events(_experts(container)):
            pass  # all of them are read once, so that what is damaged is known before the run
    return _Work(list(recorded.prompts), len(recorded.steps[0]) - 1, recorded)


def _experts(container: Container) -> dict[int, int]:
    return {number: len(layer) for number, layer in container.layers.items()}


def verify_logits(request: LogitsRequest, progress: Callable[[str], None] = lambda _: None) -> Audit:
    """Run both sides, or the streamed side against an audit, and compare. See the module's docstring."""
    with _open(request) as session:
        work = _check(session, request)
        reference = None
        if work.recorded is None:
            progress("resident side")
            reference = _resident_side(session, request.source, work)
        return _streamed_side(session, request, work, reference, progress)


def _resident_side(session: Session, source: Path | None, work: _Work) -> Side:
    """Run the resident side and let it go: two models at once would take twice the memory."""
    resident = resident_model(session, source)
    try:
        return run_side(resident, work.prompts, work.steps)
    finally:
        resident.close()
        del resident
        gc.collect()


def _streamed_side(
    session: Session, request: LogitsRequest, work: _Work, reference: Side | None, progress: Callable[[str], None]
) -> Audit:
    """Run the streamed side, and compare it with the resident one or with what was recorded."""
    container, prompts, recorded = session.container, work.prompts, work.recorded
    expected = recorded.steps if recorded is not None else reference.steps if reference is not None else ()
    streamed = _streamed_model(session)
    try:
        here = audits.surroundings(streamed)
        apart = [] if recorded is None else audits.differing(here, recorded.surroundings)
        if apart:
            return Audit(NOT_COMPARABLE, container, here, [], None, None, incomparable=apart,
                         against=str(request.against))  # fmt: skip
        progress("streamed side")
        side = run_side(streamed, prompts, work.steps, [[s.choice for s in taken] for taken in expected])
    finally:
        streamed.close()
    if recorded is not None and recorded.traces is not None:
        with MachineErrors(recorded.traces, "reading"):
            recorded.place_difference(side.steps, _experts(container))
    difference = first_difference(prompts, expected, side.steps)
    return Audit(
        DIFFERENT if difference else EQUAL, container, here, prompts, reference, side, difference, proof(side),
        source=request.source is not None, against=None if recorded is None else str(request.against),
        readers=request.threads,
    )  # fmt: skip


def _streamed_model(session: Session) -> Model:
    container, budget = session.container, None
    if session.options.io == "direct":
        budget = session.options.budget or max(largest_record(container), all_records(container) // SPREAD)
    return session.model_over(session.open_store(session.options.io, budget)[0])


def _prompts(session: Session, request: LogitsRequest) -> list[Prompt]:
    if request.ids is not None:
        return read_ids(request.ids, session.vocabulary)
    if request.prompts is not None:
        return read_prompts(request.prompts, session)
    return default_prompts(session.container, session.vocabulary)


def report(audit: Audit) -> str:
    """A few lines for people."""
    name = audit.container.path
    if audit.result == NOT_COMPARABLE:
        return shown(f"{name}: not comparable with {audit.against}: " + "; ".join(audit.incomparable))
    if audit.streamed is None:
        raise ValueError("a run that was compared has a streamed side")
    if audit.difference is not None:
        first = f"{name}: logits differ (E1301), first at {audit.difference.text()}"
    else:
        steps = sum(len(s) for s in audit.streamed.steps)
        other = audit.against or ("the model encoded from its source" if audit.source else "the resident model")
        first = f"{name}: {steps} steps of {len(audit.prompts)} prompts, every logit equal to {other}'s, byte for byte"
    doubts = [f"the run does not prove streaming (E1302): {why}" for why in audit.unproven]
    return shown_lines([first, *doubts, _streaming(audit.streamed, audit.surroundings["products"]["isa"])])


def _streaming(side: Side, isa: str | None) -> str:
    """What the streamed side read, and what it held, in one line; `isa` is that of native products."""
    total = side.counters.total
    peak = side.peak_bytes
    held = "" if peak is None else f", {size_text(peak)} held at most of {size_text(side.budget or 0)}"
    ran = f"native experts, {isa}" if isa else "reference experts"
    moved = f"{size_text(total.bytes_read)} read" if total.bytes_read else f"{size_text(total.bytes_mapped)} mapped"
    return (
        f"  streamed ({side.mode}, {ran}): {moved}, {total.hits} hits, {total.misses} misses, "
        f"{total.transient} transient{held}, {side.open_leases} leases open"
    )
