#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates as transformers does: jinja2 3.1 with trim_blocks, lstrip_blocks, break and continue, its own
tojson and {% generation %}.

    python3 -m venv v && v/bin/pip install jinja2 && v/bin/python tests/golden/chat/make.py

rendered.json: `conversations`, messages as [role, content]; `texts` of each published template beside this script, for
each conversation without and with the beginning of an answer. snippets.json: small templates, which are kept, and their
texts for one conversation. A text is null where jinja2 fails. Every `strftime_now` is on 2024-07-26.
"""

import datetime
import json
import pathlib

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).resolve().parent
CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "Hi")],
    [("system", ""), ("user", "")],
    [("user", "Hi"), ("assistant", "Hello!"), ("user", "How are you?")],
    [
        ("system", "S"),
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "How are you?"),
        ("assistant", "Well."),
        ("user", "Bye"),
    ],
    [("user", "Hi"), ("assistant", "")],
    [("user", "Hi"), ("system", "Now in French."), ("user", "Hi")],
    [("assistant", "I begin."), ("user", "Go on.")],
    [("system", "One."), ("system", "Two."), ("user", "Three.")],
    [("user", "  blanks \t\n around  \n"), ("assistant", "\n\nlines\n\n")],
    [("user", "\u00a0\u3000\x1c\x85wide blanks\u2003\x1f"), ("assistant", " \n "), ("user", " \n ")],
    [("user", "{{ not }} {% jinja %} \\n <|im_end|> 'quotes' \"double\" <b>&amp;</b>")],
    [("user", "h\u00e9llo \u4f60\u597d \U0001f642 \u05e9\u05c1 \0 \u200b")],
    [("user", "line 1\r\nline 2\rline 3")],
    [
        ("user", "a"),
        ("assistant", "<think>\nhm\n</think>\n\nb"),
        ("user", "c"),
        ("assistant", "<think>\n\n</think>\n\nd"),
        ("user", "e"),
    ],
    [("system", "/no_think\nBe brief."), ("user", "<tool_response>f</tool_response>")],
    [("user", "Call."), ("assistant", "Called."), ("tool", "42"), ("user", "Thanks.")],
]
ONE_CONVERSATION = [("system", "Be."), ("user", " Hi\n"), ("assistant", "\u00e9")]


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def refuse(message):
    raise TemplateError(message)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = lambda x, ensure_ascii=False, indent=None: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent
    )
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    return made


def rendered(jinja, conversation, begun):
    try:
        return (
            environment()
            .from_string(jinja)
            .render(
                messages=[{"role": role, "content": content} for role, content in conversation],
                add_generation_prompt=begun,
                bos_token="<s>",
                eos_token="</s>",
                tools=None,
                documents=None,
            )
        )
    except Exception as failed:  # Python's own, too
        print(f"{jinja[:40]!r}: {failed}")
        return None


def lines(items):
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n]"


if __name__ == "__main__":
    texts = {
        file.stem: [
            rendered(file.read_bytes().decode(), conversation, begun)
            for conversation in CONVERSATIONS
            for begun in (False, True)
        ]
        for file in sorted(HERE.glob("*.jinja"))
    }
    named = ",\n".join(f'"{name}": {lines(each)}' for name, each in texts.items())
    (HERE / "rendered.json").write_text(f'{{"conversations": {lines(CONVERSATIONS)},\n"texts": {{\n{named}\n}}}}\n')
    snippets = json.loads((HERE / "snippets.json").read_text())
    for snippet in snippets:
        snippet["text"] = rendered(snippet["jinja"], ONE_CONVERSATION, True)
    (HERE / "snippets.json").write_text(lines(snippets) + "\n")
