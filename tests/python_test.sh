#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the packed sources and the wheel (cmake/wheel.sh), installs the wheel into a fresh environment and runs
# tests/python and the notebook there, with the torch of .venv (or of python3) and the newest transformers; then an
# engine in C over the library inside the package.
# Ends with 77 (skipped) where no Python has torch, and where pip cannot load what it builds and tests with.
#
#   tests/python_test.sh [TORCH_FOLDER]   the site-packages that have torch, .venv's unless given
#
#   KVKEEP_TEST_MODELLED  the lib folder of a build of the tests that has libkvkeep_cuda_modelled.so: the tests of a GPU
#                         pass over the execution model, and those of attach() on what is then device memory
#   KVKEEP_TEST_KERNELS   ON: the wheel has kernels, which takes nvcc minutes; OFF unless set
#   KVKEEP_TEST_PYTHONS   further Pythons of the same version, separated by blanks, each with a torch of its own, numpy,
#                         transformers 5 and pytest: the same wheel passes its tests over each
set -euo pipefail

source_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
trap 'exit 130' INT TERM

fail() {
  printf 'python test: %s\n' "$*" >&2
  exit 1
}

python=python3
if [[ -x "$source_dir/.venv/bin/python" ]]; then python="$source_dir/.venv/bin/python"; fi
torch="${1:-$("$python" -c 'import importlib.util as u, pathlib
found = u.find_spec("torch")
print(pathlib.Path(found.origin).parents[1] if found else "")')}"
if [[ -z "$torch" ]]; then
  echo "python test: skipped, since $python has no torch"
  exit 77
fi
"$python" -m venv "$scratch/venv"
own="$scratch/venv/bin/python"
# The folder of a Python's packages.
packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
echo "$torch" > "$(packages_of "$own")/torch_here.pth"
if ! "$own" -m pip install --quiet ipykernel matplotlib nbmake numpy pytest 'transformers>=5' \
  > "$scratch/log" 2>&1; then
  tail -n 5 "$scratch/log"
  echo "python test: skipped, since pip cannot load what it needs"
  exit 77
fi

KVKEEP_CUDA="${KVKEEP_TEST_KERNELS:-OFF}" PYTHON="$python" "$source_dir/cmake/wheel.sh" "$scratch/dist" ||
  fail "there is no wheel"
