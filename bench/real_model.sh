#!/usr/bin/env bash
# Tables of docs/results.md on a pretrained model: how much of the answers each policy keeps at each budget.
set -euo pipefail

usage() {
  cat << 'TEXT'
Measures policies on SmolLM2-135M-Instruct, and where two models are named on Gemma 3 270M, and writes the tables that
docs/results.md shows.

  bash bench/real_model.sh STAGE [options]

  STAGE     answers  what both models write, over three texts and three kinds of cache: whole answers, beside the bytes
                     kept, with the question in sight at the cut and after it (bench/answers.py makes the tables)
            before   needles in prose, the prompt cut with its question in sight
            after    the same, the context cut before its question comes
            share    one selection for the rows of a head or of all layers, before and after
            fold     what is not kept, folded instead of dropped
            prompts  policies that narrow prompts, layer by layer
            serving  continuous batching in a pool of pages that shrinks, without kvkeep and with it: long prompts, then
                     long answers (docs/serving.md)
            decode   2048 tokens one by one: of the prose (perplexity), and as the full cache writes them (fidelity)
  --models M,...    answers: smollm2, gemma3 [both]
  --texts T,...     answers: manual, policy, code, of bench/texts.sh [all]
  --lengths L,...   [1024,2048,4096; answers: 1024]
  --samples N       samples per task [17; answers: 6 per task and text]
  --set all|main    before and after: every scorer and allocator, or eight scorers alone and under AMS [all]
  --threads N       [1]
  --model FILE      [SmolLM2-135M-Instruct, loaded as examples/real_model.sh does]
  --haystack FILE   prose [the Debian Administrator's Handbook, loaded as a package, made text by bench/prose.py]
  --out DIR         [out/results]
  --kvkeep FILE     [build/release/bin/kvkeep]

Each table is one command, which is printed before it runs. Samples of needles are written beside it as lines of
JSON, from which bench/needles_tables.py makes the tables of docs/results.md.
TEXT
}

stop() { printf '%s\n' "$*" >&2; exit 2; }

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
stage="" lengths="" models=smollm2,gemma3 texts="" samples="" threads=1 set=all batch=9 model="" haystack="" out="$root/out/results" kvkeep="$root/build/release/bin/kvkeep"
while [[ $# -gt 0 ]]; do
  case "$1" in
    --help | -h) usage; exit 0 ;;
    answers | before | after | share | fold | prompts | decode | serving) stage="$1" ;;
    --models | --texts | --lengths | --samples | --set | --threads | --model | --haystack | --out | --kvkeep)
      [[ $# -ge 2 ]] || stop "bench/real_model.sh: $1: a value is missing; see --help"
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    *) stop "bench/real_model.sh: unknown option '$1'; allowed: see --help" ;;
  esac
  shift
done
[[ "$set" == all || "$set" == main ]] || stop "bench/real_model.sh: --set: given '$set'; allowed all, main"
[[ -n "$stage" ]] || stop "bench/real_model.sh: no stage; allowed answers, before, after, share, fold, prompts, decode, serving"
[[ -x "$kvkeep" ]] || stop "bench/real_model.sh: $kvkeep does not exist; build it, or name another with --kvkeep"
mkdir -p -- "$out"
# shellcheck source=cmake/bootstrap.sh
source "$root/cmake/bootstrap.sh"
# shellcheck source=bench/texts.sh
source "$root/bench/texts.sh"

# shown COMMAND...: prints it, runs it.
shown() {
  printf '%s ' "$@" >&2
  printf '\n' >&2
  "$@"
}

# What is written, whole answers counted: one command for each model, question, text and cache, two of them side by side.
answers() {
  local model question text folder jobs=() all quantised
  all="full random streaming tova ams-tova ams-tova,preset=question ams-tova,variant=official expected adakv-expected ams-expected,preset=question keydiff tova,share=union"
  all+=" tova,share=union,rest=fold ams-tova,preset=question,rest=fold expected,rest=fold"
  quantised="full tova ams-tova,preset=question expected adakv-expected tova,share=union tova,share=union,rest=fold expected,rest=fold"
  for model in ${models//,/ }; do
    kvkeep_get_real_model "$model" || stop "bench/real_model.sh: cannot get the model $model"
    for question in before after; do
      folder="$out/answers/$model/$question"
      mkdir -p -- "$folder"
      for text in ${texts:-${kvkeep_texts[*]}}; do
        text="${text%,}"
        kvkeep_get_text "$text" || stop "bench/real_model.sh: cannot get the text $text"
        jobs+=("$kvkeep_real_model|$kvkeep_text|$question|bf16|$folder/$text|$all")
        jobs+=("$kvkeep_real_model|$kvkeep_text|$question|q8_0|$folder/$text@q8_0|full")
        jobs+=("$kvkeep_real_model|$kvkeep_text|$question|q4_0|$folder/$text@q4_0|$quantised")
      done
    done
  done
  export kvkeep lengths samples threads
  export -f answers_of shown
  printf '%s\0' "${jobs[@]}" | xargs -0 -n 1 -P 2 bash -euo pipefail -c 'answers_of "$0"'
}

answers_of() {
  local model text question cache to list policy policies=() budgets
  IFS='|' read -r model text question cache to list <<< "$1"
  for policy in $list; do policies+=(--policy "$policy"); done
  budgets="$((lengths / 2)),$((lengths / 4)),$((lengths / 8))"
  if [[ -s "$to.jsonl" ]]; then return; fi
  shown "$kvkeep" eval --model "$model" --weights bf16 --cache-dtype "$cache" --threads "$threads" --task ruler/niah-single-2,ruler/niah-multikey-1,text/needle --haystack "$text" \
    --length "$lengths" --samples "$samples" --batch 6 --answer-tokens 32 --question "$question" --interval 512 --budgets "$budgets" "${policies[@]}" --samples-out "$to.jsonl" --quiet -o csv > "$to.csv"
}

if [[ "$stage" == answers ]]; then
  lengths="${lengths:-1024}" samples="${samples:-6}" texts="${texts//,/ }"
  answers
  exit
fi
lengths="${lengths:-1024,2048,4096}" samples="${samples:-17}"

if [[ -z "$model" ]]; then
  kvkeep_get_real_model || stop "bench/real_model.sh: cannot get the model; name a file with --model"
  model="$kvkeep_real_model"
fi
if [[ -z "$haystack" ]]; then
  haystack="$root/.cache/prose/handbook.txt"
  if [[ ! -f "$haystack" ]]; then
    mkdir -p -- "$root/.cache/prose"
    (cd -- "$root/.cache/prose" && apt-get download debian-handbook && dpkg-deb -x debian-handbook_*.deb handbook) >&2 || stop "bench/real_model.sh: cannot get the package debian-handbook; name prose with --haystack"
    python3 "$root/bench/prose.py" "$haystack" "$root"/.cache/prose/handbook/usr/share/doc/debian-handbook/html/en-US/*.html >&2
  fi
fi

calibration="$out/calibration.safetensors"
calibrate() {
  [[ -f "$calibration" ]] || shown "$kvkeep" calibrate --model "$model" --weights bf16 --threads "$threads" --prompt-file "$haystack" --tokens 6000 --quiet --out "$calibration" > "$out/calibration.md"
}

# needles NAME LENGTH BUDGETS OPTIONS...: three tasks, their references fed.
needles() {
  local name="$1" length="$2" slots="$3"
  shift 3
  shown "$kvkeep" eval --model "$model" --weights bf16 --threads "$threads" --task ruler/niah-single-2,ruler/niah-multikey-1,text/needle --haystack "$haystack" --length "$length" --samples "$samples" \
    --batch "$batch" --score tokens --interval 512 --budgets "$slots" "$@" --samples-out "$out/$name-$length.jsonl" --quiet -o csv > "$out/$name-$length.csv.part"
  mv -- "$out/$name-$length.csv.part" "$out/$name-$length.csv"
}

budgets() { echo "$(($1 / 2)),$(($1 / 4)),$(($1 / 8))"; }  # half, a quarter and an eighth of a length

table() {
  local policies=(--policy full --policy streaming --policy random) scorers=(tova snapkv,scorer.window=16 rkv h2o expected keydiff) scorer allocator
  if [[ "$set" == all ]]; then
    calibrate
    scorers+=(rpc,scorer.window=16 knorm "triattention,calibration=$calibration")
    for allocator in pyramidkv adakv chunkkv criticalkv; do policies+=(--policy "$allocator-snapkv,scorer.window=16" --policy "$allocator-tova"); done
  fi
  for scorer in "${scorers[@]}"; do policies+=(--policy "$scorer" --policy "ams-$scorer" --policy "ams-$scorer,preset=question" --policy "ams-$scorer,variant=official"); done
  for length in ${lengths//,/ }; do needles "$1" "$length" "$(budgets "$length")" --question "$1" "${policies[@]}"; done
}

case "$stage" in
  before | after) table "$stage" ;;
  share)
    policies=()
    for scorer in tova snapkv,scorer.window=16 rkv expected keydiff; do
      for share in per_layer_per_head per_head union union_mean; do policies+=(--policy "$scorer,share=$share"); done
    done
    for length in ${lengths//,/ }; do
      for question in before after; do needles "share-$question" "$length" "$(budgets "$length")" --question "$question" --policy full "${policies[@]}"; done
    done
    ;;
  fold)
    for length in ${lengths//,/ }; do
      for question in before after; do
        needles "fold-$question" "$length" "$(budgets "$length"),$((length / 16))" --question "$question" --policy full --policy tova --policy tova,rest=fold --policy snapkv,scorer.window=16,rest=fold \
          --policy expected,rest=fold --policy sekv,recent=64
      done
    done
    ;;
  prompts)
    batch=1  # each prompt alone, for the time of its first token
    for length in ${lengths//,/ }; do
      needles prompts "$length" "$((length / 4))" --policy full --policy asl --policy asl-2pass --policy fastkv,layer=15 --policy gemfilter,layer=13 --policy pyramidinfer --policy "asl+tova,budget=$((length / 4))"
    done
    ;;
  serving)
    export OMP_NUM_THREADS="$threads" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
    program="$(dirname -- "$kvkeep")/example_serving"
    [[ -x "$program" ]] || stop "bench/real_model.sh: $program does not exist; build the target example_serving"
    serve=("$program" --model "$model" --weights bf16 --haystack "$haystack" --rate 0.3 --rounds 3)
    shown "${serve[@]}" --requests 16 --pages 560,280,140 --prefix 150:350 --prompt 256:768 --answer 80:160 \
      --policy expected,budget=384,interval=32,prefill=cut --policy expected,budget=192,interval=32,prefill=cut --csv "$out/serving.csv" | tee "$out/serving.md"
    # Longer answers, shorter prompts: what takes the time is decoding.
    shown "${serve[@]}" --requests 12 --pages 280,140 --prefix 64:128 --prompt 96:192 --answer 400:700 \
      --policy tova,budget=384,interval=32 --policy tova,budget=192,interval=32 --policy keydiff,budget=192,interval=32 --csv "$out/serving-answers.csv" | tee "$out/serving-answers.md"
    ;;
  decode)
    policies=(--policy streaming --policy random --policy tova --policy ams-tova --policy snapkv,scorer.window=16 --policy expected --policy keydiff --policy rkv)
    shown "$kvkeep" perplexity --model "$model" --weights bf16 --threads "$threads" --text "$haystack" --length 2560 --prompt 512 --texts 4 --budgets 256 "${policies[@]}" --against tova --protect-prompt \
      --quiet > "$out/perplexity.md"
    shown "$kvkeep" fidelity --model "$model" --weights bf16 --threads "$threads" --chat --prompt "Write a long story about a lighthouse." --prompt "Explain how tides work, in detail." \
      --prompt "Describe a day in a medieval town." --new-tokens 2048 --budgets 256 "${policies[@]}" --against tova --protect-prompt --quiet > "$out/fidelity.md"
    ;;
esac
