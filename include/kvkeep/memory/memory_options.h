// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How a policy's folded spans are kept and read.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/memory/router.h"

namespace kvkeep {

struct MemoryOptions {
  FactorOptions factors;
  ZoomOptions zoom;
  std::shared_ptr<const Routing> routing = nullptr;          ///< trained router, and gates; null: none
  double entries = std::numeric_limits<double>::infinity();  ///< Reading::entries
  double entries_share = 0;                                  ///< instead: this share of the tokens seen; 0: unused
  bool published_budget = false;        ///< Reading::per_head, and a folded span always counts as 1
  bool sketch = true;                   ///< FactorOptions::sketch, unless a router is learned
  std::int64_t host_bytes = kAnyBytes;  ///< exact cap on the factors of all sequences of a keeper, in host memory

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
  /// Why it does not fit the model, one sentence each; empty if it fits.
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const;

  /// True if a trained router decides which spans open.
  [[nodiscard]] bool learned() const { return zoom.learned(routing != nullptr); }
  [[nodiscard]] const RankGates* gates() const {
    return factors.rank == FactorOptions::Rank::gates && routing != nullptr && routing->gates ? &*routing->gates
                                                                                              : nullptr;
  }

  /// Reading::entries after `seen` tokens.
  [[nodiscard]] double entries_after(std::int64_t seen) const {
    return entries_share > 0 ? entries_share * static_cast<double>(seen) : entries;
  }

  /// factors, with the sketch that routing asks for.
  [[nodiscard]] FactorOptions fold_options() const {
    FactorOptions o = factors;
    o.sketch = sketch && !learned();
    return o;
  }

  /// What a folded token counts as on top of its span, for its sketch, in entries of `dim` numbers per side in the
  /// dtype of factors.
  [[nodiscard]] double entries_per_token(std::int64_t dim) const {
    return sketch && !learned() ? static_cast<double>(KeySketch::words(dim) * 4 + 2) /
                                      static_cast<double>(2 * dim * element_size(factors.store))
                                : 0;
  }

  /// Most entries that opening a span of `length` tokens takes (OpeningCost::entries).
  [[nodiscard]] double most_opened(std::int64_t length, std::int64_t dim) const {
    const auto rank = static_cast<double>(std::min<std::int64_t>({factors.max_rank, length, dim}));
    const double factored = rank * static_cast<double>(length + dim) / static_cast<double>(dim);
    return factors.raw ? std::min(static_cast<double>(length), factored) : factored;
  }

  /// Entries of a folded span of `length` tokens that is not open.
  [[nodiscard]] double entries_of_span(std::int64_t length, std::int64_t group, std::int64_t dim) const {
    return entries_per_span(group, dim, learned()) + product(entries_per_token(dim), static_cast<double>(length));
  }

  /// Why a span of `length` tokens may never open beside `dense` tokens that always stay, in one sentence that names
  /// the budget `name` and max_span; empty if it can, or without such a budget, or under the published one.
  [[nodiscard]] std::vector<std::string> too_tight(const char* name, std::int64_t dense, std::int64_t length) const;
  /// The same for a known model, which says how large sketch and factors may be.
  [[nodiscard]] std::vector<std::string> too_tight(const char* name, std::int64_t dense, std::int64_t length,
                                                   const ModelSpec& spec) const;

  /// What a folded span counts as, in entries. With a trained router (`learned`), a norm for each of `group` query
  /// heads is near besides a key and a value of `dim` numbers.
  [[nodiscard]] double entries_per_span(std::int64_t group, std::int64_t dim, bool learned) const {
    return learned && !published_budget ? 1 + static_cast<double>(group) / (2.0 * static_cast<double>(dim)) : 1;
  }
};

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

inline std::vector<std::string> MemoryOptions::too_tight(const char* name, std::int64_t dense,
                                                         std::int64_t length) const {
  // The wider the heads, the less an opened span takes: at least a coarse entry, and one for each component.
  const std::int64_t least = 1 + std::min<std::int64_t>(length, factors.max_rank);
  if (published_budget) return {};
  return memory_options_detail::too_tight(name, entries, dense, length, static_cast<double>(least));
}

inline std::vector<std::string> MemoryOptions::too_tight(const char* name, std::int64_t dense, std::int64_t length,
                                                         const ModelSpec& spec) const {
  if (published_budget || spec.query_heads == 0) return {};
  return memory_options_detail::too_tight(
      name, entries, dense, length,
      entries_of_span(length, spec.group(), spec.key_dim) + most_opened(length, spec.key_dim));
}

inline void MemoryOptions::describe(Fields& f) {
  factors.describe(f);
  zoom.describe(f);
  f.flag("sketch", sketch,
         "without a learned router: signs of every folded key stay near, and shares of attention are estimated from "
         "them (off in traces)");
#if KVKEEP_FILES
  if (const std::filesystem::path file = f.optional_file("router", "trained router and gates (kvkeep_train_router)");
      !file.empty())
    routing = std::make_shared<Routing>(Routing::read(file));
#endif
  if (std::int64_t cap = 0;
      f.integer("host_bytes", cap, 0, INT64_MAX, "factors in host memory, an exact cap; left out: no limit", {}, "-"))
    host_bytes = cap;
}

inline std::vector<std::string> MemoryOptions::problems() const {
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

inline std::vector<std::string> MemoryOptions::problems(const ModelSpec& spec) const {
  std::vector<std::string> found;
  if (spec.key_dim != spec.value_dim)
    found.push_back(text("value_dim: ", spec.value_dim, ", but keys have ", spec.key_dim,
                         " numbers; folded spans need keys and values of one size"));
  if (spec.logit_cap > 0)
    found.push_back(text("logit_cap: the model caps logits at ", spec.logit_cap,
                         ", which reads of folded spans do not; allowed models without a cap"));
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
