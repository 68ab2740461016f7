#include "kvkeep/core/machine_memory.h"

#include <cstring>
#include <new>

namespace kvkeep {
namespace {

class HostMemory final : public MachineMemory {
 public:
  [[nodiscard]] Device device() const override { return {}; }
  [[nodiscard]] bool is_host() const override { return true; }
  [[nodiscard]] bool captured() const override { return false; }

  [[nodiscard]] DeviceMemory allocate(std::int64_t bytes) override {
    constexpr std::align_val_t kAlignment{64};
    void* const memory = ::operator new(static_cast<std::size_t>(bytes), kAlignment);
    return {memory, {memory, [](void* held) { ::operator delete(held, kAlignment); }}};
  }

  void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t bytes,
                 std::int64_t rows) override {
    for (std::int64_t r = 0; r < rows; ++r)
      std::memcpy(static_cast<std::byte*>(to) + r * to_stride, static_cast<const std::byte*>(from) + r * from_stride,
                  static_cast<std::size_t>(bytes));
  }

  void push_queries(std::span<const QueryArrival> arrivals, const QueryLayout& layout) override {
    for (const QueryArrival& arrival : arrivals)
      for (std::int32_t i = 0; i < arrival.tokens; ++i) {
        const std::int32_t place = (arrival.at + i) % arrival.capacity;
        arrival.positions[place] = arrival.position + i;
        const std::byte* from = arrival.from + i * layout.token_stride;
        std::byte* to = arrival.ring + place * layout.heads * layout.head_bytes;
        for (std::int32_t h = 0; h < layout.heads; ++h)
          std::memcpy(to + h * layout.head_bytes, from + h * layout.head_stride,
                      static_cast<std::size_t>(layout.head_bytes));
      }
  }

  void read(void* to, const void* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
};

}  // namespace

MachineMemory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace kvkeep
