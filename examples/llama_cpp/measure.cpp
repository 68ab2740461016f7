// SPDX-License-Identifier: Apache-2.0
#include "measure.h"

#include <cctype>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <deque>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "kvkeep/io/atomic_file.h"

namespace {

/// Seconds on the clock, and of the process on all its cores: the second is what other programs do not take.
struct Stopwatch {
  std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
  std::clock_t cpu_begun = std::clock();
  [[nodiscard]] double wall() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  }
  [[nodiscard]] double cpu() const { return static_cast<double>(std::clock() - cpu_begun) / CLOCKS_PER_SEC; }
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

kvkeep::llama::Spent spent_by(Engine& engine) {
  return engine.evictor() == nullptr ? kvkeep::llama::Spent{} : engine.evictor()->spent();
}

/// Memory of the process in MB, where the system says it.
long resident_mb() {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("VmRSS:")) return std::atol(line.c_str() + 6) / 1024;
  return 0;
}

// ---- bench ----

struct Rate {
  double decode = 0, cpu_ms = 0;                  ///< tokens/s; per token
  double reading = 0, observing = 0, events = 0;  ///< percent of the time of decoding
};

/// One row of the table: an engine behind its prompt, which decodes once per round.
struct Contestant {
  std::unique_ptr<Engine> engine;
  double prefill = 0;  ///< tokens/s
  std::vector<Rate> rates = {};
};

/// Decodes, and takes it back where no event has come in between: all rounds are behind as long a prompt.
Rate rate(Engine& engine, int tokens) {
  const kvkeep::llama::Spent before = spent_by(engine);
  const int begun = engine.next_position();
  const Stopwatch decode;
  std::deque<double> plain;  // the newest steps that read no queries
  double longer = 0;         // by which steps that read are longer than those before them
  for (int i = 0; i < tokens && interrupted == 0; ++i) {
    llama_token id = engine.sample();
    const kvkeep::llama::Spent last = spent_by(engine);
    const Stopwatch step;
    engine.decode(&id, 1);
    const kvkeep::llama::Spent now = spent_by(engine);
    const double seconds = step.cpu() - (now.events - last.events);
    if (now.read > last.read && !plain.empty()) {
      longer += seconds - median({plain.begin(), plain.end()});
    } else {
      plain.push_back(seconds);
      if (plain.size() > 32) plain.pop_front();
    }
  }
  const double wall = decode.wall(), cpu = decode.cpu();
  const kvkeep::llama::Spent after = spent_by(engine);
  if (after.cut == before.cut) engine.take_back(begun);
  return {.decode = tokens / wall,
          .cpu_ms = 1000 * cpu / tokens,
          .reading = 100 * longer / cpu,
          .observing = 100 * (after.observing - before.observing) / wall,
          .events = 100 * (after.events - before.events) / wall};
}

// ---- endless ----

/// A fact that is told once, and asked for at the end.
struct Told {
  std::string fact, question, answer;
};
const Told kFirst{"The secret number of the old lighthouse is 48213. Nobody may forget it.\n\n",
                  "\n\nThe secret number of the old lighthouse is", "48213"};
const Told kLate{"\n\nThe secret number of the harbour master is 90571. Nobody may forget it.\n\n",
                 "\n\nThe secret number of the harbour master is", "90571"};

/// Newest tokens that every row holds, without a gap: fewer than a policy protects would be a loss at the edge.
int newest_held(Engine& engine) {
  if (engine.evictor() == nullptr) return engine.cells_held();
  const kvkeep::Keeper& keeper = engine.evictor()->keeper();
  std::int64_t least = engine.cells_held();
  for (const std::int32_t l : keeper.spec().full_layers())
    for (std::int32_t h = 0; h < keeper.spec().kv_heads; ++h) {
      const std::span<const std::int32_t> held = keeper.positions(0, l, h);
      std::int64_t run = 0;
      while (run < std::ssize(held) &&
             held[held.size() - 1 - static_cast<std::size_t>(run)] == keeper.logical_length(0) - 1 - run)
        ++run;
      least = std::min(least, run);
    }
  return static_cast<int>(least);
}

/// Percent of runs of four tokens that stand once only: low where a text turns in circles.
double fresh(std::span<const llama_token> ids) {
  std::set<std::vector<llama_token>> seen;
  for (std::size_t i = 0; i + 4 <= ids.size(); ++i) seen.insert({ids.begin() + i, ids.begin() + i + 4});
  return 100 * static_cast<double>(seen.size()) / static_cast<double>(ids.size() - 3);
}

