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
  }
  Json model{{"query_heads", spec.query_heads},
             {"kv_heads", spec.kv_heads},
             {"key_dim", spec.key_dim},
             {"value_dim", spec.value_dim},
             {"softmax_scale", spec.softmax_scale},
             {"rope", rope_json(spec.rope)},
             {"layers", layers}};
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

void save_report(StateTensors& to, const PromptReport& report) {
  to.emplace_back("prompt.counts",
                  list_of(std::vector<std::int64_t>{report.tokens, report.selection_layer, report.second_pass ? 1 : 0},
                          Dtype::i64));
  to.emplace_back("prompt.relative_variance", list_of(report.relative_variance, Dtype::f64));
  to.emplace_back("prompt.entered", list_of(report.entered, Dtype::i32));
  to.emplace_back("prompt.going_on", list_of(report.going_on, Dtype::i32));
}

std::optional<PromptReport> restored_report(const StateFile& state, const ModelSpec& spec) {
  if (!state.has("prompt.counts")) return {};
  const Tensor counts = state.tensor("prompt.counts", Dtype::i64, {3}),
               variance = state.tensor("prompt.relative_variance", Dtype::f64, {spec.num_layers()}),
               entered = state.tensor("prompt.entered", Dtype::i32, {spec.num_layers()}),
               going_on = state.tensor("prompt.going_on", Dtype::i32, {-1});
  const auto c = numbers_of<std::int64_t>(counts);
  KVKEEP_REQUIRE(
      c[0] >= 0 && c[0] <= kMostPositions && c[1] >= -1 && c[1] < spec.num_layers() && c[2] >= 0 && c[2] <= 1,
      "restore: tensor \"prompt.counts\" in ", state.where(), " is [", c[0], ", ", c[1], ", ", c[2],
      "]; allowed a number of tokens, a layer of the model or -1, and 0 or 1");
  return PromptReport{.tokens = static_cast<std::int32_t>(c[0]),
                      .selection_layer = static_cast<std::int32_t>(c[1]),
                      .relative_variance = list_from(numbers_of<double>(variance), 0, variance.numel()),
                      .entered = list_from(numbers_of<std::int32_t>(entered), 0, entered.numel()),
                      .going_on = list_from(numbers_of<std::int32_t>(going_on), 0, going_on.numel()),
                      .second_pass = c[2] == 1};
}

std::int64_t factor_bytes(const FoldedSpan& span, std::int64_t dim, Dtype store) {
  return (span.factors[0].numbers(span.length, dim) + span.factors[1].numbers(span.length, dim)) * element_size(store);
}

/// first, last, length; then rank and form of keys and of values. Form: 1 raw, 2 centred.
constexpr std::int64_t kSpanNumbers = 7;

void save_memory(StateTensors& to, std::span<const SpanRow> memory) {
  if (memory.empty()) return;
  const std::int64_t dim = memory.front().dim();
  const Dtype store = memory.front().dtype();
  Ragged<std::int32_t> spans, signs;
  Ragged<BFloat16> sizes;
  Ragged<float> norms;
  std::array<std::vector<std::byte>, 2> coarse;
  std::int64_t count = 0, far = 0;
  for (const SpanRow& row : memory) {
    std::vector<std::int32_t> numbers;
    for (std::int64_t i = 0; i < row.size(); ++i) {
      const FoldedSpan& s = row.span(i);
      numbers.insert(numbers.end(), {s.first, s.last, s.length});
      for (const SpanFactors& f : s.factors)
        numbers.insert(numbers.end(), {f.rank, (f.raw ? 1 : 0) | (f.centred ? 2 : 0)});
    }
    spans.add(numbers);
    const std::vector<std::int32_t> words(row.sketch().signs.begin(), row.sketch().signs.end());
    signs.add(words);
    sizes.add(row.sketch().sizes);
    norms.add(row.norms());
    for (const KvSide side : {KvSide::keys, KvSide::values}) {
      auto& all = coarse[static_cast<std::size_t>(side)];
      all.insert(all.end(), row.coarse(side), row.coarse(side) + row.size() * dim * element_size(store));
    }
    count += row.size(), far += row.far_bytes();
  }
  spans.give(to, "spans", Dtype::i32);
  to.emplace_back("spans.keys", tensor_of(std::span<const std::byte>(coarse[0]), store, {count, dim}));
  to.emplace_back("spans.values", tensor_of(std::span<const std::byte>(coarse[1]), store, {count, dim}));
  norms.give(to, "spans.norms", Dtype::f32);
  signs.give(to, "sketch.signs", Dtype::i32);
  sizes.give(to, "sketch.sizes", Dtype::bf16);
  Tensor factors = empty({far}, Dtype::u8);
  auto* at = static_cast<std::byte*>(factors.bytes());
  for (const SpanRow& row : memory)
    for (std::int64_t i = 0; i < row.size(); ++i) at = std::ranges::copy(row.factors(i), at).out;
  to.emplace_back("factors", factors);
}

