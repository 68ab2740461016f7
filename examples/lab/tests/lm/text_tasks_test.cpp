// SPDX-License-Identifier: Apache-2.0
// What the text tasks say: RULER's templates by a second reading of them, small samples as they stand, needles where
// their depths say.

#include "kvlab/text_tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <regex>
#include <set>

#include "text_task_cases.h"
#include "text_task_samples.h"

namespace kvkeep::lm::text_tasks_test {
namespace {

/// The haystack of a sample, needles and the separators behind or before them taken out: what stands between the
/// template's two parts.
std::string without_needles(const TextSample& sample, std::string_view separator) {
  std::string context = sample.context;
  for (auto needle = sample.needles.rbegin(); needle != sample.needles.rend(); ++needle) {
    EXPECT_EQ(context.substr(needle->offset, needle->text.size()), needle->text);
    const std::size_t end = needle->offset + needle->text.size();
    if (context.substr(end, separator.size()) == separator && end + separator.size() < context.size())
      context.erase(needle->offset, needle->text.size() + separator.size());
    else
      context.erase(needle->offset - separator.size(), needle->text.size() + separator.size());
  }
  return context;
}

// RULER's constants.py and niah.py, read a second time: template + answer_prefix, and the replacements where one value
// is asked for.
TEST(TextTasks, HaveRulersNeedleTemplatesByteForByte) {
  for_each_sample(3, [](const TextTaskInfo& task, const TextSample& sample, std::int64_t) {
    if (!is_niah(task.name)) return;
    std::string pattern =
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the "
        "{type_needle_v} "
        "afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided "
        "text? The special "
        "magic "
        "{type_needle_v} for {query} mentioned in the provided text are";
    std::string kind = task.name == "ruler/niah-single-3" || task.name == "ruler/niah-multikey-3" ? "uuids" : "numbers";
    if (task.name != "ruler/niah-multivalue" && task.name != "ruler/niah-multiquery") {
      pattern = replaced(replaced(replaced(pattern, "Some", "A"), "are all", "is"), "are", "is");
      kind.pop_back();
    }
    const std::size_t for_at = sample.question.find(" for "), end = sample.question.find(" mentioned");
    const std::string query = in_quotes(sample.question, for_at + 5, end);
    pattern = replaced(replaced(pattern, "{type_needle_v}", kind), "{query}", query);
    const std::size_t split = pattern.find("{context}");
    const std::string prompt = sample.prompt(), before = pattern.substr(0, split), behind = pattern.substr(split + 9);
    EXPECT_TRUE(prompt.starts_with(before)) << prompt;
    EXPECT_TRUE(prompt.ends_with(behind)) << prompt;

    const bool essay = is_essay(task);
    std::string hay = without_needles(sample, essay ? " " : "\n");
    ASSERT_TRUE(hay.starts_with(before));
    hay = hay.substr(before.size());
    if (essay) {
      const std::vector<std::string> all = words_of(kEssay), words = words_of(hay);
      for (std::size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], all[i % all.size()]);
      EXPECT_EQ(times(hay, "  "), 0u);
    } else if (task.name == "ruler/niah-single-1") {
      for (const std::string& line : lines_of(hay)) EXPECT_EQ(line, kNoiseLine);
    }
  });
}

TEST(TextTasks, HaveRulersOtherTemplatesByteForByte) {
  const std::map<std::string, std::string> patterns{
      {"ruler/vt",
       "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
       "Find all variables "
       "that are assigned the value "
       "{query} in the text above. Answer: According to the chain(s) of variable assignment in the text above, {num_v} "
       "variables are "
       "assigned the value {query}, they "
       "are: "},
      {"ruler/cwe",
       "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
       "appear most "
       "often.\n{context}\nQuestion: What "
       "are the 10 most common words in the above list? Answer: The top 10 words that appear most often in the list "
       "are:"},
      {"ruler/fwe",
       "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
       "appeared coded words. "
       "{context}\nQuestion: Do not "
       "provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in "
       "the above coded text? "
       "Answer: According to the "
       "coded text above, the three most frequently appeared words are:"},
      {"ruler/qa-1",
       "Answer the question based on the given documents. Only give me the answer and do not output any other "
       "words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given "
       "documents. Only give me the answer and do not output any other words.\n\nQuestion: {query} Answer:"}};
  for_each_sample(3, [&](const TextTaskInfo& task, const TextSample& sample, std::int64_t) {
    const auto found = patterns.find(std::string(task.name));
    if (found == patterns.end()) return;
    std::string pattern = found->second;
    if (task.name == "ruler/vt") {
      const std::size_t at = sample.question.find("value ") + 6;
      pattern = replaced(replaced(pattern, "{query}", sample.question.substr(at, 5)), "{num_v}", "5");
    }
    if (task.needs_passages)
      pattern = replaced(pattern, "{query}", sample.question.substr(sample.question.find("Where")));
    const std::size_t split = pattern.find("{context}");
    EXPECT_TRUE(sample.prompt().starts_with(pattern.substr(0, split)));
    EXPECT_TRUE(sample.prompt().ends_with(pattern.substr(split + 9)));
    // The example has the same template, and ends with its answers.
    EXPECT_EQ(times(sample.prompt(), pattern.substr(0, split)),
              task.name == "ruler/vt" || task.name == "ruler/cwe" ? 2u : 1u);
  });
}

TEST(TextTasks, AreSplitWhereKvpressSplitsThem) {
  const std::regex needle("What (is|are all) the special magic"),
      other("Question: (Find all variables|What are the 10 most common|Do not provide any explanation\\.)"),
      passages("Answer the question");
  for_each_sample(2, [&](const TextTaskInfo& task, const TextSample& sample, std::int64_t) {
    const std::string prompt = sample.prompt();
    const bool has_needle = is_niah(task.name) || task.name == "text/needle";
    std::size_t last = 0;
    for (std::sregex_iterator at(prompt.begin(), prompt.end(),
                                 has_needle            ? needle
                                 : task.needs_passages ? passages
                                                       : other),
         end;
         at != end; ++at)
      last = static_cast<std::size_t>(at->position());
    EXPECT_EQ(last, sample.context.size());
    EXPECT_EQ(sample.context.back(), '\n');
    EXPECT_EQ(sample.answer_prefix.front(), ' ');
  });
}

TEST(TextTasks, GiveTheseSmallSamples) {
  for (const SmallSample& expected : kSmallSamples) {
    const TextSample sample =
        make_text_task(expected.name, 7, count_words,
                       {.length = expected.length, .haystack = kEssay, .passages = &passages_of(expected.name)});
    EXPECT_EQ(sample.context + "|" + sample.question + "|" + sample.answer_prefix + "|", expected.prompt)
        << expected.name;
    std::string answers;
    for (const std::string& answer : sample.answers) answers += (answers.empty() ? "" : " ") + answer;
    EXPECT_EQ(answers, expected.answers) << expected.name;
  }
  EXPECT_EQ(kSmallSamples.size(), text_tasks().size());
}

TEST(TextTasks, PutEachNeedleOnceAndWhereItsDepthSays) {
  const auto ends = [](std::string word) {
    while (!word.empty() && std::string("\"')]").find(word.back()) != std::string::npos) word.pop_back();
    return !word.empty() && std::string(".!?").find(word.back()) != std::string::npos;
  };
  for_each_sample(8, [&](const TextTaskInfo& task, const TextSample& sample, std::int64_t) {
    std::size_t last = 0;
    for (const TextNeedle& needle : sample.needles) {
      EXPECT_GE(needle.offset, last);
      last = needle.offset;
      ASSERT_EQ(sample.context.substr(needle.offset, needle.text.size()), needle.text);
      EXPECT_EQ(times(sample.prompt(), needle.text), 1u) << needle.text;
    }
    if (sample.needles.empty() || task.needs_passages) return;

    // Units in front of each needle, counted anew: lines that are no needle, or words that end a sentence.
    const std::size_t body = is_niah(task.name)        ? sample.context.find('\n') + 1
                             : task.name == "ruler/vt" ? sample.context.rfind("text.\n\n") + 7
                                                       : 0;
    const auto units = [&](std::string part) {
      for (const TextNeedle& needle : sample.needles) part = replaced(part, needle.text, "");
      std::int64_t count = 0;
      if (is_essay(task)) {
        const std::vector<std::string> words = words_of(part);
        for (std::size_t i = 0; i < words.size(); ++i) count += ends(words[i]) || i + 1 == words.size();
      } else {
        for (const std::string& line : lines_of(part)) count += !line.empty();
      }
      return static_cast<double>(count);
    };
    const double all = units(sample.context.substr(body));
    for (const TextNeedle& needle : sample.needles)
      EXPECT_DOUBLE_EQ(needle.depth, units(sample.context.substr(body, needle.offset - body)) / all) << needle.text;
  });
}

TEST(TextTasks, TakeDepthsOfEssaysFromFortyAndLinesFromAll) {
  std::set<double> essay, lines;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    for (const TextNeedle& needle : sample_of("ruler/niah-multikey-1", seed, 4096).needles) essay.insert(needle.depth);
    lines.insert(sample_of("ruler/niah-single-1", seed, 4096).needles[0].depth);
  }
  EXPECT_TRUE(essay.contains(0.0) && essay.contains(1.0));
  EXPECT_GT(essay.size(), 35u);
  EXPECT_GT(lines.size(), 30u);
  EXPECT_LT(*lines.rbegin(), 1);  // RULER puts a needle in front of a line
}

