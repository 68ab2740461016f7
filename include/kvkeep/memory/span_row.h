#pragma once
/// The folded spans of one row (layer, sequence, KV head): one coarse entry each near the device, and low-rank factors
/// of their keys and values far from it. Source: SeKV (AmirAbaskohi/SeKV). Differs: what is factorised is centred on
/// the coarse entry where that leaves less out, the rank follows an energy rule, factors larger than the rows are never
/// stored, and the decomposition is exact.

#include <c10/util/BFloat16.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/slot.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/memory/factors.h"
#include "kvkeep/memory/far_store.h"
#include "kvkeep/memory/rank_gates.h"

namespace kvkeep {

/// Keys or values.
enum class KvSide : std::uint8_t { keys, values };

/// A sketch of every folded key k: the signs of k - c, c being its span's coarse key, and a number g, so that q . k is
/// about q . c + g * (q . signs). g = |k - c|^2 / |k - c|_1 makes the estimate exact for queries along k - c. Source:
/// ours, after sign quantisation of vectors (RaBitQ). Tokens lie in blocks of kBlock, word by word: the words of one
/// place side by side.
struct KeySketch {
  static constexpr std::int64_t kBlock = 16, kBits = 32;

  std::vector<std::uint32_t> signs;  ///< [blocks, words, kBlock] a set bit: not negative
  std::vector<c10::BFloat16> sizes;  ///< [tokens, rounded up to blocks] g

  void resize(std::int64_t tokens, std::int64_t dim);
  /// Tokens, rounded up to blocks.
  [[nodiscard]] static std::int64_t padded(std::int64_t tokens) { return (tokens + kBlock - 1) / kBlock * kBlock; }
  [[nodiscard]] static std::int64_t words(std::int64_t dim) { return (dim + kBits - 1) / kBits; }
  /// Where word `word` of a token lies.
  [[nodiscard]] static std::size_t at(std::int64_t token, std::int64_t word, std::int64_t words) {
    return static_cast<std::size_t>((token / kBlock * words + word) * kBlock + token % kBlock);
  }
};

/// One span as it is kept.
struct FoldedSpan {
  std::int32_t first = 0, last = 0;  ///< logical positions of its oldest and newest token
  std::int32_t length =
      0;  ///< tokens; fewer than last - first + 1 where others of these positions are kept or lie in other spans
  std::array<SpanFactors, 2> factors = {};  ///< of keys, of values
};

/// What a row of spans is made of, where it comes from elsewhere than fold(). Offsets of factors follow from their
/// sizes.
struct SpanParts {
  std::vector<FoldedSpan> spans = {};
  std::array<std::vector<std::byte>, 2> coarse = {};  ///< dtype [spans, D] of keys, of values
  std::vector<float> norms = {};                      ///< [spans, heads], or none
  KeySketch sketch = {};                              ///< of the tokens of all spans, or none
  std::vector<FarBlobPtr> blobs = {};                 ///< [spans] null where a span has no numbers
};

/// Grows at its end; what is in it never changes. Read by any number of threads while nobody appends.
class SpanRow {
 public:
  SpanRow(std::int64_t dim, ScalarType store) : dim_(dim), store_(store) {}
  /// Throws InvalidArgument for parts that do not fit each other.
  SpanRow(std::int64_t dim, ScalarType store, SpanParts parts);

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(spans_.size()); }
  [[nodiscard]] std::int64_t dim() const { return dim_; }
  [[nodiscard]] ScalarType dtype() const { return store_; }
  [[nodiscard]] const FoldedSpan& span(std::int64_t i) const { return spans_[static_cast<std::size_t>(i)]; }

  /// Near: dtype() [size, D] weighted means of the rows.
  [[nodiscard]] const std::byte* coarse(KvSide side) const { return coarse_[static_cast<std::size_t>(side)].data(); }
  /// Near: f32 [size] logarithms of the lengths.
  [[nodiscard]] std::span<const float> log_length() const { return log_length_; }
  /// Near, where a router is learned: f32 [size, heads] its norms (Router::norms); else empty.
  [[nodiscard]] std::span<const float> norms() const { return norms_; }

  /// Near, where FactorOptions::sketch: of the tokens of all spans, in their order; else empty.
  [[nodiscard]] const KeySketch& sketch() const { return sketch_; }
  /// Tokens in the spans before span i; tokens() for i = size().
  [[nodiscard]] std::int64_t tokens_before(std::int64_t i) const { return first_token_[static_cast<std::size_t>(i)]; }

