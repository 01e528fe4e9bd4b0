"""`pagestone inspect`, `pagestone run` and `pagestone chat`."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from pagestone.formats.dense_matrices import DenseEncoding
from pagestone.formats.directories import directory as named
from pagestone.formats.errors import RequestError
from pagestone.formats.layout import PARTS, matrix_record
from pagestone.formats.manifest import EXPERTS_TABLE, read_experts
from pagestone.formats.text import shown, shown_lines, with_parameters
from pagestone.reader import inputs
from pagestone.reader.budget import parse_size
from pagestone.reader.container import Container, Opener, open_container
from pagestone.reader.files import MachineErrors

if TYPE_CHECKING:
    from pagestone.reader.sampling import Sampling
    from pagestone.reader.session import Session

Directory = Annotated[Path, typer.Argument(help="Directory of the container.", parser=named)]


def register(app: typer.Typer, opener: Opener | None = None) -> None:
    """Add the commands of this room to the application.

    `opener` opens what `run` and `chat` are given, and may take more than the directory of a container.
    """
    what = "a container" if opener is None else "a container, or in a checkpoint as it is"
    app.command("inspect", help="Show what a container holds; nothing is checked beyond its tables.")(_inspect)
    app.command("run", help=f"Answer one prompt with the model in {what}.")(with_options(_run, opener))
    app.command("chat", help=f"Talk to the model in {what}; Ctrl-C ends an answer, Ctrl-D the session.")(
        with_options(_chat, opener)
    )


def describe(container: Container) -> dict[str, Any]:
    """Everything `inspect --json` prints."""
    manifest = container.manifest
    errors, zeros = _relative_errors(container)
    layers = []
    for layer in [*container.layers.values(), *container.mtp.values()]:
        header = layer.header
        layers.append(
            {
                "file": layer.entry.file,
                "block": header.block,
                "layer": header.layer,
                "experts": len(layer),
                "hidden": header.shape.hidden,
                "intermediate": header.shape.intermediate,
                "stride": layer.stride,
                "data_start": layer.layout.data_start,
                "prefix": header.prefix,
                "sidecar": layer.entry.sidecar,
                "relative_rms_error": errors.get(layer.entry.file),
                "zero_matrices": zeros[layer.entry.file],
                "record": [
                    {
                        "name": f"{header.part_names[PARTS.index(s.part)]}.{s.suffix}" if s.part else s.suffix,
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
        "dense": None if manifest.dense is None else _dense(manifest.dense),
    }  # fmt: skip


def _dense(dense: DenseEncoding) -> dict[str, Any]:
    """What `inspect` says of encoded dense matrices; errors from the manifest."""

    def relative(error: float, norm: float) -> float | None:
        share = error / norm if norm > 0 else math.inf
        return math.sqrt(share) if math.isfinite(share) else None

    sums = [(m.squared_error, m.squared_norm) for m in dense.matrices]
    return {
        "codec": dense.codec, "parameters": dict(dense.parameters),
        "bytes": sum(matrix_record(dense.encoding, m.rows, m.columns).nbytes for m in dense.matrices),
        "relative_rms_error": relative(sum(e for e, _ in sums), sum(n for _, n in sums)),
        "matrices": [
            {"name": m.name, "file": m.file, "rows": m.rows, "columns": m.columns,
             "relative_rms_error": relative(m.squared_error, m.squared_norm)}
            for m in dense.matrices
        ],
    }  # fmt: skip


def _relative_errors(container: Container) -> tuple[dict[str, float], Counter[str]]:
    """By layer file, from experts.parquet: relative RMS error against the source, and matrices that are all zero.

    Sums that cannot be such (negative, not finite) give no error, and neither does a layer of zeros alone.
    """
    with MachineErrors(container.path / EXPERTS_TABLE, "reading"):
        columns = read_experts(container.path / EXPERTS_TABLE, container.manifest.matrices)
    sums: dict[str, list[float]] = {}
    zeros: Counter[str] = Counter()
    for file, error, norm in zip(columns["file"], columns["squared_error"], columns["squared_norm"], strict=True):
        total = sums.setdefault(file, [0.0, 0.0])
        total[0] += error
        total[1] += norm
        zeros[file] += norm == 0
    relative = {
        file: math.sqrt(error / norm)
        for file, (error, norm) in sums.items()
        if math.isfinite(error) and math.isfinite(norm) and error >= 0 and norm > 0
    }
    return relative, zeros


def _origin(source: dict[str, Any]) -> str:
    """Where the weights came from, as far as a manifest says it: no reader needs these facts."""
    family, dtypes = source.get("family"), source.get("expert_dtypes")
    listed = isinstance(dtypes, list) and dtypes and all(isinstance(d, str) for d in dtypes)
    return (
        f"family {family if isinstance(family, str) else 'not known'}, "
        f"experts from {', '.join(dtypes) if listed and dtypes else 'what is not known'}"
    )


def _text(table: dict[str, Any]) -> str:
    lines = [
        f"{table['directory']}: {table['codec']}{with_parameters(table['parameters'])}",
        f"  container id {table['container_id']}",
        f"  {_origin(table['source'])}"
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
    if (dense := table["dense"]) is not None:
        error = dense["relative_rms_error"]
        lines.append(
            f"  {len(dense['matrices'])} dense matrices in {dense['codec']}{with_parameters(dense['parameters'])}, "
            f"{dense['bytes']:,} bytes{'' if error is None else f', rel. error {error:.5f}'}"
        )
    zero, total = (sum(x["zero_matrices"] for x in table["layers"]), 3 * sum(x["experts"] for x in table["layers"]))
    if zero:
        lines += ["", f"  {zero} of {total} matrices are all zero"]
    lines += ["", "  a record:"]
    for s in table["layers"][0]["record"]:
        lines.append(f"  {s['offset']:>12,}  {s['name']:<28}{s['dtype']:<9}{s['shape']}")
    return shown_lines(lines)


def _inspect(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    table = describe(open_container(directory))
    print(json.dumps(table, indent=1) if as_json else _text(table))


# -- running ----------------------------------------------------------------------------------------------------------

MOST = 10**9
"""The most that an option which counts something takes: beyond is a slip, and numbers that no C integer holds."""
Default = "Default: what generation_config.json recommends, "


@dataclass(frozen=True, slots=True)
class Running:
    """The options of `run` and `chat` alike: how experts are read, and how answers are made."""

    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for everything, such as 4GiB: libraries, dense tensors, context and experts. What it is used "
            "for is printed before the model is loaded."
        ),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="Tokens of prompt and answer together. Default with --memory: at most 8192, what the "
            "model was made for, and what the memory leaves; without: no limit.",
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(help="Memory for experts alone, such as 2GiB. Default: half of what is free, at most all."),
    ] = None
    io: Annotated[
        str,
        typer.Option(
            help="How experts and dense tensors are read: direct, mmap (as they are, not compared with digests) or "
            "resident."
        ),
    ] = "direct"
    threads: Annotated[int, typer.Option(min=0, max=64, help="Threads that read ahead in direct mode.")] = 2
    experts: Annotated[
        str,
        typer.Option(
            help="native multiplies the codes as they are, with as many threads as torch (OMP_NUM_THREADS); reference "
            "decodes each expert and lets torch multiply: slow, the oracle; auto is native, but reference for bf16, "
            "where nothing needs decoding."
        ),
    ] = "auto"
    temperature: Annotated[
        float | None,
        typer.Option(help=f"0 is greedy; above, tokens are drawn at random. {Default}else 0."),
    ] = None
    top_k: Annotated[int | None, typer.Option(help=f"Draw among this many tokens; 0 for all. {Default}else 0.")] = None
    top_p: Annotated[
        float | None,
        typer.Option(help=f"Draw among the likeliest tokens that have this share together. {Default}else 1."),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help=f"Draw among tokens at least this share as likely as the likeliest. {Default}else 0."),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help=f"Above 1, tokens that were there already are less likely. {Default}else 1.")
    ] = None
    seed: Annotated[int, typer.Option(help="The same seed draws the same tokens.")] = 0
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, if the container has none.", parser=named)
    ] = None
    template_var: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE for the chat template, such as enable_thinking=false; a VALUE that is JSON is taken as "
            "such. May be repeated."
        ),
    ] = None

    def open(self, directory: Path, opener: Opener | None) -> Session:
        """The container with everything these options say; its model is not loaded yet."""
        from pagestone.reader.session import Session, SessionOptions
        from pagestone.reader.text import parse_variables

        options = SessionOptions(
            self.io, None if self.budget is None else parse_size(self.budget), self.threads, self.experts,
            self.tokenizer, parse_variables(self.template_var or []), context=self.context,
            memory=None if self.memory is None else parse_size(self.memory, "--memory"),
        )  # fmt: skip
        return Session(directory, options, _note, opener)

    def sampling(self, session: Session) -> Sampling:
        """How tokens are chosen: these options over what the publisher recommends."""
        return session.sampling(**{name: getattr(self, name) for name in SAMPLING}, seed=self.seed)

    def given(self) -> list[str]:
        """The options of sampling that were given."""
        return [name for name in SAMPLING if getattr(self, name) is not None]


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def with_options(command: Callable[..., None], opener: Opener | None) -> Callable[..., None]:
    """Give a command whose last parameters are `running` and `opener` the options of `Running` in their place."""
    hints = get_type_hints(Running, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(Running)
    ]
    own = get_type_hints(command, include_extras=True)
    kept = [
        p.replace(annotation=own[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, p in inspect.signature(command).parameters.items()
        if name not in ("running", "opener")
    ]

    def call(**given: Any) -> None:
        running = Running(**{p.name: given.pop(p.name) for p in shared})
        command(**given, running=running, opener=opener)

    call.__signature__ = inspect.Signature([*kept, *shared])  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in (*kept, *shared)}
    return call


def _note(text: str) -> None:
    print(shown(text), file=sys.stderr, flush=True)


class _Screen:
    """Answers to stdout, thoughts to stderr, each on its own lines where both are a terminal."""

    def __init__(self) -> None:
        self._thinking = False

    def say(self, text: str) -> None:
        """Part of the answer."""
        self.end_thought()
        print(_harmless(text, sys.stdout), end="", flush=True)

    def think(self, text: str) -> None:
        """Part of a thought."""
        begun = "" if self._thinking else "(thought) "
        print(begun + _harmless(text, sys.stderr), end="", file=sys.stderr, flush=True)
        self._thinking = True

    def end_thought(self) -> None:
        """Begin a new line after a thought."""
        if self._thinking:
            _note("")
        self._thinking = False


CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}
"""What a terminal obeys. Joiners and marks of direction are not among them: languages need those."""


def _harmless(text: str, stream: Any) -> str:
    """What a model says, for a terminal without the characters that command it."""
    return text.translate(CONTROLS) if stream.isatty() else text


def _run(
    directory: Directory,
    prompt: Annotated[str, typer.Option(help="What the user says; - reads it from stdin.")],
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, no chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="End the answer after this many tokens.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, at the end.")] = False,
    *,
    running: Running,
    opener: Opener | None,
) -> None:
    from pagestone.reader.decoding import ignore
    from pagestone.reader.text import check_ids

    if raw and (system or running.template_var):
        raise RequestError(
            "--raw uses no chat template, and --system and --template-var are for one",
            code="E1252",
            remedy="leave out --raw, or the others",
        )
    with running.open(directory, opener) as session:
        sampling = running.sampling(session)
        text = _prompt(prompt, raw)
        tokenizer = session.tokenizer
        ids = tokenizer.encode(text) if raw else tokenizer.chat([*_system(system), {"role": "user", "content": text}])
        check_ids(ids, session.vocabulary, tokenizer.place)
        talk = session.conversation(sampling)
        _note(sampling.text(running.given()))
        screen = _Screen()
        say, think = (ignore, ignore) if as_json else (screen.say, screen.think)
        turn = talk.turn(ids, max_new_tokens, say, think, raw=raw)
        if as_json:
            print(json.dumps(turn.table() | _facts(session, sampling), indent=1))
        else:
            screen.say("\n")
            if (ending := turn.ending()) is not None:
                _note(ending)
            _note(turn.report())
    if turn.stopped == "interrupted":
        raise typer.Exit(130)


def _prompt(given: str, raw: bool) -> str:
    """What the user says: an option, or stdin for "-"."""
    if given != "-":
        return inputs.option("--prompt", given)
    text = inputs.stdin()
    return text if raw else text.rstrip("\r\n")  # the end of the last line is the shell's, not the user's


def _facts(session: Session, sampling: Sampling) -> dict[str, Any]:
    """What `run --json` says of the run beside the answer."""
    from pagestone.reader.leases import Totals
    from pagestone.reader.memory import process_memory

    store = session.store
    return {
        "directory": str(session.path), "container_id": session.container.container_id, "io": store.mode,
        "experts": session.loading.experts, "sampling": asdict(sampling),
        "peak_bytes": getattr(store, "peak_bytes", None),
        "memory": None if session.plan is None else session.plan.table(),
        "process_peak_bytes": None if (process := process_memory()) is None else process.peak,
        "layers": {str(n): c.table() for n, c in Totals.of(store.counters).layers.items()},
    }  # fmt: skip


def _chat(
    directory: Directory,
    system: Annotated[str | None, typer.Option(help="A system message before the first turn.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="End an answer after this many tokens.")] = 1024,
    *,
    running: Running,
    opener: Opener | None,
) -> None:
    from pagestone.reader.chat import converse

    with running.open(directory, opener) as session:
        sampling = running.sampling(session)
        session.tokenizer.chat([*_system(system), {"role": "user", "content": "?"}])  # before minutes of loading
        talk = session.conversation(sampling)
        _note(sampling.text(running.given()))
        screen = _Screen()
        converse(talk, max_new_tokens, _asker(), screen.say, _note, system, screen.think)


def _system(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": inputs.option("--system", system)}] if system else []


def _asker() -> Callable[[], str | None]:
    """Asks for the next thing the user says: at a terminal with line editing, else a line of stdin; None at its end."""
    if sys.stdin is not None and sys.stdin.isatty():
        import readline  # noqa: F401 - gives `input` its line editing

        def ask() -> str | None:
            try:
                return inputs.option(inputs.STDIN, input("> "))
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                return inputs.decoded(error.object, inputs.STDIN)  # says what is wrong with it

        return ask
    lines = inputs.stdin_lines()

    def read() -> str | None:
        given = next(lines, None)
        return None if given is None else inputs.line(given)

    return read
