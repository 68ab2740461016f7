#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs kvkeep to a folder of its own and builds the ten-line consumer against that folder alone.
#
#   tests/install_test.sh BUILD_DIR [--hide-build-tree]
#
# --hide-build-tree renames BUILD_DIR while the consumer is built and run, so that nothing can reach into it. It is put
# back whatever happens.
set -euo pipefail

build_dir="$(realpath -- "$1")"
source_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
hide="${2:-}"
scratch="$(mktemp -d)"
hidden="$build_dir.hidden-by-install-test"

clean_up() {
  if [[ -d "$hidden" && ! -e "$build_dir" ]]; then mv -- "$hidden" "$build_dir"; fi
  rm -rf -- "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

fail() {
  printf 'install test: %s\n' "$*" >&2
  exit 1
}

prefix="$scratch/a prefix" # with a space: paths must survive one
cmake --install "$build_dir" --prefix "$prefix" > /dev/null

for notice in LICENSE THIRD_PARTY.md; do
  [[ -s "$prefix/share/doc/kvkeep/$notice" ]] || fail "$notice is not installed"
done

"${CXX:-c++}" -std=c++20 -fsyntax-only -I "$prefix/include" "$source_dir/tests/consumer/main.cpp" ||
  fail "the installed headers need more than themselves (LibTorch?)"

# The LibTorch that kvkeep was built with may live in the source tree (.venv); it is the one path of this machine that
# may be recorded, and binaries that need it look there.
config="$(find "$prefix" -name kvkeepConfig.cmake)"
torch_root="$(sed -n 's/^ *set(KVKEEP_TORCH_HINT "\(.*\)")$/\1/p' "$config")"
[[ -n "$torch_root" ]] || fail "$config does not record the LibTorch it was built with"

# Under an older language each begins with one sentence, and ends there. c.h is for any language.
for header in "$prefix/include/kvkeep/"{,core/,keeper/keeper}*.h; do
  said="$("${CXX:-c++}" -std=c++17 -fsyntax-only -I "$prefix/include" -I "$torch_root/include" \
    -include "$header" -x c++ /dev/null 2>&1 | grep error: || true)"
  case "$header" in
    */c.h | */c_cuda.h | */kvkeep/version.h) [[ -z "$said" ]] ;;
    */kvkeep/llama.h) ;; # begins with llama.cpp's headers
    *) [[ "$said" == *"kvkeep needs C++20: compile with -std=c++20"* && "$(wc -l <<< "$said")" -eq 2 ]] ;;
  esac || fail "$header says in C++17: $said"
done

leaks="$(find "$prefix" \( -name '*.cmake' -o -name '*.h' \) -print0 | xargs -0 sed "s|$torch_root||g" |
  grep -nF -e "$build_dir" -e "$source_dir" || true)"
[[ -z "$leaks" ]] || fail "installed files name the build or source tree: $leaks"

while IFS= read -r -d '' binary; do
  dynamic="$(readelf -d "$binary" 2> /dev/null || true)"
  runpath="$(sed -n 's/.*\(RUNPATH\|RPATH\).*\[\(.*\)\]/\2/p' <<< "$dynamic")"
  if grep -q 'NEEDED.*\[libtorch_cpu\.so' <<< "$dynamic"; then runpath="${runpath//"$torch_root"/}"; fi
  if grep -qF -e "$build_dir" -e "$source_dir" -e "$torch_root" <<< "$runpath"; then
    fail "$binary looks for libraries in the build or source tree, or for a LibTorch that it does not need: $runpath"
  fi
done < <(find "$prefix/bin" "$prefix/lib" -type f \( -perm -u+x -o -name '*.so*' \) -print0)

if [[ "$hide" == --hide-build-tree ]]; then mv -- "$build_dir" "$hidden"; fi

cp -r -- "$source_dir/tests/consumer" "$scratch/consumer"
env -u LD_LIBRARY_PATH cmake -G Ninja -S "$scratch/consumer" -B "$scratch/consumer/build" \
  -DCMAKE_BUILD_TYPE=Release "-DCMAKE_PREFIX_PATH=$prefix" | tee -- "$scratch/log" ||
  fail "the consumer does not configure"
[[ "$(grep -c 'kvkeep::torch and kvkeep::cuda are left out. LibTorch: ' "$scratch/log")" -eq 2 ]] ||
  fail "a consumer without LibTorch is not told, once each time, what it lacks"
cmake --build "$scratch/consumer/build" --target all same_kernels ||
  fail "the consumer does not build, or its own code is not what it is without kvkeep"
env -u LD_LIBRARY_PATH "$scratch/consumer/build/consumer" || fail "the consumer does not run"
env -u LD_LIBRARY_PATH "$scratch/consumer/build/consumer_fast" || fail "the consumer under -Ofast does not run"
env -u LD_LIBRARY_PATH "$scratch/consumer/build/consumer_header_only" ||
  fail "the consumer of kvkeep::header_only does not run"
