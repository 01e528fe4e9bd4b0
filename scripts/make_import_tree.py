#!/usr/bin/env python3
"""Link the source folders into build/import/pagestone/, where type checkers find them as the package they become.

The folders and their package names come from the same table in pyproject.toml that builds the wheel.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    tree = ROOT / "build" / "import"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    package = tree / "pagestone"
    package.mkdir()
    for name, folder in sorted(table.items()):
        if name == "pagestone":
            for file in sorted(f for f in (ROOT / folder).iterdir() if f.is_file()):
                (package / file.name).symlink_to(file)
        else:
            (tree / name).symlink_to(ROOT / folder, target_is_directory=True)


if __name__ == "__main__":
    main()
