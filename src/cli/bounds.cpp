// SPDX-License-Identifier: Apache-2.0
#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/prefill.h"
#include "kvkeep/policy/rest_options.h"
#include "kvkeep/policy/sekv.h"

namespace kvkeep::cli {
namespace {

constexpr double kAnyLength = std::numeric_limits<double>::infinity();

// Bytes that folding leaves near and moves away, of one row.
struct FoldedBytes {
  std::int64_t span = 0, token = 0;  // near
  double far_token = 0;              // most

  // `longest`: tokens of a span, at most.
  FoldedBytes(const MemoryOptions& memory, const ModelSpec& spec, std::int64_t longest) {
    const std::int64_t dim = spec.key_dim, number = element_size(memory.factors.store);
    span = 2 * dim * number + 4 + (memory.learned() ? 4 * spec.group() : 0);
    token = memory.fold_options().sketch ? 4 * KeySketch::words(dim) + 2 : 0;
    for (std::int64_t length = 1; length <= longest; ++length)
      far_token = std::max(far_token, memory.most_opened(length, dim) / static_cast<double>(length));
    far_token *= static_cast<double>(2 * dim * number);
  }
};

// The bytes of layers, and what is summed up over them.
class Ledger {
 public:
  Ledger(const ModelSpec& spec, const SequencePlan& plan) : spec_(spec), plan_(plan), full_(spec.full_layers()) {
    result.layers.resize(spec.layers.size());
    result.slot_bytes = slot() * std::ssize(full_) * spec.kv_heads;
    for (std::size_t l = 0; l < spec.layers.size(); ++l) {
      BoundedLayer& layer = result.layers[l];
      layer.full_slots = slots_of(static_cast<std::int32_t>(l), plan.length);
      layer.full_bytes = paged(layer.full_slots);
      result.full_bytes += layer.full_bytes;
    }
  }

  // K and V of one slot of one row.
  [[nodiscard]] std::int64_t slot() const { return plan_.slot_bytes(spec_); }
  [[nodiscard]] const std::vector<std::int32_t>& full_layers() const { return full_; }

  // One full layer at some moment. `slots`: of its longest row; `held`: K and V of all rows; `folded`: near.
  struct LayerMoment {
    Bounds slots, held, folded = {};
  };
  // K and V of rows of these lengths.
  [[nodiscard]] LayerMoment of_rows(std::span<const std::int32_t> lengths) const {
    std::int64_t sum = 0;
    for (const std::int32_t length : lengths) sum += length;
    const auto [least, most] = std::ranges::minmax_element(lengths);
    return {{*least, *most}, {sum * slot(), paged(*most)}};
  }
  // The same of rows whose lengths are all alike, in between.
  [[nodiscard]] LayerMoment of_slots(const Bounds& slots) const {
    return {slots, {slots.least * slot() * spec_.kv_heads, paged(slots.most)}};
  }

  // [full layers], after `seen` tokens. Other layers hold what they hold.
  void peak(std::int32_t seen, const std::vector<LayerMoment>& moments) {
    Bounds all;
    each(seen, moments, [&](BoundedLayer& layer, const Bounds& slots, const Bounds& bytes) {
      layer.peak_slots = layer.peak_slots.larger(slots);
      layer.peak_bytes = layer.peak_bytes.larger(bytes);
      all += bytes;
    });
    result.peak = result.peak.larger(all);
    std::int64_t slots = 0;
    for (const LayerMoment& moment : moments) slots += moment.slots.most * spec_.kv_heads;
    result.peak_slots = std::max(result.peak_slots, slots);
  }
  void kept(std::int32_t seen, const std::vector<LayerMoment>& moments) {
    result.kept = {};
    each(seen, moments, [&](BoundedLayer& layer, const Bounds& slots, const Bounds& bytes) {
      layer.kept_slots = slots, layer.kept_bytes = bytes;
      result.kept += bytes;
    });
  }

  BoundedForecast result;

