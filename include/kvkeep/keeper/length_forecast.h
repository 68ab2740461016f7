// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How long the rows of a sequence will be after steps that have not run: what a scheduler that runs ahead of its
/// workers plans with.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/row.h"
#include "kvkeep/observe/trigger.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

/// The most pages that a step of one sequence takes.
struct PageNeed {
  std::int32_t append = 0;  ///< for its tokens, and for copies of shared pages that they are written to
  std::int32_t event = 0;   ///< for copies of shared pages that its event writes
};

/// Counts steps of one sequence ahead of the keeper, in host integers alone. Lengths after an event follow from the
/// budget, not from the scores, under every policy whose rows are cut to a number of slots; the others have an upper
/// bound (`exact`). A value: it refers to the keeper's policy and model, which must outlive it, and to nothing that
/// changes, so the scheduler's thread counts while another runs the keeper.
///
///     kvkeep::LengthForecast ahead = keeper.forecast(id);   // when the sequence has joined, and after every report
///     ahead.step(prompt_tokens);                      // for every step that is scheduled
///     ahead.length();                                 // slots of its longest row after that step and its event
///
/// It does not know of truncate(), pins, events that the program names, or one that NaN in a query put off: take a new
/// one after these.
class LengthForecast {
 public:
  struct Begin {
    std::vector<std::int32_t> lengths = {};     ///< [rows] slots of each row here
    std::vector<std::int64_t> slot_bytes = {};  ///< [full layers] of one head
    std::vector<PositionSpan> pinned = {};
    std::int64_t seen = 0, asked = 0, prompt = -1, next_position = 0;
    bool known = true;  ///< false: what rows hold is not settled, such as while a prompt narrows
  };
  /// Keeper::forecast() makes it.
  LengthForecast(const KVPolicy& policy, const ModelSpec& spec, Begin begin)
      : policy_(&policy), spec_(&spec), full_layers_(spec.full_layers()), now_(std::move(begin)) {
    exact_ = now_.known && (policy.trigger().never || !policy.narrows());
  }

  /// A step gives the sequence `tokens` more, and cuts it if that is due. Returns length(). Throws InvalidArgument for
  /// a negative number or too many; as KVPolicy::most_kept() does, if pins do not fit a budget.
  std::int32_t step(std::int32_t tokens);
  /// Steps one after the other, with so many tokens each.
  void step(std::span<const std::int32_t> tokens) {
    for (const std::int32_t of_step : tokens) step(of_step);
  }

  /// The most pages of `page_size` slots that step(tokens) would take. `shared_pages`: of those that the sequence then
  /// holds, how many others will hold too; INT32_MAX: all, as while a prefix cache takes in its prompt. `last_shared`:
  /// its last page may be one of them; a cache of whole pages holds none that is still to be filled. A bound even if an
  /// event before it is put off because it lacks pages. Throws as step(). Cost: O(rows).
  [[nodiscard]] PageNeed need(std::int32_t tokens, std::int32_t page_size, std::int32_t shared_pages,
                              bool last_shared = true) const;
  /// The same of the last of some steps, one or more.
  [[nodiscard]] PageNeed need(std::span<const std::int32_t> tokens, std::int32_t page_size, std::int32_t shared_pages,
                              bool last_shared) const {
    KVKEEP_REQUIRE(!tokens.empty(), "pages_needed: no step; allowed 1 or more");
    LengthForecast ahead = *this;
    ahead.step(tokens.first(tokens.size() - 1));
    return ahead.need(tokens.back(), page_size, shared_pages, last_shared);
  }

  /// Slots of its longest row.
  [[nodiscard]] std::int32_t length() const { return now_.lengths.empty() ? 0 : std::ranges::max(now_.lengths); }
  /// [rows] slots of each row (full layer, KV head).
  [[nodiscard]] std::span<const std::int32_t> lengths() const { return now_.lengths; }
  /// Tokens seen: the position of the next one.
  [[nodiscard]] std::int64_t logical_length() const { return now_.seen; }
  /// The last step() cuts it; under an upper bound: may cut it.
  [[nodiscard]] bool event() const { return event_; }
  /// Lengths are what the rows will hold; else the most that they may hold.
  [[nodiscard]] bool exact() const { return exact_; }

 private:
  [[nodiscard]] KVPolicy::MostKept most_kept() const;

  const KVPolicy* policy_;
  const ModelSpec* spec_;
  std::vector<std::int32_t> full_layers_;
  Begin now_;
  bool event_ = false, exact_ = true;
  bool certain_ = true;  ///< no event was counted, which might be put off for lack of pages
};

