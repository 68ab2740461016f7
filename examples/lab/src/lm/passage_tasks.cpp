// SPDX-License-Identifier: Apache-2.0
// Documents with a question about some of them: ruler/qa-1 and ruler/qa-2.

#include <algorithm>
#include <set>

#include "kvkeep/core/error.h"
#include "kvlab/passages.h"
#include "text_recipe.h"
#include "text_templates.h"

namespace kvkeep::lm {

const PassageQuestion& question_of(const Recipe& recipe) {
  const std::vector<PassageQuestion>& all = recipe.options.passages->questions;
  return all[recipe.seed % all.size()];
}

TextSample documents(const Recipe& recipe, std::int64_t units) {
  const Passages& passages = *recipe.options.passages;
  const PassageQuestion& asked = question_of(recipe);
  const auto most = static_cast<std::size_t>(units);
  Dice dice = recipe.dice(), places(recipe.task.name, ~recipe.seed);

  // The same beginning for every number of documents: its own, those of its article, any others.
  std::vector<std::size_t> order = asked.own, near = asked.near;
  dice.shuffle(near);
  order.insert(order.end(), near.begin(), near.end());
  const std::set<std::size_t> seen(order.begin(), order.end());
  Deck others(dice, static_cast<std::int64_t>(passages.documents.size()));
  while (order.size() < most) {
    const auto one = static_cast<std::size_t>(others.deal());
    if (!seen.contains(one)) order.push_back(one);
  }
  order.resize(most);
  places.shuffle(order);

  TextSample sample;
  const std::string_view pattern = kQaText;
  const std::size_t gap = pattern.find('{');
  sample.context = pattern.substr(0, gap);
  for (std::size_t i = 0; i < most; ++i) {
    if (i > 0) sample.context += "\n\n";
    std::string said = filled(kQaDocument, {{"number", text(i + 1)}, {"document", passages.documents[order[i]]}});
    if (std::ranges::find(asked.own, order[i]) != asked.own.end())
      sample.needles.push_back({said, sample.context.size(), static_cast<double>(i) / static_cast<double>(most), true});
    sample.context += said;
  }
  sample.context += pattern.substr(pattern.find('}') + 1);
  sample.question = filled(kQaQuestion, {{"query", asked.question}});
  sample.answer_prefix = kQaAnswer;
  sample.answers = asked.answers;
  sample.scoring = TextScoring::part;
  return sample;
}

}  // namespace kvkeep::lm
