"""The plan of a run under one cap: its lines, its context, what it refuses, and that it is kept."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kits import byte_pairs
from kits.families import FAMILIES, MODELS, SIZES, build
from kits.groups import joining, memory_group
from kits.inference import Workshop, calm, command, sequence

from pagestone.formats.errors import RequestError
from pagestone.reader import memory_plan
from pagestone.reader.budget import all_records, largest_record, row_sum_bytes
from pagestone.reader.container import Container, open_container
from pagestone.reader.dense_costs import dense_costs, likely_use
from pagestone.reader.footprint import COMPUTED, ESTIMATED, MEASURED, Footprint, footprint
from pagestone.reader.hosts import transformers as host
from pagestone.reader.memory import process_memory
from pagestone.reader.memory_plan import (
    DENSE,
    LOADING,
    PROCESS,
    ROWS,
    STATE,
    TABLE_ROWS,
    TOKENIZER,
    TRANSIENTS,
    WORKING,
    Line,
    MemoryPlan,
    Needs,
    plan_memory,
)
from pagestone.reader.model import GRID, NATIVE, REFERENCE, Loading
from pagestone.reader.session import Session, SessionOptions

torch: Any
FRANCE = "What is the capital of France?"
MIB = 1 << 20
SELF = (Line(PROCESS, 100 * MIB, MEASURED),)
"""A process that takes this much, whatever runs the tests."""
SMALL = Footprint(
    1000, ((10, 100),), 5000, ((100, 1 * MIB), (1000, 2 * MIB), (8192, 200 * MIB)), logit_bytes=2048, positions=4096
)
REFUSED = ("qwen3_vl_moe",)


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    global torch
    torch = oracle("torch")
    oracle("transformers")
    calm()


@pytest.fixture(scope="session")
def workshop(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="session")
def directory(workshop: Workshop) -> Path:
    return workshop.container("int8")


@pytest.fixture(scope="session")
def container(directory: Path) -> Container:
    return open_container(directory)


def planned(container: Container, cap: int, how: Loading | None = None, **needs: Any) -> MemoryPlan:
    return plan_memory(container, how or Loading(), Needs(cap, **needs), model=SMALL, process=SELF)


# -- lines ------------------------------------------------------------------------------------------------------------


def test_every_byte_of_the_cap_has_a_line(container: Container) -> None:
    """What is no other line's is the cache, to the byte, but never more than all records."""
    cap = 119 * MIB
    plan = planned(container, cap, context=600)
    assert sum(line.nbytes for line in plan.lines) + plan.cache_bytes == cap
    assert plan.line(DENSE) == dense_costs(container).tensor_bytes
    assert plan.line(ROWS) == row_sum_bytes(container) > 0
    assert plan.line(STATE) == SMALL.state_bytes(600) == 600 * 1000 + 10 * 100 + 5000
    assert plan.line(WORKING) == SMALL.working_bytes(600)
    others = sum(line.nbytes for line in plan.lines if line.name != TRANSIENTS)
    assert plan.line(TRANSIENTS) == others // 64 + 8 * MIB
    assert planned(container, 10 * cap, context=600).cache_bytes == all_records(container)
    shown = plan.text().splitlines()
    assert len(shown) == 2 + len(plan.lines) and "600 tokens" in shown[0]
    assert shown[-1].split()[0] == "experts" and "what is left" in shown[-1]
    assert json.loads(json.dumps(plan.table()))["lines"][-1]["bytes"] == plan.cache_bytes


def test_how_dense_tensors_are_known(container: Container) -> None:
    """Computed where a host said what the model uses of them; without one, names are believed."""
    for use, known in ((None, ESTIMATED), (likely_use(container), COMPUTED)):
        model = dataclasses.replace(SMALL, dense=use)
        plan = plan_memory(container, Loading(), Needs(300 * MIB), model=model, process=SELF)
        assert {line.known for line in plan.lines if line.name in (DENSE, TABLE_ROWS)} == {known}


