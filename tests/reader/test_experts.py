"""Native experts: the specified products between what transformers does, the same bits however they are made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kits.families import MODELS, SIZES, build
from kits.inference import Workshop, calm, equal, logits_of, model, sequence

from pagestone.formats import encodings, native, products
from pagestone.formats.dtypes import Array, to_f32
from pagestone.formats.errors import DataError, RequestError
from pagestone.reader.container import Container, Expert, Matrix, open_container
from pagestone.reader.model import NATIVE, REFERENCE, Context, bytes_of, experts_for
from pagestone.reader.store import StoreOptions, open_store

torch: Any
CODECS = sorted(encodings.registry())
KERNELS = [isa for isa in native.available() if isa != native.NUMPY]


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="session")
def gpt_oss(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpt-oss") / "source"
    build(MODELS["gpt_oss"], SIZES["wide"], root)
    return root


def sha(logits: list[Any]) -> str:
    """One hash of the bytes of many steps."""
    found = hashlib.sha256()
    for step in logits:
        found.update(bytes_of(step))
    return found.hexdigest()


# -- the whole model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_one_hash_for_every_instruction_set_and_thread_count(workshop: Workshop, codec: str) -> None:
    """Streamed through a small budget, 1, 2 and 4 threads, every ISA of this CPU: the logits of the resident run."""
    container = open_container(workshop.container(codec))
    resident = model(container, "resident")
    wanted = sha(logits_of(resident, sequence(21), 3))
    choices = [int(x[-1].argmax()) for x in logits_of(resident, sequence(21), 3)]
    streamed = model(container, budget=5 * container.layers[0].stride)
    for isa in KERNELS:
        for threads in (1, 2, 4):
            streamed.context.threads = threads
            with native.forced(isa):
                assert sha(logits_of(streamed, sequence(21), 3, choices)) == wanted, (isa, threads)
    assert streamed.context.store.open_leases == 0
    streamed.close()
    resident.close()


@pytest.mark.parametrize("codec", CODECS)
def test_the_definition_through_the_whole_model(workshop: Workshop, codec: str) -> None:
    """The NumPy definition gives the kernels' logits; reference experts give others (or nothing would be tested).

    bf16's two products only sum in another order, which rounding may hide.
    """
    container = open_container(workshop.container(codec))
    loaded = model(container, "mmap")
    fast = logits_of(loaded, sequence(5), 2)
    with native.forced(native.NUMPY):
        assert sha(logits_of(loaded, sequence(5), 2, [int(x[-1].argmax()) for x in fast])) == sha(fast)
    other = model(container, "mmap", experts=REFERENCE)
    assert codec == "bf16" or not equal(logits_of(other, sequence(5), 2), fast)


def test_gpt_oss(workshop: Workshop, gpt_oss: Path) -> None:
    """Biases and the alternating activation: streamed == resident, every ISA, and near what reference experts give."""
    for codec in CODECS:
        container = open_container(workshop.container(codec, gpt_oss))
        resident, streamed = model(container, "resident"), model(container, budget=container.layers[0].stride)
        wanted = logits_of(resident, sequence(9, 40), 3)
        for isa in native.available():
            with native.forced(isa):
                assert equal(wanted, logits_of(streamed, sequence(9, 40), 3)), (codec, isa)
        other = model(container, "mmap", experts=REFERENCE)
        apart = (logits_of(other, sequence(9, 40), 0)[0].float() - wanted[0].float()).abs().max()
        assert apart < 0.1 * wanted[0].float().abs().max(), codec
        streamed.close()


# -- one layer --------------------------------------------------------------------------------------------------------


class One:
    """The experts of one layer, without a model around them."""

    def __init__(self, container: Container, number: int, experts: str = NATIVE, alternating: bool = False) -> None:
        from pagestone.reader.experts import GptOssExperts, RoutedExperts

        self.layer = container.layers[number]
        self.store, _ = open_store(container, StoreOptions("direct", 3 * self.layer.stride))
        self.context = Context(self.store, experts)
        original = SimpleNamespace(
            num_experts=len(self.layer), act_fn=torch.nn.functional.silu, _apply_gate=clamped_gate
        )
        self.module = (GptOssExperts if alternating else RoutedExperts)(original, number, self.context)

    def __call__(self, hidden: Any, ids: Any, weights: Any) -> Any:
        with torch.no_grad():
            return self.module(hidden, ids, weights)


def clamped_gate(both: Any) -> Any:
    """gpt_oss' own activation, as its model file has it."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.fixture(params=CODECS)
