# Sourced by check.sh and check_long.sh: install pagestone and what the tests need into .venv.
# PAGESTONE_ORACLES=1 also installs the libraries our results are compared with (torch, transformers, MLX, ml_dtypes,
# compressed-tensors) and turns a test skipped for want of one into a failure.
source scripts/venv.sh
SET_UP="$VENV/.pagestone-set-up"

set_up() {
  local extras=test
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
  touch "$SET_UP"
}

# Whether nothing that the installation is made of has changed since.
is_set_up() {
  [ -e "$SET_UP" ] && [ -z "$(find pyproject.toml constraints.txt formats/kernels -newer "$SET_UP" -print -quit)" ]
}

# Chained, because bash forgets `set -e` within a function whose result is asked for.
style_and_types() {
  "$VENV/bin/python" scripts/make_import_tree.py &&
    "$VENV/bin/ruff" check . &&
    "$VENV/bin/ruff" format --check --quiet . &&
    "$VENV/bin/mypy"
}
