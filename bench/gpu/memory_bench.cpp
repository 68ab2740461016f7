// SPDX-License-Identifier: Apache-2.0
// A memory of folded spans: routing, merging, fetching, factorising, storing.

#include "factorise.h"
#include "fetch.h"
#include "fold.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/memory/span_row.h"
#include "memory.h"
#include "memory_attention.h"
#include "router.h"
#include "rows.h"

namespace kvkeep::cuda {
namespace {

/// One layer of a memory: `length` tokens per sequence folded into spans of 64, sketches and factors of 8 components
/// in bf16, one query per sequence.
struct Folded {
  static constexpr std::int32_t kLength = 64, kRank = 8;

  Folded(const Shape& shape, std::int32_t batch, std::int32_t length)
      : spans(length / kLength),
        rows(batch * shape.kv_heads),
        heads(std::int64_t{batch} * shape.kv_heads * shape.group),
        blob_bytes(std::int64_t{2} * 2 * kRank * (kLength + shape.dim)),
        coarse(static_cast<std::size_t>(std::int64_t{2} * rows * spans * shape.dim * 2)),
        signs(static_cast<std::size_t>(std::int64_t{rows} * length * shape.dim / 8)),
        sizes(static_cast<std::size_t>(std::int64_t{rows} * length * 2)),
        blobs(static_cast<std::size_t>(rows * spans * blob_bytes)),
        queries(static_cast<std::size_t>(heads * shape.dim * 2)),
        log_length(std::vector<float>(static_cast<std::size_t>(spans), std::log(static_cast<float>(kLength)))),
        out(static_cast<std::size_t>(heads * shape.dim)),
        lse(static_cast<std::size_t>(heads)),
        marks(static_cast<std::size_t>(heads * spans)),
        opened(static_cast<std::size_t>(rows * spans)),
        counts(static_cast<std::size_t>(rows)) {
    fill_with_noise(coarse.data(), static_cast<std::size_t>(std::int64_t{2} * rows * spans * shape.dim));
    fill_with_noise(signs.data(), static_cast<std::size_t>(std::int64_t{rows} * length * shape.dim / 16));
    fill_with_noise(blobs.data(), static_cast<std::size_t>(rows * spans * blob_bytes / 2));
    fill_with_noise(queries.data(), static_cast<std::size_t>(heads * shape.dim));
    const std::vector<__nv_bfloat16> one(static_cast<std::size_t>(std::int64_t{rows} * length), __float2bfloat16(0.5F));
    copy_there(sizes.data(), one.data(), one.size() * 2);
    std::vector<MemorySpan> of_row;
    for (std::int32_t s = 0; s < spans; ++s)
      of_row.push_back({kLength,
                        std::int64_t{s} * kLength,
                        blob_bytes,
                        {{kRank, false, true, 0}, {kRank, false, true, kRank * (kLength + std::int64_t{shape.dim})}}});
    table = std::make_unique<DeviceArray<MemorySpan>>(of_row);
    std::vector<const std::byte*> where;
    for (std::int64_t i = 0; i < std::int64_t{rows} * spans; ++i) where.push_back(blobs.data() + i * blob_bytes);
    near = std::make_unique<DeviceArray<const std::byte*>>(where);
    std::vector<FoldedRow> all;
    const std::int64_t side = std::int64_t{spans} * shape.dim * 2;
    for (std::int32_t r = 0; r < rows; ++r) {
      FoldedRow& row = all.emplace_back(
          FoldedRow{.spans = spans, .head = r % shape.kv_heads, .first_query = r / shape.kv_heads, .queries = 1});
      row.table = table->data();
      row.coarse_keys = coarse.data() + 2 * r * side;
      row.coarse_values = row.coarse_keys + side;
      row.log_length = log_length.data();
      row.signs = reinterpret_cast<const std::uint32_t*>(signs.data()) + std::int64_t{r} * length * shape.dim / 32;
      row.sizes = reinterpret_cast<const std::uint16_t*>(sizes.data()) + std::int64_t{r} * length;
      row.near = near->data() + std::int64_t{r} * spans;
    }
    table_of_rows = std::make_unique<DeviceArray<FoldedRow>>(all);
    out.fill({0});
    lse.fill({0});
    a = {.rows = table_of_rows->data(),
         .count = rows,
         .most_spans = spans,
         .most_queries = 1,
         .tokens = batch,
         .kv_heads = shape.kv_heads,
         .group = shape.group,
         .dim = shape.dim,
         .store = Element::bf16,
         .query = Element::bf16,
         .scale = 1 / std::sqrt(static_cast<float>(shape.dim)),
         .queries = queries.data(),
         .token_stride = std::int64_t{shape.kv_heads} * shape.group * shape.dim * 2,
         .head_stride = std::int64_t{shape.dim} * 2,
         .out = out.data(),
         .lse = lse.data(),
         .marks = marks.data(),
         .opened = opened.data(),
         .opened_count = counts.data()};
    workspace = std::make_unique<DeviceArray<std::byte>>(static_cast<std::size_t>(memory_attention_workspace_bytes(a)));
    a.workspace = workspace->data();
  }

