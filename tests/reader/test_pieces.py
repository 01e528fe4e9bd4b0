"""Prefill: a layer at a time over the whole prompt, each expert read at most once, work within a layer in pieces."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.families import LONG, MODELS, SIZES, STRUCTURES
from kits.inference import Workshop, calm, equal, sequence
from kits.inference import model as any_model

from pagestone.formats.errors import RequestError
from pagestone.reader import attention, pieces
from pagestone.reader.container import Layer, open_container
from pagestone.reader.hosts import transformers as host
from pagestone.reader.leases import Counters, Totals
from pagestone.reader.libraries import OLDEST, release_of
from pagestone.reader.model import Context, Loading
from pagestone.reader.pieces import spans, work_in_pieces

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


# -- pieces are the whole ---------------------------------------------------------------------------------------------

LONGER: dict[str, dict[str, Any]] = {
    "olmoe": {"head_dim": 32},
    "mixtral": {"sliding_window": 100},
    "deepseek_v2": {"q_lora_rank": 24},
}
"""What else a family's attention can do: a window shorter than a prompt, queries made of a short row."""
KINDS = [(name, {}) for name in MODELS if name not in ("olmoe", "qwen3_vl_moe")] + list(LONGER.items())
TRIED = [(name, extra) for name, extra in KINDS if LONG or extra or name in STRUCTURES.values()]


