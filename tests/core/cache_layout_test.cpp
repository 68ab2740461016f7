// SPDX-License-Identifier: Apache-2.0
// Which rows share memory: against every byte of small caches, and the forms in which engines store theirs.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/row.h"
#include "message_of.h"
#include "oracle/random_case.h"

namespace kvkeep::cache_layout_test {
namespace {

ModelSpec model(std::int32_t layers, std::int32_t heads = 2, std::int32_t key_dim = 3, std::int32_t value_dim = 2) {
  ModelSpec spec;
  spec.kv_heads = heads, spec.key_dim = key_dim, spec.value_dim = value_dim;
  spec.layers.resize(static_cast<std::size_t>(layers));
  return spec;
}

std::string refusal(const ModelSpec& spec, const std::vector<LayerKv>& layers) {
  try {
    check_layout(spec, layers);
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

/// Offsets, in numbers, of every number of a tensor; -1 if one comes twice.
std::vector<std::int64_t> numbers_of(const Tensor& t, const std::byte* base) {
  std::vector<std::int64_t> all;
  for (std::int64_t a = 0; a < t.size(0); ++a)
    for (std::int64_t b = 0; b < t.size(1); ++b)
      for (std::int64_t c = 0; c < t.size(2); ++c)
        for (std::int64_t d = 0; d < t.size(3); ++d)
          all.push_back((t.bytes() - base) / t.element_size() + a * t.stride(0) + b * t.stride(1) + c * t.stride(2) +
                        d);
  std::ranges::sort(all);
  if (std::ranges::adjacent_find(all) != all.end()) return {-1};
  return all;
}

bool share(const Tensor& a, const Tensor& b, const std::byte* base) {
  const auto one = numbers_of(a, base), other = numbers_of(b, base);
  std::vector<std::int64_t> both;
  std::ranges::set_intersection(one, other, std::back_inserter(both));
  return !both.empty();
}

TEST(CacheLayout, RefusesExactlyWhatSharesMemoryWhereRowsAreNested) {
  oracle::Random random(5);
  std::vector<float> memory(20000);
  auto* const base = reinterpret_cast<std::byte*>(memory.data());
  int taken = 0, refused = 0, itself = 0;
  for (int round = 0; round < 40000; ++round) {
    const std::int64_t sizes[] = {random.between(1, 3), 2, random.between(1, 4)};
    const auto side = [&](std::int64_t dim, bool alike, const Tensor& other) {
      // Slices of an array: strides nest in some order of the dimensions, with gaps.
      Shape strides{0, 0, 0, 1};
      std::vector<std::size_t> order{0, 1, 2};
      for (std::size_t i = 2; i > 0; --i)
        std::swap(order[i], order[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(i)))]);
      std::int64_t inner = dim + random.between(0, 6);
      if (random.chance(0.05)) inner = random.between(0, static_cast<std::int32_t>(dim) - 1);
      for (const std::size_t d : order) {
        strides[d] = (random.chance(0.1) ? -1 : 1) * inner;
        inner = inner * sizes[d] + random.between(0, 8);
      }
      if (alike)
        for (int d = 0; d < 3; ++d) strides[static_cast<std::size_t>(d)] = other.stride(d);
      return Tensor(memory.data() + 10000 + random.between(-60, 60), Dtype::f32, {sizes[0], sizes[1], sizes[2], dim},
                    strides);
    };
    const Tensor keys = side(3, false, {}), values = side(2, random.chance(0.7), keys);
    const bool alone = numbers_of(keys, base) != std::vector<std::int64_t>{-1} &&
                       numbers_of(values, base) != std::vector<std::int64_t>{-1};
    if (keys.stride(0) == 0 || values.stride(0) == 0) continue;  // one vector for all, of which nothing moves
    const bool within = lies_within(values, keys);
    const std::string said = refusal(model(1), {DenseKv{keys, values}});
    if (!alone) {
      EXPECT_FALSE(said.empty()) << keys.strides() << " " << values.strides();
      ++itself;
      continue;
    }
    if (said.find("slots of the") != std::string::npos) continue;  // not nested, so not looked at closely
    const bool overlap = !within && share(keys, values, base);
    ASSERT_EQ(!said.empty(), overlap) << round << ": " << keys.sizes() << keys.strides() << " and " << values.strides()
                                      << ", " << values.bytes() - keys.bytes() << " bytes apart: " << said;
    ++(overlap ? refused : taken);
  }
  EXPECT_GT(taken, 3000);
  EXPECT_GT(refused, 3000);
  EXPECT_GT(itself, 100);
}

TEST(CacheLayout, TakesTheFormsInWhichEnginesStoreTheirRows) {
  const ModelSpec spec = model(4, 2, 8, 8), latent = model(2, 1, 24, 16), unequal = model(3, 2, 8, 6);
  const auto pages = [](const Tensor& keys, const Tensor& values, PageLayout layout = PageLayout::slot_head) {
    return LayerKv(PagedKv{keys, values, layout});
  };
  std::vector<LayerKv> layers;
  const auto taken = [&](const char* what, const ModelSpec& of) {
    EXPECT_EQ(refusal(of, layers), "") << what;
    layers.clear();
  };
  for (int l = 0; l < 4; ++l) {
    const Tensor both = zeros({2, 6, 16, 2, 8}, Dtype::f16);
    layers.push_back(pages(both.select(0, 0), both.select(0, 1)));
  }
  taken("[2, pages, size, heads, dim]", spec);
  for (int l = 0; l < 4; ++l) {
    const Tensor both = zeros({6, 2, 2, 16, 8}, Dtype::f16);
    layers.push_back(pages(both.select(1, 0), both.select(1, 1), PageLayout::head_slot));
  }
  taken("[pages, 2, heads, size, dim]", spec);
  const Tensor all = zeros({6, 4, 2, 16, 2, 8}, Dtype::f16);
  for (int l = 0; l < 4; ++l) {
    const Tensor both = all.select(1, l);
    layers.push_back(pages(both.select(1, 0), both.select(1, 1)));
  }
  taken("[pages, layers, 2, size, heads, dim]", spec);
  const Tensor wide = zeros({6, 16, 2, 3 * 14}, Dtype::f16);
  for (int l = 0; l < 3; ++l) layers.push_back(pages(wide.narrow(3, l * 14, 8), wide.narrow(3, l * 14 + 8, 6)));
  taken("keys, values and layers side by side in one vector", unequal);
  const Tensor uneven = zeros({6, 16 * 2 * 14}, Dtype::f16);
  for (int l = 0; l < 1; ++l) {
    const auto part = [&](std::int64_t from, std::int64_t dim) {
      return Tensor(uneven.data<Half>() + from, Dtype::f16, {6, 16, 2, dim}, {16 * 2 * 14, 2 * dim, dim, 1});
    };
    layers.push_back(pages(part(0, 8), part(16 * 2 * 8, 6)));
  }
  taken("a page holds its keys, then its values", model(1, 2, 8, 6));
  for (int l = 0; l < 2; ++l) {
    const Tensor rows = zeros({6, 64, 1, 24}, Dtype::bf16);
    layers.push_back(pages(rows, rows.narrow(3, 0, 16)));
  }
  taken("latent rows", latent);
  const Tensor batch = zeros({2, 3, 2, 40, 8}, Dtype::f32);
  for (int l = 0; l < 4; ++l)
    layers.emplace_back(DenseKv{zeros({3, 2, 40, 8}, Dtype::f32), zeros({3, 2, 40, 8}, Dtype::f32)});
  layers[1] = DenseKv{batch.select(0, 0), batch.select(0, 1)};
  ModelSpec shared = spec;
  shared.layers[3] = {.kind = LayerKind::shared, .source = 1};
  layers[3] = layers[1];
  taken("a layer that reads another one's cache", shared);
  float scale = 1;
  const Tensor one(&scale, Dtype::f32, {3, 2, 40}, {0, 0, 0});
  for (int l = 0; l < 4; ++l)
    layers.emplace_back(DenseKv{zeros({3, 2, 40, 8}, Dtype::i8), zeros({3, 2, 40, 8}, Dtype::i8), one, one});
  taken("one scale for all", spec);
}

TEST(CacheLayout, NamesWhatSharesMemory) {
  const ModelSpec spec = model(2, 2, 8, 8);
  const auto fresh = [] { return zeros({3, 2, 40, 8}, Dtype::f32); };
  const Tensor k = fresh(), v = fresh();
  const auto strided = [&](std::int64_t place, std::int64_t head, std::int64_t slot) {
    return Tensor(k.bytes(), Dtype::f32, {3, 2, 40, 8}, {place, head, slot, 1});
  };
  const auto says = [&](const DenseKv& first, const LayerKv& second) { return refusal(spec, {first, second}); };
  const DenseKv other{fresh(), fresh()};
  EXPECT_EQ(says({k, v}, other), "");
  EXPECT_EQ(refusal(spec, {DenseKv{k, v}}), "") << "a layer is missing: make_rows() says so";
  EXPECT_NE(says({k, v}, DenseKv{k, fresh()}).find("keys of layer 0 and keys of layer 1 share memory"),
            std::string::npos);
  EXPECT_NE(says({k, v}, DenseKv{fresh(), k}).find("keys of layer 0 and values of layer 1"), std::string::npos);
  EXPECT_NE(says({k, k.narrow(2, 1, 39)}, other).find("keys of layer 0 and values of layer 0"), std::string::npos);
  for (const auto& [place, head, slot] :
       {std::tuple{0, 320, 8}, {640, 0, 8}, {640, 320, 0}, {640, 320, 4}, {640, 8, 8}})
    EXPECT_NE(says({strided(place, head, slot), v}, other).find("slots of the keys of layer 0 share memory"),
              std::string::npos)
        << place << " " << head << " " << slot;
  constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();
  EXPECT_NE(says({strided(kFar, 320, 8), v}, other).find("allowed strides within memory"), std::string::npos);
  EXPECT_NE(says({strided(kFar / 8, 320, 8), v}, other).find("allowed strides within memory"), std::string::npos);
  // Of one vector for all slots too; but a stride along a dimension of one is never used.
  const auto one_for_all = [&](std::int64_t head, std::int64_t slots) {
    return Tensor(k.bytes(), Dtype::f32, {3, 2, slots, 8}, {0, head, slots > 1 ? 0 : kFar, 1});
  };
  EXPECT_NE(says({k, one_for_all(kFar / 4 + 1, 40)}, other).find("allowed strides within memory"), std::string::npos);
  EXPECT_NE(says({k, one_for_all(kFar / 4, 40)}, other).find("allowed strides within memory"), std::string::npos);
  EXPECT_EQ(says({k, one_for_all(0, 40)}, other), "");
  EXPECT_EQ(says({k, one_for_all(0, 1)}, other), "");
  const Tensor none(k.bytes(), Dtype::f32, {3, 2, 0, 8}, {640, kFar / 4, 8, 1});
  EXPECT_NE(says({none, v}, other).find("allowed strides within memory"), std::string::npos);
  // A window that is not cut, over rows that are.
  ModelSpec sliding = spec;
  sliding.layers[1] = {.kind = LayerKind::sliding, .window = 8};
  EXPECT_NE(refusal(sliding, {DenseKv{k, v}, DenseKv{v, fresh()}}).find("values of layer 0 and keys of layer 1"),
            std::string::npos);
  EXPECT_EQ(refusal(sliding, {DenseKv{k, v}, DenseKv{other.keys, other.keys}}), "") << "nothing of it moves";
  // What else a slot has.
  const auto with = [&](Tensor extra) {
    DenseKv kv{k, v};
    kv.extra = std::move(extra);
    return kv;
  };
  EXPECT_EQ(says(with(zeros({3, 2, 40, 5}, Dtype::u8)), other), "");
  EXPECT_NE(says(with(k.narrow(3, 0, 4)), other).find("keys of layer 0 and extras of layer 0 share memory"),
            std::string::npos);
  EXPECT_NE(refusal(spec, {other, with(v)}).find("values of layer 1 and extras of layer 1"), std::string::npos);
  EXPECT_NE(says(with(Tensor(other.keys.bytes(), Dtype::f32, {3, 2, 40, 4}, {640, 320, 2, 1})), {})
                .find("slots of the extras of layer 0 share memory"),
            std::string::npos);
  // A scale per page would have to follow its slots.
  const Tensor rows = zeros({4, 16, 2, 8}, Dtype::i8), values = zeros({4, 16, 2, 8}, Dtype::i8);
  float scales[4];
  const Tensor by_page(scales, Dtype::f32, {4, 16, 2}, {1, 0, 0});
  EXPECT_NE(refusal(model(1, 2, 8, 8), {PagedKv{rows, values, PageLayout::slot_head, by_page}})
                .find("slots of the key scales of layer 0"),
            std::string::npos);
}

TEST(CacheLayout, RefusesValuesThatAreTheirKeys) {
  const Tensor rows = zeros({1, 2, 16, 8}, Dtype::f32);
  EXPECT_EQ(refusal(model(1, 2, 8, 8), {DenseKv{rows, rows}}),
            "cache: values of layer 0 are its keys; allowed memory of their own, or, with a value_dim below key_dim, a "
            "part of the keys");
  EXPECT_EQ(refusal(model(1, 2, 8, 6), {DenseKv{rows, rows.narrow(3, 0, 6)}}), "") << "latent rows";
  EXPECT_EQ(refusal(model(1, 2, 8, 8), {DenseKv{rows, zeros({1, 2, 16, 8}, Dtype::f32)}}), "");
}

/// Why a cache of one layer cannot be bound; "" if it can.
std::string unbound(const LayerKv& layer) {
  const std::vector<LayerKv> layers{layer};
  const std::vector<std::int32_t> all{0};
  try {
    static_cast<void>(common_form(model(1, 2, 8, 6), layers, all));
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

Tensor numbers(const Shape& sizes) { return zeros(sizes, Dtype::f32); }

TEST(CacheLayout, NamesExtrasThatDoNotFitTheirKeys) {
  const auto dense = [](Tensor extra) {
    DenseKv kv{numbers({3, 2, 16, 8}), numbers({3, 2, 16, 6})};
    kv.extra = std::move(extra);
    return unbound(kv);
  };
  EXPECT_EQ(dense(numbers({3, 2, 16, 1})), "");
  for (const Shape& sizes :
       {Shape{3, 2, 16}, Shape{3, 2, 15, 4}, Shape{3, 1, 16, 4}, Shape{2, 2, 16, 4}, Shape{3, 2, 16, 0}})
    EXPECT_EQ(dense(numbers(sizes)),
              text("cache: extras of layer 0 have shape ", sizes,
                   "; allowed places, heads and slots as the keys, 3, 2 and 16, and then one number or more"));
  EXPECT_EQ(dense(Tensor(nullptr, Dtype::f32, {3, 2, 16, 4})),
            "cache: extras of layer 0 have no address (null); allowed an address");
  float memory[3 * 2 * 16 * 4];
  EXPECT_EQ(dense(Tensor(memory, Dtype::f32, {3, 2, 16, 4}, {128, 64, 1, 16})),
            "cache: extras of layer 0 have stride 16 in the last dimension; allowed 1: a slot's numbers side by side");
  PagedKv paged{numbers({3, 16, 2, 8}), numbers({3, 16, 2, 6})};
  paged.extra = numbers({3, 2, 16, 4});
  EXPECT_EQ(unbound(paged),
            "cache: extras of layer 0 have shape [3, 2, 16, 4]; allowed pages, slots and heads as the keys, "
            "3, 16 and 2, and then one number or more");
}

TEST(CacheLayout, NamesTheLayoutsOfEnginesInWhichAHeadsNumbersLieApart) {  // B40
  const Tensor classic_keys = numbers({9, 2, 2, 16, 4}), classic_values = numbers({9, 2, 6, 16});
  EXPECT_EQ(unbound(PagedKv{classic_keys, classic_values}),
            "cache: keys of layer 0 have shape [9, 2, 2, 16, 4], which looks like vLLM's classic layout [pages, heads, "
            "D/x, page_size, x], where a head's numbers lie apart; allowed [pages, page_size, 2, 8]");
  EXPECT_EQ(unbound(PagedKv{numbers({9, 2, 16, 8}), classic_values, PageLayout::head_slot}),
            "cache: values of layer 0 have shape [9, 2, 6, 16], which looks like vLLM's classic layout of values "
            "[pages, heads, D, page_size], where a head's numbers lie apart; allowed [pages, 2, page_size, 6] as the "
            "model spec says");
  EXPECT_EQ(unbound(DenseKv{numbers({1, 2, 64, 8}), numbers({1, 2, 6, 64})}),
            "cache: values of layer 0 have shape [1, 2, 6, 64], which looks transposed, [B, heads, D, capacity], where "
            "a head's numbers lie apart; allowed [B, 2, capacity, 6] as the model spec says");
  const Tensor turned = numbers({1, 2, 6, 64});
  EXPECT_EQ(
      unbound(DenseKv{numbers({1, 2, 64, 8}), Tensor(turned.bytes(), Dtype::f32, {1, 2, 64, 6}, {768, 384, 1, 64})}),
      "cache: values of layer 0 have stride 64 in the last dimension, as if they were stored transposed; allowed "
      "1: a head's numbers side by side");
  EXPECT_EQ(unbound(DenseKv{numbers({1, 2, 64, 7}), numbers({1, 2, 64, 6})}),
            "cache: keys of layer 0 have shape [1, 2, 64, 7]; allowed [B, 2, capacity, 8] as the model spec says");
}

TEST(CacheLayout, TakesPagesOfAnySizeOnTheCpuAndOfAPowerOfTwoOnADevice) {
  const auto pages = [](std::int64_t size, Device device) {
    const Tensor keys = numbers({3, size, 2, 8}), values = numbers({3, size, 2, 6});
    return unbound(PagedKv{Tensor(keys.bytes(), Dtype::f32, keys.sizes(), device),
                           Tensor(values.bytes(), Dtype::f32, values.sizes(), device)});
  };
  const Device gpu{.kind = Device::Kind::cuda, .index = 1};
  for (const std::int64_t size : {1, 16, 1024}) EXPECT_EQ(pages(size, {}) + pages(size, gpu), "") << size;
  for (const std::int64_t size : {3, 20, 24, 1000}) EXPECT_EQ(pages(size, {}), "") << size;
  EXPECT_EQ(pages(24, gpu),
            "cache: pages of layer 0 hold 24 slots on cuda:1; allowed 1 to 1024, a power of two on a GPU");
  EXPECT_EQ(pages(1025, {}), "cache: pages of layer 0 hold 1025 slots on cpu; allowed 1 to 1024");
}

}  // namespace
}  // namespace kvkeep::cache_layout_test
