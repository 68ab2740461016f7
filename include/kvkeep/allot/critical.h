#pragma once
/// CriticalKV: part of the budget by score, the rest by score times how strongly the slot's value moves the layer's
/// output. Source: "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective" (Feng et al.),
/// two-stage selection; CriticalAdaKV with Heads::adaptive. Differs: protected slots count toward the first stage; a
/// head's output weights are read in blocks, so nothing of size [T, hidden] exists; the scores are not changed.

#include <cstdint>
#include <span>

#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/allocator.h"

namespace kvkeep {

struct CriticalOptions {
  enum class Heads : std::uint8_t {
    equal,     ///< every head keeps the budget
    adaptive,  ///< heads keep as many slots as AdaptiveHeads gives them (CriticalAdaKV)
  };
  double first_stage = 0.5;  ///< share of a row's budget that the score alone decides, [0, 1], rounded to millionths
  Heads heads = Heads::equal;
  double safeguard = 0.2;  ///< AdaptiveHeadsOptions::safeguard, Heads::adaptive only

  void describe(Fields& f) {
    f.real("first_stage", first_stage, {0, 1},
           "share of the budget that the score alone decides, protected slots included");
    f.choice("heads", heads, {{"equal", Heads::equal}, {"adaptive", Heads::adaptive}},
             "every head keeps the budget, or as much of the layer's as `adakv` would give it");
    f.real("safeguard", safeguard, {0, 1},
           "with heads=adaptive: share of the budget that every head keeps by its own ranking");
  }
};

/// Added to scores before they are multiplied, so that a slot without attention still counts by its value.
inline constexpr float kCriticalEpsilon = 1e-4F;

/// Per row: protected slots and the best others by score, max(protected, floor(first_stage * budget)) in total; then
/// the best of the rest by (score + 1e-4) * v[t], where v[t] = mean over the group's query heads of the L1 norm of
/// W_o,head * V[t]. Ties: the larger slot; NaN, and a slot whose v[t] is not finite, rank last. Scores must not be
/// negative and must mean the same in every head (shares of attention do).
class Critical final : public AllocatorOf<CriticalOptions> {
 public:
  static constexpr AllocatorTraits traits{
      .name = "criticalkv",
      .what = "half of the budget by score, the rest by score times the size of the value after the output projection",
      .source = "CriticalKV (Feng et al.)",
      .scorer = "snapkv",
      .probability = true};
  static void context(Fields& f) {
    f.values_weighed = true;
    f.uneven_heads = f.uneven_heads || f.says("allocator", "heads", "adaptive");
  }

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return "critical"; }
  void check(AllocatorContext& policy) const override { require_own_form(traits.name, policy, false); }
  void spread(const Evidence& evidence, std::span<const std::int32_t> least,
              std::vector<RowLimit>& rows) const override;
  [[nodiscard]] bool ragged() const override { return options_.heads == CriticalOptions::Heads::adaptive; }
  [[nodiscard]] AcrossHeads across_heads() const override {
    return ragged() ? AcrossHeads::scores : AcrossHeads::nothing;
  }
  [[nodiscard]] Needs needs() const override { return {.values = true, .output_projection = true}; }

  /// Throws InvalidArgument if W_o of a layer is missing or the values are of a dtype that cannot be read.
  /// Cost: 2 * Hq * T * Dv * hidden flop per layer, for rows that are cut. Workspace: one byte per slot of the event,
  /// and per thread workspace_bytes(longest row, Dv). Rows run in parallel; equal values get bit-identical weights,
  /// wherever they are stored.
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override;

  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t length, std::int64_t value_dim);
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/allot/critical-inl.h"
#endif
