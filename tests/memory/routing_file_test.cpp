// SPDX-License-Identifier: Apache-2.0
// Files of trained routers: what is written is read, and what does not fit is refused by name.

#include "arrays.h"
#include "kvkeep/memory/router.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <limits>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"

namespace kvkeep::routing_file_test {
namespace {

using namespace testing;
namespace fs = std::filesystem;

constexpr std::int64_t kLayers = 3, kHeads = 4, kInner = 5, kDim = 6, kMaxRank = 4, kWidth = 7;

class RoutingFile : public ::testing::Test {
 protected:
  RoutingFile()
      : folder_(fs::temp_directory_path() / text("kvkeep_routing_file_", ::getpid(), "_",
                                                 ::testing::UnitTest::GetInstance()->current_test_info()->name())),
        file_(folder_ / "small.router.safetensors") {
    fs::create_directories(folder_);
    oracle::Random random(7);
    parameters_.projections = normals(random, {kLayers, kHeads, kInner, kDim});
    parameters_.thresholds = normals(random, {kLayers, kHeads}, 0.1);
    for (int i = 0; i < kLayers * kHeads; ++i) parameters_.thresholds.data<float>()[i] += 0.8F;
    const std::int64_t widths[] = {kMaxRank + kDim, kWidth, kWidth, kMaxRank};
    for (std::size_t i = 0; i < 3; ++i)
      parameters_.gate_weights[i] = normals(random, {widths[i + 1], widths[i]}),
      parameters_.gate_biases[i] = normals(random, {widths[i + 1]});
    spec_.query_heads = kHeads, spec_.kv_heads = 2;
    spec_.key_dim = spec_.value_dim = kDim;
    spec_.layers.resize(kLayers);
  }
  ~RoutingFile() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  /// What the reader says of a file with one tensor changed, dropped (undefined) or added.
  [[nodiscard]] std::string refusal(const std::string& name, const Array& instead,
                                    const std::map<std::string, std::string>& metadata = {}) const {
    std::vector<std::pair<std::string, Tensor>> tensors{{"W", parameters_.projections},
                                                        {"tau", parameters_.thresholds}};
    for (std::size_t i = 0; i < 3; ++i)
      tensors.insert(tensors.end(), {{text("g_phi.mlp.", 2 * i, ".weight"), parameters_.gate_weights[i]},
                                     {text("g_phi.mlp.", 2 * i, ".bias"), parameters_.gate_biases[i]}});
    std::erase_if(tensors, [&](const auto& t) { return t.first == name; });
    if (instead.defined()) tensors.emplace_back(name, instead);
    io::write_safetensors(file_, tensors, metadata);
    return refusal_of(file_);
  }
  static std::string refusal_of(const fs::path& file) {
    try {
      static_cast<void>(Routing::read(file));
      return {};
    } catch (const InvalidArgument& error) {
      return error.what();
    }
  }

