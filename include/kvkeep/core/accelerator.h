#pragma once
/// What a keeper asks of a device other than the CPU. kvkeep::cuda::accelerator() makes one; without one a keeper works
/// on the CPU.

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/query_arrival.h"

namespace kvkeep {

class KVPolicy;
struct PageMove;

/// Bytes on a device, aligned to 64, owned. Freed in the order of the stream.
using DeviceMemory = c10::DataPtr;

/// Columns of one row, as an event writes them; null: not there. [length of the row]
struct ColumnTarget {
  std::int32_t* positions = nullptr;
  float* credit = nullptr;
  float* tally = nullptr;
};

/// Everything runs on the stream that is current on the device, in order; nothing but `read` waits. Not thread safe,
/// and one accelerator serves one keeper: it holds the memory that its events work in, and constants of that keeper's
/// model and policy.
class Accelerator {
 public:
  virtual ~Accelerator() = default;

  /// A keeper takes it, for good. Throws StateError where one has taken it before.
  void claim() {
    KVKEEP_REQUIRE_AS(StateError, !claimed_, "Keeper: the accelerator on ", device().str(),
                      " serves another keeper, or did before; allowed one accelerator for each keeper");
    claimed_ = true;
  }

  /// Where caches, queries and columns lie.
  [[nodiscard]] virtual Device device() const = 0;

  /// Why it cannot run this policy on this model, one sentence each; empty: it can.
  [[nodiscard]] virtual std::vector<std::string> problems(const KVPolicy& policy, const ModelSpec& spec) const = 0;

  /// Memory that later calls use on any stream. It is handed out again, once freed, only after all of these streams are
  /// done with it.
  [[nodiscard]] virtual DeviceMemory allocate(std::int64_t bytes) = 0;

  /// True once it launched work on a stream that was being captured: a graph holds addresses then, so memory that is
  /// replaced must stay as long as its owner does.
  [[nodiscard]] virtual bool captured() const = 0;

  /// Copies `rows` runs of `bytes` from one array with a stride to another. They must not overlap.
  virtual void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                         std::int64_t bytes, std::int64_t rows) = 0;

  virtual void push_queries(std::span<const QueryArrival> arrivals, const QueryLayout& layout) = 0;

  /// What policy.decide() decides, by kernels. Rows, columns and queries of the evidence lie on the device, page
  /// numbers on the host. The slots, scores, credit and tally of the result lie in memory that the next decide() writes
  /// again. Throws as the policy, and Unsupported for what problems() names and for a dtype without kernels, before
  /// anything is launched.
  [[nodiscard]] virtual Decision decide(const KVPolicy& policy, const Evidence& evidence) = 0;

  /// Moves K, V, their scales and the columns of every row as the newest decision says. `columns`: [rows].
  /// Throws StateError, before anything is launched, for a decision that is not the newest, and after use_workspace().
  virtual void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
                    std::span<const ColumnTarget> columns) = 0;

  /// Copies to the host, and waits.
  virtual void read(void* to, const void* from, std::int64_t bytes) = 0;

  /// Bytes that decide() needs for this evidence beside cache, columns, rings and tables. Launches nothing.
  [[nodiscard]] virtual std::int64_t workspace_bytes(const KVPolicy& policy, const Evidence& evidence) = 0;

  /// Takes [bytes] on the device, contiguous u8 that begins at a multiple of 256, for that; the accelerator keeps it
  /// alive. An event that needs more throws StateError and says how much, before it launches anything. Without it the
  /// accelerator takes memory from LibTorch's allocator, and none any more once an event as large was there before.
  virtual void use_workspace(Tensor memory) = 0;

 private:
  bool claimed_ = false;
};

}  // namespace kvkeep
