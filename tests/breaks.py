#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks the library in one place at a time and counts the breaks that no test notices: none may remain.

  tests/breaks.py                        every break, built in build/breaks
  tests/breaks.py --room allot,cuda      those of some rooms
  tests/breaks.py --room races           missing barriers, fences and waits: only the kernels' tests are built
  tests/breaks.py --only pin             those whose name contains `pin`
  tests/breaks.py --list                 their names, by room; builds nothing
  tests/breaks.py --check                whether each is still found in the sources; builds nothing

Breaks are in tests/breaks/ROOM.txt, apart from each other by an empty line:

  a pin is forgotten when tokens are taken back           its name: what is wrong then
    include/kvkeep/core/protect.h  Pins.*:KeeperPins.*       the file, and the tests that are tried first
  @ void truncate(                                        the code stands after this, which is in the file once
  - spans_.pop_back();                                    the code: the first after @, or once in the file
  + spans_.clear();                                       what stands there instead; left out: nothing

A third word beside the tests is the way to run the execution model that must notice it (docs/inside/cuda.md): these
tests are tried in that way, and no others.

White space does not count. Code that ends with ; is statements, other code is an expression. Neither may be constexpr,
nor begin with a declaration.

All breaks are compiled together, into a copy of the sources, each behind a condition that a number in the environment
turns on: one build serves them all. Without a break every test that is tried first must pass. Then each break runs
these tests and, if they pass, all others. A test that fails, crashes or does not end has noticed it. The exit status
is 0 when every break was noticed, 1 when one was not, 2 when one is not found in the sources or the build failed.
"""

import argparse
import concurrent.futures
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = [
    "kvkeep_tests",
    "kvkeep_torch_tests",
    "kvkeep_lab_tests",
    "kvkeep_llama_tests",
    "kvkeep_llama_cuda_tests",
    "kvkeep_cuda_model_tests",
    "kvkeep_serving_tests",
]
MODEL = "kvkeep_cuda_model_tests"
WAYS = {MODEL: ["", "seed=1", "guard", "races"]}  # to run the execution model (docs/inside/cuda.md)
OF_THE_SOURCES = "House.*:Docs.*"  # they read the sources, which are not themselves in the copy
SECONDS = 600  # that a part of the tests may take; without a break it takes a tenth

HEADER = """#pragma once
#include <cstdlib>
namespace kvkeep_breaks {
inline const int the_one = std::getenv("KVKEEP_BREAK") == nullptr ? 0 : std::atoi(std::getenv("KVKEEP_BREAK"));
inline bool on(int number) { return number == the_one; }
}  // namespace kvkeep_breaks
"""


class Break:
    """One break: where it is, what stands there, what would stand there instead."""

    def __init__(self, room, number, block):
        self.room, self.number, self.name = room, number, block[0]
        where = block[1].split()
        if not 2 <= len(where) <= 3 or any(line[:1] not in "@-+" for line in block[2:]):
            raise ValueError(f"tests/breaks/{room}.txt: '{self.name}' is not a name, a file with its tests, and code")
        self.file, self.tests, self.way = (*where, "")[:3]
        self.after, self.code, self.broken = (
            "\n".join(line[1:].strip() for line in block[2:] if line[0] == sign) for sign in "@-+"
        )
        for code in (self.code, self.broken):
            whole = all(code.count(a) == code.count(b) for a, b in ("()", "[]", "{}"))
            half = r"^(&&|[|][|]|[.])|(&&|[|][|])$|^(const )?[\w:]+[&*]? \w+ = |^const [\w:]+[&*]? \w+\{"
            if code[-1:] != ";":
                half += r"|;|^(if|for|while|return)\b"  # not an expression
            if not whole or re.search(half, code):
                raise ValueError(f"tests/breaks/{room}.txt: '{self.name}' is half a statement or a declaration: {code}")

    def place(self, source):
        """Where the code is in the text of its file; None if it is not there, or not once."""
        begin = 0
        if self.after:
            found = list(pattern(self.after).finditer(source))
            if len(found) != 1:
                return None
            begin = found[0].end()
        found = [m for m in pattern(self.code).finditer(source, begin) if source[: m.start()][-1:] not in (".", ">")]
        return found[0].span() if found and (self.after or len(found) == 1) else None

    def compiled(self, code):
        on = f"kvkeep_breaks::on({self.number})"
        if code[-1] == ";":
            return f"{{ if ({on}) {{ {self.broken} }} else {{ {code} }} }}"
        return f"({on} ? ({self.broken}) : ({code}))"


def pattern(code):
    """Of code, however it is laid out."""
    tokens = re.findall(r"\w+|\S", code)
    apart = [r"\s+" if a[-1].isidentifier() and b[0].isidentifier() else r"\s*" for a, b in zip(tokens, tokens[1:])]
    return re.compile("".join(re.escape(t) + s for t, s in zip(tokens, [*apart, ""])))


def read_breaks():
    breaks = []
    for file in sorted((ROOT / "tests/breaks").glob("*.txt")):
        for block in file.read_text().strip().split("\n\n"):
            breaks.append(Break(file.stem, len(breaks) + 1, block.split("\n")))
    return breaks


def by_file(breaks):
    """The sources with all breaks in them, by path; and the names of breaks that are not found."""
    texts, lost = {}, []
    for path in sorted({b.file for b in breaks}):
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        places = []
        for b in breaks:
            if b.file == path:
                place = b.place(source)
                if place is None:
                    lost.append(f"{path}: {b.name}")
                else:
                    places.append((*place, b))
        places.sort(key=lambda p: p[:2], reverse=True)
        text, before = source, len(source) + 1
        for begin, end, b in places:
            if end > before:
                lost.append(f"{path}: {b.name} (overlaps another)")
                continue
            text, before = text[:begin] + b.compiled(text[begin:end]) + text[end:], begin
        texts[path] = text
    return texts, lost


def write(path, text):
    """Only what changed, so that little is compiled again."""
    if not path.is_file() or path.read_bytes() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def build(folder, texts, jobs, names):
    """Copies the sources, breaks them, builds the programs `names`. Returns where they are."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    copy = folder / "source"
    kept = {name for name in listed if name and (ROOT / name).is_file()}
    for name in kept:
        write(copy / name, texts[name].encode() if name in texts else (ROOT / name).read_bytes())
        shutil.copymode(ROOT / name, copy / name)
    for old in copy.rglob("*.[ch]*"):
        if old.is_file() and str(old.relative_to(copy)) not in kept and ".venv" not in old.parts:
            old.unlink()
    venv = copy / ".venv"
    if (ROOT / ".venv").is_dir() and not venv.exists():
        venv.symlink_to(ROOT / ".venv")
    header = folder / "kvkeep_breaks.h"
    write(header, HEADER.encode())
    tree = folder / "tree"
    options = [
        f"-DCMAKE_CXX_FLAGS=-include {header}",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG",
        "-DKVKEEP_CUDA=OFF",
        "-DKVKEEP_BUILD_BENCH=OFF",
        "-DKVKEEP_BUILD_EXAMPLES=OFF",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    if "Torch_DIR" in os.environ:
        options.append(f"-DTorch_DIR={os.environ['Torch_DIR']}")
    targets = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", copy, "-B", tree, *options], check=False, stdout=subprocess.DEVNULL
    ).returncode
    made = (
        1
        if targets
        else subprocess.run(
            ["cmake", "--build", tree, "--parallel", str(jobs), "--target", *names, "--", "-k", "0"], check=False
        ).returncode
    )
    if made:
        sys.exit(2)
    return tree / "bin"


def names_of(program):
    """Of its tests: Suite.Test, as a filter has them."""
    names, suite = [], ""
    for line in subprocess.run(
        [program, "--gtest_list_tests"], check=True, capture_output=True, text=True
    ).stdout.splitlines():
        word = line.split("#")[0].strip()
        if line.startswith(" "):
            names.append(suite + word)
        elif word.endswith("."):
            suite = word
    return names


def first_programs(b, names):
    """Those that have tests which the break says to try first."""
    wanted = b.tests.split("-")[0].split(":")
    found = [p for p in names if any(fnmatch.fnmatchcase(n, w) for w in wanted for n in names[p])]
    if not found:
        sys.exit(f"breaks: {b.room}: '{b.name}': no test is called {b.tests}; allowed a filter that finds one")
    return found


def noticed(program, tests, number, way=""):
    """The first test of `tests` that fails with break `number`; None: all pass."""
    with tempfile.TemporaryDirectory(prefix="kvkeep_breaks_") as scratch:
        environment = os.environ | {
            "KVKEEP_BREAK": str(number),
            "KVKEEP_CUDA_MODEL": way,
            "GTEST_FAIL_FAST": "1",
            "TMPDIR": scratch,
            "TEST_TMPDIR": scratch,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            "GTEST_FILTER": tests + ("" if "-" in tests else "-") + ":" + OF_THE_SOURCES,
        }
        with open(os.path.join(scratch, "log"), "w+b") as log:
            try:
                status = subprocess.run(
                    [program],
                    cwd=scratch,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    timeout=SECONDS,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = "does not end"
            log.seek(0)
            said = log.read().decode(errors="replace")
    ran = re.findall(r"\[ +(?:RUN|FAILED) +\] ([\w/]+\.[\w/]+)", said)
    failed = re.findall(r"\[ +FAILED +\] ([\w/]+\.[\w/]+)", said)
    if status == 0:
        return None
    return failed[0] if failed else f"{ran[-1]} ({'does not end' if isinstance(status, str) else 'crashes'})"


def try_break(programs, b, first):
    for name in first:
        if found := noticed(programs / name, b.tests, b.number, b.way):
            return found
    for name in [] if b.way else [*first, *(n for n in PROGRAMS if n not in first)]:
        for way in WAYS.get(name, [""]):
            if found := noticed(programs / name, "*", b.number, way):
                return found
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", default="", help="rooms, with commas between them")
    parser.add_argument("--only", default="", help="part of the name")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/breaks", help="folder to build in")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="breaks at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()

    breaks = read_breaks()
    rooms = asked.room.split(",") if asked.room else sorted({b.room for b in breaks})
    tried = [b for b in breaks if b.room in rooms and asked.only in b.name]
    if not tried:
        parser.error(f"no break fits; given --room {asked.room} --only {asked.only}; allowed what --list shows")
    if asked.list:
        for b in tried:
            print(f"{b.room:8} {b.name}")
        return 0
    texts, lost = by_file(breaks)
    if lost:
        print(
            "breaks: not found once in the sources, as their code has changed (tests/breaks.py --help):",
            *lost,
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    if asked.check:
        print(f"{len(breaks)} breaks, each found once")
        return 0

    wanted = [MODEL] if all(b.way for b in tried) else PROGRAMS
    programs = build(asked.build.resolve(), texts, asked.jobs, wanted)
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        names = dict(zip(wanted, pool.map(lambda p: names_of(programs / p), wanted)))
        first = {b: first_programs(b, names) for b in tried}
        unbroken = sorted({(program, b.tests, b.way) for b in tried for program in first[b]})
        run_unbroken = pool.map(lambda f: noticed(programs / f[0], f[1], 0, f[2]), unbroken)
        for (program, tests, _), failed in zip(unbroken, run_unbroken):
            if failed:
                print(f"breaks: without a break {failed} of {program} fails ({tests})", file=sys.stderr)
                return 2
        results = {}
        for b, found in zip(tried, pool.map(lambda b: try_break(programs, b, first[b]), tried)):
            results[b] = found
            print(f"{b.room:8} {b.name}: {found or 'NO TEST NOTICES IT'}", flush=True)
    print(f"\n{'room':8} {'breaks':>6} {'unnoticed':>9}")
    for room in rooms:
        own = [b for b in tried if b.room == room]
        print(f"{room:8} {len(own):6} {sum(results[b] is None for b in own):9}")
    missed = [b for b in tried if results[b] is None]
    print(f"{'all':8} {len(tried):6} {len(missed):9}   in {(time.monotonic() - begun) / 60:.0f} min")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
