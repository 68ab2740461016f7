// SPDX-License-Identifier: Apache-2.0
#pragma once
/// One event on a device, between the policy and the kernels: tables, memory, stream.

#include <array>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "device_pool.h"
#include "evidence.h"
#include "expected.h"
#include "gram.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/policy/machine.h"
#include "kvkeep/score/window_attention.h"
#include "memory.h"
#include "prepare.h"
#include "row_body.h"

namespace kvkeep::cuda {

/// Working memory of events: taken piece by piece, given back all at once.
class EventMemory {
 public:
  explicit EventMemory(DevicePool& pool) : pool_(pool) {}

  /// Frees everything. Several blocks become one, larger by half, so that the next events allocate nothing.
  void begin();
  /// Whether an event over as many rows, as many slots if all were as long as the longest, and as many queries has run
  /// or was reserved for: then one of this table allocates nothing.
  [[nodiscard]] bool has_served(const RowTable& table) const;
  /// One block that holds `bytes`, the whole need of an event over this table, before that begins.
  void reserve(std::int64_t bytes, const RowTable& table);
  /// Aligned to 256.
  [[nodiscard]] std::byte* take(std::int64_t bytes);
  void use(Tensor memory);
  /// Until the next begin(), take() only counts bytes and returns no memory.
  void begin_counting();
  [[nodiscard]] std::int64_t counted() const { return counted_; }
  /// Size of the workspace in bytes; -1: none was given.
  [[nodiscard]] std::int64_t given() const { return given_; }

 private:
  struct Block {
    DeviceMemory memory;
    std::int64_t bytes = 0, used = 0;
  };
  void retire_all();
  /// By one block that holds `bytes`, and half as many more.
  void replace_all(std::int64_t bytes);

  static constexpr std::int64_t kLeastBlock = std::int64_t{1} << 20;

  DevicePool& pool_;
  std::vector<Block> blocks_;
  std::int64_t given_ = -1, most_ = 0, counted_ = 0;
  std::array<std::int64_t, 3> most_extent_ = {-1, -1, -1};  ///< the largest that reserve() was told of
  bool counting_ = false;
};

/// Arrays of an event side by side, to be copied to the device at once.
class DeviceTable {
 public:
  explicit DeviceTable(DevicePool& pool) : pool_(pool) {}

  void clear() { image_.clear(); }
  /// Appends `count` values; returns their place in the table.
  template <class T>
  std::int64_t add(const T* values, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    image_.resize((image_.size() + 15) / 16 * 16);
    const auto at = static_cast<std::int64_t>(image_.size());
    image_.resize(image_.size() + count * sizeof(T));
    if (count > 0) std::memcpy(image_.data() + at, values, count * sizeof(T));
    return at;
  }
  template <class T>
  std::int64_t add(const std::vector<T>& values) {
    return add(values.data(), values.size());
  }
  /// Allocates memory for everything that was added, once nothing more follows. Device addresses are known from then
  /// on, null before.
  void place();
  template <class T>
  [[nodiscard]] T* there(std::int64_t at) const {
    return memory_.get() == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<std::byte*>(memory_.get()) + at);
  }
  template <class T>
  [[nodiscard]] T* here(std::int64_t at) {
    return reinterpret_cast<T*>(image_.data() + at);
  }
  /// Copies all of it, or nothing if the device holds it already. After a capture its content is unknown: a replay
  /// writes the table that it was captured with.
  void upload(Staging& staging, Stream stream);

 private:
  DevicePool& pool_;
  DeviceMemory memory_;
  std::int64_t capacity_ = 0;
  std::vector<std::byte> image_, sent_;
};

/// Window queries of every row, on the device.
struct DeviceWindow {
  std::int32_t window = 0;
  bool official = false;
  RowWindow* windows = nullptr;  ///< [rows]
  float* queries = nullptr;      ///< f32 [groups, Hq, window, D]; null: attention reads them as they came
  float* normalisers = nullptr;  ///< f32 [groups, Hq, window] if the engine gave all of them; else null
};

/// Numbers that stay the same from event to event.
struct Constants {
  std::map<const void*, DeviceMemory> by_owner;
  std::map<std::string, DeviceMemory, std::less<>> by_content;  ///< bytes
};

/// cuBLAS of a keeper's events.
class EventBlas {
 public:
  explicit EventBlas(DevicePool& pool) : pool_(pool) {}

