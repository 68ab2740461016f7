// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Engines around a keeper, dense and paged, on the CPU or on a device: what they hold after any steps can be compared
/// slot by slot.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "arrays.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/given.h"
#include "oracle/random_case.h"

namespace kvkeep::engines {

using testing::Array;
using Ints = std::vector<std::int32_t>;

inline constexpr std::int32_t kLayers = 2, kHeads = 2, kRows = kLayers * kHeads, kKeyDim = 8, kValueDim = 6;

/// The last layer turns otherwise, and sink logits join its softmaxes.
inline ModelSpec model() {
  ModelSpec spec{.query_heads = 4,
                 .kv_heads = kHeads,
                 .key_dim = kKeyDim,
                 .value_dim = kValueDim,
                 .softmax_scale = 0,
                 .rope = {.inv_freq = {1.0, 0.3, 0.1, 0.01}},
                 .layers = std::vector<LayerSpec>(kLayers)};
  spec.layers.back().rope = {.inv_freq = {0.7, 0.2, 0.02, 0.0}, .attention_scaling = 1.1};
  spec.layers.back().sinks = {3, -std::numeric_limits<float>::infinity(), 1, 4.5};
  return spec;
}

/// Sides of a slot, as slot_of() takes them.
enum Sided : int { kKeysOf, kValuesOf, kExtraOf };
inline constexpr Sided kAllSides[] = {kKeysOf, kValuesOf, kExtraOf};

/// What else a slot has: three numbers that say which it is.
inline constexpr std::int32_t kExtraDim = 3;
inline Ints extra_of(std::int32_t position, std::int32_t row) { return {position, row, ~position}; }

/// How K and V lie in memory.
enum class Form { apart, sides_first, pages_first, latent };
inline constexpr int kForms = 4;

/// The numbers of one step: [tokens, heads, dim] a layer.
struct Numbers {
  std::vector<SequenceId> ids;
  Ints indptr{0};
  std::vector<Array> keys, values, queries;
};

inline Numbers numbers_of(oracle::Random& random, const std::vector<std::pair<SequenceId, std::int32_t>>& work) {
  Numbers step;
  for (const auto& [id, tokens] : work) {
    step.ids.push_back(id);
    step.indptr.push_back(step.indptr.back() + tokens);
  }
  for (std::int32_t l = 0; l < kLayers; ++l) {
    step.keys.push_back(testing::normals(random, {step.indptr.back(), kHeads, kKeyDim}));
    step.values.push_back(testing::normals(random, {step.indptr.back(), kHeads, kValueDim}));
    step.queries.push_back(testing::normals(random, {step.indptr.back(), 4, kKeyDim}));
  }
  return step;
}

/// Keys whose first numbers are the values, as Form::latent holds them.
inline Numbers latent(Numbers numbers) {
  for (std::size_t l = 0; l < numbers.keys.size(); ++l)
    numbers.keys[l].narrow(2, 0, kValueDim).copy_(numbers.values[l]);
  return numbers;
}

inline std::vector<Tensor> output_projections(Device device) {
  oracle::Random random(99);
  std::vector<Tensor> all;
  for (std::int32_t l = 0; l < kLayers; ++l) all.push_back(testing::normals(random, {10, 4 * kValueDim}).to(device));
  return all;
}

template <class Kv>
LayerKv with_extra(Kv kv, Tensor extra) {
  kv.extra = std::move(extra);
  return kv;
}
template <class Kv>
const Tensor& side_of(const Kv& kv, int side) {
  return side == kExtraOf ? kv.extra : side == kValuesOf ? kv.values : kv.keys;
}

/// One engine: its cache, its keeper, and the length of every row.
class Engine {
 public:
  Engine(std::unique_ptr<KVPolicy> policy, bool ragged, std::shared_ptr<Machine> accelerator)
      : keeper(model(), std::move(policy),
               {.output_projections = output_projections(accelerator == nullptr ? Device{} : accelerator->device()),
                .given_scores = true,
                .accelerator = accelerator}),
        ragged_(ragged) {}
  /// Events that no scorer had a say in test nothing of it (B35).
  virtual ~Engine() {
    const Totals& totals = keeper.totals();
    if (totals.slots_kept == 0 || totals.slots_chosen > 0 || no_say || keeper.policy().name() == "streaming") return;
    ADD_FAILURE() << keeper.policy().to_json()
                  << " chose none of the slots that its events kept; set no_say if a test "
                     "means that";
  }