def library_model(name: str, extra: dict[str, Any]) -> Any:
    """The library's own model of a family in float32, every parameter random, with our attention."""
    import transformers

    attention.register_attention()
    family = MODELS[name]
    config = getattr(transformers, family.config)
    settings = family.settings(SIZES["wide"]) | {"max_position_embeddings": 4096, "experts_implementation": "eager"}
    made = config(text_config=settings) if family.vision is not None else config(**settings | extra)
    generator = torch.Generator().manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(made.get_text_config(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    host._set_attention(model, host.PACKED)
    return model.eval()


def turns(model: Any, piece: int | None) -> list[Any]:
    """Logits of two prompts and a token after them: 300 tokens are four pieces of 64 and 44 tokens, or one."""
    text = model.config.get_text_config()
    running = host.TransformersModel(model, Context(None), text, torch.float32, host.PACKED, piece=piece)  # type: ignore[arg-type]
    state, found = None, []
    for ids in (sequence(300, 40), sequence(170, 40, seed=2), [7]):
        logits, state = running.forward(ids, state, every=True)
        found.append(logits)
    return found


@pytest.mark.parametrize(("name", "extra"), TRIED, ids=[n + "".join(f"-{k}" for k in e) for n, e in TRIED])
def test_pieces_are_the_whole(name: str, extra: dict[str, Any]) -> None:
    """In float32, where rounding is far below what a mask, a position or a state of another piece would change."""
    model = library_model(name, extra)
    whole = turns(model, None)
    assert work_in_pieces(model, 64) is None
    calls = count_calls(model)
    for one, two in zip(whole, turns(model, 64), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=2e-4 * float(one.abs().max())), float((one - two).abs().max())
    assert set(calls.values()) == {(300 // 64) + (170 // 64) + 1}, "every attention was called a piece at a time"


def count_calls(model: Any) -> dict[Any, int]:
    """How often the attention of every layer computes, counted from here on by its output's projection."""
    calls: dict[Any, int] = {}
    for name, module in model.named_modules():
        if name.endswith(("self_attn.o_proj", "linear_attn.out_proj")):
            calls[name] = 0

            def counted(*_: Any, name: str = name) -> None:
                calls[name] += 1

            module.register_forward_hook(counted)
    assert len(calls) == 2, calls
    return calls


def keeps_bits() -> bool:
    """Whether the release computes linear attention so that pieces round as the whole does: oldest ones do not."""
    return release_of("transformers") > OLDEST


TURNS: tuple[tuple[int, ...], ...] = ((300, 1, 1), (65, 3), (127,), (191, 2), (130, 200), (129, 1, 200, 1, 64, 1))
"""Tokens fed at once, turn after turn: also after a past that is no multiple of the grid."""


def tensors(layer: Any) -> list[Any]:
    """What a layer of the state holds."""
    held = [getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")]
    parts = [list(each.values()) if isinstance(each, dict) else [each] for each in held]
    return [t for each in parts for t in each if t is not None]


def check_equal(whole: Any, cut: Any, sizes: tuple[int, ...], vocabulary: int) -> None:
    """Logits of every position and the state after every turn, bit for bit."""
    ids, states = sequence(sum(sizes), vocabulary), [None, None]
    for number, size in enumerate(sizes):
        fed, ids = ids[:size], ids[size:]
        rows = []
        for side, model in enumerate((whole, cut)):
            found, states[side] = model.forward(fed, states[side], every=True)
            rows.append(found)
        assert torch.equal(*rows), (sizes, number)
        one, two = ([t for layer in state.layers for t in tensors(layer)] for state in states)  # type: ignore[attr-defined]
        assert len(one) == len(two) >= len(states[0].layers)  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), (sizes, number)


@pytest.mark.parametrize(("codec", "tokens"), [("int8", None), ("int8", 512), ("bf16", None)])
def test_turns_keep_their_bits(workshop: Workshop, codec: str, tokens: int | None) -> None:
    """tiny-moe, pieces of 64 and 128: logits and state of one piece, with state that grows and of one size."""
    if not keeps_bits():
        pytest.skip("in this release pieces differ from the whole by rounding")
    container = open_container(workshop.container(codec))
    whole = any_model(container, "resident", piece=None, tokens=tokens)
    for piece in (64, 128):
        cut = any_model(container, "resident", piece=piece, tokens=tokens)
        assert (cut.piece, whole.piece) == (piece, None)
        for sizes in TURNS:
            check_equal(whole, cut, sizes, 1000)
        cut.close()
    whole.close()


@pytest.mark.parametrize("piece", [128, 512])
def test_bits_are_kept(workshop: Workshop, piece: int) -> None:
    """On tiny-moe, with its layers of both kinds, over two turns; and a prompt of one piece is worked on as ever."""
    if not keeps_bits():
        pytest.skip("in this release pieces differ from the whole by rounding")
    root = workshop.container("int8")
    ids, more = prompt(700), prompt(200, seed=3)
    found = []
    for asked in (None, piece):
        model = any_model(root, piece=asked)
        assert model.piece == asked and model.surroundings()["model"]["prefill_piece"] == asked
        first, state = model.forward(ids, every=True)
        second, state = model.forward(more, state, every=True)
        found.append([first, second, model.forward([7], state)[0]])
        model.close()
    assert equal(*found)


def test_spans() -> None:
    """Multiples of the piece; the last one is never below the grid, so that no product sees a few rows."""
    assert spans(300, None) == spans(300, 512) == [(0, 300)] and spans(191, 128) == [(0, 191)]
    assert spans(192, 128) == [(0, 128), (128, 192)]
    assert spans(256, 128) == [(0, 128), (128, 256)] and spans(319, 128) == [(0, 128), (128, 319)]
    for tokens in range(1, 700):
        found = spans(tokens, 128)
        assert [b for b, _ in found] == [128 * n for n in range(len(found))] and found[-1][1] == tokens
        assert all(e - b == 128 for b, e in found[:-1]) and (len(found) == 1 or 64 <= tokens - found[-1][0] < 192)


@pytest.mark.parametrize("piece", [64, 128])
def test_spans_after_a_past(piece: int) -> None:
    """Keys and values end at a multiple of the grid after every piece but the last; none is short or long."""
    for past in (0, 1, 63, 64, 130, 191):
        for tokens in (1, piece + 63, piece + 64, 400, 511):
            found = spans(tokens, piece, past)
            assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == tokens
            assert (len(found) == 1) if tokens < piece + 64 else (len(found) > 1 or tokens < piece + 128)
            if len(found) > 1:
                assert all((past + end) % 64 == 0 for _, end in found[:-1])
                assert all(64 <= end - begin < piece + 64 for begin, end in found)


@pytest.mark.parametrize("piece", [0, -64, 63, 96, 200])
def test_pieces_off_the_grid_are_refused(piece: int) -> None:
    """E1282: 50, 96 and 200 would change what linear attention computes."""
    with pytest.raises(RequestError, match=rf"found {piece} .*E1282"):
        Loading(prefill_piece=piece)


def test_what_is_not_proved_is_worked_on_whole(workshop: Workshop) -> None:
    """An attention of another class, one that was altered, and one that was asked for by name: the notes say so."""
    model = library_model("qwen3_moe", {})
    altered = model.model.layers[1].self_attn
    altered.forward = lambda *a, **k: None
    assert "Qwen3MoeAttention is no attention that was proved" in str(work_in_pieces(model, 64))
    assert "forward" not in vars(model.model.layers[0].self_attn), "all layers or none"
    del altered.forward
    altered.__class__ = type("OtherAttention", (type(altered),), {"__module__": type(altered).__module__})
    assert "OtherAttention is no attention" in str(work_in_pieces(model, 64))
    asked = any_model(workshop.container("int8"), attention="sdpa")
    assert asked.piece is None and any("the attention sdpa was asked for" in note for note in asked.notes)
    asked.close()


def test_no_mask_of_a_whole_prompt_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What masks take is a piece times what was fed before it."""
    model = library_model("gpt_oss", {})
    assert work_in_pieces(model, 64) is None
    made: list[tuple[int, int]] = []
    real = pieces.Mask.piece
    monkeypatch.setattr(pieces.Mask, "piece", lambda *a: (lambda m: (made.append(tuple(m.shape[-2:])), m)[1])(real(*a)))
    monkeypatch.setattr(pieces.Mask, "whole", lambda _: pytest.fail("a whole mask"))
    turns(model, 64)
    assert {q for q, _ in made} == {64, 108, 106} and max(k for _, k in made) == 470
    assert sum(k <= 127 + 108 for _, k in made) > len(made) // 2, "a window's mask is no wider than it"


@pytest.mark.parametrize("masked", [False, True])
def test_queries_are_attended_to_in_parts(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all scores at once were too many; and a key/value head at a time where heads share them."""
    generator = torch.Generator().manual_seed(3)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 4, True
    query = torch.randn(1, 8, 33, 16, generator=generator)
    key, value = (torch.randn(1, 2, 70, 16, generator=generator) for _ in range(2))
    mask = torch.rand(1, 1, 33, 70, generator=generator) < 0.8
    mask[..., 0] = True
    wide = [t.repeat_interleave(4, dim=1) for t in (key, value)]
    want = torch.nn.functional.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=0.25).transpose(1, 2)
    if not masked:
        found, _ = attention.packed_attention(module, query, key, value, mask, scaling=0.25)
        assert torch.allclose(found, want, atol=1e-6)
        return
    monkeypatch.setattr(attention, "SCORES", 8 * 70 * 16)
    seen: list[int] = []

    def forward(module: Any, q: Any, k: Any, v: Any, m: Any, scaling: float) -> Any:
        seen.append(q.shape[2])
        scores = q @ k.repeat_interleave(4, dim=1).transpose(2, 3) * scaling
        weights = scores.masked_fill(~m, float("-inf")).softmax(-1)
        return (weights @ v.repeat_interleave(4, dim=1)).transpose(1, 2), weights

    found, _ = attention.by_queries(forward, module, query, key, value, mask, scaling=0.25)
    assert seen == [16, 17] and torch.allclose(found, want, atol=1e-6)
