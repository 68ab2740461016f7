// SPDX-License-Identifier: Apache-2.0
// kvkeep plan: what a policy costs and saves in memory, by arithmetic alone.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <array>
#include <map>

#include "forecast.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/prefill.h"
#include "plan.h"
#include "shapes.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

// What --dtype takes. 8bit: whichever, without its scales.
const std::map<std::string, Dtype> kDtypes{{"f32", Dtype::f32}, {"f16", Dtype::f16},   {"bf16", Dtype::bf16},
                                           {"8bit", Dtype::i8}, {"q8_0", Dtype::q8_0}, {"q4_0", Dtype::q4_0}};

constexpr const char* kPlanExamples = R"(
Examples:
  kvkeep plan --shape qwen7b --policy ams-tova,budget=1024 --batch 16 --length 32768
  kvkeep plan --shape qwen3-32b --policy snapkv,budget=4096 --length 131072 --dtype 8bit
  kvkeep plan --shape llama8b --policy ams-expected,preset=question,ratio=0.5 --dtype q4_0
  kvkeep plan --shape 32:32:8:128 --policy tova,ratio=0.75,interval=256 --length 16384 --prompt 4000 --page-size 1
  kvkeep plan --model examples/model --policy streaming,bytes=200000 --length 1024 --dtype f32 -o json
  kvkeep plan --shape qwen7b --policy snapkv,budget=8192,prefill=pieces --length 101000 --prompt 100000 --piece 512
  kvkeep plan --shape qwen7b --policy sekv,budget=2048 --prompt 32000
  kvkeep plan --shape qwen7b --policy asl,budget=2048+tova,budget=1024,rest=fold --prompt 32000
  kvkeep plan --gpu h100 --shape llama8b --policy ams-tova,budget=4096,prefill=cut --length 32768 --prompt 31744
  kvkeep plan --gpu h200 --shape llama8b --policy streaming,budget=4096 --length 32768 --prompt 1024 --rate 2

No weights are read and nothing is run: the policy's own trigger and limits are followed token by token.
slots         what a row (layer, KV head) holds; a range if heads differ
full          the cache with nothing dropped, at --length tokens
peak          just before the event that finds the most slots; the event comes after its step's attention, so this
              much room is needed
kept          right after the last event
kvkeep's own  position, credit, tally and given score of every slot, the newest queries, and the flat arrays of one
              event. A scorer's workspace per thread is extra: docs/method/scorers.md has its formula.
fits          sequences under this policy, each at its peak, that fit in the memory of the batch with a full cache

Policies that fold (sekv, rest=fold) or narrow prompts (asl and its relatives) hold what the text decides. For them
every figure has a least and a most that no text leaves: `near` is K and V of slots, coarse entries and sketches, as
kvkeep generate and eval count cache bytes; `far` the factors, at most the folded rows themselves.
docs/method/memory.md says what follows from which option.

With --gpu it predicts what one GPU serves, with the policy and with the full cache: how many requests fit, how long a
step takes with so many in flight, and what becomes of requests that arrive at random (Poisson), all with --prompt
tokens and an answer up to --length. It is a roofline: bytes at the rate of reading, operations at --utilisation of the
products; only events of a policy, and showing queries to it, are times that an H100 took. What is assumed stands below
the tables. How good answers are is not predicted: kvkeep eval measures that.

Bytes are those of K and V with pages rounded up to --page-size slots. The heads of a layer share its pages, so the
longest row counts.
Sliding layers hold their window and are never cut. --shape takes layers:query heads:KV heads:head size, or a model:
)";

ModelSpec spec_of(const PlanOptions& o) {
  if (!o.model.empty()) return shape_in(o.model, "--model");
  return is_shape(o.shape) ? shape_called(o.shape) : shape_in(o.shape, "--shape");
}

using PlannedExactly = Planned<Forecast>;

constexpr std::int32_t kPiece = 2048;  // llama.cpp's n_batch

