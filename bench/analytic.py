#!/usr/bin/env python3
"""What an event and an observed layer of a prefill must at least take on a GPU, by counting: bytes, floating-point operations, instructions and launches of every kernel.

    bench/analytic.py                                the tables
    bench/analytic.py --write docs/performance.md    replaces the part between the markers

Nothing here is measured. The counts are those of the kernels in cuda/, for bf16 caches and queries in bf16 after RoPE. A kernel takes what is longest of its bytes, its operations and its
instructions over the rates below, more where its blocks do not fill the last round of multiprocessors, and the memory's latency for every access that waits for another one. Instructions of
the attention's loops: bench/kernel_resources.py --instructions. The rates are assumptions that stand in the text.
"""

import argparse
import dataclasses
import math
import pathlib
import re
import sys

# An H100.
BANDWIDTH = 3.0e12  # bytes a second that a copy reads and writes
NEAR = 5.5e12  # bytes a second from L2 to all multiprocessors
MATRIX = 600e12  # bf16 operations a second by mma.sync
ONE = 100e9  # bytes a second between the caches and one multiprocessor
PROCESSORS = 132
CLOCK = 1.75e9
ISSUE = PROCESSORS * 4 * CLOCK  # instructions of a warp a second
EXP2 = PROCESSORS / 2 * CLOCK  # MUFU instructions of a warp a second: 16 lanes a clock and multiprocessor
LATENCY, NEAR_LATENCY, SHARED_LATENCY = 0.7, 0.25, 0.02  # us from an access to its answer, out of memory, L2, shared memory
NEAR_SLOTS = 3072  # of the longest row that AMS holds in shared memory
BARRIER = 0.05  # us from one barrier of a block to the next, besides
GRAPH, EAGER = 1.0, 2.5  # us from the end of a kernel to the start of the next
SECTOR = 32  # bytes that a scattered write occupies
LAYER = {"qwen7b": 233e6, "llama8b": 218e6}  # weights of one layer
SHAPES = {"qwen7b": (28, 28, 4, 128), "llama8b": (32, 32, 8, 128)}
BEGIN, END = "<!-- analytic: begin -->", "<!-- analytic: end -->"

# Instructions that a warp issues on sm_90, D = 128, by kernel_resources.py --instructions: 16 queries by 32 slots (a step), and beside the steps for every 32 slots. Before: 32 queries by 32
# slots and 16 components, the epilogue of 32 by 32, and what stages 128 slots, per warp, of the kernel as it was at 5c62730.
STEP = {"statistics": 132, "columns": 112}
TILE = {"statistics": 230, "columns": 370}
BEFORE_K, BEFORE_EPILOGUE, BEFORE_STAGING = 107, {"statistics": 615, "columns": 664}, 120
STEP_BYTES = 16 * 128 * 2 + 272  # of 16 queries in shared memory


@dataclasses.dataclass
class Kernel:
    name: str
    bytes: float
    operations: float = 0
    instructions: float = 0
    exponentials: float = 0
    near: float = 0  # bytes from L2 to shared memory
    blocks: float = 0  # 0: enough to fill the machine
    waits: int = 4  # accesses in a row, each of which waits for the one before
    near_waits: int = 0  # the same out of L2
    shared_waits: int = 0  # the same out of shared memory
    barriers: int = 0  # of a block

    def busy(self):
        """us with all multiprocessors at work."""
        return max(self.bytes / BANDWIDTH, self.operations / MATRIX, self.instructions / ISSUE, self.exponentials / EXP2, self.near / NEAR) * 1e6

    def predicted(self):
        """us from its start to its end."""
        rounds = self.blocks / PROCESSORS
        return self.busy() * (math.ceil(rounds) / rounds if 0 < rounds else 1) + self.waits * LATENCY + self.near_waits * NEAR_LATENCY + self.shared_waits * SHARED_LATENCY + self.barriers * BARRIER


