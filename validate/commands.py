"""`pagestone verify`, `pagestone verify-logits` and `pagestone compare`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagestone.convert.errors import machine_errors
from pagestone.formats import native
from pagestone.formats.directories import directory as named
from pagestone.formats.errors import PagestoneError, RequestError
from pagestone.formats.manifest import MANIFEST, read_manifest
from pagestone.formats.text import shown, shown_lines
from pagestone.reader.commands import MOST, Directory
from pagestone.reader.container import Container
from pagestone.validate.findings import ERROR
from pagestone.validate.verify import verify

EXPERTS_HELP = (
    "How experts are multiplied: native (from codes), reference (decoded, by torch), or auto: the faster one."
)
SHOWN = 50
"""Findings printed for people; --json has all."""


def register(app: typer.Typer) -> None:
    """Add the commands of this room to the application."""
    app.command("verify", help="Check every byte of a container, and compare it with its source if one is given.")(
        _verify
    )
    app.command("verify-logits", help="Prove that streaming changes no logit: streamed and not, byte for byte.")(
        _verify_logits
    )
    app.command("compare", help="Measure what a codec costs: KL, top-1, perplexity and answers against the source.")(
        _compare
    )
    app.command("doctor", help="Say what is wrong with a directory or this machine, what to expect, what would help.")(
        _doctor
    )


def opener(path: str | os.PathLike[str]) -> Container:
    """What `run` and `chat` take: a container, or a checkpoint whose experts are encoded as they are read."""
    from pagestone.reader.made import MadeContainer
    from pagestone.validate.virtual import AS_THEY_ARE, open_any

    opened = open_any(Path(path))
    if isinstance(opened, MadeContainer):
        print(f"note: {AS_THEY_ARE}", file=sys.stderr)
    return opened


def _verify(
    directory: Directory,
    source: Annotated[
        Path | None, typer.Option(help="The checkpoint it was made from: encode again and compare.", parser=named)
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="With --source: compare only this many experts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from tqdm import tqdm

    if sample is not None and source is None:
        raise RequestError(
            "--sample compares experts with a source, and none is given", code="E0003", remedy="add --source CHECKPOINT"
        )
    if (note := native.slow_note()) is not None:
        print(f"note: {shown(note)}", file=sys.stderr)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tqdm(unit="B", unit_scale=True, desc="verify", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False,
              total=_total(directory)) as bar:  # fmt: skip
        report = verify(directory, source=source, sample=sample, workers=workers, progress=bar.update)
    if as_json:
        print(json.dumps(report.table() | {"directory": str(directory)}, indent=1))
    else:
        for finding in report.findings[:SHOWN]:
            print(finding.text(), file=sys.stdout if finding.severity == ERROR else sys.stderr)
        if len(report.findings) > SHOWN:
            print(f"... and {len(report.findings) - SHOWN} more (--json lists all)")
        counted = ", ".join(f"{number} {what}" for what, number in report.counts.items())
        print(f"{shown(directory)}: {'ok' if not report.errors else f'{report.errors} error(s)'}: {counted}")
    raise typer.Exit(report.exit_code)


def _progress(text: str) -> None:
    """What is done now, on a line; a text of several lines is a plan, and stands as it is."""
    said = shown_lines(text.split("\n"))
    print(said if "\n" in said else f"{said} ...", file=sys.stderr, flush=True)


def _total(directory: Path) -> int | None:
    """Bytes the progress bar counts to, if the manifest can be read at all; verify itself reports on it."""
    if not sys.stderr.isatty() or not (directory / MANIFEST).is_file():
        return None
    try:
        return sum(f.nbytes for f in read_manifest(directory / MANIFEST).files.values())
    except PagestoneError:
        return None


def _verify_logits(
    directory: Directory,
    source: Annotated[
        Path | None,
        typer.Option(help="Encode the other side from this checkpoint instead of reading it.", parser=named),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt a line.")] = None,
    ids: Annotated[Path | None, typer.Option(help="A file with a prompt of token ids a line.")] = None,
    steps: Annotated[int, typer.Option(min=0, max=MOST, help="Tokens decoded after each prompt.")] = 16,
    budget: Annotated[str | None, typer.Option(help="Memory for experts; default a quarter of all.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for everything, such as 4GiB: the other side then reads each record anew, unless --resident "
            "fits too."
        ),
    ] = None,
    io: Annotated[str, typer.Option(help="How experts are streamed: direct or mmap.")] = "direct",
    threads: Annotated[int, typer.Option(min=0, max=64, help="Threads that read ahead in direct mode.")] = 2,
    experts: Annotated[str, typer.Option(help=EXPERTS_HELP)] = "auto",
    against: Annotated[Path | None, typer.Option(help="Compare with this audit instead of a resident run.")] = None,
    audit: Annotated[Path | None, typer.Option(help="Write an audit (JSON) here, and its traces beside it.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, for --prompts.", parser=named)
    ] = None,
    resident: Annotated[
        bool,
        typer.Option(
            "--resident",
            help="Hold every record in memory on the other side. Default: if that fits what is free, else each is "
            "read anew.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the audit as JSON.")] = False,
) -> None:
    from pagestone.reader.budget import parse_size
    from pagestone.validate import logits

    if sum(x is not None for x in (prompts, ids, against)) > 1 or (source is not None and against is not None):
        raise RequestError(
            "--prompts, --ids and --against exclude each other, and --source and --against do", code="E0005",
            remedy="give one: an audit has its own prompts, and stands for the other side",
        )  # fmt: skip
    request = logits.LogitsRequest(
        directory, source=source, prompts=prompts, ids=ids, steps=steps, io=io, threads=threads, against=against,
        budget=None if budget is None else parse_size(budget), tokenizer=tokenizer,
        experts=experts, audit=audit, resident=resident,
        memory=None if memory is None else parse_size(memory, "--memory"),
    )  # fmt: skip
    result = logits.verify_logits(request, _progress)
    print(json.dumps(result.table(None), indent=1) if as_json else logits.report(result), flush=True)
    if audit is not None:  # after the result: a disk that is full by now does not take it away
        with machine_errors(audit, "writing the audit"):
            result.write(audit)
    raise typer.Exit(result.exit_code)


def _compare(
    directory: Directory,
    source: Annotated[Path, typer.Option(help="The checkpoint it was made from.", parser=named)],
    text: Annotated[Path | None, typer.Option(help="A text: KL, top-1 agreement and perplexity over it.")] = None,
    questions: Annotated[
        Path | None, typer.Option(help="JSON lines with question and answer: how many are answered to the letter.")
    ] = None,
    choices: Annotated[
        Path | None,
        typer.Option(help="JSON lines as HellaSwag or ARC have them: how often the right ending is the likeliest."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=MOST, help="At most this many tokens of the text.")] = 8192,
    window: Annotated[int, typer.Option(min=2, max=MOST, help="Tokens fed at once.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, max=MOST, help="At most this many of each file.")] = None,
    budget: Annotated[str | None, typer.Option(help="Memory for the container's experts.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for everything, such as 4GiB: the source runs first, encoded as it is read, then the "
            "container; what the source said waits on disk. Default: both are loaded, the source whole."
        ),
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="With --memory: the folder where the source's logits wait.", parser=named)
    ] = None,
    io: Annotated[
        str, typer.Option(help="How experts are read: direct, mmap (not compared with digests) or resident.")
    ] = "direct",
    experts: Annotated[str, typer.Option(help=EXPERTS_HELP)] = "auto",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, if the source has none.", parser=named)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from pagestone.reader.budget import parse_size
    from pagestone.validate import fidelity

    if text is None and questions is None and choices is None:
        raise RequestError(
            "something to compare on expected, found neither --text nor --questions nor --choices", code="E0006",
            remedy="give --text FILE, --questions FILE, --choices FILE or several",
        )  # fmt: skip
    request = fidelity.FidelityRequest(
        directory, source, text=text, questions=questions, choices=choices, tokens=tokens, window=window,
        limit=limit, io=io,
        budget=None if budget is None else parse_size(budget), tokenizer=tokenizer, experts=experts,
        memory=None if memory is None else parse_size(memory, "--memory"), scratch=scratch,
    )  # fmt: skip
    result = fidelity.compare(request, _progress)
    print(json.dumps(result.table(), indent=1) if as_json else result.text())


def _doctor(
    directory: Annotated[
        Path, typer.Argument(help="Directory of a container or of a checkpoint.", metavar="DIRECTORY", parser=named)
    ],
    memory: Annotated[
        str | None, typer.Option(help="Memory for everything, such as 4GiB, to plan for. Default: what is free.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from pagestone.reader.budget import parse_size
    from pagestone.validate.doctor import diagnose

    report = diagnose(directory, None if memory is None else parse_size(memory, "--memory"))
    print(json.dumps(report.table(), indent=1) if as_json else report.text())
    raise typer.Exit(report.exit_code)
