#pragma once
/// GemFilter: the last query of an early layer chooses tokens, which then run again as a new, short prompt. Source:
/// GemFilter (Shi et al., Discovering the Gems in Early Layers). Differs: see last_query_scores().

#include <memory>

#include "kvkeep/policy/prefill.h"

namespace kvkeep {

struct GemFilterOptions {
  std::int32_t select = 2048;  ///< tokens of the second pass
  std::int32_t layer = 13;     ///< the layer whose last query chooses; layers after it do not run in the first pass
  std::int32_t pool = 5;       ///< tokens pooled over, odd

  void describe(Fields& f);
};

class GemFilter final : public Prefill {
 public:
  GemFilter(GemFilterOptions options, std::unique_ptr<KVPolicy> decoding, std::string json = {});
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(Machine& machine, const ModelSpec& spec,
                                                         std::int32_t tokens) const override;
  [[nodiscard]] LayerDecision decide_layer(Machine& machine, const Evidence& evidence,
                                           std::span<PromptPass* const> passes) const override;
  [[nodiscard]] std::vector<PromptCourse> courses(const ModelSpec& spec, std::int32_t tokens) const override;

 protected:
  [[nodiscard]] std::vector<std::string> misfits(const ModelSpec& spec) const override;
  [[nodiscard]] LayerDemand layer_demand() const override { return {.policy = name()}; }

 private:
  GemFilterOptions options_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/gemfilter-inl.h"
#endif