  void join(SequenceId id) {
    keeper.join(id);
    lengths[id] = Ints(kRows, 0);
  }
  /// A sequence that begins with the first slots of another.
  void fork(SequenceId id, SequenceId parent, std::int32_t slots) {
    share(id, parent, slots);
    keeper.join(id, slots);
    lengths[id] = Ints(kRows, slots);
    if (!keeper.policy().needs().given_scores) return;
    const Ints indptr{0, slots};
    for (std::int32_t l = 0; l < kLayers; ++l) {
      Array first = Array::empty({slots, kHeads}, Dtype::f32);
      const OnHost copy(*this);
      for (std::int32_t h = 0; h < kHeads; ++h)
        for (std::int32_t t = 0; t < slots; ++t) first[t][h].copy_(slot_of(id, l, h, t, false)[0]);
      keeper.part<parts::Given>().give(
          {.layer = l, .sequences = {&id, 1}, .indptr = indptr, .scores = first.to(keeper.device())});
    }
  }

  Report step(const Numbers& numbers, std::span<const std::int32_t> positions = {}) {
    feed(numbers, positions);
    return cut(numbers.ids);
  }

  /// A step without its end.
  void feed(const Numbers& numbers, std::span<const std::int32_t> positions = {}) {
    make_room(numbers);
    Ints places(positions.begin(), positions.end());
    gaps = gaps || !positions.empty();
    for (std::size_t i = 0; i < numbers.ids.size() && positions.empty(); ++i)
      for (std::int32_t t = numbers.indptr[i]; t < numbers.indptr[i + 1]; ++t)
        places.push_back(static_cast<std::int32_t>(keeper.logical_length(numbers.ids[i])) + t - numbers.indptr[i]);
    if (record)
      keeper.begin_step({.sequences = numbers.ids,
                         .indptr = numbers.indptr,
                         .log_sum_exp = gives_log_sum_exp,
                         .positions = positions});
    for (std::int32_t l = 0; l < kLayers; ++l) {
      // Sent once, as the cache holds them: a copy from the host waits for the device.
      const auto sent = [&](const Array& side, bool value) {
        return side.to(slot_of(numbers.ids.front(), l, 0, 0, value).dtype()).to(keeper.device());
      };
      const Array keys = sent(numbers.keys[static_cast<std::size_t>(l)], false),
                  values = sent(numbers.values[static_cast<std::size_t>(l)], true);
      Ints named;
      for (const std::int32_t place : places)
        for (std::int32_t h = 0; h < kHeads; ++h)
          for (const std::int32_t x : extra_of(place, l * kHeads + h)) named.push_back(x);
      const Array extra = Array(named.data(), Dtype::i32, {std::ssize(places), kHeads, kExtraDim}).to(keeper.device());
      for (std::size_t i = 0; i < numbers.ids.size(); ++i)
        for (std::int32_t t = numbers.indptr[i]; t < numbers.indptr[i + 1]; ++t)
          for (std::int32_t h = 0; h < kHeads; ++h) {
            const std::int32_t slot =
                lengths.at(numbers.ids[i])[static_cast<std::size_t>(l * kHeads + h)] + t - numbers.indptr[i];
            slot_of(numbers.ids[i], l, h, slot, false).copy_(keys[t][h]);
            slot_of(numbers.ids[i], l, h, slot, true).copy_(values[t][h]);
            slot_of(numbers.ids[i], l, h, slot, kExtraOf).copy_(extra[t][h]);
          }
      const Array queries = numbers.queries[static_cast<std::size_t>(l)].to(keeper.device());
      const Array normalisers = gives_log_sum_exp ? log_sum_exps(numbers, l, places) : Array();
      if (record)
        record(l, queries, normalisers);
      else
        keeper.observe({.layer = l,
                        .sequences = numbers.ids,
                        .indptr = numbers.indptr,
                        .queries = queries,
                        .log_sum_exp = normalisers,
                        .positions = positions});
      if (keeper.policy().needs().given_scores)  // any number will do: the first of each key
        keeper.part<parts::Given>().give(
            {.layer = l,
             .sequences = numbers.ids,
             .indptr = numbers.indptr,
             .scores = numbers.keys[static_cast<std::size_t>(l)].select(2, 0).to(keeper.device())});
    }
    for (std::size_t i = 0; i < numbers.ids.size(); ++i)
      for (std::int32_t& length : lengths.at(numbers.ids[i])) length += numbers.indptr[i + 1] - numbers.indptr[i];
  }

