# SPDX-License-Identifier: Apache-2.0
"""A transformers cache under a policy: the rows of its sequences, and what happens to them in a forward.

Per layer, keys and values lie in a buffer [batch, KV heads, capacity, head size] of our own, without padding; an event
moves the slots that stay to its front. transformers sees the logical length, so positions and masks go on as if
nothing had been dropped.

A forward ends in commit(). Until then lengths are those before it, so that one that was interrupted leaves no trace in
full layers. Events come at the start of the next forward, when every token that stays is confirmed.
"""

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

try:
    from transformers.cache_utils import LinearAttentionLayer
except ImportError:  # releases whose caches have no states
    LinearAttentionLayer = None

from . import OPEN_PROMPT, InvalidArgument, StateError, Unsupported
from ._history import History, apart
from ._model import absorbed, expand, has_state, refuse, row_of, softmax, tag, turned_into

_ROLLBACK = 32  # tokens that Keeper.truncate() can always take back


def rows_of(cache):
    """Of a cache under a policy; None: it is not."""
    return next((layer.rows for layer in cache.layers if isinstance(layer, KeptLayer)), None)


class KeptLayer(DynamicLayer):
    """A layer whose length is the logical one. It may have a state besides, which no policy sees."""

    def of(self, rows, index):
        self.rows, self.index, self.columns = rows, index, 0
        self.new = None  # (keys, values) of the step, until they are in the buffers
        self.given = None  # what the model attends to: these, or the heads that it makes of them
        self.latent = False  # it makes heads of rows at each step
        return self

    def update(self, key_states, value_states, *args, **kwargs):
        self.is_initialized = True
        self.rows.arrive(self, key_states, value_states)
        self.columns += key_states.shape[-2]
        self.given = key_states, value_states
        tag(key_states, self)
        return key_states, value_states

    def expanded(self, latent, turned, keys, values):
        if self.new is None or latent is not self.new[0] or turned is not self.new[1]:
            refuse(
                Unsupported, f"layer {self.index} makes heads of other rows than those in its cache; allowed its own"
            )
        self.new, self.given, self.latent = row_of(latent, turned), (keys, values), True
        tag(keys, self)

    def attend(self, module, query, key, value, mask, dropout, scaling, kwargs):
        return self.rows.attend(self, module, query, key, value, mask, dropout, scaling, kwargs)

    def get_seq_length(self):
        return self.columns

    def get_mask_sizes(self, new):
        """new: columns of the step; releases up to 5.2 pass their positions."""
        return self.columns + (new if isinstance(new, int) else len(new)), 0

    def crop(self, length):
        refuse(Unsupported, "crop() of one layer; allowed that of the cache")

    def crop_state(self, length):
        LinearAttentionLayer.crop(self, length)

    def reset(self):
        self.rows.forget()
        self.columns, self.is_initialized, self.keys, self.values = 0, False, None, None
        if has_state(self):
            super().reset()

    def reorder_cache(self, beam_idx):
        refuse(Unsupported, "beam search moves a sequence's cache to another; allowed greedy decoding and sampling")

    def batch_repeat_interleave(self, repeats):
        refuse(Unsupported, "the cache was asked to repeat its sequences; allowed one cache entry per sequence")

    def batch_select_indices(self, indices):
        refuse(
            Unsupported, "the cache was asked to select sequences; allowed all of them, from the first step to the last"
        )


def goes_back(layer):
    """The newest tokens can be taken from what a layer of transformers holds beside our rows."""
    recorded = getattr(layer, "record_past", False)
    if has_state(layer):
        return recorded and layer.is_croppable
    window = getattr(layer, "sliding_window", None)
    return window is None or recorded or layer.get_seq_length() < window


