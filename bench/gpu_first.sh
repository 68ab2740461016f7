#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The first minutes on a machine with a GPU, in one command of at most 420 s: smoke, every test, benches, sanitizers,
# the time of each kernel of an event. Programs come from the kit that bench/gpu_kit.sh made and that was carried along
# in .gpu/. See bench/gpu.sh, of which this is the stage `first`, for results and settings.
#
#   bash bench/gpu_first.sh [OUT]
set -euo pipefail
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/gpu.sh" first "$@"
