#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvpress and kvkeep on one model file and the same prompts: accuracy by method and budget, time of compression.

    cd examples/lab/bench
    python3 beside_kvpress.py --model SmolLM2.gguf --task ruler/niah-single-1 --length 1024 --budgets 512,256
    python3 beside_kvpress.py --model SmolLM2.gguf --task text/needle --haystack prose.txt --samples 50
    python3 beside_kvpress.py --model SmolLM2.gguf --haystack prose.txt --length 512 --decode 256 --budgets 256

`kvkeep eval --samples-out` makes the prompts and our answers. kvpress gets the same token ids: the context is
compressed while it is prefilled, the question follows, and the answer is decoded greedily. Both programs compute in
float32 and score by string match. Neither cuts again while it decodes (our `prefill=only`).

A virtual environment holds kvpress and what it needs. The first run makes it: about 500 MB, and 5 GB more where this
Python has no torch. Finished answers of kvpress stay in --out, and the next run does not ask for them again.

Columns:
  kvpress %, kvkeep %  accuracy
  difference           ours less theirs in percentage points; 95 % interval of a paired bootstrap over samples
  same                 samples with identical answer tokens
  slots                what kvpress kept per layer and KV head, mean; ours keeps the budget
  ms                   median time to compress one prompt, all layers. kvpress: inside `compress`, which computes the
                       queries it needs again. kvkeep: the decision and its moves, without the recording of queries.

With --decode, both cut while they decode, in one process: kvpress's DecodingPress, and kvkeep.hf.attach over the same
weights in transformers. --length tokens of the haystack run as a prompt, the next ones are fed one by one, and every
--interval steps the rows are cut to the budget. All take the same step in turns before any takes the next. Columns:
  step ms              median of the steps without an event, after the first event; with what they record for events:
                       kvpress hidden states, kvkeep queries
  event step ms        median of the steps with an event, after the first
  event ms             median of the time within those steps. kvpress: `compress` in all layers. kvkeep: what
                       attach() does before the next step, decision and moves
  first event ms       the same of the first event, which cuts the whole prompt
