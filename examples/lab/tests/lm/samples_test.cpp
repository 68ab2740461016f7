// SPDX-License-Identifier: Apache-2.0
// Samples that others wrote: our own form and the published ones, read, judged, and refused where they are damaged.

#include "kvlab/samples.h"

#include <gtest/gtest.h>

#include <map>

#include "kvkeep/core/error.h"
#include "message_of.h"

namespace kvkeep::lm::samples_test {
namespace {

using testing::message_of;

Sample one(const std::string& line, const std::string& where = "data/x.jsonl", const PromptTemplates& templates = {}) {
  const SampleFile file = read_samples(line, where, templates);
  EXPECT_EQ(file.samples.size(), 1U);
  return file.samples.front();
}

std::string refusal(const std::string& text, const std::string& where = "x.jsonl",
                    const PromptTemplates& templates = {}) {
  return message_of<Error>([&] { (void)read_samples(text, where, templates); });
}

// ---- Our own form

TEST(Samples, ReadPromptsTurnsAndMessages) {
  const Sample prompt = one(R"({"prompt": "Say yes.", "references": "yes", "scoring": "exact", "max_new_tokens": 4, )"
                            R"("answer_prefix": " I say", )"
                            R"("id": 7})"
                            "\n\n");
  EXPECT_EQ(prompt.text.prompt(), "Say yes. I say");
  EXPECT_EQ(prompt.text.context, "Say yes.");
  EXPECT_EQ(prompt.text.answers, std::vector<std::string>{"yes"});
  EXPECT_EQ(prompt.text.scoring, TextScoring::exact);
  EXPECT_EQ(prompt.text.answer_tokens, 4);
  EXPECT_EQ(prompt.task, "x") << "the file's name";
  EXPECT_EQ(prompt.id, "7");
  EXPECT_EQ(prompt.line, 1);
  EXPECT_EQ(prompt.text.score("The yes!"), 1);
  EXPECT_EQ(prompt.text.score("yes and no"), 0);

  const Sample turns = one(R"({"turns": ["A long ", "text.\n", "What?"], "references": ["a", "b"], "scoring": "any", )"
                           R"("max_new_tokens": 9, "task": "mine", "raw": true, "first_line": true})");
  EXPECT_EQ(turns.text.context, "A long text.\n") << "what stands before the last turn";
  EXPECT_EQ(turns.text.question, "What?");
  EXPECT_EQ(turns.task, "mine");
  EXPECT_TRUE(turns.raw);
  EXPECT_EQ(turns.text.score("\n\nit is b\nno"), 1);
  EXPECT_EQ(turns.text.score("\nno\nb"), 0) << "the second line does not count";

  const Sample messages =
      one(R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, )"
          R"({"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Which?"}], "references": "B", )"
          R"("scoring": "choice", "choices": ["x", "y"], "max_new_tokens": 1})");
  ASSERT_EQ(messages.before.size(), 3U);
  EXPECT_EQ(messages.before[2].role, "assistant");
  EXPECT_EQ(messages.before[2].content, "Hello");
  EXPECT_EQ(messages.text.context, "");
  EXPECT_EQ(messages.text.question, "Which?");
  EXPECT_EQ(messages.text.score("y"), 1);
  EXPECT_EQ(messages.text.score("A"), 0);
}

TEST(Samples, ComeBackFromWhatIsWritten) {
  for (const char* line :
       {R"({"prompt": "é \u0001 \"x\"", "references": ["1", "2"], "scoring": "number", "max_new_tokens": 65536})",
        R"({"turns": ["a", "b"], "references": "y", "scoring": "class", "choices": ["x", "y"], "max_new_tokens": 1, )"
        R"("answer_prefix": " So", "first_line": true, "raw": true, "task": "t/u", "id": "9"})",
        R"({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "b"}], "references": "3", )"
        R"("scoring": "numbers", "max_new_tokens": 5})"}) {
    const Sample first = one(line), again = one(to_json(first), "other.jsonl");
    EXPECT_EQ(to_json(again), to_json(first));
    EXPECT_EQ(again.task, first.task);
    EXPECT_EQ(again.text.context, first.text.context);
    EXPECT_EQ(again.text.question, first.text.question);
    EXPECT_EQ(again.text.choices, first.text.choices);
    EXPECT_EQ(again.before.size(), first.before.size());
  }
}

