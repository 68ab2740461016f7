// SPDX-License-Identifier: Apache-2.0
// A cache in 8 bits or in blocks against one that holds the same numbers in f32: the same slots stay, and their bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/score/calibration.h"
#include "kvkeep/simd/stored_side.h"
#include "message_of.h"
#include "oracle/random_case.h"
#include "temporary_folder.h"

namespace kvkeep::quantised_cache_test {
namespace {

constexpr std::int32_t kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 32, kCapacity = 96, kPage = 12;
constexpr float kScales[] = {0.03125F, 0.0625F};  ///< of a head each

ModelSpec model() {
  ModelSpec spec{.query_heads = kQueryHeads,
                 .kv_heads = kHeads,
                 .key_dim = kDim,
                 .value_dim = kDim,
                 .softmax_scale = 0,
                 .rope = {},
                 .layers = std::vector<LayerSpec>(kLayers)};
  for (int f = 0; f < kDim / 2; ++f) spec.rope.inv_freq.push_back(std::pow(0.6, f));
  return spec;
}

bool has_scales(Dtype dtype) { return element_size(dtype) == 1; }

std::vector<Tensor> projections() {
  oracle::Random random(7);
  std::vector<Tensor> all;
  for (std::int32_t l = 0; l < kLayers; ++l) {
    all.push_back(empty({10, kQueryHeads * kDim}, Dtype::f32));
    for (std::int64_t i = 0; i < all.back().numel(); ++i)
      all.back().data<float>()[i] = static_cast<float>(random.normal());
  }
  return all;
}

/// How a cache of 8 bits is scaled.
enum class Scales : std::uint8_t { by_slot, by_head };

/// One sequence, dense or in pages.
class Engine {
 public:
  Engine(const std::string& policy, Dtype dtype, bool paged, bool rotated = false, Scales scaled = Scales::by_slot)
      : keeper(model(), make_policy(policy), {.output_projections = projections(), .reads_folded = true}),
        dtype_(dtype),
        paged_(paged),
        keys_rotated_(rotated ? kDim : 0),
        values_rotated_(rotated ? kDim / 2 : 0),
        table_(zeros({1, kCapacity / kPage}, Dtype::i32)),
        lengths(kLayers * kHeads, 0) {
    for (std::int32_t p = 0; p < kCapacity / kPage; ++p) table_.data<std::int32_t>()[p] = p;
    const auto sizes = [&](std::vector<std::int64_t> rest) {
      std::vector<std::int64_t> all = paged ? std::vector<std::int64_t>{kCapacity / kPage, kHeads, kPage}
                                            : std::vector<std::int64_t>{1, kHeads, kCapacity};
      std::ranges::copy(rest, std::back_inserter(all));
      return Shape(all);
    };
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto side = [&] { return zeros(sizes({kDim / numbers_of(dtype)}), dtype); };
      const auto scales = [&] {
        if (!has_scales(dtype)) return Tensor();
        if (scaled == Scales::by_slot) return zeros(sizes({}), Dtype::f32);
        const Tensor each = zeros({kHeads}, Dtype::f32);  // seen by all slots
        each.data<float>()[0] = kScales[0], each.data<float>()[1] = kScales[1];
        return Tensor(each.bytes(), Dtype::f32, sizes({}), {0, 1, 0}, {}, each.owner());
      };
      DenseKv kv{side(), side(), scales(), scales(), keys_rotated_, values_rotated_};
      if (paged)
        layers.emplace_back(PagedKv{kv.keys, kv.values, PageLayout::head_slot, kv.key_scales, kv.value_scales,
                                    keys_rotated_, values_rotated_});
      else
        layers.emplace_back(kv);
    }
    keeper.join(0);
  }

  [[nodiscard]] cpu::StoredSide side(std::int32_t layer, std::int32_t head, bool value) const {
    const LayerSides all = sides_of(layers[static_cast<std::size_t>(layer)]);
    const auto address = [&](const Tensor& t) {
      return paged_ ? paged_address(t, PageLayout::head_slot, head, table_.data<std::int32_t>())
                    : dense_address(t, 0, head);
    };
    return {address(value ? all.values : all.keys), address(value ? all.value_scales : all.key_scales), dtype_, kDim,
            value ? values_rotated_ : keys_rotated_};
  }
  [[nodiscard]] std::vector<float> slot(std::int32_t layer, std::int32_t head, std::int32_t at, bool value) const {
    std::vector<float> x(kDim);
    cpu::widen_slot(side(layer, head, value), at, x.data());
    return x;
  }
  [[nodiscard]] std::int32_t& length(std::int32_t layer, std::int32_t head) {
    return lengths[static_cast<std::size_t>(layer * kHeads + head)];
  }

