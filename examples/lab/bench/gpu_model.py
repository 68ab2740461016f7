#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A pretrained model on a GPU beside the CPU, through the command: tokens/s at several batch sizes, needles that the
model still answers, slots that policies keep. Prints each table as it comes, and writes the command's output to OUT.

    examples/lab/bench/gpu_model.py --kvkeep build/gpu/bin/kvkeep --model SmolLM2.gguf --text prose.txt --out OUT

and a rehearsal without a GPU:

    examples/lab/bench/gpu_model.py --kvkeep build/release/bin/kvkeep --model examples/model --device cpu --out OUT

Both run the same weights. They add up in their own order, so scores that are nearly equal may change places: a policy's
slots are compared at its first event, before which both caches hold the same, and at its last. Exits with 1 if a
command fails, or if at a first event more than one slot in a hundred differs.
"""

import argparse
import csv
import json
import pathlib
import re
import subprocess
import sys
import time

POLICIES = [
    "streaming",
    "random",
    "knorm",
    "keydiff",
    "tova",
    "snapkv",
    "h2o",
    "rkv",
    "expected",
    "cur",
    "ams-tova",
    "ams-keydiff",
    "chunkkv-snapkv",
    "criticalkv-tova",
    "adakv-tova",
]
SPEED = [1, 8, 32]  # sequences at once


def run(options, name, arguments):
    """Output and notes of a command; they are also files of the folder."""
    command = [options.kvkeep, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (options.out / f"{name}.txt").write_text(" ".join(command) + "\n" + done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stderr.strip() or done.returncode}")
    return done.stdout, done.stderr


def prompt(options, length):
    """Arguments of a prompt: the beginning of the text, or a task of the small model."""
    if options.text is None:
        return ["--task", "ask", "--length", str(length)]
    head = options.out / f"prompt-{length}.txt"
    head.write_text(options.text.read_text(errors="replace")[: 4 * length])
    return ["--prompt-file", str(head)]


def differing(here, there):
    """Slots of one event that only the first keeps, and all of its slots."""
    missing = total = 0
    for own, other in zip(here["kept"], there["kept"]):
        for a, b in zip(own, other):
            missing += len(set(a) - set(b))
            total += len(a)
    return missing, total


def slots(options, failures):
    length, budget, new = (96, 24, 20) if options.text is None else (700, 256, 128)
    rows = []
    for policy in POLICIES:
        words = [
            "generate",
            "--model",
            options.model,
            *prompt(options, length),
            "--max-new-tokens",
            str(new),
            "--policy",
            f"{policy},budget={budget},interval={budget // 4},prefill=cut",
            "-o",
            "json",
        ]
        try:
            here, there = (
                json.loads(run(options, f"slots-{policy}-{place.replace(':', '')}", [*words, "--device", place])[0])
                for place in (options.device, "cpu")
            )
        except RuntimeError as error:
            failures.append(str(error))
            continue
        if not here["events"]:
            failures.append(f"slots-{policy}: there was no event")
            continue
        first, last = (differing(here["events"][e], there["events"][e]) for e in (0, -1))
        same = next((i for i, (a, b) in enumerate(zip(here["tokens"], there["tokens"])) if a != b), len(here["tokens"]))
        rows.append(
            [
                policy,
                f"{first[0]} of {first[1]}",
                f"{last[0]} of {last[1]}",
                len(here["events"]),
                f"{same} of {len(here['tokens'])}",
            ]
        )
        if first[0] * 100 > first[1]:
            failures.append(f"slots-{policy}: {first[0]} of {first[1]} slots differ from the CPU's at the first event")
    table(
        f"slots on {options.device} that the CPU does not keep",
        ["policy", "first event", "last event", "events", "same tokens"],
        rows,
    )


def needles(options, failures):
    words = [
        "eval",
        "--model",
        options.model,
        "--policy",
        "full",
        "--policy",
        "tova",
        "--policy",
        "ams-tova",
        "--policy",
        "expected",
        "--policy",
        "keydiff",
        "--policy",
        "rkv",
        "-o",
        "csv",
    ]
    if options.text is None:
        words += ["--task", "ask", "--samples", "2", "--length", "96", "--budgets", "24"]
    else:
        words += [
            "--task",
            "ruler/niah-single-2,ruler/niah-multikey-1,text/needle",
            "--haystack",
            str(options.text),
            "--length",
            "1024",
            "--samples",
            "6",
            "--batch",
            "18",
            "--answer-tokens",
            "32",
            "--interval",
            "512",
            "--budgets",
            "512,256",
        ]
    found = {}
    for place in (options.device, "cpu"):
        try:
            found[place] = list(
                csv.DictReader(
                    run(options, f"needles-{place.replace(':', '')}", [*words, "--device", place])[0].splitlines()
                )
            )
        except RuntimeError as error:
            failures.append(str(error))
            return
    share = "share" if "share" in found["cpu"][0] else "accuracy"
    rows = []
    for here, there in zip(found[options.device], found["cpu"]):
        rows.append(
            [
                here["policy"],
                here["budget"],
                here.get("task", ""),
                *(f"{100 * float(row[share]):.0f}" for row in (here, there)),
                *(f"{float(row['tokens_per_second']):.0f}" for row in (here, there)),
            ]
        )
    table("answered, %, and tokens/s", ["policy", "budget", "task", options.device, "cpu", options.device, "cpu"], rows)


def speed(options, failures):
    length, new = (96, 20) if options.text is None else (4000, 256)
    rows = []
    for policy in [
        "full",
        f"tova,budget={length // 4},interval={max(new // 2, 8)},prefill=cut",
        f"ams-tova,budget={length // 4},interval={max(new // 2, 8)},prefill=cut",
    ]:
        row = [policy]
        for copies in SPEED if options.text is not None else SPEED[:2]:
            words = [
                "generate",
                "--model",
                options.model,
                *prompt(options, length),
                "--max-new-tokens",
                str(new),
                "--policy",
                policy,
                "--device",
                options.device,
                "--copies",
                str(copies),
                "-o",
                "json",
            ]
            if options.text is not None:
                words += ["--cache-dtype", "f16"]
            try:
                note = run(options, f"speed-{policy.split(',')[0]}-{copies}", words)[1]
                row.append(re.search(r"([\d.]+) tokens/s", note).group(1))
            except (RuntimeError, AttributeError) as error:
                failures.append(str(error))
                row.append("-")
        rows.append(row)
    table(
        f"tokens/s on {options.device} behind a prompt of {length} tokens, decoded at once:",
        ["policy", *map(str, SPEED)],
        rows,
    )


def table(title, head, rows):
    print(f"\n{title}")
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(head))]
    for row in rows:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
            )
        )
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvkeep", required=True, help="the command")
    parser.add_argument("--model", required=True, help="GGUF file or folder; with --text one that has a tokenizer")
    parser.add_argument("--text", type=pathlib.Path, help="prose; without it, tasks of the small model")
    parser.add_argument("--device", default="cuda:0", help="beside the CPU [cuda:0]")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for what the commands print")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failures, begun = [], time.monotonic()
    for part in (speed, needles, slots):
        part(options, failures)
        print(f"({part.__name__}: {time.monotonic() - begun:.0f} s so far)")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
