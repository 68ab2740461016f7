// SPDX-License-Identifier: Apache-2.0
/// Allocators on a device: from options to kernels.

#include <typeindex>
#include <unordered_map>

#include "adaptive_heads.h"
#include "chunks.h"
#include "critical.h"
#include "event.h"
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/allot/pyramid.h"
#include "kvkeep/allot/threshold.h"
#include "kvkeep/policy/prefill.h"
#include "mass_segmented.h"
#include "select.h"
#include "top_mass.h"

namespace kvkeep::cuda {
namespace {

AllottedRows rows_of(const CudaEvent& event, const float* scores, std::int32_t* slots) {
  return {.rows = event.arguments.rows,
          .limits = event.arguments.limits,
          .count = event.arguments.count,
          .longest = event.arguments.longest,
          .scores = scores,
          .indptr = event.tables.indptr,
          .slots = slots};
}

float* allot(CudaEvent& event, const Flat&, const WindowAttention&, const float* scores, std::int32_t* slots) {
  const Padding padding = event.limits.variant == Variant::official ? event.limits.padding : Padding{};
  event.launch(launch_select, {rows_of(event, scores, slots), padding});
  return nullptr;
}

float* allot(CudaEvent& event, const MassSegmented& allocator, const WindowAttention& seen, const float* scores,
             std::int32_t* slots) {
  MassSegmentedArguments arguments{rows_of(event, scores, slots)};
  arguments.options = allocator.options();
  arguments.variant = event.limits.variant;
  arguments.padding = event.limits.padding;
  arguments.windows = event.asked().windows;
  arguments.queries = event.arguments.queries;
  arguments.heads = event.arguments.kv_heads;
  arguments.slots_in_all = event.evidence.table.slots;
  arguments.mass = seen.usage.data<float>();
  arguments.credit = arguments.options.credit ? event.flat() : nullptr;
  arguments.workspace = event.take<std::byte>(static_cast<std::int64_t>(
      mass_segmented_workspace_bytes(arguments.options, arguments.count, arguments.longest, arguments.slots_in_all)));
  if (event.folds) {
    arguments.most_ends = most_segments(arguments.options, arguments.longest);
    arguments.ends = event.take<std::int32_t>(arguments.count * arguments.most_ends);
    event.tables.ends = arguments.ends, event.tables.most_ends = arguments.most_ends;
    event.tables.mass = arguments.mass;
  }
  event.launch(launch_mass_segmented, arguments);
  return arguments.credit;
}

float* allot(CudaEvent& event, const Chunks& allocator, const WindowAttention&, const float* scores,
             std::int32_t* slots) {
  ChunksArguments arguments{rows_of(event, scores, slots)};
  arguments.options = allocator.options();
  const RowTable& table = event.evidence.table;
  for (const RowGroup& group : table.groups)
    for (const Row& row : table.rows_of(group, event.evidence.spec.kv_heads))
      KVKEEP_REQUIRE_AS(Unsupported,
                        arguments.options.heads != ChunksOptions::Heads::shared ||
                            row.length == table.rows[static_cast<std::size_t>(group.first_row)].length,
                        allocator.name(), ": heads of layer ", row.layer,
                        " hold different numbers of slots; allowed rows of one length, or heads \"own\"");
  arguments.variant = event.limits.variant;
  arguments.heads = event.arguments.kv_heads;
  arguments.slots_in_all = event.evidence.table.slots;
  arguments.workspace = event.take<std::byte>(chunks_workspace_bytes(arguments));
  event.launch(launch_chunks, arguments);
  return nullptr;
}

/// `slots` null: counts alone.
void share_heads(CudaEvent& event, double safeguard, const float* scores, std::int32_t* slots) {
  AdaptiveHeadsArguments arguments{rows_of(event, scores, slots), event.arguments.kv_heads, safeguard, event.counts};
  arguments.workspace = event.take<std::byte>(adaptive_heads_workspace_bytes(arguments));
  event.launch(launch_adaptive_heads, arguments);
}

float* allot(CudaEvent& event, const AdaptiveHeads& allocator, const WindowAttention&, const float* scores,
             std::int32_t* slots) {
  share_heads(event, allocator.options().safeguard, scores, slots);
  return nullptr;
}

float* allot(CudaEvent& event, const Threshold& allocator, const WindowAttention&, const float* scores,
             std::int32_t* slots) {
  event.launch(launch_threshold,
               {rows_of(event, scores, slots), static_cast<float>(allocator.options().threshold), event.counts});
  return nullptr;
}

float* allot(CudaEvent& event, const HeldMass& allocator, const WindowAttention&, const float* sums,
             std::int32_t* slots) {
  event.launch(launch_top_mass, {rows_of(event, sums, slots), allocator.options(), event.counts});
  return nullptr;
}

float* allot(CudaEvent& event, const Critical& allocator, const WindowAttention&, const float* scores,
             std::int32_t* slots) {
  const std::span<const Tensor> given = event.evidence.output_projections;
  const Tensor& any = given[static_cast<std::size_t>(event.evidence.table.groups.front().layer)];
  for (const RowGroup& group : event.evidence.table.groups) {
    const Tensor& w = given[static_cast<std::size_t>(group.layer)];
    KVKEEP_REQUIRE(
        w.dtype() == any.dtype() && w.size(0) == any.size(0),
        "critical: output projections differ in dtype or hidden size between layers; allowed one of each on a device");
  }
  if (allocator.ragged()) share_heads(event, allocator.options().safeguard, scores, nullptr);
  CriticalArguments arguments;
  arguments.evidence = event.arguments;
  arguments.values = event.value_element;
  arguments.value_dim = event.evidence.spec.value_dim;
  arguments.projections = event.constant<const void*>(given.data(), [&] {
    std::vector<const void*> all;
    for (const Tensor& w : given) all.push_back(w.defined() ? w.bytes() : nullptr);
    return all;
  });
  arguments.projection = element_of("output projections", any.dtype());
  arguments.hidden = static_cast<std::int32_t>(any.size(0));
  arguments.first_stage = allocator.options().first_stage;
  arguments.slots_in_all = event.evidence.table.slots;
  arguments.scores = scores;
  arguments.indptr = event.tables.indptr;
  arguments.counts = event.counts;
  arguments.slots = slots;
  arguments.workspace = event.take<std::byte>(critical_workspace_bytes(arguments));
  event.launch(launch_critical, arguments);
  return nullptr;
}

/// Its rows differ in budget, which the limits say.
float* allot(CudaEvent& event, const Pyramid&, const WindowAttention& seen, const float* scores, std::int32_t* slots) {
  return allot(event, Flat(), seen, scores, slots);
}

std::vector<std::int32_t> most(const Allocator&, const Evidence&, const Limits&) { return {}; }

std::vector<std::int32_t> most(const AdaptiveHeads& allocator, const Evidence& evidence, const Limits& limits) {
  return cpu::most_across_heads(evidence, limits, allocator.options().safeguard);
}

std::vector<std::int32_t> most(const Critical& allocator, const Evidence& evidence, const Limits& limits) {
  if (!allocator.ragged()) return {};
  return cpu::most_across_heads(evidence, limits, allocator.options().safeguard);
}

std::vector<std::int32_t> most(const HeldMass&, const Evidence& evidence, const Limits&) {
  std::vector<std::int32_t> lengths;
  for (const Row& row : evidence.table.rows) lengths.push_back(row.length);
  return lengths;
}

std::vector<std::int32_t> most(const Threshold&, const Evidence& evidence, const Limits& limits) {
  return most_kept(evidence.table, limits);
}

template <class A>
std::pair<const std::type_index, AllocatorKernels> allocator_kernels() {
  return {typeid(A),
          {[](CudaEvent& event, const Allocator& allocator, const WindowAttention& seen, const float* scores,
              std::int32_t* slots) { return allot(event, static_cast<const A&>(allocator), seen, scores, slots); },
           [](const Allocator& allocator, const Evidence& evidence, const Limits& limits) {
             return most(static_cast<const A&>(allocator), evidence, limits);
           }}};
}

}  // namespace

const AllocatorKernels* kernels_of(const Allocator& allocator) {
  static const std::unordered_map<std::type_index, AllocatorKernels> all = {
      allocator_kernels<AdaptiveHeads>(), allocator_kernels<Chunks>(),        allocator_kernels<Critical>(),
      allocator_kernels<Flat>(),          allocator_kernels<MassSegmented>(), allocator_kernels<Pyramid>(),
      allocator_kernels<Threshold>(),     allocator_kernels<HeldMass>(),
  };
  const auto found = all.find(typeid(allocator));
  return found == all.end() ? nullptr : &found->second;
}

}  // namespace kvkeep::cuda
