// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Common English words for the text tasks: the project's own choice.

#include <span>
#include <string_view>

namespace kvkeep::lm {

/// Lower-case ASCII, four letters or more. No word is in two lists, and none is a part of another, so an answer that
/// contains a word means it.
std::span<const std::string_view> adjectives();  ///< 214
std::span<const std::string_view> nouns();       ///< 538
std::span<const std::string_view> verbs();       ///< 308

}  // namespace kvkeep::lm
