#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formats the tracked sources within 120 columns. See --help.
set -euo pipefail

packages=(clang-format==19.1.7 ruff==0.17.6 shfmt-py==4.2.0 gersemi==0.29.2)

usage() {
  cat << TEXT
Formats the tracked C++, CUDA, Python, shell and CMake sources within 120 columns.

  bash tests/format.sh            writes
  bash tests/format.sh --check    writes nothing; exit status 1 and the places or files that differ

Other versions break lines elsewhere, so these are taken, installed into .cache once:
${packages[*]}. The style of C++ is in .clang-format.
TEXT
}

cxx=(-i) python=() shell=(--write) cmake=(--in-place)
case "${1:-}" in
  "") ;;
  --check) cxx=(--dry-run --Werror) python=(--check --output-format concise) shell=(--list) cmake=(--check) ;;
  --help | -h)
    usage
    exit 0
    ;;
  *)
    echo "tests/format.sh: unknown option; given '$1'; allowed --check --help" >&2
    exit 2
    ;;
esac

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
folder=.cache/formatters
if [[ "$(cat -- "$folder/packages" 2> /dev/null)" != "${packages[*]}" ]]; then
  interpreter=python3
  if [[ -x .venv/bin/python ]]; then interpreter=.venv/bin/python; fi
  echo "kvkeep: loading ${packages[*]} (20 MB) into $folder" >&2
  rm -rf -- "$folder"
  "$interpreter" -m pip install --quiet --disable-pip-version-check --target "$folder" "${packages[@]}" >&2
  echo "${packages[*]}" > "$folder/packages"
fi
export PATH="$PWD/$folder/bin:$PATH" PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"

status=0
# over COMMAND...: runs it over the files that stdin names.
over() { xargs -0 "$@" || status=1; }
over -n 20 -P "$(nproc)" clang-format "${cxx[@]}" < <(git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' '*.c')
over ruff format --quiet --isolated --no-cache --line-length 120 "${python[@]}" < <(git ls-files -z '*.py')
over shfmt -i 2 -ci -sr "${shell[@]}" < <(git ls-files -z | xargs -0 shfmt --find=0) # by suffix or first line
over gersemi --safe --no-warn-about-unknown-commands --no-cache --indent 2 -l 120 "${cmake[@]}" \
  --definitions cmake tests examples -- < <(git ls-files -z '*CMakeLists.txt' '*.cmake')
exit "$status"
