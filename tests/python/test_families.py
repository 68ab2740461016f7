# SPDX-License-Identifier: Apache-2.0
"""A family for each way in which transformers attends (tests/python/families.py tries all of them)."""

import warnings

import pytest
from packaging.version import Version

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")
pytest.importorskip("kvkeep.hf")
families = pytest.importorskip("families")

SAME = ["llama", "qwen3", "smollm3", "cohere", "cohere2", "gemma3_text", "gemma4_text", "llama4_text", "qwen3_5_text",
        "phi", "glm4", "gpt2", "olmo2", "llama, dynamic", "modernbert-decoder", "mistral4", "zamba2"]  # fmt: skip
#: One for each thing that layers have besides plain attention: all that families.py tries, but two of its policies.
MECHANISMS = ["gemma3n_text, shared", "gemma4_text, shared", "falcon_h1", "lfm2", "deepseek_v3", "kimi_linear",
              "gpt_oss", "gemma2"]  # fmt: skip
REFUSED = {
    "xglm": "attention interface",
    "bloom": "attention interface",
    "inkling_text": "a bias by position",
    "deepseek_v32": "DynamicIndexedLayer",
}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(family, trials):
    if families.VARIANTS.get(family, (family,))[0] not in families.CONFIG_MAPPING:
        pytest.skip("this release of transformers has no such family")
    verdict, _, why = families.outcome(family, trials)
    if verdict == "not built":
        pytest.skip(why)
    return verdict, why


OLD = Version(transformers.__version__) < Version("5.24")  # fewer, or others, attend through the interface


@pytest.mark.parametrize("family", SAME)
def test_computes_what_the_model_computes_alone(family):
    verdict, why = outcome(family, ["full", "slots, tova"])
    assert verdict == "same" or (OLD and verdict == "refused"), why


@pytest.mark.parametrize("family", MECHANISMS)
def test_keeps_what_the_reference_keeps(family):
    left_out = ["slots, keydiff", "slots, expected", *(["drafts"] if OLD else [])]
    verdict, why = outcome(family, [name for name in families.TRIALS if name not in left_out])
    assert verdict == "same" or (OLD and verdict == "refused"), why


@pytest.mark.parametrize("family", REFUSED)
def test_is_refused_by_name(family):
    verdict, why = outcome(family, ["full"])
    assert verdict == "refused" and (REFUSED[family] in why or OLD), why


def test_the_trials_tell_one_slot_from_another(monkeypatch):
    """What the tests above rest on: a reference of other options, and attention that loses what it kept."""
    model = families.tiny("llama")
    assert families.kept_slots(model, "tova") is None
    with monkeypatch.context() as patched:
        patched.setattr(families, "OPTIONS", families.OPTIONS.replace("recent=6", "recent=7"))
        assert "slots are not the reference's" in families.kept_slots(model, "tova")
    with monkeypatch.context() as patched:
        patched.setattr("reference.SINK", 5)
        assert "slots are not the reference's" in families.kept_slots(model, "keydiff")
    rows = pytest.importorskip("kvkeep._rows")
    of = rows.Rows.heads_of
    monkeypatch.setattr(
        rows.Rows,
        "heads_of",
        lambda self, layer, module: [x.roll(1, 2) if n else x for n, x in enumerate(of(self, layer, module))],
    )
    assert "logits differ" in families.kept_slots(model, "streaming")
