"""The doctor: goes on after every problem, and foretells from what is really there."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kits.cli import pagestone
from kits.families import read_tensors, write_tensors
from kits.inference import TINY, Workshop, command
from kits.quantised import Fp8Spec

from pagestone.formats import encodings, native
from pagestone.formats.errors import RequestError
from pagestone.formats.manifest import read_manifest
from pagestone.formats.storage import DirectFile
from pagestone.reader import libraries
from pagestone.reader.budget import all_records, largest_record, row_sum_bytes
from pagestone.reader.container import open_container
from pagestone.reader.dense_costs import dense_costs
from pagestone.reader.memory import available_memory, group_room
from pagestone.reader.memory_plan import LIBRARIES
from pagestone.validate import doctor, examined, rates
from pagestone.validate.doctor import Report, diagnose
from pagestone.validate.examined import Findings, as_if, examine
from pagestone.validate.forecast import (
    CALL,
    EXPERT_CALLS,
    LAYER_CALLS,
    STATE_PASSES,
    Help,
    Rates,
    Work,
    arithmetic,
    best,
    faster_disk,
    forecast,
)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real measurements, but short ones."""
    monkeypatch.setattr(rates, "SECONDS", 0.001)
    monkeypatch.setattr(rates, "DISK_SECONDS", 0.02)
    for name in ("ROOM", "TORCH_ROOM"):
        monkeypatch.setattr(rates, name, 1 << 20)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a base installation."""

    def require(*packages: str) -> None:
        raise RequestError("torch is needed to run a model and is not installed", code="E1220", remedy="install it")

    monkeypatch.setattr(libraries, "require", require)
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails


def codes(report: Report) -> list[str]:
    return [f.code for f in report.findings]


def assert_rest(report: Report) -> None:
    """What does not depend on the directory is there, in the text too."""
    assert report.processor.kernels in report.processor.possible and report.memory.total > 0
    text = report.text()
    assert "processor:" in text and "memory:" in text and "disk:" in text
    for finding in report.findings:
        assert finding.code in text and finding.what and finding.remedy, finding
    assert json.loads(json.dumps(report.table()))["findings"] == [f.table() for f in report.findings]


# -- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("codec", ["int8", "q4"])
def test_a_container(workshop: Workshop, codec: str) -> None:
    """Its own records are read, its own plan is made, and the forecast is for this cap, half and double."""
    path = workshop.container(codec)
    report = diagnose(path, 6 * GIB)
    container = open_container(path)
    assert codes(report) == [] and report.exit_code == 0 and report.kind == "container"
    assert report.plan is not None and report.plan.cap == 6 * GIB and report.plan.records == all_records(container)
    libraries_known = {line.name: line.known for line in report.plan.lines}["interpreter and libraries"]
    assert libraries_known == ("estimated" if report.processor.torch is None else "measured")
    assert report.plan.line("tokenizer") > 0 and report.plan.line("row sums of experts") == row_sum_bytes(container)
    assert report.disk is not None and report.rates is not None and report.rates.disk == report.disk.rate
    assert report.disk.size == largest_record(container)
    assert [(row.codec, row.cap) for row in report.rows] == [(codec, 6 * GIB), (codec, 6 * GIB // 2), (codec, 12 * GIB)]
    for row in report.rows:
        assert row.token is not None and row.token.work.held == 1 and row.token.reading == 0
        assert row.token.work.record == largest_record(container) and row.token.work.chosen == 4
    assert report.conversions == []
    table = report.table()
    assert table["processor"]["kernels"] == native.isa() and table["disk"]["mode"] in ("direct", "buffered")
    assert table["memory"]["plan"]["lines"] and set(table["products"]) == set(encodings.registry())
    assert_rest(report)


@pytest.mark.usefixtures("brief")
def test_a_checkpoint(workshop: Workshop) -> None:
    """Every codec at every cap, and what conversion would take: bytes as they really become."""
    report = diagnose(TINY, 6 * GIB)
    assert report.kind == "checkpoint" and codes(report) == []
    names = set(encodings.registry())
    assert {(row.codec, row.cap) for row in report.rows} == {(n, c * GIB) for n in names for c in (3, 6, 12)}
    made = {c.codec: c for c in report.conversions}
    assert set(made) == names
    for name in ("int8", "q4"):
        files = open_container(workshop.container(name)).manifest.files
        tensors = sum(f.nbytes for n, f in files.items() if n.endswith(".safetensors") and "rowsum" not in n)
        assert made[name].bytes_out == tensors
        assert made[name].room and made[name].seconds == max(made[name].encoding, made[name].moving or 0) > 0
    assert report.disk is not None
    for row in made.values():
        assert row.moving == pytest.approx((row.bytes_in + row.bytes_out) / report.disk.rate)
    assert_rest(report)


def test_as_if_is_what_conversion_makes(workshop: Workshop) -> None:
    """Sizes of a codec that was not made, from a checkpoint and from another container: those of the container."""
    for start in (TINY, workshop.container("q4")):
        known = examine(start, Findings())
        assert known.container is not None
        for name in ("bf16", "int8", "q4"):
            real, made = open_container(workshop.container(name)), as_if(known.container, encodings.get(name))
            assert all_records(made) == all_records(real) and largest_record(made) == largest_record(real)
            assert row_sum_bytes(made) == row_sum_bytes(real), name
            assert dense_costs(made) == dense_costs(real)
            assert known.work(made, MIB) == examine(workshop.container(name), Findings()).work(real, MIB)


def test_layers_without_experts_are_called_too(workshop: Workshop) -> None:
    """The calls of a token are those of all layers of the config, its experts those of layers that have any."""
    known = examine(workshop.container("int8"), Findings())
    assert known.container is not None and known.depth == len(known.container.layers)
    known.__dict__["depth"] = known.depth + 3
    work = known.work(known.container, MIB)
    assert (work.depth, work.layers) == (known.depth, len(known.container.layers))


@pytest.mark.parametrize("word", ["int8", "q4"])
def test_dense_as_if(workshop: Workshop, word: str) -> None:
    """What --dense would make of the dense matrices: as many bytes as in a container that has it."""
    plain = examine(workshop.container("int8"), Findings())
    there = examine(workshop.container("int8", dense=word), Findings())
    assert plain.container is not None and there.container is not None
    work = plain.work(plain.container, MIB)
    changed, real = plain.with_dense(work, word), there.work(there.container, MIB)
    assert changed is not None and changed.encoded == real.encoded > 0 and changed.dense == word == real.dense
    assert changed.plain == pytest.approx(real.plain, rel=0.01) and changed.plain < work.plain
    assert changed.cached == min(work.records, work.cached + work.plain - changed.plain - changed.encoded)
    assert there.with_dense(real, "q4") is None, "encoded already"
    assert plain.with_dense(work, "keep") is None


def other_sources(workshop: Workshop, to: Path, what: str) -> Path:
    """tiny-moe without a head, which is tied to the table; or with FP8 codes in its dense matrices."""
    spec = Fp8Spec(hidden=256)
    if what == "codes":
        return spec.write(to)
    shutil.copytree(TINY, to, ignore=shutil.ignore_patterns("model*"))
    write_tensors(to / "model.safetensors", {n: t for n, t in read_tensors(TINY).items() if n != "lm_head.weight"})
    config = json.loads((TINY / "config.json").read_bytes())
    for place in (config, config["text_config"]):
        place["tie_word_embeddings"] = what == "tied"
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("what", ["tied", "headless", "codes"])
def test_dense_as_if_of_others(workshop: Workshop, tmp_path: Path, what: str) -> None:
    """The head that is made of the table counts, if it is tied; of FP8 codes what they are decoded to."""
    source = other_sources(workshop, tmp_path / "source", what)
    codec = "fp8" if what == "codes" else "bf16"
    plain = examine(workshop.container(codec, source), Findings())
    there = examine(workshop.container(codec, source, "int8"), Findings())
    assert plain.container is not None and there.container is not None
    changed = plain.with_dense(plain.work(plain.container, MIB), "int8")
    real = there.work(there.container, MIB)
    assert changed is not None and changed.encoded == real.encoded > 0
    assert changed.plain == pytest.approx(real.plain, rel=0.02)
    assert there.with_dense(real, "q4") is None, "encoded already, though a table is there"


@pytest.mark.usefixtures("brief")
def test_a_cap_that_misses(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half the records in memory the disk counts, and more memory helps."""
    path = workshop.container("int8")
    records = all_records(open_container(path))
    plan = diagnose(path, 6 * GIB).plan
    assert plan is not None
    real = doctor._plan

    def small(held: Any, container: Any, cap: int) -> Any:
        found = real(held, container, 6 * GIB)
        object.__setattr__(found, "cache_bytes", int(records * min(1, cap / (12 * GIB))))
        return found

    monkeypatch.setattr(doctor, "_plan", small)
    slow = rates.DiskRate(1e4, "direct", MIB, 9, 0.1, 2)
    monkeypatch.setattr(doctor, "disk_rate", lambda files, size: slow)
    report = diagnose(path, 6 * GIB)
    now, half, double = (row.token for row in report.rows)
    assert now is not None and half is not None and double is not None and report.rates is not None
    assert now.work.held == pytest.approx(0.5) and now.reading == pytest.approx(now.work.used / 2 / report.rates.disk)
    assert half.seconds > now.seconds > double.seconds and double.reading == 0
    assert "--memory 12.00 GiB" in [h.what for h in report.helps] and "a disk 2 times as fast" in report.text()
    assert [h.token.per_second for h in report.helps] == sorted(
        (h.token.per_second for h in report.helps), reverse=True
    )


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("brief")
class TestGoesOn:
    """After each problem the rest is said."""

    def test_no_torch(self, workshop: Workshop, without_torch: None) -> None:
        report = diagnose(workshop.container("int8"), 6 * GIB)
        assert codes(report) == ["E1220"] and report.exit_code == 0 and report.findings[0].severity == "warning"
        assert report.processor.torch is None and report.rates is not None and report.rates.call == CALL
        assert report.rates.linear == report.rates.products["bf16"]
        assert report.plan is not None and all(row.token for row in report.rows if row.cap >= 6 * GIB)
        assert "torch is not installed" in report.text()
        assert_rest(report)

    def test_a_broken_torch(self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "require", lambda *_: None)
        monkeypatch.setitem(sys.modules, "torch", None)
        report = diagnose(workshop.container("int8"), 6 * GIB)
        assert codes(report) == ["E1346"] and report.exit_code == 2 and report.plan is not None
        assert_rest(report)

    @pytest.mark.parametrize("text", [b"{}", b"", b"\xff"])
    def test_a_broken_manifest(self, workshop: Workshop, tmp_path: Path, text: bytes) -> None:
        path = workshop.copy("int8", tmp_path / "c")
        (path / "manifest.json").write_bytes(text)
        report = diagnose(path, 6 * GIB)
        assert codes(report)[0].startswith("E03") and report.exit_code == 1 and report.plan is None
        assert report.disk is not None and report.disk.reads > 0, "files are there, whatever the manifest says"
        assert_rest(report)

    def test_files_that_are_missing(self, workshop: Workshop, tmp_path: Path) -> None:
        """Every layer that cannot be opened is named, not the first alone."""
        path = workshop.copy("int8", tmp_path / "c")
        files = [layer.path.name for layer in open_container(path).layers.values()]
        for name in files[:2]:
            (path / name).unlink()
        report = diagnose(path, 6 * GIB)
        told = " ".join(f.what for f in report.findings)
        assert "E0332" in codes(report) and all(name in told for name in files[:2])
        assert report.exit_code != 0 and report.disk is not None
        assert_rest(report)

    def test_a_side_file_that_was_changed(self, workshop: Workshop, tmp_path: Path) -> None:
        """What run would refuse is a finding; sizes are known all the same, and so is the forecast."""
        path = workshop.copy("int8", tmp_path / "c")
        text = (path / "generation_config.json").read_bytes()
        (path / "generation_config.json").write_bytes(text[:-1] + b" ")
        report = diagnose(path, 6 * GIB)
        assert codes(report) == ["E1216"] and report.exit_code == 1
        assert report.plan is not None and report.rows[0].token is not None
        assert_rest(report)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        path = tmp_path / "c"
        shutil.copytree(TINY, path, ignore=shutil.ignore_patterns("tokenizer*"))
        report = diagnose(path, 6 * GIB)
        assert codes(report) == ["E1230"] and report.exit_code == 0 and report.plan is not None
        assert_rest(report)

    def test_a_codec_that_cannot_hold_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Experts of columns that make no groups: said of each codec, and the others are foretold."""
        real = doctor.product_rate
        monkeypatch.setattr(doctor, "product_rate", lambda c, rows, columns, n: real(c, rows, columns - 8, n))
        report = diagnose(TINY, 6 * GIB)
        assert set(codes(report)) == {"W1348"} and report.exit_code == 0
        grouped = {name for name in encodings.registry() if name.startswith("q")}
        assert len(report.findings) == len(grouped)
        assert {row.codec for row in report.rows} == set(encodings.registry()) - grouped
        assert_rest(report)

    def test_a_model_that_cannot_be_run(self, workshop: Workshop, tmp_path: Path, oracle: Callable[[str], Any]) -> None:
        """The libraries refuse the config: said, and sizes are foretold all the same."""
        oracle("torch")
        oracle("transformers")
        source = tmp_path / "s"
        shutil.copytree(TINY, source)
        config = json.loads((source / "config.json").read_text())
        text = config.get("text_config", config)
        text["hidden_act"] = "nothing known"
        (source / "config.json").write_text(json.dumps(config))
        report = diagnose(workshop.container("int8", source), 6 * GIB)
        assert codes(report) == ["E1225"] and report.exit_code == 2 and report.plan is not None
        assert report.rows[0].token is not None
        assert_rest(report)

    def test_a_cap_that_is_too_small(self, workshop: Workshop) -> None:
        report = diagnose(workshop.container("int8"), 300 * MIB)
        assert codes(report) == ["E1271"] and report.exit_code == 2 and report.plan is None
        assert [row.token is None for row in report.rows] == [True, True, False] or report.rows[2].token is None
        assert "at least" in report.rows[0].refused and report.disk is not None
        assert_rest(report)

    def test_a_cap_in_which_the_tokenizer_is_not_loaded(
        self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch, without_torch: None
    ) -> None:
        """What run would refuse is foretold: loading takes more than the tokenizer does later."""
        monkeypatch.setattr(examined, "loading_bytes", lambda root, process: process + 3 * GIB)
        report = diagnose(workshop.container("int8"), 3 * GIB)
        assert codes(report) == ["E1220", "E1271"] and "while the tokenizer is loaded" in report.findings[1].what
        (row,) = (row for row in report.rows if row.cap == 6 * GIB)
        assert row.token is not None and f"{3 * GIB + LIBRARIES:,} bytes" in report.findings[1].what

    def test_more_than_is_free(self, workshop: Workshop) -> None:
        asked = 2 * (available_memory() or 0)
        report = diagnose(workshop.container("int8"), asked)
        assert codes(report) == ["W1341"] and report.plan is not None and report.memory.cap == asked
        assert_rest(report)

    def test_without_memory_what_is_free_counts(self, workshop: Workshop) -> None:
        report = diagnose(workshop.container("int8"))
        assert report.memory.cap == report.memory.available and not report.memory.asked
        assert "what is free" in report.text()

    def test_a_checkpoint_that_cannot_be_planned(self, tmp_path: Path) -> None:
        path = tmp_path / "c"
        shutil.copytree(TINY, path)
        shard = sorted(path.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-1])
        report = diagnose(path, 6 * GIB)
        assert report.exit_code == 1 and shard.name in report.findings[0].what and report.disk is not None
        assert_rest(report)

    @pytest.mark.usefixtures("without_torch")
    def test_a_checkpoint_with_many_faults(self, tmp_path: Path) -> None:
        """Shards that are missing and one that is short, the tokenizer, the disk and memory: all is said at once."""
        path = tmp_path / "c"
        shutil.copytree(TINY, path)
        shards = sorted(path.glob("*.safetensors"))
        for gone in (shards[0], shards[4]):
            gone.unlink()
        shards[2].write_bytes(shards[2].read_bytes()[:-1])
        (path / "tokenizer.json").write_text("{")
        report = diagnose(path, 6 * GIB)
        assert [(f.code, Path(f.what.partition(": ")[0]).name) for f in report.findings if f.severity == "error"] == [
            ("E0403", shards[0].name), ("E0212", shards[2].name), ("E0403", shards[4].name), ("E1237", "tokenizer.json")
        ]  # fmt: skip
        assert report.exit_code == 1 and report.disk is not None and report.memory.cap == 6 * GIB
        assert_rest(report)

    def test_many_shards_are_missing(self, tmp_path: Path) -> None:
        """The first of them one by one, and how many more: half a download has hundreds."""
        shutil.copytree(TINY, tmp_path / "c", ignore=shutil.ignore_patterns("*.safetensors"))
        table = {"weight_map": {f"t{n}": f"m-{n:02}.safetensors" for n in range(30)}}
        (tmp_path / "c/model.safetensors.index.json").write_text(json.dumps(table))
        report = diagnose(tmp_path / "c", 6 * GIB)
        told = [f for f in report.findings if f.code == "E0403"]
        assert len(told) == 9 and "m-07" in told[7].what and told[8].what.startswith("and 22 more")
        assert "m-08" in told[8].what and told[8].remedy and told[8].exit_code == 1

    @pytest.mark.parametrize("dense", ["keep", "q4"])
    def test_a_file_that_is_missing_is_told_of_once(self, workshop: Workshop, tmp_path: Path, dense: str) -> None:
        path = workshop.copy("int8", tmp_path / "c", dense)
        for file in (*path.glob("matrices-*"), *path.glob("dense-*"), *path.glob("layers-01*"), path / "README.md"):
            file.unlink()
        report = diagnose(path, 6 * GIB)
        lost = [f.what.partition(": ")[0] for f in report.findings]
        assert codes(report) == ["E0332"] * len(lost) and len(set(lost)) == len(lost)
        assert len(lost) == len(read_manifest(path / "manifest.json").files.keys() - {p.name for p in path.iterdir()})
        assert report.plan is None and report.disk is not None
        assert_rest(report)

    def test_a_side_file_that_is_missing(self, workshop: Workshop, tmp_path: Path) -> None:
        """Sizes are known all the same."""
        path = workshop.copy("int8", tmp_path / "c")
        (path / "README.md").unlink()
        report = diagnose(path, 6 * GIB)
        assert codes(report) == ["E0332"] and report.plan is not None and report.rows[0].token is not None

    def test_a_tokenizer_that_is_broken(self, workshop: Workshop, tmp_path: Path) -> None:
        """Of a checkpoint it is said, and all is foretold; of a container that its file was changed, and no more."""
        path = tmp_path / "s"
        shutil.copytree(TINY, path)
        (path / "tokenizer_config.json").write_text('{"added_tokens_decoder": 3}')
        report = diagnose(path, 6 * GIB)
        assert codes(report) == ["E1237"] and report.exit_code == 1 and report.rows
        assert "tokenizer_config.json" in report.findings[0].what
        copy = workshop.copy("int8", tmp_path / "c")
        (copy / "tokenizer.json").write_text("{")
        assert codes(diagnose(copy, 6 * GIB))[-1:] == ["E0333"]

    def test_holes(self, tmp_path: Path) -> None:
        """A file with holes is on no disk; the others are measured."""
        path = tmp_path / "c"
        shutil.copytree(TINY, path)
        shard = sorted(path.glob("*.safetensors"))[0]
        head, size = shard.read_bytes()[: 64 << 10], shard.stat().st_size
        shard.write_bytes(head)
        os.truncate(shard, size)
        report = diagnose(path, 6 * GIB)
        assert codes(report) == ["W1343"] and shard.name in report.findings[0].what and report.disk is not None
        assert_rest(report)

    def test_no_direct_reads(self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rates, "DirectFile", lambda path: DirectFile(path, direct=False))
        report = diagnose(workshop.container("int8"), 6 * GIB)
        assert codes(report) == ["W1342"] and report.disk is not None and report.disk.mode == "buffered"
        assert "through the page cache" in report.text()
        assert_rest(report)

    def test_slow_kernels(self, workshop: Workshop) -> None:
        with native.forced(native.NUMPY):
            report = diagnose(workshop.container("int8"), 6 * GIB)
        assert "W1340" in codes(report) or native.available() == (native.NUMPY,)
        assert report.processor.kernels == native.NUMPY and report.rows[0].token is not None
        assert_rest(report)

    def test_an_isa_that_is_not_there(self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_current", None)
        monkeypatch.setenv(native.VARIABLE, "mmx")
        report = diagnose(workshop.container("int8"), 6 * GIB)
        assert codes(report)[0] == "E0111" and report.exit_code == 2 and report.rows[0].token is not None
        assert_rest(report)

    def test_no_room_for_a_container(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "disk_space", lambda path: 11 * MIB)
        report = diagnose(TINY, 6 * GIB)
        rooms = {c.codec: c.room for c in report.conversions}
        assert codes(report) == ["W1349"] and rooms["q4"] and not rooms["bf16"] and "bf16" in report.findings[0].what
        assert_rest(report)

    def test_neither(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing", tmp_path):
            report = diagnose(path, 6 * GIB)
            assert codes(report)[0] == "E0331" and report.exit_code == 2 and report.kind == "neither"
            assert "or a checkpoint with config.json" in report.findings[0].what, "which would do as well"
            assert "config.json and .safetensors" in report.findings[0].remedy and "E1230" not in codes(report)
            assert_rest(report)

    def test_a_file_that_cannot_be_read(self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        real = doctor.has_holes

        def refuse(path: Path) -> bool:
            if "layers-0." in path.name or path.name.startswith("layers-00"):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(doctor, "has_holes", refuse)
        report = diagnose(workshop.container("int8"), 6 * GIB)
        assert codes(report) == ["E1031"] and report.exit_code == 3 and report.disk is not None
        assert_rest(report)


# -- measurements -----------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._lock = 0.0, threading.Lock()
        monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def work(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


def test_the_rate_of_a_disk_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives so many bytes a second, to all readers together, is measured so; a slow one in small pieces."""
    path = tmp_path / "f"
    path.write_bytes(bytes(8 * MIB))
    clock, speed = Clock(monkeypatch), 0.0

    def slowly(self: DirectFile, target: memoryview, offset: int) -> int:
        clock.work(len(target) / speed)
        return len(target)

    monkeypatch.setattr(DirectFile, "read_into", slowly)
    for speed in (400e6, 20e6, 8e6, 1e6):
        found = rates.disk_rate([path], 3 * MIB, seconds=0.3)
        assert found is not None and found.rate == pytest.approx(speed, rel=0.01), (speed, found)
        assert found.seconds < 0.6 or found.reads == 1, "no read of a third of the time"
    assert found is not None and found.reads == 1, "a disk of a megabyte a second is asked once"
    (tmp_path / "g").write_bytes(b"x")
    assert rates.disk_rate([tmp_path / "g"], MIB) is None, "less than a page"


