#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The published way of scoring and cutting one layer, timed, for comparison with `kvkeep_bench
--benchmark_filter=Score`.

    python3 bench/published_scorers.py [--threads 2] [--runs 15] [--slots 1536] [--keep 1024]
                                       [--only expected,keydiff] [--shape qwen7b] [--dtype float32]

Each scorer is Python on torch: its arithmetic through torch operators, keys repeated to the query heads where the
release repeats them, numbers of the model's dtype where the release keeps them so, then topk over the row and a gather
of K and V. This is that arithmetic in our words, from the descriptions of the methods; queries are handed over ready
(the releases project them again). One layer, batch 1. Prints one line per shape, dtype and scorer: the median in ms per
layer.
"""

import argparse
import math
import statistics
import time

import torch

from published_ams import SHAPES, repeat_kv

SINK = 4
clock = time.perf_counter


def half_turn(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def angles(positions, d):
    phase = positions[:, None].float() * (1e6 ** (-torch.arange(0, d, 2).float() / d))[None]
    phase = torch.cat((phase, phase), -1)
    return phase.cos(), phase.sin()


def window_attention(queries, keys, window):
    """Softmax over all keys of the newest queries, causal inside the window, turned at one position as published."""
    q = queries[:, :, -window:]
    cos, sin = angles(torch.tensor([keys.shape[2]]), keys.shape[3])
    q = half_turn(q, cos.to(q.dtype), sin.to(q.dtype))
    logits = q @ repeat_kv(keys, q.shape[1] // keys.shape[1]).transpose(2, 3) / math.sqrt(q.shape[3])
    w, t = q.shape[2], keys.shape[2]
    logits = logits + torch.full((w, t), float("-inf"), dtype=logits.dtype).triu(t - w + 1)
    return torch.softmax(logits.float(), -1).to(q.dtype)


def tova(queries, keys, values):
    g = window_attention(queries, keys, 1)[:, :, 0].mean(1, keepdim=True)
    g[..., -1] = g.max()
    return g.expand(-1, keys.shape[1], -1)


def snapkv(queries, keys, values, window=64, pool=5):
    a = window_attention(queries, keys, window)[..., :-window].mean(2)
    a = torch.nn.functional.avg_pool1d(a, pool, stride=1, padding=pool // 2)
    u = a.view(1, keys.shape[1], -1, a.shape[-1]).mean(2)
    return torch.nn.functional.pad(u, (0, window), value=u.max().item())


def keydiff(queries, keys, values):
    anchor = torch.nn.functional.normalize(keys, p=2, dim=-1).mean(2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(keys, anchor, dim=-1)


def mean_rotation(first, count, d):
    cos, sin = angles(torch.arange(first, first + count), d)
    eye, half = torch.eye(d), d // 2
    turn = torch.zeros(d, d)
    turn[half:, :half], turn[:half, half:] = torch.eye(half), -torch.eye(half)
    return (cos.unsqueeze(1) * eye + sin.unsqueeze(1) * turn).mean(0)


def expected(queries, keys, values, future=512, epsilon=1e-2):
    q = queries[:, :, SINK:].float()
    mean = q.mean(2, keepdim=True)
    centred = q - mean
    covariance = torch.einsum("bhni,bhnj->bhij", centred, centred) / q.shape[2]
    mean = mean.squeeze(2)
    r = mean_rotation(q.shape[2] + SINK, future, keys.shape[3])
    mean = (mean @ r.T).to(keys.dtype)
    covariance = (r @ covariance @ r.T).to(keys.dtype)
    k, v = keys[:, :, SINK:], values[:, :, SINK:]
    d = keys.shape[3]
    groups = queries.shape[1] // keys.shape[1]
    kt = repeat_kv(k, groups).transpose(2, 3)
    x = (mean.unsqueeze(2) @ kt).squeeze(2) / math.sqrt(d)
    x = x + torch.einsum("bhin,bhij,bhjn->bhn", kt, covariance, kt) / d / 2
    e = torch.softmax(x, -1).view(1, keys.shape[1], groups, -1).mean(2)
    g = (e + epsilon) * v.norm(dim=-1)
    return torch.nn.functional.pad(g, (SINK, 0), value=g.max().item())


def rkv(queries, keys, values, window=8, kernel=7, mix=0.07, retain=0.1, threshold=0.5):
    t, groups = keys.shape[2], queries.shape[1] // keys.shape[1]
    cos, sin = angles(torch.arange(t - window, t), keys.shape[3])
    q = half_turn(queries[:, :, -window:], cos.to(keys.dtype), sin.to(keys.dtype))
    logits = (
        (q @ repeat_kv(keys, groups).transpose(2, 3) / math.sqrt(keys.shape[3]))
        .view(1, keys.shape[1], groups, window, t)
        .max(2)
        .values
    )
    a = torch.softmax(logits[..., :-window].float(), -1).to(keys.dtype).mean(2)
    importance = torch.nn.functional.max_pool1d(a, kernel, stride=1, padding=kernel // 2)
    unit = keys[0] / (keys[0].norm(dim=-1, keepdim=True) + 1e-8)
    similar = unit @ unit.transpose(1, 2)
    for h in range(similar.shape[0]):
        similar[h].fill_diagonal_(0)
    above = similar > threshold
    newest = torch.where(
        above, torch.arange(t).view(1, t, 1).expand_as(above), torch.zeros_like(above, dtype=torch.long)
    )
    first = newest.topk(max(1, int(t * retain / t)), dim=-2).indices
    similar.scatter_(-2, first, torch.zeros_like(first, dtype=similar.dtype))
    redundancy = torch.softmax(similar.mean(1).float(), -1).to(keys.dtype)[None, :, :-window]
    g = importance * mix - redundancy * (1 - mix)
    return torch.nn.functional.pad(g, (0, window), value=g.max().item())


SCORERS = {"tova": tova, "snapkv": snapkv, "keydiff": keydiff, "expected": expected, "rkv": rkv}


def cut(scorer, queries, keys, values, keep):
    index = scorer(queries, keys, values).topk(keep, -1).indices.unsqueeze(-1).expand(-1, -1, -1, keys.shape[3])
    return keys.gather(2, index).contiguous(), values.gather(2, index).contiguous()


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--runs", type=int, default=15)
    a.add_argument("--slots", type=int, default=1536)
    a.add_argument("--keep", type=int, default=1024)
    a.add_argument("--only", default=",".join(SCORERS))
    a.add_argument("--shape", default=",".join(SHAPES))
    a.add_argument("--dtype", default="float32,bfloat16")
    args = a.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {args.threads} threads, {args.slots} slots to {args.keep}, median of {args.runs} "
        "runs, ms per layer"
    )
    with torch.inference_mode():
        for shape in args.shape.split(","):
            hq, hkv, d = SHAPES[shape]
            for name in args.dtype.split(","):
                dtype = getattr(torch, name)
                keys, values = (torch.randn(1, hkv, args.slots, d).to(dtype) for _ in range(2))
                queries = torch.randn(1, hq, 256, d).to(dtype)
                for scorer in args.only.split(","):
                    times = []
                    for run in range(args.runs + 2):
                        start = clock()
                        kept, _ = cut(SCORERS[scorer], queries, keys, values, args.keep)
                        assert kept.shape[2] == args.keep
                        if run >= 2:
                            times.append((clock() - start) * 1e3)
                    print(
                        f"{shape:8} {name:9} {scorer:9} {statistics.median(times):9.2f}   least {min(times):9.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
