// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How an answer is judged by its references. Every score is from 0 to 1. Does not use LibTorch.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace kvkeep::lm {

/// The ways to judge. Their names, in files and tables, are those of text_scorings().
enum class TextScoring : std::uint8_t {
  /// "contains": the share of the references that occur anywhere in the answer, ignoring the case of A to Z. Bytes
  /// beyond ASCII must match exactly. Source: RULER's string_match_all. RULER first turns control characters of an
  /// answer into line ends, which changes nothing unless a reference holds one.
  all,

  /// "any": 1 if any reference occurs, else 0: for references that are spellings of one answer. Source: RULER's
  /// string_match_part.
  part,

  /// "exact": 1 if the answer is one of the references after normalisation. Source: SQuAD 2.0's evaluation script:
  /// lower case, without ASCII punctuation, without the words a, an and the, one blank between words.
  exact,

  /// "f1": the harmonic mean of precision and recall of words, each counted as often as it occurs, after the same
  /// normalisation; the best over the references. Source: SQuAD 2.0's evaluation script; LongBench's qa_f1_score.
  /// Differs from LongBench: where a reference normalises to nothing, an answer that does so too has 1, as in SQuAD
  /// 2.0, and not 0.
  f1,

  /// "rouge-l": the best F-measure over the references, of the longest common subsequence by sentences. Source: the
  /// Python package `rouge` 1.0.1, rouge-l f, which LongBench calls: sentences end at full stops, words are counted
  /// once per text, case counts, and the subsequences of all pairs of sentences are united. Differs: sentences of
  /// more than about 1,000 words do not overflow a stack, which LongBench scores 0.
  rouge_l,

  /// "number": 1 if the answer is a reference. The answer is what stands in the last \boxed{} or \fbox{}, else its last
  /// number. Two numbers are compared as numbers ("1,000" is "1000.0", "1/2" is "0.5"), other expressions as strings
  /// after the normalisation of MATH's is_equiv (Hendrycks et al., 2021; hendrycks/math): spaces, \left, \right,
  /// degrees, units and percent signs fall away, and \dfrac12 is \frac{1}{2}. A reference may be boxed.
  number,

  /// "choice": 1 if the answer chooses a reference. Options are lettered A, B, C ... in the order of `choices`; a
  /// reference is a letter or the text of an option. The answer chooses the letter that it begins with, else the one
  /// after "answer is" or "answer:", else the only option whose text it contains, else its first capital that stands
  /// alone (A before a small letter is an article). Source: InfiniteBench's longbook_choice_eng, which knows four
  /// letters and takes "Because" for B.
  choice,

  /// "class": 1 / n if the reference is among the n of `choices` that the answer names, else 0; the best over the
  /// references. Names that are a part of the reference do not count. Source: LongBench's classification_score.
  classes,

  /// "numbers": the share of the answer's whole numbers that are a reference, 0 without numbers; the best over the
  /// references. Source: LongBench's count_score and retrieval_score.
  numbers,
};

struct TextScoringInfo {
  TextScoring scoring;
  std::string_view name;  ///< "contains"
  std::string_view what;  ///< in one line
};

/// Every way to judge, in the order of the enumeration.
[[nodiscard]] std::span<const TextScoringInfo> text_scorings();

[[nodiscard]] std::string_view name_of(TextScoring scoring);

/// The score of an answer. Bytes that are not UTF-8 are read as U+FFFD, except by `all` and `part`. `choices`: the
/// options of `choice` and `classes`; others ignore it. Throws InvalidArgument if there are no references. Cost:
/// O(answer
/// * references); rouge_l: one bit of memory and one step per pair of words.
[[nodiscard]] double text_score(std::string_view answer, std::span<const std::string> references,
                                TextScoring scoring = TextScoring::all, std::span<const std::string> choices = {});

/// What keeps references from being judged in this way, as the end of a sentence ("...; given X; allowed Y"), or
/// nothing. There must be references, none empty. `choice`: each is a letter or an option. `classes`: each is among
/// `choices`. `numbers`: each is digits. `rouge_l`: at most 16,384 words each.
[[nodiscard]] std::optional<std::string> text_scoring_problem(TextScoring scoring,
                                                              std::span<const std::string> references,
                                                              std::span<const std::string> choices = {});

}  // namespace kvkeep::lm
