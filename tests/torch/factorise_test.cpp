// SPDX-License-Identifier: Apache-2.0
// Factors of matrices against LAPACK's, for matrices that are hard on an eigensolver, and what must hold whatever
// shares their batch.

#include "kvkeep/memory/factorise.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "arrays.h"
#include "kvkeep/torch.h"
#include "scorer_case.h"

namespace kvkeep::factorise_test {
namespace {

using cpu::Factorisation;
using testing::for_every_instruction_set;
using testing::normals;
using Rank = FactorOptions::Rank;
using Centred = FactorOptions::Centred;

constexpr at::ScalarType kFloat64 = c10::ScalarType::Double;

/// f64 [rows, columns].
at::Tensor random_matrix(oracle::Random& random, int rows, int columns) {
  return torch_tensor(normals(random, {rows, columns})).to(kFloat64);
}

/// [L, D] with these singular values; as many as there is room for.
at::Tensor with_values(oracle::Random& random, int length, int dim, const std::function<double(int)>& value) {
  const int m = std::min(length, dim);
  const at::Tensor u = std::get<0>(at::linalg_qr(random_matrix(random, length, m))),
                   v = std::get<0>(at::linalg_qr(random_matrix(random, dim, m)));
  at::Tensor s = at::zeros({m}, at::TensorOptions().dtype(kFloat64));
  for (int i = 0; i < m; ++i) s.data_ptr<double>()[i] = value(i);
  return at::matmul(u * s, v.t()).contiguous();
}

/// Every kind of spectrum that trips an eigensolver: [kinds, L, D].
at::Tensor hard_matrices(std::uint64_t seed, int length, int dim) {
  oracle::Random random(seed);
  std::vector<at::Tensor> all{random_matrix(random, length, dim),
                              at::zeros({length, dim}, at::TensorOptions().dtype(kFloat64))};
  for (const auto& value : std::vector<std::function<double(int)>>{
           [](int i) { return i == 0 ? 3.0 : 0.0; },      // rank 1
           [](int) { return 2.0; },                       // one value, as often as there is room
           [](int i) { return i < 5 ? 1.0 : 1e-3; },      // two clusters
           [](int i) { return 1 + 1e-9 * i; },            // nearly one value
           [](int i) { return std::pow(0.5, i); },        // falls off fast
           [](int i) { return std::pow(10.0, -2 * i); },  // below rounding soon
           [](int i) { return 1e18 * std::exp(-0.2 * i); }, [](int i) { return 1e-18 * std::exp(-0.2 * i); }})
    all.push_back(with_values(random, length, dim, value));
  at::Tensor equal = random_matrix(random, 1, dim).expand({length, dim}).contiguous(),
             unit = at::zeros({length, dim}, at::TensorOptions().dtype(kFloat64)), apart_blocks = unit.clone();
  for (int i = 0; i < std::min(length, dim); ++i) unit.data_ptr<double>()[i * dim + i] = 1 + i % 3;
  for (int t = 0; t < length; ++t)  // rows of two kinds that share no column: the tridiagonal matrix falls apart
    for (int d = 0; d < dim; ++d)
      if (t % 2 == d % 2) apart_blocks.data_ptr<double>()[t * dim + d] = random.normal();
  all.insert(all.end(), {equal, unit, apart_blocks,
                         50 * random_matrix(random, 1, dim) + 0.1 * random_matrix(random, length, dim)});
  return at::stack(all).to(at::kFloat).to(kFloat64);  // as rows of a cache are
}

std::vector<double> uneven_weights(std::int64_t length) {
  std::vector<double> weights(static_cast<std::size_t>(length));
  for (std::size_t t = 0; t < weights.size(); ++t) weights[t] = 1.0 + static_cast<double>(t * 5 % 7);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& w : weights) w /= sum;
  return weights;
}

Factorisation factorised(const at::Tensor& matrices, const FactorOptions& options) {
  Factorisation f(matrices.size(0), matrices.size(1), matrices.size(2), options);
  const at::Tensor rows = matrices.contiguous();
  const std::int64_t numbers = rows.size(1) * rows.size(2);
  for (std::int64_t n = 0; n < rows.size(0); ++n) {
    std::copy_n(rows.const_data_ptr<double>() + n * numbers, numbers, f.rows(n));
    EXPECT_TRUE(f.weigh(n, uneven_weights(rows.size(1))));
  }
  f.run(nullptr, {});
  return f;
}

std::vector<float> written(const Factorisation& f, std::int64_t n, std::int64_t length, std::int64_t dim) {
  std::vector<float> out(static_cast<std::size_t>(f.factors(n).numbers(length, dim)));
  f.write(n, out.data());
  return out;
}

at::Tensor mean_of(const at::Tensor& rows) {
  at::Tensor mean = at::zeros({rows.size(1)}, at::TensorOptions().dtype(kFloat64));
  const std::vector<double> weights = uneven_weights(rows.size(0));
  for (std::int64_t t = 0; t < rows.size(0); ++t) mean += weights[static_cast<std::size_t>(t)] * rows[t];
  return mean;
}

double length_of(const at::Tensor& t) { return std::sqrt(t.square().sum().item<double>()); }

/// f64 [L, D] that the factors of matrix n stand for, less their base.
at::Tensor shown(const Factorisation& f, std::int64_t n, std::int64_t length, std::int64_t dim) {
  const std::vector<float> out = written(f, n, length, dim);
  const std::int64_t rank = f.factors(n).rank;
  at::Tensor a = at::zeros({length, rank}, at::TensorOptions().dtype(kFloat64)),
             b = at::zeros({rank, dim}, at::TensorOptions().dtype(kFloat64));
  std::copy_n(out.begin(), length * rank, a.data_ptr<double>());
  std::copy_n(out.begin() + length * rank, rank * dim, b.data_ptr<double>());
  return at::matmul(a, b);
}

std::vector<double> lapack_values(const at::Tensor& rows) {
  const at::Tensor s = std::get<1>(at::linalg_svd(rows, false)).contiguous();
  return {s.const_data_ptr<double>(), s.const_data_ptr<double>() + s.numel()};
}

double squares_from(const std::vector<double>& values, std::int64_t first) {
  return std::accumulate(values.rbegin(), values.rend() - first, 0.0, [](double sum, double x) { return sum + x * x; });
}

struct Shape {
  int length, dim;
};
constexpr Shape kShapes[] = {{1, 8},   {1, 1},   {7, 1},   {2, 3},   {4, 128},  {5, 7},   {8, 16},
                             {16, 16}, {17, 16}, {31, 33}, {33, 31}, {64, 128}, {70, 80}, {300, 20}};

/// Every matrix of a shape: singular values, and what is left out beside the least that must be.
void expect_as_lapack(const Shape& shape, std::uint64_t seed) {
  const at::Tensor matrices = hard_matrices(seed, shape.length, shape.dim);
  const std::int64_t m = std::min(shape.length, shape.dim);
  for (const Centred centred : {Centred::never, Centred::always}) {
    std::vector<at::Tensor> rows;
    std::vector<std::vector<double>> values;
    for (std::int64_t n = 0; n < matrices.size(0); ++n) {
      rows.push_back(centred == Centred::always ? matrices[n] - mean_of(matrices[n]) : matrices[n]);
      values.push_back(lapack_values(rows.back()));
    }
    for (const std::int64_t rank : {std::int64_t{1}, (m + 2) / 3, m}) {
      FactorOptions o;
      o.rank = Rank::max, o.max_rank = static_cast<std::int32_t>(rank), o.raw = false, o.centred = centred;
      const Factorisation f = factorised(matrices, o);
      for (std::int64_t n = 0; n < matrices.size(0); ++n) {
        SCOPED_TRACE("matrix " + std::to_string(n) + " of " + std::to_string(shape.length) + " x " +
                     std::to_string(shape.dim) + ", rank " + std::to_string(rank) +
                     (centred == Centred::always ? ", centred" : ""));
        const std::vector<double>& want = values[static_cast<std::size_t>(n)];
        const at::Tensor& of = rows[static_cast<std::size_t>(n)];
        for (std::int64_t i = 0; i < rank; ++i)
          EXPECT_NEAR(f.singular_values(n)[static_cast<std::size_t>(i)], want[static_cast<std::size_t>(i)],
                      1e-7 * (want[0] + 1e-6 * length_of(matrices[n])))
              << i;
        EXPECT_TRUE(std::ranges::is_sorted(f.singular_values(n), std::greater<>()));
        if (f.factors(n).rank == 0) {
          EXPECT_LE(length_of(of), 1e-5 * length_of(matrices[n]) + 1e-300) << "nothing is kept of rounding noise alone";
          continue;
        }
        EXPECT_EQ(f.factors(n).rank, rank);
        EXPECT_LE(length_of(of - shown(f, n, shape.length, shape.dim)),
                  std::sqrt(squares_from(want, rank)) + 1e-6 * length_of(of));
      }
    }
  }
}

TEST(Factorise, LeavesOutNoMoreThanLapackMust) {
  for (const Shape& shape : kShapes)
    expect_as_lapack(shape, static_cast<std::uint64_t>(100 * shape.length + shape.dim));
}

TEST(Factorise, AgreesWithLapackOnEveryInstructionSetOfThisMachine) {
  for_every_instruction_set([] {
    for (const Shape& shape : {Shape{1, 8}, Shape{5, 7}, Shape{33, 31}, Shape{40, 50}}) expect_as_lapack(shape, 7);
  });
}

TEST(Factorise, HasOrthogonalColumnsWhateverTheSpectrum) {
  for (const Shape& shape : {Shape{24, 40}, Shape{64, 128}}) {
    FactorOptions o;
    o.rank = Rank::max, o.max_rank = shape.length, o.raw = false, o.centred = Centred::never;
    const at::Tensor matrices = hard_matrices(11, shape.length, shape.dim);
    const Factorisation f = factorised(matrices, o);
    for (std::int64_t n = 0; n < matrices.size(0); ++n) {
      const std::vector<float> out = written(f, n, shape.length, shape.dim);
      const std::int64_t rank = f.factors(n).rank;
      for (std::int64_t i = 0; i < rank; ++i)
        for (std::int64_t j = 0; j <= i; ++j) {
          double dot = 0, left = 0, right = 0;
          for (std::int64_t t = 0; t < shape.length; ++t) {
            const double x = out[static_cast<std::size_t>(t * rank + i)],
                         y = out[static_cast<std::size_t>(t * rank + j)];
            dot += x * y, left += x * x, right += y * y;
          }
          if (i != j)
            EXPECT_LE(std::abs(dot), 1e-6 * std::sqrt(left * right))
                << "matrix " << n << ", columns " << i << " and " << j;
        }
    }
  }
}

TEST(Factorise, ChoosesFormAndRankAsLapacksSingularValuesDo) {
  for (const Shape& shape : {Shape{12, 20}, Shape{40, 24}}) {
    FactorOptions o;
    o.raw = false, o.max_rank = 16, o.energy = 0.3;
    std::int64_t plain = 0, all = 0;
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      oracle::Random random(seed);
      std::vector<at::Tensor> rows;
      for (int n = 0; n < 5; ++n) {
        // Rows around the origin, whose weighted mean is not their mean, lose by centring; rows far from it gain.
        const at::Tensor around = with_values(random, shape.length, shape.dim, [](int i) { return std::pow(0.8, i); });
        rows.push_back(around - around.mean(0) + 0.05 * n * random_matrix(random, 1, shape.dim));
      }
      const at::Tensor matrices = at::stack(rows);
      const Factorisation f = factorised(matrices, o);
      const auto rank_of = [&](const std::vector<double>& values) {
        std::int64_t rank = 0;
        while (squares_from(values, rank) > 0.09 * squares_from(values, 0)) ++rank;
        return std::min<std::int64_t>(rank, 16);
      };
      for (std::int64_t n = 0; n < 5; ++n) {
        const std::vector<double> centred = lapack_values(matrices[n] - mean_of(matrices[n])),
                                  as_is = lapack_values(matrices[n]);
        const std::int64_t rank = rank_of(centred);
        const bool better = squares_from(as_is, rank) < squares_from(centred, rank) - 1e-6 * squares_from(centred, 0);
        EXPECT_EQ(f.factors(n).centred, !better) << seed << ' ' << n;
        EXPECT_EQ(f.factors(n).rank, better ? rank_of(as_is) : rank) << seed << ' ' << n;
        const std::vector<double>& chosen = better ? as_is : centred;
        const at::Tensor base = better ? matrices[n] : matrices[n] - mean_of(matrices[n]);
        EXPECT_NEAR(length_of(base - shown(f, n, shape.length, shape.dim)),
                    std::sqrt(squares_from(chosen, f.factors(n).rank)), 1e-6 * length_of(base));
        plain += better;
        ++all;
      }
    }
    EXPECT_GT(plain, 0);
    EXPECT_LT(plain, all);
  }
}

