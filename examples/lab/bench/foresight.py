#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each scorer foresees: its scores at a cut beside the attention that the question, which comes later, pays.

    foresight.py OUT.csv --kvkeep FILE MODEL=FILE:SAMPLES.jsonl [MODEL=FILE:SAMPLES.jsonl ...]
                 [--samples 2] [--png OUT.png]

SAMPLES are lines of `kvkeep eval --question after --samples-out`. For each, two events are recorded: at the end of the
text, where every scorer scores it (`kvkeep replay`), and at the end of question and answer, whose queries show what was
read. By layer, the mean over KV heads of Spearman's rank correlation between the two over the slots that a scorer may
choose (not the 4 sinks, nor the 32 newest), and the share of rows in which all slots of the number are among the better
half of them. Needs numpy; --png also matplotlib.
"""

import argparse
import csv
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict

import numpy as np

SCORERS = ["tova", "snapkv", "expected", "expected,scorer.value_norm=false", "keydiff", "rkv", "h2o"]
DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8}
COLOURS = ["#E69F00", "#999999", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000"]


def tensors(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    return {
        name: np.frombuffer(data[t["data_offsets"][0] : t["data_offsets"][1]], DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
        if name != "__metadata__"
    }


def ranks(x):
    """Places in ascending order."""
    order = np.empty(len(x))
    order[np.argsort(x, kind="stable")] = np.arange(len(x))
    return order


def slots_of(pieces, wanted):
    """The slots whose pieces spell the number; None if there are none."""
    for first in range(len(pieces)):
        spelt = ""
        for last in range(first, len(pieces)):
            spelt += pieces[last].strip()
            if spelt == wanted:
                return np.arange(first, last + 1)
            if not wanted.startswith(spelt) or not spelt:
                break
    return None


def attention(event, layer, first):
    """[Hkv, first] The share that queries from position `first` on pay to the slots before it, largest over queries,
    mean over the query heads of each KV head."""
    queries, keys, positions = (
        event["layer.%d.queries" % layer][0],
        event["layer.%d.keys" % layer][0],
        event["query_positions"][0],
    )
    asked = np.nonzero(positions >= first)[0]
    group = len(queries) // len(keys)
    paid = np.zeros((len(keys), first))
    for h, rows in enumerate(queries):
        for i in asked:
            logits = keys[h // group][: positions[i] + 1] @ rows[i] / np.sqrt(rows.shape[1])
            share = np.exp(logits - logits.max())
            paid[h // group] = np.maximum(paid[h // group], (share / share.sum())[:first])
    return paid


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.csv")
    p.add_argument("models", metavar="MODEL=FILE:SAMPLES.jsonl", nargs="+")
    p.add_argument("--kvkeep", default="kvkeep")
    p.add_argument("--samples", type=int, default=2, help="of each task in each file")
    p.add_argument("--png", metavar="OUT.png")
    a = p.parse_args()

    def run(*words):
        subprocess.run([a.kvkeep, *words], check=True, stdout=subprocess.DEVNULL)

    found = defaultdict(list)  # (model, layer, scorer) -> [(correlation, whether it holds the needle at half)]
    with tempfile.TemporaryDirectory() as folder:
        place = lambda name: os.path.join(folder, name)
        for named in a.models:
            model, _, rest = named.partition("=")
            weights, _, samples = rest.rpartition(":")
            seen = defaultdict(int)
            with open(samples) as f:
                lines = [json.loads(line) for line in f]
            for sample in lines:
                seen[sample["task"]] += 1
                if seen[sample["task"]] > a.samples:
                    continue
                text, question = sample["turns"]
                record = [
                    "record",
                    "--model",
                    weights,
                    "--weights",
                    "bf16",
                    "--threads",
                    "1",
                    "--quiet",
                    "--max-new-tokens",
                    "2",
                    "--prompt-file",
                    place("prompt.txt"),
                    "--queries",
                    "256",
                ]
                for name, said in (
                    ("text", text),
                    ("asked", text + question + sample["answer_prefix"] + " " + sample["references"][0]),
                ):
                    with open(place("prompt.txt"), "w") as f:
                        f.write(said)
                    run(*record, "--policy", "expected,budget=64,prefill=cut", "--out", place(name))
                told, asked = tensors(place("text")), tensors(place("asked"))
                layers = sorted(int(k.split(".")[1]) for k in told if k.endswith(".keys"))
                n = told["layer.%d.keys" % layers[0]].shape[2]
                paid = {layer: attention(asked, layer, n) for layer in layers}
                with open(place("prompt.txt"), "w") as f:
                    f.write(text)
                pieces = [
                    t["piece"]
                    for t in json.loads(
                        subprocess.run(
                            [
                                a.kvkeep,
                                "tokens",
                                "--model",
                                weights,
                                "--prompt-file",
                                place("prompt.txt"),
                                "-o",
                                "json",
                            ],
                            check=True,
                            capture_output=True,
                        ).stdout
                    )
                ]
                needle = slots_of(pieces, sample["references"][0])
                if needle is None or needle[0] < 4 or needle[-1] >= n - 32:
                    continue  # it stays in any case
                for scorer in SCORERS:
                    run("replay", place("text"), "--policy", scorer + ",budget=256", "--out", place("kept"))
                    scores = tensors(place("kept"))
                    for layer in layers:
                        for head, row in enumerate(scores["layer.%d.scores" % layer][0]):
                            chosen, read = ranks(row[4 : n - 32]), ranks(paid[layer][head][4 : n - 32])
                            found[model, layer, scorer].append(
                                (np.corrcoef(chosen, read)[0, 1], 100 * float(chosen[needle - 4].min() >= (n - 36) / 2))
                            )
                print("%s: %s, %d slots" % (model, sample["task"], n), file=sys.stderr)
    with open(a.out, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["model", "layer", "scorer", "rows", "correlation", "holds_needle_at_half_percent"])
        for (model, layer, scorer), values in found.items():
            out.writerow(
                [
                    model,
                    layer,
                    scorer,
                    len(values),
                    "%.3f" % np.mean([v[0] for v in values]),
                    "%.1f" % np.mean([v[1] for v in values]),
                ]
            )
    for model in dict.fromkeys(k[0] for k in found):
        print(
            "%s: " % model
            + ", ".join(
                "%s %.2f (%.0f %% of rows hold the needle)"
                % (s, *np.mean([v for k, vs in found.items() if k[0] == model and k[2] == s for v in vs], axis=0))
                for s in SCORERS
            )
        )
    if a.png:
        draw(a.png, found)


def draw(path, found):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(k[0] for k in found))
    figure, axes = plt.subplots(2, len(models), figsize=(5.6 * len(models), 6), squeeze=False, sharey="row")
    for x, model in enumerate(models):
        for y, shown in enumerate(("rank correlation", "rows that hold the needle at half, %")):
            for scorer, colour in zip(SCORERS, COLOURS):
                points = sorted(
                    (k[1], np.mean([v[y] for v in vs])) for k, vs in found.items() if k[0] == model and k[2] == scorer
                )
                axes[y][x].plot(*zip(*points), color=colour, label=scorer, marker="o", ms=3.5, lw=1.3)
            axes[y][x].set_ylabel(shown)
            axes[y][x].grid(color="#dddddd", lw=0.6)
        axes[0][x].set_title("%s: scores at the cut, attention of the later question" % model, fontsize=10)
        axes[1][x].set_xlabel("layer")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", fontsize=8, ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
