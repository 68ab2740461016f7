// SPDX-License-Identifier: Apache-2.0
// What an event folds, on a GPU: the slots that rows drop, their matrices, and the spans that attention reads.

#include "fold.h"

#include <cmath>
#include <memory>
#include <numeric>

#include "evidence_case.h"
#include "kvkeep/core/error.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/memory/span_row.h"
#include "kvkeep/torch.h"

namespace kvkeep::cuda::fold_test {
namespace {

using FoldKernel = OnDevice;

struct FoldShape {
  std::int32_t dim = 16, max_span = 8;
  std::vector<std::int32_t> lengths{40};  ///< of the rows
  std::int32_t every = 3;                 ///< about one of so many slots stays
  std::int32_t page_size = 0;             ///< 0: dense
  Element element = Element::f32, store = Element::f32;
  FactorOptions options = {.sketch = true};
  std::vector<std::int32_t> spans_before = {};  ///< [rows] spans of four tokens that a row has already
  std::int32_t together = 1 << 20;              ///< spans of a launch
};

/// Rows that fold, on the CPU and on the device.
class Both {
 public:
  Both(std::uint64_t seed, FoldShape given) : shape_(std::move(given)) {
    shape_.options.store = dtype_of(shape_.store);
    oracle::Random random(seed);
    const std::int64_t width = shape_.dim * element_bytes(shape_.element);
    indptr_.push_back(0);
    for (std::size_t r = 0; r < shape_.lengths.size(); ++r) {
      const std::int32_t length = shape_.lengths[r];
      for (std::int32_t side = 0; side < 2; ++side) {
        std::vector<std::byte> cache(static_cast<std::size_t>(room(length) * width));
        std::vector<float> before(static_cast<std::size_t>(shape_.dim));
        for (std::int32_t t = 0; t < length; ++t)  // neighbours resemble each other, so that factors are few
          for (std::int32_t d = 0; d < shape_.dim; ++d) {
            float& x = before[static_cast<std::size_t>(d)];
            x = 0.9F * x + 0.4F * static_cast<float>(random.normal());
            static_cast<void>(
                store(x, shape_.element, cache.data() + place(length, t) * width + d * element_bytes(shape_.element)));
          }
        caches_.push_back(std::move(cache));
      }
      std::vector<std::int32_t> dropped, pages;
      for (std::int32_t t = 0; t < length; ++t) {
        const bool stays = random.between(0, shape_.every - 1) == 0;
        (stays ? kept_ : dropped).push_back(t);
      }
      for (std::int32_t p = 0; shape_.page_size > 0 && p < pages_of(length); ++p)
        pages.push_back(pages_of(length) - 1 - p);
      indptr_.push_back(std::ssize(kept_));
      dropped_.push_back(std::move(dropped)), pages_.push_back(std::move(pages));
    }
  }

