# SPDX-License-Identifier: Apache-2.0
"""The Keeper from Python: arrays of NumPy and PyTorch without copies, errors by their kinds, pages of Python's own."""

import json

import kvkeep
import numpy as np
import pytest

torch = pytest.importorskip("torch")

LAYERS, QUERY_HEADS, HEADS, DIM, CAPACITY = 2, 4, 2, 8, 96


def spec(**more):
    return kvkeep.ModelSpec(QUERY_HEADS, HEADS, DIM, LAYERS, inv_freq=[1.0, 0.1, 0.01, 0.001], **more)


def test_models_with_learned_sinks_and_capped_logits():
    sinks = [0.5, float("-inf"), 1.0, 9.0]
    model = spec(layer_sinks={1: sinks}, logit_cap=30.0)
    assert (model.sinks(0), model.sinks(1), model.logit_cap) == ([], sinks, 30.0)
    for wrong, said in [
        (dict(layer_sinks={1: [1.0]}), "layer 1 has 1 sink logits; allowed none, or one for each of the 4 query heads"),
        (dict(layer_sinks={2: sinks}), "layer_sinks: layer 2; allowed 0 to 1"),
        (dict(layer_sinks={0: [0.0, 0.0, float("nan"), 0.0]}), "sink logit of query head 2 of layer 0 is nan"),
        (dict(logit_cap=-1.0), "logit_cap must be finite and not negative"),
    ]:
        with pytest.raises(kvkeep.InvalidArgument, match=said):
            spec(**wrong)
    with pytest.raises(kvkeep.InvalidArgument, match="logits that are not capped"):
        kvkeep.Keeper(model, "expected,budget=24")


@pytest.mark.parametrize("scales", [(), (None, None)])
def test_what_else_a_slot_has_moves_with_it(scales):
    keeper = kvkeep.Keeper(spec(), "streaming,budget=12,sink=2,interval=4,prefill=cut")
    shape = (1, HEADS, CAPACITY, DIM)
    extra = np.arange(HEADS * CAPACITY, dtype="i4").reshape(1, HEADS, CAPACITY, 1).copy()
    before = extra.copy()
    layers = [(np.zeros(shape, "f4"), np.zeros(shape, "f4"), None, None, extra)]
    layers += [(np.zeros(shape, "f4"), np.zeros(shape, "f4"), *scales)]
    keeper.join(7)
    for layer in range(LAYERS):
        keeper.observe(layer, [7], [0, 16])
    lengths = np.array([16], "i4")
    keeper.step(layers, [7], lengths)
    assert lengths[0] == 12
    assert (extra[0, :, :12] == before[0, :, [0, 1, *range(6, 16)]].swapaxes(0, 1)).all()
    with pytest.raises(kvkeep.InvalidArgument, match="a layer has 3 arrays"):
        keeper.step([layer[:3] for layer in layers], [7], lengths)


