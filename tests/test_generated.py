"""The generated checkpoint: the same bytes however they are read, and a model that behaves like one."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from kits import byte_pairs, generated
from kits.containers import Source
from kits.conversions import prepare
from kits.generated import File, GeneratedCheckpoint, GeneratedStorage, Given, Law, Matrix, Tensor
from kits.storage import StorageTests
from safetensors import safe_open

from pagestone.convert.checkpoint import open_checkpoint
from pagestone.convert.plan import Request, make_plan
from pagestone.formats import encodings
from pagestone.formats.digests import digest
from pagestone.formats.dtypes import E4M3_VALUES, VIEWS, to_f32
from pagestone.formats.manifest import MANIFEST
from pagestone.formats.storage import Place, Storage
from pagestone.validate.verify import verify

SMALL = {"hidden_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 64,
         "num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 32, "linear_value_head_dim": 32}  # fmt: skip
PUBLISHED = Path(__file__).resolve().parent / "data" / "real-checkpoints" / "qwen3.5-25b-reap"
LAYER = "model.language_model.layers"


def small(**asked) -> GeneratedCheckpoint:
    """Four layers at an eighth of the size."""
    return GeneratedCheckpoint(**{"layers": 4, "experts": 4, "vocabulary": 400, "changed": SMALL} | asked)


def tensor(source: GeneratedStorage, name: str) -> Tensor:
    """A tensor by its name."""
    return next(p for f in source.files.values() for p in f.parts if isinstance(p, Tensor) and p.name == name)


def values(found: Tensor) -> np.ndarray:
    """All of a tensor as float32."""
    buffer = bytearray(found.nbytes)
    found.fill(0, memoryview(buffer))
    if found.dtype == "F8_E4M3":
        return E4M3_VALUES[np.frombuffer(buffer, np.uint8)].reshape(found.shape)
    return to_f32(np.frombuffer(buffer, VIEWS[found.dtype]), found.dtype).reshape(found.shape)


def cut(data: bytes) -> File:
    """A file of these bytes in parts, also empty ones."""
    draw = random.Random(len(data))
    ends = sorted([0, 0, len(data), *(draw.randrange(len(data) + 1) for _ in range(4))])
    return File(tuple(Given(lambda piece=data[a:b]: piece) for a, b in itertools.pairwise(ends)))


class TestGeneratedStorage(StorageTests):
    def storage(self, files: dict[str, bytes], tmp_path: Path) -> Storage:
        return GeneratedStorage({name: cut(data) for name, data in files.items()})

    def change(self, storage: Storage, name: str, data: bytes) -> None:
        assert isinstance(storage, GeneratedStorage)
        storage.files[name] = cut(data)


@pytest.mark.parametrize("form", ["fused", "per-expert", "fp8"])
def test_any_range_has_the_same_bytes(form):
    """However a file is cut, in whatever order: across tensors, matrices of experts, words of draws."""
    source, draw = small(form=form, outliers=True), random.Random(form)
    for name in [n for n in source.names() if n.endswith(".safetensors")]:
        whole = Place(source, name).read_bytes()
        edges = [end for end in source.files[name].ends if end < len(whole)]
        for _ in range(300):
            at = draw.choice([draw.randrange(len(whole)), draw.choice(edges) - draw.randrange(9)])
            length = draw.choice([1, 2, 3, 7, 8, 9, 130, 8 * generated.WORDS + 5, 1 << 19])
            assert Place(source, name).read(at, length) == whole[at : at + length], (name, at, length)
    large = Tensor("x", "BF16", (5, 70001), Matrix(Law("normal", 0, 1), "BF16", 70001, (3, 70000)), 0)
    whole, piece = bytearray(large.nbytes), bytearray(300000)
    large.fill(0, memoryview(whole))
    for at in (0, 1, 8 * generated.WORDS - 1, 8 * generated.WORDS, 399_999):
        large.fill(at, memoryview(piece))
        assert piece == whole[at : at + len(piece)]


def test_bytes_are_written_down():
    """They come from seed and name alone: the same in every process, on every machine, in every version."""
    found = {(seed, dtype): b"" for seed in (0, 1) for dtype in ("BF16", "F16", "F32", "F8_E4M3")}
    for seed, dtype in found:
        part = Tensor("a.name", dtype, (40, 100), Matrix(Law("normal", 0, 0.02), dtype, 100), seed)
        buffer = bytearray(part.nbytes)
        part.fill(0, memoryview(buffer))
        found[seed, dtype] = digest(buffer)
    assert len(set(found.values())) == 8
    assert found[0, "BF16"].hex() == "52413b20263bcda0a4a36877955a94a8"
    assert found[1, "F8_E4M3"].hex() == "9322bc9d21c3bbcd195005b9763d8f49"
    # four words of SplitMix64 with the seed 1234567, a published sequence
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert generated._draws(1234567, 0, 4).view("<u8").tolist() == words
    assert generated._draws(1234567, 2, 2).view("<u8").tolist() == words[2:]


def test_stamps_tell_parameters_apart():
    """Another seed, another size or other outliers are another file, the same parameters the same."""
    name = "model-00001-of-00001.safetensors"
    made = [small(), small(seed=1), small(vocabulary=401), small(outliers=True), small(form="per-expert")]
    stamps = [source.stamp(name) for source in made]
    assert len(set(stamps)) == len(made) and small().stamp(name) == stamps[0]
    part = tensor(made[0], "lm_head.weight")
    assert replace(part, matrix=replace(part.matrix, law=Law("normal", 0, 1))).identity != part.identity


def test_distributions():
    """Each kind of tensor has the mean and deviation of its kind, and no two rows have to do with each other."""
    source = small(layers=4, experts=8)
    expected = {
        "model.language_model.embed_tokens.weight": (0, 1), "lm_head.weight": (0, 1 / 16),
        f"{LAYER}.0.mlp.gate.weight": (0, 1 / 16), f"{LAYER}.0.mlp.experts.gate_up_proj": (0, 1 / 16),
        f"{LAYER}.0.mlp.experts.down_proj": (0, 1 / 8), f"{LAYER}.0.linear_attn.conv1d.weight": (0, 1 / 2),
        f"{LAYER}.0.linear_attn.in_proj_qkv.weight": (0, 1 / 16), f"{LAYER}.3.self_attn.q_proj.weight": (0, 1 / 16),
        f"{LAYER}.3.self_attn.o_proj.weight": (0, 1 / 16), f"{LAYER}.0.linear_attn.norm.weight": (1, 0.1),
        "model.language_model.norm.weight": (0, 0.1), f"{LAYER}.3.self_attn.q_norm.weight": (0, 0.1),
    }  # fmt: skip
    for name, (mean, deviation) in expected.items():
        found = values(tensor(source, name))
        tolerance = 4 * deviation / found.size**0.5
        assert abs(found.mean() - mean) < tolerance + 0.002 * mean, name
        assert abs(found.std() - deviation) < tolerance, name
        assert np.isfinite(found).all() and np.abs(found - mean).max() < 4.5 * deviation
    decay = np.exp(values(tensor(source, f"{LAYER}.0.linear_attn.A_log")))
    assert (decay > 0).all() and (decay < 16.1).all()
    assert (np.abs(values(tensor(source, f"{LAYER}.0.linear_attn.dt_bias")) + 4.575) < 2.35).all()
    both = values(tensor(source, f"{LAYER}.0.mlp.experts.gate_up_proj")).reshape(-1, 256)
    alike = np.corrcoef(both) - np.eye(len(both))
    assert np.abs(alike).max() < 6 / 16  # 524,000 pairs of rows: six standard deviations


def test_fused_and_per_expert_are_the_same_weights(tmp_path):
    """The matrices of an expert do not depend on how the checkpoint holds them; FP8 has as large ones."""
    forms = {form: small(form=form) for form in ("fused", "per-expert", "fp8")}
    for form, source in forms.items():
        source.write(tmp_path / form)
    fused, split = (Source(tmp_path / form) for form in ("fused", "per-expert"))
    prefix = f"{LAYER}.2.mlp.experts"
    assert fused.modules() == split.modules() == {f"{LAYER}.{n}.mlp.experts": 4 for n in range(4)}
    for part, matrix in fused.expert(prefix, 3).items():
        assert (matrix == split.expert(prefix, 3)[part]).all()
    assert (fused.expert(prefix, 3)["gate"] != fused.expert(prefix, 2)["gate"]).mean() > 0.9
    name = f"{prefix}.3.gate_proj.weight"
    codes, scales = (values(tensor(forms["fp8"], name + end)) for end in ("", "_scale_inv"))
    weights = codes * scales.repeat(64, 0).repeat(128, 1)
    assert 0.9 / 16 < weights.std() < 1.1 / 16 and not np.isnan(weights).any() and len(set(scales.ravel())) > 1


def test_outliers_stand_where_they_are_said_to():
    """Six channels of a layer are 32 times larger, gate's and up's the same ones, and nothing else changes."""
    plain, larger = (values(tensor(small(outliers=o), f"{LAYER}.1.mlp.experts.gate_up_proj")) for o in (False, True))
    ratio = (larger / plain).reshape(-1, 256)
    assert sorted(ratio.mean(axis=0))[-6:] == [32] * 6 and (ratio == 32).all(axis=0).sum() == 6
    assert (ratio == 1).all(axis=0).sum() == 250
    square = small(outliers=True, changed=SMALL | {"moe_intermediate_size": 256})
    channels = [
        {
            int(c)
            for c in np.abs(values(tensor(square, f"{LAYER}.{layer}.mlp.experts.{part}"))).mean((0, 1)).argsort()[-6:]
        }
        for layer, part in ((0, "gate_up_proj"), (0, "down_proj"), (1, "gate_up_proj"))
    ]
    assert all(one != two for one, two in itertools.combinations(channels, 2))


def test_many_threads_read_at_once():
    """Each thread has its own room to make bytes in."""
    source = GeneratedCheckpoint(layers=1, vocabulary=400)
    (name,) = [n for n in source.names() if n.endswith("1-of-00001.safetensors")]
    ranges = [(at * 3_000_001, 1_500_000) for at in range(40)]
    alone = [digest(Place(source, name).read(*each)) for each in ranges]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda each: digest(Place(source, name).read(*each)), ranges)) == alone


def test_files_are_what_is_read(tmp_path):
    """Written and read are the same, safetensors opens it, a hole is a hole, and the index has every tensor once."""
    source = small(shard_bytes=500_000)
    shards = [n for n in source.names() if n.endswith(".safetensors")]
    assert len(shards) > 4 and source.write(tmp_path / "a") == sum(map(source.size, source.names()))
    for name in source.names():
        assert (tmp_path / "a" / name).read_bytes() == Place(source, name).read_bytes()
    checkpoint = open_checkpoint(source)
    assert len(checkpoint.tensors) == sum(len(source.files[n].parts) - 1 for n in shards)
    for name in shards:
        with safe_open(tmp_path / "a" / name, "np") as opened:
            found = {k: tuple(opened.get_slice(k).get_shape()) for k in opened.keys()}  # noqa: SIM118
        assert found == {part.name: part.shape for part in source.files[name].parts[1:]}
    head = f"{LAYER}.0.mlp.gate.weight"
    source.write(tmp_path / "b", lambda part: not isinstance(part, Tensor) or part.name == head)
    assert [(tmp_path / "b" / n).stat().st_size for n in source.names()] == list(map(source.size, source.names()))
    assert (Source(tmp_path / "b").weight(head) == Source(tmp_path / "a").weight(head)).all()
    assert not Source(tmp_path / "b").weight("lm_head.weight").any()


@pytest.mark.parametrize("form", ["fused", "fp8"])
def test_conversion_from_the_seed_is_that_of_the_files(tmp_path, form):
    """What is converted from the storage is the container of the written files, byte for byte, and is verified."""
    source = small(form=form, layers=2)
    source.write(tmp_path / "files")
    outputs = [tmp_path / "one", tmp_path / "two"]
    for place, output in zip((source, tmp_path / "files"), outputs, strict=True):
        prepare(place, output, encodings.get("int8"), workers=2)
    names = sorted(p.name for p in outputs[0].iterdir())
    assert MANIFEST in names and "tokenizer.json" in names and "chat_template.jinja" in names
    for name in names:
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes(), name
    assert verify(outputs[1], source=source).exit_code == 0
    assert verify(outputs[1], source=small(form=form, layers=2, seed=1)).exit_code == 1


def test_true_size_is_the_published_one():
    """34.66 thousand million parameters of the language model, 60 GiB of them experts; a read is made in no time."""
    source = GeneratedCheckpoint()
    tensors = [p for f in source.files.values() for p in f.parts if isinstance(p, Tensor)]
    assert sum(t.nbytes for t in tensors) == 69_321_221_376
    assert sum(t.nbytes for t in tensors if ".experts." in t.name) == 60 << 30
    assert len({t.name for t in tensors}) == len(tensors) == 693
    shards = [n for n in source.names() if n.endswith(".safetensors")]
    begun = time.process_time()
    assert len(Place(source, shards[20]).read(source.size(shards[20]) - 5000, 4096)) == 4096
    assert time.process_time() - begun < 0.5  # most of it for the quantiles


def test_published_names(tmp_path):
    """A checkpoint by a published config and index has its names, types and shards."""
    source = generated.published(PUBLISHED, layers=2, vocabulary=100)
    found = open_checkpoint(source)
    assert {t.dtype for t in found.tensors.values()} == {"F16"} and found.config["num_hidden_layers"] == 2
    assert found.tensors[f"{LAYER}.1.mlp.experts.179.up_proj.weight"].shape == (512, 2048)
    assert not any(".layers.2." in name for name in found.tensors)
    weights = values(tensor(source, f"{LAYER}.1.mlp.experts.179.up_proj.weight"))
    assert abs(weights.std() - 2048**-0.5) < 0.0002


def test_speed():
    """At least 400 MB of weights in a CPU second."""
    source, buffer = GeneratedCheckpoint(layers=1, vocabulary=400), memoryview(bytearray(1 << 22))
    (name,) = [n for n in source.names() if n.endswith("1-of-00001.safetensors")]
    took = []
    for _ in range(3):
        begun = time.process_time()
        for piece in range(16):
            assert source.read_into(name, piece << 22, buffer) == 1 << 22
        took.append(time.process_time() - begun)
    assert (16 << 22) / min(took) > 400e6


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 8, 40])
def test_kinds_of_layers(layers):
    """Every fourth is full attention; of fewer than four the last, because transformers runs no model without one."""
    kinds = generated.make_config(layers, 8, 400)["text_config"]["layer_types"]
    full = [n for n, kind in enumerate(kinds) if kind == "full_attention"]
    assert full == (list(range(3, layers, 4)) or ([layers - 1] if layers > 1 else []))


@pytest.mark.parametrize("vocabulary", [320, 4096, 248320])
def test_tokenizer(vocabulary, oracle: Callable[[str], ModuleType]):
    """Every text comes back, every token is within the table, English takes less tokens than letters."""
    Tokenizer = oracle("tokenizers").Tokenizer
    text = byte_pairs.tokenizer(vocabulary)
    plainly = json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
    assert text.decode().replace("[\n    ]", "[]") == plainly
    made = Tokenizer.from_buffer(text)
    assert made.get_vocab_size() == byte_pairs.words(vocabulary) + 3
    if vocabulary == 248320:
        assert 15e6 < len(text) < 25e6  # the published one has 20 MB
    for said in ("The quick brown fox, 42!\n\tdef f(x):", "Größe – 数字 नमस्ते 🙂\0", "<|im_start|>user\nhi<|im_end|>\n"):
        ids = made.encode(said, add_special_tokens=False).ids
        assert made.decode(ids, skip_special_tokens=False) == said and max(ids) < vocabulary
    assert made.token_to_id("<|im_end|>") == byte_pairs.special(vocabulary, "<|im_end|>")
    letters = "memory takes many pages when the expert is large"
    if vocabulary > 320:
        assert len(made.encode(letters).ids) < 0.7 * len(letters)


def test_transformers_takes_the_fp8_form(tmp_path, oracle: Callable[[str], ModuleType]):
    """It decodes it, and the logits are as those of the other form: finite, of deviation one."""
    torch, transformers = oracle("torch"), oracle("transformers")
    torch.set_num_threads(1)
    sizes = ("moe_intermediate_size", "shared_expert_intermediate_size", "linear_key_head_dim", "linear_value_head_dim")
    source = small(form="fp8", changed=SMALL | {"head_dim": 128} | dict.fromkeys(sizes, 128))  # whole blocks
    source.write(tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.arange(64)[None]).logits.float()
    assert torch.isfinite(logits).all() and 0.8 < logits.std() < 1.2
    name = f"{LAYER}.1.mlp.experts.2.down_proj.weight"
    expected = values(tensor(source, name)) * values(tensor(source, f"{name}_scale_inv")).repeat(128, 0).repeat(128, 1)
    found = model.model.layers[1].mlp.experts.down_proj[2].detach().float().numpy()
    assert np.abs(found - expected).max() <= np.abs(expected).max() / 256


@pytest.mark.parametrize("whole", [False, True])
def test_transformers_knows_every_tensor(whole, oracle: Callable[[str], ModuleType]):
    """Names and shapes are those of the model that transformers builds from the config, at true size."""
    torch, transformers = oracle("torch"), oracle("transformers")
    source = GeneratedCheckpoint(layers=4, whole=whole)
    config = transformers.Qwen3_5MoeConfig(**source.config)
    with torch.device("meta"):
        if whole:
            model = transformers.Qwen3_5MoeForConditionalGeneration._from_config(config)
        else:
            model = transformers.Qwen3_5MoeForCausalLM._from_config(config.text_config)
    top = "model." if whole else "model.language_model."
    wanted = {name.replace("model.", top): tuple(p.shape) for name, p in model.named_parameters()}
    found = {p.name: p.shape for f in source.files.values() for p in f.parts if isinstance(p, Tensor)}
    extra = {name: shape for name, shape in found.items() if name.startswith("mtp.")}  # which it leaves out
    assert {name: shape for name, shape in found.items() if name not in extra} == wanted
    assert len(extra) == 19 * whole and extra.get("mtp.fc.weight", (2048, 4096)) == (2048, 4096)


@pytest.mark.parametrize("form", ["fused", "fp8"])
def test_all_that_is_published(tmp_path, form):
    """Vision tower and MTP block are planned as what they are, and converted; their norms are of their kinds."""
    source = small(form=form, layers=2, experts=2, whole=True)
    plan = make_plan(Request(source, encodings.get("int8")))
    fates = Counter(
        (d.tensor.name.split(".")[1 if "visual" in d.tensor.name else 0], d.fate) for d in plan.dispositions
    )
    assert fates["visual", "copied"] == 333 and fates["mtp", "converted"] == (2 if form == "fused" else 12)
    assert [layer.header.prefix for layer in plan.layers][-1] == "mtp.layers.0.mlp.experts" and len(plan.layers) == 3
    prepare(source, tmp_path / "o", encodings.get("int8"), workers=2)
    assert verify(tmp_path / "o", source=source).exit_code == 0
    means = {"model.visual.blocks.0.norm1.weight": 1, "model.visual.merger.norm.bias": 0, "mtp.norm.weight": 0,
             "mtp.pre_fc_norm_hidden.weight": 0}  # fmt: skip
    for name, mean in means.items():
        assert abs(values(tensor(source, name)).mean() - mean) < 0.05, name
    assert abs(values(tensor(source, "model.visual.patch_embed.proj.weight")).std() - 1536**-0.5) < 0.001


def test_routing_reaches_every_expert(tmp_path, oracle: Callable[[str], ModuleType]):
    """Through transformers: logits are finite and tell tokens apart, every layer uses all of its experts."""
    torch, transformers = oracle("torch"), oracle("transformers")
    torch.set_num_threads(1)
    small(layers=4, experts=32).write(tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    used: list[np.ndarray] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(lambda _, given, __: used.append(given[1].numpy()))
    ids = torch.tensor([[(n * n + 7 * n) % 397 for n in range(128)]])
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    assert torch.isfinite(logits).all() and 0.5 < logits.std() < 2 and len(set(logits.argmax(-1).tolist())) > 40
    assert len(used) == 4
    for chosen in used:
        counts = np.bincount(chosen.ravel(), minlength=32)
        assert chosen.shape == (128, 8) and (counts > 0).all() and counts.max() < 128 * 8 // 32 * 4


def test_scripts(tmp_path):
    """The scripts write what the module makes: all of it, or a few experts between holes."""
    scripts = Path(__file__).resolve().parent.parent / "scripts"

    def call(*words: object) -> None:
        subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True)

    options = ["--layers", 1, "--experts", 2, "--vocab", 8, "--form", "per-expert", "--outliers", "--seed", 3]
    call(scripts / "make_true_shape.py", tmp_path / "a", *options)
    asked = GeneratedCheckpoint(layers=1, experts=2, vocabulary=8, form="per-expert", outliers=True, seed=3)
    for name in asked.names():
        assert (tmp_path / "a" / name).read_bytes() == Place(asked, name).read_bytes()
    assert not (tmp_path / "a" / "tokenizer.json").exists()
    assert asked.config["text_config"]["eos_token_id"] == 7  # a row of the table, if a small one
    call(scripts / "make_sparse.py", tmp_path / "b", "--layers", 2, "--vocab", 16, "--fill", "1:7", "0:3")
    whole = generated.published(PUBLISHED, layers=2, vocabulary=16)
    found = Source(tmp_path / "b")
    for layer, expert, filled in ((1, 7, True), (0, 3, True), (1, 3, False), (0, 7, False)):
        name = f"{LAYER}.{layer}.mlp.experts.{expert}.down_proj.weight"
        assert (found.weight(name) == values(tensor(whole, name)) * filled).all()
