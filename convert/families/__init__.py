"""Model families: where a family's routed experts stand in a checkpoint. One file each, found by its file name.

A module defines `FAMILY`. Nothing after the plan sees a name from the source.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from pagestone.convert.family import Family


@cache
def registry() -> dict[str, Family]:
    """Every family by model type."""
    families: dict[str, Family] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        family: Family = importlib.import_module(f"{__name__}.{module}").FAMILY
        for model_type in family.model_types:
            if model_type in families:
                raise ValueError(f"{model_type} stands in two families")
            families[model_type] = family
    return families


def of_config(config: dict[str, Any]) -> Family | None:
    """The family whose model type the config states, at top level or under `text_config`; None if unknown."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        family = registry().get(str(place.get("model_type")))
        if family is not None:
            return family
    return None
