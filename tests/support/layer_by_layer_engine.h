// SPDX-License-Identifier: Apache-2.0
#pragma once
/// An engine around a keeper that runs one layer after the other, for tests of prompts that are narrowed while they
/// run.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/prompts.h"
#include "layered_prompt.h"

namespace kvkeep::layer_by_layer {

using testing::Array;
using testing::Ints;

inline constexpr std::int32_t kLayers = 6, kHeads = 2, kQueryHeads = 4, kRows = kLayers * kHeads, kKeyDim = 8,
                              kValueDim = 6, kExtraDim = 3, kCapacity = 160;

inline ModelSpec model() {
  return {.query_heads = kQueryHeads,
          .kv_heads = kHeads,
          .key_dim = kKeyDim,
          .value_dim = kValueDim,
          .softmax_scale = 0,
          .rope = {.inv_freq = {1.0, 0.3, 0.1, 0.01}},
          .layers = std::vector<LayerSpec>(kLayers)};
}

enum class Side : std::uint8_t { query, key, value, extra };
/// What a slot holds.
inline constexpr Side kHeld[] = {Side::key, Side::value, Side::extra};

inline float noise(std::uint64_t x) {
  x = (x + 0x9E3779B97F4A7C15ULL) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 29)) * 0x94D049BB133111EBULL;
  return static_cast<float>(static_cast<double>((x ^ (x >> 31)) >> 40) / 8388608.0 - 1.0);
}

/// Numbers of a token in one layer: they depend on nothing but their sequence, layer, token, position and head. From
/// layer id % 4 + 1 on layers hardly differ, so that each sequence settles elsewhere.
inline void fill(float* out, std::int32_t dim, SequenceId id, std::int32_t layer, std::int32_t token,
                 std::int32_t position, std::int32_t head, Side side) {
  const float own = layer <= id % 4 ? 1.5F : 0.1F;
  for (std::int32_t d = 0; d < dim; ++d) {
    std::uint64_t x = static_cast<std::uint64_t>(id);
    for (const std::int32_t part : {token, position, head, static_cast<std::int32_t>(side), d})
      x = x * 1000003 + static_cast<std::uint64_t>(part);
    out[d] = 2 * noise(x) + own * noise(x * 1000003 + static_cast<std::uint64_t>(layer) + 17);
  }
}

inline std::int32_t heads_of(Side side) { return side == Side::query ? kQueryHeads : kHeads; }
inline std::int32_t dim_of(Side side) {
  return side == Side::value ? kValueDim : side == Side::extra ? kExtraDim : kKeyDim;
}

