# SPDX-License-Identifier: Apache-2.0
"""transformers' own generate() under a policy: the same tokens under a budget that holds the text, and each sequence of
a padded batch as if it were alone."""

import copy
import inspect
import threading

import kvkeep
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")
hf = pytest.importorskip("kvkeep.hf")
CONFIG_MAPPING = transformers.models.auto.configuration_auto.CONFIG_MAPPING

SHAPE = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "small": lambda: transformers.LlamaConfig(**(SHAPE | dict(num_hidden_layers=1))),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=12, layer_types=["sliding_attention", "full_attention", "full_attention"]
    ),
}


CUT = "tova,budget=40,interval=8,prefill=cut,recent=4"
EXPECTED = "expected,budget=40,interval=8,prefill=cut,recent=4,sink=2"
CACHE = (
    "cache"
    if "cache" in inspect.signature(inspect.unwrap(transformers.LlamaForCausalLM.forward)).parameters
    else "past_key_values"
)


def rope(**parameters):
    """Parameters of RoPE as this version of transformers calls them."""
    if (
        "rope_parameters" in inspect.signature(transformers.LlamaConfig.__init__).parameters
        or transformers.__version__ >= "5"
    ):
        return {"rope_parameters": {"rope_theta": 1e4, **parameters}}
    return {"rope_scaling": {"type": parameters.pop("rope_type"), **parameters}}


def randomised(model):
    torch.manual_seed(5)
    with torch.no_grad():  # attention that tells its tokens apart
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.06 if parameter.shape[0] < 128 else 0.3)
    return model.eval()


def model_of(kind="llama"):
    return randomised(transformers.AutoModelForCausalLM.from_config(KINDS[kind]()))


