#!/usr/bin/env python3
"""Tables of what a model writes, over several texts: from samples of `kvkeep eval --samples-out`.

    answers.py SAMPLES.jsonl [SAMPLES.jsonl ...]                        a row for each policy, cache and budget
    answers.py SAMPLES.jsonl ... --pairs "ams-tova=tova;..."            differences, paired by sample, instead
    answers.py SAMPLES.jsonl ... --csv OUT.csv                          every cell, by text, for programs

A file is of one text, which its name says: manual.jsonl, or manual@after@q4_0.jsonl, of which the first word counts.
A cell is the share of whole answers in percent, the mean over texts; in parentheses its 95 % interval, bootstrap over
samples within texts and tasks; the worst text is named. `bytes`: what the cache keeps after the cut, in percent of the
full one in 16 bits, of the layers that are cut. --mean takes the mean score in place of whole answers.
"""
import argparse
import csv
import json
import os
import sys
from collections import defaultdict

import numpy as np

RESAMPLES = 2000


class Cell:
    """Scores of one policy at one budget over one cache, by text and task, in the order of seeds."""

    def __init__(self):
        self.scores = defaultdict(lambda: defaultdict(dict))  # text -> task -> seed -> score
        self.bytes = []

    def by_text(self):
        return {text: [np.array([s[k] for k in sorted(s)]) for _, s in sorted(tasks.items())] for text, tasks in sorted(self.scores.items())}


def read(paths, mean):
    cells, full = defaultdict(Cell), {}
    for path in paths:
        text = os.path.basename(path).split(".")[0].split("@")[0]
        with open(path) as f:
            for line in f:
                sample = json.loads(line)
                key = (text, sample["task"], sample["seed"], sample.get("depth") and tuple(sample["depth"]))
                for answer in sample["answers"]:
                    cell = cells[answer["policy"], sample["cache_dtype"], answer["budget"]]
                    score = answer["score"] if mean else float(answer["score"] > 1 - 1e-6)
                    cell.scores[text][sample["task"]][key[2:]] = score
                    if answer["policy"] == "full" and sample["cache_dtype"] in ("bf16", "f16", "f32"):
                        full[key] = answer["kept_bytes"] * (0.5 if sample["cache_dtype"] == "f32" else 1)
                    cell.bytes.append((key, answer["kept_bytes"]))
    if not cells:
        sys.exit("answers.py: no samples; allowed what kvkeep eval --samples-out writes")
    return cells, full


def mean_of(by_text):
    return float(np.mean([np.mean([task.mean() for task in tasks]) for tasks in by_text.values()]))


def resampled(by_text):
    """Means over texts and tasks of samples drawn again, the same draws for every policy."""
    draw, means = np.random.default_rng(0), []
    for tasks in by_text.values():
        means.append(np.mean([s[draw.integers(0, len(s), (RESAMPLES, len(s)))].mean(axis=1) for s in tasks], axis=0))
    return np.mean(means, axis=0)


def interval(by_text):
    return np.quantile(resampled(by_text), [0.025, 0.975])


def share_of_bytes(cell, full):
    known = [b / full[k] for k, b in cell.bytes if k in full]
    return 100 * float(np.mean(known)) if known else float("nan")


def name_of(policy, dtype):
    return "`%s`" % policy + ("" if dtype in ("bf16", "f16", "f32") else " over `%s`" % dtype)


def row(cells):
    print("| " + " | ".join(cells) + " |")


def table(cells, full, policies):
    texts = sorted({t for c in cells.values() for t in c.scores})
    row(["policy", "budget", "bytes", "answers"] + texts + ["worst"])
    row(["---"] + ["---:"] * (3 + len(texts)) + ["---"])
    order = sorted(cells, key=lambda k: (-(k[2] or 1 << 40), -mean_of(cells[k].by_text())))
    for key in order:
        if policies and key[0] not in policies:
            continue
        by_text = cells[key].by_text()
        low, high = interval(by_text)
        each = {t: 100 * mean_of({t: v}) for t, v in by_text.items()}
        worst = min(each, key=each.get) if len(each) > 1 and min(each.values()) < max(each.values()) else "-"
        row([name_of(*key[:2]), str(key[2] or "-"), "%.0f %%" % share_of_bytes(cells[key], full), "**%.0f** (%.0f-%.0f)" % (100 * mean_of(by_text), 100 * low, 100 * high)] +
            ["%.0f" % each[t] if t in each else "" for t in texts] + [worst])
    count = {k: sum(len(s) for tasks in c.by_text().values() for s in tasks) for k, c in cells.items()}
    print("\n%d to %d samples a cell, over %s." % (min(count.values()), max(count.values()), ", ".join(texts)))


def pairs(cells, asked):
    texts = sorted({t for c in cells.values() for t in c.scores})
    row(["policy", "against", "budget", "points (95 %)"] + texts)
    row(["---", "---"] + ["---:"] * (2 + len(texts)))
    for ours, theirs in asked:
        for policy, dtype, budget in sorted(cells, key=lambda k: -(k[2] or 1 << 40)):
            other = cells.get((theirs, dtype, budget)) or cells.get((theirs, dtype, None))
            if policy != ours or other is None:
                continue
            a, b = cells[policy, dtype, budget].by_text(), other.by_text()
            difference = {t: [x - y for x, y in zip(a[t], b[t])] for t in a if t in b and [len(x) for x in a[t]] == [len(y) for y in b[t]]}
            if not difference:
                continue
            low, high = interval(difference)
            row([name_of(policy, dtype), "`%s`" % theirs, str(budget or "-"), "%+.0f (%+.0f to %+.0f)" % (100 * mean_of(difference), 100 * low, 100 * high)] +
                ["%+.0f" % (100 * mean_of({t: difference[t]})) if t in difference else "" for t in texts])


def write_csv(path, cells, full):
    with open(path, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["policy", "cache", "budget", "text", "task", "samples", "answers", "bytes_percent"])
        for (policy, dtype, budget), cell in sorted(cells.items(), key=lambda kv: (kv[0][0], kv[0][1], -(kv[0][2] or 1 << 40))):
            share = share_of_bytes(cell, full)
            for text, tasks in sorted(cell.scores.items()):
                for task, scores in sorted(tasks.items()):
                    out.writerow([policy, dtype, budget or "", text, task, len(scores), "%.4f" % np.mean(list(scores.values())), "%.2f" % share])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("samples", metavar="SAMPLES.jsonl", nargs="+")
    p.add_argument("--policies", default="", help="rows, separated by ; [all]")
    p.add_argument("--pairs", default="", help="differences in place of answers: POLICY=BASE, separated by ;")
    p.add_argument("--mean", action="store_true", help="mean scores in place of whole answers")
    p.add_argument("--csv", help="also write every cell, by text and task")
    a = p.parse_args()
    cells, full = read(a.samples, a.mean)
    if a.csv:
        write_csv(a.csv, cells, full)
    if a.pairs:
        # a policy's options hold = too: the base follows the last one that a policy's name follows
        asked = []
        for one in a.pairs.split(";"):
            at = max((i for i, c in enumerate(one) if c == "=" and any(one[i + 1:] == k[0] for k in cells)), default=-1)
            if at < 0:
                sys.exit("answers.py: --pairs: '%s' does not end in =POLICY of these samples" % one)
            asked.append((one[:at], one[at + 1:]))
        return pairs(cells, asked)
    table(cells, full, [w for w in a.policies.split(";") if w])


main()
