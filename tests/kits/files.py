"""What the storages of tests have in common: files that are named in a table, and belong to no directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pagestone.formats.storage import Kind


class FilesByName:
    """All of a storage but lengths, stamps and bytes: names and kinds from the keys of `files`."""

    def __init__(self, files: Mapping[str, Any], name: str) -> None:
        self.files, self._name = dict(files), name

    def file(self, name: str) -> Any:
        """What the table has for a file."""
        if name not in self.files:
            raise FileNotFoundError(2, "No such file or directory", self.describe(name))
        return self.files[name]

    def names(self, folder: str = "") -> list[str]:
        if self.kind(folder) is not Kind.FOLDER:
            raise NotADirectoryError(20, "Not a directory", self.describe(folder))
        start = f"{folder}/" if folder else ""
        return sorted({n.removeprefix(start).split("/")[0] for n in self.files if n.startswith(start)}, key=str.encode)

    def kind(self, name: str = "") -> Kind | None:
        if name in self.files:
            return Kind.FILE
        return Kind.FOLDER if not name or any(n.startswith(f"{name}/") for n in self.files) else None

    def holds(self, name: str) -> bool:
        return name in self.files

    def mode(self, name: str) -> int | None:
        self.file(name)
        return None

    def describe(self, name: str = "") -> str:
        return f"{self._name}:{name}"

    def path(self) -> Path | None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        pass
