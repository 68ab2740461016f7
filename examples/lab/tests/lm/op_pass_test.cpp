// SPDX-License-Identifier: Apache-2.0
// The decoder by LibTorch's operators, which is how it runs off the CPU, against the decoder by its own kernels. The
// operators run on the CPU here.

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>

#include "decoder_model.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"
#include "kvlab/tasks.h"
#include "oracle/random_case.h"

namespace kvkeep::lm::op_pass_test {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<std::int32_t>;

io::ModelConfig llama(std::int32_t group) {
  return io::ModelConfig::shape(io::Architecture::llama, 3, 40, 56, 2 * group, 2, 12, 90);
}

std::vector<Model> models() {
  const io::ModelConfig qwen2 = io::ModelConfig::shape(io::Architecture::qwen2, 3, 72, 104, 6, 2, 20, 90);
  const auto slide = [](io::ModelConfig& config) {
    config.spec.layers[0] = {LayerKind::sliding, 1, -1};
    config.spec.layers[1] = {LayerKind::sliding, 11, -1};
  };
  return {
      {"llama", llama(1)},
      {"llama_group2", llama(2)},
      {"llama_group7", llama(7)},
      {"llama_interleaved", llama(2), Dtype::f32, RopeStyle::interleaved},
      with({"llama_every_bias", llama(2)},
           [](io::ModelConfig& config) { config.qkv_bias = config.output_bias = config.mlp_bias = true; }),
      {"llama_yarn", io::ModelConfig::shape(io::Architecture::llama, 3, 32, 48, 4, 2, 16, 90,
                                            {.type = io::RopeConfig::Type::yarn, .factor = 4.0, .original_max = 8})},
      {"qwen2", qwen2},
      with({"qwen2_sliding", qwen2}, slide),
      with({"qwen2_sliding_bf16", qwen2, Dtype::bf16}, slide),
      {"qwen2_f16", qwen2, Dtype::f16},
      with({"smollm3", io::ModelConfig::shape(io::Architecture::smollm3, 3, 40, 56, 4, 2, 12, 90)},
           [](io::ModelConfig& config) { config.spec.layers[1].rope = RopeSpec::absent(); }),
      with({"gemma3", io::ModelConfig::shape(io::Architecture::gemma3, 4, 40, 56, 4, 1, 12, 90, {.theta = 1e6})},
           [](io::ModelConfig& config) {
             for (LayerSpec& layer : config.spec.layers) layer.window = 11;
             config.spec.layers[1] = {};
           }),
      {"qwen3", io::ModelConfig::shape(io::Architecture::qwen3, 3, 32, 48, 4, 2, 24, 90)},
      with({"qwen3_tied_bf16", io::ModelConfig::shape(io::Architecture::qwen3, 3, 32, 48, 4, 2, 24, 90), Dtype::bf16},
           [](io::ModelConfig& config) { config.tied = true; })};
}

/// One model twice, over the same weights.
struct Pair {
  Decoder kernels, operators;

  explicit Pair(const Model& model) : Pair(model, weights_of(model)) {}
  Pair(const Model& model, const std::pair<io::ModelConfig, Weights>& read)
      : kernels(config_of(model, read.first), read.second), operators(config_of(model, read.first), read.second) {
    operators.use(Path::operators);
  }

 private:
  static std::pair<io::ModelConfig, Weights> weights_of(const Model& model) {
    const fs::path folder = fs::temp_directory_path() / text("kvkeep_op_pass_", ::getpid(), "_", model.name);
    write_random_checkpoint(folder, model.config, 21, model.dtype);
    io::ModelConfig config = io::ModelConfig::read(folder);
    Weights weights = Weights::read(folder, config);
    fs::remove_all(folder);  // mapped files stay readable
    return {std::move(config), std::move(weights)};
  }
  static io::ModelConfig config_of(const Model& model, io::ModelConfig config) {
    config.spec.rope.style = model.style;
    config.spec.layers = model.config.spec.layers;  // config.json has room for one window
    return config;
  }
};

std::vector<float> numbers(const at::Tensor& t) {
  const at::Tensor wide = t.to(at::kFloat).contiguous();
  return {wide.const_data_ptr<float>(), wide.const_data_ptr<float>() + wide.numel()};
}

/// Largest difference over largest value; what is NaN in one must be in the other.
double relative_difference(const at::Tensor& expected, const at::Tensor& found) {
  EXPECT_EQ(expected.sizes(), found.sizes());
  EXPECT_EQ(expected.scalar_type(), found.scalar_type());
  const std::vector<float> a = numbers(expected), b = numbers(found);
  double worst = 0, largest = 1e-6;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (std::isnan(a[i]) != std::isnan(b[i])) return INFINITY;
    if (std::isnan(a[i])) continue;
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
    largest = std::max(largest, std::abs(static_cast<double>(a[i])));
  }
  return worst / largest;
}