bool knows(Engine& engine, const Told& told) {
  engine.feed(engine.tokenize(told.question, false));
  return engine.answer(8, false).find(told.answer) != std::string::npos;
}

void endless(llama_model* model, const Options& o, const std::string& policy) {
  Engine engine(model, o, policy, cells_of(o, model));
  std::vector<llama_token> text =
      engine.tokenize(kFirst.fact + (o.text.empty() ? "Once upon a time" : read_file(o.text)), true);
  const auto facts = static_cast<int>(engine.tokenize(kFirst.fact, true).size());
  engine.feed(text);
  if (o.hold_prompt) engine.hold(facts);
  const Stopwatch all;
  Stopwatch part;
  std::int64_t decoded = 0, last = 0, least_newest = std::numeric_limits<std::int64_t>::max();
  int most_held = 0;
  std::vector<double> cpu;  ///< of each part
  std::int64_t cut = 0;
  const auto decode = [&](llama_token id) {
    engine.decode(&id, 1);
    text.push_back(id);
    ++decoded;
    most_held = std::max(most_held, engine.cells_held());
    if (std::exchange(cut, spent_by(engine).cut) != cut)
      least_newest = std::min<std::int64_t>(least_newest, newest_held(engine));
    if (decoded % o.every != 0) return;
    const double wall = part.wall(), busy = part.cpu();
    cpu.push_back(1000 * busy / static_cast<double>(decoded - last));
    std::printf("| %s | %lld | %.2f | %.2f | %ld | %d | %d | %d |\n", kvkeep::escaped(policy).c_str(),
                static_cast<long long>(decoded), static_cast<double>(decoded - last) / wall, cpu.back(), resident_mb(),
                engine.cells_held(), engine.highest_cell(), engine.next_position());
    std::fflush(stdout);
    last = decoded;
    part = {};
  };
  bool told_late = false;
  while (decoded < o.tokens && interrupted == 0) {
    if (decoded == o.tokens - o.late) {
      told_late = true;
      for (const llama_token id : engine.tokenize(kLate.fact, false)) decode(id);
    }
    decode(engine.sample());
  }
  interrupted = 0;  // what has been written is judged all the same
  const std::size_t in_sight =
      std::min(text.size(), static_cast<std::size_t>(o.sight > 0 ? o.sight : llama_model_n_ctx_train(model)));
  const std::size_t judged = std::min<std::size_t>(1000, in_sight - 1);
  const std::int64_t seen = engine.evictor() == nullptr ? static_cast<std::int64_t>(text.size())
                                                        : engine.evictor()->keeper().logical_length(0);
  const bool late = told_late && knows(engine, kLate), first = knows(engine, kFirst);
  const std::vector<llama_token> sight(text.end() - static_cast<std::ptrdiff_t>(in_sight), text.end());
  Engine judge(model, o, "alone", static_cast<int>(sight.size()));
  const double perplexity = std::exp(judge.mean_surprisal(sight, judged));
  const auto half = static_cast<std::ptrdiff_t>(cpu.size() / 2);
  const std::string edge = engine.evictor() == nullptr ? ""
                                                       : "an event never left fewer than the " +
                                                             std::to_string(least_newest) + " newest tokens; ";
  std::printf(
      "\n%s: %lld tokens in %.0f s; %lld of them were seen; at most %d cells held; %sCPU time of a token, later half "
      "over earlier half: %+.1f %%\n"
      "%s: the last %zu tokens: perplexity under the full model with %zu tokens in sight %.2f, fresh runs of four %.1f "
      "%%; asked at the end: told %d tokens before %s, told first %s\n\n",
      kvkeep::escaped(policy).c_str(), static_cast<long long>(text.size()), all.wall(), static_cast<long long>(seen),
      most_held, edge.c_str(),
      100 * (median({cpu.begin() + half, cpu.end()}) / median({cpu.begin(), cpu.begin() + half}) - 1),
      kvkeep::escaped(policy).c_str(), judged, sight.size(), perplexity, fresh(std::span(text).last(judged)), o.late,
      late        ? "yes"
      : told_late ? "no"
                  : "not told",
      first ? "yes" : "no");
  std::fflush(stdout);
}

}  // namespace