def test_a_tokenizer_that_is_there_is_counted_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a line of its own, which the line of the process is without."""
    with Session(directory, SessionOptions(memory=6 << 30)) as session:
        assert session.tokenizer is not None
        session._vocabulary_bytes = 5 * MIB
        monkeypatch.setattr(memory_plan, "process_memory", lambda: SimpleNamespace(now=100 * MIB))
        process, tokenizer = session._process()
    assert (tokenizer.name, tokenizer.nbytes, tokenizer.known) == (memory_plan.VOCABULARY, 5 * MIB, MEASURED)
    assert (process.name, process.nbytes) == (PROCESS, 95 * MIB + memory_plan.GROWTH)


def test_working_space_between_two_prompts_is_below_the_chord() -> None:
    """Exact at the points, between them the line, beyond the last the square, and never less than the first."""
    assert [SMALL.working_bytes(n) for n in (1, 100, 550, 1000)] == [MIB, MIB, 1.5 * MIB, 2 * MIB]
    assert SMALL.working_bytes(2 * 8192) == 4 * 200 * MIB
    assert SMALL.state_bytes(5) == 5 * 1000 + 5 * 100 + 5000, "a window keeps no more than the context has"
    falls = dataclasses.replace(SMALL, working=((100, 2 * MIB), (200, MIB), (300, MIB)))
    assert [falls.working_bytes(n) for n in (150, 200, 250)] == [2 * MIB] * 3, "a shorter prompt may take more"


def test_rows_of_logits_and_prompts(container: Container) -> None:
    """Rows beyond the first are counted, at most as many as tokens are fed; a prompt that is known bounds the work."""
    base = planned(container, 400 * MIB, context=1000)
    assert planned(container, 400 * MIB, context=1000, logits=11).line(WORKING) == base.line(WORKING) + 10 * 2048
    assert planned(container, 400 * MIB, context=1000, logits=5000).line(WORKING) == base.line(WORKING) + 999 * 2048
    assert planned(container, 400 * MIB, context=1000, prompt=100).line(WORKING) == MIB
    assert planned(container, 400 * MIB, context=50, prompt=100).line(STATE) == SMALL.state_bytes(50)


def test_products_that_decode_take_more(container: Container, workshop: Workshop) -> None:
    """No row sums, but an expert decoded; for bf16 nothing is decoded."""
    plan = planned(container, 200 * MIB, Loading(REFERENCE))
    assert plan.line(ROWS) == 0 and plan.line(memory_plan.PRODUCTS) == 24 * 128 * 256
    plain = open_container(workshop.container("bf16"))
    assert planned(plain, 200 * MIB, Loading(REFERENCE)).line(memory_plan.PRODUCTS) == 0
    more = plan_memory(container, Loading(), Needs(200 * MIB), model=SMALL, process=SELF, extra=[Line("mine", MIB)])
    assert more.line("mine") == MIB


def test_dense_products_that_decode_take_more(workshop: Workshop) -> None:
    """By the products of linear layers, whatever multiplies experts: one matrix decoded."""
    dense = open_container(workshop.container("int8", dense="int8"))
    largest = dense_costs(dense).decoded_bytes
    for how, decoded in (
        (Loading(REFERENCE, linears=NATIVE), 0),
        (Loading(NATIVE, linears=REFERENCE), 3 * largest),
        (Loading(REFERENCE), 3 * largest),
        (Loading(NATIVE), 0),
    ):
        assert planned(dense, 300 * MIB, how).line(memory_plan.DECODED) == decoded


def test_maps_and_resident_experts(container: Container) -> None:
    """Mapped: no cache, and it is said that the cap does not bind the page cache. Resident: all records or nothing."""
    mapped = planned(container, 300 * MIB, io="mmap")
    assert mapped.cache_bytes == mapped.line(DENSE) == mapped.line(ROWS) == 0
    assert "does not bind the page cache" in mapped.text()
    resident = planned(container, 300 * MIB, io="resident")
    assert resident.cache_bytes == all_records(container)
    whole = dense_costs(container, mode="resident")
    assert resident.line(DENSE) == whole.tensor_bytes > dense_costs(container).tensor_bytes, "tables are loaded whole"
    assert resident.line(TABLE_ROWS) == whole.row_bytes == 0
    with pytest.raises(RequestError, match="all experts"):
        planned(container, resident.smallest - 1, io="resident")


# -- the context ------------------------------------------------------------------------------------------------------


def test_the_context_that_is_chosen(container: Container) -> None:
    """The smallest of the config's positions, 8,192, and what takes half of what experts could have."""
    plenty = 4096 * MIB
    assert planned(container, plenty).context == 4096
    model = dataclasses.replace(SMALL, positions=None)
    chosen = plan_memory(container, Loading(), Needs(plenty), model=model, process=SELF)
    assert chosen.context == 8192
    tight = planned(container, 140 * MIB)
    assert 512 < tight.context < 4096 and tight.context % 64 == 0
    more = planned(container, 140 * MIB, context=tight.context + 64)
    spare = planned(container, 4096 * MIB, context=1)

    def cost(plan: MemoryPlan) -> int:
        return sum(line.nbytes for line in plan.lines)

    assert 2 * (cost(tight) - cost(spare)) <= 140 * MIB - cost(spare) < 2 * (cost(more) - cost(spare)) + MIB
    assert planned(container, 4096 * MIB, context=9000).context == 9000, "what is asked for is taken"
    assert "4,096 positions" in planned(container, 4096 * MIB, context=9000).text()


