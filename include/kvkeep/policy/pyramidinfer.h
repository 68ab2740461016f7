#pragma once
/// PyramidInfer: fewer tokens continue from layer to layer; every layer's cache holds the tokens that entered it.
/// Source and differences: see ShrinkingContext. Its compression of decoded blocks is left out: any policy may decide
/// after the prompt.

#include <memory>
#include <utility>

#include "kvkeep/layers/shrinking_context.h"
#include "kvkeep/policy/prefill.h"
#include "kvkeep/policy/tokens_of.h"

namespace kvkeep {

class PyramidInfer final : public Prefill {
 public:
  PyramidInfer(ShrinkingContextOptions options, std::unique_ptr<KVPolicy> decoding, std::string json = {});
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(const ModelSpec& spec, std::int32_t tokens) const override;

 protected:
  [[nodiscard]] std::vector<std::string> misfits(const ModelSpec& spec) const override;

 private:
  ShrinkingContextOptions options_;
};

namespace pyramidinfer_detail {

class PyramidInferPass final : public PromptPass {
 public:
  PyramidInferPass(const ShrinkingContextOptions& options, std::int32_t layers, std::int32_t tokens)
      : context_(options, layers, tokens) {}

  [[nodiscard]] std::int32_t wants(std::int32_t layer, std::int32_t present) const override {
    return context_.going_on(layer, present) < present - context_.observers() ? context_.observers() : 0;
  }

  [[nodiscard]] Decision decide(const Evidence& evidence) override {
    const Row& row = evidence.table.rows.front();
    KVKEEP_REQUIRE_AS(StateError, wants(row.layer, row.length) > 0, "prompt pass: layer ", row.layer, " with ",
                      row.length, " tokens is not due; allowed layers that wants() names");
    Decision decision;
    decision.reason = Reason::over_budget;
    decision.narrow = tokens_of(context_.tokens(evidence));
    return decision;
  }

 private:
  ShrinkingContext context_;
};

}  // namespace pyramidinfer_detail

inline PyramidInfer::PyramidInfer(ShrinkingContextOptions options, std::unique_ptr<KVPolicy> decoding, std::string json)
    : Prefill("pyramidinfer", std::move(decoding), std::move(json)), options_(options) {
  static_cast<void>(ShrinkingContext(options_, 1, 1));  // throws if the options are wrong
}

inline std::vector<std::string> PyramidInfer::misfits(const ModelSpec&) const { return {}; }

inline std::unique_ptr<PromptPass> PyramidInfer::begin_prompt(const ModelSpec& spec, std::int32_t tokens) const {
  return std::make_unique<pyramidinfer_detail::PyramidInferPass>(options_, spec.num_layers(), tokens);
}

}  // namespace kvkeep
