"""Every family, on checkpoints that transformers builds and saves: names, fusion, orientation and interleaving are
right if and only if the container's matrices are the model's own parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.conversions import planned, prepare
from kits.families import FAMILIES, MODELS, PARTS, SIZES, Built, built, is_expert, read_tensors, write_tensors

from pagestone.convert import families
from pagestone.convert.checkpoint import open_checkpoint
from pagestone.convert.plan import CONVERTED, COPIED, UNKNOWN
from pagestone.convert.report import plan_table
from pagestone.formats import encodings
from pagestone.formats.dtypes import VIEWS, bf16_to_f32
from pagestone.formats.encodings import Codec
from pagestone.formats.errors import DataError, RequestError
from pagestone.validate.verify import verify

CODECS = sorted(encodings.registry())
Make = Callable[[str, str], Built]


@pytest.fixture(scope="module")
def make(oracle: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make("mixtral", "wide")`: a checkpoint built by transformers."""
    oracle("torch")
    oracle("transformers").logging.set_verbosity_error()
    return lambda model, size: built(model, size, tmp_path_factory)


def plan_of(root: Path, codec: str = "int8") -> Any:
    return planned(root, encodings.get(codec))


def stored_matrix(tensors: dict[str, Any], codec: Codec, name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    """The stored arrays of one matrix by role, found by the names and types the codec's convention prescribes."""
    found = {}
    for t in codec.in_record(rows, columns):
        dtype, shape, data = tensors[f"{name}.{t.suffix}"]
        assert (dtype, shape) == (t.dtype, t.shape), name
        found[t.name] = np.frombuffer(data, VIEWS[dtype]).reshape(shape)
    return found


# the definitions of the packed codecs take their time: one size, the smallest, tells as much
@pytest.mark.parametrize(
    ("size", "codec_name"), [(s, c) for c in CODECS for s in SIZES if c in ("bf16", "fp8", "int8") or s == "half"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_container_holds_the_model(make: Make, tmp_path: Path, name: str, size: str, codec_name: str) -> None:
    """Each expert's stored arrays are the codec's definition of the model's own parameters, bit for bit; everything
    else is byte for byte what transformers saved; nothing is unknown, nothing is left over."""
    source, codec, out = make(name, size), encodings.get(codec_name), tmp_path / "out"
    model = source.model
    outcome = prepare(source.root, out, codec, workers=2)
    assert outcome.warnings == () and outcome.notes == {}
    assert outcome.manifest.lossless is (codec_name == "bf16")
    expected = set()
    for (block, layer), matrices in source.matrices.items():
        tensors = read_tensors(out, f"{block}-{layer:02d}.safetensors")
        sums = read_tensors(out, f"{block}-{layer:02d}.rowsum.safetensors")
        for (expert, part), bits in matrices.items():
            rows, columns = bits.shape
            matrix = f"{model.prefix(block, layer)}.{expert}.{model.parts[PARTS.index(part)]}"
            have, want = stored_matrix(tensors, codec, matrix, rows, columns), codec.allocate(rows, columns)
            codec.encode_definition(bf16_to_f32(bits), want)
            for role, array in have.items():
                assert array.tobytes() == want[role].tobytes(), (matrix, role)
            if codec_name == "bf16":
                assert np.array_equal(have["codes"], bits)
            expected |= {f"{matrix}.{t.suffix}" for t in codec.in_record(rows, columns)}
            if "row_sums" in want:
                stem, first = ("down_proj", 0) if part == "down" else ("gate_up_proj", rows * (part == "up"))
                row_sums = np.frombuffer(sums[f"{stem}.row_sum"][2], "<i4").reshape(source.size.experts, -1)
                assert np.array_equal(row_sums[expert, first : first + rows], want["row_sums"])
            if source.biases[block, layer]:
                bias = source.biases[block, layer][expert, part]
                assert tensors[f"{matrix}.bias"] == ("BF16", bias.shape, bias.tobytes()), matrix
                expected.add(f"{matrix}.bias")
    original = read_tensors(source.root)
    dense = read_tensors(out, "dense-*.safetensors")
    assert dense == {n: t for n, t in original.items() if not is_expert(n)}
    written = set(json.loads((out / "model.safetensors.index.json").read_bytes())["weight_map"])
    assert written == expected | set(dense)
    assert not verify(out, source=source.root).findings


@pytest.mark.parametrize("name", FAMILIES)
def test_plan_knows_every_name(make: Make, tmp_path: Path, name: str) -> None:
    """Every tensor is converted or copied by a rule of the family; the plan says how the experts are stored."""
    source = make(name, "wide")
    plan = plan_of(source.root)
    family = families.registry()[name]
    fates = {d.tensor.name: d.fate for d in plan.dispositions}
    assert fates.keys() == read_tensors(source.root).keys()
    for tensor, fate in fates.items():
        assert fate == (CONVERTED if is_expert(tensor) else COPIED), tensor
    assert UNKNOWN not in fates.values() and plan.warnings == ()
    assert {(t.header.block, t.header.layer) for t in plan.layers} == set(source.matrices)
    assert plan.family is family and family.experts_of(open_checkpoint(source.root).text_config) == 3
    text = open_checkpoint(source.root).text_config
    assert family.dense_layers(text) == set(source.model.dense_layers)
    assert family.loads_parts is source.model.own_names and family.parts == source.model.parts
    for layer in plan_table(plan, tmp_path)["layers"]:
        assert (layer["transposed"], layer["interleaved"]) == (name == "gpt_oss",) * 2
        assert layer["layout"] == ("per-expert" if family.loads_parts else "fused")


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_do_what_the_model_does(make: Make, tmp_path: Path, name: str) -> None:
    """gate, up and down from a container, put into the expert's formula, give what transformers' module gives: the
    three were not only taken apart as its flags say, they are the right three."""
    import torch

    source = make(name, "wide")
    prepare(source.root, tmp_path / "out", encodings.get("bf16"), workers=1)
    layer = max(n for block, n in source.matrices if block == "layers")
    tensors = read_tensors(tmp_path / "out", f"layers-{layer:02d}.safetensors")
    module = source.module.float()
    try:
        x = torch.randn(5, source.size.hidden, generator=torch.Generator().manual_seed(1))
        for expert in range(source.size.experts):
            stem = f"{source.model.prefix('layers', layer)}.{expert}"

            def value(part: str, suffix: str, stem: str = stem) -> Any:
                _, shape, data = tensors[f"{stem}.{source.model.parts[PARTS.index(part)]}.{suffix}"]
                return torch.from_numpy(bf16_to_f32(np.frombuffer(data, "<u2").reshape(shape)))

            gate, up = (x @ value(p, "weight").T for p in ("gate", "up"))
            if name == "gpt_oss":
                gate, up = (gate + value("gate", "bias")).clamp(max=7), (up + value("up", "bias")).clamp(-7, 7)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                inner = source.module.act_fn(gate) * up
            mine = inner @ value("down", "weight").T
            if name == "gpt_oss":
                mine = mine + value("down", "bias")
            chosen, weights = torch.full((5, 1), expert), torch.ones(5, 1)
            with torch.no_grad():
                theirs = type(module).forward(module, x, chosen, weights)
            assert theirs.abs().max() > 0.1
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4), (name, expert)
    finally:
        source.module.to(torch.bfloat16)


def test_dtype_of_the_router_bias(make: Make) -> None:
    """e_score_correction_bias is F32 in the source, so that copying it tells a copy from a cast."""
    for name in {"deepseek_v3", "glm4_moe", "minimax_m2"}.intersection(FAMILIES):
        found = {n: t[0] for n, t in read_tensors(make(name, "wide").root).items() if "e_score_correction" in n}
        assert found and set(found.values()) == {"F32"}, name


# -- the other layout of a family ------------------------------------------------------------------------------------


def fuse(tensors: dict[str, Any]) -> dict[str, Any]:
    """Per-expert tensors as the fused tensors of Qwen's BF16 releases: [E, 2I, H] and [E, H, I]."""
    result, groups = {}, {}
    for name, tensor in tensors.items():
        head, found, tail = name.partition(".mlp.experts.")
        if found:
            expert, part, _ = tail.split(".")
            groups.setdefault(head + ".mlp.experts.", {})[int(expert), part] = tensor
        else:
            result[name] = tensor
    for head, group in groups.items():
        count = len(group) // 3
        rows, columns = group[0, "gate_proj"][1]
        both = b"".join(group[e, p][2] for e in range(count) for p in ("gate_proj", "up_proj"))
        result[head + "gate_up_proj"] = ("BF16", (count, 2 * rows, columns), both)
        down = b"".join(group[e, "down_proj"][2] for e in range(count))
        result[head + "down_proj"] = ("BF16", (count, columns, rows), down)
    return result


def rewritten(source: Built, root: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """A checkpoint of one shard with other tensors, and a config with these fields changed in its text part."""
    root.mkdir()
    write_tensors(root / "model.safetensors", tensors)
    table = json.loads((source.root / "config.json").read_bytes())
    table.get("text_config", table).update(config)
    (root / "config.json").write_text(json.dumps(table))
    return root


def layer_files(root: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(root.iterdir()) if f.name.startswith(("layers-", "mtp-"))}


@pytest.mark.parametrize("name", [n for n in FAMILIES if MODELS[n].experts == "mlp.experts" and MODELS[n].own_names])
def test_fused_is_the_same_container(make: Make, tmp_path: Path, name: str) -> None:
    """Where a family may come fused (a release, or a re-save of one), its layer files are the same bytes."""
    source = make(name, "half")
    fused = rewritten(source, tmp_path / "fused", fuse(read_tensors(source.root)))
    assert plan_table(plan_of(fused), tmp_path)["layers"][0]["layout"] == "fused"
    for root, out in ((source.root, "a"), (fused, "b")):
        prepare(root, tmp_path / out, encodings.get("bf16"), workers=1)
    assert layer_files(tmp_path / "a") == layer_files(tmp_path / "b")


@pytest.mark.parametrize("size", SIZES)
def test_qwen3_vl_moe_both_ways(make: Make, tmp_path: Path, size: str) -> None:
    """Releases store [E, H, 2I] and [E, I, H], transformers saves [E, 2I, H] and [E, H, I]: the two shapes together
    tell which, also where one of them alone says nothing; the layer files are the same bytes."""
    source = make("qwen3_vl_moe", size)
    tensors = read_tensors(source.root)
    for name, (dtype, shape, data) in list(tensors.items()):
        if is_expert(name):
            turned = np.ascontiguousarray(np.frombuffer(data, "<u2").reshape(shape).transpose(0, 2, 1))
            tensors[name] = (dtype, turned.shape, turned.tobytes())
    released = rewritten(source, tmp_path / "released", tensors)
    assert all(t["transposed"] for t in plan_table(plan_of(released), tmp_path)["layers"])
    for root, out in ((source.root, "a"), (released, "b")):
        prepare(root, tmp_path / out, encodings.get("int8"), workers=1)
    assert layer_files(tmp_path / "a") == layer_files(tmp_path / "b")


def test_per_expert_qwen3_vl_moe(make: Make, tmp_path: Path) -> None:
    """A release that names each expert (as FP8 releases do) is read too; its directory still raises in transformers."""
    source = make("qwen3_vl_moe", "wide")
    tensors = {n: t for n, t in read_tensors(source.root).items() if not is_expert(n)}
    for (block, layer), matrices in source.matrices.items():
        for (expert, part), bits in matrices.items():
            name = f"{source.model.prefix(block, layer)}.{expert}.{part}_proj.weight"
            tensors[name] = ("BF16", bits.shape, bits.tobytes())
    split = rewritten(source, tmp_path / "split", tensors)
    for root, out in ((source.root, "a"), (split, "b")):
        prepare(root, tmp_path / out, encodings.get("bf16"), workers=1)
    assert layer_files(tmp_path / "a") == layer_files(tmp_path / "b")
    assert "quant_method" not in json.loads((tmp_path / "b" / "config.json").read_bytes())["quantization_config"]


# hard case: experts stored transposed; shapes decide nothing when 2I == H or I == H: the family decides
@pytest.mark.parametrize("size", ["half", "square"])
def test_the_family_decides_the_orientation(make: Make, tmp_path: Path, size: str) -> None:
    """A gpt_oss checkpoint whose experts are not transposed is refused by the shapes of the two tensors together, even
    where one of them is square; nothing is guessed."""
    source = make("gpt_oss", size)
    tensors = read_tensors(source.root)
    for name, (dtype, shape, data) in list(tensors.items()):
        if is_expert(name) and len(shape) == 3:
            tensors[name] = (dtype, (shape[0], shape[2], shape[1]), data)
    with pytest.raises(DataError, match="E0510"):
        plan_of(rewritten(source, tmp_path / "turned", tensors))


# -- what is refused -------------------------------------------------------------------------------------------------


def raw(dtype: str, *shape: int) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of zeros."""
    bits = {"U8": 8, "I8": 8, "F8_E4M3": 8, "U32": 32, "I32": 32, "F32": 32, "BF16": 16, "F16": 16, "I64": 64}[dtype]
    return dtype, shape, bytes(int(np.prod(shape, dtype=int)) * bits // 8)


def one_expert(**suffixes: tuple[str, tuple[int, ...], bytes]) -> dict[str, Any]:
    """Tensors of an expert's up_proj that replace its weight."""
    return {f"model.layers.1.mlp.experts.0.up_proj.{k.replace('__', '.')}": v for k, v in suffixes.items()}


FOREIGN = {
    "MXFP4": ("gpt_oss", {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": raw("U8", 3, 384, 4, 16),
        "model.layers.0.mlp.experts.gate_up_proj_scales": raw("U8", 3, 384, 4),
    }),
    "NVFP4": ("qwen3_moe", one_expert(weight=raw("U8", 192, 64), weight_scale=raw("F8_E4M3", 192, 8),
                                      weight_scale_2=raw("F32"), input_scale=raw("F32"))),
    "packed": ("qwen3_moe", one_expert(weight_packed=raw("U8", 192, 64), weight_scale=raw("F8_E4M3", 192, 8),
                                       weight_global_scale=raw("F32", 1))),
    "GPTQ": ("qwen3_moe", one_expert(qweight=raw("I32", 16, 192), qzeros=raw("I32", 1, 24), g_idx=raw("I32", 128),
                                     scales=raw("F16", 1, 192))),
    "AWQ": ("mixtral", {"model.layers.1.block_sparse_moe.experts.0.w1.qweight": raw("I32", 128, 24)}),
    "bitsandbytes": ("qwen3_moe", one_expert(weight=raw("U8", 12288, 1), weight__absmax=raw("F32", 384))),
    "int8 of bitsandbytes": ("qwen3_moe", one_expert(weight=raw("I8", 192, 128), SCB=raw("F32", 192))),
    "MLX": ("qwen3_moe", {
        "model.layers.1.mlp.switch_mlp.gate_proj.weight": raw("U32", 3, 192, 16),
        "model.layers.1.mlp.switch_mlp.gate_proj.scales": raw("BF16", 3, 192, 2),
        "model.layers.1.mlp.switch_mlp.gate_proj.biases": raw("BF16", 3, 192, 2),
    }),
    "a packed compressed-tensors format": ("qwen3_moe", {
        "model.layers.1.self_attn.q_proj.weight_packed": raw("I32", 64, 16),  # dense only: refused all the same
        "model.layers.1.self_attn.q_proj.weight_shape": raw("I64", 2),
    }),
}  # fmt: skip


# hard case: NVFP4/MXFP4 companions: refuse clearly, no half read
@pytest.mark.parametrize("what", FOREIGN)
def test_other_formats_are_refused_by_name(make: Make, tmp_path: Path, what: str) -> None:
    """A checkpoint in a format that is not read is refused, naming the format and a tensor."""
    name, added = FOREIGN[what]
    source = make(name, "wide")
    stems = {n.rpartition(".")[0] for n in added}
    tensors = {n: t for n, t in read_tensors(source.root).items() if n.removesuffix(".weight") not in stems} | added
    with pytest.raises(RequestError, match="E0511") as caught:
        plan_of(rewritten(source, tmp_path / "s", tensors))
    named = {"AWQ": "AWQ", "GPTQ": "GPTQ", "packed": "NVFP4", "int8 of bitsandbytes": "bitsandbytes"}.get(what, what)
    assert named in caught.value.message and caught.value.tensor in added and caught.value.remedy


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_mlx_is_refused_by_its_config(make: Make, tmp_path: Path, key: str) -> None:
    """MLX's config alone is enough: dense tensors of such a checkpoint are changed as well."""
    source = make("qwen3_moe", "wide")
    stated = {"group_size": 64, "bits": 4, "mode": "affine"}
    root = rewritten(source, tmp_path / "s", read_tensors(source.root), **{key: stated})
    with pytest.raises(RequestError, match="MLX"):
        plan_of(root)


def test_unknown_family(make: Make, tmp_path: Path) -> None:
    """A family nobody wrote: the expert-like names that were found, and the file to add."""
    source = make("mixtral", "wide")
    root = rewritten(source, tmp_path / "s", read_tensors(source.root), model_type="new-moe.2")
    with pytest.raises(RequestError, match="E0602") as caught:
        plan_of(root)
    error = caught.value
    assert "model.layers.N.block_sparse_moe.experts.N.w1.weight" in error.message and "mixtral" in error.message
    assert error.remedy is not None and "convert/families/new_moe_2.py" in error.remedy
    dense = {n: t for n, t in read_tensors(source.root).items() if "block_sparse_moe" not in n}  # no router either
    with pytest.raises(RequestError, match="E0601"):
        plan_of(rewritten(source, tmp_path / "dense", dense, model_type="llama", num_local_experts=0))


def test_a_dense_model_of_a_moe_family(make: Make, tmp_path: Path) -> None:
    """No layer is MoE at all: said so."""
    source = make("deepseek_v3", "wide")
    dense = {n: t for n, t in read_tensors(source.root).items() if not is_expert(n)}
    with pytest.raises(RequestError, match="E0502"):
        plan_of(rewritten(source, tmp_path / "s", dense))


# -- names -----------------------------------------------------------------------------------------------------------


# hard case: MTP as model.layers.<num_hidden_layers>: kept, never dropped, never taken for a decoder layer
@pytest.mark.parametrize("name", [n for n in FAMILIES if MODELS[n].mtp == "extra layer"])
def test_mtp_as_an_extra_layer(make: Make, tmp_path: Path, name: str) -> None:
    """It is the MTP block with its own file; a family without such a block refuses the layer; a config that announces
    one which is not there is reported."""
    source = make(name, "wide")
    plan = plan_of(source.root)
    assert [t.name for t in plan.layers] == ["layers-01.safetensors", "mtp-00.safetensors"]
    assert plan.layers[1].header.prefix == "model.layers.2.mlp.experts"
    tensors = {n: t for n, t in read_tensors(source.root).items() if ".layers.2." not in n}
    without = plan_of(rewritten(source, tmp_path / "s", tensors, num_nextn_predict_layers=1))
    assert len(without.warnings) == 1 and "multi-token-prediction" in without.warnings[0]
    other = rewritten(source, tmp_path / "o", read_tensors(source.root), model_type="deepseek_v2")
    with pytest.raises(DataError, match="E0505"):
        plan_of(other)


# hard case: prefixes model.layers., model.language_model.layers., language_model.model.layers.
@pytest.mark.parametrize("top", ["model", "model.language_model", "language_model.model"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_under_every_prefix(make: Make, tmp_path: Path, name: str, top: str) -> None:
    """A family's layers are found, and none of their tensors is unknown, under each nesting checkpoints use."""
    source = make(name, "half")
    tensors = {n.replace(f"{source.model.top}.layers.", f"{top}.layers."): t
               for n, t in read_tensors(source.root).items()}  # fmt: skip
    plan = plan_of(rewritten(source, tmp_path / "s", tensors))
    assert {d.fate for d in plan.dispositions} == {CONVERTED, COPIED}
    assert {t.header.layer for t in plan.layers if t.header.block == "layers"} == {
        n for b, n in source.matrices if b != "mtp"
    }


# hard case: num_experts, num_local_experts, n_routed_experts; fewer experts than the config says
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_counted(make: Make, tmp_path: Path, name: str) -> None:
    """Router and config both say how many experts there are: too few is an error in every family."""
    source = make(name, "half")
    family = families.registry()[name]
    last = {n for n in read_tensors(source.root) if f".experts.{source.size.experts - 1}." in n}
    if not last:
        assert family.fused is not None and not family.loads_parts
        tensors = {n: (t[0], (2, *t[1][1:]), t[2][: len(t[2]) // 3 * 2]) if is_expert(n) else t
                   for n, t in read_tensors(source.root).items()}  # fmt: skip
    else:
        tensors = {n: t for n, t in read_tensors(source.root).items() if n not in last}
    with pytest.raises(DataError, match="3 experts expected"):
        plan_of(rewritten(source, tmp_path / "s", tensors))
    routers = {n for n in tensors if n.endswith(family.router)}
    assert len(routers) == len(source.matrices)
    with pytest.raises(DataError, match=r"3 experts expected from config\.json"):
        plan_of(rewritten(source, tmp_path / "r", {n: t for n, t in tensors.items() if n not in routers}))


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_compared(make: Make, tmp_path: Path, name: str) -> None:
    """Every family says where its config states the sizes: another number there is an error."""
    source, family = make(name, "wide"), families.registry()[name]
    assert family.size_fields[0] == source.model.size_field
    tensors = read_tensors(source.root)
    for number, field in enumerate((family.hidden_field, source.model.size_field)):
        with pytest.raises(DataError, match="E0517") as caught:
            plan_of(rewritten(source, tmp_path / f"{number}", tensors, **{field: 256}))
        assert field in caught.value.message and "256" in caught.value.message


# hard case: a name with a path part of the family's expert block that the family does not claim is an error
@pytest.mark.parametrize("name", FAMILIES)
def test_unclaimed_names_below_the_experts(make: Make, tmp_path: Path, name: str) -> None:
    """A tensor nobody claims below an experts module is an error in every family; elsewhere it is copied, unknown."""
    source = make(name, "half")
    tensors = read_tensors(source.root)
    experts = source.model.prefix("layers", 1)
    with pytest.raises(DataError, match="E0504"):
        plan_of(rewritten(source, tmp_path / "s", tensors | {f"{experts}.0.extra.weight": raw("BF16", 2, 2)}))
    layer = experts.rpartition(".")[0]
    names = {f"{layer}.gateXweight", f"{layer}.extra.weight", "model.layers.1.mlp.gate_projection.weight"}
    plan = plan_of(rewritten(source, tmp_path / "t", tensors | {n: raw("BF16", 2, 2) for n in names}))
    assert {d.tensor.name for d in plan.dispositions if d.fate == UNKNOWN} == names
    assert any("3 tensors unknown" in w for w in plan.warnings)


# hard case: ids must be exactly 0..E-1; a layer that lacks a part is an error
@pytest.mark.parametrize("name", [n for n in FAMILIES if MODELS[n].own_names])
def test_every_part_of_every_expert(make: Make, tmp_path: Path, name: str) -> None:
    """A missing expert, or a missing part of one, is named."""
    source = make(name, "half")
    tensors = read_tensors(source.root)
    stem = f"{source.model.prefix('layers', 1)}.1."
    for part in source.model.parts:
        kept = {n: t for n, t in tensors.items() if not n.startswith(f"{stem}{part}.")}
        with pytest.raises(DataError, match=f"expert 1 lacks {part}.weight"):
            plan_of(rewritten(source, tmp_path / part, kept))
    with pytest.raises(DataError, match="expert 1 is missing"):
        plan_of(rewritten(source, tmp_path / "x", {n: t for n, t in tensors.items() if not n.startswith(stem)}))


def test_biases_belong_together(make: Make, tmp_path: Path) -> None:
    """gpt_oss: a bias that is missing, of another shape or type, or not finite is an error; no half is dropped."""
    source = make("gpt_oss", "half")
    tensors = read_tensors(source.root)
    name = "model.layers.1.mlp.experts.down_proj_bias"
    with pytest.raises(DataError, match="E0508"):
        plan_of(rewritten(source, tmp_path / "1", {n: t for n, t in tensors.items() if n != name}))
    with pytest.raises(DataError, match="E0510"):
        plan_of(rewritten(source, tmp_path / "2", tensors | {name: raw("BF16", 3, 64)}))
    with pytest.raises(DataError, match="E0510"):
        plan_of(rewritten(source, tmp_path / "3", tensors | {name: raw("F32", 3, 128)}))
    data = bytearray(tensors[name][2])
    data[2 * (2 * 128 + 5) : 2 * (2 * 128 + 5) + 2] = b"\xc0\x7f"
    broken = rewritten(source, tmp_path / "4", tensors | {name: (*tensors[name][:2], bytes(data))})
    with pytest.raises(DataError, match="E0702") as caught:
        prepare(broken, tmp_path / "out", encodings.get("int8"), workers=1)
    assert caught.value.tensor == name and "row 5" in caught.value.message and "expert 2" in caught.value.message
