# SPDX-License-Identifier: Apache-2.0
"""kvkeep.llama_cpp over llama-cpp-python, where that is installed, with the library that KVKEEP_LLAMA_LIBRARY names and
the model that KVKEEP_TEST_SMOLLM2 names; one whose layers slide over 512 tokens, if KVKEEP_TEST_GEMMA3 names it."""

import os

import kvkeep
import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed", exc_type=Exception)
MODEL = os.environ.get("KVKEEP_TEST_SMOLLM2", "")
if not MODEL or not os.environ.get("KVKEEP_LLAMA_LIBRARY"):
    pytest.skip("KVKEEP_TEST_SMOLLM2 and KVKEEP_LLAMA_LIBRARY are not set", allow_module_level=True)

import kvkeep.llama_cpp  # noqa: E402

TEXT = "The river runs past the garden, where a silver engine stands in the winter forest. " * 12
OPTIONS = {"model_path": MODEL, "n_ctx": 1024, "n_threads": 1, "verbose": False, "flash_attn": True}


def answer(llama, text=TEXT, tokens=24):
    made = llama(text, max_tokens=tokens, temperature=0)
    return made["choices"][0]["text"]


def test_a_budget_that_holds_the_text_gives_the_same_tokens():
    want = answer(llama_cpp.Llama(**OPTIONS))
    for policy in ("tova,budget=1000", "full"):
        llama = kvkeep.llama_cpp.Llama(policy, **OPTIONS)
        assert answer(llama) == want
        assert kvkeep.llama_cpp.events(llama) == 0


def test_prompts_are_cut_and_texts_go_on():
    llama = kvkeep.llama_cpp.Llama("tova,budget=64,interval=16,prefill=cut", **OPTIONS)
    first = answer(llama)
    assert kvkeep.llama_cpp.events(llama) >= 1
    before = kvkeep.llama_cpp.events(llama)
    assert answer(llama, TEXT + first + " And then", 40)
    assert kvkeep.llama_cpp.events(llama) > before
    # Behind what was cut: computed anew, with the answer of a new one.
    assert answer(llama) == first


@pytest.mark.skipif("KVKEEP_TEST_GEMMA3" not in os.environ, reason="KVKEEP_TEST_GEMMA3 is not set: a GGUF of Gemma 3")
@pytest.mark.parametrize("swa_full", [True, False])
def test_layers_that_slide(swa_full):
    options = {**OPTIONS, "model_path": os.environ["KVKEEP_TEST_GEMMA3"], "n_ctx": 4096, "n_batch": 4096}
    options["swa_full"] = swa_full
    text = TEXT * 4
    want = answer(llama_cpp.Llama(**options), text)
    for policy in ("tova,budget=3000", "full"):
        llama = kvkeep.llama_cpp.Llama(policy, **options)
        assert answer(llama, text) == want
        assert kvkeep.llama_cpp.events(llama) == 0
    with pytest.raises(kvkeep.Unsupported, match="slide over 512 tokens"):
        kvkeep.llama_cpp.Llama("tova,budget=511", **options)
    llama = kvkeep.llama_cpp.Llama("tova,budget=512,interval=16,prefill=cut", **options)
    first = answer(llama, text)
    before = kvkeep.llama_cpp.events(llama)
    assert before >= 1
    assert answer(llama, text + first + " And then", 40)
    assert kvkeep.llama_cpp.events(llama) > before
    assert answer(llama, text) == first


def test_what_cannot_run_is_an_error():
    with pytest.raises(kvkeep.Unsupported, match="tovva"):
        kvkeep.llama_cpp.Llama("tovva,budget=64", **OPTIONS)
    with pytest.raises(kvkeep.Unsupported, match="q8_0"):
        kvkeep.llama_cpp.Llama("expected,budget=64", type_k=8, **OPTIONS)
    with pytest.raises(kvkeep.Unsupported, match="embeddings"):
        kvkeep.llama_cpp.Llama("tova,budget=64", embedding=True, **OPTIONS)
    with pytest.raises(kvkeep.StateError):
        kvkeep.llama_cpp.events(llama_cpp.Llama(**OPTIONS))
    with pytest.raises(ValueError, match="nowhere"):
        kvkeep.llama_cpp.Llama("tova,budget=64", **{**OPTIONS, "model_path": "/nowhere.gguf"})
