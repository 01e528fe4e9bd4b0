"""What to know of a machine and a model before time is spent on them: what is wrong, what to expect, what would help.

    print(diagnose(Path("Qwen3.6-35B-A3B"), memory=4 << 30).text())

Everything is measured for a second or two, or follows from headers; no weight is loaded, and torch need not be there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pagestone.convert.commands import default_workers
from pagestone.convert.machine import disk_space
from pagestone.formats import encodings, native
from pagestone.formats.dense_matrices import ENCODED
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import LayoutError, RequestError
from pagestone.formats.storage import place_of
from pagestone.formats.surroundings import cpu
from pagestone.formats.text import shown_lines, size_text
from pagestone.reader import libraries
from pagestone.reader.budget import largest_record
from pagestone.reader.container import Container
from pagestone.reader.memory import available_memory, group_room
from pagestone.reader.memory_plan import MemoryPlan, Needs, plan_memory
from pagestone.reader.model import AUTO, NATIVE, Loading, experts_for
from pagestone.reader.text import tokenizer_problems
from pagestone.validate.examined import (
    CHECKPOINT,
    CONTAINER,
    NEITHER,
    Diagnosis,
    Examined,
    Findings,
    as_if,
    codecs,
    examine,
)
from pagestone.validate.findings import ERROR, WARNING
from pagestone.validate.forecast import (
    CALL,
    Help,
    Rates,
    Token,
    arithmetic,
    best,
    faster_disk,
    forecast,
    rate_text,
    speed_text,
)
from pagestone.validate.rates import (
    DiskRate,
    TorchRates,
    disk_rate,
    encode_rate,
    has_holes,
    product_rate,
    torch_rates,
)

RECORD = 4 << 20
"""Bytes of a read where nobody knows how large a record is."""
MOST_FILES = 32
"""Files that are read from to measure a disk."""
TORCH_SHAPE = (2048, 2048)
"""Of the matrices that torch is measured with."""
CAPS = (1.0, 0.5, 2.0)
"""Memory that is foretold for, in shares of what there is."""
MODEL_SHAPE = (512, 2048)
"""Of an expert's matrix where nothing says how large those are."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor, and what runs on it."""

    model: str
    cores: int
    kernels: str
    possible: tuple[str, ...]
    threads: int
    """Of products, as torch is set up, or would be."""
    torch: TorchRates | None

    def table(self) -> dict[str, Any]:
        """For --json."""
        torch = None if self.torch is None else {
            "threads": self.torch.threads, "linear_bytes_per_second": self.torch.linear, "call_seconds": self.torch.call
        }  # fmt: skip
        return {
            "model": self.model, "cores": self.cores, "kernels": self.kernels, "possible": list(self.possible),
            "threads": self.threads, "torch": torch,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of the machine, what this process may still take, what its control groups leave (None: no limit), and
    what is foretold for."""

    total: int
    available: int | None
    group: int | None
    cap: int
    asked: bool


@dataclass(frozen=True, slots=True)
class Conversion:
    """What making a container would take. `reading` is the disk's part, read and written at the rate of reading."""

    codec: str
    bytes_in: int
    bytes_out: int
    encoding: float
    moving: float | None
    room: bool | None

    @property
    def seconds(self) -> float | None:
        """Both go on at once: the longer counts."""
        return None if self.moving is None else max(self.encoding, self.moving)

    def table(self) -> dict[str, Any]:
        """For --json."""
        return {
            "codec": self.codec, "bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "seconds": self.seconds,
            "encoding_seconds": self.encoding, "disk_seconds": self.moving, "fits_the_disk": self.room,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A forecast for a cap: the token, or why there is none."""

    codec: str
    cap: int
    token: Token | None
    refused: str = ""

    def table(self) -> dict[str, Any]:
        """For --json."""
        found = {"codec": self.codec} if self.token is None else self.token.table()
        return found | {"cap": self.cap, "refused": self.refused or None}


@dataclass
class Report:
    """Everything the doctor says."""

    directory: Path
    kind: str
    processor: Processor
    memory: Memory
    findings: Findings
    plan: MemoryPlan | None = None
    disk: DiskRate | None = None
    rates: Rates | None = None
    conversions: list[Conversion] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    helps: list[Help] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 without errors, else the code of the first one's kind."""
        return next((f.exit_code for f in self.findings if f.severity == ERROR), 0)

    def table(self) -> dict[str, Any]:
        """For --json."""
        memory, disk, rates = self.memory, self.disk, self.rates
        return {
            "directory": str(self.directory), "kind": self.kind, "processor": self.processor.table(),
            "memory": {"total": memory.total, "available": memory.available, "control_group": memory.group,
                       "cap": memory.cap, "asked": memory.asked,
                       "plan": None if self.plan is None else self.plan.table()},
            "disk": None if disk is None else
            {"bytes_per_second": disk.rate, "mode": disk.mode, "read_bytes": disk.size, "reads": disk.reads,
             "seconds": disk.seconds, "threads": disk.threads},
            "products": {} if rates is None else dict(rates.products),
            "conversion": [c.table() for c in self.conversions],
            "forecast": [row.table() for row in self.rows],
            "help": [h.table() for h in self.helps],
            "findings": [f.table() for f in self.findings],
        }  # fmt: skip

    def text(self) -> str:
        """For people."""
        return shown_lines(
            [
                f"{self.directory}: {_ARTICLES.get(self.kind, 'neither a container nor a checkpoint')}",
                "",
                *_processor_lines(self.processor),
                *_memory_lines(self.memory, self.plan),
                _disk_line(self.disk),
                *_conversion_lines(self.conversions),
                *_forecast_lines(self),
                *_finding_lines(self.findings),
            ]
        )


_ARTICLES = {CONTAINER: "a container", CHECKPOINT: "a checkpoint"}


# -- examination ------------------------------------------------------------------------------------------------------


def diagnose(path: Path, memory: int | None = None) -> Report:
    """Examine a directory and the machine. `memory` is the cap to plan for; None: what is free.

    Whatever is wrong with either is among the findings; nothing is raised for it.
    """
    findings = Findings()
    examined = examine(path, findings)
    processor = _processor(examined, findings)
    report = Report(path, examined.kind, processor, _memory(memory, findings), findings)
    findings.attempt(lambda: _tokenizer(examined, findings))
    container = examined.container
    report.disk = _disk(examined, RECORD if container is None else largest_record(container), findings)
    if container is None:
        return report
    report.rates = _rates(container, report.processor, report.disk, findings)
    report.plan = findings.attempt(lambda: _plan(examined, container, report.memory.cap))
    report.conversions = findings.attempt(lambda: _conversions(examined, report)) or []
    findings.attempt(lambda: _foretell(examined, report))
    return report


def _processor(examined: Examined, findings: Findings) -> Processor:
    note = native.slow_note()
    isa = findings.attempt(native.isa)
    if isa is None:
        isa = native.force(None)
    best_isa = native.available()[-1]
    if note is not None or isa != best_isa:
        what = note or f"the kernels in use are {isa}, and this processor can run {best_isa}"
        findings.warn(
            "W1340", what, "install a C++ compiler and pagestone again" if note else f"unset {native.VARIABLE}"
        )
    torch = None
    try:
        libraries.require("torch", "transformers")
        torch = findings.attempt(partial(_torch, examined, findings))
    except RequestError as error:
        findings.of(error, WARNING)
    cores = default_workers()
    threads = _stated_threads(cores) if torch is None else torch.threads
    return Processor(cpu(), cores, isa, native.available(), threads, torch)


def _torch(examined: Examined, findings: Findings) -> TorchRates:
    try:
        findings.attempt(examined.load_libraries)  # before anything is measured: it would be counted as theirs
        return torch_rates(*TORCH_SHAPE)
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"torch is installed and does not work: {libraries.reason(error)}", code="E1346", remedy="install it anew"
        ) from None


def _stated_threads(cores: int) -> int:
    """Threads that torch would use."""
    word = os.environ.get("OMP_NUM_THREADS", "")
    return int(word) if word.isdecimal() and int(word) else cores


def _memory(asked: int | None, findings: Findings) -> Memory:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = available_memory()
    cap = asked or available or total
    if asked is not None and available is not None and asked > available:
        findings.warn(
            "W1341", f"--memory {size_text(asked)} asked for, and {size_text(available)} are free",
            "end what else takes memory, raise the control group's limit, or give less",
        )  # fmt: skip
    group = group_room()
    return Memory(total, available, None if group is None or group > total else group, cap, asked is not None)


def _tokenizer(examined: Examined, findings: Findings) -> None:
    """Whether there is one that can be used; of files that were told of, nothing more is said."""
    if examined.kind == NEITHER:
        return
    if examined.tokenizer is None:
        findings.warn("E1230", "no tokenizer among the files", "run and chat need --tokenizer DIR")
        return
    told = " ".join(found.what for found in findings)
    for error in tokenizer_problems(examined.path):
        if error.file is None or error.file not in told:
            findings.of(error)


def _disk(examined: Examined, size: int, findings: Findings) -> DiskRate | None:
    """The rate at which the directory's own files come."""
    holes = {path: findings.attempt(partial(_holes, path)) for path in examined.files()}
    first = next((path for path, found in holes.items() if found), None)
    if first is not None:
        findings.warn(
            "W1343",
            f"{first}: it has holes, which are on no disk: nothing was measured with it",
            "give a directory whose files were written whole",
        )
    sound = sorted((path for path, found in holes.items() if found is False), key=lambda path: -path.stat().st_size)
    rate = findings.attempt(lambda: disk_rate(sound[:MOST_FILES], size))
    if rate is None:
        findings.warn(
            "W1344", "no file to measure the disk with: its rate is not known", "give a directory with whole weights"
        )
    elif rate.mode != "direct":
        findings.warn(
            "W1342",
            "the file system refuses O_DIRECT: reads go through the page cache, which is slower",
            "put the container on a local file system such as ext4 or XFS",
        )
    return rate


def _holes(path: Path) -> bool:
    """Whether a file has holes; raises `OSError` for one that cannot be read."""
    place_of(path).read(0, 1)
    return has_holes(path)


def _rates(container: Container, processor: Processor, disk: DiskRate | None, findings: Findings) -> Rates:
    shape = next(iter(container.layers.values())).header.shape
    torch, products = processor.torch, dict[str, float]()
    for codec in _encodings(container):
        try:
            rate = product_rate(codec, 2 * shape.intermediate, shape.hidden, processor.threads)
        except LayoutError as error:
            findings.warn("W1348", f"{codec.name} cannot hold these experts: {error.message}", "choose another codec")
            continue
        plain = torch is not None and experts_for(codec.name, AUTO) != NATIVE
        products[codec.name] = torch.linear if plain and torch is not None else rate
    linear = torch.linear if torch is not None else products.get("bf16", max(products.values(), default=1.0))
    return Rates(products, linear, None if disk is None else disk.rate, CALL if torch is None else torch.call)


def _encodings(container: Container) -> list[Codec]:
    """Every codec, the container's own with its parameters."""
    manifest = container.manifest
    own = encodings.get(manifest.codec, manifest.parameters)
    return [own, *(codec for codec in codecs() if codec.name != own.name)]


def _plan(examined: Examined, container: Container, cap: int) -> MemoryPlan:
    lines = [examined.libraries, *([] if (tokenizer := examined.tokenizer) is None else [tokenizer])]
    how = Loading(experts_for(container.manifest.codec, AUTO))
    return plan_memory(container, how, Needs(cap), model=examined.footprint, process=lines, loading=examined.loading)


# -- what is to come --------------------------------------------------------------------------------------------------


def _conversions(examined: Examined, report: Report) -> list[Conversion]:
    """Of a checkpoint, by codec."""
    plan, container = examined.plan, examined.container
    if plan is None or container is None or report.rates is None:
        return []
    shape = next(iter(container.layers.values())).header.shape
    weights = sum(3 * 2 * t.header.shape.intermediate * t.header.shape.hidden * t.header.count for t in plan.layers)
    others = sum(t.nbytes for t in plan.dense)
    free, found = disk_space(examined.path), []
    for name in report.rates.products:
        codec = encodings.get(name)
        made = as_if(container, codec)
        out = others + sum(x.layout.data_start + x.stride * len(x) for x in (*made.layers.values(), *made.mtp.values()))
        encoding = weights / (encode_rate(codec, shape.intermediate, shape.hidden) * report.processor.cores)
        moving = None if report.rates.disk is None else (plan.bytes_in + out) / report.rates.disk
        found.append(Conversion(name, plan.bytes_in, out, encoding, moving, None if free is None else free > out))
    too_large = [c.codec for c in found if c.room is False]
    if too_large:
        report.findings.warn(
            "W1349", f"{size_text(free or 0)} free on this disk: no room for a container in {', '.join(too_large)}",
            "give an --output on another disk, or free space",
        )  # fmt: skip
    return found


def _foretell(examined: Examined, report: Report) -> None:
    """Tokens a second by cap, by codec for a checkpoint, and what would make them more."""
    container, rates, plan = examined.container, report.rates, report.plan
    if container is None or rates is None:
        return
    names = list(rates.products) if examined.kind == CHECKPOINT else [container.manifest.codec]
    own = container.manifest.codec
    for name in names:
        made = container if name == own else as_if(container, encodings.get(name))
        report.rows += [_row(examined, made, int(share * report.memory.cap), rates) for share in CAPS]
    now = next((row.token for row in report.rows if row.cap == report.memory.cap and row.codec == own), None)
    if now is None or plan is None:
        return
    changes = [Help(f"--memory {size_text(r.cap)}", r.token) for r in report.rows
               if r.token is not None and r.codec == own and r.cap > report.memory.cap]  # fmt: skip
    changes.append(faster_disk(now.work, rates))
    for name in rates.products:
        row = _row(examined, as_if(container, encodings.get(name)), report.memory.cap, rates)
        if name != own and row.token is not None:
            changes.append(Help(f"experts in {name}", row.token))
    for word in ENCODED:
        work = examined.with_dense(now.work, word)
        if work is not None and word in rates.products:
            changes.append(Help(f"--dense {word}", forecast(work, rates)))
    report.helps = best(now, changes)


def _row(examined: Examined, container: Container, cap: int, rates: Rates) -> Row:
    name = container.manifest.codec
    try:
        plan = _plan(examined, container, cap)
    except RequestError as error:
        return Row(name, cap, None, error.message.partition(" (")[0])
    return Row(name, cap, forecast(examined.work(container, plan.cache_bytes), rates))


# -- for people -------------------------------------------------------------------------------------------------------


def _processor_lines(found: Processor) -> list[str]:
    torch = found.torch
    said = "torch is not installed: constants stand for what it takes" if torch is None else (
        f"torch: {torch.threads} thread(s), linear layers {rate_text(torch.linear)}, {1e6 * torch.call:.2f} us a call"
    )  # fmt: skip
    return [
        f"processor: {found.model}, {found.cores} core(s) for this process",
        f"  kernels: {found.kernels}, of {', '.join(found.possible)}",
        f"  {said}",
    ]


def _memory_lines(found: Memory, plan: MemoryPlan | None) -> list[str]:
    group = "no control group limits it" if found.group is None else f"control groups leave {size_text(found.group)}"
    free = "not known" if found.available is None else size_text(found.available)
    lines = [f"memory: {size_text(found.total)} in all, {free} free, {group}"]
    what = "--memory" if found.asked else "what is free"
    return [
        *lines,
        *([] if plan is None else [f"  the plan for {what}:", *(f"  {x}" for x in plan.text().split("\n"))]),
    ]


def _disk_line(found: DiskRate | None) -> str:
    if found is None:
        return "disk: not measured"
    how = "O_DIRECT" if found.mode == "direct" else "through the page cache"
    return (
        f"disk: {rate_text(found.rate)}: {found.reads} reads of {size_text(found.size)} in {found.seconds:.2f} s by "
        f"{found.threads} thread(s), {how}"
    )


def _conversion_lines(found: list[Conversion]) -> list[str]:
    if not found:
        return []
    lines = ["conversion: the longer of encoding and the disk, which is taken to write as fast as it reads"]
    for c in found:
        moving = "not known" if c.moving is None else f"{c.moving:.0f} s"
        total = "" if c.seconds is None else f"about {c.seconds:.0f} s: "
        lines.append(
            f"  {c.codec:<5} {total}encoding {c.encoding:.0f} s, disk {moving}, writes {size_text(c.bytes_out)}"
        )
    return lines


def _forecast_lines(report: Report) -> list[str]:
    if report.rates is None or not report.rows:
        return []
    lines = ["tokens a second, if all experts are as likely; models have favourites, and do better"]
    for row in report.rows:
        token = row.token
        held = "" if token is None else f", {100 * token.work.held:.1f} % of experts in memory"
        said = row.refused if token is None else speed_text(token) + held
        lines.append(f"  {row.codec:<5} {size_text(row.cap):>11}  {said}")
    first = next((row for row in report.rows if row.token is not None), None)
    if first is not None and first.token is not None:
        lines += [
            f"  {first.codec} with {size_text(first.cap)}:",
            *(f"    {x}" for x in arithmetic(first.token, report.rates)),
        ]
    if report.helps:
        lines.append("what would help most:")
        lines += [f"  {n}. {h.what}: {speed_text(h.token)}" for n, h in enumerate(report.helps, 1)]
    return lines


def _finding_lines(found: list[Diagnosis]) -> list[str]:
    if not found:
        return ["findings: none"]
    lines = ["findings:"]
    for each in found:
        lines += [
            f"  {each.severity} {each.code}: {each.what}",
            *([f"    what to do: {each.remedy}"] if each.remedy else []),
        ]
    return lines
