// SPDX-License-Identifier: Apache-2.0
#pragma once
/// An engine whose policy folds: a dense or paged cache, attention over the rows, view() behind it, and beside it what
/// exact attention over everything gives. On a device, its own attention runs on the host all the same.

#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "arrays.h"
#include "folded_prompt.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/surprisal.h"
#include "plain_memory.h"

namespace kvkeep::testing {

struct FoldingEngine {
  /// Policies of small numbers for small tests: spans of up to 16 tokens.
  static constexpr const char *kTova = "tova,budget=32,interval=8,recent=8,rest=fold,memory.max_span=16",
                              *kSekv =
                                  "sekv,recent=12,interval=8,sink=2,memory.max_span=16,memory.min_span=3,"
                                  "memory.alpha=1.5";
  static constexpr std::int32_t kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 16, kCapacity = 640;

  static ModelSpec model() {
    ModelSpec spec;
    spec.query_heads = kQueryHeads, spec.kv_heads = kHeads, spec.key_dim = spec.value_dim = kDim;
    spec.layers.resize(kLayers);
    spec.layers.back().sinks = {1.5F, -std::numeric_limits<float>::infinity(), 0, 4};
    return spec;
  }

  explicit FoldingEngine(const std::string& policy, std::int32_t places = 1, std::int32_t page_size = 0,
                         Dtype dtype = Dtype::f32, std::shared_ptr<Machine> accelerator = nullptr)
      : keeper(model(), make_policy(policy),
               {.surprisal = true, .reads_folded = true, .accelerator = std::move(accelerator)}),
        pages(places * kCapacity / std::max(page_size, 1), std::max(page_size, 1)),
        sequences(pages) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      if (page_size == 0)
        cache.emplace_back(DenseKv{Array::full({places, kHeads, kCapacity, kDim}, 0, dtype, keeper.device()),
                                   Array::full({places, kHeads, kCapacity, kDim}, 0, dtype, keeper.device())});
      else
        cache.emplace_back(
            PagedKv{Array::full({places * kCapacity / page_size, kHeads, page_size, kDim}, 0, dtype, keeper.device()),
                    Array::full({places * kCapacity / page_size, kHeads, page_size, kDim}, 0, dtype, keeper.device()),
                    PageLayout::head_slot});
    }
    paged = page_size > 0;
    keeper.bind(cache);
    for (std::int32_t p = places; p > 0; --p) free_places.push_back(p - 1);
  }

  void join(SequenceId id) {
    keeper.join(id);
    if (paged) static_cast<void>(sequences.admit(id, 0));
    living.emplace(id, Living{oracle::Random(static_cast<std::uint64_t>(1000 + id)), free_places.back()});
    free_places.pop_back();
  }

  void leave(SequenceId id) {
    free_places.push_back(living.at(id).place);
    keeper.leave(id);
    if (paged) sequences.release(id);
    living.erase(id);
  }

  /// One step: so many new tokens of each sequence. What attention gives goes to `outputs`, what it would give over all
  /// tokens ever to `exact`: f32 [n_tokens, Hq, D] a layer.
  Report step(const std::vector<std::pair<SequenceId, std::int32_t>>& work) {
    std::vector<SequenceId> ids;
    std::vector<std::int32_t> indptr{0}, lengths, places;
    for (const auto& [id, tokens] : work) {
      ids.push_back(id), indptr.push_back(indptr.back() + tokens), places.push_back(living.at(id).place);
      if (paged) static_cast<void>(sequences.append(id, tokens));
      Living& s = living.at(id);
      for (std::int32_t t = 0; t < tokens; ++t) draw(s);
      lengths.insert(lengths.end(), s.lengths.begin(), s.lengths.end());
    }
    Array table;
    if (paged) table = sequences.table(ids), std::iota(places.begin(), places.end(), 0);
    std::vector<std::int32_t> after = lengths;
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::int32_t r = 0; r < kLayers * kHeads; ++r)
        after[i * kLayers * kHeads + static_cast<std::size_t>(r)] += indptr[i + 1] - indptr[i];
    const CacheView view{.sequences = ids,
                         .lengths = {after, kLayers * kHeads},
                         .places = places,
                         .block_table = table,
                         .pages = paged ? &pages : nullptr};
    outputs.clear(), exact.clear(), in_flight.clear();
    for (std::int32_t l = 0; l < kLayers; ++l) attend(l, work, indptr, view);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const Living& s = living.at(ids[i]);
      if (auto* surprisal = keeper.find<parts::Surprisal>(); surprisal != nullptr && tells_surprisal)
        surprisal->supply(ids[i], std::span(s.surprisal).last(static_cast<std::size_t>(indptr[i + 1] - indptr[i])));
    }
    hold(true);
    const Report report = keeper.step(view);
    hold(false);
    if (paged) sequences.settle(ids, report.pages);
    for (std::size_t i = 0; i < ids.size(); ++i)
      std::copy_n(after.begin() + static_cast<std::ptrdiff_t>(i) * kLayers * kHeads, kLayers * kHeads,
                  living.at(ids[i]).lengths.begin());
    return report;
  }

  /// Largest error of the last step's outputs.
  [[nodiscard]] double error() const {
    double most = 0;
    for (std::size_t l = 0; l < outputs.size(); ++l) most = std::max(most, apart(outputs[l], exact[l]));
    return most;
  }

  /// Every token is a slot or lies in one span, in every row.
  void expect_nothing_lost(SequenceId id) const {
    for (std::int32_t l = 0; l < kLayers; ++l)
      for (std::int32_t h = 0; h < kHeads; ++h) {
        const SpanRow& row = keeper.part<parts::Folds>().spans(id, l, h);
        const auto kept = keeper.positions(id, l, h);
        EXPECT_EQ(static_cast<std::int64_t>(kept.size()) + row.tokens(), keeper.logical_length(id));
        for (std::int64_t i = 0; i < row.size(); ++i) {
          const FoldedSpan& span = row.span(i);
          EXPECT_LE(span.first, span.last);
          EXPECT_LE(span.length, span.last - span.first + 1);
          EXPECT_FALSE(std::ranges::binary_search(kept, span.first)) << "a folded token is no slot";
        }
      }
  }

  struct Living {
    oracle::Random random;
    std::int32_t place;
    std::vector<std::int32_t> lengths = std::vector<std::int32_t>(kLayers * kHeads, 0);
    std::vector<float> surprisal = {};
    std::vector<float> keys = {}, values = {}, queries = {};  ///< [tokens, layers, heads, D]
  };

  Keeper keeper;
  std::vector<LayerKv> cache;
  PagePool pages;
  PagedSequences sequences;
  bool paged = false, tells_surprisal = true, views = true;
  std::int32_t first_position = 0;                ///< where texts begin
  std::function<void(bool)> hold = [](bool) {};   ///< called before and after the keeper's part of a step
  std::function<void(const Observation&)> ahead;  ///< called in each layer before its attention
  float poison = 0;                               ///< added to one number of the keys of the tokens that come
  std::vector<std::int32_t> free_places;
  std::map<SequenceId, Living> living;
  std::vector<Array> outputs, exact;
  std::vector<Array> in_flight;  ///< of the last step: what a device that is behind may still read

 private:
  /// A token that resembles the one before it: what is factorised falls off.
  void draw(Living& s) {
    const auto grow = [&](std::vector<float>& numbers, std::int32_t heads, bool smooth) {
      const std::size_t width = static_cast<std::size_t>(kLayers * heads * kDim), before = numbers.size();
      for (std::size_t i = 0; i < width; ++i) {
        const auto fresh = static_cast<float>(s.random.normal());
        numbers.push_back(smooth && before > 0 ? 0.8F * numbers[before - width + i] + 0.6F * fresh : fresh);
      }
    };
    grow(s.keys, kHeads, true), grow(s.values, kHeads, true), grow(s.queries, kQueryHeads, false);
    s.keys[s.keys.size() - kDim] += poison;
    s.surprisal.push_back(static_cast<float>(-std::log(1 - s.random.unit())));
  }

  void attend(std::int32_t layer, const std::vector<std::pair<SequenceId, std::int32_t>>& work,
              const std::vector<std::int32_t>& indptr, const CacheView& view) {
    const auto floats = Dtype::f32;
    const std::int64_t tokens = indptr.back();
    const std::vector<LayerKv> held = on_host();
    Array queries = Array::zeros({tokens, kQueryHeads, kDim}, floats),
          out = Array::zeros({tokens, kQueryHeads, kDim}, floats), lse = Array::zeros({tokens, kQueryHeads}, floats),
          all = Array::zeros({tokens, kQueryHeads, kDim}, floats);
    for (std::size_t i = 0; i < work.size(); ++i) {
      const Living& s = living.at(work[i].first);
      const std::int32_t count = work[i].second, seen = static_cast<std::int32_t>(s.surprisal.size());
      std::vector<std::int32_t> all_slots(1, static_cast<std::int32_t>(i));
      const RowTable table = make_rows(keeper.spec(), held, view, std::span(&layer, 1), all_slots);
      for (std::int32_t h = 0; h < kHeads; ++h) {
        const Row& row = table.rows[static_cast<std::size_t>(h)];
        for (std::int32_t t = 0; t < count; ++t) {
          const std::int64_t token = seen - count + t;
          put(row.keys, row.length - count + t, table.key_dtype,
              s.keys.data() + ((token * kLayers + layer) * kHeads + h) * kDim);
          put(row.values, row.length - count + t, table.key_dtype,
              s.values.data() + ((token * kLayers + layer) * kHeads + h) * kDim);
        }
        const Array keys = rows_of(row.keys, row.length, table.key_dtype),
                    values = rows_of(row.values, row.length, table.key_dtype);
        for (std::int32_t t = 0; t < count; ++t) {
          const std::int64_t token = seen - count + t;
          Array q = Array::zeros({1, 2, kDim}, floats);
          for (std::int32_t g = 0; g < 2; ++g)
            std::copy_n(s.queries.data() + ((token * kLayers + layer) * kQueryHeads + 2 * h + g) * kDim, kDim,
                        q.data<float>() + g * kDim);
          queries[indptr[i] + t].narrow(0, 2 * h, 2).copy_(q[0]);
          const std::int64_t slots = row.length - count + t + 1;
          const float* const sinks = keeper.spec().sinks_of(layer, h);
          const OpenAttention open = with_sinks(
              plain_attention(keys.narrow(1, 0, slots), values.narrow(1, 0, slots), q, keeper.spec().scale()), sinks);
          out[indptr[i] + t].narrow(0, 2 * h, 2).copy_(Array(closed(open))[0]);
          lse[indptr[i] + t].narrow(0, 2 * h, 2).copy_(Array(log_mass(open))[0]);
          const OpenAttention exactly =
              with_sinks(plain_attention(whole(s.keys, layer, h, token + 1), whole(s.values, layer, h, token + 1), q,
                                         keeper.spec().scale()),
                         sinks);
          all[indptr[i] + t].narrow(0, 2 * h, 2).copy_(Array(closed(exactly))[0]);
        }
      }
    }
    bring_back(held);
    std::vector<std::int32_t> positions;
    for (const auto& [id, count] : work)
      for (std::int32_t t = count; first_position > 0 && t > 0; --t)
        positions.push_back(first_position + static_cast<std::int32_t>(living.at(id).surprisal.size()) - t);
    const Device there = keeper.device();
    const Observation seen{.layer = layer,
                           .sequences = view.sequences,
                           .indptr = indptr,
                           .queries = queries.to(there),
                           .basis = QueryBasis::post_rope,
                           .positions = positions};
    out = out.to(there), lse = lse.to(there);
    in_flight.insert(in_flight.end(), {Array(seen.queries), out, lse});
    hold(true);
    keeper.observe(seen);
    if (ahead) ahead(seen);
    if (views) keeper.part<parts::Folds>().view(seen, {out, lse});
    hold(false);
    outputs.push_back(out.to(Device{})), exact.push_back(all);
  }

  /// Softmaxes of one query's heads, which sink logits join; null: none.
  static OpenAttention with_sinks(OpenAttention open, const float* sinks) {
    for (std::int64_t h = 0; sinks != nullptr && h < open.top.numel(); ++h) {
      const double top = open.top.data<float>()[h],
                   all = std::log(std::exp(top) + std::exp(static_cast<double>(sinks[h])));
      for (std::int64_t d = 0; d < kDim; ++d)
        open.out.data<float>()[h * kDim + d] *= static_cast<float>(std::exp(top - all));
      open.top.data<float>()[h] = static_cast<float>(all);
    }
    return open;
  }

  /// The cache, if it is on the host; else a copy of it.
  [[nodiscard]] std::vector<LayerKv> on_host() const {
    if (keeper.device().is_cpu()) return cache;
    std::vector<LayerKv> copies = cache;
    for (LayerKv& layer : copies) each_side(layer, [](Tensor& side) { side = Array(side).to(Device{}); });
    return copies;
  }
  /// What was written there.
  void bring_back(std::vector<LayerKv> held) {
    if (keeper.device().is_cpu()) return;
    for (std::size_t l = 0; l < cache.size(); ++l) {
      std::vector<Tensor> sides;
      each_side(held[l], [&](Tensor& side) { sides.push_back(side); });
      std::size_t next = 0;
      each_side(cache[l], [&](Tensor& side) { Array(side).copy_(Array(sides[next++])); });
    }
  }
  template <class Body>
  static void each_side(LayerKv& layer, const Body& body) {
    if (auto* dense = std::get_if<DenseKv>(&layer)) body(dense->keys), body(dense->values);
    if (auto* paged = std::get_if<PagedKv>(&layer)) body(paged->keys), body(paged->values);
  }

  static void put(const SlotAddress& at, std::int64_t slot, Dtype dtype, const float* from) {
    for (std::int32_t d = 0; d < kDim; ++d)
      if (dtype == Dtype::f32)
        reinterpret_cast<float*>(at.at(slot))[d] = from[d];
      else
        reinterpret_cast<BFloat16*>(at.at(slot))[d] = BFloat16(from[d]);
  }
  static Array rows_of(const SlotAddress& at, std::int64_t slots, Dtype dtype) {
    Array rows = Array::zeros({1, slots, kDim}, Dtype::f32);
    for (std::int64_t t = 0; t < slots; ++t)
      for (std::int32_t d = 0; d < kDim; ++d)
        rows.data<float>()[t * kDim + d] = dtype == Dtype::f32
                                               ? reinterpret_cast<const float*>(at.at(t))[d]
                                               : static_cast<float>(reinterpret_cast<const BFloat16*>(at.at(t))[d]);
    return rows;
  }
  static Array whole(const std::vector<float>& numbers, std::int32_t layer, std::int32_t head, std::int64_t tokens) {
    Array rows = Array::zeros({1, tokens, kDim}, Dtype::f32);
    for (std::int64_t t = 0; t < tokens; ++t)
      std::copy_n(numbers.data() + ((t * kLayers + layer) * kHeads + head) * kDim, kDim, rows.data<float>() + t * kDim);
    return rows;
  }
};

}  // namespace kvkeep::testing
