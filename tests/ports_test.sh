#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tries the recipes of cmake/ports with the libraries of this system: Conan's with Conan 2 if it is installed; the
# commands of vcpkg's and conda's without their tools, which load everything else they need.
#
#   tests/ports_test.sh [conan|vcpkg|conda]...
set -euo pipefail

source_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
trap 'exit 130' INT TERM

fail() {
  printf 'ports test: %s\n' "$*" >&2
  exit 1
}

# Builds and runs the engine of Conan's test package against an installed kvkeep.
consume() {
  cmake -G Ninja -S "$source_dir/cmake/ports/conan/test_package" -B "$1-engine" "-DCMAKE_PREFIX_PATH=$1" > /dev/null ||
    fail "an engine does not configure against $1"
  cmake --build "$1-engine" || fail "an engine does not build against $1"
  "$1-engine/engine" || fail "an engine over $1 does not run"
}

try_conan() {
  local program
  program="$(type -P conan)" || {
    echo "ports test: no Conan here (pip install conan), so its recipe was not tried"
    return
  }
  cat > "$scratch/profile" << PROFILE
[settings]
os=Linux
arch=$(uname -m | sed 's/aarch64/armv8/')
compiler=gcc
compiler.version=$("${CXX:-g++}" -dumpversion | cut -d. -f1)
compiler.libcxx=libstdc++11
compiler.cppstd=20
build_type=Release
[platform_requires]
highway/1.0.3
eigen/3.4.0
nlohmann_json/3.11.2
[conf]
tools.cmake.cmaketoolchain:generator=Ninja
PROFILE
  CONAN_HOME="$scratch/conan" "$program" create "$tree/cmake/ports/conan" -pr:a "$scratch/profile" --no-remote \
    -o 'kvkeep/*:shared=True' -o 'kvkeep/*:folding=False' -o 'kvkeep/*:files=False' || fail "Conan's recipe fails"
}

# The portfile under CMake, over stand-ins for vcpkg's functions that do what those do on Linux.
try_vcpkg() {
  cat > "$scratch/vcpkg.cmake" << CMAKE
cmake_minimum_required(VERSION 3.22)
set(CURRENT_PORT_DIR "$source_dir/cmake/ports/vcpkg")
set(CURRENT_PACKAGES_DIR "$scratch/vcpkg")
function(run)
  execute_process(COMMAND \${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(vcpkg_check_features)
  cmake_parse_arguments(arg "" "OUT_FEATURE_OPTIONS" "FEATURES" \${ARGN})
  set(options "")
  while(arg_FEATURES)
    list(POP_FRONT arg_FEATURES feature option)
    list(FIND FEATURES "\${feature}" place)
    if(place EQUAL -1)
      list(APPEND options "-D\${option}=OFF")
    else()
      list(APPEND options "-D\${option}=ON")
    endif()
  endwhile()
  set(\${arg_OUT_FEATURE_OPTIONS} "\${options}" PARENT_SCOPE)
endfunction()
function(vcpkg_cmake_configure)
  cmake_parse_arguments(arg "" "SOURCE_PATH" "OPTIONS" \${ARGN})
  run("\${CMAKE_COMMAND}" -G Ninja -S "\${arg_SOURCE_PATH}" -B "$scratch/vcpkg-build" -DCMAKE_BUILD_TYPE=Release
      "-DCMAKE_INSTALL_PREFIX=\${CURRENT_PACKAGES_DIR}" -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF
      \${arg_OPTIONS})
endfunction()
function(vcpkg_cmake_install)
  run("\${CMAKE_COMMAND}" --build "$scratch/vcpkg-build")
  run("\${CMAKE_COMMAND}" --install "$scratch/vcpkg-build")
endfunction()
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(arg "" "CONFIG_PATH" "" \${ARGN})
  if(NOT EXISTS "\${CURRENT_PACKAGES_DIR}/\${arg_CONFIG_PATH}/kvkeepConfig.cmake")
    message(FATAL_ERROR "\${arg_CONFIG_PATH} has no kvkeepConfig.cmake")
  endif()
endfunction()
function(vcpkg_fixup_pkgconfig)
endfunction()
function(vcpkg_install_copyright)
  cmake_parse_arguments(arg "" "" "FILE_LIST" \${ARGN})
  run("\${CMAKE_COMMAND}" -E copy \${arg_FILE_LIST} "\${CURRENT_PACKAGES_DIR}/share/kvkeep/copyright")
endfunction()
include("\${CURRENT_PORT_DIR}/portfile.cmake")
CMAKE
  python3 -m json.tool "$source_dir/cmake/ports/vcpkg/vcpkg.json" > /dev/null || fail "vcpkg.json is not JSON"
  mkdir -p "$scratch/vcpkg/share/kvkeep"
  cmake -DFEATURES=core -P "$scratch/vcpkg.cmake" || fail "vcpkg's portfile fails"
  [[ -s "$scratch/vcpkg/share/kvkeep/copyright" ]] || fail "vcpkg's port has no copyright"
  consume "$scratch/vcpkg"
}

try_conda() {
  (cd -- "$tree" && PREFIX="$scratch/conda" CPU_COUNT=2 bash cmake/ports/conda/build.sh) ||
    fail "conda's script fails"
  "$scratch/conda/bin/kvkeep" policies > /dev/null || fail "the command of conda's package does not run"
  consume "$scratch/conda"
}

# Conan builds its test package, and conda's script the library, within the sources.
tree="$scratch/tree"
mkdir -- "$tree"
cp -r -- "$source_dir"/{CMakeLists.txt,LICENSE,cmake,include,src} "$tree"

[[ $# -gt 0 ]] || set -- conan vcpkg conda
for tool in "$@"; do
  case "$tool" in
    conan | vcpkg | conda) "try_$tool" ;;
    *) fail "unknown tool '$tool'; allowed conan, vcpkg, conda" ;;
  esac
  echo "ports test: $tool done"
done
