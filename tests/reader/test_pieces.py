"""Prefill: a layer at a time over the whole prompt, each expert read at most once, work within a layer in pieces."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.inference import Workshop, calm
from kits.inference import model as any_model

from pagestone.reader.container import Layer, open_container
from pagestone.reader.leases import Counters, Totals

torch: Any


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("containers"))


def prompt(length: int, seed: int = 1) -> list[int]:
    """Ids of tiny-moe's vocabulary that send tokens to most experts of every layer."""
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


# -- experts are read at most once a prompt and layer -----------------------------------------------------------------


class Leased:
    """An observer that knows which experts every layer used, and in how many steps."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.used: dict[int, set[int]] = {}

    def layer(self, layer: int, what: str, digest: bytes) -> None:
        self.steps[layer] = self.steps.get(layer, 0) + (what == "input")

    def expert(self, layer: int, expert: int, digest: bytes) -> None:
        self.used.setdefault(layer, set()).add(expert)


def check_reads(model: Any, layers: dict[int, Layer], ids: list[int], state: Any) -> Any:
    """Feed ids; every expert that a layer used was read once or was still there, as the bytes say. The state."""
    store = model.context.store
    before = Totals.of(store.counters)
    model.context.observer = leased = Leased()
    _, state = model.forward(ids, state)
    model.context.observer = None
    for number, layer in layers.items():
        cost = store.counters[number] - before.layers.get(number, Counters())
        used = len(leased.used[number])
        assert leased.steps[number] == 1, "a layer's experts are gone through once"
        assert used >= 6, "a prompt that uses twice what the cache holds"
        assert cost.hits + cost.misses == used
        assert cost.bytes_read == cost.misses * layer.stride <= used * layer.stride
        assert cost.misses >= used - store.budget // layer.stride
    return state


@pytest.mark.parametrize("codec", ["int8", "q4"])
def test_an_expert_is_read_at_most_once_a_prompt_and_layer(workshop: Workshop, codec: str) -> None:
    """By the bytes read, in two turns of a chat, with a cache smaller than what one layer uses."""
    container = open_container(workshop.container(codec))
    model = any_model(container, budget=3 * max(layer.stride for layer in container.layers.values()))
    state = check_reads(model, container.layers, prompt(301), None)
    state = check_reads(model, container.layers, prompt(217, seed=3), state)
    assert state.get_seq_length() == 518
    model.close()
