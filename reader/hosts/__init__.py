"""Hosts: what makes a running model of a container. One file each, found by its file name.

A module defines `HOST`. Importing one imports nothing that a base installation lacks.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

from pagestone.formats.errors import RequestError
from pagestone.reader.container import Container
from pagestone.reader.dense import DenseTensors
from pagestone.reader.footprint import Footprint
from pagestone.reader.model import Loading, Model
from pagestone.reader.store import ExpertStore

DEFAULT = "transformers"


class Host(Protocol):
    """Makes models."""

    name: str

    def require(self) -> None:
        """Raise `RequestError` unless what it needs is installed. Nothing is imported."""

    def vocabulary_of(self, root: Path) -> int:
        """How many tokens the model of a directory's config.json knows; no model is made. `RequestError` (E1225)."""

    def footprint(self, container: Container, how: Loading, longest: int) -> Footprint | None:
        """What the container's model takes beside its weights, with prompts of up to `longest` tokens.

        The libraries that loading needs are imported then. None: nothing better than what config.json says.
        """

    def load(self, container: Container, store: ExpertStore, how: Loading, dense: DenseTensors | None = None) -> Model:
        """The container's model with its experts coming from `store`, which the model then closes.

        Dense tensors are the container's, mapped if the store maps, else read; `dense` gives them instead. Raises
        `RequestError` for a container it cannot run (E122x), and then leaves the store to its owner.
        """


@cache
def registry() -> dict[str, Host]:
    """Every host by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    hosts: list[Host] = [module.HOST for module in modules]
    return {host.name: host for host in hosts}


def get(name: str) -> Host:
    """The host of a name; `RequestError` (E1291)."""
    if name not in registry():
        raise RequestError(
            f"a host of {', '.join(sorted(registry()))} expected, found {name!r}",
            code="E1291",
            remedy="choose one of them",
        )
    return registry()[name]


@contextmanager
def registered(host: Host) -> Iterator[None]:
    """Within it there is one host more: for hosts of other packages, and for tests."""
    hosts = registry()
    if host.name in hosts:
        raise ValueError(f"{host.name} is a host already")
    hosts[host.name] = host
    try:
        yield
    finally:
        del hosts[host.name]