if [[ -x "$scratch/consumer/build/consumer_cuda" ]]; then
  env -u LD_LIBRARY_PATH "$scratch/consumer/build/consumer_cuda" || fail "the consumer of kvkeep::cuda does not run"
fi
if cmake -DMIXED=ON "$scratch/consumer/build" > "$scratch/log" 2>&1; then
  fail "a program may link the library and headers alone"
fi
grep -q KVKEEP_IS_LINKED_OR_HEADER_ONLY "$scratch/log" || fail "who links both is not told: $(cat -- "$scratch/log")"
if command -v pkg-config > /dev/null; then
  pc="$(find "$prefix" -name kvkeep.pc -printf '%h')"
  # Alone: no package of another library is there.
  flags="$(PKG_CONFIG_LIBDIR="$pc" pkg-config --cflags --libs kvkeep)" || fail "pkg-config does not find kvkeep"
  # pkg-config escapes the space of the prefix for a shell.
  eval "${CC:-cc} -std=c99 '$source_dir/examples/c/engine.c' -o '$scratch/engine' $flags '-Wl,-rpath,${pc%/*}'" ||
    fail "an engine in C does not build with pkg-config"
  env -u LD_LIBRARY_PATH "$scratch/engine" || fail "an engine in C does not run"
  # The example that is installed, in a program without RTTI.
  eval "${CXX:-c++} -std=c++20 -fno-rtti '$prefix/share/doc/kvkeep/examples/embed.cpp' -o '$scratch/embed' $flags \
    '-Wl,-rpath,${pc%/*}'" || fail "the example of an engine does not build with pkg-config, without RTTI"
  env -u LD_LIBRARY_PATH "$scratch/embed" > /dev/null || fail "the example of an engine does not run"
else
  echo "install test: there is no pkg-config here, so kvkeep.pc was not tried"
fi
# The plug-in that is installed as an example, in the installed command where there is one.
{
  env -u LD_LIBRARY_PATH cmake -G Ninja -S "$prefix/share/doc/kvkeep/examples/plugin" -B "$scratch/plugin" \
    "-DCMAKE_PREFIX_PATH=$prefix" && cmake --build "$scratch/plugin"
} > /dev/null || fail "a plug-in does not build"
if [[ -x "$prefix/bin/kvkeep" ]]; then
  env -u LD_LIBRARY_PATH "$prefix/bin/kvkeep" policies ams-vmax --plugin "$scratch/plugin/libvmax.so" > /dev/null ||
    fail "the installed command does not load a plug-in"
  for asked in "--sh=--shape" "--dtype bf=bf16" "--policy ams-to=ams-tova"; do
    completed="$(
      # shellcheck disable=SC2016
      bash -c 'source "$1"; COMP_WORDS=("$2" plan $3) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _kvkeep
        echo "${COMPREPLY[*]}"' - \
        "$prefix/share/bash-completion/completions/kvkeep" "$prefix/bin/kvkeep" "${asked%=*}"
    )"
    [[ "$completed" == "${asked#*=}" ]] || fail "bash completes 'kvkeep plan ${asked%=*}' to '$completed'"
  done
  if command -v fish > /dev/null; then
    completed="$(PATH="$prefix/bin:$PATH" fish -N -c 'source "$argv[1]"; complete -C "kvkeep plan --dtype bf"' \
      "$prefix/share/fish/vendor_completions.d/kvkeep.fish")"
    [[ "$completed" == bf16 ]] || fail "fish completes 'kvkeep plan --dtype bf' to '$completed'"
  fi
  grep -q '^\.SH kvkeep plan$' "$prefix/share/man/man1/kvkeep.1" || fail "the manual page does not say what plan does"
fi
# The laboratory links nothing but the installed targets. Compiled quickly, for one instruction set: what it computes,
# its tests tell.
if [[ "$hide" == --hide-build-tree && -n "$(find "$prefix" -name kvkeepCommandTargets.cmake)" ]]; then
  env -u LD_LIBRARY_PATH cmake -G Ninja -S "$source_dir/examples/lab" -B "$scratch/lab" \
    -DCMAKE_BUILD_TYPE=None "-DCMAKE_CXX_FLAGS=-O0 -DHWY_COMPILE_ONLY_STATIC" "-DCMAKE_PREFIX_PATH=$prefix" \
    -DKVKEEP_BUILD_TESTS=OFF ||
    fail "the laboratory does not configure against the installed package"
  cmake --build "$scratch/lab" --target kvkeep_cli || fail "the laboratory does not build against the installed package"
  env -u LD_LIBRARY_PATH "$scratch/lab/bin/kvkeep" generate --help > /dev/null ||
    fail "the laboratory's command does not run"
fi
if [[ -x "$prefix/bin/kvkeep" ]]; then
  env -u LD_LIBRARY_PATH "$prefix/bin/kvkeep" --help > /dev/null || fail "the installed command does not run"
fi
echo "install test: consumer built and ran against the installed kvkeep alone"
