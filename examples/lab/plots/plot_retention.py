#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what stayed in the cache: which positions of the text every layer and KV head still holds, step by step.

    ask="kvkeep generate --model examples/model --task ask --forced"
    $ask --policy tova,budget=96,interval=32 --retention tova.json
    $ask --policy ams-tova,budget=96,interval=32 --retention ams.json
    plot_retention.py tova.json ams.json --out retention.png

One column a policy. The panel on top is the whole model: the darker a cell, the more rows (layer, KV head) hold that
position at that step. Below, one panel for every layer and head. A fact that the trace will still ask for is orange
while it is held, and a thin black line once it is lost. The numbers of the picture go to a CSV file beside it. Needs
numpy and matplotlib.
"""

import argparse
import csv
import json
import os
import sys

import numpy as np

# Okabe and Ito's palette: told apart by every kind of colour vision, and in grey by lightness.
HELD, NEEDED, LOST, GONE, LATER = "#56A0D3", "#D55E00", "#333333", "#E9E9E9", "#FFFFFF"


class Run:
    """One retention file."""

    def __init__(self, path):
        with open(path) as file:
            data = json.load(file)
        if data.get("kvkeep_retention") != 1:
            raise ValueError("%s is no retention file of `kvkeep generate --retention`" % path)
        self.policy, self.task, self.seed, self.model = data["policy"], data["task"], data["seed"], data["model"]
        self.prompt, self.steps = data["prompt_length"], data["new_tokens"]
        self.layers, self.heads = data["layers"], data["kv_heads"]
        self.look_ups, self.events = data.get("look_ups", []), data["events"]
        self.positions = self.prompt + self.steps - 1
        # (position, the step that reads it last), of the positions that some step can still see
        self.needed = [
            (p, until - self.prompt)
            for p, until in zip(data.get("needed", []), data.get("needed_until", []))
            if until > self.prompt
        ]

    def rows(self):
        return [(i, layer, head) for i, layer in enumerate(self.layers) for head in range(self.heads)]

    def held(self, layer_index, head):
        """bool [positions, steps]: what the row holds behind each step."""
        held = np.zeros((self.positions, self.steps), bool)
        alive = np.zeros(self.positions, bool)
        alive[: self.prompt] = True
        cuts = {event["step"]: event["kept"][layer_index][head] for event in self.events}
        for step in range(self.steps):
            if step > 0:
                alive[self.prompt + step - 1] = True
            if step in cuts:
                alive[:] = False
                alive[cuts[step]] = True
            held[:, step] = alive
        return held

    def name(self):
        about = {"official": ", official"}.get(self.policy.get("variant"), "")
        return self.policy["policy"] + (" (is told the questions)" if self.policy["policy"] == "oracle" else about)

    def accuracy(self):
        return sum(x["right"] for x in self.look_ups) / len(self.look_ups) if self.look_ups else None


def image(run, held):
    """Colours of one row's panel."""
    import matplotlib.colors as colors

    step, position = np.meshgrid(np.arange(run.steps), np.arange(run.positions))
    picture = np.empty((run.positions, run.steps, 3))
    picture[:] = colors.to_rgb(GONE)
    picture[position > run.prompt - 1 + step] = colors.to_rgb(LATER)
    picture[held] = colors.to_rgb(HELD)
    return picture


def hero_image(run, share):
    """Colours of the panel on top: `share` of the rows hold the position."""
    import matplotlib.colors as colors

    picture = image(run, np.zeros_like(share, bool))
    strength = (0.15 + 0.85 * share)[..., None]
    blend = strength * np.array(colors.to_rgb(HELD)) + (1 - strength) * np.array(colors.to_rgb(GONE))
    picture[share > 0] = blend[share > 0]
    return picture


def spans(flags):
    """Begin and end of every run of True."""
    changes = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    return list(zip(changes[::2], changes[1::2]))


def draw_needed(axes, run, held, width):
    """Every needed position from its birth to the last step that reads it: orange while a row holds it, else black."""
    for position, last in run.needed:
        wanted = np.arange(run.steps) < last
        wanted[: max(0, position - run.prompt + 1)] = False
        for flags, colour, z in ((wanted & held[position], NEEDED, 4), (wanted & ~held[position], LOST, 3)):
            for begin, end in spans(flags):
                axes.plot(
                    [begin - 0.5, end - 0.5],
                    [position, position],
                    color=colour,
                    lw=width if colour == NEEDED else 0.45 * width,
                    solid_capstyle="butt",
                    zorder=z,
                )


