// SPDX-License-Identifier: Apache-2.0
// The shipped model: it answers with the full cache, eviction hurts it, and a policy that keeps what is needed does not
// (B37).

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kvkeep/kvkeep.h"
#include "kvlab/decoder.h"
#include "kvlab/generation.h"
#include "kvlab/tasks.h"

namespace kvkeep::lm::shipped_model_test {
namespace {

/// Knows what the task will ask for: needed positions first, then the newest.
class Needed final : public Scorer {
 public:
  explicit Needed(std::vector<std::int32_t> positions) : positions_(std::move(positions)) {}
  [[nodiscard]] std::string_view name() const override { return "needed"; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits&, const WindowAttention&) const override {
    Scores scores{at::empty({evidence.table.slots}, at::TensorOptions().dtype(at::kFloat))};
    for (const Row& row : evidence.table.rows)
      for (std::int32_t t = 0; t < row.length; ++t) {
        const bool needed = std::binary_search(positions_.begin(), positions_.end(), row.positions[t]);
        scores.data.data<float>()[row.first + t] = static_cast<float>(t) + (needed ? 1e6F : 0.0F);
      }
    return scores;
  }

 private:
  std::vector<std::int32_t> positions_;
};

std::unique_ptr<KVPolicy> policy_for(const std::string& text, const TaskSample& sample) {
  if (text != "needed") return make_policy(text);
  return std::make_unique<Evict>(
      "needed", std::make_unique<Needed>(sample.needed), std::make_unique<Flat>(),
      Retention{.trigger = {.budget = {.slots = 160}, .interval = 32}, .sink = 4, .recent = 16}, "{}");
}

/// Share of look-ups answered, teacher-forced, over a few samples of one task.
double accuracy(Decoder& decoder, const std::string& task, const std::string& policy) {
  int right = 0, asked = 0;
  for (std::uint64_t seed = 900; seed < 908; ++seed) {
    const TaskSample sample = make_task(task, seed, {.length = 512});
    Request request;
    request.prompt.assign(sample.ids.begin(), sample.ids.begin() + sample.prompt_length);
    request.forced.assign(sample.ids.begin() + sample.prompt_length, sample.ids.end());
    request.new_tokens = static_cast<std::int32_t>(request.forced.size());
    const GenerationRun run = generate(decoder, policy_for(policy, sample), {request});
    if (policy != "full") {
      EXPECT_GT(run.totals.events, 5) << "nothing was cut, so nothing was shown";
    }
    for (std::size_t s = 0; s < request.forced.size(); ++s) {
      const std::size_t i = static_cast<std::size_t>(sample.prompt_length) + s;
      if (sample.target[i] != kLookUp) continue;
      ++asked;
      right += run.completions[0].tokens[s] == sample.ids[i];
    }
  }
  return static_cast<double>(right) / asked;
}

TEST(ShippedModel, AnswersAllThatAPolicyKeepsAndLosesWhatItDrops) {
  Decoder decoder = Decoder::open(KVKEEP_TEST_MODEL_DIR);
  for (const char* task : {"chain", "ask", "needle"}) {
    SCOPED_TRACE(task);
    EXPECT_GE(accuracy(decoder, task, "full"), 0.98);
    EXPECT_GE(accuracy(decoder, task, "needed"), 0.97);
    EXPECT_LE(accuracy(decoder, task, "streaming,budget=160,interval=32,recent=16"), 0.75);
  }
}

}  // namespace
}  // namespace kvkeep::lm::shipped_model_test
