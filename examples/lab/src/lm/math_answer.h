// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Answers that are numbers or expressions of LaTeX.

#include <string>
#include <string_view>

namespace kvkeep::lm {

/// What the last \boxed{} or \fbox{} holds, else the last number, else nothing. Cost: O(answer).
[[nodiscard]] std::string final_answer(std::string_view answer);

/// The expression as MATH's is_equiv compares it. Cost: O(expression) in memory, and in time but for a small factor.
[[nodiscard]] std::string plain_expression(std::string_view latex);

/// Whether two answers are the same number, or else the same expression.
[[nodiscard]] bool same_answer(std::string_view a, std::string_view b);

}  // namespace kvkeep::lm
