#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cross-compiles the library, the command and the tests for 64-bit Arm, runs them under qemu-user, and replays every
# golden event on both machines: the same slots stay.
#
#   bash tests/aarch64.sh [GoogleTest's filter]
#   KVKEEP_HERE=PROGRAM    the kvkeep of this machine, build/release/bin/kvkeep unless given
#
# Needs g++-aarch64-linux-gnu and qemu-user. The libraries for that machine are loaded as packages of Debian or Ubuntu
# into build/aarch64-root (2 MB), without root and without installing them.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root="$PWD/build/aarch64-root" build=build/aarch64
here="${KVKEEP_HERE:-build/release/bin/kvkeep}"
arm=(qemu-aarch64 -L /usr/aarch64-linux-gnu)

fail() {
  printf 'aarch64: %s\n' "$*" >&2
  exit 1
}
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$program" > /dev/null || fail "no $program; apt-get install g++-aarch64-linux-gnu qemu-user"
done

# apt with lists, cache and machine of its own.
if [[ ! -e "$root/.ready" ]]; then
  apt="$PWD/build/aarch64-apt"
  mkdir -p "$apt"/{lists,cache,packages} "$root"
  : > "$apt/status"
  own=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root)
  own+=(-o "Dir::State::lists=$apt/lists" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache")
  apt-get "${own[@]}" update
  (cd -- "$apt/packages" && apt-get "${own[@]}" download \
    libhwy-dev libhwy1 libgtest-dev libeigen3-dev nlohmann-json3-dev libcli11-dev)
  for package in "$apt"/packages/*.deb; do dpkg -x "$package" "$root"; done
  rm -rf -- "$apt"
  touch "$root/.ready"
fi

cmake -G Ninja -S . -B "$build" -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake "-DKVKEEP_AARCH64_ROOT=$root" \
  -DCMAKE_BUILD_TYPE=Release -DKVKEEP_TORCH=OFF > "$build.log" 2>&1 || {
  cat -- "$build.log"
  fail "it does not configure"
}
programs=(kvkeep_tests kvkeep_contraction_tests kvkeep_c_engine kvkeep_llama_tests)
cmake --build "$build" --target kvkeep_cli kvkeep_slots_kvkeep kvkeep_slots_header_only "${programs[@]}"

"${arm[@]}" "$build/bin/kvkeep_tests" --gtest_brief=1 "--gtest_filter=${1:-*}" || fail "the library's tests fail"
for program in "${programs[@]:1}"; do "${arm[@]}" "$build/bin/$program" > "$build.log" || {
  tail -n 20 -- "$build.log"
  fail "$program fails"
}; done
[[ "$("${arm[@]}" "$build/bin/kvkeep_slots_kvkeep")" == "$("${arm[@]}" "$build/bin/kvkeep_slots_header_only")" ]] ||
  fail "headers alone keep other slots than the library"

[[ -x "$here" ]] || fail "no kvkeep of this machine to compare with; given $here; build it, or set KVKEEP_HERE"
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
replayed=0
for trace in tests/golden/*/*/trace.safetensors; do
  folder="$(dirname -- "$trace")"
  [[ -e "$folder/policy.json" ]] || continue
  with=("$trace" --policy "$folder/policy.json")
  if ! "${arm[@]}" "$build/bin/kvkeep" replay "${with[@]}" --out "$scratch/there" > "$scratch/said" 2>&1; then
    grep -qE "needs the laboratory|a file of torch.save" "$scratch/said" && continue
    "$here" replay "${with[@]}" --out "$scratch/here" > /dev/null 2>&1 && fail "$trace is replayed here alone"
    continue # one that is refused
  fi
  "$here" replay "${with[@]}" --out "$scratch/here" > /dev/null 2>&1 || fail "$trace is not replayed here"
  python3 - "$scratch/here" "$scratch/there" "$folder" << 'PYTHON'
import json, struct, sys

def numbers(path):  # tensors of whole numbers: slots, positions, tokens
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    return {
        name: (t["shape"], data[8 + size + t["data_offsets"][0] : 8 + size + t["data_offsets"][1]])
        for name, t in header.items()
        if name != "__metadata__" and t["dtype"] in ("I32", "I64")
    }

here, there = numbers(sys.argv[1]), numbers(sys.argv[2])
differ = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
if differ or not here:
    sys.exit(f"aarch64: {sys.argv[3]} keeps other slots than here: {', '.join(differ)}")
PYTHON
  replayed=$((replayed + 1))
done
[[ "$replayed" -ge 50 ]] || fail "only $replayed golden events were replayed"
echo "aarch64: tests pass under qemu-user, and $replayed golden events keep the slots that they keep here"
