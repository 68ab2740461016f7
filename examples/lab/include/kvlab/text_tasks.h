// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Tasks over text with a known answer: RULER's, and one number in prose.
///
///     name                  haystack  key -> value      needles in the text; asked for
///     ruler/niah-single-1   noise     word -> number    1; 1
///     ruler/niah-single-2   essay     word -> number    1; 1
///     ruler/niah-single-3   essay     word -> uuid      1; 1
///     ruler/niah-multikey-1 essay     word -> number    4 keys; 1
///     ruler/niah-multikey-2 needles   word -> number    all of the text; 1
///     ruler/niah-multikey-3 needles   uuid -> uuid      all of the text; 1
///     ruler/niah-multivalue essay     word -> number    1 key with 4 values; all 4
///     ruler/niah-multiquery essay     word -> number    4 keys; all 4
///     ruler/vt              noise     a chain of 5 variables; all 5
///     ruler/cwe             a numbered list of words; the 10 most frequent
///     ruler/fwe             coded words by Zipf's law; the 3 most frequent after the dots
///     ruler/qa-1            SQuAD's paragraphs, one of them the question's; any spelling of the answer
///     ruler/qa-2            HotpotQA's, ten of them the question's; the answer
///     text/needle           essay     word -> 5 digits  `numbers` keys; 1
///
/// Haystacks:
/// - noise: "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again." on each line.
/// - needles: each line is another needle, no key twice.
/// - essay: as many words of the caller's text as fit, from its start, one blank between them. A text that is too short
/// starts over.
///
/// Source: RULER (Hsieh et al., What's the Real Context Size of Your Long-Context Language Models?), repository
/// NVIDIA/RULER at c3f5e3b: templates byte for byte, parameters, and how answers are scored. Differs:
/// - The random numbers are our own, so no sample is RULER's.
/// - The words are our own list of 1,060 common English ones (214 adjectives, 538 nouns, 308 verbs), none part of
/// another. RULER takes wonderwords' lists, which are longer. Keys are adjective-noun pairs, as in RULER. A cwe list
/// longer than ours continues with such pairs.
/// - No key and no value occurs twice in a sample. RULER draws each independently.
/// - The caller supplies the essay. RULER's are Paul Graham's: name your text next to the numbers.
/// - A word that ends with . ! or ? ends a sentence of an essay, and so does a blank line. RULER uses NLTK, which knows
/// abbreviations.
/// - A sample holds as many units (lines, words) as fit. RULER searches for that number once per task.
/// - vt: the solved example in front has RULER's 500 tokens from a length of 2,000 on. In a shorter sample it has a
/// quarter of the length, or five lines.
/// - A depth may be given where one needle is asked for; RULER draws it.
/// - cwe: the solved example in front shares no word with the list.
/// - fwe: at least eight coded words. RULER has length / 50.
/// - qa: the caller supplies SQuAD and HotpotQA. Seed s asks question s modulo their number. The question's own
/// documents come first into the choice, then those of the same article, as in RULER. No document occurs twice, so a
/// text may be shorter than `length` allows; RULER starts over.
///
/// Does not use LibTorch. The same name, seed, options and token counts give the same bytes on every machine: draws are
/// integers, and nothing is read from clocks, files or locales.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvlab/answer_score.h"

