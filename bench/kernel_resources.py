#!/usr/bin/env python3
"""What each CUDA kernel takes of a multiprocessor: registers, spills, shared memory, by chip, as ptxas says it.

Needs nvcc, no GPU. Writes a Markdown table; docs/cuda.md holds the last one.

    bench/kernel_resources.py                   print the table
    bench/kernel_resources.py --write FILE      put the table between the marks in FILE
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "--fmad=false", "--Werror=all-warnings", "-O3", f"-I{ROOT / 'include'}", f"-I{ROOT / 'cuda'}"]
MARKS = ("<!-- kernel resources: begin -->", "<!-- kernel resources: end -->")


def find_nvcc():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        sys.exit("kernel_resources: there is no nvcc on PATH or in CUDA_HOME; allowed any from CUDA 12.4 on")
    return nvcc


def resources(nvcc, source, chip):
    """[(kernel, registers, spilled bytes, static shared bytes)] of one file on one chip."""
    done = subprocess.run([nvcc, *FLAGS, f"-arch={chip}", "-cubin", "-Xptxas", "-v", "-o", os.devnull, str(source)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"kernel_resources: nvcc failed on {source.name} for {chip}:\n{done.stderr}")
    found, name, spilled = [], None, 0
    for line in done.stderr.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name, spilled = entry[1], 0
        elif spill := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(spill[1]) + int(spill[2])
        elif (used := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+) bytes smem", line)
            found.append((name, int(used[1]), spilled, int(shared[1]) if shared else 0))
            name = None
    return found


def readable(names):
    """Names as the source has them, without namespaces and parameters."""
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
    out = []
    for name in plain:
        name = re.sub(r"\(anonymous namespace\)::|kvkeep::cuda::|kvkeep::|void ", "", name)
        out.append(re.sub(r"\(RowBodyArguments.*$|\((?!.*>).*$", "", name))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Needs nvcc and c++filt, no GPU.")
    parser.add_argument("--chips", nargs="+", default=["sm_80", "sm_90"], help="default: sm_80 sm_90")
    parser.add_argument("--write", metavar="FILE", type=pathlib.Path, help="replace the table between the marks in FILE")
    options = parser.parse_args()

    nvcc = find_nvcc()
    sources = sorted((ROOT / "cuda").glob("*.cu"))
    rows = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {(source, chip): pool.submit(resources, nvcc, source, chip) for source in sources for chip in options.chips}
        for (source, chip), job in jobs.items():
            found = job.result()
            for (_, registers, spilled, shared), name in zip(found, readable([f[0] for f in found])):
                rows.setdefault((source.name, name), {})[chip] = (registers, spilled, shared)

    lines = ["| file | kernel | " + " | ".join(f"{c}: registers | spilled | shared, bytes" for c in options.chips) + " |",
             "|---|---|" + "---:|---:|---:|" * len(options.chips)]
    for (source, name), by_chip in sorted(rows.items()):
        numbers = " | ".join("{} | {} | {}".format(*by_chip[c]) if c in by_chip else "- | - | -" for c in options.chips)
        lines.append(f"| `{source}` | `{name}` | {numbers} |")
    table = "\n".join(lines)
    print(table)

    if options.write:
        text = options.write.read_text()
        if not all(mark in text for mark in MARKS):
            sys.exit(f"kernel_resources: {options.write} lacks the marks {' and '.join(MARKS)}")
        head, rest = text.split(MARKS[0])
        options.write.write_text(f"{head}{MARKS[0]}\n{table}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