TEST(Samples, PassOverWhatEvalWritesBesideThem) {
  const Sample sample =
      one(R"({"task": "t", "turns": ["a", "b"], "references": ["x"], "scoring": "contains", "max_new_tokens": 3, )"
          R"("seed": 5, "length": 64, "depth": [50], "cache_dtype": "f32", "prompt": [1, 2], )"
          R"("question": [3], "end_tokens": [0], )"
          R"("answers": [{"policy": "full"}]})");
  EXPECT_EQ(sample.text.prompt(), "ab");
  EXPECT_NE(refusal(R"({"prompt": [1], "references": "x", "scoring": "any", "max_new_tokens": 3})")
                .find("prompt is no string"),
            std::string::npos);
}

TEST(Samples, SayWhichLineOfOurFormIsWrongAndHow) {
  const std::string good = R"({"prompt": "p", "references": "r", "scoring": "any", "max_new_tokens": 3)";
  EXPECT_EQ(refusal(good + "}\n" + good + R"(, "promt": 1})"),
            "read samples: x.jsonl, line 2: no key has this name; given \"promt\" (did you mean \"prompt\"?); allowed "
            "prompt, messages, turns, references, scoring, max_new_tokens, choices, answer_prefix, first_line, raw, "
            "task, id");
  const std::map<std::string, std::string> cases{
      {"{", "line 1 is not JSON"},
      {"[1]", "the line is no object; given [1]"},
      {"{\"prompt\": \"\xff\"}", "the line is not UTF-8"},
      {good + R"(, "prompt": "q"})", "names 'prompt' twice"},
      {good + R"(, "turns": ["t"]})", "there must be one prompt; given 2"},
      {R"({"prompt": null, "references": "r", "scoring": "any", "max_new_tokens": 3})",
       "there must be one prompt; given 0"},
      {R"({"prompt": "", "references": "r", "scoring": "any", "max_new_tokens": 3})", "prompt is empty"},
      {R"({"prompt": "p", "references": [], "scoring": "any", "max_new_tokens": 3})", "references is empty"},
      {R"({"prompt": "p", "references": [""], "scoring": "any", "max_new_tokens": 3})", "references has an item"},
      {R"({"prompt": "p", "references": "", "scoring": "any", "max_new_tokens": 3})", "references is empty"},
      {R"({"prompt": "p", "scoring": "any", "max_new_tokens": 3})", "references is missing"},
      {R"({"prompt": "p", "references": "r", "max_new_tokens": 3})", "scoring is missing"},
      {R"({"prompt": "p", "references": "r", "scoring": "rogue-l", "max_new_tokens": 3})",
       "(did you mean \"rouge-l\"?)"},
      {R"({"prompt": "p", "references": "r", "scoring": "any", "max_new_tokens": 0})",
       "max_new_tokens is out of range; given 0; allowed 1 to 65536"},
      {R"({"prompt": "p", "references": "r", "scoring": "any", "max_new_tokens": 1.5})",
       "max_new_tokens is out of range"},
      {R"({"prompt": "p", "references": "r", "scoring": "choice", "max_new_tokens": 3})", "a reference is no choice"},
      {good + R"(, "raw": 1})", "raw is neither true nor false"},
      {good + R"(, "id": []})", "id is no string"},
      {R"({"turns": [], "references": "r", "scoring": "any", "max_new_tokens": 3})", "turns is no list of strings"},
      {R"({"turns": ["", "b"], "references": "r", "scoring": "any", "max_new_tokens": 3})",
       "before the last turn is empty"},
      {R"({"messages": [{"role": "user"}], "references": "r", "scoring": "any", "max_new_tokens": 3})", "no message"},
      {R"({"messages": [{"role": "tool", "content": "x"}], "references": "r", "scoring": "any", "max_new_tokens": 3})",
       "a role that is not known; given 'tool'"},
      {R"({"messages": [{"role": "assistant", "content": "x"}], "references": "r", "scoring": "any", )"
       R"("max_new_tokens": 3})",
       "does not end with the user"},
      {R"({"messages": [{"role": "user", "content": "x"}], "references": "r", "scoring": "any", )"
       R"("max_new_tokens": 3, "raw": true})",
       "raw samples have no chat template"},
      {"\n \n", "has no samples"},
      {"", "has no samples"}};
  for (const auto& [line, said] : cases) {
    const std::string message = refusal(line);
    EXPECT_NE(message.find(said), std::string::npos) << line << "\n" << message;
    EXPECT_TRUE(message.starts_with("read samples: x.jsonl")) << message;
    EXPECT_LT(message.size(), 900U);
  }
  const std::string unknown = refusal(R"({"text": "x"})");
  for (const SampleFormInfo& form : sample_forms())
    EXPECT_NE(unknown.find(std::string(form.name) + " (" + std::string(form.keys) + ")"), std::string::npos) << unknown;
  EXPECT_NE(
      refusal(good + "}\n" + R"({"question": "q", "answer": "#### 1"})").find("line 2: the form changes; given GSM8K"),
      std::string::npos);
  EXPECT_NE(refusal("{\"prompt\": \"" + std::string(std::size_t{16} << 20, 'x') + "\"}").find("the line is too long"),
            std::string::npos);
}

// ---- RULER

TEST(Samples, ReadRulersPreparedFiles) {
  const std::string fields =
      R"(, "outputs": ["5437923"], "length": 8177, "length_w_model_temp": 8177, "answer_prefix": " The special magic )"
      R"(number for x-y mentioned in the provided text is", "token_position_answer": 569})";
  const Sample niah =
      one(R"({"index": 3, "input": "A special magic number is hidden.\nHay.\nWhat is the special magic number for x-y )"
          R"(mentioned in the provided text?")" +
              fields,
          "save/niah_single_1/validation.jsonl");
  EXPECT_EQ(niah.task, "niah_single_1") << "RULER names the folder by the task";
  EXPECT_EQ(niah.id, "3");
  EXPECT_EQ(niah.text.context, "A special magic number is hidden.\nHay.\n");
  EXPECT_EQ(niah.text.question, "What is the special magic number for x-y mentioned in the provided text?");
  EXPECT_EQ(niah.text.answer_prefix, " The special magic number for x-y mentioned in the provided text is");
  EXPECT_EQ(niah.text.answer_tokens, 128);
  EXPECT_EQ(niah.text.scoring, TextScoring::all);
  EXPECT_EQ(niah.text.score("It is 5437923."), 1);

  struct Family {
    const char* question;
    std::int32_t tokens;
    TextScoring scoring;
  };
  for (const Family& family :
       {Family{"What are all the special magic uuids for a and b mentioned?", 128, TextScoring::all},
        Family{"Question: Find all variables that are assigned the value 12345 in the text above.", 30,
               TextScoring::all},
        Family{"Question: What are the 10 most common words in the above list?", 120, TextScoring::all},
        Family{"Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
               "frequently appeared words in the above coded text?",
               50, TextScoring::all},
        Family{"Answer the question based on the given documents. Only give me the answer and do not output any other "
               "words.\\n\\nQuestion: Who?",
               32, TextScoring::part}}) {
    const Sample sample =
        one(R"({"index": 0, "input": "An example first. Question: Find all variables that are assigned )"
            R"(the value 1. And the text.\n)" +
            std::string(family.question) + R"(", "outputs": ["a", "b"]})");
    EXPECT_EQ(sample.text.answer_tokens, family.tokens) << family.question;
    EXPECT_EQ(sample.text.scoring, family.scoring) << family.question;
    EXPECT_TRUE(sample.text.context.ends_with("And the text.\n")) << "the last question is the one that is asked";
    EXPECT_EQ(sample.text.score("an A"), family.scoring == TextScoring::all ? 0.5 : 1);
    EXPECT_EQ(sample.task, "x");
  }
  EXPECT_NE(refusal(R"({"input": "Hello?", "outputs": ["a"]})").find("input asks none of RULER's questions"),
            std::string::npos);
  EXPECT_NE(
      refusal(R"({"input": "Hay.\nWhat is the special magic number for x?", "outputs": []})").find("outputs is empty"),
      std::string::npos);
  EXPECT_NE(refusal(R"({"input": 3, "outputs": ["a"]})").find("input is no string"), std::string::npos);
}

