#pragma once
/// ASL and FastKV: in every layer the newest queries of a prompt rank its tokens. From the layer where the ranking has
/// settled, or from a given layer, only the best continue. Source: ASL (adaptive layer selection), paper and code;
/// FastKV (Jo et al.) through `selector.fixed_layer`. Differs: see LayerSelector; the cache may follow SnapKV or top-p
/// as in ASL's code; kept slots stay in order of position. FastKV's own release observes with 8 queries and does not
/// touch prompts that fit the cache.

#include <memory>

#include "kvkeep/core/protect.h"
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/prefill.h"

namespace kvkeep {

struct AslOptions {
  enum class Indices : std::uint8_t {
    ranks,       ///< the best-ranked tokens and the window
    last_query,  ///< the tokens that GemFilter would choose in the selecting layer
  };
  LayerSelectorOptions selector = {.select = 2048,
                                   .window = 32,
                                   .min_layer = -1,
                                   .observed_layers = 8,
                                   .threshold = 0.3,
                                   .fixed_layer = -1,
                                   .missed_mass = 0,
                                   .select_mass = 1};  ///< min_layer -1: a third of the model's layers
  std::int32_t pool = 7;                               ///< tokens pooled over, odd
  PromptScoreOptions::Pool pooling = PromptScoreOptions::Pool::average;
  std::int32_t cache = 0;  ///< slots that each row of a layer keeps for decoding, including the window (SnapKV); 0: all
  double cache_mass = 0;   ///< instead of `cache`: as many slots as hold this share of the window's attention; 0: all
  bool two_pass = false;   ///< the chosen tokens run again as a new prompt
  Indices indices = Indices::ranks;   ///< two_pass only
  Variant variant = Variant::strict;  ///< official: counts of cache_mass are rounded down

  /// Every problem with these options, one sentence each that names the field; empty: none.
  [[nodiscard]] std::vector<std::string> problems() const;
  /// True if a layer that `present` tokens have reached keeps fewer of them.
  [[nodiscard]] bool cuts(std::int32_t present) const {
    if (present <= selector.window) return false;
    return cache > 0 ? present > cache : cache_mass > 0 && present > selector.select;
  }
  /// The options of asl; of asl-2pass with `two_pass`; of fastkv with a `selector.fixed_layer` of 0 or more. `policy`
  /// is the name in messages.
  void describe(Fields& f, std::string_view policy);
};

class Asl final : public Prefill {
 public:
  /// Throws InvalidArgument with all of options.problems().
  Asl(std::string name, AslOptions options, std::unique_ptr<KVPolicy> decoding, std::string json = {});
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(Machine& machine, const ModelSpec& spec,
                                                         std::int32_t tokens) const override;
  [[nodiscard]] LayerDecision decide_layer(Machine& machine, const Evidence& evidence,
                                           std::span<PromptPass* const> passes) const override;
  [[nodiscard]] std::vector<PromptCourse> courses(const ModelSpec& spec, std::int32_t tokens) const override;
  [[nodiscard]] bool courses_vary() const override {
    return options_.selector.select_mass < 1 || options_.cache_mass > 0;
  }
  [[nodiscard]] const AslOptions& options() const { return options_; }

 protected:
  [[nodiscard]] std::vector<std::string> misfits(const ModelSpec& spec) const override;
  [[nodiscard]] LayerDemand layer_demand() const override;

 private:
  [[nodiscard]] LayerSelectorOptions selector(const ModelSpec& spec) const;

  AslOptions options_;
  std::unique_ptr<Allocator> cut_;  ///< of the slots that a layer keeps for decoding; null: all stay
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/asl-inl.h"
#endif
