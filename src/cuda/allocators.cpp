/// Allocators on a device: from options to kernels.

#include "chunks.h"
#include "critical.h"
#include "event.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/mass_segmented.h"
#include "mass_segmented.h"
#include "select.h"

namespace kvkeep::cuda {
namespace {

float* allot_flat(Event& event, const Allocator&, const Seen&, const float* scores, std::int32_t* slots) {
  const Padding padding = event.limits.variant == Variant::official ? event.limits.padding : Padding{};
  event.launch(launch_select, {.rows = event.arguments.rows,
                               .limits = event.arguments.limits,
                               .count = event.arguments.count,
                               .longest = event.arguments.longest,
                               .padding = padding,
                               .scores = scores,
                               .indptr = event.indptr,
                               .slots = slots});
  return nullptr;
}

float* allot_mass_segmented(Event& event, const Allocator& allocator, const Seen& seen, const float* scores,
                            std::int32_t* slots) {
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
  arguments.workspace = event.take<std::byte>(static_cast<std::int64_t>(
      mass_segmented_workspace_bytes(arguments.options, arguments.count, arguments.longest, arguments.slots_in_all)));
  event.launch(launch_mass_segmented, arguments);
  return arguments.credit;
}

float* allot_chunks(Event& event, const Allocator& allocator, const Seen&, const float* scores, std::int32_t* slots) {
  ChunksArguments arguments;
  arguments.options = static_cast<const Chunks&>(allocator).options();
  if (arguments.options.heads == ChunksOptions::Heads::shared) require_even_heads(event, allocator.name(), "own");
  arguments.variant = event.limits.variant;
  arguments.rows = event.arguments.rows;
  arguments.limits = event.arguments.limits;
  arguments.count = event.arguments.count;
  arguments.heads = event.arguments.kv_heads;
  arguments.longest = event.arguments.longest;
  arguments.slots_in_all = event.evidence.table.slots;
  arguments.scores = scores;
  arguments.indptr = event.indptr;
  arguments.slots = slots;
  arguments.workspace = event.take<std::byte>(chunks_workspace_bytes(arguments));
  event.launch(launch_chunks, arguments);
  return nullptr;
}

float* allot_critical(Event& event, const Allocator& allocator, const Seen&, const float* scores, std::int32_t* slots) {
  const std::span<const Tensor> given = event.evidence.output_projections;
  const Tensor& any = given[static_cast<std::size_t>(event.evidence.table.groups.front().layer)];
  for (const RowGroup& group : event.evidence.table.groups) {
    const Tensor& w = given[static_cast<std::size_t>(group.layer)];
    KVKEEP_REQUIRE(
        w.dtype() == any.dtype() && w.size(0) == any.size(0),
        "critical: output projections differ in dtype or hidden size between layers; allowed one of each on a device");
  }
  CriticalArguments arguments;
  arguments.evidence = event.arguments;
  arguments.values = element_of("values", event.evidence.table.value_dtype);
  arguments.value_dim = event.evidence.spec.value_dim;
  arguments.projections = event.constant<const void*>(given.data(), [&] {
    std::vector<const void*> all;
    for (const Tensor& w : given) all.push_back(w.defined() ? w.bytes() : nullptr);
    return all;
  });
  arguments.projection = element_of("output projections", any.dtype());
  arguments.hidden = static_cast<std::int32_t>(any.size(0));
  arguments.first_stage = static_cast<const Critical&>(allocator).options().first_stage;
  arguments.slots_in_all = event.evidence.table.slots;
  arguments.scores = scores;
  arguments.indptr = event.indptr;
  arguments.slots = slots;
  arguments.workspace = event.take<std::byte>(critical_workspace_bytes(arguments));
  event.launch(launch_critical, arguments);
  return nullptr;
}

}  // namespace

Allot allot_of(std::string_view allocator) {
  static constexpr std::pair<std::string_view, Allot> kAll[] = {
      {"chunks", allot_chunks}, {"critical", allot_critical},
      {"flat", allot_flat},     {"mass_segmented", allot_mass_segmented},
      {"pyramid", allot_flat},
  };
  for (const auto& [name, allot] : kAll)
    if (name == allocator) return allot;
  return nullptr;
}

}  // namespace kvkeep::cuda
