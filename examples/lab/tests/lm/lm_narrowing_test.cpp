// SPDX-License-Identifier: Apache-2.0
// Tokens of a step that stay behind while the others go on to deeper layers, against a plain second decoder, against
// itself step by step, and by LibTorch's operators.

#include <ATen/Parallel.h>
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>

#include "decoder_model.h"
#include "kvkeep/core/error.h"
#include "kvlab/decoder.h"
#include "narrowed_decoder.h"
#include "oracle/random_case.h"

namespace kvkeep::lm::lm_narrowing_test {
namespace {

namespace fs = std::filesystem;

// ---- Models

std::vector<Model> models() {
  const io::ModelConfig llama = io::ModelConfig::shape(io::Architecture::llama, 9, 40, 56, 6, 2, 12, 90),
                        qwen2 = io::ModelConfig::shape(io::Architecture::qwen2, 10, 48, 64, 4, 2, 16, 90);
  return {
      {"llama", llama},
      {"llama_interleaved_f16", llama, Dtype::f16, RopeStyle::interleaved},
      with({"llama_every_bias", llama},
           [](io::ModelConfig& config) { config.qkv_bias = config.output_bias = config.mlp_bias = true; }),
      {"llama_yarn", io::ModelConfig::shape(io::Architecture::llama, 9, 32, 48, 7, 1, 16, 90,
                                            {.type = io::RopeConfig::Type::yarn, .factor = 4.0, .original_max = 8})},
      {"qwen2_24_layers", io::ModelConfig::shape(io::Architecture::qwen2, 24, 32, 48, 4, 2, 8, 90)},
      {"qwen2_bf16", qwen2, Dtype::bf16},
      with({"qwen2_sliding", qwen2},
           [](io::ModelConfig& config) {
             config.spec.layers[3] = {LayerKind::sliding, 11, -1};
             config.spec.layers[8] = {LayerKind::sliding, 5, -1};
           }),
      with({"gemma3", io::ModelConfig::shape(io::Architecture::gemma3, 9, 40, 56, 4, 2, 12, 90, {.theta = 1e6})},
           [](io::ModelConfig& config) {
             for (std::size_t l = 0; l < config.spec.layers.size(); ++l) {
               config.spec.layers[l].window = 5;
               if (l != 3 && l != 8) config.spec.layers[l] = {};
             }
           }),
      with({"qwen3_tied_bf16", io::ModelConfig::shape(io::Architecture::qwen3, 11, 32, 48, 4, 4, 24, 90), Dtype::bf16},
           [](io::ModelConfig& config) { config.tied = true; })};
}

Decoder make_decoder(const Model& model) {
  const fs::path folder = fs::temp_directory_path() / text("kvkeep_narrowing_", ::getpid(), "_", model.name);
  write_random_checkpoint(folder, model.config, 21, model.dtype);
  io::ModelConfig config = io::ModelConfig::read(folder);
  Weights weights = Weights::read(folder, config);
  fs::remove_all(folder);  // mapped files stay readable
  config.spec.rope.style = model.style;
  config.spec.layers = model.config.spec.layers;  // config.json has room for one window
  return {std::move(config), std::move(weights)};
}

Ints random_ids(std::int32_t n, oracle::Random& random) {
  Ints ids(static_cast<std::size_t>(n));
  for (auto& id : ids) id = random.between(0, 89);
  return ids;
}

// ---- Who goes on

/// A prompt of `tokens` that narrows behind each of `layers`, to fewer each time; the newest `always` go on.
Plan random_plan(std::int32_t tokens, std::initializer_list<std::int32_t> layers, oracle::Random& random,
                 std::int32_t always = 1) {
  Plan plan{{}, tokens};
  Ints there = counted(0, tokens);
  for (const std::int32_t layer : layers) {
    Ints kept;
    for (const std::int32_t p : there)
      if (p >= tokens - always || random.chance(0.5)) kept.push_back(p);
    plan.behind[layer] = there = kept;
  }
  return plan;
}

using Hook = std::function<std::optional<Onward>(const LayerSight&)>;

/// Follows the plans of the step's sequences.
Hook follow(std::vector<Plan> plans) {
  return [plans = std::move(plans)](const LayerSight& sight) -> std::optional<Onward> {
    Onward onward{{}, {0}};
    bool asked = false;
    for (std::size_t s = 0; s < plans.size(); ++s) {
      const Ints there(sight.positions.begin() + sight.indptr[s], sight.positions.begin() + sight.indptr[s + 1]);
      const Ints kept = plans[s].among(there, sight.layer);
      for (std::size_t i = 0; i < there.size(); ++i)
        if (std::binary_search(kept.begin(), kept.end(), there[i]))
          onward.tokens.push_back(sight.indptr[s] + static_cast<std::int32_t>(i));
      onward.indptr.push_back(static_cast<std::int32_t>(onward.tokens.size()));
      asked = asked || plans[s].behind.contains(sight.layer);
    }
    if (!asked) return std::nullopt;
    return onward;
  };
}

// ---- Comparing

std::vector<double> numbers(const at::Tensor& t) {
  const at::Tensor wide = t.to(kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

/// Largest difference over largest value; what is NaN in one must be in the other.
double relative_difference(const at::Tensor& expected, const at::Tensor& found) {
  EXPECT_EQ(expected.sizes(), found.sizes());
  const std::vector<double> a = numbers(expected), b = numbers(found);
  double worst = 0, largest = 1e-6;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (std::isnan(a[i]) != std::isnan(b[i])) return INFINITY;
    if (std::isnan(a[i])) continue;
    worst = std::max(worst, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(a[i]));
  }
  return worst / largest;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

bool all_nan(const at::Tensor& t) { return t.isnan().all().item<bool>(); }
bool all_equal(const at::Tensor& t, float value) { return t.eq(value).all().item<bool>(); }

std::vector<at::Tensor> tensors_of(const LayerKv& layer) {
  if (const auto* dense = std::get_if<DenseKv>(&layer)) return {dense->keys, dense->values};
  return {std::get<PagedKv>(layer).keys, std::get<PagedKv>(layer).values};
}

// ---- Running

struct Storage {
  std::int64_t page_size = 0;  // 0: dense
  PageLayout layout = PageLayout::slot_head;
  Dtype dtype = Dtype::f32;
};

/// What one sequence brings to a step.
struct Part {
  std::int32_t sequence;
  Ints ids;
  Plan plan = {};
};

/// Sequences over a cache of their own, with as many slots in each layer as tokens came there. Unused slots hold 7.
class Runner {
 public:
  Runner(Decoder& decoder, std::int32_t sequences, std::int32_t capacity, const Storage& storage = {})
      : decoder_(decoder),
        spec_(decoder.spec()),
        sequences_(sequences),
        tokens(static_cast<std::size_t>(sequences), 0) {
    lengths.assign(static_cast<std::size_t>(sequences),
                   Ints(static_cast<std::size_t>(spec_.num_layers() * spec_.kv_heads), 0));
    if (storage.page_size == 0) {
      const auto dense = decoder.make_cache(sequences, capacity, storage.dtype);
      cache.assign(dense.begin(), dense.end());
    } else {
      const std::int64_t pages = (capacity + storage.page_size - 1) / storage.page_size;
      cache = decoder.make_pages(sequences * pages, storage.page_size, storage.dtype, storage.layout);
      table = at::empty({sequences, pages}, at::TensorOptions(at::kInt));
      for (std::int64_t i = 0; i < table.numel(); ++i)
        table.mutable_data_ptr<std::int32_t>()[i] = static_cast<std::int32_t>(table.numel() - 1 - i);
    }
    for (const LayerKv& layer : cache)
      for (const at::Tensor& side : tensors_of(layer)) side.fill_(7);
  }

  [[nodiscard]] std::int64_t place_of(std::int32_t sequence) const { return sequences_ - 1 - sequence; }

  /// `hook`: instead of the one that follows the parts' plans. Slots in use are counted by the plans.
  at::Tensor step(const std::vector<Part>& parts, Logits logits = Logits::last, const Hook& hook = {}) {
    Ints ids, positions, indptr{0}, rows;
    counts.clear();
    std::vector<Plan> plans;
    for (const Part& part : parts) {
      const auto s = static_cast<std::size_t>(part.sequence);
      ids.insert(ids.end(), part.ids.begin(), part.ids.end());
      const Ints at = counted(tokens[s], static_cast<std::int32_t>(part.ids.size()));
      positions.insert(positions.end(), at.begin(), at.end());
      indptr.push_back(static_cast<std::int32_t>(ids.size()));
      rows.push_back(static_cast<std::int32_t>(place_of(part.sequence)));
      counts.insert(counts.end(), lengths[s].begin(), lengths[s].end());
      plans.push_back(part.plan);
    }
    StepOptions options{.logits = logits};
    const Hook says = hook ? hook : follow(plans);
    options.on_layer = [&](const LayerSight& sight) { note(parts, sight, 0); };
    options.on_attended = [&](const LayerSight& sight) {
      note(parts, sight, 1);
      return says(sight);
    };
    const Lengths all{counts, static_cast<std::int32_t>(spec_.num_layers() * spec_.kv_heads)};
    const at::Tensor result =
        decoder_.forward({ids, indptr, positions, rows, SlotCounts(all, spec_.kv_heads)}, cache, table, options);
    for (std::size_t i = 0; i < parts.size(); ++i) count(parts[i]);
    return result;
  }

  /// Step by step what the queries of a sequence were: by sequence, layer, 0 before RoPE and 1 behind; with their
  /// positions.
  std::map<std::tuple<std::int32_t, std::int32_t, int>, std::vector<std::pair<at::Tensor, Ints>>> seen;
  std::vector<LayerKv> cache;
  at::Tensor table;
  std::vector<Ints> lengths;  // by sequence: of each layer and head
  Ints counts;                // what the step at hand reads of them

 private:
  void note(const std::vector<Part>& parts, const LayerSight& sight, int when) {
    ASSERT_EQ(sight.indptr.size(), parts.size() + 1);
    ASSERT_EQ(sight.indptr.back(), static_cast<std::int64_t>(sight.positions.size()));
    ASSERT_EQ(sight.queries.sizes(),
              (std::vector<std::int64_t>{sight.indptr.back(), spec_.query_heads, spec_.key_dim}));
    for (std::size_t s = 0; s < parts.size(); ++s) {
      const std::int32_t begin = sight.indptr[s], end = sight.indptr[s + 1];
      seen[{parts[s].sequence, sight.layer, when}].emplace_back(
          sight.queries.narrow(0, begin, end - begin).clone(),
          Ints(sight.positions.begin() + begin, sight.positions.begin() + end));
    }
  }

  void count(const Part& part) {
    const auto s = static_cast<std::size_t>(part.sequence);
    const Ints all = counted(tokens[s], static_cast<std::int32_t>(part.ids.size()));
    for (std::int32_t row = 0; row < spec_.num_layers() * spec_.kv_heads; ++row)
      lengths[s][static_cast<std::size_t>(row)] +=
          static_cast<std::int32_t>(part.plan.present(all, row / spec_.kv_heads).size());
    tokens[s] += static_cast<std::int32_t>(part.ids.size());
  }

  Decoder& decoder_;
  const ModelSpec& spec_;
  std::int32_t sequences_;

 public:
  Ints tokens;  // by sequence: how many came
};

void expect_same_bits(Runner& a, Runner& b, const std::string& what) {
  ASSERT_EQ(a.cache.size(), b.cache.size());
  for (std::size_t l = 0; l < a.cache.size(); ++l)
    for (std::size_t side = 0; side < 2; ++side)
      EXPECT_TRUE(same_bits(tensors_of(a.cache[l])[side], tensors_of(b.cache[l])[side]))
          << what << ": side " << side << " of layer " << l;
  ASSERT_EQ(a.seen.size(), b.seen.size()) << what;
  for (const auto& [key, steps] : a.seen) {
    const auto& others = b.seen.at(key);
    ASSERT_EQ(steps.size(), others.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i].second, others[i].second) << what;
      EXPECT_TRUE(same_bits(steps[i].first, others[i].first))
          << what << ": queries of sequence " << std::get<0>(key) << ", layer " << std::get<1>(key);
    }
  }
}

// ---- Against the plain decoder

class Narrowing : public ::testing::TestWithParam<Model> {
 protected:
  Narrowing() : decoder_(make_decoder(GetParam())), layers_(decoder_.spec().num_layers()) {}
  /// What the deepest window of the model reaches.
  [[nodiscard]] std::int32_t always() const {
    std::int32_t widest = 1;
    for (const LayerSpec& layer : decoder_.spec().layers)
      if (layer.kind == LayerKind::sliding) widest = std::max(widest, layer.window);
    return widest;
  }
  Decoder decoder_;
  std::int32_t layers_;
};
INSTANTIATE_TEST_SUITE_P(Models, Narrowing, ::testing::ValuesIn(models()),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(Narrowing, GivesTheLogitsOfAPlainDecoderWhoseRowsAreGatheredAndSoDoTheStepsBehindIt) {
  const Plain plain(decoder_);
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(text("seed ", seed));
    oracle::Random random(seed);
    const std::int32_t tokens = random.between(20, 60), one = random.between(0, layers_ - 3),
                       two = random.between(one + 1, layers_ - 1);
    const Plan plan = seed % 2 == 0 ? random_plan(tokens, {one}, random, always())
                                    : random_plan(tokens, {one, two}, random, always());
    Ints ids = random_ids(tokens, random);
    Runner run(decoder_, 1, tokens + 8);
    const at::Tensor first = run.step({{0, ids, plan}});
    Plain::Result expected = plain.run(ids, plan);
    ASSERT_EQ(expected.positions.back(), tokens - 1);
    EXPECT_LE(relative_difference(expected.logits.narrow(0, expected.logits.size(0) - 1, 1), first), 1e-5);
    for (std::int32_t l = 0; l < layers_; ++l) {
      const auto& [queries, positions] = run.seen.at({0, l, 1}).at(0);
      EXPECT_EQ(positions, plan.present(counted(0, tokens), l));
      EXPECT_LE(relative_difference(expected.queries[static_cast<std::size_t>(l)], queries), 1e-5) << "layer " << l;
    }
    // What follows stands at positions tokens, tokens + 1, ..., over layers of different length.
    for (const std::int32_t more : {1, 3, 1}) {
      const Ints next = random_ids(more, random);
      ids.insert(ids.end(), next.begin(), next.end());
      const at::Tensor found = run.step({{0, next}}, Logits::all);
      expected = plain.run(ids, plan);
      EXPECT_LE(relative_difference(expected.logits.narrow(0, expected.logits.size(0) - more, more), found), 1e-5)
          << more << " tokens later";
    }
  }
}

// Fed token by token, a full model whose deeper layers show the tokens that go on and nobody else computes the same.
TEST_P(Narrowing, GivesWhatAFullModelGivesWhoseDeeperLayersAreMasked) {
  oracle::Random random(3);
  constexpr std::int32_t kTokens = 40, kMore = 6;
  const Plan plan = random_plan(kTokens, {2, 5}, random, always());
  const Ints ids = random_ids(kTokens + kMore, random);
  Runner run(decoder_, 1, kTokens + kMore);
  std::vector<at::Tensor> found{run.step({{0, {ids.begin(), ids.begin() + kTokens}, plan}})};
  for (std::int32_t t = kTokens; t < kTokens + kMore; ++t)
    found.push_back(run.step({{0, {ids[static_cast<std::size_t>(t)]}}}));

  const auto full = decoder_.make_cache(1, kTokens + kMore);
  std::vector<at::Tensor> visible;
  for (std::int32_t l = 0; l < layers_; ++l) {
    visible.push_back(
        at::ones({1, decoder_.spec().kv_heads, kTokens + kMore}, at::TensorOptions(at::ScalarType::Byte)));
    visible.back().narrow(2, 0, kTokens).zero_();
    for (const std::int32_t p : plan.present(counted(0, kTokens), l)) visible.back().select(2, p).fill_(1);
  }
  const Ints indptr{0, 1}, row{0};
  for (std::int32_t t = 0; t < kTokens + kMore; ++t) {
    const Ints id{ids[static_cast<std::size_t>(t)]}, at{t};
    const at::Tensor expected = decoder_.forward({id, indptr, at, row, at}, full, {.visible = visible});
    if (t >= kTokens - 1)
      EXPECT_LE(relative_difference(expected, found[static_cast<std::size_t>(t - kTokens + 1)]), 2e-5)
          << "position " << t;
  }
}

// ---- Bit for bit

TEST_P(Narrowing, ChangesNothingWhereEveryoneGoesOn) {
  oracle::Random random(4);
  const Ints a = random_ids(33, random), b = random_ids(9, random);
  const Hook nothing = [](const LayerSight&) { return std::nullopt; };
  const Hook everyone = [](const LayerSight& sight) {
    return Onward{counted(0, static_cast<std::int32_t>(sight.positions.size())),
                  {sight.indptr.begin(), sight.indptr.end()}};
  };
  for (const Path path : {Path::kernels, Path::operators}) {
    decoder_.use(path);
    for (const Logits logits : {Logits::last, Logits::all}) {
      const auto cache = decoder_.make_cache(2, 40);
      for (const LayerCache& layer : cache) torch_tensor(layer.keys).fill_(7), torch_tensor(layer.values).fill_(7);
      Ints ids = a, positions = counted(0, 33);
      ids.insert(ids.end(), b.begin(), b.end());
      const Ints rest = counted(0, 9), indptr{0, 33, 42}, rows{1, 0}, none{0, 0};
      positions.insert(positions.end(), rest.begin(), rest.end());
      const at::Tensor expected = decoder_.forward({ids, indptr, positions, rows, none}, cache, {.logits = logits});
      for (const Hook& hook : {nothing, everyone}) {
        Runner run(decoder_, 2, 40);
        EXPECT_TRUE(same_bits(expected, run.step({{0, a}, {1, b}}, logits, hook)));
        for (std::size_t l = 0; l < cache.size(); ++l)
          EXPECT_TRUE(same_bits(cache[l].keys, tensors_of(run.cache[l])[0]) &&
                      same_bits(cache[l].values, tensors_of(run.cache[l])[1]))
              << l;
      }
    }
  }
}

TEST_P(Narrowing, BehindTheLastLayerChangesNoLogit) {
  oracle::Random random(5);
  const Ints ids = random_ids(37, random);
  Runner plain(decoder_, 1, 40), narrowed(decoder_, 1, 40);
  const at::Tensor expected = plain.step({{0, ids}});
  EXPECT_TRUE(same_bits(expected, narrowed.step({{0, ids, random_plan(37, {layers_ - 1}, random)}})));
  expect_same_bits(plain, narrowed, "the cache");
}

TEST_P(Narrowing, APromptGivesTheSameBitsHoweverItIsCutIntoSteps) {
  oracle::Random random(6);
  constexpr std::int32_t kTokens = 80;
  const Ints ids = random_ids(kTokens, random);
  Plan plan{{}, kTokens};
  Ints there = counted(0, kTokens);
  for (const std::int32_t layer : {1, 4}) {
    Ints kept;
    for (const std::int32_t p : there)
      if (p % 20 >= 20 - always() || random.chance(0.3)) kept.push_back(p);  // the newest of every step below, and some
    plan.behind[layer] = there = kept;
  }
  Runner whole(decoder_, 1, kTokens);
  const at::Tensor expected = whole.step({{0, ids, plan}});
  for (const std::int32_t chunk : {20, 40, 60}) {
    Runner run(decoder_, 1, kTokens);
    at::Tensor found;
    for (std::int32_t done = 0; done < kTokens; done += chunk)
      found = run.step({{0, {ids.begin() + done, ids.begin() + std::min(done + chunk, kTokens)}, plan}});
    EXPECT_TRUE(same_bits(expected, found)) << "chunks of " << chunk;
    EXPECT_EQ(whole.lengths, run.lengths);
    for (std::size_t l = 0; l < whole.cache.size(); ++l)
      for (std::size_t side = 0; side < 2; ++side)
        EXPECT_TRUE(same_bits(tensors_of(whole.cache[l])[side], tensors_of(run.cache[l])[side]))
            << "chunks of " << chunk << ", layer " << l;
  }
}

/// Prompts that narrow at layers of their own beside others that do not, sequences that decode and one that continues
/// its prompt; then all of them decode.
std::vector<std::vector<Part>> ragged_steps(std::uint64_t seed, std::int32_t layers, std::int32_t always) {
  oracle::Random random(seed);
  const auto part = [&](std::int32_t sequence, std::int32_t n, std::initializer_list<std::int32_t> at) {
    return Part{sequence, random_ids(n, random), at.size() == 0 ? Plan{} : random_plan(n, at, random, always)};
  };
  std::vector<std::vector<Part>> steps{
      {part(0, 20, {}), part(4, 31, {0, 6})},
      {part(0, 1, {}), part(1, 150, {2, 6}), part(2, 90, {4}), part(3, 70, {}), part(4, 1, {})},
      {part(3, 61, {}), part(1, 1, {}), part(5, 64, {layers - 1}), part(0, 2, {})},
      {part(5, 1, {}), part(4, 3, {}), part(3, 1, {}), part(2, 1, {}), part(1, 1, {}), part(0, 1, {})}};
  steps[2][0].plan = {{{5, counted(70 + 61 - always - 3, always + 3)}},
                      131};  // the second half of a prompt narrows, the first did not
  return steps;
}

TEST_P(Narrowing, NoSequenceEntersAnothersResult) {
  const auto steps = ragged_steps(7, layers_, always());
  Runner together(decoder_, 6, 160), alone(decoder_, 6, 160);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const at::Tensor batch = together.step(steps[i]);
    for (std::size_t s = 0; s < steps[i].size(); ++s)
      EXPECT_TRUE(same_bits(batch.narrow(0, static_cast<std::int64_t>(s), 1), alone.step({steps[i][s]})))
          << "step " << i << ", sequence " << steps[i][s].sequence;
  }
  EXPECT_EQ(together.lengths, alone.lengths);
  expect_same_bits(together, alone, "together and alone");
}

// Large enough that every stage is really shared out.
TEST(NarrowingThreads, ChangeNoBit) {
  Decoder decoder = make_decoder(
      {"threads", io::ModelConfig::shape(io::Architecture::qwen3, 9, 192, 448, 8, 2, 24, 2000), Dtype::bf16});
  const auto steps = ragged_steps(8, 9, 1);
  const int before = at::get_num_threads();
  std::vector<std::unique_ptr<Runner>> runs;
  std::vector<std::vector<at::Tensor>> results;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    runs.push_back(std::make_unique<Runner>(decoder, 6, 160));
    results.emplace_back();
    for (const auto& parts : steps) results.back().push_back(runs.back()->step(parts));
  }
  at::set_num_threads(before);
  for (std::size_t run = 1; run < runs.size(); ++run) {
    for (std::size_t i = 0; i < steps.size(); ++i)
      EXPECT_TRUE(same_bits(results[0][i], results[run][i])) << run + 1 << " threads, step " << i;
    expect_same_bits(*runs[0], *runs[run], text(run + 1, " threads"));
  }
}

