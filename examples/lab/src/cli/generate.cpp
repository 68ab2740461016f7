// SPDX-License-Identifier: Apache-2.0
// kvkeep generate: decodes, and shows what every event kept.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <sstream>

#include "commands.h"
#include "contests.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvlab/generation.h"
#include "model_options.h"
#include "oracle.h"
#include "picture.h"
#include "retention.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kGenerateExamples = R"(
Examples:
  kvkeep generate --model SmolLM2.gguf --chat --prompt-file examples/lighthouse.txt --stop \
      --policy ams-tova,preset=question,budget=192,prefill=cut
  kvkeep generate --model SmolLM2.gguf --chat --prompt "Why is the sky blue?" --policy tova,budget=64,interval=16 --stop
  kvkeep generate --model SmolLM2.gguf --prompt-file article.txt --policy snapkv,budget=256 --html kept.html
  kvkeep generate --model SmolLM2.gguf --prompt "One day" --temperature 0.8 --top-p 0.95 --sampling-seed 7
  kvkeep generate --model examples/model --task chain --seed 7 --policy ams-tova,budget=96,interval=32 \
      --max-new-tokens 200
  kvkeep generate --model examples/model --task needle \
      --policy fastkv,layer=1,budget=96,window=16+ams-tova,budget=96,interval=32
  kvkeep generate --model examples/model --task ask --forced --policy tova,budget=32,interval=32,recent=16,rest=fold
  kvkeep generate --model examples/model --ids 1,8,20,150,160 --policy full --max-new-tokens 16 -o json
  kvkeep generate --model examples/model --task ask --policy ams-tova,budget=96,interval=32 --device cuda:0
  kvkeep generate --model SmolLM2.gguf --prompt-file article.txt --policy tova,budget=256 --device cuda:0 --copies 32
  kvkeep generate --model examples/model --task ask --forced --policy tova,budget=64,interval=32 --retention tova.json
)";

struct GenerateOptions {
  ModelOptions model;
  OutputOptions output;
  PromptOptions prompt;
  SamplingOptions sampling;
  std::string policy = "full", retention, html, pin;
  std::int32_t new_tokens = 0, page_size = 0, copies = 1;
  bool forced = false, stop_at_end = false;
};

struct Outcome {
  std::string policy_json, text;  // text: what was written; empty if the prompt was not text
  ModelSpec spec;
  lm::Completion done;
  lm::Pace pace;
  Totals totals;
  lm::Sampling sampling;
};

// One row per layer and head.
void add_event_rows(Table& table, const lm::SequenceEvent& event, const ModelSpec& spec) {
  const std::vector<std::int32_t> layers = spec.full_layers();
  for (std::size_t r = 0; r < event.positions.size(); ++r) {
    const auto head = static_cast<std::int32_t>(r) % spec.kv_heads;
    const std::string kept = compact_ranges(event.positions[r]);
    table.add({event.step, layers[r / static_cast<std::size_t>(spec.kv_heads)], head, event.length_before,
               static_cast<std::int64_t>(event.positions[r].size()), bytes_cell(event.bytes_before),
               bytes_cell(event.bytes_after), kept});
  }
}

Table event_table(const Outcome& outcome) {
  Table table({{"step", "step"},
               {"layer", "layer"},
               {"head", "KV head"},
               {"length_before", "slots before"},
               {"length_after", "after"},
               {"bytes_before", "cache before"},
               {"bytes_after", "cache after"},
               {"kept", "logical positions kept", false}});
  for (const lm::SequenceEvent& event : outcome.done.events) add_event_rows(table, event, outcome.spec);
  return table;
}

// One row per event, for people who read the text: a row per layer and head would bury it.
Table short_event_table(const Outcome& outcome) {
  Table table({{"step", "step"},
               {"length_before", "slots before"},
               {"length_after", "after"},
               {"bytes_before", "cache before"},
               {"bytes_after", "cache after"},
               {"some", "positions that some head holds"},
               {"all", "that all hold"}});
  for (const lm::SequenceEvent& event : outcome.done.events) {
    std::map<std::int32_t, std::size_t> holders;
    for (const std::vector<std::int32_t>& row : event.positions)
      for (const std::int32_t position : row) ++holders[position];
    const auto all =
        std::ranges::count_if(holders, [&](const auto& held) { return held.second == event.positions.size(); });
    table.add({event.step, event.length_before, event.length_after, bytes_cell(event.bytes_before),
               bytes_cell(event.bytes_after), static_cast<std::int64_t>(holders.size()),
               static_cast<std::int64_t>(all)});
  }
  return table;
}

