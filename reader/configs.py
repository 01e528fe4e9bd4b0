"""A model's configs: tables that others wrote, read so that whatever is wrong with one is an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.strict_json import brief, load_object
from pagestone.reader.files import RESTORE, MachineErrors
from pagestone.reader.libraries import TESTED, reason, require_model_type

GENERATION = "generation_config.json"


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if there is no such file. `DataError` (E1227) if it is anything else."""
    if not path.is_file():
        return {}
    with MachineErrors(path, "reading"):
        return load_object(path, code="E1227", remedy=RESTORE, twice=True, constants=True)


def wrong_field(path: Path, name: str, expected: str, value: Any, remedy: str = RESTORE) -> DataError:
    """What to raise (E1235) for a field of a config that is not as it must be."""
    return DataError(f"{name}: {expected} expected, found {brief(value)}", code="E1235", file=path, remedy=remedy)


def read_config(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of a model, and the part that describes its language model (itself, or `text_config`)."""
    table = read_table(root / "config.json")
    part = table.get("text_config")
    if part is not None and not isinstance(part, dict):
        raise wrong_field(root / "config.json", "text_config", "an object", part)
    return table, table if part is None else part


def is_int(value: Any) -> bool:
    """Whether it is an integer, and not a bool that passes for one."""
    return isinstance(value, int) and not isinstance(value, bool)


# -- as transformers reads them --------------------------------------------------------------------------------------


@contextmanager
def understood(root: Path, complaint: str) -> Iterator[None]:
    """Whatever transformers raises over a config as E1225 with its file: its classes check little, in many ways."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise RequestError(
            f"{complaint}: {reason(error)}",
            code="E1225",
            file=root / "config.json",
            remedy=f"only models that {TESTED} knows can be run",
        ) from None


def require_family(root: Path) -> None:
    """Refuse (E1221) a family that this release is too old for; what is wrong with a config, transformers says."""
    try:
        model_type = read_config(root)[0].get("model_type")
    except PagestoneError:
        return
    require_model_type(model_type)


def vocabulary_of(root: Path) -> int:
    """How many tokens the model of a config.json knows; no model is made. `RequestError` (E1225)."""
    from transformers import AutoConfig

    require_family(root)
    with understood(root, "transformers does not understand this config"):
        config: Any = AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        return int(config.get_text_config().vocab_size)