/// All that a factorisation says of matrix n.
std::vector<double> told(const Factorisation& f, std::int64_t n, std::int64_t length, std::int64_t dim) {
  const SpanFactors& of = f.factors(n);
  std::vector<double> all{static_cast<double>(of.rank), static_cast<double>(of.raw), static_cast<double>(of.centred)};
  all.insert(all.end(), f.singular_values(n).begin(), f.singular_values(n).end());
  all.insert(all.end(), f.mean(n), f.mean(n) + dim);
  for (const float x : written(f, n, length, dim)) all.push_back(x);
  return all;
}

TEST(Factorise, GivesEveryMatrixTheSameBitsInAnyCompanyAndOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const Shape& shape : {Shape{6, 10}, Shape{24, 40}, Shape{40, 24}})
    for (const Rank rank : {Rank::energy, Rank::max}) {
      FactorOptions o;
      o.rank = rank, o.max_rank = 20, o.raw = rank == Rank::energy;
      const at::Tensor matrices = hard_matrices(13, shape.length, shape.dim);
      const std::int64_t count = matrices.size(0);
      at::set_num_threads(1);
      const Factorisation together = factorised(matrices, o), turned = factorised(matrices.flip({0}), o);
      at::set_num_threads(3);
      const Factorisation split = factorised(matrices, o);
      for (std::int64_t n = 0; n < count; ++n) {
        const std::vector<double> want = told(factorised(matrices.narrow(0, n, 1), o), 0, shape.length, shape.dim);
        EXPECT_EQ(told(together, n, shape.length, shape.dim), want) << n;
        EXPECT_EQ(told(turned, count - 1 - n, shape.length, shape.dim), want) << n;
        EXPECT_EQ(told(split, n, shape.length, shape.dim), want) << n;
      }
    }
  at::set_num_threads(threads);
}