  void observe(std::int32_t layer, const Tensor& queries) {
    const std::vector<SequenceId> ids{0};
    const std::vector<std::int32_t> indptr{0, static_cast<std::int32_t>(queries.size(0))};
    Observation seen{.layer = layer, .sequences = ids, .indptr = indptr, .queries = queries};
    keeper.observe(seen);
    auto* const folds = keeper.find<parts::Folds>();
    if (folds == nullptr) return;
    seen.basis = QueryBasis::post_rope;  // the same numbers: what folded spans are read by
    out_ = zeros({queries.size(0), kQueryHeads, kDim}, Dtype::f32);
    folds->view(seen, {out_, zeros({queries.size(0), kQueryHeads}, Dtype::f32)});
  }
  /// What folded spans gave the queries observed last.
  [[nodiscard]] std::vector<float> read() const {
    return out_.defined() ? std::vector<float>(out_.data<float>(), out_.data<float>() + out_.numel())
                          : std::vector<float>();
  }
  Report cut() {
    const std::vector<SequenceId> ids{0};
    CacheView view{.sequences = ids, .lengths = {lengths, kLayers * kHeads}};
    keeper.bind(layers);
    if (paged_) view.block_table = table_;
    const Report report = keeper.step(view);
    for (std::int32_t p = 0; p < kCapacity / kPage; ++p)  // one sequence: its pages in order
      table_.data<std::int32_t>()[p] = p;
    return report;
  }

  Keeper keeper;
  std::vector<LayerKv> layers;

 private:
  Dtype dtype_;
  bool paged_;
  std::int32_t keys_rotated_, values_rotated_;
  Tensor table_, out_;

 public:
  std::vector<std::int32_t> lengths;
};

/// f8 has no writer: bytes of numbers between -2 and 2, and a scale. One of a head is there already.
void store(const cpu::StoredSide& side, std::int64_t slot, const std::vector<float>& x) {
  const bool eight = side.dtype == Dtype::f8_e4m3 || side.dtype == Dtype::f8_e5m2,
             by_head = side.scales.width > 0 && side.scales.stride == 0;
  if (!eight && !by_head) return cpu::store_slot(side, slot, x.data());
  const float scale = 0.25F;
  if (!by_head) std::memcpy(side.scales.at(slot), &scale, sizeof(scale));
  if (!eight) {
    for (int d = 0; d < kDim; ++d)
      side.slots.at(slot)[d] = static_cast<std::byte>(std::lround(x[static_cast<std::size_t>(d)] * 30) % 127);
    return;
  }
  for (int d = 0; d < kDim; ++d) {
    const auto bits = static_cast<std::uint8_t>(std::lround(std::fabs(x[static_cast<std::size_t>(d)]) * 20) % 0x3f);
    side.slots.at(slot)[d] = static_cast<std::byte>(bits | (x[static_cast<std::size_t>(d)] < 0 ? 0x80 : 0));
  }
}

/// 3 prompts' worth of tokens in steps, with events between; how many there were.
std::int64_t run_twins(const std::string& policy, Dtype dtype, bool paged, bool rotated,
                       Scales scaled = Scales::by_slot) {
  Engine stored(policy, dtype, paged, rotated, scaled), wide(policy, Dtype::f32, paged);
  oracle::Random random(static_cast<std::uint64_t>(dtype) + 11);
  std::int64_t events = 0;
  for (const std::int32_t tokens : {40, 1, 1, 30, 1, 1, 20, 1}) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      Tensor queries = empty({tokens, kQueryHeads, kDim}, Dtype::f32);
      for (std::int64_t i = 0; i < queries.numel(); ++i) queries.data<float>()[i] = static_cast<float>(random.normal());
      for (std::int32_t h = 0; h < kHeads; ++h)
        for (std::int32_t t = 0; t < tokens; ++t)
          for (const bool value : {false, true}) {
            std::vector<float> x(kDim);
            for (float& number : x) number = static_cast<float>(random.normal());
            const std::int32_t at = stored.length(l, h) + t;
            store(stored.side(l, h, value), at, x);
            const std::vector<float> rounded = stored.slot(l, h, at, value);
            std::memcpy(wide.side(l, h, value).slots.at(at), rounded.data(), sizeof(float) * kDim);
          }
      for (Engine* engine : {&stored, &wide}) engine->observe(l, queries);
      EXPECT_EQ(stored.read(), wide.read()) << "layer " << l;
    }
    for (Engine* engine : {&stored, &wide})
      for (std::int32_t& length : engine->lengths) length += tokens;
    const Report a = stored.cut(), b = wide.cut();
    EXPECT_EQ(a.slots_kept, b.slots_kept);
    EXPECT_EQ(stored.lengths, wide.lengths);
    events += a.slots_kept > 0 ? 1 : 0;
    for (std::int32_t l = 0; l < kLayers; ++l)
      for (std::int32_t h = 0; h < kHeads; ++h) {
        const auto mine = stored.keeper.positions(0, l, h), theirs = wide.keeper.positions(0, l, h);
        EXPECT_TRUE(std::ranges::equal(mine, theirs)) << "layer " << l << ", head " << h;
        for (std::int32_t at = 0; at < stored.length(l, h); ++at)
          for (const bool value : {false, true})
            EXPECT_EQ(stored.slot(l, h, at, value), wide.slot(l, h, at, value)) << l << " " << h << " " << at;
      }
    if (::testing::Test::HasFailure()) return 0;
  }
  if (const auto* mine = stored.keeper.find<parts::Folds>()) {
    const FoldedState theirs = wide.keeper.part<parts::Folds>().of(0);
    EXPECT_EQ(mine->of(0).spans, theirs.spans);
    EXPECT_EQ(mine->of(0).far_bytes, theirs.far_bytes);
  }
  return events;
}

