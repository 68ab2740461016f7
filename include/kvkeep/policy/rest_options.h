// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How the slots that do not stay fold into spans.

#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep {

/// What happens to slots that do not stay.
struct RestOptions {
  enum class Weights : std::uint8_t {
    mass,  ///< attention mass weights a slot in the coarse entry of its span; equal if the allocator computes none
    equal,
  };
  std::int32_t min_span =
      8;  ///< dropped slots of neighbouring segments are merged until the span has at least this many
  std::int32_t max_span = 64;  ///< longer spans are cut into equal pieces
  Weights weights = Weights::equal;
  MemoryOptions memory;

  [[nodiscard]] SpanCut cut() const { return {min_span, max_span, weights == Weights::mass}; }

  /// Every problem with these options, one sentence each that names the field; empty: none.
  [[nodiscard]] std::vector<std::string> problems() const;
};

inline std::vector<std::string> RestOptions::problems() const {
  std::vector<std::string> found = memory.problems();
  if (min_span < 1) found.push_back(text("min_span: ", min_span, "; allowed 1 or more"));
  if (max_span < 1) found.push_back(text("max_span: ", max_span, "; allowed 1 or more"));
  return found;
}

}  // namespace kvkeep
