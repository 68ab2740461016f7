#pragma once
/// How many of a row's queries take part in its window attention. No LibTorch in here.

#include <cstdint>

namespace kvkeep {

/// How many of a row's queries take part, and from which slot on some of them cannot see.
struct RowWindow {
  std::int32_t queries = 0;  ///< W of this row; 0: no query seen yet
  std::int32_t history = 0;  ///< slots [0, history) are visible to every window query; the rest is the suffix
};

}  // namespace kvkeep
