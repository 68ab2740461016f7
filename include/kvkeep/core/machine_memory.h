#pragma once
/// Memory of a machine: where columns, query rings and caches live, and how the host reaches them.

#include <cstdint>
#include <memory>
#include <span>

#include "kvkeep/core/device.h"
#include "kvkeep/core/query_arrival.h"

namespace kvkeep {

/// Owned bytes on a device, aligned to 64. Freed in stream order.
struct ReleaseDeviceMemory {
  void* context = nullptr;
  void (*release)(void* context) = nullptr;
  void operator()(void*) const { release(context); }
};
using DeviceMemory = std::unique_ptr<void, ReleaseDeviceMemory>;

/// Everything runs in order on the device's current stream; only `read` waits. Not thread safe, except on the host.
class MachineMemory {
 public:
  virtual ~MachineMemory() = default;

  /// Where caches, queries and columns are.
  [[nodiscard]] virtual Device device() const = 0;

  /// True if the host reads and writes this memory directly.
  [[nodiscard]] virtual bool is_host() const = 0;

  /// Memory that later calls may use on any stream. Once freed, it is reused only after all of those streams are done
  /// with it.
  [[nodiscard]] virtual DeviceMemory allocate(std::int64_t bytes) = 0;

  /// True once it has launched work on a stream that was being captured. A graph then holds addresses, so replaced
  /// memory must stay alive as long as its owner.
  [[nodiscard]] virtual bool captured() const = 0;

  /// Copies `rows` runs of `bytes` from one strided array to another. They must not overlap.
  virtual void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                         std::int64_t bytes, std::int64_t rows) = 0;

  /// Copies new queries into their rings.
  virtual void push_queries(std::span<const QueryArrival> arrivals, const QueryLayout& layout) = 0;

  /// Copies to the host, and waits.
  virtual void read(void* to, const void* from, std::int64_t bytes) = 0;
};

/// The memory of the host. Thread safe.
[[nodiscard]] MachineMemory& host_memory();

}  // namespace kvkeep
