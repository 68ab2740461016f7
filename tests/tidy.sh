#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Looks for mistakes and for names that break the house's rules, by clang-tidy as .clang-tidy says. See --help.
set -euo pipefail

usage() {
  cat << 'TEXT'
Looks for mistakes and for names that break the house's rules, by clang-tidy as .clang-tidy says, in the headers and
sources of the library and its command. Exit status 1 and the places where there is one.

  bash tests/tidy.sh [BUILD_DIR]    one that was configured [build/release]
TEXT
}

if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  usage
  exit 0
fi
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
build="${1:-build/release}"
[[ -d "$build/generated" ]] || {
  echo "tests/tidy.sh: $build was not configured; see --help" >&2
  exit 2
}
# Each unit reads the headers once. Highway's loops are in headers that these include; what needs LibTorch, CUDA or
# Python is left to its compilers.
folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
for rooms in 'core observe score allot keep layers memory policy state' 'io trace' c cli; do
  for room in $rooms; do git ls-files "src/$room/*.cpp"; done | sed 's/.*/#include "&"/' > "$folder/${rooms%% *}.cpp"
done
printf '%s\0' "$folder"/*.cpp | xargs -0 -n 1 -P 2 bash -c '
  clang-tidy --quiet --config-file=.clang-tidy --warnings-as-errors="*" "$1" -- -std=c++20 \
    -I. -Iinclude -Isrc/io -Isrc/policy -Isrc/c -Isrc/cli "-I$0/generated" -isystem /usr/include/eigen3 \
    2> /dev/null' "$build"
