#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh machine to a table, a picture and a page. See --help.
set -euo pipefail

usage() {
  cat << 'TEXT'
Builds kvkeep, loads SmolLM2-135M-Instruct (98 MB, Apache-2.0), and asks it for numbers that are hidden in 1024 tokens
of this project's documentation, with the full cache and under policies that keep a quarter and an eighth of it.
Prints what share of the answers is right and which bytes are held, draws it, and writes a page that shows which tokens
of a story stayed. Where the model cannot be loaded, the small one of this repository solves tasks of its own instead.

  bash examples/demo.sh                 the table on stdout, the rest in out/demo
  bash examples/demo.sh --samples 18    narrower intervals (of each task and way to ask) [6]
  bash examples/demo.sh --model FILE    another GGUF file, or a folder
  bash examples/demo.sh --small         the small model: no download
  bash examples/demo.sh --out DIR       results in DIR

On Debian or Ubuntu, missing packages are listed and then installed first; a second run takes two minutes. Torch_DIR
chooses a LibTorch (2.7 or newer).
TEXT
}

out="" model="" samples=6 small=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --out | --model | --samples)
      [[ $# -ge 2 ]] || {
        echo "examples/demo.sh: $1: a value is missing; see --help" >&2
        exit 2
      }
      case "$1" in
        --out) out="$(realpath -m -- "$2")" ;;
        --model) model="$(realpath -m -- "$2")" ;;
        --samples) samples="$2" ;;
      esac
      shift
      ;;
    --small) small=1 ;;
    --help | -h)
      usage
      exit 0
      ;;
    *)
      echo "examples/demo.sh: unknown option; given '$1'; allowed --out DIR --model FILE --samples N --small --help" >&2
      exit 2
      ;;
  esac
  shift
done

# shellcheck source=cmake/bootstrap.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"
[[ -n "$out" ]] || out="$kvkeep_root/out/demo"

# Here kvkeep is built ("$kvkeep"), "$kvkeep_python" has matplotlib, "$out" exists.

# Exact but for tokens/s: samples come from a seed.
show_pretrained() {
  local name="${model##*/}" question cache policies policy
  [[ "$model" != "${kvkeep_real_model:-}" ]] || name=smollm2
  grep -hv '^[|!#]' "$kvkeep_root"/docs/{inside/design,start/integration,method/ams,method/memory}.md > "$out/prose.txt"
  for question in before after; do
    mkdir -p -- "$out/$name/$question"
    for cache in bf16 q4_0; do
      policies=(--policy full)
      if [[ "$cache" == bf16 ]]; then # of 4 bits nothing is dropped here
        for policy in streaming tova ams-expected,preset=question adakv-expected expected,rest=fold; do
          policies+=(--policy "$policy")
        done
      fi
      "$kvkeep" eval --model "$model" --weights bf16 --cache-dtype "$cache" --task ruler/niah-single-2,text/needle \
        --haystack "$out/prose.txt" --length 1024 --samples "$samples" --batch 6 --answer-tokens 32 --interval 512 \
        --question "$question" --budgets 256,128 "${policies[@]}" \
        --samples-out "$out/$name/$question/docs@$cache.jsonl" > /dev/null
    done
  done
  "$kvkeep_python" "$kvkeep_root/examples/lab/bench/answers.py" "$out/$name" | tee -- "$out/table.md"
  "$kvkeep_python" "$kvkeep_root/examples/lab/plots/plot_answers.py" "$out/answers.png" "$out/$name"
  "$kvkeep" generate --model "$model" --chat --prompt-file "$kvkeep_root/examples/lighthouse.txt" \
    --max-new-tokens 40 --stop --quiet --policy tova,budget=192,interval=32,recent=16,prefill=cut \
    --html "$out/kept.html" > "$out/lighthouse.txt"
  kvkeep_say "" \
    "Whole answers in percent, +- half of the 95 % interval; \"later\": the cache was cut before its question came." \
    "Answers against bytes:                         $out/answers.png" \
    "Which tokens of a story stayed, for a browser: $out/kept.html" \
    "Every answer:                                  $out/$name"
}

show_small() {
  local policy options pictured=()
  "$kvkeep" eval --model "$kvkeep_root/examples/model" --task ask,chain,needle,updates --samples 10 \
    --budgets 256,128,64 --interval 32 --recent 16 \
    --policy full --policy streaming --policy tova --policy ams-tova,preset=question --policy oracle > "$out/table.md"
  for policy in streaming tova ams-tova oracle; do
    options="budget=128,interval=32"
    [[ "$policy" == oracle ]] || options+=",recent=16"
    "$kvkeep" generate --model "$kvkeep_root/examples/model" --task ask --seed 1000001 --forced \
      --policy "$policy,$options" --retention "$out/$policy.json" --quiet > /dev/null
    pictured+=("$out/$policy.json")
  done
  "$kvkeep_python" "$kvkeep_root/examples/lab/plots/plot_retention.py" "${pictured[@]}" \
    --out "$out/retention.png" > /dev/null
  cat -- "$out/table.md"
  kvkeep_say "" \
    "What stayed, position against time:  $out/retention.png" \
    "Its numbers and the table:            $out/retention.csv, $out/table.md"
}

kvkeep_bootstrap picture
kvkeep_build release "$kvkeep_root/build/release" kvkeep_cli
kvkeep="$kvkeep_root/build/release/bin/kvkeep"
mkdir -p -- "$out"
if [[ -z "$small$model" ]]; then
  if kvkeep_get_real_model; then
    model="$kvkeep_real_model"
  else
    kvkeep_say "kvkeep: the pretrained model cannot be loaded, so the small one is shown; --model FILE names another"
  fi
fi
if [[ -n "$model" ]]; then show_pretrained; else show_small; fi
