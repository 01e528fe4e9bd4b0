#!/usr/bin/env bash
# What takes hours and is run before a release: every family, every published size, every combination of streaming, long
# fuzzing, the kernels under sanitizers.
# Its report, with commit, machine and versions, is to be kept with the release. All steps run, whatever fails; the exit
# code is 1 if one did.
#
#   scripts/check_long.sh [REPORT]      REPORT is out/check-long.md unless given
set -euo pipefail
cd "$(dirname "$0")/.."
REPORT=$(realpath -m "${1:-out/check-long.md}")
mkdir -p "$(dirname "$REPORT")"
export PAGESTONE_ORACLES=1 PAGESTONE_SLOW=1 PAGESTONE_LONG=1
source scripts/check_setup.sh
set_up
failed=0
{
  echo "# Long checks of $(git describe --always --dirty 2>/dev/null || echo 'an unknown commit')"
  echo
  echo "Begun $(date -u +%FT%TZ) on $(uname -sm), $(nproc) cores, instruction sets$("$VENV/bin/python" -c '
from pagestone.formats import native
print("", *native.available()[1:], end="")'), $("$VENV/bin/python" -V)."
  echo
  "$VENV/bin/pip" freeze --exclude-editable 2>/dev/null | sed 's/^/    /'
  echo
  echo "| Step | Seconds | Result | Last line |"
  echo "|---|---|---|---|"
} >"$REPORT"

# step NAME COMMAND...: run it, and write a row of the report.
step() {
  local name=$1 begun=$SECONDS result=passed log
  shift
  log=$(mktemp)
  echo "== $name"
  if ! "$@" 2>&1 | tee "$log"; then
    result=FAILED
    failed=1
  fi
  echo "| $name | $((SECONDS - begun)) | $result | $(tail -n 1 "$log" | tr '|' '/') |" >>"$REPORT"
  rm -f "$log"
}

step "style and types" style_and_types
step "all tests, all families, published sizes" "$VENV/bin/pytest" -q -n 2 --timeout 7200
step "all families, oldest transformers" scripts/check_oldest.sh
step "30,000 damaged files" "$VENV/bin/python" scripts/fuzz.py --cases 30000
step "kernels under sanitizers" env PYTHON="$PWD/$VENV/bin/python" scripts/sanitize.sh
step "every combination of streaming" "$VENV/bin/python" scripts/torture_logits.py
echo
cat "$REPORT"
exit "$failed"
