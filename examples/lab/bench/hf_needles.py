#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Needle tasks by two paths: the command's own decoder, and transformers under kvkeep.hf.attach.

    python3 examples/lab/bench/hf_needles.py --model SmolLM2.gguf --haystack prose.txt --length 512 --samples 7

`kvkeep eval --samples-out` makes the prompts, answers them under each policy and writes both. transformers gets the
same weights (the GGUF file, dequantised), the same token ids and the same policy: the prompt runs and is cut, the
question follows if it comes after the cut, and the answer is decoded greedily. Both compute in float32 and score as
RULER does: the references that stand in the answer. This Python needs the package kvkeep, torch, transformers 5,
accelerate and gguf. Finished answers of transformers stay in --out, and the next run does not ask for them again.

Columns:
  kvkeep eval, attach   samples whose answer holds every reference
  same answer           samples whose answers agree token for token
"""

import argparse
import importlib.metadata
import inspect
import json
import os
import pathlib

from needle_answers import Answers, Model, ask_command, progress, score, stop

ROOT = pathlib.Path(__file__).resolve().parents[3]
POLICIES = ["tova", "snapkv", "ams-tova", "expected", "keydiff"]
TASKS = "ruler/niah-single-2,ruler/niah-multikey-1,text/needle"


class Transformers(Model):
    def answer(self, sample, policy):
        """Tokens and text of the answer, and how many events there were."""
        import kvkeep.hf

        torch = self.torch
        names = inspect.signature(self.model.forward).parameters
        name = "cache" if "cache" in names else "past_key_values"  # newer releases of transformers 5 call it so
        with kvkeep.hf.attach(self.model, policy) as kept, torch.inference_mode():
            cache, place, answer = {name: kept.cache()}, 0, []
            part = sample["prompt"]
            while True:
                positions = torch.arange(place, place + len(part))[None]
                ids = torch.tensor([part])
                out = self.model(ids, **cache, position_ids=positions, use_cache=True, logits_to_keep=1)
                place += len(part)
                if part is sample["prompt"] and sample["question"]:
                    part = sample["question"]
                    continue
                token = int(out.logits[0, -1].argmax())
                if token in sample["end_tokens"]:
                    break
                answer.append(token)
                if len(answer) == sample["max_new_tokens"]:
                    break
                part = [token]
        return {"tokens": answer, "text": self.text(answer), "events": len(kept.events)}


def is_right(text, references):
    return score(text, references) == 1


def ask_transformers(args, samples, policies, file):
    """Answers by (sample, policy); those in `file` are not asked for again."""

    def key(sample, policy):
        return json.dumps([sample["prompt"], sample["question"], sample["max_new_tokens"], policy])

    known = Answers(file)
    todo = [(s, p) for s in samples for p in policies if key(s, p) not in known]
    other = Transformers(args.model, args.threads) if todo else None
    for n, (sample, policy) in enumerate(todo):
        known.add(key(sample, policy), other.answer(sample, policy))
        progress("transformers", n + 1, len(todo))
    return {(i, p): known[key(s, p)] for i, s in enumerate(samples) for p in policies}


def table(args, samples, policies, theirs):
    print("| policy | samples | kvkeep eval | attach | same answer | events |")
    print("|---|---:|---:|---:|---:|---:|")
    for c, policy in enumerate(policies):
        ours = [sample["answers"][c] for sample in samples]
        others = [theirs[(i, policy)] for i in range(len(samples))]
        rights = [is_right(a["text"], s["references"]) for a, s in zip(ours, samples)]
        if rights != [a["score"] == 1 for a in ours]:
            stop(f"{policy}: this script and kvkeep eval disagree about what is right")
        right = sum(is_right(a["text"], s["references"]) for a, s in zip(others, samples))
        same = sum(a["tokens"] == b["tokens"] for a, b in zip(ours, others))
        events = sum(b["events"] for b in others)
        print(f"| `{policy}` | {len(samples)} | {sum(rights)} | {right} | {same} | {events} |")
    lengths = [len(s["prompt"]) + len(s["question"]) for s in samples]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    print(
        f"\n{versions}; float32, {args.threads} thread{'s' if args.threads > 1 else ''}; {args.task}; prompts of "
        f"{min(lengths)} to {max(lengths)} tokens, question {args.question} the cut."
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="GGUF file of a Llama, Qwen2 or Qwen3")
    kvkeep = ROOT / "build/release/bin/kvkeep"
    add("--kvkeep", default=str(kvkeep), metavar="FILE", help="the command; default: build/release/bin/kvkeep")
    add("--task", default=TASKS, metavar="NAME,...", help="as kvkeep eval has them; default: %(default)s")
    add("--haystack", metavar="FILE", help="prose, for tasks that need an essay")
    add("--length", type=int, default=512, metavar="N", help="tokens of prompt and answer; default: %(default)s")
    add("--samples", type=int, default=8, metavar="N", help="of each task; default: %(default)s")
    add("--seed", type=int, default=1000000, metavar="N", help="of the first sample; default: %(default)s")
    add("--budget", type=int, metavar="N", help="slots per layer and KV head; default: a quarter of --length")
    add("--interval", type=int, default=32, metavar="N", help="tokens between two events; default: %(default)s")
    add(
        "--policies",
        default=";".join(POLICIES),
        metavar="P;...",
        help="beside full, without budget and interval; default: %(default)s",
    )
    add("--question", choices=["after", "before"], default="before", help="of the cut; default: %(default)s")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    out = ROOT / "out" / "hf_needles"
    add("--out", type=pathlib.Path, default=out, metavar="DIR", help="for samples.jsonl and transformers.jsonl")
    args = parser.parse_args()
    for file in (args.model, args.haystack):
        if file and not os.path.isfile(file):
            parser.error(f"'{file}' is not a file")
    return args


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    limit = f"budget={args.budget or args.length // 4},interval={args.interval},prefill=cut"
    policies = ["full", *(f"{policy},{limit}" for policy in args.policies.split(";"))]
    file = args.out / "samples.jsonl"
    ask_command(args, ["--quiet"], policies, file)
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    theirs = ask_transformers(args, samples, policies, args.out / "transformers.jsonl")
    table(args, samples, policies, theirs)


if __name__ == "__main__":
    main()
