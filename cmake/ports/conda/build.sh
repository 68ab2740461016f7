#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and installs into $PREFIX, as conda's tools call it: in the source, with the compiler's flags in CXXFLAGS.
set -euo pipefail

# shellcheck disable=SC2086  # flags
cmake -G Ninja -S . -B build/conda ${CMAKE_ARGS:-} -DCMAKE_BUILD_TYPE=Release "-DCMAKE_INSTALL_PREFIX=$PREFIX" \
  -DCMAKE_INSTALL_LIBDIR=lib -DKVKEEP_TORCH=OFF -DKVKEEP_BUILD_TESTS=OFF
cmake --build build/conda --parallel "${CPU_COUNT:-1}"
cmake --install build/conda