// What a policy that narrows made of the prompt.
std::string prompt_line(const PromptReport& prompt) {
  std::string line = text("Prompt: ", prompt.tokens, " tokens");
  if (prompt.selection_layer >= 0) line += text("; layer ", prompt.selection_layer, " selected");
  line += prompt.second_pass ? text("; ", prompt.going_on.size(), " of them ran again as a prompt of their own")
                             : text("; ", prompt.going_on.size(), " reached the end of the model");
  return line;
}

// NaN (nothing was computed) becomes null.
Json prompt_json(const PromptReport& prompt) {
  Json variance = Json::array();
  for (const double x : prompt.relative_variance) variance.push_back(std::isnan(x) ? Json(nullptr) : Json(x));
  return {{"tokens", prompt.tokens},       {"selection_layer", prompt.selection_layer},
          {"relative_variance", variance}, {"entered", prompt.entered},
          {"going_on", prompt.going_on},   {"second_pass", prompt.second_pass}};
}

// What was folded by the end, and how much of it was read.
std::string folded_line(const Outcome& outcome) {
  const FoldedState& folded = *outcome.done.folded;
  const ReadCounts& reads = outcome.totals.reads;
  std::string line =
      text("Folded: ", folded.tokens, " slots into ", folded.spans, folded.spans == 1 ? " span" : " spans", "; near ",
           bytes_cell(folded.near_bytes).shown, ", far ", bytes_cell(folded.far_bytes).shown);
  line += text("; read ", bytes_cell(reads.bytes).shown, " of factors");
  if (reads.queries > 0)
    line += text("; opened per query and KV head: ", real_cell(reads.a_query(reads.zooms), 2).shown, " spans with ",
                 real_cell(reads.a_query(reads.tokens), 1).shown, " tokens");
  return line;
}

Json folded_json(const Outcome& outcome) {
  const FoldedState& folded = *outcome.done.folded;
  const ReadCounts& reads = outcome.totals.reads;
  return {{"spans", folded.spans},         {"tokens", folded.tokens},       {"near_bytes", folded.near_bytes},
          {"far_bytes", folded.far_bytes}, {"moved_bytes", reads.bytes},    {"queries", reads.queries},
          {"opened", reads.zooms},         {"tokens_opened", reads.tokens}, {"did_not_fit", reads.unmet}};
}

std::string markdown(const Outcome& outcome) {
  const std::size_t events = outcome.done.events.size();
  std::ostringstream out;
  if (outcome.text.empty()) {  // text was printed as it came
    out << "Tokens:";
    for (const std::int32_t token : outcome.done.tokens) out << " " << token;
  }
  if (outcome.done.prompt) out << "\n\n" << prompt_line(*outcome.done.prompt);
  out << "\n\nCache: peak " << bytes_cell(outcome.done.peak_bytes).shown << ", kept "
      << bytes_cell(outcome.done.kept_bytes).shown << ", " << events << (events == 1 ? " event" : " events");
  EventCounts counts;
  counts.add(outcome.done);
  if (events > 0) out << "; the scorer chose " << counts.chosen().shown << " of the slots that stayed";
  out << "\n";
  if (outcome.done.folded) out << folded_line(outcome) << "\n";
  if (events > 0) out << "\n" << (outcome.text.empty() ? event_table(outcome) : short_event_table(outcome)).markdown();
  return out.str();
}

