// SPDX-License-Identifier: Apache-2.0
// Rows cut down to few components on a GPU: what the CPU stores of them.

#include "factorise.h"

#include <cmath>
#include <memory>
#include <numeric>

#include "evidence_case.h"
#include "kvkeep/core/error.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/memory/span_row.h"
#include "kvkeep/torch.h"
#include "trained_router.h"

namespace kvkeep::cuda::factorise_test {
namespace {

using Factorise = OnDevice;
using Rank = FactorOptions::Rank;
using Centred = FactorOptions::Centred;
using Rows = std::vector<float>;  ///< [L, D]

/// `components` directions of falling size, some noise, and a mean.
Rows random_rows(oracle::Random& random, std::int64_t length, std::int64_t dim, int components, double noise,
                 double mean) {
  Rows rows(static_cast<std::size_t>(length * dim));
  for (std::int64_t d = 0; d < dim; ++d) {
    const double offset = mean * random.normal();
    for (std::int64_t t = 0; t < length; ++t)
      rows[static_cast<std::size_t>(t * dim + d)] = static_cast<float>(offset + noise * random.normal());
  }
  double size = 1;
  for (int c = 0; c < components; ++c, size *= 0.5) {
    std::vector<double> of_token(static_cast<std::size_t>(length)), of_number(static_cast<std::size_t>(dim));
    for (double& x : of_token) x = size * random.normal();
    for (double& x : of_number) x = random.normal();
    for (std::int64_t t = 0; t < length; ++t)
      for (std::int64_t d = 0; d < dim; ++d)
        rows[static_cast<std::size_t>(t * dim + d)] +=
            static_cast<float>(of_token[static_cast<std::size_t>(t)] * of_number[static_cast<std::size_t>(d)]);
  }
  return rows;
}

/// Matrices of one launch on both machines.
class Both {
 public:
  /// gates: of Rank::gates. as_values: these are values, each with the next one as the keys of its span.
  Both(std::vector<Rows> matrices, std::int32_t dim, Element element, const FactorOptions& options,
       bool weighted = false, std::uint64_t seed = 1, const RankGates* gates = nullptr, bool as_values = false)
      : options_(options), dim_(dim), element_(element), gates_(gates), as_values_(as_values) {
    oracle::Random random(seed);
    for (const Rows& rows : matrices) {
      const auto length = static_cast<std::int64_t>(rows.size()) / dim;
      lengths_.push_back(static_cast<std::int32_t>(length));
      // The span's rows lie in every other slot of a cache.
      auto& bytes =
          caches_.emplace_back(static_cast<std::size_t>(2 * length * dim * element_bytes(element)), std::byte{0x7F});
      auto& slots = slots_.emplace_back();
      auto& plain = plain_.emplace_back();
      for (std::int64_t t = 0; t < length; ++t) {
        slots.push_back(static_cast<std::int32_t>(2 * t + 1));
        for (std::int64_t d = 0; d < dim; ++d)
          plain.push_back(store(rows[static_cast<std::size_t>(t * dim + d)], element,
                                bytes.data() + ((2 * t + 1) * dim + d) * element_bytes(element)));
      }
      auto& weights = weights_.emplace_back();
      for (std::int64_t t = 0; weighted && t < length; ++t)
        weights.push_back(static_cast<float>(std::exp(2 * random.normal())));  // far from the plain mean
    }
  }

