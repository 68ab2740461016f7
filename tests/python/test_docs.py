# SPDX-License-Identifier: Apache-2.0
"""Programs that the documentation shows are complete and run as they stand."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs/reference/python.md"


def test_the_engine_of_the_page_runs(capsys):
    section = PAGE.read_text().split("\n## An engine of your own\n")[1]
    names = {}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "after 101 tokens: 101 slots become 64"
    assert said[1:] == [f"after {n} tokens: 80 slots become 64" for n in (117, 133)]
    assert int(names["lengths"][0]) == 64 + 140 - 133
