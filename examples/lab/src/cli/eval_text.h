// SPDX-License-Identifier: Apache-2.0
#pragma once
// kvkeep eval on tasks over text: RULER's, and a number in prose.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "contests.h"
#include "model_options.h"

namespace kvkeep::cli {

// Tasks over text have a / in their names.
bool is_text_task(const std::string& name);

struct TextOptions {
  bool question_after = false;          // the prompt is cut before the question is seen
  bool score_tokens = false;            // the reference is fed, and each of its tokens is predicted
  bool raw = false;                     // no chat template
  std::string haystack;                 // a file
  std::string samples_out;              // a file
  std::vector<std::string> samples_in;  // files
  std::string templates;                // a file: prompts of samples_in
  std::vector<std::string> passages;    // files: of ruler/qa-*
  std::vector<std::int32_t> depths;     // of the needle that is asked for, in percent; empty: drawn
  bool truncate = false;                // too long samples lose their middle
  std::int32_t answer_tokens = 0;       // most of an answer; 0: what its task says
  std::int32_t stream_after = 0;        // tokens that come at once, as the prompt; the rest one by one; 0: all at once
  // True if any is given that tasks of the small model do not take.
  [[nodiscard]] bool any() const {
    return question_after || score_tokens || raw || truncate || answer_tokens > 0 || stream_after > 0 ||
           !haystack.empty() || !samples_out.empty() || !samples_in.empty() || !templates.empty() ||
           !passages.empty() || !depths.empty();
  }
  void add(CLI::App& app);
};

struct TextEvaluation {
  const ModelOptions& model;
  const OutputOptions& output;
  const TextOptions& text;
  std::vector<std::string> tasks;
  std::int64_t length = 0;
  std::int32_t samples = 0, batch = 0;               // samples: of each task, and of each depth if there are some
  bool length_given = false, samples_given = false;  // they then hold for --samples-in, too
  std::uint64_t seed = 0;
  SamplingOptions sampling;
  std::int32_t repeats = 1;                      // answers to each sample, each drawn with a seed of its own
  std::optional<std::int32_t> diagnostics = {};  // how many answers to each task are compared with a full run
  ContestOptions contests;

  // Of one task.
  [[nodiscard]] std::int32_t all_samples() const {
    return samples * std::max<std::int32_t>(1, static_cast<std::int32_t>(text.depths.size()));
  }
};

// Prints the table.
void evaluate_text(const TextEvaluation& evaluation);

}  // namespace kvkeep::cli
