#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of what models write, over several texts: of samples of examples/lab/bench/real_model.sh, or a file of --csv.

    answers.py RESULTS [RESULTS ...]                             a table for each model: policies by question and budget
    answers.py RESULTS ... --long                                a row for each policy, cache, question and budget
    answers.py RESULTS ... --pairs "ams-tova=tova;..."           differences, paired by sample
    answers.py RESULTS ... --beside first_token_ms,opened        with --long or --csv: also means of these columns of
                                                                 the command's own table, which lies beside its samples;
                                                                 first_token_ms@95: the 95th percentile over samples
    answers.py RESULTS ... --csv OUT.csv                         every score, for programs and for this one
    answers.py --write PAGE.md ...                               makes the pages' tables anew: those between the lines
                                                                 <!-- answers.py ARGUMENTS --> and <!-- end -->
    answers.py --check PAGE.md ...                               fails unless the pages' tables are those

RESULTS is a CSV, a folder, or MODEL/QUESTION/TEXT*.jsonl. A cell is the share of whole answers in percent, the mean
over texts; after ± half of its 95 % interval, over samples within texts and tasks; in parentheses the worst text.
Bytes: what is held near after the cut, in percent of the full cache in 16 bits, of the layers that are cut.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import re
import shlex
import signal
import sys
from collections import defaultdict
from statistics import fmean, variance

COLUMNS = ["model", "question", "length", "text", "task", "cache", "policy", "budget", "kept_bytes", "scores"]
SIXTEEN_BITS = ("bf16", "f16", "f32")
QUESTIONS = {"before": "in sight", "after": "later", "stream": "long decode"}


class Cell:
    """Scores of one policy at one budget over one cache, by text and task, in the order of samples."""

    def __init__(self):
        self.scores = defaultdict(dict)  # text -> task -> [scores]
        self.kept = {}  # (text, task) -> mean bytes
        self.beside = {}  # (text, task) -> {column: [number, or one a sample]}

    def by_text(self, whole):
        return {
            text: [[float(s > 1 - 1e-6) if whole else s for s in tasks[t]] for t in sorted(tasks)]
            for text, tasks in sorted(self.scores.items())
        }


def files_of(path):
    if not os.path.isdir(path):
        return [path]
    return sorted(
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(".jsonl") and os.path.basename(folder) in QUESTIONS
    )


def shown_policy(name):
    return re.sub(r"calibration=[^,]*", "calibration=...", name)


def read_table(path):
    """(policy, budget, task) -> {column: number} of the table that a command printed."""
    if not os.path.exists(path):
        return {}
    with open(path, newline="") as f:
        return {
            (shown_policy(row["policy"]), row["budget"], row["task"]): {
                name: [float(x)] for name, x in row.items() if x and re.fullmatch(r"-?[\d.]+(e-?\d+)?", x)
            }
            for row in csv.DictReader(f)
        }


def read_samples(path, cells):
    """Lines of kvkeep eval --samples-out. The folders say which model, and when the question comes."""
    model, question, name = os.path.normpath(path).split(os.sep)[-3:]
    rows, table = defaultdict(list), read_table(path[: -len("jsonl")] + "csv")
    with open(path) as f:
        for line in f:
            sample = json.loads(line)
            text = re.split("[.@]", name)[0] if "seed" in sample else sample["id"].rsplit("-", 1)[0]
            for answer in sample["answers"]:
                rows[
                    (
                        model,
                        question,
                        sample.get("length", 0),
                        shown_policy(answer["policy"]),
                        sample["cache_dtype"],
                        str(answer["budget"] or ""),
                    ),
                    text,
                    sample["task"],
                ].append(
                    (sample.get("seed", 0), answer["score"], answer["kept_bytes"], answer.get("first_token_seconds"))
                )
    for (key, text, task), got in rows.items():
        got.sort(key=lambda g: g[0])
        cells[key].scores[text][task] = [g[1] for g in got]
        cells[key].kept[text, task] = fmean(g[2] for g in got)
        cells[key].beside[text, task] = dict(table.get((key[3], key[5], task), {}))
        if got[0][3] is not None:
            cells[key].beside[text, task]["first_token_ms"] = [1000 * g[3] for g in got]


