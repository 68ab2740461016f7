// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Base of policies that act while a prompt runs through the layers. Another policy decides once the prompt has ended.

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

/// One way that a prompt may take through the layers, in numbers of tokens.
struct PromptCourse {
  std::vector<std::int32_t> entered =
      {};                               ///< [layers that it reaches] tokens whose rows a layer holds until it decides
  std::vector<std::int32_t> held = {};  ///< [num_layers] slots of every row once the prompt has ended
  std::int32_t restart = 0;             ///< tokens that run again as a prompt of their own; 0: there is one pass
};

/// keep_top_mass() as an allocator: what a layer keeps for decoding under `cache_mass`. Its scores are
/// PromptScores::sums.
class HeldMass final : public Allocator {
 public:
  explicit HeldMass(TopMassOptions options) : options_(options) {}
  [[nodiscard]] std::string_view name() const override { return "cache_mass"; }
  [[nodiscard]] bool ragged() const override { return true; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::counts; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention,
             Decision& decision) const override {
    decision.keep = keep_top_mass(evidence.table, scores.data, options_, &limits);
  }
  [[nodiscard]] const TopMassOptions& options() const { return options_; }

 private:
  TopMassOptions options_;
};

class Prefill : public KVPolicy {
 public:
  /// `decoding` decides after the prompt: any policy that does not narrow. `name` and `json` describe the whole policy
  /// to people and files; the registry makes them.
  Prefill(std::string name, std::unique_ptr<KVPolicy> decoding, std::string json = {});

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] Needs needs() const override { return decoding_->needs(); }
  /// Refuses models with layers that are not full: a window that slides over positions would slide over gaps.
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const final;
  /// Those of its layers, and of the policy that decides after the prompt.
  [[nodiscard]] std::vector<std::string> problems_on(const Machine& machine, const ModelSpec& spec) const final;
  /// That of `decoding`; layers may end up with rows of different lengths.
  [[nodiscard]] Trigger trigger() const override {
    Trigger trigger = decoding_->trigger();
    trigger.ragged = true;
    return trigger;
  }
  [[nodiscard]] Decision decide(Machine& machine, const Evidence& evidence) const override {
    return decoding_->decide(machine, evidence);
  }
  [[nodiscard]] const MemoryOptions* memory() const override { return decoding_->memory(); }
  [[nodiscard]] bool narrows() const override { return true; }
  /// Every way that a prompt of `tokens` tokens, 1 or more, may take; where shares of attention decide how many tokens
  /// stay, the fewest and the most. Empty: not known, as of a policy that does not say.
  [[nodiscard]] virtual std::vector<PromptCourse> courses(const ModelSpec&, std::int32_t tokens) const {
    static_cast<void>(tokens);
    return {};
  }
  /// True if courses() are the ends of ranges.
  [[nodiscard]] virtual bool courses_vary() const { return false; }
  void check_pins(std::span<const PositionSpan>) const override {
    refuse<Unsupported>("pin: ", name_, " narrows prompts, and ranks alone say which tokens continue; allowed under ",
                        "policies that do not narrow");
  }
  [[nodiscard]] std::string to_json() const override { return json_; }

  [[nodiscard]] const KVPolicy& decoding() const { return *decoding_; }

 protected:
  /// Reasons why its options do not fit this model.
  [[nodiscard]] virtual std::vector<std::string> misfits(const ModelSpec& spec) const = 0;
  /// What its layers ask of a machine.
  [[nodiscard]] virtual LayerDemand layer_demand() const = 0;

 private:
  std::string name_;
  std::unique_ptr<KVPolicy> decoding_;
  std::string json_;
};

inline Prefill::Prefill(std::string name, std::unique_ptr<KVPolicy> decoding, std::string json)
    : name_(std::move(name)), decoding_(std::move(decoding)), json_(std::move(json)) {
  KVKEEP_REQUIRE(decoding_ != nullptr, name_,
                 ": decode: policy must not be null; allowed one that decides after the prompt, such as full");
  KVKEEP_REQUIRE(!decoding_->narrows(), name_, ": decode: ", decoding_->name(),
                 " acts on prompts itself; allowed a policy that decides after them");
  KVKEEP_REQUIRE(decoding_->trigger().never || decoding_->trigger().prefill != Trigger::Prefill::pieces, name_,
                 ": decode: ", decoding_->name(), " has prefill=pieces, and ", name_,
                 " reads a prompt whole, layer by layer; allowed prefill=keep, cut or only");
}

inline std::vector<std::string> Prefill::problems_on(const Machine& machine, const ModelSpec& spec) const {
  std::vector<std::string> found = machine.problems(layer_demand(), spec);
  for (std::string& one : decoding_->problems_on(machine, spec)) found.push_back(std::move(one));
  return found;
}

inline std::vector<std::string> Prefill::problems(const ModelSpec& spec) const {
  std::vector<std::string> found = misfits(spec);
  if (static_cast<std::int32_t>(spec.full_layers().size()) != spec.num_layers())
    found.push_back(text("layers: ", name_, " drops token rows, but ",
                         spec.num_layers() - static_cast<std::int32_t>(spec.full_layers().size()), " of ",
                         spec.num_layers(), " layers are not full attention; allowed models with full layers only"));
  if (decoding_->needs().surprisal)
    found.push_back(text("decode: ", decoding_->name(), " reads the surprisal of every token, but tokens that ", name_,
                         " drops never reach the last layer; allowed a policy that does not read it"));
  for (std::string& one : decoding_->problems(spec)) found.push_back(std::move(one));
  return found;
}

}  // namespace kvkeep
