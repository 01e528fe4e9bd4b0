"""The plan: two-way accounting of every tensor and file, before a byte is read."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kits import generated
from kits.checkpoints import LAYOUTS, SIDE_FILES, T_BLOCK, T_ORDER, Tensor, write_checkpoint
from kits.cli import done
from kits.conversions import planned, prepare

from pagestone.convert import plan as planning
from pagestone.convert.checkpoint import open_checkpoint
from pagestone.convert.commands import parse_layers
from pagestone.convert.plan import check_paths
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.text import natural
from pagestone.validate.verify import verify

PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "real-checkpoints" / "qwen3.5-25b-reap"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A published checkpoint at its true size of 50 GB, with holes for weights: a plan reads none."""
    root = tmp_path_factory.mktemp("real") / "source"
    generated.published(PUBLISHED).write(root, lambda part: not isinstance(part, generated.Tensor))
    return root


def plan_of(root: Path, codec: str = "int8", **how):
    return planned(root, encodings.get(codec), **how)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_every_tensor_exactly_once(tmp_path, codec, layout):
    """Every tensor of the source has one fate, every file of the container is listed, and the lengths are true."""
    spec = T_ORDER.having(**LAYOUTS[layout])
    source = spec.write(tmp_path / "s", shards=2)
    plan = plan_of(source, codec)
    assert sorted(d.tensor.name for d in plan.dispositions) == sorted(spec.tensors())
    experts = sum(1 for n in spec.tensors() if ".experts." in n)
    counts = Counter(d.fate for d in plan.dispositions)
    assert counts == {"converted": experts, "copied": len(spec.tensors()) - experts}
    output = tmp_path / "o"
    prepare(source, output, encodings.get(codec), workers=2)
    written = {p.name: p.stat().st_size for p in output.iterdir()}
    made = written.pop("manifest.json") + written.pop("experts.parquet")
    assert written == plan.files
    assert abs(plan.bytes_out - sum(written.values()) - made) < 64 << 10
    assert plan.bytes_in == sum(len(t.data) for t in spec.tensors().values()) + sum(map(len, SIDE_FILES.values()))
    targets = {d.target for d in plan.dispositions}
    assert targets == {n for n in written if n.endswith(".safetensors") and "rowsum" not in n}


def test_unknown_names_are_copied_and_listed(tmp_path):
    """A name no rule knows is copied, and both the plan and a warning say so."""
    tensors = T_ORDER.tensors() | {"score.weight": Tensor.of(np.ones((3, 32))), "a.²": Tensor("U8", (1,), b"x")}
    root = write_checkpoint(tmp_path / "s", tensors, T_ORDER.config())
    plan = plan_of(root)
    unknown = {d.tensor.name: d for d in plan.dispositions if d.fate == "copied unknown"}
    assert set(unknown) == {"score.weight", "a.²"}
    assert unknown["score.weight"].target == "dense-00001-of-00001.safetensors"
    assert any("2 tensors unknown" in w for w in plan.warnings)


def test_vision_mlp_is_no_expert(tmp_path):
    """`model.visual.blocks.N.mlp` and shared experts stay dense."""
    plan = plan_of(T_ORDER.write(tmp_path / "s"))
    fates = {d.tensor.name: d.fate for d in plan.dispositions}
    assert fates["model.visual.blocks.0.mlp.linear_fc1.weight"] == "copied"
    assert fates["model.language_model.layers.0.mlp.shared_expert.up_proj.weight"] == "copied"
    assert fates["mtp.fc.weight"] == "copied"


@pytest.mark.parametrize(("span", "kept"), [((0, 1), [0]), ((1, 3), [1, 2]), ((2, 10**6), [2, 3]), ((3, 4), [3])])
def test_layers_option(tmp_path, span, kept):
    """--layers converts those layers only; the others are excluded by that rule, and the MTP block with them."""
    root = T_ORDER.having(layers=4).write(tmp_path / "s")
    plan = plan_of(root, layers=span)
    assert [t.header.layer for t in plan.layers] == kept
    assert plan.partial == (span[0], min(span[1], 4))
    excluded = {d.tensor.name for d in plan.dispositions if d.fate == "excluded"}
    assert len(excluded) == 2 * (5 - len(kept)) and "mtp.layers.0.mlp.experts.down_proj" in excluded
    assert all(d.target is None and "--layers" in d.rule for d in plan.dispositions if d.fate == "excluded")


