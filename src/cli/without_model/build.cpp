#include "build.h"

#include "kvkeep/core/error.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kHowToGetThem =
    "this kvkeep was built without the model, which needs LibTorch; build kvkeep from its sources with LibTorch "
    "(README.md, \"Linking\")";

}  // namespace

std::vector<Run> add_commands(CLI::App& app) {
  std::vector<Run> runs{add_policies(app), add_plan(app), add_replay(app), add_doctor(app)};
  for (const char* name : {"generate", "tokens", "eval", "perplexity", "fidelity", "record", "calibrate"}) {
    app.add_subcommand(name, text(name, ": ", kHowToGetThem))->prefix_command()->group("")->footer("");
    runs.emplace_back([name] { refuse<Unsupported>(name, ": ", kHowToGetThem); });
  }
  return runs;
}

const char* main_examples() {
  return R"(
Built without the model: generate, tokens, eval, perplexity, fidelity, record and calibrate need LibTorch. To have them,
build kvkeep from its sources with LibTorch (README.md, "Linking").

Examples:
  kvkeep policies                                           the policies to choose from
  kvkeep policies ams-tova                                  its options with defaults and ranges
  kvkeep plan --shape qwen7b --policy ams-tova,budget=1024 --batch 16 --length 32768
  kvkeep replay event.safetensors --policy ams-tova,budget=96,interval=32 --out kept.safetensors
)";
}

void prepare(const CLI::App&, char**) {}

void set_threads(int threads) {
  KVKEEP_REQUIRE_AS(Unsupported, threads <= 1,
                    "--threads: this kvkeep was built without LibTorch, whose threads it uses; "
                    "given ",
                    threads, "; allowed 0 and 1");
}

trace::Result replay_with_model(const std::string& kind, const io::SafetensorsFile& file, const std::filesystem::path&,
                                std::unique_ptr<KVPolicy>) {
  refuse<Unsupported>(file.where(), ": a trace of kind \"", kind, "\" runs a model; ", kHowToGetThem,
                      "; allowed event, prefill, span");
}

std::vector<Finding> findings_of_build() {
  return {{"LibTorch", "not in this build: it runs no model, on one thread"}, {"CUDA", "not in this build"}};
}

std::string reason(const std::exception& error) { return error.what(); }

}  // namespace kvkeep::cli
