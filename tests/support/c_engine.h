// SPDX-License-Identifier: Apache-2.0
#pragma once
/// An engine that knows kvkeep by its C interface alone, on the CPU or on a device.

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "engines.h"
#include "kvkeep/c.h"

namespace kvkeep::c_engine {

using testing::Array;
using namespace engines;

/// Tensors as C sees them, as long as this lives.
class Arrays {
 public:
  /// `before`: numbers of its memory that it does not begin with.
  const kvkeep_tensor* of(const Array& t, std::int64_t before = 0) {
    if (!t.defined()) return nullptr;
    kept_.push_back(t);
    kvkeep_tensor& made = made_.emplace_back();
    made.byte_offset = static_cast<std::uint64_t>(before * t.element_size());
    made.data = t.bytes() - made.byte_offset;
    made.device = {t.device().is_cuda() ? KVKEEP_CUDA : KVKEEP_CPU, t.device().index};
    made.ndim = static_cast<std::int32_t>(t.dim());
    made.dtype = {static_cast<std::uint8_t>(t.dtype() == Dtype::i32 || t.dtype() == Dtype::i64 ? KVKEEP_INT
                                            : t.dtype() == Dtype::bf16                         ? KVKEEP_BFLOAT
                                            : t.dtype() == Dtype::u8                           ? KVKEEP_UINT
                                                                                               : KVKEEP_FLOAT),
                  static_cast<std::uint8_t>(8 * t.element_size()), 1};
    made.shape = const_cast<std::int64_t*>(kept_.back().sizes().data());
    made.strides = const_cast<std::int64_t*>(kept_.back().strides().data());
    return &made;
  }
  void clear() {
    kept_.clear();
    made_.clear();
  }

 private:
  std::deque<Array> kept_;
  std::deque<kvkeep_tensor> made_;
};

class CModel {
 public:
  CModel() {
    of_c.size = sizeof of_c;
    of_c.num_layers = kLayers;
    of_c.query_heads = spec_.query_heads;
    of_c.kv_heads = kHeads;
    of_c.key_dim = kKeyDim;
    of_c.value_dim = kValueDim;
    of_c.rope_pairs = static_cast<std::int32_t>(spec_.rope.inv_freq.size());
    of_c.inv_freq = spec_.rope.inv_freq.data();
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l)
      if (const auto& rope = spec_.layers[static_cast<std::size_t>(l)].rope)
        ropes_.push_back({.layer = l,
                          .style = static_cast<std::int32_t>(rope->style),
                          .pairs = static_cast<std::int32_t>(rope->inv_freq.size()),
                          .reserved = 0,
                          .inv_freq = rope->inv_freq.data(),
                          .attention_scaling = rope->attention_scaling});
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l)
      if (const auto& sinks = spec_.layers[static_cast<std::size_t>(l)].sinks; !sinks.empty())
        sinks_.push_back({.layer = l, .heads = static_cast<std::int32_t>(sinks.size()), .sinks = sinks.data()});
    of_c.layer_sinks = sinks_.data();
    of_c.num_layer_sinks = std::ssize(sinks_);
    of_c.layer_ropes = ropes_.data();
    of_c.num_layer_ropes = std::ssize(ropes_);
  }
  CModel(const CModel&) = delete;
  kvkeep_model of_c{};

 private:
  ModelSpec spec_ = engines::model();
  std::vector<kvkeep_layer_rope> ropes_;
  std::vector<kvkeep_layer_sinks> sinks_;
};

struct Free {
  void operator()(kvkeep_keeper* keeper) const { kvkeep_keeper_free(keeper); }
};
using Kept = std::unique_ptr<kvkeep_keeper, Free>;

inline Kept make(const char* policy, const kvkeep_provided* provided = nullptr) {
  kvkeep_keeper* keeper = nullptr;
  const CModel model;
  EXPECT_EQ(kvkeep_keeper_make(&model.of_c, policy, provided, &keeper), KVKEEP_OK) << kvkeep_last_error();
  return Kept(keeper);
}

