"""What a check found: findings are collected, not raised, so that one run tells everything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagestone.formats.errors import PagestoneError
from pagestone.formats.text import clipped, shown

ERROR, WARNING = "error", "warning"


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


def of_error(error: PagestoneError | OSError, file: str) -> Finding:
    """An error another room or the operating system raised, as a finding."""
    if isinstance(error, OSError):
        return Finding(ERROR, "E1002", Path(error.filename or file).name, error.strerror or str(error))
    name = Path(error.file).name if error.file else file
    tensor = f"{error.tensor}: " if error.tensor else ""
    return Finding(ERROR, error.code, name, f"{tensor}{error.message}")


@dataclass(slots=True)
class Report:
    """Findings of one run, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings.extend(findings)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    @property
    def errors(self) -> int:
        return sum(f.severity == ERROR for f in self.findings)

    @property
    def exit_code(self) -> int:
        """0 if no error was found, else 1."""
        return 1 if self.errors else 0

    def table(self) -> dict[str, Any]:
        """For --json."""
        return {"ok": not self.errors, "errors": self.errors, "checked": self.counts,
                "findings": [asdict(f) for f in self.findings]}  # fmt: skip