  void run_on_device() {
    const FactorOptions& o = shape_.options;
    const std::int64_t dim = shape_.dim, number = element_bytes(shape_.store), words = KeySketch::words(dim);
    std::vector<Row> rows;
    std::vector<std::unique_ptr<DeviceArray<std::byte>>> held;
    std::vector<std::unique_ptr<DeviceArray<std::int32_t>>> pages;
    std::vector<FoldingRow> folding;
    std::vector<FoldingSpan> cut;
    FoldArguments a;
    std::int64_t longest = 0;
    std::vector<Arrays> arrays;
    for (std::size_t r = 0; r < shape_.lengths.size(); ++r) {
      pages.push_back(std::make_unique<DeviceArray<std::int32_t>>(pages_[r]));
      Row row;
      row.length = shape_.lengths[r];
      for (const bool value : {false, true}) {
        held.push_back(std::make_unique<DeviceArray<std::byte>>(caches_[2 * r + (value ? 1 : 0)]));
        (value ? row.values : row.keys) = address(held.back()->data(), pages.back()->data());
      }
      rows.push_back(row);
      const auto dropped = static_cast<std::int32_t>(dropped_[r].size());
      if (dropped == 0) {
        arrays.emplace_back();
        continue;
      }
      const auto spans = static_cast<std::int32_t>(piece_count(dropped, shape_.max_span));
      const std::int64_t before = this->before(r), length = piece_count(dropped, spans),
                         bytes = folded_blob_bytes(length, dim, o, shape_.store),
                         blocks = KeySketch::padded(4 * before + dropped) / KeySketch::kBlock;
      for (std::int32_t s = 0; s < spans; ++s) {
        const auto begin = static_cast<std::int32_t>(piece_begin(dropped, s, spans));
        cut.emplace_back(static_cast<std::int32_t>(folding.size()), begin,
                         static_cast<std::int32_t>(piece_begin(dropped, s + 1, spans)) - begin);
      }
      arrays.emplace_back(before + spans, dim * number, blocks, words, spans * bytes);
      const Arrays& own = arrays.back();
      folding.push_back({.row = static_cast<std::int32_t>(r),
                         .first_span = a.spans,
                         .first_slot = a.first,
                         .table = own.table->data() + before,
                         .coarse_keys = own.keys->data() + before * dim * number,
                         .coarse_values = own.values->data() + before * dim * number,
                         .log_length = own.log_length->data() + before,
                         .far = own.far->data() + before,
                         .signs = o.sketch ? own.signs->data() : nullptr,
                         .sizes = o.sketch ? own.sizes->data() : nullptr,
                         .first_token = 4 * before,
                         .blobs = own.blobs->data(),
                         .blob_bytes = bytes});
      a.spans += spans;
      a.first += dropped;
      a.longest = std::max(a.longest, row.length);
      longest = std::max(longest, length);
    }
    const std::int32_t all = a.spans, together = std::min(all, shape_.together);
    const std::int64_t numbers = folded_blob_bytes(longest, dim, o, shape_.store) / (2 * number);
    const DeviceArray<FoldingRow> there(folding);
    const DeviceArray<FoldingSpan> cut_there(cut);
    const DeviceArray<Row> rows_there(rows);
    const DeviceArray<std::int32_t> kept(kept_),
        slots(std::vector<std::int32_t>(static_cast<std::size_t>(a.first), -1));
    const DeviceArray<std::int64_t> indptr(indptr_);
    const auto of_spans = static_cast<std::size_t>(2 * together);
    const DeviceArray<RowMatrix> matrices(of_spans);
    const DeviceArray<FactorsFound> found(of_spans);
    const DeviceArray<std::byte> coarse(of_spans * static_cast<std::size_t>(dim * number)),
        factors(of_spans * static_cast<std::size_t>(numbers * number));
    a.folding = there.data(), a.pieces = cut_there.data(), a.count = static_cast<std::int32_t>(folding.size());
    a.rows = rows_there.data(), a.kept = kept.data(), a.indptr = indptr.data(), a.slots = slots.data();
    a.dim = shape_.dim, a.keys = shape_.element, a.store = shape_.store, a.numbers = numbers;
    a.matrices = matrices.data(), a.found = found.data(), a.coarse = coarse.data(), a.factors = factors.data();
    launch_fold_slots(a, nullptr);
    for (a.first = 0; a.first < all; a.first += together) {
      a.spans = std::min(together, all - a.first);
      launch_fold_matrices(a, nullptr);
      launch_factorise({.matrices = matrices.data(),
                        .count = 2 * a.spans,
                        .longest = static_cast<std::int32_t>(longest),
                        .dim = shape_.dim,
                        .element = shape_.element,
                        .store = shape_.store,
                        .options = o,
                        .found = found.data(),
                        .coarse = coarse.data(),
                        .factors = factors.data()},
                       nullptr);
      launch_fold_spans(a, nullptr);
    }
    slots_ = slots.download();
    found_.clear();
    for (std::size_t r = 0, f = 0; r < shape_.lengths.size(); ++r) {
      Found& own = found_.emplace_back();
      if (dropped_[r].empty()) continue;
      own.of = folding[f++];
      own.table = arrays[r].table->download(), own.keys = floats(arrays[r].keys->download());
      own.values = floats(arrays[r].values->download()), own.log_length = arrays[r].log_length->download();
      own.far = arrays[r].far->download(), own.signs = arrays[r].signs->download();
      own.sizes = arrays[r].sizes->download(), own.blobs = floats(arrays[r].blobs->download());
      own.blobs_at = arrays[r].blobs->data();
    }
  }