class Engine:
    """One sequence; the first number of each key and value is its token."""

    def __init__(self, policy, array, page_size=0, table="i4", **provided):
        self.keeper = kvkeep.Keeper(spec(), policy, **provided)
        self.array, self.page_size, self.table = array, page_size, table
        shape = (CAPACITY // page_size, page_size, HEADS, DIM) if page_size else (1, HEADS, CAPACITY, DIM)
        self.kv = [(np.zeros(shape, "f4"), np.zeros(shape, "f4")) for _ in range(LAYERS)]
        self.dice = np.random.default_rng(3)
        self.length, self.token, self.pool = 0, 0, None
        self.pages = list(range(CAPACITY // page_size)) if page_size else []
        self.keeper.join(7)

    def slot(self, layer, side, head, slot):
        if self.page_size:
            return self.kv[layer][side][self.pages[slot // self.page_size], slot % self.page_size, head]
        return self.kv[layer][side][0, head, slot]

    def step(self, tokens, **view):
        for layer in range(LAYERS):
            for t in range(tokens):
                for side in (0, 1):
                    for head in range(HEADS):
                        row = self.slot(layer, side, head, self.length + t)
                        row[:] = self.dice.standard_normal(DIM)
                        row[0] = (self.token + t) / 64
            queries = self.dice.standard_normal((tokens, QUERY_HEADS, DIM)).astype("f4")
            self.keeper.observe(layer, [7], [0, tokens], self.array(queries))
        self.token += tokens
        lengths = np.array([self.length + tokens], "i4")
        if self.page_size:
            table = np.array([self.pages], self.table)
            view["block_table"] = self.array(table)
        report = self.keeper.step([(self.array(k), self.array(v)) for k, v in self.kv], [7], lengths, **view)
        self.length = int(lengths[0])
        for move in report.pages:
            left = [-1] * len(move.freed)
            assert table[0, : len(move.held) + len(left)].tolist() == [*move.held, *left]
        for move in report.pages:
            self.pages = (
                list(move.held)
                + list(move.freed)
                + [p for p in self.pages if p not in move.held and p not in move.freed]
            )
        for layer in range(LAYERS):
            for head in range(HEADS):
                positions = self.keeper.positions(7, layer, head)
                assert positions.dtype == np.int32 and len(positions) == self.length
                for side in (0, 1):
                    held = [self.slot(layer, side, head, i)[0] for i in range(self.length)]
                    assert np.array_equal(held, positions.astype("f4") / 64)
        return report


def test_a_prompt_is_cut_in_pieces_and_an_event_comes_when_it_is_named():
    engine = Engine("tova,budget=16,interval=4,recent=4,prefill=pieces,trigger=named", np.asarray, page_size=16)
    engine.keeper.leave(7)
    engine.keeper.join(7, 0, 200)
    for step in range(10):
        assert len(engine.step(20).cuts) == 1 and engine.length == 16, step
    assert not engine.step(30).cuts and engine.length == 46
    for named, said in (([8], "sequence 8 is named for an event and is not in the view"), ("8", "named: str; allowed")):
        with pytest.raises(kvkeep.InvalidArgument, match=said):
            table = np.array([engine.pages], "i4")
            engine.keeper.step(engine.kv, [7], np.array([46], "i4"), block_table=table, named=named)
    assert len(engine.step(1, named=[7]).cuts) == 1 and engine.length == 16


@pytest.mark.parametrize("array", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("page_size, table", [(0, None), (16, "i4"), (16, "i8"), (20, "i8")])
def test_rows_hold_what_the_keeper_says(array, page_size, table):
    engine = Engine("ams-tova,budget=40,interval=16", array, page_size, table)
    engine.step(60)
    cuts = 0
    for _ in range(100):
        report = engine.step(1)
        cuts += len(report.cuts)
        assert engine.length <= 56
    assert cuts >= 5 and engine.keeper.totals.events == cuts
    assert report.slots_dropped == sum(c.slots_before - c.slots_after for c in report.cuts)
    totals = engine.keeper.totals  # of 40 slots, 4 are sinks and 10 recents
    assert totals.slots_kept * 26 == totals.slots_chosen * 40 > 0
    assert engine.keeper.logical_length(7) == 160


def test_all_arrays_give_the_same():
    kept = []
    for array in (np.asarray, torch.from_numpy):
        engine = Engine('{"policy": "keydiff", "budget": 24, "interval": 8}', array)
        engine.step(50)
        for _ in range(20):
            engine.step(2)
        kept.append([engine.keeper.positions(7, l, h).tolist() for l in range(LAYERS) for h in range(HEADS)])
    assert kept[0] == kept[1]
    assert json.loads(engine.keeper.policy_json)["policy"] == "keydiff"


def test_bfloat16_is_read_as_it_is():
    keeper = kvkeep.Keeper(spec(), "tova,budget=16,interval=4,prefill=cut")
    keeper.join(1)
    layers = [
        (torch.randn(1, HEADS, 40, DIM).bfloat16(), torch.randn(1, HEADS, 40, DIM).bfloat16()) for _ in range(LAYERS)
    ]
    for layer in range(LAYERS):
        keeper.observe(layer, [1], [0, 30], torch.randn(30, QUERY_HEADS, DIM).bfloat16(), basis="post_rope")
    before = [k.clone() for k, _ in layers]
    lengths = np.array([30], "i4")
    keeper.step(layers, [1], lengths)
    assert lengths[0] == 16
    for layer in range(LAYERS):
        for head in range(HEADS):
            kept = torch.from_numpy(keeper.positions(1, layer, head)).long()
            assert torch.equal(layers[layer][0][0, head, :16], before[layer][0, head, kept])


def test_errors_have_their_kinds_and_say_what_is_allowed(tmp_path):
    with pytest.raises(kvkeep.InvalidArgument, match="allowed exactly one of budget"):
        kvkeep.Keeper(spec(), "tova")
    with pytest.raises(ValueError, match="rope_style"):
        kvkeep.ModelSpec(4, 2, 8, 2, rope_style="round")
    keeper = kvkeep.Keeper(spec(), "tova,budget=16")
    with pytest.raises(kvkeep.StateError, match=r"sequence 5 is not known; allowed after join\(5\)"):
        keeper.leave(5)
    keeper.join(5)
    with pytest.raises(kvkeep.InvalidArgument, match="basis: given 'after'"):
        keeper.observe(0, [5], [0, 1], np.zeros((1, 4, 8), "f4"), basis="after")
    with pytest.raises(kvkeep.InvalidArgument, match="16 bits|DLPack"):
        keeper.observe(0, [5], [0, 1], np.zeros((1, 4, 8), "u2"))
    with pytest.raises(kvkeep.InvalidArgument):
        keeper.observe(0, [5], [0, 1], np.zeros((1, 3, 8), "f4"))
    with pytest.raises(kvkeep.InvalidArgument, match="lengths: 3 numbers"):
        keeper.step([None] * LAYERS, [5], np.zeros(3, "i4"))
    with pytest.raises(kvkeep.InvalidArgument):
        keeper.restore(6, tmp_path / "nothing")
    assert keeper.logical_length(5) == 0


def read_only(array):
    array.setflags(write=False)
    return array


def test_an_argument_of_another_kind_is_named_with_what_is_allowed():
    keeper = kvkeep.Keeper(spec(), "tova,budget=16")
    keeper.join(5)
    layers = [(np.zeros((1, HEADS, 8, DIM), "f4"),) * 2 for _ in range(LAYERS)]

    def refused(what, call, *given, **more):
        with pytest.raises(kvkeep.InvalidArgument) as error:
            call(*given, **more)
        assert str(error.value).startswith(what), error.value

    allowed = "; allowed an array of int32, contiguous, writable, on the CPU"
    for lengths, what in (
        (np.zeros(1, "i8"), "int64 (1,)"),
        (torch.zeros(1).long(), "int64 (1,)"),
        ([0], "list"),
        (np.zeros((1, 2 * LAYERS * HEADS), "i4")[:, ::2], "int32 (1, 4)"),
        (read_only(np.zeros(1, "i4")), "int32 (1,), read-only"),
    ):
        refused(f"lengths: {what}{allowed}", keeper.step, layers, [5], lengths)
    keys = read_only(np.zeros((1, HEADS, 8, DIM), "f4"))
    refused("layers: float32 (1, 2, 8, 8), read-only", keeper.step, [(keys, keys)] * LAYERS, [5], np.zeros(1, "i4"))
    refused("layers: list", keeper.step, [([0.0], [0.0])] * LAYERS, [5], np.zeros(1, "i4"))
    refused("queries: list; allowed arrays that speak DLPack", keeper.observe, 0, [5], [0, 1], [[0.0] * DIM])
    refused("queries: float32 (1, 4, 8) (", keeper.observe, 0, [5], [0, 1], torch.zeros(1, 4, 8, device="meta"))
    refused("sequences: int; allowed integers, in a list or a flat array", keeper.observe, 0, 5, [0, 1])
    refused("indptr: float64 (2,)", keeper.observe, 0, [5], np.array([0, 1.5]))
    refused("inv_freq: str; allowed numbers", kvkeep.ModelSpec, 4, 2, 8, 2, inv_freq="half")
    refused("policy: NoneType; allowed 'name,key=value,...', or a JSON object", kvkeep.Keeper, spec(), None)


def test_numbers_may_be_arrays_policies_dicts_and_queries_read_only():
    by_text = spec()
    by_array = kvkeep.ModelSpec(QUERY_HEADS, HEADS, DIM, LAYERS, inv_freq=torch.tensor(by_text.rope(0).inv_freq))
    assert by_array.rope(0).inv_freq == pytest.approx(by_text.rope(0).inv_freq)
    keeper = kvkeep.Keeper(by_array, {"policy": "tova", "budget": 24, "interval": 8})
    assert json.loads(keeper.policy_json)["budget"] == 24
    queries = read_only(np.ones((3, QUERY_HEADS, DIM), "f4"))
    for id, array in ((1, np.array), (2, torch.tensor)):
        keeper.join(id)
        keeper.observe(0, array([id]), array([0, 3]), queries)
        assert keeper.logical_length(id) == 3


def test_results_show_their_members():
    engine = Engine("tova,budget=24,interval=8,prefill=cut", np.asarray)
    report = engine.step(40)
    cut = (
        "Cut(sequence=7, logical_length=40, length_before=40, length_after=24, slots_before=160, slots_after=96, "
        "slots_chosen="
    )
    assert repr(report).startswith(f"Report(cuts=[{cut}") and "slots_dropped=64" in repr(report)
    assert repr(engine.keeper.totals).startswith("Totals(steps=1, events=1, sequences_cut=1, slots_kept=96")


def test_a_sequence_is_saved_and_restored(tmp_path):
    engine = Engine("tova,budget=24,interval=8", np.asarray)
    engine.step(50)
    engine.step(5)
    engine.keeper.save(7, tmp_path / "state")
    other = kvkeep.Keeper(spec(), "tova,budget=24,interval=8")
    other.restore(3, tmp_path / "state")
    assert np.array_equal(other.positions(3, 1, 1), engine.keeper.positions(7, 1, 1))
    assert other.tokens_to_event(3) == engine.keeper.tokens_to_event(7)


def test_state_in_memory_and_forks_go_on_as_their_parent():
    engine = Engine("ams-tova,budget=24,interval=8,window=4,recent=4", np.asarray)
    engine.step(50)
    engine.step(5)
    state = engine.keeper.save(7)
    assert isinstance(state, bytes)
    other = kvkeep.Keeper(spec(), "ams-tova,budget=24,interval=8,window=4,recent=4")
    other.restore(3, state)
    engine.keeper.fork(8, 7)
    for keeper, sequence in ((other, 3), (engine.keeper, 8)):
        assert np.array_equal(keeper.positions(sequence, 1, 1), engine.keeper.positions(7, 1, 1))
    with pytest.raises(kvkeep.StateError, match="was cut at length"):
        other.restore(4, state, prompt=90)
    with pytest.raises(kvkeep.InvalidArgument, match="the saved state"):
        other.restore(4, state[:-1])
    assert not other.knows(4)

    prefix = kvkeep.Keeper(spec(), "ams-tova,budget=24,interval=8,window=4,recent=4")
    prefix.join(1, 0, kvkeep.OPEN_PROMPT)
    queries = np.zeros((16, QUERY_HEADS, DIM), "f4")
    for layer in range(LAYERS):
        prefix.observe(layer, [1], [0, 16], queries)
    window = prefix.save(1)
    prefix.fork(2, 1, 12, 40)
    prefix.restore(3, window, 60)
    prefix.restore(4, window, 60, tokens=9)
    assert [prefix.logical_length(s) for s in (1, 2, 3, 4)] == [16, 12, 16, 9]
    with pytest.raises(kvkeep.InvalidArgument, match="restore: sequence 5 is 16 tokens long; given 17"):
        prefix.restore(5, window, tokens=17)


def test_one_integer_says_what_an_engine_needs():
    engine = Engine("streaming,budget=16,interval=8,sink=5,recent=2", np.asarray)
    ask = engine.keeper.rollback_limit, engine.keeper.whole_prefix, engine.keeper.evicted
    engine.step(12)
    assert [one(7) for one in ask] == [12, 12, 0]
    engine.step(12)
    assert [one(7) for one in ask] == [0, 5, 8]
    engine.step(3)
    assert [one(7) for one in ask] == [3, 5, 8]
    for one in ask:
        with pytest.raises(kvkeep.StateError, match="sequence 8 is not known"):
            one(8)
    engine.keeper.truncate(7, 24)
    with pytest.raises(kvkeep.StateError, match="was cut at length 24"):
        engine.keeper.truncate(7, 23)


def test_lengths_are_known_ahead():
    engine = Engine("tova,budget=24,interval=8", np.asarray)
    assert engine.keeper.length_after(7, 20) == (20, False, True)
    assert engine.keeper.length_after(7, []) == (0, False, True)
    with pytest.raises(kvkeep.InvalidArgument, match="forecast: a step of -1 tokens"):
        engine.keeper.length_after(7, [1, -1])
    steps = [50, 1, 3, 4, 2, 1, 1]
    assert engine.keeper.pages_needed(7, 20, 8, 0) == (3, 0)
    assert engine.keeper.pages_needed(7, [20, 2], 8, 3) == (1, 0)
    assert engine.keeper.pages_needed(7, [20, 2], 8, 3, last_shared=False) == (0, 0)
    with pytest.raises(kvkeep.InvalidArgument, match="pages_needed: no step; allowed 1 or more"):
        engine.keeper.pages_needed(7, [], 8, 0)
    ahead = [engine.keeper.length_after(7, steps[: n + 1]) for n in range(len(steps))]
    for tokens, of_this in zip(steps, ahead):
        length, event, exact = engine.keeper.length_after(7, tokens)
        cuts = engine.keeper.totals.events
        engine.step(tokens)
        assert (length, event, exact) == of_this == (engine.length, engine.keeper.totals.events > cuts, True)
    assert engine.keeper.totals.events >= 1


def test_what_no_policy_reads_is_refused():
    keeper = Engine("tova,budget=24,interval=8", np.asarray).keeper
    with pytest.raises(kvkeep.Unsupported, match="tova"):
        keeper.give(0, [7], [0, 1], np.zeros((1, HEADS), "f4"))
    with pytest.raises(kvkeep.Unsupported, match="tova"):
        keeper.surprise(7, [0.5])


def test_folded_spans_are_read_as_they_were_prefetched():
    engine = Engine("tova,budget=24,interval=8,rest=fold,memory.mass=0", np.asarray, reads_folded=True)
    keeper, ids, indptr = engine.keeper, [7], [0, 1]
    engine.step(60)
    assert engine.step(1).slots_folded > 0
    queries = np.ones((1, QUERY_HEADS, DIM), "f4")
    for layer in range(LAYERS):
        keeper.observe(layer, ids, indptr, queries)
        out, log_sum_exp = np.zeros((1, QUERY_HEADS, DIM), "f4"), np.zeros((1, QUERY_HEADS), "f4")
        keeper.prefetch(layer, ids, indptr, queries)
        with pytest.raises(kvkeep.InvalidArgument, match="are not those that were prefetched"):
            keeper.view(layer, ids, indptr, queries.copy(), out, log_sum_exp)
        keeper.view(layer, ids, indptr, queries, out, log_sum_exp)
        assert (out != 0).any() and (log_sum_exp > 0).all()
        with pytest.raises(kvkeep.StateError, match="has read its folded spans for all 62 tokens"):
            keeper.prefetch(layer, ids, indptr, queries)
    Engine("tova,budget=24,interval=8", np.asarray).keeper.prefetch(0, [7], [0, 0], queries[:0])  # nothing folds


def test_threads_are_the_keepers_own_and_totals_are_counted_for_prometheus():
    pool = kvkeep.ThreadPool(2)
    assert pool.count == 2
    one = Engine("tova,budget=24,interval=8", np.asarray, threads=pool)
    del pool  # the keeper keeps it
    other = Engine("tova,budget=24,interval=8", np.asarray)
    for engine in (one, other):
        engine.step(50)
        engine.step(1)
    assert np.array_equal(one.keeper.positions(7, 1, 1), other.keeper.positions(7, 1, 1))
    page = one.keeper.metrics('worker="0"')
    assert '\nkvkeep_events_total{worker="0"} 1\n' in page
    assert 'kvkeep_event_duration_seconds_bucket{worker="0",le="+Inf"} 1\n' in page
    both = kvkeep.prometheus_metrics([(one.keeper.totals, 'worker="0"'), (other.keeper.totals, 'worker="1"')])
    assert set(page.splitlines()) < set(both.splitlines())
    assert both.count("# TYPE kvkeep_events_total counter\n") == 1
    assert '\nkvkeep_events_total{worker="1"} 1\n' in both
    with pytest.raises(kvkeep.InvalidArgument, match="metrics: keepers 0 and 1 have the same labels"):
        kvkeep.prometheus_metrics([(one.keeper.totals, ""), (other.keeper.totals, "")])
    with pytest.raises(kvkeep.InvalidArgument, match="thread pool: 0 threads"):
        kvkeep.ThreadPool(0)


class Pages(kvkeep.PageAllocator):
    def __init__(self):
        super().__init__()
        self.given_back = []

    def references(self, page):
        return 1

    def take(self):
        return -1

    def give_back(self, page):
        self.given_back.append(page)


def test_pages_go_back_to_an_allocator_in_python():
    engine = Engine("tova,budget=24,interval=8,prefill=cut", np.asarray, 8)
    pages = Pages()
    report = engine.step(60, pages=pages)
    assert engine.length == 24
    assert pages.given_back == list(report.pages[0].freed) and len(pages.given_back) == 5
    assert report.pages[0].written and set(report.pages[0].written) <= set(report.pages[0].held)
    assert report.pages_freed == 5


def test_narrowing_says_which_tokens_continue():
    keeper = kvkeep.Keeper(spec(), "fastkv,layer=0,budget=24,window=8", layer_by_layer=True)
    keeper.join(1)
    rows = np.random.default_rng(3).standard_normal((LAYERS, 2, 1, HEADS, 60, DIM)).astype("f4")
    layers = [tuple(sides) for sides in rows]
    queries = np.random.default_rng(9).standard_normal((60, QUERY_HEADS, DIM)).astype("f4")
    lengths = np.full((1, LAYERS * HEADS), 60, "i4")
    keeper.observe(0, [1], [0, 60], queries)
    report = keeper.narrow(0, [1], [0, 60], queries, layers, lengths)
    tokens = report.prompts[0].tokens
    assert len(tokens) == 24 and tokens == sorted(tokens) and tokens[-8:] == list(range(52, 60))
    assert (lengths[0, HEADS:] == 24).all()


def test_policies_are_listed_with_their_options():
    known = {policy["name"]: policy for policy in kvkeep.policies()}
    assert "ams-tova" in known and known["tova"]["options"]["budget"]["what"]
    assert kvkeep.__version__.count(".") == 2