/// How a run stores its rows, and what it sees of them.
struct Storage {
  std::int64_t page_size = 0;  // 0: dense
  PageLayout layout = PageLayout::slot_head;
  Dtype dtype = Dtype::f32;
  bool ragged = false, masked = false;
};

std::vector<at::Tensor> tensors_of(const LayerKv& layer) {
  if (const auto* dense = std::get_if<DenseKv>(&layer)) return {dense->keys, dense->values};
  return {std::get<PagedKv>(layer).keys, std::get<PagedKv>(layer).values};
}

/// Prompts whole and in chunks, decoding by ones and more, several sequences with different numbers of tokens, rows cut
/// to different lengths between steps.
class Duel {
 public:
  static constexpr std::int32_t kSequences = 3, kCapacity = 96, kSteps = 5;

  Duel(Pair& pair, const Storage& storage, std::uint64_t seed)
      : pair_(pair), spec_(pair.kernels.spec()), storage_(storage), random_(seed) {
    lengths_.assign(static_cast<std::size_t>(kSequences * rows()), 0);
    a_ = make(pair.kernels);
    b_ = make(pair.operators);
    if (storage.page_size > 0) table_ = make_table();
  }

  void check() {
    const Ints parts[kSequences] = {{1, 40, 1, 1, 2}, {50, 1, 5, 1, 1}, {16, 2, 1, 30, 1}};  // new tokens a step
    const double tolerance = storage_.dtype == Dtype::f32   ? 1e-4
                             : storage_.dtype == Dtype::f16 ? 4e-3
                                                            : 3e-2;  // a number between two may be rounded to either
    for (std::size_t step = 0; step < kSteps; ++step) {
      Ints tokens, positions, indptr{0};
      for (std::size_t s = 0; s < kSequences; ++s) {
        for (std::int32_t t = 0; t < parts[s][step]; ++t) {
          tokens.push_back(random_.between(0, 89));
          positions.push_back(position_[s]++);
        }
        indptr.push_back(static_cast<std::int32_t>(tokens.size()));
      }
      const Ints places{2, 0, 1};
      const std::vector<at::Tensor> visible = storage_.masked ? masks() : std::vector<at::Tensor>{};
      const Lengths lengths{lengths_, static_cast<std::int32_t>(rows())};
      const Step one{tokens, indptr, positions, places, SlotCounts(lengths, spec_.kv_heads)};
      std::vector<at::Tensor> queries[2];
      const auto forward = [&](Decoder& decoder, const std::vector<LayerKv>& cache, std::vector<at::Tensor>& seen) {
        StepOptions options{.logits = step % 2 == 0 ? Logits::all : Logits::last, .visible = visible};
        options.on_layer = [&](const LayerSight& sight) {
          EXPECT_EQ(sight.layer, static_cast<std::int32_t>(seen.size()));
          seen.push_back(sight.queries.clone());
        };
        at::Tensor asked;
        std::size_t layers = 0;
        if (step % 2 == 0) {
          options.before_attention = [&](const LayerSight& sight) { asked = sight.queries; };
          options.view = [&](const LayerSight& sight, const Attended&) {
            EXPECT_EQ(asked.const_data_ptr(), sight.queries.const_data_ptr()) << "as parts::Folds::prefetch wants it";
            EXPECT_EQ(asked.strides(), sight.queries.strides());
            const RopeSpec& rope = spec_.rope_of(sight.layer);
            EXPECT_EQ(at::equal(seen[layers++], sight.queries), rope.style == RopeStyle::none) << "after RoPE";
            asked.reset();
          };
        }
        const at::Tensor logits = decoder.forward(one, cache, table_, options);
        EXPECT_EQ(layers, step % 2 == 0 ? a_.size() : 0);
        return logits;
      };
      const at::Tensor expected = forward(pair_.kernels, a_, queries[0]),
                       found = forward(pair_.operators, b_, queries[1]);
      ASSERT_LE(relative_difference(expected, found), tolerance) << "logits of step " << step;
      for (std::size_t l = 0; l < a_.size(); ++l) {
        ASSERT_LE(relative_difference(queries[0][l], queries[1][l]), tolerance)
            << "queries of step " << step << ", layer " << l;
        for (std::size_t side = 0; side < 2; ++side)
          ASSERT_LE(relative_difference(tensors_of(a_[l])[side], tensors_of(b_[l])[side]), tolerance)
              << "side " << side << " of step " << step << ", layer " << l;
      }
      for (std::size_t i = 0; i < lengths_.size(); ++i) {
        lengths_[i] += parts[i / rows()][step];
        if (storage_.ragged) lengths_[i] = random_.between(0, lengths_[i]);
      }
    }
  }

