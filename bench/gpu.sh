#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in stages, without a network.
#
#   bash bench/gpu.sh build OUT      compiles tests and benches for this machine's chip, in build/gpu
#   bash bench/gpu.sh smoke OUT      four kernels: is anything at all right?
#   bash bench/gpu.sh test OUT       every GPU test in 8 shards, then those that a race would fail, repeated
#   bash bench/gpu.sh bench OUT      ceilings of this machine, whole events, kernels
#   bash bench/gpu.sh sanitize OUT   memcheck, racecheck, synccheck, initcheck over one small case of every kernel
#   bash bench/gpu.sh profile OUT    the time of every kernel of an event, and what ncu says of the kernels that decide
#   bash bench/gpu.sh python OUT     the Python package, built there over the kit's libraries: Keeper and attach()
#   bash bench/gpu.sh model OUT      a pretrained model: slots and answers beside the CPU's, tokens/s at batch 1, 8, 32
#   bash bench/gpu.sh all OUT        build, smoke, test, python, bench, sanitize, profile, which share 560 s
#   bash bench/gpu.sh first OUT      the same without build, out of a kit, in 420 s (bench/gpu_first.sh)
#   bash bench/gpu.sh filters TESTS  fails if a kernel has no sanitizer test, or its filter matches none in TESTS
#
# Programs come from a kit (bench/gpu_kit.sh on a machine with nvcc and a network, then .gpu/ carried beside the tree),
# or from the stage build, which needs nvcc, CMake 3.22, Ninja, LibTorch, and other libraries of the system or of .deps/
# (bench/gpu_deps.sh). What is newer is taken.
#
# Results go to OUT (build/gpu-results unless given) as they come: OUT/STAGE/*.log, from the benches OUT/bench.jsonl, a
# line per case, and OUT/summary.txt, which is also printed: below 10,000 characters, failures last. A run that is
# stopped prints what it has; one that is killed has written it. OUT/STAGE.tar.gz holds the logs of a stage that ended.
#
#   KVKEEP_GPU_ARCH       chips to compile for, by default this machine's
#   KVKEEP_GPU_FILTER     benches to run, a regular expression
#   KVKEEP_GPU_SECONDS    limit of the whole command: 450 unless given, 560 for all, 420 for first,
#                         1200 in a rehearsal
#   KVKEEP_GPU_BUILD      folder of programs: a build folder or an unpacked kit
#   KVKEEP_GPU_KIT        folder of the kit, .gpu unless given
#   KVKEEP_GPU_CMAKE      options for CMake
#   KVKEEP_GPU_MODEL      SmolLM2-135M-Instruct or another GGUF file, or the folder of a model, for the stage model
#   KVKEEP_GPU_TEXT       prose for it, .cache/prose/handbook.txt unless given
#   KVKEEP_GPU_REHEARSAL  1: the execution model replaces the GPU, at small sizes; also used if there is no nvidia-smi
set -euo pipefail

