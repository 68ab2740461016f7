// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of span_row.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <ostream>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/memory/factorise.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/memory/span_row.h"
#include "kvkeep/simd/attention_lanes.h"
#include "kvkeep/simd/memory_lanes.h"
#include "kvkeep/simd/stored_side.h"

namespace kvkeep {
namespace span_row_detail {

/// Makes room for `size` elements in total. Grows by at least half, so growth token by token rarely copies.
template <class T>
void make_room(std::vector<T>& list, std::size_t size) {
  if (size > list.capacity()) list.reserve(std::max(size, list.capacity() + list.capacity() / 2));
}

inline constexpr std::int64_t kBatchNumbers =
    1 << 19;  ///< fp64 numbers of the matrices that are decomposed together: they stay in a CPU cache

template <class T>
void append_to(std::vector<T>& to, std::vector<T>&& from) {
  if (to.empty())
    to = std::move(from);
  else
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

/// Makes room for all of `later` at the end of a list.
template <class T>
void make_room_for(const std::vector<T>& later, std::vector<T>& list) {
  make_room(list, list.size() + later.size());
}

inline std::vector<float> widened(const std::byte* from, Dtype dtype, std::int64_t count) {
  std::vector<float> numbers(static_cast<std::size_t>(count));
  cpu::widen(from, dtype, count, numbers.data());
  return numbers;
}

}  // namespace span_row_detail

KVKEEP_INLINE std::ostream& operator<<(std::ostream& out, const SpanLabel& label) {
  if (label.span >= 0)
    out << "span " << label.span;
  else
    out << "spans";
  if (label.end > label.begin) out << " (tokens " << label.begin << " to " << label.end - 1 << ")";
  const char* between = " of ";
  const auto add = [&](const char* name, std::int64_t number) {
    if (number < 0) return;
    out << std::exchange(between, ", ") << name << number;
  };
  add("sequence ", label.sequence);
  add("layer ", label.layer);
  add("head ", label.head);
  return out;
}

KVKEEP_INLINE void FactorOptions::describe(Fields& f) {
  f.integer("max_rank", max_rank, 1, 4096, "most components that are kept of a span's keys, and of its values");
  f.choice("rank", rank, {{"energy", Rank::energy}, {"gates", Rank::gates}, {"max", Rank::max}},
           "how many components: by what is left out, by learned gates, or up to max_rank");
  f.real("energy", energy, {0, 1}, "with rank=energy: what is left out is at most energy^2 of the sum of squares");
  f.real("gate_keep", gate_keep, {0, 1}, "with rank=gates: gates above it keep their component");
  f.choice("centred", centred, {{"auto", Centred::automatic}, {"always", Centred::always}, {"never", Centred::never}},
           "factors of rows minus their coarse entry: if that leaves less out (never with gates), always, or never");
  f.choice("store", store, {{"f32", Dtype::f32}, {"bf16", Dtype::bf16}, {"f16", Dtype::f16}},
           "dtype of coarse entries and factors");
}

KVKEEP_INLINE std::vector<std::string> FactorOptions::problems() const {
  std::vector<std::string> found;
  if (max_rank < 1) found.push_back(text("max_rank: ", max_rank, "; allowed 1 or more"));
  if (!(energy >= 0 && energy <= 1)) found.push_back(text("energy: ", energy, "; allowed 0 to 1"));
  if (!(gate_keep >= 0 && gate_keep <= 1)) found.push_back(text("gate_keep: ", gate_keep, "; allowed 0 to 1"));
  if (!is_scorable(store)) found.push_back(text("store: ", store, "; allowed f32, bf16 or f16"));
  return found;
}

KVKEEP_INLINE SpanRow::SpanRow(std::int64_t dim, Dtype store, SpanParts parts)
    : dim_(dim),
      store_(store),
      spans_(std::move(parts.spans)),
      coarse_(std::move(parts.coarse)),
      norms_(std::move(parts.norms)),
      sketch_(std::move(parts.sketch)),
      factors_(std::move(parts.factors)) {
  const auto bytes = element_size(store_);
  KVKEEP_REQUIRE(factors_.size() == spans_.size(), "span row: factors of ", factors_.size(), " spans for ",
                 spans_.size(), "; allowed one each");
  for (const auto& side : coarse_)
    KVKEEP_REQUIRE(static_cast<std::int64_t>(side.size()) == size() * dim_ * bytes, "span row: coarse entries of ",
                   side.size(), " bytes; allowed ", size() * dim_ * bytes, " for ", size(), " spans");
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    FoldedSpan& s = spans_[i];
    KVKEEP_REQUIRE(s.length >= 1 && s.first >= 0 && s.length <= std::int64_t{s.last} - s.first + 1 &&
                       s.factors[0].rank >= 0 && s.factors[1].rank >= 0,
                   "span row: span ", i, " has ", s.length, " tokens at positions ", s.first, " to ", s.last, ", rank ",
                   s.factors[0].rank, " and ", s.factors[1].rank,
                   "; allowed 1 or more tokens, one position each, and ranks from 0");
    s.factors[0].offset = 0;
    s.factors[1].offset = s.factors[0].numbers(s.length, dim_);
    const std::int64_t far = (s.factors[1].offset + s.factors[1].numbers(s.length, dim_)) * bytes,
                       given = std::ssize(factors_[i]);
    KVKEEP_REQUIRE(given == far, "span row: span ", i, " has ", given, " far bytes; allowed ", far,
                   " for its length and ranks");
    log_length_.push_back(static_cast<float>(std::log(static_cast<double>(s.length))));
    first_token_.push_back(first_token_.back() + s.length);
  }
  const auto sketched = static_cast<std::int64_t>(sketch_.sizes.size());
  KVKEEP_REQUIRE((sketched == 0 || sketched == KeySketch::padded(tokens())) &&
                     static_cast<std::int64_t>(sketch_.signs.size()) == sketched * KeySketch::words(dim_),
                 "span row: a sketch of ", sketched, " tokens in ", sketch_.signs.size(),
                 " words; allowed none, or one of ", KeySketch::padded(tokens()), " tokens");
  KVKEEP_REQUIRE(spans_.empty() ? norms_.empty() : norms_.size() % spans_.size() == 0, "span row: ", norms_.size(),
                 " norms for ", spans_.size(), " spans; allowed none, or equally many per span");
}

KVKEEP_INLINE Tensor SpanRow::rows(std::int64_t i, KvSide side) const {
  const FoldedSpan& s = span(i);
  const SpanFactors& f = s.factors[static_cast<std::size_t>(side)];
  const auto bytes = element_size(store_);
  Tensor out = zeros({s.length, dim_}, Dtype::f32);
  const std::vector<float> numbers =
      span_row_detail::widened(factors(i).data() + f.offset * bytes, store_, f.numbers(s.length, dim_));
  float* to = out.data<float>();
  if (f.raw) {
    std::ranges::copy(numbers, to);
    return out;
  }
  if (f.centred) {
    const std::vector<float> base = span_row_detail::widened(coarse(side) + i * dim_ * bytes, store_, dim_);
    for (std::int64_t t = 0; t < s.length; ++t) std::ranges::copy(base, to + t * dim_);
  }
  for (std::int64_t t = 0; t < s.length; ++t)
    cpu::add_rows(numbers.data() + std::int64_t{s.length} * f.rank, f.rank, dim_, numbers.data() + t * f.rank,
                  to + t * dim_);
  return out;
}

KVKEEP_INLINE void SpanRow::reserve(const SpanRow& later) {
  KVKEEP_REQUIRE(later.dim_ == dim_ && later.store_ == store_, "span row: spans of ", later.dim_, " numbers in ",
                 later.store_, "; allowed ", dim_, " in ", store_);
  KVKEEP_REQUIRE(size() == 0 || later.size() == 0 || norms_.empty() == later.norms_.empty(),
                 "span row: only some spans have a router's norms; allowed all or none");
  KVKEEP_REQUIRE(tokens() == 0 || later.tokens() == 0 || sketch_.sizes.empty() == later.sketch_.sizes.empty(),
                 "span row: only some spans have a sketch of their keys; allowed all or none");
  span_row_detail::make_room_for(later.first_token_, first_token_);
  for (std::size_t side = 0; side < 2; ++side) span_row_detail::make_room_for(later.coarse_[side], coarse_[side]);
  span_row_detail::make_room_for(later.spans_, spans_);
  span_row_detail::make_room_for(later.log_length_, log_length_);
  span_row_detail::make_room_for(later.norms_, norms_);
  span_row_detail::make_room_for(later.factors_, factors_);
  const auto sketched = static_cast<std::size_t>(KeySketch::padded(tokens() + later.tokens()));
  if (later.sketch_.sizes.empty()) return;
  span_row_detail::make_room(sketch_.sizes, sketched);
  const std::size_t words = sketched * static_cast<std::size_t>(KeySketch::words(dim_));
  span_row_detail::make_room(sketch_.signs, words);
}

KVKEEP_INLINE void SpanRow::append(SpanRow later) {
  reserve(later);
  append_sketch(later);
  for (std::size_t i = 1; i < later.first_token_.size(); ++i)
    first_token_.push_back(first_token_.back() + later.first_token_[i] - later.first_token_[i - 1]);
  for (std::size_t side = 0; side < 2; ++side)
    span_row_detail::append_to(coarse_[side], std::move(later.coarse_[side]));
  span_row_detail::append_to(spans_, std::move(later.spans_));
  span_row_detail::append_to(log_length_, std::move(later.log_length_));
  span_row_detail::append_to(norms_, std::move(later.norms_));
  span_row_detail::append_to(factors_, std::move(later.factors_));
}

KVKEEP_INLINE void KeySketch::resize(std::int64_t tokens, std::int64_t dim) {
  sizes.resize(static_cast<std::size_t>(padded(tokens)));
  signs.resize(static_cast<std::size_t>(padded(tokens) * words(dim)));
}

KVKEEP_INLINE void SpanRow::append_sketch(const SpanRow& later) {
  if (later.sketch_.sizes.empty()) return;
  const std::int64_t words = KeySketch::words(dim_), before = tokens();
  sketch_.resize(before + later.tokens(), dim_);
  for (std::int64_t t = 0; t < later.tokens(); ++t) {
    sketch_.sizes[static_cast<std::size_t>(before + t)] = later.sketch_.sizes[static_cast<std::size_t>(t)];
    for (std::int64_t w = 0; w < words; ++w)
      sketch_.signs[KeySketch::at(before + t, w, words)] = later.sketch_.signs[KeySketch::at(t, w, words)];
  }
}

KVKEEP_INLINE std::int64_t SpanRow::near_bytes() const {
  return size() * (2 * dim_ * element_size(store_) + static_cast<std::int64_t>(sizeof(float))) +
         static_cast<std::int64_t>(norms_.size() * sizeof(float)) +
         (sketch_.sizes.empty() ? 0 : tokens() * (KeySketch::words(dim_) * 4 + 2));
}

KVKEEP_INLINE std::int64_t SpanRow::far_bytes() const {
  return std::accumulate(factors_.begin(), factors_.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& one) { return sum + std::ssize(one); });
}

