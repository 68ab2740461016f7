// SPDX-License-Identifier: Apache-2.0
// kvkeep perplexity: how well a text is predicted, token by token, through a cache that a policy cuts.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>

#include "commands.h"
#include "fed_tables.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvlab/text_model.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kPerplexityExamples = R"(
Examples:
  kvkeep perplexity --model SmolLM2.gguf --text prose.txt
  kvkeep perplexity --model SmolLM2.gguf --text prose.txt --texts 16 --budgets 512,256 --policy tova --policy random
  kvkeep perplexity --model SmolLM2.gguf --text prose.txt --policy tova --policy ams-tova --budgets 256 --against tova
  kvkeep perplexity --model SmolLM2.gguf --text prose.txt --policy tova --budgets 256 --protect-prompt -o csv

Texts of --length tokens are cut out of the file at --texts places, evenly spaced. The first --prompt tokens of each
run as its prompt, once for all policies, and are cut at their end (prefill=cut, unless a policy says otherwise). The
others are fed one by one, and -ln p of each is measured before it enters. Policies run in step with the full cache,
which is always in the table. KL is the mean of KL(full || policy) over the next-token distributions, in nats; "same
token" is the share of tokens for which both have the same argmax.

Only tokens after the first event of every policy count, the same tokens for all: a policy with a large budget, whose
first event comes late, leaves fewer tokens to count for the others too. CSV and JSON have these sums (part: counted)
and the curve over all tokens, a row for each 256 of them (part: bin). Intervals are at 95 %, bootstrap over texts;
they need two texts or more. --against adds the difference to another policy, paired by text.

--protect-prompt: in the row `kept` the prompt stays. It counts towards the budget; if it does not fit, the budget
becomes the prompt plus `recent` slots. A budget on top of the prompt: tova,protect_prompt=true,budget_counts=decoded.
--diagnostics adds how kept sets change, which regions lose everything, what is left of each part of the text and, from
the first --diagnostics-samples of them, what a full cache's attention would have read.
(examples/lab/docs/diagnostics.md)
The caches of all policies are held at once, for --batch texts.
)";

struct PerplexityOptions {
  ModelOptions model;
  OutputOptions output;
  ContestOptions contests;
  FedDiagnostics diagnostics;
  std::string text;
  std::int32_t length = 2048, prompt = 0, texts = 4, batch = 4;
};

std::vector<FedText> cut(const PerplexityOptions& o, std::int32_t prompt) {
  const std::string file = io::read_file(o.text, "--text");
  const lm::Tokenizer tokenizer = lm::TextModel::open(o.model.folder).tokenizer;
  const std::vector<std::int32_t> ids = tokenizer.encode(file, lm::SpecialTokens::plain, false);
  std::vector<std::int32_t> begin;
  if (tokenizer.adds_bos()) begin.push_back(tokenizer.bos().value());
  const std::size_t own = static_cast<std::size_t>(o.length) - begin.size(),
                    apart = ids.size() / static_cast<std::size_t>(o.texts);
  KVKEEP_REQUIRE(own <= apart, "--text: ", o.text, " has ", ids.size(), " tokens; given ", o.texts, " texts of ", own,
                 "; allowed texts that do not overlap");
  std::vector<FedText> texts;
  for (std::size_t i = 0; i < static_cast<std::size_t>(o.texts); ++i) {
    std::vector<std::int32_t> all = begin;
    all.insert(all.end(), ids.begin() + static_cast<std::ptrdiff_t>(i * apart),
               ids.begin() + static_cast<std::ptrdiff_t>(i * apart + own));
    texts.push_back({{all.begin(), all.begin() + prompt}, {all.begin() + prompt, all.end()}});
  }
  return texts;
}

void run(const PerplexityOptions& o) {
  const std::int32_t prompt = o.prompt > 0 ? o.prompt : std::max(o.length / 4, 1);
  KVKEEP_REQUIRE(prompt < o.length, "--prompt: ", prompt, " tokens of a text of ", o.length, "; allowed 1 to ",
                 o.length - 1);
  if (o.diagnostics.wanted) require_host_memory(o.model, "perplexity");
  ContestOptions options = o.contests;
  const std::vector<Contest> all = fed_contests(options, o.length);
  const std::vector<FedText> texts = cut(o, prompt);
  lm::Decoder decoder = o.model.open();
  warn(all, o.output.quiet);
  Progress progress(static_cast<std::int64_t>(all.size()) * o.texts * (o.length - prompt - 1), o.output.quiet);
  const std::vector<Followed> followed = follow(decoder, o.model, all, texts, o.batch, progress, o.diagnostics);
  progress.clear();
  const FedResults results(options, all, followed);
  results.show(o.output, "texts", [&] {
    return text(results.perplexity_table().markdown(), "\n", o.texts, o.texts == 1 ? " text" : " texts", " of ",
                o.length, " tokens, prompts of ", prompt, ". ", results.counted(), "95 %: bootstrap over texts.\n");
  });
}

}  // namespace

Run add_perplexity(CLI::App& app) {
  CLI::App* sub = app.add_subcommand(
      "perplexity", "measure policies on a text: how well each token is predicted, and how far from the full cache");
  auto o = std::make_shared<PerplexityOptions>();
  o->model.add(*sub);
  o->model.device.add(*sub);
  as_input(sub->add_option("--text", o->text, "the text to predict"))->required()->option_text("FILE");
  sub->add_option("--length", o->length, "tokens of a text, its prompt included")
      ->check(CLI::Range(2, 1 << 24))
      ->option_text("N [2048]");
  sub->add_option("--prompt", o->prompt, "how many of them run as its prompt")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N [length/4]");
  sub->add_option("--texts", o->texts, "texts to cut out of the file")
      ->check(CLI::Range(1, 1 << 20))
      ->option_text("N [4]");
  o->contests.add(*sub, "full, streaming, tova, ams-tova, snapkv");
  sub->add_option("--batch", o->batch, "texts decoded at once")->check(CLI::Range(1, 4096))->option_text("N [4]");
  o->diagnostics.add(*sub);
  o->output.add(*sub);
  sub->footer(kPerplexityExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
