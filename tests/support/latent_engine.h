// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Layers of latent attention (MLA) as DeepSeek V3.2 stores them: one KV head, whose values are a part of its keys, and
/// the keys of an indexer beside them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "arrays.h"
#include "engines.h"
#include "kvkeep/kvkeep.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

/// Policies that drop slots of such layers.
inline constexpr const char* kLatentPolicies[] = {
    "streaming,budget=32,interval=8",
    "random,budget=32,interval=8",
    "tova,budget=32,interval=8",
    "snapkv,budget=32,interval=8,window=4",
    "snapkv,budget=32,interval=8,window=4,style=rkv",
    "h2o,budget=32,interval=8",
    "rpc,budget=32,interval=8,window=4",
    "rkv,budget=32,interval=8,window=4",
    "vase,budget=32,interval=8,window=4",
    "defensive,budget=32,interval=8,window=4",
    "expected,budget=32,interval=8",
    "keydiff,budget=32,interval=8",
    "knorm,budget=32,interval=8",
    "cur,budget=32,interval=8",
    "ams-tova,budget=32,interval=8,recent=4,window=4,min_segment=2,max_segment=16",
    "ams-expected,budget=32,interval=8,recent=4,window=4,min_segment=2,max_segment=16",
    "pyramidkv-snapkv,budget=32,interval=8,window=4",
    "adakv-snapkv,budget=32,interval=8,window=4",
    "chunkkv,budget=32,interval=8,window=4,chunk=4",
    "criticalkv-snapkv,budget=32,interval=8,window=4"};

/// How the rows lie in memory.
struct LatentForm {
  bool leading = true;         ///< values are the first numbers of a key, else the last
  bool apart = false;          ///< the same numbers, in memory of their own
  std::int32_t page_size = 0;  ///< 0: dense
  Dtype dtype = Dtype::f32;
};

/// One sequence.
class LatentEngine {
 public:
  static constexpr std::int32_t kLayers = 2, kQueryHeads = 8, kKeyDim = 24, kValueDim = 16, kCapacity = 128;

  static ModelSpec model() {
    ModelSpec spec{.query_heads = kQueryHeads,
                   .kv_heads = 1,
                   .key_dim = kKeyDim,
                   .value_dim = kValueDim,
                   .softmax_scale = 1 / std::sqrt(12.0),  // of the heads before they were absorbed
                   .rope = RopeSpec::absent(),            // part of what is cached
                   .layers = std::vector<LayerSpec>(kLayers)};
    return spec;
  }