// Bytes are per layer.
Table layer_table(const PlannedExactly& out) {
  Table table({{"layers", "layers", false},
               {"kind", "kind", false},
               {"full_slots", "full slots"},
               {"full_bytes", "per layer"},
               {"peak_slots", "peak slots"},
               {"peak_bytes", "per layer"},
               {"kept_slots", "kept slots"},
               {"kept_bytes", "per layer"}});
  each_run(out, [&](const std::string& layers, const char* kind, const LayerForecast& layer) {
    table.add({layers, kind, slots_text(layer.full), bytes_cell(layer.full.bytes), slots_text(layer.peak),
               bytes_cell(layer.peak.bytes), slots_text(layer.kept), bytes_cell(layer.kept.bytes)});
  });
  return table;
}

Table total_table(const PlanOptions& o, const PlannedExactly& out) {
  Table table(
      {{"what", "K and V of all layers", false}, {"sequence", "per sequence"}, {"batch", text("batch of ", o.batch)}});
  const auto add = [&](const char* what, std::int64_t bytes) {
    table.add({what, bytes_cell(bytes), bytes_cell(bytes * o.batch)});
  };
  add("full cache", out.sequence.full_bytes);
  add("peak", out.sequence.peak_bytes);
  add("kept", out.sequence.kept_bytes);
  each_own(out.own, add);
  add("peak with all of that", out.sequence.peak_bytes + out.own.sum());
  return table;
}

std::string markdown(const PlanOptions& o, const PlannedExactly& out) {
  const Forecast& s = out.sequence;
  std::string head = token_text(o, s.slot_bytes);
  if (out.policy.trigger().never)
    head += text(out.policy.name(), " never cuts.\n");
  else if (s.events == 0)
    head += text("No event within ", o.length, " tokens.\n");
  else
    head += text(s.events, s.events == 1 ? " event" : " events", ", the first at token ", s.first_event,
                 ", the last at token ", s.last_event, ". Of the slots that it keeps, the scorer chooses ",
                 share_cell(static_cast<double>(s.chosen_slots) / static_cast<double>(s.kept_slots)).shown, ".\n");
  if (out.policy.trigger().kind == Trigger::Kind::named)
    head += "After the prompt the program names its events, and none is counted here.\n";
  if (out.policy.trigger().thins)
    head += "Rows keep what passes, and may end up unequal: slots are the most that they may hold.\n";
  else if (out.policy.trigger().ragged)
    head +=
        "Rows may end up unequal. If the data decide what each head of a layer holds, slots are those of an average "
        "row.\n";
  return text(head, "\n", layer_table(out).markdown(), "\n", total_table(o, out).markdown(), room_text(o, out.fits),
              " under ", out.policy.name(), ": ", std::max<std::int64_t>(0, out.fits - o.batch), " more.\n");
}

Json slots_json(const LayerSlots& slots) {
  return {{"slots_least", slots.least}, {"slots_most", slots.most}, {"bytes", slots.bytes}};
}

std::string json(const PlanOptions& o, const PlannedExactly& out) {
  const Forecast& s = out.sequence;
  return json_text(
      o, out,
      {{"events", s.events},
       {"first_event", s.events > 0 ? Json(s.first_event) : Json(nullptr)},
       {"last_event", s.events > 0 ? Json(s.last_event) : Json(nullptr)},
       {"kept_slots", s.kept_slots},
       {"chosen_slots", s.chosen_slots}},
      [](const LayerForecast& layer) -> Json {
        return {{"full", slots_json(layer.full)}, {"peak", slots_json(layer.peak)}, {"kept", slots_json(layer.kept)}};
      },
      [&](std::int64_t n) -> Json {
        return {{"full_bytes", s.full_bytes * n}, {"peak_bytes", s.peak_bytes * n}, {"kept_bytes", s.kept_bytes * n}};
      });
}

