"""Prefill: a layer at a time over the whole prompt, each expert read at most once, work within a layer in pieces."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.families import LONG, MODELS, SIZES, STRUCTURES, build
from kits.inference import Workshop, calm, equal, sequence
from kits.inference import model as any_model

from pagestone.formats.errors import DataError, RequestError
from pagestone.reader import attention, pieces
from pagestone.reader.container import Layer, open_container
from pagestone.reader.hosts import transformers as host
from pagestone.reader.leases import Counters, Totals
from pagestone.reader.libraries import OLDEST, release_of
from pagestone.reader.model import PIECE, Context, Loading
from pagestone.reader.pieces import spans, work_in_pieces
from pagestone.reader.session import Session, SessionOptions
from pagestone.validate.audit import EQUAL, NOT_COMPARABLE
from pagestone.validate.logits import LogitsRequest, report, verify_logits
from pagestone.validate.recorded import read_audit

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
REFUSED = "qwen3_vl_moe"
"""No language model of the library's."""
KINDS = [(name, {}) for name in MODELS if name not in ("olmoe", REFUSED)] + list(LONGER.items())
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
    with pytest.raises(RequestError, match=rf"found {piece} .*E1282.*\n.* such as 512$"):
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
    assert {q for q, _ in made} == {64, 108, 84, 86} and max(k for _, k in made) == 470
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