  void run_on_device() {
    std::vector<RowMatrix> matrices;
    std::vector<std::unique_ptr<DeviceArray<std::byte>>> caches;
    std::vector<std::unique_ptr<DeviceArray<std::int32_t>>> slots;
    std::vector<std::unique_ptr<DeviceArray<float>>> weights;
    const FactorOptions& options = options_;
    const std::int64_t number = element_bytes(element_);
    std::int64_t all = 0;
    for (std::size_t n = 0; n < lengths_.size(); ++n) {
      caches.push_back(std::make_unique<DeviceArray<std::byte>>(caches_[n]));
      slots.push_back(std::make_unique<DeviceArray<std::int32_t>>(slots_[n]));
      std::vector<float> shares;
      for (const double w : weights_[n].empty() ? std::vector<double>() : span_weights(weights_[n]))
        shares.push_back(static_cast<float>(w));
      weights.push_back(std::make_unique<DeviceArray<float>>(shares));
      matrices.push_back({.rows = {caches.back()->data(), dim_ * number, dim_ * number},
                          .slots = slots.back()->data(),
                          .length = lengths_[n],
                          .weights = shares.empty() ? nullptr : weights.back()->data(),
                          .offset = all});
      all += factor_numbers(lengths_[n], dim_, options);
    }
    const DeviceArray<RowMatrix> there(matrices);
    const DeviceArray<FactorsFound> found(std::vector<FactorsFound>(matrices.size(), FactorsFound{-7}));
    const auto coarse = DeviceArray<std::byte>::poisoned(matrices.size() * static_cast<std::size_t>(dim_ * number)),
               factors = DeviceArray<std::byte>::poisoned(static_cast<std::size_t>(all * number));
    FactoriseArguments a{.matrices = there.data(),
                         .count = static_cast<std::int32_t>(matrices.size()),
                         .longest = *std::max_element(lengths_.begin(), lengths_.end()),
                         .dim = dim_,
                         .element = element_,
                         .store = element_,
                         .options = options,
                         .found = found.data(),
                         .coarse = coarse.data(),
                         .factors = factors.data()};
    std::vector<std::unique_ptr<DeviceArray<float>>> numbers;
    const auto send = [&](const Tensor& of) {
      const Tensor wide = as<float>(of);
      return numbers
          .emplace_back(std::make_unique<DeviceArray<float>>(
              std::span<const float>(wide.data<float>(), static_cast<std::size_t>(wide.numel()))))
          ->data();
    };
    for (std::size_t i = 0; gates_ != nullptr && i < 3; ++i)
      a.gates.layers[i] = {send(gates_->weights(i)), send(gates_->biases(i)),
                           static_cast<std::int32_t>(gates_->weights(i).size(1)),
                           static_cast<std::int32_t>(gates_->weights(i).size(0))};
    const auto means = DeviceArray<float>::poisoned(matrices.size() * static_cast<std::size_t>(dim_));
    std::vector<RowMatrix> keys = matrices;
    for (std::size_t n = 0; n < keys.size(); ++n) keys[n].rows = matrices[key_of(n)].rows;
    const DeviceArray<RowMatrix> of_keys(keys);
    if (gates_ != nullptr) a.gates.key_means = means.data(), a.gates.of_keys = true;
    if (as_values_) {
      a.matrices = of_keys.data();
      launch_factorise(a, nullptr);
      a.matrices = there.data(), a.gates.of_keys = false;
    }
    launch_factorise(a, nullptr);
    found_ = found.download();
    coarse_ = floats(coarse.download());
    factors_ = floats(factors.download());
    offsets_.clear();
    for (const RowMatrix& m : matrices) offsets_.push_back(m.offset);
  }

  [[nodiscard]] const FactorsFound& found(std::size_t n) const { return found_[n]; }

  /// What the device's factors stand for: [L, D].
  [[nodiscard]] std::vector<double> shown(std::size_t n) const {
    const FactorsFound& f = found_[n];
    const std::int64_t length = lengths_[n], rank = f.rank;
    const float* at = factors_.data() + offsets_[n];
    std::vector<double> out(static_cast<std::size_t>(length * dim_));
    for (std::int64_t t = 0; t < length; ++t)
      for (std::int64_t d = 0; d < dim_; ++d) {
        double x = f.raw ? static_cast<double>(at[t * dim_ + d])
                   : f.centred
                       ? static_cast<double>(coarse_[static_cast<std::size_t>(static_cast<std::int64_t>(n) * dim_ + d)])
                       : 0;
        for (std::int64_t r = 0; !f.raw && r < rank; ++r)
          x += static_cast<double>(at[t * rank + r]) * static_cast<double>(at[length * rank + r * dim_ + d]);
        out[static_cast<std::size_t>(t * dim_ + d)] = x;
      }
    return out;
  }

