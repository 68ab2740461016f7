#!/usr/bin/env python3
"""Renders conversations with the published chat templates beside this script, as transformers does (jinja2 with trim_blocks and lstrip_blocks).

    python3 -m venv v && v/bin/pip install jinja2 && v/bin/python tests/golden/chat/make.py

rendered.json: the name of the template, messages as [role, content], whether the answer is begun, and the text.
"""

import json
import pathlib

from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).resolve().parent
CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "Hi")],
    [("system", ""), ("user", "")],
    [("user", "Hi"), ("assistant", "Hello!"), ("user", "How are you?")],
    [("user", "Hi"), ("assistant", "")],
    [("user", "Hi"), ("system", "Now in French."), ("user", "Hi")],
    [("assistant", "I begin."), ("user", "Go on.")],
    [("system", "One."), ("system", "Two."), ("user", "Three.")],
    [("user", "  blanks \t\n around  \n"), ("assistant", "\n\nlines\n\n")],
    [("user", "\u00a0\u3000\x1c\x85wide blanks\u2003\x1f"), ("user", " \n ")],
    [("user", "{{ not }} {% jinja %} \\n <|im_end|> 'quotes' \"double\" <b>&amp;</b>")],
    [("user", "h\u00e9llo \u4f60\u597d \U0001f642 \u05e9\u05c1 \0 \u200b")],
    [("user", "line 1\r\nline 2\rline 3")],
]

if __name__ == "__main__":
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    cases = []
    for file in sorted(HERE.glob("*.jinja")):
        template = environment.from_string(file.read_bytes().decode())
        for conversation in CONVERSATIONS:
            messages = [{"role": role, "content": content} for role, content in conversation]
            for begun in (False, True):
                text = template.render(messages=messages, add_generation_prompt=begun, bos_token="<|begin_of_text|>", tools=None)
                cases.append({"template": file.stem, "messages": conversation, "add_generation_prompt": begun, "text": text})
    (HERE / "rendered.json").write_text("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]\n")
    print(len(cases), "cases")
