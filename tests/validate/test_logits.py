"""Streaming changes no bit of any logit, and the audit that says so can fail."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kits.conversions import prepare
from kits.families import LONG
from kits.generated import GeneratedCheckpoint
from kits.inference import TINY, Workshop, calm, command, flip, pairwise, sequence

from pagestone.formats import encodings, native, storage
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import read_sidecar
from pagestone.reader.budget import all_records, largest_record, row_sum_bytes
from pagestone.reader.cache import ExpertCache, Key, Policy, balanced
from pagestone.reader.container import Container, Layer, View, open_container
from pagestone.reader.dense_costs import dense_costs
from pagestone.reader.files import DirectFile
from pagestone.reader.hosts import transformers as host
from pagestone.reader.model import NATIVE, PIECE, PRODUCTS, REFERENCE
from pagestone.reader.session import Session, SessionOptions
from pagestone.reader.store import FileRecords, MappedStore, PlainRecords, RecordDigests
from pagestone.validate import logits, sides
from pagestone.validate.audit import DIFFERENT, EQUAL, NOT_COMPARABLE
from pagestone.validate.logits import LogitsRequest, verify_logits
from pagestone.validate.sides import Prompt, Side, first_difference, proof, run_side

torch: Any


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


CODECS = sorted(encodings.registry())
STEPS = 3


def read_traces(path: Path) -> list[dict[str, Any]]:
    """Every line of a file of traces, by the libraries alone."""
    import zstandard

    raw = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    return [json.loads(line) for line in raw.splitlines()]


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("logits"))


# -- the matrix -------------------------------------------------------------------------------------------------------

MATRIX = pairwise(
    {
        "codec": CODECS,
        "budget": ["one", "two", "seven", "quarter", "all but one", "all"],
        "io": ["direct", "mmap"],
        "threads": [1, 2, 4],
        "length": [1, 2, 17, 64, 129, 300],
        "history": ["balanced", "random 1", "random 2"],
    }
)
"""Every pair of values of two factors: about 40 rows. The full product is scripts/torture_logits.py."""
RUNS = [(NATIVE, row) for row in MATRIX] + [(REFERENCE, row) for row in MATRIX[::4]]
"""(experts, row): native ones run them all, reference ones a quarter."""


def policy(history: str) -> Policy:
    """What to evict: ours, or a random choice that has its own history."""
    if history == "balanced":
        return balanced
    source = random.Random(history)

    def any_key(candidates: Collection[Key], coming: Key, held: Mapping[int, int]) -> Key | None:
        return None if source.random() < 0.1 else source.choice(list(candidates))

    return any_key


def budget_of(container: Container, word: str) -> int:
    stride, every = container.layers[0].stride, all_records(container)
    sizes = {"one": 1, "two": 2, "seven": 7, "quarter": every // stride // 4, "all but one": every // stride - 1}
    return stride * sizes.get(word, every // stride)


@pytest.fixture(scope="session")
def resident(workshop: Workshop) -> Any:
    """The resident side of a codec, a kind of experts and a prompt's length, each run once."""
    models: dict[tuple[str, str], Any] = {}
    sides: dict[tuple[str, str, int], Side] = {}

    def one(codec: str, experts: str, length: int) -> Side:
        if (codec, experts, length) not in sides:
            if (codec, experts) not in models:
                session = Session(workshop.container(codec), SessionOptions(experts=experts))
                models[codec, experts] = logits.resident_model(session)
            prompt = Prompt(str(length), tuple(sequence(length)))
            sides[codec, experts, length] = run_side(models[codec, experts], [prompt], STEPS)
        return sides[codec, experts, length]

    return one


def named(value: str | dict[str, Any]) -> str:
    words = value.values() if isinstance(value, dict) else [value]
    return "-".join(str(v).replace(" ", "_") for v in words)


@pytest.mark.parametrize(("experts", "row"), RUNS, ids=named)
def test_streamed_is_resident(workshop: Workshop, resident: Any, experts: str, row: dict[str, Any]) -> None:
    """Equal bytes at every step of prefill and decode; the counters prove that the run streamed."""
    wanted = resident(row["codec"], experts, row["length"])
    container = open_container(workshop.container(row["codec"]))
    store: Any
    if row["io"] == "mmap":
        store = MappedStore(container)
    else:
        records = FileRecords(container, RecordDigests(container))
        store = ExpertCache(
            container.layers, records, budget_of(container, row["budget"]), threads=row["threads"],
            policy=policy(row["history"]),
        )  # fmt: skip
    model = host.load(container, store, experts=experts)
    prompt = Prompt(str(row["length"]), tuple(sequence(row["length"])))
    side = run_side(model, [prompt], STEPS, [[s.choice for s in wanted.steps[0]]])
    model.close()
    assert first_difference([prompt], wanted.steps, side.steps) is None
    assert [s.events for s in side.steps[0]] == [s.events for s in wanted.steps[0]]
    assert proof(side) == []