  /// Ranks, forms, means and what factors stand for, as fold() has them.
  void expect_alike(double tolerance, const std::string& what) const {
    for (std::size_t n = 0; n < lengths_.size(); ++n) {
      const SpanRow row = folded(n);
      const KvSide side = as_values_ ? KvSide::values : KvSide::keys;
      const SpanFactors& want = row.span(0).factors[static_cast<std::size_t>(side)];
      const FactorsFound& got = found_[n];
      const std::string which = text(what, ", matrix ", n, " of ", lengths_[n], " x ", dim_);
      EXPECT_TRUE(got.finite) << which;
      EXPECT_EQ(got.rank, want.rank) << which;
      EXPECT_EQ(got.raw, want.raw) << which;
      EXPECT_EQ(got.centred, want.centred) << which;
      const at::Tensor rows = row.rows(0, side);
      const std::vector<double> own = shown(n);
      double apart = 0, size = 0, off = 0, mean = 0;
      for (std::size_t i = 0; i < own.size(); ++i) {
        const double x = rows.const_data_ptr<float>()[i];
        apart += (own[i] - x) * (own[i] - x);
        size += static_cast<double>(plain_[n][i]) * static_cast<double>(plain_[n][i]);
      }
      const Rows means = floats({row.coarse(side), row.coarse(side) + dim_ * element_bytes(element_)});
      for (std::size_t d = 0; d < means.size(); ++d) {
        off = std::max(off, std::abs(static_cast<double>(means[d]) -
                                     static_cast<double>(coarse_[n * static_cast<std::size_t>(dim_) + d])));
        mean = std::max(mean, std::abs(static_cast<double>(means[d])));
      }
      EXPECT_LE(std::sqrt(apart), tolerance * std::sqrt(size) + 1e-30) << which;
      EXPECT_LE(off, tolerance * mean + 1e-6 * std::sqrt(size)) << which;
    }
  }

 private:
  [[nodiscard]] SpanRow folded(std::size_t n) const {
    FactorOptions o = options_;
    o.store = dtype_of(element_);
    const auto rows = [this](std::size_t of) {
      return SlotAddress{const_cast<std::byte*>(caches_[of].data()), dim_ * element_bytes(element_),
                         dim_ * element_bytes(element_)};
    };
    const std::vector<std::int64_t> indptr{0, lengths_[n]};
    const RowFold one{.keys = rows(key_of(n)),
                      .values = rows(n),
                      .key_dtype = o.store,
                      .value_dtype = o.store,
                      .slots = slots_[n],
                      .indptr = indptr,
                      .weights = weights_[n]};
    return std::move(fold({&one, 1}, dim_, o, gates_).front());
  }
  /// The matrix of the keys of span n.
  [[nodiscard]] std::size_t key_of(std::size_t n) const { return as_values_ ? (n + 1) % lengths_.size() : n; }
  [[nodiscard]] Rows floats(std::span<const std::byte> bytes) const {
    Rows out(bytes.size() / static_cast<std::size_t>(element_bytes(element_)));
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (element_ == Element::f32) std::memcpy(&out[i], bytes.data() + 4 * i, 4);
      if (element_ == Element::f16) out[i] = static_cast<float>(reinterpret_cast<const c10::Half*>(bytes.data())[i]);
      if (element_ == Element::bf16)
        out[i] = static_cast<float>(reinterpret_cast<const c10::BFloat16*>(bytes.data())[i]);
    }
    return out;
  }

