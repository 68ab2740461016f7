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
    found.push_back(text("budget_share: ", entries_share, "; allowed from 0 (none) to 1"));
  return found;
}

std::vector<std::string> MemoryOptions::problems(const ModelSpec& spec) const {
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
