#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts llama.cpp's published vocabularies down to what their published vectors need.

    python3 -m venv v && v/bin/pip install gguf==0.19.0
    v/bin/python tests/golden/tokenizer/published.py llama.cpp/models

published/texts.json     the texts of .inp, the same for all vocabularies but qwen35
published/<name>.json    of ggml-vocab-<name>.gguf: the pre-tokenizer ("pre"); tokens that could come up in the texts,
                         with their ids; how they merge, "left right id" in the order of merging, or for SentencePiece
                         their scores, and the id of <0x00>, which the other bytes follow; the ids of .out

A token is kept if its text stands anywhere in a text, across words too, so that a wrong cut and a wrong order of merges
give other ids.
"""

import json
import pathlib
import sys

import gguf

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ["llama-spm", "llama-bpe", "qwen2", "qwen35", "starcoder", "falcon", "deepseek-llm", "deepseek-coder"]
SEPARATOR = "\n__ggml_vocab_test__\n"


def alphabet():
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {byte: chr(byte) for byte in itself} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def cut_down(folder, name):
    path = folder / f"ggml-vocab-{name}.gguf"
    fields = gguf.GGUFReader(path).fields
    value = lambda key: fields[f"tokenizer.ggml.{key}"].contents()
    ids = [[int(id) for id in line.split()] for line in open(f"{path}.out", encoding="utf-8").read().splitlines()]
    texts = open(f"{path}.inp", encoding="utf-8", newline="").read().split(SEPARATOR)[: len(ids)]
    made = {"pre": value("pre")}
    tokens = value("tokens")
    by_text = {token: id for id, token in enumerate(tokens)}
    if value("model") == "llama":
        written = "\0".join("\u2581" + text.replace(" ", "\u2581") for text in texts)
        scores = value("scores")
        made["first_byte"] = by_text["<0x00>"]
        made["scores"] = {token: [id, scores[id]] for token, id in by_text.items() if token in written}
    else:
        bytes_as = alphabet()
        written = "\0".join("".join(bytes_as[byte] for byte in text.encode()) for text in texts)
        merges = [merge for merge in value("merges") if merge.replace(" ", "", 1) in written]
        made["merges"] = [f"{merge} {by_text[merge.replace(' ', '', 1)]}" for merge in merges]
        made["tokens"] = {
            token: by_text[token]
            for token in sorted(set(written) - {"\0"} | {bytes_as[byte] for byte in range(0x20, 0x7F)})
        }
    return texts, made | {"ids": ids}


def lines_of(made):
    lines = [
        f"{json.dumps(key)}:{json.dumps(item, ensure_ascii=False, separators=(',', ':'))}" for key, item in made.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    common = None
    for name in NAMES:
        texts, made = cut_down(pathlib.Path(sys.argv[1]), name)
        common = common or texts
        if texts != common:
            made["texts"] = texts
        (HERE / "published" / f"{name}.json").write_text(lines_of(made), encoding="utf-8")
        print(name, len(made.get("merges", [])), "merges,", len(texts), "texts")
    (HERE / "published" / "texts.json").write_text(
        json.dumps(common, ensure_ascii=False, indent=0) + "\n", encoding="utf-8"
    )
