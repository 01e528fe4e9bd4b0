"""A family is one file in `convert/families/`: put there, everything from the plan to the reader knows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kits.checkpoints import PARTS, Spec, Tensor, Tensors, write_checkpoint
from kits.conversions import planned, prepare

from pagestone.convert import families
from pagestone.convert.plan import UNKNOWN
from pagestone.convert.report import plan_text
from pagestone.formats import encodings
from pagestone.formats.errors import RequestError
from pagestone.reader.container import open_container
from pagestone.validate.verify import verify

FOLDER = Path(__file__).resolve().parents[1] / "kits" / "added_families"
SPEC = Spec(hidden=48, intermediate=40, experts=3, family="qwen3_moe", mtp=False)
NAMES = dict(zip(PARTS, ("open", "wide", "close"), strict=True))
CONFIG = {"model_type": "windmill", "num_hidden_layers": 2, "hidden_size": 48, "sail_count": 3, "sail_width": 40}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of families has one file more."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, os.fspath(FOLDER)])
    families.registry.cache_clear()
    yield
    families.registry.cache_clear()
    sys.modules.pop(f"{families.__name__}.windmill", None)


def tensors(fused: bool) -> Tensors:
    """The weights of `SPEC` under this family's names."""
    made: Tensors = {}
    for name, tensor in SPEC.tensors().items():
        if ".experts." not in name:
            made[name.replace("mlp.gate.weight", "sails.router.weight")] = tensor
    for position, (_, _, layer) in enumerate(SPEC.blocks()):
        of = {part: [SPEC.matrix(position, part, e) for e in range(SPEC.experts)] for part in PARTS}
        if fused:
            pairs = [np.stack([g, u], 1).reshape(-1, SPEC.hidden) for g, u in zip(of["gate"], of["up"], strict=True)]
            made[f"{layer}.sails.open_and_wide"] = Tensor.of(np.stack(pairs))
            made[f"{layer}.sails.close_all"] = Tensor.of(np.stack(of["down"]))
        else:
            for part, matrices in of.items():
                for e, matrix in enumerate(matrices):
                    made[f"{layer}.sails.routed.{e}.{NAMES[part]}.weight"] = Tensor.of(matrix)
    return made


@pytest.mark.parametrize("fused", [False, True], ids=["per-expert", "fused"])
def test_one_file_adds_a_family(added, tmp_path, fused):
    source = write_checkpoint(tmp_path / "s", tensors(fused), CONFIG)
    out = tmp_path / "out"
    plan = planned(source, "int8")
    assert "family windmill" in plan_text(plan, out) and UNKNOWN not in {d.fate for d in plan.dispositions}
    prepare(source, out, encodings.get("int8"), workers=1)
    assert verify(out, source=source).findings == []
    codec = encodings.get("int8")
    with open_container(out) as container:
        assert container.layers[1].header.prefix == "model.layers.1.sails.routed"
        assert container.layers[1].header.part_names == ("open", "wide", "close")
        for number, layer in container.layers.items():
            for e, part in ((0, "gate"), (1, "up"), (2, "down")):
                weight = SPEC.matrix(number, part, e)
                stored = codec.allocate(*weight.shape)
                codec.encode_definition(weight, stored)
                matrix = getattr(layer.expert(e), part)
                assert matrix.codes.array.tobytes() == stored["codes"].tobytes()
                assert matrix.scales.array.tobytes() == stored["scales"].tobytes()


def test_without_its_file_it_is_refused_by_name(tmp_path):
    source = write_checkpoint(tmp_path / "s", tensors(fused=False), CONFIG)
    with pytest.raises(RequestError, match="windmill"):
        planned(source, "int8")


def test_a_family_like_another_differs_in_what_is_said(added):
    """Patterns come and go, fields change, the rest is the other's; nothing goes that was not there."""
    other = families.registry()["windmill"]
    tower = other.like("tower", "tower_text", more=("a",), count_fields=("floors",))
    assert (tower.name, tower.model_types, tower.count_fields) == ("tower", ("tower", "tower_text"), ("floors",))
    assert tower.known == (*other.known, "a") and tower.parts == other.parts and tower.fused == other.fused
    assert tower.like("hut", without=("a",)).known == other.known
    with pytest.raises(ValueError, match="tower does not know"):
        tower.like("hut", without=("b",))
    assert not families.registry()["glm4_moe"].known_name("model.layers.0.self_attn.kv_b_proj.weight")
    assert families.registry()["deepseek_v3"].known_name("model.layers.0.self_attn.kv_b_proj.weight")
