// SPDX-License-Identifier: Apache-2.0
#include "retention.h"

#include "kvkeep/core/error.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

void LookUps::add(const LookUps& other) {
  asked += other.asked;
  right += other.right;
  late_asked += other.late_asked;
  late_right += other.late_right;
}

LookUps count_look_ups(const lm::TaskSample& sample, const std::vector<std::int32_t>& predicted) {
  LookUps count;
  const auto length = static_cast<std::int32_t>(sample.ids.size());
  const std::int32_t late = sample.prompt_length + (length - sample.prompt_length) * 2 / 3;
  for (std::int32_t i = sample.prompt_length; i < length; ++i) {
    const auto at = static_cast<std::size_t>(i), step = static_cast<std::size_t>(i - sample.prompt_length);
    if (sample.target[at] != lm::kLookUp || step >= predicted.size()) continue;
    const bool right = predicted[step] == sample.ids[at];
    ++count.asked;
    count.right += right;
    count.late_asked += i >= late;
    count.late_right += i >= late && right;
  }
  return count;
}

lm::Request forced_request(const lm::TaskSample& sample) {
  const auto prompt_end = sample.ids.begin() + sample.prompt_length;
  return {.prompt = {sample.ids.begin(), prompt_end},
          .new_tokens = static_cast<std::int32_t>(sample.ids.size()) - sample.prompt_length,
          .forced = {prompt_end, sample.ids.end()}};
}

lm::TaskSample asked_in_the_prompt(lm::TaskSample sample, std::int32_t look_ups) {
  std::size_t first = 0, end = 0;
  for (auto i = static_cast<std::size_t>(sample.prompt_length); i < sample.ids.size() && look_ups > 0; ++i) {
    if (sample.target[i] != lm::kLookUp) continue;
    if (first == 0) first = i;
    end = i + 1;
    --look_ups;
  }
  KVKEEP_REQUIRE(first > 0, "retrieval: the sample asks nothing after its prompt of ", sample.prompt_length,
                 " tokens; allowed a longer --length");
  sample.prompt_length = static_cast<std::int32_t>(first);
  sample.ids.resize(end);
  sample.target.resize(end);
  return sample;
}

Json retention_json(const RetentionAbout& about, const ModelSpec& spec, const lm::Completion& done) {
  Json json{{"kvkeep_retention", 1},
            {"model", about.model},
            {"label", about.label},
            {"policy", Json::parse(about.policy_json)},
            {"task", about.task},
            {"seed", about.seed},
            {"prompt_length", about.prompt_length},
            {"new_tokens", done.tokens.size()},
            {"layers", spec.full_layers()},
            {"kv_heads", spec.kv_heads},
            {"peak_bytes", done.peak_bytes},
            {"kept_bytes", done.kept_bytes}};
  if (about.sample) {
    json["needed"] = about.sample->needed;
    json["needed_until"] = about.sample->needed_until;
    if (about.forced) {
      Json look_ups = Json::array();
      for (std::size_t i = static_cast<std::size_t>(about.prompt_length); i < about.sample->ids.size(); ++i) {
        const std::size_t step = i - static_cast<std::size_t>(about.prompt_length);
        if (about.sample->target[i] != lm::kLookUp || step >= done.tokens.size()) continue;
        look_ups.push_back({{"step", step}, {"right", done.tokens[step] == about.sample->ids[i]}});
      }
      json["look_ups"] = look_ups;
    }
  }
  json["events"] = Json::array();
  for (const lm::SequenceEvent& event : done.events) {
    Json kept = Json::array();
    for (std::size_t r = 0; r < event.positions.size(); ++r) {
      if (r % static_cast<std::size_t>(spec.kv_heads) == 0) kept.push_back(Json::array());
      kept.back().push_back(event.positions[r]);
    }
    json["events"].push_back({{"step", event.step},
                              {"length_before", event.length_before},
                              {"length_after", event.length_after},
                              {"kept", kept}});
  }
  return json;
}

}  // namespace kvkeep::cli