  void expect_alike(double tolerance, const std::string& what) const {
    std::vector<std::int32_t> dropped;
    for (const auto& own : dropped_) dropped.insert(dropped.end(), own.begin(), own.end());
    ASSERT_EQ(slots_, dropped) << what;
    for (std::size_t r = 0; r < dropped_.size(); ++r)
      if (!dropped_[r].empty()) ASSERT_NO_FATAL_FAILURE(expect_alike(r, tolerance, text(what, ", row ", r)));
  }

 private:
  /// What a row's spans are written to, and what lies beside it.
  struct Arrays {
    Arrays() = default;
    Arrays(std::int64_t spans, std::int64_t entry, std::int64_t blocks, std::int64_t words, std::int64_t blob_bytes)
        : table(std::make_unique<DeviceArray<MemorySpan>>(
              std::vector<MemorySpan>(static_cast<std::size_t>(spans), MemorySpan{.length = -7}))),
          keys(poisoned(spans * entry)),
          values(poisoned(spans * entry)),
          log_length(std::make_unique<DeviceArray<float>>(std::vector<float>(static_cast<std::size_t>(spans), -7))),
          far(std::make_unique<DeviceArray<const std::byte*>>(
              std::vector<const std::byte*>(static_cast<std::size_t>(spans), nullptr))),
          signs(std::make_unique<DeviceArray<std::uint32_t>>(
              std::vector<std::uint32_t>(static_cast<std::size_t>(blocks * words * KeySketch::kBlock), 0xABABABABU))),
          sizes(std::make_unique<DeviceArray<std::uint16_t>>(
              std::vector<std::uint16_t>(static_cast<std::size_t>(blocks * KeySketch::kBlock), 0xABAB))),
          blobs(poisoned(blob_bytes)) {}
    static std::unique_ptr<DeviceArray<std::byte>> poisoned(std::int64_t bytes) {
      return std::make_unique<DeviceArray<std::byte>>(
          std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0xAB}));
    }
    std::unique_ptr<DeviceArray<MemorySpan>> table;
    std::unique_ptr<DeviceArray<std::byte>> keys, values;
    std::unique_ptr<DeviceArray<float>> log_length;
    std::unique_ptr<DeviceArray<const std::byte*>> far;
    std::unique_ptr<DeviceArray<std::uint32_t>> signs;
    std::unique_ptr<DeviceArray<std::uint16_t>> sizes;
    std::unique_ptr<DeviceArray<std::byte>> blobs;
  };
  struct Found {
    FoldingRow of;
    std::vector<MemorySpan> table;
    std::vector<float> keys, values, log_length, blobs;
    std::vector<const std::byte*> far;
    std::vector<std::uint32_t> signs;
    std::vector<std::uint16_t> sizes;
    const std::byte* blobs_at = nullptr;
  };

