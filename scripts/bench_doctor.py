#!/usr/bin/env python3
"""What the doctor foretells beside what `run` then does: true shapes, two codecs, two caps, and a slow disk.

    scripts/bench_doctor.py [--codecs int8,q4] [--layers N] [--experts E] [--vocab V] [--shares 0.35,0.75] [--tokens N]
                            [--rounds N] [--threads N] [--slow MB] [--within PERCENT] [--work DIR] [--json FILE]

The generated checkpoint (tests/kits/generated.py) is converted to each codec in a temporary directory, which is deleted
at the end: about 5 GB by default. Caps are such that these shares of all records fit. For each, `pagestone doctor
--memory` and a session under the same cap, in a process of its own, take turns, because machines drift; medians count.
Where control groups of version 1 can be made (as root), both run a second time with the disk held to `--slow` MB/s.
(Such a group lets reads catch up a little after a pause, which a slow disk does not: forecasts are low by as much.)
Fails if a forecast differs from what was measured by more than `--within` percent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from pagestone.reader.budget import all_records
from pagestone.reader.container import open_container

BLKIO = Path("/sys/fs/cgroup/blkio")
WARM = 16
"""Tokens before any is timed."""
ENOUGH = 64 << 30
"""A cap under which everything fits."""


@dataclass
class Case:
    """One container under one cap on one disk, and what was said and done: tokens a second, a number a round."""

    codec: str
    cap: int
    slow: int | None
    foretold: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    cache: list[tuple[int, int]] = field(default_factory=list)
    """(bytes as foretold, as run had them)."""
    hit_rate: list[float] = field(default_factory=list)

    @property
    def off(self) -> float:
        """By how much the forecast is too high, as a share of what was measured."""
        return statistics.median(self.foretold) / statistics.median(self.measured) - 1

    def row(self) -> str:
        """Markdown."""
        said, held = self.cache[-1]
        cells = [
            self.codec, size_text(self.cap), "as it is" if self.slow is None else f"{self.slow} MB/s",
            f"{statistics.median(self.disk) / 1e6:.0f} MB/s", f"{size_text(said)} / {size_text(held)}",
            f"{100 * statistics.median(self.hit_rate):.0f} %", f"{statistics.median(self.foretold):.2f}",
            f"{statistics.median(self.measured):.2f}", f"{100 * self.off:+.0f} %",
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEAD = """| codec | --memory | disk | measured so | experts in memory, said / had | hits | foretold | measured | off |
|---|---|---|---|---|---|---|---|---|"""


# -- the child: one session -------------------------------------------------------------------------------------------


def session(directory: str, cap: int, tokens: int) -> None:
    """Run the model under a cap and print what it did."""
    from pagestone.reader.leases import Totals
    from pagestone.reader.session import Session, SessionOptions

    draw = random.Random(1)
    with Session(directory, SessionOptions(memory=cap)) as opened:
        plan, model = opened.plan, opened.model
        ids = [draw.randrange(model.vocabulary) for _ in range(64 + WARM + tokens)]
        _, state = model.forward(ids[:64])
        for token in ids[64 : 64 + WARM]:
            _, state = model.forward([token], state)
        before = Totals.of(model.context.store.counters).total
        begun = time.perf_counter()
        for token in ids[64 + WARM :]:
            _, state = model.forward([token], state)
        seconds = (time.perf_counter() - begun) / tokens
        since = Totals.of(model.context.store.counters).total - before
        print(json.dumps({"seconds": seconds, "hit_rate": since.hit_rate, "cache": plan.cache_bytes if plan else 0}))


# -- the parent -------------------------------------------------------------------------------------------------------


@contextmanager
def throttled(place: Path, rate: int | None) -> Iterator[Path | None]:
    """A control group whose processes read at most `rate` MB/s from the disk that holds `place`; None for None."""
    if rate is None:
        yield None
        return
    device = place.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    number = (disk / "dev").read_text().strip()
    group = BLKIO / f"pagestone-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "blkio.throttle.read_bps_device").write_text(f"{number} {rate * 10**6}")
        yield group
    finally:
        group.rmdir()


def output(words: list[str], group: Path | None, threads: int) -> Any:
    """The JSON that a process prints; in a control group if one is given."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True, preexec_fn=enter)
    return json.loads(done.stdout)


def ask(directory: Path, cap: int, group: Path | None, threads: int) -> Any:
    """What the doctor says."""
    command = [sys.executable, "-m", "pagestone", "doctor", str(directory), "--memory", str(cap), "--json"]
    return output(command, group, threads)


def round_of(case: Case, directory: Path, tokens: int, threads: int) -> None:
    """The doctor, then a session."""
    with throttled(directory, case.slow) as group:
        said = ask(directory, case.cap, group, threads)
        child = [sys.executable, str(Path(__file__).resolve()), "--session", str(directory), str(case.cap), str(tokens)]
        did = output(child, group, threads)
    first = said["forecast"][0]
    case.foretold.append(first["tokens_per_second"])
    case.measured.append(1 / did["seconds"])
    case.disk.append(said["disk"]["bytes_per_second"])
    case.cache.append((first["cache_bytes"], did["cache"]))
    case.hit_rate.append(did["hit_rate"])


def caps(directory: Path, shares: list[float], threads: int) -> list[int]:
    """Caps under which such shares of all records fit, in whole MiB."""
    smallest = ask(directory, ENOUGH, None, threads)["memory"]["plan"]["smallest"]
    records = all_records(open_container(directory))
    return [int(smallest + share * records) >> 20 << 20 for share in shares]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default="int8,q4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--shares", default="0.35,0.75", help="of all records, that the caps leave room for")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch and of products")
    parser.add_argument("--slow", type=int, default=100, help="MB/s of the slow disk; 0 for none")
    parser.add_argument("--within", type=float, default=25.0)
    parser.add_argument("--work", type=Path, help="where containers go; a temporary directory by default")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Make the containers, let doctor and sessions take turns, print the table."""
    words = options()
    slow = words.slow or None
    if slow is not None and not (os.access(BLKIO, os.W_OK) and (BLKIO / "blkio.throttle.read_bps_device").exists()):
        print("no control group to make the disk slow with: left out", file=sys.stderr)
        slow = None
    source = GeneratedCheckpoint(layers=words.layers, experts=words.experts, vocabulary=words.vocab)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=words.work) as work:
        places = {codec: Path(work) / codec for codec in words.codecs.split(",")}
        for codec, place in places.items():
            prepare(make_plan(Request(source, encodings.get(codec))), place, workers=2)
            for cap in caps(place, [float(share) for share in words.shares.split(",")], words.threads):
                cases += [Case(codec, cap, disk) for disk in (None, slow) if disk is None or slow is not None]
        for number in range(words.rounds):
            for case in cases:
                round_of(case, places[case.codec], words.tokens, words.threads)
                print(f"round {number + 1}: {case.row()}", file=sys.stderr, flush=True)
    facts = measured_on()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"{words.layers} layers, {words.experts} experts, {words.vocab} tokens, {words.threads} thread(s), "
          f"{words.rounds} rounds of {words.tokens} tokens\n")  # fmt: skip
    print("\n".join([HEAD, *(case.row() for case in cases)]))
    wrong = [case for case in cases if abs(case.off) > words.within / 100]
    print(f"\nforecasts off by more than {words.within:g} %: {len(wrong)} of {len(cases)}")
    if words.json is not None:
        words.json.write_text(json.dumps({"machine": facts, "cases": [asdict(c) for c in cases]}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--session"]:
        session(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        sys.exit(0)
    sys.exit(main())
