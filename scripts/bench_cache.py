#!/usr/bin/env python3
"""What a conversion, and verify with its source, leave in the page cache, and what they have there meanwhile.

    scripts/bench_cache.py [--layers 2] [--codec int8] [--rounds 2] [--other before=../before/build/import]

The source has the shapes of Qwen3.6-35B-A3B (make_true_shape.py). It begins cold (the page cache was asked to let go of
it) or warm (it was read just before). Pages of the source are counted with mincore ten times a second, from outside.
Other states of the project take turns with this one. Nothing is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_open import machine

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def resident(root: Path) -> float:
    """MiB of a directory's files that are in the page cache."""
    pages = 0
    for path in root.iterdir():
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if not size:
                continue
            states = (ctypes.c_ubyte * -(-size // PAGE))()
            address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle.fileno(), 0)
            if LIBC.mincore(address, size, states):
                raise OSError(ctypes.get_errno(), "mincore")
            LIBC.munmap(address, size)
            pages += bytes(states).count(1)
    return pages * PAGE / 2**20


def begin(root: Path, *, warm: bool) -> None:
    """Bring the source into the page cache, or out of it."""
    for path in root.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while warm and handle.read(4 << 20):
                pass


def watched(tree: str, words: list[str], source: Path) -> dict[str, float]:
    """Run one command; seconds, and MiB of the source in the page cache: at first, at most, and afterwards."""
    first = most = resident(source)
    environment = os.environ | {"PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
    begun, samples = time.perf_counter(), []
    command = [sys.executable, "-m", "pagestone", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        samples.append(resident(source))
        time.sleep(0.1)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{tree}: {words} failed with {process.returncode}")
    half = samples[len(samples) // 2 :] or [most]
    return {
        "wall_s": round(time.perf_counter() - begun, 2), "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "before_mib": round(first), "most_mib": round(max(samples or [most])), "most_later_mib": round(max(half)),
        "after_mib": round(resident(source), 2),
    }  # fmt: skip


def main() -> None:
    """Parse the command line, measure, print a JSON line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", action="append", default=[], metavar="NAME=TREE", help="another import tree")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, help="where everything goes; a temporary directory by default")
    args = parser.parse_args()
    own = next(p for p in sys.path if (Path(p) / "pagestone" / "formats").is_dir())
    trees = dict(word.split("=", 1) for word in args.other) | {"this": own}
    print(", ".join(f"{key} {value}" for key, value in machine(own).items()))
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        source, output = Path(work) / "source", Path(work) / "output"
        make = [sys.executable, Path(__file__).with_name("make_true_shape.py"), source, "--layers", str(args.layers)]
        subprocess.run([*make, "--experts", str(args.experts), "--vocab", str(args.vocab)], check=True)
        print(f"source: {sum(p.stat().st_size for p in source.iterdir()) / 2**30:.2f} GiB")
        steps = {
            "convert": [f"prepare-{args.codec}", str(source), "-o", str(output), "--workers", str(args.workers)],
            "verify": ["verify", str(output), "--source", str(source)],
        }
        for number in range(args.rounds):
            for warm in (False, True):
                for name, tree in trees.items():
                    shutil.rmtree(output, ignore_errors=True)
                    for step, words in steps.items():
                        begin(source, warm=warm)
                        facts = {"round": number, "begins": "warm" if warm else "cold", "tree": name, "step": step}
                        print(json.dumps(facts | watched(str(Path(tree).resolve()), words, source)), flush=True)


if __name__ == "__main__":
    main()