  Report cut(const std::vector<SequenceId>& ids) {
    CacheView view = this->view(ids);
    EventHandle event = keeper.step(view);
    if (!event.done() && while_pending) while_pending(view, event.report());
    const Report report = std::move(event).wait();
    settle(view, report);
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::int32_t r = 0; r < kRows; ++r) lengths.at(ids[i])[static_cast<std::size_t>(r)] = view.lengths.at(i, r);
    return report;
  }

  /// What the next cut() decides over; valid until the next call.
  CacheView view(const std::vector<SequenceId>& ids) {
    flat_.clear();
    for (const SequenceId id : ids)
      flat_.insert(flat_.end(), lengths.at(id).begin(), lengths.at(id).begin() + (ragged_ ? kRows : 1));
    CacheView all = view_of(ids);
    all.lengths = {flat_, ragged_ ? kRows : 1};
    return all;
  }

  /// What the next cut() would decide.
  Plan plan(const std::vector<SequenceId>& ids) { return keeper.plan(view(ids)); }

  std::int64_t workspace_bytes(const std::vector<SequenceId>& ids) { return keeper.workspace_bytes(view(ids)); }

  /// side: a Sided, or whether the value is meant.
  [[nodiscard]] virtual Array slot_of(SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t slot,
                                      int side) const = 0;

  /// While it lives, slot_of() gives slots of a copy on the host: one read of a device instead of one for every slot.
  class OnHost {
   public:
    explicit OnHost(const Engine& engine) : copy_(engine.copy_) {
      const auto here = [](const Tensor& side) { return Array(side).to(Device{}); };
      if (engine.keeper.device().is_cpu()) return;
      for (const LayerKv& layer : engine.layers)
        if (const auto* dense = std::get_if<DenseKv>(&layer))
          copy_.emplace_back(with_extra(DenseKv{here(dense->keys), here(dense->values)}, here(dense->extra)));
        else if (const auto* pages = std::get_if<PagedKv>(&layer))
          copy_.emplace_back(with_extra(PagedKv{here(pages->keys), here(pages->values)}, here(pages->extra)));
    }
    ~OnHost() { copy_.clear(); }
    OnHost(const OnHost&) = delete;
    OnHost& operator=(const OnHost&) = delete;

   private:
    std::vector<LayerKv>& copy_;
  };

  Keeper keeper;
  /// Instead of observe(), in every layer of a step that begin_step() has counted.
  std::function<void(std::int32_t layer, const Array& queries, const Array& log_sum_exp)> record;
  bool gives_log_sum_exp = false;
  bool gaps = false;    ///< positions were given, so that what else slots have may name others
  bool no_say = false;  ///< the test means a policy whose scorer chooses nothing
  /// Between step() and finish().
  std::function<void(const CacheView& view, const Report& report)> while_pending;
  std::map<SequenceId, Ints> lengths;
  std::vector<LayerKv> layers;

 protected:
  virtual void share(SequenceId id, SequenceId parent, std::int32_t slots) = 0;
  virtual void make_room(const Numbers& numbers) = 0;
  virtual CacheView view_of(const std::vector<SequenceId>& ids) = 0;
  virtual void settle(const CacheView& view, const Report& report) = 0;
  /// A layer as slot_of() shows it.
  [[nodiscard]] const LayerKv& shown(std::int32_t layer) const {
    return (copy_.empty() ? layers : copy_)[static_cast<std::size_t>(layer)];
  }