def read(paths):
    cells = defaultdict(Cell)
    for path in (file for given in paths for file in files_of(given)):
        if path.endswith(".jsonl"):
            read_samples(path, cells)
            continue
        with open(path, newline="") as f:
            for row in csv.DictReader(f):
                cell = cells[
                    row["model"], row["question"], int(row["length"]), row["policy"], row["cache"], row["budget"]
                ]
                cell.scores[row["text"]][row["task"]] = [float(s) for s in row["scores"].split()]
                cell.kept[row["text"], row["task"]] = float(row["kept_bytes"])
                cell.beside[row["text"], row["task"]] = {
                    n: [float(y) for y in x.split("/")]
                    for n, _, x in (w.partition("=") for w in (row.get("beside") or "").split())
                }
    if not cells:
        sys.exit("answers.py: no samples; allowed what examples/lab/bench/real_model.sh writes, and CSVs of --csv")
    return cells


def mean_of(by_text):
    return fmean(fmean(fmean(task) for task in tasks) for tasks in by_text.values())


def half_of(by_text):
    """Half of the 95 % interval of mean_of: samples vary within a text and a task, which are given."""
    spread = 0.0
    for tasks in by_text.values():
        for task in tasks:
            spread += (variance(task) / len(task) if len(task) > 1 else 0.25) / (len(tasks) * len(by_text)) ** 2
    return 1.96 * spread**0.5


def bytes_of(cells, key):
    """In percent of the full cache of 16 bits; NaN where that was not measured."""
    model, question, length = key[:3]
    for cache in SIXTEEN_BITS:
        full = next(
            (cells[k] for k in ((model, q, length, "full", cache, "") for q in (question, "before")) if k in cells),
            None,
        )
        if full is not None:
            known = [kept / full.kept[at] for at, kept in cells[key].kept.items() if at in full.kept]
            return 100 * fmean(known) * (2 if cache == "f32" else 1) if known else float("nan")
    return float("nan")


def shown_bytes(cells, key):
    share = bytes_of(cells, key)
    return "-" if share != share else "%.0f" % share


def cell_text(cell, whole):
    by_text = cell.by_text(whole)
    each = {t: 100 * mean_of({t: v}) for t, v in by_text.items()}
    worst = min(each, key=each.get)
    return "%.0f ± %.0f" % (100 * mean_of(by_text), 100 * half_of(by_text)) + (
        " (%s %.0f)" % (worst, each[worst]) if len(each) > 1 else ""
    )


def row(columns):
    print("| " + " | ".join(columns) + " |")


def budget_order(budget):
    """The mildest first: nothing dropped, large budgets, small ratios."""
    if budget == "":
        return (0, 0)
    return (1, -int(budget)) if budget.isdigit() else (2, budget)


def shown_name(policy, cache):
    return "`%s`" % policy + ("" if cache in SIXTEEN_BITS else " over %s" % cache)


def models_of(cells):
    return sorted({(k[0], k[2]) for k in cells}, key=lambda m: (m[0] != "smollm2", m))


def head(model, length, unit, first, columns, last=()):
    """Title and head of a model's table, whose columns are questions and budgets."""
    print("\n%s%s%s:\n" % (model, ", %d tokens" % length if length else "", unit))
    row([first, *["%s, %s" % (QUESTIONS[q], b) if b else QUESTIONS[q] for q, b in columns], *last])
    row(["---"] + ["---:"] * (len(columns) + len(last)))


def in_order(columns):
    return sorted(columns, key=lambda c: (list(QUESTIONS).index(c[0]), budget_order(c[1])))


def wide(cells, all_cells, whole):
    for model, length in models_of(cells):
        own = {k: c for k, c in cells.items() if (k[0], k[2]) == (model, length)}
        columns = in_order({(k[1], k[5]) for k in own if k[5] != ""})
        head(model, length, "", "policy", columns, ["bytes %"])
        names = {}
        for k in own:
            names.setdefault((k[3], k[4]), []).append(mean_of(own[k].by_text(whole)))
        for (policy, cache), _ in sorted(names.items(), key=lambda n: -fmean(n[1])):
            shown, shares = [], []
            for question, budget in columns:
                key = next(
                    (k for k in ((model, question, length, policy, cache, b) for b in (budget, "")) if k in own), None
                )
                shown.append(cell_text(own[key], whole) if key else "")
                if key:
                    shares.append(shown_bytes(all_cells, key))
            row([shown_name(policy, cache)] + shown + [", ".join(dict.fromkeys(shares))])


