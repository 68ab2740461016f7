#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of llama.cpp and kvkeep in tokens/s: one model file, one machine, in turns.

    python3 examples/lab/bench/beside_llama.py --model SmolLM2.gguf
    python3 examples/lab/bench/beside_llama.py --model SmolLM2.gguf --depths 512,2048 --tokens 32 --turns 5

The model file is converted to F16 once, and both programs read that file. llama.cpp has F16 weights and an F16 cache;
kvkeep has weights and cache in --dtype. At each depth, `prefill` is a prompt of so many tokens on an empty cache, and
`decode` is --tokens tokens behind it, one at a time. Cells are medians over the turns, least and most in brackets;
`ratio` is kvkeep over llama.cpp. llama-bench warms up before it measures; kvkeep starts cold.

llama.cpp is built once, under .cache, from the source package llama-cpp-python with flags for this machine: 80 MB to
load, 5 to 10 minutes on one core. It needs cmake and a compiler. --llama names a build of your own instead.

Times mean something on a quiet machine only. The load average stands under the table.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
CACHE = ROOT / ".cache" / f"{PACKAGE}-{VERSION}"
TARGETS = ["llama-bench", "llama-quantize"]


def stop(sentence):
    sys.exit(f"beside_llama.py: {sentence}")


def run(line, why):
    """Standard output and standard error of a command that must not fail."""
    try:
        done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    except OSError as error:
        stop(f"{why}: cannot start {line[0]} ({error.strerror})")
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
        stop(f"{why}: {line[0]} ended with status {done.returncode}; the reason stands above")
    return done.stdout, done.stderr


# ---- llama.cpp


def build_llama(jobs):
    """Folder of llama-bench and llama-quantize."""
    binaries = CACHE / "build" / "bin"
    if all((binaries / target).exists() for target in TARGETS):
        return binaries
    for tool in ("cmake", "tar", "c++"):
        if shutil.which(tool) is None:
            stop(f"building llama.cpp needs {tool}; install it, or name a build with --llama")
    source = CACHE / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    print(f"Building llama.cpp of {PACKAGE} {VERSION} in {CACHE}", file=sys.stderr)
    if not (source / "CMakeLists.txt").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}", "-d", CACHE], f"loading {PACKAGE} {VERSION}")
        archive = CACHE / f"llama_cpp_python-{VERSION}.tar.gz"
        run(["tar", "-xzf", archive, "-C", CACHE, source.relative_to(CACHE)], "unpacking llama.cpp")
        archive.unlink()
    without = ["TESTS", "EXAMPLES", "SERVER", "APP", "UI"]
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]
    options += [f"-DLLAMA_BUILD_{part}=OFF" for part in without]
    log = CACHE / "build.log"
    with log.open("w") as out:
        for line in (
            ["cmake", "-S", source, "-B", CACHE / "build", *options],
            ["nice", "-n", "10", "cmake", "--build", CACHE / "build", "-j", str(jobs), "--target", *TARGETS],
        ):
            if subprocess.run([str(word) for word in line], stdout=out, stderr=subprocess.STDOUT).returncode != 0:
                stop(f"llama.cpp did not build; {log} has the reason")
    return binaries


def f16_file(llama, model):
    """The model in F16, converted once."""
    file = CACHE / (model.stem + ".F16.gguf")
    if not file.exists() or file.stat().st_mtime < model.stat().st_mtime:
        CACHE.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        line = [llama / "llama-quantize", "--allow-requantize", model, part, "F16"]
        run(line, f"converting {model} to F16")
        os.replace(part, file)
    return file


def ask_llama(llama, model, args, depth):
    """Prefill and decode tokens/s."""
    line = [llama / "llama-bench", "-m", model, "-t", args.threads, "-r", "1", "-ctk", "f16", "-ctv", "f16"]
    line += ["-fa", args.flash_attention, "-ngl", "0", "-o", "json"]

    def speed(*test):
        return json.loads(run([*line, *test], "llama-bench")[0])[0]["avg_ts"]

    return speed("-p", depth, "-n", 0), speed("-p", 0, "-n", args.tokens, "-d", depth)


# ---- kvkeep


