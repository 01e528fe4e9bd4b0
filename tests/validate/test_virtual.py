"""A checkpoint run as it is: the logits of the bf16 container that nobody made."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.checkpoints import Spec
from kits.conversions import prepare
from kits.families import MODELS, SIZES, build, read_tensors, write_tensors
from kits.inference import TINY, Workshop, calm, command, equal, logits_of, model, sequence
from kits.quantised import Fp8Spec
from kits.storage import MemoryStorage

from pagestone.convert.plan import Request, make_plan
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layout import PARTS
from pagestone.formats.storage import PIECE
from pagestone.reader.container import open_container
from pagestone.reader.made import MadeContainer
from pagestone.reader.session import Session, SessionOptions
from pagestone.validate.virtual import again, open_any, open_virtual


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    oracle("torch")
    oracle("transformers")
    calm()


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("virtual"))


IDS = sequence(20)


def fp8_checkpoint(workshop: Workshop, to: Path) -> Path:
    """tiny-moe as an FP8 checkpoint of others: the codes and scales of a container, in one plain file."""
    container = workshop.container("fp8")
    tensors = {n: t for n, t in read_tensors(container).items() if not n.endswith((".pad", ".pad_a"))}
    to.mkdir()
    write_tensors(to / "model.safetensors", tensors)
    shutil.copy(container / "config.json", to)
    return to


def source_of(kind: str, workshop: Workshop, tmp_path: Path) -> Path:
    if kind == "fused":
        return TINY
    if kind == "fp8":
        return fp8_checkpoint(workshop, tmp_path / "fp8")
    root = tmp_path / kind
    root.mkdir()
    build(MODELS[kind], SIZES["wide"], root)
    return root


@pytest.mark.parametrize("kind", ["fused", "fp8", "granitemoe", "gpt_oss", "deepseek_v3"])
def test_the_logits_of_the_bf16_container(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    """Prefill and decode, with a cache of a few experts: every logit, to the last bit."""
    source = source_of(kind, workshop, tmp_path)
    converted = model(workshop.container("bf16", source), experts="reference")
    virtual = open_virtual(source)
    layer = next(iter(virtual.layers.values()))
    streamed = model(virtual, budget=2 * layer.stride, experts="reference")
    ids = [i % converted.vocabulary for i in IDS]
    expected = logits_of(converted, ids, 3)
    choices = [int(x[-1].argmax()) for x in expected]
    assert equal(expected, logits_of(streamed, ids, 3, choices))
    store = streamed.context.store
    assert store.mode == "encoded" and store.evictions > 0 and store.peak_bytes <= 2 * layer.stride
    for each in (converted, streamed):
        each.close()
    virtual.close()


def test_pads_and_large_tensors(tmp_path: Path) -> None:
    """Records with a pad, whatever the buffer held; a dense tensor of several pieces."""
    spec = Spec(72, 40, 2, layers=1, family="qwen3_moe", fused=False, mtp=False)
    shapes = {"model.norm.weight": (72,), "model.embed_tokens.weight": (9000, 72)}
    shapes |= {"model.layers.0.mlp.gate.weight": (2, 72)}
    for expert, part in itertools.product(range(2), PARTS):
        shapes[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] = spec.shape(part)
    draws = np.random.default_rng(5)
    tensors = {
        name: ("BF16", shape, (draws.integers(0, 127, (*shape, 2), np.uint8)).tobytes())
        for name, shape in shapes.items()
    }
    source = tmp_path / "s"
    source.mkdir()
    write_tensors(source / "model.safetensors", tensors)
    (source / "config.json").write_text(json.dumps(spec.config()))
    prepare(source, tmp_path / "c", encodings.get("bf16"), workers=1)
    real, made = open_container(tmp_path / "c"), open_virtual(source)
    layer = made.layers[0]
    assert layer.layout.record.slots[-1].part is None, "a record with a pad expected"
    room = memoryview(bytearray(b"\xa5" * layer.stride))
    made.maker.record(layer, 1, room)
    assert bytes(room) == real.layers[0].expert(1).record.tobytes()
    stored = read_tensors(tmp_path / "c", "dense-*.safetensors")
    assert max(len(raw) for _, _, raw in stored.values()) > PIECE
    for name, (_, _, raw) in stored.items():
        assert made.maker.dense(name).tobytes() == raw
    made.close()


def test_for_many_threads(workshop: Workshop) -> None:
    """Records made at once by threads are those made one by one: each thread has a buffer of its own."""
    real, made = open_container(workshop.container("bf16")), open_virtual(TINY)
    layer = made.layers[0]

    def record(expert: int) -> bytes:
        room = bytearray(layer.stride)
        made.maker.record(layer, expert, memoryview(room))
        return bytes(room)

    with ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(record, list(range(len(layer))) * 4)):
            assert found == real.layers[0].expert(n % len(layer)).record.tobytes()
    made.close()
    with made.maker._files._root.storage:
        pass  # closed: nobody holds the source's files any more
    assert not made.maker._files._root.storage._handles


def test_records_are_the_containers(workshop: Workshop) -> None:
    """Every byte of a record, pads too, also where the buffer held another one; every dense tensor."""
    real, made = open_container(workshop.container("bf16")), open_virtual(TINY)
    for number, layer in made.layers.items():
        assert layer.layout == real.layers[number].layout
        buffer = bytearray(b"\xa5" * layer.stride)
        for expert in (0, len(layer) - 1, 3):
            made.maker.record(layer, expert, memoryview(buffer))
            assert bytes(buffer) == real.layers[number].expert(expert).record.tobytes()
    stored: dict[str, Any] = read_tensors(workshop.container("bf16"), "dense-*.safetensors")
    entries = made.maker.dense_entries()
    assert entries.keys() == stored.keys()
    for name, (file, entry) in entries.items():
        assert (workshop.container("bf16") / file).is_file()
        assert (entry.dtype, tuple(entry.shape)) == stored[name][:2]
        assert made.maker.dense(name).tobytes() == stored[name][2]
    made.close()


def test_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    """`run` takes a checkpoint, says what that costs, and answers; --json names no container id."""
    assert command("run", TINY, "--prompt", "What is the capital of France?", "--budget", "1MiB") == 0
    out, err = capsys.readouterr()
    assert out == "The capital of France is Paris.\n"
    assert "page cache" not in err, "no file system refused anything"
    assert "not converted" in err and "bf16 experts, reference products, encoded" in err
    assert command("run", TINY, "--prompt", "What is the capital of France?", "--io", "resident", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["container_id"].startswith("source ") and table["io"] == "resident"


def test_a_plan_for_a_checkpoint(workshop: Workshop) -> None:
    """A checkpoint's tokenizer has its line as a container's has; the cache is what is left."""
    lines = []
    for root, opener in ((workshop.container("bf16"), None), (TINY, open_virtual)):
        with Session(root, SessionOptions(memory=6 << 30), opener=opener) as session:
            assert session.plan is not None
            lines.append(session.plan.line("tokenizer"))
    assert lines[0] == lines[1] > 0


def test_no_map(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to map."""
    assert command("run", TINY, "--prompt", "x", "--io", "mmap") == 2
    assert "E1296" in capsys.readouterr().err
    made = open_virtual(TINY)
    for view in (lambda: made.layers[0].expert(0), lambda: made.layers[0].pointer):
        with pytest.raises(RequestError, match="E1296"):
            view()


