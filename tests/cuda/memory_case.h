// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Folded spans of some sequences and queries that read them: on the CPU, and the same on the device.

#include <memory>
#include <numeric>

#include "arrays.h"
#include "evidence_case.h"
#include "folded_prompt.h"
#include "memory_attention.h"
#include "plain_memory.h"

namespace kvkeep::cuda {

using testing::Array;

struct MemoryShape {
  std::int32_t kv_heads = 1, group = 1, dim = 16;
  std::vector<std::vector<std::int32_t>> lengths{{5, 3}};  ///< of the spans of each sequence
  std::vector<std::int32_t> queries{1};                    ///< tokens that read each sequence
  std::int32_t dense = 7;                                  ///< rows that stayed
  Element store = Element::f32, query = Element::f32;
  FactorOptions factors = {};
  double loudness = 1;  ///< of the queries
};

class MemoryCase {
 public:
  struct Sequence {
    testing::FoldedHeads spans;
    Array dense_keys, dense_values, queries;
  };

  MemoryCase(std::uint64_t seed, MemoryShape given)
      : shape(std::move(given)), scale(1 / std::sqrt(static_cast<double>(shape.dim))) {
    oracle::Random random(seed);
    shape.factors.store = dtype_of(shape.store);
    const std::int64_t heads = shape.kv_heads, query_heads = heads * shape.group;
    for (std::size_t n = 0; n < shape.lengths.size(); ++n) {
      std::vector<Span> spans;
      std::int32_t tokens = 0;
      for (const std::int32_t length : shape.lengths[n]) {
        spans.push_back({tokens, tokens + length});
        tokens += length;
      }
      Array keys = testing::normals(random, {heads, tokens, shape.dim}),
            values = testing::normals(random, {heads, tokens, shape.dim});
      for (Array* side : {&keys, &values})  // neighbours resemble each other, so that factors have few components
        for (std::int64_t h = 0; h < heads; ++h)
          for (std::int64_t i = shape.dim; i < tokens * shape.dim; ++i) {
            float* row = side->data<float>() + h * tokens * shape.dim;
            row[i] = 0.9F * row[i - shape.dim] + 0.4F * row[i];
          }
      const std::vector<float> surprisal(static_cast<std::size_t>(tokens), 1.0F);
      sequences.push_back({testing::FoldedHeads(keys, values, surprisal, spans, shape.factors),
                           testing::normals(random, {heads, shape.dense, shape.dim}),
                           testing::normals(random, {heads, shape.dense, shape.dim}),
                           testing::normals(random, {shape.queries[n], query_heads, shape.dim}, shape.loudness)
                               .to(dtype_of(shape.query))});
    }
  }

  [[nodiscard]] OpenAttention open(std::size_t n) const {
    return testing::plain_attention(sequences[n].dense_keys, sequences[n].dense_values, sequences[n].queries, scale);
  }
  [[nodiscard]] std::int32_t tokens() const { return std::accumulate(shape.queries.begin(), shape.queries.end(), 0); }
  [[nodiscard]] std::int32_t most_spans() const {
    std::size_t most = 0;
    for (const auto& lengths : shape.lengths) most = std::max(most, lengths.size());
    return static_cast<std::int32_t>(most);
  }