/// Query statistics of every head, for the RoPE of model().
std::filesystem::path calibration(const std::filesystem::path& folder) {
  oracle::Random random(5);
  Calibration c{.head_dim = kDim,
                .rope_style = RopeStyle::half,
                .heads = {},
                .inv_freq = model().rope.inv_freq,
                .model_name = {}};
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (std::int32_t h = 0; h < kQueryHeads; ++h)
      for (std::int32_t f = 0; f < kDim / 2; ++f) {
        Calibration::Head& head = c.heads[{l, h}];
        head.q_mean.emplace_back(static_cast<float>(random.normal()), static_cast<float>(random.normal()));
        head.q_abs_mean.push_back(static_cast<float>(1 + random.unit()));
      }
  save_calibration(folder / "calibration.safetensors", c);
  return folder / "calibration.safetensors";
}

class QuantisedCache : public testing::TemporaryFolder {};

TEST_F(QuantisedCache, KeepsWhatACacheOfTheSameNumbersInF32Keeps) {
  const std::string common = ",budget=24,interval=1,recent=4,sink=2,prefill=cut",
                    triattention = "triattention,calibration=" + calibration(folder_).string();
  for (const std::string& name : std::vector<std::string>{"streaming",
                                                          "random",
                                                          "tova",
                                                          "snapkv,scorer.window=8",
                                                          "expected",
                                                          "keydiff",
                                                          "knorm",
                                                          "rkv",
                                                          "h2o",
                                                          "rpc,scorer.window=8",
                                                          "cur",
                                                          "vase",
                                                          "defensive",
                                                          "ams-tova,allocator.window=8",
                                                          "ams-expected,preset=question,allocator.window=8",
                                                          "adakv-expected",
                                                          "adakv-snapkv,scorer.window=8",
                                                          "criticalkv-expected",
                                                          "pyramidkv-snapkv,scorer.window=8",
                                                          "chunkkv-keydiff",
                                                          triattention,
                                                          "ams-" + triattention,
                                                          "tova,rest=fold"})
    for (const Dtype dtype : {Dtype::i8, Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::q8_0, Dtype::q4_0})
      for (const bool paged : {false, true})
        for (const Scales scaled : {Scales::by_slot, Scales::by_head}) {
          SCOPED_TRACE(
              text(name, " over ", dtype, paged ? " in pages" : "", scaled == Scales::by_head ? ", by head" : ""));
          if (scaled == Scales::by_head && !has_scales(dtype)) continue;
          EXPECT_GT(run_twins(name + common, dtype, paged, paged != is_blocks(dtype), scaled), 0);
          if (HasFailure()) return;
        }
}

