#pragma once
/// Keeps everything: the baseline of every comparison, bit for bit the engine without kvkeep.

#include "kvkeep/policy/policy.h"

namespace kvkeep {

class Full final : public KVPolicy {
 public:
  [[nodiscard]] std::string_view name() const override { return "full"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {}, .never = true}; }
  [[nodiscard]] Decision decide(Machine&, const Evidence&) const override { return {}; }
  void check_pins(std::span<const PositionSpan>) const override {}
  [[nodiscard]] std::string to_json() const override { return R"({"policy": "full"})"; }
};

}  // namespace kvkeep