def with_cache(model, cache):
    """The argument that passes a cache, as this version of transformers calls it."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return {"use_cache": True, "cache" if "cache" in names else "past_key_values": cache}


def tokens_of(count, seed=1):
    return torch.randint(2, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, new=24, **more):
    more.setdefault("attention_mask", torch.ones_like(ids))
    more.setdefault("eos_token_id", 1000)  # which no token is
    return model.generate(ids, max_new_tokens=new, do_sample=False, **more)


@pytest.mark.filterwarnings("ignore:kvkeep.hf. no event")
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


@pytest.mark.parametrize(
    "policy", ["tova", "ams-tova", "snapkv", "keydiff", "rkv", "streaming", "pyramidkv-knorm", "adakv-snapkv"]
)
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
        cut = [
            model(ids[:, t : t + 1], **with_cache(model, cache), position_ids=torch.tensor([[t]])).logits
            for t in range(100, 104)
        ]
        held = torch.from_numpy(kept.keeper.positions(rows.ids[0], 0, 0)).long()[:32]
        assert held[-1] == 99 and len(kept.events) == 1
    mask = torch.ones(104, 104, dtype=torch.bool).tril()
    mask[100:, :100] = False
    mask[100:, held] = True
    with torch.no_grad():
        whole = model(ids[:, :104], attention_mask=mask[None, None], use_cache=False).logits
    assert torch.allclose(torch.cat(cut, 1), whole[:, 100:], atol=2e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:kvkeep.hf. no event")
@pytest.mark.parametrize(
    "policy",
    [
        "tova,budget=512",
        "tova,budget=24,interval=8,prefill=cut",
        "adakv-snapkv,budget=24,interval=8,window=8,prefill=cut",
    ],
)
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


@pytest.mark.parametrize("policy", ["tova,budget=24", "snapkv,budget=24,window=8", "rkv,budget=24"])
def test_padding_on_the_right_hides_no_query_however_long_it_is(policy):
    model, texts, more = model_of(), [tokens_of(100, 2), tokens_of(31, 3)], tokens_of(20, 4)

    def logits(rows):
        width = max(texts[r].shape[1] for r in rows)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        for i, r in enumerate(rows):
            ids[i, : texts[r].shape[1]], mask[i, : texts[r].shape[1]] = texts[r], 1
        out = []
        with hf.attach(model, policy + ",interval=8,prefill=cut") as kept, torch.no_grad():
            cache = kept.cache()
            model(ids, **with_cache(model, cache), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
            for token in more[0]:
                at = mask.sum(1, keepdim=True)
                mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
                step = with_cache(model, cache) | dict(attention_mask=mask, position_ids=at)
                out.append(model(token.expand(len(rows), 1), **step).logits[:, -1])
            assert len(kept.events) == 3 * len(rows)
        return torch.stack(out, 1)

    both = logits([0, 1])
    for r in range(2):
        assert torch.allclose(both[r], logits([r])[0], atol=1e-4), r


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
        with pytest.raises(kvkeep.Unsupported, match="output_attentions"):
            generate(model, ids, output_attentions=True, return_dict_in_generate=True)
    used = transformers.DynamicCache(config=model.config)
    model(ids, **with_cache(model, used))
    with hf.attach(model, "tova,budget=16"), pytest.raises(kvkeep.Unsupported, match="holds 20 tokens"):
        generate(model, torch.cat([ids, tokens_of(1)], 1), **with_cache(model, used))
    assert torch.equal(generate(model, ids), generate(model, ids))


# ---- What a model is


def spec_of(spec, **more):
    """The same shapes, told by hand."""
    told = dict(value_dim=spec.value_dim, softmax_scale=1 / spec.key_dim**0.5)
    return kvkeep.ModelSpec(spec.query_heads, spec.kv_heads, spec.key_dim, spec.num_layers, **(told | more))


def kept_under(monkeypatch, model, policy, ids, told=None, **more):
    """{(layer, head): positions} after generate(), and its events; `told`: what the spec becomes."""
    if told is not None:
        learned = hf.describe
        monkeypatch.setattr(hf, "describe", lambda m: (told(learned(m)[0]), *learned(m)[1:]))
    with hf.attach(model, policy) as kept:
        cache = kept.cache()
        generate(model, ids, **with_cache(model, cache), **more)
        keeper, id = kept.keeper, hf._rows_of(cache).ids[0]
        spec = keeper.spec
        held = {(l, h): keeper.positions(id, l, h).tolist() for l in spec.full_layers for h in range(spec.kv_heads)}
    monkeypatch.undo()
    return held, kept.events


def inv_freq(model, name="inv_freq"):
    return dict(model.get_decoder().rotary_emb.named_buffers())[name].double().tolist()


SLIDES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
ROPES = {
    "llama": (dict(), lambda m: dict(inv_freq=inv_freq(m))),
    "cohere": (dict(), lambda m: dict(inv_freq=inv_freq(m), rope_style="interleaved")),
    "smollm3": (
        dict(num_hidden_layers=4),
        lambda m: dict(inv_freq=inv_freq(m), layer_ropes={3: kvkeep.Rope(style="none")}),
    ),
    "cohere2": (
        dict(num_hidden_layers=4, head_dim=16, sliding_window=12, layer_types=SLIDES),
        lambda m: dict(rope_style="none", sliding=[(0, 12), (2, 12)]),
    ),
    "phi": (dict(partial_rotary_factor=0.5), lambda m: dict(inv_freq=inv_freq(m))),
}


@pytest.mark.parametrize("kind", ROPES)
def test_expected_turns_each_layer_as_the_model_does(monkeypatch, kind):
    """the slots that `expected` keeps are those under a spec that was written by hand."""
    over, told = ROPES[kind]
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | over))
    model, ids = randomised(transformers.AutoModelForCausalLM.from_config(config)), tokens_of(120)
    learned = kept_under(monkeypatch, model, EXPECTED, ids)
    by_hand = kept_under(monkeypatch, model, EXPECTED, ids, lambda spec: spec_of(spec, **told(model)))
    assert learned == by_hand and len(learned[1]) >= 2
    wrong = kept_under(
        monkeypatch,
        model,
        EXPECTED,
        ids,
        lambda spec: spec_of(spec, inv_freq=[0.9, 0.4], sliding=told(model).get("sliding", [])),
    )
    assert wrong[0] != learned[0], "the trial tells one RoPE from another"


def test_gemma3_turns_full_layers_by_their_own_frequencies():
    model = model_of("gemma3")
    names = dict(model.get_decoder().rotary_emb.named_buffers())
    full = next(n for n in ("full_attention_inv_freq", "inv_freq") if n in names)
    spec = hf.describe(model)[0]
    assert spec.rope(1).inv_freq == names[full].double().tolist() and spec.rope(2).inv_freq == spec.rope(1).inv_freq


def test_a_rope_that_changes_with_the_length_is_refused_where_it_is_read():
    for config in (
        transformers.LlamaConfig(**SHAPE, **rope(rope_type="dynamic", factor=4.0)),
        transformers.Phi3Config(
            **SHAPE,
            original_max_position_embeddings=512,
            **rope(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8),
        ),
    ):
        model = randomised(transformers.AutoModelForCausalLM.from_config(config))
        with pytest.raises(kvkeep.InvalidArgument, match="does not state the RoPE of layer 0"):
            hf.attach(model, EXPECTED)
        with hf.attach(model, "tova,budget=32"):
            pass


def test_attention_that_is_more_than_a_softmax_under_a_mask_is_refused_by_its_name():
    from kvkeep._model import attention

    x = torch.zeros(1, 4, 3, 8)
    for name, given, meaning in (
        ("position_bias", x, "position_bias, a bias by position"),
        ("indices", x, "indices, tokens chosen by an indexer"),
        ("sinks", torch.zeros(1, 4, 3, 1), "sinks, sinks that follow from the text"),
        ("s_aux", torch.zeros(3), "s_aux; allowed"),
        ("softcap", -1.0, "softcap; allowed"),
        ("temperature", 2.0, "temperature; allowed"),
    ):
        with pytest.raises(kvkeep.Unsupported, match=f"attention of Linear has the argument {meaning}"):
            attention(torch.nn.Linear(2, 2), x, x, x, None, **{name: given})


def test_a_model_whose_attention_does_not_come_by_is_refused_when_it_is_attached():
    config = transformers.XGLMConfig(
        vocab_size=128, d_model=64, ffn_dim=96, attention_heads=4, num_layers=3, pad_token_id=0
    )
    with pytest.raises(kvkeep.Unsupported, match="does not come through transformers' attention interface"):
        hf.attach(randomised(transformers.AutoModelForCausalLM.from_config(config)), "tova,budget=24")


@pytest.mark.filterwarnings("ignore:kvkeep.hf. no event")
def test_a_layer_that_leaves_the_interface_later_is_an_error_of_that_step():
    model, ids = model_of(), tokens_of(20)
    with hf.attach(model, "tova,budget=64") as kept, torch.no_grad():
        cache = kept.cache()
        model(ids, **with_cache(model, cache))
        attention = model.get_decoder().layers[1].self_attn
        attention.forward = lambda hidden_states, **more: (hidden_states, None)
        with pytest.raises(kvkeep.Unsupported, match="attention of layer 1 did not come through"):
            model(tokens_of(1), **with_cache(model, cache))


def test_a_difference_that_nobody_thought_of_is_found_when_it_is_attached():
    model = model_of()
    attention = model.get_decoder().layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *a, **k: (
        plain(*a, **k)[0] * (2 if k.get(CACHE) is not None and hf._rows_of(k[CACHE]) else 1),
        None,
    )
    with pytest.raises(kvkeep.Unsupported, match="are not those of the model alone"):
        hf.attach(model, "tova,budget=64")
    with hf.attach(model, "tova,budget=64", check=False):
        pass


def test_keys_and_values_of_two_sizes():
    if "mimo_v2_flash" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no such family")
    sizes = dict(
        head_dim=24,
        v_head_dim=16,
        swa_head_dim=24,
        swa_v_head_dim=16,
        sliding_window=12,
        moe_layer_freq=[0] * 3,
        n_routed_experts=2,
        num_experts_per_tok=1,
    )
    config = transformers.AutoConfig.for_model("mimo_v2_flash", **(SHAPE | sizes))
    model, ids = randomised(transformers.AutoModelForCausalLM.from_config(config)), tokens_of(60)
    plain = generate(model, ids)
    with hf.attach(model, "full") as kept:
        assert torch.equal(generate(model, ids), plain)
    assert (kept.keeper.spec.key_dim, kept.keeper.spec.value_dim) == (24, 16)
    with hf.attach(model, CUT) as kept:
        generate(model, ids)
    assert len(kept.events) >= 3, kept.events


# ---- Which tokens a query sees


@pytest.mark.parametrize("policy", ["full", CUT])
def test_turns_of_a_padded_batch(policy):
    """three turns, padded on the left, in the middle of the mask, and on the right."""
    model = model_of()
    turns = [([40, 33], "left"), ([10, 4], "left"), ([3, 7], "right"), ([5, 5], "left")]
    texts = [
        [tokens_of(n, seed=10 * t + b)[0] for t, (lengths, _) in enumerate(turns) for n in [lengths[b]]]
        for b in range(2)
    ]

    def alone(b, under):
        cache = under.cache() if under else transformers.DynamicCache(config=model.config)
        return [model(part[None], **with_cache(model, cache)).logits[0, -1] for part in texts[b]]

    def together(under):
        cache, mask, out = (
            under.cache() if under else transformers.DynamicCache(config=model.config),
            torch.zeros(2, 0, dtype=torch.long),
            [],
        )
        for t, (lengths, side) in enumerate(turns):
            width = max(lengths)
            ids, new = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
            for b, n in enumerate(lengths):
                at = slice(width - n, width) if side == "left" else slice(0, n)
                ids[b, at], new[b, at] = texts[b][t], 1
            mask = torch.cat([mask, new], 1)
            positions = (mask.cumsum(1)[:, -width:] - 1).clamp(min=0)
            logits = model(ids, **with_cache(model, cache), attention_mask=mask, position_ids=positions).logits
            out.append(torch.stack([logits[b, int(new[b].nonzero().max())] for b in range(2)]))
        return out

    with torch.no_grad():
        plain = together(None)
        with hf.attach(model, policy) as kept:
            got, single = together(kept), [alone(b, kept) for b in range(2)]
    for t in range(len(turns)):
        if policy == "full":
            assert torch.allclose(got[t], plain[t], atol=1e-4), t
        for b in range(2):
            assert torch.allclose(got[t][b], single[b][t], atol=1e-4), (t, b)


@pytest.mark.parametrize("pad", [0, "the end token"])
@pytest.mark.parametrize("policy", ["full", CUT, "expected,budget=40,interval=8,prefill=cut,recent=4,sink=2"])
def test_a_sequence_that_ends_before_the_others_is_given_no_padding(policy, pad):
    """generate() writes padding behind its end token, and its mask counts that as text; turns are each's own."""
    model, prompts, more = (
        model_of(),
        [tokens_of(44, seed=2), tokens_of(50, seed=3)],
        [tokens_of(6, seed=4), tokens_of(9, seed=5)],
    )
    end = int(generate(model, prompts[0])[0, 46])  # the third token that the first one writes
    pad = end if pad == "the end token" else pad

    def turn(cache, seen, mask, new):
        width = max(n.shape[1] for n in new)
        ids = torch.cat([seen, torch.cat([torch.nn.functional.pad(n, (width - n.shape[1], 0)) for n in new])], 1)
        mask = torch.cat([mask, torch.stack([(torch.arange(width) >= width - n.shape[1]).long() for n in new])], 1)
        out = generate(model, ids, attention_mask=mask, eos_token_id=end, pad_token_id=pad, **{CACHE: cache})
        wrote = out[:, ids.shape[1] :]
        real = ((wrote == end).cumsum(1) - (wrote == end).long() == 0).long()
        return out, torch.cat([mask, real], 1), [w[r.bool()].tolist() for w, r in zip(wrote, real)]

    def talk(kept, rows):
        cache, seen, mask = (
            kept.cache(),
            torch.zeros(len(rows), 0, dtype=torch.long),
            torch.zeros(len(rows), 0, dtype=torch.long),
        )
        seen, mask, first = turn(cache, seen, mask, [prompts[r] for r in rows])
        return [list(x) for x in zip(first, turn(cache, seen, mask, [more[r] for r in rows])[2])]

    with hf.attach(model, policy) as kept:
        both = talk(kept, [0, 1])
        events = sorted((e.sequence, e.logical_length) for e in kept.events)
    assert len(both[0][0]) <= 3 < len(both[1][0]), "one ends before the other"
    for r in range(2):
        with hf.attach(model, policy) as kept:
            assert talk(kept, [r]) == [both[r]]
        assert [(r, e.logical_length) for e in kept.events] == [e for e in events if e[0] == r]


