#include "factorise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace kvkeep::cpu {
namespace {

constexpr ScalarType kFloat64 = c10::ScalarType::Double;
constexpr double kRoundingNoise = 1e-10;      ///< share of the squares of a span's rows below which what is left of them is noise
constexpr double kCentringGain = 1e-6;        ///< share of the squares that rows as they are must leave out less, to be preferred
constexpr double kNegligibleGate = 0.01;

/// Squares of the components of [n, L, D], largest first, and what their factors are made of.
struct Components {
  bool by_rows = false;  ///< `axes` are directions of rows [n, D, D], else of columns [n, L, L]
  Tensor axes;           ///< f64, a component a column
  Tensor projected;      ///< f64: [n, m, D] a component a row, or with by_rows [n, L, m] a component a column
  Tensor squares;        ///< f64 [n, m]
};

/// From the Gram matrix of the shorter side. Squares are taken from the projections, not from eigenvalues, so that small ones are as exact as large ones.
Components decompose(const Tensor& matrices) {
  Components c;
  const std::int64_t length = matrices.size(1), dim = matrices.size(2);
  c.by_rows = length > dim;
  const Tensor turned = matrices.transpose(1, 2);
  const Tensor gram = c.by_rows ? at::bmm(turned, matrices) : at::bmm(matrices, turned);
  c.axes = std::get<1>(at::linalg_eigh(gram, "L")).flip({2}).contiguous();
  c.projected = (c.by_rows ? at::bmm(matrices, c.axes) : at::bmm(c.axes.transpose(1, 2), matrices)).contiguous();
  c.squares = c.projected.square().sum(c.by_rows ? 1 : 2).contiguous();
  return c;
}

double sum_from(std::span<const double> squares, std::int64_t first) { return std::accumulate(squares.begin() + first, squares.end(), 0.0); }

std::int64_t rank_of(std::span<const double> squares, const FactorOptions& o) {
  const auto most = std::min<std::int64_t>(o.max_rank, static_cast<std::int64_t>(squares.size()));
  if (o.rank != FactorOptions::Rank::energy) return most;
  const double allowed = o.energy * o.energy * std::accumulate(squares.rbegin(), squares.rend(), 0.0);  // in the order of what is left out below
  auto rank = static_cast<std::int64_t>(squares.size());
  for (double left = 0; rank > 0 && left + squares[static_cast<std::size_t>(rank - 1)] <= allowed; --rank) left += squares[static_cast<std::size_t>(rank - 1)];
  return std::min(rank, most);
}

/// A = U sqrt(w s), B = sqrt(w s) V^T: the scale of a component goes to both sides alike.
template <class Kept>
void write_factors(const Components& c, std::int64_t matrix, const std::vector<Kept>& kept, std::int64_t length, std::int64_t dim, float* out) {
  const std::int64_t m = c.squares.size(1), rank = static_cast<std::int64_t>(kept.size());
  const double* axes = c.axes.const_data_ptr<double>() + matrix * c.axes.stride(0);
  const double* projected = c.projected.const_data_ptr<double>() + matrix * c.projected.stride(0);
  float *left = out, *right = out + length * rank;
  for (std::int64_t j = 0; j < rank; ++j) {
    const auto [i, weight] = kept[static_cast<std::size_t>(j)];
    const double s = std::sqrt(c.squares.const_data_ptr<double>()[matrix * m + i]);
    const double of_axis = std::sqrt(weight * s), of_projection = s > 0 ? std::sqrt(weight / s) : 0.0;
    for (std::int64_t t = 0; t < length; ++t) left[t * rank + j] = static_cast<float>(c.by_rows ? of_projection * projected[t * m + i] : of_axis * axes[t * m + i]);
    for (std::int64_t d = 0; d < dim; ++d) right[j * dim + d] = static_cast<float>(c.by_rows ? of_axis * axes[d * m + i] : of_projection * projected[i * dim + d]);
  }
}

}  // namespace