TEST_P(Narrowing, GivesTheSameBitsOnPagesAsOnADenseCache) {
  const auto steps = ragged_steps(9, layers_, always());
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    Runner dense(decoder_, 6, 160, {.dtype = dtype});
    std::vector<at::Tensor> expected;
    for (const auto& parts : steps) expected.push_back(dense.step(parts));
    for (const std::int64_t page_size : {1, 8, 32})
      for (const PageLayout layout : {PageLayout::slot_head, PageLayout::head_slot}) {
        Runner paged(decoder_, 6, 160, {page_size, layout, dtype});
        for (std::size_t i = 0; i < steps.size(); ++i)
          EXPECT_TRUE(same_bits(expected[i], paged.step(steps[i]))) << "pages of " << page_size << ", step " << i;
        for (const auto& [key, seen] : dense.seen)
          for (std::size_t i = 0; i < seen.size(); ++i)
            EXPECT_TRUE(same_bits(seen[i].first, paged.seen.at(key)[i].first)) << "pages of " << page_size;
      }
  }
}

// ---- By operators

TEST_P(Narrowing, ByOperatorsGivesTheSameNumbers) {
  const auto steps = ragged_steps(10, layers_, always());
  Decoder operators = make_decoder(GetParam());
  operators.use(Path::operators);
  for (const Storage& storage : {Storage{}, Storage{16, PageLayout::head_slot}, Storage{8, PageLayout::slot_head}}) {
    Runner expected(decoder_, 6, 160, storage), found(operators, 6, 160, storage);
    for (std::size_t i = 0; i < steps.size(); ++i)
      ASSERT_LE(relative_difference(expected.step(steps[i]), found.step(steps[i])), 1e-4) << "step " << i;
    for (std::size_t l = 0; l < expected.cache.size(); ++l)
      for (std::size_t side = 0; side < 2; ++side)
        EXPECT_LE(relative_difference(tensors_of(expected.cache[l])[side], tensors_of(found.cache[l])[side]), 1e-4)
            << "layer " << l;
    ASSERT_EQ(expected.seen.size(), found.seen.size());
    for (const auto& [key, seen] : expected.seen)
      for (std::size_t i = 0; i < seen.size(); ++i) {
        EXPECT_EQ(seen[i].second, found.seen.at(key)[i].second);
        EXPECT_LE(relative_difference(seen[i].first, found.seen.at(key)[i].first), 1e-4)
            << "layer " << std::get<1>(key);
      }
  }
}

