// SPDX-License-Identifier: Apache-2.0
#pragma once
/// SeKV: a span of low surprisal folds into one near coarse entry and far low-rank factors, and opens again when a
/// query asks for it. Source and differences: see segmenter, SpanRow, Router. Also differs: generated tokens join the
/// local window and fold when they leave it (the published code never stores them).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/strict_math.h"
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
    return machine.problems(HostDemand{.policy = name(), .max_span = longest_limit(), .memory = &options_.memory},
                            spec);
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
  /// heads, and the host decides them on any machine. Throws InvalidArgument without surprisal, and if
  /// rows of one sequence differ.
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
  /// Slots of the longest span; 0: any.
  [[nodiscard]] std::int32_t longest_limit() const;
  /// max_span for a prompt under a budget of so many entries: the longest with which coarse entries, sketches and one
  /// open span fit; if there is none, that with which they take least.
  [[nodiscard]] std::int32_t longest_span(double budget, std::int64_t tokens, std::int64_t group,
                                          std::int64_t dim) const;

  SekvOptions options_;
  std::string json_;
};

namespace sekv_detail {

// Measured on two pretrained models (examples/lab/docs/papers.md#sekv).
inline constexpr double kAlpha = 3;
inline constexpr std::int32_t kRecent = 32, kMaxSpan = 32;

/// The published code: no sinks, window or longest span, uncentred rows, gates that weigh, and never raw rows.
inline SekvOptions published() {
  SekvOptions o;
  o.variant = Variant::official;
  o.segmenter.sink = o.segmenter.recent = o.segmenter.max_span = 0;
  o.memory.factors.rank = FactorOptions::Rank::gates;
  o.memory.factors.centred = FactorOptions::Centred::never;
  o.memory.factors.soft_gates = true;
  o.memory.factors.raw = false;
  o.training.published = true;
  return o;
}

/// What happens to the slots of a row, the same in all rows of a sequence.
struct Pieces {
  std::vector<std::int32_t> kept;      ///< slots
  std::vector<std::int32_t> folded;    ///< slots of one span after the other
  std::vector<std::int64_t> spans{0};  ///< where each begins in `folded`
  std::vector<float> weights;          ///< [folded]
  std::int32_t settled = 0;            ///< logical position
  std::int32_t guarded = 0;            ///< of `kept`: sinks, pinned ones and the local window
};

/// The slots of a row that no event has decided, and how many of those before them stay in any case.
struct Undecided {
  std::int32_t first = 0;               ///< slot
  std::vector<std::int32_t> positions;  ///< of the slots from there on
  std::int32_t guarded = 0;             ///< sinks and pinned ones before
};

/// Of a row whose positions are on the host.
inline Undecided undecided_of(const RowGroup& group, const Row& row, std::int32_t sink) {
  const std::int32_t* const end = row.positions + row.length;
  const std::int32_t* const begin = std::lower_bound(row.positions, end, group.settled);
  Undecided own{.first = static_cast<std::int32_t>(begin - row.positions), .positions = {begin, end}};
  for (std::int32_t slot = 0; slot < own.first; ++slot)
    own.guarded += slot < sink || holds(group.pinned, row.positions[slot]) ? 1 : 0;
  return own;
}

/// The same from the surprisal of tokens, where only a device has the positions of slots: every token that is not
/// decided is a slot, and so are sinks and pinned tokens.
inline Undecided undecided_tokens(const RowGroup& group, const Row& row, std::int32_t sink) {
  Undecided own;
  std::int32_t token = 0;
  for (std::size_t p = 0; p < group.surprisal.size(); ++p) {
    if (group.surprisal[p] == kNoToken) continue;
    const auto position = static_cast<std::int32_t>(p);
    if (position >= group.settled)
      own.positions.push_back(position);
    else
      own.guarded += token < sink || holds(group.pinned, position) ? 1 : 0;
    ++token;
  }
  own.first = row.length - static_cast<std::int32_t>(own.positions.size());
  KVKEEP_REQUIRE(own.first >= own.guarded, "sekv: layer ", row.layer, ", head ", row.head, " holds ", row.length,
                 " slots, but ", own.positions.size(), " tokens are not decided, and ", own.guarded,
                 " before them stay; allowed at least those");
  return own;
}

/// The slots of `own`, cut according to `segments`; pinned ones do not fold.
inline Pieces pieces_of(const Segments& segments, const Undecided& own, std::int32_t sink,
                        std::span<const PositionSpan> pinned, std::span<const float> surprisal) {
  Pieces out;
  const std::int32_t first = own.first;
  const auto position = [&](std::int32_t slot) { return own.positions[static_cast<std::size_t>(slot - first)]; };
  for (std::int32_t slot = 0; slot < first; ++slot) out.kept.push_back(slot);
  for (const std::int32_t t : segments.dense()) out.kept.push_back(first + t);
  for (const Span& s : segments.spans) {
    for (std::int32_t t = s.begin; t < s.end; ++t) {
      if (holds(pinned, position(first + t)))
        out.kept.push_back(first + t);
      else
        out.folded.push_back(first + t), out.weights.push_back(surprisal[static_cast<std::size_t>(t)]);
    }
    if (std::ssize(out.folded) > out.spans.back()) out.spans.push_back(std::ssize(out.folded));
  }
  if (!pinned.empty()) std::ranges::sort(out.kept);
  const std::int32_t window = first + segments.window;
  out.guarded = own.guarded;
  for (const std::int32_t slot : out.kept)
    if (slot >= first) out.guarded += slot < sink || slot >= window || holds(pinned, position(slot)) ? 1 : 0;
  const auto ahead = static_cast<std::size_t>(segments.window);
  out.settled = ahead < own.positions.size() ? own.positions[ahead] : own.positions.back() + 1;
  return out;
}

}  // namespace sekv_detail

