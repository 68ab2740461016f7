// kvkeep-llama: llama.cpp with any kvkeep policy over its KV cache. Shows all that an application adds: the Evictor
// before the context is made, attach(), and Evictor::decode() for llama_decode().

#include <llama.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "kvkeep/llama.h"
#include "kvkeep/policy/registry.h"

namespace {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t interrupted = 0;

double seconds_since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

template <auto free>
struct Freed {
  template <class T>
  void operator()(T* object) const {
    free(object);
  }
};
using Model = std::unique_ptr<llama_model, Freed<llama_model_free>>;
using Context = std::unique_ptr<llama_context, Freed<llama_free>>;
using Sampler = std::unique_ptr<llama_sampler, Freed<llama_sampler_free>>;

struct Options {
  std::string model, policy = "full", prompt, prompt_file, cache_type = "f16";
  int context = 0, tokens = 256, threads = 0, prompt_tokens = 8000, batch = 512;
  float temperature = 0;
  std::uint32_t seed = 1;
  bool stats = false;
  std::string positions = "text", text, samples, budgets = "1/4,1/8";
  std::vector<std::string> policies;
};

[[noreturn]] void fail(const std::string& sentence) { throw std::runtime_error(sentence); }

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("cannot read '" + path + "'");
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

ggml_type cache_type(const std::string& name) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0})
    if (name == ggml_type_name(type)) return type;
  fail("--cache-type: given '" + name + "'; allowed f32 f16 bf16 q8_0 q4_0");
}

Model load(const Options& o) {
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  Model model(llama_model_load_from_file(o.model.c_str(), params));
  if (!model) fail("llama.cpp cannot load '" + o.model + "'");
  return model;
}

/// A model, its context, and the policy over its cache.
class Engine {
 public:
  Engine(llama_model* model, const Options& o, const std::string& policy, int cells)
      : vocab_(llama_model_get_vocab(model)) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>(cells);
    params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(o.batch);
    params.n_seq_max = 1;
    if (o.threads > 0) params.n_threads = params.n_threads_batch = o.threads;
    params.type_k = params.type_v = cache_type(o.cache_type);
    shifts_ = policy == "shift";
    if (shifts_) params.n_batch = params.n_ubatch = std::min(params.n_batch, std::max(1U, params.n_ctx / 4));
    evictor_ = std::make_unique<kvkeep::llama::Evictor>(
        model, params, kvkeep::make_policy(shifts_ ? "full" : policy),
        o.positions == "cache" ? kvkeep::llama::Positions::cache : kvkeep::llama::Positions::text);
    context_.reset(llama_init_from_model(model, params));
    if (!context_) fail("llama.cpp cannot make a context of " + std::to_string(cells) + " cells");
    if (!shifts_) evictor_->attach(context_.get());
    sampler_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    if (o.temperature > 0) {
      llama_sampler_chain_add(sampler_.get(), llama_sampler_init_temp(o.temperature));
      llama_sampler_chain_add(sampler_.get(), llama_sampler_init_dist(o.seed));
    } else {
      llama_sampler_chain_add(sampler_.get(), llama_sampler_init_greedy());
    }
  }

  std::vector<llama_token> tokenize(const std::string& text, bool first) const {
    std::vector<llama_token> ids(text.size() + 8);
    const int count = llama_tokenize(vocab_, text.data(), static_cast<int>(text.size()), ids.data(),
                                     static_cast<int>(ids.size()), first, true);
    if (count < 0) fail("the tokenizer does not take this text");
    ids.resize(static_cast<std::size_t>(count));
    return ids;
  }

  std::string piece(llama_token id) const {
    std::string text(64, '\0');
    const int size = llama_token_to_piece(vocab_, id, text.data(), static_cast<int>(text.size()), 0, true);
    text.resize(static_cast<std::size_t>(std::max(0, size)));
    return text;
  }

  [[nodiscard]] bool ends(llama_token id) const { return llama_vocab_is_eog(vocab_, id); }
  llama_token sample() { return llama_sampler_sample(sampler_.get(), context_.get(), -1); }
  [[nodiscard]] kvkeep::llama::Evictor& evictor() { return *evictor_; }

  /// A prompt, or the next turn of a chat, in batches.
  void feed(std::vector<llama_token> ids) {
    const auto most = static_cast<std::size_t>(llama_n_batch(context_.get()));
    if (!evictor_->keeper().knows(0)) evictor_->prompt(0, static_cast<std::int32_t>(ids.size()));
    for (std::size_t at = 0; at < ids.size() && interrupted == 0; at += most)
      decode(ids.data() + at, std::min(most, ids.size() - at));
  }

  void decode(llama_token* ids, std::size_t count) {
    const llama_batch batch = llama_batch_get_one(ids, static_cast<std::int32_t>(count));
    if (shifts_) make_room(static_cast<int>(count));
    const int status = shifts_ ? llama_decode(context_.get(), batch) : evictor_->decode(batch);
    if (status == 1)
      fail("the cache of " + std::to_string(llama_n_ctx(context_.get())) +
           " cells is full; allowed a larger --context, or a --policy with a smaller budget");
    if (status != 0) fail("llama_decode ended with " + std::to_string(status));
  }

  /// -ln p of a token after what was decoded.
  [[nodiscard]] double surprisal(llama_token id) const {
    const float* logits = llama_get_logits_ith(context_.get(), -1);
    const int size = llama_vocab_n_tokens(vocab_);
    const float largest = *std::max_element(logits, logits + size);
    double sum = 0;
    for (int i = 0; i < size; ++i) sum += std::exp(double{logits[i]} - largest);
    return std::log(sum) + largest - logits[id];
  }

  /// Streams an answer of at most `most` tokens; what it decoded.
  std::string answer(int most, bool print) {
    std::string text;
    for (int i = 0; i < most && interrupted == 0; ++i) {
      llama_token id = sample();
      if (ends(id)) break;
      const std::string shown = piece(id);
      text += shown;
      if (print) std::cout << shown << std::flush;
      if (i + 1 < most || print) decode(&id, 1);
    }
    return text;
  }

 private:
  /// llama.cpp's own way: the oldest half goes, but for four tokens, and the others move up.
  void make_room(int count) {
    const llama_memory_t memory = llama_get_memory(context_.get());
    const int held = llama_memory_seq_pos_max(memory, 0) + 1, kept = 4, gone = (held - kept) / 2;
    if (held + count <= static_cast<int>(llama_n_ctx(context_.get()))) return;
    llama_memory_seq_rm(memory, 0, kept, kept + gone);
    llama_memory_seq_add(memory, 0, kept + gone, -1, -gone);
  }

  const llama_vocab* vocab_;
  bool shifts_ = false;                              // no policy: context shift
  std::unique_ptr<kvkeep::llama::Evictor> evictor_;  // outlives the context
  Context context_;
  Sampler sampler_;
};

