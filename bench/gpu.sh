#!/usr/bin/env bash
# Everything that needs a GPU, in stages that each end within eight minutes on 16 cores, without a network.
#
#   bash bench/gpu.sh build OUT      compiles tests and benches for this machine's chip, in build/gpu
#   bash bench/gpu.sh test OUT       every GPU test once, those of compaction, selection, R-KV and AMS 20 times
#   bash bench/gpu.sh sanitize OUT   memcheck, racecheck, synccheck, initcheck over one small case of every kernel
#   bash bench/gpu.sh bench OUT      ceilings of this machine, whole events, kernels
#   bash bench/gpu.sh profile OUT    what ncu says of the kernels that decide
#   bash bench/gpu.sh model OUT      a pretrained model: slots and answers beside the CPU's, tokens/s at batch 1, 8, 32
#   bash bench/gpu.sh all OUT        all of them
#   bash bench/gpu.sh filters TESTS  fails if a kernel has no sanitizer test, or its filter matches none in TESTS
#
# Results go to OUT (build/gpu-results unless given) as they come: OUT/STAGE/*.log, and from the benches OUT/bench.jsonl,
# a line per case. A stage that is stopped prints what it has; one that is killed has written it. At the end
# OUT/STAGE.tar.gz holds the logs. The output stays below 10,000 characters, failures last.
#
# Needs nvcc, CMake 3.25, Ninja and LibTorch. The other libraries come from the system or from .deps/
# (bench/gpu_deps.sh). To carry: the tree is 34 MB, .deps 18 MB.
#   KVKEEP_GPU_ARCH       chips to compile for, by default this machine's
#   KVKEEP_GPU_FILTER     benches to run, a regular expression
#   KVKEEP_GPU_SECONDS    limit of a stage, 450 unless given
#   KVKEEP_GPU_BUILD      the build folder, build/gpu unless given
#   KVKEEP_GPU_CMAKE      options for CMake
#   KVKEEP_GPU_MODEL      SmolLM2-135M-Instruct or another GGUF file, for the stage model
#   KVKEEP_GPU_TEXT       prose for it, .cache/prose/handbook.txt unless given
#   KVKEEP_GPU_REHEARSAL  1: the execution model replaces the GPU, at small sizes; also used if there is no nvidia-smi
set -euo pipefail

# One small case of every kernel, by the stem in cuda/. Matrix units are in those of window_attention_matrix, expected, critical and rkv.
declare -A small=(
  [adaptive_heads]='AdaptiveHeadsKernel.TakesHeads*'
  [chunks]='ChunksKernel.TakesRowsThatNeedTheLargestBlock'
  [compact]='Compact.CarriesTheColumnsWithTheirSlots:Compact.MovesAsMany*'
  [critical]='CriticalKernel.RanksASlotLastWhoseValueIsNoNumber'
  [expected]='ExpectedKernel.LeavesRowsAlone*'
  [expected_moments]='ExpectedKernel.FactorisesTheCovarianceOfMoreQueriesThanComponents'
  [factorise]='Factorise.ChoosesRowsAsTheyAre*'
  [fetch]='Fetch.TakesMorePieces*'
  [fold]='FoldKernel.PutsNewSpans*:FoldKernel.StoresTheSame*'
  [given]='PushGiven.PutsEveryScoreAtItsPlace'
  [h2o]='H2OKernel.BringsRowsUpToDate*'
  [keydiff]='KeyDiffKernel.LeavesRowsAlone*'
  [knorm]='KnormKernel.LeavesRowsAlone*'
  [last_query]='LastQueryKernel.GivesNaN*'
  [layer_selector]='LayerSelectorKernel.DecidesAsTheCpu*'
  [mass_segmented]='MassSegmentedKernel.TakesRows*'
  [memory]='DeviceLine.TakesTokensBack:DeviceLine.TakesGaps*:PendingEvents.ComeOfPlans*'
  [memory_attention]='MemoryMerge.IsAllThereIs*:MemoryRoute.WalksMoreSpans*:MemoryFetch.BringsOpenedSpans*'
  [narrow]='Narrow.GivesTheTokensOfALong*:GatherRows.TakeMorePrompts*'
  [prepare]='Prepare.WritesTheNewestPositions*'
  [prompt_scores]='PromptScoresKernel.ReadPages'
  [query_ring]='PushQueries.PutEveryTokenAtItsPlace'
  [query_statistics]='QueryStatisticsKernel.TakesTheNewestTokensBack'
  [ranks]='Ranks.AreTheCpusInTheLargestBlock'
  [rkv]='RkvKernel.LeavesRowsAlone*'
  [row_bodies]='RowBodies.LeaveRowsAlone*'
  [rpc]='RpcKernel.LeavesRowsAlone*'
  [select]='Select.TakesARow*'
  [share]='ShareKernel.GivesRowsThatShareTheScoresOfTheCpu'
  [snapkv]='SnapKVKernel.LeavesRowsAlone*'
  [threshold]='ThresholdKernel.TakesARow*'
  [tova]='TovaKernel.LeavesRowsAlone*'
  [triattention]='TriAttentionKernel.LeavesRowsAlone*'
  [window_attention]='WindowAttentionKernel.GivesTheNewestAlone:WindowAttentionKernel.LeavesRowsAlone*'
  [window_attention_matrix]='WindowAttentionKernel.LeavesRowsAlone*:WindowAttentionKernel.ReadsTheKeysOnce*'
)
readonly sanitizers=(memcheck racecheck synccheck initcheck)
readonly repeated='Compact.*:Select.*:RkvKernel.*:MassSegmentedKernel.*' # a race may need many runs to show

