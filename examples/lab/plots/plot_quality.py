#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws accuracy against budget from tables of `kvkeep eval -o csv`.

    plot_quality.py OUT.png TABLE.csv [TABLE.csv ...]

One panel for each scorer: the scorer alone, and under AMS in every form that the tables hold. `full`, `random`,
`streaming` and `oracle` stand in every panel for comparison. All tasks of a table count together, each look-up once.
With several tables (models trained from several seeds) a line is their mean and a bar their range; with one table a bar
is Wilson's 95 % interval. Needs matplotlib.
"""

import argparse
import csv
import math
import sys
from collections import defaultdict

# Okabe and Ito's palette: told apart by people with any colour vision.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
REFERENCES = {
    "full": ("#000000", "-"),
    "oracle": ("#555555", "--"),
    "streaming": ("#999999", "-."),
    "random": ("#999999", ":"),
}


def read(path):
    """(policy label, budget or None) -> [right, asked], over all tasks of one table."""
    counts = defaultdict(lambda: [0, 0])
    with open(path, newline="") as f:
        for row in csv.DictReader(f):
            budget = int(row["budget"]) if row["budget"] not in ("", "-") else None
            count = counts[row["policy"], budget]
            count[0] += int(row["right"])
            count[1] += int(row["look_ups"])
    if not counts:
        sys.exit("plot_quality.py: %s holds no rows; allowed the output of kvkeep eval -o csv" % path)
    return counts


def wilson(right, asked):
    z, n, p = 1.959963984540054, asked, right / asked
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return 100 * (middle - reach), 100 * (middle + reach)


def series(tables, policy):
    """[(budget, mean, low, high)] in per cent, by budget."""
    points = []
    for budget in sorted({b for table in tables for p, b in table if p == policy and b is not None}):
        shares = [
            100 * table[policy, budget][0] / table[policy, budget][1] for table in tables if (policy, budget) in table
        ]
        low, high = (min(shares), max(shares)) if len(tables) > 1 else wilson(*tables[0][policy, budget])
        points.append((budget, sum(shares) / len(shares), low, high))
    return points


def base_of(policy):
    """The scorer that a policy belongs to, and whether it is under an allocator."""
    name = policy.split(",")[0]
    return (name[4:], True) if name.startswith("ams-") else (name, False)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.png")
    p.add_argument("tables", metavar="TABLE.csv", nargs="+")
    p.add_argument("--title", default="")
    a = p.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tables = [read(t) for t in a.tables]
    policies = list(dict.fromkeys(policy for table in tables for policy, _ in table))
    scorers = list(dict.fromkeys(base_of(q)[0] for q in policies if q.split(",")[0].startswith("ams-")))
    others = [q for q in policies if base_of(q)[0] not in scorers and q.split(",")[0] not in REFERENCES]
    panels = [(s, [q for q in policies if base_of(q)[0] == s]) for s in scorers] + (
        [("other policies", others)] if others else []
    )
    if not panels:
        panels = [("", [q for q in policies if q.split(",")[0] not in REFERENCES])]
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.1 * columns, 3.4 * rows + 0.9), sharex=True, sharey=True, squeeze=False
    )
    budgets = sorted({b for table in tables for _, b in table if b is not None})
    for index, axis in enumerate(axes.flat):
        if index >= len(panels):
            axis.axis("off")
            continue
        title, shown = panels[index]
        for name, (colour, style) in REFERENCES.items():
            if name == "full" and any((name, None) in t for t in tables):
                level = [100 * t[name, None][0] / t[name, None][1] for t in tables if (name, None) in t]
                axis.axhline(sum(level) / len(level), color=colour, linestyle=style, linewidth=1, label=name)
            elif name in policies:
                points = series(tables, name)
                axis.plot(
                    [q[0] for q in points],
                    [q[1] for q in points],
                    color=colour,
                    linestyle=style,
                    linewidth=1.2,
                    label=name,
                )
        for number, policy in enumerate(shown):
            points = series(tables, policy)
            x = [q[0] * 2 ** (0.03 * (number - len(shown) / 2)) for q in points]
            axis.errorbar(
                x,
                [q[1] for q in points],
                yerr=[[q[1] - q[2] for q in points], [q[3] - q[1] for q in points]],
                color=COLOURS[number % len(COLOURS)],
                marker="o",
                markersize=3.5,
                linewidth=1.8 if number == 0 else 1.4,
                capsize=2,
                label=policy,
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(b) for b in budgets])
        axis.minorticks_off()
        axis.set_ylim(0, 103)
        axis.set_title(title, fontsize=11)
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.legend(fontsize=6.5, loc="upper left" if title == "" else "best", framealpha=0.85)
        if index % columns == 0:
            axis.set_ylabel("look-ups right, %")
        if index + columns >= len(panels):
            axis.set_xlabel("budget, slots a row")
    spread = "bars: range over %d models" % len(tables) if len(tables) > 1 else "bars: Wilson's 95 % interval"
    figure.suptitle((a.title + "; " if a.title else "") + spread, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(a.out, dpi=110)


if __name__ == "__main__":
    main()
