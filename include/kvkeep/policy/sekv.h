#pragma once
/// SeKV: spans of low surprisal fold into one coarse entry near and low-rank factors far, and open again where a query
/// asks. Source, and what differs: segmenter, SpanRow, Router. Differs too: tokens that are generated join the local
/// window and fold when they leave it (the published code never stores them).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/variant.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/memory/router_training.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

struct SekvOptions {
  Variant variant = Variant::strict;  ///< official: the published budget, of each query head by itself; the other
                                      ///< differences are options
  std::int32_t budget = 0;            ///< entries of one KV head that may be in reach at once; 0: no limit
  double budget_share = 0;            ///< instead: that share of the tokens seen; 0: none
  double zoom_share = 0.5;      ///< share of the budget that is left for zooming where anchors are chosen (strict)
  std::int32_t interval = 128;  ///< tokens that leave the window together while decoding
  SegmenterOptions segmenter;
  MemoryOptions memory;
  TrainingOptions training;  ///< weights of the losses, for traces that train router and gates
};

class Sekv final : public KVPolicy {
 public:
  /// `json`: the whole for people and files; the registry makes it. Throws InvalidArgument for options that are not
  /// allowed.
  Sekv(SekvOptions options, std::string json);

  [[nodiscard]] std::string_view name() const override { return "sekv"; }
  [[nodiscard]] Needs needs() const override { return {.keys = true, .values = true, .surprisal = true}; }
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const override;
  [[nodiscard]] Trigger trigger() const override {
    return {.budget = {},
            .interval = options_.interval,
            .kind = Trigger::Kind::window,
            .recent = options_.segmenter.recent};
  }
  [[nodiscard]] const MemoryOptions* memory() const override { return &options_.memory; }

  /// Cuts what stands before the local window and was not decided on yet. The first time: the whole, by the mean and
  /// deviation of its surprisal, with as few anchors as the budget asks for. Later: what left the window since, as a
  /// run of its own, by the threshold of the first time. The same pieces in all layers and heads. Throws
  /// InvalidArgument without surprisal, and for rows of one sequence that differ.
  [[nodiscard]] Decision decide(const Evidence& evidence) const override;
  [[nodiscard]] std::string to_json() const override { return json_; }

  [[nodiscard]] const SekvOptions& options() const { return options_; }

  /// The options that a prompt of `tokens` is cut with, where `group` query heads share keys of `dim` numbers: with a
  /// budget, few enough anchors. `learned`: a router decides what opens.
  [[nodiscard]] SegmenterOptions segmenter(std::int64_t tokens, std::int64_t group, std::int64_t dim,
                                           bool learned) const;
  /// What zooming may take beside what is there anyway.
  [[nodiscard]] ZoomBudget zoom_budget(const Segments& segments, std::int64_t group, std::int64_t dim,
                                       bool learned) const;

 private:
  SekvOptions options_;
  std::string json_;
};

}  // namespace kvkeep
