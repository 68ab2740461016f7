#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Evidence of examples/lab/docs/results.md: what two pretrained models still write, under each policy and budget.
set -euo pipefail

usage() {
  cat << 'TEXT'
Measures policies on SmolLM2-135M-Instruct and Gemma 3 270M, over three texts, by what the models write, and keeps
every answer. examples/lab/bench/answers.py makes the tables of examples/lab/docs/results.md and papers.md of them.

  bash examples/lab/bench/real_model.sh STAGE [options]

  STAGE     answers   needles in prose, cut with their question in sight and before it comes: the headline
            caches    the same over caches of 8 and 4 bits (q8_0, q4_0)
            peers     the samples of `answers`, asked of llama.cpp: its own caches of 16, 8 and 4 bits, its context
                      shift (needs kvkeep-llama, docs/reference/llama.md, and the stage answers)
            ams       every scorer alone, under AMS as published, as ours by default, and with all of the budget in
                      segments
            coverage  less of the budget through AMS's segments, and more: a quarter, half, three quarters, all
            ablate    AMS without each of its parts, and its sweeps
            decode    long decodes, whose answers depend on what was told, asked and written long before
            distance  KL from the full cache, token by token, over long decodes of prose
            ea        Expected Attention with and without head budgets, from 10 to 90 %; its options; depth by length
            asl       prompts on fewer tokens: thresholds, first layers, observed layers; a layer of choice
            sekv      folded spans: anchors, windows, span lengths, ranks, budgets
            serving   continuous batching in a pool of pages that shrinks (examples/lab/docs/serving.md)
  --models M,...    smollm2, gemma3 [both]
  --texts T,...     manual, policy, code, of examples/lab/bench/texts.sh [all]
  --questions Q,... before, after [both, or those that the stage is about]
  --length N        tokens of a needle's prompt and answer [1024]
  --slots N         budgets of decode [256]
  --samples N       of each task and text [6; ams, ablate, ea, asl, sekv: 3; decode: 2; distance: 1]
  --threads N       of each command [1]
  --jobs N          commands that run side by side [2]
  --device D        cpu or cuda:N, that holds models and caches [cpu]
  --out DIR         [out/results]
  --kvkeep FILE     [build/release/bin/kvkeep]

Results lie in DIR/STAGE/MODEL/QUESTION/TEXT*.jsonl; what is there is not measured again, so a stage that was stopped
goes on where it was. Each command is printed before it runs. On two cores a stage takes 5 to 25 minutes for each
model; serving takes an hour. On a GPU more commands may run side by side, as many as the machine has cores.
TEXT
}

stop() {
  printf 'examples/lab/bench/real_model.sh: %s\n' "$*" >&2
  exit 2
}

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd)"
stages=(answers caches peers ams coverage ablate decode distance ea asl sekv serving)
stage="" models=smollm2,gemma3 texts="" questions="" length=1024 slots=256 samples="" threads=1 jobs=2 device=cpu
out="$root/out/results" kvkeep="$root/build/release/bin/kvkeep"
while [[ $# -gt 0 ]]; do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --models | --texts | --questions | --length | --slots | --samples | --threads | --jobs | --device | --out | \
      --kvkeep)
      [[ $# -ge 2 ]] || stop "$1: a value is missing; see --help"
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    -*) stop "unknown option '$1'; allowed: see --help" ;;
    *)
      [[ " ${stages[*]} " == *" $1 "* ]] || stop "no stage is called '$1'; allowed ${stages[*]}"
      stage="$1"
      ;;
  esac
  shift
done
[[ -n "$stage" ]] || stop "no stage; allowed ${stages[*]}"
[[ -x "$kvkeep" ]] || stop "$kvkeep does not exist; build it, or name another with --kvkeep"
# shellcheck source=cmake/bootstrap.sh
source "$root/cmake/bootstrap.sh"
# shellcheck source=examples/lab/bench/texts.sh
source "$root/examples/lab/bench/texts.sh"
read -ra texts <<< "${texts:+${texts//,/ }}"
[[ ${#texts[@]} -gt 0 ]] || texts=("${kvkeep_texts[@]}")
half=$((length / 2)) quarter=$((length / 4)) eighth=$((length / 8))
needles=ruler/niah-single-2,ruler/niah-multikey-1,text/needle

case "$stage" in
  ams | ablate | ea | asl | sekv) few=3 ;;
  decode) few=2 ;;
  distance) few=1 ;;
  *) few=6 ;;
esac
samples="${samples:-$few}"

# ---- The queue

queue=()

# job FILE SUB-COMMAND ARGUMENTS...: kvkeep with these; its table is FILE.csv (.md of llama), samples are FILE.jsonl.
job() { queue+=("$(printf '%q ' "$@")"); }

