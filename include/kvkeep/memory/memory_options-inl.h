#pragma once
// Bodies of memory_options.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <cmath>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/memory/memory_options.h"

namespace kvkeep {

namespace memory_options_detail {

/// `span`: entries of one that is open.
inline std::vector<std::string> too_tight(const char* name, double entries, std::int64_t dense, std::int64_t length,
                                          double span) {
  const double needed = static_cast<double>(dense) + span;
  if (!(needed > entries)) return {};
  return {text(name, ": ", entries, ", but ", dense, " tokens always stay, and a span of max_span ", length,
               " may take ", span, " when it opens; allowed ", std::ceil(needed), " or more, or less of the others")};
}

}  // namespace memory_options_detail

KVKEEP_INLINE std::vector<std::string> MemoryOptions::too_tight(const char* name, std::int64_t dense,
                                                                std::int64_t length) const {
  // The wider the heads, the less an opened span takes: at least a coarse entry, and one for each component.
  const std::int64_t least = 1 + std::min<std::int64_t>(length, factors.max_rank);
  if (published_budget) return {};
  return memory_options_detail::too_tight(name, entries, dense, length, static_cast<double>(least));
}

KVKEEP_INLINE std::vector<std::string> MemoryOptions::too_tight(const char* name, std::int64_t dense,
                                                                std::int64_t length, const ModelSpec& spec) const {
  if (published_budget || spec.query_heads == 0) return {};
  return memory_options_detail::too_tight(
      name, entries, dense, length,
      entries_of_span(length, spec.group(), spec.key_dim) + most_opened(length, spec.key_dim));
}

KVKEEP_INLINE void MemoryOptions::describe(Fields& f) {
  factors.describe(f);
  zoom.describe(f);
  f.flag("sketch", sketch,
         "without a learned router: signs of every folded key stay near, and shares of attention are estimated from "
         "them (off in traces)");
#ifndef KVKEEP_HEADER_ONLY
  if (const std::filesystem::path file = f.optional_file("router", "trained router and gates (kvkeep_train_router)");
      !file.empty())
    routing = std::make_shared<Routing>(Routing::read(file));
#endif
  if (std::int64_t cap = 0;
      f.integer("host_bytes", cap, 0, INT64_MAX, "factors in host memory, an exact cap; left out: no limit", {}, "-"))
    host_bytes = cap;
}

KVKEEP_INLINE std::vector<std::string> MemoryOptions::problems() const {
  std::vector<std::string> found;
  const auto add = [&found](std::vector<std::string> more) {
    found.insert(found.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  add(factors.problems());
  add(zoom.problems());
  if (host_bytes < 0) found.push_back(text("host_bytes: ", host_bytes, "; allowed 0 or more"));
  if (!(entries > 0)) found.push_back(text("entries: ", entries, "; allowed above 0"));
  if (!(entries_share >= 0 && entries_share <= 1))
    found.push_back(text("budget_share: ", entries_share, "; allowed from 0 (none) to 1"));
  return found;
}

KVKEEP_INLINE std::vector<std::string> MemoryOptions::problems(const ModelSpec& spec) const {
  std::vector<std::string> found;
  if (spec.key_dim != spec.value_dim)
    found.push_back(text("value_dim: ", spec.value_dim, ", but keys have ", spec.key_dim,
                         " numbers; folded spans need keys and values of one size"));
  if (spec.query_heads == 0)
    found.push_back("query_heads: queries read folded spans, but the model spec does not say how many heads they have");
  if (zoom.rule == ZoomOptions::Rule::learned && routing == nullptr)
    found.push_back(
        "router: missing, but zoom is learned; allowed a file of a trained router, or zoom mass or coverage");
  if (factors.rank == FactorOptions::Rank::gates && (routing == nullptr || !routing->gates))
    found.push_back("router: it has no gates, but rank is gates; allowed a file with gates, or rank energy or max");
  if (gates() != nullptr && gates()->max_rank() != factors.max_rank)
    found.push_back(text("max_rank: ", factors.max_rank, ", but the router's gates are for ", gates()->max_rank(),
                         " components; allowed that number"));
  if (routing != nullptr)
    for (std::string& one : routing->problems(spec)) found.push_back(std::move(one));
  return found;
}

}  // namespace kvkeep
