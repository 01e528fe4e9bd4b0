"""A running model is what its protocol says, whoever computes it: here a host that is none of ours, without torch."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kits.conversions import prepare
from kits.hosts import SumModel, Sums
from kits.inference import Workshop, flip

from pagestone.formats import encodings
from pagestone.formats.errors import RequestError
from pagestone.reader import hosts, session
from pagestone.reader.container import open_container
from pagestone.reader.errors import ClosedError
from pagestone.reader.hosts.transformers import TransformersModel
from pagestone.reader.model import (
    BOTH,
    KEYS_AND_VALUES,
    RECURRENT,
    Loading,
    Model,
    bytes_of,
    greedy,
    values_of,
)
from pagestone.reader.session import Session, SessionOptions
from pagestone.validate import logits, virtual
from pagestone.validate.audit import DIFFERENT, EQUAL, NOT_COMPARABLE
from pagestone.validate.logits import LogitsRequest, verify_logits

BUDGET = 7 * 102_400


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="session")
def directory(workshop: Workshop) -> Path:
    return workshop.container("int8")


@pytest.fixture
def sums() -> Iterator[Sums]:
    """The host, known by its name."""
    host = Sums()
    with hosts.registered(host):
        yield host


def request(directory: Path, **how: Any) -> LogitsRequest:
    return LogitsRequest(directory, **({"steps": 2, "host": "sums"} | how))


# -- the registry and the protocol ------------------------------------------------------------------------------------


def test_hosts_by_name(sums: Sums) -> None:
    """One file each; a host of another package is one more for as long as it is registered; others are E1291."""
    assert set(hosts.registry()) == {"transformers", "sums"} and hosts.get("sums") is sums
    assert hosts.get(hosts.DEFAULT).name == "transformers" == SessionOptions().host
    with pytest.raises(ValueError, match="already"), hosts.registered(sums):
        pass
    with pytest.raises(RequestError, match=r"a host of sums, transformers expected, found 'jax'.*E1291"):
        hosts.get("jax")


def test_a_host_goes_away_with_its_block() -> None:
    """Also after an error."""
    with pytest.raises(KeyError), hosts.registered(Sums()):
        raise KeyError
    assert set(hosts.registry()) == {"transformers"}


@pytest.mark.parametrize("kind", [TransformersModel, SumModel])
def test_models_are_models(kind: type) -> None:
    """Every method of the protocol, with its parameters; every attribute."""
    for name, wanted in vars(Model).items():
        if name.startswith("_"):
            continue
        assert hasattr(kind, name) or name in kind.__annotations__, name
        if inspect.isfunction(wanted):
            assert list(inspect.signature(getattr(kind, name)).parameters) == list(inspect.signature(wanted).parameters)
    for name in Model.__annotations__:
        assert name in kind.__annotations__, name


def test_the_device(directory: Path, sums: Sums) -> None:
    """It reaches the context; what was not tested is refused (E1290) before anything is opened for it."""
    with Session(directory, SessionOptions("mmap", host="sums")) as opened:
        assert opened.model.context.device == "cpu" == opened.loading.device
    with pytest.raises(RequestError, match=r"found 'cuda': .*E1290"):
        Session(directory / "nowhere", SessionOptions(host="sums", device="cuda"))
    with pytest.raises(RequestError, match=r"found 'cuda': .*E1290"):
        Loading(device="cuda")
    with pytest.raises(RequestError, match="E1244"):
        Loading("other")


def test_logits_of_either_library(oracle: Callable[[str], ModuleType]) -> None:
    """Values, bytes and choice of the same logits are the same, whether torch or NumPy holds them."""
    torch = oracle("torch")
    row = np.float32([[0.5, -2.0, 3.0, 3.0], [1.5, 0.25, -1.0, 1.5]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.from_numpy(row).to(dtype)
        assert np.array_equal(values_of(tensor), row), dtype
        assert values_of(tensor).dtype == (np.float64 if dtype == torch.float64 else np.float32)
        assert len(bytes_of(tensor)) == 8 * tensor.element_size() and greedy(tensor) == 0
    assert bytes_of(torch.from_numpy(row)) == bytes_of(row) == row.tobytes()
    assert bytes_of(torch.from_numpy(row).t()) == bytes_of(row.T) == row.T.copy().tobytes(), "row-major"
    assert values_of(row) is row and greedy(row) == 0 and greedy(row[:1]) == 2
    exact = torch.tensor([[1 + 2**-40]], dtype=torch.float64)
    assert values_of(exact)[0, 0] == 1 + 2**-40


def test_kinds_of_state() -> None:
    """By what the layers of a config keep; a config that says nothing has attention everywhere."""

    class Config:
        def __init__(self, *kinds: str) -> None:
            if kinds:
                self.layer_types = list(kinds)

    for kinds, expected in (
        ((), KEYS_AND_VALUES), (("full_attention", "sliding_attention"), KEYS_AND_VALUES),
        (("linear_attention", "full_attention"), BOTH), (("linear_attention",), RECURRENT),
    ):  # fmt: skip
        made = TransformersModel(None, None, Config(*kinds), None, "eager")  # type: ignore[arg-type]
        assert made.state_kind == expected


# -- the session ------------------------------------------------------------------------------------------------------


def test_everything_is_opened_once(directory: Path, sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    """One container, one tokenizer, one store, one model, however often they are asked for; all closed at the end."""
    opened: list[str] = []
    for name in ("open_to_run", "open_tokenizer", "open_store"):
        real = getattr(session, name)

        def counted(*a: Any, real: Any = real, name: str = name, **k: Any) -> Any:
            opened.append(name)
            return real(*a, **k)

        monkeypatch.setattr(session, name, counted)
    monkeypatch.setattr(session, "open_tokenizer", lambda *a: opened.append("open_tokenizer"))
    with Session(directory, SessionOptions(budget=BUDGET, host="sums")) as one:
        assert opened == ["open_to_run"] and not sums.made, "a model is loaded when it is asked for"
        assert one.vocabulary == 1024 and not sums.made
        for _ in range(2):
            assert one.tokenizer is None and one.model is sums.made[0] and one.store is one.model.context.store
        assert opened == ["open_to_run", "open_tokenizer", "open_store"] and len(sums.made) == 1
        assert one.store.budget == BUDGET and one.container.container_id  # type: ignore[attr-defined]
    for use in (lambda: one.model, lambda: one.store.step(0, [0]), lambda: sums.made[0].context.store.step(0, [0])):
        with pytest.raises(ClosedError):
            use()
    assert one.container.closed
    one.close()


def test_the_commands_open_a_container_once(
    directory: Path, sums: Sums, monkeypatch: pytest.MonkeyPatch, oracle: Callable[[str], ModuleType]
) -> None:
    """Side files are compared with their digests once a command, not at every step of it."""
    oracle("transformers")
    monkeypatch.setattr(hosts, "DEFAULT", "sums")
    monkeypatch.setattr(SessionOptions, "__init__", with_host(SessionOptions.__init__))
    times = [0]
    real = session.open_to_run
    for module in (session, virtual):  # whichever of them opens what a command was given
        monkeypatch.setattr(module, "open_to_run", lambda path: (times.__setitem__(0, times[0] + 1), real(path))[1])
    from kits.inference import command

    for words in (["run", "--prompt", "x", "--max-new-tokens", "2"], ["verify-logits", "--steps", "1"]):
        times[0] = 0
        assert command(words[0], directory, *words[1:]) == 0
        assert times[0] == 1, words


def with_host(real: Any) -> Any:
    """Options whose host is ours unless another is named: there is no option of the command line for it yet."""

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **(named | {"host": "sums"}))

    return made


def test_a_store_is_closed_when_no_model_comes_of_it(
    directory: Path, sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads and memory of a store that no model took would stay for ever."""
    stores: list[Any] = []

    def fail(container: Any, store: Any, *rest: Any) -> Any:
        stores.append(store)
        raise RequestError("not today", code="E1225")

    monkeypatch.setattr(sums, "load", fail, raising=False)
    with Session(directory, SessionOptions(budget=BUDGET, host="sums")) as one, pytest.raises(RequestError):
        one.model  # noqa: B018
    assert len(stores) == 1 and stores[0].closed


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"io": "tape"}, "E1240"), ({"io": "mmap", "budget": BUDGET}, "E1240"), ({"budget": 4096}, "E1215"),
        ({"experts": "none"}, "E1244"), ({"host": "none"}, "E1291"),
    ],
)  # fmt: skip
def test_what_a_session_refuses(directory: Path, sums: Sums, options: dict[str, Any], code: str) -> None:
    """All of it when it is opened, by whoever opens one."""
    with pytest.raises(RequestError, match=code):
        Session(directory, SessionOptions(**({"host": "sums"} | options)))


