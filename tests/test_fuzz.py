"""Strangers' inputs, a minute of them: every reader takes a damaged file or refuses it by name, within its limits.

The cases are the same every time. `scripts/fuzz.py` runs any number of others; what it found stands below as itself.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kits import fuzz, mutate
from kits.fuzz import CASES, Bench, Fault, case, judged

from pagestone.convert.checkpoint import open_checkpoint
from pagestone.formats import encodings
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layer_file import read_layer_file
from pagestone.formats.manifest import read_manifest
from pagestone.reader.container import open_container
from pagestone.validate.fidelity import read_questions

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "fuzz.py"
EXAMPLES = {"header": 400, "codes": 150, "scales": 150, "lines": 150, "audit": 300, "traces": 100}
"""Cases of a kind; 40 of those that run commands. About a minute, a third of it the processor's."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("name", sorted(CASES))
def test_damaged_files(bench, name):
    @settings(
        max_examples=EXAMPLES.get(name, 40),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(st.integers(0, 2**32 - 1))
    def run(seed: int) -> None:
        try:
            case(bench, name, random.Random(seed))
        except Fault as fault:
            raise Fault(f"{fault}\n  repeat it: scripts/fuzz.py --kind {name!r} --seed {seed} --cases 1") from fault

    run()


# -- the judge can fail ------------------------------------------------------------------------------------------------


def test_faults_are_found(bench, monkeypatch):
    """An error that is not ours, one without a remedy, one without end; too much time, too much memory."""

    def raising(error: Exception):
        def call() -> None:
            raise error

        return call

    with pytest.raises(Fault, match="KeyError"):
        monkeypatch.setitem(CASES, "header", lambda *_: judged(raising(KeyError("a"))))
        case(bench, "header", random.Random(0))
    for error in (
        DataError("a", code="E0204"),
        DataError("a", code="x", remedy="r"),
        DataError("a", code="E0204", remedy="r" * fuzz.TEXT),
    ):
        with pytest.raises(Fault):
            judged(raising(error))
    judged(raising(DataError("a", code="E0204", remedy="r")))
    monkeypatch.setattr(fuzz, "CPU", 0.001)
    with pytest.raises(Fault, match="CPU"):
        judged(lambda: sum(range(5_000_000)))
    monkeypatch.setattr(fuzz, "MEMORY", 8 << 20)
    monkeypatch.setattr(fuzz, "CPU", 10)
    with pytest.raises(Fault, match="memory"):
        judged(lambda: bytearray(64 << 20))


def test_commands_are_judged(bench):
    assert fuzz.told("inspect", bench.container("int8"))[0] == 0
    assert fuzz.told("inspect", bench.root / "nothing")[0] == 2
    assert fuzz.told("verify", bench.container("int8"), "--source", bench.source)[0] == 0


def test_the_same_seed_is_the_same_damage(bench):
    data = (bench.source / "config.json").read_bytes()
    made = [mutate.damaged_json(random.Random(5), data) for _ in range(2)]
    assert made[0] == made[1]
    assert len({mutate.damaged_json(random.Random(n), data) for n in range(100)}) > 80


# -- what was found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_scales_that_are_no_numbers_decode_without_a_warning(codec):
    """An infinite scale over a zero code is NaN, and nothing is said on stderr about it."""
    maker = encodings.get(codec)
    stored = maker.allocate(128, 128)
    if "scales" in stored:
        stored["scales"][:] = np.inf if stored["scales"].dtype == np.float32 else 0x7F80
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = maker.values(stored, 128, 128)
        maker.matmul_definition(stored, np.full((1, 128), 0x3F80, np.uint16), 128, 128)
    assert np.isnan(values).all() == ("scales" in stored)


def test_names_longer_than_file_systems_take(bench):
    """A file of 256 bytes of name in an index or a manifest is refused by name, before the system is asked for it."""
    index, manifest = bench.source / "model.safetensors.index.json", bench.container("int8") / "manifest.json"
    for length, code in ((256, "E0406"), (255, "E0403"), (5000, "E0406")):
        name = ("é" * (length // 2)).ljust((length + 1) // 2, "x")
        assert len(name.encode()) == length
        text = index.read_text().replace("model-00001-of-00002.safetensors", name, 1)
        with fuzz._holding(index, text.encode()), pytest.raises(DataError) as caught:
            open_checkpoint(bench.source)
        assert caught.value.code == code
        text = manifest.read_text().replace('"tokenizer_config.json":', f'"{name}":')
        with fuzz._holding(manifest, fuzz._signed(text.encode(), whole=True)), pytest.raises(DataError) as caught:
            open_container(bench.container("int8"))
        assert caught.value.code == {"E0406": "E0306", "E0403": "E0332"}[code]


def test_megabytes_of_lists_take_little_memory(bench):
    """4 MB of lists within lists, in a config and in a manifest whose digests are right: refused before they unfold."""
    lists = '"extra":[' + "[[[]]]," * 600_000 + "1]"
    config = json.dumps(fuzz.SMALL.config())[:-1] + f",{lists}}}"
    manifest = bench.container("int8") / "manifest.json"
    source = manifest.read_text().replace('"source":{', f'"source":{{{lists},')
    for path, text in ((bench.source / "config.json", config), (manifest, source)):
        with fuzz._holding(path, text.encode()):
            code, _ = (
                fuzz.told("prepare-int8", bench.source, "--output", bench.root / "none", "--dry-run")
                if path.name == "config.json"
                else fuzz.told("inspect", path.parent)
            )
            assert code == 1


NUMBERS = ("9" * 5000, "1e999", "NaN", "[" * 5000, "1.0", '"1"', "[1]", "true", "-1", str(10**99))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n[:5])
def test_numbers_of_a_manifest_and_of_a_layer(bench, tmp_path, number):
    """Where an integer is meant there is one, or the file is refused by name in a few lines."""
    manifest = bench.container("q4") / "manifest.json"
    text = manifest.read_text().replace('"experts":2', f'"experts":{number}')
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_manifest(tmp_path / "manifest.json")
    assert caught.value.code in ("E0301", "E0303", "E0304") and len(str(caught.value)) < 1000
    header, data = mutate.split((bench.container("q4") / "layers-00.safetensors").read_bytes())
    table = json.loads(header)
    for key, value in (("experts", number), ("parameters", '{"group_size":' + number + "}")):
        changed = table | {"__metadata__": table["__metadata__"] | {f"pagestone.{key}": value}}
        (tmp_path / "layers-00.safetensors").write_bytes(mutate.joined(mutate.compact(changed).encode(), data))
        with pytest.raises(DataError) as caught:
            read_layer_file(tmp_path / "layers-00.safetensors")
        assert caught.value.code == "E0221" and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"question": ' + "9" * 5000 + ', "answer": 1}', '{"question": "a"}', "1"]
)
def test_questions_that_are_none(tmp_path, line):
    (tmp_path / "q").write_text(f'{{"question": "a?", "answer": "b"}}\n{line}\n')
    with pytest.raises(RequestError, match="line 2") as caught:
        read_questions(tmp_path / "q", None)
    assert caught.value.code == "E1312"


# -- the long run ------------------------------------------------------------------------------------------------------


def test_the_script_counts_and_goes_on(tmp_path):
    """A few cases, a few more where it stopped, and another job's state refused."""
    state = tmp_path / "state.json"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "--kind", "scales", "--workers", "1", "--state", str(state), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert run("--cases", "2").returncode == 0 and json.loads(state.read_bytes())["next"] == 2
    second = run("--cases", "5")
    assert second.returncode == 0 and "0 failed" in second.stdout and json.loads(state.read_bytes())["next"] == 5
    answers = re.findall(r"(?:ok|non-finite|E\d+) (\d+)", second.stdout)
    assert sum(map(int, answers)) == 3, "two of the five were done before"
    assert run("--cases", "9", "--seed", "1").returncode == 2
