"""The guard: what transformers computes in an experts module is proved to be what ours computes, or refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.inference import Workshop, calm
from kits.inference import model as any_model

from pagestone.formats.errors import RequestError
from pagestone.reader.container import open_container
from pagestone.reader.hosts import transformers as host
from pagestone.reader.model import REFERENCE
from pagestone.reader.store import StoreOptions, open_store

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
    return Workshop(tmp_path_factory.mktemp("guard"))


def refused(theirs: Any, *words: str) -> None:
    """E1225, naming module, class and why."""
    from pagestone.reader.experts_guard import ours_for

    with pytest.raises(RequestError, match="E1225") as error:
        ours_for(theirs, "model.layers.0.mlp.experts", Path("container"))
    assert error.value.exit_code == 2 and "can be read, not run" in str(error.value)
    for word in ("model.layers.0.mlp.experts", type(theirs).__name__, *words):
        assert word in str(error.value)


def mixtral(activation: str = "silu", kind: Any = None) -> Any:
    """Standard experts on the meta device, of the class itself or of another."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2, hidden_act=activation)
    with torch.device("meta"):
        return (kind or MixtralExperts)(config)


def gpt_oss(kind: Any = None) -> Any:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    with torch.device("meta"):
        return (kind or GptOssExperts)(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))


# -- what is proved ---------------------------------------------------------------------------------------------------


def test_standard_and_gpt_oss() -> None:
    """Standard experts with every activation of the table; gpt_oss by its own class."""
    from pagestone.reader.experts import GptOssExperts, RoutedExperts
    from pagestone.reader.experts_guard import ACTIVATIONS, ours_for

    for word in ACTIVATIONS:
        assert ours_for(mixtral(word), "x", Path()) is RoutedExperts
    assert ours_for(gpt_oss(), "x", Path()) is GptOssExperts


def test_activations_of_the_table_are_element_by_element() -> None:
    """Without parameters, and a row's value is the same beside any other rows."""
    from transformers.activations import ACT2FN

    from pagestone.reader.experts_guard import ACTIVATIONS

    values = torch.linspace(-9, 9, 60, dtype=torch.bfloat16).view(4, 15)
    for word in ACTIVATIONS:
        assert not list(ACT2FN[word].parameters())
        assert torch.equal(ACT2FN[word](values)[2], ACT2FN[word](values[2])), word


# -- what is not ------------------------------------------------------------------------------------------------------


def test_a_class_with_its_own_gate() -> None:
    """deepseek_v4 clamps gate and up; a class may also keep the standard forward and bring a gate."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = DeepseekV4Config(hidden_size=8, moe_intermediate_size=8)
    with torch.device("meta"):
        refused(DeepseekV4Experts(config), "eager forward")


@pytest.mark.parametrize("way", ["gate", "forward", "plain forward"])
def test_the_model_that_is_run(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The whole way: loading is refused where the model's class has limits of its own, whatever it is called."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts as Theirs

    def gate(self: Any, both: Any) -> Any:
        one, two = both.chunk(2, dim=-1)
        return self.act_fn(one.clamp(max=0.1)) * two

    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states

    any_model(workshop.container("int8"), experts=REFERENCE).close()
    if way == "gate":
        monkeypatch.setattr(Theirs, "_apply_gate", gate)
    elif way == "plain forward":  # not the library's way to choose an implementation
        monkeypatch.setattr(Theirs, "forward", Theirs.forward.__wrapped__)
    else:
        from transformers.integrations.moe import use_experts_implementation

        class Other(torch.nn.Module):
            def __init__(self, config: Any) -> None: ...

        Other.forward = forward  # type: ignore[method-assign, assignment]
        use_experts_implementation(Other)
        monkeypatch.setattr(Theirs, "forward", Other.forward)
    with pytest.raises(RequestError, match=r"layers\.0\.mlp\.experts: Qwen3_5MoeExperts computes .*E1225"):
        any_model(workshop.container("int8"), experts=REFERENCE)


def test_one_constant_or_one_global_is_another_forward() -> None:
    """Instructions alone prove nothing: `num_experts + 1` against `+ 2`, and an `nn` that is not torch's."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from pagestone.reader.experts_guard import same_function

    known = MixtralExperts.forward.__wrapped__
    assert same_function(known, types.FunctionType(known.__code__, dict(known.__globals__)))
    ones = [2 if value == 1 and type(value) is int else value for value in known.__code__.co_consts]
    assert ones != list(known.__code__.co_consts)
    assert not same_function(
        known, types.FunctionType(known.__code__.replace(co_consts=tuple(ones)), known.__globals__)
    )
    floats = [float(v) if v == 1 and type(v) is int else v for v in known.__code__.co_consts]
    assert floats == list(known.__code__.co_consts)
    changed = types.FunctionType(known.__code__.replace(co_consts=tuple(floats)), known.__globals__)
    assert not same_function(known, changed)
    names = tuple("mul_" if name == "index_add_" else name for name in known.__code__.co_names)
    assert not same_function(known, types.FunctionType(known.__code__.replace(co_names=names), known.__globals__))
    assert not same_function(known, types.FunctionType(known.__code__, known.__globals__ | {"nn": object()}))
    assert not same_function(known, types.FunctionType(known.__code__, known.__globals__, argdefs=(None,)))
    assert not same_function(known, len)


