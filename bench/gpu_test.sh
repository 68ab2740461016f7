#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What bench/gpu.sh must cope with: filters that name nothing, a half-written result, a stage that is stopped or killed,
# a row that fails.
#
#   bench/gpu_test.sh TESTS BENCH    kvkeep_cuda_model_tests and kvkeep_cuda_model_bench
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
tests="$(realpath -- "$1")" bench="$(realpath -- "$2")"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
failures=0

# expect WHAT COMMAND...: WHAT says what must hold.
expect() {
  local what="$1"
  shift
  if "$@" > "$work/said" 2>&1; then
    echo "passed: $what"
  else
    echo "FAILED: $what"
    tail -n 12 "$work/said"
    failures=$((failures + 1))
  fi
}
says() {
  grep -qE -- "$1" "$2" || {
    echo "not said: $1"
    cat "$2"
    return 1
  }
}

# A build folder whose programs do as they are told: stand_in NAME BODY.
mkdir -p "$work/build/bin"
stand_in() { printf '#!/usr/bin/env bash\n%s\n' "$2" > "$work/build/bin/$1" && chmod +x "$work/build/bin/$1"; }
stage() { KVKEEP_GPU_REHEARSAL=1 KVKEEP_GPU_BUILD="$work/build" bash "$here/gpu.sh" "$@"; }
# shellcheck disable=SC2016  # the stand-in expands it
out_of='while [[ $# -gt 0 && $1 != --out ]]; do shift; done; out=${2:-/dev/null}'

# ---- Filters

every_filter_names_a_test() { bash "$here/gpu.sh" filters "$tests"; }
expect "every kernel has a sanitizer test, and every filter names one" every_filter_names_a_test

a_filter_without_a_test_fails() {
  stand_in fewer "\"$tests\" --gtest_list_tests | sed 's/TakesARowThatNeeds/TakesNone/'"
  ! bash "$here/gpu.sh" filters "$work/build/bin/fewer" > "$work/filters" &&
    says 'filter of select names no test: Select.TakesARow' "$work/filters"
}
expect "a filter that names no test fails by its name" a_filter_without_a_test_fails

# ---- Results

a_half_written_result_is_told() {
  cat > "$work/half.jsonl" << 'LINES'
{"machine": "one", "model": true}
{"case": "Ceiling/read", "us": 10, "GBps": 2000}
{"begins": "Select/toy/batch:1/96->64"}
{"case": "Select/toy/batch:1/96->64", "us": 12.5, "bytes": 12500000}
{"case": "Knorm/toy/batch:1/96->64", "error": "the score is off"}
{"begins": "Rkv/toy/batch:1/96->64"}
LINES
  printf '{"case": "Rk' >> "$work/half.jsonl"
  python3 "$here/gpu_report.py" bench "$work/half.jsonl" > "$work/half"
  says 'Select B=1 96->64 .* 12.5 .* 1000 +0.50' "$work/half" && says 'STOPPED in Rkv' "$work/half" &&
    tail -n 1 "$work/half" > "$work/last" && says 'FAILED Knorm.*the score is off' "$work/last"
}
expect "the table reads what is there of a half-written result, failures last" a_half_written_result_is_told

a_long_result_is_cut() {
  seq 400 | sed 's|.*|{"case": "Kernel&/toy/batch:1/96->64", "us": 1, "bytes": 1}|' > "$work/long.jsonl"
  echo '{"case": "Last/toy", "error": "off"}' >> "$work/long.jsonl"
  python3 "$here/gpu_report.py" bench "$work/long.jsonl" > "$work/long"
  [[ $(wc -c < "$work/long") -lt 10000 ]] && says 'FAILED Last/toy: off' "$work/long"
}
expect "what is printed stays below 10,000 characters and keeps the failures" a_long_result_is_cut

# ---- Stages

# shellcheck disable=SC2016
a_case="$out_of"'; echo "{\"case\": \"Select/toy/batch:1/96->64\", \"us\": 12.5, \"bytes\": 1000}" >> $out'
# shellcheck disable=SC2016
half_a_bench="$a_case"'; echo "{\"begins\": \"Rkv/toy\"}" >> $out; sleep 60'
a_stopped_stage_prints_what_it_has() {
  stand_in kvkeep_cuda_model_tests 'sleep 60'
  stand_in kvkeep_cuda_model_bench "$half_a_bench"
  local start=$SECONDS
  KVKEEP_GPU_REHEARSAL=1 KVKEEP_GPU_BUILD="$work/build" \
    timeout 3 bash "$here/gpu.sh" bench "$work/out" > "$work/stopped" || true
  [[ $((SECONDS - start)) -lt 30 && -s "$work/out/bench.jsonl" && -s "$work/out/bench.tar.gz" ]] &&
    says 'Select B=1 96->64 +12.5' "$work/stopped" && says 'STOPPED in Rkv' "$work/stopped" &&
    says 'failed: .*stopped' "$work/stopped"
}
expect "a stage that is stopped prints what it has" a_stopped_stage_prints_what_it_has

