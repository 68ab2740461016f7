// SPDX-License-Identifier: Apache-2.0
#include "kvlab/tasks.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <utility>

#include "dice.h"
#include "kvkeep/core/error.h"

namespace kvkeep::lm {
namespace {

constexpr int32_t kSettledTokens = 32;  // a key that was mentioned this recently is not assigned again

constexpr std::string_view kChainTask = "chain";
constexpr std::string_view kCopies = "copies";
constexpr std::string_view kAskTask = "ask";
constexpr std::string_view kNeedle = "needle";
constexpr std::string_view kUpdates = "updates";

/// Dice that also draw tokens.
class TokenDice {
 public:
  TokenDice(std::string_view name, uint64_t seed) : dice_(name, seed) {}

  /// Uniform in [0, n).
  int32_t below(int32_t n) { return static_cast<int32_t>(dice_.below(n)); }
  template <class T>
  void shuffle(std::vector<T>& items) {
    dice_.shuffle(items);
  }

  int32_t filler() { return kFirstFiller + below(kFillerCount); }
  int32_t entity_but(int32_t excluded) {
    const int32_t draw = kFirstEntity + below(kEntityCount - 1);
    return draw < excluded ? draw : draw + 1;
  }

  std::vector<int32_t> distinct_entities(int32_t n) {
    std::vector<int32_t> all(kEntityCount);
    for (int32_t i = 0; i < kEntityCount; ++i) all[i] = kFirstEntity + i;
    shuffle(all);
    all.resize(n);
    return all;
  }

 private:
  Dice dice_;
};

/// The options with every default filled in.
struct TaskShape {
  int32_t length, prompt_length, facts, sections, copies, hops, phase, gap, rewrites, update_every, late;
  bool thinking;
};

struct Fact {
  int32_t key, value;
};

using Sections = std::vector<std::vector<Fact>>;  // in the order of the prompt

int32_t in_range(std::string_view task, std::string_view option, int32_t value, int32_t low, int32_t high) {
  KVKEEP_REQUIRE(low <= value && value <= high, "make_task(", task, "): ", option, " is out of range; given ", value,
                 "; allowed ", low, " to ", high);
  return value;
}

void refuse_foreign(std::string_view task, std::string_view option, bool given, bool belongs) {
  KVKEEP_REQUIRE(!given || belongs, "make_task(", task, "): this task has no option ", option,
                 "; given a value for it; allowed the options of ", task);
}

int32_t default_facts(std::string_view task, int32_t trace_tokens, int32_t longest) {
  if (task == kNeedle) return std::min(8, longest);
  if (task == kUpdates) return std::min(24, longest);
  const int32_t lap = trace_tokens / (3 + kThoughtWords);  // chain then visits each fact once
  return std::clamp(task == kCopies ? lap / 2 : lap, 2, std::min(64, longest));
}

TaskShape resolve(std::string_view task, const TaskOptions& options) {
  refuse_foreign(task, "hops", options.hops.has_value(), task == kAskTask);
  refuse_foreign(task, "phase", options.phase.has_value(), task == kAskTask);
  refuse_foreign(task, "gap", options.gap.has_value(), task == kNeedle);
  refuse_foreign(task, "rewrites", options.rewrites.has_value(), task == kUpdates);
  refuse_foreign(task, "update_every", options.update_every.has_value(), task == kUpdates);
  refuse_foreign(task, "late", options.late.has_value(), task == kUpdates);

  TaskShape shape{};
  shape.thinking = options.thinking;
  shape.length = in_range(task, "length", options.length, 16, 65536);
  shape.prompt_length =
      in_range(task, "prompt_length", options.prompt_length.value_or(shape.length * 3 / 8), 4, shape.length - 4);
  shape.copies =
      in_range(task, "copies", options.copies.value_or(task == kCopies ? 3 : 1), 1, task == kUpdates ? 1 : 8);

  const int32_t room = (shape.prompt_length - 2) / (3 * shape.copies) * (task == kUpdates ? 3 : 4) /
                       4;  // leaves some filler and the rewrites
  shape.facts = in_range(
      task, "facts", options.facts.value_or(default_facts(task, shape.length - shape.prompt_length, std::max(2, room))),
      2, kMaxFacts);
  shape.sections = in_range(task, "sections", options.sections.value_or(std::min(task == kCopies ? 8 : 4, shape.facts)),
                            1, std::min<int32_t>(kSectionCount, shape.facts));
  shape.hops = in_range(task, "hops", options.hops.value_or(1), 1, 8);
  shape.phase = in_range(task, "phase", options.phase.value_or(8), 0, 65536);
  shape.gap = in_range(task, "gap", options.gap.value_or(32), 1, 4096);
  shape.update_every = in_range(task, "update_every", options.update_every.value_or(2), 0, 65536);
  const bool introduces = task == kUpdates && shape.update_every > 0;
  shape.late = in_range(task, "late", options.late.value_or(introduces ? shape.facts / 4 : 0), 0,
                        introduces ? shape.facts - 2 : 0);
  const int32_t stated = shape.facts - shape.late;
  shape.rewrites = task == kUpdates ? in_range(task, "rewrites",
                                               options.rewrites.value_or(std::min(shape.facts / 3, stated)), 0, stated)
                                    : 0;

  const int32_t shortest = shortest_prompt(stated, shape.sections, shape.copies) + 3 * shape.rewrites;
  KVKEEP_REQUIRE(shortest <= shape.prompt_length, "make_task(", task, "): ", shape.facts, " facts in ", shape.sections,
                 " sections, ", shape.copies, " times each and ", shape.rewrites,
                 " rewritten, do not fit the prompt; given prompt_length ", shape.prompt_length, "; allowed ", shortest,
                 " or more");
  return shape;
}

/// Appends tokens until the sample is full, and notes which positions the look-ups need.
class Writer {
 public:
  explicit Writer(const TaskShape& shape) : shape_(shape) { statement_.fill(-1), mention_.fill(-1); }

