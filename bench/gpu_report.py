#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What bench/gpu.sh prints of its results: whatever is there of them, also of a run that was stopped.

    bench/gpu_report.py tests LOG...             logs of GoogleTest
    bench/gpu_report.py crashed LOG...           tests that began and did not end, a line each
    bench/gpu_report.py unbegun LOG... < LIST    a filter of those of --gtest_list_tests that did not begin
    bench/gpu_report.py bench LINES [FOLDER]     lines of JSON from kvkeep_gpu_bench; FOLDER: gpu.txt and clock.csv
    bench/gpu_report.py profile FOLDER           ncu's pages as CSV

Failures come last.
"""

import csv
import json
import os
import pathlib
import re
import sys

LIMIT = int(os.environ.get("KVKEEP_GPU_REPORT", "6500"))  # characters; what is printed beside it is short


def read_lines(path):
    """Objects of a file of JSON lines, whose last one may be cut off."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return found


def number(row, key, form="{:.1f}", scale=1.0):
    return form.format(row[key] * scale) if isinstance(row.get(key), (int, float)) else "-"


def rate(row, ceiling):
    """GB/s and the share of the reading ceiling, as text."""
    us = row.get("us") or row.get("graph_us") or row.get("eager_us")
    if not us or "bytes" not in row:
        return "-", "-"
    gbps = row["bytes"] / us / 1e3
    return f"{gbps:.0f}", f"{gbps / ceiling:.2f}" if ceiling else "-"


def clocks(folder):
    sampled = []
    for line in (
        (folder / "clock.csv").read_text(errors="replace").splitlines() if (folder / "clock.csv").exists() else []
    ):
        try:
            sampled.append([float(x) for x in line.split(",")])
        except ValueError:
            pass
    if not sampled:
        return None
    mhz = sorted(row[0] for row in sampled)
    hottest, most = max(row[1] for row in sampled), max(row[2] for row in sampled)
    clock = f"SM clock {mhz[0]:.0f} to {mhz[-1]:.0f} MHz, median {mhz[len(mhz) // 2]:.0f}"
    return f"{clock}; up to {hottest:.0f} C, {most:.0f} W"


def bench(path, folder):
    lines = read_lines(path)
    rows = [row for row in lines if "case" in row]
    begun = [row["begins"] for row in lines if "begins" in row]
    left = [row["left_out"] for row in lines if "left_out" in row]
    machine = next((row["machine"] for row in lines if "machine" in row), "no machine is named: nothing has run")
    if (folder / "gpu.txt").exists():
        machine = (folder / "gpu.txt").read_text().strip() + "; " + machine
    head = [machine] + [said for said in [clocks(folder)] if said]

    ceilings = {row["case"].split("/")[1]: row for row in rows if row["case"].startswith("Ceiling/")}
    head.append(
        "ceilings: copy "
        + number(ceilings.get("copy", {}), "GBps", "{:.0f}")
        + " GB/s read and written, read "
        + number(ceilings.get("read", {}), "GBps", "{:.0f}")
        + " GB/s, cuBLAS bf16 "
        + number(ceilings.get("products", {}), "TFLOPS", "{:.0f}")
        + " TFLOP/s"
    )
    ceiling = ceilings.get("read", {}).get("GBps")

    table = [
        "",
        "event, us:                                     eager    graph     host launches  GB/s share LibTorch's",
    ]
    for row in rows:
        name = row["case"]
        if name.startswith("Event/"):
            gbps, share = rate({**row, "us": row.get("graph_us")}, ceiling)
            table.append(
                f"{name[6:]:44} {number(row, 'eager_us'):>8} {number(row, 'graph_us'):>8} {number(row, 'host_us'):>8} "
                f"{number(row, 'launches', '{:.0f}'):>8} {gbps:>5} {share:>5} {number(row, 'torch_us'):>10}"
            )
    for row in rows:
        if row["case"].startswith("StepWithoutEvent/"):
            table.append(
                f"{row['case']}: observe {number(row, 'eager_us')} us, of the host {number(row, 'host_us')}; the step "
                f"{number(row, 'idle_us')} us of the host"
            )

    kernels, models = {}, []
    for row in rows:
        if row["case"].split("/")[0] in ("Event", "StepWithoutEvent", "Ceiling"):
            continue
        kernel, model, *size = row["case"].split("/")
        models += [model] if model not in models else []
        kernels.setdefault(kernel + " " + " ".join(size).replace("batch:", "B="), {})[model] = row
    if kernels:
        table += [
            "",
            f"{'kernel':31}" + "".join(f" {model + ': us':>10} {'MB':>8} {'GB/s':>5} share" for model in models),
        ]
    for name, by_model in kernels.items():
        line = f"{name:31}"
        for model in models:
            row = by_model.get(model, {})
            gbps, share = rate(row, ceiling)
            line += f" {number(row, 'us'):>10} {number(row, 'bytes', '{:.1f}', 1e-6):>8} {gbps:>5} {share:>5}"
        table.append(line.rstrip())

    end = [f"{len(rows)} cases, {sum('error' in row for row in rows)} failed"]
    end += [f"not captured in a graph: {row['case']}" for row in rows if row.get("not_captured")]
    if left:
        end.append(f"left out for want of time: {len(left)}, from {left[0]} on")
    done = {row["case"] for row in rows}
    say(head + table, end)
    tell(
        [f"STOPPED in {name}: it began and did not end" for name in begun if name not in done]
        + [f"FAILED {row['case']}: {row['error']}"[:300] for row in rows if "error" in row]
    )
    return 1 if not rows else 0