a_killed_stage_has_written() {
  rm -rf "$work/out"
  KVKEEP_GPU_REHEARSAL=1 KVKEEP_GPU_BUILD="$work/build" \
    timeout --signal=KILL 3 bash "$here/gpu.sh" bench "$work/out" > "$work/killed" || true
  says 'Select/toy' "$work/out/bench.jsonl"
}
expect "a stage that is killed has written what it had" a_killed_stage_has_written

a_stage_ends_its_steps_in_time() {
  local status=0
  KVKEEP_GPU_SECONDS=21 stage bench "$work/out" > "$work/late" || status=$?
  [[ $status -eq 1 ]] && says 'cases.0 +[0-9]+ s  STOPPED' "$work/late" && says 'Select B=1 96->64 +12.5' "$work/late"
}
expect "a stage ends what takes too long and reports the rest" a_stage_ends_its_steps_in_time

a_failing_test_fails_the_stage() {
  stand_in kvkeep_cuda_model_tests 'cat << LOG
[ RUN      ] Select.One
wanted 1, found 2
[  FAILED  ] Select.One (1 ms)
[ RUN      ] Select.Two
[       OK ] Select.Two (1 ms)
LOG
exit 1'
  local status=0
  stage test "$work/out" > "$work/failing" || status=$?
  [[ $status -eq 1 && -s "$work/out/test.tar.gz" ]] && says 'tests: [0-9]+ passed, [0-9]+ failed' "$work/failing" &&
    says 'FAILED Select.One' "$work/failing" && says 'wanted 1, found 2' "$work/failing"
}
expect "a failing test fails its stage and says why" a_failing_test_fails_the_stage

a_test_that_crashes_takes_no_others_along() {
  # shellcheck disable=SC2016
  stand_in kvkeep_cuda_model_tests 'if [[ $* == *list_tests* ]]; then
  printf "Select.\n  One\n  Two  # of 2\n  Three\n"
  exit
fi
if [[ ${GTEST_SHARD_INDEX:-} == 1 ]]; then echo "[ RUN      ] Select.Two"; kill -SEGV $$; fi
test=One
if [[ $* == *gtest_filter=Select.Three ]]; then test=Three; fi
printf "[ RUN      ] Select.%s\n[       OK ] Select.%s (1 ms)\n" $test $test'
  # shellcheck disable=SC2016
  stand_in ../../gdb/cuda-gdb 'echo "Thread 1 received signal SIGSEGV."; echo "#0  0x12 in ${*: -1}"'
  local status=0
  PATH="$work/gdb:$PATH" stage test "$work/out" > "$work/crashed" 2>&1 || status=$?
  [[ $status -eq 1 ]] && says 'tests: 2 passed, 0 failed' "$work/crashed" &&
    says 'tests.left .* passed' "$work/crashed" && says 'STOPPED in Select.Two' "$work/crashed" &&
    says '#0 .*gtest_filter=Select.Two' "$work/crashed"
}
mkdir -p "$work/gdb"
expect "a test that crashes is named with its stack, and those after it run" a_test_that_crashes_takes_no_others_along

# ---- All in one command

first() { KVKEEP_GPU_REHEARSAL=1 KVKEEP_GPU_BUILD="$work/build" bash "$here/gpu_first.sh" "$work/out"; }

a_whole_run_prints_failures_last() {
  rm -rf "$work/out"
  stand_in kvkeep_cuda_model_bench "$a_case"
  # One test of the second shard fails, with much to say; all names of the filters exist.
  # shellcheck disable=SC2016
  stand_in kvkeep_cuda_model_tests "tests='$tests'"'
if [[ $* == *list_tests* ]]; then exec "$tests" --gtest_list_tests; fi
echo "[ RUN      ] Select.One"
if [[ ${GTEST_SHARD_INDEX:-} == 1 ]]; then
  yes "wanted 1, found 2" | head -n 900
  echo "[  FAILED  ] Select.One (1 ms)"
  exit 1
fi
echo "[       OK ] Select.One (1 ms)"'
  local status=0
  first > "$work/first" || status=$?
  [[ $status -eq 1 && $(wc -c < "$work/first") -lt 10000 ]] || return 1
  says 'tests: 1 passed, 1 failed' "$work/first" && says 'Select B=1 96->64 +12.5' "$work/first" &&
    says 'first: [0-9]+ s; failed: test tests.1' "$work/first" || return 1
  tail -n 12 "$work/first" > "$work/last" && says 'FAILED Select.One' "$work/last" &&
    says 'wanted 1, found 2' "$work/last" && cmp -s "$work/first" "$work/out/summary.txt"
}
expect "the whole run in one command prints every stage, and failures last" a_whole_run_prints_failures_last