def decorate(axes, run):
    axes.set_xlim(-0.5, run.steps - 0.5)
    axes.set_ylim(-0.5, run.positions - 0.5)
    axes.axhline(run.prompt - 0.5, color="black", lw=0.7, ls=(0, (5, 3)), zorder=5)
    for event in run.events:
        axes.plot([event["step"]] * 2, [run.positions * 0.975, run.positions], color="black", lw=0.8, zorder=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def share_held_when_read(run, held):
    """Of all needed (position, layer, head): how many are still there in the step that reads them last."""
    there = [rows[position, last - 1] for rows in held.values() for position, last in run.needed if last >= 1]
    return float(np.mean(there)) if there else None


def said_about(run, held):
    """What stands above a column."""
    options = (
        "%s slots a head, cut every %s tokens" % (run.policy.get("budget"), run.policy.get("interval"))
        if "budget" in run.policy
        else "nothing is ever dropped"
    )
    lines = [options]
    if run.accuracy() is not None:
        lines.append("answers right: %.0f %%" % (100 * run.accuracy()))
    if run.needed:
        lines.append("facts still there when asked for: %.0f %%" % (100 * share_held_when_read(run, held)))
    return "\n".join(lines)


def draw(runs, out, shown_rows):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    first = runs[0]
    rows = first.rows()[:shown_rows]
    columns = len(runs)
    figure = plt.figure(figsize=(1.2 + 4.2 * columns, 6.8 + 1.2 * len(rows)), dpi=130)
    grid = figure.add_gridspec(1 + len(rows), columns, height_ratios=[3.4] + [1] * len(rows), hspace=0.16, wspace=0.12)
    table = []
    for c, run in enumerate(runs):
        held = {(layer, head): run.held(i, head) for i, layer, head in run.rows()}
        share = np.mean(list(held.values()), axis=0)
        top = figure.add_subplot(grid[0, c])
        top.imshow(
            hero_image(run, share),
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, run.steps - 0.5, -0.5, run.positions - 0.5),
        )
        draw_needed(top, run, share > 0, 1.5)
        decorate(top, run)
        top.set_title(said_about(run, held), fontsize=9.5, loc="left", linespacing=1.35)
        top.text(0, 1.185, run.name(), transform=top.transAxes, fontsize=14, fontweight="bold", va="bottom")
        top.set_xticklabels([])
        if c == 0:
            top.set_ylabel("all %d layers and heads\nposition in the text" % len(held))
            top.text(
                run.steps * 0.985,
                run.prompt + run.positions * 0.012,
                "trace",
                ha="right",
                va="bottom",
                fontsize=8,
                zorder=6,
            )
            top.text(
                run.steps * 0.985,
                run.prompt - run.positions * 0.012,
                "prompt",
                ha="right",
                va="top",
                fontsize=8,
                zorder=6,
            )
        for r, (_, layer, head) in enumerate(rows):
            panel = figure.add_subplot(grid[1 + r, c])
            mine = held[(layer, head)]
            panel.imshow(
                image(run, mine),
                origin="lower",
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, run.steps - 0.5, -0.5, run.positions - 0.5),
            )
            draw_needed(panel, run, mine, 0.9)
            decorate(panel, run)
            panel.tick_params(labelsize=7)
            if r + 1 < len(rows):
                panel.set_xticklabels([])
            else:
                panel.set_xlabel("decode step")
            if c == 0:
                panel.set_ylabel("layer %d\nhead %d" % (layer, head), fontsize=8)
            else:
                panel.set_yticklabels([])
        if c > 0:
            top.set_yticklabels([])
        for (layer, head), mine in held.items():
            for event in run.events:
                step = event["step"]
                wanted = [p for p, last in run.needed if p < run.prompt + step and last > step]
                table.append(
                    [
                        run.name(),
                        run.policy.get("budget", ""),
                        layer,
                        head,
                        step,
                        int(mine[:, step].sum()),
                        len(wanted),
                        int(mine[wanted, step].sum()),
                    ]
                )

    width, height = figure.get_size_inches()
    figure.text(0.012, 1 - 0.12 / height, "What stays in the KV cache while the model writes", fontsize=17, va="top")
    figure.text(
        0.012,
        1 - 0.47 / height,
        "Each column is one eviction policy; time runs to the right, the text upwards. What a policy drops never "
        "comes back.",
        fontsize=10,
        va="top",
        color="#444444",
    )
    legend = [
        Patch(color=HELD, label="held (upper panels: darker = by more heads)"),
        Patch(color=GONE, label="dropped"),
        Line2D([], [], color=NEEDED, lw=3, label="fact that is still to be asked for: held"),
        Line2D([], [], color=LOST, lw=1, label="fact that is still to be asked for: lost"),
        Line2D([], [], color="black", lw=0.8, ls=(0, (5, 3)), label="end of the prompt"),
        Line2D([], [], color="black", marker="|", ls="", ms=7, label="event: the policy cuts"),
    ]
    figure.legend(
        handles=legend,
        loc="lower left",
        bbox_to_anchor=(0.008, 0.36 / height),
        ncol=3,
        fontsize=9,
        frameon=False,
        handlelength=1.6,
    )
    caption = (
        "One sample of task %s (seed %s): prompt %d tokens, %d decode steps%s. Model %s. Numbers in the .csv beside "
        "this picture."
        % (
            first.task or "-",
            first.seed,
            first.prompt,
            first.steps,
            ", the sample's own trace fed" if first.look_ups else "",
            os.path.join(*os.path.normpath(first.model).split(os.sep)[-2:]),
        )
    )
    figure.text(0.012, 0.12 / height, caption, fontsize=8, color="#444444", va="bottom")
    figure.subplots_adjust(left=0.85 / width, right=0.988, top=1 - 1.85 / height, bottom=1.42 / height)
    figure.savefig(out)
    with open(os.path.splitext(out)[0] + ".csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["policy", "budget", "layer", "head", "step", "held", "needed", "needed_held"])
        writer.writerows(table)


def main():
    parser = argparse.ArgumentParser(description="Draws what stayed in the cache under one or more policies.")
    parser.add_argument(
        "files", nargs="+", metavar="RETENTION.json", help="of kvkeep generate --retention; one column each"
    )
    parser.add_argument(
        "--out", default="retention.png", help="picture to write; its numbers go to a .csv beside it [retention.png]"
    )
    parser.add_argument("--rows", type=int, default=8, help="layers and heads with a panel of their own [8]")
    options = parser.parse_args()
    try:
        runs = [Run(path) for path in options.files]
        shapes = {(run.prompt, run.steps, tuple(run.layers), run.heads) for run in runs}
        if len(shapes) > 1:
            raise ValueError("the files differ in prompt, steps or model; draw runs of one prompt")
        draw(runs, options.out, options.rows)
    except (OSError, ValueError, KeyError) as error:
        sys.exit("plot_retention.py: %s" % error)
    print(options.out)


if __name__ == "__main__":
    main()
