// SPDX-License-Identifier: Apache-2.0
// ruler/qa-1 and ruler/qa-2 over small files in the forms of SQuAD and HotpotQA.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>

#include "kvkeep/core/error.h"
#include "kvlab/passages.h"
#include "message_of.h"
#include "text_task_cases.h"

namespace kvkeep::lm::passage_tasks_test {
namespace {

using testing::message_of;

constexpr std::string_view kSquad = R"({"version": "v2.0", "data": [
  {"title": "Normans", "paragraphs": [
    {"context": "The Normans lived in Normandy.", "qas": [
      {"question": "Where did they live?", "id": "1", "answers": [{"text": "Normandy", "answer_start": 21},
                                                                  {"text": "in Normandy", "answer_start": 18}],
       "is_impossible": false},
      {"question": "Who won?", "id": "2", "answers": [], "plausible_answers": [{"text": "x", "answer_start": 0}],
       "is_impossible": true}]},
    {"context": "Rollo was a leader.", "qas": [
      {"question": "Who led?", "id": "3", "answers": [{"text": "Rollo", "answer_start": 0}], "is_impossible": false}]},
    {"context": "The Normans lived in Normandy.", "qas": []}]},
  {"title": "Steam", "paragraphs": [{"context": "Engines boil water.", "qas": []}]}]})";

constexpr std::string_view kHotpot = R"([
  {"_id": "a", "question": "Which came first?", "answer": "Alpha", "type": "comparison", "level": "hard",
   "supporting_facts": [["Alpha", 0]],
   "context": [["Alpha", ["Alpha began in 1.", " It ended."]], ["Beta", ["Beta began in 2."]]]},
  {"_id": "b", "question": "Is it so?", "answer": "yes", "supporting_facts": [],
   "context": [["Beta", ["Beta began in 2."]], ["Gamma", ["Gamma is far."]]]}])";

TEST(Passages, AreReadAsSquadPublishesThem) {
  const Passages squad = read_passages(kSquad, "dev.json");
  EXPECT_EQ(squad.form, PassageForm::squad);
  EXPECT_EQ(squad.documents,
            (std::vector<std::string>{"The Normans lived in Normandy.", "Rollo was a leader.", "Engines boil water."}))
      << "none twice";
  ASSERT_EQ(squad.questions.size(), 2U) << "without the one that cannot be answered";
  EXPECT_EQ(squad.questions[0].question, "Where did they live?");
  EXPECT_EQ(squad.questions[0].answers, (std::vector<std::string>{"Normandy", "in Normandy"}));
  EXPECT_EQ(squad.questions[0].own, std::vector<std::size_t>{0});
  EXPECT_EQ(squad.questions[0].near, std::vector<std::size_t>{1});
}

TEST(Passages, AreReadAsHotpotqaPublishesThem) {
  const Passages hotpot = read_passages(kHotpot, "dev.json");
  EXPECT_EQ(hotpot.form, PassageForm::hotpotqa);
  EXPECT_EQ(hotpot.documents, (std::vector<std::string>{"Alpha\nAlpha began in 1. It ended.", "Beta\nBeta began in 2.",
                                                        "Gamma\nGamma is far."}));
  ASSERT_EQ(hotpot.questions.size(), 2U);
  EXPECT_EQ(hotpot.questions[1].answers, std::vector<std::string>{"yes"});
  EXPECT_EQ(hotpot.questions[1].own, (std::vector<std::size_t>{1, 2}));
}

TEST(Passages, SayWhichFieldIsDamaged) {
  const auto refusal = [](const std::string& text) {
    return message_of<InvalidArgument>([&] { (void)read_passages(text, "dev.json"); });
  };
  EXPECT_EQ(refusal("{}"),
            "read passages: the file of dev.json is no object with a field data; given {}; allowed SQuAD's or "
            "HotpotQA's JSON as published");
  const std::map<std::string, std::string> cases{
      {"[", "is not JSON"},
      {"7", "no object with a field data"},
      {"[]", "has no question that can be answered"},
      {R"({"data": []})", "has no question that can be answered"},
      {R"({"data": [{"paragraphs": [{"qas": []}]}]})",
       "data[0].paragraphs[0] of dev.json is no object with a field context"},
      {R"({"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": []}]}]}]})",
       "data[0].paragraphs[0].qas[0].answers of dev.json is no list of more than 0"},
      {R"([{"question": "q", "answer": "a", "context": []}])", "[0].context of dev.json is no list of more than 0"},
      {R"([{"question": "q", "answer": "a", "context": [["t"]]}])",
       "[0].context[0] of dev.json is no list of more than 1"},
      {R"([{"question": "", "answer": "a", "context": []}])", "[0].question of dev.json is no text"}};
  for (const auto& [text, said] : cases)
    EXPECT_NE(refusal(text).find(said), std::string::npos) << text << "\n" << refusal(text);
}

