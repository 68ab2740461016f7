#pragma once
/// Eviction: a scorer ranks, an allocator spends the budget, the rest is dropped.

#include <memory>
#include <string>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

class Evict final : public KVPolicy {
 public:
  /// `name` and `json` describe the policy to people and files; the registry makes them.
  Evict(std::string name, std::unique_ptr<Scorer> scorer, std::unique_ptr<Allocator> allocator, Retention retention, std::int32_t interval, std::string json);

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] Needs needs() const override;
  [[nodiscard]] Trigger trigger() const override { return {retention_.budget, interval_}; }
  [[nodiscard]] Decision decide(const Evidence& evidence) const override;
  [[nodiscard]] std::string to_json() const override { return json_; }

  [[nodiscard]] const Retention& retention() const { return retention_; }

 private:
  std::string name_;
  std::unique_ptr<Scorer> scorer_;
  std::unique_ptr<Allocator> allocator_;
  Retention retention_;
  std::int32_t interval_;
  std::string json_;
};

}  // namespace kvkeep
