# SPDX-License-Identifier: Apache-2.0
"""A family for each way in which transformers attends (tests/python/families.py tries all of them)."""

import warnings

import pytest
from packaging.version import Version

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")
pytest.importorskip("kvkeep.hf")
families = pytest.importorskip("families")

SAME = ["llama", "qwen3", "smollm3", "cohere", "cohere2", "gemma3_text", "gemma4_text", "gemma4_text, shared",
        "llama4_text", "qwen3_5_text", "phi", "glm4", "gpt2", "olmo2", "llama, dynamic",
        "modernbert-decoder"]  # fmt: skip
REFUSED = {
    "gpt_oss": "learned sinks",
    "xglm": "attention interface",
    "deepseek_v3": "attention interface",
    "bloom": "attention interface",
    "falcon_h1": "LinearAttentionAndFullAttentionLayer",
}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(family):
    if families.VARIANTS.get(family, (family,))[0] not in families.CONFIG_MAPPING:
        pytest.skip("this release of transformers has no such family")
    verdict, why = families.outcome(family)
    if verdict == "not built":
        pytest.skip(why)
    return verdict, why


OLD = Version(transformers.__version__) < Version("5.20")  # fewer, or others, attend through the interface


@pytest.mark.parametrize("family", SAME)
def test_computes_what_the_model_computes_alone(family):
    verdict, why = outcome(family)
    assert verdict == "same" or (OLD and verdict == "refused"), why


@pytest.mark.parametrize("family", REFUSED)
def test_is_refused_by_name(family):
    verdict, why = outcome(family)
    if OLD and family == "deepseek_v3":  # attends through the interface there
        assert verdict in ("same", "refused"), why
    else:
        assert verdict == "refused" and (REFUSED[family] in why or OLD), why
