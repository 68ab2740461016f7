// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The folded spans of a keeper on a device. The host knows how many spans every row has, some of which are empty where
/// only the device knows how long they are; the rest is there. Factors are in page-locked memory, which kernels write
/// and read over the bus.

#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

#include "accelerator.h"
#include "event.h"
#include "fold.h"
#include "kvkeep/policy/folded_memory.h"
#include "memory_attention.h"
#include "page_locked.h"
#include "router.h"

namespace kvkeep::cuda {

/// Why folded spans cannot be kept like that on a device, one sentence each.
[[nodiscard]] std::vector<std::string> memory_problems(const MemoryOptions& memory, const ModelSpec& spec,
                                                       Device device);

/// Why a device cannot factorise spans of up to `max_span` slots (0: any), one sentence each.
[[nodiscard]] std::vector<std::string> span_problems(std::int32_t max_span, const MemoryOptions* memory,
                                                     const ModelSpec& spec, Device device);

/// Why an event cannot fold like that on a device, one sentence each.
[[nodiscard]] std::vector<std::string> fold_problems(const Demand& demand, const ModelSpec& spec, Device device);

/// Where the rows of an event are, and the slots that stay, on the device.
struct EventSlots {
  EventTables tables;
  const std::int32_t* kept = nullptr;
};
using SlotsOf = std::function<EventSlots(const RowTable& table, const Decision& decision)>;

/// Page-locked rooms that kernels may still use: each goes back once all streams of the pool have passed the point at
/// which nobody on the host needed it any more, or the next call after it.
class LeavingRooms {
 public:
  explicit LeavingRooms(DevicePool& pool) : pool_(pool) {}
  ~LeavingRooms();
  LeavingRooms(const LeavingRooms&) = delete;
  LeavingRooms& operator=(const LeavingRooms&) = delete;

  /// The room comes here once nobody holds it.
  [[nodiscard]] std::shared_ptr<void> hold(std::unique_ptr<PageLocked::Room> room) {
    return {room.release(), [this](PageLocked::Room* left) { unmarked_.emplace_back(left); }};
  }
  /// The streams must pass where they are now for those that have come since; not while one of them is being captured.
  void mark();
  /// The same, and gives back those that the device has passed. Does not wait.
  void sweep();

 private:
  struct Leaving {
    std::vector<std::unique_ptr<PageLocked::Room>> rooms;
    std::vector<std::unique_ptr<StreamMark>> marks;
  };
  DevicePool& pool_;
  std::vector<std::unique_ptr<PageLocked::Room>> unmarked_;
  std::deque<Leaving> leaving_;  ///< in their order
};

/// Spans of one sequence on a device: arrays [rows, capacity], grown by half. The host counts them.
class DeviceRows {
 public:
  /// learned: spans have norms of a router.
  DeviceRows(const FoldedRows& counted, std::int32_t group, std::int64_t dim, Dtype store, bool sketch, bool learned,
             MachineMemory& memory, std::uint64_t serial)
      : counted_(counted),
        group_(group),
        entry_(dim * element_size(store)),
        words_(sketch ? KeySketch::words(dim) : 0),
        norms_(learned ? group : 0),
        serial_(serial),
        memory_(memory) {}

  /// Differs between all sequences of a keeper, from event to event, and where arrays are elsewhere than before: after
  /// an event that failed, too.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> version() const {
    return {serial_, counted_.version() + moves_};
  }
  /// FoldedState::near_bytes of as many spans.
  [[nodiscard]] std::int64_t near_bytes(const FoldedRows::Count& count) const {
    return count.spans * (2 * entry_ + (1 + norms_) * static_cast<std::int64_t>(sizeof(float))) +
           (words_ == 0 ? 0 : count.tokens * (words_ * 4 + 2));
  }

  /// Room for rows of so many spans and tokens. Changes nothing visible.
  void reserve(std::int32_t spans, std::int64_t tokens);
  /// Where the next spans of a row go; after reserve().
  void describe_end(std::int32_t row, FoldingRow& out) const;
  /// The spans of a row, as attention reads them.
  void describe(std::int32_t row, FoldedRow& out) const;

 private:
  /// One array: `bytes` for each span, or for each block of tokens.
  struct Array {
    DeviceMemory memory = {};
    std::int64_t bytes = 0;
  };
  void grow(std::int64_t& capacity, std::int64_t wanted, std::span<Array> arrays);
  /// Sets where a row's arrays are, those of spans from `span` on.
  template <class Row>
  void point(Row& out, std::int32_t row, std::int32_t span) const;
  [[nodiscard]] std::byte* at(const Array& array, std::int64_t capacity, std::int32_t row, std::int64_t i) const {
    return static_cast<std::byte*>(array.memory.get()) + (row * capacity + i) * array.bytes;
  }