// ---- What the hook may do, and sequences that leave

class NarrowingCalls : public ::testing::TestWithParam<Path> {
 protected:
  NarrowingCalls()
      : decoder_(make_decoder({"calls", io::ModelConfig::shape(io::Architecture::llama, 9, 40, 56, 6, 2, 12, 90)})) {
    decoder_.use(GetParam());
  }
  Decoder decoder_;
};
INSTANTIATE_TEST_SUITE_P(Paths, NarrowingCalls, ::testing::Values(Path::kernels, Path::operators),
                         [](const auto& p) { return p.param == Path::kernels ? "Kernels" : "Operators"; });

TEST_P(NarrowingCalls, ReadNothingMoreOfALayerOnceTheirHookHasSeenIt) {
  oracle::Random random(11);
  const Ints ids = random_ids(30, random), more = random_ids(12, random);
  const Plan plan = random_plan(42, {3, 6}, random);
  for (const std::int64_t page_size : {0, 8}) {
    Runner left(decoder_, 1, 48, {.page_size = page_size}), cut(decoder_, 1, 48, {.page_size = page_size});
    for (Runner* run : {&left, &cut}) run->step({{0, ids}});
    const at::Tensor expected = left.step({{0, more, plan}});
    std::int32_t expected_layer = 0;
    const at::Tensor found = cut.step({{0, more, plan}}, Logits::last, [&](const LayerSight& sight) {
      EXPECT_EQ(sight.layer, expected_layer++);
      for (const at::Tensor& side : tensors_of(cut.cache[static_cast<std::size_t>(sight.layer)])) side.fill_(NAN);
      for (std::int32_t head = 0; head < 2; ++head) cut.counts[static_cast<std::size_t>(sight.layer * 2 + head)] = 3;
      return follow({plan})(sight);
    });
    EXPECT_EQ(expected_layer, 9);
    EXPECT_TRUE(same_bits(expected, found)) << "pages of " << page_size;
  }
}

