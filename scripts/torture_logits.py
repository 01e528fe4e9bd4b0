"""Every combination that tests/validate/test_logits.py only pairs: streamed and resident logits, byte for byte.

    python scripts/torture_logits.py [CHECKPOINT] [--lengths 1,17,300] [--codecs int8,q3] [--seeds 3]
                                     [--experts reference]

codecs x budgets (one expert ... all) x {direct, mmap} x reading threads x prompt lengths x eviction histories, with
native experts unless told otherwise. Each codec is converted once to a temporary directory and its resident side is run
once a length. About 1,600 runs for tiny-moe with all codecs, half a second each. Exit code 1 if any run differs, holds
more than its budget, or keeps a lease.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pagestone.convert.plan import Request, make_plan
from pagestone.convert.prepare import prepare
from pagestone.formats import encodings
from pagestone.reader.budget import all_records
from pagestone.reader.cache import ExpertCache, Key, Policy, balanced
from pagestone.reader.container import Container, open_container
from pagestone.reader.hosts import transformers as host
from pagestone.reader.model import NATIVE, PRODUCTS
from pagestone.reader.session import Session, SessionOptions
from pagestone.reader.store import FileRecords, MappedStore, RecordDigests
from pagestone.validate.logits import resident_model
from pagestone.validate.sides import Prompt, first_difference, proof, run_side

TINY = Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny-moe"


def history(seed: int) -> Policy:
    """Ours for 0, else random evictions with their own history."""
    if not seed:
        return balanced
    source = random.Random(seed)

    def any_key(candidates: Collection[Key], coming: Key, held: Mapping[int, int]) -> Key | None:
        return None if source.random() < 0.1 else source.choice(list(candidates))

    return any_key


def budgets(container: Container) -> list[int]:
    """One record, two, seven, a quarter, all but one, all; in bytes."""
    largest = max(layer.stride for layer in container.layers.values())
    every = all_records(container)
    return sorted({largest, 2 * largest, 7 * largest, max(largest, every // 4), every - largest, every})


def runs(container: Container, threads: list[int], seeds: int) -> list[tuple[str, Any]]:
    """(name, a function that makes the store) of every way to stream."""

    def direct(budget: int, count: int, seed: int) -> Any:
        records = FileRecords(container, RecordDigests(container))
        return ExpertCache(container.layers, records, budget, threads=count, policy=history(seed))

    found: list[tuple[str, Any]] = [("mmap", lambda: MappedStore(container))]
    for budget, count, seed in itertools.product(budgets(container), threads, range(seeds)):
        name = f"direct budget={budget} threads={count} history={seed}"
        found.append((name, lambda b=budget, c=count, s=seed: direct(b, c, s)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=TINY)
    parser.add_argument("--codecs", default=",".join(sorted(encodings.registry())))
    parser.add_argument("--experts", choices=PRODUCTS, default=NATIVE)
    parser.add_argument("--lengths", default="1,2,17,64,129,300")
    parser.add_argument("--threads", default="1,2,4")
    parser.add_argument("--seeds", type=int, default=3, help="eviction histories, the first being the policy's own")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path, help="where containers go; a temporary directory by default")
    words = parser.parse_args()
    lengths, threads = ([int(n) for n in text.split(",")] for text in (words.lengths, words.threads))
    done = failed = 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=words.work) as work:
        for codec in words.codecs.split(","):
            path = Path(work) / codec
            prepare(make_plan(Request(words.checkpoint, encodings.get(codec))), path, workers=2)
            container = open_container(path)
            resident = resident_model(Session(path, SessionOptions(experts=words.experts)))
            source = random.Random(7)
            prompts = [Prompt(str(n), tuple(source.randrange(resident.vocabulary) for _ in range(n))) for n in lengths]
            wanted = run_side(resident, prompts, words.steps)
            choices = [[s.choice for s in steps] for steps in wanted.steps]
            resident.close()
            for name, make in runs(container, threads, words.seeds):
                model = host.load(container, make(), experts=words.experts)
                for number, prompt in enumerate(prompts):
                    side = run_side(model, [prompt], words.steps, [choices[number]])
                    found = first_difference([prompt], [wanted.steps[number]], side.steps)
                    faults = ([found.text()] if found else []) + proof(side)
                    done += 1
                    failed += bool(faults)
                    for fault in faults:
                        print(f"FAILED {codec} {name} length={prompt.name}: {fault}", flush=True)
                model.close()
                print(
                    f"{done} runs, {failed} failed, {time.monotonic() - begun:.0f} s: {codec} {name}", file=sys.stderr
                )
    print(f"{done} runs, {failed} failed, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
