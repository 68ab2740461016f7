// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How slots are cut into spans, how the rows of a span are cut down to few components, and what is stored of them.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/hd.h"

namespace kvkeep {

class Fields;

// Equal pieces of a run of things: the arithmetic that the CPU and kernels share.

/// Pieces of at most `most` that `n` things are cut into.
[[nodiscard]] KVKEEP_HD inline std::int64_t piece_count(std::int64_t n, std::int64_t most) {
  return (n + most - 1) / most;
}

/// Where piece i of `count` begins; for i = count, n. Lengths differ by at most 1.
[[nodiscard]] KVKEEP_HD inline std::int64_t piece_begin(std::int64_t n, std::int64_t i, std::int64_t count) {
  return i * n / count;
}

/// Spans of what is dropped of a row of segments: one for each, but those of fewer than `least` join the next. Calls
/// span(begin, end), which count what is dropped, for each in its order.
class SpanJoiner {
 public:
  KVKEEP_HD explicit SpanJoiner(std::int64_t least) : least_(least) {}

  /// A segment ends; so many are dropped before its end.
  template <class Body>
  KVKEEP_HD void end_at(std::int64_t dropped, const Body& span) {
    if (dropped - end_ < least_) return;
    if (open_) span(begin_, end_);
    begin_ = end_, end_ = dropped, open_ = true;
  }
  /// The row ends; the last few join the span before them.
  template <class Body>
  KVKEEP_HD void finish(std::int64_t dropped, const Body& span) {
    end_at(dropped, span);
    if (dropped > 0) span(begin_, dropped);
  }

 private:
  std::int64_t least_, begin_ = 0, end_ = 0;
  bool open_ = false;  ///< there is a span, which others may join
};

/// Most spans of `dropped` slots in `segments` segments, as SpanJoiner joins them from `least` on, if each is then cut
/// into pieces of at most `most`.
[[nodiscard]] inline std::int64_t most_spans(std::int64_t dropped, std::int64_t segments, std::int64_t least,
                                             std::int64_t most) {
  std::int64_t joined = dropped / least < segments ? dropped / least : segments;
  if (joined < 1) joined = dropped > 0 ? 1 : 0;
  return (dropped + joined * (most - 1)) / most;
}

struct FactorOptions {
  enum class Rank : std::uint8_t {
    energy,  ///< the fewest components that leave out at most energy^2 of the squares
    gates,   ///< those that RankGates selects; they need not be the largest
    max,     ///< min(length, D, max_rank)
  };
  enum class Centred : std::uint8_t {
    automatic,  ///< if it leaves less out; never with gates, which were trained on uncentred rows
    always,
    never,
  };
  Rank rank = Rank::energy;
  Centred centred = Centred::automatic;
  std::int32_t max_rank = 32;
  double energy = 0.1;
  double gate_keep = 0.5;   ///< gates above it keep their component, with weight 1
  bool soft_gates = false;  ///< instead: every gate is a weight, gates below 0.01 drop their component (published)
  bool raw = true;  ///< rows that are smaller than their factors are stored as they are; false: never (published)
  bool sketch =
      false;  ///< keep the signs of every key near, to estimate what a query would give a token without its factors
  Dtype store = Dtype::f32;  ///< f32, bf16 or f16, for coarse entries, factors and raw rows

  /// True if the rows of a matrix are stored instead of its factors.
  [[nodiscard]] KVKEEP_HD bool stores_rows(std::int64_t components, std::int64_t length, std::int64_t dim) const {
    return raw && components * (length + dim) >= length * dim;
  }
  /// True if a component with this gate stays.
  [[nodiscard]] KVKEEP_HD bool keeps(double gate) const {
    constexpr double kNegligible = 0.01;
    return soft_gates ? gate >= kNegligible : gate > gate_keep;
  }
  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
};

/// What a layer of RankGates makes of a sum: GELU (exact), the last one a sigmoid.
[[nodiscard]] KVKEEP_HD inline double gate_unit(double x, bool last) {
  constexpr double kRootHalf = 0.70710678118654752440;
  return last ? 1 / (1 + std::exp(-x)) : 0.5 * x * (1 + std::erf(x * kRootHalf));
}

/// Share of the squares of a span's rows below which a remainder is noise.
inline constexpr double kRoundingNoise = 1e-10;
/// Rows as they are, not centred, are factorised if they leave out less by more than this share of the squares.
inline constexpr double kCentringGain = 1e-6;

/// Sum of squares[first, count), the smallest first.
template <class Real>
[[nodiscard]] KVKEEP_HD double squares_from(const Real* squares, std::int32_t first, std::int32_t count) {
  double sum = 0;
  for (std::int32_t i = count; i-- > first;) sum += static_cast<double>(squares[i]);
  return sum;
}

/// True if `rank` components of rows as they are leave out less than those of centred rows. [count] squares of each.
template <class Real>
[[nodiscard]] KVKEEP_HD bool plain_is_better(const Real* plain, const Real* centred, std::int32_t rank,
                                             std::int32_t count) {
  return rank > 0 && rank < count &&
         squares_from(plain, rank, count) <
             squares_from(centred, rank, count) - product(kCentringGain, squares_from(centred, 0, count));
}

/// Components of descending `squares` [count] that Rank::energy and Rank::max select.
template <class Real>
[[nodiscard]] KVKEEP_HD std::int32_t rank_of(const Real* squares, std::int32_t count, const FactorOptions& o) {
  const std::int32_t most = o.max_rank < count ? o.max_rank : count;
  if (o.rank != FactorOptions::Rank::energy) return most;
  const double allowed = o.energy * o.energy * squares_from(squares, 0, count);  // added in the order of `left`
  std::int32_t rank = count;
  for (double left = 0; rank > 0 && left + static_cast<double>(squares[rank - 1]) <= allowed; --rank)
    left += static_cast<double>(squares[rank - 1]);
  return rank < most ? rank : most;
}

/// Keys or values of one span and KV head, as stored. They represent base + A B, where base is the coarse entry if
/// centred, else 0.
struct SpanFactors {
  std::int32_t rank = 0;  ///< r, columns of A; meaningless if raw
  bool raw = false;       ///< [length, D] rows instead of factors
  bool centred = false;
  std::int64_t offset = 0;  ///< of A [length, r], then B [r, D], or of the rows, in the span's blob

  /// Count of stored numbers.
  [[nodiscard]] KVKEEP_HD std::int64_t numbers(std::int64_t length, std::int64_t dim) const {
    return raw ? length * dim : rank * (length + dim);
  }
};

}  // namespace kvkeep