/// An engine that runs one layer after the other.
class Engine {
 public:
  explicit Engine(const std::string& policy, std::int32_t page_size = 0, std::shared_ptr<Machine> accelerator = nullptr,
                  Dtype dtype = Dtype::f32)
      : Engine(make_policy(policy), page_size, std::move(accelerator), dtype) {}
  explicit Engine(std::unique_ptr<KVPolicy> policy, std::int32_t page_size = 0,
                  std::shared_ptr<Machine> accelerator = nullptr, Dtype dtype = Dtype::f32)
      : keeper(model(), std::move(policy),
               {.layer_by_layer = true, .given_scores = true, .accelerator = std::move(accelerator)}),
        page_size_(page_size),
        pool(page_size == 0 ? 0 : 8 * kCapacity / page_size, std::max(page_size, 1)),
        pages(pool) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto side = [&](std::int32_t dim) {
        return page_size == 0 ? Array::full({8, kHeads, kCapacity, dim}, -7, dtype, keeper.device())
                              : Array::full({pool.capacity(), page_size, kHeads, dim}, -7, dtype, keeper.device());
      };
      const auto add = [&](auto kv) {
        kv.keys = side(kKeyDim), kv.values = side(kValueDim), kv.extra = side(kExtraDim);
        layers.emplace_back(std::move(kv));
      };
      page_size == 0 ? add(DenseKv()) : add(PagedKv());
    }
    keeper.bind(layers);
  }

  struct Work {
    SequenceId id;
    std::int32_t tokens;
  };

  void join(SequenceId id, std::optional<std::int32_t> prompt = {}) {
    keeper.join(id, 0, prompt);
    lengths[id] = Ints(kRows, 0);
    fed[id] = 0;
    tokens[id].clear();
    if (page_size_ > 0) ASSERT_TRUE(pages.admit(id, 0).given());
  }

  Report step(const std::vector<Work>& work) {
    begin(work);
    for (std::int32_t l = 0; l < kLayers; ++l) {
      observe(l);
      narrow(l);
    }
    return end();
  }

  void begin(const std::vector<Work>& work) {
    ids.clear(), flat.clear(), present.clear(), gone.clear(), narrowed.clear();
    for (const Work& w : work) {
      ids.push_back(w.id);
      std::int32_t& first = fed[w.id];
      Ints& own = tokens[w.id];
      while (static_cast<std::int32_t>(own.size()) < first + w.tokens)
        own.push_back(static_cast<std::int32_t>(own.size()));
      for (std::int32_t t = 0; t < w.tokens; ++t) present[w.id].push_back(first + t);
      first += w.tokens;
      for (const std::int32_t length : lengths[w.id]) flat.push_back(length + w.tokens);
      if (page_size_ > 0) {
        const PageGrant grant = pages.append(w.id, w.tokens);
        ASSERT_TRUE(grant.given());
        copy_pages(layers, grant.copies);
      }
    }
    if (page_size_ > 0) block_table = Array(pages.table(ids)).to(page_size_ == 1 ? Dtype::i64 : Dtype::i32);
  }

  /// Writes K and V of the tokens present, and says what there is to observe.
  Observation run(std::int32_t l) {
    active.clear();
    indptr = {0};
    for (const SequenceId id : ids) {
      if (gone.contains(id)) continue;
      active.push_back(id);
      indptr.push_back(indptr.back() + static_cast<std::int32_t>(present[id].size()));
    }
    queries = Array::empty({indptr.back(), kQueryHeads, kKeyDim}, Dtype::f32);
    const OnHost mirror(*this, l, true);
    float* q = queries.data<float>();
    for (const SequenceId id : active) {
      std::int32_t i = 0;
      for (const std::int32_t position : present[id]) {
        const std::int32_t token = tokens[id][static_cast<std::size_t>(position)];
        for (std::int32_t h = 0; h < kQueryHeads; ++h, q += kKeyDim)
          fill(q, kKeyDim, id, l, token, position, h, Side::query);
        for (std::int32_t h = 0; h < kHeads; ++h)
          for (const Side side : kHeld) {
            float numbers[kKeyDim];
            fill(numbers, dim_of(side), id, l, token, position, h, side);
            put(numbers, id, l, h, lengths[id][static_cast<std::size_t>(l * kHeads + h)] + i, side);
          }
        ++i;
      }
    }
    queries = queries.to(keeper.device());
    return {.layer = l, .sequences = active, .indptr = indptr, .queries = queries, .basis = basis};
  }

  void observe(std::int32_t l) {
    keeper.observe(run(l));
    if (keeper.policy().needs().given_scores)  // the first number of each query, for as many heads as there are rows
      keeper.part<parts::Given>().give(
          {.layer = l, .sequences = active, .indptr = indptr, .scores = queries.select(2, 0).narrow(1, 0, kHeads)});
  }

  LayerReport narrow(std::int32_t l) {
    auto* const prompts = keeper.find<parts::Prompts>();
    if (prompts == nullptr) return {};
    const LayerReport report = prompts->narrow(
        {.layer = l, .sequences = active, .indptr = indptr, .queries = queries, .basis = basis}, view());
    if (page_size_ > 0) pages.settle(ids, report.pages);
    for (const Narrowing& n : report.prompts) {
      narrowed.emplace_back(l, n);
      if (!n.tokens) continue;
      Ints& left = present[n.sequence];
      left = at(left, *n.tokens);
      if (!n.restart) continue;
      gone.insert(n.sequence);
      tokens[n.sequence] = at(tokens[n.sequence], left);
      fed[n.sequence] = 0;
    }
    return report;
  }

  Report end() {
    if (page_size_ > 0) block_table = Array(pages.table(ids)).to(page_size_ == 1 ? Dtype::i64 : Dtype::i32);
    const Report report = keeper.step(view());
    if (page_size_ > 0) pages.settle(ids, report.pages);
    for (std::size_t i = 0; i < ids.size(); ++i)
      std::copy_n(flat.begin() + static_cast<std::ptrdiff_t>(i) * kRows, kRows, lengths[ids[i]].begin());
    return report;
  }

  CacheView view() {
    places.assign(ids.begin(), ids.end());
    CacheView all{.sequences = ids, .lengths = {flat, kRows}};
    if (page_size_ == 0)
      all.places = places;
    else
      all.block_table = block_table, all.pages = &pool;
    return all;
  }

  static Ints at(const Ints& list, const Ints& where) {
    Ints out;
    for (const std::int32_t i : where) out.push_back(list[static_cast<std::size_t>(i)]);
    return out;
  }

  [[nodiscard]] std::vector<Ints> kept(SequenceId id) const {
    std::vector<Ints> rows;
    for (std::int32_t r = 0; r < kRows; ++r) {
      const auto positions = keeper.positions(id, r / kHeads, r % kHeads);
      rows.emplace_back(positions.begin(), positions.end());
    }
    return rows;
  }

  /// Every row is as long as the keeper says, and holds K and V of the positions that it says.
  void expect_holds(SequenceId id) {
    const OnHost mirror(*this);
    for (std::int32_t r = 0; r < kRows; ++r) {
      const auto positions = keeper.positions(id, r / kHeads, r % kHeads);
      ASSERT_EQ(static_cast<std::int32_t>(positions.size()), lengths[id][static_cast<std::size_t>(r)])
          << "row " << r << " of sequence " << id;
      float want[kKeyDim];
      for (std::size_t s = 0; s < positions.size(); ++s)
        for (const Side side : kHeld) {
          fill(want, dim_of(side), id, r / kHeads, tokens[id][static_cast<std::size_t>(positions[s])], positions[s],
               r % kHeads, side);
          float have[kKeyDim];
          get(have, id, r / kHeads, r % kHeads, static_cast<std::int32_t>(s), side);
          ASSERT_TRUE(std::equal(want, want + dim_of(side), have))
              << "slot " << s << " of row " << r << ", sequence " << id << ", position " << positions[s];
        }
    }
  }

  /// Restores a sequence that `from` has saved, with its rows of the cache.
  void restore(SequenceId id, const std::filesystem::path& file, const Engine& from) {
    keeper.restore(id, file);
    lengths[id] = from.lengths.at(id), tokens[id] = from.tokens.at(id), fed[id] = from.fed.at(id);
    if (page_size_ > 0) ASSERT_TRUE(pages.admit(id, *std::ranges::max_element(lengths[id])).given());
    const OnHost theirs(from), ours(*this, -1, true);
    for (std::int32_t r = 0; r < kRows; ++r)
      for (std::int32_t slot = 0; slot < lengths[id][static_cast<std::size_t>(r)]; ++slot)
        for (const Side side : kHeld) {
          float numbers[kKeyDim];
          from.get(numbers, id, r / kHeads, r % kHeads, slot, side);
          put(numbers, id, r / kHeads, r % kHeads, slot, side);
        }
  }

  /// While it lives, put() and get() work on a copy on the host, which goes back if `writes`: one copy of a layer
  /// instead of one for every slot. layer: -1 for all.
  class OnHost {
   public:
    explicit OnHost(const Engine& engine, std::int32_t layer = -1, bool writes = false)
        : engine_(engine), writes_(writes) {
      if (engine.keeper.device().is_cpu()) return;
      engine.copy_ = engine.layers;
      for (std::int32_t l = 0; l < kLayers; ++l)
        if (layer < 0 || l == layer)
          each_side(l, [](const Tensor& there, Tensor& here) { here = Array(there).to(Device{}); });
    }
    ~OnHost() {
      for (std::int32_t l = 0; writes_ && !engine_.copy_.empty() && l < kLayers; ++l)
        each_side(l, [](const Tensor& there, Tensor& here) {
          if (here.device().is_cpu()) Array(there).copy_(Array(here));
        });
      engine_.copy_.clear();
    }
    OnHost(const OnHost&) = delete;
    OnHost& operator=(const OnHost&) = delete;

   private:
    template <class Do>
    void each_side(std::int32_t l, Do&& with) const {
      std::visit(
          [&](const auto& there) {
            using Kv = std::decay_t<decltype(there)>;
            if constexpr (!std::is_same_v<Kv, std::monostate>) {
              Kv& here = std::get<Kv>(engine_.copy_[static_cast<std::size_t>(l)]);
              with(there.keys, here.keys), with(there.values, here.values), with(there.extra, here.extra);
            }
          },
          engine_.layers[static_cast<std::size_t>(l)]);
    }

    const Engine& engine_;
    bool writes_;
  };

  /// Writes one slot, wherever the cache is.
  void put(float* numbers, SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t at, Side side) const {
    const auto [t, first] = slot(id, layer, head, at, side);
    if (t->device().is_cpu() && t->dtype() == Dtype::f32)
      std::copy_n(numbers, dim_of(side), t->data<float>() + first);
    else
      Array(*t).reshape({t->numel()}).narrow(0, first, dim_of(side)).copy_(on_host(numbers, side));
  }
  void get(float* numbers, SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t at, Side side) const {
    const auto [t, first] = slot(id, layer, head, at, side);
    if (t->device().is_cpu() && t->dtype() == Dtype::f32)
      std::copy_n(t->data<float>() + first, dim_of(side), numbers);
    else
      on_host(numbers, side).copy_(Array(*t).reshape({t->numel()}).narrow(0, first, dim_of(side)));
  }

  Keeper keeper;

 private:
  static Array on_host(float* numbers, Side side) { return Array(numbers, Dtype::f32, {dim_of(side)}); }
  /// The side of a layer, and the number where a slot begins.
  [[nodiscard]] std::pair<const Tensor*, std::int64_t> slot(SequenceId id, std::int32_t layer, std::int32_t head,
                                                            std::int32_t at, Side side) const {
    const LayerKv& kv = (copy_.empty() ? layers : copy_)[static_cast<std::size_t>(layer)];
    const auto of = [side](const auto& sides) {
      return side == Side::value ? &sides.values : side == Side::extra ? &sides.extra : &sides.keys;
    };
    if (page_size_ == 0) return {of(std::get<DenseKv>(kv)), ((id * kHeads + head) * kCapacity + at) * dim_of(side)};
    const std::int64_t page = pages.pages(id)[static_cast<std::size_t>(at / page_size_)];
    return {of(std::get<PagedKv>(kv)), ((page * page_size_ + at % page_size_) * kHeads + head) * dim_of(side)};
  }

  std::int32_t page_size_;
  mutable std::vector<LayerKv> copy_;

 public:
  PagePool pool;
  PagedSequences pages;
  std::vector<LayerKv> layers;
  QueryBasis basis = QueryBasis::pre_rope;
  std::map<SequenceId, Ints> lengths;      ///< of every row
  std::map<SequenceId, Ints> tokens;       ///< the token at every position
  std::map<SequenceId, std::int32_t> fed;  ///< positions so far
  std::vector<SequenceId> ids, active;     ///< of the step; of the layer
  std::map<SequenceId, Ints> present;      ///< positions of the step's tokens that have reached the layer
  std::set<SequenceId> gone;               ///< began afresh in this step
  std::vector<std::pair<std::int32_t, Narrowing>> narrowed;
  Ints flat, indptr, places;
  Array queries, block_table;
};

}  // namespace kvkeep::layer_by_layer