/// An engine that knows kvkeep by its C interface alone. Its caches are views that do not begin where their memory
/// does, and in dense ones sequence i begins at slot 3 i.
class CEngine {
 public:
  /// `provided` is of the device `there`. `ragged`: every row has a length of its own.
  explicit CEngine(const char* policy, std::int32_t page_size = 0, const kvkeep_provided* provided = nullptr,
                   Device there = Device{}, bool ragged = false)
      : keeper(make(policy, provided)),
        pool(page_size > 0 ? 1600 / page_size : 0, std::max(page_size, 1)),
        device(there),
        rows(ragged ? kRows : 1) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto sizes = [&](std::int64_t dim) {
        return page_size > 0 ? std::vector<std::int64_t>{pool.capacity(), kHeads, page_size, dim}
                             : std::vector<std::int64_t>{8, kHeads, 400, dim};
      };
      const auto side = [&](std::int64_t dim) {
        std::vector<std::int64_t> all = sizes(dim);
        ++all[0];
        return Array::full(all, 9, Dtype::f32, device).narrow(0, 1, all[0] - 1);
      };
      keys.push_back(side(kKeyDim));
      values.push_back(side(kValueDim));
      extra.push_back(Array::full(sizes(kExtraDim), 9, Dtype::i32, device));
    }
    paged = page_size > 0;
    allocator = {&pool, [](void* of, std::int32_t page) { return static_cast<PagePool*>(of)->references(page); },
                 [](void* of) { return static_cast<PagePool*>(of)->take(); },
                 [](void* of, std::int32_t page) { static_cast<PagePool*>(of)->give_back(page); }};
  }

  void join(std::int64_t id) {
    ASSERT_EQ(kvkeep_join(keeper.get(), id, 0, -1), KVKEEP_OK) << kvkeep_last_error();
    lengths[id] = Ints(kRows, 0);
  }

  /// side: a Sided, or whether the value is meant.
  [[nodiscard]] Array slot_of(std::int64_t id, std::int32_t layer, std::int32_t head, std::int32_t slot,
                              int side) const {
    return slot_in((side == kExtraOf    ? extra
                    : side == kValuesOf ? values
                                        : keys)[static_cast<std::size_t>(layer)],
                   id, head, slot);
  }
  [[nodiscard]] static std::int32_t start_of(std::int64_t id) { return static_cast<std::int32_t>(3 * id); }
  /// The same in a layer's side, or a copy of it.
  [[nodiscard]] Array slot_in(const Array& all, std::int64_t id, std::int32_t head, std::int32_t slot) const {
    if (!paged) return all[id][head][start_of(id) + slot];
    return all[pages.at(id)[static_cast<std::size_t>(slot / pool.page_size())]][head][slot % pool.page_size()];
  }

  /// What `queries` of earlier calls showed may be gone then: the device has passed it.
  void feed(const Numbers& numbers) {
    std::vector<Array> new_keys, new_values;
    for (std::size_t l = 0; l < kLayers; ++l) {
      new_keys.push_back(numbers.keys[l].to(device));
      new_values.push_back(numbers.values[l].to(device));
    }
    shown_.clear();
    for (std::size_t i = 0; i < numbers.ids.size(); ++i) {
      const std::int64_t id = numbers.ids[i];
      const std::int32_t tokens = numbers.indptr[i + 1] - numbers.indptr[i];
      while (paged && std::ssize(pages[id]) * pool.page_size() < std::ranges::max(lengths.at(id)) + tokens)
        pages[id].push_back(pool.take());
      std::int64_t fed = 0;
      ASSERT_EQ(kvkeep_logical_length(keeper.get(), id, &fed), KVKEEP_OK);
      for (std::int32_t t = 0; t < tokens; ++t)
        for (std::int32_t r = 0; r < kRows; ++r)
          for (const Sided one : kAllSides)
            slot_of(id, r / kHeads, r % kHeads, lengths.at(id)[static_cast<std::size_t>(r)] + t, one)
                .copy_(one == kExtraOf
                           ? Array::of(extra_of(static_cast<std::int32_t>(fed) + t, r)).to(device)
                           : (one == kValuesOf
                                  ? new_values
                                  : new_keys)[static_cast<std::size_t>(r / kHeads)][numbers.indptr[i] + t][r % kHeads]);
      for (std::int32_t& length : lengths.at(id)) length += tokens;
    }
    if (records) {
      kvkeep_step_tokens step{};
      step.size = sizeof step;
      step.num_sequences = std::ssize(numbers.ids);
      step.sequences = numbers.ids.data();
      step.indptr = numbers.indptr.data();
      step.query_code = KVKEEP_FLOAT;
      step.query_bits = 32;
      ASSERT_EQ(kvkeep_begin_step(keeper.get(), &step), KVKEEP_OK) << kvkeep_last_error();
    }
    for (std::int32_t l = 0; l < kLayers; ++l) {
      // Until the stream of the keeper has passed them, which may not be the one that LibTorch's allocator knows.
      const kvkeep_tensor* queries = shown_.of(numbers.queries[static_cast<std::size_t>(l)].to(device));
      if (records) {
        ASSERT_EQ(kvkeep_record(keeper.get(), l, queries, nullptr), KVKEEP_OK) << kvkeep_last_error();
        continue;
      }
      kvkeep_observation seen{};
      seen.size = sizeof seen;
      seen.layer = l;
      seen.num_sequences = std::ssize(numbers.ids);
      seen.sequences = numbers.ids.data();
      seen.indptr = numbers.indptr.data();
      seen.queries = queries;
      ASSERT_EQ(kvkeep_observe(keeper.get(), &seen), KVKEEP_OK) << kvkeep_last_error();
    }
  }

  using Call = kvkeep_status (*)(kvkeep_keeper*, const kvkeep_cache*, kvkeep_report*);
  kvkeep_status call(Call step, const std::vector<std::int64_t>& ids, kvkeep_report& report) {
    return call([&](const kvkeep_cache& cache) { return step(keeper.get(), &cache, &report); }, ids, report,
                step != kvkeep_plan);
  }
  /// The same for any number of calls over one cache. `moves`: they move slots.
  kvkeep_status call(const std::function<kvkeep_status(const kvkeep_cache&)>& calls,
                     const std::vector<std::int64_t>& ids, kvkeep_report& report, bool moves) {
    Arrays arrays;
    std::vector<kvkeep_layer_cache> layers;
    const auto side = [&](const Array& of) { return arrays.of(of, of.defined() ? of.stride(0) : 0); };
    for (std::size_t l = 0; l < kLayers; ++l)
      layers.push_back(
          {paged ? KVKEEP_PAGES_HEAD_SLOT : KVKEEP_DENSE, side(keys[l]), side(values[l]), nullptr, nullptr});
    Ints flat, places, starts;
    Array table = Array::full({std::ssize(ids), 400}, -1, pool.page_size() == 16 ? Dtype::i32 : Dtype::i64);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      flat.insert(flat.end(), lengths.at(ids[i]).begin(), lengths.at(ids[i]).begin() + rows);
      places.push_back(static_cast<std::int32_t>(ids[i]));
      starts.push_back(start_of(ids[i]));
      for (std::size_t p = 0; p < pages[ids[i]].size(); ++p)
        table[static_cast<std::int64_t>(i)][static_cast<std::int64_t>(p)].fill_(pages[ids[i]][p]);
    }
    kvkeep_cache cache{};
    cache.size = sizeof cache;
    cache.num_sequences = std::ssize(ids);
    cache.sequences = ids.data();
    cache.lengths = flat.data();
    cache.rows_per_sequence = rows;
    cache.places = paged ? nullptr : places.data();
    cache.starts = paged ? nullptr : starts.data();
    cache.block_table = paged ? arrays.of(table) : nullptr;
    cache.pages = paged ? &allocator : nullptr;
    report.size = sizeof report;
    std::vector<const kvkeep_tensor*> extras;
    for (const Array& of : extra) extras.push_back(arrays.of(of));
    if (!bound)
      if (const kvkeep_status status = kvkeep_bind_extra(keeper.get(), layers.data(), extras.data());
          status != KVKEEP_OK)
        return status;
    bound = true;
    const kvkeep_status status = calls(cache);
    if (status != KVKEEP_OK || !moves) return status;
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::int32_t r = 0; r < kRows; ++r)
        lengths.at(ids[i])[static_cast<std::size_t>(r)] =
            flat[i * static_cast<std::size_t>(rows) + static_cast<std::size_t>(rows == 1 ? 0 : r)];
    for (std::int64_t p = 0; p < report.num_pages; ++p) {
      const kvkeep_page_move& move = report.pages[p];
      pages.at(ids[static_cast<std::size_t>(move.index)]).assign(move.held, move.held + move.num_held);
    }
    return status;
  }

  [[nodiscard]] Ints positions(std::int64_t id, std::int32_t row) const {
    const std::int32_t* held = nullptr;
    std::int64_t count = 0;
    EXPECT_EQ(kvkeep_positions(keeper.get(), id, row / kHeads, row % kHeads, &held, &count), KVKEEP_OK);
    return {held, held + count};
  }

  Kept keeper;
  bool bound = false;  ///< to the cache as it is now
  PagePool pool;
  Device device;
  std::int32_t rows;  ///< lengths of a sequence in the cache
  bool paged = false;
  bool records = false;  ///< kvkeep_begin_step() and kvkeep_record() instead of kvkeep_observe()
  std::vector<Array> keys, values, extra;
  std::map<std::int64_t, Ints> lengths;
  std::map<std::int64_t, Ints> pages;
  kvkeep_page_allocator allocator{};

 private:
  Arrays shown_;
};