/// One call of fold().
class RowFolding {
 public:
  RowFolding(std::span<const RowFold> folds, std::int64_t dim, const FactorOptions& options, const RankGates* gates,
             FoldTrace* trace, std::int64_t far_bytes)
      : folds_(folds), dim_(dim), options_(options), gates_(gates), trace_(trace), far_bytes_(far_bytes) {
    check();
    std::int64_t spans = 0;
    for (const RowFold& f : folds_) {
      const auto count = static_cast<std::int64_t>(f.indptr.size()) - 1;
      SpanRow row(dim_, options_.store);
      row.spans_.resize(static_cast<std::size_t>(count));
      row.factors_.resize(static_cast<std::size_t>(count));
      row.log_length_.resize(static_cast<std::size_t>(count));
      row.first_token_.assign(f.indptr.begin(), f.indptr.end());
      if (options_.sketch) {
        row.sketch_.resize(static_cast<std::int64_t>(f.slots.size()), dim_);
      }
      for (auto& side : row.coarse_) side.resize(static_cast<std::size_t>(count * dim_ * bytes_of_number()));
      rows_.push_back(std::move(row));
      first_.push_back(spans);
      spans += count;
    }
    if (trace_ == nullptr) return;
    trace_->singular_values.assign(static_cast<std::size_t>(2 * spans * options_.max_rank), 0);
    if (options_.rank == FactorOptions::Rank::gates) trace_->gates.assign(trace_->singular_values.size(), 0);
  }