inline void TrainingOptions::describe(Fields& f) {
  constexpr Range kWeight{0, 1e9};
  f.real("zoom_weight", zoom_weight, kWeight,
         "weight of the loss for spans that should be zoomed and are not, or the reverse");
  f.real("recon_weight", recon_weight, kWeight, "weight of the loss for what gates leave out");
  f.real("budget_weight", budget_weight, kWeight,
         "weight of the loss for zoomed spans and kept components, as annealed at this step");
  f.real("rank_weight", rank_weight, kWeight, "weight of a kept component against a zoomed span");
  f.real("positive_weight", positive_weight, kWeight, "weight of spans that should be zoomed");
  f.real("coverage", coverage, {0, 1}, "share of the teacher's span attention that spans to zoom should hold");
  f.real("temperature", temperature, Range::above(0, kWeight.high),
         "temperature of the sigmoid that replaces a zoom in gradients");
}

inline std::vector<std::string> TrainingOptions::problems() const {
  std::vector<std::string> found;
  const auto weight = [&](const char* name, double value) {
    if (!(value >= 0) || !std::isfinite(value)) found.push_back(text(name, ": ", value, "; allowed 0 or more"));
  };
  weight("zoom_weight", zoom_weight), weight("recon_weight", recon_weight), weight("budget_weight", budget_weight),
      weight("rank_weight", rank_weight), weight("positive_weight", positive_weight);
  if (!(coverage >= 0 && coverage <= 1)) found.push_back(text("coverage: ", coverage, "; allowed 0 to 1"));
  if (!(temperature > 0) || !std::isfinite(temperature))
    found.push_back(text("temperature: ", temperature, "; allowed above 0"));
  return found;
}

inline void SekvOptions::describe(Fields& f) {
  std::int32_t entries = 0;
  f.integer("budget", entries, 1, INT32_MAX,
            "entries of one KV head that may be in reach at once: dense tokens, coarse entries, zoomed factors by "
            "size; left out: no limit",
            {}, "-");
  double share = 0;
  f.real("budget_share", share, Range::above(0, 1), "instead of `budget`: that share of the tokens seen", {}, "-");
  f.choice("variant", variant, {{"strict", Variant::strict}, {"official", Variant::official}},
           "our corrected form, or the published rules and defaults");
  if (variant == Variant::official) *this = sekv_detail::published();
  budget = entries;
  budget_share = share;
  const bool strict = variant == Variant::strict;
  const bool follows = budget > 0 && strict;  // what is not stated, follows the budget
  f.integer("sink", segmenter.sink, 0, INT32_MAX, "oldest tokens that are always anchors");
  if (strict) segmenter.recent = sekv_detail::kRecent, segmenter.alpha = sekv_detail::kAlpha;
  if (follows) segmenter.recent = std::min(segmenter.recent, budget / 4);
  f.integer("recent", segmenter.recent, 0, INT32_MAX, "newest tokens that stay as they are (local window)", {},
            f.listing() ? "32, or a quarter of the budget if that is less" : nullptr);
  f.enter("memory");
  f.real("zoom_share", zoom_share, {0, 1}, "share of the budget that is kept free for zooming when anchors are chosen");
  const SegmenterOptions::Stated stated =
      segmenter.describe(f, strict ? "32, or less: what zoom_share of the budget can open" : "none");
  own_alpha = strict && !stated.alpha;
  fits_spans = strict && !stated.max_span;
  memory.describe(f);
  f.leave();
  if (follows) interval = std::min(interval, std::max(budget / 4, segmenter.min_span));
  f.integer("interval", interval, 1, INT32_MAX, "tokens that leave the local window together while decoding", {},
            f.listing() ? "128, or a quarter of the budget if that is less" : nullptr);
  f.enter("training");
  training.describe(f);
  f.leave();
  KVKEEP_REQUIRE(f.listing() || variant != Variant::official || memory.zoom.heads != ZoomOptions::Heads::group,
                 "policy: memory.zoom_heads of sekv is group with variant official; allowed own, because the "
                 "published budget is per head");
}

