#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the Debian packages that a build of kvkeep needs beside LibTorch and CUDA into .deps/, unpacked, so that
# bench/gpu.sh can build on a machine without a network. Run it on a machine with one (Debian or Ubuntu; installs
# nothing), then carry .deps/ with the tree: 18 MB beside the tree's 34, below the 64 MB that such a machine may take.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
packages=(
  libgtest-dev libgmock-dev libbenchmark-dev libbenchmark1 libbenchmark1debian nlohmann-json3-dev libcli11-dev
  libhwy-dev libhwy1 libeigen3-dev libutf8proc-dev libutf8proc2 libutf8proc3
)
download="$(mktemp -d)"
trap 'rm -rf -- "$download"' EXIT
rm -rf -- .deps
mkdir .deps
for package in "${packages[@]}"; do
  apt-cache show "$package" > /dev/null 2>&1 || continue # names of libraries differ between releases
  (cd -- "$download" && apt-get download -qq "$package")
done
for archive in "$download"/*.deb; do dpkg-deb --extract "$archive" .deps; done
rm -rf -- .deps/usr/share/doc .deps/usr/src
du -sh .deps
