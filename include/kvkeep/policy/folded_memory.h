#pragma once
/// The folded spans of a keeper's sequences, where its caches are: what events fold, and what attention reads of it.
/// The Keeper is written once over it.

#include <cstdint>
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
  const Tensor& queries;  ///< [tokens, Hq, D] after RoPE
  const Attended& attended;
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

  /// Merges the folded spans of the readers into attention, in place. Throws as read_memory(). On a device it only
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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/folded_memory-inl.h"
#endif
