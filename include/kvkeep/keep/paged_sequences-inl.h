#pragma once
// Bodies of paged_sequences.h: compiled by src/keep, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/keep/paged_sequences.h"

namespace kvkeep {
namespace paged_sequences_detail {

inline int slot_dimension(const PagedKv& kv) { return kv.layout == PageLayout::slot_head ? 1 : 2; }

/// The first `slots` slots of a page, all heads.
inline Tensor front(const Tensor& side, int slot_dim, const PageCopy& copy, std::int32_t page) {
  return side.select(0, page).narrow(slot_dim - 1, 0, copy.slots);
}

inline void check(std::span<const LayerKv> layers, std::span<const PageCopy> copies) {
  for (std::size_t l = 0; l < layers.size(); ++l) {
    KVKEEP_REQUIRE(!std::holds_alternative<DenseKv>(layers[l]), "copy pages: layer ", l,
                   " is dense; allowed paged layers");
    const auto* kv = std::get_if<PagedKv>(&layers[l]);
    if (kv == nullptr) continue;
    const std::int64_t pages = kv->keys.size(0), size = kv->keys.size(slot_dimension(*kv));
    for (const PageCopy& copy : copies)
      KVKEEP_REQUIRE(copy.from >= 0 && copy.from < pages && copy.to >= 0 && copy.to < pages && copy.from != copy.to &&
                         copy.slots >= 0 && copy.slots <= size,
                     "copy pages: ", copy.slots, " slots of page ", copy.from, " to page ", copy.to, "; layer ", l,
                     " allows 0 to ", size, " slots of two pages from 0 to ", pages - 1);
  }
}

}  // namespace paged_sequences_detail

KVKEEP_INLINE PagedSequences::~PagedSequences() {
  for (const auto& [id, held] : held_)
    for (const std::int32_t page : held.pages) try {
        pool_.give_back(page);
      } catch (const StateError&) {  // already given back: nothing to release, and a destructor cannot report it
      }
}

KVKEEP_INLINE const PagedSequences::Held& PagedSequences::at(SequenceId sequence) const {
  const auto found = held_.find(sequence);
  KVKEEP_REQUIRE_AS(StateError, found != held_.end(), "paged sequences: sequence ", sequence,
                    " is not held; allowed after admit() or fork() and before release()");
  return found->second;
}

KVKEEP_INLINE std::size_t PagedSequences::pages_for(std::int64_t slots) const {
  return static_cast<std::size_t>((slots + pool_.page_size() - 1) / pool_.page_size());
}

KVKEEP_INLINE PageGrant PagedSequences::admit(SequenceId sequence, std::int32_t slots) {
  KVKEEP_REQUIRE_AS(StateError, !knows(sequence), "admit: sequence ", sequence,
                    " is already held; allowed after release()");
  KVKEEP_REQUIRE(slots >= 0, "admit: sequence ", sequence, " asks for ", slots, " slots; allowed 0 or more");
  const auto wanted = static_cast<std::int32_t>(pages_for(slots));
  if (wanted > pool_.free_pages()) return {.missing = wanted - pool_.free_pages()};
  Held held{{}, slots, slots};
  for (std::int32_t p = 0; p < wanted; ++p) held.pages.push_back(pool_.take());
  held_.emplace(sequence, std::move(held));
  return {};
}

KVKEEP_INLINE void PagedSequences::fork(SequenceId sequence, SequenceId parent, std::int32_t slots) {
  KVKEEP_REQUIRE_AS(StateError, !knows(sequence), "fork: sequence ", sequence,
                    " is already held; allowed after release()");
  const Held& from = at(parent);
  KVKEEP_REQUIRE(slots >= 0 && slots <= from.shortest, "fork: sequence ", sequence, " wants ", slots,
                 " slots of sequence ", parent, "; allowed 0 to ", from.shortest);
  Held held{{from.pages.begin(), from.pages.begin() + static_cast<std::ptrdiff_t>(pages_for(slots))}, slots, slots};
  for (const std::int32_t page : held.pages) pool_.retain(page);
  held_.emplace(sequence, std::move(held));
}

KVKEEP_INLINE PageGrant PagedSequences::append(SequenceId sequence, std::int32_t slots) {
  auto& held = const_cast<Held&>(at(sequence));
  const std::int64_t room = std::int64_t{std::numeric_limits<std::int32_t>::max()} - held.longest;
  KVKEEP_REQUIRE(slots >= 0 && slots <= room, "append: ", slots, " slots for sequence ", sequence, "; allowed 0 to ",
                 room);
  if (slots == 0) return {};
  const std::int32_t size = pool_.page_size();
  std::vector<std::size_t> shared;
  for (auto p = static_cast<std::size_t>(held.shortest / size);
       p < held.pages.size() && p < pages_for(std::int64_t{held.longest} + slots); ++p)
    if (pool_.references(held.pages[p]) > 1) shared.push_back(p);
  const std::size_t pages = pages_for(std::int64_t{held.longest} + slots),
                    wanted = pages - held.pages.size() + shared.size();
  if (wanted > static_cast<std::size_t>(pool_.free_pages()))
    return {.missing = static_cast<std::int32_t>(wanted) - pool_.free_pages()};
  PageGrant grant;
  for (const std::size_t p : shared) {
    const std::int32_t from = held.pages[p], used = std::min(size, held.longest - static_cast<std::int32_t>(p) * size);
    grant.copies.push_back({.from = from, .to = pool_.take(), .slots = used});
    held.pages[p] = grant.copies.back().to;
    pool_.give_back(from);
  }
  while (held.pages.size() < pages) held.pages.push_back(pool_.take());
  held.longest += slots;
  held.shortest += slots;
  return grant;
}

KVKEEP_INLINE void PagedSequences::truncate(SequenceId sequence, std::int32_t slots) {
  auto& held = const_cast<Held&>(at(sequence));
  const std::int32_t least = held.longest - held.shortest;
  KVKEEP_REQUIRE(slots >= least && slots <= held.longest, "truncate: sequence ", sequence, " holds ", held.longest,
                 " slots; given ", slots, "; allowed ", least, " to ", held.longest);
  held.shortest -= held.longest - slots;
  held.longest = slots;
  for (; held.pages.size() > pages_for(slots); held.pages.pop_back()) pool_.give_back(held.pages.back());
}

KVKEEP_INLINE void PagedSequences::release(SequenceId sequence) {
  for (const std::int32_t page : at(sequence).pages) pool_.give_back(page);
  held_.erase(sequence);
}

KVKEEP_INLINE void PagedSequences::settle(std::span<const SequenceId> sequences, std::span<const PageMove> moves) {
  for (const PageMove& move : moves) {
    const SequenceId id = sequences[static_cast<std::size_t>(move.sequence)];
    KVKEEP_REQUIRE_AS(StateError, at(id).pages == move.before, "settle: sequence ", id, " holds ", at(id).pages.size(),
                      " pages, not those that the event found (", move.before.size(),
                      "); allowed once, right after the step");
    KVKEEP_REQUIRE_AS(StateError, pages_for(move.longest) == move.after.size(), "settle: sequence ", id, " is ",
                      move.longest, " slots long, and the event left it ", move.after.size(), " pages of ",
                      pool_.page_size(), "; allowed pages of that size");
  }
  for (const PageMove& move : moves)
    held_.at(sequences[static_cast<std::size_t>(move.sequence)]) = {move.after, move.longest, move.shortest};
}

KVKEEP_INLINE Tensor PagedSequences::table(std::span<const SequenceId> sequences) const {
  std::size_t widest = 1;
  for (const SequenceId id : sequences) widest = std::max(widest, at(id).pages.size());
  Tensor table =
      full<std::int32_t>({static_cast<std::int64_t>(sequences.size()), static_cast<std::int64_t>(widest)}, -1);
  std::int32_t* row = table.data<std::int32_t>();
  for (std::size_t i = 0; i < sequences.size(); ++i, row += widest) std::ranges::copy(at(sequences[i]).pages, row);
  return table;
}

KVKEEP_INLINE void copy_pages(std::span<const LayerKv> layers, std::span<const PageCopy> copies) {
  paged_sequences_detail::check(layers, copies);
  for (const LayerKv& layer : layers) {
    const auto* kv = std::get_if<PagedKv>(&layer);
    if (kv == nullptr) continue;
    const int slot_dim = paged_sequences_detail::slot_dimension(*kv);
    for (const Tensor& side : {kv->keys, kv->values, kv->key_scales, kv->value_scales}) {
      if (!side.defined()) continue;
      for (const PageCopy& page : copies)
        copy(paged_sequences_detail::front(side, slot_dim, page, page.from),
             paged_sequences_detail::front(side, slot_dim, page, page.to));
    }
  }
}

}  // namespace kvkeep
