#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens/s of `kvkeep generate` beside busy processes.

    examples/lab/bench/busy.py --model FOLDER [--busy 0,1,3] [--tokens 64] [--runs 3] [--threads N] \\
        [--kvkeep NAME=COMMAND]...

COMMAND is what a shell starts: a path, with variables before it where wanted, such as
`passive=OMP_WAIT_POLICY=PASSIVE build/release/bin/kvkeep`. All commands run in turns, so that what else goes on meets
them alike. Tokens/s are those of all steps but the prompt's: the time of N + 1 tokens less the time of one. All must
print the same tokens. Medians of the runs, least and most in brackets; to stdout as a Markdown table, with the
machine's load before each block.
"""

import argparse
import json
import os
import statistics
import subprocess
import time


def generate(command, args, tokens):
    """Seconds and token ids of one run."""
    ids = ",".join(str(i) for i in range(100, 116))
    line = (
        f"{command} generate --model '{args.model}' --ids {ids} --policy full --max-new-tokens {tokens} --quiet -o json"
    )
    if args.threads:
        line += f" --threads {args.threads}"
    start = time.monotonic()
    out = subprocess.run(line, shell=True, check=True, stdout=subprocess.PIPE, text=True).stdout
    return time.monotonic() - start, json.loads(out)["tokens"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--busy", default="0,1,3", help="busy processes beside, one block of rows each")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kvkeep", action="append", help="NAME=COMMAND; default kvkeep=build/release/bin/kvkeep")
    args = parser.parse_args()
    commands = dict(c.split("=", 1) for c in args.kvkeep or ["kvkeep=build/release/bin/kvkeep"])
    print(f"{os.cpu_count()} cores; {args.tokens} tokens, {args.runs} runs in turns\n")
    print("| busy processes | load | " + " | ".join(commands) + " |\n|---:|---:|" + "---:|" * len(commands))
    for busy in map(int, args.busy.split(",")):
        load = os.getloadavg()[0]
        beside = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(busy)]
        try:
            speeds = {name: [] for name in commands}
            said = set()
            for _ in range(args.runs):
                for name, command in commands.items():
                    one, _ = generate(command, args, 1)
                    all_, tokens = generate(command, args, args.tokens + 1)
                    speeds[name].append(args.tokens / max(all_ - one, 1e-9))
                    said.add(tuple(tokens))
            assert len(said) == 1, "the commands do not print the same tokens"
        finally:
            for process in beside:
                process.kill()
                process.wait()
        cells = [f"{statistics.median(s):.1f} ({min(s):.1f} to {max(s):.1f})" for s in speeds.values()]
        print(f"| {busy} | {load:.1f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
