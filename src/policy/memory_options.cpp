#include "kvkeep/memory/memory_options.h"

#include "kvkeep/core/error.h"

namespace kvkeep {

std::vector<std::string> MemoryOptions::problems() const {
  std::vector<std::string> found;
  const auto add = [&found](std::vector<std::string> more) {
    found.insert(found.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  add(factors.problems());
  add(zoom.problems());
  add(far.problems());
  add(near.problems());
  if (!(entries > 0)) found.push_back(text("entries: ", entries, "; allowed above 0"));
  if (!(entries_share >= 0 && entries_share <= 1))
    found.push_back(text("budget_share: ", entries_share, "; allowed above 0, to 1"));
  return found;
}

std::vector<std::string> MemoryOptions::problems(const ModelSpec& spec) const {
  std::vector<std::string> found;
  if (spec.key_dim != spec.value_dim)
    found.push_back(text("value_dim: ", spec.value_dim, ", and keys have ", spec.key_dim,
                         " numbers; folded spans need as many of each"));
  if (spec.query_heads == 0)
    found.push_back(
        "query_heads: folded spans are read by queries; the model spec does not say how many heads they have");
  if (zoom.rule == ZoomOptions::Rule::learned && routing == nullptr)
    found.push_back(
        "router: there is none, and zoom is learned; allowed a file of a trained router, or zoom mass or coverage");
  if (factors.rank == FactorOptions::Rank::gates && (routing == nullptr || !routing->gates))
    found.push_back("router: it brings no gates, and rank is gates; allowed a file with gates, or rank energy or max");
  if (gates() != nullptr && gates()->max_rank() != factors.max_rank)
    found.push_back(text("max_rank: ", factors.max_rank, ", and the router's gates are for ", gates()->max_rank(),
                         " components; allowed that"));
  if (routing != nullptr)
    for (std::string& one : routing->problems(spec)) found.push_back(std::move(one));
  return found;
}

}  // namespace kvkeep
