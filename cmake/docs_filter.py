#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Doxygen reads of a file, on stdout: the lines at the top of a header are about the file, not about the namespace
that follows; headings of Markdown have the anchors that links name, as on GitHub; links to what is not on the site are
their text."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def anchor(page, slug=""):
    """Of a page, or of a heading in it; unique on the site."""
    return re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")) + (f"_{slug}" if slug else ""))


def slugs(lines):
    """What GitHub calls the headings, in order."""
    seen, fenced = {}, False
    for line in lines:
        fenced ^= line.startswith("```")
        found = None if fenced else re.match(r"#{1,6} (.*)", line)
        if found is None:
            yield None
            continue
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", found[1])
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        again = seen[slug] = seen.get(slug, -1) + 1
        yield f"{slug}-{again}" if again else slug


def link(page, found):
    """A link of Markdown as Doxygen reads it."""
    said, target = found[1].replace("\n", " "), found[2]  # what goes over two lines ends a section
    if re.match(r"\w+:", target):
        return found[0]
    path, _, slug = target.partition("#")
    to = (page.parent / path).resolve() if path else page
    if to.suffix != ".md" or not to.is_file() or {".github", "cmake"} & set(to.relative_to(ROOT).parts):
        return said
    return f"[{said}](#{anchor(to, slug)})"


def prose(page, text):
    """Text without code blocks. Doxygen takes ' for the end of what a ` begins, but not of what two begin."""
    text = re.sub(r"`[^`]+`", lambda code: f"`{code[0]}`" if "'" in code[0] else code[0], text)
    return re.sub(r"(?<!!)\[([^][]*)\]\(\s*([^)\s]+)\)", lambda found: link(page, found), text)


def markdown(page):
    lines = page.read_text(encoding="utf-8").split("\n")
    names = list(slugs(lines))
    lines[0], names[0] = lines[0].replace("`", ""), ""  # the tree of pages shows titles as they are
    marked = [line if name is None else f"{line} {{#{anchor(page, name)}}}" for line, name in zip(lines, names)]
    parts = re.split(r"(^```.*?^```$)", "\n".join(marked), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else prose(page, part) for part in parts)


def header(file):
    lines = file.read_text(encoding="utf-8").split("\n")
    if lines[0].startswith("// SPDX"):
        del lines[0]
    if lines[0] == "#pragma once":
        lines[0] = "/// @file"
    elif lines[0].startswith("///"):
        lines.insert(0, "/// @file")
    return "\n".join(lines)


given = pathlib.Path(sys.argv[1]).resolve()
print(markdown(given) if given.suffix == ".md" else header(given))
