#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens/s behind a long prompt, under the rows of README's table of costs: caches of 16, 8 and 4 bits, whole, cut,
folded. In turns; a ratio is the median over turns of a row beside the full cache of 16 bits in the same turn.

    python3 examples/lab/bench/pace.py --model SmolLM2.gguf --prompt-file prose.txt
    python3 examples/lab/bench/pace.py --model SmolLM2.gguf --prompt-file prose.txt --tokens 1024 --turns 5

`prompt` is the time until the first token, the cut or the folding included; `decode` is --new-tokens tokens behind it.
Times mean something on a quiet machine only.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Cache, share of the prompt's tokens that stay as slots, policy.
ROWS = [
    ("bf16", None, "full"),
    ("q8_0", None, "full"),
    ("q4_0", None, "full"),
    ("bf16", 2, "tova"),
    ("bf16", 4, "ams-expected,preset=question"),
    ("bf16", 8, "ams-tova,preset=question,rest=fold"),
    ("q4_0", 2, "ams-expected,preset=question"),
    ("q4_0", 2, "ams-tova,preset=question,rest=fold"),
    ("q4_0", 2, "adakv-expected"),
]


def ask(args, prompt, cache, policy):
    """Seconds of the prompt, and tokens/s behind it."""
    line = [
        args.kvkeep,
        "generate",
        "--model",
        args.model,
        "--prompt-file",
        prompt,
        "--policy",
        policy,
        "--weights",
        "bf16",
    ]
    line += ["--cache-dtype", cache, "--max-new-tokens", args.new_tokens, "--threads", args.threads, "-o", "json"]
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    found = re.search(r"([\d.]+) tokens/s, prompt in ([\d.]+) s", done.stderr)
    if done.returncode != 0 or not found:
        sys.exit(f"pace.py: {policy} over {cache} failed: {done.stderr.strip()[-500:]}")
    return float(found[2]), float(found[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, type=pathlib.Path)
    add("--prompt-file", required=True, type=pathlib.Path, help="prose, of which the beginning is taken")
    add("--kvkeep", default=str(ROOT / "build/release/bin/kvkeep"))
    add("--tokens", type=int, default=4096, help="of the prompt, about: four characters each [%(default)s]")
    add("--new-tokens", type=int, default=64)
    add("--turns", type=int, default=3)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    measured = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        prompt = pathlib.Path(folder, "prompt.txt")
        prompt.write_text(args.prompt_file.read_text(errors="replace")[: 4 * args.tokens])
        for turn in range(args.turns):
            for cache, share, policy in ROWS:
                print(f"turn {turn + 1} of {args.turns}: {policy} over {cache}", file=sys.stderr)
                budget = f",budget={args.tokens // share},prefill=cut" if share else ""
                measured[cache, share, policy].append(ask(args, prompt, cache, policy + budget))
    print("| cache | slots | policy | prompt s | of full | decode tokens/s | of full |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for (cache, share, policy), got in measured.items():
        cells = []
        for i, form in enumerate(("{:.1f}", "{:.1f}")):
            ratio = statistics.median(one[i] / full[i] for one, full in zip(got, measured[ROWS[0]]))
            cells += [form.format(statistics.median(one[i] for one in got)), f"{ratio:.2f}"]
        print(f"| {cache} | {'all' if share is None else f'1/{share}'} | `{policy}` | {' | '.join(cells)} |")
    print(
        f"\n{args.model.name}, a prompt of about {args.tokens} tokens, {args.new_tokens} more; {args.threads} "
        f"threads, {args.turns} turns."
    )


if __name__ == "__main__":
    main()
