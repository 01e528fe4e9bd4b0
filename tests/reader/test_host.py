"""The host: a container's model computes what unmodified transformers computes, to the last bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kits.conversions import prepare
from kits.families import FAMILIES, MODELS, SIZES, build, read_tensors, write_tensors
from kits.inference import TINY, Workshop, calm, equal, logits_of, sequence
from kits.inference import model as any_model

from pagestone.convert.families import registry as families
from pagestone.formats import encodings
from pagestone.formats.dtypes import bf16_to_f32
from pagestone.formats.errors import DataError, RequestError
from pagestone.reader.attention import packed_attention
from pagestone.reader.container import open_container
from pagestone.reader.dense import dense_tensor
from pagestone.reader.hosts import transformers as host
from pagestone.reader.libraries import release_of
from pagestone.reader.model import PRODUCTS, REFERENCE, check_runnable
from pagestone.reader.store import StoreOptions, open_store
from pagestone.reader.text import end_tokens, open_tokenizer

torch: Any


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


CODECS = sorted(encodings.registry())
NEEDED = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")
REFUSED = {"qwen3_vl_moe": "transformers has no language model of its own for it"}
needs_bf16 = pytest.mark.skipif("bf16" not in CODECS, reason="the bf16 codec is not there yet")


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="session")
def plain(libraries: None) -> Any:
    """tiny-moe in unmodified transformers, eager experts."""
    return host.plain_model(TINY)


def model(*where: Any, **how: Any) -> Any:
    """A model with reference experts: what can be equal to transformers."""
    return any_model(*where, **({"experts": REFERENCE} | how))


def attended(model: Any, name: str) -> Any:
    """The same model with another attention function."""
    model.model.set_attn_implementation(name)
    model.attention = name
    return model


# -- equality with transformers ---------------------------------------------------------------------------------------


def without_dtype(root: Path) -> Path:
    """The same directory with a config.json that names no type for the language model."""
    config = json.loads((root / "config.json").read_text())
    for table in (config, config["text_config"]):
        for key in ("dtype", "torch_dtype"):
            table.pop(key, None)
    (root / "config.json").write_text(json.dumps(config))
    return root


@needs_bf16
def test_a_config_without_a_type(tmp_path: Path) -> None:
    """The type is that of the first float among the weights, as from_pretrained(dtype="auto") has it."""
    source = without_dtype(Path(shutil.copytree(TINY, tmp_path / "s")))
    reference = host.plain_model(source)
    assert reference.dtype == torch.bfloat16
    prepare(source, tmp_path / "bf16", encodings.get("bf16"), workers=2)
    loaded = model(tmp_path / "bf16")
    assert loaded.dtype == torch.bfloat16
    assert equal(logits_of(reference, sequence(9), 2), logits_of(loaded, sequence(9), 2))
    prepare(source, tmp_path / "int8", encodings.get("int8"), workers=2)
    native = any_model(tmp_path / "int8")  # which multiplies in no float32
    assert native.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ({"b": "BF16", "a": "F32"}, "float32"),
        ({"b": "F32", "a": "F16"}, "float16"),
        ({"a": "I64", "b": "F8_E4M3", "c": "BF16", "d": "F32"}, "bfloat16"),
        ({"a": "U8"}, "float64"),
        ({}, "float64"),
    ],
)
def test_the_first_float_decides(monkeypatch: pytest.MonkeyPatch, dtypes: dict[str, str], wanted: str) -> None:
    """In order of names within the first file, as the library reads them; codes decide nothing."""
    entries = {n: ("dense-00001-of-00002.safetensors", SimpleNamespace(dtype=d)) for n, d in dtypes.items()}
    later = {"_": ("dense-00002-of-00002.safetensors", SimpleNamespace(dtype="F64"))}
    monkeypatch.setattr(host, "dense_entries", lambda _: later | entries)
    container: Any = None
    assert host.dtype_of_weights(container) == wanted
    monkeypatch.setattr(host, "dense_entries", lambda _: {})
    assert host.dtype_of_weights(container) == "float32"


@needs_bf16
@pytest.mark.parametrize("attention", [host.PACKED, "sdpa", "eager"])
def test_bf16_is_unmodified_transformers(workshop: Workshop, plain: Any, attention: str) -> None:
    """Prefill (every position) and decode, with our attention and with transformers' own two; direct, small budget."""
    reference = attended(plain, attention)
    streamed = model(workshop.container("bf16"), budget=7 * 200_704, attention=attention)
    for length in (1, 2, 63, 64, 65, 130) if attention == host.PACKED else (1, 65):
        ids = sequence(length)
        assert equal(logits_of(reference, ids, 6), logits_of(streamed, ids, 6)), length
    streamed.close()
    attended(plain, host.PACKED)


