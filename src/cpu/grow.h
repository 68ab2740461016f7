#pragma once
/// Room in lists that grow bit by bit.

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvkeep {

/// Room for `size` elements in all; grows by half at least, so that what grows token by token is seldom copied.
template <class T>
void make_room(std::vector<T>& list, std::size_t size) {
  if (size > list.capacity()) list.reserve(std::max(size, list.capacity() + list.capacity() / 2));
}

}  // namespace kvkeep