int cells_of(const Options& o, const llama_model* model) {
  return o.context > 0 ? o.context : llama_model_n_ctx_train(model);
}

void print_stats(kvkeep::llama::Evictor& evictor) {
  const kvkeep::llama::Spent& spent = evictor.spent();
  std::fprintf(stderr, "\n%s: %lld tokens seen, %zu cells held, %lld events; observing %.3f s, events %.3f s\n",
               std::string(evictor.keeper().policy().name()).c_str(),
               static_cast<long long>(evictor.keeper().logical_length(0)), evictor.cells(0).size(),
               static_cast<long long>(spent.cut), spent.observing, spent.events);
}

void generate(const Options& o) {
  const std::string prompt = o.prompt_file.empty() ? o.prompt : read_file(o.prompt_file);
  if (prompt.empty()) fail("the prompt is empty; allowed --prompt TEXT or --prompt-file FILE with text");
  const Model model = load(o);
  Engine engine(model.get(), o, o.policy, cells_of(o, model.get()));
  engine.feed(engine.tokenize(prompt, true));
  engine.answer(o.tokens, true);
  std::cout << '\n';
  if (o.stats) print_stats(engine.evictor());
}

void chat(const Options& o) {
  const Model model = load(o);
  const char* form = llama_model_chat_template(model.get(), nullptr);
  if (form == nullptr) fail("the model has no chat template; use generate");
  Engine engine(model.get(), o, o.policy, cells_of(o, model.get()));
  std::vector<std::pair<std::string, std::string>> said;
  std::size_t fed = 0;
  const auto rendered = [&](bool reply) {
    std::vector<llama_chat_message> messages;
    for (const auto& [role, text] : said) messages.push_back({role.c_str(), text.c_str()});
    std::vector<char> out(1 << 12);
    int size = 0;
    while ((size = llama_chat_apply_template(form, messages.data(), messages.size(), reply, out.data(),
                                             static_cast<int>(out.size()))) > static_cast<int>(out.size()))
      out.resize(static_cast<std::size_t>(size));
    if (size < 0) fail("llama.cpp does not know the model's chat template; use generate");
    return std::string(out.data(), static_cast<std::size_t>(size));
  };
  for (std::string line; interrupted == 0 && (std::cout << "> " << std::flush, std::getline(std::cin, line));) {
    if (line.empty()) continue;
    said.emplace_back("user", line);
    const std::string text = rendered(true);
    engine.feed(engine.tokenize(text.substr(fed), fed == 0));
    said.emplace_back("assistant", engine.answer(o.tokens, true));
    fed = rendered(false).size();
    std::cout << '\n';
  }
  if (o.stats) print_stats(engine.evictor());
}

