#!/usr/bin/env python3
"""What a plan of memory says, what the process then takes, and how fast it is: under caps, beside another state.

    scripts/bench_memory.py [--layers 8] [--vocab 4096] [--caps 3GiB,1.5GiB] [--pairs int8+int8,q4+q4,bf16+keep]
                            [--other before=TREE] [--rounds 3] [--work DIR] [--json FILE]
    scripts/bench_memory.py --layers 40 --vocab 248320 --caps 4GiB --pairs q4+q4 --rounds 1 --answer

The checkpoint has the shapes of Qwen3.6-35B-A3B and is made from a seed as it is read (tests/kits/generated.py), so
that routing is real and the source takes no disk. It is converted to each pair of encodings, experts+dense; containers
are verified. Then, in a control group of cap + 5 % (version 1, as root; page cache counts, swap does not help), each
container runs with the cap as `--memory`: a short prompt, `--tokens` decoded, and a prompt of `--long` tokens. A state
that knows only `--budget` (`--other`) runs the container whose dense matrices are kept, with as much for experts as
this state's plan of that container has, or with cap - 1.05 GiB where that is more: it reserves nothing for prompts.
`--answer` also asks the command line for an answer, under the same cap.

Runs take turns, forwards and backwards; medians with (least .. most). Each begins cold: nothing of the container is in
the page cache, which bytes read prove. `others` is what other processes took of the processors, in cores, while tokens
were decoded, the most of all rounds: above 0.1 a row is not quiet. Everything made is deleted, but in `--kept`; nothing
is begun that would leave the disk less than `--spare` GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_cache import resident
from bench_open import Ended, ended, machine

GIB = 1 << 30
TESTS = Path(__file__).resolve().parent.parent / "tests"
GROUPS = Path("/sys/fs/cgroup")
QUESTION = "How much memory does a page take? One sentence is enough."
BESIDE = 105 * GIB // 100
"""Bytes that a process took beside its experts when it knew only their budget."""

CONVERT = """
import json, sys
from pathlib import Path
asked = json.loads(sys.argv[1])
sys.path.insert(0, asked["tests"])
from kits.generated import GeneratedCheckpoint
from pagestone.convert.plan import Request, make_plan
from pagestone.convert.prepare import prepare
from pagestone.formats import encodings
source = GeneratedCheckpoint(layers=asked["layers"], experts=asked["experts"], vocabulary=asked["vocab"])
more = {} if asked["dense"] == "keep" else {"dense": asked["dense"]}
request = Request(source, encodings.get(asked["codec"]), **more)
prepare(make_plan(request), Path(asked["output"]), workers=asked["workers"])
print(json.dumps({"source": sum(map(source.size, source.names()))}))
"""
PLAN = """
import json, sys
from pagestone.formats.errors import PagestoneError
from pagestone.reader.session import Session, SessionOptions
container, cap = sys.argv[1], int(sys.argv[2])
try:
    with Session(container, SessionOptions(memory=cap)) as session:
        print(json.dumps(session.plan.table()))
except PagestoneError as error:
    print(json.dumps({"refused": str(error)}))
"""
RUN = """
import json, os, random, resource, sys, time
asked = json.loads(sys.argv[1])
started = time.time()
import torch
torch.set_num_threads(asked["threads"])
from pagestone.reader.leases import Totals
from pagestone.reader.session import Session, SessionOptions

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key + ":"))

def own():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

def busy():
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt

def read():
    return Totals.of(session.store.counters).total

def tell(**facts):
    found.update(facts, peak=status("VmHWM"), anon=status("RssAnon"))
    print(json.dumps(found), flush=True)

