// SPDX-License-Identifier: Apache-2.0
// Text tasks: lengths, seeds, options, scores, and what is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "kvkeep/core/error.h"
#include "kvlab/text_tasks.h"
#include "message_of.h"
#include "text_task_cases.h"
#include "text_task_samples.h"

namespace kvkeep::lm::text_task_lengths_test {
namespace {

using kvkeep::testing::message_of;

TEST(TextTasks, FillTheLengthAndNeverExceedItWithFewCalls) {
  for (const TextTaskInfo& task : text_tasks())
    for (const std::int64_t length : {800, 1024, 1500, 2048, 4095, 4096, 8192, 32768})
      for (const std::int64_t reserved : {0, 37}) {
        SCOPED_TRACE(std::string(task.name) + " length " + std::to_string(length));
        int calls = 0;
        const auto count = [&](std::string_view text) { return ++calls, count_pieces(text); };
        const TextSample sample = make_text_task(
            task.name, 11, count,
            {.length = length, .reserved_tokens = reserved, .haystack = kEssay, .passages = &passages_of(task.name)});
        const std::int64_t total = sample.prompt_tokens + sample.answer_tokens + reserved;
        EXPECT_EQ(sample.prompt_tokens, count_pieces(sample.prompt()));
        EXPECT_EQ(sample.answer_tokens, task.answer_tokens);
        EXPECT_LE(total, length);
        EXPECT_GT(total, length - (task.name == "ruler/niah-multikey-3" ? 90
                                   : task.needs_passages                ? 60
                                   : is_essay(task)                     ? 8
                                                                        : 32))
            << "less than one unit is left";
        EXPECT_LE(calls, 14);
      }
}

TEST(TextTasks, KeepToCountersThatAreNoTokenizers) {
  const auto uneven = [](std::string_view text) {
    return static_cast<std::int64_t>(text.size() / 4 + text.size() * 2654435761u % 97);
  };
  for (const TextTaskInfo& task : text_tasks()) {
    SCOPED_TRACE(task.name);
    int calls = 0;
    const TextSample jagged = make_text_task(task.name, 5, [&](std::string_view t) { return ++calls, uneven(t); },
                                             {.length = 3000, .haystack = kEssay, .passages = &passages_of(task.name)});
    EXPECT_EQ(jagged.prompt_tokens, uneven(jagged.prompt()));
    EXPECT_LE(jagged.prompt_tokens + jagged.answer_tokens, 3000);
    EXPECT_LE(calls, 60);

    const TextSample free = make_text_task(task.name, 5, [](std::string_view) { return 0; },
                                           {.length = 700, .haystack = kEssay, .passages = &passages_of(task.name)});
    EXPECT_EQ(free.prompt_tokens, 0);
    EXPECT_LT(free.prompt().size(), 700u * 130) << "no more units than tokens were asked for";

    if (task.name == "ruler/vt") continue;  // its example would fill 9,000 bytes
    calls = 0;                              // a cliff: cheap up to a size, far too long behind it
    (void)make_text_task(task.name, 5, [&](std::string_view t) { return ++calls, t.size() < 9000 ? 10 : 100000; },
                         {.length = 2000, .haystack = kEssay, .passages = &passages_of(task.name)});
    EXPECT_LE(calls, 80);
  }
}

std::uint64_t hash_of(const TextSample& sample) {
  std::uint64_t hash = 0xCBF29CE484222325ULL;
  const auto add = [&](std::string_view text) {
    for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001B3ULL;
    hash = (hash ^ 0xFF) * 0x100000001B3ULL;
  };
  add(sample.context), add(sample.question), add(sample.answer_prefix);
  for (const std::string& answer : sample.answers) add(answer);
  for (const TextNeedle& needle : sample.needles)
    add(needle.text), add(std::to_string(needle.offset)), add(needle.asked ? "asked" : "");
  return hash;
}

TEST(TextTasks, AreTheSameOnEveryMachine) {
  for (const auto& [name, hash] : kHashes) EXPECT_EQ(hash_of(sample_of(name, 7, 4096)), hash) << name;
  EXPECT_EQ(kHashes.size(), text_tasks().size());
}

TEST(TextTasks, DifferBySeedAndByName) {
  std::set<std::uint64_t> hashes;
  for (const TextTaskInfo& task : text_tasks()) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) hashes.insert(hash_of(sample_of(task.name, seed)));
    EXPECT_EQ(hash_of(sample_of(task.name, 3)), hash_of(sample_of(task.name, 3)));
  }
  EXPECT_EQ(hashes.size(), text_tasks().size() * 40);
}

