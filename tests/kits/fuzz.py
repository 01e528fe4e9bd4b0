"""Strangers' inputs: every public reader of files, given damaged ones, must take them or refuse them by name.

    bench = Bench(tmp_path)
    case(bench, "manifest", random.Random(7))      # raises `Fault` if the program does anything else

A case damages one file of a sound checkpoint, container or audit, runs what reads it, and puts the file back. It may
succeed, or end in a `PagestoneError` (from the command line: in exit code 1 or 2 and its text). It may not take more
than `CPU` seconds or `MEMORY` bytes. What was converted must verify.

`tests/test_fuzz.py` runs some cases with every change; `scripts/fuzz.py` runs any number.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kits import mutate
from kits.checkpoints import Spec, write_checkpoint
from kits.containers import contents
from kits.conversions import prepare
from kits.inference import command
from kits.mutate import pick
from kits.quantised import Fp8Spec
from pagestone.formats import encodings, native
from pagestone.formats.dense_matrices import ENCODED, KEEP, read_matrices
from pagestone.formats.digests import container_id, digest, layer_digest
from pagestone.formats.dtypes import E4M3_VALUES
from pagestone.formats.encodings.fp8 import Fp8Source
from pagestone.formats.encodings.int8 import Int8Source
from pagestone.formats.encodings.scaled import SCALE_DTYPES
from pagestone.formats.errors import NonFiniteError, PagestoneError
from pagestone.formats.layer_file import SPEC_VERSION, read_layer_file
from pagestone.formats.manifest import EXPERTS_TABLE, MANIFEST, NOT_IN_ID, RECORDS, read_experts, read_manifest
from pagestone.formats.safetensors_header import read_header
from pagestone.reader.configs import read_config
from pagestone.reader.container import open_container
from pagestone.reader.sampling import choose_sampling
from pagestone.reader.store import RecordDigests, read_sidecars
from pagestone.reader.text import end_tokens
from pagestone.validate import audit as audits
from pagestone.validate import plain_reader
from pagestone.validate.fidelity import read_questions
from pagestone.validate.logits import read_ids
from pagestone.validate.recorded import read_audit
from pagestone.validate.sides import Event, ForwardPass, Prompt, Side

CPU = 10.0
"""Seconds of all threads that one case may take."""
MEMORY = 256 << 20
"""Bytes of memory that one case may take."""
LARGEST = 5 << 20
"""Bytes of the largest input."""
TEXT = 20_000
"""Characters that an error may have."""

SMALL = Spec(hidden=64, intermediate=64, experts=2, layers=1, family="qwen3_moe", fused=False, mtp=False)
SIDES = {
    "generation_config.json": {
        "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0,
        "repetition_penalty": 1.05,
    },
    "tokenizer_config.json": {"eos_token": "</s>", "model_max_length": 10**30, "chat_template": "{{ messages }}"},
}  # fmt: skip
CODECS = ("int8", "q4", "fp8", "bf16")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


SEEN: Counter[str] = Counter()
"""How often each answer was given: \"ok\", or the code of an error."""


class Fault(AssertionError):
    """The program did what it may not do with a file that others wrote."""


# -- what is allowed ---------------------------------------------------------------------------------------------------


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


