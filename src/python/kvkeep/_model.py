# SPDX-License-Identifier: Apache-2.0
"""What kvkeep must know of a Hugging Face model: learned from three short forwards, not from its config.

A layer's keys of a text at positions p and p + 7 tell how it rotates: the style, the frequencies, or that it has no
RoPE. Where position_ids change nothing, or are not taken, a text of one token does: its keys differ by their positions
alone. What no candidate explains stays open, and policies that turn queries or keys are then refused.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature, unwrap
from types import MethodType

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from . import ModelSpec, Rope, Unsupported

NAME = "kvkeep"
CACHE_NAMES = ("cache", "past_key_values")  # transformers 5 renames the argument
_TAG = "_kvkeep_layer"  # on the keys that a cache returns: the layer that attends to them
_TOKENS, _SHIFT = 10, 7
_AT_ONCE = 2**24  # products of queries and keys that eager attention forms at a time: 64 MiB in f32
# What attention functions are handed without it meaning anything to the softmax over the mask.
_HARMLESS = {
    "assistant_tokenizer", "cache_position", "deterministic", "is_causal", "kwargs", "labels", "logits_to_keep",
    "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "shift_labels", "sliding_window", "token_type_ids", "tokenizer", "use_cache",
}  # fmt: skip
_SINKS, _CAP = "s_aux", "softcap"  # what a softmax may have besides: a logit of each query head, a cap on logits
_MEANING = {
    "sinks": "sinks that follow from the text",
    "position_bias": "a bias by position",
    "indices": "tokens chosen by an indexer",
    "block_indices": "blocks chosen by an indexer",
    "output_attentions": "attention weights to return",
    "head_mask": "a mask over heads",
}


def refuse(error, what):
    raise error(f"kvkeep.hf: {what}")


def shown(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def plain_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def cache_name(module):
    names = signature(unwrap(type(module).forward)).parameters
    found = next((n for n in CACHE_NAMES if n in names), None)
    if found is None:
        refuse(Unsupported, f"{type(module).__name__} takes no cache; allowed decoders that do")
    return found


def run(model, ids, cache, **more):
    """Logits of the next tokens over a cache."""
    return model(input_ids=ids, use_cache=True, **{cache_name(model): cache}, **more).logits


def decoder_of(model):
    """The module whose forward is a step. get_decoder() of ModernBERT returns its head."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "config") else model.base_model


def tag(keys, layer):
    setattr(keys, _TAG, layer)


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Arguments are in the order of sdpa_attention_forward: what wraps attention functions, as kvpress does, counts on
    it. Layers with a sliding window keep their own cache, whose keys have no tag."""
    layer = getattr(key, _TAG, None)
    for name, given in kwargs.items():
        if given is None or given is False or name in _HARMLESS:
            continue
        if name == _SINKS and isinstance(given, torch.Tensor) and given.shape == query.shape[1:2]:
            continue
        if name == _CAP and isinstance(given, (int, float)) and given > 0:
            continue
        meaning = f", {_MEANING[name]}" if name in _MEANING else ""
        refuse(
            Unsupported,
            f"attention of {type(module).__name__} has the argument {name}{meaning}; allowed the softmax of scaled "
            "products under a mask, with a sink of each head and a cap",
        )
    if layer is not None:
        return layer.attend(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    return softmax(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def softmax(module, query, key, value, mask, dropout, scaling, **kwargs):
    """transformers' sdpa; as that knows no sinks and no caps, with these the eager attention of the model's own file,
    over as many queries at a time as _AT_ONCE allows. mask: bool, numbers that are added, or None."""
    if kwargs.get(_SINKS) is None and kwargs.get(_CAP) is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if eager is None:
        refuse(
            Unsupported,
            f"the file of {type(module).__name__} has no eager attention, and sdpa has no learned sinks and no cap on "
            "logits; allowed models whose file has one",
        )
    columns, slots = query.shape[2], key.shape[2]
    causal = kwargs.pop("is_causal", None)
    causal = mask is None and columns > 1 and (getattr(module, "is_causal", True) if causal is None else causal)
    least, parts = torch.finfo(query.dtype).min, []
    step = max(1, _AT_ONCE // (query.shape[0] * query.shape[1] * slots))
    for first in range(0, columns, step):
        last = min(columns, first + step)
        if causal:
            seen = torch.arange(slots, device=query.device) <= torch.arange(
                slots - columns + first, slots - columns + last, device=query.device
            ).unsqueeze(1)
            seen = seen[None, None]
        else:
            seen = None if mask is None else mask[:, :, first:last] if mask.shape[2] > 1 else mask
        if seen is not None and seen.dtype == torch.bool:
            seen = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, least)
        more = dict(kwargs, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, dropout=dropout)
        parts.append(eager(module, query[:, :, first:last], key, value, seen, **more)[0])
    return torch.cat(parts, 1), None


def _expanding(module, latent, turned):
    """In place of a module's expand_kv, which makes heads of latent rows: what it makes of new rows is theirs."""
    keys, values = type(module).expand_kv(module, latent, turned)
    layer = getattr(latent, _TAG, None)
    if layer is not None:
        layer.expanded(latent, turned, keys, values)
    return keys, values


