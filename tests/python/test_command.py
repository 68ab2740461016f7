# SPDX-License-Identifier: Apache-2.0
"""The command of the package is the program `kvkeep`: its output, its exit status and what ends it."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import time

import kvkeep
import pytest

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
SCRIPT = pathlib.Path(sysconfig.get_path("scripts")) / "kvkeep"
BY_NAME = {"module": [sys.executable, "-m", "kvkeep"], "script": [str(SCRIPT)]}
WITHOUT = ["generate", "chat", "tokens", "eval", "perplexity", "fidelity", "record", "calibrate"]


def run(*words, how="module", **more):
    return subprocess.run([*BY_NAME[how], *map(str, words)], capture_output=True, text=True, timeout=60, **more)


@pytest.mark.parametrize("how", BY_NAME)
def test_help_version_and_policies_are_the_programs(how):
    told = run("--help", how=how)
    assert told.returncode == 0 and told.stderr == ""
    for word in ("policies", "plan", "replay", "doctor", "Built without the laboratory", "Exit status"):
        assert word in told.stdout
    assert "\n  generate " not in told.stdout, "what cannot be run is not among the sub-commands"
    assert run("--version", how=how).stdout == f"kvkeep {kvkeep.__version__}\n"
    listed = run("policies", "-o", "json", how=how)
    assert listed.returncode == 0
    assert [p["policy"] for p in json.loads(listed.stdout)] == [p["name"] for p in kvkeep.policies()]


def test_plan_reads_the_shape_of_a_model(tmp_path):
    shape = dict(
        model_type="llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        rms_norm_eps=1e-6,
        hidden_act="silu",
    )
    (tmp_path / "config.json").write_text(json.dumps(shape))
    planned = run("plan", "--model", tmp_path, "--policy", "tova,budget=64,interval=32", "--length", 1000, "-o", "json")
    assert planned.returncode == 0, planned.stderr
    layers = json.loads(planned.stdout)["layers"]
    assert len(layers) == 3 and layers[0]["peak"]["slots_most"] == 96 and layers[0]["kept"]["slots_most"] == 64


def test_a_recorded_event_is_replayed(tmp_path):
    trace = GOLDEN / "scorers" / "tova_batch" / "trace.safetensors"
    done = run(
        "replay", trace, "--policy", trace.parent / "policy.json", "--out", tmp_path / "kept.safetensors", "-o", "json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "event" and (tmp_path / "kept.safetensors").stat().st_size > 0


@pytest.mark.parametrize("name", WITHOUT)
def test_what_needs_the_model_is_named_and_refused(name):
    for words in ([name], [name, "--model", "m.gguf", "--policy", "tova", "policies"]):
        refused = run(*words)
        assert refused.returncode == 2 and refused.stdout == ""
        assert f"kvkeep: {name}: this kvkeep was built without the laboratory" in refused.stderr
        assert "build kvkeep from its sources with LibTorch" in refused.stderr
    assert name in run("--help").stdout


def test_traces_that_run_a_model_are_refused(tmp_path):
    trace = GOLDEN / "decoder" / "llama_one_layer" / "trace.safetensors"
    refused = run("replay", trace, "--policy", "full", "--out", tmp_path / "out.safetensors")
    assert refused.returncode == 2 and 'kind "decoder"' in refused.stderr and not list(tmp_path.iterdir())


def test_wrong_words_end_with_2():
    for words, said in [
        ([], "Usage: kvkeep [OPTIONS] SUBCOMMAND"),
        (["frobnicate"], "no sub-command 'frobnicate'; allowed policies, plan, replay, doctor"),
        (["policies", "--wrong"], "--wrong"),
        (["policies", "lru"], "lru"),
        (["plan", "--shape", "round", "--policy", "full"], "round"),
    ]:
        refused = run(*words)
        assert refused.returncode == 2 and refused.stdout == "" and said in refused.stderr, words


def test_a_full_disk_is_a_failure():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*BY_NAME["module"], "policies"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1 and done.stderr.startswith("kvkeep: ")


def end_at_signals():
    """As in a terminal: what runs the tests may ignore some, and what is ignored stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_until_it_catches_signals(pid):
    """SIGHUP is the last that the program sets, and Python sets none for it."""
    for _ in range(2000):
        caught = next(
            line for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
        )
        if int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1:
            return
        time.sleep(0.01)
    pytest.fail("the program does not run within 20 s")


@pytest.mark.parametrize("how", BY_NAME)
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_as_it_ends_the_program(how, number, status, tmp_path):
    policy = tmp_path / "policy.json"
    os.mkfifo(policy)  # nobody writes into it, so the program waits
    running = subprocess.Popen(
        [*BY_NAME[how], "plan", "--shape", "qwen7b", "--policy", str(policy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_at_signals,
    )
    wait_until_it_catches_signals(running.pid)
    running.send_signal(number)
    out, err = running.communicate(timeout=20)
    assert running.returncode == status and out == "" and "kvkeep: stopped" in err
