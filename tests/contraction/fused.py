#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails if the compiler fuses a multiplication with an addition in what kvkeep's headers compute.

  fused.py COMPILER FLAG...     GCC for x86-64; the flags say where headers lie

Compiles all bodies of the headers alone for a machine with fused multiply-adds, which GCC then uses wherever it may,
and reads from which line each of them comes. Allowed are those that a line asks for: Highway's MulAdd and hand-written
intrinsics, and fma(). Eigen's and the standard library's lines are theirs.
"""

import pathlib
import re
import subprocess
import sys

EXPLICIT = ("fmaintrin.h", "avx512fintrin.h")

# The pass that fuses runs from -O2 on, or under -fexpensive-optimizations, which takes half the time.
command = [
    *sys.argv[1:],
    "-std=c++20",
    "-O1",
    "-fexpensive-optimizations",
    "-march=haswell",
    "-ffp-contract=fast",
    "-g1",
    "-fkeep-inline-functions",
    "-DKVKEEP_HEADER_ONLY",
    "-S",
    "-o",
    "-",
    "-x",
    "c++",
    "-",
]
rooms = ("core", "observe", "score", "allot", "keep", "layers", "memory", "parts", "policy", "keeper")
include = pathlib.Path(__file__).parents[2] / "include"
headers = [path for room in rooms for path in sorted((include / "kvkeep" / room).glob("*.h"))]
compiled = '"kvkeep/core/compiled_only.h"'  # headers alone lack these
program = "".join(
    f"#include <{path.relative_to(include)}>\n"
    for path in headers
    if not path.name.endswith("-inl.h") and path.name != "compiled_only.h" and compiled not in path.read_text()
)
made = subprocess.run(command, input=program, text=True, capture_output=True)
if made.returncode != 0:
    sys.exit(made.stderr)

files, function, place, total, found = {}, "", ("", 0), 0, set()
for line in made.stdout.splitlines():
    if file := re.match(r'\s+\.file (\d+) "([^"]*)"(?: "([^"]*)")?', line):
        files[file[1]] = f"{file[2]}/{file[3]}" if file[3] else file[2]
    elif label := re.match(r"(_Z\w+):", line):
        function = label[1]
    elif at := re.match(r"\s+\.loc (\d+) (\d+)", line):
        place = files[at[1]], int(at[2])
    elif re.match(r"\s+vfn?m(add|sub)", line):
        total += 1
        name, number = place
        ours = "/kvkeep/" in name
        intrinsic = "/gcc/" in name and "6kvkeep" in function and "5Eigen" not in function
        if name.endswith(EXPLICIT) or not (ours or intrinsic):
            continue
        if ours and "fma(" in open(name, encoding="utf-8").read().splitlines()[number - 1]:
            continue
        found.add(f"{name}:{number}, in {function}")
print(f"{total} fused multiply-adds")
if total == 0 or found:
    sys.exit("not asked for: " + ("; ".join(sorted(found)) or "none at all were seen, so nothing is shown"))
