#!/usr/bin/env bash
# The README's second command: set up, then style, types and all tests, on every instruction set of this CPU.
# PAGESTONE_ORACLES=1 adds the libraries our results are compared with. CONTRIBUTING.md has the tiers.
#
#   scripts/check.sh --fast      about a minute: style, types and the quickest tests; sets up only if it must
#   scripts/check.sh [WORDS]     everything; WORDS go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/check_setup.sh
# what is quick and catches most: bytes and their definition, the specification, the command line's promises
FAST=(tests/formats tests/specs tests/test_imports.py tests/test_tiers.py tests/test_terminal.py tests/convert/test_plan.py)
if [ "${1:-}" = --fast ]; then
  shift
  is_set_up || set_up
  style_and_types
  exec "$VENV/bin/pytest" -q -n 2 "${FAST[@]}" "$@"
fi
set_up
style_and_types
# tests/formats compares every kernel with its definition on every instruction set; here the variable itself is held
for isa in $("$VENV/bin/python" -c 'from pagestone.formats import native; print(*native.available())'); do
  echo "== conversion with PAGESTONE_ISA=$isa"
  PAGESTONE_ISA=$isa "$VENV/bin/pytest" -q -n 2 tests/convert/test_pipeline.py -k "definition or workers"
done
echo "== everything"
"$VENV/bin/pytest" -q -n 2 "$@"