TEST(Samples, ReadRulerInThePartsThatKvpressUses) {
  const Sample sample =
      one(R"({"context": "Docs.\n", "question": "Who?", "answer_prefix": "Answer:", "answer": ["Ada", "Ada L."], )"
          R"("task": "qa_2", "max_new_tokens": 32})");
  EXPECT_EQ(sample.task, "qa_2");
  EXPECT_EQ(sample.text.prompt(), "Docs.\nWho?Answer:");
  EXPECT_EQ(sample.text.scoring, TextScoring::part);
  EXPECT_EQ(sample.text.answer_tokens, 32);
  EXPECT_EQ(one(R"({"context": "c", "question": "q", "answer_prefix": "", "answer": ["a"], "task": "vt", )"
                R"("max_new_tokens": 30})")
                .text.scoring,
            TextScoring::all);
  EXPECT_NE(refusal(R"({"context": "c", "question": "q", "answer_prefix": "", "answer": ["a"], "task": "vt"})")
                .find("max_new_tokens is missing"),
            std::string::npos);
}

// ---- LongBench

std::string longbench(const std::string& dataset, const std::string& answers, const std::string& classes = "null",
                      const std::string& input = "Who?") {
  return R"({"input": ")" + input + R"(", "context": "The text.", "answers": )" + answers +
         R"(, "length": 2, "dataset": ")" + dataset + R"(", "language": "en", "all_classes": )" + classes +
         R"(, "_id": "ab12"})";
}