"""

import argparse
import contextlib
import copy
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import sysconfig
import time

from needle_answers import Answers, Model, ask_command, progress, score, stop

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGES = {"kvpress": "0.5.5", "transformers": "5.2.0", "gguf": "0.19.0"}
CHUNK = 20

# Ours protects 4 sinks and the 32 newest slots unless told otherwise; kvpress protects nothing but what stands here.
METHODS = {
    "full": ("full", None),
    "StreamingLLM": ("streaming,sink=4,recent=0", lambda k, r: k.StreamingLLMPress(r, n_sink=4)),
    "Knorm": ("knorm,sink=0,recent=0", lambda k, r: k.KnormPress(r)),
    "KeyDiff": ("keydiff,sink=0,recent=0", lambda k, r: k.KeyDiffPress(r)),
    "TOVA": ("tova,sink=0,recent=0", lambda k, r: k.TOVAPress(r)),
    "SnapKV": ("snapkv,sink=0,recent=0", lambda k, r: k.SnapKVPress(r)),
    # kvpress fits the Gaussian to every query of the prompt and adds no epsilon.
    "ExpectedAttention": (
        "expected,sink=4,recent=0,scorer.queries={length},epsilon=0",
        lambda k, r: k.ExpectedAttentionPress(r),
    ),
    "PyramidKV": ("pyramidkv-snapkv,sink=0,recent=0", lambda k, r: k.PyramidKVPress(r)),
    "AdaKV": ("adakv-snapkv,sink=0,recent=0", lambda k, r: k.AdaKVPress(k.SnapKVPress(r))),
    "CriticalKV": ("criticalkv-snapkv,sink=0,recent=0", lambda k, r: k.CriticalKVPress(k.SnapKVPress(r))),
    "ChunkKV": ("chunkkv-snapkv,sink=0,recent=0", lambda k, r: k.ChunkKVPress(k.SnapKVPress(r), chunk_length=CHUNK)),
}


# Methods for --decode: what both have, and what DecodingPress can run.
DECODING = ("StreamingLLM", "Knorm", "KeyDiff", "TOVA")


# ---- The environment


def has_packages(and_kvkeep):
    try:
        if and_kvkeep:
            importlib.metadata.version("kvkeep")
        return all(importlib.metadata.version(name) == version for name, version in PACKAGES.items())
    except importlib.metadata.PackageNotFoundError:
        return False


def enter(venv, and_kvkeep):
    """Goes on in the virtual environment; makes it where it is missing. Returns where this Python has the packages."""
    if has_packages(and_kvkeep):
        return
    python = venv / "bin" / "python"
    if pathlib.Path(sys.prefix).resolve() == venv.resolve() and has_packages(False):
        if subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT / "src" / "python")]).returncode != 0:
            stop("pip could not build the package kvkeep; the reason stands above")
        return
    if pathlib.Path(sys.prefix).resolve() == venv.resolve():
        stop(f"{venv} lacks {wanted()}; remove the folder and run again")
    if not (venv / "ready").exists():
        print(f"Installing {wanted()} into {venv}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        try:  # The torch of this Python serves, if it has one.
            importlib.metadata.version("torch")
            site = subprocess.check_output(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
            )
            pathlib.Path(site.strip(), "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        except importlib.metadata.PackageNotFoundError:
            pass
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        if subprocess.run(pip + wanted().split()).returncode != 0:
            stop(f"pip could not install {wanted()}; the reason stands above")
        (venv / "ready").touch()
    os.execv(python, [str(python), *sys.argv])


def wanted():
    return " ".join(f"{name}=={version}" for name, version in PACKAGES.items())


# ---- Ours


def policy_of(method, length):
    text = METHODS[method][0].format(length=length)
    return text if method == "full" else text + ",prefill=only"


def read_samples(args, budgets, file):
    """Lines of --samples-out; `ours` of each has the answer of every (method, budget)."""
    try:
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        for sample in samples:
            given = {(answer["policy"], answer["budget"]): answer for answer in sample["answers"]}
            sample["ours"] = {
                pair: given.get((policy_of(pair[0], args.length), pair[1])) for pair in pairs_of(args, budgets)
            }
    except (ValueError, KeyError, TypeError):
        stop(f"{file} was not written by kvkeep eval --samples-out")
    for sample in samples:
        for (method, budget), answer in sample["ours"].items():
            if answer is None:
                policy = policy_of(method, args.length)
                stop(f"{file} has no answers of '{policy}' at budget {budget}; allowed the options it was made with")
    return samples


def pairs_of(args, budgets):
    return [(method, budget) for method in args.methods for budget in (budgets if method != "full" else [None])]


# ---- kvpress


class Kvpress(Model):
    """The same model in transformers, and presses over it."""

    def __init__(self, model, threads):
        os.environ["TQDM_DISABLE"] = "1"  # before they are imported
        import kvpress

        super().__init__(model, threads)
        self.kvpress = kvpress

    def press(self, method, tokens, budget):
        """A press that keeps `budget` of `tokens` slots; None where nothing is to be dropped."""
        make = METHODS[method][1]
        if make is None or tokens <= budget:
            return None
        if method == "ChunkKV":  # counts whole chunks
            return make(self.kvpress, 1 - (budget // CHUNK + 0.25) / -(-tokens // CHUNK))
        return make(self.kvpress, 1 - (budget + 0.25) / tokens)  # kvpress cuts the fraction off, PyramidKV rounds

    def answer(self, sample, method, budget):
        """Answer tokens, text, slots kept per layer and KV head, and seconds of compression."""
        torch, model = self.torch, self.model
        context, question = sample["prompt"], sample["question"]
        cache = self.transformers.DynamicCache()
        press = self.press(method, len(context), budget)
        seconds = 0.0
        with torch.inference_mode():
            if press is None:
                out = model(torch.tensor([context]), past_key_values=cache, logits_to_keep=1)
            else:
                compress = press.compress

                def timed(*given, **named):
                    nonlocal seconds
                    start = time.perf_counter()
                    result = compress(*given, **named)
                    seconds += time.perf_counter() - start
                    return result

                press.compress = timed
                with press(model):
                    out = model(torch.tensor([context]), past_key_values=cache, logits_to_keep=1)
            slots = self.slots(cache)
            place = len(context)
            # transformers makes one mask for all layers: where PyramidKV leaves them unequally long, tokens go singly.
            uneven = len({layer.keys.shape[2] for layer in cache.layers}) > 1
            for part in ([token] for token in question) if uneven else [question] if question else []:
                places = torch.arange(place, place + len(part))[None]
                out = model(torch.tensor([part]), past_key_values=cache, position_ids=places, logits_to_keep=1)
                place += len(part)
            answer = []
            while True:
                token = int(out.logits[0, -1].argmax())
                if token in sample["end_tokens"]:
                    break
                answer.append(token)
                if len(answer) == sample["max_new_tokens"]:
                    break
                out = model(torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[place]]))
                place += 1
        return {"tokens": answer, "text": self.text(answer), "slots": slots, "seconds": seconds}

    def slots(self, cache):
        heads = self.model.config.num_key_value_heads
        kept = 0
        for layer, decoder_layer in zip(cache.layers, self.model.model.layers):
            masked = getattr(decoder_layer.self_attn, "masked_key_indices", None)  # AdaKV masks and moves nothing
            kept += heads * layer.keys.shape[2] - (0 if masked is None else len(masked[0]))
        return kept / heads / len(cache.layers)


def ask_kvpress(args, samples, budgets, file):
    """Answers by (sample, method, budget). Those in `file` are not asked for again."""

    def key(sample, method, budget):
        asked = json.dumps(
            [os.path.basename(args.model), *(sample[k] for k in ("prompt", "question", "max_new_tokens"))]
        )
        return f"{hashlib.sha256(asked.encode()).hexdigest()[:24]} {method} {budget} {args.threads}"

    known = Answers(file)
    todo = [(i, method, budget) for i in range(len(samples)) for method, budget in pairs_of(args, budgets)]
    missing = [t for t in todo if key(samples[t[0]], *t[1:]) not in known]
    if missing:
        other = Kvpress(args.model, args.threads)
        for one in (a for s in samples for a in s["answers"]):
            theirs = other.text(one["tokens"])
            if theirs.replace("\ufffd", "") != one["text"].replace("\ufffd", ""):  # of half a character, one or more
                stop(f"the tokenizers differ: ours reads {one['text']!r}, transformers {theirs!r}")
    for n, (i, method, budget) in enumerate(missing):
        name = key(samples[i], method, budget)
        try:
            known.add(name, other.answer(samples[i], method, budget))
        except (AssertionError, RuntimeError, ValueError) as error:  # a press that cannot be run so
            known[name] = {"problem": (str(error) or type(error).__name__).splitlines()[0]}
        progress("kvpress", n + 1, len(missing))
    return {t: known[key(samples[t[0]], *t[1:])] for t in todo}


# ---- Both while they decode


class Decoding:
    """The model under one program's policy, a token a step. Its weights are those of the model that it copies."""

    inside = 0.0  # seconds that events took since it was last set to 0, whoever's they are

    def __init__(self, other, name, policy, under):
        shared = [*other.model.parameters(), *other.model.buffers()]
        self.name, self.policy = name, policy
        self.model = copy.deepcopy(other.model, {id(tensor): tensor for tensor in shared})
        self.under = under(self.model)
        self.cache, self.place = other.transformers.DynamicCache(), 0
        self.steps, self.slots = [], []  # (seconds, seconds of its event); slots after it

    @staticmethod
    def timed(call):
        def timing(*given, **named):
            start = time.perf_counter()
            result = call(*given, **named)
            Decoding.inside += time.perf_counter() - start
            return result

        return timing

    def step(self, torch, tokens):
        places = torch.arange(self.place, self.place + len(tokens))[None]
        Decoding.inside, start = 0.0, time.perf_counter()
        self.model(torch.tensor([tokens]), past_key_values=self.cache, position_ids=places, logits_to_keep=1)
        self.steps.append((time.perf_counter() - start, Decoding.inside))
        self.place += len(tokens)
        layer = self.cache.layers[0]
        rows = getattr(layer, "rows", None)  # attach() keeps rows in buffers of its own
        self.slots.append(layer.keys.shape[2] if rows is None else int(rows.heads(0).max()))

    def events(self):
        return [i for i in range(1, len(self.slots)) if self.slots[i] <= self.slots[i - 1]]

    def row(self):
        events = self.events()
        first, later = (events[0], events[1:]) if events else (0, [])
        plain = statistics.median(s for i, (s, _) in enumerate(self.steps) if i > first and i not in events)
        cells = [plain, *(statistics.median(self.steps[i][k] for i in later) if later else None for k in (0, 1))]
        cells.append(self.steps[first][1] if events else None)
        shown = " | ".join("-" if cell is None else f"{1000 * cell:.1f}" for cell in cells)
        return f"| {self.name} | {shown} | {self.policy} |"