  MemoryShape shape;
  double scale;
  std::vector<Sequence> sequences;
};

/// The rows, queries and dense answers of a case on the device.
class CaseOnDevice {
 public:
  /// near: blobs lie where the kernels read them. Else an arena of `arena_bytes` a row is there for them.
  explicit CaseOnDevice(const MemoryCase& c, bool near = true, std::int64_t arena_bytes = 1 << 16) {
    const MemoryShape& s = c.shape;
    const std::int32_t heads = s.kv_heads * s.group;
    std::vector<std::byte> queries;
    std::vector<float> answers, masses;
    std::int32_t token = 0;
    for (std::size_t n = 0; n < c.sequences.size(); ++n) {
      const MemoryCase::Sequence& sequence = c.sequences[n];
      for (std::int32_t head = 0; head < s.kv_heads; ++head) {
        rows.push_back(row_of(sequence.spans.row(head), near, arena_bytes));
        FoldedRow& row = rows.back();
        row.head = head, row.first_query = token, row.queries = s.queries[n];
      }
      token += s.queries[n];
      append(queries, sequence.queries.bytes(), sequence.queries.numel() * element_bytes(s.query));
      const OpenAttention open = c.open(n);
      const Array closed = testing::closed(open), mass = testing::log_mass(open);
      answers.insert(answers.end(), closed.data<float>(), closed.data<float>() + closed.numel());
      masses.insert(masses.end(), mass.data<float>(), mass.data<float>() + mass.numel());
    }
    const auto spans = static_cast<std::size_t>(c.most_spans()), tokens = static_cast<std::size_t>(token),
               all = tokens * static_cast<std::size_t>(heads), kv = tokens * static_cast<std::size_t>(s.kv_heads);
    out = std::make_unique<DeviceArray<float>>(answers);
    lse = std::make_unique<DeviceArray<float>>(masses);
    marks = std::make_unique<DeviceArray<std::uint8_t>>(std::vector<std::uint8_t>(all * spans, 7));
    opened = std::make_unique<DeviceArray<std::int32_t>>(std::vector<std::int32_t>(kv * spans, -1));
    opened_count = std::make_unique<DeviceArray<std::int32_t>>(std::vector<std::int32_t>(kv, -1));
    pieces = std::make_unique<DeviceArray<FarPiece>>(rows.size() * spans);
    counts = std::make_unique<DeviceArray<std::int32_t>>(rows.size());
    rows_ = std::make_unique<DeviceArray<FoldedRow>>(rows);
    arguments = {.rows = rows_->data(),
                 .count = static_cast<std::int32_t>(rows.size()),
                 .most_spans = c.most_spans(),
                 .most_queries = *std::max_element(s.queries.begin(), s.queries.end()),
                 .tokens = token,
                 .kv_heads = s.kv_heads,
                 .group = s.group,
                 .dim = s.dim,
                 .store = s.store,
                 .query = s.query,
                 .scale = static_cast<float>(c.scale),
                 .queries = held(queries),
                 .token_stride = heads * s.dim * element_bytes(s.query),
                 .head_stride = s.dim * element_bytes(s.query),
                 .out = out->data(),
                 .lse = lse->data(),
                 .marks = marks->data(),
                 .opened = opened->data(),
                 .opened_count = opened_count->data()};
    workspace_ =
        std::make_unique<DeviceArray<std::byte>>(static_cast<std::size_t>(memory_attention_workspace_bytes(arguments)));
    arguments.workspace = workspace_->data();
  }

  /// The case is read ahead: `expected` [rows, group] is what launch_memory_guess takes rows to draw.
  void read_ahead(const std::vector<float>& expected) {
    dense = std::make_unique<DeviceArray<float>>(expected);
    for (std::size_t r = 0; r < rows.size(); ++r)
      rows[r].dense = dense->data() + static_cast<std::int64_t>(r) * arguments.group;
    upload_rows();
    brought = std::make_unique<DeviceArray<std::int64_t>>(std::vector<std::int64_t>(rows.size(), -1));
    arguments.brought = brought->data();
    workspace_ =
        std::make_unique<DeviceArray<std::byte>>(static_cast<std::size_t>(memory_attention_workspace_bytes(arguments)));
    arguments.workspace = workspace_->data();
    arguments.keeps_near = false;
  }

  /// After rows were changed.
  void upload_rows() { rows_->upload(rows); }
  void route() const { launch_memory_route(arguments, nullptr); }
  void fetch() const {
    launch_memory_pieces(arguments, pieces->data(), counts->data(), nullptr);
    launch_fetch(
        {.pieces = pieces->data(), .counts = counts->data(), .lists = arguments.count, .stride = arguments.most_spans},
        nullptr);
  }
  void merge() const { launch_memory_merge(arguments, nullptr); }
  /// What comes before attention over the rows is known, and the rest.
  void guess() {
    arguments.late = false;
    launch_memory_guess(arguments, nullptr);
    fetch();
  }
  void open() {
    arguments.late = true;
    launch_memory_open(arguments, nullptr);
    fetch();
  }