 private:
  [[nodiscard]] std::int32_t slots_of(std::int32_t layer, std::int32_t seen) const {
    const LayerSpec& own = spec_.layers[static_cast<std::size_t>(layer)];
    return own.kind == LayerKind::full ? seen : own.kind == LayerKind::sliding ? std::min(seen, own.window) : 0;
  }
  [[nodiscard]] std::int64_t paged(std::int64_t slots) const {
    return (slots + plan_.page_size - 1) / plan_.page_size * plan_.page_size * slot() * spec_.kv_heads;
  }
  template <class F>
  void each(std::int32_t seen, const std::vector<LayerMoment>& moments, const F& f) {
    for (std::size_t l = 0; l < result.layers.size(); ++l)
      if (spec_.layers[l].kind != LayerKind::full) {
        const std::int32_t slots = slots_of(static_cast<std::int32_t>(l), seen);
        f(result.layers[l], Bounds::exactly(slots), Bounds::exactly(paged(slots)));
      }
    for (std::size_t i = 0; i < full_.size(); ++i)
      f(result.layers[static_cast<std::size_t>(full_[i])], moments[i].slots, moments[i].held + moments[i].folded);
  }

  const ModelSpec& spec_;
  const SequencePlan& plan_;
  std::vector<std::int32_t> full_;
};

// What rest=fold makes of the slots that a row drops.
class Rest {
 public:
  Rest(const RestOptions& options, const ModelSpec& spec, bool ragged)
      : bytes_(options.memory, spec, options.max_span),
        longest_(options.max_span),
        // Every span begins with min_span tokens or more, unless that is all; cutting halves it at worst.
        shortest_(std::max(1, std::min(options.min_span, (options.max_span + 1) / 2))),
        ragged_(ragged) {}

  // [Hkv] slots of the rows of a layer. If rows are ragged, only their sum is known.
  void fold(std::span<const std::int32_t> before, std::span<const std::int32_t> after) {
    std::int64_t sum = 0;
    for (std::size_t h = 0; h < before.size(); ++h) {
      const std::int64_t tokens = before[h] - after[h];
      sum += tokens;
      if (!ragged_ && tokens > 0)
        spans += {(tokens + longest_ - 1) / longest_, std::max<std::int64_t>(1, tokens / shortest_)};
    }
    folded += sum;
    if (ragged_ && sum > 0)
      spans += {(sum + longest_ - 1) / longest_, std::min(sum, sum / shortest_ + std::ssize(before))};
  }

  [[nodiscard]] Bounds near_bytes() const { return spans * bytes_.span + Bounds::exactly(folded * bytes_.token); }
  [[nodiscard]] Bounds far_bytes() const {
    return {0, static_cast<std::int64_t>(std::ceil(bytes_.far_token * static_cast<double>(folded)))};
  }

  Bounds spans;
  std::int64_t folded = 0;

 private:
  FoldedBytes bytes_;
  std::int32_t longest_, shortest_;
  bool ragged_;
};

// Rows whose lengths are known, folding or not.
BoundedForecast follow(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan) {
  const auto* evict = dynamic_cast<const Evict*>(&policy);
  Ledger ledger(spec, plan);
  std::vector<Rest> rest;  // [full layers], or none
  if (evict != nullptr && evict->retention().rest != nullptr)
    rest.assign(ledger.full_layers().size(), Rest(*evict->retention().rest, spec, policy.trigger().ragged));
  const auto heads = static_cast<std::size_t>(spec.kv_heads);
  std::vector<std::int32_t> before;
  const auto rows_of = [&](std::span<const std::int32_t> lengths, std::size_t layer) {
    return lengths.subspan(layer * heads, heads);
  };
  const auto moments = [&](std::span<const std::int32_t> lengths) {
    std::vector<Ledger::LayerMoment> all;
    for (std::size_t l = 0; l < ledger.full_layers().size(); ++l) {
      all.push_back(ledger.of_rows(rows_of(lengths, l)));
      if (!rest.empty()) all.back().folded = rest[l].near_bytes();
    }
    return all;
  };
  const Forecast course = forecast(
      spec, policy, plan, [&](ForecastMoment moment, std::int32_t seen, std::span<const std::int32_t> lengths) {
        if (moment != ForecastMoment::after_event) {
          ledger.peak(seen, moments(lengths));
          before.assign(lengths.begin(), lengths.end());
          return;
        }
        for (std::size_t l = 0; l < rest.size(); ++l) rest[l].fold(rows_of(before, l), rows_of(lengths, l));
        ledger.kept(seen, moments(lengths));
      });
  if (course.events == 0) ledger.kept(plan.length, moments(before));
  BoundedForecast& result = ledger.result;
  result.events = Bounds::exactly(course.events);
  for (std::size_t l = 0; l < rest.size(); ++l) {
    const Bounds far = rest[l].far_bytes();
    result.layers[static_cast<std::size_t>(ledger.full_layers()[l])].far_bytes = far;
    result.far += far, result.spans += rest[l].spans, result.folded += Bounds::exactly(rest[l].folded);
  }
  return result;
}

// A row of sekv: what becomes of the tokens that leave its local window.
class SekvRows {
 public:
  SekvRows(const ModelSpec& spec, const Sekv& policy, const SequencePlan& plan, std::int64_t slot)
      : spec_(spec),
        policy_(policy),
        cut_(policy.options().segmenter),
        bytes_(policy.options().memory, spec,
               policy.options().segmenter.max_span > 0 ? policy.options().segmenter.max_span : plan.length),
        slot_(slot) {}