def pieces(n, of):
    return -(-n // of)


def attention(shape, batch, length, window):
    """(tiles of 32 slots, steps of 16 queries each, chunks that a block has, blocks)."""
    layers, query_heads, kv_heads, _ = shape
    rows = layers * kv_heads * batch
    chunks = pieces(length, 512)
    at_once = max(1, min(8, rows * chunks // (PROCESSORS * 8)))
    return rows * pieces(length, 32), pieces(query_heads // kv_heads * window, 16), at_once, rows * pieces(chunks, at_once)


def kernels(shape, batch, length, budget, window=32, given=False):
    """An `ams-tova` event over all layers. given: the engine hands over the log-sum-exps."""
    layers, query_heads, kv_heads, dim = shape
    rows, groups = layers * kv_heads * batch, layers * batch
    keys = rows * length * dim * 2
    slots = rows * length
    queries = groups * query_heads * window * dim
    products = 2 * groups * query_heads * window * length * dim
    tiles, steps, _, blocks = attention(shape, batch, length, window)

    def attend(name, loop, written):
        return Kernel(name, keys + queries * 2 + written, products, tiles * (steps * STEP[loop] + TILE[loop]), tiles * steps * 16, blocks * steps * STEP_BYTES, blocks, 6)

    threads = 256 if length <= 4096 else 512
    # A block passes over its row about 22 times, of 12 instructions each, out of the caches after the first time; thresholds are found by 11 to 15 steps of bisection, segments by one thread.
    # In shared memory, where a row fits, are all passes but those over mass and credit, and the bisection.
    passes, searched = 22, 25
    far, shared_waits = (9, passes - 9 + searched) if length <= NEAR_SLOTS else (passes, 0)
    far_waits = passes + searched - shared_waits
    instructions = passes * pieces(length, threads) * 12 * threads / 32 * rows
    barriers = 58 if length <= 4096 else 116  # of a row of 1536 and of 32768, as the execution model counts them
    ams = Kernel("AMS: mass, credit, segments, quotas, selection", slots * (4 + 4 + 4 + 4 + 8 + 8 + 4) + rows * budget * 4, 0, instructions, 0, far * slots * 8, rows, 5, far_waits, shared_waits, barriers)
    return [
        Kernel("prepare: windows, newest positions", rows * (length - budget) * 4),
        Kernel("window attention: queries split", queries * (2 + 2)),
        *([] if given else [attend("window attention, statistics", "statistics", 0)]),
        attend("window attention, columns", "columns", slots * 8),
        Kernel("TOVA, mean over the layer's heads", slots * 8),
        ams,
        Kernel("compaction of K, V and columns", rows * budget * (2 * dim * 2 * 2 + 4 * 4)),
    ]


def before(shape, batch, length, window, loop):
    """us of one pass over the keys as it was: 64 queries by 128 slots a block, keys staged again for every 64 queries, of instructions alone."""
    layers, query_heads, kv_heads, dim = shape
    rows, queries = layers * kv_heads * batch, query_heads // kv_heads * window
    tiles = rows * pieces(length, 128) * pieces(queries, 64) * 8  # of 32 queries by 32 slots, a warp each
    return tiles * (dim // 16 * BEFORE_K + BEFORE_EPILOGUE[loop] + BEFORE_STAGING) / ISSUE * 1e6


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
        ("prepare, rows of the window", 2, 0, 0, 0),
        ("prompt scores: attention, queries split", 1, queries * (2 + 2), 0, 0),
        ("prompt scores: attention, statistics", 1, keys + queries * 2, products, 0),
        ("prompt scores: attention, sums", 1, keys + queries * 2 + sums, products, 0),
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


CASES = [("qwen7b", 1), ("llama8b", 1), ("llama8b", 32)]


def event_table(length, budget):
    lines = [
        f"| kernel of an `ams-tova` event, {length} to {budget} | " + " | ".join(f"MB, `{name}` B={batch} | GFLOP | M instructions | us, busy | us, predicted" for name, batch in CASES) + " |",
        "|---|" + "---:|" * 15,
    ]
    counted = [kernels(SHAPES[name], batch, length, budget) for name, batch in CASES]
    for of_kernel in zip(*counted):
        cells = "".join(
            f" {number(k.bytes / 1e6)} | {number(k.operations / 1e9)} | {number(k.instructions / 1e6)} | {number(k.busy())} | {number(k.predicted())} |" for k in of_kernel
        )
        lines.append(f"| {of_kernel[0].name} |{cells}")
    launches = len(counted[0])
    for what, gap in (("in a graph", GRAPH), ("launched one by one", EAGER)):
        cells = "".join(f" | | | | {number(sum(k.predicted() for k in c) + launches * gap)} |" for c in counted)
        lines.append(f"| **all, {what}: {launches} launches** |{cells}")
    cells = "".join(f" | | | | {number(sum(k.predicted() for k in kernels(SHAPES[name], batch, length, budget, given=True)) + (launches - 1) * GRAPH)} |" for name, batch in CASES)
    lines.append(f"| **in a graph, log-sum-exps given: {launches - 1}** |{cells}")
    floors = [floor_bytes(SHAPES[name], batch, length, budget) for name, batch in CASES]
    lines.append("| floor: keys once, kept rows read and written once |" + "".join(f" {number(f / 1e6)} | | | {number(microseconds(f, 0))} | |" for f in floors))
    ratios = [(sum(k.predicted() for k in c) + launches * GRAPH) / microseconds(f, 0) for c, f in zip(counted, floors)]
    lines.append("| predicted over floor |" + "".join(f" | | | | {r:.1f} |" for r in ratios))
    return "\n".join(lines)


def attention_table():
    lines = [
        "| one pass over the keys | queries of a KV head | readings of a key into a multiprocessor: before | now | us of instructions: before, statistics | columns | now, statistics | columns |",
        "|---|" + "---:|" * 7,
    ]
    for name, batch, length in [("qwen7b", 1, 1536), ("llama8b", 1, 1536), ("llama8b", 32, 1536), ("qwen7b", 1, 32768), ("llama8b", 1, 32768)]:
        shape = SHAPES[name]
        queries = shape[1] // shape[2] * 32
        tiles, steps, _, _ = attention(shape, batch, length, 32)
        now = [tiles * (steps * STEP[loop] + TILE[loop]) / ISSUE * 1e6 for loop in STEP]
        was = [before(shape, batch, length, 32, loop) for loop in STEP]
        lines.append(f"| `{name}` B={batch}, {length} | {queries} | {pieces(queries, 64)} | 1 | " + " | ".join(number(x) for x in was + now) + " |")
    return "\n".join(lines)


def table():
    return "\n".join(
        [
            f"Counted, not measured: `bench/analytic.py` writes this from the kernels' shapes and machine code, for bf16 caches, queries in bf16 after RoPE and a window of 32. Assumed, an H100: {BANDWIDTH / 1e12:.1f} TB/s",
            f"of copying, {NEAR / 1e12:.1f} TB/s out of L2, {MATRIX / 1e12:.0f} TFLOP/s of bf16 by `mma.sync`, {PROCESSORS} multiprocessors at {CLOCK / 1e9:.2f} GHz that issue four instructions a clock and compute 16 powers of two, {LATENCY} us",
            f"for an access that waits for another one ({NEAR_LATENCY} out of L2, {SHARED_LATENCY} out of shared memory), {BARRIER} us for a barrier, {GRAPH:.0f} us between two kernels of a graph and {EAGER} us",
            "otherwise. Busy: the longest of bytes, operations, instructions and powers at these rates. Predicted: busy, stretched to whole rounds of blocks, and the accesses that wait for each other.",
            "",
            event_table(1536, 1024),
            "",
            event_table(32768, 2048),
            "",
            "Before is the kernel of `5c62730`: 64 queries by 128 slots a block, keys staged for every 64 queries, `wmma` fragments, logits through shared memory.",
            "",
            "| instructions of a warp, sm_90, heads of 128 components | before | now |",
            "|---|---:|---:|",
            *(
                f"| {loop}: products and what follows from them, 16 queries by 32 slots | {(BEFORE_K * 8 + BEFORE_EPILOGUE[loop]) // 2} | {STEP[loop]} |"
                for loop in STEP
            ),
            f"| of these, products | {BEFORE_K * 8 // 2} | |",
            f"| staging of keys, for 16 queries by 32 slots | {BEFORE_STAGING // 2} | none |",
            *(f"| {loop}: the rest, once for 32 slots | | {TILE[loop]} |" for loop in STEP),
            "",
            attention_table(),
            "",
            prefill_table(),
        ]
    )


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
