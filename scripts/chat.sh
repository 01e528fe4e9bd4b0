#!/usr/bin/env bash
# The README's third command: talk to tiny-moe from its int8 container, experts read from disk as they are needed.
# Needs torch in .venv: install it first, for a CPU with the install selector on PyTorch's own site.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
  echo "torch is not in $VENV. Install it there first: PyTorch's own install selector gives the command for your" >&2
  echo "machine (choose CPU if you have no GPU; the plain package brings gigabytes of CUDA). Then run $0 again." >&2
  exit 2
fi
"$VENV/bin/python" -c 'import pagestone, transformers' 2>/dev/null || "$VENV/bin/pip" install --quiet ".[inference]"
[ -f out/tiny-int8/manifest.json ] || "$VENV/bin/pagestone" prepare-int8 tests/data/tiny-moe --output out/tiny-int8
exec "$VENV/bin/pagestone" chat out/tiny-int8 --budget 2MiB "$@"