  void expect_alike(std::size_t r, double tolerance, const std::string& what) const {
    const SpanRow want = folded(r);
    const Found& got = found_[r];
    const auto before = static_cast<std::size_t>(this->before(r));
    ASSERT_EQ(got.table.size(), before + static_cast<std::size_t>(want.size())) << what;
    for (std::size_t i = 0; i < before; ++i) {
      EXPECT_EQ(got.table[i].length, -7) << what << ": earlier spans stay as they are";
      EXPECT_EQ(got.log_length[i], -7) << what;
    }
    const std::int64_t dim = shape_.dim, words = KeySketch::words(dim), first = 4 * static_cast<std::int64_t>(before);
    for (std::int64_t i = 0; i < want.size(); ++i) {
      const auto at = before + static_cast<std::size_t>(i);
      const MemorySpan& span = got.table[at];
      const std::string which = text(what, ", span ", i);
      ASSERT_EQ(span.length, want.span(i).length) << which;
      EXPECT_EQ(span.first_token, first + want.tokens_before(i)) << which;
      EXPECT_FLOAT_EQ(got.log_length[at], want.log_length()[static_cast<std::size_t>(i)]) << which;
      EXPECT_EQ(got.far[at], got.blobs_at + i * got.of.blob_bytes) << which;
      EXPECT_LE(span.bytes, got.of.blob_bytes) << which;
      for (const KvSide side : {KvSide::keys, KvSide::values}) {
        const auto n = static_cast<std::size_t>(side);
        EXPECT_EQ(span.factors[n].rank, want.span(i).factors[n].rank) << which;
        EXPECT_EQ(span.factors[n].raw, want.span(i).factors[n].raw) << which;
        EXPECT_EQ(span.factors[n].offset % 8, 0) << which;
        const std::vector<float>& coarse = side == KvSide::keys ? got.keys : got.values;
        const at::Tensor rows = want.rows(i, side);
        expect_rows(span, n, coarse.data() + static_cast<std::int64_t>(at) * dim,
                    got.blobs.data() + i * got.of.blob_bytes / element_bytes(shape_.store),
                    rows.const_data_ptr<float>(), tolerance, which);
      }
    }
    if (!shape_.options.sketch) return;
    for (std::int64_t t = 0; t < want.tokens(); ++t) {
      for (std::int64_t w = 0; w < words; ++w)
        ASSERT_EQ(got.signs[KeySketch::at(first + t, w, words)], want.sketch().signs[KeySketch::at(t, w, words)])
            << what << ", token " << t << ", word " << w;
      const auto own = static_cast<double>(
                     std::bit_cast<float>(std::uint32_t{got.sizes[static_cast<std::size_t>(first + t)]} << 16U)),
                 of_cpu = static_cast<double>(static_cast<float>(want.sketch().sizes[static_cast<std::size_t>(t)]));
      ASSERT_NEAR(own, of_cpu, 1e-2 * of_cpu) << what << ", token " << t;
    }
    for (std::int64_t t = 0; t < first; ++t)
      EXPECT_EQ(got.sizes[static_cast<std::size_t>(t)], 0xABAB) << what << ": earlier tokens stay as they are";
  }

  /// The rows that a blob stands for.
  void expect_rows(const MemorySpan& span, std::size_t side, const float* coarse, const float* blob, const float* want,
                   double tolerance, const std::string& which) const {
    const SpanFactors& f = span.factors[side];
    const float* at = blob + f.offset;
    double apart = 0, size = 1e-30;
    for (std::int64_t t = 0; t < span.length; ++t)
      for (std::int64_t d = 0; d < shape_.dim; ++d) {
        double x = f.raw ? static_cast<double>(at[t * shape_.dim + d]) : f.centred ? static_cast<double>(coarse[d]) : 0;
        for (std::int64_t k = 0; !f.raw && k < f.rank; ++k)
          x += static_cast<double>(at[t * f.rank + k]) *
               static_cast<double>(at[std::int64_t{span.length} * f.rank + k * shape_.dim + d]);
        const auto y = static_cast<double>(want[t * shape_.dim + d]);
        apart += (x - y) * (x - y), size += y * y;
      }
    EXPECT_LE(std::sqrt(apart), tolerance * std::sqrt(size)) << which << ", side " << side;
  }

