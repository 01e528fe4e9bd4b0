#!/usr/bin/env python3
"""What encoded dense matrices cost and save at true shapes: a whole token, and the head's product alone.

    scripts/bench_dense.py [--dense keep,int8,...] [--codec q4] [--layers N] [--experts E] [--vocab V] [--prompt N]
                           [--tokens N] [--rounds N] [--threads N] [--work DIR] [--json FILE]

A generated model with the shapes of Qwen3.6-35B-A3B (tests/kits/generated.py) is converted once for each word of
`--dense`, all experts in `--codec`. The models, every record in memory, are fed the same tokens and take turns, because
machines drift; of a way's turns the median counts. `keep` is what the others are compared with: its head is torch's own
product of BF16. Beside time stands what dense tensors take in memory, as computed, and as the process grew by while the
model was loaded. Disk: a container of each word (3.5 GB in all by default), deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import random
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
from pagestone.formats.text import size_text
from pagestone.reader.container import open_container
from pagestone.reader.dense_costs import dense_costs
from pagestone.reader.hosts import transformers as host
from pagestone.reader.store import StoreOptions, open_store

DENSE = "keep,int8,fp8,q8,q4"
STATUS = Path("/proc/self/status")


@dataclass
class Way:
    """One container's model, and what it did: seconds of a token and of the head's product alone, one a turn."""

    dense: str
    computed: int
    grown: int
    model: Any
    state: Any = None
    token: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)

    def feed(self, ids: list[int]) -> float:
        """Seconds for `ids` at once."""
        begun = time.perf_counter()
        _, self.state = self.model.forward(ids, self.state)
        return time.perf_counter() - begun

    def multiply(self, row: Any, times: int) -> float:
        """Seconds of the head's product."""
        head = self.model.model.lm_head
        begun = time.perf_counter()
        for _ in range(times):
            head(row)
        return (time.perf_counter() - begun) / times

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "dense": self.dense, "token_ms": milliseconds(self.token), "head_ms": milliseconds(self.head),
            "computed_bytes": self.computed, "grown_bytes": self.grown, "token_seconds": self.token,
        }  # fmt: skip


def milliseconds(seconds: list[float]) -> float:
    """The median."""
    return 1000 * statistics.median(seconds)


def resident() -> int:
    """Bytes of this process in memory, shared files apart."""
    words = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(words["RssAnon"].split()[0]) << 10


def opened(directory: Path, dense: str) -> Way:
    """The model of a container, every record in memory, its dense tensors as a streamed model has them."""
    container = open_container(directory)
    records = sum(layer.stride * len(layer) for layer in container.layers.values())
    store, _ = open_store(container, StoreOptions("direct", records))
    costs = dense_costs(container, host.dense_use(container))
    before = resident()
    model = host.load(container, store)
    return Way(dense, costs.resident, resident() - before, model)


def table(ways: list[Way]) -> str:
    """Markdown, a row for each word of `--dense`."""
    lines = ["| dense | token | token against keep | head | head against torch BF16 | dense, computed | grown by |"]
    lines.append("|---" * 7 + "|")
    token, head = milliseconds(ways[0].token), milliseconds(ways[0].head)
    for way in ways:
        ours, product = milliseconds(way.token), milliseconds(way.head)
        lines.append(
            f"| {way.dense} | {ours:.1f} ms | {token / ours:.2f}x | {product:.2f} ms | {head / product:.2f}x "
            f"| {size_text(way.computed)} | {size_text(way.grown)} |"
        )
    return "\n".join(lines)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", default=DENSE)
    parser.add_argument("--codec", default="q4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3, help="tokens a turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Convert, load, let the models take turns, print the table; 1 if an encoded head is slower than torch's."""
    words = options()
    host.HOST.require()
    import torch

    torch.set_num_threads(words.threads)
    source = GeneratedCheckpoint(layers=words.layers, experts=words.experts, vocabulary=words.vocab)
    draw = random.Random(1)
    tokens = [draw.randrange(words.vocab) for _ in range(words.tokens * (words.rounds + 1))]
    prompt = [draw.randrange(words.vocab) for _ in range(words.prompt)]
    ways: list[Way] = []
    with tempfile.TemporaryDirectory(dir=words.work) as work:
        for dense in words.dense.split(","):
            directory = Path(work) / dense
            prepare(make_plan(Request(source, encodings.get(words.codec), dense=dense)), directory, workers=2)
            ways.append(opened(directory, dense))
            print(f"{dense}: loaded", file=sys.stderr, flush=True)
        row = torch.randn(1, 1, ways[0].model.model.lm_head.in_features).to(ways[0].model.dtype)
        for way in ways:
            way.feed(prompt)
        for turn in range(words.rounds + 1):  # the first one warms up
            some = tokens[turn * words.tokens : (turn + 1) * words.tokens]
            for way in ways:
                took, product = sum(way.feed([token]) for token in some) / len(some), way.multiply(row, 2)
                if turn:
                    way.token.append(took)
                    way.head.append(product)
        for way in ways:
            way.model.close()
    facts = measured_on() | {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"{words.layers} layers, {words.experts} experts in {words.codec}, a vocabulary of {words.vocab}\n")
    print(table(ways))
    slower = [way.dense for way in ways[1:] if milliseconds(way.head) > milliseconds(ways[0].head)]
    if slower:
        print(f"\nthe head is slower than torch's in BF16: {', '.join(slower)}")
    if words.json is not None:
        words.json.write_text(json.dumps({"machine": facts, "rows": [way.table() for way in ways]}, indent=1) + "\n")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