def test_layers_that_are_not_there(tmp_path):
    """A span without a layer is refused, saying which there are."""
    with pytest.raises(RequestError, match="0 to 1") as caught:
        plan_of(T_ORDER.write(tmp_path / "s"), layers=(2, 9))
    assert caught.value.code == "E0603"


@pytest.mark.parametrize(
    "text", ["", "3", ":", "2:2", "3:1", "a:b", "-1:2", "1:2:3", "1.0:2", "²:3", " 1:2", "9" * 5000]
)
def test_layers_that_say_nothing(text):
    """--layers is A:B with A < B; anything else is refused."""
    if text == ":":
        assert parse_layers(text) == (0, 10**6)
        return
    with pytest.raises(RequestError, match="E0001"):
        parse_layers(text)


def test_layers_that_are_understood():
    """Either end may be left out."""
    assert [parse_layers(t) for t in (None, "0:2", ":2", "3:")] == [None, (0, 2), (0, 2), (3, 10**6)]


def test_natural_order():
    """Numbers inside names sort by value, whatever else is in them."""
    names = ["a.10.b", "a.2.b", "a.2.a", "b", "a", "", "²", "1²", "a." + "7" * 5000]
    assert sorted(["l.10", "l.9", "l.2.x", "l.2"], key=natural) == ["l.2", "l.2.x", "l.9", "l.10"]
    assert sorted(names, key=natural).index("a.2.a") < sorted(names, key=natural).index("a.10.b")


def test_dense_shards(tmp_path, monkeypatch):
    """Dense tensors fill shards in natural order of names; a tensor larger than a shard has its own."""
    monkeypatch.setattr(planning, "DENSE_SHARD", 5000)
    plan = plan_of(T_ORDER.having(layers=11).write(tmp_path / "s", shards=3, alphabetical=True))
    assert len(plan.dense) > 5
    assert [t.name for t in plan.dense] == [
        f"dense-{n + 1:05d}-of-{len(plan.dense):05d}.safetensors" for n in range(len(plan.dense))
    ]
    names = [t.name for shard in plan.dense for t in shard.tensors]
    assert names.index("model.language_model.layers.9.mlp.gate.weight") < names.index(
        "model.language_model.layers.10.mlp.gate.weight"
    )
    for shard in plan.dense:
        assert len(shard.tensors) == 1 or sum(t.nbytes for t in shard.tensors) <= 5000
        offset = len(shard.head())
        assert offset % 4096 == 0
        for tensor in shard.tensors:
            assert offset % (4 if tensor.dtype == "F32" else 2) == 0
            offset += tensor.nbytes


def test_code_is_copied_on_request_only(tmp_path):
    """*.py files go over with --include-code only; folders and hidden files of that name never."""
    root = T_ORDER.write(tmp_path / "s")
    (root / "modeling.py").write_text("x")
    (root / "package.py").mkdir()
    (root / ".secret.py").write_text("x")
    assert "modeling.py" not in plan_of(root).files
    files = plan_of(root, include_code=True).files
    assert files["modeling.py"] == 1 and "package.py" not in files and ".secret.py" not in files


@pytest.mark.parametrize(
    "name", ["manifest.json", "experts.parquet", "layers-00.safetensors", "mtp-123.rowsum.safetensors",
             "dense-00001-of-00002.safetensors"],
)  # fmt: skip
def test_source_files_named_like_ours(tmp_path, name):
    """A file of the source that would be taken for one of the container's is refused by name."""
    root = T_ORDER.write(tmp_path / "s")
    (root / name).write_text("x")
    with pytest.raises(RequestError, match="E0604") as caught:
        plan_of(root)
    assert caught.value.file == str(root / name)


def test_container_is_no_source(tmp_path):
    """Codes are not encoded again."""
    prepare(T_BLOCK.write(tmp_path / "s"), tmp_path / "o", encodings.get("int8"), workers=1)
    with pytest.raises(RequestError, match="E0411"):
        open_checkpoint(tmp_path / "o")


