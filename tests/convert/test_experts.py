"""Families: which tensors are whose experts, in every layout, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from kits.checkpoints import LAYOUTS, PARTS, T_BLOCK, T_ORDER, Spec, Tensor, write_checkpoint

from pagestone.convert import families
from pagestone.convert.checkpoint import Checkpoint, open_checkpoint
from pagestone.convert.experts import LayerSource, find_layers
from pagestone.convert.family import Fused, sparse_step_dense_layers
from pagestone.convert.reading import ExpertReader, SourceFiles
from pagestone.formats.dtypes import to_f32
from pagestone.formats.errors import DataError, RequestError

SPECS = {
    "order": T_ORDER,
    "block": T_BLOCK,
    "text": T_ORDER.having(family="qwen3_5_moe_text"),
    "qwen3_moe": T_ORDER.having(family="qwen3_moe", fused=False),
    "F16": T_ORDER.having(dtype="F16"),
    "F32": T_BLOCK.having(dtype="F32", fused=False),
}


def layers_of(checkpoint: Checkpoint) -> list[LayerSource]:
    family = families.of_config(checkpoint.config)
    assert family is not None
    return list(find_layers(checkpoint, family).layers)


def read_all(checkpoint: Checkpoint, layer: LayerSource) -> dict[tuple[int, str], np.ndarray]:
    """Every matrix of a layer as float32, read as the pipeline reads it."""
    files = SourceFiles(checkpoint.path)
    reader = ExpertReader(files, ExpertReader.needed(layer))
    found = {}
    for expert in range(layer.count):
        arrays, _ = reader.read(layer, expert)
        for part, matrix in arrays.items():
            found[expert, part] = to_f32(matrix.stored["codes"], matrix.origin.tensor.dtype).copy()
    files.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_every_matrix_is_the_right_one(tmp_path, name, layout):
    """In every layout each expert's gate, up and down are read from where they stand, not from a neighbour."""
    spec = SPECS[name].having(**LAYOUTS[layout])
    checkpoint = open_checkpoint(spec.write(tmp_path / "s", shards=3, alphabetical=True, shift=1))
    layers = layers_of(checkpoint)
    assert [(x.block, x.layer) for x in layers] == [(b, n) for b, n, _ in spec.blocks()]
    for position, layer in enumerate(layers):
        assert layer.count == spec.experts
        for (expert, part), matrix in read_all(checkpoint, layer).items():
            assert np.array_equal(matrix, spec.matrix(position, part, expert)), (layer.prefix, expert, part)
            rows = [spec.origin(v) for v in matrix[[0, -1], 0]]
            assert rows == [(position, part, expert, 0), (position, part, expert, len(matrix) - 1)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_orientations(tmp_path, transposed, interleaved):
    """Transposed and interleaved fused tensors, where a family has them, are taken apart rightly."""
    spec = T_ORDER.having(mtp=False)
    tensors = spec.tensors()
    for position, (_, _, layer) in enumerate(spec.blocks()):
        both, down = [], []
        for e in range(spec.experts):
            gate, up, low = (spec.matrix(position, p, e) for p in PARTS)
            stacked = np.stack([gate, up], axis=1) if interleaved else np.stack([gate, up])
            both.append(stacked.reshape(2 * spec.intermediate, spec.hidden))
            down.append(low)
        flip = (0, 2, 1) if transposed else (0, 1, 2)
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = Tensor.of(np.stack(both).transpose(flip))
        tensors[f"{layer}.mlp.experts.down_proj"] = Tensor.of(np.stack(down).transpose(flip))
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", tensors, spec.config()))
    known = families.registry()["qwen3_5_moe"]
    changes = {f: getattr(known, f) for f in ("name", "model_types", "known", "dense_layers")}
    family = type(known)(**changes, fused=Fused(transposed=transposed, interleaved=interleaved))
    for position, layer in enumerate(find_layers(checkpoint, family).layers):
        for (expert, part), matrix in read_all(checkpoint, layer).items():
            assert np.array_equal(matrix, spec.matrix(position, part, expert))


def test_element_types_may_differ_between_experts(tmp_path):
    """A layer whose experts are not all of one type is read with room for the widest."""
    spec = T_ORDER.having(fused=False, mtp=False)
    tensors = spec.tensors()
    for name in list(tensors):
        if ".experts.7." in name or ".experts.3.up" in name:
            tensors[name] = Tensor.of((tensors[name].bits().astype("<u4") << 16).view("<f4"), "F32")
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", tensors, spec.config()))
    for position, layer in enumerate(layers_of(checkpoint)):
        assert layer.dtypes == ("BF16", "F32")
        for (expert, part), matrix in read_all(checkpoint, layer).items():
            assert np.array_equal(matrix, spec.matrix(position, part, expert))


@pytest.mark.parametrize("prefix", ["model.layers", "model.language_model.layers", "language_model.model.layers"])
def test_nestings(tmp_path, prefix):
    """Decoder layers are found under each nesting checkpoints use, with either config."""
    spec = T_ORDER.having(mtp=False)
    tensors = {n.replace("model.language_model.layers", prefix): t for n, t in spec.tensors().items()}
    for number, config in enumerate((spec.config(), spec.config()["text_config"])):
        checkpoint = open_checkpoint(write_checkpoint(tmp_path / str(number), tensors, config))
        assert [x.prefix for x in layers_of(checkpoint)] == [f"{prefix}.{n}.mlp.experts" for n in range(2)]


def test_numbers_are_numbers(tmp_path):
    """Layer 10 comes after layer 2, and so does expert 10."""
    spec = Spec(hidden=8, intermediate=8, experts=11, layers=11, fused=False, mtp=False)
    checkpoint = open_checkpoint(spec.write(tmp_path / "s", shards=2, alphabetical=True))
    layers = layers_of(checkpoint)
    assert [x.layer for x in layers] == list(range(11))
    assert layers[10].matrix(10, "up").tensor.name.endswith("layers.10.mlp.experts.10.up_proj.weight")


def test_dense_layers(tmp_path):
    """Layers that mlp_only_layers or decoder_sparse_step make dense need no experts."""
    spec = T_ORDER.having(layers=4, mtp=False, config_extra={"mlp_only_layers": [1], "decoder_sparse_step": 1})
    tensors = {n: t for n, t in spec.tensors().items() if "layers.1.mlp" not in n}
    tensors["model.language_model.layers.1.mlp.gate_proj.weight"] = Tensor.of(np.ones((8, 32)))
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", tensors, spec.config()))
    assert [x.layer for x in layers_of(checkpoint)] == [0, 2, 3]
    assert sparse_step_dense_layers({"num_hidden_layers": 6, "decoder_sparse_step": 2}) == {0, 2, 4}
    assert sparse_step_dense_layers({"num_hidden_layers": 3, "mlp_only_layers": None}) == set()


def test_two_copies_of_a_layer(tmp_path):
    """The same layer under two nestings is refused."""
    spec = T_ORDER.having(mtp=False)
    tensors = spec.tensors()
    for name in list(tensors):
        if "layers.1.mlp.experts.gate" in name:
            tensors[name.replace("model.language_model", "model")] = tensors[name]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", tensors, spec.config()))
    with pytest.raises(DataError, match="E0506"):
        layers_of(checkpoint)


def without(*words: str):
    return lambda tensors, root: {n: t for n, t in tensors.items() if not any(w in n for w in words)}


def replaced(name: str, tensor: Tensor):
    return lambda tensors, root: tensors | {f"{root}.layers.1.mlp.experts.{name}": tensor}


BROKEN = {
    "expert in the middle": (without("layers.1.mlp.experts.5."), "E0509", "expert 5 is missing"),
    "expert 10": (without("layers.1.mlp.experts.10."), "E0509", "expert 10 is missing"),
    "first expert": (without("layers.1.mlp.experts.0."), "E0509", "expert 0 is missing"),
    "last expert": (without("layers.1.mlp.experts.11."), "E0509", "12 experts expected"),
    "last expert and router": (without("layers.1.mlp.experts.11.", "layers.1.mlp.gate."), "E0509", "config.json"),
    "one part": (without("layers.1.mlp.experts.3.up_proj"), "E0508", "expert 3 lacks up_proj.weight"),
    "a part everywhere": (without("down_proj"), "E0508", "lacks down_proj.weight"),
    "a layer": (without("layers.1.mlp.experts"), "E0503", "layer 1 is the first without experts"),
    "unknown name": (replaced("3.gate_proj.extra", Tensor.of([1])), "E0504", "claims no such"),
    "unknown part": (replaced("3.mid_proj.weight", Tensor.of([1])), "E0504", "claims no such"),
    "one bias": (replaced("3.gate_proj.bias", Tensor.of([1])), "E0508", "some have none"),
    "scale beside a weight": (replaced("3.up_proj.weight_scale_inv", Tensor.of([1], "F32")), "E0513", "BF16 weights"),
    "id with a zero": (replaced("03.up_proj.weight", Tensor.of([1])), "E0504", "claims no such"),
    "id in other digits": (replaced("٣.up_proj.weight", Tensor.of([1])), "E0504", "claims no such"),
    "id without end": (replaced("1" * 5000 + ".up_proj.weight", Tensor.of([1])), "E0504", "claims no such"),
    "another shape": (replaced("3.up_proj.weight", Tensor.of(np.ones((32, 48)))), "E0510", "as in expert 0"),
    "a vector": (replaced("0.down_proj.weight", Tensor.of(np.ones(32 * 48))), "E0510", "matrix expected"),
    "nothing in it": (replaced("0.down_proj.weight", Tensor("BF16", (0, 48), b"")), "E0510", "non-empty"),
    "fused and split": (replaced("down_proj", Tensor.of(np.ones((12, 32, 48)))), "E0507", "at once"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_incomplete_layers(tmp_path, what):
    """A layer that is not complete, or holds what nobody knows, is refused naming the tensor or the expert."""
    spec = T_ORDER.having(fused=False, mtp=False)
    change, code, words = BROKEN[what]
    tensors = change(spec.tensors(), spec.root)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", tensors, spec.config(), shards=2))
    with pytest.raises(DataError) as caught:
        layers_of(checkpoint)
    error = caught.value
    assert error.code == code and words in error.message and error.remedy and error.file, error
    assert error.tensor or what == "a layer"


FUSED = {
    "no down": (without("layers.1.mlp.experts.down_proj"), "E0508", "down"),
    "no gate_up": (without("layers.1.mlp.experts.gate_up_proj"), "E0508", "gate_up"),
    "fewer experts than the router": (
        lambda t, r: replaced("down_proj", Tensor.of(np.ones((11, 32, 48))))(
            replaced("gate_up_proj", Tensor.of(np.ones((11, 96, 32))))(t, r), r
        ),
        "E0509",
        "12 experts expected",
    ),
    "fewer in one of the two": (replaced("down_proj", Tensor.of(np.ones((11, 32, 48)))), "E0510", "expected beside"),
    "transposed": (replaced("gate_up_proj", Tensor.of(np.ones((12, 32, 96)))), "E0510", "expected beside"),
    "flat": (replaced("down_proj", Tensor.of(np.ones((12 * 32, 48)))), "E0510", "[experts, ., .]"),
    "a bias": (replaced("gate_up_proj_bias", Tensor.of([1])), "E0504", "claims no such"),
}


@pytest.mark.parametrize("what", FUSED)
def test_incomplete_fused_layers(tmp_path, what):
    """The same for fused tensors: shapes that do not belong together are refused."""
    spec = T_ORDER.having(mtp=False)
    change, code, words = FUSED[what]
    tensors = change(spec.tensors(), spec.root)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", tensors, spec.config()))
    with pytest.raises(DataError) as caught:
        layers_of(checkpoint)
    assert caught.value.code == code and words in caught.value.message, caught.value


def test_layer_beyond_the_config(tmp_path):
    """A decoder layer the config does not count is refused, not taken for an MTP block."""
    spec = T_ORDER.having(mtp=False)
    config = spec.config()
    config["text_config"]["num_hidden_layers"] = 1
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", spec.tensors(), config))
    with pytest.raises(DataError, match="E0505"):
        layers_of(checkpoint)


def test_no_experts_at_all(tmp_path):
    """A MoE family's config over a dense model is said to be that."""
    spec = T_ORDER.having(mtp=False)
    tensors = {n: t for n, t in spec.tensors().items() if "experts" not in n}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", tensors, spec.config()))
    with pytest.raises(RequestError, match="E0502"):
        layers_of(checkpoint)


def test_pruned_checkpoints_follow_the_router(tmp_path):
    """Where config and router disagree the router counts, with a warning."""
    spec = T_ORDER.having(mtp=False)
    config = spec.config()
    config["text_config"]["num_experts"] = 16
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "s", spec.tensors(), config))
    experts = find_layers(checkpoint, families.registry()["qwen3_5_moe"])
    layers, warnings = experts.layers, experts.warnings
    assert [x.count for x in layers] == [12, 12]
    assert len(warnings) == 2 and "config.json says 16" in warnings[0]


def test_registry():
    """Families are found by their files, each model type once."""
    assert set(families.registry()) >= {"qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe"}
    assert families.of_config({"model_type": "x", "text_config": {"model_type": "qwen3_moe"}}).name == "qwen3_moe"
    assert families.of_config({"model_type": "llama"}) is None and families.of_config({"text_config": 3}) is None


KNOWN = {
    "model.language_model.layers.3.mlp.gate.weight": True,
    "model.layers.3.mlp.gate.weight": True,
    "model.language_model.layers.3.mlp.gateXweight": False,
    "model.language_model.layers.3.mlp.shared_expert.gate_proj.weight": True,
    "model.language_model.layers.3.linear_attn.A_log": True,
    "model.language_model.layers.3.linear_attn.A_log.weight": False,
    "x.model.language_model.norm.weight": False,
    "model.visual.blocks.0.mlp.linear_fc1.weight": True,
    "mtp.fc.weight": True,
    "mtp.layers.0.mlp.gate.weight": True,
    "lm_head.weight": True,
    "score.weight": False,
}


@pytest.mark.parametrize("name", KNOWN)
def test_whole_names_are_matched(name):
    """Patterns are anchored at both ends; what merely resembles a known name is unknown."""
    assert families.registry()["qwen3_5_moe"].known_name(name) is KNOWN[name]