  /// Spans that the rows have opened.
  [[nodiscard]] std::int64_t zooms() const {
    const std::vector<std::int32_t> all = counts.download();
    return std::accumulate(all.begin(), all.end(), std::int64_t{0});
  }

  std::int32_t spans, rows;
  std::int64_t heads, blob_bytes;
  DeviceArray<std::byte> coarse, signs, sizes, blobs, queries;
  DeviceArray<float> log_length, out, lse;
  DeviceArray<std::uint8_t> marks;
  DeviceArray<std::int32_t> opened, counts;
  std::unique_ptr<DeviceArray<MemorySpan>> table;
  std::unique_ptr<DeviceArray<const std::byte*>> near;
  std::unique_ptr<DeviceArray<FoldedRow>> table_of_rows;
  std::unique_ptr<DeviceArray<std::byte>> workspace;
  MemoryAttentionArguments a;
};

/// `bytes`: coarse keys and sketches, once. By coverage a sort for every query head comes with it.
template <MemoryAttentionArguments::Rule kRule>
void memory_route(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  Folded folded(shape, batch, length);
  folded.a.rule = kRule;
  folded.a.mass = 1.0 / folded.spans;
  folded.a.coverage = 0.1, folded.a.coverage_floor = 0;
  launch_memory_route(folded.a, stream());
  const std::int64_t zooms = folded.zooms();
  if (zooms < 1 || zooms >= std::int64_t{folded.rows} * folded.spans)
    return result.fail("either no span or every span was opened");
  const double bytes =
      static_cast<double>(folded.rows) * folded.spans * (2.0 * shape.dim + Folded::kLength * (shape.dim / 8.0 + 2));
  measure(result, bytes, [&] { launch_memory_route(folded.a, stream()); });
  result.set("opened", static_cast<double>(zooms) / folded.rows);
}

/// The queries of a layer through a router of 32 numbers a head. `bytes`: its weights, once.
void router_queries(Result& result, Shape shape, Size size) {
  constexpr std::int32_t kInner = 32;
  const Folded folded(shape, size.batch, size.length);
  const std::int32_t heads = shape.kv_heads * shape.group;
  std::vector<float> weights(static_cast<std::size_t>(heads * kInner * shape.dim));
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i % 7) - 3;
  const DeviceArray<float> there(weights), to(static_cast<std::size_t>(folded.heads * shape.dim));
  const RouterWeights router{there.data(), heads, kInner};
  launch_router_queries(folded.a, router, 0, to.data(), stream());
  double squares = 0;
  for (const float x : to.download()) squares += static_cast<double>(x) * static_cast<double>(x);
  if (!(squares > 0) || !std::isfinite(squares)) return result.fail("queries are not projected");
  measure(result, static_cast<double>(weights.size() * 4),
          [&] { launch_router_queries(folded.a, router, 0, to.data(), stream()); });
}

/// `bytes`: coarse values and the factors of opened spans, once.
void memory_merge(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  Folded folded(shape, batch, length);
  folded.a.mass = 2.0 / folded.spans;
  launch_memory_route(folded.a, stream());
  launch_memory_merge(folded.a, stream());
  for (const float mass : folded.lse.download())
    if (!(mass > std::log(static_cast<float>(length)) - 2 && std::isfinite(mass)))
      return result.fail("a head's mass is not that of all tokens");
  const double bytes = static_cast<double>(folded.rows) * folded.spans * 2 * shape.dim +
                       static_cast<double>(folded.zooms()) * static_cast<double>(folded.blob_bytes);
  measure(result, bytes, [&] { launch_memory_merge(folded.a, stream()); });
  result.set("opened", static_cast<double>(folded.zooms()) / folded.rows);
}

/// Pieces of `budget` bytes out of page-locked host memory, `batch` lists of them; `length` bytes in all.
void fetch(Result& result, Shape, Size size) {
  const auto [batch, length, budget, page] = size;
  const std::unique_ptr<std::byte, void (*)(std::byte*)> held(take_page_locked(length), free_page_locked);
  std::byte* far = held.get();
  for (std::int32_t i = 0; i < length; ++i) far[i] = static_cast<std::byte>(i % 251);
  const DeviceArray<std::byte> near(static_cast<std::size_t>(length));
  std::vector<FarPiece> pieces;
  for (std::int32_t at = 0; at + budget <= length; at += budget) pieces.push_back({far + at, near.data() + at, budget});
  const auto stride = static_cast<std::int32_t>(pieces.size()) / batch;
  const DeviceArray<FarPiece> there(pieces);
  const DeviceArray<std::int32_t> counts(std::vector<std::int32_t>(static_cast<std::size_t>(batch), stride));
  const FetchArguments a{.pieces = there.data(), .counts = counts.data(), .lists = batch, .stride = stride};
  launch_fetch(a, stream());
  const std::vector<std::byte> got = near.download();
  const std::int64_t bytes = std::int64_t{batch} * stride * budget;
  for (std::int64_t i = 0; i < bytes; ++i)
    if (got[static_cast<std::size_t>(i)] != static_cast<std::byte>(i % 251))
      return result.fail("a byte differs from the far one");
  measure(result, static_cast<double>(bytes), [&] { launch_fetch(a, stream()); });
}

/// Keys of `length` tokens in spans of `budget`, all layers and heads. `bytes`: the rows once.
void factorise_spans(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  const std::int32_t rows = shape.layers * batch * shape.kv_heads, spans = length / budget;
  const std::int64_t width = shape.dim * 2;
  const DeviceArray<std::byte> keys(static_cast<std::size_t>(std::int64_t{rows} * length * width));
  fill_with_noise(keys.data(), static_cast<std::size_t>(std::int64_t{rows} * length * shape.dim));
  FactoriseArguments a{.longest = budget,
                       .dim = shape.dim,
                       .element = Element::bf16,
                       .store = Element::bf16,
                       .options = {.centred = FactorOptions::Centred::always, .max_rank = 16}};
  std::vector<RowMatrix> all;
  for (std::int64_t n = 0; n < std::int64_t{rows} * spans; ++n)
    all.push_back({.rows = {keys.data() + n * budget * width, width, width},
                   .length = budget,
                   .offset = n * factor_numbers(budget, shape.dim, a.options)});
  const DeviceArray<RowMatrix> matrices(all);
  const DeviceArray<FactorsFound> found(all.size());
  const DeviceArray<std::byte> coarse(all.size() * static_cast<std::size_t>(width)),
      factors(all.size() * static_cast<std::size_t>(factor_numbers(budget, shape.dim, a.options)) * 2);
  a.matrices = matrices.data(), a.count = static_cast<std::int32_t>(all.size()), a.found = found.data(),
  a.coarse = coarse.data(), a.factors = factors.data();
  launch_factorise(a, stream());
  for (const FactorsFound& f : found.download())
    if (!f.finite || f.raw || f.rank != 16)
      return result.fail("noise did not take all the components that are allowed");
  measure(result, static_cast<double>(all.size()) * budget * static_cast<double>(width),
          [&] { launch_factorise(a, stream()); });
  result.set("matrices", static_cast<double>(all.size()));
}

/// What an event folds beside factorise(): rows of `length` tokens of which `budget` stay, in spans of up to 64, all
/// layers and heads, sketches and factors of up to 8 components. `bytes`: the keys of the folded slots once, and the
/// factors once.
void fold_spans(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  fill_with_noise(event.cache.data(), event.cache.size() / 2);
  const auto rows = static_cast<std::int32_t>(event.count), dropped = size.length - size.budget,
             spans = static_cast<std::int32_t>(piece_count(dropped, 64)), all = rows * spans,
             longest = static_cast<std::int32_t>(piece_count(dropped, spans));
  const FactorOptions options{.centred = FactorOptions::Centred::always, .max_rank = 8, .sketch = true};
  const std::int64_t width = shape.dim * 2, blob = folded_blob_bytes(longest, shape.dim, options, Element::bf16),
                     numbers = blob / 4, tokens = KeySketch::padded(dropped), words = KeySketch::words(shape.dim);
  const std::unique_ptr<std::byte, void (*)(std::byte*)> blobs(take_page_locked(all * blob), free_page_locked);
  const auto count = static_cast<std::size_t>(all), matrices_count = 2 * count;
  const DeviceArray<MemorySpan> table(count);
  const DeviceArray<std::byte> near(2 * count * static_cast<std::size_t>(width)),
      coarse(matrices_count * static_cast<std::size_t>(width)),
      factors(matrices_count * static_cast<std::size_t>(numbers * 2));
  const DeviceArray<float> log_length(count);
  const DeviceArray<const std::byte*> far(count);
  const DeviceArray<std::uint32_t> signs(static_cast<std::size_t>(rows * tokens * words));
  const DeviceArray<std::uint16_t> sizes(static_cast<std::size_t>(rows * tokens));
  const DeviceArray<std::int32_t> slots(static_cast<std::size_t>(std::int64_t{rows} * dropped));
  const DeviceArray<RowMatrix> matrices(matrices_count);
  const DeviceArray<FactorsFound> found(matrices_count);
  std::vector<FoldingRow> folding;
  std::vector<FoldingSpan> pieces;
  for (std::int32_t r = 0; r < rows; ++r)
    for (std::int32_t s = 0; s < spans; ++s) {
      const auto begin = static_cast<std::int32_t>(piece_begin(dropped, s, spans));
      pieces.emplace_back(r, begin, static_cast<std::int32_t>(piece_begin(dropped, s + 1, spans)) - begin);
    }
  for (std::int32_t r = 0; r < rows; ++r)
    folding.push_back({.row = r,
                       .first_span = r * spans,
                       .first_slot = std::int64_t{r} * dropped,
                       .table = table.data() + r * spans,
                       .coarse_keys = near.data() + std::int64_t{r} * spans * width,
                       .coarse_values = near.data() + (std::int64_t{all} + r * spans) * width,
                       .log_length = log_length.data() + r * spans,
                       .far = far.data() + r * spans,
                       .signs = signs.data() + r * tokens * words,
                       .sizes = sizes.data() + r * tokens,
                       .blobs = blobs.get() + std::int64_t{r} * spans * blob,
                       .blob_bytes = blob});
  const DeviceArray<FoldingRow> there(folding);
  const DeviceArray<FoldingSpan> cut(pieces);
  const FoldArguments a{.folding = there.data(),
                        .count = rows,
                        .pieces = cut.data(),
                        .rows = event.rows->data(),
                        .kept = event.slots->data(),
                        .indptr = event.bounds->data(),
                        .longest = size.length,
                        .slots = slots.data(),
                        .dim = shape.dim,
                        .keys = Element::bf16,
                        .store = Element::bf16,
                        .spans = all,
                        .numbers = numbers,
                        .matrices = matrices.data(),
                        .found = found.data(),
                        .coarse = coarse.data(),
                        .factors = factors.data()};
  launch_fold_slots(a, stream());
  launch_fold_matrices(a, stream());
  launch_factorise({.matrices = matrices.data(),
                    .count = 2 * all,
                    .longest = longest,
                    .dim = shape.dim,
                    .element = Element::bf16,
                    .store = Element::bf16,
                    .options = options,
                    .found = found.data(),
                    .coarse = coarse.data(),
                    .factors = factors.data()},
                   stream());
  launch_fold_spans(a, stream());
  for (const std::int32_t r : sample_of(rows)) {
    const auto own = slots.download(static_cast<std::size_t>(r) * static_cast<std::size_t>(dropped),
                                    static_cast<std::size_t>(dropped));
    const std::vector<std::int32_t> kept = event.kept_of(r);
    for (const std::int32_t slot : own)
      if (std::ranges::binary_search(kept, slot)) return result.fail("a slot that folds stays");
  }
  double bytes = static_cast<double>(rows) * dropped * static_cast<double>(width);
  for (const MemorySpan& span : table.download()) {
    if (span.bytes <= 0 || span.bytes > blob) return result.fail("a span has no factors, or more than its room");
    bytes += static_cast<double>(span.bytes);
  }
  measure(result, bytes, [&] {
    launch_fold_slots(a, stream());
    launch_fold_matrices(a, stream());
    launch_fold_spans(a, stream());
  });
  result.set("spans", all);
}

}  // namespace

void add_memory() {
  using Rule = MemoryAttentionArguments::Rule;
  add("MemoryRoute", memory_route<Rule::mass>, {{1, 32768, 0}, {1, 131072, 0}, {32, 32768, 0}}, {{2, 256, 0}});
  add("MemoryRouteCoverage", memory_route<Rule::coverage>, {{1, 32768, 0}, {32, 32768, 0}}, {{2, 256, 0}});
  add("RouterQueries", router_queries, {{1, 32768, 0}, {32, 32768, 0}}, {{2, 256, 0}});
  add("MemoryMerge", memory_merge, {{1, 32768, 0}, {1, 131072, 0}, {32, 32768, 0}}, {{2, 256, 0}});
  add("Fetch", fetch, {{8, 1 << 20, 8192}, {8, 1 << 26, 8192}, {256, 1 << 26, 8192}}, {{2, 1 << 14, 1024}});
  add("FoldSpans", fold_spans, {{1, 2048, 1024}, {8, 1088, 1024}}, {{1, 160, 64}});
  add("FactoriseSpans", factorise_spans, {{1, 2048, 32}, {1, 2048, 64}, {1, 2048, 128}}, {{1, 64, 32}});
}

}  // namespace kvkeep::cuda
