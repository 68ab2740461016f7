#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an event and an observed layer of a prefill must at least take on a GPU, by counting, and what a run measured.

    bench/analytic.py                                       the tables and what they say
    bench/analytic.py --write docs/inside/performance.md    replaces the parts between the markers
    bench/analytic.py --measured FOLDER --write FILE        first takes a run of bench/gpu.sh: its bench.jsonl,
                                                            summary.txt, profile/

What was measured stands in bench/gpu/h100.jsonl, one row a line, the card first. Sentences with numbers are written
here, from the same numbers: after a new run read them again.

What is counted are the kernels in cuda/, for bf16 caches, queries in bf16 after RoPE and heads of 128 components. A
kernel runs in rounds of the blocks that fit the multiprocessors at once. A round takes the longest of: what one block
takes alone, whose accesses and instructions wait for each other; the round's bytes; its instructions, powers and
products, on the multiprocessor that has most of its blocks. Instructions are those of sm_90: bench/kernel_resources.py
--instructions, and for what is not a loop there the machine code by hand. Nothing is fitted to a measurement.
"""

import argparse
import datetime
import json
import math
import pathlib
import re
import sys
import textwrap

import gpu_report
from counting import (
    BANDWIDTH,
    BARRIER_US,
    CASES,
    CLOCK,
    CUT,
    EAGER_GAP,
    GAP,
    HOST_LINK,
    HOST_US,
    ISSUE,
    LAYER,
    MATRIX,
    MEMORY_US,
    MOVE,
    NEAR,
    NEAR_US,
    PROCESSORS,
    PRODUCTS,
    SHAPES,
    SHARED,
    SHUFFLE,
    SLOW,
    STEP,
    TABLES,
    alone,
    attention,
    floor_us,
    kernels,
    prefill_kernels,
    tables_us,
    total,
)

DATA = pathlib.Path(__file__).resolve().parent / "gpu/h100.jsonl"

# What this page predicted until the first measurement, us: the kernels, then all in a graph, one by one, and with
# log-sum-exps.
BEFORE = [
    (2.9, 7.1, 24.0, 24.6, 3.3, 12.1, 42.6, 123, 134, 98.4),
    (3.0, 8.4, 41.7, 42.8, 3.8, 14.7, 93.7, 215, 226, 172),
    (8.4, 182, 1185, 1219, 36.4, 177, 2911, 5725, 5736, 4539),
]
BEFORE_FAR = (1036, 2050, 62570)  # in a graph, 32768 to 2048
GOALS = (100, 150, 1.5)  # us, us, times the floor


# ---- What was measured


def take(folder):
    """Writes the rows of a run that are used here to the data file. folder: or a file in it."""
    folder = folder if folder.is_dir() else folder.parent
    lines = gpu_report.read_lines(folder / "bench.jsonl")
    summary = (folder / "summary.txt").read_text(errors="replace")
    card = re.search(r"^(NVIDIA [^,\n]*), ([\d.]+),", summary, re.M)
    clock = re.search(r"SM clock .* median (\d+)", summary)
    day = datetime.datetime.fromtimestamp((folder / "bench.jsonl").stat().st_mtime, datetime.timezone.utc).date()
    cuda = re.search(r"CUDA of the driver ([\d.]+)", lines[0]["machine"])
    rows = [{"card": card[1], "driver": card[2], "cuda": cuda[1], "date": str(day), "clock_MHz": int(clock[1])}]
    used = (
        "us",
        "graph_us",
        "eager_us",
        "host_us",
        "idle_us",
        "torch_us",
        "launches",
        "bytes",
        "flop",
        "GBps",
        "TFLOPS",
        "error",
    )
    for line in lines:
        if "case" in line:
            rows.append(
                {"case": line["case"]}
                | {
                    key: round(line[key], 3) if isinstance(line[key], float) else line[key]
                    for key in used
                    if key in line
                }
            )
    # An event under ncu: its cases are named as they end, and an event ends with compaction.
    event = folder / "profile/event.log"
    cases = re.findall(r"^(Event/\S+)", event.read_text(errors="replace"), re.M) if event.exists() else []
    for row in gpu_report.pages_of(event)[1:] if cases else []:
        kernel = gpu_report.short(row["Kernel Name"])
        if kernel != "arrivals_queries_kernel":
            rows.append(
                {
                    "kernel": kernel,
                    "case": cases[0],
                    "us": round(float(row["gpu__time_duration.sum"].replace(",", "")) / 1e3, 3),
                }
            )
        if kernel == "compact_kernel":
            cases.pop(0)
    for log in sorted((folder / "profile").glob("[0-9]*.log")):
        found = {}
        for row in gpu_report.pages_of(log) or []:
            if row["Metric Name"] in (
                "DRAM Throughput",
                "Compute (SM) Throughput",
                "Theoretical Occupancy",
                "Achieved Occupancy",
            ):
                found.setdefault(row["Kernel Name"], {})[row["Metric Name"]] = float(row["Metric Value"])
        of = re.search(r"^([A-Z]\w+/\S+)", log.read_text(errors="replace"), re.M)
        for name, said in found.items():
            kernel = gpu_report.short(name) + {"0": ", statistics", "1": ", columns"}.get(
                (re.findall(r"<\w+, \d+, ([01])", name) or [""])[0], ""
            )
            rows.append({"profiled": kernel, "case": of[1], **said})
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Measured:
    def __init__(self):
        rows = gpu_report.read_lines(DATA)
        self.card = rows[0]
        self.of = {row["case"]: row for row in rows if "case" in row and "kernel" not in row and "profiled" not in row}
        self.profiled = [row for row in rows if "profiled" in row]
        self.kernels = {}
        for row in rows:
            if "kernel" in row:
                self.kernels.setdefault(row["case"], []).append(row["us"])

    def event(self, name, batch, shown="", sizes="1536->1024"):
        return self.of.get(f"Event/ams-tova/{name}/batch:{batch}/{sizes}/dense{shown}", {})

    def of_event(self, name, batch):
        """us of the kernels of an event, as kernels() has them; None: not measured. Where ncu saw none, of the kernels
        by themselves: the columns with the splitting, the statistics as what is left."""
        seen = self.kernels.get(f"Event/ams-tova/{name}/batch:{batch}/1536->1024/dense")
        if seen:
            return seen
        us = lambda kernel: self.of[f"{kernel}/{name}/batch:{batch}/1536->1024"]["us"]
        return [
            None,
            None,
            us("WindowAttention") - us("WindowAttentionGivenSums"),
            us("WindowAttentionGivenSums"),
            us("Tova"),
            us("MassSegmented"),
            us("Compact"),
        ]


# ---- Tables and text


def number(x):
    return "-" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def line(*cells):
    return "| " + " | ".join(cells) + " |"


def table_of(head, rows):
    return "\n".join([line(*head), "|---|" + "---:|" * (len(head) - 1), *(line(*row) for row in rows)])


def wrap(text):
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def points(*texts):
    return "\n".join(
        textwrap.fill(
            " ".join(text.split()),
            120,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for text in texts
    )


def label(name, batch):
    return f"`{name}` B={batch}"


def event_tables(measured):
    counted = [kernels(SHAPES[name], batch, 1536, 1024) for name, batch in CASES]
    seen = [measured.of_event(name, batch) for name, batch in CASES]
    rows = []
    for i, kernel in enumerate(counted[0]):
        cells = [kernel.name]
        for before, of, us in zip(BEFORE, counted, seen):
            cells += [
                number(before[i]),
                number(of[i].predicted()),
                number(us[i]),
                number(us[i] and us[i] / of[i].floor()),
            ]
        rows.append(cells)
    floors = [floor_us(SHAPES[name], batch, 1536, 1024) for name, batch in CASES]

    def whole(what, before, now, us):
        cells = [f"**{what}**"]
        for b, n, m, floor in zip(before, now, us, floors):
            cells += [number(b), number(n), number(m), number(m and m / floor)]
        rows.append(cells)

    in_all = [SHAPES[name][0] * SHAPES[name][2] * batch for name, batch in CASES]
    again = {
        key: [kernels(SHAPES[name], batch, 1536, 1024, **{key: True}) for name, batch in CASES]
        for key in ("given", "before_rope")
    }
    now = [total(c, r) for c, r in zip(counted, in_all)]
    graph = [measured.event(*case).get("graph_us") for case in CASES]
    tables = ["tables of the host, two copies"]
    for r in in_all:
        tables += ["-", number(tables_us(r)), "-", "-"]
    rows.append(tables)
    whole("all in a graph", [b[7] for b in BEFORE], now, graph)
    whole(
        "one by one",
        [b[8] for b in BEFORE],
        [total(c, r, EAGER_GAP) for c, r in zip(counted, in_all)],
        [measured.event(*case).get("eager_us") for case in CASES],
    )
    whole(
        "in a graph, log-sum-exps given",
        [b[9] for b in BEFORE],
        [total(c, r) for c, r in zip(again["given"], in_all)],
        [measured.event(*case, "/log-sum-exps").get("graph_us") for case in CASES],
    )
    whole(
        "in a graph, queries before RoPE",
        [None] * 3,
        [total(c, r) for c, r in zip(again["before_rope"], in_all)],
        [measured.event(*case, "/pre-rope").get("graph_us") for case in CASES],
    )
    floor = ["floor: keys once, kept rows read and written once"]
    for f in floors:
        floor += ["", number(f), "", ""]
    rows.append(floor)
    head = ["us of an `ams-tova` event, 1536 to 1024"] + [
        f"{what}" for case in CASES for what in (f"{label(*case)}: before", "now", "measured", "/ floor")
    ]

    what_is_counted = []
    for of in zip(*counted[1:]):
        cells = [of[0].name]
        for k in of:
            cells += [
                number(k.bytes / 1e6),
                number(k.operations / 1e9),
                number(k.instructions / 1e6),
                f"{k.blocks:,}",
                str(k.resident),
                str(k.rounds()),
                number(k.alone),
            ]
        what_is_counted.append(cells)
    counted_head = ["what is counted"] + [
        f"{what}"
        for case in CASES[1:]
        for what in (
            f"{label(*case)}: MB",
            "GFLOP",
            "M instructions",
            "blocks",
            "at once",
            "rounds",
            "us of a block alone",
        )
    ]
    return table_of(head, rows), table_of(counted_head, what_is_counted), counted, now, graph, floors, seen


def far_table(measured):
    cells, counted = [], [kernels(SHAPES[name], batch, 32768, 2048) for name, batch in CASES]
    for of in zip(*counted):
        cells.append(
            [of[0].name]
            + [
                text
                for k in of
                for text in (number(k.bytes / 1e6), number(k.instructions / 1e6), number(k.predicted()))
            ]
        )
    rows = [SHAPES[name][0] * SHAPES[name][2] * batch for name, batch in CASES]
    now = [total(c, r) for c, r in zip(counted, rows)]
    cells.append(["**all in a graph: now**"] + [text for us in now for text in ("", "", number(us))])
    cells.append(["before"] + [text for us in BEFORE_FAR for text in ("", "", number(us))])
    cells.append(
        ["measured"]
        + [
            text
            for case in CASES
            for text in ("", "", number(measured.event(*case, sizes="32768->2048").get("graph_us")))
        ]
    )
    cells.append(
        ["floor"]
        + [text for name, batch in CASES for text in ("", "", number(floor_us(SHAPES[name], batch, 32768, 2048)))]
    )
    head = ["us of an `ams-tova` event, 32768 to 2048"] + [
        text for case in CASES for text in (f"{label(*case)}: MB", "M instructions", "us")
    ]
    return table_of(head, cells), now, counted


def pass_table():
    rows = []
    for name, batch, length in [
        ("qwen7b", 1, 1536),
        ("llama8b", 1, 1536),
        ("llama8b", 32, 1536),
        ("qwen7b", 1, 32768),
        ("llama8b", 1, 32768),
    ]:
        shape = SHAPES[name]
        queries = shape[1] // shape[2] * 32
        both = attention(shape, shape[0] * shape[2] * batch, length, queries)
        rows.append(
            [f"{label(name, batch)}, {length}", str(queries)]
            + [
                number(x)
                for k in both
                for x in (
                    k.floor(),
                    k.operations / MATRIX * 1e6,
                    k.instructions / ISSUE / PROCESSORS * 1e6,
                    k.rounds() * k.alone,
                )
            ]
        )
    head = ["one pass over the keys, us", "queries of a KV head"] + [
        f"{what}"
        for loop in PRODUCTS
        for what in (f"{loop}: bytes", "products", "instructions", "blocks alone, by rounds")
    ]
    return table_of(head, rows)


def prefill_table():
    cases = [("qwen7b", 32768), ("llama8b", 32768), ("llama8b", 131072)]
    counted = [prefill_kernels(SHAPES[name], tokens) for name, tokens in cases]
    rows = []
    for of in zip(*counted):
        rows.append(
            [of[0][1].name, str(of[0][0])]
            + [text for launches, k in of for text in (number(k.bytes / 1e6), number(k.predicted() + launches * GAP))]
        )
    launches = sum(n for n, _ in counted[0])
    rows.append(
        ["**all**", str(launches)]
        + [
            text
            for c in counted
            for text in (number(sum(k.bytes for _, k in c) / 1e6), number(sum(k.predicted() + n * GAP for n, k in c)))
        ]
    )
    own = []
    for name, tokens in cases:
        _, query_heads, _, dim = SHAPES[name]
        own += ["", number((2 * tokens * LAYER[name] + 2 * tokens * tokens * query_heads * dim) / MATRIX * 1e6)]
    rows.append(["the layer's own products", ""] + own)
    head = ["kernel of an observed layer, 2048 tokens stay", "launches"] + [
        text for name, tokens in cases for text in (f"`{name}` {tokens // 1024}k: MB", "us")
    ]
    return table_of(head, rows)


def counted_text(measured):
    events, counts, counted, now, graph, floors, seen = event_tables(measured)
    far, far_now, far_counted = far_table(measured)
    big, us = counted[2], seen[2]
    graph_far = [measured.event(*case, sizes="32768->2048").get("graph_us") for case in CASES[:2]]
    of_big = measured.event(*CASES[2])
    passes = [k.floor() + k.operations / MATRIX * 1e6 for k in big[2:4]]
    matrix = [row for row in measured.profiled if row["profiled"].startswith("attention_matrix_kernel")]
    share = lambda key: " and ".join(f"{row[key]:.0f}" for row in matrix)
    given = [measured.event(*case, "/log-sum-exps").get("graph_us") for case in CASES]
    before_rope = measured.event(*CASES[2], "/pre-rope")
    row_us = counted[1][5].alone
    cuts_us = 47 * alone(CUT[0], CUT[1], CUT[2])
    gap_of = lambda i: f"{number(now[i])} against {number(graph[i])}"
    return "\n\n".join(
        [
            wrap(f"""`bench/analytic.py` counts this from the kernels' shapes and machine code (sm_90), for bf16 caches,
                 queries in bf16 after RoPE and a window of 32, and holds it against the measurement above. A kernel
                 runs in rounds of the blocks that fit the multiprocessors at once, by registers, threads and shared
                 memory. A round takes the longest of what one block takes alone, its bytes, its instructions, its
                 powers and its products; nothing is fitted. From the run are {BANDWIDTH / 1e12:.1f} TB/s of copying and
                 {CLOCK / 1e9:.2f} GHz. Assumed are {NEAR / 1e12:.1f} TB/s of L2, {MATRIX / 1e12:.0f} TFLOP/s of bf16 by
                 `mma.sync`, four instructions a clock and multiprocessor and 16 powers of two; {MEMORY_US} us for an
                 access that waits ({NEAR_US} out of L2); for a warp alone {STEP} clocks an instruction, {SLOW} more for
                 f64 and conversions, {SHARED} for shared memory and L1, {SHUFFLE} for a shuffle; {BARRIER_US} us a
                 barrier; {GAP} us between two kernels of a graph, {EAGER_GAP} otherwise; and for the two tables that an
                 event sends, {TABLES[0]} and {TABLES[1]} bytes a row, {HOST_LINK / 1e9:.0f} GB/s and {HOST_US:.0f} us a
                 copy. AMS: 47 cuts and 33 segments of a row of 1536 slots, two rounds of pouring, three digits of a key
                 in a segment (49, 50, two and four of 32768). What the host computes before it launches is not
                 counted."""),
            wrap("""Before is what this page predicted before anything was measured. Measured kernels of `llama8b` are
                 those of an event under ncu; of `qwen7b` those of the kernels' own rows, where the columns come with
                 the splitting, and preparing has no row like an event's. Over floor: of a kernel, its own bytes at the
                 copying rate; of an event, the last row."""),
            events,
            points(
                f"""The goals were {GOALS[0]} us for `qwen7b` and {GOALS[1]} us for `llama8b` at batch 1, and {GOALS[2]}
                    times the floor at batch 32. All three are missed: {number(graph[0])} us, {number(graph[1])} us, and
                    {graph[2] / floors[2]:.1f} times. With log-sum-exps it is {number(given[0])} us, {number(given[1])}
                    us and {given[2] / floors[2]:.1f} times: missed as well.""",
                f"""The count before was too low by {graph[0] / BEFORE[0][7]:.1f}, {graph[1] / BEFORE[1][7]:.1f} and
                    {graph[2] / BEFORE[2][7]:.1f} times. Its largest error was AMS, at batch 32 {number(BEFORE[2][5])}
                    us for what takes {number(us[5])}. It took a row's latency once, though {big[5].blocks:,} rows run
                    in {big[5].rounds()} rounds of two blocks a multiprocessor. It left out that one thread finds the
                    cuts ({cuts_us:.0f} us of a row), and that every warp pours all quotas. It had no instructions for
                    preparing, splitting and compaction, no copies of tables, and only the bytes of queries, though
                    their stores fill a quarter of each sector.""",
                f"""AMS as counted now: a row takes {row_us:.0f} us, and so does a round, whose instructions issue in
                    {big[5].instructions / ISSUE / PROCESSORS * 1e6 / big[5].rounds():.0f} us. Measured are
                    {number(seen[1][5])} us for one round and {us[5] / big[5].rounds():.0f} us for each of
                    {big[5].rounds()}: it is latency, not work. The count is somewhat too high: not every instruction
                    waits for the one before. What would help: more blocks on a multiprocessor, and less for one thread
                    to do.""",
                f"""The attention is where the count is still too low: {number(big[2].predicted())} and
                    {number(big[3].predicted())} us against {number(us[2])} and {number(us[3])} at batch 32. A round
                    takes the longest of bytes and products, as if they overlapped. A warp reads its keys and then
                    multiplies them, and only {2 * 8} warps are there to overlap (occupancy
                    {share("Achieved Occupancy")} %, as planned). Bytes and products of the statistics, one after the
                    other, would be {number(passes[0])} us. ncu agrees: memory is {share("DRAM Throughput")} % busy,
                    multiprocessors {share("Compute (SM) Throughput")} %, and neither is a limit. It would help if the
                    next keys were on their way while these are multiplied.""",
                f"""Compaction takes {us[6] / big[6].floor():.2f} times its bytes at batch 32 and
                    {seen[1][6] / counted[1][6].floor():.2f} and {seen[0][6] / counted[0][6].floor():.2f} at batch 1.
                    Likely: each thread computes four addresses by division ({MOVE} instructions), asks for 64 bytes,
                    and waits; at batch 1 the blocks of `qwen7b` do not fill one round, those of `llama8b` fill
                    {counted[1][6].blocks / PROCESSORS / 3:.1f}.""",
                f"""Smaller ones at batch 32. TOVA takes {us[4] / big[4].floor():.1f} times its bytes: one of
                    {SHAPES["llama8b"][2]} blocks works, for all heads. Splitting takes {number(us[1])} us, not
                    {number(big[1].predicted())}: likely its stores of four bytes, each of them a request to L2.
                    Preparing takes {number(us[0])} us, not {number(big[0].predicted())}: likely its searches find in L1
                    the positions that the block has just written.""",
                f"""In all the count now has {gap_of(0)} us, {gap_of(1)} and {gap_of(2)}. At batch 1 the attention and
                    compaction are what is open. Likely: an answer takes longer than {MEMORY_US} us when all blocks ask
                    at once; and outside ncu caches are cold because 256 MiB were written just before, of which up to 50
                    still have to leave L2 (17 us).""",
                f"""The host: at batch 32 one by one takes {of_big["eager_us"] / 1e3:.1f} ms, a graph
                    {of_big["graph_us"] / 1e3:.1f}. The call takes {of_big["host_us"] / 1e3:.1f} ms on the host; likely
                    most of it makes tables of {big[5].blocks:,} rows, for which the GPU waits. At batch 1 it takes
                    {measured.event(*CASES[0])["host_us"] / 1e3:.2f} and
                    {measured.event(*CASES[1])["host_us"] / 1e3:.2f} ms, less than the kernels: a graph changes `qwen7b`
                    from {number(measured.event(*CASES[0])["eager_us"])} us to {number(graph[0])}, and `llama8b` from
                    {number(measured.event(*CASES[1])["eager_us"])} to {number(graph[1])}.""",
                f"""Before RoPE, `llama8b` at batch 32 takes {before_rope["graph_us"] / 1e3:.1f} ms: queries are turned
                    into f32, split into two numbers each, and both are multiplied.""",
            ),
            wrap("What the predictions now are made of:"),
            counts,
            far,
            wrap(f"""Rows of 32768 slots do not fit AMS's shared memory, and one block is on a multiprocessor: a row
                 takes {number(far_counted[1][5].alone)} us, of which the accesses to L2 that wait are most. Before, it
                 had a seventh of the counted event of `llama8b`, and has
                 {far_counted[1][5].predicted() / far_now[1]:.2f} of it now. Measured are {number(graph_far[0])} and
                 {number(graph_far[1])} us; batch 32 does not fit the card's memory."""),
            wrap("One pass over the keys, and what would take how long if nothing else did:"),
            pass_table(),
            wrap(f"""One observed layer of one prompt on its way to 2048 tokens, a window of 32, 8 layers compared, gaps
                 of {GAP} us with each launch. Not measured. Below: the products of the layer itself, weights and causal
                 attention, at {MATRIX / 1e12:.0f} TFLOP/s."""),
            prefill_table(),
        ]
    )


