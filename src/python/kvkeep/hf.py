"""Any policy over the KV cache of a Hugging Face model, while model.generate() runs as it is.

    with kvkeep.hf.attach(model, "ams-tova,budget=1024") as kept:
        model.generate(**inputs, max_new_tokens=2000)
    print(kept.events)

Decoder models whose attention goes through transformers' attention interface (Llama, Qwen2, Qwen3, Mistral, Gemma and
others), on the CPU, in f32, f16 or bf16. Layers with a sliding window keep their own cache. Batches may be padded on
the left. Refused by name: beam search, caches other than DynamicCache, logit soft-capping, caches that hold tokens
already.

Per layer, keys and values lie in a buffer [batch, KV heads, capacity, head size] of our own, without padding; an event
moves the slots that stay to its front. transformers sees the logical length, so positions and masks go on as if
nothing had been dropped.
"""

import weakref
from dataclasses import dataclass, field
from inspect import signature, unwrap

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from . import InvalidArgument, Keeper, ModelSpec, Unsupported

_NAME = "kvkeep"
_CACHE_NAMES = ("cache", "past_key_values")  # transformers 5 renames the argument
_current = None  # the layer of a kept cache that was updated last: its attention comes next


def _refuse(error, what):
    raise error(f"kvkeep.hf: {what}")


def _plain_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _rows_of(cache):
    """Of a cache under a policy; None: it is not."""
    return next((layer.rows for layer in cache.layers if isinstance(layer, _KeptLayer)), None)


