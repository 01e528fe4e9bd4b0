#!/usr/bin/env python3
"""What each codec costs in precision and in time: relative RMS error, bits a weight, and rate of source on one core.

    scripts/bench_error.py [--rounds N] [--model DIR] [--ggml libggml-base.so] [--json FILE]

Weights are tiny-moe's experts, and matrices of Qwen3.6-35B-A3B's shapes drawn from normal, Laplace and Student-t
distributions and rounded to BF16. The relative RMS error is sqrt(sum (w - decoded)^2 / sum w^2), decoded in float32.
MLX's 3 and 4 bits, on its CPU, stand beside them if it is installed; its scales and biases are taken as float32.
llama.cpp's Q3_K, Q4_K and Q8_0 do if its base library (libggml-base, built by the user) is named; their blocks of 256
do not fit every row, and such sets are left out. Codecs
take turns in every round, because machines drift, and the best round counts. Rates are bytes of source per second of
CPU time, encoding only, with our encoders in one thread; MLX may use more, and all of them are counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats import encodings
from pagestone.formats.dtypes import Array, bf16_to_f32, f32_to_bf16
from pagestone.formats.encodings import Codec
from pagestone.formats.safetensors_header import read_header
from pagestone.formats.surroundings import measured_on

TINY = Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny-moe"
SHAPES = ((512, 2048), (512, 2048), (2048, 512))
"""gate, up and down of one expert."""
EXPERTS = 4
"""Experts drawn from each distribution."""
CASES: tuple[tuple[str, dict[str, int | str]], ...] = (
    ("bf16", {}), ("int8", {}), ("fp8", {}), ("q4", {}), ("q4", {"group_size": 32}),
    ("q3", {}), ("q3", {"group_size": 32}), ("q8", {}),
)  # fmt: skip


@dataclass
class Row:
    """One line of the table: error by set, best rate by set, bits a weight."""

    name: str
    bits: float
    errors: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


def experts_of(model: Path) -> list[Array]:
    """BF16 bits of every routed expert matrix of a checkpoint, fused ones taken apart by expert."""
    found: list[Array] = []
    for path in sorted(model.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")
        for entry in read_header(path).entries:
            if ".experts." in entry.name and entry.dtype == "BF16" and len(entry.shape) in (2, 3):
                bits = raw[entry.offset : entry.offset + entry.nbytes].copy().view("<u2").reshape(entry.shape)
                found += list(bits.reshape(-1, *entry.shape[-2:]))
    if not found:
        raise SystemExit(f"{model}: no BF16 expert matrices found")
    return found


def drawn(make: Callable[[np.random.Generator, tuple[int, int]], Array], seed: int) -> list[Array]:
    """Matrices of an expert's shapes from a distribution, as BF16 bits."""
    rng = np.random.default_rng(seed)
    return [f32_to_bf16((make(rng, shape) * 0.02).astype(np.float32)) for _ in range(EXPERTS) for shape in SHAPES]


def sets(model: Path) -> dict[str, list[Array]]:
    """Matrices by name."""
    return {
        model.name: experts_of(model),
        "Gaussian": drawn(lambda rng, shape: rng.standard_normal(shape), 1),
        "Laplace": drawn(lambda rng, shape: rng.laplace(size=shape), 2),
        "Student-t (5)": drawn(lambda rng, shape: rng.standard_t(5, shape), 3),
    }


def relative(weights: list[Array], decoded: Callable[[Array], Array]) -> float:
    """Relative RMS error over several matrices."""
    error = norm = 0.0
    for bits in weights:
        exact = bf16_to_f32(bits).astype(np.float64)
        error += float(((exact - decoded(bits).astype(np.float64)) ** 2).sum())
        norm += float((exact**2).sum())
    return float(np.sqrt(error / norm))


def keep_best(row: Row, name: str, weights: list[Array], work: Callable[[Array], None]) -> None:
    """Note the rate of one round, in MB of source per CPU second, if it is the best so far."""
    begun = time.process_time()
    for bits in weights:
        work(bits)
    rate = sum(bits.nbytes for bits in weights) / max(time.process_time() - begun, 1e-9) / 1e6
    row.rates[name] = max(rate, row.rates.get(name, 0.0))