TEST(Factorise, ShowsRowsThatAreSmallerThanTheirFactorsAsTheyAre) {
  oracle::Random random(17);
  const at::Tensor matrices = random_matrix(random, 3 * 8, 24).view({3, 8, 24}).contiguous();
  FactorOptions o;
  o.rank = Rank::max;
  const Factorisation f = factorised(matrices, o);
  for (std::int64_t n = 0; n < 3; ++n) {
    EXPECT_TRUE(f.factors(n).raw);
    const std::vector<float> out = written(f, n, 8, 24);
    EXPECT_TRUE(std::equal(out.begin(), out.end(), matrices[n].const_data_ptr<double>(),
                           matrices[n].const_data_ptr<double>() + 8 * 24));
  }
}

TEST(Factorise, SaysWhichRowsAreNotFiniteAndEndsWhateverTheyHold) {
  for (const Shape& shape : {Shape{9, 20}, Shape{30, 12}})
    for (const double bad : {static_cast<double>(std::nanf("")), HUGE_VAL, 1e200}) {
      oracle::Random random(19);
      const at::Tensor matrices = random_matrix(random, 3 * shape.length, shape.dim).view({3, shape.length, shape.dim});
      Factorisation f(3, shape.length, shape.dim, {});
      for (std::int64_t n = 0; n < 3; ++n) {
        std::copy_n(matrices[n].const_data_ptr<double>(), shape.length * shape.dim, f.rows(n));
        if (n == 1) f.rows(n)[shape.dim + 3] = bad;
        EXPECT_EQ(f.weigh(n, uneven_weights(shape.length)), n != 1);
      }
      f.run(nullptr, {});
      for (const std::int64_t n : {0, 2})
        EXPECT_EQ(told(f, n, shape.length, shape.dim),
                  told(factorised(matrices.narrow(0, n, 1), {}), 0, shape.length, shape.dim))
            << "its neighbours do not notice";
    }
}

}  // namespace
}  // namespace kvkeep::factorise_test
