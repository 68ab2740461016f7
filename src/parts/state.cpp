// SPDX-License-Identifier: Apache-2.0
// What parts save of a sequence, and read back.

#include <algorithm>

#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/parts/ranks.h"
#include "kvkeep/parts/surprisal.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/state/state_file.h"
#include "state_numbers.h"

namespace kvkeep::parts {

void Pins::save(SequenceId sequence, StateTensors& to) const {
  const PositionSpans* const spans = spans_.find(sequence);
  if (spans == nullptr || spans->empty()) return;
  std::vector<std::int32_t> ends;
  for (const PositionSpan& span : spans->spans()) ends.insert(ends.end(), {span.begin, span.end});
  to.emplace_back("pinned",
                  tensor_of(std::span<const std::int32_t>(ends), Dtype::i32, {std::ssize(spans->spans()), 2}));
}

/// Every row holds the same number of pinned slots.
void Pins::restore(SequenceId sequence, const SequenceState&, const StateFile& state) {
  if (!state.has("pinned")) return;
  const auto rows = static_cast<std::size_t>(sequences().rows());
  const RaggedView<std::int32_t> positions(state, "positions", Dtype::i32, sequences().rows());
  const Tensor stored = state.tensor("pinned", Dtype::i32, {-1, 2});
  const auto ends = numbers_of<std::int32_t>(stored);
  PositionSpans spans;
  for (std::size_t i = 0; i < ends.size(); i += 2) {
    const PositionSpan span{ends[i], ends[i + 1]};
    const auto held = [&](std::size_t r) {
      const auto own = positions.row(r);
      return std::ranges::lower_bound(own, span.end) - std::ranges::lower_bound(own, span.begin);
    };
    bool alike = true;
    for (std::size_t r = 1; r < rows; ++r) alike = alike && held(r) == held(0);
    KVKEEP_REQUIRE(
        span.begin > (i == 0 ? -1 : ends[i - 1]) && span.begin < span.end && span.end <= kMostPositions && alike,
        "restore: tensor \"pinned\" in ", state.where(), " has the span ", span.begin, " to ", span.end,
        "; allowed spans that ascend, do not touch, and have as many slots in every row");
    spans.add(span);
  }
  policy().check_pins(spans.spans());
  spans_[sequence] = std::move(spans);
}

void Surprisal::save(SequenceId sequence, StateTensors& to) const {
  const Known& known = *known_.find(sequence);
  to.emplace_back("surprisal", list_of(known.nats, Dtype::f32));
  to.emplace_back("surprisal.tokens", list_of(std::vector<std::int64_t>{known.tokens}, Dtype::i64));
}

void Surprisal::restore(SequenceId sequence, const SequenceState& s, const StateFile& state) {
  const Tensor nats = state.tensor("surprisal", Dtype::f32, {-1}),
               tokens = state.tensor("surprisal.tokens", Dtype::i64, {1});
  const std::int64_t known = *tokens.data<std::int64_t>();
  KVKEEP_REQUIRE(known >= 0 && known <= s.logical && s.logical - known <= std::ssize(s.columns.newest()) &&
                     nats.numel() <= s.next_position,
                 "restore: ", known, " of ", s.logical, " tokens in ", state.where(),
                 " have their surprisal, up to position ", nats.numel() - 1,
                 "; allowed all but the newest, below position ", s.next_position);
  known_[sequence] = {list_from(numbers_of<float>(nats), 0, nats.numel()), known};
}

void Prompts::save(SequenceId sequence, StateTensors& to) const {
  const PromptReport* const told = report_of(sequence);
  if (told == nullptr) return;
  const PromptReport& report = *told;
  to.emplace_back("prompt.counts",
                  list_of(std::vector<std::int64_t>{report.tokens, report.selection_layer, report.second_pass ? 1 : 0},
                          Dtype::i64));
  to.emplace_back("prompt.relative_variance", list_of(report.relative_variance, Dtype::f64));
  to.emplace_back("prompt.entered", list_of(report.entered, Dtype::i32));
  to.emplace_back("prompt.going_on", list_of(report.going_on, Dtype::i32));
}

void Prompts::restore(SequenceId sequence, const SequenceState&, const StateFile& state) {
  if (!state.has("prompt.counts")) return;
  const Tensor counts = state.tensor("prompt.counts", Dtype::i64, {3}),
               variance = state.tensor("prompt.relative_variance", Dtype::f64, {spec().num_layers()}),
               entered = state.tensor("prompt.entered", Dtype::i32, {spec().num_layers()}),
               going_on = state.tensor("prompt.going_on", Dtype::i32, {-1});
  const auto c = numbers_of<std::int64_t>(counts);
  KVKEEP_REQUIRE(
      c[0] >= 0 && c[0] <= kMostPositions && c[1] >= -1 && c[1] < spec().num_layers() && c[2] >= 0 && c[2] <= 1,
      "restore: tensor \"prompt.counts\" in ", state.where(), " is [", c[0], ", ", c[1], ", ", c[2],
      "]; allowed a number of tokens, a layer of the model or -1, and 0 or 1");
  prompts_[sequence].report = {.tokens = static_cast<std::int32_t>(c[0]),
                               .selection_layer = static_cast<std::int32_t>(c[1]),
                               .relative_variance = list_from(numbers_of<double>(variance), 0, variance.numel()),
                               .entered = list_from(numbers_of<std::int32_t>(entered), 0, entered.numel()),
                               .going_on = list_from(numbers_of<std::int32_t>(going_on), 0, going_on.numel()),
                               .second_pass = c[2] == 1};
}

void Ranks::save(SequenceId sequence, StateTensors& to) const {
  if (const std::vector<std::int32_t>* extra = extra_slots_.find(sequence))
    to.emplace_back("extra_slots", list_of(*extra, Dtype::i32));
}

void Ranks::restore(SequenceId sequence, const SequenceState& s, const StateFile& state) {
  if (!state.has("extra_slots")) return;
  const std::int32_t heads = spec().whole_heads();
  const auto layers = sequences().full_layers();
  const Tensor stored = state.tensor("extra_slots", Dtype::i32, {std::ssize(layers) * heads});
  const auto extra = numbers_of<std::int32_t>(stored);
  for (std::int32_t i = 0; i < std::ssize(extra); ++i) {
    const std::int32_t own = i % heads - spec().first_head, first = i / heads * spec().kv_heads;
    const std::int64_t length = std::int64_t{s.columns.length(first)} + extra[static_cast<std::size_t>(i)];
    KVKEEP_REQUIRE(length >= 0 && length <= s.logical &&
                       (own < 0 || own >= spec().kv_heads || length == s.columns.length(first + own)),
                   "restore: KV head ", i % heads, " of layer ", layers[static_cast<std::size_t>(i / heads)], " in ",
                   state.where(), " holds ", length, " slots; allowed 0 to ", s.logical,
                   ", and as many as its row if it is here");
  }
  extra_slots_[sequence].assign(extra.begin(), extra.end());
}

}  // namespace kvkeep::parts
