#!/usr/bin/env python3
"""What a native product costs: y = x W^T of one expert's matrices, as a multiple of reading their bytes from memory.

    scripts/bench_products.py [--calls N] [--arena-mib N] [--threads 1,2] [--tokens 1,64] [--codecs bf16,...]
                              [--disk-gbps X] [--json FILE]

Matrices have the shapes of Qwen3.6-35B-A3B: gate over up [1024, 2048] and down [2048, 512]. Copies fill an arena
larger than any cache, and calls walk through it, so that every call finds its weights in memory and not in a cache. The
product, reading the same bytes with as many threads and, for bf16 if torch is installed, its F.linear take turns, call
by call, because machines drift; of the times of each the tenth percentile counts. Before anything is timed each product
must equal its definition bit for bit. With --disk-gbps, a product's time is also given in units of the time this disk
needs for the same bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats import encodings, native
from pagestone.formats.dtypes import VIEWS, Array, f32_to_bf16
from pagestone.formats.encodings import Codec
from pagestone.formats.layout import align_up
from pagestone.formats.surroundings import measured_on

SHAPES = {"gate_up": (1024, 2048), "down": (2048, 512)}
CODECS = ("bf16", "int8", "fp8", "q8", "q4", "q3")
AIMS = {"bf16": 1.3, "int8": 1.3, "fp8": 3.0, "q8": 3.0, "q4": 4.0, "q3": 6.0}
"""Multiples of the read time to aim for with one token."""


@dataclass
class Row:
    """One line of the table; times in microseconds a call."""

    codec: str
    shape: str
    tokens: int
    threads: int
    nbytes: int
    product: float
    read: float
    torch: float | None = None


def copies(codec: Codec, rows: int, columns: int, arena: Array) -> list[tuple[dict[str, Array], Array]]:
    """An encoded matrix again and again through the arena: (stored arrays, all their bytes) of each copy."""
    weight = (np.random.default_rng(1).standard_normal((rows, columns)) * 0.02).astype(np.float32)
    stored = codec.allocate(rows, columns)
    codec.encode(f32_to_bf16(weight), "BF16", stored)
    wanted = codec.roles(rows, columns)
    places, size = {}, 0
    for tensor in wanted:
        places[tensor.name], size = size, align_up(size + stored[tensor.name].nbytes, 64)
    found = []
    for start in range(0, len(arena) - size + 1, align_up(size, 4096)):
        record, arrays = arena[start : start + size], {}
        for tensor in wanted:
            at, source = places[tensor.name], stored[tensor.name]
            arrays[tensor.name] = record[at : at + source.nbytes].view(VIEWS[tensor.dtype]).reshape(source.shape)
            arrays[tensor.name][...] = source
        found.append((arrays, record))
    return found


def torch_linear(x: Array, threads: int) -> Callable[[Array], Any] | None:
    """F.linear of BF16 bits, if torch is installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    tokens = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)

    def call(codes: Array) -> Any:
        return torch.nn.functional.linear(tokens, torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16))

    return call


def measure(codec: Codec, shape: str, tokens: int, threads: int, arena: Array, calls: int) -> Row:
    """Times of one product, one read, and torch, taking turns."""
    rows, columns = SHAPES[shape]
    records = copies(codec, rows, columns, arena)
    x = f32_to_bf16(np.random.default_rng(2).standard_normal((tokens, columns)).astype(np.float32))
    out = np.empty((tokens, rows), np.uint16)
    exact = codec.matmul(records[0][0], x, rows, columns, threads=threads)
    if exact.tobytes() != codec.matmul_definition(records[0][0], x, rows, columns).tobytes():
        raise SystemExit(f"{codec.name} {shape} M={tokens}: the product is not what its definition says")
    read = native.kernel("read_bytes")
    if read is None:
        raise SystemExit("the native kernels are not built, or PAGESTONE_ISA=numpy")
    contenders: dict[str, Callable[[dict[str, Array], Array], Any]] = {
        "product": lambda arrays, _: codec.matmul(arrays, x, rows, columns, out=out, threads=threads),
        "read": lambda _, record: read(record, threads),
    }
    linear = torch_linear(x, threads) if codec.name == "bf16" else None
    if linear is not None:
        contenders["torch"] = lambda arrays, _: linear(arrays["codes"])
    times: dict[str, list[float]] = {name: [] for name in contenders}
    walk: Iterator[tuple[dict[str, Array], Array]] = cycle(records)
    for _ in range(calls if tokens < 16 else max(20, calls // 8)):
        for name, call in contenders.items():
            arrays, record = next(walk)
            began = time.perf_counter()
            call(arrays, record)
            times[name].append((time.perf_counter() - began) * 1e6)
    typical = {name: float(np.percentile(found, 10)) for name, found in times.items()}
    nbytes = len(records[0][1])
    return Row(codec.name, shape, tokens, threads, nbytes, typical["product"], typical["read"], typical.get("torch"))


def expert(rows: list[Row]) -> Row:
    """An expert's line: the sum of its matrices' lines."""
    first = rows[0]
    torch = None if first.torch is None else sum(row.torch or 0.0 for row in rows)
    nbytes, product, read = sum(x.nbytes for x in rows), sum(x.product for x in rows), sum(x.read for x in rows)
    return Row(first.codec, "expert", first.tokens, first.threads, nbytes, product, read, torch)


def table(rows: list[Row], disk: float | None) -> str:
    """Markdown."""
    head = "| codec | matrix | M | threads | MB | read us | product us | x read | GB/s | aim | torch us |"
    rule = "|---|---|---|---|---|---|---|---|---|---|---|"
    if disk:
        head, rule = head + " x disk |", rule + "---|"
    lines = [head, rule]
    for row in rows:
        aim = f"{AIMS[row.codec]:.1f}" if row.tokens == 1 else ""
        torch = "" if row.torch is None else f"{row.torch:.0f}"
        line = (f"| {row.codec} | {row.shape} | {row.tokens} | {row.threads} | {row.nbytes / 1e6:.2f} | {row.read:.0f} "
                f"| {row.product:.0f} | {row.product / row.read:.2f} | {row.nbytes / row.product / 1e3:.1f} "
                f"| {aim} | {torch} |")  # fmt: skip
        lines.append(line + (f" {row.product * disk * 1e3 / row.nbytes:.3f} |" if disk else ""))
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=600)
    parser.add_argument("--arena-mib", type=int, default=1024, help="more than the caches hold")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--tokens", type=numbers, default=[1, 64])
    parser.add_argument("--codecs", type=lambda text: text.split(","), default=list(CODECS))
    parser.add_argument("--disk-gbps", type=float, help="what the disk reads, in 10^9 bytes a second")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arena = np.zeros(arguments.arena_mib << 20, np.uint8)
    facts = measured_on()
    rows: list[Row] = []
    for name in arguments.codecs:
        for tokens in arguments.tokens:
            for threads in arguments.threads:
                parts = [measure(encodings.get(name), s, tokens, threads, arena, arguments.calls) for s in SHAPES]
                rows += [*parts, expert(parts)]
    print(", ".join(f"{key} {value}" for key, value in facts.items()), "\n")
    print(table(rows, arguments.disk_gbps))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
