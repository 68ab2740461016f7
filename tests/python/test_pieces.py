# SPDX-License-Identifier: Apache-2.0
"""Prompts that are longer than the cache, in generate() and in loops of one's own; events that the program names."""

import kvkeep
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="4.57")
hf = pytest.importorskip("kvkeep.hf")
from test_hf import generate, model_of, tokens_of, with_cache  # noqa: E402

PIECES = "budget=40,interval=8,recent=4,prefill=pieces"
POLICIES = ["tova", "snapkv,window=8", "ams-tova,window=8", "keydiff", "h2o", "expected", "adakv-snapkv,window=8"]


def in_pieces(model, cache, ids, piece):
    """A prompt in a loop of one's own."""
    with torch.no_grad():
        for first in range(0, ids.shape[1], piece):
            part = ids[:, first : first + piece]
            at = torch.arange(first, first + part.shape[1])[None]
            model(part, position_ids=at, **with_cache(model, cache))


def kept_by(kept, cache):
    rows = hf._rows_of(cache)
    return [kept.keeper.positions(rows.ids[0], l, h).tolist() for l in range(3) for h in range(2)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("piece", [7, 50])
def test_a_prompt_that_is_longer_than_the_cache_runs_in_pieces(policy, piece):
    model, ids = model_of(), tokens_of(400)
    with hf.attach(model, f"{policy},{PIECES}") as kept:
        cache = kept.cache()
        generate(model, ids, new=20, prefill_chunk_size=piece, **with_cache(model, cache))
        own = kept.cache(prompt=400)
        in_pieces(model, own, ids, piece)
        ragged = "adakv" in policy
        most = 40 + piece if not ragged else 400
        assert all(b[0].shape[2] <= 2 * most + 256 for b in hf._rows_of(own).buffers), "room for the budget and a piece"
        with torch.no_grad():  # the event at the end of the prompt, and the first token
            model(ids[:, :1], position_ids=torch.tensor([[400]]), **with_cache(model, own))
        first, second = ([e for e in kept.events if e.sequence == s and e.logical_length <= 400] for s in (0, 1))
    assert [(e.logical_length, e.slots_before, e.slots_after) for e in first] == [
        (e.logical_length, e.slots_before, e.slots_after) for e in second
    ]
    assert first[-1].logical_length == 400 and len(first) >= 6
    if not ragged:
        assert all(e.slots_before <= 40 + piece and e.slots_after == 40 for e in first)


@pytest.mark.parametrize("policy", ["tova", "snapkv,window=8", "keydiff", "h2o,window=64"])
def test_pieces_keep_what_a_keeper_by_hand_keeps(monkeypatch, policy):
    """Another Keeper, over arrays of the test, gets the keys, values and queries that the layers had."""
    from kvkeep import _rows

    model, ids, policy = model_of(), tokens_of(230), f"{policy},{PIECES}"
    brought, asked = {}, {}
    append, remember = _rows.Rows.append, _rows.Rows.remember

    def appended(rows, layer):
        brought.setdefault(layer.index, []).append([t.detach().clone() for t in layer.new])
        append(rows, layer)

    def remembered(rows, layer, module, query):
        asked.setdefault(layer.index, []).append(query.detach().clone())
        remember(rows, layer, module, query)

    with hf.attach(model, policy) as kept:
        monkeypatch.setattr(_rows.Rows, "append", appended)
        monkeypatch.setattr(_rows.Rows, "remember", remembered)
        cache = kept.cache(prompt=230)
        in_pieces(model, cache, ids, 45)
        monkeypatch.undo()
        hf._rows_of(cache).confirm()
        kept_rows, spec = kept_by(kept, cache), kept.keeper.spec
    by_hand = kvkeep.Keeper(spec, policy)
    by_hand.join(7, 0, 230)
    rows = [[np.zeros((1, 2, 240, brought[0][0][0].shape[3]), np.float32) for _ in range(2)] for _ in range(3)]
    length = np.zeros(1, np.int32)
    for step in range(len(brought[0])):
        tokens = brought[0][step][0].shape[2]
        for layer in range(3):
            for side, new in zip(rows[layer], brought[layer][step]):
                side[:, :, length[0] : length[0] + tokens] = new.numpy()
            query = np.ascontiguousarray(asked[layer][step][0].transpose(0, 1).numpy())
            by_hand.observe(layer, [7], [0, tokens], query, basis="post_rope")
        length += tokens
        by_hand.step([tuple(r) for r in rows], [7], length)
        assert length[0] <= 40
    assert [by_hand.positions(7, l, h).tolist() for l in range(3) for h in range(2)] == kept_rows


@pytest.mark.filterwarnings("ignore:kvkeep.hf. no event")
def test_pieces_of_a_prompt_that_the_budget_holds_change_nothing():
    model, ids = model_of(), tokens_of(120)
    plain = generate(model, ids, prefill_chunk_size=30)
    with hf.attach(model, "tova,budget=200,interval=32,prefill=pieces") as kept:
        assert torch.equal(generate(model, ids, prefill_chunk_size=30), plain)
    assert kept.events == []


def test_each_sequence_of_a_padded_batch_is_cut_in_its_own_pieces():
    model, long, short = model_of(), tokens_of(200), tokens_of(90, seed=2)
    padded = torch.cat([torch.zeros(1, 110, dtype=torch.long), short], 1)
    both = torch.cat([long, padded])
    with hf.attach(model, f"tova,{PIECES}") as kept:
        generate(model, both, attention_mask=(both > 0).long(), prefill_chunk_size=50)
    events = [(e.sequence, e.logical_length, e.slots_after) for e in kept.events if e.logical_length <= 200]
    assert [e for e in events if e[0] == 0] == [(0, seen, 40) for seen in (50, 100, 150, 200)]
    assert [e for e in events if e[0] == 1][0] == (1, 90, 40), "40 of its tokens are in the third piece"


def test_an_event_comes_when_the_program_names_it():
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, "snapkv,budget=40,window=8,prefill=cut,trigger=named") as kept:
        cache = kept.cache()
        with pytest.raises(kvkeep.StateError, match="no tokens"):
            kept.cut(cache)
        out = generate(model, ids, new=80, **with_cache(model, cache))
        assert [e.logical_length for e in kept.events] == [60], "the end of the prompt alone"
        kept.cut(cache)
        assert (kept.events[-1].logical_length, kept.events[-1].slots_after) == (139, 40)
        kept.cut(cache)
        assert len(kept.events) == 2, "nothing is over the budget"
        generate(model, torch.cat([out, ids], 1), new=10, **with_cache(model, cache))
        assert len(kept.events) == 2
        with pytest.raises(kvkeep.InvalidArgument, match="not under this attach"):
            kept.cut(None)
    with pytest.raises(kvkeep.StateError, match="has ended"):
        kept.cut(cache)


def test_a_named_event_whose_queries_were_not_kept_is_refused_and_the_text_goes_on():
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, "tova,budget=40,interval=500,prefill=cut") as kept:
        cache = kept.cache()
        out = generate(model, ids, new=30, **with_cache(model, cache))
        with pytest.raises(kvkeep.StateError, match="unread"):
            kept.cut(cache)
        generate(model, out, new=5, **with_cache(model, cache))
    assert len(kept.events) == 1
