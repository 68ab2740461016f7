// SPDX-License-Identifier: Apache-2.0
// Rotation and re-rotation: positions are logical, and turning twice is turning once.

#include <gtest/gtest.h>

#include <numeric>

#include "arrays.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/compact.h"
#include "oracle/random_case.h"

namespace kvkeep::rope_test {
namespace {

struct Spec {
  const char* name;
  RopeSpec rope;
  std::int64_t dim;
};

std::vector<Spec> specs() {
  const std::vector<double> plain{1.0, 0.1, 0.01, 0.001};
  return {{"default", {RopeStyle::half, plain, 1.0}, 8},
          {"YaRN", {RopeStyle::half, {0.9, 0.07, 0.004, 0.0003}, 1.1386}, 8},
          {"interleaved", {RopeStyle::interleaved, plain, 1.0}, 8},
          {"partial", {RopeStyle::half, {1.0, 0.05}, 1.0}, 10}};
}

std::vector<float> rotated(const Spec& spec, std::vector<float> key, std::int64_t position) {
  const auto pairs = static_cast<std::int64_t>(spec.rope.inv_freq.size());
  std::vector<float> c(spec.rope.inv_freq.size()), s(c.size());
  rope_at(spec.rope, position, c.data(), s.data());
  rope_rotate(spec.rope.style, pairs, c.data(), s.data(), key.data());
  return key;
}

template <class Element>
void rerotated_equals_rotated_afresh(Dtype dtype, double tolerance) {  // B2
  oracle::Random random(3);
  for (const Spec& spec : specs()) {
    std::vector<std::vector<float>> plain;
    std::vector<Element> cache;
    std::vector<std::int32_t> kept, from, to;
    for (std::int32_t t = 0; t < 400; ++t) {
      auto& key = plain.emplace_back();
      for (std::int64_t d = 0; d < spec.dim; ++d) key.push_back(static_cast<float>(random.normal()));
      for (const float x : rotated(spec, key, t)) cache.push_back(static_cast<Element>(x));
      if (random.chance(0.3)) kept.push_back(t);
    }
    const auto width = static_cast<std::int64_t>(sizeof(Element)) * spec.dim;
    const SlotAddress keys{reinterpret_cast<std::byte*>(cache.data()), width, width};
    compact_slots(keys, kept);
    from = kept;
    to.resize(kept.size());
    std::iota(to.begin(), to.end(), 0);
    rerotate(keys, dtype, spec.dim, spec.rope, from, to);
    for (std::size_t j = 0; j < kept.size(); ++j) {
      const auto want = rotated(spec, plain[static_cast<std::size_t>(kept[j])], static_cast<std::int64_t>(j));
      for (std::int64_t d = 0; d < spec.dim; ++d)
        ASSERT_NEAR(static_cast<float>(cache[j * static_cast<std::size_t>(spec.dim) + static_cast<std::size_t>(d)]),
                    want[static_cast<std::size_t>(d)], tolerance)
            << spec.name << ", slot " << j;
    }
    const std::vector<Element> once = cache;
    rerotate(keys, dtype, spec.dim, spec.rope, to, to);  // B3: contiguous already
    EXPECT_EQ(std::memcmp(once.data(), cache.data(), cache.size() * sizeof(Element)), 0) << spec.name;
  }
}

TEST(Rerotate, OfAPrunedCacheEqualsRotatingThePrunedKeysAfresh) {
  rerotated_equals_rotated_afresh<float>(Dtype::f32, 2e-6);
}
TEST(Rerotate, HoldsInHalfPrecision) {
  rerotated_equals_rotated_afresh<Half>(Dtype::f16, 8e-3);
  rerotated_equals_rotated_afresh<BFloat16>(Dtype::bf16, 6e-2);
}

TEST(Rerotate,
     TurningBackGivesTheKeyBeforeRoPE) {  // B1: a kept key turned back from its stored position is the original
  for (const Spec& spec : specs()) {
    if (spec.rope.attention_scaling != 1.0) continue;
    std::vector<float> key(static_cast<std::size_t>(spec.dim));
    std::iota(key.begin(), key.end(), 1.0F);
    auto cached = rotated(spec, key, 70001);
    const std::int32_t from = 70001, to = 0;
    rerotate({reinterpret_cast<std::byte*>(cached.data()), spec.dim * 4, spec.dim * 4}, Dtype::f32, spec.dim, spec.rope,
             {&from, 1}, {&to, 1});
    for (std::size_t d = 0; d < key.size(); ++d) EXPECT_NEAR(cached[d], key[d], 1e-5) << spec.name;
  }
}

TEST(Rerotate, RefusesWhatDoesNotFit) {
  std::vector<float> key(4, 1.0F);
  const SlotAddress keys{reinterpret_cast<std::byte*>(key.data()), 16, 16};
  const std::int32_t one = 1;
  EXPECT_THROW(rerotate(keys, Dtype::f32, 4, {RopeStyle::half, {1, 1, 1}, 1}, {&one, 1}, {&one, 1}), InvalidArgument);
  EXPECT_THROW(rerotate(keys, Dtype::f32, 4, {RopeStyle::half, {1}, 1}, {&one, 1}, {}), InvalidArgument);
  EXPECT_THROW(rerotate(keys, Dtype::i32, 4, {RopeStyle::half, {1}, 1}, {&one, 1}, {&one, 1}), InvalidArgument);
}

TEST(Rope, KeepsItsPhaseAtAMillionTokens) {
  // cos(1e6 rad) to ten digits, from 1e6 mod 2 pi; a float phase would be off in the second.
  EXPECT_NEAR(std::cos(rope_angle(1'000'000, 1.0)), 0.9367521275, 1e-9);
}

}  // namespace
}  // namespace kvkeep::rope_test