namespace kvkeep::lm {

/// Counts the tokens of a text, 0 or more. Its exceptions pass through.
using TokenCounter = std::function<std::int64_t(std::string_view)>;

struct Passages;  // kvlab/passages.h

/// One sentence that was put into a haystack; ruler/qa-*: a document that belongs to the question.
struct TextNeedle {
  std::string text;        ///< as it appears in the context
  std::size_t offset = 0;  ///< bytes of the context before it
  double depth = 0;        ///< the share of the haystack's sentences (essay), documents (qa) or lines before it, 0 to 1
  bool asked = false;      ///< the answer needs it
};

/// One prompt with its answer. A cache may be cut after `context`, before the question is seen, or after `question`.
struct TextSample {
  std::string context;   ///< UTF-8 if the haystack is; ends with a line end
  std::string question;  ///< starts where kvpress splits RULER's prompts: "What is", "What are all", "Question:"; qa:
                         ///< the second "Answer the question"
  std::string answer_prefix;  ///< the first words of the answer, fed as they are. Starts with a blank; that of vt ends
                              ///< with one, too
  std::vector<std::string> answers;  ///< references, in the order of the question; cwe: in no order
  TextScoring scoring = TextScoring::all;
  std::vector<std::string> choices = {};  ///< of TextScoring::choice and classes
  bool first_line = false;                ///< judge nothing after the answer's first line that is not empty
  std::int32_t answer_tokens = 0;         ///< how many tokens RULER generates
  std::int64_t prompt_tokens = 0;         ///< count_tokens of prompt()
  std::vector<TextNeedle>
      needles;  ///< in the order of the text; haystacks' own needles are not among them. cwe, fwe: none

  [[nodiscard]] std::string prompt() const { return context + question + answer_prefix; }
  [[nodiscard]] double score(std::string_view answer) const {
    if (first_line) answer.remove_prefix(std::min(answer.size(), answer.find_first_not_of('\n')));
    return text_score(first_line ? answer.substr(0, answer.find('\n')) : answer, answers, scoring, choices);
  }
};

/// What a sample looks like.
struct TextTaskOptions {
  /// Tokens of prompt, answer and reserve together, 64 to 4,194,304: RULER's max_seq_length.
  std::int64_t length = 2048;

  /// The reserve: tokens that the caller adds (a begin token, chat markup) or loses by tokenising context and question
  /// apart. 0 to length.
  std::int64_t reserved_tokens = 0;

  /// The essay. Its bytes are not checked; it must outlive the call. Tasks without an essay do not read it.
  std::string_view haystack = {};

  /// ruler/qa-1: SQuAD; ruler/qa-2: HotpotQA. They must outlive the call. Other tasks do not read them.
  const Passages* passages = nullptr;

  /// Tasks that ask for one needle (text/needle, ruler/niah-single-*, ruler/niah-multikey-*): percent of the haystack's
  /// sentences or lines before it, 0 to 100, rounded down to a whole number of them. It changes nothing else. Default:
  /// drawn.
  std::optional<std::int32_t> depth = {};

  /// text/needle: how many keys have a number in the text, 1 to 40. One is asked for. Default 1.
  std::optional<std::int32_t> numbers = {};
};

/// A task and what it asks of the caller.
struct TextTaskInfo {
  std::string_view name;
  std::string_view what;
  bool needs_haystack = false;     ///< TextTaskOptions::haystack must hold words
  std::int32_t answer_tokens = 0;  ///< TextSample::answer_tokens
  bool needs_passages = false;     ///< TextTaskOptions::passages must be set
};

/// Every task, in the order of the table above.
[[nodiscard]] std::span<const TextTaskInfo> text_tasks();

/// A sample of task `name` as long as `length` allows: prompt_tokens + answer_tokens + reserved_tokens <= length, and
/// with one more unit of haystack (a line, a word) the count would exceed it, or the text has `length` units, or every
/// document. The prompt is counted as one text. Throws InvalidArgument for an unknown name, an option out of range or
/// of another task, a missing haystack, missing or other passages, a missing counter, a count that is negative or above
/// 2^40, a length below the shortest text (the message says which length fits), and a haystack of more keys than there
/// are pairs (115,132). Cost: 4 to 15 calls of count_tokens with whole prompts (vt: 4 of them with its example), and
/// O(length) besides each.
[[nodiscard]] TextSample make_text_task(std::string_view name, std::uint64_t seed, const TokenCounter& count_tokens,
                                        const TextTaskOptions& options = {});

}  // namespace kvkeep::lm