def _spec(model):
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_logit_softcapping", None):
        _refuse(Unsupported, "the model caps its attention logits (attn_logit_softcapping); allowed models that do not")
    sliding = []
    for index, layer in enumerate(_plain_cache(model).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            sliding.append((index, int(layer.sliding_window)))
        elif type(layer) is not DynamicLayer:
            _refuse(Unsupported, f"layer {index} of the model has a cache of type {type(layer).__name__}; allowed full and sliding attention")
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    turns = getattr(rotary, "inv_freq", None)
    fixed = getattr(rotary, "rope_type", "default") not in ("dynamic", "longrope")  # theirs change with the length
    attention = getattr(model.get_decoder().layers[0], "self_attn", None)
    return ModelSpec(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        dim,
        config.num_hidden_layers,
        inv_freq=turns.double().tolist() if turns is not None and fixed else None,
        attention_scaling=float(getattr(rotary, "attention_scaling", 1.0)),
        softmax_scale=float(getattr(attention, "scaling", None) or 0.0),
        sliding=sliding,
    )


class _KeptLayer(DynamicLayer):
    """A layer whose length is the logical one."""

    is_croppable = True

    def __init__(self, rows, index):
        super().__init__()
        self.rows, self.index, self.columns = rows, index, 0

    def update(self, key_states, value_states, *args, **kwargs):
        global _current
        self.is_initialized = True
        self.keys, self.values = self.rows.append(self.index, key_states, value_states)
        self.columns += key_states.shape[-2]
        _current = self
        return self.keys, self.values

    def get_seq_length(self):
        return self.columns

    def get_mask_sizes(self, new):
        """new: columns of the step; older releases of transformers 5 (5.2) pass their positions."""
        return self.columns + (new if isinstance(new, int) else len(new)), 0

    def crop(self, tokens_to_remove):
        if tokens_to_remove > 0:
            _refuse(InvalidArgument, f"crop: given {tokens_to_remove}; allowed the number of tokens to remove, negative")
        self.rows.crop(self.index, -tokens_to_remove)
        self.columns += tokens_to_remove

    def reset(self):
        self.rows.forget()
        self.columns, self.is_initialized, self.keys, self.values = 0, False, None, None

    def reorder_cache(self, beam_idx):
        _refuse(Unsupported, "beam search moves a sequence's cache to another; allowed greedy decoding and sampling")

    def batch_repeat_interleave(self, repeats):
        _refuse(Unsupported, "the cache was asked to repeat its sequences; allowed one cache entry per sequence")

    def batch_select_indices(self, indices):
        _refuse(Unsupported, "the cache was asked to select sequences; allowed all of them, from the first step to the last")


class _Rows:
    """The sequences of one cache: their rows, and their lengths."""

    def __init__(self, owner):
        self.owner = owner
        self.keeper = owner.keeper
        self.spec = owner.keeper.spec
        self.full = self.spec.full_layers
        self.buffers = [None] * self.spec.num_layers
        self.ids, self.lengths, self.padding = [], None, None
        self.mask = None  # of the step that begins: what forward() was given

    def forget(self):
        for id in self.ids:
            self.keeper.leave(id)
        self.ids, self.lengths, self.padding = [], None, None
        self.buffers = [None] * self.spec.num_layers

    def heads(self, layer):
        """int32 [batch, KV heads]: slots of a layer, a view."""
        first = layer * self.spec.kv_heads
        return self.lengths[:, first : first + self.spec.kv_heads]

    def begin(self, batch, tokens):
        self.ids = [self.owner.next_id() for _ in range(batch)]
        for id in self.ids:
            self.keeper.join(id)
        self.lengths = np.zeros((batch, self.spec.num_layers * self.spec.kv_heads), np.int32)
        self.padding = [0] * batch
        if self.mask is None:
            return
        mask = self.mask.to("cpu", torch.bool)
        if mask.dim() != 2 or mask.shape != (batch, tokens):
            _refuse(Unsupported, f"attention_mask has the shape {list(mask.shape)}; allowed [{batch}, {tokens}] with padding on the left")
        self.padding = [int(row.logical_not().sum()) for row in mask]
        for b, missing in enumerate(self.padding):
            if missing == tokens or bool(mask[b, :missing].any()):
                _refuse(Unsupported, f"attention_mask: sequence {b} is not padded on the left alone; allowed zeros, then one or more ones")

    def new_tokens(self, columns):
        """Tokens of each sequence among new columns: padding comes before the first."""
        first = not self.lengths[:, self.full[0] * self.spec.kv_heads].any() if self.full else False
        return [columns - missing if first else columns for missing in self.padding]

    def append(self, layer, keys, values):
        if keys.device.type != "cpu":
            _refuse(Unsupported, f"the cache is on {keys.device}; allowed the CPU in this build of the package")
        batch, heads, columns, _ = keys.shape
        if not self.ids:
            self.begin(batch, columns)
        if batch != len(self.ids):
            _refuse(InvalidArgument, f"a step of {batch} sequences after steps of {len(self.ids)}; allowed the same ones")
        if layer == self.full[0]:
            self.tokens = self.new_tokens(columns)
        held = self.heads(layer)
        needed = int(held.max()) + max(self.tokens)
        both = self.buffers[layer]
        if both is None or both[0].shape[2] < needed:
            room = needed if both is None else needed + needed // 2
            both = self.buffers[layer] = tuple(self._moved(old, new, room, int(held.max())) for old, new in zip(both or (None, None), (keys, values)))
        even = bool((held == held[0, 0]).all()) and len(set(self.tokens)) == 1
        for buffer, new in zip(both, (keys, values)):
            if even:
                at, count = int(held[0, 0]), self.tokens[0]
                buffer[:, :, at : at + count] = new[:, :, columns - count :]
                continue
            for b, count in enumerate(self.tokens):
                for h in range(heads):
                    at = int(held[b, h])
                    buffer[b, h, at : at + count] = new[b, h, columns - count :]
        held += np.asarray(self.tokens, np.int32)[:, None]
        return both[0][:, :, :needed], both[1][:, :, :needed]

    @staticmethod
    def _moved(old, like, room, held):
        new = like.new_zeros((like.shape[0], like.shape[1], room, like.shape[3]))
        if old is not None:
            new[:, :, :held] = old[:, :, :held]
        return new

    def observe(self, layer, query):
        """query: [batch, Hq, columns, D] after RoPE."""
        columns = query.shape[2]
        by_token = query.transpose(1, 2)
        if all(count == columns for count in self.tokens):
            queries = by_token.reshape(-1, *by_token.shape[2:])
        else:
            queries = torch.cat([by_token[b, columns - count :] for b, count in enumerate(self.tokens)])
        indptr = np.concatenate([[0], np.cumsum(self.tokens)]).tolist()
        self.keeper.observe(layer, self.ids, indptr, queries.detach(), basis="post_rope")

    def mask_of(self, layer, columns, slots):
        """What each query sees: None (all), "causal", or bool [batch, Hkv or 1, columns, slots]."""
        held = self.heads(layer)
        if bool((held == slots).all()) and len(set(self.tokens)) == 1 and self.tokens[0] == columns:
            if columns == 1:
                return None
            if columns == slots:
                return "causal"
        ragged = bool((held != held[:, :1]).any())
        after = torch.from_numpy(np.ascontiguousarray(held if ragged else held[:, :1])).long()[:, :, None, None]
        back = torch.arange(columns - 1, -1, -1)[None, None, :, None]  # newer columns of the same step
        seen = (after - back).clamp(min=1)  # columns of padding see something, and are never read
        mask = torch.arange(slots)[None, None, None, :] < seen
        group = self.spec.query_heads // self.spec.kv_heads
        return mask.repeat_interleave(group, dim=1) if ragged else mask

    def step(self):
        report = self.keeper.step([self.buffers[l] if l in self.full else None for l in range(self.spec.num_layers)], self.ids, self.lengths)
        if not report.cuts:
            return
        self.owner.note(report)
        for layer in self.full:
            longest = int(self.heads(layer).max())
            if self.buffers[layer][0].shape[2] > 2 * (longest + 256):  # a long prompt's room goes back
                self.buffers[layer] = tuple(self._moved(b, b, longest + 128, longest) for b in self.buffers[layer])

    def crop(self, layer, tokens):
        if layer == self.full[0]:
            for id in self.ids:
                self.keeper.truncate(id, self.keeper.logical_length(id) - tokens)
        held = self.heads(layer)
        held -= tokens


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Records the queries, attends, and after the last layer lets the policy decide. Arguments are in the order of
    sdpa_attention_forward: what wraps attention functions, as kvpress does, counts on it."""
    global _current
    layer, _current = _current, None
    if layer is None:  # one with a sliding window
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if layer.keys is not key:
        _refuse(Unsupported, f"layer {layer.index} attends to other keys than those in its cache; allowed models that attend to what the cache returned")
    rows = layer.rows
    rows.observe(layer.index, query)
    mask = rows.mask_of(layer.index, query.shape[2], key.shape[2])
    kwargs.pop("is_causal", None)
    out = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        None if mask is None or isinstance(mask, str) else mask,
        scaling=scaling,
        dropout=dropout,
        is_causal=isinstance(mask, str),
        **kwargs,
    )
    if layer.index == rows.full[-1]:
        rows.step()
    return out


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@dataclass
class Event:
    """What one event did to one sequence."""

    sequence: int  #: from 0 on, in the order of the batches that were generated
    logical_length: int  #: tokens seen
    slots_before: int  #: of its longest row
    slots_after: int


@dataclass
class attach:
    """Puts a policy over the caches of a model, until the `with` block ends.

    policy: "name,key=value,..." or a JSON object (kvkeep.policies()). output_projections: True gives the policy each
    layer's W_o, which CriticalKV reads. Raises InvalidArgument for a wrong policy, Unsupported for a model or a policy
    that cannot be served: policies that narrow prompts or fold need an engine that runs layer by layer.
    """

    model: torch.nn.Module
    policy: str
    output_projections: bool = False
    events: list = field(default_factory=list, init=False)
    bytes_moved: int = field(default=0, init=False)

    def __post_init__(self):
        projections = []
        if self.output_projections:
            projections = [layer.self_attn.o_proj.weight.detach() for layer in self.model.get_decoder().layers]
        self.keeper = Keeper(_spec(self.model), self.policy, output_projections=projections)
        self._next, self._hook = 0, None

    def next_id(self):
        self._next += 1
        return self._next - 1

    def note(self, report):
        self.bytes_moved += report.bytes_moved
        self.events += [Event(c.sequence, c.logical_length, c.length_before, c.length_after) for c in report.cuts]

    def cache(self):
        """An empty cache under the policy, for model(..., cache=...) or generate(cache=...); older releases say past_key_values=."""
        return self._keep(_plain_cache(self.model))

    def _keep(self, cache):
        if type(cache) is not DynamicCache or cache.offloading:
            _refuse(Unsupported, f"the cache is a {type(cache).__name__}; allowed DynamicCache, which generate() makes")
        rows = _rows_of(cache)
        if rows is not None:
            if rows.owner is not self:
                _refuse(InvalidArgument, "the cache is under another attach(); allowed one that this attach() made")
            return cache
        if cache.get_seq_length() > 0:
            _refuse(Unsupported, f"the cache holds {cache.get_seq_length()} tokens that kvkeep has not seen; allowed an empty one")
        rows = _Rows(self)
        cache.layers = [_KeptLayer(rows, i) if i in rows.full else layer for i, layer in enumerate(_plain_cache(self.model).layers)]
        cache.layer_class_to_replicate = None
        weakref.finalize(cache, rows.forget)
        return cache

    def _before_forward(self, module, args, kwargs):
        name = next((n for n in _CACHE_NAMES if kwargs.get(n) is not None), None)
        if name is None:
            if not kwargs.get("use_cache", getattr(module.config, "use_cache", False)):
                return None
            name = next(n for n in _CACHE_NAMES if n in signature(unwrap(type(module).forward)).parameters)
            kwargs[name] = _plain_cache(self.model)
        cache = kwargs[name] = self._keep(kwargs[name])
        rows = _rows_of(cache)
        mask = kwargs.get("attention_mask")
        rows.mask = mask.get("full_attention") if isinstance(mask, dict) else mask
        return args, kwargs

    def __enter__(self):
        if self._hook is not None:
            _refuse(InvalidArgument, "attach() is entered twice; allowed once at a time")
        self._before = self.model.config._attn_implementation
        self.model.set_attn_implementation(_NAME)
        self._hook = self.model.get_decoder().register_forward_pre_hook(self._before_forward, with_kwargs=True)
        return self

    def __exit__(self, *_):
        self._hook.remove()
        self._hook = None
        self.model.set_attn_implementation(self._before)
