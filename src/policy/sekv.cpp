#include "kvkeep/policy/sekv.h"

#include <utility>

#include "kvkeep/core/error.h"

namespace kvkeep {

Sekv::Sekv(SekvOptions options, std::string json) : options_(std::move(options)), json_(std::move(json)) {
  std::string wrong;
  const auto add = [&wrong](const std::vector<std::string>& found) {
    for (const std::string& one : found) wrong += (wrong.empty() ? "" : "; ") + one;
  };
  add(options_.segmenter.problems());
  add(options_.factors.problems());
  add(options_.zoom.problems());
  add(options_.training.problems());
  if (options_.budget < 0) add({text("budget: ", options_.budget, "; allowed 1 or more, or 0 for none")});
  if (!(options_.zoom_share >= 0 && options_.zoom_share <= 1)) add({text("zoom_share: ", options_.zoom_share, "; allowed 0 to 1")});
  require(wrong.empty(), "sekv: ", wrong);
}

std::vector<std::string> Sekv::problems(const ModelSpec&) const {
  return {"engine: sekv runs on traces of kind span alone, no Keeper holds folded spans yet; allowed with kvkeep replay and trace::replay_span"};
}

double Sekv::entries_per_span(std::int64_t group, std::int64_t dim) const {
  // Of a learned router a norm for each query head is resident beside key and value.
  const bool norms = options_.variant == Variant::strict && options_.zoom.rule == ZoomOptions::Rule::learned;
  return norms ? 1 + static_cast<double>(group) / (2.0 * static_cast<double>(dim)) : 1;
}

SegmenterOptions Sekv::segmenter(std::int64_t group, std::int64_t dim) const {
  SegmenterOptions o = options_.segmenter;
  o.entries_per_span = entries_per_span(group, dim);
  if (options_.budget > 0 && options_.variant == Variant::strict) o.most_entries = (1 - options_.zoom_share) * options_.budget;
  return o;
}

ZoomBudget Sekv::zoom_budget(const Segments& segments, std::int64_t group, std::int64_t dim) const {
  ZoomBudget b;
  if (options_.budget > 0) b.entries = options_.budget;
  b.resident = segments.entries(entries_per_span(group, dim));
  b.per_head = options_.variant == Variant::official;
  return b;
}

}  // namespace kvkeep