  bool full() const { return size() == shape_.length; }

  void put(int32_t id, TargetKind kind = kUnpredictable) {
    if (full()) return;
    sample_.ids.push_back(id);
    sample_.target.push_back(kind);
  }

  void state(Fact fact) {
    statement_[fact.key - kFirstEntity] = mention_[fact.key - kFirstEntity] = size();
    put(fact.key), put(fact.value);
  }

  void look_up(Fact fact, TargetKind key_kind) {
    mention_[fact.key - kFirstEntity] = size();
    put(fact.key, key_kind);
    const int32_t statement = statement_[fact.key - kFirstEntity];
    if (!full()) last_use_[statement] = last_use_[statement + 1] = size();
    put(fact.value, kLookUp);
    if (!shape_.thinking) return;
    const int32_t first = kFirstThought + 10 * ((fact.value - kFirstEntity) % 4);
    for (int32_t word = 0; word < kThoughtWords; ++word) put(first + word, kRoutine);
  }

  bool settled(int32_t key) const { return size() - mention_[key - kFirstEntity] >= kSettledTokens; }

  void end_prompt() { sample_.prompt_length = size(); }

  TaskSample take() {
    for (const auto& [position, last_use] : last_use_) {
      sample_.needed.push_back(position);
      sample_.needed_until.push_back(last_use);
    }
    return std::move(sample_);
  }

 private:
  int32_t size() const { return static_cast<int32_t>(sample_.ids.size()); }