# Kernels that ncu looks at, and the case that launches them.
readonly profiled=(
  'matrix_kernel WindowAttention/llama8b/batch:32'
  'plain_kernel NewestAttention/llama8b/batch:32'
  'unit_kernel Expected/llama8b/batch:8'
  'mass_segmented MassSegmented/llama8b/batch:32'
  'compact_kernel Compact/llama8b/batch:32'
  'cosine_kernel KeyDiff/llama8b/batch:32'
)

usage() { sed -n '2,27s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

# ---- What every stage does ---------------------------------------------------------------------------------------------------------------------

failed=()
children=()

# step NAME SECONDS COMMAND...: its output goes to a file of its own, line by line; a failure is remembered.
step() {
  local name="$1" limit="$2" start=$SECONDS status=0 verdict=passed
  shift 2
  timeout --kill-after=10 "$limit" "$@" > "$folder/$name.log" 2>&1 &
  children=($!)
  wait "${children[0]}" || status=$?
  children=()
  if [[ $status -eq 124 || $status -eq 137 ]]; then verdict="STOPPED after $limit s"; elif [[ $status -ne 0 ]]; then verdict="FAILED ($status)"; fi
  printf '%-16s %4d s  %s\n' "$name" $((SECONDS - start)) "$verdict"
  [[ $status -eq 0 ]] || failed+=("$name")
}

# left: seconds that this stage has left.
left() { echo $((seconds - SECONDS > 20 ? seconds - SECONDS : 20)); }

# say_tests NAME...: how many tests passed in each GoogleTest log, and the output of those that failed.
say_tests() {
  local name logs=()
  for name in "$@"; do if [[ -s "$folder/$name.log" ]]; then logs+=("$folder/$name.log"); fi; done
  if [[ ${#logs[@]} -gt 0 ]]; then python3 bench/gpu_report.py tests "${logs[@]}"; fi
}

# However a stage ends, its results so far are printed and packed.
finish() {
  local status=$?
  trap - EXIT
  trap '' TERM INT HUP
  set +e
  for child in "${children[@]}"; do kill "$child" 2> /dev/null; done
  wait
  "report_$stage"
  if tar -czf "$out/$stage.tar.gz" -C "$out" "$stage"; then rm -rf -- "$folder"; fi
  if [[ ${#failed[@]} -gt 0 ]]; then
    printf '%s: failed: %s\n' "$stage" "${failed[*]}"
    exit 1
  fi
  exit "$status"
}

# ---- Stages ------------------------------------------------------------------------------------------------------------------------------------

stage_build() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DKVKEEP_BUILD_EXAMPLES=OFF)
  if [[ $rehearsal == 1 ]]; then options+=(-DKVKEEP_CUDA=OFF)
  else
    command -v nvcc > /dev/null || { echo "gpu.sh: there is no nvcc on PATH nor in CUDA_HOME" >&2; exit 2; }
    local arch="${KVKEEP_GPU_ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)-real}"
    options+=(-DKVKEEP_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch")
  fi
  if [[ -d .deps/usr ]]; then options+=("-DCMAKE_PREFIX_PATH=$PWD/.deps/usr"); fi
  # shellcheck disable=SC2206  # words are intended
  options+=(${KVKEEP_GPU_CMAKE:-})
  step configure 60 cmake -S . -B "$build" -G Ninja "${options[@]}"
  if [[ ${#failed[@]} -eq 0 ]]; then step compile "$(left)" cmake --build "$build" --parallel "${KVKEEP_GPU_JOBS:-$(nproc)}" --target "$(basename "$tests")" "$(basename "$bench")" kvkeep_cli; fi
}

report_build() {
  local log
  for log in configure compile; do
    if [[ " ${failed[*]} " == *" $log "* ]]; then grep -E -A 4 'error|Error|FAILED' "$folder/$log.log" | cut -c 1-300 | head -n 40 || tail -n 20 "$folder/$log.log"; fi
  done
  if [[ ${#failed[@]} -eq 0 ]]; then du -m "$tests" "$bench" | awk '{ print $2 ": " $1 " MB" }'; else tail -n 1 "$folder"/*.log | cut -c 1-200; fi
}

stage_test() {
  step tests $((seconds * 6 / 10)) "$tests" --gtest_color=no
  step repeated "$(left)" "$tests" --gtest_color=no --gtest_repeat="$([[ $rehearsal == 1 ]] && echo 2 || echo 20)" "--gtest_filter=$repeated"
}

report_test() { say_tests tests repeated; }

stage_sanitize() {
  local tool filter limit status
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  check_filters "$tests"
  filter="$(IFS=:; echo "${small[*]}")"
  if [[ $rehearsal == 1 ]] || ! command -v compute-sanitizer > /dev/null; then
    echo "sanitize: there is no compute-sanitizer here (or this is a rehearsal): the tests run without it"
    step plain "$(left)" "$tests" --gtest_color=no "--gtest_filter=$filter"
    return
  fi
  # All at once: most of their time goes to the host's part.
  limit="$(left)"
  for tool in "${sanitizers[@]}"; do
    timeout --kill-after=10 "$limit" compute-sanitizer --tool "$tool" --error-exitcode 97 "$tests" --gtest_color=no "--gtest_filter=$filter" > "$folder/$tool.log" 2>&1 &
    children+=($!)
  done
  for i in "${!sanitizers[@]}"; do
    tool="${sanitizers[$i]}" status=0
    wait "${children[$i]}" || status=$?
    [[ $status -eq 0 ]] || failed+=("$tool")
    printf '%-16s %4d s  %s\n' "$tool" "$SECONDS" "$([[ $status -eq 0 ]] && echo passed || echo "FAILED ($status)")"
  done
  children=()
}

report_sanitize() {
  local tool
  say_tests plain "${sanitizers[@]}"
  for tool in "${sanitizers[@]}"; do
    if [[ ! -s "$folder/$tool.log" ]]; then continue; fi
    echo "$tool: $(grep -h 'SUMMARY' "$folder/$tool.log" | tail -n 1)"
    grep -h -A 4 '^========= \(Invalid\|Error\|Race\|Barrier\|Uninit\|Program hit\|Warning\)' "$folder/$tool.log" | cut -c 1-160 | head -n 10
  done
}

stage_bench() {
  rm -f -- "$out/bench.jsonl"
  local watch=""
  if [[ $rehearsal != 1 ]]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader > "$folder/gpu.txt"
    timeout "$seconds" nvidia-smi --query-gpu=clocks.sm,temperature.gpu,power.draw --format=csv,noheader,nounits --loop=2 > "$folder/clock.csv" 2>&1 &
    watch=$!
  fi
  # No case begins after four fifths of the time; the rest is for those that are still running.
  step cases "$(left)" "$bench" --seconds $((seconds * 8 / 10)) --filter "${KVKEEP_GPU_FILTER:-}" --out "$out/bench.jsonl"
  if [[ -n $watch ]]; then kill "$watch" 2> /dev/null || true; fi
}

report_bench() { python3 bench/gpu_report.py bench "$out/bench.jsonl" "$folder"; }

stage_profile() {
  local tool=(ncu --clock-control none --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy --csv --page details)
  local entry kernel filter number=0
  if [[ $rehearsal == 1 ]] || ! command -v ncu > /dev/null; then
    echo "profile: there is no ncu here (or this is a rehearsal): the cases run without it"
    tool=()
  fi
  for entry in "${profiled[@]}"; do
    read -r kernel filter <<< "$entry"
    [[ $rehearsal == 1 ]] && filter="${filter%%/*}/"
    step "$((++number))-$kernel" $((seconds / ${#profiled[@]})) ${tool[@]+"${tool[@]}" -k "regex:$kernel" -c 2} "$bench" --once --filter "^$filter"
  done
}

report_profile() {
  if grep -qs '^"ID"\|==PROF==\|==ERROR==' "$folder"/*.log; then python3 bench/gpu_report.py profile "$folder"; else cat "$folder"/*.log | grep '=' | cut -c 1-150; fi
}

stage_model() {
  local words=(--kvkeep "$build/bin/kvkeep" --out "$folder/outputs")
  if [[ $rehearsal == 1 ]]; then words+=(--model examples/model --device cpu)
  else
    [[ -f "${KVKEEP_GPU_MODEL:-}" ]] || { echo "gpu.sh: there is no model; name a GGUF file with KVKEEP_GPU_MODEL" >&2; exit 2; }
    words+=(--model "$KVKEEP_GPU_MODEL" --text "${KVKEEP_GPU_TEXT:-.cache/prose/handbook.txt}")
  fi
  step tables "$(left)" python3 bench/gpu_model.py "${words[@]}"
}

report_model() { head -c 9000 "$folder/tables.log"; }

# names_one PATTERN NAME...
names_one() {
  local pattern="$1" name
  shift
  # shellcheck disable=SC2053  # a pattern is intended
  for name in "$@"; do if [[ $name == $pattern ]]; then return 0; fi; done
  return 1
}

# check_filters TESTS: every kernel has a small test, and every filter names one that exists.
check_filters() {
  local names source stem filter pattern bad=0
  mapfile -t names < <("$1" --gtest_list_tests | sed 's/ *#.*//' | awk '/^[^ ].*\.$/ { suite = $1 } /^  / { print suite $1 }')
  for source in cuda/*.cu; do
    stem="$(basename "$source" .cu)"
    if [[ -z "${small[$stem]:-}" ]]; then echo "gpu.sh: no sanitizer test is named for $source"; bad=1; fi
  done
  for stem in "${!small[@]}"; do
    IFS=: read -ra filter <<< "${small[$stem]}"
    for pattern in "${filter[@]}"; do
      if ! names_one "$pattern" "${names[@]}"; then echo "gpu.sh: the filter of $stem names no test: $pattern"; bad=1; fi
    done
  done
  for pattern in ${repeated//:/ }; do
    if ! names_one "$pattern" "${names[@]}"; then echo "gpu.sh: the filter of repeated tests names no test: $pattern"; bad=1; fi
  done
  if [[ $bad == 1 ]]; then failed+=(filters); return 1; fi
  echo "filters: ${#small[@]} kernels, each with a test that exists"
}

# ---- Start -------------------------------------------------------------------------------------------------------------------------------------

stage="${1:-}"
case "$stage" in
  build | test | sanitize | bench | profile | model | all) ;;
  filters)
    [[ $# -eq 2 ]] || { usage >&2; exit 2; }
    program="$(realpath -- "$2")"
    cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
    check_filters "$program"
    exit
    ;;
  *) usage >&2; exit 2 ;;
esac
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
out="${2:-build/gpu-results}"
mkdir -p -- "$out"
out="$(realpath -- "$out")"
if [[ $stage == all ]]; then
  status=0
  for each in build test sanitize bench profile; do bash "${BASH_SOURCE[0]}" "$each" "$out" || status=1; done
  exit $status
fi

folder="$out/$stage"
rm -rf -- "$folder"
mkdir -p -- "$folder"
seconds="${KVKEEP_GPU_SECONDS:-450}"
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" PYTHONUNBUFFERED=1
rehearsal="${KVKEEP_GPU_REHEARSAL:-}"
if [[ $rehearsal != 1 ]] && ! command -v nvidia-smi > /dev/null; then rehearsal=1; fi
if [[ $rehearsal == 1 ]]; then
  echo "REHEARSAL: no GPU is used. The execution model replaces it, at small sizes; times mean nothing."
  build="${KVKEEP_GPU_BUILD:-build/gpu-rehearsal}"
  tests="$build/bin/kvkeep_cuda_model_tests" bench="$build/bin/kvkeep_cuda_model_bench"
else
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || { echo "gpu.sh: nvidia-smi finds no GPU" >&2; exit 2; }
  build="${KVKEEP_GPU_BUILD:-build/gpu}"
  tests="$build/bin/kvkeep_gpu_tests" bench="$build/bin/kvkeep_gpu_bench"
fi
if [[ -d .deps/usr ]]; then export LD_LIBRARY_PATH="$PWD/.deps/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; fi
case "$stage" in
  test | sanitize) needed="$tests" ;;
  bench | profile) needed="$bench" ;;
  model) needed="$build/bin/kvkeep" ;;
  *) needed="" ;;
esac
[[ -z $needed || -x $needed ]] || { echo "gpu.sh: $needed does not exist; run the stage build first" >&2; exit 2; }
trap finish EXIT
trap 'failed+=("stopped"); exit 1' TERM INT HUP
"stage_$stage"
