#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what policies do layer by layer, from what kvkeep eval writes over a text.

    plot_layers.py OUT.png SAMPLES.jsonl [SAMPLES.jsonl ...] [--policies P;P;...] [--base POLICY]
    plot_layers.py OUT.png EVAL.json [EVAL.json ...] [--policies P;P;...]

Lines of `--samples-out` under policies that narrow prompts (asl, fastkv, ...): left how far ranks have settled behind
each layer, a thin line for each prompt and a thick one, the median, for each task; right, if any selected, which layers
did under each policy, with the share of answers that are right there, of those that --base [full] gives. Output of `-o
json` under policies that fold (sekv, rest=fold): spans opened per query, a row a layer and a column a KV head, a panel
a policy. Needs matplotlib.
"""

import argparse
import json
import sys
from collections import defaultdict
from statistics import fmean, median

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"]  # of Okabe and Ito's palette


def narrowed(paths, policies, base):
    """task -> [relative variance by layer of a prompt]; policy -> layer -> [right]; the layers."""
    variance, chosen, layers = defaultdict(dict), defaultdict(lambda: defaultdict(list)), 0
    for path in paths:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f):
                sample = json.loads(line)
                able = {a["policy"]: a["score"] for a in sample["answers"]}.get(base, 1) > 0
                for answer in sample["answers"]:
                    if "selection_layer" not in answer or (policies and answer["policy"] not in policies):
                        continue
                    layers = max(layers, len(answer["relative_variance"]))
                    curve = [(l, x) for l, x in enumerate(answer["relative_variance"]) if x is not None]
                    # Behind the layer that selects there is none; the longest of a prompt says most.
                    if len(curve) > len(variance[sample["task"]].get((path, number), ())):
                        variance[sample["task"]][path, number] = curve
                    if able:
                        chosen[answer["policy"]][answer["selection_layer"]].append(answer["score"] > 1 - 1e-6)
    if not layers:
        sys.exit(
            "plot_layers.py: no answer of a policy that narrows prompts; allowed lines of kvkeep eval --samples-out "
            "under asl, fastkv, gemfilter, pyramidinfer"
        )
    return {t: list(c.values()) for t, c in variance.items()}, chosen, layers


def draw_narrowed(a, plt):
    variance, chosen, layers = narrowed(a.files, a.wanted, a.base)
    shown = [p for p in (a.wanted or chosen) if p in chosen]
    selected = any(layer >= 0 for policy in shown for layer in chosen[policy])
    figure, axes = plt.subplots(
        1,
        1 + selected,
        figsize=(13 if selected else 8, 1.8 + 0.32 * max(len(shown), 10)),
        width_ratios=[1, 1.1][: 1 + selected],
        layout="constrained",
        squeeze=False,
    )
    left = axes[0][0]
    for colour, (task, curves) in zip(COLOURS * 3, sorted(variance.items())):
        by_layer = defaultdict(list)
        for curve in filter(None, curves):
            left.plot(*zip(*curve), color=colour, alpha=0.18, linewidth=0.7)
            for layer, x in curve:
                by_layer[layer].append(x)
        if by_layer:
            left.plot(
                sorted(by_layer), [median(by_layer[l]) for l in sorted(by_layer)], color=colour, linewidth=2, label=task
            )
    left.set(
        xlabel="layer",
        ylabel="relative variance of ranks",
        title="how far ranks have settled",
        xlim=(0, layers - 1),
        ylim=(0, None),
    )
    left.legend(fontsize=8, frameon=False)
    if not selected:
        return figure
    right = axes[0][1]
    for row, policy in enumerate(shown):
        counts = chosen[policy]
        total = sum(map(len, counts.values()))
        for layer, right_ones in counts.items():
            x = layers if layer < 0 else layer
            right.scatter(
                x,
                row,
                s=30 + 420 * len(right_ones) / total,
                c=[fmean(right_ones)],
                cmap="RdYlBu",
                vmin=0,
                vmax=1,
                edgecolors="black",
                linewidths=0.5,
                zorder=2,
            )
    right.set_yticks(range(len(shown)), shown, fontsize=8)
    right.set_ylim(len(shown) - 0.4, -0.6)
    right.set_xlim(-1, layers + 1)
    right.set_xticks([*range(0, layers, 5), layers], [*map(str, range(0, layers, 5)), "none"])
    right.grid(axis="x", alpha=0.3)
    right.set(xlabel="layer that selected (area: share of prompts)", title="selection, and what is right behind it")
    figure.colorbar(
        plt.cm.ScalarMappable(plt.Normalize(0, 100), "RdYlBu"),
        ax=right,
        label="answers right, %% of those that `%s` gives" % a.base,
    )
    return figure


def draw_opened(a, plt):
    maps = defaultdict(list)
    for path in a.files:
        with open(path, encoding="utf-8") as f:
            for row in json.load(f):
                if row.get("opened_by_head") and (not a.wanted or row["policy"] in a.wanted):
                    maps[row["policy"] + ("" if row["budget"] is None else " %s" % row["budget"])].append(
                        row["opened_by_head"]
                    )
    if not maps:
        sys.exit(
            "plot_layers.py: no row has opened_by_head; allowed the output of kvkeep eval -o json under sekv or "
            "rest=fold"
        )
    mean = {
        name: [[fmean(of[l][h] for of in all_of) for h in range(len(all_of[0][l]))] for l in range(len(all_of[0]))]
        for name, all_of in maps.items()
    }
    rows, heads = len(next(iter(mean.values()))), len(next(iter(mean.values()))[0])
    across = min(5, len(mean))
    down = -(-len(mean) // across)
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(1.5 + across * (1.9 + 0.3 * heads), down * (1 + 0.19 * max(rows, 8))),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    most = max(x for m in mean.values() for r in m for x in r) or 1
    for axis in axes.flat[len(mean) :]:
        axis.axis("off")
    for axis, (name, values) in zip(axes.flat, mean.items()):
        image = axis.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=most)
        axis.set_title(
            "%s\n%.2f a query" % (name.replace(",", ",\n"), sum(map(sum, values)) / rows / heads), fontsize=8
        )
        axis.set_xticks(range(heads))
    for axis in axes[-1]:
        axis.set_xlabel("KV head")
    for axis in axes[:, 0]:
        axis.set_ylabel("full layer")
    figure.colorbar(image, ax=axes, label="spans opened per query")
    return figure


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.png")
    p.add_argument("files", metavar="FILE", nargs="+")
    p.add_argument("--policies", default="", help="those to draw, in order, separated by ; [all]")
    p.add_argument("--base", default="full", help="a policy whose wrong answers are left out [full]")
    a = p.parse_args()
    a.wanted = [w for w in a.policies.split(";") if w]
    if len({name.endswith(".jsonl") for name in a.files}) != 1:
        p.error("files of both kinds; allowed lines of --samples-out, or output of -o json")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    (draw_narrowed if a.files[0].endswith(".jsonl") else draw_opened)(a, plt).savefig(a.out, dpi=110)


if __name__ == "__main__":
    main()
