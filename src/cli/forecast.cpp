// SPDX-License-Identifier: Apache-2.0
#include "forecast.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/observe/query_ring.h"
#include "kvkeep/policy/evict.h"

namespace kvkeep::cli {
namespace {

// A sequence's rows, as an engine without a cache would present them.
class Rows {
 public:
  Rows(const ModelSpec& spec, const SequencePlan& plan)
      : spec_(spec), plan_(plan), layers_(spec.full_layers()), positions_(static_cast<std::size_t>(plan.length)) {
    std::iota(positions_.begin(), positions_.end(), 0);
    lengths_.assign(layers_.size() * static_cast<std::size_t>(spec.kv_heads), 0);
  }

  void begin(std::int32_t tokens) {
    if (plan_.held.empty()) return grow(tokens);
    for (std::size_t r = 0; r < lengths_.size(); ++r)
      lengths_[r] = plan_.held[static_cast<std::size_t>(layers_[r / static_cast<std::size_t>(spec_.kv_heads)])];
    slots_ = std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0});
  }

  void grow(std::int32_t tokens) {
    for (std::int32_t& length : lengths_) length += tokens;
    slots_ += tokens * static_cast<std::int64_t>(lengths_.size());
  }

  void cut(const Evict& policy, std::int32_t seen) {
    RowTable table;
    for (std::size_t r = 0; r < lengths_.size(); ++r) {
      const auto head = static_cast<std::int32_t>(r) % spec_.kv_heads;
      const std::int32_t layer = layers_[r / static_cast<std::size_t>(spec_.kv_heads)];
      if (head == 0)
        table.groups.push_back({.layer = layer,
                                .first_row = static_cast<std::int64_t>(r),
                                .queries = {},
                                .next_position = seen,
                                .prompt_end = plan_.prompt,
                                .seen = {seen},
                                .prompt = {plan_.prompt}});
      table.rows.push_back({.layer = layer,
                            .head = head,
                            .length = lengths_[r],
                            .first = table.slots,
                            .keys = {.width = plan_.row_bytes(spec_.key_dim)},
                            .values = {.width = plan_.row_bytes(spec_.value_dim)},
                            .positions = positions_.data()});
      table.slots += lengths_[r];
    }
    const Limits limits = policy.limits({.spec = spec_, .table = table});
    chosen_ = 0;
    for (std::size_t r = 0; r < lengths_.size(); ++r) {
      if (!limits.rows[r].due) continue;
      const std::int32_t kept = std::min(lengths_[r], limits.rows[r].budget);
      chosen_ += kept - std::min(kept, stays(limits, r, lengths_[r]).count());
      lengths_[r] = kept;
    }
    slots_ = std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0});
  }

  [[nodiscard]] std::span<const std::int32_t> lengths() const { return lengths_; }
  [[nodiscard]] std::int64_t slots() const { return slots_; }
  // Of these, those that the scorer chose at the last cut.
  [[nodiscard]] std::int64_t chosen() const { return chosen_; }
  [[nodiscard]] std::int64_t rows() const { return static_cast<std::int64_t>(lengths_.size()); }

  // Slots of one layer of the model after `seen` tokens.
  [[nodiscard]] LayerSlots layer(std::int32_t index, std::int32_t seen) const {
    const LayerSpec& layer = spec_.layers[static_cast<std::size_t>(index)];
    if (layer.kind == LayerKind::sliding) return held(std::min(seen, layer.window), std::min(seen, layer.window));
    if (layer.kind != LayerKind::full) return {};
    const auto place = std::lower_bound(layers_.begin(), layers_.end(), index) - layers_.begin();
    const auto [least, most] =
        std::minmax_element(lengths_.begin() + place * spec_.kv_heads, lengths_.begin() + (place + 1) * spec_.kv_heads);
    return held(*least, *most);
  }

 private:
  [[nodiscard]] LayerSlots held(std::int32_t least, std::int32_t most) const {
    const std::int64_t pages = (std::int64_t{most} + plan_.page_size - 1) / plan_.page_size;
    return {least, most, pages * plan_.page_size * spec_.kv_heads * plan_.slot_bytes(spec_)};
  }

  const ModelSpec& spec_;
  const SequencePlan& plan_;
  std::vector<std::int32_t> layers_, positions_;
  std::vector<std::int32_t> lengths_;  // [full layers * Hkv]
  std::int64_t slots_ = 0, chosen_ = 0;
};

