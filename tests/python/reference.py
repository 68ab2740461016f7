# SPDX-License-Identifier: Apache-2.0
"""What attach() must do, by transformers alone: the model over its whole cache, with the tokens that a policy would
have dropped masked in each head. TOVA and KeyDiff choose here, by their papers; other policies in a keeper that is
given what the plain model computes. Slow; one sequence."""

import contextlib

import numpy as np
import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

import kvkeep

BUDGET, INTERVAL, SINK, RECENT = 40, 8, 4, 6
OPTIONS = f"budget={BUDGET},interval={INTERVAL},prefill=cut,recent={RECENT},sink={SINK}"


class Reference:
    """Runs a text step by step. held: by layer and KV head, the positions that it attends to."""

    running = None

    def __init__(self, model, spec, cache, choose):
        self.model, self.spec, self.cache, self.choose = model, spec, cache, choose
        self.held = {l: [[] for _ in range(spec.kv_heads)] for l in spec.full_layers}
        self.seen, self.newest, self.keys, self.values, self.queries = 0, {}, {}, {}, {}

    def layer_of(self, module, key):
        """The full layer whose cache is attended to; None: it is not one."""
        for i in self.held:
            held = getattr(self.cache.layers[i], "keys", None)
            if held is not None and held.data_ptr() == key.data_ptr():
                return i
        index = getattr(module, "layer_idx", None)
        return index if index in self.held and hasattr(module, "expand_kv") else None

    def attention(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **more):
        heads, columns, tokens = query.shape[1], query.shape[2], key.shape[2]
        index = self.layer_of(module, key)
        wide = heads // key.shape[1]
        logits = query.float() @ key.float().repeat_interleave(wide, 1).transpose(2, 3)
        logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if more.get("softcap") is not None:
            logits = more["softcap"] * (logits / more["softcap"]).tanh()
        mask = attention_mask
        if mask is None:
            mask = torch.ones(columns, tokens, dtype=torch.bool).tril(tokens - columns)[None, None]
        mask = mask if mask.dtype == torch.bool else mask >= 0
        if index is not None:
            alive = torch.zeros(len(self.held[index]), tokens, dtype=torch.bool)
            alive[:, self.seen :] = True
            for h, positions in enumerate(self.held[index]):
                alive[h, positions] = True
            mask = mask & alive.repeat_interleave(heads // len(alive), 0)[None, :, None]
        logits = logits.masked_fill(~mask, float("-inf"))
        if more.get("s_aux") is not None:
            sink = more["s_aux"].float().reshape(1, heads, 1, 1).expand(1, heads, columns, 1)
            weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        if index is not None and index not in self.newest:
            self.write_down(index, module, query, weights)
        out = weights.to(value.dtype) @ value.repeat_interleave(heads // value.shape[1], 1)
        return out.transpose(1, 2).contiguous(), None

    def write_down(self, index, module, query, weights):
        layer = self.cache.layers[index]
        self.newest[index], self.keys[index], self.values[index] = weights[0, :, -1], layer.keys[0], layer.values[0]
        self.queries[index] = query[0].transpose(0, 1)
        if hasattr(module, "expand_kv"):  # latent rows: values lie in the keys, and W_UK goes into the queries
            nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
            up = module.kv_b_proj.weight.view(query.shape[1], -1, rank)[:, :nope]
            plain = torch.einsum("htd,hdr->thr", query[0, ..., :nope], up)
            self.queries[index] = torch.cat([query[0, ..., nope:].transpose(0, 1), plain], -1)
            self.keys[index], self.values[index] = torch.cat([layer.values, layer.keys], -1)[0], layer.keys[0]

    def step(self, ids, **cache):
        """Logits of the next tokens of the text."""
        self.newest, Reference.running = {}, self
        logits = self.model(ids, use_cache=True, **cache).logits
        for rows in self.held.values():
            for positions in rows:
                positions += range(self.seen, self.seen + ids.shape[1])
        self.seen += ids.shape[1]
        return logits

    def cut(self, prompt):
        """Between two forwards: what is due is cut. True: something was."""
        due = any(len(p) >= BUDGET + INTERVAL or (prompt and len(p) > BUDGET) for r in self.held.values() for p in r)
        if isinstance(self.choose, str):
            return self.step_of_keeper()
        if due:
            for index, rows in self.held.items():
                self.held[index] = self.choose(self, index, rows)
        return due

    def best(self, positions, scores):
        """Of one row: sinks, recents, and the slots of the highest scores; of equal ones the newer."""
        count = len(positions)
        middle = sorted(range(SINK, count - RECENT), key=lambda t: (-float(scores[t]), -t))[: BUDGET - SINK - RECENT]
        return [positions[t] for t in sorted([*range(SINK), *middle, *range(count - RECENT, count)])]

    # ---- Policies of a keeper, which moves copies of the plain model's keys and values

    def step_of_keeper(self):
        if not hasattr(self, "keeper"):
            self.keeper, self.known = kvkeep.Keeper(self.spec, self.choose), 0
            self.keeper.join(0, 0, self.seen)
            self.lengths = np.zeros((1, self.spec.num_layers * self.spec.kv_heads), np.int32)
            room = [1, self.spec.kv_heads, 4096]
            self.rows = {l: (torch.zeros(*room, self.spec.key_dim), torch.zeros(*room, self.spec.value_dim))
                         for l in self.held}  # fmt: skip
        new, heads = self.seen - self.known, self.spec.kv_heads
        for index, both in self.rows.items():
            for h in range(heads):
                first = self.lengths[0, index * heads + h]
                for row, all_of_it in zip(both, (self.keys, self.values)):
                    row[0, h, first : first + new] = all_of_it[index][h, self.known :]
            self.lengths[0, index * heads : (index + 1) * heads] += new
            self.keeper.observe(index, [0], [0, new], self.queries[index][-new:].contiguous(), basis="post_rope")
        self.known = self.seen
        layers = [self.rows.get(l) for l in range(self.spec.num_layers)]
        cut = bool(self.keeper.step(layers, [0], self.lengths).cuts)
        for index, rows in self.held.items():
            self.held[index] = [self.keeper.positions(0, index, h).tolist() for h in range(len(rows))]
        return cut


def tova(reference, index, rows):
    """The newest query's attention, mean over all query heads of the layer, slot by slot."""
    weights = reference.newest[index]
    wide = len(weights) // len(rows)
    by_head = [weights[h * wide : (h + 1) * wide, positions].mean(0) for h, positions in enumerate(rows)]
    scores = torch.stack(by_head).mean(0)
    return [reference.best(positions, scores) for positions in rows]


def keydiff(reference, index, rows):
    """Minus the cosine of a key with the mean direction of the row's keys."""
    kept = []
    for h, positions in enumerate(rows):
        keys = torch.nn.functional.normalize(reference.keys[index][h, positions].double(), dim=-1)
        kept.append(reference.best(positions, -torch.nn.functional.cosine_similarity(keys, keys.mean(0)[None], dim=-1)))
    return kept


BY_HAND = {"tova": tova, "keydiff": keydiff}

AttentionInterface.register("reference", lambda *given, **more: Reference.running.attention(*given, **more))
AttentionMaskInterface.register("reference", sdpa_mask)


@contextlib.contextmanager
def under_reference(model):
    """Attention of the model is ours."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    before = [(c, c._attn_implementation_internal) for c in configs.values()]
    for config, _ in before:
        config._attn_implementation_internal = "reference"
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