"$own" -m pip install --quiet --no-deps "$scratch"/dist/*.whl || fail "the wheel does not install"
ls -l "$scratch"/dist

cd -- "$scratch"

# What an index shows, and the licences of what is compiled in.
about="$("$own" -c 'import importlib.metadata as m
one = m.distribution("kvkeep")
print(*sorted(str(f).split("licenses/")[1] for f in one.files if "licenses/" in str(f)))
told = one.read_text("METADATA")
print(one.metadata["License-Expression"], told.count("Classifier: "), "# kvkeep" in told)')"
[[ "$about" == "LICENSE cmake/THIRD_PARTY.md"$'\n'"Apache-2.0 8 True" ]] || fail "its metadata lacks something: $about"

# Nothing of the wheel links anything but itself and what every system with a C++ runtime has.
installed="$("$own" -c 'import kvkeep, pathlib; print(pathlib.Path(kvkeep.__file__).parent)')"
[[ "$installed" == "$scratch"/venv/* ]] || fail "another kvkeep is imported: $installed"
system=' libc.so.6 libm.so.6 libgcc_s.so.1 libstdc++.so.6 libpthread.so.0 libdl.so.2 librt.so.1 '
system+='ld-linux-x86-64.so.2 ld-linux-aarch64.so.1 '
while IFS= read -r -d '' binary; do
  dynamic="$(readelf -d "$binary")"
  for needed in $(sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' <<< "$dynamic"); do
    [[ "$system" == *" $needed "* || -f "$installed/lib/$needed" ]] ||
      fail "${binary#"$installed/"} links $needed, which the wheel does not hold"
  done
  runpath="$(sed -n 's/.*(\(RUNPATH\|RPATH\)).*\[\(.*\)\]/\2/p' <<< "$dynamic")"
  for folder in ${runpath//:/ }; do
    # shellcheck disable=SC2016
    [[ "$folder" == '$ORIGIN'* ]] || fail "${binary#"$installed/"} looks for libraries in $folder"
  done
  missing="$(env -u LD_LIBRARY_PATH ldd "$binary" | grep 'not found' || true)"
  [[ -z "$missing" ]] || fail "${binary#"$installed/"} does not find $missing"
done < <(find "$installed" \( -name '*.so*' -o -path '*/bin/*' \) -type f -print0)

# Where there is no compiler, nor anything else, pip installs it and what it depends on, and it runs.
"$own" -m venv "$scratch/plain"
plain() { env -u LD_LIBRARY_PATH PATH="$scratch/plain/bin" CC=/nonexistent CXX=/nonexistent "$@"; }
plain python -m pip install --quiet "$scratch"/dist/*.whl || fail "the wheel does not install without a compiler"
plain python -c 'import kvkeep; assert kvkeep.policies(); assert "torch" not in __import__("sys").modules' ||
  fail "it does not run without torch"
plain kvkeep --version || fail "its command does not run without torch"

# A plug-in over the library inside the package.
found="$("$own" -c 'import kvkeep; print(kvkeep.cmake_dir())')"
{
  cmake -S "$source_dir/examples/plugin" -B plugin "-DCMAKE_PREFIX_PATH=$found" -DCMAKE_BUILD_TYPE=Release &&
    cmake --build plugin
} > log 2>&1 || {
  cat log
  fail "a plug-in does not build over the library inside the package"
}
export KVKEEP_TEST_PLUGIN="$scratch/plugin/libvmax.so"

# over PYTHON: the tests, with the torch and the transformers that it imports.
tried=()
over() {
  env -u LD_LIBRARY_PATH OMP_NUM_THREADS=1 "$1" -m pytest -q -p no:cacheprovider "$source_dir/tests/python" ||
    fail "its tests fail over $1"
  tried+=("$("$1" -c 'import torch, transformers
print("torch", torch.__version__, "with transformers", transformers.__version__)')")
}

over "$own"
for further in ${KVKEEP_TEST_PYTHONS:-}; do
  venv="$scratch/venv-${#tried[@]}"
  "$further" -m venv "$venv"
  packages_of "$further" > "$(packages_of "$venv/bin/python")/torch_here.pth"
  "$venv/bin/python" -m pip install --quiet --no-deps "$scratch"/dist/*.whl ||
    fail "the wheel does not install over $further"
  over "$venv/bin/python"
done

# The same package over the execution model of CUDA.
if [[ -n "${KVKEEP_TEST_MODELLED:-}" ]]; then
  "$own" -m pip install --quiet nanobind > log 2>&1 || fail "there is no nanobind"
  {
    cmake -G Ninja -S "$source_dir/tests/python/package" -B modelled -DCMAKE_BUILD_TYPE=Release \
      "-DPython_EXECUTABLE=$own" "-DKVKEEP_LIBRARIES=$KVKEEP_TEST_MODELLED" &&
      cmake --build modelled
  } > log 2>&1 || {
    cat log
    fail "the package does not build over the execution model"
  }
  modelled() {
    env -u LD_LIBRARY_PATH OMP_NUM_THREADS=1 KVKEEP_CUDA_MODEL=host \
      "PYTHONPATH=$scratch/modelled:$source_dir/tests/python" "$own" -m pytest -q -p no:cacheprovider "$@"
  }
  cd -- "$source_dir/tests/python"
  modelled test_cuda.py || fail "the tests of a GPU fail over the execution model"
  modelled -p over_device test_hf.py test_pieces.py || fail "those of attach() fail where caches are on a device"
  cd -- "$scratch"
fi

# The notebook, on a model of random weights.
PYTHONPATH="$source_dir/tests/python" "$own" -m tiny_model "$scratch/tiny" > log 2>&1 || {
  cat log
  fail "there is no model for the notebook"
}
env -u LD_LIBRARY_PATH OMP_NUM_THREADS=1 IPYTHONDIR="$scratch/ipython" KVKEEP_NOTEBOOK_MODEL="$scratch/tiny" \
  "$own" -m pytest -q -p no:cacheprovider --nbmake --nbmake-timeout=300 "$source_dir/examples/kept.ipynb" ||
  fail "the notebook does not run"

mkdir engine
cat > engine/CMakeLists.txt << CMAKE
cmake_minimum_required(VERSION 3.22)
project(engine LANGUAGES C CXX)
find_package(kvkeep 0.1 REQUIRED COMPONENTS kvkeep)
add_executable(engine "$source_dir/examples/c/engine.c")
target_link_libraries(engine PRIVATE kvkeep::kvkeep)
CMAKE
cmake -S engine -B engine/build "-DCMAKE_PREFIX_PATH=$found" > log 2>&1 || {
  cat log
  fail "the library inside the package is not found"
}
cmake --build engine/build > log 2>&1 || {
  cat log
  fail "an engine in C does not build over it"
}
env -u LD_LIBRARY_PATH engine/build/engine || fail "an engine in C does not run over it"
printf 'python test: the wheel passes its tests over %s\n' "${tried[@]}"
