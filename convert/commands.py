"""`pagestone prepare-<codec>`, one command for every codec in the registry."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pagestone.convert import report
from pagestone.convert.outcome import Outcome
from pagestone.convert.plan import Plan, Request
from pagestone.convert.prepare import plan_for, prepare, ready
from pagestone.formats import encodings, native
from pagestone.formats.dense_matrices import KEEP
from pagestone.formats.directories import directory, output_directory
from pagestone.formats.errors import Interrupted, RequestError
from pagestone.formats.text import clipped, shown


def default_workers() -> int:
    """One worker per core this process may use, at most 8: beyond that a disk gives no more."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """(first, end) from `A:B`; either may be left out."""
    if text is None:
        return None
    first, colon, end = text.partition(":")
    if colon and all(not word or (word.isascii() and word.isdigit() and len(word) < 7) for word in (first, end)):
        span = (int(first or 0), int(end or 10**6))
        if span[0] < span[1]:
            return span
    raise RequestError(
        f"--layers expected as A:B with A < B, found {clipped(text, 40)!r}",
        code="E0001",
        remedy="for example --layers 0:2",
    )


@contextmanager
def interruptible(output: Path) -> Iterator[None]:
    """Within it the first Ctrl-C stops the workers and ends the process with code 130; a second one does not wait.

    Either way the process ends at once and without the interpreter's own ending: a worker that comes back from a kernel
    while Python is being taken down would abort it. What is finished is durable, so nothing is lost.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield  # deaf on purpose (nohup), or not ours to set
        return
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        if asked:
            _leave(output)
        asked = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    except KeyboardInterrupt:
        _leave(output)
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(output: Path) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    error = Interrupted("interrupted; finished layers are kept", code="E0002", file=output,
                        remedy="run the same command to continue")  # fmt: skip
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, full, or in the middle of a write that this interrupts
            stream.flush()
    with suppress(Exception):
        # not through the stream: that may be what was interrupted
        os.write(2, f"\nerror: {error}\n".encode(errors="backslashreplace") if sys.stderr.isatty()
                 else f"error: {error}\n".encode(errors="backslashreplace"))  # fmt: skip
    os._exit(Interrupted.exit_code)


def register(app: typer.Typer) -> None:
    """Add the commands of this room to the application."""
    for name, cls in sorted(encodings.registry().items()):
        # the codec's page in one line: the module's first sentence, without its names and the reference to the spec
        first = (sys.modules[cls.__module__].__doc__ or "").splitlines()[0]
        summary = first.partition(": ")[2].partition(" (specs/")[0]
        command = _command(name, cls.options)
        app.command(f"prepare-{name}", help=f"Convert to {name}: {summary}.")(command)


def _command(name: str, options: tuple[encodings.Option, ...]) -> Callable[..., None]:
    def run(
        checkpoint: Annotated[
            Path, typer.Argument(help="Directory with config.json and .safetensors files.", parser=directory)
        ],
        output: Annotated[
            Path, typer.Option("--output", "-o", help="Directory of the container.", parser=output_directory)
        ],
        workers: Annotated[int, typer.Option(min=1, max=256, help="Experts converted at once.")] = default_workers(),
        layers: Annotated[str | None, typer.Option(help="A:B: only the experts of layers A to B-1.")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
        force: Annotated[bool, typer.Option("--force", help="Replace a container or discard unfinished work.")] = False,
        include_code: Annotated[bool, typer.Option("--include-code", help="Copy the source's *.py files too.")] = False,
        merge_unlisted: Annotated[
            bool, typer.Option("--merge-unlisted", help="Take tensors of .safetensors files outside the index too.")
        ] = False,
        dense: Annotated[
            str, typer.Option(help="Encode large dense matrices too: keep, int8, fp8, q8 or q4.", metavar="ENCODING")
        ] = KEEP,
        sha256: Annotated[bool, typer.Option("--sha256", help="Add SHA-256 of every file to the manifest.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
        **chosen: int,
    ) -> None:
        begun = time.monotonic()
        codec = encodings.get(name, _checked(chosen, options))
        request = Request(checkpoint, codec, parse_layers(layers), include_code, merge_unlisted, dense)
        if dry_run:
            planned = plan_for(request, output)
            print(
                json.dumps(report.plan_table(planned, output), indent=1)
                if as_json
                else report.plan_text(planned, output)
            )
            return
        if (note := native.slow_note()) is not None:
            print(f"note: {shown(note)}", file=sys.stderr)
        from tqdm import tqdm

        todo = ready(request, output, force=force)
        total = todo.bytes_in if isinstance(todo, Plan) else None
        with tqdm(total=total, unit="B", unit_scale=True, desc=f"prepare-{name}", file=sys.stderr,
                  disable=not sys.stderr.isatty(), leave=False) as bar, interruptible(output):  # fmt: skip
            outcome = todo if isinstance(todo, Outcome) else prepare(
                todo, output, workers=workers, force=force, sha256=sha256, progress=bar.update
            )  # fmt: skip
        for warning in outcome.warnings:
            print(f"warning: {shown(warning)}", file=sys.stderr)
        seconds = time.monotonic() - begun
        if as_json:
            print(json.dumps(report.outcome_table(outcome, output, seconds), indent=1))
        else:
            print(report.outcome_text(outcome, output, seconds))

    return _with_options(run, options)


def _with_options(run: Callable[..., None], options: tuple[encodings.Option, ...]) -> Callable[..., None]:
    """`run` with a command line option for each of the codec's, passed to it by name."""
    signature = inspect.signature(run, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [
        inspect.Parameter(o.name, inspect.Parameter.KEYWORD_ONLY, default=o.choices[0],
                          annotation=Annotated[int, typer.Option(help=f"{o.help} {' or '.join(map(str, o.choices))}.")])
        for o in options
    ]  # fmt: skip
    run.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
    return run


def _checked(chosen: dict[str, int], options: tuple[encodings.Option, ...]) -> dict[str, int]:
    """The chosen values, each one of its option's choices."""
    for option in options:
        if chosen[option.name] not in option.choices:
            flag, choices = "--" + option.name.replace("_", "-"), " or ".join(map(str, option.choices))
            raise RequestError(f"{flag} expected to be {choices}, found {chosen[option.name]}", code="E0004",
                               remedy=f"for example {flag} {option.choices[0]}")  # fmt: skip
    return chosen