def test_the_smallest_cap_is_named_and_is_the_smallest(container: Container) -> None:
    """E1271 with the parts and a cap that does; one byte less does not. With a context asked for, and without."""
    for context in (None, 2000):
        with pytest.raises(RequestError, match="E1271") as refused:
            planned(container, 1, context=context)
        smallest = int(str(refused.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
        assert all(word in str(refused.value) for word in (PROCESS, DENSE, STATE, "one expert"))
        plan = planned(container, smallest, context=context)
        assert plan.cache_bytes == largest_record(container) and plan.context == (context or 512)
        assert plan.smallest == smallest
        with pytest.raises(RequestError, match="E1271"):
            planned(container, smallest - 1, context=context)


def test_what_contradicts_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--memory with --budget, no context at all, no size, and what does not fit, before anything is loaded."""
    for options, code in (
        (["--memory", "1GiB", "--budget", "1MiB"], "E1273"),
        (["--memory", "much"], "E1241"),
        (["--memory", "20MiB"], "E1271"),
        (["--context", "5"], "E1272"),
    ):
        assert command("run", directory, "--prompt", FRANCE, *options) == 2
        out, err = capsys.readouterr()
        assert code in err and not out
        assert "int8 experts, native" not in err or code == "E1272"
    assert "--memory" in err or "--context" in err
    with pytest.raises(RequestError, match="E1274"):
        Session(directory, SessionOptions(context=0))


# -- what a model takes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def built(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of families, each made once."""
    made: dict[str, Path] = {}

    def one(name: str) -> Path:
        if name not in made:
            more = {"olmoe": {"head_dim": 32}, "gpt_oss": {"sliding_window": 6}}.get(name, {})
            wanted = dataclasses.replace(MODELS[name], extra=dict(MODELS[name].extra) | more)
            made[name] = tmp_path_factory.mktemp("footprint") / name
            build(wanted, SIZES["wide"], made[name])
        return made[name]

    return one


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_state_and_working_space(workshop: Workshop, built: Callable[[str], Path], name: str) -> None:
    """What is said of a model is what its tensors are: of the state to the byte, of the work no less than is used.

    What its config alone says is never less.
    """
    from pagestone.reader.rehearsal import BEFORE, Counted

    tokens, source = 200, built(name)
    opened = open_container(workshop.container("int8", source))
    said = host.HOST.footprint(opened, Loading(), tokens)
    assert said.known == "computed" and said.dense is not None
    model = host.plain_model(source)
    model.context.tokens = tokens + BEFORE
    _, state = model.forward(sequence(BEFORE, 40))
    with Counted() as counted:
        _, state = model.forward(sequence(tokens, 40), state)
    held = sum(t.untyped_storage().nbytes() for layer in state.layers for t in memory(layer))
    assert held == said.state_bytes(tokens + BEFORE)
    assert 0 < counted.peak <= said.working_bytes(tokens)
    by_config = footprint(source, longest=tokens)
    assert by_config.state_bytes(tokens) >= said.state_bytes(tokens)
    assert by_config.known == ESTIMATED and by_config.positions == said.positions
    assert by_config.working_bytes(tokens) >= counted.peak
    assert by_config.logit_bytes == said.logit_bytes == 40 * 2


def test_state_of_layers_that_are_alike() -> None:
    """One layer of a kind is fed, and counts for all that are like it: of all tokens, of a window, of one size."""
    from pagestone.reader.rehearsal import _state

    held = [torch.empty(1, 2, 100, 8, dtype=torch.bfloat16), torch.empty(1, 2, 100, 4, dtype=torch.bfloat16)]
    full = SimpleNamespace(_buffers=held, is_sliding=False, room=100)
    window = SimpleNamespace(_buffers=held, is_sliding=True, sliding_window=8, room=100)
    fixed = SimpleNamespace(conv_states={0: torch.empty(3)}, recurrent_states=torch.empty(5))
    state = SimpleNamespace(layers=[full, window, fixed])
    row = 2 * (8 + 4) * 2
    assert _state(state, {0: 3, 1: 5, 2: 7}) == (3 * row, ((16, 5 * row),), 7 * (3 + 5) * 4)


def test_prompts_are_counted_where_pieces_begin(container: Container) -> None:
    """A short prompt, the longest that is worked on whole, and the longest there is; without pieces the two ends."""
    said = host.HOST.footprint(container, Loading(prefill_piece=128), 400)
    assert [tokens for tokens, _ in said.working] == [128, 128 + GRID - 1, 400]
    whole = host.HOST.footprint(container, Loading(prefill_piece=None), 400)
    assert [tokens for tokens, _ in whole.working] == [128, 400]


def memory(layer: Any) -> list[Any]:
    """Tensors that hold a layer's state."""
    own = getattr(layer, "_buffers", None)
    if own is not None:
        return list(own)
    parts = (getattr(layer, name) for name in ("conv_states", "recurrent_states"))
    return [t for part in parts for t in (part.values() if isinstance(part, dict) else [part])]


def test_a_model_that_cannot_be_rehearsed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is believed then; what is short of memory is not hidden."""
    from pagestone.reader import rehearsal

    def fails(*_: Any) -> Any:
        raise NotImplementedError("values")

    monkeypatch.setattr(rehearsal, "rehearse", fails)
    opened = open_container(directory)
    said = host.HOST.footprint(opened, Loading(), 512)
    assert said.known == ESTIMATED and said.dense is not None
    assert said.state_bytes(77) == footprint(directory).state_bytes(77)

    def short(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(rehearsal, "rehearse", short)
    with pytest.raises(MemoryError):
        host.HOST.footprint(opened, Loading(), 512)


def test_the_last_token_is_copied_out(workshop: Workshop) -> None:
    """The head is not given a view into a prompt, over which torch's product is slow and copies all weights."""
    from kits.inference import model as any_model

    loaded = any_model(workshop.container("bf16"))
    seen: list[Any] = []
    loaded.model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    loaded.forward(sequence(9))
    assert seen[0].shape[1] == 1 and seen[0].stride() == (seen[0].shape[2],) * 2 + (1,)
    loaded.close()


# -- the process ------------------------------------------------------------------------------------------------------


def test_what_the_kernel_says_of_this_process(tmp_path: Path) -> None:
    """In bytes; nothing where it does not say."""
    found = process_memory()
    assert found is not None and 10 * MIB < found.now <= found.peak
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmPeak:\t 9 kB\nVmHWM:\t   7 kB\nVmRSS:\t   5 kB\n")
    small = process_memory(tmp_path)
    assert small is not None and (small.now, small.peak) == (5 * 1024, 7 * 1024)
    (tmp_path / "proc/self/status").write_text("VmRSS:\t   5 kB\n")
    assert process_memory(tmp_path) is None


TOKENIZERS = """
import json, sys
from pathlib import Path
import torch, transformers
from transformers import PreTrainedTokenizerFast
from pagestone.reader.memory import process_memory
from pagestone.reader.memory_plan import settle_allocator, trim
from pagestone.reader.text import open_tokenizer
settle_allocator()
for place in map(Path, sys.argv[1:]):
    trim()
    before = process_memory().now
    opened = open_tokenizer(place)
    peak = process_memory().peak
    trim()
    print(process_memory().now - before, peak - before)
"""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of 248,320 tokens."""
    root = tmp_path_factory.mktemp("vocabulary")
    for name, make in byte_pairs.files(248_320).items():
        (root / name).write_bytes(make())
    return root


def test_tokenizers_take_what_their_files_tell(vocabulary: Path, directory: Path) -> None:
    """Of a vocabulary of 248,320, less than is said and more than a third, once it is there and while it is loaded;
    measured in a process of its own."""
    taken, peak = map(int, run_python(TOKENIZERS, directory, vocabulary).split()[-2:])
    size = (vocabulary / "tokenizer.json").stat().st_size
    assert TOKENIZER * size / 3 < taken < TOKENIZER * size
    assert LOADING * size / 2 < peak < LOADING * size
    assert peak > TOKENIZER * size, "loading needs no figure of its own any more"


LOADS = """
import json, sys
from pathlib import Path
from pagestone.formats.errors import RequestError
from pagestone.reader.memory import process_memory
from pagestone.reader.session import Session, SessionOptions
options = SessionOptions(memory=int(sys.argv[3]), context=64, threads=1, tokenizer=Path(sys.argv[2]))
said = ""
with Session(sys.argv[1], options) as session:
    try:
        session.tokenizer
        session.model.forward([1, 2, 3])
        assert session.plan.smallest <= options.memory
    except RequestError as error:
        said = str(error)
print(json.dumps([said, process_memory().peak]))
"""


def test_no_cap_is_broken_while_a_tokenizer_is_loaded(vocabulary: Path, workshop: Workshop) -> None:
    """What does not fit is refused before it is loaded, with a cap that does: below that the process stays."""
    container = workshop.container("int8")

    def loads(cap: int) -> tuple[str, int]:
        said, peak = json.loads(run_python(LOADS, container, vocabulary, cap).splitlines()[-1])
        return said, peak

    size = (vocabulary / "tokenizer.json").stat().st_size
    said, peak = loads(MIB)
    assert "E1271" in said and "while the tokenizer is loaded" in said
    smallest = int(said.split("at least ")[1].split(" bytes")[0].replace(",", ""))
    assert peak < smallest - LOADING * size + 64 * MIB, "it was loaded before it was refused"
    said, peak = loads(smallest + 8 * MIB)  # as processes differ
    assert said == "" and peak <= smallest + 8 * MIB


def test_a_tokenizer_that_comes_last_has_room(directory: Path, tmp_path: Path) -> None:
    """A plan made before the tokenizer is there, as by programs, counts what loading takes, of the one given."""
    (tmp_path / "tokenizer.json").write_bytes(b" " * MIB)
    for given, size in ((None, (directory / "tokenizer.json").stat().st_size), (tmp_path, MIB)):
        with Session(directory, SessionOptions(memory=8 << 30, tokenizer=given)) as opened:
            plan = opened.plan
            assert plan is not None and plan.line("tokenizer") == LOADING * size
            opened.require_loading(tmp_path)
            assert opened.plan_for().line("tokenizer") == TOKENIZER * size


def test_what_loading_takes_is_the_least_of_caps(container: Container) -> None:
    """A phase before all others: no line, no byte less for experts, but no smaller cap; and other directories'."""
    base = planned(container, 400 * MIB, context=600)
    many = plan_memory(container, Loading(), Needs(400 * MIB, 600), model=SMALL, process=SELF, loading=400 * MIB)
    assert (many.lines, many.cache_bytes, many.smallest) == (base.lines, base.cache_bytes, 400 * MIB)
    with pytest.raises(RequestError, match=r"419,430,401 bytes expected.*; 400.00 MiB while the tokenizer is loaded"):
        plan_memory(container, Loading(), Needs(400 * MIB, 600), model=SMALL, process=SELF, loading=(400 * MIB) + 1)
    few = plan_memory(container, Loading(), Needs(400 * MIB, 600), model=SMALL, process=SELF, loading=MIB)
    assert few.smallest == base.smallest
    file = container.path / "tokenizer.json"
    assert memory_plan.loading_bytes(container.path, 7) == 7 + LOADING * file.stat().st_size
    assert memory_plan.loading_bytes(container.path / "none", 7) == 0


LENGTHS = """
import sys
from pagestone.reader.memory import process_memory
from pagestone.reader.session import Session, SessionOptions
with Session(sys.argv[1], SessionOptions(memory=int(sys.argv[2]), context=1024, threads=1)) as session:
    session.tokenizer
    for length in range(60, 1020, 80):
        session.model.forward(list(range(1, length)))
    print(process_memory().peak)
"""


def test_prompts_of_many_lengths_stay_below_the_cap(workshop: Workshop) -> None:
    """Torch makes kernels for each number of rows: kept without end, they took 200 MiB more than the cap here."""
    cap = 512 << 20
    assert int(run_python(LENGTHS, workshop.container("bf16"), cap).split()[-1]) <= cap


KEPT = """
import json, resource, sys
from pagestone.reader.memory import process_memory
from pagestone.reader.session import Session, SessionOptions
said = []

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt

with Session(sys.argv[1], SessionOptions(memory=int(sys.argv[2]), context=300, threads=1), said.append) as session:
    session.tokenizer
    plan = session.plan
    assert not said and session._model is None
    _, state = session.model.forward(list(range(1, 300)))
    before = faults()
    _, state = session.model.forward(list(range(1, 300)))
    session.model.forward([5], state)
    peak = process_memory().peak
    print(json.dumps({"peak": peak, "faults": faults() - before, "plan": plan.table(), "said": said,
                      "budget": session.store.budget}))
"""


def run_python(code: str, *words: object) -> str:
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plan_is_kept(directory: Path) -> None:
    """A process of its own: what it ever took is below the cap, and the cap is not far above what it took.

    Where there are control groups, in one of 5 % more, page cache included; nothing comes back from disk then.
    """
    cap = 620 * MIB
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(cap * 105 // 100))
        except OSError:
            group = None
        found = json.loads(run_python(("" if group is None else joining(group)) + KEPT, directory, cap))
        if group is not None:
            most = int((group / "memory.max_usage_in_bytes").read_text())
            assert 0 < most <= cap * 105 // 100
    assert found["faults"] == 0
    assert found["budget"] == found["plan"]["cache_bytes"]
    assert found["peak"] <= cap
    assert "\n".join(found["said"]).startswith("memory: 620.00 MiB for everything, a context of 300 tokens")
    lines = {line["name"]: line for line in found["plan"]["lines"]}
    assert lines["tokenizer"]["known"] == lines[PROCESS]["known"] == "measured"
    planned_bytes = sum(line["bytes"] for line in found["plan"]["lines"])
    assert found["peak"] > 0.6 * planned_bytes, "a plan that is twice what is taken wastes what experts could have"


def test_the_longest_prompt_is_asked_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host counts prompts up to the longest that may come: nothing is taken from beyond what was counted."""
    for context, prompt, longest in ((None, None, 8192), (100, None, 8192), (9000, None, 9000), (100, 10000, 10000)):
        asked: list[int] = []
        with Session(directory, SessionOptions(memory=64 << 30, context=context)) as session:
            monkeypatch.setattr(session, "_footprint", lambda tokens, asked=asked: asked.append(tokens))
            session.plan_for(prompt=prompt)
        assert asked == [longest]


@pytest.mark.parametrize("io", ["direct", "resident"])
def test_the_cache_is_what_the_plan_leaves(directory: Path, monkeypatch: pytest.MonkeyPatch, io: str) -> None:
    """Not a share of what is free; and no budget where there is no cache."""
    opened = []
    with Session(directory, SessionOptions(io, memory=6 << 30)) as session:
        assert session.plan is not None
        session.__dict__["plan"] = dataclasses.replace(session.plan, cache_bytes=3 * largest_record(session.container))
        real = session.open_store

        def open_store(io: str, budget: int | None, *rest: Any) -> Any:
            opened.append(budget)
            return real(io, budget, *rest)

        monkeypatch.setattr(session, "open_store", open_store)
        _ = session.model
        assert opened == [session.plan.cache_bytes if io == "direct" else None]


def test_run_says_the_plan_first(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model's own line; in --json as a table; a full context ends an answer with a sentence."""
    assert command("run", directory, "--prompt", FRANCE, "--memory", "64GiB", "--context", "21") == 0
    out, err = capsys.readouterr()
    assert err.index("memory: 64.00 GiB") < err.index("int8 experts")
    assert (
        "the context of 21 is full; --context gives it more" in err
        and out.strip() == "The capital of Fr"[: len(out.strip())]
    )
    assert command("run", directory, "--prompt", FRANCE, "--json", "--context", "21") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["stopped"] == "context" and len(table["ids"]) + table["prompt_tokens"] == 22
    assert table["memory"] is None and table["process_peak_bytes"] > 10 * MIB


def test_less_memory_than_the_cap_is_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap that the machine does not have is not refused, as others may let go of theirs; but it is said."""
    from pagestone.reader import session as module

    held = process_memory()
    assert held is not None
    enough = (64 << 30) - held.now // 2  # with what this process has already
    for free, said in ((100 * MIB, True), (90 << 30, False), (enough, False), (None, False)):
        monkeypatch.setattr(module, "available_memory", lambda free=free: free)
        with Session(directory, SessionOptions(memory=64 << 30)) as session:
            assert session.plan is not None
            assert ("more can be had" in session.plan.text()) == said
            assert ("only 100.00 MiB more can be had" in session.plan.text()) == said
