#!/usr/bin/env python3
"""Make a checkpoint of true size from a published config.json and index, with holes where the weights would be.

For what reads headers and sizes only: every shard has a correct header and a hole for its data, 50 GB take a few MB on
disk and read as zeros. `--fill L:E` writes the weights of expert E of layer L (tests/kits/generated.py makes them).
What multiplies weights needs a checkpoint without holes: scripts/make_true_shape.py, or the generated one itself.

    scripts/make_sparse.py OUTPUT [--source DIR] [--layers N] [--vocab N] [--fill L:E ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[0] = str(TESTS)  # for `kits`; here lies only half of our package
PUBLISHED = TESTS / "data" / "real-checkpoints" / "qwen3.5-25b-reap"


def _pair(text: str) -> tuple[int, int]:
    layer, expert = text.split(":")
    return int(layer), int(expert)


def main() -> None:
    """Parse the command line and make the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", type=Path, default=PUBLISHED, help="directory with config.json and the index")
    parser.add_argument("--layers", type=int, help="keep the first N decoder layers")
    parser.add_argument("--vocab", type=int, help="cut the vocabulary, the largest dense tensors, to N")
    parser.add_argument("--fill", type=_pair, nargs="+", default=[], metavar="LAYER:EXPERT")
    args = parser.parse_args()
    from kits.generated import Part, Tensor, published

    wanted = tuple(f".layers.{layer}.mlp.experts.{expert}." for layer, expert in args.fill)

    def written(part: Part) -> bool:
        return not isinstance(part, Tensor) or any(inside in part.name for inside in wanted)

    published(args.source, layers=args.layers, vocabulary=args.vocab).write(args.output, written)


if __name__ == "__main__":
    main()