@pytest.fixture(scope="session")
def made(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Models of families in BF16 as transformers runs them, with room for prompts of several pieces."""

    def one(name: str) -> Any:
        more = {"max_position_embeddings": 131072 if name == "gpt_oss" else 1024} | {"olmoe": {"head_dim": 32}}.get(
            name, {}
        )
        wanted = dataclasses.replace(MODELS[name], extra=dict(MODELS[name].extra) | more)
        root = tmp_path_factory.mktemp("pieces") / name
        build(wanted, SIZES["wide"], root)
        return host.plain_model(root)

    return one


def in_pieces(model: Any, piece: int) -> Any:
    """The same model, working in pieces."""
    cut = copy.copy(model)
    cut.model = copy.deepcopy(model.model)
    cut.piece, problem = host._in_pieces(cut.model, None, piece)
    assert (cut.piece, problem) == (piece, None)
    return cut


ROUNDED = frozenset({"gpt_oss"})
"""Families whose pieces differ from the whole by rounding."""
EXACT = [n for n in MODELS if n not in ROUNDED | {REFUSED} and (LONG or n in ("qwen3_5_moe", "deepseek_v3", "mixtral"))]


@pytest.mark.parametrize("name", EXACT)
def test_families_keep_their_bits(made: Callable[[str], Any], name: str) -> None:
    """In BF16, as models run: logits and state of a first prompt and what follows it.

    A later prompt in pieces may round otherwise in some families: torch's products have other shapes there.
    """
    if not keeps_bits():
        pytest.skip("in this release pieces differ from the whole by rounding")
    model = made(name)
    for piece in (64, 128):
        cut = in_pieces(model, piece)
        for sizes in TURNS[:-2]:
            check_equal(model, cut, sizes, 40)


def test_every_listed_class_is_tried() -> None:
    """What the long run tries is all that is listed."""
    if not LONG:
        pytest.skip("PAGESTONE_LONG=1 runs it")
    seen = {type(m).__name__ for name, extra in TRIED for m in library_model(name, extra).modules()}
    assert seen >= pieces.ATTENTION | pieces.RECURRENT | pieces.ROWS


def test_a_prompt_of_one_piece_makes_the_calls_it_always_made(made: Callable[[str], Any]) -> None:
    """Modules are called as the library calls them, masks are its own: also by a model that works in pieces."""
    model = made("qwen3_5_moe")
    seen: tuple[list[Any], list[Any]] = ([], [])
    for one, calls in zip((model, in_pieces(model, 64)), seen, strict=True):
        for module in one.model.modules():
            if type(module).__name__ in pieces.ATTENTION | pieces.RECURRENT | pieces.ROWS:
                inner = vars(module).get("forward")
                owner, word = (module, "forward") if inner is None else (inner, "_forward")
                setattr(owner, word, shapes_into(calls, getattr(owner, word)))
        state = None
        for size in (127, 1, 64):
            _, state = one.forward(sequence(size, 40), state)
    assert seen[0] == seen[1] and len(seen[0]) >= 3 * 8


def shapes_into(seen: list[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, which notes the shapes of what it is given."""

    def kept(*unnamed: Any, **named: Any) -> Any:
        given = [*enumerate(unnamed), *sorted(named.items())]
        seen.append([(key, getattr(value, "shape", value is None)) for key, value in given])
        return inner(*unnamed, **named)

    return kept


def test_attention_without_its_mask_is_called_whole() -> None:
    """A library that leaves a long prompt's mask out: no piece is attended to as if it began the prompt."""
    model = library_model("qwen3_moe", {})
    assert work_in_pieces(model, 64) is None
    mixer = model.model.layers[0].self_attn
    calls: list[int] = []
    mixer.forward._forward = lambda **named: (calls.append(named["hidden_states"].shape[1]), (named["hidden_states"],))[
        1
    ]

    class State:
        def get_seq_length(self, _: int) -> int:
            return 0

    given = {"hidden_states": torch.zeros(1, 300, 64), "past_key_values": State()}
    mixer.forward(**given, attention_mask=None)
    mixer.forward(**given, attention_mask=torch.ones(1, 1, 300, 300))
    assert calls == [300, 300]
    whole = pieces.Mask(lambda **asked: asked["q_length"], {"q_length": 300, "q_offset": 0})
    mixer.forward(hidden_states=torch.zeros(1, 300, 64), attention_mask=whole)
    assert calls == [300] * 3, "no state to leave anything in"


def test_linear_attention_with_a_mask_is_called_whole() -> None:
    """What a mask would say to it was not proved in pieces."""
    model = library_model("qwen3_5_moe", {})
    assert work_in_pieces(model, 64) is None
    mixer = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    calls: list[int] = []
    mixer.forward._forward = lambda **named: (calls.append(named["hidden_states"].shape[1]), named["hidden_states"])[1]
    for mask in (None, torch.ones(1, 300)):
        mixer.forward(hidden_states=torch.zeros(1, 300, 64), cache_params=object(), attention_mask=mask)
    assert calls == [64, 64, 64, 108, 300]


@pytest.mark.parametrize("change", ["class", "forward", "hook", "hook before"])
def test_altered_attention_stays_whole(change: str) -> None:
    """A class of the same name from elsewhere, a forward of its own, hooks: no layer is changed."""
    model = library_model("qwen3_5_moe", {})
    module = model.model.layers[1].self_attn
    if change == "class":
        module.__class__ = type(type(module).__name__, (type(module),), {"__module__": "elsewhere"})
    elif change == "forward":
        module.forward = module.forward
    elif change == "hook":
        module.register_forward_hook(lambda *_: None)
    else:
        module.register_forward_pre_hook(lambda *_: None)
    assert "no attention that was proved" in str(work_in_pieces(model, 64))
    assert not any(isinstance(vars(m).get("forward"), pieces.AttentionInPieces) for m in model.modules())


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_other_attention_functions_work_whole(workshop: Workshop, name: str) -> None:
    """Their masks are made for the whole prompt: nothing is cut, the user is told, and logits are as they were."""
    container = open_container(workshop.container("int8"))
    whole, cut = (any_model(container, "resident", piece=p, attention=name) for p in (None, 64))
    assert cut.piece is None and any(f"the attention {name} was asked for" in note for note in cut.notes)
    assert not any("was asked for" in note for note in whole.notes)
    check_equal(whole, cut, (200, 1), 1000)
    for model in (whole, cut):
        assert model.surroundings()["model"]["prefill_piece"] is None
        model.close()


def test_sessions_pass_the_piece_on(workshop: Workshop) -> None:
    """By default pieces of `PIECE`; what is no multiple of the grid is refused before a model is loaded."""
    path = workshop.container("int8")
    for options, piece in ((SessionOptions("resident"), PIECE), (SessionOptions("resident", prefill_piece=128), 128)):
        with Session(path, options) as session:
            assert session.model.surroundings()["model"]["prefill_piece"] == piece
    with pytest.raises(RequestError, match="E1282"):
        Session(path, SessionOptions(prefill_piece=100))


def test_audits_know_the_piece(workshop: Workshop, tmp_path: Path) -> None:
    """Both sides work in pieces, the audit says of how many tokens, and another number is not comparable."""
    path, ids, audit = workshop.container("int8"), tmp_path / "ids", tmp_path / "audit.json"
    ids.write_text(" ".join(map(str, prompt(200))))
    found = verify_logits(LogitsRequest(path, ids=ids, steps=1, prefill_piece=64))
    assert found.result == EQUAL and found.surroundings["model"]["prefill_piece"] == 64
    found.write(audit)
    assert read_audit(audit).surroundings["model"]["prefill_piece"] == 64
    assert verify_logits(LogitsRequest(path, against=audit, prefill_piece=64)).result == EQUAL
    for other in (PIECE, None):
        found = verify_logits(LogitsRequest(path, against=audit, prefill_piece=other))
        assert found.result == NOT_COMPARABLE
        assert f"model prefill_piece is {other} here, 64 there" in report(found)
    table = json.loads(audit.read_text())
    table["model"]["prefill_piece"] = "64"
    audit.write_text(json.dumps(table))
    with pytest.raises(DataError, match="E1303"):
        read_audit(audit)


def test_the_plan_counts_pieces(workshop: Workshop) -> None:
    """Working space of a long prompt in pieces is far below that of the whole, and computed, not guessed."""
    container = open_container(workshop.container("int8"))
    whole, cut = (host.HOST.footprint(container, Loading(prefill_piece=p), 4096) for p in (None, 256))
    assert whole.known == cut.known == "computed"
    assert cut.working_bytes(4096) < 0.5 * whole.working_bytes(4096)
    assert cut.working_bytes(128) == whole.working_bytes(128)


def test_unknown_arguments_keep_a_prompt_whole() -> None:
    """A tensor that nobody knows how to cut, and tables that have no row a token."""
    model = library_model("qwen3_5_moe", {})
    assert work_in_pieces(model, 64) is None
    mixer = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    calls: list[int] = []
    mixer.forward._forward = lambda **named: (calls.append(named["hidden_states"].shape[1]), named["hidden_states"])[1]
    given = {"hidden_states": torch.zeros(1, 300, 64), "cache_params": object()}
    mixer.forward(**given, bias=torch.zeros(300))
    mixer.forward(**given, position_embeddings=(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)))
    mixer.forward(**given, position_ids=torch.zeros(1, 1))
    assert calls == [300] * 3
    mixer.forward(**given, position_ids=torch.zeros(1, 300), flag=True)
    assert calls[3:] == [64, 64, 64, 108]


