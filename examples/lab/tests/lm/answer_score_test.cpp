// SPDX-License-Identifier: Apache-2.0
// How answers are judged: against the numbers of the published programs, and by hand.

#include "kvlab/answer_score.h"

#include <gtest/gtest.h>

#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep::lm::answer_score_test {
namespace {

double score(TextScoring scoring, std::string_view answer, const std::vector<std::string>& references,
             const std::vector<std::string>& choices = {}) {
  return text_score(answer, references, scoring, choices);
}

TEST(AnswerScores, HaveNamesThatFilesUse) {
  std::string names;
  for (const TextScoringInfo& one : text_scorings()) {
    (names += names.empty() ? "" : " ") += one.name;
    EXPECT_EQ(name_of(one.scoring), one.name);
  }
  EXPECT_EQ(names, "contains any exact f1 rouge-l number choice class numbers");
}

// The values are those of SQuAD 2.0's evaluation script.
TEST(AnswerScores, CountWordsAsSquadDoes) {
  struct Case {
    const char *answer, *reference;
    double f1;
    bool exact;
  };
  for (const Case& c : std::vector<Case>{
           {"The Normans, in the 10th century.", "10th and 11th centuries", 0.25, false},
           {"It was in the 10th and 11th centuries", "in the 10th and 11th centuries", 0.8333333333333333, false},
           {"a cat sat on a mat, a cat!", "The cat and the dog sat", 0.4444444444444445, false},
           {"France", "France.", 1, true},
           {"the", "A", 1, true},
           {"", "France", 0, false},
           {"Beyonc\u00e9 Knowles-Carter's \u00c9COLE", "beyonc\u00e9 knowlescarters \u00e9cole", 1, true},
           {"na\u00efve th\u00e9a an\u00a0apple", "na\u00efve th\u00e9a apple", 1, true}}) {
    EXPECT_DOUBLE_EQ(score(TextScoring::f1, c.answer, {c.reference}), c.f1) << c.answer;
    EXPECT_EQ(score(TextScoring::exact, c.answer, {c.reference}), c.exact ? 1 : 0) << c.answer;
  }
  EXPECT_EQ(score(TextScoring::f1, "Paris", {"London", "in Paris"}), 2.0 / 3) << "the best of the references";
  EXPECT_EQ(score(TextScoring::exact, "Paris", {"London", "the Paris"}), 1);
}

// The values are those of the Python package rouge 1.0.1, rouge-l f.
TEST(AnswerScores, FindTheLongestSubsequenceAsThePackageRougeDoes) {
  struct Case {
    const char *answer, *reference;
    double f;
  };
  for (const Case& c : std::vector<Case>{
           {"the cat sat on the mat", "the cat was on the mat", 0.7999999950000002},
           {"police killed the gunman. the gunman was armed", "the gunman was killed by police. he was armed.",
            0.5714285665306124},
           {"A report on budgets. It finds that costs rise. Costs rise. ",
            "The report finds that costs rise every year. It recommends cuts in budgets and a new office. ",
            0.5517241332223544},
           {"w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 0.6153846106508877},
           {"b a c d a b", "a b c a b d", 0.749999995},
           {"e b c e", "e e a b", 0.6666666616666668},  // of two longest ones, that with more words
           {"x", "y", 0},
           {"Same words. Here", "Same words. Here", 0.999999995},
           {"one  two\tthree .  . four", "one two three. four", 0.8888888839506174},
           {"", "y", 0},
           {"...", "y z", 0}})
    EXPECT_NEAR(score(TextScoring::rouge_l, c.answer, {c.reference}), c.f, 1e-12) << c.answer;
  EXPECT_GT(score(TextScoring::rouge_l, "x y", {"a", "x y"}), 0.99) << "the best of the references";
}

// The pairs and verdicts are those of hendrycks/math's own tests.
TEST(AnswerScores, CompareExpressionsAsMathDoes) {
  struct Case {
    const char *a, *b;
    bool same;
  };
  for (const Case& c : std::vector<Case>{{R"(\tfrac{1}{2} + \frac1{72})", R"(\\frac{1}{2} + 2/3)", false},
                                         {"10, 4, -2", "4, 10, -2", false},
                                         {"10, 4, 2", "4, 12, 2", false},
                                         {R"(\tfrac{1}{2} +\! \frac1{72})", R"(\\dfrac{1}{2} +\frac{1}{72})", true},
                                         {R"(10\text{ units})", "10 ", true},
                                         {R"(10\text{ units})", "100 ", false},
                                         {"10", R"(\$10)", true},
                                         {R"(\left(x-2\right)\left(x+2\right))", "(x-2)(x+2)", true},
                                         {"0.1, 4, 2", "4, .1, 2", false},
                                         {"0.1", ".1", true},
                                         {R"(10\%)", "10", true},
                                         {R"(10\sqrt{3} + \sqrt4)", R"(10\sqrt3 + \sqrt{4})", true},
                                         {R"(\frac34i)", R"(\frac{3}{4}i)", true},
                                         {R"(\tfrac83)", R"(\frac{8}{3})", true},
                                         {"5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0", false},
                                         {"1/2", R"(\frac{1}{2})", true}}) {
    EXPECT_EQ(score(TextScoring::number, R"(so \boxed{)" + std::string(c.a) + "}.", {c.b}), c.same ? 1 : 0) << c.a;
    EXPECT_EQ(score(TextScoring::number, R"(so \boxed{)" + std::string(c.b) + "}.", {c.a}), c.same ? 1 : 0) << c.b;
  }
}

TEST(AnswerScores, TakeTheBoxedAnswerOrElseTheLastNumber) {
  struct Case {
    const char *answer, *reference;
    bool right;
  };
  for (const Case& c : std::vector<Case>{{"She sells 3 * 4 = 12 eggs for $1,200.50.", "1200.5", true},
                                         {"12 eggs, then 13.", "12", false},
                                         {"The answer is 1,200", "1200", true},
                                         {"2,3", "3", true},
                                         {"Half: .5", "1/2", true},
                                         {"minus -7", "-7", true},
                                         {"10-7", "7", true},
                                         {"It is 3.0 m", "3", true},
                                         {"#### 42\n", "42", true},
                                         {R"(\boxed{5} and 6)", "5", true},
                                         {R"(\boxed{1} then \boxed{\dfrac{3}{4}})", R"(\frac{3}{4})", true},
                                         {R"($\boxed 9$ of 10)", "9", true},
                                         {R"(\fbox{x=4})", "4", true},
                                         {R"(\boxed{0.75})", R"(\frac34)", true},
                                         {R"(\boxed{)", "5", false},
                                         {R"(\boxed{})", "5", false},
                                         {R"(\boxed{\text{Tuesday}})", "Tuesday", true},
                                         {R"(\boxed{\text{Tue)", "Tue", false},
                                         {R"(\boxed{30^\circ})", "30", true},
                                         {"no number", "0", false},
                                         {R"(\boxed{7})", R"(thus \boxed{7})", true},
                                         {"nan inf", "nan", false},
                                         {"1/3", "0.333", false}})
    EXPECT_EQ(score(TextScoring::number, c.answer, {c.reference}), c.right ? 1 : 0) << c.answer;
}

TEST(AnswerScores, FindTheChosenLetterOrText) {
  const std::vector<std::string> towns{"Hobart", "Perth", "Cairns", "Darwin"};
  struct Case {
    const char* answer;
    const char* chosen;
  };
  for (const Case& c : std::vector<Case>{{"B", "Perth"},
                                         {"(C) Cairns", "Cairns"},
                                         {"**D**.", "Darwin"},
                                         {"Because of that, the answer is: C", "Cairns"},
                                         {"Answer: (A)", "Hobart"},
                                         {"A man went to Perth.", "Perth"},
                                         {"It must have been Darwin", "Darwin"},
                                         {"Hobart or Perth, so D it is", "Darwin"},
                                         {"E", ""},
                                         {"Don't know", ""},
                                         {"", ""}})
    for (std::size_t i = 0; i < towns.size(); ++i) {
      EXPECT_EQ(score(TextScoring::choice, c.answer, {towns[i]}, towns), towns[i] == c.chosen ? 1 : 0) << c.answer;
      EXPECT_EQ(score(TextScoring::choice, c.answer, {std::string(1, static_cast<char>('A' + i))}, towns),
                towns[i] == c.chosen ? 1 : 0)
          << c.answer;
    }
  EXPECT_EQ(score(TextScoring::choice, "The answer is E.", {"E"}), 1) << "letters alone need no list";
}

// The values are those of LongBench's metrics.py.
TEST(AnswerScores, CountClassesAndNumbersAsLongBenchDoes) {
  const std::vector<std::string> classes{"Food", "Sport", "Other sport", "City", "Other location", "loc"};
  EXPECT_EQ(score(TextScoring::classes, "Type: City", {"City"}, classes), 1);
  EXPECT_EQ(score(TextScoring::classes, "City or Food", {"City"}, classes), 0.5);
  EXPECT_EQ(score(TextScoring::classes, "Other sport", {"Sport"}, classes), 0);
  EXPECT_EQ(score(TextScoring::classes, "Other location", {"Other location"}, classes), 1);
  EXPECT_EQ(score(TextScoring::classes, "Other location loc Food", {"Other location"}, classes), 0.5);
  EXPECT_EQ(score(TextScoring::classes, "None", {"City"}, classes), 0);
  EXPECT_EQ(score(TextScoring::classes, "abc", {"abc"}, {"a", "ab", "abc", "b"}), 0.5)
      << "its list shrinks as it walks";
  EXPECT_EQ(score(TextScoring::numbers, "Paragraph 12", {"12"}), 1);
  EXPECT_EQ(score(TextScoring::numbers, "12 of 30, so 12", {"12"}), 2.0 / 3);
  EXPECT_EQ(score(TextScoring::numbers, "none", {"3"}), 0);
  EXPECT_EQ(score(TextScoring::numbers, "012", {"12"}), 0);
}

TEST(AnswerScores, SayWhichReferencesCannotBeJudged) {
  const auto problem = [](TextScoring scoring, const std::vector<std::string>& references,
                          const std::vector<std::string>& choices = {}) {
    return text_scoring_problem(scoring, references, choices).value_or("");
  };
  EXPECT_EQ(problem(TextScoring::f1, {"x"}), "");
  EXPECT_EQ(problem(TextScoring::f1, {}), "there is nothing to look for; given no references; allowed one or more");
  EXPECT_EQ(problem(TextScoring::all, {"x", ""}), "a reference is empty; given \"\"; allowed text");
  EXPECT_EQ(problem(TextScoring::choice, {"Perth"}), "a reference is no choice; given 'Perth'; allowed a letter");
  EXPECT_EQ(problem(TextScoring::choice, {"C"}, {"x", "y"}),
            "a reference is no choice; given 'C'; allowed a letter of a choice, or its text");
  EXPECT_EQ(problem(TextScoring::choice, {"y"}, {"x", "y"}), "");
  EXPECT_EQ(problem(TextScoring::classes, {"z"}, {"x"}),
            "a reference is no choice; given 'z'; allowed one of `choices`");
  EXPECT_EQ(problem(TextScoring::numbers, {"12a"}), "a reference is no whole number; given '12a'; allowed digits");
  std::string words;
  for (int i = 0; i < 16385; ++i) words += "a ";
  EXPECT_NE(problem(TextScoring::rouge_l, {words}).find("at most 16384 words"), std::string::npos);
}

TEST(AnswerScores, ReadAnyBytes) {
  for (const TextScoringInfo& one : text_scorings())
    for (const std::string_view answer :
         {"\xff\x80", "\\boxed{\xc3", "", "\n", "-", ".", "\\frac", "\\boxed{\\frac}"}) {
      const double value = score(one.scoring, answer, {"A"}, {"A", "B"});
      EXPECT_GE(value, 0);
      EXPECT_LE(value, 1);
    }
}

}  // namespace
}  // namespace kvkeep::lm::answer_score_test