  /// For an event that multiplies with it; null where there is none. The first such event takes 32 MiB and makes the
  /// handle, which waits for the device: throws StateError while the stream is captured. `dry`: it need not be open.
  [[nodiscard]] Blas* use(bool dry);

 private:
  DevicePool& pool_;
  DeviceMemory workspace_;  ///< outlives the handle
  Blas blas_;
};

/// An event on a device. Launches go to the stream that was current when it began.
class CudaEvent final : public Event {
 public:
  /// `dry`: nothing is launched, and memory is only counted.
  CudaEvent(const Evidence& given, const Limits& limits_given, DevicePool& pool, EventMemory& memory, Staging& staging,
            Constants& constants, EventBlas& blas, bool dry);

  [[nodiscard]] WindowAttention attend(std::int32_t window, bool official, WindowNeeds needs) override;
  [[nodiscard]] Scores score(const Scorer& scorer, const WindowAttention& seen) override;
  [[nodiscard]] Scores share(const Scores& scores, Sharing share) override;
  void allot(const Allocator& allotting, const Scores& scores, WindowAttention seen, Decision& decision) override;

  [[nodiscard]] PromptScores prompt_scores(const PromptScoreOptions& options) override;
  [[nodiscard]] ChosenTokens rank(const PromptScores& scores, std::span<PromptRanks* const> ranks, bool list) override;
  [[nodiscard]] ChosenTokens choose(const Tensor& scores, std::int32_t best, std::int32_t window,
                                    const std::vector<bool>& of) override;

  /// What kernels read, and where the kept slots go; set by the machine.
  const Evidence& evidence;
  const Limits& limits;
  EvidenceArguments arguments;           ///< rows, limits and queries on the device
  Element value_element = Element::f32;  ///< of values, if anything reads them
  EventTables tables;
  KeepSet keep;                                       ///< without its slots
  const Allocator* allocator = nullptr;               ///< for which it has room
  bool sums = false;                                  ///< LayerDemand::sums()
  bool folds = false;                                 ///< what does not stay folds
  std::int32_t* counts = nullptr;                     ///< i32 [rows] EventTables::counts
  const std::int32_t* next_positions = nullptr;       ///< i32 [groups]
  const NewestPositions* newest_positions = nullptr;  ///< [groups] null once they are in the columns
  const PinnedSpans* pins = nullptr;                  ///< [groups] null: nothing is pinned
  const RowLimit* given_limits = nullptr;             ///< [rows] if something is, and
  RowLimit* settled_limits = nullptr;                 ///< [rows] what arguments.limits are, once positions are settled
  SlotRange* pinned_ranges = nullptr;  ///< [spans, kv_heads] where the spans lie, once positions are settled

  /// The window of attend(); its `windows` are null without one.
  [[nodiscard]] const DeviceWindow& asked() const { return asked_; }

  template <class T>
  [[nodiscard]] T* take(std::int64_t count) const {
    return reinterpret_cast<T*>(memory_.take(count * static_cast<std::int64_t>(sizeof(T))));
  }
  /// EventBlas::use()
  [[nodiscard]] Blas* blas() const { return blas_.use(dry_); }
  /// f32 [slots]
  [[nodiscard]] float* flat() const { return take<float>(evidence.table.slots); }

  template <class Arguments>
  void launch(void (*launcher)(const Arguments&, Stream), const Arguments& with) const {
    if (!dry_) launcher(with, stream_);
  }

  /// A body, maybe one that a program registered.
  void launch(const RowScorerLaunch& launcher, const Scorer& scorer, const ScoredRows& rows) const {
    if (!dry_) launcher.run(scorer, rows, stream_);
  }

  /// Who reads the queries of a window: a kernel of its own, or window attention, which reads those after RoPE where
  /// they are if it sums over heads and has matrix units.
  enum class Reader : std::uint8_t { other, attention };
  /// The newest `window` queries, rotated, and the window of every row; afterwards the columns hold the positions. One
  /// launch. fresh: PrepareArguments::fresh.
  [[nodiscard]] DeviceWindow ask(std::int32_t window, bool official, Reader reader = Reader::attention,
                                 bool fresh = false);
  /// Afterwards the columns hold the positions. One launch, or none.
  void settle_positions();
  /// Reductions of a window; null: not wanted, sum: of every row, due or not. Two launches, or one with its
  /// log-sum-exps.
  void attend(const DeviceWindow& window, float* usage, float* newest, float* sum = nullptr) const;
  /// f32 [slots]. Two launches.
  [[nodiscard]] float* attend_history(const DeviceWindow& window, const WindowReading& reading) const;