/// Slots, positions and rows are those of an engine in C++.
inline void expect_same(const Engine& cpp, const CEngine& c) {
  const Engine::OnHost copy(cpp);
  std::vector<Array> sides[std::size(kAllSides)];
  for (std::size_t l = 0; l < kLayers; ++l) {
    sides[kKeysOf].push_back(c.keys[l].to(Device{}));
    sides[kValuesOf].push_back(c.values[l].to(Device{}));
    sides[kExtraOf].push_back(c.extra[l].to(Device{}));
  }
  for (const auto& [id, lengths] : c.lengths)
    for (std::int32_t r = 0; r < kRows; ++r) {
      const auto held = cpp.keeper.positions(id, r / kHeads, r % kHeads);
      ASSERT_EQ(c.positions(id, r), Ints(held.begin(), held.end()));
      for (std::int32_t t = 0; t < lengths[static_cast<std::size_t>(r)]; ++t)
        for (const Sided side : kAllSides)
          ASSERT_TRUE(same_bits(cpp.slot_of(id, r / kHeads, r % kHeads, t, side),
                                c.slot_in(sides[side][static_cast<std::size_t>(r / kHeads)], id, r % kHeads, t)))
              << "side " << side << " of slot " << t << ", row " << r << ", sequence " << id;
    }
}

