// SPDX-License-Identifier: Apache-2.0
// kvkeep replay: runs a policy on a trace.

#include <CLI/Option.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>

#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvkeep/policy/asl.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kReplayExamples = R"(
Examples:
  kvkeep replay event.safetensors --policy ams-tova,budget=1024 --out kept.safetensors
  kvkeep replay event.safetensors --policy policy.json --out kept.safetensors -o json
  kvkeep replay prefill.safetensors --policy asl,budget=256,window=16,cache=256 --out chosen.safetensors
  kvkeep replay generate.safetensors --policy tova,budget=64,interval=32 --out tokens.safetensors
  kvkeep replay span.safetensors --policy sekv,recent=256,zoom=mass --out answers.safetensors

--ranks FILE.json writes the rank of every token in every layer of a prefill trace, for plot_ranks.py
(examples/lab/plots).

Kinds of traces: event, prefill, decoder, generate, span, span_train. Refused input ends with exit status 2 and a
message, and no result is written.
)";

struct ReplayOptions {
  std::string trace, policy, out, ranks;
  int threads = 0;
  OutputOptions output;
};

// Checked before the policy is read: the kind says what a trace is about.
std::string known_kind(const io::SafetensorsFile& file) {
  const std::string kind = trace::kind_of(file);
  constexpr std::string_view kKinds[] = {"event", "prefill", "decoder", "generate", "span", "span_train"};
  KVKEEP_REQUIRE(std::ranges::find(kKinds, kind) != std::end(kKinds), file.where(), ": a trace of kind \"",
                 shortened(kind), "\" is not known; allowed event, prefill, decoder, generate, span and span_train");
  return kind;
}

trace::Result replay(const Program& program, const std::string& kind, const io::SafetensorsFile& file,
                     const std::filesystem::path& folder, std::unique_ptr<KVPolicy> policy) {
  if (kind == "event") return trace::replay_event(file, *policy);
  if (kind == "prefill") return trace::replay_prefill(file, *policy);
  return program.replay(kind, file, folder, std::move(policy));
}

// What examples/lab/plots/plot_ranks.py draws. Observed as the policy does if it ranks prompts.
std::string ranks_json(const io::SafetensorsFile& file, const KVPolicy& policy, const trace::Result& result) {
  const auto* asl = dynamic_cast<const Asl*>(&policy);
  const AslOptions observed = asl == nullptr ? AslOptions{} : asl->options();
  nlohmann::ordered_json json{{"kvkeep_ranks", 1},
                              {"policy", nlohmann::ordered_json::parse(policy.to_json())},
                              {"window", observed.selector.window}};
  for (const auto& [name, tensor] : result.tensors) {
    if (name == "selection_layer") json[name] = *tensor.data<std::int32_t>();
    if (name == "tokens")
      json["going_on"] =
          std::vector<std::int32_t>(tensor.data<std::int32_t>(), tensor.data<std::int32_t>() + tensor.numel());
    if (name != "relative_variance") continue;
    for (std::int64_t l = 0; l < tensor.numel(); ++l) {
      const double x = tensor.data<double>()[l];
      json[name].push_back(std::isnan(x) ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(x));
    }
  }
  json["ranks"] =
      trace::prompt_ranks(file, {.window = observed.selector.window, .pool = observed.pool, .kind = observed.pooling});
  return io::written(json) + "\n";
}

void run(const Program& program, const ReplayOptions& o) {
  const io::SafetensorsFile file = io::SafetensorsFile::open(o.trace);
  const std::string kind = known_kind(file);
  KVKEEP_REQUIRE(o.ranks.empty() || kind == "prefill", "replay: --ranks of a trace of kind \"", kind,
                 "\"; allowed with a prefill trace");
  const std::filesystem::path folder = std::filesystem::path(o.trace).parent_path();
  if (const auto model = file.metadata().find("model"); model != file.metadata().end())
    run_files().reads("the trace", folder / model->second);
  program.set_threads(o.threads);
  std::unique_ptr<KVPolicy> policy = PolicyText(o.policy).make();
  const std::string name(policy->name()), warning = o.output.quiet ? "" : warning_about(*policy);
  const auto start = std::chrono::steady_clock::now();
  const std::unique_ptr<KVPolicy> drawn = o.ranks.empty() ? nullptr : PolicyText(o.policy).make();
  const trace::Result result = replay(program, kind, file, folder, std::move(policy));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string ranks = drawn == nullptr ? std::string() : ranks_json(file, *drawn, result);
  io::write_safetensors(o.out, result.tensors, result.metadata);
  if (drawn != nullptr) io::write_text_atomically(o.ranks, ranks);
  if (!warning.empty()) note(warning);

  Table table({{"kind", "kind", false},
               {"policy", "policy", false},
               {"tensors", "tensors"},
               {"slots_chosen", "slots chosen"},
               {"slots_dropped", "slots dropped"},
               {"ms", "ms"},
               {"result", "result", false}});
  const auto slots = [&result](const char* what) {
    const auto found = result.metadata.find(what);
    return found == result.metadata.end() ? std::int64_t{0} : std::int64_t{std::stoll(found->second)};
  };
  table.add({kind, name, static_cast<std::int64_t>(result.tensors.size()), slots("slots_chosen"),
             slots("slots_dropped"), real_cell(seconds * 1000, 2), o.out});
  if (o.output.format == Format::json)
    print(io::written(table.json().front()) + "\n");
  else
    print(table.text(o.output.format));
}

}  // namespace

Run add_replay(CLI::App& app, const Program& program) {
  CLI::App* sub = app.add_subcommand("replay", "run a policy on a recorded trace");
  auto o = std::make_shared<ReplayOptions>();
  as_input(sub->add_option("trace", o->trace, "a trace file (docs/reference/trace-format.md)"))
      ->required()
      ->option_text("TRACE");
  as_policy(sub->add_option("--policy", o->policy, kPolicyHelp))->required()->option_text("POLICY");
  as_output(sub->add_option("--out", o->out, "result file to write (safetensors)"))->required()->option_text("FILE");
  as_output(sub->add_option("--ranks", o->ranks, "prefill: write the ranks of every layer, for plot_ranks.py"))
      ->option_text("FILE.json");
  sub->add_option("--threads", o->threads, "CPU threads; 0: one for each processor")
      ->check(CLI::Range(0, kMostThreads))
      ->option_text("N [0]");
  o->output.add(*sub);
  sub->footer(kReplayExamples);
  return [&program, o] { run(program, *o); };
}

}  // namespace kvkeep::cli
