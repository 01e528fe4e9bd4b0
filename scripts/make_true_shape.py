#!/usr/bin/env python3
"""Write a synthetic checkpoint with the shapes of Qwen3.6-35B-A3B: for what takes only files.

It is tests/kits/generated.py as files: hidden 2048, intermediate 512, 256 experts; config, names and shards as
published, weights drawn as that module says, the same for the same options on every machine, with a tokenizer.
`--outliers` makes a few input channels of every expert matrix 32 times larger, as trained models have them.

    scripts/make_true_shape.py OUTPUT [--layers N] [--experts E] [--vocab V] [--form FORM] [--outliers] [--seed S]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent / "tests")  # for `kits`; here lies only half of our package


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096, help="rows of embed_tokens and lm_head (published: 248320)")
    parser.add_argument("--form", choices=["fused", "per-expert", "fp8"], default="fused")
    parser.add_argument("--outliers", action="store_true", help="plant outlier channels")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from kits.generated import GeneratedCheckpoint

    begun = time.monotonic()
    made = GeneratedCheckpoint(
        layers=args.layers, experts=args.experts, vocabulary=args.vocab, form=args.form, outliers=args.outliers,
        seed=args.seed,
    )  # fmt: skip
    total = made.write(args.output)
    seconds = time.monotonic() - begun
    print(f"{args.output}: {total / 1e9:.2f} GB in {seconds:.1f} s ({total / 1e6 / seconds:.0f} MB/s)", file=sys.stderr)


if __name__ == "__main__":
    main()
