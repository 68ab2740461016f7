// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The folded spans of a keeper's sequences, where its caches are: what events fold, and what attention reads of it.
/// The Keeper is written once over it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/machine_memory.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/row.h"
#include "kvkeep/keep/columns.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/memory/read_memory.h"
#include "kvkeep/memory/span_row.h"
#include "kvkeep/observe/observation.h"

namespace kvkeep {

/// The folded part of a sequence.
struct FoldedState {
  std::int64_t spans = 0;       ///< over all rows
  std::int64_t tokens = 0;      ///< in them
  std::int64_t near_bytes = 0;  ///< of coarse entries and the data stored with them
  std::int64_t far_bytes = 0;   ///< of factors; on a device the room that was taken for them,
                                ///< an upper bound, because the host does not know their ranks
};

/// The folded rows of one sequence, from FoldedMemory::rows(), which must outlive them.
class FoldedRows {
 public:
  struct Count {
    std::int32_t spans = 0;
    std::int64_t tokens = 0;
  };

  /// What one event adds to one row.
  struct Part {
    std::int32_t row = 0;
    Count count = {};
    std::int64_t near_bytes = 0, far_bytes = 0;  ///< as in FoldedState
    std::optional<SpanRow> spans = {};           ///< on the host
    std::shared_ptr<void> far = {};  ///< on a device, in the first part of a sequence: what holds the factors of all
  };

  /// On a device: rows without spans.
  explicit FoldedRows(std::size_t rows) : counts_(rows) {}
  /// On the host. held: far bytes of all sequences, which outlives it.
  FoldedRows(std::vector<SpanRow> rows, std::int64_t& held);
  ~FoldedRows() {
    if (held_ != nullptr) *held_ -= far_bytes_;
  }
  FoldedRows(const FoldedRows&) = delete;
  FoldedRows& operator=(const FoldedRows&) = delete;

  /// [rows] how many spans each row has, and tokens in them.
  [[nodiscard]] std::span<const Count> counts() const { return counts_; }
  [[nodiscard]] const Count& count(std::int32_t row) const { return counts_[static_cast<std::size_t>(row)]; }
  [[nodiscard]] FoldedState state() const {
    FoldedState state{.near_bytes = near_bytes_, .far_bytes = far_bytes_};
    for (const Count& count : counts_) state.spans += count.spans, state.tokens += count.tokens;
    return state;
  }
  /// [rows] the spans themselves; empty on a device.
  [[nodiscard]] std::span<const SpanRow> host_rows() const { return host_rows_; }

  /// Makes room for add(), which then does not throw. Changes nothing visible.
  void reserve(const Part& part);
  void add(Part part) noexcept;
  /// How often add() was called.
  [[nodiscard]] std::uint64_t version() const { return version_; }

  std::shared_ptr<void> on_device;  ///< the spans there, as only its FoldedMemory knows them

 private:
  std::vector<Count> counts_;
  std::vector<SpanRow> host_rows_;
  std::int64_t near_bytes_ = 0, far_bytes_ = 0;  ///< as in FoldedState
  std::int64_t* held_ = nullptr;                 ///< null on a device
  std::uint64_t version_ = 0;
  std::vector<std::shared_ptr<void>> far_;
};

/// The row that the spans of one row of an event go to.
struct FoldTarget {
  FoldedRows* sequence = nullptr;
  std::int32_t row = 0;  ///< of the sequence
  SequenceId id = 0;
};

/// Spans that are folded and that no sequence holds yet. If it ends without keep(), nothing has changed.
struct Folding {
  struct Added {
    FoldedRows* sequence;
    FoldedRows::Part part;
  };

  /// Appends the spans to their rows. Requires: FoldedRows::reserve() of every part.
  void keep() noexcept {
    for (auto& [sequence, part] : parts) sequence->add(std::move(part));
    parts.clear();
  }

  std::int64_t tokens = 0;     ///< in the spans
  std::int64_t far_bytes = 0;  ///< as FoldedState::far_bytes
  std::vector<Added> parts = {};
};

/// One sequence whose folded spans are read.
struct FoldedReader {
  FoldedRows* rows = nullptr;
  const Columns* columns = nullptr;  ///< of the sequence
  std::int64_t seen = 0;             ///< tokens so far
  std::int32_t first = 0;            ///< its queries: tokens first to first + tokens - 1 of the step
  std::int32_t tokens = 0;
};

/// A layer of a step, as parts::Folds::view() has checked it.
struct FoldedReading {
  std::int32_t layer = 0;  ///< of the model
  std::int32_t index = 0;  ///< among full layers
  std::span<const FoldedReader> readers;
  const Tensor& queries;               ///< [tokens, Hq, D] after RoPE
  const Attended* attended = nullptr;  ///< null: attention over the rows has yet to run
  bool announced = false;              ///< the call before was the same without `attended`
};

/// All of a keeper's folded spans, from Machine::folded_memory().
class FoldedMemory {
 public:
  virtual ~FoldedMemory() = default;