def test_reads_stay_within_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of pages and a bit, records larger than one: nothing beyond the last whole page is asked for."""
    for number, size in enumerate((4096, 5000, 3 * 4096)):
        (tmp_path / str(number)).write_bytes(os.urandom(size))
    real = DirectFile.read_into

    def within(self: DirectFile, target: memoryview, offset: int) -> int:
        got = real(self, target, offset)
        assert offset % 4096 == 0 and got == len(target), (self.path, offset)
        ends.add(offset + got)
        return got

    ends: set[int] = set()
    monkeypatch.setattr(DirectFile, "read_into", within)
    found = rates.disk_rate(sorted(tmp_path.iterdir()), 4 * 4096, seconds=0.02)
    assert found is not None and found.reads > 0 and 4096 <= found.size <= 3 * 4096 and max(ends) <= 3 * 4096
    ends.clear()
    monkeypatch.setattr(rates.random, "randrange", lambda places: places - 1)
    rates.disk_rate([tmp_path / "2"], 4096, seconds=0.02)
    assert ends == {3 * 4096}, "the last page is one of the places"


@pytest.mark.parametrize("direct", [True, False])
def test_what_the_page_cache_holds_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Where reads go through it: else memory would be measured."""
    (tmp_path / "f").write_bytes(bytes(3 * 4096 + 1))
    forgotten: list[int] = []
    opened = DirectFile(tmp_path / "f", direct=direct)
    mode = opened.mode
    opened.close()
    monkeypatch.setattr(rates, "DirectFile", lambda path: DirectFile(path, direct=direct))
    monkeypatch.setattr(DirectFile, "forget", lambda self, nbytes: forgotten.append(nbytes))
    found = rates.disk_rate([tmp_path / "f"], 4096, seconds=0.02)
    assert found is not None and found.mode == mode
    assert forgotten == ([3 * 4096] if mode == "buffered" else [])