void bench(const Options& o) {
  const Model model = load(o);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
  std::vector<llama_token> prompt(static_cast<std::size_t>(o.prompt_tokens));
  std::uint32_t state = o.seed;
  for (llama_token& id : prompt) {
    state = state * 1664525u + 1013904223u;
    id = static_cast<llama_token>(state >> 8) % vocabulary;
  }
  std::vector<Contestant> all;
  for (const std::string& policy : o.policies) {
    Contestant& one = all.emplace_back(
        std::make_unique<Engine>(model.get(), o, policy, o.context > 0 ? o.context : o.prompt_tokens + o.tokens + 64));
    const Stopwatch prefill;
    one.engine->feed(prompt);
    one.prefill = o.prompt_tokens / prefill.wall();
  }
  for (int round = 0; round < o.rounds; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].rates.push_back(rate(*all[i].engine, o.tokens));
      if (interrupted != 0) return;
      std::fprintf(stderr, "round %d, %s: %.2f tok/s, %.2f ms of CPU\n", round + 1,
                   kvkeep::escaped(o.policies[i]).c_str(), all[i].rates.back().decode, all[i].rates.back().cpu_ms);
    }
  std::printf(
      "%d prompt tokens, %d decoded, medians of %d rounds in turns\n\n| policy | prefill tok/s | decode tok/s | CPU ms "
      "a token | highest cell | state MB | events | reading | observing | events' time |\n"
      "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
      o.prompt_tokens, o.tokens, o.rounds);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto mid = [&](double Rate::* number) {
      std::vector<double> values;
      for (const Rate& one : all[i].rates) values.push_back(one.*number);
      return median(std::move(values));
    };
    std::printf("| %s | %.1f | %.2f | %.2f | %d | %.2f | %lld | %.2f %% | %.2f %% | %.2f %% |\n",
                kvkeep::escaped(o.policies[i]).c_str(), all[i].prefill, mid(&Rate::decode), mid(&Rate::cpu_ms),
                all[i].engine->highest_cell(), static_cast<double>(all[i].engine->state_bytes()) / 1e6,
                static_cast<long long>(spent_by(*all[i].engine).cut), mid(&Rate::reading), mid(&Rate::observing),
                mid(&Rate::events));
  }
}

void endless(const Options& o) {
  const Model model = load(o);
  std::printf(
      "| policy | decoded | tok/s | CPU ms a token | resident MB | cells held | highest cell | next position |\n"
      "|---|---:|---:|---:|---:|---:|---:|---:|\n");
  for (const std::string& policy : o.policies)
    if (interrupted == 0) endless(model.get(), o, policy);
}

void perplexity(const Options& o) {
  const Model model = load(o);
  const std::string text = read_file(o.text);
  std::printf("| policy | tokens | perplexity | tok/s | cells | position |\n|---|---:|---:|---:|---:|---:|\n");
  for (const std::string& policy : o.policies) {
    Engine engine(model.get(), o, policy, cells_of(o, model.get()));
    const std::vector<llama_token> ids = engine.tokenize(text, true);
    const auto tokens = std::min(ids.size(), static_cast<std::size_t>(o.tokens));
    const std::size_t part = std::max<std::size_t>(1, tokens / 10);
    double sum = 0;
    Stopwatch part_time;
    for (std::size_t i = 0; i < tokens && interrupted == 0; ++i) {
      llama_token id = ids[i];
      if (i > 0) sum += engine.surprisal(id);
      engine.decode(&id, 1);
      if ((i + 1) % part != 0) continue;
      std::printf("| %s | %zu | %.3f | %.1f | %d | %d |\n", kvkeep::escaped(policy).c_str(), i + 1,
                  std::exp(sum / static_cast<double>(i + 1 == part ? part - 1 : part)),
                  static_cast<double>(part) / part_time.wall(), engine.cells_held(), engine.next_position());
      std::fflush(stdout);
      sum = 0;
      part_time = {};
    }
    if (interrupted != 0) return;
  }
}

namespace {

/// "1/4": a part of the prompt; "256": cells.
struct Budget {
  std::string name;
  int part = 0, cells = 0;

  [[nodiscard]] int of(std::size_t prompt) const { return part > 0 ? static_cast<int>(prompt) / part : cells; }
};

std::vector<Budget> budgets_of(const std::string& given) {
  std::vector<Budget> budgets;
  std::istringstream list(given);
  for (std::string one; std::getline(list, one, ',');) {
    const bool is_part = one.starts_with("1/");
    const int number = std::atoi(one.c_str() + (is_part ? 2 : 0));
    if (number < 1)
      fail("--budgets: given '" + one + "'; allowed parts of the prompt such as 1/4, and cells such as 256");
    budgets.push_back({one, is_part ? number : 0, is_part ? 0 : number});
  }
  return budgets;
}

/// The share of references that the text contains.
double score_of(std::string text, const nlohmann::json& references) {
  const auto lower = [](std::string& s) {
    std::ranges::transform(s, s.begin(), [](unsigned char c) { return std::tolower(c); });
  };
  lower(text);
  double found = 0;
  for (auto wanted : references.get<std::vector<std::string>>()) {
    lower(wanted);
    found += text.find(wanted) != std::string::npos ? 1 : 0;
  }
  return found / static_cast<double>(std::max<std::size_t>(1, references.size()));
}

/// What kvkeep eval says that the full cache of 16 bits holds behind the prompt; 0: nothing.
double full_bytes(const nlohmann::json& sample) {
  for (const nlohmann::json& answer : sample.value("answers", nlohmann::json::array()))
    if (answer.at("policy") == "full" && answer.contains("kept_bytes"))
      return answer.at("kept_bytes").get<double>() * (sample.value("cache_dtype", "") == "f32" ? 0.5 : 1.0);
  return 0;
}

}  // namespace

