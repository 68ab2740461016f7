// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The folded spans of one row (layer, sequence, KV head): one coarse entry each near attention, and low-rank factors
/// of their keys and values, which few queries read. Source: SeKV (AmirAbaskohi/SeKV). Differs: rows are centred on the
/// coarse entry if that leaves less out, the rank follows an energy rule, factors larger than the rows are never
/// stored, and the decomposition is exact.

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <limits>
#include <span>
#include <vector>

#include "kvkeep/core/slot.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/memory/factors.h"
#include "kvkeep/simd/aligned.h"

namespace kvkeep {

class RankGates;

/// No cap on bytes.
inline constexpr std::int64_t kAnyBytes = std::numeric_limits<std::int64_t>::max();

/// Whose a span is; -1 or an empty range of tokens: unknown. Only error messages print it.
struct SpanLabel {
  std::int64_t sequence = -1;
  std::int32_t layer = -1;
  std::int32_t head = -1;  ///< KV head
  std::int32_t span = -1;
  std::int32_t begin = 0, end = 0;  ///< tokens begin to end - 1
};

/// "span 17 (tokens 210 to 273) of sequence 3, layer 2, head 0"; "spans" without a number.
std::ostream& operator<<(std::ostream& out, const SpanLabel& label);

/// Keys or values.
enum class KvSide : std::uint8_t { keys, values };

/// A sketch of every folded key k: the signs of k - c, where c is its span's coarse key, and a number g, so that q . k
/// is about q . c + g * (q . signs). g = |k - c|^2 / |k - c|_1 makes the estimate exact for queries along k - c.
/// Source: ours, after sign quantisation of vectors (RaBitQ). Tokens are stored in blocks of kBlock, word by word: word
/// i of all tokens of a block, then word i + 1.
struct KeySketch {
  static constexpr std::int64_t kBlock = 16, kBits = 32;

  std::vector<std::uint32_t> signs;  ///< [blocks, words, kBlock] a set bit: not negative
  std::vector<BFloat16> sizes;       ///< [tokens, rounded up to blocks] g

  void resize(std::int64_t tokens, std::int64_t dim);
  /// Tokens, rounded up to blocks.
  [[nodiscard]] static std::int64_t padded(std::int64_t tokens) { return (tokens + kBlock - 1) / kBlock * kBlock; }
  [[nodiscard]] static std::int64_t words(std::int64_t dim) { return (dim + kBits - 1) / kBits; }
  /// Index of word `word` of a token.
  [[nodiscard]] static std::size_t at(std::int64_t token, std::int64_t word, std::int64_t words) {
    return static_cast<std::size_t>((token / kBlock * words + word) * kBlock + token % kBlock);
  }
};

/// One span as it is stored.
struct FoldedSpan {
  std::int32_t first = 0, last = 0;  ///< logical positions of its oldest and newest token
  std::int32_t length =
      0;  ///< tokens; fewer than last - first + 1 if others of these positions are kept or are in other spans
  std::array<SpanFactors, 2> factors = {};  ///< of keys, of values
};

/// Parts of a row of spans that does not come from fold(). Offsets of factors follow from their sizes.
struct SpanParts {
  std::vector<FoldedSpan> spans = {};
  std::array<std::vector<std::byte>, 2> coarse = {};  ///< dtype [spans, D] of keys, of values
  std::vector<float> norms = {};                      ///< [spans, heads], or none
  KeySketch sketch = {};                              ///< of the tokens of all spans, or none
  std::vector<cpu::Aligned<std::byte>> factors = {};  ///< [spans] empty if a span has no numbers
};

/// Grows at its end; its contents never change. Any number of threads may read it while nobody appends.
class SpanRow {
 public:
  SpanRow(std::int64_t dim, Dtype store) : dim_(dim), store_(store) {}
  /// Throws InvalidArgument for parts that do not fit each other.
  SpanRow(std::int64_t dim, Dtype store, SpanParts parts);

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(spans_.size()); }
  [[nodiscard]] std::int64_t dim() const { return dim_; }
  [[nodiscard]] Dtype dtype() const { return store_; }
  [[nodiscard]] const FoldedSpan& span(std::int64_t i) const { return spans_[static_cast<std::size_t>(i)]; }

  /// Near: dtype() [size, D] weighted means of the rows.
  [[nodiscard]] const std::byte* coarse(KvSide side) const { return coarse_[static_cast<std::size_t>(side)].data(); }
  /// Near: f32 [size] logarithms of the lengths.
  [[nodiscard]] std::span<const float> log_length() const { return log_length_; }
  /// Near, if a router is learned: f32 [size, heads] norms for it (Router::norms); else empty.
  [[nodiscard]] std::span<const float> norms() const { return norms_; }

