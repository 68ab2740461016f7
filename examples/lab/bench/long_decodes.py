#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes samples of long decodes, whose answers depend on what was told, asked and written long before.

    long_decodes.py OUT.jsonl TEXT=FILE [TEXT=FILE ...] [--samples 6] [--characters 1800] [--seed 1]

A sample is a log: prose of the text, with short entries between its paragraphs. `kvkeep eval --samples-in OUT.jsonl
--stream-after 32` feeds it token by token, with events on the way, and lets the model write how it goes on. Four tasks,
each with --samples samples of every text:

  facts        eight access codes are told along the way; one of the first four is asked for at the end, for the first
               time
  asked        the same, but that code was asked for and written behind the fifth and the seventh of nine pieces as well
  asked-early  the same, but it is one of the first two, asked for behind the third and the fourth piece
  list         a running list: behind every piece of text the log adds an item and repeats all items so far; six in all
"""

import argparse
import json
import random
import sys

PLACES = (
    "harbour library observatory bakery greenhouse foundry chapel stable "
    "lighthouse theatre quarry brewery orchard museum station tannery"
).split()
ITEMS = (
    "lantern kettle anchor violin ladder compass blanket hammer "
    "mirror barrel candle whistle saddle bucket needle trumpet"
).split()
COLOURS = "red blue green yellow white black brown silver".split()


def prose(text, rng, count, pieces):
    """Pieces of about `count` characters in all, of whole words, in the order of the text, from a random place."""
    at, each = rng.randrange(len(text) - count), count // pieces
    return [" ".join(text[at + i * each : at + (i + 1) * each].split()[1:-1]) for i in range(pieces)]


def code_of(place, code=None):
    return "The access code of the %s is" % place + ("" if code is None else " %s.\n" % code)


def facts(text, rng, count, first, asked_behind):
    places = rng.sample(PLACES, 8)
    codes = [str(rng.randrange(1000, 10000)) for _ in places]
    wanted = rng.randrange(first)
    parts = ["This log tells access codes between pieces of text.\n\n"]
    for i, piece in enumerate(prose(text, rng, count, 9)):
        parts.append(piece + "\n\n")
        if i < 8:
            parts.append("Entry: " + code_of(places[i], codes[i]) + "\n")
        if i in asked_behind:
            parts.append("Asked again: " + code_of(places[wanted], codes[wanted]) + "\n")
    parts.append("Asked again: ")
    return "".join(parts).rstrip(" "), code_of(places[wanted]), [codes[wanted]]


def running_list(text, rng, count):
    items = ["%s %s" % (c, i) for c, i in zip(rng.sample(COLOURS, 6), rng.sample(ITEMS, 6))]
    parts = ["This log writes down items between pieces of text, each time with the whole list so far.\n\n"]
    for i, piece in enumerate(prose(text, rng, count, 6)):
        parts.append(
            "%s\n\nNew item: %s. The list is now: " % (piece, items[i])
            + ("" if i == 5 else ", ".join(items[: i + 1]) + ".\n\n")
        )
    return "".join(parts).removesuffix(" The list is now: "), " The list is now:", items


TASKS = {
    "facts": lambda *a: facts(*a, 4, ()),
    "asked": lambda *a: facts(*a, 4, (4, 6)),
    "asked-early": lambda *a: facts(*a, 2, (2, 3)),
    "list": running_list,
}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", metavar="OUT.jsonl")
    p.add_argument("texts", metavar="TEXT=FILE", nargs="+")
    p.add_argument("--samples", type=int, default=6, help="of each task and text")
    p.add_argument("--characters", type=int, default=1800, help="of the text in a sample")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    lines = []
    for task, make in TASKS.items():
        for named in a.texts:
            text, _, path = named.partition("=")
            with open(path, encoding="utf-8") as f:
                prose_of = f.read()
            if len(prose_of) <= a.characters:
                sys.exit(
                    "long_decodes.py: %s has %d characters; allowed more than %d" % (path, len(prose_of), a.characters)
                )
            for i in range(a.samples):
                rng = random.Random("%s %s %d %d" % (task, text, a.seed, i))
                context, question, answers = make(prose_of, rng, a.characters)
                lines.append(
                    {
                        "task": task,
                        "id": "%s-%d" % (text, i),
                        "turns": [context, question],
                        "references": answers,
                        "scoring": "contains",
                        "max_new_tokens": 64 if task == "list" else 8,
                        "raw": True,
                    }
                )
    with open(a.out, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)


main()
