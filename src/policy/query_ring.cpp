#include "kvkeep/observe/query_ring.h"

#include <algorithm>
#include <cstring>


namespace kvkeep {

QueryRing::QueryRing(std::int32_t layers, std::int32_t wanted, std::int32_t query_heads, std::int32_t key_dim)
    : wanted_(wanted),
      capacity_(wanted == 0 ? 0 : wanted + kRollback),
      heads_(query_heads),
      dim_(key_dim),
      layers_(static_cast<std::size_t>(layers)),
      positions_(static_cast<std::size_t>(capacity_)) {}

void QueryRing::push(std::int32_t layer, const std::byte* data, ScalarType dtype, std::int64_t token_stride, std::int64_t head_stride,
                     std::span<const std::int32_t> positions) {
  Layer& state = layers_[static_cast<std::size_t>(layer)];
  const auto tokens = static_cast<std::int64_t>(positions.size());
  if (capacity_ > 0) {
    const auto head_bytes = static_cast<std::int64_t>(c10::elementSize(dtype)) * dim_;
    const std::int64_t token_bytes = head_bytes * heads_;
    if (data_.empty()) {
      dtype_ = dtype;
      data_.resize(layers_.size() * static_cast<std::size_t>(capacity_ * token_bytes));
    }
    for (std::int64_t i = std::max<std::int64_t>(0, tokens - capacity_); i < tokens; ++i) {
      const std::int64_t place = (state.seen + i) % capacity_;
      positions_[static_cast<std::size_t>(place)] = positions[static_cast<std::size_t>(i)];
      std::byte* to = data_.data() + (layer * capacity_ + place) * token_bytes;
      for (std::int32_t h = 0; h < heads_; ++h)
        std::memcpy(to + h * head_bytes, data + i * token_stride + h * head_stride, static_cast<std::size_t>(head_bytes));
    }
  }
  state.seen += tokens;
  state.oldest = std::max(state.oldest, state.seen - capacity_);
}

QueryView QueryRing::view(std::int32_t layer) const {
  const Layer& state = layers_[static_cast<std::size_t>(layer)];
  if (capacity_ == 0 || data_.empty()) return {};
  const auto head_bytes = static_cast<std::int64_t>(c10::elementSize(dtype_)) * dim_;
  const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(wanted_, state.seen - state.oldest));
  return {.data = data_.data() + layer * capacity_ * heads_ * head_bytes,
          .dtype = dtype_,
          .token_stride = heads_ * head_bytes,
          .head_stride = head_bytes,
          .positions = positions_.data(),
          .ring = capacity_,
          .begin = static_cast<std::int32_t>((state.seen - count) % capacity_),
          .count = count};
}

bool QueryRing::can_forget(std::int64_t tokens) const {
  return std::all_of(layers_.begin(), layers_.end(), [&](const Layer& l) {
    const std::int64_t seen = l.seen - tokens;
    return seen >= 0 && std::min<std::int64_t>(wanted_, seen) <= seen - l.oldest;
  });
}

void QueryRing::forget(std::int64_t tokens) {
  for (Layer& l : layers_) l.seen -= tokens;
}

}  // namespace kvkeep
