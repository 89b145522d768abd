#!/usr/bin/env bash
# Builds and runs the C++ tests with the CMake of the virtual environment given as the first argument.
# Says what did not run. With TGEMM_REQUIRE_CPP_TESTS=1 that is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=$1/bin
build=build/cmake

"$bin/cmake" -S . -B "$build" -DTGEMM_BUILD_TESTS=ON >"$build/configure.log" || {
  cat "$build/configure.log"
  exit 1
}
"$bin/cmake" --build "$build" --parallel "$(nproc)"
if [[ -x $build/tests/cpp/lowering_test ]]; then
  "$bin/ctest" --test-dir "$build" --output-on-failure --no-tests=error --parallel "$(nproc)" --progress
fi
note=$build/tests/cpp/not_built.txt
if [[ -f $note ]]; then
  echo "C++ TESTS NOT RUN: $(<"$note")."
  [[ ${TGEMM_REQUIRE_CPP_TESTS:-} != 1 ]]
fi
