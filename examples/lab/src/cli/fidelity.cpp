// SPDX-License-Identifier: Apache-2.0
// kvkeep fidelity: feeds what the full cache generated to caches that policies cut.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>

#include "commands.h"
#include "fed_tables.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kFidelityExamples = R"(
Examples:
  kvkeep fidelity --model SmolLM2.gguf --chat --prompt "Write a story." --policy tova --budgets 256,128
  kvkeep fidelity --model SmolLM2.gguf --prompt "One day" --prompt "Tides are" --budgets 256 --policy tova \
      --policy snapkv
  kvkeep fidelity --model SmolLM2.gguf --prompt-file article.txt --policy tova --budgets 256 --protect-prompt
  kvkeep fidelity --model SmolLM2.gguf --prompt-file article.txt --new-tokens 2048 --budgets 512,256 -o csv

The full cache generates --new-tokens tokens after each prompt, past the model's end tokens unless --stop: greedily, or
with --temperature as kvkeep generate does (the second prompt with the next --sampling-seed, and so on).
They are fed again under every policy, one by one and in step with the full cache. KL is the mean of KL(full ||
policy) over the next-token distributions, in nats; "same token" is the share of tokens for which both have the same
argmax. A second table has both for each 256 tokens. Prompts run once for all policies and are cut at their end
(prefill=cut, unless a policy says otherwise).

Only tokens after the first event of every policy count in the first table, the same tokens for all; the second has
all of them. CSV and JSON have both (part: counted, and bin), and the NLL of the tokens. Intervals are at 95 %,
bootstrap over prompts; they need two prompts or more. --against adds the difference to another policy, paired by
prompt.

--protect-prompt: in the row `kept` the prompt stays. It counts towards the budget; if it does not fit, the budget
becomes the prompt plus `recent` slots. A budget on top of the prompt: tova,protect_prompt=true,budget_counts=decoded.
--diagnostics adds how kept sets change, which regions lose everything, what is left of each part of the text and, from
the first --diagnostics-samples of them, what a full cache's attention would have read.
(examples/lab/docs/diagnostics.md)
The caches of all policies are held at once, for --batch prompts.
)";

struct FidelityOptions {
  ModelOptions model;
  OutputOptions output;
  ContestOptions contests;
  FedDiagnostics diagnostics;
  std::vector<std::string> prompts;
  TextReading reading;
  SamplingOptions sampling;
  std::int32_t new_tokens = 1024, batch = 4;
  bool stop_at_end = false;
};

// What the full cache writes after each prompt.
std::vector<FedText> generate(lm::Decoder& decoder, const FidelityOptions& o,
                              const std::vector<std::vector<std::int32_t>>& prompts, Progress& progress) {
  std::vector<lm::Request> requests;
  for (const std::vector<std::int32_t>& prompt : prompts)
    requests.push_back({.prompt = prompt,
                        .new_tokens = o.new_tokens,
                        .stop_at_end = o.stop_at_end,
                        .sampling = o.sampling.of(requests.size())});
  lm::GeneratorOptions options{.places = std::min<std::int64_t>(o.batch, static_cast<std::int64_t>(prompts.size())),
                               .cache_dtype = o.model.dtype(),
                               .accelerator = o.model.device.accelerator()};
  options.hooks.on_step = [&](std::int64_t predicted) { progress.advance(predicted); };
  progress.label("the full cache generates");
  lm::GenerationRun run = lm::generate(decoder, make_policy("full"), std::move(requests), std::move(options));
  std::vector<FedText> texts;
  for (std::size_t i = 0; i < prompts.size(); ++i) texts.push_back({prompts[i], std::move(run.completions[i].tokens)});
  return texts;
}

void run(const FidelityOptions& o) {
  KVKEEP_REQUIRE(!o.prompts.empty(), "fidelity: there is no prompt; allowed --prompt and --prompt-file, once or more");
  lm::check_sampling(o.sampling.sampling);
  if (o.diagnostics.wanted) require_host_memory(o.model, "fidelity");
  ContestOptions options = o.contests;
  const std::vector<Contest> all = fed_contests(options, o.new_tokens);
  const lm::TextModel model = lm::TextModel::open(o.model.folder);
  std::vector<std::vector<std::int32_t>> prompts;
  for (const std::string& said : o.prompts) prompts.push_back(o.reading.ids(model, said));
  lm::Decoder decoder = o.model.open();
  warn(all, o.output.quiet);
  Progress progress(static_cast<std::int64_t>((all.size() + 1) * prompts.size()) * o.new_tokens, o.output.quiet);
  const std::vector<FedText> texts = generate(decoder, o, prompts, progress);
  const std::vector<Followed> followed = follow(decoder, o.model, all, texts, o.batch, progress, o.diagnostics);
  progress.clear();
  const FedResults results(options, all, followed);
  results.show(o.output, "prompts", [&] {
    return text(results.fidelity_table().markdown(), "\n", prompts.size(), prompts.size() == 1 ? " prompt" : " prompts",
                ". ", o.sampling.said("The texts are"), results.counted(), "95 %: bootstrap over prompts.\n",
                "\nKL and same token, by tokens after the prompt:\n\n", results.bin_table().markdown());
  });
}

}  // namespace

Run add_fidelity(CLI::App& app) {
  CLI::App* sub = app.add_subcommand(
      "fidelity", "measure policies on what the full cache generates: how far each is from it, token by token");
  auto o = std::make_shared<FidelityOptions>();
  o->model.add(*sub);
  o->model.device.add(*sub);
  sub->add_option_function<std::string>(
         "--prompt", [o](const std::string& said) { o->prompts.push_back(said); }, "repeatable: text")
      ->trigger_on_parse()
      ->check(not_empty())
      ->option_text("TEXT");
  as_input(sub->add_option_function<std::string>(
               "--prompt-file",
               [o](const std::string& file) { o->prompts.push_back(io::read_file(file, "--prompt-file")); },
               "repeatable: text in a file, taken verbatim"))
      ->trigger_on_parse()
      ->option_text("FILE");
  o->reading.add(*sub);
  o->sampling.add(*sub);
  sub->add_option("--new-tokens", o->new_tokens, "tokens that the full cache generates after each prompt")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N [1024]");
  sub->add_flag("--stop", o->stop_at_end, "stop after an end token of the model");
  o->contests.add(*sub, "full, streaming, tova, ams-tova, snapkv", "new tokens/4,new tokens/8");
  sub->add_option("--batch", o->batch, "prompts decoded at once")->check(CLI::Range(1, 4096))->option_text("N [4]");
  o->diagnostics.add(*sub);
  o->output.add(*sub);
  sub->footer(kFidelityExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
