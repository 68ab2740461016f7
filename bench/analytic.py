#!/usr/bin/env python3
"""What an event and an observed layer of a prefill must at least take on a GPU, by counting: bytes, floating-point operations and launches of every kernel.

    bench/analytic.py                                the table
    bench/analytic.py --write docs/performance.md    replaces the part between the markers

Nothing here is measured. The counts are those of the kernels in cuda/, bytes that must come from or go to the GPU's memory (what stays in its caches between two passes is not counted),
for bf16 caches. Times are bytes over a copy bandwidth and operations over a matrix rate, whichever is longer; where one block works on a prompt, also what passes through its
multiprocessor over a rate of one. The rates are assumptions that stand in the text.
"""

import argparse
import pathlib
import re
import sys

BANDWIDTH = 4.3e12  # bytes a second that a copy reads and writes
MATRIX = 650e12  # bf16 operations a second
ONE = 100e9  # bytes a second between the caches and one multiprocessor
SECTOR = 32  # bytes that a scattered write occupies
LAYER = {"qwen7b": 233e6, "llama8b": 218e6}  # weights of one layer
SHAPES = {"qwen7b": (28, 28, 4, 128), "llama8b": (32, 32, 8, 128)}
BEGIN, END = "<!-- analytic: begin -->", "<!-- analytic: end -->"


def kernels(shape, batch, length, budget, window=32):
    """(name, launches, bytes, operations) of an `ams-tova` event over all layers."""
    layers, query_heads, kv_heads, dim = shape
    rows, groups = layers * kv_heads * batch, layers * batch
    keys = rows * length * dim * 2
    slots = rows * length
    queries = groups * query_heads * window * dim
    products = 2 * groups * query_heads * window * length * dim
    return [
        ("prepare: queries turned, windows, newest positions", 1, queries * (2 + 4) + rows * (length - budget) * 4, queries * 4),
        ("window attention, statistics", 1, keys + queries * 4, 2 * products),  # each query is the sum of two bf16 numbers
        ("window attention, columns", 1, keys + queries * 4 + slots * 8, 2 * products),
        ("TOVA, mean over the layer's heads", 1, slots * 8, slots),
        ("AMS: mass, credit, segments, quotas, selection", 1, slots * (4 + 4 + 4 + 4 + 8 + 8 + 4) + rows * budget * 4, slots * 20),
        ("compaction of K, V and columns", 1, rows * budget * (2 * dim * 2 * 2 + 4 * 4), 0),
    ]


def prefill_kernels(shape, tokens, select=2048, window=32, observed=8):
    """(name, launches, bytes, operations, bytes through one multiprocessor) of one layer of one prompt that is observed."""
    _, query_heads, kv_heads, dim = shape
    keys = kv_heads * tokens * dim * 2
    queries = query_heads * window * dim
    products = 2 * query_heads * window * tokens * dim
    sums = kv_heads * tokens * 4
    ranks = tokens * 4
    # Four passes over entries of 8 bytes, each read twice; the first reads scores of 4.
    sorting = tokens * (2 * (4 + 3 * 8) + 4 * SECTOR)
    return [
        ("prepare, rows of the window", 2, queries * (2 + 4), queries, 0),
        ("prompt scores: attention, statistics", 1, keys + queries * 4, 2 * products, 0),
        ("prompt scores: attention, sums", 1, keys + queries * 4 + sums, 2 * products, 0),
        ("prompt scores: pooling, sums over heads", 1, 2 * sums + ranks, sums, 0),
        ("ranks", 1, 2 * ranks, 0, sorting),
        (f"layer selector: {observed} layers of ranks", 2, observed * ranks, observed * tokens * 3, 0),
        ("where it selects: narrow, gather hidden states", 2, ranks + select * (4 + 2 * query_heads * dim * 2), 0, ranks),
    ]


def floor_bytes(shape, batch, length, budget):
    """One reading of the keys, one reading and writing of what stays."""
    layers, _, kv_heads, dim = shape
    rows = layers * kv_heads * batch
    return rows * length * dim * 2 + rows * budget * 2 * dim * 2 * 2