  const FoldedRows& counted_;
  std::int32_t group_;
  std::int64_t entry_, words_;        ///< bytes of a coarse entry; words of a sketched key, 0: none
  std::int64_t norms_;                ///< of a span
  std::uint64_t serial_, moves_ = 0;  ///< of arrays
  MachineMemory& memory_;
  DeviceMemory dense_;                           ///< f32 [rows, group]: FoldedRow::dense
  std::int64_t span_room_ = 0, block_room_ = 0;  ///< of every row: spans; blocks of tokens
  enum : std::uint8_t { kTable, kCoarseKeys, kCoarseValues, kLogLength, kFar, kNorms, kOfSpans };
  std::array<Array, kOfSpans> of_spans_ = {{{.bytes = sizeof(MemorySpan)},
                                            {.bytes = entry_},
                                            {.bytes = entry_},
                                            {.bytes = sizeof(float)},
                                            {.bytes = sizeof(const std::byte*)},
                                            {.bytes = norms_ * static_cast<std::int64_t>(sizeof(float))}}};
  enum : std::uint8_t { kSigns, kSizes, kOfBlocks };
  std::array<Array, kOfBlocks> of_blocks_ = {
      {{.bytes = KeySketch::kBlock * words_ * 4}, {.bytes = KeySketch::kBlock * 2}}};
};

class DeviceFolds final : public FoldedMemory {
 public:
  /// slots_of: where the rows and kept slots of a decision are; throws for one whose tables are gone.
  DeviceFolds(const ModelSpec& spec, const MemoryOptions& memory, FoldBounds bounds, DevicePool& pool,
              MachineMemory& machine, Staging& staging, SlotsOf slots_of);

  [[nodiscard]] Folding fold(const RowTable& table, const Decision& decision,
                             std::span<const FoldTarget> targets) override;
  ReadCounts view(const FoldedReading& reading) override;

 private:
  /// What readers read in every layer of a step: how their tokens are cut, and the table of rows, on the device.
  struct Step {
    using Version = std::pair<std::uint64_t, std::uint64_t>;
    using Reader = std::tuple<Version, std::int64_t, std::int32_t, std::int32_t>;
    static constexpr Version kUnfolded = {0, 0};
    std::vector<Reader> readers;  ///< of which it is
    struct Slice {
      std::int32_t first = 0, tokens = 0;  ///< of the step
      std::int32_t rows = 0;               ///< of every layer
      std::int32_t most_queries = 0;       ///< of a row
      std::int64_t at = 0;                 ///< of FoldedRow [layers, rows] in the table
    };
    std::vector<Slice> slices;
    std::int32_t most_spans = 0;
  };
  /// What a router and gates learned, on the device.
  struct Learned {
    std::vector<DeviceMemory> memory;
    RouterWeights router;
    const float* thresholds = nullptr;  ///< [layers, Hq]
    FactorGates gates;
  };
  /// Made once, for the first event that folds; null if nothing was learned.
  [[nodiscard]] const Learned* learned();
  /// A slice of a layer that is read.
  struct Turn {
    MemoryAttentionArguments a = {};
    FarPiece* pieces = nullptr;      ///< [rows, most_spans]
    std::int32_t* counts = nullptr;  ///< [rows]
    float* routed = nullptr;         ///< f32 [tokens, Hq, D] what a learned router makes of queries; null: none is
  };
  /// What one turn brings near beside the engine's attention, on the pool's side stream.
  struct Ahead {
    explicit Ahead(Stream side) : asked(side), brought(side) {}
    StreamMark asked, brought;  ///< before and after it
    Turn turn = {};
    bool pending = false;  ///< nobody has waited for it yet
  };
  /// Made when a sequence first folds.
  [[nodiscard]] DeviceRows& rows_of(FoldedRows& sequence);
  void require_no_capture(const char* operation) const;
  void launch_folds(const FoldArguments& all, const FoldCut& cut, std::int32_t spans, std::int64_t longest,
                    Element values, Stream stream);
  void prepare(const FoldedReading& reading);
  void place_near(std::int64_t bytes);
  void prefetch(const FoldedReading& reading);
  [[nodiscard]] Turn turn_of(const FoldedReading& reading, const Step::Slice& slice, bool ahead);
  /// What a learned router needs of the queries, if there is one.
  void route_queries(const FoldedReading& reading, const Turn& turn, Stream stream);
  /// The current stream comes after what was launched ahead. True if there was such.
  bool wait_for_ahead();

  const FactorOptions options_;
  const FoldBounds bounds_;
  DevicePool& pool_;
  MachineMemory& machine_;
  Staging& staging_;
  SlotsOf slots_of_;
  PageLocked far_;
  LeavingRooms leaving_;
  EventMemory work_;  ///< of one event, or of one layer that is read
  DeviceTable fold_table_, view_table_;
  std::uint64_t serial_ = 0;
  bool bounded_ = false;  ///< rows may have empty spans
  std::optional<Learned> learned_;
  Step step_;
  DeviceMemory near_;  ///< arenas of a layer's rows, then the addresses of their blobs
  std::int64_t near_room_ = 0;
  std::unique_ptr<Ahead> ahead_;  ///< from the first prefetch() on
};

}  // namespace kvkeep::cuda
