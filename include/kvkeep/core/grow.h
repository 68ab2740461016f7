#pragma once
/// Not part of the interface. Room in lists that grow little by little.

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvkeep {

/// Makes room for `size` elements in total. Grows by at least half, so growth token by token rarely copies.
template <class T>
void make_room(std::vector<T>& list, std::size_t size) {
  if (size > list.capacity()) list.reserve(std::max(size, list.capacity() + list.capacity() / 2));
}

}  // namespace kvkeep