def measured_text(measured):
    card, of = measured.card, measured.of
    ceiling = {row["case"].split("/")[1]: row for row in of.values() if row["case"].startswith("Ceiling/")}
    read = ceiling["read"]["GBps"]

    def rate(row, us):
        gbps = row["bytes"] / us / 1e3
        return [number(gbps), f"{gbps / read:.2f}"]

    events, odd, wrong = [], [], False
    torch = {}
    for case, row in of.items():
        kind, *rest = case.split("/")
        if kind != "Event":
            continue
        policy, name, batch, sizes, *shown = rest
        wrong = wrong or "error" in row
        key = (name, batch, sizes)
        if "torch_us" in row:
            torch.setdefault(key, []).append(row["torch_us"])
        what = (
            f"`{policy}`"
            + {"pages:16": ", pages of 16", "pre-rope": ", before RoPE", "log-sum-exps": ", log-sum-exps given"}.get(
                shown[-1], ""
            )
            + (" ¹" if "error" in row else "")
        )
        events.append(
            (
                key,
                [
                    what,
                    f"`{name}`",
                    batch.split(":")[1],
                    sizes.replace("->", " to "),
                    f"{row['launches']:.0f}",
                    number(row["graph_us"]),
                    number(row["eager_us"]),
                    number(row["host_us"]),
                    *rate(row, row["graph_us"]),
                    number(row.get("torch_us")),
                    f"{row['torch_us'] / row['graph_us']:.1f}" if "torch_us" in row else "-",
                ],
            )
        )
    for key, all_us in torch.items():
        middle = sorted(all_us)[len(all_us) // 2]
        odd += [
            f"`{key[0]}` at batch {key[1].split(':')[1]}: {number(us)} us, where the other rows of this size have "
            f"{number(middle)}"
            for us in all_us
            if us > 1.5 * middle
        ]
    order = {
        key: i
        for i, key in enumerate(
            sorted(
                {k for k, _ in events},
                key=lambda k: (int(k[2].split("-")[0]), int(k[1].split(":")[1]), k[0] != "qwen7b"),
            )
        )
    }
    events.sort(key=lambda e: order[e[0]])
    event_head = [
        "event",
        "model",
        "batch",
        "slots",
        "launches",
        "us in a graph",
        "one by one",
        "on the host",
        "GB/s",
        "share of reading",
        "LibTorch's us",
        "LibTorch's / graph",
    ]

    by_kernel = {}
    for case, row in of.items():
        kernel, name, *size = case.split("/")
        if kernel not in ("Event", "StepWithoutEvent", "Ceiling"):
            by_kernel.setdefault((kernel, *size), {})[name] = row
    kernel_rows = []
    for (kernel, batch, sizes), names in by_kernel.items():
        cells = [
            f"`{kernel}`",
            batch.split(":")[1],
            sizes.split("->")[0],
            f"{next(iter(names.values()))['launches']:.0f}",
        ]
        for name in SHAPES:
            row = names.get(name)
            cells += (
                ["-"] * 4
                if row is None
                else [
                    number(row["us"]),
                    *rate(row, row["us"]),
                    number(row["flop"] / row["us"] / 1e6) if "flop" in row else "",
                ]
            )
        kernel_rows.append(cells)
    kernel_head = ["kernel", "batch", "slots", "launches"] + [
        text for name in SHAPES for text in (f"`{name}`: us", "GB/s", "share", "TFLOP/s")
    ]

    steps = [
        [
            f"`{case.split('/')[1]}`",
            case.split(":")[1],
            number(row["eager_us"]),
            number(row["host_us"]),
            number(row["idle_us"]),
        ]
        for case, row in of.items()
        if case.startswith("StepWithoutEvent/")
    ]
    limits = [
        [f"`{row['profiled']}`", f"`{row['case']}`"]
        + [
            f"{row[key]:.0f}"
            for key in ("DRAM Throughput", "Compute (SM) Throughput", "Theoretical Occupancy", "Achieved Occupancy")
        ]
        for row in measured.profiled
    ]

    graph = lambda policy, name, batch: of[f"Event/{policy}/{name}/batch:{batch}/1536->1024/dense"]
    slower = sorted(
        {
            f"`{case.split('/')[1]}`"
            for case, row in of.items()
            if case.startswith("Event/") and row.get("torch_us", math.inf) < row["graph_us"]
        }
    )
    moved = of["Compact/llama8b/batch:32/1536->1024"]
    keydiff, given = (
        of["KeyDiff/llama8b/batch:32/1536->1024"],
        of["WindowAttentionGivenSums/llama8b/batch:32/1536->1024"],
    )
    share = lambda row: f"{row['bytes'] / row['us'] / 1e3 / read:.2f}"
    faster = [
        row["torch_us"] / row["graph_us"]
        for case, row in of.items()
        if case.startswith("Event/") and "batch:1/1536" in case and "torch_us" in row
    ]
    return "\n\n".join(
        [
            wrap(f"""One {card["card"]} (driver {card["driver"]}, CUDA {card["cuda"]}, {card["clock_MHz"]} MHz),
                 {card["date"]}; written by `bench/analytic.py` from `bench/gpu/h100.jsonl`. Ceilings of the same run:
                 {number(ceiling["copy"]["GBps"])} GB/s read and written by a copy, {number(read)} GB/s read,
                 {number(ceiling["products"]["TFLOPS"])} TFLOP/s by cuBLAS in bf16. bf16 caches, random tensors, caches
                 cold, medians. Bytes are those that must move: kept rows read and written, and keys once for every
                 reading that the kernel or policy needs."""),
            wrap("""Whole events over all layers. One by one is GPU time between two CUDA events around `Keeper::step`,
                 which also waits for the host; in a graph the same launches are replayed. LibTorch does less in its
                 column: topk, sort and gather of K and V, layer by layer, of scores that are finished, into new
                 tensors."""),
            table_of(event_head, [row for _, row in events]),
            *(
                [
                    wrap(
                        "¹ Its check failed: the bench gave log-sum-exps of its own to the GPU, and compared with a "
                        "CPU that computes them. The times hold."
                    )
                ]
                if wrong
                else []
            ),
            points(
                f"""At batch 1 every event is {min(faster):.1f} to {max(faster):.0f} times as fast as LibTorch's
                    operations, which are launched layer by layer. At batch 32 these are slower than LibTorch's in at
                    least one row: {", ".join(slower)}. LibTorch scores nothing there; where ours does not either,
                    `streaming`, it is
                    {graph("streaming", "llama8b", 32)["torch_us"] / graph("streaming", "llama8b", 32)["graph_us"]:.1f}
                    times as fast (`llama8b`).""",
                *([f"A time of LibTorch's stands out and should not be used: {'; '.join(odd)}."] if odd else []),
                f"""At batch 32 an event that is launched one by one takes much longer than its graph:
                    {graph("ams-tova", "llama8b", 32)["eager_us"] / 1e3:.1f} against
                    {graph("ams-tova", "llama8b", 32)["graph_us"] / 1e3:.1f} ms, and
                    {graph("streaming", "llama8b", 32)["eager_us"] / 1e3:.1f} against
                    {graph("streaming", "llama8b", 32)["graph_us"] / 1e3:.1f}. The host makes tables of 8192 rows
                    first.""",
            ),
            wrap(
                "Kernels by themselves, all layers, in a graph where one can be made. `WindowAttention` splits "
                "queries and passes over the keys twice; `GivenSums` once."
            ),
            table_of(kernel_head, kernel_rows),
            points(
                f"""Nothing is near the ceiling but what only moves or reads: at batch 32 (`llama8b`) `Compact` reaches
                    {share(moved)} of reading, `KeyDiff` {share(keydiff)}, the attention with sums given
                    {share(given)}.""",
                """`Expected`, `Rkv` and `Critical` are bound by what they compute, and far from what matrix units can
                   do. `RkvFar` at 32768 slots takes hundreds of milliseconds.""",
            ),
            wrap("A step without an event, `ams-tova`: showing one token's queries to all layers, and the step."),
            table_of(["model", "batch", "observe, us", "of it on the host", "the step, on the host"], steps),
            wrap("What ncu says of some kernels, in % of what the card can do:"),
            table_of(
                ["kernel", "launched by", "memory", "multiprocessors", "warps that fit", "warps that were there"],
                limits,
            ),
        ]
    )


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--measured",
        type=pathlib.Path,
        metavar="FOLDER",
        help="take a run of bench/gpu.sh into bench/gpu/h100.jsonl first",
    )
    arguments.add_argument(
        "--write", type=pathlib.Path, metavar="FILE", help="replace the parts of FILE between the markers"
    )
    given = arguments.parse_args()
    if given.measured is not None:
        take(given.measured)
    measured = Measured()
    parts = {"measured": measured_text(measured), "analytic": counted_text(measured)}
    if given.write is None:
        print("\n\n".join(parts.values()))
        return 0
    text = given.write.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            print(f"analytic.py: {given.write} has no markers {begin} and {end}", file=sys.stderr)
            return 2
        text = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{part}\n{end}", text, flags=re.DOTALL)
    given.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