def row_of(latent, turned):
    """(key, value) of a latent row as policies read it: what turns with the position first, then what does not, which
    is the value too."""
    return torch.cat([turned, latent], -1), latent


def expand(module, keys, values):
    """The heads of latent rows."""
    return module.expand_kv(values, keys[..., : keys.shape[-1] - values.shape[-1]])


def absorbed(module, query, rows):
    """f32 queries over latent rows: their products with those are the model's own over its heads, since these are
    linear in the row. query: [batch, Hq, columns, D]; rows: key and value of one row, for their sizes. Costs the
    expansion of as many rows as a row has numbers."""
    key, value = rows
    unit = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)[None, None]
    heads, _ = expand(module, unit, unit[..., unit.shape[-1] - value.shape[-1] :])
    return query.float() @ heads.float().transpose(-1, -2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def our_attention(model):
    """Attention of the text decoder, and of nothing else of the model, comes to attention()."""
    decoder, text = decoder_of(model), model.config.get_text_config(decoder=True)
    configs = {
        id(c): c for m in decoder.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation_internal")
    }
    configs.setdefault(id(text), text)
    before = [(c, c._attn_implementation_internal) for c in configs.values()]
    latent = [m for m in decoder.modules() if hasattr(m, "expand_kv")]
    for config, _ in before:
        config._attn_implementation_internal = NAME
    for module in latent:
        module.expand_kv = MethodType(_expanding, module)  # of a copy of the module, the copy's
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for module in latent:
            module.__dict__.pop("expand_kv", None)


@contextmanager
def quietly(model):
    """Without dropout or gradients."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def short_text(model, tokens):
    """Ids of a text without special tokens: [1, tokens]."""
    special = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for name, value in config.to_dict().items():
            if name.endswith("token_id"):
                special.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    size = model.get_input_embeddings().weight.shape[0]
    ids = [i for i in ((37 * n + 11) % size for n in range(4 * tokens + len(special))) if i not in special][:tokens]
    return torch.tensor([ids], device=model.device)


@dataclass
class _Reader:
    """Attention over a layer's cache."""

    module: torch.nn.Module
    heads: int
    scale: float
    sinks: tuple
    cap: float


class _Probe(DynamicLayer):
    """A layer of a plain cache that writes down what comes by."""

    def begin(self, index):
        self.index, self.new, self.turned, self.values_seen, self.readers = index, None, None, None, []
        self.latent = None  # keys of the heads that the model makes of its rows
        return self

    def update(self, key_states, value_states, *args, **kwargs):
        if self.new is not None:
            refuse(Unsupported, f"layer {self.index} updates its cache twice in a step; allowed once")
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.new = self.turned = key_states
        self.values = self.values_seen = values
        tag(keys, self)
        return keys, values

    def expanded(self, latent, turned, keys, values):
        self.new, self.values = row_of(latent, turned)
        self.turned, self.values_seen, self.latent = turned, values, keys
        tag(keys, self)

    def attend(self, module, query, key, value, mask, dropout, scaling, kwargs):
        if value is not self.values_seen:
            refuse(
                Unsupported,
                f"layer {self.index} attends to other values than those in its cache; allowed models that attend to "
                "what the cache returned",
            )
        if self.latent is not None and not self.is_linear(module, query, key):
            refuse(
                Unsupported,
                f"heads of layer {self.index} do not follow from its latent rows by a product; allowed those that do",
            )
        sinks, cap = kwargs.get(_SINKS), kwargs.get(_CAP)
        self.readers.append(
            _Reader(
                module,
                query.shape[1],
                float(scaling or query.shape[-1] ** -0.5),
                () if sinks is None else tuple(sinks.detach().float().tolist()),
                float(cap or 0),
            )
        )
        return softmax(module, query, key, value, mask, dropout, scaling, **kwargs)

    def is_linear(self, module, query, key):
        """Queries over latent rows have the products that the model's own have with its heads."""
        if key is not self.latent:
            return False
        products = query.float() @ key.float().transpose(-1, -2)
        ours = absorbed(module, query, (self.new, self.values)) @ self.new.float().transpose(-1, -2)
        return float((ours - products).norm() / products.norm()) <= (1e-3 if query.dtype == torch.float32 else 3e-2)


def turned_into(kind, layer):
    """The layer of a plain cache, with the methods of `kind` before its own."""
    plain = type(layer)
    made = object.__new__(kind if issubclass(kind, plain) else type(kind.__name__, (kind, plain), {}))
    made.__dict__.update(layer.__dict__)
    return made


def has_state(layer):
    return any(c.__name__ == "LinearAttentionCacheLayerMixin" for c in type(layer).__mro__)


def _kinds(model):
    """Of every layer of the cache: full, sliding (with its window), other (a state of its own, or nothing)."""
    kinds = []
    for index, layer in enumerate(plain_cache(model).layers):
        name = type(layer).__name__
        if name in ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"):
            kinds.append(("sliding", int(layer.sliding_window)))
        elif name in ("DynamicLayer", "LinearAttentionAndFullAttentionLayer"):
            kinds.append(("full", 0))
        elif name == "DummyLayer" or (has_state(layer) and not isinstance(layer, DynamicLayer)):
            kinds.append(("other", 0))
        else:
            refuse(
                Unsupported,
                f"layer {index} of the model has a cache of type {name}; allowed full and sliding attention, and "
                "states beside them",
            )
    if all(kind != "full" for kind, _ in kinds):
        refuse(Unsupported, "the model has no layer with full attention; allowed one or more")
    return kinds


def _probed(model, kinds, ids, shift=0):
    """What comes by in the full layers; with a shift, what does where positions begin there. None: none is taken."""
    cache, more = plain_cache(model), {}
    cache.layers = [
        turned_into(_Probe, layer).begin(i) if kind == "full" else layer
        for i, ((kind, _), layer) in enumerate(zip(kinds, cache.layers))
    ]
    if shift > 0:
        if "position_ids" not in signature(unwrap(type(model).forward)).parameters:
            return None
        more["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None] + shift
    run(model, ids, cache, **more)
    return {i: cache.layers[i] for i, (kind, _) in enumerate(kinds) if kind == "full"}


def _frequencies(decoder):
    """(radians per position, factor on cosines and sines) of each table in the decoder that holds for all lengths."""
    tables = []
    for module in decoder.modules():
        for name, table in module.named_buffers(recurse=False):
            kind = name.removesuffix("inv_freq")
            if kind == name or "original" in kind or table.dim() != 1:
                continue
            types = getattr(module, "rope_type", "default")
            if isinstance(types, dict):
                types = types.get(kind.rstrip("_"), "default")
            if types not in ("dynamic", "longrope"):
                scaling = getattr(module, f"{kind}attention_scaling", None) or 1.0
                tables.append((table.double().cpu(), float(scaling)))
    return tables


def _turned(keys, style, frequencies, shift):
    """keys [1, heads, tokens, D] `shift` positions further on: a number, or [tokens]."""
    pairs = len(frequencies)
    angle = torch.as_tensor(shift, dtype=torch.double).reshape(-1, 1) * frequencies
    cosine, sine = angle.cos(), angle.sin()
    first = slice(0, pairs) if style == "half" else slice(0, 2 * pairs, 2)
    second = slice(pairs, 2 * pairs) if style == "half" else slice(1, 2 * pairs, 2)
    out = keys.clone()
    out[..., first] = keys[..., first] * cosine - keys[..., second] * sine
    out[..., second] = keys[..., second] * cosine + keys[..., first] * sine
    return out


def _rope(here, there, shift, tables):
    """How a layer rotates: its keys at some positions, and the same ones `shift` further on. An open Rope: nothing
    explains them."""
    tolerance = 1e-3 if here.dtype == torch.float32 else 3e-2
    a, b = here.double().cpu(), there.double().cpu()
    error = lambda turned: float((turned - b).norm() / b.norm())
    candidates = [(error(a), Rope(style="none"))]
    for frequencies, scaling in tables:
        for style in ("half", "interleaved") if 2 * len(frequencies) <= a.shape[-1] else ():
            rope = Rope(frequencies.tolist(), style=style, attention_scaling=scaling)
            candidates.append((error(_turned(a, style, frequencies, shift)), rope))
    least, best = min(candidates, key=lambda c: c[0])
    return best if least <= tolerance else Rope()


def _ropes(here, there, alike, tables):
    """By layer. `there`: positions _SHIFT further on; None: the model takes none. `alike`: a text of one token."""
    if there is not None and any(not torch.equal(here[i].turned, there[i].turned) for i in here):
        return {i: _rope(here[i].turned, there[i].turned, _SHIFT, tables) for i in here}
    first = {i: alike[i].turned[:, :, :1].expand_as(alike[i].turned) for i in here}
    return {i: _rope(first[i], alike[i].turned, torch.arange(alike[i].turned.shape[2]), tables) for i in here}


def _one(what, by_layer):
    """What all layers have in common."""
    values = set(by_layer.values())
    if len(values) > 1:
        first, *_ = by_layer
        other = next(l for l in by_layer if by_layer[l] != by_layer[first])
        refuse(
            Unsupported,
            f"layer {first} has {what} {by_layer[first]} and layer {other} {by_layer[other]}; allowed full layers "
            "that are alike",
        )
    return values.pop()


def describe(model):
    """(ModelSpec, attention modules by layer). Raises Unsupported for a model whose cache kvkeep could not follow."""
    try:
        with quietly(model), our_attention(model):
            kinds = _kinds(model)
            ids = short_text(model, _TOKENS)
            here, there = _probed(model, kinds, ids), _probed(model, kinds, ids, _SHIFT)
            alike = _probed(model, kinds, ids[:, :1].expand_as(ids))
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(
            f"kvkeep.hf: {type(model).__name__} does not run a text of {_TOKENS} tokens over a cache "
            f"({shown(error)}); allowed decoders of text"
        ) from error
    for index, layer in here.items():
        if layer.new is None:
            refuse(Unsupported, f"layer {index} does not update the cache; allowed models whose full layers do")
        if not layer.readers:
            refuse(
                Unsupported,
                f"attention of layer {index} does not come through transformers' attention interface, or not to the "
                "keys that the cache returned; allowed models where it does",
            )
        if layer.new.device.type != "cpu":
            refuse(Unsupported, f"the cache is on {layer.new.device}; allowed the CPU in this build of the package")
    modules = {index: layer.readers[0].module for index, layer in here.items()}
    shared = [(getattr(r.module, "layer_idx", -1), index) for index, layer in here.items() for r in layer.readers[1:]]
    # Caches of releases before 5.20 end before the layers that read those of others.
    kinds += [("other", 0)] * (max((reader for reader, _ in shared), default=-1) + 1 - len(kinds))
    if any(reader <= index or kinds[reader][0] != "other" for reader, index in shared):
        refuse(
            Unsupported, "a layer attends to the cache of another one and has its own; allowed one cache for each layer"
        )
    of = lambda value: {index: value(layer) for index, layer in here.items()}
    ropes = _ropes(here, there, alike, _frequencies(decoder_of(model)))
    sinks = {i: list(l.readers[0].sinks) for i, l in here.items() if l.readers[0].sinks}
    key = lambda rope: (rope.style, rope.attention_scaling, tuple(rope.inv_freq))
    common = Counter(key(r) for r in ropes.values()).most_common(1)[0][0]
    spec = ModelSpec(
        _one("query heads:", of(lambda l: l.readers[0].heads)),
        _one("KV heads:", of(lambda l: l.new.shape[1])),
        _one("keys of size", of(lambda l: l.new.shape[-1])),
        len(kinds),
        value_dim=_one("values of size", of(lambda l: l.values.shape[-1])),
        inv_freq=list(common[2]) or None,
        rope_style=common[0],
        attention_scaling=common[1],
        softmax_scale=_one("products scaled by", of(lambda l: l.readers[0].scale)),
        sliding=[(i, window) for i, (kind, window) in enumerate(kinds) if kind == "sliding"],
        shared=shared,
        other=[i for i, (kind, _) in enumerate(kinds) if kind == "other" and i not in {r for r, _ in shared}],
        layer_ropes={i: rope for i, rope in ropes.items() if key(rope) != common},
        layer_sinks=sinks,
        logit_cap=_one("logits capped at", of(lambda l: l.readers[0].cap)),
    )
    return spec, modules
