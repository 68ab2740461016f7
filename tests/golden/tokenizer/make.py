#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the golden tokenizers and what the package `tokenizers` says of them.

    python3 -m venv v && v/bin/pip install tokenizers==0.22.1 && v/bin/python tests/golden/tokenizer/make.py

texts.json                      what is encoded: a text, or the bytes of one that is not UTF-8 in hexadecimal
<name>/tokenizer.json           a small tokenizer, trained here on the words of this script
<name>/ids.json                 for each text its ids as the package gives them with control tokens found ("parsed")
                                and, where these differ, as text ("plain"); bytes that are not UTF-8 were decoded with
                                errors="replace"
sentencepiece/tokenizer.json    one of the kind of Llama 2: pieces with blanks as U+2581, and bytes for what has none
sentencepiece/kinds.json        what other files have in place of its parts, and for each the ids of "more" and what
                                they decode to, for two the ids of texts.json

Nothing here was written by a person but this script. All versions agree about its characters: they are of Unicode 13 or
older.
"""

import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST


def byte_level(regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


def split(regex):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), byte_level(False)])


PRE_TOKENIZERS = {
    "gpt-2": lambda: byte_level(True),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)]),
    "llama-bpe": lambda: split(LLAMA3),
    "qwen2": lambda: split(QWEN2),
}


def corpus(seed):
    """Sentences of made-up words, code, numbers, and other scripts."""
    rng = random.Random(seed)
    syllables = "the an in er on re st ing ou cat lo ve mi ra ti sun key val ue tok en ca che".split()
    foreign = "héllo wörld naïve Москва привет Ελλάδα 你好世界 こんにちは 안녕하세요 مرحبا שלום हिन्दी ไทย 🙂 🎉 👩‍👩‍👧".split()
    lines = []
    for _ in range(1200):
        words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(rng.randint(3, 12))]
        words += rng.choices(foreign + ["don't", "it's", "WE'LL", "they've", "I'm", "he'd", "you're"], k=2)
        rng.shuffle(words)
        line = " ".join(words)
        lines.append(
            rng.choice(
                [
                    line.capitalize() + ".",
                    line,
                    f"    return {line.replace(' ', '_')}({rng.randint(0, 99999)});\n",
                    f"{line}\r\n\r\n",
                    f"x = {rng.random():.4f}  # {line}",
                ]
            )
        )
    return lines


def alphabet(name):
    letters = pre_tokenizers.ByteLevel.alphabet()
    # SmolLM2 lacks bytes, too: U+0104, U+0106 and U+0113 stand for 0x04, 0x06, 0x13; U+00FF and others for bytes that
    # no UTF-8 holds.
    if name == "smollm":
        letters = set(letters) - set(
            "\u0104\u0106\u0113\u00c0\u00c1\u00f1\u00f2\u00f5\u00f6"
            "\u00f7\u00f8\u00f9\u00fa\u00fb\u00fc\u00fd\u00fe\u00ff"
        )
    return sorted(letters)


def train(name, size, lines):
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = {"llama-bpe": ["<|begin_of_text|>", "<|eot_id|>"], "gpt-2": ["<|endoftext|>"]}.get(
        name, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    first = special if name == "smollm" else []  # SmolLM2 has its control tokens in front, the others behind
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=first, initial_alphabet=alphabet(name), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if name == "gpt-2":
        tokenizer.add_tokens(
            [
                AddedToken("<mask>", lstrip=True, normalized=False),
                AddedToken("<word>", single_word=True, normalized=False),
                AddedToken("<right>", rstrip=True, normalized=True),
                AddedToken("<mask><mask>", normalized=False),
                AddedToken("   ", normalized=True),
            ]
        )
    if name == "qwen2":
        tokenizer.add_tokens([AddedToken("e\u0301te\u0301", normalized=True), AddedToken("e\u0301a", normalized=False)])
    if name == "llama-bpe":
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A",
                    pair=f"{bos} $A {bos}:1 $B:1",
                    special_tokens=[(bos, tokenizer.token_to_id(bos))],
                ),
            ]
        )
    return tokenizer


def sentencepiece(size, lines):
    """Llama 2's. The other kinds are made of it by replacing parts."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
        limit_alphabet=100,
    )
    tokenizer.train_from_iterator(lines, trainer)
    made = json.loads(tokenizer.to_str())
    added = [(i, text, True, False) for i, text in enumerate(special)] + [
        (size, "<new>", False, True),
        (size + 1, "<raw>", False, False),
        (size + 2, "a b", False, True),
    ]
    made["added_tokens"] = [
        {
            "id": id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": normalized,
            "special": is_special,
        }
        for id, text, is_special, normalized in added
    ]
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return made | kinds()["prepend"]