inline std::int32_t LengthForecast::step(std::int32_t tokens) {
  const std::int32_t room = std::numeric_limits<std::int32_t>::max() - length();
  KVKEEP_REQUIRE(tokens >= 0 && tokens <= room, "forecast: a step of ", tokens, " tokens; allowed 0 to ", room);
  for (std::int32_t& length : now_.lengths) length += tokens;
  now_.seen += tokens;
  now_.next_position += tokens;
  event_ = false;
  const Trigger trigger = policy_->trigger();
  const std::int32_t here = spec_->kv_heads, heads = spec_->whole_heads();
  std::int64_t slots = 0, head_bytes = 0;
  for (std::size_t l = 0; l < full_layers_.size(); ++l) {
    for (std::int32_t h = 0; h < here; ++h)
      slots += now_.lengths[l * static_cast<std::size_t>(here) + static_cast<std::size_t>(h)];
    slots += std::int64_t{heads - here} * now_.lengths[l * static_cast<std::size_t>(here)];  // other ranks' are alike
    head_bytes += now_.slot_bytes.empty() ? 0 : now_.slot_bytes[l];
  }
  const Occasion occasion =
      Occasion::of(now_.seen, now_.asked, now_.prompt, slots, std::ssize(full_layers_), heads, head_bytes);
  // How many tokens a local window leaves undecided is not counted here: its rows have an upper bound.
  if (trigger.kind == Trigger::Kind::window && !trigger.never) exact_ = false;
  if (trigger.kind == Trigger::Kind::window ? occasion.seen >= occasion.prompt : trigger.due(occasion)) {
    KVPolicy::MostKept most = most_kept();
    KVKEEP_REQUIRE(most.slots.size() == now_.lengths.size(), "forecast: KVPolicy::most_kept() of ", policy_->name(),
                   " gives ", most.slots.size(), " rows; allowed ", now_.lengths.size());
    for (std::size_t r = 0; r < most.slots.size(); ++r)
      KVKEEP_REQUIRE(most.slots[r] >= 1 && most.slots[r] <= now_.lengths[r], "forecast: KVPolicy::most_kept() of ",
                     policy_->name(), " gives row ", r, " ", most.slots[r], " slots; allowed 1 to its ",
                     now_.lengths[r]);
    exact_ = exact_ && most.exact;
    now_.lengths = std::move(most.slots);
    event_ = !trigger.never;
    certain_ = certain_ && !event_;
  }
  now_.asked = now_.seen;
  if (now_.prompt < 0 && now_.seen > 0) now_.prompt = now_.seen;
  return length();
}

inline PageNeed LengthForecast::need(std::int32_t tokens, std::int32_t page_size, std::int32_t shared_pages,
                                     bool last_shared) const {
  KVKEEP_REQUIRE(is_page_size(page_size) && shared_pages >= 0, "forecast: pages of ", page_size, " slots, ",
                 shared_pages, " of them shared; allowed 1 to ", kLargestPage, " slots, and 0 pages or more");
  const auto pages_for = [page_size](std::int64_t slots) {
    return static_cast<std::int32_t>((slots + page_size - 1) / page_size);
  };
  LengthForecast after = *this;
  after.step(tokens);
  if (lengths().empty()) return {};
  const auto [shortest, longest] = std::ranges::minmax(lengths());
  shared_pages = std::min(shared_pages, pages_for(std::int64_t{longest} + tokens));
  const bool certain = certain_ && exact_, even = shortest == longest && exact_;
  // If rows are even, tokens are written to the last page where it has room, and to no other that is held already.
  std::int32_t into_shared = shared_pages;
  if (even) {
    const bool none = certain && (!last_shared || longest % page_size == 0 || tokens == 0);
    into_shared = none ? 0 : std::min(shared_pages, 1);
  }
  return {.append = (certain ? pages_for(std::int64_t{longest} + tokens) - pages_for(longest) : pages_for(tokens)) +
                    into_shared,
          .event = after.event_ || !after.exact_ ? std::min(shared_pages, pages_for(after.length())) : 0};
}

/// By a table without memory behind it.
inline KVPolicy::MostKept LengthForecast::most_kept() const {
  RowTable table;
  const std::int32_t heads = spec_->kv_heads;
  std::size_t r = 0;
  for (std::size_t l = 0; l < full_layers_.size(); ++l) {
    RowGroup group{.layer = full_layers_[l], .sequence = 0, .first_row = std::ssize(table.rows), .queries = {}};
    group.next_position = static_cast<std::int32_t>(now_.next_position);
    group.seen = {now_.seen};
    group.prompt = {now_.prompt < 0 ? now_.seen : now_.prompt};
    group.prompt_slots = 0;
    group.pinned = now_.pinned;
    table.groups.push_back(group);
    for (std::int32_t h = 0; h < heads; ++h, ++r) {
      Row row{.layer = full_layers_[l], .head = h, .length = now_.lengths[r], .first = table.slots};
      row.keys.width = now_.slot_bytes.empty() ? 0 : now_.slot_bytes[l];
      table.slots += row.length;
      table.rows.push_back(row);
    }
  }
  return policy_->most_kept({.spec = *spec_, .table = table});
}

}  // namespace kvkeep
