#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds kvkeep inside another project and runs what that project makes of it: a consumer of the headers, and, unless
# --headers is given, an engine in C over the library, which is compiled for it.
#
#   tests/subproject_test.sh add_subdirectory|FetchContent [--headers]
#   tests/subproject_test.sh minimal    without folding and files, where neither Eigen nor nlohmann_json is found; then
#                                       what it installs, and an engine over that
#   tests/subproject_test.sh fetched    with all libraries loaded, and an engine over what it installs. 77 (skipped)
#                                       without KVKEEP_TEST_DOWNLOADS=1 or FETCHED=FOLDER, which has highway, eigen,
#                                       nlohmann_json unpacked, and where they cannot be loaded
#   tests/subproject_test.sh missing    what the configure step says without them
#   tests/subproject_test.sh dist       from the source archive, which is made twice
set -euo pipefail

source_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
trap 'exit 130' INT TERM

fail() {
  printf 'subproject test: %s\n' "$*" >&2
  exit 1
}

launcher=()
if command -v ccache > /dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
cmake="${CMAKE:-cmake}"
kvkeep="$source_dir" # the folder that the other project takes

# Configures the project in $scratch/build with further options; its output is in $scratch/log.
configure() {
  rm -rf -- "$scratch/build"
  cp -r -- "$source_dir/tests/subproject/." "$scratch/project"
  "$cmake" -G Ninja -S "$scratch/project" -B "$scratch/build" "-DKVKEEP=$kvkeep" "-DKVKEEP_SOURCES=$source_dir" \
    "${launcher[@]}" "$@" > "$scratch/log" 2>&1
}

# Builds these programs, runs them, and installs.
build_and_run() {
  local program
  "$cmake" --build "$scratch/build" --target same_kernels "$@" || fail "it does not build"
  for program in "$@"; do "$scratch/build/$program" || fail "$program does not run"; done
  "$cmake" --install "$scratch/build" --prefix "$scratch/prefix" > /dev/null || fail "it does not install"
}

