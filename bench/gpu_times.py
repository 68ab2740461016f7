#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What kvkeep plan --gpu knows of a GPU, from bench/gpu/h100.jsonl and bench/counting.py: writes src/cli/gpu_times.h.

    bench/gpu_times.py                           the file
    bench/gpu_times.py --write src/cli/gpu_times.h

Events of one sequence, launched one by one, as they were measured. Where no event of a policy was, but the kernel of
its scorer, the event is counted: an event that was measured, and that kernel beside it. So counted, ams-keydiff on
llama8b would take 610 us; measured are 602.
"""

import argparse
import pathlib
import re
import sys

from analytic import Measured
from counting import GAP, HOST_LINK

# Policies: an event that was measured, and the kernel that comes with the scorer.
COUNTED = {
    "ams-expected": ("ams-tova", "Expected"),
    "expected": ("streaming", "Expected"),
    "keydiff": ("streaming", "KeyDiff"),
}


def rows(measured):
    """(policy, shape, slots before, slots after, us, counted)"""
    found = []
    for case, row in measured.of.items():
        seen = re.fullmatch(r"Event/([^/]+)/([^/]+)/batch:1/(\d+)->(\d+)/dense", case)
        if seen:
            policy, shape, before, after = seen.groups()
            found.append((policy, shape, int(before), int(after), row["eager_us"], False))
    for policy, (event, kernel) in COUNTED.items():
        for _, shape, before, after, us, counted in [r for r in found if r[0] == event and not r[5]]:
            beside = measured.of.get(f"{kernel}/{shape}/batch:1/{before}->{after}")
            if beside:
                found.append((policy, shape, before, after, round(us + beside["us"], 3), True))
    return sorted(found, key=lambda r: (r[5], r[0], r[1], r[2]))


def header(measured):
    ceiling = lambda name: measured.of[f"Ceiling/{name}"]
    observed = [
        (int(case.split(":")[1]), row["eager_us"])
        for case, row in measured.of.items()
        if case.startswith("StepWithoutEvent/llama8b/")
    ]
    truth = {False: "false", True: "true"}
    table = "\n".join(f'    {{"{p}", "{s}", {b}, {a}, {us}, {truth[c]}}},' for p, s, b, a, us, c in rows(measured))
    return f"""// SPDX-License-Identifier: Apache-2.0
#pragma once
// Written by bench/gpu_times.py --write src/cli/gpu_times.h from bench/gpu/h100.jsonl and bench/counting.py.

#include <cstdint>

namespace kvkeep::cli {{

// GPU time of an event of one sequence over all layers. Counted: a measured event and a measured kernel beside it.
struct EventTime {{
  const char* policy;
  const char* shape;
  std::int32_t before, after;  // slots
  double us;
  bool counted;
}};

// clang-format off
inline constexpr EventTime kEventTimes[] = {{
{table}
}};
// clang-format on

inline constexpr const char* kTimedOn = "{measured.card["card"]}, {measured.card["date"]}";
// Bytes a second that are read, bf16 operations a second by cuBLAS.
inline constexpr double kReadRate = {ceiling("read")["GBps"]}e9, kProductRate = {ceiling("products")["TFLOPS"]}e12;
// Showing one token's queries of llama8b to all layers: us of a batch of 1 and of more.
inline constexpr std::int32_t kObservedBatch = {observed[1][0]};
inline constexpr double kObservedOne = {observed[0][1]}, kObservedBatchUs = {observed[1][1]};
// Assumed: us between two kernels of a graph, bytes a second to the memory of the host.
inline constexpr double kGapUs = {GAP}, kHostLink = {HOST_LINK / 1e9:.0f}e9;

}}  // namespace kvkeep::cli
"""


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", type=pathlib.Path, metavar="FILE")
    given = arguments.parse_args()
    text = header(Measured())
    if given.write is None:
        print(text, end="")
    else:
        given.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
