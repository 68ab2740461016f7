# SPDX-License-Identifier: Apache-2.0
"""What the kernels of an event and of an observed layer of a prefill must at least take on a GPU, by counting. What
bench/analytic.py --help says of the count holds here."""

import dataclasses
import json
import pathlib

COUNTED_BEFORE = pathlib.Path(__file__).resolve().parent / "gpu/counted_before.jsonl"

# An H100. What the run measured of it: copying, clock. Everything else is assumed.
BANDWIDTH = 3.0e12  # bytes a second that a copy reads and writes
CLOCK = 1.98e9
NEAR = 5.5e12  # bytes a second between L2 and all multiprocessors
MATRIX = 600e12  # bf16 operations a second by mma.sync
PROCESSORS = 132
ISSUE = 4 * CLOCK  # instructions of a warp a second and multiprocessor
EXP2 = CLOCK / 2  # MUFU instructions of a warp a second and multiprocessor: 16 lanes a clock
MEMORY_US, NEAR_US = 0.7, 0.25  # from an access to its answer, out of memory and L2
# Clocks of a warp that is alone: an instruction; f64 or a conversion, besides; shared memory or L1; a shuffle.
STEP, SLOW, SHARED, SHUFFLE = 5, 11, 30, 24
BARRIER_US = 0.05
GAP, EAGER_GAP = 1.3, 2.5  # us from the end of a kernel to the start of the next
EARLY_GAP = 0.5  # where the next one has begun already, and waits: assumed
HOST_LINK, HOST_US = 50e9, 2.0  # bytes a second over PCIe, us that a copy takes besides
TABLES = (376, 48)  # bytes a row of the two tables that every event sends: of a Row 328
SECTOR = 32  # bytes that a scattered write occupies
NEAR_SLOTS = 3072  # of the longest row that AMS holds in shared memory
LAYER = {"qwen7b": 233e6, "llama8b": 218e6}  # weights of one layer
SHAPES = {"qwen7b": (28, 28, 4, 128), "llama8b": (32, 32, 8, 128)}
CASES = [("qwen7b", 1), ("llama8b", 1), ("llama8b", 32)]

# Instructions of a warp. The attention: 16 queries by 32 slots, with one number of each query or two, and beside them
# for every 32 slots.
PRODUCTS = {"statistics": (132, 182), "columns": (112, 162)}
TILE = {"statistics": 291, "columns": 400}
QUERY_BYTES = 16 * 128 * 2 + 272  # of 16 queries in shared memory
# Their statistics by eight warps; a round of keys, 64 KiB, and what each slot and thread has; of a block, of
# which two fit.
STATE_BYTES, BESIDE_QUERIES, SHARED_BYTES = 16 * 8 * 8, 65536 + 6400, (227 * 1024 - 1024) // 2
ROUND, PART = 256, 512  # slots that a block has at a time, and whose statistics are taken together
START, MOST_SLOTS = 256, 4096  # slots for which a block could be at work while it begins; most that it looks at
SPLIT, SPLIT_WIDE = 505, 677  # eight queries of a tile in bf16 or f32, which two rounds split
SPLIT_BESIDE = 200  # of a tile, besides
TURN = 154  # one component of a query
WINDOW_PROBE = 23  # 32 positions looked at
MOVE = 260  # four words of 16 bytes
# AMS, passes of a row, per slot of a thread: (instructions, of them f64 and conversions, answers of shared memory or L2
# that are waited for).
PASSES = {
    "mass, score and credit asked for": (26, 0, 0),
    "copied, pooled over five, suffix": (10 + 79 + 10, 1, 7),
    "two sums in integers": (2 * 18, 2 * 8, 2),
    "mass": (17, 8, 1),
    "credit: known, its part, its sum, both": (7 + 20 + 18 + 32, 6 + 8 + 12, 4),
    "written": (31, 0, 1),
    "largest, prefix sums": (10 + 41 + 5, 8, 3),
    "orders": (33, 0, 1),
}
PROBE = (11, 2, 1)  # of 32 cuts, by a warp: instructions, f64 and conversions, answers
# One warp, for 32 cuts or segments: cuts that differ; merged, with what lies beside; split, the same; shares.
DIVIDE = 27 + 79 + 43 + 118 + 39 + 74
POUR = (320, 40)  # a round of quotas for 32 segments but for what follows: instructions, f64 and conversions
POUR_EACH = (2, 1)  # of it, one after the other for every segment
RANK_EIGHT = (36, 8)  # eight remainders compared
BIT, BESIDE_BITS, BITS = 20, 130, 22  # one bit of 64 orders by a warp, beside them, bits until they are told apart
WRITE = 22 + 8  # 32 slots
# Where rows are not near: one digit of the key of the last slot that stays, and for 32 slots.
DIGIT, DIGIT_SLOTS = 132, 18


