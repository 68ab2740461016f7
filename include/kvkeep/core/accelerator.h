#pragma once
/// What a keeper needs from a device other than the CPU. kvkeep::cuda::accelerator() makes one; without one, a keeper
/// works on the CPU.

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

/// Owned bytes on a device, aligned to 64. Freed in stream order.
struct ReleaseDeviceMemory {
  void* context = nullptr;
  void (*release)(void* context) = nullptr;
  void operator()(void*) const { release(context); }
};
using DeviceMemory = std::unique_ptr<void, ReleaseDeviceMemory>;

/// Where an event writes the columns of one row; null: not there. [length of the row]
struct ColumnTarget {
  std::int32_t* positions = nullptr;
  float* credit = nullptr;
  float* tally = nullptr;
};

/// Everything runs in order on the device's current stream; only `read` waits. Not thread safe. One accelerator serves
/// one keeper: it holds the workspace of its events, and constants of that keeper's model and policy.
class Accelerator {
 public:
  virtual ~Accelerator() = default;

  /// A keeper takes it, for good. Throws StateError if a keeper has taken it before.
  void claim() {
    KVKEEP_REQUIRE_AS(StateError, !claimed_, "Keeper: the accelerator on ", device().str(),
                      " serves another keeper, or served one before; allowed one accelerator per keeper");
    claimed_ = true;
  }

  /// Where caches, queries and columns are.
  [[nodiscard]] virtual Device device() const = 0;

  /// Why it cannot run this policy on this model, one sentence each; empty: it can.
  [[nodiscard]] virtual std::vector<std::string> problems(const KVPolicy& policy, const ModelSpec& spec) const = 0;

  /// Memory that later calls may use on any stream. Once freed, it is reused only after all of those streams are done
  /// with it.
  [[nodiscard]] virtual DeviceMemory allocate(std::int64_t bytes) = 0;

  /// True once it has launched work on a stream that was being captured. A graph then holds addresses, so replaced
  /// memory must stay alive as long as its owner.
  [[nodiscard]] virtual bool captured() const = 0;

  /// Copies `rows` runs of `bytes` from one strided array to another. They must not overlap.
  virtual void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                         std::int64_t bytes, std::int64_t rows) = 0;

  virtual void push_queries(std::span<const QueryArrival> arrivals, const QueryLayout& layout) = 0;

  /// Makes the decision of policy.decide() with kernels. Rows, columns and queries of the evidence are on the device,
  /// page numbers on the host. The slots, scores, credit and tally of the result are in memory that the next decide()
  /// overwrites. Throws as the policy does, and Unsupported for what problems() names and for a dtype without kernels,
  /// before anything is launched.
  [[nodiscard]] virtual Decision decide(const KVPolicy& policy, const Evidence& evidence) = 0;

  /// Moves K, V, their scales and the columns of every row as the newest decision says. `columns`: [rows].
  /// Throws StateError, before anything is launched, for a decision that is not the newest, and after use_workspace().
  virtual void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
                    std::span<const ColumnTarget> columns) = 0;

  /// Copies to the host, and waits.
  virtual void read(void* to, const void* from, std::int64_t bytes) = 0;

  /// Bytes that decide() needs for this evidence besides cache, columns, rings and tables. Launches nothing.
  [[nodiscard]] virtual std::int64_t workspace_bytes(const KVPolicy& policy, const Evidence& evidence) = 0;

  /// Uses `memory` as that workspace: contiguous u8 [bytes] on the device, at an address that is a multiple of 256. The
  /// accelerator keeps it alive. An event that needs more throws StateError and says how much, before it launches
  /// anything. Without this call the accelerator takes memory from LibTorch's allocator, and none for events no larger
  /// than an earlier one.
  virtual void use_workspace(Tensor memory) = 0;

 private:
  bool claimed_ = false;
};

}  // namespace kvkeep