TEST(TextTasks, AskOneOfSeveralNumbersAtTheDepthOfChoice) {
  for (const std::int32_t depth : {0, 37, 50, 100})
    for (const std::int32_t numbers : {1, 4, 40}) {
      const TextSample sample = make_text_task(
          "text/needle", 9, count_pieces, {.length = 4096, .haystack = kEssay, .depth = depth, .numbers = numbers});
      ASSERT_EQ(sample.needles.size(), static_cast<std::size_t>(numbers));
      EXPECT_EQ(
          std::count_if(sample.needles.begin(), sample.needles.end(), [](const TextNeedle& n) { return n.asked; }), 1);
      const auto asked =
          std::find_if(sample.needles.begin(), sample.needles.end(), [](const TextNeedle& n) { return n.asked; });
      EXPECT_NEAR(asked->depth, depth / 100.0, 0.02);
      EXPECT_NE(asked->text.find(sample.answers[0]), std::string::npos);
    }
  const auto at = [](std::int32_t depth) {
    return make_text_task("text/needle", 9, count_pieces, {.haystack = kEssay, .depth = depth});
  };
  EXPECT_EQ(at(0).answers, at(100).answers) << "a depth changes nothing else";
  EXPECT_EQ(at(0).question, at(100).question);
}

TEST(TextTasks, PutTheNeedleOfRulerAtTheDepthOfChoiceToo) {
  for (const TextTaskInfo& task : text_tasks()) {
    if (!task.name.starts_with("ruler/niah-single") && !task.name.starts_with("ruler/niah-multikey")) continue;
    SCOPED_TRACE(task.name);
    const auto at = [&](std::optional<std::int32_t> depth) {
      return make_text_task(task.name, 9, count_pieces, {.length = 4096, .haystack = kEssay, .depth = depth});
    };
    const auto others = [](const TextSample& sample) {
      std::multiset<std::pair<std::string, double>> all;
      for (const TextNeedle& needle : sample.needles)
        if (!needle.asked) all.emplace(needle.text, needle.depth);
      return all;
    };
    const TextSample drawn = at({});
    for (const std::int32_t depth : {0, 37, 100}) {
      const TextSample sample = at(depth);
      const auto asked = std::ranges::find(sample.needles, true, &TextNeedle::asked);
      ASSERT_NE(asked, sample.needles.end());
      EXPECT_NEAR(asked->depth, depth / 100.0, 0.02);
      EXPECT_NE(asked->text.find(sample.answers[0]), std::string::npos);
      EXPECT_EQ(sample.context.substr(asked->offset, asked->text.size()), asked->text);
      EXPECT_EQ(sample.answers, drawn.answers) << "a depth changes nothing else";
      EXPECT_EQ(sample.question, drawn.question);
      EXPECT_EQ(others(sample), others(drawn));
    }
  }
}