def kinds():
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    decoder = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Sequence", "decoders": [*decoder, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    keep = {"type": "Sequence", "decoders": decoder}
    metaspace = lambda scheme, split: {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": scheme,
        "split": split,
    }
    return {
        "prepend": {
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace]},
            "pre_tokenizer": None,
            "decoder": strip,
        },
        "first": {"normalizer": None, "pre_tokenizer": metaspace("first", False), "decoder": strip},
        "always": {"normalizer": None, "pre_tokenizer": metaspace("always", True), "decoder": strip},
        "gemma": {
            "normalizer": replace,
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "decoder": keep,
        },
    }


MORE = [
    "<s>",
    "<s>the cat",
    "<s> the cat</s> the",
    "the<raw>cat",
    "the <raw> cat",
    "<raw>the",
    "the<new>cat",
    " the",
    "  the",
    "\u2581the",
    "\u2581 the",
    "the\u2581cat",
    "the \u2581\u2581cat",
    "the  cat   the",
    "a b",
    " a b",
    "a\u2581b",
    "xa b",
    "<0x41>",
    "<0x0A>\n",
    "</s></s>",
    " ",
    "  ",
    " <s> ",
    "\u2581",
]


def texts():
    specials = [
        "<|endoftext|>",
        "<|im_start|>user\nhi<|im_end|>\n",
        "a<|im_end|>b",
        "<|im_end",
        "<|begin_of_text|>x<|eot_id|>",
        "<|eot_id|><|eot_id|>",
        "a <mask> b",
        "  \t<mask>  c",
        "<mask><mask><mask>",
        "x<word>",
        "<word>",
        " <word>.",
        "é<word>",
        "<word>\u0301",
        "a<right>   b",
        "<right>    <right>",
        "<right>\n\u00a0x",
        "a   b",
        "a       b",
        "<mask",
        "<<mask>>",
        "<word><word>",
        "<word> <word>",
        "Ⓐ<word>",
        "\u200d<word>",
        "_<word>",
        "²<word>",
    ]
    contractions = [
        "don't",
        "DON'T",
        "it's IT'S It'S",
        "we'll WE'LL we'LL",
        "they'Ve 'RE 're",
        "I'm I'M",
        "he'D",
        "''s",
        "'sx",
        "'ſ 'ſx",
        "o'clock",
        "'tis",
        "'",
        "''",
        "' s",
        "rock'n'roll",
        "'l",
        "'r",
        "'v",
        "'lL",
        "\u2019s it\u2019s",
        "1's",
        " 's",
    ]
    digits = [
        "0",
        "12",
        "123",
        "1234",
        "12345678901",
        "3.14159",
        " 42",
        "  42",
        "a1b22c333",
        "x=1",
        "1 2  3   4",
        "\n1",
        "1\n2",
        "²³",
        "½",
        "٣٤٥",
        "一二三",
        "Ⅷ",
        "1,000,000",
        "0x1F",
        "१२३४",
        "7 ",
        "v2.0-rc1",
    ]
    blanks = [
        " ",
        "  ",
        "   ",
        "\t",
        "\t\t",
        "\n",
        "\n\n",
        "\r\n",
        "\r\n\r\n",
        "\r",
        " \n",
        "\n ",
        " \n \n ",
        "a\n",
        "a \n",
        "a\n b",
        "a\r\nb",
        "a\n\n\nb",
        "  a",
        "a  ",
        "a  b",
        "a   b",
        "\u00a0",
        "a\u00a0b",
        "\u3000",
        "a\u3000\u3000b",
        "\u2028\u2029",
        "\x85x",
        "\x0b\x0c",
        "\u200b",
        "\ufeffx",
        "\x1c\x1d",
        "a \t b",
        " \u00a0 x",
        ".\n",
        ".\n\n",
        ". \n",
        " .\r\n\r\n",
        "!\n\nx",
        "    return x;\n",
        "\n    \n\t\tx",
    ]
    scripts = [
        "héllo",
        "he\u0301llo",
        "\u00e9te\u0301",
        "e\u0301te\u0301 e\u0301a",
        "A\u030a\u0323",
        "a\u0323\u030a a\u030a\u0323",
        "\u212b\u2126",
        "\u1100\u1161\u11a8",
        "각",
        "你好，世界。",
        "こんにちは",
        "안녕하세요 세계",
        "مرحبا بالعالم",
        "שָׁלוֹם",
        "हिन्दी में",
        "ภาษาไทย",
        "Ελληνικά",
        "Привет, мир!",
        "ß ẞ ﬁ ﬀ",
        "İstanbul ıI",
        "Ǆ ǅ ǆ",
        "𝒜𝓑 𝟙𝟚",
        "👍",
        "👍🏽",
        "👩‍👩‍👧‍👦",
        "🇩🇪🇫🇷",
        "❤️",
        "1️⃣",
        "🙂🙂 🙂",
        "a🙂b",
        "\u202eabc\u202c",
        "\u0301",
        " \u0301",
        "a" + "\u0301\u0316" * 20,
        "\U00010348",
        "\U0001f600\u200d",
        "\ue000",
        "\uffff",
        "क्षि",
        "\u0627\u0655\u0653",
    ]
    code = [
        "for (int i = 0; i < n; ++i) {\n    sum += a[i];\n}\n",
        "def f(x):\n\treturn x**2 # square\n",
        "#include <vector>",
        "a->b::c<d>",
        "/* c */ // d",
        "$HOME/.bashrc",
        "https://example.org/a?b=c&d=%20",
        '{"k": [1, 2]}',
        "<html>\r\n</html>\r\n",
        "snake_case camelCase SCREAMING_CASE",
        "x != y && !z",
        "-->",
        "===",
        "...",
        "``` py\n```",
        "\\n\\t",
        "e=mc^2",
        "@user #tag",
        "foo(bar)",
        "  # comment",
    ]
    other = [
        "",
        "\0",
        "a\0b",
        "\0\0",
        "\x01\x02\x7f",
        "a" * 50,
        "ab" * 60,
        "a" * 200,
        " " * 100,
        "\n" * 70,
        "the" * 40,
        "." * 90,
        "cat " * 20,
        "tokencachekeyvalue" * 6,
    ]
    broken = [
        b"\xff",
        b"a\xffb",
        b"\xc3",
        b"\xc3(",
        b"\xe2\x82",
        b"\xe2\x82x",
        b"\xf0\x9f\x98",
        b"\xf0\x9f\x98\x80\x80",
        b"\xed\xa0\x80",
        b"\xc0\xaf",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80",
        b"ok \xe4\xbd\xa0\xe5 ok",
        b"\x80\x80\x80",
        b"\xe0\x80\x80",
        b"\xf0\x80\x80\x80",
        b"\xfe\xff",
        b"'\xc5",
        b" \xf0\x9f",
        b"\xf1\x80\x80\xe1\x80\xc2",
    ]
    return [t.encode() for t in specials + contractions + digits + blanks + scripts + code + other] + broken