@needs_bf16
def test_greedy_text_is_what_generate_gives(workshop: Workshop, plain: Any) -> None:
    """transformers' own `generate` chooses the same tokens as feeding one at a time does here."""
    streamed = model(workshop.container("bf16"), budget=9 * 200_704)
    tokens = open_tokenizer(TINY)
    ids = tokens.chat([{"role": "user", "content": "What is the capital of France?"}])
    found = plain.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, eos_token_id=[1021, 1023])
    said, state, pending = [], None, ids
    while not said or (said[-1] not in end_tokens(TINY) and len(said) < 20):
        logits, state = streamed.forward(pending, state)
        said.append(int(logits[-1].argmax()))
        pending = said[-1:]
    assert found[0, len(ids) :].tolist() == said
    streamed.close()


@needs_bf16
@pytest.mark.parametrize("io", ["mmap", "resident"])
def test_bf16_in_every_mode(workshop: Workshop, plain: Any, io: str) -> None:
    """Mapped and resident give the same bits."""
    streamed = model(workshop.container("bf16"), io)
    assert equal(logits_of(plain, sequence(40), 4), logits_of(streamed, sequence(40), 4))
    streamed.close()


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_transformers_with_its_values(workshop: Workshop, plain: Any, codec: str) -> None:
    """The anchor that is not ours: transformers' own experts, given the codec's decoded values as weights."""
    container = open_container(workshop.container(codec))
    kept = {}
    for number, layer in container.layers.items():
        theirs = plain.model.model.layers[number].mlp.experts
        kept[number] = (theirs.gate_up_proj, theirs.down_proj)
        gate_up, down = torch.empty_like(theirs.gate_up_proj), torch.empty_like(theirs.down_proj)
        for expert in layer:
            both = torch.cat([torch.from_numpy(m.decode()) for m in (expert.gate, expert.up)])
            gate_up[expert.number] = both.to(torch.bfloat16)
            down[expert.number] = torch.from_numpy(expert.down.decode()).to(torch.bfloat16)
        theirs.gate_up_proj, theirs.down_proj = (torch.nn.Parameter(t, False) for t in (gate_up, down))
    streamed = model(container, budget=3 * container.layers[0].stride)
    try:
        assert equal(logits_of(plain, sequence(50), 4), logits_of(streamed, sequence(50), 4))
    finally:
        for number, weights in kept.items():
            theirs = plain.model.model.layers[number].mlp.experts
            theirs.gate_up_proj, theirs.down_proj = weights
        streamed.close()


