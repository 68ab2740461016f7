// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory of a machine: where columns, query rings and caches live, and how the host reaches them.

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <variant>

#include "kvkeep/core/query_view.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Owned bytes on a device, aligned to 64. Freed in stream order.
struct ReleaseDeviceMemory {
  void* context = nullptr;
  void (*release)(void* context) = nullptr;
  void operator()(void*) const { release(context); }
};
using DeviceMemory = std::unique_ptr<void, ReleaseDeviceMemory>;

/// Whether work was launched on a stream that was being captured.
enum class Capture : std::uint8_t {
  never,
  before,  ///< a graph holds addresses, so replaced memory must stay
  now,     ///< and what is launched runs when the graph does
};

/// Where the queries of a step go in one layer: each run of tokens to its ring, or each token as a table says.
using QueryTargets = std::variant<std::span<const QueryArrival>, QueryTable>;

/// Everything runs in order on the device's current stream; only `read` waits. Not thread safe, except on the host.
/// Nothing owns one by this class.
class MachineMemory {
 public:
  MachineMemory(const MachineMemory&) = delete;
  MachineMemory& operator=(const MachineMemory&) = delete;

  /// Where caches, queries and columns are.
  [[nodiscard]] Device device() const { return device_; }

  /// True if the host reads and writes this memory directly.
  [[nodiscard]] bool is_host() const { return is_host_; }

  /// Memory that later calls may use on any stream. Once freed, it is reused only after all of those streams are done
  /// with it.
  [[nodiscard]] virtual DeviceMemory allocate(std::int64_t bytes) = 0;

  [[nodiscard]] virtual Capture capture() const = 0;

  /// Copies from the host; `from` may change as soon as it returns.
  virtual void write(void* to, const void* from, std::int64_t bytes) = 0;

  /// Copies `rows` runs of `bytes` from one strided array to another. They must not overlap.
  virtual void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                         std::int64_t bytes, std::int64_t rows) = 0;

  /// Copies new queries of one layer to where they are kept, and their log-sum-exps if it reads them.
  virtual void push_queries(const QueryTargets& to, const QueryLayout& layout) = 0;

  /// Writes new given scores to their columns, as f32.
  virtual void push_given(std::span<const GivenArrival> arrivals, const GivenLayout& layout) = 0;

  /// Copies to the host, and waits.
  virtual void read(void* to, const void* from, std::int64_t bytes) = 0;

 protected:
  MachineMemory(Device device, bool is_host) : device_(device), is_host_(is_host) {}
  ~MachineMemory() = default;

 private:
  const Device device_;
  const bool is_host_;
};

/// The memory of the host. Thread safe.
[[nodiscard]] MachineMemory& host_memory();

namespace machine_memory_detail {

class HostMemory final : public MachineMemory {
 public:
  HostMemory() : MachineMemory({}, true) {}

  [[nodiscard]] Capture capture() const override { return Capture::never; }

  [[nodiscard]] DeviceMemory allocate(std::int64_t bytes) override {
    constexpr std::align_val_t kAlignment{64};
    void* const memory = ::operator new(static_cast<std::size_t>(bytes), kAlignment);
    return {memory, {memory, [](void* held) { ::operator delete(held, kAlignment); }}};
  }

  void write(void* to, const void* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }

  void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t bytes,
                 std::int64_t rows) override {
    for (std::int64_t r = 0; r < rows; ++r)
      std::memcpy(static_cast<std::byte*>(to) + r * to_stride, static_cast<const std::byte*>(from) + r * from_stride,
                  static_cast<std::size_t>(bytes));
  }

  void push_queries(const QueryTargets& to, const QueryLayout& layout) override {
    std::visit([&](const auto& targets) { push(targets, layout); }, to);
  }

  void push_given(std::span<const GivenArrival> arrivals, const GivenLayout& layout) override {
    with_dtype("give", layout.dtype, [&](auto type) {
      for (const GivenArrival& arrival : arrivals)
        for (std::int32_t t = 0; t < arrival.tokens; ++t) {
          decltype(type) x;
          std::memcpy(&x, arrival.from + t * layout.token_stride, sizeof x);
          arrival.to[t] = static_cast<float>(x);
        }
    });
  }

  void read(void* to, const void* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }

 private:
  static void push(std::span<const QueryArrival> arrivals, const QueryLayout& layout) {
    for (const QueryArrival& arrival : arrivals)
      for (std::int32_t i = 0; i < arrival.tokens; ++i) {
        const std::int32_t place = (arrival.at + i) % arrival.capacity;
        arrival.positions[place] = arrival.position + i;
        copy_query(layout, arrival.first + i, arrival.ring + place * layout.heads * layout.head_bytes);
      }
  }

  static void push(const QueryTable& table, const QueryLayout& layout) {
    for (std::int32_t t = 0; t < table.tokens; ++t) {
      const QueryPlace& place = table.places[t];
      if (place.query == nullptr) continue;
      *place.position = place.logical;
      copy_query(layout, t, place.query + table.offset.queries);
    }
  }

  static void copy_query(const QueryLayout& layout, std::int32_t token, std::byte* to) {
    const std::byte* const from = layout.from + token * layout.token_stride;
    for (std::int32_t h = 0; h < layout.heads; ++h)
      std::memcpy(to + h * layout.head_bytes, from + h * layout.head_stride,
                  static_cast<std::size_t>(layout.head_bytes));
  }
};

}  // namespace machine_memory_detail

inline MachineMemory& host_memory() {
  static machine_memory_detail::HostMemory memory;
  return memory;
}

}  // namespace kvkeep
