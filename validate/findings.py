"""What a check found: findings are collected, not raised, so that one run tells everything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagestone.formats.errors import MachineError, PagestoneError
from pagestone.formats.text import clipped, shown

ERROR, WARNING = "error", "warning"
UNREAD = "E1031"
"""The code of what the machine did not let us read."""
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of the system that tell of another directory than the one expected, not of a machine that failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: `offset` is the byte in `file` where it lies, None if it has no place."""

    severity: str
    code: str
    file: str
    message: str
    offset: int | None = None

    def text(self) -> str:
        """One line, safe for a terminal: `error: layers-07.safetensors: expert 12 ... at byte 1052672: ... (E1001)`."""
        place = "" if self.offset is None else f" at byte {self.offset}"
        return shown(f"{self.severity}: {clipped(self.file)}{place}: {clipped(self.message)} ({self.code})")


def of_error(error: PagestoneError | OSError, file: str, offset: int | None = None) -> Finding:
    """An error another room or the operating system raised, as a finding; `file` is named where the error names none.

    A file that is not there is a fault of the data (E1002), one that the machine does not give (E1031) is not: a sector
    that cannot be read, a permission that lacks.
    """
    if isinstance(error, OSError):
        code = "E1002" if isinstance(error, ABSENT) else UNREAD
        name = _name(os.fsdecode(error.filename), file) if error.filename is not None else file
        return Finding(ERROR, code, name, f"reading failed: {error.strerror or error}", offset)
    name = _name(error.file, file) if error.file else file
    tensor = f"{error.tensor}: " if error.tensor else ""
    return Finding(
        ERROR, UNREAD if isinstance(error, MachineError) else error.code, name, f"{tensor}{error.message}", offset
    )


def _name(path: str, file: str) -> str:
    """`file` if it is the end of `path` (some files of a container lie in a folder), else the name of that one."""
    return file if file and path.endswith(f"/{file}") else Path(path).name


def guarded(findings: Iterable[Finding], file: str) -> Iterator[Finding]:
    """Findings as they come; an error that ends them is the last one, so that other checks go on."""
    try:
        yield from findings
    except (PagestoneError, OSError) as error:
        yield of_error(error, file)


@dataclass(slots=True)
class Report:
    """Findings of one run, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _unread: set[Finding] = field(default_factory=set)

    def add(self, findings: Iterable[Finding]) -> None:
        """Take findings as they come; that a file cannot be read is said once, however many checks would read it."""
        for finding in findings:
            if finding.code == UNREAD:
                if finding in self._unread:
                    continue
                self._unread.add(finding)
            self.findings.append(finding)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    @property
    def errors(self) -> int:
        return sum(f.severity == ERROR for f in self.findings)

    @property
    def exit_code(self) -> int:
        """0 if no error was found; 3 if all that was found is that the machine could not read; else 1."""
        codes = {f.code for f in self.findings if f.severity == ERROR}
        return 3 if codes == {UNREAD} else int(bool(codes))

    def table(self) -> dict[str, Any]:
        """For --json."""
        return {"ok": not self.errors, "errors": self.errors, "checked": self.counts,
                "findings": [asdict(f) for f in self.findings]}  # fmt: skip