  /// Of a sequence with these rows: empty ones when it begins, those that were saved when it continues. Throws
  /// StateError if the cap leaves no room for their factors, and Unsupported for saved spans on a device.
  [[nodiscard]] std::unique_ptr<FoldedRows> rows(std::vector<SpanRow> rows);

  /// Folds the slots that decision.fold names, which lie where the table says. targets: [rows]. Throws, and changes
  /// nothing: as kvkeep::fold(); StateError if the cap leaves no room. On a device it only launches, what is not finite
  /// is not refused, and it throws StateError for a decision that is not the newest, and while a stream is captured.
  [[nodiscard]] virtual Folding fold(const RowTable& table, const Decision& decision,
                                     std::span<const FoldTarget> targets) = 0;

  /// Merges the folded spans of the readers into attention, in place; before that has run it may begin whatever changes
  /// no result. Throws as read_memory(). On a device it only
  /// launches, all counts are 0, and it throws StateError while a stream is captured.
  virtual ReadCounts view(const FoldedReading& reading) = 0;

  /// [rows] What view() has counted in each, since construction; empty on a device.
  [[nodiscard]] std::span<const ReadCounts> reads() const { return reads_; }
  /// FoldedState::far_bytes of all sequences; on a device also of those that have left but may still be read. Never
  /// above MemoryOptions::host_bytes.
  [[nodiscard]] std::int64_t far_bytes() const { return far_bytes_; }

 protected:
  /// `memory` must outlive it. where: the memory of its machine.
  FoldedMemory(const ModelSpec& spec, const MemoryOptions& memory, const MachineMemory& where)
      : spec_(spec), memory_(memory), device_(where.device()), on_host_(where.is_host()) {}

  const ModelSpec spec_;
  const MemoryOptions& memory_;
  std::vector<ReadCounts> reads_;
  std::int64_t far_bytes_ = 0;  ///< on the host FoldedRows keep it up to date

 private:
  const Device device_;
  const bool on_host_;
};

/// On the CPU: spans as SpanRow. `memory` must outlive it.
[[nodiscard]] std::unique_ptr<FoldedMemory> host_folded_memory(const ModelSpec& spec, const MemoryOptions& memory);

namespace folded_memory_detail {

class HostFoldedMemory final : public FoldedMemory {
 public:
  HostFoldedMemory(const ModelSpec& spec, const MemoryOptions& memory) : FoldedMemory(spec, memory, host_memory()) {
    reads_.resize(spec.full_layers().size() * static_cast<std::size_t>(spec.kv_heads));
  }

  [[nodiscard]] Folding fold(const RowTable& table, const Decision& decision,
                             std::span<const FoldTarget> targets) override {
    const Fold& fold = *decision.fold;
    std::vector<std::vector<std::int64_t>> spans(table.rows.size());  // where each begins among the slots of its row
    std::vector<RowFold> rows;
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const Row& row = table.rows[r];
      const std::int64_t first = fold.spans[static_cast<std::size_t>(fold.indptr[r])],
                         last = fold.spans[static_cast<std::size_t>(fold.indptr[r + 1])];
      for (std::int64_t s = fold.indptr[r]; s <= fold.indptr[r + 1]; ++s)
        spans[r].push_back(fold.spans[static_cast<std::size_t>(s)] - first);
      const auto own = [&](const auto& all) {
        return std::span(all).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
      };
      rows.push_back({.keys = row.keys,
                      .values = row.values,
                      .key_scales = row.key_scales,
                      .value_scales = row.value_scales,
                      .key_dtype = table.key_dtype,
                      .value_dtype = table.value_dtype,
                      .keys_rotated = table.keys_rotated,
                      .values_rotated = table.values_rotated,
                      .slots = own(fold.slots),
                      .indptr = spans[r],
                      .weights = fold.weights.empty() ? std::span<const float>() : own(fold.weights),
                      .positions = {row.positions, static_cast<std::size_t>(row.length)},
                      .label = {.sequence = targets[r].id, .layer = row.layer, .head = row.head},
                      .spans_before = targets[r].sequence->count(targets[r].row).spans});
    }
    std::vector<SpanRow> folded = kvkeep::fold(rows, spec_.key_dim, memory_.fold_options(), memory_.gates(), nullptr,
                                               memory_.host_bytes - far_bytes_);
    if (memory_.learned())
      for (std::size_t r = 0; r < folded.size(); ++r) {
        const Row& row = table.rows[r];
        folded[r].set_norms(memory_.routing->layers[static_cast<std::size_t>(row.layer)].norms(
            folded[r], std::int64_t{row.head} * spec_.group(), spec_.group()));
      }
    Folding folding;
    for (std::size_t r = 0; r < folded.size(); ++r) {
      SpanRow& own = folded[r];
      FoldedRows::Part part{.row = targets[r].row,
                            .count = {static_cast<std::int32_t>(own.size()), own.tokens()},
                            .near_bytes = own.near_bytes(),
                            .far_bytes = own.far_bytes()};
      part.spans = std::move(own);
      targets[r].sequence->reserve(part);
      folding.tokens += part.count.tokens;
      folding.far_bytes += part.far_bytes;
      folding.parts.push_back({targets[r].sequence, std::move(part)});
    }
    return folding;
  }

