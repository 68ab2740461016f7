// SPDX-License-Identifier: Apache-2.0
// Caches of 8 bits as engines have them: a keeper on a device keeps what a keeper on the CPU keeps of the same numbers
// in f32, slot for slot, whatever the format, and whether scales are of slots, heads or a whole tensor.

#include <cmath>
#include <type_traits>

#include "device.h"
#include "engines.h"
#include "fresh_accelerator.h"
#include "message_of.h"

namespace kvkeep::cuda::quantised_test {
namespace {

using testing::Array;
using namespace engines;

enum class ScaleOf { slot, head, tensor };

constexpr Dtype kFormats[] = {Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::i8};
constexpr ScaleOf kScalesOf[] = {ScaleOf::slot, ScaleOf::head, ScaleOf::tensor};
constexpr std::int32_t kPageSize = 16;

/// The numbers of a format nearest to some that are about 1, as f32.
Array stored_as(Dtype format, const Array& numbers) {
  const Array rounded = numbers.clone();
  for (std::int64_t i = 0; format == Dtype::i8 && i < rounded.numel(); ++i) {
    float& x = rounded.data<float>()[i];
    x = std::clamp(std::nearbyint(40 * x), -128.0F, 127.0F) + 0.0F;  // no -0
  }
  return rounded.to(format).to(Dtype::f32);
}

/// An engine whose cache has 8 bits, and the scales of its cache.
template <class AnyEngine>
class Quantised {
 public:
  static constexpr bool kPaged = std::is_same_v<AnyEngine, PagedEngine>;

  Quantised(AnyEngine& engine, ScaleOf of, std::uint64_t seed) : engine_(engine), of_(of), random_(seed) {
    using Kv = std::conditional_t<kPaged, PagedKv, DenseKv>;
    for (LayerKv& layer : engine_.layers) {
      Kv& kv = std::get<Kv>(layer);
      kv.key_scales = add(Array(kv.keys));
      kv.value_scales = add(Array(kv.values));
    }
    engine_.keeper.bind(engine_.layers);
  }

  /// Gives the newest `tokens` slots of a sequence their scales.
  void bring(SequenceId id, std::int32_t tokens) {
    for (std::int32_t r = 0; r < kRows && of_ == ScaleOf::slot; ++r) {
      const std::int32_t length = engine_.lengths.at(id)[static_cast<std::size_t>(r)];
      for (std::int32_t t = length - tokens; t < length; ++t)
        for (const bool value : {false, true}) scale_in(scales_, id, r, t, value).fill_(any());
    }
  }

  /// The scales of all slots as they are now, on the host.
  [[nodiscard]] std::vector<Array> on_host() const {
    std::vector<Array> here;
    for (const Array& side : scales_) here.push_back(side.to(Device{}));
    return here;
  }

  /// The scale of a slot. `scales`: of all.
  [[nodiscard]] Array scale_in(const std::vector<Array>& scales, SequenceId id, std::int32_t r, std::int32_t t,
                               bool value) const {
    const Array& all = scales[static_cast<std::size_t>(r / kHeads * 2 + (value ? 1 : 0))];
    if constexpr (kPaged)
      return all[engine_.sequences.pages(id)[static_cast<std::size_t>(t / kPageSize)]][t % kPageSize][r % kHeads];
    else
      return all[id][r % kHeads][t];
  }

 private:
  float any() { return static_cast<float>(0.02 * std::exp(random_.normal())); }

  /// Scales of all slots of one side.
  Array add(const Array& rows) {
    const Shape all{rows.size(0), rows.size(1), rows.size(2)};
    const std::size_t heads = kPaged ? 2 : 1;
    Shape own{1, 1, 1};
    if (of_ == ScaleOf::slot) own = all;
    if (of_ == ScaleOf::head) own[heads] = kHeads;
    const Array numbers = Array::full(own, any());
    for (std::int32_t h = 0; of_ == ScaleOf::head && h < kHeads; ++h)
      numbers.select(static_cast<int>(heads), h).fill_(any());
    const Array there = numbers.to(rows.device());
    Shape steps = there.strides();
    for (std::size_t d = 0; d < all.size(); ++d)
      if (own[d] != all[d]) steps[d] = 0;
    return scales_.emplace_back(there.bytes(), Dtype::f32, all, steps, there.device(), there.owner());
  }