TEST_F(QuantisedCache, CountsTheScalesThatSlotsHave) {
  for (const bool paged : {false, true})
    for (const Scales scaled : {Scales::by_slot, Scales::by_head}) {
      Engine engine("streaming,budget=24,interval=1,recent=4,sink=2,prefill=cut", Dtype::i8, paged, false, scaled);
      for (std::int32_t l = 0; l < kLayers; ++l) engine.observe(l, zeros({40, kQueryHeads, kDim}, Dtype::f32));
      for (std::int32_t& length : engine.lengths) length = 40;
      const Report report = engine.cut();
      const std::int64_t slot = 2 * kDim + (scaled == Scales::by_slot ? 2 * 4 : 0);
      EXPECT_EQ(report.bytes_before, kLayers * kHeads * 40 * slot);
      EXPECT_EQ(report.bytes_after, kLayers * kHeads * 24 * slot);
    }
}

TEST_F(QuantisedCache, RefusesWhatNoEventCouldReadWhenItIsBound) {
  const auto bind = [](const std::string& policy, Dtype keys, Dtype values, std::optional<Dtype> scales) {
    Keeper keeper(model(), make_policy(policy + ",budget=24,interval=1,recent=4,sink=2"), {.reads_folded = true});
    const auto side = [](Dtype dtype) { return zeros({1, kHeads, kCapacity, kDim / numbers_of(dtype)}, dtype); };
    std::vector<LayerKv> layers;
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto of = [&](Dtype dtype) {
        return scales && has_scales(dtype) ? zeros({1, kHeads, kCapacity}, *scales) : Tensor();
      };
      layers.emplace_back(DenseKv{side(keys), side(values), of(keys), of(values)});
    }
    keeper.bind(std::move(layers));
  };
  const auto refused = [&](const std::string& policy, Dtype keys, Dtype values, std::optional<Dtype> scales = {}) {
    return testing::message_of<InvalidArgument>([&] { bind(policy, keys, values, scales); });
  };
  EXPECT_EQ(refused("tova", Dtype::u8, Dtype::f32),
            "bind: keys of layer 0, which policy tova reads, are u8; allowed f32, f16, bf16, i8, f8_e4m3, f8_e5m2, "
            "q8_0, q4_0");
  EXPECT_NE(refused("tova", Dtype::f64, Dtype::f64).find("keys of layer 0"), std::string::npos);
  EXPECT_NE(refused("cur", Dtype::f16, Dtype::u16).find("values of layer 0, which policy cur reads, are u16"),
            std::string::npos);
  EXPECT_NE(refused("streaming,rest=fold", Dtype::f16, Dtype::u16).find("values of layer 0"), std::string::npos);
  EXPECT_EQ(refused("tova", Dtype::i8, Dtype::i8),
            "bind: keys of layer 0, which policy tova reads, are i8 without scales; allowed with an f32 scale of each "
            "slot, or of each head");
  EXPECT_EQ(refused("tova", Dtype::i8, Dtype::i8, Dtype::f16),
            "bind: keys of layer 0, which policy tova reads, are i8 with scales that are f16; allowed f32");
  // Numbers as they are, and what is not read.
  bind("tova", Dtype::f8_e4m3, Dtype::f8_e5m2, {});
  bind("tova", Dtype::q8_0, Dtype::u16, {});
  bind("tova", Dtype::i8, Dtype::u8, Dtype::f32);
  bind("streaming", Dtype::u8, Dtype::i16, Dtype::f16);
  bind("streaming", Dtype::i8, Dtype::i8, {});
}

TEST_F(QuantisedCache, RefusesBlocksThatDoNotFillAHead) {
  ModelSpec odd = model();
  odd.key_dim = odd.value_dim = 24;
  odd.rope.inv_freq.resize(12);
  const std::vector<SequenceId> ids{0};
  std::vector<std::int32_t> length{1};
  const Tensor blocks = zeros({1, kHeads, 4, 1}, Dtype::q4_0);
  const std::vector<LayerKv> cache{DenseKv{blocks, blocks}, DenseKv{blocks, blocks}};
  const CacheView view{ids, {length, 1}};
  const std::vector<std::int32_t> layers{0, 1}, due{0};
  const std::string message =
      testing::message_of<InvalidArgument>([&] { (void)make_rows(odd, cache, view, layers, due); });
  EXPECT_NE(message.find("q4_0, blocks of 32 numbers, in heads of 24"), std::string::npos) << message;
}

}  // namespace
}  // namespace kvkeep::quantised_cache_test
