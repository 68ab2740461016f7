#pragma once
/// SeKV: a span of low surprisal folds into one near coarse entry and far low-rank factors, and opens again when a
/// query asks for it. Source and differences: see segmenter, SpanRow, Router. Also differs: generated tokens join the
/// local window and fold when they leave it (the published code never stores them).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/protect.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

/// Weights of the losses of a router and rank gates, for traces that train them (kvlab/router_training.h).
struct TrainingOptions {
  double zoom_weight = 1;
  double recon_weight = 0.5;
  double budget_weight = 0.1;   ///< as annealed at this step
  double rank_weight = 0.1;     ///< of a kept component relative to a zoomed span, in the budget loss
  double positive_weight = 10;  ///< of spans that should be zoomed
  double coverage = 0.9;        ///< share of the teacher's attention to spans that those should hold
  double temperature = 0.1;     ///< of the sigmoid that gives a zoom its gradient
  bool published = false;       ///< reconstruction as a plain sum, zoomed spans counted without a gradient

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
};

struct SekvOptions {
  Variant variant = Variant::strict;  ///< official: the published budget, separate for each query head; the other
                                      ///< differences are options
  std::int32_t budget = 0;            ///< entries of one KV head that may be in reach at once; 0: no limit. In variant
                                      ///< strict, describe() lowers recent and interval that are not stated to a
                                      ///< quarter of it
  double budget_share = 0;            ///< instead of `budget`: this share of the tokens seen; 0: none
  double zoom_share = 0.5;            ///< share of the budget that is left for zooming when anchors are chosen (strict)
  std::int32_t interval = 128;        ///< tokens that leave the window together while decoding
  // What was not stated, which describe() says of variant strict. A Keeper then cuts prompts as was measured
  // (examples/lab/docs/papers.md#sekv), a replayed trace as the paper does.
  bool own_alpha = false;   ///< alpha is 3; in a trace 1
  bool fits_spans = false;  ///< max_span is 32, or with a budget less: zoom_share of it can open any span; never below
                            ///< min_span. In a trace it is 128
  SegmenterOptions segmenter;
  MemoryOptions memory;
  TrainingOptions training;

  void describe(Fields& f);

  /// Tokens of a long text that stay whatever they are: sinks and the local window.
  [[nodiscard]] std::int64_t always_dense() const { return std::int64_t{segmenter.sink} + segmenter.recent; }
  /// max_span as low as it may get.
  [[nodiscard]] std::int32_t shortest_limit() const {
    return fits_spans ? std::min(segmenter.min_span, segmenter.max_span) : segmenter.max_span;
  }
};

class Sekv final : public KVPolicy {
 public:
  /// `json` describes the policy to people and files; the registry makes it. Throws InvalidArgument for options that
  /// are not allowed, and in variant strict for a budget in which no span of max_span opens for heads of any size.
  /// problems() has the same for the model's.
  Sekv(SekvOptions options, std::string json = {});

  [[nodiscard]] std::string_view name() const override { return "sekv"; }
  [[nodiscard]] Needs needs() const override { return {.keys = true, .values = true, .surprisal = true}; }
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const override;
  /// Pieces follow from what every rank knows, so ranks need nothing of each other.
  [[nodiscard]] std::vector<std::string> problems_on(const Machine& machine, const ModelSpec& spec) const override {
    ModelSpec whole = spec;
    whole.first_head = whole.model_heads = 0;
    return KVPolicy::problems_on(machine, whole);
  }
  [[nodiscard]] Trigger trigger() const override {
    return {.budget = {},
            .interval = options_.interval,
            .kind = Trigger::Kind::window,
            .recent = options_.segmenter.recent};
  }
  [[nodiscard]] const MemoryOptions* memory() const override { return &options_.memory; }

  /// Cuts the undecided tokens before the local window. The first time, that is all of them, cut by the mean and
  /// deviation of their surprisal, with as few anchors as the budget requires. Later, it is those that have left the
  /// window since, cut as a separate run by the threshold of the first time. The pieces are the same in all layers and
  /// heads. Throws InvalidArgument without surprisal, and if rows of one sequence differ.
  [[nodiscard]] Decision decide(Machine&, const Evidence& evidence) const override;
  /// Pinned tokens stay beside the anchors and count as entries in reach.
  void check_pins(std::span<const PositionSpan> pins) const override;
  [[nodiscard]] std::string to_json() const override { return json_; }

  [[nodiscard]] const SekvOptions& options() const { return options_; }

  /// The options by which decide() cuts a prompt of `tokens` tokens, when `group` query heads share keys of `dim`
  /// numbers. With a budget, they keep anchors few enough, and spans short enough if they fit them.
  [[nodiscard]] SegmenterOptions cut(std::int64_t tokens, std::int64_t group, std::int64_t dim) const;
  /// The same for a trace: no sketches, and max_span as it is. `learned`: a router decides what opens.
  [[nodiscard]] SegmenterOptions segmenter(std::int64_t tokens, std::int64_t group, std::int64_t dim,
                                           bool learned) const;

 private:
  /// max_span for a prompt under a budget of so many entries: the longest with which coarse entries, sketches and one
  /// open span fit; if there is none, that with which they take least.
  [[nodiscard]] std::int32_t longest_span(double budget, std::int64_t tokens, std::int64_t group,
                                          std::int64_t dim) const;

  SekvOptions options_;
  std::string json_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/sekv-inl.h"
#endif
