#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The published way of running an AMS + TOVA event, timed, for comparison with `kvkeep_bench --benchmark_filter=Event`.

    python3 bench/published_ams.py [--threads 2] [--runs 15]

The release is Python on torch: attention of the window through torch operators with keys repeated to the query heads,
then per KV head Python loops over segments whose indices are read back one by one. This is that structure in our words,
from the description of the method (docs/method/ams.md, variant official): same tensors, same operators in the same
order, same loops and reads, queries handed over ready. One layer, batch 1, T = 1536 to 1024. Prints one line per shape,
dtype and preset: the median in ms per layer.
"""

import argparse
import math
import statistics
import time

import torch

PRESETS = {
    "registry": dict(window=32, segment_mass=0.02, min_segment=32, max_segment=1024, min_quota=8, decay=0.8, mix=0.7),
    "paper": dict(window=128, segment_mass=0.1, min_segment=16, max_segment=256, min_quota=1, decay=0.9, mix=0.9),
}
SHAPES = {"qwen7b": (28, 4, 128), "llama8b": (32, 8, 128)}
EPS, SINK, RECENT = 1e-12, 4, 32


def repeat_kv(x, groups):
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, groups, t, d).reshape(b, h * groups, t, d)


def attention(queries, keys):
    """softmax over all keys, causal inside the window."""
    w, t = queries.shape[2], keys.shape[2]
    logits = queries @ repeat_kv(keys, queries.shape[1] // keys.shape[1]).transpose(2, 3) / math.sqrt(queries.shape[3])
    mask = torch.full((w, t), float("-inf"), dtype=logits.dtype).triu(t - w + 1)
    return torch.softmax((logits + mask).float(), -1).to(queries.dtype)


def tova(queries, keys):
    g = attention(queries[:, :, -1:], keys)[:, :, 0].mean(1, keepdim=True)
    g[..., -1] = g.max()
    return g.expand(-1, keys.shape[1], -1)


def usage(queries, keys, window):
    a = attention(queries[:, :, -window:], keys)[..., :-window].mean(2)
    a = torch.nn.functional.avg_pool1d(a, 5, stride=1, padding=2)
    b, hq, n = a.shape
    u = a.view(b, keys.shape[1], hq // keys.shape[1], n).mean(2)
    return torch.nn.functional.pad(u, (0, window), value=u.max().item())


def normalised(x):
    x = torch.relu(x) + EPS
    return x / x.sum(-1, keepdim=True)


def boundaries(mass, p):
    t = mass.shape[0]
    sums = torch.cumsum(mass, 0)
    cuts = {0, t}
    for threshold in torch.arange(p["segment_mass"], 1.0, p["segment_mass"]):
        cuts.add(min(max(int(torch.searchsorted(sums, threshold.to(sums.dtype)).item()), 1), t - 1))
    cuts = sorted(cuts)
    pieces = []
    for start, end in zip(cuts, cuts[1:]):
        while end - start > p["max_segment"]:
            pieces.append((start, start + p["max_segment"]))
            start += p["max_segment"]
        pieces.append((start, end))
    merged, i = [], 0
    while i < len(pieces):
        start, end = pieces[i]
        i += 1
        while end - start < p["min_segment"] and i < len(pieces):
            end = pieces[i][1]
            i += 1
        merged.append((start, end))
    return merged


def quotas(mass, segments, budget, min_quota):
    lengths = [end - start for start, end in segments]
    weights = [mass[start:end].sum().item() for start, end in segments]
    q = [min(min_quota, n) for n in lengths]
    rest = budget - sum(q)
    q = [min(n, x + round(rest * w / (sum(weights) + EPS))) for n, x, w in zip(lengths, q, weights)]
    i = 0
    while sum(q) != budget:
        if sum(q) > budget and q[i] > min(min_quota, lengths[i]):
            q[i] -= 1
        elif sum(q) < budget and q[i] < lengths[i]:
            q[i] += 1
        i = (i + 1) % len(q)
    return q


def select(scores, segments, q, budget):
    t = scores.shape[0]
    chosen = []
    for (start, end), n in zip(segments, q):
        chosen.extend((torch.topk(scores[start:end], n).indices + start).tolist())
    must = set(range(SINK)) | set(range(t - RECENT, t))
    rest = sorted((s for s in chosen if s not in must), key=lambda s: scores[s].item(), reverse=True)
    return sorted(must | set(rest[: budget - len(must)]))


def event(queries, keys, values, credit, budget, p):
    scores = tova(queries, keys)
    mass = normalised(usage(queries, keys, p["window"]))
    credit = p["decay"] * credit + (1 - p["decay"]) * mass
    used = normalised(p["mix"] * mass + (1 - p["mix"]) * normalised(credit))
    index = []
    for h in range(keys.shape[1]):
        segments = boundaries(used[0, h], p)
        index.append(select(scores[0, h], segments, quotas(used[0, h], segments, budget, p["min_quota"]), budget))
    index = torch.tensor(index).unsqueeze(0)
    wide = index.unsqueeze(-1).expand(-1, -1, -1, keys.shape[3])
    return keys.gather(2, wide), values.gather(2, wide), credit.gather(2, index)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--runs", type=int, default=15)
    args = a.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.threads} threads, median of {args.runs} runs, ms per layer")
    with torch.inference_mode():
        for shape, (hq, hkv, d) in SHAPES.items():
            for dtype in (torch.float32, torch.bfloat16):
                keys, values = (torch.randn(1, hkv, 1536, d).to(dtype) for _ in range(2))
                queries = torch.randn(1, hq, 160, d).to(dtype)
                credit = torch.zeros(1, hkv, 1536, dtype=dtype)
                for name, p in PRESETS.items():
                    times = []
                    for run in range(args.runs + 2):
                        start = time.perf_counter()
                        kept, _, _ = event(queries, keys, values, credit, 1024, p)
                        assert kept.shape[2] == 1024
                        if run >= 2:
                            times.append((time.perf_counter() - start) * 1e3)
                    print(f"{shape:8} {str(dtype)[6:]:9} {name:9} {statistics.median(times):8.2f}", flush=True)


if __name__ == "__main__":
    main()