TEST_P(NarrowingCalls, TakeCountsThatAllLayersShare) {
  oracle::Random random(15);
  const Ints ids = random_ids(30, random), positions = counted(0, 30), indptr{0, 30}, zero{0};
  const Plan plan = random_plan(30, {3, 6}, random);
  for (const std::int64_t page_size : {0, 8}) {
    Runner by_layer(decoder_, 1, 48, {.page_size = page_size}), shared(decoder_, 1, 48, {.page_size = page_size});
    const at::Tensor expected = by_layer.step({{0, ids, plan}});
    EXPECT_TRUE(same_bits(expected, decoder_.forward({ids, indptr, positions, zero, zero}, shared.cache, shared.table,
                                                     {.on_attended = follow({plan})})));
    for (std::size_t l = 0; l < shared.cache.size(); ++l)
      for (std::size_t side = 0; side < 2; ++side)
        EXPECT_TRUE(same_bits(tensors_of(by_layer.cache[l])[side], tensors_of(shared.cache[l])[side])) << "layer " << l;
  }
}

TEST_P(NarrowingCalls, LeaveASequenceThatGoesOnWithNoneAndKeepTheOthers) {
  oracle::Random random(12);
  const std::vector<Part> others{{0, random_ids(25, random), random_plan(25, {5}, random)},
                                 {2, random_ids(1, random)},
                                 {3, random_ids(40, random), random_plan(40, {2}, random)}};
  Runner with_it(decoder_, 4, 48), without(decoder_, 4, 48);
  Part leaves{1, random_ids(33, random), random_plan(33, {1}, random)};
  leaves.plan.behind[4] = {};
  const at::Tensor expected = without.step(others), found = with_it.step({others[0], leaves, others[1], others[2]});
  EXPECT_TRUE(all_nan(found[1]));
  const double tolerance = GetParam() == Path::kernels ? 0 : 1e-5;
  for (const auto& [row, other] : {std::pair{0, 0}, {2, 1}, {3, 2}})
    EXPECT_LE(relative_difference(expected[other], found[row]), tolerance) << row;
  for (std::int32_t l = 0; l < 9; ++l) {
    for (const at::Tensor& side : tensors_of(with_it.cache[static_cast<std::size_t>(l)]))
      EXPECT_EQ(l > 4, all_equal(side[with_it.place_of(1)], 7)) << "layer " << l;
    EXPECT_EQ(with_it.seen.at({1, l, 1})[0].second.empty(), l > 4) << "layer " << l;
  }
  // Who stays keeps on decoding.
  for (std::size_t i : {0U, 2U}) {
    const Part next{others[i].sequence, random_ids(1, random)};
    EXPECT_LE(relative_difference(without.step({next}), with_it.step({next})), tolerance);
  }
}

