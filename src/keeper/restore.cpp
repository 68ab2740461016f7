// SPDX-License-Identifier: Apache-2.0
// Keeper's part of save and restore: a sequence as tensors, and back.

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ranges>
#include <utility>

#include "kvkeep/keeper/keeper.h"
#include "kvkeep/state/state_file.h"
#include "state_numbers.h"

namespace kvkeep {
namespace {

using Json = nlohmann::json;

/// The cap on factors is up to each keeper.
constexpr std::array<std::string_view, 1> kPlaces = {"/memory/host_bytes"};

Json rope_json(const RopeSpec& rope) {
  return {{"style", static_cast<int>(rope.style)},
          {"inv_freq", rope.inv_freq},
          {"attention_scaling", rope.attention_scaling}};
}

std::string model_json(const ModelSpec& spec) {
  Json layers = Json::array();
  for (const LayerSpec& layer : spec.layers) {
    layers.push_back({{"kind", static_cast<int>(layer.kind)}, {"window", layer.window}, {"source", layer.source}});
    if (layer.rope) layers.back()["rope"] = rope_json(*layer.rope);
    if (layer.sinks.empty()) continue;
    Json& sinks = layers.back()["sinks"] = Json::array();  // JSON has no infinity: null stands for it
    for (const float sink : layer.sinks) sinks.push_back(std::isfinite(sink) ? Json(sink) : Json());
  }
  Json model{{"query_heads", spec.query_heads},
             {"kv_heads", spec.kv_heads},
             {"key_dim", spec.key_dim},
             {"value_dim", spec.value_dim},
             {"softmax_scale", spec.softmax_scale},
             {"rope", rope_json(spec.rope)},
             {"layers", layers}};
  if (spec.logit_cap > 0) model["logit_cap"] = spec.logit_cap;
  if (spec.model_heads > 0) model["ranks"] = {{"first_head", spec.first_head}, {"model_heads", spec.model_heads}};
  return model.dump();
}

void save_columns(StateTensors& to, const Columns& columns, bool with_given) {
  Ragged<std::int32_t> positions;
  Ragged<float> credit, tally, given;
  for (const RowColumns& row : columns.held()) {
    positions.add(row.positions);
    credit.add(row.credit);
    tally.add(row.tally);
    given.add(row.given);
  }
  positions.give(to, "positions", Dtype::i32);
  credit.give(to, "credit", Dtype::f32);
  tally.give(to, "tally", Dtype::f32);
  if (with_given) given.give(to, "given", Dtype::f32);
}

void save_ring(StateTensors& to, const QueryRing& ring, const ModelSpec& spec) {
  const QueryRing::Held held = ring.held();
  const auto layers = static_cast<std::int64_t>(held.layers.size()),
             count = static_cast<std::int64_t>(held.positions.size());
  std::vector<std::int64_t> seen;
  for (const QueryRing::Layer& l : held.layers) seen.insert(seen.end(), {l.seen, l.first, l.oldest});
  to.emplace_back("queries.seen", tensor_of(std::span<const std::int64_t>(seen), Dtype::i64, {layers, 3}));
  if (std::ranges::any_of(held.layers, &QueryRing::Layer::unread)) {
    std::vector<std::uint8_t> unread;
    for (const QueryRing::Layer& l : held.layers) unread.push_back(l.unread ? 1 : 0);
    to.emplace_back("queries.unread", list_of(unread, Dtype::u8));
  }
  if (count == 0) return;
  to.emplace_back("queries.positions", list_of(held.positions, Dtype::i32));
  to.emplace_back("queries", tensor_of(std::span<const std::byte>(held.data), held.dtype,
                                       {layers, count, spec.query_heads, spec.key_dim}));
}

const char* name_of(QueryBasis basis) { return basis == QueryBasis::pre_rope ? "before RoPE" : "after RoPE"; }

QueryBasis basis_of(const StateFile& state) {
  const std::string& said = state.about("basis");
  for (const QueryBasis basis : {QueryBasis::pre_rope, QueryBasis::post_rope})
    if (said == name_of(basis)) return basis;
  refuse("restore: queries in ", state.where(), " are taken \"", said.substr(0, 80),
         "\"; allowed before RoPE, after RoPE");
}

/// Counters and columns: each row has the slots that the last event left it, and those that came since in all rows.
void restore_columns(const Sequences& sequences, SequenceState& s, const StateFile& state, bool with_given) {
  const ModelSpec& spec = sequences.spec();
  const auto rows = sequences.full_layers().size() * static_cast<std::size_t>(spec.kv_heads);
  const Tensor stored = state.tensor("counters", Dtype::i64, {9});
  const auto c = numbers_of<std::int64_t>(stored);
  const std::int64_t logical = c[0], prefix = c[1], prompt = c[2], last_event = c[3], asked = c[4],
                     next_position = c[5], settled = c[6], prompt_end = c[7], event_position = c[8];
  const auto within = [](std::int64_t x, std::int64_t most) { return x >= 0 && x <= most; };
  KVKEEP_REQUIRE(within(next_position, kMostPositions) && within(logical, next_position) && within(prefix, logical) &&
                     prompt >= -1 && prompt <= kMostPositions && within(last_event, logical) &&
                     within(asked, logical) && within(settled, next_position) && within(prompt_end, next_position) &&
                     within(event_position, next_position),
                 "restore: tensor \"counters\" in ", state.where(), " does not describe a sequence of ", logical,
                 " tokens whose next position is ", next_position, "; allowed counters up to these");
  const RaggedView<std::int32_t> positions(state, "positions", Dtype::i32, static_cast<std::int64_t>(rows));
  const RaggedView<float> credit(state, "credit", Dtype::f32, static_cast<std::int64_t>(rows)),
      tally(state, "tally", Dtype::f32, static_cast<std::int64_t>(rows));
  std::optional<RaggedView<float>> given;
  if (with_given) given.emplace(state, "given", Dtype::f32, static_cast<std::int64_t>(rows));

  const std::int64_t uncut = logical - last_event;  // slots since the last event, in every row
  const auto told = [&](std::size_t r) { return std::max(credit.row(r).size(), tally.row(r).size()); };
  std::size_t since = 0;  // slots without credit and tally, if others have them
  for (std::size_t r = 0; r < rows && since == 0; ++r)
    if (told(r) > 0) since = positions.row(r).size() - std::min(told(r), positions.row(r).size());
  bool any_told = false;
  for (std::size_t r = 0; r < rows; ++r) any_told = any_told || told(r) > 0;
  const auto newest =
      positions.row(0).last(std::min(std::max(since, static_cast<std::size_t>(uncut)), positions.row(0).size()));
  std::vector<RowColumns> columns;
  for (std::size_t r = 0; r < rows; ++r) {
    const auto own = positions.row(r);
    const std::size_t credited = credit.row(r).size(), tallied = tally.row(r).size();
    const bool ascends = std::ranges::adjacent_find(own, std::ranges::greater_equal()) == own.end() &&
                         (own.empty() || (own.front() >= 0 && own.back() < next_position));
    KVKEEP_REQUIRE(ascends && std::ssize(own) >= uncut && std::ssize(own) <= logical, "restore: row ", r, " in ",
                   state.where(), " has ", own.size(), " positions; allowed ", uncut, " to ", logical,
                   " ascending ones, from 0 to ", next_position - 1);
    KVKEEP_REQUIRE(
        (!any_told || told(r) + since == own.size()) && (credited == 0 || credited == told(r)) &&
            (tallied == 0 || tallied == told(r)) && std::ranges::equal(own.last(newest.size()), newest),
        "restore: row ", r, " in ", state.where(), " has ", own.size(), " slots, credit of ", credited,
        " and a tally of ", tallied,
        "; allowed those of none or of all of its slots at the last event, and the same slots since in every row");
    const auto scores = given ? given->row(r) : std::span<const float>();
    const std::size_t of_layer = r / static_cast<std::size_t>(spec.kv_heads) * static_cast<std::size_t>(spec.kv_heads);
    KVKEEP_REQUIRE(
        !given || (scores.size() <= own.size() &&
                   own.size() - scores.size() == positions.row(of_layer).size() - given->row(of_layer).size() &&
                   std::ranges::none_of(scores, [](float x) { return std::isnan(x); })),
        "restore: row ", r, " in ", state.where(), " has ", own.size(), " slots and ", scores.size(),
        " given scores; allowed numbers for its oldest slots, and as many slots without in every row of a "
        "layer");
    columns.push_back({{own.begin(), own.end()},
                       {credit.row(r).begin(), credit.row(r).end()},
                       {tally.row(r).begin(), tally.row(r).end()},
                       {scores.begin(), scores.end()}});
  }
  s.columns.take(std::move(columns), static_cast<std::int32_t>(uncut));
  for (std::size_t l = 0; last_event > 0 && l < s.prompt_slots.size(); ++l) {
    const auto own = positions.row(l * static_cast<std::size_t>(spec.kv_heads));
    s.prompt_slots[l] =
        static_cast<std::int32_t>(std::ranges::lower_bound(own, static_cast<std::int32_t>(prompt_end)) - own.begin());
  }
  s.logical = logical, s.prompt = prompt, s.last_event = last_event, s.asked = asked;
  s.prefix = static_cast<std::int32_t>(prefix), s.next_position = static_cast<std::int32_t>(next_position),
  s.settled = static_cast<std::int32_t>(settled);
  s.prompt_end = static_cast<std::int32_t>(prompt_end), s.event_position = static_cast<std::int32_t>(event_position);
}

/// `read`: the policy reads them.
void restore_queries(const Sequences& sequences, SequenceState& s, const StateFile& state, bool read) {
  const ModelSpec& spec = sequences.spec();
  const auto layers = static_cast<std::int64_t>(sequences.full_layers().size());
  const Tensor seen = state.tensor("queries.seen", Dtype::i64, {layers, 3});
  QueryRing::Held held;
  for (std::int64_t l = 0; l < layers; ++l) {
    const auto of_layer = numbers_of<std::int64_t>(seen).subspan(static_cast<std::size_t>(3 * l), 3);
    KVKEEP_REQUIRE(
        std::ranges::all_of(of_layer, [](std::int64_t x) { return x >= -kMostPositions && x <= kMostPositions; }) &&
            of_layer[0] + s.prefix <= s.logical && (!read || of_layer[0] + s.prefix == s.logical),
        "restore: layer ", sequences.full_layers()[static_cast<std::size_t>(l)], " in ", state.where(), " has shown ",
        of_layer[0], " of ", s.logical, " tokens; allowed all that were not cached before");
    held.layers.push_back({.seen = of_layer[0], .first = of_layer[1], .oldest = of_layer[2]});
  }
  if (state.has("queries.unread")) {
    const Tensor unread = state.tensor("queries.unread", Dtype::u8, {layers});
    for (std::size_t l = 0; l < held.layers.size(); ++l) {
      const std::uint8_t flag = unread.data<std::uint8_t>()[l];
      KVKEEP_REQUIRE(flag <= 1, "restore: tensor \"queries.unread\" in ", state.where(), " holds ", int{flag},
                     "; allowed 0 and 1");
      held.layers[l].unread = flag == 1;
    }
  }
  if (state.has("queries")) {
    const Tensor positions = state.tensor("queries.positions", Dtype::i32, {-1});
    held.positions = list_from(numbers_of<std::int32_t>(positions), 0, positions.numel());
    held.dtype = state.dtype("queries");
    KVKEEP_REQUIRE(is_scorable(held.dtype), "restore: tensor \"queries\" in ", state.where(), " is ", held.dtype,
                   "; allowed f32, f16, bf16");
    const Tensor queries =
        state.tensor("queries", held.dtype, {layers, positions.numel(), spec.query_heads, spec.key_dim});
    held.data = list_from(numbers_of<std::byte>(queries), 0, static_cast<std::int64_t>(queries.nbytes()));
  }
  s.ring.take(held);
}

}  // namespace

SavedState Keeper::state_of(SequenceId sequence) const {
  const SequenceState& s = sequences_->ready("save", sequence);
  require_no_capture("save");
  sequences_->require_whole("save", sequence, s);
  observer_.require_shown("save", sequence, s);
  observer_.require_recorded("save", sequence, s);
  SavedState state{.tensors = {}, .about = {{"policy", policy_->to_json()}, {"model", model_json(spec())}}};
  state.tensors.emplace_back(
      "counters", list_of(std::vector<std::int64_t>{s.logical, s.prefix, s.prompt, s.last_event, s.asked,
                                                    s.next_position, s.settled, s.prompt_end, s.event_position},
                          Dtype::i64));
  save_columns(state.tensors, s.columns, needs_.given_scores);
  save_ring(state.tensors, s.ring, spec());
  for (const std::unique_ptr<Part>& part : sequences_->parts()) part->save(sequence, state.tensors);
  const std::optional<QueryBasis> known = observer_.basis();
  if (needs_.queries > 0 && known) state.about["basis"] = name_of(*known);
  return state;
}

std::vector<std::byte> Keeper::save(SequenceId sequence) const { return state_bytes(state_of(sequence)); }

void Keeper::save(SequenceId sequence, const std::filesystem::path& file) const {
  write_state(file, state_of(sequence));
}

void Keeper::restore(SequenceId sequence, std::span<const std::byte> state, std::optional<std::int32_t> prompt,
                     std::optional<std::int64_t> tokens) {
  require_restorable(sequence);
  restore(sequence, StateFile::from_bytes(state), prompt, tokens);
}

void Keeper::restore(SequenceId sequence, const std::filesystem::path& file, std::optional<std::int32_t> prompt,
                     std::optional<std::int64_t> tokens) {
  require_restorable(sequence);
  restore(sequence, StateFile::open(file), prompt, tokens);
}

/// Before anything is read.
void Keeper::require_restorable(SequenceId sequence) const {
  KVKEEP_REQUIRE_AS(StateError, !knows(sequence), "restore: sequence ", sequence,
                    " is already here; allowed a free id");
  require_no_capture("restore");
}

void Keeper::restore(SequenceId sequence, const StateFile& state, std::optional<std::int32_t> prompt,
                     std::optional<std::int64_t> tokens) {
  state.expect_same("policy", policy_->to_json(), kPlaces);
  state.expect_same("model", model_json(spec()));
  std::optional<QueryBasis> basis;
  if (needs_.queries > 0 && state.has("queries")) basis = basis_of(state);
  const std::optional<QueryBasis> known = observer_.basis();
  KVKEEP_REQUIRE(!basis || !known || *basis == *known, "restore: queries in ", state.where(), " are taken ",
                 name_of(*basis), ", those of the keeper ", name_of(*known), "; allowed one basis");

  join(sequence);
  try {
    SequenceState& s = sequences_->at(sequence);
    try {
      restore_columns(*sequences_, s, state, needs_.given_scores);
      restore_queries(*sequences_, s, state, needs_.queries > 0);
      for (const std::unique_ptr<Part>& part : sequences_->parts()) part->restore(sequence, s, state);
    } catch (const InvalidArgument& e) {
      const std::string what = e.what();
      if (what.find(state.where()) != std::string::npos) throw;
      refuse("restore: ", state.where(), " does not hold a sequence: ", what);
    }
    if (tokens) sequences_->truncate(sequence, *tokens, "restore");
    if (prompt) {
      sequences_->set_prompt("restore", sequence, s, *prompt);
      part<parts::Pins>().unpin(sequence, 0, kMostPositions);  // of another request
    }
  } catch (...) {
    sequences_->forget(sequence);
    throw;
  }
  if (basis) observer_.set_basis(*basis);
}

}  // namespace kvkeep