  [[nodiscard]] SpanRow folded(std::size_t r) const {
    const Dtype dtype = dtype_of(shape_.element);
    const auto dropped = static_cast<std::int64_t>(dropped_[r].size()), spans = piece_count(dropped, shape_.max_span);
    std::vector<std::int64_t> indptr;
    for (std::int64_t i = 0; i <= spans; ++i) indptr.push_back(piece_begin(dropped, i, spans));
    const RowFold one{.keys = address(const_cast<std::byte*>(caches_[2 * r].data()), pages_[r].data()),
                      .values = address(const_cast<std::byte*>(caches_[2 * r + 1].data()), pages_[r].data()),
                      .key_dtype = dtype,
                      .value_dtype = dtype,
                      .slots = dropped_[r],
                      .indptr = indptr};
    return std::move(fold({&one, 1}, shape_.dim, shape_.options).front());
  }

  [[nodiscard]] std::int64_t before(std::size_t r) const {
    return shape_.spans_before.empty() ? 0 : shape_.spans_before[r];
  }
  [[nodiscard]] std::int32_t pages_of(std::int32_t length) const {
    return (length + shape_.page_size - 1) / shape_.page_size;
  }
  [[nodiscard]] std::int64_t room(std::int32_t length) const {
    return shape_.page_size == 0 ? length : std::int64_t{pages_of(length)} * shape_.page_size;
  }
  /// Of slot t: pages lie in reverse.
  [[nodiscard]] std::int64_t place(std::int32_t length, std::int32_t t) const {
    return shape_.page_size == 0
               ? t
               : std::int64_t{pages_of(length) - 1 - t / shape_.page_size} * shape_.page_size + t % shape_.page_size;
  }
  [[nodiscard]] SlotAddress address(std::byte* base, const std::int32_t* pages) const {
    const std::int64_t width = shape_.dim * element_bytes(shape_.element);
    SlotAddress at{base, width, width};
    if (shape_.page_size == 0) return at;
    at.pages = pages;
    at.page_stride = width * shape_.page_size;
    at.page_shift = std::countr_zero(static_cast<std::uint32_t>(shape_.page_size));
    return at;
  }
  [[nodiscard]] std::vector<float> floats(std::span<const std::byte> bytes) const {
    std::vector<float> out(bytes.size() / static_cast<std::size_t>(element_bytes(shape_.store)));
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (shape_.store == Element::f32) std::memcpy(&out[i], bytes.data() + 4 * i, 4);
      if (shape_.store == Element::f16)
        out[i] = static_cast<float>(reinterpret_cast<const c10::Half*>(bytes.data())[i]);
      if (shape_.store == Element::bf16)
        out[i] = static_cast<float>(reinterpret_cast<const c10::BFloat16*>(bytes.data())[i]);
    }
    return out;
  }

  FoldShape shape_;
  std::vector<std::vector<std::byte>> caches_;  ///< [rows][2]
  std::vector<std::vector<std::int32_t>> dropped_, pages_;
  std::vector<std::int32_t> kept_, slots_;
  std::vector<std::int64_t> indptr_;
  std::vector<Found> found_;
};

void expect_as_on_cpu(std::uint64_t seed, const FoldShape& shape, const std::string& what) {
  Both both(seed, shape);
  in_every_order([&] {
    both.run_on_device();
    both.expect_alike(shape.store == Element::f32 ? 2e-3 : 2e-2, what);
  });
}

TEST_F(FoldKernel, StoresWhatTheCpuStoresForRowsOfEveryLength) {
  for (const std::int32_t dim : {1, 7, 16, 33, 64})
    expect_as_on_cpu(80,
                     {.dim = dim,
                      .lengths = {1, 2, 9, 16, 17, 40, 67},
                      .options = {.centred = FactorOptions::Centred::always, .sketch = true}},
                     text("dim ", dim));
}

TEST_F(FoldKernel, PutsNewSpansBehindThoseThatARowHas) {
  expect_as_on_cpu(81, {.lengths = {30, 44, 21}, .spans_before = {0, 3, 5}}, "behind others");
}

TEST_F(FoldKernel, ReadsPages) { expect_as_on_cpu(82, {.lengths = {50, 33}, .page_size = 8}, "pages"); }

