// SPDX-License-Identifier: Apache-2.0
/// kvkeep_train_router: trains a router and rank gates for folded spans on a frozen small model, or measures trained
/// ones.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "comparison.h"
#include "hf_folder.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/run_files.h"
#include "kvkeep/memory/router.h"
#include "llama.h"
#include "program.h"
#include "router_training.h"

namespace {

namespace fs = std::filesystem;

constexpr const char* kExamples = R"(
Examples:
  train, then write the router:
    kvkeep_train_router --model examples/model --out small.router.safetensors
  continue after Ctrl-C or a crash:
    kvkeep_train_router --model examples/model --out small.router.safetensors --resume
  measure what it opens and what that is worth, beside the rules that need no training:
    kvkeep_train_router --model examples/model --compare small.router.safetensors

What happens in a step: the frozen model reads a sample; quiet runs of its prompt fold into spans; at the positions
that look farthest back, a student runs the same layers over folded spans, and opens those whose relevance is above a
threshold. It learns to answer as the model does (distill), to open the spans that the model's attention goes to
(zoom), to drop components that do not matter (recon), and to open little (budget, which grows over the first half of
the steps).
At the end every head gets the threshold at which what opens is worth --price: adjust this; a higher price opens less.
)";

struct Options {
  std::string model, out, compare, schedule = "512:4:200,768:4:100,1024:4:100", fold = "prompt";
  int64_t inner = 32;
  int32_t samples = 32;
  std::vector<double> entries{5, 10, 20, 40, 80};
  train::RouterTrainingOptions training;

  /// Weights for the small model: it has a dozen heads and a few dozen spans, all of which the budget counts, and the
  /// published 0.1 would close every span at once.
  Options() {
    training.learning_rate = 0.01;
    training.losses.budget_weight = 5e-5, training.losses.rank_weight = 0.2;
    training.losses.coverage = 0.5, training.losses.positive_weight = 5;
    training.lesson.segmenter = {.recent = 64, .max_span = 16};
  }
};

void add_options(CLI::App& app, Options& o) {
  train::RouterTrainingOptions& t = o.training;
  kvkeep::SegmenterOptions& cut = t.lesson.segmenter;
  app.add_option("--model", o.model, "folder of the model, which stays as it is")->required();
  app.add_option("--out", o.out, "router file to write; while it trains, FILE.checkpoint beside it");
  app.add_option("--compare", o.compare, "router file to measure on held-out samples; nothing is written")
      ->excludes("--out");
  app.add_flag("--resume", t.resume, "continue from the checkpoint beside --out, to the same bits");
  app.add_option("--seed", t.seed, "seed of the first parameters and the data")->capture_default_str();
  app.add_option("--schedule", o.schedule, "stages as length:batch:steps")->capture_default_str();
  app.add_option("--lr", t.learning_rate, "highest learning rate")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--weight-decay", t.weight_decay, "weight decay of matrices")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--warmup", t.warmup, "share of the steps in which the learning rate rises")->capture_default_str();
  app.add_option("--threads", t.threads, "CPU threads; they do not change a bit")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--checkpoint-every", t.checkpoint_every, "steps between two checkpoints")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--log-every", t.log_every, "steps between two lines of progress")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--stop-after", t.stop_after, "steps of this run, after which it stops as Ctrl-C would; 0: never")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--check-every", t.check_every,
                 "steps between two checks on held-out samples; the best result is written; 0: never, the last is")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--held-out", t.held_out, "held-out samples during training")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--patience", t.patience, "stop after this many checks without a better loss; 0: never")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--router-dim", o.inner, "d', rows of a head's projection")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_option("--max-rank", t.lesson.max_rank, "components that have gates")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_option("--fold", o.fold, "what folds: the prompt, or the trace after it too")
      ->capture_default_str()
      ->check(CLI::IsMember({"prompt", "all"}));
  app.add_option("--alpha", cut.alpha, "a token is an anchor if its surprisal is above mean + alpha * deviation")
      ->capture_default_str();
  app.add_option("--sink", cut.sink, "oldest tokens that never fold")->capture_default_str();
  app.add_option("--recent", cut.recent, "newest tokens of each query that are not folded")->capture_default_str();
  app.add_option("--min-span", cut.min_span, "shorter runs stay as they are")->capture_default_str();
  app.add_option("--max-span", cut.max_span, "longer runs are cut")->capture_default_str();
  app.add_option("--candidates", t.lesson.candidates, "evenly spaced positions of a sample that are examined")
      ->capture_default_str();
  app.add_option("--positions", t.lesson.positions, "how many of them are trained on: those that look farthest back")
      ->capture_default_str();
  app.add_option("--zoom-weight", t.losses.zoom_weight,
                 "weight of the loss for spans that should open and do not, and vice versa")
      ->capture_default_str();
  app.add_option("--recon-weight", t.losses.recon_weight, "weight of the loss for what gates leave out")
      ->capture_default_str();
  app.add_option("--budget-weight", t.losses.budget_weight, "weight of each open span and query, in the second half")
      ->capture_default_str();
  app.add_option("--rank-weight", t.losses.rank_weight, "weight of a kept component, relative to an open span")
      ->capture_default_str();
  app.add_option("--positive-weight", t.losses.positive_weight, "weight of spans that should open")
      ->capture_default_str();
  app.add_option("--coverage", t.losses.coverage, "share of the model's attention to spans that those hold")
      ->capture_default_str();
  app.add_option("--temperature", t.losses.temperature, "temperature of the sigmoid that replaces opening in gradients")
      ->capture_default_str();
  app.add_option("--price", t.price,
                 "price of an open span, in attention: at the end every head gets the threshold at which what opens is "
                 "worth it; 0: thresholds stay as trained")
      ->capture_default_str();
  app.add_option("--samples", o.samples, "held-out samples for --compare")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--entries", o.entries, "--compare: entries that a query may open on average, the same for all rules")
      ->delimiter(',')
      ->capture_default_str();
}

