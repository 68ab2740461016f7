#pragma once
/// Everything that is not allowed in a struct of options, in one message.

#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep {

/// Throws InvalidArgument "operation: one; two; three" unless `problems` is empty.
inline void require_no_problems(std::string_view operation, const std::vector<std::string>& problems) {
  std::string all;
  for (const std::string& one : problems) all += (all.empty() ? "" : "; ") + one;
  KVKEEP_REQUIRE(all.empty(), operation, ": ", all);
}

}  // namespace kvkeep
