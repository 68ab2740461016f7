# SPDX-License-Identifier: Apache-2.0
"""Any policy over the KV cache of a Hugging Face model, while model.generate() runs as it is.

    with kvkeep.hf.attach(model, "ams-tova,budget=1024") as kept:
        out = model.generate(**inputs, max_new_tokens=2000)
    print(kept.events, kept.memory())
    kept.plot()
    open("kept.html", "w").write(kept.html(tokenizer, out))

Decoder models whose attention goes through transformers' attention interface, on the CPU or on one GPU of NVIDIA, in
f32, f16 or bf16: what a model does is learned from three short forwards, and a text is compared with that of the model
alone. Layers with a sliding window or a state keep their own cache. Batches may be padded; prompts may come in pieces;
drafts may be taken back. Refused by name: beam search, caches other than DynamicCache or with tokens already, and
attention that is more than the softmax of scaled products under a mask.

An event happens at the start of the forward that follows the tokens it counts, so that it sees confirmed tokens alone;
or where the program says so (attach.cut). On a GPU it is queued on the current stream, as the forward is. Under
prefill=pieces generate(prefill_chunk_size=N) cuts between the pieces.
"""

import threading
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType

import numpy as np

try:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.cache_utils import DynamicCache
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'kvkeep.hf: there is no module {error.name}; allowed after pip install "kvkeep[hf]"', name=error.name
    ) from error

from . import InvalidArgument, Keeper, StateError, Unsupported, cuda
from ._kvkeep import _policy_text
from ._model import (
    CACHE_NAMES,
    cache_name,
    decoder_of,
    describe,
    our_attention,
    quietly,
    refuse,
    run,
    short_text,
    shown,
)
from ._model import plain_cache as _plain_cache
from ._rows import KeptCache, Rows
from ._rows import rows_of as _rows_of
from ._show import page, picture

_entered = []  # every attach() whose block runs


@dataclass
class Event:
    """What one event did to one sequence."""

    sequence: int  #: from 0 on, in the order of the batches that were generated
    logical_length: int  #: tokens seen
    slots_before: int  #: of its longest row
    slots_after: int


def _refuse_nested(model):
    decoders = {id(one._decoder): one.policy for one in list(_entered)}
    parts = model.modules() if isinstance(model, torch.nn.Module) else ()
    policy = next((decoders[id(part)] for part in parts if id(part) in decoders), None)
    if policy is not None:
        refuse(StateError, f"this model is under {policy} already; allowed after its `with` block has ended")