  // The next `tokens` tokens; `seen` so far, with those in the window.
  void leave(std::int64_t tokens, std::int64_t seen) {
    const bool first = settled_ == 0;
    if (first) cut_ = policy_.cut(seen, spec_.group(), spec_.key_dim);
    const std::int64_t sinks = std::clamp<std::int64_t>(cut_.sink - settled_, 0, tokens), others = tokens - sinks;
    settled_ += tokens;
    const Bounds folded{others - most_dense(others, sinks, seen, first), others >= cut_.min_span ? others : 0};
    total.folded += folded;
    total.slots += {tokens - folded.most, tokens - folded.least};
    const auto bytes = [&](std::int64_t f, double spans) {
      return static_cast<double>((tokens - f) * slot_ + f * bytes_.token) + spans * static_cast<double>(bytes_.span);
    };
    // Bytes are a straight line between the fewest and the most that fold.
    const auto fewest = [&](std::int64_t f) { return static_cast<double>(f) / longest(); };
    const auto most = [&](std::int64_t f) { return std::floor(static_cast<double>(f) / cut_.min_span); };
    total.spans +=
        {static_cast<std::int64_t>(std::ceil(fewest(folded.least))), static_cast<std::int64_t>(most(folded.most))};
    const auto line = [&](std::int64_t f) { return static_cast<double>(f) / cut_.min_span; };
    Bounds near{static_cast<std::int64_t>(std::floor(
                    std::min(bytes(folded.least, fewest(folded.least)), bytes(folded.most, fewest(folded.most))))),
                static_cast<std::int64_t>(std::ceil(
                    std::max(bytes(folded.least, line(folded.least)), bytes(folded.most, line(folded.most)))))};
    if (first && std::isfinite(cut_.most_entries))
      near.most = std::min(near.most, within_budget(others, sinks, seen - tokens));
    total.near += near;
  }

  [[nodiscard]] std::int64_t far_most() const {
    return static_cast<std::int64_t>(std::ceil(bytes_.far_token * static_cast<double>(total.folded.most)));
  }

  struct {
    Bounds slots, near, folded, spans;  // near: K and V of those that stay, too
  } total;

 private:
  [[nodiscard]] double longest() const { return cut_.max_span > 0 ? cut_.max_span : kAnyLength; }
  // Equal pieces of a long run may be below min_span, and stay as they are.
  [[nodiscard]] bool pieces_stay() const { return cut_.max_span > 0 && (cut_.max_span + 1) / 2 < cut_.min_span; }

  // How many of `others` tokens that are no sinks may stay.
  [[nodiscard]] std::int64_t most_dense(std::int64_t others, std::int64_t sinks, std::int64_t seen, bool first) const {
    if (!first || pieces_stay()) return others;
    const auto stay = [&](std::int64_t anchors) {  // with the runs between them that are too short to fold
      return std::min(others, anchors + (anchors + 1) * (cut_.min_span - 1));
    };
    // Cantelli: at most 1 / (1 + alpha^2) of all numbers are more than alpha deviations above their mean.
    const double share = cut_.alpha > 0 ? 1 / (1 + cut_.alpha * cut_.alpha) : 1;
    const std::int64_t stating =
        stay(std::min(others, static_cast<std::int64_t>(share * static_cast<double>(seen) + 1e-6)));
    if (!std::isfinite(cut_.most_entries)) return stating;
    // Either all entries fit into what the budget leaves for them, or sinks are the only anchors.
    const auto room = static_cast<std::int64_t>(cut_.most_entries) - sinks - (seen - sinks - others);
    return std::min(stating, std::max(std::clamp<std::int64_t>(room, 0, others), stay(0)));
  }

