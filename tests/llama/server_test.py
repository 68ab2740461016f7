#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""llama-server, unmodified, with libkvkeep_llama_preload.so before it: conversations with and without a policy.

    tests/llama/server_test.py --server llama-server --model model.gguf --preload libkvkeep_llama_preload.so

Prints a line per case, and ends with 1 if one fails. Times are not looked at.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
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
        command = [options.server, "-m", options.model, "-t", str(options.threads)]
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


HOLDS = "tova,budget=2000"
ONE = ("-c", 2048, "-np", 1)


def same_tokens_under_a_budget_that_holds_the_text(o):
    with Server(o, args=ONE) as alone:
        want = converse(alone)
    for policy in (HOLDS, HOLDS + ",share=union", "full"):
        with Server(o, policy, ONE) as kept:
            got = converse(kept)
            check(got == want, f"{policy}: {got} instead of {want}")
            check(kept.cuts() == 0, "nothing to cut")
    return f"5 turns, prompts computed {want[1]} in each"


def five_turns_at_a_quarter(o):
    computed = {}
    for policy in ("tova,budget=160,interval=32,prefill=cut", "tova,budget=160,interval=32,prefill=cut,share=union"):
        with Server(o, policy, ONE) as kept:
            answers, computed[policy] = converse(kept)
            cuts = kept.cuts()
            check(cuts >= 5, f"{cuts} events")
            check(all(answers) and kept.process.poll() is None, "an answer is missing")
            check(max(computed[policy][1:]) < 120, f"a turn computed its history anew: {computed[policy]}")
    return f"at least 5 events, prompts computed {list(computed.values())[-1]}"


def a_request_that_is_aborted(o):
    prompt = story(120)
    with Server(o, args=ONE) as alone:
        want = alone.complete(prompt)["content"]
    with Server(o, HOLDS, ONE) as kept:
        kept.abort(prompt)
        got = kept.complete(prompt)["content"]
        check(got == want, f"{got!r} instead of {want!r}")
    with Server(o, "tova,budget=64,interval=16,prefill=cut", ONE) as kept:
        fresh = kept.complete(prompt, cache_prompt=False)["content"]
        kept.abort(prompt)
        check(kept.complete(prompt)["content"] == fresh, "the answer behind an aborted one is another")
        check(kept.cuts() >= 3, "events")
    return "the same answer before and behind"


def two_slots_at_once(o):
    args = ("-c", 4096, "-np", 2)
    prompts = [story(200, 5), story(170, 6)]
    for unified in (("--kv-unified",), ("--no-kv-unified",)):
        for policy in ("tova,budget=64,interval=16,prefill=cut", "knorm,budget=64,interval=16,share=union"):
            with Server(o, policy, (*args, *unified)) as kept, concurrent.futures.ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(lambda p: kept.complete(p, 60)["content"], prompts))
                check(all(answers) and kept.cuts() >= 8, f"{kept.cuts()} events")
                sequences = set(re.findall(r"sequence (\d+) was cut", kept.text()))
                check(sequences == {"0", "1"}, f"cut: {sequences}")
    return "both are cut, over one buffer and over two"


def prompts_that_the_server_puts_away(o):
    """A slot for two conversations: the server saves the one in host memory while the other runs."""
    for policy, budget in ((HOLDS, False), ("tova,budget=96,interval=16,prefill=cut", True)):
        args = (*ONE, "--cache-ram", 512)
        first, second = story(250, 7), story(240, 8)
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
    for policy in (HOLDS, "tova,budget=96,interval=16,prefill=cut", "knorm,budget=96,interval=16,share=union"):
        with tempfile.TemporaryDirectory() as folder:
            args, prompt = (*ONE, "--slot-save-path", folder), story(250, 9)
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
            with Server(o, "streaming,budget=96", args) as kept:
                refused = kept.post("/slots/0?action=restore", {"filename": "session"})
                check("error" in refused or refused.get("n_restored") == 0, f"another policy takes it: {refused}")
                check(any("policy" in line for line in kept.said()), f"{kept.said()}")
                check(kept.complete(prompt, 8)["content"], "and the slot is of use")
    return "the same answer; another policy is refused"