  std::vector<SpanRow> run() && {
    const std::vector<Batch> batches = this->batches();
    parallel_for(0, static_cast<std::int64_t>(batches.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) fold(batches[static_cast<std::size_t>(b)]);
    });
    return std::move(rows_);
  }

 private:
  struct Place {
    std::size_t row;
    std::int64_t span;
  };
  /// Spans of one length that are folded together.
  struct Batch {
    std::int64_t length;
    std::vector<Place> places;
  };

  void check() const {
    require_no_problems("fold", options_.problems());
    const bool asks = options_.rank == FactorOptions::Rank::gates;
    KVKEEP_REQUIRE(!asks || gates_ != nullptr, "fold: rank is gates, but there are none; allowed with RankGates");
    KVKEEP_REQUIRE(!asks || (gates_->max_rank() == options_.max_rank && gates_->key_dim() == dim_), "fold: gates for ",
                   asks ? gates_->max_rank() : 0, " components and keys of ", asks ? gates_->key_dim() : 0,
                   " numbers; allowed max_rank = ", options_.max_rank, " and ", dim_);
    for (const RowFold& f : folds_) {
      KVKEEP_REQUIRE(
          !f.indptr.empty() && f.indptr.front() == 0 && f.indptr.back() == static_cast<std::int64_t>(f.slots.size()),
          "fold: indptr of ", f.label, " does not end with its ", f.slots.size(), " slots; allowed 0 to that");
      KVKEEP_REQUIRE(f.weights.empty() || f.weights.size() == f.slots.size(), "fold: ", f.weights.size(),
                     " weights for ", f.slots.size(), " slots; allowed none or one each");
      KVKEEP_REQUIRE(cpu::is_readable(f.key_dtype) && cpu::is_readable(f.value_dtype), "fold: rows of ", f.label,
                     " are ", f.key_dtype, " and ", f.value_dtype, "; allowed ", cpu::kReadable);
      for (std::size_t i = 0; i + 1 < f.indptr.size(); ++i)
        KVKEEP_REQUIRE(f.indptr[i] < f.indptr[i + 1], "fold: a span of ", f.label, " has ",
                       f.indptr[i + 1] - f.indptr[i], " tokens; allowed 1 or more");
    }
  }

  [[nodiscard]] std::vector<Batch> batches() const {
    std::vector<std::pair<std::int64_t, Place>> order;
    for (std::size_t r = 0; r < folds_.size(); ++r)
      for (std::size_t s = 0; s + 1 < folds_[r].indptr.size(); ++s)
        order.push_back({folds_[r].indptr[s + 1] - folds_[r].indptr[s], {r, static_cast<std::int64_t>(s)}});
    std::ranges::stable_sort(order, {}, [](const auto& one) { return one.first; });
    std::vector<Batch> all;
    for (const auto& [length, place] : order) {
      const std::int64_t most = std::max<std::int64_t>(1, span_row_detail::kBatchNumbers / (2 * length * dim_));
      if (all.empty() || all.back().length != length || static_cast<std::int64_t>(all.back().places.size()) == most)
        all.push_back({length, {}});
      all.back().places.push_back(place);
    }
    return all;
  }

  void fold(const Batch& batch) {
    const auto count = static_cast<std::int64_t>(batch.places.size());
    cpu::Factorisation matrices(2 * count, batch.length, dim_, options_);  // for each span keys, then values
    std::vector<std::int64_t> key_of;
    std::vector<float> row(static_cast<std::size_t>(dim_));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto [r, s] = batch.places[static_cast<std::size_t>(i)];
      const RowFold& f = folds_[r];
      const auto first = static_cast<std::size_t>(f.indptr[static_cast<std::size_t>(s)]);
      const std::span<const std::int32_t> slots = f.slots.subspan(first, static_cast<std::size_t>(batch.length));
      const std::vector<float> alike(f.weights.empty() ? slots.size() : 0, 1.0F);
      const std::vector<double> weights =
          span_weights(f.weights.empty() ? std::span<const float>(alike) : f.weights.subspan(first, slots.size()));
      for (std::int64_t side = 0; side < 2; ++side) {
        const cpu::StoredSide stored{side == 0 ? f.keys : f.values, side == 0 ? f.key_scales : f.value_scales,
                                     side == 0 ? f.key_dtype : f.value_dtype, dim_,
                                     side == 0 ? f.keys_rotated : f.values_rotated};
        double* to = matrices.rows(2 * i + side);
        for (const std::int32_t slot : slots) {
          cpu::widen_slot(stored, slot, row.data());
          to = std::ranges::copy(row, to).out;
        }
        KVKEEP_REQUIRE(matrices.weigh(2 * i + side, weights), "fold: ", side == 0 ? "keys" : "values", " of ",
                       label_of(f, s, slots), " hold NaN or infinity; allowed finite numbers");
        if (options_.rank == FactorOptions::Rank::gates) key_of.push_back(2 * i);
      }
    }
    if (options_.sketch)
      for (std::int64_t i = 0; i < count; ++i) draw(batch, i, matrices);
    matrices.run(gates_, key_of);
    for (std::int64_t i = 0; i < count; ++i) place(batch, i, matrices);
  }

  /// The sketch of the keys of span i.
  void draw(const Batch& batch, std::int64_t i, cpu::Factorisation& matrices) {
    const auto [r, s] = batch.places[static_cast<std::size_t>(i)];
    KeySketch& sketch = rows_[r].sketch_;
    const std::int64_t first = folds_[r].indptr[static_cast<std::size_t>(s)], words = KeySketch::words(dim_);
    const double *key = matrices.rows(2 * i), *mean = matrices.mean(2 * i);
    for (std::int64_t t = first; t < first + batch.length; ++t, key += dim_) {
      double squares = 0, sum = 0;
      for (std::int64_t w = 0; w < words; ++w) {
        std::uint32_t bits = 0;
        for (std::int64_t d = w * KeySketch::kBits; d < std::min(dim_, (w + 1) * KeySketch::kBits); ++d) {
          const double x = key[d] - mean[d];
          squares += product(x, x), sum += std::abs(x);
          if (x >= 0) bits |= std::uint32_t{1} << (d % KeySketch::kBits);
        }
        sketch.signs[KeySketch::at(t, w, words)] = bits;
      }
      sketch.sizes[static_cast<std::size_t>(t)] = BFloat16(static_cast<float>(sum > 0 ? squares / sum : 0));
    }
  }

  /// Puts the results of span i of a batch where they belong.
  void place(const Batch& batch, std::int64_t i, const cpu::Factorisation& matrices) {
    const auto [r, s] = batch.places[static_cast<std::size_t>(i)];
    const RowFold& f = folds_[r];
    SpanRow& row = rows_[r];
    FoldedSpan& span = row.spans_[static_cast<std::size_t>(s)];
    const std::span<const std::int32_t> slots = f.slots.subspan(
        static_cast<std::size_t>(f.indptr[static_cast<std::size_t>(s)]), static_cast<std::size_t>(batch.length));
    span.first = position(f, slots.front()), span.last = position(f, slots.back()),
    span.length = static_cast<std::int32_t>(batch.length);
    row.log_length_[static_cast<std::size_t>(s)] = static_cast<float>(std::log(static_cast<double>(batch.length)));
    std::int64_t total = 0;
    for (std::int64_t side = 0; side < 2; ++side) {
      const std::int64_t n = 2 * i + side;
      SpanFactors& factors = span.factors[static_cast<std::size_t>(side)];
      factors = matrices.factors(n);
      factors.offset = total;
      total += factors.numbers(batch.length, dim_);
      std::vector<float> mean(matrices.mean(n), matrices.mean(n) + dim_);
      require_storable(mean, f, s, slots);
      cpu::round_to(mean.data(), dim_, options_.store,
                    row.coarse_[static_cast<std::size_t>(side)].data() + s * dim_ * bytes_of_number());
      if (trace_ == nullptr) continue;
      const auto at = static_cast<std::ptrdiff_t>((2 * (first_[r] + s) + side) * options_.max_rank);
      std::ranges::copy(matrices.singular_values(n), trace_->singular_values.begin() + at);
      if (!trace_->gates.empty()) std::ranges::copy(matrices.gates(n), trace_->gates.begin() + at);
    }
    if (total == 0) return;
    std::vector<float> numbers(static_cast<std::size_t>(total));
    for (std::int64_t side = 0; side < 2; ++side)
      matrices.write(2 * i + side, numbers.data() + span.factors[static_cast<std::size_t>(side)].offset);
    require_storable(numbers, f, s, slots);
    const std::int64_t bytes = total * bytes_of_number(), left = far_bytes_.fetch_sub(bytes) - bytes;
    KVKEEP_REQUIRE_AS(StateError, left >= 0, "fold: no room for factors of ", label_of(f, s, slots), "; given ", bytes,
                      " bytes, ", left + bytes, " are left; allowed more host_bytes, or fewer sequences");
    auto& to = row.factors_[static_cast<std::size_t>(s)];
    to.resize(static_cast<std::size_t>(bytes));
    cpu::round_to(numbers.data(), total, options_.store, to.data());
  }

  void require_storable(std::span<const float> numbers, const RowFold& f, std::int64_t s,
                        std::span<const std::int32_t> slots) const {
    const float most = largest_of(options_.store);
    bool fits = true;
    for (const float x : numbers) fits &= std::abs(x) <= most;
    KVKEEP_REQUIRE(fits, "fold: coarse entry or factors of ", label_of(f, s, slots), " hold a number that ",
                   options_.store, " cannot; allowed up to ", most, ", or another store");
  }

  [[nodiscard]] std::int64_t bytes_of_number() const { return element_size(options_.store); }
  [[nodiscard]] static std::int32_t position(const RowFold& f, std::int32_t slot) {
    return f.positions.empty() ? slot : f.positions[static_cast<std::size_t>(slot)];
  }

  [[nodiscard]] static SpanLabel label_of(const RowFold& f, std::int64_t span, std::span<const std::int32_t> slots) {
    SpanLabel label = f.label;
    label.span = f.spans_before + static_cast<std::int32_t>(span);
    label.begin = position(f, slots.front()), label.end = position(f, slots.back()) + 1;
    return label;
  }

  std::span<const RowFold> folds_;
  std::int64_t dim_;
  const FactorOptions& options_;
  const RankGates* gates_;
  FoldTrace* trace_;
  std::atomic<std::int64_t> far_bytes_;  ///< that are left for factors
  std::vector<SpanRow> rows_;
  std::vector<std::int64_t> first_;  ///< [rows] spans of earlier rows
};

KVKEEP_INLINE std::vector<SpanRow> fold(std::span<const RowFold> rows, std::int64_t dim, const FactorOptions& options,
                                        const RankGates* gates, FoldTrace* trace, std::int64_t far_bytes) {
  return RowFolding(rows, dim, options, gates, trace, far_bytes).run();
}

}  // namespace kvkeep
