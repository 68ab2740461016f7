// SPDX-License-Identifier: Apache-2.0
// kvkeep record: writes traces from a run of the model.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <filesystem>

#include "commands.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvlab/record.h"
#include "model_options.h"
#include "oracle.h"
#include "retention.h"

namespace kvkeep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRecordExamples = R"(
Examples:
  kvkeep record --model examples/model --ids-file prompt.txt --policy tova,budget=96,interval=32 \
      --out event.safetensors
  kvkeep record --model examples/model --task ask --forced --policy ams-tova,budget=96,interval=32 --event 129 \
      --out event.safetensors
  kvkeep record --model examples/model --ids-file prompt.txt --kind prefill --window 32 --out prefill.safetensors

Then: kvkeep replay event.safetensors --policy ams-tova,budget=96 --out kept.safetensors

Kinds: event      what a policy sees right before it decides after decode step STEP: all full layers, after any
                  earlier events
       prefill    keys and queries of every layer after RoPE, as the prompt leaves them
       decoder, generate    the ids and the path of the checkpoint, for replay to run again
)";

struct RecordOptions {
  ModelOptions model;
  OutputOptions output;
  PromptOptions prompt;
  SamplingOptions sampling;
  std::string kind = "event", policy = "full", out;
  std::int32_t step = 0, new_tokens = 0, queries = 256, window = 0, query_tail = 8;
  bool forced = false;
};

// The path of the checkpoint relative to the folder of the trace, which names it in UTF-8.
fs::path model_from(const RecordOptions& o) {
  std::error_code error;
  const fs::path out = fs::absolute(o.out, error);
  const fs::path folder = error ? fs::path() : fs::absolute(o.model.folder, error);
  fs::path model = error ? fs::path() : fs::proximate(folder, out.parent_path(), error);
  KVKEEP_REQUIRE(!error, "record: the path from the folder of '", o.out, "' to '", o.model.folder, "' is unknown (",
                 error.message(), "); allowed existing folders");
  KVKEEP_REQUIRE(io::is_utf8(model.string()), "record: the trace would name its checkpoint '", model.string(),
                 "', which is not UTF-8; allowed a path in UTF-8");
  return model;
}

trace::Result event_of(const RecordOptions& o, lm::Decoder& decoder, const PromptOptions::Prompt& prompt,
                       std::unique_ptr<KVPolicy> policy) {
  lm::Request request{.prompt = prompt.ids};
  if (o.forced) {
    KVKEEP_REQUIRE(prompt.sample.has_value(), "record: --forced feeds a task's own trace; allowed with --task");
    request = lm::Request(forced_request(*prompt.sample));
    KVKEEP_REQUIRE(o.step < request.new_tokens, "record: --event ", o.step,
                   " is past the trace of the sample; allowed 1 to ", request.new_tokens - 1);
  } else {
    const Trigger trigger = policy->trigger();
    const ModelSpec& spec = decoder.spec();
    const std::int64_t slot_bytes =
        static_cast<std::int64_t>(spec.full_layers().size()) * spec.kv_heads * lm::bytes_of_slot(spec, o.model.dtype());
    const std::int64_t due =
        trigger.never ? 1 : trigger.first_event(static_cast<std::int64_t>(prompt.ids.size()), slot_bytes, 1 << 20);
    KVKEEP_REQUIRE(o.step > 0 || !trigger.never,
                   "record: policy full never decides; allowed with --event STEP, or name an evicting --policy");
    request.new_tokens =
        o.new_tokens > 0 ? o.new_tokens : static_cast<std::int32_t>(std::max<std::int64_t>({due, o.step, 1})) + 1;
  }
  request.sampling = o.sampling.sampling;
  Progress progress(std::max(request.new_tokens, o.step + 1), o.output.quiet);
  progress.label("tokens until the event");
  const lm::EventRecording recording{.step = o.step > 0 ? std::optional(o.step) : std::nullopt,
                                     .queries = o.queries,
                                     .cache_dtype = o.model.dtype(),
                                     .progress = [&](std::int64_t predicted) { progress.advance(predicted); }};
  return lm::record_event(decoder, std::move(policy), std::move(request), recording);
}

