#pragma once
/// Folded spans of one layer: one coarse entry each near the device, and low-rank factors of their keys and values far from it.
/// Source: SeKV (AmirAbaskohi/SeKV). Differs: what is factorised is centred on the coarse entry where that leaves less out, the rank follows an energy rule, factors larger than the rows are never
/// stored, and the decomposition is exact.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/memory/rank_gates.h"
#include "kvkeep/memory/segmenter.h"

namespace kvkeep {

struct FactorOptions {
  enum class Rank : std::uint8_t {
    energy,  ///< the fewest components that leave at most energy^2 of the squares out
    gates,   ///< those that RankGates names; they need not be the largest
    max,     ///< min(length, D, max_rank)
  };
  enum class Centred : std::uint8_t {
    automatic,  ///< where it leaves less out; never with gates, which were trained on rows as they are
    always,
    never,
  };
  Rank rank = Rank::energy;
  Centred centred = Centred::automatic;
  std::int32_t max_rank = 32;
  double energy = 0.1;
  double gate_keep = 0.5;    ///< gates above it keep their component, with weight 1
  bool soft_gates = false;   ///< instead: every gate is a weight, those below 0.01 drop their component (published)
  bool raw = true;           ///< rows that are smaller than their factors are stored as they are; false: never (published)
  ScalarType store = kFloat32;  ///< f32, bf16 or f16: of coarse entries, factors and raw rows

  /// What is not allowed, one sentence each with the field's name; empty: nothing.
  [[nodiscard]] std::vector<std::string> problems() const;
};

/// Keys or values of one span and KV head, as they are stored. Stands for base + A B, base being the coarse entry where centred, else 0.
struct SpanFactors {
  std::int32_t rank = 0;      ///< r, columns of A; meaningless where raw
  bool raw = false;           ///< [length, D] rows instead of factors
  bool centred = false;
  std::int64_t offset = 0;    ///< of A [length, r], then B [r, D], or of the rows, in the span's blob

  /// Numbers that are stored.
  [[nodiscard]] std::int64_t numbers(std::int64_t length, std::int64_t dim) const { return raw ? length * dim : rank * (length + dim); }
};

/// The folded spans of one layer. Written once, read by any number of threads.
class SpanStore {
 public:
  enum Side : std::uint8_t { kKeys, kValues };

  SpanStore() = default;

  /// keys, values: f32, f16 or bf16 [Hkv, T, D], keys as attention reads them (after RoPE); surprisal: [T]; spans inside T. `gates`: where options.rank is gates.
  /// Throws InvalidArgument with all of options.problems(), for other shapes, for rows that are not finite, and for gates that are missing or of another size.
  /// Cost, a span, head and side: a Gram matrix of min(L, D)^2 * max(L, D) and its eigenvectors in fp64 by LAPACK, L rows long; twice where centring is chosen. Spans of one length run together,
  /// groups of them in parallel; a span's result does not depend on its neighbours' values or on threads.
  SpanStore(const Tensor& keys, const Tensor& values, std::span<const float> surprisal, std::vector<Span> spans, const FactorOptions& options, const RankGates* gates = nullptr);

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(spans_.size()); }
  [[nodiscard]] std::span<const Span> spans() const { return spans_; }
  [[nodiscard]] std::int64_t kv_heads() const { return kv_heads_; }
  [[nodiscard]] std::int64_t dim() const { return dim_; }
  [[nodiscard]] ScalarType dtype() const { return store_; }

  /// Near: [Hkv, spans, D] means of the rows, weighted by surprisal; f32, rounded to dtype().
  [[nodiscard]] const Tensor& coarse(Side side) const { return coarse_[side]; }
  [[nodiscard]] std::span<const float> log_length() const { return log_length_; }

  [[nodiscard]] const SpanFactors& factors(std::int64_t span, std::int64_t head, Side side) const { return factors_[static_cast<std::size_t>((span * kv_heads_ + head) * 2 + side)]; }
  /// Far: all heads of one span in one piece, dtype() [numbers]. For each head keys, then values.
  [[nodiscard]] const Tensor& blob(std::int64_t span) const { return blobs_[static_cast<std::size_t>(span)]; }

  /// What zooming into a span takes, in entries of one KV head: (numbers of its keys + of its values) / 2D, L where both are raw.
  [[nodiscard]] double zoom_entries(std::int64_t span, std::int64_t head) const;

  /// What a zoom shows: f32 [Hkv, L, D]. For tests and traces; attention never forms it.
  [[nodiscard]] Tensor rows(std::int64_t span, Side side) const;

  /// f32 [spans, Hkv, 2, max_rank] of what was factorised, descending, padded with 0.
  [[nodiscard]] const Tensor& singular_values() const { return singular_values_; }
  /// The same of gates; undefined unless options.rank is gates.
  [[nodiscard]] const Tensor& gates() const { return gates_; }

  /// Bytes of tensors, tables not counted: near 2 * Hkv * D in dtype() and 4 for the logarithm a span; far its blob.
  [[nodiscard]] std::int64_t near_bytes() const;
  [[nodiscard]] std::int64_t far_bytes() const;

 private:
  struct Batch;
  void fold(const Batch& batch, const RankGates* gates);

  FactorOptions options_;
  std::vector<Span> spans_;
  std::int64_t kv_heads_ = 0, dim_ = 0;
  ScalarType store_ = kFloat32;
  std::array<Tensor, 2> coarse_;
  std::vector<float> log_length_;
  std::vector<SpanFactors> factors_;  ///< [spans, Hkv, 2]
  std::vector<Tensor> blobs_;
  Tensor singular_values_, gates_;
};

}  // namespace kvkeep
