#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what a model still answers against the bytes that it keeps, from the CSV of examples/lab/bench/answers.py.

    plot_answers.py OUT.png ANSWERS.csv [ANSWERS.csv ...] [--policies "P;P over CACHE;..."] [--brief]

One panel for each model and way to ask. A line for each policy, one mark for each budget, shaded by its 95 % interval.
Solid: what is not kept is dropped; dashed: it is folded, and factors that lie far are not counted; "P over q4_0" is the
same policy over a cache of four bits, in the same colour with open marks. Stars: nothing is dropped, in 16, 8 and 4
bits. --brief: a panel for each model with the few lines that README tells of, named where they end, without intervals.
Needs matplotlib.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
import answers as table

# Okabe and Ito's palette: told apart by people with any colour vision.
COLOURS = ["#999999", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#000000"]
MARKS = ["o", "s", "^", "D", "v", "P", "X", "h"]
DEFAULT = (
    "streaming;tova;keydiff;adakv-expected;adakv-expected over q4_0;"
    "ams-expected,preset=question;ams-expected,preset=question over q4_0;"
    "expected,rest=fold;expected,rest=fold over q4_0;"
    "ams-tova,preset=question,rest=fold;ams-tova,preset=question,rest=fold over q4_0"
)
# What --brief draws: name, policy, caches, question, colour, the mark and the side of it that the name stands at.
BRIEF = [
    ("nothing dropped", "full", ("bf16", "q8_0", "q4_0"), "before", "#000000", -1, "above"),
    ("AMS over 4 bits,\nquestion known", "ams-expected,preset=question", ("q4_0",), "before", "#0072B2", 1, "left"),
    (
        "folded over 4 bits,\nquestion comes later",
        "ams-tova,preset=question,rest=fold",
        ("q4_0",),
        "after",
        "#009E73",
        -1,
        "right",
    ),
    (
        "AMS over 4 bits, question comes later",
        "ams-expected,preset=question",
        ("q4_0",),
        "after",
        "#D55E00",
        0,
        "under",
    ),
]
SIDES = {
    "above": dict(xytext=(10, 18), ha="right", va="bottom"),
    "left": dict(xytext=(-5, 4), ha="right", va="bottom"),
    "right": dict(xytext=(7, -3), ha="left", va="top"),
    "under": dict(xytext=(14, -8), ha="left", va="center"),
}
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
TITLES = {"before": "question in sight at the cut", "after": "question comes later", "stream": "long decode"}


def points_of(cells, model, question, policy, cache, mean):
    """Bytes, answers in percent and their interval, by ascending bytes: four sequences, or none."""
    found = []
    for key in cells:
        if key[0] == model and key[1] == question and key[3] == policy and key[4] == cache:
            by_text = cells[key].by_text(not mean)
            share, half = 100 * table.mean_of(by_text), 100 * table.half_of(by_text)
            found.append((table.bytes_of(cells, key), share, max(0, share - half), min(100, share + half)))
    return list(zip(*sorted(found)))


def draw_brief(plt, cells, models, mean):
    figure, axes = plt.subplots(1, len(models), figsize=(5.4 * len(models), 3.8), sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models):
        for name, policy, caches, question, colour, mark, side in BRIEF:
            every = [points_of(cells, model, question, policy, cache, mean) for cache in caches]
            line = sorted({(x, y) for got in every if got for x, y in zip(got[0], got[1])})
            if not line:
                continue
            axis.plot(*zip(*line), color=colour, marker="o", ms=6, lw=2)
            axis.annotate(name, line[mark], textcoords="offset points", color=colour, fontsize=9, **SIDES[side])
            for (x, y), bits in zip(line, ("4", "8", "16")) if policy == "full" else ():
                axis.annotate(
                    bits + " bits", (x, y), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8
                )
        axis.set_xscale("log", base=2)
        axis.set_xlim(3, 125)
        axis.set_xticks([3.125, 6.25, 12.5, 25, 50, 100], ["3", "6", "12", "25", "50", "100"])
        axis.set_ylim(-6, 118)
        axis.set_yticks(range(0, 101, 20))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#eeeeee", lw=0.6)
        axis.set_title(MODELS.get(model, model), fontsize=10)
        axis.set_xlabel("bytes that a step reads, % of the full cache in 16 bits")
    axes[0][0].set_ylabel("right answers, %")
    figure.tight_layout()
    return figure


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.png")
    p.add_argument("tables", metavar="ANSWERS.csv", nargs="+")
    p.add_argument("--policies", default=DEFAULT, help="those to draw, in order, separated by ;")
    p.add_argument("--mean", action="store_true", help="mean scores in place of whole answers")
    p.add_argument("--brief", action="store_true", help="few lines, one panel for each model")
    a = p.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = table.read(a.tables)
    models = sorted({k[0] for k in cells}, key=lambda m: (m != "smollm2", m))
    if a.brief:
        draw_brief(plt, cells, models, a.mean).savefig(a.out, dpi=110)
        return
    questions = [q for q in table.QUESTIONS if any(k[1] == q for k in cells)]
    wanted = [w for w in a.policies.split(";") if w]
    families = list(dict.fromkeys(w.partition(" over ")[0] for w in wanted))
    figure, axes = plt.subplots(
        len(models), len(questions), figsize=(6.2 * len(questions), 4.0 * len(models)), sharey=True, squeeze=False
    )
    for y, model in enumerate(models):
        for x, question in enumerate(questions):
            axis = axes[y][x]

            def points(policy, cache, model=model, question=question):
                return points_of(cells, model, question, policy, cache, a.mean)

            for cache, bits in (("bf16", "16 bits"), ("q8_0", "8 bits"), ("q4_0", "4 bits")):
                full = points("full", cache)
                if full:
                    axis.plot(full[0][0], full[1][0], "*", color="black", ms=11, zorder=5)
                    axis.annotate(
                        bits,
                        (full[0][0], full[1][0]),
                        textcoords="offset points",
                        xytext=(0, -15),
                        ha="center",
                        fontsize=8,
                    )
            for name in wanted:
                policy, _, cache = name.partition(" over ")
                i = families.index(policy)
                got = points(policy, cache or "bf16")
                if not got:
                    continue
                style = dict(
                    color=COLOURS[i % len(COLOURS)],
                    marker=MARKS[i % len(MARKS)],
                    ms=5,
                    lw=1.6,
                    ls="--" if "rest=fold" in name else "-",
                    mfc="white" if cache else None,
                )
                axis.plot(got[0], got[1], label=name, **style)
                axis.fill_between(got[0], got[2], got[3], color=style["color"], alpha=0.07, lw=0)
            axis.set_xscale("log", base=2)
            axis.set_xticks([3.125, 6.25, 12.5, 25, 50, 100], ["3", "6", "12", "25", "50", "100"])
            axis.set_ylim(-3, 103)
            axis.grid(color="#dddddd", lw=0.6)
            axis.set_title("%s, %s" % (model, TITLES[question]), fontsize=10)
            if y == len(models) - 1:
                axis.set_xlabel("bytes held near, % of the full cache in 16 bits")
            if x == 0:
                axis.set_ylabel("whole answers, %")
    handles = {}
    for axis in axes.flat:
        handles.update({label: h for h, label in zip(*axis.get_legend_handles_labels())})
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05 + 0.022 * ((len(handles) + 2) // 3) / len(models), 1, 1))
    figure.savefig(a.out, dpi=110)


if __name__ == "__main__":
    main()