trace::Result record(const RecordOptions& o) {
  lm::check_sampling(o.sampling.sampling);
  KVKEEP_REQUIRE(o.kind == "event" || o.sampling.sampling.greedy(), "record: --temperature with --kind ", o.kind,
                 ", which draws no tokens; allowed with --kind event");
  std::unique_ptr<KVPolicy> policy = make_untold(PolicyText(o.policy));
  const PromptOptions::Prompt prompt = o.prompt.read(o.model.folder);
  lm::Decoder decoder = o.model.open();
  for (std::size_t i = 0; i < prompt.ids.size(); ++i)
    KVKEEP_REQUIRE(prompt.ids[i] < decoder.config().vocab, "record: token id ", prompt.ids[i], " at place ", i,
                   " is outside the vocabulary; allowed 0 to ", decoder.config().vocab - 1);
  if (o.kind == "event") return event_of(o, decoder, prompt, std::move(policy));
  if (o.kind == "prefill") {
    Progress progress(decoder.spec().num_layers(), o.output.quiet);
    progress.label("layers");
    return lm::record_prefill(decoder, prompt.ids, o.window, [&](std::int64_t layers) { progress.advance(layers); });
  }
  const std::int32_t new_tokens = o.new_tokens > 0 ? o.new_tokens : 32;
  if (o.kind == "decoder")
    return lm::record_decoder(model_from(o), prompt.ids, new_tokens,
                              std::min<std::int32_t>(o.query_tail, static_cast<std::int32_t>(prompt.ids.size())));
  return lm::record_generate(model_from(o), prompt.ids, new_tokens);
}

void run(const RecordOptions& o) {
  const trace::Result trace = record(o);
  io::write_safetensors(o.out, trace.tensors, trace.metadata);
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : trace.tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  const auto step = trace.metadata.find("step");
  Table table({{"kind", "kind", false},
               {"step", "step"},
               {"tensors", "tensors"},
               {"bytes", "bytes"},
               {"trace", "trace", false}});
  table.add({o.kind, step == trace.metadata.end() ? Cell(nullptr, "-") : Cell(std::int64_t{std::stoll(step->second)}),
             static_cast<std::int64_t>(trace.tensors.size()), bytes_cell(bytes), o.out});
  if (o.output.format == Format::json)
    print(io::written(table.json().front()) + "\n");
  else
    print(table.text(o.output.format));
}

}  // namespace

Run add_record(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("record", "write a trace from a run, to replay any policy on");
  auto o = std::make_shared<RecordOptions>();
  o->model.add(*sub);
  o->prompt.add(*sub);
  o->sampling.add(*sub);
  sub->add_option("--kind", o->kind, "kind of trace")
      ->check(one_of({"event", "prefill", "decoder", "generate"}))
      ->option_text("event|prefill|decoder|generate [event]");
  sub->add_flag_callback("--prefill", [o] { o->kind = "prefill"; }, "the same as --kind prefill");
  as_policy(sub->add_option(
                "--policy", o->policy,
                std::string("event: the policy that runs until the event and says when it is due; ") + kPolicyHelp))
      ->option_text("POLICY [full]");
  sub->add_option(
         "--event", o->step,
         "event: after which decode step, as kvkeep generate counts them, also if the policy is not due there; "
         "default: the first at which it is")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("STEP");
  sub->add_flag("--forced", o->forced, "event: feed the task's own trace instead of the model's tokens");
  sub->add_option("--queries", o->queries, "event: newest queries to keep")
      ->check(CLI::Range(1, 1 << 20))
      ->option_text("N [256]");
  sub->add_option("--window", o->window, "prefill: newest queries to keep; 0 keeps all")
      ->check(CLI::Range(0, 1 << 24))
      ->option_text("N [0]");
  sub->add_option("--max-new-tokens", o->new_tokens, "tokens to predict")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N");
  as_output(sub->add_option("--out", o->out, "the trace file to write (safetensors)"))->required()->option_text("FILE");
  o->output.add(*sub);
  sub->footer(kRecordExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
