#pragma once
/// A prompt that loses tokens after every layer: PyramidInfer's rule.
/// Source: PyramidInfer (Yang et al., Pyramid KV Cache Compression for High-throughput LLM Inference), as ASL's
/// repository runs it. Differs: fp32; among equal scores the lower index is chosen first.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvkeep {

class Fields;

struct ShrinkingContextOptions {
  enum class Schedule : std::uint8_t {
    cosine,    ///< from 1 at the first layer down to `keep`
    constant,  ///< `keep` at every layer
  };
  double recent_ratio = 0.2;  ///< newest share of the prompt: observes, is not scored, and always continues
  double keep = 0.9;          ///< share of the others that continues, at the deepest layer
  Schedule schedule = Schedule::cosine;
  std::int32_t min_context = 64;  ///< at least this many of the others are left
  double distance_weight = 1.2;   ///< weight of the newest observer, relative to 1 for the oldest
  std::int32_t sink = 4;          ///< oldest tokens that always continue

  /// Every problem with these options, one sentence each that names the field; empty: none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
};

/// One prompt that loses tokens from layer to layer.
class ShrinkingContext {
 public:
  /// `layers`: of the model; `tokens`: of the prompt. Throws InvalidArgument with all of options.problems().
  ShrinkingContext(ShrinkingContextOptions options, std::int32_t layers, std::int32_t tokens);

  /// Newest tokens that observe and always continue: floor(recent_ratio * tokens) + 1.
  [[nodiscard]] std::int32_t observers() const { return observers_; }
  /// Share of the others that continues after this layer.
  [[nodiscard]] double share(std::int32_t layer) const;
  /// How many of the others continue if `present` tokens are present: all of them if the share would leave min_context
  /// or fewer.
  [[nodiscard]] std::int32_t going_on(std::int32_t layer, std::int32_t present) const;
  /// Weight of each observer, oldest first.
  [[nodiscard]] std::vector<float> weights() const;
  /// Places, among the tokens present, of those that continue after this layer, ascending. sums: what the weighted
  /// observers' attention gives each of the others, f32 [present - observers()] (Event::token_sums). Cost: a sort.
  [[nodiscard]] std::vector<std::int32_t> tokens(std::int32_t layer, std::span<const float> sums) const;

 private:
  ShrinkingContextOptions options_;
  std::int32_t layers_, observers_, floor_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/layers/shrinking_context-inl.h"
#endif
