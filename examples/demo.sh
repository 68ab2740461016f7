#!/usr/bin/env bash
# From a fresh machine to the table and the picture. See --help.
set -euo pipefail

usage() {
  cat << 'TEXT'
Builds kvkeep, then lets the shipped model solve long-decoding tasks with the full cache and under several eviction
policies and budgets. Prints one table (accuracy, cache bytes, tokens per second, events) and draws what stayed.

  bash examples/demo.sh                 the table on stdout, the picture in out/demo
  bash examples/demo.sh --out DIR       picture and table in DIR

On Debian or Ubuntu, missing packages are listed and then installed first; a second run takes seconds. Torch_DIR
chooses a LibTorch (2.7 or newer).
TEXT
}

out=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --out)
      [[ $# -ge 2 ]] || { echo "examples/demo.sh: --out: a folder is missing; see --help" >&2; exit 2; }
      out="$(realpath -m -- "$2")"
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "examples/demo.sh: unknown option; given '$1'; allowed --out DIR --help" >&2; exit 2 ;;
  esac
  shift
done

# shellcheck source=cmake/bootstrap.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"
[[ -n "$out" ]] || out="$kvkeep_root/out/demo"

# The job itself. Here kvkeep is built ("$kvkeep"), "$kvkeep_python" has matplotlib, "$out" exists.
run_the_job() {
  local model="$kvkeep_root/examples/model" policy options pictured=()

  # Exact but for the column tokens/s: samples come from a seed.
  "$kvkeep" eval --model "$model" --task ask,chain,needle,updates --samples 10 --budgets 256,128,64 --interval 32 --recent 16 \
    --policy full --policy streaming --policy tova --policy ams-tova --policy ams-tova,variant=official --policy oracle > "$out/table.md"

  for policy in streaming tova ams-tova oracle; do
    options="budget=128,interval=32"
    [[ "$policy" == oracle ]] || options+=",recent=16"
    "$kvkeep" generate --model "$model" --task ask --seed 1000001 --forced --policy "$policy,$options" --retention "$out/$policy.json" --quiet > /dev/null
    pictured+=("$out/$policy.json")
  done
  "$kvkeep_python" "$kvkeep_root/examples/plot_retention.py" "${pictured[@]}" --out "$out/retention.png" > /dev/null

  cat -- "$out/table.md"
  kvkeep_say "" "What stayed, position against time:  $out/retention.png" "Its numbers and the table:            $out/retention.csv, $out/table.md"
}

kvkeep_bootstrap picture
kvkeep_build release "$kvkeep_root/build/release" kvkeep_cli
kvkeep="$kvkeep_root/build/release/bin/kvkeep"
mkdir -p -- "$out"
run_the_job