def test_instances_that_are_not_their_class() -> None:
    """A parameter more, a buffer, a hook, a method of its own, another flag."""
    theirs = mixtral()
    theirs.bias = torch.nn.Parameter(torch.zeros(2))
    refused(theirs, "bias")
    theirs = mixtral()
    theirs.register_buffer("scale", torch.zeros(2), persistent=False)
    refused(theirs, "scale")
    for method in ("forward", "_apply_gate"):
        theirs = mixtral()
        setattr(theirs, method, lambda *_: None)
        refused(theirs, method)
    for hook in ("register_forward_hook", "register_forward_pre_hook"):
        theirs = mixtral()
        getattr(theirs, hook)(lambda *_: None)
        refused(theirs, "hook")
    for flag, value in (
        ("has_gate", False), ("has_bias", True), ("is_transposed", True), ("is_concatenated", False),
        ("has_post_expert_norm", True), ("has_post_expert_norm", None),
    ):  # fmt: skip
        theirs = mixtral()
        setattr(theirs, flag, value)
        refused(theirs, flag)
    theirs = mixtral()
    del theirs.is_concatenated  # which every release that is allowed gives them
    refused(theirs, "is_concatenated is None")


@pytest.mark.parametrize("word", ["prelu", "xielu", "leaky_relu", "sqrtsoftplus"])
def test_an_activation_that_is_not_in_the_table(word: str) -> None:
    """With parameters of its own (which a container does not hold), or simply not looked at."""
    refused(mixtral(word))


def test_a_subclass_is_not_its_class() -> None:
    """Neither of gpt_oss nor of a standard class: it may have overridden anything."""
    refused(mixtral(kind=type("Mine", (type(mixtral()),), {})), "forward")
    refused(gpt_oss(type("Mine", (type(gpt_oss()),), {"_apply_gate": lambda self, both: both})))
    theirs = gpt_oss()
    theirs._apply_gate = lambda both: both
    refused(theirs, "_apply_gate")


def test_modules_the_library_does_not_know_as_experts() -> None:
    """E1225 rather than AttributeError: llama4's experts are not made by the library's decorator."""
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    with torch.device("meta"):
        refused(Llama4TextExperts(Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)))

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 3, 4))
            self.down_proj = torch.nn.Parameter(torch.zeros(2, 3, 4))

    refused(Bare())


def test_experts_at_places_nobody_expects(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in one layer, or one in no layer at all: E1225, not a silent choice and not a traceback."""
    container = open_container(workshop.container("int8"))
    store, _ = open_store(container, StoreOptions("mmap"))
    real = host._empty_model
    for name in ("aside", "layers.0.aside"):

        def more(root: Path, attention: str, name: str = name) -> Any:
            found = real(root, attention)
            parent, _, leaf = f"model.{name}".rpartition(".")
            found[0].get_submodule(parent).add_module(leaf, mixtral())
            return found

        monkeypatch.setattr(host, "_empty_model", more)
        with pytest.raises(RequestError, match=r"routed experts expected in layers .*E1225"):
            host.load(container, store)
    store.close()
