"""The guard: an encoded matrix stands only for torch's own Linear that its owner calls and does nothing else with."""

from __future__ import annotations

import functools
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
from pagestone.reader.linears_guard import (
    CALLED,
    TAKEN,
    embedding_problem,
    linear_problem,
    require_linear,
    uses_of,
)

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


class Owner:
    """How code may use what it owns; each method is the forward of one class below."""

    def called(self: Any, x: Any) -> Any:
        return self.part(x)

    def by_name(self: Any, x: Any) -> Any:
        return self.part(input=x)

    def in_a_function(self: Any, x: Any) -> Any:
        def inner(y: Any) -> Any:
            return self.part(y)

        return inner(x)

    def weight_read(self: Any, x: Any) -> Any:
        return self.part(x) + self.part.weight.sum()

    def handed_on(self: Any, x: Any) -> Any:
        layer = self.part
        return layer(x)

    def in_a_comprehension(self: Any, x: Any) -> Any:
        return self.part(x) + sum(self.part.weight[i] for i in range(2))

    def taken_away(self: Any, x: Any) -> Any:
        out = self.part(x)
        del self.part
        return out

    def by_text(self: Any, x: Any) -> Any:
        return getattr(self, "part")(x)  # noqa: B009


GOOD, BAD = ("called", "by_name", "in_a_function"), ("weight_read", "handed_on", "in_a_comprehension", "taken_away")


def owner(forward: Any, part: Any = None, base: Any = None) -> Any:
    """A model with one module, `part`, and this forward."""
    made = type("Mine", (base or torch.nn.Module,), {"forward": forward})()
    made.part = torch.nn.Linear(4, 6) if part is None else part
    return made


def test_called_and_nothing_else() -> None:
    """Calls in any form are proved, also within functions; everything else that takes the module is not."""
    for name in GOOD:
        assert linear_problem(owner(getattr(Owner, name)), "part") is None, name
    for name in BAD:
        problem = linear_problem(owner(getattr(Owner, name)), "part")
        assert problem is not None and "Mine does more with it than call it" in problem, name
    assert "does not call it" in str(linear_problem(owner(Owner.by_text), "part"))
    several = torch.nn.Module()
    several.parts = torch.nn.ModuleList([torch.nn.Linear(4, 6)])
    assert "ModuleList does not call it" in str(linear_problem(several, "parts.0"))


