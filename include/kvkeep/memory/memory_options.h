#pragma once
/// How a policy's folded spans are kept and read.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/memory/routing_file.h"

namespace kvkeep {

class Fields;

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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/memory_options-inl.h"
#endif