/// How each matrix of a batch is factorised: centred or not, and how many components its own spectrum asks for.
class Factorisation::Choice {
 public:
  Choice(const Tensor& rows, const Tensor& means, std::span<const double> squares, const FactorOptions& options) : options_(options), width_(std::min(rows.size(1), rows.size(2))) {
    const bool always = options.centred == FactorOptions::Centred::always;
    may_centre_ = always || (options.centred == FactorOptions::Centred::automatic && options.rank != FactorOptions::Rank::gates);
    first_ = decompose(may_centre_ ? rows - means.unsqueeze(1) : rows);
    for (std::int64_t n = 0; n < rows.size(0); ++n) {
      const bool noise = sum_from(squares_of(first_, n), 0) <= kRoundingNoise * squares[static_cast<std::size_t>(n)];
      ranks_.push_back(noise ? 0 : rank_of(squares_of(first_, n), options));
    }
    as_they_are_.assign(ranks_.size(), -1);
    if (may_centre_ && !always) prefer_rows_as_they_are(rows);
  }

  [[nodiscard]] bool centred(std::int64_t n) const { return may_centre_ && as_they_are_[static_cast<std::size_t>(n)] < 0; }
  [[nodiscard]] std::int64_t rank(std::int64_t n) const { return ranks_[static_cast<std::size_t>(n)]; }
  /// What the factors of matrix n are made of, and its place there.
  [[nodiscard]] std::pair<const Components*, std::int64_t> components(std::int64_t n) const {
    const std::int64_t other = as_they_are_[static_cast<std::size_t>(n)];
    return other < 0 ? std::pair(&first_, n) : std::pair(&second_, other);
  }
  /// Components that count: min(L, D, max_rank).
  [[nodiscard]] std::int64_t shown() const { return std::min<std::int64_t>(width_, options_.max_rank); }

  /// [count, max_rank] singular values, padded with 0.
  [[nodiscard]] std::vector<double> spectra() const {
    std::vector<double> out(ranks_.size() * static_cast<std::size_t>(options_.max_rank));
    for (std::size_t n = 0; n < ranks_.size(); ++n) {
      const auto [components, matrix] = this->components(static_cast<std::int64_t>(n));
      std::ranges::transform(squares_of(*components, matrix).first(static_cast<std::size_t>(shown())), out.begin() + static_cast<std::ptrdiff_t>(n) * options_.max_rank, [](double x) { return std::sqrt(x); });
    }
    return out;
  }

 private:
  [[nodiscard]] std::span<const double> squares_of(const Components& c, std::int64_t matrix) const { return {c.squares.const_data_ptr<double>() + matrix * width_, static_cast<std::size_t>(width_)}; }

  /// Where centring leaves more out than rows as they are do, those are taken instead.
  void prefer_rows_as_they_are(const Tensor& rows) {
    std::vector<std::int64_t> doubtful;
    for (std::int64_t n = 0; n < rows.size(0); ++n)
      if (rank(n) > 0 && rank(n) < width_) doubtful.push_back(n);
    if (doubtful.empty()) return;
    second_ = decompose(at::index_select(rows, 0, at::from_blob(doubtful.data(), {static_cast<std::int64_t>(doubtful.size())}, at::TensorOptions().dtype(c10::ScalarType::Long))));
    for (std::size_t i = 0; i < doubtful.size(); ++i) {
      const std::int64_t n = doubtful[i];
      const auto centred = squares_of(first_, n), plain = squares_of(second_, static_cast<std::int64_t>(i));
      if (!(sum_from(plain, rank(n)) < sum_from(centred, rank(n)) - kCentringGain * sum_from(centred, 0))) continue;
      as_they_are_[static_cast<std::size_t>(n)] = static_cast<std::int64_t>(i);
      ranks_[static_cast<std::size_t>(n)] = rank_of(plain, options_);
    }
  }

  FactorOptions options_;
  std::int64_t width_;
  bool may_centre_ = false;
  Components first_, second_;
  std::vector<std::int64_t> ranks_;
  std::vector<std::int64_t> as_they_are_;  ///< place in second_; -1: in first_
};


