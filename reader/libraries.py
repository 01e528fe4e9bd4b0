"""The libraries a running model may need: whether they are there, in a version that was tested, and how to calm them.

Nothing is imported by importing this module.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from typing import Any

from pagestone.formats.errors import RequestError
from pagestone.formats.text import clipped

OLDEST, NEWEST = (5, 13), (5, 24)
"""The transformers releases between which every family was tested, both ends included; pyproject.toml says the same."""
TESTED = "transformers>={}.{},<{}.{}".format(*OLDEST, NEWEST[0], NEWEST[1] + 1)
"""The same range, as pip takes it."""
NEWER_FAMILIES: dict[str, tuple[int, int]] = {}
"""Model types that came after `OLDEST`, and the first release with which each was tested."""
INSTALL = "pip install 'pagestone[inference]' (for torch's CPU build see the selector on PyTorch's site)"


def require(*packages: str) -> None:
    """Raise `RequestError` unless the packages are installed (E1220), transformers in a tested version (E1221)."""
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise RequestError(
                f"{package} is needed to run a model and is not installed", code="E1220", remedy=INSTALL
            ) from None
        if package == "transformers" and not OLDEST <= _release(version) <= NEWEST:
            raise RequestError(
                f"{TESTED} expected, found {version}: other versions were not tested",
                code="E1221",
                remedy=f"pip install '{TESTED}'",
            )


def require_model_type(model_type: Any) -> None:
    """Refuse (E1221) a model type that the installed transformers, although tested, is too old for."""
    first = NEWER_FAMILIES.get(str(model_type), OLDEST)
    version = importlib.metadata.version("transformers")
    if _release(version) < first:
        since = "transformers>={}.{}".format(*first)
        raise RequestError(
            f"{since} expected for models of type {model_type}, found {version}",
            code="E1221",
            remedy=f"pip install '{since},{TESTED.partition(',')[2]}'",
        )


def release_of(package: str) -> tuple[int, int]:
    """Major and minor number of an installed package."""
    return _release(importlib.metadata.version(package))


def _release(version: str) -> tuple[int, int]:
    """Major and minor number; (0, 0) for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


def quiet() -> None:
    """Keep transformers from asking the network and from writing progress bars and advice to stderr."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import utils

    logging: Any = utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def reason(error: BaseException) -> str:
    """What an error of a library says, on one line, with its kind where the text alone says nothing."""
    text = " ".join(str(error).split())
    named = f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not text else text
    return clipped(named, 400)