def of_codec(codec: Codec) -> tuple[Row, Callable[[Array], None], Callable[[Array], Array]]:
    """A row, what is timed, and what its error is measured on."""
    stored: dict[tuple[int, ...], dict[str, Array]] = {}

    def encode(bits: Array) -> None:
        if bits.shape not in stored:
            stored[bits.shape] = codec.allocate(*bits.shape)
        codec.encode(bits, "BF16", stored[bits.shape])

    def decoded(bits: Array) -> Array:
        encode(bits)
        return codec.values(stored[bits.shape], *bits.shape)

    rows, columns = SHAPES[0]
    size = sum(t.nbytes for t in codec.tensors(rows, columns))
    group = codec.parameters.get("group_size")
    name = f"{codec.name}, group {group}" if group else codec.name
    return Row(name, 8 * size / (rows * columns)), encode, decoded


def of_mlx(mx: Any, bits: int) -> tuple[Row, Callable[[Array], None], Callable[[Array], Array]]:
    """The same for MLX's own quantisation, group 64."""

    def quantized(source: Array) -> Any:
        return mx.quantize(mx.array(source).view(mx.bfloat16), group_size=64, bits=bits)

    def decoded(source: Array) -> Array:
        words, scales, biases = quantized(source)
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        return np.array(mx.dequantize(words, *wide, group_size=64, bits=bits))

    return Row(f"MLX {bits}-bit, group 64", bits + 0.5), lambda source: mx.eval(*quantized(source)), decoded


def of_ggml(
    library: Path, name: str, number: int, bits: float
) -> tuple[Row, Callable[[Array], None], Callable[[Array], Array]]:
    """The same for one of llama.cpp's types (its number in enum ggml_type), without an importance matrix."""
    base = ctypes.CDLL(os.fspath(library), mode=os.RTLD_LAZY)
    quantize, dequantize = base.ggml_quantize_chunk, getattr(base, f"dequantize_row_{name[0].lower()}{name[1:]}")
    quantize.argtypes = [ctypes.c_int, *(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 3, ctypes.c_void_p]
    quantize.restype = ctypes.c_size_t
    dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def encode(source: Array) -> Array:
        values = bf16_to_f32(source)
        stored = np.empty(values.size * 2, np.uint8)
        quantize(number, values.ctypes.data, stored.ctypes.data, 0, *values.shape, None)
        return stored

    def decoded(source: Array) -> Array:
        if source.shape[1] % 256 and name != "Q8_0":
            return np.full(source.shape, np.nan, np.float32)
        stored, out = encode(source), np.empty(source.shape, np.float32)
        dequantize(stored.ctypes.data, out.ctypes.data, out.size)
        return out

    def work(source: Array) -> None:
        if source.shape[1] % 256 == 0 or name == "Q8_0":
            encode(source)

    return Row(f"llama.cpp {name}", bits), work, decoded


def main() -> None:
    """Measure and print a table (and JSON with --json)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY, help="BF16 checkpoint whose experts are taken")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ggml", type=Path, help="llama.cpp's libggml-base, for rows of its types")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    args = parser.parse_args()
    facts = measured_on()
    cases = [of_codec(encodings.get(name, parameters)) for name, parameters in CASES]
    try:
        import mlx.core as mx
    except ImportError:
        print("MLX is not installed: its rows are left out.\n")
    else:
        mx.set_default_device(mx.cpu)
        facts["mlx"] = version("mlx")
        cases += [of_mlx(mx, 4), of_mlx(mx, 3)]
    if args.ggml is not None:
        types = (("Q8_0", 8, 8.5), ("Q4_K", 12, 4.5), ("Q3_K", 11, 3.4375))
        cases += [of_ggml(args.ggml.resolve(), *each) for each in types]
    weights = sets(args.model)
    for name, matrices in weights.items():
        for row, _, decoded in cases:
            row.errors[name] = relative(matrices, decoded)
        for _ in range(args.rounds):
            for row, work, _ in cases:
                keep_best(row, name, matrices, work)
    print(" ".join(f"{k}={v}" for k, v in facts.items()) + "\n")
    print("| codec | bits a weight | " + " | ".join(weights) + " | MB/s of source, one core |")
    print("|---|---|" + "---|" * (len(weights) + 1))
    for row, _, _ in cases:
        errors = " | ".join("-" if np.isnan(e := row.errors[name]) else f"{e:.5f}" for name in weights)
        print(f"| {row.name} | {row.bits:.2f} | {errors} | {max(row.rates.values()):.0f} |")
    if args.json:
        results = [
            {"codec": row.name, "bits": row.bits, "relative_rms": row.errors, "mb_per_s": row.rates}
            for row, _, _ in cases
        ]
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