class KeptCache(DynamicCache):
    """A DynamicCache some of whose layers are under a policy."""

    def crop(self, length):
        """length: below 0, tokens to remove; above it, those to keep, as releases up to 5.2 call it. Throws StateError,
        and nothing has changed, for tokens before the last event, and where a layer's state or window cannot go
        back."""
        rows = rows_of(self)
        columns = -length if length <= 0 else max(0, rows.columns - length)
        stays = next((i for i, layer in enumerate(self.layers) if not goes_back(layer)), None) if columns > 0 else None
        if stays is not None:
            refuse(
                StateError,
                f"crop: {columns} columns, and layer {stays} holds a state or a window that cannot go back; allowed "
                "with models of full attention, within a window, and where the cache records its past",
            )
        rows.crop(columns)
        for layer in self.layers:
            if not isinstance(layer, KeptLayer):
                layer.crop(length)
            elif has_state(layer) and columns > 0:
                layer.crop_state(length)

    def __deepcopy__(self, memo):
        refuse(Unsupported, "a cache under a policy was to be copied; allowed a cache for each text")


class Rows:
    """The sequences of one cache: their rows, and their lengths."""

    def __init__(self, owner, layers, prompt=None):
        self.owner, self.keeper, self.spec = owner, owner.keeper, owner.keeper.spec
        self.full = self.spec.full_layers
        self.cut_rows = [index * self.spec.kv_heads + head for index in self.full for head in range(self.spec.kv_heads)]
        self.layers = [
            turned_into(KeptLayer, layer).of(self, i) if i in self.full else layer for i, layer in enumerate(layers)
        ]
        self.prompt = prompt  # (columns, [batch, columns] mask or None) of the prompt, if they were announced
        self.position_ids = self.ended = None
        self.clear()

    def clear(self):
        self.buffers = [None] * self.spec.num_layers
        self.ids, self.lengths, self.columns = [], None, 0
        self.history = None  # the owner keeps it when the cache is gone
        self.real = None  # bool [batch, columns]: not padding
        self.width = 0  # columns of the prompt
        self.open = False  # the keeper will be told of its end
        self.pending = None  # a step that the keeper has not been shown: its tokens may be taken back
        self.broken = None
        self.named = ()  # sequences whose event the program has named
        self.quit_step()

    def quit_step(self):
        self.tokens, self.held = None, {}
        for index in self.full:
            self.layers[index].new = self.layers[index].given = None
            self.layers[index].columns = self.columns

    def forget(self):
        with self.owner.lock:
            for id in self.ids:
                self.keeper.leave(id)
            self.prompt = None
            self.clear()

    def heads(self, layer):
        """int32 [batch, KV heads]: slots of a layer, a view."""
        first = layer * self.spec.kv_heads
        return self.lengths[:, first : first + self.spec.kv_heads]

    # ---- A forward

    def before(self, position_ids, ended=None):
        """A forward begins: what was computed is confirmed, and what is due is cut. ended: bool [batch]; what these
        sequences are given is padding; None: nobody knows."""
        if self.tokens is not None:
            self.interrupted()
        self.position_ids, self.ended = position_ids, ended
        if self.broken:
            refuse(StateError, self.broken)
        if self.columns == 0:  # a first step that did not end
            prompt = self.prompt
            self.forget()
            self.prompt = prompt
            return
        self.confirm()

    def confirm(self):
        """What was computed is confirmed, and what is due is cut."""
        with self.owner.lock:
            if self.pending is not None:
                self.show(*self.pending)
                self.pending = None
            self.cut()

    def interrupted(self):
        states = any(
            has_state(layer) or not isinstance(layer, KeptLayer) and type(layer).__name__ != "DummyLayer"
            for layer in self.layers
        )
        if states:
            self.broken = (
                "a forward over this cache was interrupted, and its layers differ in length; allowed a new cache"
            )
        self.quit_step()

    def arrive(self, layer, keys, values):
        if layer.new is not None or layer.index in self.held:
            refuse(Unsupported, f"layer {layer.index} updates its cache twice in a step; allowed once")
        self.owner.require_block()
        if keys.device.type != "cpu":
            refuse(Unsupported, f"the cache is on {keys.device}; allowed the CPU in this build of the package")
        layer.new = keys, values

    def attend(self, layer, module, query, key, value, mask, dropout, scaling, kwargs):
        columns = query.shape[2]
        if layer.index not in self.held:
            if layer.new is None or key is not layer.given[0] or value is not layer.given[1]:
                refuse(
                    Unsupported,
                    f"layer {layer.index} attends to other keys or values than those in its cache; allowed models "
                    "that attend to what the cache returned",
                )
            if self.tokens is None:
                self.begin(key.shape[0], columns, mask)
            self.append(layer)
            self.remember(layer, module, query)
        causal = kwargs.pop("is_causal", None)
        if mask is None and columns > 1 and not (getattr(module, "is_causal", True) if causal is None else causal):
            refuse(Unsupported, f"layer {layer.index} attends to later tokens; allowed causal attention")
        seen = self.mask_of(layer.index, mask, columns, layer.keys.shape[2])
        even = isinstance(seen, str)
        return softmax(
            module,
            query,
            *self.heads_of(layer, module),
            None if even else seen,
            dropout,
            scaling,
            is_causal=even and seen == "causal",
            **kwargs,
        )

    def begin(self, batch, columns, mask):
        """The first layer of a step: which of its columns are tokens, and what will be asked of their queries."""
        if torch.is_grad_enabled() and self.owner.model.training:
            refuse(
                Unsupported,
                "the model trains, and no gradient goes through a cache under a policy; allowed model.eval() or "
                "torch.no_grad()",
            )
        if self.ids and batch != len(self.ids):
            refuse(
                InvalidArgument, f"a step of {batch} sequences after steps of {len(self.ids)}; allowed the same ones"
            )
        self.given, self.mask = mask, self.bools(mask, columns)
        new = np.ones((batch, columns), bool)
        if self.mask is not None:
            new[:] = self.mask[:, 0].diagonal(self.columns, 1, 2).numpy()
        if (
            self.ended is not None
            and 1 < batch == len(self.ended)
            and self.ids
            and self.keeper.tokens_to_event(self.ids[0]) is not None
        ):
            new[self.ended] = False
        real = new if self.real is None else np.concatenate([self.real, new], 1)
        if not self.ids:
            self.join(batch, columns, new)
        self.check_positions(new)
        self.after, self.new = real, new
        if self.mask is not None and self.is_plain():
            self.mask = None
        self.tokens = new.sum(1).astype(np.int32)
        held = self.lengths[:, self.cut_rows]
        first = int(held[0, 0])
        # Slots of every row, if they are alike.
        self.flat = first if bool((held == first).all()) and bool(new.all()) else None
        with self.owner.lock:
            self.plan_queries(columns)

    def bools(self, mask, columns):
        """The model's mask as bool [batch or 1, 1, columns, all columns]; True: is seen."""
        if mask is None:
            return None
        width = self.columns + columns
        if (
            not isinstance(mask, torch.Tensor)
            or mask.dim() != 4
            or mask.shape[1] != 1
            or tuple(mask.shape[2:]) != (columns, width)
        ):
            shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            refuse(Unsupported, f"the model's mask of a full layer is {shape}; allowed [batch, 1, {columns}, {width}]")
        if mask.dtype == torch.bool:
            return mask
        least = torch.finfo(mask.dtype).min / 2
        if bool(((mask != 0) & (mask > least)).any()):
            refuse(
                Unsupported,
                "the model's mask of a full layer holds other numbers than 0 and the least; allowed masks that hide "
                "or show",
            )
        return mask == 0

    def is_plain(self):
        """Every token sees the tokens up to itself: padding is never seen, and what padding sees does not matter."""
        real, new = torch.from_numpy(self.after), torch.from_numpy(self.new)
        seen = real[:, None] & torch.ones(new.shape[1], real.shape[1], dtype=torch.bool).tril(self.columns)
        return bool((self.mask[:, 0].expand_as(seen) == seen)[new].all())

    def join(self, batch, columns, new):
        """Sequences begin. Their prompts are the announced ones, or else this step."""
        prompts = [None] * batch
        self.width, self.open = columns, False
        if self.prompt is not None:
            self.width, mask = self.prompt
            if mask is not None and batch % len(mask) == 0:
                prompts = mask.sum(1).repeat_interleave(batch // len(mask)).tolist()
            elif self.width <= columns:
                prompts = new[:, : self.width].sum(1).tolist()
            else:
                prompts, self.open = [OPEN_PROMPT] * batch, True
        with self.owner.lock:
            self.ids = [self.owner.next_id() for _ in range(batch)]
            for id, prompt in zip(self.ids, prompts):
                self.keeper.join(id, 0, prompt)
        self.lengths = np.zeros((batch, self.spec.num_layers * self.spec.kv_heads), np.int32)
        self.real = np.zeros((batch, 0), bool)
        self.history = self.owner.remembered(History(self))

    def check_positions(self, new):
        """A policy that turns queries back does so from the position of a token among those of its sequence."""
        if not self.keeper.turns:
            return
        first, columns = self.real.sum(1), new.shape[1]
        given = self.position_ids
        if given is None:
            given = torch.arange(self.columns, self.columns + columns)
        if given.shape[-1] != columns:
            refuse(Unsupported, f"position_ids are {list(given.shape)} for {columns} tokens; allowed one position each")
        given = given.cpu().reshape(-1, *([1] if given.dim() == 1 else given.shape[-2:-1]), columns)
        for axis in given.numpy():
            for b, row in enumerate(new):
                at = axis[b if len(axis) > 1 else 0][row]
                want = first[b] + np.arange(len(at))
                if (at != want).any():
                    wrong = int(np.flatnonzero(at != want)[0])
                    refuse(
                        Unsupported,
                        f"token {int(want[wrong])} of sequence {self.ids[b]} is at position {int(at[wrong])}, and the "
                        "policy turns queries or keys from where they are in the text; allowed position_ids that "
                        "count the tokens of each sequence",
                    )

    def plan_queries(self, columns):
        """Which of the newest columns keep their queries for the keeper: those that an event may read."""
        read = self.keeper.queries_read
        self.keep = 0
        if read > 0:
            away = [self.keeper.tokens_to_event(id) for id in self.ids]
            if self.open:  # its end is known in columns
                away = [min(self.width - self.columns, a) for a in away]
            if any(
                a is not None and t > a - read
                for a, t in zip(away, [columns] * len(away) if self.open else self.tokens)
            ):
                last = read + max(_ROLLBACK, self.unsure())  # tokens, whatever padding is behind or between them
                firsts = (int(real[-last:][0]) for row in self.new if len(real := np.flatnonzero(row)))
                self.keep = columns - min(firsts, default=columns)

    def unsure(self):
        """Columns of the step behind the prompt: drafts, perhaps."""
        return max(0, self.after.shape[1] - max(self.columns, self.width))

    def append(self, layer):
        """Writes the new rows behind those in use."""
        keys, values = (new.detach() if new.requires_grad else new for new in layer.new)
        held, most = self.heads(layer.index), int(self.tokens.max())
        longest = int(held.max()) if self.flat is None else self.flat
        needed = longest + most
        both = self.buffers[layer.index]
        if both is None or both[0].shape[2] < needed:
            room = needed if both is None else needed + needed // 2
            both = self.give_room(layer, (keys, values), room, longest)
        for buffer, new in zip(apart(both), (keys, values)):
            if self.flat is not None:
                buffer[:, :, longest:needed] = new
            elif most == 1:  # one token each, at places of their own; for none, behind what is held
                newest = new[torch.arange(len(self.ids)), :, torch.from_numpy(self.new.argmax(1))]
                buffer.scatter_(
                    2,
                    torch.from_numpy(held.astype(np.int64))[:, :, None, None].expand(
                        *newest.shape[:2], 1, newest.shape[2]
                    ),
                    newest[:, :, None],
                )
            else:
                for b, row in enumerate(self.new):
                    fresh = new[b][:, torch.from_numpy(row)]
                    for h in range(held.shape[1]):
                        buffer[b, h, held[b, h] : held[b, h] + len(fresh[h])] = fresh[h]
        layer.keys, layer.values = both[0][:, :, :needed], both[1][:, :, :needed]
        layer.new = None

    def give_room(self, layer, like, room, held):
        """Buffers of `room` slots, with the first `held` of those before. Values of latent rows lie within the keys."""
        old = self.buffers[layer.index] or (None, None)
        keys = moved(old[0], like[0], room, held)
        within = keys[..., keys.shape[3] - like[1].shape[3] :]
        values = within if layer.latent else moved(old[1], like[1], room, held)
        self.buffers[layer.index] = keys, values
        return keys, values

    def heads_of(self, layer, module):
        """Keys and values over the slots of a layer. The model makes them of latent rows, at each step anew."""
        if not layer.latent:
            return layer.keys, layer.values
        if layer.given[0].shape[2] == layer.keys.shape[2] and self.flat is not None:  # the step is all there is
            return layer.given
        return expand(module, layer.keys, layer.values)

    def remember(self, layer, module, query):
        columns = query.shape[2]
        if self.keep == 0:
            self.held[layer.index] = None
            return
        newest = query[:, :, columns - self.keep :].detach()
        if layer.latent:
            newest = absorbed(module, newest, (layer.keys, layer.values))
        self.held[layer.index] = newest.clone() if 2 * self.keep < columns else newest

    def mask_of(self, index, mask, columns, slots):
        """What each query sees: "all", "causal", or bool [batch, Hq or 1, columns, slots]. A layer that reads another
        one's cache may ask for the newest columns alone."""
        given = None if self.given is None else self.given[:, :, -columns:]
        alike = mask is self.given or (mask is None and given is None)
        if not alike and (mask is None or given is None or not torch.equal(mask, given)):
            refuse(Unsupported, f"layer {index} has a mask of its own; allowed full layers of one mask")
        if self.flat is not None and self.mask is None and columns in (1, slots):
            return "all" if columns == 1 else "causal"
        held = self.heads(index) + self.tokens[:, None]
        if self.mask is not None:
            return self.by_column(index, held, slots)[:, :, -columns:]
        ragged = bool((held != held[:, :1]).any())
        after = torch.from_numpy(np.ascontiguousarray(held if ragged else held[:, :1])).long()[:, :, None, None]
        later = torch.from_numpy(self.tokens[:, None] - self.new.cumsum(1))  # tokens of the step behind each column
        later = later.long()[:, None, -columns:, None]
        seen = torch.arange(slots) < (after - later).clamp(min=1)  # padding sees something, and is never read
        return seen.repeat_interleave(self.spec.query_heads // self.spec.kv_heads, dim=1) if ragged else seen

    def by_column(self, index, held, slots):
        """The model's own mask, at the columns of the slots that are held."""
        batch, heads = held.shape
        columns = np.zeros((batch, heads, slots), np.int64)
        for b, id in enumerate(self.ids):
            where = np.flatnonzero(self.after[b])
            for h in range(heads):
                known = self.keeper.positions(id, index, h)
                count = int(held[b, h])
                newer = np.arange(len(where) - (count - len(known)), len(where))
                columns[b, h, :count] = where[np.concatenate([known, newer]).astype(np.int64)] if count else 0
        at = torch.from_numpy(columns)[:, :, None].expand(-1, -1, self.mask.shape[2], -1)
        seen = self.mask.expand(batch, -1, -1, -1).expand(-1, heads, -1, -1).gather(3, at)
        seen = seen & (torch.arange(slots) < torch.from_numpy(held.astype(np.int64))[:, :, None, None])
        seen[..., :1] |= ~seen.any(-1, keepdim=True)  # padding sees something, and is never read
        return seen.repeat_interleave(self.spec.query_heads // self.spec.kv_heads, dim=1)

    # ---- Between forwards

    def commit(self):
        """A forward has ended: its tokens count."""
        missing = next((i for i in self.full if i not in self.held), None)
        if missing is not None:
            refuse(
                Unsupported,
                f"attention of layer {missing} did not come through transformers' attention interface in this step; "
                "allowed models where it does in every step",
            )
        self.lengths[:, self.cut_rows] += self.tokens[:, None]
        step = self.new, self.held, self.keep
        unsure = self.unsure()
        self.real, self.columns = self.after, self.after.shape[1]
        self.tokens, self.held = None, {}
        with self.owner.lock:
            self.history.note(self)
            if unsure > _ROLLBACK and self.keeper.queries_read != 0:
                self.pending = step
            else:
                self.show(*step)
            if self.open and self.columns >= self.width:
                self.open = False
                for id in self.ids:
                    self.keeper.end_prompt(id)

    def show(self, new, held, keep):
        """Tells the keeper of a step's tokens, with the queries of its newest `keep` columns."""
        before = new.copy()
        before[:, new.shape[1] - keep :] = False
        if keep < new.shape[1] and before.any():
            for index in self.full if self.keeper.queries_read else self.full[:1]:
                self.observe(index, before, None)
        if keep > 0:
            newest = new[:, new.shape[1] - keep :]
            for index in self.full:
                self.observe(index, newest, held[index][:, :, : newest.shape[1]])

    def observe(self, index, new, query):
        """new: bool [batch, columns]; query: [batch, Hq, columns, D] after RoPE; None: not read."""
        indptr = [0, *np.cumsum(new.sum(1)).tolist()]
        if query is None:
            self.keeper.observe(index, self.ids, indptr, unread=True)
            return
        by_token = query.detach().transpose(1, 2)
        queries = by_token.reshape(-1, *by_token.shape[2:]) if new.all() else by_token[torch.from_numpy(new)]
        self.keeper.observe(index, self.ids, indptr, queries, basis="post_rope")

    def cut(self):
        layers = [self.buffers[index] if index in self.full else None for index in range(self.spec.num_layers)]
        report = self.keeper.step(layers, self.ids, self.lengths, named=self.named)
        self.owner.note(report, self)
        if not report.cuts:
            return
        self.history.cut(self, report)
        for index in self.full:
            longest = int(self.heads(index).max())
            if self.buffers[index][0].shape[2] > 2 * (longest + 256):  # a long prompt's room goes back
                self.give_room(self.layers[index], self.buffers[index], longest + 128, longest)

    def crop(self, columns):
        """Takes back the newest columns."""
        if self.tokens is not None:
            self.interrupted()
        if columns == 0 or not self.ids:
            return
        if columns > self.columns:
            refuse(InvalidArgument, f"crop: {columns} columns of a cache of {self.columns}; allowed up to all of them")
        gone = self.real[:, self.columns - columns :].sum(1).astype(np.int32)
        with self.owner.lock:
            rest = columns
            if self.pending is not None:
                new, held, keep = self.pending
                rest = max(0, columns - new.shape[1])
                left = new.shape[1] - (columns - rest)
                taken = new.shape[1] - left
                self.pending = (new[:, :left], held, max(0, keep - taken)) if left > 0 else None
            shown = self.real[:, self.columns - columns : self.columns - columns + rest].sum(1)
            for id, tokens in zip(self.ids, shown):
                self.keeper.truncate(id, self.keeper.logical_length(id) - int(tokens))
        self.lengths[:, self.cut_rows] -= gone[:, None]
        self.real, self.columns = self.real[:, : self.columns - columns], self.columns - columns
        with self.owner.lock:
            self.history.note(self)
        self.quit_step()


def moved(old, like, room, held):
    """A buffer of `room` slots with the first `held` of an older one."""
    new = like.new_zeros((like.shape[0], like.shape[1], room, like.shape[3]))
    if old is not None:
        new[:, :, :held] = old[:, :, :held]
    return new
