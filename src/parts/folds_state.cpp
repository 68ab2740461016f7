// SPDX-License-Identifier: Apache-2.0
// Folded spans as tensors, and back.

#include <algorithm>
#include <array>
#include <utility>

#include "kvkeep/parts/folds.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/state/state_file.h"
#include "state_numbers.h"

namespace kvkeep::parts {
namespace {

std::int64_t factor_bytes(const FoldedSpan& span, std::int64_t dim, Dtype store) {
  return (span.factors[0].numbers(span.length, dim) + span.factors[1].numbers(span.length, dim)) * element_size(store);
}

/// first, last, length; then rank and form of keys and of values. Form: 1 raw, 2 centred.
constexpr std::int64_t kSpanNumbers = 7;

}  // namespace

void Folds::save(SequenceId sequence, StateTensors& to) const {
  const Folded& own = *folded_.find(sequence);
  const std::span<const SpanRow> memory = own.rows->host_rows();
  KVKEEP_REQUIRE_AS(Unsupported, !memory.empty(), "save: folded spans of sequence ", sequence, " are on ",
                    machine().device().str(), " and are not read back; allowed only on the CPU");
  to.emplace_back("viewed", list_of(own.viewed, Dtype::i64));
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

void Folds::restore(SequenceId sequence, const SequenceState& s, const StateFile& state) {
  Folded& own = *folded_.find(sequence);
  const Tensor viewed = state.tensor("viewed", Dtype::i64, {std::ssize(own.viewed)});
  own.viewed = list_from(numbers_of<std::int64_t>(viewed), 0, viewed.numel());
  KVKEEP_REQUIRE(std::ranges::all_of(own.viewed, [&](std::int64_t x) { return x >= 0 && x <= s.logical; }),
                 "restore: tensor \"viewed\" in ", state.where(), " is not within the ", s.logical,
                 " tokens of the sequence; allowed 0 to that");
  std::vector<SpanRow> folded(own.rows->host_rows().begin(), own.rows->host_rows().end());
  KVKEEP_REQUIRE_AS(Unsupported, !folded.empty(), "restore: ", policy().name(), " keeps folded spans on ",
                    machine().device().str(), ", where they are not restored; allowed only on the CPU");
  const MemoryOptions& memory = *policy().memory();
  const std::int64_t dim = spec().key_dim, rows = std::ssize(folded);
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
                       normed = memory.learned() ? count * spec().group() : 0;
    KVKEEP_REQUIRE(
        std::ssize(row.sketch().sizes) == sketched && std::ssize(row.norms()) == normed && row.tokens() <= s.logical,
        where(), " has folded ", row.tokens(), " tokens, with a sketch of ", row.sketch().sizes.size(), " and ",
        row.norms().size(), " norms; allowed at most ", s.logical, ", ", sketched, " and ", normed);
    folded[r] = std::move(row);
  }
  KVKEEP_REQUIRE(far.empty() && before == coarse[0].size(0) && before == coarse[1].size(0), "restore: ", state.where(),
                 " holds ", far.size(), " bytes of factors and ", coarse[0].size(0) - before,
                 " coarse entries that belong to no span; allowed none");
  own.rows = memory_->rows(std::move(folded));
}

}  // namespace kvkeep::parts