TEST(Samples, ReadLongBench) {
  const Sample qa = one(longbench("hotpotqa", R"(["Ada", "Ada Lovelace"])"));
  EXPECT_EQ(qa.task, "hotpotqa");
  EXPECT_EQ(qa.id, "ab12");
  EXPECT_EQ(qa.text.context, "The text.");
  EXPECT_EQ(qa.text.question, "\n\nWho?");
  EXPECT_EQ(qa.text.scoring, TextScoring::f1);
  EXPECT_EQ(qa.text.answer_tokens, 32);
  EXPECT_FALSE(qa.raw);
  EXPECT_EQ(one(longbench("qasper_e", R"(["x"])")).task, "qasper") << "LongBench-E";
  // config/dataset2maxlen.json and eval.py.
  struct Case {
    const char *dataset, *scoring;
    std::int32_t tokens;
    bool few_shot = false;
  };
  for (const Case& c :
       {Case{"narrativeqa", "f1", 128}, Case{"qasper", "f1", 128}, Case{"multifieldqa_en", "f1", 64},
        Case{"hotpotqa", "f1", 32}, Case{"2wikimqa", "f1", 32}, Case{"musique", "f1", 32},
        Case{"gov_report", "rouge-l", 512}, Case{"qmsum", "rouge-l", 512}, Case{"multi_news", "rouge-l", 512},
        Case{"trec", "class", 64, true}, Case{"triviaqa", "f1", 32, true}, Case{"samsum", "rouge-l", 128, true},
        Case{"lsht", "class", 64, true}, Case{"passage_count", "numbers", 32},
        Case{"passage_retrieval_en", "numbers", 32}, Case{"passage_retrieval_zh", "numbers", 32}}) {
    const Sample sample = one(longbench(c.dataset, R"(["Paragraph 12"])", R"(["Paragraph 12", "City"])"));
    EXPECT_EQ(name_of(sample.text.scoring), c.scoring) << c.dataset;
    EXPECT_EQ(sample.text.answer_tokens, c.tokens) << c.dataset;
    EXPECT_EQ(sample.raw, c.few_shot) << c.dataset;
    EXPECT_EQ(sample.text.first_line, c.few_shot) << c.dataset;
  }
  EXPECT_EQ(one(longbench("trec", R"(["City"])", R"(["City", "Food"])")).text.score("\nCity\nFood"), 1);
  EXPECT_EQ(one(longbench("passage_retrieval_en", R"(["Paragraph 12"])")).text.score("Paragraph 12, not 3"), 0.5);
  EXPECT_NE(one(longbench("gov_report", R"(["x"])", "null", "")).text.question, "") << "something is asked";
  for (const char* lacking : {"multifieldqa_zh", "dureader", "vcsum", "lcc", "repobench-p"})
    EXPECT_NE(message_of<Unsupported>([&] {
                (void)read_samples(longbench(lacking, R"(["x"])"), "x.jsonl");
              }).find(std::string("LongBench scores ") + lacking + " by "),
              std::string::npos);
  EXPECT_NE(refusal(longbench("hotpot", R"(["x"])")).find("(did you mean \"hotpotqa\"?)"), std::string::npos);
  EXPECT_NE(refusal(longbench("trec", R"(["Town"])", R"(["City"])")).find("a reference is no choice"),
            std::string::npos);
  EXPECT_NE(refusal(longbench("trec", R"(["City"])")).find("all_classes is missing"), std::string::npos);
  EXPECT_NE(refusal(longbench("hotpotqa", "[]")).find("answers is empty"), std::string::npos);
}