  /// [size + 1] tokens_before() of every span.
  [[nodiscard]] std::span<const std::int64_t> first_tokens() const { return first_token_; }

  /// Far: dtype() numbers of keys, then of values, at the offsets that span(i).factors says. Null where there are none.
  [[nodiscard]] const FarBlobPtr& blob(std::int64_t i) const { return blobs_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] std::span<const FarBlobPtr> blobs() const { return blobs_; }

  /// What opening a span takes, in entries of a row: (numbers of its keys + of its values) / 2D, its length where both
  /// are raw.
  [[nodiscard]] double zoom_entries(std::int64_t i) const;

  /// What a zoom shows: f32 [length, D]. For tests and traces; attention never forms it. Throws as FarBlob::read().
  [[nodiscard]] Tensor rows(std::int64_t i, KvSide side) const;

  /// Makes room for append(later), which then does not throw. Throws InvalidArgument for another D or dtype, or norms
  /// or a sketch on one side alone. Changes nothing that can be seen.
  void reserve(const SpanRow& later);
  /// Spans of `later` after these, in their order. Throws as reserve().
  void append(SpanRow later);

  /// f32 [size, heads]; once, where a router is learned.
  void set_norms(std::vector<float> norms) { norms_ = std::move(norms); }

  /// Tokens in all spans.
  [[nodiscard]] std::int64_t tokens() const { return first_token_.back(); }
  /// Bytes of numbers, tables not counted: near 2 * D in dtype(), 4 for the logarithm and 4 for each norm a span, and
  /// of a sketch 4 for every 32 numbers of a key and 2 a token; far the blobs.
  [[nodiscard]] std::int64_t near_bytes() const;
  [[nodiscard]] std::int64_t far_bytes() const;

 private:
  friend class RowFolding;
  void append_sketch(const SpanRow& later);
  std::int64_t dim_;
  ScalarType store_;
  std::vector<FoldedSpan> spans_;
  std::array<std::vector<std::byte>, 2> coarse_;
  std::vector<float> log_length_, norms_;
  std::vector<std::int64_t> first_token_ = {0};  ///< [size + 1]
  KeySketch sketch_;
  std::vector<FarBlobPtr> blobs_;
};

/// What is to be folded of one row.
struct RowFold {
  SlotAddress keys, values;
  ScalarType key_dtype = kFloat32, value_dtype = kFloat32;  ///< f32, f16 or bf16
  std::span<const std::int32_t> slots;                      ///< of one span after the other, ascending in each
  std::span<const std::int64_t> indptr;  ///< [spans + 1] span i is slots[indptr[i]] to slots[indptr[i + 1] - 1]
  std::span<const float> weights =
      {};  ///< [slots] how much a slot counts in its span's coarse entry, as span_weights() takes it; empty: all alike
  std::span<const std::int32_t> positions = {};  ///< [slots of the row] logical; empty: slot i stands at position i
  FarLabel label = {};                           ///< whose it is; spans and tokens are filled in
  std::int32_t spans_before = 0;                 ///< number of the first one, in labels
};

/// What only traces and reports read: f64 [max_rank] of every span and side, in the order of the rows and their spans.
struct FoldTrace {
  std::vector<double> singular_values;  ///< [spans, 2, max_rank] of what was factorised, descending, padded with 0
  std::vector<double> gates;            ///< the same; empty unless the rank is that of gates
};

/// Folds spans of many rows together: [rows], each with the spans of its RowFold. `gates`: where options.rank is gates.
/// Far bytes go to `far`. Throws InvalidArgument with all of options.problems(), for rows that are not finite (named by
/// layer, head and positions), empty spans, and gates that are missing or of another size; as FarStore::put(). Nothing
/// is kept then. Cost, a span, row and side: a Gram matrix of m^2 * max(L, D) / 2, m = min(L, D), then 2 m^3 / 3, twice
/// where centring is chosen, and r (m^2 + L D) for r components, in fp64. Spans of one length run together, groups of
/// them in parallel; a span's result does not depend on its neighbours' values or on threads.
[[nodiscard]] std::vector<SpanRow> fold(std::span<const RowFold> rows, std::int64_t dim, const FactorOptions& options,
                                        FarStore& far, const RankGates* gates = nullptr, FoldTrace* trace = nullptr);

}  // namespace kvkeep
