#!/usr/bin/env bash
# The README's second command: set up, then style, types and all tests, on every instruction set of this CPU.
# PAGESTONE_ORACLES=1 also installs the libraries our results are compared with (torch, transformers, MLX,
# ml_dtypes, compressed-tensors) and turns a test skipped for want of one into a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
extras=test
if [ -n "${PAGESTONE_ORACLES:-}" ]; then
  "$VENV/bin/pip" install --quiet -c constraints.txt torch
  extras=test,oracles
fi
# The build's own tools come first, so that the kernels are compiled once for this and for the packaging test.
"$VENV/bin/pip" install --quiet -c constraints.txt scikit-build-core nanobind cmake ninja
PATH="$PWD/$VENV/bin:$PATH" "$VENV/bin/pip" install --quiet --no-build-isolation -c constraints.txt -e ".[$extras]"
"$VENV/bin/python" -c '
from pagestone.formats import native
assert native.built(), "the C++ kernels were not built: is there a C++ compiler?"'
"$VENV/bin/python" scripts/make_import_tree.py
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check --quiet .
"$VENV/bin/mypy"
# tests/formats compares every kernel with its definition on every instruction set; here the variable itself is held
for isa in $("$VENV/bin/python" -c 'from pagestone.formats import native; print(*native.available())'); do
  echo "== conversion with PAGESTONE_ISA=$isa"
  PAGESTONE_ISA=$isa "$VENV/bin/pytest" -q -n 2 tests/convert/test_pipeline.py -k "definition or workers"
done
echo "== everything"
"$VENV/bin/pytest" -q -n 2 "$@"
