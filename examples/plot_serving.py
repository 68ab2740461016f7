#!/usr/bin/env python3
"""Draws pages in use and requests running over time from `example_serving --csv`.

    plot_serving.py SERVING.csv OUT.png

Above: pages in use after every step, without kvkeep (policy full) and with it, and the size of the pool. Below: requests that have pages, and (thin) those that wait.
Needs matplotlib.
"""
import argparse
import csv
import sys
from collections import defaultdict

# Okabe and Ito's palette: told apart by people with any colour vision.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7"]


def read(path):
    """policy -> columns of numbers, in the order of the file."""
    runs = defaultdict(lambda: defaultdict(list))
    with open(path, newline="") as f:
        for row in csv.DictReader(f):
            for name in ("step", "pages_used", "pages", "running", "waiting"):
                runs[row["policy"]][name].append(int(row[name]))
    if not runs:
        sys.exit("plot_serving.py: %s holds no rows; allowed the output of example_serving --csv" % path)
    return runs


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", metavar="SERVING.csv")
    p.add_argument("out", metavar="OUT.png")
    a = p.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = read(a.table)
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 2])
    for number, (policy, run) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        label = "without kvkeep" if policy == "full" else "with kvkeep: " + policy
        above.plot(run["step"], run["pages_used"], color=colour, linewidth=1.3, label=label)
        below.plot(run["step"], run["running"], color=colour, linewidth=1.5, label=label + ", running")
        below.plot(run["step"], run["waiting"], color=colour, linewidth=0.9, linestyle=":", label="waiting")
        above.axvline(run["step"][-1], color=colour, linewidth=0.8, linestyle="--")
        above.annotate("all served", (run["step"][-1], 0), color=colour, fontsize=8, rotation=90, ha="left", va="bottom", xytext=(2, 3), textcoords="offset points")
    pages = next(iter(runs.values()))["pages"][0]
    above.axhline(pages, color="#000000", linewidth=1, linestyle="-.", label="pool: %d pages" % pages)
    above.set_ylabel("pages in use")
    above.set_ylim(0, pages * 1.25)
    above.legend(fontsize=8, loc="upper center", ncols=3, framealpha=0.9)
    below.set_ylabel("requests")
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    below.legend(fontsize=8, loc="upper right", ncols=2, framealpha=0.9)
    for axis in (above, below):
        axis.grid(True, color="#dddddd", linewidth=0.6)
    figure.suptitle("The same requests on the same pages", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(a.out, dpi=110)


if __name__ == "__main__":
    main()