const char* name_of(QueryBasis basis) { return basis == QueryBasis::pre_rope ? "before RoPE" : "after RoPE"; }

QueryBasis basis_of(const StateFile& state) {
  const std::string& said = state.about("basis");
  for (const QueryBasis basis : {QueryBasis::pre_rope, QueryBasis::post_rope})
    if (said == name_of(basis)) return basis;
  refuse("restore: queries in ", state.where(), " are taken \"", said.substr(0, 80),
         "\"; allowed before RoPE, after RoPE");
}

}  // namespace

/// What a captured stream copies is there only after a replay.
void Keeper::require_no_capture(const char* operation) const {
  KVKEEP_REQUIRE_AS(StateError, !provided_.machine().memory().capturing(), operation,
                    ": the stream is being captured; allowed before and after");
}

void Keeper::require_saveable(SequenceId sequence, const SequenceState& s) const {
  require_no_capture("save");
  KVKEEP_REQUIRE_AS(StateError, s.pass == nullptr, "save: the prompt of sequence ", sequence,
                    " has only reached layer ", s.next_layer, "; allowed after its last layer");
  KVKEEP_REQUIRE_AS(Unsupported, s.folded == nullptr || !s.folded->host_rows().empty(),
                    "save: folded spans of sequence ", sequence, " are on ", device().str(),
                    " and are not read back; allowed only on the CPU");
  for (const std::int32_t l : sequences_->full_layers())
    require_shown("save", sequence, s, l, s.prefix + s.ring.seen(sequences_->index_of(l)));
  require_recorded("save", sequence, s);
}

void Keeper::save(SequenceId sequence, const std::filesystem::path& file) const {
  const SequenceState& s = sequences_->ready("save", sequence);
  require_saveable(sequence, s);
  StateTensors tensors;
  tensors.emplace_back("counters",
                       list_of(std::vector<std::int64_t>{s.logical, s.prefix, s.prompt, s.last_event, s.asked,
                                                         s.next_position, s.settled, s.prompt_end, s.event_position},
                               Dtype::i64));
  save_columns(tensors, *s.columns, needs_.given_scores);
  save_ring(tensors, s.ring, spec_);
  if (s.report) save_report(tensors, *s.report);
  tensors.emplace_back("viewed", list_of(s.viewed, Dtype::i64));
  if (s.folded != nullptr) save_memory(tensors, s.folded->host_rows());
  for (const std::unique_ptr<Part>& part : parts_) part->save(sequence, tensors);
  std::map<std::string, std::string> about{{"policy", policy_->to_json()}, {"model", model_json(spec_)}};
  if (needs_.queries > 0 && basis_known_) about["basis"] = name_of(basis_);
  write_state(file, tensors, std::move(about));
}

void Keeper::restore(SequenceId sequence, const std::filesystem::path& file) {
  KVKEEP_REQUIRE_AS(StateError, !knows(sequence), "restore: sequence ", sequence,
                    " is already here; allowed a free id");
  require_no_capture("restore");
  const StateFile state = StateFile::open(file);
  state.expect_same("policy", policy_->to_json(), kPlaces);
  state.expect_same("model", model_json(spec_));
  std::optional<QueryBasis> basis;
  if (needs_.queries > 0 && state.has("queries")) basis = basis_of(state);
  KVKEEP_REQUIRE(!basis || !basis_known_ || *basis == basis_, "restore: queries in ", state.where(), " are taken ",
                 name_of(basis.value_or(basis_)), ", those of the keeper ", name_of(basis_), "; allowed one basis");

  join(sequence);
  try {
    SequenceState& s = sequences_->at(sequence);
    restore_columns(s, state);
    restore_queries(s, state);
    s.report = restored_report(state, spec_);
    restore_memory(s, state);
    for (const std::unique_ptr<Part>& part : parts_) part->restore(sequence, s, state);
  } catch (const InvalidArgument& e) {
    forget(sequence);
    const std::string what = e.what();
    if (what.find(state.where()) != std::string::npos) throw;
    refuse("restore: ", state.where(), " does not hold a sequence: ", what);
  } catch (...) {
    forget(sequence);
    throw;
  }
  if (basis) basis_ = *basis, basis_known_ = true;
}

