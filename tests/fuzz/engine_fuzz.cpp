// SPDX-License-Identifier: Apache-2.0
// What an engine gives: sizes, strides, bases, pages, places and lengths, right and wrong. A step either moves every
// kept slot whole and touches nothing else, or throws and changes nothing.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/policy/registry.h"

namespace {

using namespace kvkeep;

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  std::uint8_t next() { return left_ == 0 ? 0 : (--left_, *data_++); }
  /// 0 to n - 1.
  std::int32_t below(std::int32_t n) { return next() % n; }
  /// Mostly `usual`; now and then another number, sometimes an absurd one.
  std::int64_t bent(std::int64_t usual) {
    const std::uint8_t how = next();
    if (how < 224) return usual;
    if (how < 248) return static_cast<std::int8_t>(next());
    return how % 2 == 0 ? INT64_MAX - next() : INT64_MIN + next();
  }
  [[nodiscard]] bool empty() const { return left_ == 0; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "engine_fuzz: %s\n", what);
  std::abort();
}

constexpr std::int64_t kFloats = 4096;

/// One side of a layer within the arena, or nothing if it would leave it.
bool side_of(Bytes& bytes, float* arena, const Shape& sizes, bool slot_first, Tensor& side) {
  Shape strides = sizes;
  std::int64_t stride = 1;
  const bool slots_outside = !slot_first && bytes.next() % 4 == 0;  // heads within slots, as many engines store them
  const std::size_t order[] = {3, slots_outside ? 1U : 2U, slots_outside ? 2U : 1U, 0};
  for (const std::size_t d : order) {
    strides[d] = stride;
    stride *= sizes[d];
    if (bytes.next() >= 240) stride += bytes.below(5);
  }
  for (std::size_t d = 0; d < 3; ++d) strides[d] = bytes.bent(strides[d]);
  __extension__ using Wide = __int128;
  const std::int64_t base = bytes.next() * 16 + (bytes.next() >= 224 ? bytes.below(16) : 0);
  Wide low = base, high = base;
  for (std::size_t d = 0; d < 4; ++d) {
    const Wide last = Wide{sizes[d] - 1} * strides[d];
    (last < 0 ? low : high) += last;
  }
  if (low < 0 || high >= kFloats) return false;  // an engine's tensors lie in memory that it has
  side = Tensor(arena + base, Dtype::f32, sizes, strides);
  return true;
}

class WildPages final : public PageAllocator {
 public:
  explicit WildPages(Bytes& bytes) : bytes_(&bytes) {}
  [[nodiscard]] std::int32_t references(std::int32_t page) const override {
    const auto [count, fresh] = counts_.emplace(page, 1);  // the same throughout an event
    if (!fresh) return count->second;
    const std::uint8_t how = bytes_->next();
    if (how >= 160) count->second = how < 240 ? 2 : static_cast<std::int8_t>(bytes_->next());
    return count->second;
  }
  [[nodiscard]] std::int32_t take() override {
    const std::uint8_t how = bytes_->next();
    const std::int32_t page = how < 200 ? how % 12 : how < 240 ? how - 216 : INT32_MAX - how;
    if (page >= 0) ++out[page];
    return page;
  }
  void give_back(std::int32_t page) override { --out[page]; }
  std::map<std::int32_t, int> out;

 private:
  Bytes* bytes_;
  mutable std::map<std::int32_t, std::int32_t> counts_;
};

