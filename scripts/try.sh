#!/usr/bin/env bash
# The README's first command: set up, convert tiny-moe with both codecs, verify against its source, inspect. No torch.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
"$VENV/bin/pip" install --quiet .
note=$("$VENV/bin/python" -c 'from pagestone.formats import native; print(native.slow_note() or "")')
if [ -n "$note" ]; then
  echo "note: $note" >&2
  export PAGESTONE_ISA=numpy # said once is enough
fi
model=tests/data/tiny-moe
for codec in int8 fp8; do
  echo "== prepare-$codec"
  "$VENV/bin/pagestone" "prepare-$codec" "$model" --output "out/tiny-$codec"
  echo "== verify"
  "$VENV/bin/pagestone" verify "out/tiny-$codec" --source "$model"
done
echo "== inspect"
"$VENV/bin/pagestone" inspect out/tiny-int8