def test_a_mask_of_the_programs_own_is_used():
    """A block of the prompt sees both ways, as images do."""
    model, ids = model_of(), tokens_of(30)
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    mask[..., 5:15, 5:15] = True
    next_mask = torch.ones(1, 1, 1, 31, dtype=torch.bool)
    next_mask[..., 20] = False

    def run(cache):
        first = model(ids, attention_mask=mask, **with_cache(model, cache)).logits
        return torch.cat(
            [
                first,
                model(
                    tokens_of(1),
                    attention_mask=next_mask,
                    position_ids=torch.tensor([[30]]),
                    **with_cache(model, cache),
                ).logits,
            ],
            1,
        )

    with torch.no_grad():
        plain = run(transformers.DynamicCache(config=model.config))
        with hf.attach(model, "full") as kept:
            assert torch.allclose(run(kept.cache()), plain, atol=1e-4)
        with hf.attach(model, "streaming,budget=24,interval=1000,prefill=cut") as kept:
            cut = run(kept.cache())[:, -1]
    seen = torch.ones(31, 31, dtype=torch.bool).tril()
    seen[:30, :30] = mask
    seen[30] = False
    seen[30, [*range(4), *range(10, 31)]] = True
    seen[30, 20] = False
    whole = model(torch.cat([ids, tokens_of(1)], 1), attention_mask=seen[None, None], use_cache=False).logits[:, -1]
    assert torch.allclose(cut, whole, atol=2e-3)


