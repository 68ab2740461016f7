#include "kvkeep/observe/query_ring.h"

#include <algorithm>
#include <cstring>

#include "kvkeep/core/error.h"
#include "kvkeep/core/finite.h"

namespace kvkeep {

QueryRing::QueryRing(std::int32_t layers, std::int32_t wanted, std::int32_t query_heads, std::int32_t key_dim,
                     Accelerator* accelerator)
    : wanted_(wanted),
      capacity_(wanted == 0 ? 0 : wanted + kRollback),
      heads_(query_heads),
      dim_(key_dim),
      accelerator_(accelerator),
      layers_(static_cast<std::size_t>(layers)),
      positions_(static_cast<std::size_t>(capacity_)) {}

void QueryRing::allocate(Dtype dtype) {
  dtype_ = dtype;
  if (accelerator_ != nullptr) {
    there_ = accelerator_->allocate(data_bytes() + std::int64_t{capacity_} * 4);
    return;
  }
  finite_.resize(layers_.size() * static_cast<std::size_t>(capacity_));
  data_.resize(layers_.size() * static_cast<std::size_t>(capacity_ * token_bytes()));
}

void QueryRing::push(std::int32_t layer, const std::byte* data, Dtype dtype, std::int64_t token_stride,
                     std::int64_t head_stride, std::span<const std::int32_t> positions,
                     std::vector<QueryArrival>* arrivals) {
  Layer& state = layers_[static_cast<std::size_t>(layer)];
  const auto tokens = static_cast<std::int64_t>(positions.size());
  if (capacity_ > 0) {
    reserve(dtype);
    const std::int64_t head_bytes = token_bytes() / heads_;
    std::byte* ring = const_cast<std::byte*>(memory()) + layer * capacity_ * token_bytes();
    for (std::int64_t i = std::max<std::int64_t>(0, tokens - capacity_); i < tokens; ++i) {
      const std::int64_t place = (state.seen + i) % capacity_;
      const std::int32_t position = positions[static_cast<std::size_t>(i)];
      const std::byte* from = data + i * token_stride;
      positions_[static_cast<std::size_t>(place)] = position;
      if (accelerator_ != nullptr) {
        QueryArrival* last = arrivals->empty() || arrivals->back().ring != ring ? nullptr : &arrivals->back();
        if (last != nullptr && last->position + last->tokens == position)
          ++last->tokens;
        else
          arrivals->push_back({.from = from,
                               .ring = ring,
                               .positions = static_cast<std::int32_t*>(
                                   static_cast<void*>(static_cast<std::byte*>(there_.get()) + data_bytes())),
                               .capacity = capacity_,
                               .at = static_cast<std::int32_t>(place),
                               .tokens = 1,
                               .position = position});
        continue;
      }
      std::byte* to = ring + place * token_bytes();
      for (std::int32_t h = 0; h < heads_; ++h)
        std::memcpy(to + h * head_bytes, from + h * head_stride, static_cast<std::size_t>(head_bytes));
      finite_[static_cast<std::size_t>(layer * capacity_ + place)] =
          all_finite(to, dtype_, std::int64_t{heads_} * dim_) ? 1 : 0;
    }
  }
  state.seen += tokens;
  state.oldest = std::max(state.oldest, state.seen - capacity_);
}

QueryView QueryRing::view(std::int32_t layer) const {
  const Layer& state = layers_[static_cast<std::size_t>(layer)];
  if (memory() == nullptr) return {};
  const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(wanted_, state.seen - state.oldest));
  return {.data = memory() + layer * capacity_ * token_bytes(),
          .dtype = dtype_,
          .token_stride = token_bytes(),
          .head_stride = token_bytes() / heads_,
          .positions = accelerator_ == nullptr
                           ? positions_.data()
                           : static_cast<const std::int32_t*>(static_cast<const void*>(memory() + data_bytes())),
          .ring = capacity_,
          .begin = static_cast<std::int32_t>((state.seen - count) % capacity_),
          .count = count};
}