TEST(TextTasks, AskForANeedleAtAnyPlaceAmongTheOthers) {
  std::set<std::size_t> places;
  std::set<bool> in_order;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const std::vector<TextNeedle> needles = sample_of("ruler/niah-multikey-1", seed).needles;
    for (std::size_t i = 0; i < needles.size(); ++i)
      if (needles[i].asked) places.insert(i);
    const TextSample values = sample_of("ruler/niah-multivalue", seed);
    in_order.insert(values.needles[0].text.find(values.answers[0]) != std::string::npos);
  }
  EXPECT_EQ(places.size(), 4u);
  EXPECT_EQ(in_order.size(), 2u);
}

TEST(TextTasks, AskForWhatStandsInTheNeedlesOfTheAskedKeys) {
  const std::regex needle("(?:One of the|The) special magic (?:number|numbers|uuids) for (\\S+) is: (\\S+)\\.");
  for_each_sample(4, [&](const TextTaskInfo& task, const TextSample& sample, std::int64_t) {
    if (!is_niah(task.name) && task.name != "text/needle") return;
    std::vector<std::string> expected;  // in the order of the question
    std::string query = sample.question.substr(sample.question.find(" for ") + 5);
    query.resize(query.find(" mentioned"));
    std::set<std::string> keys, values;
    std::map<std::string, std::set<std::string>> by_key;
    for (std::sregex_iterator at(sample.context.begin(), sample.context.end(), needle), end; at != end; ++at) {
      keys.insert((*at)[1]);
      EXPECT_TRUE(values.insert((*at)[2]).second) << "twice: " << (*at)[2];
      by_key[(*at)[1]].insert((*at)[2]);
    }
    std::size_t answers = 0;
    std::string rest = replaced(query, ", and ", ", ");
    for (std::size_t at = 0; at != std::string::npos;) {
      const std::size_t comma = rest.find(", ", at);
      const std::string key = rest.substr(at, comma == std::string::npos ? comma : comma - at);
      at = comma == std::string::npos ? comma : comma + 2;
      const std::set<std::string>& found = by_key[key];
      for (std::size_t i = 0; i < found.size(); ++i, ++answers)
        EXPECT_TRUE(found.contains(sample.answers.at(answers))) << key;
    }
    EXPECT_EQ(answers, sample.answers.size());
    if (task.name != "ruler/niah-multivalue") {
      EXPECT_EQ(keys.size(), values.size()) << "no key stands twice";
    }
    const std::regex form(task.name == "text/needle" ? "[1-9][0-9]{4}"
                          : task.name.ends_with("-3")
                              ? "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
                              : "[1-9][0-9]{6}");
    for (const std::string& value : values) EXPECT_TRUE(std::regex_match(value, form)) << value;
    for (const TextNeedle& one : sample.needles) {
      const bool holds = std::any_of(sample.answers.begin(), sample.answers.end(),
                                     [&](const std::string& a) { return one.text.find(a) != std::string::npos; });
      EXPECT_EQ(one.asked, holds) << one.text;
    }
  });
  EXPECT_EQ(sample_of("ruler/niah-multikey-1", 1).needles.size(), 4u);
  EXPECT_EQ(sample_of("ruler/niah-multikey-1", 1).answers.size(), 1u);
  EXPECT_EQ(sample_of("ruler/niah-multivalue", 1).answers.size(), 4u);
  EXPECT_EQ(sample_of("ruler/niah-multiquery", 1).answers.size(), 4u);
}

