"""`pagestone verify`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagestone.formats.errors import PagestoneError, RequestError
from pagestone.formats.manifest import MANIFEST, read_manifest
from pagestone.validate.findings import ERROR
from pagestone.validate.verify import verify

SHOWN = 50
"""Findings printed for people; --json has all."""


def register(app: typer.Typer) -> None:
    """Add the commands of this room to the application."""
    app.command("verify", help="Check every byte of a container, and compare it with its source if one is given.")(
        _verify
    )


def _verify(
    directory: Annotated[Path, typer.Argument(help="Directory of the container.")],
    source: Annotated[
        Path | None, typer.Option(help="The checkpoint it was made from: encode again and compare.")
    ] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="With --source: compare only this many experts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from tqdm import tqdm

    if sample is not None and source is None:
        raise RequestError(
            "--sample compares experts with a source, and none is given", code="E0003", remedy="add --source CHECKPOINT"
        )
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
        print(f"{directory}: {'ok' if not report.errors else f'{report.errors} error(s)'}: {counted}")
    raise typer.Exit(report.exit_code)


def _total(directory: Path) -> int | None:
    """Bytes the progress bar counts to, if the manifest can be read at all; verify itself reports on it."""
    if not sys.stderr.isatty() or not (directory / MANIFEST).is_file():
        return None
    try:
        return sum(f.nbytes for f in read_manifest(directory / MANIFEST).files.values())
    except PagestoneError:
        return None