TEST_P(NarrowingCalls, StopWhereNobodyIsLeft) {
  oracle::Random random(13);
  std::vector<Part> parts{{0, random_ids(25, random)}, {1, random_ids(1, random)}, {2, random_ids(40, random)}};
  parts[0].plan = {{{2, {}}}, 25}, parts[1].plan = {{{5, {}}}, 1}, parts[2].plan = {{{3, {7, 39}}, {5, {}}}, 40};
  for (const Logits logits : {Logits::last, Logits::none}) {
    Runner run(decoder_, 3, 48);
    const at::Tensor found = run.step(parts, logits);
    EXPECT_EQ(found.sizes(), (std::vector<std::int64_t>{logits == Logits::last ? 3 : 0, 90}));
    EXPECT_TRUE(all_nan(found));
    for (std::int32_t l = 0; l < 9; ++l) {
      EXPECT_EQ(run.seen.contains({0, l, 1}), l <= 5);
      for (const at::Tensor& side : tensors_of(run.cache[static_cast<std::size_t>(l)]))
        EXPECT_EQ(all_equal(side, 7), l > 5) << "layer " << l;
    }
  }
  // The decoder is as good as before.
  Runner once(decoder_, 1, 48), again(decoder_, 1, 48);
  const Part prompt{0, random_ids(20, random), random_plan(20, {3}, random)};
  const at::Tensor expected = once.step({prompt});
  EXPECT_FALSE(expected.isnan().any().item<bool>());
  EXPECT_TRUE(same_bits(expected, again.step({prompt})));
}

