#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes plain paragraphs out of HTML, as an essay that hides what tasks ask for.

    apt-get download debian-handbook && dpkg-deb -x debian-handbook_*.deb handbook
    prose.py PROSE.txt handbook/usr/share/doc/debian-handbook/html/en-US/*.html

Paragraphs of at least 200 characters, ASCII alone (quotation marks and dashes are turned into it), files by name,
a blank line between two.
"""

import html
import re
import sys

ASCII = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u00a0": " "}
)


def paragraphs(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        page = re.sub(r"(?is)<(script|style|head|pre|table)\b.*?</\1>", " ", f.read())
    for _, inner in re.findall(r'(?is)<(p(?=[ >])|div class="para")[^>]*>(.*?)</(?:p|div)>', page):
        text = " ".join(html.unescape(re.sub(r"(?s)<[^>]+>", "", inner)).translate(ASCII).split())
        if len(text) > 200 and text.isascii():
            yield text


def main():
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    found = [text for path in sorted(sys.argv[2:]) for text in paragraphs(path)]
    if not found:
        sys.exit(
            'prose.py: no paragraph of 200 characters in %d files; allowed HTML with text in <p> or <div class="para">'
            % (len(sys.argv) - 2)
        )
    with open(sys.argv[1], "w") as f:
        f.write("\n\n".join(found) + "\n")
    print("%s: %d paragraphs, %d characters" % (sys.argv[1], len(found), sum(map(len, found))))


main()
