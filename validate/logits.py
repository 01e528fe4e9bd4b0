"""`verify-logits`: the streamed model gives, byte for byte, the logits of one that does not stream.

Both sides run the same prompts through prefill and decode. The reference side holds every record in memory, checked
when it was loaded or encoded from the source (*resident*); or, where memory is too small for that, it reads or encodes
each record *anew* for each use, by another path than the cache's, and keeps nothing. It chooses the tokens (greedily)
that both are fed. Of every step the SHA-256 of the full-vocabulary logits is kept, and XXH3-128 of what went into and
came out of every layer's experts, so that a difference can be placed.

Products of torch differ between machines, so an audit says what it ran on; elsewhere it is "not comparable".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pagestone.formats.errors import RequestError
from pagestone.formats.strict_json import MAX_COUNT
from pagestone.formats.text import shown, shown_lines, size_text
from pagestone.reader import inputs
from pagestone.reader.budget import all_records, largest_record, row_sum_bytes
from pagestone.reader.container import Container
from pagestone.reader.dense_costs import dense_costs
from pagestone.reader.files import ANEW, MachineErrors
from pagestone.reader.footprint import ESTIMATED
from pagestone.reader.hosts import DEFAULT
from pagestone.reader.made import MadeContainer, MadeRecords
from pagestone.reader.memory import available_memory
from pagestone.reader.memory_plan import Line
from pagestone.reader.model import AUTO, NATIVE, PIECE, Model
from pagestone.reader.session import Session, SessionOptions
from pagestone.reader.store import ResidentStore, open_anew
from pagestone.reader.text import check_ids
from pagestone.validate import audit as audits
from pagestone.validate import requests
from pagestone.validate.apart import let_go
from pagestone.validate.audit import DIFFERENT, EQUAL, NOT_COMPARABLE, Audit
from pagestone.validate.recorded import Recorded, read_audit
from pagestone.validate.sides import Prompt, Side, first_difference, proof, run_side
from pagestone.validate.source import plan_again
from pagestone.validate.virtual import again

STREAMED = ("direct", "mmap")
"""Ways of reading that stream."""
LENGTHS = (1, 7, 64)
"""Tokens of the prompts used when none are given."""
DIGITS = 19
RESIDENT = "resident"
AHEAD = 2
"""Records that the side which reads anew reads while another is multiplied: as the streamed side has threads."""
ENCODING = 12
"""Of a record's bytes: what encoding it from the source takes, the source's arrays and float32 among them."""
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
        raise RequestError(
            "a prompt a line expected, found none", code="E1305", file=path,
            remedy="write one a line: text for --prompts, token ids such as 12 7 401 for --ids",
        )  # fmt: skip
    return lines


# -- the sides --------------------------------------------------------------------------------------------------------


def resident_model(session: Session, source: Path | None = None) -> Model:
    """The side that does not stream: every record in memory, its digest checked; or encoded from the source."""
    if source is None:
        return session.model_over(session.open_store("resident")[0])
    made = _again(session, source)
    try:
        records = MadeRecords(made)
        sums = {number: records.beside(layer) for number, layer in made.layers.items()}
        store = ResidentStore(made.layers, records.read, sums, made)
    except BaseException:
        made.close()
        raise
    return session.model_over(store, made)


def anew_model(session: Session, source: Path | None = None) -> Model:
    """The side that keeps nothing: every record read anew each time it is used, by another path than the cache's; or
    encoded from the source each time."""
    rows = session.loading.experts == NATIVE
    if source is None:
        return session.model_over(open_anew(session.container, beside=rows, ahead=AHEAD))
    made = _again(session, source)
    return session.model_over(open_anew(made, ahead=AHEAD), made)


def _again(session: Session, source: Path) -> MadeContainer:
    container = session.container
    return again(container, plan_again(source, container.manifest))


def reference_way(session: Session, request: LogitsRequest) -> tuple[str, str]:
    """("resident" or "anew", why) of the reference side: resident if that is asked for, or fits the free memory."""
    if request.resident:
        return RESIDENT, "every record in memory, as asked for"
    what = "read" if request.source is None else "encoded from the source"
    if request.memory is not None:
        return ANEW, f"records {what} anew for each use: {size_text(request.memory)} for everything"
    container, free = session.container, available_memory()
    needed = all_records(container) + dense_costs(container, mode=RESIDENT).resident
    needed += row_sum_bytes(container) if session.loading.experts == NATIVE else 0
    if free is None or needed <= free:
        return RESIDENT, "every record in memory"
    short = f"all of them would take {size_text(needed)}, {size_text(free)} are free"
    return ANEW, f"records {what} anew for each use: {short}"


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
    resident: bool = False
    """Whether the reference side holds every record, whatever memory there is; see `reference_way`."""
    prefill_piece: int | None = PIECE
    """Tokens of a prompt that either side's layers work on at once, as in `Loading`."""
    memory: int | None = None
    """Bytes for everything either side holds, one after the other; the cache of the streamed side is what is left."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A request that was checked: what there is to run, and what to compare with."""

    prompts: list[Prompt]
    steps: int
    recorded: Recorded | None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def context(self) -> int:
        """Tokens: the most that a model must remember."""
        return self.longest + self.steps


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
            attention=request.attention, memory=request.memory, prefill_piece=request.prefill_piece,
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
        session.options = replace(session.options, context=work.context if request.memory is not None else None)
        reference = None
        if work.recorded is None:
            way, why = reference_way(session, request)
            progress(f"{way} side: {why}")
            _ = _planned(session, work, way, progress, source=request.source is not None)
            reference = _reference_side(session, request.source, work, way)
        return _streamed_side(session, request, work, reference, progress)


