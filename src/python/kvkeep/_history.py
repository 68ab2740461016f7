# SPDX-License-Identifier: Apache-2.0
"""What a policy did to the sequences of one cache, kept when the cache is gone: attach.html(), plot() and memory()."""

import weakref
from dataclasses import dataclass, field

import numpy as np


@dataclass
class LayerMemory:
    """Bytes of one layer's keys and values; Memory says what they mean."""

    layer: int
    now: int
    full: int
    peak: int


@dataclass
class Memory:
    """Bytes of keys and values in the layers with a full cache, and of no other part of the model."""

    now: int  #: of the slots that the rows hold; at its end, of a sequence whose cache is gone
    full: int  #: of the same tokens in a cache that drops nothing
    peak: int  #: the most of `now` at the end of any forward; the event that cuts it comes with the next one
    allocated: int  #: of the buffers as they are: room to grow, each row as long as the longest; 0 when they are gone
    layers: list = field(repr=False)  #: of LayerMemory, one for each layer with a full cache

    def __str__(self):
        return f"{self.now / 2**20:.1f} of {self.full / 2**20:.1f} MiB, at most {self.peak / 2**20:.1f} MiB"


class History:
    """The sequences of one cache. Two bytes for each token of each row; at an event, one pass over the rows' slots."""

    def __init__(self, rows):
        self.ids, self.layers, self.heads = list(rows.ids), list(rows.full), rows.spec.kv_heads
        self.cuts = [[] for _ in self.ids]  # tokens that a sequence had seen at each of its events
        # [rows, tokens]: 0, or the event, counted from 1, that dropped the token. What came after the last is held.
        self.gone = [np.zeros((len(rows.cut_rows), 0), np.uint16) for _ in self.ids]
        self.real, self.width = rows.real, rows.width
        self.of_slot = np.zeros(len(self.layers), np.int64)  # bytes of a slot of each layer
        self.now = self.most = with_sums(np.zeros((len(self.ids), len(self.layers)), np.int64))
        self.rows = weakref.ref(rows)

    def note(self, rows):
        """Tokens came, or were taken back."""
        self.real, self.width = rows.real, rows.width
        self.of_slot[:] = [
            sum(b.shape[3] * b.element_size() for b in apart(rows.buffers[index])) for index in self.layers
        ]
        self.now = self.bytes_in(rows)
        self.most = np.maximum(self.most, self.now)

    def cut(self, rows, report):
        """An event dropped something."""
        self.now = self.bytes_in(rows)
        for one in report.cuts if self.gone is not None else ():
            b = self.ids.index(one.sequence)
            self.cuts[b].append(one.logical_length)
            event, before = len(self.cuts[b]), self.gone[b]
            kind = np.uint32 if event > np.iinfo(np.uint16).max else before.dtype
            gone = self.gone[b] = np.zeros((len(before), one.logical_length), kind)
            gone[:, : before.shape[1]] = before
            for r in range(len(gone)):
                dropped = gone[r] == 0
                dropped[rows.keeper.positions(one.sequence, self.layers[r // self.heads], r % self.heads)] = False
                gone[r, dropped] = event

    def forget(self):
        """Which tokens were dropped. Bytes stay known."""
        self.gone = None

    def bytes_in(self, rows):
        """int64 [sequences + 1, layers + 1] of the slots that are held; sums stand last."""
        held = rows.lengths[:, rows.cut_rows].reshape(len(self.ids), len(self.layers), self.heads)
        return with_sums(held.sum(2, dtype=np.int64) * self.of_slot)

    # ---- What is asked of it

    def tokens(self, b):
        """That sequence b has seen."""
        return int(self.real[b].sum())

    def prompt(self, b):
        return int(self.real[b, : self.width].sum())

    def held(self, b, event=None):
        """bool [rows, tokens]: what the rows held right after an event, counted from 1; None: at the end."""
        count = self.tokens(b) if event is None else self.cuts[b][event - 1]
        known = self.gone[b][:, :count]
        held = np.ones((len(known), count), bool)
        held[:, : known.shape[1]] = (known == 0) | (known > (len(self.cuts[b]) if event is None else event))
        return held

    def slots(self, b):
        """Tokens seen, [points], and the slots of each row by then, [rows, points]: before and after every event."""
        seen, slots = [0], [np.zeros(len(self.gone[b]), np.int64)]
        for event, at in enumerate([*self.cuts[b], self.tokens(b)], 1):
            slots.append(slots[-1] + at - seen[-1])
            seen.append(at)
            if event <= len(self.cuts[b]):
                slots.append(self.held(b, event).sum(1))
                seen.append(at)
        return np.array(seen), np.stack(slots, 1)

    def memory(self, b=None):
        """Of one sequence; None: of all."""
        full = with_sums(np.array([self.tokens(i) for i in range(len(self.ids))])[:, None] * self.heads * self.of_slot)
        rows, allocated = self.rows(), 0
        if rows is not None and rows.ids == self.ids:
            allocated = sum(buffer.nbytes for both in rows.buffers if both for buffer in apart(both))
        now, full, peak = (table[-1 if b is None else b].tolist() for table in (self.now, full, self.most))
        return Memory(
            now[-1],
            full[-1],
            peak[-1],
            allocated if b is None else allocated // len(self.ids),
            [LayerMemory(*numbers) for numbers in zip(self.layers, now, full, peak)],
        )


def apart(both):
    """Of (keys, values), what lies by itself: values of latent rows lie within the keys."""
    keys, values = both
    return both if keys.untyped_storage().data_ptr() != values.untyped_storage().data_ptr() else (keys,)


def with_sums(table):
    table = np.concatenate([table, table.sum(0, keepdims=True)])
    return np.concatenate([table, table.sum(1, keepdims=True)], 1)