def test_the_matrix_covers_every_pair() -> None:
    """About forty rows, and each pair of values at least once; what reference runs has every codec and both modes."""
    assert 30 <= len(MATRIX) <= 48
    small = [row for experts, row in RUNS if experts == REFERENCE]
    assert {r["codec"] for r in small} == set(CODECS) and {r["io"] for r in small} == {"direct", "mmap"}
    for a in MATRIX[0]:
        for b in MATRIX[0]:
            assert len({(r[a], r[b]) for r in MATRIX}) == len({r[a] for r in MATRIX}) * (
                len({r[b] for r in MATRIX}) if a != b else 1
            )


# -- the command ------------------------------------------------------------------------------------------------------


def request(directory: Path, **how: Any) -> LogitsRequest:
    return LogitsRequest(directory, **({"steps": STEPS} | how))


@pytest.fixture(scope="session")
def audited(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit of tiny-moe in int8, with traces beside it."""
    path = tmp_path_factory.mktemp("audit") / "audit.json"
    audit = verify_logits(request(workshop.container("int8")))
    assert audit.result == EQUAL and audit.exit_code == 0
    audit.write(path)
    return path


def test_the_audit_file(workshop: Workshop, audited: Path) -> None:
    """It names machine, versions, thread counts and container; a hash a step; traces that say what every layer did."""
    table = json.loads(audited.read_text())
    container = open_container(workshop.container("int8"))
    assert table["result"] == "equal" and table["container"]["id"] == container.container_id
    assert table["machine"]["cpu"] and table["versions"]["torch"] == torch.__version__
    assert table["threads"]["torch"] == 1 and table["reader_threads"] == 2
    assert table["model"] == {
        "host": "transformers", "class": "Qwen3_5MoeForCausalLM", "dtype": "bfloat16", "attention": host.PACKED,
        "prefill_piece": PIECE, "experts": "native",
    }  # fmt: skip
    assert table["products"] == {"isa": native.isa(), "threads": 1}
    assert [len(p["ids"]) for p in table["prompts"]] == [1, 7, 64]
    assert all(len(set(p["sha256"])) == STEPS + 1 for p in table["prompts"])
    streamed = table["streamed"]
    assert 0 < streamed["peak_bytes"] <= streamed["budget"] == all_records(container) // 4
    assert streamed["open_leases"] == 0 and streamed["total"]["bytes_read"] > 0
    lines = list(read_traces(audited.with_name(table["traces"])))
    assert {x["what"] for x in lines} == {"input", "routing", "expert", "output"}
    assert {(x["prompt"], x["step"], x["layer"]) for x in lines} == {
        (p, s, n) for p in range(3) for s in range(STEPS + 1) for n in range(4)
    }
    one = [x for x in lines if (x["prompt"], x["step"], x["layer"], x["what"]) == (0, 0, 2, "expert")]
    assert len(one) == 4 and [x["expert"] for x in one] == sorted(x["expert"] for x in one)


def test_against_an_audit(workshop: Workshop, audited: Path) -> None:
    """Another budget, another mode and no resident side: equal to what was recorded."""
    for how in ({"budget": 102_400}, {"io": "mmap"}):
        audit = verify_logits(request(workshop.container("int8"), against=audited, **how))
        assert audit.result == EQUAL and audit.reference is None and audit.exit_code == 0


def test_a_difference_without_traces(workshop: Workshop, audited: Path, tmp_path: Path) -> None:
    """An audit whose traces were lost still tells the step, and says why it cannot tell the layer."""
    table = json.loads(audited.read_text())
    table["prompts"][1]["sha256"][2] = "00" * 32
    path = tmp_path / "alone.json"
    path.write_text(json.dumps(table))
    audit = verify_logits(request(workshop.container("int8"), against=path))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert audit.difference.step == 2 and "no traces" in logits.report(audit)


@pytest.mark.parametrize("other", [None, 128, "missing"])
def test_other_pieces_are_not_comparable(workshop: Workshop, audited: Path, tmp_path: Path, other: Any) -> None:
    """How many tokens of a prompt were worked on at once is part of what its logits depend on."""
    table = json.loads(audited.read_text())
    table["model"]["prefill_piece"] = other
    if other == "missing":
        del table["model"]["prefill_piece"]
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(table))
    audit = verify_logits(request(workshop.container("int8"), against=path))
    there = None if other == "missing" else other
    assert audit.result == NOT_COMPARABLE
    assert audit.incomparable == [f"model prefill_piece is {PIECE} here, {there} there"]


def test_another_machine_is_not_comparable(workshop: Workshop, audited: Path, tmp_path: Path) -> None:
    """The word is "not comparable", the exit code 2, and what differs is named."""
    for group, key in (("machine", "cpu"), ("versions", "torch"), ("threads", "torch"), ("model", "attention")):
        table = json.loads(audited.read_text())
        table[group][key] = 99 if group == "threads" else "another"
        table["prompts"][0]["sha256"][0] = "00" * 32
        path = tmp_path / "audit.json"
        path.write_text(json.dumps(table))
        audit = verify_logits(request(workshop.container("int8"), against=path))
        assert audit.result == NOT_COMPARABLE and audit.exit_code == 2
        assert "not comparable" in logits.report(audit) and f"{group} {key}" in logits.report(audit)
        assert "failed" not in logits.report(audit)


def test_an_audit_of_something_else(workshop: Workshop, audited: Path, tmp_path: Path) -> None:
    """Another container's is a wrong request; a damaged one is an error."""
    with pytest.raises(RequestError, match="E1307"):
        verify_logits(request(workshop.container("fp8"), against=audited))
    broken = tmp_path / "broken.json"
    broken.write_text('{"audit": "something"}')
    with pytest.raises(DataError, match="E1303"):
        verify_logits(request(workshop.container("int8"), against=broken))


def test_the_kind_of_experts(workshop: Workshop, audited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reference experts say so; their hashes are not comparable with those of native ones, whose ISA is."""
    directory = workshop.container("int8")
    audit = verify_logits(request(directory, against=audited, experts=REFERENCE))
    assert audit.result == NOT_COMPARABLE
    assert "model experts is reference here, native there" in logits.report(audit)
    with native.forced("scalar" if "scalar" in native.available() else native.NUMPY) as isa:
        audit = verify_logits(request(directory, against=audited))
        assert audit.result == EQUAL and audit.surroundings["products"]["isa"] == isa
        assert f"native experts, {isa}" in logits.report(audit)
    assert command("verify-logits", directory, "--experts", "reference", "--steps", "1", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["model"]["experts"] == "reference" and table["products"] == {"isa": None, "threads": None}
    assert command("verify-logits", directory, "--experts", "other") == 2
    assert "E1244" in capsys.readouterr().err


@pytest.fixture(params=["resident", "anew"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of reference side: which one it is depends on the memory that is free."""
    if request.param == "anew":
        monkeypatch.setattr(logits, "available_memory", lambda: 1)
    return str(request.param)


@pytest.mark.parametrize(("codec", "experts"), [(c, NATIVE) for c in CODECS] + [("int8", REFERENCE)])
def test_reference_side_from_the_source(
    workshop: Workshop, codec: str, experts: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side never touches the container's weights: it is encoded from the checkpoint."""
    directory = workshop.container(codec)
    monkeypatch.setattr(PlainRecords, "read", None)
    monkeypatch.setattr(FileRecords, "read", None)  # mapped below; neither side reads a record
    audit = verify_logits(request(directory, source=TINY, steps=2, io="mmap", experts=experts))
    assert audit.result == EQUAL and audit.reference is not None and audit.reference.mode == way
    again = ", anew for each use" if way == "anew" else ""
    assert audit.table(None)["resident_side"] == "encoded from the source" + again
    assert logits.report(audit).count("encoded from its source") == 1


@pytest.mark.parametrize("experts", PRODUCTS)
@pytest.mark.parametrize("codec", CODECS)
def test_records_read_anew_give_the_resident_side(
    workshop: Workshop, codec: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes and events of every step, whatever reads them; a few records are in memory at a time, and none is kept."""
    session = Session(workshop.container(codec), SessionOptions(experts=experts))
    prompts = logits.default_prompts(session.container, session.vocabulary)
    sides = []
    for make in (logits.resident_model, logits.anew_model):
        model = make(session)
        sides.append(run_side(model, prompts, STEPS))
        model.close()
        monkeypatch.setattr(FileRecords, "read", None)  # the second side shares nothing with the cache
        monkeypatch.setattr(DirectFile, "read_into", _direct_only_for_dense)
    resident, anew = sides
    assert [[(s.sha256, s.choice, s.events) for s in p] for p in resident.steps] == [
        [(s.sha256, s.choice, s.events) for s in p] for p in anew.steps
    ]
    stride = session.container.layers[0].stride
    used = sum(e.what == "expert" for p in anew.steps for s in p for e in s.events)
    total = anew.counters.total
    assert (total.misses, total.hits, total.bytes_read) == (used, 0, used * stride)
    assert anew.mode == "anew" and anew.peak_bytes == (1 + logits.AHEAD) * stride and anew.open_leases == 0
    session.close()


def _direct_only_for_dense(self: DirectFile, target: memoryview, offset: int) -> int:
    """What stands for `DirectFile.read_into` where nothing may be read past the page cache, and no record at all."""
    assert self.mode == "buffered" and "layers" not in self.path.name
    return storage.DirectFile.read_into(self, target, offset)


def test_which_reference_side(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident where all records and dense tensors fit what is free, else anew; --resident whatever there is."""
    directory = workshop.container("int8")
    with Session(directory) as session:
        needed = sum(f.nbytes for f in session.container.manifest.files.values() if f.nbytes > 1 << 16)
        for free, asked, expected in (
            (None, False, "resident"), (needed, False, "resident"), (needed // 2, False, "anew"), (1, True, "resident")
        ):  # fmt: skip
            monkeypatch.setattr(logits, "available_memory", lambda free=free: free)
            way, why = logits.reference_way(session, request(directory, resident=asked))
            assert way == expected and ("are free" in why) == (way == "anew")
        every = all_records(session.container)
        rows = row_sum_bytes(session.container)
        dense = dense_costs(session.container, mode="resident").resident
        for free, expected in ((every + rows + dense, "resident"), (every + rows + dense - 1, "anew")):
            monkeypatch.setattr(logits, "available_memory", lambda free=free: free)
            assert logits.reference_way(session, request(directory))[0] == expected


def test_the_command_says_which_side(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line before it runs, in the result, in the audit."""
    directory = workshop.container("q4")
    monkeypatch.setattr(logits, "available_memory", lambda: 1)
    assert command("verify-logits", directory, "--steps", "1") == 0
    out, err = capsys.readouterr()
    assert "anew side: records read anew for each use" in err and "1 B are free" in err
    assert "every logit equal to those of records read anew" in out
    assert command("verify-logits", directory, "--steps", "1", "--json", "--resident") == 0
    out, err = capsys.readouterr()
    assert "resident side: every record in memory, as asked for" in err
    table = json.loads(out)
    assert table["resident_side"] == "the container's records" and table["resident"]["mode"] == "resident"


def test_a_record_is_read_at_each_use(damaged: Path, audited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes on disk between two uses is seen at the second."""
    monkeypatch.setattr(logits, "available_memory", lambda: 1)
    layer = open_container(damaged).layers[1]
    seen: list[int] = []
    real = PlainRecords.read

    def read(self: PlainRecords, at: Layer, expert: int, into: memoryview) -> None:
        real(self, at, expert, into)
        if at.entry.layer == 1:
            seen.append(expert)
            if len(seen) == 1:
                flip(layer.path, layer.layout.record_offset(expert) + 7)

    monkeypatch.setattr(PlainRecords, "read", read)
    with pytest.raises(DataError, match=r"layers-01.*E1201"):
        verify_logits(request(damaged, prompts=None, steps=16))
    assert seen


def test_a_wrong_source_is_seen(workshop: Workshop, tmp_path: Path, way: str) -> None:
    """A source whose weights are others gives other logits, first in the layer that differs."""
    import shutil

    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.language_model.layers.2.mlp.experts.down_proj"
    from pagestone.formats.safetensors_header import read_header

    entry = next(e for e in read_header(source / index[name]).entries if e.name == name)
    for expert in range(16):
        flip(source / index[name], entry.offset + expert * entry.nbytes // 16 + 1, 6)
    audit = verify_logits(request(workshop.container("int8"), source=source))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what) == (2, "expert")


def test_dense_tensors_are_the_sources_too(workshop: Workshop, tmp_path: Path, way: str) -> None:
    """A dense tensor of the source that is another gives other logits: with a source none comes from the container."""
    import shutil

    from pagestone.formats.safetensors_header import read_header

    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(n for n in index if n.endswith("layers.1.mlp.gate.weight"))
    entry = next(e for e in read_header(source / index[name]).entries if e.name == name)
    for at in range(0, entry.nbytes, 2):
        flip(source / index[name], entry.offset + at + 1, 0)
    audit = verify_logits(request(workshop.container("int8"), source=source, steps=1))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what) == (1, "routing")


def test_prompts_and_ids(workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of text and of ids, the command's words and exit codes, an audit written by it."""
    directory = workshop.container("int8")
    (tmp_path / "prompts").write_text("In the beginning\n\nAnd it came to pass\n")
    (tmp_path / "ids").write_text("1 2 3\n[7, 8]\n")
    small = ["--steps", "1"]
    assert command("verify-logits", directory, "--prompts", tmp_path / "prompts", *small) == 0
    out = capsys.readouterr().out
    assert "4 steps of 2 prompts" in out and "byte for byte" in out and "0 leases open" in out
    audit = tmp_path / "a.json"
    assert command("verify-logits", directory, "--ids", tmp_path / "ids", "--audit", audit, "--json", *small) == 0
    table = json.loads(capsys.readouterr().out)
    assert [p["ids"] for p in table["prompts"]] == [[1, 2, 3], [7, 8]]
    assert (tmp_path / "a.traces.jsonl.zst").is_file() and json.loads(audit.read_text())["traces"]
    (tmp_path / "ids").write_text("1 5000\n")
    assert command("verify-logits", directory, "--ids", tmp_path / "ids") == 2
    assert "E1305" in capsys.readouterr().err
    assert command("verify-logits", directory, "--ids", tmp_path / "ids", "--against", audit) == 2
    assert command("verify-logits", directory, "--io", "resident") == 2
    assert "E1240" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["input", "ids", "weights"])
def test_the_trace_covers_what_goes_into_a_layer(workshop: Workshop, what: str) -> None:
    """Hidden states, the experts chosen and their weights: a bit of any of them is another digest, of that event."""
    container = open_container(workshop.container("int8"))
    model = host.load(container, MappedStore(container))
    experts = next(m for m in model.model.modules() if hasattr(m, "context"))
    given = {
        "input": torch.linspace(-1, 1, 2 * container.layers[0].header.shape.hidden).reshape(2, -1).to(model.dtype),
        "ids": torch.tensor([[0, 1], [2, 3]]),
        "weights": torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=model.dtype),
    }
    taken = []
    for change in (None, what):
        recorder = model.context.observer = sides._Recorder()
        now = {name: tensor.clone() for name, tensor in given.items()}
        if change:
            bits = now[change].view(torch.int64 if change == "ids" else torch.int16)
            bits[1, 1] ^= 4
        experts(now["input"], now["ids"], now["weights"])
        taken.append({event.what: event.digest for event in recorder.take()})
    model.close()
    differ = {event for event in ("input", "routing") if taken[0][event] != taken[1][event]}
    assert differ == {"input" if what == "input" else "routing"}


def test_counters_must_prove_streaming() -> None:
    """Equal logits of a run that did not stream are not a pass."""
    audit = Side("direct", [], 0.0, budget=10, peak_bytes=11, open_leases=2)
    assert len(proof(audit)) == 3


# -- the audit can fail -----------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(workshop: Workshop, tmp_path: Path) -> Path:
    return workshop.copy("int8", tmp_path / "container")


def used_expert(audited: Path, layer: int) -> int:
    """An expert that the first prompt uses in its prefill."""
    table = json.loads(audited.read_text())
    lines = read_traces(audited.with_name(table["traces"]))
    return next(x["expert"] for x in lines if x["layer"] == layer and x["what"] == "expert")


def test_a_flip_on_disk(damaged: Path, audited: Path, way: str) -> None:
    """(a) The reference side names file and expert (E1201); mapped against an audit, the logits tell, and where."""
    expert = used_expert(audited, 1)
    layer = open_container(damaged).layers[1]
    at = layer.layout.record_offset(expert) + layer.layout.record.slot("down", "codes").offset
    for row in range(256):
        flip(layer.path, at + 128 * row + 3, 6)
    for io in ("direct", "mmap"):
        with pytest.raises(DataError, match=rf"layers-01.*expert {expert} .*E1201"):
            verify_logits(request(damaged, io=io))
    audit = verify_logits(request(damaged, io="mmap", against=audited))
    assert audit.result == DIFFERENT and audit.exit_code == 1 and audit.difference is not None
    found = audit.difference
    assert (found.step, found.layer, found.what, found.expert) == (0, 1, "expert", expert)
    assert f"layer 1, expert {expert}" in logits.report(audit) and "E1301" in logits.report(audit)


@pytest.mark.parametrize("budget", [102_400, 20 * 102_400, None])
def test_a_flip_in_a_cached_buffer(
    workshop: Workshop, audited: Path, monkeypatch: pytest.MonkeyPatch, budget: int | None, way: str
) -> None:
    """(b) After its digest was checked nothing but the logits can tell; they do, and name layer and expert."""
    expert = used_expert(audited, 2)
    real = FileRecords.read

    def read(self: FileRecords, layer: Layer, number: int, into: memoryview) -> None:
        real(self, layer, number, into)
        if (layer.entry.layer, number) == (2, expert) and not resident_side[0]:
            into[layer.layout.record.slot("gate", "codes").offset + 5] ^= 0x40

    resident_side = [False]
    make = logits.resident_model

    def unharmed(*arguments: Any) -> Any:
        resident_side[0] = True
        try:
            return make(*arguments)
        finally:
            resident_side[0] = False

    monkeypatch.setattr(FileRecords, "read", read)
    monkeypatch.setattr(logits, "resident_model", unharmed)
    audit = verify_logits(request(workshop.container("int8"), budget=budget))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what, audit.difference.expert) == (2, "expert", expert)


def test_a_flip_in_the_cache_between_two_uses(workshop: Workshop) -> None:
    """(b) The second prompt uses what the first one read: the same bytes, later changed in memory."""
    container = open_container(workshop.container("int8"))
    prompts = [Prompt("once", tuple(sequence(30)))]
    model = host.load(container, _cache(container))
    clean = run_side(model, prompts, 1)
    store: Any = model.context.store
    entry = store._entries[3, min(e for n, e in store._entries if n == 3)]
    entry.buffer[7] = entry.buffer[7] ^ 0x40
    again = run_side(model, prompts, 1)
    found = first_difference(prompts, clean.steps, again.steps)
    assert found is not None and (found.layer, found.what, found.expert) == (3, "expert", entry.key[1])
    model.close()


def _cache(container: Container) -> ExpertCache:
    records = FileRecords(container, RecordDigests(container))
    return ExpertCache(container.layers, records, all_records(container))


def test_a_flip_in_the_row_sums_on_disk(damaged: Path, way: str) -> None:
    """(c) Whoever reads row sums compares their digest (E1206); reference experts never look at them."""
    path = row_sum(damaged, 2, 5)[0]
    flip(*row_sum(damaged, 2, 5), bit=4)
    for io in ("direct", "mmap"):
        with pytest.raises(DataError, match=rf"{path.name}: xxh3 .*E1206"):
            verify_logits(request(damaged, io=io))
        assert verify_logits(request(damaged, io=io, steps=1, experts=REFERENCE)).result == EQUAL


def row_sum(root: Path, layer: int, expert: int) -> tuple[Path, int]:
    """Where the sidecar holds the third byte of an expert's first sum of down."""
    found = open_container(root).layers[layer]
    assert found.entry.sidecar is not None
    path = root / found.entry.sidecar
    entry = read_sidecar(path, found.header)["down", "row_sums"]
    return path, entry.offset + expert * entry.nbytes // len(found) + 2


@pytest.mark.skipif("avx512" not in native.available(), reason="other instruction sets need no row sums")
def test_a_flip_in_the_row_sums_in_a_map(damaged: Path, audited: Path) -> None:
    """(c) Mapped ones are not compared with a digest: the logits tell, and name layer and expert."""
    expert = used_expert(audited, 2)
    flip(*row_sum(damaged, 2, expert), bit=4)
    with native.forced("avx512"):
        audit = verify_logits(request(damaged, io="mmap", against=audited))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what, audit.difference.expert) == (2, "expert", expert)
    with native.forced("scalar"):  # reads none of them
        assert verify_logits(request(damaged, io="mmap", against=audited)).result == EQUAL


@pytest.mark.skipif("avx512" not in native.available(), reason="other instruction sets need no row sums")
def test_a_flip_in_the_row_sums_in_memory(
    workshop: Workshop, audited: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """(c) After their digest was checked nothing but the logits can tell; they do, and name layer and expert."""
    expert = used_expert(audited, 1)
    real = logits._streamed_model

    def broken(*arguments: Any) -> Any:
        model = real(*arguments)
        sums = model.context.store._reader._beside[1]
        changed = sums["gate_up", "row_sums"].array.copy()
        changed[expert, 7] ^= 1 << 20
        sums["gate_up", "row_sums"] = View(changed, "I32")
        return model

    monkeypatch.setattr(logits, "_streamed_model", broken)
    with native.forced("avx512"):
        audit = verify_logits(request(workshop.container("int8")))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what, audit.difference.expert) == (1, "expert", expert)


def test_a_flip_in_a_dense_tensor_on_disk(damaged: Path, way: str) -> None:
    """(d) The direct path and the reference side compare every dense file with its digest."""
    dense = next(damaged.glob("dense-*.safetensors"))
    flip(dense, dense.stat().st_size - 9)
    for io in ("direct", "mmap"):
        with pytest.raises(DataError, match=rf"{dense.name}.*E1205"):
            verify_logits(request(damaged, io=io))


@pytest.mark.parametrize(
    ("name", "layer", "what"),
    [
        ("model.layers.1.linear_attn.out_proj.weight", 1, "input"),
        ("model.layers.3.mlp.gate.weight", 3, "routing"),
        ("model.norm.weight", None, "logits"),
        ("lm_head.weight", None, "logits"),
    ],
)
def test_a_flip_in_a_dense_tensor_in_memory(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, name: str, layer: int | None, what: str, way: str
) -> None:
    """(d) The logits tell, and the first layer where anything differed is named."""
    real = logits._streamed_model

    def broken(*arguments: Any) -> Any:
        model = real(*arguments)
        model.model.get_parameter(name).view(torch.int16)[..., :3] ^= 0x0300
        return model

    monkeypatch.setattr(logits, "_streamed_model", broken)
    audit = verify_logits(request(workshop.container("int8")))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what) == (layer, what)
    assert audit.table(None)["prompts"][0]["streamed_sha256"]


# -- under a cap for everything ---------------------------------------------------------------------------------------


def test_under_a_cap(workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each side is planned before it runs: the other reads records anew, the streamed one has what the plan leaves."""
    directory, said = workshop.container("int8"), []
    audit = verify_logits(request(directory, steps=2, memory=6 << 30), said.append)
    assert audit.result == EQUAL and audit.reference is not None and audit.streamed is not None
    assert audit.reference.mode == "anew"
    plans = [text for text in said if text.startswith("memory: 6.00 GiB for everything")]
    assert len(plans) == 2 and all("a context of 66 tokens" in text for text in plans), said  # 64, and two steps
    with Session(directory, SessionOptions(memory=6 << 30, context=66)) as session:
        assert session.plan is not None and audit.streamed.budget == session.plan.cache_bytes
    sourced = verify_logits(request(directory, steps=2, memory=6 << 30, source=TINY), said.append)
    assert any(text.startswith("anew side: records encoded from the source anew") for text in said)
    assert sourced.result == EQUAL and "an expert of the source" in said[-3] and "an expert of" not in said[-2]
    held = verify_logits(request(directory, steps=2, memory=6 << 30, resident=True))
    assert held.reference is not None and held.reference.mode == "resident"
    assert [[s.sha256 for s in p] for p in held.reference.steps] == [
        [s.sha256 for s in p] for p in audit.reference.steps
    ]
    path = tmp_path / "audit.json"
    audit.write(path)
    assert command("verify-logits", directory, "--against", path, "--memory", "6GiB") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("memory: 6.00 GiB for everything, a context of 66 tokens") == 1  # a plan stands line by line
    assert sum(line.startswith("  interpreter and libraries ") for line in lines) == 1 and "streamed side ..." in lines


def test_what_each_side_is_planned_for(workshop: Workshop) -> None:
    """The logits of every token of a prompt at once; what a side that reads anew holds; the source where it is read."""
    directory = workshop.container("int8")
    with Session(directory, SessionOptions(memory=6 << 30)) as session:
        record, asked = largest_record(session.container), []

        def plan_for(**needs: Any) -> Any:
            asked.append(needs)
            return SimpleNamespace(text=lambda: "", cache_bytes=7)

        session.plan_for = plan_for  # type: ignore[method-assign]
        work = logits._Work([Prompt("a", (1, 2, 3)), Prompt("b", (1,))], 1, None)
        for way in ("resident", "anew", "direct", "mmap"):
            for source in (False, True):
                assert logits._planned(session, work, way, lambda _: None, source=source) == 7
    assert all(needs["prompt"] == needs["logits"] == 3 for needs in asked)
    assert [needs["io"] for needs in asked[::2]] == ["resident", "direct", "direct", "mmap"]
    held = [[line.nbytes for line in needs["extra"]] for needs in asked]
    encoder, ahead = logits.ENCODING * record, logits.AHEAD * record
    assert held == [[], [encoder], [ahead], [encoder, ahead], [], [encoder], [], [encoder]]


@pytest.mark.parametrize(("side", "way"), [(logits.resident_model, "direct"), (logits.anew_model, "anew")])
def test_dense_tensors_come_as_records_do(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, side: Callable[..., Any], way: str
) -> None:
    """The side that reads records by another path than the cache's reads dense tensors by that path too."""
    asked, real = [], host.load_dense

    def load_dense(container: Any, names: Any, mode: str, **how: Any) -> Any:
        asked.append(mode)
        return real(container, names, mode, **how)

    monkeypatch.setattr(host, "load_dense", load_dense)
    with Session(workshop.container("int8"), SessionOptions()) as session:
        side(session).close()
    assert asked == [way]


def test_a_cap_that_is_too_small(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the numbers before anything runs; and a budget beside it."""
    directory = workshop.container("int8")
    assert command("verify-logits", directory, "--memory", "64MiB") == 2
    err = capsys.readouterr().err
    assert "E1271" in err and "streamed side" not in err
    assert command("verify-logits", directory, "--memory", "6GiB", "--budget", "1MiB") == 2
    assert "E1273" in capsys.readouterr().err


GROUPS = Path("/sys/fs/cgroup/memory")
IN_A_GROUP = """
import os, pathlib, sys
(pathlib.Path(sys.argv.pop(1)) / "cgroup.procs").write_text(str(os.getpid()))
from pagestone.cli import main
main()
"""


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A control group of version 1, to be limited; skipped where nobody may make one."""
    place = GROUPS / f"pagestone-{os.getpid()}-{tmp_path.name}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups of version 1 can be made here: {error}")
    yield place
    for _ in range(100):
        with contextlib.suppress(OSError):
            place.rmdir()
            return
        time.sleep(0.05)


@pytest.mark.skipif(not LONG, reason="a container of 5 GB: PAGESTONE_LONG=1")
def test_in_a_quarter_of_the_container(big_path: Path, group: Path) -> None:
    """A group that holds a quarter of the container, page cache included and without swap: equal, and nothing killed.

    The side that keeps nothing takes at most 2.5 times as long as the streamed one.
    """
    source = GeneratedCheckpoint(layers=6, experts=256, vocabulary=4096)
    prepare(source, big_path / "c", encodings.get("int8"), workers=2, dense="int8")
    size = sum(f.stat().st_size for f in (big_path / "c").iterdir())
    cap = size // 4
    (group / "memory.limit_in_bytes").write_text(str(cap))
    with contextlib.suppress(OSError):  # where swap is not accounted there is none to forbid
        (group / "memory.memsw.limit_in_bytes").write_text(str(cap))
    words = ["verify-logits", big_path / "c", "--memory", str(cap * 100 // 105), "--json", "--steps", "8"]
    run = subprocess.run(
        [sys.executable, "-c", IN_A_GROUP, group, *words], capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    table = json.loads(run.stdout)
    kills = re.search(r"^oom_kill (\d+)", (group / "memory.oom_control").read_text(), re.MULTILINE)
    assert table["result"] == EQUAL and kills is not None and kills[1] == "0"
    assert table["resident"]["mode"] == "anew"
    ratio = table["resident"]["seconds"] / table["streamed"]["seconds"]
    print(f"{size / 1e9:.2f} GB in {cap / 2**20:.0f} MiB; anew {ratio:.2f} times as long as streamed")
    assert ratio < 2.5, ratio