  fs::path folder_, file_;
  TrainedParameters parameters_;
  ModelSpec spec_;
};

void expect_named(const std::string& message, std::initializer_list<const char*> words) {
  EXPECT_FALSE(message.empty()) << "it was not refused";
  for (const char* word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
}

TEST_F(RoutingFile, GivesBackTheSameRoutersAndGates) {
  write_routing(file_, parameters_, {{"model_name", "small"}});
  const Routing routing = Routing::read(file_);
  EXPECT_EQ(routing.model_name, "small");
  EXPECT_TRUE(routing.problems(spec_).empty());
  ASSERT_EQ(routing.layers.size(), static_cast<std::size_t>(kLayers));
  ASSERT_TRUE(routing.gates.has_value());
  EXPECT_EQ(routing.gates->max_rank(), kMaxRank);

  for (std::int64_t l = 0; l < kLayers; ++l) {
    const Router own(parameters_.projections.select(0, l), parameters_.thresholds.select(0, l));
    const Router& read = routing.layers[static_cast<std::size_t>(l)];
    ASSERT_EQ(read.query_heads(), kHeads);
    ASSERT_EQ(read.inner(), kInner);
    ASSERT_EQ(read.key_dim(), kDim);
    for (std::int64_t h = 0; h < kHeads; ++h) {
      EXPECT_EQ(read.threshold(h), own.threshold(h)) << "layer " << l;
      EXPECT_TRUE(std::equal(own.projection(h), own.projection(h) + kInner * kDim, read.projection(h)))
          << "layer " << l;
    }
  }
  oracle::Random random(12);
  const Array spectra = normals(random, {5, kMaxRank}).to(Dtype::f64), keys = normals(random, {5, kDim}).to(Dtype::f64);
  for (std::int64_t i = 0; i < spectra.numel(); ++i) spectra.data<double>()[i] = std::abs(spectra.data<double>()[i]);
  for (double* row = spectra.data<double>(); row < spectra.data<double>() + spectra.numel(); row += kMaxRank)
    std::sort(row, row + kMaxRank, std::greater<>());
  EXPECT_EQ(apart(routing.gates->gates(spectra, keys),
                  RankGates(parameters_.gate_weights, parameters_.gate_biases).gates(spectra, keys)),
            0);
}

TEST_F(RoutingFile, MayHaveNoGatesNoMetadataAndHalfPrecision) {
  io::write_safetensors(file_, {{"W", Array(parameters_.projections).to(Dtype::bf16)},
                                {"tau", Array(parameters_.thresholds).to(Dtype::f16)}});
  const Routing routing = Routing::read(file_);
  EXPECT_FALSE(routing.gates.has_value());
  EXPECT_TRUE(routing.model_name.empty());
  EXPECT_TRUE(routing.problems(spec_).empty());
  TrainedParameters without = parameters_;
  without.gate_weights = {}, without.gate_biases = {};
  write_routing(file_, without);
  EXPECT_FALSE(Routing::read(file_).gates.has_value());
}

TEST_F(RoutingFile, NamesTheTensorThatIsMissingUnknownMisshapenOrNotFinite) {
  const Array w = parameters_.projections, tau = parameters_.thresholds;
  expect_named(refusal("W", {}), {"small.router.safetensors", "\"W\"", "missing"});
  expect_named(refusal("tau", {}), {"\"tau\"", "missing", "[3, 4]"});
  expect_named(refusal("tau", tau.narrow(1, 0, 3)), {"\"tau\"", "[3, 3]", "[3, 4]"});
  expect_named(refusal("W", w.select(0, 0)), {"\"W\"", "[4, 5, 6]", "[layers, query heads, d', head size]"});
  expect_named(refusal("W", w.to(Dtype::f64)), {"\"W\"", "f64", "f32, f16 or bf16"});
  expect_named(refusal("W", w.narrow(0, 0, 0)), {"\"W\"", "[0, 4, 5, 6]"});
  expect_named(refusal("g_phi.mlp.2.bias", {}), {"\"g_phi.mlp.2.bias\"", "missing", "[7]"});
  expect_named(refusal("g_phi.mlp.2.weight", parameters_.gate_weights[2]), {"\"g_phi.mlp.2.", "[4"});
  expect_named(refusal("g_phi.mlp.0.weight", parameters_.gate_weights[0].narrow(1, 0, 9)),
               {"\"g_phi.mlp.0.weight\"", "[7, 9]", "10"});
  expect_named(refusal("g_phi.mlp.1.weight", w), {"\"g_phi.mlp.1.weight\"", "not known"});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Array broken = w.clone();
    broken.data<float>()[17] = bad;
    expect_named(refusal("W", broken), {"\"W\"", "NaN or infinity"});
  }
  expect_named(refusal("W", w, {{"kvkeep_router", "2"}}), {"version 2", "allowed 1"});
  EXPECT_TRUE(refusal("W", w, {{"kvkeep_router", "1"}}).empty());
}

TEST_F(RoutingFile, IsNotReadWhereItIsMissingOrCut) {
  expect_named(refusal_of(folder_ / "nowhere.safetensors"), {"nowhere.safetensors"});
  write_routing(file_, parameters_);
  fs::resize_file(file_, fs::file_size(file_) - 4);
  expect_named(refusal_of(file_), {"small.router.safetensors"});
}

TEST_F(RoutingFile, SaysWhyItDoesNotFitAnotherModelAndWhichOneItWasTrainedOn) {
  write_routing(file_, parameters_, {{"model_name", "small"}});
  const Routing routing = Routing::read(file_);
  const auto only = [&](const std::function<void(ModelSpec&)>& change) {
    ModelSpec other = spec_;
    change(other);
    const auto found = routing.problems(other);
    EXPECT_EQ(found.size(), 1U);
    return found.empty() ? std::string() : found.front();
  };
  expect_named(only([](ModelSpec& s) { s.layers.resize(5); }), {"router: ", "3 layers", "5", "trained on small"});
  expect_named(only([](ModelSpec& s) { s.query_heads = 8; }), {"router: ", "4 query heads", "8", "trained on small"});
  expect_named(only([](ModelSpec& s) { s.query_heads = 0, s.kv_heads = 3; }),
               {"router: ", "4 query heads", "3 KV heads"});
  ModelSpec wide = spec_;
  wide.key_dim = 8;
  const auto found = routing.problems(wide);
  ASSERT_EQ(found.size(), 2U) << "W and the gates";
  expect_named(found[0], {"router: ", "6 numbers", "8"});
  expect_named(found[1], {"router: ", "gates", "6 numbers", "8"});
  ModelSpec unknown_heads = spec_;
  unknown_heads.query_heads = 0;
  EXPECT_TRUE(routing.problems(unknown_heads).empty());
}

TEST_F(RoutingFile, IsWrittenWholeOrNotAtAll) {
  write_routing(file_, parameters_, {{"model_name", "first"}});
  TrainedParameters broken = parameters_;
  broken.thresholds = parameters_.thresholds.narrow(0, 0, 2);
  EXPECT_THROW(write_routing(file_, broken), InvalidArgument);
  broken = parameters_;
  broken.gate_biases[1] = Array();
  EXPECT_THROW(write_routing(file_, broken), InvalidArgument);
  EXPECT_EQ(Routing::read(file_).model_name, "first");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  EXPECT_THROW(write_routing(folder_ / "no" / "folder.safetensors", parameters_), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::routing_file_test
