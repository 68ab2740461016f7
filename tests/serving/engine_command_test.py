#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts example_engine as a person would: the table, wrong options, the page of metrics, Ctrl-C."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request


def run(*words):
    done = subprocess.run([sys.argv[1], *words], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def column(table, name):
    return float(re.search(rf"\| {re.escape(name)} *\| *([0-9.]+) \|", table).group(1))


def main():
    status, plain, _ = run("--requests", "40", "--cache", "none")
    assert status == 0, plain
    assert column(plain, "answers") >= 40 and column(plain, "events") > 0
    assert column(plain, "tokens found in the cache") == 0
    status, ahead, _ = run("--requests", "40", "--in-flight", "2", "--threads", "2")
    assert status == 0 and column(ahead, "answers") == column(plain, "answers")
    assert column(ahead, "steps in flight, most") == 2 and column(ahead, "tokens found in the cache") > 0
    status, small, _ = run("--requests", "40", "--pages", "40")
    assert status == 0 and column(small, "preempted") > 0, small

    assert "Examples:" in run("--help")[1]
    for words, said in (
        (("--cache", "lru"), "lru not in"),
        (("--policy", "nope"), 'there is no policy "nope"'),
        (("--pages", "3"), "the pool has 3"),
        (("--requests",), "--requests"),
        (("--bad",), "--bad"),
    ):
        status, _, error = run(*words)
        assert status == 2 and said in error, (words, status, error)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(*words):
        return subprocess.Popen(
            [sys.argv[1], "--metrics", str(port), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def ended(engine, signum):
        engine.send_signal(signum)
        table = engine.communicate(timeout=30)[0].decode()
        assert engine.returncode == 128 + signum and column(table, "events") > 0, (engine.returncode, table)

    engine = start()
    try:
        for _ in range(100):
            if engine.poll() is not None:
                error = engine.stderr.read().decode()
                assert "built without cpp-httplib" in error, error
                print("metrics: not in this build")
                return
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    kind, page = answer.headers["Content-Type"], answer.read().decode()
                if re.search(r'^kvkeep_events_total\{worker="0"\} [1-9]', page, re.M):
                    break
            except OSError:
                pass
            time.sleep(0.1)
        assert kind.startswith("text/plain; version=0.0.4"), kind
        for line in page.splitlines():
            assert re.fullmatch(r'# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{[a-z]+="[^"]+"(,le="[^"]+")?\})? [0-9.]+', line), (
                line
            )
        assert re.search(r"^serving_running_requests [1-9]", page, re.M), page
        status, _, error = run("--metrics", str(port))
        assert status == 2 and f"--metrics: port {port} cannot be listened on" in error, (status, error)
        ended(engine, signal.SIGINT)

        status, table, error = run("--metrics", str(port), "--requests", "20")
        assert status == 0 and column(table, "answers") >= 20 and "until Ctrl-C" not in error, (status, table, error)
        status, _, error = run("--metrics", str(port), "--policy", "nope")
        assert status == 2 and 'there is no policy "nope"' in error, (status, error)

        engine = start()
        while "metrics: http" not in engine.stderr.readline().decode():
            assert engine.poll() is None
        time.sleep(1)
        ended(engine, signal.SIGTERM)
    finally:
        engine.kill()


main()