def test_what_is_opened_as_what(workshop: Workshop, tmp_path: Path) -> None:
    """A container is one, whole or not; a checkpoint is one; anything else is refused as before."""
    assert not isinstance(open_any(workshop.container("int8")), MadeContainer)
    assert isinstance(open_any(TINY), MadeContainer)
    damaged = workshop.copy("bf16", tmp_path / "damaged")
    (damaged / "manifest.json").write_bytes(b"{}")
    with pytest.raises(DataError, match="E0301"):
        open_any(damaged)
    unfinished = shutil.copytree(TINY, tmp_path / "unfinished")
    (unfinished / ".pagestone-partial").mkdir()
    with pytest.raises(RequestError, match="E0331"):
        open_any(unfinished)
    with pytest.raises(RequestError, match="E0331"):
        open_any(tmp_path / "nothing")


def test_a_source_that_changes(tmp_path: Path) -> None:
    """What was planned is held to its stamp at every read, experts and dense tensors."""
    source = shutil.copytree(TINY, tmp_path / "source")
    made = open_virtual(source)
    layer, room = made.layers[0], memoryview(bytearray(made.layers[0].stride))
    made.maker.record(layer, 0, room)
    name = next(iter(made.maker.dense_entries()))
    for file in source.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    for read in (lambda: made.maker.record(layer, 0, room), lambda: made.maker.dense(name)):
        with pytest.raises(DataError, match="E1330") as caught:
            read()
        assert str(source) in str(caught.value.file) and "expected, found 1 ns" in caught.value.message
    made.close()