inline Sekv::Sekv(SekvOptions options, std::string json) : options_(std::move(options)), json_(std::move(json)) {
  std::vector<std::string> found;
  const auto add = [&found](const std::vector<std::string>& more) {
    found.insert(found.end(), more.begin(), more.end());
  };
  if (options_.budget > 0) options_.memory.entries = options_.budget;
  options_.memory.entries_share = options_.budget_share;
  options_.memory.published_budget = options_.variant == Variant::official;
  add(options_.segmenter.problems());
  add(options_.memory.problems());
  add(options_.training.problems());
  if (options_.budget < 0) add({text("budget: ", options_.budget, "; allowed 1 or more, or 0 for none")});
  if (options_.budget > 0 && options_.budget_share > 0) add({"budget: given with budget_share; allowed one of them"});
  if (!(options_.zoom_share >= 0 && options_.zoom_share <= 1))
    add({text("zoom_share: ", options_.zoom_share, "; allowed 0 to 1")});
  if (options_.interval < 1) add({text("interval: ", options_.interval, "; allowed 1 or more")});
  add(options_.memory.too_tight("budget", options_.always_dense(), options_.shortest_limit()));
  require_no_problems("sekv", found);
}

inline std::vector<std::string> Sekv::problems(const ModelSpec& spec) const {
  std::vector<std::string> found = options_.memory.problems(spec);
  const SegmenterOptions& s = options_.segmenter;
  for (std::string& one : options_.memory.too_tight("budget", options_.always_dense(), options_.shortest_limit(), spec))
    found.push_back(std::move(one));
  if (options_.interval < s.min_span)
    found.push_back(text("interval: ", options_.interval, ", but runs below min_span ", s.min_span,
                         " stay as they are, so no generated token would fold; allowed min_span or more"));
  if (s.max_span > 0 && s.max_span < s.min_span)
    found.push_back(text("max_span: ", s.max_span, ", but pieces below min_span ", s.min_span,
                         " stay as they are, so nothing would fold; allowed min_span or more"));
  return found;
}

inline void Sekv::check_pins(std::span<const PositionSpan> pins) const {
  KVKEEP_REQUIRE_AS(Unsupported, options_.variant == Variant::strict,
                    "pin: sekv has variant official, and its published form pins nothing; allowed strict");
  const std::int64_t given = positions_from(options_.segmenter.sink, pins),
                     allowed = std::max(0, options_.budget - options_.segmenter.sink);
  KVKEEP_REQUIRE(options_.budget == 0 || given <= allowed, "pin: ", given, " positions after the ",
                 options_.segmenter.sink, " sinks of sekv, whose budget is ", options_.budget,
                 " entries; allowed up to ", allowed);
}

inline SegmenterOptions Sekv::segmenter(std::int64_t tokens, std::int64_t group, std::int64_t dim, bool learned) const {
  SegmenterOptions o = options_.segmenter;
  if (options_.own_alpha) o.alpha = SegmenterOptions{}.alpha;
  o.entries_per_span = options_.memory.entries_per_span(group, dim, learned);
  const double budget =
      options_.budget_share > 0 ? options_.budget_share * static_cast<double>(tokens) : options_.budget;
  if (budget > 0 && options_.variant == Variant::strict) o.most_entries = (1 - options_.zoom_share) * budget;
  return o;
}

inline SegmenterOptions Sekv::cut(std::int64_t tokens, std::int64_t group, std::int64_t dim) const {
  SegmenterOptions o = segmenter(tokens, group, dim, options_.memory.learned());
  o.entries_per_token = options_.memory.entries_per_token(dim);
  o.alpha = options_.segmenter.alpha;
  o.max_span = longest_span(options_.memory.entries_after(tokens), tokens, group, dim);
  return o;
}

inline std::int32_t Sekv::longest_limit() const {
  return options_.fits_spans ? sekv_detail::kMaxSpan : options_.segmenter.max_span;
}

inline std::int32_t Sekv::longest_span(double budget, std::int64_t tokens, std::int64_t group, std::int64_t dim) const {
  if (!options_.fits_spans) return options_.segmenter.max_span;
  const std::int32_t longest = sekv_detail::kMaxSpan, shortest = options_.shortest_limit();
  // Long spans are few, short ones are cheap to open. Until the next event `interval` more tokens stay.
  const MemoryOptions& m = options_.memory;
  const auto folded = static_cast<double>(std::max<std::int64_t>(0, tokens - options_.always_dense()));
  std::int32_t best = shortest;
  double least = std::numeric_limits<double>::infinity();
  for (std::int32_t length = longest; length >= shortest; --length) {
    const double opened = m.most_opened(length, dim), spans = std::max(1.0, std::ceil(folded / length));
    if (opened > options_.zoom_share * budget && length > shortest) continue;
    const double entries = static_cast<double>(options_.always_dense() + options_.interval) +
                           product(m.entries_per_span(group, dim, m.learned()), spans) +
                           product(m.entries_per_token(dim), std::max(folded, static_cast<double>(length))) + opened;
    if (entries <= budget) return length;
    if (entries < least) least = entries, best = length;
  }
  return best;
}