@contextmanager
def measured() -> Iterator[None]:
    """Raises `Fault` if what is done within takes too long or too much memory; a warning is an error."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    except OSError:
        before = None
    else:
        before = _kilobytes("VmRSS")
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    seconds = time.process_time() - begin
    if seconds > CPU:
        raise Fault(f"{seconds:.1f} CPU seconds")
    if before is not None and (taken := (_kilobytes("VmHWM") - before) << 10) > MEMORY:
        raise Fault(f"{taken >> 20} MiB of memory")


def judged(call: Callable[[], Any]) -> str:
    """ "ok", or the code of the error that `call` raised; `Fault` for any error that is not ours, or is not whole."""
    try:
        with measured():
            call()
    except NonFiniteError:
        SEEN["non-finite"] += 1
    except PagestoneError as error:
        text = str(error)
        if not re.fullmatch(r"[EW]\d{4}", error.code) or not error.remedy or error.exit_code not in (1, 2):
            raise Fault(f"an error without code or remedy, or of the machine: {text[:500]}") from error
        _check_text(text)
        SEEN[error.code] += 1
    else:
        SEEN["ok"] += 1


def _check_text(text: str) -> None:
    if len(text) > TEXT:
        raise Fault(f"an error of {len(text)} characters: {text[:200]}")
    if found := _CONTROL.search(text):
        raise Fault(f"a raw {found[0]!r} in {text[:500]!r}")


def told(*words: str | Path) -> tuple[int, str]:
    """(exit code, stdout) of a command of ours run in this process; `Fault` unless it succeeded or named an error."""
    out, err = io.StringIO(), io.StringIO()
    with measured(), redirect_stdout(out), redirect_stderr(err):
        code = command(*words)
    text = err.getvalue()
    SEEN.update(set(re.findall(r"\bE\d{4}\b", text + out.getvalue())) or {"ok"})
    if code not in (0, 1, 2) or "Traceback" in text:
        raise Fault(f"{words[0]}: exit code {code}: {text[-2000:]}")
    if code and not re.search(r"\b[EW]\d{4}\b", text + out.getvalue()):
        raise Fault(f"{words[0]}: exit code {code} without an error's code: {text[:500]!r}")
    _check_text(text[-TEXT:] if words[0] == "verify" else text)
    if found := _CONTROL.search(out.getvalue()):
        raise Fault(f"{words[0]}: a raw {found[0]!r} on stdout")
    return code, out.getvalue()


# -- sound inputs ------------------------------------------------------------------------------------------------------


class Bench:
    """Sound checkpoints, containers and audits below `root`, made when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def source(self) -> Path:
        root = write_checkpoint(self.root / "source", SMALL.tensors(), SMALL.config(), shards=2)
        for name, table in SIDES.items():
            (root / name).write_text(json.dumps(table))
        return root

    @cached_property
    def fp8_source(self) -> Path:
        return Fp8Spec(hidden=64, intermediate=64, dense=False).write(self.root / "fp8")

    @cached_property
    def single(self) -> Path:
        """The same model in one file, without an index."""
        return write_checkpoint(self.root / "single", SMALL.tensors(), SMALL.config())

    @cached_property
    def _containers(self) -> dict[str, Path]:
        return {}

    def container(self, codec: str) -> Path:
        if codec not in self._containers:
            self._containers[codec] = self.root / f"container-{codec}"
            prepare(self.source, self._containers[codec], encodings.get(codec), workers=1)
        return self._containers[codec]

    def encoded(self, dense: str) -> Path:
        """A container whose dense matrices are encoded."""
        key = f"dense-{dense}"
        if key not in self._containers:
            self._containers[key] = self.root / f"container-{key}"
            prepare(self.source, self._containers[key], encodings.get("bf16"), workers=1, dense=dense)
        return self._containers[key]

    @cached_property
    def unfinished(self) -> Path:
        """The output of a conversion that was stopped when one file was done."""
        output = self.root / "unfinished"

        def stop(_: int) -> None:
            journal = next(output.glob(".pagestone-partial/.journal*"), None)
            if journal is not None and len(journal.read_bytes().splitlines()) > 2:
                raise KeyboardInterrupt

        try:
            prepare(self.source, output, encodings.get("int8"), workers=1, progress=stop)
        except KeyboardInterrupt:
            return output
        except PagestoneError:
            return output
        raise AssertionError("the conversion was not stopped")

    @cached_property
    def audit(self) -> Path:
        """An audit with its traces, as `verify-logits --audit` writes them."""
        prompts = [Prompt("one", (1, 2, 3)), Prompt("two", (4,))]

        def side(mode: str) -> Side:
            digests = {"input": "ab" * 16, "routing": "cd" * 32, "expert": "ef" * 16, "output": "01" * 16}
            events = [Event(0, what, 1 if what == "expert" else None, found) for what, found in digests.items()]
            facts = [[(3, "ab", 5), (1, "cd", 6)], [(1, "ef", 7), (1, "01", 8)]]
            steps = [[ForwardPass(fed, sha * 32, choice, list(events)) for fed, sha, choice in one] for one in facts]
            return Side(mode, steps, 0.5, budget=4096, peak_bytes=4096)

        made = audits.Audit(
            "equal", open_container(self.container("int8")), HERE, prompts, side("resident"), side("direct"), readers=2
        )
        path = self.root / "audit" / "a.json"
        path.parent.mkdir()
        self.traces = made.write(path)
        return path