hidden=(-DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
minimal=(-DKVKEEP_FOLDING=OFF -DKVKEEP_FILES=OFF "${hidden[@]}")

case "$1" in
  add_subdirectory | FetchContent)
    programs=(inside_header_only)
    [[ "${2:-}" == --headers ]] || programs+=(inside_c)
    configure "-DHOW=$1" || {
      cat -- "$scratch/log"
      fail "it does not configure"
    }
    grep -q "CMAKE_BUILD_TYPE is not set" "$scratch/log" || fail "it does not say that nothing is optimised"
    build_and_run "${programs[@]}"
    [[ ! -e "$scratch/prefix/include/kvkeep" ]] || fail "kvkeep installed itself with it"
    ;;
  minimal)
    configure -DHOW=FetchContent "${minimal[@]}" -DKVKEEP_INSTALL=ON || {
      cat -- "$scratch/log"
      fail "it does not configure"
    }
    build_and_run inside_header_only inside_minimal
    headers="$scratch/prefix/include/kvkeep"
    for left_out in memory io state trace cli parts/folds.h policy/sekv.h policy/rest_options.h; do
      [[ ! -e "$headers/$left_out" ]] || fail "kvkeep/$left_out is installed, which this build leaves out"
    done
    "$cmake" -G Ninja -S "$source_dir/tests/subproject/installed" -B "$scratch/installed" "${launcher[@]}" \
      "${hidden[@]}" "-DCMAKE_PREFIX_PATH=$scratch/prefix" "-DKVKEEP_SOURCES=$source_dir" > "$scratch/log" 2>&1 ||
      {
        cat -- "$scratch/log"
        fail "a consumer does not configure against what it installed"
      }
    "$cmake" --build "$scratch/installed" || fail "a consumer does not build against what it installed"
    "$scratch/installed/minimal" || fail "a consumer of what it installed does not run"
    if command -v pkg-config > /dev/null; then
      flags="$(PKG_CONFIG_PATH="$(dirname "$(find "$scratch/prefix" -name kvkeep.pc)")" pkg-config --cflags kvkeep)"
      [[ "$flags" == *-DKVKEEP_FILES=0* && "$flags" == *-DKVKEEP_FOLDING=0* ]] ||
        fail "kvkeep.pc does not say what is left out: $flags"
    fi
    ;;
  fetched)
    if [[ -z "${FETCHED:-}" && -z "${KVKEEP_TEST_DOWNLOADS:-}" ]]; then
      echo "subproject test: skipped; set KVKEEP_TEST_DOWNLOADS=1 to load the libraries, or FETCHED=FOLDER"
      exit 77
    fi
    given=()
    if [[ -n "${FETCHED:-}" ]]; then
      for name in highway eigen nlohmann_json; do
        given+=("-DFETCHCONTENT_SOURCE_DIR_${name^^}=$FETCHED/$name")
      done
    fi
    hidden+=(-DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON)
    given+=(-DKVKEEP_FETCH_DEPENDENCIES=ON -DKVKEEP_INSTALL=ON)
    configure -DHOW=add_subdirectory "${hidden[@]}" "${given[@]}" || {
      if grep -qiE 'resolve host|connect to|timeout was reached|each download failed' "$scratch/log"; then
        echo "subproject test: skipped, since the libraries cannot be loaded here"
        exit 77
      fi
      cat -- "$scratch/log"
      fail "it does not configure"
    }
    build_and_run inside_header_only inside_c
    "$cmake" -G Ninja -S "$source_dir/cmake/ports/conan/test_package" -B "$scratch/installed" "${hidden[@]}" \
      "-DCMAKE_PREFIX_PATH=$scratch/prefix" > "$scratch/log" 2>&1 || {
      cat -- "$scratch/log"
      fail "an engine does not configure against what it installed"
    }
    "$cmake" --build "$scratch/installed" || fail "an engine does not build against what it installed"
    "$scratch/installed/engine" || fail "an engine over what it installed does not run"
    ;;
  missing)
    for package in hwy:libhwy-dev Eigen3:libeigen3-dev nlohmann_json:nlohmann-json3-dev; do
      if configure -DHOW=add_subdirectory "-DCMAKE_DISABLE_FIND_PACKAGE_${package%:*}=ON"; then
        fail "it configures without ${package%:*}"
      fi
      said="$(tr -s ' \n' ' ' < "$scratch/log")"
      [[ "$said" == *"apt-get install ${package#*:}"* && "$said" == *-DKVKEEP_FETCH_DEPENDENCIES=ON* ]] || {
        cat -- "$scratch/log"
        fail "it does not say what to do without ${package%:*}"
      }
    done
    ;;
  dist)
    [[ -d "$source_dir/.git" || -f "$source_dir/.git" ]] || {
      echo "subproject test: skipped, since this is no clone"
      exit 77
    }
    version="$(sed -n 's/^project(kvkeep VERSION \([0-9.]*\).*/\1/p' "$source_dir/CMakeLists.txt")"
    for copy in one two; do
      mkdir -p "$scratch/$copy"
      (cd -- "$scratch/$copy" &&
        "$cmake" "-DSOURCE=$source_dir" "-DSTEM=kvkeep-$version" -P "$source_dir/cmake/KvkeepDist.cmake") 2>&1 | head -1
    done
    archive="$scratch/one/kvkeep-$version.tar.gz"
    cmp -- "$archive" "$scratch/two/kvkeep-$version.tar.gz" || fail "the archive is another one each time"
    [[ "$(stat -c %s "$archive")" -lt 2000000 ]] || fail "the archive has 2 MB or more"
    tar -xzf "$archive" -C "$scratch"
    kvkeep="$scratch/kvkeep-$version"
    for folder in tests bench .ci examples/lab; do
      [[ ! -e "$kvkeep/$folder" ]] || fail "the archive has $folder"
    done
    # By itself, as a packager builds it; the library of the subproject is the minimal one.
    "$cmake" -G Ninja -S "$kvkeep" -B "$scratch/alone" -DKVKEEP_TORCH=OFF "${launcher[@]}" > "$scratch/log" 2>&1 || {
      cat -- "$scratch/log"
      fail "the archive does not configure"
    }
    "$cmake" --build "$scratch/alone" || fail "the archive does not build"
    "$cmake" --install "$scratch/alone" --prefix "$scratch/prefix" > /dev/null || fail "the archive does not install"
    "$scratch/prefix/bin/kvkeep" policies > /dev/null || fail "its command does not run"
    "${CXX:-c++}" -std=c++20 -fsyntax-only -I "$scratch/prefix/include" "$source_dir/tests/consumer/main.cpp" ||
      fail "its headers do not compile"
    ;;
  *) fail "unknown way '$1'; allowed add_subdirectory, FetchContent, minimal, fetched, missing, dist" ;;
esac
echo "subproject test: kvkeep inside another project, $1"