def test_masks_that_do_more_than_hide_are_refused():
    model, ids = model_of(), tokens_of(8)
    bias = torch.zeros(1, 1, 8, 8).masked_fill(
        ~torch.ones(8, 8, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
    )
    with hf.attach(model, "full") as kept, torch.no_grad():
        plain = model(ids, use_cache=False).logits
        assert torch.allclose(
            model(ids, attention_mask=bias, **with_cache(model, kept.cache())).logits, plain, atol=1e-5
        )
        with pytest.raises(kvkeep.Unsupported, match="other numbers than 0 and the least"):
            model(ids, attention_mask=bias - 0.5 * torch.ones(8, 8).tril(-3), **with_cache(model, kept.cache()))


def test_positions_that_are_not_those_of_the_text_are_refused_where_they_are_read():
    """an image takes other positions than its tokens."""
    model, ids = model_of(), tokens_of(20)
    jump = torch.cat([torch.arange(10), torch.arange(5, 15)])[None]
    with hf.attach(model, EXPECTED) as kept, torch.no_grad():
        with pytest.raises(kvkeep.Unsupported, match="token 10 of sequence 0 is at position 5"):
            model(ids, position_ids=jump, **with_cache(model, kept.cache()))
        model(ids, **with_cache(model, kept.cache()))
    with hf.attach(model, CUT) as kept, torch.no_grad():
        model(ids, position_ids=jump, **with_cache(model, kept.cache()))


# ---- Steps that are more than a token


@pytest.mark.parametrize("chunk", [7, 48, 60, 119])
def test_a_prompt_in_pieces_is_one_prompt(monkeypatch, chunk):
    model, ids = model_of(), tokens_of(120)
    logits = lambda **more: torch.stack(
        generate(model, return_dict_in_generate=True, output_logits=True, **more).logits
    )
    alike = lambda **more: torch.allclose(logits(**more), logits(**more, prefill_chunk_size=chunk), atol=1e-3)
    if not alike(ids=ids):
        pytest.skip("this release of transformers itself writes another text in pieces")
    whole = kept_under(monkeypatch, model, CUT, ids)
    assert [e.logical_length for e in whole[1]][0] == 120
    assert kept_under(monkeypatch, model, CUT, ids, prefill_chunk_size=chunk) == whole
    padded = torch.cat([torch.zeros(1, 100, dtype=torch.long), tokens_of(20)], 1)
    mask = (padded > 0).long()
    both, masks = torch.cat([ids, padded]), torch.cat([torch.ones_like(ids), mask])
    if not alike(ids=both, attention_mask=masks):
        return  # as above
    with hf.attach(model, CUT) as kept:
        at_once = generate(model, both, attention_mask=masks)
    events = [(e.sequence % 2, e.logical_length) for e in kept.events]
    with hf.attach(model, CUT) as kept:
        assert torch.equal(generate(model, both, attention_mask=masks, prefill_chunk_size=chunk), at_once)
    assert [(e.sequence % 2, e.logical_length) for e in kept.events] == events


def without_drafts(monkeypatch, model, policy, ids, points, **more):
    """generate() with events at these lengths alone."""
    from kvkeep import _rows

    cut = _rows.Rows.cut
    monkeypatch.setattr(
        _rows.Rows, "cut", lambda rows: cut(rows) if rows.keeper.logical_length(rows.ids[0]) in points else None
    )
    with hf.attach(model, policy, check=False) as kept:
        out = generate(model, ids, **more)
    monkeypatch.undo()
    return out, [e.logical_length for e in kept.events]


def predicts_further(monkeypatch):
    """A model whose last layers draft the next two tokens (MTP), random as its own are; transformers reads a file."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this release of transformers has no MTP")
    config = transformers.Glm4MoeConfig(
        **SHAPE,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        num_mtp_layers=2,
    )

    def drafter(main, **_):
        made = layers.MtpModel(main, 2).eval()
        randomised(made.layers)
        return made

    monkeypatch.setattr(layers.MtpModel, "from_pretrained", drafter)
    return randomised(transformers.AutoModelForCausalLM.from_config(config))


DRAFTED = [
    "full",
    CUT,
    "ams-tova,budget=40,interval=8,prefill=cut,min_segment=8,recent=4",
    "snapkv,budget=40,interval=8,window=8,prefill=cut",
    "expected,budget=40,interval=8,prefill=cut,recent=4,sink=2",
    "adakv-snapkv,budget=40,interval=8,window=8,prefill=cut",
    "h2o,budget=40,interval=8,prefill=cut,recent=4",
    "streaming,budget=40,interval=1,prefill=cut",
]


@pytest.mark.parametrize("policy", DRAFTED)
@pytest.mark.parametrize("how", ["prompt lookup", "40 drafts", "assistant", "MTP"])
def test_drafts_that_are_taken_back_change_nothing(monkeypatch, policy, how):
    """the text is that without drafts at the same event points."""
    model, ids = predicts_further(monkeypatch) if how == "MTP" else model_of(), tokens_of(30).repeat(1, 4)
    more = {
        "prompt lookup": dict(prompt_lookup_num_tokens=5),
        "40 drafts": dict(prompt_lookup_num_tokens=40),
        "assistant": dict(assistant_model=model_of("small")),
        "MTP": dict(use_mtp=True),
    }[how]
    with hf.attach(model, policy) as kept:
        drafted = generate(model, ids, new=60, **more)
    points = [e.logical_length for e in kept.events]
    plain, same = without_drafts(monkeypatch, model, policy, ids, points, new=60)
    assert same == points[: len(same)] and len(points) - len(same) <= 1 and (policy == "full" or len(points) >= 2)
    assert torch.equal(drafted[:, : plain.shape[1]], plain), "releases before 5.20 write one token more with drafts"


def test_rollback_before_an_event_is_exact_and_behind_it_an_error():
    model, ids = model_of(), tokens_of(40)
    with hf.attach(model, "tova,budget=32,interval=16,prefill=cut") as kept, torch.no_grad():
        cache = kept.cache()
        model(ids, **with_cache(model, cache))
        rows = hf._rows_of(cache)
        assert kept.keeper.logical_length(rows.ids[0]) == 40 and kept.events == [], (
            "an event waits for the next forward"
        )
        cache.crop(-2)
        assert kept.keeper.logical_length(rows.ids[0]) == cache.get_seq_length() == 38
        model(tokens_of(4, 8), **with_cache(model, cache), position_ids=torch.arange(38, 42)[None])
        assert [e.logical_length for e in kept.events] == [38]
        lengths = rows.lengths.copy()
        cache.crop(38)
        assert (
            kept.keeper.logical_length(rows.ids[0]) == cache.get_seq_length() == 38
            and (rows.lengths == lengths - 4).all()
        )
        with pytest.raises(kvkeep.StateError, match="was cut at length 38"):
            cache.crop(-1)
        assert cache.get_seq_length() == 38 and (rows.lengths == lengths - 4).all(), "nothing has changed"
        cache.crop(0)
        again = model(tokens_of(4, 8), **with_cache(model, cache), position_ids=torch.arange(38, 42)[None]).logits
        assert again.shape[1] == 4


# ---- Programs


def test_stop_strings_and_their_tokenizer(tmp_path):
    import tiny_model

    tiny_model.make(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokenizer("The lamp burned all night, and the ships went by.", return_tensors="pt").input_ids
    policy = "tova,budget=24,interval=8,prefill=cut"
    with hf.attach(model, policy):
        out = generate(model, ids, new=40)
    wrote = tokenizer.convert_ids_to_tokens(out[0, ids.shape[1] :])
    stop = next(t for n, t in enumerate(wrote) if n >= 4 and t not in wrote[:n] and t.isascii())
    with hf.attach(model, policy) as kept:
        stopped = generate(model, ids, new=40, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(stopped, out[:, : ids.shape[1] + wrote.index(stop) + 1]) and kept.events


def test_two_models_in_two_threads():
    models, ids = [model_of(), model_of()], tokens_of(80)
    alone, got, errors = [], {}, []
    for model in models:
        with hf.attach(model, CUT):
            alone.append(generate(model, ids))

    def work(i):
        try:
            with hf.attach(models[i], CUT):
                got[i] = [generate(models[i], ids) for _ in range(6)]
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert errors == [] and all(torch.equal(text, alone[i]) for i in range(2) for text in got[i])


def test_two_threads_under_one_attach():
    model, texts, got = model_of(), [tokens_of(80, 2), tokens_of(64, 3)], {}
    alone = []
    chunks = [None, 20]
    for ids, chunk in zip(texts, chunks):
        with hf.attach(model, CUT):
            alone.append(generate(model, ids, prefill_chunk_size=chunk))
    with hf.attach(model, CUT) as kept:
        work = lambda i: got.update({i: [generate(model, texts[i], prefill_chunk_size=chunks[i]) for _ in range(6)]})
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        [t.start() for t in threads], [t.join() for t in threads]
    assert all(torch.equal(text, alone[i]) for i in range(2) for text in got[i]) and len(kept.events) == 36


def test_a_forward_that_dies_leaves_no_trace():
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, CUT) as kept, torch.no_grad():
        want = model(tokens_of(1), **with_cache(model, prompted(model, kept, ids))).logits
        cache = prompted(model, kept, ids)
        layer = model.get_decoder().layers[2]
        hook = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(tokens_of(1), **with_cache(model, cache))
        hook.remove()
        assert torch.equal(model(tokens_of(1), **with_cache(model, cache)).logits, want)
        cache = kept.cache()
        hook = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prompted_into(model, cache, tokens_of(90))
        hook.remove()
        assert torch.equal(model(tokens_of(1), **with_cache(model, prompted_into(model, cache, ids))).logits, want), (
            "its first step is another prompt"
        )
    model = model_of("gemma3")
    with hf.attach(model, CUT) as kept, torch.no_grad():
        cache = prompted(model, kept, ids)
        hook = (
            model.get_decoder().layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        )
        with pytest.raises(KeyboardInterrupt):
            model(tokens_of(1), **with_cache(model, cache))
        hook.remove()
        with pytest.raises(kvkeep.StateError, match="a forward over this cache was interrupted"):
            model(tokens_of(1), **with_cache(model, cache))


def prompted_into(model, cache, ids):
    model(ids, **with_cache(model, cache))
    return cache


def prompted(model, kept, ids):
    return prompted_into(model, kept.cache(), ids)


def test_a_cache_that_is_reset_begins_another_prompt():
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, CUT) as kept:
        cache = kept.cache()
        first = generate(model, ids, **with_cache(model, cache), prefill_chunk_size=25)
        cache.reset()
        assert torch.equal(generate(model, ids[:, :44], **with_cache(model, cache)), generate(model, ids[:, :44]))
        cache.reset()
        assert torch.equal(generate(model, ids, **with_cache(model, cache), prefill_chunk_size=25), first)


def test_gradients_are_refused():
    model, ids = model_of(), tokens_of(20)
    with hf.attach(model, "full") as kept:
        assert not model(ids, **with_cache(model, kept.cache())).logits.isnan().any()
        model.train()
        with pytest.raises(kvkeep.Unsupported, match="no gradient goes through"):
            model(ids, **with_cache(model, kept.cache()))


def test_a_copy_of_the_model_runs_alone():
    model, ids = model_of(), tokens_of(50)
    plain = generate(model, ids)
    with hf.attach(model, CUT) as kept:
        copied = copy.deepcopy(model)
        assert torch.equal(generate(copied, ids), plain) and kept.events == []
        generate(model, ids)
        assert kept.events
        with pytest.raises(kvkeep.Unsupported, match="was to be copied"):
            copy.deepcopy(kept.cache())
    assert torch.equal(generate(copied, ids), plain) and "generate" not in vars(model)
    assert repr(kept).startswith("<kvkeep.hf.attach 'tova,")


def test_queries_are_recorded_only_where_an_event_reads_them():
    model, ids = model_of(), tokens_of(50)
    with hf.attach(model, "tova,budget=32,interval=16,prefill=cut") as kept, torch.no_grad():
        rows, asked = hf._rows_of(prompted(model, kept, ids)), []
        plan = type(rows).plan_queries
        try:
            type(rows).plan_queries = lambda self, columns: (plan(self, columns), asked.append(self.keep))
            generate(model, ids, new=40)
        finally:
            type(rows).plan_queries = plan
    assert asked[0] > 0 and sum(keep > 0 for keep in asked[1:]) == 2, asked
