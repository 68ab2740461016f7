#include "kvkeep/policy/evict.h"

#include <algorithm>
#include <utility>

#include "kvkeep/score/window_attention.h"

namespace kvkeep {

Evict::Evict(std::string name, std::unique_ptr<Scorer> scorer, std::unique_ptr<Allocator> allocator, Retention retention, std::int32_t interval, std::string json)
    : name_(std::move(name)), scorer_(std::move(scorer)), allocator_(std::move(allocator)), retention_(retention), interval_(interval), json_(std::move(json)) {
  if (retention_.variant == Variant::official) retention_.newest_ranks_first = scorer_->keeps_newest() > 0;
  else retention_.recent = std::max(retention_.recent, scorer_->keeps_newest());
}

Needs Evict::needs() const {
  Needs needs = scorer_->needs();
  // The published window leaves out one query that was seen.
  if (allocator_->window() > 0) needs.queries = std::max(needs.queries, allocator_->window() + (retention_.variant == Variant::official ? 1 : 0));
  return needs;
}

Decision Evict::decide(const Evidence& evidence) const {
  WindowNeeds shared = scorer_->shares();
  shared.usage = allocator_->window() > 0;
  WindowAttention seen;
  if (shared.usage || shared.newest) {
    std::vector<RowWindow> windows =
        row_windows(evidence, std::max(allocator_->window(), 1), retention_.budget, retention_.variant == Variant::official);
    for (std::size_t r = 0; r < windows.size(); ++r)
      if (evidence.table.rows[r].length <= retention_.budget) windows[r].queries = 0;  // keeps everything, so nothing needs to be known
    seen = window_attention(evidence, std::move(windows), shared);
  }
  Decision decision;
  decision.reason = Reason::over_budget;
  decision.scores = scorer_->score(evidence, seen);
  allocator_->allot(evidence, retention_, seen, decision);
  return decision;
}

}  // namespace kvkeep
