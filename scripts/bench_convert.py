#!/usr/bin/env python3
"""How long a conversion takes against the floor, and how much memory: interleaved, in one run, with the machine.

The floor is the fastest of {buffered, O_DIRECT} x {1, 2 threads} that only reads the bytes the conversion reads and
writes as many bytes as it writes, fsync included. Conversion and floors take turns in every round, because machines
drift; ratios are taken within a round. The benchmark itself asserts that every conversion gave the same container and
that sampled experts equal the source's encoding.

    scripts/bench_convert.py --layers 4 --codec int8 --codec fp8 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_open import machine, measured

PAGE = 4096
CHUNK = 4 << 20
PIECE = tuple[Path, int, int]
"""A file, an offset in it and a length, in bytes."""


def drop_caches() -> None:
    """Empty the page cache, so that what follows reads from the device (needs root)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def warm(pieces: list[PIECE]) -> None:
    """Read everything once, so that what follows finds it in the page cache."""
    _run(pieces, [], threads=1, direct=False)


def split(path: Path) -> list[PIECE]:
    """A file in chunks."""
    size = path.stat().st_size
    return [(path, at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]


def _run(reads: list[PIECE], writes: list[PIECE], *, threads: int, direct: bool) -> float:
    """Seconds to read and write all pieces: every thread takes its share of both, alternating in proportion."""
    flag = os.O_DIRECT if direct else 0
    begun = time.monotonic()
    sources = {p: os.open(p, os.O_RDONLY | flag) for p in {x[0] for x in reads}}
    targets = {p: os.open(p, os.O_WRONLY | os.O_CREAT | flag, 0o644) for p in {x[0] for x in writes}}
    for path, handle in targets.items():
        os.posix_fallocate(handle, 0, sum(n for p, _, n in writes if p == path))

    def up(n: int) -> int:
        return -(-n // PAGE) * PAGE if direct else n

    def work(mine: int) -> None:
        buffer = memoryview(mmap.mmap(-1, CHUNK))
        todo = list(reads[mine::threads])
        out = list(writes[mine::threads])
        ratio = len(out) / max(1, len(todo))
        owed = 0.0
        for path, at, size in todo:
            os.preadv(sources[path], [buffer[: up(size)]], at)
            owed += ratio
            while owed >= 1 and out:
                owed -= 1
                target, place, length = out.pop()
                os.pwrite(targets[target], buffer[: up(length)], place)
        for target, place, length in out:
            os.pwrite(targets[target], buffer[: up(length)], place)

    running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    for handle in targets.values():
        os.fsync(handle)
    for handle in [*sources.values(), *targets.values()]:
        os.close(handle)
    return time.monotonic() - begun


def convert(codec: str, source: Path, output: Path, workers: int) -> dict[str, Any]:
    """One conversion as a process of its own: wall seconds, CPU seconds, peak RSS in MiB, container id."""
    command = [sys.executable, "-m", "pagestone", f"prepare-{codec}", str(source), "-o", str(output),
               "--workers", str(workers), "--json"]  # fmt: skip
    text, wall, cpu, peak = measured(command)
    return {"wall": wall, "cpu": cpu, "rss": peak, "id": json.loads(text)["container_id"]}


def bench(codec: str, source: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one codec."""
    reads = [piece for shard in sorted(source.glob("*.safetensors")) for piece in split(shard)]
    bytes_in = sum(n for _, _, n in reads)
    prepare: Callable[[], None] = drop_caches if args.cold else lambda: warm(reads)
    output = scratch / f"out-{codec}"
    rounds = []
    writes: list[PIECE] = []
    for _ in range(args.rounds):
        shutil.rmtree(output, ignore_errors=True)
        prepare()
        result = convert(codec, source, output, args.workers)
        files = sorted(p for p in output.iterdir() if p.suffix == ".safetensors")
        writes = [(scratch / f"floor-{p.name}", at, n) for f in files for p, at, n in split(f)]
        floors = {}
        for direct in (False, True):
            for threads in (1, 2):
                prepare()
                name = f"{'direct' if direct else 'buffered'} x{threads}"
                floors[name] = _run(reads, writes, threads=threads, direct=direct)
                for path in {p for p, _, _ in writes}:
                    path.unlink()
        rounds.append(result | {"floors": floors, "floor": min(floors.values())})
    ids = {r["id"] for r in rounds}
    assert len(ids) == 1, f"rounds gave different containers: {ids}"
    check = subprocess.run(
        [sys.executable, "-m", "pagestone", "verify", str(output), "--source", str(source), "--sample", "64", "--json"],
        stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    assert check.returncode == 0, check.stdout.decode()
    shutil.rmtree(output)
    best = min(rounds, key=lambda r: r["wall"])
    return {
        "codec": codec, "bytes_in": bytes_in, "bytes_out": sum(n for _, _, n in writes), "rounds": rounds,
        "wall_median": statistics.median(r["wall"] for r in rounds),
        "floor_median": statistics.median(r["floor"] for r in rounds),
        "ratio_median": statistics.median(r["wall"] / r["floor"] for r in rounds),
        "cpu_median": statistics.median(r["cpu"] for r in rounds),
        "rss_max": max(r["rss"] for r in rounds),
        "rate_best": bytes_in / best["wall"] / 1e9,
    }  # fmt: skip


def main() -> None:
    """Parse the command line, make the source, run, print a table (and JSON with --json)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--codec", action="append", help="may be repeated; default: every codec")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cold", action="store_true", help="empty the page cache before every run (root)")
    parser.add_argument("--source", type=Path, help="an existing checkpoint instead of a new true-shape one")
    parser.add_argument("--scratch", type=Path, help="directory for the files (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as temporary:
        scratch = Path(temporary)
        source = args.source
        if source is None:
            source = scratch / "source"
            script = Path(__file__).with_name("make_true_shape.py")
            subprocess.run([sys.executable, str(script), str(source), "--layers", str(args.layers),
                            "--experts", str(args.experts)], check=True, stdout=sys.stderr)  # fmt: skip
        results = [
            bench(codec, source, scratch, args) for codec in args.codec or ["bf16", "fp8", "int8", "q3", "q4", "q8"]
        ]
    facts = machine(os.environ.get("PYTHONPATH", "")) | {
        "workers": args.workers,
        "source": "cold" if args.cold else "warm",
        "rounds": args.rounds,
    }
    print(" ".join(f"{k}={v}" for k, v in facts.items()))
    print("| codec | in GB | out GB | wall s | floor s | wall / floor | GB/s of source | CPU s | peak RSS MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        print(f"| {r['codec']} | {r['bytes_in'] / 1e9:.2f} | {r['bytes_out'] / 1e9:.2f} | {r['wall_median']:.2f} "
              f"| {r['floor_median']:.2f} | {r['ratio_median']:.2f} | {r['rate_best']:.2f} | {r['cpu_median']:.1f} "
              f"| {r['rss_max']:.0f} |")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
