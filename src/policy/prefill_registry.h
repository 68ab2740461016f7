#pragma once
/// Policies that narrow prompts, by name.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fields.h"

namespace kvkeep {

/// Makes a policy from the options that were read.
using MakePrefill = std::function<std::unique_ptr<KVPolicy>(std::unique_ptr<KVPolicy> decoding, std::string json)>;

struct PrefillEntry {
  const char* name;
  const char* what;
  const char* source;
  const char* needs;
  MakePrefill (*describe)(Fields& f);
};

[[nodiscard]] const std::vector<PrefillEntry>& prefill_policies();

/// Option `pool`, the slots pooled over, which scorers of windows share.
void describe_pool(Fields& f, std::int32_t& pool, const char* what);
inline constexpr std::int64_t kMostQueries = 1 << 20;  ///< most queries that a ring may be asked to hold

}  // namespace kvkeep
