// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of factorise.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/memory/factorise.h"
#include "kvkeep/simd/aligned.h"
#include "kvkeep/simd/factorise_lanes.h"

namespace kvkeep {
namespace rank_gates_detail {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline Eigen::Map<const Matrix> matrix(const Tensor& t) {
  return {t.data<double>(), t.size(0), t.dim() == 2 ? t.size(1) : 1};
}

}  // namespace rank_gates_detail

KVKEEP_INLINE RankGates::RankGates(const std::array<Tensor, 3>& weights, const std::array<Tensor, 3>& biases) {
  for (std::size_t i = 0; i < 3; ++i) {
    const auto usable = [&](const Tensor& t, const char* what, std::int64_t dims) {
      KVKEEP_REQUIRE(t.defined() && t.device().is_cpu() && (is_scorable(t.dtype()) || t.dtype() == Dtype::f64) &&
                         t.dim() == dims && t.numel() > 0,
                     "rank gates: ", what, " of layer ", 2 * i, " is missing, empty, of the wrong dtype or not of ",
                     dims, " dimensions; allowed f32, f16, bf16 or f64 on the CPU");
      KVKEEP_REQUIRE(all_finite(t), "rank gates: ", what, " of layer ", 2 * i,
                     " holds NaN or infinity; allowed finite numbers");
    };
    usable(weights[i], "weight", 2);
    usable(biases[i], "bias", 1);
    KVKEEP_REQUIRE(biases[i].size(0) == weights[i].size(0), "rank gates: layer ", 2 * i, " has ", weights[i].size(0),
                   " outputs and ", biases[i].size(0), " biases; allowed as many biases as outputs");
    KVKEEP_REQUIRE(i == 0 || weights[i].size(1) == weights[i - 1].size(0), "rank gates: layer ", 2 * i, " reads ",
                   weights[i].size(1), " numbers; allowed the outputs of the previous layer");
    weights_[i] = as<double>(weights[i]);
    biases_[i] = as<double>(biases[i]);
  }
  KVKEEP_REQUIRE(weights_[0].size(1) > max_rank(), "rank gates: layer 0 reads ", weights_[0].size(1),
                 " numbers; allowed the ", max_rank(), " singular values and a key");
}

KVKEEP_INLINE Tensor RankGates::gates(const Tensor& singular_values, const Tensor& coarse_keys) const {
  KVKEEP_REQUIRE(singular_values.dim() == 2 && coarse_keys.dim() == 2 &&
                     singular_values.size(0) == coarse_keys.size(0) && singular_values.size(1) == max_rank() &&
                     coarse_keys.size(1) == key_dim(),
                 "rank gates: trained for ", max_rank(), " singular values and keys of ", key_dim(),
                 " numbers; allowed only inputs of these sizes");
  constexpr double kTiny = 1e-8;
  const Tensor spectra = as<double>(singular_values), keys = as<double>(coarse_keys);
  rank_gates_detail::Matrix x(spectra.size(0), max_rank() + key_dim());
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    x.row(row).head(max_rank()) =
        rank_gates_detail::matrix(spectra).row(row) / (rank_gates_detail::matrix(spectra)(row, 0) + kTiny);
    x.row(row).tail(key_dim()) =
        rank_gates_detail::matrix(keys).row(row) / std::max(rank_gates_detail::matrix(keys).row(row).norm(), kTiny);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    x = ((x * rank_gates_detail::matrix(weights_[i]).transpose()).rowwise() +
         rank_gates_detail::matrix(biases_[i]).col(0).transpose())
            .eval();
    x = x.unaryExpr([i](double v) { return gate_unit(v, i == 2); });
  }
  const Tensor out = empty({x.rows(), x.cols()}, Dtype::f64);
  Eigen::Map<rank_gates_detail::Matrix>(out.data<double>(), x.rows(), x.cols()) = x;
  return out;
}

}  // namespace kvkeep