def ask_kvkeep(model, args, depth, folder):
    """Prefill and decode tokens/s, from the line that `kvkeep generate` ends with."""
    ids = pathlib.Path(folder, f"{depth}.txt")
    ids.write_text(" ".join(str(100 + 7919 * i % 10000) for i in range(depth)))
    line = [args.kvkeep, "generate", "--model", model, "--ids-file", ids, "--policy", "full"]
    line += ["--max-new-tokens", args.tokens + 1, "--threads", args.threads]  # the first comes of the prompt
    line += ["--weights", args.dtype, "--cache-dtype", args.dtype, "-o", "json"]
    said = run(line, "kvkeep generate")[1]
    found = re.search(r"([\d.]+) tokens/s, prompt in ([\d.]+) s", said)
    if not found or float(found[2]) == 0:
        stop(f"kvkeep generate told no speed at depth {depth}: {said.strip()!r}")
    return depth / float(found[2]), float(found[1])


# ---- The table


def cell(speeds):
    return f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"


def table(args, measured):
    print("| depth | prefill: llama.cpp | kvkeep | ratio | decode: llama.cpp | kvkeep | ratio |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for depth, (theirs, ours) in measured.items():
        cells = []
        for phase in (0, 1):
            a, b = [t[phase] for t in theirs], [o[phase] for o in ours]
            cells += [cell(a), cell(b), f"{statistics.median(b) / statistics.median(a):.2f}"]
        print(f"| {depth} | {' | '.join(cells)} |")
    print(
        f"\nTokens/s, {args.threads} thread{'s' if args.threads > 1 else ''}, {args.turns} turns, {args.tokens} tokens "
        f"decoded; llama.cpp F16 with flash attention {args.flash_attention}, kvkeep {args.dtype}; load average "
        f"{args.load:.1f} before, {os.getloadavg()[0]:.1f} after."
    )


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}'; allowed whole numbers from 1")
    return int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    kvkeep = ROOT / "build/release/bin/kvkeep"
    add(
        "--model",
        required=True,
        type=pathlib.Path,
        metavar="FILE",
        help="GGUF file of a Llama, Qwen2, Qwen3 or Gemma 3",
    )
    add("--kvkeep", default=str(kvkeep), metavar="FILE", help="the command; default: build/release/bin/kvkeep")
    add(
        "--llama",
        type=pathlib.Path,
        metavar="DIR",
        help=f"folder with {' and '.join(TARGETS)}; default: they are built",
    )
    add("--depths", default="512,2048,4096,7680", metavar="N,...", help="default: %(default)s")
    add("--tokens", type=positive, default=64, metavar="N", help="tokens to decode; default: %(default)s")
    add("--turns", type=positive, default=3, metavar="N", help="default: %(default)s")
    add("--threads", type=positive, default=2, metavar="N", help="default: %(default)s")
    add("--dtype", choices=["bf16", "f16", "f32"], default="bf16", help="of kvkeep's weights and cache; default: bf16")
    add("--flash-attention", choices=["on", "off", "auto"], default="auto", help="of llama.cpp; default: auto")
    add("--jobs", type=positive, default=1, metavar="N", help="for the build of llama.cpp; default: %(default)s")
    args = parser.parse_args()
    try:
        args.depths = [positive(depth) for depth in args.depths.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--depths: {error}")
    if not args.model.is_file():
        parser.error(f"--model: '{args.model}' is not a file")
    if not os.access(args.kvkeep, os.X_OK):
        parser.error(f"--kvkeep: '{args.kvkeep}' is not there; build kvkeep_cli, or name the command")
    for target in TARGETS if args.llama else []:
        if not os.access(args.llama / target, os.X_OK):
            parser.error(f"--llama: {target} is not in '{args.llama}'; allowed a folder with {' and '.join(TARGETS)}")
    return args


def main():
    args = arguments()
    llama = args.llama or build_llama(args.jobs)
    model = f16_file(llama, args.model)
    args.load = os.getloadavg()[0]
    measured = {depth: ([], []) for depth in args.depths}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            for depth in args.depths:
                print(f"turn {turn + 1} of {args.turns}, depth {depth}", file=sys.stderr)
                measured[depth][0].append(ask_llama(llama, model, args, depth))
                measured[depth][1].append(ask_kvkeep(model, args, depth, folder))
    table(args, measured)


if __name__ == "__main__":
    main()