/// Tokens/s behind a prompt of random tokens, every policy in a context of its own.
void bench(const Options& o) {
  const Model model = load(o);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
  std::vector<llama_token> prompt(static_cast<std::size_t>(o.prompt_tokens));
  std::uint32_t state = o.seed;
  for (llama_token& id : prompt) {
    state = state * 1664525u + 1013904223u;
    id = static_cast<llama_token>(state >> 8) % vocabulary;
  }
  std::printf(
      "%d prompt tokens, %d decoded\n\n| policy | prefill tok/s | decode tok/s | cells | events | observing | events' "
      "time |\n|---|---:|---:|---:|---:|---:|---:|\n",
      o.prompt_tokens, o.tokens);
  for (const std::string& policy : o.policies) {
    Engine engine(model.get(), o, policy, o.context > 0 ? o.context : o.prompt_tokens + o.tokens + 64);
    const auto begun = Clock::now();
    engine.feed(prompt);
    const double prefill = seconds_since(begun);
    const kvkeep::llama::Spent before = engine.evictor().spent();
    const auto decoding = Clock::now();
    for (int i = 0; i < o.tokens && interrupted == 0; ++i) {
      llama_token id = engine.sample();
      engine.decode(&id, 1);
    }
    const double decode = seconds_since(decoding);
    const kvkeep::llama::Spent& after = engine.evictor().spent();
    const auto cells = engine.evictor().cells(0);
    std::printf("| %s | %.1f | %.2f | %d | %lld | %.2f %% | %.2f %% |\n", policy.c_str(), o.prompt_tokens / prefill,
                o.tokens / decode, cells.empty() ? 0 : std::ranges::max(cells) + 1, static_cast<long long>(after.cut),
                100 * (after.observing - before.observing) / decode, 100 * (after.events - before.events) / decode);
    std::fflush(stdout);
    if (interrupted != 0) return;
  }
}

/// A long text, token by token: what each policy foretells, and how fast.
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
    auto begun = Clock::now();
    for (std::size_t i = 0; i < tokens && interrupted == 0; ++i) {
      llama_token id = ids[i];
      if (i > 0) sum += engine.surprisal(id);
      engine.decode(&id, 1);
      if ((i + 1) % part != 0) continue;
      const bool watched = engine.evictor().keeper().knows(0);
      std::printf("| %s | %zu | %.3f | %.1f | %zu | %d |\n", policy.c_str(), i + 1,
                  std::exp(sum / static_cast<double>(i + 1 == part ? part - 1 : part)),
                  static_cast<double>(part) / seconds_since(begun), watched ? engine.evictor().cells(0).size() : 0,
                  watched ? engine.evictor().next_position(0) : 0);
      std::fflush(stdout);
      sum = 0;
      begun = Clock::now();
    }
    if (interrupted != 0) return;
  }
}