def microseconds(nbytes, operations, through_one=0):
    return max(nbytes / BANDWIDTH, operations / MATRIX, through_one / ONE) * 1e6


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def prefill_table():
    cases = [("qwen7b", 32768), ("llama8b", 32768), ("llama8b", 131072)]
    lines = [
        f"One observed layer of one prompt on its way to 2048 tokens, a window of 32, 8 layers compared; one multiprocessor at {ONE / 1e9:.0f} GB/s where a block has the prompt. Below: the products of the",
        "layer itself, weights and causal attention.",
        "",
        "| kernel of an observed layer | launches | MB, `qwen7b` 32k | GFLOP | us | MB, `llama8b` 32k | GFLOP | us | MB, `llama8b` 128k | GFLOP | us |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    counted = [prefill_kernels(SHAPES[name], tokens) for name, tokens in cases]
    for i, (name, launches, *_) in enumerate(counted[0]):
        cells = "".join(f" {number(c[i][2] / 1e6)} | {number(c[i][3] / 1e9)} | {number(microseconds(*c[i][2:]))} |" for c in counted)
        lines.append(f"| {name} | {launches} |{cells}")
    cells = "".join(f" {number(sum(k[2] for k in c) / 1e6)} | {number(sum(k[3] for k in c) / 1e9)} | {number(sum(microseconds(*k[2:]) for k in c))} |" for c in counted)
    lines.append(f"| **all** | {sum(k[1] for k in counted[0])} |{cells}")
    cells = ""
    for name, tokens in cases:
        _, query_heads, _, dim = SHAPES[name]
        operations = 2 * tokens * LAYER[name] + 2 * tokens * tokens * query_heads * dim
        cells += f" | {number(operations / 1e9)} | {number(microseconds(0, operations))} |"
    lines.append(f"| the layer's own products | |{cells}")
    return "\n".join(lines)


def table():
    lines = [
        f"Counted, not measured: `bench/analytic.py` writes this from the kernels' shapes, for bf16 caches and 1536 slots cut to 1024, at an assumed {BANDWIDTH / 1e12:.1f} TB/s of copying",
        f"and {MATRIX / 1e12:.0f} TFLOP/s of bf16 (an H200). us: bytes or operations at these rates, whichever takes longer; launches and what a kernel waits for come on top.",
        "",
        "| kernel of an `ams-tova` event | launches | MB, `qwen7b` B=1 | GFLOP | us | MB, `llama8b` B=1 | GFLOP | us | MB, `llama8b` B=32 | GFLOP | us |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    cases = [("qwen7b", 1), ("llama8b", 1), ("llama8b", 32)]
    counted = [kernels(SHAPES[name], batch, 1536, 1024) for name, batch in cases]
    for i, (name, launches, _, _) in enumerate(counted[0]):
        cells = "".join(f" {number(c[i][2] / 1e6)} | {number(c[i][3] / 1e9)} | {number(microseconds(c[i][2], c[i][3]))} |" for c in counted)
        lines.append(f"| {name} | {launches} |{cells}")
    cells = "".join(
        f" {number(sum(k[2] for k in c) / 1e6)} | {number(sum(k[3] for k in c) / 1e9)} | {number(sum(microseconds(k[2], k[3]) for k in c))} |" for c in counted
    )
    lines.append(f"| **all** | {sum(k[1] for k in counted[0])} |{cells}")
    cells = "".join(
        f" {number(floor_bytes(SHAPES[name], batch, 1536, 1024) / 1e6)} | | {number(microseconds(floor_bytes(SHAPES[name], batch, 1536, 1024), 0))} |" for name, batch in cases
    )
    lines.append(f"| floor: keys once, kept rows read and written once | |{cells}")
    lines += ["", prefill_table()]
    return "\n".join(lines)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", type=pathlib.Path, metavar="FILE", help="replace the part of FILE between the markers")
    given = arguments.parse_args()
    if given.write is None:
        print(table())
        return 0
    text = given.write.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        print(f"analytic.py: {given.write} has no markers {BEGIN} and {END}", file=sys.stderr)
        return 2
    given.write.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