/// Every variable that has `value` by the assignments of `text`, in their order.
std::vector<std::string> followed(const std::string& text, const std::string& value) {
  const std::regex step("VAR ([A-Z]+) = (?:VAR ([A-Z]+) |([0-9]+))(?=\n)");
  std::vector<std::string> names;
  for (std::sregex_iterator at(text.begin(), text.end(), step), end; at != end; ++at)
    if ((*at)[3] == value || std::count(names.begin(), names.end(), std::string((*at)[2])) > 0)
      names.push_back((*at)[1]);
  return names;
}

TEST(TextTasks, ChainVariablesInOrderBehindASolvedExample) {
  for_each_sample(6, [](const TextTaskInfo& task, const TextSample& sample, std::int64_t length) {
    if (task.name != "ruler/vt") return;
    const std::size_t second = sample.context.find("Memorize", 1);
    ASSERT_NE(second, std::string::npos);
    const std::string example = sample.context.substr(0, second), own = sample.context.substr(second);
    const auto value = [](const std::string& text) { return text.substr(text.find("assigned the value ") + 19, 5); };
    EXPECT_EQ(followed(own, value(sample.question)), sample.answers);
    EXPECT_EQ(sample.answers.size(), 5u);
    for (const std::string& name : sample.answers) EXPECT_EQ(name.size(), 5u);
    EXPECT_NE(value(example), value(sample.question));

    std::string solved;
    for (const std::string& name : followed(example, value(example))) solved += " " + name;
    EXPECT_EQ(solved.size(), 20u) << "five names of three letters";
    EXPECT_TRUE(example.ends_with(", they are: " + solved + "\n\n"));
    const std::size_t shortest = 5;
    if (times(example, kNoiseLine) > shortest) {
      EXPECT_LE(count_pieces(example.substr(0, example.size() - 22)), std::min<std::int64_t>(500, length / 4));
    }
  });
}

