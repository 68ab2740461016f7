/// Allocators on a device: from their options to their kernels.

#include "event.h"
#include "kvkeep/allot/mass_segmented.h"
#include "mass_segmented.h"
#include "select.h"

namespace kvkeep::cuda {
namespace {

float* allot_flat(Event& event, const Allocator&, const Seen&, const float* scores, std::int32_t* slots) {
  const Padding padding = event.limits.variant == Variant::official ? event.limits.padding : Padding{};
  event.launch(launch_select, {.rows = event.arguments.rows, .limits = event.arguments.limits, .count = event.arguments.count, .longest = event.arguments.longest, .padding = padding, .scores = scores,
                               .indptr = event.indptr, .slots = slots});
  return nullptr;
}

float* allot_mass_segmented(Event& event, const Allocator& allocator, const Seen& seen, const float* scores, std::int32_t* slots) {
  MassSegmentedArguments arguments;
  arguments.options = static_cast<const MassSegmented&>(allocator).options();
  arguments.variant = event.limits.variant;
  arguments.padding = event.limits.padding;
  arguments.rows = event.arguments.rows;
  arguments.limits = event.arguments.limits;
  arguments.windows = seen.asked.windows;
  arguments.queries = event.arguments.queries;
  arguments.count = event.arguments.count;
  arguments.heads = event.arguments.kv_heads;
  arguments.longest = event.arguments.longest;
  arguments.slots_in_all = event.evidence.table.slots;
  arguments.scores = scores;
  arguments.mass = seen.usage;
  arguments.credit = arguments.options.credit ? event.flat() : nullptr;
  arguments.indptr = event.indptr;
  arguments.slots = slots;
  arguments.workspace = event.take<std::byte>(static_cast<std::int64_t>(mass_segmented_workspace_bytes(arguments.options, arguments.count, arguments.longest, arguments.slots_in_all)));
  event.launch(launch_mass_segmented, arguments);
  return arguments.credit;
}

}  // namespace

Allot allot_of(std::string_view allocator) {
  static constexpr std::pair<std::string_view, Allot> kAll[] = {
      {"flat", allot_flat},
      {"mass_segmented", allot_mass_segmented},
      {"pyramid", allot_flat},
  };
  for (const auto& [name, allot] : kAll)
    if (name == allocator) return allot;
  return nullptr;
}

}  // namespace kvkeep::cuda