found, notes = {}, []
limit = {"memory": asked["cap"]} if asked["budget"] is None else {"budget": asked["budget"]}
with Session(asked["container"], SessionOptions(threads=asked["readers"], **limit), notes.append) as session:
    plan = getattr(session, "plan", None)
    if plan is not None:
        tell(plan=plan.table())
    session.tokenizer
    model = session.model
    draw = random.Random(1)
    ids = [draw.randrange(model.vocabulary - 300) for _ in range(asked["long"] + asked["tokens"] + 100)]
    logits, state = model.forward(ids[:16])
    tell(notes=notes, first=time.time() - asked["begun"], load=time.time() - started)
    for token in ids[16:20]:  # what is done once, is done now
        logits, state = model.forward([token], state)
    before, cpu, all_cpu, wall, hard = read(), own(), busy(), time.perf_counter(), faults()
    milliseconds = []
    for token in ids[20 : 20 + asked["tokens"]]:
        begun = time.perf_counter()
        logits, state = model.forward([token], state)
        milliseconds.append(1000 * (time.perf_counter() - begun))
        if time.perf_counter() - wall > asked["limit"]:
            break
    wall, cpu, since = time.perf_counter() - wall, own() - cpu, read() - before
    others = max(0.0, (busy() - all_cpu - cpu) / wall)
    half = milliseconds[len(milliseconds) // 2 :]
    tell(rate=len(milliseconds) / wall, late=1000 * len(half) / sum(half), faults=faults() - hard, hits=since.hit_rate,
         a_token=since.bytes_read / len(milliseconds), cores=cpu / wall, others=others, short_peak=status("VmHWM"))
    if not bool(torch.isfinite(logits).all()) or not 0.2 < float(logits.float().std()) < 5:
        raise SystemExit("the logits are not those of a model")
    del logits, state
    long = asked["long"] if plan is None else min(asked["long"], plan.context)
    if long:
        begun, before = time.perf_counter(), read()
        model.forward(ids[:long])
        tell(long=time.perf_counter() - begun, long_read=(read() - before).bytes_read)
"""


# -- processes --------------------------------------------------------------------------------------------------------


class Group:
    """A control group (version 1) with a limit, or none where there is no such thing; what was used within it."""

    def __init__(self, limit: int) -> None:
        self.place = GROUPS / "memory" / f"pagestone-bench-{os.getpid()}"
        self.there = (GROUPS / "memory" / "memory.limit_in_bytes").exists() and os.access(GROUPS / "memory", os.W_OK)
        self.anonymous, self._done = 0, threading.Event()
        if self.there:
            self.place.mkdir()
            (self.place / "memory.limit_in_bytes").write_text(str(limit))
            with contextlib.suppress(OSError):
                (self.place / "memory.swappiness").write_text("0")
            self._watch = threading.Thread(target=self._look, daemon=True)
            self._watch.start()

    def _look(self) -> None:
        """The largest sum of what is no page cache; shared anonymous memory is "shmem" here, not "rss"."""
        while not self._done.wait(0.05):
            with contextlib.suppress(OSError):
                found = re.findall(r"^(?:rss|shmem) (\d+)", (self.place / "memory.stat").read_text(), re.MULTILINE)
                self.anonymous = max(self.anonymous, sum(map(int, found)))

    def enter(self) -> None:
        """To be called in the child."""
        if self.there:
            (self.place / "cgroup.procs").write_text(str(os.getpid()))

    def facts(self) -> dict[str, Any]:
        """Peak with page cache, peak without, kills."""
        if not self.there:
            return {}
        kills = re.search(r"^oom_kill (\d+)", (self.place / "memory.oom_control").read_text(), re.MULTILINE)
        return {
            "group_peak": int((self.place / "memory.max_usage_in_bytes").read_text()),
            "group_anonymous": self.anonymous, "kills": int(kills[1]) if kills else 0,
        }  # fmt: skip

    def close(self) -> None:
        """Remove it, once it is empty."""
        self._done.set()
        if self.there:
            self._watch.join()
            for _ in range(100):
                with contextlib.suppress(OSError):
                    self.place.rmdir()
                    return
                time.sleep(0.05)


def last_json(out: bytes) -> dict[str, Any]:
    """The last line of JSON that a process printed: also one that did not come to its end."""
    lines = [line for line in out.splitlines() if line.startswith(b"{")]
    return dict(json.loads(lines[-1])) if lines else {}


def python(tree: str, words: list[str], threads: int = 1) -> tuple[dict[str, Any], Ended]:
    """(what it printed last as JSON, what it took) of a process that must succeed, with `tree` as its import tree."""
    done = ended([sys.executable, *words], {"PYTHONPATH": tree, "OMP_NUM_THREADS": str(threads)})
    if done.code:
        raise SystemExit(f"{words[:2]} failed: {done.complaint[-1500:]}")
    return last_json(done.out), done


def cold(container: Path) -> float:
    """Let go of all that is in the page cache; MiB of the container that stay."""
    for path in container.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    return resident(container)


# -- containers -------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """A container, and what making and verifying it took."""

    path: Path
    facts: dict[str, Any]


def make(words: argparse.Namespace, tree: str, pair: str, work: Path) -> Made:
    """Convert the generated checkpoint to "experts+dense", and verify the container."""
    codec, dense = pair.split("+")
    path, known = work / pair, work / f"{pair}.json"
    if known.exists():
        return Made(path, json.loads(known.read_bytes()))
    asked = {
        "tests": str(TESTS), "layers": words.layers, "experts": words.experts, "vocab": words.vocab, "codec": codec,
        "dense": dense, "output": str(path), "workers": words.workers,
    }  # fmt: skip
    said, converted = python(tree, ["-c", CONVERT, json.dumps(asked)])
    cached = resident(path)
    _, verified = python(tree, ["-m", "pagestone", "verify", str(path)])
    facts = {
        "container": pair, "source": said["source"], "bytes": sum(p.stat().st_size for p in path.iterdir()),
        "convert_s": converted.wall, "convert_cpu": converted.cpu, "convert_peak": converted.peak,
        "convert_cached_mib": cached, "verify_s": verified.wall, "verify_peak": verified.peak,
        "verify_cached_mib": resident(path),
    }  # fmt: skip
    known.write_text(json.dumps(facts))
    say(f"{pair}: {facts['bytes'] / 1e9:.2f} GB in {converted.wall:.0f} s, verified in {verified.wall:.0f} s")
    return Made(path, facts)


def say(text: str) -> None:
    """To stderr."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One way to run one container under one cap, and what every round found."""

    name: str
    tree: str
    container: Path
    cap: int
    budget: int | None = None
    found: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, words: argparse.Namespace) -> None:
        """One round. A row that came to no rate, as it was refused or killed, is not tried again."""
        if any("rate" not in each for each in self.found):
            return
        asked = {
            "container": str(self.container), "cap": self.cap, "budget": self.budget, "threads": words.threads,
            "readers": words.readers, "tokens": words.tokens, "long": words.long, "limit": words.limit,
        }  # fmt: skip
        left, group = cold(self.container), Group(self.cap + self.cap // 20)
        try:
            asked["begun"] = time.time()
            command = [sys.executable, "-c", RUN, json.dumps(asked)]
            environment = {"PYTHONPATH": self.tree, "OMP_NUM_THREADS": str(words.threads), "HF_HUB_OFFLINE": "1"}
            done = ended(command, environment, group.enter, 10 * words.limit + 120)
            facts = last_json(done.out) | group.facts()
        finally:
            group.close()
        cached = resident(self.container)
        facts |= {"code": done.code, "wall": done.wall, "left_mib": left, "cached_mib": cached}
        facts |= {"complaint": done.complaint[-1500:]} if done.code else {}
        self.found.append(facts)
        said = {k: round(facts[k], 2) for k in ("rate", "first", "others") if k in facts}
        peak = facts.get("peak", 0) / GIB
        say(f"{self.name}: code {done.code}, {said}, VmHWM {peak:.3f} GiB, {done.wall:.0f} s {done.complaint[-300:]}")

    def answer(self) -> str:
        """What the command line says under this cap, and what it takes."""
        command = [sys.executable, "-m", "pagestone", "run", str(self.container), "--memory", str(self.cap)]
        command += ["--prompt", QUESTION, "--max-new-tokens", "16"]
        left, group = cold(self.container), Group(self.cap + self.cap // 20)
        try:
            done = ended(command, {"PYTHONPATH": self.tree}, group.enter)
            facts = group.facts()
        finally:
            group.close()
        peaks = f"VmHWM {done.peak / 1024:.3f} GiB, group {facts.get('group_peak', 0) / GIB:.3f} GiB"
        said = f"exit code {done.code} in {done.wall:.1f} s, {peaks}, {left:.0f} MiB cached before"
        return f"{said}\n\n{done.complaint.strip()}\n\n{done.out.decode()!r}"

    def cells(self) -> list[str]:
        """Of the table."""
        plan = next((f["plan"] for f in self.found if "plan" in f), None)
        planned = "-" if plan is None else f"{plan['cache_bytes'] / GIB:.2f}"
        planned = f"budget {self.budget / GIB:.2f}" if self.budget is not None else planned
        ends = sorted({f["code"] for f in self.found} - {0})
        kills = sum(f.get("kills", 0) for f in self.found)
        return [
            self.name, f"{self.cap / GIB:g}", planned, *(self.most(k, GIB) for k in ("short_peak", "peak")),
            *(self.most(k, GIB) for k in ("group_peak", "group_anonymous")),
            f"{kills}{f', ended with {ends}' if ends else ''}", *(self.cell(k) for k in ("rate", "late", "first")),
            self.cell("a_token", 1e6, "{:.0f}"), self.cell("hits", 0.01, "{:.0f}"), self.most("faults", 1, "{:.0f}"),
            self.cell("long"), self.most("others", 1, "{:.2f}"), self.most("cached_mib", 1, "{:.0f}"),
        ]  # fmt: skip

    def cell(self, key: str, unit: float = 1, form: str = "{:.2f}") -> str:
        """Median, least and most."""
        values = [f[key] / unit for f in self.found if key in f]
        if not values:
            return "-"
        spread = f" ({form.format(min(values))} .. {form.format(max(values))})" if len(values) > 1 else ""
        return form.format(statistics.median(values)) + spread

    def most(self, key: str, unit: float = 1, form: str = "{:.3f}") -> str:
        """The most of all rounds."""
        values = [f[key] / unit for f in self.found if key in f]
        return form.format(max(values)) if values else "-"


HEADS = [
    "row", "cap GiB", "plan: experts GiB", "VmHWM GiB, decoding", "VmHWM GiB, in all", "group's peak GiB",
    "its peak without page cache GiB", "kills", "tokens/s", "later half", "s to first token", "MB read a token",
    "hits %", "major faults", "s for the long prompt", "others", "MiB in the page cache",
]  # fmt: skip


def table(rows: list[list[str]], heads: list[str]) -> str:
    """As Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def beside_experts(plan: dict[str, Any]) -> str:
    """The lines of a plan, in one."""
    lines = [f"{line['name']} {line['bytes'] / 2**20:.0f} ({line['known']})" for line in plan["lines"]]
    return f"context {plan['context']:,}; MiB: " + ", ".join(lines)


def rows_of(words: argparse.Namespace, own: str, made: dict[str, Made], others: dict[str, str]) -> list[Row]:
    """Every cap with every pair, in this state and, dense matrices kept, in others."""
    rows: list[Row] = []
    for cap in words.caps:
        for pair in words.pairs:
            rows.append(Row(f"{pair}, this", own, made[pair].path, cap))
            kept = made.get(f"{pair.split('+')[0]}+keep")
            if kept is None:
                continue
            plan, _ = python(own, ["-c", PLAN, str(kept.path), str(cap)])
            budget = max(plan.get("cache_bytes", 0), cap - BESIDE)
            rows += [Row(f"{kept.path.name}, {n}", tree, kept.path, cap, budget) for n, tree in others.items()]
    return rows


def sizes(text: str) -> list[int]:
    """Bytes of "3GiB,1.5GiB"."""
    return [int(float(word.removesuffix("GiB")) * GIB) for word in text.split(",")]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--caps", type=sizes, default="3GiB,1.5GiB")
    parser.add_argument("--pairs", type=lambda text: text.split(","), default="int8+int8,q4+q4")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=TREE", help="another import tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=40, help="tokens decoded and timed")
    parser.add_argument("--long", type=int, default=1024, help="tokens of the long prompt; 0 for none")
    parser.add_argument("--limit", type=float, default=20, help="seconds after which no other token is decoded")
    parser.add_argument("--threads", type=int, default=2, help="of products")
    parser.add_argument("--readers", type=int, default=2, help="threads that read")
    parser.add_argument("--workers", type=int, default=2, help="of conversions")
    parser.add_argument("--work", type=Path, help="where containers go; a temporary directory by default")
    parser.add_argument("--kept", type=Path, help="where containers stay, and are found again by the same options")
    parser.add_argument("--spare", type=float, default=15, help="GiB of disk that stay free")
    parser.add_argument("--answer", action="store_true", help="also run the command line for an answer")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    return parser.parse_args()


def check_disk(words: argparse.Namespace, pairs: list[str], work: Path) -> None:
    """Refuse to begin what the disk cannot hold."""
    parameters = words.layers * words.experts * 3 * 512 * 2048
    bits = {"bf16": 16, "int8": 8.1, "fp8": 8.1, "q4": 4.6, "q3": 3.6}
    dense = words.layers * 80e6 + 4 * 2048 * words.vocab
    needed = sum(parameters * bits[pair.split("+")[0]] / 8 + dense for pair in pairs) / GIB
    free = shutil.disk_usage(work).free / GIB
    say(f"containers: {needed:.1f} GiB, free: {free:.1f} GiB")
    if free - needed < words.spare:
        raise SystemExit(f"{free:.1f} GiB are free, {needed:.1f} are needed and {words.spare} are to stay")


@contextlib.contextmanager
def workplace(root: Path | None, kept: Path | None) -> Iterator[Path]:
    """A directory that goes at the end, also when the program is ended; or one that stays."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="bench-memory-", dir=root) as place:
        yield Path(place)


def main() -> None:
    """Convert, measure in turns, print the tables."""
    words = options()
    own = str(Path(next(p for p in sys.path if (Path(p) / "pagestone" / "formats").is_dir())).resolve())
    others = {name: str(Path(tree).resolve()) for name, _, tree in (word.partition("=") for word in words.other)}
    kept = [f"{pair.split('+')[0]}+keep" for pair in words.pairs] if others else []
    pairs = list(dict.fromkeys([*words.pairs, *kept]))
    with workplace(words.work, words.kept) as work:
        check_disk(words, [pair for pair in pairs if not (work / f"{pair}.json").exists()], work)
        made = {pair: make(words, own, pair, work) for pair in pairs}
        rows = rows_of(words, own, made, others)
        for number in range(words.rounds):
            for row in rows if number % 2 == 0 else rows[::-1]:
                row.measure(words)
            if words.json is not None:
                everything = {"containers": [m.facts for m in made.values()], "rows": [vars(r) for r in rows]}
                words.json.write_text(json.dumps(everything, indent=1, default=str) + "\n")
        answers = [
            f"{row.name}, {row.cap / GIB:g} GiB: {row.answer()}" for row in rows if words.answer and not row.budget
        ]
    print(", ".join(f"{key} {value}" for key, value in machine(own).items()))
    print(f"{words.layers} layers of {words.experts} experts, vocabulary {words.vocab}, {words.tokens} tokens decoded, "
          f"{words.threads} threads, {words.rounds} rounds in turns\n")  # fmt: skip
    heads = [
        "container",
        "GB of source",
        "GB",
        "s to convert",
        "peak MiB",
        "s to verify",
        "peak MiB",
        "MiB cached after",
    ]
    print(table([container_cells(m.facts) for m in made.values()], heads), end="\n\n")
    print(table([row.cells() for row in rows], HEADS), end="\n\n")
    for row in rows:
        for plan in [f["plan"] for f in row.found if "plan" in f][:1]:
            print(f"- {row.name}, {row.cap / GIB:g} GiB: {beside_experts(plan)}")
    print(*(f"\n{answer}" for answer in answers), sep="\n", end="")


def container_cells(facts: dict[str, Any]) -> list[str]:
    """Of the table of containers."""
    peaks = [f"{facts[key]:.0f}" for key in ("convert_peak", "verify_peak")]
    return [
        facts["container"], f"{facts['source'] / 1e9:.2f}", f"{facts['bytes'] / 1e9:.2f}", f"{facts['convert_s']:.0f}",
        peaks[0], f"{facts['verify_s']:.0f}", peaks[1], f"{facts['verify_cached_mib']:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
