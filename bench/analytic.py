#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an event and an observed layer of a prefill must at least take on a GPU, by counting, and what a run measured.

    bench/analytic.py                                       the tables and what they say
    bench/analytic.py --write docs/inside/performance.md    replaces the parts between the markers
    bench/analytic.py --check docs/inside/performance.md    fails where they would be others, or the model no longer
                                                            has what it had of the kernels that were measured
    bench/analytic.py --measured FOLDER --write FILE        first takes a run of bench/gpu.sh: its bench.jsonl,
                                                            summary.txt, profile/

What was measured stands in bench/gpu/h100.jsonl, one row a line, the card first; what was counted of the same kernels,
in bench/gpu/counted_before.jsonl. Sentences with numbers are written here, from the same numbers: after a new run read
them again.

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
    CountedBefore,
    EAGER_GAP,
    EARLY_GAP,
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
    ROUND,
    SHAPES,
    SHARED,
    SHUFFLE,
    SLOW,
    STEP,
    TABLES,
    attention,
    floor_us,
    kernels,
    prefill_kernels,
    rows_of,
    tables_us,
    total,
)

DATA = pathlib.Path(__file__).resolve().parent / "gpu/h100.jsonl"

# Of an event, in a graph: (us, us with log-sum-exps) at batch 1, times the floor at batch 32.
GOALS = [(120, 90), (200, 150), (1.35, 1.1)]


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
                (re.findall(r"<\w+, \d+, (?:\([\w:]+\))?([01])", name) or [""])[0], ""
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


