#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each CUDA kernel takes of a multiprocessor: registers, spills, shared memory, by chip, as ptxas says it.

Needs nvcc, no GPU. Writes a Markdown table; docs/inside/cuda.md holds the last one.

    bench/kernel_resources.py                   print the table
    bench/kernel_resources.py --write FILE      put the table between the marks in FILE
    bench/kernel_resources.py --check FILE      fail where FILE has another table, or a kernel spills, or
                                                touches memory before it waits for earlier ones; needs cuobjdump too
    bench/kernel_resources.py --instructions    print what a warp issues in the loops that bench/analytic.py counts;
                                                needs cuobjdump and nvdisasm too
"""

import argparse
import collections
import concurrent.futures
import difflib
import heapq
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "--fmad=false", "--Werror=all-warnings", "-O3", f"-I{ROOT / 'include'}", f"-I{ROOT / 'cuda'}"]
MARKS = ("<!-- kernel resources: begin -->", "<!-- kernel resources: end -->")


def find_nvcc():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        sys.exit("kernel_resources: there is no nvcc on PATH or in CUDA_HOME; allowed any from CUDA 12.4 on")
    return nvcc


def resources(nvcc, source, chip, look):
    """[(kernel, registers, spilled bytes, static shared bytes)] of one file on one chip, and, if `look`, late_waits()
    where it knows a wait."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "kernels.cubin"
        done = subprocess.run(
            [nvcc, *FLAGS, f"-arch={chip}", "-cubin", "-Xptxas", "-v", "-o", cubin, source],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"kernel_resources: nvcc failed on {source.name} for {chip}:\n{done.stderr}")
        late = [*late_waits(cubin)] if look and int(re.sub(r"\D", "", chip)) >= 90 else []
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
    return found, late


def readable(names):
    """Names as the source has them, without namespaces and parameters."""
    plain = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    out = []
    for name in plain:
        name = re.sub(r"\(anonymous namespace\)::|kvkeep::cuda::|kvkeep::|void ", "", name)
        out.append(re.sub(r"\(RowBodyArguments.*$|\((?!.*>).*$", "", name))
    return out


# Loops of a kernel, by what one time round must issue at least so often: (source, kernel, what it is, instructions).
LOOPS = [
    (
        "window_attention_matrix.cu",
        "attention_matrix_kernel<__nv_bfloat16, 4, (attention::Pass)0>",
        "16 queries by 32 slots, D = 128, statistics",
        {"HMMA": 32, "MUFU.EX2": 16},
    ),
    (
        "window_attention_matrix.cu",
        "attention_matrix_kernel<__nv_bfloat16, 4, (attention::Pass)1>",
        "16 queries by 32 slots, D = 128, columns",
        {"HMMA": 32, "MUFU.EX2": 16},
    ),
    (
        "window_attention_matrix.cu",
        "attention_matrix_kernel<__nv_bfloat16, 4, (attention::Pass)0>",
        "statistics with low numbers",
        {"HMMA": 64, "MUFU.EX2": 16},
    ),
    (
        "window_attention_matrix.cu",
        "attention_matrix_kernel<__nv_bfloat16, 4, (attention::Pass)1>",
        "columns with low numbers",
        {"HMMA": 64, "MUFU.EX2": 16},
    ),
    (
        "window_attention_matrix.cu",
        "attention_split_queries_kernel<__nv_bfloat16, 4>",
        "eight queries of a tile split, bf16",
        {"STG": 4, "SHFL": 24},
    ),
    (
        "prepare.cu",
        "prepare_kernel<__nv_bfloat16>",
        "a warp looks 32 times for a window",
        {"LD.E": 1, "LDG": 1, "VOTE": 1},
    ),
    (
        "mass_segmented.cu",
        "mass_segmented_kernel<true>",
        "three slots asked for",
        {"LDG": 6, "LD.E": 3, "STS": 9},
    ),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "five usages pooled", {"LDS": 5, "FADD": 5, "STS": 1}),
    (
        "mass_segmented.cu",
        "mass_segmented_kernel<true>",
        "two slots' mass as integers",
        {"DFMA": 8, "DMUL": 4, "F2I": 2},
    ),
    (
        "mass_segmented.cu",
        "mass_segmented_kernel<true>",
        "two slots' credit",
        {"DFMA": 8, "DMUL": 6, "DADD": 4, "STS": 2},
    ),
    (
        "mass_segmented.cu",
        "mass_segmented_kernel<true>",
        "a slot's prefix sum",
        {"DFMA": 4, "DMUL": 2, "F2F": 1, "F2I": 1, "STS": 1},
    ),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "a slot's order", {"LDG": 1, "LD.E": 1, "LDS": 1, "STS": 1}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "a probe for a cut", {"LDS": 1, "I2F": 1, "DSETP": 1}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "32 cuts that differ", {"VOTE": 1, "POPC": 2, "STS": 1}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "32 cuts merged", {"SHFL": 5, "F2I": 1, "REDUX": 1}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "32 segments split", {"SHFL": 5, "F2I": 2, "REDUX": 1}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "the share of 32 segments", {"DFMA": 7, "LDG": 1, "STS": 4}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "eight remainders compared", {"DSETP": 8, "LDS": 4}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "one bit of 64 orders", {"VOTE": 2, "POPC": 2}),
    ("mass_segmented.cu", "mass_segmented_kernel<true>", "128 slots written", {"VOTE": 4, "STG": 4}),
    (
        "compact.cu",
        "compact_kernel",
        "four words of 16 bytes moved",
        {"LD.E.128": 4, "ST.E.128": 4, "BAR": 1},
    ),
]
SHOWN = (
    "HMMA",
    "MUFU.EX2",
    "FFMA",
    "FADD",
    "DADD",
    "DMUL",
    "DFMA",
    "DSETP",
    "F2F",
    "F2I",
    "I2F",
    "LDSM",
    "LDS",
    "STS",
    "LDG",
    "LD",
    "SHFL",
    "VOTE",
    "BAR",
)


