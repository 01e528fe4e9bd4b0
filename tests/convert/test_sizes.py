"""Sizes that are stated more than once, and the numbers of layers: what differs is refused, what is silent is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.checkpoints import PARTS, T_ORDER, Spec, Tensor, Tensors, write_checkpoint
from kits.containers import assert_is_definition
from kits.conversions import planned, prepare

from pagestone.convert.plan import Plan
from pagestone.formats import encodings
from pagestone.formats.errors import DataError
from pagestone.validate.verify import verify

SPLIT, FUSED = T_ORDER.having(fused=False), T_ORDER
PLAIN = T_ORDER.having(family="qwen3_moe", fused=False)
ROUTER = "mlp.gate.weight"


def plan_of(spec: Spec, root: Path, tensors: Tensors | None = None, **config: Any) -> Plan:
    """The plan of a spec's checkpoint with other tensors, and fields of its text config changed (None: left out)."""
    table = spec.config()
    text = table.get("text_config", table)
    text.update(config)
    for field in [f for f, value in config.items() if value is None]:
        del text[field]
    checkpoint = write_checkpoint(root, spec.tensors() if tensors is None else tensors, table)
    return planned(checkpoint, encodings.get("int8"))


def transposed(tensors: Tensors) -> Tensors:
    """Every matrix of every expert the other way round."""
    turned = {n: Tensor("BF16", t.shape[::-1], np.ascontiguousarray(t.bits().T).tobytes())
              for n, t in tensors.items() if ".experts." in n}  # fmt: skip
    return tensors | turned


def reshaped(tensors: Tensors, word: str, *shape: int) -> Tensors:
    """The tensors with `word` in their names in another shape."""
    return tensors | {n: Tensor.of(np.ones(shape)) for n in tensors if word in n}


def resized(spec: Spec, layer: int, hidden: int, intermediate: int) -> Tensors:
    """One layer of the model with experts (and a router) of other sizes."""
    other = spec.having(hidden=hidden, intermediate=intermediate).tensors()
    ours = (".experts.", ROUTER)
    return {n: other[n] if f"layers.{layer}." in n and any(w in n for w in ours) else t
            for n, t in spec.tensors().items()}  # fmt: skip


