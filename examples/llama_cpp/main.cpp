// SPDX-License-Identifier: Apache-2.0
// kvkeep-llama: generates and chats with llama.cpp under any kvkeep policy (engine.h), and measures it (measure.h).

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvkeep/io/run_files.h"
#include "measure.h"

namespace {

void print_stats(Engine& engine) {
  if (engine.evictor() == nullptr) return;
  const kvkeep::llama::Evictor& evictor = *engine.evictor();
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
  if (o.stats) print_stats(engine);
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
    engine.end_turn();
    fed = rendered(false).size();
    std::cout << '\n';
  }
  if (o.stats) print_stats(engine);
}

/// Nothing is written over what is read: a policy may name a file of its own, and stdout may lead to one.
void check_files(const Options& o) {
  kvkeep::io::RunFiles files;
  files.reads("--model", o.model);
  files.reads("--prompt-file", o.prompt_file);
  files.reads("--text", o.text);
  files.reads("--samples", o.samples);
  files.writes("--samples-out", o.samples_out);
  std::vector<std::string> policies = o.policies;
  policies.push_back(o.policy);
  for (const std::string& policy : policies) files.declare("--policy", kvkeep::files_of_policy(policy));
  files.writes_streams();
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
    sub->add_option(
        "-c,--context", o.context,
        "cells of the cache; default: the length that the model was trained for; of `bench` and `answer`: as "
        "many as the prompt and what follows it need");
    sub->add_option("-n,--tokens", o.tokens, "tokens to decode")->check(CLI::Range(1, 1 << 30))->capture_default_str();
    sub->add_option("-t,--threads", o.threads, "threads of llama.cpp; default: its own choice")
        ->check(CLI::Range(0, static_cast<int>(16 * std::max(1U, std::thread::hardware_concurrency()))));
    sub->add_option("-b,--batch", o.batch, "tokens of a prompt that run at once")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    sub->add_option("--positions", o.positions,
                    "text: tokens keep theirs; cache: counted within the cache, for endless text")
        ->check(CLI::IsMember({"text", "cache"}))
        ->capture_default_str();
    sub->add_option("--cache-type", o.cache_type, "f32, f16, bf16, q8_0 or q4_0")->capture_default_str();
    sub->add_option("--gpu-layers,--ngl", o.gpu_layers,
                    "layers whose weights and cache are on a GPU, where llama.cpp was built for one; 999: all")
        ->check(CLI::Range(0, 1 << 16))
        ->capture_default_str();
    sub->add_option(
           "--device", o.device,
           "where events run. cuda: on GPU 0, over the cache that all layers have there; cpu: over host memory, "
           "or with share=union over copies of a GPU's keys; default of `check`: cuda")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    sub->add_option("--extra-buffers", o.extra_buffers,
                    "llama.cpp's extra buffer types for weights (AMX, repacked): on, off, or auto, which tries once")
        ->check(CLI::IsMember({"auto", "on", "off"}))
        ->capture_default_str();
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
  rate->add_option("--policy", o.policies,
                   "one per row; alone: without an evictor; no-flash:POLICY: without "
                   "flash attention; default: full, tova,budget=1024");
  rate->add_option("--rounds", o.rounds, "times that each policy runs, in turns; rows are medians")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  CLI::App* forever = common(app.add_subcommand("endless", "Generates without an end, and says what that costs."));
  forever->add_option("-f,--text", o.text, "file with the text that it begins with")->check(CLI::ExistingFile);
  forever->add_option("--every", o.every, "tokens per row")->check(CLI::Range(1, 1 << 24))->capture_default_str();
  forever->add_option("--late", o.late, "tokens before the end, where a second fact is told")->capture_default_str();
  forever->add_option("--sight", o.sight,
                      "tokens that the full model sees when it judges the end; default: as many as it was trained for");
  forever->add_option("--temperature", o.temperature, "0: the likeliest token")->capture_default_str();
  forever->add_option("--seed", o.seed, "of sampling")->capture_default_str();
  forever->add_flag("--hold", o.hold_prompt, "pins the fact that is told first; a shift keeps it as well");
  CLI::App* long_text =
      common(app.add_subcommand("perplexity", "Feeds a long text token by token, ten rows per policy."));
  long_text->add_option("-f,--text", o.text, "file with text")->required()->check(CLI::ExistingFile);
  CLI::App* asked = common(app.add_subcommand("answer", "Answers the samples of `kvkeep eval --samples-out`."));
  asked->add_option("--samples", o.samples, "file with a sample per line")->required()->check(CLI::ExistingFile);
  asked->add_option("--budgets", o.budgets, "parts of the prompt, or cells")->capture_default_str();
  asked->add_option("--samples-out", o.samples_out, "write the samples again, with these answers in place of theirs");
  CLI::App* compared = common(app.add_subcommand(
      "check", "Runs a text over a cache on the GPU and over one in host memory, and compares slots and logits."));
  compared->add_option("--prompt-tokens", o.prompt_tokens, "random tokens before the decoded ones")
      ->check(CLI::Range(1, 1 << 24));
  compared->add_option("--policy", o.policies, "one per row; default: five, of each kind");
  for (CLI::App* sub : {forever, long_text, asked})
    sub->add_option("--policy", o.policies, "several rows; shift: llama.cpp's context shift, without a policy")
        ->required();
  CLI11_PARSE(app, argc, argv);
  if (*compared) {
    if (compared->count("--device") == 0) o.device = "cuda";
    if (compared->count("--prompt-tokens") == 0) o.prompt_tokens = 1000;
    if (o.policies.empty())
      o.policies = {"streaming,budget=256,interval=32", "tova,budget=256,interval=32",
                    "tova,budget=256,interval=32,share=union", "keydiff,budget=256,interval=32",
                    "ams-tova,budget=256,interval=32"};
  }
  if (o.policies.empty()) o.policies = {"full", "tova,budget=1024"};
  kvkeep::io::leave_no_unfinished_files();
  std::signal(SIGINT, [](int) { interrupted = 1; });
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(kvkeep::escaped(text, "\n").c_str(), stderr);
      },
      nullptr);
  try {
    check_files(o);
    if (*one) generate(o);
    if (*talk) chat(o);
    if (*rate) bench(o);
    o.endless = forever->parsed();
    if (*forever) endless(o);
    if (*long_text) perplexity(o);
    if (*asked) answer(o);
    if (*compared && !check(o)) return 1;
  } catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << "kvkeep-llama: " << kvkeep::escaped(error.what()) << '\n';
    return 2;
  }
  return interrupted != 0 ? 130 : 0;
}
