"""Audit files, read: what another run recorded, believed only where type and range of every field are right.

The JSON file is small; its traces are not, and they are compressed. They are never held: lines are looked at one by
one, no more of them than the audit's steps can have, and kept only for the one step whose logits differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestone.formats.errors import DataError
from pagestone.formats.strict_json import brief, loads
from pagestone.reader.hosts import DEFAULT as TRANSFORMERS
from pagestone.validate.audit import COMPARED, DIFFERENT, EQUAL, OF_CONTAINERS, OF_HOSTS, VERSION
from pagestone.validate.sides import WHAT, Event, ForwardPass, Prompt, first_place

LARGEST = 64 << 20
"""Bytes of an audit file: a step takes about a hundred."""
IDS = 1 << 31
LINE = 1024
"""Bytes of a line of traces: four digests and some numbers take less than 500."""
WINDOW = 1 << 23
"""Bytes of history that unfolding traces may ask for: what they are written with asks for less."""
NUMBERS = {("threads", "torch"), ("model", "prefill_piece")}
"""Of `COMPARED`, what is a number and no text."""
NONE = {("model", "prefill_piece")}
"""Of `COMPARED`, what may be null or missing: prompts were worked on whole."""


def refusal(message: str, path: Path) -> DataError:
    """The error of an audit that cannot be compared with."""
    return DataError(
        f"an audit of version {VERSION} expected: {message}", code="E1303", file=path, remedy="make one with --audit"
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """An audit as it was read: container id, what the run depended on, prompts, and the steps of each."""

    path: Path
    container_id: str
    surroundings: Mapping[str, Mapping[str, Any]]
    """What `COMPARED` names, by group and key."""
    prompts: tuple[Prompt, ...]
    steps: tuple[tuple[ForwardPass, ...], ...]
    """By prompt, equally many each, without events."""
    traces: Path | None
    """The file of traces, None if there is none."""
    lines: int | None
    """How many lines it has, if the audit says it."""

    def check_ids(self, vocabulary: int) -> None:
        """`DataError` (E1303) for a token the model does not have."""
        for number, (prompt, steps) in enumerate(zip(self.prompts, self.steps, strict=True)):
            largest = max(*prompt.ids, *(s.choice for s in steps))
            if largest >= vocabulary:
                raise refusal(f"prompt {number}: token ids below {vocabulary} expected, found {largest}", self.path)

    def events(self, layers: Mapping[int, int]) -> Iterator[tuple[int, int, Event]]:
        """(prompt, step, event) of every line of the traces; `layers` maps a layer to its number of experts.

        Raises `DataError` (E1303) at the first line that is none, is out of order, or is one more than the audit's
        steps can have; `OSError` passes through.
        """
        if self.traces is None:
            return
        most = len(layers) * 3 + sum(layers.values())
        total, of_step, last = 0, 0, (0, 0)
        for total, raw in enumerate(_lines(self.traces), 1):
            try:
                prompt, at, event = _event(raw, layers)
                place = (prompt, at)
                _need(
                    last <= place and prompt < len(self.steps) and at < len(self.steps[prompt]), "a step of the audit"
                )
                of_step = of_step + 1 if place == last else 1
                _need(of_step <= most, f"at most {most} events in a step")
            except ValueError as error:
                raise refusal(f"line {total}: {error}", self.traces) from None
            last = place
            yield prompt, at, event
        if self.lines is not None and total != self.lines:
            raise refusal(f"{self.lines} lines of traces, found {total}", self.traces)

    def place_difference(self, streamed: Sequence[Sequence[ForwardPass]], layers: Mapping[int, int]) -> None:
        """Give the first step whose logits differ from `streamed` its events, if there are traces."""
        place = first_place(self.steps, streamed)
        if place is not None:
            step = self.steps[place[0]][place[1]]
            step.events[:] = [event for *at, event in self.events(layers) if tuple(at) == place]


def read_audit(path: Path) -> Recorded:
    """An audit file, every field checked; `DataError` (E1303) if it is none. Its traces are not looked at.

    `OSError` passes through.
    """
    with path.open("rb") as file:
        raw = file.read(LARGEST + 1)
    try:
        _need(len(raw) <= LARGEST, f"at most {LARGEST} bytes")
        table = loads(raw)
        _need(isinstance(table, dict) and table.get("audit") == "pagestone logits", "an object of pagestone logits")
        _need(
            _is(table.get("version"), int) and table["version"] == VERSION, f"version {VERSION}", table.get("version")
        )
        _need(table.get("result") in (EQUAL, DIFFERENT), "a run that was compared", table.get("result"))
        prompts = _field(table, "prompts", list)
        _need(prompts, "a prompt at least")
        read = [_prompt(entry) for entry in prompts]
        _need(len({len(steps) for _, steps in read}) == 1, "equally many steps of every prompt")
        return Recorded(
            path, _text(_field(table, "container", dict), "id", "[0-9a-f]{32}"), _surroundings(table),
            tuple(p for p, _ in read), tuple(s for _, s in read), _traces(table, path), _count(table, "trace_lines"),
        )  # fmt: skip
    except ValueError as error:
        raise refusal(str(error), path) from None


def _need(condition: object, expected: str, found: Any = None) -> None:
    if not condition:
        raise ValueError(f"{expected} expected" + ("" if found is None else f", found {brief(found)}"))


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind  # true is no integer


def _field(table: Mapping[str, Any], key: str, kind: type) -> Any:
    value = table.get(key)
    _need(_is(value, kind), f"{key}: {kind.__name__}", value)
    return value


def _text(table: Mapping[str, Any], key: str, pattern: str) -> str:
    value = table.get(key)
    _need(isinstance(value, str) and re.fullmatch(pattern, value), f"{key}: text like {pattern}", value)
    return str(value)


def _count(table: Mapping[str, Any], key: str) -> int | None:
    value = table.get(key)
    _need(value is None or (_is(value, int) and value >= 0), f"{key}: a number or nothing", value)
    return value


def _tokens(table: Mapping[str, Any], key: str) -> list[int]:
    found = _field(table, key, list)
    _need(found and all(_is(i, int) and 0 <= i < IDS for i in found), f"{key}: token ids", found)
    return list(found)


def _prompt(entry: Any) -> tuple[Prompt, tuple[ForwardPass, ...]]:
    _need(isinstance(entry, dict), "a prompt as an object", entry)
    name, ids, choices = _field(entry, "name", str), _tokens(entry, "ids"), _tokens(entry, "choices")
    hashes = _field(entry, "sha256", list)
    _need(all(isinstance(h, str) and re.fullmatch("[0-9a-f]{64}", h) for h in hashes), "sha256: digests", hashes)
    _need(len(hashes) == len(choices), f"{len(choices)} digests, one a choice", len(hashes))
    fed = [len(ids), *([1] * (len(choices) - 1))]
    return Prompt(name, tuple(ids)), tuple(map(ForwardPass, fed, hashes, choices))


def _surroundings(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    host = _field(_field(table, "model", dict), "host", str)
    read: dict[str, dict[str, Any]] = {}
    for group, key in COMPARED:
        kind, values = int if (group, key) in NUMBERS else str, _field(table, group, dict)
        missable = (group, key) in OF_CONTAINERS or (host != TRANSFORMERS and (group, key) in OF_HOSTS)
        absent = (missable and key not in values) or ((group, key) in NONE and values.get(key) is None)
        read.setdefault(group, {})[key] = None if absent else _field(values, key, kind)
    return read


def _traces(table: Mapping[str, Any], path: Path) -> Path | None:
    """The file of traces beside the audit: a plain name, so that no audit sends its reader elsewhere."""
    if table.get("traces") is None:
        return None
    name = _text(table, "traces", r"[^/\\\x00-\x1f]+")
    _need(name not in (".", "..") and len(name.encode()) <= 255, "traces: the name of a file", name)
    beside = path.with_name(name)
    return beside if beside.is_file() else None


def _event(raw: bytes, layers: Mapping[int, int]) -> tuple[int, int, Event]:
    """The prompt, the step and the event of a line; `ValueError` if it is none."""
    line = loads(raw)
    _need(isinstance(line, dict), "an object", line)
    keys = {"prompt", "step", "layer", "what", "expert", "digest"}
    _need(keys <= line.keys() <= keys | {"streamed"}, f"the fields {', '.join(sorted(keys))}", sorted(line))
    for key in ("prompt", "step", "layer"):
        _need(_field(line, key, int) >= 0, f"{key}: a number", line[key])
    layer, what, expert = line["layer"], line["what"], line["expert"]
    _need(layer in layers, "a layer of the container", layer)
    _need(isinstance(what, str) and what in WHAT, f"one of {', '.join(WHAT)}", what)
    named = _is(expert, int) and 0 <= expert < layers[layer]
    _need(named if what == "expert" else expert is None, "an expert of the layer, for what an expert did", expert)
    digest = _text(line, "digest", "[0-9a-f]{64}" if what == "routing" else "[0-9a-f]{32}")
    return line["prompt"], line["step"], Event(layer, what, expert, digest)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a compressed file, unfolded piece by piece; `DataError` where it is damaged or a line is long."""
    import zstandard

    pending = b""
    with path.open("rb") as handle:
        stream = zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(handle)
        while True:
            try:
                piece = stream.read(1 << 16)
            except zstandard.ZstdError as error:
                raise refusal(f"traces in Zstandard: {error}", path) from None
            if not piece:
                break
            *whole, pending = (pending + piece).split(b"\n")
            yield from whole
            if len(pending) > LINE:
                raise refusal(f"lines of at most {LINE} bytes", path)
    if pending:
        raise refusal("a whole last line", path)
