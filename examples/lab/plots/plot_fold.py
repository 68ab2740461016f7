#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what policies hold near against what they answer, from tables of `kvkeep eval --diagnostics -o csv`.

    plot_fold.py OUT.png TABLE.csv [TABLE.csv ...]

Bytes near are those behind the last event, as a share of the full cache: one row of the tables must be of policy
`full`. Left: look-ups that are right, all tasks together, each once; a bar is the bootstrap's 95 % interval where
tables give it by task, averaged in quadrature. Middle: error of the attention output. Right: bytes of factors that a
decoded token brings near, as a share of the full cache; policies that do not fold bring none. Needs matplotlib.
"""

import argparse
import csv
import math
import sys
from collections import OrderedDict

# Okabe and Ito's palette: told apart by people with any colour vision.
COLOURS = {
    "streaming": "#999999",
    "ams-tova": "#E69F00",
    "ams-keydiff": "#D55E00",
    "tova + fold": "#56B4E9",
    "ams-tova + fold": "#0072B2",
    "ams-keydiff + fold": "#CC79A7",
    "sekv": "#009E73",
    "sekv, no sketch": "#009E73",
    "sekv, trained router": "#000000",
}
STYLES = {"streaming": ":", "ams-tova": "--", "ams-keydiff": "--", "sekv, no sketch": ":"}


def family(policy):
    """What a line is named by: the policy, and which of its options matter here."""
    name = policy.split(",")[0]
    if "rest=fold" in policy:
        name += " + fold"
    if "sketch=false" in policy:
        name += ", no sketch"
    if "router=" in policy:
        name += ", trained router"
    return name


def read(paths):
    """[(family, kept bytes, share right, half of the interval, output error, moved bytes)], a row a policy; and the
    full cache's bytes."""
    rows = OrderedDict()
    for path in paths:
        with open(path, newline="") as f:
            for row in csv.DictReader(f):
                rows.setdefault((row["policy"], row["budget"]), []).append(row)
    full, points = None, []
    for (policy, _), tasks in rows.items():
        asked = sum(int(t["look_ups"]) for t in tasks)
        right = sum(int(t["right"]) for t in tasks) / asked
        reach = [(float(t["sample_high"]) - float(t["sample_low"])) / 2 * int(t["look_ups"]) / asked for t in tasks]
        errors = [float(t["output_error"]) for t in tasks if t["output_error"]]
        kept = int(tasks[0]["kept_bytes"])
        if policy == "full":
            full = kept
            continue
        moved = float(tasks[0]["moved_bytes"]) if tasks[0]["moved_bytes"] else 0.0
        points.append(
            (
                family(policy),
                kept,
                100 * right,
                100 * math.sqrt(sum(r * r for r in reach)),
                math.sqrt(sum(e * e for e in errors) / len(errors)) if errors else math.nan,
                moved,
            )
        )
    if full is None:
        sys.exit("plot_fold.py: no row of policy full in the tables; allowed tables with one")
    return points, full


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.png")
    p.add_argument("tables", metavar="TABLE.csv", nargs="+")
    a = p.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points, full = read(a.tables)
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6))
    for name in [n for n in COLOURS if any(q[0] == n for q in points)]:
        own = sorted(q for q in points if q[0] == name)
        x = [100 * q[1] / full for q in own]
        look = dict(color=COLOURS[name], linestyle=STYLES.get(name, "-"), marker="o", markersize=4, linewidth=1.6)
        axes[0].errorbar(x, [q[2] for q in own], yerr=[q[3] for q in own], capsize=2, label=name, **look)
        axes[1].plot(x, [q[4] for q in own], **look)
        if any(q[5] > 0 for q in own):
            axes[2].plot(x, [100 * q[5] / full for q in own], **look)
    for axis, title in zip(
        axes,
        ("look-ups right, %", "error of the attention output", "factors moved near for a token, % of the full cache"),
    ):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("bytes near, % of the full cache")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(True, color="#dddddd", linewidth=0.6)
    axes[0].set_ylim(0, 103)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8.5, loc="lower center", ncol=5, frameon=False)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(a.out, dpi=110)


if __name__ == "__main__":
    main()
