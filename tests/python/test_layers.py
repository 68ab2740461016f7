# SPDX-License-Identifier: Apache-2.0
"""Layers that hold more than keys and values of heads: latent rows, states, windows."""

import copy

import kvkeep
import pytest
from packaging.version import Version
from test_hf import CUT, generate, hf, torch, transformers, with_cache

families = pytest.importorskip("families")
OLD = Version(transformers.__version__) < Version("5.24")  # fewer families are served
ids = families.text(120)


def model_of(family):
    if families.VARIANTS.get(family, (family,))[0] not in families.CONFIG_MAPPING:
        pytest.skip("this release of transformers has no such family")
    try:
        model = families.tiny(family)
    except Exception as error:
        pytest.skip(f"this release of transformers does not build it: {error}")
    if OLD:
        try:
            hf.attach(model, "full").__enter__().__exit__(None)
        except kvkeep.Unsupported as error:
            pytest.skip(str(error))
    return model


def latent():
    model = model_of("deepseek_v3")
    if not hasattr(model.model.layers[0].self_attn, "expand_kv"):
        pytest.skip("this release of transformers keeps heads")
    return model


def test_a_latent_row_is_one_head_and_counts_as_it_lies():
    model = latent()
    with hf.attach(model, CUT) as kept:
        generate(model, ids)
        memory = kept.memory()
    spec = kept.keeper.spec
    assert (spec.kv_heads, spec.query_heads, spec.key_dim, spec.value_dim) == (1, 4, 8 + 16, 16)
    assert memory.full == 4 * 143 * (8 + 16) * 4, "four layers, 143 tokens, f32"
    assert memory.now < memory.full / 2
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)


def test_queries_over_latent_rows_have_the_products_of_the_models_own():
    from kvkeep._model import absorbed, expand, row_of

    model = latent()
    module, random = model.model.layers[1].self_attn, torch.Generator().manual_seed(3)
    latents, turned = (torch.randn(1, 1, 9, size, generator=random) for size in (16, 8))
    query = torch.randn(1, 4, 5, 24, generator=random)
    with torch.no_grad():
        keys, values = module.expand_kv(latents, turned)
        row = row_of(latents, turned)
        ours = absorbed(module, query, row) @ row[0].transpose(-1, -2)
        assert torch.allclose(ours, query @ keys.transpose(-1, -2), atol=1e-4)
        again = expand(module, *row)
    assert torch.equal(again[0], keys) and torch.equal(again[1], values)


def test_projections_of_latent_values_are_refused():
    with pytest.raises(kvkeep.Unsupported, match="output_projections: rows are latent"):
        hf.attach(latent(), CUT, output_projections=True)


def test_a_copy_of_a_model_with_latent_rows_runs_alone():
    model = latent()
    with hf.attach(model, CUT):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(0.9)
        inside = generate(copied, ids)
        generate(model, ids)
    assert torch.equal(inside, generate(copied, ids))


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5_text", "gemma3_text"])
def test_a_crop_that_a_state_or_a_window_cannot_follow_is_refused_and_nothing_changes(family):
    model = model_of(family)
    with hf.attach(model, "full") as kept, torch.no_grad():
        cache = kept.cache()
        model(ids, **with_cache(model, cache))
        rows = hf._rows_of(cache)
        lengths = rows.lengths.copy()
        with pytest.raises(kvkeep.StateError, match="crop: 3 columns, and layer 0 holds a state or a window"):
            cache.crop(-3)
        assert (rows.lengths == lengths).all() and cache.get_seq_length() == 120
        assert kept.keeper.logical_length(rows.ids[0]) == 120
        last = model(ids[:, :1], **with_cache(model, cache)).logits
        whole = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    assert torch.allclose(last, whole, atol=1e-3)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text", "lfm2"])
def test_drafts_over_windows_and_states_that_can_go_back(family):
    """A cache that generate() made records its past; ours, in its place, does so too."""
    if OLD:
        pytest.skip("this release of transformers drafts over other caches")
    model, again = model_of(family), families.text(30).repeat(1, 4)
    try:
        plain = generate(model, again, prompt_lookup_num_tokens=5)
    except Exception as error:
        pytest.skip(f"this release of transformers drafts nothing over it: {error}")
    with hf.attach(model, "full"):
        assert torch.equal(generate(model, again, prompt_lookup_num_tokens=5), plain)


def test_a_cache_with_states_that_is_reset_begins_another_text():
    model = model_of("falcon_h1")
    with hf.attach(model, CUT) as kept:
        cache = kept.cache()
        first = generate(model, ids, **with_cache(model, cache))
        cache.reset()
        assert torch.equal(generate(model, ids, **with_cache(model, cache)), first)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_sinks_and_caps_over_a_few_queries_at_a_time_are_those_over_all(monkeypatch, family):
    model = model_of(family)
    plain = generate(model, ids)
    with hf.attach(model, CUT) as kept:
        whole, events = generate(model, ids), kept.events
    monkeypatch.setattr("kvkeep._model._AT_ONCE", 4 * 120 * 7)
    with hf.attach(model, "full"):
        assert torch.equal(generate(model, ids), plain)
    with hf.attach(model, CUT) as kept:
        assert torch.equal(generate(model, ids), whole) and kept.events == events and len(events) >= 3


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "deepseek_v3", "falcon_h1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype):
    model = model_of(family).to(dtype)
    with hf.attach(model, "ams-tova,budget=40,interval=8,prefill=cut") as kept:
        assert generate(model, ids).shape[1] == 144 and len(kept.events) >= 3


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_a_policy_that_was_not_told_of_sinks_or_a_cap_keeps_other_slots(monkeypatch, family):
    model, spec = model_of(family), kvkeep.ModelSpec
    assert families.kept_slots(model, "tova") is None
    untold = lambda *sizes, layer_sinks, logit_cap, **more: spec(*sizes, **more)
    monkeypatch.setattr("kvkeep._model.ModelSpec", untold)
    assert "slots are not the reference's" in families.kept_slots(model, "tova")