std::map<std::string, int> counts_of(const std::vector<std::string>& words) {
  std::map<std::string, int> counts;
  for (const std::string& word : words) ++counts[word];
  return counts;
}

TEST(TextTasks, RepeatCommonWordsAsOftenAsRulerDoes) {
  const auto check = [](const std::string& list, const std::vector<std::string>& common, int often, int seldom) {
    const std::vector<std::string> parts = words_of(list);
    std::vector<std::string> words;
    for (std::size_t i = 0; i + 1 < parts.size(); i += 2) {
      EXPECT_EQ(parts[i], std::to_string(i / 2 + 1) + ".");
      words.push_back(parts[i + 1]);
    }
    const std::map<std::string, int> counts = counts_of(words);
    for (const auto& [word, count] : counts) {
      EXPECT_EQ(count, std::count(common.begin(), common.end(), word) > 0 ? often : seldom) << word;
      EXPECT_TRUE(std::regex_match(word, std::regex("[a-z]{4,}(-[a-z]{4,})?"))) << word;
    }
    return counts;
  };
  for_each_sample(3, [&](const TextTaskInfo& task, const TextSample& sample, std::int64_t length) {
    if (task.name != "ruler/cwe") return;
    const std::vector<std::string> lines =
        lines_of(sample.context);  // template, list, question and answers; template, list
    ASSERT_EQ(lines.size(), 5u);
    const bool is_short = length < 4096;
    EXPECT_EQ(sample.answers.size(), 10u);
    const auto own = check(lines[4], sample.answers, is_short ? 6 : 30, is_short ? 1 : 3);
    std::vector<std::string> solved;
    const std::vector<std::string> last = words_of(lines[2].substr(lines[2].find("are: 1.") + 5));
    for (std::size_t i = 1; i < last.size(); i += 2) solved.push_back(last[i]);
    EXPECT_EQ(solved.size(), 10u);
    const auto example = check(lines[1], solved, is_short ? 3 : 10, is_short ? 1 : 3);
    EXPECT_EQ(example.size(), is_short ? 20u : 40u);
    for (const auto& [word, count] : example) EXPECT_FALSE(own.contains(word)) << word;
  });
}

