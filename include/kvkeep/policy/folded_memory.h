#pragma once
/// The folded spans of a keeper's sequences, where its caches are: what events fold, and what attention reads of it.
/// The Keeper is written once over it.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/columns.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/row.h"
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
  virtual ~FoldedRows() = default;

  /// Spans of one row.
  [[nodiscard]] virtual std::int64_t spans(std::int32_t row) const = 0;
  [[nodiscard]] virtual FoldedState state() const = 0;
  /// [rows] the spans themselves; empty on a device.
  [[nodiscard]] virtual std::span<const SpanRow> host_rows() const = 0;
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

  /// Tokens in the spans.
  [[nodiscard]] virtual std::int64_t tokens() const = 0;
  /// As FoldedState::far_bytes.
  [[nodiscard]] virtual std::int64_t far_bytes() const = 0;
  /// Appends the spans to their rows.
  virtual void keep() noexcept = 0;
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

  /// Of a sequence with `count` rows, of which none is folded yet.
  [[nodiscard]] virtual std::unique_ptr<FoldedRows> rows(std::int32_t count) = 0;
  /// Of a sequence that was saved, on the CPU. Throws StateError if the cap leaves no room for its factors.
  [[nodiscard]] virtual std::unique_ptr<FoldedRows> rows(std::vector<SpanRow> saved) = 0;

  /// Folds the slots that decision.fold names, which lie where the table says. targets: [rows]. Throws, and changes
  /// nothing: as kvkeep::fold(); StateError if the cap leaves no room. On a device it only launches, what is not finite
  /// is not refused, and it throws StateError for a decision that is not the newest, and while a stream is captured.
  [[nodiscard]] virtual std::unique_ptr<Folding> fold(const RowTable& table, const Decision& decision,
                                                      std::span<const FoldTarget> targets) = 0;

  /// Merges the folded spans of the readers into attention, in place. Throws as read_memory(). On a device it only
  /// launches, all counts are 0, and it throws StateError while a stream is captured.
  virtual ReadCounts view(const FoldedReading& reading) = 0;

  /// [rows] What view() has counted in each, since construction; empty on a device.
  [[nodiscard]] virtual std::span<const ReadCounts> reads() const = 0;
  /// FoldedState::far_bytes of all sequences; on a device also of those that have left but may still be read. Never
  /// above MemoryOptions::host_bytes.
  [[nodiscard]] virtual std::int64_t far_bytes() const = 0;
};

/// On the CPU: spans as SpanRow. `memory` must outlive it.
[[nodiscard]] std::unique_ptr<FoldedMemory> host_folded_memory(const ModelSpec& spec, const MemoryOptions& memory);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/folded_memory-inl.h"
#endif