def test_rates_of_arithmetic() -> None:
    """Products and encoders go at some speed, and twice the work takes twice as long."""
    for name in encodings.registry():
        codec = encodings.get(name)
        assert 1e6 < rates.encode_rate(codec, 128, 256) < 1e12 and 1e6 < rates.product_rate(codec, 128, 256, 1) < 1e12


def test_repeated_work_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of calls, without the first, which warms up; one that takes long is not done again."""
    clock, took = Clock(monkeypatch), iter([0.07, *[0.002, 0.006] * 99])
    assert rates.repeated(lambda: clock.work(next(took))) == pytest.approx(0.004, rel=0.05)
    calls: list[None] = []

    def long() -> None:
        calls.append(clock.work(1.0))

    assert rates.repeated(long) == pytest.approx(1.0) and len(calls) == 1


def test_the_groups_room(tmp_path: Path) -> None:
    """What control groups leave, apart from what the machine has."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1000 kB\n")
    assert group_room(tmp_path) is None and available_memory(tmp_path) == 1024000
    group = tmp_path / "sys/fs/cgroup/g"
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/g\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    for limit, room in ((500_000, 400_000), (5_000_000, 4_900_000)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("100000\n")
        assert group_room(tmp_path) == room and available_memory(tmp_path) == min(room, 1024000)


# -- arithmetic -------------------------------------------------------------------------------------------------------

WORK = Work(
    codec="int8", layers=2, depth=3, chosen=4, record=MIB, records=64 * MIB, plain=100 * MIB, cached=16 * MIB,
    state=MIB, encoded=10 * MIB, dense="q4",
)  # fmt: skip
RATES = Rates({"int8": 1000 * MIB, "q4": 500 * MIB}, linear=2000 * MIB, disk=50 * MIB, call=1e-6)


def test_a_forecast_by_hand() -> None:
    """Every part of a token, and the sum."""
    token = forecast(WORK, RATES)
    assert (WORK.used, WORK.held, WORK.missed) == (8 * MIB, 0.25, 6 * MIB)
    assert token.dense == pytest.approx((100 + STATE_PASSES) / 2000 + 10 / 500)
    assert token.calls == pytest.approx(3 * LAYER_CALLS * 1e-6)
    assert token.multiplying == pytest.approx(8 / 1000 + 8 * EXPERT_CALLS * 1e-6)
    assert token.reading == pytest.approx(6 / 50) and token.reading > token.multiplying
    assert token.last == pytest.approx(0.75 * token.multiplying / 4)
    assert token.seconds == pytest.approx(token.dense + token.calls + token.reading + token.last)
    assert token.per_second == pytest.approx(1 / token.seconds)
    text = " ".join(arithmetic(token, RATES))
    for said in ("75.0 % of 8.00 MiB", "50.00 MiB/s", "2 layers x 4 experts", f"{1000 * token.seconds:.1f} ms"):
        assert said in text


def test_products_count_where_they_take_longer() -> None:
    """Reads that are done before the products are hidden behind them, but for the last expert."""
    token = forecast(WORK, replace(RATES, disk=50 * GIB))
    assert token.seconds == pytest.approx(token.dense + token.calls + token.multiplying + token.last)
    held = forecast(replace(WORK, cached=64 * MIB), RATES)
    assert held.reading == 0 and held.last == 0


def test_a_disk_not_known() -> None:
    """Nothing is foretold of reads at no rate; without reads it is."""
    unknown = replace(RATES, disk=None)
    token = forecast(WORK, unknown)
    assert token.reading is None and token.seconds is None and token.per_second is None
    assert "not known" in arithmetic(token, unknown)[-1] and best(token, [faster_disk(WORK, RATES)]) == []
    assert forecast(replace(WORK, cached=WORK.records), unknown).per_second is not None


def test_what_helps_comes_first() -> None:
    """The most helpful change first, what helps nothing not at all."""
    now = forecast(WORK, RATES)
    disk = faster_disk(WORK, RATES)
    assert disk.token.reading == pytest.approx(now.reading / 2 if now.reading else 0)
    more = Help("more", forecast(replace(WORK, cached=WORK.records), RATES))
    assert [h.what for h in best(now, [Help("same", now), disk, more])] == ["more", "a disk 2 times as fast"]
    assert now.per_second is not None
    little, enough = (SimpleNamespace(per_second=share * now.per_second) for share in (1.01, 1.03))
    changes = [Help("little", little), Help("enough", enough)]  # type: ignore[arg-type]
    assert [h.what for h in best(now, changes)] == ["enough"], "one in a hundred is no help"


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("brief")
def test_the_command(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """Results on stdout, in words or as JSON; exit codes of the findings."""
    path = workshop.container("int8")
    assert command("doctor", path, "--memory", "6GiB", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["kind"] == "container" and table["memory"]["cap"] == 6 * GIB and table["findings"] == []
    assert command("doctor", path, "--memory", "much") == 2
    assert "E1241" in capsys.readouterr().err
    assert command("doctor", path, "--memory", "200MiB") == 2
    out, err = capsys.readouterr()
    assert "E1271" in out and "what to do: give --memory" in out and err == ""


def test_little_of_the_processor(tmp_path: Path, oracle: Callable[[str], Any]) -> None:
    """At most five CPU seconds, torch and all, on a checkpoint of 22,213 tensors, of which 200 MB are no holes."""
    for name in ("torch", "transformers"):
        oracle(name)
    root = tmp_path / "sparse"
    subprocess.run([sys.executable, str(SCRIPTS / "make_sparse.py"), str(root)], check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = pagestone("doctor", root, "--memory", "8GiB", "--json", env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    table = json.loads(result.stdout)
    assert table["kind"] == "checkpoint" and {f["code"] for f in table["findings"]} >= {"W1343", "W1344", "W1345"}
    assert len(table["forecast"]) == 3 * len(encodings.registry()) and table["disk"] is None
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime <= 5.0
