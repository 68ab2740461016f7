#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `example_serving` measured.

    plot_serving.py POOLS.csv OUT.png    of --csv: pace, requests in flight, preemptions and answers by size of the pool
    plot_serving.py STEPS.csv OUT.png    of --steps: pages in use and requests running over time

Needs matplotlib.
"""

import argparse
import csv
import sys
from collections import defaultdict

# Okabe and Ito's palette: told apart by people with any colour vision.
COLOURS = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7"]
MARKS = "osD^v"


def read(path):
    """run -> columns in the order of the file, numbers where they are."""
    runs = defaultdict(lambda: defaultdict(list))
    with open(path, newline="") as f:
        for row in csv.DictReader(f):
            name = row.pop("run", None) or row.pop("policy", None)
            for column, value in row.items():
                runs[name][column].append(float(value))
    if not runs:
        sys.exit("plot_serving.py: %s holds no rows; allowed the output of example_serving --csv or --steps" % path)
    return runs


def over_time(runs, plt):
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 2])
    runs.pop("restricted", None)  # its requests run in the engine's steps
    for (name, run), colour in zip(runs.items(), COLOURS[1:]):
        label = "without kvkeep" if name == "engine" else "with kvkeep: " + name
        above.plot(run["step"], run["pages_used"], color=colour, linewidth=1.3, label=label)
        below.plot(run["step"], run["running"], color=colour, linewidth=1.5)
        below.plot(run["step"], run["waiting"], color=colour, linewidth=0.9, linestyle=":")
        above.axvline(run["step"][-1], color=colour, linewidth=0.8, linestyle="--")
        above.annotate(
            "all served",
            (run["step"][-1], 0),
            color=colour,
            fontsize=8,
            rotation=90,
            ha="left",
            va="bottom",
            xytext=(2, 3),
            textcoords="offset points",
        )
    pages = next(iter(runs.values()))["pages"][0]
    above.axhline(pages, color="#888888", linewidth=1, linestyle="-.", label="pool: %d pages" % pages)
    above.set_ylabel("pages in use")
    above.set_ylim(0, pages * 1.25)
    above.legend(fontsize=8, loc="upper center", ncols=2, framealpha=0.9)
    below.set_ylabel("requests")
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    below.legend(below.get_lines()[:2], ["running", "waiting"], fontsize=8, loc="upper right", ncols=2, framealpha=0.9)
    figure.suptitle("The same requests on the same pages", fontsize=11)
    return (above, below), figure, 0


def by_pool(runs, plt):
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), sharex=True)
    (pace, flight), (preempted, right) = axes
    pages = sorted({p for run in runs.values() for p in run["pages"]})
    for number, (name, run) in enumerate(runs.items()):
        order = sorted(range(len(run["pages"])), key=lambda i: run["pages"][i])
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKS[number % len(MARKS)],
            "linewidth": 1.5,
            "markersize": 5,
            "label": name,
        }
        if name == "restricted":
            style["linestyle"] = "--"  # it lies on the engine's line in some panels

        def draw(axis, values, **other):
            axis.plot([pages.index(run["pages"][i]) for i in order], [values[i] for i in order], **{**style, **other})

        draw(pace, run["to_engine"])
        for i in order:  # over the rounds
            low, high = run["to_engine_lowest"][i], run["to_engine_highest"][i]
            pace.plot(
                [pages.index(run["pages"][i])] * 2,
                [low, high],
                color=style["color"],
                linewidth=1,
                solid_capstyle="butt",
            )
        draw(flight, run["in_flight"])
        draw(preempted, run["preempted"])
        if sum(run["asked_at_once"] + run["asked_later"]):
            draw(right, [100 * r / max(1, a) for r, a in zip(run["answered_at_once"], run["asked_at_once"])])
            draw(
                right,
                [100 * r / max(1, a) for r, a in zip(run["answered_later"], run["asked_later"])],
                linestyle=":",
                markerfacecolor="white",
                label=None,
            )
        else:
            draw(right, [100 * s for s in run["same"]])
    asks = any(sum(run["asked_at_once"]) for run in runs.values())
    pace.axhline(1, color="#888888", linewidth=0.8)
    for axis, title in (
        (pace, "Tokens per CPU second, engine without kvkeep = 1"),
        (flight, "Requests in flight, mean"),
        (preempted, "Preemptions"),
        (
            right,
            "Questions answered, %\n(solid: at the end of a prompt, dotted: after an answer)"
            if asks
            else "Answers' tokens that are the engine's, %",
        ),
    ):
        axis.set_title(title, fontsize=9)
        axis.set_ylim(0, 1.1 * max(1, axis.dataLim.y1))
        axis.set_xticks(range(len(pages)), ["%d" % p for p in pages])
    right.set_ylim(0, 105)
    for axis in axes[1]:
        axis.set_xlabel("pages in the pool")
    handles, labels = pace.get_legend_handles_labels()
    columns = max(1, min(len(labels), 110 // (8 + max(map(len, labels)))))
    figure.legend(handles, labels, fontsize=9, loc="lower center", ncols=columns, frameon=False)
    return axes.flat, figure, 0.02 + 0.03 * -(-len(labels) // columns)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", metavar="CSV")
    p.add_argument("out", metavar="OUT.png")
    a = p.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = read(a.table)
    timeline = "step" in next(iter(runs.values()))
    axes, figure, bottom = (over_time if timeline else by_pool)(runs, plt)
    for axis in axes:
        axis.grid(True, color="#dddddd", linewidth=0.6)
    figure.tight_layout(rect=(0, bottom, 1, 0.98 if timeline else 1))
    figure.savefig(a.out, dpi=110)


if __name__ == "__main__":
    main()