  /// Numbers that stay the same as long as `owner` lives, which is as long as the machine: made and uploaded the first
  /// time.
  template <class T, class Make>
  [[nodiscard]] const T* constant(const void* owner, Make&& make) const {
    if (dry_) return nullptr;
    const auto found = constants_.by_owner.find(owner);
    if (found != constants_.by_owner.end()) return static_cast<const T*>(found->second.get());
    const std::vector<T> values = make();
    return static_cast<const T*>(constant(std::as_bytes(std::span(values)), [&](DeviceMemory memory) {
      constants_.by_owner.emplace(owner, std::move(memory));
    }));
  }
  /// A few numbers, whoever holds them: uploaded the first time that they are seen.
  template <class T>
  [[nodiscard]] const T* constant(const std::vector<T>& values) const {
    if (dry_) return nullptr;
    const auto bytes = std::as_bytes(std::span(values));
    const std::string_view key(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const auto found = constants_.by_content.find(key);
    if (found != constants_.by_content.end()) return static_cast<const T*>(found->second.get());
    return static_cast<const T*>(
        constant(bytes, [&](DeviceMemory memory) { constants_.by_content.emplace(key, std::move(memory)); }));
  }

 private:
  /// Uploads, and has `hold` keep the memory.
  template <class Keep>
  [[nodiscard]] const void* constant(std::span<const std::byte> bytes, Keep&& hold) const {
    DeviceMemory memory = pool_.allocate(std::ssize(bytes));
    const void* const there = memory.get();
    staging_.upload(memory.get(), bytes.data(), bytes.size(), stream_);
    if (is_capturing(stream_))
      pool_.retire(std::move(memory));  // filled only by a replay
    else
      hold(std::move(memory));
    return there;
  }
  [[nodiscard]] std::int32_t length_of(std::size_t group) const {
    return evidence.table.rows[static_cast<std::size_t>(evidence.table.groups[group].first_row)].length;
  }
  [[nodiscard]] Tensor last_query_scores(std::int32_t pool);
  /// f32 [tokens before the windows], not written
  [[nodiscard]] Tensor per_token(std::int32_t window) const;
  /// sum_over_heads() times `weight`.
  [[nodiscard]] Tensor token_sums(const Tensor& of_slots, std::int32_t window, float weight, std::int32_t sinks) const;
  [[nodiscard]] PrepareArguments prepare_arguments() const;
  [[nodiscard]] Tensor tensor(void* data, std::int64_t count, Dtype dtype = Dtype::f32) const;

  DeviceScope scope_;
  DevicePool& pool_;
  EventMemory& memory_;
  Staging& staging_;
  Constants& constants_;
  EventBlas& blas_;
  Stream stream_;
  DeviceWindow asked_;
  bool dry_;
};

/// f32, f16 or bf16. Throws Unsupported for other dtypes.
[[nodiscard]] Element element_of(const char* what, Dtype dtype);

/// What the keys or values of an event are; those of 8 bits need f32 scales. Throws Unsupported for what no kernel
/// reads.
[[nodiscard]] Element element_of_keys(const RowTable& table);
[[nodiscard]] Element element_of_values(const RowTable& table);

/// Slots that each row may keep at most, if the scores decide how many; empty: the limits do.
using Most = std::vector<std::int32_t> (*)(const Allocator& allocator, const Evidence& evidence, const Limits& limits);

/// Fills scores [slots] of every due row.
using Score = float* (*)(CudaEvent& event, const Scorer& scorer, const WindowAttention& seen);
/// Writes the kept slots of every row, and how many they are if the scores decide that (EventTables::counts); returns
/// the new credit, or null if there is none.
using Allot = float* (*)(CudaEvent& event, const Allocator& allocator, const WindowAttention& seen, const float* scores,
                         std::int32_t* slots);

/// min(length, budget) of a due row, the length of any other.
[[nodiscard]] std::vector<std::int32_t> most_kept(const RowTable& table, const Limits& limits);

struct AllocatorKernels {
  Allot allot;
  Most most;
};

/// The kernels of a scorer's or allocator's class; null: none.
[[nodiscard]] Score kernels_of(const Scorer& scorer);
[[nodiscard]] const AllocatorKernels* kernels_of(const Allocator& allocator);

}  // namespace kvkeep::cuda
