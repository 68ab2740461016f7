#pragma once
/// PyramidInfer: fewer tokens continue from layer to layer; every layer's cache holds the tokens that entered it.
/// Source and differences: see ShrinkingContext. Its compression of decoded blocks is left out: any policy may decide
/// after the prompt.

#include <memory>

#include "kvkeep/layers/shrinking_context.h"
#include "kvkeep/policy/prefill.h"

namespace kvkeep {

class PyramidInfer final : public Prefill {
 public:
  PyramidInfer(ShrinkingContextOptions options, std::unique_ptr<KVPolicy> decoding, std::string json);
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(const ModelSpec& spec, std::int32_t tokens) const override;

 protected:
  [[nodiscard]] std::vector<std::string> misfits(const ModelSpec& spec) const override;

 private:
  ShrinkingContextOptions options_;
};

}  // namespace kvkeep