 private:
  /// Of every query over all slots that it sees, as attention would have it. `places`: of the tokens.
  [[nodiscard]] Array log_sum_exps(const Numbers& numbers, std::int32_t l, const Ints& places) const {
    const ModelSpec spec = model();
    const RopeSpec& rope = spec.rope_of(l);
    const auto pairs = static_cast<std::int64_t>(rope.inv_freq.size());
    std::vector<float> cosines(rope.inv_freq.size()), sines(rope.inv_freq.size());
    Array all = Array::empty({numbers.indptr.back(), 4}, Dtype::f32);
    const OnHost copy(*this);
    for (std::size_t i = 0; i < numbers.ids.size(); ++i)
      for (std::int32_t t = numbers.indptr[i]; t < numbers.indptr[i + 1]; ++t) {
        rope_at(rope, places[static_cast<std::size_t>(t)], cosines.data(), sines.data());
        for (std::int32_t hq = 0; hq < 4; ++hq) {
          Array query = numbers.queries[static_cast<std::size_t>(l)][t][hq].clone();
          rope_rotate(rope.style, pairs, cosines.data(), sines.data(), query.data<float>());
          const std::int32_t head = hq / 2,
                             before = lengths.at(numbers.ids[i])[static_cast<std::size_t>(l * kHeads + head)];
          const float* const sinks = spec.sinks_of(l, head);
          double sum = sinks == nullptr ? 0.0 : std::exp(static_cast<double>(sinks[hq % 2]));
          for (std::int32_t slot = 0; slot <= before + t - numbers.indptr[i]; ++slot) {
            const Array key = slot_of(numbers.ids[i], l, head, slot, false).to(Device{}).to(Dtype::f32);
            double x = 0;
            for (std::int32_t d = 0; d < kKeyDim; ++d)
              x += static_cast<double>(query.data<float>()[d]) * static_cast<double>(key.data<float>()[d]);
            sum += std::exp(x * model().scale());
          }
          all.data<float>()[t * 4 + hq] = static_cast<float>(std::log(sum));
        }
      }
    return all.to(keeper.device());
  }

  bool ragged_;
  Ints flat_;
  mutable std::vector<LayerKv> copy_;
};

class DenseEngine final : public Engine {
 public:
  DenseEngine(const std::string& policy, bool ragged, Dtype dtype, std::shared_ptr<Machine> accelerator = nullptr,
              Form form = Form::apart)
      : DenseEngine(make_policy(policy), ragged, dtype, std::move(accelerator), form) {}
  DenseEngine(std::unique_ptr<KVPolicy> policy, bool ragged, Dtype dtype,
              std::shared_ptr<Machine> accelerator = nullptr, Form form = Form::apart)
      : Engine(std::move(policy), ragged, std::move(accelerator)) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const Array keys = Array::full({8, kHeads, 400, kKeyDim}, 9, dtype, keeper.device());
      layers.emplace_back(with_extra(
          DenseKv{keys, form == Form::latent ? keys.narrow(3, 0, kValueDim)
                                             : Array::full({8, kHeads, 400, kValueDim}, 9, dtype, keeper.device())},
          Array::full({8, kHeads, 400, kExtraDim}, 9, Dtype::i32, keeper.device())));
    }
    keeper.bind(layers);
  }
  [[nodiscard]] Array slot_of(SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t slot,
                              int side) const override {
    return Array(side_of(std::get<DenseKv>(shown(layer)), side))[id][head][slot];
  }

 private:
  void share(SequenceId id, SequenceId parent, std::int32_t slots) override {
    for (std::int32_t l = 0; l < kLayers; ++l)
      for (std::int32_t h = 0; h < kHeads; ++h)
        for (std::int32_t t = 0; t < slots; ++t)
          for (const Sided side : kAllSides) slot_of(id, l, h, t, side).copy_(slot_of(parent, l, h, t, side));
  }
  void make_room(const Numbers&) override {}
  CacheView view_of(const std::vector<SequenceId>& ids) override {
    places_.assign(ids.begin(), ids.end());
    return {.sequences = ids, .lengths = {}, .places = places_};
  }
  void settle(const CacheView&, const Report&) override {}
  Ints places_;
};

