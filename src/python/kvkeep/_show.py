# SPDX-License-Identifier: Apache-2.0
"""What a History says, shown: a page over the text, and a picture."""

import html
import io

import numpy as np
import torch

from . import InvalidArgument
from ._kvkeep import _kept_page
from ._model import refuse

# Told apart by every kind of colour vision, and in grey by lightness.
_HELD, _GONE = (0x56 / 255, 0xA0 / 255, 0xD3 / 255), (0xE9 / 255,) * 3
_FIRST, _LAST = (0x7F / 255, 0xC4 / 255, 0xE8 / 255), (0x0B / 255, 0x35 / 255, 0x5C / 255)  # lines by depth


class Page(str):
    """A page of HTML; notebooks show it in a frame of its own."""

    def _repr_html_(self):
        return (
            f'<iframe srcdoc="{html.escape(self)}" style="width:100%;height:640px;border:0" title="what stayed">'
            "</iframe>"
        )


def pieces(tokenizer, ids):
    """The text of each token; a character that is spread over several tokens belongs to the last of them."""
    if tokenizer is None:
        return [f"{id} " for id in ids]
    plain = {"skip_special_tokens": False}
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):
        plain["clean_up_tokenization_spaces"] = False
    shown, before, first = [], 0, 0  # tokens [before, first) are context: a first token loses the blank before it
    for i in range(len(ids)):
        context, text = (tokenizer.decode(ids[before:end], **plain) for end in (first, i + 1))
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or i + 1 == len(ids) or i - first >= 8
        shown.append(text[len(context) :] if whole else "")
        if whole:
            before, first = first, i + 1
    return shown


def fed_ids(history, b, ids):
    """The token ids that sequence b has fed, of those that generate() returned."""
    ids = torch.as_tensor(ids).cpu()
    given, (batch, columns) = list(ids.shape), history.real.shape
    if ids.dim() == 2 and len(ids) in (1, batch):
        ids = ids[b if len(ids) > 1 else 0]
    if ids.dim() != 1 or len(ids) < columns:
        refuse(
            InvalidArgument,
            f"html: ids are {given}, and sequence {history.ids[b]} has fed {columns} columns, one of "
            f"{batch}; allowed what generate() returned: the prompt, and what was written",
        )
    return ids[:columns][torch.from_numpy(history.real[b])].tolist()


def page(history, b, tokenizer, ids, model, policy):
    heads, of_slot, stops = history.heads, np.repeat(history.of_slot, history.heads), []
    cuts = history.cuts[b]
    for event in [*range(1, len(cuts) + 1), None]:
        held = history.held(b, event)
        name = "the end" if event is None else f"event {event} of {len(cuts)}, after token {cuts[event - 1]}"
        rows = [np.flatnonzero(row).tolist() for row in held]
        stops.append((name, held.shape[1], int((held.sum(1) * of_slot).sum()), rows))
    return Page(
        _kept_page(
            model=model,
            policy=policy,
            pieces=pieces(tokenizer, fed_ids(history, b, ids)),
            prompt=history.prompt(b),
            layers=history.layers,
            kv_heads=heads,
            stops=stops,
        )
    )


def picture(history, b, layer, policy):
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ImportError(
            "kvkeep.hf: plot() needs matplotlib, which is not there; allowed after  python -m pip install matplotlib"
        ) from None

    class Picture(Figure):
        """A figure that notebooks show, whatever their backend."""

        def _repr_png_(self):
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=110)
            return out.getvalue()

    if layer is not None and layer not in history.layers:
        refuse(InvalidArgument, f"plot: layer {layer}; allowed {', '.join(map(str, history.layers))}")
    heads, tokens = history.heads, history.tokens(b)
    seen, slots = history.slots(b)
    held = history.held(b)
    if layer is None:
        what, names = "layer", history.layers
        share = held.reshape(len(names), heads, tokens).mean(1)
        lines = slots.reshape(len(names), heads, -1)
    else:
        what, names = "KV head", list(range(heads))
        own = slice(history.layers.index(layer) * heads, (history.layers.index(layer) + 1) * heads)
        share, lines = held[own].astype(float), slots[own][:, None]

    figure = Picture(figsize=(9, 2.9 + min(3.2, 0.9 + 0.11 * len(names))), layout="constrained")
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, min(3.2, 0.9 + 0.11 * len(names))])
    top.plot([0, tokens], [0, tokens], color="#8a8a8a", lw=1, ls=(0, (4, 3)), label="full cache")
    alike, ragged = bool((lines == lines[:1, :1]).all()), bool((lines != lines[:, :1]).any())
    for i, of_heads in enumerate(lines[:1] if alike else lines):
        depth = 1 if alike else i / max(1, len(lines) - 1)
        colour = tuple((1 - depth) * a + depth * b for a, b in zip(_FIRST, _LAST))
        name = f"every {what}" if alike else f"{what} {names[i]}" if i in (0, len(lines) - 1) else None
        if ragged:
            shade = "least to most of a layer's heads" if i == len(lines) - 1 else None
            top.fill_between(seen, of_heads.min(0), of_heads.max(0), color=colour, alpha=0.12, lw=0, label=shade)
        top.plot(seen, of_heads.mean(0), color=colour, lw=1.2, label=name)
    top.set_ylabel("slots held, per head" if layer is None else "slots held")
    top.set_ylim(0, 1.25 * slots.max() or 1)
    top.legend(loc="upper left", ncols=4, frameon=False, fontsize=8)
    top.set_title(policy if layer is None else f"{policy}: layer {layer}", loc="left", fontsize=10)

    strength = np.where(share > 0, 0.15 + 0.85 * share, 0)[..., None]
    image = strength * np.array(_HELD) + (1 - strength) * np.array(_GONE)
    low.imshow(image, aspect="auto", interpolation="nearest", extent=(0, tokens, len(names) - 0.5, -0.5))
    low.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    low.yaxis.set_major_formatter(lambda at, _: str(names[int(at)]) if 0 <= at < len(names) and at == int(at) else "")
    low.set_ylabel(what)
    low.set_xlabel("tokens seen (above), position in the text (below); blue: held at the end, the darker by more heads")
    for axes in (top, low):
        axes.axvline(history.prompt(b), color="black", lw=0.8, ls=(0, (5, 3)))
        axes.spines[["top", "right"]].set_visible(False)
    end = (history.prompt(b), 0)
    top.annotate("prompt ends", end, (-3, 4), ("data", "axes fraction"), "offset points", ha="right", fontsize=8)
    return figure