@pytest.fixture(scope="session")
def built(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of other families, built and saved by transformers, each once."""
    root, made = tmp_path_factory.mktemp("families"), {}

    def one(name: str, size: str = "wide", **extra: Any) -> Path:
        key = name + size + json.dumps(extra, sort_keys=True)
        if key not in made:
            wanted = MODELS[name]
            if name == "olmoe":  # its attention takes hidden / heads, whatever head_dim says
                extra = {"head_dim": 32} | extra
            wanted = dataclasses.replace(wanted, extra=dict(wanted.extra) | extra)
            made[key] = root / str(len(made))
            build(wanted, SIZES[size], made[key])
        return made[key]

    return one


def tables_of(model: Any) -> dict[str, Any]:
    """What is read by rows, whole, under the names of its weights."""
    from pagestone.reader.linears import RowEmbedding

    return {
        f"{name}.weight": module(torch.arange(module.num_embeddings))
        for name, module in model.named_modules()
        if isinstance(module, RowEmbedding)
    }


def known(name: str) -> Any:
    """A parameter, skipped where the family is not there."""
    there = name in families()
    return pytest.param(name, marks=[] if there else pytest.mark.skip(reason=f"no family {name} in convert/families"))


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Every tensor but the experts', stored or computed, has the type and the bits it has in transformers."""
    for kind in ("state_dict", "named_buffers"):
        mine, wanted = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        if kind == "state_dict":
            mine |= tables_of(ours)
        assert mine.keys() == {n for n in wanted if ".experts." not in n}
        for name, tensor in mine.items():
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), (kind, name)


@needs_bf16
@pytest.mark.parametrize("name", [known(n) for n in FAMILIES if n not in REFUSED])
def test_families(workshop: Workshop, built: Any, name: str) -> None:
    """One path for all: the bf16 container is the unmodified model, streamed through a budget of one expert."""
    source = built(name)
    container = open_container(workshop.container("bf16", source))
    reference = host.plain_model(source)
    streamed = model(container, budget=max(x.stride for x in container.layers.values()))
    ids = sequence(21, 40)
    assert equal(logits_of(reference, ids, 4), logits_of(streamed, ids, 4))
    assert streamed.context.store.counters[max(container.layers)].bytes_read
    assert streamed.attention == ("eager" if name == "gpt_oss" else host.PACKED), "gpt_oss has sinks, which sdpa lacks"
    assert_same_state(streamed.model, reference.model)
    streamed.close()


@pytest.mark.parametrize("experts", PRODUCTS)
@pytest.mark.parametrize("name", [known(n) for n in NEEDED if n in FAMILIES])
def test_families_in_other_codecs(workshop: Workshop, built: Any, name: str, experts: str) -> None:
    """Streamed and resident agree bit for bit for every codec that holds these shapes."""
    for codec in CODECS:
        container = open_container(workshop.container(codec, built(name)))
        resident = model(container, "resident", experts=experts)
        budget = 3 * max(x.stride for x in container.layers.values())
        streamed = model(container, budget=budget, threads=1, experts=experts)
        ids = sequence(9, 40)
        assert equal(logits_of(resident, ids, 3), logits_of(streamed, ids, 3)), codec
        streamed.close()


def test_a_model_of_another_kind_is_refused(workshop: Workshop, built: Any) -> None:
    """E1225 for an architecture without a language model of its own."""
    for name in REFUSED:
        if name in families():
            with pytest.raises(RequestError, match="E1225"):
                model(workshop.container("int8", built(name)))


# -- dense tensors ----------------------------------------------------------------------------------------------------


def test_mapped_tensors_are_views_of_the_file(workshop: Workshop) -> None:
    """Every dense parameter of the mmap mode lies inside a map of a dense file; none of them was copied."""
    loaded = model(workshop.container("int8"), "mmap")
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "dense-" in line:
            begin, _, end = line.split()[0].partition("-")
            spans.append((int(begin, 16), int(end, 16)))
    for name, tensor in loaded.model.named_parameters():
        assert any(a <= tensor.data_ptr() < b for a, b in spans), name
    assert loaded.casts == []
    loaded.close()


