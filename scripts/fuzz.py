"""Damaged files without end: the cases of tests/kits/fuzz.py, as many as one likes, a seed each.

    python scripts/fuzz.py [--cases 30000] [--seed 0] [--kind NAME] [--workers 2] [--state FILE]

Case n has seed `--seed` + n and, without `--kind`, the kind n mod the number of kinds. A worker that dies, of a crash
or of a case without end, is started again. What failed is printed with its seed as it is found; repeat it with
`--kind NAME --seed SEED --cases 1`. With `--state` the next run goes on where this one stopped. Exit code 1 if any case
failed. 30,000 cases take about an hour on two cores.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent / "tests")  # for `kits`; here lies only half of our package
HARD = 60
"""CPU seconds after which the system ends a case that does not come back."""
Case = tuple[int, str, int]
"""Number, kind and seed."""


def work(pipe: Connection, room: str) -> None:
    """Run cases (kind, seed) as they come; answer with what was wrong, or None, and the answers that were given."""
    import faulthandler

    from kits import fuzz

    faulthandler.enable()
    bench = fuzz.Bench(Path(room))
    while (asked := pipe.recv()) is not None:
        kind, seed = asked
        spent = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(spent.ru_utime + spent.ru_stime) + HARD
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        fuzz.SEEN.clear()
        fault = None
        try:
            fuzz.case(bench, kind, random.Random(seed))
        except BaseException as error:
            cause = error.__cause__
            lines = traceback.format_exception(cause)[-6:] if cause is not None else []
            fault = "\n".join([f"{type(error).__name__}: {error}", *lines])
        pipe.send((fault, dict(fuzz.SEEN)))


class Worker:
    """A process that runs cases in a directory of its own, and the case it has."""

    def __init__(self, context: Any, room: Path) -> None:
        self._context, self._room = context, room
        self.case: Case | None = None
        self._start()

    def _start(self) -> None:
        self.pipe, there = self._context.Pipe()
        room = tempfile.mkdtemp(dir=self._room)
        self.process = self._context.Process(target=work, args=(there, room), daemon=True)
        self.process.start()
        there.close()

    def give(self, case: Case) -> None:
        self.case = case
        self.pipe.send(case[1:])

    def answer(self) -> tuple[str | None, dict[str, int]]:
        """What became of the case; a worker that died says so, and another takes its place."""
        try:
            found: tuple[str | None, dict[str, int]] = self.pipe.recv()
            return found
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            self._start()
            return f"the process died (exit code {code}; -24 is more than {HARD} CPU seconds)", {}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--state", type=Path)
    return parser.parse_args()


class Progress:
    """What has been tried and what failed; kept in a file, if there is one, so that a stopped run goes on."""

    def __init__(self, how: argparse.Namespace, kinds: list[str]) -> None:
        self.file: Path | None = how.state
        self.job = {"seed": how.seed, "kinds": kinds}
        self.state: dict[str, Any] = {"job": self.job, "next": 0, "failed": []}
        if self.file is not None and self.file.exists():
            self.state = json.loads(self.file.read_bytes())
        self.answers: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
        self.done: set[int] = set()
        self.begin = time.monotonic()

    def note(self, case: Case, fault: str | None, answers: dict[str, int]) -> None:
        """One case is done: everything below `next` is, and what lies beyond it is remembered until it is not."""
        number, kind, seed = case
        self.answers[kind].update(answers)
        if fault is not None:
            self.state["failed"].append({"kind": kind, "seed": seed, "fault": fault})
            print(f"FAILED --kind {kind!r} --seed {seed} --cases 1\n  {fault}", flush=True)
        self.done.add(number)
        while self.state["next"] in self.done:
            self.done.discard(self.state["next"])
            self.state["next"] += 1
        if number % 100 == 0 or fault is not None:
            self.write()
        if (number + 1) % 1000 == 0:
            print(f"{number + 1} cases, {time.monotonic() - self.begin:.0f} s", file=sys.stderr, flush=True)

    def write(self) -> None:
        if self.file is not None:
            self.file.write_text(json.dumps(self.state))

    def report(self, how: argparse.Namespace) -> None:
        for kind, answers in self.answers.items():
            print(f"{kind}: " + ", ".join(f"{code} {count}" for code, count in answers.most_common()))
        last, failed = how.seed + how.cases - 1, len(self.state["failed"])
        print(f"{how.cases} cases of seeds {how.seed} to {last}: {failed} failed")


def hand_out(coming: Iterator[Case], workers: list[Worker], progress: Progress) -> None:
    """Give every worker a case, again and again until there are none."""

    def give(worker: Worker) -> None:
        worker.case = None
        case = next(coming, None)
        if case is not None:
            worker.give(case)

    for worker in workers:
        give(worker)
    while busy := {w.pipe: w for w in workers if w.case is not None}:
        for pipe in wait(list(busy)):
            worker = busy[pipe]
            assert worker.case is not None
            progress.note(worker.case, *worker.answer())
            give(worker)
    for worker in workers:
        worker.pipe.send(None)
        worker.process.join()


def main() -> int:
    from kits.fuzz import CASES

    how = options()
    kinds = [how.kind] if how.kind else sorted(CASES)
    progress = Progress(how, kinds)
    if progress.state["job"] != progress.job:
        print(f"{how.state} is of other cases: {progress.state['job']}", file=sys.stderr)
        return 2
    first = progress.state["next"]
    coming = ((number, kinds[number % len(kinds)], how.seed + number) for number in range(first, how.cases))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pagestone-fuzz-") as room:
        hand_out(coming, [Worker(context, Path(room)) for _ in range(how.workers)], progress)
    progress.write()
    progress.report(how)
    return 1 if progress.state["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