TEST(TextTasks, TakeAnEssayFromItsStartWithEveryKindOfBlank) {
  const TextSample sample = make_text_task("text/needle", 1, count_words,
                                           {.length = 64, .haystack = "\t one\r\ntwo\v\fthree.  \n", .depth = 100});
  EXPECT_TRUE(sample.context.starts_with("one two three. one two three. ")) << sample.context;
  const std::string curly = "He said \u201cgo.\u201d She went. Mr. Fox (too!) \u2018slept.\u2019 End";
  const TextSample quoted =
      make_text_task("text/needle", 1, count_words, {.length = 64, .haystack = curly, .depth = 1});
  EXPECT_EQ(quoted.needles[0].offset, 0u) << "1 percent of few sentences is in front of the first";
  std::set<std::string> starts;  // what stands behind a needle: the sentences' first words
  for (std::int32_t depth = 0; depth <= 99; ++depth) {
    const TextSample one =
        make_text_task("text/needle", 1, count_words, {.length = 64, .haystack = curly, .depth = depth});
    const std::string behind = one.context.substr(one.needles[0].offset + one.needles[0].text.size());
    if (!words_of(behind).empty()) starts.insert(words_of(behind)[0]);
  }
  EXPECT_EQ(starts, (std::set<std::string>{"He", "She", "Mr.", "Fox", "\u2018slept.\u2019", "End"}));
}

TEST(TextScore, IsTheShareOfReferencesInTheAnswerWhateverTheCase) {
  const std::vector<std::string> two{"ABCDE", "1234567"};
  EXPECT_EQ(text_score("they are abcde and 1234567.", two), 1);
  EXPECT_EQ(text_score("They Are aBcDe.", two), 0.5);
  EXPECT_EQ(text_score("1234567", two), 0.5);
  EXPECT_EQ(text_score("123456 7", two), 0);
  EXPECT_EQ(text_score("", two), 0);
  EXPECT_EQ(text_score("x1234567x", two), 0.5) << "a part of a word counts, as in RULER";
  EXPECT_EQ(text_score("abcde", two, TextScoring::part), 1);
  EXPECT_EQ(text_score("abcd", two, TextScoring::part), 0);
  const std::vector<std::string> umlaut{"\u00c4pfel"};
  EXPECT_EQ(text_score("\u00c4PFEL", umlaut), 1) << "bytes beyond ASCII are compared as they are";
  EXPECT_EQ(text_score("\u00e4pfel", umlaut), 0);
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)text_score("a", {}); }),
            "text_score: nothing to look for; given no references; allowed one or more");
}

TEST(TextScore, GivesASampleItsOwnAnswers) {
  for_each_sample(1, [](const TextTaskInfo&, const TextSample& sample, std::int64_t) {
    std::string all;
    for (const std::string& answer : sample.answers) all += answer + " ";
    EXPECT_EQ(sample.score(all), 1);
    EXPECT_EQ(sample.score("nothing"), 0);
    const bool each = sample.scoring == TextScoring::all;
    EXPECT_DOUBLE_EQ(sample.score(sample.answers[0]), each ? 1.0 / static_cast<double>(sample.answers.size()) : 1);
  });
}

std::string refusal(std::string_view name, const TextTaskOptions& options, const TokenCounter& count = count_pieces) {
  return message_of<InvalidArgument>([&] { (void)make_text_task(name, 1, count, options); });
}

