// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Long-decoding tasks with a known answer, and with the cache positions that the answer needs.
///
/// A sample is a prompt full of facts (`key value`, two adjacent entities among filler words) and a trace that uses
/// them long after the prompt has passed. The rule of every task: the latest `key value` before a question is the
/// answer. No separator follows a fact, so no single token type holds all that is needed.
///
///     prompt := BOS section*                        exactly prompt_length tokens
///     section := SEC filler* (key value filler+)*   sections, and the facts of a section, are in random order
///     chain, copies: trace := ASK step*             step := GO key value thought(value); the next key is this value
///     ask:           trace := (ASK key value thought (GO key value thought)^(hops - 1))*
///     needle:        trace := (filler^gap ASK key value thought)*
///     updates:       trace := (SET key value | ASK key value thought)*   all keys are asked before one is asked again
///     thought(v): seven words chosen by v mod 4, or none
///
/// Uses neither LibTorch nor the random distributions of the standard library: a seed gives the same sample on every
/// platform.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvkeep::lm {

inline constexpr int32_t kTaskVocabulary = 256;  ///< ids are in [0, 256)
inline constexpr int32_t kThoughtWords = 7;      ///< thinking words after a look-up
inline constexpr int32_t kMaxFacts = 96;         ///< distinct keys in one sample

/// The token ids of the tasks.
enum TaskToken : int32_t {
  kPad = 0,
  kBos = 1,
  kSet = 2,  ///< an assignment inside the trace
  kGo = 3,   ///< a step that follows from the step before
  kAsk = 4,  ///< a question from outside
  kEnd = 5,  ///< end of text; no sample contains it
  kFirstSection = 8,
  kSectionCount = 8,
  kFirstFiller = 16,
  kFillerCount = 64,
  kFirstThought = 80,
  kThoughtCount = 40,
  kFirstEntity = 128,
  kEntityCount = 128,
};

/// What `TaskSample::target` says about a token.
enum TargetKind : uint8_t {
  kUnpredictable = 0,  ///< drawn at random: prompt, given keys, assignments
  kLookUp = 1,         ///< the value of a fact
  kRoutine = 2,        ///< follows from the last few tokens: GO, the copied key, thinking words
};

/// One sequence with its answers.
struct TaskSample {
  std::vector<int32_t> ids;     ///< [length] prompt, then trace
  int32_t prompt_length = 0;    ///< tokens of the prompt, BOS included
  std::vector<uint8_t> target;  ///< [length] TargetKind of ids[i] as predicted from ids[0 .. i-1]
  std::vector<int32_t>
      needed;  ///< ascending, unique: the positions that hold every fact a look-up of the trace reads (key and value)
  std::vector<int32_t> needed_until;  ///< [needed.size()] the position of the last look-up that reads needed[i]: from
                                      ///< there on it may be dropped
};

/// What a sample looks like. Fields without a value take the task's own default, which may depend on `length`.
struct TaskOptions {
  int32_t length = 512;                       ///< tokens of prompt and trace, 16 to 65536
  std::optional<int32_t> prompt_length = {};  ///< tokens, default 3/8 of length
  std::optional<int32_t> facts =
      {};  ///< distinct keys, 2 to 96; default one per 10 tokens of trace, at most 64 (needle 8, updates 24)
  std::optional<int32_t> sections = {};  ///< 1 to 8, not above `facts`; default 4 (copies 8)
  std::optional<int32_t> copies =
      {};  ///< times the prompt states each fact, 1 to 8; default 1 (copies 3); updates: always 1
  std::optional<int32_t> hops = {};  ///< ask: look-ups per question, each with the value of the last, 1 to 8; default 1
  std::optional<int32_t> phase = {};  ///< ask: questions to one section before the next; 0 asks for any key; default 8
  std::optional<int32_t> gap = {};    ///< needle: filler words before a question, 1 to 4096; default 32
  std::optional<int32_t> rewrites =
      {};  ///< updates: keys the prompt assigns a second time, 0 to facts - late; default a third of facts
  std::optional<int32_t> update_every =
      {};  ///< updates: questions between two assignments of the trace, 0 for none; default 2
  std::optional<int32_t> late =
      {};  ///< updates: keys of `facts` that only the trace assigns, 0 to facts - 2; default a quarter of them
  bool thinking = true;  ///< seven thinking words after each look-up
};

/// A task and what it asks of a cache.
struct TaskInfo {
  std::string_view name;
  std::string_view what;
};

/// Every task, in the order of the documentation.
const std::vector<TaskInfo>& tasks();

/// A sample of task `name`. The same name, seed and options give the same sample on every platform.
/// Throws InvalidArgument for an unknown name, an option out of range, an option of another task, and facts that do not
/// fit the prompt. Cost: O(length + facts * copies).
TaskSample make_task(std::string_view name, uint64_t seed, const TaskOptions& options = {});

/// The fewest prompt tokens that hold `facts` facts in `sections` sections, each stated `copies` times.
constexpr int32_t shortest_prompt(int32_t facts, int32_t sections, int32_t copies) {
  return 1 + sections + 3 * facts * copies;
}

/// A readable name: "BOS", "ASK", "sec3", "w17", "think2.5", "E41". Ids without a role are "unused200", ids outside the
/// vocabulary are refused.
std::string token_name(int32_t id);

}  // namespace kvkeep::lm
