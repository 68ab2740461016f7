#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""llama-server, unmodified, with libkvkeep_llama_preload.so before it: conversations with and without a policy.

    tests/llama/server_test.py --server llama-server --model model.gguf --preload libkvkeep_llama_preload.so

Of a model whose layers slide, say over how many tokens (`--window 512`): budgets are then no smaller, and texts longer.
`kvkeep_llama_families --write ARCH FILE` makes one of any architecture, with random weights, whose tokens are
characters; `--only all_kinds --args "-ctk f32 -ctv f32"` runs over it.
Prints a line per case, and ends with 1 if one fails. Times are not looked at.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

WORDS = "river garden engine winter candle forest letter market silver window planet bridge coffee mirror".split()


def story(words, seed=1):
    """Text without repetitions that would make prefixes equal by chance."""
    out, x = [], seed
    for i in range(words):
        x = (x * 1103515245 + 12345) % 2**31
        out.append(WORDS[x // 65536 % len(WORDS)] + ("." if i % 9 == 8 else ""))
    return " ".join(out)


class Server:
    def __init__(self, options, policy="", args=(), env=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        environment = dict(os.environ, **(env or {}))
        if policy:
            environment.update(KVKEEP_POLICY=policy, KVKEEP_VERBOSE="1", LD_PRELOAD=str(options.preload))
        command = [options.server, "-m", options.model, "-t", str(options.threads), *shlex.split(options.args)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--no-warmup"]
        self.process = subprocess.Popen([*command, *map(str, args)], stdout=self.log, stderr=self.log, env=environment)
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise RuntimeError("the server does not answer")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def text(self):
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def said(self):
        return [line for line in self.text().splitlines() if line.startswith("kvkeep: ")]

    def cuts(self):
        return len([line for line in self.said() if " was cut at " in line])

    def post(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def complete(self, prompt, tokens=24, **more):
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
        answer = self.post("/completion", {**body, **more})
        if "content" not in answer:
            raise AssertionError(f"the server answers {answer}")
        return answer

    def abort(self, prompt):
        """Asks for a long answer, and goes away after a few tokens of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"prompt": prompt, "n_predict": 400, "temperature": 0, "stream": True, "ignore_eos": True}
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        for _ in range(12):
            answer.readline()
        connection.sock.close() if connection.sock else answer.close()
        connection.close()
        time.sleep(1)


def converse(server, turns=5, opening=150, tokens=40, turn=30):
    """Turns that each begin with all that came before: answers, and how many tokens each prompt had to be computed."""
    text, answers, computed = story(opening), [], []
    for i in range(turns):
        text += f"\nQ{i}: " + story(turn, i + 2)
        answer = server.complete(text, tokens)
        answers.append(answer["content"])
        computed.append(answer["timings"]["prompt_n"])
        text += answer["content"]
    return answers, computed


def check(condition, what):
    if not condition:
        raise AssertionError(what)


HOLDS = "tova,budget=7000"
ONE = ("-c", 8192, "-np", 1)


def under(o, name, budget, *rest):
    """A policy whose budget holds the window, and how many times as long texts are then."""
    held = max(budget, o.window)
    return ",".join((name, f"budget={held}", *rest)), -(-held // budget)


def same_tokens_under_a_budget_that_holds_the_text(o):
    with Server(o, args=ONE) as alone:
        want = converse(alone)
    for policy in (HOLDS, HOLDS + ",share=union", "full"):
        with Server(o, policy, ONE) as kept:
            got = converse(kept)
            check(got[0] == want[0], f"{policy}: {got} instead of {want}")
            check(all(ours <= alone for ours, alone in zip(got[1], want[1])), f"{got[1]} computed, alone {want[1]}")
            check(kept.cuts() == 0, "nothing to cut")
    return f"5 turns, prompts computed {got[1]}, without {want[1]}"


def five_turns_at_a_quarter(o):
    for rest in ((), ("share=union",)):
        policy, times = under(o, "tova", 160, "interval=32", "prefill=cut", *rest)
        with Server(o, policy, ONE) as kept:
            answers, computed = converse(kept, opening=(300 if o.window else 150) * times, turn=30 * times)
            cuts = kept.cuts()
            check(cuts >= 5, f"{cuts} events")
            check(all(answers) and kept.process.poll() is None, "an answer is missing")
            check(max(computed[1:]) < 20 + 60 * times, f"a turn computed its history anew: {computed}")
    return f"at least 5 events, prompts computed {computed}"


def a_request_that_is_aborted(o):
    policy, times = under(o, "tova", 64, "interval=16", "prefill=cut")
    prompt = story(120 * times)
    with Server(o, args=ONE) as alone:
        want = alone.complete(prompt)["content"]
    with Server(o, HOLDS, ONE) as kept:
        kept.abort(prompt)
        got = kept.complete(prompt)["content"]
        check(got == want, f"{got!r} instead of {want!r}")
    with Server(o, policy, ONE) as kept:
        fresh = kept.complete(prompt, cache_prompt=False)["content"]
        kept.abort(prompt)
        check(kept.complete(prompt)["content"] == fresh, "the answer behind an aborted one is another")
        check(kept.cuts() >= 3, "events")
    return "the same answer before and behind"


def two_slots_at_once(o):
    for unified in (("--kv-unified",), ("--no-kv-unified",)):
        for name, rest in (("tova", "prefill=cut"), ("knorm", "share=union")):
            policy, times = under(o, name, 64, "interval=16", rest)
            args = ("-c", 16384, "-np", 2, *unified)
            prompts = [story(200 * times, 5), story(170 * times, 6)]
            with Server(o, policy, args) as kept, concurrent.futures.ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(lambda p, on=kept: on.complete(p, 60)["content"], prompts))
                check(all(answers) and kept.cuts() >= 8, f"{kept.cuts()} events")
                sequences = set(re.findall(r"sequence (\d+) was cut", kept.text()))
                check(sequences == {"0", "1"}, f"cut: {sequences}")
    return "both are cut, over one buffer and over two"


def prompts_that_the_server_puts_away(o):
    """A slot for two conversations: the server saves the one in host memory while the other runs."""
    cuts, times = under(o, "tova", 96, "interval=16", "prefill=cut")
    for policy, budget in ((HOLDS, False), (cuts, True)):
        args = (*ONE, "--cache-ram", 2048)
        first, second = story(250 * times, 7), story(240 * times, 8)
        with Server(o, policy, args) as kept:
            a = kept.complete(first, 40)["content"]
            kept.complete(second, 40)
            back = kept.complete(first + a + " And then", 40)
            check(back["timings"]["prompt_n"] < 60, f"computed anew: {back['timings']['prompt_n']}")
        with Server(o, policy, args) as kept:
            check(kept.complete(first, 40)["content"] == a, "the first answer")
            check(kept.complete(first + a + " And then", 40)["content"] == back["content"], "another answer")
            check((kept.cuts() > 0) == budget, "events")
    return f"{back['timings']['prompt_n']} tokens computed on the way back, the same answer"


def a_session_over_a_restart(o):
    cuts, times = under(o, "tova", 96, "interval=16", "prefill=cut")
    for policy in (HOLDS, cuts, under(o, "knorm", 96, "interval=16", "share=union")[0]):
        with tempfile.TemporaryDirectory() as folder:
            args, prompt = (*ONE, "--slot-save-path", folder), story(250 * times, 9)
            with Server(o, policy, args) as kept:
                answer = kept.complete(prompt, 40)["content"]
                saved = kept.post("/slots/0?action=save", {"filename": "session"})
                check(saved.get("n_saved", 0) > 0, f"{saved}")
                want = kept.complete(prompt + answer + " And then", 40)["content"]
            with Server(o, policy, args) as kept:
                restored = kept.post("/slots/0?action=restore", {"filename": "session"})
                check(restored.get("n_restored", 0) > 0, f"{restored}")
                got = kept.complete(prompt + answer + " And then", 40)
                check(got["content"] == want, f"{got['content']!r} instead of {want!r}")
                check(got["timings"]["prompt_n"] < 60, f"computed anew: {got['timings']['prompt_n']}")
            with Server(o, under(o, "streaming", 96)[0], args) as kept:
                refused = kept.post("/slots/0?action=restore", {"filename": "session"})
                check("error" in refused or refused.get("n_restored") == 0, f"another policy takes it: {refused}")
                check(any("policy" in line for line in kept.said()), f"{kept.said()}")
                check(kept.complete(prompt, 8)["content"], "and the slot is of use")
    return "the same answer; another policy is refused"


def another_text_with_the_same_beginning(o):
    """The prompt goes back behind a cut, where the server must compute all of it."""
    policy, times = under(o, "tova", 64, "interval=16", "prefill=cut")
    common, first, other = story(100 * times, 3), story(80 * times, 4), story(80 * times, 5)
    with Server(o, policy, ONE) as kept:
        kept.complete(common + " " + first, 40)
        got = kept.complete(common + " " + other, 40)
    with Server(o, policy, ONE) as fresh:
        want = fresh.complete(common + " " + other, 40)
    check(got["timings"]["prompt_n"] == want["timings"]["prompt_n"], "it must be computed from its beginning")
    check(got["content"] == want["content"], f"{got['content']!r} instead of {want['content']!r}")
    if o.window > 0:  # the window has gone on
        return f"{want['timings']['prompt_n']} tokens computed"
    with Server(o, "tova,budget=1500", ONE) as kept:  # which was not cut goes back
        kept.complete(common + " " + first, 40)
        back = kept.complete(common + " " + other, 40)["timings"]["prompt_n"]
        check(back < want["timings"]["prompt_n"] - 100, f"{back} tokens")
    return f"{want['timings']['prompt_n']} tokens computed; {back} where nothing was cut"


def an_answer_that_the_history_leaves_out(o):
    """As thoughts are: the next prompt goes on before the answer, which was cut in its middle."""
    cuts, times = under(o, "tova", 64, "interval=16", "prefill=cut")
    prompt, after = story(100 * times, 3), story(30, 4)
    args = (*ONE, "-ub", 64)
    with Server(o, args=args) as alone:
        alone.complete(prompt, 300)
        want = alone.complete(prompt + " " + after, 40)
    computed = []
    for policy in (HOLDS, cuts):
        with Server(o, policy, args) as kept:
            kept.complete(prompt, 300)
            got = kept.complete(prompt + " " + after, 40)
            computed.append(got["timings"]["prompt_n"])
            check(policy == cuts or got["content"] == want["content"], f"{got['content']!r} not {want['content']!r}")
            check((kept.cuts() > 10) == (policy == cuts), f"{kept.cuts()} events")
    check(computed[0] < 80, f"{computed} tokens computed")
    check((computed[1] < 80) == (o.window > 0), f"{computed} tokens computed")  # others save nothing to go back to
    return f"{computed[0]} tokens computed where nothing was cut, {computed[1]} behind a cut"


def talk(server):
    """Requests of all kinds: answers, and how many tokens of each prompt had to be computed."""
    answers, computed, text = [], [], story(30, 3)

    def ask(prompt, tokens):
        answer = server.complete(prompt, tokens)
        answers.append(answer["content"])
        computed.append(answer["timings"]["prompt_n"])
        return prompt + answer["content"]

    for i in range(4):
        text = ask(f"{text} Q{i} " + story(8, i), 40)
    prompt = story(40, 9)
    ask(prompt, 120)
    for other in (4, 5, 5):  # without the answer; the last one once more
        ask(prompt + " then " + story(5, other), 30)
    server.abort(story(60, 11))
    ask(story(60, 11), 20)
    ask(text, 20)
    return answers, computed


def requests_of_all_kinds(o):
    """Policies that cut at each token, too, in the middle of prompts, and with drafts."""
    drafts = ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 3)
    for more in ((), ("-ub", 32, "-b", 64), drafts):
        with Server(o, args=(*ONE, *more)) as alone:
            want = talk(alone)
        for name, budget, rest in (
            ("tova", 7000, ()),
            ("tova", 64, ("interval=16", "prefill=cut")),
            ("knorm", 64, ("interval=4", "prefill=pieces", "share=union")),
            ("streaming", 64, ("interval=1",)),
        ):
            policy = under(o, name, budget, *rest)[0]
            with Server(o, policy, (*ONE, *more)) as kept:
                answers, computed = talk(kept)
                check(all(answers) and kept.process.poll() is None, f"{policy}: an answer is missing")
                if budget < 7000:
                    check(kept.cuts() > 10 or o.window > 64, f"{policy}: {kept.cuts()} events")
                    continue
                check(answers == want[0], f"{answers} instead of {want[0]}")
                check(all(ours <= alone for ours, alone in zip(computed, want[1])), f"{computed}, alone {want[1]}")
    return f"prompts computed {computed} where each token is cut, {want[1]} without"


def several_answers_of_one_prompt(o):
    cuts, times = under(o, "tova", 64, "interval=16", "prefill=cut")
    for policy in (cuts, cuts + ",share=union", HOLDS):
        with Server(o, policy, ("-c", 16384, "-np", 2, "--kv-unified")) as kept:
            body = {"prompt": story(150 * times, 11), "n": 2, "n_predict": 30, "temperature": 0, "ignore_eos": True}
            answer = kept.post("/v1/completions", {**body, "max_tokens": 30})
            texts = [choice["text"] for choice in answer.get("choices", [])]
            check(len(texts) == 2 and texts[0].split()[:2] == texts[1].split()[:2] != [], f"{policy}: {answer}")
    return "two answers, which begin alike at temperature 0"


def shifts_are_refused_by_name(o):
    for flag, word in ((("--cache-reuse", 32), "cache_reuse"), (("--context-shift",), "KV cache shifting")):
        with Server(o, under(o, "tova", 64, "interval=16", "prefill=cut")[0], (*ONE, *flag)) as kept:
            check(re.search(word + " is not supported", kept.text()), f"{flag}: the server does not say so")
            check(len(converse(kept, 2)[0]) == 2, "answers")
    return "--cache-reuse and --context-shift are turned off by the server"


def drafts_from_the_text(o):
    args = (*ONE, "--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 8)
    cuts, times = under(o, "tova", 64, "interval=16", "prefill=cut")
    prompt = "one two three four five six seven eight nine ten. " * 12 * times
    with Server(o, args=ONE) as alone:
        want = alone.complete(prompt, 60)["content"]
    with Server(o, HOLDS, args) as kept:
        answer = kept.complete(prompt, 60)
        check(answer["content"] == want, f"{answer['content']!r} instead of {want!r}")
        check(answer["timings"].get("draft_n_accepted", 0) > 0, "no draft was accepted")
    with Server(o, cuts, args) as kept:
        kept.complete(prompt, 150)
        check(kept.cuts() >= 3, f"{kept.cuts()} events")
    return f"{answer['timings']['draft_n_accepted']} of {answer['timings']['draft_n']} accepted"


def fewer_cells_than_the_program_believes_in(o):
    policy, times = under(o, "tova", 160, "interval=32", "prefill=cut", "share=union")
    cells = 512 * times
    with Server(o, policy, ("-c", 8192, "-np", 1), {"KVKEEP_CELLS": str(cells)}) as kept:
        answers, computed = converse(kept, 8, opening=60 * times, turn=30 * times, tokens=60)
        text = kept.post("/tokenize", {"content": "".join(answers)})["tokens"]
        check(f"{cells} cells, shown as 8192" in kept.text(), "the sentence")
        check(kept.cuts() >= 5 and len(text) > 300, f"{kept.cuts()} events")
        refused = kept.post("/completion", {"prompt": story(900 * times, 12), "n_predict": 4})
        check("error" in refused, "a prompt beyond the cells must be refused")
        check(kept.complete(story(60), 8)["content"], "and the server goes on")
    return f"{len(computed)} turns in {cells} cells; a longer prompt is refused"


def prompts_longer_than_the_cells(o):
    """In pieces, each of which is cut: the answers of a cache that has cells for all of it, cut at the same places."""
    got = {}
    for rest in ((), ("share=union",)):
        policy, times = under(o, "tova", 160, "interval=32", "prefill=pieces", *rest)
        cells, first = 512 * times, story(900 * times, 12)
        for env in ({}, {"KVKEEP_CELLS": str(cells)}):
            with Server(o, policy, ("-c", 8192, "-np", 1, "-b", 128), env) as kept:
                one = kept.complete(first, 30)
                two = kept.complete(first + one["content"] + " " + story(600 * times, 13), 30)
                got[bool(env)] = [one["content"], two["content"]]
                check(one["timings"]["prompt_n"] > cells, f"{one['timings']} is no longer prompt")
                check(two["timings"]["prompt_n"] < 900 * times, "the second turn computed its history anew")
                check(kept.cuts() > 10, f"{kept.cuts()} events")
        check(got[True] == got[False], f"{got}")
        # Pieces of as many tokens as there is room for.
        with Server(o, policy, ("-c", 8192, "-np", 1), {"KVKEEP_CELLS": str(cells)}) as kept:
            check(kept.complete(first, 8)["content"], "an answer")
            check(kept.complete(story(400 * times, 14), 8)["content"], "another one")
    return f"{one['timings']['prompt_n']} tokens, then {two['timings']['prompt_n']} more, through {cells} cells"


def what_cannot_run_is_said(o):
    with Server(o, under(o, "tova", 64)[0], ("-c", 512, "-np", 1, "-fa", "off")) as kept:
        check(any("llama.cpp has alone" in line for line in kept.said()), f"{kept.said()}")
        check(kept.complete("Once", 8)["content"], "and the program runs")
    try:
        with Server(o, "tovva,budget=64", ONE):
            check(False, "an unknown policy must not run")
    except RuntimeError as ended:
        check("tovva" in str(ended) or "no context is made" in str(ended), f"{ended}")
    with Server(o, under(o, "tova", 64)[0], ("-c", 512, "-np", 1, "--embedding", "--pooling", "mean")) as kept:
        check(any("it is for embeddings" in line for line in kept.said()), f"{kept.said()}")
        check("embedding" in json.dumps(kept.post("/v1/embeddings", {"input": "one"})), "embeddings")
    return "a context without flash attention, a policy that does not exist, embeddings"


CASES = [
    same_tokens_under_a_budget_that_holds_the_text,
    five_turns_at_a_quarter,
    a_request_that_is_aborted,
    two_slots_at_once,
    prompts_that_the_server_puts_away,
    a_session_over_a_restart,
    another_text_with_the_same_beginning,
    an_answer_that_the_history_leaves_out,
    requests_of_all_kinds,
    several_answers_of_one_prompt,
    shifts_are_refused_by_name,
    drafts_from_the_text,
    fewer_cells_than_the_program_believes_in,
    prompts_longer_than_the_cells,
    what_cannot_run_is_said,
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="llama-server that is linked to libllama.so")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--preload", required=True, type=lambda p: pathlib.Path(p).resolve())
    parser.add_argument("--window", type=int, default=0, help="tokens over which layers of the model slide")
    parser.add_argument("--args", default="", help="further options of the server")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name has this")
    options = parser.parse_args()
    failed = 0
    for case in CASES:
        if options.only not in case.__name__:
            continue
        name = case.__name__.replace("_", " ")
        try:
            print(f"ok   {name}: {case(options)}", flush=True)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"FAIL {name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