def beside_text(cell, column):
    column, _, percent = column.partition("@")
    known = [got[column] for got in cell.beside.values() if column in got]
    if not known:
        return ""
    pooled = sorted(x for xs in known for x in xs)
    value = (
        pooled[min(len(pooled) - 1, int(len(pooled) * float(percent) / 100))] if percent else fmean(map(fmean, known))
    )
    return "%.*f" % (0 if abs(value) >= 100 else 1, value)


def long(cells, all_cells, whole, beside):
    row(
        ["model", "question", "policy", "budget", "bytes %", "answers, 95 % interval"]
        + [re.sub("@(.*)", r" (\1 %)", b.replace("_", " ")) for b in beside]
        + ["by text"]
    )
    row(["---"] * 3 + ["---:"] * (3 + len(beside)) + ["---"])
    for key in sorted(
        cells,
        key=lambda k: (
            k[0] != "smollm2",
            list(QUESTIONS).index(k[1]),
            budget_order(k[5]),
            -mean_of(cells[k].by_text(whole)),
        ),
    ):
        by_text = cells[key].by_text(whole)
        row(
            [
                key[0],
                QUESTIONS[key[1]],
                shown_name(key[3], key[4]),
                key[5] or "-",
                shown_bytes(all_cells, key),
                "%.0f ± %.0f" % (100 * mean_of(by_text), 100 * half_of(by_text)),
            ]
            + [beside_text(cells[key], b) for b in beside]
            + [", ".join("%s %.0f" % (t, 100 * mean_of({t: v})) for t, v in by_text.items())]
        )


def difference_text(a, b):
    """Of two cells, paired by sample: points and their interval; empty where no samples are the same. Samples are
    numbered alike in every stage, so where one has more, the first are the same."""
    paired = {
        t: [[m - n for m, n in zip(x, y)] for x, y in zip(a[t], b[t])] for t in a if t in b and len(a[t]) == len(b[t])
    }
    return "%+.0f ± %.0f" % (100 * mean_of(paired), 100 * half_of(paired)) if paired else ""


def pair_name(ours, theirs, cache):
    if ours.startswith(theirs + ","):
        return "%s with `%s`" % (shown_name(theirs, cache), ours[len(theirs) + 1 :])
    return "%s - `%s`" % (shown_name(ours, cache), theirs)


def pairs(cells, asked, whole):
    for model, length in models_of(cells):
        rows = {}
        for ours, theirs in asked:
            for key in [k for k in cells if (k[0], k[2], k[3]) == (model, length, ours)]:
                other = next(
                    (cells[k] for k in ((*key[:3], theirs, key[4], b) for b in (key[5], "")) if k in cells), None
                )
                difference = difference_text(cells[key].by_text(whole), other.by_text(whole)) if other else ""
                if difference:
                    rows.setdefault(pair_name(ours, theirs, key[4]), {})[key[1], key[5]] = difference
        columns = in_order({c for got in rows.values() for c in got})
        if columns:
            head(model, length, ", points", "policy and base", columns)
            for name, got in rows.items():
                row([name] + [got.get(c, "") for c in columns])


