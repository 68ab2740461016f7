// SPDX-License-Identifier: Apache-2.0
#include "commands.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <regex>
#include <string_view>
#include <thread>

#include "device.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/torch.h"
#include "kvkeep/version.h"
#include "kvlab/decoder_trace.h"
#include "kvlab/published_calibration.h"
#include "kvlab/router_training.h"
#include "kvlab/span_trace.h"
#include "model_options.h"
#include "oracle.h"

namespace kvkeep::cli {
namespace {

std::string first_match(const std::string& text, const char* pattern, const char* otherwise) {
  std::smatch found;
  return std::regex_search(text, found, std::regex(pattern)) ? found[1].str() : std::string(otherwise);
}

Finding torch_finding() {
  const std::string loaded = first_match(at::show_config(), "TORCH_VERSION=([0-9.]+)", "unknown");
  const std::string compiled = kTorchVersion;
  const bool same = loaded == "unknown" || compiled.starts_with(loaded) || loaded.starts_with(compiled);
  return {"LibTorch",
          text("compiled against ", compiled, ", loaded ", loaded,
               same ? "" : "; they differ: rebuild kvkeep for the one that is loaded"),
          same};
}

Finding abi_finding() {
#ifdef _GLIBCXX_USE_CXX11_ABI
  const std::string compiled = std::to_string(_GLIBCXX_USE_CXX11_ABI);
  const std::string loaded = first_match(at::show_config(), "_GLIBCXX_USE_CXX11_ABI=([01])", compiled.c_str());
  return {"C++ ABI",
          text("_GLIBCXX_USE_CXX11_ABI=", compiled, compiled == loaded ? ", as LibTorch" : ", LibTorch has " + loaded),
          compiled == loaded};
#else
  return {"C++ ABI", "not libstdc++"};
#endif
}

Finding cuda_finding() {
  const bool card = has_nvidia_driver();
  const std::string driver = card ? "there is an NVIDIA driver here" : "there is no NVIDIA driver here";
#ifdef KVKEEP_CLI_CUDA
  if (!card) return {"CUDA", "kernels are compiled in; " + driver};
  try {
    static_cast<void>(DeviceOptions{"cuda:0"}.accelerator());
    return {"CUDA", "kernels are compiled in; they find cuda:0"};
  } catch (const std::exception& error) {  // the driver may be too old, or LibTorch may be without CUDA
    return {"CUDA", text("kernels are compiled in; ", driver, "; cuda:0 cannot be used: ", error.what()), false};
  }
#else
  return {"CUDA", "not compiled in; " + driver};
#endif
}

/// How threads wait for each other, according to the variables that LibTorch's OpenMP runtime reads.
std::string waiting() {
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})
    if (const char* value = std::getenv(name)) return text(name, "=", value);
  return "the OpenMP runtime's default";
}

/// LibTorch's OpenMP threads spin for milliseconds while they wait. On a core that other processes want too, this holds
/// up the very threads they wait for. The runtime reads the length of the spin once, before main(). So commands that
/// run a model, and doctor, which reports how threads wait, restart with a short spin unless the user has set one.
void restart_with_short_spins(const CLI::App& command, char** argv) {
  constexpr std::array<std::string_view, 8> kComputing = {"generate", "chat",   "eval",      "perplexity",
                                                          "fidelity", "record", "calibrate", "doctor"};
  if (std::ranges::find(kComputing, command.get_name()) == kComputing.end()) return;
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  std::error_code none;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
  if (!none && ::setenv("GOMP_SPINCOUNT", "1000", 1) == 0)
    ::execv(self.c_str(), argv);  // if this fails, the command continues as it is
}

/// kvkeep with what runs a model.
class Laboratory final : public Program {
 public:
  [[nodiscard]] std::vector<Run> add_commands(CLI::App& app) const override {
    return {add_policies(app),   add_plan(app),     add_replay(app, *this), add_doctor(app, *this),
            add_generate(app),   add_chat(app),     add_tokens(app),        add_eval(app),
            add_perplexity(app), add_fidelity(app), add_record(app),        add_calibrate(app)};
  }

  [[nodiscard]] std::string examples() const override {
    return text(kModelsAtHand, R"(

Examples:
  kvkeep policies                                           the policies to choose from
  kvkeep generate --model SmolLM2.gguf --chat --stop --prompt-file examples/lighthouse.txt \
      --policy ams-tova,preset=question,budget=192,prefill=cut
  kvkeep chat --model SmolLM2.gguf --policy ams-tova,budget=512,interval=64
  kvkeep eval --model examples/model --task ask --budgets 64 --policy full --policy tova --policy tova,rest=fold
  kvkeep perplexity --model SmolLM2.gguf --text prose.txt --budgets 256 --policy tova --policy snapkv
  kvkeep generate --model examples/model --task chain --seed 7 --policy ams-tova,budget=96,interval=32 \
      --max-new-tokens 200
  kvkeep plan --shape qwen7b --policy ams-tova,budget=1024 --batch 16 --length 32768
  kvkeep record --model examples/model --task ask --forced --policy ams-tova,budget=96,interval=32 --event 129 \
      --out event.safetensors
  kvkeep replay event.safetensors --policy ams-tova,budget=96,interval=32 --out kept.safetensors
)");
  }

  void prepare(const CLI::App& command, char** argv) const override { restart_with_short_spins(command, argv); }

  void set_threads(int threads) const override { cli::set_threads(threads); }

  [[nodiscard]] trace::Result replay(const std::string& kind, const io::SafetensorsFile& file,
                                     const std::filesystem::path& folder,
                                     std::unique_ptr<KVPolicy> policy) const override {
    if (kind == "span") return trace::replay_span(file, *policy);
    if (kind == "span_train") return trace::replay_span_train(file, *policy);
    if (kind == "decoder") return lm::replay_decoder(file, folder, *policy);
    return lm::replay_generate(file, folder, std::move(policy));
  }

  [[nodiscard]] std::vector<Finding> findings() const override {
    return {
        torch_finding(),
        abi_finding(),
        {"threads", text(at::get_num_threads(), " of ", std::thread::hardware_concurrency(), " hardware threads, with ",
                         at::get_cpu_capability(), " in LibTorch; waiting: ", waiting())},
        cuda_finding()};
  }

  [[nodiscard]] std::string reason(const std::exception& error) const override {
    const auto* torch = dynamic_cast<const c10::Error*>(&error);
    if (torch == nullptr) return said_by(error);
    const std::string why = torch->what_without_backtrace();
    return text("LibTorch: ", why.substr(0, why.find('\n')));
  }
};

}  // namespace

void set_threads(int threads) {
  const auto processors = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const int most = 16 * processors;
  if (threads > most)
    note(text("--threads: this machine has ", processors, processors == 1 ? " processor" : " processors", "; given ",
              threads, ", ", most, " are used"));
  if (threads > 0) at::set_num_threads(std::min(threads, most));
}

}  // namespace kvkeep::cli

int main(int argc, char** argv) {
  kvkeep::use_torch();
  const kvkeep::UsingThreads threads(kvkeep::torch_threads());
  kvkeep::lm::use_published_calibrations();
  kvkeep::cli::register_oracle();
  return kvkeep::cli::run(kvkeep::cli::Laboratory(), argc, argv);
}