Json json(const Outcome& outcome) {
  Json events = Json::array();
  for (const lm::SequenceEvent& event : outcome.done.events) {
    Json kept = Json::array();
    for (std::size_t r = 0; r < event.positions.size(); ++r) {
      if (r % static_cast<std::size_t>(outcome.spec.kv_heads) == 0) kept.push_back(Json::array());
      kept.back().push_back(event.positions[r]);
    }
    events.push_back({{"step", event.step},
                      {"length_before", event.length_before},
                      {"length_after", event.length_after},
                      {"bytes_before", event.bytes_before},
                      {"bytes_after", event.bytes_after},
                      {"slots_kept", event.slots_kept},
                      {"slots_chosen", event.slots_chosen},
                      {"kept", kept}});
  }
  Json all{{"policy", Json::parse(outcome.policy_json)}, {"tokens", outcome.done.tokens},
           {"peak_bytes", outcome.done.peak_bytes},      {"kept_bytes", outcome.done.kept_bytes},
           {"layers", outcome.spec.full_layers()},       {"events", events}};
  if (!outcome.text.empty()) all["text"] = outcome.text;
  if (const lm::Sampling& s = outcome.sampling; !s.greedy())
    all["sampling"] = {{"temperature", s.temperature}, {"top_p", s.top_p}, {"seed", s.seed}};
  if (outcome.done.prompt) all["prompt"] = prompt_json(*outcome.done.prompt);
  if (outcome.done.folded) all["folded"] = folded_json(outcome);
  return all;
}

// Tokens and events in one table: a token's row has no layer, an event's row has no token.
std::string csv(const Outcome& outcome) {
  Table table({{"kind", ""},
               {"step", ""},
               {"token", ""},
               {"layer", ""},
               {"head", ""},
               {"length_before", ""},
               {"length_after", ""},
               {"bytes_before", ""},
               {"bytes_after", ""},
               {"kept", ""}});
  const Cell none(nullptr, "");
  for (std::size_t s = 0; s < outcome.done.tokens.size(); ++s)
    table.add(
        {"token", static_cast<std::int64_t>(s), outcome.done.tokens[s], none, none, none, none, none, none, none});
  const std::vector<std::int32_t> layers = outcome.spec.full_layers();
  for (const lm::SequenceEvent& event : outcome.done.events)
    for (std::size_t r = 0; r < event.positions.size(); ++r)
      table.add({"event", event.step, none, layers[r / static_cast<std::size_t>(outcome.spec.kv_heads)],
                 static_cast<std::int32_t>(r) % outcome.spec.kv_heads, event.length_before,
                 static_cast<std::int64_t>(event.positions[r].size()), event.bytes_before, event.bytes_after,
                 compact_ranges(event.positions[r])});
  return table.csv();
}

// "0-31,40": positions as the tables show them, both ends included.
std::vector<PositionSpan> pinned_spans(const std::string& shown) {
  std::vector<PositionSpan> spans;
  const char *at = shown.data(), *const end = at + shown.size();
  while (at < end) {
    PositionSpan span;
    std::from_chars_result read = std::from_chars(at, end, span.begin);
    span.end = span.begin;
    if (read.ec == std::errc() && read.ptr < end && *read.ptr == '-')
      read = std::from_chars(read.ptr + 1, end, span.end);
    const bool more = read.ptr < end;
    KVKEEP_REQUIRE(read.ec == std::errc() && (!more || (*read.ptr == ',' && read.ptr + 1 < end)) && span.begin >= 0 &&
                       span.begin <= span.end && span.end < kMostPositions,
                   "generate: --pin is \"", shown, "\"; allowed positions such as 0-31,40");
    spans.push_back({span.begin, span.end + 1});
    at = read.ptr + (more ? 1 : 0);
  }
  return spans;
}

// Says which positions of --pin a text of this many tokens has not; empty if it has all.
std::string pins_beyond(const std::vector<PositionSpan>& pinned, std::int64_t tokens) {
  std::string beyond;
  for (const PositionSpan& span : pinned) {
    const std::int64_t first = std::max<std::int64_t>(span.begin, tokens), last = span.end - 1;
    if (first > last) continue;
    beyond += text(beyond.empty() ? "" : ",", first);
    if (first < last) beyond += text("-", last);
  }
  if (beyond.empty()) return "";
  return text("note: --pin: positions ", beyond, " never came; the text ended at ", tokens - 1);
}