def pieces(n, of):
    return -(-n // of)


def alone(instructions=0, slow=0, shared=0, shuffles=0, near=0, memory=0, barriers=0):
    """us of a warp whose every instruction and access waits for the one before."""
    return (
        (instructions * STEP + slow * SLOW + shared * SHARED + shuffles * SHUFFLE) / CLOCK * 1e6
        + near * NEAR_US
        + memory * MEMORY_US
        + barriers * BARRIER_US
    )


@dataclasses.dataclass
class Kernel:
    name: str
    bytes: float
    blocks: int  # that have work
    resident: int  # of them on a multiprocessor, by registers, threads and shared memory
    alone: float  # us of a block
    instructions: float = 0
    operations: float = 0
    exponentials: float = 0
    near: float = 0  # bytes between L2 and multiprocessors
    follows: bool = False  # in the launch of the one before it

    def round(self, blocks):
        of_machine, of_processor = blocks / self.blocks, pieces(blocks, PROCESSORS) / self.blocks
        machine = max(self.bytes / BANDWIDTH, self.near / NEAR) * of_machine
        processor = (
            max(self.instructions / ISSUE, self.exponentials / EXP2, self.operations / (MATRIX / PROCESSORS))
            * of_processor
        )
        return max(self.alone, machine * 1e6, processor * 1e6)

    def rounds(self):
        return pieces(self.blocks, PROCESSORS * self.resident)

    def predicted(self):
        """us from its start to its end."""
        whole, rest = divmod(self.blocks, PROCESSORS * self.resident)
        return whole * self.round(PROCESSORS * self.resident) + (self.round(rest) if rest else 0)

    def floor(self):
        return self.bytes / BANDWIDTH * 1e6


def ams(rows, length, budget):
    near = length <= NEAR_SLOTS
    if near:
        threads = 256 if length <= 512 or rows > 2 * PROCESSORS else 1024 if rows <= PROCESSORS else 512
    else:
        threads = 256 if length <= 4096 else 1024 if rows <= PROCESSORS else 512
    warps, each = threads // 32, pieces(length, threads)
    cuts, segments = (47, 33) if near else (49, 50)
    turns, own = pieces(cuts, 32), pieces(segments, warps)  # of a warp; segments that a warp selects in
    instructions, slow, waits = (each * sum(part[i] for part in PASSES.values()) for i in range(3))
    where = "shared" if near else "near"
    of_row = dict(instructions=instructions, slow=slow, memory=5, barriers=30) | {where: waits}
    reductions = dict(instructions=9 * 60, shuffles=9 * 15)
    probes = dict(instructions=40 + 11 * PROBE[0], slow=11 * PROBE[1]) | {where: 11 * PROBE[2]}
    rank = pieces(segments, 8) * turns
    # Two rounds of pouring.
    one_warp = dict(
        instructions=turns * DIVIDE + 2 * (turns * POUR[0] + segments * POUR_EACH[0] + rank * RANK_EIGHT[0]),
        slow=2 * (turns * POUR[1] + segments * POUR_EACH[1] + rank * RANK_EIGHT[1] // 4),
        shared=turns * 20 + 2 * (segments // 4 + rank * 4 // 2),
        shuffles=turns * 10 + 2 * 10,
    )
    if near:
        selection = dict(instructions=own * (BITS * BIT + BESIDE_BITS), slow=own * BITS)
    else:
        slots = pieces(pieces(length, segments), 32)
        selection = dict(
            instructions=own * (4 * (DIGIT + DIGIT_SLOTS * slots) + 20 * slots),
            near=own * 5 * slots,
            shared=own * 4 * (6 + slots),
            shuffles=own * 4 * 8,
        )
    write = dict(instructions=WRITE * each + 80, shuffles=12)
    chain = sum(alone(**part) for part in (of_row, reductions, probes, one_warp, selection, write))
    issued = (
        warps * sum(part["instructions"] for part in (of_row, reductions, write))
        + turns * probes["instructions"]
        + one_warp["instructions"]
        + selection["instructions"] / own * segments
    )
    slots_in_all = rows * length
    # Mass and credit read and written, what segments follow written, scores read.
    return Kernel(
        "AMS: mass, credit, segments, quotas, selection",
        slots_in_all * 6 * 4 + rows * budget * 4,
        rows,
        1024 // threads,
        chain,
        rows * issued,
        near=slots_in_all * (4 if near else 14 * 8),
    )


def pieces_at_once(rows, every, slots):
    """pieces_at_once() of cuda/window_attention_matrix.cu on this chip."""
    counts = [n for n in range(1, every + 1) if n * slots <= max(slots, MOST_SLOTS)]
    return min(counts, key=lambda n: pieces(rows * pieces(every, n), 2 * PROCESSORS) * (n * slots + START))


def attention(shape, rows, length, queries, wide=False, one_launch=True):
    """The two passes over the keys. wide: every query is two numbers. one_launch: where every block has a whole row in
    both, one launch makes them. Its queries are brought once, and the slots that it looked at last for the statistics
    are the first for the columns, still in shared memory if there is room for all of a warp's keys."""
    steps = pieces(queries, 16)
    turns = pieces(2 * steps, 20) if wide else 1  # in which the queries are in shared memory
    products = 2 * rows * queries * length * shape[3] * (2 if wide else 1)
    keys, shown = rows * length * shape[3] * 2, rows * steps * QUERY_BYTES * (2 if wide else 1)
    whole = lambda slots: pieces_at_once(rows, pieces(length, slots), slots) == pieces(length, slots)
    one_launch = one_launch and whole(PART) and whole(ROUND)
    stay = one_launch and not wide and BESIDE_QUERIES + steps * (QUERY_BYTES + STATE_BYTES) <= SHARED_BYTES
    again = 1 - ROUND / length if stay else 1  # of the keys that are read for the columns

    def one(loop, slots, written, readings, end):
        every = pieces(length, slots)
        at_once = pieces_at_once(rows, every, slots)
        blocks, tiles = rows * pieces(every, at_once), min(at_once, every) * slots // ROUND  # of 32 slots and a warp
        of_tile = steps * PRODUCTS[loop][wide] + TILE[loop]
        # The first keys are waited for; the next are on their way while those are multiplied.
        chain = alone(300, memory=4, near=2, barriers=6) + tiles * readings * alone(of_tile / readings, shared=8) + end
        return Kernel(
            f"window attention, {loop}",
            keys * readings + shown + written,
            blocks,
            2,
            chain,
            rows * pieces(length, 32) * of_tile,
            products,
            rows * pieces(length, 32) * steps * 16,
            blocks * steps * QUERY_BYTES * (2 if wide else 1) + keys * readings,
        )

    statistics = one("statistics", PART, 0, turns, alone(300, near=3, barriers=4))
    columns = one("columns", ROUND, rows * length * 8, 1, 0)
    if not one_launch:
        return [statistics, columns]
    # Counted one after the other, as if no block had begun with its columns before all have their statistics.
    of_block = columns.alone - alone(300, memory=4, near=2, barriers=6) + alone(60, barriers=1)
    return [
        statistics,
        dataclasses.replace(
            columns,
            bytes=keys * again + rows * length * 8 + (shown if turns > 1 else 0),
            near=keys * again + (shown if turns > 1 else 0),
            alone=of_block,
            follows=True,
        ),
    ]


def splitting(shape, groups, window, wide=False):
    """Of queries into the form in which they are multiplied, 16 by a warp. wide: they are f32, and split twice."""
    _, query_heads, kv_heads, dim = shape
    queries = groups * query_heads * window * dim
    tiles = groups * kv_heads * pieces(query_heads // kv_heads * window, 16)
    instructions = (4 * SPLIT_WIDE if wide else 2 * SPLIT) + SPLIT_BESIDE
    return Kernel(
        "window attention: queries split",
        queries * ((4 if wide else 2) + (4 if wide else 2)),
        pieces(tiles, 4),
        6,
        alone(instructions, memory=7 if wide else 5, shuffles=24),
        tiles * instructions,
        near=queries * (2 * 4 + 4 if wide else 2 + 2),
    )


def kernels(shape, batch, length, budget, window=32, given=False, before_rope=False):
    """An `ams-tova` event over all layers. given: the engine hands over the log-sum-exps."""
    layers, query_heads, kv_heads, dim = shape
    groups = layers * batch
    rows, slots = groups * kv_heads, groups * kv_heads * length
    prepare = Kernel(
        "prepare: windows, newest positions",
        rows * (length - budget) * 4,
        rows,
        9,
        alone(200 + 3 * WINDOW_PROBE, memory=5, near=3),
        rows * (4 * 110 + 100 + 3 * WINDOW_PROBE),
    )
    if before_rope:
        numbers = groups * window * query_heads * dim
        each = query_heads * dim // 128  # components of a thread
        turn = alone(180 + each * TURN, 50, each * 2, memory=3, barriers=2)
        prepare = Kernel(
            "prepare: and queries turned",
            prepare.bytes + numbers * (2 + 4),
            rows + groups * window,
            9,
            turn,
            numbers / 32 * TURN,
        )
    passes = attention(shape, rows, length, query_heads // kv_heads * window, before_rope, not given)
    # TOVA's scores are the attention itself. A thread has four slots of all heads of a layer, and looks their places
    # up twice.
    tova = Kernel(
        "TOVA, mean over the layer's heads",
        slots * 8,
        groups * pieces(length, 512),
        8,
        alone(120 + 80 * kv_heads, near=2, memory=3),
        slots / 32 * 20,
    )
    # Keys and values: blocks of 1024 words of 16 bytes at a time. What other columns move is counted with them.
    tiles, parts = pieces(budget * dim * 2, 16 * 1024), 2 if rows < 200 else 1
    compaction = Kernel(
        "compaction of K, V and columns",
        rows * budget * (2 * dim * 2 * 2 + 4 * 4),
        rows * 2 * parts,
        5,
        alone(100, memory=3) + pieces(tiles, parts) * alone(MOVE, memory=1, near=1, barriers=1),
        rows * 2 * tiles * 8 * MOVE,
    )
    return [
        prepare,
        splitting(shape, groups, window, before_rope),
        *(passes[1:] if given else passes),
        tova,
        ams(rows, length, budget),
        compaction,
    ]


def tables_us(rows):
    return sum(GAP + HOST_US + rows * each / HOST_LINK * 1e6 for each in TABLES)


def total(counted, rows, gap=EARLY_GAP):
    """us of an event. The first kernel follows a copy, which it does not overlap with."""
    return tables_us(rows) + max(gap, GAP) - gap + sum(k.predicted() + (0 if k.follows else gap) for k in counted)


def rows_of(name, batch):
    return SHAPES[name][0] * SHAPES[name][2] * batch


class CountedBefore:
    """The kernels that were measured: what was counted of them, and by hand: from, to."""

    def __init__(self):
        rows = [json.loads(line) for line in COUNTED_BEFORE.read_text(encoding="utf-8").splitlines()]
        case = lambda row: (row["model"], row["batch"])
        self.kernels = {of: [] for of in CASES}
        self.by_hand = {of: [] for of in CASES}
        self.events = {}
        for row in rows:
            if "event" in row:
                self.events[row["event"], case(row)] = row
            else:
                fields = {key: x for key, x in row.items() if key not in ("model", "batch", "by_hand")}
                self.kernels[case(row)].append(Kernel(**fields))
                self.by_hand[case(row)].append(row["by_hand"])

    def us(self, event):
        return [self.events[event, case]["us"] for case in CASES]

    def wrong(self):
        """What no longer holds: the model's rounds, or its distance from the count by hand."""
        for case in CASES:
            every = self.kernels[case]
            for event, of in ("all", every), ("given", [k for k in every if "statistics" not in k.name]):
                row, now = self.events[event, case], total(of, rows_of(*case), GAP)
                low, high = row["by_hand"]
                if abs(now / row["us"] - 1) > 0.01:
                    yield f"{event} of {case}: {now:.1f} us of what was counted as {row['us']}"
                if not 0.85 * low <= now <= 1.15 * high:
                    yield f"{event} of {case}: {now:.1f} us, by hand {low} to {high}"


def prefill_kernels(shape, tokens, select=2048, window=32, observed=8):
    """(launches, kernel) of one layer of one prompt that is observed."""
    _, query_heads, kv_heads, dim = shape
    statistics, sums = attention(shape, kv_heads, tokens, query_heads // kv_heads * window)
    split = splitting(shape, 1, window)
    pooled, ranks, hidden = 2 * kv_heads * tokens * 4 + tokens * 4, tokens * 4, query_heads * dim * 2
    # Four passes: 128 entries of a warp counted and placed.
    instructions = 4 * pieces(tokens, 128) * 553
    chain = 4 * pieces(tokens, 32 * 128) * alone(553, near=2, shared=8, shuffles=4) + 4 * alone(
        500, shared=70, barriers=8
    )
    sort = Kernel("ranks, by one block", tokens * (2 * (4 + 3 * 8) + 4 * SECTOR), 1, 1, chain, instructions)
    many = pieces(tokens, 4096)
    return [
        (2, Kernel("prepare, rows of the window", 0, 1, 10, 2 * alone(200, memory=4))),
        (1, dataclasses.replace(split, name="prompt scores: attention, queries split")),
        (1, dataclasses.replace(statistics, name="prompt scores: attention, statistics")),
        (1, dataclasses.replace(sums, name="prompt scores: attention, sums")),
        (1, Kernel("prompt scores: pooling, sums over heads", pooled, pieces(tokens, 256), 8, alone(100, memory=3))),
        (1, sort),
        (
            2,
            Kernel(
                f"layer selector: {observed} layers of ranks",
                observed * ranks,
                many,
                4,
                16 * alone(observed * 10, memory=1) + alone(200, memory=4),
            ),
        ),
        (
            2,
            Kernel(
                "where it selects: narrow, gather hidden states",
                ranks + select * (4 + 2 * hidden),
                select,
                8,
                alone(300, memory=4),
            ),
        ),
    ]


def floor_us(shape, batch, length, budget):
    """One reading of the keys, one reading and writing of what stays."""
    layers, _, kv_heads, dim = shape
    rows = layers * kv_heads * batch
    return (rows * length * dim * 2 + rows * budget * 2 * dim * 2 * 2) / BANDWIDTH * 1e6