def write_csv(path, cells, beside):
    with open(path, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(COLUMNS + (["beside"] if beside else []))
        for (model, question, length, policy, cache, budget), cell in sorted(
            cells.items(), key=lambda kv: (kv[0][:5], budget_order(kv[0][5]))
        ):
            for text, tasks in sorted(cell.scores.items()):
                for task, scores in sorted(tasks.items()):
                    out.writerow(
                        [
                            model,
                            question,
                            length,
                            text,
                            task,
                            cache,
                            policy,
                            budget,
                            "%.0f" % cell.kept[text, task],
                            " ".join("%.4g" % s for s in scores),
                        ]
                        + (
                            [
                                " ".join(
                                    "%s=%s" % (b, "/".join("%.6g" % x for x in cell.beside[text, task][b]))
                                    for b in beside
                                    if b in cell.beside[text, task]
                                )
                            ]
                            if beside
                            else []
                        )
                    )


def asked_pairs(text, cells):
    """A policy's options hold = too: the base follows the last one that a policy's name follows."""
    known = {k[3] for k in cells}
    for one in text.split(";"):
        at = max((i for i, c in enumerate(one) if c == "=" and one[i + 1 :] in known), default=-1)
        if at < 0:
            sys.exit("answers.py: --pairs: '%s' does not end in =POLICY of these samples" % one)
        yield one[:at], one[at + 1 :]


def filled(path):
    """The page with its tables made anew; RESULTS are relative to the page."""
    with open(path, encoding="utf-8") as f:
        page = f.read()

    def table(match):
        folder = os.path.dirname(os.path.abspath(path))
        words = [os.path.join(folder, w) if w.endswith(".csv") else w for w in shlex.split(match[1])]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            main(words)
        return "<!-- answers.py %s -->\n\n%s\n\n<!-- end -->" % (match[1], out.getvalue().strip())

    return page, re.sub(r"<!-- answers\.py (.*?) -->\n.*?<!-- end -->", table, page, flags=re.S)


def write_page(path):
    page, now = filled(path)
    with open(path, "w", encoding="utf-8") as f:
        f.write(now)
    print("%s: %s" % (path, "its tables are as they were" if page == now else "its tables were made anew"))


def check_page(path):
    page, now = filled(path)
    if page != now:
        sys.exit(
            "answers.py: %s has tables that do not follow from its CSVs; answers.py --write makes them anew" % path
        )


def main(words=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results", metavar="RESULTS", nargs="*")
    p.add_argument("--models", default="", help="these alone, separated by , [all]")
    p.add_argument("--questions", default="", help="before, after, stream [all]")
    p.add_argument("--tasks", default="", help="these alone, separated by , [all]")
    p.add_argument("--policies", default="", help="rows, separated by ; [all]")
    p.add_argument("--budgets", default="", help="these alone, separated by , [all]")
    p.add_argument("--caches", default="", help="dtypes, separated by , [all]")
    p.add_argument("--beside", default="", help="columns, separated by ,")
    p.add_argument("--mean", action="store_true", help="mean scores in place of whole answers")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--long", action="store_true", help="a row for each cell")
    how.add_argument("--pairs", default="", help="POLICY=BASE, separated by ;")
    p.add_argument("--csv", metavar="OUT.csv", help="write every score")
    how.add_argument("--write", metavar="PAGE.md", nargs="+", help="make tables of pages anew")
    how.add_argument("--check", metavar="PAGE.md", nargs="+", help="fail unless tables of pages follow from their CSVs")
    a = p.parse_args(words)
    if a.write or a.check:
        for page in a.write or a.check:
            (write_page if a.write else check_page)(page)
        return
    beside = [b for b in a.beside.split(",") if b]
    if not a.results:
        p.error("no RESULTS; allowed a CSV, a folder, or lines of kvkeep eval --samples-out")
    cells = read(a.results)
    if a.csv:
        return write_csv(a.csv, cells, beside)
    kept = [(0, a.models, ","), (1, a.questions, ","), (4, a.caches, ","), (5, a.budgets, ",")] + (
        [] if a.pairs else [(3, a.policies, ";")]
    )
    shown = {
        k: c
        for k, c in cells.items()
        if all(not given or k[at] in given.split(by) or (at == 5 and k[5] == "") for at, given, by in kept)
    }
    for cell in shown.values():
        for text in cell.scores:
            cell.scores[text] = {t: s for t, s in cell.scores[text].items() if not a.tasks or t in a.tasks.split(",")}
        cell.scores = {text: tasks for text, tasks in cell.scores.items() if tasks}
    shown = {k: c for k, c in shown.items() if c.scores}
    whole = not a.mean
    if a.pairs:
        pairs(shown, list(asked_pairs(a.pairs, cells)), whole)
    else:
        long(shown, cells, whole, beside) if a.long else wide(shown, cells, whole)
        count = [sum(len(s) for tasks in c.scores.values() for s in tasks.values()) for c in shown.values()]
        print(
            "\n%d to %d samples a cell; texts: %s."
            % (min(count), max(count), ", ".join(sorted({t for c in shown.values() for t in c.scores})))
        )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