// Layers, then one sequence, the batch, and what fits into the batch's full caches.
std::string csv(const PlanOptions& o, const PlannedExactly& out) {
  Table table(
      columns_of({"what", "layer", "kind", "sequences", "full_slots", "full_bytes", "peak_slots_least",
                  "peak_slots_most", "peak_bytes", "kept_slots_least", "kept_slots_most", "kept_bytes", "own_bytes"}));
  const Cell none(nullptr, "");
  for (std::size_t l = 0; l < out.sequence.layers.size(); ++l) {
    const LayerForecast& layer = out.sequence.layers[l];
    table.add({"layer", static_cast<std::int64_t>(l), kind_text(out.spec.layers[l].kind), 1, layer.full.most,
               layer.full.bytes, layer.peak.least, layer.peak.most, layer.peak.bytes, layer.kept.least, layer.kept.most,
               layer.kept.bytes, none});
  }
  const auto total = [&](const char* what, std::int64_t n) {
    table.add({what, none, none, n, none, out.sequence.full_bytes * n, none, none, out.sequence.peak_bytes * n, none,
               none, out.sequence.kept_bytes * n, out.own.sum() * n});
  };
  total("sequence", 1);
  total("batch", o.batch);
  total("fits", out.fits);
  return table.csv();
}

void run(const PlanOptions& o) {
  KVKEEP_REQUIRE(o.prompt <= o.length, "--prompt: ", o.prompt, " tokens of a sequence of ", o.length,
                 "; allowed at most --length");
  const ModelSpec spec = spec_of(o);
  const std::unique_ptr<KVPolicy> policy = PolicyText(o.policy).make();
  const bool in_pieces = policy->trigger().prefill == Trigger::Prefill::pieces;
  const bool on_gpu = o.serving.asked();
  if (!on_gpu) refuse_without_gpu(o.serving);
  KVKEEP_REQUIRE(o.piece == 0 || in_pieces || on_gpu, "--piece: ", o.piece, " tokens, but ", policy->name(),
                 " cuts no prompt before it has ended; allowed with prefill=pieces, or --gpu");
  const SequencePlan plan{.prompt = o.prompt,
                          .length = o.length,
                          .dtype = kDtypes.at(o.dtype),
                          .page_size = o.page_size,
                          .piece = !in_pieces && !on_gpu ? 0
                                   : o.piece > 0         ? o.piece
                                                         : kPiece};
  for (const std::int32_t dim : {spec.key_dim, spec.value_dim})
    KVKEEP_REQUIRE(dim % numbers_of(plan.dtype) == 0, "--dtype: ", o.dtype, " stores blocks of ",
                   numbers_of(plan.dtype), " numbers; the head size is ", dim, "; allowed a multiple of ",
                   numbers_of(plan.dtype), ", or another dtype");
  const auto warn = [&] {
    const std::string warning = warning_about(*policy);
    if (!o.output.quiet && !warning.empty()) note(warning);
  };
  if (on_gpu) {
    const std::string answer = serving_text(o, spec, *policy, plan);
    warn();
    return print(answer);
  }
  const double most = static_cast<double>(spec.num_layers()) * spec.kv_heads *
                      static_cast<double>(plan.slot_bytes(spec)) * (static_cast<double>(o.length) + o.page_size) *
                      o.batch;
  KVKEEP_REQUIRE(most < 1e18, "--batch: the full caches of ", o.batch,
                 " sequences would take more than 1e18 bytes; allowed less");
  const auto* prefill = dynamic_cast<const Prefill*>(policy.get());
  const KVPolicy& decoding = prefill != nullptr ? prefill->decoding() : *policy;
  const bool bounded = policy->narrows() || policy->memory() != nullptr;
  const auto planned = [&]<class Sequence>(const Sequence& sequence, std::int64_t peak_bytes) {
    Planned<Sequence> out{spec, *policy, sequence, {}, decoding.trigger().ragged, 0};
    if (bounded || !policy->trigger().never)  // else an engine without kvkeep
      out.own =
          own_bytes(spec, decoding, sequence.peak_slots, o.length, plan.dtype == Dtype::f32 ? 4 : 2);  // not quantised
    const std::int64_t each = peak_bytes + out.own.sum();
    out.fits = each > 0 ? sequence.full_bytes * o.batch / each : 0;
    return out;
  };
  if (bounded) {
    const BoundedForecast sequence = bounded_forecast(spec, *policy, plan);
    return print(bounds_text(o, planned(sequence, sequence.peak.most)));
  }
  const Forecast sequence = forecast(spec, *policy, plan);
  const PlannedExactly out = planned(sequence, sequence.peak_bytes);
  warn();
  print(o.output.format == Format::md ? markdown(o, out) : o.output.format == Format::csv ? csv(o, out) : json(o, out));
}

}  // namespace

