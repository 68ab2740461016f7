// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What must hold after any event, whoever computed it. Each function returns one sentence per violation; empty is
/// good.

#include <string>
#include <vector>

#include "event_oracle.h"

namespace oracle {

using Violations = std::vector<std::string>;

/// Exactly min(T, budget) slots, inside [0, T), strictly ascending, with every must-keep slot and, where nothing has to
/// go, all of them.
Violations check_slots(const Options& options, int T, const std::vector<int>& slots);

/// Segments partition [0, T); in strict their lengths are within bounds.
Violations check_segments(const Options& options, int T, const std::vector<int>& ends);

/// Quotas add up to the (segment) budget, fit their segments, hold the floors where all floors fit, and strict keeps
/// what they say.
Violations check_quotas(const Options& options, const std::vector<int>& ends, const std::vector<int>& quotas,
                        const std::vector<int>& slots);

/// Within a segment no dropped slot ranks before a kept one that is not must-keep. Give [0, T) as one segment for plain
/// top-k.
Violations check_ranking(const Options& options, const std::vector<double>& scores, const std::vector<int>& ends,
                         const std::vector<int>& slots);

/// Not negative, and the sum is 1 within 1e-5.
Violations check_mass(const std::string& name, const std::vector<double>& mass);

/// Not negative, at most 1 in sum; the EMA of what was given (new slots start from 0); gathered with the slots.
Violations check_credit(const Options& options, const std::vector<double>& given, const Row& row);

/// Positions stay strictly ascending, and the first `sink` logical positions stay where they were there before.
Violations check_positions(const Options& options, const std::vector<int>& positions, const std::vector<int>& slots);

/// All of the above for KV head `head`. Fields the implementation does not report (empty vectors) are not checked.
Violations violations(const Options& options, const Sequence& sequence, int head, const Row& row);

}  // namespace oracle
