# SPDX-License-Identifier: Apache-2.0
"""What scripts share that put the same needle samples to `kvkeep eval` and to a model in transformers."""

import json
import os
import pathlib
import subprocess
import sys


def stop(sentence):
    sys.exit(f"{os.path.basename(sys.argv[0])}: {sentence}")


def ask_command(args, further, policies, file):
    """Samples and the command's answers, into `file`. `further`: options of the script's own."""
    line = [args.kvkeep, "eval", "--model", args.model, "--task", args.task, "--length", str(args.length)]
    line += ["--samples", str(args.samples), "--seed", str(args.seed), "--batch", "1", "--question", args.question]
    line += ["--threads", str(args.threads), "--weights", "f32", "--samples-out", str(file), *further]
    if args.haystack:
        line += ["--haystack", args.haystack]
    for policy in policies:
        line += ["--policy", policy]
    try:
        done = subprocess.run(line, stdout=subprocess.DEVNULL)
    except OSError as error:
        stop(f"cannot start {args.kvkeep} ({error.strerror}); build kvkeep_cli, or name the command with --kvkeep")
    if done.returncode != 0:
        stop("kvkeep eval failed; the reason stands above")


class Model:
    """The model of a GGUF file in transformers, in float32."""

    def __init__(self, model, threads):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        file = pathlib.Path(model)
        given = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**given)

    def text(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


ASCII_LOWER = {c: c + 32 for c in range(ord("A"), ord("Z") + 1)}


def score(text, references):
    """RULER's string_match_all: the share of the references that stand in the answer."""
    text = text.translate(ASCII_LOWER)
    return sum(r.translate(ASCII_LOWER) in text for r in references) / len(references)


class Answers(dict):
    """Answers by key. Those that `file` has from an earlier run are not asked for again."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        if file.exists():
            self.update((line["key"], line) for line in map(json.loads, file.read_text().splitlines()))

    def add(self, key, answer):
        self[key] = {"key": key, **answer}
        with self.file.open("a") as out:
            out.write(json.dumps(self[key]) + "\n")


def progress(who, done, of):
    if sys.stderr.isatty():
        print(f"\r{who}: {done} of {of}  ", end="" if done < of else "\n", file=sys.stderr, flush=True)