  const TaskShape& shape_;
  TaskSample sample_;
  std::map<int32_t, int32_t> last_use_;  // position of a needed token -> position of the last look-up that reads it
  std::array<int32_t, kEntityCount> statement_;  // where the prompt or a SET last stated a key
  std::array<int32_t, kEntityCount> mention_;    // where any token pair last named it
};

/// `total` cut at random into `parts` lengths.
std::vector<int32_t> random_cut(TokenDice& dice, int32_t total, size_t parts) {
  std::vector<int32_t> ends(parts);
  for (size_t i = 0; i + 1 < parts; ++i) ends[i] = dice.below(total + 1);
  ends.back() = total;
  std::sort(ends.begin(), ends.end());
  for (size_t i = parts - 1; i > 0; --i) ends[i] -= ends[i - 1];
  return ends;
}

void write_prompt(Writer& writer, TokenDice& dice, const TaskShape& shape, const Sections& sections) {
  size_t statements = 0;
  for (const auto& section : sections) statements += section.size();
  const int32_t shortest = 1 + static_cast<int32_t>(sections.size() + 3 * statements);
  const std::vector<int32_t> spare = random_cut(dice, shape.prompt_length - shortest, sections.size() + statements);
  auto next_spare = spare.begin();
  const auto fill = [&](int32_t words) {
    for (; words > 0; --words) writer.put(dice.filler());
  };

  std::vector<int32_t> titles(kSectionCount);
  for (int32_t i = 0; i < kSectionCount; ++i) titles[i] = kFirstSection + i;
  dice.shuffle(titles);

  writer.put(kBos);
  for (size_t i = 0; i < sections.size(); ++i) {
    writer.put(titles[i]);
    fill(*next_spare++);
    for (Fact fact : sections[i]) {
      writer.state(fact);
      fill(1 + *next_spare++);
    }
  }
  writer.end_prompt();
}

/// Facts in blocks, block i of the list in one section; the order of sections and of the facts inside is random.
Sections in_blocks(TokenDice& dice, const TaskShape& shape, const std::vector<Fact>& facts) {
  Sections sections(shape.sections);
  for (int32_t i = 0; i < shape.facts; ++i) {
    auto& section = sections[static_cast<int64_t>(i) * shape.sections / shape.facts];
    section.insert(section.end(), shape.copies, facts[i]);
  }
  for (auto& section : sections) dice.shuffle(section);
  dice.shuffle(sections);
  return sections;
}

/// One cycle through all keys.
std::vector<Fact> cycle(const std::vector<int32_t>& keys) {
  std::vector<Fact> facts;
  for (size_t i = 0; i < keys.size(); ++i) facts.push_back({keys[i], keys[(i + 1) % keys.size()]});
  return facts;
}

std::vector<Fact> random_values(TokenDice& dice, const std::vector<int32_t>& keys) {
  std::vector<Fact> facts;
  for (int32_t key : keys) facts.push_back({key, dice.entity_but(key)});
  return facts;
}

TaskSample make_chain(TokenDice& dice, const TaskShape& shape) {
  Writer writer(shape);
  const std::vector<Fact> facts = cycle(dice.distinct_entities(shape.facts));
  write_prompt(writer, dice, shape, in_blocks(dice, shape, facts));
  writer.put(kAsk);
  TargetKind key_kind = kUnpredictable;  // only the first key comes from outside
  for (size_t i = dice.below(shape.facts); !writer.full(); i = (i + 1) % facts.size()) {
    writer.put(kGo, kRoutine);
    writer.look_up(facts[i], key_kind);
    key_kind = kRoutine;
  }
  return writer.take();
}

TaskSample make_ask(TokenDice& dice, const TaskShape& shape) {
  Writer writer(shape);
  const std::vector<int32_t> keys = dice.distinct_entities(shape.facts);
  std::vector<Fact> facts = shape.hops == 1 ? random_values(dice, keys) : cycle(keys);
  std::array<Fact, kEntityCount> of_key{};
  for (Fact fact : facts) of_key[fact.key - kFirstEntity] = fact;
  dice.shuffle(facts);  // blocks must not follow the cycle
  const Sections sections = in_blocks(dice, shape, facts);
  write_prompt(writer, dice, shape, sections);

  int32_t visited = dice.below(shape.sections);
  for (int32_t turn = 0; !writer.full(); ++turn) {
    if (shape.phase > 0 && turn > 0 && turn % shape.phase == 0 && shape.sections > 1)
      visited = (visited + 1 + dice.below(shape.sections - 1)) % shape.sections;
    const std::vector<Fact>& pool = shape.phase > 0 ? sections[visited] : facts;
    Fact fact = pool[dice.below(static_cast<int32_t>(pool.size()))];
    writer.put(kAsk);
    writer.look_up(fact, kUnpredictable);
    for (int32_t hop = 1; hop < shape.hops; ++hop) {
      fact = of_key[fact.value - kFirstEntity];
      writer.put(kGo);
      writer.look_up(fact, kRoutine);
    }
  }
  return writer.take();
}

TaskSample make_needle(TokenDice& dice, const TaskShape& shape) {
  Writer writer(shape);
  std::vector<Fact> facts = random_values(dice, dice.distinct_entities(shape.facts));
  write_prompt(writer, dice, shape, in_blocks(dice, shape, facts));
  for (size_t asked = 0; !writer.full(); ++asked) {
    if (asked % facts.size() == 0) dice.shuffle(facts);
    for (int32_t word = 0; word < shape.gap; ++word) writer.put(dice.filler());
    writer.put(kAsk);
    writer.look_up(facts[asked % facts.size()], kUnpredictable);
  }
  return writer.take();
}

/// Without the late keys. Keys to rewrite come in the first third, their second values in the last; keys with one value
/// in any.
Sections in_order_of_assignment(TokenDice& dice, const TaskShape& shape, const std::vector<Fact>& facts,
                                std::vector<Fact>& latest) {
  std::vector<std::vector<Fact>> thirds(3);
  for (int32_t i = 0; i < shape.facts - shape.late; ++i) {
    if (i >= shape.rewrites) {
      thirds[dice.below(3)].push_back(facts[i]);
      continue;
    }
    thirds[0].push_back(facts[i]);
    latest[i].value = dice.entity_but(facts[i].value);
    thirds[2].push_back(latest[i]);
  }
  std::vector<Fact> order;
  for (auto& third : thirds) {
    dice.shuffle(third);
    order.insert(order.end(), third.begin(), third.end());
  }
  Sections sections(shape.sections);
  for (size_t i = 0; i < order.size(); ++i) sections[i * sections.size() / order.size()].push_back(order[i]);
  return sections;
}

/// One of the first `known` facts.
Fact& fact_to_rewrite(Writer& writer, TokenDice& dice, std::vector<Fact>& facts, size_t known) {
  std::vector<size_t> settled;
  for (size_t i = 0; i < known; ++i)
    if (writer.settled(facts[i].key)) settled.push_back(i);
  if (settled.empty()) return facts[dice.below(static_cast<int32_t>(known))];
  return facts[settled[dice.below(static_cast<int32_t>(settled.size()))]];
}

TaskSample make_updates(TokenDice& dice, const TaskShape& shape) {
  Writer writer(shape);
  std::vector<Fact> facts = random_values(dice, dice.distinct_entities(shape.facts));
  const std::vector<Fact> first = facts;
  write_prompt(writer, dice, shape, in_order_of_assignment(dice, shape, first, facts));

  size_t known = static_cast<size_t>(shape.facts - shape.late);
  bool introduce = true;  // assignments take turns: a late key, a new value of a known key
  std::vector<size_t> to_ask;
  for (int32_t turn = 0; !writer.full(); ++turn) {
    if (shape.update_every > 0 && turn % shape.update_every == 0) {
      writer.put(kSet);
      if (introduce && known < facts.size()) {
        writer.state(facts[known++]);
      } else {
        Fact& fact = fact_to_rewrite(writer, dice, facts, known);
        fact.value = dice.entity_but(fact.value);
        writer.state(fact);
      }
      introduce = !introduce;
    }
    if (to_ask.empty()) {
      to_ask.resize(known);
      std::iota(to_ask.begin(), to_ask.end(), size_t{0});
      dice.shuffle(to_ask);
    }
    writer.put(kAsk);
    writer.look_up(facts[to_ask.back()], kUnpredictable);
    to_ask.pop_back();
  }
  return writer.take();
}

struct Task {
  TaskInfo info;
  TaskSample (*make)(TokenDice&, const TaskShape&);
};

constexpr std::array<Task, 5> kTasks{{
    {{kChainTask, "every fact leads to the next: a look-up per step, generated without help after the first key"},
     make_chain},
    {{kAskTask, "questions about one section of the prompt at a time, then about another"}, make_ask},
    {{kNeedle, "a few facts in a haystack, asked once each after stretches of filler"}, make_needle},
    {{kUpdates, "variables that the prompt and the trace assign again: the latest value is the answer"}, make_updates},
    {{kCopies, "chain with every fact stated three times in its section: one survivor is enough"}, make_chain},
}};

}  // namespace

const std::vector<TaskInfo>& tasks() {
  static const std::vector<TaskInfo> infos = [] {
    std::vector<TaskInfo> all;
    for (const Task& task : kTasks) all.push_back(task.info);
    return all;
  }();
  return infos;
}

TaskSample make_task(std::string_view name, uint64_t seed, const TaskOptions& options) {
  for (const Task& task : kTasks) {
    if (task.info.name != name) continue;
    const TaskShape shape = resolve(name, options);
    TokenDice dice(name, seed);
    return task.make(dice, shape);
  }
  refuse("make_task: unknown task; given \"", shortened(name), "\"", did_you_mean(name, tasks(), &TaskInfo::name),
         "; allowed ", joined(tasks(), &TaskInfo::name));
}

std::string token_name(int32_t id) {
  KVKEEP_REQUIRE(0 <= id && id < kTaskVocabulary, "token_name: id outside the vocabulary; given ", id,
                 "; allowed 0 to ", kTaskVocabulary - 1);
  static constexpr std::array<std::string_view, 6> kNames{"PAD", "BOS", "SET", "GO", "ASK", "END"};
  if (id < static_cast<int32_t>(kNames.size())) return std::string(kNames[id]);
  if (id >= kFirstEntity) return text("E", id - kFirstEntity);
  if (id >= kFirstThought && id < kFirstThought + kThoughtCount)
    return text("think", (id - kFirstThought) / 10, ".", (id - kFirstThought) % 10);
  if (id >= kFirstFiller && id < kFirstFiller + kFillerCount) return text("w", id - kFirstFiller);
  if (id >= kFirstSection && id < kFirstSection + kSectionCount) return text("sec", id - kFirstSection);
  return text("unused", id);
}

}  // namespace kvkeep::lm