Factorisation::Factorisation(std::int64_t count, std::int64_t length, std::int64_t dim, const FactorOptions& options)
    : options_(options),
      count_(count),
      length_(length),
      dim_(dim),
      rows_(at::empty({count, length, dim}, at::TensorOptions().dtype(kFloat64))),
      means_(at::zeros({count, dim}, at::TensorOptions().dtype(kFloat64))),
      squares_(static_cast<std::size_t>(count)) {}

Factorisation::~Factorisation() = default;

double* Factorisation::rows(std::int64_t n) { return rows_.data_ptr<double>() + n * length_ * dim_; }

bool Factorisation::weigh(std::int64_t n, std::span<const double> weights) {
  double *row = rows(n), *mean = means_.data_ptr<double>() + n * dim_, &square = squares_[static_cast<std::size_t>(n)];
  for (std::int64_t t = 0; t < length_; ++t)
    for (std::int64_t d = 0; d < dim_; ++d) mean[d] += weights[static_cast<std::size_t>(t)] * row[t * dim_ + d];
  square = std::inner_product(row, row + length_ * dim_, row, 0.0);
  return std::isfinite(square);
}

void Factorisation::run(const RankGates* gates, std::span<const std::int64_t> key_of) {
  choice_ = std::make_unique<Choice>(rows_, means_, squares_, options_);
  spectra_ = choice_->spectra();
  if (options_.rank == FactorOptions::Rank::gates) {
    const auto index = [](std::span<const std::int64_t> of) { return at::from_blob(const_cast<std::int64_t*>(of.data()), {static_cast<std::int64_t>(of.size())}, at::TensorOptions().dtype(c10::ScalarType::Long)); };
    const Tensor spectra = at::from_blob(spectra_.data(), {count_, options_.max_rank}, at::TensorOptions().dtype(kFloat64));
    const Tensor own = gates->gates(spectra, at::index_select(means_, 0, index(key_of))).contiguous();
    gates_.assign(spectra_.size(), 0.0);
    for (std::int64_t n = 0; n < count_; ++n) std::copy_n(own.const_data_ptr<double>() + n * options_.max_rank, choice_->shown(), gates_.begin() + n * options_.max_rank);
  }
  for (std::int64_t n = 0; n < count_; ++n) kept_.push_back(kept_components(n));
}

std::vector<Factorisation::Kept> Factorisation::kept_components(std::int64_t n) const {
  const std::int64_t rank = choice_->rank(n);
  const std::span<const double> gate = gates(n);
  std::vector<Kept> kept;
  if (rank == 0) return kept;
  for (std::int64_t i = 0; i < (gate.empty() ? rank : choice_->shown()); ++i) {
    const double weight = gate.empty() ? 1.0 : gate[static_cast<std::size_t>(i)];
    if (gate.empty() || (options_.soft_gates ? weight >= kNegligibleGate : weight > options_.gate_keep)) kept.push_back({i, options_.soft_gates ? weight : 1.0});
  }
  return kept;
}

const double* Factorisation::mean(std::int64_t n) const { return means_.const_data_ptr<double>() + n * dim_; }

SpanFactors Factorisation::factors(std::int64_t n) const {
  SpanFactors f;
  f.rank = static_cast<std::int32_t>(kept_[static_cast<std::size_t>(n)].size());
  f.raw = options_.raw && f.rank * (length_ + dim_) >= length_ * dim_;
  f.centred = choice_->centred(n);
  return f;
}

std::span<const double> Factorisation::singular_values(std::int64_t n) const { return std::span(spectra_).subspan(static_cast<std::size_t>(n * options_.max_rank), static_cast<std::size_t>(options_.max_rank)); }

std::span<const double> Factorisation::gates(std::int64_t n) const {
  return gates_.empty() ? std::span<const double>() : std::span(gates_).subspan(static_cast<std::size_t>(n * options_.max_rank), static_cast<std::size_t>(options_.max_rank));
}

void Factorisation::write(std::int64_t n, float* out) const {
  const auto [components, matrix] = choice_->components(n);
  if (factors(n).raw) std::copy_n(rows_.const_data_ptr<double>() + n * length_ * dim_, length_ * dim_, out);
  else write_factors(*components, matrix, kept_[static_cast<std::size_t>(n)], length_, dim_, out);
}

}  // namespace kvkeep::cpu