class PagedEngine final : public Engine {
 public:
  PagedEngine(const std::string& policy, bool ragged, Dtype dtype, std::int32_t page_size, PageLayout layout, Form form,
              std::int32_t slots = 1600, std::shared_ptr<Machine> accelerator = nullptr)
      : Engine(make_policy(policy), ragged, std::move(accelerator)),
        layout_(layout),
        pool(slots / page_size, page_size),
        sequences(pool) {
    const std::int64_t pages = pool.capacity();
    const std::vector<std::int64_t> middle = layout == PageLayout::slot_head
                                                 ? std::vector<std::int64_t>{page_size, kHeads}
                                                 : std::vector<std::int64_t>{kHeads, page_size};
    for (std::int32_t l = 0; l < kLayers; ++l) {
      Array keys, values;
      if (form == Form::apart || form == Form::latent) {
        keys = Array::full({pages, middle[0], middle[1], kKeyDim}, 9, dtype, keeper.device());
        values = form == Form::latent
                     ? keys.narrow(3, 0, kValueDim)
                     : Array::full({pages, middle[0], middle[1], kValueDim}, 9, dtype, keeper.device());
      } else {
        const bool sides_first = form == Form::sides_first;
        const Array both =
            Array::full({sides_first ? 2 : pages, sides_first ? pages : 2, middle[0], middle[1], kKeyDim}, 9, dtype,
                        keeper.device());
        keys = both.select(sides_first ? 0 : 1, 0);
        values = both.select(sides_first ? 0 : 1, 1).narrow(3, 0, kValueDim);
      }
      layers.emplace_back(
          with_extra(PagedKv{keys, values, layout},
                     Array::full({pages, middle[0], middle[1], kExtraDim}, 9, Dtype::i32, keeper.device())));
    }
    keeper.bind(layers);
    // Pages in no order: some are taken and given back before anything begins.
    Ints taken;
    for (std::int64_t p = 0; p < pages; ++p) taken.push_back(pool.take());
    for (std::size_t p = 0; p < taken.size(); ++p) pool.give_back(taken[p * 7919 % taken.size()]);
  }
  [[nodiscard]] Array slot_of(SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t slot,
                              int side) const override {
    const Array page = Array(side_of(std::get<PagedKv>(shown(layer)),
                                     side))[sequences.pages(id)[static_cast<std::size_t>(slot / pool.page_size())]];
    return layout_ == PageLayout::slot_head ? page[slot % pool.page_size()][head] : page[head][slot % pool.page_size()];
  }

 private:
  PageLayout layout_;

 public:
  PagePool pool;
  PagedSequences sequences;
  PageAllocator* allocator = &pool;  ///< whom events ask
  Array block_table;
  Dtype table_dtype = Dtype::i32;
  SharedPages shared_pages = SharedPages::copy;

 private:
  void share(SequenceId id, SequenceId parent, std::int32_t slots) override { sequences.fork(id, parent, slots); }
  void make_room(const Numbers& numbers) override {
    for (std::size_t i = 0; i < numbers.ids.size(); ++i) {
      if (!sequences.knows(numbers.ids[i])) static_cast<void>(sequences.admit(numbers.ids[i], 0));
      const PageGrant grant = sequences.append(numbers.ids[i], numbers.indptr[i + 1] - numbers.indptr[i]);
      ASSERT_TRUE(grant.given());
      copy_pages(layers, grant.copies);
    }
  }
  CacheView view_of(const std::vector<SequenceId>& ids) override {
    block_table = Array(sequences.table(ids)).to(table_dtype);
    return {
        .sequences = ids, .lengths = {}, .block_table = block_table, .pages = allocator, .shared_pages = shared_pages};
  }
  void settle(const CacheView& view, const Report& report) override { sequences.settle(view.sequences, report.pages); }
};

inline bool same_bits(const Array& one, const Array& other) {
  const Array a = one.to(Device{}), b = other.to(Device{});
  return a.nbytes() == b.nbytes() && std::memcmp(a.bytes(), b.bytes(), a.nbytes()) == 0;
}

inline void expect_alike(const Engine& dense, const Engine& paged) {
  ASSERT_EQ(dense.lengths, paged.lengths);
  const Engine::OnHost here(dense), there(paged);
  for (const auto& [id, lengths] : dense.lengths)
    for (std::int32_t r = 0; r < kRows; ++r) {
      const auto a = dense.keeper.positions(id, r / kHeads, r % kHeads),
                 b = paged.keeper.positions(id, r / kHeads, r % kHeads);
      ASSERT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()))
          << "positions of row " << r << " of sequence " << id;
      for (std::int32_t t = 0; t < lengths[static_cast<std::size_t>(r)]; ++t)
        for (const Sided side : kAllSides) {
          const Array one = dense.slot_of(id, r / kHeads, r % kHeads, t, side);
          ASSERT_TRUE(same_bits(one, paged.slot_of(id, r / kHeads, r % kHeads, t, side)) &&
                      (side != kExtraOf || dense.gaps ||
                       same_bits(one, Array::of(extra_of(a[static_cast<std::size_t>(t)], r)))))
              << "side " << side << " of slot " << t << ", row " << r << ", sequence " << id;
        }
    }
}

}  // namespace kvkeep::engines