TEST_P(NarrowingCalls, LetAnExceptionOfTheHookThroughAndWorkOn) {
  oracle::Random random(14);
  const Part prompt{0, random_ids(20, random), random_plan(20, {3}, random)};
  Runner once(decoder_, 1, 48), again(decoder_, 1, 48);
  const at::Tensor expected = once.step({prompt});
  EXPECT_THROW(again.step({prompt}, Logits::last,
                          [&](const LayerSight& sight) -> std::optional<Onward> {
                            if (sight.layer == 5) refuse<StateError>("the hook gives up");
                            return follow({prompt.plan})(sight);
                          }),
               StateError);
  EXPECT_TRUE(same_bits(expected, again.step({prompt})));
}

// ---- What is refused

/// Two sequences, 3 old slots each, with 4 and 3 new tokens; the second has left behind layer 1 where `left`. The
/// hook's answer behind layer 4 is refused with `sentence`, and neither a slot in use nor a deeper layer is touched.
void expect_refused(Decoder& decoder, const Onward& onward, const std::string& sentence, Logits logits = Logits::last,
                    bool left = false) {
  Runner run(decoder, 2, 12);
  run.step({{0, {1, 2, 3}}, {1, {4, 5, 6}}});
  std::vector<at::Tensor> before;
  for (const LayerKv& layer : run.cache)
    for (const at::Tensor& side : tensors_of(layer)) before.push_back(side.clone());
  try {
    run.step({{0, {7, 8, 9, 10}}, {1, {11, 12, 13}}}, logits, [&](const LayerSight& sight) -> std::optional<Onward> {
      if (sight.layer == 1 && left) return Onward{{0, 1, 2, 3}, {0, 4, 4}};
      if (sight.layer == 4) return onward;
      return std::nullopt;
    });
    ADD_FAILURE() << "accepted, should say " << sentence;
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.what(), sentence);
  }
  for (std::size_t l = 0; l < run.cache.size(); ++l)
    for (std::size_t side = 0; side < 2; ++side) {
      const at::Tensor now = tensors_of(run.cache[l])[side], then = before[2 * l + side];
      EXPECT_TRUE(l > 4 ? same_bits(now, then) : same_bits(now.narrow(2, 0, 3), then.narrow(2, 0, 3))) << "layer " << l;
    }
}

