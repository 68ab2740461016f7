#pragma once
/// SeKV: spans of low surprisal fold into one coarse entry near and low-rank factors far, and open again where a query asks.
/// Source, and what differs: segmenter, SpanStore, Router. It runs on traces; no Keeper holds span memories yet.

#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/variant.h"
#include "kvkeep/memory/router.h"
#include "kvkeep/memory/router_training.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

struct SekvOptions {
  Variant variant = Variant::strict;  ///< official: the published budget, of each query head by itself; the other differences are options
  std::int32_t budget = 0;            ///< entries of one KV head that may be in reach at once; 0: no limit
  double zoom_share = 0.5;            ///< share of the budget that is left for zooming where anchors are chosen (strict)
  SegmenterOptions segmenter;
  FactorOptions factors;
  ZoomOptions zoom;
  TrainingOptions training;           ///< weights of the losses, for traces that train router and gates
};

class Sekv final : public KVPolicy {
 public:
  /// `json`: the whole for people and files; the registry makes it. Throws InvalidArgument for options that are not allowed.
  Sekv(SekvOptions options, std::string json);

  [[nodiscard]] std::string_view name() const override { return "sekv"; }
  [[nodiscard]] Needs needs() const override { return {.queries = 1, .keys = true, .values = true, .surprisal = true}; }
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const override;
  [[nodiscard]] Trigger trigger() const override { return {.budget = {}, .never = true}; }
  [[nodiscard]] Decision decide(const Evidence&) const override { return {}; }
  [[nodiscard]] std::string to_json() const override { return json_; }

  [[nodiscard]] const SekvOptions& options() const { return options_; }

  /// The options that a prompt is cut with, where `group` query heads share keys of `dim` numbers: with a budget, few enough anchors.
  [[nodiscard]] SegmenterOptions segmenter(std::int64_t group, std::int64_t dim) const;
  /// What zooming may take beside what is there anyway.
  [[nodiscard]] ZoomBudget zoom_budget(const Segments& segments, std::int64_t group, std::int64_t dim) const;

 private:
  [[nodiscard]] double entries_per_span(std::int64_t group, std::int64_t dim) const;

  SekvOptions options_;
  std::string json_;
};

}  // namespace kvkeep