def container(workshop: Workshop, request: pytest.FixtureRequest) -> Container:
    return open_container(workshop.container(request.param))


def routed(one: One, tokens: int, dtype: Any, k: int = 3) -> tuple[Any, Any, Any]:
    """Tokens, the experts they go to, and weights."""
    source = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, one.layer.header.shape.hidden, generator=source).to(dtype)
    scores = torch.rand(tokens, len(one.layer), generator=source)
    weights, ids = scores.topk(k)
    return hidden, ids, (weights / weights.sum(-1, keepdim=True)).to(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_alone_and_in_a_batch(container: Container, dtype: str) -> None:
    """Whatever else is asked of its experts, a token gets the same bits."""
    one = One(container, 1)
    hidden, ids, weights = routed(one, 40, getattr(torch, dtype))
    together = one(hidden, ids, weights)
    for t in range(40):
        alone = one(hidden[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        assert torch.equal(alone[0].view(torch.int16), together[t].view(torch.int16)), t
    one.store.close()


def written(matrix: Matrix, x: Any) -> Any:
    """A product by its definition, rounded once to the type of `x` [n, columns]."""
    half = x.dtype == torch.float16
    views = {r: getattr(matrix, r) for r in ("codes", "scales", "biases")}
    stored: dict[str, Array] = {r: v.array for r, v in views.items() if v is not None}
    bits = x.contiguous().numpy() if half else x.contiguous().view(torch.int16).numpy().view(np.uint16)
    out = np.empty((len(x), matrix.rows), np.float16 if half else np.uint16)
    products.store(matrix.codec.matmul_definition(stored, bits, matrix.rows, matrix.columns), out)
    return torch.from_numpy(out) if half else torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)


def by_the_book(one: One, hidden: Any, ids: Any, weights: Any, expert: Callable[[Any, Expert], Any]) -> Any:
    """numerics.md, a token at a time: experts by ascending id, sums in the model's type."""
    out = torch.zeros_like(hidden)
    for t in range(len(hidden)):
        for e in sorted(ids[t].tolist()):
            found = expert(hidden[t : t + 1], one.layer.expert(e)) * weights[t, ids[t].tolist().index(e)]
            out[t] += found[0]
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_between_the_products(container: Container, dtype: str) -> None:
    """gate and up rounded, torch's silu and multiplication, down rounded, the routing weight, added in order."""
    one = One(container, 2)
    hidden, ids, weights = routed(one, 7, getattr(torch, dtype))

    def expert(x: Any, e: Expert) -> Any:
        return written(e.down, torch.nn.functional.silu(written(e.gate, x)) * written(e.up, x))

    assert torch.equal(one(hidden, ids, weights), by_the_book(one, hidden, ids, weights, expert))
    one.store.close()


@pytest.mark.parametrize("codec", CODECS)
def test_between_the_products_of_gpt_oss(workshop: Workshop, gpt_oss: Path, codec: str) -> None:
    """Products rounded, then biases added in the model's type; gate and up alternate for the model's activation.

    fp8 has no single grid for gate and up here (128 does not divide 192): they are two products.
    """
    container = open_container(workshop.container(codec, gpt_oss))
    one = One(container, 1, alternating=True)
    hidden, ids, weights = routed(one, 7, torch.bfloat16, 2)
    assert len(one.layer.expert(0).inner) == (2 if codec == "fp8" else 1)

    def bias(matrix: Matrix) -> Any:
        assert matrix.bias is not None
        return torch.tensor(to_f32(matrix.bias.array, matrix.bias.dtype)).to(torch.bfloat16)

    def expert(x: Any, e: Expert) -> Any:
        gate, up = (written(m, x) + bias(m) for m in (e.gate, e.up))
        return written(e.down, clamped_gate(torch.stack([gate, up], dim=2).flatten(1))) + bias(e.down)

    assert torch.equal(one(hidden, ids, weights), by_the_book(one, hidden, ids, weights, expert))
    one.store.close()


def test_a_prompt_multiplies_each_expert_once(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of an expert in one product for gate and up and one for down, from one read."""
    asked: list[tuple[int, int]] = []
    real = Matrix.multiply

    def multiply(self: Matrix, x: Array, **how: Any) -> Array:
        asked.append((self.rows, len(x)))
        return real(self, x, **how)

    monkeypatch.setattr(Matrix, "multiply", multiply)
    one = One(container, 0)
    hidden, ids, weights = routed(one, 30, torch.bfloat16)
    one(hidden, ids, weights)
    shape = one.layer.header.shape
    used = torch.bincount(ids.flatten()).tolist()
    wanted = [(rows, n) for n in used if n for rows in (2 * shape.intermediate, shape.hidden)]
    assert asked == wanted
    counters = one.store.counters[0]
    assert counters.misses == len(wanted) // 2 and counters.bytes_read == counters.misses * one.layer.stride
    one.store.close()


def test_gate_and_up_together_are_gate_and_up(container: Container) -> None:
    """The fused view multiplies to what its halves do."""
    expert = container.layers[0].expert(5)
    x = np.random.default_rng(1).integers(0x3F00, 0x4000, (3, expert.gate.columns)).astype(np.uint16)
    assert [m.rows for m in expert.inner] == [2 * expert.gate.rows]
    halves = np.concatenate([expert.gate.multiply(x), expert.up.multiply(x)], axis=1)
    assert expert.gate_up.multiply(x, threads=2).tobytes() == halves.tobytes()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite(container: Container, value: float) -> None:
    """E1232 names layer, expert and token; leases are back; reference experts let it pass, as transformers does."""
    one = One(container, 3)
    hidden, ids, weights = routed(one, 4, torch.bfloat16)
    hidden[2, 17] = value
    first = int(ids[2].min())
    for isa in native.available():
        with native.forced(isa), pytest.raises(DataError, match=rf"layer 3, expert {first}: .*token 2 .*E1232"):
            one(hidden, ids, weights)
    assert one.store.open_leases == 0
    hidden[2, 17] = 1.0
    assert bool(one(hidden, ids, weights).isfinite().all())
    one.store.close()
    reference = One(container, 3, REFERENCE)
    hidden[2, 17] = value
    assert bool(reference(hidden, ids, weights)[2].isnan().any())
    reference.store.close()


def test_an_intermediate_that_is_not_finite(container: Container) -> None:
    """What overflows between the two products is named too."""
    one = One(container, 3)
    hidden, ids, weights = routed(one, 2, torch.float16)
    hidden[1] *= 15000
    with pytest.raises(DataError, match=r"layer 3, expert \d+: finite activations .*token 1 .*E1232"):
        one(hidden, ids, weights)
    one.store.close()


def test_a_model_in_float32(workshop: Workshop) -> None:
    """E1229 names --experts reference, which runs it."""
    copy = workshop.root / "float32"
    root = workshop.copy("int8", copy)
    container = open_container(root)
    config = json.loads((root / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "float32"
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"(?s)found float32 .*E1229.*--experts reference") as error:
        model(container)
    assert error.value.exit_code == 2
    loaded = model(container, experts=REFERENCE)
    assert loaded.forward([1, 2])[0].dtype == torch.float32
    loaded.close()


@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_auto_is_native_but_for_bf16(codec: str) -> None:
    """The default is the form that wins in the whole token; bf16's codes are torch's weights already."""
    assert experts_for(codec, "auto") == ("reference" if codec == "bf16" else "native")
    assert experts_for(codec, "native") == "native" and experts_for(codec, "reference") == "reference"
    with pytest.raises(RequestError, match="E1244"):
        experts_for(codec, "fast")