Change = Callable[[Spec], Tensors]
DIFFERENT: dict[str, tuple[Spec, Change, Mapping[str, Any], str, str]] = {
    "hidden_size 64 over 32": (
        SPLIT, Spec.tensors, {"hidden_size": 64}, "layers.0.mlp.experts.0.down_proj", "(hidden_size)"),
    "the same, fused": (FUSED, Spec.tensors, {"hidden_size": 64}, "layers.0.mlp.experts.down_proj", "hidden size 64"),
    "moe_intermediate_size 64 over 48": (
        SPLIT, Spec.tensors, {"moe_intermediate_size": 64}, "layers.0.mlp.experts", "(moe_intermediate_size)"),
    "all transposed": (SPLIT, lambda s: transposed(s.tensors()), {}, "layers.0.mlp.experts.0.down_proj", "transposed"),
    "all transposed, a config without sizes": (
        SPLIT, lambda s: transposed(s.tensors()), {"hidden_size": None, "moe_intermediate_size": None}, ROUTER,
        "hidden size 32 expected from the columns of"),
    "all transposed, one size in the config": (
        SPLIT, lambda s: transposed({n: t for n, t in s.tensors().items() if ROUTER not in n}),
        {"hidden_size": None}, "down_proj", "intermediate size 48"),
    "a router as wide as intermediate": (
        SPLIT, lambda s: reshaped(s.tensors(), f"layers.1.{ROUTER}", 12, 48), {}, f"layers.1.{ROUTER}",
        "hidden size 48 expected from the columns of"),
    "square experts, a router of another width": (
        SPLIT.having(intermediate=32), lambda s: reshaped(s.tensors(), f"layers.0.{ROUTER}", 12, 48), {},
        f"layers.0.{ROUTER}", "found experts of hidden 32, intermediate 32"),
    "a router of rank 1": (SPLIT, lambda s: reshaped(s.tensors(), f"layers.1.{ROUTER}", 12), {}, f"layers.1.{ROUTER}",
                           "a router [12, 32] expected, found [12]"),
    "a router of rank 3": (SPLIT, lambda s: reshaped(s.tensors(), f"layers.1.{ROUTER}", 12, 32, 1), {},
                           f"layers.1.{ROUTER}", "found [12, 32, 1]"),
    "the MTP block's router": (
        SPLIT, lambda s: reshaped(s.tensors(), f"mtp.layers.0.{ROUTER}", 12, 48), {}, f"mtp.layers.0.{ROUTER}", "48"),
    "a layer of other I": (SPLIT, lambda s: resized(s, 1, 32, 40), {}, "layers.1.mlp.experts", "intermediate size 48"),
    "the MTP block of other I": (
        SPLIT, lambda s: {n: s.having(intermediate=40).tensors()[n] if n.startswith("mtp.") else t
                          for n, t in s.tensors().items()}, {}, "mtp.layers.0.mlp.experts", "intermediate 40"),
    "a layer of other I, the config silent": (
        SPLIT, lambda s: resized(s, 1, 32, 40), {"moe_intermediate_size": None}, "layers.1.mlp.experts",
        "expected from model.language_model.layers.0.mlp.experts"),
    "a layer of other H": (SPLIT, lambda s: resized(s, 1, 40, 48), {}, "layers.1.mlp.experts", "hidden size 32"),
    "a layer of other H, the config silent": (
        SPLIT, lambda s: resized(s, 1, 40, 48), {"hidden_size": None}, "layers.1.mlp.experts",
        "hidden size 32 expected from model.language_model.layers.0.mlp.experts"),
    "sizes of layers in another order": (
        PLAIN, lambda s: resized(s, 1, 32, 40), {"moe_intermediate_size": [40, 48]}, "layers.0.mlp.experts",
        "intermediate size 40"),
    "sizes of layers, H unequal": (
        PLAIN, lambda s: resized(s, 1, 40, 48), {"moe_intermediate_size": [48, 48], "hidden_size": None},
        "layers.1.mlp.experts", "hidden size 32"),
    "square in the config, not in the tensors": (
        SPLIT, Spec.tensors, {"hidden_size": 48}, "layers.0.mlp.experts", "hidden size 48"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_sizes_that_differ(tmp_path: Path, what: str) -> None:
    """Refused, naming the tensor, who says what, and what was found."""
    spec, change, config, tensor, words = DIFFERENT[what]
    with pytest.raises(DataError, match="E0517") as caught:
        plan_of(spec, tmp_path / "s", change(spec), **config)
    error = caught.value
    assert tensor in str(error.tensor) and words in error.message and error.remedy, error
    assert str(error.file).endswith("model.safetensors")
    assert ("transposed" in error.message) is (what == "all transposed"), error


@pytest.mark.parametrize("layout", [SPLIT, FUSED, PLAIN], ids=["split", "fused", "plain"])
def test_a_config_without_sizes(tmp_path: Path, layout: Spec) -> None:
    """The routers say what is hidden, the layers agree: nothing to say."""
    plan = plan_of(layout, tmp_path / "s", hidden_size=None, moe_intermediate_size=None)
    assert plan.warnings == () and {t.header.shape.intermediate for t in plan.layers} == {48}
    one = {n: t for n, t in layout.tensors().items() if f"layers.1.{ROUTER}" not in n}
    assert plan_of(layout, tmp_path / "t", one, hidden_size=None).warnings == ()  # as wide as its neighbour


def test_what_nothing_confirms_is_said(tmp_path: Path) -> None:
    """Neither config nor router, or square experts of unstated size: the family's orientation alone decides."""
    square = PLAIN.having(intermediate=32)
    bare = {n: t for n, t in PLAIN.tensors().items() if ROUTER not in n}
    silent = {"hidden_size": None, "moe_intermediate_size": None}
    (said,) = plan_of(PLAIN, tmp_path / "1", bare, **silent).warnings
    assert "hidden 32, intermediate 48" in said and "hidden_size or moe_intermediate_size" in said
    (said,) = plan_of(square, tmp_path / "2", moe_intermediate_size=None).warnings
    assert "hidden 32, intermediate 32" in said
    assert plan_of(square, tmp_path / "3").warnings == ()
    assert plan_of(square, tmp_path / "4", hidden_size=None).warnings == ()
    assert plan_of(PLAIN, tmp_path / "5", bare, moe_intermediate_size=None).warnings == ()


@pytest.mark.parametrize("mtp", [[], [24]])
def test_sizes_of_layers(tmp_path: Path, mtp: list[int]) -> None:
    """Where the config lists a size for each layer, layers of unequal I are one model; MTP blocks come after them.
    The container is the definition, and verifies."""
    spec = T_ORDER.having(family="qwen3_5_moe_text", fused=False, mtp=bool(mtp))
    config = spec.config() | {"moe_intermediate_size": [48, 40, *mtp]}
    tensors = resized(spec, 1, 32, 40)
    if mtp:
        small = spec.having(intermediate=24).tensors()
        tensors |= {n: small[n] for n in tensors if n.startswith("mtp.layers.0.mlp.experts")}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    outcome = prepare(source, tmp_path / "o", encodings.get("int8"), workers=2)
    assert outcome.warnings == ()
    shapes = [t.header.shape.intermediate for t in planned(source, encodings.get("int8")).layers]
    assert shapes == [48, 40, *mtp]
    assert assert_is_definition(tmp_path / "o", source, "int8") == spec.experts * len(shapes)
    assert not verify(tmp_path / "o", source=source).findings


def test_a_dense_layers_size_means_nothing(tmp_path: Path) -> None:
    """A list has an entry for dense layers too."""
    spec = PLAIN.having(layers=3)
    tensors = {n: t for n, t in spec.tensors().items() if "layers.1.mlp." not in n}
    plan = plan_of(spec, tmp_path / "s", tensors, mlp_only_layers=[1], moe_intermediate_size=[48, 0, 48])
    assert [t.header.layer for t in plan.layers] == [0, 2] and plan.warnings == ()


@pytest.mark.parametrize("field", ["hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("value", ["32", 32.0, True, 0, -1, [32.0, 32], ["32", "32"], [48], {}, [[48], [48]]], ids=repr)
def test_sizes_that_are_no_numbers(tmp_path: Path, field: str, value: Any) -> None:
    """Named with the field; a list is a list of one number a decoder layer, for intermediate sizes only."""
    with pytest.raises(DataError, match="E0213") as caught:
        plan_of(PLAIN, tmp_path / "s", **{field: value})
    assert field in caught.value.message and str(caught.value.file).endswith("config.json")
    with pytest.raises(DataError, match="E0213"):
        plan_of(PLAIN, tmp_path / "t", hidden_size=[32, 32])


# -- multi-token prediction ------------------------------------------------------------------------------------------


def renumbered(spec: Spec, names: Mapping[str, str]) -> Tensors:
    """The tensors of some layers under other names; those of all others as they are."""
    found: Tensors = {}
    for name, tensor in spec.tensors().items():
        old = next((old for old in names if name.startswith(old)), None)
        found[name if old is None else names[old] + name.removeprefix(old)] = tensor
    return found


EXTRA = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
MTP_FAULTS: dict[str, tuple[Spec, Mapping[str, str], Mapping[str, Any], str, str]] = {
    "experts at layer 2, none at layer 1": (
        PLAIN, {"model.layers.1.": "model.layers.2."}, EXTRA, "model.layers.2.mlp.experts", "without block 0"),
    "the same, nothing announced": (
        PLAIN, {"model.layers.1.": "model.layers.2."}, EXTRA | {"num_nextn_predict_layers": None},
        "model.layers.2.mlp.experts", "as many as there are"),
    "a hole behind the first": (
        PLAIN.having(layers=3), {"model.layers.2.": "model.layers.3."}, EXTRA | {"num_nextn_predict_layers": 3},
        "model.layers.3.mlp.experts", "found block 2 without block 1"),
    "more than announced": (
        PLAIN.having(layers=3), {}, EXTRA, "model.layers.2.mlp.experts", "1 (num_nextn_predict_layers)"),
    "none announced": (
        PLAIN, {}, EXTRA | {"num_nextn_predict_layers": 0}, "model.layers.1.mlp.experts", "block 0 beyond them"),
    "a block of its own without the first": (
        SPLIT, {"mtp.layers.0.": "mtp.layers.1."}, {}, "mtp.layers.1.mlp.experts", "without block 0"),
    "a block of its own beyond those announced": (
        SPLIT, {}, {"mtp_num_hidden_layers": 0}, "mtp.layers.0.mlp.experts", "0 (mtp_num_hidden_layers)"),
}  # fmt: skip


@pytest.mark.parametrize("what", MTP_FAULTS)
def test_layers_that_would_pass_for_mtp_blocks(tmp_path: Path, what: str) -> None:
    """A hole among the blocks, or more than the config announces: the config may have forgotten a decoder layer."""
    spec, names, config, tensor, words = MTP_FAULTS[what]
    with pytest.raises(DataError, match="E0505") as caught:
        plan_of(spec, tmp_path / "s", renumbered(spec, names), **config)
    assert caught.value.tensor == tensor and words in caught.value.message and caught.value.remedy


def test_mtp_blocks_as_announced(tmp_path: Path) -> None:
    """One, two, or as many as there are where nothing is announced."""
    for number, (layers, announced) in enumerate([(2, 1), (3, 2), (3, 3), (3, None)]):
        spec = PLAIN.having(layers=layers)
        plan = plan_of(spec, tmp_path / str(number), **EXTRA | {"num_nextn_predict_layers": announced})
        blocks = [(t.header.block, t.header.layer) for t in plan.layers]
        assert blocks == [("layers", 0), *(("mtp", n) for n in range(layers - 1))]


def test_the_kit_transposes(tmp_path: Path) -> None:
    """What `transposed` makes is a checkpoint that converts, if the config says so: nothing but sizes is wrong."""
    plan = plan_of(PLAIN, tmp_path / "s", reshaped(transposed(PLAIN.tensors()), ROUTER, 12, 48),
                   hidden_size=48, moe_intermediate_size=32)  # fmt: skip
    assert {(t.header.shape.hidden, t.header.shape.intermediate) for t in plan.layers} == {(48, 32)}
    assert len(PARTS) == 3