def test_nothing_is_left_on_meta_and_only_experts_are_replaced(workshop: Workshop, plain: Any) -> None:
    """Parameters but the experts', and buffers, are those of transformers, by name and by bits."""
    loaded = model(workshop.container("int8"))
    ours, theirs = dict(loaded.model.named_parameters()), dict(plain.model.named_parameters())
    tables = tables_of(loaded.model)
    assert tables.keys() == {"model.embed_tokens.weight"} and not tables.keys() & ours.keys()
    ours |= tables
    experts = {n for n in theirs if ".mlp.experts." in n}
    assert ours.keys() == theirs.keys() - experts and len(experts) == 8
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    buffers = dict(plain.model.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in loaded.model.named_buffers())
    assert dict(loaded.model.named_buffers()).keys() == buffers.keys()
    assert all(n.startswith(("model.visual", "mtp.")) for n in loaded.ignored) and loaded.ignored
    loaded.close()


@needs_bf16
def test_casts_are_transformers_and_are_listed(tmp_path: Path) -> None:
    """A_log and the gated norm in F32, as Qwen3.5 stores them: run in bf16, as transformers does, and named."""
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    for file in source.glob("*.safetensors"):
        tensors = read_tensors(source, file.name)
        for name, (dtype, shape, data) in tensors.items():
            if name.endswith((".A_log", "linear_attn.norm.weight")):
                assert dtype == "BF16"
                import numpy as np

                values = bf16_to_f32(np.frombuffer(data, "<u2")) * np.float32(1 + 2**-12)  # no bf16 value
                tensors[name] = ("F32", shape, values.tobytes())
        write_tensors(file, tensors)
    prepare(source, tmp_path / "out", encodings.get("bf16"), workers=1)
    loaded = model(tmp_path / "out")
    assert len(loaded.casts) == 6 and {(c.stored, c.used) for c in loaded.casts} == {("F32", "bfloat16")}
    assert equal(logits_of(host.plain_model(source), sequence(30), 3), logits_of(loaded, sequence(30), 3))
    loaded.close()


@needs_bf16
def test_what_transformers_keeps_in_float32_stays(workshop: Workshop, built: Any) -> None:
    """deepseek_v3's correction bias is F32 beside BF16 weights and runs so; its router is widened, and listed."""
    if "deepseek_v3" not in families():
        pytest.skip("no family deepseek_v3")
    loaded = model(workshop.container("bf16", built("deepseek_v3")))
    bias = loaded.model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and bool((bias != bias.to(torch.bfloat16).float()).any())
    assert all(c.used == "float32" for c in loaded.casts)
    loaded.close()