/// Samples of `kvkeep eval --samples-out`: the prompt is cut as it ends, then comes the question.
void answer(const Options& o) {
  const Model model = load(o);
  std::ifstream in(o.samples);
  if (!in) fail("cannot read '" + o.samples + "'");
  std::vector<nlohmann::json> samples;
  for (std::string line; std::getline(in, line);) samples.push_back(nlohmann::json::parse(line));
  std::vector<int> parts;
  std::istringstream list(o.budgets);
  for (std::string one; std::getline(list, one, ',');) {
    if (!one.starts_with("1/") || std::atoi(one.c_str() + 2) < 1)
      fail("--budgets: given '" + one + "'; allowed parts of the prompt such as 1/4,1/8");
    parts.push_back(std::atoi(one.c_str() + 2));
  }
  std::printf("| policy | budget | task | samples | answered |\n|---|---:|---|---:|---:|\n");
  for (const std::string& policy : o.policies)
    for (const int part : policy == "full" ? std::vector<int>{1} : parts) {
      std::map<std::string, std::pair<double, int>> by_task;
      for (const nlohmann::json& sample : samples) {
        if (interrupted != 0) return;
        const auto prompt = sample.at("prompt").get<std::vector<llama_token>>();
        const auto question = sample.at("question").get<std::vector<llama_token>>();
        const int most = sample.at("max_new_tokens").get<int>();
        const auto all = static_cast<int>(prompt.size() + question.size()) + most + 8;
        const std::string budget = std::to_string(prompt.size() / static_cast<std::size_t>(part));
        const bool shift = policy == "shift";
        Engine engine(model.get(), o,
                      policy == "full" || shift ? policy : policy + ",prefill=cut,interval=1000000,budget=" + budget,
                      shift ? std::stoi(budget) + static_cast<int>(question.size()) + most + 8 : all);
        engine.feed(prompt);
        if (!question.empty()) engine.feed(question);
        std::string got = engine.answer(most, false);
        std::ranges::transform(got, got.begin(), [](unsigned char c) { return std::tolower(c); });
        double score = 0;
        const auto references = sample.at("references").get<std::vector<std::string>>();
        for (std::string wanted : references) {
          std::ranges::transform(wanted, wanted.begin(), [](unsigned char c) { return std::tolower(c); });
          score += got.find(wanted) != std::string::npos ? 1 : 0;
        }
        auto& [sum, count] = by_task[sample.at("task").get<std::string>()];
        sum += score / static_cast<double>(std::max<std::size_t>(1, references.size()));
        ++count;
      }
      for (const auto& [task, scores] : by_task)
        std::printf("| %s | 1/%d | %s | %d | %.1f %% |\n", policy.c_str(), part, task.c_str(), scores.second,
                    100 * scores.first / scores.second);
      std::fflush(stdout);
    }
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"llama.cpp with a kvkeep policy over its KV cache. `kvkeep policies` lists policies and their options."};
  app.require_subcommand(1);
  app.footer(
      "Example:\n  kvkeep-llama generate -m model.gguf --prompt-file book.txt --policy tova,budget=1024 --stats");
  const auto common = [&](CLI::App* sub) {
    sub->add_option("-m,--model", o.model, "GGUF file")->required()->check(CLI::ExistingFile);
    sub->add_option("-c,--context", o.context,
                    "cells of the cache; default: the length that the model was trained for");
    sub->add_option("-n,--tokens", o.tokens, "tokens to decode")->check(CLI::Range(1, 1 << 30))->capture_default_str();
    sub->add_option("-t,--threads", o.threads, "threads of llama.cpp; default: its own choice");
    sub->add_option("-b,--batch", o.batch, "tokens of a prompt that run at once")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    sub->add_option("--positions", o.positions,
                    "text: tokens keep theirs; cache: counted within the cache, for endless text")
        ->check(CLI::IsMember({"text", "cache"}))
        ->capture_default_str();
    sub->add_option("--cache-type", o.cache_type, "f32, f16, bf16, q8_0 or q4_0")->capture_default_str();
    return sub;
  };
  const auto sampled = [&](CLI::App* sub) {
    sub->add_option("--policy", o.policy, "for example tova,budget=1024 or ams-tova,budget=1024,share=union")
        ->capture_default_str();
    sub->add_option("--temperature", o.temperature, "0: the likeliest token")->capture_default_str();
    sub->add_option("--seed", o.seed, "of sampling")->capture_default_str();
    sub->add_flag("--stats", o.stats, "cells, events and their time, after the text");
    return sub;
  };
  CLI::App* one = sampled(common(app.add_subcommand("generate", "Continues a text.")));
  one->add_option("-p,--prompt", o.prompt, "text");
  one->add_option("-f,--prompt-file", o.prompt_file, "file with text")->check(CLI::ExistingFile);
  CLI::App* talk = sampled(common(app.add_subcommand("chat", "Talks, one line a turn, as long as you like.")));
  CLI::App* rate = common(app.add_subcommand("bench", "Tokens/s behind a long prompt, one row per policy."));
  rate->add_option("--prompt-tokens", o.prompt_tokens, "random tokens before the decoded ones")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  rate->add_option("--policy", o.policies, "one per row; default: full, tova,budget=1024");
  CLI::App* long_text =
      common(app.add_subcommand("perplexity", "Feeds a long text token by token, ten rows per policy."));
  long_text->add_option("-f,--text", o.text, "file with text")->required()->check(CLI::ExistingFile);
  CLI::App* asked = common(app.add_subcommand("answer", "Answers the samples of `kvkeep eval --samples-out`."));
  asked->add_option("--samples", o.samples, "file with a sample per line")->required()->check(CLI::ExistingFile);
  asked->add_option("--budgets", o.budgets, "parts of the prompt")->capture_default_str();
  for (CLI::App* sub : {long_text, asked})
    sub->add_option("--policy", o.policies, "several rows; shift: llama.cpp's context shift, without a policy")
        ->required();
  CLI11_PARSE(app, argc, argv);
  if (o.policies.empty()) o.policies = {"full", "tova,budget=1024"};
  std::signal(SIGINT, [](int) { interrupted = 1; });
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  try {
    if (*one) generate(o);
    if (*talk) chat(o);
    if (*rate) bench(o);
    if (*long_text) perplexity(o);
    if (*asked) answer(o);
  } catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << "kvkeep-llama: " << error.what() << '\n';
    return 2;
  }
  return interrupted != 0 ? 130 : 0;
}
