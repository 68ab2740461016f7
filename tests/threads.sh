#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the library and what runs it from several threads under ThreadSanitizer, in build/threads, and runs it: keepers
# in threads of their own with pools of their own, pools that two keepers share, and an engine that plans a step while
# the one before it runs.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

cmake -S . -B build/threads -G Ninja -DCMAKE_BUILD_TYPE=None -DKVKEEP_TORCH=OFF -DKVKEEP_BUILD_CLI=OFF \
  -DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=thread" -DCMAKE_EXE_LINKER_FLAGS=-fsanitize=thread > /dev/null
cmake --build build/threads --target kvkeep_serving_tests
TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" build/threads/bin/kvkeep_serving_tests