@needs_bf16
def test_what_a_class_makes_in_float32_stays(workshop: Workshop, built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router and a correction bias that are float32 by their class alone, in no list of names: as transformers.

    Since 5.24 the class makes them so; before, it was the list alone, and without it they are like the rest.
    """
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

    if "deepseek_v3" not in families():
        pytest.skip("no family deepseek_v3")
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keep_in_fp32_modules_strict", None)
    source = built("deepseek_v3")
    loaded, reference = model(workshop.container("bf16", source)), host.plain_model(source)
    gate = loaded.model.model.layers[1].mlp.gate
    made = torch.float32 if release_of("transformers") >= (5, 24) else torch.bfloat16
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == made
    assert_same_state(loaded.model, reference.model)
    assert equal(logits_of(reference, sequence(9, 40), 2), logits_of(loaded, sequence(9, 40), 2))
    loaded.close()


@needs_bf16
def test_what_a_model_lists_for_float32_is_widened(
    workshop: Workshop, built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in the model's list run in float32 whatever their class made them; stars in them stand for anything."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

    if "deepseek_v3" not in families():
        pytest.skip("no family deepseek_v3")
    names = ["layers.*.input_layernorm", "embed_tokens"]
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keep_in_fp32_modules_strict", names)
    source = built("deepseek_v3")
    loaded, reference = model(workshop.container("bf16", source)), host.plain_model(source)
    assert_same_state(loaded.model, reference.model)
    wide = {n for n, t in (loaded.model.state_dict() | tables_of(loaded.model)).items() if t.dtype == torch.float32}
    assert {"model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"} <= wide
    assert "model.norm.weight" not in wide and "model.layers.1.post_attention_layernorm.weight" not in wide
    assert {c.name for c in loaded.casts} >= {"model.embed_tokens.weight"}
    loaded.close()


def test_buffers_beside_stored_tensors_are_not_made_again() -> None:
    """E1225: building such a module anew would give it random weights in place of the stored ones."""

    class Odd(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.ones(3), persistent=False)

    class Even(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            self.register_buffer("table", torch.ones(3), persistent=False)

    whole = torch.nn.Module()
    with torch.device("meta"):
        whole.odd, whole.even = Odd(None), Even(None)
    whole.odd.weight = torch.nn.Parameter(torch.full((3,), 7.0))
    with pytest.raises(RequestError, match=r"odd: the buffer table of Odd .*weight beside it is stored.*E1225"):
        host._rebuild_buffers(whole, torch.bfloat16)
    del whole.odd
    host._rebuild_buffers(whole, torch.bfloat16)
    assert whole.even.table.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32


def fp8_checkpoint(source: Path, root: Path) -> Path:
    """A qwen3_moe checkpoint as FP8 releases are: experts and attention in blocks of 128 x 128 with BF16 scales."""
    shutil.copytree(source, root)
    tensors = read_tensors(root)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        _, shape, data = tensors[name]
        weight = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(shape).float()
        grid = torch.empty(-(-shape[0] // 128), -(-shape[1] // 128), dtype=torch.bfloat16)
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                grid[i, j] = weight[block].abs().max() / 448
                codes[block] = (weight[block] / grid[i, j].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name] = ("F8_E4M3", shape, codes.view(torch.uint8).numpy().tobytes())
        tensors[name + "_scale_inv"] = ("BF16", tuple(grid.shape), grid.view(torch.int16).numpy().tobytes())
    write_tensors(root / "model.safetensors", tensors)
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize("codec", [c for c in ("fp8", "bf16") if c in CODECS])
def test_a_quantised_source(built: Any, tmp_path: Path, codec: str) -> None:
    """Dense FP8 matrices that an `fp8` container keeps run as transformers runs them on a CPU: decoded once, listed."""
    square = {"mlp_only_layers": [], "head_dim": 32, "num_key_value_heads": 4}  # whole blocks: transformers guesses
    source = fp8_checkpoint(built("qwen3_moe", size="square", **square), tmp_path / "source")
    prepare(source, tmp_path / "out", encodings.get(codec), workers=1)
    for io in ("direct", "mmap"):
        loaded = model(tmp_path / "out", io)
        kept = [c for c in loaded.casts if c.stored == "F8_E4M3"]
        assert len(kept) == (8 if codec == "fp8" else 0) and loaded.ignored == []
        reference = host.plain_model(source)
        assert equal(logits_of(reference, sequence(20, 40), 3), logits_of(loaded, sequence(20, 40), 3))
        loaded.close()


def test_tensors_at_odd_addresses() -> None:
    """An F32 tensor at an odd offset is legal in a file; it is copied rather than read at that address."""
    import numpy as np

    from pagestone.formats.safetensors_header import TensorEntry

    room = np.zeros(64, np.uint8)
    values = np.arange(6, dtype="<f4")
    start = (1 - room.ctypes.data) % 4
    array = room[start : start + 24]
    array[:] = values.view(np.uint8)
    assert array.ctypes.data % 4 == 1
    found = dense_tensor(array, TensorEntry("x", "F32", (2, 3), 0, 24))
    assert found.data_ptr() % 4 == 0 and found.flatten().tolist() == values.tolist()


@needs_bf16
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "other"])
def test_tied_heads(built: Any, tmp_path: Path, tied: bool, head: str) -> None:
    """tie_word_embeddings true or false, lm_head absent, equal to the embedding, or another: as transformers does."""
    source = tmp_path / "source"
    shutil.copytree(built("qwen3_moe"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    tensors = read_tensors(source)
    if head == "absent":
        tensors.pop("lm_head.weight")
    elif head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_tensors(source / "model.safetensors", tensors)
    prepare(source, tmp_path / "out", encodings.get("bf16"), workers=1)
    if head == "absent" and not tied:
        with pytest.raises(DataError, match=r"lm_head\.weight.*E1224"):
            model(tmp_path / "out")
        return
    reference = logits_of(host.plain_model(source), sequence(9, 40), 2)
    for io in ("direct", "mmap"):
        loaded = model(tmp_path / "out", io)
        assert bool(loaded.tables) == (io == "direct" and head != "absent"), "a table that the head is, too, is whole"
        if not loaded.tables:
            same = loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
            assert same == (tied and head != "other")
        assert equal(reference, logits_of(loaded, sequence(9, 40), 2)), io
        loaded.close()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_partial_containers_are_refused(tmp_path: Path) -> None:
    """E1222 names the layers that are there."""
    prepare(TINY, tmp_path / "out", encodings.get("int8"), workers=1, layers=(1, 3))
    with pytest.raises(RequestError, match=r"layers 1 to 2 .*E1222"):
        model(tmp_path / "out")


def test_unequal_expert_counts_are_refused(workshop: Workshop) -> None:
    """E1223 names the layers; also where all are equal, but not what config.json says."""
    container = open_container(workshop.container("int8"))
    layer = container.layers[2]
    layer.entry = dataclasses.replace(layer.entry, experts=15)
    with pytest.raises(RequestError, match=r"16 in layer 0 and 15 in layer 2.*E1223"):
        check_runnable(container)


def test_a_config_of_another_model_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    """E1223 for other expert counts, E1225 for a model type transformers does not know."""
    root = workshop.copy("int8", tmp_path / "container")
    config = json.loads((root / "config.json").read_text())
    container = open_container(root)
    store, _ = open_store(container, StoreOptions("mmap"))
    with pytest.raises(RequestError, match=r"native, reference, found 'torch'.*E1244"):
        host.load(container, store, experts="torch")
    config["text_config"]["num_experts"] = 8
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"layer 0: 8 experts .* found 16 .*E1223"):
        host.load(container, store)
    (root / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(RequestError, match="E1225"):
        host.load(container, store)


def test_base_commands_import_neither_torch_nor_transformers(workshop: Workshop) -> None:
    """Nor does the command line itself, with `run` and `chat` in it."""
    code = (
        "import sys; from typer.testing import CliRunner; from pagestone.cli import app; r = CliRunner();"
        f"w = [['--help'], ['run', '--help'], ['inspect', {str(workshop.container('int8'))!r}],"
        f" ['verify', {str(workshop.container('int8'))!r}]];"
        "assert all(r.invoke(app, x).exit_code == 0 for x in w);"
        "import pagestone.reader.hosts.transformers, pagestone.reader.session;"
        "import pagestone.validate.logits, pagestone.validate.fidelity;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- attention --------------------------------------------------------------------------------------------------------


def test_packed_attention_is_attention() -> None:
    """For one token and grouped heads, with and without a mask: torch's own result up to rounding."""
    generator = torch.Generator().manual_seed(3)
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    module.is_causal = True
    for length in (1, 2, 33):
        query = torch.randn(1, 8, 1, 16, generator=generator)
        key, value = (torch.randn(1, 2, length, 16, generator=generator) for _ in range(2))
        for mask in (None, torch.rand(1, 1, 1, length, generator=generator) < 0.8):
            if mask is not None:
                mask[..., 0] = True
            found, _ = packed_attention(module, query, key, value, mask, scaling=0.25)
            wide = (t.repeat_interleave(4, dim=1) for t in (key, value))
            want = torch.nn.functional.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=0.25)
            assert found.shape == (1, 1, 8, 16)
            assert torch.allclose(found, want.transpose(1, 2), atol=1e-6)