  std::vector<FoldedRow> rows;
  MemoryAttentionArguments arguments;
  std::unique_ptr<DeviceArray<float>> out, lse, dense;
  std::unique_ptr<DeviceArray<std::int64_t>> brought;
  std::unique_ptr<DeviceArray<std::uint8_t>> marks;
  std::unique_ptr<DeviceArray<std::int32_t>> opened, opened_count, counts;
  std::unique_ptr<DeviceArray<FarPiece>> pieces;

  /// Blobs of row r as they lie far, and where `near` points.
  [[nodiscard]] const std::vector<const std::byte*>& far(std::size_t r) const { return far_[r]; }
  [[nodiscard]] std::vector<const std::byte*> near(std::size_t r) const { return pointers_[2 * r + 1]->download(); }

 private:
  static void append(std::vector<std::byte>& to, const void* from, std::int64_t bytes) {
    const auto* begin = static_cast<const std::byte*>(from);
    to.insert(to.end(), begin, begin + bytes);
  }
  /// Bytes on the device.
  std::byte* held(std::span<const std::byte> bytes) {
    return bytes_.emplace_back(std::make_unique<DeviceArray<std::byte>>(bytes))->data();
  }
  template <class T>
  std::byte* held(const T* from, std::int64_t count) {
    return held(std::as_bytes(std::span(from, static_cast<std::size_t>(count))));
  }

  FoldedRow row_of(const SpanRow& spans, bool near, std::int64_t arena_bytes) {
    const std::int64_t n = spans.size(), number = element_size(spans.dtype());
    std::vector<MemorySpan> table;
    std::vector<const std::byte*> far;
    for (std::int64_t i = 0; i < n; ++i) {
      const FoldedSpan& span = spans.span(i);
      MemorySpan& to = table.emplace_back(MemorySpan{
          .length = span.length, .first_token = spans.tokens_before(i), .bytes = std::ssize(spans.factors(i))});
      std::copy_n(std::begin(span.factors), 2, to.factors);
      far.push_back(to.bytes > 0 ? held(spans.factors(i)) : nullptr);
    }
    FoldedRow row{.spans = static_cast<std::int32_t>(n)};
    row.table = reinterpret_cast<const MemorySpan*>(held(table.data(), n));
    row.coarse_keys = held(spans.coarse(KvSide::keys), n * spans.dim() * number);
    row.coarse_values = held(spans.coarse(KvSide::values), n * spans.dim() * number);
    row.log_length = reinterpret_cast<const float*>(held(spans.log_length().data(), n));
    if (!spans.norms().empty())
      row.norms = reinterpret_cast<const float*>(held(spans.norms().data(), std::ssize(spans.norms())));
    if (!spans.sketch().sizes.empty()) {
      row.signs = reinterpret_cast<const std::uint32_t*>(
          held(spans.sketch().signs.data(), static_cast<std::int64_t>(spans.sketch().signs.size())));
      row.sizes = reinterpret_cast<const std::uint16_t*>(held(spans.sketch().sizes.data(), spans.tokens()));
    }
    far_.push_back(far);
    const auto table_of = [&](const std::vector<const std::byte*>& all) {
      return pointers_.emplace_back(std::make_unique<DeviceArray<const std::byte*>>(all))->data();
    };
    row.far = table_of(far);
    row.near = table_of(near ? far : std::vector<const std::byte*>(far.size(), nullptr));
    if (!near) {
      row.arena = held(std::vector<std::byte>(static_cast<std::size_t>(arena_bytes), std::byte{0xEE}));
      row.arena_bytes = arena_bytes;
    }
    return row;
  }

  std::vector<std::unique_ptr<DeviceArray<std::byte>>> bytes_;
  std::vector<std::unique_ptr<DeviceArray<const std::byte*>>> pointers_;  ///< [rows][2] far, near
  std::vector<std::vector<const std::byte*>> far_;
  std::unique_ptr<DeviceArray<FoldedRow>> rows_;
  std::unique_ptr<DeviceArray<std::byte>> workspace_;
};

}  // namespace kvkeep::cuda