def decode(args, budget):
    import kvkeep._rows
    import kvkeep.hf

    other = Kvpress(args.model, args.threads)
    torch, kvpress = other.torch, other.kvpress
    text = pathlib.Path(args.haystack).read_text()[: 16 * (args.length + args.decode)]
    ids = other.tokenizer(text)["input_ids"][: args.length + args.decode]
    if len(ids) < args.length + args.decode:
        stop(f"--haystack has {len(ids)} tokens; allowed --length + --decode = {args.length + args.decode} or more")
    kvpress.DecodingPress.compress = Decoding.timed(kvpress.DecodingPress.compress)
    kvkeep._rows.Rows.cut = Decoding.timed(kvkeep._rows.Rows.cut)
    contestants = [Decoding(other, "full", "-", lambda model: contextlib.nullcontext())]
    for method in args.methods:
        make, interval = METHODS[method][1], args.interval
        policy = f"{METHODS[method][0]},budget={budget},interval={interval},trigger=counter"
        press = kvpress.DecodingPress(make(kvpress, 0), compression_interval=interval, target_size=budget)
        contestants.append(Decoding(other, f"{method}, kvpress", f"DecodingPress({method}Press)", press))
        contestants.append(
            Decoding(other, f"{method}, kvkeep", f"`{policy}`", lambda model: kvkeep.hf.attach(model, policy))
        )
    with contextlib.ExitStack() as entered, torch.inference_mode():
        for one in contestants:
            entered.enter_context(one.under)
        for begin, end in [(0, args.length), *((t, t + 1) for t in range(args.length, len(ids)))]:
            for one in contestants:
                one.step(torch, ids[begin:end])
            progress("decoded", end - args.length, args.decode)
    for one in contestants[2:]:
        events = contestants[1].events()  # attach() cuts at the start of the next step
        if [n for i, n in enumerate(one.slots) if i not in events] != [
            n for i, n in enumerate(contestants[1].slots) if i not in events
        ]:
            stop(f"{one.name} held other numbers of slots than {contestants[1].name}: the times cannot be compared")
    print("| method | step ms | event step ms | event ms | first event ms | policy |")
    print("|---|---:|---:|---:|---:|---|")
    for one in contestants:
        print(one.row())
    print(
        f"\nkvpress {PACKAGES['kvpress']}, transformers {PACKAGES['transformers']}, torch {torch.__version__}; "
        f"float32, {args.threads} thread{'s' if args.threads > 1 else ''}; a prompt of {args.length} tokens, "
        f"{args.decode} steps; {budget} slots, {len(contestants[1].events())} events, one every {args.interval} steps."
    )


