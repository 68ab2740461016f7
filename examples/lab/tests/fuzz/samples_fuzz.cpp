// SPDX-License-Identifier: Apache-2.0
// Whatever the bytes, as a file of samples, of templates or of passages: samples that can be judged and written again,
// or a sentence.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvlab/passages.h"
#include "kvlab/samples.h"

namespace {

using namespace kvkeep;

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const lm::Sample& sample, std::string_view answer) {
  require(!sample.text.answers.empty() && sample.text.answer_tokens > 0);
  require(!(sample.text.context + sample.text.question).empty());
  for (const std::string_view said : {answer, std::string_view(sample.text.answers.front())}) {
    const double score = sample.text.score(said);
    require(score >= 0 && score <= 1);
  }
  const std::string line = lm::to_json(sample);
  require(line.find('\n') == std::string::npos);
  const lm::SampleFile again = lm::read_samples(line, "again.jsonl");
  require(again.form == lm::SampleForm::own && again.samples.size() == 1);
  require(lm::to_json(again.samples.front()) == line);
}

void check_samples(std::string_view bytes, const char* where, const lm::PromptTemplates& templates) {
  try {
    for (const lm::Sample& sample : lm::read_samples(bytes, where, templates).samples)
      check(sample, bytes.substr(0, std::min<std::size_t>(bytes.size(), 512)));
  } catch (const Error& refused) {
    require(std::string_view(refused.what()).starts_with("read samples: "));
  }
}

void check_passages(std::string_view bytes) {
  try {
    const lm::Passages passages = lm::read_passages(bytes, "dev.json");
    for (const lm::PassageQuestion& one : passages.questions) {
      require(!one.answers.empty() && !one.own.empty());
      for (const auto* documents : {&one.own, &one.near})
        for (const std::size_t document : *documents) require(document < passages.documents.size());
    }
  } catch (const InvalidArgument& refused) {
    require(std::string_view(refused.what()).starts_with("read passages: "));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::string text(bytes.substr(0, bytes.find('\n')));
  for (const char* where : {"math_find.jsonl", "longbook_choice_eng.jsonl", "niah/validation.jsonl"})
    check_samples(bytes, where, {});
  check_samples(bytes, "longbook_qa_eng.jsonl",
                {{"hotpotqa", text}, {"longbook_qa_eng", text}, {"gsm8k", "{question}{{"}, {"math", text}});
  check_passages(bytes);
  try {
    static_cast<void>(lm::read_templates(bytes, "t.json"));
  } catch (const InvalidArgument& refused) {
    require(std::string_view(refused.what()).starts_with("read templates: "));
  }
  return 0;
}
