#!/usr/bin/env bash
# Formats the C++ and CUDA sources as .clang-format says. See --help.
set -euo pipefail

usage() {
  cat << 'TEXT'
Formats the C++ and CUDA sources as .clang-format says.

  bash tests/format.sh            writes
  bash tests/format.sh --check    writes nothing; exit status 1 and the places where one differs

Another version of clang-format breaks lines elsewhere, so this one is taken, installed into .cache once: clang-format 19.1.7.
TEXT
}

mode=(-i)
case "${1:-}" in
  "") ;;
  --check) mode=(--dry-run --Werror) ;;
  --help | -h) usage; exit 0 ;;
  *) echo "tests/format.sh: unknown option; given '$1'; allowed --check --help" >&2; exit 2 ;;
esac

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
version=19.1.7
folder=".cache/clang-format-$version"
if [[ ! -x "$folder/bin/clang-format" ]]; then
  python=python3
  if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi
  echo "kvkeep: loading clang-format $version (2 MB) into $folder" >&2
  "$python" -m pip install --quiet --disable-pip-version-check --target "$folder" "clang-format==$version" >&2
fi
export PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"
git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' '*.c' | xargs -0 -n 20 -P "$(nproc)" "$folder/bin/clang-format" "${mode[@]}"