namespace kvkeep::cpu {
namespace factorise_detail {

inline constexpr std::int64_t kChunkRows = 128;  ///< rows of a long span that are copied at a time
inline constexpr std::int64_t kColumns = 16;     ///< columns of a Gram matrix that are formed at a time

enum Form : std::int64_t { kFirst, kPlain };  ///< the rows as options ask for them, and as given

inline std::int64_t padded(std::int64_t n) { return (n + matrix_lanes() - 1) / matrix_lanes() * matrix_lanes(); }
inline std::int64_t triangle_size(std::int64_t n) { return n * (n + 1) / 2; }

/// The power of two that scales a trace to order 1, so that later steps need not consider magnitudes.
inline double scale_of(double trace) {
  if (!(trace > 0) || !std::isfinite(trace)) return 1;
  int exponent = 0;
  static_cast<void>(std::frexp(trace, &exponent));
  return std::ldexp(1.0, exponent);
}

}  // namespace factorise_detail

/// How a matrix is factorised: from which form of its rows, and from which components, with their weights.
struct Factorisation::Choice {
  factorise_detail::Form form = factorise_detail::kFirst;
  std::int64_t rank = 0;
  std::vector<std::pair<std::int64_t, double>> kept;
};

/// Scratch of one thread for a group of matrices, one per lane. Sizes with `lanes` as in factorise_lanes.h.
struct Factorisation::Scratch {
  Scratch(std::int64_t length, std::int64_t dim, std::int64_t most, std::int64_t form_count)
      : lanes(matrix_lanes()),
        m(std::min(length, dim)),
        stride(factorise_detail::padded(dim)),
        chunk(length > dim ? std::min(length, factorise_detail::kChunkRows) : length + 1),
        forms(static_cast<std::size_t>(form_count)) {
    const std::int64_t rank = factorise_detail::padded(most);
    const std::int64_t sizes[] = {chunk * stride,
                                  std::max(factorise_detail::triangle_size(m + 1), m * stride),
                                  2 * m,
                                  4 * m * lanes,
                                  m * rank,
                                  rank * std::max(stride, length),
                                  most * m * lanes,
                                  most * lanes,
                                  lanes};
    const std::int64_t of_form = (factorise_detail::triangle_size(m) + 5 * m) * lanes + lanes * m + lanes;
    arena.resize(static_cast<std::size_t>(std::accumulate(std::begin(sizes), std::end(sizes), form_count * of_form) +
                                          8 * static_cast<std::int64_t>(std::size(sizes) + 10 * forms.size())));
    double* at = arena.data();
    const auto take = [&at](std::int64_t numbers) { return std::exchange(at, at + (numbers + 7) / 8 * 8); };
    rows = take(sizes[0]), gram = take(sizes[1]), shift = take(sizes[2]), work = take(sizes[3]), axes = take(sizes[4]),
    projected = take(sizes[5]);
    vectors = take(sizes[6]), asked = take(sizes[7]), mask = take(sizes[8]);
    for (OfForm& f : forms) {
      f.lanes = {take(factorise_detail::triangle_size(m) * lanes), take(m * lanes), take(m * lanes), take(m * lanes)};
      f.values = take(m * lanes), f.work = take(m * lanes), f.squares = take(lanes * m), f.scale = take(lanes);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// The matrices in one form of their rows.
  struct OfForm {
    LaneMatrices lanes;
    double *values, *work;  ///< [m, lanes]
    double* squares;        ///< [lanes, m] eigenvalues, largest first, of a trace of order 1
    double* scale;          ///< [lanes] their factor back to the original scale
    [[nodiscard]] std::vector<double> squares_of(std::int64_t lane, std::int64_t count) const {
      std::vector<double> out(squares + lane * count, squares + (lane + 1) * count);
      for (double& x : out) x *= scale[lane];
      return out;
    }
  };

  std::int64_t lanes, m, stride, chunk;
  Aligned<double> arena;
  double* rows;       ///< [chunk, stride] rows of one matrix, padded with 0
  double* gram;       ///< lower triangle by rows, or [m, stride]
  double* shift;      ///< [2, m] x and y: a Gram matrix of the given rows is that of the centred ones + x y^T + y x^T
  double* work;       ///< [4 m, lanes]
  double* axes;       ///< [m, padded rank] of one matrix
  double* projected;  ///< [rank, stride] or [L, padded rank]
  double* vectors;    ///< [rank, m, lanes]
  double* asked;      ///< [rank, lanes] eigenvalues whose vectors are wanted
  double* mask;       ///< [lanes]
  std::vector<OfForm> forms;
};

KVKEEP_INLINE Factorisation::Factorisation(std::int64_t count, std::int64_t length, std::int64_t dim,
                                           const FactorOptions& options)
    : options_(options),
      count_(count),
      length_(length),
      dim_(dim),
      rows_(std::make_unique_for_overwrite<double[]>(static_cast<std::size_t>(count * length * dim))),
      means_(static_cast<std::size_t>(count * dim)),
      squares_(static_cast<std::size_t>(count)),
      factors_(static_cast<std::size_t>(count)),
      written_(static_cast<std::size_t>(count)),
      spectra_(static_cast<std::size_t>(count * options.max_rank)),
      gates_(options.rank == FactorOptions::Rank::gates ? spectra_.size() : 0) {}

KVKEEP_INLINE bool Factorisation::weigh(std::int64_t n, std::span<const double> weights) {
  weighted_mean(rows(n), length_, dim_, weights.data(), means_.data() + n * dim_);
  double& square = squares_[static_cast<std::size_t>(n)];
  square = sum_of_squares(rows(n), length_ * dim_);
  return std::isfinite(square);
}

KVKEEP_INLINE bool Factorisation::may_centre() const {
  return options_.centred == FactorOptions::Centred::always ||
         (options_.centred == FactorOptions::Centred::automatic && options_.rank != FactorOptions::Rank::gates);
}

KVKEEP_INLINE void Factorisation::run(const RankGates* gates, std::span<const std::int64_t> key_of) {
  const std::int64_t lanes = matrix_lanes(),
                     forms = may_centre() && options_.centred == FactorOptions::Centred::automatic ? 2 : 1;
  parallel_for(0, (count_ + lanes - 1) / lanes, 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch s(length_, dim_, shown(), forms);
    for (std::int64_t g = begin; g < end; ++g)
      run_group(g * lanes, std::min(lanes, count_ - g * lanes), gates, key_of, s);
  });
}

KVKEEP_INLINE void Factorisation::run_group(std::int64_t first, std::int64_t count, const RankGates* gates,
                                            std::span<const std::int64_t> key_of, Scratch& s) {
  for (Scratch::OfForm& f : s.forms)
    if (count < s.lanes) std::fill_n(f.lanes.triangle, factorise_detail::triangle_size(s.m) * s.lanes, 0.0);
  for (std::int64_t lane = 0; lane < count; ++lane) take_gram(first + lane, lane, s);
  std::vector<LaneMatrices> sets;
  std::vector<double*> values, work;
  for (const Scratch::OfForm& f : s.forms) {
    tridiagonalise(s.m, f.lanes, s.work);
    sets.push_back(f.lanes);
    values.push_back(f.values);
    work.push_back(f.work);
  }
  tridiagonal_eigenvalues(s.m, sets, values.data(), work.data());
  std::vector<Choice> choices;
  for (std::int64_t lane = 0; lane < count; ++lane) {
    take_values(lane, s);
    choices.push_back(choose(first + lane, lane, s));
    const std::vector<double> squares = s.forms[static_cast<std::size_t>(choices.back().form)].squares_of(lane, s.m);
    std::transform(squares.begin(), squares.begin() + shown(), spectra_.begin() + (first + lane) * options_.max_rank,
                   [](double x) { return std::sqrt(x); });
  }
  if (options_.rank == FactorOptions::Rank::gates) ask_gates(*gates, first, count, key_of);
  std::int64_t most = 0;
  for (std::int64_t lane = 0; lane < count; ++lane) {
    Choice& c = choices[static_cast<std::size_t>(lane)];
    c.kept = kept_components(first + lane, c.rank);
    SpanFactors& f = factors_[static_cast<std::size_t>(first + lane)];
    f.rank = static_cast<std::int32_t>(c.kept.size());
    f.raw = options_.stores_rows(f.rank, length_, dim_);
    f.centred = may_centre() && c.form == factorise_detail::kFirst;
    if (!f.raw) most = std::max<std::int64_t>(most, f.rank);
  }
  if (most == 0) return;
  std::fill_n(s.asked, most * s.lanes, 0.0);
  std::fill_n(s.mask, s.lanes, 0.0);
  for (std::int64_t lane = 0; lane < count; ++lane) {
    const Choice& c = choices[static_cast<std::size_t>(lane)];
    s.mask[lane] = static_cast<double>(c.form == factorise_detail::kPlain);
    const double* squares = s.forms[static_cast<std::size_t>(c.form)].squares + lane * s.m;
    for (std::int64_t j = 0; j < std::min<std::int64_t>(most, factors(first + lane).rank); ++j)
      s.asked[j * s.lanes + lane] = squares[c.kept[static_cast<std::size_t>(j)].first];
  }
  const LaneMatrices& chosen = s.forms[factorise_detail::kFirst].lanes;
  if (s.forms.size() > 1) {
    const LaneMatrices& plain = s.forms[factorise_detail::kPlain].lanes;
    blend_lanes(s.mask, plain.triangle, factorise_detail::triangle_size(s.m), chosen.triangle);
    for (const auto part : {&LaneMatrices::diagonal, &LaneMatrices::beside, &LaneMatrices::inverse})
      blend_lanes(s.mask, plain.*part, s.m, chosen.*part);
  }
  eigenvectors(s.m, chosen, s.asked, most, s.vectors, s.work);
  for (std::int64_t lane = 0; lane < count; ++lane)
    if (const SpanFactors& f = factors(first + lane); !f.raw && f.rank > 0)
      form_factors(first + lane, lane, choices[static_cast<std::size_t>(lane)], s);
}

/// Copies rows `begin` to `end` into s.rows.
KVKEEP_INLINE void Factorisation::take_rows(std::int64_t n, bool centred, std::int64_t begin, std::int64_t end,
                                            Scratch& s) const {
  const double* from = rows_.get() + (n * length_ + begin) * dim_;
  if (centred)
    centred_rows(from, end - begin, dim_, mean(n), s.rows, s.stride);
  else
    for (std::int64_t t = 0; t < end - begin; ++t) std::copy_n(from + t * dim_, dim_, s.rows + t * s.stride);
}

/// Puts the Gram matrix of matrix n, in each form, into its lane. The given rows are the centred ones + their mean:
/// their Gram matrix follows without cancellation.
KVKEEP_INLINE void Factorisation::take_gram(std::int64_t n, std::int64_t lane, Scratch& s) const {
  double *x = s.shift, *y = s.shift + s.m;
  if (by_rows()) {
    std::fill_n(s.gram, s.m * s.stride, 0.0);
    std::fill_n(x, s.m, 0.0);
    for (std::int64_t begin = 0; begin < length_; begin += s.chunk) {
      const std::int64_t end = std::min(length_, begin + s.chunk);
      take_rows(n, may_centre(), begin, end, s);
      for (std::int64_t i = 0; i < s.m; i += factorise_detail::kColumns)
        outer_product({s.rows + i, s.stride, 1}, s.rows, s.stride, end - begin,
                      std::min(factorise_detail::kColumns, s.m - i),
                      std::min(factorise_detail::padded(i + factorise_detail::kColumns), s.stride),
                      s.gram + i * s.stride, s.stride, true);
      for (std::int64_t t = 0; t < end - begin; ++t)
        for (std::int64_t d = 0; d < dim_; ++d) x[d] += s.rows[t * s.stride + d];
    }
    for (std::int64_t i = 1; i < s.m; ++i)
      std::copy_n(s.gram + i * s.stride, i + 1, s.gram + factorise_detail::triangle_size(i));
    for (std::int64_t d = 0; d < dim_; ++d)
      x[d] += product(0.5 * static_cast<double>(length_), mean(n)[d]), y[d] = mean(n)[d];
  } else {
    take_rows(n, may_centre(), 0, length_, s);
    std::copy_n(mean(n), dim_, s.rows + length_ * s.stride);
    row_gram(s.rows, length_ + static_cast<std::int64_t>(s.forms.size() > 1), s.stride, s.gram);
    const double* of_mean =
        s.gram + factorise_detail::triangle_size(length_);  // its products with the rows, then with itself
    for (std::int64_t t = 0; t < length_; ++t) x[t] = of_mean[t] + product(0.5, of_mean[length_]), y[t] = 1;
  }
  for (std::size_t form = 0; form < s.forms.size(); ++form) {
    if (form == factorise_detail::kPlain)
      for (std::int64_t i = 0; i < s.m; ++i)
        for (std::int64_t j = 0; j <= i; ++j)
          s.gram[factorise_detail::triangle_size(i) + j] += product(x[i], y[j]) + product(y[i], x[j]);
    double trace = 0;
    for (std::int64_t i = 0; i < s.m; ++i) trace += s.gram[factorise_detail::triangle_size(i) + i];
    const double scale = s.forms[form].scale[lane] = factorise_detail::scale_of(trace), inverse = 1 / scale;
    for (std::int64_t i = 0; i < factorise_detail::triangle_size(s.m); ++i)
      s.forms[form].lanes.triangle[i * s.lanes + lane] = s.gram[i] * inverse;
  }
}

/// Sorts the eigenvalues of a lane.
KVKEEP_INLINE void Factorisation::take_values(std::int64_t lane, Scratch& s) const {
  for (const Scratch::OfForm& f : s.forms) {
    double* to = f.squares + lane * s.m;
    for (std::int64_t i = 0; i < s.m; ++i)
      to[i] = std::max(0.0, f.values[i * s.lanes + lane]);  // rounding may make them negative
    std::sort(to, to + s.m, std::greater<>());
  }
}

/// Form and rank of matrix n.
KVKEEP_INLINE Factorisation::Choice Factorisation::choose(std::int64_t n, std::int64_t lane, const Scratch& s) const {
  Choice c;
  const std::vector<double> first = s.forms[factorise_detail::kFirst].squares_of(lane, s.m);
  const auto count = static_cast<std::int32_t>(s.m);
  const bool noise = squares_from(first.data(), 0, count) <= kRoundingNoise * squares_[static_cast<std::size_t>(n)];
  const std::int32_t rank = noise ? 0 : rank_of(first.data(), count, options_);
  c.rank = rank;
  if (s.forms.size() < 2) return c;
  const std::vector<double> plain = s.forms[factorise_detail::kPlain].squares_of(lane, s.m);
  if (!plain_is_better(plain.data(), first.data(), rank, count)) return c;
  return {factorise_detail::kPlain, rank_of(plain.data(), count, options_), {}};
}

KVKEEP_INLINE void Factorisation::ask_gates(const RankGates& gates, std::int64_t first, std::int64_t count,
                                            std::span<const std::int64_t> key_of) {
  const auto tensor = [&](std::int64_t columns) { return empty({count, columns}, Dtype::f64); };
  const Tensor spectra = tensor(options_.max_rank), keys = tensor(dim_);
  for (std::int64_t i = 0; i < count; ++i) {
    std::ranges::copy(singular_values(first + i), spectra.data<double>() + i * options_.max_rank);
    std::copy_n(mean(key_of[static_cast<std::size_t>(first + i)]), dim_, keys.data<double>() + i * dim_);
  }
  const Tensor own = gates.gates(spectra, keys);
  for (std::int64_t i = 0; i < count; ++i)
    std::copy_n(own.data<double>() + i * options_.max_rank, shown(), gates_.data() + (first + i) * options_.max_rank);
}

/// The first `rank` components; with gates, those that the gates select.
KVKEEP_INLINE std::vector<std::pair<std::int64_t, double>> Factorisation::kept_components(std::int64_t n,
                                                                                          std::int64_t rank) const {
  const std::span<const double> gate = gates(n);
  std::vector<std::pair<std::int64_t, double>> kept;
  if (rank == 0) return kept;
  for (std::int64_t i = 0; i < (gate.empty() ? rank : shown()); ++i) {
    const double weight = gate.empty() ? 1.0 : gate[static_cast<std::size_t>(i)];
    if (gate.empty() || options_.keeps(weight)) kept.emplace_back(i, options_.soft_gates ? weight : 1.0);
  }
  return kept;
}

/// A = U sqrt(w s), B = sqrt(w s) V^T: the scale of a component is split evenly between both sides. It is taken from
/// the projection, so that small components are as exact as large ones.
KVKEEP_INLINE void Factorisation::form_factors(std::int64_t n, std::int64_t lane, const Choice& choice, Scratch& s) {
  const SpanFactors& f = factors(n);
  const std::int64_t rank = f.rank, wide = factorise_detail::padded(rank);
  std::fill_n(s.axes, s.m * wide, 0.0);
  for (std::int64_t j = 0; j < rank; ++j)
    for (std::int64_t i = 0; i < s.m; ++i) s.axes[i * wide + j] = s.vectors[(j * s.m + i) * s.lanes + lane];
  std::vector<double> squares(static_cast<std::size_t>(rank));
  if (by_rows()) {
    for (std::int64_t begin = 0; begin < length_; begin += s.chunk) {
      const std::int64_t end = std::min(length_, begin + s.chunk);
      take_rows(n, f.centred, begin, end, s);
      outer_product({s.rows, 1, s.stride}, s.axes, wide, dim_, end - begin, wide, s.projected + begin * wide, wide,
                    false);
    }
    for (std::int64_t t = 0; t < length_; ++t)
      for (std::int64_t j = 0; j < rank; ++j)
        squares[static_cast<std::size_t>(j)] += product(s.projected[t * wide + j], s.projected[t * wide + j]);
  } else {
    take_rows(n, f.centred, 0, length_, s);
    outer_product({s.axes, wide, 1}, s.rows, s.stride, length_, rank, s.stride, s.projected, s.stride, false);
    for (std::int64_t j = 0; j < rank; ++j)
      squares[static_cast<std::size_t>(j)] = sum_of_squares(s.projected + j * s.stride, s.stride);
  }
  std::vector<float>& out = written_[static_cast<std::size_t>(n)];
  out.resize(static_cast<std::size_t>(rank * (length_ + dim_)));
  float *left = out.data(), *right = out.data() + length_ * rank;
  for (std::int64_t j = 0; j < rank; ++j) {
    const double size = std::sqrt(squares[static_cast<std::size_t>(j)]),
                 weight = choice.kept[static_cast<std::size_t>(j)].second;
    const double of_axis = std::sqrt(weight * size), of_projection = size > 0 ? std::sqrt(weight / size) : 0.0;
    if (by_rows()) {
      for (std::int64_t t = 0; t < length_; ++t)
        left[t * rank + j] = static_cast<float>(of_projection * s.projected[t * wide + j]);
      for (std::int64_t d = 0; d < dim_; ++d) right[j * dim_ + d] = static_cast<float>(of_axis * s.axes[d * wide + j]);
    } else {
      for (std::int64_t t = 0; t < length_; ++t)
        left[t * rank + j] = static_cast<float>(of_axis * s.axes[t * wide + j]);
      for (std::int64_t d = 0; d < dim_; ++d)
        right[j * dim_ + d] = static_cast<float>(of_projection * s.projected[j * s.stride + d]);
    }
  }
}

KVKEEP_INLINE void Factorisation::write(std::int64_t n, float* out) const {
  if (factors(n).raw)
    std::copy_n(rows_.get() + n * length_ * dim_, length_ * dim_, out);
  else
    std::ranges::copy(written_[static_cast<std::size_t>(n)], out);
}

}  // namespace kvkeep::cpu