TEST(TextTasks, HaveAThousandWordsNoneAPartOfAnotherAndPairsBehindThem) {
  const TextSample sample = sample_of("ruler/cwe", 3, 40000);
  const std::vector<std::string> lines = lines_of(sample.context);
  std::set<std::string> plain;
  std::size_t pairs = 0;
  for (const std::size_t line : {1, 4})
    for (const auto& [word, count] : counts_of(words_of(lines[line])))
      if (std::isalpha(static_cast<unsigned char>(word[0])) != 0)
        word.find('-') == std::string::npos ? void(plain.insert(word)) : void(++pairs);
  EXPECT_EQ(plain.size(), 1060u);
  EXPECT_GT(pairs, 0u);
  for (const std::string& word : plain)
    for (const std::string& other : plain)
      if (&word != &other) {
        EXPECT_EQ(other.find(word), std::string::npos) << word << " in " << other;
      }
}

TEST(TextTasks, CodeWordsByZipfsLaw) {
  for_each_sample(3, [](const TextTaskInfo& task, const TextSample& sample, std::int64_t length) {
    if (task.name != "ruler/fwe") return;
    const std::size_t begin = sample.context.find("coded words. ") + 13;
    const std::map<std::string, int> counts = counts_of(words_of(sample.context.substr(begin)));
    std::vector<std::pair<int, std::string>> ranks;
    for (const auto& [word, count] : counts) ranks.emplace_back(-count, word);
    std::sort(ranks.begin(), ranks.end());
    ASSERT_GE(ranks.size(), 5u);
    ASSERT_EQ(sample.answers.size(), 3u);
    EXPECT_EQ(ranks[0].second, "...");
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(ranks[i + 1].second, sample.answers[i]);
    EXPECT_LT(ranks[3].first, ranks[4].first) << "the third is more than the fourth";
    EXPECT_LE(static_cast<std::int64_t>(ranks.size()), std::max<std::int64_t>(8, length / 50));

    const double zeta = std::acos(-1.0) * std::acos(-1.0) / 6;  // of 2
    bool some = false;                                          // some number of words gives these counts
    for (int words = -ranks[0].first; words < -2 * ranks[0].first + 4 && !some; ++words) {
      bool all = true;
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        const double rank = static_cast<double>(i + 1);
        all = all && -ranks[i].first == static_cast<int>(std::floor(words / (zeta * rank * rank)));
      }
      some = all;
    }
    EXPECT_TRUE(some);
  });
}

}  // namespace
}  // namespace kvkeep::lm::text_tasks_test
