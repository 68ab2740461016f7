// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Samples that others wrote: prompts with their references, one JSON object per line, in a form of our own or as
/// published. Does not use LibTorch.
///
/// Our own form:
///
///     prompt          the prompt, or instead of it
///     messages        a conversation: [{"role": ..., "content": ...}], the last from the user; a chat template renders
///                     it, or
///     turns           strings that make up the prompt, nothing between them; all but the last may be cut before the
///                     last is seen
///     references      what the answer is judged by: strings, or one
///     scoring         "contains", "any", "exact", "f1", "rouge-l", "number", "choice", "class", "numbers": TextScoring
///     max_new_tokens  1 to 65,536
///     choices         options, for choice and class
///     answer_prefix   first words of the answer, fed as they are
///     first_line      true: what follows the answer's first line that is not empty does not count
///     raw             true: without the model's chat template
///     task, id        strings, or an id as a number
///
/// Lines that `kvkeep eval --samples-out` wrote have the same keys and, besides, seed, length, depth, prompt and
/// question as token ids, end_tokens and answers, which are not read. Any other key is an error.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvlab/chat.h"
#include "kvlab/text_tasks.h"

namespace kvkeep::lm {

/// One line of a file.
struct Sample {
  std::string task = {};                 ///< what results are grouped by
  std::string id = {};                   ///< empty: none
  std::vector<ChatMessage> before = {};  ///< messages before the last one, whose content is context and question
  TextSample text = {};                  ///< without needles and prompt_tokens
  bool raw = false;                      ///< no chat template
  std::int64_t line = 0;                 ///< in its file, from 1
};

enum class SampleForm : std::uint8_t { own, ruler, ruler_parts, longbench, infinitebench, gsm8k, math };

/// A form, and how it is recognised: by the keys of a file's first line. The first form that fits counts.
struct SampleFormInfo {
  SampleForm form;
  std::string_view name;  ///< "LongBench"
  std::string_view keys;  ///< "input, context, answers, dataset"
};

[[nodiscard]] std::span<const SampleFormInfo> sample_forms();

/// Prompts by dataset, as LongBench's dataset2prompt.json has them: {name} stands for a string of the line, {{ for {.
using PromptTemplates = std::map<std::string, std::string>;

/// Reads a JSON object of strings. Throws InvalidArgument for anything else; `where` names it.
[[nodiscard]] PromptTemplates read_templates(std::string_view json, const std::string& where);

struct SampleFile {
  SampleForm form = SampleForm::own;
  std::vector<Sample> samples;
};

/// Reads a file's text. `where` is its path: messages name it, and the file's name without extension is the task of
/// samples that name none (RULER's validation.jsonl: the folder's). Empty lines are passed over.
///
/// Published forms, and what becomes of their fields, are in examples/lab/docs/text.md. `templates` replaces our
/// prompts for LongBench, InfiniteBench ("longbook_qa_eng", ...), "gsm8k" and "math"; what follows {context} comes
/// after the cut.
///
/// Throws, each with file and line: InvalidArgument for text that is not UTF-8 or not JSON, a line above 16 MiB, a file
/// without samples, keys of no form or of another form than the first line's, an unknown key in our own form, a missing
/// or empty value or one of another type, references that the scoring cannot use, a template that names no field or
/// that is missing; Unsupported for a dataset whose published metric is not here, by name. Cost: O(text).
[[nodiscard]] SampleFile read_samples(std::string_view text, const std::string& where,
                                      const PromptTemplates& templates = {});

/// The sample as one line of our own form, without a line end; read_samples gives it back.
[[nodiscard]] std::string to_json(const Sample& sample);

}  // namespace kvkeep::lm