  AnyEngine& engine_;
  ScaleOf of_;
  oracle::Random random_;
  std::vector<Array> scales_;  ///< [layers, 2]
};

/// Both are given the same numbers, the CPU in f32.
template <class AnyEngine>
void expect_as_on_cpu(const char* policy, Dtype format, ScaleOf of, AnyEngine& device) {
  DenseEngine cpu(policy, false, Dtype::f32);
  Quantised<AnyEngine> cache(device, of, 17);
  oracle::Random random(31);
  for (const SequenceId id : {1, 2}) {
    cpu.join(id);
    device.join(id);
  }
  std::int64_t events = 0;
  for (int n = 0; n < 30; ++n) {
    const std::vector<std::pair<SequenceId, std::int32_t>> work{{1, n == 0 ? 60 : 1}, {2, n == 0 ? 33 : 2}};
    Numbers numbers = numbers_of(random, work);
    for (std::vector<Array>* side : {&numbers.keys, &numbers.values})
      for (Array& of_layer : *side) of_layer = stored_as(format, of_layer);
    device.feed(numbers);
    for (std::size_t i = 0; i < work.size(); ++i) cache.bring(work[i].first, work[i].second);
    Numbers read = numbers;
    const std::vector<Array> scales = cache.on_host();
    for (std::int32_t l = 0; l < kLayers; ++l)
      for (const bool value : {false, true}) {
        Array& rows = (value ? read.values : read.keys)[static_cast<std::size_t>(l)];
        rows = rows.clone();
        for (std::size_t i = 0; i < work.size(); ++i)
          for (std::int32_t h = 0; h < kHeads; ++h) {
            const auto [id, tokens] = work[i];
            const std::int32_t r = l * kHeads + h, length = device.lengths.at(id)[static_cast<std::size_t>(r)];
            for (std::int32_t t = 0; t < tokens; ++t)
              rows[numbers.indptr[i] + t][h].mul_(
                  static_cast<double>(cache.scale_in(scales, id, r, length - tokens + t, value).item()));
          }
      }
    cpu.feed(read);
    events += static_cast<std::int64_t>(device.cut(numbers.ids).cuts.size());
    static_cast<void>(cpu.cut(numbers.ids));
    ASSERT_EQ(cpu.lengths, device.lengths) << "step " << n;
    for (const SequenceId id : numbers.ids)
      for (std::int32_t r = 0; r < kRows; ++r) {
        const auto a = cpu.keeper.positions(id, r / kHeads, r % kHeads),
                   b = device.keeper.positions(id, r / kHeads, r % kHeads);
        ASSERT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()))
            << "step " << n << ", sequence " << id << ", row " << r;
      }
  }
  EXPECT_GE(events, 3);
  const Engine::OnHost copy(device);
  const std::vector<Array> scales = cache.on_host();
  for (const auto& [id, lengths] : device.lengths)
    for (std::int32_t r = 0; r < kRows; ++r)
      for (std::int32_t t = 0; t < lengths[static_cast<std::size_t>(r)]; ++t)
        for (const bool value : {false, true}) {
          const Array number = device.slot_of(id, r / kHeads, r % kHeads, t, value).to(Dtype::f32),
                      scale = cache.scale_in(scales, id, r, t, value);
          ASSERT_TRUE(same_bits(number.mul_(static_cast<double>(scale.item())),
                                cpu.slot_of(id, r / kHeads, r % kHeads, t, value)))
              << "slot " << t << ", row " << r << ", sequence " << id;
        }
}

using QuantisedCache = OnDevice;

/// Policies that read keys alone, and values too.
constexpr const char* kReaders[] = {
    "ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16",
    "expected,budget=48,interval=12,queries=16",
    "criticalkv-tova,budget=48,interval=12",
};

TEST_F(QuantisedCache, KeepsWhatTheCpuKeepsOfTheSameNumbersInF32) {
  for (const char* policy : kReaders)
    for (const Dtype format : kFormats)
      for (const ScaleOf of : kScalesOf) {
        SCOPED_TRACE(text(policy, ", ", format, ", scales ", static_cast<int>(of)));
        DenseEngine device(policy, false, format, fresh_accelerator());
        ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(policy, format, of, device));
      }
}

TEST_F(QuantisedCache, KeepsInPagesWhatTheCpuKeepsOfTheSameNumbersInF32) {
  for (const char* policy : kReaders)
    for (const Dtype format : kFormats)
      for (const ScaleOf of : kScalesOf) {
        SCOPED_TRACE(text(policy, ", ", format, ", scales ", static_cast<int>(of)));
        PagedEngine device(policy, false, format, kPageSize, PageLayout::slot_head, Form::apart, 1600,
                           fresh_accelerator());
        ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(policy, format, of, device));
      }
}

TEST_F(QuantisedCache, IsRefusedByNameWhereNoKernelReadsIt) {
  for (const Dtype format : kFormats) {
    DenseEngine engine("cur,budget=24,interval=8,recent=2", false, format, fresh_accelerator());
    const Quantised<DenseEngine> cache(engine, ScaleOf::tensor, 17);
    oracle::Random random(31);
    engine.join(1);
    static_cast<void>(engine.step(numbers_of(random, {{1, 40}})));  // the prompt is not cut
    engine.feed(numbers_of(random, {{1, 1}}));
    const std::string said = testing::message_of<InvalidArgument>([&] { static_cast<void>(engine.cut({1})); });
    EXPECT_NE(said.find(text("row_body: keys are ", format, "; allowed f32, f16, bf16")), std::string::npos) << said;
    EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 41);
  }
}

}  // namespace
}  // namespace kvkeep::cuda::quantised_test
