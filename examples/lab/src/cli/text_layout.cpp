// SPDX-License-Identifier: Apache-2.0
#include "text_layout.h"

#include <algorithm>
#include <span>
#include <utility>

#include "kvkeep/core/error.h"

namespace kvkeep::cli {
namespace {

// Nothing that a template strips, and nothing that a text holds.
constexpr std::string_view kMark = "\x01kvkeep\x01";

// Where the mark is. Throws Unsupported unless it is there once.
std::size_t mark_in(std::string_view rendered) {
  const std::size_t at = rendered.find(kMark);
  KVKEEP_REQUIRE_AS(Unsupported, at != std::string_view::npos && rendered.find(kMark, at + 1) == std::string_view::npos,
                    "chat: the template does not write a user's message once and as it is; allowed --raw");
  return at;
}

}  // namespace

void Asked::drop(std::int64_t begin, std::int64_t count) {
  const auto from = [](std::vector<std::int32_t>& ids, std::int64_t first, std::int64_t end) {
    const auto size = static_cast<std::int64_t>(ids.size());
    ids.erase(ids.begin() + std::clamp<std::int64_t>(first, 0, size),
              ids.begin() + std::clamp<std::int64_t>(end, 0, size));
  };
  const auto seam = static_cast<std::int64_t>(prompt.size());
  from(prompt, begin, begin + count);
  from(question, begin - seam, begin + count - seam);
  truncated = true;
}

void Asked::stream(std::int64_t after) {
  const auto begin = prompt.begin() + std::min(after, std::ssize(prompt));
  question.insert(question.begin(), begin, prompt.end());
  prompt.erase(begin, prompt.end());
  streamed = true;
}

Layout::Layout(const lm::TextModel& text, bool raw, std::int32_t most_answer)
    : text_(text), raw_(raw), most_answer_(most_answer) {
  if (!raw && !text.chat_template.empty()) template_ = text.layout();
}

std::int64_t Layout::count(std::string_view said) const {
  const std::string whole = rendered({}, std::string(said));
  return std::ssize(first_ids(whole, whole));
}

Asked Layout::asked(lm::Sample sample, bool fed, bool cut_before) const {
  Asked made{.sample = std::move(sample)};
  made.sample.raw |= raw_;
  if (most_answer_ > 0) made.sample.text.answer_tokens = std::min(made.sample.text.answer_tokens, most_answer_);
  const lm::TextSample& said = made.sample.text;
  const std::string whole = rendered(made.sample, said.context + std::string(kMark) + said.question);
  const std::size_t at = mark_in(whole);
  made.prompt = first_ids(whole.substr(0, at), whole);
  made.question = next_ids(whole.substr(at + kMark.size()) + said.answer_prefix);
  if (fed) made.answer = answer(made);
  if (cut_before) return made;
  made.prompt.insert(made.prompt.end(), made.question.begin(), made.question.end());
  made.question.clear();
  return made;
}

bool Layout::truncate(Asked& made, std::int64_t most) const {
  constexpr std::int64_t kLeast = 16;
  std::int64_t lead = 0, tail = 0;
  if (made.sample.before.empty()) {
    const std::string markup = rendered(made.sample, std::string(kMark));
    const std::size_t at = mark_in(markup);
    lead = std::ssize(first_ids(markup.substr(0, at), markup));
    tail = std::ssize(next_ids(markup.substr(at + kMark.size()) + made.sample.text.answer_prefix));
  }
  const std::int64_t excess = made.tokens() - most,
                     left = std::ssize(made.prompt) + std::ssize(made.question) - lead - tail - excess;
  if (left < kLeast) return false;
  made.drop(lead + left / 2, excess);
  return true;
}

std::string Layout::rendered(const lm::Sample& sample, const std::string& said) const {
  KVKEEP_REQUIRE(sample.before.empty() || template_, "eval: messages need a chat template; given ",
                 text_.chat_template.empty() ? "a model without one" : "--raw", "; allowed prompt or turns");
  if (sample.raw || !template_) return said;
  std::vector<lm::ChatMessage> messages = sample.before;
  messages.push_back({"user", said});
  return template_->render(messages);
}

std::vector<std::int32_t> Layout::first_ids(const std::string& said, std::string_view whole) const {
  const bool add_bos = !template_ || !template_->begins_with_bos(whole);
  return text_.tokenizer.encode(said, lm::SpecialTokens::parsed, add_bos);
}

std::vector<std::int32_t> Layout::next_ids(const std::string& said) const {
  return text_.tokenizer.encode_continuation(said);
}

// The tokens of the only reference. A leading blank that is a token of its own moves to the question: it could never be
// wrong.
std::vector<std::int32_t> Layout::answer(Asked& to) const {
  const lm::TextSample& said = to.sample.text;
  KVKEEP_REQUIRE(said.answers.size() == 1, "--score tokens: the task has ", said.answers.size(),
                 " references in no set order; allowed tasks with one");
  const bool blank = !said.answer_prefix.ends_with(' ');
  std::vector<std::int32_t> tokens = next_ids((blank ? " " : "") + said.answers.front());
  if (blank && tokens.size() > 1 && text_.tokenizer.piece(tokens.front()) == " ") {
    to.question.push_back(tokens.front());
    tokens.erase(tokens.begin());
  }
  return tokens;
}

}  // namespace kvkeep::cli
