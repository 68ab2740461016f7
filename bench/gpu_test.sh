#!/usr/bin/env bash
# What bench/gpu.sh must cope with: filters that name nothing, a half-written result, a stage that is stopped or killed, a row that fails.
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
  if "$@" > "$work/said" 2>&1; then echo "passed: $what"; else
    echo "FAILED: $what"
    tail -n 12 "$work/said"
    failures=$((failures + 1))
  fi
}
says() { grep -qE -- "$1" "$2" || { echo "not said: $1"; cat "$2"; return 1; }; }

# A build folder whose programs do as they are told: stand_in NAME BODY.
mkdir -p "$work/build/bin"
stand_in() { printf '#!/usr/bin/env bash\n%s\n' "$2" > "$work/build/bin/$1" && chmod +x "$work/build/bin/$1"; }
stage() { KVKEEP_GPU_REHEARSAL=1 KVKEEP_GPU_BUILD="$work/build" bash "$here/gpu.sh" "$@"; }
# shellcheck disable=SC2016  # the stand-in expands it
out_of='while [[ $1 != --out ]]; do shift; done; out=$2'

# ---- Filters

every_filter_names_a_test() { bash "$here/gpu.sh" filters "$tests"; }
expect "every kernel has a sanitizer test, and every filter names one" every_filter_names_a_test

a_filter_without_a_test_fails() {
  stand_in fewer "\"$tests\" --gtest_list_tests | sed 's/TakesARowThatNeeds/TakesNone/'"
  ! bash "$here/gpu.sh" filters "$work/build/bin/fewer" > "$work/filters" && says 'filter of select names no test: Select.TakesARow' "$work/filters"
}
expect "a filter that names no test fails by its name" a_filter_without_a_test_fails

# ---- Results

a_half_written_result_is_told() {
  printf '%s\n' '{"machine": "one", "model": true}' '{"case": "Ceiling/read", "us": 10, "GBps": 2000}' '{"begins": "Select/toy/batch:1/96->64"}' \
    '{"case": "Select/toy/batch:1/96->64", "us": 12.5, "bytes": 12500000}' '{"case": "Knorm/toy/batch:1/96->64", "error": "the score is off"}' '{"begins": "Rkv/toy/batch:1/96->64"}' > "$work/half.jsonl"
  printf '{"case": "Rk' >> "$work/half.jsonl"
  python3 "$here/gpu_report.py" bench "$work/half.jsonl" > "$work/half"
  says 'Select B=1 96->64 .* 12.5 .* 1000 +0.50' "$work/half" && says 'STOPPED in Rkv' "$work/half" && tail -n 1 "$work/half" > "$work/last" && says 'FAILED Knorm.*the score is off' "$work/last"
}
expect "the table reads what is there of a half-written result, failures last" a_half_written_result_is_told

a_long_result_is_cut() {
  for i in $(seq 400); do echo "{\"case\": \"Kernel$i/toy/batch:1/96->64\", \"us\": 1, \"bytes\": 1}"; done > "$work/long.jsonl"
  echo '{"case": "Last/toy", "error": "off"}' >> "$work/long.jsonl"
  python3 "$here/gpu_report.py" bench "$work/long.jsonl" > "$work/long"
  [[ $(wc -c < "$work/long") -lt 10000 ]] && says 'FAILED Last/toy: off' "$work/long"
}
expect "what is printed stays below 10,000 characters and keeps the failures" a_long_result_is_cut

# ---- Stages

# shellcheck disable=SC2016
half_a_bench="$out_of"'; echo "{\"case\": \"Select/toy/batch:1/96->64\", \"us\": 12.5, \"bytes\": 1000}" >> $out; echo "{\"begins\": \"Rkv/toy\"}" >> $out; sleep 60'
a_stopped_stage_prints_what_it_has() {
  stand_in kvkeep_cuda_model_tests 'sleep 60'
  stand_in kvkeep_cuda_model_bench "$half_a_bench"
  local start=$SECONDS
  KVKEEP_GPU_REHEARSAL=1 KVKEEP_GPU_BUILD="$work/build" timeout 3 bash "$here/gpu.sh" bench "$work/out" > "$work/stopped" || true
  [[ $((SECONDS - start)) -lt 30 && -s "$work/out/bench.jsonl" && -s "$work/out/bench.tar.gz" ]] && says 'Select B=1 96->64 +12.5' "$work/stopped" && says 'STOPPED in Rkv' "$work/stopped" && says 'failed: .*stopped' "$work/stopped"
}
expect "a stage that is stopped prints what it has" a_stopped_stage_prints_what_it_has

a_killed_stage_has_written() {
  rm -rf "$work/out"
  KVKEEP_GPU_REHEARSAL=1 KVKEEP_GPU_BUILD="$work/build" timeout --signal=KILL 3 bash "$here/gpu.sh" bench "$work/out" > "$work/killed" || true
  says 'Select/toy' "$work/out/bench.jsonl"
}
expect "a stage that is killed has written what it had" a_killed_stage_has_written

a_stage_ends_its_steps_in_time() {
  local status=0
  KVKEEP_GPU_SECONDS=21 stage bench "$work/out" > "$work/late" || status=$?
  [[ $status -eq 1 ]] && says 'cases +2[0-9] s  STOPPED' "$work/late" && says 'Select B=1 96->64 +12.5' "$work/late"
}
expect "a stage ends what takes too long and reports the rest" a_stage_ends_its_steps_in_time

a_failing_test_fails_the_stage() {
  stand_in kvkeep_cuda_model_tests 'printf "[ RUN      ] Select.One\nwanted 1, found 2\n[  FAILED  ] Select.One (1 ms)\n[ RUN      ] Select.Two\n[       OK ] Select.Two (1 ms)\n"; exit 1'
  local status=0
  stage test "$work/out" > "$work/failing" || status=$?
  [[ $status -eq 1 && -s "$work/out/test.tar.gz" ]] && says 'tests: 1 passed, 1 failed' "$work/failing" && says 'FAILED Select.One' "$work/failing" && says 'wanted 1, found 2' "$work/failing"
}
expect "a failing test fails its stage and says why" a_failing_test_fails_the_stage

a_case_that_fails_fails_the_program() {
  local status=0
  "$bench" --filter 'no such case' > "$work/none" 2>&1 || status=$?
  [[ $status -eq 2 ]] && says 'no case is named like' "$work/none"
}
expect "a filter of the benches that names no case is refused" a_case_that_fails_fails_the_program

[[ $failures -eq 0 ]]
