#pragma once
/// Vectors that begin with a cache line: rows of whole lines then meet one line a load. Products of a matrix unit take three times as long where tiles straddle lines.

#include <cstddef>
#include <new>
#include <vector>

namespace kvkeep::cpu {

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class Other>
  explicit(false) LineAllocator(const LineAllocator<Other>&) {}
  [[nodiscard]] T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* at, std::size_t) { ::operator delete(at, kLine); }
  bool operator==(const LineAllocator&) const = default;
};

template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

}  // namespace kvkeep::cpu
