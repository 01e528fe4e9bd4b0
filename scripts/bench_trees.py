#!/usr/bin/env python3
"""Two states of the project against each other: conversion, reading, products, verify, and the memory they take.

    scripts/bench_trees.py --other before=../before/build/import [--layers 2] [--experts 16] [--rounds 5]

The source has the shapes of Qwen3.6-35B-A3B (make_true_shape.py), few layers, few experts, a small vocabulary. Every
measurement is a process of its own, on one thread; the states take turns in every round, because machines drift. Each
finds the source in the page cache, and reads the container it made. Of the rounds the least CPU seconds count, which
other programs disturb least, and the median of wall seconds. A conversion and verify are counted whole, start and
imports included; reading and products from after their imports. The work directory should lie on the disk that is to
be measured; nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench_open import machine, measured

CODECS = "int8,fp8,q4"
READ = """
import json, os, sys, time
from pagestone import open_container
from pagestone.reader.store import StoreOptions, open_store
container = open_container(sys.argv[1])
largest = max(layer.stride for layer in container.layers.values())
begun, cpu = time.perf_counter(), time.process_time()
store, _ = open_store(container, StoreOptions(budget=4 * largest, threads=1))
for _ in range(2):
    for number, layer in container.layers.items():
        for expert in range(len(layer)):
            with store.step(number, [expert]) as step, step.lease(expert) as lease:
                lease.expert
store.close()
print(json.dumps([time.perf_counter() - begun, time.process_time() - cpu]))
"""
MULTIPLY = """
import json, sys, time
import numpy
from pagestone import open_container
container = open_container(sys.argv[1])
layer = container.layers[0]
header = layer.header if hasattr(layer, "header") else layer.file  # older states called it so
x = (numpy.random.default_rng(1).standard_normal((1, header.shape.hidden)) * 100).astype(numpy.float16)
inner = x[:, : header.shape.intermediate].copy()
experts = [layer.expert(number) for number in range(len(layer))]
def turn():
    for expert in experts:
        for matrix in expert.inner:
            matrix.multiply(x)
        expert.down.multiply(inner)
turn()
begun, cpu = time.perf_counter(), time.process_time()
for _ in range(2000 // len(experts)):
    turn()
print(json.dumps([time.perf_counter() - begun, time.process_time() - cpu]))
"""


@dataclass
class Taken:
    """What one thing took in one state, a number a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)

    def cells(self) -> str:
        """CPU seconds, wall seconds and MiB, as cells of a row."""
        return f"{min(self.cpu):.3f} | {statistics.median(self.wall):.3f} | {min(self.peak):.0f}"


def run(tree: str, words: list[str], taken: Taken) -> None:
    """One process; it may print its own [wall, CPU] seconds as its last line, otherwise all of it counts."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    printed, *whole, peak = measured([sys.executable, *words], PYTHONPATH=tree, **one_thread)
    wall, cpu = json.loads(printed.splitlines()[-1]) if words[0] == "-c" else whole
    taken.wall.append(wall)
    taken.cpu.append(cpu)
    taken.peak.append(peak)


def compare(trees: dict[str, str], codecs: list[str], source: Path, work: Path, rounds: int) -> dict[str, list[Taken]]:
    """What every step took, a `Taken` for each of `trees`."""
    found: dict[str, list[Taken]] = {}
    for codec in codecs:
        for _ in range(rounds):
            for at, (name, tree) in enumerate(trees.items()):
                place = work / f"{name}-{codec}"
                shutil.rmtree(place, ignore_errors=True)
                steps = {
                    "convert": ["-m", "pagestone", f"prepare-{codec}", str(source), "-o", str(place), "--workers", "1"],
                    "verify": ["-m", "pagestone", "verify", str(place)],
                    "read": ["-c", READ, str(place)],
                    "multiply": ["-c", MULTIPLY, str(place)],
                }
                # one state leaves its source in the page cache, another does not
                subprocess.run(["cat", *source.iterdir()], stdout=subprocess.DEVNULL, check=True)
                for step, words in steps.items():
                    run(tree, words, found.setdefault(f"{step} {codec}", [Taken() for _ in trees])[at])
        for name in trees:
            shutil.rmtree(work / f"{name}-{codec}")
    return found


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", action="append", required=True, metavar="NAME=TREE", help="another import tree")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where everything goes; a temporary directory by default")
    args = parser.parse_args()
    own = next(p for p in sys.path if (Path(p) / "pagestone" / "formats").is_dir())
    trees = dict(word.split("=", 1) for word in args.other) | {"this": own}
    trees = {name: str(Path(tree).resolve()) for name, tree in trees.items()}
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        source = Path(work) / "source"
        make = [Path(__file__).with_name("make_true_shape.py"), source, "--layers", str(args.layers)]
        # not here: the memory of this process would count as that of those it starts
        subprocess.run([sys.executable, *make, "--experts", str(args.experts)], check=True)
        found = compare(trees, args.codecs.split(","), source, Path(work), args.rounds)
    print(", ".join(f"{key} {value}" for key, value in machine(own).items()))
    print(f"{args.layers} layers of {args.experts} experts, {args.rounds} rounds in turns\n")
    heads = "".join(f" {name}: CPU s | wall s | MiB |" for name in trees)
    print(f"| |{heads} CPU: this / {next(iter(trees))} |\n|---|" + "---|---|---|" * len(trees) + "---|")
    for step, each in found.items():
        ratio = min(each[-1].cpu) / min(each[0].cpu)
        print(f"| {step} | " + " | ".join(taken.cells() for taken in each) + f" | {ratio:.2f} |")


if __name__ == "__main__":
    main()