TEST(Samples, FillTheTemplatesThatAreGiven) {
  const PromptTemplates templates = read_templates(
      R"({"hotpotqa": "Read.\n{context}\n\nNow {{answer}} {input}\nAnswer:", "math": "{problem}?"})", "t.json");
  const Sample sample = one(longbench("hotpotqa", R"(["Ada"])"), "x.jsonl", templates);
  EXPECT_EQ(sample.text.context, "Read.\nThe text.") << "the cut comes after {context}";
  EXPECT_EQ(sample.text.question, "\n\nNow {answer} Who?\nAnswer:");
  EXPECT_EQ(one(R"({"problem": "1+1", "solution": "\\boxed{2}"})", "x.jsonl", templates).text.prompt(), "1+1?");
  EXPECT_NE(refusal(longbench("qasper", R"(["x"])"), "x.jsonl", templates)
                .find("there is no template for this; given \"qasper\""),
            std::string::npos);
  EXPECT_NE(refusal(longbench("qasper", R"(["x"])"), "x.jsonl", {{"qasper", "{context} {nothing}"}})
                .find("nothing is missing"),
            std::string::npos);
  EXPECT_NE(
      refusal(longbench("qasper", R"(["x"])"), "x.jsonl", {{"qasper", "{context"}}).find("a brace without the other"),
      std::string::npos);
  EXPECT_NE(
      message_of<InvalidArgument>([] { (void)read_templates("{\"a\": 1}", "t.json"); }).find("no object of strings"),
      std::string::npos);
}

// ---- InfiniteBench

