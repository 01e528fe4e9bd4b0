"""`pagestone inspect`, `pagestone run` and `pagestone chat`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagestone.formats import native
from pagestone.formats.errors import RequestError
from pagestone.formats.layout import PARTS
from pagestone.formats.manifest import EXPERTS, read_experts
from pagestone.formats.text import shown, shown_lines
from pagestone.reader.budget import default_budget, parse_size, row_sum_bytes, size_text
from pagestone.reader.container import Container, open_container, open_to_run

if TYPE_CHECKING:
    from pagestone.reader.host import HostModel
    from pagestone.reader.store import ExpertStore


def register(app: typer.Typer) -> None:
    """Add the commands of this room to the application."""
    app.command("inspect", help="Show what a container holds; nothing is checked beyond its tables.")(_inspect)
    app.command("run", help="Answer one prompt with the model in a container.")(_run)
    app.command("chat", help="Talk to the model in a container; Ctrl-C ends an answer, Ctrl-D the session.")(_chat)


def describe(container: Container) -> dict[str, Any]:
    """Everything `inspect --json` prints."""
    manifest = container.manifest
    errors = _relative_errors(container)
    layers = []
    for layer in [*container.layers.values(), *container.mtp.values()]:
        file = layer.file
        layers.append(
            {
                "file": layer.entry.file,
                "block": file.block,
                "layer": file.layer,
                "experts": len(layer),
                "hidden": file.shape.hidden,
                "intermediate": file.shape.intermediate,
                "stride": layer.stride,
                "data_start": layer.layout.data_start,
                "prefix": file.prefix,
                "sidecar": layer.entry.sidecar,
                "relative_rms_error": errors.get(layer.entry.file),
                "record": [
                    {
                        "name": f"{file.part_names[PARTS.index(s.part)]}.{s.suffix}" if s.part else s.suffix,
                        "dtype": s.dtype,
                        "shape": list(s.shape),
                        "offset": s.offset,
                        "bytes": s.nbytes,
                    }
                    for s in layer.layout.record.slots
                ],
            }
        )
    return {
        "directory": str(container.path), "container_id": container.container_id, "codec": manifest.codec,
        "parameters": dict(manifest.parameters), "lossless": manifest.lossless, "partial": manifest.partial,
        "source": dict(manifest.source), "bytes": sum(f.nbytes for f in manifest.files.values()),
        "files": {name: f.nbytes for name, f in sorted(manifest.files.items())}, "layers": layers,
    }  # fmt: skip


def _relative_errors(container: Container) -> dict[str, float]:
    """Relative RMS error of every layer file against its source, from the sums in experts.parquet."""
    columns = read_experts(container.path / EXPERTS)
    sums: dict[str, list[float]] = {}
    for file, error, norm in zip(columns["file"], columns["squared_error"], columns["squared_norm"], strict=True):
        total = sums.setdefault(file, [0.0, 0.0])
        total[0] += error
        total[1] += norm
    return {file: (error / norm) ** 0.5 if norm else 0.0 for file, (error, norm) in sums.items()}


def _text(table: dict[str, Any]) -> str:
    lines = [
        f"{table['directory']}: {table['codec']} {table['parameters'] or ''}".rstrip(),
        f"  container id {table['container_id']}",
        f"  family {table['source']['family']}, experts from {', '.join(table['source']['expert_dtypes'])}"
        f"{', lossless' if table['lossless'] else ''}"
        + (f", partial: layers {table['partial'][0]} to {table['partial'][1] - 1}" if table["partial"] else ""),
        f"  {table['bytes']:,} bytes in {len(table['files']) + 1} files",
        "",
        f"  {'file':<24}{'experts':>8}{'hidden':>8}{'inter.':>8}{'record':>12}{'at':>10}{'rel. error':>12}",
    ]
    for x in table["layers"]:
        error = x["relative_rms_error"]
        lines.append(
            f"  {x['file']:<24}{x['experts']:>8}{x['hidden']:>8}{x['intermediate']:>8}{x['stride']:>12,}"
            f"{x['data_start']:>10,}{'' if error is None else format(error, '.5f'):>12}"
        )
    lines += ["", "  a record:"]
    for s in table["layers"][0]["record"]:
        lines.append(f"  {s['offset']:>12,}  {s['name']:<28}{s['dtype']:<9}{s['shape']}")
    return shown_lines(lines)


def _inspect(
    directory: Annotated[Path, typer.Argument(help="Directory of the container.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    table = describe(open_container(directory))
    print(json.dumps(table, indent=1) if as_json else _text(table))


# -- running ----------------------------------------------------------------------------------------------------------

Directory = Annotated[Path, typer.Argument(help="Directory of the container.")]
Budget = Annotated[
    str | None, typer.Option(help="Memory for experts, such as 2GiB. Default: half of what is free, at most all.")
]
Io = Annotated[str, typer.Option(help="How experts are read: direct, mmap or resident.")]
Threads = Annotated[int, typer.Option(min=0, max=64, help="Threads that read ahead in direct mode.")]
Experts = Annotated[
    str,
    typer.Option(
        help="native multiplies the codes as they are, with as many threads as torch (OMP_NUM_THREADS); reference "
        "decodes each expert and lets torch multiply: slow, the oracle; auto is native, but reference for bf16, where "
        "nothing needs decoding."
    ),
]
MOST = 10**9
"""The most that an option which counts something takes: beyond is a slip, and numbers that no C integer holds."""
Tokens = Annotated[int, typer.Option(min=1, max=MOST, help="End an answer after this many tokens.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Directory of a tokenizer, if the container has none.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above, tokens are drawn at random.")]
TopP = Annotated[float, typer.Option(help="Draw among the likeliest tokens that have this share together.")]
TopK = Annotated[int, typer.Option(help="Draw among this many tokens; 0 for all.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same tokens.")]


@dataclass(frozen=True, slots=True)
class Opened:
    """A container with its store and model, for `run`, `chat` and the judges."""

    container: Container
    store: ExpertStore
    model: HostModel


def open_model(
    directory: Path, budget: str | None, io: str, threads: int, note: Any = lambda _: None, experts: str = "auto"
) -> Opened:
    """The model of a container, ready to run; `note` is told how experts are read and multiplied."""
    from pagestone.reader import host
    from pagestone.reader.dense import dense_entries
    from pagestone.reader.store import StoreOptions, open_store

    host.require()
    container = open_to_run(directory)
    experts = host.experts_for(container.manifest.codec, experts)
    host.check_runnable(container)
    sums = row_sum_bytes(container) if experts == host.NATIVE else 0
    if budget is not None and io != "direct":
        raise RequestError(
            f"--budget bounds reads into a cache, and --io {io} has none", code="E1240", remedy="use --io direct"
        )
    room = None
    if io == "direct":
        dense = sum(e.nbytes for _, e in dense_entries(container).values())
        room = parse_size(budget) if budget is not None else default_budget(container, dense + sums)
    store, notes = open_store(container, StoreOptions(io, room, threads, row_sums=experts == host.NATIVE))
    try:
        model = host.load(container, store, experts=experts)
    except BaseException:
        store.close()
        raise
    budgeted = "" if room is None else f", at most {size_text(room)} of experts in memory"
    checked = " (not compared with their digests)" if io == "mmap" else ""
    how = f"native products ({native.isa()})" if experts == host.NATIVE else "reference products"
    codec = container.manifest.codec
    for text in (f"{codec} experts, {how}, {store.mode}{checked}{budgeted}", *notes, *model.notes):
        note(text)
    if sums:
        held = "mapped" if io == "mmap" else "in memory beside them, read once"
        note(f"row sums of all experts: {size_text(sums)} {held}")
    for cast in model.casts:
        note(f"{cast.name}: stored as {cast.stored}, runs as {cast.used}, as in transformers")
    return Opened(container, store, model)


def _note(text: str) -> None:
    print(shown(text), file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _run(
    directory: Directory,
    prompt: Annotated[str, typer.Option(help="What the user says; - reads it from stdin.")],
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, no chat template.")] = False,
    max_new_tokens: Tokens = 256,
    budget: Budget = None,
    io: Io = "direct",
    threads: Threads = 2,
    experts: Experts = "auto",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, at the end.")] = False,
) -> None:
    from pagestone.reader.chat import Conversation, Sampling
    from pagestone.reader.leases import Totals
    from pagestone.reader.text import chat_ids, end_tokens, open_tokenizer

    sampling = Sampling(temperature, top_p, top_k, seed)
    open_to_run(directory)
    tokens = open_tokenizer(directory, tokenizer)
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    ids = tokens(text)["input_ids"] if raw else chat_ids(tokens, messages, directory)
    if not ids:
        raise RequestError("a prompt of at least one token expected, found none", code="E1243", remedy="say something")
    opened = open_model(directory, budget, io, threads, _note, experts)
    try:
        talk = Conversation(opened.model, tokens, directory, sampling, end_tokens(directory))
        turn = talk.turn(ids, max_new_tokens, (lambda _: None) if as_json else _say)
        if as_json:
            counters = Totals.of(opened.store.counters).layers
            print(json.dumps(turn.table() | {
                "directory": str(directory), "container_id": opened.container.container_id, "io": opened.store.mode,
                "experts": opened.model.context.experts,
                "peak_bytes": getattr(opened.store, "peak_bytes", None),
                "layers": {str(n): c.table() for n, c in counters.items()},
            }, indent=1))  # fmt: skip
        else:
            print()
            _note(turn.report())
    finally:
        opened.model.close()
    if turn.stopped == "interrupted":
        raise typer.Exit(130)


def _chat(
    directory: Directory,
    system: Annotated[str | None, typer.Option(help="A system message before the first turn.")] = None,
    max_new_tokens: Tokens = 1024,
    budget: Budget = None,
    io: Io = "direct",
    threads: Threads = 2,
    experts: Experts = "auto",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
) -> None:
    from pagestone.reader.chat import Conversation, Sampling, session
    from pagestone.reader.text import chat_ids, end_tokens, open_tokenizer

    sampling = Sampling(temperature, top_p, top_k, seed)
    open_to_run(directory)
    tokens = open_tokenizer(directory, tokenizer)
    chat_ids(tokens, [{"role": "user", "content": "?"}], directory)
    opened = open_model(directory, budget, io, threads, _note, experts)
    shown = sys.stdin.isatty()
    if shown:
        import readline  # noqa: F401 - gives `input` its line editing

    def ask() -> str | None:
        try:
            return input("> " if shown else "")
        except EOFError:
            return None

    try:
        talk = Conversation(opened.model, tokens, directory, sampling, end_tokens(directory))
        session(talk, max_new_tokens, ask, _say, _note, system)
    finally:
        opened.model.close()
