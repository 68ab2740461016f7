// SPDX-License-Identifier: Apache-2.0
#include "bpe.h"

#include <algorithm>
#include <bit>

namespace kvkeep::lm::detail {
namespace {

constexpr std::size_t kShort = 48;  // most tokens of a word that is merged by scanning
constexpr std::uint32_t kNoRank = UINT32_MAX;

}  // namespace

Merges::Merges(std::size_t count) {
  const std::size_t room = std::bit_ceil(2 * count + 2);
  slots_.resize(room);
  shift_ = 64U - static_cast<unsigned>(std::countr_zero(room));
}

void Merges::put(std::int32_t left, std::int32_t right, Merge merge) {
  const std::uint64_t pair = key(left, right);
  std::size_t at = place(pair);
  while (slots_[at].pair != kEmpty && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
  slots_[at] = {pair, merge};
}

void Merges::apply(std::span<const std::int32_t> word, std::vector<std::int32_t>& out, Scratch& scratch) const {
  if (word.size() <= 1) {
    out.insert(out.end(), word.begin(), word.end());
  } else if (word.size() <= kShort) {
    apply_to_short(word, out, scratch);
  } else {
    apply_to_long(word, out, scratch);
  }
}

void Merges::apply_to_short(std::span<const std::int32_t> word, std::vector<std::int32_t>& out,
                            Scratch& scratch) const {
  auto& symbols = scratch.neighbours;
  const auto merge_of = [this](std::int32_t left, std::int32_t right) {
    const Merge* merge = find(left, right);
    return merge == nullptr ? Merge{kNoRank, 0} : *merge;
  };
  symbols.clear();
  for (std::size_t i = 0; i < word.size(); ++i)
    symbols.push_back({word[i], i + 1 < word.size() ? merge_of(word[i], word[i + 1]) : Merge{kNoRank, 0}});
  for (;;) {
    const auto best = std::min_element(symbols.begin(), symbols.end(), [](const auto& a, const auto& b) {
      return a.with_next.rank < b.with_next.rank;
    });
    if (best->with_next.rank == kNoRank) break;
    best->token = best->with_next.token;
    symbols.erase(best + 1);
    best->with_next = best + 1 != symbols.end() ? merge_of(best->token, (best + 1)->token) : Merge{kNoRank, 0};
    if (best != symbols.begin()) (best - 1)->with_next = merge_of((best - 1)->token, best->token);
  }
  for (const auto& symbol : symbols) out.push_back(symbol.token);
}

void Merges::apply_to_long(std::span<const std::int32_t> word, std::vector<std::int32_t>& out, Scratch& scratch) const {
  constexpr std::int32_t kGone = -1, kNone = -1;
  auto& symbols = scratch.symbols;
  auto& queue = scratch.queue;
  symbols.clear();
  queue.clear();
  const auto count = static_cast<std::int32_t>(word.size());
  for (std::int32_t i = 0; i < count; ++i)
    symbols.push_back({word[static_cast<std::size_t>(i)], i - 1, i + 1 < count ? i + 1 : kNone});

  const auto symbol = [&](std::int32_t at) -> Scratch::Symbol& { return symbols[static_cast<std::size_t>(at)]; };
  const auto later = [](const Scratch::Entry& a, const Scratch::Entry& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto merge_at = [&](std::int32_t at) { return find(symbol(at).token, symbol(symbol(at).next).token); };
  const auto propose = [&](std::int32_t at) {
    const Merge* merge = merge_at(at);
    if (merge != nullptr) queue.push_back({merge->rank, at, merge->token});
    return merge != nullptr;
  };
  for (std::int32_t i = 0; i + 1 < count; ++i) propose(i);
  std::make_heap(queue.begin(), queue.end(), later);
  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), later);
    const Scratch::Entry entry = queue.back();
    queue.pop_back();
    Scratch::Symbol& left = symbol(entry.at);
    if (left.token == kGone || left.next == kNone) continue;
    const Merge* merge = merge_at(entry.at);
    if (merge == nullptr || merge->token != entry.token) continue;  // a neighbour has changed since
    Scratch::Symbol& right = symbol(left.next);
    left.token = entry.token;
    left.next = right.next;
    right.token = kGone;
    if (left.next != kNone) {
      symbol(left.next).previous = entry.at;
      if (propose(entry.at)) std::push_heap(queue.begin(), queue.end(), later);
    }
    if (left.previous != kNone && propose(left.previous)) std::push_heap(queue.begin(), queue.end(), later);
  }
  for (std::int32_t at = 0; at != kNone; at = symbol(at).next) out.push_back(symbol(at).token);
}

}  // namespace kvkeep::lm::detail
