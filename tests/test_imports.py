"""The arrows between the rooms, and what is never imported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.checkpoints import T_BLOCK

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("formats", "convert", "reader", "validate")
ALLOWED = {
    "formats": {"formats"},
    "convert": {"convert", "formats"},
    "reader": {"reader", "formats"},
    "validate": {"validate", "convert", "reader", "formats"},
}
HEAVY = ("torch", "transformers", "tokenizers", "huggingface_hub", "compressed_tensors", "mlx", "ml_dtypes")


def imports(file: Path) -> Iterator[tuple[str, int, bool]]:
    """(full dotted name, line, whether at module level) of everything a file imports."""
    tree = ast.parse(file.read_text(), str(file))
    inside = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }  # fmt: skip
    guarded = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }  # fmt: skip
    for node in ast.walk(tree):
        outer = id(node) not in inside and id(node) not in guarded
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, outer
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import; there is one spelling"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, outer


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_arrows(room):
    """formats knows nobody; convert and reader know formats and not each other; validate may know all."""
    assert sources(room)
    for file in sources(room):
        for name, line, _ in imports(file):
            words = name.split(".")
            assert words[0] not in ROOMS, f"{file}:{line}: {name} is imported as pagestone.{words[0]}"
            if words[0] == "pagestone":
                assert len(words) > 1 and words[1] in (*ALLOWED[room], "__version__"), f"{file}:{line}: {name}"


def arrows() -> dict[str, set[str]]:
    """Module -> the modules of ours it imports anywhere: at its top, within functions, for type checkers alone."""
    files = {}
    for room in ROOMS:
        for file in sources(room):
            name = ".".join(("pagestone", *file.relative_to(ROOT).with_suffix("").parts))
            files[name.removesuffix(".__init__")] = file
    made: dict[str, set[str]] = {}
    for name, file in files.items():
        full = {imported for imported, _, _ in imports(file)}
        made[name] = {n if n in files else n.rpartition(".")[0] for n in full} & (files.keys() - {name})
    return made


def circles(graph: dict[str, set[str]]) -> list[str]:
    """The modules from which a way leads back to them."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += graph[name]
        return seen

    return sorted(name for name in graph if name in reached(name))


def test_no_circles():
    """No module needs itself, by whatever way: not within a room either, and not for a type alone."""
    graph = arrows()
    assert "pagestone.reader.model" in graph["pagestone.reader.experts"] and len(graph) > 80
    assert "pagestone.reader.experts" in graph["pagestone.reader.experts_guard"], "imports within functions count"
    assert circles(graph) == []


def test_circles_are_seen():
    """Of two, of three, and none where there is none."""
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == ["a", "b"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_only_native_knows_the_kernels():
    """`_kernels` is named in formats/native.py and nowhere else in Python."""
    named = [f for room in ROOMS for f in sources(room) if any("_kernels" in n.split(".") for n, _, _ in imports(f))]
    assert named == [ROOT / "formats" / "native.py"]


def test_checks_ask_no_plan():
    """What a container must be is for `formats` to say: only the comparison with a source plans."""
    for name in ("checks", "verify", "dense", "findings"):
        plans = [n for n, _, _ in imports(ROOT / "validate" / f"{name}.py") if n.startswith("pagestone.convert.plan")]
        assert not plans, name


def test_who_reads_knows_nobody_who_writes():
    """What reads a source knows nothing of an output, what writes nothing of a source, a report nothing of the work."""
    output = ("machine", "publish", "writing", "journal", "prepare", "pipeline")
    for name, unknown in {
        **dict.fromkeys(("checkpoint", "directory", "side_files", "sources", "reading", "errors"), output),
        "writing": ("reading", "checkpoint", "sources", "publish"),
        "machine": ("reading", "checkpoint", "publish"),
        "report": ("prepare", "pipeline", "publish", "reading"),
    }.items():
        asked = {
            n.split(".")[2]
            for n, _, _ in imports(ROOT / "convert" / f"{name}.py")
            if n.startswith("pagestone.convert.")
        }
        assert not asked.intersection(unknown), name


OPENS = {
    "formats/storage.py": "the one place",
    "formats/manifest.py": "experts.parquet is written by pyarrow",
    "convert/machine.py": "the work directory is written",
    "convert/prepare.py": "experts.parquet is synced",
    "convert/publish.py": "locks",
    "convert/writing.py": "files of a container are written",
    "reader/commands.py": "opens sessions",
    "validate/audit.py": "audits, which are of neither",
    "validate/recorded.py": "audits and their traces",
    "validate/requests.py": "audits",
}
"""Who opens files of a source or of a container, and why."""


@pytest.mark.parametrize("room", ROOMS)
def test_one_place_touches_bytes(room):
    """Whatever else reads a source or a container asks a storage."""
    for file in sources(room):
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
        }
        direct = called & {"open", "preadv", "pread", "mmap", "posix_fadvise"}
        assert not direct or file.relative_to(ROOT).as_posix() in OPENS, (file, direct)


