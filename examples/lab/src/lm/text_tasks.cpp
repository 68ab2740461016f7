// SPDX-License-Identifier: Apache-2.0
#include "kvlab/text_tasks.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvlab/passages.h"
#include "text_recipe.h"

namespace kvkeep::lm {
namespace {

constexpr std::int64_t kShortest = 64, kLongest = std::int64_t{1} << 22;  // tokens of a length
constexpr std::int64_t kMostCounted = std::int64_t{1} << 40;  // most tokens that a tokenizer may count in one prompt

constexpr std::array<TextTaskInfo, 14> kTextTasks{{
    {"ruler/niah-single-1", "one number in noise", false, 128},
    {"ruler/niah-single-2", "one number in an essay", true, 128},
    {"ruler/niah-single-3", "one uuid in an essay", true, 128},
    {"ruler/niah-multikey-1", "one of four numbers in an essay", true, 128},
    {"ruler/niah-multikey-2", "one of very many numbers", false, 128},
    {"ruler/niah-multikey-3", "one of very many uuids, by a uuid", false, 128},
    {"ruler/niah-multivalue", "four numbers of one key in an essay", true, 128},
    {"ruler/niah-multiquery", "four numbers of four keys in an essay", true, 128},
    {"ruler/vt", "five variables assigned one from the other, in noise", false, 30},
    {"ruler/cwe", "the ten most common words of a list", false, 120},
    {"ruler/fwe", "the three most common coded words", false, 50},
    {"ruler/qa-1", "a question of SQuAD about one of many documents", false, 32, true},
    {"ruler/qa-2", "a question of HotpotQA about two of many documents", false, 32, true},
    {"text/needle", "five digits in an essay", true, 16},
}};

using Build = std::function<TextSample(std::int64_t units)>;

std::int64_t counted(const TokenCounter& count_tokens, const TextSample& sample) {
  const std::int64_t tokens = count_tokens(sample.prompt());
  KVKEEP_REQUIRE(0 <= tokens && tokens <= kMostCounted, "make_text_task: count_tokens is wrong; given ", tokens,
                 " tokens; allowed 0 to ", kMostCounted);
  return tokens;
}

/// The sample of the most units whose prompt has at most `room` tokens, or that of the fewest if even that is too long.
/// Follows the slope until a text is too long, then closes in by secants, and every third step by bisection.
TextSample longest_fit(const Build& build, std::int64_t least, std::int64_t most, std::int64_t room,
                       const TokenCounter& count_tokens) {
  TextSample best = build(least);
  best.prompt_tokens = counted(count_tokens, best);
  if (best.prompt_tokens > room) return best;
  std::int64_t low = least, high = most + 1, high_tokens = -1;  // low fits; high does not, or was not counted
  std::int64_t units = least, tokens = best.prompt_tokens,
               stride = 1;  // the slope, at first too steep: it includes the template
  for (std::int64_t step = 1; high - low > 1; ++step) {
    const std::int64_t left = room - best.prompt_tokens;
    std::int64_t by = left * units / std::max<std::int64_t>(tokens, 1);
    if (high_tokens < 0 && by < stride) by = std::exchange(stride, 2 * stride);
    if (high_tokens >= 0)
      by = step % 3 == 0 ? (high - low) / 2 : left * (high - low) / (high_tokens - best.prompt_tokens);
    const std::int64_t guess = std::clamp(low + by, low + 1, high - 1);
    TextSample sample = build(guess);
    sample.prompt_tokens = counted(count_tokens, sample);
    if (sample.prompt_tokens > room) {
      high = guess, high_tokens = sample.prompt_tokens;
      continue;
    }
    if (sample.prompt_tokens > best.prompt_tokens)
      units = guess - low, tokens = sample.prompt_tokens - best.prompt_tokens;
    low = guess, best = std::move(sample);
  }
  return best;
}

void check(const TextTaskInfo& task, const TokenCounter& count_tokens, const TextTaskOptions& options) {
  const auto in_range = [&](std::string_view option, std::int64_t value, std::int64_t low, std::int64_t high) {
    KVKEEP_REQUIRE(low <= value && value <= high, "make_text_task(", task.name, "): ", option,
                   " is out of range; given ", value, "; allowed ", low, " to ", high);
  };
  const auto own = [&](std::string_view option, bool given, bool known, std::string_view where) {
    KVKEEP_REQUIRE(!given || known, "make_text_task(", task.name, "): this task has no option ", option,
                   "; given a value for it; allowed with ", where);
  };
  KVKEEP_REQUIRE(count_tokens != nullptr, "make_text_task(", task.name,
                 "): count_tokens is empty; given an empty function; allowed one of a tokenizer");
  in_range("length", options.length, kShortest, kLongest);
  in_range("reserved_tokens", options.reserved_tokens, 0, options.length);
  const bool prose = task.name == "text/needle";
  own("depth", options.depth.has_value(),
      prose || task.name.starts_with("ruler/niah-single-") || task.name.starts_with("ruler/niah-multikey-"),
      "tasks that ask for one needle: text/needle, ruler/niah-single-*, ruler/niah-multikey-*");
  own("numbers", options.numbers.has_value(), prose, "text/needle alone");
  if (task.needs_passages) {
    const bool squad = task.name == "ruler/qa-1";
    KVKEEP_REQUIRE(options.passages != nullptr && (options.passages->form == PassageForm::squad) == squad,
                   "make_text_task(", task.name, "): this task asks about documents; given ",
                   options.passages == nullptr ? "none"
                   : squad                     ? "HotpotQA's"
                                               : "SQuAD's",
                   "; allowed ", squad ? "SQuAD's" : "HotpotQA's");
    KVKEEP_REQUIRE(!options.passages->questions.empty(), "make_text_task(", task.name,
                   "): the passages have no questions; given none; allowed one or more");
  }
  in_range("depth", options.depth.value_or(0), 0, 100);
  in_range("numbers", options.numbers.value_or(1), 1, 40);
}

}  // namespace

std::span<const TextTaskInfo> text_tasks() { return kTextTasks; }

TextSample make_text_task(std::string_view name, std::uint64_t seed, const TokenCounter& count_tokens,
                          const TextTaskOptions& options) {
  const auto task =
      std::find_if(kTextTasks.begin(), kTextTasks.end(), [&](const TextTaskInfo& one) { return one.name == name; });
  KVKEEP_REQUIRE(task != kTextTasks.end(), "make_text_task: no task has this name; given \"", shortened(name), "\"",
                 did_you_mean(name, kTextTasks, &TextTaskInfo::name), "; allowed ",
                 joined(kTextTasks, &TextTaskInfo::name));
  check(*task, count_tokens, options);
  const Essay essay(task->needs_haystack ? options.haystack : std::string_view{}, options.length);
  KVKEEP_REQUIRE(!task->needs_haystack || !essay.empty(), "make_text_task(", name,
                 "): this task hides its needles in prose; given no haystack; allowed a text of one word or more");

  const Recipe recipe{*task, seed, options, essay};
  const std::int64_t room = options.length - options.reserved_tokens - task->answer_tokens;
  Build build = [&](std::int64_t units) { return niah(recipe, units); };
  std::int64_t least = 1, most = options.length;
  TextSample example;
  if (name == "text/needle") {
    build = [&](std::int64_t words) { return text_needle(recipe, words); };
  } else if (name == "ruler/vt") {
    const Build shorter = [&](std::int64_t lines) { return chain_example(recipe, lines); };
    const std::int64_t tokens = std::min<std::int64_t>(500, options.length / 4);
    example = longest_fit(shorter, kChain, std::max(kChain, tokens), tokens, count_tokens);
    build = [&](std::int64_t lines) { return chain(recipe, lines, example); };
    least = kChain;
  } else if (name == "ruler/cwe") {
    build = [&](std::int64_t others) { return common_words(recipe, others); };
  } else if (name == "ruler/fwe") {
    build = [&](std::int64_t words) { return coded_words(recipe, words); };
    least = kLeastCoded;
  } else if (task->needs_passages) {
    build = [&](std::int64_t count) { return documents(recipe, count); };
    least = static_cast<std::int64_t>(question_of(recipe).own.size());
    most = std::min(most, static_cast<std::int64_t>(options.passages->documents.size()));
  }

  TextSample sample = longest_fit(build, least, std::max(least, most), room, count_tokens);
  KVKEEP_REQUIRE(sample.prompt_tokens <= room, "make_text_task(", name,
                 "): the shortest text does not fit; given a length of ", options.length, " tokens; allowed ",
                 options.length - room + sample.prompt_tokens, " or more");
  sample.answer_tokens = task->answer_tokens;
  return sample;
}

}  // namespace kvkeep::lm