class attach:
    """Puts a policy over the caches of a model, until the `with` block ends.

    policy: "name,key=value,..." or a JSON object, as text or a dict (kvkeep.policies()). output_projections: True gives
    the policy each layer's W_o, which CriticalKV reads. check: False leaves out the comparison with the model alone,
    which costs six short forwards. remember: of how many sequences, the newest, html() and plot() know which token
    each row dropped: two bytes for each token of each layer and KV head, and 20 us for each such row of 4,000 tokens
    in an event. A batch is remembered whole; None: 16 on the CPU, none on a GPU, where an event would wait to read
    positions back. accelerator: makes what events run on, kvkeep.cuda.accelerator(index) for a model on a GPU unless
    given. Raises InvalidArgument for a wrong policy, Unsupported for a model or a policy that cannot be served:
    policies that narrow prompts or fold need an engine that runs layer by layer, StateError for a model that is under a
    policy already. A warning says that no `with` block was entered. Threads may share it.
    """

    def __init__(self, model, policy, output_projections=False, check=True, remember=None, accelerator=None):
        policy = _policy_text(policy)  # what is wrong with it is said before the model runs
        _refuse_nested(model)
        (spec, modules, device), projections = describe(model), []
        if accelerator is None and device != "cpu":
            accelerator = partial(cuda.accelerator, torch.device(device).index or 0)
        self._accelerator = accelerator or (lambda: None)
        if output_projections and any(hasattr(m, "expand_kv") for m in modules.values()):
            refuse(Unsupported, "output_projections: rows are latent, and values have no projection; allowed without")
        if output_projections:
            projections = [modules[i].o_proj.weight.detach() if i in modules else None for i in range(spec.num_layers)]
        remember = (0 if accelerator else 16) if remember is None else remember
        if isinstance(remember, bool) or not isinstance(remember, int) or remember < 0:
            refuse(InvalidArgument, f"remember is {remember!r}; allowed 0 and above, a number of sequences")
        keeper = Keeper(spec, policy, output_projections=projections, accelerator=self._accelerator())
        if keeper.device != device:
            refuse(
                InvalidArgument, f"the cache is on {device}, and the accelerator on {keeper.device}; allowed its own"
            )
        self._start(model, policy, keeper, remember)
        if check:
            self._check()
        self._unused = weakref.finalize(
            self,
            warnings.warn,
            f"kvkeep.hf: attach() of {policy} was dropped without a `with` block, and no cache came under the policy; "
            "allowed `with kvkeep.hf.attach(...) as kept:`",
        )

    def _start(self, model, policy, keeper, remember=0):
        self.model, self.policy, self.events, self.bytes_moved = model, policy, [], 0
        self._unused = None  # warns of a block that never began
        self.keeper, self.lock = keeper, threading.RLock()
        self._next, self._decoder, self._nearest, self._uncached = 0, None, None, False
        self._histories, self._remember = [], remember  # of caches, the newest last
        self._given_back = ExitStack()  # what a model has while a `with` block runs
        self._here = threading.local()  # the prompt of generate() and the rows of the forward that run in a thread

    def __repr__(self):
        return f"<kvkeep.hf.attach {self.policy!r}: {len(self.events)} events, {self.bytes_moved} bytes moved>"

    def __deepcopy__(self, memo):
        return self  # of a model that is copied inside the block: the copy runs alone

    def _check(self):
        """The model computes under `full` what it computes alone."""
        ids = short_text(self.model, 12)
        under_full = object.__new__(attach)
        under_full._start(self.model, "full", Keeper(self.keeper.spec, "full", accelerator=self._accelerator()))
        with quietly(self.model):
            alone = self._try(ids, _plain_cache(self.model), "alone")
            with under_full:
                kept = self._try(ids, under_full.cache(), "under the policy `full`")
        tolerance = 1e-3 if alone.dtype == torch.float32 else 0.1
        differ = float((kept.float() - alone.float()).abs().amax(-1).mean()) / max(float(alone.float().std()), 1e-30)
        if not differ <= tolerance:
            refuse(
                Unsupported,
                f"under the policy `full` the logits of {type(self.model).__name__} are not those of the model alone: "
                f"they differ by {differ:.2g} of their spread; allowed up to {tolerance:g}",
            )

    def _try(self, ids, cache, how):
        try:
            return torch.cat([run(self.model, part, cache) for part in ids.split([8, 3, 1], 1)], 1)
        except (Unsupported, InvalidArgument):
            raise
        except Exception as error:
            raise Unsupported(
                f"kvkeep.hf: {type(self.model).__name__} does not run a short text {how} ({shown(error)}); allowed "
                "decoders of text"
            ) from error

    def next_id(self):
        self._next += 1
        return self._next - 1

    def require_block(self):
        if self._decoder is None:
            when = "has not begun" if self._unused and self._unused.alive else "has ended"
            refuse(
                StateError,
                f"a cache under {self.policy} is used and its `with` block {when}; allowed inside the block, and any "
                "other cache",
            )

    def note(self, report, rows):
        self.bytes_moved += report.bytes_moved
        self.events += [Event(c.sequence, c.logical_length, c.length_before, c.length_after) for c in report.cuts]
        if not self.events:
            for id in rows.ids:
                seen, away = self.keeper.logical_length(id), self.keeper.tokens_to_event(id)
                if away is not None and (self._nearest is None or seen > self._nearest[0]):
                    self._nearest = seen, away

    def remembered(self, history):
        """Of a cache that begins. Older ones make room for it."""
        with self.lock:
            self._histories.append(history)
            while len(self._histories) > 1 and sum(len(one.ids) for one in self._histories) > max(1, self._remember):
                self._histories.pop(0).forget()
            if self._remember == 0:
                history.forget()
        return history

    def _history(self, sequence, what):
        """Of a sequence, and its place in the batch; without a sequence, of the newest batch."""
        if not self._histories:
            refuse(StateError, f"{what}: no sequence has run; allowed after a generate() or a forward with a cache")
        if sequence is None:
            return self._histories[-1], None
        for history in self._histories:
            if sequence in history.ids:
                return history, history.ids.index(sequence)
        known = [id for history in self._histories for id in history.ids]
        refuse(
            InvalidArgument,
            f"{what}: sequence {sequence!r} is not remembered; allowed {', '.join(map(str, known))}, or a larger "
            "attach(remember=)",
        )

    def _shown_history(self, sequence, what):
        history, place = self._history(sequence, what)
        if history.gone is None:
            refuse(StateError, f"{what}: attach() was told remember=0; allowed 1 and above")
        return history, place or 0

    def memory(self, sequence=None):
        """Bytes of keys and values: a Memory of one sequence, or of the newest batch together."""
        with self.lock:
            history, place = self._history(sequence, "memory")
            return history.memory(place)

    def html(self, tokenizer, ids, sequence=None):
        """The page of `kvkeep generate --html`, a str that notebooks show: the text, each token shaded by how many
        heads still hold it, at each event and at the end. tokenizer: with decode(); None: ids are shown. ids: what
        generate() returned, [batch, columns], or the row of the sequence. sequence: an Event's; None: the first of the
        newest batch. Written to a file, it needs no network."""
        with self.lock:
            history, place = self._shown_history(sequence, "html")
            name = str(getattr(self.model.config, "name_or_path", "") or type(self.model).__name__)
            return page(history, place, tokenizer, ids, name.rstrip("/").rsplit("/", 1)[-1], self.policy)

    def plot(self, sequence=None, layer=None):
        """A matplotlib Figure: slots held over time by layer, and which positions stay. sequence: as for html(). layer:
        its KV heads instead of all layers. ImportError without matplotlib."""
        with self.lock:
            history, place = self._shown_history(sequence, "plot")
            return picture(history, place, layer, self.policy)

    def cache(self, prompt=None):
        """An empty cache under the policy, for model(..., cache=...) or generate(cache=...); older releases say
        past_key_values=. prompt: columns of a prompt that comes in pieces, where generate() does not say it."""
        return self._keep(_plain_cache(self.model), (prompt, None) if prompt else None)

    def cut(self, cache):
        """The event of the sequences of a cache comes now, by the program's word, such as at the end of a turn; those
        within the budget lose nothing. Under a policy that reads queries it takes trigger=named, so that they are kept.
        Raises InvalidArgument for a cache that this attach() did not make, StateError for one without tokens and in the
        middle of a prompt, but with prefill=pieces, and where queries that it reads were not kept."""
        self.require_block()
        rows = _rows_of(cache) if isinstance(cache, DynamicCache) else None
        if rows is None or rows.owner is not self:
            refuse(InvalidArgument, "cut: the cache is not under this attach(); allowed one that it made")
        if not rows.ids or rows.columns == 0:
            refuse(StateError, "cut: the cache holds no tokens; allowed after a forward")
        if rows.tokens is not None:
            rows.interrupted()
        if rows.broken:
            refuse(StateError, rows.broken)
        with self.lock:
            rows.named = rows.ids
            try:
                rows.confirm()
            finally:
                rows.named = ()

    def _keep(self, cache, prompt=None):
        rows = _rows_of(cache) if isinstance(cache, DynamicCache) else None
        if rows is not None:
            if rows.owner is not self:
                refuse(InvalidArgument, "the cache is under another attach(); allowed one that this attach() made")
            if not rows.ids and prompt is not None:
                rows.prompt = prompt
            return cache
        if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
            refuse(Unsupported, f"the cache is a {type(cache).__name__}; allowed DynamicCache, which generate() makes")
        if cache.get_seq_length() > 0:
            refuse(
                Unsupported,
                f"the cache holds {cache.get_seq_length()} tokens that kvkeep has not seen; allowed an empty one",
            )
        fresh = _plain_cache(self.model)
        if any(getattr(layer, "record_past", False) for layer in cache.layers):  # drafts will be taken back
            fresh.activate_past_recording()
        rows = Rows(self, fresh.layers, prompt)
        cache.layers, cache.layer_class_to_replicate = rows.layers, None
        cache.__class__ = KeptCache
        weakref.finalize(cache, rows.forget)
        return cache

    def _before_forward(self, module, args, kwargs):
        self._here.running = None  # of a forward that did not end
        if module is not self._decoder:  # of a copy of the model
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            refuse(
                Unsupported,
                "the forward is captured in a CUDA graph, and lengths change from step to step; allowed without",
            )
        if kwargs.get("output_attentions"):
            refuse(Unsupported, "output_attentions: weights are not formed under a policy; allowed without")
        name = next((n for n in CACHE_NAMES if kwargs.get(n) is not None), None)
        if name is None:
            if not kwargs.get("use_cache", getattr(module.config, "use_cache", False)):
                self._uncached = True
                return None
            name = cache_name(module)
            kwargs[name] = _plain_cache(self.model)
        cache = kwargs[name] = self._keep(kwargs[name], getattr(self._here, "prompt", None))
        rows = _rows_of(cache)
        ended = getattr(self._here, "ended", None)
        rows.before(kwargs.get("position_ids"), None if ended is None else ended.now)
        self._here.running = rows
        return args, kwargs

    def _after_forward(self, module, args, kwargs, output):
        rows = getattr(self._here, "running", None)
        if rows is not None and module is self._decoder:
            self._here.running = None
            rows.commit()

    def _generate(self, inner):
        """generate() as it is, but the length of its prompt gets known: of one in pieces, or with drafts behind it."""

        @wraps(inner)
        def generate(model, *args, **kwargs):
            if model is not self.model:
                return type(model).generate(model, *args, **kwargs)
            ids = next(
                (
                    x
                    for x in (*args[:1], *map(kwargs.get, ("inputs", "input_ids", "inputs_embeds")))
                    if isinstance(x, torch.Tensor)
                ),
                None,
            )
            mask = kwargs.get("attention_mask")
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or ids is None or mask.shape != ids.shape[:2]:
                mask = None
            before = getattr(self._here, "prompt", None), getattr(self._here, "ended", None)
            self._here.prompt = (ids.shape[1], mask) if ids is not None and ids.dim() >= 2 else None
            self._here.ended = ended = _Ended.of(model, args, kwargs)
            if ended is not None and len(args) < 4:  # the fourth is the stopping criteria
                kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), ended])
            try:
                return inner(*args, **kwargs)
            finally:
                self._here.prompt, self._here.ended = before

        return generate

    def __enter__(self):
        if self._decoder is not None:
            refuse(InvalidArgument, "attach() is entered twice; allowed once at a time")
        _refuse_nested(self.model)
        if self._unused is not None:
            self._unused.detach()
        model, decoder = self.model, decoder_of(self.model)
        self._given_back.enter_context(our_attention(model))
        for hook in (
            decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            decoder.register_forward_hook(self._after_forward, with_kwargs=True),
        ):
            self._given_back.callback(hook.remove)
        if hasattr(model, "generate"):
            if "generate" in model.__dict__:
                self._given_back.callback(setattr, model, "generate", model.generate)
            self._given_back.callback(model.__dict__.pop, "generate", None)
            model.generate = MethodType(self._generate(model.generate), model)
        self._decoder = decoder
        _entered.append(self)
        return self

    def __exit__(self, error, *_):
        self._given_back.close()
        self._decoder = None
        _entered.remove(self)
        if error is not None or self.events:
            return
        if self._nearest is not None:
            seen, away = self._nearest
            warnings.warn(
                f"kvkeep.hf: no event came: the longest sequence had {seen} tokens, and {self.policy} may cut one of "
                f"{seen + away}",
                stacklevel=2,
            )
        elif self._uncached and self._next == 0:
            warnings.warn(
                "kvkeep.hf: no event came: the model ran without a cache, and a policy cuts nothing else; allowed "
                "use_cache=True",
                stacklevel=2,
            )


class _Ended(StoppingCriteria):
    """Stops nothing. Learns which sequences of a batch have ended: after its end token, a sequence is given padding
    until all have ended, and generate() counts that as text."""

    def __init__(self, ends, pad):
        self.ends, self.pad, self.at_end, self.now = torch.tensor(ends), pad, None, None

    @classmethod
    def of(cls, model, args, kwargs):
        """None: generate() has no end token, or was told so."""
        configs = [kwargs.get("generation_config"), *args[1:2], getattr(model, "generation_config", None)]

        def value(name):
            if name in kwargs:
                return kwargs[name]
            return next((v for c in configs if (v := getattr(c, name, None)) is not None), None)

        ends, pad = value("eos_token_id"), value("pad_token_id")
        ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
        return cls(ends, ends[0] if pad is None else int(pad)) if ends else None

    def __call__(self, input_ids, scores, **kwargs):
        newest = input_ids[:, -1].cpu()
        if self.at_end is None:
            self.now = self.at_end = np.zeros(len(newest), bool)
        self.now = (self.now | self.at_end) & (newest == self.pad).numpy()
        self.at_end = torch.isin(newest, self.ends).numpy()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