void answer(const Options& o) {
  const Model model = load(o);
  std::ifstream in(o.samples);
  if (!in) fail("cannot read '" + o.samples + "'");
  std::vector<nlohmann::json> samples;
  for (std::string line; std::getline(in, line);) samples.push_back(nlohmann::json::parse(line));
  const std::vector<Budget> budgets = budgets_of(o.budgets);
  const ggml_type type = cache_type(o.cache_type);
  const double width = static_cast<double>(ggml_row_size(type, 64)) / 128;  // of 16 bits
  std::vector<nlohmann::json> answers(samples.size(), nlohmann::json::array());
  std::printf(
      "| policy | budget | task | samples | answered | tok/s | state MB |\n|---|---:|---|---:|---:|---:|---:|\n");
  for (const std::string& policy : o.policies) {
    const bool shift = policy == "shift", whole = policy == "full" || policy == "alone";
    const std::string prefill = policy.find(",prefill=") == std::string::npos ? ",prefill=cut" : "";
    const std::string cut_at_end = prefill + ",interval=1000000,budget=";
    for (const Budget& budget : whole ? std::vector<Budget>{{"1/1", 1, 0}} : budgets) {
      std::map<std::string, std::pair<double, int>> by_task;
      double seconds = 0;
      std::int64_t written = 0;
      std::size_t held = 0;  // bytes of the states behind the prompts
      for (std::size_t i = 0; i < samples.size(); ++i) {
        if (interrupted != 0) return;
        const nlohmann::json& sample = samples[i];
        const auto prompt = sample.at("prompt").get<std::vector<llama_token>>();
        const auto question = sample.at("question").get<std::vector<llama_token>>();
        const int most = sample.at("max_new_tokens").get<int>(), kept = budget.of(prompt.size());
        const int after = static_cast<int>(question.size()) + most + 8;
        const int cells = (shift ? kept : static_cast<int>(prompt.size())) + after;
        Engine engine(model.get(), o, whole || shift ? policy : policy + cut_at_end + std::to_string(kept),
                      o.context > 0 ? o.context : cells);
        engine.feed(prompt);
        held += engine.state_bytes();
        if (!question.empty()) engine.feed(question);
        const Stopwatch decoding;
        const int begun = engine.next_position();
        const std::string got = engine.answer(most, false);
        seconds += decoding.wall(), written += engine.next_position() - begun;
        const double score = score_of(got, sample.at("references"));
        auto& [sum, count] = by_task[sample.at("task").get<std::string>()];
        sum += score;
        ++count;
        const double share = std::min(1.0, static_cast<double>(kept) / static_cast<double>(prompt.size()));
        answers[i].push_back({{"policy", whole ? "llama.cpp" : "llama.cpp: " + policy},
                              {"budget", whole ? nlohmann::json() : nlohmann::json(kept)},
                              {"prompt_kept", false},
                              {"text", got},
                              {"score", score},
                              {"kept_bytes", std::llround(full_bytes(sample) * width * share)}});
      }
      for (const auto& [task, scores] : by_task)
        std::printf("| %s | %s | %s | %d | %.1f %% | %.1f | %.2f |\n", kvkeep::escaped(policy).c_str(),
                    budget.name.c_str(), kvkeep::escaped(task).c_str(), scores.second,
                    100 * scores.first / scores.second, static_cast<double>(written) / seconds,
                    static_cast<double>(held) / 1e6 / static_cast<double>(samples.size()));
      std::fflush(stdout);
    }
  }
  if (o.samples_out.empty()) return;
  std::string lines;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i]["cache_dtype"] = o.cache_type;
    samples[i]["answers"] = std::move(answers[i]);
    lines += samples[i].dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }
  kvkeep::io::write_text_atomically(o.samples_out, lines);
}