 private:
  [[nodiscard]] std::size_t rows() const { return static_cast<std::size_t>(spec_.num_layers() * spec_.kv_heads); }
  [[nodiscard]] std::int64_t pages_each() const { return (kCapacity + storage_.page_size - 1) / storage_.page_size; }

  /// Full of NaN: what may not be read would show, and so would a slot that is written and should not be.
  [[nodiscard]] std::vector<LayerKv> make(Decoder& decoder) const {
    std::vector<LayerKv> cache;
    if (storage_.page_size == 0) {
      const auto dense = decoder.make_cache(kSequences, kCapacity, storage_.dtype);
      cache.assign(dense.begin(), dense.end());
    } else {
      cache = decoder.make_pages(kSequences * pages_each() + 3, storage_.page_size, storage_.dtype, storage_.layout);
    }
    for (const LayerKv& layer : cache)
      for (const at::Tensor& side : tensors_of(layer)) side.fill_(NAN);
    return cache;
  }

  [[nodiscard]] at::Tensor make_table() {
    Ints pages(static_cast<std::size_t>(kSequences * pages_each() + 3));
    std::iota(pages.begin(), pages.end(), 0);
    for (std::size_t i = pages.size(); i > 1; --i)
      std::swap(pages[i - 1], pages[static_cast<std::size_t>(random_.between(0, static_cast<std::int32_t>(i) - 1))]);
    at::Tensor table = at::empty({kSequences, pages_each()}, at::TensorOptions(at::kInt));
    std::copy_n(pages.begin(), table.numel(), table.mutable_data_ptr<std::int32_t>());
    return table;
  }

  [[nodiscard]] std::vector<at::Tensor> masks() {
    const std::int64_t slots = storage_.page_size == 0 ? kCapacity : pages_each() * storage_.page_size;
    std::vector<at::Tensor> all;
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l) {
      all.push_back(at::ones({kSequences, spec_.kv_heads, slots}, at::TensorOptions(c10::ScalarType::Byte)));
      for (std::int64_t i = 0; i < all.back().numel(); ++i)
        all.back().mutable_data_ptr<std::uint8_t>()[i] = random_.between(0, 3) > 0 ? 1 : 0;
    }
    return all;
  }

  Pair& pair_;
  const ModelSpec& spec_;
  Storage storage_;
  oracle::Random random_;
  std::vector<LayerKv> a_, b_;
  at::Tensor table_;
  Ints lengths_, position_ = Ints(kSequences, 0);
};

class OpPass : public ::testing::TestWithParam<Model> {};
INSTANTIATE_TEST_SUITE_P(Models, OpPass, ::testing::ValuesIn(models()),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(OpPass, GivesTheLogitsQueriesKeysAndValuesOfTheKernelsInADenseCache) {
  Pair pair(GetParam());
  for (const bool ragged : {false, true})
    for (const bool masked : {false, true}) {
      SCOPED_TRACE(text(ragged ? "ragged " : "", masked ? "masked" : ""));
      Duel(pair, {.ragged = ragged, .masked = masked}, 3).check();
    }
}

TEST_P(OpPass, GivesTheSameInPagesOfEverySize) {
  Pair pair(GetParam());
  for (std::int64_t page_size = 1; page_size <= 1024; page_size *= 2)
    for (const PageLayout layout : {PageLayout::slot_head, PageLayout::head_slot}) {
      SCOPED_TRACE(text("pages of ", page_size));
      Duel(pair, {.page_size = page_size, .layout = layout}, 4).check();
      Duel(pair, {.page_size = page_size, .layout = layout, .ragged = true, .masked = page_size % 3 == 1}, 5).check();
    }
}

TEST_P(OpPass, RoundsWhatItStoresInHalfPrecision) {
  Pair pair(GetParam());
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16})
    for (const std::int64_t page_size : {0, 8})
      Duel(pair, {.page_size = page_size, .dtype = dtype, .ragged = true}, 6).check();
}