def test_code_that_is_wrapped_and_other_members() -> None:
    """What a decorator wraps counts, and so do properties, static functions and other methods of the class."""

    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return outer

    assert uses_of(type("A", (), {"forward": wrap(Owner.called)}), "part") == {CALLED}
    assert uses_of(type("B", (), {"forward": wrap(wrap(Owner.weight_read))}), "part") == {CALLED, TAKEN}

    def bare(function: Any) -> Any:
        def outer(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return outer

    assert uses_of(type("E", (), {"forward": bare(wrap(Owner.called))}), "part") == {CALLED}
    assert uses_of(type("F", (), {"forward": wrap(bare(Owner.weight_read))}), "part") == {CALLED, TAKEN}
    for member in (property(Owner.weight_read), staticmethod(Owner.weight_read), classmethod(Owner.weight_read)):
        assert TAKEN in uses_of(type("C", (), {"forward": Owner.called, "other": member}), "part")
    assert uses_of(type("D", (), {}), "part") == set()


def test_classes_above_count_where_they_are_models() -> None:
    """A base class of a model's own file is the model's code; what all models share is not."""
    model = type("Base", (torch.nn.Module,), {"forward": Owner.weight_read, "__module__": "transformers.models.x"})
    other = type("Other", (torch.nn.Module,), {"get": Owner.handed_on, "__module__": "transformers.modeling_utils"})
    assert TAKEN in uses_of(type("Mine", (model,), {"forward": Owner.called}), "part")
    assert uses_of(type("Mine", (other,), {"forward": Owner.called}), "part") == {CALLED}


def test_linear_layers_that_are_not_torchs_own() -> None:
    """A subclass, a hook of any kind, a forward or a tensor of its own, a parametrised weight."""
    from torch.nn.utils import parametrize

    class Other(torch.nn.Linear):
        pass

    assert "torch's own Linear" in str(linear_problem(owner(Owner.called, Other(4, 6)), "part"))
    for hook in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        part = torch.nn.Linear(4, 6)
        getattr(part, hook)(lambda *_: None)
        assert "hook" in str(linear_problem(owner(Owner.called, part), "part")), hook
    part = torch.nn.Linear(4, 6)
    part.forward = lambda x: x
    assert "a forward of its own" in str(linear_problem(owner(Owner.called, part), "part"))
    part = torch.nn.Linear(4, 6)
    part.register_buffer("scale", torch.ones(1))
    assert "scale" in str(linear_problem(owner(Owner.called, part), "part"))
    part = torch.nn.Linear(4, 6)
    parametrize.register_parametrization(part, "weight", torch.nn.Identity())
    assert linear_problem(owner(Owner.called, part), "part") is not None


def test_embeddings() -> None:
    """Scaled or normalised ones, and those whose table is read, stay whole."""

    class Scaled(torch.nn.Embedding):
        pass

    assert embedding_problem(owner(Owner.called, torch.nn.Embedding(4, 6, padding_idx=0)), "part") is None
    assert embedding_problem(owner(Owner.called, Scaled(4, 6)), "part") is not None
    assert embedding_problem(owner(Owner.called, torch.nn.Embedding(4, 6, max_norm=1.0)), "part") is not None
    assert embedding_problem(owner(Owner.weight_read, torch.nn.Embedding(4, 6)), "part") is not None
    assert embedding_problem(owner(Owner.called), "part") is not None


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    """E1256 says module, class, reason and what to do; also for another shape than the config's."""
    model = owner(Owner.called)
    assert require_linear(model, "part", 6, 4, tmp_path) is model.part
    with pytest.raises(RequestError, match=r"part: Linear .*\[6, 4\] expected from config.json, found \[4, 6\].*E1256"):
        require_linear(model, "part", 4, 6, tmp_path)
    with pytest.raises(RequestError, match=r"part: Linear .*does more with it.*E1256") as error:
        require_linear(owner(Owner.weight_read), "part", 6, 4, tmp_path)
    assert error.value.tensor == "part"
    assert error.value.exit_code == 2 and "--dense keep" in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("way", ["class", "code", "whole"])
def test_the_model_that_is_run(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The whole way: a model whose attention reads a weight is refused when it is loaded, if it says so openly, else
    when it is run. A kept embedding whose table is read is loaded whole."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

    kind = theirs.Qwen3_5MoeAttention
    plain = kind.forward

    @functools.wraps(plain)
    def openly(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.o_proj.weight.sum()
        return plain(self, *args, **kwargs)

    @functools.wraps(plain)
    def hidden(self: Any, *args: Any, **kwargs: Any) -> Any:
        dict(self.named_modules())["o_proj"].weight.sum()
        return plain(self, *args, **kwargs)

    if way != "whole":
        monkeypatch.setattr(kind, "forward", openly if way == "class" else hidden)
        uses_of.cache_clear()
        kept = any_model(workshop.container("int8"))
        kept.forward([1, 2])
        kept.close()
    if way == "class":
        with pytest.raises(RequestError, match=r"layers\.3\.self_attn\.o_proj: Linear .*E1256"):
            any_model(workshop.container("int8", dense="int8"))
    elif way == "code":
        loaded = any_model(workshop.container("int8", dense="int8"))
        with pytest.raises(RequestError, match=r"layers\.3\.self_attn\.o_proj: .*E1257"):
            loaded.forward([1, 2])
        loaded.close()
    else:
        monkeypatch.setattr(theirs.Qwen3_5MoeTextModel, "table", lambda self: self.embed_tokens.weight, raising=False)
        uses_of.cache_clear()
        loaded = any_model(workshop.container("int8"))
        assert not loaded.tables and loaded.model.model.table().shape == (1024, 256)
        assert host.dense_use(open_container(workshop.container("int8"))).tables == frozenset()
        loaded.close()
    monkeypatch.undo()
    uses_of.cache_clear()


def test_files_of_tables_are_closed(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model, and where loading fails after they were opened."""

    def opened() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum("dense-" in str(link.readlink()) for link in links)

    before = opened()
    loaded = any_model(workshop.container("int8"))
    assert opened() == before + 1
    loaded.close()
    assert opened() == before

    def fail(*_: Any) -> None:
        raise RuntimeError("late")

    monkeypatch.setattr(host, "_rebuild_buffers", fail)
    with pytest.raises(RuntimeError, match="late"):
        any_model(workshop.container("int8"))
    assert opened() == before
