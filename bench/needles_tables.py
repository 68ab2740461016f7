#!/usr/bin/env python3
"""Prints the tables of docs/results.md from samples of `kvkeep eval --score tokens --samples-out FILE`.

    needles_tables.py SAMPLES.jsonl [SAMPLES.jsonl ...] [--policies P;P;...]     one row per policy, one column per budget
    needles_tables.py SAMPLES.jsonl [SAMPLES.jsonl ...] --ams                    one row per scorer and budget: alone, under AMS, under AMS as published

A cell has the mean share of right tokens over the tasks, half of its 95 % interval (bootstrap over samples, by task), and the share of samples that are right to the last token.
With --ams, differences are paired by sample, and shown where their interval excludes 0: a, points above or below the
scorer alone; o, above or below AMS as published. Needs numpy.
"""
import argparse
import json
import sys
from collections import defaultdict

import numpy as np

RESAMPLES = 2000


def read(paths):
    """(policy, budget) -> task -> the samples' scores, and the budgets, largest first."""
    cells, prompts = defaultdict(lambda: defaultdict(dict)), {}
    for path in paths:
        with open(path) as f:
            for line in f:
                sample = json.loads(line)
                of_task = prompts.setdefault((sample["task"], sample["seed"]), sample["prompt"])
                if of_task != sample["prompt"]:
                    sys.exit("needles_tables.py: %s: sample %d of %s has another prompt than in an earlier file; allowed files of one --length, --samples and --haystack" % (path, sample["seed"], sample["task"]))
                for answer in sample["answers"]:
                    cells[answer["policy"], answer["budget"]][sample["task"]][sample["seed"]] = answer["score"]
    if not cells:
        sys.exit("needles_tables.py: no samples; allowed what kvkeep eval --samples-out writes")
    scores = {cell: {task: np.array([by_seed[s] for s in sorted(by_seed)]) for task, by_seed in tasks.items()} for cell, tasks in cells.items()}
    return scores, sorted({b for _, b in scores if b is not None}, reverse=True)


def resampled(tasks):
    """Means over tasks of samples drawn again, the same draws for every policy."""
    draw = np.random.default_rng(0)
    return np.mean([s[draw.integers(0, len(s), (RESAMPLES, len(s)))].mean(axis=1) for _, s in sorted(tasks.items())], axis=0)


def mean(tasks):
    return np.mean([s.mean() for s in tasks.values()])


def half(means):
    low, high = np.quantile(means, [0.025, 0.975])
    return (high - low) / 2


def cell(tasks):
    if tasks is None:
        return ""
    whole = np.mean([(s == 1).mean() for s in tasks.values()])
    return "%.0f ± %.0f; %.0f" % (100 * mean(tasks), 100 * half(resampled(tasks)), 100 * whole)


def against(ours, other, mark):
    """Points that ours has more or less, where the paired interval excludes 0: "+5o"."""
    if other is None:
        return ""
    difference = {task: ours[task] - other[task] for task in ours}
    low, high = np.quantile(resampled(difference), [0.025, 0.975])
    return "%+.0f%s" % (100 * mean(difference), mark) if low > 0 or high < 0 else ""


def print_row(cells):
    print("| " + " | ".join(cells) + " |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("samples", metavar="SAMPLES.jsonl", nargs="+")
    p.add_argument("--policies", default="", help="rows, in order, separated by ; [all, by their mean]")
    p.add_argument("--ams", action="store_true", help="AMS over each scorer beside the scorer alone and AMS as published")
    p.add_argument("--settings", default="", help="with --ams: options of AMS, a column each, as name=value,...;... [none: our defaults]")
    a = p.parse_args()
    scores, budgets = read(a.samples)
    policies = list(dict.fromkeys(policy for policy, _ in scores))
    if a.ams:
        settings = a.settings.split(";")
        print_row(["scorer", "budget", "alone"] + ["`%s`" % w if w else "AMS" for w in settings] + ["`variant=official`"])
        print_row(["---"] + ["---:"] * (len(settings) + 3))
        for scorer in policies:
            for b in budgets:
                alone, published = scores.get((scorer, b)), scores.get(("ams-" + scorer + ",variant=official", b))
                row = ["`%s`" % scorer, str(b), cell(alone)]
                for w in settings:
                    ours = scores.get(("ams-" + scorer + ("," + w if w else ""), b))
                    marks = [m for m in (against(ours, alone, "a"), against(ours, published, "o")) if m] if ours else []
                    row.append(cell(ours) + (" (" + ", ".join(marks) + ")" if marks else ""))
                if any(row[3:]):
                    print_row(row + [cell(published)])
        return
    order = [w for w in a.policies.split(";") if w] or sorted(policies, key=lambda q: -np.mean([mean(t) for (r, _), t in scores.items() if r == q]))
    print_row(["policy"] + [str(b) for b in budgets])
    print_row(["---"] + ["---:"] * len(budgets))
    for policy in order:
        if (policy, None) in scores:
            print_row(["`%s`" % policy, cell(scores[policy, None])] + [""] * (len(budgets) - 1))
        else:
            print_row(["`%s`" % policy] + [cell(scores.get((policy, b))) for b in budgets])


main()
