#!/usr/bin/env python3
"""What a whole token costs at true shapes: native experts, reference experts and unmodified transformers.

    scripts/bench_token.py [--codecs bf16,...] [--layers N] [--experts E] [--prompt N] [--tokens N] [--rounds N]
                           [--threads N] [--work DIR] [--json FILE]

A synthetic checkpoint with the shapes of Qwen3.6-35B-A3B (tests/kits/generated.py; few layers, few experts, a small
vocabulary) is converted to each codec in turn. Each container's model runs with native and with reference experts,
resident and streamed (direct reads, a quarter of the records in memory); the checkpoint runs in transformers with its
eager experts. All are fed the same tokens, `--tokens` a turn, and take turns, because machines drift; of a way's turns
the median counts. Whatever the times: every logit of a streamed run must be that of the resident run, byte for byte, or
the script fails. About 5 GB of disk and 10 GB of memory by default; everything is deleted at the end.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.pop(0)  # here lies only half of our package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # for `kits`
from kits.generated import GeneratedCheckpoint

from pagestone.convert.plan import Request, make_plan
from pagestone.convert.prepare import prepare
from pagestone.formats import encodings
from pagestone.formats.surroundings import measured_on
from pagestone.reader.budget import all_records, largest_record
from pagestone.reader.container import open_container
from pagestone.reader.hosts import transformers as host
from pagestone.reader.hosts.transformers import TransformersModel
from pagestone.reader.leases import Totals
from pagestone.reader.model import NATIVE, PRODUCTS, REFERENCE, bytes_of
from pagestone.reader.store import StoreOptions, open_store

CODECS = "bf16,int8,fp8,q4,q3"
STREAMED, RESIDENT, TRANSFORMERS = "streamed", "resident", "transformers"


@dataclass
class Way:
    """One way to run the model, and what it did; `seconds` a token, one number a turn."""

    codec: str
    experts: str
    io: str
    model: TransformersModel | None
    state: Any = None
    seconds: list[float] = field(default_factory=list)
    prefill: float = 0.0
    read: float = 0.0
    """Bytes read for a token."""
    hit_rate: float = 0.0
    logits: Any = field(default_factory=hashlib.sha256)

    @property
    def milliseconds(self) -> float:
        """Of a token: the median of its turns."""
        return 1000 * statistics.median(self.seconds)

    def feed(self, ids: list[int]) -> float:
        """Seconds for `ids` at once; their logits are hashed afterwards."""
        assert self.model is not None
        begun = time.perf_counter()
        logits, self.state = self.model.forward(ids, self.state)
        took = time.perf_counter() - begun
        self.logits.update(bytes_of(logits))
        return took

    def close(self) -> None:
        """Let model and state go, keeping the numbers."""
        assert self.model is not None
        self.model.close()
        self.model = self.state = None

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "codec": self.codec, "experts": self.experts, "io": self.io, "milliseconds": self.milliseconds,
            "prefill_seconds": self.prefill, "bytes_read": self.read, "hit_rate": self.hit_rate,
            "seconds": self.seconds, "sha256": self.logits.hexdigest(),
        }  # fmt: skip


def ways(codec: str, directory: Path) -> list[Way]:
    """Native and reference experts, resident and streamed, over one container."""
    container = open_container(directory)
    budget = max(largest_record(container), all_records(container) // 4)
    found = []
    for io in (RESIDENT, STREAMED):
        for experts in PRODUCTS:
            options = StoreOptions("resident") if io == RESIDENT else StoreOptions("direct", budget)
            store, notes = open_store(container, options)
            for note in notes:
                print(f"{codec}: {note}", file=sys.stderr)
            found.append(Way(codec, experts, io, host.load(container, store, experts=experts)))
    return found


def run(found: list[Way], prompt: list[int], turns: list[list[int]]) -> None:
    """Prefill every way, then let them take turns. The first turn warms up and is not counted."""
    for way in found:
        way.prefill = way.feed(prompt)
    before: list[Any] = []
    for number, turn in enumerate(turns):
        if number == 1:
            before = [_counted(way) for way in found]
        for way in found:
            seconds = sum(way.feed([token]) for token in turn)
            if number:
                way.seconds.append(seconds / len(turn))
    tokens = sum(map(len, turns[1:]))
    for way, then in zip(found, before, strict=True):
        since = _counted(way) - then
        way.read, way.hit_rate = since.bytes_read / tokens, since.hit_rate


def _counted(way: Way) -> Any:
    assert way.model is not None
    return Totals.of(way.model.context.store.counters).total


def unequal(found: list[Way]) -> list[str]:
    """Kinds of experts whose streamed and resident logits differ."""
    of = {(w.experts, w.io): w.logits.hexdigest() for w in found}
    return [e for e in PRODUCTS if of[e, STREAMED] != of[e, RESIDENT]]


def table(found: list[Way], plain: dict[str, Way]) -> str:
    """Markdown, a row a codec; a token's time by experts and store."""
    heads = ["codec", "native, resident", "reference, resident", "native, streamed", "reference, streamed"]
    heads += ["transformers, BF16", "reference / native", "transformers / native", "MB read a token", "hit rate"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for codec in dict.fromkeys(w.codec for w in found):
        of = {(w.experts, w.io): w for w in found if w.codec == codec}
        reference, streamed = of[REFERENCE, RESIDENT], of[NATIVE, STREAMED]
        ours, theirs = of[NATIVE, RESIDENT].milliseconds, plain[codec].milliseconds
        cells = [f"{of[e, io].milliseconds:.1f} ms" for io in (RESIDENT, STREAMED) for e in PRODUCTS]
        cells += [f"{theirs:.1f} ms", f"{reference.milliseconds / ours:.1f}x", f"{theirs / ours:.2f}x"]
        cells += [f"{streamed.read / 1e6:.0f}", f"{100 * streamed.hit_rate:.0f} %"]
        lines.append(f"| {codec} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def slower(done: list[Way], plain: dict[str, Way]) -> None:
    """Say where native experts are not the fastest."""
    for codec, way in plain.items():
        ours = {(w.experts, w.io): w.milliseconds for w in done if w.codec == codec}
        for io in (RESIDENT, STREAMED):
            if ours[NATIVE, io] > ours[REFERENCE, io]:
                print(f"\n{codec}, {io}: native experts are slower than reference experts")
        if ours[NATIVE, RESIDENT] > way.milliseconds:
            print(f"\n{codec}: native experts in memory are slower than transformers with BF16 weights")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=4, help="tokens fed at once before any is timed")
    parser.add_argument("--tokens", type=int, default=1, help="tokens a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--threads", type=int, help="of torch and of native products; default torch's own choice")
    parser.add_argument(
        "--work", type=Path, help="where checkpoint and containers go; a temporary directory by default"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Make the checkpoint, run every codec, print the table."""
    words = options()
    host.HOST.require()
    import torch

    if words.threads is not None:
        torch.set_num_threads(words.threads)
    source = random.Random(1)
    draw = [source.randrange(words.vocab) for _ in range(words.prompt + words.tokens * (words.rounds + 1))]
    prompt, rest = draw[: words.prompt], draw[words.prompt :]
    turns = [rest[i : i + words.tokens] for i in range(0, len(rest), words.tokens)]
    done: list[Way] = []
    plain: dict[str, Way] = {}
    wrong: list[str] = []
    facts = measured_on() | {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory(dir=words.work) as work:
        checkpoint = Path(work) / "source"
        GeneratedCheckpoint(layers=words.layers, experts=words.experts, vocabulary=words.vocab).write(checkpoint)
        for codec in words.codecs.split(","):
            begun = time.monotonic()
            directory = Path(work) / codec
            prepare(make_plan(Request(checkpoint, encodings.get(codec))), directory, workers=2)
            found = ways(codec, directory)
            theirs = Way("bf16", TRANSFORMERS, TRANSFORMERS, host.plain_model(checkpoint))
            run([*found, theirs], prompt, turns)
            wrong += [f"{codec}, {experts} experts" for experts in unequal(found)]
            for way in (*found, theirs):
                way.close()
            done += found
            plain[codec] = theirs
            gc.collect()
            shutil.rmtree(directory)
            print(f"{table(found, plain)}\n{codec}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"{words.layers} layers, {words.experts} experts, a prompt of {words.prompt} tokens, {words.rounds} turns of "
          f"{words.tokens} tokens\n")  # fmt: skip
    print(table(done, plain))
    slower(done, plain)
    print(f"\nstreamed logits differ from resident ones: {', '.join(wrong) if wrong else 'none'}")
    if words.json is not None:
        rows = [w.table() for w in (*done, *plain.values())]
        words.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
