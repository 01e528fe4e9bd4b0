"""Dense matrices in an encoding, and embeddings by rows, in a model: what torch computes of the decoded weights, or
what the codec's product gives, to the last bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.families import LONG, MODELS, SIZES, build, read_tensors, write_tensors
from kits.inference import TINY, Workshop, calm, equal, logits_of, sequence
from kits.inference import model as any_model

from pagestone.formats import encodings
from pagestone.formats.dense_matrices import ENCODED
from pagestone.formats.dtypes import VIEWS
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.reader.container import Container, Matrix, View, open_container
from pagestone.reader.dense import load_dense
from pagestone.reader.dense_costs import dense_costs
from pagestone.reader.hosts import transformers as host
from pagestone.reader.model import NATIVE, REFERENCE, Context

torch: Any
DENSE = [word for word in ENCODED if word != "q8" or "q8" in encodings.registry()]
OTHERS = ("qwen3_5_moe", "deepseek_v3", "gpt_oss")
"""Families that stand for the others: linear attention, shared experts; latent attention, dense layers; biases."""
WITHOUT_MODEL = "qwen3_vl_moe"


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("linears"))


def context(linears: str, threads: int = 1) -> Context:
    made = Context(None, NATIVE, linears=linears)  # type: ignore[arg-type]
    made.threads = threads
    return made


def encoded(word: str, rows: int, columns: int, seed: int = 3) -> Matrix:
    """A random matrix in an encoding, as it would lie in memory."""
    codec = encodings.get(word)
    weight = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32) / 8
    out = codec.allocate(rows, columns)
    codec.encode(weight, "F32", out)
    views = {r.name: View(out[r.name], r.dtype) for r in codec.roles(rows, columns)}
    return Matrix(codec, rows, columns, views)


def random(*shape: int, dtype: Any, seed: int = 5) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("word", DENSE)
def test_linear(word: str, half: bool, bias: bool) -> None:
    """Native is the codec's product, rounded once with the bias in it; reference is torch over the decoded weights.

    For any shape before the columns, for rows that are not contiguous, with any number of threads.
    """
    from pagestone.reader.linears import EncodedLinear

    dtype = torch.float16 if half else torch.bfloat16
    matrix = encoded(word, 200, 256)
    added = torch.nn.Parameter(random(200, dtype=dtype), False) if bias else None
    wide = random(3, 5, 512, dtype=dtype)
    for x in (wide[..., :256], wide[0, 0, :256], wide[:1, :1, 256:], wide[:0, :, :256], wide[..., ::2]):
        rows = x.reshape(-1, 256).contiguous()
        bits = rows.numpy() if half else rows.view(torch.int16).numpy().view(np.uint16)
        product = matrix.codec.matmul({r: v.array for r, v in matrix.stored.items()}, bits, 200, 256)
        want = torch.from_numpy(product)
        want = (want if added is None else want + added.float()).to(dtype).view(*x.shape[:-1], 200)
        for threads in (1, 3):
            found = EncodedLinear("x", matrix, added, context(NATIVE, threads))(x)
            assert found.dtype == dtype and torch.equal(found, want)
        weight = torch.from_numpy(matrix.decode()).to(dtype)
        slow = EncodedLinear("x", matrix, added, context(REFERENCE))(x)
        assert torch.equal(slow, torch.nn.functional.linear(x, weight, added))


def test_native_bias_is_added_before_rounding() -> None:
    """Not to a product that was rounded already: the two differ for some rows."""
    from pagestone.reader.linears import EncodedLinear

    matrix, x = encoded("int8", 256, 256), random(8, 256, dtype=torch.bfloat16)
    bias = torch.nn.Parameter(random(256, dtype=torch.bfloat16), False)
    twice = EncodedLinear("x", matrix, None, context(NATIVE))(x) + bias
    assert not torch.equal(twice, EncodedLinear("x", matrix, bias, context(NATIVE))(x))


def test_activations_that_are_not_finite() -> None:
    """Native names the module and the token (E1232); reference gives what torch gives."""
    from pagestone.reader.linears import EncodedLinear

    matrix, x = encoded("int8", 128, 64), random(2, 3, 64, dtype=torch.bfloat16)
    x[1, 2, 7] = float("inf")
    with pytest.raises(DataError, match=r"layers\.0\.q: .*Inf in token 5 .*E1232") as caught:
        EncodedLinear("layers.0.q", matrix, None, context(NATIVE))(x)
    assert caught.value.tensor == "layers.0.q"
    assert not bool(EncodedLinear("layers.0.q", matrix, None, context(REFERENCE))(x)[1, 2].isfinite().all())


def test_types_that_native_products_do_not_multiply() -> None:
    """E1229, as for experts; reference products take any."""
    from pagestone.reader.linears import EncodedLinear

    matrix, x = encoded("int8", 128, 64), random(2, 64, dtype=torch.float32)
    with pytest.raises(RequestError, match="E1229"):
        EncodedLinear("x", matrix, None, context(NATIVE))(x)
    slow = EncodedLinear("x", matrix, None, context(REFERENCE))(x)
    assert torch.equal(slow, torch.nn.functional.linear(x, torch.from_numpy(matrix.decode())))


class Table:
    """A `RowTable` in memory."""

    def __init__(self, values: np.ndarray, dtype: str) -> None:
        from pagestone.reader.rows import RowCounters

        self.entry = TensorEntry("t", dtype, values.shape, 0, values.nbytes)
        self.counters, self._values = RowCounters(), values

    def read(self, ids: np.ndarray) -> np.ndarray:
        assert ids.dtype == np.int64 and ids.ndim == 1
        return np.ascontiguousarray(self._values[ids]).view(np.uint8).reshape(len(ids), self._values[0].nbytes)

    def close(self) -> None: ...


@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
def test_embedding_by_rows(stored: str) -> None:
    """torch's own embedding of the table in the model's type, whatever type it is stored in, of any shape of ids."""
    from pagestone.reader.linears import RowEmbedding

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    values = random(50, 24, dtype=kinds[stored])
    bits = values.view(torch.int16).numpy().view(np.uint16) if stored == "BF16" else values.numpy()
    for dtype in (torch.bfloat16, torch.float32):
        plain = torch.nn.Embedding(50, 24, padding_idx=0, _weight=values.to(dtype))
        ours = RowEmbedding("embed", Table(bits.astype(VIEWS[stored]), stored), dtype, "cpu")
        for ids in (torch.tensor([[3, 0, 49], [3, 3, 1]]), torch.tensor([7]), torch.empty(1, 0, dtype=torch.int64),
                    torch.tensor([[4]], dtype=torch.int32)):  # fmt: skip
            found = ours(ids)
            assert found.dtype == dtype and torch.equal(found, plain(ids.long()))


def test_there_is_no_weight() -> None:
    """E1257 for whoever reads one, also by `getattr` with a default and `hasattr`: never something else silently."""
    from pagestone.reader.linears import EncodedLinear, RowEmbedding

    modules = (
        EncodedLinear("model.x", encoded("int8", 128, 64), None, context(NATIVE)),
        RowEmbedding("model.x", Table(np.zeros((4, 4), np.uint16), "BF16"), torch.bfloat16, "cpu"),
    )
    for module in modules:
        for read in (lambda m: m.weight, lambda m: getattr(m, "weight", None), lambda m: hasattr(m, "weight")):
            with pytest.raises(RequestError, match=r"model\.x: .*E1257") as caught:
                read(module)
            assert caught.value.tensor == "model.x"
        assert dict(module.state_dict()) == {} and "weight" not in dict(module.named_parameters())
    assert modules[0].in_features == 64 and modules[0].out_features == 128


# -- models -----------------------------------------------------------------------------------------------------------


def decoded_into(plain: Any, container: Container) -> Any:
    """The same model of transformers with the values of a container's encoded dense matrices as weights."""
    from pagestone.reader import transformers_inside as inside

    listed = container.manifest.dense
    assert listed is not None
    names = [m.name for m in listed.matrices]
    dense = load_dense(container, [], "direct", matrices=names)
    ours = inside.renamed(plain.model, [f"{n}.weight" for n in names])
    for name in names:
        module = plain.model.get_submodule(ours[f"{name}.weight"].removesuffix(".weight"))
        assert type(module) is torch.nn.Linear
        value = torch.from_numpy(dense.matrices[name].decode()).to(module.weight.dtype)
        assert value.shape == module.weight.shape and not torch.equal(value, module.weight)
        module.weight = torch.nn.Parameter(value, False)
    return plain


