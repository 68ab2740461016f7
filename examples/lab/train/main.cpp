// SPDX-License-Identifier: Apache-2.0
/// kvkeep_train: trains the small model of examples/model, or measures a trained one.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "evaluation.h"
#include "hf_folder.h"
#include "kvkeep/core/error.h"
#include "llama.h"
#include "program.h"
#include "training.h"

namespace {

constexpr const char* kSchedule =
    "32:128:400,128:32:500,256:16:500,512:10:500,768:6:300,1024:5:300,512:10:200,1024:5:300";

constexpr const char* kExamples = R"(
Examples:
  kvkeep_train --out model                      train, then write model/ in the Hugging Face layout
  kvkeep_train --out model --resume             continue after Ctrl-C or a crash
  kvkeep_train --eval model --lengths 512,1024  measure look-ups with the full and with evicted caches
)";

int run(int argc, char** argv) {
  CLI::App app("Trains a small Llama on the tasks of kvkeep, on the CPU.");
  app.footer(kExamples);
  std::string out, eval, schedule = kSchedule;
  train::LlamaShape shape;
  train::TrainingOptions training;
  train::EvaluationOptions evaluation;
  app.add_option("--out", out, "folder to write: the model, and the checkpoint while it trains");
  app.add_option("--eval", eval, "folder of a trained model to measure; nothing is written")->excludes("--out");
  app.add_flag("--resume", training.resume, "continue from the checkpoint in --out");
  app.add_option("--seed", training.seed, "seed of the weights and the data")->capture_default_str();
  app.add_option("--schedule", schedule, "stages as length:batch:steps")->capture_default_str();
  app.add_option("--lr", training.learning_rate, "highest learning rate")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--layers", shape.layers, "layers of the model")->capture_default_str()->check(CLI::Range(1, 64));
  app.add_option("--threads", training.threads, "CPU threads")->capture_default_str()->check(CLI::Range(1, 1024));
  app.add_option("--checkpoint-every", training.checkpoint_every, "steps between two checkpoints")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--lengths", evaluation.lengths, "tokens per sample of --eval")->delimiter(',')->capture_default_str();
  app.add_option("--samples", evaluation.samples, "fresh samples per task and length of --eval")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--first-seed", evaluation.first_seed, "first seed of the samples of --eval")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  KVKEEP_REQUIRE(!out.empty() || !eval.empty(), "nothing to do; given neither --out nor --eval; allowed one of them");

  train::keep_freed_memory(1);
  torch::set_num_threads(training.threads);
  train::Llama model(shape, training.seed);
  if (!eval.empty()) {
    train::read_hf_weights(eval, model);
    train::print_accuracy(model, evaluation);
    train::print_attention(model, evaluation.lengths.front(), evaluation.first_seed);
    return 0;
  }

  training.schedule = train::parse_schedule(schedule);
  training.checkpoint = out + "/checkpoint.pt";
  std::filesystem::create_directories(out);
  if (!train::train_model(model, training)) {
    std::fprintf(stderr, "stopped; continue with --resume\n");
    return 130;
  }
  int32_t longest = 0;
  for (const train::Stage& stage : training.schedule) longest = std::max(longest, stage.length);
  train::write_hf_folder(out, model, longest);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return train::run_program("kvkeep_train", run, argc, argv); }