def _planned(
    session: Session, work: _Work, way: str, progress: Callable[[str], None], *, source: bool = False
) -> int | None:
    """Bytes for the experts of a side that reads in this `way`, as the plan for it has them; None without a plan.

    Every row of a prompt's logits is hashed, so all of them are made at once. Raises as `Session.plan_for`.
    """
    if session.options.memory is None:
        return None
    extra = [Line("an expert of the source", ENCODING * largest_record(session.container), ESTIMATED)] if source else []
    if way == ANEW:
        extra.append(Line("records read ahead", AHEAD * largest_record(session.container)))
    io = way if way in (RESIDENT, "mmap") else "direct"
    plan = session.plan_for(prompt=work.longest, logits=work.longest, extra=extra, io=io)
    progress(plan.text())
    return plan.cache_bytes


def _reference_side(session: Session, source: Path | None, work: _Work, way: str) -> Side:
    """Run the side that does not stream and let it go: two models at once would take twice the memory."""
    model = resident_model(session, source) if way == RESIDENT else anew_model(session, source)
    try:
        return run_side(model, work.prompts, work.steps)
    finally:
        model.close()
        del model
        let_go()


def _streamed_side(
    session: Session, request: LogitsRequest, work: _Work, reference: Side | None, progress: Callable[[str], None]
) -> Audit:
    """Run the streamed side, and compare it with the reference side or with what was recorded."""
    container, prompts, recorded = session.container, work.prompts, work.recorded
    expected = recorded.steps if recorded is not None else reference.steps if reference is not None else ()
    streamed = _streamed_model(session, _planned(session, work, session.options.io, progress))
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


def _streamed_model(session: Session, planned: int | None) -> Model:
    container, budget = session.container, None
    if session.options.io == "direct" and planned is not None:
        budget = planned
    elif session.options.io == "direct":
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
        first = (
            f"{name}: {steps} steps of {len(audit.prompts)} prompts, every logit equal to {_other(audit)}, "
            "byte for byte"
        )
    doubts = [f"the run does not prove streaming (E1302): {why}" for why in audit.unproven]
    return shown_lines([first, *doubts, _streaming(audit.streamed, audit.surroundings["products"]["isa"])])


def _other(audit: Audit) -> str:
    """What the streamed side was compared with: whose logits are equal."""
    if audit.against or audit.reference is None:
        return f"{audit.against}'s"
    anew = audit.reference.mode == ANEW
    if audit.source:
        return "those of records encoded from its source" + (" anew for each use" if anew else "")
    return "those of records read anew for each use" if anew else "the resident model's"


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