def another_text_with_the_same_beginning(o):
    """The prompt goes back behind a cut, where the server must compute all of it."""
    policy = "tova,budget=64,interval=16,prefill=cut"
    common = story(100, 3)
    with Server(o, policy, ONE) as kept:
        kept.complete(common + " " + story(80, 4), 40)
        got = kept.complete(common + " " + story(80, 5), 40)
    with Server(o, policy, ONE) as fresh:
        want = fresh.complete(common + " " + story(80, 5), 40)
    check(got["timings"]["prompt_n"] == want["timings"]["prompt_n"], "it must be computed from its beginning")
    check(got["content"] == want["content"], f"{got['content']!r} instead of {want['content']!r}")
    with Server(o, "tova,budget=1500", ONE) as kept:  # which was not cut goes back
        kept.complete(common + " " + story(80, 4), 40)
        back = kept.complete(common + " " + story(80, 5), 40)["timings"]["prompt_n"]
        check(back < want["timings"]["prompt_n"] - 100, f"{back} tokens")
    return f"{want['timings']['prompt_n']} tokens computed; {back} where nothing was cut"


def several_answers_of_one_prompt(o):
    cuts = "tova,budget=64,interval=16,prefill=cut"
    for policy in (cuts, cuts + ",share=union", HOLDS):
        with Server(o, policy, ("-c", 4096, "-np", 2, "--kv-unified")) as kept:
            body = {"prompt": story(150, 11), "n": 2, "n_predict": 30, "temperature": 0, "ignore_eos": True}
            answer = kept.post("/v1/completions", {**body, "max_tokens": 30})
            texts = [choice["text"] for choice in answer.get("choices", [])]
            check(len(texts) == 2 and texts[0].split()[:2] == texts[1].split()[:2] != [], f"{policy}: {answer}")
    return "two answers, which begin alike at temperature 0"


def shifts_are_refused_by_name(o):
    for flag, word in ((("--cache-reuse", 32), "cache_reuse"), (("--context-shift",), "KV cache shifting")):
        with Server(o, "tova,budget=64,interval=16,prefill=cut", (*ONE, *flag)) as kept:
            check(re.search(word + " is not supported", kept.text()), f"{flag}: the server does not say so")
            check(len(converse(kept, 2)[0]) == 2, "answers")
    return "--cache-reuse and --context-shift are turned off by the server"


def drafts_from_the_text(o):
    args = (*ONE, "--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 8)
    prompt = "one two three four five six seven eight nine ten. " * 12
    with Server(o, args=ONE) as alone:
        want = alone.complete(prompt, 60)["content"]
    with Server(o, HOLDS, args) as kept:
        answer = kept.complete(prompt, 60)
        check(answer["content"] == want, f"{answer['content']!r} instead of {want!r}")
        check(answer["timings"].get("draft_n_accepted", 0) > 0, "no draft was accepted")
    with Server(o, "tova,budget=64,interval=16,prefill=cut", args) as kept:
        kept.complete(prompt, 150)
        check(kept.cuts() >= 3, f"{kept.cuts()} events")
    return f"{answer['timings']['draft_n_accepted']} of {answer['timings']['draft_n']} accepted"


def fewer_cells_than_the_program_believes_in(o):
    policy = "tova,budget=160,interval=32,prefill=cut,share=union"
    with Server(o, policy, ("-c", 8192, "-np", 1), {"KVKEEP_CELLS": "512"}) as kept:
        answers, computed = converse(kept, 8, opening=60, tokens=60)
        text = kept.post("/tokenize", {"content": "".join(answers)})["tokens"]
        check("512 cells, shown as 8192" in kept.text(), "the sentence")
        check(kept.cuts() >= 5 and len(text) > 300, f"{kept.cuts()} events")
        refused = kept.post("/completion", {"prompt": story(900, 12), "n_predict": 4})
        check("error" in refused, "a prompt beyond the cells must be refused")
        check(kept.complete(story(60), 8)["content"], "and the server goes on")
    return f"{len(computed)} turns in 512 cells; a longer prompt is refused"


def what_cannot_run_is_said(o):
    with Server(o, "tova,budget=64", ("-c", 512, "-np", 1, "-fa", "off")) as kept:
        check(any("llama.cpp has alone" in line for line in kept.said()), f"{kept.said()}")
        check(kept.complete("Once", 8)["content"], "and the program runs")
    try:
        with Server(o, "tovva,budget=64", ONE):
            check(False, "an unknown policy must not run")
    except RuntimeError as ended:
        check("tovva" in str(ended) or "no context is made" in str(ended), f"{ended}")
    with Server(o, "tova,budget=64", ("-c", 512, "-np", 1, "--embedding", "--pooling", "mean")) as kept:
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
    several_answers_of_one_prompt,
    shifts_are_refused_by_name,
    drafts_from_the_text,
    fewer_cells_than_the_program_believes_in,
    what_cannot_run_is_said,
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="llama-server that is linked to libllama.so")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--preload", required=True, type=lambda p: pathlib.Path(p).resolve())
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
