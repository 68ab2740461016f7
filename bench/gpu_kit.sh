#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds here what runs on a machine with a GPU that has neither a network nor Debian's packages: tests, benches, the
# command and kvkeep's libraries for one chip, which keep the names of their functions, with the few libraries that
# LibTorch does not bring.
#
#   bash bench/gpu_kit.sh             build/gpu-kit -> .gpu/kit.tar.xz, below 15 MB; tried from a foreign folder
#   bash bench/gpu_kit.sh --sources   the checksum of the sources that a kit of this tree would have
#
# Then carry the tree and .gpu/ to that machine and run bench/gpu_first.sh there. It needs LibTorch of the same version
# (python3 with torch 2.11, CUDA 13), and a glibc and libstdc++ no older than those of this machine.
#   KVKEEP_GPU_ARCH   the chip, 90-real unless given
set -euo pipefail

readonly most_bytes=15000000
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

sources() {
  find cuda src include tests bench cmake CMakeLists.txt -type f \
    \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt -o -name '*.cmake' \) \
    -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16
}

case "${1:-}" in
  "") ;;
  --sources)
    sources
    exit
    ;;
  --help | -h)
    sed -n '3,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
  *)
    echo "gpu_kit.sh: unknown option; given '$1'; allowed --sources --help" >&2
    exit 2
    ;;
esac

# shellcheck source=cmake/bootstrap.sh
source cmake/bootstrap.sh
kvkeep_bootstrap
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
command -v nvcc > /dev/null || kvkeep_stop "gpu_kit.sh: there is no nvcc on PATH nor in CUDA_HOME"
# shellcheck disable=SC2034  # kvkeep_build reads it
kvkeep_configure_options=(
  -DKVKEEP_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=${KVKEEP_GPU_ARCH:-90-real}"
  -DKVKEEP_BUILD_EXAMPLES=OFF -DKVKEEP_BUILD_CUDA_MODEL=OFF
)
programs=(kvkeep_gpu_tests kvkeep_gpu_bench kvkeep)
kvkeep_build release "$kvkeep_root/build/gpu-kit" kvkeep_gpu_tests kvkeep_gpu_bench kvkeep_cli

kit="$(mktemp -d)"
trap 'rm -rf -- "$kit"' EXIT
mkdir -p "$kit/kit/bin" "$kit/kit/lib"
for program in "${programs[@]}"; do strip --strip-debug -o "$kit/kit/bin/$program" "build/gpu-kit/bin/$program"; done
# Ours, and what the system has of the libraries that LibTorch and a bare machine lack.
ldd "${programs[@]/#/build/gpu-kit/bin/}" |
  awk '$2 == "=>" && $1 ~ /^lib(kvkeep|hwy|utf8proc)/ { print $1, $3 }' | sort -u |
  while read -r name path; do strip -o "$kit/kit/lib/$name" "$path"; done
mkdir -p "$kit/kit/generated/kvkeep" # for the Python package, which is compiled there
cp build/gpu-kit/generated/kvkeep/version.h "$kit/kit/generated/kvkeep/"
printf '%s%s, sm_%s, %s\n%s\n' "$(git rev-parse --short HEAD)" \
  "$([[ -z "$(git status --porcelain)" ]] || echo ' and changes')" \
  "${KVKEEP_GPU_ARCH:-90-real}" "$(date -u +%Y-%m-%dT%H:%MZ)" "$(sources)" > "$kit/kit/COMMIT"

mkdir -p .gpu
tar -C "$kit/kit" -cJf .gpu/kit.tar.xz .
bytes="$(stat -c %s .gpu/kit.tar.xz)"
echo ".gpu/kit.tar.xz: $bytes bytes, $(du -sb "$kit/kit" | cut -f 1) unpacked, $(head -n 1 "$kit/kit/COMMIT")"
[[ $bytes -le $most_bytes ]] || kvkeep_stop "gpu_kit.sh: allowed up to $most_bytes bytes"

# From another folder, with nothing but the kit and LibTorch.
python=python3
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi
torch="$("$python" -c 'import importlib.util as u, os; print(os.path.dirname(u.find_spec("torch").origin))')"
mkdir "$kit/foreign"
tar -C "$kit/foreign" -xJf .gpu/kit.tar.xz
cd "$kit/foreign"
export LD_LIBRARY_PATH="$PWD/lib:$torch/lib"
strays="$(ldd bin/* | awk -v torch="$(dirname -- "$torch")" '
  /not found/ || ($2 == "=>" && $3 !~ "^/(lib|usr/lib)" && index($3, torch) != 1 && $3 !~ "/foreign/") { print }')"
[[ -z $strays ]] ||
  kvkeep_stop "gpu_kit.sh: from a foreign folder these are not found, or found in the build folder:" "$strays"
bin/kvkeep_gpu_tests --gtest_list_tests |
  awk '/^[^ ]/ { suites++ } /^  / { tests++ }
    END { print "from a foreign folder: " tests " tests in " suites " suites" }'
echo "from a foreign folder: $(bin/kvkeep_gpu_bench --list | wc -l) cases of benches"
echo "needs $(objdump -T bin/* lib/* 2> /dev/null | grep -oE '(GLIBC|GLIBCXX)_[0-9.]+' | sort -Vu |
  awk -F_ '{ newest[$1] = $0 } END { for (k in newest) printf "%s ", newest[k] }')or newer"
