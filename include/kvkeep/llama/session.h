// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of kvkeep/llama.h, which includes this: sequences that go back, are saved and come back.

#include "kvkeep/llama.h"

namespace kvkeep::llama {

inline void Evictor::take_newest(Held& held, Owners& owners, std::int64_t tokens) {
  for (; tokens > 0; --tokens) {
    if (held.cells.empty()) {
      std::erase(held.by_cell, held.unplaced.back());
      held.unplaced.pop_back();
    } else {
      owners.give_back(held.cells.back());
      held.cells.pop_back();
    }
  }
}

/// Cells and queries are known, and llama.cpp has no rows to copy, which an event would move before. Else it comes
/// behind the batch.
inline bool Evictor::may_cut(const Held& held) const {
  return held.unplaced.empty() && !held.blind &&
         std::ranges::none_of(held_, [](const auto& h) { return h.second.copying; });
}

inline std::int64_t Evictor::least_length(llama_seq_id sequence, bool full) const {
  const std::int64_t length = keeper_.logical_length(sequence);
  const bool whole = static_cast<std::int64_t>(at(sequence).count()) == length;
  const std::int64_t least = whole ? 0 : keeper_.least_length(sequence);
  if (full || facts_.window == 0) return least;
  const llama_pos oldest = llama_memory_seq_pos_min(llama_get_memory(context_), sequence);
  return std::max(least, std::min<std::int64_t>(length, least_for_window(oldest, facts_.window)));
}

inline bool Evictor::go_back(llama_seq_id sequence, std::int64_t tokens, bool full) {
  require_between("go_back", sequence);
  const std::int64_t length = keeper_.logical_length(sequence), lag = at(sequence).lag;
  KVKEEP_REQUIRE(tokens >= 0 && tokens <= length, "llama: sequence ", sequence, " goes back to ", tokens,
                 " tokens and has ", length, "; allowed 0 to all of them");
  if (tokens < least_length(sequence, full)) return false;
  // Of states llama.cpp takes back nothing, or little, and then says so before it has changed anything.
  if (!llama_memory_seq_rm(llama_get_memory(context_), sequence, static_cast<llama_pos>(tokens - lag), -1))
    return false;
  Held& held = held_.at(sequence);
  const bool whole = static_cast<std::int64_t>(held.count()) == length;
  try {
    shorten(sequence, tokens);
  } catch (const StateError&) {  // queries of older tokens are gone
    take_newest(held, owners_, length - tokens);
    held.blind = true;
    if (whole) {
      held.prompted = held.waits = held.drafts = false;
      keeper_.leave(sequence);
      keeper_.join(sequence, static_cast<std::int32_t>(tokens), kOpenPrompt);
    } else {
      keeper_.truncate_with_window(sequence, tokens);
    }
  }
  sync();
  return true;
}

/// The mask shows all cells of a sequence: those that are not of this batch hold what was restored. False: others do.
inline bool Evictor::place_restored(Held& held) {
  if (held.unplaced.empty()) return true;
  std::vector<std::int32_t> fresh = held.cells, old;
  std::ranges::sort(fresh);
  std::ranges::set_difference(visible_, fresh, std::back_inserter(old));
  if (old.size() != held.by_cell.size()) return false;
  std::map<llama_pos, std::int32_t> cell_at;
  for (std::size_t i = 0; i < old.size(); ++i) {
    cell_at[held.by_cell[i]] = old[i];
    set_label(old[i], held.by_cell[i]);
    owners_.add(old[i]);
    if (static_cast<std::size_t>(old[i]) < turning_.size()) turning_[static_cast<std::size_t>(old[i])] = 0;
  }
  std::vector<std::int32_t> cells;
  for (const llama_pos label : held.unplaced) cells.push_back(cell_at.at(label));
  cells.insert(cells.end(), held.cells.begin(), held.cells.end());
  held.cells = std::move(cells);
  held.unplaced.clear();
  held.by_cell.clear();
  return true;
}

#if KVKEEP_FILES

/// Positions of a sequence in the order of its cells, as llama.cpp writes them into its state: a count, and per cell a
/// position, how many sequences (one), perhaps more, and the sequence. `held`: which positions there are. Cells of full
/// layers come first, before those of layers that slide, and states.
inline std::vector<llama_pos> Evictor::positions_by_cell(llama_seq_id sequence, std::vector<llama_pos> held) const {
  std::ranges::sort(held);
  std::vector<std::uint8_t> state(llama_state_seq_get_size(context_, sequence));
  state.resize(llama_state_seq_get_data(context_, state.data(), state.size(), sequence));
  const auto word = [&](std::size_t at) {
    std::int32_t value = 0;
    std::memcpy(&value, state.data() + at, sizeof value);
    return value;
  };
  constexpr std::size_t kLongestHead = 2048, kWord = 4;
  std::vector<llama_pos> found;
  for (std::size_t bytes = 3 * kWord; bytes <= 8 * kWord; bytes += kWord)
    for (std::size_t at = kWord; at <= kLongestHead && at + held.size() * bytes <= state.size(); at += kWord) {
      if (word(at - kWord) != std::ssize(held)) continue;
      found.clear();
      for (std::size_t i = 0; i < held.size(); ++i) {
        const std::size_t cell = at + i * bytes;
        if (word(cell + kWord) != 1 || word(cell + bytes - kWord) != sequence) break;
        found.push_back(word(cell));
      }
      std::vector<llama_pos> sorted = found;
      std::ranges::sort(sorted);
      if (sorted == held) return found;
    }
  refuse<Unsupported>("llama: the state of sequence ", sequence, ", of ", state.size(), " bytes, does not list the ",
                      held.size(),
                      " positions that llama.cpp should hold; allowed the state that was saved beside, "
                      "of a llama.cpp that writes them one after another");
}

namespace session {

/// Before the keeper's bytes. Native byte order, as in llama.cpp's state.
struct SessionHead {
  std::array<char, 8> magic = {'k', 'v', 'k', 'l', 'l', 'a', 'm', '1'};
  std::uint64_t hash = 0;  ///< of all that follows
  std::int64_t lag = 0;
  std::uint32_t slots = 0;
  std::uint8_t positions = 0, prompted = 0, waits = 0, drafts = 0;
};

/// FNV-1a, against accidents.
[[nodiscard]] inline std::uint64_t hash(std::span<const std::byte> bytes) {
  std::uint64_t value = 14695981039346656037ULL;
  for (const std::byte b : bytes) value = (value ^ static_cast<std::uint64_t>(b)) * 1099511628211ULL;
  return value;
}

}  // namespace session

inline std::vector<std::byte> Evictor::save(llama_seq_id sequence) {
  require_between("save", sequence);
  const Held& held = at(sequence);
  const bool turns = std::ranges::any_of(held.cells, [&](std::int32_t cell) {
    return static_cast<std::size_t>(cell) < turning_.size() && turning_[static_cast<std::size_t>(cell)] != 0;
  });
  KVKEEP_REQUIRE_AS(StateError, !held.copying && !turns, "llama: rows of sequence ", sequence,
                    " are copied, or its keys turned, by llama.cpp's next batch; allowed after it");
  std::vector<llama_pos> labels;
  for (const std::int32_t cell : held.cells) labels.push_back(label(cell));
  labels.insert(labels.end(), held.unplaced.begin(), held.unplaced.end());  // one of the two is empty
  const std::vector<std::byte> state = keeper_.save(sequence);
  session::SessionHead head;
  head.lag = held.lag;
  head.slots = static_cast<std::uint32_t>(labels.size());
  head.positions = static_cast<std::uint8_t>(positions_);
  head.prompted = held.prompted, head.waits = held.waits, head.drafts = held.drafts;
  std::vector<std::byte> out(sizeof head + labels.size() * sizeof(llama_pos) + state.size());
  std::memcpy(out.data() + sizeof head, labels.data(), labels.size() * sizeof(llama_pos));
  std::ranges::copy(state, out.end() - std::ssize(state));
  std::memcpy(out.data(), &head, sizeof head);
  constexpr std::size_t kHashed = offsetof(session::SessionHead, lag);
  head.hash = session::hash(std::span(out).subspan(kHashed));
  std::memcpy(out.data(), &head, sizeof head);
  return out;
}

inline void Evictor::restore(llama_seq_id sequence, std::span<const std::byte> bytes) {
  KVKEEP_REQUIRE_AS(StateError, context_ != nullptr && !running_, "llama: restore() of sequence ", sequence,
                    running_ ? " before end(); allowed between batches" : " without a context; call attach() first");
  require_sequence(sequence);
  if (held_.contains(sequence)) forget(sequence);
  moved_.erase(sequence);
  strayed_.erase(sequence);
  announced_.erase(sequence);
  const llama_pos newest = llama_memory_seq_pos_max(llama_get_memory(context_), sequence);
  KVKEEP_REQUIRE_AS(StateError, newest >= 0, "llama: sequence ", sequence,
                    " is empty; allowed after llama_state_seq_set_data()");
  session::SessionHead head;
  Held held;
  std::span<const std::byte> state;
  if (bytes.empty()) {
    held.unplaced.resize(static_cast<std::size_t>(newest) + 1);
    std::iota(held.unplaced.begin(), held.unplaced.end(), 0);
  } else {
    const auto own = session::SessionHead{}.magic;
    if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
    const std::size_t labels = head.slots * sizeof(llama_pos);
    KVKEEP_REQUIRE(bytes.size() >= sizeof head + labels && head.slots > 0 && head.magic == own &&
                       head.hash == session::hash(bytes.subspan(offsetof(session::SessionHead, lag))),
                   "llama: ", bytes.size(), " bytes of sequence ", sequence,
                   " are not what save() gave, whole; allowed those");
    KVKEEP_REQUIRE(head.positions == static_cast<std::uint8_t>(positions_), "llama: sequence ", sequence,
                   " was saved with other Positions; allowed those of the evictor");
    held.unplaced.resize(head.slots);
    std::memcpy(held.unplaced.data(), bytes.data() + sizeof head, labels);
    state = bytes.subspan(sizeof head + labels);
  }
  held.by_cell = positions_by_cell(sequence, held.unplaced);
  held.least = std::ranges::min(held.unplaced);
  held.lag = head.lag;
  held.prompted = head.prompted != 0, held.waits = head.waits != 0, held.drafts = head.drafts != 0;
  if (bytes.empty())
    keeper_.join(sequence, newest + 1, kOpenPrompt);
  else
    keeper_.restore(sequence, state);
  const bool fits = keeper_.logical_length(sequence) - held.lag == newest + 1 &&
                    keeper_.physical_length(sequence, full_layers_.front(), 0) == std::ssize(held.unplaced);
  if (!fits) keeper_.leave(sequence);
  KVKEEP_REQUIRE_AS(StateError, fits, "llama: llama.cpp holds ", held.unplaced.size(), " cells of sequence ", sequence,
                    ", the newest at position ", newest,
                    ", and the keeper's state is of another moment; allowed "
                    "states that were saved together");
  held_.emplace(sequence, std::move(held));
}

#endif

}  // namespace kvkeep::llama
