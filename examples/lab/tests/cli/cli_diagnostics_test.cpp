// SPDX-License-Identifier: Apache-2.0
// --diagnostics of kvkeep eval over text, perplexity and fidelity, held against a slow second opinion: the positions
// that the generator reports, and attention of a plain forward pass.

#ifdef KVKEEP_CLI_PATH

#include <cmath>
#include <numeric>
#include <set>

#include "command_text.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"

namespace kvkeep::cli_diagnostics_test {
namespace {

using nlohmann::json;
using Ids = std::vector<std::int32_t>;

constexpr const char* kTova = "tova,budget=24,interval=256,sink=1,recent=4,prefill=cut";

struct Attention {
  double recall = 0, past_recall = 0;
};

/// Over tokens from the event at the prompt's end on, heads and layers: the mean probability that falls on slots which
/// `kept` (by layer and KV head) holds, or that came after the prompt; and of all that falls on the prompt, the held
/// share.
Attention slow_attention(lm::Decoder& decoder, const Ids& ids, std::int32_t prompt, const std::vector<Ids>& kept) {
  const ModelSpec& spec = decoder.spec();
  const auto tokens = static_cast<std::int32_t>(ids.size()) - 1;
  const std::vector<lm::LayerCache> cache = decoder.make_cache(1, tokens);
  const std::int64_t dim = spec.key_dim, group = spec.query_heads / spec.kv_heads;
  Attention sum;
  double on_prompt = 0;
  std::int64_t queries = 0;
  lm::StepOptions options{.logits = lm::Logits::none};
  options.on_attended = [&](const lm::LayerSight& sight) -> std::optional<lm::Onward> {
    const Tensor& keys = cache[static_cast<std::size_t>(sight.layer)].keys;
    for (std::int32_t t = prompt; t < tokens; ++t)
      for (std::int64_t h = 0; h < spec.query_heads; ++h) {
        const float* query = sight.queries.const_data_ptr<float>() + (t * spec.query_heads + h) * dim;
        const Ids& held =
            kept[static_cast<std::size_t>(sight.layer * spec.kv_heads + static_cast<std::int32_t>(h / group))];
        double all = 0, past = 0, held_past = 0, newer = 0;
        for (std::int32_t s = 0; s <= t; ++s) {
          const float* key = keys.data<float>() + (h / group) * keys.stride(1) + s * keys.stride(2);
          const double mass = std::exp(spec.scale() * std::inner_product(query, query + dim, key, 0.0));
          all += mass;
          if (s >= prompt)
            newer += mass;
          else
            past += mass;
          if (s < prompt && std::ranges::binary_search(held, s)) held_past += mass;
        }
        sum.recall += (held_past + newer) / all;
        sum.past_recall += held_past / all;
        on_prompt += past / all;
        ++queries;
      }
    return std::nullopt;
  };
  Ids positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  const Ids fed(ids.begin(), ids.end() - 1), whole{0, tokens}, row{0}, none{0};
  decoder.forward({fed, whole, positions, row, none}, cache, options);
  return {sum.recall / static_cast<double>(queries), sum.past_recall / on_prompt};
}

class CommandDiagnostics : public CommandProse {
 protected:
  json measured(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return answered(std::move(words));
  }
  json perplexity(const Words& more) {
    return measured({"perplexity", "--model", place("model"), "--text", prose_, "--length", "120", "--prompt", "60",
                     "--texts", "2", "--diagnostics"},
                    more);
  }
  static json row_of(const json& table, const std::string& policy) {
    for (const json& row : table)
      if (row["policy"].get<std::string>().starts_with(policy) && row.value("part", "counted") == "counted") return row;
    return {};
  }
};

TEST_F(CommandDiagnostics, ComparesAFedTextWithAttentionOfTheFullCache) {
  lm::Decoder decoder = lm::Decoder::open(place("model"));
  const json row = row_of(perplexity({"--policy", kTova}), "tova");
  const auto end = ids_.begin() + 120;
  const lm::Request request{.prompt = {ids_.begin(), ids_.begin() + 60},
                            .new_tokens = 60,
                            .forced = {ids_.begin() + 60, end},
                            .keep_positions = true};
  const lm::Completion done = std::move(lm::generate(decoder, make_policy(kTova), {request}).completions.front());
  ASSERT_EQ(done.events.size(), 1U);
  const Attention slow = slow_attention(decoder, {ids_.begin(), end}, 60, done.events[0].positions);
  EXPECT_NEAR(row["recall"].get<double>(), slow.recall, 2e-5);
  EXPECT_NEAR(row["past_recall"].get<double>(), slow.past_recall, 2e-5);
  EXPECT_GT(row["output_error"], 0);
  EXPECT_EQ(row["diagnostics"]["events"], 2) << "of both texts";
  const json& absent = row["diagnostics"]["absent"];
  EXPECT_EQ(absent.value("iou", ""), "no sequence had two events");
  EXPECT_EQ(absent.value("segments", ""), "the policy has no segments");
  EXPECT_EQ(absent.value("repetition_4", ""), "texts are fed, so the policy wrote nothing");
  EXPECT_FALSE(absent.contains("recall"));
  EXPECT_FALSE(absent.contains("newest_share"));
}

TEST_F(CommandDiagnostics, CountsEveryEventOfAFedText) {
  constexpr const char* kOften = "tova,budget=24,interval=8,sink=1,recent=4,prefill=cut";
  lm::Decoder decoder = lm::Decoder::open(place("model"));
  const json table = perplexity({"--policy", kOften, "--diagnostics-samples", "0", "--batch", "1"}),
             row = row_of(table, "tova");
  double iou = 0, newest = 0;
  std::int64_t pairs = 0, kept = 0, events = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const auto at = ids_.begin() + static_cast<std::ptrdiff_t>(i * (ids_.size() / 2));
    const lm::Request request{
        .prompt = {at, at + 60}, .new_tokens = 60, .forced = {at + 60, at + 120}, .keep_positions = true};
    const lm::Completion done = std::move(lm::generate(decoder, make_policy(kOften), {request}).completions.front());
    events += std::ssize(done.events);
    for (std::size_t e = 0; e < done.events.size(); ++e)
      for (std::size_t r = 0; r < done.events[e].positions.size(); ++r) {
        const Ids& held = done.events[e].positions[r];
        kept += std::ssize(held);
        newest += static_cast<double>(
            std::ranges::count_if(held, [&](std::int32_t p) { return p >= 60 + done.events[e].step - 32; }));
        if (e == 0) continue;
        const Ids& before = done.events[e - 1].positions[r];
        Ids both;
        std::ranges::set_intersection(before, held, std::back_inserter(both));
        iou += static_cast<double>(both.size()) / static_cast<double>(before.size() + held.size() - both.size());
        ++pairs;
      }
  }
  EXPECT_EQ(row["diagnostics"]["events"], events);
  EXPECT_NEAR(row["iou"].get<double>(), iou / static_cast<double>(pairs), 1e-3);
  EXPECT_NEAR(row["newest_share"].get<double>(), newest / static_cast<double>(kept), 1e-4);
  EXPECT_TRUE(row["recall"].is_null());
  EXPECT_EQ(row["diagnostics"]["absent"].value("recall", ""), "--diagnostics-samples is 0");
  for (const json& bin : table)
    if (bin["part"] == "bin") {
      EXPECT_TRUE(bin["iou"].is_null());
      EXPECT_TRUE(bin["diagnostics"].is_null()) << "of all tokens, not of a bin";
    }
  const json full = row_of(table, "full")["diagnostics"];
  EXPECT_EQ(full["absent"].value("iou", ""), "there was no event");
  EXPECT_TRUE(full["most_dropped"].is_null()) << "not zero: there was nothing to drop";
  json together = row_of(perplexity({"--policy", kOften, "--diagnostics-samples", "0", "--batch", "2"}), "tova"),
       alone = row;
  for (json* one : {&together, &alone}) one->erase("diagnostics");  // sums in another order
  EXPECT_EQ(together, alone) << "company changes nothing";
}

TEST_F(CommandDiagnostics, ComparesWhatEachPolicyWroteWithAttentionOfTheFullCache) {
  lm::Decoder decoder = lm::Decoder::open(place("model"));
  for (const char* question : {"before", "after"}) {
    SCOPED_TRACE(question);
    const json table = measured({"eval",
                                 "--model",
                                 place("model"),
                                 "--task",
                                 "text/needle",
                                 "--haystack",
                                 prose_,
                                 "--length",
                                 "300",
                                 "--samples",
                                 "2",
                                 "--batch",
                                 "1",
                                 "--question",
                                 question,
                                 "--policy",
                                 "full",
                                 "--policy",
                                 kTova,
                                 "--diagnostics",
                                 "--diagnostics-samples",
                                 "1",
                                 "--samples-out",
                                 place("samples.jsonl")},
                                {});
    std::ifstream in(place("samples.jsonl"));
    std::string line;
    std::getline(in, line);
    const json sample = json::parse(line);
    Ids ids = sample["prompt"];
    const Ids prompt = ids, asked = sample["question"], written = sample["answers"][1]["tokens"];
    ids.insert(ids.end(), asked.begin(), asked.end());
    ids.insert(ids.end(), written.begin(), written.end());
    // An answer that ended early has its end token, which is not fed: the comparison needs one token behind the last.
    if (std::ssize(written) < sample["max_new_tokens"]) ids.push_back(2);
    const lm::Request request{.prompt = prompt, .new_tokens = 1, .keep_positions = true};
    const lm::Completion done = std::move(lm::generate(decoder, make_policy(kTova), {request}).completions.front());
    ASSERT_EQ(done.events.size(), 1U);
    const Attention slow =
        slow_attention(decoder, ids, static_cast<std::int32_t>(prompt.size()), done.events[0].positions);
    const json row = row_of(table, "tova"), full = row_of(table, "full");
    EXPECT_NEAR(row["recall"].get<double>(), slow.recall, 2e-5);
    EXPECT_NEAR(row["past_recall"].get<double>(), slow.past_recall, 2e-5);
    EXPECT_EQ(row["diagnostics"]["events"], 2);
    EXPECT_TRUE(row["repetition_4"].is_number());
    EXPECT_TRUE(full["repetition_4"].is_number()) << "the full cache writes, too";
    EXPECT_EQ(full["diagnostics"]["absent"].value("recall", ""), "there was no event");
  }
}

TEST_F(CommandDiagnostics, KeepsTasksApartThatWouldRunTogether) {
  const json table =
      measured({"eval", "--model", place("model"), "--task", "text/needle,ruler/niah-single-2", "--haystack", prose_,
                "--length", "600", "--samples", "1", "--policy", kTova, "--diagnostics"},
               {});
  ASSERT_EQ(table.size(), 2U);
  for (const json& row : table) EXPECT_EQ(row["diagnostics"]["events"], 1) << row["task"];
}

TEST_F(CommandDiagnostics, SaysWhyANumberIsMissing) {
  const Words eval{"eval",
                   "--model",
                   place("model"),
                   "--task",
                   "text/needle",
                   "--haystack",
                   prose_,
                   "--length",
                   "300",
                   "--samples",
                   "1",
                   "--policy",
                   "full",
                   "--policy",
                   kTova,
                   "--policy",
                   "tova,budget=24,interval=64,sink=1,recent=4,rest=fold",
                   "--diagnostics"};
  const json before = measured(eval, {}), after = measured(eval, {"--question", "after"}),
             fed = measured(eval, {"--score", "tokens"});
  const auto folded = [](const json& table) {
    for (const json& row : table)
      if (row["policy"].get<std::string>().find("fold") != std::string::npos) return row;
    return json();
  };
  EXPECT_GT(folded(before)["output_error"], 0) << "the text runs again under the policy";
  EXPECT_EQ(folded(before)["diagnostics"]["absent"].value("recall", ""),
            "queries read folded spans, not a set of held slots");
  EXPECT_TRUE(folded(after)["output_error"].is_null());
  EXPECT_EQ(folded(after)["diagnostics"]["absent"].value("output_error", ""),
            "spans fold, and the question ran at once");
  EXPECT_EQ(row_of(fed, "full")["diagnostics"]["absent"].value("repetition_4", ""),
            "the reference was fed, so nothing was written");
  Words words = eval;
  words.push_back("--quiet");
  const std::string table = run(words).out;
  EXPECT_NE(table.find("Diagnostics, all tasks:"), std::string::npos) << table;
  EXPECT_NE(table.find("No number (-): there was no event: full."), std::string::npos) << table;
  words.insert(words.end(), {"-o", "csv"});
  EXPECT_NE(run(words).out.find(",iou,survival,wiped_32,"), std::string::npos);
  const json fidelity =
      measured({"fidelity", "--model", place("model"), "--prompt", "the cat and the hat", "--new-tokens", "60",
                "--policy", "tova,budget=16,interval=8,sink=1,recent=4", "--diagnostics"},
               {});
  EXPECT_TRUE(row_of(fidelity, "tova")["recall"].is_number());
  EXPECT_TRUE(row_of(fidelity, "tova")["iou"].is_number());
  EXPECT_TRUE(row_of(fidelity, "tova")["repetition_4"].is_null());
  expect_refused({"perplexity", "--model", place("model"), "--text", prose_, "--diagnostics", "--device", "cuda:0"},
                 "--diagnostics reads queries");
}

}  // namespace
}  // namespace kvkeep::cli_diagnostics_test

#endif  // KVKEEP_CLI_PATH