run_job() {
  local to="$1" form=csv
  [[ "$to" != *-zoom/* ]] || form=json # a number for each head does not fit a row of CSV
  [[ "$2" != llama ]] || form=md
  local command=("$kvkeep" "${@:2}" --weights bf16 --device "$device" --threads "$threads" --quiet -o "$form")
  if [[ -s "$to.$form" ]]; then return; fi
  mkdir -p -- "$(dirname -- "$to")"
  [[ "$2" != eval ]] || command+=(--samples-out "$to.jsonl")
  [[ "$2" != llama ]] ||
    command=("$(dirname -- "$kvkeep")/kvkeep-llama" answer "${@:3}" -t "$threads" --samples-out "$to.jsonl")
  printf '%s ' "${command[@]}" >&2
  printf '\n' >&2
  "${command[@]}" > "$to.$form.part"
  mv -- "$to.$form.part" "$to.$form"
}

run_jobs() {
  export kvkeep threads device
  export -f run_job
  printf '%s\0' "${queue[@]}" | xargs -0 -n 1 -P "$jobs" bash -euo pipefail -c 'eval "set -- $0"; run_job "$@"'
}

# model_file NAME, text_file NAME: answer in $file.
model_file() {
  kvkeep_get_real_model "$1" || stop "cannot get the model $1"
  file="$kvkeep_real_model"
}
text_file() {
  kvkeep_get_text "$1" || stop "cannot get the text $1"
  file="$kvkeep_text"
}

# policies P...: answers in $given as --policy P ...
policies() {
  given=()
  for p in "$@"; do given+=(--policy "$p"); done
}

# grid TAG CACHE BUDGETS POLICIES...: one job for each model, question and text.
grid() {
  local tag="$1" cache="$2" slots="$3" model text question from
  shift 3
  policies "$@"
  for model in ${models//,/ }; do
    model_file "$model"
    from="$file"
    for question in ${questions//,/ }; do
      for text in "${texts[@]}"; do
        text_file "$text"
        job "$out/$stage/$model/$question/$text$tag" eval --model "$from" --cache-dtype "$cache" --task "$needles" \
          --haystack "$file" --length "$length" --samples "$samples" --batch 18 --answer-tokens 32 \
          --question "$question" --interval 512 ${slots:+--budgets "$slots"} "${given[@]}"
      done
    done
  done
}

# ---- The stages

calibration_of() { # MODEL: answers in $calibration
  calibration="$out/calibration/$1.safetensors"
  [[ -s "$calibration" ]] && return
  mkdir -p -- "$out/calibration"
  model_file "$1"
  local from="$file"
  text_file manual
  "$kvkeep" calibrate --model "$from" --weights bf16 --threads 2 --prompt-file "$file" --tokens 6000 --quiet \
    --out "$calibration" > "$out/calibration/$1.md"
}

case "$stage" in
  answers)
    questions="${questions:-before,after}"
    grid "" bf16 "$half,$quarter,$eighth" full random streaming tova ams-tova ams-tova,preset=question \
      ams-tova,variant=official expected adakv-expected ams-expected,preset=question keydiff \
      tova,share=union tova,share=union,rest=fold ams-tova,preset=question,rest=fold expected,rest=fold
    ;;
  caches)
    questions="${questions:-before,after}"
    grid @q8_0 q8_0 "" full
    grid @q4_0 q4_0 "$half,$quarter,$eighth" full tova ams-tova,preset=question expected adakv-expected \
      tova,share=union tova,share=union,rest=fold expected,rest=fold
    grid @q4_0-ams q4_0 "$half,$quarter,$eighth" keydiff ams-expected,preset=question \
      ams-tova,preset=question,rest=fold ams-expected,preset=question,rest=fold
    ;;
  peers)
    [[ -x "$(dirname -- "$kvkeep")/kvkeep-llama" ]] ||
      stop "kvkeep-llama does not lie beside $kvkeep; docs/reference/llama.md says how to build it"
    for model in ${models//,/ }; do
      model_file "$model"
      for text in "${texts[@]}"; do
        samples="$out/answers/$model/before/$text.jsonl" # nothing here depends on when the question comes
        [[ -s "$samples" ]] || stop "$samples does not exist; run the stage answers first"
        for cache in f16 q8_0 q4_0; do
          job "$out/peers/$model/before/$text@$cache" llama -m "$file" --samples "$samples" --cache-type "$cache" \
            --policy alone
        done
        job "$out/peers/$model/before/$text@shift" llama -m "$file" --samples "$samples" --policy shift \
          --budgets "$half,$quarter,$eighth"
      done
    done
    ;;
  ams)
    questions="${questions:-before}"
    asked="$models"
    for models in ${asked//,/ }; do
      calibration_of "$models"
      forms=()
      for scorer in rkv defensive "triattention,calibration=$calibration"; do
        forms+=("$scorer" "ams-$scorer" "ams-$scorer,preset=question" "ams-$scorer,variant=official")
      done
      # By default all of the budget goes through segments over these.
      for scorer in snapkv h2o rpc,scorer.window=16; do
        forms+=("$scorer" "ams-$scorer" "ams-$scorer,coverage=0.75" "ams-$scorer,variant=official")
      done
      grid "" bf16 "$half,$quarter,$eighth" "${forms[@]}" ams-expected,variant=official ams-keydiff \
        ams-keydiff,preset=question ams-keydiff,variant=official
    done
    ;;
  coverage)
    questions="${questions:-before,after}"
    grid "" bf16 "$half,$quarter,$eighth" ams-tova,coverage=0.25 ams-tova,coverage=0.5 ams-expected,coverage=0.25 \
      ams-expected,coverage=0.5 ams-expected
    ;;
  ablate)
    questions="${questions:-before,after}"
    variants=()
    for base in tova expected; do
      variants+=("$base" "ams-$base,preset=question")
      for change in segments=fixed:64 quotas=equal quotas=length pool=1 window=8 window=128 suffix_fill=causal_mean \
        suffix_fill=exclude min_quota=8 protected_mass=true segment_mass=0.005; do
        variants+=("ams-$base,preset=question,allocator.$change")
      done
    done
    grid "" bf16 "$half,$eighth" "${variants[@]}"
    ;;
  decode)
    named=()
    for text in "${texts[@]}"; do
      text_file "$text"
      named+=("$text=$file")
    done
    mkdir -p -- "$out/logs"
    python3 "$root/examples/lab/bench/long_decodes.py" "$out/logs/all.jsonl" "${named[@]}" --samples "$samples"
    tasks=(facts asked asked-early list)
    for task in "${tasks[@]}"; do grep "\"task\": \"$task\"" "$out/logs/all.jsonl" > "$out/logs/$task.jsonl"; done
    fed=(eval --cache-dtype bf16 --batch 18 --stream-after 32 --interval 32 --budgets "$slots")
    policies full streaming tova expected adakv-expected keydiff expected,rest=fold ams-tova \
      ams-tova,allocator.credit=false ams-tova,coverage=0.25 ams-tova,preset=question \
      ams-tova,preset=question,allocator.credit=false ams-tova,variant=official \
      ams-tova,variant=official,allocator.credit=false
    for task in "${tasks[@]}"; do
      for model in ${models//,/ }; do
        model_file "$model"
        job "$out/decode-$slots/$model/stream/$task" "${fed[@]}" --model "$file" \
          --samples-in "$out/logs/$task.jsonl" "${given[@]}"
      done
    done
    policies streaming tova ams-tova ams-tova,preset=question ams-tova,variant=official
    for model in ${models//,/ }; do
      model_file "$model"
      job "$out/decode-kept/$model/stream/asked" "${fed[@]}" --model "$file" --samples-in "$out/logs/asked.jsonl" \
        --diagnostics --diagnostics-samples 2 "${given[@]}"
    done
    ;;
  distance)
    policies streaming random tova expected keydiff snapkv ams-tova ams-tova,allocator.credit=false \
      ams-tova,preset=question ams-tova,preset=question,allocator.credit=false ams-tova,variant=official \
      ams-tova,variant=official,allocator.credit=false
    for model in ${models//,/ }; do
      model_file "$model"
      from="$file"
      for text in "${texts[@]}"; do
        text_file "$text"
        job "$out/distance/$model/stream/$text" perplexity --model "$from" --cache-dtype bf16 --text "$file" \
          --length "$length" --prompt 128 --texts "$samples" --interval 32 --budgets "$eighth" "${given[@]}"
      done
    done
    ;;
  ea)
    questions="${questions:-before,after}"
    ratios=()
    for ratio in 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9; do
      for policy in expected adakv-expected; do ratios+=("$policy,ratio=$ratio"); done
    done
    grid @ratios bf16 "" "${ratios[@]}"
    options=()
    for policy in expected adakv-expected; do
      options+=("$policy")
      for change in epsilon=0 epsilon=0.1 epsilon=1 n_future=128 covariance=false value_norm=false queries=64 \
        queries=1024; do
        options+=("$policy,scorer.$change")
      done
    done
    grid @options bf16 "$quarter" "${options[@]}"
    texts=(manual) questions=after
    for length in 512 1024 2048; do
      for model in ${models//,/ }; do
        model_file "$model"
        from="$file"
        text_file manual
        policies full expected adakv-expected expected,rest=fold
        job "$out/ea-depth/$model/after/manual@$length" eval --model "$from" --cache-dtype bf16 \
          --task ruler/niah-single-2,text/needle --haystack "$file" --length "$length" --samples 3 \
          --depth 0,25,50,75,100 --batch 5 --answer-tokens 32 --question after --interval 512 \
          --budgets "$((length / 4))" "${given[@]}"
      done
    done
    ;;
  # Gemma's sliding layers are not narrowed, so SmolLM2 alone; each prompt by itself, for the time of its first token.
  asl)
    model_file smollm2
    from="$file"
    selecting=(full pyramidinfer asl-2pass,layers.threshold=0.8)
    for threshold in 0.3 0.5 0.8 0.9; do selecting+=("asl,layers.threshold=$threshold"); done
    for first in 5 15; do
      for threshold in 0.3 0.5 0.8; do
        selecting+=("asl,layers.threshold=$threshold,layers.min_layer=$first,layers.observed_layers=5")
      done
    done
    for threshold in 0.3 0.5 0.8; do selecting+=("asl,layers.threshold=$threshold,layers.observed_layers=4"); done
    for layer in 5 10 15 20 25; do selecting+=("fastkv,layer=$layer"); done
    for layer in 13 20; do selecting+=("gemfilter,layer=$layer"); done
    for text in "${texts[@]}"; do
      text_file "$text"
      common=(--model "$from" --cache-dtype bf16 --haystack "$file" --length "$length" --batch 1 --answer-tokens 32
        --question before --budgets "$quarter")
      policies "${selecting[@]}"
      job "$out/asl/smollm2/before/$text" eval "${common[@]}" --samples "$samples" --task "$needles" "${given[@]}"
      policies asl,layers.threshold=0,layers.min_layer=4,layers.observed_layers=5
      job "$out/asl-variance/smollm2/before/$text" eval "${common[@]}" --samples 2 \
        --task "$needles,ruler/niah-multivalue,ruler/vt,ruler/cwe,ruler/fwe" "${given[@]}"
    done
    ;;
  sekv)
    questions="${questions:-before,after}"
    spans=(sekv)
    for change in memory.alpha=1 memory.alpha=0 memory.alpha=100 memory.max_span=16 memory.max_span=64 \
      memory.max_span=128 memory.max_rank=8 memory.energy=0.3 memory.mass=0.005 recent=16 recent=128; do
      spans+=("sekv,$change")
    done
    grid "" bf16 "$half,$quarter" "${spans[@]}"
    grid @free bf16 "" sekv sekv,memory.alpha=1 sekv,memory.alpha=100 sekv,memory.max_span=128 \
      sekv,memory.max_span=128,memory.alpha=100 sekv,memory.max_rank=8 sekv,recent=128
    policies sekv sekv,memory.mass=0.005 sekv,memory.max_span=128
    for model in ${models//,/ }; do
      model_file "$model"
      from="$file"
      text_file manual
      for question in ${questions//,/ }; do
        job "$out/sekv-zoom/$model/$question/manual" eval --model "$from" --cache-dtype bf16 --task "$needles" \
          --haystack "$file" --length "$length" --samples "$samples" --batch 9 --answer-tokens 32 \
          --question "$question" --interval 512 "${given[@]}"
      done
    done
    ;;
  serving)
    export OMP_NUM_THREADS="$threads" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
    program="$(dirname -- "$kvkeep")/example_serving"
    [[ -x "$program" ]] || stop "$program does not exist; build the target example_serving"
    mkdir -p -- "$out"
    model_file smollm2
    serve=("$program" --model "$file" --weights bf16)
    text_file manual
    serve+=(--haystack "$file" --rate 0.3 --rounds 3)
    "${serve[@]}" --requests 16 --pages 560,280,140 --prefix 150:350 --prompt 256:768 --answer 80:160 \
      --policy expected,budget=384,interval=32,prefill=cut --policy expected,budget=192,interval=32,prefill=cut \
      --csv "$out/serving.csv" | tee "$out/serving.md"
    # Longer answers, shorter prompts: what takes the time is decoding.
    "${serve[@]}" --requests 12 --pages 280,140 --prefix 64:128 --prompt 96:192 --answer 400:700 \
      --policy tova,budget=384,interval=32 --policy tova,budget=192,interval=32 \
      --policy keydiff,budget=192,interval=32 --csv "$out/serving-answers.csv" | tee "$out/serving-answers.md"
    ;;
esac
[[ ${#queue[@]} -eq 0 ]] || run_jobs