std::string token_text(const PlanOptions& o, std::int64_t slot_bytes) {
  return text("A token takes ", bytes_cell(slot_bytes).shown, " of K and V in full layers (", o.dtype, "). ");
}

std::string room_text(const PlanOptions& o, std::int64_t fits) {
  return text("\nIn the memory of ", o.batch, o.batch == 1 ? " full cache" : " full caches", " there is room for ",
              fits, fits == 1 ? " sequence" : " sequences");
}

const char* kind_text(LayerKind kind) {
  constexpr std::array kKinds{"full", "remote", "sliding", "shared", "other"};
  return kKinds[static_cast<std::size_t>(kind)];
}

void each_own(const OwnBytes& own, const std::function<void(const char* what, std::int64_t bytes)>& add) {
  add("kvkeep's own: positions", own.positions);
  if (own.credit > 0) add("kvkeep's own: credit", own.credit);
  if (own.tally > 0) add("kvkeep's own: tally", own.tally);
  if (own.given > 0) add("kvkeep's own: given scores", own.given);
  if (own.surprisal > 0) add("kvkeep's own: surprisal", own.surprisal);
  if (own.queries > 0) add("kvkeep's own: queries", own.queries);
  if (own.event > 0) add("kvkeep's own: one event", own.event);
}

Run add_plan(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("plan", "memory under a policy, by layer and batch, from shapes alone");
  auto o = std::make_shared<PlanOptions>();
  CLI::Option_group* model = sub->add_option_group("model");
  as_input(
      model->add_option("--model", o->model, "a config.json or its folder (weights are not needed), or a GGUF file"),
      io::Source::file_or_folder)
      ->option_text("FILE|DIR");
  as_shape(model->add_option("--shape", o->shape, "a model by name (listed below), by numbers, or as --model takes it"))
      ->option_text("NAME|L:HQ:HKV:D|FILE|DIR");
  model->require_option(1);
  as_policy(sub->add_option("--policy", o->policy, kPolicyHelp))->required()->option_text("POLICY");
  sub->add_option("--length", o->length, "tokens of a sequence, prompt and answer")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N [32768]");
  sub->add_option("--prompt", o->prompt, "how many of them are the prompt, cached in one step, or in pieces")
      ->check(CLI::Range(0, 1 << 24))
      ->option_text("N [0]");
  sub->add_option("--piece", o->piece,
                  text("with prefill=pieces: tokens of each step of the prompt, ", kPiece, " if left out"))
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N");
  sub->add_option("--batch", o->batch, "sequences")->check(CLI::Range(1, 1 << 20))->option_text("N [1]");
  sub->add_option(
         "--dtype", o->dtype,
         "data type of K and V; 8bit has scales elsewhere, q8_0 and q4_0 are blocks of 32 numbers with their scale")
      ->check(one_of({"f32", "f16", "bf16", "8bit", "q8_0", "q4_0"}))
      ->option_text("f32|f16|bf16|8bit|q8_0|q4_0 [bf16]");
  sub->add_option("--page-size", o->page_size, "slots per page; 1 for a dense cache")
      ->check(CLI::Range(1, 1 << 20))
      ->option_text("N [16]");
  add_serving(*sub, o->serving);
  o->output.add(*sub);
  sub->footer(text(kPlanExamples, known_shapes(), "\n"));
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