# One small case of every kernel, by the stem in cuda/. Those of window_attention_matrix, expected, critical and rkv use
# matrix units.
declare -A small=(
  [adaptive_heads]='AdaptiveHeadsKernel.TakesHeads*'
  [arrivals]='PushQueries.PutEveryTokenAtItsPlace:PushGiven.PutsEveryScoreAtItsPlace'
  [chunks]='ChunksKernel.TakesRowsThatNeedTheLargestBlock'
  [compact]='Compact.CarriesTheColumnsWithTheirSlots:Compact.MovesAsMany*'
  [critical]='CriticalKernel.RanksASlotLastWhoseValueIsNoNumber'
  [expected]='ExpectedKernel.LeavesRowsAlone*'
  [expected_moments]='ExpectedKernel.FactorisesTheCovarianceOfMoreQueriesThanComponents:ExpectedByBlas.ANaN*'
  [factorise]='Factorise.ChoosesRowsAsTheyAre*'
  [fetch]='Fetch.TakesMorePieces*'
  [fold]='FoldKernel.PutsNewSpans*:FoldKernel.CutsSpans*:FoldKernel.StoresTheSame*'
  [gram]='GramKernel.GivesTheSame*'
  [keydiff]='KeyDiffKernel.LeavesRowsAlone*'
  [last_query]='LastQueryKernel.GivesNaN*'
  [layer_selector]='LayerSelectorKernel.DecidesAsTheCpu*:LayerSelectorKernel.SelectsByWhat*'
  [mass_segmented]='MassSegmentedKernel.TakesRows*'
  [memory]='DeviceLine.TakesTokensBack:DeviceLine.TakesGaps*:PendingEvents.ComeOfPlans*'
  [memory_attention]='MemoryMerge.IsAllThereIs*:MemoryRoute.WalksMoreSpans*:MemoryFetch.BringsOpenedSpans*'
  [narrow]='Narrow.GivesTheTokensOfALong*:GatherRows.TakeMorePrompts*'
  [prepare]='Prepare.WritesTheNewestPositions*'
  [prompt_scores]='PromptScoresKernel.ReadPages:PromptScoresKernel.GiveSums*'
  [ranks]='Ranks.AreTheCpusInTheLargestBlock'
  [rkv]='RkvKernel.LeavesRowsAlone*'
  [router]='DeviceRouter.ProjectsQueriesTwice:LearnedFolds.AreReadAs*'
  [row_bodies]='RowBodies.LeaveRowsAlone*:RowBodies.FindNaN*:WindowScorers.LeaveRowsOut*'
  [select]='Select.TakesARow*:ThresholdKernel.TakesARow*'
  [share]='ShareKernel.GivesRowsThatShareTheScoresOfTheCpu'
  [top_mass]='TopMassKernel.TakesARow*'
  [triattention]='TriAttentionKernel.LeavesRowsAlone*'
  [window_attention]='WindowAttentionKernel.GivesTheNewestAlone:WindowAttentionKernel.LeavesRowsAlone*'
  [window_attention_matrix]='WindowAttentionKernel.LeavesRowsAlone*:WindowAttentionKernel.ReadsTheKeysOnce*'
)
readonly sanitizers=(memcheck racecheck synccheck initcheck)
readonly smoke='Select.*:Compact.*:RowBodies.*:WindowAttentionKernel.AgreesWithTheCpuForEveryGroupAndElement'
readonly repeated='Compact.*:Select.*:RkvKernel.*:MassSegmentedKernel.*' # a race may need many runs to show
shards=8

# Cases of the benches, the most important ones first.
readonly measured=(
  '^(Ceiling|StepWithoutEvent)/|^Event/ams-tova/.*/batch:(1|32)/(1536->1024|96->64)/dense'
  '^(Prepare|WindowAttention[A-Za-z]*|NewestAttention|Tova|MassSegmented|Compact|Select)/.*/(1536->1024|96->64)'
  '^Event/(tova|ams-keydiff|snapkv|streaming)/|^Event/.*(32768|pages)'
  '^(KeyDiff|Expected|Rkv|Critical|Memory|Router|Factorise|Syev)'
)

# The event whose kernels are timed one by one, and kernels that ncu looks at with the case that launches them.
readonly timed_event='^Event/ams-tova/(llama8b/batch:(1|32)/1536->1024|toy/batch:2/96->64)/dense$'
readonly profiled=(
  'attention_matrix_kernel WindowAttention/llama8b/batch:32'
  'attention_f32_kernel NewestAttention/llama8b/batch:32'
  'expected_matrix_kernel Expected/llama8b/batch:8'
  'mass_segmented_kernel MassSegmented/llama8b/batch:32'
  'compact_kernel Compact/llama8b/batch:32'
  'keydiff_cosine_kernel KeyDiff/llama8b/batch:32'
)

stop() {
  echo "gpu.sh: $*" >&2
  exit 2
}