  explicit LatentEngine(const std::string& policy, LatentForm form, const std::shared_ptr<Machine>& machine = nullptr)
      : keeper(model(), make_policy(policy),
               {.output_projections = projections(machine == nullptr ? Device{} : machine->device()),
                .accelerator = machine}),
        form_(form),
        random_(77) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto side = [&](std::int64_t dim, Dtype dtype) {
        const std::int64_t size = form.page_size;
        return Array::full(size == 0 ? std::vector<std::int64_t>{1, 1, kCapacity, dim}
                                     : std::vector<std::int64_t>{kCapacity / size, size, 1, dim},
                           9, dtype, keeper.device());
      };
      const Array keys = side(kKeyDim, form.dtype);
      keys_.push_back(keys);
      values_.push_back(form.apart ? side(kValueDim, form.dtype) : keys.narrow(3, value_at(), kValueDim));
      extra_.push_back(side(engines::kExtraDim, Dtype::i32));
      if (form.page_size == 0)
        layers.push_back(engines::with_extra(DenseKv{keys, values_.back()}, extra_.back()));
      else
        layers.push_back(engines::with_extra(PagedKv{keys, values_.back()}, extra_.back()));
    }
    for (std::int32_t p = 0; form.page_size > 0 && p < kCapacity / form.page_size; ++p) pages.push_back(p);
    keeper.bind(layers);
    keeper.join(kId);
    lengths.assign(kLayers, 0);
    text_.resize(kLayers);
  }

  Report step(std::int32_t tokens) {
    const std::int32_t indptr[] = {0, tokens}, first = static_cast<std::int32_t>(keeper.logical_length(kId));
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto layer = static_cast<std::size_t>(l);
      const Array keys = normals(random_, {tokens, kKeyDim}).to(form_.dtype), there = keys.to(keeper.device());
      for (std::int32_t t = 0; t < tokens; ++t) {
        const std::int32_t slot = lengths[layer] + t;
        in(keys_[layer], slot).copy_(there[t]);
        if (form_.apart) in(values_[layer], slot).copy_(there[t].narrow(0, value_at(), kValueDim));
        in(extra_[layer], slot).copy_(Array::of(engines::extra_of(first + t, l)).to(keeper.device()));
        text_[layer].push_back(keys[t].clone());
      }
      lengths[layer] += tokens;
      keeper.observe({.layer = l,
                      .sequences = {&kId, 1},
                      .indptr = indptr,
                      .queries = normals(random_, {tokens, kQueryHeads, kKeyDim}).to(keeper.device()),
                      .basis = QueryBasis::post_rope});
    }
    CacheView view{.sequences = {&kId, 1}, .lengths = {lengths, kLayers}};
    Array table;
    if (form_.page_size > 0) {
      table = Array::of(pages).unsqueeze(0).clone();
      view.block_table = table;
    }
    Report report = keeper.step(view).wait();
    for (const PageMove& move : report.pages) {  // those that it gave back hold the tokens to come
      pages = move.after;
      pages.insert(pages.end(), move.freed.begin(), move.freed.end());
      for (std::int32_t p = 0; p < kCapacity / form_.page_size; ++p)
        if (std::ranges::find(pages, p) == pages.end()) pages.push_back(p);
    }
    return report;
  }

  /// Every slot holds the key of its position, the values in it, and what else it has.
  void expect_holds() const {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto layer = static_cast<std::size_t>(l);
      const Array keys = keys_[layer].to(Device{}), values = values_[layer].to(Device{}),
                  extra = extra_[layer].to(Device{});
      const auto positions = keeper.positions(kId, l, 0);
      ASSERT_EQ(std::ssize(positions), lengths[layer]);
      for (std::int32_t slot = 0; slot < lengths[layer]; ++slot) {
        const std::int32_t position = positions[static_cast<std::size_t>(slot)];
        const Array& key = text_[layer][static_cast<std::size_t>(position)];
        ASSERT_TRUE(in(keys, slot).equal(key)) << "layer " << l << ", slot " << slot;
        ASSERT_TRUE(in(values, slot).equal(key.narrow(0, value_at(), kValueDim))) << "layer " << l << ", slot " << slot;
        ASSERT_TRUE(in(extra, slot).equal(Array::of(engines::extra_of(position, l))))
            << "layer " << l << ", slot " << slot;
      }
    }
  }

  /// Bytes of a slot of both layers.
  [[nodiscard]] std::int64_t slot_bytes() const {
    return kLayers * ((kKeyDim + (form_.apart ? kValueDim : 0)) * element_size(form_.dtype) + engines::kExtraDim * 4);
  }

  static constexpr SequenceId kId = 5;
  Keeper keeper;
  std::vector<LayerKv> layers;
  std::vector<std::int32_t> lengths, pages;

 private:
  static std::vector<Tensor> projections(Device device) {
    oracle::Random random(99);
    std::vector<Tensor> all;
    for (std::int32_t l = 0; l < kLayers; ++l) all.push_back(normals(random, {10, kQueryHeads * kValueDim}).to(device));
    return all;
  }
  [[nodiscard]] std::int64_t value_at() const { return form_.leading ? 0 : kKeyDim - kValueDim; }
  [[nodiscard]] Array in(const Array& side, std::int32_t slot) const {
    if (form_.page_size == 0) return side[0][0][slot];
    return side[pages[static_cast<std::size_t>(slot / form_.page_size)]][slot % form_.page_size][0];
  }

  LatentForm form_;
  oracle::Random random_;
  std::vector<Array> keys_, values_, extra_;
  std::vector<std::vector<Array>> text_;  ///< [layers, tokens] keys
};

/// The same positions stay in both, at every event of a prompt and `steps` tokens.
inline void expect_same_slots(LatentEngine& one, LatentEngine& other, int steps) {
  std::int64_t dropped = 0;
  for (int n = 0; n <= steps; ++n) {
    const Report a = one.step(n == 0 ? 60 : 1), b = other.step(n == 0 ? 60 : 1);
    ASSERT_EQ(one.lengths, other.lengths) << "step " << n;
    ASSERT_EQ(a.bytes_before * other.slot_bytes(), b.bytes_before * one.slot_bytes()) << "step " << n;
    for (std::int32_t l = 0; l < LatentEngine::kLayers; ++l) {
      const auto x = one.keeper.positions(LatentEngine::kId, l, 0), y = other.keeper.positions(LatentEngine::kId, l, 0);
      ASSERT_TRUE(std::equal(x.begin(), x.end(), y.begin(), y.end())) << "layer " << l << ", step " << n;
    }
    if (a.cuts.empty()) continue;
    dropped += a.slots_dropped;
    ASSERT_NO_FATAL_FAILURE(one.expect_holds());
    ASSERT_NO_FATAL_FAILURE(other.expect_holds());
  }
  EXPECT_GT(dropped, 0);
}

}  // namespace kvkeep::testing