BEGAN = re.compile(r"^\[ RUN      \] (\S+)", re.M)


def unfinished(text):
    """The test that began last, if it did not end; else None."""
    began = BEGAN.findall(text)
    after = text[text.rfind("[ RUN      ] " + began[-1]) + 12 :] if began else ""
    return began[-1] if began and not re.search(r"^\[ .{8} \] " + re.escape(began[-1]) + r"\b", after, re.M) else None


def crashed(paths):
    print("\n".join(filter(None, (unfinished(path.read_text(errors="replace")) for path in paths))))
    return 0


def unbegun(paths):
    began = {name for path in paths for name in BEGAN.findall(path.read_text(errors="replace"))}
    suite, names = "", []
    for line in sys.stdin:
        word = line.split("#")[0].strip()
        if line.startswith(" "):
            names.append(suite + word)
        elif word.endswith("."):
            suite = word
    print(":".join(name for name in names if name not in began))
    return 0


def tests(paths):
    """All logs together: the shards of one run, or one."""
    began, passed, skipped, failed, runs, end = [], 0, 0, [], 0, []
    for path in paths:
        text = path.read_text(errors="replace")
        began += BEGAN.findall(text)
        passed += len(re.findall(r"^\[       OK \] (\S+)", text, re.M))
        skipped += len(set(re.findall(r"^\[  SKIPPED \] (\S+?)(?: \(|$)", text, re.M)))
        runs = max(runs, len(re.findall(r"^Repeating all tests", text, re.M)))
        names = sorted({name.rstrip(",") for name in re.findall(r"^\[  FAILED  \] (\w[\w./]*\.\w[\w/]*)", text, re.M)})
        failed += names
        if unfinished(text):
            end.append(f"STOPPED in {unfinished(text)}: it began and did not end")
        for name in names:
            body = re.search(r"^\[ RUN      \] " + re.escape(name) + r"$(.*?)^\[  FAILED  \] ", text, re.M | re.S)
            end.append(
                f"FAILED {name}"
                + ("".join("\n    " + line[:160] for line in body[1].strip().splitlines()[:6]) if body else "")
            )
    say(
        [
            f"{paths[0].name.split('.')[0]}: {passed} passed, {len(failed)} failed, {skipped} skipped"
            + (f", {len(set(began))} tests in {runs} runs" if runs > 1 else "")
        ],
        [],
    )
    tell(end)
    return 0