@pytest.mark.parametrize("dtype, error, code", [("F8_E4M3", DataError, "E0513"), ("I8", DataError, "E0513"),
                                               ("F64", RequestError, "E0514")])  # fmt: skip
def test_types_an_encoder_does_not_take(tmp_path, dtype, error, code):
    """Codes without a scale are wrong data; a type no codec takes is a wrong request; both name the tensor."""
    spec = T_ORDER.having(mtp=False)
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    size = {"F64": 8}.get(dtype, 1)
    tensors = spec.tensors() | {name: Tensor(dtype, (12, 32, 48), bytes(12 * 32 * 48 * size))}
    with pytest.raises(error, match=code) as caught:
        plan_of(write_checkpoint(tmp_path / "s", tensors, spec.config()))
    assert caught.value.tensor == name and dtype in caught.value.message


def test_contradicting_quantization_config(tmp_path):
    """The tensors' types decide, the contradiction is reported, and the container's config states our codec only."""
    config = T_ORDER.config()
    config["quantization_config"] = {"quant_method": "fp8"}
    config["text_config"]["quantization_config"] = {"quant_method": "awq"}
    plan = plan_of(write_checkpoint(tmp_path / "s", T_ORDER.tensors(), config))
    assert any("quantization_config" in w for w in plan.warnings)
    stated = json.loads(plan.generated["config.json"])
    assert stated["quantization_config"]["quant_method"] == "compressed-tensors"
    assert stated["text_config"]["quantization_config"] == stated["quantization_config"]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("stated", [0, 1, 2])
@pytest.mark.parametrize("there", [False, True])
def test_announced_mtp(tmp_path, family, stated, there):
    """The container's config announces the MTP blocks that are there, whatever the source's says; the user is told."""
    spec = T_ORDER.having(family=family, layers=1, mtp=there)
    config = spec.config()
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = stated
    source = write_checkpoint(tmp_path / "s", spec.tensors(), config)
    if stated < there:  # experts beyond what is announced may be a decoder layer's
        with pytest.raises(DataError, match="E0505"):
            plan_of(source)
        return
    prepare(source, tmp_path / "o", encodings.get("int8"), workers=1)
    made = json.loads((tmp_path / "o" / "config.json").read_bytes())
    assert made.get("text_config", made)["mtp_num_hidden_layers"] == int(there)
    told = [w for w in plan_of(source).warnings if f"mtp_num_hidden_layers {stated}" in w]
    assert bool(told) == (stated != there) and all(f"has {int(there)}" in w for w in told)
    assert not verify(tmp_path / "o", source=source).findings
    assert plan_of(source, layers=(0, 1)).generated["config.json"].count(b'"mtp_num_hidden_layers": %d' % there) == 1


def test_mtp_announced_in_other_words(tmp_path):
    """Every field that counts blocks, and the switch; none is added, and null stays."""
    spec = T_ORDER.having(layers=1, mtp=False)
    extra = {"num_nextn_predict_layers": 1, "num_mtp_modules": 3, "use_mtp": True, "mtp_num_hidden_layers": None}
    for name, tensors in (("none", spec.tensors()), ("one", spec.having(mtp=True).tensors())):
        there = int(name == "one")
        config = spec.config() | {"num_mtp_modules": 2}
        config["text_config"] |= extra
        plan = plan_of(write_checkpoint(tmp_path / name, tensors, config))
        made = json.loads(plan.generated["config.json"])
        assert made["num_mtp_modules"] == there and "mtp_num_hidden_layers" not in made
        assert {k: made["text_config"][k] for k in extra} == {
            "num_nextn_predict_layers": there, "num_mtp_modules": there, "use_mtp": bool(there),
            "mtp_num_hidden_layers": None} | ({"num_nextn_predict_layers": 1} if there else {})  # fmt: skip
        assert any("num_mtp_modules 2" in w for w in plan.warnings)