/// Counters and columns: each row has the slots that the last event left it, and those that came since in all rows.
void Keeper::restore_columns(SequenceState& s, const StateFile& state) const {
  const auto rows = sequences_->full_layers().size() * static_cast<std::size_t>(spec_.kv_heads);
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
  if (needs_.given_scores) given.emplace(state, "given", Dtype::f32, static_cast<std::int64_t>(rows));

  const std::int64_t firm = logical - last_event;  // slots since the last event, in every row
  const auto told = [&](std::size_t r) { return std::max(credit.row(r).size(), tally.row(r).size()); };
  std::size_t since = 0;  // slots without credit and tally, if others have them
  for (std::size_t r = 0; r < rows && since == 0; ++r)
    if (told(r) > 0) since = positions.row(r).size() - std::min(told(r), positions.row(r).size());
  bool any_told = false;
  for (std::size_t r = 0; r < rows; ++r) any_told = any_told || told(r) > 0;
  const auto newest =
      positions.row(0).last(std::min(std::max(since, static_cast<std::size_t>(firm)), positions.row(0).size()));
  std::vector<RowColumns> columns;
  for (std::size_t r = 0; r < rows; ++r) {
    const auto own = positions.row(r);
    const std::size_t credited = credit.row(r).size(), tallied = tally.row(r).size();
    const bool ascends = std::ranges::adjacent_find(own, std::ranges::greater_equal()) == own.end() &&
                         (own.empty() || (own.front() >= 0 && own.back() < next_position));
    KVKEEP_REQUIRE(ascends && std::ssize(own) >= firm && std::ssize(own) <= logical, "restore: row ", r, " in ",
                   state.where(), " has ", own.size(), " positions; allowed ", firm, " to ", logical,
                   " ascending ones, from 0 to ", next_position - 1);
    KVKEEP_REQUIRE(
        (!any_told || told(r) + since == own.size()) && (credited == 0 || credited == told(r)) &&
            (tallied == 0 || tallied == told(r)) && std::ranges::equal(own.last(newest.size()), newest),
        "restore: row ", r, " in ", state.where(), " has ", own.size(), " slots, credit of ", credited,
        " and a tally of ", tallied,
        "; allowed those of none or of all of its slots at the last event, and the same slots since in every row");
    const auto scores = given ? given->row(r) : std::span<const float>();
    const std::size_t of_layer =
        r / static_cast<std::size_t>(spec_.kv_heads) * static_cast<std::size_t>(spec_.kv_heads);
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
  s.columns->take(std::move(columns), static_cast<std::int32_t>(firm));
  for (std::size_t l = 0; last_event > 0 && l < s.prompt_slots.size(); ++l) {
    const auto own = positions.row(l * static_cast<std::size_t>(spec_.kv_heads));
    s.prompt_slots[l] =
        static_cast<std::int32_t>(std::ranges::lower_bound(own, static_cast<std::int32_t>(prompt_end)) - own.begin());
  }
  s.logical = logical, s.prompt = prompt, s.last_event = last_event, s.asked = asked;
  s.prefix = static_cast<std::int32_t>(prefix), s.next_position = static_cast<std::int32_t>(next_position),
  s.settled = static_cast<std::int32_t>(settled);
  s.prompt_end = static_cast<std::int32_t>(prompt_end), s.event_position = static_cast<std::int32_t>(event_position);
}

/// Queries and their statistics.
void Keeper::restore_queries(SequenceState& s, const StateFile& state) const {
  const auto layers = static_cast<std::int64_t>(sequences_->full_layers().size());
  const Tensor seen = state.tensor("queries.seen", Dtype::i64, {layers, 3});
  QueryRing::Held held;
  for (std::int64_t l = 0; l < layers; ++l) {
    const auto of_layer = numbers_of<std::int64_t>(seen).subspan(static_cast<std::size_t>(3 * l), 3);
    KVKEEP_REQUIRE(
        std::ranges::all_of(of_layer, [](std::int64_t x) { return x >= -kMostPositions && x <= kMostPositions; }) &&
            of_layer[0] + s.prefix <= s.logical && (needs_.queries == 0 || of_layer[0] + s.prefix == s.logical),
        "restore: layer ", sequences_->full_layers()[static_cast<std::size_t>(l)], " in ", state.where(), " has shown ",
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
        state.tensor("queries", held.dtype, {layers, positions.numel(), spec_.query_heads, spec_.key_dim});
    held.data = list_from(numbers_of<std::byte>(queries), 0, static_cast<std::int64_t>(queries.nbytes()));
  }
  s.ring.take(held);
}

void Keeper::restore_memory(SequenceState& s, const StateFile& state) {
  const Tensor viewed = state.tensor("viewed", Dtype::i64, {std::ssize(s.viewed)});
  s.viewed = list_from(numbers_of<std::int64_t>(viewed), 0, viewed.numel());
  KVKEEP_REQUIRE(std::ranges::all_of(s.viewed, [&](std::int64_t x) { return x >= 0 && x <= s.logical; }),
                 "restore: tensor \"viewed\" in ", state.where(), " is not within the ", s.logical,
                 " tokens of the sequence; allowed 0 to that");
  if (s.folded == nullptr) return;
  std::vector<SpanRow> folded(s.folded->host_rows().begin(), s.folded->host_rows().end());
  KVKEEP_REQUIRE_AS(Unsupported, !folded.empty(), "restore: ", policy_->name(), " keeps folded spans on ",
                    device().str(), ", where they are not restored; allowed only on the CPU");
  const MemoryOptions& memory = *policy_->memory();
  const std::int64_t dim = spec_.key_dim, rows = std::ssize(folded);
  const Dtype store = memory.factors.store;
  const auto entry = dim * element_size(store);
  const RaggedView<std::int32_t> spans(state, "spans", Dtype::i32, rows),
      signs(state, "sketch.signs", Dtype::i32, rows);
  const RaggedView<BFloat16> sizes(state, "sketch.sizes", Dtype::bf16, rows);
  const RaggedView<float> norms(state, "spans.norms", Dtype::f32, rows);
  const std::array<Tensor, 2> coarse = {state.tensor("spans.keys", store, {-1, dim}),
                                        state.tensor("spans.values", store, {-1, dim})};
  const Tensor factors = state.tensor("factors", Dtype::u8, {-1});
  auto far = numbers_of<std::byte>(factors);
  std::int64_t before = 0;
  for (std::size_t r = 0; r < folded.size(); ++r) {
    const auto numbers = spans.row(r);
    const std::int64_t count = std::ssize(numbers) / kSpanNumbers;
    const auto where = [&] { return text("restore: row ", r, " in ", state.where()); };
    KVKEEP_REQUIRE(count * kSpanNumbers == std::ssize(numbers) && before + count <= coarse[0].size(0) &&
                       before + count <= coarse[1].size(0),
                   where(), " has ", numbers.size(), " numbers of spans, but there are ", coarse[0].size(0),
                   " coarse entries; allowed ", kSpanNumbers, " per span, and one entry each");
    SpanParts parts;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto n = numbers.subspan(static_cast<std::size_t>(i * kSpanNumbers), kSpanNumbers);
      FoldedSpan span{.first = n[0], .last = n[1], .length = n[2]};
      for (std::size_t side = 0; side < 2; ++side)
        span.factors[side] = {
            .rank = n[3 + 2 * side], .raw = (n[4 + 2 * side] & 1) != 0, .centred = (n[4 + 2 * side] & 2) != 0};
      const auto rank_fits = [&](const SpanFactors& f) { return f.rank >= 0 && f.rank <= memory.factors.max_rank; };
      KVKEEP_REQUIRE(span.length >= 1 && span.first >= 0 && span.last < s.next_position && rank_fits(span.factors[0]) &&
                         rank_fits(span.factors[1]),
                     where(), ": span ", i, " has ", span.length, " tokens at positions ", span.first, " to ",
                     span.last, ", rank ", span.factors[0].rank, " and ", span.factors[1].rank,
                     "; allowed tokens below position ", s.next_position, " and ranks to ", memory.factors.max_rank);
      const std::int64_t bytes = factor_bytes(span, dim, store);
      KVKEEP_REQUIRE(bytes <= std::ssize(far), where(), ": factors of span ", i, " take ", bytes, " bytes; ",
                     far.size(), " are left; allowed no more");
      parts.factors.emplace_back(far.begin(), far.begin() + bytes);
      far = far.subspan(static_cast<std::size_t>(bytes));
      parts.spans.push_back(span);
    }
    for (std::size_t side = 0; side < 2; ++side)
      parts.coarse[side] = list_from(numbers_of<std::byte>(coarse[side]), before * entry, (before + count) * entry);
    before += count;
    parts.norms.assign(norms.row(r).begin(), norms.row(r).end());
    parts.sketch.signs.assign(signs.row(r).begin(), signs.row(r).end());
    parts.sketch.sizes.assign(sizes.row(r).begin(), sizes.row(r).end());
    SpanRow row(dim, store, std::move(parts));
    const std::int64_t sketched = memory.fold_options().sketch ? KeySketch::padded(row.tokens()) : 0,
                       normed = memory.learned() ? count * spec_.group() : 0;
    KVKEEP_REQUIRE(
        std::ssize(row.sketch().sizes) == sketched && std::ssize(row.norms()) == normed && row.tokens() <= s.logical,
        where(), " has folded ", row.tokens(), " tokens, with a sketch of ", row.sketch().sizes.size(), " and ",
        row.norms().size(), " norms; allowed at most ", s.logical, ", ", sketched, " and ", normed);
    folded[r] = std::move(row);
  }
  KVKEEP_REQUIRE(far.empty() && before == coarse[0].size(0) && before == coarse[1].size(0), "restore: ", state.where(),
                 " holds ", far.size(), " bytes of factors and ", coarse[0].size(0) - before,
                 " coarse entries that belong to no span; allowed none");
  s.folded = memory_->rows(std::move(folded));
}

}  // namespace kvkeep