lm::Request request_of(const GenerateOptions& o, const PromptOptions::Prompt& prompt) {
  constexpr std::int32_t kNewTokens = 128;
  lm::Request request{.prompt = prompt.ids, .new_tokens = o.new_tokens > 0 ? o.new_tokens : kNewTokens};
  if (o.forced) {
    KVKEEP_REQUIRE(prompt.sample.has_value(), "generate: --forced feeds a task's own trace; allowed with --task");
    request = forced_request(*prompt.sample);
    if (o.new_tokens > 0) request.new_tokens = std::min(request.new_tokens, o.new_tokens);
  }
  request.stop_at_end = o.stop_at_end;
  request.sampling = o.sampling.sampling;
  request.keep_positions = true;
  request.pinned = pinned_spans(o.pin);
  return request;
}

Outcome decode(const GenerateOptions& o, const PolicyText& policy_text, const PromptOptions::Prompt& prompt) {
  std::unique_ptr<KVPolicy> policy = policy_text.make();
  lm::Request request = request_of(o, prompt);
  lm::Decoder decoder = o.model.open();
  const std::string warning = warning_about(*policy);
  if (!o.output.quiet && !warning.empty()) note(warning);
  const bool streams = prompt.text.has_value() && o.output.format == Format::md;
  Progress progress(streams ? 0 : std::int64_t{o.copies} * request.new_tokens, o.output.quiet);
  lm::GeneratorOptions options{.places = o.copies,
                               .cache_dtype = o.model.dtype(),
                               .page_size = o.page_size,
                               .accelerator = o.model.device.accelerator()};
  options.hooks.on_step = [&](std::int64_t predicted) { progress.advance(predicted); };
  std::optional<lm::StreamDecoder> stream;
  std::string written;
  const auto show = [&](const std::string& more) {
    if (streams) print(more);
    written += more;
  };
  if (prompt.text) {
    stream.emplace(prompt.text->tokenizer);
    options.hooks.on_token = [&](SequenceId sequence, std::int32_t token) {
      if (sequence == 0 && (!o.stop_at_end || !decoder.config().ends(token))) show(stream->push(token));
    };
  }
  if (auto* oracle = dynamic_cast<Oracle*>(policy.get())) {
    KVKEEP_REQUIRE(prompt.sample.has_value(), "policy: oracle must know what is needed; allowed with --task");
    for (std::int32_t i = 0; i < o.copies; ++i) oracle->tell(i, *prompt.sample);
    options.hooks.before_decision = [oracle](const lm::DecisionSight& sight) { oracle->face(sight.view.sequences); };
  }
  const std::string name(policy->name());
  Outcome outcome{policy->to_json(), {}, decoder.spec(), {}, {}, {}, request.sampling};
  const Trigger trigger = policy->trigger();
  const std::string reach = reach_text(*policy);
  const std::vector<PositionSpan> pinned = request.pinned;
  lm::GenerationRun run = lm::generate(decoder, std::move(policy),
                                       std::vector(static_cast<std::size_t>(o.copies), request), std::move(options));
  progress.clear();
  if (stream) show(stream->finish());
  outcome.text = std::move(written);
  outcome.done = std::move(run.completions.front());
  outcome.pace = run.pace;
  outcome.totals = run.totals;
  if (outcome.done.events.empty() && !trigger.never && !o.output.quiet)
    note("note: there was no event; the policy is due at budget + interval slots, and the run did not reach that");
  const std::int64_t fed = std::ssize(prompt.ids) + std::max<std::int64_t>(std::ssize(outcome.done.tokens) - 1, 0);
  if (const std::string none = pins_beyond(pinned, fed); !o.output.quiet && !none.empty()) note(none);
  EventCounts counts;
  counts.add(outcome.done);
  if (const std::string none = counts.warning(name); !o.output.quiet && warning.empty() && !none.empty()) note(none);
  if (const std::string none = opened_nothing(policy_text.label(), reach, outcome.totals.reads);
      !o.output.quiet && !none.empty())
    note(none);
  return outcome;
}