std::optional<std::int32_t> QueryRing::not_finite(std::int32_t layer) const {
  if (finite_.empty()) return {};
  const QueryView window = view(layer);
  for (std::int32_t i = window.count - 1; i >= 0; --i)
    if (finite_[static_cast<std::size_t>(layer * capacity_ + window.index(i))] == 0) return window.position(i);
  return {};
}

bool QueryRing::can_forget(std::int64_t tokens) const {
  return std::all_of(layers_.begin(), layers_.end(), [&](const Layer& l) {
    const std::int64_t seen = l.seen - tokens;
    return seen >= l.first && std::min<std::int64_t>(wanted_, seen - l.first) <= seen - l.oldest;
  });
}

void QueryRing::forget(std::int64_t tokens) {
  for (Layer& l : layers_) l.seen -= tokens;
}

QueryRing::Held QueryRing::held() const {
  Held held{.dtype = dtype_, .layers = layers_};
  if (data_.empty()) return held;
  std::int64_t count = 0;
  for (const Layer& l : layers_) count = std::max(count, l.seen - l.oldest);
  const std::int64_t seen = layers_.front().seen, bytes = token_bytes();
  for (std::int64_t token = seen - count; token < seen; ++token)
    held.positions.push_back(positions_[static_cast<std::size_t>(token % capacity_)]);
  held.data.resize(layers_.size() * static_cast<std::size_t>(count * bytes));
  for (std::size_t l = 0; l < layers_.size(); ++l)
    for (std::int64_t token = layers_[l].oldest; token < seen; ++token)
      std::memcpy(held.data.data() + (static_cast<std::int64_t>(l) * count + token - (seen - count)) * bytes,
                  data_.data() + (static_cast<std::int64_t>(l) * capacity_ + token % capacity_) * bytes,
                  static_cast<std::size_t>(bytes));
  return held;
}

void QueryRing::take(const Held& held) {
  const auto count = static_cast<std::int64_t>(held.positions.size()), bytes = element_size(held.dtype) * dim_ * heads_;
  KVKEEP_REQUIRE(
      held.layers.size() == layers_.size() && count <= capacity_ &&
          static_cast<std::int64_t>(held.data.size()) == static_cast<std::int64_t>(layers_.size()) * count * bytes,
      "query ring: ", held.layers.size(), " layers with ", held.data.size(), " bytes of ", count, " queries; allowed ",
      layers_.size(), " layers, each with at most ", capacity_, " queries of ", bytes, " bytes");
  const std::int64_t seen = held.layers.front().seen;
  for (const Layer& l : held.layers)
    KVKEEP_REQUIRE(capacity_ == 0 || (l.seen == seen && 0 <= l.first && l.first <= l.oldest && l.oldest <= seen &&
                                      seen - l.oldest <= count && count <= seen),
                   "query ring: a layer has seen ", l.seen, " tokens, all from ", l.first, " on, and holds those from ",
                   l.oldest, " on; allowed ", seen, " tokens, and at most the ", count, " newest of them");
  layers_ = held.layers;
  if (count == 0) return;
  allocate(held.dtype);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t place = (seen - count + i) % capacity_;
    positions_[static_cast<std::size_t>(place)] = held.positions[static_cast<std::size_t>(i)];
    for (std::int64_t l = 0; l < static_cast<std::int64_t>(layers_.size()); ++l) {
      std::memcpy(data_.data() + (l * capacity_ + place) * bytes, held.data.data() + (l * count + i) * bytes,
                  static_cast<std::size_t>(bytes));
      finite_[static_cast<std::size_t>(l * capacity_ + place)] =
          all_finite(data_.data() + (l * capacity_ + place) * bytes, dtype_, std::int64_t{heads_} * dim_) ? 1 : 0;
    }
  }
}

}  // namespace kvkeep