TEST_F(FoldKernel, StoresInHalfWidth) {
  for (const Element store : {Element::f16, Element::bf16})
    for (const Element element : {Element::f32, store})
      expect_as_on_cpu(83,
                       {.dim = 24,
                        .max_span = 16,
                        .lengths = {60, 25},
                        .element = element,
                        .store = store,
                        .options = {.rank = FactorOptions::Rank::max, .max_rank = 3, .sketch = true}},
                       text(name_of(element), " in ", name_of(store)));
}

TEST_F(FoldKernel, StoresTheSameWhateverGoesTogether) {
  for (const std::int32_t together : {1, 4, 7})
    expect_as_on_cpu(84, {.lengths = {30, 3, 41}, .together = together}, text(together, " together"));
}

TEST_F(FoldKernel, DrawsNoSketchUnlessItIsAsked) {
  expect_as_on_cpu(85, {.lengths = {30, 41}, .options = {.sketch = false}}, "no sketch");
}

TEST_F(FoldKernel, ListsTheSlotsOfRowsLongerThanItsBlocks) {
  expect_as_on_cpu(86, {.dim = 2, .max_span = 64, .lengths = {20000}, .every = 60}, "20000 slots");
}

/// One span for each segment, short ones joined to the next or at the end to the one before, long ones in equal pieces.
TEST_F(FoldKernel, CutsSpansWhereSegmentsEnd) {
  oracle::Random random(87);
  for (int round = 0; round < 12; ++round) {
    const std::int32_t least = random.between(1, 9), most = random.between(1, 20), rows = 5;
    const std::int64_t segments = random.between(1, 70);
    std::vector<Row> table(rows);
    std::vector<FoldingRow> folding;
    std::vector<std::int32_t> kept, dropped, ends, at{0};
    std::vector<std::int64_t> indptr{0};
    std::vector<float> mass;
    std::vector<std::vector<std::int32_t>> want;  // lengths
    std::int32_t spans = 0;
    for (std::int32_t r = 0; r < rows; ++r) {
      Row& row = table[static_cast<std::size_t>(r)];
      row.length = random.between(1, 300), row.first = std::ssize(mass);
      std::vector<std::int32_t> own, cuts;
      for (std::int64_t s = 0; s + 1 < segments; ++s) cuts.push_back(random.between(1, row.length));
      cuts.push_back(row.length);
      std::ranges::sort(cuts);
      for (std::int32_t t = 0; t < row.length; ++t) {
        (t == 0 || random.between(0, 3) == 0 ? kept : own).push_back(t);
        mass.push_back(random.between(0, 4) == 0 ? 0.0F : static_cast<float>(random.unit()));
      }
      std::vector<std::int32_t> groups{0};
      std::size_t next = 0;
      for (const std::int32_t end : cuts) {
        for (; next < own.size() && own[next] < end; ++next) ++groups.back();
        if (groups.back() >= least) groups.push_back(0);
      }
      const std::int32_t rest = groups.back();
      groups.pop_back();
      if (groups.empty() && rest > 0)
        groups.push_back(rest);
      else if (rest > 0)
        groups.back() += rest;
      auto& lengths = want.emplace_back();
      for (const std::int32_t n : groups) {
        const std::int32_t parts = (n + most - 1) / most;
        for (std::int32_t i = 0; i < parts; ++i) lengths.push_back((i + 1) * n / parts - i * n / parts);
      }
      const auto bound = static_cast<std::int32_t>(most_spans(std::ssize(own), segments, least, most));
      ASSERT_LE(std::ssize(lengths), bound) << "round " << round;
      folding.push_back({.row = r, .first_span = spans, .spans = bound, .first_slot = std::ssize(dropped)});
      spans += bound;
      ends.insert(ends.end(), cuts.begin(), cuts.end());
      dropped.insert(dropped.end(), own.begin(), own.end());
      indptr.push_back(std::ssize(kept));
      at.push_back(static_cast<std::int32_t>(dropped.size()));
    }
    in_every_order([&] {
      const DeviceArray<Row> there(table);
      const DeviceArray<FoldingRow> rows_there(folding);
      const DeviceArray<std::int32_t> kept_there(kept), slots(dropped), ends_there(ends);
      const DeviceArray<std::int64_t> indptr_there(indptr);
      const DeviceArray<float> mass_there(mass);
      const auto weights = DeviceArray<float>::poisoned(dropped.size());
      const DeviceArray<FoldingSpan> pieces(std::vector<FoldingSpan>(static_cast<std::size_t>(spans), {7, 7, 7}));
      launch_fold_cut({.folding = rows_there.data(),
                       .count = rows,
                       .rows = there.data(),
                       .kept = kept_there.data(),
                       .indptr = indptr_there.data(),
                       .slots = slots.data(),
                       .dim = 8},
                      {.ends = ends_there.data(),
                       .most = segments,
                       .min_span = least,
                       .max_span = most,
                       .pieces = pieces.data(),
                       .mass = mass_there.data(),
                       .weights = weights.data()},
                      nullptr);
      const std::vector<FoldingSpan> got = pieces.download();
      const std::vector<float> shares = weights.download();
      for (std::size_t r = 0; r < rows; ++r) {
        std::int32_t begin = 0;
        for (std::int32_t i = 0; i < folding[r].spans; ++i) {
          const FoldingSpan& span = got[static_cast<std::size_t>(folding[r].first_span + i)];
          const std::int32_t length = i < std::ssize(want[r]) ? want[r][static_cast<std::size_t>(i)] : 0;
          ASSERT_EQ(span.row, static_cast<std::int32_t>(r)) << "round " << round << ", span " << i;
          ASSERT_EQ(span.length, length) << "round " << round << ", row " << r << ", span " << i;
          if (length == 0) {
            ASSERT_EQ(span.log_length, -std::numeric_limits<float>::infinity());
            continue;
          }
          ASSERT_EQ(span.begin, begin) << "round " << round << ", row " << r << ", span " << i;
          double sum = 0;
          const auto mass_of = [&](std::int32_t t) {
            const std::int64_t slot = dropped[static_cast<std::size_t>(folding[r].first_slot + begin + t)];
            return static_cast<double>(mass[static_cast<std::size_t>(table[r].first + slot)]);
          };
          for (std::int32_t t = 0; t < length; ++t) sum += mass_of(t);
          for (std::int32_t t = 0; t < length; ++t)
            ASSERT_NEAR(shares[static_cast<std::size_t>(folding[r].first_slot + begin + t)],
                        sum > 0 ? mass_of(t) / sum : 1.0 / length, 1e-6);
          begin += length;
        }
        EXPECT_EQ(begin, at[r + 1] - at[r]) << "all that the row drops";
      }
    });
  }
}

