# SPDX-License-Identifier: Apache-2.0
"""The `with` block of attach(): what runs in it, once at a time, and what is said of a program that left it out."""

import subprocess
import sys
import warnings

import kvkeep
import pytest
from test_hf import CUT, generate, hf, model_of, tokens_of, torch, with_cache


def test_a_second_policy_over_a_model_is_refused_and_a_misspelled_one_before_it():
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, CUT) as kept:
        text = generate(model, ids)
        for other in (model, model.get_decoder()):
            with pytest.raises(
                kvkeep.StateError, match="this model is under tova,.* already; allowed after its `with`"
            ):
                hf.attach(other, "full")
        with pytest.raises(kvkeep.InvalidArgument, match='no policy "tvoa"'):
            hf.attach(model, "tvoa,budget=32")
        generate(model, ids)
        assert len(kept.events) == 6, "the first one goes on"
    with hf.attach(model, dict(policy="tova", budget=40, interval=8, prefill="cut", recent=4)) as again:
        assert torch.equal(generate(model, ids), text)
    assert '"budget": 40' in repr(again)
    first, second = hf.attach(model, CUT), hf.attach(model, CUT)
    with first, pytest.raises(kvkeep.StateError, match="already"):
        second.__enter__()
    with second:
        assert torch.equal(generate(model, ids), text)


def test_a_cache_outside_its_block_is_refused():
    model, ids = model_of(), tokens_of(60)
    kept = hf.attach(model, CUT)
    cache = kept.cache()
    with torch.no_grad():
        with pytest.raises(kvkeep.StateError, match="its `with` block has not begun; allowed inside the block"):
            model(ids, **with_cache(model, cache))
        with kept:
            model(ids, **with_cache(model, cache))
        for run in (
            lambda: model(ids[:, :1], **with_cache(model, cache)),
            lambda: generate(model, torch.cat([ids, ids], 1), **with_cache(model, cache)),
        ):
            with pytest.raises(kvkeep.StateError, match="its `with` block has ended; allowed inside the block"):
                run()
        assert cache.get_seq_length() == 60


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_module_that_is_missing_is_named_with_how_to_get_it(missing):
    program = f"import sys; sys.modules[{missing!r}] = None; import kvkeep.hf"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f'kvkeep.hf: there is no module {missing}; allowed after pip install "kvkeep[hf]"' in ran.stderr


def test_an_attach_without_its_block_is_said_aloud():
    model, ids = model_of(), tokens_of(20)
    with pytest.warns(UserWarning, match="attach\\(\\) of tova,budget=16 was dropped without a `with` block"):
        kept = hf.attach(model, "tova,budget=16")
        generate(model, ids)
        del kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hf.attach(model, "full") as kept:
            generate(model, ids)
        del kept
        with pytest.raises(kvkeep.InvalidArgument):
            hf.attach(model, "tova")


def test_no_event_is_said_aloud():
    model, ids = model_of(), tokens_of(20)
    with pytest.warns(
        UserWarning, match="no event came: the longest sequence had 42 tokens, and tova,budget=64 may cut one of 576"
    ):
        with hf.attach(model, "tova,budget=64"):
            generate(model, ids)
    with pytest.warns(UserWarning, match="no event came: the model ran without a cache"):
        with hf.attach(model, "tova,budget=32"):
            generate(model, ids, use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hf.attach(model, "full"):
            generate(model, ids)
