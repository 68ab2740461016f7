// SPDX-License-Identifier: Apache-2.0
#pragma once
/// When a sequence is due for an event.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kvkeep/core/budget.h"

namespace kvkeep {

/// State of a sequence after a step. Host integers only.
struct Occasion {
  std::int64_t slots = 0;       ///< slots held, summed over its rows
  std::int64_t rows = 1;        ///< full layers x KV heads
  std::int64_t seen = 0;        ///< tokens so far, including this step's
  std::int64_t prompt = 0;      ///< how many of them are its prompt
  std::int64_t step = 0;        ///< tokens since the policy was last asked
  std::int64_t slot_bytes = 0;  ///< K and V bytes of one slot in every row
  std::int64_t unsettled = 0;   ///< newest tokens without a final decision (Fold::settled)
  bool named = false;           ///< the program says that the moment is right (CacheView::named)

  /// Of a sequence that has `seen` tokens, about `asked` of which the policy was asked. prompt: -1 until known; then
  /// all of them are its prompt. heads, head_bytes: of each of the `layers`.
  [[nodiscard]] static Occasion of(std::int64_t seen, std::int64_t asked, std::int64_t prompt, std::int64_t slots,
                                   std::int64_t layers, std::int64_t heads, std::int64_t head_bytes) {
    return {.slots = slots,
            .rows = layers * heads,
            .seen = seen,
            .prompt = prompt < 0 ? seen : prompt,
            .step = seen - asked,
            .slot_bytes = head_bytes * heads};
  }
};

/// A sequence is due when its rows hold, on average, at least budget + interval slots. They are then cut to the budget,
/// so the cache swings between budget and budget + interval. The trigger counts slots, not calls. A sequence is not due
/// before its prompt has ended, but with Prefill::pieces. One that the program names is due whenever its rows hold more
/// than the budget. Source: slack is TriAttention's trigger, counter that of the published AMS and of kvpress; in
/// steady state both run the same schedule. named and pieces are ours.
struct Trigger {
  enum class Kind : std::uint8_t {
    slack,    ///< at budget + interval slots
    counter,  ///< every `interval` decoded tokens, if there are more slots than the budget
    window,   ///< when `interval` undecided tokens precede the local window, or any at the end of a prompt: all of them
              ///< leave
    named,    ///< when the program names it, and never by itself
  };
  enum class Prefill : std::uint8_t {
    keep,    ///< the prompt is not cut when it ends; if it is over the budget, the first decoded token may be due
    cut,     ///< the prompt is cut to the budget as soon as it ends, whatever the interval
    only,    ///< cut at the end of the prompt, and never again
    pieces,  ///< each step of the prompt that leaves more slots than the budget is cut to it; at the end as with `cut`
  };
  Budget budget;
  std::int32_t interval = 0;
  Kind kind = Kind::slack;
  Prefill prefill = Prefill::keep;
  bool never = false;
  bool ragged = false;  ///< rows of one sequence may end up unequal
  bool thins = false;   ///< rows within their budget lose slots as well: an event also comes every `interval`
                        ///< decoded tokens, and with Prefill::cut and only at the end of a prompt, whatever rows hold
  std::int32_t recent = 0;  ///< with Kind::window: tokens of the local window

  [[nodiscard]] bool due(const Occasion& o) const {
    const std::int64_t decoded = o.seen - o.prompt;
    if (never || (decoded < 0 && prefill != Prefill::pieces)) return false;
    if (kind == Kind::window)
      return o.unsettled >= std::int64_t{recent} + (decoded == 0 || decoded < o.step || o.named ? 1 : interval);
    const std::int64_t kept = budget.resolve({o.seen}, {o.prompt}, o.slot_bytes) * o.rows;
    if (decoded < 0) return o.slots > kept;
    const bool some_go = thins || o.slots > kept;
    if (o.named) return some_go;
    if (decoded == 0 || (decoded < o.step && prefill != Prefill::keep)) return prefill != Prefill::keep && some_go;
    if (prefill == Prefill::only || kind == Kind::named) return false;
    const std::int64_t before = std::max<std::int64_t>(decoded - o.step, 0);  // of the prompt's tokens none counts
    const bool round = decoded / interval > before / interval;
    if (kind == Kind::counter) return some_go && round;
    return (thins && round) || o.slots >= kept + std::int64_t{interval} * o.rows;
  }

  static constexpr std::int64_t kNoEvent = std::numeric_limits<std::int64_t>::max();

  /// The fewest tokens with which the sequence can become due, however they are split into steps; kNoEvent: it never
  /// is. With one token per step, slack is exact for budgets in slots and for ratios of the prompt; counter may wait
  /// for a later round, budgets that grow with the sequence put it off, and with `named` it is the program that says
  /// when. 0 if the sequence is due, or if there are tokens about which the policy was not asked yet (`step`).
  [[nodiscard]] std::int64_t tokens_until(const Occasion& o) const {
    if (never) return kNoEvent;
    const std::int64_t decoded = o.seen - o.prompt;
    const auto over_budget = [&] {
      return std::max<std::int64_t>(
          0, (budget.resolve({o.seen}, {o.prompt}, o.slot_bytes) * o.rows - o.slots) / o.rows + 1);
    };
    if (decoded < 0 && prefill != Prefill::pieces) return -decoded;
    if (o.step > 0 || due(o)) return 0;
    if (decoded < 0) return thins ? std::min(-decoded, over_budget()) : over_budget();
    if (kind == Kind::window) return std::max<std::int64_t>(1, std::int64_t{recent} + interval - o.unsettled);
    if (prefill == Prefill::only && kind != Kind::named) return kNoEvent;
    if (kind == Kind::named) return thins ? 0 : over_budget();
    const std::int64_t kept = budget.resolve({o.seen}, {o.prompt}, o.slot_bytes) * o.rows;
    const std::int64_t round = interval - decoded % interval;
    if (kind == Kind::counter) return std::max(round, thins ? 1 : over_budget());  // one step may reach both
    const std::int64_t full = (kept + std::int64_t{interval} * o.rows - o.slots + o.rows - 1) / o.rows;
    return std::max<std::int64_t>(1, thins ? std::min(round, full) : full);
  }

  /// Decoded tokens until the first event of a sequence that decodes one token at a time; -1 if there is none within
  /// `most`.
  [[nodiscard]] std::int64_t first_event(std::int64_t prompt, std::int64_t slot_bytes, std::int64_t most) const {
    for (std::int64_t d = 0; d <= most; ++d)
      if (due({.slots = prompt + d,
               .rows = 1,
               .seen = prompt + d,
               .prompt = prompt,
               .step = d == 0 ? prompt : 1,
               .slot_bytes = slot_bytes}))
        return d;
    return -1;
  }
};

}  // namespace kvkeep