def linears_of(model: Any) -> dict[str, Any]:
    from pagestone.reader.linears import EncodedLinear

    return {n: m for n, m in model.model.named_modules() if isinstance(m, EncodedLinear)}


@pytest.mark.parametrize("word", DENSE)
def test_reference_is_transformers_with_the_decoded_weights(workshop: Workshop, word: str) -> None:
    """The anchor that is not ours, in every mode: bf16 experts are the model's own, dense ones the codec's values."""
    container = open_container(workshop.container("bf16", dense=word))
    plain = decoded_into(host.plain_model(TINY), container)
    wanted = logits_of(plain, sequence(40), 4)
    for io in ("direct", "mmap", "resident"):
        loaded = any_model(container, io, experts=REFERENCE)
        assert len(linears_of(loaded)) == len(container.manifest.dense.matrices) == 26  # type: ignore[union-attr]
        assert equal(wanted, logits_of(loaded, sequence(40), 4)), io
        loaded.close()


@pytest.mark.parametrize("word", DENSE)
def test_native_is_the_codecs_product(workshop: Workshop, word: str) -> None:
    """Every call of every encoded module in a forward pass; streamed, mapped and resident logits are equal."""
    container = open_container(workshop.container("q4", dense=word))
    first = None
    for io in ("direct", "mmap", "resident"):
        loaded = any_model(container, io)
        seen = []

        def check(module: Any, args: Any, out: Any, seen: list[str] = seen) -> None:
            matrix, rows = module.matrix, args[0].reshape(-1, module.in_features).contiguous()
            bits = rows.view(torch.int16).numpy().view(np.uint16)
            stored = {r: v.array for r, v in matrix.stored.items()}
            want = torch.from_numpy(matrix.codec.matmul(stored, bits, matrix.rows, matrix.columns)).to(rows.dtype)
            assert torch.equal(out, want.view(out.shape)), module.name
            seen.append(module.name)

        for module in linears_of(loaded).values():
            module.register_forward_hook(check)
        found = logits_of(loaded, sequence(30), 2)
        assert len(seen) == 3 * 26
        assert first is None or equal(first, found), io
        first = found
        loaded.close()


