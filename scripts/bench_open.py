#!/usr/bin/env python3
"""What opening a large container costs: CPU seconds to its first expert, and to the tables of all its layers.

The container has the true shape of a 35-billion-parameter model, 40 layers of 256 experts, int8, in sparse files:
opening reads headers, lengths and the manifest, and no record. Every measurement is a process of its own, and its
seconds are counted from after the imports. With `--other`, import trees of other states of the project take turns with
this one, because machines drift; each makes its own container.

    scripts/bench_open.py --rounds 7 --other before=../before/build/import
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAKE = """
import sys
from pathlib import Path
from pagestone.formats import manifest
try:
    from pagestone.formats import encodings
except ImportError:  # as they were called once
    from pagestone.formats import codecs as encodings
from pagestone.formats.digests import digest, layer_digest
from pagestone.formats.layer_file import layer_file_name
from pagestone.formats.layout import ExpertShape
from pagestone.formats.manifest import FileDigest, LayerEntry, Manifest
import pagestone.formats.layer_file as lf
LayerHeader = getattr(lf, "LayerHeader", None) or lf.LayerFile  # what it was called before
root, layers, experts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
root.mkdir()
codec, entries, files = encodings.get("int8"), [], {}
zero = None
for n in range(layers):
    prefix = f"model.language_model.layers.{n}.mlp.experts"
    file = LayerHeader(codec, "layers", n, prefix, ExpertShape(2048, 512), experts)
    name, head = layer_file_name("layers", n), file.head()
    zero = zero or digest(bytes(file.layout(len(head)).stride))
    side = lf.sidecar_name(name)
    for where, start, size in ((name, head, file.layout(len(head)).file_size),
                               (side, file.sidecar_head(), len(file.sidecar_head()) + 4 * experts * 3072)):
        with (root / where).open("wb") as handle:
            handle.write(start)
            handle.truncate(size)
    files[name] = FileDigest((root / name).stat().st_size, layer_digest(head, [zero] * experts))
    files[side] = FileDigest((root / side).stat().st_size, digest((root / side).read_bytes()))
    entries.append(LayerEntry(name, "layers", n, experts, side))
if hasattr(manifest, "RECORDS"):
    (root / manifest.RECORDS).write_bytes(zero * layers * experts)
    files[manifest.RECORDS] = FileDigest(16 * layers * experts, digest(zero * layers * experts))
made = Manifest(codec.name, codec.parameters, False, None, {}, tuple(entries), files)
(root / "manifest.json").write_bytes(made.to_bytes())
"""
OPEN = """
import json, resource, sys, time
from pagestone.reader.container import open_container
import numpy
what = sys.argv[2]
begun, clock = time.process_time(), time.perf_counter()
container = open_container(sys.argv[1])
if what == "manifest":
    pass
elif what == "first expert":
    container.layers[20].expert(3)
else:
    for layer in container.layers.values():
        layer.layout
print(json.dumps({"cpu": time.process_time() - begun, "wall": time.perf_counter() - clock,
                  "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "pyarrow": "pyarrow" in sys.modules}))
"""
WHAT = ("manifest", "first expert", "all layers")


MACHINE = """
import json
from pagestone.formats.surroundings import measured_on
print(json.dumps(measured_on()))
"""


def python(tree: str, code: str, *arguments: str) -> str:
    """What a program prints that imports the project from `tree`."""
    environment = os.environ | {"PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Ended:
    """A process that ended: what it printed and complained of, wall and CPU seconds, peak MiB.

    Memory and CPU are its own, not those of all that ran before, as `getrusage` would add them up.
    """

    out: bytes
    complaint: str
    code: int
    wall: float
    cpu: float
    peak: float


def ended(
    command: list[str], environment: Mapping[str, str], within: Callable[[], None] | None = None, limit: float = 7200
) -> Ended:
    """Run a process with this added to its environment; `within` is called in it first; it has `limit` seconds."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaint:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=out, stderr=complaint, preexec_fn=within
        )
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - begun
        for file in (out, complaint):
            file.seek(0)
        said, code = complaint.read().decode(errors="replace"), process.returncode
        return Ended(out.read(), said, code, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def measured(command: list[str], **environment: str) -> tuple[bytes, float, float, float]:
    """(stdout, wall seconds, CPU seconds, peak MiB) of a process that must succeed, see `ended`."""
    found = ended(command, environment)
    if found.code:
        raise SystemExit(f"{command[:4]} failed: {found.complaint[-800:]}")
    return found.out, found.wall, found.cpu, found.peak


def machine(tree: str) -> dict[str, Any]:
    """What the numbers depend on; asked of `tree`, because beside a script lies only half of the package."""
    facts: dict[str, Any] = json.loads(python(tree, MACHINE))
    return facts


def main() -> None:
    """Parse the command line, measure, print a table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--other", action="append", default=[], metavar="NAME=TREE", help="another import tree")
    args = parser.parse_args()
    own = next(p for p in sys.path if (Path(p) / "pagestone" / "formats").is_dir())
    trees = {"this": own} | dict(word.split("=", 1) for word in args.other)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {w: [] for w in WHAT} for name in trees}
    with tempfile.TemporaryDirectory() as place:
        for name, tree in trees.items():
            python(tree, MAKE, f"{place}/{name}", str(args.layers), str(args.experts))
        for _ in range(args.rounds):
            for what in WHAT:
                for name, tree in trees.items():
                    found[name][what].append(json.loads(python(tree, OPEN, f"{place}/{name}", what)))
    table = {
        name: {
            what: {
                "cpu_s": round(statistics.median(r["cpu"] for r in runs), 4),
                "least_cpu_s": round(min(r["cpu"] for r in runs), 4),
                "peak_mib": round(max(r["peak_mib"] for r in runs), 1),
            }
            for what, runs in by_what.items()
        }
        for name, by_what in found.items()
    }
    facts = {"machine": machine(own), "layers": args.layers, "experts": args.experts}
    print(json.dumps(facts | table, indent=1))


if __name__ == "__main__":
    main()