def ids_of(tokenizer, text):
    text = text.decode("utf-8", errors="replace")
    tokenizer.encode_special_tokens = False
    parsed = tokenizer.encode(text).ids
    tokenizer.encode_special_tokens = True
    plain = tokenizer.encode(text).ids
    return {"parsed": parsed} if parsed == plain else {"parsed": parsed, "plain": plain}


def lines_of(items):
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in items) + "\n]\n"


def as_json(text):
    try:
        return {"text": text.decode()}
    except UnicodeDecodeError:
        return {"hex": text.hex()}


if __name__ == "__main__":
    (HERE / "texts.json").write_text(lines_of(as_json(text) for text in texts()))
    for name in PRE_TOKENIZERS:
        tokenizer = train(name, 700, corpus(7))
        (HERE / name).mkdir(exist_ok=True)
        tokenizer.save(str(HERE / name / "tokenizer.json"), pretty=False)
        tokenizer = Tokenizer.from_file(str(HERE / name / "tokenizer.json"))
        (HERE / name / "ids.json").write_text(lines_of(ids_of(tokenizer, text) for text in texts()))
        print(name, tokenizer.get_vocab_size(), "tokens,", len(texts()), "texts")
    base = sentencepiece(620, corpus(7))
    (HERE / "sentencepiece").mkdir(exist_ok=True)
    (HERE / "sentencepiece" / "tokenizer.json").write_text(json.dumps(base, ensure_ascii=False), encoding="utf-8")
    made = []
    for name, parts in kinds().items():
        tokenizer = Tokenizer.from_str(json.dumps(base | parts))
        ids = [ids_of(tokenizer, text) for text in texts()] if name in ("prepend", "gemma") else []
        more = [{"text": text, **ids_of(tokenizer, text.encode())} for text in MORE]
        for each in more:
            each["decoded"] = tokenizer.decode(each["parsed"][1:], skip_special_tokens=False)
        made.append({"kind": name, "parts": parts, "ids": ids, "more": more})
        print("sentencepiece", name)
    (HERE / "sentencepiece" / "kinds.json").write_text(lines_of(made), encoding="utf-8")
