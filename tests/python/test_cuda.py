# SPDX-License-Identifier: Apache-2.0
"""Keepers and attach() on a GPU, or over the execution model (KVKEEP_CUDA_MODEL=host), beside the CPU."""

import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import kvkeep
import kvkeep.cuda
import numpy as np
import pytest

torch = pytest.importorskip("torch")
MODELLED = "host" in os.environ.get("KVKEEP_CUDA_MODEL", "")
DEVICE = "cpu" if MODELLED else "cuda:0"
on_a_gpu = pytest.mark.skipif(
    not kvkeep.cuda.has_kernels() or not (MODELLED or torch.cuda.is_available()),
    reason="no GPU here, or a package without kernels",
)
LAYERS, QUERY_HEADS, HEADS, DIM, PROMPT = 2, 4, 2, 16, 96
OPTIONS = ",budget=40,interval=16,prefill=cut"


def keeper_of(policy, accelerator=None, **more):
    spec = kvkeep.ModelSpec(QUERY_HEADS, HEADS, DIM, LAYERS, inv_freq=[10.0**-i for i in range(DIM // 2)])
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(24, QUERY_HEADS * DIM, generator=generator) for _ in range(LAYERS)]
    weights = [w.to(DEVICE if accelerator else "cpu") for w in weights]
    return kvkeep.Keeper(spec, policy, accelerator=accelerator, given_scores=True, output_projections=weights, **more)


class Engine:
    """Two sequences with the same numbers on either machine."""

    def __init__(self, policy, accelerator=None):
        self.keeper = keeper_of(policy, accelerator)
        self.device = DEVICE if accelerator else "cpu"
        self.generator = torch.Generator().manual_seed(5)
        self.layers = [
            tuple(torch.zeros(2, HEADS, 2 * PROMPT, DIM, device=self.device) for _ in range(2)) for _ in range(LAYERS)
        ]
        self.lengths = np.zeros((2, LAYERS * HEADS), "i4")
        self.cuts = 0
        for id in (0, 1):
            self.keeper.join(id)

    def numbers(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def step(self, tokens):
        for layer in range(LAYERS):
            for side in self.layers[layer]:
                for b in (0, 1):
                    for head in range(HEADS):
                        held = int(self.lengths[b, layer * HEADS + head])
                        side[b, head, held : held + tokens] = self.numbers(tokens, DIM)
            ends = [0, tokens, 2 * tokens]
            queries = self.numbers(2 * tokens, QUERY_HEADS, DIM)
            self.keeper.observe(layer, [0, 1], ends, queries, basis="post_rope")
            if "given" in self.keeper.policy_json:
                self.keeper.give(layer, [0, 1], ends, self.numbers(2 * tokens, HEADS))
        self.lengths += tokens
        self.cuts += len(self.keeper.step(self.layers, [0, 1], self.lengths).cuts)

    def rows(self):
        for b in (0, 1):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    held = int(self.lengths[b, layer * HEADS + head])
                    yield self.keeper.positions(b, layer, head), self.layers[layer][0][b, head, :held].cpu()


NAMES = [
    one["name"] for one in kvkeep.policies()
    if not one["narrows"] and "calibration" not in one["needs"] and "surprisal" not in one["needs"]
]  # fmt: skip


# Those without a combination, which a GPU must take.
TAKEN = {"full", "streaming", "tova", "keydiff", "knorm", "rkv", "random", "snapkv", "rpc", "h2o", "expected", "cur",
         "defensive", "vase", "given", "ams-tova", "adakv", "chunkkv", "criticalkv", "pyramidkv"}  # fmt: skip


@on_a_gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_keeps_the_cpus_slots_or_is_refused_by_name(name):
    policy = name if name == "full" else name + (",budget=72,interval=8,prefill=cut" if "pyramid" in name else OPTIONS)
    if name.startswith("threshold"):
        policy += ",threshold=0.01"
    if '"protect_prompt":true' in keeper_of(policy).policy_json:
        policy += ",protect_prompt=false,recent=4"
    here = Engine(policy)
    try:
        there = Engine(policy, kvkeep.cuda.accelerator())
    except (kvkeep.InvalidArgument, kvkeep.Unsupported) as error:
        assert "allowed" in str(error) and name not in TAKEN, error
        return
    for tokens in (PROMPT, *[1] * 40):
        here.step(tokens), there.step(tokens)
    assert here.cuts == there.cuts
    if name != "full":
        assert here.cuts >= 2
    differ = 0
    for (a, keys), (b, others) in zip(here.rows(), there.rows()):
        differ += len(set(a.tolist()) ^ set(b.tolist()))
        if a.tolist() == b.tolist():
            torch.testing.assert_close(keys, others, rtol=0, atol=0)
    assert differ <= (0 if MODELLED else 4), "but for near ties"


@on_a_gpu
def test_memory_and_streams_of_the_program_are_asked_for_and_given_back():
    held, asked = {}, []

    def allocate(bytes, stream):
        tensor = torch.empty(bytes + 256, dtype=torch.uint8, device=DEVICE)
        address = (tensor.data_ptr() + 255) // 256 * 256
        held[address] = tensor, bytes, stream
        return address

    def free(address, bytes, stream):
        assert held.pop(address)[1:] == (bytes, stream)

    def stream():
        asked.append(1)
        return 0

    accelerator = kvkeep.cuda.accelerator(stream=stream, allocator=(allocate, free))
    engine = Engine("ams-tova" + OPTIONS, accelerator)
    for tokens in (PROMPT, 8, 8, 8):
        engine.step(tokens)
    assert engine.cuts >= 2 and len(held) >= 5 and len(asked) >= 8
    del engine, accelerator
    assert not held


@on_a_gpu
def test_what_an_allocator_raises_comes_to_the_caller():
    def allocate(bytes, stream):
        raise MemoryError("no bytes left")

    engine = Engine("tova" + OPTIONS, kvkeep.cuda.accelerator(allocator=(allocate, lambda *_: None)))
    with pytest.raises(MemoryError, match="no bytes left"):
        engine.step(PROMPT)


@on_a_gpu
def test_an_accelerator_serves_one_keeper_on_its_own_device():
    accelerator = kvkeep.cuda.accelerator()
    assert accelerator.device == keeper_of("tova" + OPTIONS, accelerator).device == DEVICE
    with pytest.raises(kvkeep.StateError, match="serves another keeper, or served one before"):
        keeper_of("tova" + OPTIONS, accelerator)
    with pytest.raises(kvkeep.DeviceError, match="GPU 99 is not there"):
        kvkeep.cuda.accelerator(99)
    for wrong in (dict(index="0"), dict(stream="side"), dict(allocator=print), dict(allocator=(print,))):
        with pytest.raises(kvkeep.InvalidArgument, match="allowed"):
            kvkeep.cuda.accelerator(**wrong)


@on_a_gpu
def test_arrays_of_another_device_are_refused_by_both_names():
    if MODELLED:
        pytest.skip("the model's device is the host")
    engine = Engine("tova" + OPTIONS, kvkeep.cuda.accelerator())
    engine.device = "cpu"
    with pytest.raises(kvkeep.InvalidArgument, match="are on cpu, but the keeper works on cuda:0"):
        engine.step(PROMPT)


@pytest.mark.skipif(kvkeep.cuda.has_kernels(), reason="this package has kernels")
def test_a_package_without_kernels_says_so():
    with pytest.raises(
        kvkeep.Unsupported, match="this package has no kernels .*; allowed one that was built where nvcc"
    ):
        kvkeep.cuda.accelerator()


@pytest.mark.skipif(not kvkeep.cuda.has_kernels() or MODELLED or torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so():
    with pytest.raises(kvkeep.DeviceError, match="GPU 0 is not there"):
        kvkeep.cuda.accelerator()


# ---- attach()

hf = pytest.importorskip("kvkeep.hf")
transformers = pytest.importorskip("transformers")


def model_of(dtype=torch.float32):
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).to(DEVICE, dtype).eval()


def generate(model, ids, **more):
    return model.generate(ids.to(model.device), max_new_tokens=40, do_sample=False, pad_token_id=0, **more).cpu()


attached = partial(hf.attach, accelerator=kvkeep.cuda.accelerator) if MODELLED else hf.attach


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_full_a_model_writes_what_it_writes_alone(dtype):
    model, ids = model_of(dtype), torch.arange(60)[None] * 7 % 200
    with hf.attach(model, "full") if dtype == torch.bfloat16 and MODELLED else nullcontext():
        alone = generate(model, ids)  # in bf16 sdpa rounds otherwise where a cache has room to grow
    with attached(model, "full") as kept:
        assert kept.keeper.device == DEVICE
        text = generate(model, ids)
    assert torch.equal(text, alone) or (dtype == torch.bfloat16 and not MODELLED)


@on_a_gpu
@pytest.mark.parametrize(
    "name", ["tova", "ams-tova", "keydiff", "snapkv", "expected", "adakv-snapkv", "streaming", "h2o"]
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_policy_keeps_the_slots_that_it_keeps_on_the_cpu(name, padded):
    model, rows = model_of(), []
    ids = torch.arange(120).reshape(2, 60) * 7 % 200
    more = dict(attention_mask=(torch.arange(60) >= torch.tensor([[0], [9]])).long()) if padded else {}
    for attach, here in ((hf.attach, model_of().cpu()), (attached, model)):
        with attach(here, name + ",budget=40,interval=8", remember=4) as kept:
            text = generate(here, ids, **{k: v.to(here.device) for k, v in more.items()})
        assert len(kept.events) >= 4
        rows.append((text, [h.gone for h in kept._histories]))
    assert torch.equal(rows[0][0], rows[1][0])
    for a, b in zip(*(r[1] for r in rows)):
        for x, y in zip(a, b):
            assert (x == y).all()


@on_a_gpu
def test_an_accelerator_of_another_device_is_refused():
    elsewhere = kvkeep.cuda.accelerator
    if MODELLED:
        pytest.skip("the model's device is the host")
    with pytest.raises(kvkeep.InvalidArgument, match="the cache is on cpu, and the accelerator on cuda:0"):
        hf.attach(model_of().cpu(), "tova,budget=40", accelerator=elsewhere)


@on_a_gpu
def test_what_a_gpu_refuses_is_refused_when_attach_is_made():
    with pytest.raises(kvkeep.InvalidArgument, match="the scores decide how many slots fold, unknown to the host"):
        attached(model_of(), "adakv-tova,budget=40,rest=fold")


# ---- Without a GPU: tensors that say they are on one


class Recorder:
    """Stands for a keeper on a GPU: arrays that come are there, and rows lose slots, each another number."""

    device, turns, queries_read, steps = "cuda:0", False, 8, 0

    def __init__(self, spec):
        self.spec, self.observed = spec, 0

    def observe(self, layer, ids, indptr, queries=None, **more):
        if queries is not None:
            assert str(queries.device) == self.device and queries.shape[0] == indptr[-1]
            self.observed += 1

    def step(self, layers, ids, lengths, named=()):
        assert all(str(side.device) == self.device for layer in layers for side in layer)
        self.steps += 1
        cuts = [kvkeep_cut(ids[0])] if self.steps % 8 in (2, 5) else []
        if cuts:
            lengths -= np.arange(lengths.size).reshape(lengths.shape).astype(np.int32) % 3
        return SimpleNamespace(cuts=cuts, bytes_moved=0)

    def tokens_to_event(self, id):
        return 4

    def logical_length(self, id):
        return 0

    def join(self, *given):
        pass

    leave = truncate = end_prompt = join


def kvkeep_cut(id):
    return SimpleNamespace(sequence=id, logical_length=0, length_before=0, length_after=0)


def test_no_step_mixes_tensors_of_two_devices(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200,
    )  # fmt: skip
    spec = hf.describe(transformers.AutoModelForCausalLM.from_config(config).eval())[0]
    rows = pytest.importorskip("kvkeep._rows")
    monkeypatch.setattr(rows.Rows, "there", lambda self, array: torch.from_numpy(array.copy()).to(self.device))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda:0"):
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
        kept = object.__new__(hf.attach)
        kept._start(model, "a policy", Recorder(spec))
        with kept:
            for batch in (1, 2):
                cache, ids = kept.cache(), torch.zeros((batch, 12), dtype=torch.long, device="cuda:0")
                for tokens in (12, *[1] * 8):
                    logits = hf.run(model, ids[:, :tokens], cache)
                cache.crop(-1)
                assert logits.shape == (batch, 1, 200) and str(logits.device) == "cuda:0"
                assert len(set(rows.rows_of(cache).lengths.ravel().tolist())) > 1
            assert kept.keeper.steps >= 16 and kept.keeper.observed >= 32
