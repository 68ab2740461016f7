#!/usr/bin/env bash
# A pretrained model under eviction policies. See --help.
set -euo pipefail

usage() {
  cat << 'TEXT'
Builds kvkeep, loads SmolLM2-135M-Instruct (98 MB, Apache-2.0), and lets it answer questions about a long prompt and
write a long answer with the full cache and under policies that keep a part of it. Prints a table and the texts, and
writes a page that shows what stayed.

  bash examples/real_model.sh                  ten samples per row
  bash examples/real_model.sh --samples 50     meaningful intervals
  bash examples/real_model.sh --model FILE     another GGUF file, or a folder
  bash examples/real_model.sh --out DIR        table, texts and page in DIR

On Debian or Ubuntu, missing packages are listed and then installed first. Torch_DIR chooses a LibTorch (2.7 or newer).
TEXT
}

out="" model="" samples=10
while [[ $# -gt 0 ]]; do
  case "$1" in
    --out | --model | --samples)
      [[ $# -ge 2 ]] || { echo "examples/real_model.sh: $1: a value is missing; see --help" >&2; exit 2; }
      case "$1" in
        --out) out="$(realpath -m -- "$2")" ;;
        --model) model="$(realpath -m -- "$2")" ;;
        --samples) samples="$2" ;;
      esac
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "examples/real_model.sh: unknown option; given '$1'; allowed --samples N --model FILE --out DIR --help" >&2; exit 2 ;;
  esac
  shift
done

# shellcheck source=cmake/bootstrap.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"
[[ -n "$out" ]] || out="$kvkeep_root/out/real_model"

kvkeep_bootstrap
if [[ -z "$model" ]]; then
  kvkeep_get_real_model || kvkeep_stop "kvkeep: there is no model. Get a GGUF file of a Llama, Qwen2 or Qwen3, and name it: bash examples/real_model.sh --model FILE"
  model="$kvkeep_real_model"
fi
kvkeep_build release "$kvkeep_root/build/release" kvkeep_cli
kvkeep="$kvkeep_root/build/release/bin/kvkeep"
mkdir -p -- "$out"

"$kvkeep" eval --model "$model" --task ruler/niah-single-1,text/needle --haystack "$kvkeep_root/docs/design.md" --length 1024 --samples "$samples" --batch 5 --budgets 512,256 \
  --policy full --policy streaming --policy snapkv --policy "ams-snapkv,preset=question" --policy tova --policy "ams-tova,preset=question" --policy tova,rest=fold > "$out/table.md"
cat -- "$out/table.md"

for policy in full streaming,budget=128,interval=32 tova,budget=128,interval=32; do
  printf '\n---- %s ----\n\n' "$policy"
  "$kvkeep" generate --model "$model" --chat --prompt "Explain to a child, in about three hundred words, how a bicycle stays upright." --max-new-tokens 400 --stop --policy "$policy" |
    tee "$out/${policy%%,*}.txt"
done

"$kvkeep" generate --model "$model" --chat --prompt-file "$kvkeep_root/examples/lighthouse.txt" --max-new-tokens 40 --stop --quiet \
  --policy tova,budget=192,interval=32,recent=16,prefill=cut --html "$out/kept.html" > "$out/lighthouse.txt"
kvkeep_say "" "A story of 425 tokens cut to 192, and the tokens that stayed, for a browser:  $out/kept.html"