def pages_of(path):
    """Rows of ncu's page as CSV in a log; None: there is none."""
    text = path.read_text(errors="replace").splitlines()
    start = next((i for i, line in enumerate(text) if line.startswith('"ID"')), None)
    return None if start is None else list(csv.DictReader(text[start:]))


def short(kernel):
    """The name of a kernel without its namespace and arguments."""
    return (
        re.sub(r"\(.*", "", kernel.replace("(anonymous namespace)", "").replace("<unnamed>", "")).split("::")[-1]
        if "<" not in kernel
        else re.sub(r"^.*?(\w+)<.*", r"\1", re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", kernel))
    )


def profile(folder):
    wanted = ["Duration", "DRAM Throughput", "Compute (SM) Throughput", "Achieved Occupancy"]
    for path in sorted(folder.glob("*.log"), key=lambda path: (path.name != "event.log", path.name)):
        rows = pages_of(path)
        if rows is None:
            text = path.read_text(errors="replace").splitlines()
            say(
                [],
                [f"{path.name[:-4]}: ncu gave no page"]
                + ["  " + line[:200] for line in text if "ERR" in line or "==ERROR==" in line][:3],
                1200,
            )
            continue
        if path.name == "event.log":
            say(["us of each kernel of an event, in the order of their launches, caches cold:"] + times(rows), [])
            continue
        launches = {}
        for row in rows:
            if row.get("Metric Name") in wanted:
                launches.setdefault((row["ID"], short(row["Kernel Name"])), []).append(
                    f"{row['Metric Name']} {row['Metric Value']} {row['Metric Unit']}"
                )
        say(
            [f"{path.name[:-4]}"]
            + [f"  {kernel}: " + ", ".join(dict.fromkeys(said)) for (_, kernel), said in launches.items()],
            [],
            600,
        )
    return 0


def times(rows):
    """Durations by grid: the kernels that observe are launched for every layer, and shown once."""
    found = {}
    for row in rows[1:]:  # the first has the units
        found.setdefault(
            (
                short(row["Kernel Name"]),
                row["Grid Size"],
                row["launch__shared_mem_per_block"],
                row["launch__registers_per_thread"],
            ),
            [],
        ).append(float(row["gpu__time_duration.sum"].replace(",", "")) / 1e3)
    return [
        f"  {kernel:34} {grid:>18} blocks, {shared:>8} bytes shared, {registers:>3} registers: "
        + " ".join(f"{us:.1f}" for us in of[:2])
        + (f" ... ({len(of)})" if len(of) > 2 else "")
        for (kernel, grid, shared, registers), of in found.items()
    ]


def tell(failures):
    """Failures come last of all: gpu.sh prints what stands in its file at the end."""
    if not failures:
        return
    path = os.environ.get("KVKEEP_GPU_FAILURES")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n".join(failures) + "\n")
    else:
        say([], failures)


def say(body, end, limit=LIMIT):
    """Prints both; where that is too much, the body gives way."""
    end_text = "\n".join(end)[: limit // 2]
    text = "\n".join(body)
    room = limit - len(end_text)
    if len(text) > room:
        text = text[:room].rsplit("\n", 1)[0] + "\n... (the rest is in the file)"
    print("\n".join(part for part in (text, end_text) if part))


def main():
    of_logs = {"tests": tests, "crashed": crashed, "unbegun": unbegun}
    if len(sys.argv) < 3 or sys.argv[1] not in (*of_logs, "bench", "profile"):
        sys.exit(__doc__)
    paths = [pathlib.Path(given) for given in sys.argv[2:]]
    if sys.argv[1] in of_logs:
        return of_logs[sys.argv[1]](paths)
    if sys.argv[1] == "bench":
        return bench(paths[0], paths[-1] if len(paths) > 1 else paths[0].parent)
    return profile(paths[0])


if __name__ == "__main__":
    sys.exit(main())