// More logits than are made at once: the prompt goes through in blocks.
TEST(OpPassBlocks, CutALongPromptWithoutATrace) {
  for (const bool sliding : {false, true}) {
    Model model{sliding ? "long_sliding" : "long",
                io::ModelConfig::shape(io::Architecture::llama, 2, 32, 32, 14, 2, 8, 50)};
    if (sliding) model.config.spec.layers[0] = {LayerKind::sliding, 70, -1};
    Pair pair(model);
    constexpr std::int32_t kTokens = 1700;
    Ints ids(kTokens), positions(kTokens);
    for (std::int32_t i = 0; i < kTokens; ++i)
      ids[static_cast<std::size_t>(i)] = i * 7 % 50, positions[static_cast<std::size_t>(i)] = i;
    const Ints indptr{0, kTokens}, row{0}, none{0};
    const Step step{ids, indptr, positions, row, none};
    const at::Tensor expected =
        pair.kernels.forward(step, pair.kernels.make_cache(1, kTokens), {.logits = Logits::all});
    EXPECT_LE(relative_difference(expected, pair.operators.forward(step, pair.operators.make_cache(1, kTokens),
                                                                   {.logits = Logits::all})),
              1e-4);
  }
}

TEST(OpPassCalls, HonourStridesGapsInPositionsAndStepsWithoutLogits) {
  Model model{"calls", llama(2)};
  model.config.spec.layers[1] = {LayerKind::sliding, 4, -1};
  Pair pair(model);
  const auto plain = pair.kernels.make_cache(1, 16);
  std::vector<LayerCache> strided;
  for (int l = 0; l < 3; ++l) {
    const at::Tensor rows = at::full({16, 1, 2, 30}, 7, at::TensorOptions(at::kFloat))
                                .permute({1, 2, 0, 3});  // [slot, B, head, K and V side by side, padded]
    strided.push_back({rows.narrow(3, 0, 12), rows.narrow(3, 15, 12)});
  }
  const Ints ids{3, 1, 4, 1, 5}, indptr{0, 5}, positions{2, 3, 7, 8, 20}, row{0}, none{0};
  const Step step{ids, indptr, positions, row, none};
  EXPECT_LE(relative_difference(pair.kernels.forward(step, plain), pair.operators.forward(step, strided)), 1e-4);
  for (std::size_t l = 0; l < 3; ++l) {
    EXPECT_LE(relative_difference(plain[l].keys.narrow(2, 0, 5), strided[l].keys.narrow(2, 0, 5)), 1e-4);
    const std::vector<float> behind = numbers(strided[l].values.narrow(2, 5, 11));
    EXPECT_TRUE(std::all_of(behind.begin(), behind.end(), [](float x) { return x == 7; }));
  }
  const at::Tensor nothing = pair.operators.forward(step, strided, {.logits = Logits::none});
  EXPECT_EQ(nothing.sizes(), (std::vector<std::int64_t>{0, 90}));
}