int run(int argc, char** argv) {
  CLI::App app("Trains a router and rank gates for folded spans (SeKV) on a small frozen model, on the CPU.");
  app.footer(kExamples);
  Options o;
  add_options(app, o);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  KVKEEP_REQUIRE(!o.out.empty() || !o.compare.empty(),
                 "nothing to do; given neither --out nor --compare; allowed one of them");
  o.training.checkpoint = o.out + ".checkpoint";
  kvkeep::io::RunFiles files;
  files.reads("--model", o.model);
  files.reads("--compare", o.compare);
  if (!o.out.empty())
    for (const char* end : {"", ".checkpoint", ".checkpoint.part"})
      files.writes(kvkeep::text("--out", *end == 0 ? "" : " with ", end), o.out + end);
  files.writes_streams();
  o.training.schedule = train::parse_schedule(o.schedule);
  o.training.lesson.fold_all = o.fold == "all";
  kvkeep::require_no_problems("options", o.training.problems());

  train::keep_freed_memory(2);
  torch::set_num_threads(1);
  train::Llama model(train::LlamaShape{}, 0);
  train::read_hf_weights(o.model, model);
  for (torch::Tensor& parameter : model.parameters()) parameter.requires_grad_(false);
  if (!o.compare.empty()) {
    const kvkeep::Routing routing = kvkeep::Routing::read(o.compare);
    train::print_comparison(model, train::held_out_lessons(model, o.training, o.samples), routing, o.entries,
                            o.training.threads);
    return 0;
  }

  const fs::path folder = fs::absolute(o.out).parent_path();
  KVKEEP_REQUIRE(fs::is_directory(folder), "--out: there is no folder '", folder.string(), "' for '", o.out,
                 "'; allowed a file in an existing folder");
  train::RouterParameters parameters(model.shape(), o.inner, o.training.lesson.max_rank, o.training.seed);
  if (!train::train_router(model, parameters, o.training)) {
    std::fprintf(stderr, "stopped; continue with --resume\n");
    return 130;
  }
  kvkeep::write_routing(o.out, parameters.stored(),
                        {{"model_name", fs::weakly_canonical(o.model).filename().string()},
                         {"training", kvkeep::text("seed ", o.training.seed, ", ", o.training.settings())}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return train::run_program("kvkeep_train_router", run, argc, argv); }
