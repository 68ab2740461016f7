#include "kvkeep/memory/span_store.h"

#include <ATen/Parallel.h>
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

#include "kvkeep/core/error.h"
#include "memory_lanes.h"

namespace kvkeep {
namespace {

constexpr ScalarType kFloat64 = c10::ScalarType::Double;
constexpr double kRoundingNoise = 1e-10;      ///< share of the squares of a span's rows below which what is left of them is noise
constexpr double kCentringGain = 1e-6;        ///< share of the squares that rows as they are must leave out less, to be preferred
constexpr double kNegligibleGate = 0.01;
constexpr std::int64_t kBatchNumbers = 1 << 19;  ///< fp64 numbers of the matrices that are decomposed together: they stay in a cache

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

/// A component that is kept, and how much of it.
struct Kept {
  std::int64_t component;
  double weight;
};

/// The first `rank` components; with gates those of `count` that they name.
std::vector<Kept> kept_components(std::int64_t rank, const double* gates, std::int64_t count, const FactorOptions& o) {
  std::vector<Kept> kept;
  if (rank == 0) return kept;
  for (std::int64_t i = 0; i < (gates == nullptr ? rank : count); ++i) {
    if (gates == nullptr) kept.push_back({i, 1.0});
    else if (o.soft_gates ? gates[i] >= kNegligibleGate : gates[i] > o.gate_keep) kept.push_back({i, o.soft_gates ? gates[i] : 1.0});
  }
  return kept;
}

/// A = U sqrt(w s), B = sqrt(w s) V^T: the scale of a component goes to both sides alike.
void write_factors(const Components& c, std::int64_t matrix, std::span<const Kept> kept, std::int64_t length, std::int64_t dim, float* out) {
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

/// Matrices of one shape, [count, L, D]: for each span of a batch and each head keys, then values.
struct Matrices {
  Matrices(std::int64_t n, std::int64_t tokens, std::int64_t numbers)
      : count(n), length(tokens), dim(numbers), rows(at::empty({n, tokens, numbers}, at::TensorOptions().dtype(kFloat64))), means(at::zeros({n, numbers}, at::TensorOptions().dtype(kFloat64))), squares(static_cast<std::size_t>(n)) {}

  /// Takes matrix n from `length` rows of f32, and its weighted mean.
  void take(std::int64_t n, const float* from, std::span<const double> weights) {
    double *to = rows.data_ptr<double>() + n * length * dim, *mean = means.data_ptr<double>() + n * dim;
    std::copy_n(from, length * dim, to);
    for (std::int64_t t = 0; t < length; ++t)
      for (std::int64_t d = 0; d < dim; ++d) mean[d] += weights[static_cast<std::size_t>(t)] * to[t * dim + d];
    squares[static_cast<std::size_t>(n)] = std::inner_product(to, to + length * dim, to, 0.0);
  }

  std::int64_t count, length, dim;
  Tensor rows, means;           ///< f64 [count, L, D], [count, D]
  std::vector<double> squares;  ///< [count] sum over a matrix
};

/// How each matrix of a batch is factorised: centred or not, and how many components its own spectrum asks for.
class Choice {
 public:
  Choice(const Matrices& matrices, const FactorOptions& options) : options_(options), width_(std::min(matrices.length, matrices.dim)) {
    const bool always = options.centred == FactorOptions::Centred::always;
    may_centre_ = always || (options.centred == FactorOptions::Centred::automatic && options.rank != FactorOptions::Rank::gates);
    first_ = decompose(may_centre_ ? matrices.rows - matrices.means.unsqueeze(1) : matrices.rows);
    for (std::int64_t n = 0; n < matrices.count; ++n) {
      const bool noise = sum_from(squares_of(first_, n), 0) <= kRoundingNoise * matrices.squares[static_cast<std::size_t>(n)];
      ranks_.push_back(noise ? 0 : rank_of(squares_of(first_, n), options));
    }
    as_they_are_.assign(ranks_.size(), -1);
    if (may_centre_ && !always) prefer_rows_as_they_are(matrices);
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

  /// f64 [count, max_rank] singular values, padded with 0.
  [[nodiscard]] Tensor spectra() const {
    Tensor out = at::zeros({static_cast<std::int64_t>(ranks_.size()), options_.max_rank}, at::TensorOptions().dtype(kFloat64));
    for (std::int64_t n = 0; n < out.size(0); ++n) {
      const auto [components, matrix] = this->components(n);
      std::ranges::transform(squares_of(*components, matrix).first(static_cast<std::size_t>(shown())), out.data_ptr<double>() + n * options_.max_rank, [](double x) { return std::sqrt(x); });
    }
    return out;
  }

 private:
  [[nodiscard]] std::span<const double> squares_of(const Components& c, std::int64_t matrix) const { return {c.squares.const_data_ptr<double>() + matrix * width_, static_cast<std::size_t>(width_)}; }

  /// Where centring leaves more out than rows as they are do, those are taken instead.
  void prefer_rows_as_they_are(const Matrices& matrices) {
    std::vector<std::int64_t> doubtful;
    for (std::int64_t n = 0; n < matrices.count; ++n)
      if (rank(n) > 0 && rank(n) < width_) doubtful.push_back(n);
    if (doubtful.empty()) return;
    second_ = decompose(at::index_select(matrices.rows, 0, at::from_blob(doubtful.data(), {static_cast<std::int64_t>(doubtful.size())}, at::TensorOptions().dtype(c10::ScalarType::Long))));
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

}  // namespace

std::vector<std::string> FactorOptions::problems() const {
  std::vector<std::string> found;
  if (max_rank < 1) found.push_back(text("max_rank: ", max_rank, "; allowed 1 or more"));
  if (!(energy >= 0 && energy <= 1)) found.push_back(text("energy: ", energy, "; allowed 0 to 1"));
  if (!(gate_keep >= 0 && gate_keep <= 1)) found.push_back(text("gate_keep: ", gate_keep, "; allowed 0 to 1"));
  if (!is_scorable(store)) found.push_back(text("store: ", c10::toString(store), "; allowed f32, bf16 or f16"));
  return found;
}

/// Spans of one length that are folded together, and their rows.
struct SpanStore::Batch {
  std::vector<std::int64_t> spans;  ///< numbers of the spans
  std::int64_t length;
  const Tensor& keys;               ///< f32 [Hkv, T, D], contiguous
  const Tensor& values;
  std::span<const float> surprisal;
};

SpanStore::SpanStore(const Tensor& keys, const Tensor& values, std::span<const float> surprisal, std::vector<Span> spans, const FactorOptions& options, const RankGates* gates)
    : options_(options), spans_(std::move(spans)), store_(options.store) {
  std::string wrong;
  for (const std::string& one : options.problems()) wrong += (wrong.empty() ? "" : "; ") + one;
  require(wrong.empty(), "span store: ", wrong);
  require(keys.dim() == 3 && keys.sizes() == values.sizes() && keys.size(0) >= 1 && keys.size(2) >= 1 && keys.device().is_cpu() && values.device().is_cpu() && is_scorable(keys.scalar_type()) &&
              is_scorable(values.scalar_type()),
          "span store: keys or values do not fit; allowed f32, f16 or bf16 [Hkv, T, D] of one shape on the CPU");
  require(keys.size(1) == static_cast<std::int64_t>(surprisal.size()), "span store: ", keys.size(1), " tokens with ", surprisal.size(), " surprisals; allowed one each");
  for (const Span& s : spans_) require(s.begin >= 0 && s.length() >= 1 && s.end <= keys.size(1), "span store: a span from ", s.begin, " to ", s.end, "; allowed inside ", keys.size(1), " tokens");
  kv_heads_ = keys.size(0);
  dim_ = keys.size(2);
  if (options.rank == FactorOptions::Rank::gates) {
    require(gates != nullptr, "span store: rank is gates, and there are none; allowed with RankGates");
    require(gates->max_rank() == options.max_rank && gates->key_dim() == dim_, "span store: gates for ", gates->max_rank(), " components and keys of ", gates->key_dim(), " numbers; allowed max_rank = ",
            options.max_rank, " and ", dim_);
    gates_ = at::zeros({size(), kv_heads_, 2, options.max_rank}, at::TensorOptions().dtype(kFloat32));
  }
  singular_values_ = at::zeros({size(), kv_heads_, 2, options.max_rank}, at::TensorOptions().dtype(kFloat32));
  for (Tensor& c : coarse_) c = at::zeros({kv_heads_, size(), dim_}, at::TensorOptions().dtype(kFloat32));
  factors_.resize(static_cast<std::size_t>(size() * kv_heads_ * 2));
  blobs_.resize(static_cast<std::size_t>(size()));
  for (const Span& s : spans_) log_length_.push_back(static_cast<float>(std::log(static_cast<double>(s.length()))));

  const Tensor k = keys.to(kFloat32).contiguous(), v = values.to(kFloat32).contiguous();
  std::vector<std::int64_t> order(static_cast<std::size_t>(size()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::int64_t i) { return spans_[static_cast<std::size_t>(i)].length(); });
  std::vector<Batch> batches;
  for (const std::int64_t i : order) {
    const std::int64_t length = spans_[static_cast<std::size_t>(i)].length();
    const std::int64_t most = std::max<std::int64_t>(1, kBatchNumbers / (2 * kv_heads_ * length * dim_));
    if (batches.empty() || batches.back().length != length || static_cast<std::int64_t>(batches.back().spans.size()) == most) batches.push_back({{}, length, k, v, surprisal});
    batches.back().spans.push_back(i);
  }
  at::parallel_for(0, static_cast<std::int64_t>(batches.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) fold(batches[static_cast<std::size_t>(b)], gates);
  });
}

void SpanStore::fold(const Batch& batch, const RankGates* gates) {
  const std::int64_t per_span = 2 * kv_heads_, places = static_cast<std::int64_t>(batch.spans.size());
  Matrices matrices(places * per_span, batch.length, dim_);
  for (std::int64_t i = 0; i < places; ++i) {
    const Span& at = spans_[static_cast<std::size_t>(batch.spans[static_cast<std::size_t>(i)])];
    const std::vector<double> weights = span_weights(batch.surprisal.subspan(static_cast<std::size_t>(at.begin), static_cast<std::size_t>(batch.length)));
    for (std::int64_t j = 0; j < per_span; ++j) {
      const std::int64_t n = i * per_span + j, head = j / 2;
      matrices.take(n, (j % 2 == kKeys ? batch.keys : batch.values).const_data_ptr<float>() + (head * batch.keys.size(1) + at.begin) * dim_, weights);
      require(std::isfinite(matrices.squares[static_cast<std::size_t>(n)]), "span store: ", j % 2 == kKeys ? "keys" : "values", " of head ", head, " hold NaN or infinity in tokens ", at.begin, " to ", at.end - 1,
              "; allowed finite numbers");
    }
  }
  const Choice choice(matrices, options_);
  const Tensor spectra = choice.spectra();
  Tensor own_gates;
  if (options_.rank == FactorOptions::Rank::gates) {
    const Tensor keys = matrices.means.view({places * kv_heads_, 2, dim_}).narrow(1, kKeys, 1);  // of the values too
    own_gates = gates->gates(spectra, keys.expand({places * kv_heads_, 2, dim_}).reshape({matrices.count, dim_})).contiguous();
  }
  const Tensor rounded = matrices.means.to(store_).to(kFloat32);
  for (std::int64_t i = 0; i < places; ++i) {
    const std::int64_t span = batch.spans[static_cast<std::size_t>(i)];
    std::vector<std::vector<Kept>> kept;
    std::int64_t total = 0;
    for (std::int64_t j = 0; j < per_span; ++j) {
      const std::int64_t n = i * per_span + j, place = span * per_span + j;
      const double* gate = own_gates.defined() ? own_gates.const_data_ptr<double>() + n * options_.max_rank : nullptr;
      kept.push_back(kept_components(choice.rank(n), gate, choice.shown(), options_));
      SpanFactors& f = factors_[static_cast<std::size_t>(place)];
      f.rank = static_cast<std::int32_t>(kept.back().size());
      f.raw = options_.raw && f.rank * (batch.length + dim_) >= batch.length * dim_;
      f.centred = choice.centred(n);
      f.offset = total;
      total += f.numbers(batch.length, dim_);
      std::copy_n(spectra.const_data_ptr<double>() + n * options_.max_rank, choice.shown(), singular_values_.data_ptr<float>() + place * options_.max_rank);
      if (gate != nullptr) std::copy_n(gate, choice.shown(), gates_.data_ptr<float>() + place * options_.max_rank);
      std::copy_n(rounded.const_data_ptr<float>() + n * dim_, dim_, coarse_[static_cast<std::size_t>(j % 2)].data_ptr<float>() + (j / 2 * size() + span) * dim_);
    }
    const Tensor blob = at::empty({total}, at::TensorOptions().dtype(kFloat32));
    for (std::int64_t j = 0; j < per_span; ++j) {
      const std::int64_t n = i * per_span + j;
      const SpanFactors& f = factors_[static_cast<std::size_t>(span * per_span + j)];
      float* out = blob.data_ptr<float>() + f.offset;
      const auto [components, matrix] = choice.components(n);
      if (f.raw) std::copy_n(matrices.rows.const_data_ptr<double>() + n * batch.length * dim_, batch.length * dim_, out);
      else write_factors(*components, matrix, kept[static_cast<std::size_t>(j)], batch.length, dim_, out);
    }
    blobs_[static_cast<std::size_t>(span)] = blob.to(store_);
  }
}

double SpanStore::zoom_entries(std::int64_t span, std::int64_t head) const {
  const std::int64_t length = spans_[static_cast<std::size_t>(span)].length();
  return static_cast<double>(factors(span, head, kKeys).numbers(length, dim_) + factors(span, head, kValues).numbers(length, dim_)) / (2.0 * static_cast<double>(dim_));
}

Tensor SpanStore::rows(std::int64_t span, Side side) const {
  const std::int64_t length = spans_[static_cast<std::size_t>(span)].length();
  const Tensor stored = blob(span).to(kFloat32);
  Tensor out = at::zeros({kv_heads_, length, dim_}, at::TensorOptions().dtype(kFloat32));
  const float* from = stored.const_data_ptr<float>();
  for (std::int64_t h = 0; h < kv_heads_; ++h) {
    const SpanFactors& f = factors(span, h, side);
    if (f.raw) {
      out.select(0, h).copy_(stored.narrow(0, f.offset, length * dim_).view({length, dim_}));
      continue;
    }
    if (f.centred) out.select(0, h).copy_(coarse_[side].select(0, h).narrow(0, span, 1).expand({length, dim_}));
    for (std::int64_t t = 0; t < length; ++t) cpu::add_rows(from + f.offset + length * f.rank, f.rank, dim_, from + f.offset + t * f.rank, out.data_ptr<float>() + (h * length + t) * dim_);
  }
  return out;
}

std::int64_t SpanStore::near_bytes() const { return size() * (2 * kv_heads_ * dim_ * static_cast<std::int64_t>(c10::elementSize(store_)) + 4); }

std::int64_t SpanStore::far_bytes() const {
  std::int64_t bytes = 0;
  for (const Tensor& blob : blobs_) bytes += blob.numel() * static_cast<std::int64_t>(blob.element_size());
  return bytes;
}

}  // namespace kvkeep
