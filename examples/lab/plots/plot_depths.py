#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws where in a text policies lose a needle, from lines of `kvkeep eval --depth ... --samples-out FILE`.

    plot_depths.py OUT.png SAMPLES.jsonl [SAMPLES.jsonl ...] [--policies P;P;...] [--step PERCENT] [--shares]

One panel for each policy and budget, with --shares for each policy and share of the prompt's length: lengths on x,
depths on y (0 %: the text's start), the colour is the share of right answers, which is printed in each field. Lines
that ask for no needle or for several are left out, and said so. All files must be of the same way to ask; several tasks
count alike. Needs matplotlib.
"""

import argparse
import json
import sys
from collections import defaultdict


def read(paths, step, shares):
    """policy and budget, as shown -> (length, depth) -> scores; how many lines were left out."""
    fields, left_out = defaultdict(lambda: defaultdict(list)), 0
    for path in paths:
        with open(path, encoding="utf-8") as f:
            for line in f:
                sample = json.loads(line)
                if len(sample.get("depth", [])) != 1:
                    left_out += 1
                    continue
                depth = step * round(sample["depth"][0] / step)
                for answer in sample["answers"]:
                    budget = answer["budget"]
                    if shares and isinstance(budget, int):
                        budget = "%.0f %%" % (100 * budget / sample["length"])
                    name = (
                        answer["policy"]
                        + ("" if budget is None else " %s" % budget)
                        + (", prompt kept" if answer["prompt_kept"] else "")
                    )
                    fields[name][sample["length"], depth].append(answer["score"])
    if not fields:
        sys.exit(
            "plot_depths.py: no line asks for one needle; allowed the lines of kvkeep eval --samples-out on "
            "text/needle, ruler/niah-single-* and ruler/niah-multikey-*"
        )
    return fields, left_out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.png")
    p.add_argument("samples", metavar="SAMPLES.jsonl", nargs="+")
    p.add_argument(
        "--policies", default="", help='panels to draw, in order, separated by ; [all], such as "full;tova 256"'
    )
    p.add_argument(
        "--step", type=float, default=5, metavar="PERCENT", help="depths are rounded to multiples of this [5]"
    )
    p.add_argument(
        "--shares",
        action="store_true",
        help='budgets are named by their share of the prompt, such as "tova 25 %%", so that one panel has all lengths',
    )
    a = p.parse_args()
    if not 0 < a.step <= 100:
        p.error("--step: %s; allowed above 0 up to 100" % a.step)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fields, left_out = read(a.samples, a.step, a.shares)
    panels = [w for w in a.policies.split(";") if w] or list(fields)
    for panel in panels:
        if panel not in fields:
            sys.exit("plot_depths.py: no answers of '%s'; allowed %s" % (panel, "; ".join(fields)))
    if left_out:
        print("plot_depths.py: %d lines ask for no needle or for several, and are left out" % left_out, file=sys.stderr)
    lengths = sorted({length for panel in panels for length, _ in fields[panel]})
    depths = sorted({depth for panel in panels for _, depth in fields[panel]})
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(1.4 + across * (1.3 + 0.75 * len(lengths)), down * (1.1 + 0.34 * len(depths))),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels):
        scores = fields[panel]
        shares = [
            [sum(s) / len(s) if (s := scores.get((length, depth))) else float("nan") for length in lengths]
            for depth in depths
        ]
        # Colours that people with any colour vision tell apart.
        image = axis.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for y, row in enumerate(shares):
            for x, share in enumerate(row):
                if share == share:
                    axis.text(
                        x,
                        y,
                        "%.0f" % (100 * share),
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if share < 0.6 else "black",
                    )
        axis.set_title(panel, fontsize=10)
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), ["%g %%" % d for d in depths])
        axis.spines[:].set_visible(False)
    figure.supxlabel("tokens of the prompt", fontsize=10)
    figure.supylabel("depth of the needle", fontsize=10)
    figure.colorbar(image, ax=axes, label="right answers, share", shrink=0.9)
    figure.savefig(a.out, dpi=130)


main()
