#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws where every token of a prompt ranks in every layer, and where a policy selected.

    kvkeep record --model MODEL --kind prefill --ids-file prompt.txt --out prompt.safetensors
    kvkeep replay prompt.safetensors --policy asl,budget=256,window=16 --out kept.safetensors --ranks ranks.json
    plot_ranks.py OUT.png ranks.json

Left: a column a token (the best of several where they do not fit), a row a layer; dark ranks high. The layer that
selected is framed, and ticks below it stand at the tokens that go on. Right: the variance of the ranks around each
layer as a share of the first that was taken, and the threshold. Needs matplotlib and numpy.
"""

import argparse
import json
import sys

MOST_COLUMNS = 1024
BLUE, RED = "#0072B2", "#D55E00"  # of Okabe and Ito's palette


def read(path):
    try:
        with open(path) as f:
            data = json.load(f)
    except (OSError, ValueError) as error:
        sys.exit("plot_ranks.py: %s cannot be read (%s); allowed what kvkeep replay --ranks writes" % (path, error))
    if data.get("kvkeep_ranks") != 1:
        sys.exit("plot_ranks.py: %s holds no ranks; allowed what kvkeep replay --ranks writes" % path)
    return data


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.png")
    p.add_argument("ranks", metavar="RANKS.json")
    o = p.parse_args()
    data = read(o.ranks)

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    ranks = np.array(data["ranks"], dtype=float)  # [layers, tokens]
    layers, tokens = ranks.shape
    group = -(-tokens // MOST_COLUMNS)
    padded = np.full((layers, -(-tokens // group) * group), float(tokens))
    padded[:, :tokens] = ranks
    best = padded.reshape(layers, -1, group).min(axis=2)

    fig, (left, right) = plt.subplots(
        1, 2, figsize=(12, 1.6 + 0.22 * max(layers, 12)), sharey=True, width_ratios=[4, 1], layout="constrained"
    )
    shown = left.imshow(
        np.log10(best), aspect="auto", cmap="viridis", extent=(0, tokens, layers - 0.5, -0.5), interpolation="nearest"
    )
    bar = fig.colorbar(shown, ax=left, location="left", shrink=0.8, pad=0.08)
    ticks = [t for t in (1, 10, 100, 1000, 10000, 100000) if t <= tokens]
    bar.set_ticks(np.log10(ticks), labels=[str(t) for t in ticks])
    bar.ax.invert_yaxis()
    bar.set_label("rank (1: most attended)")
    selected = data.get("selection_layer", -1)
    name = data["policy"]["policy"]
    if selected >= 0:
        left.add_patch(plt.Rectangle((0, selected - 0.5), tokens, 1, fill=False, edgecolor=RED, linewidth=2))
        going_on = [t + 0.5 for t in data["going_on"] if t < tokens]
        left.plot(
            going_on,
            [selected + 0.62] * len(going_on),
            "|",
            color=RED,
            markersize=5,
            markeredgewidth=0.7,
            clip_on=False,
        )
    left.set_xlabel("token of the prompt (the newest %d observe and are not ranked)" % data["window"])
    left.set_ylabel("layer")
    left.set_title(
        "%s: %s"
        % (
            name,
            "layer %d selects %d of %d tokens" % (selected, len(data["going_on"]), tokens + data["window"])
            if selected >= 0
            else "no layer selects",
        )
    )

    variance = [(l, x) for l, x in enumerate(data.get("relative_variance") or []) if x is not None]
    right.set_title("ranks settle")
    right.set_xlabel("relative variance")
    if variance:
        right.plot([x for _, x in variance], [l for l, _ in variance], "o-", color=BLUE)
        right.set_xlim(left=0)
        threshold = data["policy"].get("layers", {}).get("threshold")
        if threshold is not None and 0 < threshold < 10:
            right.axvline(threshold, color=RED, linestyle="--", linewidth=1)
            right.annotate(
                "threshold %g" % threshold,
                (threshold, 0),
                xytext=(3, -2),
                textcoords="offset points",
                color=RED,
                va="top",
                fontsize=8,
            )
    else:
        right.annotate("not computed", (0.5, 0.5), xycoords="axes fraction", ha="center")
    for side in ("top", "right"):
        right.spines[side].set_visible(False)
    fig.savefig(o.out, dpi=110)


if __name__ == "__main__":
    main()
