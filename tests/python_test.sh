#!/usr/bin/env bash
# Builds the Python package as a wheel, installs it into a fresh environment and runs tests/python there, with the torch
# of .venv (or of python3) and the newest transformers; then an engine in C over the library inside the package.
# Ends with 77 (skipped) where no Python has torch, and where pip cannot load what it builds and tests with.
#
#   tests/python_test.sh [TORCH_FOLDER]   the site-packages that have torch, .venv's unless given
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
torch="${1:-$("$python" -c 'import importlib.util, pathlib; found = importlib.util.find_spec("torch"); print(pathlib.Path(found.origin).parents[1] if found else "")')}"
if [[ -z "$torch" ]]; then
  echo "python test: skipped, since $python has no torch"
  exit 77
fi
"$python" -m venv "$scratch/venv"
own="$scratch/venv/bin/python"
echo "$torch" > "$("$own" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch_here.pth"
if ! "$own" -m pip install --quiet scikit-build-core nanobind ninja cmake numpy pytest 'transformers>=5' > "$scratch/log" 2>&1; then
  tail -n 5 "$scratch/log"
  echo "python test: skipped, since pip cannot load what it needs"
  exit 77
fi

launcher=()
if command -v ccache > /dev/null; then launcher=(-C cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
PATH="$scratch/venv/bin:$PATH" "$own" -m pip wheel --quiet --no-deps --no-build-isolation "${launcher[@]}" -w "$scratch/dist" "$source_dir/src/python" || fail "the wheel does not build"
env CC=/nonexistent CXX=/nonexistent "$own" -m pip install --quiet --no-deps "$scratch"/dist/*.whl || fail "the wheel does not install without a compiler"
ls -l "$scratch"/dist

cd -- "$scratch"
"$own" -c 'import kvkeep; assert "/venv/" in kvkeep.__file__, kvkeep.__file__; print("kvkeep", kvkeep.__version__)'
env -u LD_LIBRARY_PATH OMP_NUM_THREADS=1 "$own" -m pytest -q -p no:cacheprovider "$source_dir/tests/python" || fail "its tests fail"

mkdir engine
cat > engine/CMakeLists.txt << CMAKE
cmake_minimum_required(VERSION 3.25)
project(engine LANGUAGES C CXX)
find_package(kvkeep 0.1 REQUIRED COMPONENTS kvkeep)
add_executable(engine "$source_dir/tests/c/engine.c")
target_link_libraries(engine PRIVATE kvkeep::kvkeep)
CMAKE
cmake -S engine -B engine/build "-DCMAKE_PREFIX_PATH=$("$own" -c 'import kvkeep; print(kvkeep.cmake_dir())')" > log 2>&1 || { cat log; fail "the library inside the package is not found"; }
cmake --build engine/build > log 2>&1 || { cat log; fail "an engine in C does not build over it"; }
env -u LD_LIBRARY_PATH engine/build/engine || fail "an engine in C does not run over it"
echo "python test: the wheel installs, and its tests pass with torch $("$own" -c 'import torch; print(torch.__version__)') and transformers $("$own" -c 'import transformers; print(transformers.__version__)')"