/// Both engines take sequences 1 and 2, a prompt each and then a few tokens a step, and report alike. inspect(expected,
/// report) sees every report.
template <class Inspect>
void expect_same_steps(DenseEngine& cpp, CEngine& c, int steps, const Inspect& inspect) {
  oracle::Random random(5);
  for (const SequenceId id : {1, 2}) {
    cpp.join(id);
    c.join(id);
  }
  for (int n = 0; n < steps; ++n) {
    const Numbers numbers =
        n == 0 ? numbers_of(random, {{1, 45}, {2, 90}}) : numbers_of(random, {{2, 1 + n % 3}, {1, 2}});
    const Report expected = cpp.step(numbers);
    c.feed(numbers);
    kvkeep_report report{};
    ASSERT_EQ(c.call(kvkeep_step, numbers.ids, report), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(report.slots_dropped, expected.slots_dropped);
    EXPECT_EQ(report.slots_kept, expected.slots_kept);
    EXPECT_EQ(report.slots_chosen, expected.slots_chosen);
    EXPECT_EQ(report.bytes_after, expected.bytes_after);
    inspect(expected, report);
    if (::testing::Test::HasFatalFailure()) return;
  }
  ASSERT_NO_FATAL_FAILURE(expect_same(cpp, c));
}

}  // namespace kvkeep::c_engine
