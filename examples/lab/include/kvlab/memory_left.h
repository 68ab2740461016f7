// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory that this machine still has for this process.

#include <cstdint>
#include <string>
#include <string_view>

namespace kvkeep::lm {

/// Bytes that can be used without swapping anything out: the least of what the system, the control groups of the
/// process and its limit of address space leave. INT64_MAX where nothing says so. Cost: a few small files are read.
[[nodiscard]] std::int64_t memory_left();

/// "1.5 GiB"
[[nodiscard]] std::string shown_bytes(double bytes);

/// Throws InvalidArgument if `what` takes more than there is: "operation: what takes X, and Y is left; allowed ...".
/// `bytes` is floating point, since sizes that a command line asks for may be beyond any integer. `given` replaces
/// memory_left().
void require_memory(std::string_view operation, std::string_view what, double bytes, std::string_view allowed,
                    std::int64_t given = memory_left());

}  // namespace kvkeep::lm