HERE: dict[str, Any] = {
    "machine": {"cpu": "a cpu", "architecture": "x86_64", "system": "Linux"},
    "versions": {"pagestone": "0", "python": "3", "torch": "2", "transformers": "5", "numpy": "2", "torch_build": "0"},
    "threads": {"torch": 1, "torch_interop": 1},
    "model": {"host": "transformers", "class": "Model", "dtype": "bfloat16", "attention": "eager", "experts": "native"},
    "products": {"isa": "avx2", "threads": 1},
}  # fmt: skip


@contextmanager
def _holding(path: Path, data: bytes) -> Iterator[None]:
    """`path` holds `data`, a new file; afterwards what it held before."""
    before = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)


@contextmanager
def _vouched(root: Path, name: str) -> Iterator[None]:
    """The manifest vouches for the file `name` as it is now: what reads it is asked, not its digest."""
    manifest, path = read_manifest(root / MANIFEST), root / name
    data = path.read_bytes()
    try:
        layout = read_layer_file(path)[1]
    except PagestoneError:
        found = digest(data)
    else:
        start, stride = layout.data_start, layout.stride
        records = (data[at : at + stride] for at in range(start, len(data), stride))
        found = layer_digest(data[:start], [digest(r) for r in records])
    files = dict(manifest.files) | {name: replace(manifest.files[name], nbytes=len(data), xxh3=found, sha256=None)}
    with _holding(root / MANIFEST, replace(manifest, files=files).to_bytes()):
        yield


# -- what reads them ---------------------------------------------------------------------------------------------------