def test_masks_of_batches_are_made_whole() -> None:
    """A mask that says more than what was before, or an offset that is no number, is left to the library."""
    asked = {"q_length": 300, "q_offset": 0, "attention_mask": None}
    make = pieces.later(lambda **_: "made")
    assert make(**asked) == "made"
    with pieces.masks_of_pieces(64):
        assert isinstance(make(**asked), pieces.Mask) and make(**asked | {"q_length": 127}) == "made"
        assert isinstance(make(**asked | {"q_length": 128}), pieces.Mask)
        assert make(**asked | {"attention_mask": torch.ones(1, 300)}) == "made"
        assert make(**asked | {"q_offset": torch.zeros(())}) == "made"
    assert make(**asked) == "made"


def test_all_modules_of_rows_work_in_pieces() -> None:
    """Norms and dense MLPs of every layer, the shared expert's among them, and the last norm."""
    model = library_model("qwen3_5_moe", {})
    assert work_in_pieces(model, 64) is None
    inside_attention = {m for n, part in model.named_modules() if n.endswith("_attn") for m in part.modules()}
    rows = {n for n, m in model.named_modules() if type(m).__name__ in pieces.ROWS and m not in inside_attention}
    cut = {n for n, m in model.named_modules() if isinstance(vars(m).get("forward"), pieces.RowsInPieces)}
    assert cut == rows and {"model.norm", "model.layers.0.mlp.shared_expert", "model.layers.1.input_layernorm"} <= cut


@pytest.mark.parametrize("other", ["wider values", "a mask a head", "dropout"])
def test_what_is_not_plain_is_left_to_the_library(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are gone through by themselves only where that is the same."""
    query, key, value = (torch.zeros(1, heads, 5, 16) for heads in (8, 2, 2))
    mask, more = torch.ones(1, 1, 5, 5, dtype=torch.bool), {}
    if other == "wider values":
        value = torch.zeros(1, 2, 5, 24)
    elif other == "a mask a head":
        mask = mask.expand(1, 8, 5, 5)
    else:
        more = {"dropout": 0.5}
    monkeypatch.setattr(attention.inside, "sdpa_forward", lambda: lambda *_, **given: (given, None))
    found, _ = attention.packed_attention(None, query, key, value, mask, scaling=0.25, **more)
    assert found == {"scaling": 0.25} | more


def test_no_mask_means_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask a function may see by the place of a query among those it is given."""
    monkeypatch.setattr(attention, "SCORES", 1)
    query = torch.zeros(1, 8, 33, 16)
    seen: list[int] = []

    def forward(_: Any, queries: Any, *__: Any) -> Any:
        seen.append(queries.shape[2])
        return queries.transpose(1, 2), None

    attention.by_queries(forward, None, query, query, query, None)
    assert seen == [33]
    attention.by_queries(forward, None, query, query, query, torch.ones(1, 1, 33, 33))
    assert seen[1:] == [2] * 15 + [3], "never a single query"
