#pragma once
// Bodies of query_ring.h: compiled by src/observe, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cstring>

#include "kvkeep/core/error.h"
#include "kvkeep/core/finite.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/observe/query_ring.h"

namespace kvkeep {

KVKEEP_INLINE QueryRing::QueryRing(std::int32_t layers, std::int32_t wanted, std::int32_t query_heads,
                                   std::int32_t key_dim, MachineMemory& memory)
    : wanted_(wanted),
      capacity_(capacity_of(wanted)),
      heads_(query_heads),
      dim_(key_dim),
      memory_(&memory),
      layers_(static_cast<std::size_t>(layers)) {}

KVKEEP_INLINE void QueryRing::allocate(Dtype dtype) {
  dtype_ = dtype;
  const std::int64_t normalisers = !memory_->is_host() ? std::ssize(layers_) * capacity_ * heads_ : 0;
  held_ = memory_->allocate(data_bytes() + (capacity_ + normalisers) * 4);
}

KVKEEP_INLINE void QueryRing::place(std::int32_t layer, std::int32_t first, std::span<const std::int32_t> positions,
                                    std::vector<QueryArrival>& arrivals) const {
  if (capacity_ == 0) return;
  const std::int64_t seen = this->seen(layer);
  const auto tokens = static_cast<std::int32_t>(positions.size());
  const std::size_t earlier = arrivals.size();  // of other layers and sequences
  for (std::int32_t i = std::max(0, tokens - capacity_); i < tokens; ++i) {
    const std::int32_t position = positions[static_cast<std::size_t>(i)];
    QueryArrival* last = arrivals.size() == earlier ? nullptr : &arrivals.back();
    if (last != nullptr && last->position + last->tokens == position)
      ++last->tokens;
    else
      arrivals.push_back(
          {.first = first + i,
           .ring = data() + layer * capacity_ * token_bytes(),
           .positions = this->positions(),
           .capacity = capacity_,
           .at = static_cast<std::int32_t>((seen + i) % capacity_),
           .tokens = 1,
           .position = position,
           .normalisers = normalisers() == nullptr ? nullptr : normalisers() + layer * capacity_ * heads_});
  }
}

KVKEEP_INLINE void QueryRing::push(std::int32_t layer, const std::byte* data, Dtype dtype, std::int64_t token_stride,
                                   std::int64_t head_stride, std::span<const std::int32_t> positions) {
  reserve(dtype);
  std::vector<QueryArrival> arrivals;
  place(layer, 0, positions, arrivals);
  memory_->push_queries(arrivals, {.from = data,
                                   .heads = heads_,
                                   .head_bytes = element_size(dtype) * dim_,
                                   .token_stride = token_stride,
                                   .head_stride = head_stride});
  advance(layer, static_cast<std::int64_t>(positions.size()));
}

KVKEEP_INLINE QueryView QueryRing::view(std::int32_t layer) const {
  const Layer& state = layers_[static_cast<std::size_t>(layer)];
  if (held_ == nullptr) return {};
  const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(wanted_, state.seen - state.oldest));
  return {.data = data() + layer * capacity_ * token_bytes(),
          .dtype = dtype_,
          .token_stride = token_bytes(),
          .head_stride = token_bytes() / heads_,
          .positions = positions(),
          .ring = capacity_,
          .begin = static_cast<std::int32_t>((state.seen - count) % capacity_),
          .count = count,
          .normalisers = normalisers() == nullptr ? nullptr : normalisers() + layer * capacity_ * heads_,
          .normalised = normalisers() == nullptr ? 0
                                                 : static_cast<std::int32_t>(std::min<std::int64_t>(
                                                       count, state.seen - state.normalised_from))};
}

KVKEEP_INLINE std::optional<std::int32_t> QueryRing::not_finite(std::int32_t layer) const {
  if (!memory_->is_host()) return {};
  const QueryView window = view(layer);
  for (std::int32_t i = window.count - 1; i >= 0; --i)
    if (!all_finite(window.at(i, 0), dtype_, std::int64_t{heads_} * dim_)) return window.position(i);
  return {};
}

KVKEEP_INLINE bool QueryRing::can_forget(std::int64_t tokens) const {
  return std::all_of(layers_.begin(), layers_.end(), [&](const Layer& l) {
    const std::int64_t seen = l.seen - tokens;
    if (seen < l.first) return l.unread;
    return std::min<std::int64_t>(wanted_, seen - l.first) <= seen - l.oldest;
  });
}

KVKEEP_INLINE void QueryRing::forget(std::int64_t tokens) {
  for (Layer& l : layers_) {
    l.seen -= tokens;
    l.first = std::min(l.first, l.seen);
    l.oldest = std::min(l.oldest, l.seen);
    l.normalised_from = std::min(l.normalised_from, l.seen);
  }
}

KVKEEP_INLINE QueryRing::Held QueryRing::held() const {
  Held held{.dtype = dtype_, .layers = layers_};
  if (held_ == nullptr) return held;
  std::vector<std::byte> image(static_cast<std::size_t>(held_bytes()));
  memory_->read(image.data(), held_.get(), held_bytes());
  std::vector<std::int32_t> places(static_cast<std::size_t>(capacity_));
  std::memcpy(places.data(), image.data() + data_bytes(), places.size() * 4);
  std::int64_t count = 0;
  for (const Layer& l : layers_) count = std::max(count, l.seen - l.oldest);
  const std::int64_t seen = layers_.front().seen, bytes = token_bytes();
  for (std::int64_t token = seen - count; token < seen; ++token)
    held.positions.push_back(places[static_cast<std::size_t>(token % capacity_)]);
  held.data.resize(layers_.size() * static_cast<std::size_t>(count * bytes));
  for (std::size_t l = 0; l < layers_.size(); ++l)
    for (std::int64_t token = layers_[l].oldest; token < seen; ++token)
      std::memcpy(held.data.data() + (static_cast<std::int64_t>(l) * count + token - (seen - count)) * bytes,
                  image.data() + (static_cast<std::int64_t>(l) * capacity_ + token % capacity_) * bytes,
                  static_cast<std::size_t>(bytes));
  return held;
}

KVKEEP_INLINE void QueryRing::take(const Held& held) {
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
  for (Layer& l : layers_) l.normalised_from = l.seen;
  if (count == 0) return;
  allocate(held.dtype);
  std::vector<std::byte> image(static_cast<std::size_t>(held_bytes()));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t place = (seen - count + i) % capacity_;
    std::memcpy(image.data() + data_bytes() + place * 4, &held.positions[static_cast<std::size_t>(i)], 4);
    for (std::int64_t l = 0; l < static_cast<std::int64_t>(layers_.size()); ++l)
      std::memcpy(image.data() + (l * capacity_ + place) * bytes, held.data.data() + (l * count + i) * bytes,
                  static_cast<std::size_t>(bytes));
  }
  memory_->write(held_.get(), image.data(), held_bytes());
}

}  // namespace kvkeep