def test_what_no_model_can_be_made_of(tiny: Path, tmp_path: Path, sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial containers, and hosts that lack a library: refused when the session is opened, whatever the host."""
    prepare(tiny, tmp_path / "part", encodings.get("int8"), workers=1, layers=(1, 3))
    with pytest.raises(RequestError, match=r"layers 1 to 2 .*E1222"):
        Session(tmp_path / "part", SessionOptions(host="sums"))

    def lacks() -> None:
        raise RequestError("a library is needed", code="E1220")

    monkeypatch.setattr(sums, "require", lacks, raising=False)
    with pytest.raises(RequestError, match="E1220"):
        Session(tmp_path / "part", SessionOptions(host="sums"))


def test_what_is_said_of_a_model(directory: Path, sums: Sums) -> None:
    """How experts are read and multiplied, what the model's host has to say, what lies in memory beside the budget."""
    notes: list[str] = []
    with Session(directory, SessionOptions(budget=BUDGET, host="sums", experts="native"), notes.append) as one:
        assert notes == []
        one.model  # noqa: B018
    assert notes[0].startswith("int8 experts, native products (") and "700.00 KiB of experts in memory" in notes[0]
    assert "sums are no sentences" in notes and any("row sums of all experts: 128.00 KiB" in n for n in notes)


# -- the judges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_verify_logits_of_another_host(directory: Path, sums: Sums, io: str) -> None:
    """Streamed and resident sides, traces and the proof of streaming, through the protocol alone."""
    audit = verify_logits(request(directory, io=io))
    assert audit.result == EQUAL and audit.exit_code == 0 and audit.streamed is not None
    assert len(sums.made) == 2 and audit.streamed.mode in (io, "buffered")
    assert audit.table(None)["model"] == {
        "host": "sums", "class": "SumModel", "dtype": "float32", "attention": "none", "experts": "native"
    }  # fmt: skip
    first = [e.what for e in audit.streamed.steps[0][0].events if e.layer == 0]
    assert first == ["input", "routing", "expert", "expert", "output"]


def test_a_resident_side_from_the_source_has_sidecars(directory: Path, tiny: Path, sums: Sums) -> None:
    """Row sums are encoded with the records, and leased with them, as those of the container are."""
    with Session(directory, SessionOptions("mmap", host="sums")) as one:
        encoded = logits.resident_model(one, tiny)
        for store in (encoded.context.store, one.store):
            with store.step(1, [3]) as step, step.lease(3) as lease:
                sums_of_rows = lease.expert.down.row_sums
                assert sums_of_rows is not None
                assert np.array_equal(sums_of_rows.array, lease.expert.down.codes.array.sum(1, dtype=np.int32))
                del sums_of_rows
        encoded.close()


def test_a_bit_that_another_host_sees(directory: Path, sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flip in memory after the digest was checked: the layer and the expert are named."""
    real = logits._streamed_model

    def broken(*arguments: Any) -> Any:
        model = real(*arguments)
        reader, read = model.context.store._reader, model.context.store._reader.read

        def flipped(layer: Any, expert: int, into: memoryview) -> None:
            read(layer, expert, into)
            if (layer.entry.layer, expert) == (2, 5):
                into[layer.layout.record.slot("down", "codes").offset + 9] ^= 0x40

        reader.read = flipped
        return model

    monkeypatch.setattr(logits, "_streamed_model", broken)
    audit = verify_logits(request(directory))
    assert audit.result == DIFFERENT and audit.difference is not None
    assert (audit.difference.layer, audit.difference.what, audit.difference.expert) == (2, "expert", 5)


def test_audits_of_another_host(directory: Path, sums: Sums, tmp_path: Path) -> None:
    """They need no library that the host does not use; an audit of one host is not comparable with another's."""
    path = tmp_path / "audit.json"
    verify_logits(request(directory)).write(path)
    audit = verify_logits(request(directory, against=path))
    assert audit.result == EQUAL and audit.reference is None
    table = json.loads(path.read_text())
    table["model"]["host"] = "others"
    path.write_text(json.dumps(table))
    audit = verify_logits(request(directory, against=path))
    assert audit.result == NOT_COMPARABLE and audit.incomparable == ["model host is sums here, others there"]
    table["model"]["host"] = "transformers"
    path.write_text(json.dumps(table))
    with pytest.raises(Exception, match=r"torch: str expected.*E1303"):
        verify_logits(request(directory, against=path))


def test_a_flip_on_disk(workshop: Workshop, sums: Sums, tmp_path: Path) -> None:
    """Digests are the store's: no host can forget them."""
    root = workshop.copy("int8", tmp_path / "container")
    layer = open_container(root).layers[1]
    flip(layer.path, layer.layout.record_offset(3) + 77)
    with pytest.raises(Exception, match=r"expert 3 .*E1201"):
        verify_logits(request(root))


# -- without torch ----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.modules["torch"] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
from kits.hosts import Sums
from kits.inference import command
from pagestone.reader import hosts, session
from pagestone.reader.session import Session, SessionOptions

real = SessionOptions.__init__
SessionOptions.__init__ = lambda self, *a, **k: real(self, *a, **(k | {"host": "sums"}))
with hosts.registered(Sums(says=[int(i) for i in sys.argv[3].split(",")])):
    with Session(sys.argv[2], SessionOptions(io="mmap")) as one:
        print(one.conversation().answer([{"role": "user", "content": "?"}], 99).text)
    assert "pyarrow" not in sys.modules  # which no running model has a use for
    print(command("run", sys.argv[2], "--prompt", "?", "--io", "mmap"))
    print(command("chat", sys.argv[2], "--io", "resident"))
    print(command("verify-logits", sys.argv[2], "--steps", "1"))
assert sys.modules["torch"] is None
"""


def test_everything_without_torch(directory: Path, tiny: Path, oracle: Callable[[str], ModuleType]) -> None:
    """The library, `run`, `chat` and `verify-logits` with a host that needs no torch, in a process that has none."""
    oracle("transformers")  # for the tokenizer
    from pagestone.reader.text import open_tokenizer

    said = "The capital of France is Paris."
    ids = [*open_tokenizer(tiny).encode(said), 1023]
    kits = Path(__file__).resolve().parents[1]
    words = [sys.executable, "-c", PROGRAM, str(kits), str(directory), ",".join(map(str, ids))]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, input="Where?\n", timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == said and lines[1:3] == [said, "0"] and lines[3:5] == [said, "0"], done.stdout
    assert "every logit equal to the resident model's" in lines[5] and lines[-1] == "0", done.stdout