TEST_P(NarrowingCalls, RefuseAnAnswerThatDoesNotFitAndTouchNoDeeperLayer) {
  const std::string start = "decoder step: after layer 4 ";
  const auto refused = [&](const Onward& onward, const std::string& rest) {
    expect_refused(decoder_, onward, start + rest);
  };
  refused({{3}, {0, 1}}, "indptr has 2 entries for 2 sequences; allowed 3");
  refused({{3, 6}, {}}, "indptr has 0 entries for 2 sequences; allowed 3");
  refused({{3, 6}, {1, 1, 2}}, "indptr runs from 1 to 2; allowed 0 to the number of tokens that continue, 2");
  refused({{3, 6}, {0, 1, 3}}, "indptr runs from 0 to 3; allowed 0 to the number of tokens that continue, 2");
  refused({{3, 6}, {0, 3, 2}}, "indptr falls from 3 to 2 at sequence 1; allowed ascending numbers");
  refused({{3, 6}, {0, -1, 2}}, "indptr falls from 0 to -1 at sequence 0; allowed ascending numbers");
  refused({{-1, 3, 6}, {0, 2, 3}}, "token -1 continues for sequence 0; allowed its own, 0 to 3");
  refused({{3, 4, 6}, {0, 2, 3}}, "token 4 continues for sequence 0; allowed its own, 0 to 3");
  refused({{3, 2, 6}, {0, 1, 3}}, "token 2 continues for sequence 1; allowed its own, 4 to 6");
  refused({{3, 6, 7}, {0, 1, 3}}, "token 7 continues for sequence 1; allowed its own, 4 to 6");
  refused({{2, 1, 3, 6}, {0, 3, 4}}, "tokens of sequence 0 do not ascend: 2 before 1");
  refused({{3, 5, 5, 6}, {0, 1, 4}}, "tokens of sequence 1 do not ascend: 5 before 5");
  refused({{0, 2, 6}, {0, 2, 3}}, "sequence 0 continues without its last token, 3; allowed with it, or with none");
  refused({{3, 4, 5}, {0, 1, 3}}, "sequence 1 continues without its last token, 6; allowed with it, or with none");
  expect_refused(decoder_, {{3, 6}, {0, 1, 2}},
                 start + "2 of 7 tokens continue, so the others have no logits; allowed Logits::last or none",
                 Logits::all);
  expect_refused(decoder_, {{0, 1, 2, 3}, {0, 4, 4}},
                 start + "4 of 7 tokens continue, so the others have no logits; allowed Logits::last or none",
                 Logits::all);
  expect_refused(decoder_, {{3, 4}, {0, 1, 2}},
                 start + "token 4 continues for sequence 1; allowed none: it has left the step", Logits::last, true);
}

