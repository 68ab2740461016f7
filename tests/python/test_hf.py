"""transformers' own generate() under a policy: the same tokens under a budget that holds the text, and each sequence of a
padded batch as if it were alone."""

import inspect

import kvkeep
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
hf = pytest.importorskip("kvkeep.hf")

SHAPE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None)
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=12, layer_types=["sliding_attention", "full_attention", "full_attention"]),
}


def model_of(kind="llama"):
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    with torch.no_grad():  # attention that tells its tokens apart
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


def with_cache(model, cache):
    """The argument that passes a cache, as this version of transformers calls it."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return {"use_cache": True, "cache" if "cache" in names else "past_key_values": cache}


def tokens_of(count, seed=1):
    return torch.randint(2, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, new=24, **more):
    more.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=new, do_sample=False, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["full", "tova,budget=512", "expected,budget=512", "pyramidkv-snapkv,budget=512"])
def test_a_budget_that_holds_the_text_changes_nothing(kind, policy):
    model, ids = model_of(kind), tokens_of(50)
    plain = generate(model, ids)
    with hf.attach(model, policy) as kept:
        assert torch.equal(generate(model, ids), plain)
        assert torch.equal(generate(model, ids), plain), "a second text begins afresh"
    assert kept.events == []
    assert model.config._attn_implementation != "kvkeep"
    assert torch.equal(generate(model, ids), plain), "nothing is left of it"


@pytest.mark.parametrize("policy", ["tova", "ams-tova", "snapkv", "keydiff", "rkv", "streaming", "pyramidkv-knorm", "adakv-snapkv"])
def test_rows_stay_within_the_budget_and_end_at_the_newest_token(policy):
    model, ids = model_of(), tokens_of(80)
    with hf.attach(model, f"{policy},budget=32,interval=8,prefill=cut") as kept:
        cache = kept.cache()
        generate(model, ids, new=60, **with_cache(model, cache))
        rows = cache.layers[0].rows
        assert cache.get_seq_length() == 139 and kept.keeper.logical_length(rows.ids[0]) == 139
        mean = sum(len(kept.keeper.positions(rows.ids[0], l, h)) for l in range(3) for h in range(2)) / 6
        assert mean <= 40
        for layer in range(3):
            for head in range(2):
                positions = kept.keeper.positions(rows.ids[0], layer, head)
                assert positions[-1] == 138 and rows.heads(layer)[0, head] == len(positions)
        assert rows.buffers[0][0].shape[2] < 139 + 8
    assert len(kept.events) >= 6 and kept.events[0].slots_before == 80


def test_attention_over_the_rows_is_attention_over_the_tokens_that_are_kept():
    """Streaming keeps the same tokens everywhere: a mask over the full cache does the same."""
    model, ids = model_of(), tokens_of(120)
    with hf.attach(model, "streaming,budget=32,interval=1000,prefill=cut") as kept, torch.no_grad():
        out = model(ids[:, :100], use_cache=True)
        cache = getattr(out, "cache", None) or out.past_key_values
        rows = next(layer.rows for layer in cache.layers)
        held = torch.from_numpy(kept.keeper.positions(rows.ids[0], 0, 0)).long()
        assert len(held) == 32
        cut = [model(ids[:, t : t + 1], **with_cache(model, cache), position_ids=torch.tensor([[t]])).logits for t in range(100, 104)]
    mask = torch.ones(104, 104, dtype=torch.bool).tril()
    mask[100:, :100] = False
    mask[100:, held] = True
    with torch.no_grad():
        whole = model(ids[:, :104], attention_mask=mask[None, None], use_cache=False).logits
    assert torch.allclose(torch.cat(cut, 1), whole[:, 100:], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("policy", ["tova,budget=512", "tova,budget=24,interval=8,prefill=cut", "adakv-snapkv,budget=24,interval=8,window=8,prefill=cut"])
def test_a_padded_batch_gives_what_each_sequence_gives_alone(policy):
    model = model_of()
    texts = [tokens_of(60, 2), tokens_of(33, 3), tokens_of(48, 4)]
    alone = []
    for text in texts:
        with hf.attach(model, policy):
            alone.append(generate(model, text, new=40)[0, text.shape[1] :])
    ids, mask = torch.zeros(3, 60, dtype=torch.long), torch.zeros(3, 60, dtype=torch.long)
    for i, text in enumerate(texts):
        ids[i, 60 - text.shape[1] :], mask[i, 60 - text.shape[1] :] = text, 1
    with hf.attach(model, policy):
        together = generate(model, ids, new=40, attention_mask=mask)[:, 60:]
    for i in range(3):
        assert torch.equal(together[i], alone[i]), i


def test_memory_is_flat_over_a_long_text():
    model, sizes = model_of(), []
    with hf.attach(model, "tova,budget=64,interval=16,prefill=cut") as kept, torch.no_grad():
        cache = kept.cache()
        model(tokens_of(1000), **with_cache(model, cache))
        for token in range(1000, 1500):
            model(tokens_of(1, token), **with_cache(model, cache), position_ids=torch.tensor([[token]]))
            sizes.append(cache.layers[0].rows.buffers[0][0].shape[2])
    assert set(sizes) == {192} and len(kept.events) > 30
    assert cache.get_seq_length() == 1500


def test_rollback_of_speculative_tokens():
    model, ids = model_of(), tokens_of(40)
    with hf.attach(model, "tova,budget=32,interval=16,prefill=cut") as kept, torch.no_grad():
        cache = kept.cache()
        model(ids, **with_cache(model, cache))
        rows = cache.layers[0].rows
        before = kept.keeper.logical_length(rows.ids[0]), rows.lengths.copy()
        model(tokens_of(4, 8), **with_cache(model, cache), position_ids=torch.arange(40, 44)[None])
        cache.crop(-4)
        assert kept.keeper.logical_length(rows.ids[0]) == before[0] and (rows.lengths == before[1]).all()
        assert cache.get_seq_length() == 40


def test_what_cannot_be_served_is_refused_by_name():
    model, ids = model_of(), tokens_of(20)
    with pytest.raises(kvkeep.InvalidArgument, match="budget"):
        hf.attach(model, "tova")
    with pytest.raises(kvkeep.InvalidArgument, match="layer by layer|narrow"):
        hf.attach(model, "asl,budget=64")
    with hf.attach(model, "tova,budget=16"):
        with pytest.raises(kvkeep.Unsupported, match="beam search"):
            generate(model, ids, num_beams=2)
        with pytest.raises(kvkeep.Unsupported, match="StaticCache"):
            generate(model, ids, cache_implementation="static")
        right = torch.ones_like(ids)
        right[0, -3:] = 0
        with pytest.raises(kvkeep.Unsupported, match="padded on the left"):
            generate(model, ids, attention_mask=right)
    used = transformers.DynamicCache(config=model.config)
    model(ids, **with_cache(model, used))
    with hf.attach(model, "tova,budget=16"), pytest.raises(kvkeep.Unsupported, match="holds 20 tokens"):
        generate(model, torch.cat([ids, tokens_of(1)], 1), **with_cache(model, used))
    assert torch.equal(generate(model, ids), generate(model, ids))