TEST(TextTasks, SayWhatIsWrong) {
  EXPECT_TRUE(refusal("squad", {})
                  .starts_with("make_text_task: no task has this name; given \"squad\"; allowed "
                               "ruler/niah-single-1, ruler/niah-single-2"));
  EXPECT_LT(refusal(std::string(100000, 'x'), {}).size(), 600u);
  for (const TextTaskInfo& task : text_tasks()) {
    if (!task.needs_haystack) continue;
    const std::string expected =
        "make_text_task(" + std::string(task.name) +
        "): this task hides its needles in prose; given no haystack; allowed a text of one word or more";
    EXPECT_EQ(refusal(task.name, {}), expected);
    EXPECT_EQ(refusal(task.name, {.haystack = " \n\t"}), expected);
  }
  EXPECT_EQ(refusal("ruler/fwe", {.length = 63}),
            "make_text_task(ruler/fwe): length is out of range; given 63; allowed 64 to 4194304");
  EXPECT_EQ(refusal("ruler/fwe", {.length = 4194305}),
            "make_text_task(ruler/fwe): length is out of range; given 4194305; allowed 64 to 4194304");
  EXPECT_EQ(refusal("ruler/fwe", {.length = INT64_MIN}),
            "make_text_task(ruler/fwe): length is out of range; given -9223372036854775808; allowed 64 to 4194304");
  EXPECT_EQ(refusal("ruler/fwe", {.reserved_tokens = -1}),
            "make_text_task(ruler/fwe): reserved_tokens is out of range; given -1; allowed 0 to 2048");
  for (const std::string task :
       {"ruler/niah-multivalue", "ruler/niah-multiquery", "ruler/vt", "ruler/cwe", "ruler/fwe"})
    EXPECT_EQ(refusal(task, {.haystack = kEssay, .depth = 5}),
              "make_text_task(" + task +
                  "): this task has no option depth; given a value for it; allowed with tasks that ask for one needle: "
                  "text/needle, ruler/niah-single-*, ruler/niah-multikey-*");
  EXPECT_EQ(refusal("ruler/vt", {.numbers = 5}),
            "make_text_task(ruler/vt): this task has no option numbers; given a value for it; allowed with text/needle "
            "alone");
  EXPECT_EQ(refusal("text/needle", {.haystack = kEssay, .depth = 101}),
            "make_text_task(text/needle): depth is out of range; given 101; allowed 0 to 100");
  EXPECT_EQ(refusal("text/needle", {.haystack = kEssay, .numbers = 0}),
            "make_text_task(text/needle): numbers is out of range; given 0; allowed 1 to 40");
  EXPECT_EQ(refusal("ruler/vt", {}, nullptr),
            "make_text_task(ruler/vt): count_tokens is empty; given an empty function; allowed one of a tokenizer");
  EXPECT_EQ(refusal("ruler/vt", {}, [](std::string_view) { return std::int64_t{-5}; }),
            "make_text_task: count_tokens is wrong; given -5 tokens; allowed 0 to 1099511627776");
  EXPECT_EQ(refusal("ruler/vt", {}, [](std::string_view) { return INT64_MAX; }),
            "make_text_task: count_tokens is wrong; given 9223372036854775807 tokens; allowed 0 to 1099511627776");
  EXPECT_THROW(
      (void)make_text_task("ruler/vt", 1, [](std::string_view) -> std::int64_t { throw std::runtime_error("mine"); }),
      std::runtime_error);
}

TEST(TextTasks, SayTheShortestLengthAndTakeIt) {
  for (const TextTaskInfo& task : text_tasks()) {
    const std::string message = refusal(
        task.name, {.length = 64, .reserved_tokens = 10, .haystack = kEssay, .passages = &passages_of(task.name)});
    const std::size_t at = message.find("allowed ") + 8;
    EXPECT_TRUE(message.starts_with("make_text_task(" + std::string(task.name) +
                                    "): the shortest text does not fit; given a length of 64 tokens;"))
        << message;
    const std::int64_t least = std::stoll(message.substr(at));
    EXPECT_NO_THROW((void)make_text_task(
        task.name, 1, count_pieces,
        {.length = least, .reserved_tokens = 10, .haystack = kEssay, .passages = &passages_of(task.name)}))
        << task.name;
    EXPECT_THROW(
        (void)make_text_task(
            task.name, 1, count_pieces,
            {.length = least - 1, .reserved_tokens = 10, .haystack = kEssay, .passages = &passages_of(task.name)}),
        InvalidArgument)
        << task.name;
  }
}

TEST(TextTasks, RefuseAHaystackOfMoreKeysThanThereAre) {
  const std::string message =
      refusal("ruler/niah-multikey-2", {.length = 200000}, [](std::string_view) { return std::int64_t{1}; });
  EXPECT_EQ(message,
            "make_text_task: the text needs more adjective-noun pairs than there are; given 115132; allowed a shorter "
            "length");
}

}  // namespace
}  // namespace kvkeep::lm::text_task_lengths_test