def _read_container(root: Path) -> None:
    """Everything that reads a container without running a model."""
    judged(lambda: _touch(root))
    told("inspect", root)
    told("inspect", root, "--json")
    told("verify", root)
    with measured(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        if plain_reader.main(root) not in (0, 1):
            raise Fault("the plain reader")


def _touch(root: Path) -> None:
    container = open_container(root)
    for layer in [*container.layers.values(), *container.mtp.values()]:
        expert = layer.expert(len(layer) - 1)
        for matrix in (expert.gate, expert.up, expert.down):
            matrix.decode()
    read_sidecars(container)
    dense = container.manifest.dense
    for file in () if dense is None else dense.files:
        read_matrices(root / file, dense, file)
    digests = RecordDigests(container)
    for layer in container.layers.values():
        digests.of(layer)


def _convert(source: Path, output: Path, random: Random) -> None:
    """Plan with a codec; sometimes convert. What was converted verifies against what it was made from."""
    codec, dense = pick(random, CODECS), ["--dense", pick(random, (KEEP, *ENCODED))]
    code, _ = told(f"prepare-{codec}", source, "--output", output, "--dry-run", *pick(random, ([], ["--json"])), *dense)
    if random.randrange(4):
        return
    try:
        made, _ = told(f"prepare-{codec}", source, "--output", output, "--workers", "1", *dense)
        if made == 0:
            if code:
                raise Fault("a dry run refused what was converted")
            found, text = told("verify", output, "--source", source)
            if found:
                raise Fault(f"converted, but it does not verify: {text[-2000:]}")
            _touch(output)
    finally:
        shutil.rmtree(output, ignore_errors=True)


# -- cases -------------------------------------------------------------------------------------------------------------

Case = Callable[[Bench, Random], None]
CASES: dict[str, Case] = {}


def _case(function: Case) -> Case:
    CASES[function.__name__.strip("_").replace("_", " ")] = function
    return function


def case(bench: Bench, name: str, random: Random) -> None:
    """Run one case of a kind; `Fault` if the program failed it."""
    try:
        CASES[name](bench, random)
    except Fault:
        raise
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {str(error)[:500]}") from error


def _shard(root: Path, random: Random) -> Path:
    return pick(random, sorted(root.glob("*.safetensors")))


@_case
def _header(bench: Bench, random: Random) -> None:
    path = _shard(pick(random, (bench.source, bench.container("int8"), bench.container("q4"))), random)
    with _holding(path, mutate.damaged_safetensors(random, path.read_bytes())):
        judged(lambda: read_header(path))
        judged(lambda: read_layer_file(path))


@_case
def _config(bench: Bench, random: Random) -> None:
    source = pick(random, (bench.source, bench.fp8_source))
    path = source / "config.json"
    with _holding(path, mutate.damaged_json(random, path.read_bytes())):
        _convert(source, bench.root / "out", random)


@_case
def _index(bench: Bench, random: Random) -> None:
    path = bench.source / "model.safetensors.index.json"
    with _holding(path, mutate.damaged_json(random, path.read_bytes())):
        _convert(bench.source, bench.root / "out", random)


@_case
def _shards(bench: Bench, random: Random) -> None:
    source = pick(random, (bench.source, bench.fp8_source))
    path = _shard(source, random)
    with _holding(path, mutate.damaged_safetensors(random, path.read_bytes())):
        _convert(source, bench.root / "out", random)


@_case
def _tensors(bench: Bench, random: Random) -> None:
    source = pick(random, (bench.single, bench.fp8_source))
    path = _shard(source, random)
    with _holding(path, mutate.rearranged(random, path.read_bytes())):
        _convert(source, bench.root / "out", random)


@_case
def _manifest(bench: Bench, random: Random) -> None:
    root = bench.container(pick(random, CODECS)) if random.randrange(2) else bench.encoded(pick(random, ENCODED))
    path = root / MANIFEST
    changed = mutate.damaged_json(random, path.read_bytes(), mutate.compact)
    if random.randrange(4):  # its own digest is right again, and perhaps its container id
        changed = _signed(changed, whole=bool(random.randrange(2)))
    with _holding(path, changed):
        judged(lambda: read_manifest(path))
        _read_container(root)


def _signed(raw: bytes, *, whole: bool) -> bytes:
    """Canonical, with its own digest and, if `whole`, its container id: as far as it is of a kind that can be."""
    try:
        table = json.loads(raw)
        table.pop("digest", None)
        if whole:
            codec = table["codec"]
            files = {n: bytes.fromhex(e["xxh3_128"]) for n, e in table["files"].items() if n not in NOT_IN_ID}
            dense = table.get("dense")
            encoded = None if dense is None else {key: dense[key] for key in ("codec", "parameters")}
            found = container_id(files, codec["name"], codec["parameters"], SPEC_VERSION, encoded)
            table["container_id"] = found.hex()
        table["digest"] = digest(mutate.canonical(table)).hex()
        return mutate.canonical(table)
    except (LookupError, ValueError, AttributeError, TypeError, RecursionError):
        return raw


@_case
def _layer(bench: Bench, random: Random) -> None:
    root = bench.container(pick(random, CODECS))
    path = pick(random, sorted(root.glob("layers-*.safetensors")))
    if random.randrange(4):
        changed = mutate.damaged_safetensors(random, path.read_bytes())
    else:
        header, data = mutate.split(path.read_bytes())
        changed = mutate.joined(header, mutate.damaged(random, data))
    with _holding(path, changed), _vouched(root, path.name):
        _read_container(root)


@_case
def _dense(bench: Bench, random: Random) -> None:
    root = bench.container(pick(random, CODECS))
    path = pick(random, sorted(root.glob("dense*.safetensors")))
    with _holding(path, mutate.damaged_safetensors(random, path.read_bytes())), _vouched(root, path.name):
        _read_container(root)


@_case
def _matrices(bench: Bench, random: Random) -> None:
    """A file of encoded dense matrices, or what the manifest says of it; both vouched for."""
    root = bench.encoded(pick(random, ENCODED))
    path, manifest = next(root.glob("matrices-*.safetensors")), root / MANIFEST
    kind = random.randrange(3)
    if kind == 0:
        with _holding(path, mutate.damaged_safetensors(random, path.read_bytes())), _vouched(root, path.name):
            _read_container(root)
    elif kind == 1:
        header, data = mutate.split(path.read_bytes())
        with _holding(path, mutate.joined(header, mutate.damaged(random, data))), _vouched(root, path.name):
            _read_container(root)
    else:
        table = json.loads(manifest.read_bytes())
        dense = mutate.damaged_json(random, mutate.canonical(table["dense"]), mutate.compact)
        raw = manifest.read_bytes().replace(mutate.canonical(table["dense"]), dense, 1)
        with _holding(manifest, _signed(raw, whole=True)):
            _read_container(root)


@_case
def _side_files(bench: Bench, random: Random) -> None:
    root = bench.container(pick(random, CODECS))
    path = root / pick(random, ("config.json", "model.safetensors.index.json", *SIDES))
    with _holding(path, mutate.damaged_json(random, path.read_bytes())), _vouched(root, path.name):
        for read in (end_tokens, read_config, choose_sampling):
            judged(lambda read=read: read(root))
        _read_container(root)


@_case
def _digests(bench: Bench, random: Random) -> None:
    root = bench.container(pick(random, CODECS))
    path = root / RECORDS
    with _holding(path, mutate.damaged(random, path.read_bytes())):
        _read_container(root)
        with _vouched(root, path.name):
            _read_container(root)


@_case
def _parquet(bench: Bench, random: Random) -> None:
    root = bench.container(pick(random, CODECS))
    path = root / EXPERTS_TABLE
    changed = mutate.damaged(random, path.read_bytes()) if random.randrange(2) else _table(random, path)
    with _holding(path, changed), _vouched(root, path.name):
        judged(lambda: read_experts(path))
        _read_container(root)


def _table(random: Random, path: Path) -> bytes:
    """A Parquet file of ours with other columns, types, values, nulls, or far too many rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = (
        pa.string(), pa.binary(), pa.int64(), pa.float32(), pa.list_(pa.string()), pa.timestamp("ns"), pa.null(),
        pa.dictionary(pa.int32(), pa.string()),
    )  # fmt: skip
    odd = {"string": ("", "x" * 1000, "\x1b[31m"), "double": (float("nan"), float("inf"), -1.0, 1e308)}
    with path.open("rb") as file:
        table = pq.ParquetFile(file).read()
    columns = dict(zip(table.column_names, (c.to_pylist() for c in table.columns), strict=True))
    kinds = dict(zip(table.column_names, table.schema.types, strict=True))
    for _ in range(1 + random.randrange(2)):
        name, kind = pick(random, list(columns)), random.randrange(6)
        values, at = columns[name], random.randrange(table.num_rows)
        if kind == 0:
            values[at] = None
        elif kind == 1:
            columns[name] = [None] * len(values)
        elif kind == 2:
            values[at] = pick(random, (pick(random, values), *odd.get(str(kinds[name]), (-1, 0, 2**31 - 1))))
        elif kind == 3:
            kinds[name], columns[name] = pick(random, types), [None] * len(values)
        elif kind == 4:
            del columns[name], kinds[name]
        else:
            columns[name + "x"], kinds[name + "x"] = values, kinds[name]
    made = pa.table({n: pa.array(v, kinds[n]) for n, v in columns.items()})
    batches = [made]
    if random.randrange(8) == 0:
        first = pa.table(
            {n: pa.repeat(c[0], 50_000) if n in kinds else c for n, c in zip(columns, made.columns, strict=True)}
        )
        batches = pick(random, ([], [made, made], [made[:1]], [first] * pick(random, (1, 8))))
    sink = pa.BufferOutputStream()
    how = {"compression": pick(random, ("zstd", "none", "snappy")), "use_dictionary": bool(random.randrange(2))}
    with pq.ParquetWriter(sink, made.schema, **how) as writer:
        for batch in batches:
            writer.write_table(batch)
    return bytes(sink.getvalue())[:LARGEST]


@_case
def _audit(bench: Bench, random: Random) -> None:
    path = bench.audit
    with _holding(path, mutate.damaged_json(random, path.read_bytes())):
        judged(lambda: _read_audit(path))


@_case
def _traces(bench: Bench, random: Random) -> None:
    import zstandard

    path, traces = bench.audit, bench.traces
    if random.randrange(2):
        changed = mutate.damaged(random, traces.read_bytes())
    else:
        with traces.open("rb") as file:
            lines = zstandard.ZstdDecompressor().stream_reader(file).read()
        changed = mutate.damaged_lines(random, lines)
        if random.randrange(8) == 0:
            changed = pick(random, (b" ", b"\n", b"[", changed[:1], changed)) * pick(random, (10**5, 10**6))
            changed = changed[: 64 << 20]
        changed = zstandard.ZstdCompressor().compress(changed)
    with _holding(traces, changed):
        judged(lambda: _read_audit(path))


def _read_audit(path: Path) -> None:
    recorded = read_audit(path)
    audits.differing(HERE, recorded.surroundings)
    recorded.check_ids(1000)
    for _ in recorded.events({0: 2}):
        pass


@_case
def _work(bench: Bench, random: Random) -> None:
    """The work directory of a stopped conversion: continued to the right bytes, or refused, by every command."""
    output = bench.root / "continued"
    shutil.copytree(bench.unfinished, output, symlinks=True)
    partial = output / ".pagestone-partial"
    path = pick(random, sorted(p for p in partial.iterdir() if p.is_file()))
    data = path.read_bytes()
    change = mutate.damaged_lines if "journal" in path.name else mutate.damaged
    changed = change(random, data) if data else pick(random, (b"x", b"{}", b"\0" * 100))
    path.write_bytes(_vouched_lines(changed) if "journal" in path.name and random.randrange(2) else changed)
    try:
        force = ["--force"] if random.randrange(4) == 0 else []
        code, _ = told("prepare-int8", bench.source, "--output", output, "--workers", "1", *force)
        if code == 0 and contents(output) != contents(bench.container("int8")):
            raise Fault(f"continued from damaged {path.name} to other bytes")
    finally:
        shutil.rmtree(output)


def _vouched_lines(journal: bytes) -> bytes:
    """Lines whose own digest is right again, whatever they say."""
    made = []
    for line in journal.splitlines():
        try:
            table = json.loads(line)
            table.pop("digest")
            line = json.dumps(table | {"digest": digest(json.dumps(table, sort_keys=True).encode()).hex()}).encode()
        except (LookupError, ValueError, AttributeError, TypeError, RecursionError):
            pass
        made.append(line + b"\n")
    return b"".join(made)


@_case
def _lines(bench: Bench, random: Random) -> None:
    """Files of questions and of token ids that users give."""
    path = bench.root / "lines"
    lines = b'{"question": "a?", "answer": "b"}\n{"question": "c?", "answer": "d"}\n'
    path.write_bytes(mutate.damaged_lines(random, lines))
    judged(lambda: read_questions(path, pick(random, (None, 1))))
    path.write_bytes(mutate.damaged_lines(random, b"[1, 2, 3]\n[7]\n"))
    judged(lambda: read_ids(path, 100))


@_case
def _codes(bench: Bench, random: Random) -> None:
    """Stored arrays of any bits: decoded, multiplied and judged without an error, the same by kernel and definition."""
    codec = encodings.get(pick(random, sorted(encodings.registry())))
    rows, columns = pick(random, (1, 5, 129)), pick(random, (64, 192))
    bits = np.random.default_rng(random.randrange(2**32))
    stored = {}
    for tensor in codec.in_record(rows, columns):
        array = codec.allocate(rows, columns)[tensor.name]
        stored[tensor.name] = np.frombuffer(bits.bytes(array.nbytes), array.dtype).reshape(array.shape)
    list(codec.problems(stored, rows, columns))
    codec.values(stored, rows, columns)
    x = bits.integers(0, 0x7F80, (2, columns)).astype(np.uint16)
    results = []
    for isa in native.available():
        with native.forced(isa):
            results.append(codec.matmul(stored, x, rows, columns).tobytes())
    # what the row sums of int8 take off again is right only if they are
    if len(set(results)) > 1 and "row_sums" not in stored:
        raise Fault(f"{codec.name} [{rows}, {columns}]: products differ between instruction sets")


@_case
def _scales(bench: Bench, random: Random) -> None:
    """Codes and scales of any bits from a quantised source: values, or the row and column of what is none."""
    bits = np.random.default_rng(random.randrange(2**32))
    dtype = pick(random, SCALE_DTYPES)
    made = pick(random, (Fp8Source, Int8Source))
    kind = made(pick(random, ((32, 32), (1, 64), (64, 64), (128, 128))), dtype, pick(random, (0, 0, 5)))
    grid = kind.roles(64, 64)[1].shape
    width = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(dtype, "u1")
    raw = np.frombuffer(bits.bytes(grid[0] * grid[1] * np.dtype(width).itemsize), width).reshape(grid)
    codes = np.frombuffer(bits.bytes(64 * 64), np.uint8 if made is Fp8Source else np.int8).reshape(64, 64)
    if random.randrange(2) and made is Fp8Source:
        codes = np.where(np.isnan(E4M3_VALUES[codes]), 0, codes).astype(np.uint8)
    if random.randrange(2):  # without signs
        raw = {"F32": np.abs, "F16": np.abs, "BF16": lambda bits: bits & np.uint16(0x7FFF)}.get(dtype, np.array)(raw)
    codec = encodings.get(pick(random, sorted(encodings.registry()))).for_sources([kind])
    judged(lambda: codec.write({"codes": codes, "scales": raw}, kind, 64, 64, codec.allocate(64, 64)))
