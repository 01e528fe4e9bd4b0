"""The state of a model: of one size where a context is given, with the same logits, and its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.families import FAMILIES, MODELS, SIZES, build
from kits.inference import calm, sequence

from pagestone.formats.errors import RequestError
from pagestone.reader import transformers_inside as inside
from pagestone.reader.hosts import transformers as host

torch: Any
REFUSED = ("qwen3_vl_moe",)
ROOM = 64
WINDOW = 6
"""Shorter than what is fed: windows of the kit's models are."""


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


@pytest.fixture(scope="session")
def built(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Models of families as transformers runs them, each made once."""
    made: dict[str, Any] = {}

    def one(name: str) -> Any:
        if name not in made:
            wanted = MODELS[name]
            more = {"olmoe": {"head_dim": 32}, "gpt_oss": {"sliding_window": WINDOW}}.get(name, {})
            wanted = dataclasses.replace(wanted, extra=dict(wanted.extra) | more)
            root: Path = tmp_path_factory.mktemp("context") / name
            build(wanted, SIZES["wide"], root)
            made[name] = host.plain_model(root)
        return made[name]

    return one


TURNS: tuple[Sequence[int], ...] = ((21,), (4, 1, 1, 1, 1, 1), (17, 1, 9, 5))
"""Tokens fed at once, turn after turn."""


def logits(model: Any, sizes: Sequence[int], tokens: int | None, state: Any = None) -> list[Any]:
    """Logits of every position, in pieces of these sizes."""
    model.context.tokens = tokens
    ids, found = sequence(sum(sizes), 40), []
    for size in sizes:
        piece, ids = ids[:size], ids[size:]
        rows, state = model.forward(piece, state, every=True)
        found.append(rows)
    model.context.tokens = None
    return found


@pytest.mark.parametrize("attention", [host.PACKED, "eager"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_the_same_logits(built: Callable[[str], Any], name: str, attention: str) -> None:
    """Bit for bit those of the state that grows: full attention, windows, linear attention, several turns."""
    model = built(name)
    host._set_attention(model.model, attention)
    for first in TURNS:
        for room in (ROOM, sum(first) + 3):
            sizes = (*first, 2, 1)
            grown, fixed = logits(model, sizes, None), logits(model, sizes, room)
            assert all(torch.equal(a, b) for a, b in zip(grown, fixed, strict=True)), (first, room)


def test_memory_is_taken_once(built: Callable[[str], Any]) -> None:
    """Keys and values stay where they were, through prompt and answer; what a window keeps is of one size."""
    for name in ("qwen3_5_moe", "gpt_oss"):
        model = built(name)
        model.context.tokens = ROOM
        _, state = model.forward([1, 2, 3])
        places = [tensors(layer) for layer in state.layers]
        for _ in range(ROOM - 3):
            _, state = model.forward([4], state)
        assert [tensors(layer) for layer in state.layers] == places
        model.context.tokens = None
    rooms = [layer._buffers[0].shape[-2] for layer in state.layers]
    assert rooms == [inside.window_room(WINDOW, ROOM), ROOM] == [2 * WINDOW, ROOM]


def tensors(layer: Any) -> list[int]:
    """Where the memory of a layer's state begins."""
    own = getattr(layer, "_buffers", None)
    if own is None:
        own = [t for name in ("conv_states", "recurrent_states") for t in _values(getattr(layer, name))]
    assert own
    return [t.untyped_storage().data_ptr() for t in own]


def _values(stored: Any) -> list[Any]:
    return list(stored.values()) if isinstance(stored, dict) else [stored]


def test_a_full_state_refuses_more(built: Callable[[str], Any]) -> None:
    """E1272 for the first token beyond, in layers of either kind; the last one that fits is taken."""
    for name in ("qwen3_moe", "gpt_oss"):
        model = built(name)
        logits(model, (ROOM - 1, 1), ROOM)
        for sizes in ((ROOM + 1,), (ROOM, 1)):
            with pytest.raises(RequestError, match="E1272"):
                logits(model, sizes, ROOM)
        model.context.tokens = None


def test_windows_refuse_too(built: Callable[[str], Any]) -> None:
    """A model of windows alone has an end as well."""
    layer = inside.window_layer()(WINDOW, ROOM)
    rows = torch.zeros(1, 2, ROOM, 4)
    layer.update(rows, rows)
    with pytest.raises(RequestError, match="E1272"):
        layer.update(rows[..., :1, :], rows[..., :1, :])


def test_states_of_another_kind_are_refused() -> None:
    """E1275 for layers that nobody proved equal, by their exact class, and for a window of no past."""
    from transformers import cache_utils

    class Other(cache_utils.DynamicLayer):  # type: ignore[misc]
        """A layer of a release to come."""

    for layer in (Other(), cache_utils.DynamicSlidingWindowLayer(sliding_window=1)):
        with pytest.raises(RequestError, match="E1275"):
            inside._fixed(layer, ROOM)
