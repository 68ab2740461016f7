#!/usr/bin/env python3
"""Draws what policies keep of answers, from tables of `kvkeep eval -o csv` over tasks with text.

    plot_needles.py OUT.png TABLE.csv [TABLE.csv ...] [--policies P;P;...]

One panel for each way to ask (question before or after the cut) and length; a line for each policy, over the budget as a share of the text; dashed: the same with
rest=fold. Tasks count alike. Bars are 95 % intervals: those of the tasks, in quadrature. Needs matplotlib.
"""
import argparse
import csv
import math
import sys
from collections import defaultdict

# Okabe and Ito's palette: told apart by people with any colour vision.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999"]
FOLDED = ",rest=fold"


def read(paths):
    """(question, length) -> policy -> budget or None -> {task: row}; the first table that has a cell wins."""
    cells = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for path in paths:
        with open(path, newline="") as f:
            for row in csv.DictReader(f):
                budget = int(row["budget"]) if row["budget"].isdigit() else None
                cells[row["question"], int(row["length"])][row["policy"]][budget].setdefault(row["task"], row)
    if not cells:
        sys.exit("plot_needles.py: no rows; allowed the output of kvkeep eval -o csv on tasks over text")
    return cells


def mean(rows):
    shares = [100 * float(r["share"]) for r in rows.values()]
    halves = [50 * (float(r["share_high"]) - float(r["share_low"])) for r in rows.values()]
    return sum(shares) / len(shares), math.sqrt(sum(h * h for h in halves)) / len(halves)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.png")
    p.add_argument("tables", metavar="TABLE.csv", nargs="+")
    p.add_argument("--policies", default="", help="those to draw, in order, separated by ; [all]")
    a = p.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    cells = read(a.tables)
    panels = sorted(cells, key=lambda c: (c[1], c[0] != "before"))
    wanted = [w for w in a.policies.split(";") if w] or list(dict.fromkeys(q for panel in panels for q in cells[panel]))
    scorers = list(dict.fromkeys(w.replace(FOLDED, "") for w in wanted))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.3), sharey=True, squeeze=False)
    for axis, panel in zip(axes.flat, panels):
        question, length = panel
        for budget, rows in cells[panel].get("full", {}).items():
            if budget is None:
                axis.axhline(mean(rows)[0], color="#777777", lw=1, ls="--")
                axis.annotate("full", (0.5, mean(rows)[0] + 0.4), xycoords=("axes fraction", "data"), ha="center", va="bottom", fontsize=8, color="#555555")
        for policy in wanted:
            points = sorted((100 * b / length, *mean(rows)) for b, rows in cells[panel].get(policy, {}).items() if b is not None)
            if points:
                x, y, bars = zip(*points)
                folds = FOLDED in policy
                axis.errorbar(x, y, bars, marker="o", ms=4, lw=1.6, capsize=2, color=COLOURS[scorers.index(policy.replace(FOLDED, "")) % len(COLOURS)], ls="--" if folds else "-",
                              label="with rest=fold" if folds else policy)
        axis.set_title("%s tokens, question %s" % (length, "in sight at the cut" if question == "before" else "after the cut"), fontsize=10)
        axis.set_xscale("log", base=2)
        ticks = sorted({100 * b / length for d in cells[panel].values() for b in d if b is not None})
        axis.set_xticks(ticks, ["%.3g %%" % t for t in ticks])
        axis.minorticks_off()
        axis.set_xlabel("slots kept, share of the text")
        axis.grid(axis="y", color="#dddddd", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 106)
    axes.flat[0].set_ylabel("tokens of the answer, %")
    lines = {}
    for axis in axes.flat:
        for line, label in zip(*axis.get_legend_handles_labels()):
            lines.setdefault(label, line)
    if "with rest=fold" in lines:
        lines["with rest=fold"] = Line2D([], [], color="#555555", ls="--", lw=1.6)
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=min(5, len(lines)), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05 + 0.035 * ((len(lines) + 4) // 5), 1, 1))
    figure.savefig(a.out, dpi=130)


main()
