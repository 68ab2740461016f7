#pragma once
/// That a decision keeps what is pinned: policies and allocators from outside may not know of it.

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/pinned_slots.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// Throws Unsupported if a pinned slot goes. Rows on a device are not looked at.
inline void require_pinned(std::string_view policy, const RowTable& table, const KeepSet& keep) {
  const std::size_t heads = table.groups.empty() ? 1 : table.rows.size() / table.groups.size();
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const RowGroup& group = table.groups[r / heads];
    if (group.prompt_slots >= 0) continue;
    for (const PositionSpan& span : group.pinned) {
      const Row& row = table.rows[r];
      const SlotRange slots = slots_at(row, span);
      if (slots.from == slots.to) continue;
      const auto kept = keep.row(r);
      const auto first = std::ranges::lower_bound(kept, slots.from) - kept.begin();
      const std::int64_t last = first + slots.to - slots.from - 1;
      KVKEEP_REQUIRE_AS(Unsupported, last < std::ssize(kept) && kept[static_cast<std::size_t>(last)] == slots.to - 1,
                        "step: ", policy, " drops pinned slots of layer ", row.layer, ", head ", row.head,
                        "; allowed policies and allocators that keep every slot which RowLimit::guarded holds");
    }
  }
}

}  // namespace kvkeep
