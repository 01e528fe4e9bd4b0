#!/usr/bin/env bash
# The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: builds them apart and runs tests/formats with them.
# PYTHON names the interpreter (default: that of .venv); further words go to pytest. About five minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  source scripts/venv.sh
  PYTHON="$PWD/$VENV/bin/python"
fi
CXX=${CXX:-g++}
BUILD=$PWD/build/sanitize
FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
PATH="$(dirname "$PYTHON"):$PATH"
cmake -S formats/kernels -B "$BUILD/kernels" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$CXX" \
  -DCMAKE_CXX_FLAGS="$FLAGS" -DCMAKE_SHARED_LINKER_FLAGS="$FLAGS" -DCMAKE_MODULE_LINKER_FLAGS="$FLAGS" \
  -DPython_EXECUTABLE="$PYTHON" -Dnanobind_DIR="$("$PYTHON" -m nanobind --cmake_dir)" >/dev/null
cmake --build "$BUILD/kernels" --parallel 2
# a package of links to the sources, with these kernels in the place of the ordinary ones
rm -rf "$BUILD/import"
mkdir -p "$BUILD/import"
cp -rsL "$PWD/scripts/pagestone" "$BUILD/import/pagestone"
for room in convert formats reader validate; do cp -rsL "$PWD/$room" "$BUILD/import/pagestone/$room"; done
rm -f "$BUILD"/import/pagestone/formats/_kernels*.so
cp "$BUILD"/kernels/_kernels*.so "$BUILD/import/pagestone/formats/"
# The runtime must come before Python, and libstdc++ with it: exceptions are intercepted. Python itself never frees all.
export LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libubsan.so) $("$CXX" -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONMALLOC=malloc OMP_NUM_THREADS=1 PYTHONPATH=$BUILD/import
"$PYTHON" -c '
import pathlib
from pagestone.formats import native
import pagestone.formats._kernels as kernels
assert "sanitize" in kernels.__file__, kernels.__file__
assert "libasan" in pathlib.Path("/proc/self/maps").read_text(), "the sanitizer is not loaded"
print("sanitized:", *native.available())'
"$PYTHON" -m pytest -q -p no:cacheprovider tests/formats "$@"