def test_plain_reader_knows_nobody():
    """The second reader imports nothing of ours, so that it can only agree by the specification."""
    file = ROOT / "validate" / "plain_reader.py"
    assert not [name for name, _, _ in imports(file) if name.split(".")[0] == "pagestone"]


def test_optional_libraries_are_imported_late():
    """torch and its like are imported inside functions only, so that nobody pays who does not use them."""
    for room in ("formats", "convert", "validate"):
        for file in sources(room):
            early = [(n, line) for n, line, outer in imports(file) if outer and n.split(".")[0] in HEAVY]
            assert not early, f"{file}: {early}"


PROGRAM = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            sys.stderr.write("IMPORTED " + name + chr(10))
            raise ImportError(name)
sys.meta_path.insert(0, Watch())
import json
import pagestone
from pagestone.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as error:
        assert not error.code, (words, error.code)
"""


ARROW = """
import sys
from pathlib import Path
from pagestone.convert import prepare as preparing
from pagestone.convert.plan import Request, make_plan
from pagestone.formats import encodings
from pagestone.reader.container import open_container, open_to_run
from pagestone.reader.store import StoreOptions, open_store
source, output = Path(sys.argv[1]), Path(sys.argv[2])
if sys.argv[3] == "convert":
    class Enough(Exception):
        pass
    def write(*_):
        raise Enough if "pyarrow" not in sys.modules else AssertionError("pyarrow is there before the table is written")
    preparing.write_experts = write
    for _ in range(2):  # the second run resumes: all is done but the table
        try:
            preparing.prepare(make_plan(Request(source, encodings.get("int8"))), output, workers=2)
        except Enough:
            continue
        raise AssertionError("no table was written")
else:
    with open_to_run(output) as container:
        assert container.layers[0].expert(0).gate.decode().any()
        store, _ = open_store(container, StoreOptions(sys.argv[3], 1 << 20))
        with store, store.step(0, [1]) as step, step.lease(1) as lease:
            assert lease.expert.record.any()
assert "pyarrow" not in sys.modules
"""


def test_pyarrow_is_for_tables_alone(tmp_path):
    """A conversion needs it when it writes experts.parquet, not before and not to resume; opening and reading experts
    with their digests never do."""
    source = T_BLOCK.write(tmp_path / "s")
    for output, what in (("o", "convert"), ("o", "finish"), ("o", "direct"), ("o", "mmap"), ("o", "resident")):
        if what == "finish":
            command = [sys.executable, "-m", "pagestone", "prepare-int8", source, "-o", tmp_path / output]
        else:
            command = [sys.executable, "-c", ARROW, source, tmp_path / output, what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (what, done.stderr)


def test_commands_need_no_torch(tmp_path):
    """`import pagestone`, --help, prepare-*, inspect and verify work, and try to import none of the heavy libraries."""
    T_BLOCK.write(tmp_path / "s")
    out = tmp_path / "o"
    commands = [
        ["--help"], ["prepare-int8", "--help"],
        ["prepare-int8", tmp_path / "s", "-o", out, "--dry-run"], ["prepare-int8", tmp_path / "s", "-o", out],
        ["prepare-fp8", tmp_path / "s", "-o", tmp_path / "p"],
        ["inspect", out], ["verify", out], ["verify", out, "--source", tmp_path / "s"],
    ]  # fmt: skip
    words = json.dumps([[os.fspath(w) for w in c] for c in commands])
    command = [sys.executable, "-c", PROGRAM.replace("{heavy!r}", repr(HEAVY)), words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "IMPORTED" not in result.stderr, result.stderr
    assert result.stdout.count("container id") == 3