def before_table(measured, before):
    """Of the kernels that were measured."""
    seen = [measured.of_event(*case) for case in CASES]
    hand = lambda pair: "-" if pair is None else number(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
    rows = []
    for i, kernel in enumerate(before.kernels[CASES[0]]):
        cells = [kernel.name]
        for case, us in zip(CASES, seen):
            counted = before.kernels[case][i].predicted()
            ratio = f"{us[i] / counted:.1f}" if us[i] else "-"
            cells += [hand(before.by_hand[case][i]), number(counted), number(us[i]), ratio]
        rows.append(cells)
    for what, event, shown in (
        ("all in a graph", "all", ""),
        ("in a graph, log-sum-exps given", "given", "/log-sum-exps"),
        ("in a graph, queries before RoPE", "before_rope", "/pre-rope"),
    ):
        cells = [f"**{what}**"]
        for case in CASES:
            row, us = before.events[event, case], measured.event(*case, shown)["graph_us"]
            cells += [hand(row.get("by_hand")), number(row["us"]), number(us), f"{us / row['us']:.1f}"]
        rows.append(cells)
    head = ["us of an `ams-tova` event, 1536 to 1024, before"] + [
        text for case in CASES for text in (f"{label(*case)}: by hand", "counted", "measured", "/ counted")
    ]
    return table_of(head, rows)


def missed(measured, before, event="all"):
    """What the count of each kernel was too low by, and us of what lies between the kernels, at batch 1 and 32. Of
    `llama8b`, whose kernels were seen one by one."""
    out = {}
    for case in CASES[1:]:
        us = measured.of_event(*case)
        factors = [x / k.predicted() for x, k in zip(us, before.kernels[case])]
        out[case[1]] = (factors, measured.event(*case)["graph_us"] - sum(us))
    return out


def event_tables(measured, before):
    floors = [floor_us(SHAPES[name], batch, 1536, 1024) for name, batch in CASES]
    counted = [kernels(SHAPES[name], batch, 1536, 1024) for name, batch in CASES]
    factors = missed(measured, before)
    rows = []
    for i, kernel in enumerate(counted[0]):
        cells = [kernel.name]
        for of, (_, batch) in zip(counted, CASES):
            us = of[i].predicted()
            cells += [number(us), number(us * factors[batch][0][i]), f"{us / of[i].floor():.1f}"]
        rows.append(cells)
    tables = ["tables of the host, two copies"]
    for case in CASES:
        tables += [number(tables_us(rows_of(*case))), "-", "-"]
    rows.append(tables)

    def whole(what, of, gap=EARLY_GAP, shown=True):
        """us of the event as counted, and as it would be if the count missed as much as before."""
        us = [total(kernels_of, rows_of(*case), gap) for kernels_of, case in zip(of, CASES)]
        as_before = []
        for kernels_of, (_, batch) in zip(of, CASES):
            every, between = factors[batch]
            every = every if len(kernels_of) == len(every) else [*every[:2], *every[3:]]
            as_before.append(between + sum(k.predicted() * x for k, x in zip(kernels_of, every)))
        cells = [f"**{what}**"]
        for x, y, floor in zip(us, as_before, floors):
            cells += [number(x), number(y) if shown else "-", f"{x / floor:.2f}"]
        rows.append(cells)
        return us, as_before

    again = {
        key: [kernels(SHAPES[name], batch, 1536, 1024, **{key: True}) for name, batch in CASES]
        for key in ("given", "before_rope")
    }
    now = whole("all in a graph", counted)
    whole("in a graph, without overlap", counted, GAP, shown=False)
    whole("one by one", counted, EAGER_GAP, shown=False)
    given = whole("in a graph, log-sum-exps given", again["given"])
    whole("in a graph, queries before RoPE", again["before_rope"])
    floor = ["floor: keys once, kept rows read and written once"]
    for f in floors:
        floor += [number(f), "", ""]
    rows.append(floor)
    head = ["us of an `ams-tova` event, 1536 to 1024, now"] + [
        text for case in CASES for text in (f"{label(*case)}: counted", "missed as before", "counted / floor")
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
    return table_of(head, rows), table_of(counted_head, what_is_counted), counted, now, given, floors


def far_table(measured, before):
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
    now = [total(c, rows_of(*case)) for c, case in zip(counted, CASES)]
    graph = [measured.event(*case, sizes="32768->2048").get("graph_us") for case in CASES]
    floors = [floor_us(SHAPES[name], batch, 32768, 2048) for name, batch in CASES]
    for what, every in (
        ("**all in a graph: now**", now),
        ("before: counted", before.us("far")),
        ("before: measured", graph),
        ("floor", floors),
    ):
        cells.append([what] + [text for us in every for text in ("", "", number(us))])
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


def counted_text(measured, before):
    events, counts, counted, (now, as_before), (given, given_as_before), floors = event_tables(measured, before)
    far, far_now, far_counted = far_table(measured, before)
    big, us, of_old = counted[2], measured.of_event(*CASES[2]), before.kernels[CASES[2]]
    of_big = measured.event(*CASES[2])
    one_after_other = [k.floor() + k.operations / MATRIX * 1e6 for k in of_old[2:4]]
    matrix = [row for row in measured.profiled if row["profiled"].startswith("attention_matrix_kernel")]
    share = lambda key: " and ".join(f"{row[key]:.0f}" for row in matrix)
    graph = [measured.event(*case)["graph_us"] for case in CASES]
    issue_us = big[5].instructions / ISSUE / PROCESSORS * 1e6 / big[5].rounds()
    goals = [
        (
            f"{number(x)} us" if batch == 1 else f"{x / floor:.2f} times the floor",
            x / (goal if batch == 1 else goal * floor),
        )
        for of, nth in ((now, 0), (given, 1))
        for x, floor, (_, batch), goal in zip(of, floors, CASES, [both[nth] for both in GOALS])
    ]
    of_goal = lambda i: "{} ({:.2f} of the goal)".format(*goals[i])
    above = lambda of, which: number(sum(of[i].predicted() - of[i].floor() for i in which))
    more = lambda *which: " and ".join(above(of, which) for of in counted[:2])
    return "\n\n".join(
        [
            wrap(f"""`bench/analytic.py` counts this from the kernels' shapes and machine code (sm_90), for bf16 caches,
                 queries in bf16 after RoPE and a window of 32. A kernel runs in rounds of the blocks that fit the
                 multiprocessors at once, by registers, threads and shared memory. A round takes the longest of what one
                 block takes alone, its bytes, its instructions, its powers and its products; nothing is fitted. From
                 the run above are {BANDWIDTH / 1e12:.1f} TB/s of copying and {CLOCK / 1e9:.2f} GHz. Assumed are
                 {NEAR / 1e12:.1f} TB/s of L2, {MATRIX / 1e12:.0f} TFLOP/s of bf16 by `mma.sync`, four instructions a
                 clock and multiprocessor and 16 powers of two; {MEMORY_US} us for an access that waits ({NEAR_US} out
                 of L2); for a warp alone {STEP} clocks an instruction, {SLOW} more for f64 and conversions, {SHARED}
                 for shared memory and L1, {SHUFFLE} for a shuffle; {BARRIER_US} us a barrier; {GAP} us between two
                 kernels of a graph, {EARLY_GAP} where the next one has begun already and waits, {EAGER_GAP} without a
                 graph; and for the two tables that an event sends, {TABLES[0]} and
                 {TABLES[1]} bytes a row, {HOST_LINK / 1e9:.0f} GB/s and {HOST_US:.0f} us a copy. AMS: 47 cuts and 33
                 segments of a row of 1536 slots, two rounds of pouring (49 and 50 of 32768). What the host computes
                 before it launches is not counted."""),
            wrap("""**The kernels that were measured.** Since then all but TOVA's have changed. What was counted of
                 them, by the same rules and once more by hand, beside what the H100 took says how far such a count can
                 be trusted. Measured kernels of `llama8b` are those of an event under ncu; of `qwen7b` those of the
                 kernels' own rows, where the columns come with the splitting, and preparing has no row like an
                 event's."""),
            before_table(measured, before),
            points(
                f"""An event took {graph[0] / before.us("all")[0]:.1f}, {graph[1] / before.us("all")[1]:.1f} and
                    {graph[2] / before.us("all")[2]:.1f} times what was counted: the count is a lower bound, and orders
                    kernels rightly where they differ by more than that.""",
                f"""AMS was latency, not work: {before.kernels[CASES[1]][5].alone:.0f} us of a row alone, measured
                    {number(measured.of_event(*CASES[1])[5])} for one round and
                    {us[5] / of_old[5].rounds():.0f} for each of {of_old[5].rounds()}. Here the count is somewhat too
                    high, since not every instruction waits for the one before; by hand it was too low.""",
                f"""The attention took {number(us[2])} and {number(us[3])} us at batch 32, not
                    {number(of_old[2].predicted())} and {number(of_old[3].predicted())}: a warp read its keys and then
                    multiplied them. Bytes and products one after the other are {number(one_after_other[0])} and
                    {number(one_after_other[1])} us. ncu agrees: memory was {share("DRAM Throughput")} % busy,
                    multiprocessors {share("Compute (SM) Throughput")} %.""",
                f"""Compaction took {us[6] / of_old[6].floor():.2f} times its bytes at batch 32, and TOVA
                    {us[4] / of_old[4].floor():.1f} times: one of {SHAPES["llama8b"][2]} blocks works, for all heads.
                    Splitting took {number(us[1])} us, not {number(of_old[1].predicted())}: likely its stores of four
                    bytes, each of them a request to L2.""",
                f"""At batch 1 the attention and compaction are open. Likely: an answer takes longer than {MEMORY_US}
                    us when all blocks ask at once; and caches were cold because 256 MiB had been written just before,
                    of which up to 50 still had to leave L2 (17 us).""",
                f"""The host: at batch 32 one by one takes {of_big["eager_us"] / 1e3:.1f} ms, a graph
                    {of_big["graph_us"] / 1e3:.1f}. The call takes {of_big["host_us"] / 1e3:.1f} ms on the host; likely
                    most of it makes tables of {big[5].blocks:,} rows, for which the GPU waits.""",
            ),
            wrap("""**The kernels as they are.** Counted only: no GPU has run them. Beside the count, what they would
                 take if it missed each of them by as much as it missed its predecessor at that batch size."""),
            events,
            points(
                f"""Goals of an event in a graph were {GOALS[0][0]} us for `qwen7b` and {GOALS[1][0]} us for `llama8b`
                    at batch 1 and {GOALS[2][0]} times the floor at batch 32, with log-sum-exps {GOALS[0][1]} us,
                    {GOALS[1][1]} us and {GOALS[2][1]} times. Counted are {of_goal(0)}, {of_goal(1)} and {of_goal(2)};
                    with log-sum-exps {of_goal(3)}, {of_goal(4)} and {of_goal(5)}:
                    {"all are missed on paper already" if min(x for _, x in goals) > 1 else "some are met on paper"}.
                    If the count misses as before it is {number(as_before[0])} us, {number(as_before[1])} us and
                    {as_before[2] / floors[2]:.2f} times, with log-sum-exps {number(given_as_before[0])} us,
                    {number(given_as_before[1])} us and {given_as_before[2] / floors[2]:.2f} times.""",
                f"""What is left above the floor at batch 32: the second reading of the keys
                    ({number(big[3].floor())} us), which only log-sum-exps save; AMS
                    ({number(big[5].predicted() - big[5].floor())} us of latency); splitting
                    ({number(big[1].predicted())} us), which would go if blocks of the attention split the queries that
                    they bring. Not built.""",
                f"""Of `llama8b` both passes are one launch: the columns' row has what it adds, without the queries and
                    the {ROUND} slots whose keys are still in shared memory. It counts nothing that the L2 may have
                    kept: between two readings of the {ROUND} slots before these, all blocks together read
                    {2 * PROCESSORS * ROUND * 256 / 1e6:.0f} MB.""",
                f"""Why not one reading: the logits of a row are {SHAPES["llama8b"][1] // SHAPES["llama8b"][2] * 32}
                    numbers of four bytes a slot, twice the bytes of its key, and their sums are over all slots of a
                    query first and over all queries of a slot then. So they are made again, which needs the keys. A
                    multiprocessor's shared memory holds {(227 * 1024 - 32 * 1024) // 256} of them beside the queries,
                    half a row.""",
                f"""AMS at batch 32: a row takes {big[5].alone:.0f} us alone, four are on a multiprocessor, whose
                    instructions issue in {issue_us:.0f} us of a round. At batch 1 larger blocks have a row in
                    {counted[0][5].alone:.0f} us (`qwen7b`) and {counted[1][5].alone:.0f} us. At batch 32 only work of
                    another kind can hide it: rows of AMS and of compaction, whose {number(big[6].predicted())} us are
                    bytes, side by side in one launch. Not built.""",
                f"""At batch 1 this is not bytes, of `qwen7b` and `llama8b`: AMS {more(5)} us, preparing and splitting
                    {more(0, 1)}, the two passes {more(2, 3)}, TOVA {more(4)}, compaction {more(6)}, tables
                    {" and ".join(number(tables_us(rows_of(*case))) for case in CASES[:2])}.""",
                """The attention: the next keys are on their way while those before are multiplied, so that the count's
                   longest of bytes and products may hold; that it does is not measured.""",
            ),
            wrap("What the predictions now are made of:"),
            counts,
            far,
            wrap(f"""Rows of 32768 slots do not fit AMS's shared memory. Up to {PROCESSORS} have a block of 1024
                 threads, more of them one of 512, of which two are on a multiprocessor: there a row takes
                 {number(far_counted[1][5].alone)} us, of which the accesses to L2 that wait are most, and AMS
                 {far_counted[1][5].predicted() / far_now[1]:.2f} of the event of `llama8b`. Batch 32 does not fit the
                 card's memory."""),
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
            + {
                "pages:16": ", pages of 16",
                "pre-rope": ", before RoPE",
                "log-sum-exps": ", log-sum-exps given",
                "no-overlap": ", kernels one after the other",
            }.get(shown[-1], "")
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
                 reading that the kernel or policy needs. The kernels are those of that
                 day; those of an event have [changed since](#on-a-gpu-counted), and no GPU has run them so."""),
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
    arguments.add_argument(
        "--check", type=pathlib.Path, metavar="FILE", help="fail where FILE has other parts, or the model has changed"
    )
    given = arguments.parse_args()
    if given.measured is not None:
        take(given.measured)
    measured, before = Measured(), CountedBefore()
    parts = {"measured": measured_text(measured), "analytic": counted_text(measured, before)}
    file = given.check or given.write
    if file is None:
        print("\n\n".join(parts.values()))
        return 0
    text = was = file.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            print(f"analytic.py: {file} has no markers {begin} and {end}", file=sys.stderr)
            return 2
        text = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{part}\n{end}", text, flags=re.DOTALL)
    if given.write is not None:
        file.write_text(text, encoding="utf-8")
        return 0
    wrong = [*before.wrong(), *([f"{file}: --write brings it up to date"] if text != was else [])]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
