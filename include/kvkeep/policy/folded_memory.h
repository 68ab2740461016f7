#pragma once
/// The folded spans of a keeper's sequences, where its caches are: what events fold, and what attention reads of it.
/// The Keeper is written once over it.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/row.h"
#include "kvkeep/keep/columns.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/memory/read_memory.h"
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

  virtual ~FoldedRows() = default;
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

 protected:
  explicit FoldedRows(std::size_t rows) : counts_(rows) {}

  std::vector<Count> counts_;
  std::vector<SpanRow> host_rows_;
  std::int64_t near_bytes_ = 0, far_bytes_ = 0;  ///< as in FoldedState
};

/// The row that the spans of one row of an event go to.
struct FoldTarget {
  FoldedRows* sequence = nullptr;
  std::int32_t row = 0;  ///< of the sequence
  SequenceId id = 0;
};

/// Spans that are folded and that no sequence holds yet. If it ends without keep(), nothing has changed.
class Folding {
 public:
  virtual ~Folding() = default;

  /// Appends the spans to their rows.
  virtual void keep() noexcept = 0;

  std::int64_t tokens = 0;     ///< in the spans
  std::int64_t far_bytes = 0;  ///< as FoldedState::far_bytes
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
  const Tensor& queries;  ///< [tokens, Hq, D] after RoPE
  const Attended& attended;
};

/// All of a keeper's folded spans, from Machine::folded_memory().
class FoldedMemory {
 public:
  virtual ~FoldedMemory() = default;

  /// Of a sequence with these rows: empty ones when it begins, those that were saved when it continues. Throws
  /// StateError if the cap leaves no room for their factors, and Unsupported for saved spans on a device.
  [[nodiscard]] virtual std::unique_ptr<FoldedRows> rows(std::vector<SpanRow> rows) = 0;

  /// Folds the slots that decision.fold names, which lie where the table says. targets: [rows]. Throws, and changes
  /// nothing: as kvkeep::fold(); StateError if the cap leaves no room. On a device it only launches, what is not finite
  /// is not refused, and it throws StateError for a decision that is not the newest, and while a stream is captured.
  [[nodiscard]] virtual std::unique_ptr<Folding> fold(const RowTable& table, const Decision& decision,
                                                      std::span<const FoldTarget> targets) = 0;

  /// Merges the folded spans of the readers into attention, in place. Throws as read_memory(). On a device it only
  /// launches, all counts are 0, and it throws StateError while a stream is captured.
  virtual ReadCounts view(const FoldedReading& reading) = 0;

  /// [rows] What view() has counted in each, since construction; empty on a device.
  [[nodiscard]] std::span<const ReadCounts> reads() const { return reads_; }
  /// FoldedState::far_bytes of all sequences; on a device also of those that have left but may still be read. Never
  /// above MemoryOptions::host_bytes.
  [[nodiscard]] virtual std::int64_t far_bytes() const = 0;

 protected:
  std::vector<ReadCounts> reads_;
};

/// On the CPU: spans as SpanRow. `memory` must outlive it.
[[nodiscard]] std::unique_ptr<FoldedMemory> host_folded_memory(const ModelSpec& spec, const MemoryOptions& memory);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/folded_memory-inl.h"
#endif