TEST(Samples, ReadInfiniteBench) {
  const std::string choice = R"({"id": 4, "context": "A book.", "input": "Where?", "answer": ["Perth"], )"
                             R"("options": ["Hobart", "Perth", "Cairns", "Darwin"]})";
  const Sample sample = one(choice, "data/longbook_choice_eng.jsonl");
  EXPECT_EQ(sample.task, "longbook_choice_eng");
  EXPECT_EQ(sample.id, "4");
  EXPECT_EQ(sample.text.context, "A book.");
  EXPECT_NE(sample.text.question.find("Where?\n\nA. Hobart\nB. Perth\nC. Cairns\nD. Darwin\n"), std::string::npos);
  EXPECT_EQ(sample.text.score("B"), 1);
  EXPECT_EQ(sample.text.score("C"), 0);
  struct Case {
    const char *task, *answer, *scoring;
    std::int32_t tokens;
    const char* right;
  };
  for (const Case& c : {Case{"passkey", R"(["71432"])", "contains", 6, "71432."},
                        Case{"number_string", R"(["5500"])", "contains", 12, "It is 5500"},
                        Case{"kv_retrieval", R"(["ab-cd"])", "contains", 50, "\"ab-cd\""},
                        Case{"longbook_sum_eng", R"(["A tale."])", "rouge-l", 1200, "A tale."},
                        Case{"longbook_qa_eng", R"(["Ada", "the Ada"])", "f1", 40, "Ada"},
                        Case{"longdialogue_qa_eng", R"(["ACE", "ACE R."])", "any", 40, "Ace"},
                        Case{"math_find", "17", "number", 3, "17"}, Case{"code_run", "-5", "number", 5, "-5"}}) {
    const Sample read =
        one(R"({"id": 0, "context": "c", "input": "", "options": [], "answer": )" + std::string(c.answer) + "}",
            std::string(c.task) + ".jsonl");
    EXPECT_EQ(name_of(read.text.scoring), c.scoring) << c.task;
    EXPECT_EQ(read.text.answer_tokens, c.tokens) << c.task;
    EXPECT_GT(read.text.score(c.right), 0.999) << c.task;
  }
  EXPECT_NE(refusal(choice, "books.jsonl").find("no dataset of InfiniteBench has this name; given \"books\""),
            std::string::npos);
  for (const char* lacking : {"longbook_qa_chn", "math_calc"})
    EXPECT_NE(refusal(choice, std::string(lacking) + ".jsonl").find(std::string("InfiniteBench scores ") + lacking),
              std::string::npos);
  EXPECT_NE(refusal(R"({"context": "c", "input": "i", "answer": ["Rome"], "options": ["a", "b"]})", "code_debug.jsonl")
                .find("a reference is no choice"),
            std::string::npos);
}

// ---- Mathematics

TEST(Samples, ReadGsm8kAndMath) {
  const Sample word =
      one(R"({"question": "How many?", "answer": "2 * 600 = <<2*600=1200>>1,200 eggs.\n#### 1,200"})", "test.jsonl");
  EXPECT_EQ(word.text.answers, std::vector<std::string>{"1,200"});
  EXPECT_TRUE(word.text.prompt().starts_with("How many?\n"));
  EXPECT_EQ(word.text.score("So there are 1200."), 1);
  EXPECT_EQ(word.text.score("So there are 12."), 0);
  EXPECT_NE(refusal(R"({"question": "q", "answer": "12"})").find("no number after ####"), std::string::npos);

  const Sample math = one(R"({"problem": "Half of $3$?", "level": "Level 1", "type": "Algebra", )"
                          R"("solution": "It is $\\boxed{\\frac{3}{2}}$."})");
  EXPECT_EQ(math.text.answers, std::vector<std::string>{"\\frac{3}{2}"});
  EXPECT_TRUE(math.text.prompt().ends_with("\\boxed{}."));
  EXPECT_EQ(math.text.score("\\boxed{1.5}"), 1);
  const Sample math500 =
      one(R"x({"problem": "p", "solution": "s \\boxed{4}", "answer": "\\left( 3, 1 \\right)", "subject": "Algebra", )x"
          R"("level": 2, "unique_id": "test/algebra/1.json"})");
  EXPECT_EQ(math500.text.answers, std::vector<std::string>{"\\left( 3, 1 \\right)"});
  EXPECT_EQ(math500.id, "test/algebra/1.json");
  EXPECT_EQ(math500.text.score("\\boxed{(3,1)}"), 1);
  EXPECT_NE(refusal(R"({"problem": "p", "solution": "s"})").find("no \\boxed{} answer"), std::string::npos);
}

}  // namespace
}  // namespace kvkeep::lm::samples_test
