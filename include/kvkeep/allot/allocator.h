// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Allocators spend a row's budget: given the scores, they decide which slots stay. How to add one: CONTRIBUTING.md,
/// "Adding an allocator".

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvkeep/core/budget.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/score/evidence.h"
#include "kvkeep/score/window.h"

namespace kvkeep {

/// How policies name an allocator, and what lists say of it. The texts must live as long as the program.
struct AllocatorTraits {
  std::string_view name;    ///< before a scorer's name, as "ams" in "ams-tova": lower-case letters, digits and hyphens
  std::string_view what;    ///< one line
  std::string_view source;  ///< paper
  std::string_view scorer = {};  ///< the one that the bare name stands for; empty: the bare name is no policy
  bool probability = false;      ///< takes only scores that are shares of attention (ScorerTraits::probability)
  bool comparable = false;  ///< takes these, and others that are comparable between heads (ScorerTraits::comparable)
};

/// The rest of a policy, as its allocator sees it.
struct AllocatorContext {
  Variant variant = Variant::strict;
  Sharing share = Sharing::per_layer_per_head;
  std::int32_t sink = 0;       ///< oldest slots that always stay
  std::int32_t newest = 0;     ///< newest slots that the scorer never drops
  bool reads_keys = true;      ///< the scorer does
  double ams_coverage = 0.75;  ///< ScorerTraits::ams_coverage
  Budget budget;
};

/// What allocators in our own form ask: variant strict and, unless rows with equal scores keep equal slots (`alike`),
/// rows that share no selection. Throws InvalidArgument.
void require_own_form(std::string_view allocator, const AllocatorContext& policy, bool alike);

/// A class that policies name has `static constexpr AllocatorTraits traits`. Its options, if it has any, are the struct
/// `Options` with `describe(Fields&)`, which its constructor takes. It may have
///   static void context(Fields&);                              what scorers must know of it before theirs are read
///   static Options defaults(Fields&, const AllocatorContext&);  options outside its sub-object, and what else its
///                                                              defaults depend on
class Allocator {
 public:
  virtual ~Allocator() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// Throws InvalidArgument if it does not go with the rest of its policy. May change the variant, and raise
  /// `budget.least`.
  virtual void check(AllocatorContext& /*policy*/) const {}

  /// Number of window queries whose usage it reads; 0: none.
  [[nodiscard]] virtual std::int32_t window() const { return 0; }

  /// Gives rows different budgets: changes `budget` and `due` of `rows`, which start with the policy's budget. `least`,
  /// one per group: slots that each of its rows must be able to keep (sinks or a protected prompt, and the slots that
  /// the scorer never drops). Called before scoring.
  virtual void spread(const Evidence&, std::span<const std::int32_t> /*least*/, std::vector<RowLimit>& /*rows*/) const {
  }

  /// True if rows of one sequence may end up with different lengths.
  [[nodiscard]] virtual bool ragged() const { return false; }

  /// What a row's kept slots follow from besides that row, in spread() and allot(). Rows of which some are
  /// Row::remote() may reach allot() of one that says `scores`, and no other. It has no default: an answer that is
  /// missing would be wrong in silence where ranks hold a part of the heads.
  [[nodiscard]] virtual AcrossHeads across_heads() const = 0;

  /// One that says AcrossHeads::tops: a number of every row, [rows]. Where ranks hold a part of the heads, allot()
  /// finds the largest of them over all heads of the row's layer in WindowAttention::tops; else it takes that itself.
  [[nodiscard]] virtual std::vector<float> tops(const Evidence&, const Limits&, const WindowAttention&) const {
    refuse<Unsupported>("ranks: ", name(), " says AcrossHeads::tops, but has none; allowed with tops()");
  }

  /// True if it also drops slots of rows that are within their budget: the policy then has its events as Trigger::thins
  /// says, and spread() makes such rows due.
  [[nodiscard]] virtual bool thins() const { return false; }

  /// What it reads besides scores and window attention.
  [[nodiscard]] virtual Needs needs() const { return {}; }

  /// Fills `decision.keep` and, if it has them, credit and allotment. Slots rank by `scores`. `seen` has usage if
  /// window() is not 0; mass may take its place. A row that is not due keeps every slot and its old credit. Rows run in
  /// parallel; no row reads another (layer, sequence).
  virtual void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
                     Decision& decision) const = 0;
};

/// One with options, which `Body` describes.
template <class Body>
class AllocatorOf : public Allocator {
 public:
  using Options = Body;
  explicit AllocatorOf(Body options) : options_(options) {}
  [[nodiscard]] const Body& options() const { return options_; }

 protected:
  Body options_;
};

/// Every slot of every row.
[[nodiscard]] KeepSet keep_everything(const RowTable& table);

/// Offsets and room for each row's kept slots: min(length, budget) for a due row, all slots for any other. Slots are
/// not written yet.
[[nodiscard]] KeepSet empty_keep_set(const RowTable& table, const Limits& limits);

/// Top-k over the row with protected slots: AMS with a single segment.
class Flat final : public Allocator {
 public:
  [[nodiscard]] std::string_view name() const override { return "flat"; }
  /// By age alone there is only one interpretation: sinks, then the newest.
  void check(AllocatorContext& policy) const override {
    if (!policy.reads_keys) policy.variant = Variant::strict;
  }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/allot/allocator-inl.h"
#endif