def test_automatic_products(workshop: Workshop) -> None:
    """`auto` multiplies dense matrices from their codes also beside bf16 experts, which are torch's; a word given
    holds for both."""
    from pagestone.reader.session import Session, SessionOptions

    path = workshop.container("bf16", dense="int8")
    for asked, experts, linears in (("auto", REFERENCE, NATIVE), (REFERENCE,) * 3, (NATIVE,) * 3):
        notes: list[str] = []
        with Session(path, SessionOptions(experts=asked), notes.append) as session:
            context = session.model.context
            assert f"; dense matrices in int8, {linears} products" in notes[0], notes
            assert (context.experts, context.linears) == (experts, linears)
            assert session.model.surroundings()["model"]["linears"] == linears
    with Session(workshop.container("bf16")) as session:
        assert "linears" not in session.model.surroundings()["model"]
    with pytest.raises(RequestError, match="E1244"):
        any_model(path, linears="torch")


def test_logits_of_the_last_token_alone(workshop: Workshop) -> None:
    """An encoded head is given the last token only; its logits are those of all tokens' last row."""
    loaded = any_model(workshop.container("int8", dense="q4"))
    every, _ = loaded.forward(sequence(20), every=True)
    rows = []
    linears_of(loaded)["lm_head"].register_forward_hook(lambda m, args, out: rows.append(args[0].shape[1]))
    last, _ = loaded.forward(sequence(20))
    assert rows == [1] and torch.equal(last, every[-1:])
    loaded.close()