def test_mtp_that_is_dense_or_elsewhere(tmp_path):
    """A block without experts counts by its other tensors; where names only hint at blocks, nothing is corrected."""
    spec = T_ORDER.having(layers=1, mtp=True)
    dense = {n: t for n, t in spec.tensors().items() if not n.startswith("mtp") or ".experts" not in n}
    assert not plan_of(write_checkpoint(tmp_path / "dense", dense, spec.config())).warnings
    config = spec.config()
    config["text_config"]["mtp_num_hidden_layers"] = 0
    plan = plan_of(write_checkpoint(tmp_path / "none said", dense, config))
    assert json.loads(plan.generated["config.json"])["text_config"]["mtp_num_hidden_layers"] == 1
    odd = {n: t for n, t in spec.tensors().items() if not n.startswith("mtp.")}
    odd["model.mtp_layers.0.norm.weight"] = Tensor.of([1.0])
    plan = plan_of(write_checkpoint(tmp_path / "odd", odd, spec.config()))
    assert json.loads(plan.generated["config.json"])["text_config"]["mtp_num_hidden_layers"] == 1


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("stated", [0, 1, 2])
def test_announced_mtp_as_extra_layers(tmp_path, extra, stated):
    """The same where blocks stand as further decoder layers."""
    spec = T_ORDER.having(layers=1 + extra, family="qwen3_moe", fused=False)
    config = spec.config() | {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": stated}
    source = write_checkpoint(tmp_path / "s", spec.tensors(), config)
    if stated < extra:
        with pytest.raises(DataError, match="E0505"):
            plan_of(source)
        return
    plan = plan_of(source)
    assert json.loads(plan.generated["config.json"])["num_nextn_predict_layers"] == extra
    assert any("num_nextn_predict_layers" in w for w in plan.warnings) == (stated != extra)


def test_output_and_source_apart(tmp_path):
    """The output is neither the source nor inside it nor around it, links resolved."""
    source = T_ORDER.write(tmp_path / "s")
    (tmp_path / "link").symlink_to(source)
    for output in (source, source / "sub", tmp_path, tmp_path / "link", tmp_path / "link" / "x", source / ".." / "s"):
        with pytest.raises(RequestError, match="E0606"):
            check_paths(source, output)
    check_paths(source, tmp_path / "s2")


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_dry_run_writes_nothing(tmp_path, codec):
    """--dry-run prints the whole plan, as text and as JSON, and leaves no trace."""
    source = T_ORDER.write(tmp_path / "s", shards=2)
    before = sorted(tmp_path.rglob("*"))
    text = done(f"prepare-{codec}", source, "-o", tmp_path / "deep" / "o", "--dry-run")
    table = json.loads(done(f"prepare-{codec}", source, "-o", tmp_path / "deep" / "o", "--dry-run", "--json"))
    assert sorted(tmp_path.rglob("*")) == before
    assert table["tensors"]["total"] == len(T_ORDER.tensors()) == len(table["dispositions"])
    assert "6 converted" in text and "disk space free" in text
    assert table["bytes_out"] > sum(table["files"].values()) > 0 and table["disk_free"] > 0


def test_published_checkpoint_is_accounted_in_seconds(published):
    """Every one of 22,213 tensors of a published 50 GB checkpoint has a fate, within seconds of CPU time."""
    assert sum(p.stat().st_blocks * 512 for p in published.iterdir()) < 16 << 20
    begun = time.process_time()
    plan = plan_of(published)
    assert time.process_time() - begun < 15
    assert Counter(d.fate for d in plan.dispositions) == {"converted": 21600, "copied": 613}
    assert len({d.tensor.name for d in plan.dispositions}) == 22213
    assert [t.header.count for t in plan.layers] == [180] * 40
    assert [t.name for t in plan.layers][:2] == ["layers-00.safetensors", "layers-01.safetensors"]
    assert plan.family.name == "qwen3_5_moe" and plan.source_facts["expert_dtypes"] == ["F16"]
    assert any("multi-token-prediction" in w for w in plan.warnings)
    assert plan.layers[0].header.prefix == "model.language_model.layers.0.mlp.experts"


def test_published_checkpoint_dry_run(published, tmp_path):
    """The command prints it too."""
    text = done("prepare-fp8", published, "-o", tmp_path / "o", "--dry-run")
    assert "total: 21600 converted, 613 copied" in text and "reads 46.74 GiB" in text