// Fills in one moment of every layer; returns the sum of their bytes.
std::int64_t look(const Rows& rows, std::int32_t seen, LayerSlots LayerForecast::* moment,
                  std::vector<LayerForecast>& layers) {
  std::int64_t bytes = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    layers[l].*moment = rows.layer(static_cast<std::int32_t>(l), seen);
    bytes += (layers[l].*moment).bytes;
  }
  return bytes;
}

}  // namespace

void require_fits(const ModelSpec& spec, const KVPolicy& policy) {
  const std::vector<std::string> found = policy.problems(spec);
  if (found.empty()) return;
  std::string all = text("policy ", policy.name(), " cannot run on this model:");
  for (const std::string& one : found) all += " " + one;
  refuse(all);
}

Forecast forecast(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan, const Watch& watch) {
  require_fits(spec, policy);
  const Trigger trigger = policy.trigger();
  const auto* evict = dynamic_cast<const Evict*>(&policy);
  KVKEEP_REQUIRE_AS(Unsupported, trigger.never || evict != nullptr, "plan: policy ", policy.name(),
                    " does not say what its rows may keep; allowed a policy that evicts, or full");
  Forecast result;
  result.layers.resize(spec.layers.size());
  result.slot_bytes = static_cast<std::int64_t>(spec.full_layers().size()) * spec.kv_heads * plan.slot_bytes(spec);
  Rows whole(spec, plan), rows(spec, plan);
  whole.grow(plan.length);
  result.full_bytes = look(whole, plan.length, &LayerForecast::full, result.layers);

  const auto see_peak = [&](std::int32_t seen) {
    if (rows.slots() <= result.peak_slots && result.peak_slots > 0) return;
    result.peak_slots = rows.slots();
    result.peak_bytes = std::max(result.peak_bytes, look(rows, seen, &LayerForecast::peak, result.layers));
  };
  const auto show = [&](ForecastMoment moment, std::int32_t seen) {
    if (watch) watch(moment, seen, rows.lengths());
  };
  const std::int32_t first = plan.prompt > 0 ? plan.step_after(0) : 0;
  rows.begin(first);
  for (std::int32_t seen = first, step = first; seen <= plan.length; step = plan.step_after(seen), seen += step) {
    if (seen > first) rows.grow(step);
    const Occasion occasion{.slots = rows.slots(),
                            .rows = rows.rows(),
                            .seen = seen,
                            .prompt = plan.prompt,
                            .step = step,
                            .slot_bytes = result.slot_bytes};
    if (step == 0 || rows.rows() == 0 || !trigger.due(occasion)) continue;
    see_peak(seen);
    show(ForecastMoment::before_event, seen);
    rows.cut(*evict, seen);
    show(ForecastMoment::after_event, seen);
    result.kept_bytes = look(rows, seen, &LayerForecast::kept, result.layers);
    result.kept_slots = rows.slots();
    result.chosen_slots = rows.chosen();
    ++result.events;
    if (result.first_event < 0) result.first_event = seen;
    result.last_event = seen;
  }
  see_peak(plan.length);
  show(ForecastMoment::end, plan.length);
  if (result.events == 0) result.kept_bytes = look(rows, plan.length, &LayerForecast::kept, result.layers);
  return result;
}

OwnBytes own_bytes(const ModelSpec& spec, const KVPolicy& policy, std::int64_t peak_slots, std::int32_t length,
                   std::int32_t query_bytes) {
  constexpr std::int64_t kNumber = 4;  // positions are i32, the rest is f32
  OwnBytes own{.positions = kNumber * peak_slots};
  const std::int32_t queries = policy.needs().queries;
  const auto full_layers = static_cast<std::int64_t>(spec.full_layers().size());
  if (queries > 0)
    own.queries = full_layers * (queries + QueryRing::kRollback) * spec.query_heads * spec.key_dim * query_bytes;
  if (policy.needs().surprisal) own.surprisal = kNumber * length;
  if (policy.trigger().never) return own;
  const auto options = nlohmann::json::parse(policy.to_json());
  const auto* evict = dynamic_cast<const Evict*>(&policy);
  const bool segments = options.contains("allocator") && options["allocator"].contains("segment_mass");
  const bool credit = segments && options["allocator"].value("credit", false);
  if (credit) own.credit = kNumber * peak_slots;
  if (evict != nullptr && evict->scorer().accumulates()) own.tally = kNumber * peak_slots;
  if (policy.needs().given_scores) own.given = kNumber * peak_slots;
  own.event = (1 + (segments ? 1 : 0) + (credit ? 1 : 0)) * kNumber * peak_slots;
  return own;
}

}  // namespace kvkeep::cli
