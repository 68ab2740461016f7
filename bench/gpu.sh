#!/usr/bin/env bash
# Everything that needs a GPU, in one go of at most nine minutes and without a network: builds the kernels for the chip that is here, runs every GPU test, memcheck and racecheck over a small
# part of them, then all GPU benches, and leaves gpu.json and gpu.md.
#
#   bash bench/gpu.sh [FOLDER]    results go to FOLDER, build/gpu-results unless given
#
# Needs nvcc, CMake 3.25, Ninja and LibTorch. The other libraries come from the system or from .deps/ (bench/gpu_deps.sh).
#   KVKEEP_GPU_ARCH     chips to compile for, by default the one that is here
#   KVKEEP_GPU_FILTER   of the benches, a regular expression
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
results="${1:-build/gpu-results}"
mkdir -p -- "$results"
results="$(realpath -- "$results")"
build=build/gpu
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
failed=()

# step NAME SECONDS COMMAND...: its output goes to a file of its own; a failure is remembered.
step() {
  local name="$1" limit="$2" start=$SECONDS status=0
  shift 2
  timeout "$limit" "$@" > "$results/$name.log" 2>&1 || status=$?
  printf '%-12s %4d s  %s\n' "$name" $((SECONDS - start)) "$([[ $status -eq 0 ]] && echo passed || echo "FAILED ($status), see $name.log")"
  if [[ $status -ne 0 ]]; then
    failed+=("$name")
    tail -n 25 "$results/$name.log"
  fi
}

command -v nvcc > /dev/null || { echo "bench/gpu.sh: there is no nvcc on PATH nor in CUDA_HOME" >&2; exit 2; }
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$results/gpu.txt" || { echo "bench/gpu.sh: there is no GPU here" >&2; exit 2; }
arch="${KVKEEP_GPU_ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)-real}"

prefix=()
if [[ -d .deps/usr ]]; then
  prefix=("-DCMAKE_PREFIX_PATH=$PWD/.deps/usr")
  export LD_LIBRARY_PATH="$PWD/.deps/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
step configure 60 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVKEEP_CUDA=ON -DKVKEEP_BUILD_CLI=OFF -DKVKEEP_BUILD_EXAMPLES=OFF "-DCMAKE_CUDA_ARCHITECTURES=$arch" "${prefix[@]}"
step build 300 cmake --build "$build" --target kvkeep_gpu_tests kvkeep_gpu_bench
if [[ ${#failed[@]} -eq 0 ]]; then
  step tests 90 "$build/bin/kvkeep_gpu_tests"
  step memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 1 "$build/bin/kvkeep_gpu_tests" --gtest_filter='*Small*:Compact.Carries*:Select.Takes*:DeviceLine.TakesTokensBack:DeviceLine.TakesGaps*'
  step racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 1 "$build/bin/kvkeep_gpu_tests" --gtest_filter='*Small*:Compact.Carries*:Select.Takes*:DeviceLine.TakesTokensBack:DeviceLine.TakesGaps*'
  step bench 240 "$build/bin/kvkeep_gpu_bench" "--benchmark_filter=${KVKEEP_GPU_FILTER:-.}" "--benchmark_out=$results/gpu.json" --benchmark_out_format=json
fi

if [[ -s "$results/gpu.json" ]]; then
  python3 - "$results/gpu.json" > "$results/gpu.md" << 'PYTHON'
import json, sys
run = json.load(open(sys.argv[1]))
context = run["context"]
print(f"{context['date'][:10]}, {context.get('gpu', 'GPU')}, its own copy {float(context['copy_GBps']):.0f} GB/s read and written\n")
more = ["graph_us", "host_us", "torch_us", "floor_us"]  # of whole events
print("| bench | us | GB/s | share of the copy | replayed graph, us | host, us | LibTorch's topk, sort, gather, us | floor, us |\n|---|---:|---:|---:|---:|---:|---:|---:|")
for row in run["benchmarks"]:
    name = row["name"].split("/iterations")[0]
    if "us" not in row:
        print(f"| `{name}` | {row.get('error_message', '')} | | | | | | |")
        continue
    print(f"| `{name}` | {row['us']:.1f} | {row['GBps']:.0f} | {row['share']:.2f} | " + " | ".join(f"{row[key]:.1f}" if key in row else "" for key in more) + " |")
PYTHON
  cat "$results/gpu.md"
fi
if [[ ${#failed[@]} -gt 0 ]]; then echo "failed: ${failed[*]}" >&2; fi
[[ ${#failed[@]} -eq 0 ]]
