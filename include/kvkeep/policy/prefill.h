#pragma once
/// Base of policies that act while a prompt runs through the layers. Another policy decides once the prompt has ended.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/policy/policy.h"

namespace kvkeep {

class Prefill : public KVPolicy {
 public:
  /// `decoding` decides after the prompt: any policy that does not narrow. `name` and `json` describe the whole policy
  /// to people and files; the registry makes them.
  Prefill(std::string name, std::unique_ptr<KVPolicy> decoding, std::string json);

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] Needs needs() const override { return decoding_->needs(); }
  /// Refuses models with layers that are not full: a window that slides over positions would slide over gaps.
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const final;
  [[nodiscard]] Trigger trigger() const override { return decoding_->trigger(); }
  [[nodiscard]] Decision decide(Machine& machine, const Evidence& evidence) const override {
    return decoding_->decide(machine, evidence);
  }
  [[nodiscard]] const MemoryOptions* memory() const override { return decoding_->memory(); }
  [[nodiscard]] bool narrows() const override { return true; }
  [[nodiscard]] std::string to_json() const override { return json_; }

  [[nodiscard]] const KVPolicy& decoding() const { return *decoding_; }

 protected:
  /// Reasons why its options do not fit this model.
  [[nodiscard]] virtual std::vector<std::string> misfits(const ModelSpec& spec) const = 0;

 private:
  std::string name_;
  std::unique_ptr<KVPolicy> decoding_;
  std::string json_;
};

}  // namespace kvkeep