# ---- The table


def interval(differences, resamples=2000):
    """95 %, percentiles of the bootstrap over samples."""
    dice = random.Random(1)
    means = sorted(statistics.fmean(dice.choices(differences, k=len(differences))) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[int(0.975 * resamples)]


def row(args, task, method, budget, samples, theirs):
    policy = policy_of(method, args.length)
    pairs, problems = [], set()
    for i, sample in samples:
        other = theirs[(i, method, budget)]
        if "problem" in other:
            problems.add(other["problem"])
        else:
            pairs.append((sample, sample["ours"][(method, budget)], other))
    head = f"| {task} | {method} | {budget or '-'} |"
    if problems:
        return f"{head} {len(pairs)} |{' - |' * 7} `{policy}`; kvpress fails: {'; '.join(sorted(problems))} |"
    ours = [own["score"] for _, own, _ in pairs]
    others = [score(other["text"], sample["references"]) for sample, _, other in pairs]
    low, high = interval([a - b for a, b in zip(ours, others)])
    same = sum(own["tokens"] == other["tokens"] for _, own, other in pairs)
    slots = statistics.fmean(other["slots"] for _, _, other in pairs)
    our_ms = 1000 * statistics.median(own["cut_seconds"] for _, own, _ in pairs)
    their_ms = 1000 * statistics.median(other["seconds"] for _, _, other in pairs)
    mean_ours, mean_others = 100 * statistics.fmean(ours), 100 * statistics.fmean(others)
    difference = f"{mean_ours - mean_others:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    return (
        f"{head} {len(pairs)} | {mean_others:.1f} | {mean_ours:.1f} | {difference} | {same} | {slots:.1f} "
        f"| {their_ms:.1f} | {our_ms:.1f} | `{policy}` |"
    )