def find_disassembler(nvcc):
    """cuobjdump, with nvdisasm beside it: of a toolkit, or of Triton's wheel."""
    wheels = sorted(ROOT.glob(".venv/lib/python3*/site-packages/triton/backends/nvidia/bin"))
    for folder in [pathlib.Path(nvcc).resolve().parent, pathlib.Path("/usr/local/cuda/bin"), *wheels]:
        if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists():
            return folder / "cuobjdump"
    sys.exit("kernel_resources: there is no cuobjdump with nvdisasm beside nvcc or in Triton's wheel")


def machine_code(cuobjdump, cubin):
    """{kernel: [(address, instruction)]}"""
    text = subprocess.run(
        [cuobjdump, "-sass", cubin],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{cuobjdump.parent}:{os.environ['PATH']}"},
    ).stdout
    code, current = {}, None
    for line in text.splitlines():
        if function := re.search(r"Function : (\S+)", line):
            current = code.setdefault(function[1], [])
        elif (found := re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", line)) and current is not None:
            current.append((int(found[1], 16), re.sub(r"^@!?U?P\w+ ", "@ ", found[2])))
    return dict(zip(readable(code), code.values()))


def late_waits(cubin):
    """Kernels that touch memory before they wait for earlier kernels, ACQBULK, or do not wait."""
    for name, code in machine_code(find_disassembler(find_nvcc()), cubin).items():
        kinds = [operation(text).split(".")[0] for _, text in code]
        before = kinds[: kinds.index("ACQBULK")] if "ACQBULK" in kinds else kinds
        if {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "EXIT"} & {*before}:
            yield name


def operation(instruction):
    return instruction.removeprefix("@ ").split()[0]


def shortest_round(code, wanted):
    """The fewest instructions of one time round a loop with at least the wanted ones: {operation: times}, or None."""
    place = {address: i for i, (address, _) in enumerate(code)}
    jumps = {
        i: place[int(to[1], 16)]
        for i, (_, text) in enumerate(code)
        if (to := re.search(r"\bBRA(?!\.DIV)\S* .*?(0x[0-9a-f]+)", text)) and int(to[1], 16) in place
    }
    last = {}
    for i, to in jumps.items():
        if to <= i:
            last[to] = max(last.get(to, 0), i)
    best = None
    for head, end in last.items():
        if any(sum(kind in text for _, text in code[head : end + 1]) < times for kind, times in wanted.items()):
            continue
        queue, seen, count = [(0, 0, head, (0,) * len(wanted), ())], set(), 0
        while queue:
            length, _, i, counts, way = heapq.heappop(queue)
            if (i, counts) in seen or (best is not None and length >= best[0]):
                continue
            seen.add((i, counts))
            text = code[i][1]
            counts = tuple(min(times, c + (kind in text)) for c, (kind, times) in zip(counts, wanted.items()))
            after = [i + 1] if i not in jumps else [jumps[i]] + ([i + 1] if text.startswith("@") else [])
            # What is called are slow ways of divisions.
            if re.search(r"\b(EXIT|RET|CALL)\b", text) and not text.startswith("@"):
                after = []
            for to in after:
                # Whole stretches without a branch, as a chain of pairs.
                if to == head and counts == tuple(wanted.values()):
                    best = (length + 1, (i, way))
                elif head <= to <= end:
                    count += 1
                    heapq.heappush(queue, (length + 1, count, to, counts, (i, way)))
    if best is None:
        return None
    found, way = collections.Counter(), best[1]
    while way:
        found[operation(code[way[0]][1])] += 1
        way = way[1]
    return found


def print_instructions(nvcc, chips):
    cuobjdump = find_disassembler(nvcc)
    for chip in chips:
        compiled = {}
        for source, kernel, what, wanted in LOOPS:
            if source not in compiled:
                with tempfile.TemporaryDirectory() as folder:
                    cubin = pathlib.Path(folder) / "kernels.cubin"
                    subprocess.run(
                        [nvcc, *FLAGS, f"-arch={chip}", "-cubin", "-o", cubin, ROOT / "cuda" / source], check=True
                    )
                    compiled[source] = machine_code(cuobjdump, cubin)
            code = next(c for name, c in compiled[source].items() if name.endswith(kernel))
            found = shortest_round(code, wanted)
            if found is None:
                sys.exit(f"kernel_resources: no loop of {kernel} has {wanted} on {chip}")
            shown = {
                kind: sum(
                    n for o, n in found.items() if o.split(".")[0] == kind or o.startswith(kind + ".") or o == kind
                )
                for kind in SHOWN
            }
            print(
                f"{chip} {kernel}, {what}: {sum(found.values())} instructions,",
                ", ".join(f"{n} {kind}" for kind, n in shown.items() if n),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Needs nvcc and c++filt, no GPU.")
    parser.add_argument("--chips", nargs="+", default=["sm_80", "sm_90"], help="default: sm_80 sm_90")
    parser.add_argument(
        "--write", metavar="FILE", type=pathlib.Path, help="replace the table between the marks in FILE"
    )
    parser.add_argument(
        "--check", metavar="FILE", type=pathlib.Path, help="fail where FILE has another table, or a kernel spills"
    )
    parser.add_argument(
        "--instructions", action="store_true", help="print the instructions of the loops that are counted instead"
    )
    options = parser.parse_args()

    nvcc = find_nvcc()
    if options.instructions:
        return print_instructions(nvcc, options.chips)
    sources = sorted((ROOT / "cuda").glob("*.cu"))
    rows, wrong = {}, []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            (source, chip): pool.submit(resources, nvcc, source, chip, options.check or options.write)
            for source in sources
            for chip in options.chips
        }
        for (source, chip), job in jobs.items():
            found, late = job.result()
            wrong += [f"waits late, or not: {name} in {source.name} on {chip}" for name in late]
            for (_, registers, spilled, shared), name in zip(found, readable([f[0] for f in found])):
                rows.setdefault((source.name, name), {})[chip] = (registers, spilled, shared)

    lines = [
        "| file | kernel | " + " | ".join(f"{c}: registers | spilled | shared, bytes" for c in options.chips) + " |",
        "|---|---|" + "---:|---:|---:|" * len(options.chips),
    ]
    for (source, name), by_chip in sorted(rows.items()):
        numbers = " | ".join("{} | {} | {}".format(*by_chip[c]) if c in by_chip else "- | - | -" for c in options.chips)
        lines.append(f"| `{source}` | `{name}` | {numbers} |")
    table = "\n".join(lines)

    file = options.check or options.write
    if file is None:
        return print(table)
    text = file.read_text()
    if not all(mark in text for mark in MARKS):
        sys.exit(f"kernel_resources: {file} lacks the marks {' and '.join(MARKS)}")
    head, rest = text.split(MARKS[0])
    before, tail = rest.split(MARKS[1])
    if options.write:
        options.write.write_text(f"{head}{MARKS[0]}\n{table}\n{MARKS[1]}{tail}")
    else:
        wrong += difflib.unified_diff(before.strip().splitlines(), lines, str(file), "now", lineterm="", n=0)
    wrong += [f"spills: {name} in {source}" for (source, name), by in rows.items() if any(x[1] for x in by.values())]
    if wrong:
        sys.exit("kernel_resources: " + "\n".join(wrong))


if __name__ == "__main__":
    main()