TEST(OpPassDevices, RefuseWhatLiesElsewhereBeforeAnythingIsWritten) {
  Pair pair({"devices", llama(2)});
  const at::Device elsewhere(at::kMeta);
  const auto dense = pair.operators.make_cache(1, 4);
  const auto pages = pair.operators.make_pages(2, 4);
  for (std::size_t l = 0; l < 3; ++l)
    torch_tensor(dense[l].keys).fill_(7), torch_tensor(std::get<PagedKv>(pages[l]).keys).fill_(7);
  const at::Tensor table = at::full({1, 2}, 1, at::TensorOptions(at::kInt));
  const Ints ids{3}, indptr{0, 1}, zero{0};
  const Step step{ids, indptr, zero, zero, zero};
  const auto refused = [&](const std::function<void()>& call, const std::string& sentence) {
    try {
      call();
      ADD_FAILURE() << "accepted, should say " << sentence;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.what(), sentence);
    }
  };
  for (Decoder* decoder : {&pair.kernels, &pair.operators}) {
    auto moved = dense;
    moved[1].values = torch_tensor(moved[1].values).to(elsewhere);
    refused([&] { static_cast<void>(decoder->forward(step, moved)); },
            "decoder step: values of layer 1 are on other:0; allowed cpu, where the weights are");
    refused([&] { static_cast<void>(decoder->forward(step, pages, table.to(elsewhere))); },
            "decoder step: the block table is on meta; allowed host memory");
    std::vector<at::Tensor> visible(3, at::ones({1, 2, 4}, at::TensorOptions(c10::ScalarType::Byte)));
    visible[2] = visible[2].to(elsewhere);
    refused([&] { static_cast<void>(decoder->forward(step, dense, {.visible = visible})); },
            "decoder step: visible of layer 2 is on meta; allowed cpu, where the weights are");
  }
  Weights weights = pair.kernels.weights();
  weights.embedding = weights.embedding.to(elsewhere);
  Decoder abroad(pair.kernels.config(), std::move(weights));
  EXPECT_EQ(abroad.device(), device_of(elsewhere));
  EXPECT_EQ(abroad.make_cache(1, 4)[0].keys.device(), device_of(elsewhere));
  EXPECT_EQ(std::get<PagedKv>(abroad.make_pages(2, 4)[0]).values.device(), device_of(elsewhere));
  refused([&] { static_cast<void>(abroad.forward(step, dense)); },
          "decoder step: keys of layer 0 are on cpu; allowed other:0, where the weights are");
  refused([&] { abroad.use(Path::kernels); },
          "decoder: it has kernels for the CPU only; given weights on other:0; allowed operators there");
  refused([&] { pair.kernels.to(device_of(elsewhere)); }, "tensor: on other:0; allowed cpu and cuda");
  refused([&] { Generator(abroad, make_policy("full"), {.capacity = 4}); },
          "generate: the decoder is on other:0 and the keeper works on cpu; allowed one device, named by "
          "GeneratorOptions::accelerator if it is not the CPU");
  for (std::size_t l = 0; l < 3; ++l) {
    const std::vector<float> keys = numbers(dense[l].keys), paged = numbers(std::get<PagedKv>(pages[l]).keys);
    EXPECT_TRUE(std::all_of(keys.begin(), keys.end(), [](float x) { return x == 7; }) &&
                std::all_of(paged.begin(), paged.end(), [](float x) { return x == 7; }));
  }
}

TEST(OpPassDevices, NameADeviceThatIsNotThereAndLeaveTheWeightsWhereTheyWere) {
  Pair pair({"absent", llama(2)});
  try {
    pair.kernels.to({Device::Kind::cuda, 99});
    ADD_FAILURE() << "moved to a device that no test machine has";
  } catch (const DeviceError& error) {
    const std::string said = error.what();
    EXPECT_TRUE(said.starts_with("weights: LibTorch cannot put them on cuda:99 (")) << said;
    EXPECT_TRUE(said.ends_with("; allowed a device that it has, with room for them")) << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  }
  EXPECT_TRUE(pair.kernels.device().is_cpu());
}

TEST(OpPassGeneration, SaysWhatTheShippedModelSaysWithAndWithoutEviction) {
  Decoder kernels = Decoder::open(KVKEEP_TEST_MODEL_DIR), operators = Decoder::open(KVKEEP_TEST_MODEL_DIR);
  operators.use(Path::operators);
  for (const char* policy :
       {"full", "ams-tova,budget=96,interval=32", "adakv-snapkv,budget=96,interval=32", "tova,budget=96,interval=32"})
    for (const std::int32_t page_size : {0, 16}) {
      SCOPED_TRACE(text(policy, ", pages of ", page_size));
      std::vector<Request> requests;
      for (std::uint64_t seed = 5; seed < 8; ++seed) {
        const TaskSample sample = make_task("chain", seed, {.length = 256});
        requests.push_back(
            {.prompt = {sample.ids.begin(), sample.ids.begin() + sample.prompt_length}, .new_tokens = 60});
      }
      const auto run = [&](Decoder& decoder) {
        return generate(decoder, make_policy(policy), requests, {.places = 2, .page_size = page_size});
      };
      const GenerationRun expected = run(kernels), found = run(operators);
      EXPECT_EQ(expected.totals.events > 0, std::string(policy) != "full");
      EXPECT_EQ(expected.totals.events, found.totals.events);
      for (std::size_t i = 0; i < requests.size(); ++i)
        EXPECT_EQ(expected.completions[i].tokens, found.completions[i].tokens) << i;
    }
}

}  // namespace
}  // namespace kvkeep::lm::op_pass_test