def table(args, samples, budgets, theirs):
    print("| task | method | budget | samples | kvpress % | kvkeep % | difference (95 %) | same | slots ", end="")
    print("| kvpress ms | kvkeep ms | our policy |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for task in dict.fromkeys(s["task"] for s in samples):
        of_task = [(i, s) for i, s in enumerate(samples) if s["task"] == task]
        for method, budget in pairs_of(args, budgets):
            print(row(args, task, method, budget, of_task, theirs))
    lengths = [len(s["prompt"]) for s in samples]
    print(
        f"\nkvpress {PACKAGES['kvpress']} on transformers {PACKAGES['transformers']}; float32, {args.threads} "
        f"thread{'s' if args.threads > 1 else ''}; contexts of {min(lengths)} to {max(lengths)} tokens."
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    venv, out = ROOT / ".cache" / f"kvpress-{PACKAGES['kvpress']}", ROOT / "out" / "beside_kvpress"
    kvkeep = ROOT / "build/release/bin/kvkeep"
    add("--model", required=True, metavar="FILE", help="GGUF file of a Llama, Qwen2 or Qwen3")
    add("--kvkeep", default=str(kvkeep), metavar="FILE", help="the command; default: build/release/bin/kvkeep")
    add(
        "--task",
        default="ruler/niah-single-1",
        metavar="NAME,...",
        help="as kvkeep eval has them; default: %(default)s",
    )
    add("--haystack", metavar="FILE", help="prose, for tasks that need an essay")
    add("--length", type=int, default=1024, metavar="N", help="tokens of prompt and answer; default: %(default)s")
    add("--samples", type=int, default=20, metavar="N", help="of each task; default: %(default)s")
    add("--seed", type=int, default=1000000, metavar="N", help="of the first sample; default: %(default)s")
    add("--budgets", default="512,256", metavar="N,...", help="slots kept per layer and KV head; default: %(default)s")
    add(
        "--question",
        choices=["after", "before"],
        default="after",
        help="it comes after the cut, or before; default: after",
    )
    every = f"default: all, {','.join(METHODS)}; with --decode {','.join(DECODING)}"
    add("--methods", metavar="NAME,...", help=every)
    add("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--answers", metavar="FILE", help="samples.jsonl of an earlier --out: kvkeep does not run")
    add("--venv", type=pathlib.Path, default=venv, metavar="DIR", help="virtual environment; default: in .cache")
    add(
        "--out",
        type=pathlib.Path,
        default=out,
        metavar="DIR",
        help="for samples.jsonl and kvpress.jsonl; default: in out",
    )
    add("--decode", type=int, default=0, metavar="N", help="compare while N tokens are decoded; needs --haystack")
    add("--interval", type=int, default=32, metavar="N", help="steps between events of --decode; default: %(default)s")
    args = parser.parse_args()
    allowed = DECODING if args.decode else tuple(METHODS)
    args.methods = args.methods.split(",") if args.methods else list(allowed)
    for method in args.methods:
        if method not in allowed:
            parser.error(f"--methods: '{method}' is not known here; allowed {', '.join(allowed)}")
    if args.decode and not args.haystack:
        parser.error("--decode needs --haystack")
    if not all(b.isdecimal() and int(b) > 0 for b in args.budgets.split(",")):
        parser.error(f"--budgets: '{args.budgets}'; allowed whole numbers of slots, separated by commas")
    for file in (args.model, args.haystack, args.answers):
        if file and not os.path.isfile(file):
            parser.error(f"'{file}' is not a file")
    return args


def main():
    args = arguments()
    enter(args.venv, args.decode > 0)
    if args.decode:
        for budget in args.budgets.split(","):
            decode(args, int(budget))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    file = pathlib.Path(args.answers) if args.answers else args.out / "samples.jsonl"
    if not args.answers:
        policies = [policy_of(method, args.length) for method in args.methods]
        ask_command(args, ["--budgets", args.budgets], policies, file)
    budgets = [int(b) for b in args.budgets.split(",")]
    samples = read_samples(args, budgets, file)
    theirs = ask_kvpress(args, samples, budgets, args.out / "kvpress.jsonl")
    table(args, samples, budgets, theirs)


if __name__ == "__main__":
    main()