usage() { sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

# ---- What every stage does -------------------------------------------------------------------------------------------

failed=()
children=()
names=()
died=() # logs of what a signal ended, but for want of time
end=0
stage=""

# say LINE...: to the terminal and to the summary, as long as failures, which come last, still fit 10,000 characters.
readonly most_said=7200 most_failures=2500
said_enough=0
say() {
  local text
  text="$(printf '%s\n' "$@")"
  if [[ $(($(wc -c < "$out/summary.txt") + ${#text})) -lt $most_said ]]; then
    printf '%s\n' "$text" | tee -a "$out/summary.txt"
  elif [[ $said_enough == 0 ]]; then said_enough=1 && echo "... (the rest is in $out)" | tee -a "$out/summary.txt"; fi
}

# left: seconds that this stage has left, at least five.
left() { echo $((end - SECONDS > 5 ? end - SECONDS : 5)); }

# start NAME SECONDS COMMAND...: in the background; its output goes to a file of its own, line by line.
start() {
  local name="$1" limit="$2"
  shift 2
  timeout --kill-after=10 "$limit" "$@" > "$folder/$name.log" 2>&1 &
  children+=($!)
  names+=("$name")
}

# gather: waits for what was started, says how long it took; a failure is remembered.
gather() {
  local from=$SECONDS i status verdict line=""
  for i in "${!children[@]}"; do
    status=0 verdict=passed
    wait "${children[$i]}" || status=$?
    if [[ $status -gt 128 && $status -ne 137 ]]; then died+=("$folder/${names[$i]}.log"); fi
    if [[ $status -eq 124 || $status -eq 137 ]]; then
      verdict="STOPPED for want of time"
    elif [[ $status -ne 0 ]]; then
      verdict="FAILED ($status)"
    fi
    printf -v line '%s%-22s %4d s  %s\n' "$line" "$stage: ${names[$i]}" $((SECONDS - from)) "$verdict"
    [[ $status -eq 0 ]] || failed+=("$stage ${names[$i]}")
  done
  children=() names=()
  say "${line%$'\n'}"
}

step() {
  start "$@"
  gather
}

# say_tests NAME...: how many tests passed in GoogleTest logs, and the output of those that failed.
say_tests() {
  local name logs=()
  for name in "$@"; do if [[ -s "$folder/$name.log" ]]; then logs+=("$folder/$name.log"); fi; done
  if [[ ${#logs[@]} -gt 0 ]]; then python3 bench/gpu_report.py tests "${logs[@]}"; fi
}

# run_stage NAME SECONDS: within that many seconds from now.
run_stage() {
  stage="$1"
  end=$((SECONDS + $2))
  folder="$out/$stage"
  rm -rf -- "$folder"
  mkdir -p -- "$folder"
  "stage_$stage"
  end_stage
}

# However a stage ends, its results so far are reported and packed.
end_stage() {
  KVKEEP_GPU_REPORT="${room[$stage]:-6500}" "report_$stage" > "$out/$stage.txt" 2>&1 || true
  if [[ -s "$out/$stage.txt" ]]; then say "$(< "$out/$stage.txt")"; fi
  if tar -czf "$out/$stage.tar.gz" -C "$out" "$stage"; then rm -rf -- "$folder" "$out/$stage.txt"; fi
  stage=""
}

finish() {
  local status=$?
  trap - EXIT
  trap '' TERM INT HUP
  set +e
  for child in "${children[@]}"; do kill "$child" 2> /dev/null; done
  wait
  if [[ -n $stage ]]; then end_stage; fi
  {
    if [[ -s "$out/failures.txt" ]]; then printf '\n%s\n' "$(head -c $most_failures "$out/failures.txt")"; fi
    echo "$asked: $SECONDS s$([[ ${#failed[@]} -eq 0 ]] || printf '; failed: %.200s' "$(
      IFS=,
      echo "${failed[*]}"
    )")"
  } | tee -a "$out/summary.txt"
  [[ ${#failed[@]} -eq 0 ]] || exit 1
  exit "$status"
}

# ---- Stages ----------------------------------------------------------------------------------------------------------

stage_build() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DKVKEEP_BUILD_EXAMPLES=OFF) arch
  local targets=("$(basename "$tests")" "$(basename "$bench")")
  if [[ $rehearsal == 1 ]]; then
    options+=(-DKVKEEP_CUDA=OFF)
  else
    command -v nvcc > /dev/null || stop "there is no nvcc on PATH nor in CUDA_HOME"
    arch="${KVKEEP_GPU_ARCH:-}"
    if [[ -z $arch ]]; then
      arch="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)-real"
    fi
    options+=(-DKVKEEP_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch" -DKVKEEP_BUILD_CUDA_MODEL=OFF)
  fi
  if [[ -n ${KVKEEP_GPU_MODEL:-} || $rehearsal == 1 ]]; then targets+=(kvkeep_cli); fi # the stage model needs it
  if [[ $rehearsal == 1 ]]; then targets+=(kvkeep_cuda_modelled); fi
  if [[ -d .deps/usr ]]; then options+=("-DCMAKE_PREFIX_PATH=$PWD/.deps/usr"); fi
  # shellcheck disable=SC2206  # words are intended
  options+=(${KVKEEP_GPU_CMAKE:-})
  step configure 60 cmake -S . -B "$build" -G Ninja "${options[@]}"
  if [[ ${#failed[@]} -eq 0 ]]; then
    step compile "$(left)" cmake --build "$build" --parallel "${KVKEEP_GPU_JOBS:-$(nproc)}" --target "${targets[@]}"
  fi
}

report_build() {
  local log
  for log in configure compile; do
    if [[ " ${failed[*]} " == *" $log "* ]]; then
      grep -E -A 4 'error|Error|FAILED' "$folder/$log.log" | cut -c 1-300 | head -n 40 || tail -n 20 "$folder/$log.log"
    fi
  done
  if [[ ${#failed[@]} -eq 0 ]]; then
    du -m "$tests" "$bench" | awk '{ print $2 ": " $1 " MB" }'
  else
    tail -n 1 "$folder"/*.log | cut -c 1-200
  fi
}

stage_smoke() { step smoke "$(left)" "$tests" --gtest_color=no "--gtest_filter=$smoke"; }

report_smoke() { say_tests smoke; }

# Processes beside each other take turns at a GPU, which costs more than they gain unless NVIDIA's MPS joins them.
begin_sharing() {
  if [[ $rehearsal == 1 ]] || ! command -v nvidia-cuda-mps-control > /dev/null; then return 1; fi
  sockets="$(mktemp -d)"
  export CUDA_MPS_PIPE_DIRECTORY="$sockets" CUDA_MPS_LOG_DIRECTORY="$folder"
  if nvidia-cuda-mps-control -d > /dev/null 2>&1 &&
    timeout 20 "$tests" --gtest_filter='Select.TakesARow*' > /dev/null 2>&1; then
    return 0
  fi
  end_sharing
  return 1
}
end_sharing() {
  echo quit | timeout 10 nvidia-cuda-mps-control > /dev/null 2>&1 || true
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  rm -rf -- "$sockets"
}

# A test that ends its process takes those after it along: they run now, and it alone, for its stack.
after_a_crash() {
  local crashed test unbegun
  if [[ ${#died[@]} -eq 0 ]]; then return; fi
  crashed="$(python3 bench/gpu_report.py crashed "${died[@]}")"
  unbegun="$("$tests" --gtest_list_tests | python3 bench/gpu_report.py unbegun "$folder"/tests.*.log)"
  if [[ -n $unbegun ]]; then step tests.left "$(left)" "$tests" --gtest_color=no "--gtest_filter=$unbegun"; fi
  if ! command -v cuda-gdb > /dev/null; then return; fi
  for test in $crashed; do
    start "stack.$test" 60 cuda-gdb -batch -ex 'set cuda break_on_launch none' -ex run -ex bt -ex 'x/3i $rip' \
      -ex 'thread apply all bt 8' --args "$tests" --gtest_color=no "--gtest_filter=$test"
  done
  gather
}

stage_test() {
  local i limit shared=0
  died=()
  if begin_sharing; then
    shared=1
    say "test: the shards share the GPU by MPS"
  else
    shards=2
    say "test: there is no MPS, by which processes share a GPU: two shards"
  fi
  limit=$(($(left) * 8 / 10))
  # Two threads in each: beside each other they would take the cores from one another.
  for ((i = 0; i < shards; ++i)); do
    start "tests.$i" "$limit" env GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i OMP_NUM_THREADS=2 \
      "$tests" --gtest_color=no
  done
  gather
  if [[ $shared == 1 ]]; then end_sharing; fi
  after_a_crash
  step repeated "$(left)" "$tests" --gtest_color=no --gtest_repeat="$([[ $rehearsal == 1 ]] && echo 2 || echo 20)" \
    "--gtest_filter=$repeated"
}

report_test() {
  local i logs=()
  for ((i = 0; i < shards; ++i)); do logs+=("tests.$i"); done
  say_tests "${logs[@]}" tests.left
  for i in "$folder"/stack.*.log; do
    if [[ -s $i ]]; then
      basename "$i" .log
      grep -E '^(#[0-9]+ |=> |Thread .* received signal|\[Inferior .* exited)' "$i" | cut -c 1-150 | head -n 14 || true
    fi
  done
  say_tests repeated
}

# The package is compiled for the Python that is there, which needs no network where that has nanobind.
stage_python() {
  local library=kvkeep_cuda options=()
  if ! python3 -c 'import nanobind, pytest, torch, transformers' > "$folder/needs.log" 2>&1; then
    say "python: left out, since python3 lacks something: $(tail -n 1 "$folder/needs.log")"
    return
  fi
  if [[ $rehearsal == 1 ]]; then library=kvkeep_cuda_modelled options=(KVKEEP_CUDA_MODEL=host); fi
  if ! compgen -G "$build/lib/lib$library.so*" > /dev/null; then
    say "python: left out, since $build/lib has no lib$library"
    return
  fi
  step configure 60 cmake -G Ninja -S tests/python/package -B "$folder/package" -DCMAKE_BUILD_TYPE=Release \
    "-DPython_EXECUTABLE=$(command -v python3)" "-DKVKEEP_LIBRARIES=$(realpath -- "$build/lib")" \
    "-DKVKEEP_CUDA_LIBRARY=$library"
  if [[ ${#failed[@]} -gt 0 ]]; then return; fi
  step package "$(left)" cmake --build "$folder/package"
  step pytest "$(left)" env "${options[@]}" "PYTHONPATH=$folder/package" python3 -m pytest -q -p no:cacheprovider \
    tests/python/test_cuda.py
}

report_python() {
  grep -hE '^(FAILED|E  )|error:|passed|failed' "$folder"/{configure,package,pytest}.log 2> /dev/null |
    cut -c 1-200 | tail -n 12 || true
  rm -rf -- "$folder/package"
}

stage_sanitize() {
  local tool filter only=() unwritten=()
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  check_filters "$tests" > "$folder/filters.log" || say "$(head -n 5 "$folder/filters.log")"
  filter="$(
    IFS=:
    echo "${small[*]}"
  )"
  if [[ $rehearsal == 1 ]] || ! command -v compute-sanitizer > /dev/null; then
    say "sanitize: there is no compute-sanitizer here (or this is a rehearsal): the tests run without it"
    step plain "$(left)" "$tests" --gtest_color=no "--gtest_filter=$filter"
    return
  fi
  # Kernels of kvkeep alone; the option's name differs between versions. But initcheck must see what LibTorch writes.
  for option in --kernel-name --kernel-regex; do
    if compute-sanitizer --help 2> /dev/null | grep -q -e "$option "; then
      only=("$option" kns=kvkeep)
      break
    fi
  done
  # What a column's growth copies was not all written: copies are the host's, and only kernels are to be checked.
  if compute-sanitizer --help 2> /dev/null | grep -q -e '--check-api-memory-access'; then
    unwritten=(--check-api-memory-access no)
  fi
  # All at once: most of their time goes to the host's part. Each tool in two halves of the tests.
  for tool in "${sanitizers[@]}"; do
    for half in 0 1; do
      start "$tool.$half" "$(left)" env GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$half OMP_NUM_THREADS=2 \
        compute-sanitizer --tool "$tool" $([[ $tool == initcheck ]] && echo "${unwritten[*]}" || echo "${only[*]}") \
        --error-exitcode 97 "$tests" --gtest_color=no "--gtest_filter=$filter"
    done
  done
  gather
}

report_sanitize() {
  local tool half
  say_tests plain
  for tool in "${sanitizers[@]}"; do
    for half in 0 1; do
      local log="$folder/$tool.$half.log"
      if [[ ! -s "$log" ]]; then continue; fi
      echo "$tool.$half: $(grep -c '^\[       OK' "$log") tests passed; $(grep -h 'SUMMARY' "$log" | tail -n 1)"
      grep -h -A 4 '^========= \(Invalid\|Error\|Race\|Barrier\|Uninit\|Program hit\|Warning\)' "$log" | cut -c 1-160 |
        head -n 8
    done
  done
}

stage_bench() {
  rm -f -- "$out/bench.jsonl"
  local watch="" filters=("${measured[@]}") i
  if [[ -n ${KVKEEP_GPU_FILTER:-} ]]; then
    filters=("$KVKEEP_GPU_FILTER")
  elif [[ $asked == bench ]]; then
    filters=('')
  fi
  if [[ $rehearsal != 1 ]]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader > "$folder/gpu.txt"
    timeout "$(left)" nvidia-smi --query-gpu=clocks.sm,temperature.gpu,power.draw \
      --format=csv,noheader,nounits --loop=2 > "$folder/clock.csv" 2>&1 &
    watch=$!
  fi
  # No case begins in the last tenth of the time, which is for those that are still running.
  for i in "${!filters[@]}"; do
    if [[ $i -gt 0 && $(left) -lt 15 ]]; then break; fi
    step "cases.$i" "$(left)" "$bench" --seconds $(($(left) * 9 / 10 - 3)) --filter "${filters[$i]}" \
      --out "$out/bench.jsonl"
  done
  if [[ -n $watch ]]; then kill "$watch" 2> /dev/null || true; fi
}

report_bench() { python3 bench/gpu_report.py bench "$out/bench.jsonl" "$folder"; }

stage_profile() {
  local ncu entry kernel filter number=0
  ncu="$(command -v ncu || ls -d /opt/nvidia/nsight-compute/*/ncu 2> /dev/null | tail -n 1 || true)"
  if [[ $rehearsal == 1 || -z $ncu ]]; then
    say "profile: there is no ncu here (or this is a rehearsal): the cases run without it"
    step event "$(left)" "$bench" --once --filter "$timed_event"
    return
  fi
  step event "$(left)" "$ncu" --clock-control none --metrics gpu__time_duration.sum --kernel-name-base demangled \
    -k regex:kvkeep --csv --page raw "$bench" --once --filter "$timed_event"
  for entry in "${profiled[@]}"; do
    if [[ $(left) -lt 15 ]]; then break; fi
    read -r kernel filter <<< "$entry"
    step "$((++number))-$kernel" $(($(left) / 2)) "$ncu" --clock-control none \
      --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy \
      --csv --page details -k "regex:$kernel" -c 2 "$bench" --once --filter "^$filter"
  done
}

report_profile() {
  if grep -qs '^"ID"\|==PROF==\|==ERROR==' "$folder"/*.log; then
    python3 bench/gpu_report.py profile "$folder"
  else
    cat "$folder"/*.log | grep '=' | cut -c 1-150 | head -n 12
  fi
}

stage_model() {
  local words=(--kvkeep "$build/bin/kvkeep" --out "$folder/outputs")
  if [[ $rehearsal == 1 ]]; then
    words+=(--model examples/model --device cpu)
  else
    [[ -e "${KVKEEP_GPU_MODEL:-}" ]] || stop "there is no model; name a GGUF file or a folder with KVKEEP_GPU_MODEL"
    words+=(--model "$KVKEEP_GPU_MODEL")
    local text="${KVKEEP_GPU_TEXT:-.cache/prose/handbook.txt}"
    if [[ -f $text ]]; then words+=(--text "$text"); fi
  fi
  step tables "$(left)" python3 examples/lab/bench/gpu_model.py "${words[@]}"
}

report_model() { head -c 6500 "$folder/tables.log"; }

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
  local known source stem filter pattern bad=0
  mapfile -t known \
    < <("$1" --gtest_list_tests | sed 's/ *#.*//' | awk '/^[^ ].*\.$/ { suite = $1 } /^  / { print suite $1 }')
  for source in cuda/*.cu; do
    stem="$(basename "$source" .cu)"
    if [[ -z "${small[$stem]:-}" ]]; then
      echo "gpu.sh: no sanitizer test is named for $source"
      bad=1
    fi
  done
  for stem in "${!small[@]}"; do
    IFS=: read -ra filter <<< "${small[$stem]}"
    for pattern in "${filter[@]}"; do
      if ! names_one "$pattern" "${known[@]}"; then
        echo "gpu.sh: the filter of $stem names no test: $pattern"
        bad=1
      fi
    done
  done
  for pattern in ${repeated//:/ }; do
    if ! names_one "$pattern" "${known[@]}"; then
      echo "gpu.sh: the filter of repeated tests names no test: $pattern"
      bad=1
    fi
  done
  if [[ $bad == 1 ]]; then
    failed+=("sanitize filters")
    return 1
  fi
  echo "filters: ${#small[@]} kernels, each with a test that exists"
}

# ---- Programs --------------------------------------------------------------------------------------------------------

# use_kit FOLDER: unpacks it once, says if it was made of other sources, and sets `build`.
use_kit() {
  local kit
  kit="$(realpath -- "$1")"
  build="${KVKEEP_GPU_BUILD:-build/gpu-kit-unpacked}"
  if [[ ! -f "$build/COMMIT" || "$kit/kit.tar.xz" -nt "$build/COMMIT" ]]; then
    rm -rf -- "$build"
    mkdir -p -- "$build"
    tar -xJf "$kit/kit.tar.xz" -C "$build"
    touch -- "$build/COMMIT"
  fi
  if [[ "$(bash bench/gpu_kit.sh --sources)" != "$(sed -n 2p "$build/COMMIT")" ]]; then
    say "WARNING: the kit is of other sources than this tree: $(head -n 1 "$build/COMMIT")"
  fi
}

# What the programs of a kit load: the kit's libraries, and LibTorch beside Python.
kit_libraries() {
  local torch
  torch="$(python3 -c 'import importlib.util as u, os
s = u.find_spec("torch")
print(os.path.dirname(s.origin) if s else "")')"
  [[ -n $torch ]] || stop "python3 has no torch, whose libraries the kit needs"
  export LD_LIBRARY_PATH="$(realpath -- "$build")/lib:$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  local missing
  missing="$(ldd "$tests" "$bench" 2>&1 | grep -E 'not found|error' | sort -u || true)"
  [[ -z $missing ]] || {
    say "the kit does not run here:" "$missing"
    exit 2
  }
}

# ---- Start -----------------------------------------------------------------------------------------------------------

asked="${1:-}"
case "$asked" in
  build | smoke | test | python | sanitize | bench | profile | model | all | first) ;;
  filters)
    [[ $# -eq 2 ]] || {
      usage >&2
      exit 2
    }
    program="$(realpath -- "$2")"
    cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
    check_filters "$program"
    exit
    ;;
  --help | -h)
    usage
    exit 0
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
out="${2:-build/gpu-results}"
mkdir -p -- "$out"
out="$(realpath -- "$out")"
: > "$out/summary.txt"
rm -f -- "$out/failures.txt"
export KVKEEP_GPU_FAILURES="$out/failures.txt"
case "$asked" in all) seconds=560 ;; first) seconds=420 ;; *) seconds=450 ;; esac
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" PYTHONUNBUFFERED=1
rehearsal="${KVKEEP_GPU_REHEARSAL:-}"
if [[ $rehearsal != 1 ]] && ! command -v nvidia-smi > /dev/null; then rehearsal=1; fi
if [[ $rehearsal == 1 ]]; then seconds=1200; fi # the model takes its time, on fewer cores
seconds="${KVKEEP_GPU_SECONDS:-$seconds}"
kit="${KVKEEP_GPU_KIT:-.gpu}"
if [[ $rehearsal == 1 ]]; then
  say "REHEARSAL: no GPU is used. The execution model replaces it, at small sizes; times mean nothing."
  build="${KVKEEP_GPU_BUILD:-build/gpu-rehearsal}"
  tests="$build/bin/kvkeep_cuda_model_tests" bench="$build/bin/kvkeep_cuda_model_bench"
else
  say "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)" ||
    stop "nvidia-smi finds no GPU"
  build="${KVKEEP_GPU_BUILD:-build/gpu}"
  if [[ $asked != build && $asked != all && -f "$kit/kit.tar.xz" &&
    ! "$build/bin/kvkeep_gpu_tests" -nt "$kit/kit.tar.xz" ]]; then
    use_kit "$kit"
  fi
  tests="$build/bin/kvkeep_gpu_tests" bench="$build/bin/kvkeep_gpu_bench"
fi
if [[ -d .deps/usr ]]; then
  export LD_LIBRARY_PATH="$PWD/.deps/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
if [[ -f "$build/COMMIT" ]]; then
  kit_libraries
  say "kit: $(head -n 1 "$build/COMMIT")"
  export KVKEEP_TEST_MODEL_DIR="$PWD/examples/model"
fi
case "$asked" in
  smoke | test | sanitize) needed="$tests" ;;
  bench | profile | python | first) needed="$bench" ;;
  model) needed="$build/bin/kvkeep" ;;
  *) needed="" ;;
esac
[[ -z $needed || -x $needed ]] ||
  stop "$needed does not exist; run the stage build, or bench/gpu_kit.sh where there is nvcc"
trap finish EXIT
trap 'failed+=("stopped"); exit 1' TERM INT HUP

# share PERCENT: of the time that is left.
share() { echo $(((seconds - SECONDS) * $1 / 100)); }

# Characters that a stage's report may take where all of them are printed.
declare -A room=()
if [[ $asked == all || $asked == first ]]; then
  room=([build]=300 [smoke]=200 [test]=300 [python]=300 [bench]=2900 [sanitize]=700 [profile]=1700)
fi

case "$asked" in
  all | first)
    if [[ $asked == all ]]; then run_stage build "$(share 40)"; fi
    if [[ ${#failed[@]} -eq 0 ]]; then run_stage smoke "$(share 10)"; fi
    if [[ ${#failed[@]} -gt 0 ]]; then exit 1; fi # nothing after it would mean anything
    run_stage test "$(share 40)"
    run_stage python "$(share 35)"
    run_stage bench "$(share 55)"
    run_stage sanitize "$(share 80)"
    run_stage profile "$(share 90)"
    ;;
  *) run_stage "$asked" "$seconds" ;;
esac
