// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the two files of this program share.

#include <cstdint>
#include <vector>

/// Positions that stay of `n` tokens under streaming with a budget of four slots; in the other file.
std::vector<std::int32_t> streamed(std::int32_t n);