  FactorOptions options_;
  std::int32_t dim_;
  Element element_;
  const RankGates* gates_;
  bool as_values_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::vector<std::byte>> caches_;
  std::vector<std::vector<std::int32_t>> slots_;
  std::vector<Rows> plain_, weights_;
  std::vector<FactorsFound> found_;
  std::vector<std::int64_t> offsets_;
  Rows coarse_, factors_;
};

void expect_as_on_cpu(const std::vector<Rows>& matrices, std::int32_t dim, Element element,
                      const FactorOptions& options, const std::string& what, bool weighted = false) {
  in_every_order([&] {
    Both both(matrices, dim, element, options, weighted);
    both.run_on_device();
    both.expect_alike(element == Element::f32 ? 1e-3 : 2e-2, what);
  });
}

TEST_F(Factorise, GivesWhatTheCpuStoresForEverySize) {
  oracle::Random random(70);
  for (const std::int32_t dim : {1, 2, 7, 16, 33, 64, 65}) {
    std::vector<Rows> matrices;
    for (const int length : {1, 2, 13, 16, 17, 64, 67})
      matrices.push_back(random_rows(random, length, dim, 6, 0.02, 0.5));
    expect_as_on_cpu(matrices, dim, Element::f32, {.centred = Centred::always}, text("dim ", dim));
  }
}

TEST_F(Factorise, GivesWhatTheCpuStoresForEveryRule) {
  oracle::Random random(71);
  for (const Centred centred : {Centred::automatic, Centred::always, Centred::never})
    for (const Rank rank : {Rank::energy, Rank::max})
      for (const bool raw : {true, false}) {
        std::vector<Rows> matrices;
        for (const int length : {5, 24, 30}) matrices.push_back(random_rows(random, length, 20, 5, 0.03, 0.4));
        const FactorOptions o{
            .rank = rank, .centred = centred, .max_rank = rank == Rank::max ? 4 : 32, .energy = 0.15, .raw = raw};
        expect_as_on_cpu(matrices, 20, Element::f32, o,
                         text("centred ", static_cast<int>(centred), ", rank ", static_cast<int>(rank), ", raw ", raw),
                         rank == Rank::energy);
      }
}

TEST_F(Factorise, GivesWhatTheCpuStoresInHalfWidth) {
  oracle::Random random(72);
  for (const Element element : {Element::f16, Element::bf16}) {
    const std::vector<Rows> matrices{random_rows(random, 24, 32, 4, 0.05, 0.5),
                                     random_rows(random, 40, 32, 4, 0.05, 0.5)};
    expect_as_on_cpu(matrices, 32, element, {.centred = Centred::always, .energy = 0.2}, name_of(element));
  }
}

/// A mean that one token nearly makes alone is a bad centre: rows as they are leave out less, and are decomposed once
/// more.
TEST_F(Factorise, ChoosesRowsAsTheyAreWhereCentringLosesMore) {
  oracle::Random random(73);
  std::vector<Rows> matrices;
  for (int n = 0; n < 12; ++n) matrices.push_back(random_rows(random, 12, 24, 3, 0.1, n % 2 == 0 ? 0.0 : 1.0));
  in_every_order([&] {
    Both both(matrices, 24, Element::f32, {.energy = 0.3}, true);
    both.run_on_device();
    both.expect_alike(1e-3, "automatic");
    int plain = 0;
    for (std::size_t n = 0; n < matrices.size(); ++n) plain += both.found(n).centred ? 0 : 1;
    EXPECT_GT(plain, 0);
    EXPECT_LT(plain, 12);
  });
}

/// Gates name components that need not be the largest, and values have gates that read the keys of their span.
TEST_F(Factorise, KeepsTheComponentsThatGatesName) {
  oracle::Random random(77);
  for (const std::int32_t dim : {5, 16, 40})
    for (const std::int64_t max_rank : {4, 12}) {
      const TrainedParameters p = testing::trained_router(78, {.dim = dim, .max_rank = max_rank, .width = 37});
      const RankGates gates(p.gate_weights, p.gate_biases);
      for (const int length : {3, 16, 50}) {
        std::vector<Rows> matrices;
        for (int n = 0; n < 5; ++n) matrices.push_back(random_rows(random, length, dim, 6, 0.05, 0.5));
        for (const bool soft : {false, true})
          for (const Centred centred : {Centred::automatic, Centred::always})
            for (const bool as_values : {false, true}) {
              const FactorOptions o{.rank = Rank::gates,
                                    .centred = centred,
                                    .max_rank = static_cast<std::int32_t>(max_rank),
                                    .soft_gates = soft,
                                    .raw = length != 16};
              in_every_order([&] {
                Both both(matrices, dim, Element::f32, o, true, 1, &gates, as_values);
                both.run_on_device();
                both.expect_alike(1e-3, text("soft ", soft, ", centred ", static_cast<int>(centred), ", max_rank ",
                                             max_rank, ", values ", as_values));
              });
            }
      }
    }
}

TEST_F(Factorise, TakesTheWidestMatrixThatItKnows) {
  oracle::Random random(74);
  expect_as_on_cpu({random_rows(random, 128, 129, 6, 0.01, 0.3)}, 129, Element::f32, {.centred = Centred::always},
                   "128 x 129");
  expect_as_on_cpu({random_rows(random, 130, 65, 6, 0.01, 0.3)}, 65, Element::f32, {.centred = Centred::always},
                   "130 x 65");
}

TEST_F(Factorise, KnowsTheEnds) {
  oracle::Random random(75);
  const Rows nothing(20 * 12), once = random_rows(random, 20, 12, 1, 0, 0);
  Rows same(20 * 12), far = once;
  for (std::size_t i = 0; i < same.size(); ++i)
    same[i] = (static_cast<float>(i % 12) + 0.37F) *
              (1 + 2e-6F * static_cast<float>(i / 12 % 3));  // what is left of them is noise
  for (float& x : far) x *= 1e18F;
  in_every_order([&] {
    Both both({nothing, once, same, far}, 12, Element::f32, {.centred = Centred::always, .energy = 1e-3});
    both.run_on_device();
    both.expect_alike(1e-3, "ends");
    EXPECT_EQ(both.found(0).rank, 0);
    EXPECT_EQ(both.found(1).rank, 1);
    EXPECT_EQ(both.found(2).rank, 0) << "alike rows are their mean";
    EXPECT_EQ(both.found(3).rank, 1);
  });
}

TEST_F(Factorise, TellsMatricesThatAreNotNumbersAndGoesOnWithTheOthers) {
  oracle::Random random(76);
  Rows good = random_rows(random, 9, 8, 2, 0.1, 0.3), nan = good, infinite = good;
  nan[17] = std::numeric_limits<float>::quiet_NaN();
  infinite[3] = std::numeric_limits<float>::infinity();
  in_every_order([&] {
    Both both({nan, good, infinite}, 8, Element::f32, {});
    both.run_on_device();
    EXPECT_FALSE(both.found(0).finite);
    EXPECT_TRUE(both.found(1).finite);
    EXPECT_GT(both.found(1).rank, 0);
    EXPECT_FALSE(both.found(2).finite);
  });
}

TEST_F(Factorise, RefusesWhatItDoesNotKnow) {
  const auto refuses = [](auto change) {
    FactoriseArguments a{.longest = 4, .dim = 8};
    change(a);
    EXPECT_THROW(launch_factorise(a, nullptr), InvalidArgument);
  };
  refuses([](auto& a) { a.dim = 0; });
  refuses([](auto& a) { a.dim = 257; });
  refuses([](auto& a) { a.count = -1; });
  refuses([](auto& a) { a.longest = -1; });
  refuses([](auto& a) { a.options.max_rank = 0; });
  refuses([](auto& a) { a.options.energy = 1.5; });
  refuses([](auto& a) { a.options.energy = std::nan(""); });
  refuses([](auto& a) { a.element = Element::f8_e4m3; });
  refuses([](auto& a) { a.store = Element::f8_e4m3; });
  refuses([](auto& a) { a.options.rank = Rank::gates; });
  refuses([](auto& a) { a.gates.layers[0].inputs = 40; });
  EXPECT_THROW(launch_factorise({.longest = 129, .dim = 129}, nullptr), Unsupported);
  EXPECT_NO_THROW(launch_factorise({.longest = 128, .dim = 256}, nullptr)) << "no matrix";
}

}  // namespace
}  // namespace kvkeep::cuda::factorise_test
