#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds kvkeep and runs every test. See --help.
set -euo pipefail

usage() {
  cat << 'TEXT'
Builds kvkeep and runs every test; ends with ctest's summary, exit status 0 when all passed.

  bash tests/run.sh                    optimized build in build/release, every test
  bash tests/run.sh --fast             leaves out `install` and the tests labelled `slow`: more than half of the time
  bash tests/run.sh --sanitize         address and undefined-behaviour sanitizers, by Clang, in build/sanitize
  bash tests/run.sh --build-dir DIR    builds in DIR
  bash tests/run.sh -- -R Quotas       what follows -- goes to ctest: here, the suites whose name contains Quotas

What is missing on a Debian or Ubuntu machine is installed first, and named before it is. Torch_DIR chooses a LibTorch
(2.7 or newer).
TEXT
}

preset=release
folder=""
ctest_options=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --fast) ctest_options+=(--label-exclude '^(slow|install)$') ;;
    --sanitize) preset=sanitize ;;
    --build-dir)
      [[ $# -ge 2 ]] || {
        echo "tests/run.sh: --build-dir: a folder is missing; see --help" >&2
        exit 2
      }
      folder="$(realpath -m -- "$2")"
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    --)
      shift
      ctest_options+=("$@")
      break
      ;;
    *)
      echo "tests/run.sh: unknown option; given '$1'; allowed --fast --sanitize --build-dir DIR --help" >&2
      exit 2
      ;;
  esac
  shift
done

# shellcheck source=cmake/bootstrap.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"
[[ -n "$folder" ]] || folder="$kvkeep_root/build/$preset"

# Tests run beside each other: threads that spin while they wait would take the cores from those they wait for.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
# Two threads in each are enough to run what runs in parallel, however many cores there are.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"

needs=()
if [[ $preset == sanitize ]]; then needs=(clang); fi
kvkeep_bootstrap "${needs[@]}"
kvkeep_build "$preset" "$folder"
ctest --test-dir "$folder" --output-on-failure --no-tests=error --parallel "$(kvkeep_jobs)" "${ctest_options[@]}"