TEST_F(FoldKernel, RefusesWhatItDoesNotKnow) {
  const auto refuses = [](auto change) {
    FoldArguments a{.dim = 8};
    change(a);
    EXPECT_THROW(launch_fold_slots(a, nullptr), InvalidArgument);
    EXPECT_THROW(launch_fold_cut(a, {}, nullptr), InvalidArgument);
    EXPECT_THROW(launch_fold_matrices(a, nullptr), InvalidArgument);
    EXPECT_THROW(launch_fold_spans(a, nullptr), InvalidArgument);
  };
  refuses([](auto& a) { a.dim = 0; });
  refuses([](auto& a) { a.dim = 257; });
  refuses([](auto& a) { a.count = -1; });
  refuses([](auto& a) { a.spans = -1; });
  refuses([](auto& a) { a.keys = Element::f8_e4m3; });
  refuses([](auto& a) { a.store = Element::f8_e4m3; });
  EXPECT_THROW(launch_fold_cut({.dim = 8}, {.min_span = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_fold_cut({.dim = 8}, {.max_span = 0}, nullptr), InvalidArgument);
  EXPECT_NO_THROW(launch_fold_spans({.dim = 256}, nullptr)) << "no span";
}

}  // namespace
}  // namespace kvkeep::cuda::fold_test
