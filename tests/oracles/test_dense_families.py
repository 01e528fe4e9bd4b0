"""What families let `--dense` encode, against the models of transformers: all large linear layers, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.conversions import planned, run
from kits.families import MODELS, SIZES, Built, built

from pagestone.convert import families, matrices
from pagestone.convert.family import HEADS
from pagestone.validate import plain_reader
from pagestone.validate.verify import verify

LEFT = {
    "deepseek_v2": set(), "deepseek_v3": set(), "glm4_moe": set(), "gpt_oss": set(), "granitemoe": set(),
    "minimax_m2": set(), "mixtral": set(), "olmoe": set(), "phimoe": set(), "qwen3_moe": set(), "qwen3_vl_moe": set(),
    "qwen2_moe": {"mlp.shared_expert_gate"},
    "qwen3_5_moe": {"mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    "qwen3_5_moe_text": {"mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    "qwen3_next": {"mlp.shared_expert_gate", "linear_attn.in_proj_ba"},
}  # fmt: skip
"""Linear layers of decoder layers that stay as they are: gates of few rows."""

torch: Any


@pytest.fixture(scope="module", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")


def linears(name: str) -> set[str]:
    """Tails below a decoder layer of everything that is exactly torch's linear layer, routers and experts left out."""
    import transformers

    model = MODELS[name]
    text = model.settings(SIZES["wide"])
    kind = getattr(transformers, model.config)
    config = kind(**text) if model.vision is None else kind(
        text_config=text, vision_config=dict(model.vision) | {"out_hidden_size": 128}
    )  # fmt: skip
    module = getattr(transformers, model.classes[0])(config)
    top = re.compile(rf"{re.escape(model.top)}\.layers\.\d+\.(.+)")
    found = {m[1] for n, x in module.named_modules() if type(x) is torch.nn.Linear and (m := top.fullmatch(n))}
    router = families.of_config({"model_type": name}).router.removesuffix(".weight")  # type: ignore[union-attr]
    return {tail for tail in found if tail != router and ".experts." not in tail}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_large_linear_layers_and_no_other(name: str) -> None:
    """A module that is not there is no fault: models of one family differ."""
    family = families.of_config({"model_type": name})
    assert family is not None
    found = linears(name)
    assert found - set(family.encoded) == LEFT[name]
    assert {t for t in family.encoded if t in found}
    assert not set(family.encoded) & LEFT[name]
    assert all(family.encodes(f"{family.decoders[0]}.1.{tail}", 2) for tail in family.encoded)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_never_encoded(name: str) -> None:
    """Blocks of multi-token prediction, whatever they are called; the table; what only begins or ends like a name."""
    family = families.of_config({"model_type": name})
    assert family is not None
    tail, router = family.encoded[0], family.router.removesuffix(".weight")
    layer = "model.layers.0"
    never = [f"mtp.layers.0.{tail}", f"model.layers.2.{tail}", f"model.layers.x.{tail}", f"{layer}.{tail}.x"]
    never += [f"x.{layer}.{tail}", "model.embed_tokens", "lm_head.x", "model.lm_head", f"{layer}.{router}"]
    for module in (*never, f"{layer}.{family.experts}.0"):
        assert not family.encodes(module, 2), module
    assert all(family.encodes(head, 2) for head in HEADS)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_containers_of_every_family(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted with every linear layer encoded that the numbers would leave out at this size; verified three ways."""
    monkeypatch.setattr(matrices, "FEWEST_ROWS", 8)
    monkeypatch.setattr(matrices, "PAGE", 256)
    source: Built = built(name, "wide", tmp_path_factory)
    plan = planned(source.root, "bf16", dense="int8")
    names = {m.name for t in plan.matrices for m in t.matrices}
    family = plan.family
    wanted = {f"{source.model.top}.layers.{n}.{tail}" for n in range(2) for tail in linears(name) - LEFT[name]}
    assert names - {*HEADS} <= {f"{source.model.top}.layers.{n}.{tail}" for n in range(2) for tail in family.encoded}
    assert {n for n in wanted if f"{n}.weight" in plan.checkpoint.tensors} == names - {*HEADS}
    run(source.root, tmp_path / "out", "bf16", dense="int8")
    assert not [f for f in verify(tmp_path / "out", source=source.root).findings if f.severity == "error"]
    assert set(plain_reader.dense(tmp_path / "out", plain_reader.read_manifest(tmp_path / "out"))) == names