/// The bytes of one slot, found without kvkeep's addresses.
const float* slot_of(const LayerKv& layer, bool value, const CacheView& view, std::size_t i, std::int32_t head,
                     std::int32_t slot, const std::int32_t* table) {
  if (const auto* dense = std::get_if<DenseKv>(&layer)) {
    const Tensor& t = value ? dense->values : dense->keys;
    const std::int64_t place = view.places.empty() ? static_cast<std::int64_t>(i) : view.places[i],
                       start = view.starts.empty() ? 0 : view.starts[i];
    return t.data<float>() + place * t.stride(0) + head * t.stride(1) + (start + slot) * t.stride(2);
  }
  const auto& pages = std::get<PagedKv>(layer);
  const Tensor& t = value ? pages.values : pages.keys;
  const int slot_dim = pages.layout == PageLayout::slot_head ? 1 : 2;
  const std::int64_t size = t.size(slot_dim);
  return t.data<float>() + table[slot / size] * t.stride(0) + head * t.stride(3 - slot_dim) +
         (slot % size) * t.stride(slot_dim);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  static constexpr const char* kPolicies[] = {"keydiff,budget=8,interval=2,sink=1,recent=1,prefill=cut",
                                              "streaming,budget=6,interval=3,sink=2,prefill=cut",
                                              "knorm,budget=4,interval=1,sink=0,recent=1",
                                              "tova,budget=6,interval=2,sink=1,recent=1,prefill=cut",
                                              "pyramidkv-knorm,budget=6,interval=2,sink=1,recent=1",
                                              "keydiff,budget=8,interval=4,sink=1,recent=1,share=union"};
  ModelSpec spec;
  spec.kv_heads = 1 + bytes.below(2), spec.query_heads = 2 * spec.kv_heads;
  spec.key_dim = 1 + bytes.below(6), spec.value_dim = 1 + bytes.below(6);
  spec.layers.resize(static_cast<std::size_t>(1 + bytes.below(2)));
  const bool paged = bytes.next() % 2 == 0, latent = bytes.next() % 4 == 0 && spec.value_dim <= spec.key_dim;
  const std::int32_t layers = spec.num_layers(), heads = spec.kv_heads, rows = layers * heads;

  std::vector<float> arena(kFloats);
  for (std::size_t n = 0; n < arena.size(); ++n)
    arena[n] = static_cast<float>(n) + 0.25F * static_cast<float>(n * 7919 % 13);
  const PageLayout layout = bytes.next() % 2 == 0 ? PageLayout::slot_head : PageLayout::head_slot;
  const bool slot_first = paged && layout == PageLayout::slot_head;
  const std::int64_t outer = paged ? 12 : 3, slots = paged ? 1 + bytes.below(8) : 24;
  std::vector<LayerKv> cache;
  for (std::int32_t l = 0; l < layers; ++l) {
    Tensor keys, values;
    const auto sizes = [&](std::int64_t dim) {
      return slot_first ? Shape{outer, slots, heads, dim} : Shape{outer, heads, slots, dim};
    };
    if (!side_of(bytes, arena.data(), sizes(spec.key_dim), slot_first, keys)) return 0;
    if (latent)
      values = keys.narrow(3, bytes.below(spec.key_dim - spec.value_dim + 1), spec.value_dim);
    else if (!side_of(bytes, arena.data(), sizes(spec.value_dim), slot_first, values))
      return 0;
    if (paged)
      cache.emplace_back(PagedKv{keys, values, layout});
    else
      cache.emplace_back(DenseKv{keys, values});
  }

  try {
    const std::size_t policy = static_cast<std::size_t>(bytes.below(6));
    Keeper keeper(spec, make_policy(kPolicies[policy]));
    std::vector<SequenceId> ids{1};
    if (bytes.next() % 2 == 0) ids.push_back(2);
    for (const SequenceId id : ids) keeper.join(id);
    const auto n = ids.size();
    std::vector<std::int32_t> lengths(n * static_cast<std::size_t>(rows), 0), table(n * 24);
    for (std::size_t p = 0; p < table.size(); ++p)
      table[p] = static_cast<std::int32_t>(bytes.bent(static_cast<std::int64_t>((p % 24) + p / 24 * 6) % 12));
    const std::vector<float> queries(static_cast<std::size_t>(64 * spec.query_heads * spec.key_dim), 0.5F);
    for (int step = 0; step < 24 && !bytes.empty(); ++step) {
      std::vector<std::int32_t> indptr{0};
      for (std::size_t i = 0; i < n; ++i)
        indptr.push_back(indptr.back() + (step == 0 ? 1 + bytes.below(16) : bytes.below(4)));
      for (std::int32_t l = 0; l < layers; ++l)
        keeper.observe({.layer = l,
                        .sequences = ids,
                        .indptr = indptr,
                        .queries = Tensor(const_cast<float*>(queries.data()), Dtype::f32,
                                          {indptr.back(), spec.query_heads, spec.key_dim}),
                        .basis = QueryBasis::post_rope});
      for (std::size_t i = 0; i < n; ++i)
        for (std::int32_t r = 0; r < rows; ++r)
          lengths[i * static_cast<std::size_t>(rows) + static_cast<std::size_t>(r)] += indptr[i + 1] - indptr[i];
      WildPages pages(bytes);
      std::vector<std::int32_t> given = lengths, places, starts;
      if (bytes.next() >= 248)
        given[static_cast<std::size_t>(bytes.below(static_cast<std::int32_t>(given.size())))] += 1;
      if (!paged && bytes.next() % 2 == 0)
        for (std::size_t i = 0; i < n; ++i)
          places.push_back(static_cast<std::int32_t>(bytes.bent(static_cast<std::int64_t>(2 - i))));
      if (!paged && bytes.next() % 4 == 0)
        for (std::size_t i = 0; i < n; ++i) starts.push_back(static_cast<std::int32_t>(bytes.bent(bytes.below(3))));
      CacheView view{.sequences = ids,
                     .lengths = {given, rows},
                     .places = places,
                     .starts = starts,
                     .pages = bytes.next() % 2 == 0 ? &pages : nullptr,
                     .shared_pages = bytes.next() % 8 == 0 ? SharedPages::refuse : SharedPages::copy};
      if (paged) {
        std::int64_t apart = bytes.bent(24);
        if (n > 1 && (apart < 0 || apart > 24)) apart = bytes.below(25);  // both rows are in the table
        view.block_table = Tensor(table.data(), Dtype::i32, {static_cast<std::int64_t>(n), 24}, {apart, 1});
      }
      const std::vector<float> arena_before = arena;
      const std::vector<std::int32_t> table_before = table, lengths_before = given;
      std::vector<std::map<std::int32_t, std::vector<float>>> kept(n * static_cast<std::size_t>(rows) * 2);
      Plan plan;
      try {
        if (keeper.layers().empty()) keeper.bind(cache);
        plan = keeper.plan(view);
      } catch (const Error&) {
        if (arena != arena_before || table != table_before || given != lengths_before) fail("plan() wrote");
        return 0;  // the keeper is one step ahead of what the engine can show
      }
      for (const Row& row : plan.table.rows) {
        const auto i = static_cast<std::size_t>(row.sequence);
        const auto positions = keeper.positions(ids[i], row.layer, row.head);
        for (const bool value : {false, true})
          for (std::int32_t s = 0; s < row.length; ++s) {
            const float* at =
                slot_of(cache[static_cast<std::size_t>(row.layer)], value, view, i, row.head, s, table.data() + i * 24);
            kept[(i * static_cast<std::size_t>(rows) + static_cast<std::size_t>(row.layer * heads + row.head)) * 2 +
                 (value ? 1 : 0)][positions[static_cast<std::size_t>(s)]]
                .assign(at, at + (value ? spec.value_dim : spec.key_dim));
          }
      }
      try {
        const Report report = keeper.apply(plan, view);
        for (const PageMove& move : report.pages)
          for (const std::int32_t page : move.freed) ++pages.out[page];
      } catch (const Error&) {
        if (arena != arena_before || table != table_before || given != lengths_before) fail("apply() threw and wrote");
        for (const auto& [page, count] : pages.out)
          if (count != 0) fail("a page that was taken for an event that failed was not given back");
        return 0;
      }
      for (const Row& row : plan.table.rows) {
        const auto i = static_cast<std::size_t>(row.sequence);
        const auto positions = keeper.positions(ids[i], row.layer, row.head);
        for (const bool value : {false, true})
          for (std::size_t s = 0; s < positions.size(); ++s) {
            const auto& want =
                kept[(i * static_cast<std::size_t>(rows) + static_cast<std::size_t>(row.layer * heads + row.head)) * 2 +
                     (value ? 1 : 0)]
                    .at(positions[s]);
            const float* at = slot_of(cache[static_cast<std::size_t>(row.layer)], value, view, i, row.head,
                                      static_cast<std::int32_t>(s), table.data() + i * 24);
            if (!std::equal(want.begin(), want.end(), at)) fail("a kept slot is not what it was");
          }
      }
      lengths = given;
    }
  } catch (const Error&) {  // refused as a whole
  }
  return 0;
}