inline Decision Sekv::decide(Machine&, const Evidence& evidence) const {
  const RowTable& table = evidence.table;
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  const std::int64_t group_size = evidence.spec.group(), dim = evidence.spec.key_dim;
  const SegmenterOptions& own = options_.segmenter;
  std::map<std::int32_t, sekv_detail::Pieces> by_sequence;
  const auto decide_sequence = [&](const RowGroup& group, const Row& row) -> sekv_detail::Pieces {
    const auto surprisal_at = [&](std::int32_t position) {
      KVKEEP_REQUIRE(static_cast<std::size_t>(position) < group.surprisal.size(), "sekv: position ", position,
                     " has no surprisal; ", group.surprisal.size(), " tokens have one; allowed all");
      return group.surprisal[static_cast<std::size_t>(position)];
    };
    const bool here = group.prompt_slots < 0;  // the positions of slots
    const sekv_detail::Undecided open =
        here ? sekv_detail::undecided_of(group, row, own.sink) : sekv_detail::undecided_tokens(group, row, own.sink);
    std::vector<float> nats;
    for (const std::int32_t position : open.positions) nats.push_back(surprisal_at(position));
    KVKEEP_REQUIRE(!nats.empty(), "sekv: layer ", row.layer, " has no token that is not decided; allowed at least one");
    if (group.settled == 0)
      return sekv_detail::pieces_of(segment(nats, cut(row.length, group_size, dim)), open, own.sink, group.pinned,
                                    nats);
    // The first event was at the end of the prompt, or, for a prompt no longer than the window, when `interval` tokens
    // had left the window.
    const std::int32_t then = std::max(static_cast<std::int32_t>(group.prompt.tokens),
                                       group.prompt.tokens > own.recent ? 0 : own.recent + options_.interval);
    std::vector<float> all;
    for (std::size_t p = 0; p < group.surprisal.size() && std::ssize(all) < then; ++p)
      if (group.surprisal[p] != kNoToken) all.push_back(group.surprisal[p]);
    SegmenterOptions behind = cut(then, group_size, dim);
    const double threshold = segment(all, behind).kept_above;
    behind.sink = std::max(0, own.sink - open.first);  // earlier sinks are before it
    return sekv_detail::pieces_of(segment_above(nats, threshold, behind), open, own.sink, group.pinned, nats);
  };

  Decision decision;
  decision.reason = Reason::left_window;
  KeepSet keep;
  keep.indptr.push_back(0);
  Fold fold;
  std::vector<std::int32_t> kept;
  for (const RowGroup& group : table.groups) {
    const std::span<const Row> rows = table.rows_of(group, evidence.spec.kv_heads);
    const auto [found, fresh] = by_sequence.try_emplace(group.sequence);
    if (fresh) found->second = decide_sequence(group, rows.front());
    const sekv_detail::Pieces& pieces = found->second;
    const std::int32_t length = static_cast<std::int32_t>(pieces.kept.size() + pieces.folded.size());
    fold.settled.push_back(pieces.settled);
    for (std::size_t h = 0; h < heads; ++h) {
      KVKEEP_REQUIRE(rows[h].length == length, "sekv: rows of one sequence hold ", rows[h].length, " and ", length,
                     " slots; allowed the same in all layers and heads");
      kept.insert(kept.end(), pieces.kept.begin(), pieces.kept.end());
      keep.indptr.push_back(static_cast<std::int64_t>(kept.size()));
      decision.guarded.push_back(pieces.guarded);
      const auto before = static_cast<std::int64_t>(fold.slots.size());
      fold.slots.insert(fold.slots.end(), pieces.folded.begin(), pieces.folded.end());
      fold.weights.insert(fold.weights.end(), pieces.weights.begin(), pieces.weights.end());
      for (std::size_t s = 1; s < pieces.spans.size(); ++s) fold.spans.push_back(before + pieces.spans[s]);
      fold.indptr.push_back(static_cast<std::int64_t>(fold.spans.size()) - 1);
    }
  }
  keep.slots = empty({static_cast<std::int64_t>(kept.size())}, Dtype::i32);
  std::ranges::copy(kept, keep.slots.data<std::int32_t>());
  decision.keep = std::move(keep);
  decision.fold = std::move(fold);
  return decision;
}

}  // namespace kvkeep