// The text of each token of the prompt and of those fed after it (the last predicted one was not fed). A character that
// is spread over several tokens belongs to the last of them. Ids if the model has no tokenizer.
std::vector<std::string> pieces(const GenerateOptions& o, const PromptOptions::Prompt& prompt, const Outcome& outcome) {
  std::vector<std::int32_t> ids = prompt.ids;
  for (std::size_t s = 0; s + 1 < outcome.done.tokens.size(); ++s)
    ids.push_back(o.forced && prompt.sample ? prompt.sample->ids[prompt.ids.size() + s] : outcome.done.tokens[s]);
  std::optional<lm::StreamDecoder> decoder;
  if (prompt.text || lm::TextModel::is_there(o.model.folder))
    decoder.emplace(prompt.text ? prompt.text->tokenizer : lm::TextModel::open(o.model.folder).tokenizer);
  std::vector<std::string> shown;
  for (const std::int32_t id : ids) shown.push_back(decoder ? decoder->push(id) : kvkeep::text(id, " "));
  if (decoder && !shown.empty()) shown.back() += decoder->finish();
  return shown;
}

void run(const GenerateOptions& o) {
  lm::check_sampling(o.sampling.sampling);
  const PolicyText policy(o.policy);
  const PromptOptions::Prompt prompt = o.prompt.read(o.model.folder);
  const Outcome outcome = decode(o, policy, prompt);
  if (!o.retention.empty()) {
    const RetentionAbout about{o.model.folder, policy.label(), outcome.policy_json,
                               o.prompt.task,  o.prompt.seed,  static_cast<std::int32_t>(prompt.ids.size()),
                               o.forced,       prompt.sample};
    io::write_text_atomically(o.retention, io::written(retention_json(about, outcome.spec, outcome.done)) + "\n");
  }
  if (!o.html.empty()) {
    io::KeptText kept =
        kept_text(outcome.spec, outcome.done, static_cast<std::int32_t>(prompt.ids.size()), pieces(o, prompt, outcome));
    kept.model = std::filesystem::path(o.model.folder).filename().string();
    kept.policy = policy.text();
    io::write_text_atomically(o.html, io::kept_page(kept));
  }
  const std::string shown = o.output.format == Format::md    ? markdown(outcome)
                            : o.output.format == Format::csv ? csv(outcome)
                                                             : text(io::written(json(outcome)), "\n");
  print(shown);
  if (!o.output.quiet && outcome.pace.decode_seconds > 0)
    note(text(real_cell(static_cast<double>(outcome.pace.decoded_tokens) / outcome.pace.decode_seconds, 1).shown,
              " tokens/s, prompt in ", real_cell(outcome.pace.prefill_seconds, 2).shown, " s"));
}

}  // namespace

Run add_generate(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("generate", "decode under a policy: the tokens, and what every event kept");
  auto o = std::make_shared<GenerateOptions>();
  o->model.add(*sub);
  o->model.device.add(*sub);
  o->prompt.add(*sub);
  o->sampling.add(*sub);
  as_policy(sub->add_option("--policy", o->policy, kPolicyHelp))->option_text("POLICY [full]");
  sub->add_option("--pin", o->pin, "positions that stay through every event, such as 0-31,40")->option_text("SPANS");
  sub->add_option("--max-new-tokens", o->new_tokens, "tokens to predict")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N [128; all of the trace with --forced]");
  sub->add_flag("--forced", o->forced, "feed the task's own trace instead of the model's tokens (teacher forcing)");
  sub->add_option("--page-size", o->page_size,
                  "keep the cache in pages of N slots, up to 1024; does not change the tokens")
      ->option_text("N [0: dense]");
  sub->add_option("--copies", o->copies, "decode N copies of the prompt at once, to measure; shows the first")
      ->check(CLI::Range(1, 4096))
      ->option_text("N [1]");
  as_output(
      sub->add_option("--html", o->html,
                      "write a page: the text, each token shaded by how many heads still hold it, at every event"))
      ->option_text("FILE.html");
  sub->add_flag("--stop", o->stop_at_end, "stop after an end token of the model");
  as_output(sub->add_option("--retention", o->retention,
                            "write what stayed over time, for examples/lab/plots/plot_retention.py"))
      ->option_text("FILE.json");
  o->output.add(*sub);
  sub->footer(kGenerateExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