def test_a_source_whose_matrices_change(tmp_path: Path) -> None:
    """So are matrices that are encoded, as for a conversion with --dense."""
    source = shutil.copytree(TINY, tmp_path / "source")
    prepare(source, tmp_path / "c", encodings.get("int8"), workers=1, dense="int8")
    plan = make_plan(Request(source, encodings.get("int8"), dense="int8"))
    made = again(open_container(tmp_path / "c"), plan)
    name, placed = next(iter(made.maker.matrices().items()))
    room = memoryview(bytearray(placed.record.nbytes))
    made.maker.matrix(name, room)
    for file in source.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    with pytest.raises(DataError, match="E1330"):
        made.maker.matrix(name, room)
    made.close()


def test_scales_in_a_file_that_changes(tmp_path: Path) -> None:
    """A dense tensor that is decoded is held to the stamps of all files that it is made of."""
    made = open_virtual(Fp8Spec(shards=4).write(tmp_path / "source"))
    dense = made.maker._dense.values()
    tensor = next(t for _, t in dense if any(r.tensor.file != t.source.file for r in t.stored.values()))
    made.maker.dense(tensor.name)
    other = next(r.tensor.file for r in tensor.stored.values() if r.tensor.file != tensor.source.file)
    os.utime(tmp_path / "source" / other, ns=(1, 1))
    with pytest.raises(DataError, match="E1330"):
        made.maker.dense(tensor.name)
    made.close()


def test_the_table_by_rows(workshop: Workshop, tmp_path: Path) -> None:
    """The embedding table of a source is read by rows, each once while it is kept; a change of the source is seen."""
    source = shutil.copytree(TINY, tmp_path / "source")
    virtual = open_virtual(source)
    streamed = model(virtual, budget=4 * virtual.layers[0].stride, experts="reference")
    (table,) = streamed.tables
    name = "model.language_model.embed_tokens.weight"
    whole = virtual.maker.dense(name).reshape(1024, -1)
    ids = np.array([7, 1023, 0, 7])
    assert table.entry.name == name and np.array_equal(table.read(ids), whole[ids])
    assert np.array_equal(table.read(ids[::-1]), whole[ids[::-1]])
    assert (table.counters.rows, table.counters.hits, table.counters.bytes_read) == (3, 3, 3 * whole.shape[1])
    shard = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][name]
    os.utime(source / shard, ns=(1, 1))
    with pytest.raises(DataError, match="E1330"):
        table.read(np.array([9]))
    streamed.close()


def test_a_source_elsewhere(tmp_path: Path) -> None:
    """Bytes may come from any storage, if a directory holds what a model and its words are made of."""
    files = {p.name: p.read_bytes() for p in TINY.iterdir() if p.is_file()}
    storage = MemoryStorage(files)
    with pytest.raises(RequestError, match="E1331"):
        open_virtual(storage)
    with Session(
        TINY, SessionOptions(budget=1 << 20), opener=lambda path: open_virtual(storage, Path(path))
    ) as session:
        assert session.model.forward(IDS)[0].shape == (1, session.vocabulary)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    """NaN in an expert: the error a conversion would raise, naming expert, tensor and file."""
    source = shutil.copytree(TINY, tmp_path / "source")
    made = open_virtual(source)
    at = made.maker._plan.layers[0].source.matrix(5, "up").stored["codes"].at
    made.close()
    with (source / at.tensor.file).open("r+b") as handle:
        handle.seek(at.offset + 8)
        handle.write(b"\xc0\x7f")
    made = open_virtual(source)
    with pytest.raises(DataError, match="E0702") as caught:
        made.maker.record(made.layers[0], 5, memoryview(bytearray(made.layers[0].stride)))
    assert "expert 5" in str(caught.value) and str(caught.value.file) == str(source / at.tensor.file)


def test_a_plan_that_gives_another_container(workshop: Workshop) -> None:
    """Records of another codec, or dense matrices in another encoding, stand for no container (E1306)."""
    container = open_container(workshop.container("int8"))
    other = make_plan(Request(TINY, encodings.get("fp8")))
    with pytest.raises(
        RequestError,
        match=r"layers-00.*another shape, codec or name: 16 experts .*int8.* expected, found 16 .*fp8.*E1306",
    ):
        again(container, other)
    encoded = make_plan(Request(TINY, encodings.get("int8"), dense="int8"))
    assert encoded.matrices
    with pytest.raises(
        RequestError, match=r"dense matrices in another encoding: matrices as they are expected, found int8 .*E1306"
    ):
        again(container, encoded)
    again(container, make_plan(Request(TINY, encodings.get("int8")))).close()