  ReadCounts view(const FoldedReading& r) override {
    ReadCounts counts;
    if (r.attended == nullptr) return counts;  // factors are read where they lie
    for (const FoldedReader& reader : r.readers) counts += view(r, reader);
    return counts;
  }

 private:
  ReadCounts view(const FoldedReading& r, const FoldedReader& reader) {
    const std::int32_t first_row = r.index * spec_.kv_heads;
    const FoldedRows& own = *reader.rows;
    std::vector<MemoryRow> rows;
    std::int64_t spans = 0;
    for (std::int32_t row = first_row; row < first_row + spec_.kv_heads; ++row) {
      rows.push_back({.spans = &own.host_rows()[static_cast<std::size_t>(row)], .dense = reader.columns->length(row)});
      spans += own.count(row).spans;
    }
    if (spans == 0 || reader.tokens == 0) return {};
    const Reading reading{
        .zoom = memory_.zoom,
        .router = memory_.learned() ? &memory_.routing->layers[static_cast<std::size_t>(r.layer)] : nullptr,
        .entries = memory_.entries_after(reader.seen),
        .entries_per_span = memory_.entries_per_span(spec_.group(), spec_.key_dim, memory_.learned()),
        .entries_per_token = memory_.entries_per_token(spec_.key_dim),
        .per_head = memory_.published_budget};
    const Tensor lse = r.attended->log_sum_exp.narrow(0, reader.first, reader.tokens),
                 out = r.attended->out.narrow(0, reader.first, reader.tokens);
    OpenAttention open{lse, empty(lse.sizes(), Dtype::f32), out};
    const std::int64_t dim = out.size(2);
    float *sums = open.sum.data<float>(), *outputs = out.data<float>();
    for (std::int64_t n = 0; n < lse.numel(); ++n) {
      const bool seen = lse.data<float>()[n] != -std::numeric_limits<float>::infinity();
      sums[n] = seen ? 1.0F : 0.0F;
      if (!seen) std::fill_n(outputs + n * dim, dim, 0.0F);
    }
    const ReadCounts counts =
        read_memory(open, rows, r.queries.narrow(0, reader.first, reader.tokens), spec_.scale(), reading, nullptr,
                    std::span(reads_).subspan(static_cast<std::size_t>(first_row), rows.size()));
    for (std::int64_t n = 0; n < lse.numel(); ++n) {
      for (float* x = outputs + n * dim; x < outputs + (n + 1) * dim; ++x) *x /= sums[n];
      lse.data<float>()[n] += std::log(sums[n]);
    }
    return counts;
  }
};

}  // namespace folded_memory_detail

inline FoldedRows::FoldedRows(std::vector<SpanRow> rows, std::int64_t& held)
    : counts_(rows.size()), host_rows_(std::move(rows)), held_(&held) {
  for (std::size_t r = 0; r < host_rows_.size(); ++r) {
    const SpanRow& row = host_rows_[r];
    counts_[r] = {static_cast<std::int32_t>(row.size()), row.tokens()};
    near_bytes_ += row.near_bytes();
    far_bytes_ += row.far_bytes();
  }
  *held_ += far_bytes_;
}

inline void FoldedRows::reserve(const Part& part) {
  if (part.spans) host_rows_[static_cast<std::size_t>(part.row)].reserve(*part.spans);
  if (part.far != nullptr) far_.reserve(far_.size() + 1);
}

inline void FoldedRows::add(Part part) noexcept {
  Count& own = counts_[static_cast<std::size_t>(part.row)];
  own.spans += part.count.spans;
  own.tokens += part.count.tokens;
  near_bytes_ += part.near_bytes;
  far_bytes_ += part.far_bytes;
  if (held_ != nullptr) *held_ += part.far_bytes;
  if (part.spans) host_rows_[static_cast<std::size_t>(part.row)].append(*std::move(part.spans));
  if (part.far != nullptr) far_.push_back(std::move(part.far));
  ++version_;
}

inline std::unique_ptr<FoldedRows> FoldedMemory::rows(std::vector<SpanRow> rows) {
  if (!on_host_) {
    KVKEEP_REQUIRE_AS(Unsupported, std::ranges::all_of(rows, [](const SpanRow& row) { return row.size() == 0; }),
                      "folded spans: they are not restored on ", device_.str(), "; allowed on the CPU");
    return std::make_unique<FoldedRows>(rows.size());
  }
  auto own = std::make_unique<FoldedRows>(std::move(rows), far_bytes_);
  KVKEEP_REQUIRE_AS(StateError, far_bytes_ <= memory_.host_bytes, "folded spans: no room for ", own->state().far_bytes,
                    " bytes of factors; host_bytes allows ", memory_.host_bytes, " in all");
  return own;
}

inline std::unique_ptr<FoldedMemory> host_folded_memory(const ModelSpec& spec, const MemoryOptions& memory) {
  return std::make_unique<folded_memory_detail::HostFoldedMemory>(spec, memory);
}

}  // namespace kvkeep