  // Most near bytes of the prompt's tokens before a window of `window` tokens.
  [[nodiscard]] std::int64_t within_budget(std::int64_t others, std::int64_t sinks, std::int64_t window) const {
    // Bytes of an entry: a slot, a coarse entry, or a part of a sketch, which counts by its bytes.
    const std::int64_t unit = std::max(slot_, bytes_.span);
    const auto fitting = static_cast<std::int64_t>(
        std::ceil(std::max(0.0, cut_.most_entries - static_cast<double>(window)) * static_cast<double>(unit)));
    const std::int64_t spans = std::isinf(longest()) ? 1 : (others + cut_.max_span - 1) / cut_.max_span,
                       stay = pieces_stay() ? others : std::min<std::int64_t>(others, cut_.min_span - 1);
    return std::max(fitting, (sinks + stay) * slot_ + others * bytes_.token + spans * bytes_.span);
  }

  const ModelSpec& spec_;
  const Sekv& policy_;
  SegmenterOptions cut_;
  FoldedBytes bytes_;
  std::int64_t slot_, settled_ = 0;
};

BoundedForecast follow(const ModelSpec& spec, const Sekv& policy, const SequencePlan& plan) {
  Ledger ledger(spec, plan);
  SekvRows row(spec, policy, plan, ledger.slot());
  const std::int32_t recent = policy.options().segmenter.recent;
  std::int64_t settled = 0, events = 0;
  const auto moments = [&](std::int64_t seen) {
    const std::int64_t window = seen - settled;
    Ledger::LayerMoment one = ledger.of_slots(row.total.slots + Bounds::exactly(window));
    const Bounds exact = (row.total.near + Bounds::exactly(window * ledger.slot())) * spec.kv_heads;
    const std::int64_t padding = one.held.most - one.slots.most * ledger.slot() * spec.kv_heads;
    one.held = {exact.least, exact.most + padding};
    return std::vector(ledger.full_layers().size(), one);
  };
  for (std::int32_t seen = plan.prompt; seen <= plan.length; ++seen) {
    const Occasion occasion{.seen = seen,
                            .prompt = plan.prompt,
                            .step = seen == plan.prompt ? plan.prompt : 1,
                            .unsettled = seen - settled};
    if (occasion.step == 0 || !policy.trigger().due(occasion)) continue;
    ledger.peak(seen, moments(seen));
    row.leave(seen - recent - settled, seen);
    settled = seen - recent;
    ledger.kept(seen, moments(seen));
    ++events;
  }
  ledger.peak(plan.length, moments(plan.length));
  if (events == 0) ledger.kept(plan.length, moments(plan.length));
  BoundedForecast& result = ledger.result;
  result.events = Bounds::exactly(events);
  const std::int64_t layers = std::ssize(ledger.full_layers()), rows = layers * spec.kv_heads;
  for (const std::int32_t l : ledger.full_layers())
    result.layers[static_cast<std::size_t>(l)].far_bytes = Bounds{0, row.far_most()} * spec.kv_heads;
  result.far = Bounds{0, row.far_most()} * rows;
  result.spans = row.total.spans * rows, result.folded = row.total.folded * rows;
  return result;
}

BoundedForecast after_prompt(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan) {
  require_fits(spec, policy);
  if (const auto* sekv = dynamic_cast<const Sekv*>(&policy)) return follow(spec, *sekv, plan);
  const bool folds = policy.memory() != nullptr;
  KVKEEP_REQUIRE_AS(Unsupported, !folds || dynamic_cast<const Evict*>(&policy) != nullptr, "plan: ", policy.name(),
                    " folds, but does not say what; allowed sekv, and rest=fold of a policy that evicts");
  KVKEEP_REQUIRE_AS(Unsupported, !folds || !policy.trigger().thins, "plan: ", policy.name(),
                    " keeps what passes a threshold, so when it folds depends on the text; allowed other allocators "
                    "(kvkeep eval measures this one)");
  return follow(spec, policy, plan);
}

void unite(BoundedForecast& all, const BoundedForecast& one) {
  for (std::size_t l = 0; l < all.layers.size(); ++l)
    for (const auto member : {&BoundedLayer::peak_slots, &BoundedLayer::peak_bytes, &BoundedLayer::kept_slots,
                              &BoundedLayer::kept_bytes, &BoundedLayer::far_bytes})
      all.layers[l].*member = (all.layers[l].*member).either(one.layers[l].*member);
  for (const auto member : {&BoundedForecast::peak, &BoundedForecast::kept, &BoundedForecast::far,
                            &BoundedForecast::spans, &BoundedForecast::folded, &BoundedForecast::events})
    all.*member = (all.*member).either(one.*member);
  all.peak_slots = std::max(all.peak_slots, one.peak_slots);
}

// The prompt on its way: a layer's rows are whole until it has decided; in a first pass they stay so.
void pass(Ledger& ledger, const PromptCourse& course, std::int32_t heads, std::int32_t tokens) {
  std::vector<Ledger::LayerMoment> moments(ledger.full_layers().size());
  for (std::size_t l = 0; l < course.entered.size(); ++l) {
    const std::vector<std::int32_t> whole(static_cast<std::size_t>(heads), course.entered[l]),
        after(static_cast<std::size_t>(heads), course.held[l]);
    moments[l] = ledger.of_rows(whole);
    ledger.peak(tokens, moments);
    if (course.restart == 0) moments[l] = ledger.of_rows(after);
  }
}

}  // namespace

Bounds Bounds::larger(const Bounds& other) const { return {std::max(least, other.least), std::max(most, other.most)}; }

Bounds Bounds::either(const Bounds& other) const { return {std::min(least, other.least), std::max(most, other.most)}; }

BoundedForecast bounded_forecast(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan) {
  require_fits(spec, policy);
  std::optional<BoundedForecast> all;
  const auto add = [&all](const BoundedForecast& one) {
    if (all)
      unite(*all, one);
    else
      all = one;
  };
  if (!policy.narrows()) {
    add(after_prompt(spec, policy, plan));
  } else {
    const auto* prefill = dynamic_cast<const Prefill*>(&policy);
    KVKEEP_REQUIRE(plan.prompt > 0, "--prompt: 0, but ", policy.name(), " narrows prompts; allowed 1 or more");
    const std::vector<PromptCourse> courses =
        prefill == nullptr ? std::vector<PromptCourse>() : prefill->courses(spec, plan.prompt);
    KVKEEP_REQUIRE_AS(Unsupported, !courses.empty(), "plan: ", policy.name(),
                      " narrows prompts and does not say how; allowed policies with Prefill::courses()");
    KVKEEP_REQUIRE_AS(Unsupported, !prefill->courses_vary() || prefill->decoding().trigger().never,
                      "plan: ", policy.name(), " keeps as many tokens as hold a share of the attention, so when ",
                      prefill->decoding().name(), " cuts depends on the text; allowed counts, or decoding with full");
    for (const PromptCourse& course : courses) {
      SequencePlan decoding = plan;
      if (course.restart > 0)
        decoding.prompt = course.restart, decoding.length = course.restart + plan.length - plan.prompt;
      decoding.held = course.held;
      BoundedForecast one = after_prompt(spec, prefill->decoding(), decoding);
      Ledger prompt(spec, plan);
      pass(prompt, course, spec.kv_heads, plan.prompt);
      one.full_bytes = prompt.result.full_bytes;
      for (std::size_t l = 0; l < one.layers.size(); ++l) {
        BoundedLayer &to = one.layers[l], &from = prompt.result.layers[l];
        to.full_slots = from.full_slots, to.full_bytes = from.full_bytes;
        to.peak_slots = to.peak_slots.larger(from.peak_slots), to.peak_bytes = to.peak_bytes.larger(from.peak_bytes);
      }
      one.peak = one.peak.larger(prompt.result.peak);
      one.peak_slots = std::max(one.peak_slots, prompt.result.peak_slots);
      add(one);
    }
  }
  return *all;
}

}  // namespace kvkeep::cli