  /// Near, with FactorOptions::sketch: sketch of the tokens of all spans, in their order; else empty.
  [[nodiscard]] const KeySketch& sketch() const { return sketch_; }
  /// Tokens in the spans before span i; tokens() for i = size().
  [[nodiscard]] std::int64_t tokens_before(std::int64_t i) const { return first_token_[static_cast<std::size_t>(i)]; }

  /// [size + 1] tokens_before() of every span.
  [[nodiscard]] std::span<const std::int64_t> first_tokens() const { return first_token_; }

  /// Far: dtype() numbers of keys, then of values, at the offsets in span(i).factors. Empty if there are none.
  [[nodiscard]] std::span<const std::byte> factors(std::int64_t i) const {
    return factors_[static_cast<std::size_t>(i)];
  }

  /// The rows that a zoom reads: f32 [length, D]. For tests and traces; attention never forms it.
  [[nodiscard]] Tensor rows(std::int64_t i, KvSide side) const;

  /// Makes room for append(later), which then does not throw. Throws InvalidArgument for another D or dtype, and if
  /// only one side has norms or a sketch. Changes nothing visible.
  void reserve(const SpanRow& later);
  /// Appends the spans of `later`, in their order. Throws as reserve().
  void append(SpanRow later);

  /// f32 [size, heads]; once, if a router is learned.
  void set_norms(std::vector<float> norms) { norms_ = std::move(norms); }

  /// Tokens in all spans.
  [[nodiscard]] std::int64_t tokens() const { return first_token_.back(); }
  /// Bytes of numbers, without tables. Near: per span 2 * D in dtype(), 4 for the logarithm and 4 for each norm; with a
  /// sketch, per token 4 for every 32 numbers of a key, and 2. Far: the factors.
  [[nodiscard]] std::int64_t near_bytes() const;
  [[nodiscard]] std::int64_t far_bytes() const;

 private:
  friend class RowFolding;
  void append_sketch(const SpanRow& later);
  std::int64_t dim_;
  Dtype store_;
  std::vector<FoldedSpan> spans_;
  std::array<std::vector<std::byte>, 2> coarse_;
  std::vector<float> log_length_, norms_;
  std::vector<std::int64_t> first_token_ = {0};  ///< [size + 1]
  KeySketch sketch_;
  std::vector<cpu::Aligned<std::byte>> factors_;
};

/// The slots of one row that are to be folded.
struct RowFold {
  SlotAddress keys, values;
  SlotAddress key_scales = {}, value_scales = {};          ///< as in Row
  Dtype key_dtype = Dtype::f32, value_dtype = Dtype::f32;  ///< f32, f16, bf16, i8, f8 or blocks
  std::int32_t keys_rotated = 0, values_rotated = 0;       ///< as in DenseKv
  std::span<const std::int32_t> slots;                     ///< span after span, ascending within each
  std::span<const std::int64_t> indptr;  ///< [spans + 1] span i is slots[indptr[i]] to slots[indptr[i + 1] - 1]
  std::span<const float> weights =
      {};  ///< [slots] how much a slot counts in its span's coarse entry, as span_weights() takes it; empty: all equal
  std::span<const std::int32_t> positions = {};  ///< [slots of the row] logical; empty: slot i is at position i
  SpanLabel label = {};                          ///< owner of the row; fold() fills in span and tokens
  std::int32_t spans_before = 0;                 ///< number of the first span, in labels
};

/// Only traces and reports read this: f64 [max_rank] of every span and side, in the order of the rows and their spans.
struct FoldTrace {
  std::vector<double> singular_values;  ///< [spans, 2, max_rank] of what was factorised, descending, padded with 0
  std::vector<double> gates;            ///< the same; empty unless options.rank is gates
};

/// Folds spans of many rows together: [rows], each with the spans of its RowFold. `gates`: required if options.rank is
/// gates. Throws InvalidArgument with all of options.problems(), for rows that are not finite (named by layer, head and
/// positions), empty spans, and gates that are missing or of another size; StateError if all factors together take more
/// than `far_bytes`. Cost per span, row and side: a Gram matrix of m^2 * max(L, D) / 2, m = min(L,
/// D), then 2 m^3 / 3, twice if centring is automatic, and r (m^2 + L D) for r components, in fp64. Spans of one length
/// run together, groups of them in parallel; a span's result does not depend on its neighbours' values or on threads.
[[nodiscard]] std::vector<SpanRow> fold(std::span<const RowFold> rows, std::int64_t dim, const FactorOptions& options,
                                        const RankGates* gates = nullptr, FoldTrace* trace = nullptr,
                                        std::int64_t far_bytes = kAnyBytes);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/factorise.h"  // and, after it, the bodies of this file
#endif
