#!/usr/bin/env bash
# The tests that load transformers, all families, with the oldest release that pyproject.toml allows; every other check
# runs with the newest. Needs what check.sh with PAGESTONE_ORACLES=1 sets up. The release lies in a folder of its own,
# with what it depends on, before what is installed.
#
#   scripts/check_oldest.sh [WORDS]     WORDS go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
OLDEST=build/oldest
others=$(mktemp)
trap 'rm -f "$others"' EXIT
grep -v '^\(transformers\|tokenizers\|huggingface-hub\)=' constraints.txt >"$others"
rm -rf "$OLDEST"
"$VENV/bin/pip" install --quiet --target "$OLDEST" -c "$others" "transformers==5.13.*"
export PAGESTONE_ORACLES=1 PAGESTONE_LONG=1
PYTHONPATH="$OLDEST${PYTHONPATH:+:$PYTHONPATH}" "$VENV/bin/pytest" -q \
  tests/reader/test_host.py tests/reader/test_experts.py tests/reader/test_experts_guard.py tests/reader/test_text.py \
  tests/reader/test_linears.py tests/reader/test_linears_guard.py tests/validate/test_logits_dense.py \
  tests/reader/test_decoding.py tests/reader/test_run.py tests/reader/test_model_hosts.py tests/reader/test_pieces.py \
  tests/validate/test_logits.py tests/oracles/test_transformers.py tests/oracles/test_transformers_families.py "$@"