TEST_P(NarrowingCalls, RefuseABadStepBeforeAnyHookIsCalled) {
  const auto cache = decoder_.make_cache(1, 4);
  const Ints ids{1, 95}, indptr{0, 2}, positions{0, 1}, zero{0};
  const StepOptions options{.on_attended = [](const LayerSight&) -> std::optional<Onward> {
    ADD_FAILURE() << "called";
    return std::nullopt;
  }};
  EXPECT_THROW(static_cast<void>(decoder_.forward({ids, indptr, positions, zero, zero}, cache, options)),
               InvalidArgument);
  for (const LayerCache& layer : cache) EXPECT_TRUE(all_equal(layer.keys, 0) && all_equal(layer.values, 0));
}

// A later step takes it that the slots of a sliding layer hold consecutive positions.
TEST_P(NarrowingCalls, RefuseGapsThatTheWindowOfADeeperLayerReaches) {
  const auto sliding = [&](std::int32_t layer, std::int32_t window) {
    Decoder decoder = make_decoder(
        {"windows", with({"windows", io::ModelConfig::shape(io::Architecture::qwen2, 9, 40, 56, 6, 2, 12, 90)},
                         [&](io::ModelConfig& config) {
                           config.spec.layers[static_cast<std::size_t>(layer)] = {LayerKind::sliding, window, -1};
                         })
                        .config});
    decoder.use(GetParam());
    return decoder;
  };
  const std::string behind = "decoder step: after layer 4, ";
  Decoder three = sliding(7, 3), nine = sliding(5, 9), above = sliding(4, 9), one = sliding(8, 1);
  expect_refused(
      three, {{0, 3, 5, 6}, {0, 2, 4}},
      behind +
          "position 5 of sequence 0 does not continue; allowed with its newest 2 positions, which layer 7 slides over");
  expect_refused(
      three, {{2, 3, 6}, {0, 2, 3}},
      behind +
          "position 4 of sequence 1 does not continue; allowed with its newest 2 positions, which layer 7 slides over");
  expect_refused(
      nine, {{1, 2, 3, 4, 5, 6}, {0, 3, 6}},
      behind +
          "position 3 of sequence 0 does not continue; allowed with its newest 8 positions, which layer 5 slides over");
  const auto accepted = [](Decoder& decoder, const Onward& onward) {
    Runner run(decoder, 2, 12);
    EXPECT_NO_THROW(run.step({{0, {7, 8, 9, 10}}, {1, {11, 12, 13}}}, Logits::last, [&](const LayerSight& sight) {
      return sight.layer == 4 ? std::optional<Onward>(onward) : std::nullopt;
    }));
  };
  accepted(three, {{0, 2, 3, 5, 6}, {0, 3, 5}});
  accepted(three, {{2, 3}, {0, 2, 2}});  // who leaves, leaves no gap
  accepted(nine, {{4, 5, 6}, {0, 0, 3}});
  accepted(above, {{3, 6}, {0, 1, 2}});
  accepted(one, {{3, 6}, {0, 1, 2}});
}

}  // namespace
}  // namespace kvkeep::lm::lm_narrowing_test