def test_costs_are_those_of_the_loaded_model(workshop: Workshop) -> None:
    """What the host says its model uses, priced, is what its tensors and records take."""
    for dense in ("keep", "int8"):
        container = open_container(workshop.container("int8", dense=dense))
        use = host.dense_use(container)
        costs, loaded = dense_costs(container, use), any_model(container)
        kept = [t for t in loaded.model.state_dict().values() if t.numel()]
        assert costs.tensor_bytes == sum(-(-t.nbytes // 64) * 64 for t in kept)
        records = [m.matrix for m in linears_of(loaded).values()]
        sizes = [sum(v.nbytes for v in m.stored.values()) for m in records]
        assert sum(sizes) <= costs.matrix_bytes < sum(sizes) + 4160 * len(sizes) + 1
        assert use.tables == {t.entry.name for t in loaded.tables} and use.made == {}
        loaded.close()


# -- tied heads, other families ---------------------------------------------------------------------------------------


def larger(name: str, **extra: Any) -> Any:
    """A family's model whose dense matrices are large enough to be encoded."""
    grown: dict[str, Any] = {"vocab_size": 256, "intermediate_size": 160}
    if "kv_lora_rank" not in MODELS[name].extra:
        grown |= {"head_dim": 32, "num_key_value_heads": 4}
    if "layer_types" in MODELS[name].extra:
        grown |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    if MODELS[name].size_field == "intermediate_size":
        del grown["intermediate_size"]
    return dataclasses.replace(MODELS[name], extra=dict(MODELS[name].extra) | grown | extra)


@pytest.fixture(scope="session")
def built(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of families with dense matrices of some size, each built once."""
    root, made = tmp_path_factory.mktemp("families"), {}

    def one(name: str, **extra: Any) -> Path:
        key = f"{name} {extra}"
        if key not in made:
            made[key] = root / str(len(made))
            build(larger(name, **extra), SIZES["wide"], made[key])
        return made[key]

    return one


LEAST = {"deepseek_v2": 8, "deepseek_v3": 10}


@pytest.mark.parametrize("name", [n for n in MODELS if n != WITHOUT_MODEL and (LONG or n in OTHERS)])
def test_families(workshop: Workshop, built: Any, name: str) -> None:
    """Dense matrices in int8: reference products are transformers' with the decoded weights; native ones give the same
    logits streamed and resident; every module that the manifest lists is ours, and no other."""
    source = built(name)
    container = open_container(workshop.container("bf16", source, "int8"))
    listed = container.manifest.dense
    assert listed is not None and len(listed.matrices) >= LEAST.get(name, 9), [m.name for m in listed.matrices]
    plain = decoded_into(host.plain_model(source), container)
    ids = sequence(21, 200)
    loaded = any_model(container, experts=REFERENCE)
    assert equal(logits_of(plain, ids, 3), logits_of(loaded, ids, 3))
    assert len(linears_of(loaded)) == len(listed.matrices)
    loaded.close()
    streamed, resident = (any_model(container, io) for io in ("direct", "resident"))
    assert equal(logits_of(resident, ids, 3), logits_of(streamed, ids, 3))
    assert dense_costs(container, host.dense_use(container)).tensor_bytes == sum(
        -(-t.nbytes // 64) * 64 for t in streamed.model.state_dict().values() if t.numel()
    )
    streamed.close()
    resident.close()


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_a_tied_head_that_is_encoded(workshop: Workshop, built: Any, io: str) -> None:
    """The head is the codec's, the embedding the table's own, and nothing ties the two any more."""
    source = built("qwen3_moe", tie_word_embeddings=True)
    container = open_container(workshop.container("bf16", source, "int8"))
    names = [m.name for m in container.manifest.dense.matrices]  # type: ignore[union-attr]
    assert "lm_head" in names
    plain = host.plain_model(source)
    table = plain.model.model.embed_tokens.weight
    assert plain.model.lm_head.weight is table
    plain.model.lm_head.weight = torch.nn.Parameter(table.detach().clone(), False)
    decoded_into(plain, container)
    loaded = any_model(container, io, experts=REFERENCE)
    assert bool(loaded.tables) == (io == "direct")
    assert equal(logits_of(plain, sequence(20, 200), 3), logits_of(loaded, sequence(20, 200), 3))
    loaded.close()


def test_a_tied_head_that_is_kept_needs_the_table(workshop: Workshop, built: Any) -> None:
    """It is loaded whole, once for both; also where the caller brings it by rows."""
    source = built("qwen3_moe", tie_word_embeddings=True)
    container = open_container(workshop.container("bf16", source))
    wanted = logits_of(host.plain_model(source), sequence(20, 200), 2)
    name = "model.embed_tokens.weight"
    names = host.dense_use(container).names
    given = load_dense(container, names, "direct", tables=[name])
    assert [*given.tables] == [name]
    for dense in (None, given):
        loaded = any_model(container, experts=REFERENCE, dense=dense)
        head, embedding = loaded.model.lm_head, loaded.model.model.embed_tokens
        assert head.weight.data_ptr() == embedding.weight.data_ptr()
        assert equal(wanted, logits_of(loaded, sequence(20, 200), 2))
        loaded.close()


def test_a_matrix_that_is_there_twice(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """E1207: an encoded one beside a plain one of the same name, of which either could be meant."""
    container = open_container(workshop.container("int8", dense="int8"))
    real = host.dense_entries

    def more(container: Container) -> Any:
        found = dict(real(container))
        file, norm = found["model.language_model.norm.weight"]
        return found | {"lm_head.weight": (file, dataclasses.replace(norm, name="lm_head.weight"))}

    monkeypatch.setattr(host, "dense_entries", more)
    with pytest.raises(DataError, match=r"lm_head\.weight.*one that is plain and one that is encoded.*E1207"):
        any_model(container)


def test_a_head_that_runs_in_float32(workshop: Workshop, built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native products are refused when the model is loaded (E1229), not at its first token."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keep_in_fp32_modules_strict", ["lm_head"])
    container = open_container(workshop.container("bf16", built("deepseek_v3"), "int8"))
    with pytest.raises(RequestError, match="E1229"):
        any_model(container)
    any_model(container, experts=REFERENCE).close()


def test_a_model_in_float16(workshop: Workshop, tmp_path: Path) -> None:
    """Codes of F16 sources, products in float16: the anchor, and streamed as resident."""
    source = Path(shutil.copytree(TINY, tmp_path / "s"))
    for file in source.glob("*.safetensors"):
        tensors = read_tensors(source, file.name)
        for name, (dtype, shape, data) in tensors.items():
            assert dtype == "BF16"
            values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).to(torch.float16)
            tensors[name] = ("F16", shape, values.numpy().tobytes())
        write_tensors(file, tensors)
    config = json.loads((source / "config.json").read_text())
    for place in (config, config["text_config"]):
        place["dtype"] = "float16"
    (source / "config.json").write_text(json.dumps(config))
    container = open_container(workshop.container("int8", source, "int8"))
    streamed, resident = any_model(container), any_model(container, "resident")
    assert streamed.dtype == torch.float16
    found = logits_of(streamed, sequence(20), 2)
    assert all(torch.equal(a, b) for a, b in zip(found, logits_of(resident, sequence(20), 2), strict=True))
    module, plain = linears_of(streamed)["lm_head"], host.plain_model(source)
    wanted = logits_of(plain, sequence(20), 2, [int(f[-1].argmax()) for f in found])
    agreed = torch.cat(found).argmax(-1) == torch.cat(wanted).argmax(-1)
    assert float(agreed.float().mean()) > 0.8
    rows = random(3, module.in_features, dtype=torch.float16)
    assert module(rows).dtype == torch.float16
    streamed.close()
    resident.close()