a_smoke_that_fails_ends_the_run() {
  stand_in kvkeep_cuda_model_tests 'echo "[ RUN      ] Select.One"; echo "[  FAILED  ] Select.One (1 ms)"; exit 1'
  local status=0
  first > "$work/smoked" || status=$?
  [[ $status -eq 1 ]] && says 'failed: smoke smoke' "$work/smoked" && ! grep -q '^bench:' "$work/smoked"
}
expect "a smoke test that fails ends the run: nothing after it would mean anything" a_smoke_that_fails_ends_the_run

# ---- A kit, and a model that is a folder, on a machine that says it has a GPU

# with_gpu COMMAND...: nvidia-smi is a stand-in, and so is what the kit holds.
mkdir -p "$work/smi"
# shellcheck disable=SC2016
stand_in ../../smi/nvidia-smi '[[ $* == *clocks* ]] && exec sleep 60
echo "A card, 1.0, 80 MiB"'
path_of_gpu="$work/smi:$here/../.venv/bin:$PATH"
with_gpu() {
  PATH="$path_of_gpu" KVKEEP_GPU_KIT="$work/kit" KVKEEP_GPU_BUILD="$work/unpacked" "$@"
}

a_kit_is_unpacked_and_one_of_other_sources_is_told() {
  mkdir -p "$work/kit" "$work/packing/bin" "$work/packing/lib"
  cp "$work/build/bin/kvkeep_cuda_model_bench" "$work/packing/bin/kvkeep_gpu_bench"
  stand_in ../../packing/bin/kvkeep_gpu_tests 'echo "[ RUN      ] Select.One"; echo "[       OK ] Select.One (1 ms)"'
  printf 'abc1234, sm_90-real\nother sources\n' > "$work/packing/COMMIT"
  tar -cJf "$work/kit/kit.tar.xz" -C "$work/packing" .
  with_gpu bash "$here/gpu.sh" smoke "$work/out" > "$work/kitted" &&
    says 'WARNING: the kit is of other sources' "$work/kitted" && says 'kit: abc1234' "$work/kitted" &&
    says 'smoke: 1 passed' "$work/kitted" || return 1
  printf 'abc1234, sm_90-real\n%s\n' "$(bash "$here/gpu_kit.sh" --sources)" > "$work/packing/COMMIT"
  sleep 1
  tar -cJf "$work/kit/kit.tar.xz" -C "$work/packing" .
  with_gpu bash "$here/gpu.sh" smoke "$work/out" > "$work/kitted" && ! grep -q WARNING "$work/kitted"
}
if PATH="$path_of_gpu" python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
  expect "a kit is unpacked, and one that was made of other sources is told" \
    a_kit_is_unpacked_and_one_of_other_sources_is_told
fi

model_stage() {
  KVKEEP_GPU_MODEL="$1" PATH="$work/smi:$PATH" KVKEEP_GPU_KIT="$work/none" KVKEEP_GPU_BUILD="$work/build" \
    bash "$here/gpu.sh" model "$work/out"
}
a_model_may_be_a_folder() {
  stand_in kvkeep 'exit 3'
  local status=0
  model_stage "$here/../examples/model" > "$work/modelled" 2>&1 || status=$?
  [[ $status -eq 1 ]] && says 'model: tables .*FAILED' "$work/modelled" || return 1
  model_stage "$work/nothing" > "$work/modelled" 2>&1 || status=$?
  [[ $status -eq 2 ]] && says 'there is no model; name a GGUF file or a folder' "$work/modelled"
}
expect "the stage model takes the folder of a model as well as a file" a_model_may_be_a_folder

what_was_predicted_has_a_case() {
  local form
  "$bench" --list > "$work/cases"
  for form in '' /pre-rope /log-sum-exps; do
    says "^Event/ams-tova/toy/batch:2/96->64/dense$form\$" "$work/cases" || return 1
  done
  for form in '' PreRope GivenSums; do says "^WindowAttention$form/toy" "$work/cases" || return 1; done
}
expect "events and attention have cases after RoPE, before it, and with log-sum-exps" what_was_predicted_has_a_case

# ---- Benches

a_case_that_fails_fails_the_program() {
  local status=0
  "$bench" --filter 'no such case' > "$work/none" 2>&1 || status=$?
  [[ $status -eq 2 ]] && says 'no case is named like' "$work/none"
}
expect "a filter of the benches that names no case is refused" a_case_that_fails_fails_the_program

[[ $failures -eq 0 ]]