TEST(PassageTasks, NumberTheDocumentsAndPutTheirOwnAmongThem) {
  const Passages hotpot = read_passages(kHotpot, "dev.json");
  const TextSample sample = make_text_task("ruler/qa-2", 1, count_words, {.length = 400, .passages = &hotpot});
  EXPECT_EQ(sample.answers, std::vector<std::string>{"yes"}) << "question 1 of two";
  EXPECT_EQ(sample.question.substr(sample.question.find("Question: ")), "Question: Is it so?");
  EXPECT_EQ(sample.scoring, TextScoring::part);
  EXPECT_EQ(sample.answer_tokens, 32);
  std::set<std::string> documents;
  const std::regex numbered("Document ([0-9]+):\n([A-Z][a-z]+)\n");
  int number = 0;
  for (std::sregex_iterator at(sample.context.begin(), sample.context.end(), numbered), end; at != end; ++at) {
    EXPECT_EQ((*at)[1], std::to_string(++number));
    documents.insert((*at)[2]);
  }
  EXPECT_EQ(documents, (std::set<std::string>{"Alpha", "Beta", "Gamma"})) << "as many as there are";
  ASSERT_EQ(sample.needles.size(), 2U);
  for (const TextNeedle& needle : sample.needles)
    EXPECT_EQ(sample.context.substr(needle.offset, needle.text.size()), needle.text);
  EXPECT_EQ(times(sample.context, "\n\nDocument "), 3U);
}

// The same random draws at every length: a longer text has the documents of a shorter one, and more.
TEST(PassageTasks, TakeTheDocumentsOfTheArticleFirstAndPlaceTheOwnOneAnywhere) {
  const Passages& squad = passages_of("ruler/qa-1");
  const std::regex town("Town ([0-9]+) lies");
  std::set<double> depths;
  for (std::uint64_t seed = 40; seed < 80; ++seed) {
    std::set<std::size_t> last;
    for (const std::int64_t length : {200, 330, 800}) {
      const TextSample sample =
          make_text_task("ruler/qa-1", seed, count_pieces, {.length = length, .passages = &squad});
      std::set<std::size_t> all;
      for (std::sregex_iterator at(sample.context.begin(), sample.context.end(), town), end; at != end; ++at)
        EXPECT_TRUE(all.insert(std::stoul((*at)[1])).second) << "no document twice";
      EXPECT_TRUE(all.contains(seed));
      EXPECT_TRUE(std::ranges::includes(all, last));
      const auto near = std::ranges::count_if(all, [&](std::size_t i) { return i / 5 == seed / 5; });
      EXPECT_EQ(near, std::min<std::ptrdiff_t>(5, static_cast<std::ptrdiff_t>(all.size())));
      if (length == 800) depths.insert(sample.needles.at(0).depth);
      last = all;
    }
  }
  EXPECT_GT(depths.size(), 6U);
}

TEST(PassageTasks, AskForTheirOwnFile) {
  const auto refusal = [](std::string_view task, const Passages* passages) {
    return message_of<InvalidArgument>(
        [&] { (void)make_text_task(task, 1, count_words, {.length = 400, .passages = passages}); });
  };
  EXPECT_EQ(refusal("ruler/qa-1", nullptr),
            "make_text_task(ruler/qa-1): this task asks about documents; given none; allowed SQuAD's");
  EXPECT_EQ(refusal("ruler/qa-2", &passages_of("ruler/qa-1")),
            "make_text_task(ruler/qa-2): this task asks about documents; given SQuAD's; allowed HotpotQA's");
}

}  // namespace
}  // namespace kvkeep::lm::passage_tasks_test
