// SPDX-License-Identifier: Apache-2.0
// Any text as a policy: it is made, or refused with a sentence. What was made describes itself, and that description
// makes the same again.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kvkeep/policy/registry.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const bool json : {true, false}) {
    try {
      const auto policy = json ? kvkeep::make_policy_from_json(text) : kvkeep::make_policy(text);
      if (kvkeep::make_policy_from_json(policy->to_json())->to_json() != policy->to_json()) std::abort();
    } catch (const kvkeep::Error&) {
    }
  }
  return 0;
}
