#!/usr/bin/env bash
# Builds kvkeep inside another project and runs what that project makes of it: a consumer of the headers, and, unless
# --headers is given, an engine in C over the library, which is compiled for it.
#
#   tests/subproject_test.sh add_subdirectory|FetchContent [--headers]
set -euo pipefail

source_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
trap 'exit 130' INT TERM

fail() {
  printf 'subproject test: %s\n' "$*" >&2
  exit 1
}

programs=(inside_header_only)
[[ "${2:-}" == --headers ]] || programs+=(inside_c)
launcher=()
if command -v ccache > /dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
cp -r -- "$source_dir/tests/subproject" "$scratch/project"
cmake -G Ninja -S "$scratch/project" -B "$scratch/build" "-DKVKEEP=$source_dir" "-DHOW=$1" -DKVKEEP_UNITY=ON \
  "${launcher[@]}" > "$scratch/log" 2>&1 || {
  cat -- "$scratch/log"
  fail "it does not configure"
}
cmake --build "$scratch/build" --target same_kernels "${programs[@]}" || fail "it does not build"
for program in "${programs[@]}"; do "$scratch/build/$program" || fail "$program does not run"; done
cmake --install "$scratch/build" --prefix "$scratch/prefix" > /dev/null || fail "it does not install"
[[ ! -e "$scratch/prefix/include/kvkeep" ]] || fail "kvkeep installed itself with it"
echo "subproject test: kvkeep inside another project by $1, with ${programs[*]}"
